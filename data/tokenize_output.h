// What tokenize writes: the shards of the training set, and the one of the validation set.
#pragma once
#include "data/tokenize_options.h"
#include "llmc/data/shard_writer.h"
#include "llmc/text/tokenizer.h"

enum { MAX_DOCUMENT = 2048 }; // tokens of a document that training uses, by default

typedef struct {
    const TokenizeOptions *o;
    const Tokenizer *t;
    char *prefix;
    char *lock_path;
    int lock;           // the descriptor; -1: not locked
    ShardWriter *train; // (train_count), the last one is growing
    int train_count;
    ShardWriter val, *current; // current: where the document being written goes
    int64_t documents, tokens;
    int64_t document_tokens, used; // of the document being written; of those before it, what training uses
} Output;

// Every shard is a temporary file until output_publish. o, t: must outlive it. False, with a line, when --out
// is no place for shards, another call is writing this data set, or it would replace one of the inputs.
bool output_open(Output *out, const TokenizeOptions *o, const Tokenizer *t, const TextFileList *inputs,
                 Error *e);
// Ends the document before, and sets `current` to where the next one goes.
bool output_begin_document(Output *out, Error *e);
void output_end_document(Output *out); // counts what training uses of it
// Gives all shards their names and removes an older data set's. False, with a line, when there is nothing to
// train on, or nothing of what was asked for.
bool output_publish(Output *out, Error *e);
void output_print(const Output *out); // the shards on standard output, and notes on them
void output_free(Output *out);        // also removes what was not published
