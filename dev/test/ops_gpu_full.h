// The products and the head at the size of a training run, where the CPU is too slow for all of it.
//   Products: sampled elements, summed in double.
//   Head: 32768 tokens that repeat the same 512: loss and dw are 64 times those of the 512, which the CPU
//   computes, and dx repeats.
#pragma once

static const Sizes FULL = {32768, 6, 128, 3072, 50304};
enum { SAMPLES = 4096, PERIOD = 512 };

static bf16 *random_bf16(int64_t n, double scale)
{
    bf16 *x = xcalloc((size_t)n, sizeof *x);
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
        x[i] = float_to_bf16((float)(scale * (2 * uniform_at(random_used + (uint64_t)i) - 1)));
    random_used += (uint64_t)n;
    return x;
}

static void *to_device(const void *x, size_t bytes)
{
    void *p = device_alloc(bytes, "test");
    copy_to_device(stream, p, x, bytes);
    stream_synchronize(stream);
    return p;
}

static void *to_host(const void *p, size_t bytes)
{
    void *x = xcalloc(bytes, 1);
    copy_to_host(stream, x, p, bytes);
    stream_synchronize(stream);
    return x;
}

// Strides that make one loop serve x w^T, x w and a^T b.
typedef struct {
    int rows, cols, terms;
    int64_t a_row, a_term, b_col, b_term;
    bool fp32; // the result's type
    float alpha;
} Sampled;

// Relative error of sampled elements against double; beside it that of the plain bf16 computation: one sum on
// the tensor cores in the order of the terms, stored alike.
// residual: like y, added to the product, or NULL
static void check_samples(const char *name, const Sampled *q, const bf16 *a, const bf16 *b,
                          const bf16 *residual, const void *y)
{
    double wrong = 0, naive = 0, size = 0;
#pragma omp parallel for reduction(+ : wrong, naive, size)
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t index = random_used + 2 * (uint64_t)i;
        int64_t r = (int64_t)(uniform_at(index) * q->rows), col = (int64_t)(uniform_at(index + 1) * q->cols);
        double sum = 0, product[16] = {0};
        float plain = 0;
        for (int64_t k = 0; k < q->terms; k++) {
            float x = bf16_to_float(a[r * q->a_row + k * q->a_term]),
                  z = bf16_to_float(b[col * q->b_col + k * q->b_term]);
            sum += product[k % 16] = (double)x * (double)z;
            if (k % 16 == 15)
                plain = add_cut(plain, product, 16, BF16_SUM_BITS);
        }
        int64_t at = r * q->cols + col;
        sum *= (double)q->alpha;
        plain *= q->alpha;
        if (residual) {
            sum += (double)bf16_to_float(residual[at]);
            plain += bf16_to_float(residual[at]);
        }
        double got = q->fp32 ? ((const float *)y)[at] : bf16_to_float(((const bf16 *)y)[at]);
        double stored = q->fp32 ? plain : to_bf16_value(plain);
        wrong += (got - sum) * (got - sum);
        naive += (stored - sum) * (stored - sum);
        size += sum * sum;
    }
    random_used += 2 * SAMPLES;
    double error = sqrt(wrong / size), plain = sqrt(naive / size);
    ok(error <= 2 * plain + FP32_ATOM, "%s, %d samples in double: %.2g (%.2g)", name, SAMPLES, error, plain);
}

// What the products of a layer read and write: on the host, and with a g on the GPU.
typedef struct {
    const bf16 *x, *w, *dy; // (N, in), (out, in), (N, out)
    const floatX *gx, *gw, *gdy;
    floatX *gdx;
    float *gdw;
    int in, out;
} LayerData;

// The same products while they leave multiprocessors to collectives: dx has the same bits, sums over tokens
// are parted otherwise but within the same limit, and alike each time.
static void check_shared(const LayerData *l)
{
    enum { SMS = 24 };
    int N = FULL.N, in = l->in, out = l->out;
    size_t x_bytes = (size_t)N * (size_t)in * 2, dw_bytes = (size_t)in * (size_t)out * 4;
    void *before = to_host(l->gdx, x_bytes), *dw[2], *after;
    char name[128];
    SharedSms shared = {SMS, 1};
    ProductContext c = {stream, &shared};
    matmul_backward_input(&c, &(InputGrad){l->gdx, l->gdy, l->gw, N, in, out, NULL});
    after = to_host(l->gdx, x_bytes);
    ok(!memcmp(before, after, x_bytes),
       "matmul_backward_input %d x %d x %d beside a reduction: the same bits", N, out, in);
    for (int i = 0; i < 2; i++) {
        shared.products = 1;
        matmul_weight_grads(&c, &(WeightGrad){l->gdw, l->gdy, l->gx, out, in, .fresh = true}, 1, N);
        dw[i] = to_host(l->gdw, dw_bytes);
    }
    snprintf(name, sizeof name, "matmul_weight_grads %d x %d x %d beside a reduction", out, N, in);
    check_samples(name, &(Sampled){out, in, N, 1, out, 1, in, true, 1}, l->dy, l->x, NULL, dw[0]);
    ok(!memcmp(dw[0], dw[1], dw_bytes), "and again: the same bits");
    free(before);
    free(after);
    free(dw[0]);
    free(dw[1]);
}

// With a factor, from device memory: x w^T onto a residual, and x w^T alone.
static void check_scaled_products(const LayerData *l)
{
    int N = FULL.N, in = l->in, out = l->out;
    float alpha = -0.7f;
    size_t y_bytes = (size_t)N * (size_t)out * 2;
    const Sampled forward = {N, out, in, in, 1, in, 1, false, alpha};
    void *galpha = to_device(&alpha, sizeof alpha), *gy = device_alloc(y_bytes, "y"), *y;
    char name[128];
    for (int with = 0; with < 2; with++) {
        matmul_forward(&on_stream, &(Product){gy, l->gx, l->gw, with ? l->gdy : NULL, galpha, N, in, out, 1});
        snprintf(name, sizeof name, "matmul_forward %d x %d x %d with a factor%s", N, in, out,
                 with ? " onto a residual" : "");
        check_samples(name, &forward, l->x, l->w, with ? l->dy : NULL, y = to_host(gy, y_bytes));
        free(y);
    }
    device_free(galpha);
    device_free(gy);
}

static void check_products(int in, int out) // multiples of 16
{
    begin_data("products", in, out);
    int N = FULL.N;
    size_t x_bytes = (size_t)N * (size_t)in * 2, w_bytes = (size_t)in * (size_t)out * 2,
           y_count = (size_t)N * (size_t)out;
    bf16 *x = random_bf16((int64_t)N * in, 1), *w = random_bf16((int64_t)in * out, 1),
         *dy = random_bf16((int64_t)y_count, 1);
    void *gx = to_device(x, x_bytes), *gw = to_device(w, w_bytes), *gdy = to_device(dy, y_count * 2),
         *gy = device_alloc(y_count * 2, "y");
    void *gdx = device_alloc(x_bytes, "dx"), *gdw = device_alloc(w_bytes * 2, "dw"), *y;
    char name[128];

    matmul_forward(&on_stream, &(Product){gy, gx, gw, NULL, NULL, N, in, out, 1});
    snprintf(name, sizeof name, "matmul_forward %d x %d x %d", N, in, out);
    check_samples(name, &(Sampled){N, out, in, in, 1, in, 1, false, 1}, x, w, NULL,
                  y = to_host(gy, y_count * 2));
    free(y);

    copy_on_device(stream, gy, gdy, y_count * 2);
    matmul_forward(&on_stream, &(Product){gy, gx, gw, gy, NULL, N, in, out, 1});
    snprintf(name, sizeof name, "matmul_forward %d x %d x %d onto a residual", N, in, out);
    check_samples(name, &(Sampled){N, out, in, in, 1, in, 1, false, 1}, x, w, dy,
                  y = to_host(gy, y_count * 2));
    free(y);

    matmul_backward_input(&on_stream, &(InputGrad){gdx, gdy, gw, N, in, out, NULL});
    snprintf(name, sizeof name, "matmul_backward_input %d x %d x %d", N, out, in);
    check_samples(name, &(Sampled){N, in, out, out, 1, 1, in, false, 1}, dy, w, NULL,
                  y = to_host(gdx, x_bytes));
    free(y);

    matmul_weight_grads(&on_stream, &(WeightGrad){gdw, gdy, gx, out, in, .fresh = false}, 1, N);
    snprintf(name, sizeof name, "matmul_weight_grads %d x %d x %d", out, N, in);
    check_samples(name, &(Sampled){out, in, N, 1, out, 1, in, true, 1}, dy, x, NULL,
                  y = to_host(gdw, w_bytes * 2));
    free(y);
    LayerData l = {x, w, dy, gx, gw, gdy, gdx, gdw, in, out};
    check_scaled_products(&l);
    check_shared(&l);
    void *memory[] = {gx, gw, gdy, gy, gdx, gdw};
    for (int i = 0; i < 6; i++)
        device_free(memory[i]);
    free(x);
    free(w);
    free(dy);
}

// ---- relu^2 -----------------------------------------------------------------------------------------------

// Sampled elements of relu^2 of x w, or with y of the gradient x w 2 sqrt(y); beside them the plain
// computation in bf16.
static void check_relu2_samples(const char *name, const bf16 *x, const bf16 *w, const bf16 *y,
                                const bf16 *got)
{
    int N = FULL.N, d = FULL.H * FULL.e, F = FULL.F;
    double wrong = 0, naive = 0, size = 0;
#pragma omp parallel for reduction(+ : wrong, naive, size)
    for (int i = 0; i < SAMPLES; i++) {
        uint64_t index = random_used + 2 * (uint64_t)i;
        int64_t r = (int64_t)(uniform_at(index) * N), col = (int64_t)(uniform_at(index + 1) * F);
        double sum = 0, product[16] = {0}, result, factor = 0;
        float plain = 0;
        for (int64_t k = 0; k < d; k++) {
            sum += product[k % 16] =
                (double)bf16_to_float(x[r * d + k]) * (double)bf16_to_float(w[k * F + col]);
            if (k % 16 == 15)
                plain = add_cut(plain, product, 16, BF16_SUM_BITS);
        }
        if (y) {
            factor = 2 * sqrt((double)bf16_to_float(y[r * F + col]));
            result = sum * factor;
            plain = to_bf16_value((double)to_bf16_value(plain) * factor);
        } else {
            result = sum > 0 ? sum * sum : 0;
            plain = to_bf16_value(plain > 0 ? (double)plain * plain : 0);
        }
        double e = (double)bf16_to_float(got[r * F + col]) - result, e_plain = (double)plain - result;
        wrong += e * e;
        naive += e_plain * e_plain;
        size += result * result;
    }
    random_used += 2 * SAMPLES;
    double error = sqrt(wrong / size), plain = sqrt(naive / size);
    ok(error <= 2 * plain + FP32_ATOM, "%s %d x %d x %d, %d samples in double: %.2g (%.2g)", name, N, d, F,
       SAMPLES, error, plain);
}

// As in training: many tiles a cluster, the last ones split, and the epilogue of one under the next one's 12
// k steps.
static void check_relu2(void)
{
    begin_data("relu2", 0, 0);
    int N = FULL.N, d = FULL.H * FULL.e, F = FULL.F;
    int64_t results = (int64_t)N * F;
    size_t x_bytes = (size_t)N * (size_t)d * 2, w_bytes = (size_t)d * (size_t)F * 2,
           bytes = (size_t)results * 2;
    bf16 *x = random_bf16((int64_t)N * d, 1), *w = random_bf16((int64_t)d * F, 0.1),
         *y = random_bf16(results, 2), *once = NULL, *again = NULL;
    for (int64_t i = 0; i < results; i++)
        if (!(bf16_to_float(y[i]) > 0))
            y[i] = float_to_bf16(0);
    void *gx = to_device(x, x_bytes), *gw = to_device(w, w_bytes), *gy = to_device(y, bytes),
         *out = device_alloc(bytes, "relu2");
    for (int backward = 0; backward < 2; backward++) {
        for (int run = 0; run < 2; run++) {
            if (backward)
                matmul_relu2_backward(&on_stream, out, gx, gw, gy, N, d, F);
            else
                matmul_relu2_forward(&on_stream, out, gx, gw, N, d, F);
            *(run ? &again : &once) = to_host(out, bytes);
        }
        const char *name = backward ? "matmul_relu2_backward" : "matmul_relu2_forward";
        check_relu2_samples(name, x, w, backward ? y : NULL, once);
        ok(!memcmp(once, again, bytes), "%s, full size: the same bits twice", name);
        free(once);
        free(again);
    }
    void *device[] = {gx, gw, gy, out};
    for (int i = 0; i < 4; i++)
        device_free(device[i]);
    free(x);
    free(w);
    free(y);
}

// ---- head -------------------------------------------------------------------------------------------------

typedef struct {
    float loss;
    float *dx, *dw; // as fp32
} HeadResult;

static const float one = 1;
static HeadLoss head_call(HeadMode mode, int N)
{
    return (HeadLoss){.spec = &head_plain,
                      .mode = mode,
                      .num_targets = 1,
                      .N = N,
                      .d = FULL.H * FULL.e,
                      .Vp = FULL.Vp};
}

static HeadResult head_on_cpu(Which which, HeadMode mode, const float *x, const float *w,
                              const int32_t *targets)
{
    int d = FULL.H * FULL.e, Vp = FULL.Vp;
    int64_t n = (int64_t)PERIOD * d, nw = (int64_t)Vp * d;
    Buffer bx = {.name = "x", .kind = FLOATX, .role = IN, .count = n, .scale = 1},
           bw = {.name = "w", .kind = FLOATX, .role = IN, .count = nw, .scale = 1};
    size_t size = element_bytes(which, FLOATX);
    void *cx = xcalloc((size_t)n, size), *cw = xcalloc((size_t)nw, size), *cdx = xcalloc((size_t)n, size);
    void *w8 = xcalloc(ops[which].head_weight_bytes(HEAD_FP8, Vp, d), 1);
    HeadResult r = {0, xcalloc((size_t)n, 4), xcalloc((size_t)nw, 4)};
    encode(cx, which, &bx, x);
    encode(cw, which, &bw, w);
    void *scratch = xcalloc(ops[which].head_train_scratch_bytes(mode, PERIOD, d, Vp), 1);
    ops[which].head_quantize(stream, &head_plain, w8, cw, Vp, d);
    HeadLoss a = head_call(mode, PERIOD);
    a.loss = &r.loss;
    a.dx = cdx;
    a.dw = r.dw;
    a.x = cx;
    a.w = cw;
    a.w8 = w8;
    a.targets = targets;
    a.target_weight = &one;
    a.scratch = scratch;
    ops[which].head_loss_train(stream, &a);
    free(scratch);
    for (int64_t i = 0; i < n; i++)
        r.dx[i] = (float)decode(cdx, which, &bx, i);
    free(cx);
    free(cw);
    free(cdx);
    free(w8);
    return r;
}

static HeadResult head_on_gpu(HeadMode mode, int N, const float *x, const float *w, const int32_t *targets)
{
    int d = FULL.H * FULL.e, Vp = FULL.Vp;
    int64_t n = (int64_t)N * d, nw = (int64_t)Vp * d;
    bf16 *cx = xcalloc((size_t)n, 2), *cw = xcalloc((size_t)nw, 2);
    int32_t *ct = xcalloc((size_t)N, 4);
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
        cx[i] = float_to_bf16(x[i % ((int64_t)PERIOD * d)]);
#pragma omp parallel for
    for (int64_t i = 0; i < nw; i++)
        cw[i] = float_to_bf16(w[i]);
    for (int i = 0; i < N; i++)
        ct[i] = targets[i % PERIOD];
    void *gx = to_device(cx, (size_t)n * 2), *gw = to_device(cw, (size_t)nw * 2),
         *gt = to_device(ct, (size_t)N * 4);
    void *w8 = device_alloc(head_weight_bytes(HEAD_FP8, Vp, d), "w8"),
         *gdx = device_alloc((size_t)n * 2, "dx");
    void *gdw = device_alloc((size_t)nw * 4, "dw"), *gloss = device_alloc(4, "loss");
    void *gone = to_device(&one, sizeof one),
         *scratch = device_alloc(head_train_scratch_bytes(mode, N, d, Vp), "scratch");
    head_quantize(stream, &head_plain, w8, gw, Vp, d);
    HeadLoss a = head_call(mode, N);
    a.loss = gloss;
    a.dx = gdx;
    a.dw = gdw;
    a.x = gx;
    a.w = gw;
    a.w8 = w8;
    a.targets = gt;
    a.target_weight = gone;
    a.scratch = scratch;
    head_loss_train(stream, &a);
    float *loss = to_host(gloss, 4);
    bf16 *dx = to_host(gdx, (size_t)n * 2);
    HeadResult r = {*loss, xcalloc((size_t)n, 4), to_host(gdw, (size_t)nw * 4)};
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
        r.dx[i] = bf16_to_float(dx[i]);
    void *memory[] = {gx, gw, gt, w8, gdx, gdw, gloss, gone, scratch};
    for (int i = 0; i < 9; i++)
        device_free(memory[i]);
    free(cx);
    free(cw);
    free(ct);
    free(loss);
    free(dx);
    return r;
}

static double periodic_distance(const float *x, int64_t n, double factor, const float *truth, int64_t period)
{
    double difference = 0, size = 0;
#pragma omp parallel for reduction(+ : difference, size)
    for (int64_t i = 0; i < n; i++) {
        double t = factor * truth[i % period], e = x[i] - t;
        difference += e * e;
        size += t * t;
    }
    return sqrt(difference / size);
}

static double root_mean_square(const float *x, int64_t n)
{
    double sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)n);
}

// Rows do not depend on each other, and equal ones have the same bits wherever they are. An element of dw is
// the sum of as many products in another order: tensor cores cut the sums of FP8 to 13 bits, 32 times before
// they are added up.
//   n, nw: elements of dx and dw
static void check_repetition(const char *name, const HeadResult *gpu, const HeadResult *period, int64_t n,
                             int64_t nw)
{
    int64_t times = FULL.N / PERIOD;
    bool same = true;
    for (int64_t i = 0; i < n * times; i++)
        same &= gpu->dx[i] == period->dx[i % n];
    ok(same, "%s, full size: a row of dx has the bits that it has in a batch of %d", name, (int)PERIOD);
    double repeated = periodic_distance(gpu->dw, nw, (double)times, period->dw, nw);
    ok(repeated <= 32 * 0x1p-13, "%s, full size: dw is that of %d rows as often: %.2g", name, (int)PERIOD,
       repeated);
}

static void check_head(HeadMode mode)
{
    begin_data("head", mode, 0);
    int d = FULL.H * FULL.e;
    int64_t n = (int64_t)PERIOD * d, nw = (int64_t)FULL.Vp * d, times = FULL.N / PERIOD;
    const char *name = mode == HEAD_FP8 ? "FP8 head" : "bf16 head";
    float *x = xcalloc((size_t)n, 4), *w = xcalloc((size_t)nw, 4);
    float places[PERIOD];
    int32_t targets[PERIOD];
    for (int64_t i = 0; i < n; i++)
        x[i] = to_bf16_value(1.7 * (2 * uniform() - 1));
#pragma omp parallel for
    for (int64_t i = 0; i < nw; i++)
        w[i] = to_bf16_value(0.2 * (2 * uniform_at(random_used + (uint64_t)i) - 1));
    random_used += (uint64_t)nw;
    for (int i = 0; i < PERIOD; i++)
        places[i] = (float)(targets[i] = (int32_t)(uniform() * FULL.Vp));
    HeadResult truth = head_on_cpu(TRUTH, mode, x, w, targets),
               naive = head_on_cpu(NAIVE, mode, x, w, targets);
    HeadResult gpu = head_on_gpu(mode, FULL.N, x, w, targets),
               again = head_on_gpu(mode, FULL.N, x, w, targets),
               period = head_on_gpu(mode, PERIOD, x, w, targets);
    double dx = periodic_distance(gpu.dx, n * times, 1, truth.dx, n),
           dx_naive = periodic_distance(naive.dx, n, 1, truth.dx, n);
    double dw = periodic_distance(gpu.dw, nw, (double)times, truth.dw, nw),
           dw_naive = periodic_distance(naive.dw, nw, 1, truth.dw, nw);
    double loss = fabs(gpu.loss / (times * (double)truth.loss) - 1),
           loss_naive = fabs(naive.loss / (double)truth.loss - 1);
    Head h = {.mode = mode,
              .spec = &head_plain,
              .x = x,
              .w = w,
              .targets = places,
              .weight = &one,
              .num_targets = 1,
              .N = PERIOD,
              .d = d,
              .Vp = FULL.Vp};
    CutErrors cuts = {0};
    if (cuts_sums(&h))
        cuts = cut_errors(&h);
    double of_dx, of_dw;
    head_rounding(&h, &cuts, &of_dx, &of_dw);
    loss_naive = plain_loss_error(&h, &cuts, loss_naive, truth.loss);
    dx_naive = fmax(dx_naive, of_dx / root_mean_square(truth.dx, n));
    dw_naive = fmax(dw_naive, of_dw / root_mean_square(truth.dw, nw));
    ok(loss <= 2 * loss_naive + FP32_ATOM, "%s, full size, loss: %.2g (%.2g)", name, loss, loss_naive);
    ok(dx <= 2 * dx_naive + FP32_ATOM, "%s, full size, dx: %.2g (%.2g)", name, dx, dx_naive);
    ok(dw <= 2 * dw_naive + FP32_ATOM, "%s, full size, dw: %.2g (%.2g)", name, dw, dw_naive);
    bool same = gpu.loss == again.loss && !memcmp(gpu.dx, again.dx, (size_t)(n * times) * 4) &&
                !memcmp(gpu.dw, again.dw, (size_t)nw * 4);
    ok(same, "%s, full size: the same bits twice", name);
    if (head_has_own_codes(&h))
        check_repetition(name, &gpu, &period, n, nw);
    HeadResult all[] = {truth, naive, gpu, again, period};
    for (int i = 0; i < 5; i++) {
        free(all[i].dx);
        free(all[i].dw);
    }
    free(x);
    free(w);
}

static void check_full_size(const void *unused)
{
    (void)unused;
    int d = FULL.H * FULL.e;
    if (tap_wanted("matmul") && !as_compute) {
        check_products(d, 3 * d);
        check_products(d, d);
        check_products(FULL.F, d);
    }
    if (tap_wanted("head_train")) {
        if (!as_compute)
            check_head(HEAD_BF16);
        check_head(HEAD_FP8);
    }
    if (tap_wanted("matmul_relu2") && !as_compute)
        check_relu2();
}
