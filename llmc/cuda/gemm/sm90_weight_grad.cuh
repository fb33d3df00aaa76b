// Interface of the sm90 weight-gradient GEMM.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/ops/ops.h"

// Call after sm90_gemm_reserve.
void sm90_weight_grad_reserve(void);
// True when these shapes run on the sm90 kernel, given matrices aligned to 16 bytes.
bool sm90_weight_grad_takes(const WeightGrad *g, int count, int N);
// dw += a^T b, or dw = a^T b, for each of `count` products, as matmul_weight_grads defines them. Returns
// false and launches nothing when the path, the build, the shapes or the alignment does not allow it.
bool sm90_weight_grad(const ProductContext *c, const WeightGrad *g, int count, int N);
