#include "llmc/run/evaluate.h"
#include "llmc/io/append_file.h"
#include "llmc/run/vocabulary.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BETWEEN = EVAL_LEAD - 1 }; // tokens between two texts

struct Evaluation {
    Trainer *t;
    int document, vocab; // the document token; ids of the vocabulary
    int count;
    EvalSet set[MAX_EVALS];
    AppendFile items; // without a path: no --eval-items
    float *losses;    // (part_tokens) of a batch
    float *logits;    // (padded vocabulary)
    double shown_at;  // progress
};

// ---- files ------------------------------------------------------------------------------------------------

static bool check_same_files(const EvalSet *s, Error *e)
{
    return comm_agrees(eval_set_fingerprint(s)) ||
           error_set(e, "--eval: %s of this rank is not that of rank 0", s->path);
}

static bool open_sets(Evaluation *v, const EvalEntry *entries, const Tokenizer *tokenizer, Error *e)
{
    int longest = v->t->part_tokens - EVAL_LEAD;
    if (longest < 1)
        return error_set(e,
                         "--eval: batches of %d tokens are too short; raise --micro-batch-tokens "
                         "(--resume keeps it; --init-from takes the same file)",
                         v->t->part_tokens);
    int piece = (int)min_i64(longest, v->t->config->max_document);
    for (int i = 0; i < v->count; i++) {
        Error why;
        if (!eval_set_open(&v->set[i], &entries[i], tokenizer, longest, piece, &why))
            return error_set(e, "--eval %s: %s", eval_task_name(entries[i].task), why.text);
        if (!check_same_files(&v->set[i], e))
            return false;
    }
    return true;
}

static bool open_items(Evaluation *v, Error *e)
{
    const char *path = v->t->config->eval_items;
    if (!*path || comm_rank())
        return true;
    bool goes_on = v->t->loader && *v->t->config->resume; // its lines name their steps
    Error why;
    return append_file_continue(&v->items, xstrdup(path), goes_on, &why) ||
           error_set(e, "--eval-items: %s", why.text);
}

static bool open_all(Evaluation *v, Error *e)
{
    EvalEntry entries[MAX_EVALS];
    v->count = eval_list_parse(v->t->config->eval, entries, e);
    if (v->count < 0)
        return false;
    Tokenizer *tokenizer = vocabulary_open(v->t->config, "--eval", e);
    bool good = tokenizer && open_sets(v, entries, tokenizer, e) && open_items(v, e);
    if (tokenizer) {
        v->document = tokenizer_document(tokenizer);
        v->vocab = tokenizer_vocab_size(tokenizer);
    }
    tokenizer_free(tokenizer);
    eval_list_free(entries, v->count);
    return good;
}

Evaluation *evaluation_open(Trainer *t, Error *e)
{
    Evaluation *v = xcalloc(1, sizeof *v);
    v->t = t;
    if (!open_all(v, e)) {
        evaluation_close(v);
        return NULL;
    }
    v->losses = xcalloc((size_t)t->part_tokens, sizeof *v->losses);
    v->logits = xcalloc((size_t)config_vocab_padded(t->config), sizeof *v->logits);
    return v;
}

void evaluation_close(Evaluation *v)
{
    if (!v)
        return;
    for (int i = 0; i < v->count; i++)
        eval_set_close(&v->set[i]);
    if (v->items.path)
        append_file_close(&v->items);
    free(v->losses);
    free(v->logits);
    free(v);
}

int evaluation_count(const Evaluation *v) { return v->count; }

// ---- packing ----------------------------------------------------------------------------------------------

static void put(Batch *b, int *at, int token, bool begins)
{
    if (begins)
        b->cu_seqlens[b->num_docs++] = *at;
    b->targets[*at] = 0;
    b->tokens[(*at)++] = token;
}

// Its last token is a target only.
static void put_text(Batch *b, int *at, const EvalSet *s, const EvalText *text)
{
    const uint16_t *ids = s->ids.ids + text->first;
    for (int i = 0; i + 1 < text->tokens; i++) {
        put(b, at, ids[i], i == 0);
        b->targets[*at - 1] = ids[i + 1];
    }
}

// Fills the batch with texts from number `from` on, at most up to `end`; row[i]: where text from + i begins.
// Returns the number of the first one that is not in it.
static int64_t pack(const Evaluation *v, const EvalSet *s, int64_t from, int64_t end, int *row)
{
    Batch *b = &v->t->eval_batch;
    int at = 0;
    int64_t next = from;
    b->num_docs = b->rows.count = b->bigram.count = 0;
    put(b, &at, v->document, true);
    for (; next < end && at + BETWEEN + s->texts[next].tokens - 1 <= b->N; next++) {
        put(b, &at, v->document, false);
        put(b, &at, v->document, true);
        row[next - from] = at;
        put_text(b, &at, s, &s->texts[next]);
    }
    for (int rest = at; at < b->N;)
        put(b, &at, v->document, at == rest);
    b->cu_seqlens[b->num_docs] = b->N;
    batch_hash_pairs(b, 0, 0);
    return next;
}

// ---- scores -----------------------------------------------------------------------------------------------

static int likeliest(const float *z, int count)
{
    int best = 0;
    for (int i = 1; i < count; i++)
        best = z[i] > z[best] ? i : best;
    return best;
}

// Whether each scored token is the likeliest one; row: of the text's first token.
static bool is_exact(const Evaluation *v, const EvalText *text, int row)
{
    Trainer *t = v->t;
    int first = row + text->tokens - 1 - text->scored;
    bool exact = true;
    for (int i = 0; i < text->scored && exact; i++) {
        trainer_token_logits(t, &t->eval, first + i, v->logits);
        exact = likeliest(v->logits, v->vocab) == t->eval_batch.targets[first + i];
    }
    return exact;
}

static EvalScore score(const Evaluation *v, const EvalSet *s, const EvalText *text, int row)
{
    EvalScore score = {0};
    int end = row + text->tokens - 1;
    for (int i = end - text->scored; i < end; i++)
        score.loss += (double)v->losses[i];
    score.exact = s->task == EVAL_LAMBADA && is_exact(v, text, row);
    return score;
}

static void show_progress(Evaluation *v, const EvalSet *s, int64_t done, int64_t of)
{
    bool terminal = isatty(STDERR_FILENO), last = done == of;
    double now = seconds_now();
    if (comm_rank())
        return;
    if (terminal && last)
        fprintf(stderr, "\r\033[K");
    if (last || now - v->shown_at < (terminal ? 0.2 : 10))
        return;
    v->shown_at = now;
    int percent = (int)(100 * done / of);
    if (terminal)
        fprintf(stderr, "\r\033[K%s: %d%%", eval_task_name(s->task), percent);
    else
        note("%s: %d%% is evaluated", eval_task_name(s->task), percent);
}

// First text of a rank's items.
static int64_t share_begins(const EvalSet *s, int rank)
{
    return s->count * rank / comm_size() * s->per_item;
}

static void score_share(Evaluation *v, const EvalSet *s, bool final, EvalScore *scores)
{
    int64_t begin = share_begins(s, comm_rank()), end = share_begins(s, comm_rank() + 1);
    int *row = xcalloc((size_t)v->t->eval_batch.N, sizeof *row);
    AttentionSetting at = trainer_begin_evaluation(v->t, final);
    v->shown_at = seconds_now();
    for (int64_t from = begin, next; from < end; from = next) {
        comm_step(v->t->step); // a long evaluation is no standstill
        next = pack(v, s, from, end, row);
        trainer_token_losses(v->t, &at, v->losses);
        for (int64_t i = from; i < next; i++)
            scores[i] = score(v, s, &s->texts[i], row[i - from]);
        show_progress(v, s, next - begin, end - begin);
    }
    free(row);
}

static void collect_scores(const EvalSet *s, EvalScore *scores)
{
    for (int r = 1; r < comm_size(); r++) {
        int64_t begin = share_begins(s, r), count = share_begins(s, r + 1) - begin;
        size_t bytes = (size_t)count * sizeof *scores;
        comm_collect(scores + begin, comm_rank() == r ? bytes : 0, bytes, r);
    }
}

// ---- items ------------------------------------------------------------------------------------------------

static void put_json(const EvalSet *s, int64_t item, const EvalScore *scores, JsonRecord *r)
{
    int64_t at = item * s->per_item;
    double loss[EVAL_ENDINGS], tokens[EVAL_ENDINGS];
    for (int i = 0; i < s->per_item; i++) {
        loss[i] = scores[at + i].loss;
        tokens[i] = s->texts[at + i].scored;
    }
    json_numbers(r, "losses", loss, s->per_item);
    json_numbers(r, "tokens", tokens, s->per_item);
    if (s->task == EVAL_HELLASWAG) {
        json_number(r, "label", s->items[item].label);
        json_number(r, "choice", eval_choice(s->texts + at, scores + at, false));
        json_number(r, "choice_normalised", eval_choice(s->texts + at, scores + at, true));
    } else if (s->task == EVAL_LAMBADA) {
        json_flag(r, "exact", scores[at].exact);
    } else {
        json_number(r, "bytes", (double)s->texts[at].bytes);
    }
}

static void write_item(Evaluation *v, const EvalSet *s, int64_t i, const EvalScore *scores)
{
    size_t bytes;
    JsonRecord *r = json_record("item");
    json_number(r, "step", v->t->step);
    json_text(r, "task", eval_task_name(s->task));
    json_number(r, "item", (double)(i + 1));
    if (s->items[i].line)
        json_number(r, "line", (double)s->items[i].line);
    put_json(s, i, scores, r);
    char *line = json_line(r, &bytes);
    append_file_write(&v->items, line, bytes);
    free(line);
}

// A full disk does not end a run.
static void write_items(Evaluation *v, const EvalSet *s, const EvalScore *scores)
{
    for (int64_t i = 0; i < s->count && v->items.path && v->items.fd >= 0; i++)
        write_item(v, s, i, scores);
}

bool evaluation_run(Evaluation *v, int index, bool final, Evaluated *r, Error *e)
{
    const EvalSet *s = &v->set[index];
    double began = seconds_now();
    EvalScore *scores = xcalloc((size_t)(s->count * s->per_item), sizeof *scores);
    score_share(v, s, final, scores);
    collect_scores(s, scores);
    bool good = comm_rank() || eval_measure(s, scores, r, e);
    if (!comm_rank() && good) {
        r->seconds = seconds_now() - began;
        write_items(v, s, scores);
    }
    free(scores);
    return good;
}
