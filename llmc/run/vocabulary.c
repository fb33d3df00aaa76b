#include "llmc/run/vocabulary.h"
#include <unistd.h>

Tokenizer *vocabulary_open(const Config *c, const char *use, Error *e)
{
    Error sub;
    const char *path = *c->vocab ? c->vocab : VOCABULARY_FOLDER;
    if (!*c->vocab && c->vocab_size == BYTE_VOCAB)
        return tokenizer_bytes();
    if (!*c->vocab && access(path, F_OK)) {
        error_set(e,
                  "%s needs --vocab, a folder with the GPT-2 vocabulary; data/gpt2_vocab.sh fetches it to %s",
                  use, path);
        return NULL;
    }
    Tokenizer *t = tokenizer_load(path, &sub);
    if (!t) {
        error_set(e, "--vocab: %s", sub.text);
        return NULL;
    }
    if (tokenizer_vocab_size(t) == c->vocab_size)
        return t;
    error_set(e, "--vocab %s: has %d tokens, the model %d", path, tokenizer_vocab_size(t), c->vocab_size);
    tokenizer_free(t);
    return NULL;
}
