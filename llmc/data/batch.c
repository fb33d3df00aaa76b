#include "llmc/data/batch.h"
#include <stdlib.h>
#include <string.h>

// ---- memory -----------------------------------------------------------------------------------------------

// Points the arrays into the block, one after another; returns the ints they take.
static size_t lay_out(Batch *b)
{
    bool pairs = b->tables.pairs.rows, prefix = b->tables.prefix;
    struct {
        int32_t **array;
        int extra; // entries beyond N
        bool there;
    } arrays[] = {
        {&b->tokens, 0, true},        {&b->targets, 0, true},      {&b->cu_seqlens, 1, true},
        {&b->rows.order, 0, true},    {&b->rows.row, 0, true},     {&b->rows.start, 1, true},
        {&b->prefix, 0, prefix},      {&b->bigram_rows, 0, pairs}, {&b->sign_rows, 0, pairs},
        {&b->bigram.order, 0, pairs}, {&b->bigram.row, 0, pairs},  {&b->bigram.start, 1, pairs},
    };
    size_t offset = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        if (!arrays[i].there)
            continue;
        *arrays[i].array = b->block ? b->block + offset : NULL;
        offset += (size_t)round_up((int64_t)b->N + arrays[i].extra, BATCH_ALIGN);
    }
    return offset;
}

size_t batch_ints(int N, const BatchTables *tables)
{
    Batch b = {.N = N, .tables = *tables};
    return lay_out(&b);
}

void batch_alloc(Batch *b, int N, const BatchTables *tables)
{
    assert(N >= 1 && N <= MAX_BATCH_TOKENS);
    *b = (Batch){.N = N};
    if (tables)
        b->tables = *tables;
    assert(!b->tables.pairs.rows || (b->tables.pairs.rows > 2 && b->tables.pairs.sign_rows > 0));
    b->block_ints = batch_ints(N, &b->tables);
    b->block = xcalloc(b->block_ints, sizeof *b->block);
    b->scratch = xcalloc((size_t)N, sizeof *b->scratch);
    lay_out(b);
}

void batch_free(Batch *b)
{
    free(b->block);
    free(b->scratch);
    memset(b, 0, sizeof *b);
}

// ---- rows -------------------------------------------------------------------------------------------------

static void counts_to_offsets(int32_t *counts, int n)
{
    int32_t sum = 0;
    for (int i = 0; i < n; i++) {
        int32_t count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}

// Radix sort, two stable passes over `bits` bits each: the counters stay in the L1 cache whatever the table's
// size, where one count per row would not. An element carries its row along, row << 32 | position, so that no
// pass looks rows up at random.
static void sort_positions(int32_t *order, const int32_t *ids, int N, int bits, uint64_t *scratch)
{
    enum { MOST = 1 << 12 };
    int32_t low[MOST], high[MOST];
    const int n = 1 << bits;
    assert(n <= MOST);
    memset(low, 0, (size_t)n * sizeof *low);
    memset(high, 0, (size_t)n * sizeof *high);
    for (int i = 0; i < N; i++) {
        low[ids[i] & (n - 1)]++;
        high[ids[i] >> bits]++;
    }
    counts_to_offsets(low, n);
    counts_to_offsets(high, n);
    for (int i = 0; i < N; i++)
        scratch[low[ids[i] & (n - 1)]++] = (uint64_t)ids[i] << 32 | (uint32_t)i;
    for (int i = 0; i < N; i++)
        order[high[scratch[i] >> (32 + bits)]++] = (int32_t)(uint32_t)scratch[i];
}

static void sort_rows(BatchRows *r, const int32_t *ids, int N, int bits, uint64_t *scratch)
{
    sort_positions(r->order, ids, N, bits, scratch);
    r->count = 0;
    for (int i = 0; i < N; i++) {
        int32_t row = ids[r->order[i]];
        if (i > 0 && row == r->row[r->count - 1])
            continue;
        r->row[r->count] = row;
        r->start[r->count++] = i;
    }
    r->start[r->count] = N;
}

static int32_t pair_row(const PairHash *h, int32_t token, int32_t before)
{
    int32_t mixed = (int32_t)(36313 * (uint32_t)token ^ 27191 * (uint32_t)before);
    int32_t row = mixed % (h->rows - 1);
    return row < 0 ? row + h->rows - 1 : row;
}

PairRows pair_hash(const PairHash *h, int32_t token, int32_t before, int position)
{
    if (position == 0)
        return (PairRows){h->rows - 1, 0};
    return (PairRows){pair_row(h, token, position == 1 ? h->rows - 1 : before),
                      (token ^ before) % h->sign_rows};
}

void batch_hash_pairs(Batch *b, int position, int32_t before)
{
    for (int i = 0; i < b->N && b->tables.pairs.rows; i++) {
        PairRows rows =
            pair_hash(&b->tables.pairs, b->tokens[i], i ? b->tokens[i - 1] : before, position + i);
        b->bigram_rows[i] = rows.row;
        b->sign_rows[i] = rows.sign;
    }
}

static int half_the_bits(int ids) // of the largest id
{
    int bits = 1;
    while (ids > 1 << 2 * bits)
        bits++;
    return bits;
}

void batch_complete(Batch *b)
{
    sort_rows(&b->rows, b->tokens, b->N, 8, b->scratch);
    for (int i = 0; i < b->N && b->prefix; i++)
        b->prefix[i] = b->tables.prefix[b->targets[i]];
    if (!b->tables.pairs.rows)
        return;
    batch_hash_pairs(b, 0, 0);
    sort_rows(&b->bigram, b->bigram_rows, b->N, half_the_bits(b->tables.pairs.rows), b->scratch);
}

int batch_take_launch(Batch *launch, const Batch *whole, int *document)
{
    const int32_t *start = whole->cu_seqlens;
    int n = launch->N, first = (int)max_i64(0, start[*document] - 1), lead = start[*document] - first,
        end = *document, rows;
    while (end < whole->num_docs && start[end + 1] - first <= n)
        end++;
    assert(end > *document);
    rows = start[end] - first;
    launch->num_docs = 0;
    if (lead)
        launch->cu_seqlens[launch->num_docs++] = 0;
    for (int i = *document; i < end; i++)
        launch->cu_seqlens[launch->num_docs++] = start[i] - first;
    if (rows < n)
        launch->cu_seqlens[launch->num_docs++] = rows;
    launch->cu_seqlens[launch->num_docs] = n;
    for (int i = 0; i < n; i++) {
        launch->tokens[i] = whole->tokens[i < rows ? first + i : 0];
        launch->targets[i] = i >= lead && i < rows ? whole->targets[first + i] : -1;
    }
    batch_complete(launch);
    *document = end;
    return first;
}
