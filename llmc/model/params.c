#include "llmc/model/params.h"
#include "llmc/base/arena.h"
#include "llmc/optim/schedule.h"
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

// nth: among the tensors of its row, in the order of their numbers.
static void add(Params *p, const Config *c, int row, int number, int nth, bool of_layer)
{
    Param *a = &p->list[p->count++];
    assert(p->count <= MAX_PARAMS);
    const ParamSpec *spec = &p->record->params[row];
    *a = (Param){.spec = spec, .rule = row, .layer = of_layer ? number : -1, .number = number, .tied_to = -1};
    a->rows = record_extent(c, spec->rows);
    a->cols = record_extent(c, spec->cols);
    a->matrices = spec->matrices.times ? record_extent(c, spec->matrices) : 1;
    a->stage = first_stage(p->record, spec->role, number, a->layer);
    if (strchr(spec->name, '%')) {
        snprintf(a->name, sizeof a->name, spec->name, number);
        return;
    }
    a->file_first = spec->file.first + nth * (spec->file.step ? spec->file.step : a->matrices);
    if (of_layer || spec->count)
        snprintf(a->name, sizeof a->name, "%s.%d", spec->name, (int)a->file_first);
    else
        snprintf(a->name, sizeof a->name, "%s", spec->name);
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
    return a->storage == b->storage && !a->joined && !b->joined && is_of_layers(r, a) && is_of_layers(r, b);
}

static int layers_below(const Record *r, int layer, Role role) // that have this role
{
    int n = 0;
    for (int i = 0; i < layer; i++)
        n += record_layer_has(&r->layers[i], role);
    return n;
}

static void add_rows(Params *p, const Config *c)
{
    const Record *r = p->record;
    for (int row = 0, end; row < r->num_params; row = end) {
        const ParamSpec *spec = &r->params[row];
        end = row + 1;
        if (!is_of_layers(r, spec)) {
            for (int i = 0; i < max_i64(1, spec->count); i++)
                add(p, c, row, spec->first + i, i, false);
            continue;
        }
        while (end < r->num_params && takes_turns(r, spec, &r->params[end]))
            end++;
        for (int layer = r->num_layers - 1; layer >= 0; layer--) {
            for (int k = row; k < end; k++) {
                Role role = r->params[k].role;
                if (record_layer_has(&r->layers[layer], role))
                    add(p, c, k, layer, layers_below(r, layer, role), true);
            }
        }
    }
}

// Elements of the slot that begins with this parameter.
static int64_t slot_elements(const Params *p, const Param *a)
{
    int64_t n = param_elements(a);
    const ParamSpec *end = p->record->params + p->record->num_params;
    for (const ParamSpec *spec = a->spec + 1; spec < end && spec->joined; spec++)
        n += param_elements(params_of(p, spec->role, a->number));
    return n;
}

static int pool_for(Params *p, const Param *a)
{
    const ParamSpec *s = a->spec;
    int64_t slot = s->sharding == SHARD_TENSORS ? slot_elements(p, a) : 0;
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

// Behind the tensor that it is joined to.
static void place_joined(Params *p, Param *a)
{
    const Param *to = p->list;
    while (to->spec != a->spec - 1 || to->number != a->number)
        to++;
    a->pool = to->pool;
    a->offset = to->offset + param_elements(to);
}

// Neighbours of one shape stand side by side, so that one op takes them; others begin on 16 bytes. The rows
// of scalars are one vector.
static void place_params(Params *p)
{
    enum { ALIGNED = 8 };
    const Param *last[MAX_POOLS] = {NULL};
    for (int i = 0; i < p->count; i++) {
        Param *a = &p->list[i];
        if (a->spec->joined) {
            place_joined(p, a);
            continue;
        }
        a->pool = pool_for(p, a);
        ParamPool *q = &p->pools[a->pool];
        const Param *before = last[a->pool];
        bool same = before && before->rows == a->rows && before->cols == a->cols;
        if (!q->slot && before && !same && q->storage != STORE_FLOAT)
            q->size = round_up(q->size, ALIGNED);
        a->offset = q->size;
        q->size += q->slot ? q->slot : param_stored(a);
        last[a->pool] = a;
    }
    for (int i = 0; i < p->num_pools; i++) {
        ParamPool *q = &p->pools[i];
        q->size = round_up(q->size, q->slot ? q->slot * SLOT_GROUP : ALIGNED);
    }
}

static void tie_params(Params *p, const Config *c)
{
    p->last_tied = -1;
    for (int i = 0; i < p->count; i++) {
        Param *a = &p->list[i];
        const UpdateSpec *u = &a->spec->update;
        if (!u->own_from)
            continue;
        a->tied_to = (int)(params_of(p, u->tied_to, a->number) - p->list);
        p->last_tied = (int)max_i64(p->last_tied, schedule_first_update(c, u->own_from, u->every));
        p->tied = true;
    }
}

void params_describe(Params *p, const Config *c)
{
    memset(p, 0, sizeof *p);
    p->record = config_record(c);
    add_rows(p, c);
    place_params(p);
    tie_params(p, c);
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

void param_shape(const Param *a, const Config *c, int64_t *rows, int64_t *cols)
{
    const FileSpec *f = &a->spec->file;
    record_file_matrix(c, a->spec, rows, cols);
    if (f->dims != 2 || f->transposed || *rows * *cols != param_elements(a)) {
        *rows = a->matrices * a->rows;
        *cols = a->cols;
    }
}

int64_t params_total(const Params *p)
{
    int64_t n = 0;
    for (int i = 0; i < p->count; i++)
        n += p->list[i].spec->update.kind == FIXED ? 0 : param_elements(&p->list[i]);
    return n;
}

// ---- memory -----------------------------------------------------------------------------------------------

static size_t element_size(Storage storage) { return storage == STORE_HALF ? sizeof(floatX) : sizeof(float); }

size_t param_element_size(const Param *a) { return element_size(a->spec->storage); }

int64_t param_stored(const Param *a)
{
    return a->spec->storage == STORE_SIGNS ? a->matrices * a->rows * ceil_div(a->cols, 32)
                                           : param_elements(a);
}

const Param *param_now(const Params *p, const Param *a)
{
    return p->tied && a->tied_to >= 0 ? &p->list[a->tied_to] : a;
}

int param_stage(const Params *p, const Param *a)
{
    int stage = a->stage;
    for (int i = 0; i < p->count; i++) {
        if (p->tied && p->list[i].tied_to == a - p->list)
            stage = (int)min_i64(stage, p->list[i].stage);
    }
    return stage;
}

void *param_data(const Params *p, const Param *a)
{
    a = param_now(p, a);
    char *values = p->pools[a->pool].values;
    return values ? values + (size_t)a->offset * param_element_size(a) : NULL;
}

const floatX *param_weight(const Params *p, const Param *a)
{
    a = param_now(p, a);
    const ParamPool *q = &p->pools[a->pool];
    assert(q->storage != STORE_FLOAT && q->storage != STORE_SIGNS);
    const floatX *values = q->storage == STORE_HALF ? q->values : q->rounded;
    return values ? values + a->offset : NULL;
}

float *param_grad(const Params *p, const Param *a)
{
    a = param_now(p, a);
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
        if (q->sharding == REPLICATED && q->every && later && (best < 0 || q->every < p->pools[best].every))
            best = i;
    }
    return best;
}

int update_cycle(const Params *p)
{
    int cycle = 1;
    for (int i = 0; i < p->num_pools; i++) {
        int step = cycle;
        while (p->pools[i].every && cycle % p->pools[i].every)
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
        bool rounded = q->storage == STORE_MASTER || q->storage == STORE_SPLIT;
        q->rounded = rounded ? arena_take(values, (size_t)q->size, sizeof(floatX)) : NULL;
        if (!q->every)
            q->grad = NULL;
        else if (q->sharding == REPLICATED)
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
    p->tied = p->tied && training;
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
        if (p->pools[i].grad)
            device_zero(s, p->pools[i].grad, (size_t)p->pools[i].size * sizeof(float));
}

void params_round(const Params *p, Stream s)
{
    for (int i = 0; i < p->num_pools; i++) {
        const ParamPool *q = &p->pools[i];
        if (q->rounded)
            cast_weights(s, q->rounded, q->values, q->size, q->storage == STORE_SPLIT);
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

// Box-Muller: elements i, which is even, and i + 1.
static void normal_pair(uint64_t key, int64_t i, float pair[2])
{
    double radius = sqrt(-2 * log(uniform01(key, i))), angle = 2 * M_PI * uniform01(key, i + 1);
    pair[0] = (float)(radius * cos(angle));
    pair[1] = (float)(radius * sin(angle));
}

void param_init_runs(const Param *a, const Config *c, float *host)
{
    int64_t n = param_elements(a), first = (a->number - a->spec->first) * n, at = -first;
    for (const InitRun *run = a->spec->init.runs; run->repeat; run++) {
        for (int i = 0; i < run->repeat * run->width; i++, at++) {
            bool option = run->option && i % run->width == 0;
            if (at >= 0 && at < n)
                host[at] = option ? (float)*(const double *)((const char *)c + run->option)
                                  : run->value[i % run->width];
        }
    }
    assert(at >= n);
}

// Elements i, which is even, and i + 1 of those that are drawn.
static void draw_pair(const Param *a, double bound, uint64_t key, int64_t i, float pair[2])
{
    const InitSpec *init = &a->spec->init;
    if (init->kind == INIT_NORMAL)
        normal_pair(key, i, pair);
    for (int k = 0; k < 2; k++) {
        float x = init->kind == INIT_NORMAL ? (float)(init->scale * pair[k])
                                            : (float)(bound * (2 * uniform01(key, i + k) - 1));
        if (init->times)
            x = (float)init->times * bf16_to_float(float_to_bf16(x));
        pair[k] = a->spec->storage == STORE_SPLIT ? bf16_to_float(float_to_bf16(x)) : x;
    }
}

static int64_t drawn_elements(const Param *a)
{
    const InitSpec *init = &a->spec->init;
    if (init->kind != INIT_NORMAL && init->kind != INIT_UNIFORM)
        return 0;
    return init->matrices ? a->rows * a->cols * init->matrices : param_elements(a);
}

static void draw_signs(const Param *a, uint64_t key, uint32_t *host)
{
    int64_t words = ceil_div(a->cols, 32);
    for (int64_t i = 0; i < param_stored(a); i++) {
        int64_t bits = min_i64(32, a->cols - i % words * 32); // those beyond the width stay 0
        host[i] = (uint32_t)(mix64(key + (uint64_t)i) >> 32) >> (32 - bits);
    }
}

static void draw_all(const Param *a, const Config *c, uint64_t key, void *host)
{
    int64_t drawn = drawn_elements(a);
    bool half = a->spec->storage == STORE_HALF;
    double bound = a->spec->init.scale / sqrt(c->model_dim);
#pragma omp parallel for
    for (int64_t i = 0; i < drawn; i += 2) {
        float pair[2];
        draw_pair(a, bound, key, i, pair);
        for (int k = 0; k < 2 && i + k < drawn; k++) {
            if (half)
                ((floatX *)host)[i + k] = float_to_x(pair[k]);
            else
                ((float *)host)[i + k] = pair[k];
        }
    }
}

static void set_runs(const Param *a, const Config *c, void *host)
{
    int64_t n = param_elements(a);
    float *values = xcalloc((size_t)n, sizeof *values);
    param_init_runs(a, c, values);
    for (int64_t i = 0; i < n; i++) {
        if (a->spec->storage == STORE_HALF)
            ((floatX *)host)[i] = float_to_x(values[i]);
        else
            ((float *)host)[i] = values[i];
    }
    free(values);
}

static size_t init_bytes(const Param *a)
{
    return a->spec->init.kind == INIT_ZERO ? 0 : (size_t)param_stored(a) * param_element_size(a);
}

// host: (init_bytes()) work
static void init_one(Params *p, const Param *a, const Config *c, uint64_t key, void *host, Stream s)
{
    size_t bytes = init_bytes(a);
    if (!bytes) {
        device_zero(s, param_data(p, a), (size_t)param_stored(a) * param_element_size(a));
        return;
    }
    memset(host, 0, bytes);
    if (a->spec->init.kind == INIT_RUNS)
        set_runs(a, c, host);
    else if (a->spec->init.kind == INIT_SIGNS)
        draw_signs(a, key, host);
    else
        draw_all(a, c, key, host);
    copy_to_device(s, param_data(p, a), host, bytes);
    stream_synchronize(s);
}

void params_init(Params *p, const Config *c, Stream s)
{
    size_t most = 1;
    for (int i = 0; i < p->count; i++)
        most = init_bytes(&p->list[i]) > most ? init_bytes(&p->list[i]) : most;
    void *host = host_alloc(most);
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (param_now(p, a) == a)
            init_one(p, a, c, mix64((uint64_t)c->seed) + mix64((uint64_t)i << 32), host, s);
    }
    host_free(host);
    params_round(p, s);
    stream_synchronize(s);
}
