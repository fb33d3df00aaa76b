// Part of test_attention_gpu.c: asked for a fixed order of sums, the own kernels give the same bits in every
// run, also beside other work, which changes when their CTAs start and how fast they are. No reference is
// computed: sizes are those of training. The same bits, too, whichever heads have gradients of scores in
// memory at a time.
#pragma once
#include "dev/test/attention_gpu_run.h"
#include <math.h>

enum { REPEATS = 10, LOADS = 3 }; // LOADS: calls on another stream beside every second repeat

// qk: width of a head of q and k in attention alone; 0: attention with norm, rotation and gate
static void queue_whole(const Gpu *g, const Case *c, int qk)
{
    if (qk == 0) {
        device_zero(stream, g->device[DGATE_W], g->bytes[DGATE_W]); // they are added to
        device_zero(stream, g->device[DLAMBDA], g->bytes[DLAMBDA]);
        queue_forward(g, c, g->slots);
        queue_backward(g, c, g->slots, WHOLE);
        return;
    }
    floatX *gradients = g->device[OUT_DQKV];
    SdpaForward f = {.y = g->device[OUT_YG],
                     .lse = g->device[LSE],
                     .q = g->device[QUERY],
                     .k = g->device[KEY],
                     .v = g->device[VALUE],
                     .qk = qk,
                     .table = g->table,
                     .slots = g->slots,
                     .window = c->window,
                     .scale = SCALE};
    SdpaBackward b = {.forward = &f,
                      .dq = gradients,
                      .dk = gradients + elements(c, QUERY),
                      .dv = g->device[OUT_DV],
                      .dy = g->device[DYG],
                      .scratch = g->scratch};
    assert(sdpa_scratch_bytes(c->N, c->H, qk, c->e) <= g->scratch_bytes);
    sdpa_forward(stream, &f, c->N, c->H, c->e);
    sdpa_backward(stream, &b, c->N, c->H, c->e);
}

static bool all_same(void *const first[ALL], const Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        if (memcmp(first[i], g->host[i], g->guarded[i]))
            return false;
    return true;
}

static void check_repeats(Case c, int qk)
{
    Stream own = stream, beside = stream_create();
    void *first[ALL];
    int differ = 0;
    make_inputs(&c);
    Gpu g = gpu_open(&c), load = gpu_open(&c);
    upload_inputs(&g, &c);
    upload_inputs(&load, &c);
    queue_whole(&g, &c, qk);
    fetch(&g);
    keep(first, &g);
    for (int i = 0; i < REPEATS; i++) {
        stream = beside;
        for (int k = 0; k < (i % 2 ? LOADS : 0); k++)
            queue_whole(&load, &c, qk);
        stream = own;
        queue_whole(&g, &c, qk);
        fetch(&g);
        differ += !all_same(first, &g);
        stream_synchronize(beside);
    }
    stream = beside;
    fetch(&load);
    stream = own;
    bool same_there = all_same(first, &load);
    ok(differ == 0 && same_there, "%s, %d runs: %s N=%d H=%d q and k of %d window=%d: %d differ%s",
       attention_description(), REPEATS, c.name, c.N, c.H, qk ? qk : c.e, c.window, differ,
       same_there ? "" : ", and the other stream's");
    release(first);
    stream_destroy(beside);
    gpu_close(&g);
    gpu_close(&load);
    free_inputs(&c);
}

static int count_nan(const floatX *x, int64_t n)
{
    int count = 0;
    for (int64_t i = 0; i < n; i++)
        count += isnan(x_to_float(x[i]));
    return count;
}

// The portable backward pass with memory for gradients of scores of all heads, of one, of all but one: the
// same bits, whatever that memory held.
static void check_groups(Case c, int qk)
{
    const int heads[] = {c.H, 1, c.H - 1};
    void *first[ALL];
    int differ = 0, nan = 0;
    Error e;
    make_inputs(&c);
    Gpu g = gpu_open(&c);
    upload_inputs(&g, &c);
    float *row_sums = device_alloc((size_t)(c.N * c.H) * sizeof(float), "row sums");
    floatX *gradients = g.device[OUT_DQKV];
    AttentionCall a = attention_call(g.table, g.slots, SCALE, c.window, c.N, c.H, c.e);
    a.qk = qk;
    a.q = g.device[QUERY];
    a.k = g.device[KEY];
    a.v = g.device[VALUE];
    a.y = g.device[OUT_YG];
    a.lse = g.device[LSE];
    a.dy = g.device[DYG];
    a.row_sums = row_sums;
    a.dq = gradients;
    a.dk = gradients + elements(&c, QUERY);
    a.dv = g.device[OUT_DV];
    size_t most = attention_sm80_ds_bytes(c.N, c.H, a.reach);
    char *all_ones = xcalloc(most, 1);
    memset(all_ones, 0xff, most); // NaN
    a.ds = device_alloc(most, "gradients of scores");
    bool good = attention_sm80_prepare(qk, c.e, &e) && attention_sm80_prepare_backward(qk, c.e, &e);
    if (good)
        attention_sm80_forward(&a, stream);
    attention_row_sums(stream, row_sums, a.dy, a.y, (int64_t)c.N * c.H, c.e);
    for (int i = 0; good && i < 3; i++) {
        copy_to_device(stream, a.ds, all_ones, most);
        a.ds_bytes = attention_sm80_ds_bytes(c.N, heads[i], a.reach);
        good = a.ds_bytes == most / (size_t)c.H * (size_t)heads[i];
        attention_sm80_backward(&a, stream);
        fetch(&g);
        if (i == 0)
            keep(first, &g);
        differ += !all_same(first, &g);
        const floatX *dqkv = g.host[OUT_DQKV];
        int64_t of_keys = (int64_t)c.N * c.H * qk;
        nan += count_nan(dqkv, of_keys) + count_nan(dqkv + elements(&c, QUERY), of_keys) +
               count_nan(g.host[OUT_DV], elements(&c, OUT_DV));
    }
    ok(good && differ == 0 && nan == 0,
       "%s N=%d H=%d e=%d q and k of %d window=%d, heads in groups: %d differ, %d NaN%s%s", c.name, c.N, c.H,
       c.e, qk, c.window, differ, nan, good ? "" : ": ", good ? "" : e.text);
    if (good)
        release(first);
    free(all_ones);
    device_free(a.ds);
    device_free(row_sums);
    gpu_close(&g);
    free_inputs(&c);
}

static void check_all_repeats(void)
{
    static const int all[] = {TOKENS};
    check_repeats(make_text_case("text", TOKENS, 47, 2048, 6, 128, 896), 0);
    check_repeats(make_case("one document", all, 1, 6, 128, 1408), 0);
    check_repeats(make_text_case("text, many documents", 20000, 140, 400, 6, 128, 128), 128);
    check_repeats(make_text_case("text", TOKENS, 47, 2048, 6, 128, 384), 96);
    check_repeats(make_text_case("text, pairs of heads", 2 * TOKENS, 60, 4096, 3, 128, 640), 128);
}
