// The MLP's FP8 products. Scales and codes of given values are equal to the host's one by one; products of
// the codes are compared with sums in double.
#pragma once

typedef struct {
    int N, in, out;
    const uint8_t *x8, *w8; // host
    double scale;           // of the sums
    const bf16 *residual;   // host, or NULL
    bool relu2;
} CodesProduct;

static float host_units(float x, float scale, QuantizeRule rule)
{
    if (rule == QUANTIZE_QUOTIENT_BF16)
        return to_bf16_value(x / scale);
    if (rule == QUANTIZE_QUOTIENT)
        return x / scale;
    return rule == QUANTIZE_AMAX ? x * (448 / scale) : x * (1 / scale);
}

static uint8_t *host_codes(const bf16 *x, float scale, int rows, int cols, QuantizeRule rule, bool transpose)
{
    uint8_t *codes = xcalloc((size_t)rows * (size_t)cols, 1);
#pragma omp parallel for
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < cols; k++)
            codes[transpose ? (int64_t)k * rows + i : (int64_t)i * cols + k] =
                float_to_e4m3(host_units(bf16_to_float(x[(int64_t)i * cols + k]), scale, rule));
    return codes;
}

static float host_amax(const bf16 *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(bf16_to_float(x[i])));
    return most;
}

// The sum of one element in double, and as the tensor cores add it: FP8 units, or bf16 ones.
static double codes_sum(const CodesProduct *q, int64_t row, int64_t col, float *plain)
{
    float a[32], b[32];
    double total = 0, product[32];
    *plain = 0;
    for (int at = 0; at < q->in; at += 32) {
        for (int k = 0; k < 32; k++) {
            bool there = at + k < q->in;
            a[k] = there ? e4m3_to_float(q->x8[row * q->in + at + k]) : 0;
            b[k] = there ? e4m3_to_float(q->w8[col * q->in + at + k]) : 0;
            total += product[k] = (double)a[k] * (double)b[k];
        }
        if (device_has_fp8())
            *plain = add_cut(*plain, product, 32, FP8_SUM_BITS);
        else
            *plain = add_cut(add_cut(*plain, product, 16, BF16_SUM_BITS), product + 16, 16, BF16_SUM_BITS);
    }
    return total;
}

// rounded: as a plain computation stores it, and the product before it is squared
static double codes_result(const CodesProduct *q, double sum, int64_t at, bool rounded)
{
    double p = rounded && q->relu2 ? to_bf16_value(sum * q->scale) : sum * q->scale;
    if (q->relu2)
        return p > 0 ? p * p : 0;
    return q->residual ? p + bf16_to_float(q->residual[at]) : p;
}

static void check_codes_product(const char *name, const CodesProduct *q, const bf16 *y)
{
    double wrong = 0, naive = 0, size = 0;
#pragma omp parallel for reduction(+ : wrong, naive, size)
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t index = random_used + 2 * (uint64_t)i;
        int64_t row = (int64_t)(uniform_at(index) * q->N), col = (int64_t)(uniform_at(index + 1) * q->out);
        int64_t at = row * q->out + col;
        float plain;
        double sum = codes_sum(q, row, col, &plain), truth = codes_result(q, sum, at, false);
        double got = bf16_to_float(y[at]), stored = to_bf16_value(codes_result(q, plain, at, true));
        wrong += (got - truth) * (got - truth);
        naive += (stored - truth) * (stored - truth);
        size += truth * truth;
    }
    random_used += 2 * SAMPLES;
    double error = sqrt(wrong / size), plain = sqrt(naive / size);
    ok(size > 0 && error <= 2 * plain + FP32_ATOM, "%s %d x %d x %d, %d samples in double: %.2g (%.2g)", name,
       q->N, q->in, q->out, SAMPLES, error, plain);
}

// Quantises a (rows, cols) with its exact scale; both are checked. Returns the host's codes; device: theirs.
static uint8_t *check_quantize(const bf16 *a, const void *ga, float *gscale, float headroom, int rows,
                               int cols, bool transpose, void **device)
{
    size_t n = (size_t)rows * (size_t)cols;
    float *gamax = device_alloc(4, "amax"), scale = host_amax(a, (int64_t)n) * (headroom / 448);
    *device = device_alloc(n, "codes");
    amax_accumulate(stream, gamax, ga, (int64_t)n);
    scale_from_amax(stream, gscale, gamax, headroom / 448);
    quantize_e4m3(stream, *device, ga, gscale, rows, cols, QUANTIZE_INVERSE, transpose);
    float *got = to_host(gscale, 4), *after = to_host(gamax, 4);
    ok(*got == scale && *after == 0, "scale of %d x %d: %.9g (%.9g)", rows, cols, *got, scale);
    uint8_t *codes = host_codes(a, scale, rows, cols, QUANTIZE_INVERSE, transpose),
            *theirs = to_host(*device, n);
    ok(!memcmp(codes, theirs, n), "codes of %d x %d%s are the host's", rows, cols,
       transpose ? ", transposed" : "");
    free(got);
    free(after);
    free(theirs);
    device_free(gamax);
    return codes;
}

static void check_relu2_bound(const bf16 *w, const void *gw, int in, int out)
{
    double most = 0;
    for (int j = 0; j < out; j++) {
        double sum = 0;
        for (int i = 0; i < in; i++)
            sum += pow(bf16_to_float(w[(int64_t)i * out + j]), 2);
        most = fmax(most, in * sum);
    }
    float *gamax = device_alloc(4, "amax");
    amax_relu2_bound(stream, gamax, gw, in, out);
    float *got = to_host(gamax, 4);
    ok(fabs(*got / most - 1) <= in * 0x1p-24, "amax_relu2_bound %d x %d: %.9g (%.9g)", in, out, *got, most);
    free(got);
    device_free(gamax);
}

// y and its codes, twice with the same bits; y8 stays on the device and on the host.
static void check_up(const Fp8Product *p, const CodesProduct *q, float *gscale_y, uint8_t **gy8, uint8_t **y8)
{
    size_t n = (size_t)p->N * (size_t)p->out;
    floatX *gy = device_alloc(n * 2, "y");
    float *gamax = device_alloc(4, "amax");
    *gy8 = device_alloc(n, "y8");
    matmul_fp8_relu2(&on_stream, gy, *gy8, gamax, p, gscale_y);
    bf16 *y = to_host(gy, n * 2);
    *y8 = to_host(*gy8, n);
    float *amax = to_host(gamax, 4), *scale_y = to_host(gscale_y, 4), most = host_amax(y, (int64_t)n);
    check_codes_product("matmul_fp8_relu2", q, y);
    uint8_t *expected = host_codes(y, *scale_y, p->N, p->out, QUANTIZE_INVERSE, false);
    int64_t different = 0;
    for (size_t i = 0; i < n; i++)
        different += expected[i] != (*y8)[i];
    ok(different == 0 && *amax == most, "codes are those of the result, %ld are not; amax %.9g (%.9g)",
       (long)different, *amax, most);
    matmul_fp8_relu2(&on_stream, gy, *gy8, NULL, p, gscale_y);
    bf16 *again = to_host(gy, n * 2);
    uint8_t *codes_again = to_host(*gy8, n);
    ok(!memcmp(y, again, n * 2) && !memcmp(*y8, codes_again, n), "the same bits twice");
    void *host[] = {y, amax, scale_y, expected, again, codes_again};
    for (int i = 0; i < 6; i++)
        free(host[i]);
    device_free(gy);
    device_free(gamax);
}

static void check_down(const Fp8Product *p, const CodesProduct *q)
{
    size_t bytes = (size_t)p->N * (size_t)p->out * 2;
    bf16 *residual = random_bf16((int64_t)p->N * p->out, 3);
    void *gout = to_device(residual, bytes);
    CodesProduct with = *q;
    with.residual = residual;
    matmul_fp8(&on_stream, gout, p, gout);
    bf16 *y = to_host(gout, bytes);
    check_codes_product("matmul_fp8 onto a residual", &with, y);
    free(y);
    matmul_fp8(&on_stream, gout, p, NULL);
    y = to_host(gout, bytes);
    check_codes_product("matmul_fp8", q, y);
    matmul_fp8(&on_stream, gout, p, NULL);
    bf16 *again = to_host(gout, bytes);
    ok(!memcmp(y, again, bytes), "the same bits twice");
    free(y);
    free(again);
    free(residual);
    device_free(gout);
}

// Codes of a weight by each rule, in units of a scale with headroom, where ties are common: amax and the
// weight have 8 bits.
static void check_rules(const bf16 *w, const void *gw, int rows, int cols)
{
    static const char *const name[] = {"inverse", "amax", "quotient", "quotient in bf16"};
    size_t n = (size_t)rows * (size_t)cols;
    uint8_t *device = device_alloc(n, "codes");
    for (QuantizeRule rule = QUANTIZE_INVERSE; rule <= QUANTIZE_QUOTIENT_BF16; rule++) {
        float amax = host_amax(w, (int64_t)n),
              scale = rule == QUANTIZE_AMAX ? amax : amax * (float)(1.12 / 448),
              *gscale = to_device(&scale, 4);
        for (int transpose = 0; transpose < 2; transpose++) {
            quantize_e4m3(stream, device, gw, gscale, rows, cols, rule, transpose);
            uint8_t *codes = host_codes(w, scale, rows, cols, rule, transpose), *theirs = to_host(device, n);
            ok(!memcmp(codes, theirs, n), "quantize_e4m3 %d x %d by %s%s: the host's codes", rows, cols,
               name[rule], transpose ? ", transposed" : "");
            free(codes);
            free(theirs);
        }
        device_free(gscale);
    }
    device_free(device);
}

// The scales of weights: exact, delayed, exact, for all amax of 8 bits.
static void check_weight_scales(void)
{
    enum { AMAX, SCALE, NEXT, DELAYED, EXACT, COUNT };
    const float factor = (float)(1.12 / 448);
    int wrong = 0;
    for (int largest = 128; largest < 256; largest++) {
        float values[COUNT] = {(float)largest / 1024, 0, 7, 0, 1}, *g = to_device(values, sizeof values),
              *got;
        float exact = to_bf16_value(values[AMAX] / 448);
        scale_delayed(stream, g + SCALE, g + NEXT, g + AMAX, factor, g + DELAYED);
        got = to_host(g, sizeof values);
        wrong += got[SCALE] != 7 || got[NEXT] != values[AMAX] * factor || got[AMAX] != 0;
        free(got);
        copy_to_device(stream, g, values, 4);
        scale_delayed(stream, g + SCALE, g + NEXT, g + AMAX, factor, g + EXACT);
        got = to_host(g, sizeof values);
        wrong += got[SCALE] != exact || got[NEXT] != values[AMAX] * factor || got[AMAX] != 0;
        free(got);
        copy_to_device(stream, g, values, 8); // amax again, and no scale
        scale_exact(stream, g + SCALE, g + AMAX);
        got = to_host(g, sizeof values);
        wrong += got[SCALE] != exact || got[AMAX] != 0;
        free(got);
        device_free(g);
    }
    ok(wrong == 0, "scale_exact and scale_delayed: %d of 384 are not the host's", wrong);
}

static void check_fp8_mlp(int N, int d, int F)
{
    enum { H, UP, DOWN, Y, SCALES };
    bf16 *h = random_bf16((int64_t)N * d, 1.7), *up = random_bf16((int64_t)d * F, 0.1),
         *down = random_bf16((int64_t)d * F, 0.1);
    void *gh = to_device(h, (size_t)N * (size_t)d * 2), *gup = to_device(up, (size_t)d * (size_t)F * 2),
         *gdown = to_device(down, (size_t)d * (size_t)F * 2), *gcodes[3];
    float scale_y = 0.01f, *gscale = device_alloc(SCALES * 4, "scales"), *scale;
    uint8_t *h8 = check_quantize(h, gh, gscale + H, 1.8f, N, d, false, &gcodes[H]);
    uint8_t *up8 = check_quantize(up, gup, gscale + UP, 1, d, F, true, &gcodes[UP]);
    uint8_t *down8 = check_quantize(down, gdown, gscale + DOWN, 1.12f, d, F, false, &gcodes[DOWN]), *y8, *gy8;
    check_relu2_bound(up, gup, d, F);
    check_rules(up, gup, d, F);
    copy_to_device(stream, gscale + Y, &scale_y, 4);
    scale = to_host(gscale, SCALES * 4);
    check_up(&(Fp8Product){gcodes[H], gcodes[UP], gscale + H, gscale + UP, N, d, F, NULL},
             &(CodesProduct){N, d, F, h8, up8, (double)scale[H] * scale[UP], NULL, true}, gscale + Y, &gy8,
             &y8);
    check_down(&(Fp8Product){gy8, gcodes[DOWN], gscale + Y, gscale + DOWN, N, F, d, NULL},
               &(CodesProduct){N, F, d, y8, down8, (double)scale[Y] * scale[DOWN], NULL, false});
    void *device[] = {gh, gup, gdown, gcodes[0], gcodes[1], gcodes[2], gscale, gy8};
    for (int i = 0; i < 8; i++)
        device_free(device[i]);
    void *host[] = {h, up, down, h8, up8, down8, y8, scale};
    for (int i = 0; i < 8; i++)
        free(host[i]);
}

// One tile and less, odd numbers of rows, depths that end within a step, tail tiles in halves, a training
// run.
static void check_fp8_mlps(const void *unused)
{
    begin_data("FP8 MLP", 0, 0);
    (void)unused;
    check_weight_scales();
    static const int sizes[][3] = {{1, 16, 16},        {37, 64, 256},     {130, 144, 560},
                                   {1031, 768, 3072},  {4133, 384, 1552}, {8233, 96, 2064},
                                   {32768, 768, 3072}, {49152, 768, 3072}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_fp8_mlp(sizes[i][0], sizes[i][1], sizes[i][2]);
}
