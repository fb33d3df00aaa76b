#include "llmc/io/append_file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void give_up(AppendFile *f)
{
    note("cannot write %s: %s; the run goes on without it", f->path, strerror(errno));
    if (f->fd < 0)
        return;
    if (ftruncate(f->fd, f->good) != 0 && errno != EINVAL) // a pipe or a device has no end
        note("%s ends in the middle of a record", f->path);
    close(f->fd);
    f->fd = -1;
}

void append_file_create(AppendFile *f, char *path)
{
    f->path = path;
    f->good = 0;
    f->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (f->fd < 0)
        give_up(f);
}

// Behind the last newline of the first `size` bytes; below 0, with errno, when they cannot be read.
static off_t end_of_lines(int fd, off_t size)
{
    char block[4096];
    while (size > 0) {
        off_t from = size > (off_t)sizeof block ? size - (off_t)sizeof block : 0;
        ssize_t n = pread(fd, block, (size_t)(size - from), from);
        if (n < 0)
            return n;
        const char *newline = memrchr(block, '\n', (size_t)n);
        if (newline)
            return from + (newline - block) + 1;
        size = from;
    }
    return 0;
}

bool append_file_continue(AppendFile *f, char *path, bool keep, Error *e)
{
    struct stat info;
    bool cut = keep && stat(path, &info) == 0 && S_ISREG(info.st_mode);
    f->path = path;
    f->good = 0;
    f->fd =
        open(path, (cut ? O_RDWR : O_WRONLY) | O_CREAT | (keep ? 0 : O_TRUNC) | O_APPEND | O_CLOEXEC, 0666);
    bool good = f->fd >= 0;
    if (good && cut) {
        f->good = end_of_lines(f->fd, info.st_size);
        good = f->good >= 0 && ftruncate(f->fd, f->good) == 0;
    }
    return good || error_set(e, "%s cannot be written: %s", path, strerror(errno));
}

void append_file_write(AppendFile *f, const void *bytes, size_t count)
{
    const char *p = bytes;
    for (size_t done = 0; f->fd >= 0 && done < count;) {
        ssize_t n = write(f->fd, p + done, count - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            give_up(f);
        else
            done += (size_t)n;
    }
    f->good += (off_t)count;
}

void append_file_close(AppendFile *f)
{
    if (f->fd >= 0)
        close(f->fd);
    free(f->path);
}
