// Attention and what stands around it, fp32 build: forward against the double reference, backward against
// central differences of that reference, and at sizes that cross the backend's blocks against the analytic
// double backward (itself checked here). Limit: sums of at most some hundred fp32 products, 2^-24 each with
// random signs, through two products and a softmax: 1e-6 or so; 1e-5 in norm leaves an order of magnitude and
// is far below any wrong formula.
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"

#define LIMIT 1e-5

// ---- a case: documents, inputs, and the loss in double ---------------------------------------------------

typedef struct {
    const char *name;
    int N, H, e, window, documents;
    int32_t cu[8];
    bool values;      // with value embeddings
    bool differences; // small enough for central differences
    double key_size;  // of raw keys; 0: 1.5
} Case;

enum { VOCAB = 5 };

static struct {
    Attention a;
    int32_t *tokens;
    Tensor q, k, v, values, h, w, dyg; // q, k, v raw
    Tensor cos, sin;
    Tensor32 lambda;
    double *yq, *yk, *yv, *rstd_q, *rstd_k; // normalised and rotated, mixed
    double *y, *yg, *lse;
} at;

static double gate_loss(void) // with attention's output as it is
{
    ref_gate(at.yg, at.y, at.h.d, at.w.d, at.a.N, at.a.H, at.a.e);
    return inner(at.yg, at.dyg.d, at.dyg.n);
}

static double attention_loss(void) // with q, k and v as attention takes them
{
    ref_attention(&at.a, at.y, at.lse, NULL, at.yq, at.yk, at.yv);
    return gate_loss();
}

static double raw_loss(void)
{
    int N = at.a.N, H = at.a.H, e = at.a.e, d = H * e;
    RefRope rope = {at.cos.d, at.sin.d, N, H, e};
    ref_norm_rope(&rope, at.yq, at.rstd_q, at.q.d);
    ref_norm_rope(&rope, at.yk, at.rstd_k, at.k.d);
    for (int i = 0; i < N * d; i++) {
        double embedded = at.values.n ? at.values.d[at.tokens[i / d] * d + i % d] : 0;
        at.yv[i] = at.lambda.d[0] * at.v.d[i] + at.lambda.d[1] * embedded;
    }
    return attention_loss();
}

static void make_inputs(const Case *c)
{
    int d = c->H * c->e, n = c->N * d, angles = c->N * (c->e / 4);
    pool_reset();
    gate_inputs = d >= MAX_GATE_INPUTS && c->documents % 2 ? MAX_GATE_INPUTS : d > 16 ? 5 : 12;
    at.a = (Attention){c->cu, c->documents, c->N, c->H, c->e, c->window, 0.37f, c->e};
    at.tokens = random_tokens(c->N, VOCAB);
    at.q = random_tensor(n, 1.5);
    at.k = random_tensor(n, c->key_size > 0 ? c->key_size : 1.5);
    at.v = random_tensor(n, 1);
    at.values = random_tensor(c->values ? VOCAB * d : 0, 1);
    at.lambda = random_tensor32(2, 1);
    at.dyg = random_tensor(n, 1);
    at.h = random_tensor(n, 1.7);
    at.w = random_tensor(c->H * gate_inputs, 1);
    // Tables coarser than fp32, so that cos^2 + sin^2 differs from 1 as it does in bf16.
    at.cos = random_tensor(angles, 1);
    at.sin = random_tensor(angles, 1);
    for (int i = 0; i < angles; i++) {
        at.cos.d[i] = x_to_float(at.cos.x[i] = float_to_x(bf16_to_float(float_to_bf16(cosf((float)i)))));
        at.sin.d[i] = x_to_float(at.sin.x[i] = float_to_x(bf16_to_float(float_to_bf16(sinf((float)i)))));
    }
    double **results[] = {&at.yq, &at.yk, &at.yv, &at.y, &at.yg};
    for (int i = 0; i < 5; i++)
        *results[i] = doubles(n);
    at.rstd_q = doubles(c->N * c->H);
    at.rstd_k = doubles(c->N * c->H);
    at.lse = doubles(c->N * c->H);
}

// ---- the ops ----------------------------------------------------------------------------------------------

typedef struct {
    floatX *q, *k, *v, *yg, *dqkv, *dv;
    float *rstd_q, *rstd_k, *lse, *dgate, *dgate_w, dlambda[2];
} Results;

static Results run_ops(const Case *c)
{
    int N = c->N, H = c->H, e = c->e, n = N * H * e;
    Results r =
        {halves(n),     halves(n),     halves(n),     halves(n),     halves(3 * n),           halves(n),
         floats(N * H), floats(N * H), floats(N * H), floats(N * H), floats(H * gate_inputs), {0.5f, -0.25f}};
    const floatX *values = c->values ? at.values.x : NULL;
    int32_t *table = take((size_t)attention_table_ints(N, 0), sizeof *table);
    int slots = attention_table_build(table, c->cu, c->documents, N, 0);
    memcpy(r.q, at.q.x, sizeof(floatX) * (size_t)n);
    memcpy(r.k, at.k.x, sizeof(floatX) * (size_t)n);
    QkvForward qkv = {r.q,    r.k,       r.v,         r.rstd_q, r.rstd_k, at.v.x,
                      values, at.tokens, at.lambda.x, at.cos.x, at.sin.x};
    AttentionForward f =
        {r.yg, r.lse, r.q, r.k, r.v, at.h.x, at.w.x, table, slots, c->window, (float)at.a.scale, gate_inputs};
    qkv_forward(NULL, &qkv, N, H, e);
    attention_forward(NULL, &f, N, H, e);
    AttentionBackward b = {.forward = &f,
                           .dqkv = r.dqkv,
                           .dv = r.dv,
                           .dlambda = r.dlambda,
                           .dgate = r.dgate,
                           .dgate_w = r.dgate_w,
                           .dyg = at.dyg.x,
                           .rstd_q = r.rstd_q,
                           .rstd_k = r.rstd_k,
                           .v_raw = at.v.x,
                           .value_embed = values,
                           .tokens = at.tokens,
                           .lambda = at.lambda.x,
                           .cos = at.cos.x,
                           .sin = at.sin.x,
                           .scratch = take(attention_scratch_bytes(N, H, e), 1)};
    attention_backward(NULL, &b, N, H, e);
    return r;
}

// ---- comparing --------------------------------------------------------------------------------------------

static void check(const Case *c, const char *what, const double *got, const double *exact, int n)
{
    char text[128];
    snprintf(text, sizeof text, "%s: %s", c->name, what);
    ok_at_most(relative_error(got, exact, n), LIMIT, text);
}

// The gate is cheap: always by central differences.
static void check_gate(const float *dgate, const float *dgate_w)
{
    int N = at.a.N, H = at.a.H, d = H * at.a.e;
    ok_at_most(relative_error(of_float(dgate_w, H * gate_inputs),
                              central_differences(at.w.d, H * gate_inputs, gate_loss), H * gate_inputs),
               LIMIT, "   dgate_w");
    double *dh = doubles(N * d);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < H * gate_inputs; i++)
            dh[t * d + i % gate_inputs] += dgate[t * H + i / gate_inputs] * at.w.d[i];
    if (N * d < 2000)
        ok_at_most(relative_error(dh, central_differences(at.h.d, N * d, gate_loss), N * d), LIMIT,
                   "   dh through dgate");
}

typedef struct {
    double *q, *k, *v; // of the raw ones
    double *mixed;     // of v as attention takes it
    double lambda[2];
} Gradients;

static Gradients analytic_gradients(void)
{
    int N = at.a.N, H = at.a.H, e = at.a.e, d = H * e, n = N * d;
    double *dq = doubles(n), *dk = doubles(n), *dy = doubles(n);
    Gradients g = {doubles(n), doubles(n), doubles(n), doubles(n), {0, 0}};
    ref_gate(dy, at.dyg.d, at.h.d, at.w.d, N, H, e); // the gate's backward to y is the gate itself
    ref_attention_backward(&at.a, &(RefQkv){dq, dk, g.mixed}, dy, at.y, at.lse,
                           &(RefQkv){at.yq, at.yk, at.yv});
    RefRope rope = {at.cos.d, at.sin.d, N, H, e};
    ref_norm_rope_backward(&rope, g.q, dq, at.yq, at.rstd_q);
    ref_norm_rope_backward(&rope, g.k, dk, at.yk, at.rstd_k);
    for (int i = 0; i < n; i++) {
        g.v[i] = at.lambda.d[0] * g.mixed[i];
        g.lambda[0] += g.mixed[i] * at.v.d[i];
        g.lambda[1] += at.values.n ? g.mixed[i] * at.values.d[at.tokens[i / d] * d + i % d] : 0;
    }
    return g;
}

// The analytic reference must earn its name.
static Gradients difference_gradients(const Gradients *analytic)
{
    int n = at.q.n;
    Gradients g = {central_differences(at.q.d, n, raw_loss),
                   central_differences(at.k.d, n, raw_loss),
                   central_differences(at.v.d, n, raw_loss),
                   NULL,
                   {0, 0}};
    double *lambda = central_differences(at.lambda.d, 2, raw_loss);
    memcpy(g.lambda, lambda, sizeof g.lambda);
    raw_loss();
    g.mixed = central_differences(at.yv, n, attention_loss);
    raw_loss();
    ok_at_most(relative_error(analytic->q, g.q, n) + relative_error(analytic->k, g.k, n) +
                   relative_error(analytic->v, g.v, n) + relative_error(analytic->mixed, g.mixed, n) +
                   relative_error(analytic->lambda, g.lambda, 2),
               1e-7, "   analytic reference");
    return g;
}

// The part of dqkv that belongs to one of q, k, v.
static double *third(const floatX *dqkv, int which, int N, int d)
{
    double *out = doubles(N * d);
    for (int i = 0; i < N * d; i++)
        out[i] = x_to_float(dqkv[i / d * 3 * d + which * d + i % d]);
    return out;
}

static void attention_case(const Case *c)
{
    int d = c->H * c->e, n = c->N * d, rows = c->N * c->H;
    make_inputs(c);
    Results r = run_ops(c);
    raw_loss();
    check(c, "q", of_x(r.q, n), at.yq, n);
    check(c, "k", of_x(r.k, n), at.yk, n);
    check(c, "v", of_x(r.v, n), at.yv, n);
    check(c, "yg", of_x(r.yg, n), at.yg, n);
    check(c, "lse", of_float(r.lse, rows), at.lse, rows);
    check_gate(r.dgate, r.dgate_w);
    raw_loss();
    Gradients g = analytic_gradients();
    if (c->differences)
        g = difference_gradients(&g);
    check(c, "gradient of raw q", third(r.dqkv, 0, c->N, d), g.q, n);
    check(c, "gradient of raw k", third(r.dqkv, 1, c->N, d), g.k, n);
    check(c, "gradient of raw v", third(r.dqkv, 2, c->N, d), g.v, n);
    check(c, "gradient of v", of_x(r.dv, n), g.mixed, n);
    g.lambda[0] += 0.5; // they are added
    g.lambda[1] -= 0.25;
    check(c, "gradient of lambda", of_float(r.dlambda, 2), g.lambda, 2);
}

// ---- attention alone --------------------------------------------------------------------------------------

static double sdpa_loss(void)
{
    ref_attention(&at.a, at.y, at.lse, NULL, at.q.d, at.k.d, at.v.d);
    return inner(at.y, at.dyg.d, at.dyg.n);
}

// Sums of dy * y that are given count: the right ones make the same dq, doubled ones another.
static void given_delta_case(const Case *c, const SdpaForward *f, const floatX *dq, void *scratch)
{
    int N = c->N, H = c->H, e = c->e, n = N * H * e, wide = N * H * f->qk;
    floatX *again = halves(wide), *dk = halves(wide), *dv = halves(n);
    float *delta = floats(N * H);
    SdpaBackward b = {f, again, dk, dv, at.dyg.x, scratch, delta};
    for (int i = 0; i < N * H; i++)
        delta[i] = (float)inner(at.dyg.d + i * e, at.y + i * e, e);
    sdpa_backward(NULL, &b, N, H, e);
    check(c, "with sums of dy y given", of_x(again, wide), of_x(dq, wide), wide);
    for (int i = 0; i < N * H; i++)
        delta[i] *= 2;
    sdpa_backward(NULL, &b, N, H, e);
    double off = relative_error(of_x(again, wide), of_x(dq, wide), wide);
    ok(off > 0.01, "   others make another gradient of q: %g", off);
}

static void sdpa_case(const Case *c, int qk) // qk: width of a head of q and k
{
    int N = c->N, H = c->H, e = c->e, n = N * H * e, wide = N * H * qk;
    pool_reset();
    at.a = (Attention){c->cu, c->documents, N, H, e, c->window, 0.37f, qk};
    at.q = random_tensor(wide, 1.5);
    at.k = random_tensor(wide, 1.5);
    at.v = random_tensor(n, 1);
    at.dyg = random_tensor(n, 1);
    at.y = doubles(n);
    at.lse = doubles(N * H);
    int32_t *table = take((size_t)attention_table_ints(N, 0), sizeof *table);
    int slots = attention_table_build(table, c->cu, c->documents, N, 0);
    floatX *y = halves(n), *dq = halves(wide), *dk = halves(wide), *dv = halves(n);
    float *lse = floats(N * H);
    SdpaForward f = {y, lse, at.q.x, at.k.x, at.v.x, qk, table, slots, c->window, (float)at.a.scale};
    void *scratch = take(sdpa_scratch_bytes(N, H, qk, e), 1);
    sdpa_forward(NULL, &f, N, H, e);
    sdpa_backward(NULL, &(SdpaBackward){&f, dq, dk, dv, at.dyg.x, scratch, NULL}, N, H, e);
    sdpa_loss();
    check(c, "y", of_x(y, n), at.y, n);
    check(c, "lse", of_float(lse, N * H), at.lse, N * H);
    double *eq = doubles(wide), *ek = doubles(wide), *ev = doubles(n);
    ref_attention_backward(&at.a, &(RefQkv){eq, ek, ev}, at.dyg.d, at.y, at.lse,
                           &(RefQkv){at.q.d, at.k.d, at.v.d});
    if (c->differences) {
        double *analytic[] = {eq, ek, ev};
        eq = central_differences(at.q.d, wide, sdpa_loss);
        ek = central_differences(at.k.d, wide, sdpa_loss);
        ev = central_differences(at.v.d, n, sdpa_loss);
        ok_at_most(relative_error(analytic[0], eq, wide) + relative_error(analytic[1], ek, wide) +
                       relative_error(analytic[2], ev, n),
                   1e-7, "   analytic reference");
    }
    check(c, "gradient of q", of_x(dq, wide), eq, wide);
    check(c, "gradient of k", of_x(dk, wide), ek, wide);
    check(c, "gradient of v", of_x(dv, n), ev, n);
    given_delta_case(c, &f, dq, scratch);
}

// ---- rope -------------------------------------------------------------------------------------------------

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
    rope_tables(NULL, c, s, frequency, NULL, POSITIONS, E);
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
        {.tokens = 1100, .eval_tokens = 1100, .dim = 48, .heads = 3, .mlp_dim = 64, .vocab_padded = 64};
    backend_open(0);
    backend_reserve(&sizes);
    static const Case cases[] = {
        {"three documents", 23, 2, 8, 6, 3, {0, 5, 14, 23}, true, true, 0},
        {"no value embeddings, small keys", 13, 2, 12, 6, 2, {0, 5, 13}, false, true, 0.05},
        {"documents of one token", 9, 2, 8, 4, 6, {0, 1, 2, 5, 6, 8, 9}, true, true, 0},
        {"window 0", 11, 3, 8, 0, 2, {0, 4, 11}, false, true, 0},
        {"window beyond the documents", 17, 2, 12, 100, 2, {0, 9, 17}, true, true, 0},
        {"one token", 1, 1, 16, 3, 1, {0, 1}, true, true, 0},
        {"query blocks, odd sizes", 333, 2, 12, 77, 4, {0, 1, 130, 131, 333}, true, false, 0},
        {"key tiles, window 600", 1100, 1, 12, 600, 2, {0, 37, 1100}, false, false, 0},
        {"whole document of 1100", 1100, 2, 8, 5000, 1, {0, 1100}, true, false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        PART(attention_case(&cases[i]));
    static const Case alone[] = {
        {"alone, narrow keys", 17, 3, 8, 6, 3, {0, 5, 8, 17}, false, true, 0},
        {"alone, one channel", 11, 2, 4, 100, 2, {0, 2, 11}, false, true, 0},
        {"alone, equal widths", 9, 1, 12, 3, 1, {0, 9}, false, true, 0},
        {"alone, query blocks", 333, 2, 16, 77, 4, {0, 1, 130, 131, 333}, false, false, 0},
        {"alone, twice the tokens", 2200, 1, 8, 600, 3, {0, 74, 76, 2200}, false, false, 0},
    };
    static const int widths[] = {6, 1, 12, 12, 6};
    for (size_t i = 0; i < sizeof alone / sizeof *alone; i++)
        PART(sdpa_case(&alone[i], widths[i]));
    PART(rope_case());
    backend_close();
    return tap_done();
}
