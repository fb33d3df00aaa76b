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
    MIX_STREAMS = 6,  // most streams of a sum, and most sums of a stream
    STREAM_LEADS = 32 // most leading channels
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

// dx = sum of c * g  + rms-backward(dh).
typedef struct {
    floatX *dx;          // (N, d) out; may be the g of a reader; NULL when only the coefficients' are wanted
    bool accumulate;     // dx += instead
    const floatX *x;     // (N, d) the stream, or a table; NULL: h / rstd is taken for it
    const int32_t *rows; // (N) as in StreamTerm
    StreamReader reader[MIX_STREAMS];
    int readers;
    const floatX *dh;     // (N, d) gradient of h = rms(x), or NULL
    const float *dh_lead; // (N, leads) added to dh's first `leads` channels, or NULL
    int leads;            // at most STREAM_LEADS
    const floatX *h;      // (N, d) and
    const float *rstd;    // (N) as stream_mix gave them; needed with dh, or without x
} StreamGrad;
enum { STREAM_GRADS = 2 }; // most at a time
// Of `count` streams at once: a g that is at the same place in the readers of both is loaded once. With two
// no dx may be a g.
void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d);

#ifdef __cplusplus
}
#endif
