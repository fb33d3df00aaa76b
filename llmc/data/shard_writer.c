#include "llmc/data/shard_writer.h"
#include "llmc/base/temporary.h"
#include "llmc/data/shard.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "shards are little-endian and are written as they lie in memory");

static bool write_failed(const ShardWriter *w, Error *e)
{
    return error_set(e, "cannot write %s: %s%s", w->path, strerror(errno),
                     errno == ENOSPC ? "; free some space or choose another --out" : "");
}

static bool write_header(ShardWriter *w, Error *e)
{
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC, SHARD_VERSION, (int32_t)w->tokens};
    if (w->vocab_size != SHARD_GPT2_VOCAB || w->document != SHARD_GPT2_DOCUMENT) {
        header[3] = w->vocab_size;
        header[4] = w->document + 1;
    }
    if (fseek(w->file, 0, SEEK_SET) || fwrite(header, sizeof header, 1, w->file) != 1)
        return write_failed(w, e);
    return true;
}

// FOLDER/.NAME.tmp.<pid>, owned by the caller. Patterns of shards do not match a name with a leading dot.
static char *temporary_of(const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char *hidden = format_string("%.*s.%s", (int)(name - path), path, name);
    char *temporary = temporary_path(hidden);
    free(hidden);
    return temporary;
}

bool shard_writer_open(ShardWriter *w, const char *path, int vocab_size, int document, Error *e)
{
    *w = (ShardWriter){.path = xstrdup(path), .vocab_size = vocab_size, .document = document};
    char *temporary = temporary_of(path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) {
        write_failed(w, e);
        free(temporary); // it is another's
        return false;
    }
    w->temporary = temporary;
    w->file = fdopen(fd, "wb");
    if (!w->file) {
        write_failed(w, e);
        close(fd);
        return false;
    }
    setvbuf(w->file, NULL, _IOFBF, 1 << 20);
    return write_header(w, e);
}

bool shard_writer_append(ShardWriter *w, const uint16_t *ids, size_t count, Error *e)
{
    if (w->tokens + (int64_t)count > INT32_MAX) {
        return error_set(e,
                         "%s would hold more than %d tokens, the most a shard header can say: choose smaller "
                         "--shard-tokens, or "
                         "split the document",
                         w->path, INT32_MAX);
    }
    if (fwrite(ids, sizeof *ids, count, w->file) != count)
        return write_failed(w, e);
    w->tokens += (int64_t)count;
    return true;
}

bool shard_writer_finish(ShardWriter *w, Error *e)
{
    if (fflush(w->file) || !write_header(w, e) || fflush(w->file) || fsync(fileno(w->file)))
        return write_failed(w, e);
    int failed = fclose(w->file);
    w->file = NULL;
    return failed ? write_failed(w, e) : true;
}

bool shard_writer_publish(ShardWriter *w, Error *e)
{
    if (rename(w->temporary, w->path))
        return error_set(e, "cannot rename %s to %s: %s", w->temporary, w->path, strerror(errno));
    free(w->temporary);
    w->temporary = NULL;
    return true;
}

void shard_writer_free(ShardWriter *w)
{
    if (w->file)
        fclose(w->file);
    if (w->temporary)
        unlink(w->temporary);
    free(w->temporary);
    free(w->path);
    *w = (ShardWriter){0};
}
