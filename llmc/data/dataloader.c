#include "llmc/data/dataloader.h"
#include "llmc/data/shard_set.h"
#include <stdlib.h>
#include <string.h>

// 512 KB at a time: the first step waits for two or three of these, and one takes well under a millisecond.
enum { CHUNK_TOKENS = 1 << 18 };

struct Loader {
    LoaderOptions options;
    char *files_glob;
    ShardSet set;
    ShardReader readers[2];    // the shard that trains and the next one, taking turns
    int current;               // index of the reader that trains
    int reading[2];            // shard that a reader holds, -1: none
    LoaderPosition position;   // where the next group is looked for
    LoaderPosition step_start; // first document of the step's first group
    int64_t *first_document; // (group_micro_batches + 1) of each micro-batch of the planned group, and where
                             // the next one begins
    int planned;             // groups of this step up to the planned one, 0: none yet
    int accumulated;         // micro-batches of this step that this rank has taken
    bool counting;           // steps are counted: nothing is said
};

static bool check_options(const LoaderOptions *o, Error *e)
{
    if (o->micro_batches < 1)
        return error_set(e, "--micro-batches is %d; it must be at least 1", o->micro_batches);
    if (o->micro_batch_tokens < 1 || o->micro_batch_tokens > MAX_BATCH_TOKENS)
        return error_set(e, "--micro-batch-tokens is %d; it must be 1 to %d", o->micro_batch_tokens,
                         MAX_BATCH_TOKENS);
    if (o->max_document < 1)
        return error_set(e, "the longest document is %d tokens; it must be at least 1", o->max_document);
    if (o->num_ranks < 1 || o->rank < 0 || o->rank >= o->num_ranks)
        return error_set(e, "rank %d of %d ranks is impossible", o->rank, o->num_ranks);
    if (o->num_ranks > o->micro_batches)
        return error_set(e, "%d ranks, but only %d micro-batches in a step; use at most as many ranks",
                         o->num_ranks, o->micro_batches);
    if (o->micro_batches % o->num_ranks)
        return error_set(e, "%d micro-batches cannot be shared evenly by %d ranks; use a divisor of %d",
                         o->micro_batches, o->num_ranks, o->micro_batches);
    if (o->epochs < 0)
        return error_set(e, "--epochs is %d; it cannot be negative", o->epochs);
    if (o->vocab_size < 0 || o->vocab_size > SHARD_MAX_VOCAB)
        return error_set(e, "a vocabulary of %d ids is impossible; shards hold ids below %d", o->vocab_size,
                         SHARD_MAX_VOCAB);
    return true;
}

static bool no_complete_group(const Loader *l, int shard, Error *e)
{
    const LoaderOptions *o = &l->options;
    return error_set(e,
                     "%s: too small: its %lld tokens do not make one group of %d micro-batches of %d tokens "
                     "from documents of at most %d; leave it out, or lower --micro-batch-tokens",
                     l->set.paths[shard], (long long)l->set.files[shard].header.num_tokens,
                     o->group_micro_batches, o->micro_batch_tokens, o->max_document);
}

// A shard of long documents may be too small though its size is not. A run that is under way has it in its
// list of shards, so it goes on without; where all are so, there is nothing to go on with.
static bool pass_over_shard(const Loader *l, int passed, Error *e)
{
    const LoaderOptions *o = &l->options;
    if (passed == 1 && l->set.count == 1)
        return no_complete_group(l, l->position.shard, e);
    if (passed == l->set.count)
        return error_set(
            e,
            "too small: none of the %d training shards makes one group of %d micro-batches of %d "
            "tokens from documents of at most %d; lower --micro-batch-tokens",
            passed, o->group_micro_batches, o->micro_batch_tokens, o->max_document);
    if (!l->counting && l->position.epoch == 0) // of many passes the first says it
        note("%s is passed over: its documents, of at most %d tokens each, do not make one group of %d "
             "micro-batches of %d tokens",
             l->set.paths[l->position.shard], o->max_document, o->group_micro_batches, o->micro_batch_tokens);
    return true;
}

static bool open_files(Loader *l, Error *e)
{
    const LoaderOptions *o = &l->options;
    if (!shard_set_find(&l->set, o->files_glob, "--train-files", e))
        return false;
    if (!shard_set_check(&l->set, o->vocab_size, -1, e))
        return false;
    // Most shards that are too small can be told by their size: better now than after hours of training.
    for (int i = 0; i < l->set.count; i++)
        if (l->set.files[i].header.num_tokens / o->group_micro_batches < (int64_t)o->micro_batch_tokens + 1)
            return no_complete_group(l, i, e);
    return true;
}

Loader *loader_open(const LoaderOptions *given, Error *e)
{
    LoaderOptions options = *given;
    if (!options.group_micro_batches)
        options.group_micro_batches = options.micro_batches;
    if (!check_options(&options, e))
        return NULL;
    assert(options.group_micro_batches > 0 && options.micro_batches % options.group_micro_batches == 0);
    Loader *l = xcalloc(1, sizeof *l);
    l->options = options;
    l->options.files_glob = l->files_glob = xstrdup(options.files_glob ? options.files_glob : "");
    if (l->options.chunk_tokens <= 0)
        l->options.chunk_tokens = CHUNK_TOKENS;
    l->first_document = xcalloc((size_t)options.group_micro_batches + 1, sizeof *l->first_document);
    for (int i = 0; i < 2; i++) {
        shard_reader_init(&l->readers[i]);
        l->reading[i] = -1;
    }
    if (!open_files(l, e)) {
        loader_close(l);
        return NULL;
    }
    return l;
}

void loader_close(Loader *l)
{
    if (!l)
        return;
    for (int i = 0; i < 2; i++)
        shard_reader_free(&l->readers[i]);
    shard_set_free(&l->set);
    free(l->first_document);
    free(l->files_glob);
    free(l);
}

// Makes reader `which` hold `shard`; nothing to do when it does already.
static bool start_reading(Loader *l, int which, int shard, Error *e)
{
    if (l->reading[which] == shard)
        return true;
    l->reading[which] = shard;
    return shard_reader_start(&l->readers[which], l->set.paths[shard], &l->set.files[shard],
                              l->options.chunk_tokens, l->options.chunk_hook, l->options.chunk_hook_context,
                              e);
}

static bool epoch_allowed(const LoaderOptions *o, int32_t epoch)
{
    if (o->epochs > 0)
        return epoch < o->epochs;
    return o->repeat ? epoch < INT32_MAX : epoch == 0;
}

// The shard after the current one; false when the data ends there.
static bool following_shard(const Loader *l, LoaderPosition *next)
{
    next->document = 0;
    next->epoch = l->position.epoch;
    next->shard = l->position.shard + 1;
    if (next->shard < l->set.count)
        return true;
    next->shard = 0;
    next->epoch++;
    return epoch_allowed(&l->options, next->epoch);
}

static bool advance_shard(Loader *l, Error *e)
{
    LoaderPosition next;
    if (!following_shard(l, &next))
        return error_set(e,
                         "%s: the training data ends here, after %d %s over %d %s; give more files, fewer "
                         "steps, or --repeat or --epochs",
                         l->set.paths[l->position.shard], next.epoch, next.epoch == 1 ? "pass" : "passes",
                         l->set.count, l->set.count == 1 ? "shard" : "shards");
    if (l->reading[l->current] != next.shard)
        l->current ^= 1; // a single shard stays where it is
    l->position = next;
    return start_reading(l, l->current, next.shard, e);
}

// Begins to read the next shard once the current one is in memory: before that, the two would compete for the
// disk.
static bool read_ahead(Loader *l, Error *e)
{
    LoaderPosition next;
    if (!following_shard(l, &next) || next.shard == l->position.shard)
        return true;
    if (!shard_reader_finished(&l->readers[l->current]))
        return true;
    return start_reading(l, l->current ^ 1, next.shard, e);
}

// How many of a document's tokens go into a micro-batch that lacks `lacking`.
static int64_t tokens_taken(const Loader *l, int64_t start, int64_t end, int64_t lacking)
{
    return min_i64(min_i64(end - start, l->options.max_document), lacking);
}

// Walks the documents of one group from the current position. DOCUMENT_PAST_END: the shard ends before the
// group is complete.
static DocumentResult plan_group(Loader *l, Error *e)
{
    ShardReader *r = &l->readers[l->current];
    int64_t d = l->position.document, start, end;
    DocumentResult result = DOCUMENT_FOUND;
    pthread_mutex_lock(&r->lock);
    for (int m = 0; m < l->options.group_micro_batches && result == DOCUMENT_FOUND; m++) {
        l->first_document[m] = d;
        int64_t lacking = (int64_t)l->options.micro_batch_tokens + 1;
        while (lacking > 0 && (result = shard_reader_document(r, d, &start, &end, e)) == DOCUMENT_FOUND) {
            lacking -= tokens_taken(l, start, end, lacking);
            d++;
        }
    }
    pthread_mutex_unlock(&r->lock);
    l->first_document[l->options.group_micro_batches] = d;
    return result;
}

// Plans the next group, in this shard or the next one.
static bool begin_group(Loader *l, Error *e)
{
    int passed = 0;
    if (!start_reading(l, l->current, l->position.shard, e))
        return false;
    for (;;) {
        DocumentResult result = plan_group(l, e);
        if (result == DOCUMENT_ERROR)
            return false;
        if (result == DOCUMENT_FOUND)
            break;
        if (l->position.document == 0 && !pass_over_shard(l, ++passed, e))
            return false;
        if (!advance_shard(l, e))
            return false;
    }
    if (++l->planned == 1)
        l->step_start = l->position;
    return read_ahead(l, e);
}

// Plans on until this many groups of the step are passed or planned; all but the last may lie in another
// shard.
static bool plan_groups(Loader *l, int groups, Error *e)
{
    while (l->planned < groups) {
        if (l->planned > 0)
            l->position.document = l->first_document[l->options.group_micro_batches];
        if (!begin_group(l, e))
            return false;
    }
    return true;
}

// Copies micro-batch m of the planned group.
static bool fill_batch(Loader *l, int m, Batch *b, Error *e)
{
    ShardReader *r = &l->readers[l->current];
    const int N = b->N;
    int64_t start, end, gathered = 0, d = l->first_document[m];
    b->num_docs = 0;
    pthread_mutex_lock(&r->lock);
    while (gathered < N + 1) {
        if (shard_reader_document(r, d++, &start, &end, e) != DOCUMENT_FOUND)
            break; // planned, so only a fault of the file
        int64_t taken = tokens_taken(l, start, end, N + 1 - gathered);
        int64_t inputs =
            min_i64(taken,
                    N - gathered); // 0 when the document gives only the last target: then it is no segment
        if (inputs > 0)
            b->cu_seqlens[b->num_docs++] = (int32_t)gathered;
        for (int64_t i = 0; i < inputs; i++)
            b->tokens[gathered + i] = r->tokens[start + i];
        gathered += taken;
        b->targets[N - 1] = r->tokens[start + taken - 1]; // stands after the last round
    }
    pthread_mutex_unlock(&r->lock);
    if (gathered < N + 1)
        return false;
    b->cu_seqlens[b->num_docs] = N;
    memcpy(b->targets, b->tokens + 1, (size_t)(N - 1) * sizeof *b->targets);
    return true;
}

void loader_set_sizes(Loader *l, int micro_batch_tokens, int max_document)
{
    assert(l->accumulated == 0 && l->planned == 0 && micro_batch_tokens >= 1 && max_document >= 1);
    l->options.micro_batch_tokens = micro_batch_tokens;
    l->options.max_document = max_document;
}

bool loader_next(Loader *l, Batch *batch, Error *e)
{
    const LoaderOptions *o = &l->options;
    assert(batch->N == o->micro_batch_tokens);
    const int G = o->group_micro_batches, m = l->accumulated * o->num_ranks + o->rank;
    if (!plan_groups(l, m / G + 1, e) || !fill_batch(l, m % G, batch, e))
        return false;
    batch_complete(batch);
    batch->position = l->step_start;
    if (++l->accumulated < o->micro_batches / o->num_ranks)
        return true;
    if (!plan_groups(l, o->micro_batches / G, e))
        return false; // those after this rank's last micro-batch
    l->position.document = l->first_document[G];
    l->accumulated = l->planned = 0;
    return true;
}

int64_t loader_count_steps(Loader *l, int64_t most)
{
    const LoaderOptions *o = &l->options;
    Error e;
    int64_t steps = 0;
    l->counting = true;
    while (steps < most && plan_groups(l, o->micro_batches / o->group_micro_batches, &e)) {
        l->position.document = l->first_document[o->group_micro_batches];
        l->planned = 0;
        steps++;
    }
    l->counting = false;
    return steps;
}

LoaderPosition loader_position(const Loader *l)
{
    assert(l->accumulated == 0);
    return l->position;
}

bool loader_seek(Loader *l, LoaderPosition p, Error *e)
{
    if (p.epoch < 0 || p.shard < 0 || p.document < 0 || !epoch_allowed(&l->options, p.epoch) ||
        p.shard >= l->set.count)
        return error_set(e,
                         "cannot continue at epoch %d, shard %d, document %lld: '%s' has %d shards (and see "
                         "--epochs, --repeat); use "
                         "the files of the interrupted run",
                         p.epoch, p.shard, (long long)p.document, l->files_glob, l->set.count);
    l->accumulated = l->planned = 0;
    l->position = p;
    if (l->reading[l->current ^ 1] == p.shard)
        l->current ^= 1;
    if (!start_reading(l, l->current, p.shard, e))
        return false;
    if (p.document == 0)
        return true;
    // The document before must exist: the position may be the end of the shard.
    ShardReader *r = &l->readers[l->current];
    int64_t start, end;
    pthread_mutex_lock(&r->lock);
    DocumentResult result = shard_reader_document(r, p.document - 1, &start, &end, e);
    int64_t num_documents = r->num_starts;
    pthread_mutex_unlock(&r->lock);
    if (result != DOCUMENT_PAST_END)
        return result == DOCUMENT_FOUND;
    return error_set(e,
                     "cannot continue at epoch %d, shard %d, document %lld: %s has only %lld documents; use "
                     "the files of the "
                     "interrupted run",
                     p.epoch, p.shard, (long long)p.document, l->set.paths[p.shard],
                     (long long)num_documents);
}

int loader_vocab_size(const Loader *l) { return l->set.files[0].header.vocab_size; }
int loader_document_token(const Loader *l) { return l->set.files[0].header.document_token; }
int64_t loader_num_tokens(const Loader *l) { return l->set.num_tokens; }

uint64_t loader_fingerprint(const Loader *l) { return shard_set_fingerprint(&l->set); }
char *loader_shards(const Loader *l) { return shard_set_text(&l->set); }
bool loader_continues(const Loader *l, const char *shards, LoaderPosition p, Error *e)
{
    return shard_set_continues(&l->set, shards, p.epoch == 0, e);
}

char *loader_describe(const Loader *l)
{
    const LoaderOptions *o = &l->options;
    char epochs[32] = "once", groups[48] = "";
    if (o->group_micro_batches < o->micro_batches)
        snprintf(groups, sizeof groups, " in groups of %d", o->group_micro_batches);
    if (o->epochs > 1)
        snprintf(epochs, sizeof epochs, "%d times", o->epochs);
    else if (o->repeat)
        snprintf(epochs, sizeof epochs, "repeated");
    return format_string("%s: %d %s, %lld tokens, vocabulary of %d ids, documents begin with %d, %s; %d x %d "
                         "tokens a step%s, documents "
                         "cut at %d",
                         l->files_glob, l->set.count, l->set.count == 1 ? "shard" : "shards",
                         (long long)l->set.num_tokens, loader_vocab_size(l), loader_document_token(l), epochs,
                         o->micro_batches, o->micro_batch_tokens, groups, o->max_document);
}
