// FP8 in both directions. Scales, and codes of given values, are equal to the CPU's one by one. Codes of
// products may differ from the CPU's where the tensor cores' sums do, which drop bits: each lies between the
// codes of the exact sum less and plus the most that can be dropped, and as few of them differ as when the
// sum is added as tensor cores do.
#pragma once

// ---- scales and codes -------------------------------------------------------------------------------------

static void check_both_scales(void)
{
    enum { LAYERS = 300 };
    const float factor = (float)(1.25 / 448), least = 1e-6f;
    float amax[LAYERS], scale[LAYERS] = {0}, quotient[2] = {0, 0.1f};
    int wrong = 0;
    for (int i = 0; i < LAYERS; i++)
        amax[i] = i % 7 == 0 ? 0 : to_bf16_value(ldexp(1 + uniform(), i % 40 - 30));
    float *gamax = to_device(amax, sizeof amax), *gscale = to_device(scale, sizeof scale);
    scales_follow(stream, gscale, gamax, factor, least, LAYERS);
    float *got = to_host(gscale, sizeof scale), *after = to_host(gamax, sizeof amax);
    ops[NAIVE].scales_follow(NULL, scale, amax, factor, least, LAYERS);
    for (int i = 0; i < LAYERS; i++)
        wrong += got[i] != scale[i] || after[i] != 0;
    ok(wrong == 0, "scales_follow: %d of %d are not the CPU's", wrong, LAYERS);
    free(got);
    free(after);
    wrong = 0;
    for (int largest = 127; largest < 256; largest++) {
        quotient[1] = largest == 127 ? 0 : (float)largest / 1024;
        float *g = to_device(quotient, sizeof quotient), *there;
        scale_quotient(stream, g, g + 1);
        there = to_host(g, sizeof quotient);
        float here[2] = {0, quotient[1]};
        ops[NAIVE].scale_quotient(NULL, here, here + 1);
        wrong += there[0] != here[0] || there[1] != 0;
        free(there);
        device_free(g);
    }
    ok(wrong == 0, "scale_quotient: %d of 129 are not the CPU's", wrong);
    device_free(gamax);
    device_free(gscale);
}

// A tensor's codes both ways round and its largest magnitude, on the host or on the device.
static Codes codes_of_size(int64_t n, float *scale, bool transposed, bool amax, bool device)
{
    void *memory[3];
    for (int i = 0; i < 3; i++) {
        size_t bytes = i < 2 ? (size_t)n : sizeof(float);
        memory[i] = device ? device_alloc(bytes, "codes") : xcalloc(bytes, 1);
    }
    return (Codes){memory[0], transposed ? memory[1] : NULL, scale, amax ? memory[2] : NULL};
}

static void free_codes(const Codes *c, bool device)
{
    void *memory[] = {c->codes, c->transposed, c->amax};
    for (int i = 0; i < 3; i++) {
        if (device)
            device_free(memory[i]);
        else
            free(memory[i]);
    }
}

static void check_quantize_codes(int rows, int cols, float scale)
{
    int64_t n = (int64_t)rows * cols;
    bf16 *x = random_bf16(n, 2.5);
    void *gx = to_device(x, (size_t)n * 2);
    float *gscale = to_device(&scale, sizeof scale);
    for (int variant = 0; variant < 4; variant++) { // bit 0: transposed, too; bit 1: with the maximum
        Codes host = codes_of_size(n, &scale, variant & 1, variant & 2, false),
              device = codes_of_size(n, gscale, variant & 1, variant & 2, true);
        ops[NAIVE].quantize_codes(NULL, &host, (void *)x, rows, cols);
        quantize_codes(stream, &device, gx, rows, cols);
        uint8_t *codes = to_host(device.codes, (size_t)n),
                *transposed = device.transposed ? to_host(device.transposed, (size_t)n) : NULL;
        float *amax = device.amax ? to_host(device.amax, sizeof(float)) : NULL;
        bool same = !memcmp(codes, host.codes, (size_t)n) &&
                    (!transposed || !memcmp(transposed, host.transposed, (size_t)n)) &&
                    (!amax || *amax == *host.amax);
        ok(same, "quantize_codes %d x %d, variant %d: codes and maximum are the CPU's", rows, cols, variant);
        free(codes);
        free(transposed);
        free(amax);
        free_codes(&host, false);
        free_codes(&device, true);
    }
    device_free(gx);
    device_free(gscale);
    free(x);
}

// ---- products to codes ------------------------------------------------------------------------------------

typedef struct {
    int N, in, out;
    const uint8_t *x8, *w8; // host
    const uint8_t *y8;      // host; NULL: relu^2, else the gradient before it
    float scale_x, scale_w, alpha, scale, scale_y;
} ToCodes;

// What a sum becomes before it is divided by the scale. Each step is monotone.
static float result_of(const ToCodes *q, double sum, int64_t at)
{
    float factor = q->scale_x * (q->scale_w * q->alpha), p = to_bf16_value((double)((float)sum * factor));
    if (!q->y8)
        return to_bf16_value(p > 0 ? p * p : 0);
    float root = to_bf16_value(sqrtf(e4m3_to_float(q->y8[at]) * q->scale_y));
    return to_bf16_value(p * (2 * root));
}

static uint8_t code_of_sum(const ToCodes *q, double sum, int64_t at)
{
    return float_to_e4m3(result_of(q, sum, at) / q->scale);
}

// The exact sum of an element and the most by which tensor cores can miss it: each of the addends of a step,
// the sum among them, loses less than a unit, and the sum is cut to fp32. plain: as add_cut adds it.
typedef struct {
    double sum, most;
    float plain;
} ElementSum;
static ElementSum element_sum(const ToCodes *q, int64_t row, int64_t col)
{
    ElementSum s = {0, 0, 0};
    bool units = device_has_fp8();
    int step = units ? 32 : 16, bits = units ? FP8_SUM_BITS : BF16_SUM_BITS;
    const uint8_t *x = q->x8 + row * q->in, *w = q->w8 + col * q->in;
    for (int at = 0; at < q->in; at += step) {
        double product[32] = {0}, largest = fabs(s.sum) + s.most;
        for (int k = 0; k < step && at + k < q->in; k++) {
            product[k] = (double)e4m3_to_float(x[at + k]) * (double)e4m3_to_float(w[at + k]);
            largest = fmax(largest, fabs(product[k]));
        }
        for (int k = 0; k < step; k++)
            s.sum += product[k];
        s.plain = add_cut(s.plain, product, step, bits);
        if (largest > 0)
            s.most += (step + 1) * ldexp(1, exponent(largest) - bits);
        s.most += fabs(s.sum) * 0x1p-22;
    }
    return s;
}

// The codes of a whole product beside the CPU's: elements that differ, and those of them that no dropped bits
// explain.
typedef struct {
    int64_t different, wrong;
} Difference;
static Difference compare_codes(const ToCodes *q, const uint8_t *got, const uint8_t *cpu)
{
    int64_t different = 0, wrong = 0;
#pragma omp parallel for reduction(+ : different, wrong) schedule(dynamic, 16)
    for (int i = 0; i < q->N; i++)
        for (int j = 0; j < q->out; j++) {
            int64_t at = (int64_t)i * q->out + j;
            if (got[at] == cpu[at])
                continue;
            ElementSum s = element_sum(q, i, j);
            float value = e4m3_to_float(got[at]), one = e4m3_to_float(code_of_sum(q, s.sum - s.most, at)),
                  other = e4m3_to_float(code_of_sum(q, s.sum + s.most, at)); // the scale may be negative
            different++;
            wrong += !(value >= fminf(one, other) && value <= fmaxf(one, other));
        }
    return (Difference){different, wrong};
}

// Of sampled elements: codes that are not those of the exact sum, here and where the sum is add_cut's.
static void check_code_samples(const char *name, const ToCodes *q, const uint8_t *got)
{
    int here = 0, plain = 0;
#pragma omp parallel for reduction(+ : here, plain)
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t index = random_used + 2 * (uint64_t)i;
        int64_t row = (int64_t)(uniform_at(index) * q->N), col = (int64_t)(uniform_at(index + 1) * q->out);
        int64_t at = row * q->out + col;
        ElementSum s = element_sum(q, row, col);
        uint8_t exact = code_of_sum(q, s.sum, at);
        here += got[at] != exact;
        plain += code_of_sum(q, (double)s.plain, at) != exact;
    }
    random_used += 2 * SAMPLES;
    // Numbers of rare events: twice as many, and four standard deviations of both.
    double most = 2 * plain + 4 * sqrt(3 * plain + 1);
    ok(here <= most, "%s %d x %d x %d: of %d samples %d have another code than the exact sum (%d)", name,
       q->N, q->in, q->out, SAMPLES, here, plain);
}

// The largest result lies between the bounds of the elements with the CPU's largest codes.
static void check_code_amax(const char *name, const ToCodes *q, const uint8_t *cpu, float amax)
{
    int largest = 0;
    double least = 0, most = 0;
    for (int64_t i = 0; i < (int64_t)q->N * q->out; i++)
        largest = (cpu[i] & 0x7f) > largest ? cpu[i] & 0x7f : largest;
    for (int64_t i = 0; i < (int64_t)q->N * q->out; i++) {
        if ((cpu[i] & 0x7f) < largest - 1)
            continue;
        ElementSum s = element_sum(q, i / q->out, i % q->out);
        double low = (double)result_of(q, s.sum - s.most, i), high = (double)result_of(q, s.sum + s.most, i);
        least = fmax(least, low * high > 0 ? fmin(fabs(low), fabs(high)) : 0);
        most = fmax(most, fmax(fabs(low), fabs(high)));
    }
    ok(amax >= least && amax <= most, "%s: the largest result %.9g is between %.9g and %.9g", name,
       (double)amax, least, most);
}

// The product on the device, with codes in the scale q->scale.
typedef struct {
    const void *x8, *w8, *y8;                         // y8 NULL: relu^2
    const float *scale_x, *scale_w, *alpha, *scale_y; // alpha may be NULL
} DeviceOperands;
static void run_to_codes(const Codes *to, const ToCodes *q, const DeviceOperands *g)
{
    Fp8Product p = {g->x8, g->w8, g->scale_x, g->scale_w, q->N, q->in, q->out, g->alpha};
    if (q->y8)
        matmul_fp8_relu2_backward(&on_stream, to, &p, g->y8, g->scale_y);
    else
        matmul_fp8_relu2_codes(&on_stream, to, &p);
}

static void run_to_codes_on_cpu(const Codes *to, const ToCodes *q)
{
    Fp8Product p = {q->x8, q->w8, &q->scale_x, &q->scale_w, q->N, q->in, q->out, &q->alpha};
    if (q->y8)
        ops[NAIVE].matmul_fp8_relu2_backward(NULL, to, &p, q->y8, &q->scale_y);
    else
        ops[NAIVE].matmul_fp8_relu2_codes(NULL, to, &p);
}

static bool is_transposed(const uint8_t *turned, const uint8_t *x, int rows, int cols)
{
    int64_t wrong = 0;
#pragma omp parallel for reduction(+ : wrong)
    for (int j = 0; j < cols; j++)
        for (int i = 0; i < rows; i++)
            wrong += turned[(int64_t)j * rows + i] != x[(int64_t)i * cols + j];
    return wrong == 0;
}

// Codes of one scale, twice with the same bits, and without what may be NULL; returns them, on the host.
static uint8_t *check_one_scale(const char *name, ToCodes *q, const DeviceOperands *g, float scale,
                                float *amax)
{
    size_t n = (size_t)q->N * (size_t)q->out;
    float *gscale = to_device(&scale, sizeof scale);
    q->scale = scale;
    Codes cpu = codes_of_size((int64_t)n, &scale, false, true, false),
          gpu = codes_of_size((int64_t)n, gscale, true, true, true),
          less = codes_of_size((int64_t)n, gscale, false, false, true);
    run_to_codes_on_cpu(&cpu, q);
    run_to_codes(&gpu, q, g);
    run_to_codes(&less, q, g);
    uint8_t *codes = to_host(gpu.codes, n), *turned = to_host(gpu.transposed, n),
            *again = to_host(less.codes, n);
    float *most = to_host(gpu.amax, sizeof(float));
    *amax = *most;
    Difference d = compare_codes(q, codes, cpu.codes);
    ok(d.wrong == 0, "%s %d x %d x %d: %lld codes are not the CPU's, %lld of them beyond what sums drop",
       name, q->N, q->in, q->out, (long long)d.different, (long long)d.wrong);
    ok(is_transposed(turned, codes, q->N, q->out), "the other copy is their transpose");
    ok(!memcmp(codes, again, n), "alone they are the same");
    run_to_codes(&gpu, q, g);
    free(again);
    again = to_host(gpu.transposed, n);
    ok(!memcmp(turned, again, n), "the same bits twice");
    check_code_samples(name, q, codes);
    void *host[] = {turned, again, most};
    for (int i = 0; i < 3; i++)
        free(host[i]);
    free_codes(&cpu, false);
    free_codes(&gpu, true);
    free_codes(&less, true);
    device_free(gscale);
    return codes;
}

// First in a scale that leaves headroom, then in one that cuts most; returns the codes of the first.
static uint8_t *check_to_codes(const char *name, ToCodes *q, const DeviceOperands *g, float *scale)
{
    float amax, cut, ones = 1;
    size_t n = (size_t)q->N * (size_t)q->out;
    Codes cpu = codes_of_size((int64_t)n, &ones, false, true, false);
    q->scale = 1;
    run_to_codes_on_cpu(&cpu, q);
    *scale = *cpu.amax * (float)(1.25 / 448);
    uint8_t *codes = check_one_scale(name, q, g, *scale, &amax);
    cpu.scale = scale;
    run_to_codes_on_cpu(&cpu, q);
    check_code_amax(name, q, cpu.codes, amax);
    free(check_one_scale(name, q, g, *scale / 64, &cut));
    ok(cut == amax, "the largest result does not depend on the scale");
    q->scale = *scale;
    free_codes(&cpu, false);
    return codes;
}

static uint8_t *random_codes(int64_t n)
{
    bf16 *x = random_bf16(n, 448);
    uint8_t *codes = xcalloc((size_t)n, 1);
    for (int64_t i = 0; i < n; i++)
        codes[i] = float_to_e4m3(bf16_to_float(x[i]));
    free(x);
    return codes;
}

// relu^2, then the gradient before it, with a factor of the sums. Operands of the second are others: those of
// the first would give values near the middle between two codes nowhere.
static void check_relu2_both(int N, int d, int F)
{
    size_t rows = (size_t)N * (size_t)d, weight = (size_t)F * (size_t)d;
    uint8_t *code[4];
    void *device[7];
    float scale_y, unused, scales[] = {0x1.7p-8f, 0x1.1p-11f, -0.7f}, *g = to_device(scales, sizeof scales);
    for (int i = 0; i < 4; i++) {
        code[i] = random_codes((int64_t)(i % 2 ? weight : rows));
        device[i] = to_device(code[i], i % 2 ? weight : rows);
    }
    ToCodes forward = {N, d, F, code[0], code[1], NULL, scales[0], scales[1], 1, 1, 0};
    uint8_t *y8 =
        check_to_codes("matmul_fp8_relu2_codes", &forward,
                       &(DeviceOperands){device[0], device[1], NULL, g, g + 1, NULL, NULL}, &scale_y);
    device[4] = to_device(y8, (size_t)N * (size_t)F);
    device[5] = to_device(&scale_y, sizeof scale_y);
    device[6] = g;
    ToCodes backward = {N, d, F, code[2], code[3], y8, scales[0], scales[1], scales[2], 1, scale_y};
    free(check_to_codes("matmul_fp8_relu2_backward", &backward,
                        &(DeviceOperands){device[2], device[3], device[4], g, g + 1, g + 2, device[5]},
                        &unused));
    for (int i = 0; i < 7; i++)
        device_free(device[i]);
    for (int i = 0; i < 4; i++)
        free(code[i]);
    free(y8);
}

// matmul_fp8 with a factor, and with results of eight columns more than whole sixteens.
static void check_fp8_factor(int N, int in, int out)
{
    uint8_t *x8 = random_codes((int64_t)N * in), *w8 = random_codes((int64_t)out * in);
    float scales[] = {0x1.7p-8f, 0x1.1p-11f, -0.7f}, *g = to_device(scales, sizeof scales);
    void *gx = to_device(x8, (size_t)N * (size_t)in), *gw = to_device(w8, (size_t)out * (size_t)in);
    Fp8Product p = {gx, gw, g, g + 1, N, in, out, g + 2};
    CodesProduct q = {N, in, out, x8, w8, (double)(scales[0] * (scales[1] * scales[2])), NULL, false};
    check_down(&p, &q);
    device_free(gx);
    device_free(gw);
    device_free(g);
    free(x8);
    free(w8);
}

// ---- gradients of weights ---------------------------------------------------------------------------------

typedef struct {
    int m, n, N;
    const uint8_t *a8, *b8; // host: (m, N), (n, N)
    double scale;
    const float *before; // host: what it is added to, or NULL
} GradOfCodes;

// One element, as tensor cores add bf16, or as they add FP8 when what they hold goes to a sum in fp32 every
// PROMOTED codes (CUTLASS: four products of 32).
static float plain_grad(const GradOfCodes *q, int row, int col, double *exact)
{
    enum { PROMOTED = 128 };
    bool units = device_has_fp8() && q->N % 16 == 0;
    int step = units ? 32 : 16, bits = units ? FP8_SUM_BITS : BF16_SUM_BITS;
    float total = 0, held = 0;
    *exact = 0;
    for (int at = 0; at < q->N; at += step) {
        double product[32] = {0};
        for (int k = 0; k < step && at + k < q->N; k++) {
            product[k] = (double)e4m3_to_float(q->a8[(int64_t)row * q->N + at + k]) *
                         (double)e4m3_to_float(q->b8[(int64_t)col * q->N + at + k]);
            *exact += product[k];
        }
        held = add_cut(held, product, step, bits);
        if (!units || (at + step) % PROMOTED)
            continue;
        total += held;
        held = 0;
    }
    return total + held;
}

static void check_grad(const char *name, const GradOfCodes *q, const float *dw)
{
    double wrong = 0, naive = 0, size = 0;
    int samples = q->N > 4096 ? SAMPLES / 8 : SAMPLES;
#pragma omp parallel for reduction(+ : wrong, naive, size)
    for (int i = 0; i < samples; i++) {
        uint64_t index = random_used + 2 * (uint64_t)i;
        int row = (int)(uniform_at(index) * q->m), col = (int)(uniform_at(index + 1) * q->n);
        int64_t at = (int64_t)row * q->n + col;
        double exact, before = q->before ? (double)q->before[at] : 0;
        float plain = plain_grad(q, row, col, &exact);
        double truth = before + q->scale * exact, stored = (double)((float)before + (float)q->scale * plain);
        wrong += ((double)dw[at] - truth) * ((double)dw[at] - truth);
        naive += (stored - truth) * (stored - truth);
        size += truth * truth;
    }
    random_used += 2 * (uint64_t)samples;
    double error = sqrt(wrong / size), plain = sqrt(naive / size);
    ok(size > 0 && error <= 2 * plain + FP32_ATOM, "%s %d x %d x %d, %d samples in double: %.2g (%.2g)", name,
       q->m, q->N, q->n, samples, error, plain);
}

// A pair of products, one of them with the operands changed over: the first begins anew, then both are added
// to.
static void check_fp8_weight_grads(int m, int n, int N)
{
    size_t bytes = (size_t)m * (size_t)n * sizeof(float);
    uint8_t *a8 = random_codes((int64_t)m * N), *b8 = random_codes((int64_t)n * N);
    float scales[] = {0x1.7p-8f, 0x1.1p-11f}, *g = to_device(scales, sizeof scales), *dw[2][2];
    void *ga = to_device(a8, (size_t)m * (size_t)N), *gb = to_device(b8, (size_t)n * (size_t)N);
    float *nothing = xcalloc(bytes, 1), *gdw, *other = device_alloc(bytes, "dw");
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        nothing[i] = NAN;
    gdw = to_device(nothing, bytes);
    const double scale = (double)(scales[0] * scales[1]);
    Fp8WeightGrad both[] = {{gdw, ga, gb, g, g + 1, m, n, true}, {other, gb, ga, g + 1, g, n, m, false}};
    GradOfCodes q = {m, n, N, a8, b8, scale, NULL}, turned = {n, m, N, b8, a8, scale, NULL};
    for (int i = 0; i < 2; i++) {
        device_zero(stream, other, bytes);
        matmul_fp8_weight_grads(&on_stream, both, 2, N);
        dw[0][i] = to_host(gdw, bytes);
        dw[1][i] = to_host(other, bytes);
    }
    check_grad("matmul_fp8_weight_grads", &q, dw[0][0]);
    check_grad("matmul_fp8_weight_grads, the other", &turned, dw[1][0]);
    ok(!memcmp(dw[0][0], dw[0][1], bytes) && !memcmp(dw[1][0], dw[1][1], bytes), "the same bits twice");
    both[0].fresh = false;
    matmul_fp8_weight_grads(&on_stream, both, 1, N);
    float *onto = to_host(gdw, bytes);
    q.before = dw[0][0];
    check_grad("matmul_fp8_weight_grads onto what is there", &q, onto);
    void *device[] = {ga, gb, g, gdw, other},
         *host[] = {nothing, a8, b8, dw[0][0], dw[0][1], dw[1][0], dw[1][1], onto};
    for (int i = 0; i < 5; i++)
        device_free(device[i]);
    for (int i = 0; i < 8; i++)
        free(host[i]);
}

// One tile and less, odd numbers of rows, depths that end within a step, columns that end within a panel,
// tail tiles in halves, a training run.
static void check_fp8_both(const void *unused)
{
    begin_data("FP8 both ways", 0, 0);
    (void)unused;
    static const int sizes[][3] = {{1, 16, 16},      {16, 16, 16},      {37, 64, 256},     {272, 48, 80},
                                   {130, 144, 560},  {1040, 768, 3072}, {1031, 768, 3072}, {4133, 384, 1552},
                                   {8240, 96, 2064}, {16384, 768, 3072}};
    check_both_scales();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int *z = sizes[i];
        check_quantize_codes(z[0], z[1], 2.5f / 448);
        check_quantize_codes(z[0], z[2], 0x1p-9f); // of many ties
        check_relu2_both(z[0], z[1], z[2]);
        check_fp8_weight_grads(z[1], z[2], z[0]);
        check_fp8_factor(z[0], z[1], z[2] % 32 ? z[2] - 8 : z[2]);
    }
    check_fp8_factor(16384, 1920, 768);
    check_fp8_weight_grads(1920, 768, 16384);
}
