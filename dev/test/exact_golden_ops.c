// Operations of the records of 2026, fp32 build, each by itself against the PyTorch reference in float64
// (2026-ops-*, 2026-adam): results and gradients. Limit: as in exact_streams.c and exact_heads.c, which
// derive it; here it stands against another author's reading of the same formulas.
#include "dev/test/golden_file.h"
#include "dev/test/tap.h"
#include "dev/test/ops_reference.h"

#define LIMIT 1e-5

enum { N = 20, H = 6, E = 8, D = H * E };
static SafeTensors *file;
static const char *current; // case

// In this build floatX is fp32: tensors of a file are inputs as they are.
static float *get(const char *name)
{
    int64_t count;
    char *key = current ? format_string("%s.%s", current, name) : format_string("%s", name);
    float *x = read_golden(file, key, &count), *kept = floats((int)count + 16);
    memcpy(kept, x, sizeof(float) * (size_t)count);
    free(key);
    free(x);
    return kept;
}

static void check(const char *name, const float *got, int n)
{
    char text[64];
    snprintf(text, sizeof text, "%s: %s", current, name);
    ok_at_most(relative_error(of_float(got, n), of_float(get(name), n), n), LIMIT, text);
}

static int32_t *counted(int n)
{
    int32_t *x = take((size_t)n + 1, sizeof *x);
    for (int i = 0; i <= n; i++)
        x[i] = i;
    return x;
}

// The plane or third of index `which` of rows of 3 D.
static float *third(const float *dqkv, int which)
{
    float *x = floats(N * D);
    for (int t = 0; t < N; t++)
        memcpy(x + t * D, dqkv + (3 * t + which) * D, sizeof(float) * D);
    return x;
}

// ---- heads ------------------------------------------------------------------------------------------------

static HeadsForward heads_of(const float *q, const float *k, const float *v, bool paired, bool offset)
{
    float *cos = floats(2 * N * E / 4), *sin = floats(2 * N * E / 4);
    const char *kept = current;
    current = NULL;
    rope_tables(NULL, cos, sin, get("frequencies"), NULL, 2 * N, E);
    current = kept;
    return (HeadsForward){.qk = E,
                          .q = floats(N * D),
                          .k = floats((N + 1) * D),
                          .v = floats(N * D),
                          .rstd_q = floats(N * H),
                          .rstd_k = floats(N * H),
                          .raw_q = q,
                          .raw_k = k,
                          .raw_v = v,
                          .cos = cos,
                          .sin = sin,
                          .paired = paired,
                          .offset = offset};
}

static void qk_case(const char *name, bool paired, bool offset)
{
    pool_reset();
    current = name;
    HeadsForward f = heads_of(get("q"), get("k"), floats(N * D), paired, offset);
    float *dqkv = floats(3 * N * D);
    heads_forward(NULL, &f, N, H, E);
    check("out.q", f.q, N * D);
    check("out.k", f.k, N * D);
    HeadsBackward b = {.forward = &f,
                       .dqkv = dqkv,
                       .dq = get("dout.q"),
                       .dk = get("dout.k"),
                       .dv = floats(N * D)};
    heads_backward(NULL, &b, N, H, E);
    check("d.q", third(dqkv, 0), N * D);
    check("d.k", third(dqkv, 1), N * D);
}

static void value_case(void)
{
    pool_reset();
    current = "value";
    float *zero = floats(N * D), *dqkv = floats(3 * N * D), *du = floats(N * D), *dh = floats(N * D);
    int32_t *each = counted(N), all = N;
    HeadsForward f = heads_of(zero, zero, get("v"), false, false);
    f.value = (ValueMix){.table = get("u"),
                         .tokens = each,
                         .gate_w = get("w"),
                         .h = get("h"),
                         .gate = floats(N * H),
                         .gate_inputs = 6};
    heads_forward(NULL, &f, N, H, E);
    check("out.y", f.v, N * D);
    HeadsBackward b = {&f,   dqkv, zero,           zero,          get("dout.y"), NULL,
                       NULL, NULL, floats(H * 12), floats(N * 6), floats(N * 6), NULL};
    heads_backward(NULL, &b, N, H, E);
    check("d.v", third(dqkv, 2), N * D);
    check("d.w", b.dgate_w, H * 12);
    for (int t = 0; t < N; t++)
        memcpy(dh + t * D, b.dh_lead + t * 6, 6 * sizeof(float));
    check("d.h", dh, N * D);
    RowReader reader = {dqkv + 2 * D, 3 * D, f.value.gate, H, H, b.du_lead, 6, NULL};
    table_grad(NULL, du, &reader, 1, &(TokenRows){each, each, each, &all}, N, D, D);
    check("d.u", du, N * D);
}

static void xsa_case(void)
{
    pool_reset();
    current = "xsa";
    float *out = floats(N * D), *dy = floats(N * D), *dv = floats(N * D), *dalpha = floats(N * H);
    HeadsOutput f = {out, get("y"), get("v"), get("alpha"), NULL, H, 0};
    heads_output_forward(NULL, &f, N, H, E);
    check("out.y", out, N * D);
    heads_output_backward(NULL, &(HeadsOutputBackward){&f, dy, dv, dalpha, NULL, get("dout.y"), NULL}, N, H,
                          E);
    check("d.y", dy, N * D);
    check("d.v", dv, N * D);
    check("d.alpha", dalpha, N * H);
}

static int32_t *whole_numbers(const char *name, int n) // stored as int32
{
    int32_t *x = take((size_t)n, sizeof *x);
    memcpy(x, get(name), sizeof *x * (size_t)n);
    return x;
}

// Paired: the sequence of 2 tokens rows, half of the heads in each.
static void attend_case(const char *name, int tokens, int heads, int qk, int e, int documents, int paired)
{
    pool_reset();
    current = NULL;
    int rows = tokens * (1 + paired), H2 = heads / (1 + paired), wide = tokens * heads * qk,
        n = tokens * heads * e;
    int32_t *cu = whole_numbers("cu_seqlens", documents + 1), window = *whole_numbers("window", 1),
            *table = take((size_t)attention_table_ints(rows, 0), sizeof *table);
    float scale = *get("scale");
    for (int i = 0; i <= documents; i++)
        cu[i] *= 1 + paired;
    int slots = attention_table_build(table, cu, documents, rows, 0);
    current = name;
    float *dq = floats(wide), *dk = floats(wide), *dv = floats(n);
    SdpaForward f = {floats(n), floats(rows * H2), get("q"), get("k"), get("v"), qk, table, slots, window,
                     scale};
    void *scratch = take(sdpa_scratch_bytes(rows, H2, qk, e), 1);
    sdpa_forward(NULL, &f, rows, H2, e);
    sdpa_backward(NULL, &(SdpaBackward){&f, dq, dk, dv, get("dout.y"), scratch, NULL}, rows, H2, e);
    check("out.y", f.y, n);
    check("d.q", dq, wide);
    check("d.k", dk, wide);
    check("d.v", dv, n);
}

static void dc_case(void)
{
    pool_reset();
    current = NULL;
    int32_t *cu = whole_numbers("cu_seqlens", 5), keys = *whole_numbers("dc_window", 1),
            *table = take((size_t)attention_table_ints(N, 0), sizeof *table);
    float scale = *get("scale"), *y = floats(N * D), *dq = floats(N * D), *dk = floats(N * D),
          *dv = floats(N * D), *dw1 = floats(N * H), *dw2 = floats(N * H);
    int slots = attention_table_build(table, cu, 4, N, 0);
    current = "dc";
    DcForward f = {y, floats(N * H), E,     get("q"), get("k"), get("v"), get("w1"), get("w2"),
                   H, table,         slots, scale,    keys};
    dc_forward(NULL, &f, N, H, E);
    check("out.y", y, N * D);
    dc_backward(NULL, &(DcBackward){&f, dq, dk, dv, dw1, dw2, get("dout.y"), take(dc_scratch_bytes(N, H), 1)},
                N, H, E);
    check("d.q", dq, N * D);
    check("d.k", dk, N * D);
    check("d.v", dv, N * D);
    check("d.w1", dw1, N * H);
    check("d.w2", dw2, N * H);
}

// ---- streams ----------------------------------------------------------------------------------------------

enum { ROWS = 16, WIDTH = 8, NUMBERS = 14, BIGRAMS = 8, BIGRAM_ROWS = 97, SIGN_ROWS = 32 };

static void generator_case(void)
{
    pool_reset();
    current = "generator";
    float *out = floats(ROWS * NUMBERS), *pre = floats(ROWS * WIDTH), *dpre = floats(ROWS * WIDTH),
          *dx = floats(ROWS * D), *dw1 = floats(WIDTH * D), *dw2 = floats(NUMBERS * WIDTH),
          *db2 = floats(NUMBERS), dscale = 0;
    Generator g = {get("w1"), get("w2"), get("b2"), get("scale"), WIDTH, NUMBERS};
    const float *x = get("x");
    generator_forward(NULL, out, pre, &g, x, ROWS, D);
    check("out.y", out, ROWS * NUMBERS);
    generator_backward(NULL, &(GeneratorBackward){&g, dx, dpre, dw2, db2, &dscale, get("dout.y"), pre, NULL},
                       ROWS, D);
    matmul_weight_grads(NULL, &(WeightGrad){dw1, dpre, x, WIDTH, D, .fresh = true}, 1, ROWS);
    check("d.x", dx, ROWS * D);
    check("d.w1", dw1, WIDTH * D);
    check("d.w2", dw2, NUMBERS * WIDTH);
    check("d.b2", db2, NUMBERS);
    check("d.scale", &dscale, 1);
}

// Positions sorted by row; rows without a position have an empty range.
static TokenRows rows_of(const int32_t *rows, int n, int count)
{
    int32_t *order = take((size_t)n, 4), *start = take((size_t)count + 1, 4), *all = take(1, 4);
    for (int r = 0, at = 0; r < count; r++) {
        for (int t = 0; t < n; t++)
            if (rows[t] == r)
                order[at++] = t;
        start[r + 1] = at;
    }
    *all = count;
    return (TokenRows){order, counted(count), start, all};
}

static void bigram_case(void)
{
    pool_reset();
    current = "bigram";
    const float *signs = get("plus_minus");
    const int32_t *rows = (int32_t *)get("rows"), *sign_rows = (int32_t *)get("signs");
    int words = (D + 31) / 32;
    uint32_t *bits = take((size_t)(SIGN_ROWS * words), sizeof *bits);
    for (int i = 0; i < SIGN_ROWS * D; i++)
        bits[i / D * words + i % D / 32] |= signs[i] < 0 ? 1u << i % D % 32 : 0;
    RowSigns s = {bits, sign_rows};
    float *out = floats(BIGRAMS * D), *dtable = floats(BIGRAM_ROWS * D);
    signed_gather(NULL, out, get("table"), rows, &s, BIGRAMS, D, D);
    check("out.y", out, BIGRAMS * D);
    TokenRows sorted = rows_of(rows, BIGRAMS, BIGRAM_ROWS);
    table_grad(NULL, dtable, &(RowReader){.g = get("dout.y"), .signs = &s}, 1, &sorted, BIGRAMS, D, D);
    check("d.table", dtable, BIGRAM_ROWS * D);
}

static void mix_case(void)
{
    pool_reset();
    current = "mix";
    float *y = floats(ROWS * D), *dx = floats(ROWS * D), *dc = floats(ROWS);
    StreamMix mix = {.y = y, .terms = 4};
    char name[8];
    for (int k = 0; k < 4; k++) {
        snprintf(name, sizeof name, "s%d", k);
        mix.term[k].x = get(name);
        snprintf(name, sizeof name, "c%d", k);
        mix.term[k].c = (StreamFactor){.column = get(name), .stride = 1};
    }
    stream_mix(NULL, &mix, ROWS, D);
    check("out.y", y, ROWS * D);
    for (int k = 0; k < 4; k++) {
        StreamGrad a = {.dx = dx,
                        .x = mix.term[k].x,
                        .reader = {{.g = get("dout.y"), .c = mix.term[k].c, .dcolumn = dc}},
                        .readers = 1};
        stream_grads(NULL, &a, 1, ROWS, D);
        snprintf(name, sizeof name, "d.s%d", k);
        check(name, dx, ROWS * D);
        snprintf(name, sizeof name, "d.c%d", k);
        check(name, dc, ROWS);
    }
}

// ---- head -------------------------------------------------------------------------------------------------

// The product with the unit matrix makes the file's logits, and dx is their gradient.
static void loss_case(const char *name, int targets)
{
    enum { VP = 128 };
    pool_reset();
    current = "loss";
    const HeadSpec spec = {.cap = 23, .slope = 7.5f, .shift = 5};
    float *unit = floats(VP * VP), *dx = floats(ROWS * VP), *dw = floats(VP * VP), loss;
    for (int i = 0; i < VP; i++)
        unit[i * VP + i] = 1;
    HeadLoss h = {.spec = &spec,
                  .mode = HEAD_BF16,
                  .loss = &loss,
                  .dx = dx,
                  .dw = dw,
                  .x = get("logits"),
                  .w = unit,
                  .targets = whole_numbers("targets", ROWS),
                  .num_targets = targets,
                  .prefix = whole_numbers("prefix", ROWS),
                  .scratch = take(head_train_scratch_bytes(HEAD_BF16, ROWS, VP, VP), 1),
                  .N = ROWS,
                  .d = VP,
                  .Vp = VP};
    current = name;
    h.target_weight = get("weights");
    h.prefix_weight = get("prefix_weight");
    if (*h.prefix_weight == 0)
        h.prefix = NULL;
    head_loss_train(NULL, &h);
    check("out", &loss, 1);
    check("d.logits", dx, ROWS * VP);
}

// ---- Adam -------------------------------------------------------------------------------------------------

// Updates after steps 1, 3 and 5, each with the gradients of two steps.
static void adam_case(const char *name)
{
    pool_reset();
    int64_t n;
    float *p = golden_values(file, "init.", name, &n), *grad = golden_values(file, "grad.", name, NULL),
          *after = golden_values(file, "after.", name, NULL),
          *constants = golden_values(file, "constants.", name, NULL),
          *factor = read_golden(file, "rate", NULL), *m = floats((int)n), *v = floats((int)n),
          *g = floats((int)n);
    double b1 = constants[2], b2 = constants[3], worst = 0;
    AdamRule rule = {1, (float)b1, (float)b2, 1e-10f, (float)(1 - b1), (float)(1 - b2)};
    for (int k = 1; k <= 3; k++) {
        int t = 2 * k - 1;
        double rate = 0.008 * (double)factor[t] * (double)constants[0];
        StepParams step = {.grad_scale = 1};
        step.rule[1].rate = (float)(rate * sqrt(1 - pow(b2, k)) / (1 - pow(b1, k)));
        step.rule[1].decay = (float)(rate * rate * 0.005 * (double)constants[1]);
        for (int64_t i = 0; i < n; i++)
            g[i] = grad[(t - 1) * n + i] + grad[t * n + i];
        adam_update_decay(NULL, p, m, v, g, &step, rule, n);
        worst = larger_error(worst, relative_error(of_float(p, (int)n), of_float(after + (k - 1) * n, (int)n),
                                                   (int)n));
    }
    char text[64];
    snprintf(text, sizeof text, "Adam with decay: %s", name);
    ok_at_most(worst, LIMIT, text);
    float *all[] = {p, grad, after, constants, factor};
    for (int i = 0; i < 5; i++)
        free(all[i]);
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 64, .eval_tokens = 64, .dim = 128, .heads = H, .mlp_dim = 64, .vocab_padded = 128};
    backend_open(0);
    backend_reserve(&sizes);
    file = open_golden("2026-ops-attention");
    qk_case("qk", false, false);
    qk_case("qk-paired", true, false);
    qk_case("qk-offset", false, true);
    value_case();
    xsa_case();
    dc_case();
    attend_case("attend", N, H, E, E, 4, false);
    attend_case("attend-paired", N, H, E, E, 4, true);
    safetensors_close(file);
    file = open_golden("2026-08-ops");
    attend_case("attend", 16, 2, 12, 16, 3, false);
    attend_case("attend-paired", 16, 2, 12, 16, 3, true);
    safetensors_close(file);
    file = open_golden("2026-ops-stream");
    generator_case();
    bigram_case();
    mix_case();
    loss_case("loss", 1);
    loss_case("loss-prefix", 1);
    loss_case("loss-three", 3);
    safetensors_close(file);
    file = open_golden("2026-adam");
    adam_case("ve_gate_bank");
    adam_case("mudd_b2");
    adam_case("mudd_gate_w2");
    safetensors_close(file);
    backend_close();
    return tap_done();
}
