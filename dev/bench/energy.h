// Power of the GPU from the backend's energy counter.
#pragma once
#include "llmc/ops/backend.h"
#include <math.h>

// Two readings of the counter: only moments at which it has moved are taken.
typedef struct {
    double first_s, last_s;
    double first, last, seen; // J
    int edges;
} EnergySpan;

static void energy_poll(EnergySpan *span)
{
    double joules = backend_energy(), now = seconds_now();
    if (isnan(joules))
        fatal(EXIT_DEVICE, "NVML gives no energy of this GPU: those before Volta have no counter");
    if (!span->edges || joules == span->seen) {
        span->edges += !span->edges;
        span->seen = joules;
        return;
    }
    span->seen = joules;
    if (span->edges++ == 1) {
        span->first_s = now;
        span->first = joules;
    }
    span->last_s = now;
    span->last = joules;
}

// Mean power in watts. Fatal if the counter moved less than three times.
static double energy_watts(const EnergySpan *span)
{
    if (span->edges < 4)
        fatal(EXIT_USAGE, "the energy counter moved %d times only: ask for more seconds", span->edges - 1);
    return (span->last - span->first) / (span->last_s - span->first_s);
}
