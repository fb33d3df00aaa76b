// Random values for benches.
#pragma once
#include "llmc/ops/ops.h"
#include <stdlib.h>

// p (n) device, uniform within +-scale. The values repeat: speed depends on their distribution, not on their
// being different.
static void fill_floatx(Stream s, floatX *p, int64_t n, float scale)
{
    enum { BLOCK = 1 << 20 };
    static bf16 block[BLOCK];
    for (int i = 0; i < BLOCK; i++)
        block[i] = float_to_bf16(scale * ((float)rand() / (float)RAND_MAX * 2 - 1));
    for (int64_t at = 0; at < n; at += BLOCK)
        copy_to_device(s, p + at, block, (size_t)min_i64(BLOCK, n - at) * sizeof *p);
    stream_synchronize(s);
}
