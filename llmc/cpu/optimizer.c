// Adam, and the parts of NorMuon around the orthogonalisation: element by element, one pass over memory.
#include "llmc/cpu/cpu.h"
#include <math.h>
#include <string.h>

enum { SPAN = 4096 }; // elements of one piece of work

static int64_t spans(int64_t n) { return ceil_div(n, SPAN); }

// ---- Adam -------------------------------------------------------------------------------------------------

// What is added to a parameter; *m and *v become the new moments.
static inline float adam_step(float *m, float *v, float g, float rate, const AdamRule *r)
{
    *m = r->beta1 * *m + r->rest1 * g;
    *v = r->beta2 * *v + r->rest2 * g * g;
    return -rate * (*m / (sqrtf(*v) + r->eps));
}

void adam_update(Stream s, floatX *p, floatX *m, floatX *v, float *grad, const StepParams *step,
                 AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update, n);
    float scale = step->grad_scale, rate = step->rule[rule.rule].rate;
#pragma omp parallel for schedule(static) if (n > SPAN)
    for (int64_t span = 0; span < spans(n); span++) {
        int64_t end = min_i64(n, (span + 1) * SPAN);
#pragma omp simd
        for (int64_t i = span * SPAN; i < end; i++) {
            float mi = x_to_float(m[i]), vi = x_to_float(v[i]);
            float change = adam_step(&mi, &vi, grad[i] * scale, rate, &rule);
            p[i] = float_to_x(x_to_float(p[i]) + change);
            m[i] = float_to_x(mi);
            v[i] = float_to_x(vi);
            grad[i] = 0;
        }
    }
}

void adam_update_fp32(Stream s, float *p, float *m, float *v, float *grad, const StepParams *step,
                      AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update_fp32, n);
    float scale = step->grad_scale, rate = step->rule[rule.rule].rate;
#pragma omp parallel for schedule(static) if (n > SPAN)
    for (int64_t span = 0; span < spans(n); span++) {
        int64_t end = min_i64(n, (span + 1) * SPAN);
#pragma omp simd
        for (int64_t i = span * SPAN; i < end; i++) {
            float mi = m[i], vi = v[i];
            p[i] += adam_step(&mi, &vi, grad[i] * scale, rate, &rule);
            m[i] = mi;
            v[i] = vi;
            grad[i] = 0;
        }
    }
}

void adam_update_decay(Stream s, floatX *p, float *m, float *v, float *grad, const StepParams *step,
                       AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update_decay, n);
    float scale = step->grad_scale, rate = step->rule[rule.rule].rate, decay = step->rule[rule.rule].decay;
#pragma omp parallel for schedule(static) if (n > SPAN)
    for (int64_t span = 0; span < spans(n); span++) {
        int64_t end = min_i64(n, (span + 1) * SPAN);
#pragma omp simd
        for (int64_t i = span * SPAN; i < end; i++) {
            float mi = m[i], vi = v[i], pi = x_to_float(p[i]);
            float change = adam_step(&mi, &vi, grad[i] * scale, rate, &rule);
            change -= change * pi < 0 ? decay * pi : 0;
            p[i] = float_to_x(pi + change);
            m[i] = mi;
            v[i] = vi;
            grad[i] = 0;
        }
    }
}

// ---- NorMuon ----------------------------------------------------------------------------------------------

void normuon_momentum(Stream s, float *u, float *momentum, const StepParams *step, int64_t n)
{
    OP_SCOPE(normuon_momentum, n);
    float scale = step->grad_scale, mu = step->muon_momentum;
#pragma omp parallel for schedule(static) if (n > SPAN)
    for (int64_t span = 0; span < spans(n); span++) {
        int64_t end = min_i64(n, (span + 1) * SPAN);
#pragma omp simd
        for (int64_t i = span * SPAN; i < end; i++) {
            float g = u[i] * scale, m = momentum[i];
            m += (1 - mu) * (g - m);
            momentum[i] = m;
            u[i] = g + mu * (m - g);
        }
    }
}

// Mean of squares of row r, or of column c.
static double row_mean(const ns_real *o, int r, int cols)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < cols; c++)
        sum += (double)o[(int64_t)r * cols + c] * (double)o[(int64_t)r * cols + c];
    return sum / cols;
}

enum { STRIPE = 64 }; // columns summed together, so that memory is read in sequence

static void column_means(double *restrict mean, const ns_real *o, int rows, int cols, int first, int count)
{
    for (int c = 0; c < count; c++)
        mean[c] = 0;
    for (int r = 0; r < rows; r++)
#pragma omp simd
        for (int c = 0; c < count; c++) {
            double x = o[(int64_t)r * cols + first + c];
            mean[c] += x * x;
        }
    for (int c = 0; c < count; c++)
        mean[c] /= rows;
}

// S += (1 - beta2)(c - S), and the squares of the norms: of O, and of O' = O / sqrt(max(S, 1e-10)), where
// every element of a row or column is divided by the same.
typedef struct {
    double before, after;
} Norms;

static void update_second(float *second, double mean, int elements, float beta2, Norms *norms)
{
    float moved = *second + (1 - beta2) * ((float)mean - *second);
    *second = moved;
    norms->before += mean * elements;
    norms->after += mean * elements / fmax(moved, 1e-10);
}

static Norms second_moments(const NormuonUpdate *a, float *second, const ns_real *o)
{
    Norms norms = {0, 0};
    if (!a->per_column) {
        for (int r = 0; r < a->rows; r++)
            update_second(second + r, row_mean(o, r, a->cols), a->cols, a->beta2, &norms);
        return norms;
    }
    double mean[STRIPE];
    for (int first = 0; first < a->cols; first += STRIPE) {
        int count = (int)min_i64(STRIPE, a->cols - first);
        column_means(mean, o, a->rows, a->cols, first, count);
        for (int c = 0; c < count; c++)
            update_second(second + first + c, mean[c], a->rows, a->beta2, &norms);
    }
    return norms;
}

// One row of the weight, from element `at` on; `second` (cols) or one value: the square of what O is divided
// by.
static void update_row(const NormuonUpdate *a, RuleStep step, int64_t at, const ns_real *restrict o,
                       const float *restrict second, float gain)
{
    float decay = step.decay, rate = step.rate;
    float *w = a->w ? a->w + at : NULL;
    floatX *wx = a->wx + at;
#pragma omp simd
    for (int c = 0; c < a->cols; c++) {
        float s = second[a->per_column ? c : 0];
        float change = (float)o[c] / sqrtf(s > 1e-10f ? s : 1e-10f) * gain;
        float old = w ? w[c] : x_to_float(wx[c]);
        change += change * old >= 0 ? decay * old : 0;
        float updated = old - rate * change;
        if (w)
            w[c] = updated;
        wx[c] = a->truncate ? truncate_to_x(updated) : float_to_x(updated);
    }
    if (a->grad)
        memset(a->grad + at, 0, sizeof(float) * (size_t)a->cols);
}

static void update_matrix(const NormuonUpdate *a, const StepParams *step, int b)
{
    const ns_real *o = (const ns_real *)a->o + (int64_t)b * a->rows * a->cols;
    float *second = a->second + (int64_t)b * max_i64(a->rows, a->cols);
    Norms norms = second_moments(a, second, o);
    float gain = (float)(sqrt(norms.before) / fmax(sqrt(norms.after), 1e-10));
    for (int r = 0; r < a->rows; r++)
        update_row(a, step->rule[a->rule[b]], b * a->stride + (int64_t)r * a->cols, o + (int64_t)r * a->cols,
                   a->per_column ? second : second + r, gain);
}

void normuon_update(Stream s, const NormuonUpdate *a, const StepParams *step)
{
    OP_SCOPE(normuon_update, a);
    assert(a->w || !a->truncate);
#pragma omp parallel for schedule(dynamic, 1) if ((int64_t)a->batch * a->rows * a->cols > SERIAL_ELEMENTS)
    for (int b = 0; b < a->batch; b++)
        update_matrix(a, step, b);
}

void cast_weights(Stream s, floatX *wx, const float *w, int64_t n, bool truncate)
{
    OP_SCOPE(cast_weights, n);
#pragma omp parallel for schedule(static) if (n > 4 * SPAN)
    for (int64_t span = 0; span < spans(n); span++) {
        int64_t begin = span * SPAN, end = min_i64(n, begin + SPAN);
        if (!truncate)
            store_row(wx + begin, w + begin, end - begin);
        for (int64_t i = begin; truncate && i < end; i++)
            wx[i] = truncate_to_x(w[i]);
    }
}
