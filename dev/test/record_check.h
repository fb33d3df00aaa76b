// What a record's tables must hold, by which test_records.c judges those of this program: with the row that
// is wrong. The program itself has no others.
#pragma once
#include "llmc/model/network.h"
#include "llmc/run/config.h"
#include <string.h>

static const char *const role_names[ROLES] = {"embedding",
                                              "smear gate",
                                              "value embedding",
                                              "value gate",
                                              "bigram table",
                                              "signs",
                                              "head",
                                              "scalars",
                                              "qkvo",
                                              "vo",
                                              "o",
                                              "gate",
                                              "MLP up",
                                              "MLP down",
                                              "generator's in",
                                              "generator's out",
                                              "generator's bias"};

static bool of_layers(const ParamSpec *p)
{
    static const LayerSpec full = {.attention = ATTENTION_PLAIN, .mlp = MLP_RELU2};
    return record_layer_has(&full, p->role);
}

static bool is_adam(const ParamSpec *p) { return p->update.kind == ADAM || p->update.kind == ADAM_DECAY; }

static bool optimizer_fits(const ParamSpec *p)
{
    switch (p->update.kind) {
    case ADAM:
        return p->storage == STORE_HALF ? p->sharding != SHARD_TENSORS
                                        : p->storage == STORE_FLOAT && p->sharding == REPLICATED;
    case ADAM_DECAY:
        return p->storage == STORE_HALF && p->sharding != SHARD_TENSORS;
    case NORMUON:
        return (p->storage == STORE_HALF || p->storage == STORE_MASTER || p->storage == STORE_SPLIT) &&
               p->sharding != SHARD_ROWS;
    case FIXED:
        return p->sharding == REPLICATED;
    }
    return false;
}

// Two rows have a tensor of the same role and number.
static bool overlap(const ParamSpec *p, const ParamSpec *q)
{
    int p_end = p->first + (p->count ? p->count : 1), q_end = q->first + (q->count ? q->count : 1);
    return p->role == q->role && p->first < q_end && q->first < p_end;
}

// The row that has the tensor of this role and number; NULL: no row has it.
static const ParamSpec *row_of(const Record *r, Role role, int number)
{
    for (int i = 0; i < r->num_params; i++) {
        const ParamSpec *p = &r->params[i];
        int end = p->first + (p->count ? p->count : 1);
        if (p->role == role && p->first <= number && number < end)
            return p;
    }
    return NULL;
}

static int tensors_before(const Record *r, int row) // of the row's role
{
    int count = 0;
    for (int i = 0; i < row; i++) {
        if (r->params[i].role == r->params[row].role)
            count += r->params[i].count ? r->params[i].count : 1;
    }
    return count;
}

static bool check_joined(const Record *r, int row, Error *e)
{
    const ParamSpec *p = &r->params[row], *to = row ? p - 1 : NULL;
    if (!p->joined)
        return true;
    if (to && p->sharding == SHARD_TENSORS && to->sharding == SHARD_TENSORS && to->storage == p->storage &&
        of_layers(p) && of_layers(to))
        return true;
    return error_set(e, "record %s, %s: cannot be joined to the row before it", r->name, p->name);
}

static bool check_tied(const Record *r, const ParamSpec *p, Error *e)
{
    const UpdateSpec *u = &p->update;
    const ParamSpec *to = record_row(r, u->tied_to);
    if (!u->own_from)
        return true;
    if (to && is_adam(p) && u->own_from > 0 && !to->update.own_from && to != p &&
        to->update.kind == u->kind && to->update.every == u->every && to->sharding == p->sharding &&
        to->storage == p->storage && !memcmp(&to->rows, &p->rows, sizeof p->rows) &&
        !memcmp(&to->cols, &p->cols, sizeof p->cols))
        return true;
    return error_set(e, "record %s, %s: cannot be tied to the %s", r->name, p->name, role_names[u->tied_to]);
}

// Which extents the ops take for a tensor's rows and columns. `times` 0: any number of that size.
typedef struct {
    bool any_rows;
    Extent rows, cols;
} RoleShape;

static bool extent_fits(Extent given, Extent wanted)
{
    return given.of == wanted.of && (wanted.times ? given.times == wanted.times : given.times > 0);
}

static bool check_shape(const Record *r, const ParamSpec *p, Error *e)
{
    static const RoleShape vocabulary = {.rows = {1, SIZE_VOCAB}, .cols = {1, SIZE_MODEL}},
                           mlp = {.rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MLP}},
                           inputs = {.any_rows = true, .cols = {1, SIZE_MODEL}},
                           heads = {.rows = {1, SIZE_HEADS}, .cols = {0, SIZE_ONE}},
                           line = {.rows = {1, SIZE_ONE}, .cols = {0, SIZE_ONE}},
                           numbers = {.rows = {0, SIZE_ONE}, .cols = {0, SIZE_ONE}},
                           hidden = {.rows = {0, SIZE_ONE}, .cols = {1, SIZE_MODEL}};
    static const RoleShape *const shapes[ROLES] = {[ROLE_EMBED] = &vocabulary,
                                                   [ROLE_SMEAR_GATE] = &line,
                                                   [ROLE_VALUE_EMBED] = &vocabulary,
                                                   [ROLE_VALUE_GATE] = &heads,
                                                   [ROLE_BIGRAM] = &inputs,
                                                   [ROLE_SIGNS] = &inputs,
                                                   [ROLE_HEAD] = &vocabulary,
                                                   [ROLE_SCALARS] = &numbers,
                                                   [ROLE_QKVO] = &inputs,
                                                   [ROLE_VO] = &inputs,
                                                   [ROLE_O] = &inputs,
                                                   [ROLE_ATTENTION_GATE] = &heads,
                                                   [ROLE_MLP_UP] = &mlp,
                                                   [ROLE_MLP_DOWN] = &mlp,
                                                   [ROLE_GENERATOR_IN] = &hidden,
                                                   [ROLE_GENERATOR_OUT] = &numbers,
                                                   [ROLE_GENERATOR_BIAS] = &line};
    const RoleShape *s = shapes[p->role];
    if ((s->any_rows ? p->rows.times > 0 : extent_fits(p->rows, s->rows)) && extent_fits(p->cols, s->cols))
        return true;
    return error_set(e, "record %s, %s: its rows and cols are not those of the %s, see Role in record.h",
                     r->name, p->name, role_names[p->role]);
}

// The vector of a row's runs goes on through all of its tensors.
static bool check_init(const Record *r, const ParamSpec *p, Error *e)
{
    const InitSpec *init = &p->init;
    int tensors = p->count ? p->count : 1, matrices = p->matrices.times ? p->matrices.times : 1;
    int elements = tensors * matrices * p->rows.times * p->cols.times, values = 0;
    bool fixed = p->rows.of == SIZE_ONE && p->cols.of == SIZE_ONE && p->matrices.of == SIZE_ONE;
    if ((init->kind == INIT_SIGNS) != (p->storage == STORE_SIGNS))
        return error_set(e, "record %s, %s: INIT_SIGNS is for STORE_SIGNS only", r->name, p->name);
    if (init->matrices < 0 || (p->matrices.of == SIZE_ONE && init->matrices > matrices))
        return error_set(e, "record %s, %s: init draws %d matrices of %d", r->name, p->name, init->matrices,
                         matrices);
    if (init->kind != INIT_RUNS)
        return true;
    if (!init->runs)
        return error_set(e, "record %s, %s: INIT_RUNS without runs", r->name, p->name);
    for (const InitRun *run = init->runs; run->repeat; run++) {
        if (run->repeat < 0 || run->width < 1 || run->width > 2)
            return error_set(e, "record %s, %s: a run of %d times %d values; 1 or 2 values", r->name, p->name,
                             run->repeat, run->width);
        values += run->repeat * run->width;
    }
    return !fixed || of_layers(p) || values == elements ||
           error_set(e, "record %s, %s: its runs have %d values, but its tensors %d", r->name, p->name,
                     values, elements);
}

static bool check_file(const Record *r, const ParamSpec *p, Error *e)
{
    int dims = p->file.dims;
    if (dims < NO_DIMS || dims > FILE_DIMS)
        return error_set(e, "record %s, %s: a file's tensor of %d dimensions; at most %d", r->name, p->name,
                         dims, FILE_DIMS);
    if (p->file.least && dims != 1)
        return error_set(e, "record %s, %s: file.least is for tensors of one dimension", r->name, p->name);
    return true;
}

// The one thing that is put into a name is a number.
static bool check_name(const Record *r, int row, Error *e)
{
    const char *name = r->params[row].name, *number = name ? strchr(name, '%') : NULL;
    if (!name || !*name)
        return error_set(e, "record %s, row %d: no name", r->name, row);
    return !number || (number[1] == 'd' && !strchr(number + 1, '%')) ||
           error_set(e, "record %s, %s: a name has one %%d or none", r->name, name);
}

static bool check_row(const Record *r, int row, Error *e)
{
    const ParamSpec *p = &r->params[row];
    const UpdateSpec *u = &p->update;
    if (!check_name(r, row, e))
        return false;
    for (int i = 0; i < row; i++) {
        if (overlap(&r->params[i], p))
            return error_set(e, "record %s, %s: another row has its role", r->name, p->name);
    }
    if (!optimizer_fits(p))
        return error_set(e, "record %s, %s: no optimizer for this storage and sharding", r->name, p->name);
    if ((p->storage == STORE_FLOAT) != (p->role == ROLE_SCALARS) ||
        (p->storage == STORE_SIGNS) != (p->role == ROLE_SIGNS))
        return error_set(e, "record %s, %s: this storage is for scalars or signs only", r->name, p->name);
    if (p->matrices.times < 0)
        return error_set(e, "record %s, %s: %d matrices", r->name, p->name, p->matrices.times);
    if (u->kind == FIXED ? u->every != 0 : u->every < 1 || (u->kind == NORMUON && u->every != 1))
        return error_set(e, "record %s, %s: updated every %d steps", r->name, p->name, u->every);
    if (p->role == ROLE_SCALARS && u->every != record_row(r, ROLE_SCALARS)->update.every)
        return error_set(e, "record %s, %s: scalars are updated at the same steps", r->name, p->name);
    if (p->role == ROLE_SCALARS && p->first != tensors_before(r, row))
        return error_set(
            e, "record %s, %s: scalars are numbered in the order of their rows, and this row begins with %d",
            r->name, p->name, p->first);
    if ((p->count || p->first) && of_layers(p))
        return error_set(e, "record %s, %s: has a count of %d", r->name, p->name, p->count);
    bool gate = p->role == ROLE_SMEAR_GATE || p->role == ROLE_ATTENTION_GATE || p->role == ROLE_VALUE_GATE;
    if (gate && (p->cols.of != SIZE_ONE || p->cols.times < 1 || p->cols.times > MAX_GATE_INPUTS))
        return error_set(e, "record %s, %s: a gate reads 1 to %d channels", r->name, p->name,
                         MAX_GATE_INPUTS);
    return check_shape(r, p, e) && check_init(r, p, e) && check_file(r, p, e) && check_joined(r, row, e) &&
           check_tied(r, p, e);
}

// ---- attention --------------------------------------------------------------------------------------------

// How often (d, d) is in a tensor of this role; 0: there is none, or its rows are not of that size.
static int squares(const Record *r, Role role)
{
    const ParamSpec *p = record_row(r, role);
    if (!p || p->rows.of != SIZE_MODEL || p->matrices.of != SIZE_ONE)
        return 0;
    return p->rows.times * (p->matrices.times ? p->matrices.times : 1);
}

// The ops take Wq, Wk, Wv and Wo as one piece of memory: plain attention (d, d) of each, heads Wq and Wk as
// narrow as their row says.
static bool check_attention(const Record *r, Error *e)
{
    const ParamSpec *qkvo = record_row(r, ROLE_QKVO), *vo = record_row(r, ROLE_VO),
                    *o = record_row(r, ROLE_O);
    int whole = squares(r, ROLE_QKVO), parts = squares(r, ROLE_VO) + squares(r, ROLE_O);
    if (!qkvo)
        return true;
    if ((vo && (vo != qkvo + 1 || !vo->joined)) || (o && (!vo || o != vo + 1 || !o->joined)))
        return error_set(e, "record %s, %s: the rows of the vo and o follow it, joined", r->name, qkvo->name);
    if (vo && parts != 2)
        return error_set(e, "record %s, %s: Wv and Wo are %d times (d, d); 2", r->name, vo->name, parts);
    bool plain = record_has_attention(r, ATTENTION_PLAIN);
    if (plain ? whole + parts != 4 : !vo && whole && whole < 3)
        return error_set(e, "record %s, %s: Wq, Wk, Wv and Wo are %d times (d, d); 4", r->name, qkvo->name,
                         whole + parts);
    return true;
}

// ---- generators -------------------------------------------------------------------------------------------

// The ops read so many rows of a tensor as the generator has columns, whatever the tensor has.
static bool check_generator(const Record *r, int g, Error *e)
{
    const ParamSpec *in = row_of(r, ROLE_GENERATOR_IN, g), *out = row_of(r, ROLE_GENERATOR_OUT, g),
                    *bias = row_of(r, ROLE_GENERATOR_BIAS, g);
    int columns = r->generators[g].columns;
    if (!in || !out || !bias) {
        Role missing = !in ? ROLE_GENERATOR_IN : !out ? ROLE_GENERATOR_OUT : ROLE_GENERATOR_BIAS;
        return error_set(e, "record %s, generator %d: no tensor for the %s", r->name, g, role_names[missing]);
    }
    if (columns < 1 || columns > GENERATOR_MOST)
        return error_set(e, "record %s, generator %d: %d columns; 1 to %d", r->name, g, columns,
                         GENERATOR_MOST);
    int hidden = in->rows.times;
    if (hidden < 8 || hidden > GENERATOR_MOST || hidden % 8)
        return error_set(e, "record %s, %s: %d hidden units of generator %d; a multiple of 8, at most %d",
                         r->name, in->name, hidden, g, GENERATOR_MOST);
    if (out->rows.times < columns || out->cols.times != hidden)
        return error_set(e, "record %s, %s: (%d, %d), but generator %d has %d columns and %d hidden units",
                         r->name, out->name, out->rows.times, out->cols.times, g, columns, hidden);
    if (bias->cols.times < columns)
        return error_set(e, "record %s, %s: %d values, but generator %d has %d columns", r->name, bias->name,
                         bias->cols.times, g, columns);
    return true;
}

static bool check_generators(const Record *r, Error *e)
{
    if (r->num_generators > MAX_GENERATORS)
        return error_set(e, "record %s: %d generators; at most %d", r->name, r->num_generators,
                         MAX_GENERATORS);
    for (int g = 0; g < r->num_generators; g++) {
        if (!check_generator(r, g, e))
            return false;
    }
    return true;
}

// ---- numbers of scalars -----------------------------------------------------------------------------------

static int scalars_of(const Record *r)
{
    int count = 0;
    for (int i = 0; i < r->num_params; i++) {
        const ParamSpec *p = &r->params[i];
        int tensors = p->count ? p->count : 1, matrices = p->matrices.times ? p->matrices.times : 1;
        if (p->role == ROLE_SCALARS)
            count += tensors * matrices * p->rows.times * p->cols.times;
    }
    return count;
}

static bool check_scalar(const Record *r, const char *where, const char *what, int scalar, Error *e)
{
    int count = scalars_of(r);
    return (scalar >= 0 && scalar < count) ||
           error_set(e, "record %s, %s: %s is scalar %d, but the rows of scalars have %d", r->name, where,
                     what, scalar, count);
}

static bool check_weight(const Record *r, const char *where, const char *what, Coefficient c, Error *e)
{
    char text[64];
    snprintf(text, sizeof text, "%s, weight.scalar", what);
    if (c.scalar != NONE && !check_scalar(r, where, text, c.scalar, e))
        return false;
    snprintf(text, sizeof text, "%s, weight.gate", what);
    return c.gate == NONE || check_scalar(r, where, text, c.gate, e);
}

static bool check_list(const Record *r, const char *where, const char *name, const MixTerm *list, Error *e)
{
    char what[40];
    for (int i = 0; i < record_mix_terms(list); i++) {
        snprintf(what, sizeof what, "%s[%d]", name, i);
        if (!check_weight(r, where, what, list[i].weight, e))
            return false;
        if (!record_has_lists(r) && (list[i].column || list[i].plus != 0))
            return error_set(e,
                             "record %s, %s: %s has a column or plus, which a record without generators, "
                             "ATTENTION_HEADS and lists behind blocks ignores",
                             r->name, where, what);
    }
    return true;
}

static bool check_layer_numbers(const Record *r, int i, Error *e)
{
    const LayerSpec *l = &r->layers[i];
    char where[32];
    snprintf(where, sizeof where, "layer %d", i);
    if (l->attention == ATTENTION_PLAIN && !(check_scalar(r, where, "v_lambdas", l->v_lambdas, e) &&
                                             check_scalar(r, where, "v_lambdas + 1", l->v_lambdas + 1, e)))
        return false;
    if (l->attention == ATTENTION_HEADS &&
        !(check_scalar(r, where, "heads.factors", l->heads.factors, e) &&
          check_scalar(r, where, "heads.factors + 1", l->heads.factors + 1, e) &&
          check_list(r, where, "heads.extra", l->heads.extra, e)))
        return false;
    return check_list(r, where, "mix", l->mix, e) &&
           check_list(r, where, "after_attention", l->after_attention, e) &&
           check_list(r, where, "after_mlp", l->after_mlp, e);
}

// The ops read scalars by these numbers, whatever the rows have.
static bool check_numbers(const Record *r, Error *e)
{
    for (int i = 0; i < r->num_layers; i++) {
        if (!check_layer_numbers(r, i, e))
            return false;
    }
    for (int g = 0; g < r->num_generators; g++) {
        char where[32];
        snprintf(where, sizeof where, "generator %d", g);
        if (!check_weight(r, where, "scale", r->generators[g].scale, e))
            return false;
    }
    return check_list(r, "output", "output", r->output, e) &&
           check_scalar(r, "smear", "smear_lambda", r->smear_lambda, e);
}

// ---- streams ----------------------------------------------------------------------------------------------

static int below_of(const Record *r, int i) // the layer whose output enters layer i; -1: none
{
    do
        i--;
    while (i >= 0 && !r->layers[i].attention && !r->layers[i].mlp);
    return i;
}

// Readers of a stream: [0] lists that have it second, [1] third; of lists up to `lists`, the last of which is
// the output.
static bool check_streams(const Record *r, Error *e)
{
    int readers[MAX_LAYERS + 1][2] = {{0}}; // by stream, the embedding last
    for (int i = 0; i <= r->num_layers; i++) {
        const MixTerm *mix = i < r->num_layers ? r->layers[i].mix : r->output;
        int terms = record_mix_terms(mix);
        if (terms == 1 || terms > MIX_TERMS || (terms && mix[0].stream != RUNNING))
            return error_set(e, "record %s, layer %d: a mix is nothing, or the running stream and others",
                             r->name, i);
        for (int k = 1; k < terms; k++) {
            int stream = mix[k].stream == EMBEDDED ? r->num_layers : mix[k].stream;
            if (stream < 0 || (stream >= i && stream != r->num_layers))
                return error_set(e, "record %s, layer %d: mixes in %s, which is not there yet", r->name, i,
                                 record_stream_name(mix[k].stream).text);
            if (stream == below_of(r, i) && (k == 1 || i == r->num_layers))
                return error_set(
                    e, "record %s, layer %d: mixes in the layer below it, which the running stream is",
                    r->name, i);
            bool empty = stream < r->num_layers && !r->layers[stream].attention && !r->layers[stream].mlp;
            if (empty)
                return error_set(e, "record %s, layer %d: mixes in layer %d, which is empty", r->name, i,
                                 stream);
            readers[stream][k - 1]++;
        }
    }
    if (!readers[r->num_layers][0])
        return error_set(e, "record %s: no layer mixes in the embedding", r->name);
    for (int i = 0; i <= r->num_layers; i++) {
        if (readers[i][1] > 1 || (readers[i][1] && (readers[i][0] || i == r->num_layers)))
            return error_set(e, "record %s: stream %d is third in a mix, and in another one", r->name, i);
    }
    return true;
}

static bool check_layer(const Record *r, int i, Error *e)
{
    const LayerSpec *l = &r->layers[i];
    const ParamSpec *tables = record_row(r, ROLE_VALUE_EMBED);
    for (int role = 0; role < ROLES; role++) {
        bool needed = role != ROLE_VO && role != ROLE_O && record_layer_has(l, (Role)role);
        if (needed && !record_row(r, (Role)role))
            return error_set(e, "record %s, layer %d: no tensor for its %s", r->name, i, role_names[role]);
    }
    if (l->value_embed && (!tables || l->value_embed > tables->count || !l->attention))
        return error_set(e, "record %s, layer %d: value embedding %d is not there", r->name, i,
                         l->value_embed);
    if (record_mix_terms(l->mix) && !l->attention && !l->mlp)
        return error_set(e, "record %s, layer %d: a mix without a block", r->name, i);
    return true;
}

static bool check_head(const Record *r, Error *e)
{
    const HeadSpec *h = &r->head;
    if (!(h->cap > 0 && h->cap <= HEAD_MOST_CAP && h->slope > 0))
        return error_set(e, "record %s: a head of cap %g and slope %g; above 0, and a cap of at most %d",
                         r->name, (double)h->cap, (double)h->slope, HEAD_MOST_CAP);
    if (!(h->range_x >= 0 && h->range_w > 0 && h->range_g > 0))
        return error_set(e, "record %s: ranges %g, %g, %g of the FP8 head must be above 0", r->name,
                         (double)h->range_x, (double)h->range_w, (double)h->range_g);
    return true;
}

static bool check_mlp_scales(const Record *r, Error *e)
{
    const MlpScales *s = &r->mlp_scales;
    bool none = !s->post && !s->down && !s->exact_until;
    if (none || (!s->up_alone && s->post >= 1 && s->down >= 1 && s->exact_until >= 0))
        return true;
    return error_set(e,
                     "record %s: delayed scales of the MLP with headrooms %g and %g, exact until step %d; "
                     "at least 1, 1 and 0, and none of them with MLP up alone in FP8",
                     r->name, s->post, s->down, s->exact_until);
}

static bool check_fp8_scales(const Record *r, Error *e)
{
    const Fp8Scales *s = &r->fp8;
    if (!s->headroom)
        return true;
    bool good = s->headroom >= 1 && s->qkv_input >= 0 && (s->qkv_input > 0) == (s->qkv_gradient > 0) &&
                !r->mlp_scales.post && !r->mlp_scales.up_alone;
    for (int k = 0; k < DELAYED_KINDS; k++)
        good = good && s->mlp[k].range > 0 && s->mlp[k].least > 0;
    return good ||
           error_set(e,
                     "record %s: scales of FP8 in both directions have a headroom of at least 1, "
                     "ranges above 0 (q, k and v: both or none), and none of the forward's beside them",
                     r->name);
}

// What a record holds beside its network.
static bool check_given(const Record *r, Error *e)
{
    if (!r->name || !*r->name)
        return error_set(e, "a record with %d layers has no name", r->num_layers);
    if (!r->layers && !r->based_on)
        return error_set(e, "record %s: neither layers nor based_on", r->name);
    if (!r->layers && (r->num_layers || r->params || r->num_params || r->generators || r->num_generators ||
                       r->heads || r->dc_keys || r->smear_lambda || record_mix_terms(r->output)))
        return error_set(e, "record %s: tables of a network without layers, which are ignored", r->name);
    if (!r->stages != !r->num_stages || r->num_stages < 0 || r->num_stages > MAX_WINDOWS + 1)
        return error_set(e, "record %s: stages and num_stages belong together, 1 to %d, but num_stages is %d",
                         r->name, MAX_WINDOWS + 1, r->num_stages);
    return true;
}

// Whether the tables are consistent and within what the ops can do.
static bool record_check(const Record *given, Error *e)
{
    static Network network; // not looked at
    static const Role needed[] = {ROLE_EMBED, ROLE_SMEAR_GATE, ROLE_HEAD, ROLE_SCALARS};
    if (!check_given(given, e))
        return false;
    const Record *r = record_network(given);
    if (r->num_layers < 1 || r->num_layers > MAX_LAYERS || r->num_params > MAX_PARAM_ROWS)
        return error_set(e, "record %s: %d layers, %d rows; at most %d and %d", r->name, r->num_layers,
                         r->num_params, MAX_LAYERS, MAX_PARAM_ROWS);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (!row_of(r, needed[i], 0))
            return error_set(e, "record %s: no tensor for the %s", r->name, role_names[needed[i]]);
    }
    if (!record_row(r, ROLE_BIGRAM) != !record_row(r, ROLE_SIGNS))
        return error_set(e, "record %s: a bigram table without its signs, or signs without a table", r->name);
    for (int i = 0; i < r->num_params; i++) {
        if (!check_row(r, i, e))
            return false;
    }
    for (int i = 0; i < r->num_layers; i++) {
        if (!check_layer(r, i, e))
            return false;
    }
    return check_head(r, e) && check_mlp_scales(r, e) && check_fp8_scales(r, e) && check_attention(r, e) &&
           check_generators(r, e) && check_numbers(r, e) &&
           (record_has_lists(r) ? network_compile(&network, r, e) : check_streams(r, e));
}
