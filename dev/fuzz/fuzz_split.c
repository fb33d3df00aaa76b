// Splitting a text into documents: pieces rise, lose nothing but white space, keep to their size, and the
// pieces of a text that is still being read are those of the whole text.
#include "llmc/text/text_split.h"
#include <stdlib.h>
#include <string.h>

static bool is_space(char c) { return c && strchr(" \t\n\r\f\v", c); }

static void check_piece(const TextSplit *split, const char *text, size_t len, size_t at, const TextPiece *p)
{
    if (p->begin >= p->end || p->end > p->next || p->next > len - at)
        abort();
    if (is_space(text[at + p->begin]) || is_space(text[at + p->end - 1]))
        abort();
    if (split->bytes && p->end - p->begin > (size_t)split->bytes)
        abort();
    for (size_t i = 0; i < p->begin; i++) {
        if (!is_space(text[at + i]))
            abort();
    }
    for (size_t i = p->end; i < p->next; i++) {
        if (!is_space(text[at + i]))
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    TextSplit split = {.blank_lines = data[0] & 1};
    if (!split.blank_lines)
        split.bytes = SPLIT_MIN_BYTES + data[0] / 2;
    size_t len = size - 1, part = len * data[1] / 255, at = 0;
    char *text = xcalloc(len, 1); // exactly as long, so that reading past the end is seen
    char *start = xcalloc(part, 1);
    memcpy(text, data + 1, len);
    memcpy(start, text, part);
    TextPiece whole, early;
    while (text_split_next(&split, text + at, len - at, true, &whole)) {
        check_piece(&split, text, len, at, &whole);
        bool known = at <= part && text_split_next(&split, start + at, part - at, false, &early);
        if (known && memcmp(&early, &whole, sizeof whole))
            abort();
        at += whole.next;
    }
    for (; at < len; at++) {
        if (!is_space(text[at]))
            abort();
    }
    free(text);
    free(start);
    return 0;
}
