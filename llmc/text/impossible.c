// x cannot follow p when a merge of rank r, of the pieces a and b into the token r, was possible at the seam:
// a was the last piece of p, and b the first one of x, when the merges had come to rank r.
#include "llmc/text/impossible.h"
#include "llmc/base/utf8.h"
#include <stdlib.h>
#include <string.h>

enum { NEVER = INT32_MAX };

// ---- tokens by their bytes --------------------------------------------------------------------------------

typedef struct {
    const TokenBytes *tokens;
    int32_t *slots; // open addressing: id + 1; 0: empty
    uint32_t mask;
} TokenMap;

static int32_t *slot_of(const TokenMap *m, const char *bytes, size_t length)
{
    uint32_t i = (uint32_t)fingerprint_bytes(0, bytes, length) & m->mask;
    for (;; i = (i + 1) & m->mask) {
        const TokenBytes *t = m->slots[i] ? &m->tokens[m->slots[i] - 1] : NULL;
        if (!t || (t->length == length && !memcmp(t->bytes, bytes, length)))
            return &m->slots[i];
    }
}

static TokenMap map_tokens(const TokenBytes *tokens, int count)
{
    uint32_t size = 64;
    while (size < 2 * (uint32_t)count)
        size *= 2;
    TokenMap m = {tokens, xcalloc(size, sizeof *m.slots), size - 1};
    for (int i = 0; i < count; i++) {
        if (tokens[i].length)
            *slot_of(&m, tokens[i].bytes, tokens[i].length) = i + 1;
    }
    return m;
}

static int32_t find_token(const TokenMap *m, const char *bytes, size_t length) // NEVER: there is none
{
    int32_t found = *slot_of(m, bytes, length);
    return found ? found - 1 : NEVER;
}

// ---- pieces at the edges of a token -----------------------------------------------------------------------

// Token `token` has the piece at its edge while merges of ranks begin .. end - 1 are made.
typedef struct {
    int32_t piece, token, begin, end;
} Edge;

typedef struct {
    Edge *list; // (count) of (capacity), owned
    int count, capacity;
} Edges;

static void add_edge(Edges *edges, Edge edge)
{
    if (edges->count == edges->capacity) {
        edges->capacity = edges->capacity ? 2 * edges->capacity : 1024;
        edges->list = realloc(edges->list, (size_t)edges->capacity * sizeof *edges->list);
        if (!edges->list)
            fatal(EXIT_BAD_INPUT, "out of memory for the pieces of tokens");
    }
    edges->list[edges->count++] = edge;
}

// From rank `rank` on the token's edge is another piece.
static void change_edge(Edges *edges, int32_t piece, int32_t token, int32_t rank)
{
    Edge *last = edges->count ? &edges->list[edges->count - 1] : NULL;
    if (last && last->token == token) {
        if (last->piece == piece)
            return;
        last->end = rank;
        if (last->begin >= last->end)
            edges->count--;
    }
    add_edge(edges, (Edge){piece, token, rank, NEVER});
}

typedef struct {
    TokenMap map;
    Edges first, last;
    int32_t (*halves)[2]; // (count) of each token the two pieces of its last merge; -1: it is a byte
} Merges;

// The adjacent pair of the lowest rank, leftmost on ties; start (n + 1): where the n pieces begin.
static int lowest_pair(const TokenMap *m, const char *bytes, const int *start, int n, int32_t *rank)
{
    int at = 0;
    *rank = NEVER;
    for (int i = 0; i + 1 < n; i++) {
        int32_t merged = find_token(m, bytes + start[i], (size_t)(start[i + 2] - start[i]));
        if (merged < *rank) {
            *rank = merged;
            at = i;
        }
    }
    return at;
}

static bool replay_merges(Merges *m, int32_t token, Error *e)
{
    const TokenBytes *t = &m->map.tokens[token];
    int n = (int)t->length, *start = xcalloc(t->length + 1, sizeof *start);
    for (int i = 0; i <= n; i++)
        start[i] = i;
    change_edge(&m->first, find_token(&m->map, t->bytes, 1), token, 0);
    change_edge(&m->last, find_token(&m->map, t->bytes + n - 1, 1), token, 0);
    m->halves[token][0] = m->halves[token][1] = -1;
    int32_t rank = 0;
    while (n > 1 && rank != NEVER) {
        int i = lowest_pair(&m->map, t->bytes, start, n, &rank);
        if (rank == NEVER)
            break;
        if (n == 2) {
            m->halves[token][0] = find_token(&m->map, t->bytes, (size_t)start[1]);
            m->halves[token][1] = find_token(&m->map, t->bytes + start[1], (size_t)(start[2] - start[1]));
        }
        memmove(start + i + 1, start + i + 2, (size_t)(n - i - 1) * sizeof *start);
        n--;
        if (i == 0)
            change_edge(&m->first, rank, token, rank + 1);
        if (i == n - 1)
            change_edge(&m->last, rank, token, rank);
    }
    free(start);
    return n == 1 || error_set(e, "token %d of the vocabulary is not made by its merges", token);
}

static int by_piece(const void *a, const void *b)
{
    const Edge *x = a, *y = b;
    if (x->piece != y->piece)
        return x->piece < y->piece ? -1 : 1;
    return (x->token > y->token) - (x->token < y->token);
}

// Sorts by piece; returns where each begins (count + 1), owned by the caller.
static int *sort_edges(Edges *edges, int count)
{
    int *start = xcalloc((size_t)count + 1, sizeof *start);
    qsort(edges->list, (size_t)edges->count, sizeof *edges->list, by_piece);
    for (int i = 0; i < edges->count; i++)
        start[edges->list[i].piece + 1]++;
    for (int i = 0; i < count; i++)
        start[i + 1] += start[i];
    return start;
}

// ---- characters -------------------------------------------------------------------------------------------

// Of a token's first or last character: white space, number, letter, anything else, or the token begins or
// ends inside of it. ENDING: the token is one behind which the text is cut.
typedef enum { SPACE, NUMBER, LETTER, OTHER, INSIDE, ENDING } Class;

// Beyond ASCII the white space, numbers and letters that stand at the edges of GPT-2's tokens, in runs
// between which it has none of another class.
static Class class_of(uint32_t c)
{
    static const struct {
        uint32_t from, to;
        Class class;
    } runs[] = {{9, 13, SPACE},          {32, 32, SPACE},        {'0', '9', NUMBER},
                {'A', 'Z', LETTER},      {'a', 'z', LETTER},     {0xA0, 0xA0, SPACE},
                {0xB2, 0xB2, NUMBER},    {0xB5, 0xB5, LETTER},   {0xBA, 0xBA, LETTER},
                {0xBD, 0xBD, NUMBER},    {0xC2, 0xD6, LETTER},   {0xDB, 0x2C8, LETTER},
                {0x394, 0x44F, LETTER},  {0x5D0, 0x64A, LETTER}, {0x3042, 0x30F4, LETTER},
                {0x30FC, 0x9F8D, LETTER}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        if (c >= runs[i].from && c <= runs[i].to)
            return runs[i].class;
    }
    return OTHER;
}

static uint32_t decode(const char *bytes, size_t length) // one valid character
{
    static const uint8_t masks[] = {0x7F, 0x1F, 0x0F, 0x07};
    uint32_t c = (uint8_t)bytes[0] & masks[length - 1];
    for (size_t i = 1; i < length; i++)
        c = c << 6 | ((uint8_t)bytes[i] & 0x3F);
    return c;
}

static Class edge_class(const TokenBytes *t, bool last)
{
    for (size_t n = 1; n <= 4 && n <= t->length; n++) {
        const char *bytes = last ? t->bytes + t->length - n : t->bytes;
        if (utf8_valid_prefix(bytes, n) == n)
            return class_of(decode(bytes, n));
    }
    return INSIDE;
}

// English ones, behind which the text is cut whatever follows.
static bool is_ending(const TokenBytes *t)
{
    static const char *const endings[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    bool is = false;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        is |= strlen(endings[i]) == t->length && !memcmp(endings[i], t->bytes, t->length);
    return is;
}

// Whether the text is cut between a token of the one class and one of the other.
static bool is_cut(Class end, Class begin)
{
    return begin == INSIDE || (end == SPACE && begin == SPACE) || (end == OTHER && begin == LETTER);
}

// ---- pairs ------------------------------------------------------------------------------------------------

// All pairs between which rule v would have joined the pieces a and b.
static void forbid(uint32_t *bits, int words, const Merges *m, const int *first, const int *last, int32_t v,
                   const Class *begins, const Class *ends)
{
    int32_t a = m->halves[v][0], b = m->halves[v][1];
    for (int i = last[a]; i < last[a + 1]; i++) {
        const Edge *p = &m->last.list[i];
        uint32_t *row = bits + (int64_t)p->token * words;
        if (v < p->begin || v >= p->end || ends[p->token] == ENDING)
            continue;
        for (int k = first[b]; k < first[b + 1]; k++) {
            const Edge *x = &m->first.list[k];
            if (v >= x->begin && v < x->end && !is_cut(ends[p->token], begins[x->token]))
                row[x->token / 32] |= 1u << x->token % 32;
        }
    }
}

bool impossible_pairs(uint32_t *bits, const TokenBytes *tokens, int count, int padded, Error *e)
{
    Merges m = {.map = map_tokens(tokens, count), .halves = xcalloc((size_t)count, sizeof *m.halves)};
    Class *begins = xcalloc((size_t)count, sizeof *begins), *ends = xcalloc((size_t)count, sizeof *ends);
    bool good = true;
    memset(bits, 0, (size_t)padded * (size_t)(padded / 32) * sizeof *bits);
    for (int v = 0; v < count && good; v++) {
        if (!tokens[v].length)
            continue;
        begins[v] = edge_class(&tokens[v], false);
        ends[v] = is_ending(&tokens[v]) ? ENDING : edge_class(&tokens[v], true);
        good = replay_merges(&m, v, e);
    }
    int *first = good ? sort_edges(&m.first, count) : NULL, *last = good ? sort_edges(&m.last, count) : NULL;
    for (int v = 0; v < count && good; v++) {
        if (tokens[v].length > 1)
            forbid(bits, padded / 32, &m, first, last, v, begins, ends);
    }
    free(first);
    free(last);
    free(begins);
    free(ends);
    free(m.first.list);
    free(m.last.list);
    free(m.halves);
    free(m.map.slots);
    return good;
}
