// Contracts: numbers that a small network makes for every token. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// out = scale (gelu(x w1^T) w2^T + b2),  gelu(u) = u (1 + erf(u / sqrt 2)) / 2.
enum { GENERATOR_MOST = 64 }; // most hidden units, and most numbers a token
typedef struct {
    const floatX *w1;   // (width, d)
    const floatX *w2;   // (K, width)
    const floatX *b2;   // (K)
    const float *scale; // (1)
    int width, K;
} Generator;

// out (N, K) fp32 out;  pre (N, width) floatX out: x w1^T, kept for backward;  x (N, d)
void generator_forward(Stream s, float *out, floatX *pre, const Generator *g, const floatX *x, int N, int d);

// The gradient of w1 is left to matmul_weight_grads: dw1 += dpre^T x.
typedef struct {
    const Generator *generator;
    floatX *dx;             // (N, d) out
    floatX *dpre;           // (N, width) out
    float *dw2;             // (K, width) +=
    float *db2;             // (K) +=
    float *dscale;          // (1) +=, or NULL
    const float *dout;      // (N, K)
    const floatX *pre;      // (N, width) as forward gave it
    const floatX *residual; // (N, d) added to dx, or NULL
} GeneratorBackward;
void generator_backward(Stream s, const GeneratorBackward *a, int N, int d);

#ifdef __cplusplus
}
#endif
