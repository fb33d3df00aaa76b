// Different ops on two streams at the same time give the bits that they give alone: each has scratch memory
// and a counter of its own. Both ops end in a sum over the whole grid, which a shared counter would cut
// short.
#pragma once

enum { STREAM_ROUNDS = 50, STREAM_BUFFERS = 24 };

static struct {
    void *buffer[STREAM_BUFFERS];
    int count;
} on_streams;

// Random values; freed by streams_close.
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
    return on_streams.buffer[on_streams.count++] = p;
}

typedef struct {
    MixBackward mix;
    QkvBackward qkv;
    float *sums; // dcoef (3), then dlambda (2)
    int N, H, e;
} TwoOps;

static TwoOps streams_ops(int N, int H, int e)
{
    int64_t d = (int64_t)H * e, n = N * d, heads = (int64_t)N * H, angles = (int64_t)N * e / 4;
    TwoOps t = {.sums = streams_alloc(5, FP32), .N = N, .H = H, .e = e};
    t.mix = (MixBackward){.dx = streams_alloc(n, FLOATX),
                          .dx0 = streams_alloc(n, FLOATX),
                          .dcoef = t.sums,
                          .dh = streams_alloc(n, FLOATX),
                          .h = streams_alloc(n, FLOATX),
                          .rstd = streams_alloc(N, FP32),
                          .x = streams_alloc(n, FLOATX),
                          .x0 = streams_alloc(n, FLOATX),
                          .coef = streams_alloc(3, FP32)};
    t.qkv = (QkvBackward){.dqkv = streams_alloc(3 * n, FLOATX),
                          .dlambda = t.sums + 3,
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
    return t;
}

static void streams_run(const TwoOps *t, Stream a, Stream b, float sums[5])
{
    device_zero(stream, t->sums, 5 * sizeof *sums);
    stream_synchronize(stream);
    mix_rmsnorm_backward(a, &t->mix, t->N, t->H * t->e);
    qkv_backward(b, &t->qkv, t->N, t->H, t->e);
    stream_synchronize(a);
    stream_synchronize(b);
    copy_to_host(stream, sums, t->sums, 5 * sizeof *sums);
    stream_synchronize(stream);
}

static void check_streams(const void *argument)
{
    const Sizes *z = argument;
    TwoOps t = streams_ops(z->N, z->H, z->e);
    Stream a = stream_create(), b = stream_create();
    float alone[5], sums[5];
    int different = 0;
    streams_run(&t, stream, stream, alone);
    for (int i = 0; i < STREAM_ROUNDS; i++) {
        streams_run(&t, a, b, sums);
        different += memcmp(sums, alone, sizeof sums) != 0;
    }
    ok(different == 0, "two ops on two streams have the bits that they have alone: %d of %d times not",
       different, STREAM_ROUNDS);
    while (on_streams.count)
        device_free(on_streams.buffer[--on_streams.count]);
    stream_destroy(a);
    stream_destroy(b);
}
