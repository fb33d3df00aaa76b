// Options of a run that goes on: those of its checkpoint, with those of the command line over them.
#pragma once
#include "llmc/run/trainer.h"

// config_parse, and for --resume: finds the checkpoint (checkpoint_find; c->resume then names its file) and
// takes the options that it holds. False with a line; *status is then the exit status.
bool resume_parse(Config *c, int argc, char **argv, int *status, Error *e);

// On all ranks: whether the checkpoint that was loaded is the end of a run whose log is whole, with a line.
bool resume_is_finished(const Trainer *t);
