// A weight alpha w and the gradients of its two factors. Bound by memory: 4 and 10 bytes an element, of a
// matrix of 768 x 3072 9.4 and 23.6 MB, 2.2 and 5.5 us at 4.27 TB/s.
#include "llmc/cuda/device/cuda_common.cuh"

enum { THREADS = 256, CTAS = 8 /* a multiprocessor, at most */ };

// Eight elements at a time, behind `vectors` of them one.
__global__ __launch_bounds__(THREADS) void weight_scale_forward_kernel(floatX *out, const floatX *w,
                                                                       const float *alpha, int64_t n,
                                                                       int64_t vectors)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    float a = *alpha, f[8];
    for (int64_t i = thread; i < vectors; i += step) {
        unpack8(reinterpret_cast<const uint4 *>(w)[i], f);
#pragma unroll
        for (int k = 0; k < 8; k++)
            f[k] *= a;
        reinterpret_cast<uint4 *>(out)[i] = pack8(f);
    }
    for (int64_t i = 8 * vectors + thread; i < n; i += step)
        out[i] = __float2bfloat16(a * to_float(w[i]));
}

void weight_scale_forward(Stream s, floatX *out, const floatX *w, const float *alpha, int64_t n)
{
    OP_SCOPE(weight_scale_forward, n);
    if (n <= 0)
        return;
    int64_t vectors = (uintptr_t)out % 16 == 0 && (uintptr_t)w % 16 == 0 ? n / 8 : 0;
    unsigned ctas = (unsigned)min_i64(ceil_div(max_i64(vectors, n - 8 * vectors), THREADS),
                                      (int64_t)CTAS * device_state.sms);
    weight_scale_forward_kernel<<<ctas, THREADS, 0, s>>>(out, w, alpha, n, vectors);
    CHECK_LAUNCH();
}

static __device__ __forceinline__ void scale_step(float &dw, float &dot, float w, float alpha)
{
    dot += dw * w;
    dw *= alpha;
}

// Four elements at a time, behind `vectors` of them one.
__global__ __launch_bounds__(THREADS) void weight_scale_kernel(float *dw, float *dalpha, const floatX *w,
                                                               const float *alpha, int64_t n, int64_t vectors,
                                                               float *partials, unsigned *counter)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    float dot[1] = {0}, a = *alpha;
#pragma unroll 4
    for (int64_t i = thread; i < vectors; i += step) {
        float4 *at = reinterpret_cast<float4 *>(dw) + i, g = *at;
        uint2 u = w ? reinterpret_cast<const uint2 *>(w)[i] : make_uint2(0, 0);
        scale_step(g.x, dot[0], __uint_as_float(u.x << 16), a);
        scale_step(g.y, dot[0], __uint_as_float(u.x & 0xffff0000u), a);
        scale_step(g.z, dot[0], __uint_as_float(u.y << 16), a);
        scale_step(g.w, dot[0], __uint_as_float(u.y & 0xffff0000u), a);
        *at = g;
    }
    for (int64_t i = 4 * vectors + thread; i < n; i += step)
        scale_step(dw[i], dot[0], w ? to_float(w[i]) : 0, a);
    if (dalpha)
        grid_accumulate<1>(dalpha, dot, partials, counter);
}

void weight_scale_backward(Stream s, float *dw, float *dalpha, const floatX *w, const float *alpha, int64_t n)
{
    OP_SCOPE(weight_scale_backward, n);
    if (n <= 0)
        return;
    int64_t vectors = (uintptr_t)dw % 16 == 0 && (uintptr_t)w % 8 == 0 ? n / 4 : 0;
    int64_t most = vectors > n - 4 * vectors ? vectors : n - 4 * vectors;
    unsigned ctas = (unsigned)min_i64(ceil_div(most, THREADS), (int64_t)CTAS * device_state.sms);
    weight_scale_kernel<<<ctas, THREADS, 0, s>>>(dw, dalpha, w, alpha, n, vectors,
                                                 scratch_floats(s, SCRATCH_WEIGHT_SCALE, ctas),
                                                 scratch_counter(s, SCRATCH_WEIGHT_SCALE));
    CHECK_LAUNCH();
}
