// Heads for tests and benches: that of the records of 2025, and one in which every constant is another. Its
// FP8 scales are powers of two: products with them are exact.
#pragma once
#include "llmc/ops/head.h"

static const HeadSpec head_plain = {.cap = 30, .slope = 7.5f, .range_w = 0.875f, .range_g = 1};
static const HeadSpec head_shifted =
    {.cap = 23, .slope = 6, .shift = 5, .range_x = 7, .range_w = 1.75f, .range_g = 0.875f};
