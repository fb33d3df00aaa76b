#include "llmc/data/shard.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Token ids go from the file to memory as they are; a big-endian machine would need to swap them.
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token shards are little-endian");

#define MAKE_AGAIN "fetch or tokenize it again"

// ---- format -----------------------------------------------------------------------------------------------

static int32_t header_word(const uint8_t *bytes, int i)
{
    const uint8_t *b = bytes + 4 * i;
    return (int32_t)((uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
}

static bool decode_vocabulary(const uint8_t *bytes, const char *path, ShardHeader *header, Error *e)
{
    int32_t vocab = header_word(bytes, 3), begin = header_word(bytes, 4);
    if (vocab < 0 || vocab > SHARD_MAX_VOCAB)
        return error_set(e, "%s: impossible vocabulary size %d in the header; " MAKE_AGAIN, path, vocab);
    header->vocab_size = vocab ? vocab : SHARD_GPT2_VOCAB;
    if (begin < 0)
        return error_set(e, "%s: impossible document token in the header (word 4 is %d); " MAKE_AGAIN, path,
                         begin);
    header->document_token = begin ? begin - 1 : SHARD_GPT2_DOCUMENT;
    if (header->document_token >= header->vocab_size)
        return error_set(e, "%s: its document token %d is outside its vocabulary of %d ids; " MAKE_AGAIN,
                         path, header->document_token, header->vocab_size);
    return true;
}

bool shard_decode_header(const uint8_t *bytes, int64_t file_bytes, const char *path, ShardHeader *header,
                         Error *e)
{
    if (file_bytes == 0)
        return error_set(e, "%s: the file is empty; " MAKE_AGAIN, path);
    if (file_bytes < SHARD_HEADER_BYTES)
        return error_set(e, "%s: truncated: %lld bytes, but a token shard's header alone has %d; " MAKE_AGAIN,
                         path, (long long)file_bytes, SHARD_HEADER_BYTES);
    if (header_word(bytes, 0) != SHARD_MAGIC)
        return error_set(e,
                         "%s: not a token shard (it begins with %d instead of %d); make one with ./tokenize",
                         path, header_word(bytes, 0), SHARD_MAGIC);
    if (header_word(bytes, 1) != SHARD_VERSION)
        return error_set(
            e, "%s: token shard of version %d, only version %d can be read; make it again with ./tokenize",
            path, header_word(bytes, 1), SHARD_VERSION);
    header->num_tokens = header_word(bytes, 2);
    if (header->num_tokens <= 0)
        return error_set(e, "%s: its header promises %lld tokens; " MAKE_AGAIN, path,
                         (long long)header->num_tokens);
    int64_t expected = SHARD_HEADER_BYTES + 2 * header->num_tokens;
    if (file_bytes != expected)
        return error_set(
            e, "%s: %s: %lld bytes, but its header promises %lld tokens, which take %lld bytes; " MAKE_AGAIN,
            path, file_bytes < expected ? "truncated" : "longer than its header says", (long long)file_bytes,
            (long long)header->num_tokens, (long long)expected);
    return decode_vocabulary(bytes, path, header, e);
}

// All of `count` bytes at `offset`, or false: with errno set, or 0 when the file ended.
static bool read_fully(int fd, void *to, int64_t count, int64_t offset)
{
    while (count > 0) {
        ssize_t n = pread(fd, to, (size_t)count, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            errno = 0;
        if (n <= 0)
            return false;
        to = (char *)to + n;
        offset += n;
        count -= n;
    }
    return true;
}

static bool read_failed(const char *path, Error *e)
{
    if (errno)
        return error_set(e, "%s: cannot be read: %s", path, strerror(errno));
    return error_set(e, "%s: became shorter while it was read; " MAKE_AGAIN, path);
}

static bool check_opened(int fd, const char *path, ShardHeader *header, Error *e)
{
    struct stat st;
    uint8_t bytes[SHARD_HEADER_BYTES] = {0};
    if (fstat(fd, &st) != 0)
        return read_failed(path, e);
    if (S_ISDIR(st.st_mode))
        return error_set(e, "%s: is a directory; name the token shards in it, for instance with '%s/*.bin'",
                         path, path);
    if (!S_ISREG(st.st_mode))
        return error_set(e, "%s: is not a regular file; name a token shard", path);
    if (st.st_size >= SHARD_HEADER_BYTES && !read_fully(fd, bytes, SHARD_HEADER_BYTES, 0))
        return read_failed(path, e);
    return shard_decode_header(bytes, st.st_size, path, header, e);
}

int shard_open(const char *path, ShardHeader *header, Error *e)
{
    // Without O_NONBLOCK, opening a FIFO that nobody writes to would hang.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        error_set(e, "%s: cannot be opened: %s; check the name and the permissions", path, strerror(errno));
        return -1;
    }
    if (!check_opened(fd, path, header, e)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool shard_read(int fd, const char *path, int64_t first, int64_t count, uint16_t *ids, Error *e)
{
    return read_fully(fd, ids, 2 * count, SHARD_HEADER_BYTES + 2 * first) || read_failed(path, e);
}

// ---- identity ---------------------------------------------------------------------------------------------

// Three pieces of 8 KB: whole shards would take seconds. Shards that differ elsewhere alone are not told
// apart.
static bool hash_contents(int fd, const char *path, const ShardHeader *h, uint64_t *contents, Error *e)
{
    enum { PIECES = 3, PIECE_TOKENS = 4096 };
    uint16_t ids[PIECE_TOKENS];
    int64_t sizes[] = {h->num_tokens, h->vocab_size, h->document_token};
    int64_t count = min_i64(PIECE_TOKENS, h->num_tokens);
    uint64_t hash = fingerprint_bytes(0, sizes, sizeof sizes);
    for (int piece = 0; piece < PIECES; piece++) {
        if (!shard_read(fd, path, (h->num_tokens - count) / (PIECES - 1) * piece, count, ids, e))
            return false;
        hash = fingerprint_bytes(hash, ids, (size_t)count * sizeof *ids);
    }
    *contents = hash;
    return true;
}

static bool look_at_file(int fd, const char *path, ShardIdentity *id, Error *e) // all but header and contents
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return read_failed(path, e);
    id->inode = (uint64_t)st.st_ino;
    id->modified = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    id->bytes = (int64_t)st.st_size;
    return true;
}

bool shard_identify(int fd, const char *path, ShardIdentity *id, Error *e)
{
    return look_at_file(fd, path, id, e) && hash_contents(fd, path, &id->header, &id->contents, e);
}

static bool error_replaced(const char *path, Error *e)
{
    return error_set(
        e, "%s: was replaced or changed since the run began; put back the shard that it was, then --resume",
        path);
}

static bool same_as_seen(int fd, const char *path, ShardIdentity *seen, Error *e)
{
    ShardIdentity now = {.header = seen->header};
    if (!look_at_file(fd, path, &now, e))
        return false;
    if (now.inode == seen->inode && now.modified == seen->modified && now.bytes == seen->bytes)
        return true;
    bool same_size = now.bytes == seen->bytes;
    if (same_size && !hash_contents(fd, path, &now.header, &now.contents, e))
        return false;
    if (!same_size || now.contents != seen->contents)
        return error_replaced(path, e);
    *seen = now;
    return true;
}

int shard_reopen(const char *path, ShardIdentity *seen, Error *e)
{
    ShardHeader now;
    const ShardHeader *then = &seen->header;
    int fd = shard_open(path, &now, e);
    if (fd < 0)
        return -1;
    bool same = now.num_tokens == then->num_tokens && now.vocab_size == then->vocab_size &&
                now.document_token == then->document_token;
    if (same ? same_as_seen(fd, path, seen, e) : error_replaced(path, e))
        return fd;
    close(fd);
    return -1;
}

bool shard_reread(int fd, const char *path, ShardIdentity *seen, int64_t first, int64_t count, uint16_t *ids,
                  Error *e)
{
    return shard_read(fd, path, first, count, ids, e) && same_as_seen(fd, path, seen, e);
}

int64_t shard_index(const uint16_t *ids, int64_t first, int64_t count, const ShardHeader *header,
                    const char *path, int32_t *starts, Error *e)
{
    int largest = 0; // a plain maximum, because the compiler makes SIMD of it; the culprit is looked for only
                     // if there is one
    for (int64_t i = 0; i < count; i++)
        largest = ids[i] > largest ? ids[i] : largest;
    if (largest >= header->vocab_size) {
        int64_t i = 0;
        while (ids[i] < header->vocab_size)
            i++;
        error_set(e, "%s: token %lld has id %d, outside the vocabulary of %d ids; " MAKE_AGAIN, path,
                  (long long)(first + i), ids[i], header->vocab_size);
        return -1;
    }
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] != header->document_token)
            continue;
        if (starts)
            starts[found] = (int32_t)(first + i);
        found++;
    }
    return found;
}

// ---- background reading -----------------------------------------------------------------------------------

void shard_reader_init(ShardReader *r)
{
    memset(r, 0, sizeof *r);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->progress, NULL);
}

static void append_starts(ShardReader *r, const int32_t *starts, int64_t count)
{
    if (r->num_starts + count > r->start_capacity) {
        r->start_capacity = max_i64(2 * r->start_capacity, r->num_starts + count);
        r->starts = xrealloc(r->starts, (size_t)r->start_capacity, sizeof *r->starts);
    }
    if (count)
        memcpy(r->starts + r->num_starts, starts, (size_t)count * sizeof *starts);
    r->num_starts += count;
}

// Reads and indexes the shard chunk by chunk. False with *e on a fault of the file; true also when it was
// asked to end.
static bool read_chunks(ShardReader *r, int fd, ShardIdentity *seen, int32_t *chunk_starts, Error *e)
{
    const ShardHeader *h = &r->file.header;
    for (int64_t first = 0; first < h->num_tokens;) {
        int64_t count = min_i64(r->chunk_tokens, h->num_tokens - first);
        if (!shard_reread(fd, r->path, seen, first, count, r->tokens + first, e))
            return false;
        int64_t found = shard_index(r->tokens + first, first, count, h, r->path, chunk_starts, e);
        if (found < 0)
            return false;
        first += count;
        pthread_mutex_lock(&r->lock);
        append_starts(r, chunk_starts, found);
        r->finished = first == h->num_tokens && r->num_starts > 0;
        bool cancel = r->cancel;
        pthread_cond_broadcast(&r->progress);
        pthread_mutex_unlock(&r->lock);
        if (r->hook)
            r->hook(r->hook_context, first);
        if (cancel)
            return true;
    }
    if (r->num_starts > 0)
        return true; // only this thread changes it
    return error_set(
        e, "%s: holds no document start (token %d); it was made for another vocabulary; " MAKE_AGAIN, r->path,
        h->document_token);
}

static bool read_shard(ShardReader *r, Error *e)
{
    ShardIdentity seen = r->file;
    int fd = shard_reopen(r->path, &seen, e);
    if (fd < 0)
        return false;
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    int64_t most = min_i64(r->chunk_tokens, r->file.header.num_tokens);
    int32_t *chunk_starts = xcalloc((size_t)most, sizeof *chunk_starts);
    bool good = read_chunks(r, fd, &seen, chunk_starts, e);
    free(chunk_starts);
    close(fd);
    return good;
}

static void *reader_thread(void *argument)
{
    ShardReader *r = argument;
    Error e;
    if (!read_shard(r, &e)) {
        pthread_mutex_lock(&r->lock);
        r->failed = true;
        r->error = e;
        pthread_cond_broadcast(&r->progress);
        pthread_mutex_unlock(&r->lock);
    }
    return NULL;
}

bool shard_reader_start(ShardReader *r, const char *path, const ShardIdentity *file, int64_t chunk_tokens,
                        ShardChunkHook hook, void *hook_context, Error *e)
{
    assert(chunk_tokens > 0);
    shard_reader_stop(r);
    int64_t num_tokens = file->header.num_tokens;
    if (r->token_capacity < num_tokens) {
        free(r->tokens);
        r->tokens = xcalloc((size_t)num_tokens, sizeof *r->tokens);
        r->token_capacity = num_tokens;
    }
    r->path = path;
    r->file = *file;
    r->chunk_tokens = chunk_tokens;
    r->hook = hook;
    r->hook_context = hook_context;
    r->cancel = r->finished = r->failed = false;
    r->num_starts = 0;
    sigset_t all, before; // Ctrl-C belongs to the thread that trains
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&r->thread, NULL, reader_thread, r);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    r->running = status == 0;
    return r->running ||
           error_set(e, "%s: no thread to read it in the background: %s", path, strerror(status));
}

DocumentResult shard_reader_document(ShardReader *r, int64_t d, int64_t *start, int64_t *end, Error *e)
{
    // A document's end is where the next one starts, hence d + 1.
    while (!r->failed && !r->finished && r->num_starts <= d + 1)
        pthread_cond_wait(&r->progress, &r->lock);
    if (r->failed) {
        *e = r->error;
        return DOCUMENT_ERROR;
    }
    if (d >= r->num_starts)
        return DOCUMENT_PAST_END;
    *start = r->starts[d];
    *end = d + 1 < r->num_starts ? r->starts[d + 1] : r->file.header.num_tokens;
    return DOCUMENT_FOUND;
}

bool shard_reader_finished(ShardReader *r)
{
    pthread_mutex_lock(&r->lock);
    bool finished = r->finished;
    pthread_mutex_unlock(&r->lock);
    return finished;
}

void shard_reader_stop(ShardReader *r)
{
    if (!r->running)
        return;
    pthread_mutex_lock(&r->lock);
    r->cancel = true;
    pthread_mutex_unlock(&r->lock);
    pthread_join(r->thread, NULL);
    r->running = false;
}

void shard_reader_free(ShardReader *r)
{
    shard_reader_stop(r);
    free(r->tokens);
    free(r->starts);
    pthread_cond_destroy(&r->progress);
    pthread_mutex_destroy(&r->lock);
}
