// Contracts: embedding. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// Distinct tokens of a micro-batch and where they stand, so that gradients of table rows are sums and not
// atomics.
typedef struct {
    const int32_t *order;     // (N) positions, sorted by token
    const int32_t *row_token; // (*num_rows) distinct tokens, rising
    const int32_t
        *row_start; // (*num_rows + 1) order[row_start[r] .. row_start[r+1]) are the positions of row_token[r]
    const int32_t *num_rows; // (1)
} TokenRows;

enum { MAX_GATE_INPUTS = 16 }; // most channels that a gate reads: the first `gate_inputs` of its row

// y_t = E[token_t] + lambda * sig(gate . E[token_t][0:gate_inputs]) * E[token_{t-1}]  (t >= 1; y_0 =
// E[token_0]);  x0 = rms(y).
typedef struct {
    floatX *x0;            // (N, d) out
    float *rstd;           // (N) out, kept for backward
    const int32_t *tokens; // (N)
    const floatX *embed;   // (Vp, d)
    const floatX *gate;    // (gate_inputs)
    const float *lambda;   // (1)
    int gate_inputs;
    const int32_t *before; // (N) the token before, -1: none; NULL: tokens[t-1]
} EmbedForward;
void embed_forward(Stream s, const EmbedForward *a, int N, int d);

typedef struct {
    floatX *de;             // (N, d) out: gradient of the gathered rows E[token_t], for embedding_grad
    const floatX *dx, *dx0; // (N, d) the two parts of the gradient of x0 (down the residual stream; gathered
                            // over layers); dx0 may be NULL
    const floatX *x0;       // (N, d) and
    const float *rstd;      // (N) embed_forward's results
    const int32_t *tokens;  // the rest as it took them
    const floatX *embed, *gate;
    const float *lambda;
    float *dgate;   // (gate_inputs) +=
    float *dlambda; // (1) +=
    int gate_inputs;
} EmbedBackward;
void embed_backward(Stream s, const EmbedBackward *a, int N, int d);

// dtable[token] += scale * sum of g over the token's positions, for the tokens of `rows` only.
//   dtable (Vp, d) fp32 +=;  g (N, d) floatX;  scale (1) fp32 or NULL for 1
void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows,
                    int N, int d);

#ifdef __cplusplus
}
#endif
