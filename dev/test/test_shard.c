// Token shards: every refusal, the written format, validation sequences, and the sorted positions of a batch.
#include "dev/test/shard_material.h"
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

// ---- refusals ---------------------------------------------------------------------------------------------

static void write_raw(const char *path, const int32_t words[5], const uint16_t *ids, int count,
                      int extra_bytes)
{
    FILE *f = fopen(path, "wb");
    int32_t header[SHARD_HEADER_INTS] = {0};
    memcpy(header, words, 5 * sizeof *header);
    fwrite(header, 1, sizeof header, f);
    fwrite(ids, 2, (size_t)count, f);
    for (int i = 0; i < extra_bytes; i++)
        fputc(0, f);
    fclose(f);
}

static LoaderOptions small_options(const char *glob)
{
    LoaderOptions o = {.files_glob = glob,
                       .micro_batches = 2,
                       .micro_batch_tokens = 4,
                       .num_ranks = 1,
                       .max_document = 100};
    return o;
}

// Whether opening or the first batch is refused in one line that holds both words; the same words from
// validation, if asked.
static bool refused(LoaderOptions o, const char *word, const char *where, bool validation_too)
{
    Batch b;
    batch_alloc(&b, 4, NULL);
    Loader *l = loader_open(&o, &e);
    bool good = (!l || !loader_next(l, &b, &e)) && strstr(e.text, word) && strstr(e.text, where) &&
                !strchr(e.text, '\n');
    loader_close(l);
    batch_free(&b);
    if (!good || !validation_too)
        return good;
    Error ve;
    Validation *v = validation_open(o.files_glob, 8, 4, o.vocab_size, -1, &ve);
    good = !v && strstr(ve.text, word) && !strchr(ve.text, '\n');
    validation_close(v);
    return good;
}

typedef struct {
    const char *what;
    int32_t words[5]; // of the header
    int count, extra; // tokens, bytes behind them
    const char *word; // of the refusal
} BadFile;

static void test_file_refusals(void)
{
    static const uint16_t ids[12] = {DOC, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
    enum { M = SHARD_MAGIC, D = DOC + 1 };
    static const BadFile bad[] = {
        {"foreign magic", {20240521, 1, 12, VOCAB, D}, 12, 0, "not a token shard"},
        {"other version", {M, 2, 12, VOCAB, D}, 12, 0, "version 2"},
        {"truncated by a token", {M, 1, 12, VOCAB, D}, 11, 0, "truncated"},
        {"truncated by a byte", {M, 1, 12, VOCAB, D}, 11, 1, "truncated"},
        {"longer than its header says", {M, 1, 12, VOCAB, D}, 12, 1, "longer than its header"},
        {"no tokens", {M, 1, 0, VOCAB, D}, 0, 0, "promises 0 tokens"},
        {"negative number of tokens", {M, 1, -5, VOCAB, D}, 12, 0, "promises -5 tokens"},
        {"vocabulary too large", {M, 1, 12, 70000, D}, 12, 0, "vocabulary size 70000"},
        {"negative vocabulary", {M, 1, 12, -1, D}, 12, 0, "vocabulary size -1"},
        {"negative document token", {M, 1, 12, VOCAB, -3}, 12, 0, "document token"},
        {"document token outside the vocabulary",
         {M, 1, 12, VOCAB, VOCAB + 1},
         12,
         0,
         "outside its vocabulary"},
        {"id outside the vocabulary",
         {M, 1, 12, 200, 1},
         12,
         0,
         "token 0 has id 300, outside the vocabulary of 200"},
        {"no document start", {M, 1, 12, 0, 0}, 12, 0, "no document start"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *path = path_of("bad.bin");
        write_raw(path, bad[i].words, ids, bad[i].count, bad[i].extra);
        ok(refused(small_options(path), bad[i].word, "bad.bin", true), "%s: %s", bad[i].what, e.text);
    }
    FILE *f = fopen(path_of("bad.bin"), "wb");
    fclose(f);
    ok(refused(small_options(path_of("bad.bin")), "is empty", "bad.bin", true), "empty file: %s", e.text);
    if (truncate(path_of("bad.bin"), 500) != 0)
        ok(false, "%s", strerror(errno));
    ok(refused(small_options(path_of("bad.bin")), "truncated: 500 bytes", "bad.bin", true),
       "half a header: %s", e.text);
    unlink(path_of("bad.bin"));
}

static void test_path_refusals(void)
{
    const uint16_t ids[12] = {DOC, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, gpt2[12] = {SHARD_GPT2_DOCUMENT, 1, 2};
    ok(refused(small_options(path_of("none.bin")), "no file matches", "none.bin", true), "missing: %s",
       e.text);
    ok(refused(small_options(path_of("none*.bin")), "no file matches", "none*.bin", true),
       "nothing matches: %s", e.text);
    ok(refused(small_options(""), "is empty", "--train-files", false), "empty name: %s", e.text);
    ok(refused(small_options(folder), "is a directory", folder, true), "directory: %s", e.text);
    mkfifo(path_of("pipe.bin"), 0600);
    ok(refused(small_options(path_of("pipe.bin")), "not a regular file", "pipe.bin", true), "pipe: %s",
       e.text);
    unlink(path_of("pipe.bin"));

    bool written = shard_write(path_of("a.bin"), ids, 12, VOCAB, DOC, &e) &&
                   shard_write(path_of("b.bin"), gpt2, 12, 0, 0, &e);
    ok(written && refused(small_options(path_of("?.bin")), "b.bin", "a.bin has 301 ids", false),
       "mixed vocabularies: %s", e.text);
    LoaderOptions o = small_options(path_of("a.bin"));
    o.vocab_size = 257;
    ok(refused(o, "257 is needed", "a.bin", true), "another vocabulary than the model's: %s", e.text);
    // Unreadable: root reads everything, so this needs another user for a moment.
    if (geteuid() == 0) {
        if (seteuid(65534) != 0)
            ok(false, "%s", strerror(errno));
        Error denied;
        ShardHeader h;
        int fd = shard_open(path_of("a.bin"), &h, &denied);
        if (seteuid(0) != 0)
            ok(false, "%s", strerror(errno));
        ok(fd < 0 && strstr(denied.text, "Permission denied"), "unreadable: %s", denied.text);
    } else {
        chmod(path_of("a.bin"), 0);
        ok(refused(small_options(path_of("a.bin")), "Permission denied", "a.bin", true), "unreadable: %s",
           e.text);
    }
    unlink(path_of("a.bin"));
    unlink(path_of("b.bin"));
    bool odd = shard_write(path_of("[x].bin"), ids, 12, VOCAB, DOC, &e);
    o = small_options(path_of("[x].bin"));
    Loader *l = loader_open(&o, &e);
    ok(odd && l && loader_vocab_size(l) == VOCAB && loader_document_token(l) == DOC,
       "a plain name may contain brackets");
    loader_close(l);
    unlink(path_of("[x].bin"));
}

static bool refused_sizes(int micro_batches, int N, int rank, int ranks, int longest, int epochs, int vocab,
                          const char *word)
{
    LoaderOptions o = {.files_glob = pattern,
                       .micro_batches = micro_batches,
                       .micro_batch_tokens = N,
                       .rank = rank,
                       .num_ranks = ranks,
                       .max_document = longest,
                       .epochs = epochs,
                       .vocab_size = vocab};
    Loader *l = loader_open(&o, &e);
    bool good = !l && strstr(e.text, word) && !strchr(e.text, '\n');
    loader_close(l);
    return good;
}

static void test_size_refusals(void)
{
    ok(refused_sizes(0, 4, 0, 1, 9, 0, 0, "--micro-batches is 0"), "%s", e.text);
    ok(refused_sizes(8, 0, 0, 1, 9, 0, 0, "--micro-batch-tokens is 0"), "%s", e.text);
    ok(refused_sizes(8, INT32_MAX, 0, 1, 9, 0, 0, "--micro-batch-tokens is 2147483647"), "%s", e.text);
    ok(refused_sizes(8, 4, 0, 1, -1, 0, 0, "-1 tokens"), "%s", e.text);
    ok(refused_sizes(8, 4, 3, 3, 9, 0, 0, "rank 3 of 3"), "%s", e.text);
    ok(refused_sizes(8, 4, 0, 16, 9, 0, 0, "only 8 micro-batches"), "%s", e.text);
    ok(refused_sizes(8, 4, 0, 3, 9, 0, 0, "evenly"), "%s", e.text);
    ok(refused_sizes(8, 4, 0, 1, 9, -1, 0, "--epochs is -1"), "%s", e.text);
    ok(refused_sizes(8, 4, 0, 1, 9, 0, 70000, "70000"), "%s", e.text);
}

// ---- format -----------------------------------------------------------------------------------------------

static void test_format(void)
{
    // The public format: 0 in the words that it does not know.
    const uint16_t ids[3] = {SHARD_GPT2_DOCUMENT, 7, 65535 - 20000};
    uint8_t bytes[SHARD_HEADER_BYTES + 6 + 1];
    int32_t words[SHARD_HEADER_INTS];
    bool written = shard_write(path_of("w.bin"), ids, 3, SHARD_GPT2_VOCAB, SHARD_GPT2_DOCUMENT, &e);
    FILE *f = fopen(path_of("w.bin"), "rb");
    size_t size = f ? fread(bytes, 1, sizeof bytes, f) : 0;
    if (f)
        fclose(f);
    memcpy(words, bytes, sizeof words);
    ok(written && size == sizeof bytes - 1 && words[0] == 20240520 && words[1] == 1 && words[2] == 3 &&
           words[3] == 0 && words[4] == 0 && memcmp(bytes + SHARD_HEADER_BYTES, ids, 6) == 0,
       "shard_write writes the public format");
    ShardHeader h;
    words[2] = INT32_MAX;
    const int64_t full = SHARD_HEADER_BYTES + 2 * (int64_t)INT32_MAX;
    bool largest = shard_decode_header((uint8_t *)words, full, "x", &h, &e);
    ok(largest && h.num_tokens == INT32_MAX && h.vocab_size == 50257 && h.document_token == 50256,
       "2^31 - 1 tokens are a shard");
    ok(!shard_decode_header((uint8_t *)words, full - 1, "x", &h, &e) &&
           !shard_decode_header((uint8_t *)words, full + 1, "x", &h, &e),
       "one byte more or less is not: %s", e.text);

    // A disk that is full, seen from the program: the old file stays, nothing else does.
    struct rlimit old, tight = {2000, 2000};
    static uint16_t many[5000];
    many[0] = 5;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    tight.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &tight);
    bool full_disk = !shard_write(path_of("w.bin"), many, 5000, 10, 5, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    char left[200];
    snprintf(left, sizeof left, "%s.tmp", path_of("w.bin"));
    int fd = shard_open(path_of("w.bin"), &h, &e);
    ok(full_disk && fd >= 0 && h.num_tokens == 3 && access(left, F_OK) != 0,
       "a failed write leaves the old shard and no rest");
    if (fd >= 0)
        close(fd);
    unlink(path_of("w.bin"));
    ok(!shard_write(path_of("no/such.bin"), ids, 3, 0, 0, &e), "%s", e.text);
    ok(!shard_write(path_of("w.bin"), ids, 3, 257, 256, &e) &&
           strstr(e.text, "outside the vocabulary of 257"),
       "%s", e.text);
    ok(!shard_write(path_of("w.bin"), ids + 1, 2, 0, 0, &e) &&
           !shard_write(path_of("w.bin"), ids, 0, 0, 0, &e) &&
           !shard_write(path_of("w.bin"), ids, 3, 0x20000, 0, &e) && access(path_of("w.bin"), F_OK) != 0,
       "no document, no tokens, impossible vocabulary are not written");
}

// ---- validation -------------------------------------------------------------------------------------------

// Parts of `tokens`: whole documents, in order, all of them, each behind the token before it. Returns what is
// wrong.
static int wrong_parts(const Validation *v, const Tokens *t, int S, int tokens)
{
    Batch b;
    ValidationPart part;
    int wrong = 0;
    batch_alloc(&b, tokens, NULL);
    for (int q = 0; q < validation_num_sequences(v); q++) {
        const uint16_t *ids = t->ids + q * S;
        for (int begin = 0; begin < S; begin = part.end) {
            if (!validation_part(v, q, begin, &b, &part, &e) || part.begin != begin || part.end <= begin ||
                part.end > S)
                return -1;
            int first = part.first, docs = 0;
            wrong += first < 0 || first > (begin ? begin - 1 : 0) || part.end > first + tokens ||
                     first + tokens > S;
            wrong += part.end < S && ids[part.end] != DOC;
            for (int i = part.end + 1; i <= first + tokens; i++)
                wrong += i == S || ids[i] == DOC; // it could have been longer
            for (int i = 0; i < tokens; i++) {
                wrong += b.tokens[i] != ids[first + i] || b.targets[i] != ids[first + i + 1];
                if (i == 0 || ids[first + i] == DOC)
                    wrong += docs >= b.num_docs || b.cu_seqlens[docs++] != i;
            }
            wrong += docs != b.num_docs || b.cu_seqlens[docs] != tokens || b.rows.count != 0;
        }
    }
    batch_free(&b);
    return wrong;
}

static void test_validation_parts(const Validation *v, const Tokens *t, int S)
{
    int longest = 0, wrong = 0;
    for (int i = 1, begin = 0; i <= t->count - 1; i++)
        if (i % S == 0 || t->ids[i] == DOC) {
            if (i - begin > longest)
                longest = i - begin;
            begin = i;
        }
    ok(v && validation_longest(v) == longest && longest < S - 1, "the longest document has %d tokens",
       longest);
    for (int tokens = longest + 1; v && tokens <= S; tokens++)
        wrong += wrong_parts(v, t, S, tokens) != 0;
    ok(v && wrong == 0, "parts of %d to %d tokens: every document once and whole", longest + 1, S);
}

static bool whole_sequence(const Validation *v, int q, Batch *b, Error *error)
{
    ValidationPart part;
    return validation_part(v, q, 0, b, &part, error) && part.first == 0 && part.begin == 0 &&
           part.end == b->N;
}

static void test_validation(void)
{
    enum { S = 64, SEQUENCES = 20 };
    Tokens *t = &shards[0];
    random_shard(t, S * SEQUENCES, 40);
    t->count = S * SEQUENCES + 1; // exactly enough
    t->ids[0] = 3;                // a first document without a start
    t->ids[2 * S] = DOC;          // a document that begins a sequence
    t->ids[3 * S - 1] = DOC;      // and one that is its last input
    bool written = shard_write(path_of("val.bin"), t->ids, t->count, VOCAB, DOC, &e);
    Validation *v = validation_open(path_of("val.bin"), S * SEQUENCES, S, VOCAB, DOC, &e);
    ok(written && v && validation_num_sequences(v) == SEQUENCES && validation_vocab_size(v) == VOCAB &&
           validation_document_token(v) == DOC,
       "a shard of one token more than --val-tokens is enough");
    Batch b;
    batch_alloc(&b, S, NULL);
    int wrong = 0;
    for (int q = 0; q < SEQUENCES; q++) {
        wrong += !v || !whole_sequence(v, q, &b, &e);
        int docs = 0;
        for (int i = 0; i < S; i++) {
            wrong += b.tokens[i] != t->ids[q * S + i] || b.targets[i] != t->ids[q * S + i + 1];
            if (i == 0 || t->ids[q * S + i] == DOC)
                wrong += docs >= b.num_docs || b.cu_seqlens[docs++] != i;
        }
        wrong += docs != b.num_docs || b.cu_seqlens[docs] != S || b.rows.count != 0;
    }
    ok(wrong == 0, "%d sequences: tokens, targets and documents as defined (%d differences)", SEQUENCES,
       wrong);
    ok(v && !whole_sequence(v, SEQUENCES, &b, &e) && !whole_sequence(v, -1, &b, &e), "%s", e.text);
    test_validation_parts(v, t, S);
    validation_close(v);

    written = shard_write(path_of("val2.bin"), t->ids, t->count - 1, VOCAB, DOC, &e);
    v = validation_open(path_of("val2.bin"), S * SEQUENCES, S, VOCAB, DOC, &e);
    ok(written && !v && strstr(e.text, "--val-tokens 1216"), "one token less is not enough: %s", e.text);
    unlink(path_of("val2.bin"));
    v = validation_open(path_of("val.bin"), S * (SEQUENCES + 1), S, VOCAB, DOC, &e);
    ok(!v && strstr(e.text, "--val-tokens 1280"), "too short: %s", e.text);
    v = validation_open(path_of("val.bin"), 8192, 4096, VOCAB, DOC, &e);
    ok(!v && strstr(e.text, "larger file") && strstr(e.text, "4097"), "shorter than a sequence: %s", e.text);
    v = validation_open(path_of("val.bin"), S * SEQUENCES - 1, S, VOCAB, DOC, &e);
    ok(!v && strstr(e.text, "multiple"), "%s", e.text);
    ok(!validation_open(path_of("val.bin"), 0, S, VOCAB, DOC, &e) &&
           !validation_open(path_of("val.bin"), S, 0, VOCAB, DOC, &e),
       "no tokens and no sequence length are refused: %s", e.text);
    ok(!validation_open(path_of("val.bin"), S, S, VOCAB, DOC - 1, &e) && strstr(e.text, "299 is needed"),
       "%s", e.text);
    written = shard_write(path_of("val2.bin"), t->ids, t->count, VOCAB, DOC, &e);
    ok(written && !validation_open(path_of("val*.bin"), S, S, VOCAB, DOC, &e) && strstr(e.text, "2 files"),
       "%s", e.text);
    // A document start after the tokens in use is one all the same.
    memset(t->ids, 0, S * 2 * sizeof *t->ids);
    written = shard_write(path_of("val2.bin"), t->ids, t->count, VOCAB, DOC, &e);
    v = validation_open(path_of("val2.bin"), S, S, VOCAB, DOC, &e);
    ok(written && v && whole_sequence(v, 0, &b, &e) && b.num_docs == 1,
       "no document token in the sequence: one document");
    validation_close(v);
    batch_free(&b);
    unlink(path_of("val.bin"));
    unlink(path_of("val2.bin"));
}

int main(void)
{
    make_folder();
    PART(test_file_refusals());
    PART(test_path_refusals());
    PART(test_size_refusals());
    PART(test_format());
    PART(test_validation());
    ok(rmdir(folder) == 0, "nothing is left behind");
    return tap_done();
}
