// A shard from tokens in memory.
#pragma once
#include "llmc/data/shard.h"
#include "llmc/data/shard_writer.h"

static inline bool write_whole(const char *path, const uint16_t *ids, int64_t count, const ShardHeader *h,
                               Error *e)
{
    ShardWriter w;
    bool good = shard_writer_open(&w, path, h->vocab_size, h->document_token, e) &&
                shard_writer_append(&w, ids, (size_t)count, e) && shard_writer_finish(&w, e) &&
                shard_writer_publish(&w, e);
    shard_writer_free(&w);
    return good;
}

// Writes a whole shard whose tokens are in memory.
//   ids (count) uint16  in, owned by the caller
//   vocab_size 0: GPT-2, and document_token is taken as 50256
// Error: count outside 1 .. 2^31 - 1, an id outside the vocabulary, no document token among the ids, or the
// system's own words on a failed write; an older file of that name is then left as it was.
static inline bool shard_write(const char *path, const uint16_t *ids, int64_t count, int vocab_size,
                               int document_token, Error *e)
{
    ShardHeader h = {count, vocab_size ? vocab_size : SHARD_GPT2_VOCAB,
                     vocab_size ? document_token : SHARD_GPT2_DOCUMENT};
    if (count < 1 || count > INT32_MAX)
        return error_set(e, "%s: a shard holds 1 to %d tokens, not %lld", path, INT32_MAX, (long long)count);
    if (h.vocab_size < 1 || h.vocab_size > SHARD_MAX_VOCAB || h.document_token < 0 ||
        h.document_token >= h.vocab_size)
        return error_set(e,
                         "%s: cannot write a vocabulary of %d ids with document token %d; at most %d ids, "
                         "the token below it",
                         path, h.vocab_size, h.document_token, SHARD_MAX_VOCAB);
    int64_t documents = shard_index(ids, 0, count, &h, path, NULL, e);
    if (documents < 0)
        return false;
    if (documents == 0)
        return error_set(e, "%s: no document token %d among the ids to write", path, h.document_token);
    return write_whole(path, ids, count, &h, e);
}
