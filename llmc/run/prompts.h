// The prompts that --sample names.
#pragma once
#include "llmc/base/common.h"

typedef struct {
    char **text; // (count) each owned
    int count;   // at least 1
} Prompts;

// TEXT: the prompt itself. @FILE, or - for standard input: a prompt a line, in which \n is a line break, \t a
// tab and \\ a backslash; empty lines are left out. False: the file cannot be read, or has no prompt, or
// another escape.
bool prompts_read(Prompts *p, const char *sample, Error *e);
void prompts_free(Prompts *p);
