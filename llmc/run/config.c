// The command line.
#include "llmc/run/config_file.h"
#include "llmc/run/config_internal.h"
#include <stdlib.h>
#include <string.h>

bool argument_take(int argc, char **argv, int *i, const Option **o, const char **value, Error *e)
{
    const char *arg = argv[(*i)++];
    if (strncmp(arg, "--", 2)) {
        if (*o && (*o)->type == OPT_TEXT)
            return error_set(e,
                             "unexpected argument '%s' behind --%s; a value with * or spaces needs quotes, "
                             "options start with --, see --help",
                             arg, (*o)->name);
        return error_set(e, "unexpected argument '%s'; options start with --, see --help", arg);
    }
    char name[64];
    size_t length = strcspn(arg + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)min_i64((int64_t)length, 63), arg + 2);
    *o = option_find(name);
    if (!*o)
        return error_set(e, "unknown option --%s; see --help", name);
    if (arg[2 + length] == '=')
        *value = arg + 3 + length;
    else if ((*o)->type == OPT_FLAG)
        *value = "1";
    else if (*i < argc)
        *value = argv[(*i)++];
    else
        return error_set(e, "--%s: needs a value", name);
    return true;
}

// Notes which options the command line names, and takes the preset.
static bool look_ahead(Config *c, int argc, char **argv, Error *e)
{
    const Option *o = NULL;
    const char *value = NULL;
    for (int i = 1; i < argc;) {
        if (!argument_take(argc, argv, &i, &o, &value, e))
            return false;
        c->given[o - config_options] = true;
        if (!strcmp(o->name, "preset") && !option_set(c, o, value, e))
            return false;
    }
    return true;
}

bool option_of_process(const Config *c, const Option *o)
{
    static const char own[] =
        " config out init-from save-init resume stop-at stop-after eval-only eval-items describe profile "
        "profile-energy gpus ranks device timeout "
        "graphs threads self-check verbose help ";
    char name[64];
    snprintf(name, sizeof name, " %s ", o->name);
    if (strstr(own, name))
        return true;
    if (!strcmp(o->name, "sample") || !strcmp(o->name, "eval"))
        return config_given(c, "eval-only") || config_given(c, "describe") || !config_trains(c, 0, NULL);
    if (!strcmp(o->name, "epochs"))
        return config_given(c, "repeat"); // these two exclude each other
    return !strcmp(o->name, "repeat") && config_given(c, "epochs");
}

static bool take_known(Config *c, KnownOption known, const void *of, Error *e)
{
    if (!preset_apply(c, known(of, "preset"), e))
        return false;
    for (int i = 0; config_options[i].name; i++) {
        const Option *o = &config_options[i];
        const char *value = known(of, o->name);
        if (!value)
            value = config_older_value(o->name, known, of);
        // How no text at all is written; of an option that presets set it is a text without letters.
        bool none = value && o->type == OPT_TEXT && !*value && !*(char **)((char *)c + o->offset);
        if (!value || none || c->given[i] || option_of_process(c, o))
            continue;
        if (!option_set(c, o, value, e))
            return false;
    }
    return true;
}

static bool check_sources(const Config *c, Error *e)
{
    if (*c->init_from && *c->resume)
        return error_set(
            e, "--init-from and --resume exclude each other: a checkpoint holds the weights already");
    if (*c->resume && *c->save_init)
        return error_set(e, "--save-init needs initial weights, and --resume has none");
    return true;
}

bool config_read(Config *c, int argc, char **argv, KnownOption known, const void *of, Error *e)
{
    const Option *o = NULL;
    const char *value = NULL;
    memset(c, 0, sizeof *c);
    for (int i = 0; config_options[i].name; i++)
        if (config_options[i].standard && !option_set(c, &config_options[i], config_options[i].standard, e))
            return false;
    if (!look_ahead(c, argc, argv, e))
        return false;

    const char *preset = known ? known(of, "preset") : NULL;
    bool takes_over = preset && (!config_given(c, "preset") || !strcmp(preset, c->preset));
    if (takes_over ? !take_known(c, known, of, e) : !preset_apply(c, c->preset, e))
        return false;

    for (int i = 1; i < argc;) {
        if (!argument_take(argc, argv, &i, &o, &value, e))
            return false;
        if (!option_set(c, o, value, e))
            return false;
    }
    return check_sources(c, e);
}

bool config_parse(Config *c, int argc, char **argv, Error *e)
{
    return config_read(c, argc, argv, NULL, NULL, e) && (c->help || config_check(c, e));
}
