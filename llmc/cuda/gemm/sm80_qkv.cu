// sm80 QKV product with norm, rope, key offset and values in its epilogue, for heads of 128: a tile has a
// head of 128 tokens. As in the passes of qkv.cu and heads.cu, which take other widths, sums are rounded to
// bf16 first; here they do not go through memory: at d = 768 9.2 KB a token.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm80_qkv.cuh"
#include "llmc/cuda/gemm/sm80_tile.cuh"
#include "llmc/cuda/rows/heads.cuh"
#include "llmc/cuda/rows/qkv.cuh"

namespace
{

using namespace sm80;

enum { HEAD = TILE_COLS, PAIRS = HEAD / 16, VECTORS = HEAD / 8 };

// The product of a tile, as bf16, in shared memory. Returns its head among those of q, k and v.
__device__ __forceinline__ int multiply(floatX *shared, const Sm80Product &p, int col_tiles, float factor)
{
    int head = blockIdx.x % col_tiles;
    Sums sum = {};
    mainloop<W_BY_OUTPUT, true>(sum, shared, p, blockIdx.x / col_tiles * TILE_ROWS, head * HEAD);
    stage_sums(shared, sum, [=](float x) { return x * factor; });
    __syncthreads();
    return head;
}

// ---- halves that rotate (records of 2025) -----------------------------------------------------------------

__global__ __launch_bounds__(THREADS, CTAS) void sm80_qkv_kernel(Sm80Product p, int col_tiles, QkvForward a,
                                                                 floatX *raw_v, int H)
{
    extern __shared__ __align__(128) floatX shared[];
    int head = multiply(shared, p, col_tiles, 1), which = head / H, h = head % H,
        row0 = blockIdx.x / col_tiles * TILE_ROWS;
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

__device__ __forceinline__ void store_query_or_key(const HeadsForward &a, const HeadLane &l, uint4 u,
                                                   bool query, int H)
{
    float x[8];
    unpack8(u, x);
    Rotation turn = load_rotation(a, l.t, l.n, l.j);
    float sum[1] = {dot8(x, x)};
    lane_sums<VECTORS>(sum);
    float rstd = 1.0f / sqrtf(sum[0] / HEAD + RMS_EPS);
    uint4 y = norm_rotate(x, rstd, turn);
    if (l.has && query)
        store_vec(a.q, (int)l.unit * VECTORS + l.j, y);
    else if (l.has)
        store_key(a, l, y, H);
    if (l.has && l.j == 0)
        (query ? a.rstd_q : a.rstd_k)[l.unit] = rstd;
}

__global__ __launch_bounds__(THREADS, CTAS) void sm80_qkv_heads_kernel(Sm80Product p, int col_tiles,
                                                                       HeadsForward a, const float *alpha,
                                                                       int H)
{
    extern __shared__ __align__(128) floatX shared[];
    int head = multiply(shared, p, col_tiles, alpha ? *alpha : 1), which = head / H, n = head % H,
        row0 = blockIdx.x / col_tiles * TILE_ROWS;
#pragma unroll 2
    for (int i = threadIdx.x; i < TILE_ROWS * VECTORS; i += THREADS) {
        int row = i / VECTORS, j = i % VECTORS, t = min(row0 + row, p.N - 1);
        HeadLane l = {(unsigned)(t * H + n), t, n, j, row0 + row < p.N};
        uint4 u = *(const uint4 *)(shared + col_chunk(row, j));
        if (which < 2) {
            store_query_or_key(a, l, u, which == 0, H);
            continue;
        }
        ValueParts value = load_value(a, l, u, H, HEAD);
        float gate = value.u_row ? value_gate<VECTORS>(a.value, l.t, l.n, value.u_row, H, H * HEAD, l.j) : 0;
        store_value(a, l, value, gate, HEAD);
    }
}

Sm80Product qkv_product(const floatX *x, const floatX *w, int N, int d)
{
    return {.out = NULL, .x = x, .w = w, .N = N, .in = d, .width = 3 * d};
}

// Data center GPUs from Hopper on have products in the library that are faster than mma.sync by more than the
// pass costs: 245 us and 344 to 414 on an H200 (N 32768). Elsewhere the library has mma.sync, too. Tests ask
// for the path of GPUs without FP8 units on any GPU.
bool takes(const Sm80Product &p, int e)
{
    bool library_has_mma = device_state.compute < 90 || device_state.compute >= 120 || !device_has_fp8();
    return e == HEAD && library_has_mma && in_vectors(p);
}

} // namespace

bool sm80_qkv(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    Sm80Product p = qkv_product(a->x, a->w, N, H * e);
    QkvForward rest = qkv_planes(a, N, H * e);
    if (!takes(p, e))
        return false;
    floatX *raw_v = a->qkv + (int64_t)2 * N * H * e;
    launch(sm80_qkv_kernel, s, p, rest, raw_v, H);
    return true;
}

bool sm80_qkv_heads(Stream s, const QkvHeadsForward *a, int N, int H, int e)
{
    Sm80Product p = qkv_product(a->x, a->w, N, H * e);
    if (!takes(p, e) || (int64_t)N * H * VECTORS > INT32_MAX)
        return false;
    launch(sm80_qkv_heads_kernel, s, p, a->heads, a->alpha, H);
    return true;
}
