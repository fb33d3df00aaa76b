// Backward of heads before attention (heads.cu).
//
// Heads of 128: one warp a token, half a warp a head, the lane the same vector of every second head. All rows
// are loaded before the first is used, all sums of the heads of a row are made at once, and what gates give
// is summed in registers. Other widths: pair by pair.
//
// Bytes a token at d = 768, at 4.27 TB/s: dq, dk, dv, q, k in, dqkv out 12288 (2.9 ns; 47 us for 16384
// tokens), 1536 more for u and for each further gradient (6 us). Some 900 instructions of a warp: 17 us.
// Before (H200, 2026-11-23), with any power of two as width and row after row: 3000 instructions, 84 us, and
// with gates 217.
#include "llmc/cuda/attention/gates.cuh"
#include "llmc/cuda/rows/heads.cuh"

namespace
{

struct Backward {
    HeadsBackward b; // without `forward`
    HeadsForward f;
};

// With y = R x^, x^ = x rstd, and cos, sin rounded: x^ = R' y / (cos^2 + sin^2), dx^ = R' dy, and the sum of
// dx^ x^ is that of dy y.  g: rstd dy; scale: the mean of g y / (cos^2 + sin^2)
__device__ __forceinline__ float2 unrotate(float2 g, float2 y, float c, float s, float scale)
{
    float even = g.x - y.x * scale, odd = g.y - y.y * scale;
    return {even * c - odd * s, odd * c + even * s};
}

// A row of q or k. y: first row of the heads, dy and add: of their gradients; below: of the second halves,
// whose gradient has no rows from N on.
struct RowGradient {
    floatX *out;
    const float *rstd; // (H)
    const floatX *y, *dy, *add;
    bool shifted, first_row, last_row;
};

// Zeros for the warp's sums, by the lanes that add to them.
__device__ __forceinline__ void clear_sums(float *sums, int inputs, int H, int lane)
{
    for (int n = 0; n < H && lane < inputs; n++)
        sums[n * inputs + lane] = 0;
}

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
    float rstd = r.rstd[n], mean = warp_sum(dot) * rstd / (float)qk;
    for (int j = lane; j < qk / 2; j += WARP) {
        bool below = r.shifted && j >= qk / 4;
        int64_t at = n * qk + 2 * j;
        float2 g = pair_gradient(r, at, below, width), y = load_two(r.y + at + (below ? width : 0)),
               turn = turn_of(a, position_of(a, t, n), j);
        float scale = mean * __fdividef(1, turn.x * turn.x + turn.y * turn.y);
        float2 x = unrotate({rstd * g.x, rstd * g.y}, y, turn.x, turn.y, scale);
        store_two(r.out + at, x.x, x.y);
    }
}

// ---- heads of 128 -----------------------------------------------------------------------------------------

enum { HEAD = 128, HALF_WARP = WARP / 2 };
const unsigned WHOLE_WARP = 0xffffffffu;

// The lane's vectors of a row, of every second head: of the heads and of their gradients.
template <int VPL> struct RowVectors {
    uint4 y[VPL], dy[VPL];
};

// below: the lane's vectors are of second halves that are in the next row
template <int VPL>
__device__ __forceinline__ void load_vectors(RowVectors<VPL> &u, const RowGradient &r, bool below, int width,
                                             int lane)
{
    int vectors = width / 8;
    load_row(u.y, r.y + (below ? width : 0), vectors, lane);
    load_row(u.dy, r.dy + (below && !r.last_row ? width : 0), below && r.last_row ? 0 : vectors, lane);
}

// Sums over half warps.
template <int VPL> __device__ __forceinline__ void half_sums(float (&x)[VPL])
{
#pragma unroll
    for (int step = HALF_WARP / 2; step; step >>= 1)
#pragma unroll
        for (int i = 0; i < VPL; i++)
            x[i] += __shfl_xor_sync(WHOLE_WARP, x[i], step);
}

// Angles of the lane's four pairs, in bf16; its vectors are the same ones of heads of one parity.
struct Rotation {
    uint2 c, s;
};

__device__ __forceinline__ Rotation load_rotation(const HeadsForward &a, int64_t t, int lane)
{
    int j = lane % HALF_WARP;
    int64_t at = position_of(a, t, lane / HALF_WARP) * (HEAD / 4) + 4 * j;
    if (j >= HALF_WARP / 2)
        return {make_uint2(0x3f803f80, 0x3f803f80), make_uint2(0, 0)}; // ones, noughts
    return {*(const uint2 *)(a.cos + at), *(const uint2 *)(a.sin + at)};
}

template <int VPL>
__device__ __forceinline__ void unrotate_row(const RowVectors<VPL> &u, const RowGradient &r,
                                             const Rotation &turn, bool below, int width, int lane)
{
    int vectors = width / 8;
    float g[VPL][8], mean[VPL];
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        bool has = v < vectors;
        float y[8], rstd = has ? r.rstd[v / HALF_WARP] : 0;
        unpack8(u.dy[i], g[i]);
        if (r.add && has && !(below && r.last_row))
            add_vec(g[i], r.add + (below ? width : 0), v);
        if (r.first_row && has && below) {
            add_vec(g[i], r.dy, v);
            if (r.add)
                add_vec(g[i], r.add, v);
        }
        unpack8(u.y[i], y);
#pragma unroll
        for (int k = 0; k < 8; k++)
            g[i][k] *= rstd;
        mean[i] = dot8(g[i], y);
    }
    half_sums(mean);
    float c[4], sine[4], inverse[4];
    unpack4(turn.c, c);
    unpack4(turn.s, sine);
#pragma unroll
    for (int k = 0; k < 4; k++)
        inverse[k] = __fdividef(1.0f / HEAD, c[k] * c[k] + sine[k] * sine[k]);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float y[8];
        unpack8(u.y[i], y);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 x = unrotate({g[i][2 * k], g[i][2 * k + 1]}, {y[2 * k], y[2 * k + 1]}, c[k], sine[k],
                                mean[i] * inverse[k]);
            g[i][2 * k] = x.x;
            g[i][2 * k + 1] = x.y;
        }
        if (lane + WARP * i < vectors)
            store_vec(r.out, lane + WARP * i, pack8(g[i]));
    }
}

// dv of a token, and in dot the sums over heads of dv u, when there is a u.
template <int VPL>
__device__ __forceinline__ void store_values(floatX *out, const uint4 (&dv)[VPL], const floatX *add,
                                             const uint4 (&u)[VPL], bool with_u, float (&dot)[VPL],
                                             int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        float g[8], x[8];
        unpack8(dv[i], g);
        if (add && v < vectors)
            add_vec(g, add, v);
        if (v < vectors)
            store_vec(out, v, pack8(g));
        unpack8(u[i], x);
        dot[i] = with_u ? dot8(g, x) : 0;
    }
    if (with_u)
        half_sums(dot);
}

// Gates of their own: lane c has input c of all heads' gates.  sums: of their weights' gradients, (H, 2 I) in
// shared memory (in registers they spill);  dot: sums of dv u of heads lane / 16 + 2 i
template <int VPL>
__device__ __forceinline__ void gates_backward(float *sums, const HeadsBackward &b, const ValueMix &m,
                                               int64_t t, float (&dot)[VPL], int H, int lane)
{
    int inputs = m.gate_inputs, d = H * HEAD;
    float lead = 0, input = 0;
    if (lane < inputs)
        input = to_float(m.h[t * d + lane]);
    else if (lane < 2 * inputs)
        input = to_float(m.table[(int64_t)m.tokens[t] * d + lane - inputs]);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int n = lane / HALF_WARP + 2 * i;
        float gate = n < H ? m.gate[t * H + n] : 0;
        dot[i] *= gate * (1 - gate / 2); // before the sigmoid
    }
#pragma unroll
    for (int n = 0; n < 2 * VPL; n++) {
        float dgate = __shfl_sync(WHOLE_WARP, dot[n / 2], n % 2 * HALF_WARP);
        int at = n * 2 * inputs + lane;
        if (n >= H || lane >= 2 * inputs)
            continue;
        sums[at] += dgate * input;
        lead += dgate * to_float(m.gate_w[at]);
    }
    if (lane < inputs)
        b.dh_lead[t * inputs + lane] = lead;
    else if (lane < 2 * inputs)
        b.du_lead[t * inputs + lane - inputs] = lead;
}

// Lane g has group g.
template <int VPL>
__device__ __forceinline__ void factors_backward(const HeadsBackward &b, const ValueMix &m, int64_t t,
                                                 const float (&dot)[VPL], int group, int H, int lane)
{
    float sum = 0; // group: heads of one
#pragma unroll
    for (int n = 0; n < 2 * VPL; n++) {
        float of_head = __shfl_sync(WHOLE_WARP, dot[n / 2], n % 2 * HALF_WARP);
        sum += n < H && n >= lane * group && n < (lane + 1) * group ? of_head : 0;
    }
    if (lane < m.groups)
        b.dfactor[t * m.stride + lane] = sum;
}

__device__ __forceinline__ RowGradient query_row(const Backward &a, int64_t t, floatX *out, int H, int width)
{
    int64_t at = t * width;
    return {out, a.f.rstd_q + t * H, a.f.q + at, a.b.dq + at, a.b.dq_add ? a.b.dq_add + at : NULL};
}

__device__ __forceinline__ RowGradient key_row(const Backward &a, int64_t t, floatX *out, int N, int H,
                                               int width)
{
    int64_t at = t * width;
    const floatX *add = a.b.dk_add ? a.b.dk_add + at : NULL;
    return {out, a.f.rstd_k + t * H, a.f.k + at, a.b.dk + at, add, a.f.offset, t == 0, t + 1 == N};
}

template <int VPL, bool GATES>
__global__ __launch_bounds__(ROW_THREADS, VPL <= 3 ? 2 : 1) void heads_backward_128_kernel(
    const __grid_constant__ Backward a, int N, int H, float *partials, unsigned *counter)
{
    extern __shared__ float shared[]; // (ROW_WARPS, H, 2 I) with gates
    const ValueMix &m = a.f.value;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = H * HEAD, vectors = d / 8,
        inputs = 2 * m.gate_inputs, group = m.table && !GATES ? H / m.groups : 1;
    bool below = a.f.offset && lane % HALF_WARP >= HALF_WARP / 2;
    float *sums = shared + warp * H * inputs;
    if (GATES)
        clear_sums(sums, inputs, H, lane);
    for (int row = blockIdx.x * ROW_WARPS + warp; row < N; row += gridDim.x * ROW_WARPS) {
        int64_t t = row;
        floatX *out = a.b.dqkv + t * 3 * d;
        RowGradient q = query_row(a, t, out, H, d), k = key_row(a, t, out + d, N, H, d);
        RowVectors<VPL> of_q, of_k;
        uint4 dv[VPL], u[VPL] = {};
        float dot[VPL];
        load_vectors(of_q, q, false, d, lane);
        load_vectors(of_k, k, below, d, lane);
        Rotation turn = load_rotation(a.f, t, lane);
        unrotate_row(of_q, q, turn, false, d, lane);
        load_row(dv, a.b.dv + t * d, vectors, lane);
        if (m.table) {
            load_row(u, m.table + (int64_t)m.tokens[t] * d, vectors, lane);
        }
        unrotate_row(of_k, k, turn, below, d, lane);
        store_values(out + 2 * d, dv, a.b.dv_add ? a.b.dv_add + t * d : NULL, u, m.table, dot, vectors, lane);
        if (GATES)
            gates_backward(sums, a.b, m, t, dot, H, lane);
        else if (m.table)
            factors_backward(a.b, m, t, dot, group, H, lane);
    }
    if (GATES)
        add_gate_sums(a.b.dgate_w, shared, H * inputs, partials, counter);
}

// ---- any width: one warp a token, head by head
// -------------------------------------------------------------

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

__global__ __launch_bounds__(ROW_THREADS, 2) void heads_backward_any_kernel(Backward a, int N, int H, int e,
                                                                            float *partials,
                                                                            unsigned *counter)
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
        floatX *out = a.b.dqkv + t * (2 * width + d);
        RowGradient q = query_row(a, t, out, H, width), k = key_row(a, t, out + width, N, H, width);
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

template <int VPL>
static void launch_128(Stream s, const Backward &a, bool gates, int N, int H, size_t bytes, float *partials,
                       unsigned *counter)
{
    unsigned blocks = (unsigned)row_blocks(N, 2); // as many as are resident
    if (gates)
        heads_backward_128_kernel<VPL, true><<<blocks, ROW_THREADS, bytes, s>>>(a, N, H, partials, counter);
    else
        heads_backward_128_kernel<VPL, false><<<blocks, ROW_THREADS, 0, s>>>(a, N, H, NULL, NULL);
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
    if (e == HEAD && f->qk == HEAD && H <= 2) {
        launch_128<1>(s, both, gates, N, H, bytes, partials, counter);
    } else if (e == HEAD && f->qk == HEAD && H <= 6) {
        launch_128<3>(s, both, gates, N, H, bytes, partials, counter);
    } else if (e == HEAD && f->qk == HEAD && H <= 8) {
        launch_128<4>(s, both, gates, N, H, bytes, partials, counter);
    } else {
        if (bytes > 48 * 1024)
            CUDA_CHECK(cudaFuncSetAttribute(heads_backward_any_kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        heads_backward_any_kernel<<<blocks, ROW_THREADS, bytes, s>>>(both, N, H, e, partials, counter);
    }
    CHECK_LAUNCH();
}
