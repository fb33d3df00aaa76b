// Heads of the records of 2026 before attention: norm, rope on pairs, key offset, values; where the product's
// epilogue does the others (sm90_qkv.cu), values alone. Backward: heads_backward.cu.
//
// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256: half a warp a head of a token (a
// warp above 128), a 16-byte vector a lane, all loads before the first store. Other widths: pair by pair.
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: forward q, k, v in and out 9216 (2.2 ns; 35 us for
// 16384 tokens), 1536 more for each of u and extra (6 us); at qk = 96 7680. Angles and scalars: some 300.
#include "llmc/cuda/gemm/sm80_qkv.cuh"
#include "llmc/cuda/gemm/sm90_qkv.cuh"
#include "llmc/cuda/rows/heads.cuh"

namespace
{

enum { CTAS = 4 }; // a multiprocessor, for loads in flight

// ---- vectors ----------------------------------------------------------------------------------------------

template <int LANES> __device__ __forceinline__ HeadLane head_lane(int N, int H)
{
    unsigned heads = (unsigned)N * (unsigned)H, id = blockIdx.x * ROW_THREADS + threadIdx.x,
             unit = min(id / LANES, heads - 1); // no 64-bit divisions
    return {unit, unit / (unsigned)H, (int)(unit % (unsigned)H), (int)id % LANES, id / LANES < heads};
}

template <int LANES>
__global__ __launch_bounds__(ROW_THREADS,
                             CTAS) void heads_forward_kernel(const __grid_constant__ HeadsForward a, int N,
                                                             int H, int e)
{
    HeadLane l = head_lane<LANES>(N, H);
    int qk = a.qk, keys = qk / 8, key_at = (int)l.unit * keys + l.j;
    bool key = l.has && l.j < keys;
    uint4 raw_q = vector_or_zero(a.raw_q, key_at, key), raw_k = vector_or_zero(a.raw_k, key_at, key);
    uint4 raw_v = vector_or_zero(a.raw_v, (int)l.unit * (e / 8) + l.j, l.has && l.j < e / 8);
    ValueParts value = load_value(a, l, raw_v, H, e);
    Rotation turn = load_rotation(a, l.t, l.n, l.j);
    float gate = value.u_row ? value_gate<LANES>(a.value, l.t, l.n, value.u_row, H, H * e, l.j) : 0;

    float q[8], k[8];
    unpack8(raw_q, q);
    unpack8(raw_k, k);
    float sums[2] = {dot8(q, q), dot8(k, k)};
    lane_sums<LANES>(sums);
    float rstd_q = 1.0f / sqrtf(sums[0] / (float)qk + RMS_EPS),
          rstd_k = 1.0f / sqrtf(sums[1] / (float)qk + RMS_EPS);
    if (key)
        store_vec(a.q, key_at, norm_rotate(q, rstd_q, turn));
    if (key)
        store_key(a, l, norm_rotate(k, rstd_k, turn), H);

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
    uint4 raw_v = vector_or_zero(a.raw_v, (int)l.unit * (e / 8) + l.j, l.has && l.j < e / 8);
    ValueParts value = load_value(a, l, raw_v, H, e);
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
    OP_SCOPE(qkv_heads_forward, a, N, H, e);
    HeadsForward heads = qkv_heads_planes(a, N, H);
    assert(!heads.paired || H % 2 == 0);
    if (N <= 0)
        return;
    bool own = sm90_qkv_heads(c, a, N, H, e);
    if (!own && !sm80_qkv_heads(c->stream, a, N, H, e)) {
        qkv_heads_apart(c, a, N, H, e);
    } else if (own && (heads.value.table || heads.value.extra)) {
        assert(e <= 8 * VALUE_LANES);
        int64_t lanes = (int64_t)N * H * VALUE_LANES;
        heads_values_kernel<<<ceil_div(lanes, ROW_THREADS), ROW_THREADS, 0, c->stream>>>(heads, N, H, e);
        CHECK_LAUNCH();
    }
}
