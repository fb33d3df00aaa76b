// Contracts: sums of streams with one coefficient for all tokens or one a token. Conventions: llmc/ops/ops.h.
//
// Backward goes stream by stream, not sum by sum: the gradient of a stream is the sum over the sums that read
// it. So a gradient is written once, whole, and the gradient of a sum with one coefficient need not be
// multiplied by it in memory. A stream that many layers read (the embedding, the bigram) gets its gradient in
// one go at the end, from the gradients of all these sums.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

enum {
    MIX_STREAMS = 6,     // most streams of a sum
    STREAM_READERS = 12, // most sums of a stream
    STREAM_NORMS = 3,    // most gradients of a stream's norm
    STREAM_LEADS = 32,   // most leading channels
    STREAM_PAIR = 2,     // most streams at a time, and
    STREAM_GRADS = 5     // when no dx is wanted
};

// c_t = plus + scalar * column[t * stride].  All zero: 1.
typedef struct {
    float plus;
    const float *scalar; // (1) device, or NULL for 1
    const float *column; // or NULL for 1
    int stride;
} StreamFactor;

// ---- forward ----------------------------------------------------------------------------------------------

typedef struct {
    const floatX *x;     // (N, d); a table when rows is given
    const int32_t *rows; // (N) row t of the stream is row rows[t] of x; NULL: row t
    StreamFactor c;
} StreamTerm;

// y = sum of c * x;  h = rms(y) of the unrounded sum, rms(x) = x / sqrt(mean(x^2) + 2^-23).
typedef struct {
    floatX *y;   // (N, d) out; may be the x of a term without rows; NULL when only h is wanted
    floatX *h;   // (N, d) out, or NULL
    float *rstd; // (N) out when h is, kept for backward
    float *amax; // (1) in/out: max(amax, max |h|) of h as it is stored; NULL: not wanted
    StreamTerm term[MIX_STREAMS];
    int terms;
} StreamMix;
void stream_mix(Stream s, const StreamMix *a, int N, int d);

// ---- backward ---------------------------------------------------------------------------------------------

// A sum that reads the stream.
typedef struct {
    const floatX *g; // (N, d) gradient of its y, rows `pitch` apart; 0: d
    int pitch;
    StreamFactor c;
    float *dscalar; // (1) += sum over t of column * (g_t . x_t); or NULL
    float *dcolumn; // out: dcolumn[t * stride] = scalar * (g_t . x_t); or NULL
} StreamReader;

// Who reads h = rms(x).
typedef struct {
    const floatX *dh;  // (N, d) gradient of h
    const float *lead; // (N, leads) added to dh's first `leads` channels, or NULL
    int leads;         // at most STREAM_LEADS
} StreamNorm;

// dx = sum of c * g  + rms-backward(sum of dh).
typedef struct {
    floatX *dx;          // (N, d) out; may be the g of a reader; NULL when only the coefficients' are wanted
    bool accumulate;     // dx += instead
    const floatX *x;     // (N, d) the stream, or a table; NULL: h / rstd is taken for it
    const int32_t *rows; // (N) as in StreamTerm
    StreamReader reader[STREAM_READERS];
    int readers;
    StreamNorm norm[STREAM_NORMS];
    int norms;
    const floatX *h;   // (N, d) and
    const float *rstd; // (N) as stream_mix gave them; needed with norms, or without x
    // With norms, without x: another stream (N, d) that reader[0]'s sum reads times a scalar, and the
    // gradient (1) of that: += sum over t of g_t . beside_t; or NULL.
    const floatX *beside;
    float *dbeside;
} StreamGrad;
// Of `count` streams at once. Of several, all have x, none has norms, no dx is a g, no stream has one g
// twice, and each g is loaded once, however many of them have it: of at most STREAM_READERS different ones,
// or MIX_STREAMS when no dx is wanted.
void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d);

#ifdef __cplusplus
}
#endif
