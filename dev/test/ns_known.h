// Matrices G = U diag(sigma) V of any width whose result is known in double for every variant without a
// product of matrices: U and V are Walsh-Hadamard transforms with random signs.
//
// G G^T has the elements +-f(i xor j): the sums of magnitudes that AOL divides by are the same for all rows.
// So each variant scales G by one number and maps its singular values: the result is U diag(p(scale sigma))
// V.
#pragma once
#include "dev/test/ns_reference.h"

typedef struct {
    int n, m;                 // n is a power of two
    double *sigma, *v, *sign; // (n), (n, m) with orthonormal rows, (n)
} Known;

// x <- H x for `count` = 2^k vectors of `width` elements, H orthogonal and symmetric.
static inline void hadamard(double *x, int64_t count, int64_t width)
{
    for (int64_t half = width; half < count * width; half *= 2)
        for (int64_t first = 0; first < count * width; first += 2 * half) {
            double *a = x + first, *b = a + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                double sum = (a[i] + b[i]) * M_SQRT1_2;
                b[i] = (a[i] - b[i]) * M_SQRT1_2;
                a[i] = sum;
            }
        }
}

static inline double *random_signs(Random *r, int count)
{
    double *sign = matrix(count, 1);
    for (int i = 0; i < count; i++)
        sign[i] = random_bits(r) & 1 ? 1 : -1;
    return sign;
}

// Rows of an orthogonal matrix: unit vectors, mixed in the first and the last elements by turns.
static inline double *mixed_rows(Random *r, int n, int m)
{
    enum { PASSES = 3 };
    int window = 1;
    while (2 * window <= m)
        window *= 2;
    double *v = matrix(n, m), *sign = random_signs(r, PASSES * m);
#pragma omp parallel for
    for (int i = 0; i < n; i++) {
        double *row = v + (int64_t)i * m;
        row[i] = 1;
        for (int pass = 0; pass < PASSES; pass++) {
            for (int c = 0; c < m; c++)
                row[c] *= sign[pass * m + c];
            hadamard(row + (pass % 2 ? m - window : 0), window, 1);
        }
    }
    free(sign);
    return v;
}

// U diag(values) V
static inline double *known_matrix(const Known *k, const double *values)
{
    enum { STRIP = 32 }; // columns: they stay in cache
    double *g = matrix(k->n, k->m);
#pragma omp parallel for
    for (int c0 = 0; c0 < k->m; c0 += STRIP) {
        int width = k->m - c0 < STRIP ? k->m - c0 : STRIP;
        double *strip = matrix(k->n, width);
        for (int i = 0; i < k->n; i++)
            for (int c = 0; c < width; c++)
                strip[i * width + c] = values[i] * k->v[(int64_t)i * k->m + c0 + c];
        hadamard(strip, k->n, width);
        for (int i = 0; i < k->n; i++)
            for (int c = 0; c < width; c++)
                g[(int64_t)i * k->m + c0 + c] = k->sign[i] * strip[i * width + c];
        free(strip);
    }
    return g;
}

// The factor by which the variant scales a matrix of these singular values.
static inline double known_scale(const NsOptions *o, const double *sigma, int n)
{
    if (!o->aol)
        return 1 / (o->kappa * norm(sigma, n) + o->eps);
    double *f = matrix(n, 1), sum = 0; // the first row of G G^T, without signs
    for (int i = 0; i < n; i++)
        f[i] = sigma[i] * sigma[i];
    hadamard(f, n, 1);
    for (int i = 0; i < n; i++)
        sum += fabs(f[i]) / sqrt(n);
    free(f);
    return o->aol_gain / sqrt(1.02 * sum);
}

static inline double *known_result(const Known *k, const NsOptions *o)
{
    double *mapped = matrix(k->n, 1), scale = known_scale(o, k->sigma, k->n);
    for (int i = 0; i < k->n; i++)
        mapped[i] = ns_scalar_map(o->tuples, o->steps, scale * k->sigma[i]);
    double *result = known_matrix(k, mapped);
    free(mapped);
    return result;
}

static inline Known known_new(Random *r, int n, int m)
{
    return (Known){n, m, matrix(n, 1), mixed_rows(r, n, m), random_signs(r, n)};
}

static inline void known_free(Known *k)
{
    free(k->sigma);
    free(k->v);
    free(k->sign);
}
