// GPT-2's pattern, by PCRE2. Letters and numbers are those of Unicode 16, as in tiktoken since 2024, although
// the PCRE2 of Debian 12 has the tables of Unicode 14: it would cut 9,392 characters differently.
#include "llmc/text/tokenizer_internal.h"
#include <string.h>

#ifdef HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// What Unicode 15.0, 15.1 and 16.0 added to the general categories L and N; no version took anything away.
// From PCRE2 10.46 (Unicode 16.0) and 10.42 (14.0), every character asked.
#define NEWER_LETTERS \
    "\\x{1C89}-\\x{1C8A}\\x{A7CB}-\\x{A7CD}\\x{A7DA}-\\x{A7DC}\\x{105C0}-\\x{105F3}" \
    "\\x{10D4A}-\\x{10D65}\\x{10D6F}-\\x{10D85}\\x{10EC2}-\\x{10EC4}\\x{1123F}-\\x{11240}" \
    "\\x{11380}-\\x{11389}\\x{1138B}\\x{1138E}\\x{11390}-\\x{113B5}\\x{113B7}\\x{113D1}\\x{113D3}" \
    "\\x{11BC0}-\\x{11BE0}\\x{11F02}\\x{11F04}-\\x{11F10}\\x{11F12}-\\x{11F33}\\x{1342F}" \
    "\\x{13441}-\\x{13446}\\x{13460}-\\x{143FA}\\x{16100}-\\x{1611D}\\x{16D40}-\\x{16D6C}\\x{18CFF}" \
    "\\x{1B132}\\x{1B155}\\x{1DF25}-\\x{1DF2A}\\x{1E030}-\\x{1E06D}\\x{1E4D0}-\\x{1E4EB}" \
    "\\x{1E5D0}-\\x{1E5ED}\\x{1E5F0}\\x{2B739}\\x{2EBF0}-\\x{2EE5D}\\x{31350}-\\x{323AF}"
#define NEWER_NUMBERS \
    "\\x{10D40}-\\x{10D49}\\x{116D0}-\\x{116E3}\\x{11BF0}-\\x{11BF9}\\x{11F50}-\\x{11F59}" \
    "\\x{16130}-\\x{16139}\\x{16D70}-\\x{16D79}\\x{1CCF0}-\\x{1CCF9}\\x{1D2C0}-\\x{1D2D3}" \
    "\\x{1E4F0}-\\x{1E4F9}\\x{1E5F1}-\\x{1E5FA}"
enum { OLDEST_UNICODE = 14, UNICODE = 16 }; // with the additions, tables between these two are complete

// White space is the Unicode property White_Space, spelled out: PCRE2's \s also holds U+180E.
#define SPACE \
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{" \
    "3000}"

// GPT-2's alternatives: contraction, letters, numbers, other, spaces but the last before a word, spaces.
// Letters are tried first: no two of the first four can match at one place, so their order is free.
#define PATTERN(letters, numbers) \
    " ?[" letters "]++|'(?:[sdmt]|ll|ve|re)| ?[" numbers "]++| ?[^" SPACE letters numbers "]++" \
    "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]++"
static const char own_classes[] = PATTERN("\\p{L}", "\\p{N}");
static const char newer_classes[] = PATTERN("\\p{L}" NEWER_LETTERS, "\\p{N}" NEWER_NUMBERS);

static int library_unicode(void)
{
    char version[64];
    int major = 0;
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    sscanf(version, "%d", &major);
    return major;
}

static void *compile(Tokenizer *t, const char *pattern, Error *e)
{
    int code;
    PCRE2_SIZE at;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    if (re) {
        t->pattern_jit =
            pcre2_jit_compile(re, PCRE2_JIT_COMPLETE) == 0; // else it is interpreted: slower, same result
        return re;
    }
    char text[256] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
    error_set(e, "PCRE2 refuses the GPT-2 pattern: %s; it needs a PCRE2 built with Unicode support", text);
    return NULL;
}

bool pattern_compile(Tokenizer *t, Error *e)
{
    int library = library_unicode();
    t->unicode = library >= OLDEST_UNICODE && library < UNICODE ? UNICODE : library;
    t->pattern = compile(t, own_classes, e);
    if (!t->pattern || library >= UNICODE)
        return t->pattern;
    t->newer_pattern = compile(t, newer_classes, e);
    return t->newer_pattern;
}

void pattern_free(Tokenizer *t)
{
    pcre2_code_free(t->pattern);
    pcre2_code_free(t->newer_pattern);
}

char *pattern_describe_classes(const Tokenizer *t)
{
    char version[64], unicode[64];
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, unicode);
    return format_string("of Unicode %d, by PCRE2 %s with the tables of Unicode %s%s", t->unicode, version,
                         unicode,
                         t->newer_pattern && t->unicode == UNICODE ? " and what was added since" : "");
}

void *pattern_match_create(const Tokenizer *t)
{
    return t->byte_mode ? NULL : pcre2_match_data_create(1, NULL);
}

void pattern_match_free(void *match) { pcre2_match_data_free(match); }

// The additions' first bytes in UTF-8: F0, or U+1C89 and U+A7CB on. Few texts hold any, and the longer
// classes are slower.
static bool may_hold_newer(const char *text, size_t len)
{
    return memchr(text, 0xF0, len) || memmem(text, len, "\xE1\xB2", 2) || memmem(text, len, "\xEA\x9F", 2);
}

const void *pattern_for(const Tokenizer *t, const char *text, size_t len)
{
    return t->newer_pattern && may_hold_newer(text, len) ? t->newer_pattern : t->pattern;
}

size_t pattern_piece_end(const Tokenizer *t, const void *pattern, void *match, const char *text, size_t len,
                         size_t at)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    // Every character belongs to one of the alternatives, so the match begins at `at` and is not empty.
    int rc = t->pattern_jit ? pcre2_jit_match(pattern, subject, len, at, PCRE2_NO_UTF_CHECK, match, NULL)
                            : pcre2_match(pattern, subject, len, at, PCRE2_NO_UTF_CHECK, match, NULL);
    if (rc < 1)
        fatal(EXIT_BAD_INPUT, "PCRE2 gives error %d at byte %zu of a text of %zu bytes", rc, at, len);
    return pcre2_get_ovector_pointer(match)[1];
}

#else
bool pattern_compile(Tokenizer *t, Error *e)
{
    (void)t;
    return error_set(e, "this program was built without PCRE2, which GPT-2 encoding needs: "
                        "install libpcre2-dev and rebuild, or use the vocabulary \"bytes\"");
}

void pattern_free(Tokenizer *t) { (void)t; }
char *pattern_describe_classes(const Tokenizer *t)
{
    (void)t;
    return xstrdup("none");
}

void *pattern_match_create(const Tokenizer *t)
{
    (void)t;
    return NULL;
}

void pattern_match_free(void *match) { (void)match; }
const void *pattern_for(const Tokenizer *t, const char *text, size_t len)
{
    (void)t;
    (void)text;
    (void)len;
    return NULL;
}

// Not reached: no tokenizer but the byte one can be loaded.
size_t pattern_piece_end(const Tokenizer *t, const void *pattern, void *match, const char *text, size_t len,
                         size_t at)
{
    (void)t, (void)pattern, (void)match, (void)text, (void)at;
    return len;
}
#endif
