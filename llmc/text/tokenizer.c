// What does not depend on the kind of vocabulary: life time, single tokens, decoding, byte mode.
#include "llmc/text/tokenizer_internal.h"
#include <stdlib.h>
#include <string.h>

Tokenizer *tokenizer_bytes(void)
{
    Tokenizer *t = xcalloc(1, sizeof *t);
    t->vocab_size = BYTE_VOCAB;
    t->document = BYTE_DOCUMENT;
    t->byte_mode = true;
    t->bytes = xcalloc(256 + sizeof DOCUMENT_TEXT, 1);
    t->offset = xcalloc(BYTE_VOCAB + 1, sizeof *t->offset);
    for (uint32_t b = 0; b < 256; b++) {
        t->bytes[b] = (char)b;
        t->offset[b] = b;
        t->byte_id[b] = (uint16_t)b;
    }
    memcpy(t->bytes + 256, DOCUMENT_TEXT, sizeof DOCUMENT_TEXT - 1);
    t->offset[256] = 256;
    t->offset[257] = 256 + sizeof DOCUMENT_TEXT - 1;
    return t;
}

void tokenizer_free(Tokenizer *t)
{
    if (!t)
        return;
    if (t->pattern)
        pattern_free(t);
    free(t->bytes);
    free(t->offset);
    free(t->word_slots);
    free(t->merges);
    free(t);
}

int tokenizer_vocab_size(const Tokenizer *t) { return t->vocab_size; }
int tokenizer_document(const Tokenizer *t) { return t->document; }
int tokenizer_unicode(const Tokenizer *t) { return t->unicode; }

char *tokenizer_describe_classes(const Tokenizer *t)
{
    return t->byte_mode ? xstrdup("none, tokens are bytes") : pattern_describe_classes(t);
}

const char *tokenizer_token(const Tokenizer *t, int id, size_t *len)
{
    assert(id >= 0 && id < t->vocab_size);
    *len = token_length(t, (uint32_t)id);
    return t->bytes + t->offset[id];
}

// Multiply and fold, eight bytes at a time; the tables are small and their keys harmless.
uint64_t hash_bytes(const char *p, size_t len)
{
    uint64_t h = len * 0x9E3779B97F4A7C15u;
    for (; len; p += 8) {
        uint64_t word = 0;
        size_t n = len < 8 ? len : 8;
        memcpy(&word, p, n);
        h = (h ^ word) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
        len -= n;
    }
    return h;
}

int word_find(const Tokenizer *t, const char *p, size_t len)
{
    for (uint32_t i = (uint32_t)hash_bytes(p, len) & t->word_mask;; i = (i + 1) & t->word_mask) {
        if (!t->word_slots[i])
            return -1;
        uint32_t id = t->word_slots[i] - 1;
        if (token_length(t, id) == len && !memcmp(t->bytes + t->offset[id], p, len))
            return (int)id;
    }
}
