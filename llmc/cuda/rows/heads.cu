// Heads of the records of 2026 before attention: norm, rope on pairs, key offset, values. Both directions.
//
// Heads of q and k of width 16, 32, 64 or 128, of v of 8, 16 ... 256, at most 32 of them: one warp a token in
// 16-byte vectors; a power of two of neighbouring lanes shares a head, and a rotating pair lies in one lane.
// Other widths: pair by pair.
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: forward q, k, v in and out 9216 (2.2 ns; 35 us for
// 16384 tokens), 1536 more for each of u and extra (6 us). Backward dq, dk, dv, q, k in, dqkv out 12288 (47
// us), 1536 more for u and for each further gradient. Angles and scalars of a token: some 300.
#include "llmc/cuda/attention/gates.cuh"

namespace
{

const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23
const unsigned WHOLE_WARP = 0xffffffffu;

bool fast_path(int H, int e, int qk)
{
    bool powers = (e & (e - 1)) == 0 && (qk & (qk - 1)) == 0;
    return powers && qk >= 16 && qk <= 128 && e >= 8 && e <= 256 && H <= WARP && H * qk <= MAX_DIM;
}

__device__ __forceinline__ int64_t position_of(const HeadsForward &a, int64_t t, int n)
{
    return a.paired ? 2 * t + n % 2 : t;
}

// ---- one vector -------------------------------------------------------------------------------------------

// Cosines and sines of the four pairs of a vector.
struct Turn {
    float c[4], s[4];
};

__device__ __forceinline__ void unpack4(uint2 u, float (&f)[4])
{
    f[0] = __uint_as_float(u.x << 16);
    f[1] = __uint_as_float(u.x & 0xffff0000u);
    f[2] = __uint_as_float(u.y << 16);
    f[3] = __uint_as_float(u.y & 0xffff0000u);
}

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

__device__ __forceinline__ void add_vec(float (&sum)[8], const floatX *row, int v)
{
    float x[8];
    unpack8(load_vec(row, v), x);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum[k] += x[k];
}

__device__ __forceinline__ float dot8(const float (&a)[8], const float (&b)[8])
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += a[k] * b[k];
    return sum;
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

__device__ __forceinline__ float2 load_two(const floatX *p)
{
    uint32_t u = *(const uint32_t *)p;
    return {__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u)};
}

__device__ __forceinline__ void store_two(floatX *p, float even, float odd)
{
    *(uint32_t *)p = pack2(even, odd);
}

// Cosine and sine of pair j of a head.
__device__ __forceinline__ float2 turn_of(const HeadsForward &a, int64_t position, int j)
{
    int64_t at = position * (a.qk / 4) + j;
    return j < a.qk / 4 ? make_float2(to_float(a.cos[at]), to_float(a.sin[at])) : make_float2(1, 0);
}

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

// ---- backward ---------------------------------------------------------------------------------------------

struct Backward {
    HeadsBackward b; // without `forward`
    HeadsForward f;
};

// With y = R x^, x^ = x rstd, and cos, sin rounded: x^ = R' y / (cos^2 + sin^2), dx^ = R' dy, and the sum of
// dx^ x^ is that of dy y.  mean: of dy y
__device__ __forceinline__ float2 unrotate(float2 dy, float2 y, float c, float s, float mean, float rstd)
{
    float scale = mean * __fdividef(1, c * c + s * s), even = dy.x - y.x * scale, odd = dy.y - y.y * scale;
    return {rstd * (even * c - odd * s), rstd * (odd * c + even * s)};
}

// A row of q or k. y: first row of the heads, dy and add: of their gradients; below: of the second halves,
// whose gradient has no rows from N on.
struct RowGradient {
    floatX *out;
    const float *rstd; // (H)
    const floatX *y, *dy, *add;
    bool shifted, first_row, last_row;
};

template <int VPL>
__device__ __forceinline__ void unrotate_row(const RowGradient &r, const Turn &turn, int width, int qk,
                                             int lane)
{
    int vectors = width / 8, lanes = qk / 8, head_shift = __ffs(lanes) - 1;
    bool below = r.shifted && lane % lanes >= lanes / 2;
    int64_t shift = below ? width : 0;
    float g[VPL][8];
    uint4 u[VPL];
    load_row(u, r.y + shift, vectors, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
#pragma unroll
        for (int k = 0; k < 8; k++)
            g[i][k] = 0;
        if (v >= vectors)
            continue;
        if (!below || !r.last_row) {
            add_vec(g[i], r.dy + shift, v);
            if (r.add)
                add_vec(g[i], r.add + shift, v);
        }
        if (below && r.first_row) {
            add_vec(g[i], r.dy, v);
            if (r.add)
                add_vec(g[i], r.add, v);
        }
    }
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        float y[8];
        unpack8(u[i], y);
        float mean = group_sum(dot8(g[i], y), lanes, WHOLE_WARP) / (float)qk;
        if (v >= vectors)
            continue;
        float rstd = r.rstd[v >> head_shift];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 x = unrotate({g[i][2 * k], g[i][2 * k + 1]}, {y[2 * k], y[2 * k + 1]}, turn.c[k],
                                turn.s[k], mean, rstd);
            g[i][2 * k] = x.x;
            g[i][2 * k + 1] = x.y;
        }
        store_vec(r.out, v, pack8(g[i]));
    }
}

// What the warp adds up for a token's gates or factors, head by head; all lanes call.
struct HeadSums {
    float *gate_w;     // (H, 2 I) shared sums of the warp; NULL: factors
    float input, lead; // lane c < 2 I: input c of the gates, and what they give to it
    float factor;      // lane g: of group g
};

__device__ __forceinline__ HeadSums head_sums(const ValueMix &m, float *shared, int64_t t, const floatX *u,
                                              int d, int lane)
{
    HeadSums s = {m.gate_w ? shared : NULL, 0, 0, 0};
    if (s.gate_w && lane < 2 * m.gate_inputs)
        s.input = to_float(lane < m.gate_inputs ? m.h[t * d + lane] : u[lane - m.gate_inputs]);
    return s;
}

// dot: dv_n . u_n
__device__ __forceinline__ void add_head(HeadSums &s, const ValueMix &m, int64_t t, int n, float dot, int H,
                                         int lane)
{
    if (!s.gate_w) {
        s.factor += n / (H / m.groups) == lane ? dot : 0;
        return;
    }
    float gate = m.gate[t * H + n], dgate = dot * gate * (1 - gate / 2); // before the sigmoid
    int at = n * 2 * m.gate_inputs + lane;
    if (lane >= 2 * m.gate_inputs)
        return;
    s.gate_w[at] += dgate * s.input;
    s.lead += dgate * to_float(m.gate_w[at]);
}

__device__ __forceinline__ void store_sums(const HeadSums &s, const HeadsBackward &b, const ValueMix &m,
                                           int64_t t, int lane)
{
    int inputs = m.gate_inputs;
    if (!s.gate_w) {
        if (lane < m.groups)
            b.dfactor[t * m.stride + lane] = s.factor;
    } else if (lane < inputs) {
        b.dh_lead[t * inputs + lane] = s.lead;
    } else if (lane < 2 * inputs) {
        b.du_lead[t * inputs + lane - inputs] = s.lead;
    }
}

template <int VPL>
__device__ __forceinline__ void values_backward_row(const Backward &a, float *shared, int64_t t, int H, int e,
                                                    int lane)
{
    const ValueMix &m = a.f.value;
    int d = H * e, vectors = d / 8, lanes = e / 8;
    int64_t at = t * d;
    floatX *out = a.b.dqkv + t * (2 * H * a.f.qk + d) + 2 * H * a.f.qk;
    const floatX *u_row = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
    uint4 u[VPL];
    float dot[VPL];
    if (u_row)
        load_row(u, u_row, vectors, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        dot[i] = 0;
        if (v >= vectors)
            continue;
        float g[8], x[8];
        unpack8(load_vec(a.b.dv + at, v), g);
        if (a.b.dv_add)
            add_vec(g, a.b.dv_add + at, v);
        store_vec(out, v, pack8(g));
        if (u_row) {
            unpack8(u[i], x);
            dot[i] = dot8(g, x);
        }
    }
    if (!u_row)
        return;
    HeadSums sums = head_sums(m, shared, t, u_row, d, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float of_head = group_sum(dot[i], lanes, WHOLE_WARP);
        for (int first = 0; first < WARP && (WARP * i + first) / lanes < H; first += lanes)
            add_head(sums, m, t, (WARP * i + first) / lanes, __shfl_sync(WHOLE_WARP, of_head, first), H,
                     lane);
    }
    store_sums(sums, a.b, m, t, lane);
}

// Zeros for the warp's sums, by the lanes that add to them.
__device__ __forceinline__ void clear_sums(float *sums, int inputs, int H, int lane)
{
    for (int n = 0; n < H && lane < inputs; n++)
        sums[n * inputs + lane] = 0;
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void heads_backward_kernel(Backward a, int N, int H, int e,
                                                                     float *partials, unsigned *counter)
{
    extern __shared__ float shared[]; // (ROW_WARPS, H, 2 I) with gates
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, qk = a.f.qk, width = H * qk;
    bool gates = a.f.value.table && a.f.value.gate_w;
    int inputs = 2 * a.f.value.gate_inputs;
    float *sums = shared + warp * H * inputs;
    if (gates)
        clear_sums(sums, inputs, H, lane);
    for (int64_t t = blockIdx.x * ROW_WARPS + warp; t < N; t += gridDim.x * ROW_WARPS) {
        int64_t at = t * width;
        floatX *out = a.b.dqkv + t * (2 * width + H * e);
        Turn turn = load_turn(a.f, t, lane);
        RowGradient q = {out, a.f.rstd_q + t * H, a.f.q + at, a.b.dq + at,
                         a.b.dq_add ? a.b.dq_add + at : NULL},
                    k = {out + width,
                         a.f.rstd_k + t * H,
                         a.f.k + at,
                         a.b.dk + at,
                         a.b.dk_add ? a.b.dk_add + at : NULL,
                         a.f.offset,
                         t == 0,
                         t + 1 == N};
        unrotate_row<VPL>(q, turn, width, qk, lane);
        unrotate_row<VPL>(k, turn, width, qk, lane);
        values_backward_row<VPL>(a, sums, t, H, e, lane);
    }
    if (gates)
        add_gate_sums(a.b.dgate_w, shared, H * inputs, partials, counter);
}

// ---- backward, any width: one warp a token, head by head --------------------------------------------------

__device__ __forceinline__ float2 sum_of_two(const floatX *dy, const floatX *add, int64_t at)
{
    float2 g = load_two(dy + at), more = add ? load_two(add + at) : make_float2(0, 0);
    return {g.x + more.x, g.y + more.y};
}

// Of pair j of a row of `width`.
__device__ __forceinline__ float2 pair_gradient(const RowGradient &r, int64_t at, bool below, int width)
{
    if (!below)
        return sum_of_two(r.dy, r.add, at);
    float2 g = r.last_row ? make_float2(0, 0) : sum_of_two(r.dy, r.add, at + width);
    if (r.first_row) {
        float2 own = sum_of_two(r.dy, r.add, at);
        g.x += own.x;
        g.y += own.y;
    }
    return g;
}

__device__ __forceinline__ void unrotate_any(const RowGradient &r, const HeadsForward &a, int64_t t, int H,
                                             int n, int lane)
{
    int qk = a.qk, width = H * qk;
    float dot = 0;
    for (int j = lane; j < qk / 2; j += WARP) {
        bool below = r.shifted && j >= qk / 4;
        int64_t at = n * qk + 2 * j;
        float2 g = pair_gradient(r, at, below, width), y = load_two(r.y + at + (below ? width : 0));
        dot += g.x * y.x + g.y * y.y;
    }
    float mean = warp_sum(dot) / (float)qk;
    for (int j = lane; j < qk / 2; j += WARP) {
        bool below = r.shifted && j >= qk / 4;
        int64_t at = n * qk + 2 * j;
        float2 g = pair_gradient(r, at, below, width), y = load_two(r.y + at + (below ? width : 0)),
               turn = turn_of(a, position_of(a, t, n), j);
        float2 x = unrotate(g, y, turn.x, turn.y, mean, r.rstd[n]);
        store_two(r.out + at, x.x, x.y);
    }
}

__global__ __launch_bounds__(ROW_THREADS) void heads_backward_any_kernel(Backward a, int N, int H, int e,
                                                                         float *partials, unsigned *counter)
{
    extern __shared__ float shared[];
    const ValueMix &m = a.f.value;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, qk = a.f.qk, width = H * qk, d = H * e;
    bool gates = m.table && m.gate_w;
    int inputs = 2 * m.gate_inputs;
    float *sums = shared + warp * H * inputs;
    if (gates)
        clear_sums(sums, inputs, H, lane);
    for (int64_t t = blockIdx.x * ROW_WARPS + warp; t < N; t += gridDim.x * ROW_WARPS) {
        int64_t at = t * width;
        floatX *out = a.b.dqkv + t * (2 * width + d);
        RowGradient q = {out, a.f.rstd_q + t * H, a.f.q + at, a.b.dq + at,
                         a.b.dq_add ? a.b.dq_add + at : NULL},
                    k = {out + width,
                         a.f.rstd_k + t * H,
                         a.f.k + at,
                         a.b.dk + at,
                         a.b.dk_add ? a.b.dk_add + at : NULL,
                         a.f.offset,
                         t == 0,
                         t + 1 == N};
        const floatX *u = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
        HeadSums of_token = {};
        if (u)
            of_token = head_sums(m, sums, t, u, d, lane);
        for (int n = 0; n < H; n++) {
            unrotate_any(q, a.f, t, H, n, lane);
            unrotate_any(k, a.f, t, H, n, lane);
            float dot = 0;
            for (int c = n * e + lane; c < (n + 1) * e; c += WARP) {
                float g = to_float(a.b.dv[t * d + c]);
                if (a.b.dv_add)
                    g += to_float(a.b.dv_add[t * d + c]);
                out[2 * width + c] = __float2bfloat16(g);
                dot += u ? g * to_float(u[c]) : 0;
            }
            if (u)
                add_head(of_token, m, t, n, warp_sum(dot), H, lane);
        }
        if (u)
            store_sums(of_token, a.b, m, t, lane);
    }
    if (gates)
        add_gate_sums(a.b.dgate_w, shared, H * inputs, partials, counter);
}

void check_groups(const ValueMix *m, const char *op)
{
    if (m->table && !m->gate_w && m->groups > WARP)
        fatal(EXIT_BAD_INPUT, "%s: %d factors of values a token; the CUDA kernel takes at most %d", op,
              m->groups, WARP);
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

void heads_backward(Stream s, const HeadsBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_backward, a, N, H, e);
    if (N <= 0)
        return;
    const HeadsForward *f = a->forward;
    bool gates = f->value.table && f->value.gate_w;
    Backward both = {*a, *f};
    int blocks = row_blocks(N, 8);
    size_t sums = gates ? (size_t)(H * 2 * f->value.gate_inputs) : 0,
           bytes = ROW_WARPS * sums * sizeof(float);
    float *partials = scratch_floats(s, SCRATCH_HEADS, (size_t)blocks * sums);
    unsigned *counter = scratch_counter(s, SCRATCH_HEADS);
    check_groups(&f->value, "heads_backward");
    if (fast_path(H, e, f->qk)) {
        int width = H * (f->qk > e ? f->qk : e);
        DISPATCH_WIDTH(width, (heads_backward_kernel<VPL>
                               <<<blocks, ROW_THREADS, bytes, s>>>(both, N, H, e, partials, counter)));
    } else {
        if (bytes > 48 * 1024)
            CUDA_CHECK(cudaFuncSetAttribute(heads_backward_any_kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        heads_backward_any_kernel<<<blocks, ROW_THREADS, bytes, s>>>(both, N, H, e, partials, counter);
    }
    CHECK_LAUNCH();
}
