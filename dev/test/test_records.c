// The records' tables: the networks layer by layer, written again from the definition of the presets; and
// tables that no op could run are refused with a line.
#include "dev/test/tap.h"
#include "llmc/run/config.h"
#include "llmc/records/record.h"
#include <string.h>

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

// ---- tables that are refused ------------------------------------------------------------------------------

static LayerSpec layers[12];
static ParamSpec params[MAX_PARAM_ROWS];
static Record record;

static void begin(void) // a copy of a good record, to be spoilt
{
    record = *record_network(record_find("2025-10-27"));
    memcpy(layers, record.layers, sizeof layers);
    memcpy(params, record.params, (size_t)record.num_params * sizeof *params);
    record.layers = layers;
    record.params = params;
}

static void refused(const char *why)
{
    Error e = {""};
    bool good = record_check(&record, &e);
    ok(!good && strstr(e.text, why) && strstr(e.text, "2025-10-27"), "refused: %s",
       good ? "nothing" : e.text);
    begin();
}

static void check_refusals(void)
{
    begin();
    layers[3].mix[1].stream = 7;
    refused("not there yet");
    layers[5].mix[2] = layers[6].mix[2]; // two readers, both third
    layers[5].mix[2].stream = 1;
    refused("and in another one");
    layers[9].mix[1].stream = 8;
    refused("which the running stream is");
    layers[6].mix[2].stream = 0;
    refused("which is empty");
    layers[3].mix[0].stream = EMBEDDED;
    refused("the running stream and others");
    layers[3].value_embed = 4;
    refused("value embedding 4");
    layers[0] = (LayerSpec){.mix = {{RUNNING, {1, NONE, NONE}}, {EMBEDDED, {1, NONE, NONE}}}};
    refused("a mix without a block");
    params[0].update.kind = NORMUON;
    refused("embed.weight: no optimizer");
    params[3].sharding = SHARD_ROWS;
    refused("blocks.%d.mlp.c_proj: no optimizer");
    params[4].update.every = 2;
    refused("updated every 2 steps");
    params[1].role = ROLE_EMBED;
    refused("another row has its role");
    record.head.cap = 61;
    refused("a cap of at most 60");
    record.head.range_w = 0;
    refused("ranges 0, 0, 1 of the FP8 head");
    record.num_params--; // the scalars
    refused("no tensor for the scalars");
    record.num_layers = MAX_LAYERS + 1;
    refused("layers");
}

int main(void)
{
    Error e;
    for (int i = 0; records[i]; i++) {
        bool good = record_check(records[i], &e);
        ok(good && record_find(records[i]->name) == records[i], "record %s is in order%s%s", records[i]->name,
           good ? "" : ": ", good ? "" : e.text);
    }
    PART(check_network("2025-10-27", true));
    PART(check_network("2025-11-10", true));
    PART(check_network("2025-11-18", false));
    PART(check_network("tiny", false));
    PART(check_refusals());
    ok(!record_find("2025-10-28") && !record_find(""), "no other names");
    return tap_done();
}
