// Behind sm90_head_logits.cu: loss of every row from the sums of its parts. In training also the row's
// factors, the codes of its targets, and a higher base of its codes where the estimate was too low
// (sm90_head_gradient.cuh).
//
// The gradient of a target, W p - w, is a difference of nearly equal numbers once the model is sure of it. So
// it is computed in fp32, from the target's logit before it is rounded, and its code replaces that of W p.
// The logit is that of the row's sum, whose products the FP8 units cut: sm90_target_logits.cu. In validation
// it is a dot product here: at d 768 the tensor cores' sums of products in bf16 are off by less than 1e-6 of
// themselves (dev/notes/2026-11-21_how_tensor_cores_add.md).
#include "llmc/cuda/head/fp8_transpose.cuh"
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/head/sm90_head_gradient.cuh"

enum { ROWS = WARP, GROUPS = 8, ROWS_OF_GROUP = ROWS / GROUPS }; // of a block
enum { EXPONENT_ONE = 4, MAX_SHIFT = 31 }; // one in an e5m2 code's exponent; nothing is left of a code

namespace
{

// What the threads of a block know of its rows.
template <int TERMS> struct RowState {
    float sum[GROUPS][ROWS];
    int most[GROUPS][ROWS]; // excess of a part
    int rise[ROWS];         // of the base: 0 unless the estimate was too low
    float logit[ROWS];      // evaluation
    int token[TERMS][ROWS]; // negative: none
    uint32_t code[TERMS][ROWS];
};

// Sum of the weights of a row that has all terms.
static __device__ __forceinline__ float all_weights(const RowTargets &t)
{
    float all = t.prefix ? *t.prefix_weight : 0;
    for (int k = 0; k < t.count; k++)
        all += t.weight ? t.weight[k] : 1;
    return all;
}

// f, or the power of two that it differs from by roundings alone, 2^-13 of it at most: the x of a weight
// gradient that is scaled by that has the codes of the unscaled x, ties included.
static __device__ __forceinline__ float power_of_two_nearby(float f)
{
    float power = ldexpf(1, (int)rintf(log2f(f)));
    return fabsf(f - power) <= power * 0x1p-13f ? power : f;
}

// Logit of the target of row `row`, `of_block` of the block, in evaluation. A warp; d is a multiple of 8. A
// row without a target gets another token's.
static __device__ __forceinline__ void target_logit(RowState<1> &shared, const SumLosses &a, int row,
                                                    int of_block)
{
    int vectors = a.d / 8, token = max(term_token<1>(a.targets, row, 0), 0);
    float sum = 0;
    for (int v = threadIdx.x % WARP; v < vectors; v += WARP) {
        float x[8], w[8];
        unpack8(load_vec(a.x + (int64_t)row * a.d, v), x);
        unpack8(load_vec(a.w + (int64_t)token * a.d, v), w);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum = fmaf(x[i], w[i], sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        shared.logit[of_block] = sum;
}

// Loss and factors of row `row`, lane `lane` of the block.
template <int TERMS, bool TRAINING>
static __device__ __forceinline__ void finish_row(RowState<TERMS> &shared, const LossForm &f,
                                                  const SumLosses &a, int row, int lane)
{
    float sum = shared.sum[0][lane];
    int most = shared.most[0][lane];
    for (int g = 1; g < GROUPS; g++) {
        sum += shared.sum[g][lane];
        most = max(most, shared.most[g][lane]);
    }
    Wanted<TERMS> wanted(a.targets, row);
    float log2_sum = log2f(sum), loss = 0, fraction = 1, inverse = wanted.sum > 0 ? 1 / wanted.sum : 0;
    if (TRAINING) {
        float base = a.base[row];
        int rise = max((int)ceilf(log2_sum - base), most); // at least 0, whatever log2f rounds
        shared.rise[lane] = rise;
        fraction = exp2f(base + (float)rise) / sum;
    }
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        float share = 0;
        if (TRAINING)
            shared.token[k][lane] = wanted.token[k];
        if (wanted.token[k] < 0)
            continue;
        float sum_of_products = TRAINING ? a.target_logits[(int64_t)k * a.pitch + row] : shared.logit[lane],
              rest = one_minus_sigmoid(f, sum_of_products * (a.scale_x * a.scale_w));
        bool masked = TERMS == 1 && target_is_masked(a.mask, row, wanted.token[k]);
        loss += wanted.weight[k] * ((masked ? f.cap - HEAD_MASKED : f.cap * rest) + logf(sum));
#pragma unroll
        for (int i = 0; i < TERMS; i++)
            share += wanted.token[i] == wanted.token[k] ? wanted.weight[i] : 0;
        float p = exp2f(-f.cap_log2 * rest - log2_sum),
              g = (p - share * inverse) * 4 * rest * (1 - rest) * (1 << CODE_TOP) / fraction;
        if (TRAINING)
            shared.code[k][lane] = encode4(g, 0, 0, 0, __NV_E5M2);
    }
    a.losses[row] = loss;
    if (!TRAINING)
        return;
    float slope = f.steepness / (4 << CODE_TOP), unit = f.steepness * f.code_factor,
          all = all_weights(a.targets), most_x = exp2f(ceilf(log2f(all * unit)) + SLACK + 1) / unit;
    a.dx_factors[row] = fraction * wanted.sum * slope * a.scale_w;
    a.x_factors[row] = all > 0 ? power_of_two_nearby(fraction * wanted.sum / most_x) : 0;
    if (row == 0)
        *a.dw_factor = all > 0 ? most_x * slope * a.scale_x : 0;
}

// Four positive codes with their exponents lowered. Below the normal numbers of the result only zero is
// exact: at 2^-30 of CODE_TOP a code loses its leading bit, then becomes zero. No borrow crosses a byte: the
// highest bits are set, and shifts are below 128.
static __device__ __forceinline__ uint32_t lowered(uint32_t codes, uint32_t shifts)
{
    const uint32_t high = 0x80808080u;
    uint32_t less = (codes | high) - shifts, kept = less & high;
    return less & (kept - (kept >> 7));
}

// Lowers all codes of row `row` to a base that is `rise` higher. A warp.
static __device__ __forceinline__ void lower_row(const SumLosses &a, int row, int rise)
{
    int lane = threadIdx.x % WARP;
    uint4 *codes = reinterpret_cast<uint4 *>(a.codes + (int64_t)row * a.Vp);
#pragma unroll 4
    for (int v = lane; v < a.Vp / 16; v += WARP) {
        int excess = a.excess[(int64_t)(v * 16 / PART_COLS) * a.pitch + row];
        uint32_t by = 0x01010101u * (uint32_t)(EXPONENT_ONE * min(rise - excess, (int)MAX_SHIFT));
        uint4 u = codes[v];
        codes[v] = make_uint4(lowered(u.x, by), lowered(u.y, by), lowered(u.z, by), lowered(u.w, by));
    }
}

template <int TERMS, bool TRAINING> __global__ void loss_from_sums_kernel(const LossForm f, const SumLosses a)
{
    __shared__ RowState<TERMS> shared;
    int lane = threadIdx.x % ROWS, group = threadIdx.x / ROWS, row = blockIdx.x * ROWS + lane, most = 0;
    float sum = 0;
    for (int p = group; row < a.rows && p < a.parts; p += GROUPS) {
        sum += a.sums[(int64_t)p * a.pitch + row];
        if (TRAINING)
            most = max(most, (int)a.excess[(int64_t)p * a.pitch + row]);
    }
    shared.sum[group][lane] = sum;
    shared.most[group][lane] = most;
    if constexpr (!TRAINING)
        for (int i = 0; i < ROWS_OF_GROUP; i++) {
            int of_block = group * ROWS_OF_GROUP + i, r = blockIdx.x * ROWS + of_block;
            if (r < a.rows)
                target_logit(shared, a, r, of_block);
        }
    __syncthreads();
    if (group == 0 && row < a.rows)
        finish_row<TERMS, TRAINING>(shared, f, a, row, lane);
    if (!TRAINING)
        return;
    __syncthreads();
    for (int i = 0; i < ROWS_OF_GROUP; i++) {
        int of_block = group * ROWS_OF_GROUP + i, r = blockIdx.x * ROWS + of_block;
        if (r >= a.rows)
            break;
        if (shared.rise[of_block] > 0)
            lower_row(a, r, shared.rise[of_block]);
        __syncwarp();
        if (lane < TERMS && shared.token[lane % TERMS][of_block] >= 0)
            a.codes[(int64_t)r * a.Vp + shared.token[lane % TERMS][of_block]] =
                (uint8_t)shared.code[lane % TERMS][of_block];
    }
}

// The fraction of the base makes 2^(CODE_TOP - base) sum / share, which a code is of p (1 - t^2), a power of
// two times W cap/(4 slope) / sg.
template <int TERMS> __global__ void bases_from_sums_kernel(const LossForm f, const BasesFromSums a)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    if (row >= a.rows)
        return;
    for (int p = 0; p < a.parts; p++)
        sum += a.sums[(int64_t)p * a.pitch + row];
    Wanted<TERMS> wanted(a.targets, row);
    float scale = wanted.sum > 0 ? log2f(wanted.sum * f.steepness * f.code_factor * a.share) : 0;
    a.base[row] = log2f(sum) + SLACK + (ceilf(scale) - scale);
}

} // namespace

void bases_from_sums(Stream s, const LossForm *f, const BasesFromSums *a)
{
    const int threads = 256;
    unsigned blocks = (unsigned)ceil_div(a->rows, threads);
    if (one_term(&a->targets))
        bases_from_sums_kernel<1><<<blocks, threads, 0, s>>>(*f, *a);
    else
        bases_from_sums_kernel<MAX_TERMS><<<blocks, threads, 0, s>>>(*f, *a);
    CHECK_LAUNCH();
}

void loss_from_sums(Stream s, const LossForm *f, const SumLosses *a)
{
    if (a->rows <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(a->rows, ROWS);
    if (!a->codes)
        loss_from_sums_kernel<1, false><<<blocks, ROWS * GROUPS, 0, s>>>(*f, *a);
    else if (one_term(&a->targets))
        loss_from_sums_kernel<1, true><<<blocks, ROWS * GROUPS, 0, s>>>(*f, *a);
    else
        loss_from_sums_kernel<MAX_TERMS, true><<<blocks, ROWS * GROUPS, 0, s>>>(*f, *a);
    CHECK_LAUNCH();
}
