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

// Terms of a row's loss: tokens and their weights; returns their number. A row without a target has none.
static int loss_terms(const Head *h, int row, int token[MAX_TARGETS + 1], double weight[MAX_TARGETS + 1])
{
    int count = 0;
    for (int k = 0; k < h->num_targets && row + k < h->N; k++) {
        if (h->targets[row + k] < 0)
            continue;
        token[count] = (int)h->targets[row + k];
        weight[count++] = (double)h->weight[k];
    }
    if (h->prefix && h->prefix[row] >= 0) {
        token[count] = (int)h->prefix[row];
        weight[count++] = (double)h->prefix_weight;
    }
    return count;
}

static double square_of(const float *x, int d)
{
    double sum = 0;
    for (int c = 0; c < d; c++)
        sum += (double)x[c] * (double)x[c];
    return sum;
}

// Whether the products' FP8 codes go through tensor cores, which cut sums.
static bool cuts_sums(const Head *h) { return h->mode == HEAD_FP8 && device_has_fp8() && h->d % 16 == 0; }

// What sums in tensor cores change in the plain FP8 computation.
typedef struct {
    double cut, stored; // the loss of sums that are cut; and of those stored in bf16, too
    double dx, dw;      // root mean square of what targets' codes leave that may be rounded either way
} CutErrors;

// A row's logits: exact[], and cut[] as tensor cores make them.  x, w  FP8 values, rows of `pitch`
static void row_logits(const Head *h, const float *x, const float *w, int pitch, double *exact, double *cut)
{
    HeadScales scale = head_scales(h->spec, h->d);
    double unit = (double)scale.x * (double)scale.w;
    for (int j = 0; j < h->Vp; j++) {
        const float *column = w + (int64_t)j * pitch;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < pitch; k++)
            sum += x[k] * column[k];
        exact[j] = unit * (double)sum;
        cut[j] = unit * (double)fp8_sum(x, column, pitch);
    }
}

// The gradient of a logit z of which softmax makes p, with the weights of a row's terms, all and this
// token's.
static double logit_gradient(const Head *h, double z, double p, double all, double wanted)
{
    double cap = (double)h->spec->cap, sig = z / cap;
    return (all * p - wanted) * cap / (double)h->spec->slope * sig * (1 - sig);
}

static double e5m2_of(double g, double scale)
{
    return (double)e5m2_to_float(float_to_e5m2((float)(g / scale))) * scale;
}

// How far apart the codes of a gradient may be that two computations of its row give.  g[]: exact, cut and
// stored. The error of either computation is at most twice what those change, and some roundings of fp32.
static double step_between(const double g[3], double scale)
{
    double error = 2 * fmax(fabs(g[1] - g[0]), fabs(g[2] - g[0])) + 1e-6 * fabs(g[0]);
    return e5m2_of(g[0] + error, scale) - e5m2_of(g[0] - error, scale);
}

// Of one row: adds to the losses, and to squares of the errors of dx and dw. z[]: capped logits, exact,
// cut, and stored in bf16; sum[]: of their e^z.
static void add_cut_errors(const Head *h, int row, double *const z[3], const double sum[3], CutErrors *to)
{
    double weight[MAX_TARGETS + 1], all = 0, scale = (double)head_scales(h->spec, h->d).g;
    int token[MAX_TARGETS + 1], count = loss_terms(h, row, token, weight);
    for (int k = 0; k < count; k++)
        all += weight[k];
    to->cut += all * log(sum[1]);
    to->stored += all * log(sum[2]);
    for (int k = 0; k < count; k++) {
        int t = token[k];
        double wanted = 0, g[3];
        bool first = true;
        for (int i = 0; i < count; i++) {
            wanted += token[i] == t ? weight[i] : 0;
            first &= i >= k || token[i] != t;
        }
        for (int i = 0; i < 3; i++)
            g[i] = logit_gradient(h, z[i][t], exp(z[i][t]) / sum[i], all, wanted);
        double step = first ? step_between(g, scale) : 0;
        to->cut -= weight[k] * z[1][t];
        to->stored -= weight[k] * z[2][t];
        to->dx += step * step * square_of(h->w + (int64_t)t * h->d, h->d);
        to->dw += step * step * square_of(h->x + (int64_t)row * h->d, h->d);
    }
}

static CutErrors cut_errors(const Head *h)
{
    int pitch = (int)round_up(h->d, 32);
    HeadScales scale = head_scales(h->spec, h->d);
    float *x = fp8_rows(h->x, h->N, h->d, scale.x), *w = fp8_rows(h->w, h->Vp, h->d, scale.w);
    double cut = 0, stored = 0, dx = 0, dw = 0;
#pragma omp parallel for reduction(+ : cut, stored, dx, dw) schedule(dynamic, 1)
    for (int i = 0; i < h->N; i++) {
        double *z[3], sum[3] = {0};
        CutErrors row = {0};
        for (int k = 0; k < 3; k++)
            z[k] = xcalloc((size_t)h->Vp, sizeof *z[k]);
        row_logits(h, x + (int64_t)i * pitch, w, pitch, z[0], z[1]);
        for (int j = 0; j < h->Vp; j++) {
            z[2][j] = to_bf16_value(z[1][j]);
            for (int k = 0; k < 3; k++)
                sum[k] += exp(z[k][j] = softcapped(h, z[k][j]));
        }
        add_cut_errors(h, i, z, sum, &row);
        cut += row.cut;
        stored += row.stored;
        dx += row.dx;
        dw += row.dw;
        for (int k = 0; k < 3; k++)
            free(z[k]);
    }
    free(x);
    free(w);
    return (CutErrors){cut, stored, sqrt(dx / ((double)h->N * h->d)), sqrt(dw / ((double)h->Vp * h->d))};
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
// do is no such sum and counts whole.  e: used where cuts_sums(h);
// library: the error of the bf16 build; truth: the loss
static double plain_loss_error(const Head *h, const CutErrors *e, double library, double truth)
{
    double spread = loss_spread(h) / truth;
    if (!cuts_sums(h))
        return fmax(library, spread);
    return fmax(fabs(e->stored / truth - 1), hypot(e->cut / truth - 1, spread));
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
    return h->mode == HEAD_FP8 && device_has_wgmma() && h->d % 16 == 0 && h->d <= 768 && h->Vp % 32 == 0 &&
           h->Vp > ESTIMATED;
}

// Logits of a row to the gradient of its loss.
static void head_gradient(const Head *h, int row, double *g)
{
    double weight[MAX_TARGETS + 1], sum = 0, all = 0;
    int token[MAX_TARGETS + 1], count = loss_terms(h, row, token, weight);
    for (int j = 0; j < h->Vp; j++)
        sum += exp(g[j] = softcapped(h, g[j]));
    for (int k = 0; k < count; k++)
        all += weight[k];
    for (int j = 0; j < h->Vp; j++) {
        double wanted = 0;
        for (int k = 0; k < count; k++)
            wanted += token[k] == j ? weight[k] : 0;
        g[j] = logit_gradient(h, g[j], exp(g[j]) / sum, all, wanted);
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

// What roundings leave to an element of dx and of dw, root mean square, where it is no sum of many.
static void head_rounding(const Head *h, const CutErrors *e, double *dx, double *dw)
{
    *dx = e->dx;
    *dw = e->dw;
    if (head_has_own_codes(h))
        code_errors(h, dx, dw);
}

// Sets it for the buffers of a case.
static CutErrors expect_rounding(Case *c)
{
    Head h = head_of_case(c);
    CutErrors e = {0};
    double dx, dw;
    if (cuts_sums(&h))
        e = cut_errors(&h);
    head_rounding(&h, &e, &dx, &dw);
    for (int i = 0; i < c->count; i++) {
        double rounding = !strcmp(c->buffer[i].name, "dx") ? dx : !strcmp(c->buffer[i].name, "dw") ? dw : 0;
        c->buffer[i].rounding = fmax(c->buffer[i].rounding, rounding);
    }
    return e;
}
