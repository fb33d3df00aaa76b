// What the GPU test of Newton-Schulz compares: arrays on the device between guard zones, and their elements
// as doubles.
#pragma once
#include "dev/test/ns_reference.h"
#include "llmc/cuda/device/device.h"
#include "llmc/base/floatx.h"
#include "llmc/ops/ops.h"

// ---- elements ---------------------------------------------------------------------------------------------

static const char *const dtype_name[] = {"bf16", "fp16", "fp32"};
static const double unit_roundoff[] = {0x1p-8, 0x1p-11, 0x1p-24};
static const double smallest_step[] = {0, 0x1p-25,
                                       0}; // half the spacing of subnormals, where they are within reach

static double get(NsDtype dtype, const void *p, int64_t i)
{
    if (dtype == NS_BF16)
        return bf16_to_float(((const bf16 *)p)[i]);
    if (dtype == NS_FP16)
        return (double)((const _Float16 *)p)[i];
    return ((const float *)p)[i];
}

static void put(NsDtype dtype, void *p, int64_t i, double v)
{
    if (dtype == NS_BF16)
        ((bf16 *)p)[i] = float_to_bf16((float)v);
    if (dtype == NS_FP16)
        ((_Float16 *)p)[i] = (_Float16)(float)v;
    if (dtype == NS_FP32)
        ((float *)p)[i] = (float)v;
}

// ---- device arrays with guard zones -----------------------------------------------------------------------

enum { GUARD = 4096, POISON = 0xff }; // NaN in every dtype: an element that was not written shows

typedef struct {
    char *base;
    void *p;
    size_t bytes;
} Array;

static Array array_new(size_t bytes)
{
    Array a = {.bytes = bytes};
    a.base = device_alloc(bytes + 2 * GUARD, "test array");
    a.p = a.base + GUARD;
    void *fill = malloc(bytes + 2 * GUARD);
    memset(fill, POISON, bytes + 2 * GUARD);
    copy_to_device(NULL, a.base, fill, bytes + 2 * GUARD);
    stream_synchronize(NULL);
    free(fill);
    return a;
}

static bool intact_and_free(Array a)
{
    unsigned char *copy = malloc(a.bytes + 2 * GUARD);
    copy_to_host(NULL, copy, a.base, a.bytes + 2 * GUARD);
    stream_synchronize(NULL);
    bool intact = true;
    for (size_t i = 0; i < GUARD; i++)
        intact = intact && copy[i] == POISON && copy[GUARD + a.bytes + i] == POISON;
    free(copy);
    device_free(a.base);
    return intact;
}

static Array uploaded(Array a, void *host) // which is freed
{
    copy_to_device(NULL, a.p, host, a.bytes);
    stream_synchronize(NULL);
    free(host);
    return a;
}
// Values rounded to the dtype, on the device; `rounded`, when not NULL, gets them back as doubles.
static Array array_of(NsDtype dtype, const double *values, int64_t count, double *rounded)
{
    Array a = array_new((size_t)count * ns_element_size(dtype));
    void *host = xcalloc((size_t)count + 1, 4);
    for (int64_t i = 0; i < count; i++) {
        put(dtype, host, i, values[i]);
        if (rounded)
            rounded[i] = get(dtype, host, i);
    }
    return uploaded(a, host);
}
// The same for (rows, m) with rows `pitch` apart; between them there is poison.
static Array pitched_of(NsDtype dtype, const double *values, int64_t rows, int m, int pitch, double *rounded)
{
    Array a = array_new((size_t)rows * (size_t)pitch * ns_element_size(dtype));
    char *host = malloc(a.bytes);
    memset(host, POISON, a.bytes);
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < m; j++) {
            put(dtype, host, i * pitch + j, values[i * m + j]);
            if (rounded)
                rounded[i * m + j] = get(dtype, host, i * pitch + j);
        }
    return uploaded(a, host);
}

static double *values_of(NsDtype dtype, const void *p, int64_t count)
{
    void *host = xcalloc((size_t)count + 1, 4);
    double *v = matrix(count, 1);
    copy_to_host(NULL, host, p, (size_t)count * ns_element_size(dtype));
    stream_synchronize(NULL);
    for (int64_t i = 0; i < count; i++)
        v[i] = get(dtype, host, i);
    free(host);
    return v;
}

static double *pitched_values(NsDtype dtype, const void *p, int64_t rows, int m, int pitch)
{
    double *all = values_of(dtype, p, rows * pitch), *v = matrix(rows, m);
    for (int64_t i = 0; i < rows; i++)
        memcpy(v + i * m, all + i * pitch, (size_t)m * sizeof *v);
    free(all);
    return v;
}
