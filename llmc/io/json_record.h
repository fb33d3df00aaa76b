// One line of JSON: an object built member by member. Numbers are written in the shortest form that reads
// back exactly, which the JSON library cannot; strings are the library's.
#pragma once
#include "llmc/base/common.h"

typedef struct JsonRecord JsonRecord;

// {"event":"<kind>", or without kind {
JsonRecord *json_record(const char *kind);
// In a list names are NULL.
// text: any bytes; those that are not UTF-8 become U+FFFD
void json_text(JsonRecord *r, const char *name, const char *text);
void json_number(JsonRecord *r, const char *name, double x);                    // null when it is not finite
void json_numbers(JsonRecord *r, const char *name, const double *x, int count); // a list
void json_flag(JsonRecord *r, const char *name, bool on);
// Members between the two belong to an object of that name.
void json_begin(JsonRecord *r, const char *name);
void json_end(JsonRecord *r);
// The same of a list.
void json_begin_list(JsonRecord *r, const char *name);
void json_end_list(JsonRecord *r);
// The whole line with its newline, owned by the caller; *bytes: its length. Frees the record.
char *json_line(JsonRecord *r, size_t *bytes);
