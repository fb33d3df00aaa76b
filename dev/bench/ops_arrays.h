// Device arrays of benches of ops. Ops run on SETS of buffers in turn, so that none finds its inputs in a
// cache.
#pragma once
#include "llmc/ops/ops.h"
#include <stdlib.h>

enum { SETS = 2 };
static Stream stream;
static int now; // which set

static void fill_floatx(floatX *p, int64_t n, float scale)
{
    enum { BLOCK = 1 << 20 };
    static bf16
        block[BLOCK]; // repeated: speed depends on the values' distribution, not on their being different
    for (int i = 0; i < BLOCK; i++)
        block[i] = float_to_bf16(scale * ((float)rand() / (float)RAND_MAX * 2 - 1));
    for (int64_t at = 0; at < n; at += BLOCK)
        copy_to_device(stream, p + at, block, (size_t)min_i64(BLOCK, n - at) * sizeof *p);
    stream_synchronize(stream);
}

static floatX *tensor(int64_t n, float scale)
{
    floatX *p = device_alloc((size_t)n * sizeof *p, "bench");
    fill_floatx(p, n, scale);
    return p;
}

static float *floats(int64_t n, float value)
{
    float *p = device_alloc((size_t)n * sizeof *p, "bench"), *host = xcalloc((size_t)n, sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = value * (0.5f + (float)(i % 997) / 997);
    copy_to_device(stream, p, host, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    free(host);
    return p;
}

static int32_t *integers(const int32_t *x, int64_t n)
{
    int32_t *p = device_alloc((size_t)n * sizeof *p, "bench");
    copy_to_device(stream, p, x, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    return p;
}
