#include "llmc/base/temporary.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

char *temporary_path(const char *path) { return format_string("%s.tmp.%ld", path, (long)getpid()); }

// The process of a temporary file, whose name is cut to NAME; -1: it is no temporary file.
static pid_t cut_process(char *name)
{
    char *end = strrchr(name, '.'), *digits = end ? end + 1 : name;
    if (!end || !*digits || digits[strspn(digits, "0123456789")])
        return -1;
    long pid = strtol(digits, NULL, 10);
    size_t length = (size_t)(end - name), tmp = strlen(".tmp");
    if (pid <= 0 || pid > INT_MAX || length <= tmp || strncmp(end - tmp, ".tmp", tmp) != 0)
        return -1;
    name[length - tmp] = 0;
    return (pid_t)pid;
}

void temporary_remove_stale(const char *folder, bool (*ours)(const void *context, const char *name),
                            const void *context)
{
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char *name = xstrdup(entry->d_name);
        pid_t pid = cut_process(name);
        bool dead = pid > 0 && (pid == getpid() || (kill(pid, 0) != 0 && errno == ESRCH));
        if (dead && ours(context, name))
            unlinkat(dirfd(dir), entry->d_name, 0);
        free(name);
    }
    if (dir)
        closedir(dir);
}
