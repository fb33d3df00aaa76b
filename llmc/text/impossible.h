// Which tokens cannot follow a token in text that a byte-pair tokenizer wrote: its merges would have joined
// across the seam, unless the pattern that cuts text into pieces cuts there.
#pragma once
#include "llmc/text/prefix.h"

// bits (padded, padded / 32) out: bit x % 32 of word x / 32 of row p is set where token x cannot follow token
// p. tokens (count) by id, those of two and more bytes in the order of their merges; padded: ids, a multiple
// of 32. Ids without bytes have no bits. False with an Error: a token that the merges do not make.
bool impossible_pairs(uint32_t *bits, const TokenBytes *tokens, int count, int padded, Error *e);
