// The order in which attention's kernels take tiles. Without CUDA, so that a test can count on any machine.
#pragma once
#include "llmc/base/common.h"
#include <stdlib.h>

static inline int tile_order_rising(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

// Numbers of tiles of `size` tokens. A tile of keys counts to the document of its last token, which the most
// queries see, one of queries to that of its first, which sees the most keys. Whole documents one after the
// other: the tiles of one read the same rows, which then are still in L2. Longest first: what comes last is
// short work. Tiles of keys from the last to the first: see sm90_backward.cu.
static inline void tile_order_sort(int32_t *tiles, int size, bool keys, const int32_t *cu, int documents,
                                   int N)
{
    int count = (int)ceil_div(N, size), document = 0;
    uint64_t *order = xcalloc((size_t)count, sizeof *order);
    for (int i = 0; i < count; i++) {
        int first = i * size, token = keys ? (int)min_i64(N, first + size) - 1 : first;
        while (document + 1 < documents && cu[document + 1] <= token)
            document++;
        order[i] = (uint64_t) ~(uint32_t)(cu[document + 1] - cu[document]) << 32 |
                   (uint32_t)(keys ? count - 1 - i : i);
    }
    qsort(order, (size_t)count, sizeof *order, tile_order_rising);
    for (int i = 0; i < count; i++)
        tiles[i] = keys ? count - 1 - (int32_t)(uint32_t)order[i] : (int32_t)(uint32_t)order[i];
    free(order);
}

// Numbers of tiles of `size` tokens, the furthest reach first: of queries from their end to the begin of the
// first one's document, of keys from their begin to the end of the last one's. Those see the most keys, or
// are seen by the most queries, but for what the window cuts off.
static inline void tile_order_by_reach(int32_t *tiles, int size, bool keys, const int32_t *cu, int documents,
                                       int N)
{
    int count = (int)ceil_div(N, size), document = 0;
    uint64_t *order = xcalloc((size_t)count, sizeof *order);
    for (int i = 0; i < count; i++) {
        int first = i * size, end = (int)min_i64(N, first + size), token = keys ? end - 1 : first;
        while (document + 1 < documents && cu[document + 1] <= token)
            document++;
        int reach = keys ? cu[document + 1] - first : end - cu[document];
        order[i] = (uint64_t) ~(uint32_t)reach << 32 | (uint32_t)i;
    }
    qsort(order, (size_t)count, sizeof *order, tile_order_rising);
    for (int i = 0; i < count; i++)
        tiles[i] = (int32_t)(uint32_t)order[i];
    free(order);
}

// late[i]: 1 where tile i is taken after tile i - 1, else 0.
static inline void tile_order_mark_late(int32_t *late, const int32_t *tiles, int count)
{
    int *rank = xcalloc((size_t)count, sizeof *rank);
    for (int i = 0; i < count; i++)
        rank[tiles[i]] = i;
    for (int i = 0; i < count; i++)
        late[i] = i > 0 && rank[i] > rank[i - 1];
    free(rank);
}
