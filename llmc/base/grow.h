#pragma once
#include "llmc/base/common.h"

// The array with room for `needed` elements of `size` bytes. When it has to grow, it has twice as much room
// and more: to append one by one takes linear time.  array NULL, *capacity 0: none yet
static inline void *grow(void *array, size_t *capacity, size_t needed, size_t size)
{
    if (needed <= *capacity)
        return array;
    *capacity = *capacity + needed + 16;
    return xrealloc(array, *capacity, size);
}
