// Options of tokenize.
#pragma once
#include "llmc/text/text_source.h"
#include <stdint.h>

typedef struct {
    const char *vocab, *out, *name, *val_out;
    int64_t shard_tokens, val_tokens;
    double val_fraction;
    int threads;
    TextFormat format;
    TextSplit split;
    const char *split_text; // as given
    const char **inputs;    // (input_count)
    int input_count;
} TokenizeOptions;

// Bad options end the program with one line, --help with what it prints. inputs: owned by the caller.
TokenizeOptions tokenize_options(int argc, char **argv);
