#include "llmc/io/json_record.h"
#include "llmc/base/utf8.h"
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct JsonRecord {
    FILE *f; // writes into text
    char *text;
    size_t bytes;
    bool first; // no member of the open object is written yet
};

static void put_string(JsonRecord *r, const char *text)
{
    size_t bytes, replaced;
    char *valid = utf8_repair(text, strlen(text), &bytes, &replaced); // paths may be in any encoding
    json_t *value = json_stringn(valid, bytes);
    char *quoted = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    if (!quoted)
        fatal(EXIT_BAD_INPUT, "out of host memory for a line of JSON");
    fputs(quoted, r->f);
    free(quoted);
    free(valid);
    json_decref(value);
}

static void put_name(JsonRecord *r, const char *name)
{
    if (!r->first)
        fputc(',', r->f);
    r->first = false;
    if (!name)
        return;
    put_string(r, name);
    fputc(':', r->f);
}

JsonRecord *json_record(const char *kind)
{
    JsonRecord *r = xcalloc(1, sizeof *r);
    r->f = open_memstream(&r->text, &r->bytes);
    if (!r->f)
        fatal(EXIT_BAD_INPUT, "out of host memory for a line of JSON");
    fputc('{', r->f);
    r->first = true;
    if (kind)
        json_text(r, "event", kind);
    return r;
}

void json_text(JsonRecord *r, const char *name, const char *text)
{
    put_name(r, name);
    put_string(r, text);
}

static void put_number(JsonRecord *r, double x)
{
    char *text = isfinite(x) ? format_number(x) : xstrdup("null");
    fputs(text, r->f);
    free(text);
}

void json_number(JsonRecord *r, const char *name, double x)
{
    put_name(r, name);
    put_number(r, x);
}

void json_numbers(JsonRecord *r, const char *name, const double *x, int count)
{
    put_name(r, name);
    for (int i = 0; i < count; i++) {
        fputc(i ? ',' : '[', r->f);
        put_number(r, x[i]);
    }
    fputs(count ? "]" : "[]", r->f);
}

void json_flag(JsonRecord *r, const char *name, bool on)
{
    put_name(r, name);
    fputs(on ? "true" : "false", r->f);
}

static void open_with(JsonRecord *r, const char *name, char bracket)
{
    put_name(r, name);
    fputc(bracket, r->f);
    r->first = true;
}

static void close_with(JsonRecord *r, char bracket)
{
    fputc(bracket, r->f);
    r->first = false;
}

void json_begin(JsonRecord *r, const char *name) { open_with(r, name, '{'); }
void json_end(JsonRecord *r) { close_with(r, '}'); }
void json_begin_list(JsonRecord *r, const char *name) { open_with(r, name, '['); }
void json_end_list(JsonRecord *r) { close_with(r, ']'); }

char *json_line(JsonRecord *r, size_t *bytes)
{
    fputs("}\n", r->f);
    bool good = !ferror(r->f) && fclose(r->f) == 0;
    if (!good)
        fatal(EXIT_BAD_INPUT, "out of host memory for a line of JSON");
    char *text = r->text;
    *bytes = r->bytes;
    free(r);
    return text;
}
