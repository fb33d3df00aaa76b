// What the tables can say, at a size for tests: 5 layers, two of them without attention and one without an
// MLP, a layer that mixes nothing in, heads of width 8, a narrow MLP, two stages of different micro-batches
// and an extension of a third size.
#include "llmc/records/record.h"
#include "llmc/run/config.h"

enum { LAYERS = 5, LAMBDA = 1, V_LAMBDA = LAMBDA + 2 * LAYERS, SMEAR = V_LAMBDA + 2 * LAYERS, SCALARS = 24 };

#define LAMBDAS(i) {RUNNING, {1, LAMBDA + 2 * (i), NONE}}, {EMBEDDED, {1, LAMBDA + 2 * (i) + 1, NONE}}
#define ATTENTION(i) .attention = ATTENTION_PLAIN, .v_lambdas = V_LAMBDA + 2 * (i)

// Layer 3 takes the output of layer 1 through a gate, the output gives half of layer 2 back.
static const LayerSpec layers[LAYERS] = {
    {.mix = {LAMBDAS(0)}, ATTENTION(0), .mlp = MLP_RELU2, .value_embed = 1},
    {.mix = {LAMBDAS(1)}, .mlp = MLP_RELU2},
    {ATTENTION(2), .long_window = true},
    {.mix = {LAMBDAS(3), {1, {1, NONE, 0}}}, .mlp = MLP_RELU2},
    {.mix = {LAMBDAS(4)}, ATTENTION(4), .mlp = MLP_RELU2, .value_embed = 1},
};

static const InitRun scalars[] = {
    {1, 1, {-1}, 0}, {LAYERS, 2, {1, 0.1f}, 0}, {LAYERS, 2, {0.5f, 0.5f}, 0}, {1, 1, {0.25f}, 0},
    {2, 1, {1}, 0}, {0},
};

#define TABLE \
    .rows = {1, SIZE_VOCAB}, .cols = {1, SIZE_MODEL}, .storage = STORE_HALF, .sharding = SHARD_ROWS
#define MATRIX .storage = STORE_MASTER, .sharding = SHARD_TENSORS
#define ADAM_TIMES(factor) {ADAM, .rate = factor, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-8, .every = 2}
#define NORMUON_TIMES(factor) {NORMUON, .rate = factor, .beta2 = 0.9, .every = 1}
#define GATE {INIT_ZERO}, .update = {ADAM, .rate = 1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .every = 1}

static const ParamSpec params[] = {
    {ROLE_EMBED, "embed.weight", TABLE, .init = {INIT_NORMAL, 1}, .update = ADAM_TIMES(75)},
    {ROLE_VALUE_EMBED, "value_embeds.%d.weight", 1, TABLE, .init = {INIT_NORMAL, 1},
     .update = ADAM_TIMES(75)},
    {ROLE_HEAD, "lm_head.weight", TABLE, .init = {INIT_ZERO}, .update = ADAM_TIMES(1)},
    {ROLE_MLP_UP, "layers.%d.up", .rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MLP}, MATRIX,
     .init = {INIT_UNIFORM, 0.5}, .update = NORMUON_TIMES(2)},
    {ROLE_MLP_DOWN, "layers.%d.down", .rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MLP}, MATRIX,
     .init = {INIT_ZERO}, .update = NORMUON_TIMES(1)},
    {ROLE_QKVO, "layers.%d.qkvo", .rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MODEL}, .matrices = {4, SIZE_ONE},
     MATRIX, .file = {2, {{1, SIZE_MODEL}, {4, SIZE_MODEL}}},
     .init = {INIT_UNIFORM, 0.5, .matrices = 3}, .update = NORMUON_TIMES(1)},
    {ROLE_ATTENTION_GATE, "layers.%d.gate", .rows = {1, SIZE_HEADS}, .cols = {12, SIZE_ONE},
     .storage = STORE_HALF, .sharding = REPLICATED, .init = GATE},
    {ROLE_SMEAR_GATE, "smear_gate.weight", .rows = {1, SIZE_ONE}, .cols = {12, SIZE_ONE},
     .storage = STORE_HALF, .sharding = REPLICATED, .init = GATE},
    {ROLE_SCALARS, "scalars", .rows = {1, SIZE_ONE}, .cols = {SCALARS, SIZE_ONE}, .storage = STORE_FLOAT,
     .sharding = REPLICATED, .init = {INIT_RUNS, .runs = scalars}, .update = ADAM_TIMES(5),
     .file = {1, {{SCALARS, SIZE_ONE}}, .least = SMEAR + 1}},
};

#define STAGE(w, tokens, documents, r) \
    .window = w, .micro_batch_tokens = tokens, .max_document = documents, .rate = r

static const StageSpec stages[] = {{STAGE(2, 64, 32, 1)}, {STAGE(4, 128, 64, 1.5)}, {STAGE(5, 96, 64, 1)}};
static const StageSpec targets_stages[] = {
    {STAGE(2, 64, 32, 1), .targets = "1:0.5:0.25-0"},
    {STAGE(4, 128, 64, 1.5), .targets = "1:0.5-0"},
    {STAGE(5, 96, 64, 1)},
};

static const Field fields[] = {
    {"model-dim", "24"},        {"num-heads", "3"},   {"mlp-dim", "40"},  {"block-size", "8"},
    {"num-scheduled", "12"},    {"num-extension", "4"}, {"cooldown", "0.6"}, {"stage-starts", "nearest"},
    {"micro-batch-tokens", "64"}, {"val-tokens", "512"}, {"val-every", "5"}, {"head", "bf16"},
    {NULL, NULL},
};

static const Field no_fields[] = {{NULL, NULL}};

#define NETWORK \
    .layers = layers, .num_layers = LAYERS, .params = params, .num_params = sizeof params / sizeof *params, \
    .smear_lambda = SMEAR, .output = {{RUNNING, {1, NONE, NONE}}, {2, {-0.5f, NONE, NONE}}}

const Record record_toy = {
    .name = "toy", .based_on = &record_2025_10_27, .fields = fields, .stages = stages, .num_stages = 3,
    NETWORK,
    .head = {.cap = 30, .slope = 7.5f, .range_w = 0.875f, .range_g = 1},
};

// The same network under another head: a shift, fixed ranges, and a loss of three targets, then two, then
// one.
const Record record_toy_targets = {
    .name = "toy-targets", .based_on = &record_toy, .fields = no_fields, .stages = targets_stages,
    .num_stages = 3, NETWORK,
    .head = {.cap = 23, .slope = 6, .shift = 5, .range_x = 9, .range_w = 1.6f, .range_g = 0.75f},
};
