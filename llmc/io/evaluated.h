// The result of an evaluation, as logs and the console show it.
#pragma once
#include "llmc/io/json_record.h"

typedef struct {
    const char *name;
    double value, error; // standard error; NAN: not known
} Measure;

enum { MAX_MEASURES = 2 };
typedef struct {
    const char *task, *file; // owned by the evaluation
    Measure measure[MAX_MEASURES];
    int count; // of measures
    int64_t items;
    double seconds;
} Evaluated;

// "hellaswag FILE: accuracy 0.2859 +- 0.0045, ...; 10042 items, 1.9 s", one line whatever the file's name is.
// Owned by the caller.
char *evaluated_text(const Evaluated *r);
void evaluated_print(const Evaluated *r); // the same as a line of standard output
// Members "task", "file", each measure and, with _stderr behind its name, its standard error, "items",
// "seconds".
void evaluated_json(const Evaluated *r, JsonRecord *record);
