// Token shards: the file format of the public FineWeb10B-GPT2 set, and a reader that brings one into memory
// in the background.
//
// File: 256 little-endian int32 of header, then that many uint16 token ids (little-endian).
//   [0] 20240520   [1] version 1   [2] number of tokens
//   [3] vocabulary size, 0 = GPT-2 (50257)   [4] id of the token that begins a document + 1, 0 = GPT-2
//                                            (50256)
// The other words are 0 in the public files and are not looked at.
#pragma once
#include "llmc/base/common.h"
#include <pthread.h>

enum {
    SHARD_MAGIC = 20240520,
    SHARD_VERSION = 1,
    SHARD_HEADER_INTS = 256,
    SHARD_HEADER_BYTES = 4 * SHARD_HEADER_INTS,
    SHARD_MAX_VOCAB = 65536, // ids are uint16
    SHARD_GPT2_VOCAB = 50257,
    SHARD_GPT2_DOCUMENT = 50256,
};

typedef struct {
    int64_t num_tokens; // 1 .. 2^31 - 1, the header's word is an int32
    int vocab_size;     // every id is below it
    int document_token; // id that begins every document
} ShardHeader;

// A shard as it was at the first look. What is read later under its name must be the same.
typedef struct {
    ShardHeader header;
    // Hash of the sizes and of the tokens at the beginning, in the middle and at the end: for any machine
    uint64_t contents;
    uint64_t inode;   // these three tell at little cost that nothing has happened to the file
    int64_t modified; // nanoseconds
    int64_t bytes;
} ShardIdentity;

// Checks and decodes a header. `file_bytes` is the size of the whole file, which must be exactly what the
// header says.
//   bytes (SHARD_HEADER_BYTES) uint8  in, owned by the caller; need not be filled when file_bytes is below
//                                     SHARD_HEADER_BYTES
// Error: empty or truncated or oversized file, foreign magic, other version, no tokens, impossible
// vocabulary.
bool shard_decode_header(const uint8_t *bytes, int64_t file_bytes, const char *path, ShardHeader *header,
                         Error *e);

// Opens a shard for reading and checks its header. Returns a file descriptor owned by the caller, or -1 with
// an Error (missing, unreadable, directory or other non-regular file, and everything shard_decode_header
// refuses).
int shard_open(const char *path, ShardHeader *header, Error *e);

// Reads tokens [first, first + count) into ids.
//   ids (count) uint16  out, owned by the caller
// Error: the file ended early (it shrank after it was opened), or the system's own words on a failed read.
bool shard_read(int fd, const char *path, int64_t first, int64_t count, uint16_t *ids, Error *e);

// Fills in the identity of an open shard, whose id->header is there. Error: the system's own words.
bool shard_identify(int fd, const char *path, ShardIdentity *id, Error *e);

// Opens a shard that was looked at before, and reads from it; it must still be the same file when the tokens
// are there. One that was only touched, or replaced by a copy of itself, is the same: *seen then follows it.
// Error: as for shard_open and shard_read, and a file that was replaced or changed.
int shard_reopen(const char *path, ShardIdentity *seen, Error *e);
bool shard_reread(int fd, const char *path, ShardIdentity *seen, int64_t first, int64_t count, uint16_t *ids,
                  Error *e);

// Looks through one run of tokens: refuses ids outside the vocabulary and lists the places of document
// tokens.
//   ids    (count) uint16  in, tokens [first, first + count) of the shard
//   starts (count) int32   out, positions in the shard, rising; owned by the caller; NULL: only counted
// Returns the number of document starts found, or -1 with an Error that names the first bad token.
int64_t shard_index(const uint16_t *ids, int64_t first, int64_t count, const ShardHeader *header,
                    const char *path, int32_t *starts, Error *e);

// ---- background reading -----------------------------------------------------------------------------------

// Called by the reading thread after each chunk, with the number of tokens indexed so far. Only tests use it:
// by blocking here they hold the index at a known place.
typedef void (*ShardChunkHook)(void *context, int64_t num_indexed);

// A shard that is being read by a thread of its own. The tokens in front of the last start are in memory and
// checked; whoever needs a document beyond them waits, so that an unfinished index is only slower and never
// gives another answer. The buffers are kept from one shard to the next: returning 200 MB to the system would
// stall the training thread.
typedef struct {
    pthread_mutex_t lock; // guards cancel, finished, failed, error and the starts
    pthread_cond_t progress;
    pthread_t thread;
    bool running;  // a thread exists that was not joined yet
    bool cancel;   // asks the thread to end
    bool finished; // the whole shard is indexed
    bool failed;   // `error` says why
    Error error;
    const char *path;   // owned by the caller of shard_reader_start
    ShardIdentity file; // what it must be
    int64_t chunk_tokens;
    ShardChunkHook hook;
    void *hook_context;
    uint16_t *tokens; // (token_capacity)
    int64_t token_capacity;
    int32_t *starts; // (start_capacity), the first num_starts are known
    int64_t start_capacity, num_starts;
} ShardReader;

typedef enum { DOCUMENT_FOUND, DOCUMENT_PAST_END, DOCUMENT_ERROR } DocumentResult;

void shard_reader_init(ShardReader *r);

// Begins to read `path`; ends and forgets what was being read.
//   path          owned by the caller, lives until the next start or free
//   file          its first look: a file that was replaced or changed since then is an error of the reading
//   chunk_tokens  tokens read and indexed at a time, above 0: the first documents are usable after the first
//                 chunk
// Error: no thread could be made. What is wrong with the file comes from shard_reader_document.
bool shard_reader_start(ShardReader *r, const char *path, const ShardIdentity *file, int64_t chunk_tokens,
                        ShardChunkHook hook, void *hook_context, Error *e);

// Span [*start, *end) of document `d` (0 based) in r->tokens; the last one ends with the shard. The caller
// holds r->lock; it is released while the thread has not come that far. A shard without any document start is
// a DOCUMENT_ERROR.
DocumentResult shard_reader_document(ShardReader *r, int64_t d, int64_t *start, int64_t *end, Error *e);

bool shard_reader_finished(ShardReader *r); // takes the lock
void shard_reader_stop(ShardReader *r);     // ends the thread, keeps the buffers
void shard_reader_free(ShardReader *r);     // ends the thread, frees the buffers
