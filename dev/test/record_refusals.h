// Records with one mistake each, for test_records.c: a line must name what is wrong.
#pragma once
#include "dev/test/record_check.h"
#include "dev/test/tap.h"
#include "llmc/io/weights.h"
#include "llmc/run/config_internal.h"

// ---- tables that are refused ------------------------------------------------------------------------------

static LayerSpec layers[12];
static ParamSpec params[MAX_PARAM_ROWS];
static GeneratorSpec generators[MAX_GENERATORS];
static Record record;

static const char *spoilt = "2025-10-27";

static void begin(void) // a copy of a good record, to be spoilt
{
    record = *record_network(record_find(spoilt));
    memcpy(layers, record.layers, (size_t)record.num_layers * sizeof *layers);
    memcpy(params, record.params, (size_t)record.num_params * sizeof *params);
    record.layers = layers;
    record.params = params;
    if (record.num_generators) {
        memcpy(generators, record.generators, (size_t)record.num_generators * sizeof *generators);
        record.generators = generators;
    }
}

static void refused(const char *why)
{
    Error e = {""};
    bool good = record_check(&record, &e);
    ok(!good && strstr(e.text, why) && strstr(e.text, spoilt), "refused: %s", good ? "nothing" : e.text);
    begin();
}

static ParamSpec *row_of_role(Role role) // the first
{
    ParamSpec *p = params;
    while (p->role != role)
        p++;
    return p;
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
    row_of_role(ROLE_ATTENTION_GATE)->cols.times = MAX_GATE_INPUTS + 1;
    refused("a gate reads 1 to 16 channels");
    record.head.cap = 61;
    refused("a cap of at most 60");
    record.head.range_w = 0;
    refused("ranges 0, 0, 1 of the FP8 head");
    record.fp8 = (Fp8Scales){.headroom = 0.9};
    refused("a headroom of at least 1");
    record.mlp_scales = (MlpScales){.post = 1.8, .down = 1.12, .up_alone = true};
    refused("none of them with MLP up alone in FP8");
    record.fp8 = (Fp8Scales){.headroom = 1.25, .qkv_input = 1, .qkv_gradient = 1};
    record.mlp_scales.up_alone = true;
    refused("none of the forward's beside them");
    record.num_params--; // the scalars
    refused("no tensor for the scalars");
    record.num_layers = MAX_LAYERS + 1;
    refused("layers");
}

static void check_network_refusals(void)
{
    spoilt = "2026-07-17";
    begin();
    layers[2].heads.input = 5;
    refused("layer 2: heads.input is the output of layer 5, which is not there yet");
    layers[6].mix[1].stream = 8;
    refused("layer 6: reads the output of layer 8, which is not there yet");
    layers[5].after_attention[2].column = layers[4].after_attention[2].column;
    refused("layer 5: reads COLUMN(3, 18), which another one reads");
    layers[1].after_attention[2].column = layers[4].after_attention[2].column;
    refused("layer 1: reads COLUMN(3, 18), which is not there yet");
    layers[3].heads.gate = 0;
    refused("generator 2: nobody reads COLUMN(2, 12)");
    layers[0].heads.xsa = COLUMN(2, 0);
    refused("paired heads have no offset, XSA or gate");
    layers[10].heads.dc_factors = 0;
    refused("layer 10: DC needs dc_weights, dc_factors");
    layers[1].attention = ATTENTION_PLAIN;
    refused("layer 1: no tensor for its gate");
    record.output[4].column = 0;
    refused("output: ROWS(0) takes a column and nothing else");
    record.output[4].stream = ROWS(5);
    refused("output: reads ROWS(5), which is not there yet");
    layers[3].after_attention[2].stream = IN(9);
    refused("layer 3: reads IN(9), which is not there yet");
    layers[10].heads.extra[0].stream = BRANCH;
    refused("layer 10: reads BRANCH, which is not there yet");
    layers[6].mix[0].stream = EMBEDDED; // in place of RUNNING
    refused("layer 5: nobody reads its output");
    layers[5].after_attention[2].column = -5;
    refused("layer 5: a column is -5");
    layers[10].after_attention[1] = layers[10].after_attention[0]; // in place of BRANCH
    layers[10].after_attention[1].column = COLUMN(0, 9);
    refused("layer 10: nobody reads the BRANCH of its attention");
    generators[3].input = 11;
    refused("which is not there yet");
    layers[10].heads.dc_factors = COLUMN(2, 0);
    refused("dc_weights are of generator 3 and dc_factors of 2");
    layers[3].heads.xsa = COLUMN(2, 60);
    refused("layer 3: reads 6 columns from COLUMN(2, 60) on");
    record.heads = 0;
    refused("layer 1: xsa, gate and dc_weights are columns for each head");
    layers[10].heads.value_groups = 0;
    refused("layer 10: value_groups are 0");
    layers[10].heads.value_groups = 4;
    refused("layer 10: value_groups are 4, but the record's heads 6");
    layers[1].value_embed = 6;
    refused("value embedding 6 is not there");
}

static void check_generator_refusals(void)
{
    row_of_role(ROLE_GENERATOR_OUT)->rows.times = 13;
    refused("mudd_w2: (13, 64), but generator 0 has 14 columns and 64 hidden units");
    row_of_role(ROLE_GENERATOR_OUT)->cols.times = 32;
    refused("mudd_w2: (14, 32), but generator 0");
    row_of_role(ROLE_GENERATOR_BIAS)[3].cols.times = 40; // of a and b
    row_of_role(ROLE_GENERATOR_BIAS)[3].init.kind = INIT_ZERO;
    refused("mudd_gate_b2: 40 values, but generator 3 has 41 columns");
    row_of_role(ROLE_GENERATOR_IN)->rows.times = 72;
    refused("mudd_w1: 72 hidden units of generator 0; a multiple of 8, at most 64");
    row_of_role(ROLE_GENERATOR_IN)->rows.times = 60;
    refused("mudd_w1: 60 hidden units");
    row_of_role(ROLE_GENERATOR_OUT)->count = 1;
    refused("generator 1: no tensor for the generator's out");
    generators[1].columns = 65;
    refused("generator 1: 65 columns; 1 to 64");
    record.num_generators = 5;
    refused("5 generators; at most 4");
}

static void check_number_refusals(void)
{
    layers[4].heads.factors = 68;
    refused("layer 4: heads.factors + 1 is scalar 69, but the rows of scalars have 69");
    layers[6].mix[1].weight.gate = 69;
    refused("layer 6: mix[1], weight.gate is scalar 69");
    layers[2].after_attention[1].weight.scalar = 200;
    refused("layer 2: after_attention[1], weight.scalar is scalar 200");
    layers[2].after_mlp[0].weight.scalar = -2;
    refused("layer 2: after_mlp[0], weight.scalar is scalar -2");
    layers[10].heads.extra[2].weight.scalar = 69;
    refused("layer 10: heads.extra[2], weight.scalar");
    row_of_role(ROLE_SCALARS)->first = 4;
    refused("no tensor for the scalars");
    row_of_role(ROLE_SCALARS)[1].first = 2;
    row_of_role(ROLE_SCALARS)[2].first = 1;
    refused("resid_lambdas: scalars are numbered in the order of their rows, and this row begins with 2");
    generators[2].scale.scalar = 69;
    refused("generator 2: scale, weight.scalar is scalar 69");
    record.output[3].weight.gate = 69;
    refused("output: output[3], weight.gate");
    record.smear_lambda = 69;
    refused("smear: smear_lambda is scalar 69");
    spoilt = "2025-10-27";
    begin();
    layers[11].v_lambdas = 63;
    refused("layer 11: v_lambdas + 1 is scalar 64, but the rows of scalars have 64");
    row_of_role(ROLE_SCALARS)->cols.times = 61;
    row_of_role(ROLE_SCALARS)->init.kind = INIT_ZERO;
    refused("output: output[1], weight.scalar is scalar 61, but the rows of scalars have 61");
    layers[3].mix[1].column = COLUMN(0, 2);
    refused("layer 3: mix[1] has a column or plus");
    record.output[1].plus = 1;
    refused("output: output[1] has a column or plus");
}

static void check_row_refusals(void)
{
    static const InitRun wide[] = {{23, 3, {1, 1}, 0}, {0}}, short_of_one[] = {{68, 1, {1}, 0}, {0}};
    ParamSpec *scalars = row_of_role(ROLE_SCALARS);
    scalars->init.runs = wide;
    refused("scalars: a run of 23 times 3 values");
    scalars->init.runs = short_of_one;
    refused("scalars: its runs have 68 values, but its tensors 24");
    row_of_role(ROLE_GENERATOR_BIAS)->cols.times = 15;
    refused("mudd_b2: its runs have 28 values, but its tensors 30");
    scalars->init.runs = NULL;
    refused("scalars: INIT_RUNS without runs");
    row_of_role(ROLE_VO)->init.matrices = 3;
    refused("vo_bank: init draws 3 matrices of 2");
    row_of_role(ROLE_SIGNS)->init.kind = INIT_ZERO;
    refused("bigram_sign_table: INIT_SIGNS is for STORE_SIGNS only");
    row_of_role(ROLE_QKVO)->file.dims = 5;
    refused("qk_bank: a file's tensor of 5 dimensions");
    row_of_role(ROLE_QKVO)->file.least = 5;
    refused("qk_bank: file.least is for tensors of one dimension");
    params[2].name = NULL;
    refused("row 2: no name");
    params[2].name = "bank.%s";
    refused("bank.%s: a name has one %d or none");
}

static void check_record_refusals(void)
{
    record.num_stages = 0;
    refused("num_stages is 0");
    record.stages = NULL;
    refused("num_stages is 4");
    record.num_stages = MAX_WINDOWS + 2;
    refused("1 to 65, but num_stages is 66");
    record.layers = NULL;
    record.based_on = NULL;
    refused("neither layers nor based_on");
    record.layers = NULL;
    record.based_on = record_find("toy-2026");
    refused("tables of a network without layers");
    Error e;
    record.name = NULL;
    ok(!record_check(&record, &e) && strstr(e.text, "no name"), "refused: %s", e.text);
    begin();
}

static void check_attention_refusals(void)
{
    row_of_role(ROLE_QKVO)->matrices.times = 3;
    refused("blocks.%d.attn.qkvo_w: Wq, Wk, Wv and Wo are 3 times (d, d); 4");
    spoilt = "2026-07-17";
    begin();
    row_of_role(ROLE_VO)->joined = false;
    refused("qk_bank: the rows of the vo and o follow it, joined");
    row_of_role(ROLE_VO)->matrices.times = 1;
    refused("vo_bank: Wv and Wo are 1 times (d, d); 2");
}

static void check_shape_refusals(void)
{
    row_of_role(ROLE_MLP_UP)->rows = (Extent){1, SIZE_MLP};
    row_of_role(ROLE_MLP_UP)->cols = (Extent){1, SIZE_MODEL};
    refused("mlp_bank: its rows and cols are not those of the MLP up");
    row_of_role(ROLE_EMBED)->rows.times = 2;
    refused("embed.weight: its rows and cols are not those of the embedding");
    row_of_role(ROLE_BIGRAM)->rows.times = 0;
    refused("bigram_embed.weight: its rows and cols are not those of the bigram table");
}

// ---- places in files --------------------------------------------------------------------------------------

static Params made_out;
static Config config;

static bool parse(const char *preset, Error *e)
{
    char *argv[] = {"test", "--preset", (char *)preset, "--vocab-size", "50257"};
    return config_parse(&config, 5, argv, e);
}

static bool check_preset(const Record *r)
{
    Error e = {""};
    bool good = record_find(r->name) == r ? parse(r->name, &e) : error_set(&e, "two records have this name");
    if (good) {
        params_describe(&made_out, &config);
        good = weights_check(&made_out, &config, &e);
    }
    ok(good, "preset %s can be run and saved%s%s", r->name, good ? "" : ": ", e.text);
    return good;
}

// The first parameter of this role, with a row of its own.
static Param *own_row(Role role)
{
    Param *a = made_out.list;
    while (a->spec->role != role)
        a++;
    params[0] = *a->spec;
    a->spec = &params[0];
    return a;
}

static void begin_preset(const char *preset)
{
    Error e;
    if (!parse(preset, &e))
        fatal(1, "%s", e.text);
    params_describe(&made_out, &config);
}

static void file_refused(const char *why)
{
    Error e = {""};
    bool good = weights_check(&made_out, &config, &e);
    ok(!good && strstr(e.text, why) && strstr(e.text, config.preset), "refused: %s",
       good ? "nothing" : e.text);
    begin_preset(config.preset);
}

static void check_file_refusals(void)
{
    begin_preset("2026-07-17");
    own_row(ROLE_QKVO);
    params[0].file.shape[0].times = 9; // of 10 layers; that of the last one is the first in memory
    file_refused("tensor qk_bank (54, 256, 768): matrices 54 to 59, each (256, 768), are not within it");
    own_row(ROLE_MLP_UP)->file_first = -1;
    file_refused("tensor mlp_bank (12, 2, 3072, 768): matrices -1 to -1");
    own_row(ROLE_MLP_UP)->file_first++;
    file_refused("are those of two tensors");
    own_row(ROLE_MLP_UP);
    params[0].file.shape[0].times = 13;
    file_refused("have a neighbour of another shape");
    own_row(ROLE_HEAD);
    params[0].file.transposed = false;
    params[0].file.shape[1].times = 2;
    params[0].file.shape[0] = (Extent){700, SIZE_ONE};
    file_refused("lm_head.weight (700, 100608): matrices 0 to 0, each (50304, 768), do not fill it");
    own_row(ROLE_HEAD);
    params[0].file.shape[0] = (Extent){1, SIZE_VOCAB};
    params[0].file.shape[1] = (Extent){1, SIZE_MODEL};
    file_refused("are not its last two extents, transposed");
    begin_preset("2025-10-27");
    Param *up = own_row(ROLE_MLP_UP);
    strcpy(up->name, up[1].name);
    file_refused("are those of two tensors");
    up = own_row(ROLE_SCALARS);
    strcpy(up->name, "embed.weight");
    file_refused("tensor scalars (64): matrices 0 to 0, each (1, 64), have the name of another tensor");
}

// ---- presets ----------------------------------------------------------------------------------------------

static void preset_refused(const Record *r, const char *why)
{
    Config c;
    Error e = {""};
    bool good = !config_parse(&c, 1, (char *[]){"test"}, &e) || config_apply_record(&c, r, &e);
    ok(!good && !strncmp(e.text, why, strlen(why)), "refused: %s", good ? "nothing" : e.text);
}

// As many stages as there may be, with long texts.
static void check_long_columns(void)
{
    static StageSpec stages[MAX_WINDOWS + 1];
    static const char targets[] = "1:0.50000000:0.25000000-0.00000001";
    const Record r = {.name = "own", .based_on = record_find("tiny"), .stages = stages, .num_stages = 65};
    Config c;
    Error e = {""};
    for (int i = 0; i < r.num_stages; i++)
        stages[i] = (StageSpec){.window = 1, .targets = targets};
    bool good = config_parse(&c, 1, (char *[]){"test"}, &e) && config_apply_record(&c, &r, &e);
    ok(good && strlen(c.stage_targets) == (size_t)r.num_stages * sizeof targets - 1,
       "a column of %d long texts is whole%s", r.num_stages, e.text);
}

static void check_preset_refusals(void)
{
    static const StageSpec stages[] = {{.window = 3}, {.window = 7}};
    static const Field unknown[] = {{"num-heads", "6"}, {"nothing", "6"}, {NULL, NULL}},
                       bad[] = {{"model-dim", "wide"}, {NULL, NULL}};
    Record r = {.name = "own", .based_on = record_find("tiny"), .fields = unknown};
    preset_refused(&r, "preset own: ");
    preset_refused(&(Record){.name = "above", .based_on = &r}, "preset own: ");
    r.fields = bad;
    preset_refused(&r, "preset own: ");
    r.fields = NULL;
    r.stages = stages;
    preset_refused(&r, "preset own: stages and num_stages belong together");

    Config alone;
    Error e = {""}, other = {"--val-tokens 3: another error"};
    bool good = config_parse(&alone, 3, (char *[]){"test", "--preset", "toy"}, &e);
    alone.window_schedule = "0,2";
    good = good && !config_check(&alone, &e) && !strncmp(e.text, "--window-schedule", 17);
    config_error_of(&alone, &e);
    config_error_of(&alone, &other);
    ok(good && !strncmp(e.text, "preset toy: --window-schedule", 29) &&
           !strncmp(other.text, "--val-tokens", 12),
       "an error of the preset's own stages names it, one of an option does not: %s", e.text);

    good = config_parse(&alone, 3, (char *[]){"test", "--preset", "toy"}, &e);
    alone.num_heads = 0;
    good = good && !config_check(&alone, &e) && strstr(e.text, "--num-heads: neither preset toy nor");
    alone.num_heads = 3;
    alone.window_schedule = NULL;
    good = good && !config_check(&alone, &e) && strstr(e.text, "--window-schedule: neither preset toy");
    ok(good, "what no record sets is named: %s", e.text);

    // Its name is not in the list of records, so that its stages cannot be printed.
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    r.num_stages = 2;
    config_print_preset(f, &r);
    fclose(f);
    ok(strstr(text, "  own ") == text && strstr(text, "cannot be run: --preset: there is no preset 'own'"),
       "--help goes on behind a preset that cannot be run");
    free(text);
}
