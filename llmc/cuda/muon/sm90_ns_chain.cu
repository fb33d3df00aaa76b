// Chains of Newton-Schulz tasks on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// A cluster of two blocks, each alone on its multiprocessor, computes a square of 256 x 256 at a time, a block 128 rows of it. In
// a block two groups of 128 threads multiply 64 rows each. Of the third group each warp has one thread that does something: one
// fetches operand tiles of depth 64 ahead, through a ring of STAGES; a scout finds out what comes next and waits until it may
// begin; a clerk for each multiplying group sends its results and tells others of them. So no thread that multiplies or fetches
// waits for memory to be in order. The columns' operand is needed by both blocks: each fetches half of it and the hardware
// delivers it to both.
//
// Why 64 x 256 a group: a product of 64 x 256 x 16 reads 10 KB of shared memory in 128 cycles and 6 KB more arrive for it, which
// is just what shared memory moves in that time; with 64 x 128 the tensor cores would wait a fifth of the time. Still a symmetric
// result that has fewer squares than there are clusters is done sooner in narrow ones, of 256 x 192: more clusters take part,
// each for three quarters of the time; and a product with x whose last turn has few squares ends sooner with some narrow ones
// (choose_widths, ns_ops.cu).
//
// Addends (d) follow their square's operands through the ring, and results leave from there (sm90_ns_epilogue.cuh). In AOL's pass raw
// sums, a box of each part a stage, take the operands' place, and scaled boxes theirs (sm90_ns_aol.cuh).
//
// The blocks are persistent. Each cluster draws squares of the chain, in an order in which a square depends on earlier ones only:
// what it waits for has been drawn by a cluster that is running, whatever else occupies the device.
//
// Symmetric results: only squares on and below the diagonal exist; boxes are also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/muon/sm90_ns_producer.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    FETCH_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 232
};

#if HOPPER

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Where a group stands. Its registers of sums are not part of it: where kinds of tasks share them, the compiler makes products
// wait for each other.
struct Place {
    const SharedMemory &m;
    Ring<STAGES> ring;
    Desk desk;
};

// Tells both blocks, which write into this stage, that a warp has read it.
static __device__ __forceinline__ void release(const Place &p, int stage)
{
    int lane = threadIdx.x % WARP;
    if (lane < CLUSTER) barrier_arrive_at(p.m.empty(stage), lane);
}

static __device__ __forceinline__ void wait_for_fetch(const Place &p) { barrier_wait(p.m.full(p.ring.stage), p.ring.parity); }

// One stage's products are begun, for the first COLS columns; those of the stage before are over. a_bytes: where the
// part's rows of a begin; previous: the stage before, negative if there is none.
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void multiply_stage(float (&sum)[SQUARE / 2], Place &p, int a_bytes, int &previous)
{
    constexpr int b_step = ALONG_COLUMNS ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    wait_for_fetch(p);
    uint64_t a = operand(p.m.a(p.ring.stage) + a_bytes, 0), b = operand(p.m.b(p.ring.stage), ALONG_COLUMNS ? BOX_BYTES : 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        warpgroup_product<T, ALONG_COLUMNS, COLS>(sum, operand_advance(a, 32 * k), operand_advance(b, b_step * k),
                                                  previous >= 0 || k > 0);
    products_commit();
    if (previous >= 0) {
        products_wait<1>();
        release(p, previous);
    }
    previous = p.ring.stage;
    p.ring.advance();
}

// sum = the part's products, in the layout of warpgroup_product. ALONG_COLUMNS: b is stored (depth, cols).
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void multiply_cols(float (&sum)[SQUARE / 2], Place &p, int blocks, int a_bytes)
{
    int previous = -1;
    for (int i = 0; i < blocks; i++) multiply_stage<T, ALONG_COLUMNS, COLS>(sum, p, a_bytes, previous);
    products_wait<0>();
    products_done(sum);
    release(p, previous);
}

// Of symmetric results only the columns up to the diagonal are wanted.
template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void multiply(float (&sum)[SQUARE / 2], Place &p, const Task &w, const Part &t)
{
    int blocks = stages_of(w), boxes = boxes_wanted(w, t),
        a_bytes = a_is_in_b(w, t, t.row) ? A_BYTES + (t.row - t.col) * BOX_BYTES : p.desk.group * BOX_BYTES;
    if (boxes == 4)
        multiply_cols<T, ALONG_COLUMNS, 256>(sum, p, blocks, a_bytes);
    else if (ALONG_COLUMNS || boxes == 3)
        multiply_cols<T, ALONG_COLUMNS, 192>(sum, p, blocks, a_bytes);
    else if (boxes == 2)
        multiply_cols<T, false, 128>(sum, p, blocks, a_bytes);
    else
        multiply_cols<T, false, 64>(sum, p, blocks, a_bytes);
}

// The same steps for a part that is not wanted.
static __device__ __forceinline__ void pass_over(Place &p, int items)
{
    for (; items > 0; items--, p.ring.advance()) {
        wait_for_fetch(p);
        release(p, p.ring.stage);
    }
}

// ---- whole parts -----------------------------------------------------------------------------------------------------------

// Takes the next item, which is half `half` of the part, and returns the group's boxes of it.
static __device__ __forceinline__ uint8_t *take_item(Place &p, Items &items, int half)
{
    wait_for_fetch(p);
    items.stage[half] = p.m.a(p.ring.stage);
    p.ring.advance();
    return items.boxes(half);
}

template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void product_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2];
    multiply<T, ALONG_COLUMNS>(sum, p, w, t);
    // Complete before the operands were: AOL's pass wrote them together with the matrix that is multiplied.
    float scales[SCALES_EACH];
    bool scaled = !ALONG_COLUMNS && w.kind == TASK_SCALED;
    if (scaled) load_scales(scales, w.scale, w, t);
    Items items = {{}, p.desk.group, p.ring.stage};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint8_t *boxes = take_item(p, items, half);
        uint32_t packed[32];
        if (w.has_d)
            combine<T, true>(packed, sum + 64 * half, boxes, w.alpha, w.beta);
        else
            combine<T, false>(packed, sum + 64 * half, NULL, w.alpha, 0);
        put_blocks<HALF_COLS>(packed, boxes);
        if (!scaled) finish_half<T, !ALONG_COLUMNS>(packed, half, items, p.desk, w, t);
    }
    if (!scaled) return;
    p.desk.wait_free();
    put_scales(p.desk, scales, w.gain);
    finish_scaled<T>(items, p.desk, w, t);
}

template <typename T> static __device__ __forceinline__ void raw_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2], units[SCALES_EACH];
    load_scales(units, w.unit, w, t);
    multiply<T, false>(sum, p, w, t);
    put_scales(p.desk, units, 1); // after all have read the scales of the part before: they met at the desk since
    write_raw(sum, p.desk, w, t);
    p.desk.hand_over(p.ring.stage); // nothing lies in it: the clerk hears that all has been written
}

// Code that runs this rarely comes from memory each time: it is short.
template <typename T> static __device__ __forceinline__ void aol_part(Place &p, const Task &w, const Part &t)
{
    wait_for_fetch(p);                // the sums are complete like the first box
    read_aol_scales(p.desk, w, t);    // after all have met at the desk behind those of the part before
    int last = min(3, t.row - t.col); // box on or below the diagonal
#pragma unroll 1
    for (int i = 0; i < 4; i++, p.ring.advance()) {
        wait_for_fetch(p);
        if (i > last) {
            release(p, p.ring.stage);
            continue;
        }
        finish_aol_box<T>(p.m.a(p.ring.stage) + p.desk.group * RAW_BYTES, i, p.desk, w, t);
        p.desk.hand_over(p.ring.stage);
    }
}

template <typename T>
static __device__ __forceinline__ void compute_parts(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Place p = {m, {}, {m.desk(group), m.scales(group), group, m.staged(group), m.cleared(group), false, 0}};
    Ring<TICKETS> heard;
    for (Part t; (t = hear_part(m, heard, rank, group)).task >= 0;) {
        const Task &w = c.task[t.task];
        if (!part_wanted(w, t)) {
            pass_over(p, stages_of(w) + items_after(w));
            continue;
        }
        if (w.kind == TASK_FULL) {
            product_part<T, true>(p, w, t);
        } else if (w.kind == TASK_AOL) {
            aol_part<T>(p, w, t);
        } else if (w.kind == TASK_RAW) {
            raw_part<T>(p, w, t);
        } else {
            product_part<T, false>(p, w, t);
        }
        p.desk.handed = true;
    }
}

// ---- sending -------------------------------------------------------------------------------------------------------------

// A clerk for each group, a thread of its own, follows its parts: sends what the group has staged, returns the stages when the
// copy unit has read them, and announces the part when all of it is in global memory.
struct Clerk {
    const SharedMemory &m;
    int group;
    Ring<STAGES> ring; // where the group's is
    uint32_t parities; // of staged(), a bit for each stage
    __device__ __forceinline__ void wait_for_results()
    {
        barrier_wait(m.staged(group) + ring.stage, parities >> ring.stage & 1);
        parities ^= 1u << ring.stage;
    }
    // To both blocks, for all warps of the group.
    __device__ __forceinline__ void return_stage(int stage) const
    {
        for (int i = 0; i < CLUSTER; i++) barrier_arrive_at(m.empty(stage), i, GROUP / WARP);
    }
    __device__ __forceinline__ void pass(int stages)
    {
        for (; stages > 0; stages--) ring.advance();
    }
};

// Of products: two items.
static __device__ __forceinline__ void clear_items(Clerk &k, const Desk &desk, const Task &w, const Part &t)
{
    Items items = {{}, k.group, k.ring.stage};
    items.stage[0] = k.m.a(k.ring.stage), items.stage[1] = k.m.a((k.ring.stage + 1) % STAGES);
#pragma unroll 1
    for (int half = 0; half < 2; half++, k.ring.advance()) {
        k.wait_for_results();
        send_half(half, items, desk, w, t);
    }
    stores_wait_read<1>();
    k.return_stage(items.number(0));
    stores_wait_read();
    k.return_stage(items.number(1));
}

// Of AOL's pass: a box a stage.
static __device__ __forceinline__ void clear_aol(Clerk &k, const Task &w, const Part &t)
{
    int last = min(3, t.row - t.col), before = -1;
#pragma unroll 1
    for (int i = 0; i <= last; i++, k.ring.advance()) {
        k.wait_for_results();
        send_aol_box(k.m.a(k.ring.stage) + k.group * RAW_BYTES, i, w, t);
        if (before >= 0) stores_wait_read<1>(), k.return_stage(before);
        before = k.ring.stage;
    }
    stores_wait_read();
    k.return_stage(before);
    k.pass(3 - last);
}

// One thread for each group runs this.
static __device__ __forceinline__ void clear_parts(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Clerk k = {m, group, {}, 0};
    Desk desk = {m.desk(group), m.scales(group), group};
    Ring<TICKETS> heard;
    for (Part t; (t = hear_part(m, heard, rank, group)).task >= 0;) {
        const Task &w = c.task[t.task];
        if (!part_wanted(w, t)) {
            k.pass(stages_of(w) + items_after(w));
        } else {
            if (w.kind != TASK_AOL) k.pass(stages_of(w));
            if (w.kind == TASK_AOL)
                clear_aol(k, w, t);
            else if (w.kind == TASK_RAW)
                k.wait_for_results();
            else
                clear_items(k, desk, w, t);
            barrier_arrive(m.cleared(group));
        }
        if (!w.awaited) continue;
        stores_wait();
        copy_unit_fence_all();
        add_release(c.done + t.task * c.batch + t.matrix, 1);
    }
    stores_wait();
}

// The last block of the grid resets the counters for the next chain. One warp.
static __device__ __forceinline__ void reset_counters(const Chain &c)
{
    unsigned last = 0;
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        last = atomicInc(c.finished, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    if (threadIdx.x % WARP == 0) *c.ticket = 0;
    for (int i = threadIdx.x % WARP; i < c.counters; i += WARP) c.done[i] = 0;
}

#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T> __global__ void __launch_bounds__(THREADS, 1) chain_kernel(const __grid_constant__ Chain c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / GROUP, warp = threadIdx.x % GROUP / WARP;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), CLUSTER * WARPS);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.drawn(i), 1), barrier_init(m.taken(i), CLUSTER);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.told(i), 1), barrier_init(m.heard(i), GROUPS * GROUP + 1 + GROUPS);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.ready(i), 1);
        barrier_init(m.draw(), 1); // the next square
        for (int g = 0; g < GROUPS; g++) {
            for (int i = 0; i < STAGES; i++) barrier_init(m.staged(g) + i, GROUP / WARP);
            barrier_init(m.cleared(g), 1);
        }
        barrier_init_fence();
    }
    launch_dependents();
    cluster_sync(); // the barriers are ready
    wait_for_predecessors();
    if (group < GROUPS) {
        registers_grow<COMPUTE_REGISTERS>();
        compute_parts<T>(m, c, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        if (warp == 0 && elect_lane()) fetch_squares(m, c, rank);
        if (warp == 1 && elect_lane()) find_squares(m, c, rank);
        if (warp >= 2 && elect_lane()) clear_parts(m, c, warp - 2, rank);
        __syncwarp();
    }
    cluster_sync_at_end(); // others may still arrive at this block's barriers
    __syncthreads();
    if (threadIdx.x < WARP) reset_counters(c);
#endif
}

CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int batch)
{
    CUtensorMapDataType type = dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return tensor_map(type, base, batch, rows, cols, pitch, BOX_SIDE);
}

static int clusters_held[2]; // by dtype: that the device holds at a time, 0: not asked yet

void ns_forget_device(void) { clusters_held[NS_BF16] = clusters_held[NS_FP16] = 0; }

static const ClusterShape cluster_shape = {CLUSTER, THREADS, SHARED_BYTES};

int ns_clusters(NsDtype dtype)
{
    int &clusters = clusters_held[dtype];
    if (clusters) return clusters;
    const void *kernel = dtype == NS_BF16 ? (const void *)chain_kernel<__nv_bfloat16> : (const void *)chain_kernel<__half>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    clusters = clusters_that_fit(kernel, cluster_shape);
    if (clusters < 1) fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", (int)CLUSTER);
    return clusters;
}

void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &c)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, s, cluster_shape, min_i64(c.total, ns_clusters(dtype)), true);
    auto kernel = dtype == NS_BF16 ? chain_kernel<__nv_bfloat16> : chain_kernel<__half>;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}
