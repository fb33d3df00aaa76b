// Cases of test_ops_gpu.c: the head.
#pragma once

// Variants of training: 0, 2, 4 in bf16, 1, 3, 5 in FP8; 2 to 4 other constants and several targets, of which
// some are the same token; 4 and 5 a prefix term, too. In training some rows have no target.
enum { HEAD_VARIANTS = 6 };
static bool head_is_shifted(const Case *c) { return c->variant >= 2 && c->variant <= 4; }
static const HeadSpec *head_spec(const Case *c) { return head_is_shifted(c) ? &head_shifted : &head_plain; }

enum { HEAD_TARGETS = 6, HEAD_WEIGHT, HEAD_PREFIX, HEAD_PREFIX_WEIGHT }; // buffers
static void fix_head(Case *c)
{
    for (int i = 0; i < c->count; i++) {
        for (int64_t k = 3; !strcmp(c->buffer[i].name, "targets") && k < c->buffer[i].count; k += 5)
            c->master[i][k] = c->master[i][k - 1];
        for (int64_t k = 6; i == HEAD_TARGETS && k < c->buffer[i].count; k += 7)
            c->master[i][k] = -1;
        for (int64_t k = 0; !strcmp(c->buffer[i].name, "prefix") && k < c->buffer[i].count; k++)
            c->master[i][k] = k % 3 == 1 ? -1 : k % 5 == 3 ? c->master[HEAD_TARGETS][k] : c->master[i][k];
        for (int64_t k = 0; !strcmp(c->buffer[i].name, "weight") && k < c->buffer[i].count; k++)
            c->master[i][k] = k == 0 ? 1 : 0.5f / (float)k;
        if (!strcmp(c->buffer[i].name, "prefix_weight"))
            c->master[i][0] = 0.75f;
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
    add(c, "weight", FP32, IN, head_is_shifted(c) ? MAX_TARGETS : 1, 1);
    add(c, "prefix", INT32, IN, c->variant >= 4 ? N : 0, Vp);
    add(c, "prefix_weight", FP32, IN, 1, 1);
    add(c, "scratch", HEAD_SCRATCH, OUT, 0, 0);
    // One row in FP8: the plain computation may have every code of the gradient right. What one of them
    // leaves that is a step of e5m2 off, a quarter of a usual gradient (1 / Vp of the steepest slope), in its
    // row of dw.
    double gradient = (double)(head_spec(c)->cap / (4 * head_spec(c)->slope)) / Vp;
    if (N == 1 && c->variant & 1)
        c->buffer[2].rounding = gradient / 4 * 1.7 / sqrt(3.0 * Vp);
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
                  .num_targets = (int)c->buffer[HEAD_WEIGHT].count,
                  .target_weight = p[HEAD_WEIGHT],
                  .prefix = c->variant >= 4 ? p[HEAD_PREFIX] : NULL,
                  .prefix_weight = p[HEAD_PREFIX_WEIGHT],
                  .scratch = p[10],
                  .N = N,
                  .d = d,
                  .Vp = Vp};
    o->head_loss_train(stream, &a);
}
// Variants: 1, 3 with other constants; 2, 3 without tokens that cannot follow, of which there are MASK_ROWS
// lists.
enum { MASK_ROWS = 61 };
static void
fix_head_eval(Case *c) // numbers that are exact in fp32, of the low bits and of the high ones by turns
{
    float *words = c->master[7];
    for (int64_t k = 1; k < c->buffer[7].count; k += 2)
        words[k] = 256 * (words[k] - (1 << 23));
}
DESCRIBE(head_eval)
{
    SIZES;
    add(c, "loss", FP32, OUT, 1, 0);
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "w", FLOATX, IN, (int64_t)Vp * d, 0.2);
    add(c, "targets", INT32, IN, N, Vp);
    add(c, "scratch", HEAD_SCRATCH, OUT, 0, 0);
    add(c, "rows", FP32, OUT, N, 0);
    add(c, "tokens", INT32, IN, N, MASK_ROWS);
    add(c, "impossible", INT32, IN, c->variant >= 2 ? (int64_t)MASK_ROWS * (Vp / 32) : 0, 1 << 24);
}
RUN(head_eval)
{
    SIZES;
    HeadLoss a = {.spec = c->variant % 2 ? &head_shifted : &head_plain,
                  .loss = p[0],
                  .x = p[1],
                  .w = p[2],
                  .targets = p[3],
                  .scratch = p[4],
                  .rows = p[5],
                  .tokens = p[6],
                  .impossible = c->variant >= 2 ? p[7] : NULL,
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
