// Interface of the sm90 GEMMs of e4m3 operands.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/ops/ops.h"

// Call after device_open, before the others.
void sm90_fp8_gemm_reserve(void);
// matmul_fp8 of llmc/ops/mlp.h. This and what follows return false and launch nothing when the path, the
// build, the shape or the alignment does not allow it.
bool sm90_fp8_gemm(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual);

// ---- sm90_fp8_codes.cu ------------------------------------------------------------------------------------

void sm90_fp8_codes_reserve(void); // as above
// matmul_fp8_relu2 of llmc/ops/mlp.h.
bool sm90_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                    const float *scale_y);
// Those of llmc/ops/fp8.h. y8 NULL: matmul_fp8_relu2_codes; else matmul_fp8_relu2_backward.
bool sm90_fp8_codes(const ProductContext *c, const Codes *to, const Fp8Product *p, const uint8_t *y8,
                    const float *scale_y);
