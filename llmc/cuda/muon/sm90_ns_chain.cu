// Newton-Schulz on sm90: one persistent kernel runs a chain of dependent GEMM tasks, bf16 or fp16, fp32
// accumulators.
//
//   tile        256 x 256 (or 256 x 192) x 64 per cluster of 2 CTAs: four slices of 64 rows, WGMMA
//               m64n256k16
//   pipeline    4 stages of 48 KB; the column operand is loaded half by each CTA and multicast
//   warps       warpgroups 0 and 1: WGMMA and epilogue, a slice each (232 registers). Warpgroup 2, one
//               thread per warp: TMA producer, tile scheduler, and a TMA-store warp for each consumer
//               warpgroup (40 registers)
//   scheduler   dynamic: an atomic tile counter, published to both CTAs through mbarriers (sched_full,
//               sched_empty). Tiles depend on earlier ones only, so that a tile waits for clusters that are
//               running. input_ready: the tasks that the tile reads are complete for its matrix
//   epilogue    alpha, beta d, rounding, transposition into the stages that held d; TMA stores
//               (sm90_ns_epilogue.cuh)
//   symmetric   only tiles on and below the diagonal are computed; boxes are also stored transposed, and on
//               the diagonal elements below it are copied above: the result is symmetric to the last bit
//
// Why 64 x 256 per warpgroup: m64n256k16 reads 10 KB of shared memory in 128 cycles while 6 KB are loaded,
// which is just its bandwidth; with 64 x 128 the tensor cores would idle a fifth of the time. Symmetric
// results with fewer tiles than clusters finish sooner in tiles of 256 x 192, because more clusters take
// part, each for three quarters of the time; and a product with x of which the last wave has few tiles
// finishes sooner with some narrow ones (choose_widths, ns_ops.cu).
#include "llmc/cuda/muon/sm90_ns_producer.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    PRODUCER_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    CONSUMER_REGISTERS = 232
};

#if HOPPER

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// State of a consumer warpgroup, without its accumulators: where kinds of tasks share them, the compiler
// serialises their WGMMAs.
struct Consumer {
    const SharedMemory &m;
    PipelineState<STAGES> pipe;
    Staging staging;
};

// Releases a stage to both CTAs' producers, because both write to it. One arrival per warp.
static __device__ __forceinline__ void consumer_release(const Consumer &p, int stage)
{
    int lane = threadIdx.x % WARP;
    if (lane < CLUSTER)
        mbarrier_arrive_remote(p.m.empty(stage), lane);
}

static __device__ __forceinline__ void consumer_wait(const Consumer &p)
{
    mbarrier_wait(p.m.full(p.pipe.stage), p.pipe.parity);
}

// Issues a stage's WGMMAs for the first COLS columns and waits for those of the previous stage. a_bytes:
// offset of the slice's rows of a; previous: the previous stage, negative if there is none.
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void mma_stage(float (&sum)[TILE_SIDE / 2], Consumer &p, int a_bytes,
                                                 int &previous)
{
    constexpr int b_step = ALONG_COLUMNS ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    consumer_wait(p);
    uint64_t a = smem_descriptor(p.m.a(p.pipe.stage) + a_bytes, 0),
             b = smem_descriptor(p.m.b(p.pipe.stage), ALONG_COLUMNS ? BOX_BYTES : 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        wgmma<T, COLS, false, ALONG_COLUMNS>(sum, descriptor_advance(a, 32 * k),
                                             descriptor_advance(b, b_step * k), previous >= 0 || k > 0);
    wgmma_commit();
    if (previous >= 0) {
        wgmma_wait<1>();
        consumer_release(p, previous);
    }
    previous = p.pipe.stage;
    p.pipe.advance();
}

// sum = the slice's mainloop, in the layout of wgmma(). ALONG_COLUMNS: b is stored as (depth, cols).
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void mma_cols(float (&sum)[TILE_SIDE / 2], Consumer &p, int blocks,
                                                int a_bytes)
{
    int previous = -1;
    for (int i = 0; i < blocks; i++)
        mma_stage<T, ALONG_COLUMNS, COLS>(sum, p, a_bytes, previous);
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
    consumer_release(p, previous);
}

// Symmetric results need only the columns up to the diagonal.
template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void mma_slice(float (&sum)[TILE_SIDE / 2], Consumer &p, const Task &w,
                                                 const Slice &t)
{
    int blocks = stages_of(w), boxes = boxes_needed(w, t),
        a_bytes =
            a_is_in_b(w, t, t.row) ? A_BYTES + (t.row - t.col) * BOX_BYTES : p.staging.group * BOX_BYTES;
    if (boxes == 4)
        mma_cols<T, ALONG_COLUMNS, 256>(sum, p, blocks, a_bytes);
    else if (ALONG_COLUMNS || boxes == 3)
        mma_cols<T, ALONG_COLUMNS, 192>(sum, p, blocks, a_bytes);
    else if (boxes == 2)
        mma_cols<T, false, 128>(sum, p, blocks, a_bytes);
    else
        mma_cols<T, false, 64>(sum, p, blocks, a_bytes);
}

// Skips the same stages for a slice that does not exist.
static __device__ __forceinline__ void skip_stages(Consumer &p, int stages_out)
{
    for (; stages_out > 0; stages_out--, p.pipe.advance()) {
        consumer_wait(p);
        consumer_release(p, p.pipe.stage);
    }
}

// ---- tasks ------------------------------------------------------------------------------------------------

// Waits for the next stage, which holds half `half` of the slice's d, and returns the warpgroup's boxes of
// it.
static __device__ __forceinline__ uint8_t *next_stage(Consumer &p, EpilogueStages &stages_out, int half)
{
    consumer_wait(p);
    stages_out.stage[half] = p.m.a(p.pipe.stage);
    p.pipe.advance();
    return stages_out.boxes(half);
}

template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void product_slice(Consumer &p, const Task &w, const Slice &t)
{
    float sum[TILE_SIDE / 2];
    mma_slice<T, ALONG_COLUMNS>(sum, p, w, t);
    // The scales are complete before the operands are: TASK_AOL wrote both.
    float scales[SCALES_EACH];
    bool scaled = !ALONG_COLUMNS && w.kind == TASK_SCALED;
    if (scaled)
        load_scales(scales, w.scale, w, t);
    EpilogueStages stages_out = {{}, p.staging.group, p.pipe.stage};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint8_t *boxes = next_stage(p, stages_out, half);
        uint32_t packed[32];
        if (w.has_d)
            combine<T, true>(packed, sum + 64 * half, boxes, w.alpha, w.beta);
        else
            combine<T, false>(packed, sum + 64 * half, NULL, w.alpha, 0);
        write_fragments<HALF_COLS>(packed, boxes);
        if (!scaled)
            finish_half<T, !ALONG_COLUMNS>(packed, half, stages_out, p.staging, w, t);
    }
    if (!scaled)
        return;
    p.staging.acquire();
    write_scales(p.staging, scales, w.gain);
    finish_scaled<T>(stages_out, p.staging, w, t);
}

template <typename T>
static __device__ __forceinline__ void raw_slice(Consumer &p, const Task &w, const Slice &t)
{
    float sum[TILE_SIDE / 2], units[SCALES_EACH];
    load_scales(units, w.unit, w, t);
    mma_slice<T, false>(sum, p, w, t);
    write_scales(p.staging, units, 1); // all have read the previous slice's scales: staging.sync since
    write_raw(sum, p.staging, w, t);
    p.staging.commit(p.pipe.stage); // the stage is empty: tells the TMA-store warp that all is written
}

// Instructions that run this rarely miss in the instruction cache: the code is short.
template <typename T>
static __device__ __forceinline__ void aol_slice(Consumer &p, const Task &w, const Slice &t)
{
    consumer_wait(p);                 // the sums are complete when the first box is
    read_aol_scales(p.staging, w, t); // all have read the previous slice's
    int last = min(3, t.row - t.col); // box on or below the diagonal
#pragma unroll 1
    for (int i = 0; i < 4; i++, p.pipe.advance()) {
        consumer_wait(p);
        if (i > last) {
            consumer_release(p, p.pipe.stage);
            continue;
        }
        finish_aol_box<T>(p.m.a(p.pipe.stage) + p.staging.group * RAW_BYTES, i, p.staging, w, t);
        p.staging.commit(p.pipe.stage);
    }
}

template <typename T>
static __device__ __forceinline__ void consume_slices(const SharedMemory &m, const Chain &c, int group,
                                                      int rank)
{
    Consumer p = {m,
                  {},
                  {m.staging(group), m.scales(group), group, m.staging_full(group), m.staging_empty(group),
                   false, 0}};
    PipelineState<SCHED_STAGES> sched_empty;
    for (Slice t; (t = acquire_tile(m, sched_empty, rank, group)).task >= 0;) {
        const Task &w = c.task[t.task];
        if (!slice_exists(w, t)) {
            skip_stages(p, stages_of(w) + epilogue_stages(w));
            continue;
        }
        if (w.kind == TASK_FULL) {
            product_slice<T, true>(p, w, t);
        } else if (w.kind == TASK_AOL) {
            aol_slice<T>(p, w, t);
        } else if (w.kind == TASK_RAW) {
            raw_slice<T>(p, w, t);
        } else {
            product_slice<T, false>(p, w, t);
        }
        p.staging.in_flight = true;
    }
}

// ---- TMA-store warps --------------------------------------------------------------------------------------

// One thread per consumer warpgroup: stores the staged output of its slices, releases the stages when TMA
// has read them, and marks the slice as done when its stores are complete in global memory.
struct StoreWarp {
    const SharedMemory &m;
    int group;
    PipelineState<STAGES> pipe; // position of the warpgroup
    uint32_t parities;          // of staging_full(), a bit for each stage
    __device__ __forceinline__ void wait_staged()
    {
        mbarrier_wait(m.staging_full(group) + pipe.stage, parities >> pipe.stage & 1);
        parities ^= 1u << pipe.stage;
    }
    // To both CTAs, for all warps of the warpgroup.
    __device__ __forceinline__ void release_stage(int stage) const
    {
        for (int i = 0; i < CLUSTER; i++)
            mbarrier_arrive_remote(m.empty(stage), i, WARPGROUP / WARP);
    }
    __device__ __forceinline__ void skip(int stages)
    {
        for (; stages > 0; stages--)
            pipe.advance();
    }
};

// Products: two stages.
static __device__ __forceinline__ void store_product(StoreWarp &k, const Staging &staging, const Task &w,
                                                     const Slice &t)
{
    EpilogueStages stages_out = {{}, k.group, k.pipe.stage};
    stages_out.stage[0] = k.m.a(k.pipe.stage);
    stages_out.stage[1] = k.m.a((k.pipe.stage + 1) % STAGES);
#pragma unroll 1
    for (int half = 0; half < 2; half++, k.pipe.advance()) {
        k.wait_staged();
        store_half(half, stages_out, staging, w, t);
    }
    tma_store_wait_read<1>();
    k.release_stage(stages_out.number(0));
    tma_store_wait_read();
    k.release_stage(stages_out.number(1));
}

// TASK_AOL: one box per stage.
static __device__ __forceinline__ void store_aol(StoreWarp &k, const Task &w, const Slice &t)
{
    int last = min(3, t.row - t.col), before = -1;
#pragma unroll 1
    for (int i = 0; i <= last; i++, k.pipe.advance()) {
        k.wait_staged();
        store_aol_box(k.m.a(k.pipe.stage) + k.group * RAW_BYTES, i, w, t);
        if (before >= 0) {
            tma_store_wait_read<1>();
            k.release_stage(before);
        }
        before = k.pipe.stage;
    }
    tma_store_wait_read();
    k.release_stage(before);
    k.skip(3 - last);
}

// Called by one thread per warpgroup.
static __device__ __forceinline__ void store_slices(const SharedMemory &m, const Chain &c, int group,
                                                    int rank)
{
    StoreWarp k = {m, group, {}, 0};
    Staging staging = {m.staging(group), m.scales(group), group};
    PipelineState<SCHED_STAGES> sched_empty;
    for (Slice t; (t = acquire_tile(m, sched_empty, rank, group)).task >= 0;) {
        const Task &w = c.task[t.task];
        if (!slice_exists(w, t)) {
            k.skip(stages_of(w) + epilogue_stages(w));
        } else {
            if (w.kind != TASK_AOL)
                k.skip(stages_of(w));
            if (w.kind == TASK_AOL)
                store_aol(k, w, t);
            else if (w.kind == TASK_RAW)
                k.wait_staged();
            else
                store_product(k, staging, w, t);
            mbarrier_arrive(m.staging_empty(group));
        }
        if (!w.awaited)
            continue;
        tma_store_wait();
        fence_proxy_async();
        add_release(c.done + t.task * c.batch + t.matrix, 1);
    }
    tma_store_wait();
}

// The last CTA of the grid resets the counters for the next launch. One warp.
static __device__ __forceinline__ void reset_counters(const Chain &c)
{
    unsigned last = 0;
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        last = atomicInc(c.finished, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    if (!__shfl_sync(0xffffffffu, last, 0))
        return;
    if (threadIdx.x % WARP == 0)
        *c.tile_counter = 0;
    for (int i = threadIdx.x % WARP; i < c.counters; i += WARP)
        c.done[i] = 0;
}

#endif

// ---- kernel and launch -----------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) chain_kernel(const __grid_constant__ Chain c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / WARP;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.full(i), 1);
            mbarrier_init(m.empty(i), CLUSTER * WARPS);
        }
        for (int i = 0; i < SCHED_STAGES; i++) {
            mbarrier_init(m.index_full(i), 1);
            mbarrier_init(m.index_empty(i), CLUSTER);
        }
        for (int i = 0; i < SCHED_STAGES; i++) {
            mbarrier_init(m.sched_full(i), 1);
            mbarrier_init(m.sched_empty(i), CONSUMERS * WARPGROUP + 1 + CONSUMERS);
        }
        for (int i = 0; i < SCHED_STAGES; i++)
            mbarrier_init(m.input_ready(i), 1);
        mbarrier_init(m.prefetch_next(), 1); // the next tile
        for (int g = 0; g < CONSUMERS; g++) {
            for (int i = 0; i < STAGES; i++)
                mbarrier_init(m.staging_full(g) + i, WARPGROUP / WARP);
            mbarrier_init(m.staging_empty(g), 1);
        }
        fence_mbarrier_init();
    }
    pdl_launch_dependents();
    cluster_sync_relaxed(); // the mbarriers are initialised
    pdl_wait();
    if (group < CONSUMERS) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_slices<T>(m, c, group, rank);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0 && elect_one())
            produce_tiles(m, c, rank);
        if (warp == 1 && elect_one())
            schedule_tiles(m, c, rank);
        if (warp >= 2 && elect_one())
            store_slices(m, c, warp - 2, rank);
        __syncwarp();
    }
    cluster_sync(); // other CTAs may still arrive at this CTA's mbarriers
    __syncthreads();
    if (threadIdx.x < WARP)
        reset_counters(c);
#endif
}

CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int batch)
{
    CUtensorMapDataType type =
        dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return tensor_map(type, base, batch, rows, cols, pitch, BOX_SIDE);
}

static int clusters_held[2]; // by dtype: resident clusters, 0: not known yet

void ns_forget_device(void) { clusters_held[NS_BF16] = clusters_held[NS_FP16] = 0; }

static const ClusterShape cluster_shape = {CLUSTER, THREADS, SHARED_BYTES};

int ns_clusters(NsDtype dtype)
{
    int &clusters = clusters_held[dtype];
    if (clusters)
        return clusters;
    const void *kernel =
        dtype == NS_BF16 ? (const void *)chain_kernel<__nv_bfloat16> : (const void *)chain_kernel<__half>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    clusters = clusters_that_fit(kernel, cluster_shape);
    if (clusters < 1)
        fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", (int)CLUSTER);
    return clusters;
}

void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &c)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        cluster_launch(attributes, s, cluster_shape, min_i64(c.total, ns_clusters(dtype)), true);
    auto kernel = dtype == NS_BF16 ? chain_kernel<__nv_bfloat16> : chain_kernel<__half>;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}
