// Contracts: head and loss. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// logits = x w^T;  z = 30 sig(logits / 7.5);  loss_t = log sum_j exp(z_j) - z_target over all Vp columns.
// Never holds more than a chunk of logits. In training logits and their gradient are rounded to floatX, as
// between any two ops, or kept more exactly.
typedef enum { HEAD_BF16, HEAD_FP8 } HeadMode;

// HEAD_FP8: x8 = e4m3(x / sx), w8 = e4m3(w / sw), logits = sx sw x8 w8^T; g8 = e5m2(g / sg); dx = sg sw g8
// w8; dw = sx sg g8^T x8; sx = sqrt(d)/448, sw = 2^-9, sg = 1/448; conversions saturate.
// After backend_reserve: device memory that ops of the head use while they run, and no other op. Between them
// it is free for the caller. NULL with 0 bytes when there is none.
void *head_idle_memory(size_t *bytes);

// w8: the backend's own copies of the quantised weight, made anew when the weight has changed.
size_t head_weight_bytes(HeadMode mode, int Vp, int d); // 0 for HEAD_BF16
void head_quantize(Stream s, void *w8, const floatX *w, int Vp, int d);

// loss (1) fp32 out: sum over the N tokens;  dx (N, d) floatX out;  dw (Vp, d) fp32 +=
void head_loss_train(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x,
                     const floatX *w, const void *w8, const int32_t *targets, int N, int d, int Vp);
// loss (1) fp32 out: sum over the N tokens, plain head, logits not rounded
void head_loss_eval(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N,
                    int d, int Vp);
// z (rows, Vp) fp32 out, softcapped; plain head, few rows (sampling)
void head_logits(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp);

#ifdef __cplusplus
}
#endif
