// The tokenizer against a naive merger, hand-cut pieces and recorded encodings.
#include "dev/test/decode_tokens.h"
#include "dev/test/tap.h"
#include "dev/test/vocabulary_material.h"
#include <jansson.h>
#include <pthread.h>

// Merges one piece by scanning everything for the best pair after every merge. Returns the number of tokens.
static size_t naive_merge(const char *piece, size_t len, uint16_t *ids)
{
    struct {
        const char *p;
        size_t n;
        int id;
    } *part = xcalloc(len, sizeof *part);
    for (size_t i = 0; i < len; i++) {
        part[i].p = piece + i;
        part[i].n = 1;
        part[i].id = 255 - (unsigned char)piece[i];
    }
    for (;;) {
        int best_rank = MERGES;
        size_t best = 0;
        for (size_t i = 0; i + 1 < len; i++) {
            for (int rank = 0; rank < best_rank; rank++) {
                if (part[i].n == strlen(merges[rank][0]) && !memcmp(part[i].p, merges[rank][0], part[i].n) &&
                    part[i + 1].n == strlen(merges[rank][1]) &&
                    !memcmp(part[i + 1].p, merges[rank][1], part[i + 1].n)) {
                    best_rank = rank;
                    best = i;
                }
            }
        }
        if (best_rank == MERGES)
            break;
        part[best].n += part[best + 1].n;
        part[best].id = 256 + best_rank;
        memmove(part + best + 1, part + best + 2, (len - best - 2) * sizeof *part);
        len--;
    }
    for (size_t i = 0; i < len; i++)
        ids[i] = (uint16_t)part[i].id;
    free(part);
    return len;
}

static uint32_t random_state = 12345;
static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (uint32_t)((uint64_t)random_state * n >> 32);
}

static void check_against_naive(const Tokenizer *t, const char *what)
{
    static const uint32_t longest[] = {4,  15, 16, 40,
                                       48, 49, 300}; // around the lengths where the method changes
    TextEncoder *encoder = text_encoder_create(t);
    int wrong = 0, tried = 0;
    for (int round = 0; round < 3500; round++) {
        char piece[301];
        uint16_t expected[300];
        size_t len = 1 + random_below(longest[round % 7]), letters = 1 + random_below(4);
        for (size_t i = 0; i < len; i++)
            piece[i] = "abcd"[random_below((uint32_t)letters)];
        size_t count = naive_merge(piece, len, expected);
        for (int again = 0; again < 2; again++, tried++) { // the second time from the cache
            TokenList list = {0};
            text_encode(encoder, piece, len, &list);
            wrong += list.count != count || memcmp(list.ids, expected, count * sizeof *expected) != 0;
            free(list.ids);
        }
    }
    text_encoder_free(encoder);
    ok(wrong == 0, "%s: %d random pieces as the naive merger does them (%d wrong)", what, tried, wrong);
}

static bool round_trip(const Tokenizer *t, const char *text, size_t len)
{
    uint16_t *ids;
    size_t count, back_len = 0;
    tokenizer_encode(t, text, len, &ids, &count);
    char *back = decode_tokens(t, ids, count, &back_len);
    bool same = back_len == len && !memcmp(back, text, len);
    free(back);
    free(ids);
    return same;
}

static void check_long_pieces(const Tokenizer *t)
{
    enum { LONG = 1 << 20 };
    char *text = xcalloc(LONG, 1);
    uint16_t *ids, *whole = xcalloc(3000, sizeof *whole);
    size_t count;
    memset(text, 'a', LONG);
    double start = seconds_now();
    tokenizer_encode(t, text, LONG, &ids, &count);
    ok(count == LONG / 8 && ids[0] == 256 + 5 && ids[count - 1] == 256 + 5,
       "1 MB of one letter: %zu tokens of eight", count);
    free(ids);
    for (int i = 0; i < LONG; i++)
        text[i] = "abc"[random_below(3)];
    ok(round_trip(t, text, LONG), "1 MB of random letters decodes to itself");
    memset(text, ' ', LONG);
    ok(round_trip(t, text, LONG), "1 MB of spaces decodes to itself");
    ok_at_most(seconds_now() - start, 10,
               "seconds for 3 MB in three pieces (quadratic merging takes minutes)");
    for (int i = 0; i < 3000; i++)
        text[i] = "abc"[random_below(3)];
    tokenizer_encode(t, text, 3000, &ids, &count);
    ok(naive_merge(text, 3000, whole) == count && !memcmp(ids, whole, count * sizeof *ids),
       "a piece of 3000 as the naive merger");
    free(ids);
    free(whole);
    free(text);
}

// ---- pieces -----------------------------------------------------------------------------------------------

// Each row is cut by hand by the published pattern. Only a space joins the word after it, and a run of white
// space before something else leaves its last character alone.
static const char *const cut[][12] = {
    {"Hello", " world", "'s", " end", "."},
    {"I", "'m", " don", "'t", " WE", "'", "LL", " they", "'ve", " he", "'d", "'ll"},
    {"tab", "\t", "\t", "if", " x", ":"},
    {"a", "\n\n", "\n", "b", "\r\n", "\t", "c"},
    {"end", "   "},
    {"abc", "123", " 456", "x"},
    {"3", ".", "14", " ", "\u00a0", "x"},
    {"e", "\u0301", "t", "\u00e9"},                                  // a combining mark is no letter
    {"\u65e5\u672c\u8a9e", "\u3002", "\u4e2d\u6587", "\u3000", "x"}, // ideographic space is white space
    {" \U0001F469\u200D\U0001F467", " \U0001F44D\U0001F3FD", "ok"},  // emoji sequences
    {"a", "\u180e", "b"},                                            // U+180E is not white space
    {"a", "\x01\x02\x7f", "b", "\xC2\x85", "c"}, // control characters; U+0085 is white space
    {"\u2167", " \u00bd", "x", "\u00b2"},        // roman numeral, fraction, superscript are numbers
    {"<|", "endoftext", "|>"},
    {"\ufeff", "x"},
};

static bool cut_row(const char *const *pieces, size_t n)
{
    Buffer ranks = {0}, text = {0};
    uint16_t expected[12];
    int next = 256;
    Error e;
    put_byte_ranks(&ranks);
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(pieces[i]), same = 0;
        puts_to(&text, pieces[i]);
        while (same < i && strcmp(pieces[same], pieces[i]))
            same++;
        expected[i] = (uint16_t)(len == 1   ? 255 - (unsigned char)pieces[i][0]
                                 : same < i ? expected[same]
                                            : next);
        if (len > 1 && same == i)
            put_rank(&ranks, pieces[i], len, next++);
    }
    write_file("cut.tiktoken", ranks.text, ranks.len);
    char *path = in_folder("cut.tiktoken");
    Tokenizer *t = tokenizer_load(path, &e);
    uint16_t *ids = NULL;
    size_t count = 0;
    if (t)
        tokenizer_encode(t, text.text, text.len, &ids, &count);
    bool good = t && count == n && !memcmp(ids, expected, n * sizeof *ids);
    unlink(path);
    tokenizer_free(t);
    free(ids);
    free(path);
    free(ranks.text);
    free(text.text);
    return good;
}

static void check_pieces(void)
{
    for (size_t row = 0; row < sizeof cut / sizeof cut[0]; row++) {
        size_t n = 0;
        while (n < 12 && cut[row][n])
            n++;
        ok(cut_row(cut[row], n), "pieces of row %zu (%s ...)", row,
           row == 11 ? "control characters" : cut[row][0]);
    }
    static const char *const spaces[] = {"x", " ", " y", "    ", " z", "\n", "w", " "};
    ok(cut_row(spaces, 8), "a run of spaces leaves the last to the word after it");
}

// ---- byte mode, threads -----------------------------------------------------------------------------------

static void check_bytes(void)
{
    Tokenizer *t = tokenizer_bytes();
    uint16_t *ids;
    size_t count, len;
    ok(tokenizer_vocab_size(t) == 257 && tokenizer_document(t) == 256, "byte mode: 257 ids, document 256");
    size_t replaced = tokenizer_encode(t, "A\xC3\xA9\xFF", 4, &ids, &count);
    ok(count == 6 && ids[0] == 'A' && ids[1] == 0xC3 && ids[2] == 0xA9 && ids[3] == 0xEF && ids[5] == 0xBD &&
           replaced == 1,
       "byte mode: bytes are ids, an invalid byte is U+FFFD");
    free(ids);
    replaced = tokenizer_encode(t, "", 0, &ids, &count);
    ok(count == 0 && ids && replaced == 0, "byte mode: the empty text has no tokens");
    free(ids);
    uint16_t tokens[] = {'h', 'i', 256};
    char *text = decode_tokens(t, tokens, 3, &len);
    ok(len == 15 && !strcmp(text, "hi<|endoftext|>"), "byte mode: decoding, the document token has a text");
    free(text);
    tokenizer_free(t);
}

typedef struct {
    const Tokenizer *t;
    const char *text;
    size_t len;
    TokenList list;
} ThreadWork;

static void *thread_main(void *argument)
{
    ThreadWork *w = argument;
    TextEncoder *encoder = text_encoder_create(w->t);
    for (size_t at = 0; at < w->len; at += 1000)
        text_encode(encoder, w->text + at, 1000, &w->list);
    text_encoder_free(encoder);
    return NULL;
}

static void check_threads(const Tokenizer *t)
{
    enum { THREADS = 4, LENGTH = 300000 };
    char *text = xcalloc(LENGTH, 1);
    for (int i = 0; i < LENGTH; i++)
        text[i] = "abc abc\n's1"[random_below(11)];
    ThreadWork work[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        work[i] = (ThreadWork){t, text, LENGTH, {0}};
        if (pthread_create(&threads[i], NULL, thread_main, &work[i]))
            fatal(1, "no thread");
    }
    bool same = true;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        same = same && work[i].list.count == work[0].list.count &&
               !memcmp(work[i].list.ids, work[0].list.ids, work[0].list.count * sizeof(uint16_t));
    }
    ok(same && work[0].list.count > LENGTH / 4, "four threads share a tokenizer");
    for (int i = 0; i < THREADS; i++)
        free(work[i].list.ids);
    free(text);
}

// ---- letters and numbers ------------------------------------------------------------------------------

static size_t put_utf8(char *out, int c)
{
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const int first[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = 0; i < n; i++)
        out[i] = (char)(i ? 0x80 | (c >> 6 * (int)(n - 1 - i) & 0x3F) : first[n] | c >> 6 * (int)(n - 1));
    return n;
}

// How many characters from U+0080 on share a piece with `before`, and a hash of which.
static void characters_with(const Tokenizer *t, char before, int *count, uint64_t *hash)
{
    TextEncoder *encoder = text_encoder_create(t);
    TokenList list = {0};
    *count = 0;
    *hash = 0;
    for (int c = 0x80; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF)
            continue;
        char text[5] = {before};
        list.count = 0;
        text_encode(encoder, text, 1 + put_utf8(text + 1, c), &list);
        if (list.ids[0] < 256)
            continue; // not merged: they are two pieces
        ++*count;
        *hash = *hash * 31 + (uint64_t)c;
    }
    free(list.ids);
    text_encoder_free(encoder);
}

// A vocabulary that merges "a" and "1" with every byte that begins a character: whether it does shows the
// pieces. The counts and hashes are those of Unicode 16.0, from its categories L and N.
static void check_classes(void)
{
    Buffer ranks = {0};
    Error e = {""};
    int rank = 256, letters, numbers;
    uint64_t letter_hash, number_hash;
    put_byte_ranks(&ranks);
    for (int lead = 0xC2; lead <= 0xF4; lead++) {
        put_rank(&ranks, (char[]){'a', (char)lead}, 2, rank++);
        put_rank(&ranks, (char[]){'1', (char)lead}, 2, rank++);
    }
    write_file("leads.tiktoken", ranks.text, ranks.len);
    char *path = in_folder("leads.tiktoken");
    Tokenizer *t = tokenizer_load(path, &e);
    unlink(path);
    free(path);
    if (!ok(t != NULL, "a vocabulary that shows pieces %s", e.text))
        return;
    if (tokenizer_unicode(t) == 16) {
        characters_with(t, 'a', &letters, &letter_hash);
        characters_with(t, '1', &numbers, &number_hash);
        ok(letters == 140976 && letter_hash == 0x3f327379829674d0u, "the letters of Unicode 16.0 (%d)",
           letters);
        ok(numbers == 1901 && number_hash == 0xd44e716fa41e2278u, "the numbers of Unicode 16.0 (%d)",
           numbers);
    } else {
        skip("this PCRE2 has neither Unicode 14, 15 nor 16");
        skip("this PCRE2 has neither Unicode 14, 15 nor 16");
    }
    tokenizer_free(t);
    free(ranks.text);
}

static void check_small_vocabularies(void)
{
    Buffer json = {0}, bpe = {0}, ranks = {0};
    Error e = {""};
    small_json(&json);
    small_merges(&bpe, MERGES);
    small_ranks(&ranks);
    write_file("encoder.json", json.text, json.len);
    write_file("vocab.bpe", bpe.text, bpe.len);
    write_file("small.tiktoken", ranks.text, ranks.len);
    char *file = in_folder("small.tiktoken");
    Tokenizer *from_merges = tokenizer_load(folder, &e);
    ok(from_merges && tokenizer_vocab_size(from_merges) == SMALL_VOCAB &&
           tokenizer_document(from_merges) == SMALL_VOCAB - 1,
       "a folder with vocab.bpe and encoder.json %s", e.text);
    Tokenizer *from_ranks = tokenizer_load(file, &e);
    ok(from_ranks && tokenizer_vocab_size(from_ranks) == SMALL_VOCAB &&
           tokenizer_document(from_ranks) == SMALL_VOCAB - 1,
       "a rank file %s", e.text);
    if (from_merges && from_ranks) {
        check_against_naive(from_merges, "merges");
        check_long_pieces(from_merges);
        check_threads(from_merges);
        static const char controls[] = "\0\x01 \xE6\x97\xA5 it's\n\n a  b";
        ok(round_trip(from_merges, controls, sizeof controls - 1),
           "a text with control bytes decodes to itself");
        size_t len;
        const char *token = tokenizer_token(from_ranks, 256 + 13, &len);
        ok(len == 2 && !memcmp(token, "\xE6\x97", 2), "the bytes of one token");
    }
    unlink(file);
    free(file);
    tokenizer_free(from_merges);
    tokenizer_free(from_ranks);
    free(json.text);
    free(bpe.text);
    free(ranks.text);
}

// ---- the published vocabulary, when it is at hand ---------------------------------------------------------

static char *base64_text(const char *p, size_t *len)
{
    char *out = xcalloc(strlen(p) + 1, 1);
    uint32_t bits = 0, kept = 0;
    *len = 0;
    for (; *p && *p != '='; p++) {
        uint32_t v = (uint32_t)(*p >= 'a'   ? *p - 'a' + 26
                                : *p >= 'A' ? *p - 'A'
                                : *p >= '0' ? *p - '0' + 52
                                : *p == '+' ? 62
                                            : 63);
        bits = bits << 6 | v;
        kept += 6;
        if (kept >= 8)
            out[(*len)++] = (char)(bits >> (kept -= 8));
    }
    return out;
}

static bool recorded_case(const Tokenizer *t, json_t *record)
{
    json_t *tokens = json_object_get(record, "tokens");
    size_t len, count, n = json_array_size(tokens);
    char *text = base64_text(json_string_value(json_object_get(record, "utf8_base64")), &len);
    uint16_t *ids;
    tokenizer_encode(t, text, len, &ids, &count);
    bool same = count == n;
    for (size_t i = 0; same && i < n; i++)
        same = ids[i] == json_integer_value(json_array_get(tokens, i));
    same = same && round_trip(t, text, len);
    free(ids);
    free(text);
    return same;
}

static void check_recorded(const char *vocabulary, const char *cases)
{
    Error e = {""};
    Tokenizer *t = tokenizer_load(vocabulary, &e);
    FILE *f = fopen(cases, "r");
    char *line = NULL;
    size_t capacity = 0;
    int tried = 0, wrong = 0;
    while (t && f && getline(&line, &capacity, f) > 0) {
        json_t *record = json_loads(line, 0, NULL);
        wrong += !recorded_case(t, record);
        tried++;
        json_decref(record);
    }
    ok(t && tokenizer_vocab_size(t) == GPT2_VOCAB && tokenizer_document(t) == GPT2_DOCUMENT && tried > 0 &&
           wrong == 0,
       "%s: %d recorded cases (%d wrong)%s", vocabulary, tried, wrong, e.text);
    free(line);
    if (f)
        fclose(f);
    tokenizer_free(t);
}

static void check_published(void)
{
    const char *data = getenv("SHARED_DATA") ? getenv("SHARED_DATA") : "../shared/data";
    char *cases = format_string("%s/tokenizer-cases/cases.jsonl", data);
    char *published = format_string("%s/tokenizer", data),
         *ranks = format_string("%s/tokenizer/r50k_base.tiktoken", data);
    if (access(cases, R_OK) == 0) {
        check_recorded(published, cases);
        check_recorded(ranks, cases);
    } else {
        skip("recorded encodings are not here");
    }
    free(published);
    free(ranks);
    free(cases);
}

int main(void)
{
    Error e = {""};
    make_folder();
    PART(check_bytes());
    Tokenizer *bytes = tokenizer_load("bytes", &e);
    ok(bytes && tokenizer_vocab_size(bytes) == BYTE_VOCAB, "\"bytes\" loads byte mode");
    tokenizer_free(bytes);
    if (have_pcre2) {
        PART(check_pieces());
        PART(check_small_vocabularies());
        PART(check_classes());
        PART(check_published());
    } else {
        skip("GPT-2 encoding needs PCRE2");
    }
    remove_folder();
    return tap_done();
}
