// Interface of the sm90 head-logits kernel.
#pragma once
#include "llmc/cuda/head/head_loss.cuh"

// Call before any other function here, outside of graph capture.
void sm90_head_open(void);
// False: the caller uses cuBLASLt.
bool sm90_head_fits(HeadMode mode, int d, int Vp);
int sm90_head_parts(HeadMode mode, int d, int Vp); // sums of a row

typedef struct {
    HeadMode mode;
    LossForm form;
    uint16_t *one_minus_sigmoid; // (rows, Vp) out: see pack_halves; HEAD_BF16: NULL
    float *sums; // (parts, sums_pitch) out: sums of e^(z - cap) over a part's columns, from unrounded logits
    float *target_logit; // (rows) out: the target's logit
    const void *x,
        *w; // (rows, d), (Vp, d): bf16; or e4m3, w with its rows in product order (fp8_transpose.cuh)
    const int32_t *targets; // (rows); negative: none, and no target logit
    float scale;            // logit = scale * sum of products
    int rows, d, Vp, sums_pitch;
    RowMask mask; // HEAD_BF16
} HeadLogits;
void sm90_head_logits(Stream s, const HeadLogits *a);
