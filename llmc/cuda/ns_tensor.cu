// Newton-Schulz products on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// A tile of 128 x 128 is computed by two warpgroups, 64 rows each, from operand tiles of depth 64 that one more warp fetches ahead
// through a ring of STAGES. The blocks are persistent: each takes every gridDim.x-th tile of all matrices of the batch, and the
// ring runs on from tile to tile. Two blocks share a multiprocessor, so that one multiplies while the other writes its result:
// at a depth of 768 the writing would otherwise cost a quarter of the time.
// Symmetric results: only tiles on and below the diagonal exist; a tile is also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_internal.cuh"
#include "llmc/cuda/ns_wgmma.cuh"

enum {
    SIDE = 128,           // of a tile
    DEPTH = 64,           // of a stage: 128 bytes, the width of the swizzle
    STAGES = 3,           // 96 KB
    GROUP = 128,          // threads of a warpgroup
    GROUP_ROWS = 64,      // rows of the tile that a warpgroup computes
    HALF = 64,            // columns that pass through the staging area at a time
    THREADS = 2 * GROUP + WARP,
    BLOCKS_PER_SM = 2,
    OPERAND_BYTES = SIDE * DEPTH * 2,
    STAGING_BYTES = GROUP_ROWS * HALF * 2, // of one warpgroup
    SHARED_BYTES = STAGES * 2 * OPERAND_BYTES + 2 * STAGING_BYTES + 2 * STAGES * 8
};
static_assert(BLOCKS_PER_SM * (SHARED_BYTES + 1024) <= 228 * 1024, "two blocks must fit into the shared memory of a multiprocessor");

// What the kernel needs beside its tensor maps.
struct TileWork {
    const void *d;
    void *out;
    int64_t d_stride, out_stride;
    int d_pitch, out_pitch, rows, cols, depth;
    float alpha, beta;
    int row_tiles, tiles_each, tiles; // of a matrix, of the batch
    bool same_operand;                // b is a: on the diagonal one tile serves as both
    bool out_vectors;                 // rows of out start on 16 bytes
};

__global__ void hopper_probe_kernel(int *compiled_in) { *compiled_in = NS_HOPPER; }

#if NS_HOPPER

struct Tile {
    int matrix, i, j; // in units of tiles
};

template <ProductForm FORM> static __device__ __forceinline__ Tile find_tile(const TileWork &w, int index)
{
    Tile t;
    t.matrix = index / w.tiles_each;
    int rest = index - t.matrix * w.tiles_each;
    if (FORM == PRODUCT_FULL)
        t.j = rest / w.row_tiles, t.i = rest - t.j * w.row_tiles; // neighbours share the tall operand's columns
    else
        triangle_position(rest, t.i, t.j);
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

// One thread runs this.
template <ProductForm FORM>
static __device__ __forceinline__ void fetch_tiles(const SharedMemory &m, const CUtensorMap *map_a, const CUtensorMap *map_b, const TileWork &w)
{
    Ring ring;
    for (int index = blockIdx.x; index < w.tiles; index += gridDim.x) {
        Tile t = find_tile<FORM>(w, index);
        bool one = w.same_operand && t.i == t.j;
        for (int k = 0; k < w.depth; k += DEPTH) {
            uint64_t *full = m.full(ring.stage);
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            barrier_arrive_expect(full, one ? OPERAND_BYTES : 2 * OPERAND_BYTES);
            tile_load(m.a(ring.stage), map_a, full, k, t.i * SIDE, t.matrix);
            if (FORM == PRODUCT_FULL) { // two boxes of 64 columns: the swizzle is no wider
                tile_load(m.b(ring.stage), map_b, full, t.j * SIDE, k, t.matrix);
                tile_load(m.b(ring.stage) + OPERAND_BYTES / 2, map_b, full, t.j * SIDE + 64, k, t.matrix);
            } else if (!one) {
                tile_load(m.b(ring.stage), map_b, full, k, t.j * SIDE, t.matrix);
            }
            ring.advance();
        }
    }
}

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// sum (64, 128) = the warpgroup's rows of one tile. Leaves the last products pending, with their stage still to be released.
template <typename T, ProductForm FORM>
static __device__ __forceinline__ void multiply_tile(float (&sum)[64], const SharedMemory &m, Ring &ring, const TileWork &w, int group, bool one)
{
    constexpr bool along_columns = FORM == PRODUCT_FULL;
    constexpr int b_step = along_columns ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    int blocks = (w.depth + DEPTH - 1) / DEPTH, previous = 0;
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.a(ring.stage) + group * GROUP_ROWS * 128, 0);
        uint64_t b = operand(one ? m.a(ring.stage) : m.b(ring.stage), along_columns ? OPERAND_BYTES / 2 : 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
            WarpgroupProduct<T, along_columns>::run(sum, operand_advance(a, 32 * k), operand_advance(b, b_step * k), block + k > 0);
        products_commit();
        if (block > 0) {
            products_wait<1>();
            if (threadIdx.x % WARP == 0) barrier_arrive(m.empty(previous));
        }
        previous = ring.stage;
        ring.advance();
    }
    products_wait<0>();
    if (threadIdx.x % WARP == 0) barrier_arrive(m.empty(previous));
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

// Where a warpgroup writes: 64 rows from row0, 64 columns from col0 of one matrix.
struct Patch {
    int row0, col0, group, half;
    bool diagonal;
};

// Byte offset of 16-byte chunk `chunk` of row `row` of the staging area (64 rows of 128 bytes), swizzled against bank conflicts.
static __device__ __forceinline__ uint32_t staged(int row, int chunk) { return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4)); }

// d's patch into the staging area; each warp brings its own 16 rows.
template <typename T> static __device__ __forceinline__ void stage_d(uint8_t *staging, const T *d, const TileWork &w, const Patch &at)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        int r = warp * 16 + q * 4 + lane / 8, c = lane % 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (at.row0 + r < w.rows && at.col0 + 8 * c < w.cols)
            v = *reinterpret_cast<const uint4 *>(d + (int64_t)(at.row0 + r) * w.d_pitch + at.col0 + 8 * c);
        *reinterpret_cast<uint4 *>(staging + staged(r, c)) = v;
    }
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
            bool wanted = !at.diagonal || at.half * 8 + c <= at.group * 8 + r / 8;
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
        bool wanted = !at.diagonal || at.group * 8 + c > at.half * 8 + r / 8;
        if (wanted && at.col0 + r < w.cols && at.row0 + 8 * c < w.rows)
            *reinterpret_cast<uint4 *>(out + (int64_t)(at.col0 + r) * w.out_pitch + at.row0 + 8 * c) = v;
    }
    group_sync(1 + at.group, GROUP); // before the next patch comes in
}

// One half (64 columns) of the warpgroup's rows.
template <typename T, bool SYMMETRIC, int HALF_INDEX>
static __device__ __forceinline__ void write_half(const float (&sum)[64], uint8_t *staging, const TileWork &w, const Tile &t, int group)
{
    T *out = (T *)w.out + t.matrix * w.out_stride;
    Patch at = {t.i * SIDE + group * GROUP_ROWS, t.j * SIDE + HALF_INDEX * HALF, group, HALF_INDEX, SYMMETRIC && t.i == t.j};
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    if (w.d) stage_d(staging, (const T *)w.d + t.matrix * w.d_stride, w, at);
    uint32_t packed[16];
#pragma unroll
    for (int g = 0; g < 8; g++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uint32_t *slot = reinterpret_cast<uint32_t *>(staging + staged(warp * 16 + e * 8 + lane / 4, g) + lane % 4 * 4);
            const float *s = sum + HALF_INDEX * 32 + g * 4 + e * 2;
            float2 d = w.d ? unpack<T>(*slot) : make_float2(0, 0);
            uint32_t block = pack<T>(w.alpha * s[0] + w.beta * d.x, w.alpha * s[1] + w.beta * d.y);
            if (SYMMETRIC && at.diagonal && HALF_INDEX == group && g == 2 * warp + e) block = mirrored_block(block);
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

// fp32 results, straight from the registers: four lanes fill a 32-byte sector of a row, eight one of the mirror image.
static __device__ __forceinline__ void write_tile_fp32(const float (&sum)[64], const TileWork &w, const Tile &t, int group)
{
    float *out = (float *)w.out + t.matrix * w.out_stride;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int row = t.i * SIDE + group * GROUP_ROWS + warp * 16 + i / 2 % 2 * 8 + lane / 4;
        int col = t.j * SIDE + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row >= w.rows || col > row) continue;
        out[(int64_t)row * w.out_pitch + col] = w.alpha * sum[i];
        if (col < row) out[(int64_t)col * w.out_pitch + row] = w.alpha * sum[i];
    }
}

template <typename T, ProductForm FORM, bool FP32_OUT>
static __device__ __forceinline__ void compute_tiles(const SharedMemory &m, const TileWork &w, int group)
{
    Ring ring;
    for (int index = blockIdx.x; index < w.tiles; index += gridDim.x) {
        Tile t = find_tile<FORM>(w, index);
        float sum[64];
        multiply_tile<T, FORM>(sum, m, ring, w, group, w.same_operand && t.i == t.j);
        if (FP32_OUT) {
            write_tile_fp32(sum, w, t, group);
        } else {
            write_half<T, FORM != PRODUCT_FULL, 0>(sum, m.staging(group), w, t, group);
            write_half<T, FORM != PRODUCT_FULL, 1>(sum, m.staging(group), w, t, group);
        }
    }
}

#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T, ProductForm FORM, bool FP32_OUT>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    tensor_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, const TileWork w)
{
#if NS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int group = threadIdx.x / GROUP; // 2: the warp that fetches
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), 2 * GROUP / WARP);
        barrier_init_fence();
    } else if (threadIdx.x == 2 * GROUP) {
        tile_prefetch_map(&map_a);
        tile_prefetch_map(&map_b);
    }
    launch_dependents();
    __syncthreads();
    wait_for_predecessors();
    if (group < 2)
        compute_tiles<T, FORM, FP32_OUT>(m, w, group);
    else if (threadIdx.x == 2 * GROUP)
        fetch_tiles<FORM>(m, &map_a, &map_b, w);
#endif
}

bool ns_tensor_available(void)
{
    static int available = -1; // asked of the device once, before anything is captured
    if (available < 0) {
        int *flag = NULL, compiled_in = 0;
        if (device_state.compute == 90) {
            CUDA_CHECK(cudaMalloc(&flag, sizeof *flag));
            hopper_probe_kernel<<<1, 1>>>(flag);
            CHECK_LAUNCH();
            CUDA_CHECK(cudaMemcpy(&compiled_in, flag, sizeof compiled_in, cudaMemcpyDeviceToHost));
            CUDA_CHECK(cudaFree(flag));
        }
        available = compiled_in;
        if (device_state.compute == 90 && !available)
            note("compiled without Hopper's own instructions: Newton-Schulz takes its slow portable path; build with GPU_ARCH=90a");
    }
    return available;
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

// Boxes of 64 columns and box_rows rows of a (batch, rows, cols) tensor; what lies outside of a matrix reads as zero.
static CUtensorMap tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch, int box_rows)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch};
    cuuint64_t strides[2] = {(cuuint64_t)pitch * 2, (cuuint64_t)stride * 2};
    cuuint32_t box[3] = {64, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    CUresult r = encode_function()(&map, dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
                                   (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch, (int)r);
    return map;
}

template <typename T, ProductForm FORM, bool FP32_OUT>
static void launch(cudaStream_t s, const CUtensorMap &map_a, const CUtensorMap &map_b, const TileWork &w)
{
    static bool prepared;
    if (!prepared) {
        CUDA_CHECK(cudaFuncSetAttribute(tensor_kernel<T, FORM, FP32_OUT>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        prepared = true;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)min_i64(w.tiles, (int64_t)device_state.sms * BLOCKS_PER_SM));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = s;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, tensor_kernel<T, FORM, FP32_OUT>, map_a, map_b, w));
}

template <typename T>
static void launch_form(cudaStream_t s, ProductForm form, bool fp32_out, const CUtensorMap &a, const CUtensorMap &b, const TileWork &w)
{
    if (form == PRODUCT_GRAM && fp32_out)
        launch<T, PRODUCT_GRAM, true>(s, a, b, w);
    else if (form == PRODUCT_FULL)
        launch<T, PRODUCT_FULL, false>(s, a, b, w);
    else
        launch<T, PRODUCT_SYMMETRIC, false>(s, a, b, w); // a Gram matrix is one whose b is a
}

void ns_tensor_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype, const Product &p)
{
    bool full = form == PRODUCT_FULL;
    int64_t row_tiles = ceil_div(p.rows, SIDE), col_tiles = ceil_div(p.cols, SIDE);
    int64_t each = full ? row_tiles * col_tiles : row_tiles * (row_tiles + 1) / 2;
    if (each * p.batch > INT32_MAX)
        fatal(EXIT_BAD_INPUT, "Newton-Schulz: %d matrices of %d x %d at once are too many; set a batch limit", p.batch, p.rows, p.cols);
    TileWork w = {p.d, p.out, p.d_stride, p.out_stride, p.d_pitch, p.out_pitch, p.rows, p.cols, p.depth, p.alpha, p.beta,
                  (int)row_tiles, (int)each, (int)(each * p.batch), p.a == p.b, p.out_pitch % 8 == 0};
    CUtensorMap map_a = tensor_map(dtype, p.a, p.rows, p.depth, p.a_pitch, p.a_stride, p.batch, SIDE);
    CUtensorMap map_b = full ? tensor_map(dtype, p.b, p.depth, p.cols, p.b_pitch, p.b_stride, p.batch, DEPTH)
                             : tensor_map(dtype, p.b, p.cols, p.depth, p.b_pitch, p.b_stride, p.batch, SIDE);
    if (dtype == NS_BF16)
        launch_form<__nv_bfloat16>(s, form, out_dtype == NS_FP32, map_a, map_b, w);
    else
        launch_form<__half>(s, form, out_dtype == NS_FP32, map_a, map_b, w);
}
