// Contracts: the residual stream: mixes and norms. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// A number that a stream is multiplied with, from the trained scalars: factor * scalars[scalar] *
// sig(scalars[gate]); an index of -1 leaves its factor out. gate = UNGATED(i): scalars[i] as it is.
typedef struct {
    float factor;
    int scalar, gate;
} Coefficient;
#define UNGATED(i) (-2 - (i)) // and back
enum { MAX_COEFFICIENTS = 128 };

// coef[i] from terms[i].  coef (count) fp32 out;  scalars fp32;  terms (count) host, count at most
//                         MAX_COEFFICIENTS
void coefficients_forward(Stream s, float *coef, const float *scalars, const Coefficient *terms, int count);
// dscalars fp32 +=; dcoef (count) fp32 in, zeroed afterwards
void coefficients_backward(Stream s, float *dscalars, float *dcoef, const float *scalars,
                           const Coefficient *terms, int count);

// x_out = coef[0]*x + coef[1]*x0 + coef[2]*skip;  h = rms(x_out), rms(x) = x / sqrt(mean(x^2) + 2^-23).
typedef struct {
    floatX *x_out; // (N, d) out, the residual stream; NULL when only h is wanted. h is computed from the
                   // unrounded sum
    floatX *h;     // (N, d) out
    float *rstd;   // (N) out, kept for backward
    const floatX *x, *x0; // (N, d)
    const floatX *skip;   // (N, d) or NULL
    const float *coef;    // (3)
} MixForward;
void mix_rmsnorm_forward(Stream s, const MixForward *a, int N, int d);

// With g = dx_out + rms-backward(dh):  dx = coef[0]*g + dx_add;  dx0 (+)= coef[1]*g;  dskip = coef[2]*g;
// dcoef += (sum g*x, sum g*x0, sum g*skip).
typedef struct {
    floatX *dx;           // (N, d) out; may be dx_out itself
    floatX *dx0;          // (N, d) out, or += when accumulate_dx0
    floatX *dskip;        // (N, d) out; NULL when skip is NULL
    float *dcoef;         // (3) +=
    const floatX *dx_out; // (N, d) gradient of x_out from the layers above, or NULL for zero
    const floatX *dh;     // (N, d) gradient of h
    const floatX *dx_add; // (N, d) further gradient of x (a skip or backout taken from it), or NULL. May be
                          // dskip, of a skip from the block directly below: dskip is written first
    const floatX *h; // (N, d) as forward gave it; a backend may compute it from x, x0, skip and rstd instead
    const float *rstd;    // (N)
    const floatX *x, *x0; // (N, d) as forward took them
    const floatX *skip;   // (N, d) or NULL
    const float *coef;    // (3)
    const float *dgate;   // (N, H) from attention_backward: dh[:, 0:gate_inputs] += dgate gate_w; or NULL
    const floatX *gate_w; // (H, gate_inputs)
    int heads;
    bool accumulate_dx0;
    uint8_t gate_inputs; // a byte: of a struct above 120 bytes the CUDA kernel would keep a copy in memory
} MixBackward;
void mix_rmsnorm_backward(Stream s, const MixBackward *a, int N, int d);

// h = rms(x).
void rmsnorm_forward(Stream s, floatX *h, float *rstd, const floatX *x, int N, int d);
// dx += rms-backward(dh):  rstd * (dh - h * mean(dh * h)).   dx (N, d) floatX in/out
void rmsnorm_backward(Stream s, floatX *dx, const floatX *dh, const floatX *h, const float *rstd, int N,
                      int d);

#ifdef __cplusplus
}
#endif
