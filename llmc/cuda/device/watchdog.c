// Watchdog of one GPU. A kernel that spins, or a GPU that has stopped to answer, blocks the host in the next
// synchronisation without an error. Several ranks watch each other through the control channel; a single
// process has only itself.
//
// A thread measures how long the host has been waiting without any wait having ended. It sleeps while nobody
// waits.
#include "llmc/cuda/device/watchdog.h"
#include "llmc/base/common.h"
#include <errno.h>
#include <pthread.h>
#include <time.h>

static struct {
    pthread_t thread;
    bool runs, ending;
    double limit; // seconds
    int waiting;  // threads
    struct timespec deadline;
} dog;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; // uses the monotonic clock

static void set_deadline(void)
{
    clock_gettime(CLOCK_MONOTONIC, &dog.deadline);
    int64_t ns = dog.deadline.tv_nsec + (int64_t)(1e9 * dog.limit);
    dog.deadline.tv_sec += ns / 1000000000;
    dog.deadline.tv_nsec = ns % 1000000000;
}

static bool passed(const struct timespec *t)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec != t->tv_sec ? now.tv_sec > t->tv_sec : now.tv_nsec >= t->tv_nsec;
}

static void *watch(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    while (!dog.ending) {
        if (!dog.waiting) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        struct timespec deadline = dog.deadline;
        int status = pthread_cond_timedwait(&changed, &lock, &deadline);
        if (status == ETIMEDOUT && dog.waiting && passed(&dog.deadline))
            fatal(EXIT_DEVICE,
                  "the GPU has not finished its work within %.0f s: a kernel hangs, or the device no longer "
                  "answers; "
                  "see nvidia-smi and dmesg (a longer --timeout waits longer)",
                  dog.limit);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

void watchdog_start(double seconds)
{
    pthread_condattr_t monotonic;
    assert(!dog.runs && seconds > 0);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    dog.limit = seconds;
    dog.ending = false;
    dog.runs = !pthread_create(&dog.thread, NULL, watch, NULL);
    if (!dog.runs)
        fatal(EXIT_BAD_INPUT, "cannot start the thread that watches the GPU");
}

void watchdog_stop(void)
{
    if (!dog.runs)
        return;
    pthread_mutex_lock(&lock);
    dog.ending = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(dog.thread, NULL);
    pthread_cond_destroy(&changed);
    dog.runs = false;
}

void watchdog_wait_begin(void)
{
    if (!dog.runs)
        return;
    pthread_mutex_lock(&lock);
    if (dog.waiting++ == 0) {
        set_deadline();
        pthread_cond_signal(&changed);
    }
    pthread_mutex_unlock(&lock);
}

void watchdog_wait_end(void)
{
    if (!dog.runs)
        return;
    pthread_mutex_lock(&lock);
    dog.waiting--;
    set_deadline(); // the others wait for something that moves
    pthread_mutex_unlock(&lock);
}
