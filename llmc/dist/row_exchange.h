// Tables whose rows are read by pairs of tokens: a step reads a few of many rows, so only those travel.
//
// What the dense exchange gives, bit for bit:
//   gradients  At a step that updates the table every rank sends the rows that its micro-batches have touched
//              since the last update, to their owners; an owner adds what it gets, its own rows included, in
//              the order of the ranks. All other gradients are zero, and adding them would change nothing.
//   update     Adam moves every row at every update, touched or not: momentum of old gradients, decay where
//              the row moves towards zero. So each owner updates all of its rows, as with the dense exchange.
//   values     Every step begins with the rows that its own micro-batches read, from their owners. Rows that
//              a step does not read stay old until exchange_complete gathers the whole table, which comes
//              before a validation, a checkpoint and a sample.
//
// Every rank sends every owner one chunk of rows, all of one size: what the fullest chunk of any rank needs,
// which the ranks agree on before the step is queued, so that a captured step can hold it. A step whose
// fullest chunk is more than half of an owner's rows is exchanged densely, and so are the gradients of an
// update when not all rows since the last one are known (after a checkpoint in between, which gathers
// gradients).
//
// Tables by token stay dense: low ids are frequent tokens, so the first owner would send and receive half of
// its rows and more at every update (dev/notes/2026-11-23_row_exchange.md).
#pragma once
#include "llmc/dist/comm.h"
#include "llmc/model/params.h"

typedef enum {
    EXCHANGE_AUTO, // by rows where they can be split over the ranks, else dense
    EXCHANGE_DENSE,
    EXCHANGE_ROWS
} PairExchange; // --pair-exchange

// The rows of a step. Chunk o of a list, `count` entries, holds rows of owner o, rising, then -1.
typedef struct {
    const int32_t *values, *gradients; // device: (ranks, num_values), (ranks, num_gradients); not owned
    int num_values, num_gradients;     // of a chunk; 0: the whole table is exchanged
} RowLists;

typedef struct {
    int param;     // the table in Params; -1: no table is exchanged by rows
    int size;      // ranks
    int64_t share; // rows of an owner
    int width;
    int most;                  // rows of a chunk
    int32_t *asked;            // (size, most) device: rows that other ranks send or want; owned here
    void *outgoing, *incoming; // (size, most, width) fp32, device; owned here
    RowLists now;              // of the step whose ops are queued, set by the caller
} RowExchange;

// The table, if there is one and there are several ranks. Fatal with a line when EXCHANGE_ROWS asks for rows
// that cannot be split.
void row_exchange_create(RowExchange *x, const Params *p, PairExchange how);
void row_exchange_free(RowExchange *x);
void row_exchange_warm_up(const RowExchange *x, Stream s); // the collective once, on nothing
// On s, in grad (the whole table, fp32): the own rows become sums over the ranks, touched rows of others
// zero.
void row_exchange_gradients(const RowExchange *x, float *grad, Stream s);
// On s, in values (the whole table): the listed rows become those of their owners.
void row_exchange_values(const RowExchange *x, floatX *values, Stream s);

// ---- the lists, on the host -------------------------------------------------------------------------------

typedef struct {
    int64_t rows, share;           // of the table
    uint8_t *read, *summed;        // (rows) owned: read by this step; touched since the last update
    bool known;                    // whether `summed` has all of them
    int num_values, num_gradients; // of a chunk, as large as any step of this size has had
} RowMarks;

void row_marks_create(RowMarks *m, const RowExchange *x); // nothing without a table
void row_marks_free(RowMarks *m);
// A step begins, `fresh`: the first since an update.
void row_marks_begin(RowMarks *m, bool fresh);
void row_marks_add(RowMarks *m, const int32_t *rows, int count);
// Collective, when all micro-batches of the step are known: the sizes of chunks. update: whether the step
// updates the table.
void row_marks_agree(RowMarks *m, const RowExchange *x, bool update, RowLists *lists);
// Writes the lists of those sizes, values first. host (size * (num_values + num_gradients)) out
void row_marks_list(const RowMarks *m, const RowLists *lists, int rank, int32_t *host);
// Ints that the lists of a step need at most.
int64_t row_marks_ints(const RowExchange *x);
