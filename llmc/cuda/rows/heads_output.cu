// Heads of the records of 2026 after attention: XSA, which takes the share of a token's own value out of what
// attention gives, and the gate. Both directions.
//
// A thread has 16-byte vectors of a head, one forward and VECTORS backward, a power of two of neighbouring
// lanes a head (of which some idle when its width is no power of two). All sums of a head are made at once.
// Bytes a token at d = 768, at 4.27 TB/s: forward y, v, out 4608 (18 us for 16384 tokens), backward y, v,
// dout, dy, dv 7680 (29 us); without alpha 3072 and 4608.
#include "llmc/cuda/rows/heads.cuh"

namespace
{

enum { THREADS = 256, CTAS = 3, VECTORS = 2 }; // backward: of a multiprocessor; of a thread
const float XSA_FLOOR = 1e-8f;

// The thread's head of all tokens' and its first vector of it.
struct HeadVector {
    int64_t at; // that vector's first element
    int t, n, j;
    bool head; // there is one (threads without take part in sums)
};

__device__ __forceinline__ HeadVector head_vector(int N, int H, int e, int lanes)
{
    unsigned id = blockIdx.x * THREADS + threadIdx.x, head = id >> __ffs(lanes) - 1; // no 64-bit divisions
    int j = (int)id & (lanes - 1);
    return {(int64_t)head * e + 8 * j, (int)(head / (unsigned)H), (int)(head % (unsigned)H), j,
            head < (unsigned)(N * H)};
}

// Sums over the lanes of a head, all at once.
template <int COUNT> __device__ __forceinline__ void head_sums(float (&x)[COUNT], int lanes)
{
    for (int step = lanes / 2; step; step >>= 1)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] += __shfl_xor_sync(WHOLE_WARP, x[i], step);
}

// tanh(alpha) and 1 / max(v . v, floor) of a head.
struct Xsa {
    float share, inverse;
    bool floored;
};

__device__ __forceinline__ Xsa xsa_of(float alpha, float square)
{
    bool floored = square <= XSA_FLOOR;
    return {tanhf(alpha), 1 / (floored ? XSA_FLOOR : square), floored};
}

// 0 where there is none.
__device__ __forceinline__ float alpha_of(const HeadsOutput &a, const HeadVector &p)
{
    return a.alpha && p.head ? a.alpha[(int64_t)p.t * a.alpha_stride + p.n] : 0;
}

__device__ __forceinline__ float gate_of(const HeadsOutput &a, const HeadVector &p)
{
    return a.gate && p.head ? a.gate[(int64_t)p.t * a.gate_stride + p.n] : 1;
}

__global__ __launch_bounds__(THREADS) void heads_output_forward_kernel(HeadsOutput a, int N, int H, int e,
                                                                       int lanes)
{
    HeadVector p = head_vector(N, H, e, lanes);
    bool has = p.head && 8 * p.j < e;
    float y[8], v[8], gate = gate_of(a, p), alpha = alpha_of(a, p), along = 0;
    unpack8(vector_or_zero(a.y + p.at, 0, has), y);
    if (a.alpha) {
        unpack8(vector_or_zero(a.v + p.at, 0, has), v);
        float sums[2] = {dot8(y, v), dot8(v, v)};
        head_sums(sums, lanes);
        Xsa x = xsa_of(alpha, sums[1]);
        along = x.share * sums[0] * x.inverse;
    }
    if (!has)
        return;
#pragma unroll
    for (int k = 0; k < 8; k++)
        y[k] = gate * (a.alpha ? y[k] - along * v[k] : y[k]);
    store_vec(a.out + p.at, 0, pack8(y));
}

struct Backward {
    HeadsOutputBackward b; // without `forward`
    HeadsOutput f;
};

// The thread's vectors of y, v and dout.
struct Vectors {
    uint4 y[VECTORS], v[VECTORS], g[VECTORS];
    bool has[VECTORS];
};

__device__ __forceinline__ Vectors load_vectors(const Backward &a, const HeadVector &p, int e, int lanes)
{
    Vectors x;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        x.has[i] = p.head && 8 * (p.j + lanes * i) < e;
        x.g[i] = vector_or_zero(a.b.dout + p.at, lanes * i, x.has[i]);
        x.y[i] = vector_or_zero(a.f.y + p.at, lanes * i, x.has[i] && (a.f.alpha || a.f.gate || a.b.delta));
        x.v[i] = vector_or_zero(a.f.v + p.at, lanes * i, x.has[i] && a.f.alpha);
    }
    return x;
}

// With u = y.v / |v|^2, w = g.v / |v|^2, share = tanh(alpha), and g the gradient of y - share u v:
//   dy = g - share w v,  dv = -share (u g + w y - 2 u w v),  dalpha = -(1 - share^2) (y.v) w.
// delta is dy.y of the rounded dy, which attention's backward takes.
__global__ __launch_bounds__(THREADS,
                             CTAS) void heads_output_backward_kernel(const __grid_constant__ Backward a,
                                                                     int N, int H, int e, int lanes)
{
    HeadVector p = head_vector(N, H, e, lanes);
    float gate = gate_of(a.f, p), alpha = alpha_of(a.f, p), y[8], v[8], g[8], sums[4] = {}, delta[1] = {};
    Vectors of = load_vectors(a, p, e, lanes);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        unpack8(of.y[i], y);
        unpack8(of.v[i], v);
        unpack8(of.g[i], g);
        sums[0] += dot8(g, y);
        sums[1] += dot8(v, v);
        sums[2] += dot8(y, v);
        sums[3] += dot8(g, v);
    }
    head_sums(sums, lanes);
    Xsa x = xsa_of(alpha, sums[1]);
    float along = sums[2] * x.inverse, back = gate * sums[3] * x.inverse,
          shrink = x.floored ? 0 : 2 * along * back;
    if (p.head && p.j == 0 && a.f.alpha)
        a.b.dalpha[(int64_t)p.t * a.f.alpha_stride + p.n] = -(1 - x.share * x.share) * sums[2] * back;
    if (p.head && p.j == 0 && a.f.gate)
        a.b.dgate[(int64_t)p.t * a.f.gate_stride + p.n] = sums[0] - x.share * along * sums[3];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        float dv[8];
        unpack8(of.y[i], y);
        unpack8(of.v[i], v);
        unpack8(of.g[i], g);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            g[k] *= gate;
            dv[k] = -x.share * (along * g[k] + back * y[k] - shrink * v[k]);
            g[k] -= x.share * back * v[k];
        }
        uint4 dy = pack8(g);
        unpack8(dy, g);
        delta[0] += dot8(g, y);
        if (of.has[i] && a.f.alpha)
            store_vec(a.b.dv + p.at, lanes * i, pack8(dv));
        if (of.has[i])
            store_vec(a.b.dy + p.at, lanes * i, dy);
    }
    if (!a.b.delta)
        return;
    head_sums(delta, lanes);
    if (p.head && p.j == 0)
        a.b.delta[(int64_t)p.t * H + p.n] = delta[0];
}

void check_width(int e, const char *op)
{
    if (e % 8 || e > MAX_HEAD)
        fatal(EXIT_BAD_INPUT, "%s: heads of width %d; the CUDA kernel takes multiples of 8 up to %d", op, e,
              MAX_HEAD);
}

} // namespace

void heads_output_forward(Stream s, const HeadsOutput *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_forward, a, N, H, e);
    if (N <= 0)
        return;
    check_width(e, "heads_output_forward");
    int lanes = head_lanes(e);
    unsigned blocks = (unsigned)ceil_div((int64_t)N * H * lanes, THREADS);
    heads_output_forward_kernel<<<blocks, THREADS, 0, s>>>(*a, N, H, e, lanes);
    CHECK_LAUNCH();
}

void heads_output_backward(Stream s, const HeadsOutputBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_backward, a, N, H, e);
    if (N <= 0)
        return;
    check_width(e, "heads_output_backward");
    Backward both = {*a, *a->forward};
    int lanes = (int)ceil_div(head_lanes(e), VECTORS);
    unsigned blocks = (unsigned)ceil_div((int64_t)N * H * lanes, THREADS);
    heads_output_backward_kernel<<<blocks, THREADS, 0, s>>>(both, N, H, e, lanes);
    CHECK_LAUNCH();
}
