// The residual stream: mixes of streams, rms norm, and both backward. One warp a row, the whole row in
// registers.
#include "llmc/cuda/device/cuda_common.cuh"

// ---- coefficients -----------------------------------------------------------------------------------------

struct Coefficients {
    Coefficient term[MAX_COEFFICIENTS];
};

static Coefficients coefficients(const Coefficient *terms, int count)
{
    Coefficients c = {};
    assert(count <= MAX_COEFFICIENTS);
    for (int i = 0; i < count; i++)
        c.term[i] = terms[i];
    return c;
}

// The last factor of a term; its scalar, -1 when there is none, and the derivative by it.
static __device__ __forceinline__ float last_factor(const Coefficient &t, const float *scalars, int &index,
                                                    float &slope)
{
    index = t.gate < -1 ? UNGATED(t.gate) : t.gate;
    slope = index >= 0;
    if (t.gate < 0)
        return index < 0 ? 1 : scalars[index];
    float sig = sigmoid(scalars[t.gate]);
    slope = sig * (1 - sig);
    return sig;
}

__global__ void coefficients_forward_kernel(float *coef, const float *scalars, Coefficients c, int count)
{
    int i = threadIdx.x;
    if (i >= count)
        return;
    Coefficient t = c.term[i];
    int index;
    float slope, x = t.factor;
    if (t.scalar >= 0)
        x *= scalars[t.scalar];
    coef[i] = x * last_factor(t, scalars, index, slope);
}

// One thread: a few dozen terms, of which several may have one scalar.
__global__ void coefficients_backward_kernel(float *dscalars, float *dcoef, const float *scalars,
                                             Coefficients c, int count)
{
    for (int i = 0; i < count; i++) {
        Coefficient t = c.term[i];
        int index;
        float g = t.factor * dcoef[i], scalar = t.scalar >= 0 ? scalars[t.scalar] : 1, slope,
              last = last_factor(t, scalars, index, slope);
        if (t.scalar >= 0)
            dscalars[t.scalar] += g * last;
        if (index >= 0)
            dscalars[index] += g * scalar * slope;
        dcoef[i] = 0;
    }
}

void coefficients_forward(Stream s, float *coef, const float *scalars, const Coefficient *terms, int count)
{
    OP_SCOPE(coefficients_forward);
    coefficients_forward_kernel<<<1, MAX_COEFFICIENTS, 0, s>>>(coef, scalars, coefficients(terms, count),
                                                               count);
    CHECK_LAUNCH();
}

void coefficients_backward(Stream s, float *dscalars, float *dcoef, const float *scalars,
                           const Coefficient *terms, int count)
{
    OP_SCOPE(coefficients_backward);
    coefficients_backward_kernel<<<1, 1, 0, s>>>(dscalars, dcoef, scalars, coefficients(terms, count), count);
    CHECK_LAUNCH();
}

// ---- forward ----------------------------------------------------------------------------------------------

// x_out and x0 may be NULL: then this is the plain norm of x.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void mix_rmsnorm_kernel(floatX *x_out, floatX *h, float *rstd,
                                                                  const floatX *x, const floatX *x0,
                                                                  const floatX *skip, const float *coef,
                                                                  int N, int d)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (row >= N)
        return;
    int64_t at = (int64_t)row * d;
    uint4 ux[VPL], u0[VPL], us[VPL];
    load_row(ux, x + at, vectors, lane);
    if (x0)
        load_row(u0, x0 + at, vectors, lane);
    if (skip)
        load_row(us, skip + at, vectors, lane);
    float c0 = x0 ? coef[0] : 1, c1 = x0 ? coef[1] : 0, c2 = skip ? coef[2] : 0;
    float y[VPL][8], sum = 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float a[8], b[8], c[8];
        unpack8(ux[i], a);
        if (x0)
            unpack8(u0[i], b);
        if (skip)
            unpack8(us[i], c);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float v = x0 ? c0 * a[k] + c1 * b[k] : a[k];
            if (skip)
                v += c2 * c[k];
            y[i][k] = v;
            sum += v * v;
        }
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)d + RMS_EPS);
    if (lane == 0)
        rstd[row] = r;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        if (lane + WARP * i >= vectors)
            continue;
        if (x_out)
            store_vec(x_out + at, lane + WARP * i, pack8(y[i]));
#pragma unroll
        for (int k = 0; k < 8; k++)
            y[i][k] *= r;
        store_vec(h + at, lane + WARP * i, pack8(y[i]));
    }
}

void mix_rmsnorm_forward(Stream s, const MixForward *a, int N, int d)
{
    OP_SCOPE(mix_rmsnorm_forward, a->x_out, a->skip, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d,
                   (mix_rmsnorm_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(a->x_out, a->h, a->rstd, a->x,
                                                                           a->x0, a->skip, a->coef, N, d)));
}

void rmsnorm_forward(Stream s, floatX *h, float *rstd, const floatX *x, int N, int d)
{
    OP_SCOPE(rmsnorm_forward, N, d);
    MixForward a = {.h = h, .rstd = rstd, .x = x};
    mix_rmsnorm_forward(s, &a, N, d);
}

// ---- backward ---------------------------------------------------------------------------------------------

// dh[:, 0:inputs] += dgate gate_w, the part of dh that came through the attention gates. `inputs` lanes
// compute one element each and hand them to lanes 0 and 1, which hold the row's first 16 elements.
static __device__ __forceinline__ void add_gate_gradient(float (&dh)[8], const float *dgate,
                                                         const MixBackward &a, int lane)
{
    int inputs = a.gate_inputs;
    float mine = 0;
    if (lane < inputs)
        for (int h = 0; h < a.heads; h++)
            mine += dgate[h] * to_float(a.gate_w[inputs * h + lane]);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float got = __shfl_sync(0xffffffffu, mine, (lane & 1) * 8 + k);
        if (lane < 2)
            dh[k] += got;
    }
}

// All streams of a row are loaded before the first is used. h is not among them: it follows from x, x0 and
// skip, which are loaded for dcoef anyway.
template <int VPL> struct MixRow {
    uint4 dh[VPL], x[VPL], x0[VPL], skip[VPL], dx_out[VPL], dx0[VPL];
};

template <int VPL>
static __device__ __forceinline__ void mix_load(MixRow<VPL> &u, const MixBackward &a, int64_t at, int vectors,
                                                int lane)
{
    load_row(u.dh, a.dh + at, vectors, lane);
    load_row(u.x, a.x + at, vectors, lane);
    load_row(u.x0, a.x0 + at, vectors, lane);
    if (a.skip)
        load_row(u.skip, a.skip + at, vectors, lane);
    if (a.dx_out)
        load_row(u.dx_out, a.dx_out + at, vectors, lane);
    if (a.accumulate_dx0)
        load_row(u.dx0, a.dx0 + at, vectors, lane);
}

// h of vector i of the row, before its rounding: rstd (coef[0] x + coef[1] x0 + coef[2] skip).
template <int VPL>
static __device__ __forceinline__ void mixed_norm(float (&h)[8], const MixRow<VPL> &u, int i,
                                                  const float (&coef)[3], float rstd, bool with_skip)
{
    float x[8], x0[8], skip[8];
    unpack8(u.x[i], x);
    unpack8(u.x0[i], x0);
    if (with_skip)
        unpack8(u.skip[i], skip);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float v = coef[0] * x[k] + coef[1] * x0[k];
        if (with_skip)
            v += coef[2] * skip[k];
        h[k] = rstd * v;
    }
}

// Vector v of the row, of which g is the gradient: what goes to skip, x0 and x, in this order, because dx_add
// may be dskip.
static __device__ __forceinline__ void mix_scatter(const MixBackward &a, int64_t at, int v,
                                                   const float (&g)[8], uint4 x, uint4 x0, uint4 skip,
                                                   uint4 dx0, const float (&coef)[3], float (&sums)[3])
{
    float t[8], out[8];
    if (a.skip) {
        unpack8(skip, t);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            sums[2] += g[k] * t[k];
            out[k] = coef[2] * g[k];
        }
        store_vec(a.dskip + at, v, pack8(out));
    }
    unpack8(x0, t);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        sums[1] += g[k] * t[k];
        out[k] = coef[1] * g[k];
    }
    if (a.accumulate_dx0) {
        unpack8(dx0, t);
#pragma unroll
        for (int k = 0; k < 8; k++)
            out[k] += t[k];
    }
    store_vec(a.dx0 + at, v, pack8(out));
    unpack8(x, t);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        sums[0] += g[k] * t[k];
        out[k] = coef[0] * g[k];
    }
    if (a.dx_add) {
        unpack8(load_vec(a.dx_add + at, v), t);
#pragma unroll
        for (int k = 0; k < 8; k++)
            out[k] += t[k];
    }
    store_vec(a.dx + at, v, pack8(out));
}

template <int VPL>
static __device__ __forceinline__ void mix_backward_row(const MixBackward &a, int row, int d, int lane,
                                                        const float (&coef)[3], float (&sums)[3])
{
    int vectors = d / 8;
    int64_t at = (int64_t)row * d;
    MixRow<VPL> u;
    mix_load(u, a, at, vectors, lane);
    float h[8], gate[8], r = a.rstd[row], dot = 0; // gate: what the gates add to the row's first elements
#pragma unroll
    for (int k = 0; k < 8; k++)
        gate[k] = 0;
    if (a.dgate)
        add_gate_gradient(gate, a.dgate + (int64_t)row * a.heads, a, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float dh[8];
        unpack8(u.dh[i], dh);
        mixed_norm(h, u, i, coef, r, a.skip);
#pragma unroll
        for (int k = 0; k < 8; k++)
            dot += (i ? dh[k] : dh[k] + gate[k]) * h[k];
    }
    dot = warp_sum(dot) / (float)d;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        if (v >= vectors)
            continue;
        float g[8];
        unpack8(u.dh[i], g);
        mixed_norm(h, u, i, coef, r, a.skip);
#pragma unroll
        for (int k = 0; k < 8; k++)
            g[k] = r * ((i ? g[k] : g[k] + gate[k]) - h[k] * dot);
        if (a.dx_out) {
            unpack8(u.dx_out[i], h);
#pragma unroll
            for (int k = 0; k < 8; k++)
                g[k] += h[k];
        }
        mix_scatter(a, at, v, g, u.x[i], u.x0[i], u.skip[i], u.dx0[i], coef, sums);
    }
}

// CTAs of a multiprocessor that are launched (see grad_ctas in stream_grads.cu).
static constexpr int mix_ctas(int vpl) { return vpl <= 3 ? 2 : 1; }

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS, mix_ctas(VPL)) void mix_rmsnorm_backward_kernel(MixBackward a,
                                                                                          int N, int d,
                                                                                          float *partials,
                                                                                          unsigned *counter)
{
    int lane = threadIdx.x % WARP;
    const float coef[3] = {a.coef[0], a.coef[1], a.coef[2]};
    float sums[3] = {0, 0, 0};
    for (int row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; row < N; row += gridDim.x * ROW_WARPS)
        mix_backward_row<VPL>(a, row, d, lane, coef, sums);
    grid_accumulate<3>(a.dcoef, sums, partials, counter);
}

template <int VPL> static void mix_backward(Stream s, const MixBackward *a, int N, int d)
{
    int blocks = row_blocks(N, mix_ctas(VPL));
    float *partials = scratch_floats(s, SCRATCH_MIX, (size_t)blocks * 3);
    mix_rmsnorm_backward_kernel<VPL>
        <<<blocks, ROW_THREADS, 0, s>>>(*a, N, d, partials, scratch_counter(s, SCRATCH_MIX));
}

void mix_rmsnorm_backward(Stream s, const MixBackward *a, int N, int d)
{
    OP_SCOPE(mix_rmsnorm_backward, a, N, d);
    if (N > 0)
        DISPATCH_WIDTH(d, mix_backward<VPL>(s, a, N, d));
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void rmsnorm_backward_kernel(floatX *dx, const floatX *dh,
                                                                       const floatX *h, const float *rstd,
                                                                       int N, int d)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (row >= N)
        return;
    int64_t at = (int64_t)row * d;
    uint4 udh[VPL], uh[VPL], udx[VPL];
    load_row(udh, dh + at, vectors, lane);
    load_row(uh, h + at, vectors, lane);
    load_row(udx, dx + at, vectors, lane);
    float r = rstd[row], dot = 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float p[8], q[8];
        unpack8(udh[i], p);
        unpack8(uh[i], q);
#pragma unroll
        for (int k = 0; k < 8; k++)
            dot += p[k] * q[k];
    }
    dot = warp_sum(dot) / (float)d;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float p[8], q[8], out[8];
        unpack8(udh[i], p);
        unpack8(uh[i], q);
        unpack8(udx[i], out);
#pragma unroll
        for (int k = 0; k < 8; k++)
            out[k] += r * (p[k] - q[k] * dot);
        udx[i] = pack8(out);
    }
    store_row(dx + at, udx, vectors, lane);
}

void rmsnorm_backward(Stream s, floatX *dx, const floatX *dh, const floatX *h, const float *rstd, int N,
                      int d)
{
    OP_SCOPE(rmsnorm_backward, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d, (rmsnorm_backward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(dx, dh, h, rstd, N, d)));
}
