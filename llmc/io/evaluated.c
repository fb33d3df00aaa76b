#include "llmc/io/evaluated.h"
#include <math.h>
#include <stdlib.h>

// Perplexities of an untrained model have no end.
static int put_value(char *out, size_t room, const char *before, double x)
{
    return snprintf(out, room, fabs(x) < 1e5 ? "%s%.4f" : "%s%.4g", before, x);
}

char *evaluated_text(const Evaluated *r)
{
    char measures[MAX_MEASURES * 100] = "", file[4096];
    size_t n = 0, room = sizeof measures;
    for (int i = 0; i < r->count; i++) {
        const Measure *m = &r->measure[i];
        n += (size_t)snprintf(measures + n, room - n, "%s%s", i ? ", " : "", m->name);
        n += (size_t)put_value(measures + n, room - n, " ", m->value);
        if (isfinite(m->error))
            n += (size_t)put_value(measures + n, room - n, " +- ", m->error);
    }
    escape_text(file, sizeof file, r->file);
    return format_string("%s %s: %s; %lld items, %.1f s", r->task, file, measures, (long long)r->items,
                         r->seconds);
}

void evaluated_print(const Evaluated *r)
{
    char *text = evaluated_text(r);
    printf("%s\n", text);
    flush_output(stdout);
    free(text);
}

void evaluated_json(const Evaluated *r, JsonRecord *record)
{
    json_text(record, "task", r->task);
    json_text(record, "file", r->file);
    for (int i = 0; i < r->count; i++) {
        char *error = format_string("%s_stderr", r->measure[i].name);
        json_number(record, r->measure[i].name, r->measure[i].value);
        json_number(record, error, r->measure[i].error);
        free(error);
    }
    json_number(record, "items", (double)r->items);
    json_number(record, "seconds", r->seconds);
}
