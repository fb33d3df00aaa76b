// Cases of test_ops_gpu.c: the embedding and the residual stream, one pass over rows each.
#pragma once

// Of every gate of a case.
static int gate_inputs(const Case *c) { return c->z.H % 2 ? 12 : MAX_GATE_INPUTS; }

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
    add(c, "gate", FLOATX, IN, gate_inputs(c), 1);
    add(c, "lambda", FP32, IN, 1, 1);
    add(c, "before", INT32, IN, N, Vp);
}
// Variants: 0 the token before is that of the row before; 1 each row has its own, some have none.
static void fix_before(Case *c)
{
    for (int i = 0; i < c->z.N; i += 3)
        c->master[6][i] = -1;
}
RUN(embed_forward)
{
    SIZES;
    EmbedForward f = {p[0], p[1], p[2], p[3], p[4], p[5], gate_inputs(c), c->variant ? p[6] : NULL};
    o->embed_forward(stream, &f, N, d);
}

DESCRIBE(embed_backward)
{
    SIZES;
    add(c, "de", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "dgate", FP32, INOUT, gate_inputs(c), 1);
    add(c, "dlambda", FP32, INOUT, 1, 1);
    add(c, "dx", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "dx0", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "x0", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "rstd", FP32, IN, N, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "embed", FLOATX, IN, (int64_t)Vp * d, 2);
    add(c, "gate", FLOATX, IN, gate_inputs(c), 1);
    add(c, "lambda", FP32, IN, 1, 1);
    // Variances of dlambda's N d terms: rstd 1/3, dx + dx0 2/3, the embedding 4/3, the square of the gate
    // some 0.3.
    c->buffer[2].spread = 0.3 * sqrt((double)N * d);
}
RUN(embed_backward)
{
    SIZES;
    EmbedBackward a = {p[0], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[1], p[2], gate_inputs(c)};
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

enum { LAYERS = 12, NUM = 64, TERMS = 3 * (LAYERS + 1) };
// All forms that a record's mixes have: nothing, one scalar, one with a gate, a constant, a negative one.
static void set_terms(Coefficient *terms)
{
    for (int i = 0; i < TERMS; i++) {
        int layer = i / 3, form = i % 3;
        terms[i] = (Coefficient){.factor = 1, .scalar = LAYERS + 2 * layer + form, .gate = -1};
        if (form == 2)
            terms[i] = (Coefficient){.factor = layer % 2, .scalar = LAYERS + 2 * layer, .gate = layer / 2};
    }
    terms[TERMS - 1] = (Coefficient){0.5f, 3, UNGATED(2)};
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
    add(c, "gate_w", FLOATX, IN, gate_inputs(c) * (int64_t)H, 1);
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
                     .gate_inputs = gate_inputs(c),
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
