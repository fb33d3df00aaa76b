// Heads of the records of 2026, fp32 build: forward against double versions, backward against their central
// differences. Limit: sums of at most some hundred fp32 products, 2^-24 each with random signs, through a
// norm or a softmax: 1e-6 or so. 1e-5 in norm leaves an order of magnitude and is far below what a wrong
// formula gives.
#include "dev/test/tap.h"
#include "dev/test/exact_check.h"

static Tensor sum_of(Tensor a, Tensor b)
{
    for (int i = 0; i < a.n; i++)
        a.d[i] += b.d[i];
    return a;
}

// ---- q, k, v ----------------------------------------------------------------------------------------------

typedef enum { PLAIN_VALUE, GATED, GIVEN } Value; // no embedding; gates of their own; factors and a mixture
enum { STRIDE = 5, GROUPS = 2, VOCAB = 4 };
static struct {
    int N, H, e, qk, inputs; // qk: width of a head of q and k; inputs: of a gate from h, and from u
    bool paired, offset;
    Value value;
    Tensor raw, table, gate_w, h, extra, dq, dk, dv;
    Tensor32 factor;
    int32_t *tokens;
    Tensor cos, sin;
    double *q, *k, *v;
} qk;

static void ref_head(double *y, const double *x, int t, int n)
{
    double h[512];
    int e = qk.qk, position = qk.paired ? 2 * t + n % 2 : t;
    ref_rms(h, x, e);
    for (int c = 0; c < e; c++) {
        int j = c / 2, row = position * (e / 4) + j;
        if (c >= e / 2)
            y[c] = h[c];
        else
            y[c] = h[c] * qk.cos.d[row] + (c % 2 ? -h[c - 1] : h[c + 1]) * qk.sin.d[row];
    }
}

static double ref_value_gate(int t, int n)
{
    int d = qk.H * qk.e;
    const double *w = qk.gate_w.d + n * 2 * qk.inputs, *u = qk.table.d + qk.tokens[t] * d;
    if (qk.value == GIVEN)
        return qk.factor.d[t * STRIDE + n / (qk.H / GROUPS)];
    return 2 * ref_sigmoid(inner(w, qk.h.d + t * d, qk.inputs) + inner(w + qk.inputs, u, qk.inputs));
}

static void ref_heads(void)
{
    int N = qk.N, H = qk.H, e = qk.e, width = H * qk.qk;
    const double *raw_v = qk.raw.d + 2 * N * width;
    double key[512];
    for (int t = 0; t < N; t++)
        for (int n = 0; n < H; n++) {
            int at = t * width + n * qk.qk;
            ref_head(qk.q + at, qk.raw.d + at, t, n);
            ref_head(key, qk.raw.d + N * width + at, t, n);
            for (int c = 0; c < qk.qk; c++) {
                bool below = qk.offset && c >= qk.qk / 2;
                if (!below || t == 0)
                    qk.k[at + c] = key[c];
                if (below && t + 1 < N)
                    qk.k[at + width + c] = key[c];
            }
            for (int c = n * e; c < (n + 1) * e; c++) {
                int i = t * H * e + c;
                qk.v[i] = raw_v[i];
                if (qk.value != PLAIN_VALUE)
                    qk.v[i] += ref_value_gate(t, n) * qk.table.d[qk.tokens[t] * H * e + c];
                if (qk.value == GIVEN)
                    qk.v[i] += qk.extra.d[i];
            }
        }
}

static double heads_loss(void)
{
    ref_heads();
    return inner(qk.q, qk.dq.d, qk.dq.n) + inner(qk.k, qk.dk.d, qk.dk.n) + inner(qk.v, qk.dv.d, qk.dv.n);
}

// Coarser than fp32, so that cos^2 + sin^2 differs from 1 as it does in bf16.
static Tensor angles(int n, float shift)
{
    Tensor t = random_tensor(n, 1);
    for (int i = 0; i < n; i++)
        t.d[i] = x_to_float(t.x[i] = float_to_x(bf16_to_float(float_to_bf16(sinf((float)i + shift)))));
    return t;
}

static void heads_inputs(int N, int H, int e, int width, bool paired, bool offset, Value value)
{
    pool_reset();
    int d = H * e, n = N * d, m = N * H * width, positions = paired ? 2 * N : N;
    qk.N = N;
    qk.H = H;
    qk.e = e;
    qk.qk = width;
    qk.paired = paired;
    qk.offset = offset;
    qk.value = value;
    qk.raw = random_tensor(2 * m + n, 1.5);
    qk.table = random_tensor(VOCAB * d, 1);
    qk.inputs = N % 3 ? 6 : MAX_GATE_INPUTS / 2;
    qk.gate_w = random_tensor(H * 2 * qk.inputs, 1);
    qk.h = random_tensor(n, 1);
    qk.extra = random_tensor(n, 1);
    qk.dq = random_tensor(m, 1);
    qk.dk = random_tensor(m, 1);
    qk.dv = random_tensor(n, 1);
    qk.factor = random_tensor32(N * STRIDE, 1);
    qk.tokens = random_tokens(N, VOCAB);
    qk.cos = angles(positions * width / 4, 1.5707963f);
    qk.sin = angles(positions * width / 4, 0);
    qk.q = doubles(m);
    qk.k = doubles(m);
    qk.v = doubles(n);
}

static ValueMix value_mix(void)
{
    ValueMix m = {0};
    if (qk.value == PLAIN_VALUE)
        return m;
    m.table = qk.table.x;
    m.tokens = qk.tokens;
    if (qk.value == GIVEN) {
        m.factor = qk.factor.x;
        m.stride = STRIDE;
        m.groups = GROUPS;
        m.extra = qk.extra.x;
        return m;
    }
    m.gate_w = qk.gate_w.x;
    m.gate_inputs = qk.inputs;
    m.h = qk.h.x;
    m.gate = floats(qk.N * qk.H);
    return m;
}

static TokenRows every_token(const int32_t *tokens, int N)
{
    int32_t *order = take((size_t)N, 4), *row = take(VOCAB, 4), *start = take(VOCAB + 1, 4),
            *count = take(1, 4);
    for (int token = 0, n = 0; token < VOCAB; token++) {
        row[token] = token;
        for (int t = 0; t < N; t++)
            if (tokens[t] == token)
                order[n++] = t;
        start[token + 1] = n;
    }
    *count = VOCAB;
    return (TokenRows){order, row, start, count};
}

static void check_values(const HeadsBackward *b)
{
    int N = qk.N, H = qk.H, d = H * qk.e;
    const ValueMix *m = &b->forward->value;
    float *dtable = floats(VOCAB * d);
    RowReader reader = {.g = b->dqkv + 2 * H * qk.qk, .pitch = 2 * H * qk.qk + d};
    if (qk.value == GATED) {
        int inputs = qk.inputs, weights = H * 2 * inputs;
        check("   gradient of the gates", b->dgate_w, central_differences(qk.gate_w.d, weights, heads_loss),
              weights);
        double *dh = central_differences(qk.h.d, N * d, heads_loss), *lead = doubles(N * inputs);
        for (int i = 0; i < N * inputs; i++)
            lead[i] = dh[i / inputs * d + i % inputs];
        check("   of the layer's input", b->dh_lead, lead, N * inputs);
        reader.factor = m->gate;
        reader.stride = reader.groups = H;
        reader.lead = b->du_lead;
        reader.leads = inputs;
    } else {
        check("   gradient of the factors", b->dfactor,
              central_differences(qk.factor.d, N * STRIDE, heads_loss), N * STRIDE);
        reader.factor = m->factor;
        reader.stride = STRIDE;
        reader.groups = GROUPS;
    }
    TokenRows rows = every_token(qk.tokens, N);
    table_grad(NULL, dtable, &reader, 1, &rows, N, d, d);
    check("   of the table", dtable, central_differences(qk.table.d, VOCAB * d, heads_loss), VOCAB * d);
}

// Adds: the gradients come in two parts.
static void heads_case(int N, int H, int e, int width, bool paired, bool offset, Value value, bool adds)
{
    heads_inputs(N, H, e, width, paired, offset, value);
    int d = H * e, n = N * d, qk_row = H * width, m = N * qk_row, row = 2 * qk_row + d;
    floatX *q = halves(m), *k = halves(m + qk_row), *v = halves(n), *dqkv = halves(N * row);
    HeadsForward f = {width,
                      q,
                      k,
                      v,
                      floats(N * H),
                      floats(N * H),
                      qk.raw.x,
                      qk.raw.x + m,
                      qk.raw.x + 2 * m,
                      qk.cos.x,
                      qk.sin.x,
                      paired,
                      offset,
                      value_mix()};
    heads_forward(NULL, &f, N, H, e);
    ref_heads();
    printf("# heads: N %d, H %d, e %d, q and k %d%s%s%s%s\n", N, H, e, width, paired ? ", paired" : "",
           offset ? ", offset" : "",
           value == GATED   ? ", gated values"
           : value == GIVEN ? ", values with factors"
                            : "",
           adds ? ", gradients in two parts" : "");
    check_x("   q", q, qk.q, m);
    check_x("   k", k, qk.k, m);
    check_x("   v", v, qk.v, n);

    HeadsBackward b = {.forward = &f, .dqkv = dqkv, .dq = qk.dq.x, .dk = qk.dk.x, .dv = qk.dv.x};
    if (adds) {
        Tensor more[3] = {random_tensor(m, 1), random_tensor(m, 1), random_tensor(n, 1)};
        qk.dq = sum_of(qk.dq, more[0]);
        qk.dk = sum_of(qk.dk, more[1]);
        qk.dv = sum_of(qk.dv, more[2]);
        b.dq_add = more[0].x;
        b.dk_add = more[1].x;
        b.dv_add = more[2].x;
    }
    b.dgate_w = floats(H * 2 * qk.inputs);
    b.dh_lead = floats(N * qk.inputs);
    b.du_lead = floats(N * qk.inputs);
    b.dfactor = floats(N * STRIDE);
    heads_backward(NULL, &b, N, H, e);
    double *planes = central_differences(qk.raw.d, 2 * m + n, heads_loss), *rows = doubles(N * row);
    for (int i = 0; i < N * row; i++) { // planes side by side
        int t = i / row, c = i % row;
        rows[i] = c < qk_row       ? planes[t * qk_row + c]
                  : c < 2 * qk_row ? planes[m + t * qk_row + c - qk_row]
                                   : planes[2 * m + t * d + c - 2 * qk_row];
    }
    check_x("   gradient of raw q, k, v", dqkv, rows, N * row);
    if (value != PLAIN_VALUE)
        check_values(&b);
}

// ---- XSA and gate -----------------------------------------------------------------------------------------

static struct {
    int N, H, e;
    Tensor y, v, dout;
    Tensor32 alpha, gate;
    bool with_alpha, with_gate;
    double *out;
} ho;

static double output_loss(void)
{
    int H = ho.H, e = ho.e;
    for (int i = 0; i < ho.N * H; i++) {
        const double *y = ho.y.d + i * e, *v = ho.v.d + i * e;
        double along = ho.with_alpha ? tanh(ho.alpha.d[i / H * 7 + i % H]) * inner(y, v, e) /
                                           fmax(inner(v, v, e), (double)1e-8f)
                                     : 0;
        for (int c = 0; c < e; c++)
            ho.out[i * e + c] = (ho.with_gate ? ho.gate.d[i / H * 9 + i % H] : 1) * (y[c] - along * v[c]);
    }
    return inner(ho.out, ho.dout.d, ho.dout.n);
}

static void output_case(int N, int H, int e, bool with_alpha, bool with_gate)
{
    pool_reset();
    int n = N * H * e;
    ho.N = N;
    ho.H = H;
    ho.e = e;
    ho.with_alpha = with_alpha;
    ho.with_gate = with_gate;
    ho.y = random_tensor(n, 1);
    ho.v = random_tensor(n, 1);
    ho.dout = random_tensor(n, 1);
    ho.alpha = random_tensor32(N * 7, 2);
    ho.gate = random_tensor32(N * 9, 1);
    ho.out = doubles(n);
    for (int c = 0; c < e; c++) // a head without a direction
        ho.v.d[c] = x_to_float(ho.v.x[c] = float_to_x(0));
    floatX *out = halves(n), *dy = ho.dout.x, *dv = halves(n);
    double *delta = doubles(N * H);
    HeadsOutput f = {out, ho.y.x, ho.v.x, with_alpha ? ho.alpha.x : NULL, with_gate ? ho.gate.x : NULL, 7, 9};
    HeadsOutputBackward b = {&f, dy, dv, floats(N * 7), floats(N * 9), ho.dout.x, floats(N * H)};
    heads_output_forward(NULL, &f, N, H, e);
    output_loss();
    printf("# what attention gives: N %d, H %d, e %d%s%s\n", N, H, e, with_alpha ? ", XSA" : "",
           with_gate ? ", gate" : "");
    check_x("   out", out, ho.out, n);
    heads_output_backward(NULL, &b, N, H, e);
    check_x("   gradient of y, in place", dy, central_differences(ho.y.d, n, output_loss), n);
    for (int i = 0; i < n; i++)
        delta[i / e] += x_to_float(dy[i]) * ho.y.d[i];
    check("   its sums with y", b.delta, delta, N * H);
    if (with_alpha) {
        double *e_v =
            central_differences(ho.v.d + e, n - e, output_loss); // near 0 the step would pass the floor
        check_x("   of v", dv + e, e_v, n - e);
        check("   of alpha", b.dalpha, central_differences(ho.alpha.d, N * 7, output_loss), N * 7);
    }
    if (with_gate)
        check("   of the gate", b.dgate, central_differences(ho.gate.d, N * 9, output_loss), N * 9);
}

// v far below the floor: the projection is linear in v there but for its direction.
static void output_floor_case(int e)
{
    pool_reset();
    Tensor y = random_tensor(e, 1), v = random_tensor(e, 1e-6), g = random_tensor(e, 1);
    float alpha = 0.7f, dalpha;
    double th = tanh((double)alpha), floor = (double)1e-8f, *dv = doubles(e), *out = doubles(e);
    for (int c = 0; c < e; c++) {
        out[c] = y.d[c] - th * inner(y.d, v.d, e) / floor * v.d[c];
        dv[c] = -th / floor * (inner(y.d, v.d, e) * g.d[c] + inner(g.d, v.d, e) * y.d[c]);
    }
    floatX *got = halves(e), *dy = halves(e), *got_dv = halves(e);
    HeadsOutput f = {got, y.x, v.x, &alpha, NULL, 1, 0};
    heads_output_forward(NULL, &f, 1, 1, e);
    check_x("XSA below the floor: out", got, out, e);
    heads_output_backward(NULL, &(HeadsOutputBackward){&f, dy, got_dv, &dalpha, NULL, g.x, NULL}, 1, 1, e);
    check_x("   gradient of v", got_dv, dv, e);
}

// ---- DC ---------------------------------------------------------------------------------------------------

static struct {
    Attention a; // window: keys - 1
    Tensor y, q, k, v, dy;
    Tensor32 w1, w2;
    double *out;
} dc;

// w (H) of a token, normalised over the heads.
static void ref_weights(double *w, int t)
{
    int H = dc.a.H;
    const double *w1 = dc.w1.d + t * H;
    for (int n = 0; n < H; n++)
        w[n] = w1[n] / sqrt(inner(w1, w1, H) / H + 1e-6);
}

static double dc_loss(void)
{
    int N = dc.a.N, H = dc.a.H, e = dc.a.e, d = H * e;
    static double p[1 << 16], y[1 << 12], lse[1 << 10], w[64];
    ref_attention(&dc.a, y, lse, p, dc.q.d, dc.k.d, dc.v.d);
    memcpy(dc.out, dc.y.d, sizeof(double) * (size_t)(N * d));
    for (int t = 0; t < N; t++) {
        ref_weights(w, t);
        for (int j = 0; j <= t; j++) {
            double mixed = 0;
            for (int n = 0; n < H; n++)
                mixed += w[n] * p[(n * N + t) * N + j];
            for (int c = 0; c < d; c++)
                dc.out[t * d + c] += dc.w2.d[t * H + c / e] * mixed * dc.v.d[j * d + c];
        }
    }
    return inner(dc.out, dc.dy.d, N * d);
}

// The first `width` of e channels of each head.
static Tensor narrow(Tensor t, int e, int width)
{
    Tensor packed = {halves(t.n / e * width), doubles(t.n / e * width), t.n / e * width};
    for (int i = 0; i < packed.n; i++) {
        packed.d[i] = t.d[i / width * e + i % width];
        packed.x[i] = t.x ? t.x[i / width * e + i % width] : float_to_x((float)packed.d[i]);
    }
    return packed;
}

// width: of a head of q and k; the reference has zeros after them, up to e.
static void dc_case(int N, int H, int e, int width, int keys, int documents, const int32_t *cu)
{
    pool_reset();
    int n = N * H * e, m = N * H * width;
    float scale = 0.37f;
    dc.a = (Attention){cu, documents, N, H, e, keys - 1, scale, e};
    Tensor *all[] = {&dc.y, &dc.q, &dc.k, &dc.v, &dc.dy};
    for (int i = 0; i < 5; i++)
        *all[i] = random_tensor(n, 1.5);
    for (int i = 0; i < n; i++)
        if (i % e >= width)
            dc.q.d[i] = dc.k.d[i] = 0;
    dc.w1 = random_tensor32(N * H, 1);
    dc.w2 = random_tensor32(N * H, 1);
    dc.out = doubles(n);
    int32_t *table = take((size_t)attention_table_ints(N, 0), sizeof *table);
    int slots = attention_table_build(table, cu, documents, N, 0);
    Tensor q = narrow(dc.q, e, width), k = narrow(dc.k, e, width);
    floatX *y = halves(n), *dq = halves(m), *dk = halves(m), *dv = halves(n);
    float *dw1 = floats(N * H), *dw2 = floats(N * H);
    memcpy(y, dc.y.x, sizeof(floatX) * (size_t)n);
    DcForward f = {y, floats(N * H), width, q.x, k.x, dc.v.x, dc.w1.x, dc.w2.x, H, table, slots, scale, keys};
    dc_forward(NULL, &f, N, H, e);
    dc_loss();
    printf("# DC: N %d, H %d, e %d, q and k %d, %d keys, %d documents\n", N, H, e, width, keys, documents);
    check_x("   y", y, dc.out, n);
    dc_backward(NULL, &(DcBackward){&f, dq, dk, dv, dw1, dw2, dc.dy.x, take(dc_scratch_bytes(N, H), 1)}, N, H,
                e);
    Tensor eq = {NULL, central_differences(dc.q.d, n, dc_loss), n},
           ek = {NULL, central_differences(dc.k.d, n, dc_loss), n};
    check_x("   gradient of q", dq, narrow(eq, e, width).d, m);
    check_x("   of k", dk, narrow(ek, e, width).d, m);
    check_x("   of v", dv, central_differences(dc.v.d, n, dc_loss), n);
    check("   of w1", dw1, central_differences(dc.w1.d, N * H, dc_loss), N * H);
    check("   of w2", dw2, central_differences(dc.w2.d, N * H, dc_loss), N * H);
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 100, .eval_tokens = 100, .dim = 96, .heads = 6, .mlp_dim = 96, .vocab_padded = 128};
    backend_open(0);
    backend_reserve(&sizes);
    heads_case(5, 2, 8, 8, false, false, PLAIN_VALUE, false);
    heads_case(7, 2, 16, 16, false, true, PLAIN_VALUE, false);
    heads_case(6, 4, 8, 8, true, false, PLAIN_VALUE, true);
    heads_case(9, 6, 8, 4, true, false, GATED, false);
    heads_case(33, 2, 12, 8, false, true, GIVEN, true);
    heads_case(1, 2, 8, 8, false, true, GATED, true);
    output_case(7, 3, 8, true, false);
    output_case(40, 6, 16, true, true);
    output_case(3, 2, 12, false, true);
    output_floor_case(16);
    dc_case(9, 2, 4, 4, 3, 1, (int32_t[]){0, 9});
    dc_case(30, 3, 8, 6, 7, 4, (int32_t[]){0, 1, 12, 13, 30});
    dc_case(11, 6, 4, 4, 112, 2, (int32_t[]){0, 4, 11});
    backend_close();
    return tap_done();
}
