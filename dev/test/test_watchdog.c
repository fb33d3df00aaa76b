// The watchdog of one GPU, without a GPU: a wait that does not end ends the program, waits that end do not.
#include "dev/test/tap.h"
#include "llmc/cuda/device/watchdog.c"
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIMIT_MS = 300, STEP_MS = 50, STEPS = 10, MARGIN_S = 20 };

static void sleep_ms(int ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL); }

static void hangs(void)
{
    watchdog_wait_begin();
    sleep_ms(1000 * MARGIN_S);
}

// Longer than the limit in all, no wait of them.
static void proceeds(void)
{
    for (int i = 0; i < STEPS; i++) {
        watchdog_wait_begin();
        sleep_ms(STEP_MS);
        watchdog_wait_end();
    }
}

static void idles(void) { sleep_ms(3 * LIMIT_MS); }

static void *wait_long(void *unused)
{
    (void)unused;
    watchdog_wait_begin();
    sleep_ms(STEPS * STEP_MS);
    watchdog_wait_end();
    return NULL;
}

// One thread waits longer than the limit while waits of another one end.
static void overlaps(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, wait_long, NULL);
    proceeds();
    pthread_join(thread, NULL);
}

static void hangs_behind_others(void)
{
    proceeds();
    hangs();
}

// Exit status of a process that does this under the watchdog; text: what it wrote to stderr.
static int status_of(void (*run)(void), char *text, size_t size)
{
    int pipes[2], status;
    if (pipe(pipes))
        exit(1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDERR_FILENO);
        close(pipes[0]);
        watchdog_start(1e-3 * LIMIT_MS);
        run();
        watchdog_stop();
        _exit(0);
    }
    close(pipes[1]);
    size_t length = 0;
    for (ssize_t n; (n = read(pipes[0], text + length, size - 1 - length)) > 0;)
        length += (size_t)n;
    text[length] = 0;
    close(pipes[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void)
{
    char text[1024];
    ok(status_of(hangs, text, sizeof text) == EXIT_DEVICE,
       "a wait that does not end ends the program, as a failure of the device");
    ok(strstr(text, "the GPU has not finished its work within 0 s") &&
           strchr(text, '\n') == text + strlen(text) - 1,
       "in one line that says so: %s", *text ? "yes" : "nothing");
    ok(status_of(hangs_behind_others, text, sizeof text) == EXIT_DEVICE,
       "so does one behind waits that ended");
    ok(status_of(proceeds, text, sizeof text) == 0 && !*text, "waits that end do not, however many");
    ok(status_of(overlaps, text, sizeof text) == 0 && !*text, "nor does a long one beside them");
    ok(status_of(idles, text, sizeof text) == 0 && !*text, "nor a host that does not wait");
    watchdog_wait_begin();
    watchdog_wait_end();
    ok(true, "without a watchdog the calls do nothing");
    return tap_done();
}
