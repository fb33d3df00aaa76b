// The primitives of Newton-Schulz one by one against the reference in double, included by test_ns_gpu.c
// behind what it compares with: products, loads and transposes, almost-orthogonal scaling, at every kind of
// shape.
#pragma once

// ---- products ---------------------------------------------------------------------------------------------

static double *gaussian(Random *r, int64_t count)
{
    double *g = matrix(count, 1);
    for (int64_t i = 0; i < count; i++)
        g[i] = random_normal(r);
    return g;
}

static double *symmetric_gaussian(Random *r, int n, int batch)
{
    double *g = gaussian(r, (int64_t)n * n * batch);
    for (int b = 0; b < batch; b++)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < i; j++)
                g[((int64_t)b * n + j) * n + i] = g[((int64_t)b * n + i) * n + j];
    return g;
}

static void test_gram(Random *r, NsDtype dtype, int n, int m, int batch)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch;
    double *x = gaussian(r, count), *exact = matrix(square, 1);
    Array dx = pitched_of(dtype, x, (int64_t)n * batch, m, ns_pitch(dtype, n, m), x),
          da = array_new((size_t)square * ns_element_size(dtype));
    ns_gram(AT_ONCE(NULL, dtype, batch), da.p, dx.p, n, m);
    ref.ns_gram(AT_ONCE(NULL, NS_FP32, batch), exact, x, n, m);
    double *a = values_of(dtype, da.p, square);
    double over = excess(dtype, a, exact, square, sum_bound(m, 4));
    bool guards = intact_and_free(dx) & intact_and_free(da);
    ok(over <= 1 && is_symmetric(a, n, batch) && guards,
       "gram %s, %d of %dx%d: error %.3f of the bound, symmetric, guards intact", dtype_name[dtype], batch, n,
       m, over);
    free(x);
    free(exact);
    free(a);
}

// q against c + value I, from the c that was stored.
static double diagonal_excess(NsDtype dtype, const double *q, const double *c, double value, int n, int batch)
{
    int64_t square = (int64_t)n * n * batch;
    double *exact = matrix(square, 1);
    for (int64_t i = 0; i < square; i++)
        exact[i] = c[i] + (i / n % n == i % n ? value : 0);
    double over = excess(dtype, q, exact, square, 0);
    free(exact);
    return over;
}

static void test_symmetric(Random *r, NsDtype dtype, int n, int batch, float beta)
{
    int64_t square = (int64_t)n * n * batch;
    double *a = symmetric_gaussian(r, n, batch), *b = symmetric_gaussian(r, n, batch),
           *d = symmetric_gaussian(r, n, batch);
    double *exact = matrix(square, 1);
    Array da = array_of(dtype, a, square, a), db = array_of(dtype, b, square, b),
          dd = array_of(dtype, d, square, d);
    Array dc = array_new(da.bytes), dq = array_new(da.bytes);
    ns_symmetric(AT_ONCE(NULL, dtype, batch), &(NsSymmetric){.c = dc.p,
                                                             .q = dq.p,
                                                             .a = da.p,
                                                             .b = db.p,
                                                             .d = dd.p,
                                                             .alpha = 0.75f,
                                                             .beta = beta,
                                                             .diagonal = 4.25f,
                                                             .n = n});
    ref.ns_symmetric(
        AT_ONCE(NULL, NS_FP32, batch),
        &(NsSymmetric){.c = exact, .a = a, .b = b, .d = d, .alpha = 0.75f, .beta = beta, .n = n});
    double *c = values_of(dtype, dc.p, square), *q = values_of(dtype, dq.p, square);
    double over = excess(dtype, c, exact, square, sum_bound(n, 4)),
           over_q = diagonal_excess(dtype, q, c, 4.25, n, batch);
    bool symmetric = is_symmetric(c, n, batch) && is_symmetric(q, n, batch);
    // One tensor as all operands, as the iteration calls it.
    ns_symmetric(
        AT_ONCE(NULL, dtype, batch),
        &(NsSymmetric){.c = dc.p, .a = da.p, .b = da.p, .d = da.p, .alpha = -0.5f, .beta = beta, .n = n});
    ns_symmetric(AT_ONCE(NULL, dtype, batch), &(NsSymmetric){.q = dq.p,
                                                             .a = da.p,
                                                             .b = da.p,
                                                             .d = da.p,
                                                             .alpha = -0.5f,
                                                             .beta = beta,
                                                             .diagonal = 4.25f,
                                                             .n = n});
    ref.ns_symmetric(
        AT_ONCE(NULL, NS_FP32, batch),
        &(NsSymmetric){.c = exact, .a = a, .b = a, .d = a, .alpha = -0.5f, .beta = beta, .n = n});
    double *same = values_of(dtype, dc.p, square),
           over_same = excess(dtype, same, exact, square, sum_bound(n, 4));
    double *only = values_of(dtype, dq.p, square),
           over_only = diagonal_excess(dtype, only, same, 4.25, n, batch);
    symmetric = symmetric && is_symmetric(same, n, batch);
    bool guards = intact_and_free(da) & intact_and_free(db) & intact_and_free(dd) & intact_and_free(dc) &
                  intact_and_free(dq);
    ok(over <= 1 && over_same <= 1 && over_q <= 1 && over_only <= 1 && symmetric && guards,
       "symmetric %s, %d of %d, beta %g: error %.3f, one tensor %.3f of the bound; with diagonal %.3f, %.3f",
       dtype_name[dtype], batch, n, beta, over, over_same, over_q, over_only);
    free(a);
    free(b);
    free(d);
    free(exact);
    free(c);
    free(q);
    free(same);
    free(only);
}

static void test_apply(Random *r, NsDtype dtype, int n, int m, int batch, float a)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch, rows = (int64_t)n * batch;
    int pitch = ns_pitch(dtype, n, m);
    double *x = gaussian(r, count), *b = gaussian(r, square),
           *exact = matrix(count, 1); // b need not be symmetric here
    Array dx = pitched_of(dtype, x, rows, m, pitch, x), db = array_of(dtype, b, square, b),
          dy = array_new(dx.bytes);
    Array dp = array_new((size_t)count * ns_element_size(dtype));
    ns_apply(AT_ONCE(NULL, dtype, batch),
             &(NsApply){.y = dy.p, .b = db.p, .x = dx.p, .alpha = 0.5f, .a = a, .n = n, .m = m});
    ns_apply(
        AT_ONCE(NULL, dtype, batch),
        &(NsApply){.y = dp.p, .b = db.p, .x = dx.p, .alpha = 0.5f, .a = a, .n = n, .m = m, .packed = true});
    ref.ns_apply(
        AT_ONCE(NULL, NS_FP32, batch),
        &(NsApply){.y = exact, .b = b, .x = x, .alpha = 0.5f, .a = a, .n = n, .m = m, .packed = true});
    double *y = pitched_values(dtype, dy.p, rows, m, pitch), *packed = values_of(dtype, dp.p, count);
    double over = excess(dtype, y, exact, count, sum_bound(n, 4));
    bool same = !memcmp(y, packed, (size_t)count * sizeof *y);
    bool guards = intact_and_free(dx) & intact_and_free(db) & intact_and_free(dy) & intact_and_free(dp);
    ok(over <= 1 && same && guards, "apply %s, %d of %dx%d, a = %g: error %.3f of the bound, the same packed",
       dtype_name[dtype], batch, n, m, a, over);
    free(x);
    free(b);
    free(exact);
    free(y);
    free(packed);
}

// ---- elementwise ------------------------------------------------------------------------------------------

static void test_load(Random *r, NsDtype dtype, int rows, int cols, int batch, bool transpose)
{
    int64_t size = (int64_t)rows * cols, stride = size + 12, count = size * batch;
    int n = transpose ? cols : rows, m = transpose ? rows : cols, pitch = ns_pitch(dtype, n, m);
    double *u = gaussian(r, stride * batch), *exact = matrix(count, 1), worst = 0;
    for (int64_t i = 0; i < size; i++)
        u[stride + i] = 0; // an empty slot
    Array du = array_of(NS_FP32, u, stride * batch, u),
          dx = array_new((size_t)n * (size_t)pitch * (size_t)batch * ns_element_size(dtype));
    Array ds = array_new((size_t)batch * sizeof(float));
    float *host_u = to_float(u, stride * batch), *exact_sums = xcalloc((size_t)batch, sizeof(float));
    ns_load(NULL, dtype,
            &(NsLoad){.x = dx.p,
                      .sumsq = ds.p,
                      .u = du.p,
                      .u_stride = stride,
                      .kappa = 1.02f,
                      .eps = 1e-6f,
                      .gain = 3,
                      .rows = rows,
                      .cols = cols,
                      .batch = batch,
                      .transpose = transpose});
    ref.ns_load(NULL, NS_FP32,
                &(NsLoad){.x = exact,
                          .sumsq = exact_sums,
                          .u = host_u,
                          .u_stride = stride,
                          .kappa = 1.02f,
                          .eps = 1e-6f,
                          .gain = 3,
                          .rows = rows,
                          .cols = cols,
                          .batch = batch,
                          .transpose = transpose});
    double *sums = values_of(NS_FP32, ds.p, batch),
           *x = pitched_values(dtype, dx.p, (int64_t)n * batch, m, pitch), largest = 0;
    for (int i = 0; i < batch; i++)
        worst = larger_error(worst, fabs(sums[i] - exact_sums[i]) / fmax(exact_sums[i], 1e-30));
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fabs(exact[i]));
    double over = excess(dtype, x, exact, count, largest * 1e-6);
    bool guards = intact_and_free(du) & intact_and_free(dx) & intact_and_free(ds);
    ok(worst <= 1e-6 && over <= 1 && guards, "norm and load %s, %d of %dx%d%s: %.2g, %.3f of the bound",
       dtype_name[dtype], batch, rows, cols, transpose ? ", transposed" : "", worst, over);
    free(u);
    free(exact);
    free(host_u);
    free(exact_sums);
    free(sums);
    free(x);
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
    Array du = array_of(NS_FP32, u, stride * batch, u),
          ds = array_new((size_t)n * (size_t)batch * sizeof(float));
    Array dx = array_new((size_t)n * (size_t)pitch * (size_t)batch * ns_element_size(dtype));
    ns_load_rows(NULL, dtype,
                 &(NsLoad){.x = dx.p,
                           .unit = ds.p,
                           .u = du.p,
                           .u_stride = stride,
                           .rows = rows,
                           .cols = cols,
                           .batch = batch,
                           .transpose = transpose});
    double *unit = values_of(NS_FP32, ds.p, (int64_t)n * batch),
           *x = pitched_values(dtype, dx.p, (int64_t)n * batch, m, pitch);
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
    ok(right && over <= 1 && guards, "load by rows %s, %d of %dx%d%s: %.3f of the bound", dtype_name[dtype],
       batch, rows, cols, transpose ? ", transposed" : "", over);
    free(u);
    free(exact);
    free(unit);
    free(x);
}

static void test_spoilt_norms(void)
{
    enum { SIZE = 64 * 64 };
    float *u = xcalloc(3 * SIZE, sizeof *u);
    for (int i = 0; i < 2 * SIZE; i++)
        u[i] = 1;
    u[77] = NAN;
    u[SIZE + 5] = 2e30f; // the second's norm overflows
    Array ds = array_new(3 * sizeof(float)), du = array_new(3 * SIZE * sizeof *u),
          dx = array_new(3 * SIZE * 2);
    copy_to_device(NULL, du.p, u, du.bytes);
    stream_synchronize(NULL);
    ns_load(NULL, NS_BF16,
            &(NsLoad){.x = dx.p,
                      .sumsq = ds.p,
                      .u = du.p,
                      .u_stride = SIZE,
                      .kappa = 1,
                      .gain = 1,
                      .rows = 64,
                      .cols = 64,
                      .batch = 3});
    double *x = values_of(NS_BF16, dx.p, 3 * SIZE);
    bool right = true;
    for (int i = 0; i < 3 * SIZE; i++)
        right = right && (i < 2 * SIZE ? isnan(x[i]) : x[i] == 0);
    ok(right, "load: NaN and infinite norms give NaN, a zero norm without eps gives zeros");
    free(u);
    free(x);
    intact_and_free(ds);
    intact_and_free(du);
    intact_and_free(dx);
}

static void test_transpose_and_scaled(Random *r, NsDtype dtype, int n, int m, int batch)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch;
    double *x = gaussian(r, count), *a = symmetric_gaussian(r, n, batch),
           *d = symmetric_gaussian(r, n, batch);
    double *scale = gaussian(r, (int64_t)n * batch), *exact_q = matrix(square, 1),
           *exact_t = matrix(count, 1);
    scale[n / 2] = 1e6; // overflows fp16
    Array dx = pitched_of(dtype, x, (int64_t)n * batch, m, ns_pitch(dtype, n, m), x);
    Array da = array_of(dtype, a, square, a), dd = array_of(dtype, d, square, d), dz = array_new(da.bytes);
    Array ds = array_of(NS_FP32, scale, (int64_t)n * batch, scale), dq = array_new(da.bytes),
          dt = array_new((size_t)count * ns_element_size(dtype));
    ns_transpose(NULL, dtype, dt.p, dx.p, n, m, batch);
    ref.ns_transpose(NULL, NS_FP32, exact_t, x, n, m, batch);
    ns_symmetric_scaled(AT_ONCE(NULL, dtype, batch),
                        &(NsSymmetric){.q = dq.p,
                                       .a = da.p,
                                       .b = da.p,
                                       .d = dd.p,
                                       .alpha = 0.75f,
                                       .beta = -0.5f,
                                       .diagonal = 4.25f,
                                       .n = n},
                        ds.p, 16);
    ns_symmetric(AT_ONCE(NULL, dtype, batch), &(NsSymmetric){.q = dz.p,
                                                             .a = da.p,
                                                             .b = da.p,
                                                             .d = dd.p,
                                                             .alpha = 0.75f,
                                                             .beta = -0.5f,
                                                             .diagonal = 4.25f,
                                                             .n = n});
    double *z = values_of(dtype, dz.p, square);
    for (int64_t i = 0; i < square; i++)
        exact_q[i] = 16 * scale[i / ((int64_t)n * n) * n + i % n] * z[i];
    for (int64_t i = 0; dtype == NS_FP16 && i < square; i++)
        exact_q[i] = fmax(-65504, fmin(65504, exact_q[i]));
    double *t = values_of(dtype, dt.p, count), *q = values_of(dtype, dq.p, square);
    bool exact = !memcmp(t, exact_t, (size_t)count * sizeof *t);
    double over_q = excess(dtype, q, exact_q, square, 1e-6);
    bool guards = intact_and_free(dx) & intact_and_free(da) & intact_and_free(dd) & intact_and_free(dz) &
                  intact_and_free(ds) & intact_and_free(dq) & intact_and_free(dt);
    ok(exact && over_q <= 1 && guards,
       "transpose exact, symmetric_scaled %.3f of one rounding: %s, %d of %dx%d", over_q, dtype_name[dtype],
       batch, n, m);
    free(x);
    free(a);
    free(d);
    free(z);
    free(scale);
    free(exact_q);
    free(exact_t);
    free(t);
    free(q);
}

static void test_aol(Random *r, NsDtype dtype, int n, int m, int batch, bool with_units)
{
    int64_t count = (int64_t)n * m * batch, square = (int64_t)n * n * batch, rows = (int64_t)n * batch;
    double *x = gaussian(r, count), *raw = matrix(square, 1), *exact = matrix(square, 1),
           *unit = matrix(rows, 1);
    for (int64_t i = 0; i < rows; i++)
        unit[i] = exp2((double)(i * 7 % 11) - 5);
    for (int j = 0; j < m; j++)
        x[j] = 0; // a row of the first matrix without any entry
    Array dx = pitched_of(dtype, x, rows, m, ns_pitch(dtype, n, m), x),
          draw = array_new(ns_raw_bytes(dtype, n, m, batch));
    Array ds = array_new((size_t)rows * sizeof(float)),
          da = array_new((size_t)square * ns_element_size(dtype));
    float *exact_scale = xcalloc((size_t)rows, sizeof(float)), *host_unit = to_float(unit, rows);
    Array du = array_of(NS_FP32, unit, rows, NULL);
    ns_gram_raw(AT_ONCE(NULL, dtype, batch), draw.p, dx.p, with_units ? du.p : NULL, n, m);
    ns_aol(AT_ONCE(NULL, dtype, batch), ds.p, da.p, draw.p, with_units ? du.p : NULL, 1.8f, n, m);
    ref.ns_gram_raw(AT_ONCE(NULL, NS_FP32, batch), raw, x, NULL, n, m);
    ref.ns_aol(AT_ONCE(NULL, NS_FP32, batch), exact_scale, exact, raw, with_units ? host_unit : NULL, 1.8f, n,
               m);
    double *a = values_of(dtype, da.p, square), *scale = values_of(NS_FP32, ds.p, rows), worst = 0,
           largest = 0;
    for (int64_t i = 0; i < rows; i++)
        worst = larger_error(worst, fabs(scale[i] - exact_scale[i]) / fmax(exact_scale[i], 1e-30f));
    for (int64_t i = 0; i < square; i++)
        largest = fmax(largest, fabs(exact[i]));
    double over = excess(dtype, a, exact, square, largest * 2e-6 + sum_bound(m, 4) * 4 / m);
    bool guards = intact_and_free(dx) & intact_and_free(draw) & intact_and_free(ds) & intact_and_free(da) &
                  intact_and_free(du);
    double limit =
        1e-6 +
        sqrt(m) * 0x1p-24; // the roundings of m additions, each way at random, and those of the formula
    ok(worst <= limit && over <= 1 && is_symmetric(a, n, batch) && guards,
       "aol %s%s, %d of %dx%d: scales %.2g <= %.2g, matrix %.3f of the bound, symmetric", dtype_name[dtype],
       with_units ? " with units" : "", batch, n, m, worst, limit, over);
    free(x);
    free(raw);
    free(exact);
    free(exact_scale);
    free(host_unit);
    free(unit);
    free(a);
    free(scale);
}

static const int shapes[][2] = {{1, 12},    {6, 12},    {8, 16},     {100, 300},  {127, 129}, {257, 513},
                                {768, 769}, {768, 768}, {768, 3072}, {264, 1000}, {96, 300}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// Symmetric results of few matrices are computed in narrower squares than those of many: 20 of 264 rows are
// many, and one of 1032 is the least that has every way in which the diagonal goes through narrow squares,
// and rows that end within a box. Of the product with x of one matrix of 520 x 6001 the first columns are
// wide squares, and the others narrow ones (66 clusters).
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

// Rows that one block does not load at once, and that one does not hold: odd widths, whose rows start
// anywhere.
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
            printf("# %s %d of %dx%d: %s\n", dtype_name[t], batch, n, m,
                   ns_path_name(ns_product_path(t, n, m)));
            test_gram(&r, t, n, m, batch);
            test_symmetric(&r, t, n, batch, 1.5f);
            test_apply(&r, t, n, m, batch, 2.25f);
            if (n <= 300) {
                test_symmetric(&r, t, n, batch, 0);
                test_apply(&r, t, n, m, batch, 0);
            }
            test_load(&r, t, n, m, 2, false);
            test_load(&r, t, m, n, 2, true);
            test_transpose_and_scaled(&r, t, n, m, batch);
            test_aol(&r, t, n, m, batch, false);
            test_aol(&r, t, n, m, batch, true);
            test_load_rows(&r, t, n, m, 2, false);
            test_load_rows(&r, t, m, n, 2, true);
        }
    }
    test_spoilt_norms();
    test_square_widths(&r);
    test_wide_rows(&r);
}
