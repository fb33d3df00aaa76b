// A GPU that fails, or does not finish, ends the program with EXIT_DEVICE and one line. Each case has a
// process of its own, because the context is lost.
#include "dev/test/child.h"
#include "dev/test/tap.h"
#include "llmc/cuda/device/watchdog.h"
#include "llmc/ops/ops.h"
#include <cuda_runtime_api.h>

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

static void on_gpu(void *run)
{
    backend_open(0);
    (*(void (**)(Stream))run)(stream_create());
}

static Result result_of(void (*run)(Stream))
{
    Run r = start(on_gpu, &run);
    return finish(&r, 120);
}

int main(void)
{
    Result r = result_of(works);
    ok(r.status == 0 && !r.lines, "work that ends is let alone");
    r = result_of(reads_nowhere);
    ok(r.status == EXIT_DEVICE, "an illegal address is a failure of the device");
    ok(r.lines == 1 && strstr(r.text, "the GPU failed: ") && strstr(r.text, "asynchronous"),
       "in one line that says that launches are asynchronous");
    r = result_of(hangs);
    ok(r.status == EXIT_DEVICE, "so is work that does not end");
    ok(r.lines == 1 && strstr(r.text, "the GPU has not finished its work within"), "in one line");
    return tap_done();
}
