// Batches from token shards: document-aligned ones for training, plain consecutive sequences for validation.
//
// Training rule, per shard. A step takes a group of `micro_batches` micro-batches one after another, wherever
// they run: rank r's a-th is number a*R + r. A micro-batch of N begins at the next unread document and
// gathers exactly N + 1 tokens: of each document its first tokens, at most `max_document` and at most what is
// left; the rest of the document is dropped for good. Inputs are the first N, targets the last N. A group
// that the shard cannot complete is dropped whole and begins again in the next shard. Every rank plans whole
// groups by itself, so nothing is communicated and the stream is the same for every number of ranks. A step
// may also be made of several smaller groups: with groups of G the stream is the one that the Python original
// deals out on G GPUs.
#pragma once
#include "llmc/base/common.h"
#include "llmc/data/shard.h"

enum {
    LOADER_MICRO_BATCH_TOKENS = 32768,
    LOADER_MAX_BATCH_TOKENS = 1 << 28, // positions and offsets in a block are int32
};

// A place in the stream between two steps: the first document that the next step may use.
typedef struct {
    int32_t epoch, shard; // 0 based; shard counts the files in name order
    int64_t document;     // 0 based, within the shard; the number of documents when the shard is used up
} LoaderPosition;

// ---- batch ------------------------------------------------------------------------------------------------

// One packed sequence. The six arrays lie in one block of int32, so that one transfer brings them to a
// device; each begins at a multiple of BATCH_ALIGN ints: the i-th, in the order below, at ints
// batch_offset(N, i).
enum { BATCH_ALIGN = 32, BATCH_ARRAYS = 6 };
typedef struct {
    int N;               // tokens
    int num_docs;        // segments in cu_seqlens, 1 .. N
    int num_rows;        // distinct ids among tokens, 1 .. N; 0 in validation batches, which need no gradient
    int32_t *tokens;     // (N) input ids
    int32_t *targets;    // (N) the id that follows each input
    int32_t *cu_seqlens; // (num_docs + 1), capacity N + 1: rises strictly from 0 to N
    int32_t *order;      // (N) positions sorted by token id, rising within an id: lets the gradient of an
                         // embedding row be
                         //     summed in a fixed order, without atomics
    int32_t *row_token;  // (num_rows) the distinct ids, rising
    int32_t *row_start;  // (num_rows + 1), capacity N + 1: order[row_start[i] .. row_start[i+1]) are the
                         // positions of row_token[i]
    int32_t *block;      // (block_ints) all of the above, owned by the batch
    size_t block_ints;
    uint64_t *scratch; // (N) used to sort, owned by the batch
    LoaderPosition
        position; // training: where the step of this batch begins; seeking there gives the whole step again
} Batch;

size_t batch_offset(int N, int array); // in ints; array 0 tokens .. 5 row_start, 6: size of the block
void batch_alloc(Batch *b, int N);     // zeroed; N in 1 .. LOADER_MAX_BATCH_TOKENS
void batch_free(Batch *b);

// Fills order, row_token, row_start and num_rows from tokens, whose ids must lie in 0 .. 65535. Two-pass
// radix sort: O(N).
void batch_sort_rows(Batch *b);

// ---- training ---------------------------------------------------------------------------------------------

typedef struct {
    const char *files_glob;  // one path, or a pattern; every file that matches, in byte order of the names
    int micro_batches;       // of a step, over all ranks; a multiple of num_ranks
    int group_micro_batches; // of a group, a divisor of micro_batches; 0: all of a step
    int micro_batch_tokens;  // N; the largest, where steps differ
    int rank, num_ranks;
    int max_document; // tokens used of a document at most
    bool repeat;      // begin again after the last shard, without end
    int epochs;       // above 0: passes over the files, whatever `repeat` says; 0: one pass, or endless with
                      // `repeat`
    int vocab_size;   // that the shards must have; 0: take it from the first one
    // For tests; 0 and NULL otherwise.
    int64_t chunk_tokens; // tokens indexed at a time; no value changes the batches
    ShardChunkHook chunk_hook;
    void *chunk_hook_context;
} LoaderOptions;

typedef struct Loader Loader;

// Finds the files and checks name, size and header of each, and that all have one vocabulary and enough
// tokens for a group. Of the tokens a few are looked at: reading begins with the first loader_next or
// loader_seek, so that a clock started in between counts it.
// Returns NULL with an Error on impossible sizes or ranks, no matching file, or a file that shard_open
// refuses.
Loader *loader_open(const LoaderOptions *options, Error *e);

// From the next step on: tokens of a micro-batch, at most those of loader_open, and of a document. Only
// between steps.
void loader_set_sizes(Loader *l, int micro_batch_tokens, int max_document);

// This rank's next micro-batch, micro_batches / num_ranks of them in a step.
//   batch  N = micro_batch_tokens, allocated and owned by the caller
// The first call of a step waits if the documents it needs are not indexed yet. Error: end of the data, a
// shard that cannot supply one group, or what the background thread found: an id outside the vocabulary, no
// document start, a failed read. After an error only loader_close is of use.
bool loader_next(Loader *l, Batch *batch, Error *e);

// Where the next step is looked for; only between steps. For a batch fetched ahead of its step use
// batch->position.
LoaderPosition loader_position(const Loader *l);

// Continues from a position, as if the loader had come there by loader_next; reads the shard up to it. Error:
// a position outside the files or epochs, with its numbers; and what loader_next refuses.
bool loader_seek(Loader *l, LoaderPosition position, Error *e);

// Steps from the first document on that the files give in the passes allowed, `most` at most; reads what they
// take. A fault in a file ends the count: the run will meet it. Afterwards only loader_close is of use.
int64_t loader_count_steps(Loader *l, int64_t most);

int loader_vocab_size(const Loader *l);
int loader_document_token(const Loader *l);
int64_t loader_num_tokens(const Loader *l);   // in all files, from their headers
char *loader_describe(const Loader *l);       // one line for a log; owned by the caller
uint64_t loader_fingerprint(const Loader *l); // of the files' sizes and of some of their tokens, in order

// The files as a line of text each, for a checkpoint; owned by the caller. And whether a run that wrote such
// a text and came to position p can go on with the files of l, wherever they lie: the same ones in the same
// order, or, in its first pass, more behind them. Error: names the first difference.
char *loader_shards(const Loader *l);
bool loader_continues(const Loader *l, const char *shards, LoaderPosition p, Error *e);
void loader_close(Loader *l); // ends the background threads; NULL is allowed

// ---- validation -------------------------------------------------------------------------------------------

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
//   batch  N in validation_longest + 1 .. S, or S, allocated and owned by the caller; num_rows is 0
// Error: q outside 0 .. validation_num_sequences - 1.
bool validation_part(const Validation *v, int q, int begin, Batch *batch, ValidationPart *part, Error *e);
int validation_longest(const Validation *v); // tokens of the longest document within a sequence
void validation_close(Validation *v);        // NULL is allowed
