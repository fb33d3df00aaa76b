// The CUDA primitives and variants of Newton-Schulz against the CPU backend in double.
//   test_ns_gpu [--portable] [reference [emulation]]
// reference (build/ref/libref_fp32.so) is the CPU backend built with -DFLOATX_FP32, where NS_FP32 means
// doubles and no rounding; emulation (build/ref/libref_bf16.so) the ordinary one, which rounds wherever the
// GPU does and knows nothing of its results. A variant may be as wrong as the fixed limits, which are those
// of 768 rows and more, or twice as wrong as the emulation on the same matrix: small or nearly square
// matrices have singular values where the polynomials are steepest, and there the same arithmetic on the CPU
// exceeds the fixed limits too. Twice, because sums in another order are rounded differently.
#include "dev/test/ns_gpu_arrays.h"
#include "dev/test/ns_gpu_chains.h"
#include "dev/test/tap.h"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/muon/ns_gpu.h"
#include "llmc/base/floatx.h"
#include "llmc/ops/ops.h"

// The CPU backend's, twice.
// clang-format off
#define OPS(F) \
    F(ns_load) F(ns_load_rows) F(ns_gram) F(ns_symmetric) F(ns_apply) F(ns_gram_raw) F(ns_aol) \
    F(ns_symmetric_scaled) F(ns_transpose) F(ns_workspace_bytes) F(newton_schulz)
// clang-format on
#include "dev/test/ops_library.h"
static Ops ref, emulation;

// ---- comparisons ------------------------------------------------------------------------------------------

// Largest excess of |value - exact| over one rounding to the dtype plus `sums`, the bound for what the fp32
// sums may lose; 1 and below passes. NaN gives infinity.
static double excess(NsDtype dtype, const double *value, const double *exact, int64_t count, double sums)
{
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        double limit = unit_roundoff[dtype] * fabs(exact[i]) * 1.001 + smallest_step[dtype] + sums;
        double ratio = fabs(value[i] - exact[i]) / limit;
        if (!(ratio <= worst))
            worst = isnan(ratio) ? (value[i] == exact[i] ? worst : INFINITY) : ratio;
    }
    return worst;
}

static bool is_symmetric(const double *a, int n, int batch)
{
    for (int b = 0; b < batch; b++, a += (int64_t)n * n)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++)
                if (a[(int64_t)i * n + j] != a[(int64_t)j * n + i])
                    return false;
    return true;
}
// A sum of `depth` products of fp32 exactness, each of size up to `product`, may be off by this much.
static double sum_bound(int depth, double product) { return 2 * depth * product * 0x1p-24 * sqrt(depth); }

#include "dev/test/ns_gpu_primitives.h"

// ---- variants ---------------------------------------------------------------------------------------------

// By the emulation: the ordinary backend keeps every dtype in floats.
static double *emulated_run(const NsOptions *o, const float *u, int rows, int cols)
{
    void *workspace = aligned_alloc(256, (emulation.ns_workspace_bytes(o, rows, cols, 1) + 256) / 256 * 256);
    NsInput in = {u, rows, cols, 1, 0, 0, 0};
    double *out = to_double(emulation.newton_schulz(NULL, o, &in, workspace), (int64_t)rows * cols);
    free(workspace);
    return out;
}

// The form that the GPU takes: the emulation's error is to be that of the same arithmetic.
static NsOptions as_run(NsOptions o, int rows, int cols)
{
    int n = (int)min_i64(rows, cols), m = (int)max_i64(rows, cols);
    if (o.fallback && ns_iterates(o.dtype, n, m))
        o.gram = false;
    return o;
}

static double *reference_run(NsOptions o, const float *u, int rows, int cols, int batch)
{
    int64_t count = (int64_t)rows * cols * batch;
    o.dtype = NS_FP32;
    void *workspace = aligned_alloc(256, (ref.ns_workspace_bytes(&o, rows, cols, batch) + 256) / 256 * 256);
    NsInput in = {u, rows, cols, batch, (int64_t)rows * cols, 0, 0};
    double *out = matrix(count, 1), *result = ref.newton_schulz(NULL, &o, &in, workspace);
    memcpy(out, result, (size_t)count * sizeof *out);
    free(workspace);
    return out;
}

static double *gpu_run(const NsOptions *o, const float *u, int rows, int cols, int batch, bool captured,
                       bool *guards)
{
    int64_t count = (int64_t)rows * cols * batch;
    Array du = array_new((size_t)count * sizeof *u),
          work = array_new(ns_workspace_bytes(o, rows, cols, batch));
    copy_to_device(NULL, du.p, u, du.bytes);
    stream_synchronize(NULL);
    Stream s = captured ? stream_create() : NULL;
    Graph *graph = NULL;
    if (captured && !graph_begin(s))
        captured = false;
    NsInput in = {du.p, rows, cols, batch, (int64_t)rows * cols, 0, 0};
    void *result = newton_schulz(s, o, &in, work.p);
    if (captured) {
        graph = graph_end(s);
        graph_launch(graph, s);
        graph_launch(graph, s); // the second finds the workspace used
        stream_synchronize(s);
        graph_destroy(graph);
    }
    double *out = values_of(o->dtype, result, count);
    bool intact = intact_and_free(du) & intact_and_free(work);
    if (guards)
        *guards = intact;
    if (s)
        stream_destroy(s);
    return out;
}

typedef struct {
    const char *variant, *coefficients, *dtype;
    double wide, square,
        hard; // limits of the relative error: Gaussian with m >= 1.5 n, other Gaussian, log-uniform spectrum
    double top; // largest singular value allowed
} Case;
// How far the rounding of the normalised matrix alone can move the result: the change when the normalisation
// is off by one rounding.
static double sensitivity(NsOptions o, const float *u, const double *exact, int rows, int cols)
{
    double worst = 0;
    float kappa = o.kappa, gain = o.aol_gain;
    for (int sign = -1; sign <= 1; sign += 2) {
        o.kappa = kappa * (1 + sign * (float)unit_roundoff[o.dtype]);
        o.aol_gain = gain * (1 + sign * (float)unit_roundoff[o.dtype]);
        double *moved = reference_run(o, u, rows, cols, 1);
        worst = fmax(worst, relative_error(moved, exact, (int64_t)rows * cols));
        free(moved);
    }
    return worst;
}

static const Case cases[] = {
    {"kj", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.21},
    {"you", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.155},
    {"polar", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.15},
    {"polar", NULL, "fp16", 3e-3, 3e-3, 1.5e-2, 1.15},
    {"polar", NULL, "fp32", 2e-5, 2e-5, 1e-4, 1.15},
    {"gram", "dao", "fp16", 3e-3, 4e-2, 7e-2, 1.20},
    {"gram", NULL, "fp16", 4e-3, 6e-2, 1e-1, 1.20},
    {"turbo", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.15},
    {"turbo-gram", NULL, "fp16", 4e-3, 2.5e-2, 7e-2, 1.20},
    {"turbo-gram", NULL, "bf16", 2e-2, 3e-2, 8e-2, 1.20},
};
enum { CASES = sizeof cases / sizeof *cases };

// Every case on three matrices, the second of them zero; `step`: every step-th case.
static void test_variants_of(Random *r, int rows, int cols, int step)
{
    int64_t size = (int64_t)rows * cols;
    double *g = gaussian(r, 3 * size);
    for (int64_t k = 0; k < size; k++)
        g[size + k] = 0; // an empty slot between two matrices
    float *u = to_float(g, 3 * size);
    bool large = rows >= 768 && cols >= 768;
    printf("# %dx%d: %s\n", rows, cols,
           ns_path_name(ns_iteration_path(NS_BF16, (int)min_i64(rows, cols), (int)max_i64(rows, cols))));
    for (int k = 0; k < CASES; k += step) {
        const Case *c = &cases[k];
        NsOptions o = options(c->variant, c->coefficients, 0, NULL, c->dtype);
        bool guards, zeros = true;
        double *out = gpu_run(&o, u, rows, cols, 3, false, &guards),
               *exact = reference_run(o, u, rows, cols, 1);
        for (int64_t e = 0; e < size; e++)
            zeros = zeros && out[size + e] == 0;
        double error = relative_error(out, exact, size),
               limit = 2 * max_i64(rows, cols) >= 3 * min_i64(rows, cols) ? c->wide : c->square;
        if (!large) {
            NsOptions same = as_run(o, rows, cols);
            double *emulated = emulated_run(&same, u, rows, cols);
            limit = fmax(limit, 2 * relative_error(emulated, exact, size));
            free(emulated);
        }
        if (min_i64(rows, cols) < 16)
            limit = fmax(limit, 2 * sensitivity(o, u, exact, rows, cols));
        ok(error <= limit && zeros && guards,
           "%s%s%s in %s, %dx%d: relative error %.2g <= %.2g, empty slot stays zero, guards intact",
           c->variant, c->coefficients ? " " : "", c->coefficients ? c->coefficients : "", c->dtype, rows,
           cols, error, limit);
        free(out);
        free(exact);
    }
    free(g);
    free(u);
}

static void test_variants(void)
{
    Random r = {2};
    for (int i = 0; i < SHAPES + 2; i++) {
        int rows = i < SHAPES ? shapes[i][0] : shapes[i == SHAPES ? 6 : 3][1],
            cols = i < SHAPES ? shapes[i][1] : shapes[i == SHAPES ? 6 : 3][0];
        bool large = rows >= 768 &&
                     cols >= 768; // the reference takes seconds: every second case, and all for one shape
        test_variants_of(&r, rows, cols, large && cols != 3072 ? 2 : 1);
    }
}

#include "dev/test/ns_gpu_large.h"

// Shapes that one kernel iterates on: one and two blocks a matrix, whole and cut boxes, one to many turns
// with x, transposed.
static void test_small(void)
{
    static const int small[][2] = {{64, 64},   {72, 1000}, {128, 128}, {128, 512}, {136, 144}, {192, 768},
                                   {200, 264}, {256, 256}, {256, 768}, {768, 256}, {256, 2048}};
    Random r = {6};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        int n = (int)min_i64(small[i][0], small[i][1]), m = (int)max_i64(small[i][0], small[i][1]);
        if (device_has_wgmma())
            ok(ns_iteration_path(NS_FP16, n, m) == NS_PATH_SMALL, "%dx%d: one kernel's", n, m);
        test_variants_of(&r, small[i][0], small[i][1], 1);
    }
}

static double largest_singular_value(const double *a, int n, int m) // power iteration on a a^T
{
    double *gram = matrix(n, n), *v = matrix(n, 1), *w = matrix(n, 1), size = 0;
    multiply(gram, a, a, true, n, n, m);
    for (int i = 0; i < n; i++)
        v[i] = 1 + 0.3 * sin(i);
    for (int step = 0; step < 300; step++) {
        multiply(w, gram, v, false, n, 1, n);
        size = norm(w, n);
        for (int i = 0; i < n; i++)
            v[i] = size > 0 ? w[i] / size : 0;
    }
    free(gram);
    free(v);
    free(w);
    return sqrt(size);
}

// One case on one matrix; the Gram form of a matrix that small has to be asked for.
static void test_spectrum(const Case *c, const char *spectrum, const float *u, int n, int m, bool fallback)
{
    NsOptions o = options(c->variant, c->coefficients, 0, NULL, c->dtype), same;
    o.fallback = fallback;
    same = as_run(o, n, m);
    double *out = gpu_run(&o, u, n, m, 1, false, NULL), *exact = reference_run(o, u, n, m, 1);
    double error = relative_error(out, exact, (int64_t)n * m), top = largest_singular_value(out, n, m);
    double *emulated = emulated_run(&same, u, n, m),
           emulated_error = relative_error(emulated, exact, (int64_t)n * m);
    double most = fmax(c->top, 1.1 * largest_singular_value(emulated, n, m)),
           limit = fmax(c->hard, 2 * emulated_error);
    ok(error <= limit && top <= most,
       "%s, %dx%d, %s%s%s in %s%s: relative error %.2g <= %.2g, largest singular value %.3f <= %.3f",
       spectrum, n, m, c->variant, c->coefficients ? " " : "", c->coefficients ? c->coefficients : "",
       c->dtype, same.gram ? ", Gram form" : "", error, limit, top, most);
    free(out);
    free(exact);
    free(emulated);
}

static void test_negative_control(const float *u, int n, int m)
{
    NsOptions control = options("gram", NULL, 0, "none", "bf16");
    control.fallback = false;
    double *out = gpu_run(&control, u, n, m, 1, false, NULL), top = largest_singular_value(out, n, m);
    ok(!(top <= 1.3),
       "negative control: bf16 in Gram form without restart is found out, largest singular value %.3g", top);
    free(out);
}

// One block a matrix and, but for the Gram form, two.
static void test_spectra(void)
{
    static const int sizes[][2] = {{128, 512}, {192, 384}};
    Random r = {3};
    for (int i = 0; i < 2; i++) {
        int n = sizes[i][0], m = sizes[i][1];
        Frames f = make_frames(&r, n, m);
        for (int kind = 0; kind < SPECTRA; kind++) {
            float *u = with_spectrum(&f, (SpectrumKind)kind, &r);
            for (int k = 0; k < CASES; k++) {
                bool gram = !strncmp(cases[k].variant, "gram", 4) || !strcmp(cases[k].variant, "turbo-gram");
                test_spectrum(&cases[k], spectrum_names[kind], u, n, m, true);
                if (gram && i == 0)
                    test_spectrum(&cases[k], spectrum_names[kind], u, n, m, false);
            }
            if (kind == TWO_LARGE && i == 0)
                test_negative_control(u, n, m);
            free(u);
        }
        free_frames(&f);
        double *g = gaussian(&r, (int64_t)n * m);
        for (int64_t e = 0; e < (int64_t)n * m; e++)
            g[e] *= e / m == 7 ? 0 : pow(10, -5.0 * (double)(e / m) / (n - 1));
        float *u = to_float(g, (int64_t)n * m);
        for (int k = 0; k < CASES; k++)
            test_spectrum(&cases[k], "rows scaled 1e-5 .. 1, one of them zero", u, n, m, true);
        free(g);
        free(u);
    }
}

// ---- batches, repeats, graphs, large offsets --------------------------------------------------------------

// More matrices than clusters of blocks, too: then each cluster has several.
static void test_batches(void)
{
    static const struct {
        int n, m, batch;
        const char *variant;
    } kinds[] = {{256, 768, 64, "turbo-gram"}, {100, 300, 64, "polar"},  {257, 513, 64, "turbo"},
                 {96, 200, 64, "gram"},        {520, 528, 64, "turbo"},  {256, 264, 64, "polar"},
                 {96, 300, 64, "gram"},        {136, 144, 200, "turbo"}, {72, 80, 300, "polar"}};
    Random r = {4};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        int n = kinds[k].n, m = kinds[k].m, batch = kinds[k].batch;
        int64_t size = (int64_t)n * m, count = batch * size;
        NsOptions o = options(kinds[k].variant, NULL, 0, NULL, NULL);
        double *g = gaussian(&r, count);
        float *u = to_float(g, count);
        double *all = gpu_run(&o, u, n, m, batch, false, NULL),
               *again = gpu_run(&o, u, n, m, batch, false, NULL);
        double *graph = gpu_run(&o, u, n, m, batch, true, NULL);
        size_t bytes = (size_t)size * sizeof(double), total = (size_t)count * sizeof(double);
        ok(!memcmp(all, again, total), "%s %dx%d, %d matrices: two runs agree to the bit", kinds[k].variant,
           n, m, batch);
        ok(!memcmp(all, graph, total), "... and a replayed graph");
        for (int i = 0; i < batch; i += (batch - 1) / 2) {
            double *one = gpu_run(&o, u + i * size, n, m, 1, false, NULL);
            ok(!memcmp(all + i * size, one, bytes), "... and matrix %d alone", i);
            free(one);
        }
        double *none = gpu_run(&o, u, n, m, 0, false, NULL);
        free(g);
        free(u);
        free(all);
        free(again);
        free(graph);
        free(none);
    }
}

// batch * stride beyond 2^31 elements: the last matrix must come out as the first.
static void test_large_offsets(void)
{
    enum { SIDE = 2048, BATCH = 520 };
    int64_t size = (int64_t)SIDE * SIDE;
    size_t bytes = (size_t)size * 2;
    Random r = {5};
    double *g = gaussian(&r, size);
    Array one = array_of(NS_BF16, g, size, NULL);
    char *x = device_alloc(bytes * BATCH, "large batch"), *y = device_alloc(bytes * BATCH, "large batch");
    for (int i = 0; i < BATCH; i++)
        copy_on_device(NULL, x + bytes * (size_t)i, one.p, bytes);
    uint16_t *first = malloc(bytes), *last = malloc(bytes);
    for (int op = 0; op < 3; op++) {
        if (op == 0)
            ns_gram(AT_ONCE(NULL, NS_BF16, BATCH), y, x, SIDE, SIDE);
        if (op == 1)
            ns_apply(
                AT_ONCE(NULL, NS_BF16, BATCH),
                &(NsApply){.y = y, .b = x, .x = x, .alpha = 1, .a = 2, .n = SIDE, .m = SIDE, .packed = true});
        if (op == 2)
            ns_transpose(NULL, NS_BF16, y, x, SIDE, SIDE, BATCH);
        copy_to_host(NULL, first, y, bytes);
        copy_to_host(NULL, last, y + bytes * (BATCH - 1), bytes);
        stream_synchronize(NULL);
        ok(!memcmp(first, last, bytes), "%s on %.2g elements",
           (const char *[]){"gram", "apply", "transpose"}[op], (double)size * BATCH);
    }
    device_free(x);
    device_free(y);
    intact_and_free(one);
    free(g);
    free(first);
    free(last);
}

// Six matrices side by side, then two of others, as a layer's Wq, Wk and Wv, Wo: the same bits as of packed
// ones.
static void test_groups(const char *variant, int rows, int cols)
{
    enum { GROUP = 6, GROUPS = 3, BATCH = GROUP * GROUPS };
    int64_t count = (int64_t)rows * cols, group_stride = (GROUP + 2) * count;
    float *packed = xcalloc((size_t)(BATCH * count), sizeof *packed),
          *apart = xcalloc((size_t)(GROUPS * group_stride), sizeof *apart);
    Random r = {23};
    for (int64_t i = 0; i < BATCH * count; i++)
        packed[i] = (float)random_normal(&r);
    for (int i = 0; i < GROUPS; i++)
        memcpy(apart + i * group_stride, packed + i * GROUP * count,
               (size_t)(GROUP * count) * sizeof *packed);
    NsOptions o = options(variant, NULL, 0, NULL, NULL);
    double *want = gpu_run(&o, packed, rows, cols, BATCH, false, NULL);
    Array du = array_new((size_t)(GROUPS * group_stride) * sizeof *apart),
          work = array_new(ns_workspace_bytes(&o, rows, cols, BATCH));
    copy_to_device(NULL, du.p, apart, du.bytes);
    NsInput in = {du.p, rows, cols, BATCH, count, GROUP, group_stride};
    double *got = values_of(o.dtype, newton_schulz(NULL, &o, &in, work.p), BATCH * count);
    bool intact = intact_and_free(du) & intact_and_free(work);
    ok(intact && !memcmp(got, want, (size_t)(BATCH * count) * sizeof *got),
       "%s: %d of %dx%d in groups of 6, the same bits as packed", variant, BATCH, rows, cols);
    free(packed);
    free(apart);
    free(want);
    free(got);
}

int main(int argc, char **argv)
{
    set_program_name("test_ns_gpu", -1);
    bool portable = argc > 1 && !strcmp(argv[1], "--portable"); // the kernels that every supported GPU runs
    argc -= portable;
    argv += portable;
    const char *paths[] = {argc > 1 ? argv[1] : "build/ref/libref_fp32.so",
                           argc > 2 ? argv[2] : "build/ref/libref_bf16.so"};
    if (!load_ops(&ref, "", paths[0]) || !load_ops(&emulation, "", paths[1]))
        return EXIT_BAD_INPUT;
    backend_open(0);
    device_set_portable(portable);
    ns_reserve();
    PART(test_batches());
    PART(test_chains());
    PART(test_large_offsets());
    PART(test_primitives());
    PART(test_spectra());
    PART(test_variants());
    PART(test_large_variants());
    PART(test_small());
    for (int i = 0; i < 2; i++) {
        PART(test_groups(i ? "turbo-gram" : "polar", 256, 768));
        PART(test_groups(i ? "turbo-gram" : "polar", 16, 48));
    }
    backend_close();
    return tap_done();
}
