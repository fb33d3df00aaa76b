#include "llmc/io/append_file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void give_up(AppendFile *f)
{
    note("cannot write %s: %s; the run goes on without it", f->path, strerror(errno));
    if (f->fd < 0)
        return;
    if (ftruncate(f->fd, f->good) != 0)
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
