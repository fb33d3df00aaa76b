// Vocabulary files and the encoder on arbitrary bytes. The first byte picks what the rest is:
//   0  a rank file      1  more lines for a rank file that already has all bytes      2  merges, NUL, JSON of
//                          ids
//   3  more lines for merges that go with a JSON of bytes and a few tokens            else  text for the
//      encoder
// Whatever loads must encode any bytes so that decoding gives back their repaired UTF-8.
#include "dev/test/decode_tokens.h"
#include "llmc/text/tokenizer_internal.h"
#include "llmc/base/utf8.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *text;
    size_t len, capacity;
} Buffer;

static void put(Buffer *b, const void *p, size_t n)
{
    if (b->len + n > b->capacity)
        b->text = xrealloc(b->text, b->capacity = 2 * b->capacity + n + 1024, 1);
    if (n)
        memcpy(b->text + b->len, p, n);
    b->len += n;
}

static void put_string(Buffer *b, const char *s) { put(b, s, strlen(s)); }

static void put_byte_ranks(Buffer *b)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < 256; i++) {
        char line[16];
        put(b, line,
            (size_t)snprintf(line, sizeof line, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i));
    }
}

static const char *const words[] = {"ab", "aa", "aaa", "ba", "abab", "'s", "ll"};
static const char *const word_merges = "#version: 0.2\na b\na a\naa a\nb a\nab ab\n' s\nl l\n";

static void put_json(Buffer *b)
{
    char item[64];
    int next = 0;
    for (unsigned c = 33, left = 256; left;
         c++) { // the printing characters of Latin-1, then U+0100 to U+0143
        if ((c > 126 && c < 161) || c == 173)
            continue;
        bool escaped = c == '"' || c == '\\';
        char utf8[3] = {(char)(c < 128 ? c : 0xC0 | c >> 6), (char)(c < 128 ? 0 : 0x80 | (c & 63)), 0};
        snprintf(item, sizeof item, "%s\"%s%s\": %d", next ? "," : "{", escaped ? "\\" : "", utf8, next);
        put_string(b, item);
        next++;
        left--;
    }
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        snprintf(item, sizeof item, ",\"%s\": %d", words[i], next++);
        put_string(b, item);
    }
    snprintf(item, sizeof item, ",\"<|endoftext|>\": %d}", next);
    put_string(b, item);
}

static void check_round_trip(const Tokenizer *t, TextEncoder *encoder, const char *text, size_t len)
{
    TokenList list = {0};
    size_t replaced, fixed_len, decoded_len;
    size_t reported = text_encode(encoder, text, len, &list);
    char *fixed = utf8_repair(text, len, &fixed_len, &replaced);
    char *decoded = decode_tokens(t, list.ids, list.count, &decoded_len);
    if (decoded_len != fixed_len || memcmp(decoded, fixed, fixed_len) || reported != replaced)
        abort();
    if (utf8_valid_prefix(fixed, fixed_len) != fixed_len)
        abort();
    free(list.ids);
    free(fixed);
    free(decoded);
}

static Tokenizer *load_merges(const char *more, size_t len, Error *e)
{
    Buffer merges = {0}, json = {0};
    put_string(&merges, word_merges);
    put(&merges, more, len);
    put_json(&json);
    Tokenizer *t = tokenizer_from_merges(merges.text, merges.len, "merges", json.text, json.len, "json", e);
    free(merges.text);
    free(json.text);
    return t;
}

static Tokenizer *load(int mode, const char *p, size_t n, Error *e)
{
    Buffer b = {0};
    if (mode == 0)
        return tokenizer_from_ranks(p, n, "ranks", e);
    if (mode == 3)
        return load_merges(p, n, e);
    if (mode == 1) {
        put_byte_ranks(&b);
        put(&b, p, n);
        Tokenizer *t = tokenizer_from_ranks(b.text, b.len, "ranks", e);
        free(b.text);
        return t;
    }
    const char *nul = n ? memchr(p, 0, n) : NULL;
    if (!nul)
        return NULL;
    return tokenizer_from_merges(p, (size_t)(nul - p), "merges", nul + 1, n - (size_t)(nul - p) - 1, "json",
                                 e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static Tokenizer *fixed;
    static TextEncoder *encoder; // its cache carries over from text to text, as in a long run
    Error e;
    if (!size)
        return 0;
    const char *p = (const char *)data + 1;
    if (data[0] > 3) {
        if (!fixed && !(fixed = load_merges("", 0, &e)))
            fatal(1, "%s", e.text);
        if (!encoder)
            encoder = text_encoder_create(fixed);
        check_round_trip(fixed, encoder, p, size - 1);
        return 0;
    }
    Tokenizer *t = load(data[0], p, size - 1, &e);
    if (t) {
        TextEncoder *fresh = text_encoder_create(t);
        check_round_trip(t, fresh, p, size - 1);
        text_encoder_free(fresh);
    }
    tokenizer_free(t);
    return 0;
}
