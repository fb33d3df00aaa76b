// The parameter table: names, shapes and count of the public layout, slots and who owns them; and the
// distributions of the initial weights, which depend on the seed only.
#include "dev/test/tap.h"
#include "llmc/optim/optimizer.h"
#include <stdlib.h>
#include <string.h>

enum { SCALARS_IN_ALL = 64 };

static const Param *params_find(const Params *p, const char *name)
{
    for (int i = 0; i < p->count; i++) {
        if (!strcmp(p->list[i].name, name))
            return &p->list[i];
    }
    return NULL;
}

static Config config; // of the last preset

static Config preset(const char *name, const char *vocab)
{
    Error e;
    char *argv[] = {"train_gpt", "--preset", (char *)name, "--vocab-size", (char *)vocab};
    if (!config_parse(&config, 5, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    return config;
}

// What a row of the expected table says beside shape and rate.
typedef enum { TABLE, MATRIX, GATE, SCALARS } Kind;
static const struct {
    Storage storage;
    Sharding sharding;
    OptimizerKind optimizer;
    int every;
} kinds[] = {[TABLE] = {STORE_HALF, SHARD_ROWS, ADAM, 2},
             [MATRIX] = {STORE_MASTER, SHARD_TENSORS, NORMUON, 1},
             [GATE] = {STORE_HALF, REPLICATED, NORMUON, 1},
             [SCALARS] = {STORE_FLOAT, REPLICATED, ADAM, 2}};

static bool has(const Params *p, const char *name, Kind kind, int64_t rows, int64_t cols, double rate)
{
    const Param *a = params_find(p, name);
    int64_t shape[2] = {-1, -1};
    if (a)
        param_shape(a, &config, &shape[0], &shape[1]);
    bool good = a && shape[0] == rows && shape[1] == cols && a->spec->update.rate == rate;
    good = good && a->spec->storage == kinds[kind].storage && a->spec->sharding == kinds[kind].sharding &&
           a->spec->update.kind == kinds[kind].optimizer && a->spec->update.every == kinds[kind].every;
    if (!good)
        printf("# %s: %lld x %lld, times %g\n", name, (long long)shape[0], (long long)shape[1],
               a ? a->spec->update.rate : 0);
    return good;
}

static void check_layers(const Params *p, int64_t d, int64_t F, int64_t H)
{
    char name[64];
    bool good = true;
    for (int i = 0; i < 12; i++) {
        bool attention = i != 0 && i != 7;
        snprintf(name, sizeof name, "blocks.%d.attn.qkvo_w", i);
        good = (attention ? has(p, name, MATRIX, d, 4 * d, 1) : !params_find(p, name)) && good;
        snprintf(name, sizeof name, "blocks.%d.attn.attn_gate.weight", i);
        good = (attention ? has(p, name, GATE, H, 12, 1) : !params_find(p, name)) && good;
        snprintf(name, sizeof name, "blocks.%d.mlp.c_fc", i);
        good = (i ? has(p, name, MATRIX, d, F, 2) : !params_find(p, name)) && good;
        snprintf(name, sizeof name, "blocks.%d.mlp.c_proj", i);
        good = (i ? has(p, name, MATRIX, d, F, 1) : !params_find(p, name)) && good;
    }
    ok(good, "shapes and rates of all layers");
}

static void check_table(void)
{
    static const char *const presets[] = {"2025-10-27", "2025-11-10", "2025-11-18"};
    Params p;
    for (int i = 0; i < 3; i++) {
        Config c = preset(presets[i], "50257");
        params_describe(&p, &c);
        ok(params_total(&p) == 268665628, "preset %s: %lld parameters", presets[i],
           (long long)params_total(&p));
    }
    bool good =
        has(&p, "embed.weight", TABLE, 50304, 768, 75) && has(&p, "lm_head.weight", TABLE, 50304, 768, 1);
    for (int i = 0; i < 3; i++) {
        char name[32];
        snprintf(name, sizeof name, "value_embeds.%d.weight", i);
        good = has(&p, name, TABLE, 50304, 768, 75) && good;
    }
    ok(good && has(&p, "scalars", SCALARS, 1, 64, 5) && has(&p, "smear_gate.weight", GATE, 1, 12, 1),
       "tables, scalars, smear gate");
    check_layers(&p, 768, 3072, 6);
    ok(p.count == 5 + 11 * 2 + 10 * 2 + 1 + 1 && !params_find(&p, "blocks.3"),
       "49 parameters, and no other names");
    bool apart = true;
    for (int i = 0; i < p.count; i++)
        for (int k = 0; k < i; k++)
            apart = apart && strcmp(p.list[i].name, p.list[k].name);
    ok(apart, "no name twice");
}

// Parameters of one pool do not overlap and lie inside it.
static void check_places(const char *what, const Config *c)
{
    Params p;
    params_describe(&p, c);
    bool good = true, alike = true;
    for (int i = 0; i < p.count; i++) {
        const Param *a = &p.list[i];
        const ParamPool *q = &p.pools[a->pool];
        good = good && a->offset >= 0 && a->offset + param_elements(a) <= q->size;
        alike = alike && q->storage == a->spec->storage && q->sharding == a->spec->sharding &&
                q->every == a->spec->update.every &&
                (q->sharding != SHARD_TENSORS || (q->slot == param_elements(a) && a->offset % q->slot == 0));
        for (int k = 0; k < p.count; k++) {
            const Param *b = &p.list[k];
            if (k != i && b->pool == a->pool)
                good = good && (a->offset + param_elements(a) <= b->offset ||
                                b->offset + param_elements(b) <= a->offset);
        }
    }
    ok(good, "%s: parameters lie side by side inside their pools", what);
    ok(alike, "%s: those of a pool are stored, sharded and updated alike, slots have one size", what);
    ok(params_small_count(&p, 0) > 0 &&
           params_small_count(&p, 0) + SCALARS_IN_ALL == params_small_count(&p, 1),
       "%s: what is replicated is summed in one stretch, the scalars at odd steps", what);
}

// Parameters of the network of July 2026, of which files hold several in one tensor.
static void check_banks(void)
{
    Config c = preset("2026-07-17", "50257");
    Params p;
    params_describe(&p, &c);
    ok(params_total(&p) == 635887015, "2026-07-17: %lld parameters without padding",
       (long long)params_total(&p));
    const Param *embed = params_of(&p, ROLE_EMBED, 0), *head = params_of(&p, ROLE_HEAD, 0);
    ok(p.tied && p.last_tied == 847 && param_now(&p, embed) == head && param_now(&p, head) == head,
       "embedding and head are one up to step %d", p.last_tied);
    ok(param_stage(&p, head) == 0 && embed->stage == 0, "and the head's stage is the embedding's");
    p.tied = false;
    ok(param_stage(&p, head) == 12 && param_now(&p, embed) == embed, "later it is its own");
    const ParamPool *q = &p.pools[params_of(&p, ROLE_QKVO, 0)->pool];
    ok(q->size == 32 * q->slot && q->slot == 4 * 768 * 768 && q->storage == STORE_SPLIT,
       "the matrices of a layer's attention, and each of its MLP's, fill a slot: 32, none of which is "
       "padding");
    bool joined = true, places = true;
    for (int layer = 0; layer < 11; layer++) {
        const Param *qk = params_of(&p, ROLE_QKVO, layer), *vo = params_of(&p, ROLE_VO, layer),
                    *up = params_of(&p, ROLE_MLP_UP, layer), *down = params_of(&p, ROLE_MLP_DOWN, layer);
        int attention = layer - (layer > 6);
        places =
            places && up->file_first == 2 * layer && down->file_first == 2 * layer + 1 && up->rows == 768;
        if (layer == 6) {
            places = places && !qk && !vo;
            continue;
        }
        joined = joined && vo->pool == qk->pool && vo->offset == qk->offset + param_elements(qk) &&
                 qk->offset % q->slot == 0;
        places = places && qk->file_first == 6 * attention && qk->matrices == 6 && qk->rows == 256 &&
                 vo->file_first == 2 * attention && vo->matrices == 2 && vo->rows == 768;
    }
    ok(joined, "Wv and Wo stand behind Wq and Wk");
    ok(places, "layers are matrices of the banks");
    int64_t at = 0;
    bool vector = true;
    for (int i = 0; i < 4; at += param_elements(params_of(&p, ROLE_SCALARS, i++)))
        vector = vector && params_of(&p, ROLE_SCALARS, i)->offset == at;
    ok(vector && at == 24 + 22 + 22 + 1, "%lld scalars are one vector", (long long)at);
}

// The network of August 2026: heads of q and k have three quarters of the width, and Wo is apart in files.
static void check_narrow_banks(void)
{
    Config c = preset("2026-08-06", "50257");
    Params p;
    params_describe(&p, &c);
    ok(params_total(&p) == 632937895 && record_key_width(&c) == 96,
       "2026-08-06: %lld parameters without padding, q and k of %d channels a head",
       (long long)params_total(&p), record_key_width(&c));
    bool places = true;
    for (int layer = 0, l = 0; layer < 11; l += layer++ != 6) {
        const Param *qk = params_of(&p, ROLE_QKVO, layer), *v = params_of(&p, ROLE_VO, layer),
                    *o = params_of(&p, ROLE_O, layer);
        places = places && (layer == 6 ? !qk && !v && !o
                                       : qk->rows == 192 && qk->matrices == 6 && qk->file_first == 6 * l &&
                                             v->file_first == 2 * l && o->file_first == 2 * l + 1 &&
                                             !v->spec->file.transposed && o->spec->file.transposed &&
                                             v->offset == qk->offset + param_elements(qk) &&
                                             o->offset == v->offset + param_elements(v));
    }
    ok(places, "rows of Wq, Wk, Wv and Wo are one tensor, in files three parts of two banks");
    ok(p.last_tied == 833, "embedding and head are one up to step %d", p.last_tied);
}

static int64_t slot_of(const Params *p, const char *format, int layer)
{
    char name[64];
    snprintf(name, sizeof name, format, layer);
    const Param *a = params_find(p, name);
    return a->offset / p->pools[a->pool].slot;
}

static void check_slots(void)
{
    Config c = preset("2025-10-27", "50257");
    Params p;
    params_describe(&p, &c);
    const ParamPool *q = &p.pools[params_find(&p, "blocks.5.mlp.c_fc")->pool];
    ok(params_find(&p, "blocks.5.attn.qkvo_w")->pool == params_find(&p, "blocks.5.mlp.c_fc")->pool &&
           q->size == 32 * q->slot,
       "matrices of both kinds share a pool of 32 slots, none of which is padding");
    bool order = true;
    for (int i = 11, slot = 0; i > 0; i--, slot += 2) { // as backward finishes them
        order = order && slot_of(&p, "blocks.%d.mlp.c_proj", i) == slot &&
                slot_of(&p, "blocks.%d.mlp.c_fc", i) == slot + 1;
    }
    for (int i = 11, slot = 22; i > 0; i--) {
        if (i != 7)
            order = order && slot_of(&p, "blocks.%d.attn.qkvo_w", i) == slot++;
    }
    ok(order, "slots stand in the order of backward, MLP first");
    for (int R = 1; R <= 8; R *= 2) {
        int64_t slots = q->size / q->slot, most = 0, least = slots, own[8] = {0};
        for (int64_t slot = 0; slot < slots; slot++)
            own[slot_owner(slot, R)]++;
        for (int r = 0; r < R; r++) {
            most = max_i64(most, own[r]);
            least = min_i64(least, own[r]);
        }
        ok(most == least && most * R == slots && p.list[0].rows % R == 0,
           "%d ranks own %d slots each, and whole rows", R, (int)most);
    }
}

// ---- initial weights --------------------------------------------------------------------------------------

typedef struct {
    double mean, deviation, largest;
} Moments;

static Moments moments(const Params *p, const char *name, int64_t first, int64_t n)
{
    const Param *a = params_find(p, name);
    double sum = 0, squares = 0;
    Moments m = {0, 0, 0};
    for (int64_t i = first; i < first + n; i++) {
        double x = param_element_size(a) == 4 ? ((float *)param_data(p, a))[i]
                                              : x_to_float(((floatX *)param_data(p, a))[i]);
        sum += x;
        squares += x * x;
        m.largest = fmax(m.largest, fabs(x));
    }
    m.mean = sum / (double)n;
    m.deviation = sqrt(squares / (double)n);
    return m;
}

// Five standard errors of mean and deviation: one honest draw in a million fails.
static void check_spread(const char *what, Moments m, double deviation, double kurtosis, double n)
{
    ok(fabs(m.mean) < 5 * deviation / sqrt(n), "%s: mean %.4g", what, m.mean);
    ok(fabs(m.deviation / deviation - 1) < 5 * sqrt((kurtosis - 1) / (4 * n)) + 1e-4,
       "%s: deviation %.5g, expected %.5g", what, m.deviation, deviation);
}

static void check_initial_weights(const Config *c, const Params *p)
{
    int64_t d = c->model_dim, table = param_elements(params_find(p, "embed.weight"));
    double bound = sqrt(3) / 2 / sqrt((double)d);
    check_spread("embed", moments(p, "embed.weight", 0, table), 1, 3, (double)table);
    check_spread("value_embeds.2", moments(p, "value_embeds.2.weight", 0, table), 1, 3, (double)table);
    Moments qkv = moments(p, "blocks.5.attn.qkvo_w", 0, 3 * d * d),
            fc = moments(p, "blocks.5.mlp.c_fc", 0, d * c->mlp_dim);
    check_spread("q, k, v", qkv, bound / sqrt(3), 1.8, 3.0 * (double)(d * d));
    check_spread("c_fc", fc, bound / sqrt(3), 1.8, (double)(d * c->mlp_dim));
    ok(qkv.largest <= bound && fc.largest <= bound && fc.largest > 0.99 * bound,
       "uniform up to the bound %.5g", bound);
    ok(moments(p, "blocks.5.attn.qkvo_w", 3 * d * d, d * d).largest == 0, "o is zero");
    ok(moments(p, "blocks.5.mlp.c_proj", 0, d * c->mlp_dim).largest == 0 &&
           moments(p, "lm_head.weight", 0, table).largest == 0 &&
           moments(p, "smear_gate.weight", 0, 12).largest == 0 &&
           moments(p, "blocks.5.attn.attn_gate.weight", 0, 12).largest == 0,
       "c_proj, head and gates are zero");
    bool rounded = true;
    for (int k = 0; k < p->num_pools; k++) {
        const ParamPool *q = &p->pools[k];
        for (int64_t i = 0; q->rounded && i < q->size; i++)
            rounded = rounded && x_to_float(q->rounded[i]) == x_to_float(float_to_x(((float *)q->values)[i]));
    }
    ok(rounded, "the rounded copy of the matrices is complete");

    bool good = true;
    const float *scalars = param_data(p, params_find(p, "scalars"));
    for (int i = 0; i < SCALARS_IN_ALL; i++) {
        float expected = i < 12    ? -1.5f
                         : i < 36  ? (i % 2 ? 0 : (float)c->lambda_init)
                         : i < 60  ? 0.5f
                         : i == 60 ? 0
                         : i == 61 ? 0.5f
                                   : 1;
        good = good && scalars[i] == expected;
    }
    ok(good, "scalars: skips -1.5, lambdas (%g, 0), attention (0.5, 0.5), smear 0, backout 0.5, padding 1",
       c->lambda_init);
}

static size_t pool_element(const ParamPool *q)
{
    return q->storage == STORE_HALF ? sizeof(floatX) : sizeof(float);
}

static void check_init(void)
{
    Config c = preset("tiny", "257");
    Params p, q;
    params_describe(&p, &c);
    params_allocate(&p, true);
    params_init(&p, &c, NULL);
    check_initial_weights(&c, &p);
    params_describe(&q, &c);
    params_allocate(&q, true);
    params_init(&q, &c, NULL);
    bool same = true;
    for (int i = 0; i < p.num_pools; i++)
        same = same && !memcmp(p.pools[i].values, q.pools[i].values,
                               (size_t)p.pools[i].size * pool_element(&p.pools[i]));
    ok(same, "the same seed gives the same weights");
    const Param *embed = params_find(&p, "embed.weight"), *other = params_find(&p, "value_embeds.0.weight");
    int64_t n = param_elements(embed);
    ok(memcmp(param_data(&p, embed), param_data(&p, other), (size_t)n * sizeof(floatX)), "two tables differ");
    c.seed++;
    params_init(&q, &c, NULL);
    int64_t equal = 0;
    for (int64_t i = 0; i < n; i++)
        equal += x_to_float(((floatX *)param_data(&p, embed))[i]) ==
                 x_to_float(((floatX *)param_data(&q, embed))[i]);
    ok(equal < n / 50, "the next seed shares %lld of %lld values", (long long)equal, (long long)n);
    params_free(&p);
    params_free(&q);
}

int main(void)
{
    PART(check_table());
    PART(check_slots());
    PART(check_banks());
    PART(check_narrow_banks());
    Config full = preset("2025-11-18", "50257"), tiny = preset("tiny", "257");
    PART(check_places("full size", &full));
    PART(check_places("tiny", &tiny));
    Error e;
    if (!config_set(&tiny, "mlp-dim", "72", &e) || !config_set(&tiny, "num-heads", "1", &e))
        return 1;
    PART(check_places("narrow MLP, one head", &tiny));
    PART(check_init());
    return tap_done();
}
