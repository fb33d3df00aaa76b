// Record of 2026-08-03 (number 90): q and k of 96 channels a head where v has 128; q, k, v and the MLP in
// FP8, forward and backward.
#define KEY_QUARTERS 3
#define WO_BY_INPUT
#include "llmc/records/network_2026.h"
#include "llmc/records/schedule_2026.h"

static const Field fields[] = {
    {"model-dim", "768"}, {"num-heads", "6"}, {"mlp-dim", "3072"}, {"head", "fp8"},
    {"mlp", "fp8-backward"}, {"qkv", "fp8"},
    SCHEDULE_2026,
    {"num-extension", "45"},
    {NULL, NULL},
};

const Record record_2026_08_03 = {
    .name = "2026-08-03", .fields = fields, .stages = stages_2026, .num_stages = STAGES_2026,
    .note = "record 90; not run on FineWeb",
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 112, NETWORK_2026, FP8_SCALES_2026_08,
    OUTPUT_2026(3, 7, 9),
};
