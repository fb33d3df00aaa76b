// sm90 GEMM of e4m3 operands whose results are kept as e4m3 codes, plain and transposed, with their largest
// magnitude: relu^2 of the product, in bf16 too or as codes alone, and the gradient before relu^2
// (matmul_fp8_relu2, _codes and _backward).
//
// Mainloop and pipeline are those of sm90_tile.cuh. K is short and the epilogue long, so it has warps of its
// own:
//
//   tile         128 x 128, in clusters of 2 CTAs
//   warps        warpgroups 0 and 1: WGMMA (128 registers); 2: one producer thread (24); 3 and 4: epilogue of
//                the warpgroup three before (96), which overlaps with the next tiles' mainloops
//   smem         4 stages of 32 KB; for each consumer warpgroup two packed tiles of 64 rows x 128 columns in
//                bf16, and two transposed panels of codes: 40 KB
//   handover     a warp of consumers gives its 16 rows to one warp of the epilogue, and gets them back, by
//                mbarriers, two tiles in turn
//
// The epilogue takes the tile in panels of 64 columns:
//
//   ld.shared    a thread four neighbouring rows x eight columns
//   st.global    their codes, whole sectors of rows
//   transpose    4 x 4 bytes in registers; words of four rows go to the transposed panel of 64 x 64 codes
//   st.global    after a barrier of the warpgroup the transposed panel, 64 bytes a column
//
// The gradient's factor 2 sqrt(y) is a function of y's code: a lane holds one entry of its table, and
// shuffles look it up without bank conflicts. TMA brings a tile of y to L2 while its product is computed.
//
// Bound (one H200, K = 768): relu^2 1108 TFLOP/s, the gradient 888, by its epilogue; factors are multiplied
// in pairs of bf16. Tried: codes of y loaded a tile ahead into registers, 730. With the epilogue between the
// k steps of the consumers, as in sm90_gemm_kernel.cuh: 849 and 568.
#define TILE_COLUMNS 128
#define TILE_STAGING_BYTES (5 * 64 * 128) // two tiles of a warpgroup, and two panels of codes
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_gemm_kernel.cuh"
#include "llmc/cuda/head/fp8_transpose.cuh"

enum {
    PANELS = TILE_N / PANEL,
    TRANSPOSED_BYTES = PANEL * WARPGROUP_M, // of a transposed panel
    CODES_THREADS = 5 * WARPGROUP,
    MATH_WARPS = 2 * WARPGROUP / WARP,
    BUFFERS = 2,          // packed tiles of a warpgroup
    MATH_REGISTERS = 128, // 256 * 128 + 128 * 24 + 256 * 96 <= 640 * 96, which is what a block starts with
    LOADING_REGISTERS = 24,
    EPILOGUE_REGISTERS = 96,
    PACKED_BYTES = PANELS * PANEL_BYTES,
    CODES_SHARED_BYTES = TILE_SHARED_BYTES + 2 * BUFFERS * MATH_WARPS * 8 // barriers
};
static_assert(BUFFERS * PACKED_BYTES + 2 * TRANSPOSED_BYTES <= STAGING_BYTES, "a warpgroup's staging buffer");
static_assert(CODES_SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct CodesWork {
    TileSchedule tiles;
    const float *scale_x, *scale_w, *alpha, *scale; // (1) fp32 device; alpha may be NULL
    uint8_t *codes, *transposed;                    // (rows, cols), (cols, rows) or NULL
    float *amax;                                    // (1) in/out, or NULL
    floatX *y;                                      // (rows, cols); RELU2_KEPT
    const uint8_t *y8;                              // (rows, cols); gradient
    const float *scale_y;                           // (1)
    int rows, cols;
};

#if HOPPER

// Bits of the factor 2 sqrt(scale_y * code) as bf16, from the root rounded to it. Two steps of a code's
// exponent double it, so that 24 of them give all: of lane i below 8 it is that of the subnormal code i, of
// lane 16 + i that of codes i + 16 k, as k = 0 would have it.
static __device__ __forceinline__ uint32_t lane_factor(const CodesWork &w)
{
    int lane = threadIdx.x % WARP, code = lane < 24 ? lane : lane - 16;
    float root = to_bf16(__fsqrt_rn(e4m3_value(code) * *w.scale_y));
    return __float_as_uint(lane >= 16 && lane < 24 ? root : 2 * root) >> 16;
}

// Those of four codes of y, which have no sign, as two pairs; of NaN some number: what it meets is NaN, too.
// Byte k of `lanes` is code k below 8, and code k | 16 from there on; lanes count mod 32.
static __device__ __forceinline__ uint2 factors_of_codes(uint32_t factors, uint32_t codes)
{
    uint32_t lanes = codes | ((codes + 0x78787878u) >> 3 & 0x10101010u), doublings = codes & 0x70707070u,
             f[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        f[k] = __shfl_sync(0xffffffffu, factors, (int)(lanes >> 8 * k));
    return make_uint2(__byte_perm(f[0], f[1], 0x5410) + 8 * __byte_perm(doublings, 0, 0x4140),
                      __byte_perm(f[2], f[3], 0x5410) + 8 * __byte_perm(doublings, 0, 0x4342));
}

// Products of pairs of bf16, rounded once.
static __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b)
{
    __nv_bfloat162 p =
        __hmul2_rn(*reinterpret_cast<__nv_bfloat162 *>(&a), *reinterpret_cast<__nv_bfloat162 *>(&b));
    return *reinterpret_cast<uint32_t *>(&p);
}

// Eight gradients, from products and the codes of y.
static __device__ __forceinline__ uint4 gradients8(uint4 u, uint2 y8, uint32_t factors)
{
    uint2 lo = factors_of_codes(factors, y8.x), hi = factors_of_codes(factors, y8.y);
    return make_uint4(multiply2(u.x, lo.x), multiply2(u.y, lo.y), multiply2(u.z, hi.x), multiply2(u.w, hi.y));
}

// largest: of pairs so far, NaN once there is one.
template <CodesKind KIND> static __device__ __forceinline__ void raise_amax(__nv_bfloat162 &largest, uint4 u)
{
    const uint32_t pair[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162 *>(pair + k);
        largest = __hmax2_nan(largest, KIND == GRADIENT ? __habs2(x) : x);
    }
}

// Maxima of nonnegative floats are those of their bits, whatever their order; NaN is above infinity.
static __device__ __forceinline__ void store_amax(__nv_bfloat162 largest, float *amax)
{
    uint32_t pair = *reinterpret_cast<const uint32_t *>(&largest);
    uint32_t most = __reduce_max_sync(0xffffffffu, max(pair << 16, pair & 0xffff0000u));
    if (threadIdx.x % WARP == 0)
        atomicMax(reinterpret_cast<unsigned *>(amax), most);
}

// Those of relu^2 that is kept are products with the rounded reciprocal.
template <CodesKind KIND> static __device__ __forceinline__ uint2 codes8(uint4 u, Reciprocal inverse)
{
    float f[8];
    unpack8(u, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = KIND == RELU2_KEPT ? f[k] * inverse.most : quotient(f[k], inverse);
    return make_uint2(encode4(f[0], f[1], f[2], f[3], __NV_E4M3), encode4(f[4], f[5], f[6], f[7], __NV_E4M3));
}

// Address of the 16 bytes of rows 16 `slice` on of a column of a transposed panel: columns have 64 bytes, and
// those of neighbouring chunks of eight columns have their slices in another order, so that the words that a
// warp writes fall on twice as many banks as it has sectors.
static __device__ __forceinline__ int transposed_at(int col, int slice)
{
    return col * WARPGROUP_M + ((slice ^ col / 8 % 4) << 4);
}

// Writes the thread's four rows x eight columns of codes to a transposed panel. code: two words of each row.
static __device__ __forceinline__ void transpose_codes(uint8_t *transposed, const uint32_t *code, int chunk,
                                                       int slice, int quarter)
{
    uint32_t lo[4] = {code[0], code[2], code[4], code[6]}, hi[4] = {code[1], code[3], code[5], code[7]};
    transpose4(lo);
    transpose4(hi);
#pragma unroll
    for (int k = 0; k < 8; k++)
        *reinterpret_cast<uint32_t *>(transposed + transposed_at(8 * chunk + k, slice) + 4 * quarter) =
            k < 4 ? lo[k] : hi[k - 4];
}

// Stores the transposed panel of columns col to col + 63, rows row to row + 63.
static __device__ __forceinline__ void store_transposed(const CodesWork &w, const uint8_t *transposed,
                                                        int thread, int row, int col)
{
    int slice = thread % 4;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int c = pass * (PANEL / 2) + thread / 4;
        uint4 u = *reinterpret_cast<const uint4 *>(transposed + transposed_at(c, slice));
        if (col + c < w.cols && row + 16 * slice < w.rows)
            *reinterpret_cast<uint4 *>(w.transposed + (int64_t)(col + c) * w.rows + row + 16 * slice) = u;
    }
}

// Codes of y, of the thread's four rows x eight columns: two words of each row.
static __device__ __forceinline__ void load_y8(uint32_t *to, const CodesWork &w, int row, int col)
{
    const uint8_t *from = w.y8 + (int64_t)row * w.cols + col;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint2 y8 = row + i < w.rows && col < w.cols
                       ? __ldg(reinterpret_cast<const uint2 *>(from + (int64_t)i * w.cols))
                       : make_uint2(0, 0);
        to[2 * i] = y8.x;
        to[2 * i + 1] = y8.y;
    }
}

// A thread's factors of results.
struct CodeFactors {
    Reciprocal inverse; // of the codes' scale
    uint32_t of_lane;   // lane_factor
};

// Of a warp of consumers and the warp of the epilogue that takes its rows.
static __device__ __forceinline__ uint64_t *rows_full(const SharedStorage &m, int buffer, int warp)
{
    return m.empty(STAGES) + buffer * MATH_WARPS + warp;
}
static __device__ __forceinline__ uint64_t *rows_empty(const SharedStorage &m, int buffer, int warp)
{
    return rows_full(m, BUFFERS + buffer, warp);
}
static __device__ __forceinline__ uint8_t *packed_rows(const SharedStorage &m, int group, int buffer)
{
    return m.staging(group) + buffer * PACKED_BYTES;
}

using Handover = PipelineState<BUFFERS>;

// ---- consumers -------------------------------------------------------------------------------------------

// Packs the warp's rows of a tile.
template <CodesKind KIND>
static __device__ __forceinline__ void stage_rows(const float (&sum)[128], uint8_t *packed, int warp,
                                                  float scale)
{
    constexpr GemmEpilogue EPI = KIND == GRADIENT ? EPILOGUE_STORE : EPILOGUE_RELU2;
    uint32_t address = matrix_address(packed, warp % 4 * 16);
#pragma unroll
    for (int c = 0; c < TILE_N / 8; c += 2) {
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = sum + 4 * c + 2 * i;
            pair[i] = epilogue_pair<EPI, true>(x[0] * scale, x[1] * scale, 0);
        }
        stmatrix_x4((address ^ c % 8 << 4) + c / 8 * PANEL_BYTES, pair);
    }
}

template <CodesKind KIND>
static __device__ __forceinline__ void consume_codes(Consumer &g, const CodesWork &w)
{
    float scale = product_scale(w.scale_x, w.scale_w, w.alpha);
    Handover to;
    for (int index = blockIdx.x / CLUSTER; index < w.tiles.whole; index += gridDim.x / CLUSTER) {
        float sum[128];
        for (int k = 0; k < w.tiles.steps; k++)
            mainloop_step<LAYOUT_NT, TILE_N, E4m3>(sum, g, k);
        mainloop_finish<TILE_N>(sum, g);
        mbarrier_wait(rows_empty(g.m, to.stage, g.warp), to.parity ^ 1);
        stage_rows<KIND>(sum, packed_rows(g.m, g.group, to.stage), g.warp, scale);
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            mbarrier_arrive(rows_full(g.m, to.stage, g.warp));
        to.advance();
    }
}

// ---- epilogue --------------------------------------------------------------------------------------------

struct Epilogue {
    SharedStorage m;
    int group, warp; // of the consumers whose rows it takes; warp: of the CTA
    Handover from;
    __nv_bfloat162 largest;
    CodeFactors c;
};

// Codes of a panel at row, column of the thread's first element, both ways round. The transposed panels
// alternate: when a warp writes one of them, all have passed the barrier before the other one was stored, and
// have read this one before.
template <CodesKind KIND>
static __device__ __forceinline__ void store_panel(Epilogue &e, const CodesWork &w, const uint32_t (&y8)[8],
                                                   int panel, int row, int col)
{
    const uint8_t *staging = packed_rows(e.m, e.group, e.from.stage) + panel * PANEL_BYTES;
    uint8_t *transposed = packed_rows(e.m, e.group, BUFFERS) + panel % 2 * TRANSPOSED_BYTES;
    int thread = threadIdx.x % WARPGROUP, lane = thread % WARP, slice = thread / WARP, quarter = lane / 8,
        chunk = lane % 8, first = 16 * slice + 4 * quarter;
    int64_t at = (int64_t)row * w.cols + col;
    uint32_t code[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = first + i;
        uint4 u = *reinterpret_cast<const uint4 *>(staging + r * 128 + ((chunk ^ r % 8) << 4));
        if (KIND == GRADIENT)
            u = gradients8(u, make_uint2(y8[2 * i], y8[2 * i + 1]), e.c.of_lane);
        if (KIND == RELU2_KEPT && row + i < w.rows && col < w.cols)
            *reinterpret_cast<uint4 *>(w.y + at + (int64_t)i * w.cols) = u;
        raise_amax<KIND>(e.largest, u);
        uint2 mine = codes8<KIND>(u, e.c.inverse);
        if (row + i < w.rows && col < w.cols)
            *reinterpret_cast<uint2 *>(w.codes + at + (int64_t)i * w.cols) = mine;
        code[2 * i] = mine.x;
        code[2 * i + 1] = mine.y;
    }
    if (!w.transposed)
        return;
    transpose_codes(transposed, code, chunk, slice, quarter);
    named_barrier_sync(1 + e.group, WARPGROUP);
    store_transposed(w, transposed, thread, row - first, col - 8 * chunk);
}

// tile: of the consumer warpgroup's 64 rows
template <CodesKind KIND>
static __device__ __forceinline__ void store_tile(Epilogue &e, const CodesWork &w, TileCoord tile)
{
    int lane = threadIdx.x % WARP, row = tile.row + e.warp % 4 * 16 + lane / 8 * 4,
        col = tile.col + lane % 8 * 8;
    uint32_t y8[PANELS][8];
#pragma unroll
    for (int p = 0; KIND == GRADIENT && p < PANELS; p++)
        load_y8(y8[p], w, row, col + p * PANEL);
    mbarrier_wait(rows_full(e.m, e.from.stage, e.warp), e.from.parity);
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        store_panel<KIND>(e, w, y8[p], p, row, col + p * PANEL);
    __syncwarp();
    if (lane == 0)
        mbarrier_arrive(rows_empty(e.m, e.from.stage, e.warp));
    e.from.advance();
}

template <CodesKind KIND>
static __device__ __forceinline__ void store_codes_of_tiles(const SharedStorage &m, const CodesWork &w,
                                                            int warp, int rank)
{
    Epilogue e = {m,
                  warp / 4,
                  warp,
                  Handover(),
                  __float2bfloat162_rn(0),
                  {KIND == RELU2_KEPT ? rounded_reciprocal(*w.scale) : reciprocal(*w.scale),
                   KIND == GRADIENT ? lane_factor(w) : 0}};
    for (int index = blockIdx.x / CLUSTER; index < w.tiles.whole; index += gridDim.x / CLUSTER) {
        TileCoord at = tile_coord(w.tiles, index, rank);
        at.row += e.group * WARPGROUP_M;
        store_tile<KIND>(e, w, at);
    }
    if (w.amax)
        store_amax(e.largest, w.amax);
}

#endif

template <CodesKind KIND>
__global__ void TILE_CLUSTER __launch_bounds__(CODES_THREADS, 1)
    sm90_codes_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                      const __grid_constant__ CUtensorMap y8, const __grid_constant__ CodesWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp(), group = warp / 4, rank = cluster_rank();
    SharedStorage m = {shared};
    for (int i = 0; threadIdx.x == 0 && i < 2 * BUFFERS * MATH_WARPS; i++)
        mbarrier_init(rows_full(m, 0, i), 1);
    shared_storage_init(m);
    if (group == 2) {
        setmaxnreg_dec<LOADING_REGISTERS>();
        if (warp == MATH_WARPS && elect_one())
            produce_tiles<LAYOUT_NT>(m, &x, &w, work.tiles, rank, KIND == GRADIENT ? &y8 : NULL);
    } else if (group > 2) {
        setmaxnreg_dec<EPILOGUE_REGISTERS>();
        store_codes_of_tiles<KIND>(m, work, warp - MATH_WARPS - WARPGROUP / WARP, rank);
    } else {
        setmaxnreg_inc<MATH_REGISTERS>();
        Consumer g = {m, Pipeline(), group, 0, warp};
        consume_codes<KIND>(g, work);
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

typedef void (*CodesKernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const CodesWork);
static const CodesKernel kernels[] = {sm90_codes_kernel<RELU2_KEPT>, sm90_codes_kernel<RELU2>,
                                      sm90_codes_kernel<GRADIENT>}; // by CodesKind

void sm90_fp8_codes_reserve(void)
{
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    for (int i = 0; device_has_wgmma() && i < 3; i++)
        CUDA_CHECK(cudaFuncSetAttribute(kernels[i], most, CODES_SHARED_BYTES));
}

// work: what the kind reads and writes beside the product.
static bool launch(const ProductContext *c, CodesKind kind, const Fp8Product *p, CodesWork work)
{
    int pairs = p->in / 2;
    int64_t columns = ceil_div(p->out, TILE_N), tiles = ceil_div(p->N, CLUSTER * TILE_M) * columns;
    if (!on_16_bytes({p->x8, p->w8, work.codes, work.transposed, work.y8, work.y}))
        return false;
    if (!sm90_tile_clusters() || p->in % 16 || p->out % 8 || tiles > INT32_MAX)
        return false;
    work.tiles.columns = (int)columns;
    work.tiles.whole = (int)tiles;
    work.tiles.steps = (int)ceil_div(pairs, TILE_K);
    work.scale_x = p->scale_x;
    work.scale_w = p->scale_w;
    work.alpha = p->alpha;
    work.rows = p->N;
    work.cols = p->out;
    unsigned blocks = CLUSTER * (unsigned)min_i64(tiles, sm90_tile_clusters_beside(c->shared));
    CUtensorMap map_x = tile_map_bf16(p->x8, 1, p->N, pairs, TILE_M),
                map_w = tile_map_bf16(p->w8, 1, p->out, pairs, PANEL),
                map_y = work.y8 ? tile_map_bf16(work.y8, 1, p->N, p->out / 2, TILE_M) : map_x;
    kernels[kind]<<<blocks, CODES_THREADS, CODES_SHARED_BYTES, c->stream>>>(map_x, map_w, map_y, work);
    CHECK_LAUNCH();
    return true;
}

bool sm90_fp8_codes(const ProductContext *c, const Codes *to, const Fp8Product *p, const uint8_t *y8,
                    const float *scale_y)
{
    CodesWork work = {};
    work.scale = to->scale;
    work.codes = to->codes;
    work.transposed = to->transposed;
    work.amax = to->amax;
    work.y8 = y8;
    work.scale_y = scale_y;
    if (p->out % 16 || p->N % 16) // also where no transposed copy is wanted: then the codes are the same
        return false;
    return launch(c, y8 ? GRADIENT : RELU2, p, work);
}

bool sm90_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                    const float *scale_y)
{
    CodesWork work = {};
    work.scale = scale_y;
    work.codes = y8;
    work.amax = amax;
    work.y = y;
    return launch(c, RELU2_KEPT, p, work);
}
