// What the epilogues of relu^2's gradient share.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

static __device__ __forceinline__ float sqrt_approx(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x * 2 sqrt(y), of pairs of bf16. 4 y is exact; ftz: a y below 2^-128 gives 0.
static __device__ __forceinline__ uint32_t drelu2_pair(uint32_t x, uint32_t y)
{
    __nv_bfloat162 four_y = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&y), __float2bfloat162_rn(4));
    uint32_t u = *reinterpret_cast<uint32_t *>(&four_y);
    return pack2(__uint_as_float(x << 16) * sqrt_approx(__uint_as_float(u << 16)),
                 __uint_as_float(x & 0xffff0000u) * sqrt_approx(__uint_as_float(u & 0xffff0000u)));
}
