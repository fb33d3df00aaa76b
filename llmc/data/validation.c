#include "llmc/data/validation.h"
#include "llmc/data/shard_set.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK_TOKENS = 1 << 18 }; // checked at a time: 512 KB

struct Validation {
    ShardSet set;
    int sequence_tokens, num_sequences;
    int64_t num_kept; // val_tokens + 1
    uint16_t *tokens; // (num_kept)
};

// Keeps the first tokens of the shard; the rest is only checked.
static bool read_validation(Validation *v, Error *e)
{
    const char *path = v->set.paths[0];
    ShardIdentity *file = &v->set.files[0];
    const ShardHeader h = file->header;
    int fd = shard_reopen(path, file, e);
    if (fd < 0)
        return false;
    uint16_t *chunk = xcalloc(CHUNK_TOKENS, sizeof *chunk);
    int64_t documents = 0, found = 0;
    for (int64_t first = 0, count; first < h.num_tokens && found >= 0; first += count) {
        count = min_i64(CHUNK_TOKENS, h.num_tokens - first);
        bool read = shard_reread(fd, path, file, first, count, chunk, e);
        found = read ? shard_index(chunk, first, count, &h, path, NULL, e) : -1;
        documents += found;
        int64_t kept = min_i64(count, v->num_kept - first);
        if (found >= 0 && kept > 0)
            memcpy(v->tokens + first, chunk, (size_t)kept * sizeof *chunk);
    }
    free(chunk);
    close(fd);
    if (found < 0)
        return false;
    return documents > 0 || error_set(e,
                                      "%s: holds no document start (token %d); it was made for another "
                                      "vocabulary; tokenize it again",
                                      path, h.document_token);
}

int64_t validation_tokens_held(const char *glob, Error *e)
{
    ShardSet set = {0};
    bool good = shard_set_find(&set, glob, "--val-files", e) && shard_set_check(&set, 0, -1, e);
    int64_t tokens = good && set.count == 1 ? set.num_tokens : 0;
    shard_set_free(&set);
    return tokens;
}

static bool open_validation(Validation *v, const char *glob, int64_t val_tokens, int vocab_size,
                            int document_token, Error *e)
{
    if (!shard_set_find(&v->set, glob, "--val-files", e))
        return false;
    if (v->set.count != 1)
        return error_set(e, "--val-files: '%s' matches %d files, from %s to %s; name one shard", glob,
                         v->set.count, v->set.paths[0], v->set.paths[v->set.count - 1]);
    if (!shard_set_check(&v->set, vocab_size, document_token, e))
        return false;
    if (v->set.num_tokens <= val_tokens) {
        int64_t fits = (v->set.num_tokens - 1) / v->sequence_tokens * v->sequence_tokens;
        return error_set(e, "%s: holds %lld tokens, but --val-tokens %lld needs one more than that; %s %lld",
                         v->set.paths[0], (long long)v->set.num_tokens, (long long)val_tokens,
                         fits ? "it allows at most --val-tokens" : "use a larger file: one sequence takes",
                         (long long)(fits ? fits : v->sequence_tokens + 1));
    }
    v->tokens = xcalloc((size_t)v->num_kept, sizeof *v->tokens);
    return read_validation(v, e);
}

Validation *validation_open(const char *glob, int64_t val_tokens, int64_t sequence_tokens, int vocab_size,
                            int document_token, Error *e)
{
    if (sequence_tokens < 1 || sequence_tokens > MAX_BATCH_TOKENS) {
        error_set(e, "validation sequences of %lld tokens; 1 to %d are possible", (long long)sequence_tokens,
                  MAX_BATCH_TOKENS);
        return NULL;
    }
    if (val_tokens < 1 || val_tokens > INT32_MAX || val_tokens % sequence_tokens) {
        error_set(
            e,
            "--val-tokens is %lld; it must be a positive multiple of the sequence's %lld tokens, below 2^31",
            (long long)val_tokens, (long long)sequence_tokens);
        return NULL;
    }
    Validation *v = xcalloc(1, sizeof *v);
    v->sequence_tokens = (int)sequence_tokens;
    v->num_sequences = (int)(val_tokens / sequence_tokens);
    v->num_kept = val_tokens + 1;
    if (!open_validation(v, glob, val_tokens, vocab_size, document_token, e)) {
        validation_close(v);
        return NULL;
    }
    return v;
}

const char *validation_path(const Validation *v) { return v->set.paths[0]; }
int validation_num_sequences(const Validation *v) { return v->num_sequences; }
int validation_vocab_size(const Validation *v) { return v->set.files[0].header.vocab_size; }
uint64_t validation_fingerprint(const Validation *v)
{
    return fingerprint_bytes(0, v->tokens, (size_t)v->num_kept * sizeof *v->tokens);
}

int validation_document_token(const Validation *v) { return v->set.files[0].header.document_token; }

static bool document_ends(const Validation *v, int q, int i) // before token i of sequence q
{
    return i == v->sequence_tokens ||
           v->tokens[(int64_t)v->sequence_tokens * q + i] == validation_document_token(v);
}

int validation_longest(const Validation *v)
{
    int longest = 0;
    for (int q = 0; q < v->num_sequences; q++)
        for (int i = 1, begin = 0; i <= v->sequence_tokens; i++)
            if (document_ends(v, q, i)) {
                if (i - begin > longest)
                    longest = i - begin;
                begin = i;
            }
    return longest;
}

bool validation_part(const Validation *v, int q, int begin, Batch *b, ValidationPart *part, Error *e)
{
    const int S = v->sequence_tokens, N = b->N;
    if (q < 0 || q >= v->num_sequences)
        return error_set(e, "validation sequence %d does not exist; there are %d", q, v->num_sequences);
    int first = (int)min_i64(begin > 0 ? begin - 1 : 0, S - N), end = first + N;
    while (end > begin && !document_ends(v, q, end))
        end--;
    assert(first >= 0 && end > begin);
    const uint16_t *ids = v->tokens + (int64_t)S * q + first;
    b->rows.count = b->bigram.count = b->num_docs = 0;
    for (int i = 0; i < N; i++) {
        b->tokens[i] = ids[i];
        b->targets[i] = ids[i + 1];
        if (i == 0 || document_ends(v, q, first + i))
            b->cu_seqlens[b->num_docs++] = i;
    }
    b->cu_seqlens[b->num_docs] = N;
    batch_hash_pairs(b, first, first ? ids[-1] : 0);
    *part = (ValidationPart){first, begin, end};
    return true;
}

void validation_close(Validation *v)
{
    if (!v)
        return;
    shard_set_free(&v->set);
    free(v->tokens);
    free(v);
}
