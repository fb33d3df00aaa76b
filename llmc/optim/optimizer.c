#include "llmc/optim/optimizer.h"
#include "llmc/base/arena.h"
#include <string.h>

// ---- batches ----------------------------------------------------------------------------------------------

static int larger_side(const UpdateBatch *b) { return b->rows > b->cols ? b->rows : b->cols; }

static const ParamPool *pool_of(const Params *p, const UpdateBatch *b)
{
    return &p->pools[p->list[b->first].pool];
}

static const UpdateSpec *update_of(const Params *p, const UpdateBatch *b)
{
    return &p->list[b->first].spec->update;
}

static bool updated_alike(const Param *a, const Param *b)
{
    const UpdateSpec *u = &a->spec->update, *v = &b->spec->update;
    return a->pool == b->pool && a->rows == b->rows && a->cols == b->cols && a->matrices == b->matrices &&
           (a->spec == b->spec || !(a->spec->joined || b->spec->joined)) && u->kind == NORMUON &&
           v->kind == NORMUON && u->beta2 == v->beta2 && u->fp32 == v->fp32;
}

static int64_t own_slots_before(const Optimizer *o, int64_t slot)
{
    return ceil_div(max_i64(0, slot - o->rank), o->size);
}

// Whether the second moment goes along the columns of the matrices as they are in memory: it goes along the
// shorter side of the shape in files.
static bool second_per_column(const Config *c, const ParamSpec *spec)
{
    int64_t rows, cols;
    record_file_matrix(c, spec, &rows, &cols);
    return spec->file.transposed ? rows >= cols : rows < cols;
}

// The share of this rank in a batch whose parameters are known.
static void find_share(const Optimizer *o, const Params *p, UpdateBatch *b)
{
    const Param *a = &p->list[b->first];
    const ParamPool *q = pool_of(p, b);
    bool slots = q->sharding == SHARD_TENSORS;
    b->matrices = (int)a->matrices;
    b->rows = (int)a->rows;
    b->cols = (int)a->cols;
    b->per_column = second_per_column(o->config, a->spec);
    b->stride = slots ? q->slot : param_elements(a);
    b->own = b->count;
    if (slots) {
        int64_t slot = a->offset / q->slot;
        b->own_first = (int)own_slots_before(o, slot);
        b->own = (int)own_slots_before(o, slot + b->count) - b->own_first;
    }
    b->elements = b->own * b->stride / (q->sharding == SHARD_ROWS ? o->size : 1);
}

// NorMuon first, whole tensors before replicated ones: gradients of rows and the small bucket are the last to
// be summed.
static int update_order(const Params *p, const Param *a)
{
    const ParamPool *q = &p->pools[a->pool];
    if (a->spec->update.kind == NORMUON)
        return q->sharding == SHARD_TENSORS ? 0 : 1;
    return q->sharding == SHARD_ROWS ? 2 : 3;
}

static void make_batches(Optimizer *o, const Params *p)
{
    for (int order = 0; order < 4; order++) {
        for (int i = 0, end; i < p->count; i = end) {
            end = i + 1;
            if (p->list[i].spec->update.kind == FIXED || update_order(p, &p->list[i]) != order)
                continue;
            while (end < p->count && updated_alike(&p->list[i], &p->list[end]))
                end++;
            UpdateBatch *b = &o->batches[o->num_batches++];
            *b = (UpdateBatch){.first = i, .count = end - i};
            find_share(o, p, b);
        }
    }
}

// The batch whose slots a batch of joined parameters is in.
static const UpdateBatch *leader(const Optimizer *o, const Params *p, const UpdateBatch *b)
{
    const Param *a = &p->list[b->first];
    const ParamSpec *first = a->spec;
    const UpdateBatch *l = o->batches;
    while (first->joined)
        first--;
    while (p->list[l->first].spec != first || p->list[l->first].number != a->number)
        l++;
    return l;
}

static bool is_joined(const Params *p, const UpdateBatch *b) { return p->list[b->first].spec->joined; }

static void place(Optimizer *o, const Params *p, Arena *a)
{
    for (int i = 0; i < o->num_batches; i++) {
        UpdateBatch *b = &o->batches[i];
        const Param *first = &p->list[b->first];
        size_t n = (size_t)b->elements, matrices = (size_t)(b->own * b->matrices);
        if (update_of(p, b)->kind != NORMUON) {
            size_t size = update_of(p, b)->kind == ADAM ? param_element_size(first) : sizeof(float);
            b->m = arena_take(a, n, size);
            b->v = arena_take(a, n, size);
            continue;
        }
        if (!is_joined(p, b))
            b->momentum = arena_take(a, n, sizeof(float));
        else if (a->base)
            b->momentum = leader(o, p, b)->momentum + first->offset % pool_of(p, b)->slot;
        b->second = arena_take(a, matrices * (size_t)larger_side(b), sizeof(float));
        b->rules = arena_take(a, matrices, sizeof(int32_t));
    }
}

// The own index of a parameter in its batch, or -1 when another rank owns it.
static int own_index(const Optimizer *o, const Params *p, const UpdateBatch *b, int param)
{
    const Param *a = &p->list[param];
    const ParamPool *q = pool_of(p, b);
    if (q->sharding != SHARD_TENSORS)
        return param - b->first;
    int64_t slot = a->offset / q->slot;
    return slot_owner(slot, o->size) == o->rank ? (int)(slot / o->size) - b->own_first : -1;
}

static void upload_rules(const Optimizer *o, const Params *p, const UpdateBatch *b)
{
    size_t bytes = (size_t)(b->own * b->matrices) * sizeof(int32_t);
    int32_t *host = host_alloc(bytes);
    for (int i = 0; i < b->count; i++) {
        int own = own_index(o, p, b, b->first + i);
        for (int k = 0; own >= 0 && k < b->matrices; k++)
            host[own * b->matrices + k] = p->list[b->first + i].rule;
    }
    copy_to_device(NULL, b->rules, host, bytes);
    stream_synchronize(NULL);
    host_free(host);
}

void optimizer_create(Optimizer *o, const Model *m)
{
    const Params *p = &m->params;
    const Config *c = m->config;
    Error e;
    memset(o, 0, sizeof *o);
    o->config = c;
    o->rank = comm_rank();
    o->size = comm_size();
    NsText text = config_ns_text(c), text_fp32 = text;
    text_fp32.dtype = "fp32";
    if (!ns_options_parse(&o->ns, &text, &e) || !ns_options_parse(&o->ns_fp32, &text_fp32, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    make_batches(o, p);

    Arena state = {NULL, 0};
    place(o, p, &state);
    o->state = device_alloc(state.used, "optimizer state");
    place(o, p, &(Arena){o->state, 0});
    for (int i = 0; i < o->num_batches; i++) {
        if (o->batches[i].rules && o->batches[i].own)
            upload_rules(o, p, &o->batches[i]);
    }
    exchange_create(&o->exchange, p, (PairExchange)c->pair_exchange);
}

void optimizer_free(Optimizer *o)
{
    device_free(o->state);
    exchange_free(&o->exchange);
}

// ---- Adam -------------------------------------------------------------------------------------------------

static AdamRule adam_rule(const Param *a)
{
    const UpdateSpec *u = &a->spec->update;
    return (AdamRule){a->rule,       (float)u->beta1,       (float)u->beta2,
                      (float)u->eps, (float)(1 - u->beta1), (float)(1 - u->beta2)};
}

static void adam(Optimizer *o, const Params *p, const UpdateBatch *b, Stream s)
{
    const Param *a = &p->list[b->first];
    const ParamPool *q = pool_of(p, b);
    int64_t at = a->offset + (q->sharding == SHARD_ROWS ? o->rank * b->elements : 0), n = b->elements;
    AdamRule rule = adam_rule(a);
    if (q->sharding == SHARD_ROWS)
        exchange_wait(&o->exchange, a->pool, at, at + n, s);
    else
        exchange_wait_small(&o->exchange, s);
    if (a->spec->update.kind == ADAM_DECAY)
        adam_update_decay(s, (floatX *)q->values + at, b->m, b->v, q->grad + at, o->step, rule, n);
    else if (q->storage == STORE_HALF)
        adam_update(s, (floatX *)q->values + at, b->m, b->v, q->grad + at, o->step, rule, n);
    else
        adam_update_fp32(s, (float *)q->values + at, b->m, b->v, q->grad + at, o->step, rule, n);
}

// ---- NorMuon ----------------------------------------------------------------------------------------------

static const NsOptions *ns_options(const Optimizer *o, const Params *p, const UpdateBatch *b)
{
    return update_of(p, b)->fp32 ? &o->ns_fp32 : &o->ns;
}

// Where the gradients of the own parameters are, `stride` apart, which become U: with several ranks the sums
// of whole slots arrive elsewhere.
static float *own_gradient(const Optimizer *o, const Params *p, const UpdateBatch *b)
{
    const Param *a = &p->list[b->first];
    const ParamPool *q = pool_of(p, b);
    if (q->sharding == REPLICATED)
        return q->grad + a->offset;
    float *own = o->exchange.own[a->pool];
    return (own ? own : q->grad) + b->own_first * q->slot + a->offset % q->slot;
}

static char *orthogonalise(const Optimizer *o, const Params *p, const UpdateBatch *b, Stream s)
{
    NsInput in = {.u = own_gradient(o, p, b),
                  .rows = b->rows,
                  .cols = b->cols,
                  .batch = b->own * b->matrices,
                  .stride = (int64_t)b->rows * b->cols,
                  .group = b->matrices,
                  .group_stride = b->stride};
    if (b->matrices == 1 || b->stride == b->matrices * in.stride) { // equally far apart
        in.group = 0;
        in.stride = b->matrices == 1 ? b->stride : in.stride;
    }
    return newton_schulz(s, ns_options(o, p, b), &in, o->ns_workspace);
}

// Between two own parameters, in elements of the pool.
static int64_t own_stride(const Optimizer *o, const Params *p, const UpdateBatch *b)
{
    return b->stride * (pool_of(p, b)->sharding == SHARD_TENSORS ? o->size : 1);
}

// The own parameters [first, first + count) of a batch, whose `stride` from matrix to matrix is the same
// throughout.
static void update(const Optimizer *o, const Params *p, const UpdateBatch *b, const char *ortho, int first,
                   int count, int64_t stride, Stream s)
{
    const Param *a = &p->list[b->first];
    const ParamPool *q = pool_of(p, b);
    const NsOptions *ns = ns_options(o, p, b);
    int64_t own_at = a->offset;
    if (q->sharding == SHARD_TENSORS)
        own_at = (o->rank + (int64_t)b->own_first * o->size) * q->slot + a->offset % q->slot;
    int64_t at = own_at + first * own_stride(o, p, b), matrix = first * b->matrices;
    bool half = q->storage == STORE_HALF;
    normuon_update(s,
                   &(NormuonUpdate){.w = half ? NULL : (float *)q->values + at,
                                    .wx = (half ? (floatX *)q->values : q->rounded) + at,
                                    .grad = q->sharding == REPLICATED ? q->grad + at : NULL,
                                    .second = b->second + matrix * larger_side(b),
                                    .o = ortho +
                                         (size_t)(matrix * b->rows * b->cols) * ns_element_size(ns->dtype),
                                    .o_dtype = ns->dtype,
                                    .rows = b->rows,
                                    .cols = b->cols,
                                    .batch = count * b->matrices,
                                    .per_column = b->per_column,
                                    .truncate = q->storage == STORE_SPLIT,
                                    .beta2 = (float)a->spec->update.beta2,
                                    .rule = b->rules + matrix,
                                    .stride = stride},
                   o->step);
}

// Sums of the gradients have arrived, and are U. Whole slots: what is joined to these parameters, too.
static void momentum(const Optimizer *o, const Params *p, const UpdateBatch *b, Stream s)
{
    const ParamPool *q = pool_of(p, b);
    int64_t group = o->size * q->slot;
    if (q->sharding == REPLICATED)
        exchange_wait_small(&o->exchange, s);
    else
        exchange_wait(&o->exchange, p->list[b->first].pool, b->own_first * group,
                      (b->own_first + b->own) * group, s);
    normuon_momentum(s, own_gradient(o, p, b), b->momentum, o->step, b->elements);
}

static void normuon(Optimizer *o, const Params *p, const UpdateBatch *b, Stream s)
{
    int64_t matrix = (int64_t)b->rows * b->cols;
    if (!b->own)
        return;
    if (!is_joined(p, b))
        momentum(o, p, b, s);
    char *ortho = orthogonalise(o, p, b, s);
    // All at once where the own matrices are equally far apart.
    int64_t stride = own_stride(o, p, b);
    if (b->matrices == 1 || stride == b->matrices * matrix) {
        update(o, p, b, ortho, 0, b->own, b->matrices == 1 ? stride : matrix, s);
        return;
    }
    for (int i = 0; i < b->own; i++)
        update(o, p, b, ortho, i, 1, matrix, s);
}

// ---- the step ---------------------------------------------------------------------------------------------

size_t optimizer_workspace_bytes(const Optimizer *o, const Model *m)
{
    const Params *p = &m->params;
    size_t most = 0;
    for (int i = 0; i < o->num_batches; i++) {
        const UpdateBatch *b = &o->batches[i];
        if (!b->momentum)
            continue;
        size_t bytes = ns_workspace_bytes(ns_options(o, p, b), b->rows, b->cols, b->own * b->matrices);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static bool is_tied(const Params *p, const UpdateBatch *b)
{
    const Param *a = &p->list[b->first];
    return param_now(p, a) != a;
}

void optimizer_step(Optimizer *o, Model *m, int t, Stream s)
{
    const Params *p = &m->params;
    exchange_small(&o->exchange, p, t, s);
    for (int i = 0; i < o->num_batches; i++) {
        const UpdateBatch *b = &o->batches[i];
        if (!update_is_due(update_of(p, b)->every, t) || is_tied(p, b))
            continue;
        if (update_of(p, b)->kind == NORMUON)
            normuon(o, p, b, s);
        else
            adam(o, p, b, s);
    }
}

void optimizer_warm_up(Optimizer *o, Model *m, Stream s)
{
    const Params *p = &m->params;
    Exchange *x = &o->exchange;
    int all = update_cycle(p) - 1; // a step that updates everything
    for (int i = 0; i < o->num_batches; i++) {
        const UpdateBatch *b = &o->batches[i];
        if (!b->momentum)
            continue;
        orthogonalise(o, p, b, s);
    }
    // Every collective once: sums and copies of zeros.
    for (int stage = x->num_stages - 1; stage >= 0; stage--)
        exchange_stage_done(x, p, stage, all, &(ProductContext){s, NULL});
    exchange_small(x, p, all, s);
    exchange_wait_small(x, s);
    exchange_begin_gather(x, p, all + 1, s);
    row_exchange_warm_up(&x->rows, x->stream);
    exchange_stage_needed(x, x->num_stages - 1, s);
}

// ---- tied parameters --------------------------------------------------------------------------------------

static const UpdateBatch *batch_of(const Optimizer *o, int param)
{
    const UpdateBatch *b = o->batches;
    while (param < b->first || param >= b->first + b->count)
        b++;
    return b;
}

// The own share of a parameter's values and state, from the one that it was tied to, which is sharded alike.
static void take_copy(const Optimizer *o, const Params *p, const UpdateBatch *b, Stream s)
{
    const Param *a = &p->list[b->first], *from = &p->list[a->tied_to];
    const UpdateBatch *source = batch_of(o, a->tied_to);
    size_t size = param_element_size(a), n = (size_t)b->elements;
    size_t moment = update_of(p, b)->kind == ADAM ? size : sizeof(float);
    int64_t own = pool_of(p, b)->sharding == SHARD_ROWS ? o->rank * b->elements : 0;
    char *values = p->pools[a->pool].values, *source_values = p->pools[from->pool].values;
    copy_on_device(s, values + (size_t)(a->offset + own) * size,
                   source_values + (size_t)(from->offset + own) * size, n * size);
    copy_on_device(s, b->m, source->m, n * moment);
    copy_on_device(s, b->v, source->v, n * moment);
}

bool optimizer_part(Optimizer *o, Model *m, int t, Stream s)
{
    Params *p = &m->params;
    if (!p->tied || t != p->last_tied)
        return false;
    for (int i = 0; i < o->num_batches; i++) {
        if (is_tied(p, &o->batches[i]))
            take_copy(o, p, &o->batches[i], s);
    }
    p->tied = false;
    exchange_replan(&o->exchange, p);
    return true;
}

void optimizer_continue(Optimizer *o, Model *m, int t)
{
    m->params.tied = t <= m->params.last_tied;
    exchange_replan(&o->exchange, &m->params);
}

// ---- state by parameter -----------------------------------------------------------------------------------

static void adam_state(const Optimizer *o, const Params *p, const UpdateBatch *b, bool second, StateTensor *t)
{
    bool rows = pool_of(p, b)->sharding == SHARD_ROWS;
    t->half = update_of(p, b)->kind == ADAM && pool_of(p, b)->storage == STORE_HALF;
    t->data = second ? b->v : b->m;
    t->everywhere = !rows;
    t->first = rows ? o->rank * b->elements : 0;
    t->count = rows || !o->rank ? b->elements : 0;
}

static void normuon_state(const Optimizer *o, const Params *p, const UpdateBatch *b, int own, bool second,
                          StateTensor *t)
{
    if (second) {
        t->rows = b->matrices;
        t->cols = larger_side(b);
    }
    int64_t n = t->rows * t->cols;
    t->everywhere = pool_of(p, b)->sharding == REPLICATED;
    t->data = own < 0 ? NULL : second ? b->second + own * n : b->momentum + own * b->stride;
    t->count = own < 0 || (t->everywhere && o->rank) ? 0 : n;
}

// The nth parameter that has state now; -1: there are fewer.
static int nth_trained(const Params *p, int nth)
{
    for (int i = 0; i < p->count; i++) {
        bool trained = p->list[i].spec->update.kind != FIXED && param_now(p, &p->list[i]) == &p->list[i];
        if (trained && nth-- == 0)
            return i;
    }
    return -1;
}

bool optimizer_state(const Optimizer *o, const Model *m, int index, StateTensor *t)
{
    static const char *const adam_names[] = {"adam_m", "adam_v"}, *const normuon_names[] = {"momentum",
                                                                                            "second"};
    const Params *p = &m->params;
    bool second = index % 2;
    int param = nth_trained(p, index / 2);
    if (param < 0)
        return false;
    const Param *a = &p->list[param];
    const UpdateBatch *b = batch_of(o, param);
    bool is_normuon = a->spec->update.kind == NORMUON;
    *t = (StateTensor){0};
    param_shape(a, o->config, &t->rows, &t->cols);
    snprintf(t->name, sizeof t->name, "%s.%s", a->name, (is_normuon ? normuon_names : adam_names)[second]);
    if (is_normuon)
        normuon_state(o, p, b, own_index(o, p, b, param), second, t);
    else
        adam_state(o, p, b, second, t);
    return true;
}
