#include "llmc/exchange.h"
#include <stdlib.h>
#include <string.h>

// ---- the table ---------------------------------------------------------------------------------------------------------

static int table_stage(const Config *c, int table)
{
    if (table == 0) return 0;
    if (table == NUM_TABLES - 1) return NUM_STAGES - 1;
    int layer = 1;
    while (layer_role(c, layer).value_embed != table - 1) layer++;
    return layer;
}

static int slots_stage(const Params *p, int first, int size) // the lowest layer among a group; padding belongs to none
{
    int stage = NUM_LAYERS - 1;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (a->group != GROUP_MATRIX) continue;
        int slot = (int)(a->offset / p->slot_size);
        if (slot >= first && slot < first + size) stage = (int)min_i64(stage, a->layer);
    }
    return stage;
}

static int by_falling_stage(const void *a, const void *b) // then slots before tables, in order
{
    const Bucket *x = a, *y = b;
    if (x->stage != y->stage) return y->stage - x->stage;
    return x->table != y->table ? x->table - y->table : x->first - y->first;
}

void exchange_plan(Exchange *x, const Params *p, const Config *c, int rank, int size)
{
    memset(x, 0, sizeof *x);
    x->rank = rank;
    x->size = size;
    if (size == 1) return;
    for (int slot = 0; slot < p->num_slots; slot += x->size)
        x->list[x->count++] = (Bucket){.first = slot, .stage = slots_stage(p, slot, x->size)};
    for (int i = 0; i < NUM_TABLES; i++) x->list[x->count++] = (Bucket){.table = true, .first = i, .stage = table_stage(c, i)};
    assert(x->count <= MAX_BUCKETS);
    qsort(x->list, (size_t)x->count, sizeof *x->list, by_falling_stage);
}

void exchange_create(Exchange *x, const Params *p, const Config *c)
{
    exchange_plan(x, p, c, comm_rank(), comm_size());
    if (x->size == 1) return;
    comm_connect();
    x->own = device_alloc((size_t)(p->num_slots / x->size * p->slot_size) * sizeof(float), "gradients: own sums");
    x->stream = stream_create_urgent();
    x->forked = event_create();
    x->small = event_create();
    for (int i = 0; i < NUM_STAGES; i++) x->reached[i] = event_create(), x->gathered[i] = event_create();
    for (int i = 0; i < x->count; i++) x->reduced[i] = event_create();
}

void exchange_free(Exchange *x)
{
    if (x->size < 2) return;
    stream_synchronize(x->stream);
    for (int i = 0; i < NUM_STAGES; i++) event_destroy(x->reached[i]), event_destroy(x->gathered[i]);
    for (int i = 0; i < x->count; i++) event_destroy(x->reduced[i]);
    event_destroy(x->forked);
    event_destroy(x->small);
    stream_destroy(x->stream);
    device_free(x->own);
}

// ---- gradients ---------------------------------------------------------------------------------------------------------

static void reduce_slots(Exchange *x, Params *p, int first)
{
    float *grad = p->matrices_grad + first * p->slot_size;
    comm_reduce_scatter(x->stream, x->own + first / x->size * p->slot_size, grad, p->slot_size);
}

// In place: the optimizer clears the own share when it has used it, and the others' are of no more use.
static void reduce_table(Exchange *x, Params *p, int table)
{
    int64_t share = p->table_size / x->size, before = x->rank * share, after = p->table_size - before - share;
    float *grad = p->tables_grad + table * p->table_size, *own = grad + before;
    comm_reduce_scatter(x->stream, own, grad, share);
    if (before) device_zero(x->stream, grad, (size_t)before * sizeof(float));
    if (after) device_zero(x->stream, own + share, (size_t)after * sizeof(float));
}

void exchange_stage_done(Exchange *x, Params *p, int stage, bool tables, Stream s)
{
    bool first = true;
    for (int i = 0; i < x->count; i++) {
        const Bucket *b = &x->list[i];
        if (b->stage != stage || (b->table && !tables)) continue;
        if (first) {
            event_record(x->reached[stage], s);
            stream_wait(x->stream, x->reached[stage]);
            first = false;
        }
        if (b->table) reduce_table(x, p, b->first);
        else reduce_slots(x, p, b->first);
        event_record(x->reduced[i], x->stream);
    }
}

void exchange_small(Exchange *x, Params *p, bool scalars, Stream s)
{
    if (x->size == 1) return;
    event_record(x->forked, s);
    stream_wait(x->stream, x->forked);
    comm_all_reduce(x->stream, p->gates_grad, p->gates_size + (scalars ? NUM_SCALARS : 0));
    event_record(x->small, x->stream);
}

void exchange_wait_slots(const Exchange *x, int first, int last, Stream s)
{
    for (int i = 0; i < x->count; i++) {
        const Bucket *b = &x->list[i];
        if (!b->table && b->first < last && b->first + x->size > first) stream_wait(s, x->reduced[i]);
    }
}

void exchange_wait_table(const Exchange *x, int table, Stream s)
{
    for (int i = 0; i < x->count; i++)
        if (x->list[i].table && x->list[i].first == table) stream_wait(s, x->reduced[i]);
}

void exchange_wait_small(const Exchange *x, Stream s)
{
    if (x->size > 1) stream_wait(s, x->small);
}

// ---- weights -----------------------------------------------------------------------------------------------------------

void exchange_step_queued(Exchange *x, bool tables)
{
    if (x->size == 1) return;
    x->stale = true;
    x->stale_tables = tables;
}

static void gather_bucket(Exchange *x, Params *p, const Bucket *b)
{
    int64_t share = p->table_size / x->size * (int64_t)sizeof(floatX), slot = p->slot_size * (int64_t)sizeof(floatX);
    if (b->table) comm_all_gather(x->stream, p->tables + b->first * p->table_size, share);
    else comm_all_gather(x->stream, p->matrices_x + b->first * p->slot_size, slot);
}

void exchange_begin_gather(Exchange *x, Params *p, bool tables, Stream s)
{
    if (x->size == 1) return;
    event_record(x->forked, s);
    stream_wait(x->stream, x->forked);
    int i = x->count - 1;
    for (int stage = 0; stage < NUM_STAGES; stage++) {
        for (; i >= 0 && x->list[i].stage == stage; i--)
            if (!x->list[i].table || tables) gather_bucket(x, p, &x->list[i]);
        event_record(x->gathered[stage], x->stream);
    }
}

void exchange_stage_needed(const Exchange *x, int stage, Stream s)
{
    if (x->size > 1) stream_wait(s, x->gathered[stage]);
}

void exchange_complete(Exchange *x, Params *p, Stream s)
{
    if (!x->stale) return;
    exchange_begin_gather(x, p, x->stale_tables, s);
    exchange_stage_needed(x, NUM_STAGES - 1, s);
    x->stale = false;
}
