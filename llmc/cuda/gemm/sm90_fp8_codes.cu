// sm90 GEMM of e4m3 operands whose results are kept as e4m3 codes alone, plain and transposed, with their
// largest magnitude: relu^2 of the product, and the gradient before relu^2 (matmul_fp8_relu2_codes and
// _backward).
//
// Mainloop, tiles and schedule are those of sm90_tile.cuh. As in sm90_gemm_kernel.cuh sums are packed to bf16
// in registers, and the epilogue of a tile overlaps with the mainloop of the next one, in four parts, one a
// panel of 64 columns. The staging buffer of a warpgroup holds a panel of packed results and two of
// transposed codes:
//
//   stmatrix     each warp writes its 16 rows of the panel ...
//   ld.shared    ... and reads them back, a thread four neighbouring rows x eight columns
//   st.global    their codes, whole sectors of rows
//   transpose    4 x 4 bytes in registers; words of four rows go to the transposed panel, 64 columns x 64
//                rows
//   st.global    after a barrier of the warpgroup the transposed panel, 64 bytes a column
//
// The gradient's factor 2 sqrt(y) is a function of y's code, of which each lane of a warp holds one or two:
// shuffles look it up. (A table in shared memory had bank conflicts, which took as long as the mainloop.) TMA
// brings a tile of y to L2 while its product is computed.
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_gemm_kernel.cuh"
#include "llmc/cuda/head/fp8_transpose.cuh"

enum {
    PANELS = TILE_N / PANEL,
    TURNED_BYTES = PANEL * WARPGROUP_M // of a transposed panel
};
static_assert(PANEL_BYTES + 2 * TURNED_BYTES <= STAGING_BYTES, "a warpgroup's staging buffer");

struct CodesWork {
    TileSchedule tiles;
    int at[PANELS]; // k steps of a tile after which the panels of the previous one are stored, non-decreasing
    const float *scale_x, *scale_w, *alpha, *scale; // (1) fp32 device; alpha may be NULL
    uint8_t *codes, *transposed;                    // (rows, cols), (cols, rows) or NULL
    float *amax;                                    // (1) in/out, or NULL
    const uint8_t *y8;                              // (rows, cols); gradient
    const float *scale_y;                           // (1)
    int rows, cols;
};

#if HOPPER

// Bits of the factor 2 sqrt(scale_y * code), the root rounded to bf16. Two steps of a code's exponent double
// it, so that 24 of them give all: of lane i below 8 it is that of the subnormal code i, of lane 16 + i that
// of codes i + 16 k, as k = 0 would have it.
static __device__ __forceinline__ uint32_t lane_factor(const CodesWork &w)
{
    int lane = threadIdx.x % WARP, code = lane < 24 ? lane : lane - 16;
    float root = to_bf16(__fsqrt_rn(e4m3_value(code) * *w.scale_y));
    return __float_as_uint(lane >= 16 && lane < 24 ? root : 2 * root);
}

// That of a code of y, which has no sign; of NaN some number: what it meets is NaN, too. Lanes count mod 32.
static __device__ __forceinline__ float factor_of_code(uint32_t factors, uint32_t code)
{
    uint32_t base = __shfl_sync(0xffffffffu, factors, code < 8 ? code : code | 16);
    return __uint_as_float(base + ((code & 0x70) << 19));
}

// Eight gradients, from products and the codes of y.
static __device__ __forceinline__ uint4 gradients8(uint4 u, uint2 y8, uint32_t factors)
{
    const uint32_t y[2] = {y8.x, y8.y};
    float f[8];
    unpack8(u, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] *= factor_of_code(factors, __byte_perm(y[k / 4], 0, 0x4440 + k % 4));
    return pack8(f);
}

template <bool GRADIENT> static __device__ __forceinline__ void raise_amax(Factors &q, uint4 u)
{
    const uint32_t pair[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162 *>(pair + k);
        q.amax = __hmax2_nan(q.amax, GRADIENT ? __habs2(x) : x);
    }
}

static __device__ __forceinline__ uint2 codes8(uint4 u, Reciprocal inverse)
{
    float f[8];
    unpack8(u, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = quotient(f[k], inverse);
    return make_uint2(encode4(f[0], f[1], f[2], f[3], __NV_E4M3), encode4(f[4], f[5], f[6], f[7], __NV_E4M3));
}

// Address of the 16 bytes of rows 16 `slice` on of a column of a transposed panel: columns have 64 bytes, and
// those of neighbouring chunks of eight columns have their slices in another order, so that the words that a
// warp writes fall on twice as many banks as it has sectors.
static __device__ __forceinline__ int turned_at(int col, int slice)
{
    return col * WARPGROUP_M + ((slice ^ col / 8 % 4) << 4);
}

// Writes the thread's four rows x eight columns of codes to a transposed panel. code: two words of each row.
static __device__ __forceinline__ void turn_codes(uint8_t *turned, const uint32_t *code, int chunk, int slice,
                                                  int quarter)
{
    uint32_t lo[4] = {code[0], code[2], code[4], code[6]}, hi[4] = {code[1], code[3], code[5], code[7]};
    transpose4(lo);
    transpose4(hi);
#pragma unroll
    for (int k = 0; k < 8; k++)
        *reinterpret_cast<uint32_t *>(turned + turned_at(8 * chunk + k, slice) + 4 * quarter) =
            k < 4 ? lo[k] : hi[k - 4];
}

// Stores the transposed panel of columns col to col + 63, rows row to row + 63.
static __device__ __forceinline__ void store_turned(const CodesWork &w, const uint8_t *turned, int thread,
                                                    int row, int col)
{
    int slice = thread % 4;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        int c = pass * (PANEL / 2) + thread / 4;
        uint4 u = *reinterpret_cast<const uint4 *>(turned + turned_at(c, slice));
        if (col + c < w.cols && row + 16 * slice < w.rows)
            *reinterpret_cast<uint4 *>(w.transposed + (int64_t)(col + c) * w.rows + row + 16 * slice) = u;
    }
}

// x, unknown to the compiler: what follows from it is computed where it is used, and not ahead of the
// mainloop's k steps, in registers that accumulators need.
static __device__ __forceinline__ int computed_here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
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

// Panel P of the packed tile: its codes, both ways round. A warp stages and reads its own rows. The
// transposed panels alternate: when a warp writes one of them, all have passed the barrier before the other
// one was stored, and have read this one before.
template <bool GRADIENT, int P>
static __device__ __forceinline__ void store_panel(PackedTile &packed, Factors &q, const Consumer &g,
                                                   const CodesWork &w, const CodeFactors &c)
{
    uint8_t *staging = g.m.staging(g.group), *turned = staging + PANEL_BYTES + P % 2 * TURNED_BYTES;
    int thread = computed_here(threadIdx.x % WARPGROUP), lane = thread % WARP, slice = thread / WARP;
    int quarter = lane / 8, chunk = lane % 8;
    int first = 16 * slice + 4 * quarter, row = packed.row + first, col = packed.col + P * PANEL + 8 * chunk;
    int64_t at = (int64_t)row * w.cols + col;
    uint32_t address = matrix_address(staging, 16 * slice);
    __syncwarp(); // all lanes have read the previous panel
#pragma unroll
    for (int c = 0; c < PANEL / 8; c += 2)
        stmatrix_x4(address ^ c << 4, packed.pair + P * (PANEL / 4) + 2 * c);
    // From here on the panel's registers hold codes: of results, and then those of y for the next panel.
    uint32_t *code = packed.pair + P * (PANEL / 4), *y8 = P ? code - PANEL / 4 : code;
    if (GRADIENT && P == 0)
        load_y8(y8, w, row, col);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = first + i;
        uint4 u = *reinterpret_cast<const uint4 *>(staging + r * 128 + ((chunk ^ r % 8) << 4));
        if (GRADIENT)
            u = gradients8(u, make_uint2(y8[2 * i], y8[2 * i + 1]), c.of_lane);
        raise_amax<GRADIENT>(q, u);
        uint2 mine = codes8(u, c.inverse);
        if (row + i < w.rows && col < w.cols)
            *reinterpret_cast<uint2 *>(w.codes + at + (int64_t)i * w.cols) = mine;
        code[2 * i] = mine.x;
        code[2 * i + 1] = mine.y;
    }
    if (w.transposed) {
        turn_codes(turned, code, chunk, slice, quarter);
        named_barrier_sync(1 + g.group, WARPGROUP);
        store_turned(w, turned, thread, packed.row, packed.col + P * PANEL);
    }
    if (GRADIENT && P < PANELS - 1) // also behind half a tile, where nothing reads them
        load_y8(code, w, row, col + PANEL);
}

// Mainloop of a tile of COLS columns, with the epilogue of the previous tile.
template <bool GRADIENT, int COLS>
static __device__ __forceinline__ void consume_codes_tile(PackedTile &packed, Factors &q, Consumer &g,
                                                          const CodesWork &w, const CodeFactors &c,
                                                          TileCoord at)
{
    constexpr GemmEpilogue EPI = GRADIENT ? EPILOGUE_STORE : EPILOGUE_RELU2;
    bool previous = packed.row >= 0;
    float sum[128];
    for (int k = 0; k < w.tiles.steps; k++) {
        mainloop_step<LAYOUT_NT, COLS, E4m3>(sum, g, k);
        if (previous && k == w.at[0])
            store_panel<GRADIENT, 0>(packed, q, g, w, c);
        if (previous && k == w.at[1])
            store_panel<GRADIENT, 1>(packed, q, g, w, c);
        if (previous && k == w.at[2])
            store_panel<GRADIENT, 2>(packed, q, g, w, c);
        if (previous && k == w.at[3])
            store_panel<GRADIENT, 3>(packed, q, g, w, c);
    }
    mainloop_finish<COLS>(sum, g);
#pragma unroll
    for (int i = 0; i < COLS / 4; i++)
        packed.pair[i] = epilogue_pair<EPI, true>(sum[2 * i] * q.scale, sum[2 * i + 1] * q.scale, 0);
    packed.row = at.row + g.group * WARPGROUP_M;
    packed.col = at.col;
}

template <bool GRADIENT>
static __device__ __forceinline__ void consume_codes(Consumer &g, const CodesWork &w, int rank)
{
    const TileSchedule &t = w.tiles;
    Factors q = {product_scale(w.scale_x, w.scale_w, w.alpha), 0, __float2bfloat162_rn(0)};
    CodeFactors c = {reciprocal(*w.scale), GRADIENT ? lane_factor(w) : 0};
    PackedTile packed;
    int index = blockIdx.x / CLUSTER;
    packed.row = -1;
    for (; index < t.whole; index += gridDim.x / CLUSTER)
        consume_codes_tile<GRADIENT, TILE_N>(packed, q, g, w, c, tile_coord(t, index, rank));
    bool half = index < t.whole + t.halves;
    if (half)
        consume_codes_tile<GRADIENT, HALF_N>(packed, q, g, w, c, tile_coord(t, index, rank));
    store_panel<GRADIENT, 0>(packed, q, g, w, c);
    store_panel<GRADIENT, 1>(packed, q, g, w, c);
    if (!half) {
        store_panel<GRADIENT, 2>(packed, q, g, w, c);
        store_panel<GRADIENT, 3>(packed, q, g, w, c);
    }
    if (w.amax)
        store_amax(q, w.amax);
}

#endif

template <bool GRADIENT>
__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    sm90_codes_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                      const __grid_constant__ CUtensorMap y8, const __grid_constant__ CodesWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp();
    Consumer g = {{shared}, Pipeline(), warp / 4, 0, warp}; // warpgroup 2 is the producer
    int rank = cluster_rank();
    shared_storage_init(g.m);
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce_tiles<LAYOUT_NT>(g.m, &x, &w, work.tiles, rank, GRADIENT ? &y8 : NULL);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_codes<GRADIENT>(g, work, rank);
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

void sm90_fp8_codes_reserve(void)
{
    if (!device_has_wgmma())
        return;
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDA_CHECK(cudaFuncSetAttribute(sm90_codes_kernel<false>, most, TILE_SHARED_BYTES));
    CUDA_CHECK(cudaFuncSetAttribute(sm90_codes_kernel<true>, most, TILE_SHARED_BYTES));
}

bool sm90_fp8_codes(const ProductContext *c, const Codes *to, const Fp8Product *p, const uint8_t *y8,
                    const float *scale_y)
{
    static const int when[PANELS] = {0, 3, 6, 9}; // twelfths of a tile's k steps
    const void *aligned[] = {p->x8, p->w8, to->codes, to->transposed, y8};
    int pairs = p->in / 2;
    CodesWork work = {.scale_x = p->scale_x,
                      .scale_w = p->scale_w,
                      .alpha = p->alpha,
                      .scale = to->scale,
                      .codes = to->codes,
                      .transposed = to->transposed,
                      .amax = to->amax,
                      .y8 = y8,
                      .scale_y = scale_y,
                      .rows = p->N,
                      .cols = p->out};
    unsigned blocks;
    for (int i = 0; i < 5; i++)
        if ((uintptr_t)aligned[i] % 16)
            return false;
    if (p->in % 16 || p->out % 16 || p->N % 16 ||
        !sm90_tile_schedule(&work.tiles, &blocks, p->N, p->out, pairs, c->shared))
        return false;
    for (int i = 0; i < PANELS; i++)
        work.at[i] = work.tiles.steps * when[i] / 12;
    CUtensorMap map_x = tile_map_bf16(p->x8, 1, p->N, pairs, TILE_M),
                map_w = tile_map_bf16(p->w8, 1, p->out, pairs, PANEL),
                map_y = y8 ? tile_map_bf16(y8, 1, p->N, p->out / 2, TILE_M) : map_x;
    if (y8)
        sm90_codes_kernel<true>
            <<<blocks, TILE_THREADS, TILE_SHARED_BYTES, c->stream>>>(map_x, map_w, map_y, work);
    else
        sm90_codes_kernel<false>
            <<<blocks, TILE_THREADS, TILE_SHARED_BYTES, c->stream>>>(map_x, map_w, map_y, work);
    CHECK_LAUNCH();
    return true;
}
