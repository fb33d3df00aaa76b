// The attention gate of a token and head, for the kernels that apply it.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

enum { GATE_WIDTH = 12 };

// Before the sigmoid, by one thread.  h: the token's row of attention's input; w: the head's row of gate_w
// (H, 12)
static __device__ __forceinline__ float gate_input(const floatX *h, const floatX *w)
{
    float x = 0;
#pragma unroll
    for (int j = 0; j < GATE_WIDTH; j++)
        x += to_float(h[j]) * to_float(w[j]);
    return x;
}
