// What the log and notes say of a run before its first step. l: of this process; NULL on the ranks that do
// not write.
#pragma once
#include "llmc/io/logger.h"
#include "llmc/run/run_folder.h"
#include "llmc/run/trainer.h"

// Options, backend and ranks, data, model and optimizer.
void log_run(Logger *l, const Config *c, const Trainer *t);
// The device's memory by subject, MiB; with --verbose.
void log_memory(Logger *l, const Trainer *t);

// Where --config stops at a step.  argc, argv: of the command line, without the options of files
void note_stop(const Config *c, int argc, char **argv);
// Options that were given and have no effect.
void note_unused(const Config *c, bool training);
// Where a step of the network is too large for a CPU. Before anything that takes long.
void note_large_step(const Trainer *t);
// Where the disk has no room for a checkpoint. It may have when one is saved: the run goes on.
void note_full_disk(const Trainer *t, const RunFolder *f);
