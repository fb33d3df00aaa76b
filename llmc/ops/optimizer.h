// Contracts: optimizers. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#include "llmc/ops/head.h"
#include "llmc/ops/ns_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

// What changes from step to step, in device memory. Tensors of one update rule have one rate and one decay.
enum { MAX_UPDATE_RULES = 32 };
typedef struct {
    float rate;  // Adam: lr * sqrt(1 - beta2^k) / (1 - beta1^k); NorMuon: lr
    float decay; // NorMuon: lr without the rule's own factor, * weight decay; Adam: lr^2 * weight decay
} RuleStep;
typedef struct {
    float grad_scale; // 1 / micro-batches of a step
    float muon_momentum;
    float target_weight[MAX_TARGETS]; // of the loss
    float prefix_weight;              // of its prefix term
    float exact_scales;               // not 0: delayed scales of weights in FP8 are exact
    RuleStep rule[MAX_UPDATE_RULES];
} StepParams;

typedef struct {
    int rule; // index in StepParams
    float beta1, beta2, eps;
    float rest1, rest2; // 1 - beta, rounded from the exact difference
} AdamRule;

// g = grad * grad_scale;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= rate * m / (sqrt(v) + eps).
// The moments used in the quotient are the unrounded ones. grad is zeroed.
//   p, m, v (n) floatX in/out;  grad (n) fp32 in/out
void adam_update(Stream s, floatX *p, floatX *m, floatX *v, float *grad, const StepParams *step,
                 AdamRule rule, int64_t n);
void adam_update_fp32(Stream s, float *p, float *m, float *v, float *grad, const StepParams *step,
                      AdamRule rule, int64_t n);

// The same with moments in fp32, and with decay: u = rate * m / (sqrt(v) + eps); where u p > 0:
// u += decay * p; p -= u.  p (n) floatX in/out;  m, v, grad (n) fp32 in/out
void adam_update_decay(Stream s, floatX *p, float *m, float *v, float *grad, const StepParams *step,
                       AdamRule rule, int64_t n);

// M += (1 - mu)(G - M);  U = G + mu (M - G), with G = grad * grad_scale.  momentum (n) fp32 in/out; u (n)
//                        fp32 in: grad, out: U
void normuon_momentum(Stream s, float *u, float *momentum, const StepParams *step, int64_t n);

// NorMuon's normalisation, cautious decay and update of a batch of equal matrices, from their orthogonalised
// O. c = mean of O^2 along the shorter side of the stored shape (per column when rows < cols, else per row);
// S += (1-beta2)(c - S);
// O' = O / sqrt(max(S, 1e-10));  O'' = O' |O|_F / max(|O'|_F, 1e-10);  where O'' W >= 0: O'' += decay W;  W
//                                -= rate O''.
typedef struct {
    float *w;   // (batch, rows, cols) in/out, or NULL when the weight is stored as floatX only
    floatX *wx; // (batch, rows, cols) out: the weight rounded or cut off; in/out when w is NULL
    float
        *grad; // (batch, rows, cols) zeroed: the gradient buffer that normuon_momentum turned into U; or NULL
    float *second; // S (batch, max side) in/out, fp32
    const void *o; // (batch, rows, cols) packed, in o_dtype
    NsDtype o_dtype;
    int rows, cols, batch;
    bool per_column; // decided by the stored shape of the parameter, of which these may be parts
    float beta2;
    const int32_t *rule; // (batch) device: of each matrix, index in StepParams
    int64_t stride;      // elements from one matrix of w, wx and grad to the next; o and second are packed
    bool truncate;       // wx is the upper half of w's bits, not w rounded; w is not NULL
} NormuonUpdate;
void normuon_update(Stream s, const NormuonUpdate *a, const StepParams *step);

// wx = w rounded to floatX, or the upper half of w's bits when truncate. (fp32 keeps all of w.)
void cast_weights(Stream s, floatX *wx, const float *w, int64_t n, bool truncate);

#ifdef __cplusplus
}
#endif
