// Heads of the records of 2026 after attention: XSA, which takes the share of a token's own value out of what
// attention gives, and the gate. Both directions.
//
// A thread has a 16-byte vector, a power of two of neighbouring lanes a head (of which some idle when its
// width is no power of two). All sums of a head are made at once.
// Bytes a token at d = 768, at 4.27 TB/s: forward y, v, out 4608 (18 us for 16384 tokens), backward y, v,
// dout, dy, dv 7680 (29 us); without alpha 3072 and 4608.
#include "llmc/cuda/rows/heads.cuh"

namespace
{

enum { THREADS = 256, MAX_HEAD = 8 * WARP };
const float XSA_FLOOR = 1e-8f;
const unsigned WHOLE_WARP = 0xffffffffu;

// The thread's head of all tokens' and its vector of it.
struct Place {
    int64_t at; // the vector's first element
    int t, n;
    bool has, first; // has: there is one (threads without take part in sums); first: of its head
};

__device__ __forceinline__ Place place_of(int N, int H, int e, int lanes)
{
    unsigned id = blockIdx.x * THREADS + threadIdx.x, head = id >> __ffs(lanes) - 1; // no 64-bit divisions
    int j = (int)id & (lanes - 1);
    bool has = head < (unsigned)(N * H) && 8 * j < e;
    return {(int64_t)head * e + 8 * j, (int)(head / (unsigned)H), (int)(head % (unsigned)H), has, j == 0};
}

__device__ __forceinline__ void load_or_zero(float (&x)[8], const floatX *from, const Place &p)
{
    unpack8(p.has ? load_vec(from + p.at, 0) : make_uint4(0, 0, 0, 0), x);
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

__device__ __forceinline__ Xsa xsa_of(const HeadsOutput &a, const Place &p, float square)
{
    bool floored = square <= XSA_FLOOR;
    float alpha = p.has ? a.alpha[(int64_t)p.t * a.alpha_stride + p.n] : 0;
    return {tanhf(alpha), 1 / (floored ? XSA_FLOOR : square), floored};
}

__device__ __forceinline__ float gate_of(const HeadsOutput &a, const Place &p)
{
    return a.gate && p.has ? a.gate[(int64_t)p.t * a.gate_stride + p.n] : 1;
}

__global__ __launch_bounds__(THREADS) void heads_output_forward_kernel(HeadsOutput a, int N, int H, int e,
                                                                       int lanes)
{
    Place p = place_of(N, H, e, lanes);
    float y[8], v[8], gate = gate_of(a, p), along = 0;
    load_or_zero(y, a.y, p);
    if (a.alpha) {
        load_or_zero(v, a.v, p);
        float sums[2] = {dot8(y, v), dot8(v, v)};
        head_sums(sums, lanes);
        Xsa x = xsa_of(a, p, sums[1]);
        along = x.share * sums[0] * x.inverse;
    }
    if (!p.has)
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

// With u = y.v / |v|^2, w = g.v / |v|^2, share = tanh(alpha), and g the gradient of y - share u v:
//   dy = g - share w v,  dv = -share (u g + w y - 2 u w v),  dalpha = -(1 - share^2) (y.v) w.
__global__ __launch_bounds__(THREADS) void heads_output_backward_kernel(Backward a, int N, int H, int e,
                                                                        int lanes)
{
    Place p = place_of(N, H, e, lanes);
    float y[8] = {}, v[8] = {}, g[8], gate = gate_of(a.f, p);
    load_or_zero(g, a.b.dout, p);
    if (a.f.alpha || a.f.gate)
        load_or_zero(y, a.f.y, p);
    if (a.f.alpha)
        load_or_zero(v, a.f.v, p);
    float sums[4] = {dot8(g, y), dot8(v, v), dot8(y, v), dot8(g, v)};
    head_sums(sums, lanes);
    float dgate = sums[0], square = sums[1], yv = sums[2], gv = sums[3];
    bool first = p.has && p.first;
#pragma unroll
    for (int k = 0; k < 8; k++)
        g[k] *= gate;
    if (a.f.alpha) {
        Xsa x = xsa_of(a.f, p, square);
        float along = yv * x.inverse, back = gate * gv * x.inverse, shrink = x.floored ? 0 : 2 * along * back,
              dv[8];
        dgate -= x.share * along * gv;
        if (first)
            a.b.dalpha[(int64_t)p.t * a.f.alpha_stride + p.n] = -(1 - x.share * x.share) * yv * back;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            dv[k] = -x.share * (along * g[k] + back * y[k] - shrink * v[k]);
            g[k] -= x.share * back * v[k];
        }
        if (p.has)
            store_vec(a.b.dv + p.at, 0, pack8(dv));
    }
    if (a.f.gate && first)
        a.b.dgate[(int64_t)p.t * a.f.gate_stride + p.n] = dgate;
    if (p.has)
        store_vec(a.b.dy + p.at, 0, pack8(g));
}

unsigned blocks_for(int N, int H, int e, const char *op)
{
    if (e % 8 || e > MAX_HEAD)
        fatal(EXIT_BAD_INPUT, "%s: heads of width %d; the CUDA kernel takes multiples of 8 up to %d", op, e,
              MAX_HEAD);
    return (unsigned)ceil_div((int64_t)N * H * head_lanes(e), THREADS);
}

} // namespace

void heads_output_forward(Stream s, const HeadsOutput *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_forward, a, N, H, e);
    if (N <= 0)
        return;
    unsigned blocks = blocks_for(N, H, e, "heads_output_forward");
    heads_output_forward_kernel<<<blocks, THREADS, 0, s>>>(*a, N, H, e, head_lanes(e));
    CHECK_LAUNCH();
}

void heads_output_backward(Stream s, const HeadsOutputBackward *a, int N, int H, int e)
{
    OP_SCOPE(heads_output_backward, a, N, H, e);
    if (N <= 0)
        return;
    Backward both = {*a, *a->forward};
    unsigned blocks = blocks_for(N, H, e, "heads_output_backward");
    heads_output_backward_kernel<<<blocks, THREADS, 0, s>>>(both, N, H, e, head_lanes(e));
    CHECK_LAUNCH();
}
