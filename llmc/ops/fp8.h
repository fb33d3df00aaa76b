// Contracts: products in FP8 in both directions. Conventions: llmc/ops/ops.h; codes and scales:
// llmc/ops/mlp.h.
//
// Gradients are e4m3 like everything else. An FP8 product sums over the last index of both operands: the
// gradient of a weight sums over tokens, and reads codes that have them last.
#pragma once
#include "llmc/ops/mlp.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { QKV_BF16, QKV_FP8 } QkvMode;

// A tensor x (rows, cols) as codes e4m3(x / scale), the quotient in fp32, both ways round.
typedef struct {
    uint8_t *codes;      // (rows, cols) out
    uint8_t *transposed; // (cols, rows) out; or NULL
    const float *scale;  // (1)
    float *amax;         // (1) in/out: max(amax, max |x|); or NULL
} Codes;
void quantize_codes(Stream s, const Codes *to, const floatX *x, int rows, int cols);

// scale = max(amax, 1e-12) / 448, in fp32;  amax = 0.  scale, amax (1) fp32
void scale_quotient(Stream s, float *scale, float *amax);
// Delayed scales follow the maxima of a pass: scale_i = max(max(amax_i, 1e-12) * factor, least), in fp32;
// amax_i = 0.  scale, amax (n) fp32
void scales_follow(Stream s, float *scale, float *amax, float factor, float least, int n);

// y = relu(p)^2 with p = x w^T rounded to floatX, y rounded to floatX and kept as codes alone.  y (N, out)
void matmul_fp8_relu2_codes(const ProductContext *c, const Codes *y, const Fp8Product *p);
// Its gradient: dpre = 2 dy sqrt(y), with dy = g w^T for p's operands g and w, and y = scale_y * y8: where
// its code is 0 the gradient is 0. dy, the root and dpre are rounded to floatX; dpre is kept as codes alone.
//   dpre, y8 (N, out);  scale_y (1)
void matmul_fp8_relu2_backward(const ProductContext *c, const Codes *dpre, const Fp8Product *p,
                               const uint8_t *y8, const float *scale_y);

// dw += scale_a scale_b a8 b8^T, or = when fresh, for each of `count` (1 or 2) products over the same N
// tokens.
typedef struct {
    float *dw;                      // (m, n) fp32, as in WeightGrad
    const uint8_t *a8, *b8;         // (m, N), (n, N)
    const float *scale_a, *scale_b; // (1)
    int m, n;
    bool fresh;
} Fp8WeightGrad;
void matmul_fp8_weight_grads(const ProductContext *c, const Fp8WeightGrad *g, int count, int N);

#ifdef __cplusplus
}
#endif
