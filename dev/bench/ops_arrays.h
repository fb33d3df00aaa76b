// Device arrays of benches of ops. Ops run on SETS of buffers in turn, so that none finds its inputs in a
// cache.
#pragma once
#include "dev/bench/fill.h"

enum { SETS = 2 };
static Stream stream;
static int now; // which set

static floatX *tensor(int64_t n, float scale)
{
    floatX *p = device_alloc((size_t)n * sizeof *p, "bench");
    fill_floatx(stream, p, n, scale);
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
