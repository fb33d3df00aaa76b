// Interface of the sm90 head-logits kernel.
#pragma once
#include "llmc/cuda/head/head_loss.cuh"

// Call before any other function here, outside of graph capture.
void sm90_head_open(void);
// False: the caller uses cuBLASLt. HEAD_FP8: the products of sm90_head_gradient.cu fit, too.
bool sm90_head_fits(HeadMode mode, int d, int Vp);
int sm90_head_parts(HeadMode mode, int Vp); // sums of a row

enum { HEAD_LOGITS_WIDTH = 768 }; // most columns of x that sm90_head_fits takes in FP8

// Columns from which the base of a row's codes is estimated: the first of a vocabulary whose tokens have the
// order of their merges are frequent ones. 3% of GPT-2's.
enum { ESTIMATE_PARTS = 8 };

typedef struct {
    HeadMode mode;
    LossForm form;
    uint8_t *codes;    // (rows, Vp) out: of the gradient (sm90_head_gradient.cuh); NULL: sums alone
    uint8_t *excess;   // (parts, pitch) out: how far a part's codes are above the row's base
    const float *base; // (rows)
    float *sums;       // (parts, pitch) out: sums of e^(z - cap) over a part's columns, from unrounded logits
    const void *x,
        *w;      // (rows, d), (Vp, d): bf16; or e4m3, w with its rows in product order (fp8_transpose.cuh)
    float scale; // logit = scale * sum of products
    int rows, d, Vp, pitch;
    RowMask mask; // HEAD_BF16
} HeadLogits;
void sm90_head_logits(Stream s, const HeadLogits *a);

// Sums of products of the rows' targets, before `scale`: bit for bit those of the tiles. A term that a row
// does not have gets another token's.
typedef struct {
    float *logits;        // (MAX_TERMS, pitch) out: the first targets.count rows, and the last for the prefix
    const uint8_t *x, *w; // e4m3 (rows, d), (Vp, d) in the rows' order of HEAD_FP8 (product_row)
    RowTargets targets;
    int rows, d, pitch;
} TargetLogits;
void sm90_target_logits_open(void); // for sm90_head_open
void sm90_target_logits(Stream s, const TargetLogits *a);
