// Newton-Schulz in exact arithmetic (the fp32 build, where the CPU primitives run in double): coefficients,
// the polar error each variant must have, Gram form = standard form, invariances, shapes, options. Expected
// errors are those of independent float64 experiments, as mean and spread over 8 random matrices.
#include "dev/test/ns_known.h"
#include "dev/test/polar_express.h"
#include "dev/test/tap.h"
#include "llmc/base/floatx.h"

// ---- coefficients -----------------------------------------------------------------------------------------

static double tuple_difference(const NsTuple *a, const NsTuple *b, int n)
{
    double worst = 0;
    for (int i = 0; i < n; i++)
        worst = fmax(worst, fmax(fabs(a[i].a / b[i].a - 1),
                                 fmax(fabs(a[i].b / b[i].b - 1), fabs(a[i].c / b[i].c - 1))));
    return worst;
}

static void test_coefficients(void)
{
    NsTuple made[5];
    NsOptions polar = options("polar", NULL, 0, NULL, NULL), dao = options("polar", "dao", 0, NULL, NULL);
    polar_express(made, 5, 1e-3, 0.02, 0.02);
    ok_at_most(tuple_difference(made, polar.tuples, 5), 1e-12, "the recipe makes the polar tuples");
    polar_express(made, 5, 1e-3, 0, 0.02407327424182761);
    for (int i = 0; i < 5; i++) {
        made[i].a /= 1.05;
        made[i].b /= pow(1.05, 3);
        made[i].c /= pow(1.05, 5);
    }
    ok_at_most(tuple_difference(made, dao.tuples, 5), 1e-12, "the recipe makes the dao tuples");
    polar_express(made, 5, 1e-3, 0.02, 0.03);
    ok(tuple_difference(made, polar.tuples, 5) > 1e-3, "and other tuples for another cushion");
    // Output range on [1e-2, 1] and slope at 0 of each composition.
    struct {
        const char *set;
        double low, high, slope, input;
    } expected[] = {{"kj", 0.6818, 1.1344, 485, 1},
                    {"you", 0.9778, 1.0318, 493, 1},
                    {"polar", 0.8589, 1.1411, 970, 1 / 1.02},
                    {"dao", 0.8461, 1.1236, 804, 1}};
    for (int i = 0; i < 4; i++) {
        NsOptions o = options("polar", expected[i].set, 0, NULL, NULL);
        double low = 9, high = 0, slope = ns_scalar_map(o.tuples, o.steps, 1e-9 * expected[i].input) / 1e-9;
        for (int k = 0; k <= 100000; k++) {
            double y = ns_scalar_map(o.tuples, o.steps, expected[i].input * pow(10, -2.0 * k / 100000));
            low = fmin(low, y);
            high = fmax(high, y);
        }
        ok(fabs(low - expected[i].low) < 1e-4 && fabs(high - expected[i].high) < 1e-4 &&
               fabs(slope / expected[i].slope - 1) < 2e-3,
           "%s maps [0.01, 1] to [%.4f, %.4f] with slope %.0f at 0", expected[i].set, low, high, slope);
    }
}

// ---- polar error ------------------------------------------------------------------------------------------

// A variant with named tuples and the limits of the table.
typedef struct {
    const char *label, *variant, *coefficients;
    int steps;
} Method;
enum { KJ5, YOU5, PE5, DAO5, TURBO4, GA4, METHODS };
static const Method methods[METHODS] = {{"kj", "kj", NULL, 0},       {"you", "you", NULL, 0},
                                        {"polar", "polar", NULL, 0}, {"gram dao", "gram", "dao", 0},
                                        {"turbo", "turbo", NULL, 0}, {"turbo ga", "turbo", "ga", 0}};

static NsOptions method_options(int which)
{
    NsOptions o =
        options(methods[which].variant, methods[which].coefficients, methods[which].steps, NULL, NULL);
    if (which == DAO5) {
        o.kappa = 1;
        o.eps = 1e-7f; // its tuples carry their own safety
    }
    return o;
}

static double polar_error(const NsOptions *o, const float *u, const double *polar, int n, int m,
                          Spectrum *values)
{
    double *q = run_one(o, u, n, m), error = relative_error(q, polar, (int64_t)n * m);
    if (values)
        *values = spectrum(q, n, m);
    free(q);
    return error;
}

// Means over 8 Gaussian matrices: two such means of spread s differ by s/2 (one sigma); the table has up to
// half a unit more.
static void test_polar_error_small(void)
{
    static const struct {
        int n, m;
        double mean[METHODS], spread[METHODS]; // mean 0: not tabulated
    } rows[] = {
        {128, 512, {.219, .0177, .091, .0856, .0936, .0317}, {.001, .0005, .002, .0006, .001, .0005}},
        {64, 256, {.217, 0, .0915, .0852, .0939, 0}, {.002, 0, .0035, .002, .003, 0}},
        {100, 300, {.223, 0, .090, .0854, .0931, 0}, {.002, 0, .001, .001, .0014, 0}},
        {6, 12, {.19, 0, .089, 0, .100, 0}, {.03, 0, .013, 0, .015, 0}},
    };
    enum { SEEDS = 8 };
    Random r = {1};
    for (int row = 0; row < 4; row++) {
        int n = rows[row].n, m = rows[row].m;
        double sum[METHODS] = {0}, *sigma = matrix(n, 1), *by_jacobi = matrix(n, m);
        for (int seed = 0; seed < SEEDS; seed++) {
            double *g = random_gaussian(&r, n, m);
            float *u = to_float(g, (int64_t)n * m);
            double *polar = polar_by_iteration(g, n, m);
            if (seed == 0) {
                jacobi_svd(g, n, m, sigma, by_jacobi);
                ok_at_most(polar ? relative_error(polar, by_jacobi, (int64_t)n * m) : NAN, 1e-11,
                           "the two ways to the polar factor agree");
            }
            for (int k = 0; polar && k < METHODS; k++) {
                NsOptions o = method_options(k);
                sum[k] += polar_error(&o, u, polar, n, m, NULL) / SEEDS;
            }
            free(g);
            free(u);
            free(polar);
        }
        for (int k = 0; k < METHODS; k++)
            if (rows[row].mean[k] > 0)
                ok(fabs(sum[k] - rows[row].mean[k]) <= 2 * rows[row].spread[k] + 5e-4,
                   "Gaussian %dx%d %s: polar error %.4f, expected %.4f +- %.4f", n, m, methods[k].label,
                   sum[k], rows[row].mean[k], 2 * rows[row].spread[k] + 5e-4);
        free(sigma);
        free(by_jacobi);
    }
}

// After each iteration: not monotone, by design.
static void test_error_per_iteration(const float *u, const double *polar)
{
    static const struct {
        const char *set;
        double error[5];
    } rows[] = {{"kj", {.881, .605, .150, .208, .162}}, {"polar", {.725, .248, .601, .365, .096}}};
    for (int i = 0; i < 2; i++)
        for (int steps = 1; steps < 5; steps++) {
            NsOptions o = options("gram", rows[i].set, steps, "none",
                                  NULL); // cheaper than the standard form, and equal to it
            if (i == 0) {
                o.kappa = 1;
                o.eps = 1e-7f;
            }
            double error = polar_error(&o, u, polar, 768, 3072, NULL);
            ok(fabs(error - rows[i].error[steps - 1]) <= .0015, "%s after %d iterations: %.4f, expected %.3f",
               rows[i].set, steps, error, rows[i].error[steps - 1]);
        }
}

static void test_polar_error_large(void)
{
    Random r = {2};
    static const double square_mean[METHODS] = {.2024, .1185, .1244, .1279, .1356, .0956};
    static const double square_spread[METHODS] = {.0014, .0024, .0024, .0021, .0021, .0029};
    static const double wide_mean[METHODS] = {.162, .016, .096, .096, .096, .034};
    static const Spectrum wide_values[METHODS] = {{.68, .96, 1.13},  {.98, 1.00, 1.03}, {.86, .99, 1.14},
                                                  {.85, 1.03, 1.12}, {.86, .98, 1.14},  {.94, 1.01, 1.05}};
    for (int wide = 0; wide < 2; wide++) {
        int n = 768, m = wide ? 3072 : 768;
        double *g = random_gaussian(&r, n, m);
        float *u = to_float(g, (int64_t)n * m);
        double *polar = polar_by_iteration(g, n, m);
        for (int k = 0; polar && k < METHODS; k++) {
            NsOptions o = method_options(k);
            Spectrum s = {0};
            double error = polar_error(&o, u, polar, n, m, wide ? &s : NULL);
            double expected = wide ? wide_mean[k] : square_mean[k],
                   limit = wide ? .0015 : 4 * square_spread[k];
            ok(fabs(error - expected) <= limit, "Gaussian 768x%d %s: polar error %.4f, expected %.4f +- %.4f",
               m, methods[k].label, error, expected, limit);
            Spectrum w = wide_values[k];
            if (wide)
                ok(fabs(s.smallest - w.smallest) < .012 && fabs(s.median - w.median) < .012 &&
                       fabs(s.largest - w.largest) < .008,
                   "its singular values: %.3f / %.3f / %.3f", s.smallest, s.median, s.largest);
        }
        ok(polar != NULL, "the polar factor of the %d-column matrix converged", m);
        if (wide && polar)
            test_error_per_iteration(u, polar);
        free(g);
        free(u);
        free(polar);
    }
}

// Ill-conditioned spectra, on square matrices: the error depends on the singular values only (AOL: on the
// frames too).
static void test_polar_error_spectra(void)
{
    static const double log_uniform[METHODS] = {.465, .443, .348, .376, .460, .427};
    static const double log_spread[METHODS] = {.007, .008, .007, .007, .009, .009};
    static const double power_law[METHODS] = {.290, .272, .095, .118, .582, .530};
    Random r = {3};
    Frames f = make_frames(&r, 768, 768);
    for (int kind = 0; kind < 2; kind++) {
        float *u = with_spectrum(&f, kind ? POWER_LAW : LOG_UNIFORM, &r);
        for (int k = 0; k < METHODS; k++) {
            NsOptions o = method_options(k);
            double error = polar_error(&o, u, f.polar, 768, 768, NULL),
                   expected = kind ? power_law[k] : log_uniform[k];
            double limit = !kind ? 4 * log_spread[k] : o.aol ? .02 : .001;
            ok(fabs(error - expected) <= limit, "%s, n = 768, %s: polar error %.4f, expected %.4f +- %.3f",
               kind ? "power law" : "log-uniform", methods[k].label, error, expected, limit);
        }
        NsOptions turbo5 = options("turbo", NULL, 5, NULL, NULL);
        double error = polar_error(&turbo5, u, f.polar, 768, 768, NULL), expected = kind ? .187 : .154;
        ok(fabs(error - expected) <= .02, "%s, turbo with 5 steps: polar error %.4f, expected %.3f +- 0.02",
           kind ? "power law" : "log-uniform", error, expected);
        free(u);
    }
    free_frames(&f);
}

// ---- algebra ----------------------------------------------------------------------------------------------

static void test_gram_equals_standard(void)
{
    Random r = {5};
    Frames f = make_frames(&r, 48, 160);
    double worst = 0, reference_worst = 0;
    for (int kind = 0; kind < SPECTRA; kind++) {
        float *u = with_spectrum(&f, (SpectrumKind)kind, &r);
        for (int aol = 0; aol < 2; aol++) {
            NsOptions standard = options(aol ? "turbo" : "polar", NULL, 0, NULL, NULL), gram = standard;
            double *q = run_one(&standard, u, 48, 160),
                   *reference = reference_newton_schulz(&standard, u, 48, 160);
            reference_worst = fmax(reference_worst, relative_error(q, reference, 48 * 160));
            gram.gram = true;
            for (uint32_t restarts = 0; restarts < 1u << (gram.steps - 1);
                 restarts++) { // every set of restarts
                gram.restarts = restarts << 1;
                double *p = run_one(&gram, u, 48, 160), error = relative_error(p, q, 48 * 160);
                worst = error <= worst ? worst : error;
                free(p);
            }
            free(q);
            free(reference);
        }
        free(u);
    }
    ok_at_most(worst, 1e-11, "Gram form against standard form, all restarts, all spectra");
    ok_at_most(reference_worst, 1e-6,
               "standard form against the test's own"); // fp32 AOL scales may differ in the last bit
    free_frames(&f);
}

// The whole polynomial by singular values: U p(s) V^T.
static void test_scalar_map(void)
{
    Random r = {6};
    Frames f = make_frames(&r, 40, 64);
    float *u = with_spectrum(&f, LOG_UNIFORM, &r);
    double *g = to_double(u, 40 * 64), *sigma = matrix(40, 1), *w = matrix(40, 64), *j = matrix(40, 40),
           *expected = matrix(40, 64);
    NsOptions o = options("polar", NULL, 0, NULL, NULL);
    NsTuple tuples[NS_MAX_STEPS]; // norm and coefficients are fp32 numbers in every backend
    for (int i = 0; i < o.steps; i++) {
        // volatile, because gcc 12 -O2 vectorises two neighbouring double -> float -> double conversions into
        // nothing
        volatile float a = (float)o.tuples[i].a, b = (float)o.tuples[i].b, c = (float)o.tuples[i].c;
        tuples[i] = (NsTuple){a, b, c};
    }
    double size = sqrt((float)dot(g, g, 40 * 64));
    memcpy(w, g, 40 * 64 * sizeof *w);
    jacobi_rows(w, j, 40, 64);
    for (int i = 0; i < 40; i++) {
        sigma[i] = norm(w + i * 64, 64);
        double y = ns_scalar_map(tuples, o.steps, sigma[i] / (o.kappa * size + o.eps));
        for (int c = 0; c < 64; c++)
            w[i * 64 + c] *= y / sigma[i];
    }
    double *jt = transposed(j, 40, 40), *q = run_one(&o, u, 40, 64);
    multiply(expected, jt, w, false, 40, 64, 40);
    ok_at_most(relative_error(q, expected, 40 * 64), 1e-11,
               "singular vectors kept, singular values mapped by the polynomials");
    free(u);
    free(g);
    free(sigma);
    free(w);
    free(j);
    free(expected);
    free(jt);
    free(q);
    free_frames(&f);
}

// The results that test_ns_gpu holds large matrices against, here beside the test's own iteration.
static void test_known_results(void)
{
    enum { N = 64, M = 345 };
    static const char *const variants[] = {"polar", "gram", "turbo", "turbo-gram"};
    Random r = {12};
    Known k = known_new(&r, N, M);
    for (int i = 0; i < N; i++)
        k.sigma[i] = singular_value(LOG_UNIFORM, i, N, &r);
    double *g = known_matrix(&k, k.sigma), worst = 0, size = 0, least = INFINITY;
    float *u = to_float(g, N * M);
    for (int v = 0; v < 4; v++) {
        NsOptions o = options(variants[v], NULL, 0, NULL, NULL);
        double *known = known_result(&k, &o), *reference = reference_newton_schulz(&o, u, N, M);
        worst = larger_error(worst, relative_error(known, reference, N * M));
        free(known);
        free(reference);
    }
    ok_at_most(worst, 1e-5, "known results of all variants"); // the matrix is rounded to fp32
    for (int j = 0; j < M; j++) {
        size = 0;
        for (int i = 0; i < N; i++)
            size += g[i * M + j] * g[i * M + j];
        least = fmin(least, size / (dot(g, g, N * M) / M));
    }
    ok(least > 0.1, "no column of such a matrix is small: %.2f of the mean square", least);
    free(g);
    free(u);
    known_free(&k);
}

static const char *const variant_names[] = {"kj", "you", "polar", "gram", "turbo", "turbo-gram"};

// ---- invariances ------------------------------------------------------------------------------------------

static float *rotated(const double *left, const float *u, const double *right, int n, int m)
{
    double *g = to_double(u, (int64_t)n * m), *t = matrix(n, m);
    if (left)
        multiply(t, left, g, false, n, m, n);
    else
        multiply(t, g, right, false, n, m, m);
    float *f = to_float(t, (int64_t)n * m);
    free(g);
    free(t);
    return f;
}

static void test_invariances(const char *name)
{
    enum { N = 24, M = 72 };
    Random r = {7};
    NsOptions o = options(name, NULL, 0, NULL, NULL);
    o.eps = 0;
    double *g = random_gaussian(&r, N, M), *left = random_orthonormal(&r, N, N),
           *right = random_orthonormal(&r, M, M);
    float *u = to_float(g, N * M), *v = xcalloc(N * M, sizeof *v);
    double *q = run_one(&o, u, N, M), *t = transposed(q, N, M), *expected = matrix(N, M), worst = 0;
    for (int k = -45; k <= 45; k += 5) {
        for (int i = 0; i < N * M; i++)
            v[i] = ldexpf(u[i], k);
        double *p = run_one(&o, v, N, M);
        worst = fmax(worst, memcmp(p, q, N * M * sizeof *p) != 0);
        free(p);
    }
    ok(worst == 0, "%s: f(2^k G) = f(G) bitwise for k in -45 .. 45", name);

    for (int i = 0; i < N; i++)
        for (int j = 0; j < M; j++)
            v[j * N + i] = u[i * M + j];
    double *p = run_one(&o, v, M, N);
    ok(!memcmp(p, t, N * M * sizeof *p), "%s: f(G^T) = f(G)^T bitwise", name);
    free(p);

    for (int i = 0; i < N; i++) // rows reversed, every third with its sign turned
        for (int j = 0; j < M; j++) {
            int sign = i % 3 ? 1 : -1;
            v[i * M + j] = (float)sign * u[(N - 1 - i) * M + j];
            expected[i * M + j] = sign * q[(N - 1 - i) * M + j];
        }
    p = run_one(&o, v, N, M);
    ok_at_most(relative_error(p, expected, N * M), 2e-6, "f(P G) = P f(G)");
    free(p);
    free(v);

    v = rotated(NULL, u, right, N, M);
    multiply(expected, q, right, false, N, M, M);
    p = run_one(&o, v, N, M);
    ok_at_most(relative_error(p, expected, N * M), 1e-5, "f(G V) = f(G) V");
    free(p);
    free(v);

    v = rotated(left, u, NULL, N, M);
    multiply(expected, left, q, false, N, M, N);
    p = run_one(&o, v, N, M);
    double error = relative_error(p, expected, N * M);
    if (o.aol)
        ok(error > 1e-3, "%s: f(U G) differs from U f(G), the price of scaling rows: %.3g", name, error);
    else
        ok_at_most(error, 1e-5, "f(U G) = U f(G)");
    free(p);
    free(v);
    free(g);
    free(left);
    free(right);
    free(u);
    free(q);
    free(t);
    free(expected);
}

static void test_scale_with_eps(void)
{
    Random r = {8};
    enum { N = 256, M = 768 };
    double *g = random_gaussian(&r, N, M);
    float *u = to_float(g, N * M);
    for (int v = 0; v < 6; v++) {
        NsOptions o = options(variant_names[v], NULL, 0, NULL, NULL);
        double *q = run_one(&o, u, N, M);
        float *small = xcalloc(N * M, sizeof *small);
        for (int i = 0; i < N * M; i++)
            small[i] = u[i] * 1e-6f;
        double *p = run_one(&o, small, N, M), error = relative_error(p, q, N * M);
        ok(error <= 2e-2, "%s: entries of RMS 1e-6 change the result by %.2g <= 0.02", variant_names[v],
           error);
        free(q);
        free(p);
        free(small);
    }
    free(g);
    free(u);
}

// ---- shapes -----------------------------------------------------------------------------------------------

static void test_shapes(void)
{
    static const int shapes[][2] = {{1, 1},     {1, 12},    {12, 1},    {6, 12},   {12, 6},
                                    {8, 16},    {7, 7},     {33, 31},   {17, 64},  {100, 300},
                                    {127, 129}, {129, 127}, {130, 130}, {257, 300}};
    Random r = {9};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        int rows = shapes[k][0], cols = shapes[k][1], batch = rows > 200 ? 1 : 3;
        int64_t count = (int64_t)rows * cols, stride = count + 5;
        float *u = xcalloc((size_t)(stride * batch), sizeof *u);
        for (int64_t i = 0; i < stride * batch; i++)
            u[i] = i % stride < count ? (float)random_normal(&r) : NAN;
        double worst = 0, worst_aol = 0;
        bool all_intact = true;
        for (int v = 0; v < 6; v++)
            for (int fallback = 0; fallback < 2; fallback++) {
                NsOptions o = options(variant_names[v], NULL, 0, NULL, NULL);
                o.fallback = fallback;
                bool intact;
                double *q = run_batch(&o, u, stride, rows, cols, batch, &intact);
                for (int i = 0; i < batch; i++) {
                    double *expected = reference_newton_schulz(&o, u + i * stride, rows, cols);
                    double error = relative_error(q + i * count, expected, count);
                    if (o.aol)
                        worst_aol = error <= worst_aol ? worst_aol : error;
                    else
                        worst = error <= worst ? worst : error;
                    free(expected);
                }
                all_intact = all_intact && intact;
                free(q);
            }
        ok(worst <= 1e-11 && worst_aol <= 1e-6 && all_intact,
           "%dx%d, all variants, with and without fallback: error %.2g, AOL %.2g, memory around the "
           "workspace "
           "untouched",
           rows, cols, worst, worst_aol);
        free(u);
    }
    NsOptions o = options("polar", NULL, 0, NULL, "bf16");
    double *g = random_gaussian(&r, 20, 30);
    float *u = to_float(g, 600);
    double *q = run_one(&o, u, 20, 30);
    int rounded = 0;
    for (int i = 0; i < 600; i++)
        rounded += q[i] == (double)bf16_to_float(float_to_bf16((float)q[i]));
    ok(rounded == 600, "with dtype bf16 this build rounds too");
    free(g);
    free(u);
    free(q);
    o = options("turbo-gram", NULL, 0, NULL, NULL);
    bool intact;
    free(run_batch(&o, NULL, 0, 5, 9, 0, &intact));
    ok(intact, "an empty batch");
    ok(ns_workspace_bytes(&o, 40000, 40000, 3) > (size_t)3 * 40000 * 40000 * sizeof(ns_real),
       "workspace beyond 2^32 elements");
}

// ---- options ----------------------------------------------------------------------------------------------

static void refuse(NsText text, const char *part)
{
    NsOptions o;
    Error e = {""};
    bool parsed = ns_options_parse(&o, &text, &e);
    ok(!parsed && strstr(e.text, part) && !strchr(e.text, '\n'), "refused: %s", e.text);
}

static void test_options(void)
{
    NsOptions o = options("kj", "8.1,-22,15;4.0, -2.8 ,0.5", 0, NULL, NULL);
    ok(o.steps == 2 && o.tuples[0].b == -22 && o.tuples[1].c == 0.5, "custom tuples");
    o = options("gram", NULL, 0, "1,3", NULL);
    ok(o.restarts == ((1u << 1) | (1u << 3)), "restarts 1,3");
    ok(options("gram", NULL, 0, "none", NULL).restarts == 0 &&
           options("gram", NULL, 0, NULL, NULL).restarts == 4,
       "restarts none and default");
    o = options("turbo", NULL, 0, NULL, NULL);
    NsOptions polar = options("polar", NULL, 0, NULL, NULL);
    ok(o.steps == 4 && o.tuples[0].a == polar.tuples[1].a, "turbo drops the first polar tuple");
    ok(options("turbo", NULL, 5, NULL, NULL).tuples[0].a == polar.tuples[0].a, "with 5 steps it does not");
    o = options("polar", NULL, 7, NULL, NULL);
    ok(o.steps == 7 && o.tuples[6].a == polar.tuples[4].a, "further steps repeat the last tuple");
    ok(options("polar", "hybrid", 0, NULL, NULL).steps == 10, "hybrid has 10 steps");
    ok(options("polar", NULL, 0, NULL, "fp16").dtype == NS_FP16, "dtype by name");
    NsText gain = {0};
    Error e;
    gain.variant = "turbo-gram";
    gain.aol_gain = 1.8f;
    ok(ns_options_parse(&o, &gain, &e) && o.restarts == 4,
       "turbo-gram with gain 1.8 restarts after iteration 2");
    ok(ns_caution(&polar) == NULL, "no caution for the default");
    o = options("gram", NULL, 0, "none", "bf16");
    ok(ns_caution(&o) != NULL, "caution for bf16 in Gram form");
    char *line = ns_describe(&o);
    ok(strstr(line, "bf16") && strstr(line, "restarts none"), "described: %s", line);
    free(line);
}

static void test_refused_options(void)
{
    NsText t = {0};
    refuse((t.variant = "muon", t), "kj, you, polar");
    t = (NsText){0};
    refuse((t.coefficients = "1,2", t), "character 3");
    refuse((t.coefficients = "1,2,3;", t), "character 7");
    refuse((t.coefficients = "1,2,3;4,5,x", t), "tuples of three");
    refuse((t.coefficients = "1,nan,3", t), "tuples of three");
    refuse((t.coefficients = "1,2,3,4", t), "tuples of three");
    refuse((t.coefficients = "polr", t), "tuples of three");
    refuse((t.coefficients = "5,5,5", t), "becomes");
    refuse((t.coefficients = "1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;1,0,0;"
                             "1,0,0;1,0,0;1,0,0;1,0,0",
            t),
           "more than 16");
    t = (NsText){0};
    refuse((t.steps = 17, t), "1 to 16");
    refuse((t.steps = -1, t), "1 to 16");
    t = (NsText){0};
    t.variant = "gram";
    refuse((t.restarts = "2;3", t), "neither none nor");
    refuse((t.restarts = "2,", t), "neither none nor");
    refuse((t.restarts = "0", t), "not possible");
    refuse((t.restarts = "5", t), "not possible");
    refuse((t.restarts = "99999999999999999999", t), "not possible");
    t = (NsText){0};
    refuse((t.dtype = "fp8", t), "fp16");
    t = (NsText){0};
    t.variant = "turbo";
    t.aol_gain = 1.8f;
    refuse((t.coefficients = "ga", t), "smaller AOL gain");
    refuse((t.aol_gain = -1, t), "AOL gain");
}

int main(void)
{
    PART(test_coefficients());
    PART(test_options());
    PART(test_refused_options());
    PART(test_scalar_map());
    PART(test_known_results());
    PART(test_gram_equals_standard());
    for (int v = 0; v < 6; v++)
        PART(test_invariances(variant_names[v]));
    PART(test_scale_with_eps());
    PART(test_shapes());
    PART(test_polar_error_small());
    PART(test_polar_error_spectra());
    PART(test_polar_error_large());
    return tap_done();
}
