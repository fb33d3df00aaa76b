// Memory of many tensors, planned first and allocated once: the same function takes its tensors twice, from
// an arena without memory, which only counts, and from one with as many bytes as were counted.
#pragma once
#include "llmc/base/common.h"

typedef struct {
    char *base; // NULL: only counts
    size_t used;
} Arena;

static inline void *arena_take(Arena *a, size_t elements, size_t size) // 256-byte aligned
{
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (size_t)round_up((int64_t)(elements * size), 256);
    return p;
}
