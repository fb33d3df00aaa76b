// The MLP in FP8, fp32 build: scales and codes against an e4m3 of their own in double, one by one; products
// against sums of the quantised values in double, to fp32's rounding.
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"
#include "llmc/cpu/fp8.h"

// Sums of at most 640 terms in fp32: sqrt(640) 2^-24 = 1.5e-6, twice that behind a square.
#define LIMIT 4e-6

// The values that e4m3(x * (1 / scale)) stands for, in units of the scale.
static double *quantised(const floatX *x, float scale, int n)
{
    double *q = doubles(n);
    float inverse = 1 / scale;
    for (int i = 0; i < n; i++)
        q[i] = ref_e4m3(x_to_float(x[i]) * inverse);
    return q;
}

static int differing_codes(const uint8_t *codes, const double *values, int rows, int cols, bool transpose)
{
    int wrong = 0;
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < cols; k++)
            wrong += e4m3_to_float(codes[transpose ? k * rows + i : i * cols + k]) != values[i * cols + k];
    return wrong;
}

static double largest(const double *x, int n)
{
    double most = 0;
    for (int i = 0; i < n; i++)
        most = fmax(most, fabs(x[i]));
    return most;
}

// Exact scale and codes of a matrix; returns the values of the codes.
static double *codes_case(uint8_t *codes, float *scale, const Tensor *x, int rows, int cols, bool transpose)
{
    float amax = 0, expected = (float)largest(x->d, rows * cols) * (1.0f / 448);
    amax_accumulate(NULL, &amax, x->x, rows * cols / 2);
    amax_accumulate(NULL, &amax, x->x + rows * cols / 2, rows * cols - rows * cols / 2);
    scale_from_amax(NULL, scale, &amax, 1.0f / E4M3_LARGEST);
    quantize_e4m3(NULL, codes, x->x, scale, rows, cols, QUANTIZE_INVERSE, transpose);
    double *values = quantised(x->x, *scale, rows * cols);
    ok(*scale == expected && amax == 0, "   scale of the largest of both halves");
    ok(differing_codes(codes, values, rows, cols, transpose) == 0, "   codes%s",
       transpose ? ", transposed" : "");
    return values;
}

static void check(const char *what, const floatX *got, const double *exact, int n)
{
    ok_at_most(relative_error(of_x(got, n), exact, n), LIMIT, what);
}

// The larger the amax before, the less this result counts; relu^2 of a row of norm sqrt(d) stays in the
// bound.
static void check_bound(const Tensor *w, int d, int F)
{
    float bound = 0;
    double exact = 0, most = 0;
    for (int j = 0; j < F; j++) {
        double squares = 0, along = 0;
        for (int i = 0; i < d; i++)
            squares += w->d[i * F + j] * w->d[i * F + j];
        for (int i = 0; i < d; i++) // h = sqrt(d) w_j / |w_j| is the worst
            along += w->d[i * F + j] * sqrt(d / squares) * w->d[i * F + j];
        exact = fmax(exact, d * squares);
        most = fmax(most, along * along);
    }
    amax_relu2_bound(NULL, &bound, w->x, d, F);
    ok_at_most(fabs(bound / exact - 1), d * 0x1p-24, "   bound of relu^2");
    ok_at_most(fabs(bound / most - 1), d * 0x1p-23, "   which the worst input attains");
    float above = 2 * bound;
    amax_relu2_bound(NULL, &above, w->x, d, F);
    ok(above == 2 * bound, "   a larger maximum stays");
}

static void mlp_case(int N, int d, int F, float scale_y)
{
    pool_reset();
    Tensor h = random_tensor(N * d, 1.7), up = random_tensor(d * F, 0.2), down = random_tensor(d * F, 0.2),
           residual = random_tensor(N * d, 1);
    uint8_t *h8 = take((size_t)(N * d), 1), *up8 = take((size_t)(d * F), 1),
            *down8 = take((size_t)(d * F), 1), *y8 = take((size_t)(N * F), 1);
    floatX *y = halves(N * F), *again = halves(N * F), *out = halves(N * d);
    float scale[3], amax = 0;
    printf("# FP8 MLP: N %d, d %d, F %d\n", N, d, F);
    double *qh = codes_case(h8, &scale[0], &h, N, d, false),
           *qu = codes_case(up8, &scale[1], &up, d, F, true),
           *qd = codes_case(down8, &scale[2], &down, d, F, false), *e = doubles(N * F), *o = doubles(N * d);
    check_bound(&up, d, F);

    Fp8Product product = {h8, up8, &scale[0], &scale[1], N, d, F, NULL};
    ref_product(e, qh, qu, false, false, N, F, d);
    for (int i = 0; i < N * F; i++) {
        double p = e[i] * scale[0] * scale[1];
        e[i] = p > 0 ? p * p : 0;
    }
    matmul_fp8_relu2(NULL, y, y8, &amax, &product, &scale_y);
    check("   relu^2", y, e, N * F);
    double *qy = quantised(y, scale_y, N * F);
    ok(differing_codes(y8, qy, N, F, false) == 0, "   codes of what is stored");
    ok(amax == (float)largest(of_x(y, N * F), N * F) && amax > 0, "   its maximum");
    matmul_fp8_relu2(NULL, again, y8, NULL, &product, &scale_y);
    ok(!memcmp(y, again, (size_t)(N * F) * sizeof *y), "   the same without a maximum");

    product = (Fp8Product){y8, down8, &scale_y, &scale[2], N, F, d, NULL};
    ref_product(o, qy, qd, false, true, N, d, F);
    for (int i = 0; i < N * d; i++)
        o[i] *= (double)scale_y * scale[2];
    matmul_fp8(NULL, out, &product, NULL);
    check("   down", out, o, N * d);
    for (int i = 0; i < N * d; i++)
        o[i] += residual.d[i];
    matmul_fp8(NULL, residual.x, &product, residual.x);
    check("   down, onto a residual in place", residual.x, o, N * d);
}

static void scale_case(void)
{
    float scale = 1, amax = 0;
    scale_from_amax(NULL, &scale, &amax, 1.0f / E4M3_LARGEST);
    ok(scale == 1e-12f * (1.0f / 448), "scale of zeros");
    floatX zero[16] = {0};
    uint8_t codes[16];
    memset(codes, 0xff, sizeof codes);
    quantize_e4m3(NULL, codes, zero, &scale, 1, 16, QUANTIZE_INVERSE, false);
    int left = 0;
    for (int i = 0; i < 16; i++)
        left += codes[i] != 0;
    ok(left == 0, "   whose codes are zero");
    amax = 300;
    scale_from_amax(NULL, &scale, &amax, (float)(1.12 / 448));
    ok(scale == 300 * (1.12f / 448), "scale with headroom, the factor in fp32");
    floatX beyond[16] = {0};
    beyond[3] = float_to_x(NAN);
    beyond[4] = float_to_x(-1e30f);
    amax_accumulate(NULL, &amax, beyond, 16);
    scale = 1;
    quantize_e4m3(NULL, codes, beyond, &scale, 1, 16, QUANTIZE_INVERSE, false);
    ok(isnan(amax), "NaN is the maximum");
    ok(isnan(e4m3_to_float(codes[3])) && e4m3_to_float(codes[4]) == -448,
       "NaN stays NaN, the rest saturates");
}

static float in_units(float x, float scale, QuantizeRule rule)
{
    switch (rule) {
    case QUANTIZE_INVERSE:
        return x * (1 / scale);
    case QUANTIZE_AMAX:
        return x * (448 / scale);
    case QUANTIZE_QUOTIENT:
        return x / scale;
    default:
        return bf16_to_float(float_to_bf16(x / scale));
    }
}

// All numbers of 8 bits in units of all scales that the largest such number gives: where ties are common, and
// rules part.
static void rules_case(QuantizeRule rule, const char *name)
{
    enum { COUNT = 128 };
    floatX x[COUNT];
    uint8_t codes[COUNT], inverse[COUNT];
    int wrong = 0, other = 0;
    for (int largest = 128; largest < 256; largest++) {
        float amax = (float)largest / 64, scale = rule == QUANTIZE_AMAX ? amax : amax * (float)(1.12 / 448),
              by_inverse = rule == QUANTIZE_AMAX ? amax * (1.0f / 448) : scale;
        for (int i = 0; i < COUNT; i++)
            x[i] = (float)(i % 2 ? -i - 128 : i + 128) / (float)(64 << largest % 3);
        quantize_e4m3(NULL, codes, x, &scale, 1, COUNT, rule, false);
        quantize_e4m3(NULL, inverse, x, &by_inverse, 1, COUNT, QUANTIZE_INVERSE, false);
        for (int i = 0; i < COUNT; i++) {
            wrong += e4m3_to_float(codes[i]) != ref_e4m3(in_units(x[i], scale, rule));
            other += codes[i] != inverse[i];
        }
    }
    ok(wrong == 0 && (other > 0) == (rule != QUANTIZE_INVERSE),
       "rule %s: %d codes are wrong, %d other than those of the inverse", name, wrong, other);
}

// In bf16's arithmetic; next in fp32's.
static void weight_scales_case(void)
{
    int wrong = 0, late = 0;
    float next = 7, exact = 1, lags = 0, factor = (float)(1.12 / 448);
    for (int largest = 128; largest < 256; largest++) {
        float amax = (float)largest / 1024, again = amax, scale, kept = next,
              expected = bf16_to_float(float_to_bf16((float)largest / 1024 / 448));
        scale_exact(NULL, &scale, &amax);
        wrong += scale != expected || amax != 0;
        amax = again;
        scale_delayed(NULL, &scale, &next, &amax, factor, &lags);
        late += scale != kept || next != again * factor || amax != 0;
        amax = again;
        scale_delayed(NULL, &scale, &next, &amax, factor, &exact);
        wrong += scale != expected || next != again * factor;
    }
    ok(wrong == 0, "exact scales of weights are quotients in bf16: %d are not", wrong);
    ok(late == 0, "   delayed ones those of the step before: %d are not", late);
    float zero = 0, scale, least = bf16_to_float(float_to_bf16(1e-12f));
    scale_exact(NULL, &scale, &zero);
    ok(scale == bf16_to_float(float_to_bf16(least / 448)), "   of zeros");
}

int main(void)
{
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = 200,
                               .eval_tokens = 16,
                               .dim = 64,
                               .heads = 4,
                               .mlp_dim = 640,
                               .vocab_padded = 128,
                               .fp8_mlp = true});
    PART(scale_case());
    PART(rules_case(QUANTIZE_INVERSE, "inverse"));
    PART(rules_case(QUANTIZE_AMAX, "amax"));
    PART(rules_case(QUANTIZE_QUOTIENT, "quotient"));
    PART(rules_case(QUANTIZE_QUOTIENT_BF16, "quotient in bf16"));
    PART(weight_scales_case());
    PART(mlp_case(1, 16, 16, 0.01f));
    PART(mlp_case(37, 48, 112, 0.01f));
    PART(mlp_case(130, 64, 640, 1e-4f)); // saturates
    backend_close();
    return tap_done();
}
