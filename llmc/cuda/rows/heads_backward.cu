// Backward of heads before attention (heads.cu).
//
// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256: one warp a token, half a warp a
// head (a warp above 128), a 16-byte vector a lane. Other widths: pair by pair. All loads of a head come
// before its first store, which the compiler cannot move them over; the sums of a head are made at once.
//
// After attention's backward on sm90 q's gradient is read from its fp32 sums (sm90_attention.cuh) by a kernel
// of its own, a CTA a tile of them. The planes of k and v may be written by the epilogue of attention's
// backward (sm90_backward_epilogue.cuh).
//
// Bytes a token at d = 768, qk = e = 128, at 4.27 TB/s: dq, dk, dv, q, k in, dqkv out 12288 (2.9 ns; 47 us
// for 16384 tokens), 1536 more for u and for each further gradient (6 us); at qk = 96 9984. dq from sums:
// 1536 more.
#include "llmc/cuda/attention/gates.cuh"
#include "llmc/cuda/attention/sm90_attention.cuh"
#include "llmc/cuda/rows/heads.cuh"

namespace
{

const size_t STATIC_SHARED = 48 * 1024; // that a kernel has without asking, its own arrays included

// CTAs of a multiprocessor, for loads in flight: four where registers are not spilled, and three with gates,
// whose kernel takes half as long again with four.
constexpr int ctas(int lanes, bool gates) { return lanes == WARP || gates ? 3 : 4; }

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

// Zeros for the warp's sums.
__device__ __forceinline__ void clear_sums(float *sums, int inputs, int H, int lane)
{
    for (int n = 0; n < H && lane < inputs; n++)
        sums[n * inputs + lane] = 0;
    __syncwarp();
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

// ---- a token: its rows, its gates or factors --------------------------------------------------------------

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

// What the LANES lanes of a head add up, head by head.
struct TokenSums {
    float lead;   // lane c < 2 I: what the gates give to their input c
    float factor; // lane g: of group g
};

// Of head n, for lane c: input c of the gates and its weight. (Loaded for every head, from the L1 cache: a
// load of the token's would be waited for before those of its first head.)
struct HeadGate {
    float gate, weight, input;
};

// u: the token's row of the table
template <bool GATES>
__device__ __forceinline__ HeadGate load_gate(const ValueMix &m, int64_t t, int n, const floatX *u, int H,
                                              int d, int c)
{
    int inputs = m.gate_inputs;
    if (!GATES || n >= H || c >= 2 * inputs)
        return {};
    return {m.gate[t * H + n], to_float(m.gate_w[n * 2 * inputs + c]),
            to_float(c < inputs ? m.h[t * d + c] : u[c - inputs])};
}

// To the factor of a group of so many heads.  dot: dv_n . u_n, known to all lanes of the head
__device__ __forceinline__ void add_factor(TokenSums &s, int group, int n, float dot, int H, int c)
{
    s.factor += n < H && n >= c * group && n < (c + 1) * group ? dot : 0;
}

// gate_sums (H, 2 I): the warp's sums for dgate_w, in shared memory
__device__ __forceinline__ void add_gate(TokenSums &s, float *gate_sums, const HeadGate &of_head, int inputs,
                                         int n, float dot, int H, int c)
{
    if (n >= H || c >= inputs)
        return;
    float dgate = dot * of_head.gate * (1 - of_head.gate / 2); // before the sigmoid
    gate_sums[n * inputs + c] += dgate * of_head.input;
    s.lead += dgate * of_head.weight;
}

// All lanes of the warp call.
template <int LANES, bool GATES>
__device__ __forceinline__ void store_sums(const TokenSums &s, const HeadsBackward &b, const ValueMix &m,
                                           int64_t t, int lane)
{
    int inputs = m.gate_inputs;
    float sum = GATES ? s.lead : s.factor;
    if (LANES < WARP)
        sum += __shfl_xor_sync(WHOLE_WARP, sum, LANES); // of the even heads and the odd ones
    if (!GATES) {
        if (lane < m.groups)
            b.dfactor[t * m.stride + lane] = sum;
    } else if (lane < inputs) {
        b.dh_lead[t * inputs + lane] = sum;
    } else if (lane < 2 * inputs) {
        b.du_lead[t * inputs + lane - inputs] = sum;
    }
}

// ---- vectors ----------------------------------------------------------------------------------------------

// q or k and its gradients, all tokens.
struct KeyTensors {
    const floatX *y, *dy, *add;
};

// The lane's vector of a head of q or k, and of its gradient.
struct KeyVectors {
    uint4 y, dy;
};

__device__ __forceinline__ KeyVectors load_keys(const KeyTensors &k, int v, bool has, bool has_gradient)
{
    return {vector_or_zero(k.y, v, has), vector_or_zero(k.dy, v, has_gradient)};
}

// g: the gradient of y. The further one is in few layers: registers for its loads beside the others would
// cost all of them a CTA.  own: vector own_v counts, too
__device__ __forceinline__ void gradient(float (&g)[8], const KeyVectors &u, const KeyTensors &k, int v,
                                         bool has, int own_v, bool own)
{
    unpack8(u.dy, g);
    if (k.add)
        add8(g, vector_or_zero(k.add, v, has));
    if (own) {
        add8(g, load_vec(k.dy, own_v));
        add8(g, vector_or_zero(k.add, own_v, k.add));
    }
}

__device__ __forceinline__ float dot_of(const float (&g)[8], uint4 u)
{
    float x[8];
    unpack8(u, x);
    return dot8(g, x);
}

// mean: of g y over the head
__device__ __forceinline__ uint4 unrotate8(const float (&g)[8], uint4 u, const Rotation &turn, float rstd,
                                           float mean)
{
    float y[8], c[4], s[4], dx[8];
    unpack8(u, y);
    unpack4(turn.c, c);
    unpack4(turn.s, s);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float scale = mean * __fdividef(1, c[k] * c[k] + s[k] * s[k]);
        float2 x =
            unrotate({g[2 * k], g[2 * k + 1]}, {y[2 * k], y[2 * k + 1]}, rstd * c[k], rstd * s[k], scale);
        dx[2 * k] = x.x;
        dx[2 * k + 1] = x.y;
    }
    return pack8(dx);
}

// Writes these planes of dqkv; v's is one of them.
template <int LANES, bool GATES, int PLANES>
__global__ __launch_bounds__(ROW_THREADS, ctas(LANES, GATES)) void heads_backward_kernel(
    const __grid_constant__ Backward a, int N, int H, int e, float *partials, unsigned *counter)
{
    extern __shared__ float shared[]; // (ROW_WARPS, H, 2 I) with gates
    constexpr bool QUERIES = PLANES & PLANE_Q, KEYS = PLANES & PLANE_K;
    static_assert(PLANES & PLANE_V);
    const ValueMix &m = a.f.value;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, j = lane % LANES, keys = a.f.qk / 8,
        values = e / 8, inputs = GATES ? 2 * m.gate_inputs : 0, group = m.table && !GATES ? H / m.groups : 1;
    bool below = a.f.offset && j >= keys / 2;
    float *gate_sums = shared + warp * H * inputs;
    const KeyTensors q = {a.f.q, a.b.dq, a.b.dq_add}, k = {a.f.k, a.b.dk, a.b.dk_add};
    if (GATES)
        clear_sums(gate_sums, inputs, H, lane);
    int first = blockIdx.x * ROW_WARPS + warp, rows = gridDim.x * ROW_WARPS,
        next = m.table && first < N ? m.tokens[first] : 0;
    for (int t = first; t < N; t += rows) {
        int token = next;
        TokenSums of_token = {};
        next = m.table && t + rows < N ? m.tokens[t + rows] : 0;
#pragma unroll 1
        for (int n = lane / LANES; n - lane / LANES < H; n += WARP / LANES) {
            bool key = KEYS && n < H && j < keys, value = n < H && j < values;
            int head = t * H + n, q_at = head * keys + j, v_at = head * values + j,
                k_at = q_at + (below ? H * keys : 0); // there row N has no gradient
            bool given = key && !(below && t + 1 == N);
            KeyVectors of_q = {}, of_k = load_keys(k, k_at, key, given);
            if constexpr (QUERIES)
                of_q = load_keys(q, q_at, key, key);
            uint4 dv = vector_or_zero(a.b.dv, v_at, value),
                  more = vector_or_zero(a.b.dv_add, v_at, value && a.b.dv_add),
                  u = vector_or_zero(m.table, (token * H + n) * values + j, value && m.table);
            Rotation turn = KEYS ? load_rotation(a.f, t, n, j) : Rotation{};
            HeadGate of_head = load_gate<GATES>(m, t, n, m.table + (int64_t)token * H * e, H, H * e, j);
            float rstd_q = QUERIES && key ? a.f.rstd_q[head] : 0, rstd_k = key ? a.f.rstd_k[head] : 0;

            float g_q[8], g_k[8] = {}, g_v[8];
            if constexpr (QUERIES)
                gradient(g_q, of_q, q, q_at, key, 0, false);
            if constexpr (KEYS)
                gradient(g_k, of_k, k, k_at, given, q_at, key && below && t == 0);
            unpack8(dv, g_v);
            add8(g_v, more);
            float sums[2 + QUERIES] = {KEYS ? dot_of(g_k, of_k.y) : 0, dot_of(g_v, u)};
            if constexpr (QUERIES)
                sums[2] = dot_of(g_q, of_q.y);
            int row = t * H * (2 * keys + values), out = row + n * keys + j;
            if (value)
                store_vec(a.b.dqkv, row + 2 * H * keys + n * values + j, pack8(g_v));
            lane_sums<LANES>(sums);
            float mean_k = __fdividef(sums[0], (float)a.f.qk);
            if (key)
                store_vec(a.b.dqkv, out + H * keys, unrotate8(g_k, of_k.y, turn, rstd_k, mean_k));
            if constexpr (QUERIES) {
                float mean_q = __fdividef(sums[2], (float)a.f.qk);
                if (key)
                    store_vec(a.b.dqkv, out, unrotate8(g_q, of_q.y, turn, rstd_q, mean_q));
            }
            if (m.table && GATES)
                add_gate(of_token, gate_sums, of_head, inputs, n, sums[1], H, j);
            else if (m.table)
                add_factor(of_token, group, n, sums[1], H, j);
        }
        if (m.table)
            store_sums<LANES, GATES>(of_token, a.b, m, t, lane);
    }
    if (GATES)
        add_gate_sums(a.b.dgate_w, shared, H * inputs, partials, counter);
}

// ---- q from attention's sums ------------------------------------------------------------------------------

// A CTA per tile of the sums, a quad of lanes per two rows (with paired heads a token has two rows).
// transpose_quad turns a lane's pairs of columns into vectors of 8. The tile's state is reset to 0.
template <int QK>
__global__ __launch_bounds__(dq_accumulator::THREADS,
                             3) void query_backward_kernel(const __grid_constant__ Backward a,
                                                           const __grid_constant__ DqSums kept, int N, int H,
                                                           int e)
{
    constexpr int GROUPS = QK / 8, VECTORS = GROUPS / 4; // a row's, of 8 columns; a lane's of them
    const HeadsForward &f = a.f;
    int pairs = f.paired ? 2 : 1, heads = H / pairs, lane = threadIdx.x % WARP, quad = lane % 4;
    int first = blockIdx.x / heads * dq_accumulator::QUERIES + threadIdx.x / WARP * 16 + lane / 4;
    const float4 *sums =
        (const float4 *)(kept.sums + (int64_t)blockIdx.x * (dq_accumulator::QUERIES * QK)) + threadIdx.x;
    float4 sum[GROUPS];
    uint4 y[2][VECTORS];
    Rotation turn[2][VECTORS];
    float rstd[2];
    int number[2]; // t * H + n of the row's token and head
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        sum[g] = __ldcs(sums + g * dq_accumulator::THREADS);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + 8 * r;
        bool has = row < N * pairs;
        number[r] = row * heads + (int)blockIdx.x % heads;
        rstd[r] = has ? f.rstd_q[number[r]] : 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            y[r][k] = vector_or_zero(f.q, number[r] * GROUPS + 4 * k + quad, has);
            turn[r][k] = load_rotation(f, has ? number[r] / H : 0, number[r] % H, 4 * k + quad);
        }
    }
    if (threadIdx.x < 2)
        kept.state[2 * blockIdx.x + threadIdx.x] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool has = first + 8 * r < N * pairs;
        float g[VECTORS][8], dot = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            uint32_t even[4], odd[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float4 s = sum[4 * k + i];
                even[i] = __float_as_uint(kept.scale * (r ? s.z : s.x));
                odd[i] = __float_as_uint(kept.scale * (r ? s.w : s.y));
            }
            transpose_quad(even);
            transpose_quad(odd);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                g[k][2 * i] = __uint_as_float(even[i]);
                g[k][2 * i + 1] = __uint_as_float(odd[i]);
            }
            if (a.b.dq_add)
                add8(g[k], vector_or_zero(a.b.dq_add, number[r] * GROUPS + 4 * k + quad, has));
            dot += dot_of(g[k], y[r][k]);
        }
        float mean = quad_sum(dot) / QK;
        int out = number[r] / H * (H * (2 * GROUPS + e / 8)) + number[r] % H * GROUPS + quad;
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
            if (has)
                store_vec(a.b.dqkv, out + 4 * k, unrotate8(g[k], y[r][k], turn[r][k], rstd[r], mean));
    }
}

// ---- any width: one warp a token, head by head ------------------------------------------------------------

__global__ __launch_bounds__(ROW_THREADS, 2) void heads_backward_any_kernel(Backward a, int N, int H, int e,
                                                                            float *partials,
                                                                            unsigned *counter)
{
    extern __shared__ float shared[];
    const ValueMix &m = a.f.value;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, qk = a.f.qk, width = H * qk, d = H * e;
    bool gates = m.table && m.gate_w;
    int inputs = 2 * m.gate_inputs, group = m.table && !gates ? H / m.groups : 1;
    float *sums = shared + warp * H * inputs;
    if (gates)
        clear_sums(sums, inputs, H, lane);
    for (int64_t t = blockIdx.x * ROW_WARPS + warp; t < N; t += gridDim.x * ROW_WARPS) {
        floatX *out = a.b.dqkv + t * (2 * width + d);
        RowGradient q = query_row(a, t, out, H, width), k = key_row(a, t, out + width, N, H, width);
        const floatX *u = m.table ? m.table + (int64_t)m.tokens[t] * d : NULL;
        TokenSums of_token = {};
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
            dot = warp_sum(dot);
            if (gates)
                add_gate(of_token, sums, load_gate<true>(m, t, n, u, H, d, lane), inputs, n, dot, H, lane);
            else if (u)
                add_factor(of_token, group, n, dot, H, lane);
        }
        if (gates)
            store_sums<WARP, true>(of_token, a.b, m, t, lane);
        else if (u)
            store_sums<WARP, false>(of_token, a.b, m, t, lane);
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

// bytes: of shared memory
template <int LANES, int PLANES>
static void launch(Stream s, const Backward &a, int blocks, size_t bytes, float *partials, int N, int H,
                   int e)
{
    unsigned *counter = scratch_counter(s, SCRATCH_HEADS);
    if (bytes)
        heads_backward_kernel<LANES, true, PLANES>
            <<<blocks, ROW_THREADS, bytes, s>>>(a, N, H, e, partials, counter);
    else
        heads_backward_kernel<LANES, false, PLANES>
            <<<ceil_div(N, ROW_WARPS), ROW_THREADS, 0, s>>>(a, N, H, e, NULL, NULL);
}

// What the gates' sums of a warp take, in floats.
static size_t gate_sums(const HeadsBackward *a, int H)
{
    const ValueMix *m = &a->forward->value;
    return m->table && m->gate_w ? (size_t)(H * 2 * m->gate_inputs) : 0;
}

static bool in_vectors(const HeadsBackward *a, int H, int e)
{
    return heads_in_vectors(a->forward->qk, e) && ROW_WARPS * gate_sums(a, H) * sizeof(float) < STATIC_SHARED;
}

// Whether half a warp is enough for a head.
static bool is_narrow(const HeadsForward *f, int e)
{
    return f->qk <= MAX_HEAD / 2 && e <= MAX_HEAD / 2 && !(f->value.table && f->value.groups > 16);
}

bool heads_backward_takes_sums(const HeadsBackward *a, int H, int e)
{
    int qk = a->forward->qk;
    return (qk == attention_sm90::WIDTH || qk == attention_sm90::NARROW) && in_vectors(a, H, e) &&
           is_narrow(a->forward, e);
}

static void query_backward(Stream s, const Backward &a, const DqSums &kept, int N, int H, int e)
{
    int pairs = a.f.paired ? 2 : 1, tiles = (int)ceil_div((int64_t)N * pairs, dq_accumulator::QUERIES);
    unsigned blocks = (unsigned)(tiles * (H / pairs));
    auto kernel = a.f.qk == attention_sm90::WIDTH ? query_backward_kernel<attention_sm90::WIDTH>
                                                  : query_backward_kernel<attention_sm90::NARROW>;
    kernel<<<blocks, dq_accumulator::THREADS, 0, s>>>(a, kept, N, H, e);
    CHECK_LAUNCH();
}

// kept: q's gradient, or NULL: it is a->dq
static void run(Stream s, const HeadsBackward *a, const DqSums *kept, int planes, int N, int H, int e)
{
    if (N <= 0)
        return;
    const HeadsForward *f = a->forward;
    Backward both = {*a, *f};
    size_t sums = gate_sums(a, H), bytes = ROW_WARPS * sums * sizeof(float);
    bool vectors = in_vectors(a, H, e);
    int blocks = row_blocks(N, vectors ? ctas(WARP, sums > 0) : 8); // as many as are resident
    float *partials = scratch_floats(s, SCRATCH_HEADS, (size_t)blocks * sums);
    check_groups(&f->value, "heads_backward");
    if (kept) {
        query_backward(s, both, *kept, N, H, e);
        if (planes & PLANE_K)
            launch<16, PLANE_K | PLANE_V>(s, both, blocks, bytes, partials, N, H, e);
        else if (planes & PLANE_V)
            launch<16, PLANE_V>(s, both, blocks, bytes, partials, N, H, e);
    } else if (vectors && is_narrow(f, e)) {
        launch<16, PLANES_ALL>(s, both, blocks, bytes, partials, N, H, e);
    } else if (vectors) {
        launch<32, PLANES_ALL>(s, both, blocks, bytes, partials, N, H, e);
    } else {
        CUDA_CHECK(cudaFuncSetAttribute(heads_backward_any_kernel,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        heads_backward_any_kernel<<<blocks, ROW_THREADS, bytes, s>>>(both, N, H, e, partials,
                                                                     scratch_counter(s, SCRATCH_HEADS));
    }
    CHECK_LAUNCH();
}

void heads_backward(Stream s, const HeadsBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_backward, a, N, H, e);
    run(s, a, NULL, PLANES_ALL, N, H, e);
}

void heads_backward_from_sums(Stream s, const HeadsBackward *a, const DqSums *sums, int planes, int N, int H,
                              int e)
{
    assert(heads_backward_takes_sums(a, H, e) && planes & PLANE_Q &&
           (planes & PLANE_V || !(planes & PLANE_K)));
    run(s, a, sums, planes, N, H, e);
}
