// Cases of test_ops_gpu.c: attention alone and attention with mixed weights (DC). Rows of several documents.
#pragma once

// ---- attention alone --------------------------------------------------------------------------------------

// Variants: 0 a short window; 1 a long one; 2 pairs of heads, where their number is even; 3 a window of its
// own token; 4 q and k of three quarters of v's width, as in the records of August 2026; 5 the same, pairs;
// 6 of half of it, a long window; 7 sums of dy y are given, and not the right ones: it is they that count.
enum { SDPA_VARIANTS = 8 };
static const float SDPA_SCALE = 0.1f, SDPA_LARGEST = 1.7f; // of scores; of q and k
static bool sdpa_is_paired(const Case *c) { return (c->variant == 2 || c->variant == 5) && c->z.H % 2 == 0; }
static int sdpa_width(const Case *c)
{
    int quarters = c->variant < 4 || c->variant == 7 ? 4 : c->variant < 6 ? 3 : 2;
    return (int)round_up(quarters * c->z.e / 4, 8);
}

// What roundings leave to one element (root mean square) where a query sees one key or two: with few keys the
// plain computation's own error may be small by chance, and so may the result be that it is compared with.
// Inputs are uniform: a value below x has the root mean square x / sqrt(3). A weight rounded to bf16 is off
// by a unit u = 2^-9 of 1 at most, which goes into all of a row of y and dv.
// dq and dk are scale ds k and scale ds q, with ds = p (dp - delta) of two sums over e products dy v and dy
// y. For one key they are the same sum, cut or rounded to fp32 at each of its steps; for two y has been
// rounded.
static void sdpa_roundings(Case *c)
{
    if (c->z.N > 1)
        return;
    bool two = sdpa_is_paired(c);
    double e = c->z.e, summands = two ? 0x1p-9 * sqrt(e) / 3 : 0x1p-23 * e / 3,
           other = (double)SDPA_LARGEST / sqrt(3);
    c->buffer[2].rounding = c->buffer[3].rounding = (double)SDPA_SCALE * summands * other;
    c->buffer[0].rounding = c->buffer[4].rounding = two ? 0x1p-9 / sqrt(3) : 0;
}

// Both directions: backward takes what forward gave. Two numbers of a document's first token are sums of
// nothing but roundings.
DESCRIBE(sdpa)
{
    SIZES;
    int64_t n = (int64_t)N * d, m = (int64_t)N * H * sdpa_width(c);
    add(c, "y", FLOATX, OUT, n, 0);
    add(c, "lse", FP32, OUT, (int64_t)N * H, 0);
    add(c, "dq", FLOATX, OUT, m, 0);
    add(c, "dk", FLOATX, OUT, m, 0);
    add(c, "dv", FLOATX, OUT, n, 0);
    add(c, "q", FLOATX, IN, m, (double)SDPA_LARGEST);
    add(c, "k", FLOATX, IN, m, (double)SDPA_LARGEST);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "dy", FLOATX, IN, n, 1);
    add(c, "table", DOCUMENTS, IN, sdpa_is_paired(c) ? 2 * (int64_t)N : N, sdpa_is_paired(c) ? 2 : 1);
    add(c, "scratch", SDPA_SCRATCH, OUT, 0, 0);
    add(c, "delta", FP32, IN, (int64_t)N * H, 2);
    c->buffer[2].varies = true;
    c->buffer[2].spread = c->buffer[3].spread = 0.05;
    sdpa_roundings(c);
}
RUN(sdpa)
{
    SIZES;
    static const int windows[SDPA_VARIANTS] = {17, 700, 129, 0, 150, 257, 700, 300};
    bool paired = sdpa_is_paired(c);
    int rows = paired ? 2 * N : N, heads = paired ? H / 2 : H;
    SdpaForward f = {.y = p[0],
                     .lse = p[1],
                     .q = p[5],
                     .k = p[6],
                     .v = p[7],
                     .qk = sdpa_width(c),
                     .table = p[9],
                     .slots = table_slots,
                     .window = windows[c->variant],
                     .scale = SDPA_SCALE};
    SdpaBackward b = {.forward = &f, .dq = p[2], .dk = p[3], .dv = p[4], .dy = p[8], .scratch = p[10]};
    b.delta = c->variant == 7 ? p[11] : NULL;
    o->sdpa_forward(stream, &f, rows, heads, e);
    o->sdpa_backward(stream, &b, rows, heads, e);
}

// ---- attention and heads, backward in one ----------------------------------------------------------------

// Variants: those of heads_forward. q and k are what attention takes, with the key offset shifted already. 1
// and 5 have further gradients of q and k, 6 and 9 of v (v itself).
DESCRIBE(sdpa_heads)
{
    SIZES;
    HeadsVariant v = heads_variant(c);
    int64_t n = (int64_t)N * d, width = (int64_t)H * heads_width(c), m = N * width;
    describe_gradients(c, OUT);
    add(c, "y", FLOATX, OUT, n, 0);
    add(c, "lse", FP32, OUT, (int64_t)N * H, 0);
    add(c, "q", FLOATX, IN, m, (double)SDPA_LARGEST);
    add(c, "k", FLOATX, IN, m + width, (double)SDPA_LARGEST);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "dy", FLOATX, IN, n, 1);
    add(c, "more", FLOATX, IN, m, 0.1);
    add(c, "rstd_q", FP32, IN, (int64_t)N * H, 1);
    add(c, "rstd_k", FP32, IN, (int64_t)N * H, 1);
    add(c, "gate", FP32, IN, (int64_t)N * H, 1);
    add(c, "table", DOCUMENTS, IN, v.paired ? 2 * (int64_t)N : N, v.paired ? 2 : 1);
    add(c, "scratch", SDPA_SCRATCH, OUT, 0, 0);
    describe_heads(c);
    c->buffer[0].varies = true;
    for (int i = 1; i < 5; i++)
        c->buffer[i].follows = 1 + 7; // sums of dv u
    c->buffer[1].spread *= sqrt(3);   // dv of heads_backward is uniform in (-1, 1)
    c->buffer[4].by_token = true;
    c->buffer[4].spread = sqrt(d / 3.0 / FACTOR_STRIDE); // a token's sums have d terms together, u is uniform
    if (N == 1 && v.paired)                              // as of sdpa
        c->buffer[0].rounding = c->buffer[7].rounding = c->buffer[8].rounding = 0x1p-9 / sqrt(3);
}
RUN(sdpa_heads)
{
    SIZES;
    static const int windows[HEADS_VARIANTS] = {17, 700, 129, 128, 640, 384, 200, 90, 300, 150};
    HeadsVariant v = heads_variant(c);
    int rows = v.paired ? 2 * N : N, heads = v.paired ? H / 2 : H;
    size_t bytes =
        (size_t)N * (size_t)(H * heads_width(c)) * (o == &ops[TRUTH] ? sizeof(float) : sizeof(bf16));
    SdpaForward f = {.y = p[8],
                     .lse = p[9],
                     .q = p[10],
                     .k = p[11],
                     .v = p[12],
                     .qk = heads_width(c),
                     .table = p[18],
                     .slots = table_slots,
                     .window = windows[c->variant],
                     .scale = SDPA_SCALE};
    HeadsForward h = heads_shared(c, p + 20, p[17]);
    h.q = p[10];
    h.k = p[11];
    h.rstd_q = p[15];
    h.rstd_k = p[16];
    SdpaHeadsBackward a =
        {.sdpa = {.forward = &f, .dq = p[5], .dk = p[6], .dv = p[7], .dy = p[13], .scratch = p[19]},
         .heads = heads_gradients(&h, p)};
    if (c->variant == 1 || c->variant == 5)
        a.heads.dq_add = a.heads.dk_add = p[14];
    if (c->variant == 6 || c->variant == 9)
        a.heads.dv_add = p[12];
    o->sdpa_forward(stream, &f, rows, heads, e);
    o->sdpa_heads_backward(stream, &a, N, H, e);
    // These need not have been written; the case of sdpa compares them.
    for (int i = 5; i < 7; i++)
        o->copy_on_device(stream, p[i], p[10], bytes);
    if (!h.value.table)
        o->copy_on_device(stream, p[7], p[12],
                          (size_t)N * (size_t)d * (o == &ops[TRUTH] ? sizeof(float) : sizeof(bf16)));
}

// ---- DC ---------------------------------------------------------------------------------------------------

// Variants: 0 of record 89, q and k as wide as v; 1 fewer keys, narrower q and k; 2 the most keys that the
// CUDA kernels take.
static int dc_width(const Case *c) { return c->variant == 1 ? (int)round_up(3 * c->z.e / 4, 8) : c->z.e; }
enum { DC_COLUMNS = 4 }; // beside those of w1 and w2

// y is no larger than what is added to it.
DESCRIBE(dc)
{
    SIZES;
    int64_t n = (int64_t)N * d, m = (int64_t)N * H * dc_width(c), columns = (int64_t)N * (2 * H + DC_COLUMNS);
    add(c, "y", FLOATX, INOUT, n, 0.1);
    add(c, "lse", FP32, OUT, (int64_t)N * H, 0);
    add(c, "dq", FLOATX, OUT, m, 0);
    add(c, "dk", FLOATX, OUT, m, 0);
    add(c, "dv", FLOATX, OUT, n, 0);
    add(c, "dcolumns", FP32, INOUT, columns, 0.1);
    add(c, "q", FLOATX, IN, m, 1.7);
    add(c, "k", FLOATX, IN, m, 1.7);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "dy", FLOATX, IN, n, 1);
    add(c, "columns", FP32, IN, columns, 1.5);
    add(c, "table", DOCUMENTS, IN, N, 1);
    add(c, "scratch", DC_SCRATCH, OUT, 0, 0);
    c->buffer[2].spread = c->buffer[3].spread = 0.05;
}
RUN(dc)
{
    SIZES;
    static const int keys[] = {112, 40, 113};
    int stride = 2 * H + DC_COLUMNS;
    float *columns = p[10], *dcolumns = p[5];
    DcForward f = {.y = p[0],
                   .lse = p[1],
                   .qk = dc_width(c),
                   .q = p[6],
                   .k = p[7],
                   .v = p[8],
                   .w1 = columns + 1,
                   .w2 = columns + H + 3,
                   .stride = stride,
                   .table = p[11],
                   .slots = table_slots,
                   .scale = 0.1f,
                   .keys = keys[c->variant]};
    DcBackward b = {.forward = &f,
                    .dq = p[2],
                    .dk = p[3],
                    .dv = p[4],
                    .dw1 = dcolumns + 1,
                    .dw2 = dcolumns + H + 3,
                    .dy = p[9],
                    .scratch = p[12]};
    o->dc_forward(stream, &f, N, H, e);
    o->dc_backward(stream, &b, N, H, e);
}
