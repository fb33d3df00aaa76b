// Newton-Schulz products on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// One block occupies a multiprocessor and computes tiles of 128 x 128. A group of 128 threads fetches operand tiles of depth 64 ahead,
// through a ring of STAGES; two more take turns: one multiplies a tile while the other writes its last one, which at a depth of 768
// takes about as long. The blocks are persistent: each takes every so-many-th tile of all matrices of the batch.
// Four blocks form a cluster and compute 2 x 2 neighbouring tiles. Each operand tile is needed by two of them: each fetches half of
// it and the hardware delivers it to both, which halves the reads from L2. Without it they, not the products, set the pace: a tile of
// 128 x 128 does 64 operations for each byte, and some 7.5 TB/s come out of that cache.
// Symmetric results: only tiles on and below the diagonal exist; a tile is also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_internal.cuh"
#include "llmc/cuda/ns_wgmma.cuh"

enum {
    SIDE = 128,           // of a tile
    DEPTH = 64,           // of a stage: 128 bytes, the width of the swizzle
    STAGES = 6,           // 192 KB
    GROUP = 128,          // threads of a warpgroup
    HALF = 64,            // of a tile: quarters of it, 64 x 64, pass through the staging area
    THREADS = 3 * GROUP,
    FETCH_REGISTERS = 24, // 128 * 24 + 256 * 240 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 240,
    CLUSTER = 4,
    OPERAND_BYTES = SIDE * DEPTH * 2,
    STAGING_BYTES = HALF * HALF * 2, // of one warpgroup
    SHARED_BYTES = STAGES * 2 * OPERAND_BYTES + 2 * STAGING_BYTES + 2 * STAGES * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");

// What the kernel needs beside its tensor maps.
struct TileWork {
    const void *d;
    void *out;
    int64_t d_stride, out_stride;
    int d_pitch, out_pitch, rows, cols, depth;
    float alpha, beta;
    int row_squares, squares_each, squares; // squares of 2 x 2 tiles: in a column, in a matrix, in the batch
    bool out_vectors;                       // rows of out start on 16 bytes
};

#if NS_HOPPER

// A tile by its place in the matrix, in units of tiles.
struct Tile {
    int matrix, i, j;
    bool wanted; // false: outside of the matrix or above the diagonal; its block still fetches for the others
};

// The tile of this block in square `index`.
template <ProductForm FORM> static __device__ __forceinline__ Tile find_tile(const TileWork &w, int index, int rank)
{
    Tile t;
    t.matrix = index / w.squares_each;
    int rest = index - t.matrix * w.squares_each;
    if (FORM == PRODUCT_FULL)
        t.j = rest / w.row_squares, t.i = rest - t.j * w.row_squares; // neighbours share the tall operand's columns
    else
        triangle_position(rest, t.i, t.j);
    t.i = 2 * t.i + rank / 2;
    t.j = 2 * t.j + rank % 2;
    t.wanted = t.i * SIDE < w.rows && t.j * SIDE < w.cols && (FORM == PRODUCT_FULL || t.i >= t.j);
    return t;
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

struct SharedMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * 2 * OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *staging(int group) const { return base + STAGES * 2 * OPERAND_BYTES + group * STAGING_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)staging(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return (uint64_t *)staging(2) + STAGES + stage; }
};

// ---- fetching ------------------------------------------------------------------------------------------------------------

// One thread of each block runs this. Operand tiles come in halves of 64 rows (or columns): a's half rank % 2 for the two blocks of
// the same i, b's half rank / 2 for the two of the same j.
template <ProductForm FORM>
static __device__ __forceinline__ void fetch_tiles(const SharedMemory &m, const CUtensorMap *map_a, const CUtensorMap *map_b, const TileWork &w,
                                                   int rank)
{
    Ring ring;
    int row = rank / 2, col = rank % 2;
    uint16_t same_row = (uint16_t)(3 << 2 * row), same_col = (uint16_t)(5 << col);
    for (int index = blockIdx.x / CLUSTER; index < w.squares; index += gridDim.x / CLUSTER) {
        Tile t = find_tile<FORM>(w, index, rank);
        int a_row = t.i * SIDE + col * HALF, b_at = t.j * SIDE + row * HALF;
        for (int k = 0; k < w.depth; k += DEPTH) {
            uint64_t *full = m.full(ring.stage);
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            barrier_arrive_expect(full, 2 * OPERAND_BYTES); // what the others send counts too
            tile_load(m.a(ring.stage) + col * OPERAND_BYTES / 2, map_a, full, k, a_row, t.matrix, same_row);
            uint8_t *b = m.b(ring.stage) + row * OPERAND_BYTES / 2;
            if (FORM == PRODUCT_FULL)
                tile_load(b, map_b, full, b_at, k, t.matrix, same_col);
            else
                tile_load(b, map_b, full, k, b_at, t.matrix, same_col);
            ring.advance();
        }
    }
}

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Tells all that write into this stage of this block, itself and two others, that a warp has read it.
static __device__ __forceinline__ void release(const SharedMemory &m, int stage, int rank)
{
    int lane = threadIdx.x % WARP;
    if (lane < 3) barrier_arrive_at(m.empty(stage), rank ^ lane); // the same block, the one beside, the one below or above
}

// The groups multiply one after the other. This keeps the tensor cores on one tile at a time, and it is needed: the parity of a
// barrier tells a phase from the next one, not from the one after, so no group may wait for a stage that the other still has to read.
enum { TURN = 3 }; // barriers 3 and 4; 1 and 2 belong to the staging areas
static __device__ __forceinline__ void take_turn(int group) { group_sync(TURN + group, 2 * GROUP); }
static __device__ __forceinline__ void give_turn(int group) { group_arrive(TURN + group, 2 * GROUP); }

// sum (128, 128) = one tile; sum[h] has rows 64 h to 64 h + 63, in the layout of WarpgroupProduct.
// next_group: whose turn is next, negative when no tile is left.
template <typename T, ProductForm FORM>
static __device__ __forceinline__ void multiply_tile(float (&sum)[2][64], const SharedMemory &m, Ring &ring, int blocks, int rank, int next_group)
{
    constexpr bool along_columns = FORM == PRODUCT_FULL;
    constexpr int b_step = along_columns ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    int previous = 0;
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.a(ring.stage), 0), b = operand(m.b(ring.stage), along_columns ? OPERAND_BYTES / 2 : 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                WarpgroupProduct<T, along_columns>::run(sum[h], operand_advance(a, h * OPERAND_BYTES / 2 + 32 * k), operand_advance(b, b_step * k),
                                                        block + k > 0);
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

// ---- writing -------------------------------------------------------------------------------------------------------------

template <typename T> static __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float lo, float hi) { return pack2(lo, hi); }
template <> __device__ __forceinline__ uint32_t pack<__half>(float lo, float hi)
{
    __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&h);
}
template <typename T> static __device__ __forceinline__ float2 unpack(uint32_t u)
{
    const T *v = reinterpret_cast<const T *>(&u);
    return make_float2(to_float(v[0]), to_float(v[1]));
}

// A quarter of a tile: 64 rows from row0, 64 columns from col0 of one matrix; row_half, col_half: which quarter.
struct Patch {
    int row0, col0, row_half, col_half, group;
    bool diagonal; // the tile lies on the diagonal
};

template <bool SYMMETRIC> static __device__ __forceinline__ Patch find_patch(const Tile &t, int quarter, int group)
{
    int row_half = quarter / 2, col_half = quarter % 2;
    return {t.i * SIDE + row_half * HALF, t.j * SIDE + col_half * HALF, row_half, col_half, group, SYMMETRIC && t.i == t.j};
}

// Byte offset of 16-byte chunk `chunk` of row `row` of the staging area (64 rows of 128 bytes), swizzled against bank conflicts.
static __device__ __forceinline__ uint32_t staged(int row, int chunk) { return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4)); }

// A warp's 16 rows of d's patch, coalesced; on their way while the warp does something else.
struct Prefetched {
    uint4 v[4];
};
template <typename T, bool HAS_D> static __device__ __forceinline__ Prefetched prefetch_d(const TileWork &w, const Tile &t, const Patch &at)
{
    Prefetched p = {};
    if (!HAS_D) return p;
    const T *d = (const T *)w.d + t.matrix * w.d_stride;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        int r = warp * 16 + q * 4 + lane / 8, c = lane % 8;
        p.v[q] = make_uint4(0, 0, 0, 0);
        if (at.row0 + r < w.rows && at.col0 + 8 * c < w.cols)
            p.v[q] = *reinterpret_cast<const uint4 *>(d + (int64_t)(at.row0 + r) * w.d_pitch + at.col0 + 8 * c);
    }
    return p;
}
static __device__ __forceinline__ void stage_d(uint8_t *staging, const Prefetched &p)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int q = 0; q < 4; q++) *reinterpret_cast<uint4 *>(staging + staged(warp * 16 + q * 4 + lane / 8, lane % 8)) = p.v[q];
    __syncwarp();
}

// An 8 x 8 block on the diagonal: what is above takes the bits of what is below.
static __device__ __forceinline__ uint32_t mirrored_block(uint32_t block)
{
    uint32_t t = block_transposed(block);
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    uint32_t low = row >= col ? block : t, high = row >= col + 1 ? block : t;
    return (low & 0xffffu) | (high & 0xffff0000u);
}

// The patch, row by row: each warp its own 16 rows, whose values lie in the staging area.
template <typename T> static __device__ __forceinline__ void write_rows(T *out, const uint8_t *staging, const TileWork &w, const Patch &at)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    if (w.out_vectors) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            int r = warp * 16 + q * 4 + lane / 8, c = lane % 8;
            uint4 v = *reinterpret_cast<const uint4 *>(staging + staged(r, c));
            bool wanted = !at.diagonal || at.col_half * 8 + c <= at.row_half * 8 + r / 8;
            if (wanted && at.row0 + r < w.rows && at.col0 + 8 * c < w.cols)
                *reinterpret_cast<uint4 *>(out + (int64_t)(at.row0 + r) * w.out_pitch + at.col0 + 8 * c) = v;
        }
    } else { // never symmetric: an n x n matrix of this path has rows of whole vectors
        for (int r = warp * 16; r < warp * 16 + 16 && at.row0 + r < w.rows; r++)
            for (int col = lane; col < HALF && at.col0 + col < w.cols; col += WARP)
                out[(int64_t)(at.row0 + r) * w.out_pitch + at.col0 + col] =
                    *reinterpret_cast<const T *>(staging + staged(r, col / 8) + col % 8 * 2);
    }
}

// The patch's mirror image, rows col0.. and columns row0.. of the matrix. `packed`: blocks (g, rows 0-7) and (g, rows 8-15).
template <typename T>
static __device__ __forceinline__ void write_mirrored(T *out, uint8_t *staging, const uint32_t (&packed)[16], const TileWork &w, const Patch &at)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, thread = threadIdx.x % GROUP;
    group_sync(1 + at.group, GROUP); // the staging area has been read
#pragma unroll
    for (int g = 0; g < 8; g += 2) {
        int row = 8 * (g + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        store_transposed(shared_address(staging) + staged(row, chunk), packed[2 * g], packed[2 * g + 1], packed[2 * g + 2], packed[2 * g + 3]);
    }
    group_sync(1 + at.group, GROUP);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        int r = q * 16 + thread / 8, c = thread % 8;
        uint4 v = *reinterpret_cast<const uint4 *>(staging + staged(r, c));
        bool wanted = !at.diagonal || at.row_half * 8 + c > at.col_half * 8 + r / 8;
        if (wanted && at.col0 + r < w.cols && at.row0 + 8 * c < w.rows)
            *reinterpret_cast<uint4 *>(out + (int64_t)(at.col0 + r) * w.out_pitch + at.row0 + 8 * c) = v;
    }
    group_sync(1 + at.group, GROUP); // before the next patch comes in
}

// One quarter; `d` holds what prefetch_d brought for it.
template <typename T, bool SYMMETRIC, bool HAS_D, int QUARTER>
static __device__ __forceinline__ void write_quarter(const float (&sum)[64], uint8_t *staging, const Prefetched &d, const TileWork &w,
                                                     const Tile &t, int group)
{
    T *out = (T *)w.out + t.matrix * w.out_stride;
    Patch at = find_patch<SYMMETRIC>(t, QUARTER, group);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    if (HAS_D) stage_d(staging, d);
    uint32_t packed[16];
#pragma unroll
    for (int g = 0; g < 8; g++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t *slot = reinterpret_cast<uint32_t *>(staging + staged(warp * 16 + e * 8 + lane / 4, g) + lane % 4 * 4);
            const float *s = sum + QUARTER % 2 * 32 + g * 4 + e * 2;
            float2 v = HAS_D ? unpack<T>(*slot) : make_float2(0, 0);
            uint32_t block = HAS_D ? pack<T>(w.alpha * s[0] + w.beta * v.x, w.alpha * s[1] + w.beta * v.y)
                                   : pack<T>(w.alpha * s[0], w.alpha * s[1]);
            if (SYMMETRIC && at.diagonal && QUARTER % 2 == QUARTER / 2 && g == 2 * warp + e) block = mirrored_block(block);
            packed[2 * g + e] = block;
            *slot = block;
        }
    __syncwarp();
    write_rows(out, staging, w, at);
    if (SYMMETRIC)
        write_mirrored(out, staging, packed, w, at);
    else
        __syncwarp();
}

// Each quarter's d is fetched while the one before is written.
template <typename T, bool SYMMETRIC, bool HAS_D>
static __device__ __forceinline__ void write_tile(const float (&sum)[2][64], uint8_t *staging, Prefetched d, const TileWork &w, const Tile &t, int group)
{
    Prefetched next = prefetch_d<T, HAS_D>(w, t, find_patch<SYMMETRIC>(t, 1, group));
    write_quarter<T, SYMMETRIC, HAS_D, 0>(sum[0], staging, d, w, t, group);
    d = prefetch_d<T, HAS_D>(w, t, find_patch<SYMMETRIC>(t, 2, group));
    write_quarter<T, SYMMETRIC, HAS_D, 1>(sum[0], staging, next, w, t, group);
    next = prefetch_d<T, HAS_D>(w, t, find_patch<SYMMETRIC>(t, 3, group));
    write_quarter<T, SYMMETRIC, HAS_D, 2>(sum[1], staging, d, w, t, group);
    write_quarter<T, SYMMETRIC, HAS_D, 3>(sum[1], staging, next, w, t, group);
}

// fp32 results, straight from the registers: four lanes fill a 32-byte sector of a row, eight one of the mirror image.
static __device__ __forceinline__ void write_tile_fp32(const float (&sum)[2][64], const TileWork &w, const Tile &t)
{
    float *out = (float *)w.out + t.matrix * w.out_stride;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        int row = t.i * SIDE + i / 64 * HALF + warp * 16 + i / 2 % 2 * 8 + lane / 4;
        int col = t.j * SIDE + i % 64 / 4 * 8 + lane % 4 * 2 + i % 2;
        float value = w.alpha * sum[i / 64][i % 64];
        if (row >= w.rows || col > row) continue;
        out[(int64_t)row * w.out_pitch + col] = value;
        if (col < row) out[(int64_t)col * w.out_pitch + row] = value;
    }
}

// Group `group` takes every second tile of the block.
template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
static __device__ __forceinline__ void compute_tiles(const SharedMemory &m, const TileWork &w, int group, int rank)
{
    constexpr bool symmetric = FORM != PRODUCT_FULL;
    Ring ring;
    int blocks = (w.depth + DEPTH - 1) / DEPTH, clusters = gridDim.x / CLUSTER;
    ring.advance(group * blocks);
    if (group == 1) give_turn(0);
    for (int index = blockIdx.x / CLUSTER + group * clusters; index < w.squares; index += 2 * clusters) {
        Tile t = find_tile<FORM>(w, index, rank);
        int next_group = index + clusters < w.squares ? 1 - group : -1;
        if (!t.wanted) {
            take_turn(group);
            pass_over_tile(m, ring, blocks, rank);
            if (next_group >= 0) give_turn(next_group);
        } else if (FP32_OUT) {
            float sum[2][64];
            take_turn(group);
            multiply_tile<T, FORM>(sum, m, ring, blocks, rank, next_group);
            write_tile_fp32(sum, w, t);
        } else {
            float sum[2][64];
            Prefetched d = prefetch_d<T, HAS_D>(w, t, find_patch<symmetric>(t, 0, group));
            take_turn(group);
            multiply_tile<T, FORM>(sum, m, ring, blocks, rank, next_group);
            write_tile<T, symmetric, HAS_D>(sum, m.staging(group), d, w, t, group);
        }
        ring.advance(blocks);
    }
}

#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
__global__ void __launch_bounds__(THREADS, 1)
    tensor_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const TileWork w)
{
#if NS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / GROUP; // 2: fetches
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), 3 * GROUP / WARP);
        barrier_init_fence();
    } else if (threadIdx.x == 2 * GROUP) {
        tile_prefetch_map(&map_a);
        tile_prefetch_map(&map_b);
    }
    launch_dependents();
    cluster_sync();
    wait_for_predecessors();
    if (group < 2) {
        registers_grow<COMPUTE_REGISTERS>();
        compute_tiles<T, FORM, FP32_OUT, HAS_D>(m, w, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        if (threadIdx.x == 2 * GROUP) fetch_tiles<FORM>(m, &map_a, &map_b, w, rank);
    }
    cluster_sync(); // others may still arrive at this block's barriers
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

// Boxes of 64 rows and columns of a (batch, rows, cols) tensor; what lies outside of a matrix reads as zero.
static CUtensorMap tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch};
    cuuint64_t strides[2] = {(cuuint64_t)pitch * 2, (cuuint64_t)stride * 2};
    cuuint32_t box[3] = {HALF, HALF, 1}, steps[3] = {1, 1, 1};
    CUresult r = encode_function()(&map, dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                                   (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch, (int)r);
    return map;
}

template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
static void launch(cudaStream_t s, const CUtensorMap &map_a, const CUtensorMap &map_b, const TileWork &w)
{
    static int clusters; // that the device holds at a time: more would wait for a whole first round
    auto kernel = tensor_kernel<T, FORM, FP32_OUT, HAS_D>;
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
    config.gridDim = dim3((unsigned)(CLUSTER * min_i64(w.squares, clusters)));
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, map_a, map_b, w));
}

template <typename T>
static void launch_form(cudaStream_t s, ProductForm form, bool fp32_out, const CUtensorMap &a, const CUtensorMap &b, const TileWork &w)
{
    if (form == PRODUCT_GRAM && fp32_out)
        launch<T, PRODUCT_GRAM, true, false>(s, a, b, w);
    else if (form == PRODUCT_FULL && w.d)
        launch<T, PRODUCT_FULL, false, true>(s, a, b, w);
    else if (form == PRODUCT_FULL)
        launch<T, PRODUCT_FULL, false, false>(s, a, b, w);
    else if (w.d) // a Gram matrix is a symmetric product whose b is a
        launch<T, PRODUCT_SYMMETRIC, false, true>(s, a, b, w);
    else
        launch<T, PRODUCT_SYMMETRIC, false, false>(s, a, b, w);
}

void ns_tensor_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype, const Product &p)
{
    bool full = form == PRODUCT_FULL;
    int64_t row_squares = ceil_div(p.rows, 2 * SIDE), col_squares = ceil_div(p.cols, 2 * SIDE);
    int64_t each = full ? row_squares * col_squares : row_squares * (row_squares + 1) / 2;
    if (each * p.batch > INT32_MAX)
        fatal(EXIT_BAD_INPUT, "Newton-Schulz: %d matrices of %d x %d at once are too many; set a batch limit", p.batch, p.rows, p.cols);
    TileWork w = {p.d, p.out, p.d_stride, p.out_stride, p.d_pitch, p.out_pitch, p.rows, p.cols, p.depth, p.alpha, p.beta,
                  (int)row_squares, (int)each, (int)(each * p.batch), p.out_pitch % 8 == 0};
    CUtensorMap map_a = tensor_map(dtype, p.a, p.rows, p.depth, p.a_pitch, p.a_stride, p.batch);
    CUtensorMap map_b = full ? tensor_map(dtype, p.b, p.depth, p.cols, p.b_pitch, p.b_stride, p.batch)
                             : tensor_map(dtype, p.b, p.cols, p.depth, p.b_pitch, p.b_stride, p.batch);
    if (dtype == NS_BF16)
        launch_form<__nv_bfloat16>(s, form, out_dtype == NS_FP32, map_a, map_b, w);
    else
        launch_form<__half>(s, form, out_dtype == NS_FP32, map_a, map_b, w);
}
