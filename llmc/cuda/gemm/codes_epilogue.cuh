// Epilogue of a product whose results are kept as e4m3 codes: relu^2 and its gradient, a vector of eight
// products, rounded to bf16, a thread. For the kernels that run on any GPU; those of sm90_fp8_codes.cu have
// an epilogue of their own.
#pragma once
#include "llmc/cuda/gemm/fp8_codes.cuh"

// Result (N, out); device memory of the caller. See llmc/ops/mlp.h and llmc/ops/fp8.h.
struct CodesEpilogue {
    CodesKind kind;
    floatX *y;          // RELU2_KEPT
    uint8_t *codes;     // out
    const float *scale; // (1) of the codes
    float *amax;        // (1) in/out, or NULL
    const uint8_t *y8;  // GRADIENT: codes of y
    const float *scale_y;
};

// Of the rows from element `at` on.
static inline CodesEpilogue codes_from(const CodesEpilogue *whole, int64_t at)
{
    CodesEpilogue e = *whole;
    e.y = e.y ? e.y + at : NULL;
    e.codes += at;
    e.y8 = e.y8 ? e.y8 + at : NULL;
    return e;
}

struct CodesFactors {
    Reciprocal inverse; // of the codes' scale
    float scale_y;
};

template <CodesKind KIND> static __device__ __forceinline__ CodesFactors codes_factors(const CodesEpilogue &e)
{
    return {KIND == RELU2_KEPT ? rounded_reciprocal(*e.scale) : reciprocal(*e.scale),
            KIND == GRADIENT ? *e.scale_y : 0};
}

// Codes of y that a gradient needs, of vector v.
template <CodesKind KIND>
static __device__ __forceinline__ uint2 codes_of_y(const CodesEpilogue &e, int64_t v)
{
    return KIND == GRADIENT ? reinterpret_cast<const uint2 *>(e.y8)[v] : make_uint2(0, 0);
}

// Stores vector v. Returns the bits of the largest magnitude, for amax_bits.
template <CodesKind KIND>
static __device__ __forceinline__ uint32_t store_codes(const CodesEpilogue &e, const CodesFactors &factors,
                                                       uint4 products, uint2 y8, int64_t v)
{
    const uint32_t y[2] = {y8.x, y8.y};
    float f[8];
    unpack8(products, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (KIND == GRADIENT)
            f[k] *= 2 * to_bf16(__fsqrt_rn(e4m3_value(y[k / 4] >> 8 * (k % 4) & 0xff) * factors.scale_y));
        else
            f[k] = f[k] > 0 ? f[k] * f[k] : f[k] <= 0 ? 0 : f[k]; // NaN stays
    uint4 rounded = pack8(f);
    if (KIND == RELU2_KEPT)
        reinterpret_cast<uint4 *>(e.y)[v] = rounded;
    unpack8(rounded, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = KIND == RELU2_KEPT ? f[k] * factors.inverse.most : quotient(f[k], factors.inverse);
    reinterpret_cast<uint2 *>(e.codes)[v] =
        make_uint2(encode4(f[0], f[1], f[2], f[3], __NV_E4M3), encode4(f[4], f[5], f[6], f[7], __NV_E4M3));
    return amax_of(rounded);
}
