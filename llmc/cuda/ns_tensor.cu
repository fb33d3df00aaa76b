// Chains of Newton-Schulz tasks on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// A cluster of two blocks, each alone on its multiprocessor, computes a square of 256 x 256 at a time, a block 128 rows of it. In
// a block two groups of 128 threads multiply 64 rows each. The four warps of the third group are there for what would keep these
// waiting, with a thread each: one fetches operand tiles of depth 64 ahead, through a ring of STAGES; one, the scout, finds out
// what comes next (ns_fetch.cuh); two, the clerks, send results and announce them (below). The columns' operand is needed by both
// blocks: each fetches half of it and the hardware delivers it to both.
//
// Why 64 x 256 a group: a product of 64 x 256 x 16 reads 10 KB of shared memory in 128 cycles and 6 KB more arrive for it, which
// is just what shared memory moves in that time; with 64 x 128 the tensor cores would wait a fifth of the time.
//
// Addends (d) follow their unit's operands through the ring, and results leave from there (ns_tile.cuh). In AOL's pass raw sums,
// a box of each part a stage, take the operands' place.
//
// The blocks are persistent. Each cluster draws units of the chain, squares or halves of them, in an order in which a unit
// depends on earlier ones only: what it waits for has been drawn by a cluster that is running, whatever else occupies the device.
//
// Symmetric results: only squares on and below the diagonal exist; boxes are also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_fetch.cuh"
#include "llmc/cuda/tensor_map.cuh"

enum {
    FETCH_REGISTERS = 56, // 128 * 56 + 256 * 224 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 224,
    WARPS = GROUPS * GROUP / WARP, // that multiply, in a block
    LISTENERS = WARPS + GROUPS + 1 // these, the clerks and the fetching thread are told of parts
};

#if HOPPER

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Where a group stands. Its registers of sums are not part of it: where kinds of tasks share them, the compiler makes products
// wait for each other.
struct Place {
    const SharedMemory &m;
    const Chain &c;
    Ring<STAGES> ring;
    Desk desk;
    uint32_t desk_parity; // of the wait for the desk
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
static __device__ __forceinline__ void multiply(float (&sum)[SQUARE / 2], Place &p, const Part &t)
{
    int blocks = t.stages, boxes = boxes_wanted(t),
        a_bytes = t.a_in_b ? A_BYTES + (t.row - t.col) * BOX_BYTES : p.desk.group * BOX_BYTES;
    if (ALONG_COLUMNS || boxes >= 4)
        multiply_cols<T, ALONG_COLUMNS, 256>(sum, p, blocks, a_bytes);
    else if (boxes == 3)
        multiply_cols<T, false, 192>(sum, p, blocks, a_bytes);
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

// Takes the items that follow, as soon as the desk is free: the clerk has sent the part before.
static __device__ __forceinline__ Items take_items(Place &p)
{
    Items items = {{}, p.desk.base, p.desk.group};
    for (int half = 0; half < 2; half++, p.ring.advance()) {
        wait_for_fetch(p);
        items.stage[half] = p.m.a(p.ring.stage);
    }
    return items;
}
static __device__ __forceinline__ void take_desk(Place &p)
{
    barrier_wait(p.m.desk_free(p.desk.group), p.desk_parity ^ 1);
    p.desk_parity ^= 1;
}

// A warp has staged half `half` of the part, for the copy unit, or written it to global memory: over to the clerk.
static __device__ __forceinline__ void hand_over(const Place &p, int half)
{
    copy_unit_fence();
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(p.m.staged(p.desk.group, half));
}

template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void product_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2];
    multiply<T, ALONG_COLUMNS>(sum, p, t);
    Items items = take_items(p);
    take_desk(p);
    // Complete before the operands were: AOL's pass wrote the scales together with the matrix that is multiplied.
    bool scaled = !ALONG_COLUMNS && t.kind == TASK_SCALED;
    if (scaled) read_scales(p.desk, w, t);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (2 * half < boxes_wanted(t)) {
            uint32_t packed[32];
            if (t.has_d)
                combine<T, true>(packed, sum + 64 * half, items.boxes(half), t.alpha, t.beta);
            else
                combine<T, false>(packed, sum + 64 * half, NULL, t.alpha, 0);
            stage_half<T, !ALONG_COLUMNS>(packed, half, items, p.desk, w, t);
            if (scaled) scale_half<T>(half, items, p.desk, t);
            if (ALONG_COLUMNS && t.has_elements) {
                p.desk.sync();
                write_elements(items.boxes(half), w, t, half);
            }
        }
        hand_over(p, half);
    }
}

template <typename T> static __device__ __forceinline__ void raw_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2];
    multiply<T, false>(sum, p, t);
    take_desk(p);
    read_units(p.desk, w, t);
    write_raw(sum, p.desk, w, t);
    for (int half = 0; half < 2; half++) hand_over(p, half);
}

template <typename T> static __device__ __forceinline__ void aol_part(Place &p, const Task &w, const Part &t)
{
    uint32_t packed[64];
    take_desk(p);
    wait_for_fetch(p); // the sums are complete like the first box
    read_aol_scales(p.desk, w, t);
#pragma unroll
    for (int i = 0; i < 4; i++, p.ring.advance()) {
        wait_for_fetch(p);
        scale_raw<T>(packed + 16 * i, p.m.a(p.ring.stage) + p.desk.group * RAW_BYTES, p.desk, i);
        __syncwarp();
        release(p, p.ring.stage);
    }
    Items items = take_items(p);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        stage_half<T, true>(packed + 32 * half, half, items, p.desk, w, t);
        hand_over(p, half);
    }
}

// A part that is not wanted: others may be.
static __device__ __forceinline__ bool is_beyond(const Part &t) { return t.row * BOX_SIDE >= t.rows; }

template <typename T>
static __device__ __forceinline__ void compute_parts(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Place p = {m, c, {}, {m.desk(group), m.scales(group), group}, 0};
    Ring<TICKETS> heard;
    for (Part t; (t = hear_part(m, heard)).task >= 0; heard.advance()) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(m.heard(heard.stage));
        const Task &w = c.task[t.task];
        t.row = part_row(t, rank, group);
        if (is_beyond(t))
            pass_over(p, t.stages + items_after(t));
        else if (t.kind == TASK_FULL)
            product_part<T, true>(p, w, t);
        else if (t.kind == TASK_AOL)
            aol_part<T>(p, w, t);
        else if (t.kind == TASK_RAW)
            raw_part<T>(p, w, t);
        else
            product_part<T, false>(p, w, t);
    }
}

// ---- clerks ----------------------------------------------------------------------------------------------------------------

// The copy unit has read an item: it goes back to both blocks' fetching threads.
static __device__ __forceinline__ void return_item(const SharedMemory &m, int stage)
{
    for (int rank = 0; rank < CLUSTER; rank++) barrier_arrive_at(m.empty(stage), rank, GROUP / WARP);
}

// What a group has staged leaves, the items first: the next unit's operands wait for their places.
static __device__ __forceinline__ void send_part(const SharedMemory &m, const Task &w, const Part &t, int stage, int group,
                                                 uint32_t parity)
{
    int stages[2] = {stage, (stage + 1) % STAGES};
    Items items = {{m.a(stages[0]), m.a(stages[1])}, m.desk(group), group};
    bool sends = items_after(t) && !t.has_elements;
    for (int half = 0; half < 2; half++) {
        barrier_wait(m.staged(group, half), parity);
        if (sends) send_half(half, items, w, t);
    }
    if (sends) send_desk(items, w, t);
    if (items_after(t)) {
        stores_wait_read<2>();
        return_item(m, stages[0]);
        stores_wait_read<1>();
        return_item(m, stages[1]);
    }
    stores_wait_read<0>();
    barrier_arrive(m.desk_free(group));
}

// One thread for each group. A part is announced as soon as all of it is in global memory.
static __device__ __forceinline__ void send_parts(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Ring<TICKETS> heard;
    int stage = 0;
    uint32_t parity = 0;
    for (Part t; (t = hear_part(m, heard)).task >= 0; heard.advance()) {
        barrier_arrive(m.heard(heard.stage));
        const Task &w = c.task[t.task];
        t.row = part_row(t, rank, group);
        stage = (stage + t.stages) % STAGES;
        if (!is_beyond(t)) send_part(m, w, t, stage, group, parity), parity ^= 1;
        stage = (stage + items_after(t)) % STAGES;
        if (!w.awaited) continue;
        stores_wait();
        copy_unit_fence_global();
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
    int rank = cluster_rank(), group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), CLUSTER * WARPS);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.drawn(i), 1), barrier_init(m.taken(i), CLUSTER);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.told(i), 1), barrier_init(m.ready(i), 1);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.heard(i), LISTENERS);
        barrier_init(m.draw(), 1);
        for (int i = 0; i < GROUPS; i++) {
            for (int half = 0; half < 2; half++) barrier_init(m.staged(i, half), GROUP / WARP);
            barrier_init(m.desk_free(i), 1);
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
        int warp = threadIdx.x % GROUP / WARP; // the groups' clerks, the fetching thread, the scout
        if (threadIdx.x % WARP == 0) {
            if (warp < GROUPS)
                send_parts(m, c, warp, rank);
            else if (warp == GROUPS)
                fetch_units(m, c, rank);
            else
                scout_units(m, c, rank);
        }
        __syncwarp();
    }
    cluster_sync_at_end(); // others may still arrive at this block's barriers
    __syncthreads();
    if (threadIdx.x < WARP) reset_counters(c);
#endif
}

CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch},
               strides[2] = {(cuuint64_t)pitch * 2, (cuuint64_t)stride * 2};
    cuuint32_t box[3] = {BOX_SIDE, BOX_SIDE, 1}, steps[3] = {1, 1, 1};
    static EncodeTiled encode;
    if (!encode && !(encode = tensor_map_encoder()))
        fatal(EXIT_BAD_INPUT, "the driver has no cuTensorMapEncodeTiled: update it to one for CUDA 12.0 or later");
    CUtensorMapDataType type = dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUresult r = encode(&map, type, 3, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch,
              (int)r);
    return map;
}

static int clusters_held[2]; // by dtype: that the device holds at a time, 0: not asked yet

void ns_forget_device(void) { clusters_held[NS_BF16] = clusters_held[NS_FP16] = 0; }

template <typename T> static void launch(cudaStream_t s, const Chain &c, int &clusters)
{
    auto kernel = chain_kernel<T>;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = s;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (!clusters) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        if (clusters < 1) fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", (int)CLUSTER);
    }
    config.gridDim = dim3((unsigned)(CLUSTER * min_i64(c.total, clusters)));
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}

void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &c)
{
    if (dtype == NS_BF16)
        launch<__nv_bfloat16>(s, c, clusters_held[dtype]);
    else
        launch<__half>(s, c, clusters_held[dtype]);
}
