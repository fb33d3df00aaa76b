// Inside of the tokenizer, shared by tokenizer*.c and the fuzzer only.
#pragma once
#include "llmc/text/tokenizer.h"

// What an adjacent pair of tokens becomes. Low ranks merge first.
typedef struct {
    uint32_t pair; // left id << 16 | right id
    uint32_t rank; // NO_RANK: empty slot of the table
    uint32_t merged;
} Merge;

enum { LONGEST_TOKEN = 1024 };        // bytes; GPT-2's longest has 128
#define DOCUMENT_TEXT "<|endoftext|>" // what the document token is called in vocabularies
static const uint32_t NO_RANK = UINT32_MAX;

struct Tokenizer {
    int vocab_size, document;
    bool byte_mode;
    bool whole_pieces;   // a piece that is a token needs no merging (the rule of rank files)
    void *pattern;       // pcre2_code with the library's own classes
    void *newer_pattern; // with those of newer Unicode added; NULL: the library has them
    bool pattern_jit;    // compiled to machine code
    int unicode;         // whose letters and numbers cut the text; 0: none do

    char *bytes;      // all tokens, one after another
    uint32_t *offset; // (vocab_size + 1) into bytes

    uint32_t *word_slots; // open addressing from a token's bytes to its id + 1; 0 is empty
    uint32_t word_mask;
    Merge *merges; // open addressing by pair
    uint32_t merge_mask;
    uint16_t byte_id[256]; // the token of each single byte
};

// ---- pieces (tokenizer_pattern.c) ---------------------------------------------------------------------

// Fills pattern, newer_pattern, pattern_jit and unicode; false with a message in builds without PCRE2.
bool pattern_compile(Tokenizer *t, Error *e);
void pattern_free(Tokenizer *t);
char *pattern_describe_classes(const Tokenizer *t); // owned by the caller
void *pattern_match_create(const Tokenizer *t);     // one thread's working memory; NULL in byte mode
void pattern_match_free(void *match);
const void *pattern_for(const Tokenizer *t, const char *text,
                        size_t len); // the one that cuts this valid text
// Where the piece that begins at `at` ends.
size_t pattern_piece_end(const Tokenizer *t, const void *pattern, void *match, const char *text, size_t len,
                         size_t at);

// ---- tables -----------------------------------------------------------------------------------------------

static inline uint32_t token_length(const Tokenizer *t, uint32_t id)
{
    return t->offset[id + 1] - t->offset[id];
}

uint64_t hash_bytes(const char *p, size_t len);

// Id of the token with exactly these bytes, or -1. The document token is not in the table.
int word_find(const Tokenizer *t, const char *p, size_t len);

static inline uint32_t merge_slot(uint32_t pair, uint32_t mask)
{
    return (uint32_t)(pair * 0x9E3779B97F4A7C15u >> 32) &
           mask; // multiplicative hashing (Knuth 6.4), high half of the product
}

// NULL when the pair is not known.
static inline const Merge *merge_find(const Tokenizer *t, uint32_t left, uint32_t right)
{
    uint32_t pair = left << 16 | right;
    for (uint32_t i = merge_slot(pair, t->merge_mask);; i = (i + 1) & t->merge_mask) {
        const Merge *m = &t->merges[i];
        if (m->rank == NO_RANK)
            return NULL;
        if (m->pair == pair)
            return m;
    }
}

// Both loaders from text in memory; `name` of each text is for messages. Used by tokenizer_load and the
// fuzzer.
Tokenizer *tokenizer_from_ranks(const char *text, size_t len, const char *name, Error *e);
Tokenizer *tokenizer_from_merges(const char *merges, size_t merges_len, const char *merges_name,
                                 const char *json, size_t json_len, const char *json_name, Error *e);
