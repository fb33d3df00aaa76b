// The output head: three GEMMs and the loss, in chunks of rows, so that the logits of a whole batch never
// exist at once.
//
// FP8: x, the weight and the gradient are quantised and stored plain and transposed, as FP8 GEMMs need them.
// Logits come from sm90_head_logits.cuh where it fits, else from cuBLASLt. Without FP8 units (older GPUs,
// widths that are no multiple of 16) the same quantised values are kept in bf16, which represents them
// exactly.
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/head/sm90_head_logits.cuh"
#include <string.h>

#ifndef HEAD_CHUNK_ROWS
#define HEAD_CHUNK_ROWS \
    8192 // long enough that adding to the fp32 weight gradient costs little beside the product
#endif
#ifndef HEAD_LOGIT_ROWS
#define HEAD_LOGIT_ROWS \
    4096 // of a chunk, whose logits exist at a time: half the memory of the next size, 1% more time
#endif
enum { EVAL_ROWS = 8192, FP32_EVAL_ROWS = 4096 }; // of a chunk whose logits do not exist; do, in fp32

static struct {
    int rows, logit_rows, eval_rows; // of a chunk; of it with logits at a time; of a chunk of evaluation
    int tokens;                      // padded
    floatX
        *logits; // (logit_rows, Vp), or as many fractions; evaluation through cuBLASLt: (eval_rows, Vp) fp32
    uint8_t *g8, *g8_transposed; // (rows, Vp), (Vp, rows); behind the logits
    size_t idle_bytes;           // of logits and gradient
    uint8_t *x8, *x8_transposed; // (tokens, d), (d, tokens); or bf16 values in x8
    floatX *tail;                // (16, d): gradient of padded rows has nowhere else to go
    float *losses;               // (tokens or eval tokens)
    float *sums; // sm90_head_logits.cuh: (parts, pitch), (pitch) target logits, (pitch, 2) factors
} head;

// FP8 products on the tensor cores; else the same values in bf16.
static bool head_uses_fp8_units(int d) { return device_has_fp8() && d % FP8_ALIGN == 0; }

static float scale_of_x(int d) { return sqrtf((float)d) / 448; }
#define SCALE_OF_W 0x1p-9f
#define SCALE_OF_G (1.0f / 448)

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

static void tune_head(const OpSizes *z, bool units)
{
    int d = z->dim, Vp = z->vocab_padded, rows = head.rows;
    if (units) {
        GemmShape shapes[] = {fp8_input_gradient(rows, d, Vp), fp8_weight_gradient(rows, d, Vp, head.tokens),
                              fp8_logits(head.logit_rows, d, Vp)};
        for (int i = 0; i < (sm90_head_fits(HEAD_FP8, d, Vp) ? 2 : 3); i++)
            gemm_tune(&shapes[i]);
    } else if (rows) {
        GemmShape shapes[] = {gemm_shape(rows, Vp, d, false, true, CUDA_R_16BF, false),
                              gemm_shape(rows, d, Vp, false, false, CUDA_R_16BF, false),
                              gemm_shape(Vp, d, rows, true, false, CUDA_R_32F, true)};
        for (int i = 0; i < 3; i++)
            gemm_tune(&shapes[i]);
    }
    if (z->eval_tokens >= head.eval_rows && !sm90_head_fits(HEAD_BF16, d, Vp)) {
        GemmShape eval = gemm_shape(head.eval_rows, Vp, d, false, true, CUDA_R_32F, false);
        gemm_tune(&eval);
    }
}

// Memory that is live only inside an op, one allocation: logits of a chunk of training or validation,
// whichever is larger, and the gradient of a chunk.
static void reserve_chunk(const OpSizes *z, bool units)
{
    int d = z->dim, Vp = z->vocab_padded;
    size_t bytes = (size_t)head.logit_rows * (size_t)Vp * sizeof(floatX),
           cells = units ? (size_t)head.rows * (size_t)Vp : 0;
    size_t eval_bytes = (size_t)head.eval_rows * (size_t)Vp * sizeof(float);
    if (!sm90_head_fits(HEAD_BF16, d, Vp) && bytes < eval_bytes)
        bytes = eval_bytes;
    bytes = (size_t)round_up((int64_t)bytes, 256);
    cells = (size_t)round_up((int64_t)cells, 256);
    head.idle_bytes = bytes + 2 * cells;
    if (head.idle_bytes)
        head.logits = (floatX *)device_alloc(head.idle_bytes, "head: logits and gradient of a chunk of rows");
    head.g8 = (uint8_t *)head.logits + bytes;
    head.g8_transposed = head.g8 + cells;
}

// Partial sums of a chunk's rows, logits of their targets and two factors a row.
static void reserve_sums(const OpSizes *z, bool units)
{
    int d = z->dim, Vp = z->vocab_padded;
    size_t eval = 0, train = 0;
    size_t eval_rows = (size_t)round_up(head.eval_rows, FP8_ALIGN);
    if (sm90_head_fits(HEAD_BF16, d, Vp))
        eval = eval_rows * (3 + (size_t)sm90_head_parts(HEAD_BF16, d, Vp));
    if (units && sm90_head_fits(HEAD_FP8, d, Vp))
        train = (size_t)head.logit_rows * (3 + (size_t)sm90_head_parts(HEAD_FP8, d, Vp));
    size_t floats = eval > train ? eval : train;
    if (floats)
        head.sums = (float *)device_alloc(floats * sizeof(float), "head: sums of a chunk of rows");
}

void head_reserve(const OpSizes *z)
{
    size_t d = (size_t)z->dim;
    int most = (int)max_i64(max_i64(z->tokens, z->eval_tokens), 1);
    bool units = z->fp8_head && z->tokens > 0 && head_uses_fp8_units(z->dim);
    sm90_head_open();
    head.tokens = (int)round_up(z->tokens, FP8_ALIGN);
    head.rows = (int)min_i64(HEAD_CHUNK_ROWS, head.tokens);
    head.logit_rows = units ? (int)min_i64(HEAD_LOGIT_ROWS, head.rows) : head.rows;
    head.eval_rows =
        (int)min_i64(sm90_head_fits(HEAD_BF16, z->dim, z->vocab_padded) ? EVAL_ROWS : FP32_EVAL_ROWS, most);
    reserve_chunk(z, units);
    reserve_sums(z, units);
    head.losses = (float *)device_alloc((size_t)most * sizeof(float), "head: losses of tokens");
    if (z->tokens > 0)
        head.tail = (floatX *)device_alloc(FP8_ALIGN * d * sizeof(floatX), "head: padding");
    if (z->tokens > 0 && z->fp8_head)
        head.x8 = (uint8_t *)device_alloc((size_t)head.tokens * d * (units ? 1 : sizeof(floatX)),
                                          "head: quantised input");
    if (units)
        head.x8_transposed = (uint8_t *)device_alloc((size_t)head.tokens * d, "head: quantised input");
    tune_head(z, units);
}

const char *head_description(void)
{
    const OpSizes *z = &device_state.sizes;
    int d = z->dim, Vp = z->vocab_padded;
    if (!z->fp8_head)
        return sm90_head_fits(HEAD_BF16, d, Vp) ? "head in bf16, own product in validation" : "head in bf16";
    if (!device_has_fp8())
        return "FP8 head emulated in bf16 (no FP8 units on this path)";
    if (!head_uses_fp8_units(d))
        return "FP8 head emulated in bf16 (the width is no multiple of 16)";
    if (sm90_head_fits(HEAD_FP8, d, Vp))
        return "FP8 head on the FP8 units, own product for the logits";
    return device_has_wgmma()
               ? "FP8 head on the FP8 units, logits by cuBLASLt (a width above 1536, or odd vocabulary)"
               : "FP8 head on the FP8 units, logits by cuBLASLt";
}

void *head_idle_memory(size_t *bytes)
{
    *bytes = head.idle_bytes;
    return head.logits;
}

void head_close(void)
{
    void *memory[] = {head.logits, head.losses, head.tail, head.x8, head.x8_transposed, head.sums};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        device_free(memory[i]);
    memset(&head, 0, sizeof head);
}

static void check_reserved(int N, int limit, int d, int Vp)
{
    const OpSizes *z = &device_state.sizes;
    if (!head.losses || N > limit || d != z->dim || Vp > z->vocab_padded)
        fatal(EXIT_BAD_INPUT,
              "the head was asked for %d tokens, %d x %d; backend_reserve set aside %d, %d x %d", N, d, Vp,
              limit, z->dim, z->vocab_padded);
}

// ---- the weight ------------------------------------------------------------------------------------------

// FP8 units: (Vp, d) codes and their transpose. Else (Vp, d) bf16 values: as large.
size_t head_weight_bytes(HeadMode mode, int Vp, int d)
{
    return mode == HEAD_FP8 ? (size_t)2 * (size_t)Vp * (size_t)d : 0;
}

static bool weight_in_fp8(int Vp, int d) { return head_uses_fp8_units(d) && Vp % FP8_ALIGN == 0; }

void head_quantize(Stream s, void *w8, const floatX *w, int Vp, int d)
{
    OP_SCOPE(head_quantize, Vp, d);
    uint8_t *codes = (uint8_t *)w8;
    if (weight_in_fp8(Vp, d))
        fp8_quantize(s, codes, codes + (size_t)Vp * (size_t)d, w, SCALE_OF_W, Vp, Vp, d,
                     sm90_head_fits(HEAD_FP8, d, Vp));
    else
        fp8_round(s, (floatX *)w8, w, SCALE_OF_W, (int64_t)Vp * d);
}

// ---- training --------------------------------------------------------------------------------------------

typedef struct {
    floatX *dx;
    float *dw;
    const floatX *x, *w; // bf16, or quantised values in bf16
    const uint8_t *w8;
    const int32_t *targets;
    int d, Vp, tokens; // tokens padded
} Task;

// bf16 products. scale_*: what an element of x, w and of the gradient stands for.
static void chunk_in_bf16(Stream s, const Task *t, GradientForm form, int row, int rows, float scale_x,
                          float scale_w, float scale_g)
{
    int d = t->d, Vp = t->Vp;
    const floatX *x = t->x + (int64_t)row * d;
    GemmShape logits = gemm_shape(rows, Vp, d, false, true, CUDA_R_16BF, false);
    GemmShape dx = gemm_shape(rows, d, Vp, false, false, CUDA_R_16BF, false);
    GemmShape dw = gemm_shape(Vp, d, rows, true, false, CUDA_R_32F, true);
    gemm(s, &logits, head.logits, x, t->w, NULL, scale_x * scale_w);
    loss_gradient_rows(s, form, head.losses + row, head.logits, NULL, t->targets + row, rows, rows, Vp);
    gemm(s, &dx, t->dx + (int64_t)row * d, head.logits, t->w, NULL, scale_g * scale_w);
    gemm(s, &dw, t->dw, head.logits, x, t->dw, scale_g * scale_x);
}

// Logits and losses by sm90_head_logits.cuh; returns the factors that the gradient needs.
static float2 *row_losses(Stream s, HeadLogits *a, float *losses)
{
    int parts = sm90_head_parts(a->mode, a->d, a->Vp);
    a->sums_pitch = (int)round_up(a->rows, FP8_ALIGN);
    a->sums = head.sums;
    a->target_logit = head.sums + (int64_t)parts * a->sums_pitch;
    float2 *factors = (float2 *)(a->target_logit + a->sums_pitch);
    sm90_head_logits(s, a);
    loss_from_sums(s, losses, factors, a->sums, parts, a->sums_pitch, a->target_logit, a->rows);
    return factors;
}

// Logits, losses and gradient of `rows` rows from `row` on, `at` rows into the chunk of `chunk` rows. Rows
// are made up to whole sixteens with zeros.
static void gradient_in_fp8(Stream s, const Task *t, int row, int rows, int at, int chunk)
{
    int d = t->d, Vp = t->Vp, padded = (int)round_up(rows, FP8_ALIGN);
    float *losses = head.losses + row, scale = scale_of_x(d) * SCALE_OF_W;
    const uint8_t *x8 = head.x8 + (int64_t)row * d;
    uint8_t *g8 = head.g8 + (int64_t)at * Vp, *g8_transposed = head.g8_transposed + at;
    if (sm90_head_fits(HEAD_FP8, d, Vp)) {
        HeadLogits a = {HEAD_FP8, (uint16_t *)head.logits, head.sums, NULL, x8,
                        t->w8,    t->targets + row,        scale,     rows, d,
                        Vp};
        float2 *factors = row_losses(s, &a, losses);
        gradient_from_one_minus_sigmoid(s, g8, g8_transposed, chunk, a.one_minus_sigmoid, factors, a.targets,
                                        rows, padded, Vp);
    } else {
        GemmShape logits = fp8_logits(padded, d, Vp);
        gemm(s, &logits, head.logits, x8, t->w8, NULL, scale);
        loss_gradient_rows(s, GRADIENT_E5M2, losses, head.logits, g8, t->targets + row, rows, padded, Vp);
        fp8_transpose(s, g8_transposed, chunk, g8, padded, Vp);
    }
}

// FP8 products want extents of whole sixteens.
static void chunk_in_fp8(Stream s, const Task *t, int row, int rows)
{
    int d = t->d, Vp = t->Vp, padded = (int)round_up(rows, FP8_ALIGN), whole = rows / FP8_ALIGN * FP8_ALIGN;
    float sx = scale_of_x(d), sw = SCALE_OF_W, sg = SCALE_OF_G;
    const uint8_t *w8_transposed = t->w8 + (size_t)Vp * (size_t)d;
    GemmShape dx = fp8_input_gradient(whole, d, Vp), tail = fp8_input_gradient(FP8_ALIGN, d, Vp);
    GemmShape dw = fp8_weight_gradient(padded, d, Vp, t->tokens);
    for (int at = 0; at < rows; at += head.logit_rows)
        gradient_in_fp8(s, t, row + at, (int)min_i64(head.logit_rows, rows - at), at, padded);
    gemm(s, &dx, t->dx + (int64_t)row * d, head.g8, w8_transposed, NULL, sg * sw);
    if (whole < rows) {
        gemm(s, &tail, head.tail, head.g8 + (int64_t)whole * Vp, w8_transposed, NULL, sg * sw);
        copy_on_device(s, t->dx + (int64_t)(row + whole) * d, head.tail,
                       (size_t)(rows - whole) * (size_t)d * sizeof(floatX));
    }
    gemm(s, &dw, t->dw, head.g8_transposed, head.x8_transposed + row, t->dw, sx * sg);
}

void head_loss_train(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x,
                     const floatX *w, const void *w8, const int32_t *targets, int N, int d, int Vp)
{
    OP_SCOPE(head_loss_train, N, d, Vp);
    if (N <= 0)
        return;
    check_reserved(N, head.tokens, d, Vp);
    if (mode == HEAD_FP8 && !head.x8)
        fatal(EXIT_BAD_INPUT, "the FP8 head was not reserved");
    bool units = mode == HEAD_FP8 && weight_in_fp8(Vp, d);
    Task t = {dx, dw, x, w, (const uint8_t *)w8, targets, d, Vp, (int)round_up(N, FP8_ALIGN)};
    float sx = scale_of_x(d);
    if (units) {
        fp8_quantize(s, head.x8, head.x8_transposed, x, sx, N, t.tokens, d, false);
    } else if (mode == HEAD_FP8) {
        fp8_round(s, (floatX *)head.x8, x, sx, (int64_t)N * d);
        t.x = (const floatX *)head.x8;
        t.w = (const floatX *)w8;
    }
    int step = units ? head.rows : head.logit_rows;
    for (int row = 0; row < N; row += step) {
        int rows = (int)min_i64(step, N - row);
        if (units)
            chunk_in_fp8(s, &t, row, rows);
        else if (mode == HEAD_FP8)
            chunk_in_bf16(s, &t, GRADIENT_E5M2_AS_BF16, row, rows, sx, SCALE_OF_W, SCALE_OF_G);
        else
            chunk_in_bf16(s, &t, GRADIENT_BF16, row, rows, 1, 1, 1);
    }
    sum_in_order(s, loss, head.losses, N);
}

// ---- evaluation ------------------------------------------------------------------------------------------

void head_loss_eval(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N,
                    int d, int Vp)
{
    OP_SCOPE(head_loss_eval, N, d, Vp);
    if (N <= 0)
        return;
    check_reserved(N, (int)max_i64(device_state.sizes.tokens, device_state.sizes.eval_tokens), d, Vp);
    for (int row = 0; row < N; row += head.eval_rows) {
        int rows = (int)min_i64(head.eval_rows, N - row);
        if (sm90_head_fits(HEAD_BF16, d, Vp)) {
            HeadLogits a = {HEAD_BF16, NULL, NULL, NULL, x + (int64_t)row * d, w, targets + row,
                            1,         rows, d,    Vp};
            row_losses(s, &a, head.losses + row);
            continue;
        }
        GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
        gemm(s, &g, head.logits, x + (int64_t)row * d, w, NULL, 1);
        loss_rows(s, head.losses + row, (const float *)head.logits, targets + row, rows, Vp);
    }
    sum_in_order(s, loss, head.losses, N);
}

void head_logits(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp)
{
    OP_SCOPE(head_logits, rows, d, Vp);
    if (rows <= 0)
        return;
    GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
    gemm(s, &g, z, x, w, NULL, 1);
    softcap(s, z, (int64_t)rows * Vp);
}
