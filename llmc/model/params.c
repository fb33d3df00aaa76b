#include "llmc/model/params.h"
#include "llmc/base/arena.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- the table --------------------------------------------------------------------------------------------

// The lowest stage that reads the number-th tensor of a role: 0 the embedding, 1 + i layer i, then the head.
static int first_stage(const Record *r, Role role, int number, int layer)
{
    if (role == ROLE_HEAD)
        return r->num_layers + 1;
    if (layer >= 0)
        return 1 + layer;
    if (role != ROLE_VALUE_EMBED)
        return 0;
    int i = 0;
    while (i < r->num_layers && r->layers[i].value_embed != number + 1)
        i++;
    return 1 + i; // of a table that no layer reads: the head's
}

static void add(Params *p, const Config *c, int row, int number, bool of_layer)
{
    Param *a = &p->list[p->count++];
    assert(p->count <= MAX_PARAMS);
    const ParamSpec *spec = &p->record->params[row];
    *a = (Param){.spec = spec, .rule = row, .layer = of_layer ? number : -1, .number = number};
    a->rows = record_extent(c, spec->rows);
    a->cols = record_extent(c, spec->cols);
    a->stage = first_stage(p->record, spec->role, number, a->layer);
    snprintf(a->name, sizeof a->name, spec->name, number);
}

static bool is_of_layers(const Record *r, const ParamSpec *spec)
{
    bool any = false;
    for (int i = 0; i < r->num_layers; i++)
        any = any || record_layer_has(&r->layers[i], spec->role);
    return any;
}

// Rows of one block and storage that follow each other take turns.
static bool takes_turns(const Record *r, const ParamSpec *a, const ParamSpec *b)
{
    for (int i = 0; i < r->num_layers; i++) {
        if (record_layer_has(&r->layers[i], a->role) != record_layer_has(&r->layers[i], b->role))
            return false;
    }
    return a->storage == b->storage && is_of_layers(r, a) && is_of_layers(r, b);
}

static void add_rows(Params *p, const Config *c)
{
    const Record *r = p->record;
    for (int row = 0, end; row < r->num_params; row = end) {
        const ParamSpec *spec = &r->params[row];
        end = row + 1;
        if (!is_of_layers(r, spec)) {
            for (int i = 0; i < max_i64(1, spec->count); i++)
                add(p, c, row, i, false);
            continue;
        }
        while (end < r->num_params && takes_turns(r, spec, &r->params[end]))
            end++;
        for (int layer = r->num_layers - 1; layer >= 0; layer--) {
            for (int k = row; k < end; k++) {
                if (record_layer_has(&r->layers[layer], r->params[k].role))
                    add(p, c, k, layer, true);
            }
        }
    }
}

static int pool_for(Params *p, const Param *a)
{
    const ParamSpec *s = a->spec;
    int64_t slot = s->sharding == SHARD_TENSORS ? param_elements(a) : 0;
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i];
        if (q->storage == s->storage && q->sharding == s->sharding && q->every == s->update.every &&
            q->slot == slot)
            return i;
    }
    assert(p->num_pools < MAX_POOLS);
    p->pools[p->num_pools] = (ParamPool){s->storage, s->sharding, s->update.every, .slot = slot};
    return p->num_pools++;
}

// Neighbours of one shape stand side by side, so that one op takes them; others begin on 16 bytes.
static void place_params(Params *p)
{
    enum { ALIGNED = 8 };
    const Param *last[MAX_POOLS] = {NULL};
    for (int i = 0; i < p->count; i++) {
        Param *a = &p->list[i];
        a->pool = pool_for(p, a);
        ParamPool *q = &p->pools[a->pool];
        const Param *before = last[a->pool];
        if (!q->slot && before && (before->rows != a->rows || before->cols != a->cols))
            q->size = round_up(q->size, ALIGNED);
        a->offset = q->size;
        q->size += param_elements(a);
        last[a->pool] = a;
    }
    for (int i = 0; i < p->num_pools; i++) {
        ParamPool *q = &p->pools[i];
        q->size = round_up(q->size, q->slot ? q->slot * SLOT_GROUP : ALIGNED);
    }
}

void params_describe(Params *p, const Config *c)
{
    memset(p, 0, sizeof *p);
    p->record = config_record(c);
    add_rows(p, c);
    place_params(p);
}

const Param *params_find(const Params *p, const char *name)
{
    for (int i = 0; i < p->count; i++) {
        if (!strcmp(p->list[i].name, name))
            return &p->list[i];
    }
    return NULL;
}

const Param *params_of(const Params *p, Role role, int number)
{
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (a->spec->role == role && a->number == number)
            return a;
    }
    return NULL;
}

int64_t params_total(const Params *p)
{
    int64_t n = 0;
    for (int i = 0; i < p->count; i++)
        n += param_elements(&p->list[i]);
    return n;
}

// ---- memory -----------------------------------------------------------------------------------------------

static size_t element_size(Storage storage) { return storage == STORE_HALF ? sizeof(floatX) : sizeof(float); }

size_t param_element_size(const Param *a) { return element_size(a->spec->storage); }

void *param_data(const Params *p, const Param *a)
{
    char *values = p->pools[a->pool].values;
    return values ? values + (size_t)a->offset * param_element_size(a) : NULL;
}

const floatX *param_weight(const Params *p, const Param *a)
{
    const ParamPool *q = &p->pools[a->pool];
    assert(q->storage != STORE_FLOAT);
    const floatX *values = q->storage == STORE_MASTER ? q->rounded : q->values;
    return values ? values + a->offset : NULL;
}

float *param_grad(const Params *p, const Param *a)
{
    float *grad = p->pools[a->pool].grad;
    return grad ? grad + a->offset : NULL;
}

// The next replicated pool to be used as often as its `every` says, after those that are used more often; -1
// after the last.
static int next_small(const Params *p, int after)
{
    int best = -1;
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i], *from = after >= 0 ? &p->pools[after] : NULL;
        bool later = !from || q->every > from->every || (q->every == from->every && i > after);
        if (q->sharding == REPLICATED && later && (best < 0 || q->every < p->pools[best].every))
            best = i;
    }
    return best;
}

int update_cycle(const Params *p)
{
    int cycle = 1;
    for (int i = 0; i < p->num_pools; i++) {
        int step = cycle;
        while (cycle % p->pools[i].every)
            cycle += step;
    }
    return cycle;
}

int64_t params_small_count(const Params *p, int t)
{
    int64_t n = 0;
    for (int i = next_small(p, -1); i >= 0 && update_is_due(p->pools[i].every, t); i = next_small(p, i))
        n += p->pools[i].size;
    return n;
}

static void place(Params *p, Arena *values, Arena *gradients)
{
    int64_t small = 0;
    for (int i = 0; i < p->num_pools; i++) {
        ParamPool *q = &p->pools[i];
        q->values = arena_take(values, (size_t)q->size, element_size(q->storage));
        q->rounded = q->storage == STORE_MASTER ? arena_take(values, (size_t)q->size, sizeof(floatX)) : NULL;
        if (q->sharding == REPLICATED)
            small += q->size;
        else
            q->grad = arena_take(gradients, (size_t)q->size, sizeof(float));
    }
    p->small_grad = arena_take(gradients, (size_t)small, sizeof(float));
    float *at = p->small_grad;
    for (int i = next_small(p, -1); i >= 0; i = next_small(p, i)) {
        p->pools[i].grad = at;
        if (at)
            at += p->pools[i].size;
    }
}

void params_allocate(Params *p, bool training)
{
    Arena values = {NULL, 0}, gradients = {NULL, 0};
    place(p, &values, &gradients);
    p->value_memory = device_alloc(values.used, "parameters");
    p->gradient_memory = training ? device_alloc(gradients.used, "gradients") : NULL;
    place(p, &(Arena){p->value_memory, 0}, &(Arena){p->gradient_memory, 0});
}

void params_free(Params *p)
{
    device_free(p->value_memory);
    device_free(p->gradient_memory);
}

void params_zero_gradients(const Params *p, Stream s)
{
    for (int i = 0; i < p->num_pools; i++)
        device_zero(s, p->pools[i].grad, (size_t)p->pools[i].size * sizeof(float));
}

void params_round(const Params *p, Stream s)
{
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i];
        if (q->rounded)
            cast_weights(s, q->rounded, q->values, q->size, false);
    }
}

// ---- initial weights --------------------------------------------------------------------------------------

// A hash of (seed, tensor, element) in place of a generator with a state: any element can be drawn anywhere,
// in any order. The mixing function is splitmix64's finaliser.
static uint64_t mix64(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double uniform01(uint64_t key, int64_t i)
{
    return ((double)(mix64(key + (uint64_t)i) >> 11) + 0.5) * 0x1p-53;
}

static float normal(uint64_t key, int64_t i) // Box-Muller: even elements take the cosine, odd ones the sine
{
    double radius = sqrt(-2 * log(uniform01(key, i & ~(int64_t)1))), angle = 2 * M_PI * uniform01(key, i | 1);
    return (float)(radius * (i & 1 ? sin(angle) : cos(angle)));
}

void param_init_runs(const Param *a, const Config *c, float *host)
{
    int64_t at = 0;
    for (const InitRun *run = a->spec->init.runs; run->repeat; run++) {
        for (int i = 0; i < run->repeat * run->width; i++) {
            bool option = run->option && i % run->width == 0;
            host[at++] =
                option ? (float)*(const double *)((const char *)c + run->option) : run->value[i % run->width];
        }
    }
    assert(at == param_elements(a));
}

// The i-th of the elements that are drawn.
static float draw(const InitSpec *init, uint64_t key, int64_t i, double bound)
{
    return init->kind == INIT_NORMAL ? normal(key, i) : (float)(bound * (2 * uniform01(key, i) - 1));
}

static int64_t drawn_elements(const Param *a)
{
    const InitSpec *init = &a->spec->init;
    if (init->kind != INIT_NORMAL && init->kind != INIT_UNIFORM)
        return 0;
    return init->matrices ? param_elements(a) / a->spec->matrices * init->matrices : param_elements(a);
}

static void init_one(Params *p, const Param *a, const Config *c, uint64_t key, void *host, Stream s)
{
    const InitSpec *init = &a->spec->init;
    int64_t drawn = drawn_elements(a);
    size_t bytes = (size_t)param_elements(a) * param_element_size(a);
    double bound = init->scale / sqrt(c->model_dim);
    bool half = a->spec->storage == STORE_HALF;
    memset(host, 0, bytes);
    if (init->kind == INIT_RUNS)
        param_init_runs(a, c, host);
#pragma omp parallel for
    for (int64_t i = 0; i < drawn; i++) {
        float x = draw(init, key, i, bound);
        if (half)
            ((floatX *)host)[i] = float_to_x(x);
        else
            ((float *)host)[i] = x;
    }
    copy_to_device(s, param_data(p, a), host, bytes);
    stream_synchronize(s);
}

void params_init(Params *p, const Config *c, Stream s)
{
    size_t most = 0;
    for (int i = 0; i < p->count; i++) {
        size_t bytes = (size_t)param_elements(&p->list[i]) * param_element_size(&p->list[i]);
        most = bytes > most ? bytes : most;
    }
    void *host = host_alloc(most);
    for (int i = 0; i < p->count; i++)
        init_one(p, &p->list[i], c, mix64((uint64_t)c->seed) + mix64((uint64_t)i << 32), host, s);
    host_free(host);
    params_round(p, s);
    stream_synchronize(s);
}
