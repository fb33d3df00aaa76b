// Record of 2026-07-17 (number 89): the MLP is in FP8 in training's forward.
#include "llmc/records/network_2026.h"
#include "llmc/records/schedule_2026.h"

static const Field fields[] = {
    {"model-dim", "768"}, {"num-heads", "6"}, {"mlp-dim", "3072"}, {"head", "fp8"}, {"mlp", "fp8"},
    SCHEDULE_2026,
    {"num-extension", "15"},
    {NULL, NULL},
};

const Record record_2026_07_17 = {
    .name = "2026-07-17", .fields = fields, .stages = stages_2026, .num_stages = STAGES_2026,
    .note = "record 89; not run on FineWeb",
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 112,
    .mlp_scales = {.post = 1.80, .down = 1.12, .exact_until = 16}, NETWORK_2026, OUTPUT_2026(3, 7, 9),
};
