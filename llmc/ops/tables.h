// Contracts: rows of tables, gathered by position, and their gradients. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#include "llmc/ops/embedding.h"
#ifdef __cplusplus
extern "C" {
#endif

// Signs of gathered rows: the row of position t takes those of row rows[t].
typedef struct {
    const uint32_t *bits; // (any, ceil(width / 32)) channel c: bit c % 32 of word c / 32; set: negative
    const int32_t *rows;  // (N)
} RowSigns;

// out_t = table[rows[t]], with its signs, in the first `width` channels; 0 in the others.
//   out (N, d) floatX out;  table (any, width) floatX, width <= d;  rows (N)
void signed_gather(Stream s, floatX *out, const floatX *table, const int32_t *rows, const RowSigns *signs,
                   int N, int d, int width);

// A reader of gathered rows. It gives the row of position t, channel c, the gradient
//   factor[t * stride + c / (d / groups)] * g[t * pitch + c]  (+ lead[t * leads + c] for c < leads),
// with the sign of the channel.
typedef struct {
    const floatX *g; // (N, d), rows `pitch` apart; 0: d
    int pitch;
    const float *factor; // NULL: 1
    int stride, groups;
    const float *lead; // (N, leads), or NULL
    int leads;
    const RowSigns *signs; // or NULL
} RowReader;
enum { ROW_READERS = 2 }; // most at a time

// dtable[row] += sum over the row's positions of what the readers give, for the rows of `rows` only.
//   dtable (any, width) fp32 +=;  readers (count) host, count at most ROW_READERS
void table_grad(Stream s, float *dtable, const RowReader *readers, int count, const TokenRows *rows, int N,
                int d, int width);

// Rows of a table that travel between ranks, rows[k] of them each way; rows[k] below 0: nothing is done.
//   rows (count), distinct where the table is written;  table (any, bytes) or (any, width)
void rows_load(Stream s, void *out, const void *table, const int32_t *rows, int count,
               int bytes); // out_k = row
void rows_store(Stream s, void *table, const void *in, const int32_t *rows, int count,
                int bytes); // row = in_k
// out_k = row, and the row is zeroed.  out (count, width), table fp32
void rows_take(Stream s, float *out, float *table, const int32_t *rows, int count, int width);
// row += in_k.  in (count, width), table fp32
void rows_add(Stream s, float *table, const float *in, const int32_t *rows, int count, int width);

#ifdef __cplusplus
}
#endif
