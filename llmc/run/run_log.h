// What the log says of a run before its first step. l: of this process; NULL on the ranks that do not write.
#pragma once
#include "llmc/io/logger.h"
#include "llmc/run/trainer.h"

// Options, backend and ranks, data, model and optimizer.
void log_run(Logger *l, const Config *c, const Trainer *t);
// The device's memory by subject, MiB; with --verbose.
void log_memory(Logger *l, const Trainer *t);
