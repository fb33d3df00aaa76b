#include "llmc/data/shard_writer.h"
#include "llmc/data/shard.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
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
    return format_string("%.*s.%s.tmp.%ld", (int)(name - path), path, name, (long)getpid());
}

// The process of a temporary file, whose name is cut to that of its shard; -1: it is no temporary file.
static pid_t cut_temporary(char *name)
{
    char *end = strrchr(name, '.'), *digits = end ? end + 1 : name, *rest;
    errno = 0;
    long pid = strtol(digits, &rest, 10);
    if (name[0] != '.' || end == name || *digits < '1' || *digits > '9' || *rest || errno ||
        pid != (pid_t)pid)
        return -1;
    *end = 0;
    size_t length = (size_t)(end - name), tmp = strlen(".tmp");
    if (length <= 1 + tmp || strcmp(end - tmp, ".tmp") != 0)
        return -1;
    memmove(name, name + 1, length - tmp - 1);
    name[length - tmp - 1] = 0;
    return (pid_t)pid;
}

void shard_writer_remove_stale(const char *folder, bool (*ours)(const void *context, const char *name),
                               const void *context)
{
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char *name = xstrdup(entry->d_name);
        pid_t pid = cut_temporary(name);
        bool dead = pid > 0 && (pid == getpid() || (kill(pid, 0) != 0 && errno == ESRCH));
        if (dead && ours(context, name))
            unlinkat(dirfd(dir), entry->d_name, 0);
        free(name);
    }
    if (dir)
        closedir(dir);
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
