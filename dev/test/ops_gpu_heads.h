// Cases of test_ops_gpu.c: heads of the records of 2026, before and after attention.
#pragma once

// ---- before attention -------------------------------------------------------------------------------------

// Variants: 0 no embedding; 1 gates of their own, key offset; 2 factors and a mixture, q, k and v in place,
// heads of q and k of another width; 3 gates, paired, where the number of heads is even; 4 factors, key
// offset, that width, paired; 5 gates, key offset, that width; 6 no embedding, paired; 7 factors, that width,
// paired; 8 no embedding, that width; 9 gates. Then those of qkv_heads: with widths of their own, in place,
// with a factor, in FP8.
typedef struct {
    bool gates, factors, other_width, paired, offset, in_place, scaled, fp8;
} HeadsVariant;
enum { HEADS_VARIANTS = 10, QKV_HEADS_VARIANTS = 11, FACTOR_STRIDE = 5 };
static HeadsVariant heads_variant(const Case *c)
{
    static const HeadsVariant all[] =
        {{0},
         {.gates = true, .offset = true},
         {.factors = true, .in_place = true, .other_width = true},
         {.gates = true, .paired = true},
         {.factors = true, .other_width = true, .paired = true, .offset = true},
         {.gates = true, .other_width = true, .offset = true},
         {.paired = true},
         {.factors = true, .other_width = true, .paired = true},
         {.other_width = true},
         {.gates = true},
         {0},
         {.gates = true, .offset = true, .in_place = true},
         {.factors = true, .offset = true, .in_place = true, .scaled = true},
         {.gates = true, .paired = true, .in_place = true},
         {.paired = true, .offset = true, .in_place = true, .scaled = true},
         {.offset = true},
         {.factors = true, .other_width = true, .offset = true, .scaled = true},
         {.other_width = true, .paired = true, .in_place = true},
         {.gates = true, .offset = true, .fp8 = true},
         {.other_width = true, .paired = true, .in_place = true, .scaled = true, .fp8 = true},
         {.factors = true, .other_width = true, .offset = true, .in_place = true, .fp8 = true}};
    HeadsVariant v = all[c->variant + (strcmp(c->name, "qkv_heads") ? 0 : HEADS_VARIANTS)];
    v.paired &= c->z.H % 2 == 0;
    v.fp8 &= c->d % FP8_MULTIPLE == 0 && c->z.H * 3 * c->z.e / 4 % FP8_MULTIPLE == 0;
    return v;
}
static int heads_width(const Case *c) // of q and k
{
    int multiple = strcmp(c->name, "sdpa_heads") ? 4 : 8; // what attention takes
    return heads_variant(c).other_width ? (int)round_up(3 * c->z.e / 4, multiple) : c->z.e;
}

static int heads_groups(const Case *c) { return c->z.H % 2 ? 1 : 2; }

static void fix_angles_by_name(Case *c)
{
    int cos_at = 0, sin_at = 0;
    for (int i = 0; i < c->count; i++) {
        cos_at = !strcmp(c->buffer[i].name, "cos") ? i : cos_at;
        sin_at = !strcmp(c->buffer[i].name, "sin") ? i : sin_at;
    }
    fix_angles(c, cos_at, sin_at);
}

// Buffers that both directions read, from `at` on.
static void describe_heads(Case *c)
{
    SIZES;
    int64_t angles = (int64_t)(heads_variant(c).paired ? 2 : 1) * N * (heads_width(c) / 4);
    add(c, "cos", FLOATX, IN, angles, 1);
    add(c, "sin", FLOATX, IN, angles, 1);
    add(c, "table", FLOATX, IN, (int64_t)Vp * d, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "gate_w", FLOATX, IN, gate_inputs(c) * (int64_t)H, 1);
    add(c, "h", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "factor", FP32, IN, (int64_t)N * FACTOR_STRIDE, 1);
    add(c, "extra", FLOATX, IN, (int64_t)N * d, 1);
}

static HeadsForward heads_shared(const Case *c, void **p, float *gate)
{
    HeadsVariant v = heads_variant(c);
    HeadsForward a = {.qk = heads_width(c), .cos = p[0], .sin = p[1], .paired = v.paired, .offset = v.offset};
    if (v.gates)
        a.value = (ValueMix){.table = p[2],
                             .tokens = p[3],
                             .gate_w = p[4],
                             .h = p[5],
                             .gate = gate,
                             .gate_inputs = gate_inputs(c) / 2};
    if (v.factors)
        a.value = (ValueMix){.table = p[2],
                             .tokens = p[3],
                             .factor = (float *)p[6] + 1,
                             .stride = FACTOR_STRIDE,
                             .groups = heads_groups(c),
                             .extra = p[7]};
    return a;
}

DESCRIBE(heads_forward)
{
    SIZES;
    HeadsVariant v = heads_variant(c);
    int64_t n = (int64_t)N * d, width = (int64_t)H * heads_width(c), m = N * width;
    add(c, "q", FLOATX, v.in_place ? INOUT : OUT, m, 3);
    bool kept = v.offset || v.in_place; // with the offset half of row N is left alone
    add(c, "k", FLOATX, kept ? INOUT : OUT, v.offset ? m + width : m, 3);
    add(c, "v", FLOATX, v.in_place ? INOUT : OUT, n, 1);
    add(c, "rstd_q", FP32, OUT, (int64_t)N * H, 0);
    add(c, "rstd_k", FP32, OUT, (int64_t)N * H, 0);
    add(c, "gate", FP32, v.gates ? OUT : IN, (int64_t)N * H, 1);
    add(c, "raw_q", FLOATX, IN, m, 3);
    add(c, "raw_k", FLOATX, IN, m, 3);
    add(c, "raw_v", FLOATX, IN, n, 1);
    describe_heads(c);
}
RUN(heads_forward)
{
    SIZES;
    HeadsForward a = heads_shared(c, p + 9, p[5]);
    bool in_place = heads_variant(c).in_place;
    a.q = p[0];
    a.k = p[1];
    a.v = p[2];
    a.rstd_q = p[3];
    a.rstd_k = p[4];
    a.raw_q = in_place ? p[0] : p[6];
    a.raw_k = in_place ? p[1] : p[7];
    a.raw_v = in_place ? p[2] : p[8];
    o->heads_forward(stream, &a, N, H, e);
}

// With the product. In place: q and v are planes of `raw`; what is in the plane between them is not looked
// at.
static const double QKV_HEADS_X = 1.7, QKV_HEADS_W = 0.1; // largest magnitudes
static void fix_qkv_heads(Case *c)
{
    fix_angles_by_name(c);
    for (int i = 0; i < c->count; i++)
        if (!strcmp(c->buffer[i].name, "scales")) {
            c->master[i][0] = (float)(QKV_HEADS_X / E4M3_LARGEST);
            c->master[i][1] = (float)(QKV_HEADS_W / E4M3_LARGEST);
        }
}

DESCRIBE(qkv_heads)
{
    SIZES;
    HeadsVariant v = heads_variant(c);
    int64_t n = (int64_t)N * d, wide = (int64_t)H * heads_width(c), m = N * wide, rows = 2 * wide + d;
    add(c, "q", FLOATX, v.in_place ? IN : OUT, m, 1);
    add(c, "k", FLOATX, INOUT, m + wide,
        1); // behind its last row nothing is written, but for the offset a half
    add(c, "v", FLOATX, v.in_place ? IN : OUT, n, 1);
    add(c, "rstd_q", FP32, OUT, (int64_t)N * H, 0);
    add(c, "rstd_k", FP32, OUT, (int64_t)N * H, 0);
    add(c, "gate", FP32, v.gates ? OUT : IN, (int64_t)N * H, 1);
    add(c, "raw", FLOATX, v.in_place ? OUT : IN, 2 * m + n, 1);
    add(c, "x", FLOATX, IN, n, QKV_HEADS_X);
    add(c, "w", FLOATX, IN, rows * d, QKV_HEADS_W);
    add(c, "alpha", FP32, IN, 1, 2);
    add(c, "x8", FP32, IN, (n + 3) / 4, 1); // four codes in each
    add(c, "w8", FP32, IN, (rows * d + 3) / 4, 1);
    add(c, "scales", FP32, IN, 2, 1);
    describe_heads(c);
}
RUN(qkv_heads)
{
    SIZES;
    HeadsVariant v = heads_variant(c);
    int wide = H * heads_width(c), rows = 2 * wide + d;
    size_t plane = (size_t)N * (size_t)wide * (o == &ops[TRUTH] ? sizeof(float) : sizeof(bf16));
    char *raw = p[6];
    QkvHeadsForward a = {.heads = heads_shared(c, p + 13, p[5]),
                         .raw = p[6],
                         .alpha = v.scaled ? p[9] : NULL};
    if (v.fp8) {
        float *scales = p[12];
        o->quantize_e4m3(stream, p[10], p[7], scales, N, d, QUANTIZE_QUOTIENT, false);
        o->quantize_e4m3(stream, p[11], p[8], scales + 1, rows, d, QUANTIZE_QUOTIENT, false);
        a.x8 = p[10];
        a.w8 = p[11];
        a.scale_x = scales;
        a.scale_w = scales + 1;
    } else {
        a.x = p[7];
        a.w = p[8];
    }
    a.heads.q = v.in_place ? p[6] : p[0];
    a.heads.k = v.in_place && !v.offset ? (void *)(raw + plane) : p[1];
    a.heads.v = v.in_place ? (void *)(raw + 2 * plane) : p[2];
    a.heads.rstd_q = p[3];
    a.heads.rstd_k = p[4];
    o->qkv_heads_forward(&on_stream, &a, N, H, e);
    if (v.in_place && v.offset)
        o->copy_on_device(stream, raw + plane, raw, plane);
}

// What the backward gives, and, in this role, the gradients of q, k and v: buffers 0 to 7.
static void describe_gradients(Case *c, Role role)
{
    SIZES;
    HeadsVariant v = heads_variant(c);
    int64_t n = (int64_t)N * d, m = (int64_t)N * H * heads_width(c);
    add(c, "dqkv", FLOATX, OUT, 2 * m + n, 0);
    add(c, "dgate_w", FP32, v.gates ? INOUT : IN, gate_inputs(c) * (int64_t)H, 1);
    add(c, "dh_lead", FP32, v.gates ? OUT : IN, gate_inputs(c) / 2 * (int64_t)N, 1);
    add(c, "du_lead", FP32, v.gates ? OUT : IN, gate_inputs(c) / 2 * (int64_t)N, 1);
    add(c, "dfactor", FP32, v.factors ? INOUT : IN, (int64_t)N * FACTOR_STRIDE, 1);
    add(c, "dq", FLOATX, role, m, 1);
    add(c, "dk", FLOATX, role, m, 1);
    add(c, "dv", FLOATX, role, n, 1);
    // Variances of a weight's N terms: dv . u 2 e / 9 (twice the terms with dv_add), the input 1/3 or 1, the
    // gate's slope about 1/3.
    c->buffer[1].spread = 0.2 * sqrt((double)N * e);
}
static HeadsBackward heads_gradients(const HeadsForward *f, void **p)
{
    return (HeadsBackward){.forward = f,
                           .dqkv = p[0],
                           .dq = p[5],
                           .dk = p[6],
                           .dv = p[7],
                           .dgate_w = p[1],
                           .dh_lead = p[2],
                           .du_lead = p[3],
                           .dfactor = (float *)p[4] + 1};
}

DESCRIBE(heads_backward)
{
    SIZES;
    int64_t n = (int64_t)N * d, width = (int64_t)H * heads_width(c), m = N * width;
    describe_gradients(c, IN);
    add(c, "dq_add", FLOATX, IN, m, 1);
    add(c, "dk_add", FLOATX, IN, m, 1);
    add(c, "dv_add", FLOATX, IN, n, 1);
    add(c, "q", FLOATX, IN, m, 1.7);
    add(c, "k", FLOATX, IN, m + width, 1.7);
    add(c, "rstd_q", FP32, IN, (int64_t)N * H, 1);
    add(c, "rstd_k", FP32, IN, (int64_t)N * H, 1);
    add(c, "gate", FP32, IN, (int64_t)N * H, 1);
    describe_heads(c);
}
RUN(heads_backward)
{
    SIZES;
    HeadsForward f = heads_shared(c, p + 16, p[15]);
    f.q = p[11];
    f.k = p[12];
    f.rstd_q = p[13];
    f.rstd_k = p[14];
    HeadsBackward a = heads_gradients(&f, p);
    if (c->variant == 1 || c->variant == 4) {
        a.dq_add = p[8];
        a.dk_add = p[9];
    }
    if (c->variant >= 3)
        a.dv_add = p[10];
    o->heads_backward(stream, &a, N, H, e);
}

// ---- after attention --------------------------------------------------------------------------------------

enum { XSA_STRIDE_EXTRA = 3 }; // columns beside those of alpha and gate
// Variants: 0 XSA and gate; 1 gate alone, in place; 2 XSA alone.
static int output_stride(const Case *c) { return 2 * c->z.H + XSA_STRIDE_EXTRA; }

// Some heads of v are nought, and some so small that the floor of v . v counts; there y and dout are small,
// too, or their gradients would be the only ones that count.
static void fix_values(Case *c)
{
    for (int i = 0; i < c->count; i++) {
        bool v = !strcmp(c->buffer[i].name, "v"),
             in = c->buffer[i].role != OUT && c->buffer[i].kind == FLOATX;
        for (int64_t head = 0; head < (int64_t)c->z.N * c->z.H && in; head++)
            for (int64_t k = head * c->z.e; k < (head + 1) * c->z.e; k++) {
                if (head % 7 == 3)
                    c->master[i][k] = to_bf16_value((double)c->master[i][k] * (v ? 1e-6 : 1e-3));
                if (head % 7 == 5 && v)
                    c->master[i][k] = 0;
            }
    }
}

static HeadsOutput output_of(const Case *c, void *out, void **p)
{
    HeadsOutput a = {.out = out, .y = p[0]};
    if (c->variant != 1) {
        a.v = p[1];
        a.alpha = (float *)p[2] + 1;
        a.alpha_stride = output_stride(c);
    }
    if (c->variant != 2) {
        a.gate = (float *)p[2] + c->z.H + 2;
        a.gate_stride = output_stride(c);
    }
    return a;
}

DESCRIBE(heads_output_forward)
{
    SIZES;
    int64_t n = (int64_t)N * d;
    add(c, "out", FLOATX, c->variant == 1 ? INOUT : OUT, n, 1);
    add(c, "y", FLOATX, IN, n, 1);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "columns", FP32, IN, (int64_t)N * output_stride(c), 1);
}
RUN(heads_output_forward)
{
    SIZES;
    HeadsOutput a = output_of(c, p[0], p + 1);
    if (c->variant == 1)
        a.y = p[0];
    o->heads_output_forward(stream, &a, N, H, e);
}

DESCRIBE(heads_output_backward)
{
    SIZES;
    int64_t n = (int64_t)N * d;
    add(c, "dy", FLOATX, c->variant == 1 ? INOUT : OUT, n, 1);
    add(c, "dv", FLOATX, c->variant == 1 ? IN : OUT, n, 1);
    add(c, "dcolumns", FP32, INOUT, (int64_t)N * output_stride(c), 1);
    add(c, "dout", FLOATX, IN, n, 1);
    add(c, "y", FLOATX, IN, n, 1);
    add(c, "v", FLOATX, IN, n, 1);
    add(c, "columns", FP32, IN, (int64_t)N * output_stride(c), 1);
    add(c, "delta", FP32, OUT, (int64_t)N * H, 0);
    c->buffer[7].spread = sqrt((double)e) / 3; // of dy and y, without gate and XSA
}
RUN(heads_output_backward)
{
    SIZES;
    HeadsOutput f = output_of(c, NULL, p + 4);
    HeadsOutputBackward a = {.forward = &f,
                             .dy = p[0],
                             .dv = p[1],
                             .dalpha = (float *)p[2] + 1,
                             .dgate = (float *)p[2] + H + 2,
                             .dout = c->variant == 1 ? p[0] : p[3],
                             .delta = p[7]};
    o->heads_output_backward(stream, &a, N, H, e);
}
