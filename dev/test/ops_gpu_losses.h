// Losses of test_ops_gpu.c in FP8 beside sums that are cut as tensor cores cut them, and what roundings of
// logits do to a loss.
#pragma once

static int exponent(double x)
{
    int e = -1000;
    if (x != 0)
        frexp(x, &e);
    return e;
}

// sum + p[0] + ... as a Hopper tensor core adds `count` products at a time: all are cut to `bits` bits below
// the largest exponent among them, and the sum is cut to fp32. Cuts go toward zero, so the error of a long
// sum grows with its length and not with the root of it. Seen on an H200: bf16 in sums of 512 to 32768 terms,
// FP8 in sums of 768, errors within 2% of this function's (dev/notes/2026-11-21_how_tensor_cores_add.md).
enum { BF16_SUM_BITS = 26, FP8_SUM_BITS = 14 };
static float add_cut(float sum, const double *p, int count, int bits)
{
    int largest = exponent(sum);
    for (int i = 0; i < count; i++)
        largest = largest > exponent(p[i]) ? largest : exponent(p[i]);
    double unit = ldexp(1, largest - bits), total = trunc(sum / unit);
    for (int i = 0; i < count; i++)
        total += trunc(p[i] / unit);
    total *= unit;
    float rounded = (float)total;
    return fabs((double)rounded) > fabs(total) ? nextafterf(rounded, 0) : rounded;
}

// The sum of a[k] * b[k], FP8 values, 32 at a time: add_cut in fp32, for the 10^10 products of a head's
// logits.
//   a, b  (count), a multiple of 32
static float fp8_sum(const float *a, const float *b, int count)
{
    float sum = 0;
    for (int at = 0; at < count; at += 32) {
        float product[32], power; // the largest power of two that is not above the largest magnitude
        int32_t bits[32], largest, total = 0;
        memcpy(&largest, &sum, 4);
        largest &= 0x7f800000;
        for (int k = 0; k < 32; k++)
            product[k] = a[at + k] * b[at + k];
        memcpy(bits, product, sizeof bits);
        for (int k = 0; k < 32; k++) {
            int32_t one = bits[k] & 0x7f800000;
            largest = one > largest ? one : largest;
        }
        if (largest == 0)
            continue;
        memcpy(&power, &largest, 4);
        float unit = 2 * power / (1 << FP8_SUM_BITS), inverse = 1 / unit;
        for (int k = 0; k < 32; k++)
            total += (int32_t)(product[k] * inverse);
        sum = (float)(total + (int32_t)(sum * inverse)) * unit;
    }
    return sum;
}

// The head of a case of head_loss_train.
typedef struct {
    HeadMode mode;
    const HeadSpec *spec;
    const float *x, *w, *targets; // (N, d), (Vp, d), (N) as fp32
    const float *weight;          // (num_targets)
    int num_targets;
    const float *prefix; // (N) as fp32, or NULL
    float prefix_weight;
    int N, d, Vp;
} Head;

// (rows, d) in units of `scale` to e4m3, each row made up to a multiple of 32 with zeros; owned by the
// caller.
static float *fp8_rows(const float *from, int rows, int d, float scale)
{
    int pitch = (int)round_up(d, 32);
    float *to = xcalloc((size_t)rows * (size_t)pitch, sizeof *to);
#pragma omp parallel for
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < d; k++)
            to[(int64_t)i * pitch + k] = e4m3_to_float(float_to_e4m3(from[(int64_t)i * d + k] / scale));
    return to;
}

static double softcapped(const Head *h, double logit)
{
    const HeadSpec *spec = h->spec;
    return (double)spec->cap / (1 + exp(-(logit + (double)spec->shift) / (double)spec->slope));
}

// Terms of a row's loss: tokens and their weights; returns their number.
static int loss_terms(const Head *h, int row, int token[MAX_TARGETS + 1], double weight[MAX_TARGETS + 1])
{
    int count = 0;
    for (; count < h->num_targets && row + count < h->N; count++) {
        token[count] = (int)h->targets[row + count];
        weight[count] = (double)h->weight[count];
    }
    if (h->prefix && h->prefix[row] >= 0) {
        token[count] = (int)h->prefix[row];
        weight[count++] = (double)h->prefix_weight;
    }
    return count;
}

// Losses of the plain FP8 computation where tensor cores make the logits: of sums cut as they cut them, then
// stored in bf16, too.
static void fp8_losses_with_cuts(const Head *h, double *cut, double *stored)
{
    int pitch = (int)round_up(h->d, 32);
    HeadScales scale = head_scales(h->spec, h->d);
    float *x = fp8_rows(h->x, h->N, h->d, scale.x), *w = fp8_rows(h->w, h->Vp, h->d, scale.w);
    double loss[2] = {0, 0};
#pragma omp parallel for reduction(+ : loss[:2]) schedule(dynamic, 1)
    for (int i = 0; i < h->N; i++) {
        double sum[2] = {0, 0}, weights = 0, weight_of[MAX_TARGETS + 1];
        int token[MAX_TARGETS + 1], count = loss_terms(h, i, token, weight_of);
        for (int j = 0; j < h->Vp; j++) {
            float logit = scale.x * scale.w * fp8_sum(x + (int64_t)i * pitch, w + (int64_t)j * pitch, pitch);
            double z[2] = {softcapped(h, logit), softcapped(h, to_bf16_value(logit))}, weight = 0;
            for (int k = 0; k < count; k++)
                weight += token[k] == j ? weight_of[k] : 0;
            weights += weight;
            for (int k = 0; k < 2; k++) {
                sum[k] += exp(z[k]);
                loss[k] -= weight * z[k];
            }
        }
        for (int k = 0; k < 2; k++)
            loss[k] += weights * log(sum[k]);
    }
    free(x);
    free(w);
    *cut = loss[0];
    *stored = loss[1];
}

// What rounding the targets' logits to bf16 does to the loss, as a root of the mean square: a unit u in the
// last place gives u^2 / 12, and dz/dl = cap / slope sig (1 - sig). Targets of a row count as different
// tokens.
static double loss_spread(const Head *h)
{
    double squares = 0;
#pragma omp parallel for reduction(+ : squares)
    for (int i = 0; i < h->N; i++) {
        const float *x = h->x + (int64_t)i * h->d;
        double weight[MAX_TARGETS + 1];
        int token[MAX_TARGETS + 1], count = loss_terms(h, i, token, weight);
        for (int k = 0; k < count; k++) {
            const float *w = h->w + (int64_t)token[k] * h->d;
            double logit = 0;
            for (int c = 0; c < h->d; c++)
                logit += (double)x[c] * (double)w[c];
            double cap = (double)h->spec->cap, sig = softcapped(h, logit) / cap,
                   slope = weight[k] * cap / (double)h->spec->slope * sig * (1 - sig),
                   error = slope * ldexp(1, exponent(logit) - 8);
            squares += error * error / 12;
        }
    }
    return sqrt(squares);
}

// A loss is one number, a sum of as many roundings as there are tokens, and the plain computation's error in
// it near zero by chance every now and then: its root mean square is the error where that is larger. Cuts of
// FP8 sums all shrink the logits, so what they
// do is no such sum and counts whole.  library: the error of the bf16 build; truth: the loss
static double plain_loss_error(const Head *h, double library, double truth)
{
    double cut, stored, spread = loss_spread(h) / truth;
    if (h->mode != HEAD_FP8 || !device_has_fp8() || h->d % 16)
        return fmax(library, spread);
    fp8_losses_with_cuts(h, &cut, &stored);
    return fmax(fabs(stored / truth - 1), hypot(cut / truth - 1, spread));
}

static const HeadSpec *head_spec(const Case *c);
static Head head_of_case(const Case *c)
{
    Head h = {.mode = c->variant & 1 ? HEAD_FP8 : HEAD_BF16,
              .spec = head_spec(c),
              .N = c->z.N,
              .d = c->d,
              .Vp = c->z.Vp};
    for (int i = 0; i < c->count; i++) {
        const char *name = c->buffer[i].name;
        if (!strcmp(name, "x"))
            h.x = c->master[i];
        if (!strcmp(name, "w"))
            h.w = c->master[i];
        if (!strcmp(name, "targets"))
            h.targets = c->master[i];
        if (!strcmp(name, "weight")) {
            h.weight = c->master[i];
            h.num_targets = (int)c->buffer[i].count;
        }
        if (!strcmp(name, "prefix") && c->buffer[i].count)
            h.prefix = c->master[i];
        if (!strcmp(name, "prefix_weight"))
            h.prefix_weight = c->master[i][0];
    }
    return h;
}

// ---- codes of the gradient --------------------------------------------------------------------------------
// The sm90 head rounds the gradient to e5m2 relative to a row and not to a fixed scale, and x for dw by row,
// too (sm90_head_gradient.cuh). So its codes are not those of the CPU builds, and what both roundings leave
// is the plain error: of a code half a step at most, uniform, and a step is at most 1/4 of e5m2 and 1/8 of
// e4m3; twice, for two that are independent. A fixed scale has steps of 2^-16 below its normal numbers.

enum { ESTIMATED = 8 * 192 }; // ESTIMATE_PARTS * PART_COLS of sm90_head_logits.cuh, which is C++
static bool head_has_own_codes(const Head *h)
{
    return h->mode == HEAD_FP8 && device_has_wgmma() && !without_fp8 && h->d % 16 == 0 && h->d <= 768 &&
           h->Vp % 32 == 0 && h->Vp > ESTIMATED;
}

static double square_of(const float *x, int d)
{
    double sum = 0;
    for (int c = 0; c < d; c++)
        sum += (double)x[c] * (double)x[c];
    return sum;
}

// Logits of a row to the gradient of its loss.
static void head_gradient(const Head *h, int row, double *g)
{
    double weight[MAX_TARGETS + 1], sum = 0, all = 0, cap = (double)h->spec->cap;
    int token[MAX_TARGETS + 1], count = loss_terms(h, row, token, weight);
    for (int j = 0; j < h->Vp; j++) {
        g[j] = softcapped(h, g[j]);
        sum += exp(g[j]);
    }
    for (int k = 0; k < count; k++)
        all += token[k] >= 0 ? weight[k] : 0;
    for (int j = 0; j < h->Vp; j++) {
        double wanted = 0, sig = g[j] / cap;
        for (int k = 0; k < count; k++)
            wanted += token[k] == j ? weight[k] : 0;
        g[j] = (all * exp(g[j]) / sum - wanted) * cap / (double)h->spec->slope * sig * (1 - sig);
    }
}

// Root mean square of the errors of dx and of dw, which the roundings of both sides leave.
static void code_errors(const Head *h, double *dx, double *dw)
{
    const double code = 2.0 / (16 * 12), x = 2.0 / (64 * 12);
    double of_dx = 0, of_dw = 0, step = ldexp((double)head_scales(h->spec, h->d).g, -16);
    double *size_w = xcalloc((size_t)h->Vp, sizeof *size_w);
#pragma omp parallel for
    for (int j = 0; j < h->Vp; j++)
        size_w[j] = square_of(h->w + (int64_t)j * h->d, h->d);
#pragma omp parallel for reduction(+ : of_dx, of_dw) schedule(dynamic, 1)
    for (int i = 0; i < h->N; i++) {
        double *g = xcalloc((size_t)h->Vp, sizeof *g), squares = 0;
        for (int j = 0; j < h->Vp; j++) {
            float logit = 0;
#pragma omp simd reduction(+ : logit)
            for (int c = 0; c < h->d; c++)
                logit += h->x[(int64_t)i * h->d + c] * h->w[(int64_t)j * h->d + c];
            g[j] = (double)logit;
        }
        head_gradient(h, i, g);
        for (int j = 0; j < h->Vp; j++) {
            double error = g[j] * g[j] * code + step * step / 12;
            of_dx += error * size_w[j];
            squares += error + g[j] * g[j] * x;
        }
        of_dw += squares * square_of(h->x + (int64_t)i * h->d, h->d);
        free(g);
    }
    free(size_w);
    *dx = sqrt(of_dx / ((double)h->N * h->d));
    *dw = sqrt(of_dw / ((double)h->Vp * h->d));
}

// Sets what roundings leave to the elements of dx and dw.
static void expect_own_codes(Case *c)
{
    Head h = head_of_case(c);
    if (!head_has_own_codes(&h))
        return;
    for (int i = 0; i < c->count; i++) {
        double dx, dw;
        if (strcmp(c->buffer[i].name, "dx"))
            continue;
        code_errors(&h, &dx, &dw);
        c->buffer[i].rounding = dx;
        c->buffer[i + 1].rounding = fmax(c->buffer[i + 1].rounding, dw);
    }
}
