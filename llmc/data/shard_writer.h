// Writing a token shard (format: shard.h) piece by piece, or at once. For GPT-2 the header words of
// vocabulary and document stay 0, as in the public FineWeb10B shards.
//
// A shard grows in FOLDER/.NAME.tmp.<pid> and gets its name by rename only once it is complete and on disk,
// so a reader never finds half of one, and what was at PATH before survives any failure.
#pragma once
#include "llmc/base/common.h"

typedef struct {
    char *path;      // owned; NULL: not open
    char *temporary; // owned; NULL: there is none
    FILE *file;
    int vocab_size, document;
    int64_t tokens;
} ShardWriter;

// All return false with one line in `e` (path and reason) when the disk does not do what was asked.
bool shard_writer_open(ShardWriter *w, const char *path, int vocab_size, int document, Error *e);
bool shard_writer_append(ShardWriter *w, const uint16_t *ids, size_t count, Error *e); // ids: (count) uint16
// Header, flush to disk, close; still under its temporary name.
bool shard_writer_finish(ShardWriter *w, Error *e);
bool shard_writer_publish(ShardWriter *w, Error *e); // rename to PATH; after finish
void shard_writer_free(ShardWriter *w);              // removes the temporary file if it was not published
