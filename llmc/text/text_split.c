#include "llmc/text/text_split.h"
#include <stdlib.h>
#include <string.h>

bool text_split_parse(TextSplit *split, const char *text, Error *e)
{
    char *end;
    long bytes = strtol(text, &end, 10);
    *split = (TextSplit){.blank_lines = !strcmp(text, "blank-lines")};
    if (split->blank_lines || !strcmp(text, "none"))
        return true;
    if (end == text || *end || bytes < SPLIT_MIN_BYTES || bytes > SPLIT_MAX_BYTES) {
        return error_set(e, "--split %s: expected none, blank-lines, or a number of bytes from %d to %d",
                         text, SPLIT_MIN_BYTES, SPLIT_MAX_BYTES);
    }
    split->bytes = (int)bytes;
    return true;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

static size_t skip_space(const char *text, size_t at, size_t len)
{
    while (at < len && is_space(text[at]))
        at++;
    return at;
}

// The end of text[begin, end) without the white space there.
static size_t trim(const char *text, size_t begin, size_t end)
{
    while (end > begin && is_space(text[end - 1]))
        end--;
    return end;
}

// Whether the line feed at `at` ends a line of which nothing follows but white space up to the next line
// feed: a blank line.
static bool blank_line_follows(const char *text, size_t at, size_t len)
{
    for (size_t i = at + 1; i < len && is_space(text[i]); i++) {
        if (text[i] == '\n')
            return true;
    }
    return false;
}

// The first line feed before a blank line, len when there is none.
static size_t find_blank_line(const char *text, size_t begin, size_t len)
{
    const char *feed = text + begin;
    while ((feed = memchr(feed, '\n', (size_t)(text + len - feed)))) {
        size_t at = (size_t)(feed - text);
        if (blank_line_follows(text, at, len))
            return at;
        feed++;
    }
    return len;
}

// Whether a sentence ends in front of the white space at `at`: its mark, and quotes or brackets that close
// behind it.
static bool sentence_ends(const char *text, size_t begin, size_t at)
{
    while (at > begin && memchr("\"')]_", text[at - 1], 5))
        at--;
    return at > begin && memchr(".!?", text[at - 1], 3);
}

// Where to cut text[begin, limit), which goes on behind it: at the last blank line or, in its absence, end of
// a sentence or of a line in the second half; else at the last white space; else between two characters.
static size_t best_cut(const char *text, size_t begin, size_t limit)
{
    size_t sentence = 0, line = 0, space = 0, half = begin + (limit - begin) / 2;
    for (size_t at = limit; at > begin && (at > half || !space); at--) {
        if (!is_space(text[at]))
            continue;
        if (!space)
            space = at;
        if (at <= half)
            break;
        if (text[at] == '\n' && blank_line_follows(text, at, limit + 1))
            return at;
        if (!line && text[at] == '\n')
            line = at;
        if (!sentence && sentence_ends(text, begin, at))
            sentence = at;
    }
    if (sentence || line || space)
        return sentence ? sentence : line ? line : space;
    while (limit > begin + 1 && ((unsigned char)text[limit] & 0xC0) == 0x80)
        limit--;
    return limit;
}

bool text_split_next(const TextSplit *split, const char *text, size_t len, bool last, TextPiece *piece)
{
    size_t begin = skip_space(text, 0, len), cut;
    if (begin == len)
        return false;
    if (split->blank_lines) {
        cut = find_blank_line(text, begin, len);
    } else {
        // One byte more than the limit tells whether the text ends there or goes on.
        bool whole = len - begin <= (size_t)split->bytes;
        cut = whole ? len : best_cut(text, begin, begin + (size_t)split->bytes);
    }
    if (cut == len && !last)
        return false;
    *piece = (TextPiece){begin, trim(text, begin, cut), cut};
    return true;
}
