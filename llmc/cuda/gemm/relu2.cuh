// What the epilogues of relu^2's gradient share.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

// x * 2 sqrt(y), of pairs of bf16. 4 y is exact; ftz: a y below 2^-128 gives 0.
static __device__ __forceinline__ uint32_t drelu2_pair(uint32_t x, uint32_t y)
{
    __nv_bfloat162 four_y = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&y), __float2bfloat162_rn(4));
    uint32_t u = *reinterpret_cast<uint32_t *>(&four_y);
    return pack2(__uint_as_float(x << 16) * sm80::sqrt_approx(__uint_as_float(u << 16)),
                 __uint_as_float(x & 0xffff0000u) * sm80::sqrt_approx(__uint_as_float(u & 0xffff0000u)));
}
