// The records' tables: the networks layer by layer, written again from the definition of the presets; and
// tables that no op could run are refused with a line.
#include "dev/test/record_refusals.h"

// ---- the networks -----------------------------------------------------------------------------------------

enum { LAMBDA = 12, V_LAMBDA = 36, BACKOUT = 61 };

static bool is_term(const MixTerm *t, int stream, float factor, int scalar, int gate)
{
    return t->stream == stream && t->weight.factor == factor && t->weight.scalar == scalar &&
           t->weight.gate == gate;
}

// x = lambda[i][0] (x + sig(skip) s) + lambda[i][1] x0
static bool mixes(const LayerSpec *l, int i, int skip_from, int skip_weight)
{
    int terms = record_mix_terms(l->mix);
    bool good = terms == (skip_from < 0 ? 2 : 3) && is_term(&l->mix[0], RUNNING, 1, LAMBDA + 2 * i, NONE) &&
                is_term(&l->mix[1], EMBEDDED, 1, LAMBDA + 2 * i + 1, NONE);
    return good && (skip_from < 0 || is_term(&l->mix[2], skip_from, 1, LAMBDA + 2 * i, skip_weight));
}

static void check_network(const char *name, bool unet)
{
    static const int embeds[12] = {-1, 1, 2, -1, -1, -1, -1, -1, -1, 0, 1, 2};
    const Record *r = record_network(record_find(name));
    bool blocks = r->num_layers == 12, skips = true;
    for (int i = 0; i < r->num_layers; i++) {
        const LayerSpec *l = &r->layers[i];
        int from = unet ? (i >= 6 && i <= 10 ? 11 - i : -1) : i == 7 ? 4 : -1, weight = unet ? i - 6 : 1;
        bool attention = i != 0 && i != 7;
        blocks = blocks && (l->mlp == MLP_RELU2) == (i != 0) &&
                 (l->attention == ATTENTION_PLAIN) == attention && l->value_embed - 1 == embeds[i] &&
                 l->long_window == (i == 4 || i == 11) && (!attention || l->v_lambdas == V_LAMBDA + 2 * i);
        skips = skips && (i ? mixes(l, i, from, weight) : !record_mix_terms(l->mix));
    }
    ok(blocks, "%s: what each of 12 layers holds", name);
    ok(skips, "%s: %s", name,
       unet ? "U-net: 6 takes 5's output, ... 10 takes 1's" : "7 takes 4's output, through weight 1");
    ok(record_mix_terms(r->output) == 2 && is_term(&r->output[0], RUNNING, 1, NONE, NONE) &&
           is_term(&r->output[1], 8, -1, BACKOUT, NONE),
       "%s: layer 8 is taken back at the end", name);
}

// ---- the networks of 2026 ---------------------------------------------------------------------------------

// A layer by what it has; see the description of record 89.
typedef struct {
    bool none, paired, far, xsa, gate, late; // no attention; heads in pairs; a long window and the key offset
    int table;                               // value embedding, counted from 1
} Facts;
typedef struct {
    const char *name;
    const Facts *layers;
    int count, first_b, early, late; // the first layer of generator b
} Network2026;

enum { HEADS = 6 };
// Columns in the order in which the description lays them out.
typedef struct {
    int xsa, gate, embedded, bigram, skip, weights, factors;
} LayerColumns;

// Of all layers whose columns one generator makes; returns their number.
static int lay_out(const Network2026 *n, bool b, LayerColumns *columns)
{
    int from = b ? n->first_b : 0, to = b ? n->count : n->first_b, at = 0, generator = b ? 3 : 2;
#define TAKE(count) (at += (count), COLUMN(generator, at - (count)))
    for (int i = from; i < to; i++)
        columns[i].xsa = n->layers[i].xsa ? TAKE(HEADS) : 0;
    for (int i = from; i < to; i++)
        columns[i].gate = n->layers[i].gate ? TAKE(HEADS) : 0;
    for (int i = from; i < to && i < n->count - 1; i++) {
        if (n->layers[i].none)
            continue;
        columns[i].embedded = TAKE(1);
        columns[i].bigram = TAKE(1);
    }
    if (b) {
        columns[n->count - 1].skip = TAKE(1);
        columns[n->count - 1].weights = TAKE(HEADS);
        columns[n->count - 1].factors = TAKE(HEADS);
    }
#undef TAKE
    return at;
}

static bool is_column(const MixTerm *t, int stream, int column)
{
    return is_term(t, stream, 1, NONE, NONE) && t->column == column && t->plus == 0;
}

static bool is_scaled(const MixTerm *list, int layers, int i, int block)
{
    int resid = 2 * layers + 2, post = resid + 2 * layers;
    return is_term(&list[0], RUNNING, 1, resid + 2 * i + block, NONE) && !list[0].column &&
           is_term(&list[1], BRANCH, 1, post + 2 * i + block, NONE) && !list[1].column;
}

static bool is_layer(const Network2026 *n, const LayerSpec *l, int i, const LayerColumns *c)
{
    const Facts *f = &n->layers[i];
    const HeadsSpec *h = &l->heads;
    int injected = record_mix_terms(l->after_attention);
    if (f->none) // the layer that the early one's output enters
        return !l->attention && record_mix_terms(l->mix) == 2 && is_column(&l->mix[0], RUNNING, 0) &&
               is_term(&l->mix[1], n->early, 1, NONE, 2 * n->count + 1) &&
               l->mix[1].column == c[n->count - 1].skip && is_scaled(l->after_mlp, n->count, i, 1);
    return l->attention == ATTENTION_HEADS && h->paired == f->paired && h->offset == f->far &&
           l->long_window == f->far && l->value_embed == f->table && h->xsa == c[i].xsa &&
           h->gate == c[i].gate && h->input == (f->late ? n->late : RUNNING) && h->factors == 2 * i &&
           (i == n->count - 1 ||
            (is_scaled(l->after_attention, n->count, i, 0) && is_scaled(l->after_mlp, n->count, i, 1) &&
             is_column(&l->after_attention[2], EMBEDDED, c[i].embedded) && injected == (i ? 4 : 3) &&
             is_column(i ? &l->after_attention[3] : &l->mix[1], BIGRAM, c[i].bigram)));
}

// The last layer, whose factors generator mu makes, and the output's list.
static bool is_dynamic(const Network2026 *n, const Record *r, const LayerColumns *c)
{
    const LayerSpec *l = &r->layers[n->count - 1];
    const HeadsSpec *h = &l->heads;
    const int late = n->late, below = n->count - 2;
#define MU_OF(list, k, stream, number) is_column(&(list)[k], stream, COLUMN(0, number))
    bool mixed = is_term(&l->mix[0], RUNNING, 1, NONE, NONE) && l->mix[0].column == COLUMN(0, 5) &&
                 l->mix[0].plus == 1 && MU_OF(l->mix, 1, IN(0), 3) && MU_OF(l->mix, 2, late, 4),
         values = MU_OF(h->extra, 0, IN(0), 0) && MU_OF(h->extra, 1, late, 1) &&
                  MU_OF(h->extra, 2, below, 2) && h->value_column == COLUMN(0, 6) && h->value_groups == 2,
         after = MU_OF(l->after_attention, 0, RUNNING, 8) && MU_OF(l->after_attention, 1, BRANCH, 9) &&
                 MU_OF(l->after_attention, 2, IN(0), 10) && MU_OF(l->after_attention, 3, BIGRAM, 11) &&
                 MU_OF(l->after_mlp, 0, RUNNING, 12) && MU_OF(l->after_mlp, 1, BRANCH, 13);
#undef MU_OF
    const int nu[] = {IN(0), late, below, ROWS(0), n->early};
    bool output = record_mix_terms(r->output) == 6 && is_column(&r->output[0], RUNNING, 0);
    for (int i = 0; i < 5; i++)
        output = output && is_column(&r->output[1 + i], nu[i], COLUMN(1, i));
    return mixed && values && after && output && h->dc_weights == c[n->count - 1].weights &&
           h->dc_factors == c[n->count - 1].factors;
}

static bool is_generator(const GeneratorSpec *g, int input, int columns, float factor, int scalar)
{
    return g->input == input && g->columns == columns && g->scale.factor == factor &&
           g->scale.scalar == scalar && g->scale.gate == NONE;
}

static void check_network_2026(const Network2026 *n)
{
    const Record *r = record_find(n->name);
    LayerColumns columns[MAX_LAYERS] = {{0}};
    int a = lay_out(n, false, columns), b = lay_out(n, true, columns), scale = 6 * n->count + 2;
    bool layers = r->num_layers == n->count;
    for (int i = 0; i < n->count && layers; i++) {
        layers = r->layers[i].mlp == MLP_RELU2 && is_layer(n, &r->layers[i], i, columns);
        if (!layers)
            printf("# layer %d differs\n", i);
    }
    ok(layers, "%s: what each of %d layers holds", n->name, n->count);
    ok(layers && is_dynamic(n, r, columns), "%s: the last layer and the output", n->name);
    ok(r->num_generators == 4 && is_generator(&r->generators[0], n->count - 2, 14, 0.1f, NONE) &&
           is_generator(&r->generators[1], n->count - 1, 5, 0.1f, NONE) &&
           is_generator(&r->generators[2], EMBEDDED, a, 1, scale) &&
           is_generator(&r->generators[3], n->first_b - 1, b, 1, scale),
       "%s: generators of 14, 5, %d, %d columns", n->name, a, b);
}

static void check_networks_2026(void)
{
    static const Facts record_89[] = {
        {.paired = true},
        {.table = 1, .xsa = true},
        {.paired = true, .table = 2},
        {.far = true, .xsa = true, .gate = true},
        {.xsa = true},
        {.paired = true},
        {.none = true},
        {.xsa = true},
        {.table = 3, .late = true},
        {.paired = true, .table = 4, .late = true},
        {.far = true, .table = 5, .gate = true, .late = true},
    };
    static const Facts small[] = {
        {.paired = true, .table = 1},
        {.far = true, .table = 2, .xsa = true, .gate = true},
        {.none = true},
        {.xsa = true},
        {.paired = true, .table = 3, .late = true},
        {.far = true, .table = 5, .gate = true, .late = true},
    };
    check_network_2026(&(Network2026){"2026-05-27", record_89, 11, 4, 3, 7});
    check_network_2026(&(Network2026){"2026-07-17", record_89, 11, 4, 3, 7});
    check_network_2026(&(Network2026){"2026-08-03", record_89, 11, 4, 3, 7});
    check_network_2026(&(Network2026){"toy-2026", small, 6, 2, 1, 3});
    ok(record_find("2026-05-27")->dc_keys == 112 && record_find("2026-07-17")->dc_keys == 112 &&
           record_find("2026-08-03")->dc_keys == 112,
       "DC over 112 keys");
    ok(record_find("2026-05-27")->mlp_scales.up_alone && !record_find("2026-07-17")->mlp_scales.up_alone,
       "2026-05-27 has MLP up alone in FP8");
    ok(record_network(record_find("2026-08-06")) == record_find("2026-08-03"),
       "2026-08-06 has the network of 2026-08-03");
}

// ---- gradients that nodes share ---------------------------------------------------------------------------

// Behind layers 0 to 9 the MLP's factor is taken with the gradient of the sum before the MLP; layer 5's
// output is read by layer 6's mix alone, and the last layer's by the output's sum and generator nu.
static void check_shared_gradients(void)
{
    static Network n;
    Error e;
    int factors = 0, sums = 0, added = 0;
    bool good = network_compile(&n, record_find("2026-07-17"), &e);
    for (int i = 0; i < n.count && good; i++) {
        const Node *a = &n.node[i];
        if (a->kind == NODE_MLP && a->taken_with != NONE) {
            good = a->taken_with == a->input;
            factors++;
        }
        if (a->kind == NODE_SUM && a->sum != NONE) {
            const Node *of = &n.node[a->sum];
            good = of->kind == NODE_SUM ? of->layer == 6 : of->added == n.output;
            sums++;
        }
        added += a->added != NONE;
    }
    ok(good && factors == 10 && sums == 2 && added == 1,
       "2026-07-17: %d factors of MLPs are taken with other gradients, %d sums have the gradient of another",
       factors, sums);
}

static bool check_tables(const Record *r)
{
    Error e;
    bool good = record_check(r, &e);
    ok(good, "record %s is in order%s%s", r->name ? r->name : "", good ? "" : ": ", good ? "" : e.text);
    return good;
}

int main(void)
{
    bool good = true;
    for (int i = 0; records[i]; i++)
        good = check_tables(records[i]) && good;
    for (int i = 0; records[i] && good; i++)
        good = check_preset(records[i]) && good;
    if (!good) // the others look records up and compile them
        return tap_done();
    PART(check_network("2025-10-27", true));
    PART(check_network("2025-11-10", true));
    PART(check_network("2025-11-18", false));
    PART(check_network("tiny", false));
    ok(record_network(record_find("2025-11-29")) == record_find("2025-11-18") &&
           record_network(record_find("2025-12-10")) == record_find("2025-11-18"),
       "2025-11-29 and 2025-12-10 have the network of 2025-11-18");
    PART(check_networks_2026());
    PART(check_shared_gradients());
    PART(check_refusals());
    PART(check_attention_refusals());
    PART(check_network_refusals());
    PART(check_generator_refusals());
    PART(check_shape_refusals());
    PART(check_row_refusals());
    PART(check_record_refusals());
    PART(check_number_refusals());
    PART(check_file_refusals());
    PART(check_preset_refusals());
    PART(check_long_columns());
    ok(!record_find("2025-10-28") && !record_find(""), "no other names");
    return tap_done();
}
