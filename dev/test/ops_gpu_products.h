// Cases of test_ops_gpu.c: matrix products, and what is done to q, k and v.
#pragma once

// ---- products ---------------------------------------------------------------------------------------------

// Pairs of variants, the second with a factor: plain, residual in place, residual elsewhere, three planes.
static const void *residual_of(const Case *c, void **p)
{
    return c->variant / 2 == 1 ? p[0] : c->variant / 2 == 2 ? p[3] : NULL;
}
DESCRIBE(matmul)
{
    SIZES;
    int planes = c->variant / 2 == 3 ? 3 : 1;
    add(c, "y", FLOATX, c->variant / 2 == 1 ? INOUT : OUT, (int64_t)planes * N * F, 1);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "w", FLOATX, IN, (int64_t)planes * F * d, 1);
    add(c, "residual", FLOATX, IN, (int64_t)N * F, 3);
    add(c, "alpha", FP32, IN, 1, 2);
}
RUN(matmul)
{
    SIZES;
    Product product = {p[0], p[1], p[2], residual_of(c, p),          c->variant % 2 ? p[4] : NULL,
                       N,    d,    F,    c->variant / 2 == 3 ? 3 : 1};
    o->matmul_forward(&on_stream, &product);
}
DESCRIBE(matmul_down) // from the MLP's width to the model's: the greater depth
{
    SIZES;
    add(c, "y", FLOATX, c->variant / 2 == 1 ? INOUT : OUT, (int64_t)N * d, 1);
    add(c, "x", FLOATX, IN, (int64_t)N * F, 1);
    add(c, "w", FLOATX, IN, (int64_t)F * d, 1);
    add(c, "residual", FLOATX, IN, (int64_t)N * d, 3);
    add(c, "alpha", FP32, IN, 1, 2);
}
RUN(matmul_down)
{
    SIZES;
    Product product = {p[0], p[1], p[2], residual_of(c, p), c->variant % 2 ? p[4] : NULL, N, F, d, 1};
    o->matmul_forward(&on_stream, &product);
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
    o->matmul_backward_input(&on_stream, &(InputGrad){p[0], p[1], p[2], N, d, F, NULL});
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
    add(c, "position", INT32, IN, N, 1 << 18);
}
RUN(rope) // variant 1: positions in any order
{
    SIZES;
    o->rope_tables(stream, p[0], p[1], p[2], c->variant ? p[3] : NULL, N, e);
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

// ---- a weight's two factors -------------------------------------------------------------------------------

DESCRIBE(weight_scale_forward)
{
    SIZES;
    int64_t n = (int64_t)N * d + 3;
    add(c, "out", FLOATX, OUT, n, 0);
    add(c, "w", FLOATX, IN, n, 1);
    add(c, "alpha", FP32, IN, 1, 1);
}
RUN(weight_scale_forward) { o->weight_scale_forward(stream, p[0], p[1], p[2], c->buffer[0].count); }

DESCRIBE(weight_scale)
{
    SIZES;
    int64_t n = (int64_t)N * d + 3;
    add(c, "dw", FP32, INOUT, n, 1);
    add(c, "dalpha", FP32, INOUT, 1, 1);
    add(c, "w", FLOATX, IN, n, 1);
    add(c, "alpha", FP32, IN, 1, 1);
    c->buffer[1].spread = sqrt((double)n) / 3;
}
RUN(weight_scale) { o->weight_scale_backward(stream, p[0], p[1], p[2], p[3], c->buffer[0].count); }
