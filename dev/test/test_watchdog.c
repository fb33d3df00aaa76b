// The watchdog of one GPU, without a GPU: a wait that does not end ends the program, waits that end do not.
#include "dev/test/child.h"
#include "dev/test/tap.h"
#include "llmc/cuda/device/watchdog.c"

enum { LIMIT_MS = 1000, STEP_MS = 50, STEPS = 30, MARGIN_S = 20 };

static void hangs(void)
{
    watchdog_wait_begin();
    wait_ms(1000 * MARGIN_S);
}

// Longer than the limit in all, no wait of them.
static void proceeds(void)
{
    for (int i = 0; i < STEPS; i++) {
        watchdog_wait_begin();
        wait_ms(STEP_MS);
        watchdog_wait_end();
    }
}

static void idles(void) { wait_ms(3 * LIMIT_MS); }

static void *wait_long(void *unused)
{
    (void)unused;
    watchdog_wait_begin();
    wait_ms(STEPS * STEP_MS);
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

static void under_watchdog(void *run)
{
    watchdog_start(1e-3 * LIMIT_MS);
    (*(void (**)(void))run)();
    watchdog_stop();
}

static Result result_of(void (*run)(void))
{
    Run r = start(under_watchdog, &run);
    return finish(&r, 2 * MARGIN_S);
}

static bool ends_quietly(void (*run)(void))
{
    Result r = result_of(run);
    return r.status == 0 && !r.lines;
}

int main(void)
{
    Result r = result_of(hangs);
    ok(r.status == EXIT_DEVICE, "a wait that does not end ends the program, as a failure of the device");
    ok(r.lines == 1 && strstr(r.text, "the GPU has not finished its work within 1 s"),
       "in one line that says so: %s", *r.text ? "yes" : "nothing");
    ok(result_of(hangs_behind_others).status == EXIT_DEVICE, "so does one behind waits that ended");
    ok(ends_quietly(proceeds), "waits that end do not, however many");
    ok(ends_quietly(overlaps), "nor does a long one beside them");
    ok(ends_quietly(idles), "nor a host that does not wait");
    watchdog_wait_begin();
    watchdog_wait_end();
    ok(true, "without a watchdog the calls do nothing");
    return tap_done();
}
