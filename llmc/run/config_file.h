// Run files: options in a subset of TOML, one a line. --config reads them; every run writes its own.
//
//   # a comment
//   preset = "tiny"                       texts and choices: "..." with TOML's escapes, or '...' as it stands
//   seed = 7                              numbers
//   repeat = true                         flags: true or false
//   window-schedule = [3, 7, 11]          a list is its entries with commas in between
//
// There are no tables, and a value ends on its line.
#pragma once
#include "llmc/run/config.h"

typedef struct {
    int argc;
    char **argv; // ends with NULL. The array and the texts are owned, by arguments_free
} Arguments;

// The command line with the options of the files that it names with --config before its own, which so
// override them. False for a file that cannot be read or has a mistake, with its line in e.
bool config_arguments(Arguments *all, int argc, char **argv, Error *e);
void arguments_free(Arguments *all);
bool arguments_name(int argc, char **argv, const char *option); // not in a file
// Whether something is trained; else the run validates, evaluates or samples with given weights. --sample,
// and --eval with weights, ask for nothing else where no data are named and nothing for every so many steps;
// of what a command line asks, a run file's data do not count. argc 0: files and the command line are one.
bool config_trains(const Config *c, int argc, char **argv);
// Adds the options of such a text as arguments "--name=value".
//   path   of the file, for messages
//   text   (bytes), with a NUL behind it; overwritten
bool config_file_parse(Arguments *all, const char *path, char *text, size_t bytes, Error *e);

// Writes the run file that repeats a run: its preset, and what is given or not as the preset has it, but not
// --stop-after.
//   head   lines of comment, each with "# " and a newline
bool config_file_write(const Config *c, const char *path, const char *head, Error *e);
