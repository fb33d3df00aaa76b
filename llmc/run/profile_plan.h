// Which steps --profile takes.
#pragma once
#include "llmc/run/config.h"

enum {
    PROFILE_TRACED = 2,                 // an even number: every other step has Adam's update
    PROFILE_STEPS = 2 * PROFILE_TRACED, // op by op, then as they run otherwise
};

bool step_is_due(int step, int every); // every 0: never

// The first profiled step, c->profile steps after `first`, or the first place after them where all follow
// each other, of one size, without a validation or a checkpoint in between. Those from *timed_from on are to
// be timed before. Fatal where there is no such place before `end`.
int profile_plan(const Config *c, int first, int end, int *timed_from);
