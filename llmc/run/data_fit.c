#include "llmc/run/data_fit.h"
#include "llmc/data/validation.h"
#include "llmc/optim/schedule.h"

enum { COUNTED_TOKENS = 64 << 20, LEAST_SEQUENCE = 16, SEQUENCE_MULTIPLE = 128 };

char *fit_validation(Config *c)
{
    Error e;
    int64_t step = (int64_t)c->micro_batches * c->micro_batch_tokens;
    int64_t held = config_given(c, "val-tokens")
                       ? 0
                       : validation_tokens_held(c->val_files, &e) - 1; // the last is a target only
    int64_t unit = held >= step ? step : held >= SEQUENCE_MULTIPLE ? SEQUENCE_MULTIPLE : LEAST_SEQUENCE;
    int64_t fits = held / unit * unit;
    if (fits < LEAST_SEQUENCE || fits >= c->val_tokens)
        return NULL; // validation_open says what is wrong
    char *line =
        format_string("validation takes %lld of the %lld tokens of %s: they are fewer than --val-tokens %lld",
                      (long long)fits, (long long)held + 1, c->val_files, (long long)c->val_tokens);
    c->val_tokens = fits;
    return line;
}

// Of a stage, `most` at most. l NULL: as many as *tokens give, which it takes them from.
static int64_t count_stage(Loader *l, const Config *c, const Stage *stage, int64_t *tokens, int64_t most)
{
    int64_t each = (int64_t)c->micro_batches * (stage->micro_batch_tokens + 1);
    if (l) {
        loader_set_sizes(l, stage->micro_batch_tokens, stage->max_document);
        return loader_count_steps(l, most);
    }
    int64_t steps = min_i64(most, *tokens / each);
    *tokens -= steps * each;
    return steps;
}

// Steps of one pass, `most` at most.
static int64_t count_steps(const Config *c, const LoaderOptions *options, int64_t num_tokens, int64_t most)
{
    Error e;
    LoaderOptions o = *options;
    o.repeat = false;
    o.epochs = 1;
    Loader *l = num_tokens > COUNTED_TOKENS ? NULL : loader_open(&o, &e);
    int64_t steps = 0;
    bool enough = l || num_tokens > COUNTED_TOKENS;
    while (steps < most && enough) {
        Stage stage = schedule_stage(c, (int)steps);
        int64_t length = min_i64(stage.end, most) - steps;
        int64_t found = count_stage(l, c, &stage, &num_tokens, length);
        steps += found;
        enough = found == length;
    }
    loader_close(l);
    return steps;
}

// The extension keeps its share of the steps.
static void shorten_schedule(Config *c, int steps)
{
    int total = config_total_steps(c);
    c->num_extension = (int)((int64_t)c->num_extension * steps / total);
    c->num_scheduled = steps - c->num_extension;
}

// A shortened schedule of stages of several sizes needs other data than the whole one had.
static bool keeps_schedule(const Config *c)
{
    return schedule_sizes_differ(c) || config_given(c, "num-scheduled") || config_given(c, "num-extension") ||
           config_given(c, "stop-at") || *c->resume;
}

char *fit_steps(Config *c, const LoaderOptions *options, int64_t num_tokens)
{
    int total = config_total_steps(c);
    int64_t steps = count_steps(c, options, num_tokens, total);
    const char *at_most = num_tokens > COUNTED_TOKENS ? "at most " : "";
    if (steps >= total || steps == 0)
        return NULL; // none at all: the loader says why
    double passes = (double)total / (double)steps;
    if (c->repeat || c->epochs > 1) {
        bool enough = c->repeat || c->epochs >= passes;
        return format_string("the training data give %s%lld steps a pass: %d steps are %.1f passes%s",
                             at_most, (long long)steps, total, passes,
                             enough ? "" : ", more than --epochs allows; the run ends where the data end");
    }
    if (*at_most || keeps_schedule(c)) {
        return format_string(
            "the training data give %s%lld of %d steps: the run ends there; --repeat goes over them again, "
            "%.1f times in all",
            at_most, (long long)steps, total, passes);
    }
    shorten_schedule(c, (int)steps);
    return format_string(
        "the training data give %lld of %d steps, so the schedule is %d + %d; --repeat trains all %d in %.1f "
        "passes",
        (long long)steps, total, c->num_scheduled, c->num_extension, total, passes);
}
