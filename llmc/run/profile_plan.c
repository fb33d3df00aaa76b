#include "llmc/run/profile_plan.h"
#include "llmc/optim/schedule.h"

enum { CAPTURING = 4 }; // steps in which graphs are captured

bool step_is_due(int step, int every) { return every > 0 && step % every == 0; }

static bool same_size(const Config *c, int a, int b)
{
    return schedule_stage(c, a).micro_batch_tokens == schedule_stage(c, b).micro_batch_tokens;
}

// Whether all of the profiled steps from `at` on follow each other, of one size, without a validation or a
// checkpoint in between.
static bool in_a_row(const Config *c, int at)
{
    for (int step = at + 1; step < at + PROFILE_STEPS; step++)
        if (step_is_due(step, c->val_every) || step_is_due(step, c->checkpoint_every) ||
            step_is_due(step, c->eval_every) || !same_size(c, at, step))
            return false;
    return true;
}

// Steps before `at` that have its size and can be timed: the first ones of a size capture graphs.
static int timed_steps(const Config *c, int first, int at)
{
    int begin = at;
    while (begin > first && same_size(c, at, begin - 1))
        begin--;
    int steps = at - begin < c->profile ? at - begin : c->profile;
    return (steps - CAPTURING) / 2 * 2;
}

int profile_plan(const Config *c, int first, int end, int *timed_from)
{
    int at = first + c->profile;
    if (at + PROFILE_STEPS > end)
        fatal(EXIT_USAGE, "--profile %d: needs %d steps, and the run has %d", c->profile,
              c->profile + PROFILE_STEPS, end - first);
    while (!in_a_row(c, at) || timed_steps(c, first, at) < 2)
        if (++at + PROFILE_STEPS > end)
            fatal(EXIT_USAGE,
                  "--profile %d: no %d steps of one size follow each other from there on; raise "
                  "--val-every %d, --checkpoint-every %d, --eval-every %d",
                  c->profile, PROFILE_STEPS, c->val_every, c->checkpoint_every, c->eval_every);
    *timed_from = at - timed_steps(c, first, at);
    return at;
}
