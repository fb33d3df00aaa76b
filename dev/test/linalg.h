// Dense linear algebra in double for the tests: random matrices, singular values, polar factors. Row-major,
// packed; every function that returns a matrix gives it to the caller. Needs neither speed nor generality,
// only to be right by other means than the code under test.
#pragma once
#include "llmc/base/common.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "llmc/cpu/blas.h"

static inline double *matrix(int64_t rows, int64_t cols)
{
    return xcalloc((size_t)(rows * cols) + 1, sizeof(double));
}

// ---- random numbers ---------------------------------------------------------------------------------------

typedef struct {
    uint64_t state;
} Random;

static inline uint64_t random_bits(Random *r) // splitmix64
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline double random_uniform(Random *r)
{
    return ((double)(random_bits(r) >> 11) + 0.5) * 0x1p-53;
} // open (0, 1)
static inline double random_normal(Random *r)
{
    double radius = sqrt(-2 * log(random_uniform(r)));
    return radius * cos(2 * M_PI * random_uniform(r));
}

static inline double *random_gaussian(Random *r, int rows, int cols)
{
    double *g = matrix(rows, cols);
    for (int64_t i = 0; i < (int64_t)rows * cols; i++)
        g[i] = random_normal(r);
    return g;
}

// ---- products and norms -----------------------------------------------------------------------------------

static inline double *transposed(const double *a, int rows, int cols)
{
    double *t = matrix(rows, cols);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            t[(int64_t)j * rows + i] = a[(int64_t)i * cols + j];
    return t;
}

// c (rows, cols) = a b;  a (rows, k);  b (k, cols), or (cols, k) when transpose_b
static inline void multiply(double *c, const double *a, const double *b, bool transpose_b, int rows, int cols,
                            int k)
{
#ifdef HAVE_OPENBLAS
    enum { BLOCK = 64 };
    const Blas *library = blas();
#pragma omp parallel for
    for (int i0 = 0; i0 < rows; i0 += BLOCK)
        library->dgemm(CblasRowMajor, CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans,
                       rows - i0 < BLOCK ? rows - i0 : BLOCK, cols, k, 1, a + (int64_t)i0 * k, k, b,
                       transpose_b ? k : cols, 0, c + (int64_t)i0 * cols, cols);
#else
    enum { ROWS = 4, COLS = 64 };
    double *straight = transpose_b ? transposed(b, cols, k) : NULL;
    const double *from = straight ? straight : b;
#pragma omp parallel for
    for (int i0 = 0; i0 < rows; i0 += ROWS)
        for (int j0 = 0; j0 < cols; j0 += COLS) {
            double sum[ROWS][COLS] = {{0}};
            int width = cols - j0 < COLS ? cols - j0 : COLS, height = rows - i0 < ROWS ? rows - i0 : ROWS;
            for (int p = 0; p < k; p++)
                for (int i = 0; i < height; i++)
#pragma omp simd
                    for (int j = 0; j < width; j++)
                        sum[i][j] += a[(int64_t)(i0 + i) * k + p] * from[(int64_t)p * cols + j0 + j];
            for (int i = 0; i < height; i++)
                memcpy(c + (int64_t)(i0 + i) * cols + j0, sum[i], (size_t)width * sizeof *c);
        }
    free(straight);
#endif
}

static inline double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline double norm(const double *a, int64_t n) { return sqrt(dot(a, a, n)); }

// |a - b| / |b| in the Frobenius norm. NaN when either holds one.
static inline double relative_error(const double *a, const double *b, int64_t n)
{
    double difference = 0;
    for (int64_t i = 0; i < n; i++)
        difference += (a[i] - b[i]) * (a[i] - b[i]);
    double size = dot(b, b, n);
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

// ---- orthonormal rows -------------------------------------------------------------------------------------

// x (n, m) <- L^-1 x with L L^T = x x^T: rows become orthonormal. Twice, for the first pass loses the square
// of the condition.
static inline void orthonormalise_rows(double *x, int n, int m)
{
    double *l = matrix(n, n);
    for (int pass = 0; pass < 2; pass++) {
        multiply(l, x, x, true, n, n, m);
        for (int j = 0; j < n; j++) {
            double *row = l + (int64_t)j * n;
            row[j] = sqrt(row[j] - dot(row, row, j));
#pragma omp parallel for if (n - j > 256)
            for (int i = j + 1; i < n; i++) {
                double *below = l + (int64_t)i * n;
                below[j] = (below[j] - dot(below, row, j)) / row[j];
            }
        }
#pragma omp parallel for
        for (int c0 = 0; c0 < m; c0 += 64) // a strip of columns stays in cache
            for (int i = 0; i < n; i++) {
                double *row = x + (int64_t)i * m;
                int c1 = c0 + 64 < m ? c0 + 64 : m;
                for (int j = 0; j < i; j++) {
                    double factor = l[(int64_t)i * n + j];
                    for (int c = c0; c < c1; c++)
                        row[c] -= factor * x[(int64_t)j * m + c];
                }
                for (int c = c0; c < c1; c++)
                    row[c] /= l[(int64_t)i * n + i];
            }
    }
    free(l);
}

static inline double *random_orthonormal(Random *r, int n, int m) // n <= m
{
    double *x = random_gaussian(r, n, m);
    orthonormalise_rows(x, n, m);
    return x;
}

// ---- singular values and polar factor ---------------------------------------------------------------------

// Rotates rows p and q of a (?, width) by (c, s).
static inline void rotate_rows(double *a, int64_t width, int p, int q, double c, double s)
{
    double *x = a + p * width, *y = a + q * width;
#pragma omp simd
    for (int64_t j = 0; j < width; j++) {
        double v = c * x[j] - s * y[j], w = s * x[j] + c * y[j];
        x[j] = v;
        y[j] = w;
    }
}

// One-sided Jacobi on the rows of w (n, m), n <= m: on return they are orthogonal and j (n, n) is orthogonal
// with j * (old w) = w. Accurate for small singular values too, relative to their rows.
static inline void jacobi_rows(double *w, double *j, int n, int m)
{
    memset(j, 0, (size_t)n * (size_t)n * sizeof *j);
    for (int i = 0; i < n; i++)
        j[(int64_t)i * n + i] = 1;
    for (int sweep = 0, rotations = 1; rotations && sweep < 60; sweep++) {
        rotations = 0;
        for (int p = 0; p < n; p++)
            for (int q = p + 1; q < n; q++) {
                const double *x = w + (int64_t)p * m, *y = w + (int64_t)q * m;
                double xx = dot(x, x, m), yy = dot(y, y, m), xy = dot(x, y, m);
                if (fabs(xy) <= 1e-15 * sqrt(xx * yy))
                    continue;
                double tau = (yy - xx) / (2 * xy), t = (tau < 0 ? -1 : 1) / (fabs(tau) + sqrt(1 + tau * tau)),
                       c = 1 / sqrt(1 + t * t);
                rotate_rows(w, m, p, q, c, t * c);
                rotate_rows(j, n, p, q, c, t * c);
                rotations++;
            }
    }
}

// sigma (n), unsorted, and when polar is not NULL its (n, m) polar factor, from g (n, m), n <= m. Directions
// with a singular value below 1e-14 of the largest are left out.
static inline void jacobi_svd(const double *g, int n, int m, double *sigma, double *polar)
{
    double *w = matrix(n, m), *j = matrix(n, n), largest = 0;
    memcpy(w, g, (size_t)n * (size_t)m * sizeof *w);
    jacobi_rows(w, j, n, m);
    for (int i = 0; i < n; i++) {
        sigma[i] = norm(w + (int64_t)i * m, m);
        largest = fmax(largest, sigma[i]);
    }
    for (int i = 0; i < n; i++) {
        double inverse = sigma[i] > 1e-14 * largest ? 1 / sigma[i] : 0;
        for (int c = 0; c < m; c++)
            w[(int64_t)i * m + c] *= inverse;
    }
    double *jt = transposed(j, n, n);
    if (polar)
        multiply(polar, jt, w, false, n, m, n);
    free(w);
    free(j);
    free(jt);
}

// Polar factor of a well-conditioned g (n, m) too large for Jacobi: the cubic iteration x <- x (3 - x^T x) /
// 2 until x has orthonormal rows. Any such limit is the polar factor, each step being an odd function that is
// positive on (0, sqrt 3).
static inline double *polar_by_iteration(const double *g, int n, int m)
{
    int64_t count = (int64_t)n * m;
    double *x = matrix(n, m), *a = matrix(n, n), *y = matrix(n, m), row_norm = norm(g, count) / sqrt(n),
           error = 1;
    double bound =
        row_norm * (1 + sqrt((double)n / m)) * 1.1; // largest singular value of a random matrix, and a margin
    for (int64_t i = 0; i < count; i++)
        x[i] = g[i] / bound;
    for (int step = 0; step < 80 && error > 1e-13; step++) {
        multiply(a, x, x, true, n, n, m);
        error = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) {
                error = fmax(error, fabs(a[i * n + j] - (i == j)));
                a[i * n + j] = 1.5 * (i == j) - 0.5 * a[i * n + j];
            }
        multiply(y, a, x, false, n, m, n);
        memcpy(x, y, (size_t)count * sizeof *x);
    }
    free(a);
    free(y);
    if (!(error <= 1e-13)) {
        free(x);
        x = NULL; // not converged: the caller's test fails
    }
    return x;
}

// Householder reduction of symmetric a (n, n), of which the lower triangle is used and destroyed, to the
// tridiagonal matrix (diagonal, off) with the same eigenvalues.
static inline void tridiagonalise(double *a, int n, double *diagonal, double *off)
{
    double *v = matrix(n, 1), *w = matrix(n, 1);
    for (int k = 0; k + 2 < n; k++) {
        double alpha = 0;
        for (int i = k + 1; i < n; i++) {
            v[i] = a[(int64_t)i * n + k];
            alpha += v[i] * v[i];
        }
        alpha = v[k + 1] > 0 ? -sqrt(alpha) : sqrt(alpha);
        v[k + 1] -= alpha;
        off[k] = alpha;
        int rest = n - k - 1;
        double vv = dot(v + k + 1, v + k + 1, rest);
        if (vv == 0)
            continue;
        for (int i = k + 1; i < n; i++) { // w = a v from the lower triangle
            const double *row = a + (int64_t)i * n;
            double sum = row[i] * v[i], vi = v[i];
            w[i] = 0;
#pragma omp simd reduction(+ : sum)
            for (int j = k + 1; j < i; j++) {
                sum += row[j] * v[j];
                w[j] += row[j] * vi;
            }
            w[i] += sum;
        }
        for (int i = k + 1; i < n; i++)
            w[i] *= 2 / vv;
        double factor = dot(v + k + 1, w + k + 1, rest) / vv;
        for (int i = k + 1; i < n; i++)
            w[i] -= factor * v[i];
        for (int i = k + 1; i < n; i++) {
            double *row = a + (int64_t)i * n, vi = v[i], wi = w[i];
#pragma omp simd
            for (int j = k + 1; j <= i; j++)
                row[j] -= vi * w[j] + wi * v[j];
        }
    }
    for (int i = 0; i < n; i++)
        diagonal[i] = a[(int64_t)i * n + i];
    if (n > 1)
        off[n - 2] = a[(int64_t)(n - 1) * n + n - 2];
    free(v);
    free(w);
}

typedef struct {
    double smallest, median, largest;
} Spectrum;

// Eigenvalue number k (rising, from 0) of a tridiagonal matrix, by bisection on the count of negative pivots.
static inline double tridiagonal_eigenvalue(const double *diagonal, const double *off, int n, int k)
{
    double bound = 0;
    for (int i = 0; i < n; i++)
        bound = fmax(bound, fabs(diagonal[i]) + (i ? fabs(off[i - 1]) : 0) + (i + 1 < n ? fabs(off[i]) : 0));
    double low = -bound - 1e-300, high = bound + 1e-300;
    for (int step = 0; step < 100; step++) {
        double middle = (low + high) / 2, pivot = 1;
        int below = 0;
        for (int i = 0; i < n; i++) {
            pivot = diagonal[i] - middle - (i ? off[i - 1] * off[i - 1] / pivot : 0);
            if (pivot == 0)
                pivot = -1e-300;
            below += pivot < 0;
        }
        if (below > k)
            high = middle;
        else
            low = middle;
    }
    return (low + high) / 2;
}

// Smallest, median and largest singular value of y (n, m), n <= m, through y y^T: good to 1e-8 absolute. NaN
// when y holds any.
static inline Spectrum spectrum(const double *y, int n, int m)
{
    double *a = matrix(n, n), *diagonal = matrix(n, 1), *off = matrix(n, 1), values[3];
    multiply(a, y, y, true, n, n, m);
    double check = 0;
    for (int64_t i = 0; i < (int64_t)n * n; i++)
        check += a[i] * 0;
    tridiagonalise(a, n, diagonal, off);
    const int which[3] = {0, n / 2, n - 1};
    for (int i = 0; i < 3; i++)
        values[i] = sqrt(fmax(0, tridiagonal_eigenvalue(diagonal, off, n, which[i]))) + check;
    free(a);
    free(diagonal);
    free(off);
    return (Spectrum){values[0], values[1], values[2]};
}
