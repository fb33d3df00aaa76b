// From logits to loss and gradient, row by row: z = cap sig((l + shift) / slope), loss = sum over the row's
// targets of weight (log sum e^z - z_target), dloss/dl_j = (W softmax_j - c_j) * cap/slope sig (1 - sig), W
// the sum of the weights, c_j of those whose target is j.
#pragma once
#include "llmc/cuda/head/fp8.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

static const float LOG2E = 1.4426950408889634f;
enum { FRACTIONS = 65534 }; // see pack_halves

// The constants of a HeadSpec as kernels use them; an argument of every kernel.
typedef struct {
    float cap, slope, shift;
    float exp_scale, exp_shift;   // (l + shift) / slope = (l exp_scale + exp_shift) / log2 e
    float tanh_scale, tanh_shift; // half of it = l tanh_scale + tanh_shift
    float cap_log2;               // cap log2 e
    float steepness;              // cap / slope
    float masked;                 // e^(HEAD_MASKED - cap)
    float code_factor;            // 1/sg of the e5m2 codes
    float code_log2;              // log2(steepness code_factor / FRACTIONS^2)
} LossForm;

static inline LossForm loss_form(const HeadSpec *spec, int d)
{
    LossForm f = {
        .cap = spec->cap,
        .slope = spec->slope,
        .shift = spec->shift,
        .exp_scale = LOG2E / spec->slope,
        .exp_shift = spec->shift * LOG2E / spec->slope,
        .tanh_scale = 0.5f / spec->slope,
        .tanh_shift = 0.5f * spec->shift / spec->slope,
        .cap_log2 = spec->cap * LOG2E,
        .steepness = spec->cap / spec->slope,
        .masked = expf(HEAD_MASKED - spec->cap),
        .code_factor = 1 / head_scales(spec, d).g,
    };
    f.code_log2 = (float)log2((double)f.steepness * (double)f.code_factor / ((double)FRACTIONS * FRACTIONS));
    return f;
}

// The terms of the loss of a chunk of rows: row r has the targets of rows r to r + count - 1, as far as there
// are `left` rows, and the prefix of its own.
typedef struct {
    const int32_t *targets; // (left), of the chunk's first row on
    const float *weight;    // (count) device; NULL: 1
    int count, left;
    const int32_t *prefix;      // (left) token or -1; NULL: none
    const float *prefix_weight; // (1)
} RowTargets;
enum { MAX_TERMS = MAX_TARGETS + 1 };

// What evaluation leaves out of a chunk of rows, as HeadLoss has it.
typedef struct {
    const uint32_t *impossible; // (vocabulary, words), or NULL
    const int32_t *tokens;      // of the chunk's first row on
    int words;                  // of a row: vocabulary / 32
} RowMask;

// Word `word` of a row's bits.
static __device__ __forceinline__ uint32_t mask_word(const RowMask &m, int row, int word)
{
    return __ldg(m.impossible + (int64_t)__ldg(m.tokens + row) * m.words + word);
}

// Whether a row of evaluation leaves its own target out.
static __device__ __forceinline__ bool target_is_masked(const RowMask &m, int row, int target)
{
    return m.impossible && mask_word(m, row, target / 32) >> target % 32 & 1;
}

// Kernels are compiled for one target and for MAX_TERMS, of which the last is the prefix.
static inline bool one_term(const RowTargets *t) { return t->count == 1 && !t->prefix; }

// Token of term k of a row; negative: it has none.
template <int TERMS> static __device__ __forceinline__ int term_token(const RowTargets &t, int row, int k)
{
    if (TERMS > 1 && k == TERMS - 1)
        return t.prefix ? __ldg(t.prefix + row) : -1;
    return k < t.count && row + k < t.left ? __ldg(t.targets + row + k) : -1;
}

// The terms of one row, in registers; those that it does not have are negative with weight 0.
template <int TERMS> struct Wanted {
    int token[TERMS];
    float weight[TERMS];
    float sum; // of the weights
    __device__ __forceinline__ Wanted(const RowTargets &t, int row)
    {
        sum = 0;
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            const float *from = TERMS > 1 && k == TERMS - 1 ? t.prefix_weight
                                : t.weight                  ? t.weight + k
                                                            : NULL;
            token[k] = term_token<TERMS>(t, row, k);
            weight[k] = token[k] < 0 ? 0 : from ? __ldg(from) : 1;
            sum += weight[k];
        }
    }
};

// (1 - t)/2 of eight t in [-1, 1], in 16 bits each: 1 + FRACTIONS (1 - t)/2. 2^23 + x puts the integer part
// of x into the low bits, rounded.
static __device__ __forceinline__ uint4 pack_halves(const float (&t)[8])
{
    uint32_t w[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        w[k] = __float_as_uint(fmaf(t[k], -FRACTIONS / 2, 8388608 + 1 + FRACTIONS / 2));
    return make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                      __byte_perm(w[4], w[5], 0x5410), __byte_perm(w[6], w[7], 0x5410));
}
// FRACTIONS times the numbers.
static __device__ __forceinline__ void unpack_fractions(uint4 u, float *f)
{
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = __uint_as_float(__byte_perm(w[k / 2], 0x4b000000, k % 2 ? 0x7632 : 0x7610)) - 8388609;
}

// e^(z - cap) from t = tanh((l + shift) / slope / 2): z - cap = cap (t - 1) / 2.
static __device__ __forceinline__ float exp_minus_cap(float t, const LossForm &f)
{
    return sm80::exp2_approx(fmaf(t, 0.5f * f.cap_log2, -0.5f * f.cap_log2));
}

// Sum of e^(z - cap) of eight logits in units of `unit`, in training: sig(x) = (1 + t) / 2 with the
// hardware's t = tanh(x / 2), good to 2^-11 of t. packed: 1 - sig.
static __device__ __forceinline__ float exp_sum_fast(float (&s)[8], float unit, const LossForm &f,
                                                     uint4 *packed)
{
    float part = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        s[i] = sm80::tanh_approx(fmaf(s[i], unit * f.tanh_scale, f.tanh_shift));
#pragma unroll
    for (int i = 0; i < 8; i++)
        part += exp_minus_cap(s[i], f);
    *packed = pack_halves(s);
    return part;
}

// 1 - sig of a logit, in full precision.
static __device__ __forceinline__ float one_minus_sigmoid(const LossForm &f, float logit)
{
    return 1 / (1 + expf((logit + f.shift) / f.slope));
}

// Code of a target's gradient. wanted: the sum of the weights whose target it is
static __device__ __forceinline__ float target_code(const LossForm &f, float one_minus_sigmoid, float norm,
                                                    float weights, float wanted)
{
    float p = exp2f(-f.cap_log2 * one_minus_sigmoid - norm);
    return f.code_factor * (weights * p - wanted) * f.steepness * one_minus_sigmoid * (1 - one_minus_sigmoid);
}

typedef enum {
    GRADIENT_BF16,         // in place of the logits
    GRADIENT_E5M2,         // to `codes`: e5m2(g / sg)
    GRADIENT_E5M2_AS_BF16, // the values of those codes, in place of the logits
} GradientForm;

typedef struct {
    GradientForm form;
    float *losses;  // (rows) out
    floatX *logits; // (rows_padded, Vp) in/out
    uint8_t *codes; // (rows_padded, Vp) out, for GRADIENT_E5M2
    RowTargets targets;
    int rows, rows_padded, Vp; // rows from `rows` to rows_padded get zero gradient
} LossGradient;
void loss_gradient_rows(Stream s, const LossForm *f, const LossGradient *a);
// Of one target, with weight 1: evaluation.
typedef struct {
    float *losses;       // (rows) out
    const float *logits; // (rows, Vp)
    const int32_t *targets;
    RowMask mask;
    int rows, Vp;
} LossRows;
void loss_rows(Stream s, const LossForm *f, const LossRows *a);

// Bases of rows' codes from the sums of their first parts (sm90_head_gradient.cuh).
typedef struct {
    float *base;       // (rows) out
    const float *sums; // (parts, pitch)
    RowTargets targets;
    float share; // of all columns
    int parts, pitch, rows;
} BasesFromSums;
void bases_from_sums(Stream s, const LossForm *f, const BasesFromSums *a);

// Losses of rows from the sums of sm90_head_logits.cuh, and in training what turns its codes into the
// gradient (sm90_head_gradient.cuh).
typedef struct {
    float *losses;       // (rows) out
    const float *sums;   // (parts, pitch)
    const floatX *x, *w; // (rows, d), (Vp, d); evaluation
    RowTargets targets;
    RowMask mask; // evaluation
    int parts, pitch, rows, d, Vp;
    float scale_x, scale_w; // logit = scale_x scale_w * sum of products
    // Training; codes NULL: evaluation.
    const float *target_logits; // (MAX_TERMS, pitch) of sm90_target_logits
    uint8_t *codes;             // (rows, Vp) in/out
    const uint8_t *excess;      // (parts, pitch)
    const float *base;          // (rows)
    float *dx_factors;          // (rows) out, scale_w in them
    float *x_factors;           // (rows) out, at most 1
    float *dw_factor;           // (1) out, scale_x in it
} SumLosses;
void loss_from_sums(Stream s, const LossForm *f, const SumLosses *a);
// z = cap sig((z + shift) / slope), in place.  n elements
void softcap(Stream s, const LossForm *f, float *z, int64_t n);
// out (1) = sum of x (n), in a fixed order
void sum_in_order(Stream s, float *out, const float *x, int n);
