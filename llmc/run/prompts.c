#include "llmc/run/prompts.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void add(Prompts *p, char *text)
{
    p->text = xrealloc(p->text, (size_t)p->count + 1, sizeof *p->text);
    p->text[p->count++] = text;
}

// In place; false for an escape that is none.
static bool unescape(char *line)
{
    char *to = line;
    for (const char *from = line; *from; from++) {
        if (*from != '\\') {
            *to++ = *from;
            continue;
        }
        const char *known = "n\nt\t\\\\", *at = known;
        from++;
        while (*at && *at != *from)
            at += 2;
        if (!*from || !*at)
            return false;
        *to++ = at[1];
    }
    *to = 0;
    return true;
}

static bool read_lines(Prompts *p, FILE *f, const char *name, Error *e)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    bool good = true;
    for (int number = 1; good && (length = getline(&line, &capacity, f)) >= 0; number++) {
        if (memchr(line, 0, (size_t)length))
            good = error_set(e, "--sample: %s:%d: a zero byte; prompts are text", name, number);
        while (length && strchr("\r\n", line[length - 1]))
            line[--length] = 0;
        if (!good || !*line)
            continue;
        add(p, xstrdup(line));
        if (!unescape(p->text[p->count - 1]))
            good = error_set(e, "--sample: %s:%d: a backslash begins none of \\n, \\t, \\\\", name, number);
    }
    if (good && ferror(f))
        good = error_set(e, "--sample: %s: %s", name, strerror(errno));
    free(line);
    if (good && !p->count)
        good =
            error_set(e, "--sample: %s: no prompt: a line is one, and this has none that is not empty", name);
    return good;
}

bool prompts_read(Prompts *p, const char *sample, Error *e)
{
    *p = (Prompts){0};
    if (!strcmp(sample, "-")) {
        if (read_lines(p, stdin, "standard input", e))
            return true;
        prompts_free(p);
        return false;
    }
    if (*sample != '@') {
        add(p, xstrdup(sample));
        return true;
    }
    if (!sample[1])
        return error_set(e, "--sample @: the name of a file is missing, as in --sample @prompts.txt");
    FILE *f = fopen(sample + 1, "r");
    if (!f)
        return error_set(e, "--sample: %s: %s", sample + 1, strerror(errno));
    bool good = read_lines(p, f, sample + 1, e);
    fclose(f);
    if (!good)
        prompts_free(p);
    return good;
}

void prompts_free(Prompts *p)
{
    for (int i = 0; i < p->count; i++)
        free(p->text[i]);
    free(p->text);
    *p = (Prompts){0};
}
