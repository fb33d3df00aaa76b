// What the records of July and August 2026 have in common beside their networks: stages, rates and momenta.
#pragma once
#include "llmc/records/record.h"

enum { STAGES_2026 = 4 };
extern const StageSpec stages_2026[STAGES_2026];

// Fields of all of them; each has its own number of extension steps.
#define SCHEDULE_2026 \
    {"num-scheduled", "1270"}, {"cooldown", "0.6"}, {"cooldown-start", "step"}, \
    {"stage-starts", "nearest"}, {"rate-floor", "0.15"}, {"rope-arithmetic", "fp32"}, \
    {"block-size", "128"}, {"window-final", "20"}, {"micro-batches", "8"}, {"micro-batch-tokens", "32768"}, \
    {"max-document", "2048"}, \
    {"adam-rate", "0.008"}, {"muon-rate", "0.023"}, {"adam-decay", "0.005"}, {"weight-decay", "1.2"}
