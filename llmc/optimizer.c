#include "llmc/optimizer.h"
#include "llmc/arena.h"
#include <math.h>
#include <string.h>

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int count_own(const Optimizer *o, int first, int last) // own slots in [first, last)
{
    int n = 0;
    for (int slot = first; slot < last; slot++) n += slot_owner(slot, o->size) == o->rank;
    return n;
}

size_t optimizer_workspace_bytes(const Optimizer *o, const Model *m)
{
    int d = m->config->model_dim, F = m->config->mlp_dim;
    size_t mlp = ns_workspace_bytes(&o->ns, d, F, o->own_mlp);
    size_t attention = ns_workspace_bytes(&o->ns, d, d, 4 * o->own_attention);
    size_t gates = ns_workspace_bytes(&o->ns_gates, m->config->num_heads, GATE_INPUTS, m->params.num_attention);
    size_t most = mlp > attention ? mlp : attention;
    return most > gates ? most : gates;
}

static void place(Optimizer *o, const Params *p, Arena *a)
{
    size_t tables = (size_t)(NUM_TABLES * p->table_size / o->size), slots = (size_t)(o->own_slots * p->slot_size);
    int64_t d = o->config->model_dim, F = o->config->mlp_dim, H = o->config->num_heads;
    o->table_m = arena_take(a, tables, sizeof(floatX));
    o->table_v = arena_take(a, tables, sizeof(floatX));
    o->scalar_m = arena_take(a, NUM_SCALARS, sizeof(float));
    o->scalar_v = arena_take(a, NUM_SCALARS, sizeof(float));
    o->momentum = arena_take(a, slots, sizeof(float));
    o->second_mlp = arena_take(a, (size_t)(o->own_mlp * larger(d, F)), sizeof(float));
    o->second_attention = arena_take(a, (size_t)(o->own_attention * 4 * d), sizeof(float));
    o->gates_momentum = arena_take(a, (size_t)p->gates_size, sizeof(float));
    o->second_gates = arena_take(a, (size_t)(p->num_attention * larger(H, GATE_INPUTS)), sizeof(float));
    o->second_smear = arena_take(a, GATE_INPUTS, sizeof(float));
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
    NsText text = config_ns_text(c), text_gates = text;
    text_gates.dtype = "fp32";
    if (!ns_options_parse(&o->ns, &text, &e) || !ns_options_parse(&o->ns_gates, &text_gates, &e)) fatal(EXIT_USAGE, "%s", e.text);
    int attention_end = p->first_attention_slot + p->num_attention;
    o->own_slots = count_own(o, 0, p->num_slots);
    o->own_mlp = count_own(o, 0, p->first_attention_slot);
    o->own_attention = count_own(o, p->first_attention_slot, attention_end);

    Arena state = {NULL, 0};
    place(o, p, &state);
    state = (Arena){device_alloc(state.used, "optimizer state"), 0};
    place(o, p, &state);
    exchange_create(&o->exchange, p, c);
}

void optimizer_free(Optimizer *o)
{
    device_free(o->table_m); // where the arena begins
    exchange_free(&o->exchange);
}

// ---- Adam --------------------------------------------------------------------------------------------------------------

static void adam(Optimizer *o, Params *p, Stream s)
{
    int64_t own = p->table_size / o->size;
    for (int i = 0; i < NUM_TABLES; i++) {
        int64_t at = i * p->table_size + o->rank * own;
        exchange_wait_table(&o->exchange, i, s);
        adam_update(s, p->tables + at, o->table_m + i * own, o->table_v + i * own, p->tables_grad + at, o->step,
                    (float)p->list[i].multiplier, own);
    }
    const Param *scalars = params_find(p, "scalars");
    adam_update_fp32(s, p->scalars, o->scalar_m, o->scalar_v, p->scalars_grad, o->step, (float)scalars->multiplier, NUM_SCALARS);
}

// ---- NorMuon -----------------------------------------------------------------------------------------------------------

// U of the own slot `i`: where the sums arrive with several ranks, else where the gradient is.
static float *own_u(const Optimizer *o, const Params *p, int i)
{
    return (o->exchange.own ? o->exchange.own : p->matrices_grad) + i * p->slot_size;
}

// The parameter in a matrix slot. The table lists matrices in slot order.
static const Param *slot_param(const Params *p, int slot) { return &p->list[NUM_TABLES + slot]; }

// On the learning rate: the parameter's own multiplier and NorMuon's shape factor, max(1, rows/cols)^1/2 of the stored shape.
static float rate_multiplier(const Param *a)
{
    return (float)(a->multiplier * sqrt(fmax(1, (double)a->rows / (double)a->cols)));
}

// `batch` matrices (rows, cols) that are `stride` elements apart, the first of them at the start of an own slot.
static void update(Optimizer *o, Params *p, int own, const void *ortho, int rows, int cols, int batch, int64_t stride,
                   float *second, Stream s)
{
    int slot = o->rank + own * o->size, next = slot + o->size;
    int64_t at = slot * p->slot_size;
    const Param *a = slot_param(p, slot), *odd = stride < p->slot_size || batch < 2 ? a : slot_param(p, next);
    normuon_update(s,
                   &(NormuonUpdate){.w = p->matrices + at, .wx = p->matrices_x + at,
                                    .second = second, .o = ortho, .o_dtype = o->ns.dtype, .rows = rows, .cols = cols,
                                    .batch = batch, .per_column = a->rows < a->cols,
                                    .multiplier = {rate_multiplier(a), rate_multiplier(odd)}, .stride = stride},
                   o->step);
}

// Momentum of own slots [first, last), whose sums must have arrived.
static void momentum(Optimizer *o, Params *p, int first, int last, Stream s)
{
    exchange_wait_slots(&o->exchange, o->rank + first * o->size, o->rank + (last - 1) * o->size + 1, s);
    normuon_momentum(s, own_u(o, p, first), o->momentum + first * p->slot_size, o->step, (last - first) * p->slot_size);
}

static void normuon_mlp(Optimizer *o, Params *p, Stream s)
{
    int d = o->config->model_dim, F = o->config->mlp_dim;
    if (!o->own_mlp) return;
    momentum(o, p, 0, o->own_mlp, s);
    char *ortho = newton_schulz(s, &o->ns, own_u(o, p, 0), p->slot_size, d, F, o->own_mlp, o->ns_workspace);
    // c_proj and c_fc take turns. Every second own slot is of the same kind, if not every one.
    update(o, p, 0, ortho, d, F, o->own_mlp, o->size * p->slot_size, o->second_mlp, s);
}

// Q, K, V and O are four matrices, orthogonalised and normalised each by itself: one batch over all slots, unless a wider MLP
// makes slots larger than an attention matrix.
static void normuon_attention(Optimizer *o, Params *p, Stream s)
{
    int d = o->config->model_dim;
    int64_t square = (int64_t)d * d;
    size_t bytes = (size_t)(4 * square) * ns_element_size(o->ns.dtype);
    int together = p->slot_size == 4 * square ? o->own_attention : 1, adjacent = o->size == 1 ? together : 1;
    if (!o->own_attention) return;
    momentum(o, p, o->own_mlp, o->own_mlp + o->own_attention, s);
    for (int first = 0; first < o->own_attention; first += together) {
        char *ortho = newton_schulz(s, &o->ns, own_u(o, p, o->own_mlp + first), square, d, d, 4 * together, o->ns_workspace);
        for (int i = 0; i < together; i += adjacent)
            update(o, p, o->own_mlp + first + i, ortho + i * bytes, d, d, 4 * adjacent, square,
                   o->second_attention + (first + i) * 4 * (int64_t)d, s);
    }
}

// `batch` gates of the shape of `a`, the first of them.
static void update_gates(Optimizer *o, Params *p, const Param *a, int batch, float *second, Stream s)
{
    float *u = p->gates_grad + a->offset, multiplier = rate_multiplier(a);
    int rows = (int)a->rows, cols = (int)a->cols;
    void *ortho = newton_schulz(s, &o->ns_gates, u, rows * cols, rows, cols, batch, o->ns_workspace);
    normuon_update(s,
                   &(NormuonUpdate){.wx = p->gates + a->offset, .grad = u, .second = second, .o = ortho,
                                    .o_dtype = o->ns_gates.dtype, .rows = rows, .cols = cols, .batch = batch,
                                    .per_column = rows < cols, .multiplier = {multiplier, multiplier},
                                    .stride = rows * cols},
                   o->step);
}

static void normuon_gates(Optimizer *o, Params *p, Stream s)
{
    exchange_wait_small(&o->exchange, s);
    normuon_momentum(s, p->gates_grad, o->gates_momentum, o->step, p->gates_size);
    update_gates(o, p, params_first_gate(p), p->num_attention, o->second_gates, s);
    update_gates(o, p, params_find(p, "smear_gate.weight"), 1, o->second_smear, s);
}

// What was sent last is used last: sums travel while those before them are worked on.
void optimizer_step(Optimizer *o, Model *m, bool adam_now, Stream s)
{
    Params *p = &m->params;
    exchange_small(&o->exchange, p, adam_now, s);
    normuon_mlp(o, p, s);
    normuon_attention(o, p, s);
    normuon_gates(o, p, s);
    if (adam_now) adam(o, p, s);
}

void optimizer_warm_up(Optimizer *o, Model *m, Stream s)
{
    Params *p = &m->params;
    int d = o->config->model_dim, attention = p->slot_size == 4 * (int64_t)d * d ? o->own_attention : o->own_attention > 0;
    newton_schulz(s, &o->ns, own_u(o, p, 0), p->slot_size, d, o->config->mlp_dim, o->own_mlp, o->ns_workspace);
    newton_schulz(s, &o->ns, own_u(o, p, o->own_mlp), (int64_t)d * d, d, d, 4 * attention, o->ns_workspace);
    newton_schulz(s, &o->ns_gates, p->gates_grad, 0, o->config->num_heads, GATE_INPUTS, p->num_attention, o->ns_workspace);
    newton_schulz(s, &o->ns_gates, p->gates_grad, 0, 1, GATE_INPUTS, 1, o->ns_workspace);
    // Every collective once: sums and copies of zeros.
    for (int stage = NUM_STAGES - 1; stage >= 0; stage--) exchange_stage_done(&o->exchange, p, stage, true, s);
    exchange_small(&o->exchange, p, true, s);
    exchange_wait_small(&o->exchange, s);
    exchange_begin_gather(&o->exchange, p, true, s);
    exchange_stage_needed(&o->exchange, HEAD_STAGE, s);
}

// ---- state by parameter ------------------------------------------------------------------------------------------------

static void table_state(const Optimizer *o, const Params *p, int i, bool second, StateTensor *t)
{
    int64_t own = p->table_size / o->size;
    t->half = true;
    t->first = o->rank * own;
    t->count = own;
    t->data = (second ? o->table_v : o->table_m) + i * own;
}

static void matrix_state(const Optimizer *o, const Params *p, int slot, bool second, StateTensor *t)
{
    int own = slot / o->size; // index among the own slots, if it is ours
    bool attention = slot >= p->first_attention_slot, mine = slot_owner(slot, o->size) == o->rank;
    int64_t d = o->config->model_dim;
    if (second) {
        t->rows = attention ? 4 : 1;
        t->cols = attention ? d : larger(d, o->config->mlp_dim);
        t->data = attention ? o->second_attention + (own - o->own_mlp) * 4 * d : o->second_mlp + own * t->cols;
    } else {
        t->data = o->momentum + own * p->slot_size;
    }
    t->count = mine ? t->rows * t->cols : 0;
}

static void gate_state(const Optimizer *o, const Params *p, const Param *a, bool second, StateTensor *t)
{
    bool smear = a == params_find(p, "smear_gate.weight");
    if (second) {
        t->rows = 1;
        t->cols = larger(a->rows, a->cols);
        t->data = smear ? o->second_smear : o->second_gates + a->offset / (a->rows * a->cols) * t->cols;
    } else {
        t->data = o->gates_momentum + a->offset;
    }
    t->count = o->rank ? 0 : t->rows * t->cols; // the same everywhere: rank 0 writes it
}

bool optimizer_state(const Optimizer *o, const Model *m, int index, StateTensor *t)
{
    static const char *const kinds[][2] = {[GROUP_TABLE] = {"adam_m", "adam_v"}, [GROUP_MATRIX] = {"momentum", "second"},
                                           [GROUP_GATE] = {"momentum", "second"}, [GROUP_SCALARS] = {"adam_m", "adam_v"}};
    const Params *p = &m->params;
    bool second = index % 2;
    if (index / 2 >= p->count) return false;
    const Param *a = &p->list[index / 2];
    *t = (StateTensor){.rows = a->rows, .cols = a->cols};
    snprintf(t->name, sizeof t->name, "%s.%s", a->name, kinds[a->group][second]);
    if (a->group == GROUP_TABLE) table_state(o, p, index / 2, second, t);
    if (a->group == GROUP_MATRIX) matrix_state(o, p, (int)(a->offset / p->slot_size), second, t);
    if (a->group == GROUP_GATE) gate_state(o, p, a, second, t);
    if (a->group == GROUP_SCALARS) {
        t->data = second ? o->scalar_v : o->scalar_m;
        t->count = o->rank ? 0 : t->rows * t->cols;
    }
    return true;
}
