// The output head: three GEMMs and the loss, in chunks of rows, so that the logits of a whole batch never
// exist at once.
//
// FP8 on Hopper: the epilogue of the logits' product stores the gradient as codes that are still to be
// scaled by row, and the two products of the gradient read them as they are (sm90_head_gradient.cuh).
// Elsewhere cuBLASLt makes bf16 logits; x, the weight and the gradient are quantised and stored plain and
// transposed, as its FP8 products need them. Without FP8 units (older GPUs, widths that are no multiple of
// 16, products for which cuBLASLt has no algorithm) the same quantised values are kept in bf16, which
// represents them exactly.
#include "llmc/base/arena.h"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/head/sm90_head_gradient.cuh"
#include "llmc/cuda/head/sm90_head_logits.cuh"

enum {
    CHUNK_ROWS = 8192, // long enough that adding to the fp32 weight gradient costs little beside the product
    LOGIT_ROWS = 4096, // of a chunk, whose logits exist at a time: half the memory of 8192, 1% slower
    CODE_ROWS = 16384, // of a chunk of codes, a byte an element: 0.8 GB
    // If the largest batch has as many, chunks of codes do: 2.5 GB where activations take 15.
    LARGE_BATCH = 49152,
    EVAL_ROWS = 8192,     // of a chunk whose logits do not exist
    FP32_EVAL_ROWS = 4096 // of one whose logits do, in fp32
};

static bool refused; // cuBLASLt has no algorithm for an FP8 product of head_reserve

// ---- scratch ---------------------------------------------------------------------------------------------

// How a batch is trained on: the forms of the head comment.
typedef enum { PRODUCTS_BF16, PRODUCTS_FP8, PRODUCTS_OF_CODES } Products;

// Rows of a chunk; of it those whose logits exist at a time.
static int chunk_rows(Products how, int N)
{
    bool large = max_i64(N, device_state.sizes.tokens) >= LARGE_BATCH;
    int most = how != PRODUCTS_OF_CODES ? CHUNK_ROWS : large ? LARGE_BATCH : CODE_ROWS;
    return (int)min_i64(most, round_up(N, FP8_ALIGN));
}

static int logit_rows(Products how, int N)
{
    return how == PRODUCTS_FP8 ? (int)min_i64(LOGIT_ROWS, chunk_rows(how, N)) : chunk_rows(how, N);
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

static Products products_of(HeadMode mode, int Vp, int d)
{
    if (mode != HEAD_FP8 || !weight_in_fp8(Vp, d))
        return PRODUCTS_BF16;
    return sm90_head_fits(HEAD_FP8, d, Vp) ? PRODUCTS_OF_CODES : PRODUCTS_FP8;
}

typedef struct {
    void *logits;           // (logit_rows, Vp) bf16; (eval_rows, Vp) fp32
    uint8_t *g8;            // (chunk_rows, Vp) e5m2; of PRODUCTS_OF_CODES, as sm90_head_gradient.cuh has them
    uint8_t *g8_transposed; // (Vp, chunk_rows)
    uint8_t *x8, *x8_transposed; // (tokens, d), N padded, or bf16 values in x8; (d, tokens), or of codes (d,
                                 // chunk_rows)
    floatX *tail;                // (16, d): gradient of padded rows has nowhere else to go
    float *losses;               // (N)
    float *sums;                 // of sm90_head_logits.cuh: (parts, pitch)
    // Of codes:
    float *target_logits;                             // (MAX_TERMS, pitch)
    uint8_t *excess;                                  // (parts, pitch)
    float *base, *dx_factors, *x_factors, *dw_factor; // (pitch) each; dw_factor (1)
    size_t bytes;
} Scratch;

static float *take_sums(Arena *a, HeadMode mode, int Vp, size_t pitch)
{
    return (float *)arena_take(a, (size_t)sm90_head_parts(mode, Vp) * pitch, sizeof(float));
}

// Pointers into `base`; NULL: the size alone.
static Scratch train_scratch(void *base, HeadMode mode, int N, int width, int vocabulary)
{
    Products how = products_of(mode, vocabulary, width);
    size_t d = (size_t)width, Vp = (size_t)vocabulary, rows = (size_t)chunk_rows(how, N),
           at_a_time = (size_t)logit_rows(how, N), tokens = (size_t)round_up(N, FP8_ALIGN);
    bool units = how != PRODUCTS_BF16;
    Arena a = {(char *)base, 0};
    Scratch s = {};
    s.losses = (float *)arena_take(&a, (size_t)N, sizeof(float));
    if (mode == HEAD_FP8)
        s.x8 = (uint8_t *)arena_take(&a, tokens * d, units ? 1 : sizeof(floatX));
    if (units)
        s.g8 = (uint8_t *)arena_take(&a, rows * Vp, 1);
    if (how == PRODUCTS_OF_CODES) {
        size_t pitch = (size_t)round_up((int64_t)rows, FP8_ALIGN);
        s.x8_transposed = (uint8_t *)arena_take(&a, d * rows, 1);
        s.sums = take_sums(&a, HEAD_FP8, vocabulary, pitch);
        s.target_logits = (float *)arena_take(&a, MAX_TERMS * pitch, sizeof(float));
        s.excess = (uint8_t *)arena_take(&a, (size_t)sm90_head_parts(HEAD_FP8, vocabulary) * pitch, 1);
        s.base = (float *)arena_take(&a, pitch, sizeof(float));
        s.dx_factors = (float *)arena_take(&a, pitch, sizeof(float));
        s.x_factors = (float *)arena_take(&a, pitch, sizeof(float));
        s.dw_factor = (float *)arena_take(&a, 1, sizeof(float));
    } else {
        s.logits = arena_take(&a, at_a_time * Vp, sizeof(floatX));
    }
    if (how == PRODUCTS_FP8) {
        s.x8_transposed = (uint8_t *)arena_take(&a, tokens * d, 1);
        s.g8_transposed = (uint8_t *)arena_take(&a, rows * Vp, 1);
        s.tail = (floatX *)arena_take(&a, FP8_ALIGN * d, sizeof(floatX));
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
        s.sums = take_sums(&a, HEAD_BF16, Vp, pitch);
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
    int d = z->dim, Vp = z->vocab_padded, tokens = (int)round_up(N, FP8_ALIGN);
    HeadMode mode = z->fp8_head ? HEAD_FP8 : HEAD_BF16;
    int rows = chunk_rows(PRODUCTS_FP8, tokens); // as many as of PRODUCTS_BF16
    if (rows && products_of(mode, Vp, d) == PRODUCTS_FP8) {
        GemmShape shapes[] = {fp8_input_gradient(rows, d, Vp), fp8_weight_gradient(rows, d, Vp, tokens),
                              fp8_logits(logit_rows(PRODUCTS_FP8, tokens), d, Vp)};
        for (int i = 0; i < 3; i++)
            refused |= !gemm_try(&shapes[i]);
    }
    if (rows && products_of(mode, Vp, d) == PRODUCTS_BF16) {
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
        return "FP8 head on the FP8 units, own products";
    return device_has_wgmma()
               ? "FP8 head on the FP8 units, products by cuBLASLt (a width above 768, or odd vocabulary)"
               : "FP8 head on the FP8 units, products by cuBLASLt";
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
    Fp8Quantize q = {.plain = codes,
                     .transposed = codes + (size_t)Vp * (size_t)d,
                     .x = w,
                     .scale = scale,
                     .rows = Vp,
                     .rows_padded = Vp,
                     .cols = d,
                     .product_order = sm90_head_fits(HEAD_FP8, d, Vp)};
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

// Bases of the rows' codes, from the first parts alone, whose sums are then made again.
static void estimate_bases(Stream s, const HeadLogits *logits, const RowTargets *targets, float *base)
{
    HeadLogits a = *logits;
    a.codes = NULL;
    a.Vp = (int)min_i64(a.Vp, ESTIMATE_PARTS * PART_COLS);
    sm90_head_logits(s, &a);
    BasesFromSums b = {.base = base,
                       .sums = a.sums,
                       .targets = *targets,
                       .share = (float)a.Vp / (float)logits->Vp,
                       .parts = sm90_head_parts(HEAD_FP8, a.Vp),
                       .pitch = a.pitch,
                       .rows = a.rows};
    bases_from_sums(s, &a.form, &b);
}

// Logits and losses of rows from `row` on by sm90_head_logits.cuh; in training codes and factors of the
// gradient, too.
static void row_losses(Stream s, const Task *t, HeadMode mode, int row, int rows, int pitch)
{
    bool fp8 = mode == HEAD_FP8;
    const Scratch *scratch = &t->scratch;
    int d = t->a.d, Vp = t->a.Vp;
    HeadLogits a = {
        .mode = mode,
        .form = t->form,
        .codes = scratch->g8,
        .excess = scratch->excess,
        .base = scratch->base,
        .sums = scratch->sums,
        .x = fp8 ? (const void *)(scratch->x8 + (int64_t)row * d) : t->a.x + (int64_t)row * d,
        .w = fp8 ? t->a.w8 : t->a.w,
        .scale = t->scales.x * t->scales.w,
        .rows = rows,
        .d = d,
        .Vp = Vp,
        .pitch = pitch,
        .mask = mask_from(t, row),
    };
    SumLosses l = {
        .losses = scratch->losses + row,
        .sums = scratch->sums,
        .x = fp8 ? NULL : (const floatX *)a.x,
        .w = fp8 ? NULL : (const floatX *)a.w,
        .targets = targets_from(t, row),
        .mask = a.mask,
        .parts = sm90_head_parts(mode, Vp),
        .pitch = pitch,
        .rows = rows,
        .d = d,
        .Vp = Vp,
        .scale_x = t->scales.x,
        .scale_w = t->scales.w,
        .target_logits = scratch->target_logits,
        .codes = scratch->g8,
        .excess = scratch->excess,
        .base = scratch->base,
        .dx_factors = scratch->dx_factors,
        .x_factors = scratch->x_factors,
        .dw_factor = scratch->dw_factor,
    };
    if (fp8) {
        estimate_bases(s, &a, &l.targets, scratch->base);
        TargetLogits of_targets =
            {scratch->target_logits, (const uint8_t *)a.x, (const uint8_t *)a.w, l.targets, rows, d, pitch};
        sm90_target_logits(s, &of_targets);
    }
    sm90_head_logits(s, &a);
    loss_from_sums(s, &t->form, &l);
}

// The transpose of the weight's codes.
static const uint8_t *w8_transposed(const Task *t)
{
    return (const uint8_t *)t->a.w8 + (size_t)t->a.Vp * (size_t)t->a.d;
}

static void chunk_of_codes(Stream s, const Task *t, int row, int rows)
{
    const Scratch *scratch = &t->scratch;
    int d = t->a.d, padded = (int)round_up(rows, FP8_ALIGN);
    row_losses(s, t, HEAD_FP8, row, rows, padded);
    Fp8Quantize q = {.transposed = scratch->x8_transposed,
                     .x = t->a.x + (int64_t)row * d,
                     .scale = t->scales.x,
                     .rows = rows,
                     .rows_padded = padded,
                     .cols = d,
                     .factors = scratch->x_factors,
                     .interleaved = true};
    fp8_quantize(s, &q);
    HeadProduct dx = {scratch->g8, w8_transposed(t), rows, d, t->a.Vp, t->a.Vp},
                dw = {scratch->g8, scratch->x8_transposed, rows, d, t->a.Vp, padded};
    sm90_head_dx(s, &dx, t->a.dx + (int64_t)row * d, scratch->dx_factors);
    sm90_head_dw(s, &dw, t->a.dw, scratch->dw_factor);
}

// Logits, losses and gradient of `rows` rows from `row` on, `at` rows into the chunk of `chunk` rows. Rows
// are made up to whole sixteens with zeros.
static void gradient_in_fp8(Stream s, const Task *t, int row, int rows, int at, int chunk)
{
    int d = t->a.d, Vp = t->a.Vp, padded = (int)round_up(rows, FP8_ALIGN);
    uint8_t *g8 = t->scratch.g8 + (int64_t)at * Vp;
    floatX *logits = (floatX *)t->scratch.logits;
    LossGradient gradient =
        {GRADIENT_E5M2, t->scratch.losses + row, logits, g8, targets_from(t, row), rows, padded, Vp};
    GemmShape product = fp8_logits(padded, d, Vp);
    gemm(s, &product, logits, t->scratch.x8 + (int64_t)row * d, t->a.w8, NULL, t->scales.x * t->scales.w);
    loss_gradient_rows(s, &t->form, &gradient);
    fp8_transpose(s, t->scratch.g8_transposed + at, chunk, g8, padded, Vp);
}

// FP8 products want extents of whole sixteens.
static void chunk_in_fp8(Stream s, const Task *t, int row, int rows)
{
    int d = t->a.d, Vp = t->a.Vp, padded = (int)round_up(rows, FP8_ALIGN),
        whole = rows / FP8_ALIGN * FP8_ALIGN, step = logit_rows(PRODUCTS_FP8, t->a.N);
    float sx = t->scales.x, sw = t->scales.w, sg = t->scales.g;
    const uint8_t *w8 = w8_transposed(t), *g8 = t->scratch.g8;
    floatX *tail_dx = t->scratch.tail;
    GemmShape dx = fp8_input_gradient(whole, d, Vp), tail = fp8_input_gradient(FP8_ALIGN, d, Vp);
    GemmShape dw = fp8_weight_gradient(padded, d, Vp, t->tokens);
    for (int at = 0; at < rows; at += step)
        gradient_in_fp8(s, t, row + at, (int)min_i64(step, rows - at), at, padded);
    gemm(s, &dx, t->a.dx + (int64_t)row * d, g8, w8, NULL, sg * sw);
    if (whole < rows) {
        gemm(s, &tail, tail_dx, g8 + (int64_t)whole * Vp, w8, NULL, sg * sw);
        copy_on_device(s, t->a.dx + (int64_t)(row + whole) * d, tail_dx,
                       (size_t)(rows - whole) * (size_t)d * sizeof(floatX));
    }
    gemm(s, &dw, t->a.dw, t->scratch.g8_transposed, t->scratch.x8_transposed + row, t->a.dw, sx * sg);
}

// x as the products want it.
static void quantize_x(Stream s, Task *t, Products how)
{
    const HeadLoss *a = &t->a;
    if (how != PRODUCTS_BF16) {
        Fp8Quantize q = {.plain = t->scratch.x8,
                         .transposed = how == PRODUCTS_FP8 ? t->scratch.x8_transposed : NULL,
                         .x = a->x,
                         .scale = t->scales.x,
                         .rows = a->N,
                         .rows_padded = t->tokens,
                         .cols = a->d};
        fp8_quantize(s, &q);
    } else if (a->mode == HEAD_FP8) {
        fp8_round(s, (floatX *)t->scratch.x8, a->x, t->scales.x, (int64_t)a->N * a->d);
        t->a.x = (const floatX *)t->scratch.x8;
        t->a.w = (const floatX *)a->w8;
    }
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
    if (a->N <= 0)
        return;
    assert(a->num_targets >= 1 && a->num_targets <= MAX_TARGETS && (uintptr_t)a->scratch % 256 == 0);
    Products how = products_of(a->mode, a->Vp, a->d);
    Task t = task_of(a, a->mode);
    t.scratch = train_scratch(a->scratch, a->mode, a->N, a->d, a->Vp);
    quantize_x(s, &t, how);
    int step = chunk_rows(how, a->N);
    for (int row = 0; row < a->N; row += step) {
        int rows = (int)min_i64(step, a->N - row);
        switch (how) {
        case PRODUCTS_OF_CODES:
            chunk_of_codes(s, &t, row, rows);
            break;
        case PRODUCTS_FP8:
            chunk_in_fp8(s, &t, row, rows);
            break;
        case PRODUCTS_BF16:
            chunk_in_bf16(s, &t, a->mode == HEAD_FP8 ? GRADIENT_E5M2_AS_BF16 : GRADIENT_BF16, row, rows);
            break;
        }
    }
    sum_in_order(s, a->loss, t.scratch.losses, a->N);
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
            row_losses(s, &t, HEAD_BF16, row, rows, (int)round_up(rows, FP8_ALIGN));
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
