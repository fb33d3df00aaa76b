// The order in which attention's kernels take tiles: every tile once, whole documents together, longest
// first, and which tiles are taken after the one in front of them.
#include "dev/test/tap.h"
#include "llmc/cuda/attention/tile_order.h"
#include <string.h>

enum {
    MOST_TOKENS = 2600,
    MOST_DOCUMENTS = 40,
    KEYS = 128,
    QUERIES = 192,
    MOST_TILES = MOST_TOKENS / KEYS + 2,
    CASES = 3000
};

typedef struct {
    int N, documents;
    int32_t cu[MOST_DOCUMENTS + 1];
} Batch;

static uint32_t state = 12345;
static int random_below(int n)
{
    state = state * 1664525u + 1013904223u;
    return (int)((uint64_t)(state >> 8) * (uint64_t)n >> 24);
}

static void random_batch(Batch *b)
{
    b->N = 1 + random_below(MOST_TOKENS);
    b->documents = 1 + random_below(b->N < MOST_DOCUMENTS ? b->N : MOST_DOCUMENTS);
    b->cu[0] = 0;
    for (int i = 1; i <= b->documents; i++) {
        int left = b->N - b->cu[i - 1] - (b->documents - i); // each gets a token
        b->cu[i] = i == b->documents ? b->N : b->cu[i - 1] + 1 + random_below(left);
    }
}

static int document_of(const Batch *b, int token)
{
    int d = 0;
    while (b->cu[d + 1] <= token)
        d++;
    return d;
}

// Tiles of `size` tokens: how often one is missing, or taken while a longer document's is still to come, or
// out of order in its document.
static int wrong_places(const Batch *b, const int32_t *tiles, int size, bool keys)
{
    int count = (int)ceil_div(b->N, size), seen[MOST_TILES] = {0}, wrong = 0, before = 0, length = INT32_MAX;
    for (int i = 0; i < count; i++) {
        int end = (tiles[i] + 1) * size, token = keys ? (end < b->N ? end : b->N) - 1 : tiles[i] * size;
        int document = document_of(b, token), own = b->cu[document + 1] - b->cu[document];
        bool same = i && own == length && document == before;
        wrong += seen[tiles[i]]++ || own > length;
        wrong += same && (keys ? tiles[i] > tiles[i - 1] : tiles[i] < tiles[i - 1]);
        before = document;
        length = own;
    }
    return wrong;
}

// The same of tiles by their reach: of queries back in the document of the first, of keys on in that of the
// last.
static int wrong_reaches(const Batch *b, const int32_t *tiles, int size, bool keys)
{
    int count = (int)ceil_div(b->N, size), seen[MOST_TILES] = {0}, wrong = 0, before = INT32_MAX;
    for (int i = 0; i < count; i++) {
        int first = tiles[i] * size, end = first + size < b->N ? first + size : b->N,
            reach = keys ? b->cu[document_of(b, end - 1) + 1] - first : end - b->cu[document_of(b, first)];
        wrong += seen[tiles[i]]++ || reach > before;
        before = reach;
    }
    return wrong;
}

static void check_orders(void)
{
    int32_t tiles[MOST_TILES], late[MOST_TILES];
    int wrong[3] = {0, 0, 0}, wrong_late = 0, of_late = 0;
    for (int n = 0; n < CASES; n++) {
        Batch b;
        random_batch(&b);
        tile_order_sort(tiles, QUERIES, false, b.cu, b.documents, b.N);
        wrong[0] += wrong_places(&b, tiles, QUERIES, false);
        tile_order_sort(tiles, KEYS, true, b.cu, b.documents, b.N);
        wrong[1] += wrong_places(&b, tiles, KEYS, true);
        for (int keys = 0; keys < 2; keys++) {
            tile_order_by_reach(tiles, KEYS, keys, b.cu, b.documents, b.N);
            wrong[2] += wrong_reaches(&b, tiles, KEYS, keys);
        }
        tile_order_sort(tiles, KEYS, true, b.cu, b.documents, b.N);
        int count = (int)ceil_div(b.N, KEYS);
        tile_order_mark_late(late, tiles, count);
        for (int i = 0; i < count; i++) {
            bool front = false; // whether the tile in front of tiles[i] was taken before it
            for (int k = 0; k < i; k++)
                front = front || tiles[k] == tiles[i] - 1;
            wrong_late += late[tiles[i]] != front;
            of_late += front;
        }
    }
    ok(wrong[0] == 0, "%d batches: each tile of queries once, longest document first, in its order", CASES);
    ok(wrong[1] == 0, "each tile of keys once, longest document first, from its end");
    ok(wrong[2] == 0, "each tile of queries, and of keys, once, the furthest reach first");
    ok(wrong_late == 0 && of_late > CASES / 10, "%d tiles are taken after the one in front of them", of_late);
}

int main(void)
{
    // Documents of 100, 400 and 200 tokens: tiles 0 to 2 end in the second, which is the longest, the others
    // in the third.
    const int32_t cu[] = {0, 100, 500, 700}, order[] = {2, 1, 0, 5, 4, 3}, after[] = {0, 0, 0, 1, 0, 0};
    int32_t tiles[12], late[6];
    tile_order_sort(tiles, KEYS, true, cu, 3, 700);
    ok(!memcmp(tiles, order, sizeof order), "tiles of keys: longest document first, from its end");
    tile_order_mark_late(late, tiles, 6);
    ok(!memcmp(late, after, sizeof after), "the one tile that is taken after that in front of it");
    check_orders();
    return tap_done();
}
