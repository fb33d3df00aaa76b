// What the CUDA files of the Newton-Schulz primitives share.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/muon/ns_gpu.h"
#include "llmc/ops/ns_ops.h"

// A batch of products out = alpha a b + beta d, in the three forms that the primitives need.
enum ProductForm {
    PRODUCT_GRAM,      // b = a^T, the result symmetric: lower triangle computed, mirrored
    PRODUCT_SYMMETRIC, // b is a symmetric matrix and so is the result: read by rows, like a; lower triangle
                       // computed, mirrored
    PRODUCT_FULL       // b as stored
};

// All pitches and strides in elements. a (rows, depth); b (rows, depth) in the symmetric forms, else (depth,
// cols); d and out are (rows, cols)
struct NsProduct {
    const void *a, *b, *d; // d may be NULL
    void *out;
    int64_t a_stride, b_stride, d_stride, out_stride; // from one matrix of the batch to the next
    int a_pitch, b_pitch, d_pitch, out_pitch;
    int rows, cols, depth, batch;
    float alpha, beta;
    const float *scale; // (batch, rows), PRODUCT_SYMMETRIC only, may be NULL: then (out + diagonal I)
                        // diag(scale) factor
    float factor, diagonal;
};

// Any shape and alignment, packed. out_dtype differs from dtype in PRODUCT_GRAM only.
void ns_portable_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype,
                         const NsProduct &p);
// Larger 16-bit matrices whose rows begin on 16 bytes: false for others, nothing is done then.
bool ns_pipelined_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype,
                          const NsProduct &p);
void ns_portable_aol(NsChain *chain, float *scale, void *a, const float *raw, const float *unit, float gain,
                     int n);
// q = z + a I; q may be z
void ns_add_diagonal(cudaStream_t s, NsDtype dtype, void *q, const void *z, float a, int n, int batch);

// Scratch of the sums of squares: NS_PARTIALS fp32 partial sums, and behind them as many counters.
enum { NS_PARTIALS = 1 << 17, NS_NORM_BYTES = NS_PARTIALS * (sizeof(float) + sizeof(unsigned)) };

template <typename T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

// Finite values beyond the range of T become its largest. Those here overflow fp16 only.
template <typename T> static __device__ __forceinline__ float saturated(float x) { return x; }
template <> __device__ __forceinline__ float saturated<__half>(float x)
{
    return fabsf(x) == INFINITY ? x
           : x > 65504.0f       ? 65504.0f
           : x < -65504.0f      ? -65504.0f
                                : x; // and a NaN stays
}

// Position t of the lower triangle, counted row by row: (0,0) (1,0) (1,1) (2,0) ...
static __device__ __forceinline__ void triangle_position(int t, int &row, int &col)
{
    row = (int)((sqrtf(8.0f * (float)t + 1.0f) - 1.0f) * 0.5f);
    while ((int64_t)(row + 1) * (row + 2) / 2 <= t)
        row++; // the square root may be off by one
    while ((int64_t)row * (row + 1) / 2 > t)
        row--;
    col = t - (int)((int64_t)row * (row + 1) / 2);
}

// Calls `call` with the C++ type T of an NsDtype.
#define DISPATCH_DTYPE(dtype, ...) \
    do { \
        if ((dtype) == NS_BF16) { \
            using T = __nv_bfloat16; \
            __VA_ARGS__; \
        } else if ((dtype) == NS_FP16) { \
            using T = __half; \
            __VA_ARGS__; \
        } else { \
            using T = float; \
            __VA_ARGS__; \
        } \
    } while (0)
