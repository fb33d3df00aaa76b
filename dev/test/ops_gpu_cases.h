// The cases of test_ops_gpu.c: one for each op, its buffers and its call. Pointers in `p` stand in the order
// of the add() calls.
#pragma once

#define SIZES \
    int N = c->z.N, H = c->z.H, e = c->z.e, d = c->d, F = c->z.F, Vp = c->z.Vp; \
    (void)N, (void)H, (void)e, (void)d, (void)F, (void)Vp
#define RUN(name) static void run_##name(const Ops *o, void **p, const Case *c)
#define DESCRIBE(name) static void describe_##name(Case *c)
enum { LAYERS = 12, NUM = 64 };

// ---- embedding --------------------------------------------------------------------------------------------

// Few distinct tokens, one of them often: rows of the table get long sums.
static void fix_tokens(Case *c, int at)
{
    for (int64_t k = 0; k < c->buffer[at].count; k++)
        if (k % 3 == 0)
            c->master[at][k] = 7;
}

DESCRIBE(embed_forward)
{
    SIZES;
    add(c, "x0", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "rstd", FP32, OUT, N, 0);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "embed", FLOATX, IN, (int64_t)Vp * d, 2);
    add(c, "gate", FLOATX, IN, 12, 1);
    add(c, "lambda", FP32, IN, 1, 1);
}
RUN(embed_forward)
{
    SIZES;
    o->embed_forward(stream, &(EmbedForward){p[0], p[1], p[2], p[3], p[4], p[5]}, N, d);
}

DESCRIBE(embed_backward)
{
    SIZES;
    add(c, "de", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "dgate", FP32, INOUT, 12, 1);
    add(c, "dlambda", FP32, INOUT, 1, 1);
    add(c, "dx", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "dx0", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "x0", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "rstd", FP32, IN, N, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "embed", FLOATX, IN, (int64_t)Vp * d, 2);
    add(c, "gate", FLOATX, IN, 12, 1);
    add(c, "lambda", FP32, IN, 1, 1);
    // Variances of dlambda's N d terms: rstd 1/3, dx + dx0 2/3, the embedding 4/3, the square of the gate
    // some 0.3.
    c->buffer[2].spread = 0.3 * sqrt((double)N * d);
}
RUN(embed_backward)
{
    SIZES;
    EmbedBackward a = {p[0], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[1], p[2]};
    o->embed_backward(stream, &a, N, d);
}

// Buffers 2..5: order, row_token, row_start, num_rows, from the tokens in buffer 6.
static void fix_embedding_grad(Case *c)
{
    int N = c->z.N, rows = 0, filled = 0;
    float *order = c->master[2], *token = c->master[3], *start = c->master[4];
    if (c->variant == 0)
        fix_tokens(c, 6);
    if (c->variant == 2)
        for (int i = 0; i < N; i++)
            c->master[6][i] = 3; // one token everywhere
    int *first = xcalloc((size_t)c->z.Vp + 1, sizeof *first);
    for (int i = 0; i < N; i++)
        first[(int)c->master[6][i] + 1]++;
    for (int t = 0; t < c->z.Vp; t++) {
        if (first[t + 1]) {
            token[rows] = (float)t;
            start[rows++] = (float)filled;
        }
        filled += first[t + 1];
        first[t + 1] = filled;
    }
    start[rows] = (float)N;
    c->master[5][0] = (float)rows;
    for (int i = 0; i < N; i++)
        order[first[(int)c->master[6][i]]++] = (float)i;
    free(first);
}
DESCRIBE(embedding_grad)
{
    SIZES;
    add(c, "dtable", FP32, INOUT, (int64_t)Vp * d, 1);
    add(c, "g", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "order", INT32, IN, N, 1);
    add(c, "row_token", INT32, IN, N, 1);
    add(c, "row_start", INT32, IN, N + 1, 1);
    add(c, "num_rows", INT32, IN, 1, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "scale", FP32, IN, 1, 1);
}
RUN(embedding_grad)
{
    SIZES;
    TokenRows rows = {p[2], p[3], p[4], p[5]};
    o->embedding_grad(stream, p[0], p[1], c->variant == 1 ? NULL : p[7], &rows, N, d);
}

// ---- residual stream --------------------------------------------------------------------------------------

enum { TERMS = 3 * (LAYERS + 1) };
// All forms that a record's mixes have: nothing, one scalar, one with a gate, a constant, a negative one.
static void set_terms(Coefficient *terms)
{
    for (int i = 0; i < TERMS; i++) {
        int layer = i / 3, form = i % 3;
        terms[i] = (Coefficient){.factor = 1, .scalar = LAYERS + 2 * layer + form, .gate = -1};
        if (form == 2)
            terms[i] = (Coefficient){.factor = layer % 2, .scalar = LAYERS + 2 * layer, .gate = layer / 2};
    }
    terms[TERMS - 3] = (Coefficient){1, -1, -1};
    terms[TERMS - 2] = (Coefficient){-1, 5 * LAYERS + 1, -1};
}
DESCRIBE(coefficients_forward)
{
    add(c, "coef", FP32, OUT, TERMS, 0);
    add(c, "scalars", FP32, IN, NUM, 1);
}
RUN(coefficients_forward)
{
    (void)c;
    Coefficient terms[TERMS];
    set_terms(terms);
    o->coefficients_forward(stream, p[0], p[1], terms, TERMS);
}
DESCRIBE(coefficients_backward)
{
    add(c, "dscalars", FP32, INOUT, NUM, 1);
    add(c, "dcoef", FP32, INOUT, TERMS, 1);
    add(c, "scalars", FP32, IN, NUM, 1);
}
RUN(coefficients_backward)
{
    (void)c;
    Coefficient terms[TERMS];
    set_terms(terms);
    o->coefficients_backward(stream, p[0], p[1], p[2], terms, TERMS);
}

// Variants: 0 with skip, 1 without, 2 only h wanted.
DESCRIBE(mix_forward)
{
    SIZES;
    add(c, "x_out", FLOATX, c->variant == 2 ? IN : OUT, (int64_t)N * d, 1);
    add(c, "h", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "rstd", FP32, OUT, N, 0);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 2);
    add(c, "x0", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "skip", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "coef", FP32, IN, 3, 1);
}
RUN(mix_forward)
{
    SIZES;
    MixForward a = {c->variant == 2 ? NULL : p[0], p[1], p[2], p[3], p[4],
                    c->variant == 0 ? p[5] : NULL, p[6]};
    o->mix_rmsnorm_forward(stream, &a, N, d);
}

// h and rstd as forward leaves them, because a backend may use either h or what it was computed from.
static void fix_mix_backward(Case *c)
{
    enum { H_ROW = 7, RSTD, X, X0, SKIP, COEF };
    const float *coef = c->master[COEF];
    int N = c->z.N, d = c->d;
#pragma omp parallel for
    for (int t = 0; t < N; t++) {
        float *h = c->master[H_ROW] + (int64_t)t * d;
        double squares = 0;
        for (int i = 0; i < d; i++) {
            int64_t at = (int64_t)t * d + i;
            double skip = c->variant == 1 ? 0 : (double)coef[2] * (double)c->master[SKIP][at];
            double v = (double)coef[0] * (double)c->master[X][at] +
                       (double)coef[1] * (double)c->master[X0][at] + skip;
            squares += v * v;
            h[i] = (float)v;
        }
        double rstd = 1 / sqrt(squares / d + 0x1p-23);
        c->master[RSTD][t] = (float)rstd;
        for (int i = 0; i < d; i++)
            h[i] *= c->master[RSTD][t];
    }
}

// Variants: 0 everything; 1 no skip, no dx_out, no gates, dx0 written; 2 skip written where dx_add is read,
// dx in place of dx_out.
DESCRIBE(mix_backward)
{
    SIZES;
    int64_t n = (int64_t)N * d;
    add(c, "dx", FLOATX, c->variant == 2 ? INOUT : OUT, n, 1);
    add(c, "dx0", FLOATX, c->variant == 1 ? OUT : INOUT, n, 1);
    add(c, "dskip", FLOATX, c->variant == 1 ? IN : OUT, n, 1);
    add(c, "dcoef", FP32, INOUT, 3, 100);
    add(c, "dx_out", FLOATX, IN, n, 1);
    add(c, "dh", FLOATX, IN, n, 1);
    add(c, "dx_add", FLOATX, IN, n, 1);
    add(c, "h", FLOATX, IN, n, 1.7);
    add(c, "rstd", FP32, IN, N, 1);
    add(c, "x", FLOATX, IN, n, 2);
    add(c, "x0", FLOATX, IN, n, 1);
    add(c, "skip", FLOATX, IN, n, 1);
    add(c, "coef", FP32, IN, 3, 1);
    add(c, "dgate", FP32, IN, (int64_t)N * H, 1);
    add(c, "gate_w", FLOATX, IN, 12 * (int64_t)H, 1);
}
RUN(mix_backward)
{
    SIZES;
    int v = c->variant;
    MixBackward a = {.dx = p[0],
                     .dx0 = p[1],
                     .dskip = v == 1 ? NULL : p[2],
                     .dcoef = p[3],
                     .dx_out = v == 0   ? p[4]
                               : v == 1 ? NULL
                                        : p[0],
                     .dh = p[5],
                     .dx_add = v == 0   ? p[6]
                               : v == 1 ? NULL
                                        : p[2],
                     .h = p[7],
                     .rstd = p[8],
                     .x = p[9],
                     .x0 = p[10],
                     .skip = v == 1 ? NULL : p[11],
                     .coef = p[12],
                     .dgate = v == 1 ? NULL : p[13],
                     .gate_w = p[14],
                     .heads = H,
                     .accumulate_dx0 = v != 1};
    o->mix_rmsnorm_backward(stream, &a, N, d);
}

DESCRIBE(rmsnorm_forward)
{
    SIZES;
    add(c, "h", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "rstd", FP32, OUT, N, 0);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 3);
}
RUN(rmsnorm_forward)
{
    SIZES;
    o->rmsnorm_forward(stream, p[0], p[1], p[2], N, d);
}
DESCRIBE(rmsnorm_backward)
{
    SIZES;
    add(c, "dx", FLOATX, INOUT, (int64_t)N * d, 1);
    add(c, "dh", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "h", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "rstd", FP32, IN, N, 1);
}
RUN(rmsnorm_backward)
{
    SIZES;
    o->rmsnorm_backward(stream, p[0], p[1], p[2], p[3], N, d);
}

// ---- products ---------------------------------------------------------------------------------------------

// Variants: 0 plain, 1 residual in place, 2 residual elsewhere, 3 three planes.
DESCRIBE(matmul)
{
    SIZES;
    int planes = c->variant == 3 ? 3 : 1;
    add(c, "y", FLOATX, c->variant == 1 ? INOUT : OUT, (int64_t)planes * N * F, 1);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "w", FLOATX, IN, (int64_t)planes * F * d, 1);
    add(c, "residual", FLOATX, IN, (int64_t)N * F, 3);
}
RUN(matmul)
{
    SIZES;
    const void *residual = c->variant == 1 ? p[0] : c->variant == 2 ? p[3] : NULL;
    o->matmul_forward(&on_stream, p[0], p[1], p[2], residual, N, d, F, c->variant == 3 ? 3 : 1);
}
DESCRIBE(matmul_down) // from the MLP's width to the model's: the greater depth
{
    SIZES;
    add(c, "y", FLOATX, c->variant == 1 ? INOUT : OUT, (int64_t)N * d, 1);
    add(c, "x", FLOATX, IN, (int64_t)N * F, 1);
    add(c, "w", FLOATX, IN, (int64_t)F * d, 1);
    add(c, "residual", FLOATX, IN, (int64_t)N * d, 3);
}
RUN(matmul_down)
{
    SIZES;
    o->matmul_forward(&on_stream, p[0], p[1], p[2],
                      c->variant == 1   ? p[0]
                      : c->variant == 2 ? p[3]
                                        : NULL,
                      N, F, d, 1);
}
DESCRIBE(matmul_input)
{
    SIZES;
    add(c, "dx", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "dy", FLOATX, IN, (int64_t)N * F, 1);
    add(c, "w", FLOATX, IN, (int64_t)F * d, 1);
}
RUN(matmul_input)
{
    SIZES;
    o->matmul_backward_input(&on_stream, p[0], p[1], p[2], N, d, F);
}
// Variant 1: two products at once; 2: the first of them begins anew; 3: a single one does.
DESCRIBE(matmul_weight)
{
    SIZES;
    bool fresh = c->variant >= 2, two = c->variant == 1 || c->variant == 2;
    add(c, "dw", FP32, fresh ? OUT : INOUT, (int64_t)d * F, 1);
    add(c, "a", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "b", FLOATX, IN, (int64_t)N * F, 1);
    add(c, "dw2", FP32, two ? INOUT : IN, (int64_t)F * d, 1);
}
RUN(matmul_weight)
{
    SIZES;
    bool fresh = c->variant >= 2, two = c->variant == 1 || c->variant == 2;
    WeightGrad both[WEIGHT_GRADS] = {{p[0], p[1], p[2], d, F, fresh}, {p[3], p[2], p[1], F, d, false}};
    o->matmul_weight_grads(&on_stream, both, two ? WEIGHT_GRADS : 1, N);
}
DESCRIBE(relu2_forward)
{
    SIZES;
    add(c, "y", FLOATX, OUT, (int64_t)N * F, 0);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "w", FLOATX, IN, (int64_t)F * d, 0.1);
}
RUN(relu2_forward)
{
    SIZES;
    o->matmul_relu2_forward(&on_stream, p[0], p[1], p[2], N, d, F);
}

static void fix_squares(Case *c) // y is never negative, and half of it zero
{
    for (int64_t k = 0; k < c->buffer[3].count; k++)
        c->master[3][k] = c->master[3][k] > 0 ? c->master[3][k] : 0;
}
DESCRIBE(relu2_backward)
{
    SIZES;
    add(c, "dpre", FLOATX, OUT, (int64_t)N * F, 0);
    add(c, "dy", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "w", FLOATX, IN, (int64_t)F * d, 0.1);
    add(c, "y", FLOATX, IN, (int64_t)N * F, 2);
}
RUN(relu2_backward)
{
    SIZES;
    o->matmul_relu2_backward(&on_stream, p[0], p[1], p[2], p[3], N, d, F);
}

// ---- attention's surroundings -----------------------------------------------------------------------------

static void fix_frequencies(Case *c)
{
    for (int j = 0; j < c->z.e / 4; j++)
        c->master[2][j] = powf(1.0f / 1024, (float)j / (float)(c->z.e / 4 - 1));
}
DESCRIBE(rope)
{
    SIZES;
    add(c, "cos", FLOATX, OUT, (int64_t)N * (e / 4), 0);
    add(c, "sin", FLOATX, OUT, (int64_t)N * (e / 4), 0);
    add(c, "frequency", HOST_FLOAT, IN, e / 4, 1);
}
RUN(rope)
{
    SIZES;
    o->rope_tables(stream, p[0], p[1], p[2], N, e);
}

static void fix_angles(Case *c, int cos_at, int sin_at)
{
    for (int64_t k = 0; k < c->buffer[cos_at].count; k++) {
        double angle = 3 * c->master[cos_at][k];
        c->master[cos_at][k] = to_bf16_value(cos(angle));
        c->master[sin_at][k] = to_bf16_value(sin(angle));
    }
}

static void fix_qkv_forward(Case *c) { fix_angles(c, 9, 10); }
DESCRIBE(qkv_forward) // variant 1: no value embedding
{
    SIZES;
    int64_t n = (int64_t)N * d, angles = (int64_t)N * (e / 4);
    add(c, "q", FLOATX, INOUT, n, 3);
    add(c, "k", FLOATX, INOUT, n, 3);
    add(c, "v", FLOATX, OUT, n, 0);
    add(c, "rstd_q", FP32, OUT, (int64_t)N * H, 0);
    add(c, "rstd_k", FP32, OUT, (int64_t)N * H, 0);
    add(c, "v_raw", FLOATX, IN, n, 1);
    add(c, "ve", FLOATX, IN, (int64_t)Vp * d, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "lambda", FP32, IN, 2, 1);
    add(c, "cos", FLOATX, IN, angles, 1);
    add(c, "sin", FLOATX, IN, angles, 1);
}
RUN(qkv_forward)
{
    SIZES;
    QkvForward a = {p[0], p[1], p[2], p[3], p[4], p[5], c->variant ? NULL : p[6], p[7], p[8], p[9], p[10]};
    o->qkv_forward(stream, &a, N, H, e);
}

static void fix_qkv_product(Case *c) { fix_angles(c, 9, 10); }
DESCRIBE(qkv_product) // variants 1, 3: no value embedding; 2, 3: v in place of v_raw
{
    SIZES;
    int64_t n = (int64_t)N * d, angles = (int64_t)N * (e / 4);
    add(c, "qkv", FLOATX, OUT, 3 * n, 0);
    add(c, "v", FLOATX, c->variant < 2 ? OUT : IN, n, 1);
    add(c, "rstd_q", FP32, OUT, (int64_t)N * H, 0);
    add(c, "rstd_k", FP32, OUT, (int64_t)N * H, 0);
    add(c, "x", FLOATX, IN, n, 1.7);
    add(c, "w", FLOATX, IN, (int64_t)3 * d * d, 0.1);
    add(c, "ve", FLOATX, IN, (int64_t)Vp * d, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "lambda", FP32, IN, 2, 1);
    add(c, "cos", FLOATX, IN, angles, 1);
    add(c, "sin", FLOATX, IN, angles, 1);
}
RUN(qkv_product)
{
    SIZES;
    size_t last = 2 * (size_t)N * (size_t)d * (o == &ops[TRUTH] ? sizeof(float) : sizeof(bf16));
    void *v = c->variant < 2 ? p[1] : (char *)p[0] + last;
    QkvProductForward a = {p[0], v,    p[4], p[5], p[2], p[3], c->variant % 2 ? NULL : p[6],
                           p[7], p[8], p[9], p[10]};
    o->qkv_product_forward(stream, &a, N, H, e);
}

// ---- head -------------------------------------------------------------------------------------------------

// Of a variant: bit 0: FP8; bit 1: other constants and several targets, of which some are the same token.
static const HeadSpec *head_spec(const Case *c) { return c->variant & 2 ? &head_shifted : &head_plain; }

static void fix_head(Case *c)
{
    for (int i = 0; i < c->count; i++) {
        for (int64_t k = 3; !strcmp(c->buffer[i].name, "targets") && k < c->buffer[i].count; k += 5)
            c->master[i][k] = c->master[i][k - 1];
        for (int64_t k = 0; !strcmp(c->buffer[i].name, "weight") && k < c->buffer[i].count; k++)
            c->master[i][k] = k == 0 ? 1 : 0.5f / (float)k;
    }
}

DESCRIBE(head_train)
{
    SIZES;
    add(c, "loss", FP32, OUT, 1, 0);
    add(c, "dx", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "dw", FP32, INOUT, (int64_t)Vp * d, 1e-3);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "w", FLOATX, IN, (int64_t)Vp * d, 0.2);
    add(c, "w8", WEIGHT8, OUT, 0, 0);
    add(c, "targets", INT32, IN, N, Vp);
    add(c, "weight", FP32, IN, c->variant & 2 ? MAX_TARGETS : 1, 1);
    add(c, "scratch", HEAD_SCRATCH, OUT, 0, 0);
}
RUN(head_train)
{
    SIZES;
    HeadMode mode = c->variant & 1 ? HEAD_FP8 : HEAD_BF16;
    if (mode == HEAD_FP8)
        o->head_quantize(stream, head_spec(c), p[5], p[4], Vp, d);
    HeadLoss a = {.spec = head_spec(c),
                  .mode = mode,
                  .loss = p[0],
                  .dx = p[1],
                  .dw = p[2],
                  .x = p[3],
                  .w = p[4],
                  .w8 = p[5],
                  .targets = p[6],
                  .num_targets = (int)c->buffer[7].count,
                  .target_weight = p[7],
                  .scratch = p[8],
                  .N = N,
                  .d = d,
                  .Vp = Vp};
    o->head_loss_train(stream, &a);
}
DESCRIBE(head_eval)
{
    SIZES;
    add(c, "loss", FP32, OUT, 1, 0);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "w", FLOATX, IN, (int64_t)Vp * d, 0.2);
    add(c, "targets", INT32, IN, N, Vp);
    add(c, "scratch", HEAD_SCRATCH, OUT, 0, 0);
}
RUN(head_eval)
{
    SIZES;
    HeadLoss a = {.spec = c->variant ? &head_shifted : &head_plain,
                  .loss = p[0],
                  .x = p[1],
                  .w = p[2],
                  .targets = p[3],
                  .scratch = p[4],
                  .N = N,
                  .d = d,
                  .Vp = Vp};
    o->head_loss_eval(stream, &a);
}
DESCRIBE(head_logits)
{
    SIZES;
    int rows = N < 3 ? N : 3;
    add(c, "z", FP32, OUT, (int64_t)rows * Vp, 0);
    add(c, "x", FLOATX, IN, (int64_t)rows * d, 1.7);
    add(c, "w", FLOATX, IN, (int64_t)Vp * d, 0.2);
}
RUN(head_logits)
{
    SIZES;
    o->head_logits(stream, c->variant ? &head_shifted : &head_plain, p[0], p[1], p[2], N < 3 ? N : 3, d, Vp);
}

// ---- optimizers -------------------------------------------------------------------------------------------

enum { STEP_FLOATS = sizeof(StepParams) / sizeof(float) };
static const AdamRule adam_rule = {2, 0.65f, 0.95f, 1e-8f, 0.35f, 0.05f};

static void set_step(float *step)
{
    StepParams params = {.grad_scale = 0.125f,
                         .muon_momentum = 0.9f,
                         .rule = {[0] = {0.06f, 0.036f}, [1] = {0.03f, 0.036f}, [2] = {0.75f, 0}}};
    memcpy(step, &params, sizeof params);
}

static void fix_adam(Case *c)
{
    set_step(c->master[4]);
    for (int64_t k = 0; k < c->buffer[2].count; k++)
        c->master[2][k] = fabsf(c->master[2][k]);
}
DESCRIBE(adam)
{
    SIZES;
    Kind kind = c->variant ? FP32 : FLOATX;
    int64_t n = (int64_t)N * d + 5;
    add(c, "p", kind, INOUT, n, 1);
    add(c, "m", kind, INOUT, n, 0.1);
    add(c, "v", kind, INOUT, n, 0.01);
    add(c, "grad", FP32, INOUT, n, 1);
    add(c, "step", FP32, IN, STEP_FLOATS, 1);
}
RUN(adam)
{
    int64_t n = c->buffer[0].count;
    if (c->variant)
        o->adam_update_fp32(stream, p[0], p[1], p[2], p[3], p[4], adam_rule, n);
    else
        o->adam_update(stream, p[0], p[1], p[2], p[3], p[4], adam_rule, n);
}

static void fix_momentum(Case *c) { set_step(c->master[2]); }
DESCRIBE(momentum)
{
    SIZES;
    add(c, "u", FP32, INOUT, (int64_t)N * d + 3, 1);
    add(c, "momentum", FP32, INOUT, (int64_t)N * d + 3, 1);
    add(c, "step", FP32, IN, STEP_FLOATS, 1);
}
RUN(momentum) { o->normuon_momentum(stream, p[0], p[1], p[2], c->buffer[0].count); }

// Variants: 0 bf16 O, per column; 1 fp16, per row; 2 fp32, per column; 3 bf16, odd shape and no fp32 weight,
// as the gates are. In 2 the GPU is given no gradient buffer to clear.
static void update_shape(const Case *c, int *rows, int *cols, int *batch, bool *per_column)
{
    *rows = c->variant == 1 ? c->z.F : c->variant == 3 ? c->z.H : c->d;
    *cols = c->variant == 1 ? c->d : c->variant == 3 ? 13 : c->z.F;
    *batch = c->variant == 3 ? 11 : 3;
    *per_column = c->variant != 1;
}

static void fix_update(Case *c)
{
    set_step(c->master[5]);
    for (int64_t k = 0; k < c->buffer[3].count; k++)
        c->master[3][k] = fabsf(c->master[3][k]);
    for (int64_t k = 0; c->variant == 1 && k < c->buffer[4].count;
         k++) // below this a bf16 value has no exact fp16
        if (fabsf(c->master[4][k]) < 0x1p-14f)
            c->master[4][k] = 0;
}
DESCRIBE(update)
{
    int rows, cols, batch;
    bool per_column;
    update_shape(c, &rows, &cols, &batch, &per_column);
    int64_t n = (int64_t)rows * cols * batch;
    add(c, "w", FP32, c->variant == 3 ? IN : INOUT, n, 0.5);
    add(c, "wx", FLOATX, c->variant == 3 ? INOUT : OUT, n, 0.5);
    add(c, "grad", FP32, c->variant == 2 ? IN : INOUT, n, 1);
    add(c, "second", FP32, INOUT, batch * max_i64(rows, cols), 0.01);
    add(c, "o", c->variant == 1 ? ORTHO_FP16 : c->variant == 2 ? ORTHO_FP32 : ORTHO_BF16, IN, n, 0.25);
    add(c, "step", FP32, IN, STEP_FLOATS, 1);
    add(c, "rule", INT32, IN, batch, 2);
}
RUN(update)
{
    static const NsDtype dtypes[] = {NS_BF16, NS_FP16, NS_FP32, NS_BF16};
    NormuonUpdate a = {.w = c->variant == 3 ? NULL : p[0],
                       .wx = p[1],
                       .grad = c->variant == 2 && o == &ops[GPU] ? NULL : p[2],
                       .second = p[3],
                       .o = p[4],
                       .o_dtype = dtypes[c->variant],
                       .beta2 = 0.95f,
                       .rule = p[6]};
    update_shape(c, &a.rows, &a.cols, &a.batch, &a.per_column);
    a.stride = (int64_t)a.rows * a.cols;
    o->normuon_update(stream, &a, p[5]);
}
DESCRIBE(cast)
{
    SIZES;
    add(c, "wx", FLOATX, OUT, (int64_t)N * d + 7, 0);
    add(c, "w", FP32, IN, (int64_t)N * d + 7, 1);
}
RUN(cast) { o->cast_weights(stream, p[0], p[1], c->buffer[0].count); }

#define CASE(name, fix, variants, elementwise) \
    { \
#name, describe_##name, run_##name, fix, variants, elementwise, {0 }, 0, 0, 0, {{0 } }, { 0 } \
    }
static Case cases[] = {
    CASE(embed_forward, NULL, 1, true),
    CASE(embed_backward, NULL, 1, true),
    CASE(embedding_grad, fix_embedding_grad, 3, true),
    CASE(coefficients_forward, NULL, 1, false),
    CASE(coefficients_backward, NULL, 1, false),
    CASE(mix_forward, NULL, 3, true),
    CASE(mix_backward, fix_mix_backward, 3, true),
    CASE(rmsnorm_forward, NULL, 1, true),
    CASE(rmsnorm_backward, NULL, 1, true),
    CASE(matmul, NULL, 4, false),
    CASE(matmul_down, NULL, 3, false),
    CASE(matmul_input, NULL, 1, false),
    CASE(matmul_weight, NULL, 4, false),
    CASE(relu2_forward, NULL, 1, false),
    CASE(relu2_backward, fix_squares, 1, false),
    CASE(rope, fix_frequencies, 1, true),
    CASE(qkv_forward, fix_qkv_forward, 2, true),
    CASE(qkv_product, fix_qkv_product, 4, false),
    CASE(head_train, fix_head, 4, false),
    CASE(head_eval, NULL, 2, false),
    CASE(head_logits, NULL, 2, false),
    CASE(adam, fix_adam, 2, true),
    CASE(momentum, fix_momentum, 1, true),
    CASE(update, fix_update, 4, false),
    CASE(cast, NULL, 1, true),
};
