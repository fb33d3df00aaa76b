#include "llmc/run/token_mask.h"
#include <pthread.h>
#include <stdlib.h>

struct TokenMask {
    Tokenizer *tokenizer;
    TokenBytes *tokens; // (padded)
    int padded;
    uint32_t *bits;
    pthread_t thread;
    bool running, made;
    Error error; // unless made
};

static void *make_bits(void *mask)
{
    TokenMask *m = mask;
    m->made = impossible_pairs(m->bits, m->tokens, m->padded, m->padded, &m->error);
    return NULL;
}

TokenMask *token_mask_start(Tokenizer *tokenizer, int padded)
{
    TokenMask *m = xcalloc(1, sizeof *m);
    bool longer = false;
    *m = (TokenMask){.tokenizer = tokenizer, .tokens = token_bytes(tokenizer, padded), .padded = padded};
    for (int i = 0; i < padded; i++)
        longer = longer || m->tokens[i].length > 1;
    if (!longer) {
        token_mask_free(m);
        return NULL;
    }
    m->bits = xcalloc((size_t)padded * (size_t)(padded / 32), sizeof *m->bits);
    m->running = pthread_create(&m->thread, NULL, make_bits, m) == 0;
    if (!m->running)
        make_bits(m);
    return m;
}

uint64_t token_mask_fingerprint(const TokenMask *m)
{
    uint64_t h = 0;
    for (int i = 0; i < m->padded; i++) {
        h = fingerprint_bytes(h, &m->tokens[i].length, sizeof m->tokens[i].length);
        h = fingerprint_bytes(h, m->tokens[i].bytes, m->tokens[i].length);
    }
    return h;
}

static void join(TokenMask *m)
{
    if (m->running)
        pthread_join(m->thread, NULL);
    m->running = false;
}

const uint32_t *token_mask_finish(TokenMask *m, Error *e)
{
    join(m);
    if (m->made)
        return m->bits;
    error_set(e, "--vocab: %s: --val-mask needs a vocabulary that merges make", m->error.text);
    return NULL;
}

void token_mask_free(TokenMask *m)
{
    if (!m)
        return;
    join(m);
    free(m->bits);
    free(m->tokens);
    tokenizer_free(m->tokenizer);
    free(m);
}
