// Cases of test_ops_gpu.c: attention alone and attention with mixed weights (DC). Rows of several documents.
#pragma once

// ---- attention alone --------------------------------------------------------------------------------------

// Variants: 0 a short window; 1 a long one; 2 pairs of heads, where their number is even; 3 a window of its
// own token.
static bool sdpa_is_paired(const Case *c) { return c->variant == 2 && c->z.H % 2 == 0; }

// Both directions: backward takes what forward gave. Two numbers of a document's first token are sums of
// nothing but roundings.
DESCRIBE(sdpa)
{
    SIZES;
    int64_t n = (int64_t)N * d;
    add(c, "y", FLOATX, OUT, n, 0);
    add(c, "lse", FP32, OUT, (int64_t)N * H, 0);
    add(c, "dq", FLOATX, OUT, n, 0);
    add(c, "dk", FLOATX, OUT, n, 0);
    add(c, "dv", FLOATX, OUT, n, 0);
    add(c, "q", FLOATX, IN, n, 1.7);
    add(c, "k", FLOATX, IN, n, 1.7);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "dy", FLOATX, IN, n, 1);
    add(c, "table", DOCUMENTS, IN, sdpa_is_paired(c) ? 2 * (int64_t)N : N, sdpa_is_paired(c) ? 2 : 1);
    add(c, "scratch", SDPA_SCRATCH, OUT, 0, 0);
    c->buffer[2].varies = true;
    c->buffer[2].spread = c->buffer[3].spread = 0.05;
}
RUN(sdpa)
{
    SIZES;
    static const int windows[] = {17, 700, 129, 0};
    bool paired = sdpa_is_paired(c);
    int rows = paired ? 2 * N : N, heads = paired ? H / 2 : H;
    SdpaForward f = {.y = p[0],
                     .lse = p[1],
                     .q = p[5],
                     .k = p[6],
                     .v = p[7],
                     .qk = e,
                     .table = p[9],
                     .slots = table_slots,
                     .window = windows[c->variant],
                     .scale = 0.1f};
    SdpaBackward b = {.forward = &f, .dq = p[2], .dk = p[3], .dv = p[4], .dy = p[8], .scratch = p[10]};
    o->sdpa_forward(stream, &f, rows, heads, e);
    o->sdpa_backward(stream, &b, rows, heads, e);
}
