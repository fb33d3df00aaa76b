// Contracts: head and loss. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#include <math.h>
#ifdef __cplusplus
extern "C" {
#endif

// logits = x w^T;  z = cap sig((logits + shift) / slope);  lse = log sum_j exp(z_j) over all Vp columns.
// Training: row t predicts the targets of rows t, t + 1, ... t + K - 1, as far as there are such rows, each
// with a weight, and a prefix of its first target where there is one:
//   loss_t = sum_k weight_k (lse - z[targets[t + k]]) + prefix_weight (lse - z[prefix_t]) [prefix_t >= 0].
// Evaluation: K = 1, weight 1, no prefix.
// In training a negative target is no term: a row without one has no loss and no gradient.
// Never holds more than a chunk of logits. In training logits and their gradient are rounded to floatX, as
// between any two ops, or kept more exactly.
typedef enum { HEAD_BF16, HEAD_FP8 } HeadMode;
enum { MAX_TARGETS = 3 };

// Constants of a record. HEAD_FP8: x8 = e4m3(x / sx), w8 = e4m3(w / sw), logits = sx sw x8 w8^T;
// g8 = e5m2(g / sg); dx = sg sw g8 w8; dw = sx sg g8^T x8; conversions saturate. Each scale is range / 448.
// A backend may scale g, and x of dw, by a factor of the row before it rounds them, and divide by it after
// the product: the same formats and sizes of error, other codes (llmc/cuda/head/sm90_head_gradient.cuh).
enum { HEAD_MASKED = -60 };
enum { HEAD_MOST_CAP = 60 }; // e^-cap, and a sum of so many, is a normal fp32 number
typedef struct {
    float cap, slope, shift; // cap at most HEAD_MOST_CAP
    float range_x, range_w,
        range_g; // range_x 0: sqrt(d), the most that an element of a normalised row can be
} HeadSpec;
typedef struct {
    float x, w, g;
} HeadScales;
static inline HeadScales head_scales(const HeadSpec *spec, int d)
{
    float x = spec->range_x > 0 ? spec->range_x : sqrtf((float)d);
    HeadScales s = {x / 448, spec->range_w / 448, spec->range_g / 448};
    return s;
}

// w8: the backend's own copies of the quantised weight, made anew when the weight has changed.
size_t head_weight_bytes(HeadMode mode, int Vp, int d); // 0 for HEAD_BF16
void head_quantize(Stream s, const HeadSpec *spec, void *w8, const floatX *w, int Vp, int d);

typedef struct {
    const HeadSpec *spec; // host
    HeadMode mode;        // training
    float *loss;          // (1) out: sum over the N tokens
    float *rows;          // (N) out: loss of each token; NULL: not wanted; evaluation
    // Evaluation: z_j of row t is HEAD_MASKED where bit j % 32 of word j / 32 of row tokens[t] is set.
    const uint32_t *impossible; // (Vp, Vp / 32), or NULL
    const int32_t *tokens;      // (N), with it
    floatX *dx;                 // (N, d) out; training
    float *dw;                  // (Vp, d) +=; training
    const floatX *x, *w;        // (N, d), (Vp, d)
    const void *w8;             // training with HEAD_FP8: as head_quantize made it
    const int32_t *targets;     // (N); training: or negative
    int num_targets;            // K, 1 to MAX_TARGETS; training
    const float *target_weight; // (num_targets), not below 0; training
    const int32_t *prefix;      // (N) token or -1; NULL: none; training
    const float *prefix_weight; // (1), not below 0; with prefix
    void *scratch; // head_train_scratch_bytes or head_eval_scratch_bytes, of this N or a larger one; 256-byte
                   // aligned
    int N, d, Vp;
} HeadLoss;
// After backend_reserve.
size_t head_train_scratch_bytes(HeadMode mode, int N, int d, int Vp);
size_t head_eval_scratch_bytes(int N, int d, int Vp);
void head_loss_train(Stream s, const HeadLoss *a);
void head_loss_eval(Stream s, const HeadLoss *a); // plain head, logits not rounded
// z (rows, Vp) fp32 out, softcapped; plain head, few rows (sampling)
void head_logits(Stream s, const HeadSpec *spec, float *z, const floatX *x, const floatX *w, int rows, int d,
                 int Vp);

#ifdef __cplusplus
}
#endif
