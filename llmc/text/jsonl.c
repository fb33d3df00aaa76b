// Nearly all of a record is strings, which jansson reads at 50 to 100 MB/s, and refuses as a whole for half
// of a surrogate pair in a title that nobody asked for, or for a number beyond a double. So strings that are
// values are checked and decoded here, numbers are checked here, and jansson sees the record with "" and 0 in
// their place: it judges the structure, the names, and what follows the record.
#include "llmc/text/jsonl.h"
#include "llmc/base/utf8.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static const char field[] = "text";

// ---- strings ------------------------------------------------------------------------------------------

// p: behind the opening quote. The closing one, or NULL.
static const char *string_end(const char *p, const char *stop)
{
    for (const char *quote = p; (quote = memchr(quote, '"', (size_t)(stop - quote))); quote++) {
        const char *escape = quote;
        while (escape > p && escape[-1] == '\\')
            escape--;
        if ((quote - escape) % 2 == 0)
            return quote;
    }
    return NULL;
}

// Four hexadecimal digits at p, or -1.
static int hex4(const char *p, const char *end)
{
    int value = 0;
    if (end - p < 4)
        return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        bool digit = c >= '0' && c <= '9', lower = c >= 'a' && c <= 'f', upper = c >= 'A' && c <= 'F';
        if (!digit && !lower && !upper)
            return -1;
        value = value << 4 | (digit ? c - '0' : lower ? c - 'a' + 10 : c - 'A' + 10);
    }
    return value;
}

static bool is_high(int c) { return c >= 0xD800 && c <= 0xDBFF; }
static bool is_low(int c) { return c >= 0xDC00 && c <= 0xDFFF; }

// The escape sequence at *p, behind its backslash; moves both pointers on. False: there is no such escape.
static bool decode_escape(const char **p, const char *end, char **out)
{
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *name = *p < end ? memchr(names, **p, sizeof names - 1) : NULL;
    if (name) {
        *(*out)++ = meant[name - names];
        ++*p;
        return true;
    }
    int c = *p < end && **p == 'u' ? hex4(*p + 1, end) : -1;
    if (c < 0)
        return false;
    *p += 5;
    if (is_high(c) && end - *p >= 6 && (*p)[0] == '\\' && (*p)[1] == 'u') {
        int low = hex4(*p + 2, end);
        if (is_low(low)) {
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
            *p += 6;
        }
    }
    if (is_high(c) || is_low(c)) {
        *(*out)++ = (char)0xFF;
    } else {
        *out += utf8_put(*out, (uint32_t)c);
    }
    return true;
}

static bool has_control(const char *p, size_t len)
{
    bool found = false;
    for (size_t i = 0; i < len; i++)
        found |= (unsigned char)p[i] < 0x20;
    return found;
}

// Decodes the contents [p, end) of a string into out, which has room for as many bytes. Returns the length of
// what was written, or -1 for an escape that does not exist or a control character.
static int64_t decode_string(const char *p, const char *end, char *out)
{
    char *start = out;
    if (has_control(p, (size_t)(end - p)))
        return -1;
    while (p < end) {
        const char *escape = memchr(p, '\\', (size_t)(end - p));
        size_t plain = (size_t)((escape ? escape : end) - p);
        memcpy(out, p, plain);
        out += plain;
        if (!escape)
            break;
        p = escape + 1;
        if (!decode_escape(&p, end, &out))
            return -1;
    }
    return out - start;
}

// ---- records ------------------------------------------------------------------------------------------

static const char *skip_space(const char *p, const char *stop)
{
    while (p < stop && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n'))
        p++;
    return p;
}

// Is [p, end), as it stands between its quotes, the name of the field?
static bool names_field(const char *p, const char *end)
{
    char name[6 * sizeof field]; // each letter may be written as an escape of six
    size_t len = sizeof field - 1;
    return end - p <= (int64_t)sizeof name && decode_string(p, end, name) == (int64_t)len &&
           !memcmp(name, field, len);
}

// Copies the contents [p, end) of a name. Jansson refuses names with U+0000 or half of a surrogate pair:
// their backslash becomes U+007F, so that different names stay different. Returns the end of the copy.
static char *copy_name(const char *p, const char *end, char *bare)
{
    while (p < end) {
        const char *from = p++;
        char decoded[4], *out = decoded;
        bool odd = *from == '\\' && decode_escape(&p, end, &out) && (!*decoded || *decoded == (char)0xFF);
        memcpy(bare, from, (size_t)(p - from));
        if (odd)
            *bare = 0x7F;
        bare += p - from;
    }
    return bare;
}

static const char *skip_digits(const char *p, const char *end)
{
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    return p;
}

// Is [p, end) a number of JSON, of any length?
static bool is_number(const char *p, const char *end)
{
    p += p < end && *p == '-';
    const char *whole = p;
    p = skip_digits(p, end);
    if (p == whole || (*whole == '0' && p - whole > 1))
        return false;
    if (p < end && *p == '.') {
        const char *fraction = p + 1;
        p = skip_digits(fraction, end);
        if (p == fraction)
            return false;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        p += p < end && (*p == '+' || *p == '-');
        const char *exponent = p;
        p = skip_digits(p, end);
        if (p == exponent)
            return false;
    }
    return p == end;
}

// The end of what may be a number at p; p itself when it begins none.
static const char *number_end(const char *p, const char *stop)
{
    const char *end = p;
    if (*p == '-' || (*p >= '0' && *p <= '9')) {
        while (end < stop && *end && strchr("0123456789+-.eE", *end))
            end++;
    }
    return end;
}

// 0 in place of a number; what is none is left for jansson to refuse. Returns the end of the copy.
static char *copy_number(const char *p, const char *end, char *bare)
{
    if (is_number(p, end)) {
        *bare = '0';
        return bare + 1;
    }
    memcpy(bare, p, (size_t)(end - p));
    return bare + (end - p);
}

// Writes the record without the contents of its values into r->bare (*bare_len bytes) and the field's text
// into r->text (*text_len bytes; -1 when the field is missing or no string).
static bool take_apart(JsonlRecord *r, const char *line, size_t len, size_t *bare_len, int64_t *text_len,
                       Error *e)
{
    const char *stop = line + len;
    char *bare = r->bare;
    int depth = 0;
    bool wanted = false; // the last name at depth 1 was the field's
    *text_len = -1;
    for (const char *p = line; p < stop; p++) {
        const char *number = number_end(p, stop);
        if (number > p) {
            bare = copy_number(p, number, bare);
            p = number - 1;
            continue;
        }
        depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
        *bare++ = *p;
        if (*p != '"')
            continue;
        const char *begin = p + 1;
        p = string_end(begin, stop);
        if (!p)
            return error_set(e, "not a JSON record: it breaks off in a string that begins at byte %td",
                             begin - 1 - line);
        const char *next = skip_space(p + 1, stop);
        if (next < stop && *next == ':') {
            bare = copy_name(begin, p, bare);
            if (depth == 1)
                wanted = names_field(begin, p);
        } else {
            bool is_text = wanted && depth == 1;
            int64_t n =
                decode_string(begin, p, is_text ? r->text : bare); // what is not the text is overwritten
            if (n < 0) {
                return error_set(
                    e,
                    "not a JSON record: the string that begins at byte %td has a control character or an "
                    "unknown escape",
                    begin - 1 - line);
            }
            if (is_text)
                *text_len = n;
        }
        *bare++ = '"';
    }
    *bare_len = (size_t)(bare - r->bare);
    return true;
}

static void reserve(JsonlRecord *r, size_t len)
{
    if (len <= r->capacity)
        return;
    r->capacity = 2 * len + 4096;
    free(r->text);
    free(r->bare);
    r->text = xcalloc(r->capacity, 1);
    r->bare = xcalloc(r->capacity, 1);
}

bool jsonl_text(JsonlRecord *r, const char *line, size_t len, const char **text, size_t *text_len, Error *e)
{
    size_t bare_len = 0;
    int64_t n;
    reserve(r, len + 1);
    if (!take_apart(r, line, len, &bare_len, &n, e))
        return false;
    json_error_t problem;
    size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY;
    json_t *record = json_loadb(r->bare, bare_len, flags, &problem);
    json_t *value = json_object_get(record, field);
    bool good = false;
    if (!record) {
        error_set(e, "not a JSON record: %s", problem.text);
    } else if (!value) {
        error_set(e, "the record has no field \"%s\"", field);
    } else if (!json_is_string(value)) {
        error_set(e, "the field \"%s\" is not a string", field);
    } else {
        assert(n >= 0);
        good = true;
    }
    json_decref(record);
    *text = r->text;
    *text_len = (size_t)n;
    return good;
}

void jsonl_record_free(JsonlRecord *r)
{
    free(r->text);
    free(r->bare);
    *r = (JsonlRecord){0};
}
