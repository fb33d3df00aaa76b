// The gradient of the FP8 head's logits as sm90_head_logits.cu stores it, and its two products.
//
// A code is e5m2 of a positive number:
//   code = 2^(CODE_TOP + z - base) (1 - t^2),  z = log2 e^(z - cap),  1 - t^2 = 4 sig (1 - sig).
// The sum S of a row is known only when all of its parts (PART_COLS columns) are there. So `base` is an
// estimate of log2 S, from the first columns alone, and SLACK above it:
//   gradient = code (2^base / S) W cap/(4 slope) 2^-CODE_TOP
// holds whatever the base, and a code is rounded once. Where an estimate was too low by more than SLACK, a
// part's codes may not reach CODE_TOP: the part takes a higher base, by `excess`, and when S is known all
// codes of the row are lowered to the base of S. Targets' codes are then written anew and may be negative.
//
// The fraction of the base is such that, if the other columns had the same sums as the first, codes are
// powers of two times e5m2(gradient / sg), and so are the factors with which x is scaled for dw: of rows in
// which all columns are alike, as at the start of a training, all elements have one rounding error, and it
// should be that of a fixed scale. Where the first columns are all there are, all codes are those of it.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

enum {
    PART_COLS = 192,
    CODE_TOP = 15, // codes reach 2^15, the largest power of two in e5m2
    SLACK = 6, // 2^base / S is between 1 and 2^(SLACK + 1): x of the weight gradient is scaled by it in e4m3
};

typedef struct {
    const uint8_t *codes; // (rows, Vp)
    const uint8_t *b;     // e4m3: w^T (d, Vp) of dx; x^T (d, b_pitch) of dw, in the order of interleaved_row
    int rows, d, Vp, b_pitch;
} HeadProduct;

// Call before the others, outside of graph capture.
void sm90_head_gradient_open(void);
// dx (rows, d) = factors (rows) * codes w
void sm90_head_dx(Stream s, const HeadProduct *p, floatX *dx, const float *factors);
// dw (Vp, d) += factor (1) * codes^T x
void sm90_head_dw(Stream s, const HeadProduct *p, float *dw, const float *factor);
