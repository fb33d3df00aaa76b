// The output head: logits, softcap, cross entropy and its gradient, for a few rows and some columns at a
// time.
//
// A chunk of rows passes three phases, each shared out over fixed groups of columns:
//   logits   tile by tile: product, sigmoid kept for the gradient, sum of e^z of every row
//   loss     log of the rows' sums
//   gradient tile by tile, in place of the sigmoids: dw += g^T x, and the group's part of dx = g w; then the
//   parts are added
// z lies in (0, cap), so that e^z needs no maximum to stay in range.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cpu/gemm.h"
#include "llmc/cpu/vmath.h"
#include <math.h>
#include <string.h>

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
size_t head_thread_scratch(const OpSizes *sizes) { return tile_scratch(sizes->dim); }

typedef struct {
    float *x;   // (rows, d), quantised when FP8
    float *sig; // (rows, Vp) in tiles: sigmoid, then the gradient of the logits
    float *sum; // (GROUPS, rows) of e^z
    float *lse; // (rows)
    float *dx;  // (GROUPS, rows, d); absent in evaluation
} Chunk;

static size_t chunk_floats(int rows, int d, int Vp, bool train)
{
    size_t dx = train ? GROUPS * (size_t)d : 0;
    return (size_t)rows * ((size_t)Vp + (size_t)d + GROUPS + 1 + dx) + 8 * 16;
}

size_t head_train_scratch_bytes(HeadMode mode, int N, int d, int Vp)
{
    (void)mode;
    return chunk_floats(chunk_rows(N, Vp), d, Vp, true) * sizeof(float);
}

size_t head_eval_scratch_bytes(int N, int d, int Vp)
{
    return chunk_floats(chunk_rows(N, Vp), d, Vp, false) * sizeof(float);
}

typedef struct {
    HeadMode mode;
    bool train;                                // logits and gradient rounded, gradient wanted
    float cap, inverse_slope, shift, steepest; // steepest: cap / slope
    const floatX *x, *w;
    const uint8_t *w8;
    const int32_t *targets;
    int num_targets;
    float weight[MAX_TARGETS]; // of the targets
    const int32_t *prefix;     // or NULL
    float prefix_weight;
    float *dw;
    floatX *dx;
    float *rows;                // losses, or NULL
    const uint32_t *impossible; // or NULL
    const int32_t *tokens;
    int N, d, Vp;
    float sx, sw, sg; // 1 in HEAD_BF16
} Task;

// A term of a row's loss: weight (lse - z[token]).
typedef struct {
    int32_t token;
    float weight;
} Term;
enum { MAX_TERMS = MAX_TARGETS + 1 };

// The terms of a row, fewer at the end of the sequence; returns their number.
static int terms_of(const Task *a, int row, Term term[MAX_TERMS])
{
    int most = (int)min_i64(a->num_targets, a->N - row), count = 0;
    for (int k = 0; k < most; k++) {
        if (a->targets[row + k] >= 0)
            term[count++] = (Term){a->targets[row + k], a->weight[k]};
    }
    if (a->prefix && a->prefix[row] >= 0)
        term[count++] = (Term){a->prefix[row], a->prefix_weight};
    return count;
}

// ---- operands ---------------------------------------------------------------------------------------------

size_t head_weight_bytes(HeadMode mode, int Vp, int d)
{
    return mode == HEAD_FP8 ? (size_t)Vp * (size_t)d : 0;
}

void head_quantize(Stream s, const HeadSpec *spec, void *w8, const floatX *w, int Vp, int d)
{
    OP_SCOPE(head_quantize, Vp, d);
    uint8_t *code = w8;
    float scale = head_scales(spec, d).w;
    int64_t n = (int64_t)Vp * d;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        code[i] = float_to_e4m3(x_to_float(w[i]) / scale);
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

// Sigmoids of a row's columns from `col` on whose token cannot follow the row's: those of HEAD_MASKED.
static void mask_row(const Task *a, float *columns, int col, int cols, int row)
{
    const uint32_t *bits = a->impossible + (int64_t)a->tokens[row] * (a->Vp / 32);
    for (int j = col; j < col + cols; j++) {
        if (bits[j / 32] >> j % 32 & 1)
            columns[j - col] = HEAD_MASKED / a->cap;
    }
}

// Sigmoids of one row with masked ones; returns the sum of e^z.
static float masked_row(const Task *a, float *restrict columns, int col, int cols, int row)
{
    float sum = 0, shift = a->shift, inverse_slope = a->inverse_slope, cap = a->cap;
#pragma omp simd
    for (int j = 0; j < cols; j++)
        columns[j] = sigmoid((columns[j] + shift) * inverse_slope);
    mask_row(a, columns, col, cols, row);
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < cols; j++)
        sum += fast_exp(cap * columns[j]);
    return sum;
}

// Products of one row to sigmoids; returns the sum of e^z.
static float sigmoid_row(const Task *a, float *restrict row, int cols)
{
    float sum = 0, scale = a->sx * a->sw, shift = a->shift, inverse_slope = a->inverse_slope, cap = a->cap;
    if (a->train) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            row[j] = x_to_float(float_to_x(row[j] * scale));
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < cols; j++) {
        float sig = sigmoid((row[j] + shift) * inverse_slope);
        row[j] = sig;
        sum += fast_exp(cap * sig);
    }
    return sum;
}

static void logits_group(const Task *a, const Chunk *c, int row, int rows, int group)
{
    float *w = cpu_scratch(tile_scratch(a->d)), *sums = c->sum + (int64_t)group * rows;
    int begin = group * group_cols(a->Vp), end = (int)min_i64(a->Vp, begin + group_cols(a->Vp));
    for (int i = 0; i < rows; i++)
        sums[i] = 0;
    for (int col = begin; col < end; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, end - col);
        float *tile = tile_at(c, rows, col);
        load_weight_tile(a, w, col, cols);
        gemm(rows, cols, a->d, 1, stored(c->x, a->d), transposed(w, a->d), 0, (GemmOut){tile, cols});
        for (int i = 0; i < rows; i++) {
            float *columns = tile + (int64_t)i * cols;
            sums[i] +=
                a->impossible ? masked_row(a, columns, col, cols, row + i) : sigmoid_row(a, columns, cols);
        }
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
        double sum = 0, row_loss = 0;
        for (int group = 0; group < group_count(a->Vp); group++)
            sum += c->sum[(int64_t)group * rows + i];
        double lse = log(sum);
        c->lse[i] = (float)lse;
        Term term[MAX_TERMS];
        int count = terms_of(a, row + i, term);
        for (int k = 0; k < count; k++) {
            double z = (double)a->cap * target_sigmoid(c, rows, i, term[k].token, a->Vp);
            row_loss += (double)term[k].weight * (lse - z);
        }
        loss += row_loss;
        if (a->rows)
            a->rows[row + i] = (float)row_loss;
    }
    return loss;
}

// ---- gradient ---------------------------------------------------------------------------------------------

// Gradient of a logit with softmax p and the share `wanted` of the weights: dz/dlogit = cap/slope sig (1 -
// sig).
static inline float logit_gradient(const Task *a, float p, float wanted, float sig)
{
    return x_to_float(float_to_x((p - wanted) * a->steepest * sig * (1 - sig)));
}

// Sigmoids of a row's columns from `col` on to gradients of its logits, as they enter the products.
static void gradient_row(const Task *a, float *restrict columns, int col, int cols, float lse, int row)
{
    Term term[MAX_TERMS];
    int count = terms_of(a, row, term);
    float all = 0, cap = a->cap, target_gradient[MAX_TERMS];
    for (int k = 0; k < count; k++)
        all += term[k].weight;
    for (int k = 0; k < count; k++) {
        float wanted = 0, sig = 0;
        for (int i = 0; i < count; i++) // terms of a row may have the same token
            wanted += term[i].token == term[k].token ? term[i].weight : 0;
        if (term[k].token >= col && term[k].token < col + cols)
            sig = columns[term[k].token - col];
        target_gradient[k] = logit_gradient(a, all * fast_exp(cap * sig - lse), wanted, sig);
    }
#pragma omp simd
    for (int j = 0; j < cols; j++)
        columns[j] = logit_gradient(a, all * fast_exp(cap * columns[j] - lse), 0, columns[j]);
    for (int k = 0; k < count; k++) {
        if (term[k].token >= col && term[k].token < col + cols)
            columns[term[k].token - col] = target_gradient[k];
    }
    if (a->mode != HEAD_FP8)
        return;
#pragma omp simd
    for (int j = 0; j < cols; j++)
        columns[j] = e5m2_to_float(float_to_e5m2(columns[j] / a->sg));
}

static void gradient_group(const Task *a, const Chunk *c, int row, int rows, int group)
{
    float *w = cpu_scratch(tile_scratch(a->d)), *dx = c->dx + (int64_t)group * rows * a->d;
    int d = a->d, begin = group * group_cols(a->Vp), end = (int)min_i64(a->Vp, begin + group_cols(a->Vp));
    for (int col = begin; col < end; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, end - col);
        float *tile = tile_at(c, rows, col);
        for (int i = 0; i < rows; i++)
            gradient_row(a, tile + (int64_t)i * cols, col, cols, c->lse[i], row + i);
        load_weight_tile(a, w, col, cols);
        gemm(rows, d, cols, a->sg * a->sw, stored(tile, cols), stored(w, d), col > begin ? 1 : 0,
             (GemmOut){dx, d});
        gemm(cols, d, rows, a->sx * a->sg, transposed(tile, cols), stored(c->x, d), 1,
             (GemmOut){a->dw + (int64_t)col * d, d});
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
            logits_group(a, c, row, rows, group);
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

static void run_task(const Task *a, void *scratch, float *loss)
{
    size_t most = (size_t)chunk_rows(a->N, a->Vp), d = (size_t)a->d;
    float *arena = scratch;
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

static Task task_of(const HeadLoss *h, bool train)
{
    const HeadSpec *spec = h->spec;
    Task a = {.mode = train ? h->mode : HEAD_BF16,
              .train = train,
              .cap = spec->cap,
              .inverse_slope = 1 / spec->slope,
              .shift = spec->shift,
              .steepest = spec->cap / spec->slope,
              .x = h->x,
              .w = h->w,
              .w8 = h->w8,
              .targets = h->targets,
              .num_targets = train ? h->num_targets : 1,
              .weight = {1},
              .dw = h->dw,
              .dx = h->dx,
              .rows = train ? NULL : h->rows,
              .impossible = train ? NULL : h->impossible,
              .tokens = h->tokens,
              .N = h->N,
              .d = h->d,
              .Vp = h->Vp,
              .sx = 1,
              .sw = 1,
              .sg = 1};
    assert(a.num_targets >= 1 && a.num_targets <= MAX_TARGETS);
    for (int k = 0; k < a.num_targets && train; k++)
        a.weight[k] = h->target_weight[k];
    if (train && h->prefix) {
        a.prefix = h->prefix;
        a.prefix_weight = *h->prefix_weight;
    }
    if (a.mode == HEAD_FP8) {
        HeadScales scales = head_scales(spec, h->d);
        a.sx = scales.x;
        a.sw = scales.w;
        a.sg = scales.g;
    }
    return a;
}

void head_loss_train(Stream s, const HeadLoss *h)
{
    OP_SCOPE(head_loss_train, h->N, h->d, h->Vp);
    Task a = task_of(h, true);
    run_task(&a, h->scratch, h->loss);
}

void head_loss_eval(Stream s, const HeadLoss *h)
{
    OP_SCOPE(head_loss_eval, h->N, h->d, h->Vp);
    Task a = task_of(h, false);
    run_task(&a, h->scratch, h->loss);
}

void head_logits(Stream s, const HeadSpec *spec, float *z, const floatX *x, const floatX *w, int rows, int d,
                 int Vp)
{
    OP_SCOPE(head_logits, rows, d, Vp);
    float cap = spec->cap, inverse_slope = 1 / spec->slope, shift = spec->shift;
    // Few rows: every weight is read where it is, and is not converted for a product of matrices first.
#pragma omp parallel for schedule(static) if ((int64_t)rows * d * Vp > SERIAL_MULTIPLICATIONS)
    for (int col = 0; col < Vp; col += TILE_COLS) {
        int cols = (int)min_i64(TILE_COLS, Vp - col);
        float *row = cpu_scratch((size_t)d);
        for (int i = 0; i < rows; i++) {
            float *to = z + (int64_t)i * Vp + col;
            load_row(row, x + (int64_t)i * d, d);
            for (int j = 0; j < cols; j++)
                to[j] = dot_stored(row, w + (int64_t)(col + j) * d, d);
#pragma omp simd
            for (int j = 0; j < cols; j++)
                to[j] = cap * sigmoid((to[j] + shift) * inverse_slope);
        }
    }
}
