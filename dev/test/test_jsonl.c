// Records of JSON lines: every character in every spelling, and what is refused.
#include "dev/test/tap.h"
#include "llmc/base/common.h"
#include "llmc/text/jsonl.h"
#include "llmc/base/utf8.h"
#include <string.h>

static JsonlRecord record;

// The text of `line`, NULL when it is refused; then the reason is in `error`.
static const char *text_of(const char *line, size_t *len, Error *error)
{
    const char *text;
    return jsonl_text(&record, line, strlen(line), &text, len, error) ? text : NULL;
}

static void reads(const char *line, const char *wanted, size_t wanted_len, const char *what)
{
    size_t len;
    Error e = {""};
    const char *text = text_of(line, &len, &e);
    ok(text && len == wanted_len && !memcmp(text, wanted, len), "%s %s", what, e.text);
}

static void refuses(const char *line, const char *why)
{
    size_t len;
    Error e = {""};
    const char *text = text_of(line, &len, &e);
    ok(!text && strstr(e.text, why), "refused: %.60s: %s", line, e.text);
}

// U+0000 to U+10FFFF without surrogates, as escapes and, from U+0020 on, as they are; against the encoder of
// the test.
static void test_all_characters(void)
{
    int wrong[17] = {0}, raw_wrong = 0;
    for (int c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF)
            continue;
        unsigned char utf8[4];
        size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
        static const unsigned char first[] = {0, 0, 0xC0, 0xE0, 0xF0};
        for (size_t i = 0; i < n; i++)
            utf8[i] = (unsigned char)(i ? 0x80 | (c >> 6 * (n - 1 - i) & 0x3F) : first[n] | c >> 6 * (n - 1));
        char line[64];
        const char *text;
        size_t len;
        Error e;
        if (c < 0x10000) {
            snprintf(line, sizeof line, "{\"text\":\"x\\u%04xy\"}", c);
        } else {
            snprintf(line, sizeof line, "{\"text\":\"x\\u%04X\\u%04xy\"}", 0xD800 + ((c - 0x10000) >> 10),
                     0xDC00 + (c & 0x3FF));
        }
        text = text_of(line, &len, &e);
        wrong[c >> 16] +=
            !text || len != n + 2 || text[0] != 'x' || text[n + 1] != 'y' || memcmp(text + 1, utf8, n);
        if (c < 0x20 || c == '"' || c == '\\')
            continue;
        snprintf(line, sizeof line, "{\"text\":\"x%.*sy\"}", (int)n, (const char *)utf8);
        text = text_of(line, &len, &e);
        raw_wrong += !text || len != n + 2 || memcmp(text + 1, utf8, n);
    }
    for (int plane = 0; plane < 17; plane++)
        ok(!wrong[plane], "every character of plane %d as escape (%d wrong)", plane, wrong[plane]);
    ok(!raw_wrong, "every character as it is (%d wrong)", raw_wrong);
}

#define READS(line, wanted, what) reads(line, wanted, sizeof(wanted) - 1, what)

static void test_good_records(void)
{
    READS("{\"text\":\"\"}", "", "an empty text");
    READS(" {\t\"id\" : 7 , \"text\" :  \"a\" } \r", "a", "white space");
    READS("{\"text\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}", "\"\\/\b\f\n\r\t", "every short escape");
    READS("{\"text\":\"a\\\\\",\"b\":\"\\\\\\\"\"}", "a\\", "backslashes in front of quotes");
    READS("{\"text\":\"a\\u0000b\"}", "a\0b", "U+0000");
    READS("{\"te\\u0078t\":\"a\"}", "a", "a name with an escape");
    READS("{\"a\":{\"text\":\"no\",\"b\":[{\"text\":\"no\"},\"text\"]},\"text\":\"yes\",\"c\":\"text\"}",
          "yes", "inner fields");
    READS("{\"text\":\"a\",\"n\":123456789012345678901234567890,\"x\":-1.5e-9,\"t\":[true,false,null]}", "a",
          "long numbers");
    READS("{\"title\":\"cut \\ud83d\",\"text\":\"a\",\"url\":\"\xFF\"}", "a",
          "damage in fields that are not read");
    READS("{\"text\":\"a\xFF\xC0\xAF"
          "b\"}",
          "a\xFF\xC0\xAF"
          "b",
          "bytes that are not UTF-8 stay as they are");
    READS("{\"text\":\"a\\ud83db\"}",
          "a\xFF"
          "b",
          "a high surrogate alone");
    READS("{\"text\":\"a\\ude00b\"}",
          "a\xFF"
          "b",
          "a low surrogate alone");
    READS("{\"text\":\"\\ud83d\\ud83d\\ude00\\ud83d\\u0041\"}",
          "\xFF\xF0\x9F\x98\x80\xFF"
          "A",
          "surrogates in a row");
}

// What is not read may be beyond a double, or beyond a name of jansson.
static void test_unused_fields(void)
{
    char digits[500] = "{\"n\":-";
    size_t at = strlen(digits);
    memset(digits + at, '7', 400);
    strcpy(digits + at + 400, ",\"text\":\"a\"}");
    READS(digits, "a", "a number of 400 digits");
    READS("{\"text\":\"a\",\"n\":[1e999,-0.5E+999,1e-999,0,-0,10.25]}", "a", "numbers beyond a double");
    READS("{\"\\ud83d\":1,\"\\ude00\":2,\"b\\\\\\ud83d\":3,\"text\":\"a\"}", "a",
          "names with half a surrogate pair");
    READS("{\"\\u0000\":1,\"a\\u0000b\":{\"\\u0000\":2},\"text\":\"a\"}", "a", "names with U+0000");
    READS("{\"te\\u0000xt\":\"b\",\"text\":\"a\",\"\\ud83d\\ude00\":1}", "a",
          "names that are not the field's");
}

static void test_bad_records(void)
{
    static const char *const not_json[] = {
        "",
        "{",
        "{\"text\":\"a\"",
        "{\"text\":\"a",
        "{\"text\":\"a\\",
        "{\"text\":\"a\\\"}",
        "{\"text\":\"a\",}",
        "{\"text\" \"a\"}",
        "{\"text\":\"a\"} x",
        "{\"text\":\"a\"}{}",
        "{'text':'a'}",
        "{text:\"a\"}",
        "{\"text\":\"a\"/**/}",
        "{\"text\":\"\\x\"}",
        "{\"text\":\"\\u12g4\"}",
        "{\"text\":\"\\u12\"}",
        "{\"text\":\"a\x01\"}",
        "{\"text\":\"a\tb\"}",
        "{\"text\":\"a\",\"n\":01}",
        "{\"text\":\"a\",\"n\":1.}",
        "{\"text\":\"a\",\"n\":1e}",
        "{\"text\":\"a\",\"n\":1e5e5}",
        "{\"text\":\"a\",\"n\":1.5.2}",
        "{\"text\":\"a\",\"n\":-}",
        "{\"text\":\"a\",\"n\":--1}",
        "{\"text\":\"a\",\"n\":1-2}",
        "{\"text\":\"a\",\"n\":.5}",
        "{\"text\":\"a\",\"n\":-01}",
        "{\"text\":\"a\",\"n\":1 2}",
        "{\"text\":\"a\",\"n\":1x}",
        "{\"text\":\"a\",\"n\":0x5}",
        "{\"text\":\"a\",1:2}",
        "{\"text\":\"a\"}1",
        "{\"text\":\"a\",\"\\ud83d\":1,\"\\ud83d\":2}",
        "{\"text\":\"a\",\"\\q\":1}",
        "{\"text\":\"a\",\"n\":NaN}",
        "{\"text\":\"a\",\"n\":+1}",
        "{\"text\":\"a\",\"n\":True}",
        "{\"text\":\"a\",\"b\":\"\\q\"}",
        "{\"text\":\"a\" \"b\"}",
        "{\"text\":\"a\"]",
        "[\"text\":\"a\"]",
        "{\"\xFF\":1,\"text\":\"a\"}",
        "{\"text\":\"a\":\"b\"}",
        "{\"text\":\"a\",\"text\":\"b\"}",
        "{\"text\":\"a\",\"te\\u0078t\":\"b\"}",
        "{\"text\":\f\"a\"}",
    };
    for (size_t i = 0; i < sizeof not_json / sizeof *not_json; i++)
        refuses(not_json[i], "not a JSON record");
    refuses("{\"txt\":\"a\"}", "no field \"text\"");
    refuses("[\"text\"]", "no field \"text\"");
    refuses("\"text\"", "no field \"text\"");
    refuses("{\"text\":3}", "not a string");
    refuses("{\"text\":null}", "not a string");
    refuses("{\"text\":[\"a\"]}", "not a string");
    char deep[300001];
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    refuses(deep, "not a JSON record");
}

int main(void)
{
    PART(test_all_characters());
    PART(test_good_records());
    PART(test_unused_fields());
    PART(test_bad_records());
    jsonl_record_free(&record);
    return tap_done();
}
