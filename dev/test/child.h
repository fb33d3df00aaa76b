// Functions run as programs of their own: a process group each, stderr in a file, a limit in time.
#pragma once
#include "llmc/base/common.h"
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TOO_LATE = 124 };

static void wait_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

typedef struct {
    pid_t pid;
    char path[64]; // its stderr
    double began;
} Run;

typedef struct {
    int status; // exit status; TOO_LATE; 128 + signal
    int lines;
    char text[4096]; // stderr
    double seconds;
} Result;

// The first of 40 ports: those of processes that run at the same time differ. Below 32768 no port is one that
// the system gives to a connection: one that lives, or has just ended, refuses it to a listener.
static inline int first_port(void) { return 20000 + getpid() % 300 * 40; }

static int runs;

static Run start(void (*program)(void *), void *argument)
{
    Run r = {.began = seconds_now()};
    snprintf(r.path, sizeof r.path, "/tmp/train_gpt_test.%d.%d", getpid(), runs++);
    fflush(stdout);
    r.pid = fork();
    if (r.pid)
        return r;
    setpgid(0, 0);
    int fd = open(r.path, O_CREAT | O_WRONLY | O_APPEND, 0600);
    dup2(fd, 2);
    program(argument);
    _exit(0);
}

static Result finish(const Run *r, double limit)
{
    Result x = {.status = TOO_LATE};
    int status = 0;
    while (waitpid(r->pid, &status, WNOHANG) == 0) {
        if (seconds_now() - r->began > limit) {
            kill(-r->pid, SIGKILL);
            waitpid(r->pid, &status, 0);
            status = TOO_LATE << 8;
        }
        wait_ms(5);
    }
    x.seconds = seconds_now() - r->began;
    x.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    FILE *f = fopen(r->path, "r");
    size_t n = f ? fread(x.text, 1, sizeof x.text - 1, f) : 0;
    if (f)
        fclose(f);
    unlink(r->path);
    for (size_t i = 0; i < n; i++)
        x.lines += x.text[i] == '\n';
    return x;
}

// For a message: cuts the text after its first line.
static const char *first_line(Result *x) __attribute__((unused));
static const char *first_line(Result *x)
{
    x->text[strcspn(x->text, "\n")] = 0;
    return x->text;
}
