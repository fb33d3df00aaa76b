// Gradients of weights in own tiles on Hopper.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/ops.h"

// After wide_product_reserve.
void weight_grad_reserve(void);
void weight_grad_close(void);
// Whether this is the way for products of these shapes, when their matrices start on 16 bytes.
bool weight_grad_takes(const WeightGrad *g, int count, int N);
// dw += a^T b, or dw = a^T b, for each of `count` products, as matmul_weight_grads has them.
// False, with nothing queued, when the path, the build, the shapes or the alignment do not allow it.
bool weight_grad(Stream s, const WeightGrad *g, int count, int N);
