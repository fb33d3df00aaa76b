// The CUDA primitives and variants of Newton-Schulz against the CPU backend in double.
//   test_ns_gpu [--portable] [--only batches|chains|offsets|primitives|spectra|variants|small] [reference [emulation]]
// reference (build/ref/libref_fp32.so) is the CPU backend built with -DFLOATX_FP32, where NS_FP32 means doubles and no rounding;
// emulation (build/ref/libref_bf16.so) the ordinary one, which rounds wherever the GPU does and knows nothing of its results.
// A variant may be as wrong as the fixed limits, which are those of 768 rows and more, or twice as wrong as the emulation on the
// same matrix: small or nearly square matrices have singular values where the polynomials are steepest, and there the same
// arithmetic on the CPU exceeds the fixed limits too. Twice, because sums in another order are rounded differently.
#include "dev/test/ns_gpu_arrays.h"
#include "dev/test/ns_gpu_chains.h"
#include "dev/test/tap.h"
#include "llmc/cuda/device.h"
#include "llmc/cuda/ns_gpu.h"
#include "llmc/floatx.h"
#include "llmc/ops.h"

// The CPU backend's, twice.
#define OPS(F)                                                                                                                   \
    F(ns_load) F(ns_load_rows)                                                                                                   \
    F(ns_gram) F(ns_symmetric) F(ns_apply) F(ns_gram_raw) F(ns_aol) F(ns_symmetric_scaled) F(ns_transpose)                       \
    F(ns_workspace_bytes) F(newton_schulz)
#include "dev/test/ops_library.h"
static Ops ref, emulation;

// ---- comparisons -------------------------------------------------------------------------------------------------------

// Largest excess of |value - exact| over one rounding to the dtype plus `sums`, the bound for what the fp32 sums may lose; 1 and
// below passes. NaN gives infinity.
static double excess(NsDtype dtype, const double *value, const double *exact, int64_t count, double sums)
{
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        double limit = unit_roundoff[dtype] * fabs(exact[i]) * 1.001 + smallest_step[dtype] + sums;
        double ratio = fabs(value[i] - exact[i]) / limit;
        if (!(ratio <= worst)) worst = isnan(ratio) ? (value[i] == exact[i] ? worst : INFINITY) : ratio;
    }
    return worst;
}
static bool is_symmetric(const double *a, int n, int batch)
{
    for (int b = 0; b < batch; b++, a += (int64_t)n * n)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++)
                if (a[(int64_t)i * n + j] != a[(int64_t)j * n + i]) return false;
    return true;
}
// A sum of `depth` products of fp32 exactness, each of size up to `product`, may be off by this much.
static double sum_bound(int depth, double product) { return 2 * depth * product * 0x1p-24 * sqrt(depth); }

// ---- products ------------------------------------------------------------------------------------------------------------

static double *gaussian(Random *r, int64_t count)
{
    double *g = matrix(count, 1);
    for (int64_t i = 0; i < count; i++) g[i] = random_normal(r);
    return g;
}
static double *symmetric_gaussian(Random *r, int n, int batch)
{
    double *g = gaussian(r, (int64_t)n * n * batch);
    for (int b = 0; b < batch; b++)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++) g[((int64_t)b * n + j) * n + i] = g[((int64_t)b * n + i) * n + j];
    return g;
}

static void test_gram(Random *r, NsDtype dtype, int n, int m, int batch)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch;
    double *x = gaussian(r, count), *exact = matrix(square, 1);
    Array dx = pitched_of(dtype, x, (int64_t)n * batch, m, ns_pitch(dtype, n, m), x),
          da = array_new((size_t)square * ns_element_size(dtype));
    ns_gram(NULL, dtype, da.p, dx.p, n, m, batch);
    ref.ns_gram(NULL, NS_FP32, exact, x, n, m, batch);
    double *a = values_of(dtype, da.p, square);
    double over = excess(dtype, a, exact, square, sum_bound(m, 4));
    bool guards = intact_and_free(dx) & intact_and_free(da);
    ok(over <= 1 && is_symmetric(a, n, batch) && guards,
       "gram %s, %d of %dx%d: error %.3f of the bound, symmetric, guards intact", dtype_name[dtype], batch, n, m, over);
    free(x), free(exact), free(a);
}

// q against c + value I, from the c that was stored.
static double diagonal_excess(NsDtype dtype, const double *q, const double *c, double value, int n, int batch)
{
    int64_t square = (int64_t)n * n * batch;
    double *exact = matrix(square, 1);
    for (int64_t i = 0; i < square; i++) exact[i] = c[i] + (i / n % n == i % n ? value : 0);
    double over = excess(dtype, q, exact, square, 0);
    free(exact);
    return over;
}

static void test_symmetric(Random *r, NsDtype dtype, int n, int batch, float beta)
{
    int64_t square = (int64_t)n * n * batch;
    double *a = symmetric_gaussian(r, n, batch), *b = symmetric_gaussian(r, n, batch), *d = symmetric_gaussian(r, n, batch);
    double *exact = matrix(square, 1);
    Array da = array_of(dtype, a, square, a), db = array_of(dtype, b, square, b), dd = array_of(dtype, d, square, d);
    Array dc = array_new(da.bytes), dq = array_new(da.bytes);
    ns_symmetric(NULL, dtype, dc.p, dq.p, 4.25f, 0.75f, da.p, db.p, beta, dd.p, n, batch);
    ref.ns_symmetric(NULL, NS_FP32, exact, NULL, 0, 0.75f, a, b, beta, d, n, batch);
    double *c = values_of(dtype, dc.p, square), *q = values_of(dtype, dq.p, square);
    double over = excess(dtype, c, exact, square, sum_bound(n, 4)), over_q = diagonal_excess(dtype, q, c, 4.25, n, batch);
    bool symmetric = is_symmetric(c, n, batch) && is_symmetric(q, n, batch);
    // One tensor as all operands, as the iteration calls it.
    ns_symmetric(NULL, dtype, dc.p, NULL, 0, -0.5f, da.p, da.p, beta, da.p, n, batch);
    ns_symmetric(NULL, dtype, NULL, dq.p, 4.25f, -0.5f, da.p, da.p, beta, da.p, n, batch);
    ref.ns_symmetric(NULL, NS_FP32, exact, NULL, 0, -0.5f, a, a, beta, a, n, batch);
    double *same = values_of(dtype, dc.p, square), over_same = excess(dtype, same, exact, square, sum_bound(n, 4));
    double *only = values_of(dtype, dq.p, square), over_only = diagonal_excess(dtype, only, same, 4.25, n, batch);
    symmetric = symmetric && is_symmetric(same, n, batch);
    bool guards = intact_and_free(da) & intact_and_free(db) & intact_and_free(dd) & intact_and_free(dc) & intact_and_free(dq);
    ok(over <= 1 && over_same <= 1 && over_q <= 1 && over_only <= 1 && symmetric && guards,
       "symmetric %s, %d of %d, beta %g: error %.3f, one tensor %.3f of the bound; with diagonal %.3f, %.3f", dtype_name[dtype],
       batch, n, beta, over, over_same, over_q, over_only);
    free(a), free(b), free(d), free(exact), free(c), free(q), free(same), free(only);
}

static void test_apply(Random *r, NsDtype dtype, int n, int m, int batch, float a)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch, rows = (int64_t)n * batch;
    int pitch = ns_pitch(dtype, n, m);
    double *x = gaussian(r, count), *b = gaussian(r, square), *exact = matrix(count, 1); // b need not be symmetric here
    Array dx = pitched_of(dtype, x, rows, m, pitch, x), db = array_of(dtype, b, square, b), dy = array_new(dx.bytes);
    Array dp = array_new((size_t)count * ns_element_size(dtype));
    ns_apply(NULL, dtype, dy.p, false, 0.5f, db.p, dx.p, a, n, m, batch);
    ns_apply(NULL, dtype, dp.p, true, 0.5f, db.p, dx.p, a, n, m, batch);
    ref.ns_apply(NULL, NS_FP32, exact, true, 0.5f, b, x, a, n, m, batch);
    double *y = pitched_values(dtype, dy.p, rows, m, pitch), *packed = values_of(dtype, dp.p, count);
    double over = excess(dtype, y, exact, count, sum_bound(n, 4));
    bool same = !memcmp(y, packed, (size_t)count * sizeof *y);
    bool guards = intact_and_free(dx) & intact_and_free(db) & intact_and_free(dy) & intact_and_free(dp);
    ok(over <= 1 && same && guards, "apply %s, %d of %dx%d, a = %g: error %.3f of the bound, the same packed",
       dtype_name[dtype], batch, n, m, a, over);
    free(x), free(b), free(exact), free(y), free(packed);
}

// ---- elementwise -------------------------------------------------------------------------------------------------------

static void test_load(Random *r, NsDtype dtype, int rows, int cols, int batch, bool transpose)
{
    int64_t size = (int64_t)rows * cols, stride = size + 12, count = size * batch;
    int n = transpose ? cols : rows, m = transpose ? rows : cols, pitch = ns_pitch(dtype, n, m);
    double *u = gaussian(r, stride * batch), *exact = matrix(count, 1), worst = 0;
    for (int64_t i = 0; i < size; i++) u[stride + i] = 0; // an empty slot
    Array du = array_of(NS_FP32, u, stride * batch, u),
          dx = array_new((size_t)n * (size_t)pitch * (size_t)batch * ns_element_size(dtype));
    Array ds = array_new((size_t)batch * sizeof(float));
    float *host_u = to_float(u, stride * batch), *exact_sums = xcalloc((size_t)batch, sizeof(float));
    ns_load(NULL, dtype, dx.p, ds.p, du.p, stride, 1.02f, 1e-6f, 3, rows, cols, batch, transpose);
    ref.ns_load(NULL, NS_FP32, exact, exact_sums, host_u, stride, 1.02f, 1e-6f, 3, rows, cols, batch, transpose);
    double *sums = values_of(NS_FP32, ds.p, batch), *x = pitched_values(dtype, dx.p, (int64_t)n * batch, m, pitch), largest = 0;
    for (int i = 0; i < batch; i++) worst = larger_error(worst, fabs(sums[i] - exact_sums[i]) / fmax(exact_sums[i], 1e-30));
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(exact[i]));
    double over = excess(dtype, x, exact, count, largest * 1e-6);
    bool guards = intact_and_free(du) & intact_and_free(dx) & intact_and_free(ds);
    ok(worst <= 1e-6 && over <= 1 && guards, "norm and load %s, %d of %dx%d%s: %.2g, %.3f of the bound", dtype_name[dtype], batch,
       rows, cols, transpose ? ", transposed" : "", worst, over);
    free(u), free(exact), free(host_u), free(exact_sums), free(sums), free(x);
}

// Each row of x times its unit is the row of u as it was, and its largest element where it should be.
static void test_load_rows(Random *r, NsDtype dtype, int rows, int cols, int batch, bool transpose)
{
    int64_t size = (int64_t)rows * cols, stride = size + 12, count = size * batch;
    int n = transpose ? cols : rows, m = transpose ? rows : cols, pitch = ns_pitch(dtype, n, m);
    double *u = gaussian(r, stride * batch), *exact = matrix(count, 1);
    for (int64_t i = 0; i < stride * batch; i++) {
        int64_t row = transpose ? i % stride % cols : i % stride / cols;
        u[i] = i < stride && row == 0 ? 0 : u[i] * exp2((double)(row % 5 * 9));
    }
    Array du = array_of(NS_FP32, u, stride * batch, u), ds = array_new((size_t)n * (size_t)batch * sizeof(float));
    Array dx = array_new((size_t)n * (size_t)pitch * (size_t)batch * ns_element_size(dtype));
    ns_load_rows(NULL, dtype, dx.p, ds.p, du.p, stride, rows, cols, batch, transpose);
    double *unit = values_of(NS_FP32, ds.p, (int64_t)n * batch), *x = pitched_values(dtype, dx.p, (int64_t)n * batch, m, pitch);
    bool right = unit[0] == 1;
    for (int64_t i = 0; i < (int64_t)n * batch; i++) {
        double most = 0;
        for (int64_t j = 0; j < m; j++) {
            exact[i * m + j] = u[i / n * stride + (transpose ? j * n + i % n : i % n * m + j)] / unit[i];
            most = fmax(most, fabs(exact[i * m + j]));
        }
        right = right && exp2(rint(log2(unit[i]))) == unit[i] && (i == 0 || (most >= 32 && most < 64));
    }
    double over = excess(dtype, x, exact, count, 0);
    bool guards = intact_and_free(du) & intact_and_free(dx) & intact_and_free(ds);
    ok(right && over <= 1 && guards, "load by rows %s, %d of %dx%d%s: %.3f of the bound", dtype_name[dtype], batch, rows, cols,
       transpose ? ", transposed" : "", over);
    free(u), free(exact), free(unit), free(x);
}

static void test_spoilt_norms(void)
{
    enum { SIZE = 64 * 64 };
    float *u = xcalloc(3 * SIZE, sizeof *u);
    for (int i = 0; i < 2 * SIZE; i++) u[i] = 1;
    u[77] = NAN, u[SIZE + 5] = 2e30f; // the second's norm overflows
    Array ds = array_new(3 * sizeof(float)), du = array_new(3 * SIZE * sizeof *u), dx = array_new(3 * SIZE * 2);
    copy_to_device(NULL, du.p, u, du.bytes);
    stream_synchronize(NULL);
    ns_load(NULL, NS_BF16, dx.p, ds.p, du.p, SIZE, 1, 0, 1, 64, 64, 3, false);
    double *x = values_of(NS_BF16, dx.p, 3 * SIZE);
    bool right = true;
    for (int i = 0; i < 3 * SIZE; i++) right = right && (i < 2 * SIZE ? isnan(x[i]) : x[i] == 0);
    ok(right, "load: NaN and infinite norms give NaN, a zero norm without eps gives zeros");
    free(u), free(x), intact_and_free(ds), intact_and_free(du), intact_and_free(dx);
}

static void test_transpose_and_scaled(Random *r, NsDtype dtype, int n, int m, int batch)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch;
    double *x = gaussian(r, count), *a = symmetric_gaussian(r, n, batch), *d = symmetric_gaussian(r, n, batch);
    double *scale = gaussian(r, (int64_t)n * batch), *exact_q = matrix(square, 1), *exact_t = matrix(count, 1);
    scale[n / 2] = 1e6; // overflows fp16
    Array dx = pitched_of(dtype, x, (int64_t)n * batch, m, ns_pitch(dtype, n, m), x);
    Array da = array_of(dtype, a, square, a), dd = array_of(dtype, d, square, d), dz = array_new(da.bytes);
    Array ds = array_of(NS_FP32, scale, (int64_t)n * batch, scale), dq = array_new(da.bytes),
          dt = array_new((size_t)count * ns_element_size(dtype));
    ns_transpose(NULL, dtype, dt.p, dx.p, n, m, batch);
    ref.ns_transpose(NULL, NS_FP32, exact_t, x, n, m, batch);
    ns_symmetric_scaled(NULL, dtype, dq.p, 4.25f, 0.75f, da.p, da.p, -0.5f, dd.p, ds.p, 16, n, batch);
    ns_symmetric(NULL, dtype, NULL, dz.p, 4.25f, 0.75f, da.p, da.p, -0.5f, dd.p, n, batch);
    double *z = values_of(dtype, dz.p, square);
    for (int64_t i = 0; i < square; i++) exact_q[i] = 16 * scale[i / ((int64_t)n * n) * n + i % n] * z[i];
    for (int64_t i = 0; dtype == NS_FP16 && i < square; i++) exact_q[i] = fmax(-65504, fmin(65504, exact_q[i]));
    double *t = values_of(dtype, dt.p, count), *q = values_of(dtype, dq.p, square);
    bool exact = !memcmp(t, exact_t, (size_t)count * sizeof *t);
    double over_q = excess(dtype, q, exact_q, square, 1e-6);
    bool guards = intact_and_free(dx) & intact_and_free(da) & intact_and_free(dd) & intact_and_free(dz) & intact_and_free(ds) &
                  intact_and_free(dq) & intact_and_free(dt);
    ok(exact && over_q <= 1 && guards, "transpose exact, symmetric_scaled %.3f of one rounding: %s, %d of %dx%d", over_q,
       dtype_name[dtype], batch, n, m);
    free(x), free(a), free(d), free(z), free(scale), free(exact_q), free(exact_t), free(t), free(q);
}

static void test_aol(Random *r, NsDtype dtype, int n, int m, int batch, bool with_units)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch, rows = (int64_t)n * batch;
    double *x = gaussian(r, count), *raw = matrix(square, 1), *exact = matrix(square, 1), *unit = matrix(rows, 1);
    for (int64_t i = 0; i < rows; i++) unit[i] = exp2((double)(i * 7 % 11) - 5);
    for (int j = 0; j < m; j++) x[j] = 0; // a row of the first matrix without any entry
    Array dx = pitched_of(dtype, x, rows, m, ns_pitch(dtype, n, m), x), draw = array_new(ns_raw_bytes(dtype, n, m, batch));
    Array ds = array_new((size_t)rows * sizeof(float)), da = array_new((size_t)square * ns_element_size(dtype));
    float *exact_scale = xcalloc((size_t)rows, sizeof(float)), *host_unit = to_float(unit, rows);
    Array du = array_of(NS_FP32, unit, rows, NULL);
    ns_gram_raw(NULL, dtype, draw.p, dx.p, with_units ? du.p : NULL, n, m, batch);
    ns_aol(NULL, dtype, ds.p, da.p, draw.p, with_units ? du.p : NULL, 1.8f, n, m, batch);
    ref.ns_gram_raw(NULL, NS_FP32, raw, x, NULL, n, m, batch);
    ref.ns_aol(NULL, NS_FP32, exact_scale, exact, raw, with_units ? host_unit : NULL, 1.8f, n, m, batch);
    double *a = values_of(dtype, da.p, square), *scale = values_of(NS_FP32, ds.p, rows), worst = 0, largest = 0;
    for (int64_t i = 0; i < rows; i++) worst = larger_error(worst, fabs(scale[i] - exact_scale[i]) / fmax(exact_scale[i], 1e-30f));
    for (int64_t i = 0; i < square; i++) largest = fmax(largest, fabs(exact[i]));
    double over = excess(dtype, a, exact, square, largest * 2e-6 + sum_bound(m, 4) * 4 / m);
    bool guards = intact_and_free(dx) & intact_and_free(draw) & intact_and_free(ds) & intact_and_free(da) & intact_and_free(du);
    double limit = 1e-6 + sqrt(m) * 0x1p-24; // the roundings of m additions, each way at random, and those of the formula
    ok(worst <= limit && over <= 1 && is_symmetric(a, n, batch) && guards,
       "aol %s%s, %d of %dx%d: scales %.2g <= %.2g, matrix %.3f of the bound, symmetric", dtype_name[dtype],
       with_units ? " with units" : "", batch, n, m, worst, limit, over);
    free(x), free(raw), free(exact), free(exact_scale), free(host_unit), free(unit), free(a), free(scale);
}

static const int shapes[][2] = {{1, 12},    {6, 12},    {8, 16},     {100, 300},  {127, 129}, {257, 513},
                                {768, 769}, {768, 768}, {768, 3072}, {264, 1000}, {96, 300}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// Symmetric results of few matrices are computed in narrower squares than those of many: 20 of 264 rows are many, and one of 1032
// is the least that has every way in which the diagonal goes through narrow squares, and rows that end within a box. Of the
// product with x of one matrix of 520 x 6001 the first columns are wide squares, and the others narrow ones (66 clusters).
static void test_square_widths(Random *r)
{
    for (NsDtype t = NS_BF16; t <= NS_FP16; t++) {
        int n = t == NS_BF16 ? 264 : 1032, m = n + 8, batch = t == NS_BF16 ? 20 : 1;
        printf("# %s %d of %dx%d: %s\n", dtype_name[t], batch, n, m, ns_path_name(ns_product_path(t, n, m)));
        test_gram(r, t, n, m, batch);
        test_symmetric(r, t, n, batch, 1.5f);
        test_transpose_and_scaled(r, t, n, m, batch);
        test_aol(r, t, n, m, batch, true);
        test_apply(r, t, 520, 6001, 1, 2.25f);
    }
}

// Rows that one block does not load at once, and that one does not hold: odd widths, whose rows start anywhere.
static void test_wide_rows(Random *r)
{
    for (NsDtype t = NS_BF16; t <= NS_FP16; t++) {
        test_load(r, t, 64, 11059, 3, false);
        test_load_rows(r, t, 64, 11059, 3, false);
        test_load_rows(r, t, 64, 12289, 2, false);
    }
}

static void test_primitives(void)
{
    Random r = {1};
    for (int i = 0; i < SHAPES; i++) {
        int n = shapes[i][0], m = shapes[i][1], batch = n < 768 ? 3 : m < 3072 ? 2 : 1;
        for (NsDtype t = NS_BF16; t <= NS_FP32; t++) {
            printf("# %s %d of %dx%d: %s\n", dtype_name[t], batch, n, m, ns_path_name(ns_product_path(t, n, m)));
            test_gram(&r, t, n, m, batch);
            test_symmetric(&r, t, n, batch, 1.5f);
            test_apply(&r, t, n, m, batch, 2.25f);
            if (n <= 300) test_symmetric(&r, t, n, batch, 0), test_apply(&r, t, n, m, batch, 0);
            test_load(&r, t, n, m, 2, false);
            test_load(&r, t, m, n, 2, true);
            test_transpose_and_scaled(&r, t, n, m, batch);
            test_aol(&r, t, n, m, batch, false), test_aol(&r, t, n, m, batch, true);
            test_load_rows(&r, t, n, m, 2, false), test_load_rows(&r, t, m, n, 2, true);
        }
    }
    test_spoilt_norms();
    test_square_widths(&r);
    test_wide_rows(&r);
}

// ---- variants ----------------------------------------------------------------------------------------------------------

// By the emulation: the ordinary backend keeps every dtype in floats.
static double *emulated_run(const NsOptions *o, const float *u, int rows, int cols)
{
    void *workspace = aligned_alloc(256, (emulation.ns_workspace_bytes(o, rows, cols, 1) + 256) / 256 * 256);
    double *out = to_double(emulation.newton_schulz(NULL, o, u, 0, rows, cols, 1, workspace), (int64_t)rows * cols);
    free(workspace);
    return out;
}

// The form that the GPU takes: the emulation's error is to be that of the same arithmetic.
static NsOptions as_run(NsOptions o, int rows, int cols)
{
    int n = (int)min_i64(rows, cols), m = (int)max_i64(rows, cols);
    if (o.fallback && ns_iterates(o.dtype, n, m)) o.gram = false;
    return o;
}

static double *reference_run(NsOptions o, const float *u, int rows, int cols, int batch)
{
    int64_t count = (int64_t)rows * cols * batch;
    o.dtype = NS_FP32;
    void *workspace = aligned_alloc(256, (ref.ns_workspace_bytes(&o, rows, cols, batch) + 256) / 256 * 256);
    double *out = matrix(count, 1), *result = ref.newton_schulz(NULL, &o, u, (int64_t)rows * cols, rows, cols, batch, workspace);
    memcpy(out, result, (size_t)count * sizeof *out);
    free(workspace);
    return out;
}

static double *gpu_run(const NsOptions *o, const float *u, int rows, int cols, int batch, bool captured, bool *guards)
{
    int64_t count = (int64_t)rows * cols * batch;
    Array du = array_new((size_t)count * sizeof *u), work = array_new(ns_workspace_bytes(o, rows, cols, batch));
    copy_to_device(NULL, du.p, u, du.bytes);
    stream_synchronize(NULL);
    Stream s = captured ? stream_create() : NULL;
    Graph *graph = NULL;
    if (captured && !graph_begin(s)) captured = false;
    void *result = newton_schulz(s, o, du.p, (int64_t)rows * cols, rows, cols, batch, work.p);
    if (captured) {
        graph = graph_end(s);
        graph_launch(graph, s), graph_launch(graph, s); // the second finds the workspace used
        stream_synchronize(s);
        graph_destroy(graph);
    }
    double *out = values_of(o->dtype, result, count);
    bool intact = intact_and_free(du) & intact_and_free(work);
    if (guards) *guards = intact;
    if (s) stream_destroy(s);
    return out;
}

typedef struct {
    const char *variant, *coefficients, *dtype;
    double wide, square, hard; // limits of the relative error: Gaussian with m >= 1.5 n, other Gaussian, log-uniform spectrum
    double top;                // largest singular value allowed
} Case;
// How far the rounding of the normalised matrix alone can move the result: the change when the normalisation is off by one
// rounding.
static double sensitivity(NsOptions o, const float *u, const double *exact, int rows, int cols)
{
    double worst = 0;
    float kappa = o.kappa, gain = o.aol_gain;
    for (int sign = -1; sign <= 1; sign += 2) {
        o.kappa = kappa * (1 + sign * (float)unit_roundoff[o.dtype]),
        o.aol_gain = gain * (1 + sign * (float)unit_roundoff[o.dtype]);
        double *moved = reference_run(o, u, rows, cols, 1);
        worst = fmax(worst, relative_error(moved, exact, (int64_t)rows * cols));
        free(moved);
    }
    return worst;
}

static const Case cases[] = {
    {"kj", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.21},         {"you", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.155},
    {"polar", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.15},      {"polar", NULL, "fp16", 3e-3, 3e-3, 1.5e-2, 1.15},
    {"polar", NULL, "fp32", 2e-5, 2e-5, 1e-4, 1.15},        {"gram", "dao", "fp16", 3e-3, 4e-2, 7e-2, 1.20},
    {"gram", NULL, "fp16", 4e-3, 6e-2, 1e-1, 1.20},         {"turbo", NULL, "bf16", 2e-2, 2e-2, 1.2e-1, 1.15},
    {"turbo-gram", NULL, "fp16", 4e-3, 2.5e-2, 7e-2, 1.20}, {"turbo-gram", NULL, "bf16", 2e-2, 3e-2, 8e-2, 1.20},
};
enum { CASES = sizeof cases / sizeof *cases };

// Every case on three matrices, the second of them zero; `step`: every step-th case.
static void test_variants_of(Random *r, int rows, int cols, int step)
{
    int64_t size = (int64_t)rows * cols;
    double *g = gaussian(r, 3 * size);
    for (int64_t k = 0; k < size; k++) g[size + k] = 0; // an empty slot between two matrices
    float *u = to_float(g, 3 * size);
    bool large = rows >= 768 && cols >= 768;
    printf("# %dx%d: %s\n", rows, cols,
           ns_path_name(ns_iteration_path(NS_BF16, (int)min_i64(rows, cols), (int)max_i64(rows, cols))));
    for (int k = 0; k < CASES; k += step) {
        const Case *c = &cases[k];
        NsOptions o = options(c->variant, c->coefficients, 0, NULL, c->dtype);
        bool guards, zeros = true;
        double *out = gpu_run(&o, u, rows, cols, 3, false, &guards), *exact = reference_run(o, u, rows, cols, 1);
        for (int64_t e = 0; e < size; e++) zeros = zeros && out[size + e] == 0;
        double error = relative_error(out, exact, size),
               limit = 2 * max_i64(rows, cols) >= 3 * min_i64(rows, cols) ? c->wide : c->square;
        if (!large) {
            NsOptions same = as_run(o, rows, cols);
            double *emulated = emulated_run(&same, u, rows, cols);
            limit = fmax(limit, 2 * relative_error(emulated, exact, size));
            free(emulated);
        }
        if (min_i64(rows, cols) < 16) limit = fmax(limit, 2 * sensitivity(o, u, exact, rows, cols));
        ok(error <= limit && zeros && guards,
           "%s%s%s in %s, %dx%d: relative error %.2g <= %.2g, empty slot stays zero, guards intact", c->variant,
           c->coefficients ? " " : "", c->coefficients ? c->coefficients : "", c->dtype, rows, cols, error, limit);
        free(out), free(exact);
    }
    free(g), free(u);
}

static void test_variants(void)
{
    Random r = {2};
    for (int i = 0; i < SHAPES + 2; i++) {
        int rows = i < SHAPES ? shapes[i][0] : shapes[i == SHAPES ? 6 : 3][1],
            cols = i < SHAPES ? shapes[i][1] : shapes[i == SHAPES ? 6 : 3][0];
        bool large = rows >= 768 && cols >= 768; // the reference takes seconds: every second case, and all for one shape
        test_variants_of(&r, rows, cols, large && cols != 3072 ? 2 : 1);
    }
}

// Shapes that one kernel iterates on: one and two blocks a matrix, whole and cut boxes, one to many turns with x, transposed.
static void test_small(void)
{
    static const int small[][2] = {{64, 64},   {72, 1000}, {128, 128}, {128, 512}, {136, 144}, {192, 768},
                                   {200, 264}, {256, 256}, {256, 768}, {768, 256}, {256, 2048}};
    Random r = {6};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        int n = (int)min_i64(small[i][0], small[i][1]), m = (int)max_i64(small[i][0], small[i][1]);
        if (device_has_wgmma()) ok(ns_iteration_path(NS_FP16, n, m) == NS_PATH_SMALL, "%dx%d: one kernel's", n, m);
        test_variants_of(&r, small[i][0], small[i][1], 1);
    }
}

static double largest_singular_value(const double *a, int n, int m) // power iteration on a a^T
{
    double *gram = matrix(n, n), *v = matrix(n, 1), *w = matrix(n, 1), size = 0;
    multiply(gram, a, a, true, n, n, m);
    for (int i = 0; i < n; i++) v[i] = 1 + 0.3 * sin(i);
    for (int step = 0; step < 300; step++) {
        multiply(w, gram, v, false, n, 1, n);
        size = norm(w, n);
        for (int i = 0; i < n; i++) v[i] = size > 0 ? w[i] / size : 0;
    }
    free(gram), free(v), free(w);
    return sqrt(size);
}

// One case on one matrix; the Gram form of a matrix that small has to be asked for.
static void test_spectrum(const Case *c, const char *spectrum, const float *u, int n, int m, bool fallback)
{
    NsOptions o = options(c->variant, c->coefficients, 0, NULL, c->dtype), same;
    o.fallback = fallback, same = as_run(o, n, m);
    double *out = gpu_run(&o, u, n, m, 1, false, NULL), *exact = reference_run(o, u, n, m, 1);
    double error = relative_error(out, exact, (int64_t)n * m), top = largest_singular_value(out, n, m);
    double *emulated = emulated_run(&same, u, n, m), emulated_error = relative_error(emulated, exact, (int64_t)n * m);
    double most = fmax(c->top, 1.1 * largest_singular_value(emulated, n, m)), limit = fmax(c->hard, 2 * emulated_error);
    ok(error <= limit && top <= most,
       "%s, %dx%d, %s%s%s in %s%s: relative error %.2g <= %.2g, largest singular value %.3f <= %.3f", spectrum, n, m, c->variant,
       c->coefficients ? " " : "", c->coefficients ? c->coefficients : "", c->dtype, same.gram ? ", Gram form" : "", error, limit,
       top, most);
    free(out), free(exact), free(emulated);
}

static void test_negative_control(const float *u, int n, int m)
{
    NsOptions control = options("gram", NULL, 0, "none", "bf16");
    control.fallback = false;
    double *out = gpu_run(&control, u, n, m, 1, false, NULL), top = largest_singular_value(out, n, m);
    ok(!(top <= 1.3), "negative control: bf16 in Gram form without restart is found out, largest singular value %.3g", top);
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
                if (gram && i == 0) test_spectrum(&cases[k], spectrum_names[kind], u, n, m, false);
            }
            if (kind == TWO_LARGE && i == 0) test_negative_control(u, n, m);
            free(u);
        }
        free_frames(&f);
        double *g = gaussian(&r, (int64_t)n * m);
        for (int64_t e = 0; e < (int64_t)n * m; e++) g[e] *= e / m == 7 ? 0 : pow(10, -5.0 * (double)(e / m) / (n - 1));
        float *u = to_float(g, (int64_t)n * m);
        for (int k = 0; k < CASES; k++) test_spectrum(&cases[k], "rows scaled 1e-5 .. 1, one of them zero", u, n, m, true);
        free(g), free(u);
    }
}

// ---- batches, repeats, graphs, large offsets ---------------------------------------------------------------------------

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
        NsOptions o = options(kinds[k].variant, NULL, 0, NULL, NULL), chunked = o;
        chunked.max_batch = 7;
        double *g = gaussian(&r, count);
        float *u = to_float(g, count);
        double *all = gpu_run(&o, u, n, m, batch, false, NULL), *again = gpu_run(&o, u, n, m, batch, false, NULL);
        double *graph = gpu_run(&o, u, n, m, batch, true, NULL), *parts = gpu_run(&chunked, u, n, m, batch, false, NULL);
        size_t bytes = (size_t)size * sizeof(double), total = (size_t)count * sizeof(double);
        ok(!memcmp(all, again, total), "%s %dx%d, %d matrices: two runs agree to the bit", kinds[k].variant, n, m, batch);
        ok(!memcmp(all, graph, total), "... and a replayed graph");
        ok(!memcmp(all, parts, total), "... and in chunks of 7");
        for (int i = 0; i < batch; i += (batch - 1) / 2) {
            double *one = gpu_run(&o, u + i * size, n, m, 1, false, NULL);
            ok(!memcmp(all + i * size, one, bytes), "... and matrix %d alone", i);
            free(one);
        }
        double *none = gpu_run(&o, u, n, m, 0, false, NULL);
        free(g), free(u), free(all), free(again), free(graph), free(parts), free(none);
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
    for (int i = 0; i < BATCH; i++) copy_on_device(NULL, x + bytes * (size_t)i, one.p, bytes);
    uint16_t *first = malloc(bytes), *last = malloc(bytes);
    for (int op = 0; op < 3; op++) {
        if (op == 0) ns_gram(NULL, NS_BF16, y, x, SIDE, SIDE, BATCH);
        if (op == 1) ns_apply(NULL, NS_BF16, y, true, 1, x, x, 2, SIDE, SIDE, BATCH);
        if (op == 2) ns_transpose(NULL, NS_BF16, y, x, SIDE, SIDE, BATCH);
        copy_to_host(NULL, first, y, bytes);
        copy_to_host(NULL, last, y + bytes * (BATCH - 1), bytes);
        stream_synchronize(NULL);
        ok(!memcmp(first, last, bytes), "%s on %.2g elements", (const char *[]){"gram", "apply", "transpose"}[op],
           (double)size * BATCH);
    }
    device_free(x), device_free(y), intact_and_free(one), free(g), free(first), free(last);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"batches", test_batches},       {"chains", test_chains},   {"offsets", test_large_offsets},
                 {"primitives", test_primitives}, {"spectra", test_spectra}, {"variants", test_variants},
                 {"small", test_small}};
    set_program_name("test_ns_gpu", -1);
    bool portable = argc > 1 && !strcmp(argv[1], "--portable"); // the kernels that every supported GPU runs
    argc -= portable, argv += portable;
    const char *only = argc > 2 && !strcmp(argv[1], "--only") ? argv[2] : NULL;
    if (only) argc -= 2, argv += 2;
    const char *paths[] = {argc > 1 ? argv[1] : "build/ref/libref_fp32.so", argc > 2 ? argv[2] : "build/ref/libref_bf16.so"};
    if (!load_ops(&ref, "", paths[0]) || !load_ops(&emulation, "", paths[1])) return EXIT_BAD_INPUT;
    backend_open(0);
    device_set_portable(portable);
    ns_reserve();
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!only || !strcmp(only, parts[i].name)) parts[i].run();
    ns_release();
    return tap_done();
}
