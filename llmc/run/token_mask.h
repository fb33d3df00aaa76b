// Which tokens cannot follow a token, for validations that leave them out: made from the vocabulary by a
// thread, beside what the program does until the first validation.
#pragma once
#include "llmc/text/impossible.h"

typedef struct TokenMask TokenMask;
// Takes the tokenizer over. NULL: its tokens are single bytes, which may all follow each other.
TokenMask *token_mask_start(Tokenizer *tokenizer, int padded);
uint64_t token_mask_fingerprint(const TokenMask *m); // of the vocabulary
// Waits for the thread; bits (padded, padded / 32) as impossible_pairs makes them. NULL with an Error.
const uint32_t *token_mask_finish(TokenMask *m, Error *e);
void token_mask_free(TokenMask *m); // NULL is allowed
