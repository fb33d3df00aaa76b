// Record of 2025-11-29 (number 46): the step grows from 131,072 to 262,144 and 393,216 tokens, and the rates
// with it, a few steps earlier.
#include "llmc/records/record.h"

static const Field fields[] = {
    {"num-scheduled", "2120"}, {"cooldown", "0.55"}, {"cooldown-start", "share-to-floor"},
    {"muon-rate", "0.023"}, {NULL, NULL},
};

static const StageSpec stages[] = {
    {.window = 3, .micro_batch_tokens = 16384, .rate = 1},
    {.window = 7, .micro_batch_tokens = 32768, .rate = 1.51, .rate_after = 0.33},
    {.window = 11, .micro_batch_tokens = 49152, .rate = 1.93, .rate_after = 0.66},
    {.window = 13, .micro_batch_tokens = 49152, .rate = 1.93},
};

const Record record_2025_11_29 = {
    .name = "2025-11-29", .based_on = &record_2025_11_18, .fields = fields,
    .note = "record 46; not run on FineWeb", .stages = stages, .num_stages = 4,
};
