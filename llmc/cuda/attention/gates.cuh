// The attention gate of a token and head, for the kernels that apply it; sums of the gates' gradients.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/ops/embedding.h"

// Before the sigmoid, by one thread.  h: the token's row of attention's input; w: the head's row of gate_w
// (H, inputs)
static __device__ __forceinline__ float gate_input(const floatX *h, const floatX *w, int inputs)
{
    float x = 0;
#pragma unroll
    for (int j = 0; j < MAX_GATE_INPUTS; j++) // unrolled: all loads are under way before the first is used
        if (j < inputs)
            x += to_float(h[j]) * to_float(w[j]);
    return x;
}

// dgate_w += the warps' sums in `shared` (warps, pairs), in order; the last CTA adds the partial sums of all
// CTAs.
static __device__ __forceinline__ void add_gate_sums(float *dgate_w, float *shared, int pairs,
                                                     float *partials, unsigned *counter)
{
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
        float x = 0;
        for (int w = 0; w < warps; w++)
            x += shared[w * pairs + p];
        partials[(int64_t)blockIdx.x * pairs + p] = x;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    for (int p = lane; p < pairs; p += WARP) {
        float x = 0, got[8];
        for (int b = warp; b < gridDim.x; b += 8 * warps) {
#pragma unroll
            for (int i = 0; i < 8; i++) // all under way before the first is added
                got[i] =
                    b + i * warps < gridDim.x ? __ldcg(partials + (int64_t)(b + i * warps) * pairs + p) : 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                x += got[i];
        }
        shared[warp * pairs + p] = x;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) {
        float x = 0;
        for (int w = 0; w < warps; w++)
            x += shared[w * pairs + p];
        dgate_w[p] += x;
    }
}
