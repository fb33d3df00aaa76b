// Record of 2025-11-18: one skip only, from the output of layer 4 to layer 7, through the second skip weight.
#include "llmc/records/network_2025.h"

static const LayerSpec layers[LAYERS] = {
    [1] = {LAYER(1), MIX(1), VALUE_EMBED(1)},
    [2] = {LAYER(2), MIX(2), VALUE_EMBED(2)},
    [3] = {LAYER(3), MIX(3)},
    [4] = {LAYER(4), MIX(4), .long_window = true},
    [5] = {LAYER(5), MIX(5)},
    [6] = {LAYER(6), MIX(6)},
    [7] = {.mlp = MLP_RELU2, MIX_SKIP(7, 4, 1)},
    [8] = {LAYER(8), MIX(8)},
    [9] = {LAYER(9), MIX(9), VALUE_EMBED(0)},
    [10] = {LAYER(10), MIX(10), VALUE_EMBED(1)},
    [11] = {LAYER(11), MIX(11), VALUE_EMBED(2), .long_window = true},
};

static const Field fields[] = {{"lambda-init", "1.1"}, {"num-scheduled", "2185"}, {NULL, NULL}};

const Record record_2025_11_18 = {
    .name = "2025-11-18", .based_on = &record_2025_11_10, .fields = fields,
    .note = "record 45; not run on FineWeb",
    .layers = layers, .num_layers = LAYERS, NETWORK, .skips = "single",
};
