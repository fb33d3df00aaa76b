// Embedding, residual stream and products, fp32 build: forward against the double
// references, backward against central differences of them. Attention and its surroundings:
// exact_attention.c; head: exact_head.c; optimizers: exact_optimizers.c. Limit: every result is a chain of a
// few fp32 operations and one sum of at most some hundred terms, 2^-24 each; measured errors are near 1e-7 in
// norm, 1e-5 is far below what a wrong formula gives.
#include "dev/test/tap.h"
#include "dev/test/exact_check.h"

// ---- embedding --------------------------------------------------------------------------------------------

static struct {
    int N, d;
    int32_t *tokens;
    Tensor embed, gate, dx, dx0;
    Tensor32 lambda;
    double *x0, *rstd;
} em;

static double embed_loss(void)
{
    RefEmbed a = {em.tokens, em.embed.d, em.gate.d, em.lambda.d[0], em.N, em.d};
    ref_embed(&a, em.x0, em.rstd);
    return inner(em.x0, em.dx.d, em.N * em.d) + inner(em.x0, em.dx0.d, em.N * em.d);
}

// Positions of every distinct token, for embedding_grad.
static TokenRows token_rows(const int32_t *tokens, int N, int vocab)
{
    int32_t *order = take((size_t)N, 4), *row_token = take((size_t)N, 4), *start = take((size_t)N + 1, 4),
            *count = take(1, 4);
    for (int token = 0, n = 0; token < vocab; token++) {
        int before = n;
        for (int t = 0; t < N; t++)
            if (tokens[t] == token)
                order[n++] = t;
        if (n > before) {
            row_token[*count] = token;
            start[++*count] = n;
        }
    }
    return (TokenRows){order, row_token, start, count};
}

// The rows in reverse, each with the token that was before it.
static void check_before(const EmbedForward *f, int N, int d)
{
    int n = N * d;
    int32_t *tokens = xcalloc((size_t)N, sizeof *tokens), *before = xcalloc((size_t)N, sizeof *before);
    EmbedForward reverse = *f;
    double *want = xcalloc((size_t)n, sizeof *want);
    for (int i = 0; i < N; i++) {
        int t = N - 1 - i;
        tokens[i] = em.tokens[t];
        before[i] = t ? em.tokens[t - 1] : -1;
        memcpy(want + i * d, em.x0 + t * d, (size_t)d * sizeof *want);
    }
    reverse.tokens = tokens;
    reverse.before = before;
    embed_forward(NULL, &reverse, N, d);
    check_x("   rows that name the token before", f->x0, want, n);
    embed_forward(NULL, f, N, d);
    free(tokens);
    free(before);
    free(want);
}

static void embed_case(int N, int d, int vocab)
{
    pool_reset();
    int n = N * d;
    em.N = N;
    em.d = d;
    em.tokens = random_tokens(N, vocab);
    em.embed = random_tensor(vocab * d, 1);
    em.gate = random_tensor(gate_inputs, 1);
    em.lambda = random_tensor32(1, 1);
    em.dx = random_tensor(n, 1);
    em.dx0 = random_tensor(n, 1);
    em.x0 = doubles(n);
    em.rstd = doubles(N);
    floatX *x0 = halves(n), *de = halves(n);
    float *rstd = floats(N), *dgate = floats(gate_inputs), *dlambda = floats(1), *dtable = floats(vocab * d),
          *doubled = floats(vocab * d);
    EmbedForward f = {x0, rstd, em.tokens, em.embed.x, em.gate.x, em.lambda.x, gate_inputs, NULL};
    embed_forward(NULL, &f, N, d);
    embed_loss();
    check_x(N > 1 ? "embedding: x0" : "embedding of one token: x0", x0, em.x0, n);
    check_before(&f, N, d);
    check("   rstd", rstd, em.rstd, N);
    EmbedBackward b = {de,         em.dx.x,   em.dx0.x,    x0,    rstd,    em.tokens,
                       em.embed.x, em.gate.x, em.lambda.x, dgate, dlambda, gate_inputs};
    embed_backward(NULL, &b, N, d);
    TokenRows rows = token_rows(em.tokens, N, vocab);
    embedding_grad(NULL, dtable, de, NULL, &rows, N, d);
    double *expected = central_differences(em.embed.d, vocab * d, embed_loss);
    check("   table, tokens repeated", dtable, expected, vocab * d);
    check("   gate", dgate, central_differences(em.gate.d, gate_inputs, embed_loss), gate_inputs);
    check("   lambda", dlambda, central_differences(em.lambda.d, 1, embed_loss), 1);
    float scale = -1.5f;
    for (int i = 0; i < 2; i++)
        embedding_grad(NULL, doubled, de, &scale, &rows, N, d);
    for (int i = 0; i < vocab * d; i++)
        expected[i] *= 2 * scale;
    check("   table, scaled, added twice", doubled, expected, vocab * d);
}

// ---- residual stream --------------------------------------------------------------------------------------

static struct {
    int N, d, H;
    Tensor x, x0, skip, dx_out, dh, dx_add, gate_w;
    Tensor32 coef, dgate;
    double *x_out, *h, *rstd;
    bool with_skip, with_out, with_add;
} mix;

// dgate's way to dh is linear in h, so it joins the loss as a constant gradient of h.
static double mix_loss(void)
{
    int N = mix.N, d = mix.d;
    const double *in[] = {mix.x.d, mix.x0.d, mix.with_skip ? mix.skip.d : NULL};
    ref_mix(mix.x_out, mix.h, mix.rstd, in, mix.coef.d, N, d);
    double sum = inner(mix.h, mix.dh.d, N * d);
    if (mix.with_out)
        sum += inner(mix.x_out, mix.dx_out.d, N * d);
    if (mix.with_add)
        sum += inner(mix.x.d, mix.dx_add.d, N * d);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < mix.H * gate_inputs; i++)
            sum +=
                mix.dgate.d[t * mix.H + i / gate_inputs] * mix.gate_w.d[i] * mix.h[t * d + i % gate_inputs];
    return sum;
}

static void mix_inputs(int N, int d, int H)
{
    int n = N * d;
    mix.N = N;
    mix.d = d;
    mix.H = H;
    mix.x = random_tensor(n, 1);
    mix.x0 = random_tensor(n, 2);
    mix.skip = random_tensor(n, 1);
    mix.coef = random_tensor32(3, 1);
    mix.dx_out = random_tensor(n, 1);
    mix.dh = random_tensor(n, 1);
    mix.dx_add = random_tensor(n, 1);
    mix.gate_w = random_tensor(H * gate_inputs, 1);
    mix.dgate = random_tensor32(N * H, 1);
    mix.x_out = doubles(n);
    mix.h = doubles(n);
    mix.rstd = doubles(N);
}

static void mix_case(int N, int d, int H, bool with_skip, bool with_out, bool with_add, bool accumulate)
{
    pool_reset();
    int n = N * d;
    mix_inputs(N, d, H);
    mix.with_skip = with_skip;
    mix.with_out = with_out;
    mix.with_add = with_add;
    floatX *x_out = halves(n), *h = halves(n), *dx = mix.dx_out.x, *dx0 = halves(n), *dskip = halves(n);
    float *rstd = floats(N), dcoef[3] = {1, 2, 3};
    const floatX *skip = with_skip ? mix.skip.x : NULL;
    MixForward f = {with_out ? x_out : NULL, h, rstd, mix.x.x, mix.x0.x, skip, mix.coef.x};
    mix_rmsnorm_forward(NULL, &f, N, d);
    mix_loss();
    printf("# mix: N %d, d %d%s%s%s%s\n", N, d, with_skip ? ", skip" : "", with_out ? ", x_out" : "",
           with_add ? ", dx_add" : "", accumulate ? ", dx0 +=" : "");
    if (with_out)
        check_x("   x_out", x_out, mix.x_out, n);
    check_x("   h", h, mix.h, n);
    double *before = doubles(n), *ex0 = central_differences(mix.x0.d, n, mix_loss),
           *ecoef = central_differences(mix.coef.d, 3, mix_loss);
    for (int i = 0; i < n; i++)
        before[i] = x_to_float(dx0[i] = float_to_x((float)uniform(-1, 1)));
    double *ex = central_differences(mix.x.d, n, mix_loss),
           *eskip = central_differences(mix.skip.d, n, mix_loss);
    // dx is dx_out itself, as the contract allows
    MixBackward b = {dx,
                     dx0,
                     with_skip ? dskip : NULL,
                     dcoef,
                     with_out ? mix.dx_out.x : NULL,
                     mix.dh.x,
                     with_add ? mix.dx_add.x : NULL,
                     h,
                     rstd,
                     mix.x.x,
                     mix.x0.x,
                     skip,
                     mix.coef.x,
                     H ? mix.dgate.x : NULL,
                     mix.gate_w.x,
                     H,
                     accumulate,
                     gate_inputs};
    mix_rmsnorm_backward(NULL, &b, N, d);
    for (int i = 0; i < n && accumulate; i++)
        ex0[i] += before[i];
    for (int i = 0; i < 3; i++)
        ecoef[i] += i + 1;
    check_x("   dx", dx, ex, n);
    check_x("   dx0", dx0, ex0, n);
    if (with_skip)
        check_x("   dskip", dskip, eskip, n);
    check("   dcoef", dcoef, ecoef, 3);
}

// A skip from the block directly below: what dx_add names is dskip, which must be written first.
static void mix_shared_case(int N, int d)
{
    pool_reset();
    int n = N * d;
    mix_inputs(N, d, 0);
    mix.with_skip = mix.with_out = true;
    mix.with_add = false;
    floatX *h = halves(n), *dx = halves(n), *dx0 = halves(n), *dskip = halves(n);
    float *rstd = floats(N), dcoef[3] = {0};
    mix_rmsnorm_forward(NULL, &(MixForward){NULL, h, rstd, mix.x.x, mix.x0.x, mix.skip.x, mix.coef.x}, N, d);
    MixBackward b = {dx,         dx0,  dskip, dcoef,   mix.dx_out.x, mix.dh.x,
                     dskip,      h,    rstd,  mix.x.x, mix.x0.x,     mix.skip.x,
                     mix.coef.x, NULL, NULL,  0,       false,        gate_inputs};
    mix_rmsnorm_backward(NULL, &b, N, d);
    double *ex = central_differences(mix.x.d, n, mix_loss),
           *eskip = central_differences(mix.skip.d, n, mix_loss);
    for (int i = 0; i < n; i++)
        ex[i] += eskip[i];
    check_x("mix, dx_add is dskip: dx", dx, ex, n);
    check_x("   dskip", dskip, eskip, n);
}

static void rmsnorm_case(int N, int d, double size)
{
    pool_reset();
    int n = N * d;
    mix_inputs(N, d, 0);
    mix.x = random_tensor(n, size);
    mix.coef.d[0] = 1;
    mix.coef.d[1] = 0;
    mix.with_skip = mix.with_out = mix.with_add = false;
    floatX *h = halves(n), *dx = mix.dx_out.x;
    float *rstd = floats(N);
    rmsnorm_forward(NULL, h, rstd, mix.x.x, N, d);
    mix_loss();
    check_x(size < 1e-3 ? "rmsnorm of values below eps: h" : "rmsnorm: h", h, mix.h, n);
    double *expected = doubles(n);
    if (size <
        1e-3) // the step of the differences would be large beside the values: analytic reference instead
        for (int t = 0; t < N; t++)
            ref_rms_backward(expected + t * d, mix.dh.d + t * d, mix.h + t * d, mix.rstd[t], d);
    else
        expected = central_differences(mix.x.d, n, mix_loss);
    for (int i = 0; i < n; i++)
        expected[i] += mix.dx_out.d[i];
    rmsnorm_backward(NULL, dx, mix.dh.x, h, rstd, N, d);
    check_x("   dx +=", dx, expected, n);
}

// ---- coefficients -----------------------------------------------------------------------------------------

enum { LAYERS = 12, SCALARS = 64 };
static double scalars[SCALARS], coef_weight[3 * (LAYERS + 1)];
static Coefficient terms[3 * (LAYERS + 1)];

static int skip_of(int layer) { return layer >= 6 && layer <= 10 ? layer - 6 : -1; }

// The residual rule of a layer, x <- l0 (x + sig(w) s) + l1 x0, read off as coefficients of x, x0, s; at the
// end x - w x_b.
static void set_terms(void)
{
    memset(terms, 0, sizeof terms);
    for (int i = 1; i < LAYERS; i++) {
        terms[3 * i] = (Coefficient){1, LAYERS + 2 * i, -1};
        terms[3 * i + 1] = (Coefficient){1, LAYERS + 2 * i + 1, -1};
        if (skip_of(i) >= 0)
            terms[3 * i + 2] = (Coefficient){1, LAYERS + 2 * i, skip_of(i)};
    }
    terms[3 * LAYERS - 1] = (Coefficient){0.5f, LAYERS + 1, UNGATED(7)};
    terms[3 * LAYERS] = (Coefficient){1, -1, -1};
    terms[3 * LAYERS + 1] = (Coefficient){-1, 5 * LAYERS + 1, -1};
}

static double coefficients_loss(void)
{
    double sum = coef_weight[3 * LAYERS - 1] * 0.5 * scalars[LAYERS + 1] * scalars[7] +
                 coef_weight[3 * LAYERS] - coef_weight[3 * LAYERS + 1] * scalars[5 * LAYERS + 1];
    for (int i = 1; i < LAYERS; i++) {
        double l0 = scalars[LAYERS + 2 * i], l1 = scalars[LAYERS + 2 * i + 1];
        sum += coef_weight[3 * i] * l0 + coef_weight[3 * i + 1] * l1;
        if (skip_of(i) >= 0)
            sum += coef_weight[3 * i + 2] * l0 * ref_sigmoid(scalars[skip_of(i)]);
    }
    return sum;
}

static void coefficients_case(void)
{
    pool_reset();
    Tensor32 s = random_tensor32(SCALARS, 2), weight = random_tensor32(3 * (LAYERS + 1), 1);
    float *coef = floats(3 * (LAYERS + 1)), *dscalars = floats(SCALARS);
    memcpy(scalars, s.d, sizeof scalars);
    memcpy(coef_weight, weight.d, sizeof coef_weight);
    set_terms();
    coefficients_forward(NULL, coef, s.x, terms, 3 * (LAYERS + 1));
    double loss = inner(of_float(coef + 3, 3 * LAYERS), coef_weight + 3, 3 * LAYERS);
    ok_at_most(fabs(loss - coefficients_loss()), LIMIT, "coefficients");
    coefficients_backward(NULL, dscalars, weight.x, s.x, terms, 3 * (LAYERS + 1));
    check("   gradient of the scalars", dscalars, central_differences(scalars, SCALARS, coefficients_loss),
          SCALARS);
    double left = 0;
    for (int i = 0; i < weight.n; i++)
        left += fabs(weight.x[i]);
    ok(left == 0, "   dcoef is zero afterwards");
}

// ---- products ---------------------------------------------------------------------------------------------

static void forward_products(int N, int in, int out)
{
    Tensor x = random_tensor(N * in, 1), w = random_tensor(3 * in * out, 1), r = random_tensor(N * out, 1);
    Tensor32 alpha = random_tensor32(1, 2);
    double *e = doubles(3 * N * out);
    floatX *y = halves(3 * N * out), *added = halves(N * out);
    memcpy(added, r.x, (size_t)(N * out) * sizeof *added);
    for (int p = 0; p < 3; p++)
        ref_product(e + p * N * out, x.d, w.d + p * in * out, false, true, N, out, in);
    matmul_forward(NULL, &(Product){y, x.x, w.x, NULL, NULL, N, in, out, 3});
    printf("# products N %d, in %d, out %d\n", N, in, out);
    check_x("   three planes", y, e, 3 * N * out);
    for (int i = 0; i < N * out; i++)
        e[i] += r.d[i];
    matmul_forward(NULL, &(Product){r.x, x.x, w.x, r.x, NULL, N, in, out, 1});
    check_x("   with residual in place", r.x, e, N * out);
    for (int i = 0; i < N * out; i++)
        e[i] += (alpha.d[0] - 1) * (e[i] - r.d[i]);
    matmul_forward(NULL, &(Product){y, x.x, w.x, added, alpha.x, N, in, out, 1});
    check_x("   with a factor and a residual", y, e, N * out);
    ref_product(e, x.d, w.d, false, false, N, out, in);
    for (int i = 0; i < N * out; i++)
        e[i] = e[i] > 0 ? e[i] * e[i] : 0;
    matmul_relu2_forward(NULL, y, x.x, w.x, N, in, out);
    check_x("   relu^2", y, e, N * out);
}

static void backward_products(int N, int in, int out)
{
    Tensor x = random_tensor(N * in, 1), w = random_tensor(in * out, 1), dy = random_tensor(N * out, 1);
    Tensor32 dw = random_tensor32(in * out, 1);
    double *e = doubles(N * in + in * out);
    floatX *dx = halves(N * in);
    ref_product(e, dy.d, w.d, false, false, N, in, out);
    matmul_backward_input(NULL, &(InputGrad){dx, dy.x, w.x, N, in, out, NULL});
    check_x("   dx", dx, e, N * in);
    ref_product(e, dy.d, x.d, true, false, out, in, N);
    for (int i = 0; i < in * out; i++)
        e[i] += dw.d[i];
    matmul_weight_grads(NULL, &(WeightGrad){dw.x, dy.x, x.x, out, in, .fresh = false}, 1, N);
    check("   dw +=", dw.x, e, in * out);
}

// A loss of the effective weight alpha w, through central differences of alpha and w.
static Tensor scaled_w;
static Tensor32 scaled_dw, scaled_alpha;
static double scaled_loss(void) { return scaled_alpha.d[0] * inner(scaled_dw.d, scaled_w.d, scaled_w.n); }

static void weight_scale_case(int n)
{
    pool_reset();
    scaled_w = random_tensor(n, 1);
    scaled_dw = random_tensor32(n, 1);
    scaled_alpha = random_tensor32(1, 2);
    Tensor32 dalpha = random_tensor32(1, 2);
    double *e = central_differences(scaled_w.d, n, scaled_loss), kept = dalpha.d[0];
    dalpha.d[0] += *central_differences(scaled_alpha.d, 1, scaled_loss);
    floatX *effective = halves(n);
    double *scaled = doubles(n);
    for (int i = 0; i < n; i++)
        scaled[i] = scaled_alpha.d[0] * scaled_w.d[i];
    weight_scale_forward(NULL, effective, scaled_w.x, scaled_alpha.x, n);
    weight_scale_backward(NULL, scaled_dw.x, dalpha.x, scaled_w.x, scaled_alpha.x, n);
    printf("# factor of a weight of %d elements\n", n);
    check_x("   alpha w", effective, scaled, n);
    check("   dw", scaled_dw.x, e, n);
    // A sum of n signed terms may cancel: its error is that of the terms.
    double size = fabs(kept) + sqrt((double)n / 9);
    ok(fabs(dalpha.x[0] - dalpha.d[0]) <= 1e-6 * size, "   dalpha += %.7g (%.7g)", (double)dalpha.x[0],
       dalpha.d[0]);
}

// relu^2(x w) followed by a product with dy: the gradient before relu^2 through central differences of the
// activation.
static Tensor pre, grad_of_y;
static double relu2_loss(void)
{
    double sum = 0;
    for (int i = 0; i < pre.n; i++)
        sum += grad_of_y.d[i] * (pre.d[i] > 0 ? pre.d[i] * pre.d[i] : 0);
    return sum;
}

static void relu2_case(int N, int d, int F)
{
    pool_reset();
    Tensor dy = random_tensor(N * d, 1), w = random_tensor(d * F, 1);
    pre = random_tensor(N * F, 2);
    grad_of_y = random_tensor(N * F, 1);
    ref_product(grad_of_y.d, dy.d, w.d, false, false, N, F, d);
    floatX *y = halves(N * F), *dpre = halves(N * F);
    for (int i = 0; i < N * F; i++)
        y[i] = float_to_x(pre.d[i] > 0 ? (float)(pre.d[i] * pre.d[i]) : 0);
    matmul_relu2_backward(NULL, dpre, dy.x, w.x, y, N, d, F);
    check_x("relu^2 backward", dpre, central_differences(pre.d, N * F, relu2_loss), N * F);
}

static void products_case(int N, int in, int out)
{
    pool_reset();
    forward_products(N, in, out);
    backward_products(N, in, out);
}

int main(void)
{
    OpSizes sizes = {.tokens = 1100,
                     .eval_tokens = 1100,
                     .dim = 600,
                     .heads = 4,
                     .mlp_dim = 600,
                     .vocab_padded = 17024,
                     .fp8_head = true};
    backend_open(0);
    backend_reserve(&sizes);
    PART(embed_case(19, 16, 7));
    PART(embed_case(70, 12, 3));
    PART(embed_case(1, 16, 3));
    gate_inputs = MAX_GATE_INPUTS;
    PART(embed_case(23, 24, 5));
    PART(mix_case(11, 16, 2, true, true, false, true));
    gate_inputs = 5;
    PART(embed_case(8, 8, 3));
    PART(mix_case(7, 8, 3, true, true, true, false));
    gate_inputs = 12;
    PART(mix_case(9, 24, 2, true, true, true, true));
    PART(mix_case(37, 16, 0, false, true, false, false));
    PART(mix_case(1, 12, 1, true, false, false, false));
    PART(mix_case(5, 20, 1, false, false, true, true));
    PART(mix_shared_case(6, 12));
    PART(rmsnorm_case(11, 20, 1));
    PART(rmsnorm_case(3, 16, 1e-4));
    PART(coefficients_case());
    PART(products_case(1, 12, 5));
    PART(products_case(67, 33, 130));
    PART(products_case(515, 48, 20));
    PART(products_case(70, 520, 137));
    PART(weight_scale_case(5));
    PART(weight_scale_case(3001));
    PART(relu2_case(9, 16, 31));
    backend_close();
    return tap_done();
}
