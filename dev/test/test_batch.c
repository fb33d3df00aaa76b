// What batches have beside tokens: sorted rows, rows of pairs of tokens and prefixes, against the reference
// (dev/reference/golden) and a reading of the definition; the block that travels to the device.
#include "dev/test/golden_file.h"
#include "dev/test/tap.h"
#include "llmc/run/batch_block.h"
#include "llmc/text/impossible.h"
#include <unistd.h>

static const PairHash small_hash = {97, 32}, full_hash = {377280, 8192};

static uint32_t random_state = 1;

static int random_below(int n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((uint64_t)random_state * (uint64_t)n >> 32);
}

static void random_tokens(Batch *b, int vocab) // frequent ids, as in text
{
    for (int i = 0; i < b->N; i++) {
        b->tokens[i] = random_below(1 + random_below(vocab));
        b->targets[i] = random_below(1 + random_below(vocab));
    }
    b->num_docs = 3;
    b->cu_seqlens[1] = 1;
    b->cu_seqlens[2] = b->N / 2;
    b->cu_seqlens[3] = b->N;
}

static bool sorted(const BatchRows *r, const int32_t *ids, int N)
{
    bool good = r->start[0] == 0 && r->start[r->count] == N;
    for (int i = 0; i < r->count && good; i++) {
        good = r->start[i] < r->start[i + 1] && (i == 0 || r->row[i] > r->row[i - 1]);
        for (int k = r->start[i]; k < r->start[i + 1] && good; k++)
            good = ids[r->order[k]] == r->row[i] && (k == r->start[i] || r->order[k] > r->order[k - 1]);
    }
    return good;
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

// What qsort takes for the same order, in seconds: a yardstick that is as fast as the machine is.
static double qsort_seconds(const Batch *b, int n)
{
    int64_t *keys = xcalloc((size_t)n, sizeof *keys);
    for (int i = 0; i < n; i++)
        keys[i] = (int64_t)b->tokens[i] * n + i;
    double start = seconds_now();
    qsort(keys, (size_t)n, sizeof *keys, by_value);
    double seconds = seconds_now() - start;
    free(keys);
    return seconds;
}

static void check_sort(void)
{
    enum { N = 32768 };
    Batch b;
    batch_alloc(&b, N, &(BatchTables){.pairs = full_hash});
    random_tokens(&b, 50304);
    double best = 1e9, best_qsort = 1e9;
    for (int i = 0; i < 20; i++) {
        best_qsort = fmin(best_qsort, qsort_seconds(&b, N));
        for (int k = 0; k < 5; k++) {
            double start = seconds_now();
            batch_complete(&b);
            best = fmin(best, seconds_now() - start);
        }
    }
    ok(sorted(&b.rows, b.tokens, N), "%d tokens sorted into %d rows", N, b.rows.count);
    ok(sorted(&b.bigram, b.bigram_rows, N), "their pairs sorted into %d rows", b.bigram.count);
#if defined __OPTIMIZE__ && !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
    printf("# both sorts: %.3f ms\n", 1e3 * best);
    ok_at_most(best / best_qsort, 0.5, "both sorts take at best, of the time of one qsort");
#else
    skip("the sorts are timed in an optimised build without sanitizers");
#endif
    batch_free(&b);
    // Widths of the counters: tables of a few rows to many.
    for (int rows = 3; rows < 1 << 24; rows = rows * 5 + 1) {
        batch_alloc(&b, 300, &(BatchTables){.pairs = {rows, 16}});
        random_tokens(&b, 257);
        batch_complete(&b);
        ok(sorted(&b.bigram, b.bigram_rows, 300) && b.bigram.row[b.bigram.count - 1] == rows - 1,
           "a table of %d rows: %d are read, among them that of position 0", rows, b.bigram.count);
        batch_free(&b);
    }
}

static int differences(const int32_t *a, const int32_t *b, int n)
{
    int count = 0;
    for (int i = 0; i < n; i++)
        count += a[i] != b[i];
    return count;
}

// At the full sizes. Some positions' values stand in the description, too.
static void check_full_rows(void)
{
    SafeTensors *st = open_golden("2026-rows");
    int64_t N;
    int32_t *tokens = read_golden(st, "tokens", &N), *rows = read_golden(st, "bigram_rows", NULL),
            *signs = read_golden(st, "sign_rows", NULL);
    Batch b, rest;
    batch_alloc(&b, (int)N, &(BatchTables){.pairs = full_hash});
    memcpy(b.tokens, tokens, (size_t)N * sizeof *tokens);
    batch_hash_pairs(&b, 0, 0);
    ok(!differences(b.bigram_rows, rows, b.N) && !differences(b.sign_rows, signs, b.N),
       "rows of %d tokens as in the reference", b.N);
    int same = 0;
    for (int from = 1; from < b.N; from++) {
        batch_alloc(&rest, b.N - from, &b.tables);
        memcpy(rest.tokens, tokens + from, (size_t)rest.N * sizeof *tokens);
        batch_hash_pairs(&rest, from, tokens[from - 1]);
        same += !differences(rest.bigram_rows, rows + from, rest.N) &&
                !differences(rest.sign_rows, signs + from, rest.N);
        batch_free(&rest);
    }
    ok(same == b.N - 1, "from any position on, with the token before it");
    static const int32_t text[] = {50256, 464, 50256, 464, 262, 50256};
    memcpy(b.tokens, text, sizeof text);
    batch_hash_pairs(&b, 0, 0);
    ok(b.bigram_rows[0] == 377279 && b.sign_rows[0] == 0 && b.bigram_rows[1] == 86771 &&
           b.sign_rows[1] == 1408,
       "position 0 has the last row; at position 1 its number stands for the token before");
    ok(b.bigram_rows[3] == 143001 && b.sign_rows[3] == 1408 && b.bigram_rows[4] == 71476 &&
           b.sign_rows[4] == 214 && b.bigram_rows[5] == 118394 && b.sign_rows[5] == 1366,
       "the description's values");
    // Products beyond 32 bits wrap, as signed numbers, and the row is never negative.
    Batch large;
    batch_alloc(&large, 3, &b.tables);
    large.tokens[1] = 65535;
    large.tokens[2] = 60000;
    batch_hash_pairs(&large, 0, 0);
    int32_t wrapped = (int32_t)(36313u * 60000u ^ 27191u * 65535u);
    ok(wrapped < 0 && large.bigram_rows[2] == (int32_t)(((int64_t)wrapped % 377279 + 377279) % 377279),
       "a negative hash gives row %d", large.bigram_rows[2]);
    batch_free(&large);
    batch_free(&b);
    free(tokens);
    free(rows);
    free(signs);
    safetensors_close(st);
}

// The vocabulary of a golden file: bytes (count, most) by id, lengths (count). Owned by the caller, with
// *text.
static TokenBytes *read_vocabulary(const SafeTensors *st, const char *prefix, int *count, char **text)
{
    int64_t n, all;
    int32_t *bytes = (int32_t *)golden_values(st, prefix, "bytes", &all),
            *lengths = (int32_t *)golden_values(st, prefix, "lengths", &n);
    TokenBytes *tokens = xcalloc((size_t)n, sizeof *tokens);
    *text = xcalloc((size_t)all, 1);
    for (int64_t i = 0; i < all; i++)
        (*text)[i] = (char)bytes[i];
    for (int64_t i = 0; i < n; i++)
        tokens[i] = (TokenBytes){*text + i * (all / n), (size_t)lengths[i]};
    *count = (int)n;
    free(bytes);
    free(lengths);
    return tokens;
}

// Padded with ids that have no prefix.
static int32_t *prefixes_of(const SafeTensors *st, const char *vocabulary, int padded)
{
    int count;
    char *text;
    TokenBytes *tokens = read_vocabulary(st, vocabulary, &count, &text);
    int32_t *prefix = xcalloc((size_t)padded, sizeof *prefix);
    prefix_table(prefix, tokens, count);
    for (int i = count; i < padded; i++)
        prefix[i] = -1;
    free(tokens);
    free(text);
    return prefix;
}

static void check_prefixes(const char *file, const char *vocabulary)
{
    SafeTensors *st = open_golden(file);
    int64_t n;
    int32_t *expected = read_golden(st, "prefix", &n), *prefix = prefixes_of(st, vocabulary, (int)n);
    int found = 0;
    for (int i = 0; i < n; i++)
        found += prefix[i] >= 0;
    ok(found > 0 && !differences(prefix, expected, (int)n), "%s: prefixes of %d of %d tokens", file, found,
       (int)n);
    free(prefix);
    free(expected);
    safetensors_close(st);
}

// Pairs of tokens that text cannot have.
static void check_impossible(void)
{
    SafeTensors *st = open_golden("2026-vocabulary");
    int64_t n;
    int count;
    char *text;
    Error e;
    TokenBytes *tokens = read_vocabulary(st, "", &count, &text);
    uint32_t *expected = read_golden(st, "mask", &n), *bits = xcalloc((size_t)n, sizeof *bits);
    int wrong = 0, set = 0;
    bool made = impossible_pairs(bits, tokens, count, 384, &e);
    for (int i = 0; i < n; i++) {
        wrong += bits[i] != expected[i];
        set += __builtin_popcount(expected[i]);
    }
    ok(made && wrong == 0 && set > 100, "%d pairs of %d tokens cannot be", set, count);
    static const TokenBytes unmade[] = {{"a", 1}, {"b", 1}, {"abab", 4}};
    ok(!impossible_pairs(bits, unmade, 3, 32, &e) && strstr(e.text, "token 2"), "%s", e.text);
    free(expected);
    free(bits);
    free(tokens);
    free(text);
    safetensors_close(st);
}

static void check_odd_vocabularies(void)
{
    static const TokenBytes tokens[] = {{"ab", 2},  {"a", 1},     {"abc", 3}, {"", 0},
                                        {"abd", 3}, {"ab\0d", 4}, {"b", 1},   {"\xff\xfe", 2}};
    static const int32_t expected[] = {1, -1, 0, -1, 0, 0, -1, -1};
    int32_t prefix[8];
    prefix_table(prefix, tokens, 8);
    ok(!differences(prefix, expected, 8), "bytes of any value; a token without bytes is nobody's prefix");
    prefix_table(prefix, tokens, 0);
    Tokenizer *bytes = tokenizer_bytes();
    int found;
    free(prefix_table_of(bytes, 384, &found));
    tokenizer_free(bytes);
    ok(found == 0, "single bytes have none");
}

static uint32_t crc32(const uint8_t *bytes, size_t count) // of zip and Ethernet
{
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int k = 0; k < 8; k++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
    }
    for (size_t i = 0; i < count; i++)
        crc = crc >> 8 ^ table[(crc ^ bytes[i]) & 255];
    return ~crc;
}

static void check_gpt2_pairs(const Tokenizer *t)
{
    enum { PADDED = 50304, WORDS = PADDED / 32 };
    Error e;
    uint32_t *bits = xcalloc((size_t)PADDED * WORDS, sizeof *bits);
    TokenBytes *tokens = token_bytes(t, PADDED);
    double start = seconds_now();
    bool made = impossible_pairs(bits, tokens, PADDED, PADDED, &e);
    double seconds = seconds_now() - start;
    int64_t pairs = 0;
    for (int64_t i = 0; i < (int64_t)PADDED * WORDS; i++)
        pairs += __builtin_popcount(bits[i]);
    ok(made && pairs == 70889701, "GPT-2: %lld pairs of tokens cannot be", (long long)pairs);
    printf("# %.2f s\n", seconds);
    uint32_t crc = crc32((uint8_t *)bits, (size_t)PADDED * WORDS * 4);
    ok(crc == 0x9fec8b33, "their table's CRC-32 is %08x", crc);
    free(tokens);
    free(bits);
}

static void check_gpt2(void)
{
    const char *data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    Error e;
    char *folder = format_string("%s/tokenizer", data);
    Tokenizer *t = access(folder, F_OK) ? NULL : tokenizer_load(folder, &e);
    free(folder);
    if (!t) {
        skip("GPT-2's vocabulary is not here");
        return;
    }
    int found;
    int64_t sum = 0;
    int32_t *prefix = prefix_table_of(t, 50304, &found);
    for (int i = 0; i < 50304; i++)
        sum += prefix[i];
    ok(found == 50000 && sum == 548403601, "GPT-2: %d tokens have a prefix, their sum is %lld", found,
       (long long)sum);
    ok(prefix[262] == 294 && prefix[278] == 259 && prefix[1321] == 4175,
       "\" the\" begins with \" th\", \"ing\" with \"in\", \" information\" with \" inform\"");
    free(prefix);
    check_gpt2_pairs(t);
    tokenizer_free(t);
}

// Whole batches of the reference's small record, and what arrives on the device.
static void check_batches(void)
{
    SafeTensors *st = open_golden("2026-batches");
    int64_t all;
    int32_t *tokens = read_golden(st, "tokens", NULL), *cu = read_golden(st, "cu_seqlens", NULL),
            *rows = read_golden(st, "bigram_rows", NULL), *signs = read_golden(st, "sign_rows", NULL),
            *sizes = read_golden(st, "micro_batch_tokens", NULL), *expected = read_golden(st, "prefix", &all),
            *prefix = prefixes_of(st, "vocabulary.", (int)all);
    BatchTables tables = {.pairs = small_hash, .prefix = prefix, .paired = true};
    for (int k = 0; k < 12; k++) {
        int N = sizes[k / 2], wrong = 0;
        Batch b;
        batch_alloc(&b, N, &tables);
        memcpy(b.tokens, tokens + 65 * k, (size_t)N * 4);
        memcpy(b.targets, tokens + 65 * k + 1, (size_t)N * 4);
        while (cu[65 * k + b.num_docs] < N) {
            b.cu_seqlens[b.num_docs] = cu[65 * k + b.num_docs];
            b.num_docs++;
        }
        b.cu_seqlens[b.num_docs] = N;
        batch_complete(&b);
        int32_t *block = xcalloc((size_t)block_ints(N, &tables), sizeof *block);
        int slots = block_pack(block, &b);
        DeviceBatch d = block_batch(block, &b, slots);
        wrong += differences(d.bigram_rows, rows + 64 * k, N) + differences(d.sign_rows, signs + 64 * k, N);
        for (int i = 0; i < N; i++)
            wrong += d.prefix[i] != expected[tokens[65 * k + i + 1]];
        wrong += differences(d.tokens, b.tokens, N) + differences(d.targets, b.targets, N);
        wrong += *d.rows.num_rows != b.rows.count || *d.bigram.num_rows != b.bigram.count ||
                 differences(d.bigram.order, b.bigram.order, N) ||
                 differences(d.bigram.row_token, b.bigram.row, b.bigram.count) ||
                 differences(d.bigram.row_start, b.bigram.start, b.bigram.count + 1) ||
                 differences(d.rows.order, b.rows.order, N);
        ok(wrong == 0 && sorted(&b.bigram, b.bigram_rows, N), "step %d, micro-batch %d: %d tokens", k / 2,
           k % 2, N);
        // The CPU's table of documents begins with their number and boundaries.
        bool doubled = d.table_paired[0] == b.num_docs && d.slots_paired == slots;
        for (int i = 0; i <= b.num_docs; i++)
            doubled = doubled && d.table_paired[1 + i] == 2 * d.table[1 + i];
        ok(doubled, "paired heads see each document twice as long");
        free(block);
        batch_free(&b);
    }
    free(tokens);
    free(cu);
    free(rows);
    free(signs);
    free(sizes);
    free(expected);
    free(prefix);
    safetensors_close(st);
}

// Arrays of any size are aligned and do not overlap; what nobody asked for takes no memory.
static void check_layout(void)
{
    static const int32_t prefix[1] = {-1};
    bool good = true;
    for (int N = 1; N < 70; N++)
        for (int kind = 0; kind < 4; kind++) {
            BatchTables tables = {.pairs = kind & 1 ? small_hash : (PairHash){0},
                                  .prefix = kind & 2 ? prefix : NULL};
            Batch b;
            batch_alloc(&b, N, &tables);
            int32_t *arrays[] = {b.tokens,    b.targets,      b.cu_seqlens, b.rows.order,
                                 b.rows.row,  b.rows.start,   b.prefix,     b.bigram_rows,
                                 b.sign_rows, b.bigram.order, b.bigram.row, b.bigram.start};
            int32_t *end = b.block;
            for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
                bool there = i < 6 || (i == 6 ? tables.prefix != NULL : tables.pairs.rows > 0);
                good = good && (arrays[i] != NULL) == there;
                if (!there)
                    continue;
                good = good && arrays[i] >= end && (arrays[i] - b.block) % BATCH_ALIGN == 0;
                end = arrays[i] + N + (i == 2 || i == 5 || i == 11);
            }
            good = good && end <= b.block + b.block_ints && b.block_ints == batch_ints(N, &tables);
            batch_free(&b);
        }
    ok(good, "the arrays of a block are aligned and do not overlap");
}

int main(void)
{
    PART(check_layout());
    PART(check_sort());
    PART(check_full_rows());
    PART(check_prefixes("2026-vocabulary", ""));
    PART(check_prefixes("2026-batches", "vocabulary."));
    PART(check_impossible());
    PART(check_odd_vocabularies());
    PART(check_gpt2());
    PART(check_batches());
    return tap_done();
}
