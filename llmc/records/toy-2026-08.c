// toy-2026 as the records of August 2026 have it, the network of the golden files 2026-08-*: q and k are
// narrower than v, rows of Wo are inputs in files, FP8 is for both directions and off.
#include "llmc/records/record.h"

#define WO_BY_INPUT
#define BIGRAM_ROWS {97, SIZE_ONE}
enum {
    LAYERS = 6,
    ATTENTION_LAYERS = 5, // all but layer 2
    VALUE_TABLES = 5,
    HIDDEN = 8,
    MIX_COLUMNS = 14,
    GATE_COLUMNS = 13,
    SIGN_ROWS = 32,
    KEY_QUARTERS = 3
};

// Biases are multiplied by a scale of 0.1.
static const InitRun gate_biases[] = {
    {2, 1, {0}, 0}, {2, 1, {2.5f}, 0}, {2, 2, {0, 0.5f}, 0}, {5, 1, {0}, 0}, // a
    {2, 1, {0}, 0}, {2, 1, {2.5f}, 0}, {2, 2, {0, 0.5f}, 0}, {1, 1, {5}, 0}, {2, 1, {10}, 0},
    {2, 1, {0}, 0}, // b
    {0},
};

#include "llmc/records/network_2026_params.h"
#include "llmc/records/network_2026_layers.h"

static const LayerSpec layers[LAYERS] = {
    [0] = {FIRST_MIX(A(5)), PAIRED(0), VALUE_EMBED(0), FIRST_INJECTED(A(4)), MLP(0)},
    [1] = {PLAIN(1, .offset = true, .xsa = A(0), .gate = A(2)), .long_window = true, VALUE_EMBED(1),
           INJECTED(1, A(6), A(7)), MLP(1)},
    [2] = {SKIP_MIX(1, B(8)), MLP(2)},
    [3] = {PLAIN(3, .xsa = B(0)), INJECTED(3, B(4), B(5)), MLP(3)},
    [4] = {HEADS_OF(4, 3, .paired = true), VALUE_EMBED(2), INJECTED(4, B(6), B(7)), MLP(4)},
    [5] = {DYNAMIC(5, 3, 4, .gate = B(2), .dc_weights = B(9), .dc_factors = B(11)), VALUE_EMBED(4)},
};

static const GeneratorSpec generators[] = {GENERATORS_2026(8, 13, 1, 4, 5)};

static const Field fields[] = {{"model-dim", "32"}, {"num-heads", "2"}, {"mlp-dim", "48"}, {NULL, NULL}};

const Record record_toy_2026_08 = {
    .name = "toy-2026-08", .based_on = &record_toy_2026, .fields = fields,
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 7,
    FP8_SCALES_2026_08, NETWORK_2026_OF(2), OUTPUT_2026(1, 3, 4),
};
