#include "llmc/base/command.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

// 0 when it could not be started. Its input is empty, its errors are nobody's business.
static pid_t start(char *const argv[], int out)
{
    pid_t pid = 0;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    if (posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ))
        pid = 0;
    posix_spawn_file_actions_destroy(&actions);
    return pid;
}

// All that comes from fd until its end or the time `end`; owned by the caller.
static char *read_until(int fd, double end, bool *late)
{
    char block[4096], *text = xcalloc(1, 1);
    size_t bytes = 0;
    for (;;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        double left = end - seconds_now();
        *late = left <= 0;
        if (*late)
            return text;
        if (poll(&p, 1, (int)(1e3 * left) + 1) <= 0)
            continue;
        ssize_t n = read(fd, block, sizeof block);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return text;
        text = xrealloc(text, bytes + (size_t)n + 1, 1);
        for (ssize_t i = 0; i < n; i++)
            text[bytes++] = block[i];
        text[bytes] = 0;
    }
}

// The exit status, -1 for a signal; late: it is killed at `end`.
static int wait_until(pid_t pid, double end, bool *late)
{
    int status = 0;
    struct timespec tick = {.tv_nsec = 5000000};
    pid_t ended;
    while ((ended = *late ? 0 : waitpid(pid, &status, WNOHANG)) == 0 && !*late) {
        nanosleep(&tick, NULL);
        *late = seconds_now() > end;
    }
    if (*late) {
        kill(pid, SIGKILL);
        nanosleep(&tick, NULL);
        waitpid(pid, NULL, WNOHANG);
        return -1;
    }
    if (ended < 0)
        return 0; // whoever started us ignores the ends of children: what it printed counts
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

char *command_output(char *const argv[], double seconds, bool *late)
{
    int out[2];
    double end = seconds_now() + seconds;
    *late = false;
    if (pipe2(out, O_CLOEXEC))
        return NULL;
    pid_t pid = start(argv, out[1]);
    close(out[1]);
    char *text = pid ? read_until(out[0], end, late) : NULL;
    close(out[0]);
    if (pid && wait_until(pid, end, late) == 0 && *text)
        return text;
    free(text);
    return NULL;
}
