// --help, and what the manual has of the same (dev/manual.c).
#include "llmc/optim/schedule.h"
#include "llmc/records/record.h"
#include "llmc/run/config_internal.h"
#include <stdlib.h>
#include <string.h>

const char *const exit_statuses[] = {
    "done",
    "bad input or failure",
    "wrong options",
    "interrupted by a signal or --stop-after: the state was saved, unless a second signal came",
    "a GPU failed",
    "diverged: the loss of a training step or of a validation is not a finite number",
    NULL,
};

char *option_standard(const Option *o)
{
    Config first = {0};
    Error e;
    if (o->standard)
        return xstrdup(o->standard);
    for (const Field *field = records[0]->fields; field && field->option; field++) {
        if (!strcmp(field->option, o->name))
            return xstrdup(field->value);
    }
    if (!config_apply_record(&first, records[0], &e))
        fatal(EXIT_USAGE, "%s", e.text);
    return config_option_value(&first, (int)(o - config_options));
}

// A line for each stage of a preset. Of one whose table is wrong: a line that says so, and the others follow.
static void print_stages(FILE *f, const char *preset)
{
    Config c;
    Error e;
    char *argv[] = {"", "--preset", (char *)preset};
    if (!config_parse(&c, 3, argv, &e)) {
        fprintf(f, "               cannot be run: %s\n", e.text);
        return;
    }
    char *stages = schedule_describe(&c), *rest = NULL;
    for (char *stage = strtok_r(stages, ";", &rest); stage; stage = strtok_r(NULL, ";", &rest))
        fprintf(f, "               %s\n", stage + strspn(stage, " "));
    free(stages);
}

void config_print_preset(FILE *f, const Record *r)
{
    bool first = r == records[0];
    fprintf(f, "  %-12s %s", r->name,
            first         ? "the defaults above"
            : r->based_on ? r->based_on->name
                          : "a record");
    if (r->layers && !first)
        fprintf(f, " with its own network");
    if (r->stages && !first)
        fprintf(f, " with its own stages");
    for (const Field *field = r->fields; !first && field && field->option; field++)
        fprintf(f, "%s--%s %s", field == r->fields ? " with " : " ", field->option, field->value);
    fprintf(f, "%s%s\n", r->note ? "; " : "", r->note ? r->note : "");
    if (r->stages && !first)
        print_stages(f, r->name);
}

void config_print_presets(FILE *f)
{
    for (int i = 0; records[i]; i++)
        config_print_preset(f, records[i]);
}

static void print_option(FILE *f, const Option *o)
{
    char left[64], range[64] = "", *standard = option_standard(o);
    if (o->section)
        fprintf(f, "\n%s\n", o->section);
    snprintf(left, sizeof left, "--%s", o->name);
    if (option_is_number(o))
        snprintf(range, sizeof range, "; %.10g to %.10g", o->low, o->high);
    fprintf(f, "  %-22s %s", left, o->help);
    if (o->type == OPT_FLAG)
        fprintf(f, "\n");
    else if (o->choices)
        fprintf(f, " (%s; default %s)\n", o->choices, standard);
    else
        fprintf(f, " (default %s%s)\n", *standard ? standard : "none", range);
    free(standard);
}

void config_print_help(FILE *f)
{
    fprintf(f, "train_gpt: trains the GPT of the NanoGPT speedrun.\n\n  train_gpt --preset 2025-10-27 "
               "--train-files 'data/*_train_*.bin' --val-files 'data/*_val_*.bin'\n"
               "\nOptions are written --name value or --name=value; flags need no value.\n");
    for (const Option *o = config_options; o->name; o++)
        print_option(f, o);
    fprintf(f, "\nPresets, each as the one it is based on with these changes:\n");
    config_print_presets(f);
    fprintf(f, "\nExit status:\n");
    for (int i = 0; exit_statuses[i]; i++)
        fprintf(f, "  %d  %s\n", i, exit_statuses[i]);
}
