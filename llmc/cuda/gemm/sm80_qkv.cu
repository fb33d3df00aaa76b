// sm80 QKV product with norm, rope, key offset and values in its epilogue, for heads of 128, of q and k also
// of 96: a tile is one head of 128 tokens. Operands are bf16 or, of pairs that rotate, e4m3 codes
// (sm80_codes.cu). As in the passes of qkv.cu and heads.cu, which take other widths, sums are rounded to bf16
// first; here they do not go through memory: at d = 768 9.2 KB a token.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/fp8_codes.cuh"
#include "llmc/cuda/gemm/sm80_qkv.cuh"
#include "llmc/cuda/gemm/sm80_tile.cuh"
#include "llmc/cuda/rows/heads.cuh"
#include "llmc/cuda/rows/qkv.cuh"

namespace
{

using namespace sm80;

enum { HEAD = TILE_COLS, NARROW = 96, PAIRS = HEAD / 16, VECTORS = HEAD / 8 };

// A tile of the product, as bf16, in shared memory.
template <typename Element, int COLS>
__device__ __forceinline__ void multiply(floatX *shared, const Sm80Product &p, int row0, int col0,
                                         float factor)
{
    Sums<COLS> sum = {};
    mainloop<W_BY_OUTPUT, true, Element, COLS>(sum, shared, p, row0, col0);
    stage_sums<COLS>(shared, sum, [=](float x) { return x * factor; });
    __syncthreads();
}

// ---- halves that rotate (records of 2025) -----------------------------------------------------------------

__global__ __launch_bounds__(THREADS, CTAS) void sm80_qkv_kernel(Sm80Product p, int col_tiles, QkvForward a,
                                                                 floatX *raw_v, int H)
{
    extern __shared__ __align__(128) floatX shared[];
    int head = blockIdx.x % col_tiles, which = head / H, h = head % H,
        row0 = blockIdx.x / col_tiles * TILE_ROWS;
    multiply<floatX, HEAD>(shared, p, row0, head * HEAD, 1);
    floatX *key = which == 0 ? a.q : a.k;
    float *rstd = which == 0 ? a.rstd_q : a.rstd_k;
#pragma unroll 2
    for (int i = threadIdx.x; i < TILE_ROWS * PAIRS; i += THREADS) {
        int row = i / PAIRS, j = i % PAIRS, n = row0 + row;
        unsigned mask = __ballot_sync(WHOLE_WARP, n < p.N);
        if (n >= p.N)
            continue;
        int64_t unit = (int64_t)n * H + h, at = unit * HEAD;
        Pair x = {*(const uint4 *)(shared + col_chunk(row, j)),
                  *(const uint4 *)(shared + col_chunk(row, j + PAIRS))};
        if (which < 2) {
            float c[8], s[8];
            load_rotation(c, s, a.cos, a.sin, n, j, HEAD);
            norm_and_rotate(key + at, x, rstd + unit, j, HEAD, c, s, mask);
            continue;
        }
        Pair embed = x;
        if (a.value_embed)
            embed = load_pair(a.value_embed + ((int64_t)a.tokens[n] * H + h) * HEAD, j, PAIRS);
        if (raw_v != a.v) {
            store_vec(raw_v + at, j, x.lo);
            store_vec(raw_v + at, j + PAIRS, x.hi);
        }
        store_vec(a.v + at, j, mix_value(x.lo, embed.lo, a.lambda, a.value_embed));
        store_vec(a.v + at, j + PAIRS, mix_value(x.hi, embed.hi, a.lambda, a.value_embed));
    }
}

// ---- pairs that rotate (records of 2026) ------------------------------------------------------------------

template <int QK>
__device__ __forceinline__ void store_query_or_key(const HeadsForward &a, const HeadLane &l, uint4 u,
                                                   bool query, int H)
{
    float x[8];
    bool key = l.has && l.j < QK / 8;
    unpack8(u, x);
    Rotation turn = load_rotation(a, l.t, l.n, l.j);
    float sum[1] = {dot8(x, x)};
    lane_sums<VECTORS>(sum);
    float rstd = 1.0f / sqrtf(sum[0] / QK + RMS_EPS);
    uint4 y = norm_rotate(x, rstd, turn);
    if (key && query)
        store_vec(a.q, (int)l.unit * (QK / 8) + l.j, y);
    else if (key)
        store_key(a, l, y, H);
    if (l.has && l.j == 0)
        (query ? a.rstd_q : a.rstd_k)[l.unit] = rstd;
}

// Factor of the sums: of codes their scales, too.
template <typename Element> __device__ __forceinline__ float sums_factor(const QkvHeadsForward &a)
{
    if (std::is_same<Element, E4m3>::value)
        return product_scale(a.scale_x, a.scale_w, a.alpha);
    return a.alpha ? *a.alpha : 1;
}

// QK: width of a head of q and k.
template <typename Element, int QK>
__global__ __launch_bounds__(THREADS, CTAS) void sm80_qkv_heads_kernel(Sm80Product p, int col_tiles,
                                                                       QkvHeadsForward whole, int H)
{
    extern __shared__ __align__(128) floatX shared[];
    const HeadsForward &a = whole.heads;
    int head = blockIdx.x % col_tiles, which = head / H, n = head % H,
        row0 = blockIdx.x / col_tiles * TILE_ROWS;
    float factor = sums_factor<Element>(whole);
    if (QK == HEAD || which == 2)
        multiply<Element, HEAD>(shared, p, row0, which < 2 ? head * HEAD : 2 * H * QK + n * HEAD, factor);
    else
        multiply<Element, QK>(shared, p, row0, head * QK, factor);
#pragma unroll 2
    for (int i = threadIdx.x; i < TILE_ROWS * VECTORS; i += THREADS) {
        int row = i / VECTORS, j = i % VECTORS, t = min(row0 + row, p.N - 1);
        HeadLane l = {(unsigned)(t * H + n), t, n, j, row0 + row < p.N};
        bool has = which == 2 || j < QK / 8;
        uint4 u = has ? *(const uint4 *)(shared + col_chunk(row, j)) : make_uint4(0, 0, 0, 0);
        if (which < 2) {
            store_query_or_key<QK>(a, l, u, which == 0, H);
            continue;
        }
        ValueParts value = load_value(a, l, u, H, HEAD);
        float gate = value.u_row ? value_gate<VECTORS>(a.value, l.t, l.n, value.u_row, H, H * HEAD, l.j) : 0;
        store_value(a, l, value, gate, HEAD);
    }
}

// Where the library's products are faster than mma.sync, they are by more than the pass costs: 245 us and 344
// to 414 on an H200 (N 32768).
bool takes(const Sm80Product &p, int e) { return e == HEAD && device_library_uses_mma() && in_vectors(p); }

} // namespace

bool sm80_qkv(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    int d = H * e;
    Sm80Product p = {NULL, a->x, a->w, N, d, 3 * d};
    QkvForward rest = qkv_planes(a, N, d);
    if (!takes(p, e))
        return false;
    floatX *raw_v = a->qkv + (int64_t)2 * N * d;
    launch(sm80_qkv_kernel, s, p, 3 * H, rest, raw_v, H);
    return true;
}

bool sm80_qkv_heads(Stream s, const QkvHeadsForward *a, int N, int H, int e)
{
    int d = H * e, qk = a->heads.qk;
    bool codes = a->x8, narrow = qk == NARROW;
    Sm80Product p = {NULL, a->x, a->w, N, d, 2 * H * qk + d};
    if (codes)
        p = {NULL, (const floatX *)a->x8, (const floatX *)a->w8, N, d / 2, p.width};
    if (!takes(p, e) || (qk != HEAD && !narrow) || (codes && !device_has_fp8_mma()) ||
        (int64_t)N * H * VECTORS > INT32_MAX)
        return false;
    auto of_codes = narrow ? sm80_qkv_heads_kernel<E4m3, NARROW> : sm80_qkv_heads_kernel<E4m3, HEAD>,
         of_bf16 = narrow ? sm80_qkv_heads_kernel<floatX, NARROW> : sm80_qkv_heads_kernel<floatX, HEAD>;
    launch(codes ? of_codes : of_bf16, s, p, 3 * H, *a, H);
    return true;
}
