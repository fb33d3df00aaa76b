// Everything that the records of summer 2026 have, in six layers: the network of the golden files 2026-*.
#include "llmc/records/record.h"

#define BIGRAM_ROWS {97, SIZE_ONE}
enum {
    LAYERS = 6,
    ATTENTION_LAYERS = 5, // all but layer 2
    VALUE_TABLES = 5,
    HIDDEN = 8,
    MIX_COLUMNS = 14,
    GATE_COLUMNS = 29,
    SIGN_ROWS = 32,
    KEY_QUARTERS = 4
};

// Biases are multiplied by a scale of 0.1.
static const InitRun gate_biases[] = {
    {6, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {2, 2, {0, 0.5f}, 0}, {13, 1, {0}, 0}, // a
    {6, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {2, 2, {0, 0.5f}, 0}, {1, 1, {5}, 0}, {6, 1, {10}, 0},
    {6, 1, {0}, 0}, // b
    {0},
};

#include "llmc/records/network_2026_params.h"
#include "llmc/records/network_2026_layers.h"

static const LayerSpec layers[LAYERS] = {
    [0] = {FIRST_MIX(A(13)), PAIRED(0), VALUE_EMBED(0), FIRST_INJECTED(A(12)), MLP(0)},
    [1] = {PLAIN(1, .offset = true, .xsa = A(0), .gate = A(6)), .long_window = true, VALUE_EMBED(1),
           INJECTED(1, A(14), A(15)), MLP(1)},
    [2] = {SKIP_MIX(1, B(16)), MLP(2)},
    [3] = {PLAIN(3, .xsa = B(0)), INJECTED(3, B(12), B(13)), MLP(3)},
    [4] = {HEADS_OF(4, 3, .paired = true), VALUE_EMBED(2), INJECTED(4, B(14), B(15)), MLP(4)},
    [5] = {DYNAMIC(5, 3, 4, .gate = B(6), .dc_weights = B(17), .dc_factors = B(23)), VALUE_EMBED(4)},
};

static const GeneratorSpec generators[] = {GENERATORS_2026(16, 29, 1, 4, 5)};

// Windows in blocks of one token.
static const StageSpec stages[] = {
    {.window = 9, .window_short = 3, .micro_batch_tokens = 32, .max_document = 20, .rate = 1,
     .targets = "1:0.5:0.25-0", .prefix = "0.25"},
    {.window = 13, .window_short = 5, .micro_batch_tokens = 48, .max_document = 40, .rate = 1.52,
     .targets = "1:0.5-0", .prefix = "0.25-0"},
    {.window = 15, .window_short = 6, .micro_batch_tokens = 64, .max_document = 40, .rate = 1.73},
    {.window = 17, .window_short = 7, .micro_batch_tokens = 64, .max_document = 40, .rate = 1.73},
};

static const Field fields[] = {
    {"model-dim", "48"}, {"num-heads", "6"}, {"mlp-dim", "64"}, {"block-size", "1"}, {"window-final", "20"},
    {"num-scheduled", "5"}, {"num-extension", "3"}, {"micro-batches", "2"}, {"micro-batch-tokens", "64"},
    {"val-tokens", "512"}, {"val-every", "5"}, {"head", "bf16"},
    {"mlp", "bf16"},
    {NULL, NULL},
};

const Record record_toy_2026 = {
    .name = "toy-2026", .based_on = &record_2026_07_17, .fields = fields, .stages = stages, .num_stages = 4,
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 7,
    .mlp_scales = {.post = 1.80, .down = 1.12, .exact_until = 2}, NETWORK_2026, OUTPUT_2026(1, 3, 4),
};
