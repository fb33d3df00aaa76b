// FP8 head behind sm90_head_logits.cu: loss of every row from its partial sums, then the gradient, plain and
// transposed. Bound by memory and by the special-function units (one exponential an element): 13.8 ms a step
// (window 11, one H200).
//
// With v = F (1 - sig), as stored, F = 65534, and S the row's sum of e^(z - 30), the code of a gradient
// stands for
//   448 softmax * 4 sig (1 - sig) = v (F - v) * 2^(c v + n),  c = -30 log2(e) / F,  n = log2(4 * 448 / F^2) -
//   log2 S.
// The target's element, a difference of nearly equal numbers once the model is sure, is computed from its
// logit in fp32.
#include "llmc/cuda/head/fp8_transpose.cuh"
#include "llmc/cuda/head/head_loss.cuh"

enum { ROWS = WARP, GROUPS = 8 }; // of a block of loss_from_sums

// factors: (n, the target's 448 g)
__global__ void loss_from_sums_kernel(float *losses, float2 *factors, const float *sums, int parts, int pitch,
                                      const float *target_logit, int rows)
{
    __shared__ float shared[GROUPS][ROWS];
    int lane = threadIdx.x % ROWS, group = threadIdx.x / ROWS, row = blockIdx.x * ROWS + lane;
    float sum = 0;
    for (int p = group; row < rows && p < parts; p += GROUPS)
        sum += sums[(int64_t)p * pitch + row];
    shared[group][lane] = sum;
    __syncthreads();
    if (group || row >= rows)
        return;
    for (int g = 1; g < GROUPS; g++)
        sum += shared[g][lane];
    float one_minus_sigmoid = 1 / (1 + expf(target_logit[row] / SLOPE)), norm = log2f(sum);
    losses[row] = CAP * one_minus_sigmoid + logf(sum);
    float p = exp2f(-CAP * LOG2E * one_minus_sigmoid - norm);
    const float constant = -21.192557f; // log2(4 * 448 / 65534^2)
    factors[row] = make_float2(constant - norm,
                               GRADIENT_FACTOR * (p - 1) * 4 * one_minus_sigmoid * (1 - one_minus_sigmoid));
}

void loss_from_sums(Stream s, float *losses, float2 *factors, const float *sums, int parts, int pitch,
                    const float *target_logit, int rows)
{
    if (rows <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(rows, ROWS);
    loss_from_sums_kernel<<<blocks, ROWS * GROUPS, 0, s>>>(losses, factors, sums, parts, pitch, target_logit,
                                                           rows);
    CHECK_LAUNCH();
}

namespace
{

struct Gradient {
    struct Raw {
        uint4 a, b;
    };
    const uint16_t *one_minus_sigmoid;
    const float2 *factors;
    const int32_t *targets;
    int cols;
    __device__ __forceinline__ Raw load(int row, int col) const
    {
        const uint4 *at = reinterpret_cast<const uint4 *>(one_minus_sigmoid + (int64_t)row * cols + col);
        return {at[0], at[1]};
    }
    __device__ __forceinline__ uint4 codes(const Raw &raw, int row, int col) const
    {
        float g[16];
        float2 factor = factors[row];
        unpack_fractions(raw.a, g);
        unpack_fractions(raw.b, g + 8);
#pragma unroll
        for (int k = 0; k < 16; k++)
            g[k] = exp2_fast(fmaf(g[k], -CAP * LOG2E / FRACTIONS, factor.x)) * (g[k] * (FRACTIONS - g[k]));
        int at = targets[row] - col;
        if ((unsigned)at < 16) { // rare
#pragma unroll
            for (int k = 0; k < 16; k++)
                g[k] = k == at ? factor.y : g[k];
        }
        return make_uint4(encode4(g[0], g[1], g[2], g[3], __NV_E5M2),
                          encode4(g[4], g[5], g[6], g[7], __NV_E5M2),
                          encode4(g[8], g[9], g[10], g[11], __NV_E5M2),
                          encode4(g[12], g[13], g[14], g[15], __NV_E5M2));
    }
};

} // namespace

void gradient_from_one_minus_sigmoid(Stream s, uint8_t *g8, uint8_t *g8_transposed, int64_t transposed_pitch,
                                     const uint16_t *one_minus_sigmoid, const float2 *factors,
                                     const int32_t *targets, int rows, int rows_padded, int Vp)
{
    if (rows_padded <= 0)
        return;
    TransposeOut t = {g8, g8_transposed, transposed_pitch, rows, rows_padded, Vp, false};
    transpose_tiles(s, &t, Gradient{one_minus_sigmoid, factors, targets, Vp});
}
