// Heads of the records of 2026 before attention: norm, rope on pairs, key offset, values; where the product's
// epilogue does the others (sm90_qkv.cu), values alone. Backward: heads_backward.cu.
//
// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256: half a warp a head of a token (a
// warp above 128), a 16-byte vector a lane, all loads before the first store. Other widths: pair by pair.
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: forward q, k, v in and out 9216 (2.2 ns; 35 us for
// 16384 tokens), 1536 more for each of u and extra (6 us); at qk = 96 7680. Angles and scalars: some 300.
#include "llmc/cuda/gemm/sm90_qkv.cuh"
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

// Lane j of a head, which is unit t * H + n; those of none take part in sums.
struct HeadLane {
    unsigned unit;
    int64_t t;
    int n, j;
    bool has;
};

template <int LANES> __device__ __forceinline__ HeadLane head_lane(int N, int H)
{
    unsigned heads = (unsigned)N * (unsigned)H, id = blockIdx.x * ROW_THREADS + threadIdx.x,
             unit = min(id / LANES, heads - 1); // no 64-bit divisions
    return {unit, unit / (unsigned)H, (int)(unit % (unsigned)H), (int)id % LANES, id / LANES < heads};
}

// What v is made of, for a vector.
struct ValueParts {
    const floatX *u_row; // of the table, or NULL
    uint4 raw, extra, u;
};

__device__ __forceinline__ ValueParts load_value(const HeadsForward &a, const HeadLane &l, int H, int e)
{
    const ValueMix &m = a.value;
    int values = e / 8, at = (int)l.unit * values + l.j;
    bool has = l.has && l.j < values;
    const floatX *u_row = m.table ? m.table + (int64_t)m.tokens[l.t] * H * e : NULL;
    return {u_row, vector_or_zero(a.raw_v, at, has), vector_or_zero(m.extra, at, has && m.extra),
            vector_or_zero(u_row, l.n * values + l.j, has && u_row)};
}

// gate: value_gate's, or 0 without a table
__device__ __forceinline__ void store_value(const HeadsForward &a, const HeadLane &l, const ValueParts &p,
                                            float gate, int e)
{
    float v[8], u[8];
    unpack8(p.raw, v);
    unpack8(p.u, u);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] += gate * u[i];
    add8(v, p.extra);
    if (l.has && l.j < e / 8)
        store_vec(a.v, (int)l.unit * (e / 8) + l.j, pack8(v));
    if (l.has && l.j == 0 && p.u_row && a.value.gate_w)
        a.value.gate[l.unit] = gate;
}

template <int LANES>
__global__ __launch_bounds__(ROW_THREADS,
                             CTAS) void heads_forward_kernel(const __grid_constant__ HeadsForward a, int N,
                                                             int H, int e)
{
    HeadLane l = head_lane<LANES>(N, H);
    int qk = a.qk, keys = qk / 8, key_at = (int)l.unit * keys + l.j;
    bool key = l.has && l.j < keys, below = a.offset && l.j >= keys / 2;
    uint4 raw_q = vector_or_zero(a.raw_q, key_at, key), raw_k = vector_or_zero(a.raw_k, key_at, key);
    ValueParts value = load_value(a, l, H, e);
    Rotation turn = load_rotation(a, l.t, l.n, l.j);
    float gate = value.u_row ? value_gate<LANES>(a.value, l.t, l.n, value.u_row, H, H * e, l.j) : 0;

    float q[8], k[8];
    unpack8(raw_q, q);
    unpack8(raw_k, k);
    float sums[2] = {dot8(q, q), dot8(k, k)};
    lane_sums<LANES>(sums);
    float rstd_q = 1.0f / sqrtf(sums[0] / (float)qk + RMS_EPS),
          rstd_k = 1.0f / sqrtf(sums[1] / (float)qk + RMS_EPS);
    uint4 y = norm_rotate(k, rstd_k, turn);
    if (key)
        store_vec(a.q, key_at, norm_rotate(q, rstd_q, turn));
    if (key && (!below || l.t == 0))
        store_vec(a.k, key_at, y);
    if (key && below)
        store_vec(a.k, key_at + H * keys, y);

    store_value(a, l, value, gate, e);
    if (l.has && l.j == 0) {
        a.rstd_q[l.unit] = rstd_q;
        a.rstd_k[l.unit] = rstd_k;
    }
}

// v alone, of heads of up to 8 VALUE_LANES channels.
enum { VALUE_LANES = 16 };
__global__ __launch_bounds__(ROW_THREADS,
                             CTAS) void heads_values_kernel(const __grid_constant__ HeadsForward a, int N,
                                                            int H, int e)
{
    HeadLane l = head_lane<VALUE_LANES>(N, H);
    ValueParts value = load_value(a, l, H, e);
    float gate = value.u_row ? value_gate<VALUE_LANES>(a.value, l.t, l.n, value.u_row, H, H * e, l.j) : 0;
    store_value(a, l, value, gate, e);
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
        heads_forward_any_kernel<<<ceil_div(heads, ROW_WARPS), ROW_THREADS, 0, s>>>(*a, N, H, e);
    else if (a->qk <= MAX_HEAD / 2 && e <= MAX_HEAD / 2)
        heads_forward_kernel<16><<<ceil_div(heads * 16, ROW_THREADS), ROW_THREADS, 0, s>>>(*a, N, H, e);
    else
        heads_forward_kernel<32><<<ceil_div(heads * 32, ROW_THREADS), ROW_THREADS, 0, s>>>(*a, N, H, e);
    CHECK_LAUNCH();
}

void qkv_heads_forward(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_heads_forward, &a->heads, N, H * e);
    int d = H * e;
    HeadsForward heads = qkv_heads_planes(a, N, d);
    assert(heads.qk == e && (!heads.paired || H % 2 == 0));
    if (N <= 0)
        return;
    if (!sm90_qkv_heads(c, a, N, H, e)) {
        Product p = {a->raw, a->x, a->w, NULL, a->alpha, N, d, d, 3};
        matmul_forward(c, &p);
        heads_forward(c->stream, &heads, N, H, e);
    } else if (heads.value.table || heads.value.extra) {
        assert(e <= 8 * VALUE_LANES);
        int64_t lanes = (int64_t)N * H * VALUE_LANES;
        heads_values_kernel<<<ceil_div(lanes, ROW_THREADS), ROW_THREADS, 0, c->stream>>>(heads, N, H, e);
        CHECK_LAUNCH();
    }
}
