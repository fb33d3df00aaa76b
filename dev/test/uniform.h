// Numbers in [0, 1) for the GPU tests' inputs, each found from its index alone, so that threads can share the
// work on long arrays: without that, filling and comparing take most of these programs' time.
#pragma once
#include <stdint.h>

static uint64_t random_used;
static double uniform_at(uint64_t index)
{
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 40) * 0x1p-24;
}

static double uniform(void) { return uniform_at(random_used++); }
