// The bytes of some tokens, one after another: *len bytes, then NUL; owned by the caller.
#pragma once
#include "llmc/text/tokenizer.h"
#include <stdlib.h>
#include <string.h>

static inline char *decode_tokens(const Tokenizer *t, const uint16_t *ids, size_t count, size_t *len)
{
    char *text = xcalloc(1, 1);
    *len = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        const char *token = tokenizer_token(t, ids[i], &bytes);
        text = xrealloc(text, *len + bytes + 1, 1);
        memcpy(text + *len, token, bytes);
        *len += bytes;
    }
    text[*len] = 0;
    return text;
}
