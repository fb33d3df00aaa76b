// One text file as many documents: --split of tokenize.
#pragma once
#include "llmc/base/common.h"

// bytes > 0: documents of at most so many, each cut where it reads best; blank_lines: what stands between
// blank lines is a document; neither: a file is one document.
typedef struct {
    bool blank_lines;
    int bytes;
} TextSplit;

enum { SPLIT_MIN_BYTES = 64, SPLIT_MAX_BYTES = 1 << 20 };

// "none", "blank-lines", or a number of bytes. False with a message that names --split.
bool text_split_parse(TextSplit *split, const char *text, Error *e);
static inline bool text_split_none(const TextSplit *split) { return !split->blank_lines && !split->bytes; }

// A document at the start of a text, without white space around it: [begin, end); the next one is looked for
// at `next`.
typedef struct {
    size_t begin, end, next;
} TextPiece;

// The first document of text[0, len), which begins where a document before it ended or where its file begins.
// False: none, or, unless `last` says that the file ends with this text, that it may go on beyond len. So
// documents do not depend on how a file is read.
bool text_split_next(const TextSplit *split, const char *text, size_t len, bool last, TextPiece *piece);
