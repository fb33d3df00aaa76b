// The lines of --profile.
#pragma once
#include "llmc/io/logger.h"
#include "llmc/ops/profile.h"
// The steps before the traced ones, together.
typedef struct {
    int steps;
    double ms, joules; // joules NaN: the device does not count them
} UntracedSteps;

// Of the ops between the last profile_start and profile_stop, PROFILE_TRACED steps.
void profile_report_ops(Logger *l, const Ceilings *c);
// Of the same, beside steps that nobody traced. With several ranks also what they wait for each other.
void profile_report_steps(Logger *l, const UntracedSteps *u, bool several_ranks);
// Of profile_energy's ops, those of one step.
void profile_report_energy(Logger *l);
