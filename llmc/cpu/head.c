// The output head: logits, softcap, cross entropy and its gradient, for a few rows and some columns at a
// time.
//
// A chunk of rows passes three phases, each shared out over fixed groups of columns:
//   logits   tile by tile: product, sigmoid kept for the gradient, sum of e^z of every row
//   loss     log of the rows' sums
//   gradient tile by tile, in place of the sigmoids: dw += g^T x, and the group's part of dx = g w; then the
//   parts are added
// z lies in (0, 30), so that e^z needs no maximum to stay in range.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cpu/gemm.h"
#include "llmc/cpu/vmath.h"
#include <math.h>
#include <string.h>

#define CAP 30.0f
#define SLOPE 7.5f
enum { GROUPS = 32, TILE_COLS = 512, MIN_ROWS = 64, LOGIT_FLOATS = 2 << 20 };

// Rows of a chunk: as many as keep the logits in the last-level cache, but enough to pay for converting the
// weight.
static int chunk_rows(int N, int Vp)
{
    int64_t rows = max_i64(MIN_ROWS, LOGIT_FLOATS / Vp / MIN_ROWS * MIN_ROWS);
    return (int)min_i64(N, min_i64(rows, 1024));
}

static int group_cols(int Vp) { return (int)round_up(ceil_div(Vp, GROUPS), 64); }

static size_t tile_scratch(int d) { return (size_t)TILE_COLS * d; }
size_t head_scratch(const OpSizes *sizes) { return tile_scratch(sizes->dim) + (size_t)sizes->dim; }

typedef struct {
    float *x;   // (rows, d), quantised when FP8
    float *sig; // (rows, Vp) in tiles: sigmoid, then the gradient of the logits
    float *sum; // (GROUPS, rows) of e^z
    float *lse; // (rows)
    float *dx;  // (GROUPS, rows, d); absent in evaluation
} Chunk;

static size_t chunk_floats(int rows, int d, int Vp)
{
    return (size_t)rows * ((size_t)Vp + (GROUPS + 1) * ((size_t)d + 1)) + 8 * 16;
}

size_t head_shared(const OpSizes *sizes)
{
    int most = sizes->eval_tokens > sizes->tokens ? sizes->eval_tokens : sizes->tokens;
    return chunk_floats(chunk_rows(most, sizes->vocab_padded), sizes->dim, sizes->vocab_padded);
}

typedef struct {
    HeadMode mode;
    bool train; // logits and gradient rounded, gradient wanted
    const floatX *x, *w;
    const uint8_t *w8;
    const int32_t *targets;
    float *dw;
    floatX *dx;
    int N, d, Vp;
    float sx, sw, sg; // 1 in HEAD_BF16
} Task;

// ---- operands ---------------------------------------------------------------------------------------------

size_t head_weight_bytes(HeadMode mode, int Vp, int d)
{
    return mode == HEAD_FP8 ? (size_t)Vp * (size_t)d : 0;
}

void head_quantize(Stream s, void *w8, const floatX *w, int Vp, int d)
{
    OP_SCOPE(head_quantize, Vp, d);
    (void)s;
    uint8_t *code = w8;
    int64_t n = (int64_t)Vp * d;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        code[i] = float_to_e4m3(x_to_float(w[i]) * 0x1p9f);
}

static void load_weight_tile(const Task *a, float *restrict w, int col, int cols)
{
    int64_t from = (int64_t)col * a->d, n = (int64_t)cols * a->d;
    if (a->mode == HEAD_FP8) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            w[i] = e4m3_to_float(a->w8[from + i]);
    } else {
        load_row(w, a->w + from, n);
    }
}

static void load_x(const Task *a, float *restrict x, int row)
{
    load_row(x, a->x + (int64_t)row * a->d, a->d);
    if (a->mode != HEAD_FP8)
        return;
#pragma omp simd
    for (int i = 0; i < a->d; i++)
        x[i] = e4m3_to_float(float_to_e4m3(x[i] / a->sx));
}

// ---- logits and loss --------------------------------------------------------------------------------------

// Where the tile starting at `col` lies in Chunk.sig: tiles are stored one after another, each (rows, cols)
// packed.
static float *tile_at(const Chunk *c, int rows, int col) { return c->sig + (int64_t)rows * col; }

// Products of one row to sigmoids; returns the sum of e^z.
static float sigmoid_row(float *restrict row, int cols, float scale, bool round_logits)
{
    float sum = 0;
    if (round_logits) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            row[j] = x_to_float(float_to_x(row[j] * scale));
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < cols; j++) {
        float sig = sigmoid(row[j] * (1 / SLOPE));
        row[j] = sig;
        sum += fast_exp(CAP * sig);
    }
    return sum;
}

static void logits_group(const Task *a, const Chunk *c, int rows, int group)
{
    float *w = cpu_scratch(tile_scratch(a->d)), *sums = c->sum + (int64_t)group * rows;
    int begin = group * group_cols(a->Vp), end = (int)min_i64(a->Vp, begin + group_cols(a->Vp));
    for (int i = 0; i < rows; i++)
        sums[i] = 0;
    for (int col = begin; col < end; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, end - col);
        float *tile = tile_at(c, rows, col);
        load_weight_tile(a, w, col, cols);
        gemm(false, true, rows, cols, a->d, 1, c->x, a->d, w, a->d, 0, tile, cols);
        for (int i = 0; i < rows; i++)
            sums[i] += sigmoid_row(tile + (int64_t)i * cols, cols, a->sx * a->sw, a->train);
    }
}

static int group_count(int Vp) { return (int)ceil_div(Vp, group_cols(Vp)); }

// The sigmoid of one row's target: finds its tile.
static float target_sigmoid(const Chunk *c, int rows, int row, int target, int Vp)
{
    int begin = target / group_cols(Vp) * group_cols(Vp), end = (int)min_i64(Vp, begin + group_cols(Vp));
    int col = begin + (target - begin) / TILE_COLS * TILE_COLS, cols = (int)min_i64(TILE_COLS, end - col);
    return tile_at(c, rows, col)[(int64_t)row * cols + (target - col)];
}

static double chunk_loss(const Task *a, const Chunk *c, int row, int rows)
{
    double loss = 0;
    for (int i = 0; i < rows; i++) {
        double sum = 0;
        for (int group = 0; group < group_count(a->Vp); group++)
            sum += c->sum[(int64_t)group * rows + i];
        double lse = log(sum);
        c->lse[i] = (float)lse;
        loss += lse - (double)CAP * target_sigmoid(c, rows, i, a->targets[row + i], a->Vp);
    }
    return loss;
}

// ---- gradient ---------------------------------------------------------------------------------------------

// Sigmoids of one row to gradients of its logits, as they enter the products. dz/dlogit = 30/7.5 sig (1 -
// sig). target: its column in this tile, if it is here
static void gradient_row(const Task *a, float *restrict row, int cols, float lse, int target)
{
    float target_sig = target >= 0 && target < cols ? row[target] : 0;
#pragma omp simd
    for (int j = 0; j < cols; j++) {
        float sig = row[j];
        row[j] = x_to_float(float_to_x(fast_exp(CAP * sig - lse) * (CAP / SLOPE) * sig * (1 - sig)));
    }
    if (target >= 0 && target < cols) {
        float p = fast_exp(CAP * target_sig - lse);
        row[target] = x_to_float(float_to_x((p - 1) * (CAP / SLOPE) * target_sig * (1 - target_sig)));
    }
    if (a->mode != HEAD_FP8)
        return;
#pragma omp simd
    for (int j = 0; j < cols; j++)
        row[j] = e5m2_to_float(float_to_e5m2(row[j] / a->sg));
}

static void gradient_group(const Task *a, const Chunk *c, int row, int rows, int group)
{
    float *w = cpu_scratch(tile_scratch(a->d)), *dx = c->dx + (int64_t)group * rows * a->d;
    int d = a->d, begin = group * group_cols(a->Vp), end = (int)min_i64(a->Vp, begin + group_cols(a->Vp));
    for (int col = begin; col < end; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, end - col);
        float *tile = tile_at(c, rows, col);
        for (int i = 0; i < rows; i++)
            gradient_row(a, tile + (int64_t)i * cols, cols, c->lse[i], a->targets[row + i] - col);
        load_weight_tile(a, w, col, cols);
        gemm(false, false, rows, d, cols, a->sg * a->sw, tile, cols, w, d, col > begin ? 1 : 0, dx, d);
        gemm(true, false, cols, d, rows, a->sx * a->sg, tile, cols, c->x, d, 1, a->dw + (int64_t)col * d, d);
    }
}

// Adds the groups' parts of dx for one row, in order.
static void sum_dx(const Task *a, const Chunk *c, int row, int rows, int i)
{
    float *restrict sum = c->dx + (int64_t)i * a->d;
    for (int group = 1; group < group_count(a->Vp); group++) {
        const float *restrict part = c->dx + ((int64_t)group * rows + i) * a->d;
#pragma omp simd
        for (int j = 0; j < a->d; j++)
            sum[j] += part[j];
    }
    store_row(a->dx + (int64_t)(row + i) * a->d, sum, a->d);
}

// ---- all chunks -------------------------------------------------------------------------------------------

// Returns the loss, summed over the rows.
static double run_chunk(const Task *a, const Chunk *c, int row, int rows)
{
    double loss = 0;
    int groups = group_count(a->Vp);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int i = 0; i < rows; i++)
            load_x(a, c->x + (int64_t)i * a->d, row + i);
#pragma omp for schedule(dynamic, 1)
        for (int group = 0; group < groups; group++)
            logits_group(a, c, rows, group);
#pragma omp single
        loss = chunk_loss(a, c, row, rows);
        if (a->train) {
#pragma omp for schedule(dynamic, 1)
            for (int group = 0; group < groups; group++)
                gradient_group(a, c, row, rows, group);
#pragma omp for schedule(static)
            for (int i = 0; i < rows; i++)
                sum_dx(a, c, row, rows, i);
        }
    }
    return loss;
}

static void run_task(const Task *a, float *loss)
{
    size_t most = (size_t)chunk_rows(a->N, a->Vp), d = (size_t)a->d;
    float *arena = cpu_shared(chunk_floats((int)most, a->d, a->Vp));
    Chunk c;
    c.x = scratch_take(&arena, most * d);
    c.sig = scratch_take(&arena, most * (size_t)a->Vp);
    c.sum = scratch_take(&arena, GROUPS * most);
    c.lse = scratch_take(&arena, most);
    c.dx = arena;
    double total = 0;
    for (int row = 0; row < a->N; row += (int)most)
        total += run_chunk(a, &c, row, (int)min_i64((int64_t)most, a->N - row));
    *loss = (float)total;
}

void head_loss_train(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x,
                     const floatX *w, const void *w8, const int32_t *targets, int N, int d, int Vp)
{
    OP_SCOPE(head_loss_train, N, d, Vp);
    (void)s;
    Task a = {mode, true, x, w, w8, targets, dw, dx, N, d, Vp, 1, 1, 1};
    if (mode == HEAD_FP8) {
        a.sx = sqrtf((float)d) / E4M3_MAX;
        a.sw = 0x1p-9f;
        a.sg = 1 / E4M3_MAX;
    }
    run_task(&a, loss);
}

void head_loss_eval(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N,
                    int d, int Vp)
{
    OP_SCOPE(head_loss_eval, N, d, Vp);
    (void)s;
    Task a = {HEAD_BF16, false, x, w, NULL, targets, NULL, NULL, N, d, Vp, 1, 1, 1};
    run_task(&a, loss);
}

void *head_idle_memory(size_t *bytes) // threads keep what they work on in their scratch
{
    *bytes = 0;
    return NULL;
}

void head_logits(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp)
{
    OP_SCOPE(head_logits, rows, d, Vp);
    (void)s;
#pragma omp parallel for schedule(static)
    for (int col = 0; col < Vp; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, Vp - col);
        float *tile = cpu_scratch(tile_scratch(d) + (size_t)d), *row = tile + tile_scratch(d);
        load_row(tile, w + (int64_t)col * d, (int64_t)cols * d);
        for (int i = 0; i < rows; i++) {
            float *to = z + (int64_t)i * Vp + col;
            load_row(row, x + (int64_t)i * d, d);
            gemm(false, true, 1, cols, d, 1, row, d, tile, d, 0, to, cols);
#pragma omp simd
            for (int j = 0; j < cols; j++)
                to[j] = CAP * sigmoid(to[j] * (1 / SLOPE));
        }
    }
}
