// Records as presets: their fields and tables as values of options.
#include "llmc/records/record.h"
#include "llmc/run/config_internal.h"
#include <stdlib.h>
#include <string.h>

static char *record_names(void) // owned by the caller
{
    char *list = xstrdup(records[0]->name);
    for (int i = 1; records[i]; i++) {
        char *longer = format_string("%s%s%s", list, records[i + 1] ? ", " : " and ", records[i]->name);
        free(list);
        list = longer;
    }
    return list;
}

bool preset_missing(const char *option, const char *name, Error *e)
{
    char *names = record_names();
    error_set(e, "--%s: there is no preset '%s'; there are %s", option, name, names);
    free(names);
    return false;
}

// The list with one entry more, behind a comma if it is not the first.
static char *append(char *list, int i, const char *entry)
{
    char *longer = format_string("%s%s%s", list, i ? "," : "", entry);
    free(list);
    return longer;
}

static bool set_list(Config *c, const char *option, char *list, bool any, Error *e) // frees the list
{
    bool good = config_set(c, option, any ? list : "", e);
    free(list);
    return good;
}

// A column of the stage table as the text of an option: empty when no row says anything.
static bool set_column(Config *c, const Record *r, const char *option,
                       double (*value)(const StageSpec *stage), int rows, Error *e)
{
    char *list = xstrdup(""), number[32];
    bool any = false;
    for (int i = 0; i < rows; i++) {
        double x = value(&r->stages[i]);
        any = any || x != 0;
        snprintf(number, sizeof number, "%.10g", x);
        list = append(list, i, number);
    }
    return set_list(c, option, list, any, e);
}

static double window_of(const StageSpec *s) { return s->window; }
static double tokens_of(const StageSpec *s) { return s->micro_batch_tokens; }
static double document_of(const StageSpec *s) { return s->max_document; }
static double rate_of(const StageSpec *s) { return s->rate; }
static double rate_start_of(const StageSpec *s) { return s->rate_after; }

static double short_window_of(const StageSpec *s) { return s->window_short; }
static const char *targets_of(const StageSpec *s) { return s->targets ? s->targets : "1"; }
static const char *prefix_of(const StageSpec *s) { return s->prefix ? s->prefix : "0"; }

// A column of texts: empty when all rows have `standard`.
static bool set_texts(Config *c, const Record *r, const char *option, const char *(*text)(const StageSpec *s),
                      const char *standard, Error *e)
{
    char *list = xstrdup("");
    bool any = false;
    for (int i = 0; i < r->num_stages; i++) {
        const char *entry = text(&r->stages[i]);
        any = any || strcmp(entry, standard);
        list = append(list, i, entry);
    }
    return set_list(c, option, list, any, e);
}

static bool apply_stages(Config *c, const Record *r, Error *e)
{
    int all = r->num_stages;
    char extension[16];
    if (!r->stages != !all)
        return error_set(e, "stages and num_stages belong together, but num_stages is %d", all);
    if (!all)
        return true;
    snprintf(extension, sizeof extension, "%d", r->stages[all - 1].window);
    return set_column(c, r, "window-schedule", window_of, all - 1, e) &&
           config_set(c, "window-extension", extension, e) &&
           set_column(c, r, "window-short", short_window_of, all, e) &&
           set_column(c, r, "stage-tokens", tokens_of, all, e) &&
           set_column(c, r, "stage-documents", document_of, all, e) &&
           set_column(c, r, "stage-rates", rate_of, all, e) &&
           set_column(c, r, "rate-starts", rate_start_of, all, e) &&
           set_texts(c, r, "stage-targets", targets_of, "1", e) &&
           set_texts(c, r, "stage-prefix", prefix_of, "0", e);
}

static bool apply_fields(Config *c, const Record *r, Error *e)
{
    for (const Field *f = r->fields; f && f->option; f++) {
        if (!config_set(c, f->option, f->value, e))
            return false;
    }
    return true;
}

bool preset_error(const char *preset, Error *e)
{
    Error why = *e;
    return error_set(e, "preset %s: %s", preset, why.text);
}

bool config_apply_record(Config *c, const Record *r, Error *e)
{
    if (r->based_on && !config_apply_record(c, r->based_on, e))
        return false;
    bool good = apply_stages(c, r, e) && (!r->layers || config_set(c, "network", r->name, e)) &&
                apply_fields(c, r, e);
    return good || preset_error(r->name, e);
}

bool preset_apply(Config *c, const char *name, Error *e)
{
    const Record *r = record_find(name);
    return r ? config_apply_record(c, r, e) : preset_missing("preset", name, e);
}

const Record *config_record(const Config *c) { return record_network(record_find(c->network)); }

const char *config_older_value(const char *name, KnownOption known, const void *of)
{
    const char *skips = known(of, "skips");
    if (strcmp(name, "network") || !skips)
        return NULL;
    for (int i = 0; records[i]; i++) {
        if (records[i]->skips && !strcmp(records[i]->skips, skips))
            return records[i]->name;
    }
    return NULL;
}

int config_total_steps(const Config *c) { return c->num_scheduled + c->num_extension; }
int config_vocab_padded(const Config *c) { return (int)round_up(c->vocab_size, 128); }
