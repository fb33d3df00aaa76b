// Validation batches: plain consecutive sequences of one shard.
#pragma once
#include "llmc/data/batch.h"

typedef struct Validation Validation;

// Reads one shard: its first val_tokens + 1 tokens stay in memory, the rest is only checked.
//   glob             must match one file
//   val_tokens       tokens to predict, a positive multiple of sequence_tokens
//   vocab_size, document_token  what the file must have, for instance those of the training loader; 0 and -1:
//                               any
// Returns NULL with an Error: sizes, the refusals of training shards, or fewer than val_tokens + 1 tokens
// (--val-tokens).
Validation *validation_open(const char *glob, int64_t val_tokens, int64_t sequence_tokens, int vocab_size,
                            int document_token, Error *e);
// Tokens of the one shard that `glob` names, from its header; 0 with an Error when there is none.
int64_t validation_tokens_held(const char *glob, Error *e);
const char *validation_path(const Validation *v); // of the shard; owned by it
int validation_num_sequences(const Validation *v);
int validation_vocab_size(const Validation *v);
int validation_document_token(const Validation *v);
uint64_t validation_fingerprint(const Validation *v); // of the tokens that are predicted

// Sequence q: inputs are tokens [S q, S (q+1)), targets those one further, S = sequence_tokens. Each document
// token at a position above 0 begins a document. A part of it is some whole documents, which nothing else of
// the sequence can reach but for the token before them (the smear): N <= S tokens from `first` on, of which
// [begin, end) count. All are positions in the sequence.
typedef struct {
    int first, begin, end;
} ValidationPart;

// The part of sequence q that begins at `begin`, 0 or another part's end; N tells how long it may be, S: the
// whole sequence.
//   batch  N in validation_longest + 1 .. S, or S, allocated and owned by the caller; it has no
//          BatchRows and no prefixes
// Error: q outside 0 .. validation_num_sequences - 1.
bool validation_part(const Validation *v, int q, int begin, Batch *batch, ValidationPart *part, Error *e);
int validation_longest(const Validation *v); // tokens of the longest document within a sequence
void validation_close(Validation *v);        // NULL is allowed
