#include "llmc/dist/exchange.h"
#include "llmc/base/arena.h"
#include <stdlib.h>
#include <string.h>

// ---- the table --------------------------------------------------------------------------------------------

// The lowest among a group; padding has none.
static int slots_stage(const Params *p, const Bucket *b, int size)
{
    int stage = p->record->num_layers;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        bool inside = a->pool == b->pool && a->offset >= b->offset && a->offset < b->offset + size * b->share;
        if (inside)
            stage = (int)min_i64(stage, param_stage(p, a));
    }
    return stage;
}

static int by_falling_stage(const void *a, const void *b) // then slots before tables, in order
{
    const Bucket *x = a, *y = b;
    if (x->stage != y->stage)
        return y->stage - x->stage;
    if (x->rows != y->rows)
        return x->rows - y->rows;
    if (x->pool != y->pool)
        return x->pool - y->pool;
    return x->offset < y->offset ? -1 : 1;
}

static void add(Exchange *x, Bucket b)
{
    assert(x->count < MAX_BUCKETS);
    x->list[x->count++] = b;
}

static void add_slots(Exchange *x, const Params *p, int pool)
{
    const ParamPool *q = &p->pools[pool];
    for (int64_t at = 0; at < q->size; at += x->size * q->slot) {
        Bucket b = {.pool = pool, .offset = at, .share = q->slot, .every = q->every};
        b.stage = slots_stage(p, &b, x->size);
        add(x, b);
    }
}

void exchange_plan(Exchange *x, const Params *p, int rank, int size)
{
    memset(x, 0, sizeof *x);
    x->rank = rank;
    x->size = size;
    x->num_stages = p->record->num_layers + 2;
    x->stale_after = -1;
    exchange_replan(x, p);
}

void exchange_replan(Exchange *x, const Params *p)
{
    x->count = 0;
    if (x->size == 1)
        return;
    for (int pool = 0; pool < p->num_pools; pool++) {
        if (p->pools[pool].sharding == SHARD_TENSORS)
            add_slots(x, p, pool);
    }
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (a->spec->sharding != SHARD_ROWS || param_now(p, a) != a)
            continue;
        add(x, (Bucket){a->pool, a->offset, param_elements(a) / x->size, param_stage(p, a), true,
                        a->spec->update.every, i});
    }
    qsort(x->list, (size_t)x->count, sizeof *x->list, by_falling_stage);
}

static void place_own(Exchange *x, const Params *p, Arena *a)
{
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i];
        if (q->sharding == SHARD_TENSORS)
            x->own[i] = arena_take(a, (size_t)(q->size / x->size), sizeof(float));
    }
}

void exchange_create(Exchange *x, const Params *p, PairExchange how)
{
    exchange_plan(x, p, comm_rank(), comm_size());
    row_exchange_create(&x->rows, p, how);
    if (x->size == 1)
        return;
    comm_connect();
    Arena own = {NULL, 0};
    place_own(x, p, &own);
    x->own_memory = device_alloc(own.used, "gradients: own sums");
    place_own(x, p, &(Arena){(char *)x->own_memory, 0});
    x->stream = stream_create_urgent();
    x->forked = event_create();
    x->small = event_create();
    for (int i = 0; i < x->num_stages; i++) {
        x->reached[i] = event_create();
        x->gathered[i] = event_create();
    }
    x->num_reduced =
        (int)min_i64(MAX_BUCKETS, x->count + p->count); // as many as there may be once all parted
    for (int i = 0; i < x->num_reduced; i++)
        x->reduced[i] = event_create();
}

void exchange_free(Exchange *x)
{
    if (x->size < 2)
        return;
    stream_synchronize(x->stream);
    for (int i = 0; i < x->num_stages; i++) {
        event_destroy(x->reached[i]);
        event_destroy(x->gathered[i]);
    }
    for (int i = 0; i < x->num_reduced; i++)
        event_destroy(x->reduced[i]);
    event_destroy(x->forked);
    event_destroy(x->small);
    stream_destroy(x->stream);
    device_free(x->own_memory);
    row_exchange_free(&x->rows);
}

// ---- gradients --------------------------------------------------------------------------------------------

static void reduce_slots(Exchange *x, const Params *p, const Bucket *b)
{
    float *own = x->own[b->pool] + b->offset / x->size;
    comm_reduce_scatter(x->stream, own, p->pools[b->pool].grad + b->offset, b->share);
}

static bool by_rows(const Exchange *x, const Bucket *b) { return b->rows && b->param == x->rows.param; }

// In place: the optimizer clears the own share when it has used it, and the others' are of no more use.
static void reduce_rows(Exchange *x, const Params *p, const Bucket *b)
{
    int64_t before = x->rank * b->share, after = (x->size - 1) * b->share - before;
    float *grad = p->pools[b->pool].grad + b->offset, *own = grad + before;
    if (by_rows(x, b) && x->rows.now.num_gradients) {
        row_exchange_gradients(&x->rows, grad, x->stream);
        return;
    }
    comm_reduce_scatter(x->stream, own, grad, b->share);
    if (before)
        device_zero(x->stream, grad, (size_t)before * sizeof(float));
    if (after)
        device_zero(x->stream, own + b->share, (size_t)after * sizeof(float));
}

// Of the gradient, to each other rank.
static int64_t sent_elements(const Exchange *x, const Bucket *b)
{
    int chunk = by_rows(x, b) ? x->rows.now.num_gradients : 0;
    return chunk ? (int64_t)chunk * x->rows.width : b->share;
}

void exchange_stage_done(Exchange *x, const Params *p, int stage, int t, const ProductContext *c)
{
    bool first = true;
    for (int i = 0; i < x->count; i++) {
        const Bucket *b = &x->list[i];
        if (b->stage != stage || !update_is_due(b->every, t))
            continue;
        if (first) {
            event_record(x->reached[stage], c->stream);
            stream_wait(x->stream, x->reached[stage]);
            first = false;
        }
        if (b->rows)
            reduce_rows(x, p, b);
        else
            reduce_slots(x, p, b);
        event_record(x->reduced[i], x->stream);
        SharedSms shared = comm_shared_sms((x->size - 1) * sent_elements(x, b) * (int64_t)sizeof(float));
        if (c->shared && shared.products > c->shared->products)
            *c->shared = shared;
    }
}

void exchange_small(Exchange *x, const Params *p, int t, Stream s)
{
    int64_t count = params_small_count(p, t);
    if (x->size == 1)
        return;
    event_record(x->forked, s);
    stream_wait(x->stream, x->forked);
    if (count)
        comm_all_reduce(x->stream, p->small_grad, count);
    event_record(x->small, x->stream);
}

void exchange_wait(const Exchange *x, int pool, int64_t first, int64_t last, Stream s)
{
    for (int i = 0; i < x->count; i++) {
        const Bucket *b = &x->list[i];
        if (b->pool == pool && b->offset < last && b->offset + x->size * b->share > first)
            stream_wait(s, x->reduced[i]);
    }
}

void exchange_wait_small(const Exchange *x, Stream s)
{
    if (x->size > 1)
        stream_wait(s, x->small);
}

// ---- weights ----------------------------------------------------------------------------------------------

void exchange_step_queued(Exchange *x, int t)
{
    if (x->size > 1)
        x->stale_after = t;
}

static void gather_bucket(Exchange *x, const Params *p, const Bucket *b)
{
    const ParamPool *q = &p->pools[b->pool];
    floatX *values = q->storage == STORE_HALF ? q->values : q->rounded;
    values += b->offset;
    if (by_rows(x, b) && x->rows.now.num_values)
        row_exchange_values(&x->rows, values, x->stream);
    else
        comm_all_gather(x->stream, values, b->share * (int64_t)sizeof(floatX));
}

void exchange_begin_gather(Exchange *x, const Params *p, int t, Stream s)
{
    if (x->size == 1)
        return;
    event_record(x->forked, s);
    stream_wait(x->stream, x->forked);
    int i = x->count - 1;
    for (int stage = 0; stage < x->num_stages; stage++) {
        for (; i >= 0 && x->list[i].stage == stage; i--) {
            if (by_rows(x, &x->list[i]) || update_is_due(x->list[i].every, t - 1))
                gather_bucket(x, p, &x->list[i]);
        }
        event_record(x->gathered[stage], x->stream);
    }
}

void exchange_stage_needed(const Exchange *x, int stage, Stream s)
{
    if (x->size > 1)
        stream_wait(s, x->gathered[stage]);
}

void exchange_complete(Exchange *x, const Params *p, Stream s)
{
    if (x->stale_after < 0)
        return;
    x->rows.now = (RowLists){0};
    exchange_begin_gather(x, p, x->stale_after + 1, s);
    exchange_stage_needed(x, x->num_stages - 1, s);
    x->stale_after = -1;
}
