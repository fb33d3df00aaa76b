// What the Newton-Schulz tests share: the algorithm once more in double without rounding, spectra, and a run
// of the code under test.
#pragma once
#include "dev/test/linalg.h"
#include "llmc/optim/newton_schulz.h"

// A chain of one product, launched by its own call.
#define AT_ONCE(stream, dtype, batch) (&(NsChain){stream, dtype, batch, NULL})

// Every variant in double. The Gram form equals the standard form in exact arithmetic, so the standard form
// stands for both. u (rows, cols) fp32 -> (rows, cols). Coefficients, sum of squares and AOL scales are fp32
// numbers, as the contract has them.
static inline double *reference_newton_schulz(const NsOptions *o, const float *u, int rows, int cols)
{
    bool tall = rows > cols;
    int n = tall ? cols : rows, m = tall ? rows : cols;
    int64_t count = (int64_t)n * m, square = (int64_t)n * n;
    double *x = matrix(n, m), *y = matrix(n, m), *a = matrix(n, n), *aa = matrix(n, n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < m; j++)
            x[(int64_t)i * m + j] = tall ? u[(int64_t)j * n + i] : u[(int64_t)i * m + j];
    double size = sqrt((float)dot(x, x, count)),
           scale = size > 0 ? 1 / (o->aol ? size : o->kappa * size + o->eps) : 0;
    for (int64_t i = 0; i < count; i++)
        x[i] *= scale;
    for (int step = 0; step < o->steps; step++) {
        float ta = (float)o->tuples[step].a, tb = (float)o->tuples[step].b, tc = (float)o->tuples[step].c;
        multiply(a, x, x, true, n, n, m);
        for (int i = 0; step == 0 && o->aol && i < n; i++) {
            double sum = 0;
            for (int j = 0; j < n; j++)
                sum += fabs(a[(int64_t)i * n + j]);
            double s = sum > 0 ? (float)(o->aol_gain / sqrt(1.02 * sum)) : 0;
            for (int j = 0; j < m; j++)
                x[(int64_t)i * m + j] *= s;
        }
        if (step == 0 && o->aol)
            multiply(a, x, x, true, n, n, m);
        multiply(aa, a, a, false, n, n, n);
        for (int64_t i = 0; i < square; i++)
            a[i] = tb * a[i] + tc * aa[i];
        for (int i = 0; i < n; i++)
            a[(int64_t)i * n + i] += ta;
        multiply(y, a, x, false, n, m, n);
        memcpy(x, y, (size_t)count * sizeof *x);
    }
    double *result = tall ? transposed(x, n, m) : x;
    if (tall)
        free(x);
    free(y);
    free(a);
    free(aa);
    return result;
}

static inline float *to_float(const double *a, int64_t n)
{
    float *f = xcalloc((size_t)n + 1, sizeof *f);
    for (int64_t i = 0; i < n; i++)
        f[i] = (float)a[i];
    return f;
}

static inline double *to_double(const float *a, int64_t n)
{
    double *d = matrix(n, 1);
    for (int64_t i = 0; i < n; i++)
        d[i] = a[i];
    return d;
}

// The code under test on a batch; the result as doubles. Guard zones around the workspace and the input:
// *intact, when not NULL, tells whether they survived.
static inline double *run_batch(const NsOptions *o, const float *u, int64_t stride, int rows, int cols,
                                int batch, bool *intact)
{
    enum { GUARD = 4096 };
    size_t bytes = ns_workspace_bytes(o, rows, cols, batch);
    size_t total = (bytes + 2 * GUARD + 255) / 256 * 256;
    unsigned char *memory = aligned_alloc(256, total);
    memset(memory, 0xff, total); // NaN in every dtype: reading what was never written shows
    ns_real *result = newton_schulz(NULL, o, &(NsInput){u, rows, cols, batch, stride, 0, 0}, memory + GUARD);
    int64_t count = (int64_t)rows * cols * batch;
    bool inside = (unsigned char *)result >= memory + GUARD &&
                  (unsigned char *)(result + count) <= memory + GUARD + bytes;
    double *out = matrix(count, 1);
    for (int64_t i = 0; inside && i < count; i++)
        out[i] = result[i];
    for (size_t i = 0; i < GUARD; i++)
        inside = inside && memory[i] == 0xff && memory[GUARD + bytes + i] == 0xff;
    if (intact)
        *intact = inside;
    free(memory);
    return out;
}

static inline double *run_one(const NsOptions *o, const float *u, int rows, int cols)
{
    return run_batch(o, u, 0, rows, cols, 1, NULL);
}

static inline NsOptions options(const char *variant, const char *coefficients, int steps,
                                const char *restarts, const char *dtype)
{
    NsText text = {variant, coefficients, restarts, dtype, steps, 0};
    NsOptions o;
    Error e;
    if (!ns_options_parse(&o, &text, &e)) {
        fprintf(stderr, "%s\n", e.text);
        exit(1);
    }
    return o;
}

// ---- spectra ----------------------------------------------------------------------------------------------

typedef enum {
    LOG_UNIFORM, // random, 1e-3 .. 1
    LOGSPACE_3,
    LOGSPACE_5,
    LOGSPACE_7,
    LOGSPACE_9,
    HALF_ZERO,
    RANK_10,
    RANK_2,
    TWO_LARGE, // and logspace -4 .. -7
    TWO_TAILS, // logspace 0 .. -10 plus logspace -4 .. -10
    LINEAR,    // 0 .. 0.5
    GAMMA,     // Gamma(3, 0.5) variates
    POWER_LAW, // 1/k
    SPECTRA
} SpectrumKind;
static const char *const spectrum_names[SPECTRA] = {"log-uniform 1e-3..1",
                                                    "logspace 0..-3",
                                                    "logspace 0..-5",
                                                    "logspace 0..-7",
                                                    "logspace 0..-9",
                                                    "half the spectrum zero",
                                                    "rank 10",
                                                    "rank 2",
                                                    "2 large + logspace -4..-7",
                                                    "logspace 0..-10 + logspace -4..-10",
                                                    "linspace 0..0.5",
                                                    "Gamma(3, 0.5)",
                                                    "power law 1/k"};

static inline double logspace(double from, double to, int k, int n)
{
    return pow(10, n > 1 ? from + (to - from) * k / (n - 1) : from);
}

static inline double singular_value(SpectrumKind kind, int k, int n, Random *r)
{
    double sum = 0;
    switch (kind) {
    case LOG_UNIFORM:
        return pow(10, -3 * random_uniform(r));
    case LOGSPACE_3:
        return logspace(0, -3, k, n);
    case LOGSPACE_5:
        return logspace(0, -5, k, n);
    case LOGSPACE_7:
        return logspace(0, -7, k, n);
    case LOGSPACE_9:
        return logspace(0, -9, k, n);
    case HALF_ZERO:
        return k < n / 2 ? 1 - 0.5 * k / n : 0;
    case RANK_10:
        return k < 10;
    case RANK_2:
        return k < 2;
    case TWO_LARGE:
        return k < 2 ? 1 : logspace(-4, -7, k - 2, n - 2);
    case TWO_TAILS:
        return k < n / 2 ? logspace(0, -10, k, n / 2) : logspace(-4, -10, k - n / 2, n - n / 2);
    case LINEAR:
        return n > 1 ? 0.5 * k / (n - 1) : 0.5;
    case GAMMA:
        for (int i = 0; i < 3; i++)
            sum -= 0.5 * log(random_uniform(r));
        return sum;
    case POWER_LAW:
        return 1.0 / (k + 1);
    default:
        return 0;
    }
}

// Orthonormal frames of one shape, shared by its spectra: u (n, n), v (n, m), and polar = u v.
typedef struct {
    int n, m;
    double *u, *v, *polar;
} Frames;

static inline Frames make_frames(Random *r, int n, int m)
{
    Frames f = {n, m, random_orthonormal(r, n, n), random_orthonormal(r, n, m), matrix(n, m)};
    multiply(f.polar, f.u, f.v, false, n, m, n);
    return f;
}

static inline void free_frames(Frames *f)
{
    free(f->u);
    free(f->v);
    free(f->polar);
}

// u diag(sigma) v in fp32.
static inline float *with_spectrum(const Frames *f, SpectrumKind kind, Random *r)
{
    double *us = matrix(f->n, f->n), *g = matrix(f->n, f->m);
    for (int k = 0; k < f->n; k++) {
        double sigma = singular_value(kind, k, f->n, r);
        for (int i = 0; i < f->n; i++)
            us[(int64_t)i * f->n + k] = f->u[(int64_t)i * f->n + k] * sigma;
    }
    multiply(g, us, f->v, false, f->n, f->m, f->n);
    float *result = to_float(g, (int64_t)f->n * f->m);
    free(us);
    free(g);
    return result;
}
