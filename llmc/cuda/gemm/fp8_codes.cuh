// Arithmetic of scales and codes, as kernels of FP8 products share it.
#pragma once
#include "llmc/cuda/head/fp8.cuh"

static __device__ __forceinline__ float to_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }

static __device__ __forceinline__ float e4m3_value(uint32_t code)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3)));
}

// The factor of an FP8 product's sums; alpha NULL: 1.
static __device__ __forceinline__ float product_scale(const float *scale_x, const float *scale_w,
                                                      const float *alpha)
{
    return *scale_x * (alpha ? *scale_w * *alpha : *scale_w);
}

// x / scale as fp32 rounds it: x times the rounded reciprocal, and a step of Newton's with the exact
// remainder (Markstein). The product alone puts ties of codes on the wrong side. Quotients far beyond the
// codes are cut: the remainder of an infinite one would be NaN. -0 keeps its sign, for which there is a code.
static __device__ __forceinline__ float quotient(float x, float scale, float inverse)
{
    const float beyond = 1 << 20;
    float q = fminf(fmaxf(x * inverse, -beyond), beyond);
    return copysignf(fmaf(fmaf(-q, scale, x), inverse, q), x);
}
