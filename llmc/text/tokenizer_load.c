// Vocabularies from the text of their files: OpenAI's merges with their JSON of ids, or a tiktoken rank file.
#include "llmc/text/tokenizer_internal.h"
#include "llmc/base/grow.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

// ---- building the tables ----------------------------------------------------------------------------------

// Tokens in the order they are read; ids come from the file, so their bytes are put in order at the end.
typedef struct {
    char *bytes; // (used) of (capacity)
    size_t used, capacity;
    struct {
        size_t at;
        uint32_t len;
        bool given;
    } token[TOKENIZER_MAX_VOCAB];
    int count, highest;
} TokenTable;

static bool table_add(TokenTable *table, int64_t id, const char *p, size_t len, const char *where, Error *e)
{
    if (id < 0 || id >= TOKENIZER_MAX_VOCAB) {
        return error_set(e,
                         "%s: id %lld; ids must be 0 to %d because shards store 16 bits per token: use a "
                         "smaller vocabulary",
                         where, (long long)id, TOKENIZER_MAX_VOCAB - 1);
    }
    if (table->token[id].given)
        return error_set(e, "%s: id %lld is given twice", where, (long long)id);
    if (len == 0 || len > LONGEST_TOKEN) {
        return error_set(e, "%s: token of %zu bytes (1 to %d are allowed)", where, len, LONGEST_TOKEN);
    }
    table->bytes = grow(table->bytes, &table->capacity, table->used + len, 1);
    memcpy(table->bytes + table->used, p, len);
    table->token[id].at = table->used;
    table->token[id].len = (uint32_t)len;
    table->token[id].given = true;
    table->used += len;
    table->count++;
    if (id > table->highest)
        table->highest = (int)id;
    return true;
}

static void word_insert(Tokenizer *t, uint32_t id)
{
    uint32_t i = (uint32_t)hash_bytes(t->bytes + t->offset[id], token_length(t, id)) & t->word_mask;
    while (t->word_slots[i])
        i = (i + 1) & t->word_mask;
    t->word_slots[i] = id + 1;
}

static uint32_t table_size_for(size_t entries)
{
    uint32_t size = 64;
    while (size < 2 * entries)
        size *= 2;
    return size;
}

// Puts the tokens in id order, checks that ids have no holes, that no two tokens are the same and that every
// byte is one.
static bool words_build(Tokenizer *t, const TokenTable *table, const char *name, Error *e)
{
    t->vocab_size = table->highest + 1;
    if (table->count != t->vocab_size) {
        int hole = 0;
        while (table->token[hole].given)
            hole++;
        return error_set(e, "%s: id %d is missing below the highest id %d; is the file truncated?", name,
                         hole, table->highest);
    }
    t->bytes = xcalloc(table->used, 1);
    t->offset = xcalloc((size_t)t->vocab_size + 1, sizeof *t->offset);
    uint32_t size = table_size_for((size_t)t->vocab_size);
    t->word_slots = xcalloc(size, sizeof *t->word_slots);
    t->word_mask = size - 1;
    for (int id = 0; id < t->vocab_size; id++) {
        memcpy(t->bytes + t->offset[id], table->bytes + table->token[id].at, table->token[id].len);
        t->offset[id + 1] = t->offset[id] + table->token[id].len;
        if (id == t->document)
            continue;
        int same = word_find(t, t->bytes + t->offset[id], table->token[id].len);
        if (same >= 0)
            return error_set(e, "%s: ids %d and %d are the same token", name, same, id);
        word_insert(t, (uint32_t)id);
    }
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        int id = word_find(t, &byte, 1);
        if (id < 0)
            return error_set(e, "%s: no token for the single byte 0x%02x; is the file truncated?", name, b);
        t->byte_id[b] = (uint16_t)id;
    }
    return true;
}

static void merges_allocate(Tokenizer *t, size_t entries)
{
    uint32_t size = table_size_for(entries);
    t->merges = xcalloc(size, sizeof *t->merges);
    t->merge_mask = size - 1;
    for (uint32_t i = 0; i < size; i++)
        t->merges[i].rank = NO_RANK;
}

static bool merge_insert(Tokenizer *t, uint32_t left, uint32_t right, uint32_t merged, uint32_t rank)
{
    if (merge_find(t, left, right))
        return false;
    uint32_t pair = left << 16 | right, i = merge_slot(pair, t->merge_mask);
    while (t->merges[i].rank != NO_RANK)
        i = (i + 1) & t->merge_mask;
    t->merges[i] = (Merge){pair, rank, merged};
    return true;
}

// ---- lines ------------------------------------------------------------------------------------------------

typedef struct {
    const char *at, *end;
    int number; // of the line last given, from 1
} Lines;

static bool next_line(Lines *lines, const char **line, size_t *len)
{
    if (lines->at == lines->end)
        return false;
    const char *stop = memchr(lines->at, '\n', (size_t)(lines->end - lines->at));
    *line = lines->at;
    *len = (size_t)((stop ? stop : lines->end) - lines->at);
    lines->at = stop ? stop + 1 : lines->end;
    lines->number++;
    return true;
}

// ---- rank files -------------------------------------------------------------------------------------------

static int base64_value(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// out: room for len * 3 / 4 bytes. Returns the decoded length, or -1.
static int64_t base64_decode(const char *p, size_t len, char *out)
{
    if (len % 4)
        return -1;
    size_t padding = len && p[len - 1] == '=' ? (p[len - 2] == '=' ? 2 : 1) : 0, used = 0;
    uint32_t bits = 0, kept = 0;
    for (size_t i = 0; i < len - padding; i++) {
        int v = base64_value(p[i]);
        if (v < 0)
            return -1;
        bits = bits << 6 | (uint32_t)v;
        kept += 6;
        if (kept >= 8) {
            kept -= 8;
            out[used++] = (char)(bits >> kept);
        }
    }
    return (int64_t)used;
}

static bool read_ranks(TokenTable *table, const char *text, size_t len, const char *name, Error *e)
{
    Lines lines = {text, text + len, 0};
    const char *line;
    size_t n;
    while (next_line(&lines, &line, &n)) {
        if (n == 0)
            continue;
        char where[512], digits[16] = "", *token = xcalloc(n, 1);
        snprintf(where, sizeof where, "%.480s:%d", name, lines.number);
        const char *space = memchr(line, ' ', n);
        size_t word = space ? (size_t)(space - line) : n, rest = space ? n - word - 1 : 0;
        int64_t bytes = base64_decode(line, word, token);
        bool number = rest > 0 && rest < sizeof digits;
        if (number)
            memcpy(digits, space + 1, rest);
        bool good = bytes > 0 && number && strspn(digits, "0123456789") == rest;
        good = good ? table_add(table, atoll(digits), token, (size_t)bytes, where, e)
                    : error_set(e, "%s: not a line of a rank file (\"base64-of-token rank\")", where);
        free(token);
        if (!good)
            return false;
    }
    if (!table->count)
        return error_set(e, "%s: empty, expected lines of \"base64-of-token rank\"", name);
    return true;
}

// The rule of rank files: two neighbours merge when their concatenation is a token, whose id is the rank. So
// every split of a token into two tokens is a merge.
static size_t splits(Tokenizer *t, bool insert)
{
    size_t count = 0;
    for (uint32_t id = 0; id < (uint32_t)t->document; id++) {
        const char *p = t->bytes + t->offset[id];
        uint32_t len = token_length(t, id);
        for (uint32_t cut = 1; cut < len; cut++) {
            int left = word_find(t, p, cut), right = left < 0 ? -1 : word_find(t, p + cut, len - cut);
            if (right < 0)
                continue;
            count++;
            if (insert)
                merge_insert(t, (uint32_t)left, (uint32_t)right, id, id);
        }
    }
    return count;
}

static Tokenizer *finish(Tokenizer *t, TokenTable *table, bool good)
{
    free(table->bytes);
    free(table);
    if (good)
        return t;
    tokenizer_free(t);
    return NULL;
}

Tokenizer *tokenizer_from_ranks(const char *text, size_t len, const char *name, Error *e)
{
    Tokenizer *t = xcalloc(1, sizeof *t);
    TokenTable *table = xcalloc(1, sizeof *table);
    table->highest = -1;
    bool good = pattern_compile(t, e) && read_ranks(table, text, len, name, e);
    t->document = table->highest + 1;
    t->whole_pieces = true;
    good = good && table_add(table, t->document, DOCUMENT_TEXT, sizeof DOCUMENT_TEXT - 1, name, e) &&
           words_build(t, table, name, e);
    if (good) {
        merges_allocate(t, splits(t, false));
        splits(t, true);
    }
    return finish(t, table, good);
}

// ---- merges and their JSON of ids -------------------------------------------------------------------------

// The published files write bytes as printable characters: a byte that prints in ASCII or Latin-1 stands for
// itself, the other 68 (0-32, 127-160, 173) are U+0100 onwards in order of value. Returns the byte of a
// character, or -1.
static int printable_byte(unsigned c)
{
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255))
        return (int)c;
    if (c < 256 || c >= 256 + 68)
        return -1;
    c -= 256;
    return c < 33 ? (int)c : c < 67 ? (int)c - 33 + 127 : 173;
}

// out: room for len bytes. Returns the number of bytes spelled by the `len` bytes of UTF-8 at p, or -1.
static int64_t printable_decode(const char *p, size_t len, char *out)
{
    int64_t used = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned c = (unsigned char)p[i];
        if (c >= 0xC2 && c <= 0xC5 && i + 1 < len && ((unsigned char)p[i + 1] & 0xC0) == 0x80) {
            c = (c & 0x1F) << 6 | ((unsigned char)p[++i] & 0x3F);
        } else if (c >= 0x80) {
            return -1;
        }
        int byte = printable_byte(c);
        if (byte < 0)
            return -1;
        out[used++] = (char)byte;
    }
    return used;
}

static bool add_json_tokens(Tokenizer *t, TokenTable *table, json_t *object, const char *name, Error *e)
{
    if (!json_is_object(object))
        return error_set(e, "%s: not a JSON object of token: id", name);
    bool good = true, has_document = false;
    for (void *at = json_object_iter(object); good && at; at = json_object_iter_next(object, at)) {
        const char *key = json_object_iter_key(at);
        json_t *value = json_object_iter_value(at);
        char where[512], *token = xcalloc(strlen(key) + 1, 1);
        snprintf(where, sizeof where, "%.400s: token \"%.80s\"", name, key);
        int64_t len = printable_decode(key, strlen(key), token);
        if (len < 0) {
            good = error_set(e, "%s: not in the published spelling of bytes as characters", where);
        } else if (!json_is_integer(value)) {
            good = error_set(e, "%s: its id is not an integer", where);
        } else {
            int64_t id = json_integer_value(value);
            good = table_add(table, id, token, (size_t)len, where, e);
            if (good && !strcmp(key, DOCUMENT_TEXT)) {
                t->document = (int)id;
                has_document = true;
            }
        }
        free(token);
    }
    if (good && !has_document) {
        return error_set(e, "%s: no token \"%s\", which begins every document", name, DOCUMENT_TEXT);
    }
    return good;
}

static bool read_json(Tokenizer *t, TokenTable *table, const char *text, size_t len, const char *name,
                      Error *e)
{
    json_error_t problem;
    json_t *object = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &problem);
    bool good = object && add_json_tokens(t, table, object, name, e);
    if (!object) {
        error_set(e, "%s: not valid JSON near byte %d (%s); is it truncated?", name, problem.position,
                  problem.text);
    }
    json_decref(object);
    return good;
}

// One line "left right" of the merges file. made: (vocab_size), marks what a merge makes.
static bool read_merge(Tokenizer *t, const char *line, size_t n, uint32_t rank, bool *made, const char *where,
                       Error *e)
{
    const char *space = memchr(line, ' ', n);
    char *bytes = xcalloc(n + 1, 1);
    int64_t left = space ? printable_decode(line, (size_t)(space - line), bytes) : -1, right = -1;
    if (left > 0)
        right = printable_decode(space + 1, n - (size_t)(space - line) - 1, bytes + left);
    bool good = right > 0;
    if (!good)
        error_set(e, "%s: not a merge (two tokens separated by one space)", where);
    if (good) {
        int a = word_find(t, bytes, (size_t)left), b = word_find(t, bytes + left, (size_t)right);
        int both = word_find(t, bytes, (size_t)(left + right));
        good = a >= 0 && b >= 0 && both >= 0;
        if (!good) {
            error_set(e,
                      "%s: the merge \"%.*s\" names a token that the JSON file does not have; "
                      "the two files do not belong together",
                      where, (int)(n < 80 ? n : 80), line);
        } else if (!(good = merge_insert(t, (uint32_t)a, (uint32_t)b, (uint32_t)both, rank))) {
            error_set(e, "%s: the merge \"%.*s\" is given twice", where, (int)(n < 80 ? n : 80), line);
        } else {
            made[both] = true;
        }
    }
    free(bytes);
    return good;
}

static bool read_merges(Tokenizer *t, const char *text, size_t len, const char *name, Error *e)
{
    size_t line_count = 1;
    for (size_t i = 0; i < len; i++)
        line_count += text[i] == '\n';
    merges_allocate(t, line_count);
    bool *made = xcalloc((size_t)t->vocab_size, sizeof *made), good = true;
    Lines lines = {text, text + len, 0};
    const char *line;
    size_t n;
    for (uint32_t rank = 0; good && next_line(&lines, &line, &n);) {
        if (n == 0 || (lines.number == 1 && n >= 8 && !memcmp(line, "#version", 8)))
            continue;
        char where[512];
        snprintf(where, sizeof where, "%.480s:%d", name, lines.number);
        good = read_merge(t, line, n, rank++, made, where, e);
    }
    for (int id = 0; good && id < t->vocab_size; id++) {
        if (made[id] || id == t->document || token_length(t, (uint32_t)id) == 1)
            continue;
        good = error_set(
            e,
            "%s: no merge makes token %d (\"%.*s\"); the file is truncated or belongs to another vocabulary",
            name, id, (int)token_length(t, (uint32_t)id), t->bytes + t->offset[id]);
    }
    free(made);
    return good;
}

Tokenizer *tokenizer_from_merges(const char *merges, size_t merges_len, const char *merges_name,
                                 const char *json, size_t json_len, const char *json_name, Error *e)
{
    Tokenizer *t = xcalloc(1, sizeof *t);
    TokenTable *table = xcalloc(1, sizeof *table);
    table->highest = -1;
    bool good = pattern_compile(t, e) && read_json(t, table, json, json_len, json_name, e) &&
                words_build(t, table, json_name, e) && read_merges(t, merges, merges_len, merges_name, e);
    return finish(t, table, good);
}
