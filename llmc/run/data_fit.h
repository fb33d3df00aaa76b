// What small data allow: a preset's validation and steps are for gigabytes, and a text of one's own may give
// a few of either.
#pragma once
#include "llmc/run/config.h"
#include "llmc/data/dataloader.h"

// Lowers config->val_tokens, unless the command line gives it, to what the validation shard holds: as many
// whole sequences of a step's tokens as it has, or one shorter sequence. Returns a line that says so, owned
// by the caller; NULL: nothing was changed.
char *fit_validation(Config *c);

// Counts the steps that the training data give in one pass (of more than 64M tokens: at most give), before
// any is trained. Without --repeat and --epochs the schedule is shortened to them, unless the command line
// says how many steps it wants. Returns a line that says so, owned by the caller; NULL: one pass gives all
// steps.
//   options  of the run's loader
char *fit_steps(Config *c, const LoaderOptions *options, int64_t num_tokens);
