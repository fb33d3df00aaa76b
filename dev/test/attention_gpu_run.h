// A case of test_attention_gpu.c, run on the builds of the CPU backend and on the GPU.
#pragma once
#include "dev/test/attention_gpu_cases.h"

// ---- running on a CPU build -------------------------------------------------------------------------------

typedef struct {
    double *x[ALL]; // outputs, from OUT_YG on; NULL: not computed
} Result;

static void free_result(Result *r)
{
    for (int i = INPUTS; i < ALL; i++)
        free(r->x[i]);
}

// p: the tensors of a case on a device
static AttentionForward forward_of(const Case *c, void *const *p, const int32_t *table, int slots)
{
    return (AttentionForward){.yg = p[OUT_YG],
                              .lse = p[LSE],
                              .q = p[QUERY],
                              .k = p[KEY],
                              .v = p[VALUE],
                              .h = p[INPUT],
                              .gate_w = p[GATE_W],
                              .table = table,
                              .slots = slots,
                              .window = c->window,
                              .scale = SCALE,
                              .gate_inputs = gate_inputs(c)};
}

static AttentionBackward backward_of(const AttentionForward *f, void *const *p, const int32_t *tokens,
                                     void *scratch)
{
    return (AttentionBackward){.forward = f,
                               .dqkv = p[OUT_DQKV],
                               .dv = p[OUT_DV],
                               .dlambda = p[DLAMBDA],
                               .dgate = p[DGATE],
                               .dgate_w = p[DGATE_W],
                               .dyg = p[DYG],
                               .rstd_q = p[RSTD],
                               .rstd_k = p[RSTD],
                               .v_raw = p[VALUE],
                               .value_embed = p[INPUT],
                               .tokens = tokens,
                               .lambda = p[LAMBDA],
                               .cos = p[COS],
                               .sin = p[SIN],
                               .scratch = scratch};
}

static void run_ops(const Case *c, Which w, void *const *p)
{
    int32_t *table = xcalloc((size_t)ops[w].attention_table_ints(c->N, 0), sizeof *table);
    int slots = ops[w].attention_table_build(table, c->cu, c->documents, c->N, 0);
    AttentionForward f = forward_of(c, p, table, slots);
    ops[w].attention_forward(NULL, &f, c->N, c->H, c->e);
    if (c->backward) {
        void *scratch = xcalloc(ops[w].attention_scratch_bytes(c->N, c->H, c->e) + 1, 1);
        AttentionBackward a = backward_of(&f, p, c->tokens, scratch);
        ops[w].attention_backward(NULL, &a, c->N, c->H, c->e);
        free(scratch);
    }
    free(table);
}

static Result run_cpu(const Case *c, Which w)
{
    void *p[ALL];
    Result r = {{NULL}};
    OpSizes sizes = {.tokens = c->N,
                     .eval_tokens = c->N,
                     .dim = c->H * c->e,
                     .heads = c->H,
                     .mlp_dim = 16,
                     .vocab_padded = 128};
    ops[w].backend_open(0);
    ops[w].backend_reserve(&sizes);
    for (int i = 0; i < ALL; i++) {
        bool in_fp32 = w == TRUTH || is_fp32(i);
        p[i] = xcalloc((size_t)elements(c, i), in_fp32 ? 4 : 2);
        if (i >= INPUTS)
            continue;
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++) {
            if (in_fp32)
                ((float *)p[i])[k] = c->input[i][k];
            else
                ((bf16 *)p[i])[k] = float_to_bf16(c->input[i][k]);
        }
    }
    run_ops(c, w, p);
    for (int i = OUT_YG; i < ALL; i++) {
        if (!c->backward && i != OUT_YG && i != LSE)
            continue;
        bool in_fp32 = w == TRUTH || is_fp32(i);
        r.x[i] = xcalloc((size_t)elements(c, i), sizeof(double));
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++)
            r.x[i][k] = in_fp32 ? ((float *)p[i])[k] : bf16_to_float(((bf16 *)p[i])[k]);
    }
    for (int i = 0; i < ALL; i++)
        free(p[i]);
    ops[w].backend_close();
    return r;
}

// ---- running on the GPU -----------------------------------------------------------------------------------

typedef struct {
    void *device[ALL], *host[ALL]; // GUARD_ROWS rows behind the last token; host: after fetch()
    size_t bytes[ALL], guarded[ALL];
    char *scratch, *host_scratch; // of the backward pass, and SCRATCH_GUARD bytes behind it
    size_t scratch_bytes;
    int32_t *tokens, *table, *host_table;
    int slots;
} Gpu;
enum { SCRATCH_GUARD = 4096 };

static void poison(Gpu *g, int i)
{
    memset(g->host[i], 0xff, g->guarded[i]); // NaN in bf16 and fp32
    copy_to_device(stream, g->device[i], g->host[i], g->guarded[i]);
}

static void upload_table(Gpu *g, const Case *c)
{
    g->slots = attention_table_build(g->host_table, c->cu, c->documents, c->N, 0);
    copy_to_device(stream, g->table, g->host_table, (size_t)attention_table_ints(c->N, 0) * sizeof(int32_t));
    stream_synchronize(stream);
}

static void upload_inputs(Gpu *g, const Case *c)
{
    for (int i = 0; i < INPUTS; i++) {
        memset(g->host[i], 0xff, g->guarded[i]);
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++) {
            if (is_fp32(i))
                ((float *)g->host[i])[k] = c->input[i][k];
            else
                ((bf16 *)g->host[i])[k] = float_to_bf16(c->input[i][k]);
        }
        copy_to_device(stream, g->device[i], g->host[i], g->guarded[i]);
    }
    stream_synchronize(stream);
}

static Gpu gpu_open(const Case *c)
{
    Gpu g;
    for (int i = 0; i < ALL; i++) {
        size_t width = is_fp32(i) ? 4 : 2;
        g.bytes[i] = (size_t)elements(c, i) * width;
        g.guarded[i] = g.bytes[i] + GUARD_ROWS * (size_t)(c->H * c->e) * width;
        g.device[i] = device_alloc(g.guarded[i], names[i]);
        g.host[i] = xcalloc(g.guarded[i], 1);
        poison(&g, i);
    }
    g.scratch_bytes = c->backward ? attention_scratch_bytes(c->N, c->H, c->e) : 0;
    g.scratch = device_alloc(g.scratch_bytes + SCRATCH_GUARD, "scratch");
    g.host_scratch = xcalloc(g.scratch_bytes + SCRATCH_GUARD, 1);
    g.tokens = device_alloc((size_t)c->N * sizeof *g.tokens, "tokens");
    copy_to_device(stream, g.tokens, c->tokens, (size_t)c->N * sizeof *g.tokens);
    size_t ints = (size_t)attention_table_ints(c->N, 0);
    g.table = device_alloc(ints * sizeof(int32_t), "table");
    g.host_table = xcalloc(ints, sizeof(int32_t));
    upload_table(&g, c);
    return g;
}

static void gpu_close(Gpu *g)
{
    for (int i = 0; i < ALL; i++) {
        device_free(g->device[i]);
        free(g->host[i]);
    }
    device_free(g->scratch);
    device_free(g->tokens);
    device_free(g->table);
    free(g->host_scratch);
    free(g->host_table);
}

static void queue_forward(const Gpu *g, const Case *c, int slots)
{
    AttentionForward a = forward_of(c, g->device, g->table, slots);
    attention_forward(stream, &a, c->N, c->H, c->e);
}

// What the caller may leave out.
typedef enum { WHOLE, WITHOUT_DV, WITHOUT_VALUES, WAYS } Way;

static void queue_backward(const Gpu *g, const Case *c, int slots, Way way)
{
    AttentionForward f = forward_of(c, g->device, g->table, slots);
    AttentionBackward a = backward_of(&f, g->device, g->tokens, g->scratch);
    if (way != WHOLE)
        a.dv = NULL;
    if (way == WITHOUT_VALUES)
        a.value_embed = NULL;
    attention_backward(stream, &a, c->N, c->H, c->e);
}

static void fetch(Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        copy_to_host(stream, g->host[i], g->device[i], g->guarded[i]);
    stream_synchronize(stream);
}

static void poison_outputs(Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        poison(g, i);
    memset(g->host_scratch, 0xff, g->scratch_bytes + SCRATCH_GUARD);
    copy_to_device(stream, g->scratch, g->host_scratch, g->scratch_bytes + SCRATCH_GUARD);
    device_zero(stream, g->device[DGATE_W], g->bytes[DGATE_W]); // they are added to
    device_zero(stream, g->device[DLAMBDA], g->bytes[DLAMBDA]);
}

static void run_gpu(Gpu *g, const Case *c, int slots, Way way)
{
    poison_outputs(g);
    queue_forward(g, c, slots);
    if (c->backward)
        queue_backward(g, c, slots, way);
    fetch(g);
}

static bool guards_untouched(const Gpu *g)
{
    char guard[SCRATCH_GUARD];
    copy_to_host(stream, guard, g->scratch + g->scratch_bytes, SCRATCH_GUARD);
    stream_synchronize(stream);
    for (int at = 0; at < SCRATCH_GUARD; at++)
        if ((unsigned char)guard[at] != 0xff)
            return false;
    for (int i = INPUTS; i < ALL; i++)
        for (size_t at = g->bytes[i]; at < g->guarded[i]; at++)
            if (((unsigned char *)g->host[i])[at] != 0xff)
                return false;
    return true;
}

// Copies of the outputs now in g->host; owned by the caller.
static void keep(void *kept[ALL], const Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        kept[i] = memcpy(xcalloc(g->guarded[i], 1), g->host[i], g->guarded[i]);
}

static void release(void *kept[ALL])
{
    for (int i = INPUTS; i < ALL; i++)
        free(kept[i]);
}

static bool same_dqkv(const bf16 *a, const bf16 *b, const Case *c, bool dq_too)
{
    size_t d = (size_t)(c->H * c->e), first = dq_too ? 0 : d;
    for (size_t t = 0; t < (size_t)c->N; t++)
        if (memcmp(a + 3 * t * d + first, b + 3 * t * d + first, (3 * d - first) * sizeof *a))
            return false;
    return true;
}

// All outputs; where dq is summed in no fixed order, its last bits may differ.
static bool same_bits(void *const a[ALL], void *const b[ALL], const Gpu *g, const Case *c, bool dq_too)
{
    for (int i = INPUTS; i < ALL; i++)
        if (i != OUT_DQKV && memcmp(a[i], b[i], g->bytes[i]))
            return false;
    return !c->backward || same_dqkv(a[OUT_DQKV], b[OUT_DQKV], c, dq_too);
}
