// Random token shards in a temporary folder, for the tests of the loader.
#pragma once
#include "llmc/data/dataloader.h"
#include "llmc/data/validation.h"
#include "dev/test/shard_write.h"
#include "dev/test/tap.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VOCAB = 301, DOC = 300, MAX_SHARDS = 4 };

static char folder[64], pattern[96]; // a folder of its own for the test; what matches its training shards
static Error e;

static uint64_t random_state = 20240520;
static inline int random_below(int n) // splitmix64
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int)((z ^ z >> 31) % (uint64_t)n);
}

typedef struct {
    int count;
    uint16_t ids[120000];
} Tokens;
static Tokens shards[MAX_SHARDS];
static int num_shards;

static inline const char *path_of(const char *name)
{
    static char paths[8][160];
    static int turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static inline const char *shard_path(int i)
{
    char name[32];
    snprintf(name, sizeof name, "train_%03d.bin", i);
    return path_of(name);
}

static inline void add_token(Tokens *t, int id)
{
    if (t->count < (int)(sizeof t->ids / sizeof *t->ids))
        t->ids[t->count++] = (uint16_t)id;
}

static inline void add_document(Tokens *t, int length)
{
    add_token(t, DOC);
    for (int i = 1; i < length; i++)
        add_token(t, random_below(DOC));
}

// Documents of 1 .. longest tokens, more of them short than long.
static inline void random_shard(Tokens *t, int tokens, int longest)
{
    t->count = 0;
    for (int i = random_below(5); i > 0; i--)
        add_token(t, random_below(DOC)); // before the first start: to be ignored
    while (t->count < tokens)
        add_document(t, 1 + random_below(1 + random_below(longest)));
    if (random_below(3) == 0)
        add_document(t, 1); // a document token as the very last one
}

static inline void remove_shards(void)
{
    for (int i = 0; i < MAX_SHARDS; i++)
        unlink(shard_path(i));
}

static inline void write_shards(void)
{
    remove_shards();
    for (int i = 0; i < num_shards; i++)
        if (!shard_write(shard_path(i), shards[i].ids, shards[i].count, VOCAB, DOC, &e))
            ok(false, "%s", e.text);
}

static inline void make_folder(void)
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.40s/loader.XXXXXX", base && strlen(base) <= 40 ? base : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        exit(1);
    }
    snprintf(pattern, sizeof pattern, "%s/train_*.bin", folder);
}
