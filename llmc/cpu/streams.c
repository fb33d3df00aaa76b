// Sums of streams with coefficients, their norm, and the gradients of streams and coefficients.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"

static float scalar_of(const StreamFactor *c) { return c->scalar ? *c->scalar : 1; }
static float column_of(const StreamFactor *c, int t)
{
    return c->column ? c->column[(int64_t)t * c->stride] : 1;
}

static float factor_of(const StreamFactor *c, int t) { return c->plus + scalar_of(c) * column_of(c, t); }

static const floatX *row_of(const floatX *x, const int32_t *rows, int t, int d)
{
    return x + (int64_t)(rows ? rows[t] : t) * d;
}

// to += c * x
static void add_row(float *restrict to, float c, const floatX *restrict x, int d)
{
#pragma omp simd
    for (int i = 0; i < d; i++)
        to[i] += c * x_to_float(x[i]);
}

// ---- forward ----------------------------------------------------------------------------------------------

// NaN sticks.
static float larger(float a, float b) { return isnan(a) || a > b ? a : b; }

// Returns the largest |h|, or 0 without amax.
static float mix_row(const StreamMix *a, int t, int d)
{
    float *y = cpu_scratch((size_t)d), amax = 0;
    int64_t at = (int64_t)t * d;
    for (int i = 0; i < d; i++)
        y[i] = 0;
    for (int k = 0; k < a->terms; k++) {
        const StreamTerm *m = &a->term[k];
        add_row(y, factor_of(&m->c, t), row_of(m->x, m->rows, t, d), d);
    }
    if (a->y)
        store_row(a->y + at, y, d);
    if (!a->h)
        return 0;
    a->rstd[t] = rms_store(a->h + at, y, d);
    for (int i = 0; i < d && a->amax; i++)
        amax = larger(fabsf(x_to_float(a->h[at + i])), amax);
    return amax;
}

void stream_mix(Stream s, const StreamMix *a, int N, int d)
{
    OP_SCOPE(stream_mix, a, N, d);
    assert(a->terms <= MIX_STREAMS);
    float amax[PARTS] = {0};
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            amax[part] = larger(mix_row(a, t, d), amax[part]);
    for (int part = 0; part < PARTS && a->amax; part++)
        *a->amax = larger(amax[part], *a->amax);
}

// ---- backward ---------------------------------------------------------------------------------------------

// The row of the stream, in scratch of d floats; h, when there is one, in another.
static void load_stream(const StreamGrad *a, int t, int d, float *restrict x, float *restrict h)
{
    if (a->h)
        load_row(h, a->h + (int64_t)t * d, d);
    if (a->x)
        load_row(x, row_of(a->x, a->rows, t, d), d);
    for (int i = 0; i < d && !a->x; i++)
        x[i] = h[i] / a->rstd[t];
}

static void norm_gradient(const StreamGrad *a, int t, int d, float *dx, const float *h)
{
    for (int k = 0; k < a->norms; k++) {
        const StreamNorm *norm = &a->norm[k];
        add_row(dx, 1, norm->dh + (int64_t)t * d, d);
        for (int i = 0; i < norm->leads; i++)
            dx[i] += norm->lead[(int64_t)t * norm->leads + i];
    }
    rms_backward(dx, dx, h, a->rstd[t], d);
}

enum { BESIDE = STREAM_READERS, GRAD_SUMS };

// sums: of column * (g . x), one a reader; of the first's g . beside.
static void stream_row(const StreamGrad *a, int t, int d, double *sums)
{
    float *arena = cpu_scratch(4 * (size_t)round_up(d, 16)), *dx = scratch_take(&arena, (size_t)d),
          *x = scratch_take(&arena, (size_t)d), *h = scratch_take(&arena, (size_t)d), *g = arena;
    load_stream(a, t, d, x, h);
    for (int i = 0; i < d; i++)
        dx[i] = 0;
    if (a->norms)
        norm_gradient(a, t, d, dx, h);
    if (a->accumulate)
        add_row(dx, 1, a->dx + (int64_t)t * d, d);
    for (int k = 0; k < a->readers; k++) {
        const StreamReader *r = &a->reader[k];
        const floatX *from = r->g + (int64_t)t * (r->pitch ? r->pitch : d);
        add_row(dx, factor_of(&r->c, t), from, d);
        if (!r->dscalar && !r->dcolumn)
            continue;
        load_row(g, from, d);
        float p = dot(g, x, d);
        sums[k] += column_of(&r->c, t) * p;
        if (r->dcolumn)
            r->dcolumn[(int64_t)t * r->c.stride] = scalar_of(&r->c) * p;
    }
    if (a->beside) {
        load_row(g, a->reader[0].g + (int64_t)t * (a->reader[0].pitch ? a->reader[0].pitch : d), d);
        load_row(x, a->beside + (int64_t)t * d, d);
        sums[BESIDE] += dot(g, x, d);
    }
    if (a->dx)
        store_row(a->dx + (int64_t)t * d, dx, d);
}

static void stream_grad(const StreamGrad *a, int N, int d)
{
    double sums[PARTS][GRAD_SUMS] = {{0}}, total[GRAD_SUMS] = {0};
    assert(a->readers <= STREAM_READERS && a->norms <= STREAM_NORMS && (a->x || a->h));
    assert(!a->beside || (a->readers && a->norms && !a->x));
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            stream_row(a, t, d, sums[part]);
    for (int k = 0; k < GRAD_SUMS; k++)
        for (int part = 0; part < PARTS; part++)
            total[k] += sums[part][k];
    for (int k = 0; k < a->readers; k++) {
        if (a->reader[k].dscalar)
            *a->reader[k].dscalar += (float)total[k];
    }
    if (a->beside)
        *a->dbeside += (float)total[BESIDE];
}

void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d)
{
    OP_SCOPE(stream_grads, a, count, N, d);
    assert(count <= STREAM_GRADS);
    for (int i = 0; i < count; i++)
        stream_grad(&a[i], N, d);
}
