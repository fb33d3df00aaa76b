// Shards that change while a run has them open or still to come: replaced, cut, removed or written to they
// are refused before a token of theirs is used; touched, or replaced by a copy of themselves, they are not.
#include "dev/test/shard_material.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { TOKENS = 30000, N = 16, STEP_BATCHES = 4 };

static Tokens other; // as long as shards[2], another text

static LoaderOptions options(void)
{
    return (LoaderOptions){.files_glob = pattern,
                           .micro_batches = STEP_BATCHES,
                           .micro_batch_tokens = N,
                           .num_ranks = 1,
                           .max_document = 30,
                           .chunk_tokens = 1000};
}

static void make_shards(void)
{
    num_shards = 3;
    for (int i = 0; i < num_shards; i++)
        random_shard(&shards[i], TOKENS, 20);
    random_shard(&other, TOKENS + 100, 20);
    other.count = shards[2].count;
    write_shards();
}

static void write_at(const char *path, const Tokens *t)
{
    if (!shard_write(path, t->ids, t->count, VOCAB, DOC, &e))
        ok(false, "%s", e.text);
}

// ---- what happens to the last shard -----------------------------------------------------------------------

static void replace(const char *path)
{
    write_at(path_of("new.bin"), &other);
    if (rename(path_of("new.bin"), path) != 0)
        ok(false, "%s", strerror(errno));
}

static void overwrite(const char *path) // the same inode
{
    FILE *f = fopen(path, "r+b");
    bool good = f && fseek(f, SHARD_HEADER_BYTES, SEEK_SET) == 0 &&
                fwrite(other.ids, 2, (size_t)other.count, f) == (size_t)other.count && fclose(f) == 0;
    if (!good)
        ok(false, "%s", strerror(errno));
}

static void replace_keeping_time(const char *path)
{
    struct stat st;
    bool good = stat(path, &st) == 0;
    replace(path);
    good = good && utimensat(AT_FDCWD, path, (struct timespec[]){st.st_atim, st.st_mtim}, 0) == 0;
    if (!good)
        ok(false, "%s", strerror(errno));
}

static void cut(const char *path)
{
    if (truncate(path, SHARD_HEADER_BYTES + TOKENS) != 0)
        ok(false, "%s", strerror(errno));
}

static void change_header(const char *path) // the same tokens, another token that begins documents
{
    if (!shard_write(path, shards[2].ids, shards[2].count, VOCAB, DOC - 1, &e))
        ok(false, "%s", e.text);
}

static void take_away(const char *path) { unlink(path); }
static void copy_itself(const char *path) { write_at(path, &shards[2]); }

static void touch(const char *path)
{
    if (utimensat(AT_FDCWD, path, (struct timespec[]){{1, 0}, {1, 0}}, 0) != 0)
        ok(false, "%s", strerror(errno));
}

// All batches' tokens in one hash; *steps the steps until the end or an error, whose line is in e.
static uint64_t hash_batches(Loader *l, int *steps)
{
    Batch b;
    uint64_t hash = 0;
    batch_alloc(&b, N, NULL);
    for (*steps = 0; loader_next(l, &b, &e); ++*steps)
        hash = fingerprint_bytes(hash, b.tokens, N * sizeof *b.tokens);
    batch_free(&b);
    return hash;
}

// `change` happens to the last shard after the first step; the loader reads the second one only then.
static void test_change(const char *what, void (*change)(const char *path), const char *word)
{
    int steps, all;
    Batch b;
    batch_alloc(&b, N, NULL);
    make_shards();
    Loader *l = loader_open(&(LoaderOptions){.files_glob = pattern,
                                             .micro_batches = STEP_BATCHES,
                                             .micro_batch_tokens = N,
                                             .num_ranks = 1,
                                             .max_document = 30},
                            &e);
    if (!l)
        ok(false, "%s", e.text);
    uint64_t expected = hash_batches(l, &all);
    loader_close(l);

    LoaderOptions o = options();
    l = loader_open(&o, &e);
    if (!l || !loader_next(l, &b, &e))
        ok(false, "%s", e.text);
    uint64_t hash = fingerprint_bytes(0, b.tokens, N * sizeof *b.tokens);
    change(shard_path(2));
    for (steps = 1; loader_next(l, &b, &e); steps++)
        hash = fingerprint_bytes(hash, b.tokens, N * sizeof *b.tokens);
    if (word) {
        ok(b.position.shard == 1 && steps < all && strstr(e.text, word) && strstr(e.text, shard_path(2)) &&
               !strchr(e.text, '\n'),
           "%s, after %d of %d batches: %s", what, steps, all, e.text);
    } else {
        ok(steps == all && hash == expected && strstr(e.text, "training data ends here"),
           "%s: %d of %d batches, the same", what, steps, all);
    }
    loader_close(l);
    batch_free(&b);
    remove_shards();
}

// ---- while it is being read -------------------------------------------------------------------------------

typedef struct {
    void (*change)(const char *path);
    int64_t at; // tokens indexed
} Plan;

static void change_hook(void *context, int64_t num_indexed)
{
    Plan *plan = context;
    if (num_indexed == plan->at)
        plan->change(shard_path(2));
}

// The only shard, of which the first half is in memory.
static void test_change_inside(const char *what, void (*change)(const char *path), const char *word)
{
    int steps;
    Plan plan = {change, TOKENS / 2};
    make_shards();
    LoaderOptions o = options();
    o.files_glob = shard_path(2);
    o.chunk_hook = change_hook;
    o.chunk_hook_context = &plan;
    Loader *l = loader_open(&o, &e);
    if (!l)
        ok(false, "%s", e.text);
    hash_batches(l, &steps);
    ok(steps * N <= TOKENS / 2 && strstr(e.text, word) && strstr(e.text, shard_path(2)),
       "%s while it is read, %d batches: %s", what, steps, e.text);
    loader_close(l);
    remove_shards();
}

int main(void)
{
    make_folder();
    test_change("replaced by a shard of the same size", replace,
                "was replaced or changed since the run began");
    test_change("the same, with the time of the first one", replace_keeping_time,
                "was replaced or changed since the run began");
    PART(test_change("written to", overwrite, "was replaced or changed since the run began"));
    PART(test_change("cut", cut, "truncated"));
    PART(test_change("with another header", change_header, "was replaced or changed since the run began"));
    PART(test_change("removed", take_away, "cannot be opened: No such file or directory"));
    PART(test_change("replaced by its copy", copy_itself, NULL));
    PART(test_change("touched", touch, NULL));
    PART(test_change_inside("written to", overwrite, "was replaced or changed since the run began"));
    PART(test_change_inside("cut", cut, "became shorter while it was read"));
    ok(rmdir(folder) == 0, "nothing is left behind");
    return tap_done();
}
