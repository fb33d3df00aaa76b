// Scratch of the CUDA backend, without a GPU: memory of streams, plans that grow, what is refused.
#include "dev/test/child.h"
#include "dev/test/tap.h"
#include "llmc/base/memory.h"
#include "llmc/cuda/device/scratch.c"

enum { SMALL = 100, LARGE = 5000 };
static Stream capturing;
static const Stream first = (Stream)1, second = (Stream)2, third = (Stream)3;

bool stream_is_capturing(Stream s) { return capturing && s == capturing; }

static bool all_are(const char *p, size_t bytes, char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (p[i] != value)
            return false;
    return true;
}

static void check_growth(void)
{
    scratch_plan(SCRATCH_GATES, SMALL);
    scratch_reserve();
    size_t reserved = memory_now();
    char *small = scratch_of(first, SCRATCH_GATES, SMALL);
    ok(memory_now() == reserved && all_are(small, SMALL, 0),
       "the first stream takes what is reserved, zeroed");
    scratch_plan(SCRATCH_GATES, SMALL / 2);
    ok(scratch_planned(SCRATCH_GATES) >= SMALL, "a smaller plan changes nothing");

    memset(small, 1, SMALL);
    scratch_plan(SCRATCH_GATES, LARGE);
    ok(scratch_of(first, SCRATCH_GATES, SMALL) == small, "what is large enough stays where it is");
    char *large = scratch_of(first, SCRATCH_GATES, LARGE);
    ok(memory_now() >= reserved + LARGE && all_are(large, LARGE, 0), "a larger plan is allocated, zeroed");
    memset(large, 2, LARGE);
    ok(all_are(small, SMALL, 1), "beside what a captured graph may use");
    ok(scratch_of(first, SCRATCH_GATES, SMALL) == large, "small and large calls share memory from then on");

    scratch_plan(SCRATCH_GATES, 2 * LARGE);
    size_t before = memory_now();
    scratch_ready(first);
    ok(memory_now() >= before + 2 * LARGE, "a capture begins with all that is planned");
    capturing = first;
    ok(all_are(scratch_of(first, SCRATCH_GATES, 2 * LARGE), 2 * LARGE, 0), "and needs no more");
    capturing = NULL;
}

static void check_streams(void)
{
    char *one = scratch_of(first, SCRATCH_GATES, LARGE), *two = scratch_of(second, SCRATCH_GATES, LARGE);
    ok(one != two && scratch_counter(first, SCRATCH_GATES) != scratch_counter(second, SCRATCH_GATES),
       "streams have memory and counters of their own");
    scratch_give_back(second);
    ok(scratch_of(third, SCRATCH_GATES, LARGE) == two, "a stream takes the memory of one that is done");
}

static void beyond_plan(void *unused)
{
    (void)unused;
    scratch_of(first, SCRATCH_GATES, 3 * LARGE);
}

static void in_capture(void *unused)
{
    (void)unused;
    scratch_plan(SCRATCH_GATES, 3 * LARGE);
    capturing = first;
    scratch_of(first, SCRATCH_GATES, 3 * LARGE);
}

static void check_refused(void (*program)(void *), const char *says)
{
    Run r = start(program, NULL);
    Result x = finish(&r, 20);
    bool good = x.status == EXIT_BAD_INPUT && x.lines == 1 && strstr(x.text, says);
    ok(good, "refused: %s", first_line(&x));
}

int main(void)
{
    set_program_name("test_scratch", -1);
    size_t before = memory_now();
    check_growth();
    check_streams();
    check_refused(beyond_plan, "an op needs 15000 bytes and 10000 are planned");
    check_refused(in_capture, "a graph is being captured on a stream without enough memory");
    scratch_close();
    ok(memory_now() == before, "closing gives all of it back");
    return tap_done();
}
