// Records of JSON lines: one line, one object with a text in its field "text".
#pragma once
#include "llmc/base/common.h"

typedef struct {
    char *text; // the decoded text, (capacity) bytes
    char *bare; // the record without the contents of its values that are strings or numbers, (capacity) bytes
    size_t capacity;
} JsonlRecord; // start from {0}; one a thread

// The field "text" of the record line[0, len): *text points to *text_len bytes, valid until the next call.
// What was not UTF-8 in the line is not UTF-8 in the text either; half of a surrogate pair becomes the byte
// 0xFF, which is none in any place. So whoever repairs the text counts both. False with a message that names
// no file: not one JSON object, a name given twice, no such field, or one that is no string.
bool jsonl_text(JsonlRecord *r, const char *line, size_t len, const char **text, size_t *text_len, Error *e);
void jsonl_record_free(JsonlRecord *r);
