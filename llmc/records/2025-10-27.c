// Record of 2025-10-27: 12 layers, of which the first is empty and the eighth has no attention; U-net skips.
#include "llmc/records/network_2025.h"

// The stack of skips: 6 takes the output of 5, 7 of 4, ... 10 of 1.
static const LayerSpec layers[LAYERS] = {
    [1] = {LAYER(1), MIX(1), VALUE_EMBED(1)},
    [2] = {LAYER(2), MIX(2), VALUE_EMBED(2)},
    [3] = {LAYER(3), MIX(3)},
    [4] = {LAYER(4), MIX(4), .long_window = true},
    [5] = {LAYER(5), MIX(5)},
    [6] = {LAYER(6), MIX_SKIP(6, 5, 0)},
    [7] = {.mlp = MLP_RELU2, MIX_SKIP(7, 4, 1)},
    [8] = {LAYER(8), MIX_SKIP(8, 3, 2)},
    [9] = {LAYER(9), MIX_SKIP(9, 2, 3), VALUE_EMBED(0)},
    [10] = {LAYER(10), MIX_SKIP(10, 1, 4), VALUE_EMBED(1)},
    [11] = {LAYER(11), MIX(11), VALUE_EMBED(2), .long_window = true},
};

static const Field fields[] = {
    {"model-dim", "768"},       {"num-heads", "6"},          {"mlp-dim", "3072"},      {"block-size", "128"},
    {"lambda-init", "1"},       {"num-scheduled", "2245"},   {"num-extension", "40"},  {"cooldown", "0.5"},
    {"stage-starts", "up"},     {"rate-floor", "0.1"},       {"window-final", "20"}, {"adam-rate", "0.008"},
    {"muon-rate", "0.03"},      {"weight-decay", "0"},       {"micro-batches", "8"}, {"max-document", "2048"},
    {"micro-batch-tokens", "32768"},   {"head", "fp8"},             {NULL, NULL},
};

static const StageSpec stages[] = {{.window = 3}, {.window = 7}, {.window = 11}, {.window = 13}};

const Record record_2025_10_27 = {
    .name = "2025-10-27", .note = "record 42; not run on FineWeb", .fields = fields, .stages = stages,
    .num_stages = 4,
    .layers = layers, .num_layers = LAYERS, NETWORK, .skips = "unet",
};
