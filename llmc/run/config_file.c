#include "llmc/run/config_file.h"
#include "llmc/base/utf8.h"
#include "llmc/run/config_internal.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FILE_BYTES = 1 << 20 };
static const char blanks[] = " \t\r";

// ---- values -----------------------------------------------------------------------------------------------

typedef enum { VALUE_TEXT, VALUE_NUMBER, VALUE_FLAG } ValueKind;

// What a line still holds, and the value found so far. A value is no longer than what it is written as.
typedef struct {
    const char *at;
    char *value; // owned by the caller, room for the whole line
    size_t length;
} Line;

static void skip_blanks(Line *l) { l->at += strspn(l->at, blanks); }

static void put_byte(Line *l, unsigned byte) { l->value[l->length++] = (char)byte; }

// A character behind \u or \U, as UTF-8.
static bool take_code(Line *l, int digits, Error *e)
{
    char hex[9] = "";
    memcpy(hex, l->at, strnlen(l->at, (size_t)digits));
    unsigned long code = strtoul(hex, NULL, 16);
    bool good = strspn(hex, "0123456789abcdefABCDEF") == (size_t)digits;
    if (!good || code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return error_set(e, "\\%c%s is no character", digits == 4 ? 'u' : 'U', hex);
    l->at += digits;
    l->length += utf8_put(l->value + l->length, (uint32_t)code);
    return true;
}

static bool take_escape(Line *l, Error *e)
{
    static const char letters[] = "\"\\btnfr", bytes[] = "\"\\\b\t\n\f\r";
    char letter = *l->at;
    const char *known = letter ? strchr(letters, letter) : NULL;
    l->at += letter != 0;
    if (known)
        put_byte(l, (unsigned char)bytes[known - letters]);
    else if (letter == 'u' || letter == 'U')
        return take_code(l, letter == 'u' ? 4 : 8, e);
    else
        return error_set(e, "a text has \\%.1s, which is no escape of TOML; \\\\ is a backslash", l->at - 1);
    return true;
}

static bool take_text(Line *l, Error *e)
{
    char quote = *l->at++;
    if (l->at[0] == quote && l->at[1] == quote)
        return error_set(e, "texts of several lines are not known here");
    while (*l->at && *l->at != quote) {
        char c = *l->at++;
        if (c == '\\' && quote == '"') {
            if (!take_escape(l, e))
                return false;
        } else {
            put_byte(l, (unsigned char)c);
        }
    }
    if (*l->at++ == quote)
        return true;
    return error_set(e, "a text has no %c at its end", quote);
}

// A value that is no list.
static bool take_single(Line *l, ValueKind *kind, Error *e)
{
    size_t length = strcspn(l->at, " \t\r,]#");
    bool on = length == 4 && !memcmp(l->at, "true", 4), off = length == 5 && !memcmp(l->at, "false", 5);
    *kind = VALUE_TEXT;
    if (*l->at == '"' || *l->at == '\'')
        return take_text(l, e);
    *kind = on || off ? VALUE_FLAG : VALUE_NUMBER;
    if (on || off) {
        put_byte(l, on ? '1' : '0');
    } else if (length && strspn(l->at, "+-.0123456789eE") >= length) {
        memcpy(l->value + l->length, l->at, length);
        l->length += length;
    } else {
        return error_set(e, "'%.*s' is no value; texts stand in quotes", (int)length, l->at);
    }
    l->at += length;
    return true;
}

static bool take_list(Line *l, Error *e)
{
    ValueKind kind;
    l->at++;
    skip_blanks(l);
    while (*l->at && *l->at != ']') {
        if (!take_single(l, &kind, e))
            return false;
        skip_blanks(l);
        if (*l->at == ',') {
            l->at++;
            skip_blanks(l);
            if (*l->at != ']')
                put_byte(l, ',');
        } else if (*l->at != ']') {
            break;
        }
    }
    if (*l->at++ != ']')
        return error_set(e, "a list has no ] at its end; it is written on one line, as [3, 7, 11]");
    return true;
}

static bool is_text(const Option *o)
{
    return o->type == OPT_TEXT || o->type == OPT_EVALS || o->type == OPT_CHOICE;
}

// The value of an option, of the kind that it takes.
static bool take_value(Line *l, const Option *o, Error *e)
{
    ValueKind kind = VALUE_TEXT, wanted = o->type == OPT_FLAG ? VALUE_FLAG
                                          : is_text(o)        ? VALUE_TEXT
                                                              : VALUE_NUMBER;
    bool list = *l->at == '[' && is_text(o) && o->type != OPT_CHOICE;
    Error sub;
    if (list ? !take_list(l, &sub) : !take_single(l, &kind, &sub))
        return error_set(e, "%s: %s", o->name, sub.text);
    if (kind == wanted)
        return true;
    return error_set(e, "%s needs %s", o->name,
                     wanted == VALUE_FLAG   ? "true or false"
                     : wanted == VALUE_TEXT ? "a text in quotes"
                                            : "a number without quotes");
}

// ---- files ------------------------------------------------------------------------------------------------

static void add_argument(Arguments *all, char *text)
{
    all->argv = xrealloc(all->argv, (size_t)all->argc + 2, sizeof *all->argv);
    all->argv[all->argc++] = text;
    all->argv[all->argc] = NULL;
}

// "name =", of an option that a file may have. NULL: there is none.
static const Option *take_name(Line *l, Error *e)
{
    char name[64];
    size_t length = strspn(l->at, "abcdefghijklmnopqrstuvwxyz0123456789-");
    snprintf(name, sizeof name, "%.*s", (int)min_i64((int64_t)length, 63), l->at);
    l->at += length;
    skip_blanks(l);
    if (!length || *l->at++ != '=') {
        error_set(e, "a line is  name = value  or a comment, # ...");
        return NULL;
    }
    skip_blanks(l);
    const Option *o = option_find(name);
    if (!o)
        error_set(e, "unknown option '%s'; see --help", name);
    else if (!strcmp(name, "config") || !strcmp(name, "help"))
        error_set(e, "%s: belongs on the command line", name);
    else
        return o;
    return NULL;
}

// One line as an argument. lines[o]: where an option was given already; 0: nowhere.
static bool take_line(Arguments *all, Line *l, int number, int *lines, Error *e)
{
    static Config scratch; // values are tried on it
    skip_blanks(l);
    if (!*l->at || *l->at == '#')
        return true;
    const Option *o = take_name(l, e);
    if (!o || !take_value(l, o, e))
        return false;
    skip_blanks(l);
    if (*l->at && *l->at != '#')
        return error_set(e, "%s: more than a value: '%s'", o->name, l->at);
    l->value[l->length] = 0;
    int *line = &lines[o - config_options];
    if (*line)
        return error_set(e, "%s: is given already in line %d", o->name, *line);
    *line = number;
    if (!option_set(&scratch, o, l->value, e))
        return false;
    add_argument(all, format_string("--%s=%s", o->name, l->value));
    return true;
}

bool config_file_parse(Arguments *all, const char *path, char *text, size_t bytes, Error *e)
{
    int lines[MAX_OPTIONS] = {0}, number = 0;
    bool good = true;
    Error sub;
    if (memchr(text, 0, bytes))
        return error_set(e, "%s: is no text", path);
    // A byte order mark, as editors on Windows write it.
    bool marked = bytes >= 3 && !memcmp(text, "\xEF\xBB\xBF", 3);
    for (char *line = text + (marked ? 3 : 0); line && good;) {
        char *end = strchr(line, '\n');
        if (end)
            *end++ = 0;
        Line l = {.at = line, .value = xcalloc(strlen(line) + 1, 1)};
        good = take_line(all, &l, ++number, lines, &sub);
        free(l.value);
        line = end;
    }
    return good || error_set(e, "%s:%d: %s", path, number, sub.text);
}

static bool read_file(Arguments *all, const char *path, Error *e)
{
    int64_t bytes;
    int fd = open_regular("the run file", path, &bytes, e);
    if (fd < 0)
        return false;
    size_t room = (size_t)min_i64(bytes, MAX_FILE_BYTES);
    char *text = xcalloc(room + 1, 1);
    ssize_t held = read(fd, text, room);
    int code = errno;
    close(fd);
    bool good = held >= 0 && bytes <= MAX_FILE_BYTES;
    if (held < 0)
        error_set(e, "cannot read the run file %s: %s", path, strerror(code));
    else if (!good)
        error_set(e, "%s: no run file is that large", path);
    good = good && config_file_parse(all, path, text, (size_t)held, e);
    free(text);
    return good;
}

// What an unset variable of a script makes of "$folder" would train anew, or evaluate nothing. --init-from
// and --save-init may be empty: so scripts/sweep takes back what a run file says.
static bool check_given(const Option *o, const char *value, Error *e)
{
    bool empty = !*value && (!strcmp(o->name, "resume") || !strcmp(o->name, "eval"));
    return !empty || error_set(e, "--%s: is empty; name a %s, or leave the option out", o->name,
                               *o->name == 'r' ? "checkpoint or a folder" : "file, as text=FILE");
}

bool config_arguments(Arguments *all, int argc, char **argv, Error *e)
{
    const Option *o = NULL;
    const char *value = NULL;
    *all = (Arguments){0};
    add_argument(all, xstrdup(argv[0]));
    for (int i = 1; i < argc;) {
        if (!argument_take(argc, argv, &i, &o, &value, e) || !check_given(o, value, e))
            return false;
        if (!strcmp(o->name, "config") && !read_file(all, value, e))
            return false;
    }
    for (int i = 1; i < argc; i++)
        add_argument(all, xstrdup(argv[i]));
    return true;
}

void arguments_free(Arguments *all)
{
    for (int i = 0; i < all->argc; i++)
        free(all->argv[i]);
    free(all->argv);
}

bool arguments_name(int argc, char **argv, const char *option)
{
    const Option *o = NULL;
    const char *value;
    Error e;
    for (int i = 1; i < argc && argument_take(argc, argv, &i, &o, &value, &e);) {
        if (!strcmp(o->name, option))
            return true;
    }
    return false;
}

static bool asks_alone(const Config *c, int argc, char **argv, const char *option)
{
    bool line = arguments_name(argc, argv, option);
    bool data = line ? arguments_name(argc, argv, "train-files") : config_given(c, "train-files");
    bool every = line ? arguments_name(argc, argv, "eval-every") : config_given(c, "eval-every");
    return config_given(c, option) && !data && !every;
}

bool config_trains(const Config *c, int argc, char **argv)
{
    bool weights = config_given(c, "init-from") || config_given(c, "resume");
    return !c->eval_only && !c->describe && !asks_alone(c, argc, argv, "sample") &&
           !(weights && asks_alone(c, argc, argv, "eval"));
}

// ---- writing ----------------------------------------------------------------------------------------------

static void write_text(FILE *f, const char *text)
{
    fputc('"', f);
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            fprintf(f, "\\%c", *p);
        else if (*p < ' ' || *p == 127)
            fprintf(f, "\\u%04x", *p);
        else
            fputc(*p, f);
    }
    fputc('"', f);
}

static void write_option(FILE *f, const Option *o, const char *value)
{
    fprintf(f, "%s = ", o->name);
    if (o->type == OPT_FLAG)
        fputs(*value == '1' ? "true" : "false", f);
    else if (is_text(o))
        write_text(f, value);
    else
        fputs(value, f);
    fputc('\n', f);
}

// The data are always named: a prompt without them is a run without training. --stop-after limits the time of
// one process, as a signal does, and is no part of the run.
static bool is_written(const Config *c, const Config *preset, int index)
{
    const Option *o = &config_options[index];
    if (!strcmp(o->name, "config") || !strcmp(o->name, "help") || !strcmp(o->name, "stop-after"))
        return false;
    if (c->given[index] || !strcmp(o->name, "preset") || !strcmp(o->name, "train-files"))
        return true;
    char *value = config_option_value(c, index), *standard = config_option_value(preset, index);
    bool differs = strcmp(value, standard);
    free(value);
    free(standard);
    return differs && !option_of_process(c, o);
}

bool config_file_write(const Config *c, const char *path, const char *head, Error *e)
{
    Config preset;
    char *argv[] = {"", "--preset", (char *)c->preset};
    if (!config_read(&preset, 3, argv, NULL, NULL, e))
        return false;
    FILE *f = fopen(path, "we");
    if (!f)
        return error_set(e, "cannot write %s: %s", path, strerror(errno));
    fputs(head, f);
    for (int i = 0; config_options[i].name; i++) {
        char *value = config_option_value(c, i);
        if (is_written(c, &preset, i))
            write_option(f, &config_options[i], value);
        free(value);
    }
    bool failed = ferror(f);
    if (fclose(f) == 0 && !failed)
        return true;
    error_set(e, "cannot write %s: %s", path, strerror(errno));
    unlink(path);
    return false;
}
