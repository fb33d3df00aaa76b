// Whole variants, as the program runs them, on one matrix of 2048 x 11059: tiles of two widths, rows of odd
// width, more tiles than clusters. On the CPU one variant is 1 TFLOP, so that the matrices are those of
// ns_known.h. Included by test_ns_gpu.c.
#pragma once
#include "dev/test/ns_known.h"

// Limits of the relative error: the fixed ones, and at least twice the emulation's on the same matrix, which
// took minutes once: 0.0125, 0.0021, 0.0075, 0.0013; log-uniform 0.025, 0.014.
typedef struct {
    const char *variant;
    double even, log_uniform; // by spectrum: sigma as of a Gaussian matrix, or 1e-3 .. 1; 0: not run
} LargeCase;

static void test_large_case(const LargeCase *c, const Known *k, const float *u, bool even)
{
    int64_t count = (int64_t)k->n * k->m;
    NsOptions o = options(c->variant, NULL, 0, NULL, NULL);
    bool guards;
    double *out = gpu_run(&o, u, k->n, k->m, 1, false, &guards), *known = known_result(k, &o),
           error = relative_error(out, known, count), limit = even ? c->even : c->log_uniform, worst = 0;
    // The transforms spread the error over all elements: the largest was up to 9 times the mean in the
    // emulation.
    for (int64_t i = 0; i < count; i++)
        worst = larger_error(worst, fabs(out[i] - known[i]));
    worst /= norm(known, count) / sqrt((double)count);
    ok(error <= limit && worst <= 8 * limit && guards,
       "%s in %s, %dx%d, %s: relative error %.2g <= %.2g, of an element %.2g <= %.2g, guards intact",
       c->variant, dtype_name[o.dtype], k->n, k->m, even ? "singular values of a Gaussian" : "log-uniform",
       error, limit, worst, 8 * limit);
    free(out);
    free(known);
}

static void test_large_variants(void)
{
    enum { N = 2048, M = 11059 };
    static const LargeCase cases_of_large[] = {{"polar", 2.5e-2, 0},
                                               {"gram", 4.2e-3, 1e-1},
                                               {"turbo", 2e-2, 0},
                                               {"turbo-gram", 4e-3, 7e-2}};
    Random r = {8};
    Known k = known_new(&r, N, M);
    for (int even = 1; even >= 0; even--) {
        for (int i = 0; i < N; i++)
            k.sigma[i] = even ? 1 + sqrt((double)N / M) * (2 * random_uniform(&r) - 1)
                              : singular_value(LOG_UNIFORM, i, N, &r);
        double *g = known_matrix(&k, k.sigma);
        float *u = to_float(g, (int64_t)N * M);
        for (size_t i = 0; i < sizeof cases_of_large / sizeof *cases_of_large; i++)
            if (even || cases_of_large[i].log_uniform > 0)
                test_large_case(&cases_of_large[i], &k, u, even);
        free(g);
        free(u);
    }
    known_free(&k);
}
