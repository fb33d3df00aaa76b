#include "llmc/records/record.h"
#include "llmc/run/config.h"
#include <string.h>

const Record *const records[] = {&record_2025_10_27, &record_2025_11_10, &record_2025_11_18,
                                 &record_tiny,       &record_toy,        &record_toy_targets, NULL};

const Record *record_find(const char *name)
{
    for (int i = 0; records[i]; i++) {
        if (!strcmp(records[i]->name, name)) return records[i];
    }
    return NULL;
}

const Record *record_network(const Record *r)
{
    while (!r->layers) r = r->based_on;
    return r;
}

int64_t record_extent(const Config *c, Extent e)
{
    int64_t size[] = {[SIZE_ONE] = 1,
                      [SIZE_MODEL] = c->model_dim,
                      [SIZE_HEADS] = c->num_heads,
                      [SIZE_MLP] = c->mlp_dim,
                      [SIZE_VOCAB] = config_vocab_padded(c),
                      [SIZE_HALF_VOCAB] = config_vocab_padded(c) / 2};
    return e.times * size[e.of];
}

bool record_layer_has(const LayerSpec *l, Role role)
{
    switch (role) {
    case ROLE_QKVO:
    case ROLE_ATTENTION_GATE:
        return l->attention != ATTENTION_NONE;
    case ROLE_MLP_UP:
    case ROLE_MLP_DOWN:
        return l->mlp != MLP_NONE;
    default:
        return false;
    }
}

bool record_has_paired(const Record *r)
{
    bool has = false;
    for (int i = 0; i < r->num_layers; i++) has |= r->layers[i].attention == ATTENTION_PAIRED;
    return has;
}

bool record_crosses_documents(const Record *r)
{
    bool crosses = false;
    for (int i = 0; i < r->num_layers; i++) crosses |= r->layers[i].key_offset;
    return crosses;
}

int record_mix_terms(const MixTerm *mix)
{
    int n = 0;
    while (n < MIX_TERMS && mix[n].weight.factor != 0) n++;
    return n;
}

// ---- what the ops can do ----------------------------------------------------------------------------------

static const char *const role_names[ROLES] = {
    "embedding", "smear gate", "value embedding", "head", "scalars", "qkvo", "gate", "MLP up", "MLP down"};

static const ParamSpec *row_of(const Record *r, Role role)
{
    for (int i = 0; i < r->num_params; i++) {
        if (r->params[i].role == role) return &r->params[i];
    }
    return NULL;
}

static bool check_row(const Record *r, int row, Error *e)
{
    const ParamSpec *p = &r->params[row];
    const UpdateSpec *u = &p->update;
    bool adam = u->kind == ADAM &&
                (p->storage == STORE_HALF ? p->sharding != SHARD_TENSORS
                                          : p->storage == STORE_FLOAT && p->sharding == REPLICATED),
         normuon = u->kind == NORMUON && p->storage != STORE_FLOAT && p->sharding != SHARD_ROWS;
    if (row_of(r, p->role) != p)
        return error_set(e, "record %s, %s: another row has its role", r->name, p->name);
    if (!adam && !normuon)
        return error_set(e, "record %s, %s: no optimizer for this storage and sharding", r->name, p->name);
    if (p->matrices < 1) return error_set(e, "record %s, %s: %d matrices", r->name, p->name, p->matrices);
    if (u->every < 1 || (u->kind == NORMUON && u->every != 1))
        return error_set(e, "record %s, %s: updated every %d steps", r->name, p->name, u->every);
    if ((p->count > 0) != (p->role == ROLE_VALUE_EMBED))
        return error_set(e, "record %s, %s: has a count of %d", r->name, p->name, p->count);
    return true;
}

static int below_of(const Record *r, int i) // the layer whose output enters layer i; -1: none
{
    do i--;
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
        if (terms == 1 || (terms && mix[0].stream != RUNNING))
            return error_set(e, "record %s, layer %d: a mix is nothing, or the running stream and others",
                             r->name, i);
        for (int k = 1; k < terms; k++) {
            int stream = mix[k].stream == EMBEDDED ? r->num_layers : mix[k].stream;
            if (stream < 0 || (stream >= i && stream != r->num_layers))
                return error_set(e, "record %s, layer %d: mixes in stream %d, which is not there yet",
                                 r->name, i, stream);
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
    const ParamSpec *tables = row_of(r, ROLE_VALUE_EMBED);
    for (int role = 0; role < ROLES; role++) {
        if (record_layer_has(l, (Role)role) && !row_of(r, (Role)role))
            return error_set(e, "record %s, layer %d: no tensor for its %s", r->name, i, role_names[role]);
    }
    if (l->attention == ATTENTION_PAIRED || l->key_offset)
        return error_set(e, "record %s, layer %d: no block has paired heads or a key offset", r->name, i);
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

bool record_check(const Record *given, Error *e)
{
    static const Role needed[] = {ROLE_EMBED, ROLE_SMEAR_GATE, ROLE_HEAD, ROLE_SCALARS};
    const Record *r = record_network(given);
    if (r->num_layers < 1 || r->num_layers > MAX_LAYERS || r->num_params > MAX_PARAM_ROWS)
        return error_set(e, "record %s: %d layers, %d rows; at most %d and %d", r->name, r->num_layers,
                         r->num_params, MAX_LAYERS, MAX_PARAM_ROWS);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        if (!row_of(r, needed[i]))
            return error_set(e, "record %s: no tensor for the %s", r->name, role_names[needed[i]]);
    }
    for (int i = 0; i < r->num_params; i++) {
        if (!check_row(r, i, e)) return false;
    }
    for (int i = 0; i < r->num_layers; i++) {
        if (!check_layer(r, i, e)) return false;
    }
    return check_head(r, e) && check_streams(r, e);
}
