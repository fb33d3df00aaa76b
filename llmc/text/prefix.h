// Of each token of a vocabulary the longest proper prefix of its bytes that is a token, too.
#pragma once
#include "llmc/text/tokenizer.h"

typedef struct {
    const char *bytes;
    size_t length; // 0: it has no bytes, like the document token, and is nobody's prefix
} TokenBytes;
// Of a tokenizer, for `padded` ids, at least its vocabulary; the list is owned by the caller, the bytes by
// the tokenizer.
TokenBytes *token_bytes(const Tokenizer *t, int padded);

// prefix (count) out: an id, or -1. tokens (count) by id. One pass over the tokens in the order of their
// bytes: those that the current one begins with are a stack.
void prefix_table(int32_t *prefix, const TokenBytes *tokens, int count);

// The same of a tokenizer, for `padded` ids, at least its vocabulary; owned by the caller. *found: how many
// have a prefix.
int32_t *prefix_table_of(const Tokenizer *t, int padded, int *found);
