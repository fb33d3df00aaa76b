// One packed sequence, and what the model reads beside its tokens, all of it made on the host.
#pragma once
#include "llmc/base/common.h"

enum { MAX_BATCH_TOKENS = 1 << 28 }; // positions and offsets in a block are int32

// A place in the stream between two steps: the first document that the next step may use.
typedef struct {
    int32_t epoch, shard; // 0 based; shard counts the files in name order
    int64_t document;     // 0 based, within the shard; the number of documents when the shard is used up
} LoaderPosition;

// A hash of a token and the one before it gives a row of a table:
//   row   (36313 token XOR 27191 the one before) mod (rows - 1), in signed 32-bit arithmetic that wraps, and
//         never negative. At position 0 of a sequence it is rows - 1; at position 1 rows - 1 stands in place
//         of the token before.
//   sign  (token XOR the one before) mod sign_rows; 0 at position 0
typedef struct {
    int rows, sign_rows; // of the two tables, rows above 2; 0: there are none
} PairHash;
typedef struct {
    int32_t row, sign;
} PairRows;
// before: the token before, which is not read at position 0
PairRows pair_hash(const PairHash *h, int32_t token, int32_t before, int position);

// What batches have beside tokens and documents.
typedef struct {
    PairHash pairs;
    const int32_t *prefix; // (vocabulary) of a token the prefix that is a token too, or -1; NULL: none
    bool paired;           // on the device the attention table of paired heads
} BatchTables;

// The rows of a table that the positions read, and who reads them: the gradient of a row is summed in a fixed
// order, without atomics.
typedef struct {
    int count;      // distinct rows, 1 .. N; 0 in validation batches, which need no gradient
    int32_t *order; // (N) positions sorted by row, rising within a row
    int32_t *row;   // (count) the distinct rows, rising
    int32_t *start; // (count + 1), capacity N + 1: order[start[i] .. start[i+1]) are the positions of row[i]
} BatchRows;

// The arrays lie in one block of int32, so that one transfer brings them to a device; each begins at a
// multiple of BATCH_ALIGN ints. What the tables do not ask for has no memory, and NULL.
enum { BATCH_ALIGN = 32 };
typedef struct {
    int N;               // tokens
    int num_docs;        // segments in cu_seqlens, 1 .. N
    int32_t *tokens;     // (N) input ids
    int32_t *targets;    // (N) the id that follows each input; -1 in rows of a launch that have no loss
    int32_t *cu_seqlens; // (num_docs + 1), capacity N + 1: rises strictly from 0 to N
    BatchRows rows;      // of tables by token
    int32_t *prefix;     // (N) of the targets; training batches
    int32_t *bigram_rows, *sign_rows; // (N) by the pair hash
    BatchRows bigram;                 // of bigram_rows
    int32_t *block;                   // (block_ints) all of the above, owned by the batch
    size_t block_ints;
    BatchTables tables;
    uint64_t *scratch; // (N) used to sort, owned by the batch
    // training: where the step of this batch begins; seeking there gives the whole step again
    LoaderPosition position;
} Batch;

size_t batch_ints(int N, const BatchTables *tables); // of a block
// Zeroed; N in 1 .. MAX_BATCH_TOKENS. tables: copied; NULL: none.
void batch_alloc(Batch *b, int N, const BatchTables *tables);
void batch_free(Batch *b);

// Rows of the pair hash from tokens, when there is one. position: of the first token in its sequence; before:
// the token before it, when there is one.
void batch_hash_pairs(Batch *b, int position, int32_t before);
// A launch: documents of the micro-batch `whole` from number *document on, as many as there is room for, and
// in front of them the token before, of which the first one takes a share (smear). That row and those behind
// the last document have no loss. *document moves on. Returns which position of `whole` row 0 is. The longest
// document must have fewer tokens than `launch`.
int batch_take_launch(Batch *launch, const Batch *whole, int *document);
// The most launches of n tokens that N tokens can take: two that follow each other hold n or more.
static inline int batch_most_launches(int N, int n) { return n < N ? 2 * (N / n) + 1 : 1; }

// All that a training batch has beside tokens, targets and documents. Ids must lie in 0 .. 65535, and in the
// vocabulary of the prefixes.
void batch_complete(Batch *b);
