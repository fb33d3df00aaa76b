// Every op of llmc/ops/ops.h once more, in double precision and in the plainest form, written from the
// formulas and not from the backend; and what the tests of ops share: memory, random values, error measures,
// central differences. References take floatX inputs converted to double, exactly as they are stored.
#pragma once
#include "dev/test/head_specs.h"
#include "llmc/ops/ops.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#pragma GCC diagnostic ignored "-Wunused-function" // each test uses its part

// ---- memory, random values --------------------------------------------------------------------------------

static char pool[96 << 20] __attribute__((aligned(64)));
static size_t pool_used;

// Zeroed memory until the next pool_reset().
static void *take(size_t count, size_t size)
{
    void *p = pool + pool_used;
    pool_used += (count * size + 63) / 64 * 64;
    if (pool_used > sizeof pool) {
        printf("Bail out! the test wants more memory than its pool has\n");
        exit(1);
    }
    return memset(p, 0, count * size);
}

static void pool_reset(void) { pool_used = 0; }

static uint64_t random_state = 0x9e3779b97f4a7c15u;
static double uniform(double low, double high)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return low + (high - low) * (double)(random_state >> 11) * 0x1p-53;
}

// A floatX tensor and the same values in double.
typedef struct {
    floatX *x;
    double *d;
    int n;
} Tensor;

static Tensor random_tensor(int n, double size)
{
    Tensor t = {take((size_t)n, sizeof(floatX)), take((size_t)n, sizeof(double)), n};
    for (int i = 0; i < n; i++)
        t.d[i] = x_to_float(t.x[i] = float_to_x((float)uniform(-size, size)));
    return t;
}

typedef struct {
    float *x;
    double *d;
    int n;
} Tensor32;

static Tensor32 random_tensor32(int n, double size)
{
    Tensor32 t = {take((size_t)n, sizeof(float)), take((size_t)n, sizeof(double)), n};
    for (int i = 0; i < n; i++)
        t.d[i] = t.x[i] = (float)uniform(-size, size);
    return t;
}

static double *doubles(int n) { return take((size_t)n, sizeof(double)); }
static floatX *halves(int n) { return take((size_t)n, sizeof(floatX)); }
static float *floats(int n) { return take((size_t)n, sizeof(float)); }

static double *of_x(const floatX *x, int n)
{
    double *d = doubles(n);
    for (int i = 0; i < n; i++)
        d[i] = x_to_float(x[i]);
    return d;
}

static double *of_float(const float *x, int n)
{
    double *d = doubles(n);
    for (int i = 0; i < n; i++)
        d[i] = x[i];
    return d;
}

static int32_t *random_tokens(int n, int vocab)
{
    int32_t *t = take((size_t)n, sizeof *t);
    for (int i = 0; i < n; i++)
        t[i] = (int32_t)uniform(0, vocab);
    return t;
}

// ---- errors -----------------------------------------------------------------------------------------------

// |a - b| / |b| in the Euclidean norm; |a| when b is zero. NaN anywhere gives NaN.
static double relative_error(const double *a, const double *b, int n)
{
    double diff = 0, norm = 0;
    for (int i = 0; i < n; i++) {
        diff += (a[i] - b[i]) * (a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

// Largest error of an element, in units of what it may be: half a unit in the last place of bf16 (8
// significant bits: at most 2^-8 of the value), plus 1e-5 of the tensor's root mean square for sums in fp32
// that cancel. At most 1 is a pass.
static double worst_rounding(const double *a, const double *exact, int n)
{
    double square = 0, worst = 0;
    for (int i = 0; i < n; i++)
        square += exact[i] * exact[i];
    double floor = 1e-5 * sqrt(square / n) + 1e-37;
    for (int i = 0; i < n; i++) {
        double error = fabs(a[i] - exact[i]) / (0x1p-8 * fabs(exact[i]) + floor);
        if (!(error <= worst))
            worst = error; // NaN sticks
        if (isnan(worst))
            return worst;
    }
    return worst;
}

// d loss / d value[i] by central differences. The step balances truncation (h^2) against rounding (1e-16 /
// h).
static double *central_differences(double *value, int n, double (*loss)(void))
{
    double *grad = doubles(n);
    for (int i = 0; i < n; i++) {
        double kept = value[i], h = 1e-5;
        value[i] = kept + h;
        double up = loss();
        value[i] = kept - h;
        double down = loss();
        value[i] = kept;
        grad[i] = (up - down) / (2 * h);
    }
    return grad;
}

static double inner(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

// ---- references -------------------------------------------------------------------------------------------

static double ref_sigmoid(double x) { return 1 / (1 + exp(-x)); }

// h = rms(x) of one row; returns rstd
static double ref_rms(double *h, const double *x, int d)
{
    double rstd = 1 / sqrt(inner(x, x, d) / d + 0x1p-23);
    for (int i = 0; i < d; i++)
        h[i] = x[i] * rstd;
    return rstd;
}

static void ref_rms_backward(double *dx, const double *dh, const double *h, double rstd, int d)
{
    double mean = inner(dh, h, d) / d;
    for (int i = 0; i < d; i++)
        dx[i] = rstd * (dh[i] - h[i] * mean);
}

static int gate_inputs = 12; // channels that a gate reads; cases set it

typedef struct {
    const int32_t *tokens;      // (N)
    const double *embed, *gate; // (any, d), (gate_inputs)
    double lambda;
    int N, d;
} RefEmbed;

static void ref_embed(const RefEmbed *a, double *x0, double *rstd)
{
    const int32_t *tokens = a->tokens;
    const double *embed = a->embed, *gate = a->gate;
    double lambda = a->lambda, y[512];
    int N = a->N, d = a->d;
    for (int t = 0; t < N; t++) {
        const double *own = embed + (size_t)tokens[t] * d;
        double smear = t ? lambda * ref_sigmoid(inner(own, gate, gate_inputs)) : 0;
        for (int i = 0; i < d; i++)
            y[i] = own[i] + (t ? smear * embed[(size_t)tokens[t - 1] * d + i] : 0);
        rstd[t] = ref_rms(x0 + t * d, y, d);
    }
}

// de: gradient of the gathered rows, from the stored x0 and rstd
static void ref_embed_backward(const RefEmbed *a, double *de, double *dgate, double *dlambda,
                               const double *dx0, const double *x0, const double *rstd)
{
    const int32_t *tokens = a->tokens;
    const double *embed = a->embed, *gate = a->gate;
    double lambda = a->lambda, dy[512];
    int N = a->N, d = a->d;
    memset(de, 0, sizeof(double) * (size_t)(N * d));
    for (int t = 0; t < N; t++) {
        ref_rms_backward(dy, dx0 + t * d, x0 + t * d, rstd[t], d);
        for (int i = 0; i < d; i++)
            de[t * d + i] += dy[i];
        if (t == 0)
            continue;
        const double *own = embed + (size_t)tokens[t] * d, *previous = embed + (size_t)tokens[t - 1] * d;
        double sig = ref_sigmoid(inner(own, gate, gate_inputs)), p = inner(dy, previous, d),
               du = lambda * p * sig * (1 - sig);
        *dlambda += p * sig;
        for (int c = 0; c < gate_inputs; c++) {
            dgate[c] += du * own[c];
            de[t * d + c] += du * gate[c];
        }
        for (int i = 0; i < d; i++)
            de[(t - 1) * d + i] += lambda * sig * dy[i];
    }
}

// in: x, x0 and skip, or NULL for it
static void ref_mix(double *x_out, double *h, double *rstd, const double *const in[3], const double *coef,
                    int N, int d)
{
    for (int i = 0; i < N * d; i++)
        x_out[i] = coef[0] * in[0][i] + coef[1] * in[1][i] + (in[2] ? coef[2] * in[2][i] : 0);
    for (int t = 0; t < N; t++)
        rstd[t] = ref_rms(h + t * d, x_out + t * d, d);
}

// c (m, n) = op(a) (m, k) op(b) (k, n)
static void ref_product(double *c, const double *a, const double *b, bool ta, bool tb, int m, int n, int k)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int p = 0; p < k; p++)
                sum += (ta ? a[p * m + i] : a[i * k + p]) * (tb ? b[j * k + p] : b[p * n + j]);
            c[i * n + j] = sum;
        }
}

// One head; table entries of its position.
static void ref_rotate(double *y, const double *x, const double *cos, const double *sin, int e)
{
    memcpy(y, x, sizeof(double) * (size_t)e);
    for (int j = 0; j < e / 4; j++) {
        y[j] = x[j] * cos[j] + x[j + e / 2] * sin[j];
        y[j + e / 2] = x[j + e / 2] * cos[j] - x[j] * sin[j];
    }
}

typedef struct {
    const double *cos, *sin; // (N, e/4)
    int N, H, e;
} RefRope;

// y = rope(rms(x)), per head
static void ref_norm_rope(const RefRope *a, double *y, double *rstd, const double *x)
{
    int N = a->N, H = a->H, e = a->e;
    double h[512];
    for (int t = 0; t < N; t++)
        for (int head = 0; head < H; head++) {
            int at = (t * H + head) * e;
            rstd[t * H + head] = ref_rms(h, x + at, e);
            ref_rotate(y + at, h, a->cos + t * (e / 4), a->sin + t * (e / 4), e);
        }
}

// From the stored y and rstd: rotates back, whatever the length of (cos, sin).
static void ref_norm_rope_backward(const RefRope *a, double *dx, const double *dy, const double *y,
                                   const double *rstd)
{
    int N = a->N, H = a->H, e = a->e;
    double h[512], g[512];
    for (int t = 0; t < N; t++)
        for (int head = 0; head < H; head++) {
            int at = (t * H + head) * e;
            memcpy(h, y + at, sizeof(double) * (size_t)e);
            memcpy(g, dy + at, sizeof(double) * (size_t)e);
            for (int j = 0; j < e / 4; j++) {
                double c = a->cos[t * (e / 4) + j], s = a->sin[t * (e / 4) + j], length = c * c + s * s;
                h[j] = (c * y[at + j] - s * y[at + j + e / 2]) / length;
                h[j + e / 2] = (s * y[at + j] + c * y[at + j + e / 2]) / length;
                g[j] = c * dy[at + j] - s * dy[at + j + e / 2];
                g[j + e / 2] = s * dy[at + j] + c * dy[at + j + e / 2];
            }
            ref_rms_backward(dx + at, g, h, rstd[t * H + head], e);
        }
}

typedef struct {
    const int32_t *cu; // boundaries
    int documents, N, H, e, window;
    double scale;
    int qk; // width of a head of q and k
} Attention;

static bool ref_sees(const Attention *a, int i, int j)
{
    int doc = 0;
    while (a->cu[doc + 1] <= i)
        doc++;
    return j <= i && j >= a->cu[doc] && i - j <= a->window;
}

static double ref_score(const Attention *a, const double *q, const double *k, int i, int j, int head)
{
    int qk = a->qk, wide = a->H * qk, at = head * qk;
    return a->scale * inner(q + i * wide + at, k + j * wide + at, qk);
}

// y (N, d), lse (N, H); weights p (N, N) of each head in turn go to `p` when given: p[(head * N + i) * N + j]
static void ref_attention(const Attention *a, double *y, double *lse, double *p, const double *q,
                          const double *k, const double *v)
{
    int d = a->H * a->e, N = a->N;
    double *w = malloc(sizeof *w * (size_t)N);
    for (int i = 0; i < N; i++)
        for (int head = 0; head < a->H; head++) {
            double sum = 0;
            for (int j = 0; j <= i; j++) {
                w[j] = ref_sees(a, i, j) ? exp(ref_score(a, q, k, i, j, head)) : 0;
                sum += w[j];
            }
            lse[i * a->H + head] = log(sum);
            for (int c = head * a->e; c < (head + 1) * a->e; c++) {
                double value = 0;
                for (int j = 0; j <= i; j++)
                    value += w[j] / sum * v[j * d + c];
                y[i * d + c] = value;
            }
            for (int j = 0; p && j <= i; j++)
                p[((size_t)head * N + i) * N + j] = w[j] / sum;
        }
    free(w);
}

typedef struct {
    double *q, *k, *v;
} RefQkv;

// From the stored y (it enters through dy . y) and lse.
static void ref_attention_backward(const Attention *a, const RefQkv *out, const double *dy, const double *y,
                                   const double *lse, const RefQkv *in)
{
    double *dq = out->q, *dk = out->k, *dv = out->v;
    const double *q = in->q, *k = in->k, *v = in->v;
    int d = a->H * a->e, qk = a->qk, wide = a->H * qk;
    memset(dq, 0, sizeof *dq * (size_t)(a->N * wide));
    memset(dk, 0, sizeof *dk * (size_t)(a->N * wide));
    memset(dv, 0, sizeof *dv * (size_t)(a->N * d));
    for (int i = 0; i < a->N; i++)
        for (int head = 0; head < a->H; head++) {
            int at = i * d + head * a->e, qi = i * wide + head * qk;
            double delta = inner(dy + at, y + at, a->e);
            for (int j = 0; j <= i; j++) {
                if (!ref_sees(a, i, j))
                    continue;
                int vj = j * d + head * a->e, kj = j * wide + head * qk;
                double p = exp(ref_score(a, q, k, i, j, head) - lse[i * a->H + head]);
                double ds = a->scale * p * (inner(dy + at, v + vj, a->e) - delta);
                for (int c = 0; c < qk; c++) {
                    dq[qi + c] += ds * k[kj + c];
                    dk[kj + c] += ds * q[qi + c];
                }
                for (int c = 0; c < a->e; c++)
                    dv[vj + c] += p * dy[at + c];
            }
        }
}

static void ref_gate(double *yg, const double *y, const double *h, const double *gate_w, int N, int H, int e)
{
    for (int t = 0; t < N; t++)
        for (int i = 0; i < H * e; i++)
            yg[t * H * e + i] = y[t * H * e + i] *
                                ref_sigmoid(inner(h + t * H * e, gate_w + i / e * gate_inputs, gate_inputs));
}

static double ref_softcap(const HeadSpec *spec, double logit)
{
    return (double)spec->cap * ref_sigmoid((logit + (double)spec->shift) / (double)spec->slope);
}

// Loss of one row of logits, and the gradient of the logits when wanted; its targets are the first `count` of
// `targets`.
static double ref_softcap_loss(const HeadSpec *spec, const double *logits, const int32_t *targets,
                               const float *weight, int count, int Vp, double *dlogits)
{
    double sum = 0, weights = 0, loss = 0;
    for (int j = 0; j < Vp; j++)
        sum += exp(ref_softcap(spec, logits[j]));
    for (int k = 0; k < count; k++) {
        weights += (double)weight[k];
        loss += (double)weight[k] * (log(sum) - ref_softcap(spec, logits[targets[k]]));
    }
    for (int j = 0; j < Vp && dlogits; j++) {
        double z = ref_softcap(spec, logits[j]), sig = z / (double)spec->cap, g = weights * exp(z) / sum;
        for (int k = 0; k < count; k++)
            g -= j == targets[k] ? (double)weight[k] : 0;
        dlogits[j] = g * (double)spec->cap / (double)spec->slope * sig * (1 - sig);
    }
    return loss;
}

// Nearest value of an 8-bit format, ties to the even code, by trying all codes; saturating.
static double ref_fp8(double x, int fraction, int bias, int largest_code)
{
    double best = 0, best_distance = INFINITY;
    for (int code = 0; code <= largest_code; code++) {
        int exponent = code >> fraction, bits = code & ((1 << fraction) - 1);
        double value =
            exponent ? ldexp(1 + ldexp(bits, -fraction), exponent - bias) : ldexp(bits, 1 - bias - fraction);
        double distance = fabs(fabs(x) - value);
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
            best = value;
            best_distance = distance;
        }
    }
    return copysign(best, x);
}

static double ref_e4m3(double x) { return ref_fp8(x, 3, 7, 0x7e); }
static double ref_e5m2(double x) { return ref_fp8(x, 2, 15, 0x7b); }
