// Inside of the options, shared by config*.c.
#pragma once
#include "llmc/run/config.h"

// OPT_EVALS: a list for eval_list_parse; each that is set is added.
typedef enum { OPT_INT, OPT_INT64, OPT_FLOAT, OPT_TEXT, OPT_FLAG, OPT_CHOICE, OPT_EVALS } OptionType;

typedef struct {
    const char *name;
    OptionType type;
    size_t offset;
    const char *standard; // default, as text; NULL: none, or that of the preset
    double low, high;     // bounds of numbers
    const char *choices;  // for OPT_CHOICE: "a|b|c", the value is the index
    const char *help;
    bool shapes_model;   // must agree between a checkpoint and the run that resumes it
    const char *section; // starts a group in --help
} Option;

extern const Option config_options[]; // ends with one without a name

const Option *option_find(const char *name); // NULL: there is none
bool option_is_number(const Option *o);
// Its default; of an option that presets set, the value of the first preset, on which the others are based,
// as it is written there if it is. Owned by the caller.
char *option_standard(const Option *o);
void config_print_preset(FILE *f, const struct Record *r); // some lines
void config_print_presets(FILE *f);
extern const char *const exit_statuses[]; // what each of them means; NULL after the last
bool option_set(Config *c, const Option *o, const char *text, Error *e);
// Options that say what this process does, with which files and on which machine: not part of a run that goes
// on.
bool option_of_process(const Config *c, const Option *o);
// One argument, "--name value", "--name=value" or a flag; *i moves past what was taken. *o: the option
// before, or NULL; then the argument's.
bool argument_take(int argc, char **argv, int *i, const Option **o, const char **value, Error *e);
// Options by a record's name; false with a line that names the records when there is none.
bool preset_apply(Config *c, const char *name, Error *e);
bool preset_missing(const char *option, const char *name, Error *e); // that line
bool preset_error(const char *preset, Error *e); // puts the preset's name in front; returns false
// The same where the error is that of the preset without any other option, `alone`; returns false.
bool config_error_of(const Config *alone, Error *e);
