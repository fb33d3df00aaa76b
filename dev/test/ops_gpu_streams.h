// Two ops on two streams at the same time give the bits that they give one after the other, also when they
// are the same op: every stream has scratch memory and counters of its own. A shared counter would cut the
// sums over the whole grid short.
#pragma once
#include "dev/test/ns_default.h"

enum { STREAM_ROUNDS = 50, STREAM_BUFFERS = 100, NS_ROWS = 320, NS_COLS = 512, NS_BATCH = 3 };

static struct {
    void *buffer[STREAM_BUFFERS];
    int count;
} on_streams;

// Random values; freed by check_streams.
static void *streams_alloc(int64_t n, Kind kind)
{
    size_t bytes = (size_t)n * element_bytes(GPU, kind);
    char *host = xcalloc(bytes, 1), *p = device_alloc(bytes, "test");
    for (int64_t k = 0; k < n; k++) {
        float x = to_bf16_value(2 * uniform_at(random_used + (uint64_t)k) - 1);
        bf16 half = float_to_bf16(x);
        if (kind == FP32)
            memcpy(host + 4 * k, &x, 4);
        else
            memcpy(host + 2 * k, &half, 2);
    }
    random_used += (uint64_t)n;
    copy_to_device(stream, p, host, bytes);
    stream_synchronize(stream);
    free(host);
    assert(on_streams.count < STREAM_BUFFERS);
    return on_streams.buffer[on_streams.count++] = p;
}

// The arguments of every op here, on buffers of their own. Each op's result is `floats` fp32 numbers.
typedef struct {
    MixBackward mix;
    QkvBackward qkv;
    AttentionForward forward;
    AttentionBackward backward;
    WeightGrad weights;
    floatX *relu2, *relu2_w; // (N, F), (d, F)
    const float *ns_input;
    void *ns_work;
    int N, H, e, F;
} StreamOps;

typedef struct {
    const char *name;
    void (*run)(Stream s, const StreamOps *o);
    const void *(*result)(const StreamOps *o, size_t *bytes); // cleared before each run
} StreamOp;

static StreamOps streams_ops(const Sizes *z)
{
    int64_t N = z->N, d = (int64_t)z->H * z->e, n = N * d, heads = N * z->H, angles = N * z->e / 4;
    StreamOps o = {.N = z->N, .H = z->H, .e = z->e, .F = z->F};
    o.mix = (MixBackward){.dx = streams_alloc(n, FLOATX),
                          .dx0 = streams_alloc(n, FLOATX),
                          .dcoef = streams_alloc(3, FP32),
                          .dh = streams_alloc(n, FLOATX),
                          .h = streams_alloc(n, FLOATX),
                          .rstd = streams_alloc(N, FP32),
                          .x = streams_alloc(n, FLOATX),
                          .x0 = streams_alloc(n, FLOATX),
                          .coef = streams_alloc(3, FP32)};
    o.qkv = (QkvBackward){.dqkv = streams_alloc(3 * n, FLOATX),
                          .dlambda = streams_alloc(2, FP32),
                          .dq = streams_alloc(n, FLOATX),
                          .dk = streams_alloc(n, FLOATX),
                          .dv = streams_alloc(n, FLOATX),
                          .q = streams_alloc(n, FLOATX),
                          .k = streams_alloc(n, FLOATX),
                          .rstd_q = streams_alloc(heads, FP32),
                          .rstd_k = streams_alloc(heads, FP32),
                          .v_raw = streams_alloc(n, FLOATX),
                          .lambda = streams_alloc(2, FP32),
                          .cos = streams_alloc(angles, FLOATX),
                          .sin = streams_alloc(angles, FLOATX)};
    o.weights = (WeightGrad){.dw = streams_alloc(3 * d * d, FP32),
                             .a = o.qkv.dqkv,
                             .b = o.mix.x,
                             .m = (int)(3 * d),
                             .n = (int)d,
                             .fresh = true};
    o.relu2 = streams_alloc(N * z->F, FLOATX);
    o.relu2_w = streams_alloc(d * z->F, FLOATX);
    return o;
}

// Attention over one document, and Newton-Schulz.
static void streams_ops_with_scratch(StreamOps *o)
{
    int64_t d = (int64_t)o->H * o->e, ints = attention_table_ints(o->N, 0);
    int32_t cu[2] = {0, o->N}, *table = xcalloc((size_t)ints, sizeof *table);
    int32_t *on_device = streams_alloc(ints, FP32);
    int slots = attention_table_build(table, cu, 1, o->N, 0);
    copy_to_device(stream, on_device, table, (size_t)ints * sizeof *table);
    stream_synchronize(stream);
    free(table);
    o->forward = (AttentionForward){.yg = streams_alloc(o->N * d, FLOATX),
                                    .lse = streams_alloc((int64_t)o->N * o->H, FP32),
                                    .q = o->qkv.q,
                                    .k = o->qkv.k,
                                    .v = o->qkv.v_raw,
                                    .h = o->mix.h,
                                    .gate_w = streams_alloc(MAX_GATE_INPUTS * (int64_t)o->H, FLOATX),
                                    .table = on_device,
                                    .slots = slots,
                                    .window = o->N / 4,
                                    .scale = 0.1f,
                                    .gate_inputs = MAX_GATE_INPUTS};
    const AttentionForward *f = &o->forward;
    size_t bytes = attention_scratch_bytes(o->N, o->H, o->e);
    o->backward = (AttentionBackward){.forward = f,
                                      .dqkv = streams_alloc(3 * o->N * d, FLOATX),
                                      .dlambda = streams_alloc(2, FP32),
                                      .dgate = streams_alloc((int64_t)o->N * o->H, FP32),
                                      .dgate_w = streams_alloc(MAX_GATE_INPUTS * (int64_t)o->H, FP32),
                                      .dyg = o->mix.dh,
                                      .rstd_q = o->qkv.rstd_q,
                                      .rstd_k = o->qkv.rstd_k,
                                      .v_raw = f->v,
                                      .lambda = o->qkv.lambda,
                                      .cos = o->qkv.cos,
                                      .sin = o->qkv.sin,
                                      .scratch = streams_alloc((int64_t)bytes / 4 + 1, FP32)};
    NsOptions ns = ns_options_default(NS_POLAR);
    o->ns_input = streams_alloc((int64_t)NS_BATCH * NS_ROWS * NS_COLS, FP32);
    o->ns_work = streams_alloc((int64_t)ns_workspace_bytes(&ns, NS_ROWS, NS_COLS, NS_BATCH) / 4 + 1, FP32);
}

static void run_mix(Stream s, const StreamOps *o) { mix_rmsnorm_backward(s, &o->mix, o->N, o->H * o->e); }
static const void *result_mix(const StreamOps *o, size_t *bytes)
{
    *bytes = 3 * sizeof(float);
    return o->mix.dcoef;
}

static void run_qkv(Stream s, const StreamOps *o) { qkv_backward(s, &o->qkv, o->N, o->H, o->e); }
static const void *result_qkv(const StreamOps *o, size_t *bytes)
{
    *bytes = 2 * sizeof(float);
    return o->qkv.dlambda;
}

static void run_attention(Stream s, const StreamOps *o)
{
    attention_forward(s, &o->forward, o->N, o->H, o->e);
}
static const void *result_attention(const StreamOps *o, size_t *bytes)
{
    *bytes = (size_t)o->N * (size_t)(o->H * o->e) * sizeof(floatX);
    return o->forward.yg;
}

static void run_gates(Stream s, const StreamOps *o) { attention_backward(s, &o->backward, o->N, o->H, o->e); }
static const void *result_gates(const StreamOps *o, size_t *bytes)
{
    *bytes = MAX_GATE_INPUTS * (size_t)o->H * sizeof(float);
    return o->backward.dgate_w;
}

static void run_weights(Stream s, const StreamOps *o)
{
    matmul_weight_grads(&(ProductContext){.stream = s}, &o->weights, 1, o->N);
}
static const void *result_weights(const StreamOps *o, size_t *bytes)
{
    *bytes = (size_t)o->weights.m * (size_t)o->weights.n * sizeof(float);
    return o->weights.dw;
}

static void run_relu2(Stream s, const StreamOps *o)
{
    matmul_relu2_forward(&(ProductContext){.stream = s}, o->relu2, o->mix.x, o->relu2_w, o->N, o->H * o->e,
                         o->F);
}
static const void *result_relu2(const StreamOps *o, size_t *bytes)
{
    *bytes = (size_t)o->N * (size_t)o->F * sizeof(floatX);
    return o->relu2;
}

static void *newton_schulz_of(Stream s, const StreamOps *o, int batch)
{
    NsOptions ns = ns_options_default(NS_POLAR);
    NsInput in = {.u = o->ns_input,
                  .rows = NS_ROWS,
                  .cols = NS_COLS,
                  .batch = batch,
                  .stride = (int64_t)NS_ROWS * NS_COLS};
    return newton_schulz(s, &ns, &in, o->ns_work);
}
static void run_ns(Stream s, const StreamOps *o) { newton_schulz_of(s, o, NS_BATCH); }
static const void *result_ns(const StreamOps *o, size_t *bytes)
{
    *bytes = (size_t)NS_BATCH * NS_ROWS * NS_COLS * sizeof(floatX);
    return newton_schulz_of(stream, o, 0); // batch 0 does nothing: where the result lies
}

// One op on each stream; both results, one behind the other, owned by the caller.
static char *streams_run(const StreamOp *op[2], const StreamOps o[2], const Stream s[2], size_t *bytes)
{
    size_t size[2];
    void *result[2];
    for (int i = 0; i < 2; i++) {
        result[i] = (void *)op[i]->result(&o[i], &size[i]);
        device_zero(stream, result[i], size[i]);
    }
    stream_synchronize(stream);
    for (int i = 0; i < 2; i++)
        op[i]->run(s[i], &o[i]);
    char *host = xcalloc(size[0] + size[1], 1);
    for (int i = 0; i < 2; i++) {
        stream_synchronize(s[i]);
        copy_to_host(stream, host + (i ? size[0] : 0), result[i], size[i]);
    }
    stream_synchronize(stream);
    *bytes = size[0] + size[1];
    return host;
}

static void check_streams(const void *argument)
{
    begin_data("streams", 0, 0);
    static const StreamOp mix = {"mix_rmsnorm_backward", run_mix, result_mix},
                          qkv = {"qkv_backward", run_qkv, result_qkv},
                          attention = {"attention_forward", run_attention, result_attention},
                          gates = {"attention_backward", run_gates, result_gates},
                          weights = {"matmul_weight_grads", run_weights, result_weights},
                          relu2 = {"matmul_relu2_forward", run_relu2, result_relu2},
                          ns = {"newton_schulz", run_ns, result_ns};
    static const StreamOp *pairs[][2] = {{&mix, &qkv},
                                         {&mix, &mix},
                                         {&qkv, &qkv},
                                         {&attention, &gates},
                                         {&attention, &attention},
                                         {&gates, &gates},
                                         {&weights, &weights},
                                         {&relu2, &relu2},
                                         {&ns, &ns}};
    StreamOps o[2] = {streams_ops(argument), streams_ops(argument)};
    Stream s[2] = {stream_create(), stream_create()}, one[2] = {stream, stream};
    for (int i = 0; i < 2; i++)
        streams_ops_with_scratch(&o[i]);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        size_t bytes;
        char *alone = streams_run(pairs[i], o, one, &bytes);
        int different = 0;
        for (int k = 0; k < STREAM_ROUNDS; k++) {
            char *now = streams_run(pairs[i], o, s, &bytes);
            different += memcmp(now, alone, bytes) != 0;
            free(now);
        }
        ok(different == 0, "%s and %s on two streams have the bits that they have on one: %d of %d times not",
           pairs[i][0]->name, pairs[i][1]->name, different, STREAM_ROUNDS);
        free(alone);
    }
    while (on_streams.count)
        device_free(on_streams.buffer[--on_streams.count]);
    stream_destroy(s[0]);
    stream_destroy(s[1]);
}
