// Training batches from token shards, aligned to documents.
//
// Training rule, per shard. A step takes a group of `micro_batches` micro-batches one after another, wherever
// they run: rank r's a-th is number a*R + r. A micro-batch of N begins at the next unread document and
// gathers exactly N + 1 tokens: of each document its first tokens, at most `max_document` and at most what is
// left; the rest of the document is dropped for good. Inputs are the first N, targets the last N. A group
// that the shard cannot complete is dropped whole and begins again in the next shard; a shard that has not
// one is passed over, with a note. Every rank plans whole groups by itself, so nothing is communicated and
// the stream is the same for every number of ranks. A step may also be made of several smaller groups: with
// groups of G the stream is the one that the Python original deals out on G GPUs.
#pragma once
#include "llmc/data/batch.h"
#include "llmc/data/shard.h"

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
// The first call of a step waits if the documents it needs are not indexed yet. Error: end of the data, no
// shard that can supply one group, or what the background thread found: an id outside the vocabulary, no
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
