// Arithmetic of scales and codes, as kernels of FP8 products share it.
#pragma once
#include "llmc/cuda/head/fp8.cuh"
#include "llmc/ops/fp8.h"

// What is kept of a product as codes: relu^2, in bf16 too or as codes alone; the gradient before it.
typedef enum { RELU2_KEPT, RELU2, GRADIENT } CodesKind;

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

// 1 / scale as a sum, within 2^-46 of it. The first part is rounded towards zero, so that the second is
// positive: of an infinite x both products have one sign.
struct Reciprocal {
    float most, rest;
};
static __device__ __forceinline__ Reciprocal reciprocal(float scale)
{
    float most = __frcp_rz(scale), rest = fmaf(-scale, most, 1) * most;
    return {most, fmaxf(rest, most * 0x1p-60f)};
}

// The rounded reciprocal alone, for the rules that multiply by it.
static __device__ __forceinline__ Reciprocal rounded_reciprocal(float scale) { return {__frcp_rn(scale), 0}; }

// x / scale as fp32 rounds it, but for quotients within 2^-46 of the middle between two numbers, none of
// which is a tie of codes. The product with the rounded reciprocal puts ties on the wrong side. -0 keeps its
// sign, for which there is a code.
static __device__ __forceinline__ float quotient(float x, Reciprocal r)
{
    return fmaf(x, r.most, x * r.rest);
}
