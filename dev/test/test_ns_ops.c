// The primitives of Newton-Schulz in half precision on the CPU, against double: rounding, products, what is
// done to elements.
#include "dev/test/ns_reference.h"
#include "dev/test/tap.h"
#include "llmc/base/floatx.h"

// ---- rounding ---------------------------------------------------------------------------------------------

// Value of a code with the given widths of exponent and mantissa, sign left out.
static double decode(uint32_t code, int exponent_bits, int mantissa_bits)
{
    int exponent = (int)(code >> mantissa_bits), bias = (1 << (exponent_bits - 1)) - 1;
    double mantissa = code & ((1u << mantissa_bits) - 1);
    if (exponent == 0)
        return ldexp(mantissa, 1 - bias - mantissa_bits);
    return ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// out = in (count), rounded to the dtype: a product with one.
static void round_all(NsDtype dtype, float *out, const float *in, int count)
{
    float one = 1;
    ns_apply(AT_ONCE(NULL, dtype, 1),
             &(NsApply){.y = out, .b = &one, .x = in, .alpha = 1, .n = 1, .m = count, .packed = true});
}

// Every positive code, the midpoint to the next one (a tie: the even code wins), and its fp32 neighbours,
// with both signs, go through a primitive.
static void test_rounding(NsDtype dtype, int exponent_bits, int mantissa_bits)
{
    uint32_t codes = ((1u << exponent_bits) - 1) << mantissa_bits; // infinity
    int64_t count = 8 * (int64_t)codes, k = 0;
    float *in = xcalloc((size_t)count, sizeof *in), *expected = xcalloc((size_t)count, sizeof *expected);
    for (uint32_t code = 0; code < codes; code++)
        for (int sign = -1; sign <= 1; sign += 2) {
            double low = decode(code, exponent_bits, mantissa_bits),
                   high = decode(code + 1, exponent_bits, mantissa_bits);
            if (dtype == NS_BF16 && code + 1 == codes)
                high = low + (low - decode(code - 1, exponent_bits, mantissa_bits));
            float middle = (float)((low + high) / 2), up = code + 1 == codes ? INFINITY : (float)high;
            const float points[4] = {(float)low, nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
            const float results[4] = {(float)low, (float)low, code % 2 ? up : (float)low, up};
            // Halfway between 0 and the smallest bf16 fp32 itself has the value; below its own smallest there
            // is none.
            for (int i = 0; i < 4; i++) {
                in[k] = (float)sign * points[i];
                expected[k++] = (float)sign * results[i];
            }
        }
    float *out = xcalloc((size_t)count, sizeof *out);
    round_all(dtype, out, in, (int)count);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++)
        wrong += out[i] != expected[i];
    ok(wrong == 0, "%s: %lld codes, ties and neighbours, %lld wrong", ns_dtype_name(dtype), (long long)count,
       (long long)wrong);
    float nan = NAN, result;
    round_all(dtype, &result, &nan, 1);
    ok(isnan(result), "%s: NaN stays", ns_dtype_name(dtype));
    free(in);
    free(expected);
    free(out);
}

// ---- primitives -------------------------------------------------------------------------------------------

static const double unit_roundoff[] = {[NS_BF16] = 0x1p-8, [NS_FP16] = 0x1p-11, [NS_FP32] = 0};
static const double half_subnormal[] = {[NS_BF16] = 0, [NS_FP16] = 0x1p-25, [NS_FP32] = 0};

// Largest |value - exact| as a share of what is allowed: one rounding of the result, and `terms` fp32 sums of
// terms whose absolute values add up to `magnitude`.
static double share(NsDtype dtype, double value, double exact, double magnitude, int terms)
{
    double sums = (terms + 2) * 0x1p-24 * magnitude;
    double difference = fabs(value - exact),
           limit = unit_roundoff[dtype] * (fabs(exact) + sums) + half_subnormal[dtype] + sums;
    return difference <= limit ? difference / (limit + 1e-300) : INFINITY;
}

static void fill(float *x, int64_t count, Random *r, NsDtype dtype)
{
    float *exact = xcalloc((size_t)count, sizeof *exact);
    for (int64_t i = 0; i < count; i++)
        exact[i] = (float)random_normal(r) / 8;
    round_all(dtype, x, exact, (int)count);
    free(exact);
}

static int asymmetric(const float *a, int n, int batch)
{
    int count = 0;
    for (int i = 0; i < batch; i++)
        for (int r = 0; r < n; r++)
            for (int c = 0; c < r; c++)
                count += memcmp(&a[((int64_t)i * n + r) * n + c], &a[((int64_t)i * n + c) * n + r],
                                sizeof *a) != 0;
    return count;
}

static void test_products(NsDtype dtype, int n, int m)
{
    enum { BATCH = 2 };
    Random r = {(uint64_t)(n * 1000 + m)};
    int64_t size = (int64_t)n * m, square = (int64_t)n * n;
    float *x = xcalloc((size_t)(BATCH * size), 4), *a = xcalloc((size_t)(BATCH * square), 4),
          *b = xcalloc((size_t)(BATCH * square), 4);
    float *d = xcalloc((size_t)(BATCH * square), 4), *c = xcalloc((size_t)(BATCH * square), 4),
          *y = xcalloc((size_t)(BATCH * size), 4);
    fill(x, BATCH * size, &r, dtype);
    fill(b, BATCH * square, &r, dtype);
    fill(d, BATCH * square, &r, dtype);
    ns_gram(AT_ONCE(NULL, dtype, BATCH), a, x, n, m);
    ns_symmetric(AT_ONCE(NULL, dtype, BATCH),
                 &(NsSymmetric){.c = c, .a = a, .b = a, .d = a, .alpha = 0.75f, .beta = -1.5f, .n = n});
    double gram = 0, symmetric = 0, general = 0, applied = 0;
    for (int64_t i = 0; i < BATCH * n; i++)
        for (int64_t j = 0; j < n; j++) {
            const float *xi = x + i * m, *xj = x + (i / n * n + j) * m, *ai = a + i * n,
                        *aj = a + (i / n * n + j) * n;
            double exact = 0, magnitude = 0;
            for (int k = 0; k < m; k++) {
                exact += (double)xi[k] * xj[k];
                magnitude += fabs((double)xi[k] * xj[k]);
            }
            gram = fmax(gram, share(dtype, ai[j], exact, magnitude, m));
            exact = -1.5 * ai[j];
            magnitude = fabs(exact);
            for (int k = 0; k < n; k++) {
                exact += 0.75 * ai[k] * aj[k];
                magnitude += fabs(0.75 * ai[k] * aj[k]);
            }
            symmetric = fmax(symmetric, share(dtype, c[i * n + j], exact, magnitude, n));
        }
    int broken = asymmetric(a, n, BATCH) + asymmetric(c, n, BATCH);
    ns_symmetric(AT_ONCE(NULL, dtype, BATCH),
                 &(NsSymmetric){.c = c,
                                .a = a,
                                .b = b,
                                .d = d,
                                .alpha = 1,
                                .beta = 0.5f,
                                .n = n}); // not symmetric by itself: the lower triangle decides
    broken += asymmetric(c, n, BATCH);
    for (int64_t i = 0; i < BATCH * n; i++)
        for (int64_t j = 0; j <= i % n; j++) {
            double exact = 0.5 * d[i * n + j], magnitude = fabs(exact);
            for (int k = 0; k < n; k++) {
                double term = (double)a[i * n + k] * b[(i / n * n + k) * n + j];
                exact += term;
                magnitude += fabs(term);
            }
            general = fmax(general, share(dtype, c[i * n + j], exact, magnitude, n));
        }
    for (int pass = 0; pass < 2; pass++) {
        ns_apply(AT_ONCE(NULL, dtype, BATCH), &(NsApply){.y = y,
                                                         .b = b,
                                                         .x = x,
                                                         .alpha = 2.5f,
                                                         .a = pass ? 1.25f : 0,
                                                         .n = n,
                                                         .m = m,
                                                         .packed = true});
        for (int64_t i = 0; i < BATCH * n; i++)
            for (int64_t j = 0; j < m; j++) {
                double exact = pass ? 1.25 * x[i * m + j] : 0, magnitude = fabs(exact);
                for (int k = 0; k < n; k++) {
                    double term = 2.5 * b[i * n + k] * x[(i / n * n + k) * m + j];
                    exact += term;
                    magnitude += fabs(term);
                }
                applied = fmax(applied, share(dtype, y[i * m + j], exact, magnitude, n));
            }
    }
    ok(gram <= 1 && symmetric <= 1 && general <= 1 && applied <= 1 && broken == 0,
       "products %dx%d %s: largest error %.2f, %.2f, %.2f, %.2f of one rounding and its sums; symmetric "
       "outputs exactly so",
       n, m, ns_dtype_name(dtype), gram, symmetric, general, applied);
    free(x);
    free(a);
    free(b);
    free(c);
    free(d);
    free(y);
}

static void test_elementwise(void)
{
    enum { R = 37, C = 70, BATCH = 2, COUNT = R * C };
    Random r = {12};
    static float u[BATCH * (COUNT + 3)], x[BATCH * COUNT], y[BATCH * COUNT], sumsq[BATCH];
    for (int i = 0; i < BATCH * (COUNT + 3); i++)
        u[i] = (float)random_normal(&r);
    NsLoad load = {.x = x,
                   .sumsq = sumsq,
                   .u = u,
                   .u_stride = COUNT + 3,
                   .kappa = 1.02f,
                   .eps = 1e-6f,
                   .gain = 3,
                   .rows = R,
                   .cols = C,
                   .batch = BATCH,
                   .transpose = true};
    ns_load(NULL, NS_FP32, &load);
    double worst = 0, exact;
    for (int b = 0; b < BATCH; b++) {
        double *v = to_double(u + b * (COUNT + 3), COUNT);
        exact = dot(v, v, COUNT);
        worst = larger_error(worst, fabs(sumsq[b] / exact - 1));
        free(v);
    }
    ok_at_most(worst, 0x1p-24, "sum of squares is the exact one rounded to fp32");
    int wrong = 0;
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < R; i++)
            for (int j = 0; j < C; j++) {
                exact = u[b * (COUNT + 3) + i * C + j] * 3 / (1.02f * sqrt(sumsq[b]) + 1e-6f);
                wrong += !(fabs(x[b * COUNT + j * R + i] - exact) <= 4 * 0x1p-24 * fabs(exact));
            }
    ok(wrong == 0, "load scales and transposes");
    ns_transpose(NULL, NS_FP32, y, x, C, R, BATCH);
    load.transpose = false;
    ns_load(NULL, NS_FP32, &load);
    ok(!memcmp(x, y, sizeof x), "transposing back gives the plain load");

    static float a[R * R], raw[R * R], scale[R];
    ns_gram_raw(AT_ONCE(NULL, NS_FP16, 1), raw, x, NULL, R, C); // on the CPU an ordinary matrix
    for (int j = 0; j < R; j++)
        raw[5 * R + j] = raw[j * R + 5] = 0; // a zero row
    ns_aol(AT_ONCE(NULL, NS_FP16, 1), scale, a, raw, NULL, 1.5f, R, C);
    wrong = asymmetric(a, R, 1) + (scale[5] != 0);
    for (int i = 0; i < R; i++) {
        double sum = 0;
        for (int j = 0; j < R; j++)
            sum += fabs(raw[i * R + j]);
        if (i != 5)
            wrong += !(fabs(scale[i] * sqrt(1.02 * sum) / 1.5 - 1) < 1e-6);
        for (int j = 0; j < R; j++)
            wrong += !(share(NS_FP16, a[i * R + j], (double)scale[i] * scale[j] * raw[i * R + j],
                             fabs(a[i * R + j]), 2) <= 1);
    }
    ok(wrong == 0, "AOL scales rows by their sums, a zero row by zero, and stays symmetric");
}

static void test_second_results(void)
{
    enum { N = 35, BATCH = 2, COUNT = N * N * BATCH };
    Random r = {13};
    static float a[COUNT], b[COUNT], c[COUNT], q[COUNT], only[COUNT], scaled[COUNT], scale[N * BATCH];
    fill(a, COUNT, &r, NS_FP16);
    fill(b, COUNT, &r, NS_FP16);
    for (int i = 0; i < N * BATCH; i++)
        scale[i] = (float)random_normal(&r);
    ns_symmetric(AT_ONCE(NULL, NS_FP16, BATCH), &(NsSymmetric){.c = c,
                                                               .q = q,
                                                               .a = a,
                                                               .b = b,
                                                               .d = a,
                                                               .alpha = 1,
                                                               .beta = 0.5f,
                                                               .diagonal = 3.25f,
                                                               .n = N});
    ns_symmetric(AT_ONCE(NULL, NS_FP16, BATCH),
                 &(NsSymmetric){
                     .q = only, .a = a, .b = b, .d = a, .alpha = 1, .beta = 0.5f, .diagonal = 3.25f, .n = N});
    int wrong = memcmp(q, only, sizeof q) != 0;
    for (int i = 0; i < COUNT; i++) {
        bool diagonal = i / N % N == i % N;
        wrong += diagonal ? !(share(NS_FP16, q[i], c[i] + 3.25, fabs(c[i]) + 3.25, 1) <= 1) : q[i] != c[i];
    }
    ok(wrong == 0, "a symmetric product plus a multiple of I, with and without the product itself");
    scale[3] = 1e6f;
    scale[5] = NAN;
    ns_symmetric_scaled(AT_ONCE(NULL, NS_FP16, BATCH),
                        &(NsSymmetric){.q = scaled,
                                       .a = a,
                                       .b = b,
                                       .d = a,
                                       .alpha = 1,
                                       .beta = 0.5f,
                                       .diagonal = 3.25f,
                                       .n = N},
                        scale, 16);
    wrong = 0;
    for (int i = 0; i < COUNT; i++) {
        double want = 16.0 * scale[i / (N * N) * N + i % N] * q[i];
        want = want > 65504 ? 65504 : want < -65504 ? -65504 : want;
        wrong += isnan(want) ? !isnan(scaled[i]) : !(share(NS_FP16, scaled[i], want, fabs(want), 2) <= 1);
    }
    ok(wrong == 0, "columns are scaled, to the largest fp16 at most; NaN stays");
}

int main(void)
{
    PART(test_rounding(NS_FP16, 5, 10));
    PART(test_rounding(NS_BF16, 8, 7));
    for (int dtype = NS_BF16; dtype <= NS_FP32; dtype++) {
        PART(test_products((NsDtype)dtype, 1, 1));
        PART(test_products((NsDtype)dtype, 33, 70));
        PART(test_products((NsDtype)dtype, 130, 261));
    }
    PART(test_elementwise());
    PART(test_second_results());
    return tap_done();
}
