// Training batches against a second, token-by-token reading of the batching rule; shard ends, resuming,
// unfinished indexes, faults that are found late.
#include "dev/test/shard_material.h"
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <time.h>

enum { MICRO_BATCHES = 8 };

// ---- the rule once more, one token at a time --------------------------------------------------------------

typedef struct {
    int N, max_document, epochs;
    int group;            // micro-batches that a shard's end drops together, 0: all of a step
    int epoch, shard, at; // at: tokens of the shard that were passed
} Naive;

// One micro-batch into ids (N+1) and begins (N+1: 1 where a document begins); false when the shard has not
// enough left.
static bool naive_micro_batch(Naive *s, int *ids, int *begins)
{
    const Tokens *t = &shards[s->shard];
    int have = 0;
    while (have <= s->N) {
        while (s->at < t->count && t->ids[s->at] != DOC)
            s->at++;
        if (s->at == t->count)
            return false;
        int used = 0;
        do {
            begins[have] = used == 0;
            ids[have++] = t->ids[s->at++];
            used++;
        } while (have <= s->N && used < s->max_document && s->at < t->count && t->ids[s->at] != DOC);
    }
    return true;
}

enum { STEP, END, TOO_SMALL };

// The next `count` micro-batches, one after another and all of one shard.
static int naive_group(Naive *s, int count, int *ids, int *begins)
{
    for (int unfit = 0;;) {
        bool fresh = s->at == 0;
        int m = 0;
        while (m < count && naive_micro_batch(s, ids + m * (s->N + 1), begins + m * (s->N + 1)))
            m++;
        if (m == count)
            return STEP;
        if (fresh && ++unfit == num_shards)
            return TOO_SMALL;
        s->at = 0;
        if (++s->shard < num_shards)
            continue;
        s->shard = 0;
        if (++s->epoch == s->epochs)
            return END;
    }
}

static int naive_step(Naive *s, int *ids, int *begins)
{
    int count = s->group ? s->group : MICRO_BATCHES, outcome = STEP;
    for (int m = 0; m < MICRO_BATCHES && outcome == STEP; m += count)
        outcome = naive_group(s, count, ids + m * (s->N + 1), begins + m * (s->N + 1));
    return outcome;
}

static bool same_rows(const Batch *b)
{
    int row = 0, place = 0;
    for (int id = 0; id < VOCAB; id++) {
        int before = place;
        for (int i = 0; i < b->N; i++) {
            if (b->tokens[i] != id)
                continue;
            if (b->rows.order[place++] != i)
                return false;
        }
        if (place == before)
            continue;
        if (row >= b->rows.count || b->rows.row[row] != id || b->rows.start[row] != before)
            return false;
        row++;
    }
    return row == b->rows.count && b->rows.start[row] == b->N;
}

static bool same_batch(const Batch *b, const int *ids, const int *begins)
{
    int docs = 0;
    for (int i = 0; i < b->N; i++) {
        if (b->tokens[i] != ids[i] || b->targets[i] != ids[i + 1])
            return false;
        if (begins[i] && (docs >= b->num_docs || b->cu_seqlens[docs++] != i))
            return false;
    }
    return docs == b->num_docs && b->cu_seqlens[docs] == b->N && same_rows(b);
}

static LoaderOptions options_of(const Naive *s, int rank, int num_ranks, int chunk)
{
    LoaderOptions o = {.files_glob = pattern,
                       .micro_batches = MICRO_BATCHES,
                       .group_micro_batches = s->group,
                       .micro_batch_tokens = s->N,
                       .rank = rank,
                       .num_ranks = num_ranks,
                       .max_document = s->max_document,
                       .epochs = s->epochs,
                       .chunk_tokens = chunk};
    return o;
}

// All ranks of one run beside the naive reading, to the end of the data. Returns the number of equal steps,
// -1 after a difference.
static int compare_run(Naive s, int num_ranks, int chunk, int *outcome)
{
    int *ids = xcalloc((size_t)MICRO_BATCHES * (size_t)(s.N + 1), sizeof *ids), steps = 0;
    int *begins = xcalloc((size_t)MICRO_BATCHES * (size_t)(s.N + 1), sizeof *begins);
    Loader *loaders[MICRO_BATCHES] = {0};
    Batch b;
    batch_alloc(&b, s.N, NULL);
    bool same = true;
    for (int r = 0; r < num_ranks; r++) {
        LoaderOptions o = options_of(&s, r, num_ranks, chunk);
        loaders[r] = loader_open(&o, &e);
    }
    bool opened = loaders[0] != NULL;
    while (same && (*outcome = naive_step(&s, ids, begins)) == STEP && opened) {
        for (int r = 0; r < num_ranks && same; r++)
            for (int a = 0; a < MICRO_BATCHES / num_ranks && same; a++) {
                int m = a * num_ranks + r;
                same = loader_next(loaders[r], &b, &e) &&
                       same_batch(&b, ids + m * (s.N + 1), begins + m * (s.N + 1));
            }
        steps += same;
    }
    // The end must be the same too; a shard whose size alone is too small is refused by loader_open.
    const char *words = *outcome == END ? "data ends here" : "too small";
    if (!opened) {
        same = false;
        for (int i = 0; i < num_shards; i++)
            same = same || shards[i].count < (s.group ? s.group : MICRO_BATCHES) * (s.N + 1);
        same = same && strstr(e.text, "too small");
        *outcome = TOO_SMALL;
    }
    // Where groups are smaller than a step, a rank may come to the end after some of its micro-batches.
    for (int r = 0; r < num_ranks && same && opened; r++) {
        int taken = 0;
        while (loader_next(loaders[r], &b, &e))
            taken++;
        same = strstr(e.text, words) && taken < MICRO_BATCHES / num_ranks;
    }
    for (int r = 0; r < num_ranks; r++)
        loader_close(loaders[r]);
    batch_free(&b);
    free(ids);
    free(begins);
    return same ? steps : -1;
}

// ---- training batches -------------------------------------------------------------------------------------

static void test_random_shards(void)
{
    static const int ranks[] = {1, 2, 4, 8}, chunks[] = {1, 7, 1000, 0}, groups[] = {0, 4, 1, 0, 2};
    int runs = 0, different = 0, steps = 0, ended = 0, too_small = 0;
    for (int round = 0; round < 60; round++) {
        num_shards = 1 + random_below(3);
        int longest = 1 + random_below(60);
        for (int i = 0; i < num_shards; i++)
            random_shard(&shards[i], 1 + random_below(2500), longest);
        write_shards();
        Naive s = {.N = 1 + random_below(1 + random_below(40)),
                   .max_document = 1 + random_below(30),
                   .epochs = 1 + random_below(3)};
        s.group = groups[round % 5];
        for (int i = 0; i < 4; i++) {
            int outcome = STEP, equal = compare_run(s, ranks[i], chunks[(i + round) % 4], &outcome);
            runs++;
            different += equal < 0;
            steps += equal > 0 ? equal : 0;
            ended += outcome == END;
            too_small += outcome == TOO_SMALL;
        }
    }
    ok(different == 0,
       "random shards, 1/2/4/8 ranks, groups of 1/2/4/8, any chunk: %d of %d runs differ from the naive "
       "reading (%d equal steps)",
       different, runs, steps);
    ok(steps > 500 && ended > 50 && too_small > 5,
       "the runs covered %d steps, %d ends of the data, %d too small shards", steps, ended, too_small);
}

// One shard made of equal documents, all numbers of ranks, tiny chunks.
static void test_equal_documents(const char *name, int length, int tokens, int N, int max_document,
                                 int want_docs)
{
    num_shards = 1;
    shards[0].count = 0;
    while (shards[0].count < tokens)
        add_document(&shards[0], length);
    write_shards();
    Naive s = {.N = N, .max_document = max_document, .epochs = 2};
    int outcome, good = 0;
    for (int R = 1; R <= 8; R *= 2)
        good += compare_run(s, R, 5, &outcome) > 0 && outcome == END;
    LoaderOptions o = options_of(&s, 0, 1, 0);
    Loader *l = loader_open(&o, &e);
    Batch b;
    batch_alloc(&b, N, NULL);
    bool got = l && loader_next(l, &b, &e);
    ok(good == 4 && got && b.num_docs == want_docs,
       "%s: equal to the naive reading; %d documents in a micro-batch", name, b.num_docs);
    batch_free(&b);
    loader_close(l);
}

static void test_special_shards(void)
{
    test_equal_documents("documents of one token", 1, 2000, 24, 20, 24);
    test_equal_documents("every document longer than the limit", 50, 9000, 24, 20, 2);
    test_equal_documents("the (N+1)-th token begins a document: no entry for it", 8, 5000, 24, 20, 3);
    test_equal_documents("a document ends with the (N+1)-th token", 5, 5000, 24, 20, 5);
    test_equal_documents("one document fills the micro-batch", 90, 9000, 24, 100, 1);
    test_equal_documents("hundreds of documents in a micro-batch", 3, 60000, 2048, 2048, 683);
    test_equal_documents("sequences of one token", 2, 500, 1, 20, 1);

    // The last document is the document token that ends the shard, and the group just fits: 8 micro-batches
    // of 3 + 1 tokens.
    num_shards = 1;
    shards[0].count = 0;
    for (int m = 0; m < 8; m++) {
        add_document(&shards[0], 3);
        add_document(&shards[0], 1);
    }
    write_shards();
    Naive s = {.N = 3, .max_document = 3, .epochs = 2};
    int outcome, steps = compare_run(s, 2, 1, &outcome);
    ok(steps == 2 && outcome == END,
       "a group that ends with the shard's last token, a document token, is used (%d steps)", steps);
    shards[0].count--;
    write_shards();
    steps = compare_run(s, 2, 1, &outcome);
    ok(steps == 0 && outcome == TOO_SMALL, "one token less, and the shard is refused: %s", e.text);
}

static Loader *open_or_say(LoaderOptions o)
{
    Loader *l = loader_open(&o, &e);
    if (!l)
        ok(false, "%s", e.text);
    return l;
}

static void test_resume(int group)
{
    enum { STEPS = 40, N = 16 };
    num_shards = 3;
    for (int i = 0; i < num_shards; i++)
        random_shard(&shards[i], 2000 + 100 * i, 20);
    write_shards();
    Naive s = {.N = N, .max_document = 10, .group = group};
    LoaderOptions o = options_of(&s, 1, 4, 50);
    o.repeat = true;
    Loader *straight = open_or_say(o);
    static int32_t seen[STEPS][2][N];
    LoaderPosition places[STEPS + 1] = {{0}}, starts[STEPS];
    Batch b;
    batch_alloc(&b, N, NULL);
    for (int step = 0; step < STEPS; step++) {
        places[step] = loader_position(straight);
        for (int a = 0; a < 2; a++) {
            if (!loader_next(straight, &b, &e))
                ok(false, "%s", e.text);
            memcpy(seen[step][a], b.tokens, sizeof seen[0][0]);
            starts[step] = b.position;
        }
    }
    places[STEPS] = loader_position(straight);
    ok(places[STEPS].epoch >= 1, "the straight run of %d steps came to epoch %d, shard %d", STEPS,
       places[STEPS].epoch, places[STEPS].shard);
    int different = 0;
    Loader *again = open_or_say(o), *wandering = open_or_say(o);
    for (int from = 0; from < STEPS; from++) {
        Loader *l = from % 2 ? again : wandering; // one loader for many jumps, forwards and back
        LoaderPosition p = from % 3 ? places[from] : starts[from];
        if (!loader_seek(l, p, &e))
            ok(false, "%s", e.text);
        for (int step = from; step < STEPS && step < from + 12; step++)
            for (int a = 0; a < 2; a++)
                different += !loader_next(l, &b, &e) || memcmp(seen[step][a], b.tokens, sizeof seen[0][0]);
    }
    ok(different == 0, "resumed from every step, groups of %d: %d micro-batches differ from the straight run",
       group ? group : MICRO_BATCHES, different);
    batch_free(&b);
    loader_close(straight);
    loader_close(again);
    loader_close(wandering);
}

static bool refused_seek(LoaderOptions o, int epoch, int shard, int64_t document, const char *word)
{
    Loader *l = open_or_say(o);
    LoaderPosition p = {epoch, shard, document};
    bool refused = l && !loader_seek(l, p, &e) && strstr(e.text, word) && !strchr(e.text, '\n');
    loader_close(l);
    return refused;
}

static void test_seek_refusals(void) // on the three shards of test_resume
{
    Naive s = {.N = 16, .max_document = 10, .epochs = 2};
    LoaderOptions o = options_of(&s, 0, 1, 0);
    int64_t documents = 0;
    for (int i = 0; i < shards[1].count; i++)
        documents += shards[1].ids[i] == DOC;
    ok(refused_seek(o, 0, 3, 0, "shard 3"), "no such shard: %s", e.text);
    ok(refused_seek(o, 2, 0, 0, "epoch 2"), "no such epoch: %s", e.text);
    ok(refused_seek(o, 0, 1, documents + 1, "train_001.bin"), "no such document: %s", e.text);
    ok(refused_seek(o, -1, 0, 0, "epoch -1") && refused_seek(o, 0, -1, 0, "shard -1") &&
           refused_seek(o, 0, 0, -1, "document -1"),
       "negative positions are refused");
    Loader *l = open_or_say(o);
    Batch b;
    batch_alloc(&b, 16, NULL);
    LoaderPosition end = {0, 1, documents};
    ok(loader_seek(l, end, &e) && loader_next(l, &b, &e) && b.position.shard == 2 && b.position.document == 0,
       "the end of shard 1 is a place: the next step comes from shard 2");
    batch_free(&b);
    loader_close(l);
}

// ---- background reading -----------------------------------------------------------------------------------

typedef struct {
    int64_t hold_at, watch_for; // tokens
    sem_t release, held, watched;
} Gate;

static void gate_hook(void *context, int64_t num_indexed)
{
    Gate *g = context;
    if (num_indexed == g->hold_at) {
        sem_post(&g->held);
        sem_wait(&g->release);
    }
    if (num_indexed == g->watch_for)
        sem_post(&g->watched);
}

static void open_gate(Gate *g)
{
    sem_init(&g->release, 0, 0);
    sem_init(&g->held, 0, 0);
    sem_init(&g->watched, 0, 0);
}

static void test_background(void)
{
    num_shards = 2;
    random_shard(&shards[0], 20000, 20);
    random_shard(&shards[1], 30000, 20);
    write_shards();
    Naive s = {.N = 16, .max_document = 10, .epochs = 1};
    Gate gate = {.hold_at = 1000, .watch_for = shards[1].count};
    open_gate(&gate);
    LoaderOptions o = options_of(&s, 0, 8, 1000);
    o.chunk_hook = gate_hook;
    o.chunk_hook_context = &gate;
    Loader *l = open_or_say(o);
    Batch b;
    batch_alloc(&b, s.N, NULL);
    ok(sem_trywait(&gate.held) != 0, "no token is read before the first batch is asked for");
    alarm(60); // a loader that waits for the whole index would hang here for ever
    bool got = loader_next(l, &b, &e);
    sem_wait(&gate.held);
    ok(got && b.tokens[0] == DOC, "the first step comes while the index is held after %lld of %d tokens",
       (long long)gate.hold_at, shards[0].count);
    gate.hold_at = -1;
    sem_post(&gate.release);
    // Steps of the first shard only; the second must get ready by itself meanwhile.
    int steps = 1;
    struct timespec limit;
    bool ready = false;
    while (!ready && got && steps++ < 60) {
        got = loader_next(l, &b, &e) && b.position.shard == 0;
        clock_gettime(CLOCK_REALTIME, &limit);
        limit.tv_nsec += 20000000;
        limit.tv_sec += limit.tv_nsec / 1000000000;
        limit.tv_nsec %= 1000000000;
        ready = sem_timedwait(&gate.watched, &limit) == 0;
    }
    alarm(0);
    ok(got && ready, "the second shard was indexed to its end while the first one trained (step %d)", steps);
    batch_free(&b);
    loader_close(l);

    o.chunk_hook = NULL;
    o.chunk_tokens = 1;
    l = open_or_say(o);
    LoaderPosition p = {0, 0, 1};
    ok(loader_seek(l, p, &e), "closing while the thread still reads ends it");
    loader_close(l);
}

static void test_late_fault(void)
{
    num_shards = 2;
    random_shard(&shards[0], 3000, 20);
    random_shard(&shards[1], 3000, 20);
    write_shards();
    // An id outside the vocabulary in the second shard, which only the index can find.
    uint16_t bad = 999;
    int fd = open(shard_path(1), O_WRONLY);
    if (pwrite(fd, &bad, 2, SHARD_HEADER_BYTES + 2 * 2500) != 2)
        ok(false, "%s", strerror(errno));
    close(fd);
    Naive s = {.N = 16, .max_document = 10, .epochs = 1};
    LoaderOptions o = options_of(&s, 0, 1, 100);
    Loader *l = open_or_say(o);
    Batch b;
    batch_alloc(&b, s.N, NULL);
    int batches = 0, outside = 0;
    while (loader_next(l, &b, &e)) {
        batches += b.position.shard == 0;
        for (int i = 0; i < b.N; i++)
            outside += b.tokens[i] >= VOCAB || b.targets[i] >= VOCAB;
    }
    ok(batches >= 8 && outside == 0, "%d micro-batches of the sound shard were served", batches);
    ok(strstr(e.text, "train_001.bin: token 2500 has id 999") && strstr(e.text, "301"), "then: %s", e.text);
    loader_close(l);
    batch_free(&b);
}

// A file that shrinks after loader_open looked at it, and one that shrinks while it is read.
static void test_shrinking_file(void)
{
    num_shards = 1;
    random_shard(&shards[0], 3000, 20);
    Naive s = {.N = 16, .max_document = 10, .epochs = 1};
    LoaderOptions o = options_of(&s, 0, 8, 600);
    Batch b;
    batch_alloc(&b, s.N, NULL);
    write_shards();
    Loader *l = open_or_say(o);
    if (truncate(shard_path(0), 2000) != 0)
        ok(false, "%s", strerror(errno));
    ok(!loader_next(l, &b, &e) && strstr(e.text, "train_000.bin: truncated"),
       "cut short after loader_open: %s", e.text);
    loader_close(l);

    Gate gate = {.hold_at = 600, .watch_for = -1};
    open_gate(&gate);
    o.chunk_hook = gate_hook;
    o.chunk_hook_context = &gate;
    write_shards();
    l = open_or_say(o);
    bool got = loader_next(l, &b, &e);
    sem_wait(&gate.held);
    if (truncate(shard_path(0), 2000) != 0)
        ok(false, "%s", strerror(errno));
    sem_post(&gate.release);
    int steps = 1;
    while (loader_next(l, &b, &e))
        steps++;
    ok(got && steps < 10 && strstr(e.text, "train_000.bin: became shorter"), "cut short while it is read: %s",
       e.text);
    batch_free(&b);
    loader_close(l);
}

// ---- words ------------------------------------------------------------------------------------------------

static void test_describe(void)
{
    num_shards = 2;
    random_shard(&shards[0], 1000, 10);
    random_shard(&shards[1], 1000, 10);
    write_shards();
    Naive s = {.N = 16, .max_document = 10, .epochs = 3};
    LoaderOptions o = options_of(&s, 0, 1, 0);
    Loader *l = open_or_say(o);
    char *text = loader_describe(l),
         *want = format_string("2 shards, %d tokens", shards[0].count + shards[1].count);
    ok(strstr(text, want) && strstr(text, "3 times") && !strchr(text, '\n'), "%s", text);
    ok(loader_num_tokens(l) == shards[0].count + shards[1].count, "the tokens of all files are counted");
    free(text);
    free(want);
    loader_close(l);
    o.epochs = 1;
    l = open_or_say(o);
    text = loader_describe(l);
    ok(strstr(text, ", once; ") != NULL, "%s", text);
    free(text);
    loader_close(l);
}

int main(void)
{
    make_folder();
    set_program_name("test_dataloader", 1); // whose notes are not shown
    PART(test_random_shards());
    PART(test_special_shards());
    PART(test_resume(4));
    PART(test_resume(0));
    PART(test_seek_refusals());
    PART(test_background());
    PART(test_late_fault());
    PART(test_shrinking_file());
    PART(test_describe());
    remove_shards();
    ok(rmdir(folder) == 0, "nothing is left behind");
    return tap_done();
}
