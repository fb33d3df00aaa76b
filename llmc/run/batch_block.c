#include "llmc/run/batch_block.h"
#include <stdlib.h>
#include <string.h>

enum { BY_TOKEN, BY_PAIR }; // the numbers of rows

static int64_t tables_at(const Batch *b) { return (int64_t)b->block_ints + BATCH_ALIGN; }

static int64_t paired_at(const Batch *b)
{
    return tables_at(b) + round_up(attention_table_ints(b->N, 0), BATCH_ALIGN);
}

int64_t block_ints(int N, const BatchTables *tables)
{
    Batch b = {.N = N, .block_ints = batch_ints(N, tables)};
    int64_t paired = tables->paired ? round_up(attention_table_ints(2 * N, 0), BATCH_ALIGN) : 0;
    return paired_at(&b) + paired;
}

// Each document twice as long.
static int pack_paired(int32_t *table, const Batch *b)
{
    int32_t *doubled = xcalloc((size_t)b->num_docs + 1, sizeof *doubled);
    for (int i = 0; i <= b->num_docs; i++)
        doubled[i] = 2 * b->cu_seqlens[i];
    int slots = attention_table_build(table, doubled, b->num_docs, 2 * b->N, 0);
    free(doubled);
    return slots;
}

int block_pack(int32_t *block, const Batch *b)
{
    memcpy(block, b->block, b->block_ints * sizeof *block);
    block[b->block_ints + BY_TOKEN] = b->rows.count;
    block[b->block_ints + BY_PAIR] = b->bigram.count;
    int slots = attention_table_build(block + tables_at(b), b->cu_seqlens, b->num_docs, b->N, 0);
    int paired = b->tables.paired ? pack_paired(block + paired_at(b), b) : 0;
    return paired > slots ? paired : slots;
}

static const int32_t *moved(const int32_t *block, const Batch *b, const int32_t *array)
{
    return array ? block + (array - b->block) : NULL;
}

static TokenRows rows_of(const int32_t *block, const Batch *b, const BatchRows *rows, int number)
{
    if (!rows->order)
        return (TokenRows){0};
    return (TokenRows){.order = moved(block, b, rows->order),
                       .row_token = moved(block, b, rows->row),
                       .row_start = moved(block, b, rows->start),
                       .num_rows = block + b->block_ints + number};
}

DeviceBatch block_batch(const int32_t *block, const Batch *b, int slots)
{
    return (DeviceBatch){.N = b->N,
                         .tokens = moved(block, b, b->tokens),
                         .targets = moved(block, b, b->targets),
                         .prefix = moved(block, b, b->prefix),
                         .rows = rows_of(block, b, &b->rows, BY_TOKEN),
                         .bigram_rows = moved(block, b, b->bigram_rows),
                         .sign_rows = moved(block, b, b->sign_rows),
                         .bigram = rows_of(block, b, &b->bigram, BY_PAIR),
                         .table = block + tables_at(b),
                         .slots = slots,
                         .table_paired = b->tables.paired ? block + paired_at(b) : NULL,
                         .slots_paired = b->tables.paired ? slots : 0};
}
