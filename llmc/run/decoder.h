// Texts that grow token by token, with a cache of keys and values: a pass computes the new tokens alone.
// Positions go on without end: as in a validation sequence, a layer looks back as far as its window.
#pragma once
#include "llmc/run/trainer.h"

enum { DECODER_ROWS = 256 }; // most tokens of one pass

typedef struct Decoder Decoder;

// texts: at a time, at most DECODER_ROWS; positions: most tokens of a text. Takes all memory that it needs.
Decoder *decoder_create(Trainer *t, int texts, int64_t positions);
void decoder_free(Decoder *d); // NULL is allowed
size_t decoder_cache_bytes(const Decoder *d);
void decoder_restart(Decoder *d, int text); // the text is empty again
// Row i appends tokens[i] to text texts[i]; a text may have several rows, in its order. count: at most
// DECODER_ROWS
typedef struct {
    const int32_t *tokens, *texts; // (count)
    int count;
} DecoderRows;
// z: (count, Vp) fp32 host out: softcapped logits behind each row; NULL: not wanted. With z at most one row a
// text.
void decoder_run(Decoder *d, const DecoderRows *rows, float *z);
