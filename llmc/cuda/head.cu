// The output head: three products around the loss, in chunks of rows so that the logits of a batch never exist at once.
//
// With FP8 units: x, the weight and the gradient are quantised and kept plain and transposed, as the products want them. Without
// (older chips, widths that are no multiple of 16): the same quantised values, held in bf16, which represents them exactly.
#include "llmc/cuda/attention.h"
#include "llmc/cuda/gemm.cuh"
#include "llmc/cuda/head_loss.cuh"
#include <string.h>

#ifndef HEAD_CHUNK_ROWS
#define HEAD_CHUNK_ROWS 8192 // long enough that adding to the fp32 weight gradient costs little beside the product
#endif

static struct {
    int rows, eval_rows; // of a chunk
    int tokens;          // padded
    floatX *logits;      // (rows, Vp); evaluation: (eval_rows, Vp) fp32
    uint8_t *g8, *g8_turned; // (rows, Vp), (Vp, rows)
    uint8_t *x8, *x8_turned; // (tokens, d), (d, tokens); or bf16 values in x8
    floatX *tail;            // (16, d): gradient of padded rows has nowhere else to go
    float *losses;           // (tokens or eval tokens)
} head;

bool head_uses_fp8_units(int d) { return device_has_fp8() && d % FP8_ALIGN == 0; }

static float scale_of_x(int d) { return sqrtf((float)d) / 448; }
#define SCALE_OF_W 0x1p-9f
#define SCALE_OF_G (1.0f / 448)

// ---- shapes of the products ----------------------------------------------------------------------------------------------

static GemmShape fp8_shape(int m, int n, int k, cudaDataType_t type_a, cudaDataType_t type_d, bool accumulate, bool fast)
{
    GemmShape g = gemm_shape(m, n, k, false, true, type_d, accumulate); // both operands contiguous along k
    g.type_a = type_a;
    g.type_b = CUDA_R_8F_E4M3;
    g.fast_fp8 = fast;
    return g;
}

static GemmShape fp8_logits(int rows, int d, int Vp) { return fp8_shape(rows, Vp, d, CUDA_R_8F_E4M3, CUDA_R_16BF, false, true); }
static GemmShape fp8_input_gradient(int rows, int d, int Vp)
{
    return fp8_shape(rows, d, Vp, CUDA_R_8F_E5M2, CUDA_R_16BF, false, false);
}

static GemmShape fp8_weight_gradient(int rows, int d, int Vp, int tokens)
{
    GemmShape g = fp8_shape(Vp, d, rows, CUDA_R_8F_E5M2, CUDA_R_32F, true, false);
    g.ldb = tokens; // a stretch of x8_turned's columns
    return g;
}

static void tune_head(const OpSizes *z)
{
    int d = z->dim, Vp = z->vocab_padded, rows = (int)min_i64(head.rows, head.tokens); // of training: evaluation may take more
    if (z->tokens > 0 && z->fp8_head && head_uses_fp8_units(d)) {
        GemmShape shapes[] = {fp8_logits(rows, d, Vp), fp8_input_gradient(rows, d, Vp),
                              fp8_weight_gradient(rows, d, Vp, head.tokens)};
        for (int i = 0; i < 3; i++) gemm_tune(&shapes[i]);
    } else if (z->tokens > 0) {
        GemmShape shapes[] = {gemm_shape(rows, Vp, d, false, true, CUDA_R_16BF, false),
                              gemm_shape(rows, d, Vp, false, false, CUDA_R_16BF, false),
                              gemm_shape(Vp, d, rows, true, false, CUDA_R_32F, true)};
        for (int i = 0; i < 3; i++) gemm_tune(&shapes[i]);
    }
    if (z->eval_tokens >= head.eval_rows) {
        GemmShape eval = gemm_shape(head.eval_rows, Vp, d, false, true, CUDA_R_32F, false);
        gemm_tune(&eval);
    }
}

void head_reserve(const OpSizes *z)
{
    size_t d = (size_t)z->dim, Vp = (size_t)z->vocab_padded;
    int most = (int)max_i64(max_i64(z->tokens, z->eval_tokens), 1);
    bool units = z->tokens > 0 && z->fp8_head && head_uses_fp8_units(z->dim);
    head.tokens = (int)round_up(max_i64(z->tokens, 1), FP8_ALIGN);
    head.rows = (int)min_i64(HEAD_CHUNK_ROWS, round_up(most, FP8_ALIGN));
    head.eval_rows = (int)max_i64(1, head.rows / 2);
    size_t cells = (size_t)head.rows * Vp;
    head.logits = (floatX *)device_alloc(cells * sizeof(floatX), "head: logits of a chunk of rows");
    head.losses = (float *)device_alloc((size_t)most * sizeof(float), "head: losses of tokens");
    head.tail = (floatX *)device_alloc(FP8_ALIGN * d * sizeof(floatX), "head: padding");
    if (z->tokens > 0 && z->fp8_head)
        head.x8 = (uint8_t *)device_alloc((size_t)head.tokens * d * (units ? 1 : sizeof(floatX)), "head: quantised input");
    if (units) {
        head.x8_turned = (uint8_t *)device_alloc((size_t)head.tokens * d, "head: quantised input");
        head.g8 = (uint8_t *)device_alloc(cells, "head: quantised gradient of a chunk");
        head.g8_turned = (uint8_t *)device_alloc(cells, "head: quantised gradient of a chunk");
    }
    tune_head(z);
}

void *head_idle_memory(size_t *bytes)
{
    *bytes = head.logits ? (size_t)head.rows * (size_t)device_state.sizes.vocab_padded * sizeof(floatX) : 0;
    *bytes -= attention_borrowed_bytes(); // at its end
    return head.logits;
}

void head_close(void)
{
    void *memory[] = {head.logits, head.losses, head.tail, head.x8, head.x8_turned, head.g8, head.g8_turned};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) device_free(memory[i]);
    memset(&head, 0, sizeof head);
}

static void check_reserved(int N, int limit, int Vp)
{
    if (!head.logits || N > limit || Vp > device_state.sizes.vocab_padded)
        fatal(EXIT_BAD_INPUT, "the head was asked for %d tokens and %d columns, backend_reserve set aside %d and %d", N, Vp,
              limit, device_state.sizes.vocab_padded);
}

// ---- the weight ----------------------------------------------------------------------------------------------------------

// FP8 units: (Vp, d) codes and their transpose. Else (Vp, d) bf16 values: as large.
size_t head_weight_bytes(HeadMode mode, int Vp, int d) { return mode == HEAD_FP8 ? (size_t)2 * (size_t)Vp * (size_t)d : 0; }

static bool weight_in_fp8(int Vp, int d) { return head_uses_fp8_units(d) && Vp % FP8_ALIGN == 0; }

void head_quantize(Stream s, void *w8, const floatX *w, int Vp, int d)
{
    uint8_t *codes = (uint8_t *)w8;
    if (weight_in_fp8(Vp, d)) fp8_quantize(s, codes, codes + (size_t)Vp * (size_t)d, w, SCALE_OF_W, Vp, Vp, d);
    else fp8_round(s, (floatX *)w8, w, SCALE_OF_W, (int64_t)Vp * d);
}

// ---- training ------------------------------------------------------------------------------------------------------------

typedef struct {
    floatX *dx;
    float *dw;
    const floatX *x, *w; // bf16, or quantised values in bf16
    const uint8_t *w8;
    const int32_t *targets;
    int d, Vp, tokens; // tokens padded
} Task;

// bf16 products. scale_*: what an element of x, w and of the gradient stands for.
static void chunk_in_bf16(Stream s, const Task *t, GradientForm form, int row, int rows, float scale_x, float scale_w,
                          float scale_g)
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

// FP8 products want extents of whole sixteens: the last rows of the last chunk are made up with zeros.
static void chunk_in_fp8(Stream s, const Task *t, int row, int rows)
{
    int d = t->d, Vp = t->Vp, padded = (int)round_up(rows, FP8_ALIGN), whole = rows / FP8_ALIGN * FP8_ALIGN;
    float sx = scale_of_x(d), sw = SCALE_OF_W, sg = SCALE_OF_G;
    const uint8_t *w8_turned = t->w8 + (size_t)Vp * (size_t)d;
    GemmShape logits = fp8_logits(padded, d, Vp), dx = fp8_input_gradient(whole, d, Vp),
              rest = fp8_input_gradient(FP8_ALIGN, d, Vp);
    GemmShape dw = fp8_weight_gradient(padded, d, Vp, t->tokens);
    gemm(s, &logits, head.logits, head.x8 + (int64_t)row * d, t->w8, NULL, sx * sw);
    loss_gradient_rows(s, GRADIENT_E5M2, head.losses + row, head.logits, head.g8, t->targets + row, rows, padded, Vp);
    fp8_transpose(s, head.g8_turned, head.g8, padded, Vp);
    gemm(s, &dx, t->dx + (int64_t)row * d, head.g8, w8_turned, NULL, sg * sw);
    if (whole < rows) {
        gemm(s, &rest, head.tail, head.g8 + (int64_t)whole * Vp, w8_turned, NULL, sg * sw);
        copy_on_device(s, t->dx + (int64_t)(row + whole) * d, head.tail, (size_t)(rows - whole) * (size_t)d * sizeof(floatX));
    }
    gemm(s, &dw, t->dw, head.g8_turned, head.x8_turned + row, t->dw, sx * sg);
}

void head_loss_train(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x, const floatX *w,
                     const void *w8, const int32_t *targets, int N, int d, int Vp)
{
    if (N <= 0) return;
    check_reserved(N, head.tokens, Vp);
    if (mode == HEAD_FP8 && !head.x8) fatal(EXIT_BAD_INPUT, "the FP8 head was not reserved");
    bool units = mode == HEAD_FP8 && weight_in_fp8(Vp, d);
    Task t = {dx, dw, x, w, (const uint8_t *)w8, targets, d, Vp, (int)round_up(N, FP8_ALIGN)};
    float sx = scale_of_x(d);
    if (units) {
        fp8_quantize(s, head.x8, head.x8_turned, x, sx, N, t.tokens, d);
    } else if (mode == HEAD_FP8) {
        fp8_round(s, (floatX *)head.x8, x, sx, (int64_t)N * d);
        t.x = (const floatX *)head.x8;
        t.w = (const floatX *)w8;
    }
    for (int row = 0; row < N; row += head.rows) {
        int rows = (int)min_i64(head.rows, N - row);
        if (units) chunk_in_fp8(s, &t, row, rows);
        else if (mode == HEAD_FP8) chunk_in_bf16(s, &t, GRADIENT_E5M2_AS_BF16, row, rows, sx, SCALE_OF_W, SCALE_OF_G);
        else chunk_in_bf16(s, &t, GRADIENT_BF16, row, rows, 1, 1, 1);
    }
    sum_in_order(s, loss, head.losses, N);
}

// ---- evaluation ----------------------------------------------------------------------------------------------------------

void head_loss_eval(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N, int d, int Vp)
{
    if (N <= 0) return;
    check_reserved(N, (int)max_i64(device_state.sizes.tokens, device_state.sizes.eval_tokens), Vp);
    for (int row = 0; row < N; row += head.eval_rows) {
        int rows = (int)min_i64(head.eval_rows, N - row);
        GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
        gemm(s, &g, head.logits, x + (int64_t)row * d, w, NULL, 1);
        loss_rows(s, head.losses + row, (const float *)head.logits, targets + row, rows, Vp);
    }
    sum_in_order(s, loss, head.losses, N);
}

void head_logits(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp)
{
    if (rows <= 0) return;
    GemmShape g = gemm_shape(rows, Vp, d, false, true, CUDA_R_32F, false);
    gemm(s, &g, z, x, w, NULL, 1);
    softcap(s, z, (int64_t)rows * Vp);
}
