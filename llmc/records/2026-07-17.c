// Record of 2026-07-17 (number 89): 11 layers, layer 6 without attention; numbers that generators make for
// every token take the place of trained scalars.
#include "llmc/records/network_2026.h"
#include "llmc/records/network_2026_layers.h"
#include "llmc/records/schedule_2026.h"

static const LayerSpec layers[LAYERS] = {
    [0] = {FIRST_MIX(A(19)), PAIRED(0), FIRST_INJECTED(A(18)), MLP(0)},
    [1] = {PLAIN(1, .xsa = A(0)), VALUE_EMBED(0), INJECTED(1, A(20), A(21)), MLP(1)},
    [2] = {PAIRED(2), VALUE_EMBED(1), INJECTED(2, A(22), A(23)), MLP(2)},
    [3] = {PLAIN(3, .offset = true, .xsa = A(6), .gate = A(12)), .long_window = true,
           INJECTED(3, A(24), A(25)), MLP(3)},
    [4] = {PLAIN(4, .xsa = B(0)), INJECTED(4, B(18), B(19)), MLP(4)},
    [5] = {PAIRED(5), INJECTED(5, B(20), B(21)), MLP(5)},
    [6] = {SKIP_MIX(3, B(28)), MLP(6)},
    [7] = {PLAIN(7, .xsa = B(6)), INJECTED(7, B(22), B(23)), MLP(7)},
    [8] = {HEADS_OF(8, 7), VALUE_EMBED(2), INJECTED(8, B(24), B(25)), MLP(8)},
    [9] = {HEADS_OF(9, 7, .paired = true), VALUE_EMBED(3), INJECTED(9, B(26), B(27)), MLP(9)},
    [10] = {DYNAMIC(10, 7, 9, .gate = B(12), .dc_weights = B(29), .dc_factors = B(35)), VALUE_EMBED(4)},
};

static const GeneratorSpec generators[] = {GENERATORS_2026(26, 41, 3, 9, 10)};

static const Field fields[] = {
    {"model-dim", "768"}, {"num-heads", "6"}, {"mlp-dim", "3072"}, {"head", "fp8"}, {"mlp", "fp8"},
    SCHEDULE_2026,
    {NULL, NULL},
};

const Record record_2026_07_17 = {
    .name = "2026-07-17", .fields = fields, .stages = stages_2026, .num_stages = STAGES_2026,
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 112,
    .mlp_scales = {.post = 1.80, .down = 1.12, .exact_until = 16}, NETWORK_2026, OUTPUT_2026(3, 7, 9),
};
