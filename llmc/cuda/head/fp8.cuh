// Conversions to the two 8-bit float formats, and operands of FP8 products.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include <cuda_fp8.h>

enum { FP8_ALIGN = 16 }; // cuBLASLt wants every extent of an FP8 product to be a multiple of this

// Four floats to four codes, nearest even, saturating; the first in the lowest byte.
static __device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d,
                                                   __nv_fp8_interpretation_t kind)
{
    uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kind);
    uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kind);
    return lo | hi << 16;
}

// The value that a code stands for; exact in bf16, whose range and fraction hold both formats'.
static __device__ __forceinline__ float fp8_value(float x, __nv_fp8_interpretation_t kind)
{
    __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind);
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}

typedef struct {
    uint8_t *plain;      // (rows_padded, cols) = e4m3(x / scale), or NULL
    uint8_t *transposed; // (cols, rows_padded), its transpose, or NULL
    const floatX *x;     // (rows, cols)
    float scale;
    int rows, rows_padded, cols; // rows beyond `rows` are zero; cols and rows_padded multiples of 16
    bool product_order;          // plain has row r where product_row(r) says (fp8_transpose.cuh); rows a
                                 // multiple of 32 then
    const float *factors;        // (rows) e4m3(x factor / scale), or NULL: 1
    bool interleaved;            // as TransposeOut has it
} Fp8Quantize;
void fp8_quantize(Stream s, const Fp8Quantize *q);
// out = the values of e4m3(x / scale), in bf16, for the products without FP8 units.  n elements
void fp8_round(Stream s, floatX *out, const floatX *x, float scale, int64_t n);
// transposed (cols, rows) = x^T of bytes, transposed_pitch bytes between its rows.  cols a multiple of 16
void fp8_transpose(Stream s, uint8_t *transposed, int64_t transposed_pitch, const uint8_t *x, int rows,
                   int cols);
