// Logits on Hopper's tensor cores, with the softcap and the sums of the softmax on the way out.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// Before any other call, outside of a capture.
void head_tensor_open(void);
// False: the logits come from cuBLASLt.
bool head_tensor_fits(HeadMode mode, int d, int Vp);
int head_tensor_parts(HeadMode mode, int d, int Vp); // sums of a row

typedef struct {
    HeadMode mode;
    uint16_t *rest;         // (rows, Vp) out: 65535 (1 - sig(logit / 7.5)), rounded; HEAD_BF16: NULL
    float *sums;            // (parts, sums_pitch) out: sums of e^(z - 30) over the row's columns, from the unrounded logits
    float *wanted;          // (rows) out: the target's logit
    const void *x, *w;      // (rows, d), (Vp, d): bf16; or e4m3, w with its rows in product order (fp8_transpose.cuh)
    const int32_t *targets; // (rows)
    float scale;            // logit = scale * sum of products
    int rows, d, Vp, sums_pitch;
} HeadLogits;
void head_tensor_logits(Stream s, const HeadLogits *a);
