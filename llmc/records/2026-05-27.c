// Record of 2026-05-27 (number 85): the network of 2026-07-17 without the prefix term; of the MLP the
// product with c_fc alone is in FP8.
#include "llmc/records/network_2026.h"

static const Field fields[] = {{"num-scheduled", "1275"}, {NULL, NULL}};

static const StageSpec stages[] = {
    {.window = 3, .window_short = 1, .micro_batch_tokens = 16384, .max_document = 896, .rate = 1,
     .targets = "1:0.5:0.25-0"},
    {.window = 7, .window_short = 3, .micro_batch_tokens = 32768, .max_document = 2048, .rate = 1.52,
     .targets = "1:0.5-0"},
    {.window = 11, .window_short = 5, .micro_batch_tokens = 49152, .max_document = 2048, .rate = 1.73},
    {.window = 13, .window_short = 6, .micro_batch_tokens = 49152, .max_document = 2048, .rate = 1.73},
};

const Record record_2026_05_27 = {
    .name = "2026-05-27", .based_on = &record_2026_07_17, .fields = fields,
    .note = "record 85; not run on FineWeb", .stages = stages, .num_stages = 4,
    .layers = layers, .num_layers = LAYERS, .params = network_2026_params, .num_params = NETWORK_2026_PARAMS,
    .generators = generators, .num_generators = 4, .dc_keys = 112,
    .mlp_scales = {.up_alone = true}, NETWORK_2026, OUTPUT_2026(3, 7, 9),
};
