// FP8 head behind sm90_head_logits.cu: loss of every row from its partial sums, then the gradient, plain and
// transposed. Bound by memory and by the special-function units (one exponential an element): 13.8 ms a step
// (window 11, one H200).
//
// With v = F (1 - sig), as stored, F = 65534, S the row's sum of e^(z - cap) and W that of its weights, the
// code of a gradient stands for
//   1/sg W softmax * cap/slope sig (1 - sig) = v (F - v) * 2^(c v + n),  c = -cap log2(e) / F,
//   n = log2(cap / (slope sg F^2)) - log2 S + log2 W.
// The first target's element, a difference of nearly equal numbers once the model is sure, is computed from
// its logit in fp32; those of further targets and the prefix, of which a model never is, from the stored v.
#include "llmc/cuda/head/fp8_transpose.cuh"
#include "llmc/cuda/head/head_loss.cuh"

enum { ROWS = WARP, GROUPS = 8 }; // of a block of loss_from_sums

// factors: (n, the first target's code)
template <int TERMS> __global__ void loss_from_sums_kernel(const LossForm f, const SumLosses a)
{
    __shared__ float shared[GROUPS][ROWS];
    int lane = threadIdx.x % ROWS, group = threadIdx.x / ROWS, row = blockIdx.x * ROWS + lane;
    float sum = 0;
    for (int p = group; row < a.rows && p < a.parts; p += GROUPS)
        sum += a.sums[(int64_t)p * a.pitch + row];
    shared[group][lane] = sum;
    __syncthreads();
    if (group || row >= a.rows)
        return;
    for (int g = 1; g < GROUPS; g++)
        sum += shared[g][lane];
    Wanted<TERMS> wanted(a.targets, row);
    float norm = log2f(sum), loss = 0, code[TERMS];
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        float one_minus_sigmoid = 0, share = 0;
        if (wanted.token[k] < 0) // nothing was written there
            one_minus_sigmoid = 0;
        else if (k == 0)
            one_minus_sigmoid = 1 / (1 + expf((a.target_logit[row] + f.shift) / f.slope));
        else
            one_minus_sigmoid =
                (float)(a.one_minus_sigmoid[(int64_t)row * a.Vp + wanted.token[k]] - 1) / FRACTIONS;
#pragma unroll
        for (int i = 0; i < TERMS; i++)
            share += wanted.token[i] == wanted.token[k] ? wanted.weight[i] : 0;
        if (TERMS == 1 && target_is_masked(a.mask, row, wanted.token[k]))
            loss += wanted.weight[k] * (f.cap - HEAD_MASKED + logf(sum));
        else
            loss += wanted.weight[k] * (f.cap * one_minus_sigmoid + logf(sum));
        code[k] = target_code(f, one_minus_sigmoid, norm, wanted.sum, share);
    }
    a.losses[row] = loss;
    a.factors[row] = make_float2(f.code_log2 - norm + log2f(wanted.sum), code[0]);
#pragma unroll
    for (int k = 1; k < TERMS; k++)
        a.further_factors[(k - 1) * a.pitch + row] = code[k];
}

void loss_from_sums(Stream s, const LossForm *f, const SumLosses *a)
{
    if (a->rows <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(a->rows, ROWS);
    if (one_term(&a->targets))
        loss_from_sums_kernel<1><<<blocks, ROWS * GROUPS, 0, s>>>(*f, *a);
    else
        loss_from_sums_kernel<MAX_TERMS><<<blocks, ROWS * GROUPS, 0, s>>>(*f, *a);
    CHECK_LAUNCH();
}

namespace
{

template <int TERMS> struct Gradient {
    static constexpr bool HAS_AMAX = false;
    struct Raw {
        uint4 a, b;
    };
    const uint16_t *one_minus_sigmoid;
    const float2 *factors;
    const float *further_factors;
    RowTargets targets;
    float exponent; // c
    int cols, pitch;
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
            g[k] = exp2_fast(fmaf(g[k], exponent, factor.x)) * (g[k] * (FRACTIONS - g[k]));
#pragma unroll
        for (int i = TERMS - 1; i >= 0;
             i--) { // the first one last: where they are one token its code is kept
            int token = i == 0 ? targets.targets[row] : term_token<TERMS>(targets, row, i), at = token - col;
            if ((unsigned)at < 16) { // rare
                float code = i == 0 ? factor.y : further_factors[(i - 1) * pitch + row];
#pragma unroll
                for (int k = 0; k < 16; k++)
                    g[k] = k == at ? code : g[k];
            }
        }
        return make_uint4(encode4(g[0], g[1], g[2], g[3], __NV_E5M2),
                          encode4(g[4], g[5], g[6], g[7], __NV_E5M2),
                          encode4(g[8], g[9], g[10], g[11], __NV_E5M2),
                          encode4(g[12], g[13], g[14], g[15], __NV_E5M2));
    }
};

} // namespace

void gradient_from_one_minus_sigmoid(Stream s, const LossForm *f, uint8_t *g8, uint8_t *g8_transposed,
                                     int64_t transposed_pitch, const SumLosses *a, int rows_padded)
{
    if (rows_padded <= 0)
        return;
    TransposeOut t = {g8, g8_transposed, transposed_pitch, a->rows, rows_padded, a->Vp, false};
    float exponent = -f->cap_log2 / FRACTIONS;
    if (one_term(&a->targets))
        transpose_tiles(s, &t,
                        Gradient<1>{a->one_minus_sigmoid, a->factors, a->further_factors, a->targets,
                                    exponent, a->Vp, a->pitch});
    else
        transpose_tiles(s, &t,
                        Gradient<MAX_TERMS>{a->one_minus_sigmoid, a->factors, a->further_factors, a->targets,
                                            exponent, a->Vp, a->pitch});
}
