// The residual stream: mixes with trained coefficients, rms norms, and the coefficients themselves.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"
#include <float.h>
#include <math.h>
#include <string.h>

size_t rows_scratch(const OpSizes *sizes) { return 8 * (size_t)round_up(sizes->dim + sizes->heads, 16) + 64; }
size_t rows_shared(const OpSizes *sizes) { return (size_t)PARTS * sizes->heads * MAX_GATE_INPUTS + 64; }

// ---- coefficients -----------------------------------------------------------------------------------------

static double logistic(double x) { return 1 / (1 + exp(-x)); }

// The last factor of a term; its scalar, -1 when there is none, and the derivative by it.
static double last_factor(const Coefficient *t, const float *scalars, int *index, double *slope)
{
    *index = t->gate < -1 ? UNGATED(t->gate) : t->gate;
    *slope = *index >= 0;
    if (t->gate < 0)
        return *index < 0 ? 1 : scalars[*index];
    double sig = logistic(scalars[t->gate]);
    *slope = sig * (1 - sig);
    return sig;
}

void coefficients_forward(Stream s, float *coef, const float *scalars, const Coefficient *terms, int count)
{
    OP_SCOPE(coefficients_forward);
    for (int i = 0; i < count; i++) {
        const Coefficient *t = &terms[i];
        int index;
        double slope, x = t->factor;
        if (t->scalar >= 0)
            x *= scalars[t->scalar];
        coef[i] = (float)(x * last_factor(t, scalars, &index, &slope));
    }
}

void coefficients_backward(Stream s, float *dscalars, float *dcoef, const float *scalars,
                           const Coefficient *terms, int count)
{
    OP_SCOPE(coefficients_backward);
    for (int i = 0; i < count; i++) {
        const Coefficient *t = &terms[i];
        int index;
        double g = (double)t->factor * dcoef[i], scalar = t->scalar >= 0 ? scalars[t->scalar] : 1, slope,
               last = last_factor(t, scalars, &index, &slope);
        if (t->scalar >= 0)
            dscalars[t->scalar] += (float)(g * last);
        if (index >= 0)
            dscalars[index] += (float)(g * scalar * slope);
        dcoef[i] = 0;
    }
}

// ---- mix and norm -----------------------------------------------------------------------------------------

static void mix_row(const MixForward *a, int t, int d, float *restrict y)
{
    int64_t at = (int64_t)t * d;
    const floatX *restrict x = a->x + at, *restrict x0 = a->x0 + at;
    float c0 = a->coef[0], c1 = a->coef[1], c2 = a->coef[2];
#pragma omp simd
    for (int i = 0; i < d; i++)
        y[i] = c0 * x_to_float(x[i]) + c1 * x_to_float(x0[i]);
    if (a->skip) {
        const floatX *restrict skip = a->skip + at;
#pragma omp simd
        for (int i = 0; i < d; i++)
            y[i] += c2 * x_to_float(skip[i]);
    }
    if (a->x_out)
        store_row(a->x_out + at, y, d);
    a->rstd[t] = rms_store(a->h + at, y, d);
}

void mix_rmsnorm_forward(Stream s, const MixForward *a, int N, int d)
{
    OP_SCOPE(mix_rmsnorm_forward, a->x_out, a->skip, N, d);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            mix_row(a, t, d, cpu_scratch((size_t)d));
}

// dh of one row, with what comes back through the attention gates.
static void load_dh(const MixBackward *a, int t, int d, float *dh)
{
    load_row(dh, a->dh + (int64_t)t * d, d);
    if (!a->dgate)
        return;
    for (int head = 0; head < a->heads; head++) {
        float g = a->dgate[(int64_t)t * a->heads + head];
        for (int c = 0; c < a->gate_inputs; c++)
            dh[c] += g * x_to_float(a->gate_w[head * a->gate_inputs + c]);
    }
}

// The products g*x, g*x0, g*skip of a row, summed.
static void add_dcoef(const MixBackward *a, int64_t at, int d, const float *restrict g, float *restrict row,
                      double sums[3])
{
    const floatX *streams[3] = {a->x, a->x0, a->skip};
    for (int i = 0; i < 3; i++) {
        if (!streams[i])
            continue;
        load_row(row, streams[i] + at, d);
        sums[i] += dot(g, row, d);
    }
}

static void mix_backward_row(const MixBackward *a, int t, int d, double sums[3])
{
    int64_t at = (int64_t)t * d;
    float *arena = cpu_scratch(3 * (size_t)round_up(d, 16));
    float *restrict g = scratch_take(&arena, (size_t)d), *restrict h = scratch_take(&arena, (size_t)d),
                    *restrict row = arena;
    load_dh(a, t, d, g);
    load_row(h, a->h + at, d);
    rms_backward(g, g, h, a->rstd[t], d);
    if (a->dx_out) {
        const floatX *dx_out = a->dx_out + at;
#pragma omp simd
        for (int i = 0; i < d; i++)
            g[i] += x_to_float(dx_out[i]);
    }
    add_dcoef(a, at, d, g, row, sums);
    float c0 = a->coef[0], c1 = a->coef[1], c2 = a->coef[2];
    if (a->dskip) { // first: dx_add may be this very row
#pragma omp simd
        for (int i = 0; i < d; i++)
            row[i] = c2 * g[i];
        store_row(a->dskip + at, row, d);
    }
#pragma omp simd
    for (int i = 0; i < d; i++)
        row[i] = c0 * g[i] + (a->dx_add ? x_to_float(a->dx_add[at + i]) : 0);
    store_row(a->dx + at, row, d);
#pragma omp simd
    for (int i = 0; i < d; i++)
        row[i] = c1 * g[i] + (a->accumulate_dx0 ? x_to_float(a->dx0[at + i]) : 0);
    store_row(a->dx0 + at, row, d);
}

void mix_rmsnorm_backward(Stream s, const MixBackward *a, int N, int d)
{
    OP_SCOPE(mix_rmsnorm_backward, a, N, d);
    double sums[PARTS][3] = {{0}};
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            mix_backward_row(a, t, d, sums[part]);
    for (int i = 0; i < 3; i++) {
        double total = 0;
        for (int part = 0; part < PARTS; part++)
            total += sums[part][i];
        a->dcoef[i] += (float)total;
    }
}

// ---- plain norm -------------------------------------------------------------------------------------------

void rmsnorm_forward(Stream s, floatX *h, float *rstd, const floatX *x, int N, int d)
{
    OP_SCOPE(rmsnorm_forward, N, d);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        float *row = cpu_scratch((size_t)d);
        load_row(row, x + (int64_t)t * d, d);
        rstd[t] = rms_store(h + (int64_t)t * d, row, d);
    }
}

void rmsnorm_backward(Stream s, floatX *dx, const floatX *dh, const floatX *h, const float *rstd, int N,
                      int d)
{
    OP_SCOPE(rmsnorm_backward, N, d);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        int64_t at = (int64_t)t * d;
        float *arena = cpu_scratch(2 * (size_t)round_up(d, 16));
        float *restrict g = scratch_take(&arena, (size_t)d), *restrict row = arena;
        load_row(g, dh + at, d);
        load_row(row, h + at, d);
        rms_backward(g, g, row, rstd[t], d);
#pragma omp simd
        for (int i = 0; i < d; i++)
            g[i] += x_to_float(dx[at + i]);
        store_row(dx + at, g, d);
    }
}
