// A GPU that fails, or does not finish, ends the program with EXIT_DEVICE and one line. Each case has a
// process of its own, because the context is lost.
#include "dev/test/tap.h"
#include "llmc/cuda/device/watchdog.h"
#include "llmc/ops/ops.h"
#include "llmc/base/common.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void CUDART_CB sleep_long(void *unused)
{
    (void)unused;
    sleep(30);
}

// Work that does not end, as the host sees it.
static void hangs(Stream s)
{
    watchdog_start(0.5);
    if (cudaLaunchHostFunc(s, sleep_long, NULL) != cudaSuccess)
        _exit(100);
    stream_synchronize(s);
}

static void reads_nowhere(Stream s)
{
    cast_weights(s, (floatX *)4096, (const float *)8192, 1024, false);
    stream_synchronize(s);
}

static void works(Stream s)
{
    watchdog_start(60);
    floatX *x = device_alloc(1024 * sizeof *x, "test");
    float *w = device_alloc(1024 * sizeof *w, "test");
    cast_weights(s, x, w, 1024, false);
    stream_synchronize(s);
    device_free(x);
    device_free(w);
    watchdog_stop();
}

// Exit status of a process that does this on the GPU; text: what it wrote to stderr.
static int status_of(void (*run)(Stream), char *text, size_t size)
{
    int pipes[2], status;
    if (pipe(pipes))
        exit(1);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], STDERR_FILENO);
        close(pipes[0]);
        backend_open(0);
        run(stream_create());
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

static bool one_line(const char *text, const char *part)
{
    const char *end = strchr(text, '\n');
    return strstr(text, part) && end && !end[1];
}

int main(void)
{
    char text[4096];
    ok(status_of(works, text, sizeof text) == 0 && !*text, "work that ends is let alone");
    ok(status_of(reads_nowhere, text, sizeof text) == EXIT_DEVICE,
       "an illegal address is a failure of the device");
    ok(one_line(text, "the GPU failed: ") && strstr(text, "asynchronous"),
       "in one line that says that launches are asynchronous");
    ok(status_of(hangs, text, sizeof text) == EXIT_DEVICE, "so is work that does not end");
    ok(one_line(text, "the GPU has not finished its work within"), "in one line");
    return tap_done();
}
