// Newton-Schulz primitives on the CPU: the reference for the kernels, and what the CPU trainer runs.
//
// Every product is cut into (matrix, block of rows) items whose size depends on the shape only and which are
// computed by one thread each: the bits of a result depend neither on the number of threads nor on the batch
// it came in.
#include "llmc/cpu/cpu.h"
#include "llmc/base/common.h"
#include "llmc/base/floatx.h"
#include <math.h>
#include <string.h>
#ifdef HAVE_OPENBLAS
#include "llmc/cpu/blas.h"
#endif

enum { ROW_BLOCK = 128, TILE = 32 };

// Below so many multiply-adds or elements waking the other threads costs more than they save.
enum { MIN_PRODUCT = 1 << 17, MIN_ELEMENTS = 1 << 14 };

size_t ns_element_size(NsDtype dtype)
{
    (void)dtype;
    return sizeof(ns_real);
}

int ns_pitch(NsDtype dtype, int n, int m)
{
    (void)dtype, (void)n;
    return m;
}

size_t ns_raw_bytes(NsDtype dtype, int n, int m, int batch)
{
    (void)dtype, (void)m;
    return (size_t)batch * (size_t)n * (size_t)n * sizeof(ns_real);
}

void ns_chain_begin(NsChain *chain) { (void)chain; }
void ns_chain_end(NsChain *chain) { (void)chain; }

// The reference is composed of primitives.
bool ns_iterates(NsDtype dtype, int n, int m)
{
    (void)dtype, (void)n, (void)m;
    return false;
}

void ns_iterate(Stream s, NsDtype dtype, const NsIteration *it, const NsMatrices *x)
{
    OP_SCOPE(ns_iterate, dtype, it, x->n, x->m, x->batch);
    (void)dtype, (void)it, (void)x;
    assert(!"ns_iterates");
}

// ---- rounding ---------------------------------------------------------------------------------------------

// fp16 with subnormals, to nearest even. Branch-free, so that loops over it are vectorised.
static inline float round_to_fp16(float x)
{
    uint32_t bits, rounded, sign;
    memcpy(&bits, &x, 4);
    sign = bits & 0x80000000u;
    bits ^= sign;
    rounded = (bits + 0xfffu + ((bits >> 13) & 1)) & ~0x1fffu;
    rounded = rounded >= 0x47800000u ? 0x7f800000u : rounded; // 65536 and above
    float small; // |x| < 2^-14: a spacing of 2^-24, which is that of fp32 around 0.5
    memcpy(&small, &bits, 4);
    small = (small + 0.5f) - 0.5f;
    uint32_t small_bits;
    memcpy(&small_bits, &small, 4);
    rounded = bits < 0x38800000u ? small_bits : rounded;
    rounded = (bits > 0x7f800000u ? bits : rounded) | sign; // NaN stays
    memcpy(&x, &rounded, 4);
    return x;
}

// Rounds in place. In the exact build a double passes through fp32 first, as an accumulator would.
static void round_values(NsDtype dtype, ns_real *x, int64_t count)
{
    if (dtype == NS_BF16) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            x[i] = bf16_to_float(float_to_bf16((float)x[i]));
    } else if (dtype == NS_FP16) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            x[i] = round_to_fp16((float)x[i]);
    }
}

// ---- product of one block ---------------------------------------------------------------------------------

// c (rows, cols) = alpha a b + beta c;  a (rows, k), b (k, cols) or, when transpose_b, (cols, k)
typedef struct {
    ns_real *c;
    const ns_real *a, *b;
    int c_pitch, a_pitch, b_pitch; // from one row to the next
    bool transpose_b;
    ns_real alpha, beta;
    int rows, cols, k;
} Block;

#ifdef HAVE_OPENBLAS

static void block_product(const Block *p)
{
    CBLAS_TRANSPOSE stored = p->transpose_b ? CblasTrans : CblasNoTrans;
#ifdef FLOATX_FP32
    blas()->dgemm(CblasRowMajor, CblasNoTrans, stored, p->rows, p->cols, p->k, p->alpha, p->a, p->a_pitch,
                  p->b, p->b_pitch, p->beta, p->c, p->c_pitch);
#else
    blas()->sgemm(CblasRowMajor, CblasNoTrans, stored, p->rows, p->cols, p->k, p->alpha, p->a, p->a_pitch,
                  p->b, p->b_pitch, p->beta, p->c, p->c_pitch);
#endif
}

static void load_blas(void) { blas(); }

#else

enum { PANEL = 32, DEPTH = 128, STRIP = 4 };

// acc (strip, PANEL) += a (strip, depth) panel (depth, PANEL). `strip` is a constant after inlining: the sums
// stay in registers.
static inline void strip_product(int strip, int depth, const ns_real *a, int lda,
                                 const ns_real (*restrict panel)[PANEL], ns_real (*restrict acc)[PANEL])
{
    for (int r = 0; r < strip; r++)
        for (int j = 0; j < PANEL; j++)
            acc[r][j] = 0;
    for (int p = 0; p < depth; p++)
        for (int r = 0; r < strip; r++)
#pragma omp simd
            for (int j = 0; j < PANEL; j++)
                acc[r][j] += a[(int64_t)r * lda + p] * panel[p][j];
}

static void pack_panel(const Block *of, int p0, int depth, int j0, int width, ns_real (*panel)[PANEL])
{
    const ns_real *b = of->b;
    for (int p = 0; p < depth; p++)
        for (int j = 0; j < PANEL; j++) {
            int64_t row = p0 + p, col = j0 + j, pitch = of->b_pitch;
            panel[p][j] = j >= width ? 0 : of->transpose_b ? b[col * pitch + row] : b[row * pitch + col];
        }
}

// A panel of b is packed once for all rows.
static void block_product(const Block *of)
{
    ns_real panel[DEPTH][PANEL], acc[STRIP][PANEL];
    for (int p0 = 0; p0 < of->k; p0 += DEPTH) {
        int depth = of->k - p0 < DEPTH ? of->k - p0 : DEPTH;
        for (int j0 = 0; j0 < of->cols; j0 += PANEL) {
            int width = of->cols - j0 < PANEL ? of->cols - j0 : PANEL;
            pack_panel(of, p0, depth, j0, width, panel);
            for (int i = 0; i < of->rows; i += STRIP) {
                int strip = of->rows - i < STRIP ? of->rows - i : STRIP;
                const ns_real *from = of->a + (int64_t)i * of->a_pitch + p0;
                if (strip == STRIP)
                    strip_product(STRIP, depth, from, of->a_pitch, (const ns_real(*)[PANEL])panel, acc);
                else
                    strip_product(strip, depth, from, of->a_pitch, (const ns_real(*)[PANEL])panel, acc);
                for (int r = 0; r < strip; r++)
                    for (int j = 0; j < width; j++) {
                        ns_real *to = of->c + (int64_t)(i + r) * of->c_pitch + j0 + j;
                        ns_real old = p0 > 0 ? *to : of->beta == 0 ? 0 : of->beta * *to;
                        *to = old + of->alpha * acc[r][j];
                    }
            }
        }
    }
}

static void load_blas(void) {}

#endif

// ---- symmetric products -----------------------------------------------------------------------------------

// The tiles above the diagonal in rows [i0, i1) of c (n, n) from those below it.
static void mirror_rows(ns_real *c, int n, int i0, int i1)
{
    for (int j0 = i0; j0 < n; j0 += TILE)
        for (int i = i0; i < i1; i++)
            for (int j = j0 > i ? j0 : i + 1; j < j0 + TILE && j < n; j++)
                c[(int64_t)i * n + j] = c[(int64_t)j * n + i];
}

// c = alpha a b' + beta d on and below the diagonal, rounded and mirrored; b' = b (n, k = n), or b^T with b
// (n, k). d NULL: without it.
typedef struct {
    ns_real *c;
    const ns_real *a, *b, *d;
    bool transpose_b;
    ns_real alpha, beta;
    int n, k;
} Symmetric;

static void symmetric_product(NsDtype dtype, const Symmetric *p, int batch)
{
    int n = p->n, k = p->k;
    int64_t blocks = ceil_div(n, ROW_BLOCK), tiles = ceil_div(n, TILE), square = (int64_t)n * n,
            size = (int64_t)n * k;
    load_blas();
#pragma omp parallel if ((int64_t)batch * n * n * k >= MIN_PRODUCT)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < blocks * batch; item++) {
            int i0 = (int)(blocks - 1 - item % blocks) * ROW_BLOCK,
                i1 = (int)min_i64(n, i0 + ROW_BLOCK); // long rows first
            int64_t which = item / blocks;
            ns_real *c = p->c + which * square;
            for (int i = i0; p->d && i < i1; i++)
                memcpy(c + (int64_t)i * n, p->d + which * square + (int64_t)i * n, (size_t)i1 * sizeof *c);
            block_product(&(Block){.c = c + (int64_t)i0 * n,
                                   .a = p->a + which * size + (int64_t)i0 * k,
                                   .b = p->b + which * size,
                                   .c_pitch = n,
                                   .a_pitch = k,
                                   .b_pitch = k,
                                   .transpose_b = p->transpose_b,
                                   .alpha = p->alpha,
                                   .beta = p->d ? p->beta : 0,
                                   .rows = i1 - i0,
                                   .cols = i1,
                                   .k = k});
            for (int i = i0; i < i1; i++)
                round_values(dtype, c + (int64_t)i * n, i + 1);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < tiles * batch; item++) {
            int i0 = (int)(item % tiles) * TILE, i1 = (int)min_i64(n, i0 + TILE);
            mirror_rows(p->c + item / tiles * square, n, i0, i1);
        }
    }
}

// c = x x^T
static Symmetric gram_of(void *c, const void *x, int n, int m)
{
    return (Symmetric){.c = c, .a = x, .b = x, .transpose_b = true, .alpha = 1, .n = n, .k = m};
}

void ns_gram(NsChain *chain, void *a, const void *x, int n, int m)
{
    OP_PART(ns_gram, chain->dtype, n, m, chain->batch);
    Symmetric p = gram_of(a, x, n, m);
    symmetric_product(chain->dtype, &p, chain->batch);
}

void ns_gram_raw(NsChain *chain, void *raw, const void *x, const float *unit, int n, int m)
{
    OP_PART(ns_gram_raw, chain->dtype, n, m, chain->batch);
    (void)unit;
    Symmetric p = gram_of(raw, x, n, m);
    symmetric_product(NS_FP32, &p, chain->batch);
}

static void add_diagonal(NsDtype dtype, ns_real *q, const ns_real *z, float a, int n, int batch)
{
#pragma omp parallel for schedule(static) if ((int64_t)batch * n * n >= MIN_ELEMENTS)
    for (int64_t row = 0; row < (int64_t)n * batch; row++) {
        ns_real *to = q + row * n;
        if (q != z)
            memcpy(to, z + row * n, (size_t)n * sizeof *to);
        to[row % n] += a;
        round_values(dtype, to + row % n, 1);
    }
}

// c = alpha a b + beta d
static Symmetric product_of(const NsSymmetric *p, void *c)
{
    return (Symmetric){.c = c,
                       .a = p->a,
                       .b = p->b,
                       .d = p->beta == 0 ? NULL : p->d,
                       .alpha = p->alpha,
                       .beta = p->beta,
                       .n = p->n,
                       .k = p->n};
}

void ns_symmetric(NsChain *chain, const NsSymmetric *p)
{
    OP_PART(ns_symmetric, chain->dtype, ns_squares(p) + !!p->c + !!p->q, p->n, chain->batch);
    void *first = p->c ? p->c : p->q;
    Symmetric product = product_of(p, first);
    symmetric_product(chain->dtype, &product, chain->batch);
    if (p->q)
        add_diagonal(chain->dtype, p->q, first, p->diagonal, p->n, chain->batch);
}

// ---- the other product ------------------------------------------------------------------------------------

void ns_apply(NsChain *chain, const NsApply *p)
{
    OP_PART(ns_apply, chain->dtype, p->n, p->m, chain->batch);
    int n = p->n, m = p->m;
    int64_t blocks = ceil_div(n, ROW_BLOCK), square = (int64_t)n * n, size = (int64_t)n * m;
    load_blas();
#pragma omp parallel for schedule(dynamic) if ((int64_t)chain->batch * n * n * m >= MIN_PRODUCT)
    for (int64_t item = 0; item < blocks * chain->batch; item++) {
        int64_t which = item / blocks, i0 = item % blocks * ROW_BLOCK, rows = min_i64(n - i0, ROW_BLOCK);
        const ns_real *from = (const ns_real *)p->x + which * size;
        ns_real *to = (ns_real *)p->y + which * size + i0 * m;
        if (p->a != 0)
            memcpy(to, from + i0 * m, (size_t)(rows * m) * sizeof *to);
        block_product(&(Block){.c = to,
                               .a = (const ns_real *)p->b + which * square + i0 * n,
                               .b = from,
                               .c_pitch = m,
                               .a_pitch = n,
                               .b_pitch = m,
                               .alpha = p->alpha,
                               .beta = p->a,
                               .rows = (int)rows,
                               .cols = m,
                               .k = n});
        round_values(chain->dtype, to, rows * m);
    }
}

// ---- elementwise ------------------------------------------------------------------------------------------

static void sum_squares(float *sumsq, const float *u, int64_t count, int64_t stride, int batch)
{
#pragma omp parallel for schedule(static) if (count * batch >= MIN_ELEMENTS)
    for (int i = 0; i < batch; i++) {
        const float *v = u + i * stride;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++)
            sum += (double)v[j] * v[j];
        sumsq[i] = (float)sum;
    }
}

void ns_load(Stream s, NsDtype dtype, const NsLoad *l)
{
    OP_SCOPE(ns_load, dtype, l->rows, l->cols, l->batch);
    if (l->sumsq)
        sum_squares(l->sumsq, l->u, (int64_t)l->rows * l->cols, l->u_stride, l->batch);
    int n = l->transpose ? l->cols : l->rows, m = l->transpose ? l->rows : l->cols, batch = l->batch;
    int64_t blocks = ceil_div(n, TILE);
#pragma omp parallel for schedule(static) if ((int64_t)batch * n * m >= MIN_ELEMENTS)
    for (int64_t item = 0; item < blocks * batch; item++) {
        int64_t which = item / blocks, i0 = item % blocks * TILE, i1 = min_i64(n, i0 + TILE);
        const float *from = l->u + which * l->u_stride;
        ns_real *to = (ns_real *)l->x + which * n * m;
        ns_real total = l->sumsq ? l->sumsq[which] : 0, scale = l->gain;
        if (l->sumsq)
            scale = total == 0 ? 0 : l->gain / (l->kappa * (ns_real)sqrt((double)total) + l->eps);
        if (!isfinite(total))
            scale = (ns_real)NAN;
        if (l->transpose) {
            for (int64_t j = 0; j < m; j++)
                for (int64_t i = i0; i < i1; i++)
                    to[i * m + j] = from[j * n + i] * scale;
        } else {
            for (int64_t e = i0 * m; e < i1 * m; e++)
                to[e] = from[e] * scale;
        }
        round_values(dtype, to + i0 * m, (i1 - i0) * m);
    }
}

void ns_load_rows(Stream s, NsDtype dtype, const NsLoad *l)
{
    OP_SCOPE(ns_load_rows, dtype, l->rows, l->cols, l->batch);
    int n = l->transpose ? l->cols : l->rows, m = l->transpose ? l->rows : l->cols, batch = l->batch;
    int64_t row_step = l->transpose ? 1 : m, col_step = l->transpose ? n : 1;
#pragma omp parallel for schedule(static) if ((int64_t)batch * n * m >= MIN_ELEMENTS)
    for (int64_t row = 0; row < (int64_t)n * batch; row++) {
        const float *from = l->u + row / n * l->u_stride + row % n * row_step;
        ns_real *to = (ns_real *)l->x + row * m;
        float most = 0;
        for (int64_t j = 0; j < m; j++) {
            float size = fabsf(from[j * col_step]);
            if (!(size <= most) && !isnan(most))
                most = isfinite(size) ? size : NAN;
        }
        int power = most > 0 ? ilogbf(most) - 5 : 0;
        l->unit[row] = isnan(most) ? NAN : ldexpf(1, power < -100 ? -100 : power > 100 ? 100 : power);
        ns_real scale = 1 / l->unit[row];
        for (int64_t j = 0; j < m; j++)
            to[j] = from[j * col_step] * scale;
        round_values(dtype, to, m);
    }
}

void ns_aol(NsChain *chain, float *scale, void *a, const void *raw, const float *unit, float gain, int n,
            int m)
{
    OP_PART(ns_aol, chain->dtype, n, chain->batch);
    (void)m;
#pragma omp parallel if ((int64_t)chain->batch * n * n >= MIN_ELEMENTS)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < (int64_t)n * chain->batch; row++) {
            const ns_real *from = (const ns_real *)raw + row * n;
            double sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = 0; j < n; j++)
                sum += fabs((double)from[j]) * (unit ? unit[row / n * n + j] : 1);
            if (unit)
                sum /= unit[row];
            scale[row] = sum < (double)NS_AOL_LEAST ? 0 : (float)(gain / sqrt(1.02 * sum));
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < (int64_t)n * chain->batch; row++) {
            const ns_real *from = (const ns_real *)raw + row * n;
            const float *column_scale = scale + row / n * n;
            ns_real *to = (ns_real *)a + row * n;
            // The two scales first: their product commutes, so that the result is symmetric to the last bit.
            for (int j = 0; j < n; j++)
                to[j] = (ns_real)scale[row] * column_scale[j] * from[j];
            round_values(chain->dtype, to, n);
        }
    }
}

void ns_symmetric_scaled(NsChain *chain, const NsSymmetric *p, const float *scale, float factor)
{
    OP_PART(ns_symmetric_scaled, chain->dtype, ns_squares(p) + 1, p->n, chain->batch);
    int n = p->n;
    const ns_real most = 65504; // of fp16
    Symmetric product = product_of(p, p->q);
    symmetric_product(chain->dtype, &product, chain->batch);
    add_diagonal(chain->dtype, p->q, p->q, p->diagonal, n, chain->batch);
#pragma omp parallel for schedule(static) if ((int64_t)chain->batch * n * n >= MIN_ELEMENTS)
    for (int64_t row = 0; row < (int64_t)n * chain->batch; row++) {
        const float *column_scale = scale + row / n * n;
        ns_real *to = (ns_real *)p->q + row * n;
        for (int j = 0; j < n; j++) {
            to[j] *= (ns_real)(factor * column_scale[j]);
            if (chain->dtype == NS_FP16 && isfinite(to[j]))
                to[j] = to[j] > most ? most : to[j] < -most ? -most : to[j];
        }
        round_values(chain->dtype, to, n);
    }
}

void ns_transpose(Stream s, NsDtype dtype, void *y, const void *x, int rows, int cols, int batch)
{
    OP_SCOPE(ns_transpose, dtype, rows, cols, batch);
    (void)dtype;
    int64_t blocks = ceil_div(cols, TILE), size = (int64_t)rows * cols;
#pragma omp parallel for schedule(static) if (size * batch >= MIN_ELEMENTS)
    for (int64_t item = 0; item < blocks * batch; item++) {
        int64_t i0 = item % blocks * TILE, i1 = min_i64(cols, i0 + TILE);
        const ns_real *from = (const ns_real *)x + item / blocks * size;
        ns_real *to = (ns_real *)y + item / blocks * size;
        for (int64_t j = 0; j < rows; j++)
            for (int64_t i = i0; i < i1; i++)
                to[i * rows + j] = from[j * cols + i];
    }
}
