// Attention and what stands around it, fp32 build: forward against the double reference, backward against
// central differences of that reference, and at sizes that cross the backend's blocks against the analytic
// double backward (itself checked here). Limit: sums of at most some hundred fp32 products, 2^-24 each with
// random signs, through two products and a softmax: 1e-6 or so; 1e-5 in norm leaves an order of magnitude and
// is far below any wrong formula.
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"

#define LIMIT 1e-5

// ---- attention --------------------------------------------------------------------------------------------

static struct {
    Attention a;
    Tensor q, k, v, h, w, dyg;
    double *y, *yg, *lse;
} at;

static double attention_loss(void)
{
    ref_attention(&at.a, at.y, at.lse, NULL, at.q.d, at.k.d, at.v.d);
    ref_gate(at.yg, at.y, at.h.d, at.w.d, at.a.N, at.a.H, at.a.e);
    return inner(at.yg, at.dyg.d, at.dyg.n);
}

static double gate_loss(void) // with attention's output as it is
{
    ref_gate(at.yg, at.y, at.h.d, at.w.d, at.a.N, at.a.H, at.a.e);
    return inner(at.yg, at.dyg.d, at.dyg.n);
}

typedef struct {
    const char *name;
    int N, H, e, window, documents;
    int32_t cu[8];
    bool differences; // small enough for central differences
} Case;

static void check(const Case *c, const char *what, const floatX *got, const double *exact, int n)
{
    char text[128];
    snprintf(text, sizeof text, "%s: %s", c->name, what);
    ok_at_most(relative_error(of_x(got, n), exact, n), LIMIT, text);
}

// The gate is cheap: always by central differences.
static void check_gate(const float *dgate, const float *dgate_w)
{
    int N = at.a.N, H = at.a.H, d = H * at.a.e;
    ok_at_most(relative_error(of_float(dgate_w, H * 12), central_differences(at.w.d, H * 12, gate_loss),
                              H * 12),
               LIMIT, "   dgate_w");
    double *dh = doubles(N * d);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < H * 12; i++)
            dh[t * d + i % 12] += dgate[t * H + i / 12] * at.w.d[i];
    if (N * d < 2000)
        ok_at_most(relative_error(dh, central_differences(at.h.d, N * d, gate_loss), N * d), LIMIT,
                   "   dh through dgate");
}

static void make_attention(const Case *c, float scale)
{
    int n = c->N * c->H * c->e;
    pool_reset();
    at.a = (Attention){c->cu, c->documents, c->N, c->H, c->e, c->window, scale};
    at.q = random_tensor(n, 1.5);
    at.k = random_tensor(n, 1.5);
    at.v = random_tensor(n, 1);
    at.dyg = random_tensor(n, 1);
    at.h = random_tensor(n, 1.7);
    at.w = random_tensor(c->H * 12, 1);
    at.y = doubles(n);
    at.yg = doubles(n);
    at.lse = doubles(c->N * c->H);
}

static void attention_case(const Case *c)
{
    int n = c->N * c->H * c->e;
    float scale = 0.37f;
    make_attention(c, scale);
    int32_t *table = take((size_t)attention_table_ints(c->N, 0), sizeof *table);
    int slots = attention_table_build(table, c->cu, c->documents, c->N, 0);
    floatX *yg = halves(n), *dq = halves(n), *dk = halves(n), *dv = halves(n);
    float *lse = floats(c->N * c->H), *dgate = floats(c->N * c->H), *dgate_w = floats(c->H * 12);
    attention_forward(NULL, yg, lse, at.q.x, at.k.x, at.v.x, at.h.x, at.w.x, table, slots, scale, c->window,
                      c->N, c->H, c->e);
    attention_loss();
    check(c, "yg", yg, at.yg, n);
    ok_at_most(relative_error(of_float(lse, c->N * c->H), at.lse, c->N * c->H), LIMIT, "   lse");
    attention_backward(NULL,
                       &(AttentionBackward){dq, dk, dv, dgate, dgate_w, at.dyg.x, yg, lse, at.q.x, at.k.x,
                                            at.v.x, at.h.x, at.w.x, NULL},
                       table, slots, scale, c->window, c->N, c->H, c->e);
    double *rq = doubles(n), *rk = doubles(n), *rv = doubles(n), *dy = doubles(n);
    ref_gate(dy, at.dyg.d, at.h.d, at.w.d, c->N, c->H, c->e); // the gate's backward to y is the gate itself
    ref_attention_backward(&at.a, rq, rk, rv, dy, at.y, at.lse, at.q.d, at.k.d, at.v.d);
    check_gate(dgate, dgate_w);
    if (c->differences) { // the analytic reference must earn its name
        double *nq = central_differences(at.q.d, n, attention_loss),
               *nk = central_differences(at.k.d, n, attention_loss);
        double *nv = central_differences(at.v.d, n, attention_loss);
        ok_at_most(relative_error(rq, nq, n) + relative_error(rk, nk, n) + relative_error(rv, nv, n), 1e-7,
                   "   analytic reference");
        rq = nq;
        rk = nk;
        rv = nv;
    }
    check(c, "dq", dq, rq, n);
    check(c, "dk", dk, rk, n);
    check(c, "dv", dv, rv, n);
}

// ---- norm, rope, values -----------------------------------------------------------------------------------

static struct {
    int N, H, e, vocab;
    int32_t *tokens;
    Tensor q, k, v, table, dq, dk, dv;
    Tensor32 lambda;
    double *cos, *sin, *yq, *yk, *rstd;
} qkv;

static double qkv_loss(void)
{
    int d = qkv.H * qkv.e;
    ref_norm_rope(qkv.yq, qkv.rstd, qkv.q.d, qkv.cos, qkv.sin, qkv.N, qkv.H, qkv.e);
    ref_norm_rope(qkv.yk, qkv.rstd, qkv.k.d, qkv.cos, qkv.sin, qkv.N, qkv.H, qkv.e);
    double sum = inner(qkv.yq, qkv.dq.d, qkv.dq.n) + inner(qkv.yk, qkv.dk.d, qkv.dk.n);
    for (int i = 0; i < qkv.N * d; i++)
        sum +=
            qkv.dv.d[i] * (qkv.lambda.d[0] * qkv.v.d[i] +
                           (qkv.table.n ? qkv.lambda.d[1] * qkv.table.d[qkv.tokens[i / d] * d + i % d] : 0));
    return sum;
}

// The part of dqkv that belongs to one of q, k, v.
static double *third(const floatX *dqkv, int which, int N, int d)
{
    double *out = doubles(N * d);
    for (int i = 0; i < N * d; i++)
        out[i] = x_to_float(dqkv[i / d * 3 * d + which * d + i % d]);
    return out;
}

static void qkv_case(int N, int H, int e, bool values)
{
    pool_reset();
    int d = H * e, n = N * d, vocab = 5;
    qkv.N = N;
    qkv.H = H;
    qkv.e = e;
    qkv.tokens = random_tokens(N, vocab);
    qkv.q = random_tensor(n, 2);
    qkv.k = random_tensor(n, 0.01);
    qkv.v = random_tensor(n, 1);
    qkv.dq = random_tensor(n, 1);
    qkv.dk = random_tensor(n, 1);
    qkv.dv = random_tensor(n, 1);
    qkv.table = random_tensor(values ? vocab * d : 0, 1);
    qkv.lambda = random_tensor32(2, 1);
    qkv.yq = doubles(n);
    qkv.yk = doubles(n);
    qkv.rstd = doubles(N * H);
    // Tables coarser than fp32, so that cos^2 + sin^2 differs from 1 as it does in bf16.
    Tensor cos_table = random_tensor(N * e / 4, 1), sin_table = random_tensor(N * e / 4, 1);
    for (int i = 0; i < N * e / 4; i++) {
        cos_table.d[i] =
            x_to_float(cos_table.x[i] = float_to_x(bf16_to_float(float_to_bf16(cosf((float)i)))));
        sin_table.d[i] =
            x_to_float(sin_table.x[i] = float_to_x(bf16_to_float(float_to_bf16(sinf((float)i)))));
    }
    qkv.cos = cos_table.d;
    qkv.sin = sin_table.d;
    floatX *q = halves(n), *k = halves(n), *v = halves(n), *dqkv = halves(3 * n);
    memcpy(q, qkv.q.x, sizeof(floatX) * (size_t)n);
    memcpy(k, qkv.k.x, sizeof(floatX) * (size_t)n);
    float *rstd_q = floats(N * H), *rstd_k = floats(N * H), dlambda[2] = {0.5f, -0.25f};
    const floatX *table = values ? qkv.table.x : NULL;
    qkv_forward(NULL, q, k, v, rstd_q, rstd_k, qkv.v.x, table, qkv.tokens, qkv.lambda.x, cos_table.x,
                sin_table.x, N, H, e);
    qkv_loss();
    double *rv = doubles(n);
    for (int i = 0; i < n; i++)
        rv[i] = qkv.lambda.d[0] * qkv.v.d[i] +
                (values ? qkv.lambda.d[1] * qkv.table.d[qkv.tokens[i / d] * d + i % d] : 0);
    ok_at_most(relative_error(of_x(q, n), qkv.yq, n), LIMIT,
               values ? "qkv with value embedding: q" : "qkv: q");
    ok_at_most(relative_error(of_x(k, n), qkv.yk, n), LIMIT, "   k");
    ok_at_most(relative_error(of_x(v, n), rv, n), LIMIT, "   v");
    qkv_backward(NULL,
                 &(QkvBackward){dqkv, dlambda, qkv.dq.x, qkv.dk.x, qkv.dv.x, q, k, rstd_q, rstd_k, qkv.v.x,
                                table, qkv.tokens, qkv.lambda.x, cos_table.x, sin_table.x},
                 N, H, e);
    Tensor *inputs[] = {&qkv.q, &qkv.k, &qkv.v};
    for (int i = 0; i < 3; i++)
        ok_at_most(relative_error(third(dqkv, i, N, d), central_differences(inputs[i]->d, n, qkv_loss), n),
                   LIMIT, "   gradient");
    double *expected = central_differences(qkv.lambda.d, 2, qkv_loss);
    expected[0] += 0.5;
    expected[1] -= 0.25; // they are added
    ok_at_most(relative_error(of_float(dlambda, 2), expected, 2), LIMIT, "   gradient of lambda");
}

static void rope_case(void)
{
    pool_reset();
    enum {
        POSITIONS = 1 << 18,
        E = 32,
        COUNT = POSITIONS * E / 4
    }; // as many as a validation sequence of the presets has
    float frequency[E / 4];
    for (int j = 0; j < E / 4; j++)
        frequency[j] = powf(1.0f / 1024, (float)j / (E / 4 - 1));
    floatX *c = halves(COUNT), *s = halves(COUNT);
    rope_tables(NULL, c, s, frequency, POSITIONS, E);
    double worst = 0, in_double = 0; // the latter: had the angle not been rounded to fp32
    for (int i = 0; i < COUNT; i++) {
        float angle = (float)(i / (E / 4)) * frequency[i % (E / 4)];
        double unrounded = (double)(i / (E / 4)) * frequency[i % (E / 4)];
        worst = fmax(worst, fmax(fabs(x_to_float(c[i]) - cos(angle)), fabs(x_to_float(s[i]) - sin(angle))));
        in_double = fmax(in_double, fabs(x_to_float(c[i]) - cos(unrounded)));
    }
    ok_at_most(worst, 0x1p-24, "rope tables: the fp32 angle, then rounding of cos and sin only");
    ok(in_double > 1e-3, "   an angle in double is another one: %.2g apart", in_double);
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 1100, .eval_tokens = 1100, .dim = 24, .heads = 1, .mlp_dim = 64, .vocab_padded = 64};
    backend_open(0);
    backend_reserve(&sizes);
    static const Case cases[] = {
        {"three documents", 23, 2, 8, 6, 3, {0, 5, 14, 23}, true},
        {"documents of one token", 9, 2, 8, 4, 6, {0, 1, 2, 5, 6, 8, 9}, true},
        {"window 0", 11, 3, 8, 0, 2, {0, 4, 11}, true},
        {"window beyond the documents", 17, 2, 12, 100, 2, {0, 9, 17}, true},
        {"one token", 1, 2, 8, 3, 1, {0, 1}, true},
        {"query blocks, odd sizes", 333, 2, 12, 77, 4, {0, 1, 130, 131, 333}, false},
        {"key tiles, window 600", 1100, 1, 12, 600, 2, {0, 37, 1100}, false},
        {"whole document of 1100", 1100, 2, 8, 5000, 1, {0, 1100}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        PART(attention_case(&cases[i]));
    PART(qkv_case(7, 2, 12, true));
    PART(qkv_case(5, 3, 8, false));
    PART(qkv_case(1, 1, 16, true));
    PART(rope_case());
    backend_close();
    return tap_done();
}
