// Figures of a bench as rows of a CSV file, dev/bench/*.csv: date,commit,machine,op,shape,value,unit,command.
// A bench calls figures_open first and figure for each result; rows are appended when it was called with
// --csv FILE.
#pragma once
#include "llmc/base/common.h"
#include "llmc/base/source.h"
#include "llmc/ops/ops.h"
#include <string.h>
#include <time.h>

static struct {
    FILE *file; // NULL: no --csv
    char command[1024];
    int devices; // that take part, of the kind that backend_description() names
} figures = {NULL, "", 1};

// Quoted where RFC 4180 asks for it; control characters become spaces, so that a row is a line.
static void figures_field(const char *text, size_t length, char end)
{
    bool quote = memchr(text, ',', length) || memchr(text, '"', length);
    if (quote)
        putc('"', figures.file);
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '"')
            putc('"', figures.file);
        putc((unsigned char)text[i] < ' ' ? ' ' : text[i], figures.file);
    }
    if (quote)
        putc('"', figures.file);
    putc(end, figures.file);
}

// Takes "--csv FILE" out of the arguments and notes the rest as the command. Fatal when the file cannot be
// written.
static void figures_open(int *argc, char **argv)
{
    const char *path = NULL;
    int kept = 0;
    size_t used = 0;
    for (int i = 0; i < *argc; i++) {
        if (i && !strcmp(argv[i], "--csv")) {
            if (i + 1 == *argc)
                fatal(EXIT_USAGE, "--csv needs the name of a file");
            path = argv[++i];
            continue;
        }
        argv[kept++] = argv[i];
        int n = snprintf(figures.command + used, sizeof figures.command - used, i ? " %s" : "%s", argv[i]);
        used = (size_t)n < sizeof figures.command - used ? used + (size_t)n : sizeof figures.command - 1;
    }
    *argc = kept;
    argv[kept] = NULL;
    if (!path)
        return;
    figures.file = fopen(path, "a");
    if (!figures.file)
        fatal(EXIT_BAD_INPUT, "--csv %s: cannot be written", path);
    fseek(figures.file, 0, SEEK_END);
    if (ftell(figures.file) == 0)
        fputs("date,commit,machine,op,shape,value,unit,command\n", figures.file);
}

// The first digits of the commit that was built, with a "+" for changes that are not in it.
static void figures_commit(void)
{
    char text[16];
    bool known = strspn(program_commit, "0123456789abcdef") >= 7;
    bool changed = strstr(program_commit, "uncommitted") != NULL;
    snprintf(text, sizeof text, "%.7s%s", known ? program_commit : "unknown", changed ? "+" : "");
    figures_field(text, strlen(text), ',');
}

// op: what was timed; shape: on what; value in `unit`. After the backend was opened.
static void figure(const char *op, const char *shape, double value, const char *unit)
{
    if (!figures.file)
        return;
    char text[160];
    time_t now = time(NULL);
    const char *machine = backend_description();
    strftime(text, sizeof text, "%Y-%m-%d", gmtime(&now));
    figures_field(text, strlen(text), ',');
    figures_commit();
    snprintf(text, sizeof text, "%d x %.*s", figures.devices, (int)strcspn(machine, "(,"), machine);
    figures_field(text, text[strlen(text) - 1] == ' ' ? strlen(text) - 1 : strlen(text), ',');
    figures_field(op, strlen(op), ',');
    figures_field(shape, strlen(shape), ',');
    fprintf(figures.file, "%.6g,", value);
    figures_field(unit, strlen(unit), ',');
    figures_field(figures.command, strlen(figures.command), '\n');
    fflush(figures.file);
}
