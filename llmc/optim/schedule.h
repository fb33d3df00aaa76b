// What changes with the step: learning rates, momentum, attention windows, and with the windows rope and
// attention scale (YaRN).
#pragma once
#include "llmc/run/config.h"

// Weights of terms of the loss within a stage: each goes evenly from one value to the other, which is reached
// at the stage's end.
typedef struct {
    int count; // terms
    double from[MAX_TARGETS], to[MAX_TARGETS];
} StageWeights;

// A stretch of steps that have one size and one pair of windows. The scheduled steps are shared evenly among
// as many stages as --window-schedule has windows: of n stages and s steps stage k begins at k s / n, rounded
// up or to the nearest whole number (--stage-starts). The extension steps are the last stage. The other lists
// have an entry for each of the n stages, and one more when the extension's differs from the last one.
typedef struct {
    int index, begin;
    int end; // the step at which the next one begins; of the last one the number of steps
    int micro_batch_tokens, max_document;
    int window, window_short; // long and short window, blocks
    double rate;              // the highest factor on all learning rates
    int rate_begin;           // the step from which it holds: `begin`, or as --rate-starts says
    StageWeights targets;     // of the loss, see llmc/ops/head.h
    StageWeights prefix;      // of its prefix term: one
} Stage;
Stage schedule_stage(const Config *c, int t); // of step t; beyond the last step the last stage
int schedule_most_tokens(const Config *c);    // largest micro-batch of all stages
// Tokens of a launch of a micro-batch of N, of the largest one.
int schedule_launch_tokens(const Config *c, int N);
int schedule_most_launch_tokens(const Config *c);
// Most rows from a query back to a key that it sees in training: the shorter of window and document, which
// has two rows a token where heads are paired.
int schedule_longest_reach(const Config *c);
// Launches of other stages that are smaller than the largest, each size once; tokens (room) in: zeros.
void schedule_smaller_launches(const Config *c, int *tokens, int room);
// Options for micro-batches of 1 / divisor of the tokens, and `divisor` times as many of them, owned by the
// caller; NULL: a size would be no multiple of 16.
char *schedule_divided(const Config *c, int divisor);
bool schedule_sizes_differ(
    const Config *c);                     // whether stages have micro-batches or documents of several sizes
bool schedule_has_prefix(const Stage *s); // whether the loss has a prefix term at some step of the stage
bool schedule_needs_prefix(const Config *c); // at some step of the run
bool schedule_check(const Config *c, Error *e);
// What differs between the stages, a line for the log, owned by the caller.
char *schedule_describe(const Config *c);

// Factor on all learning rates at step t: the stage's rate, falling linearly to rate_floor over the last
// `cooldown` share of the scheduled steps, flat in the extension steps. --cooldown-start share: where the
// share begins, and the fall ends at 0.9999 of the scheduled steps; step: from the whole step at or below it,
// to the floor itself; share-to-floor: where the share begins, to the floor itself.
double schedule_lr_factor(const Config *c, int t);
// NorMuon momentum at step t.
double schedule_momentum(const Config *c, int t);
// Long window in blocks of step t, and of a validation before it but for the last one.
int schedule_window(const Config *c, int t);
// Tokens over all ranks from step t to the last one, added by stage: a schedule may have any number of steps.
double schedule_tokens_left(const Config *c, int t);
// The first step, in the stage of that number or later, after which a tensor is updated that has an update
// every `every` steps.
int schedule_first_update(const Config *c, int stage, int every);
// The scalars of step t for the optimizer ops; of each row of the record's parameters, as if the step updated
// it.
StepParams schedule_step_params(const Config *c, int t);

// Rope frequencies and attention scale, which follow the long window. --rope-arithmetic double: rounded to
// fp32 after each change; fp32: in every operation, as programs on fp32 tensors compute them. One ulp of a
// frequency changes entries of bf16 tables.
enum { MAX_FREQUENCIES = 256 };
typedef struct {
    int window;                       // long window the frequencies are made for, in blocks
    int count;                        // frequencies: head width / 4
    float frequency[MAX_FREQUENCIES]; // radians per position
    double scale;                     // of the attention scores
} Rope;

void rope_start(Rope *r, const Config *c); // the first window's
// YaRN: moves to the long window `window` (blocks); true when that changed the frequencies, so that the
// tables must be rebuilt.
bool rope_follow_window(Rope *r, const Config *c, int window);
// As it is after `steps` steps from the first one, without a move to the window of the next one.
void rope_follow_steps(Rope *r, const Config *c, int steps);

// Windows in tokens: query i sees key j when i - j <= this.
static inline int window_tokens(const Config *c, int blocks) { return c->block_size * blocks; }
