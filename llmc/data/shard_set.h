// The shards of a run: which files a pattern names, and how another set of files differs from them.
#pragma once
#include "llmc/data/shard.h"

typedef struct {
    int count;
    char **paths;         // (count), owned; in byte order of the names
    ShardIdentity *files; // (count), owned; as they were when shard_set_check looked at them
    int64_t num_tokens;   // in all of them
} ShardSet;

// The files that `pattern` names, one path or a glob, in byte order (glob's own order depends on the locale).
// set: zeroed.
//   option  whose value the pattern is, for messages
// Error: none matches, or the system's own words.
bool shard_set_find(ShardSet *set, const char *pattern, const char *option, Error *e);

// Opens each file once and fills in `files`.
//   vocab_size 0: any, but all files the same; document_token -1: any
// Error: what shard_open refuses, files of two kinds or of another kind than is needed, a failed read.
bool shard_set_check(ShardSet *set, int vocab_size, int document_token, Error *e);
void shard_set_free(ShardSet *set);

// Of all contents, in order. Names and folders do not count.
uint64_t shard_set_fingerprint(const ShardSet *set);

// The set as text for a checkpoint, a line "<tokens> <contents> <name without folder>" for each file; owned
// by the caller. A name's bytes beyond printable ASCII become "?".
char *shard_set_text(const ShardSet *set);

// Whether a run that wrote `text` can go on with this set: the same contents in the same order, under
// whatever names. Files may have been added behind them when may_grow. Error: a line that names the first
// difference, or that the text is damaged.
bool shard_set_continues(const ShardSet *set, const char *text, bool may_grow, Error *e);
