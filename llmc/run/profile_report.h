// The lines of --profile.
#pragma once
#include "llmc/io/logger.h"
#include "llmc/ops/profile.h"
#include "llmc/run/trainer.h"
// The steps before the traced ones, together.
typedef struct {
    int steps;
    double ms, joules; // joules NaN: the device does not count them
} UntracedSteps;

// Of the ops between the last profile_start and profile_stop, PROFILE_TRACED steps.
void profile_report_ops(Logger *l, const Ceilings *c);
// Of the same, beside steps that nobody traced. With several ranks also what they wait for each other.
void profile_report_steps(Logger *l, const UntracedSteps *u, bool several_ranks);

// Fatal where --profile-energy has no counter to read, or several ranks share the run. Before any memory is
// taken.
void profile_check_energy(void);
// The energy of every op of the last step, measured for `seconds` each; or a line that none is measured, and
// why: `reason`, or NULL for none. The weights and the optimizer's state are lost.
void profile_report_energy(Logger *l, Trainer *t, double seconds, const char *reason);
