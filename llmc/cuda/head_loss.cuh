// From logits to loss and gradient, row by row: z = 30 sig(l / 7.5), loss = log sum e^z - z_target,
// dloss/dl_j = (softmax_j - [j = target]) * 4 sig (1 - sig).
#pragma once
#include "llmc/cuda/fp8.cuh"

typedef enum {
    GRADIENT_BF16,         // in place of the logits
    GRADIENT_E5M2,         // to `codes`: e5m2(448 g)
    GRADIENT_E5M2_AS_BF16, // the values of those codes, in place of the logits
} GradientForm;

// losses (rows) fp32 out;  logits (rows_padded, Vp) bf16 in/out;  codes (rows_padded, Vp) for GRADIENT_E5M2
// Rows from `rows` to rows_padded get zero gradient.
void loss_gradient_rows(Stream s, GradientForm form, float *losses, floatX *logits, uint8_t *codes, const int32_t *targets,
                        int rows, int rows_padded, int Vp);
// losses (rows) fp32 out;  logits (rows, Vp) fp32
void loss_rows(Stream s, float *losses, const float *logits, const int32_t *targets, int rows, int Vp);
// z = 30 sig(z / 7.5), in place.  n elements
void softcap(Stream s, float *z, int64_t n);
// out (1) = sum of x (n), in a fixed order
void sum_in_order(Stream s, float *out, const float *x, int n);
