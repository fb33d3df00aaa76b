// Reading the golden files of dev/reference/golden (format: dev/reference/README.md).
#pragma once
#include "llmc/io/safetensors.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "llmc/base/floatx.h"

#define GOLDEN "dev/reference/golden/"

static SafeTensors *open_golden(const char *name)
{
    Error e;
    char *path = format_string(GOLDEN "%s.safetensors", name);
    SafeTensors *st = safetensors_open(path, &e);
    if (!st)
        fatal(1, "%s (run the tests from the top folder)", e.text);
    free(path);
    return st;
}

// A whole tensor as fresh memory of 4-byte elements; *count its number.
static void *read_golden(const SafeTensors *st, const char *name, int64_t *count)
{
    Error e;
    const TensorInfo *info = safetensors_find(st, name);
    if (!info)
        fatal(1, "golden file lacks %s", name);
    void *data = xcalloc((size_t)info->bytes + 4, 1);
    if (!safetensors_read(st, name, data, (size_t)info->bytes, &e))
        fatal(1, "%s", e.text);
    int64_t n = info->bytes / safetensors_dtype_size(info->dtype);
    if (info->dtype == ST_BF16) {
        float *wide = xcalloc((size_t)n + 1, 4);
        for (int64_t i = 0; i < n; i++)
            wide[i] = bf16_to_float(((bf16 *)data)[i]);
        free(data);
        data = wide;
    }
    if (count)
        *count = n;
    return data;
}

static inline float *golden_values(const SafeTensors *st, const char *prefix, const char *name,
                                   int64_t *count)
{
    char *key = format_string("%s%s", prefix, name);
    float *x = read_golden(st, key, count);
    free(key);
    return x;
}
