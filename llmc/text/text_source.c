#include "llmc/text/text_source.h"
#include "llmc/base/grow.h"
#include "llmc/data/shard.h"
#include "llmc/text/tokenizer.h"
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CHUNK = 1 << 20 };

// ---- which files ------------------------------------------------------------------------------------------

const char *text_file_name(const TextFile *file)
{
    return strcmp(file->path, "-") ? file->path : "standard input";
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return n >= m && !strcmp(s + n - m, end);
}

static void add_file(TextFileList *list, const char *path, TextFormat format, int64_t size)
{
    list->files = grow(list->files, &list->capacity, list->count + 1, sizeof *list->files);
    bool jsonl = format == FORMAT_JSONL ||
                 (format == FORMAT_BY_NAME && (ends_with(path, ".jsonl") || ends_with(path, ".ndjson")));
    list->files[list->count++] = (TextFile){xstrdup(path), jsonl, size};
}

static int by_bytes(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Names in a folder but those with a leading dot, sorted; malloc'd, each name too. NULL with a message on
// failure.
static char **folder_names(const char *folder, size_t *count, Error *e)
{
    DIR *d = opendir(folder);
    if (!d) {
        error_set(e, "cannot read the folder %s: %s", folder, strerror(errno));
        return NULL;
    }
    size_t capacity = 0;
    char **names = grow(NULL, &capacity, 1, sizeof *names);
    *count = 0;
    for (struct dirent *entry; (entry = readdir(d));) {
        if (entry->d_name[0] == '.')
            continue;
        names = grow(names, &capacity, *count + 1, sizeof *names);
        names[(*count)++] = xstrdup(entry->d_name);
    }
    closedir(d);
    qsort(names, *count, sizeof *names, by_bytes);
    return names;
}

// What a folder holds that is no input.
typedef struct {
    size_t count;
    char *first; // owned
} Skipped;

static void skip(Skipped *skipped, const char *path)
{
    if (!skipped->count++)
        skipped->first = xstrdup(path);
}

static bool add_folder(TextFileList *list, const char *folder, TextFormat format, Skipped *skipped, Error *e)
{
    size_t count;
    char **names = folder_names(folder, &count, e);
    if (!names)
        return false;
    bool good = true;
    for (size_t i = 0; i < count; i++) {
        char *path = format_string("%s%s%s", folder, ends_with(folder, "/") ? "" : "/", names[i]);
        struct stat link, s;
        bool there = good && !lstat(path, &link) && !stat(path, &s);
        if (there && S_ISDIR(link.st_mode))
            good = add_folder(list, path, format, skipped, e);
        else if (there && S_ISREG(s.st_mode))
            add_file(list, path, format, s.st_size);
        else if (good)
            skip(skipped, path);
        free(path);
        free(names[i]);
    }
    free(names);
    return good;
}

bool text_files_add(TextFileList *list, const char *path, TextFormat format, Error *e)
{
    struct stat s;
    size_t before = list->count;
    if (!strcmp(path, "-")) {
        add_file(list, path, format, -1);
        return true;
    }
    if (stat(path, &s))
        return error_set(e, "cannot read the input %s: %s", path, strerror(errno));
    if (S_ISREG(s.st_mode)) {
        add_file(list, path, format, s.st_size);
        return true;
    }
    if (!S_ISDIR(s.st_mode))
        return error_set(e, "the input %s is no regular file; pipe it in and give \"-\"", path);
    Skipped skipped = {0};
    bool good = add_folder(list, path, format, &skipped, e);
    if (good && skipped.count)
        note(
            "left out of the input folder %s, as links to folders or no regular files: %zu, the first is %s; "
            "give such a folder as an input of its own",
            path, skipped.count, skipped.first);
    free(skipped.first);
    if (!good)
        return false;
    return list->count > before ? true : error_set(e, "the input folder %s holds no files", path);
}

void text_files_free(TextFileList *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->files[i].path);
    free(list->files);
    *list = (TextFileList){0};
}

// ---- chunks -----------------------------------------------------------------------------------------------

struct TextReader {
    const TextFileList *list;
    size_t next_file; // the open file is the one before
    int fd;           // -1: none open
    int interrupt;    // -1: none
    bool file_begins, file_ends;
    int64_t line;
    char *kept; // bytes read beyond the last chunk's end
    size_t kept_len, kept_capacity;
};

TextReader *text_reader_create(const TextFileList *list, int interrupt)
{
    TextReader *r = xcalloc(1, sizeof *r);
    r->list = list;
    r->interrupt = interrupt;
    r->fd = -1;
    return r;
}

static void close_file(TextReader *r)
{
    if (r->fd > STDIN_FILENO)
        close(r->fd);
    r->fd = -1;
}

void text_reader_free(TextReader *r)
{
    if (!r)
        return;
    close_file(r);
    free(r->kept);
    free(r);
}

static bool open_next(TextReader *r, Error *e)
{
    const TextFile *file = &r->list->files[r->next_file++];
    int64_t bytes;
    r->fd = strcmp(file->path, "-") ? open_regular("the input", file->path, &bytes, e) : STDIN_FILENO;
    r->file_begins = true;
    r->file_ends = false;
    r->line = 1;
    return r->fd >= 0;
}

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Where the bytes [from, len) allow the chunk to end: after that many bytes; 0 when nowhere.
static size_t chunk_end(const TextChunk *c, size_t from)
{
    if (c->file->jsonl) {
        const char *newline = memrchr(c->bytes + from, '\n', c->len - from);
        return newline ? (size_t)(newline - c->bytes) + 1 : 0;
    }
    for (size_t i = c->len; i-- > from + 2;) {
        if (c->bytes[i - 1] == ' ' && is_letter(c->bytes[i]) && is_letter(c->bytes[i - 2]))
            return i - 1;
    }
    return 0;
}

// Fills in the documents that the chunk holds as a whole. Returns the end of the last.
static size_t find_pieces(const TextReader *r, TextChunk *c)
{
    size_t at = 0;
    TextPiece piece;
    c->piece_count = 0;
    while (text_split_next(&r->list->split, c->bytes + at, c->len - at, r->file_ends, &piece)) {
        c->pieces = grow(c->pieces, &c->piece_capacity, c->piece_count + 1, sizeof *c->pieces);
        c->pieces[c->piece_count++] = (TextPiece){at + piece.begin, at + piece.end, at + piece.next};
        at += piece.next;
    }
    return at;
}

// Waits for bytes of the open file. False with a message: what came is the interruption.
static bool wait_for_bytes(const TextReader *r, Error *e)
{
    struct pollfd ready[] = {{.fd = r->fd, .events = POLLIN}, {.fd = r->interrupt, .events = POLLIN}};
    while (poll(ready, 2, -1) < 0 && errno == EINTR) {
    }
    return ready[1].revents == 0 || error_set(e, "interrupted");
}

// One read(2); sets file_ends at the end of the file.
static bool read_more(TextReader *r, TextChunk *c, Error *e)
{
    if (c->len > TOKENIZER_MAX_TEXT - CHUNK) {
        return error_set(e, "%s: %d MB without %s; is it text?", text_file_name(c->file),
                         TOKENIZER_MAX_TEXT >> 20,
                         c->file->jsonl ? "a line end"
                         : c->split     ? "a blank line"
                                        : "a space between two letters");
    }
    if (!wait_for_bytes(r, e))
        return false;
    c->bytes = grow(c->bytes, &c->capacity, c->len + CHUNK, 1);
    ssize_t got = read(r->fd, c->bytes + c->len, CHUNK);
    if (got < 0)
        return error_set(e, "cannot read the input %s: %s", text_file_name(c->file), strerror(errno));
    c->len += (size_t)got;
    r->file_ends = got == 0;
    return true;
}

// The first bytes of a file must not be those of a compressed one, or of a shard: an input folder may be the
// output folder of an earlier call.
static bool check_is_text(const TextChunk *c, Error *e)
{
    int32_t magic;
    static const struct {
        size_t at; // bzip2: behind "BZh" and a digit
        const char *bytes, *name, *unpack;
    } formats[] = {
        {0, "\x1f\x8b\x08", "gzip", "gzip -dc"},     {0, "\xfd\x37zXZ", "xz", "xz -dc"},
        {0, "\x28\xb5\x2f\xfd", "zstd", "zstd -dc"}, {4, "1AY&SY", "bzip2", "bzip2 -dc"},
        {0, "PK\x03\x04", "zip", "unzip -p"},
    };
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        size_t at = formats[i].at, n = strlen(formats[i].bytes);
        bool text = c->len < at + n || memcmp(c->bytes + at, formats[i].bytes, n) != 0;
        if (!text)
            return error_set(e, "%s is compressed (%s), not text; unpack it, or pipe in what %s writes of it",
                             text_file_name(c->file), formats[i].name, formats[i].unpack);
    }
    if (c->len < sizeof magic)
        return true;
    memcpy(&magic, c->bytes, sizeof magic);
    if (magic == SHARD_MAGIC)
        return error_set(e, "%s is a shard of tokens, not text; keep --out outside of the input folders",
                         text_file_name(c->file));
    return true;
}

static void keep_rest(TextReader *r, TextChunk *c, size_t end)
{
    r->kept_len = c->len - end;
    r->kept = grow(r->kept, &r->kept_capacity, r->kept_len, 1);
    if (r->kept_len)
        memcpy(r->kept, c->bytes + end, r->kept_len);
    c->len = end;
}

void text_chunk_free(TextChunk *c)
{
    free(c->bytes);
    free(c->pieces);
    *c = (TextChunk){0};
}

ChunkStatus text_reader_next(TextReader *r, TextChunk *c, Error *e)
{
    if (r->fd < 0) {
        if (r->next_file == r->list->count)
            return CHUNK_NONE;
        if (!open_next(r, e))
            return CHUNK_ERROR;
    }
    c->file = &r->list->files[r->next_file - 1];
    c->split = !c->file->jsonl && !text_split_none(&r->list->split);
    c->first_line = r->line;
    c->begins_document = r->file_begins;
    c->len = c->piece_count = 0;
    c->bytes = grow(c->bytes, &c->capacity, r->kept_len, 1);
    if (r->kept_len)
        memcpy(c->bytes, r->kept, r->kept_len);
    c->len = r->kept_len;
    r->kept_len = 0;
    size_t end = 0, searched = 0;
    while (!r->file_ends && !end) {
        size_t had = c->len;
        // A pipe gives little at a time. Twice as much each time, because pieces are looked for from the
        // start.
        while (!r->file_ends && c->len - had < (size_t)max_i64(CHUNK, (int64_t)had)) {
            if (!read_more(r, c, e))
                return CHUNK_ERROR;
        }
        if (r->file_begins && !check_is_text(c, e))
            return CHUNK_ERROR;
        if (c->split) {
            end = find_pieces(r, c);
        } else if (!r->file_ends) {
            end = chunk_end(c, searched);
        }
        searched = c->len > 2 ? c->len - 2 : 0; // a boundary takes three bytes
    }
    if (r->file_ends) {
        close_file(r);
        end = c->len;
    }
    keep_rest(r, c, end);
    if (c->file->jsonl) {
        for (const char *p = c->bytes, *stop = p + c->len;
             p < stop && (p = memchr(p, '\n', (size_t)(stop - p))); p++)
            r->line++;
    }
    r->file_begins = false;
    return CHUNK_READ;
}

// ---- JSONL records ----------------------------------------------------------------------------------------

void jsonl_begin(JsonlReader *r, const TextChunk *chunk)
{
    *r = (JsonlReader){.chunk = chunk, .line = chunk->first_line - 1};
}

void jsonl_end(JsonlReader *r) { jsonl_record_free(&r->record); }

bool jsonl_line(JsonlReader *r, const char **line, size_t *len)
{
    const TextChunk *chunk = r->chunk;
    while (r->at < chunk->len) {
        *line = chunk->bytes + r->at;
        const char *newline = memchr(*line, '\n', chunk->len - r->at);
        *len = newline ? (size_t)(newline - *line) : chunk->len - r->at;
        r->at += *len + (newline != NULL);
        r->line++;
        if (r->line == 1 && *len >= 3 && !memcmp(*line, "\xEF\xBB\xBF", 3)) {
            *line += 3;
            *len -= 3; // byte order mark
        }
        for (size_t i = 0; i < *len; i++) {
            char c = (*line)[i];
            if (c != ' ' && c != '\t' && c != '\r')
                return true;
        }
    }
    return false;
}

ChunkStatus jsonl_next(JsonlReader *r, const char **text, size_t *len, Error *e)
{
    const char *line;
    size_t n;
    Error problem;
    if (!jsonl_line(r, &line, &n))
        return CHUNK_NONE;
    if (jsonl_text(&r->record, line, n, text, len, &problem))
        return CHUNK_READ;
    error_set(e, "%s:%lld: %s", text_file_name(r->chunk->file), (long long)r->line, problem.text);
    return CHUNK_ERROR;
}
