// What changes with the step: learning rates, momentum, attention windows, and with the windows rope and attention scale (YaRN).
#pragma once
#include "llmc/config.h"

// Factor on all learning rates at step t: 1, then falling linearly to 0.1 over the last `cooldown` share of the scheduled
// steps, flat in the extension steps.
double schedule_lr_factor(const Config *c, int t);
// NorMuon momentum at step t.
double schedule_momentum(const Config *c, int t);
// Long window in blocks for the training step t (t < total), and for a validation before step t; `final`: the last validation.
int schedule_window(const Config *c, int t);
// The scalars of step t for the optimizer ops; of each row of the record's parameters, as if the step updated it.
StepParams schedule_step_params(const Config *c, int t);

// Rope frequencies and attention scale, which follow the long window.
enum { MAX_FREQUENCIES = 256 };
typedef struct {
    int window;                       // long window the frequencies are made for, in blocks
    int count;                        // frequencies: head width / 4
    float frequency[MAX_FREQUENCIES]; // radians per position
    double scale;                     // of the attention scores
} Rope;

void rope_start(Rope *r, const Config *c); // the first window's
// Moves to the long window `window` (blocks); true when that changed the frequencies, so that the tables must be rebuilt.
bool rope_follow_window(Rope *r, const Config *c, int window);

// Windows in tokens: query i sees key j when i - j <= this.
static inline int window_long_tokens(const Config *c, int window) { return c->block_size * window; }
static inline int window_short_tokens(const Config *c, int window) { return c->block_size * (window / 2); }
