// Interface of the sm90 GEMM of e4m3 operands.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// Call after device_open, before the others.
void sm90_fp8_gemm_reserve(void);
// The ops of llmc/ops/mlp.h. They return false and launch nothing when the path, the build, the shape or the
// alignment does not allow it.
bool sm90_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                    const float *scale_y);
bool sm90_fp8_gemm(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual);
