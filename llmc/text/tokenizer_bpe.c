// Encoding: cut into pieces, look up or merge each piece. Nothing here is quadratic in the length of a piece.
#include "llmc/text/tokenizer_internal.h"
#include "llmc/base/grow.h"
#include "llmc/base/utf8.h"
#include <stdlib.h>
#include <string.h>

enum {
    SHORT_PIECE = 48, // up to here a linear scan for the lowest rank beats a heap
    CACHE_SLOTS = 1 << 16,
    CACHE_KEY = 15, // longest piece kept, in bytes
    CACHE_IDS = 7,  // most tokens kept for one piece
};

// 32 bytes, half a cache line: the piece, zero-padded, with its length as the last byte; then its tokens.
typedef struct {
    uint64_t key[2];
    uint16_t ids[CACHE_IDS];
    uint16_t count;
} CacheEntry;
_Static_assert(sizeof(CacheEntry) == 32, "a cache entry must not straddle cache lines");

// One part of a long piece: a list in text order, and the merge with the part that follows.
typedef struct {
    uint32_t id, previous, next;
    uint32_t rank, merged; // of (id, next's id); rank NO_RANK: none
} Part;

typedef struct {
    uint32_t rank, at;
} Candidate;

struct TextEncoder {
    const Tokenizer *t;
    void *match; // of pattern_match_create
    CacheEntry *cache;
    Part *parts; // (part_capacity), with a heap of candidates beside it
    Candidate *heap;
    size_t part_capacity, heap_capacity, heap_count;
};

void token_list_append(TokenList *list, const uint16_t *ids, size_t count)
{
    list->ids = grow(list->ids, &list->capacity, list->count + count, sizeof *list->ids);
    if (count)
        memcpy(list->ids + list->count, ids, count * sizeof *ids);
    list->count += count;
}

// ---- merging ----------------------------------------------------------------------------------------------

// ids: (n), n <= SHORT_PIECE, the bytes' tokens; merged in place. Returns how many are left.
static size_t merge_short(const Tokenizer *t, uint16_t *ids, size_t n)
{
    uint32_t rank[SHORT_PIECE];
    uint16_t merged[SHORT_PIECE];
    size_t changed[2] = {0, n - 1}; // pairs to look up: [changed[0], changed[1])
    for (;;) {
        for (size_t i = changed[0]; i < changed[1]; i++) {
            const Merge *m = merge_find(t, ids[i], ids[i + 1]);
            rank[i] = m ? m->rank : NO_RANK;
            merged[i] = m ? (uint16_t)m->merged : 0;
        }
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            if (rank[i] < rank[best])
                best = i;
        }
        if (n < 2 || rank[best] == NO_RANK)
            return n;
        ids[best] = merged[best];
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        if (best + 1 < n) { // pair `best` is looked up again below, those after the vanished one move up
            memmove(rank + best + 1, rank + best + 2, (n - best - 2) * sizeof *rank);
            memmove(merged + best + 1, merged + best + 2, (n - best - 2) * sizeof *merged);
        }
        changed[0] = best ? best - 1 : 0;
        changed[1] = best + 1 < n ? best + 1 : best;
    }
}

static bool before(Candidate a, Candidate b) { return a.rank < b.rank || (a.rank == b.rank && a.at < b.at); }

static void heap_push(TextEncoder *s, Candidate c)
{
    s->heap = grow(s->heap, &s->heap_capacity, s->heap_count + 1, sizeof *s->heap);
    size_t i = s->heap_count++;
    for (; i && before(c, s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = c;
}

static Candidate heap_pop(TextEncoder *s)
{
    Candidate *h = s->heap, top = h[0], last = h[--s->heap_count];
    size_t i = 0, n = s->heap_count;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(h[child + 1], h[child]))
            child++;
        if (!before(h[child], last))
            break;
        h[i] = h[child];
    }
    h[i] = last;
    return top;
}

static void part_look_up(TextEncoder *s, uint32_t at, uint32_t end)
{
    Part *p = &s->parts[at];
    const Merge *m = p->next < end ? merge_find(s->t, p->id, s->parts[p->next].id) : NULL;
    p->rank = m ? m->rank : NO_RANK;
    p->merged = m ? m->merged : 0;
    if (m)
        heap_push(s, (Candidate){p->rank, at});
}

// A long piece: heap of candidate merges over a linked list, O(n log n). A candidate whose part has since
// changed is stale and is passed over; the order of (rank, position) is that of the scan in merge_short.
static void merge_long(TextEncoder *s, const unsigned char *piece, uint32_t n, TokenList *out)
{
    s->parts = grow(s->parts, &s->part_capacity, n, sizeof *s->parts);
    s->heap_count = 0;
    for (uint32_t i = 0; i < n; i++)
        s->parts[i] = (Part){.id = s->t->byte_id[piece[i]], .previous = i - 1, .next = i + 1};
    for (uint32_t i = 0; i < n; i++)
        part_look_up(s, i, n);
    while (s->heap_count) {
        Candidate c = heap_pop(s);
        Part *p = &s->parts[c.at];
        if (p->rank != c.rank)
            continue;
        Part *gone = &s->parts[p->next];
        p->id = p->merged;
        p->next = gone->next;
        gone->rank = NO_RANK;
        if (p->next < n)
            s->parts[p->next].previous = c.at;
        part_look_up(s, c.at, n);
        if (c.at)
            part_look_up(s, p->previous, n);
    }
    for (uint32_t i = 0; i < n; i = s->parts[i].next) {
        uint16_t id = (uint16_t)s->parts[i].id;
        token_list_append(out, &id, 1);
    }
}

static void encode_uncached(TextEncoder *s, const char *piece, size_t len, TokenList *out)
{
    const Tokenizer *t = s->t;
    int whole = t->whole_pieces ? word_find(t, piece, len) : -1;
    if (whole >= 0) {
        token_list_append(out, &(uint16_t){(uint16_t)whole}, 1);
    } else if (len <= SHORT_PIECE) {
        uint16_t ids[SHORT_PIECE];
        for (size_t i = 0; i < len; i++)
            ids[i] = t->byte_id[(unsigned char)piece[i]];
        token_list_append(out, ids, merge_short(t, ids, len));
    } else {
        merge_long(s, (const unsigned char *)piece, (uint32_t)len, out);
    }
}

// ---- the cache of pieces ----------------------------------------------------------------------------------

// The 1 to 15 bytes at p as two words with the length on top; reads 16 bytes where `readable` allows it.
static inline void cache_key(uint64_t key[2], const char *p, size_t len, size_t readable)
{
    if (readable >= 16) {
        memcpy(key, p, 16);
        unsigned drop = 8 * (unsigned)(16 - len); // bits above the piece
        if (drop >= 64) {
            key[1] = 0;
            key[0] = key[0] << (drop - 64) >> (drop - 64);
        } else {
            key[1] = key[1] << drop >> drop;
        }
    } else {
        key[0] = key[1] = 0;
        memcpy(key, p, len);
    }
    key[1] |= (uint64_t)len << 56;
}

static inline void encode_piece(TextEncoder *s, const char *piece, size_t len, size_t readable,
                                TokenList *out)
{
    if (len > CACHE_KEY) {
        encode_uncached(s, piece, len, out);
        return;
    }
    uint64_t key[2];
    cache_key(key, piece, len, readable);
    uint64_t h = (key[0] ^ key[1] * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    CacheEntry *entry = &s->cache[h >> 48 & (CACHE_SLOTS - 1)];
    if (entry->key[0] != key[0] || entry->key[1] != key[1]) {
        size_t start = out->count;
        encode_uncached(s, piece, len, out);
        size_t count = out->count - start;
        if (count > CACHE_IDS)
            return;
        *entry = (CacheEntry){.key = {key[0], key[1]}, .count = (uint16_t)count};
        memcpy(entry->ids, out->ids + start, count * sizeof *out->ids);
        return;
    }
    if (out->capacity - out->count < 8) {
        token_list_append(out, entry->ids, entry->count);
        return;
    }
    // A fixed size is one store; what it writes beyond count is overwritten next.
    memcpy(out->ids + out->count, (const char *)entry + offsetof(CacheEntry, ids), 16);
    out->count += entry->count;
}

// ---- the pattern ------------------------------------------------------------------------------------------

static void encode_valid(TextEncoder *s, const char *text, size_t len, TokenList *out)
{
    const void *pattern = pattern_for(s->t, text, len);
    for (size_t at = 0, end; at < len; at = end) {
        end = pattern_piece_end(s->t, pattern, s->match, text, len, at);
        encode_piece(s, text + at, end - at, len - at, out);
    }
}

// ---- the encoder ------------------------------------------------------------------------------------------

TextEncoder *text_encoder_create(const Tokenizer *t)
{
    TextEncoder *s = xcalloc(1, sizeof *s);
    s->t = t;
    s->match = pattern_match_create(t);
    if (!t->byte_mode)
        s->cache = xcalloc(CACHE_SLOTS, sizeof *s->cache);
    return s;
}

void text_encoder_free(TextEncoder *s)
{
    if (!s)
        return;
    pattern_match_free(s->match);
    free(s->cache);
    free(s->parts);
    free(s->heap);
    free(s);
}

static void encode_bytes(const char *text, size_t len, TokenList *out)
{
    uint16_t ids[256];
    for (size_t i = 0; i < len;) {
        size_t n = 0;
        while (n < 256 && i < len)
            ids[n++] = (unsigned char)text[i++];
        token_list_append(out, ids, n);
    }
}

size_t text_encode(TextEncoder *s, const char *text, size_t len, TokenList *out)
{
    assert(len <= TOKENIZER_MAX_TEXT);
    size_t replaced = 0;
    char *fixed = NULL;
    if (utf8_valid_prefix(text, len) < len)
        text = fixed = utf8_repair(text, len, &len, &replaced);
    if (s->t->byte_mode) {
        encode_bytes(text, len, out);
    } else {
        encode_valid(s, text, len, out);
    }
    free(fixed);
    return replaced;
}

size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t len, uint16_t **ids, size_t *count)
{
    TextEncoder *s = text_encoder_create(t);
    TokenList list = {0};
    token_list_append(&list, NULL, 0);
    size_t replaced = text_encode(s, text, len, &list);
    text_encoder_free(s);
    *ids = list.ids ? list.ids : xcalloc(1, sizeof **ids);
    *count = list.count;
    return replaced;
}
