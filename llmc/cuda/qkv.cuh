// The fast path of the QKV product.
#pragma once
#include "llmc/cuda/cuda_common.cuh"

void qkv_tensor_reserve(void);
bool qkv_tensor_takes(int e); // heads of this width
// qkv_product_forward without value embeddings: v = *v_scale v_raw. v_scale NULL: v is left alone.
// False, with nothing queued, when the chip, the build, the head width or the alignment do not allow it.
bool qkv_tensor(Stream s, floatX *qkv, floatX *v, float *rstd_q, float *rstd_k, const floatX *x, const floatX *w,
                const float *v_scale, const floatX *cos, const floatX *sin, int N, int H, int e);
