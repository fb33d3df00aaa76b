// The network of 2025-11-18 at a size that a CPU trains in a minute.
#include "llmc/records/record.h"

static const Field fields[] = {
    {"model-dim", "64"},           {"num-heads", "2"},       {"mlp-dim", "256"},    {"block-size", "16"},
    {"micro-batch-tokens", "512"}, {"num-scheduled", "300"}, {"num-extension", "20"}, {"val-tokens", "65536"},
    {"val-every", "50"},           {"head", "bf16"},         {NULL, NULL},
};

const Record record_tiny = {.name = "tiny", .based_on = &record_2025_11_18, .fields = fields};
