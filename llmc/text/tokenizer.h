// Text to token ids and back: GPT-2 byte-pair encoding from the published files, or plain bytes with no
// vocabulary at all.
//
// Text is UTF-8. What is not valid UTF-8 is replaced by U+FFFD before encoding (see utf8.h) and counted.
// GPT-2 encoding: the text is cut into pieces by the published pattern (PCRE2), each piece starts as single
// bytes, and the adjacent pair of the lowest rank is merged, leftmost first, until no pair is known. Special
// tokens are never made from text: "<|endoftext|>" in a text is encoded as ordinary characters.
// (Sennrich, Haddow, Birch 2016, "Neural Machine Translation of Rare Words with Subword Units"; Radford et
// al. 2019.)
#pragma once
#include "llmc/base/common.h"

// Read-only after loading: any number of threads may share one.
typedef struct Tokenizer Tokenizer;

enum {
    TOKENIZER_MAX_VOCAB = 65536,
    BYTE_VOCAB = 257,
    BYTE_DOCUMENT = 256,
    GPT2_VOCAB = 50257,
    GPT2_DOCUMENT = 50256
};
enum { TOKENIZER_MAX_TEXT = 1 << 30 }; // bytes in one call; positions inside a repaired text then fit 32 bits

// Loads the vocabulary at `path`, which is one of
//   "bytes"            byte mode, as tokenizer_bytes()
//   a folder           with vocab.bpe or merges.txt and encoder.json or vocab.json, else with exactly one
//                      *.tiktoken file
//   a *.tiktoken file  lines of "base64-of-token rank"; the document token follows the last rank
//   a merges or a json file of the pair above; the other is looked for beside it
// Returns a new tokenizer (free with tokenizer_free), or NULL with one line in `e`: file missing or
// unreadable, a corrupt line (file:line), ids with holes, a byte without a token, more than
// TOKENIZER_MAX_VOCAB ids, or a build without PCRE2.
Tokenizer *tokenizer_load(const char *path, Error *e);

// Byte mode: ids 0..255 are the bytes, 256 is the document token.
Tokenizer *tokenizer_bytes(void);

void tokenizer_free(Tokenizer *t); // NULL is allowed

int tokenizer_vocab_size(const Tokenizer *t); // number of ids, the document token included
int tokenizer_document(const Tokenizer *t);   // id that begins every document

// Version of Unicode whose letters and numbers cut the text into pieces: 16 as in tiktoken with every PCRE2
// that has 14 to 16, else the library's own. 0 in byte mode.
int tokenizer_unicode(const Tokenizer *t);
char *tokenizer_describe_classes(
    const Tokenizer *t); // the same for a log, with PCRE2's version; owned by the caller

// The bytes of one token: `*len` bytes, owned by the tokenizer, not NUL-terminated; the document token reads
// "<|endoftext|>". Needs 0 <= id < vocab size.
const char *tokenizer_token(const Tokenizer *t, int id, size_t *len);

// Encodes one text of `len` bytes (at most TOKENIZER_MAX_TEXT), without a document token. *ids: (count)
// uint16, malloc'd, owned by the caller. Returns how many invalid UTF-8 sequences were replaced. For many
// texts use a TextEncoder: it keeps what it learned.
size_t tokenizer_encode(const Tokenizer *t, const char *text, size_t len, uint16_t **ids, size_t *count);

// ---- many texts -------------------------------------------------------------------------------------------

typedef struct {
    uint16_t *ids; // (count) of (capacity), malloc'd; start from {0}, free(ids) when done
    size_t count, capacity;
} TokenList;

void token_list_append(TokenList *list, const uint16_t *ids, size_t count); // ids: (count) uint16

// One thread's working memory: match data, scratch and a cache of recent pieces (2 MB). Not to be shared
// between threads.
typedef struct TextEncoder TextEncoder;
TextEncoder *text_encoder_create(const Tokenizer *t); // t must outlive it
void text_encoder_free(TextEncoder *encoder);         // NULL is allowed

// Appends the tokens of `text` (len bytes, at most TOKENIZER_MAX_TEXT) to `out`. Returns how many invalid
// sequences were replaced.
size_t text_encode(TextEncoder *encoder, const char *text, size_t len, TokenList *out);
