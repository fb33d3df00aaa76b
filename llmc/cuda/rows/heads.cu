// Heads of the records of 2026 before attention: norm, rope on pairs, key offset, values. Backward:
// heads_backward.cu.
//
// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256: half a warp a head of a token (a
// warp above 128), a 16-byte vector a lane, all loads before the first store. Other widths: pair by pair.
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: forward q, k, v in and out 9216 (2.2 ns; 35 us for
// 16384 tokens), 1536 more for each of u and extra (6 us); at qk = 96 7680. Angles and scalars: some 300.
#include "llmc/cuda/rows/heads.cuh"

namespace
{

enum { CTAS = 4 };                            // a multiprocessor, for loads in flight
const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23

// gate_n of a token, by all of the LANES lanes of a head; lane c has input c.
template <int LANES>
__device__ __forceinline__ float value_gate(const ValueMix &m, int64_t t, int n, const floatX *u, int H,
                                            int d, int c)
{
    static_assert(LANES >= MAX_GATE_INPUTS);
    if (!m.gate_w)
        return m.factor[t * m.stride + n / (H / m.groups)];
    int inputs = m.gate_inputs;
    float x[1] = {};
    if (c < 2 * inputs)
        x[0] = to_float(m.gate_w[n * 2 * inputs + c]) * to_float(c < inputs ? m.h[t * d + c] : u[c - inputs]);
    lane_sums<LANES>(x);
    return 2 * sigmoid(x[0]);
}

// ---- vectors ----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 norm_rotate(const float (&x)[8], float rstd, const Rotation &turn)
{
    float y[8], c[4], s[4];
    unpack4(turn.c, c);
    unpack4(turn.s, s);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float even = x[2 * k] * rstd, odd = x[2 * k + 1] * rstd;
        y[2 * k] = even * c[k] + odd * s[k];
        y[2 * k + 1] = odd * c[k] - even * s[k];
    }
    return pack8(y);
}

template <int LANES>
__global__ __launch_bounds__(ROW_THREADS,
                             CTAS) void heads_forward_kernel(const __grid_constant__ HeadsForward a, int N,
                                                             int H, int e)
{
    pdl_begin();
    unsigned heads = (unsigned)N * (unsigned)H, id = blockIdx.x * ROW_THREADS + threadIdx.x,
             unit = min(id / LANES, heads - 1); // no 64-bit divisions
    bool has = id / LANES < heads;              // lanes of none take part in sums
    int j = (int)id % LANES, n = (int)(unit % (unsigned)H), qk = a.qk, d = H * e;
    int keys = qk / 8, values = e / 8, key_at = (int)unit * keys + j, value_at = (int)unit * values + j;
    bool key = has && j < keys, value = has && j < values, below = a.offset && j >= keys / 2;
    int64_t t = unit / (unsigned)H;
    const ValueMix &m = a.value;
    const floatX *u_row = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
    uint4 raw_q = vector_or_zero(a.raw_q, key_at, key), raw_k = vector_or_zero(a.raw_k, key_at, key),
          raw_v = vector_or_zero(a.raw_v, value_at, value),
          extra = vector_or_zero(m.extra, value_at, value && m.extra),
          u = vector_or_zero(u_row, n * values + j, value && u_row);
    Rotation turn = load_rotation(a, t, n, j);
    float gate = u_row ? value_gate<LANES>(m, t, n, u_row, H, d, j) : 0;

    float q[8], k[8], v[8], x[8];
    unpack8(raw_q, q);
    unpack8(raw_k, k);
    float sums[2] = {dot8(q, q), dot8(k, k)};
    lane_sums<LANES>(sums);
    float rstd_q = 1.0f / sqrtf(sums[0] / (float)qk + RMS_EPS),
          rstd_k = 1.0f / sqrtf(sums[1] / (float)qk + RMS_EPS);
    uint4 y = norm_rotate(k, rstd_k, turn);
    if (key)
        store_vec(a.q, key_at, norm_rotate(q, rstd_q, turn));
    if (key && (!below || t == 0))
        store_vec(a.k, key_at, y);
    if (key && below)
        store_vec(a.k, key_at + H * keys, y);

    unpack8(raw_v, v);
    unpack8(u, x);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] += gate * x[i];
    add8(v, extra);
    if (value)
        store_vec(a.v, value_at, pack8(v));
    if (has && j == 0) {
        a.rstd_q[unit] = rstd_q;
        a.rstd_k[unit] = rstd_k;
        if (u_row && m.gate_w)
            m.gate[unit] = gate;
    }
}

// ---- any width: one warp a head of a token ----------------------------------------------------------------

__device__ __forceinline__ void norm_rotate_any(floatX *out, float *rstd, const floatX *raw,
                                                const HeadsForward &a, int64_t unit, int H, bool shifted,
                                                int lane)
{
    int64_t t = unit / H, at = unit * a.qk;
    int n = unit % H;
    float sum = 0;
    for (int j = lane; j < a.qk / 2; j += WARP) {
        float2 x = load_two(raw + at + 2 * j);
        sum += x.x * x.x + x.y * x.y;
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)a.qk + RMS_EPS);
    if (lane == 0)
        rstd[unit] = r;
    for (int j = lane; j < a.qk / 2; j += WARP) {
        float2 x = load_two(raw + at + 2 * j), turn = turn_of(a, position_of(a, t, n), j);
        float even = x.x * r * turn.x + x.y * r * turn.y, odd = x.y * r * turn.x - x.x * r * turn.y;
        bool below = shifted && j >= a.qk / 4;
        if (!below || t == 0)
            store_two(out + at + 2 * j, even, odd);
        if (below)
            store_two(out + at + (int64_t)H * a.qk + 2 * j, even, odd);
    }
}

__global__ __launch_bounds__(ROW_THREADS) void heads_forward_any_kernel(HeadsForward a, int N, int H, int e)
{
    pdl_begin();
    int64_t unit = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (unit >= (int64_t)N * H)
        return;
    const ValueMix &m = a.value;
    int64_t t = unit / H;
    int n = unit % H, d = H * e;
    norm_rotate_any(a.q, a.rstd_q, a.raw_q, a, unit, H, false, lane);
    norm_rotate_any(a.k, a.rstd_k, a.raw_k, a, unit, H, a.offset, lane);
    const floatX *u = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
    float gate = u ? value_gate<WARP>(m, t, n, u, H, d, lane) : 0;
    if (u && m.gate_w && lane == 0)
        m.gate[unit] = gate;
    for (int c = lane; c < e; c += WARP) {
        float v = to_float(a.raw_v[unit * e + c]);
        if (u)
            v += gate * to_float(u[n * e + c]);
        if (m.extra)
            v += to_float(m.extra[unit * e + c]);
        a.v[unit * e + c] = __float2bfloat16(v);
    }
}

} // namespace

void heads_forward(Stream s, const HeadsForward *a, int N, int H, int e)
{
    OP_SCOPE(heads_forward, a, N, H, e);
    if (N <= 0)
        return;
    assert(a->qk % 4 == 0 && (!a->paired || H % 2 == 0));
    int64_t heads = (int64_t)N * H;
    if (!heads_in_vectors(a->qk, e))
        launch_pdl(heads_forward_any_kernel, ceil_div(heads, ROW_WARPS), ROW_THREADS, 0, s, *a, N, H, e);
    else if (a->qk <= MAX_HEAD / 2 && e <= MAX_HEAD / 2)
        launch_pdl(heads_forward_kernel<16>, ceil_div(heads * 16, ROW_THREADS), ROW_THREADS, 0, s, *a, N, H,
                   e);
    else
        launch_pdl(heads_forward_kernel<32>, ceil_div(heads * 32, ROW_THREADS), ROW_THREADS, 0, s, *a, N, H,
                   e);
}
