#include "llmc/base/utf8.h"
#include "llmc/base/common.h"
#include <string.h>

// Length of the well-formed character at p, or minus the length of the maximal subpart to replace.
static int character_at(const unsigned char *p, size_t left)
{
    unsigned char c = p[0], low = 0x80, high = 0xBF; // bounds of the second byte
    int need;
    if (c < 0x80)
        return 1;
    if (c < 0xC2 || c > 0xF4)
        return -1;
    if (c < 0xE0) {
        need = 2;
    } else if (c < 0xF0) {
        need = 3;
        if (c == 0xE0)
            low = 0xA0;
        if (c == 0xED)
            high = 0x9F; // surrogates
    } else {
        need = 4;
        if (c == 0xF0)
            low = 0x90;
        if (c == 0xF4)
            high = 0x8F;
    }
    for (int i = 1; i < need; i++) {
        if ((size_t)i >= left || p[i] < low || p[i] > high)
            return -i;
        low = 0x80;
        high = 0xBF;
    }
    return need;
}

size_t utf8_valid_prefix(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t i = 0;
    while (i < len) {
        uint64_t eight; // mostly ASCII: eight bytes at a time
        while (i + 8 <= len && (memcpy(&eight, p + i, 8), !(eight & 0x8080808080808080u)))
            i += 8;
        if (i == len)
            break;
        int n = character_at(p + i, len - i);
        if (n < 0)
            return i;
        i += (size_t)n;
    }
    return len;
}

size_t utf8_finished(const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    for (size_t i = 0; i < len;) {
        int n = character_at(p + i, len - i);
        bool begins = p[i] >= 0xC2 && p[i] <= 0xF4;
        if (n < 0 && begins && i + (size_t)-n == len)
            return i;
        i += (size_t)(n < 0 ? -n : n);
    }
    return len;
}

size_t utf8_put(char *out, uint32_t code)
{
    if (code < 0x80) {
        *out = (char)code;
        return 1;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3; // bytes of six bits
    out[0] = (char)((0xff00u >> (more + 1) & 0xff) | code >> 6 * more);
    for (int i = 1; i <= more; i++)
        out[i] = (char)(0x80 | (code >> 6 * (more - i) & 0x3f));
    return (size_t)more + 1;
}

char *utf8_repair(const char *text, size_t len, size_t *fixed_len, size_t *replaced)
{
    char *out = xcalloc(3 * len + 1, 1);
    size_t used = 0, count = 0;
    for (size_t i = 0; i < len;) {
        size_t good = utf8_valid_prefix(text + i, len - i);
        if (good)
            memcpy(out + used, text + i, good);
        used += good;
        i += good;
        if (i == len)
            break;
        i += (size_t)-character_at((const unsigned char *)text + i, len - i);
        memcpy(out + used, "\xEF\xBF\xBD", 3);
        used += 3;
        count++;
    }
    *fixed_len = used;
    *replaced = count;
    return out;
}
