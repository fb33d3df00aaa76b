// Record of 2026-08-03 (number 90): q and k have 96 channels a head where v has 128.
#define KEY_QUARTERS 3
#define WO_BY_INPUT
#include "llmc/records/network_2026.h"
#include "llmc/records/schedule_2026.h"

static const Field fields[] = {
    {"model-dim", "768"}, {"num-heads", "6"}, {"mlp-dim", "3072"}, {"head", "fp8"}, {"mlp", "bf16"},
    SCHEDULE_2026,
    {"num-extension", "45"},
    {NULL, NULL},
};

const Record record_2026_08_03 = {
    .name = "2026-08-03", .fields = fields, .stages = stages_2026, .num_stages = STAGES_2026,
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 112, NETWORK_2026, OUTPUT_2026(3, 7, 9),
};
