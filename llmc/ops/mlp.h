// Contracts: products in FP8, forward; both directions: llmc/ops/fp8.h. Conventions: llmc/ops/ops.h.
//
// A tensor t is held as e4m3 codes t8 and one fp32 scale in device memory: t = scale * t8. An FP8 product
// sums over the last index of both operands, because tensor cores want it so.
// Without ops of fp8.h backward is straight through: it reads the bf16 tensors, as if none had been
// quantised.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/matmul.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { MLP_BF16, MLP_FP8, MLP_FP8_BACKWARD } MlpMode; // the second: forward alone
enum { FP8_MULTIPLE = 16 };                                   // of which all extents here but N are multiples
enum { E4M3_LARGEST = 448 };                                  // value of a code

// ---- scales -----------------------------------------------------------------------------------------------

// amax = max(amax, max |x|); NaN when there is one.  amax (1) fp32 in/out, not negative; x (n)
void amax_accumulate(Stream s, float *amax, const floatX *x, int64_t n);
// amax = max(amax, in * max_j sum_i w_ij^2): a bound of relu(x w)^2 for every x of `in` elements whose mean
// square is at most 1 (Cauchy-Schwarz).  amax (1) fp32 in/out; w (in, out)
void amax_relu2_bound(Stream s, float *amax, const floatX *w, int in, int out);
// scale = max(amax, 1e-12) * factor, in fp32;  amax = 0.  scale, amax (1) fp32; factor: (float)(headroom /
// 448)
void scale_from_amax(Stream s, float *scale, float *amax, float factor);
// The scales of weights in the arithmetic that the records of 2026 have; amax is that of bf16 weights.
//   scale = bf16(max(amax, bf16(1e-12)) / 448);  amax = 0
void scale_exact(Stream s, float *scale, float *amax);
// One that lags behind by a step, but where *exact is not 0:
//   scale = exact ? as scale_exact : next;  next = max(amax, bf16(1e-12)) * factor, in fp32;  amax = 0
//   scale out, next in/out, amax in/out, exact: (1) fp32 each
void scale_delayed(Stream s, float *scale, float *next, float *amax, float factor, const float *exact);

// ---- quantisation -----------------------------------------------------------------------------------------

// codes = e4m3 of x in units of the scale, to nearest even; saturates. Each quotient and product is rounded
// to fp32, and which there are decides ties, of which there are many: weights and their maximum have 8 bits.
typedef enum {
    QUANTIZE_INVERSE,      // x * (1 / scale)
    QUANTIZE_AMAX,         // x * (448 / max(scale, 1e-12)): scale is amax
    QUANTIZE_QUOTIENT,     // x / scale
    QUANTIZE_QUOTIENT_BF16 // x / scale, then rounded to bf16
} QuantizeRule;
//   codes (rows, cols), or (cols, rows) when transpose;  x (rows, cols);  scale (1) fp32
void quantize_e4m3(Stream s, uint8_t *codes, const floatX *x, const float *scale, int rows, int cols,
                   QuantizeRule rule, bool transpose);

// ---- products ---------------------------------------------------------------------------------------------

// x w^T = scale_x * (scale_w * alpha) * x8 w8^T
typedef struct {
    const uint8_t *x8, *w8;         // (N, in), (out, in)
    const float *scale_x, *scale_w; // (1) fp32
    int N, in, out;
    const float *alpha; // (1) fp32, or NULL: 1
} Fp8Product;

// y = relu(p)^2 with p = x w^T rounded to floatX;  y8 = e4m3(y * (1 / scale_y)) of y as it is stored;
// amax = max(amax, max y).
//   y, y8 (N, out);  amax (1) fp32 in/out, or NULL;  scale_y (1) fp32
void matmul_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                      const float *scale_y);
// out = x w^T (+ residual).  out (N, out); residual (N, out) or NULL, may be out itself
void matmul_fp8(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual);

#ifdef __cplusplus
}
#endif
