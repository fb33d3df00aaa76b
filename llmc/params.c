#include "llmc/params.h"
#include "llmc/arena.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static Param *add(Params *p, ParamGroup group, int layer, int64_t rows, int64_t cols, int64_t offset, double multiplier)
{
    Param *a = &p->list[p->count++];
    assert(p->count <= MAX_PARAMS);
    *a = (Param){.group = group, .layer = layer, .rows = rows, .cols = cols, .offset = offset, .multiplier = multiplier};
    return a;
}

static void describe_tables(Params *p, const Config *c)
{
    int64_t rows = config_vocab_padded(c);
    p->table_size = rows * c->model_dim;
    for (int i = 0; i < NUM_TABLES; i++) {
        bool head = i == NUM_TABLES - 1;
        Param *a = add(p, GROUP_TABLE, -1, rows, c->model_dim, i * p->table_size, head ? 1 : 75);
        if (i == 0) strcpy(a->name, "embed.weight");
        else if (head) strcpy(a->name, "lm_head.weight");
        else snprintf(a->name, sizeof a->name, "value_embeds.%d.weight", i - 1);
    }
}

static void describe_matrices(Params *p, const Config *c)
{
    int64_t d = c->model_dim, slot = 0;
    p->slot_size = max_i64(4 * d * d, d * c->mlp_dim);
    for (int i = NUM_LAYERS - 1; i > 0; i--) {
        Param *proj = add(p, GROUP_MATRIX, i, d, c->mlp_dim, slot++ * p->slot_size, 1);
        snprintf(proj->name, sizeof proj->name, "blocks.%d.mlp.c_proj", i);
        Param *fc = add(p, GROUP_MATRIX, i, d, c->mlp_dim, slot++ * p->slot_size, 2);
        snprintf(fc->name, sizeof fc->name, "blocks.%d.mlp.c_fc", i);
    }
    p->first_attention_slot = (int)slot;
    for (int i = NUM_LAYERS - 1; i > 0; i--) {
        if (!layer_role(c, i).attention) continue;
        Param *a = add(p, GROUP_MATRIX, i, d, 4 * d, slot++ * p->slot_size, 1);
        snprintf(a->name, sizeof a->name, "blocks.%d.attn.qkvo_w", i);
    }
    p->num_attention = (int)slot - p->first_attention_slot;
    p->num_slots = (int)round_up(slot, SLOT_GROUP);
    assert(p->num_slots <= MAX_SLOTS);
}

static void describe_gates(Params *p, const Config *c)
{
    int64_t offset = 0, size = (int64_t)c->num_heads * GATE_INPUTS;
    for (int i = NUM_LAYERS - 1; i > 0; i--) {
        if (!layer_role(c, i).attention) continue;
        Param *a = add(p, GROUP_GATE, i, c->num_heads, GATE_INPUTS, offset, 1);
        snprintf(a->name, sizeof a->name, "blocks.%d.attn.attn_gate.weight", i);
        offset += size;
    }
    offset = round_up(offset, 8); // 16 bytes
    strcpy(add(p, GROUP_GATE, -1, 1, GATE_INPUTS, offset, 1)->name, "smear_gate.weight");
    p->gates_size = round_up(offset + GATE_INPUTS, 8);
}

void params_describe(Params *p, const Config *c)
{
    memset(p, 0, sizeof *p);
    describe_tables(p, c);
    describe_matrices(p, c);
    describe_gates(p, c);
    strcpy(add(p, GROUP_SCALARS, -1, 1, NUM_SCALARS, 0, 5)->name, "scalars");
}

static void place(Params *p, Arena *values, Arena *gradients)
{
    size_t tables = (size_t)(NUM_TABLES * p->table_size), matrices = (size_t)(p->num_slots * p->slot_size);
    p->tables = arena_take(values, tables, sizeof(floatX));
    p->matrices = arena_take(values, matrices, sizeof(float));
    p->matrices_x = arena_take(values, matrices, sizeof(floatX));
    p->gates = arena_take(values, (size_t)p->gates_size, sizeof(floatX));
    p->scalars = arena_take(values, NUM_SCALARS, sizeof(float));
    p->tables_grad = arena_take(gradients, tables, sizeof(float));
    p->matrices_grad = arena_take(gradients, matrices, sizeof(float));
    p->gates_grad = arena_take(gradients, (size_t)(p->gates_size + NUM_SCALARS), sizeof(float));
    p->scalars_grad = p->gates_grad ? p->gates_grad + p->gates_size : NULL;
}

void params_allocate(Params *p, bool training)
{
    Arena values = {NULL, 0}, gradients = {NULL, 0};
    place(p, &values, &gradients);
    values = (Arena){device_alloc(values.used, "parameters"), 0};
    gradients = (Arena){training ? device_alloc(gradients.used, "gradients") : NULL, 0};
    place(p, &values, &gradients);
}

void params_free(Params *p)
{
    device_free(p->tables); // where the arenas begin
    device_free(p->tables_grad);
}

const Param *params_find(const Params *p, const char *name)
{
    for (int i = 0; i < p->count; i++)
        if (!strcmp(p->list[i].name, name)) return &p->list[i];
    return NULL;
}

const Param *params_first_gate(const Params *p)
{
    const Param *a = p->list;
    while (a->group != GROUP_GATE) a++;
    return a;
}

int64_t params_total(const Params *p)
{
    int64_t n = 0;
    for (int i = 0; i < p->count; i++) n += p->list[i].rows * p->list[i].cols;
    return n;
}

void *param_data(const Params *p, const Param *a)
{
    switch (a->group) {
    case GROUP_TABLE: return p->tables + a->offset;
    case GROUP_MATRIX: return p->matrices + a->offset;
    case GROUP_GATE: return p->gates + a->offset;
    case GROUP_SCALARS: return p->scalars + a->offset;
    }
    return NULL;
}

size_t param_element_size(const Param *a)
{
    return a->group == GROUP_TABLE || a->group == GROUP_GATE ? sizeof(floatX) : sizeof(float);
}

// ---- initial weights ---------------------------------------------------------------------------------------------------

// A hash of (seed, tensor, element) in place of a generator with a state: any element can be drawn anywhere, in any order.
// The mixing function is splitmix64's finaliser.
static uint64_t mix64(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double uniform01(uint64_t key, int64_t i) { return ((double)(mix64(key + (uint64_t)i) >> 11) + 0.5) * 0x1p-53; }

static float normal(uint64_t key, int64_t i) // Box-Muller: even elements take the cosine, odd ones the sine
{
    double radius = sqrt(-2 * log(uniform01(key, i & ~(int64_t)1))), angle = 2 * M_PI * uniform01(key, i | 1);
    return (float)(radius * (i & 1 ? sin(angle) : cos(angle)));
}

static void init_scalars(float *x, const Config *c)
{
    for (int i = 0; i < NUM_SCALARS; i++) x[i] = 1;
    for (int i = 0; i < NUM_LAYERS; i++) {
        x[SCALAR_SKIP + i] = -1.5f;
        x[SCALAR_LAMBDA + 2 * i] = (float)c->lambda_init;
        x[SCALAR_LAMBDA + 2 * i + 1] = 0;
        x[SCALAR_ATTENTION + 2 * i] = x[SCALAR_ATTENTION + 2 * i + 1] = 0.5f;
    }
    x[SCALAR_SMEAR] = 0;
    x[SCALAR_BACKOUT] = 0.5f;
}

// Tables but the head: N(0, 1). Q, K, V and c_fc: U(-b, b), b = sqrt(3)/2 d^-1/2. All else zero.
static int64_t random_elements(const Param *a)
{
    if (a->group == GROUP_TABLE) return strcmp(a->name, "lm_head.weight") ? a->rows * a->cols : 0;
    if (a->group != GROUP_MATRIX) return 0;
    if (strstr(a->name, "qkvo_w")) return a->rows * a->cols / 4 * 3;
    return strstr(a->name, "c_fc") ? a->rows * a->cols : 0;
}

static void init_one(Params *p, const Param *a, const Config *c, uint64_t key, void *host, Stream s)
{
    int64_t n = a->rows * a->cols, drawn = random_elements(a);
    double bound = sqrt(3) / 2 / sqrt(c->model_dim);
    memset(host, 0, (size_t)n * param_element_size(a));
    if (a->group == GROUP_SCALARS) init_scalars(host, c);
    if (a->group == GROUP_TABLE) {
        floatX *x = host;
#pragma omp parallel for
        for (int64_t i = 0; i < drawn; i++) x[i] = float_to_x(normal(key, i));
    } else if (a->group == GROUP_MATRIX) {
        float *x = host;
#pragma omp parallel for
        for (int64_t i = 0; i < drawn; i++) x[i] = (float)(bound * (2 * uniform01(key, i) - 1));
    }
    copy_to_device(s, param_data(p, a), host, (size_t)n * param_element_size(a));
    stream_synchronize(s);
}

void params_init(Params *p, const Config *c, Stream s)
{
    void *host = host_alloc((size_t)max_i64(p->table_size * (int64_t)sizeof(floatX), p->slot_size * 4));
    for (int i = 0; i < p->count; i++) init_one(p, &p->list[i], c, mix64((uint64_t)c->seed) + mix64((uint64_t)i << 32), host, s);
    host_free(host);
    cast_weights(s, p->matrices_x, p->matrices, p->num_slots * p->slot_size);
    stream_synchronize(s);
}
