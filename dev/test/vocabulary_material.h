// What the tests of tokenizer and vocabularies share: a folder for files, vocabularies in both spellings.
#pragma once
#include "llmc/text/tokenizer.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#pragma GCC diagnostic ignored "-Wunused-function" // each test uses its part

#ifdef HAVE_PCRE2
static const bool have_pcre2 = true;
#else
static const bool have_pcre2 = false;
#endif
static char folder[] = "/tmp/test_vocabulary_XXXXXX";

static char *in_folder(const char *name) { return format_string("%s/%s", folder, name); }

static void write_file(const char *name, const char *text, size_t len)
{
    char *path = in_folder(name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(text, 1, len, f) != len || fclose(f))
        fatal(1, "cannot write %s", path);
    free(path);
}

static void make_folder(void)
{
    if (!mkdtemp(folder))
        fatal(1, "no temporary folder");
}

static void remove_folder(void)
{
    char *clean = format_string("rm -rf %s", folder);
    if (system(clean))
        note("could not remove %s", folder);
    free(clean);
}

// ---- a growing text ---------------------------------------------------------------------------------------

typedef struct {
    char *text;
    size_t len, capacity;
} Buffer;

static void put(Buffer *b, const char *p, size_t n)
{
    if (b->len + n + 1 > b->capacity)
        b->text = xrealloc(b->text, b->capacity = 2 * b->capacity + n + 1024, 1);
    memcpy(b->text + b->len, p, n);
    b->text[b->len += n] = 0;
}

static void puts_to(Buffer *b, const char *s) { put(b, s, strlen(s)); }

static void put_base64(Buffer *b, const unsigned char *p, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v =
            (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) | (i + 2 < n ? p[i + 2] : 0);
        char four[4] = {digits[v >> 18], digits[v >> 12 & 63], '=', '='};
        if (i + 1 < n)
            four[2] = digits[v >> 6 & 63];
        if (i + 2 < n)
            four[3] = digits[v & 63];
        put(b, four, 4);
    }
}

static void put_rank(Buffer *b, const char *token, size_t n, int rank)
{
    put_base64(b, (const unsigned char *)token, n);
    char number[32];
    snprintf(number, sizeof number, " %d\n", rank);
    puts_to(b, number);
}

// The 256 bytes in descending order, so that id and value differ.
static void put_byte_ranks(Buffer *b)
{
    for (int i = 0; i < 256; i++)
        put_rank(b, &(char){(char)(255 - i)}, 1, i);
}

// The published spelling of one byte, as JSON or merges text needs it.
static void put_printable(Buffer *b, unsigned char byte, bool json)
{
    unsigned shifted = 256;
    for (int i = 0; i < byte; i++)
        shifted += !((i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174);
    bool plain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    unsigned c = plain ? byte : shifted;
    if (json && (c == '"' || c == '\\'))
        puts_to(b, "\\");
    if (c < 128)
        put(b, &(char){(char)c}, 1);
    else
        put(b, (char[]){(char)(0xC0 | c >> 6), (char)(0x80 | (c & 63))}, 2);
}

// ---- a small vocabulary -----------------------------------------------------------------------------------

// Left and right part of each merge, in rank order. Some overlap, so that order and leftmost-first matter.
static const char *const merges[][2] = {{"a", "b"},   {"b", "c"},       {"a", "a"},   {"c", "ab"},
                                        {"aa", "aa"}, {"aaaa", "aaaa"}, {"c", "c"},   {"ab", "ab"},
                                        {"cc", "aa"}, {"bc", "ab"},     {" ", "a"},   {" a", "b"},
                                        {"'", "s"},   {"\xE6", "\x97"}, {"\n", "\n"}, {"cab", "cab"},
                                        {"b", "b"},   {"bb", "b"}};
enum { MERGES = sizeof merges / sizeof merges[0], SMALL_VOCAB = 256 + MERGES + 1 };

static void small_json(Buffer *json)
{
    char number[32];
    puts_to(json, "{");
    for (int id = 0; id < 256 + MERGES; id++) {
        puts_to(json, id ? ", \"" : "\"");
        if (id < 256) {
            put_printable(json, (unsigned char)(255 - id), true);
        } else {
            for (int side = 0; side < 2; side++) {
                for (const char *p = merges[id - 256][side]; *p; p++)
                    put_printable(json, (unsigned char)*p, true);
            }
        }
        snprintf(number, sizeof number, "\": %d", id);
        puts_to(json, number);
    }
    snprintf(number, sizeof number, ", \"<|endoftext|>\": %d}", SMALL_VOCAB - 1);
    puts_to(json, number);
}

static void small_merges(Buffer *b, int count)
{
    puts_to(b, "#version: 0.2\n");
    for (int i = 0; i < count; i++) {
        for (int side = 0; side < 2; side++) {
            for (const char *p = merges[i][side]; *p; p++)
                put_printable(b, (unsigned char)*p, false);
            puts_to(b, side ? "\n" : " ");
        }
    }
}

static void small_ranks(Buffer *b)
{
    put_byte_ranks(b);
    for (int i = 0; i < MERGES; i++) {
        char token[64];
        int n = snprintf(token, sizeof token, "%s%s", merges[i][0], merges[i][1]);
        put_rank(b, token, (size_t)n, 256 + i);
    }
}
