// The output head: three GEMMs and the loss, in chunks of rows, so that the logits of a whole batch never
// exist at once.
//
// FP8: x, the weight and the gradient are quantised and stored plain and transposed, as FP8 GEMMs need them.
// Logits come from sm90_head_logits.cuh where it fits, else from cuBLASLt. Without FP8 units (older GPUs,
// widths that are no multiple of 16, products for which cuBLASLt has no algorithm) the same quantised values
// are kept in bf16, which represents them exactly.
#include "llmc/base/arena.h"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/head/sm90_head_logits.cuh"

enum {
    CHUNK_ROWS = 8192, // long enough that adding to the fp32 weight gradient costs little beside the product
    LOGIT_ROWS = 4096, // of a chunk, whose logits exist at a time: half the memory of 8192, 1% slower
    LARGE_BATCH = 49152,  // from here on twice as many of both: 1.2 GB more where activations take 15
    EVAL_ROWS = 8192,     // of a chunk whose logits do not exist
    FP32_EVAL_ROWS = 4096 // of one whose logits do, in fp32
};

static bool refused; // cuBLASLt has no algorithm for an FP8 product of head_reserve

// ---- scratch ---------------------------------------------------------------------------------------------

// Rows of a chunk; of it those whose logits exist at a time; rows of a chunk of evaluation.
static int times_base(int N) { return N >= LARGE_BATCH ? 2 : 1; }
static int chunk_rows(int N) { return (int)min_i64(times_base(N) * CHUNK_ROWS, round_up(N, FP8_ALIGN)); }
static int logit_rows(int N, bool units)
{
    return units ? (int)min_i64(times_base(N) * LOGIT_ROWS, chunk_rows(N)) : chunk_rows(N);
}

static int eval_rows(int N, int d, int Vp)
{
    return (int)min_i64(sm90_head_fits(HEAD_BF16, d, Vp) ? EVAL_ROWS : FP32_EVAL_ROWS, N);
}

// FP8 products on the tensor cores; else the same values in bf16.
static bool weight_in_fp8(int Vp, int d)
{
    return device_has_fp8() && !refused && d % FP8_ALIGN == 0 && Vp % FP8_ALIGN == 0;
}

typedef struct {
    void *logits;                // (logit_rows, Vp) bf16, or as many fractions; (eval_rows, Vp) fp32
    uint8_t *g8, *g8_transposed; // (chunk_rows, Vp), (Vp, chunk_rows)
    uint8_t *x8, *x8_transposed; // (tokens, d), (d, tokens), N padded; or bf16 values in x8
    floatX *tail;                // (16, d): gradient of padded rows has nowhere else to go
    float *losses;               // (N)
    float *sums; // sm90_head_logits.cuh: (parts, pitch), (pitch) target logits, (pitch, 2) factors, (pitch)
                 // of each further term
    size_t bytes;
} Scratch;

// Pointers into `base`; NULL: the size alone.
static Scratch train_scratch(void *base, HeadMode mode, int N, int width, int vocabulary)
{
    bool units = mode == HEAD_FP8 && weight_in_fp8(vocabulary, width);
    size_t d = (size_t)width, Vp = (size_t)vocabulary, rows = (size_t)chunk_rows(N),
           at_a_time = (size_t)logit_rows(N, units), tokens = (size_t)round_up(N, FP8_ALIGN);
    Arena a = {(char *)base, 0};
    Scratch s = {};
    s.logits = arena_take(&a, at_a_time * Vp, sizeof(floatX));
    s.losses = (float *)arena_take(&a, (size_t)N, sizeof(float));
    if (mode == HEAD_FP8)
        s.x8 = (uint8_t *)arena_take(&a, tokens * d, units ? 1 : sizeof(floatX));
    if (units) {
        s.x8_transposed = (uint8_t *)arena_take(&a, tokens * d, 1);
        s.g8 = (uint8_t *)arena_take(&a, rows * Vp, 1);
        s.g8_transposed = (uint8_t *)arena_take(&a, rows * Vp, 1);
        s.tail = (floatX *)arena_take(&a, FP8_ALIGN * d, sizeof(floatX));
    }
    if (units && sm90_head_fits(HEAD_FP8, width, vocabulary)) {
        size_t parts = (size_t)sm90_head_parts(HEAD_FP8, width, vocabulary);
        s.sums = (float *)arena_take(&a, at_a_time * (parts + 2 + MAX_TERMS), sizeof(float));
    }
    s.bytes = a.used;
    return s;
}

static Scratch eval_scratch(void *base, int N, int d, int Vp)
{
    size_t rows = (size_t)eval_rows(N, d, Vp), pitch = (size_t)round_up((int64_t)rows, FP8_ALIGN);
    Arena a = {(char *)base, 0};
    Scratch s = {};
    s.losses = (float *)arena_take(&a, (size_t)N, sizeof(float));
    if (sm90_head_fits(HEAD_BF16, d, Vp))
        s.sums = (float *)arena_take(&a, pitch * ((size_t)sm90_head_parts(HEAD_BF16, d, Vp) + 2 + MAX_TERMS),
                                     sizeof(float));
    else
        s.logits = arena_take(&a, rows * (size_t)Vp, sizeof(float));
    s.bytes = a.used;
    return s;
}

size_t head_train_scratch_bytes(HeadMode mode, int N, int d, int Vp)
{
    return train_scratch(NULL, mode, N, d, Vp).bytes;
}

size_t head_eval_scratch_bytes(int N, int d, int Vp) { return eval_scratch(NULL, N, d, Vp).bytes; }

// ---- shapes of the products ------------------------------------------------------------------------------

static GemmShape fp8_shape(int m, int n, int k, cudaDataType_t type_a, cudaDataType_t type_d, bool accumulate,
                           bool fast)
{
    GemmShape g = gemm_shape(m, n, k, false, true, type_d, accumulate); // both operands contiguous along k
    g.type_a = type_a;
    g.type_b = CUDA_R_8F_E4M3;
    g.fast_fp8 = fast;
    return g;
}

static GemmShape fp8_logits(int rows, int d, int Vp)
{
    return fp8_shape(rows, Vp, d, CUDA_R_8F_E4M3, CUDA_R_16BF, false, true);
}

static GemmShape fp8_input_gradient(int rows, int d, int Vp)
{
    return fp8_shape(rows, d, Vp, CUDA_R_8F_E5M2, CUDA_R_16BF, false, false);
}

static GemmShape fp8_weight_gradient(int rows, int d, int Vp, int tokens)
{
    GemmShape g = fp8_shape(Vp, d, rows, CUDA_R_8F_E5M2, CUDA_R_32F, true, false);
    g.ldb = tokens; // a stretch of x8_transposed's columns
    return g;
}

// For batches of N tokens.
static void reserve_training(const OpSizes *z, int N)
{
    int d = z->dim, Vp = z->vocab_padded, tokens = (int)round_up(N, FP8_ALIGN), rows = chunk_rows(tokens);
    bool units = z->fp8_head && tokens && weight_in_fp8(Vp, d);
    if (units) {
        GemmShape shapes[] = {fp8_input_gradient(rows, d, Vp), fp8_weight_gradient(rows, d, Vp, tokens),
                              fp8_logits(logit_rows(tokens, true), d, Vp)};
        for (int i = 0; i < (sm90_head_fits(HEAD_FP8, d, Vp) ? 2 : 3); i++)
            refused |= !gemm_try(&shapes[i]);
    }
    if (rows && (!units || refused)) {
        GemmShape shapes[] = {gemm_shape(rows, Vp, d, false, true, CUDA_R_16BF, false),
                              gemm_shape(rows, d, Vp, false, false, CUDA_R_16BF, false),
                              gemm_shape(Vp, d, rows, true, false, CUDA_R_32F, true)};
        for (int i = 0; i < 3; i++)
            gemm_tune(&shapes[i]);
    }
}

void head_reserve(const OpSizes *z)
{
    int d = z->dim, Vp = z->vocab_padded;
    sm90_head_open();
    refused = false;
    reserve_training(z, z->tokens);
    for (int i = 0; i < SMALLER_SIZES && z->smaller[i]; i++)
        reserve_training(z, z->smaller[i]);
    int eval = eval_rows((int)max_i64(z->tokens, z->eval_tokens), d, Vp);
    if (z->eval_tokens >= eval && !sm90_head_fits(HEAD_BF16, d, Vp)) {
        GemmShape shape = gemm_shape(eval, Vp, d, false, true, CUDA_R_32F, false);
        gemm_tune(&shape);
    }
}

const char *head_description(void)
{
    const OpSizes *z = &device_state.sizes;
    int d = z->dim, Vp = z->vocab_padded;
    if (!z->fp8_head)
        return sm90_head_fits(HEAD_BF16, d, Vp) ? "head in bf16, own product in validation" : "head in bf16";
    if (!device_has_fp8())
        return "FP8 head emulated in bf16 (no FP8 units)";
    if (refused)
        return "FP8 head emulated in bf16 (cuBLASLt has no algorithm for its products in FP8)";
    if (!weight_in_fp8(Vp, d))
        return "FP8 head emulated in bf16 (width or vocabulary are no multiples of 16)";
    if (sm90_head_fits(HEAD_FP8, d, Vp))
        return "FP8 head on the FP8 units, own product for the logits";
    return device_has_wgmma()
               ? "FP8 head on the FP8 units, logits by cuBLASLt (a width above 1536, or odd vocabulary)"
               : "FP8 head on the FP8 units, logits by cuBLASLt";
}

// ---- the weight ------------------------------------------------------------------------------------------

// FP8 units: (Vp, d) codes and their transpose. Else (Vp, d) bf16 values: as large.
size_t head_weight_bytes(HeadMode mode, int Vp, int d)
{
    return mode == HEAD_FP8 ? (size_t)2 * (size_t)Vp * (size_t)d : 0;
}

void head_quantize(Stream s, const HeadSpec *spec, void *w8, const floatX *w, int Vp, int d)
{
    OP_SCOPE(head_quantize, Vp, d);
    uint8_t *codes = (uint8_t *)w8;
    float scale = head_scales(spec, d).w;
    Fp8Quantize q = {codes, codes + (size_t)Vp * (size_t)d, w, scale, Vp, Vp,
                     d,     sm90_head_fits(HEAD_FP8, d, Vp)};
    if (weight_in_fp8(Vp, d))
        fp8_quantize(s, &q);
    else
        fp8_round(s, (floatX *)w8, w, scale, (int64_t)Vp * d);
}

// ---- training --------------------------------------------------------------------------------------------

typedef struct {
    HeadLoss a;
    LossForm form;
    HeadScales scales; // 1 in HEAD_BF16
    Scratch scratch;
    int tokens; // N padded
} Task;

static RowTargets targets_from(const Task *t, int row)
{
    const int32_t *prefix = t->a.prefix ? t->a.prefix + row : NULL;
    RowTargets r = {t->a.targets + row, t->a.target_weight, t->a.num_targets, t->a.N - row, prefix,
                    t->a.prefix_weight};
    return r;
}

// Of evaluation.
static RowMask mask_from(const Task *t, int row)
{
    RowMask m = {t->a.impossible, t->a.impossible ? t->a.tokens + row : NULL, t->a.Vp / 32};
    return m;
}

// bf16 products.
static void chunk_in_bf16(Stream s, const Task *t, GradientForm form, int row, int rows)
{
    int d = t->a.d, Vp = t->a.Vp;
    const floatX *x = t->a.x + (int64_t)row * d;
    floatX *logits = (floatX *)t->scratch.logits;
    LossGradient gradient = {form, t->scratch.losses + row, logits, NULL, targets_from(t, row), rows, rows,
                             Vp};
    GemmShape product = gemm_shape(rows, Vp, d, false, true, CUDA_R_16BF, false);
    GemmShape dx = gemm_shape(rows, d, Vp, false, false, CUDA_R_16BF, false);
    GemmShape dw = gemm_shape(Vp, d, rows, true, false, CUDA_R_32F, true);
    gemm(s, &product, logits, x, t->a.w, NULL, t->scales.x * t->scales.w);
    loss_gradient_rows(s, &t->form, &gradient);
    gemm(s, &dx, t->a.dx + (int64_t)row * d, logits, t->a.w, NULL, t->scales.g * t->scales.w);
    gemm(s, &dw, t->a.dw, logits, x, t->a.dw, t->scales.g * t->scales.x);
}

// Logits and losses of rows from `row` on by sm90_head_logits.cuh; what the gradient needs.
static SumLosses row_losses(Stream s, const Task *t, HeadMode mode, int row, int rows)
{
    int d = t->a.d, Vp = t->a.Vp, pitch = (int)round_up(rows, FP8_ALIGN),
        parts = sm90_head_parts(mode, d, Vp);
    bool fp8 = mode == HEAD_FP8;
    RowTargets targets = targets_from(t, row);
    HeadLogits a = {
        .mode = mode,
        .form = t->form,
        .one_minus_sigmoid = fp8 ? (uint16_t *)t->scratch.logits : NULL,
        .sums = t->scratch.sums,
        .target_logit = t->scratch.sums + (int64_t)parts * pitch,
        .x = fp8 ? (const void *)(t->scratch.x8 + (int64_t)row * d) : t->a.x + (int64_t)row * d,
        .w = fp8 ? t->a.w8 : t->a.w,
        .targets = targets.targets,
        .scale = t->scales.x * t->scales.w,
        .rows = rows,
        .d = d,
        .Vp = Vp,
        .sums_pitch = pitch,
        .mask = mask_from(t, row),
    };
    sm90_head_logits(s, &a);
    SumLosses l = {
        .losses = t->scratch.losses + row,
        .factors = (float2 *)(a.target_logit + pitch),
        .further_factors = a.target_logit + 3 * pitch,
        .sums = a.sums,
        .target_logit = a.target_logit,
        .one_minus_sigmoid = a.one_minus_sigmoid,
        .targets = targets,
        .mask = a.mask,
        .parts = parts,
        .pitch = pitch,
        .rows = rows,
        .Vp = Vp,
    };
    loss_from_sums(s, &t->form, &l);
    return l;
}

// Logits, losses and gradient of `rows` rows from `row` on, `at` rows into the chunk of `chunk` rows. Rows
// are made up to whole sixteens with zeros.
static void gradient_in_fp8(Stream s, const Task *t, int row, int rows, int at, int chunk)
{
    int d = t->a.d, Vp = t->a.Vp, padded = (int)round_up(rows, FP8_ALIGN);
    uint8_t *g8 = t->scratch.g8 + (int64_t)at * Vp, *g8_transposed = t->scratch.g8_transposed + at;
    if (sm90_head_fits(HEAD_FP8, d, Vp)) {
        SumLosses l = row_losses(s, t, HEAD_FP8, row, rows);
        gradient_from_one_minus_sigmoid(s, &t->form, g8, g8_transposed, chunk, &l, padded);
    } else {
        floatX *logits = (floatX *)t->scratch.logits;
        LossGradient gradient =
            {GRADIENT_E5M2, t->scratch.losses + row, logits, g8, targets_from(t, row), rows, padded, Vp};
        GemmShape product = fp8_logits(padded, d, Vp);
        gemm(s, &product, logits, t->scratch.x8 + (int64_t)row * d, t->a.w8, NULL, t->scales.x * t->scales.w);
        loss_gradient_rows(s, &t->form, &gradient);
        fp8_transpose(s, g8_transposed, chunk, g8, padded, Vp);
    }
}

// FP8 products want extents of whole sixteens.
static void chunk_in_fp8(Stream s, const Task *t, int row, int rows)
{
    int d = t->a.d, Vp = t->a.Vp, padded = (int)round_up(rows, FP8_ALIGN),
        whole = rows / FP8_ALIGN * FP8_ALIGN, step = logit_rows(t->a.N, true);
    float sx = t->scales.x, sw = t->scales.w, sg = t->scales.g;
    const uint8_t *w8_transposed = (const uint8_t *)t->a.w8 + (size_t)Vp * (size_t)d, *g8 = t->scratch.g8;
    floatX *tail_dx = t->scratch.tail;
    GemmShape dx = fp8_input_gradient(whole, d, Vp), tail = fp8_input_gradient(FP8_ALIGN, d, Vp);
    GemmShape dw = fp8_weight_gradient(padded, d, Vp, t->tokens);
    for (int at = 0; at < rows; at += step)
        gradient_in_fp8(s, t, row + at, (int)min_i64(step, rows - at), at, padded);
    gemm(s, &dx, t->a.dx + (int64_t)row * d, g8, w8_transposed, NULL, sg * sw);
    if (whole < rows) {
        gemm(s, &tail, tail_dx, g8 + (int64_t)whole * Vp, w8_transposed, NULL, sg * sw);
        copy_on_device(s, t->a.dx + (int64_t)(row + whole) * d, tail_dx,
                       (size_t)(rows - whole) * (size_t)d * sizeof(floatX));
    }
    gemm(s, &dw, t->a.dw, t->scratch.g8_transposed, t->scratch.x8_transposed + row, t->a.dw, sx * sg);
}

static Task task_of(const HeadLoss *a, HeadMode mode)
{
    Task t = {
        .a = *a,
        .form = loss_form(a->spec, a->d),
        .scales = mode == HEAD_FP8 ? head_scales(a->spec, a->d) : HeadScales{1, 1, 1},
        .tokens = (int)round_up(a->N, FP8_ALIGN),
    };
    return t;
}

void head_loss_train(Stream s, const HeadLoss *a)
{
    OP_SCOPE(head_loss_train, a->N, a->d, a->Vp);
    int N = a->N, d = a->d, Vp = a->Vp;
    if (N <= 0)
        return;
    assert(a->num_targets >= 1 && a->num_targets <= MAX_TARGETS && (uintptr_t)a->scratch % 256 == 0);
    bool fp8 = a->mode == HEAD_FP8, units = fp8 && weight_in_fp8(Vp, d);
    Task t = task_of(a, a->mode);
    t.scratch = train_scratch(a->scratch, a->mode, N, d, Vp);
    if (units) {
        Fp8Quantize q = {t.scratch.x8, t.scratch.x8_transposed, a->x, t.scales.x, N, t.tokens, d, false};
        fp8_quantize(s, &q);
    } else if (fp8) {
        fp8_round(s, (floatX *)t.scratch.x8, a->x, t.scales.x, (int64_t)N * d);
        t.a.x = (const floatX *)t.scratch.x8;
        t.a.w = (const floatX *)a->w8;
    }
    int step = chunk_rows(N);
    for (int row = 0; row < N; row += step) {
        int rows = (int)min_i64(step, N - row);
        if (units)
            chunk_in_fp8(s, &t, row, rows);
        else
            chunk_in_bf16(s, &t, fp8 ? GRADIENT_E5M2_AS_BF16 : GRADIENT_BF16, row, rows);
    }
    sum_in_order(s, a->loss, t.scratch.losses, N);
}

// ---- evaluation ------------------------------------------------------------------------------------------

void head_loss_eval(Stream s, const HeadLoss *a)
{
    OP_SCOPE(head_loss_eval, a->N, a->d, a->Vp);
    assert(!a->impossible || a->Vp % 32 == 0);
    int N = a->N, d = a->d, Vp = a->Vp, step = eval_rows(N, d, Vp);
    if (N <= 0)
        return;
    Task t = task_of(a, HEAD_BF16);
    t.a.num_targets = 1;
    t.a.target_weight = NULL;
    t.a.prefix = NULL;
    t.scratch = eval_scratch(a->scratch, N, d, Vp);
    if (a->rows)
        t.scratch.losses = a->rows;
    for (int row = 0; row < N; row += step) {
        int rows = (int)min_i64(step, N - row);
        if (sm90_head_fits(HEAD_BF16, d, Vp)) {
            row_losses(s, &t, HEAD_BF16, row, rows);
            continue;
        }
        float *logits = (float *)t.scratch.logits;
        GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
        gemm(s, &g, logits, a->x + (int64_t)row * d, a->w, NULL, 1);
        LossRows l = {t.scratch.losses + row, logits, a->targets + row, mask_from(&t, row), rows, Vp};
        loss_rows(s, &t.form, &l);
    }
    sum_in_order(s, a->loss, t.scratch.losses, N);
}

void head_logits(Stream s, const HeadSpec *spec, float *z, const floatX *x, const floatX *w, int rows, int d,
                 int Vp)
{
    OP_SCOPE(head_logits, rows, d, Vp);
    if (rows <= 0)
        return;
    LossForm form = loss_form(spec, d);
    GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
    gemm(s, &g, z, x, w, NULL, 1);
    softcap(s, &form, z, (int64_t)rows * Vp);
}
