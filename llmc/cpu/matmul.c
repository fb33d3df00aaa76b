// Products of floatX matrices, and of e4m3 codes. Tiles are converted to fp32 in the thread's scratch,
// multiplied there, and stored once.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cpu/gemm.h"
#include <math.h>

// A tile is ROWS x cols of the result, its sum taken DEPTH at a time; cols * depth <= WEIGHT_TILE keeps the
// converted weight in the second-level cache.
enum { MAX_ROWS = 128, DEPTH = 512, WEIGHT_TILE = 1 << 16, MAX_COLS = 1024 };
// Of the weight gradient: rows, columns, and tokens at a time.
enum { GRAD_ROWS = 128, GRAD_COLS = 128, GRAD_TOKENS = 512 };

static size_t product_scratch(void) { return MAX_ROWS * DEPTH + WEIGHT_TILE + MAX_ROWS * MAX_COLS; }
static size_t grad_scratch(void) { return GRAD_TOKENS * (GRAD_ROWS + GRAD_COLS); }

size_t matmul_scratch(void)
{
    return product_scratch() > grad_scratch() ? product_scratch() : grad_scratch();
}

// ---- y = epilogue(x op(w)) --------------------------------------------------------------------------------

typedef enum { STORE, ADD, RELU2, ROUNDED_RELU2, RELU2_GRADIENT, RELU2_CODES, RELU2_GRADIENT_CODES } Epilogue;

typedef struct {
    floatX *y;           // (planes, N, out)
    const floatX *x;     // (N, in)
    const floatX *w;     // (planes, out, in) when transposed, else (in, out)
    const floatX *extra; // (N, out): what ADD adds, or the activation whose gradient RELU2_GRADIENT takes
    bool transposed;
    Epilogue epilogue;
    int N, in, out, planes;
    const float *alpha;    // (1) factor of the sums; NULL: 1
    const Fp8Product *fp8; // the operands as codes, in the place of x and w; else NULL
    // Of the last two epilogues: the result, in the place of y, and the activation whose gradient is taken.
    const Codes *codes;
    const uint8_t *y8; // (N, out)
    const float *scale_y;
} Work;

static void round_row(float *restrict c, int cols) // to what floatX holds
{
#pragma omp simd
    for (int j = 0; j < cols; j++)
        c[j] = x_to_float(float_to_x(c[j]));
}

static void relu2_row(float *restrict c, int cols)
{
#pragma omp simd
    for (int j = 0; j < cols; j++) {
        float r = c[j] < 0 ? 0 : c[j]; // NaN passes
        c[j] = r * r;
    }
}

static void finish_row(Epilogue epilogue, floatX *y, const floatX *extra, float *restrict c, int cols)
{
    if (epilogue == ADD) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            c[j] += x_to_float(extra[j]);
    } else if (epilogue == RELU2 || epilogue == ROUNDED_RELU2) {
        if (epilogue == ROUNDED_RELU2)
            round_row(c, cols);
        relu2_row(c, cols);
    } else if (epilogue == RELU2_GRADIENT) {
        round_row(c, cols);
#pragma omp simd
        for (int j = 0; j < cols; j++)
            c[j] *= 2 * sqrtf(x_to_float(extra[j]));
    }
    store_row(y, c, cols);
}

// Columns from `col` on of a row of the result, to codes; returns the largest magnitude, as bits.
static uint32_t finish_codes(const Work *p, int row, int col, float *restrict c, int cols)
{
    const Codes *to = p->codes;
    int64_t at = (int64_t)row * p->out + col;
    uint32_t most = 0;
    round_row(c, cols);
    if (p->epilogue == RELU2_CODES) {
        relu2_row(c, cols);
    } else {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            c[j] *= 2 * x_to_float(float_to_x(sqrtf(e4m3_to_float(p->y8[at + j]) * *p->scale_y)));
    }
    round_row(c, cols);
    for (int j = 0; j < cols; j++) {
        uint32_t bits = fp8_bits(c[j]) & 0x7fffffffu;
        most = bits > most ? bits : most;
        to->codes[at + j] = float_to_e4m3(c[j] / *to->scale);
        if (to->transposed)
            to->transposed[(int64_t)(col + j) * p->N + row] = to->codes[at + j];
    }
    return most;
}

static void load_codes(float *restrict to, const uint8_t *from, int rows, int cols, int64_t pitch)
{
    for (int r = 0; r < rows; r++) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            to[(int64_t)r * cols + j] = e4m3_to_float(from[r * pitch + j]);
    }
}

static float product_scale(const Work *p)
{
    const Fp8Product *f = p->fp8;
    if (!f)
        return p->alpha ? *p->alpha : 1;
    return *f->scale_x * (f->alpha ? *f->scale_w * *f->alpha : *f->scale_w);
}

// Returns the largest magnitude of what became codes, as bits.
static uint32_t product_tile(const Work *p, int plane, int row, int rows, int col, int cols)
{
    float *arena = cpu_scratch(product_scratch());
    float *x = scratch_take(&arena, MAX_ROWS * DEPTH), *w = scratch_take(&arena, WEIGHT_TILE), *c = arena;
    const floatX *plane_w = p->fp8 ? NULL : p->w + (int64_t)plane * p->in * p->out;
    float scale = product_scale(p);
    uint32_t most = 0;
    for (int k = 0; k < p->in; k += DEPTH) {
        int depth = (int)min_i64(DEPTH, p->in - k);
        if (p->fp8)
            load_codes(x, p->fp8->x8 + (int64_t)row * p->in + k, rows, depth, p->in);
        else
            load_block(x, p->x + (int64_t)row * p->in + k, rows, depth, p->in);
        if (p->fp8)
            load_codes(w, p->fp8->w8 + (int64_t)col * p->in + k, cols, depth, p->in);
        else if (p->transposed)
            load_block(w, plane_w + (int64_t)col * p->in + k, cols, depth, p->in);
        else
            load_block(w, plane_w + (int64_t)k * p->out + col, depth, cols, p->out);
        gemm(rows, cols, depth, scale, stored(x, depth),
             p->transposed ? transposed(w, depth) : stored(w, cols), k ? 1 : 0, (GemmOut){c, cols});
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = (int64_t)(row + r) * p->out + col;
        if (p->codes) {
            uint32_t bits = finish_codes(p, row + r, col, c + (int64_t)r * cols, cols);
            most = bits > most ? bits : most;
            continue;
        }
        finish_row(p->epilogue, p->y + (int64_t)plane * p->N * p->out + at, p->extra ? p->extra + at : NULL,
                   c + (int64_t)r * cols, cols);
    }
    return most;
}

static void product(const Work *p)
{
    uint32_t most = 0;
    int rows = p->N > 1024 ? MAX_ROWS : 64;
    int cols = (int)min_i64(MAX_COLS, WEIGHT_TILE / min_i64(p->in, DEPTH) / 16 * 16);
    int row_tiles = (int)ceil_div(p->N, rows), col_tiles = (int)ceil_div(p->out, cols);
    int64_t multiplications = (int64_t)p->planes * p->N * p->in * p->out;
#pragma omp parallel for collapse(3) schedule(static) \
    reduction(max \
              : most) if (multiplications > SERIAL_MULTIPLICATIONS)
    for (int plane = 0; plane < p->planes; plane++)
        for (int j = 0; j < col_tiles; j++)
            for (int i = 0; i < row_tiles; i++) {
                uint32_t bits = product_tile(p, plane, i * rows, (int)min_i64(rows, p->N - i * rows),
                                             j * cols, (int)min_i64(cols, p->out - j * cols));
                most = bits > most ? bits : most;
            }
    if (p->codes && p->codes->amax && most > fp8_bits(*p->codes->amax))
        *p->codes->amax = fp8_float(most);
}

void matmul_forward(const ProductContext *c, const Product *p)
{
    OP_SCOPE(matmul_forward, p);
    assert(p->planes == 1 || (p->planes > 1 && !p->residual));
    product(&(Work){.y = p->y,
                    .x = p->x,
                    .w = p->w,
                    .extra = p->residual,
                    .transposed = true,
                    .epilogue = p->residual ? ADD : STORE,
                    .N = p->N,
                    .in = p->in,
                    .out = p->out,
                    .planes = p->planes,
                    .alpha = p->alpha});
}

void matmul_backward_input(const ProductContext *c, const InputGrad *g)
{
    OP_SCOPE(matmul_backward_input, g);
    product(&(Work){.y = g->dx,
                    .x = g->dy,
                    .w = g->w,
                    .extra = g->residual,
                    .epilogue = g->residual ? ADD : STORE,
                    .N = g->N,
                    .in = g->out,
                    .out = g->in,
                    .planes = 1});
}

void matmul_relu2_forward(const ProductContext *c, floatX *y, const floatX *x, const floatX *w, int N, int in,
                          int out)
{
    OP_SCOPE(matmul_relu2_forward, N, in, out);
    product(&(Work){.y = y, .x = x, .w = w, .epilogue = RELU2, .N = N, .in = in, .out = out, .planes = 1});
}

void matmul_relu2_backward(const ProductContext *c, floatX *dpre, const floatX *dy, const floatX *w,
                           const floatX *y, int N, int d, int F)
{
    OP_SCOPE(matmul_relu2_backward, N, d, F);
    product(&(Work){.y = dpre,
                    .x = dy,
                    .w = w,
                    .extra = y,
                    .epilogue = RELU2_GRADIENT,
                    .N = N,
                    .in = d,
                    .out = F,
                    .planes = 1});
}

void matmul_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                      const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2, p);
    product(&(Work){.y = y,
                    .transposed = true,
                    .epilogue = ROUNDED_RELU2,
                    .N = p->N,
                    .in = p->in,
                    .out = p->out,
                    .planes = 1,
                    .fp8 = p});
    quantize_e4m3(NULL, y8, y, scale_y, p->N, p->out, QUANTIZE_INVERSE, false);
    if (amax)
        amax_accumulate(NULL, amax, y, (int64_t)p->N * p->out);
}

void matmul_fp8(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual)
{
    OP_SCOPE(matmul_fp8, residual, p);
    product(&(Work){.y = out,
                    .extra = residual,
                    .transposed = true,
                    .epilogue = residual ? ADD : STORE,
                    .N = p->N,
                    .in = p->in,
                    .out = p->out,
                    .planes = 1,
                    .fp8 = p});
}

void matmul_fp8_relu2_codes(const ProductContext *c, const Codes *y, const Fp8Product *p)
{
    OP_SCOPE(matmul_fp8_relu2_codes, p);
    product(&(Work){.transposed = true,
                    .epilogue = RELU2_CODES,
                    .N = p->N,
                    .in = p->in,
                    .out = p->out,
                    .planes = 1,
                    .fp8 = p,
                    .codes = y});
}

void matmul_fp8_relu2_backward(const ProductContext *c, const Codes *dpre, const Fp8Product *p,
                               const uint8_t *y8, const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2_backward, p);
    product(&(Work){.transposed = true,
                    .epilogue = RELU2_GRADIENT_CODES,
                    .N = p->N,
                    .in = p->in,
                    .out = p->out,
                    .planes = 1,
                    .fp8 = p,
                    .codes = dpre,
                    .y8 = y8,
                    .scale_y = scale_y});
}

// ---- dw += scale a^T b ------------------------------------------------------------------------------------

typedef struct {
    const WeightGrad *g;     // its a and b are not read with
    const Fp8WeightGrad *g8; // operands as codes; else NULL
    float scale;
} GradWork;

static void weight_grad_tile(const GradWork *p, int N, int row, int rows, int col, int cols)
{
    const WeightGrad *g = p->g;
    float *arena = cpu_scratch(grad_scratch());
    float *a = scratch_take(&arena, GRAD_TOKENS * GRAD_ROWS), *b = arena;
    for (int t = 0; t < N; t += GRAD_TOKENS) {
        int tokens = (int)min_i64(GRAD_TOKENS, N - t);
        if (p->g8) {
            load_codes(a, p->g8->a8 + (int64_t)row * N + t, rows, tokens, N);
            load_codes(b, p->g8->b8 + (int64_t)col * N + t, cols, tokens, N);
        } else {
            load_block(a, g->a + (int64_t)t * g->m + row, tokens, rows, g->m);
            load_block(b, g->b + (int64_t)t * g->n + col, tokens, cols, g->n);
        }
        float beta = g->fresh && t == 0 ? 0 : 1;
        gemm(rows, cols, tokens, p->scale, p->g8 ? stored(a, tokens) : transposed(a, rows),
             p->g8 ? transposed(b, tokens) : stored(b, cols), beta,
             (GemmOut){g->dw + (int64_t)row * g->n + col, g->n});
    }
}

static void weight_grad(const GradWork *p, int N)
{
    // Small matrices are cut finer, so that every thread gets some.
    const WeightGrad *g = p->g;
    int rows = g->m <= 256 ? 32 : GRAD_ROWS, cols = GRAD_COLS;
    int row_tiles = (int)ceil_div(g->m, rows), col_tiles = (int)ceil_div(g->n, cols);
#pragma omp parallel for collapse(2) schedule(static)
    for (int i = 0; i < row_tiles; i++)
        for (int j = 0; j < col_tiles; j++)
            weight_grad_tile(p, N, i * rows, (int)min_i64(rows, g->m - i * rows), j * cols,
                             (int)min_i64(cols, g->n - j * cols));
}

void matmul_weight_grads(const ProductContext *c, const WeightGrad *g, int count, int N)
{
    OP_SCOPE(matmul_weight_grads, g, count, N);
    for (int i = 0; i < count; i++)
        weight_grad(&(GradWork){&g[i], NULL, 1}, N);
}

void matmul_fp8_weight_grads(const ProductContext *c, const Fp8WeightGrad *g, int count, int N)
{
    OP_SCOPE(matmul_fp8_weight_grads, g, count, N);
    for (int i = 0; i < count; i++) {
        WeightGrad plain = {g[i].dw, NULL, NULL, g[i].m, g[i].n, g[i].fresh};
        weight_grad(&(GradWork){&plain, &g[i], *g[i].scale_a * *g[i].scale_b}, N);
    }
}

// ---- factors of weights -----------------------------------------------------------------------------------

void weight_scale_forward(Stream s, floatX *out, const floatX *w, const float *alpha, int64_t n)
{
    OP_SCOPE(weight_scale_forward, n);
    float factor = *alpha;
#pragma omp parallel for schedule(static) if (n > SERIAL_ELEMENTS)
    for (int64_t i = 0; i < n; i++)
        out[i] = float_to_x(factor * x_to_float(w[i]));
}

void weight_scale_backward(Stream s, float *dw, float *dalpha, const floatX *w, const float *alpha, int64_t n)
{
    OP_SCOPE(weight_scale_backward, n);
    double sums[PARTS];
    float factor = *alpha;
#pragma omp parallel for schedule(static) if (n > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++) {
        int64_t begin = n * part / PARTS, end = n * (part + 1) / PARTS;
        double sum = 0;
        for (int64_t i = begin; i < end; i++) {
            sum += w ? (double)dw[i] * x_to_float(w[i]) : 0;
            dw[i] *= factor;
        }
        sums[part] = sum;
    }
    double total = 0;
    for (int part = 0; part < PARTS; part++)
        total += sums[part];
    if (dalpha)
        *dalpha += (float)total;
}
