// Cases of test_ops_gpu.c: Adam, NorMuon and the copies of weights.
#pragma once

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

// Every third row of 64 elements has no gradient, as rows of tables that no token of a step is in.
static void fix_adam_decay(Case *c)
{
    fix_adam(c);
    for (int64_t k = 0; k < c->buffer[3].count; k++)
        if (k / 64 % 3 == 0)
            c->master[3][k] = 0;
}
DESCRIBE(adam_decay)
{
    SIZES;
    int64_t n = (int64_t)N * d + 3;
    add(c, "p", FLOATX, INOUT, n, 1);
    add(c, "m", FP32, INOUT, n, 0.1);
    add(c, "v", FP32, INOUT, n, 0.01);
    add(c, "grad", FP32, INOUT, n, 1);
    add(c, "step", FP32, IN, STEP_FLOATS, 1);
}
RUN(adam_decay)
{
    AdamRule rule = adam_rule;
    rule.rule = 1;
    o->adam_update_decay(stream, p[0], p[1], p[2], p[3], p[4], rule, c->buffer[0].count);
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
RUN(cast) { o->cast_weights(stream, p[0], p[1], c->buffer[0].count, false); }
