// What has no kernel yet. Runs that need it are refused before they begin (config_backend_check).
#include "llmc/ops/ops.h"
#pragma GCC diagnostic ignored "-Wunused-parameter"

bool backend_lacks(Feature f)
{
    static const bool lacks[] = {[FEATURE_FP8_BOTH] = true, [FEATURE_MASK] = true};
    return lacks[f];
}

#define LACKING(op, ...) \
    void op(__VA_ARGS__) { fatal(EXIT_BAD_INPUT, #op ": the CUDA program has no kernel for it"); }
LACKING(quantize_codes, Stream s, const Codes *to, const floatX *x, int rows, int cols)
LACKING(scale_quotient, Stream s, float *scale, float *amax)
LACKING(scales_follow, Stream s, float *scale, float *amax, float factor, float least, int n)
LACKING(matmul_fp8_relu2_codes, const ProductContext *c, const Codes *y, const Fp8Product *p)
LACKING(matmul_fp8_relu2_backward, const ProductContext *c, const Codes *dpre, const Fp8Product *p,
        const uint8_t *y8, const float *scale_y)
LACKING(matmul_fp8_weight_grads, const ProductContext *c, const Fp8WeightGrad *g, int count, int N)
