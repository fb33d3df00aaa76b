// The network of 2026-07-17 at a size that a CPU trains in two minutes.
#include "llmc/records/record.h"

// Windows in blocks of 16 tokens.
static const StageSpec stages[] = {
    {.window = 3, .window_short = 1, .micro_batch_tokens = 256, .max_document = 224, .rate = 1,
     .targets = "1:0.5:0.25-0", .prefix = "0.25"},
    {.window = 7, .window_short = 3, .micro_batch_tokens = 512, .max_document = 512, .rate = 1.52,
     .targets = "1:0.5-0", .prefix = "0.25-0"},
    {.window = 11, .window_short = 5, .micro_batch_tokens = 768, .max_document = 512, .rate = 1.73},
    {.window = 13, .window_short = 6, .micro_batch_tokens = 768, .max_document = 512, .rate = 1.73},
};

static const Field fields[] = {
    {"model-dim", "96"}, {"num-heads", "6"}, {"mlp-dim", "256"}, {"block-size", "16"},
    {"micro-batch-tokens", "512"}, {"max-document", "512"},
    {"num-scheduled", "140"}, {"num-extension", "10"},
    {"val-tokens", "65536"}, {"val-every", "50"}, {"head", "bf16"}, {"mlp", "bf16"},
    {NULL, NULL},
};

const Record record_tiny_2026 = {
    .name = "tiny-2026", .based_on = &record_2026_07_17, .fields = fields, .stages = stages, .num_stages = 4,
};
