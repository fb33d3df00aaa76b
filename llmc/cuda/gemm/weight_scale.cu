// Gradients of the two factors of a weight alpha w. One pass, bound by memory: 10 bytes an element, of a
// matrix of 768 x 3072 23.6 MB, 5.5 us at 4.27 TB/s.
#include "llmc/cuda/device/cuda_common.cuh"

enum { THREADS = 256, CTAS = 8 /* a multiprocessor, at most */ };

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
        uint2 u = reinterpret_cast<const uint2 *>(w)[i];
        scale_step(g.x, dot[0], __uint_as_float(u.x << 16), a);
        scale_step(g.y, dot[0], __uint_as_float(u.x & 0xffff0000u), a);
        scale_step(g.z, dot[0], __uint_as_float(u.y << 16), a);
        scale_step(g.w, dot[0], __uint_as_float(u.y & 0xffff0000u), a);
        *at = g;
    }
    for (int64_t i = 4 * vectors + thread; i < n; i += step)
        scale_step(dw[i], dot[0], to_float(w[i]), a);
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
