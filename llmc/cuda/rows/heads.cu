// Heads of the records of 2026 before attention: norm, rope on pairs, key offset, values. Backward:
// heads_backward.cu.
//
// Heads of q and k of width 16, 32, 64 or 128, of v of 8, 16 ... 256, at most 32 of them: one warp a token in
// 16-byte vectors; a power of two of neighbouring lanes shares a head, and a rotating pair lies in one lane.
// Other widths: pair by pair.
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: forward q, k, v in and out 9216 (2.2 ns; 35 us for
// 16384 tokens), 1536 more for each of u and extra (6 us). Angles and scalars of a token: some 300.
#include "llmc/cuda/rows/heads.cuh"

namespace
{

const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23
const unsigned WHOLE_WARP = 0xffffffffu;

bool fast_path(int H, int e, int qk)
{
    bool powers = (e & (e - 1)) == 0 && (qk & (qk - 1)) == 0;
    return powers && qk >= 16 && qk <= 128 && e >= 8 && e <= 256 && H <= WARP && H * qk <= MAX_DIM;
}

// ---- one vector -------------------------------------------------------------------------------------------

// Cosines and sines of the four pairs of a vector.
struct Turn {
    float c[4], s[4];
};

// Of the lane's vectors: they are the same vector of heads of the same parity, because two heads or more
// lie beside each other in a warp.
__device__ __forceinline__ Turn load_turn(const HeadsForward &a, int64_t t, int lane)
{
    int lanes = a.qk / 8, j = lane % lanes;
    if (j >= lanes / 2)
        return {{1, 1, 1, 1}, {0, 0, 0, 0}};
    int64_t at = position_of(a, t, lane / lanes) * (a.qk / 4);
    Turn turn;
    unpack4(((const uint2 *)(a.cos + at))[j], turn.c);
    unpack4(((const uint2 *)(a.sin + at))[j], turn.s);
    return turn;
}

// ---- forward ----------------------------------------------------------------------------------------------

// Before the sigmoid and its factor: gate_w_n . (h[0:I], u[0:I]).
__device__ __forceinline__ float gate_sum(const ValueMix &m, int n, const floatX *h, const floatX *u)
{
    int inputs = m.gate_inputs;
    const floatX *w = m.gate_w + n * 2 * inputs;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < MAX_GATE_INPUTS / 2; c++)
        if (c < inputs)
            sum += to_float(w[c]) * to_float(h[c]) + to_float(w[inputs + c]) * to_float(u[c]);
    return sum;
}

// gate_n of a token; what gates of their own give is stored.
__device__ __forceinline__ float value_gate(const ValueMix &m, int64_t t, int n, const floatX *u, int H,
                                            int d)
{
    if (!m.gate_w)
        return m.factor[t * m.stride + n / (H / m.groups)];
    return m.gate[t * H + n] = 2 * sigmoid(gate_sum(m, n, m.h + t * d, u));
}

// A row of q or k. shifted: the second half of each head goes to the next row, too to its own in row 0.
template <int VPL>
__device__ __forceinline__ void norm_rotate_row(floatX *out, float *rstd, const floatX *raw, const Turn &turn,
                                                int width, int qk, bool shifted, bool first_row, int lane)
{
    int vectors = width / 8, lanes = qk / 8, shift = __ffs(lanes) - 1;
    bool below = shifted && lane % lanes >= lanes / 2;
    uint4 u[VPL];
    load_row(u, raw, vectors, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        float x[8];
        unpack8(u[i], x);
        float r = 1.0f / sqrtf(group_sum(dot8(x, x), lanes, WHOLE_WARP) / (float)qk + RMS_EPS);
        if (v >= vectors)
            continue;
        if (lane % lanes == 0)
            rstd[v >> shift] = r;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float even = x[2 * k] * r, odd = x[2 * k + 1] * r;
            x[2 * k] = even * turn.c[k] + odd * turn.s[k];
            x[2 * k + 1] = odd * turn.c[k] - even * turn.s[k];
        }
        uint4 y = pack8(x);
        if (!below || first_row)
            store_vec(out, v, y);
        if (below)
            store_vec(out + width, v, y);
    }
}

template <int VPL>
__device__ __forceinline__ void values_row(const HeadsForward &a, int64_t t, int H, int e, int lane)
{
    const ValueMix &m = a.value;
    int d = H * e, vectors = d / 8;
    int64_t at = t * d;
    const floatX *u_row = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
    uint4 raw[VPL], u[VPL], extra[VPL];
    load_row(raw, a.raw_v + at, vectors, lane);
    if (u_row)
        load_row(u, u_row, vectors, lane);
    if (m.extra)
        load_row(extra, m.extra + at, vectors, lane);
    float mine = u_row && lane < H ? value_gate(m, t, lane, u_row, H, d) : 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float v[8], x[8], gate = __shfl_sync(WHOLE_WARP, mine, min((lane + WARP * i) * 8 / e, H - 1));
        unpack8(raw[i], v);
        if (u_row) {
            unpack8(u[i], x);
#pragma unroll
            for (int k = 0; k < 8; k++)
                v[k] += gate * x[k];
        }
        if (m.extra) {
            unpack8(extra[i], x);
#pragma unroll
            for (int k = 0; k < 8; k++)
                v[k] += x[k];
        }
        raw[i] = pack8(v);
    }
    store_row(a.v + at, raw, vectors, lane);
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void heads_forward_kernel(HeadsForward a, int N, int H, int e)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, width = H * a.qk;
    if (row >= N)
        return;
    int64_t t = row, at = t * width;
    Turn turn = load_turn(a, t, lane);
    norm_rotate_row<VPL>(a.q + at, a.rstd_q + t * H, a.raw_q + at, turn, width, a.qk, false, false, lane);
    norm_rotate_row<VPL>(a.k + at, a.rstd_k + t * H, a.raw_k + at, turn, width, a.qk, a.offset, t == 0, lane);
    values_row<VPL>(a, t, H, e, lane);
}

// ---- forward, any width: one warp a head of a token -------------------------------------------------------

__device__ __forceinline__ void norm_rotate_any(floatX *out, float *rstd, const floatX *raw,
                                                const HeadsForward &a, int64_t t, int H, int n, bool shifted,
                                                int lane)
{
    float sum = 0;
    for (int j = lane; j < a.qk / 2; j += WARP) {
        float2 x = load_two(raw + 2 * j);
        sum += x.x * x.x + x.y * x.y;
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)a.qk + RMS_EPS);
    if (lane == 0)
        *rstd = r;
    for (int j = lane; j < a.qk / 2; j += WARP) {
        float2 x = load_two(raw + 2 * j), turn = turn_of(a, position_of(a, t, n), j);
        float even = x.x * r * turn.x + x.y * r * turn.y, odd = x.y * r * turn.x - x.x * r * turn.y;
        bool below = shifted && j >= a.qk / 4;
        if (!below || t == 0)
            store_two(out + 2 * j, even, odd);
        if (below)
            store_two(out + (int64_t)H * a.qk + 2 * j, even, odd);
    }
}

__global__ __launch_bounds__(ROW_THREADS) void heads_forward_any_kernel(HeadsForward a, int N, int H, int e)
{
    int64_t unit = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (unit >= (int64_t)N * H)
        return;
    const ValueMix &m = a.value;
    int64_t t = unit / H, at = unit * a.qk;
    int n = unit % H, d = H * e;
    norm_rotate_any(a.q + at, a.rstd_q + unit, a.raw_q + at, a, t, H, n, false, lane);
    norm_rotate_any(a.k + at, a.rstd_k + unit, a.raw_k + at, a, t, H, n, a.offset, lane);
    const floatX *u = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
    float gate = u ? value_gate(m, t, n, u, H, d) : 0; // all lanes store the same value
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
    if (fast_path(H, e, a->qk)) {
        int width = H * (a->qk > e ? a->qk : e);
        unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
        DISPATCH_WIDTH(width, (heads_forward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(*a, N, H, e)));
    } else {
        unsigned blocks = (unsigned)ceil_div((int64_t)N * H, ROW_WARPS);
        heads_forward_any_kernel<<<blocks, ROW_THREADS, 0, s>>>(*a, N, H, e);
    }
    CHECK_LAUNCH();
}
