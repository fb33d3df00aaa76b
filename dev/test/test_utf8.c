// Repair of invalid UTF-8 against recorded decodings, of whole texts and of texts that come byte by byte.
#include "llmc/base/utf8.h"
#include "dev/test/tap.h"
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *bytes, *repaired;
    size_t replaced;
} broken[] = {
    // What Python's bytes.decode("utf-8", errors="replace") gives, R for U+FFFD.
    {"", "", 0},
    {"plain \xC3\xA9 \xF0\x9F\x98\x80", "plain \xC3\xA9 \xF0\x9F\x98\x80", 0},
    {"\x80", "R", 1},
    {"a\xFFz", "aRz", 1},
    {"\xC3", "R", 1},
    {"\xC0\xAF", "RR", 2},
    {"\xE2\x82", "R", 1},
    {"\xE2\x82z", "Rz", 1},
    {"\xE0\x80\x80", "RRR", 3},
    {"\xED\xA0\x80", "RRR", 3},
    {"\xF0\x9F\x98", "R", 1},
    {"\xF0\x9F\x98z\xF0\x9Fz\xF0z", "RzRzRz", 3},
    {"\xF0\x80\x80\x80", "RRRR", 4},
    {"\xF4\x90\x80\x80", "RRRR", 4},
    {"\xF5\x80\x80\x80", "RRRR", 4},
    {"\xE2\x82\xE2\x82\xAC", "R\xE2\x82\xAC", 1},
    {"12345678\xC3z12345678\x80", "12345678Rz12345678R", 2},
};

// Repairs what is finished whenever a byte has come, and the rest at the end.
static bool same_byte_by_byte(const char *text, size_t len, const char *whole, size_t whole_len)
{
    char pieces[256];
    size_t used = 0, done = 0, fixed_len, replaced;
    for (size_t have = 1; have <= len + 1; have++) {
        size_t end = have > len ? len : done + utf8_finished(text + done, have - done);
        char *fixed = utf8_repair(text + done, end - done, &fixed_len, &replaced);
        memcpy(pieces + used, fixed, fixed_len);
        used += fixed_len;
        done = end;
        free(fixed);
    }
    return used == whole_len && !memcmp(pieces, whole, used);
}

static void check_finished(void)
{
    ok(utf8_finished("", 0) == 0 && utf8_finished("ab", 2) == 2 && utf8_finished("a\xFF", 2) == 2,
       "ASCII, and bytes that begin nothing, are finished");
    ok(utf8_finished("a\xE2\x82", 3) == 1 && utf8_finished("\xF0\x9F\x98", 3) == 0 &&
           utf8_finished("\xE2\x82\xAC", 3) == 3,
       "the beginning of a character is not, a whole one is");
    ok(utf8_finished("\xE2z", 2) == 2 && utf8_finished("\xE0\x80", 2) == 2 &&
           utf8_finished("\xE2\xC3", 2) == 1,
       "nor does one wait for what no byte can complete");
}

int main(void)
{
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        char expected[256];
        size_t expected_len = 0;
        for (const char *p = broken[i].repaired; *p; p++) {
            size_t n = *p == 'R' ? 3 : 1;
            memcpy(expected + expected_len, n == 3 ? "\xEF\xBF\xBD" : p, n);
            expected_len += n;
        }
        size_t len = strlen(broken[i].bytes), fixed_len, replaced;
        char *fixed = utf8_repair(broken[i].bytes, len, &fixed_len, &replaced);
        bool valid = utf8_valid_prefix(broken[i].bytes, len) == len;
        ok(fixed_len == expected_len && !memcmp(fixed, expected, fixed_len) &&
               replaced == broken[i].replaced && valid == (broken[i].replaced == 0),
           "text %zu repaired as Python does it, %zu replacements", i, replaced);
        ok(same_byte_by_byte(broken[i].bytes, len, fixed, fixed_len), "and byte by byte");
        free(fixed);
    }
    check_finished();
    return tap_done();
}
