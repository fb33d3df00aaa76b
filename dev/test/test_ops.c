// Every op in the build that trains (bf16 storage): against the double references on the very values the op
// is given, including the rounded intermediates its contract names (h, y, q, x0 as stored). An output in
// floatX may then be off by its own rounding only, half a unit in the last place, and an output in fp32 by
// fp32 sums; see worst_rounding() and SUMS.
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"
#include "llmc/cpu/blas.h"
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/vmath.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// fp32 results: sums of at most some hundred products of bf16 values, exact in fp32, 2^-24 for each addition.
#define SUMS 1e-5

static void check(const char *what, const floatX *got, const double *exact, int n)
{
    char text[128];
    snprintf(text, sizeof text, "%s, in roundings", what);
    ok_at_most(worst_rounding(of_x(got, n), exact, n), 1, text);
}

static void check32(const char *what, const float *got, const double *exact, int n)
{
    ok_at_most(relative_error(of_float(got, n), exact, n), SUMS, what);
}

enum { H = 2, E = 16, D = H * E, N = 131, VOCAB = 384, NN = N * D };

static void test_embedding(void)
{
    pool_reset();
    int32_t *tokens = random_tokens(N, 40);
    Tensor embed = random_tensor(40 * D, 1), gate = random_tensor(12, 1), dx = random_tensor(NN, 1),
           dx0 = random_tensor(NN, 1);
    Tensor32 lambda = random_tensor32(1, 1);
    floatX *x0 = halves(NN), *de = halves(NN);
    float *rstd = floats(N), dgate[12] = {0}, dlambda = 0;
    double *ex0 = doubles(NN), *erstd = doubles(N), *ede = doubles(NN), *sum = doubles(NN), edgate[12] = {0},
           edlambda = 0;
    embed_forward(NULL, &(EmbedForward){x0, rstd, tokens, embed.x, gate.x, lambda.x, 12, NULL}, N, D);
    RefEmbed ref = {tokens, embed.d, gate.d, lambda.d[0], N, D};
    ref_embed(&ref, ex0, erstd);
    check("embedding: x0", x0, ex0, NN);
    check32("   rstd", rstd, erstd, N);
    EmbedBackward b = {de, dx.x, dx0.x, x0, rstd, tokens, embed.x, gate.x, lambda.x, dgate, &dlambda, 12};
    embed_backward(NULL, &b, N, D);
    for (int i = 0; i < NN; i++)
        sum[i] = dx.d[i] + dx0.d[i];
    ref_embed_backward(&ref, ede, edgate, &edlambda, sum, of_x(x0, NN), of_float(rstd, N));
    check("   de", de, ede, NN);
    check32("   gate", dgate, edgate, 12);
    ok_at_most(fabs(dlambda - edlambda) / fabs(edlambda), SUMS, "   lambda");
}

static void test_mix(bool with_skip)
{
    pool_reset();
    Tensor x = random_tensor(NN, 1), x0 = random_tensor(NN, 1), skip = random_tensor(NN, 1),
           gate_w = random_tensor(H * 12, 1);
    Tensor dx_out = random_tensor(NN, 1), dh = random_tensor(NN, 1), dx_add = random_tensor(NN, 1),
           dx0 = random_tensor(NN, 1);
    Tensor32 coef = random_tensor32(3, 1), dgate = random_tensor32(N * H, 1);
    floatX *x_out = halves(NN), *h = halves(NN), *dx = halves(NN), *dskip = halves(NN);
    float *rstd = floats(N), dcoef[3] = {0};
    double *ex = doubles(NN), *eh = doubles(NN), *erstd = doubles(N), *g = doubles(NN), edcoef[3];
    MixForward f = {x_out, h, rstd, x.x, x0.x, with_skip ? skip.x : NULL, coef.x};
    mix_rmsnorm_forward(NULL, &f, N, D);
    const double *in[] = {x.d, x0.d, with_skip ? skip.d : NULL};
    ref_mix(ex, eh, erstd, in, coef.d, N, D);
    check(with_skip ? "mix with skip: x_out" : "mix: x_out", x_out, ex, NN);
    check("   h", h, eh, NN);
    MixBackward b = {dx,  dx0.x, with_skip ? dskip : NULL,  dcoef,  dx_out.x, dh.x,     dx_add.x, h,    rstd,
                     x.x, x0.x,  with_skip ? skip.x : NULL, coef.x, dgate.x,  gate_w.x, H,        true, 12};
    mix_rmsnorm_backward(NULL, &b, N, D);
    for (int i = 0; i < N * H * 12; i++)
        dh.d[i / (H * 12) * D + i % 12] += dgate.d[i / 12] * gate_w.d[i % (H * 12)];
    double *stored_h = of_x(h, NN);
    for (int t = 0; t < N; t++)
        ref_rms_backward(g + t * D, dh.d + t * D, stored_h + t * D, rstd[t], D);
    for (int i = 0; i < NN; i++)
        g[i] += dx_out.d[i];
    edcoef[0] = inner(g, x.d, NN);
    edcoef[1] = inner(g, x0.d, NN);
    edcoef[2] = with_skip ? inner(g, skip.d, NN) : 0;
    for (int i = 0; i < NN; i++) {
        ex[i] = coef.d[0] * g[i] + dx_add.d[i];
        dx0.d[i] += coef.d[1] * g[i];
        eh[i] = coef.d[2] * g[i];
    }
    check("   dx", dx, ex, NN);
    check("   dx0 +=", dx0.x, dx0.d, NN);
    if (with_skip)
        check("   dskip", dskip, eh, NN);
    check32("   dcoef", dcoef, edcoef, 3);
}

static void test_rmsnorm(void)
{
    pool_reset();
    Tensor x = random_tensor(NN, 1), dh = random_tensor(NN, 1), dx = random_tensor(NN, 1);
    floatX *h = halves(NN);
    float *rstd = floats(N);
    double *eh = doubles(NN), *e = doubles(NN);
    rmsnorm_forward(NULL, h, rstd, x.x, N, D);
    for (int t = 0; t < N; t++)
        ref_rms(eh + t * D, x.d + t * D, D);
    check("rmsnorm: h", h, eh, NN);
    double *stored = of_x(h, NN);
    for (int t = 0; t < N; t++)
        ref_rms_backward(e + t * D, dh.d + t * D, stored + t * D, rstd[t], D);
    for (int i = 0; i < NN; i++)
        e[i] += dx.d[i];
    rmsnorm_backward(NULL, dx.x, dh.x, h, rstd, N, D);
    check("   dx +=", dx.x, e, NN);
}

static void test_products(int n, int in, int out)
{
    pool_reset();
    Tensor x = random_tensor(n * in, 1), w = random_tensor(in * out, 1), r = random_tensor(n * out, 1),
           dy = random_tensor(n * out, 1);
    Tensor32 dw = random_tensor32(in * out, 1);
    floatX *y = halves(n * out), *dx = halves(n * in);
    double *e = doubles(n * out + n * in + in * out), *wide = doubles(n * out);
    ref_product(e, x.d, w.d, false, true, n, out, in);
    for (int i = 0; i < n * out; i++)
        e[i] += r.d[i];
    matmul_forward(NULL, &(Product){y, x.x, w.x, r.x, NULL, n, in, out, 1});
    check("product with residual", y, e, n * out);
    ref_product(e, dy.d, w.d, false, false, n, in, out);
    matmul_backward_input(NULL, &(InputGrad){dx, dy.x, w.x, n, in, out, NULL});
    check("   dx", dx, e, n * in);
    ref_product(e, dy.d, x.d, true, false, out, in, n);
    for (int i = 0; i < in * out; i++)
        e[i] += dw.d[i];
    matmul_weight_grads(NULL, &(WeightGrad){dw.x, dy.x, x.x, out, in, .fresh = false}, 1, n);
    check32("   dw", dw.x, e, in * out);
    ref_product(e, dy.d, x.d, true, false, out, in, n);
    for (int i = 0; i < in * out; i++)
        dw.x[i] = NAN;
    matmul_weight_grads(NULL, &(WeightGrad){dw.x, dy.x, x.x, out, in, .fresh = true}, 1, n);
    check32("   dw, begun anew", dw.x, e, in * out);
    ref_product(e, x.d, w.d, false, false, n, out, in);
    for (int i = 0; i < n * out; i++)
        e[i] = e[i] > 0 ? e[i] * e[i] : 0;
    matmul_relu2_forward(NULL, y, x.x, w.x, n, in, out);
    check("   relu^2, the product unrounded", y, e, n * out);
    double *stored = of_x(y, n * out);
    ref_product(wide, x.d, w.d, false, false, n, out, in); // x stands for the gradient here
    for (int i = 0; i < n * out; i++)
        wide[i] *= 2 * sqrt(stored[i]);
    matmul_relu2_backward(NULL, y, x.x, w.x, y, n, in, out);
    // Product and result are rounded: (1 + u)^2 - 1 = 2 u (1 + u / 2), u 2^-8.
    ok_at_most(worst_rounding(of_x(y, n * out), wide, n * out), 2 * (1 + 0x1p-9),
               "   relu^2 backward, in roundings");
}

// Sums of integers are exact, below 2^14 here, and so are the roots of squares: every bit of the gradient
// follows from the two roundings.
static void test_relu2_gradient_bits(void)
{
    enum { ROWS = 37, DEPTH = 40, COLS = 72 };
    pool_reset();
    floatX *dy = halves(ROWS * DEPTH), *w = halves(DEPTH * COLS), *y = halves(ROWS * COLS),
           *dpre = halves(ROWS * COLS);
    for (int i = 0; i < ROWS * DEPTH; i++)
        dy[i] = float_to_x((float)(i * 7 % 31 - 15));
    for (int i = 0; i < DEPTH * COLS; i++)
        w[i] = float_to_x((float)(i * 11 % 29 - 14));
    for (int i = 0; i < ROWS * COLS; i++)
        y[i] = float_to_x((float)((i % 16) * (i % 16)));
    matmul_relu2_backward(NULL, dpre, dy, w, y, ROWS, DEPTH, COLS);
    int wrong = 0, unlike_one_rounding = 0;
    for (int i = 0; i < ROWS * COLS; i++) {
        int sum = 0, factor = 2 * (i % 16);
        for (int k = 0; k < DEPTH; k++)
            sum += (int)x_to_float(dy[i / COLS * DEPTH + k]) * (int)x_to_float(w[k * COLS + i % COLS]);
        float once = x_to_float(float_to_x((float)(sum * factor))),
              twice = x_to_float(float_to_x(x_to_float(float_to_x((float)sum)) * (float)factor));
        wrong += x_to_float(dpre[i]) != twice;
        unlike_one_rounding += once != twice;
    }
    ok(wrong == 0 && unlike_one_rounding > 0,
       "relu^2 backward of integers: the product rounded first, %d wrong (one rounding: %d others)", wrong,
       unlike_one_rounding);
}

static void rope_test_tables(Tensor *c, Tensor *s, int positions)
{
    float frequency[E / 4];
    for (int j = 0; j < E / 4; j++)
        frequency[j] = powf(1.0f / 1024, (float)j / (E / 4 - 1));
    *c = random_tensor(positions * E / 4, 1);
    *s = random_tensor(positions * E / 4, 1);
    rope_tables(NULL, c->x, s->x, frequency, NULL, positions, E);
    double *ec = doubles(c->n), *es = doubles(c->n);
    for (int i = 0; i < c->n; i++) {
        double angle = (float)(i / (E / 4)) * frequency[i % (E / 4)]; // rounded to fp32
        ec[i] = cos(angle);
        es[i] = sin(angle);
        c->d[i] = x_to_float(c->x[i]);
        s->d[i] = x_to_float(s->x[i]);
    }
    check("rope tables: cos", c->x, ec, c->n);
    check("   sin", s->x, es, c->n);
}

static void test_qkv(void)
{
    pool_reset();
    Tensor c, s, q = random_tensor(NN, 1), k = random_tensor(NN, 1), v_raw = random_tensor(NN, 1),
                 table = random_tensor(9 * D, 1);
    Tensor dq = random_tensor(NN, 1), dk = random_tensor(NN, 1), dv = random_tensor(NN, 1);
    Tensor32 lambda = random_tensor32(2, 1);
    int32_t *tokens = random_tokens(N, 9);
    rope_test_tables(&c, &s, N);
    floatX *v = halves(NN), *dqkv = halves(3 * NN);
    float *rq = floats(N * H), *rk = floats(N * H), dlambda[2] = {0};
    double *eq = doubles(NN), *ek = doubles(NN), *ev = doubles(NN), *er = doubles(N * H),
           *e = doubles(3 * NN), edlambda[2] = {0};
    RefRope rope = {c.d, s.d, N, H, E};
    ref_norm_rope(&rope, eq, er, q.d);
    ref_norm_rope(&rope, ek, er, k.d);
    QkvForward f = {q.x, k.x, v, rq, rk, v_raw.x, table.x, tokens, lambda.x, c.x, s.x};
    qkv_forward(NULL, &f, N, H, E);
    for (int i = 0; i < NN; i++) {
        double embedded = table.d[tokens[i / D] * D + i % D];
        ev[i] = lambda.d[0] * v_raw.d[i] + lambda.d[1] * embedded;
        edlambda[0] += dv.d[i] * v_raw.d[i];
        edlambda[1] += dv.d[i] * embedded;
        e[i / D * 3 * D + 2 * D + i % D] = lambda.d[0] * dv.d[i];
    }
    check("qkv: q", q.x, eq, NN);
    check("   k", k.x, ek, NN);
    check("   v", v, ev, NN);
    for (int i = 0; i < NN; i++) {
        floatX *row = dqkv + i / D * 3 * D + i % D;
        row[0] = dq.x[i];
        row[D] = dk.x[i];
        row[2 * D] = dv.x[i];
    }
    qkv_backward(&(AttentionBackward){.forward = &(AttentionForward){.q = q.x, .k = k.x},
                                      .dqkv = dqkv,
                                      .dlambda = dlambda,
                                      .rstd_q = rq,
                                      .rstd_k = rk,
                                      .v_raw = v_raw.x,
                                      .value_embed = table.x,
                                      .tokens = tokens,
                                      .lambda = lambda.x,
                                      .cos = c.x,
                                      .sin = s.x},
                 N, H, E);
    ref_norm_rope_backward(&rope, eq, dq.d, of_x(q.x, NN), of_float(rq, N * H));
    ref_norm_rope_backward(&rope, ek, dk.d, of_x(k.x, NN), of_float(rk, N * H));
    for (int i = 0; i < NN; i++) {
        e[i / D * 3 * D + i % D] = eq[i];
        e[i / D * 3 * D + D + i % D] = ek[i];
    }
    check("   dqkv", dqkv, e, 3 * NN);
    check32("   lambda", dlambda, edlambda, 2);
}

// On the CPU the same bits as its two parts one after the other, also where v takes the place of v_raw.
static void test_qkv_product(void)
{
    pool_reset();
    Tensor c, s, x = random_tensor(NN, 1), w = random_tensor(3 * D * D, 0.1), table = random_tensor(9 * D, 1);
    Tensor32 lambda = random_tensor32(2, 1);
    int32_t *tokens = random_tokens(N, 9);
    floatX *parts = halves(3 * NN), *whole = halves(3 * NN), *v[2] = {halves(NN), halves(NN)};
    float *rstd[2] = {floats(2 * N * H), floats(2 * N * H)};
    size_t plane = NN * sizeof(floatX);
    rope_test_tables(&c, &s, N);
    matmul_forward(NULL, &(Product){parts, x.x, w.x, NULL, NULL, N, D, D, 3});
    QkvProductForward p = {whole,   v[1],   x.x,      w.x, rstd[1], rstd[1] + N * H,
                           table.x, tokens, lambda.x, c.x, s.x};
    QkvForward f = {parts,  parts + NN, v[0], rstd[0], rstd[0] + N * H, parts + 2 * NN, table.x,
                    tokens, lambda.x,   c.x,  s.x};
    qkv_forward(NULL, &f, N, H, E);
    qkv_product_forward(NULL, &p, N, H, E);
    ok(!memcmp(parts, whole, 3 * plane) && !memcmp(v[0], v[1], plane),
       "qkv with its product: q, k, v_raw and v");
    ok(!memcmp(rstd[0], rstd[1], 2 * N * H * sizeof(float)), "   rstd");
    p.v = whole + 2 * NN;
    qkv_product_forward(NULL, &p, N, H, E);
    ok(!memcmp(parts, whole, 2 * plane) && !memcmp(v[0], whole + 2 * NN, plane), "   v in place of v_raw");
}

// The same of the records of 2026: pairs of heads, key offset, a mixture; q and v in place. qk: width of a
// head of q and k
static void test_qkv_heads(int qk, bool fp8)
{
    pool_reset();
    size_t wide = (size_t)(H * qk), n = N * wide, rows = 2 * wide + D;
    Tensor c, s, x = random_tensor(NN, 1), w = random_tensor(rows * D, 0.1), extra = random_tensor(NN, 1);
    Tensor32 alpha = random_tensor32(1, 1);
    floatX *parts = halves(2 * n + NN), *whole = halves(2 * n + NN), *q = halves(n), *v = halves(NN),
           *k[2] = {halves(n + wide), halves(n + wide)};
    float *rstd[2] = {floats(2 * N * H), floats(2 * N * H)},
          scales[2] = {1.0f / E4M3_LARGEST, 0.1f / E4M3_LARGEST};
    uint8_t *x8 = (uint8_t *)floats(NN / 4 + 1), *w8 = (uint8_t *)floats(rows * D / 4 + 1);
    rope_test_tables(&c, &s, 2 * N);
    HeadsForward f =
        {qk,  q,   k[0], v,    rstd[0],           rstd[0] + N * H, parts, parts + n, parts + 2 * n,
         c.x, s.x, true, true, {.extra = extra.x}};
    QkvHeadsForward together = {.heads = f, .raw = whole, .alpha = alpha.x};
    floatX *planes[] = {parts, parts + n, parts + 2 * n};
    quantize_e4m3(NULL, x8, x.x, scales, N, D, QUANTIZE_QUOTIENT, false);
    quantize_e4m3(NULL, w8, w.x, scales + 1, (int)rows, D, QUANTIZE_QUOTIENT, false);
    for (int i = 0; i < 3; i++) {
        size_t at = (size_t)i * wide * D;
        int out = i < 2 ? (int)wide : D;
        if (fp8)
            matmul_fp8(NULL, planes[i], &(Fp8Product){x8, w8 + at, scales, scales + 1, N, D, out, alpha.x},
                       NULL);
        else
            matmul_forward(NULL, &(Product){planes[i], x.x, w.x + at, NULL, alpha.x, N, D, out, 1});
    }
    heads_forward(NULL, &f, N, H, E);
    if (fp8) {
        together.x8 = x8;
        together.w8 = w8;
        together.scale_x = scales;
        together.scale_w = scales + 1;
    } else {
        together.x = x.x;
        together.w = w.x;
    }
    together.heads.q = whole;
    together.heads.k = k[1];
    together.heads.v = whole + 2 * n;
    together.heads.rstd_q = rstd[1];
    together.heads.rstd_k = rstd[1] + N * H;
    qkv_heads_forward(&(ProductContext){NULL, NULL}, &together, N, H, E);
    ok(!memcmp(q, whole, n * sizeof(floatX)) && !memcmp(v, whole + 2 * n, NN * sizeof(floatX)) &&
           !memcmp(k[0], k[1], (n + wide) * sizeof(floatX)),
       "qkv of heads with its product%s, heads of %d: q, k and v", fp8 ? " in FP8" : "", qk);
    ok(!memcmp(rstd[0], rstd[1], 2 * N * H * sizeof(float)), "   rstd");
}

// The gradient of the raw q or k, in dqkv, from that of the rotated one, dy, where no head is rotated and
// rstd is 1: dx = dy - y mean(dy y). dy may be rounded on the way to dx, which is rounded, too; beside both
// roundings 1e-5 of the root mean square of `size`.
static void check_raw(const char *what, const floatX *got, const double *dy, const double *y,
                      const double *size, int n)
{
    double largest = 0;
    for (int i = 0; i < n; i++) {
        const double *dy_head = dy + i / E * E, *y_head = y + i / E * E;
        double mean = 0, means = 0;
        for (int j = 0; j < E; j++) {
            mean += dy_head[j] * y_head[j] / E;
            means += fabs(dy_head[j] * y_head[j]) / E;
        }
        double exact = dy[i] - y[i] * mean,
               rounded = 0x1p-8 * (fabs(dy[i]) + fabs(y[i]) * means + fabs(exact));
        largest = larger_error(largest, fabs(x_to_float(got[i / D * 3 * D + i % D]) - exact) - rounded);
    }
    ok_at_most(largest / sqrt(inner(size, size, n) / n), 1e-5, what);
}

// Documents of the lengths 1, 2, 3, ..., the rest in the last; the table as if more could come.
static int many_documents(int32_t *cu, int n)
{
    int documents = 0;
    for (int at = 0; at < n; at += documents)
        cu[documents++] = at;
    cu[documents] = n;
    return documents;
}

static void test_attention(int n, int window)
{
    pool_reset();
    int count = n * D, *cu = take((size_t)n + 1, sizeof *cu), documents = many_documents(cu, n);
    int32_t *table = take((size_t)attention_table_ints(n, documents), sizeof *table);
    int slots = attention_table_build(table, cu, documents, n, documents);
    Tensor q = random_tensor(count, 1.7), k = random_tensor(count, 1.7), v = random_tensor(count, 1),
           dyg = random_tensor(count, 1), h = random_tensor(count, 1), w = random_tensor(H * 12, 1);
    floatX *yg = halves(count), *dqkv = halves(3 * count), *dv = halves(count), *cosines = halves(n * E / 4),
           *sines = halves(n * E / 4);
    float *lse = floats(n * H), *dgate = floats(n * H), *dw = floats(H * 12), scale = 0.2f, dlambda[2] = {0},
          lambda[2] = {0.75f, 0}, *rstd = floats(n * H);
    Attention a = {cu, documents, n, H, E, window, scale, E};
    double *ey = doubles(count), *el = doubles(n * H), *eq = doubles(count), *ek = doubles(count),
           *ev = doubles(count);
    AttentionForward f = {yg, lse, q.x, k.x, v.x, h.x, w.x, table, slots, window, scale, 12};
    attention_forward(NULL, &f, n, H, E);
    ref_attention(&a, ey, el, NULL, q.d, k.d, v.d);
    ref_gate(ey, ey, h.d, w.d, n, H, E);
    char what[80];
    snprintf(what, sizeof what, "attention, %d documents, window %d: yg", documents, window);
    check(what, yg, ey, count);
    check32("   lse", lse, el, n * H);
    for (int i = 0; i < n * H; i++)
        rstd[i] = 1;
    for (int i = 0; i < n * E / 4; i++)
        cosines[i] = float_to_x(1);
    AttentionBackward b = {.forward = &f,
                           .dqkv = dqkv,
                           .dv = dv,
                           .dlambda = dlambda,
                           .dgate = dgate,
                           .dgate_w = dw,
                           .dyg = dyg.x,
                           .rstd_q = rstd,
                           .rstd_k = rstd,
                           .v_raw = v.x,
                           .lambda = lambda,
                           .cos = cosines,
                           .sin = sines,
                           .scratch = take(attention_scratch_bytes(n, H, E), 1)};
    attention_backward(NULL, &b, n, H, E);
    double *dy = doubles(count), *y = doubles(count), *stored = of_x(yg, count), *eg = doubles(n * H),
           *ew = doubles(H * 12);
    for (int i = 0; i < n * H; i++) {
        double sig = ref_sigmoid(inner(h.d + i / H * D, w.d + i % H * 12, 12));
        for (int j = i * E; j < (i + 1) * E; j++) {
            dy[j] = sig * dyg.d[j];
            y[j] = stored[j] / sig;
        }
        eg[i] = inner(dyg.d + i * E, stored + i * E, E) * (1 - sig);
        for (int c = 0; c < 12; c++)
            ew[i % H * 12 + c] += eg[i] * h.d[i / H * D + c];
    }
    ref_attention_backward(&a, &(RefQkv){eq, ek, ev}, dy, y, el, &(RefQkv){q.d, k.d, v.d});
    bool alone =
        n == 1 || window == 0; // a token that sees itself only: dq and dk hold what is left of yg's rounding
    check_raw("   gradient of q", dqkv, eq, q.d, alone ? ev : eq, count);
    check_raw("   of k", dqkv + D, ek, k.d, alone ? ev : ek, count);
    check("   dv", dv, ev, count);
    for (int i = 0; i < count; i++) {
        stored[i] = x_to_float(dqkv[i / D * 3 * D + 2 * D + i % D]);
        ev[i] = lambda[0] * x_to_float(dv[i]);
    }
    ok_at_most(worst_rounding(stored, ev, count), 1, "   of v, from dv, in roundings");
    check32("   dgate", dgate, eg, n * H);
    check32("   dgate_w", dw, ew, H * 12);
}

// The reference rounds logits and their gradient as the contract says. Where fp32 and double lie on two sides
// of a tie they round apart, by a unit in the last place: 2^-7 of the value. fp32 errors are a few 2^-24 and
// the spacing is 2^-7, so that about one value in 2^14 meets a tie; in norm that is 2^-7 * 2^-7, once for the
// logits and once for the gradient. dx has its own rounding besides: uniform within 2^-8, so 2^-8 / sqrt(3)
// in norm. FP8: one in 2^5 of the gradients that differ by a bf16 unit are parted further, by an e5m2 tie:
// 2^-2 * sqrt(2^-14 * 2^-5).
#define TIES (2 * 0x1p-14)
#define TIES_E5M2 (0x1p-2 * 0.0014)
#define BF16_NORM (0x1p-8 / 1.732)

static void test_head(HeadMode mode, const HeadSpec *spec, int num_targets, int n, int vocab)
{
    pool_reset();
    bool fp8 = mode == HEAD_FP8;
    const float weight[MAX_TARGETS] = {1, 0.5f, 0.2f};
    HeadScales one = {1, 1, 1}, scale = fp8 ? head_scales(spec, D) : one;
    int32_t *targets = random_tokens(n, vocab);
    targets[n / 2 + 1] = targets[n / 2]; // two targets of a row are one token
    Tensor x = random_tensor(n * D, 1.7), w = random_tensor(vocab * D, 0.5);
    floatX *dx = halves(n * D);
    float loss = 0, eval = 0, *dw = floats(vocab * D);
    void *w8 = take(head_weight_bytes(mode, vocab, D) + 1, 1);
    double exact = 0, exact_eval = 0, *logits = doubles(vocab), *g = doubles(n * vocab), *ex = doubles(n * D),
           *ew = doubles(vocab * D);
    if (fp8)
        head_quantize(NULL, spec, w8, w.x, vocab, D);
    HeadLoss h = {.spec = spec,
                  .mode = mode,
                  .loss = &loss,
                  .dx = dx,
                  .dw = dw,
                  .x = x.x,
                  .w = w.x,
                  .w8 = w8,
                  .targets = targets,
                  .num_targets = num_targets,
                  .target_weight = weight,
                  .scratch = take(head_train_scratch_bytes(mode, n, D, vocab), 1),
                  .N = n,
                  .d = D,
                  .Vp = vocab};
    head_loss_train(NULL, &h);
    h.loss = &eval;
    head_loss_eval(NULL, &h);
    for (int t = 0; t < n; t++) {
        for (int j = 0; j < vocab; j++)
            logits[j] = inner(x.d + t * D, w.d + j * D, D);
        exact_eval += ref_softcap_loss(spec, logits, targets + t, weight, 1, vocab, NULL);
    }
    for (int i = 0; i < n * D && fp8; i++)
        x.d[i] = (double)scale.x * ref_e4m3((double)((float)x.d[i] / scale.x));
    for (int i = 0; i < vocab * D && fp8; i++)
        w.d[i] = (double)scale.w * ref_e4m3((double)((float)w.d[i] / scale.w));
    for (int t = 0; t < n; t++) {
        for (int j = 0; j < vocab; j++)
            logits[j] = x_to_float(float_to_x((float)inner(x.d + t * D, w.d + j * D, D)));
        int count = t + num_targets <= n ? num_targets : n - t;
        exact += ref_softcap_loss(spec, logits, targets + t, weight, count, vocab, g + t * vocab);
    }
    for (int i = 0; i < n * vocab; i++) {
        g[i] = x_to_float(float_to_x((float)g[i]));
        if (fp8)
            g[i] = (double)scale.g * ref_e5m2((double)((float)g[i] / scale.g));
    }
    ref_product(ex, g, w.d, false, false, n, D, vocab);
    ref_product(ew, g, x.d, true, false, vocab, D, n);
    ok_at_most(fabs(loss - exact) / exact, 1e-6, fp8 ? "FP8 head: loss" : "head: loss");
    ok_at_most(fabs(eval - exact_eval) / exact_eval, 1e-6, "   loss in evaluation, logits unrounded");
    double limit = TIES + (fp8 ? TIES_E5M2 : 0);
    ok_at_most(relative_error(of_x(dx, n * D), ex, n * D), BF16_NORM + limit, "   dx");
    ok_at_most(relative_error(of_float(dw, vocab * D), ew, vocab * D), limit, "   dw");
}

// In units of the last place of the exact result.
static void test_vmath(void)
{
    double worst_exp = 0, worst_sigmoid = 0;
    for (int i = 0; i <= 2000000; i++) {
        float x = -87.3f + (float)i * (176.0f / 2000000);
        double exact = exp(x), sig = ref_sigmoid(x);
        worst_exp = larger_error(worst_exp, fabs(fast_exp(x) - exact) / ldexp(1, ilogb(exact) - 23));
        if (x < 80 && x > -80)
            worst_sigmoid = larger_error(worst_sigmoid, fabs(sigmoid(x) - sig) / ldexp(1, ilogb(sig) - 23));
    }
    ok_at_most(worst_exp, 1.5, "exp, in units of the last place");
    // relative to the value: 1 for e^-x, 1/2 for the sum, which a value just below a power of two counts
    // double; 1/2 for the quotient
    ok_at_most(worst_sigmoid, 3.5, "sigmoid, in units of the last place");
    ok(fast_exp(0) == 1 && fast_exp(-88) == 0 && fast_exp(-INFINITY) == 0 && isinf(fast_exp(89)) &&
           isinf(fast_exp(INFINITY)) && isnan(fast_exp(NAN)),
       "exp at its ends");
    ok(sigmoid(-INFINITY) == 0 && sigmoid(INFINITY) == 1 && sigmoid(0) == 0.5f && isnan(sigmoid(NAN)),
       "sigmoid at its ends");
}

// A library older than the processor takes kernels without AVX by itself.
static void test_blas_kernels(void)
{
#if defined HAVE_OPENBLAS && defined __x86_64__
    const char *asked = getenv("OPENBLAS_CORETYPE");
    if (asked || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return skip("OpenBLAS is told what to take, or there is no AVX2");
    const char *kernels = blas()->corename();
    ok(strcmp(kernels, "Prescott"), "OpenBLAS takes kernels of this processor's: %s", kernels);
#else
    skip("built without OpenBLAS, or not for x86-64");
#endif
}

int main(void)
{
    test_blas_kernels();
#ifdef _OPENMP
    omp_set_num_threads(omp_get_max_threads() > 4 ? omp_get_max_threads()
                                                  : 4); // more than cores: pieces finish in any order
#endif
    OpSizes sizes = {.tokens = 700,
                     .eval_tokens = 700,
                     .dim = D,
                     .heads = H,
                     .mlp_dim = 600,
                     .vocab_padded = 2000,
                     .fp8_head = true};
    backend_open(0);
    backend_reserve(&sizes);
    PART(test_vmath());
    PART(test_embedding());
    PART(test_mix(true));
    PART(test_mix(false));
    PART(test_rmsnorm());
    PART(test_products(1, 12, 5));
    PART(test_products(131, 64, 192));
    PART(test_products(70, 520, 33));
    PART(test_relu2_gradient_bits());
    PART(test_qkv());
    PART(test_qkv_product());
    PART(test_qkv_heads(E, false));
    PART(test_qkv_heads(3 * E / 4, false));
    PART(test_qkv_heads(E, true));
    PART(test_qkv_heads(E / 2, true));
    PART(test_attention(1, 5));
    PART(test_attention(253, 0));
    PART(test_attention(253, 9));
    PART(test_attention(660, 1000));
    PART(test_head(HEAD_BF16, &head_plain, 1, 70, VOCAB));
    PART(test_head(HEAD_BF16, &head_plain, 1, 1, VOCAB));
    PART(test_head(HEAD_FP8, &head_plain, 1, 70, 1100));
    PART(test_head(HEAD_BF16, &head_shifted, 3, 70, VOCAB));
    PART(test_head(HEAD_FP8, &head_shifted, 2, 70, 1100));
    backend_close();
    return tap_done();
}
