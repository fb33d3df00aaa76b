// Chains of Newton-Schulz tasks on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// One block occupies a multiprocessor and computes tiles of 128 x 128. Of a group of 128 threads one fetches operand tiles of
// depth 64 ahead, through a ring of STAGES, and two are clerks (ns_tile.cuh); two more groups take turns: one multiplies a tile
// while the other finishes its last one.
//
// The blocks are persistent: each takes every so-many-th tile of all tasks of the chain, in an order in which a tile depends on
// earlier ones only. There are no more clusters than the device holds at a time, so that whatever a tile waits for is done, or
// under way, or will be as soon as other kernels leave their multiprocessors.
//
// Four blocks form a cluster and compute 2 x 2 neighbouring tiles. Each operand tile is needed by two of them: each fetches half
// of it and the hardware delivers it to both, which halves the reads from L2. Without it they, not the products, set the pace: a
// tile of 128 x 128 does 64 operations for each byte, and some 7.5 TB/s come out of that cache.
//
// Symmetric results: only tiles on and below the diagonal exist; a tile is also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_tile.cuh"

enum {
    FETCH_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 232,
    CLUSTER = SQUARE_TILES * SQUARE_TILES
};

#if NS_HOPPER

// ---- tiles and stages ------------------------------------------------------------------------------------------------------

// The tile of this block in square `index` of the chain.
static __device__ __forceinline__ Tile find_tile(const Chain &c, int index, int rank)
{
    Tile t = {};
    int first = index / (c.together * c.squares) * c.together, count = min(c.together, c.batch - first),
        rest = index - first * c.squares;
    while (rest >= c.task[t.task].squares * count) rest -= c.task[t.task++].squares * count;
    const Task &w = c.task[t.task];
    int matrix = rest / w.squares;
    rest -= matrix * w.squares;
    t.matrix = first + matrix;
    bool full = w.kind == TASK_FULL || w.kind == TASK_SCALE;
    if (full)
        t.j = rest / w.row_squares, t.i = rest - t.j * w.row_squares; // neighbours share the tall operand's columns
    else
        triangle_position(rest, t.i, t.j);
    t.i = SQUARE_TILES * t.i + rank / SQUARE_TILES;
    t.j = SQUARE_TILES * t.j + rank % SQUARE_TILES;
    t.wanted = t.i * TILE_SIDE < w.rows && t.j * TILE_SIDE < w.cols && (full || t.i >= t.j);
    return t;
}

static __device__ __forceinline__ int depth_blocks(const Task &w) { return (w.depth + DEPTH - 1) / DEPTH; }

// One thread: waits until the tile's matrix has passed the stage before. What the copy unit wrote then is for the copy unit to
// read, too.
static __device__ __forceinline__ void wait_for_stage(const Chain &c, const Tile &t)
{
    const Task &w = c.task[t.task];
    if (w.stage == 0) return;
    const unsigned *done = c.done + (w.stage - 1) * c.batch + t.matrix;
    while (load_acquire(done) < (unsigned)w.needed) __nanosleep(20);
    copy_unit_fence_all();
}

// The clerk: all of the tile that was sent has arrived; others have written theirs before they handed the desk over.
static __device__ __forceinline__ void announce(const Chain &c, const Tile &t)
{
    int stage = c.task[t.task].stage;
    if (stage + 1 >= c.stages) return;
    stores_wait();
    copy_unit_fence_all();
    add_release(c.done + stage * c.batch + t.matrix, 1);
}

// A position in the ring of stages.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void advance(int steps)
    {
        stage += steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

// ---- fetching ------------------------------------------------------------------------------------------------------------

// One thread of each block runs this. Operand tiles come in halves of 64 rows (or columns): a's half rank % 2 for the two blocks
// of the same i, b's half rank / 2 for the two of the same j.
static __device__ __forceinline__ void fetch_tiles(const SharedMemory &m, const Chain &c, int rank)
{
    Ring ring;
    int row = rank / 2, col = rank % 2;
    uint16_t same_row = (uint16_t)(3 << 2 * row), same_col = (uint16_t)(5 << col);
    for (int index = blockIdx.x / CLUSTER; index < c.total; index += gridDim.x / CLUSTER) {
        Tile t = find_tile(c, index, rank);
        const Task &w = c.task[t.task];
        if (w.depth == 0) continue;
        int a_row = t.i * TILE_SIDE + col * HALF, b_at = t.j * TILE_SIDE + row * HALF;
        wait_for_stage(c, t);
        for (int k = 0; k < w.depth; k += DEPTH) {
            uint64_t *full = m.full(ring.stage);
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            barrier_arrive_expect(full, 2 * OPERAND_BYTES); // what the others send counts too
            tile_load(m.a(ring.stage) + col * OPERAND_BYTES / 2, &w.a, full, k, a_row, t.matrix, same_row);
            uint8_t *b = m.b(ring.stage) + row * OPERAND_BYTES / 2;
            if (w.kind == TASK_FULL)
                tile_load(b, &w.b, full, b_at, k, t.matrix, same_col);
            else
                tile_load(b, &w.b, full, k, b_at, t.matrix, same_col);
            ring.advance();
        }
    }
}

// One thread for each of the two groups.
static __device__ __forceinline__ void run_clerk(const SharedMemory &m, const Chain &c, int rank, int group)
{
    int clusters = gridDim.x / CLUSTER;
    uint32_t ready_phase = 0;
    for (int index = blockIdx.x / CLUSTER + group * clusters; index < c.total; index += 2 * clusters) {
        Tile t = find_tile(c, index, rank);
        const Task &w = c.task[t.task];
        if (!t.wanted) continue;
        for (int put = 0; put < tile_puts(w, t); put++) {
            if (put == 0 && w.has_d)
                wait_for_stage(c, t), bring_addend(m, w, t, group);
            else
                barrier_arrive(m.desk_free(group));
            barrier_wait(m.desk_ready(group), ready_phase), ready_phase ^= 1;
            if (w.has_out || w.has_plus) send_desk(m.desk(group), w, t, put);
            stores_wait_read();
        }
        announce(c, t);
    }
    stores_wait();
}

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Tells all that write into this stage of this block, itself and two others, that a warp has read it.
static __device__ __forceinline__ void release(const SharedMemory &m, int stage, int rank)
{
    int lane = threadIdx.x % WARP;
    if (lane < 3) barrier_arrive_at(m.empty(stage), rank ^ lane); // the same block, the one beside, the one below or above
}

// The groups multiply one after the other. This keeps the tensor cores on one tile at a time, and it is needed: the parity of a
// barrier tells a phase from the next one, not from the one after, so no group may wait for a stage that the other still has to
// read.
static __device__ __forceinline__ void take_turn(int group) { group_sync(TURN_BARRIER + group, 2 * GROUP); }
static __device__ __forceinline__ void give_turn(int group) { group_arrive(TURN_BARRIER + group, 2 * GROUP); }

// sum (128, 128) = one tile; sum[h] has rows 64 h to 64 h + 63, in the layout of WarpgroupProduct. ALONG_COLUMNS: b is stored
// (depth, cols) next_group: whose turn is next, negative when no tile is left.
template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void multiply_tile(float (&sum)[2][64], const SharedMemory &m, Ring &ring, int blocks, int rank,
                                                     int next_group)
{
    constexpr int b_step = ALONG_COLUMNS ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    int previous = 0;
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.a(ring.stage), 0), b = operand(m.b(ring.stage), ALONG_COLUMNS ? OPERAND_BYTES / 2 : 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                WarpgroupProduct<T, ALONG_COLUMNS>::run(sum[h], operand_advance(a, h * OPERAND_BYTES / 2 + 32 * k),
                                                        operand_advance(b, b_step * k), block + k > 0);
        products_commit();
        if (block > 0) {
            products_wait<1>();
            release(m, previous, rank);
        }
        previous = ring.stage;
        ring.advance();
    }
    if (next_group >= 0) give_turn(next_group);
    products_wait<0>();
    release(m, previous, rank);
}

// The same steps for a tile that is not wanted.
static __device__ __forceinline__ void pass_over_tile(const SharedMemory &m, Ring &ring, int blocks, int rank)
{
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        release(m, ring.stage, rank);
        ring.advance();
    }
}

// ---- whole tiles -----------------------------------------------------------------------------------------------------------

// Where a group stands.
struct Place {
    Ring ring;
    Desk desk;
    int rank, next_group; // next_group: whose turn is next, negative when no tile is left
};

// The kinds of tasks have their own sums each: where registers of sums are shared, the compiler makes products wait for each
// other.
template <typename T>
static __device__ __forceinline__ void full_tile(const SharedMemory &m, const Task &w, const Tile &t, Place &p)
{
    float sum[2][64];
    take_turn(p.desk.group);
    multiply_tile<T, true>(sum, m, p.ring, depth_blocks(w), p.rank, p.next_group);
    write_full<T>(sum, p.desk, w, t);
}

template <typename T>
static __device__ __forceinline__ void symmetric_tile(const SharedMemory &m, const Task &w, const Tile &t, Place &p)
{
    float sum[2][64];
    take_turn(p.desk.group);
    multiply_tile<T, false>(sum, m, p.ring, depth_blocks(w), p.rank, p.next_group);
    if (w.kind == TASK_RAW) {
        write_raw(sum, p.desk, w, t);
        return;
    }
    uint32_t packed[64];
    if (w.has_d) {
        p.desk.wait_full();
        combine<T, true>(packed, sum, p.desk.base, w.alpha, w.beta);
    } else {
        p.desk.wait_free();
        combine<T, false>(packed, sum, p.desk.base, w.alpha, 0);
    }
    write_symmetric<T>(packed, p.desk, w, t);
}

template <typename T> static __device__ __forceinline__ void scaled_tile(const Chain &c, const Task &w, const Tile &t, Place &p)
{
    if (threadIdx.x % GROUP == 0) wait_for_stage(c, t); // the turn that is taken lets the others know
    __syncwarp();
    take_turn(p.desk.group);
    if (p.next_group >= 0) give_turn(p.next_group);
    if (w.kind == TASK_AOL) {
        uint32_t packed[64];
        read_scaled<T>(packed, p.desk, w, t);
        write_symmetric<T>(packed, p.desk, w, t);
    } else {
        write_scaled<T>(p.desk, w, t);
    }
}

// Group `group` takes every second tile of the block.
template <typename T>
static __device__ __forceinline__ void compute_tiles(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Place p = {
        {}, {m.desk(group), m.scales(group), m.desk_full(group), m.desk_ready(group), m.desk_free(group), group, 0, 0}, rank, 0};
    int clusters = gridDim.x / CLUSTER, index = blockIdx.x / CLUSTER;
    if (group == 1) {
        give_turn(0);
        p.ring.advance(depth_blocks(c.task[find_tile(c, index, rank).task]));
        index += clusters;
    }
    for (; index < c.total; index += 2 * clusters) {
        Tile t = find_tile(c, index, rank);
        const Task &w = c.task[t.task];
        p.next_group = index + clusters < c.total ? 1 - group : -1;
        if (!t.wanted) {
            take_turn(group);
            pass_over_tile(m, p.ring, depth_blocks(w), rank);
            if (p.next_group >= 0) give_turn(p.next_group);
        } else if (w.kind == TASK_FULL) {
            full_tile<T>(m, w, t, p);
        } else if (w.depth > 0) {
            symmetric_tile<T>(m, w, t, p);
        } else {
            scaled_tile<T>(c, w, t, p);
        }
        if (p.next_group >= 0)
            p.ring.advance(depth_blocks(c.task[find_tile(c, index + clusters, rank).task])); // the other group's
    }
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
    for (int i = threadIdx.x % WARP; i < c.stages * c.batch; i += WARP) c.done[i] = 0;
}

#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T> __global__ void __launch_bounds__(THREADS, 1) chain_kernel(const __grid_constant__ Chain c)
{
#if NS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / GROUP, warp = threadIdx.x / WARP % 4; // group 2 fetches and has the clerks
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), 3 * GROUP / WARP);
        for (int i = 0; i < 2; i++)
            barrier_init(m.desk_full(i), 1), barrier_init(m.desk_ready(i), GROUP / WARP), barrier_init(m.desk_free(i), 1);
        barrier_init_fence();
    }
    launch_dependents();
    cluster_sync(); // the barriers are ready
    wait_for_predecessors();
    if (group < 2) {
        registers_grow<COMPUTE_REGISTERS>();
        compute_tiles<T>(m, c, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        if (warp == 0 && threadIdx.x % WARP == 0) fetch_tiles(m, c, rank);
        if ((warp == 1 || warp == 2) && threadIdx.x % WARP == 0) run_clerk(m, c, rank, warp - 1);
        __syncwarp();
    }
    cluster_sync(); // others may still arrive at this block's barriers
    __syncthreads();
    if (c.done && threadIdx.x < WARP) reset_counters(c);
#endif
}

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeTiled encode_function(void)
{
    static EncodeTiled function;
    if (!function) {
        void *address = NULL;
        cudaDriverEntryPointQueryResult found;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found));
        if (found != cudaDriverEntryPointSuccess || !address)
            fatal(EXIT_BAD_INPUT, "the driver has no cuTensorMapEncodeTiled: update it to one for CUDA 12.0 or later");
        function = (EncodeTiled)address;
    }
    return function;
}

CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch},
               strides[2] = {(cuuint64_t)pitch * 2, (cuuint64_t)stride * 2};
    cuuint32_t box[3] = {128 / 2, HALF, 1}, steps[3] = {1, 1, 1};
    CUtensorMapDataType type = dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUresult r =
        encode_function()(&map, type, 3, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch,
              (int)r);
    return map;
}

template <typename T> static void launch(cudaStream_t s, const Chain &c)
{
    static int clusters; // that the device holds at a time
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
        launch<__nv_bfloat16>(s, c);
    else
        launch<__half>(s, c);
}
