// Any bytes as a command line, arguments separated by newlines: it is refused with one line, or what it set
// is printed, taken back and printed the same, lies in the bounds that the rest of the program relies on, and
// schedules can be computed from it.
#include "llmc/optim/schedule.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARGUMENTS = 64 };

static void check(bool good)
{
    if (!good)
        abort();
}

static void check_line(const Error *e)
{
    size_t n = strlen(e->text);
    check(n > 0 && n < sizeof e->text);
}

static void check_numbers(const Config *c)
{
    int head = c->model_dim / c->num_heads;
    check(head * c->num_heads == c->model_dim && head >= 8 && head / 4 <= MAX_FREQUENCIES);
    check(c->vocab_size >= 0 && c->vocab_size <= 65536 && c->mlp_dim > 0 && c->block_size > 0);
    check((int64_t)c->micro_batches * c->micro_batch_tokens <= MAX_STEP_TOKENS &&
          c->micro_batch_tokens >= 16);
    check(c->num_scheduled > 0 && c->num_extension >= 0 && config_total_steps(c) > 0);
    Rope rope;
    rope_start(&rope, c);
    for (int t = 0; t < 3; t++) {
        int step = (int)((int64_t)t * (config_total_steps(c) - 1) / 2), window = schedule_window(c, step);
        rope_follow_window(&rope, c, window);
        StepParams p = schedule_step_params(c, step);
        check(window > 0 && window_tokens(c, window) > 0 && window_tokens(c, c->window_final) > 0);
        check(p.muon_momentum >= 0 && p.muon_momentum < 1);
        for (int i = 0; i < MAX_UPDATE_RULES; i++)
            check(isfinite(p.rule[i].rate) && isfinite(p.rule[i].decay));
    }
}

// Every option as text, back into another config, and out again.
static void check_round_trip(const Config *c)
{
    Config again = *c;
    Error e;
    const char *name;
    for (int i = 0; (name = config_option_name(i, NULL)); i++) {
        char *value = config_option_value(c, i);
        check(config_set(&again, name, value, &e));
        char *second = config_option_value(&again, i);
        check(!strcmp(value, second));
        free(value);
        free(second);
    }
    check(config_check(&again, &e));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = xcalloc(size + 1, 1), *argv[MAX_ARGUMENTS + 1] = {"train_gpt"}, *rest = text;
    int argc = 1;
    if (size)
        memcpy(text, data, size);
    for (char *arg; argc < MAX_ARGUMENTS && (arg = strsep(&rest, "\n"));)
        argv[argc++] = arg;
    Config c;
    Error e = {""};
    if (!config_parse(&c, argc, argv, &e)) {
        check_line(&e);
    } else if (!c.help) {
        check_numbers(&c);
        check_round_trip(&c);
    }
    // The same bytes as name and value of one option, which checkpoints' metadata could hold.
    if (argc >= 3 && config_parse(&c, 1, argv, &e))
        config_set(&c, argv[1], argv[2], &e);
    free(text);
    return 0;
}
