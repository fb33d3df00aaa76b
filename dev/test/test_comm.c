// Collectives of the CPU program, on 1 to 8 processes: exact sums, everywhere the same, in place and out of
// place, of sizes below and above the socket's buffers; and what a rank sends is never taken beyond the room
// that there is for it.
//
//   test_comm           the tests            test_comm --bench    times of some sizes on 2 and 4 ranks
#include "dev/test/tap.h"
#include "llmc/dist/comm_backend.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int rank, size;

// ---- ranks in a child -------------------------------------------------------------------------------------

// The exit status of `count` ranks that run f; their lines are in text, when it is not NULL.
static int run_ranks(int count, void (*f)(void), char *text, size_t capacity)
{
    int status, ends[2];
    size_t length = 0;
    if (pipe(ends))
        return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        if (text)
            dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        comm_open();
        comm_join(
            &(CommOptions){.gpus = "all", .ranks = count, .device = -1, .micro_batches = 8, .timeout = 20});
        rank = comm_rank();
        size = comm_size();
        f();
        comm_close();
        exit(0);
    }
    close(ends[1]);
    for (ssize_t n; text && (n = read(ends[0], text + length, capacity - 1 - length)) > 0;)
        length += (size_t)n;
    if (text)
        text[length] = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void require(bool good, const char *what)
{
    if (!good)
        fatal(EXIT_BAD_INPUT, "%s is wrong on %d ranks", what, size);
}

// ---- sums and copies --------------------------------------------------------------------------------------

// Whole numbers below 2^20: sums over 8 ranks are exact in fp32.
static float value(int r, int64_t i) { return (float)((i * 2654435761u + (int64_t)r * 40503u) % (1 << 20)); }

static float sum_of(int64_t i)
{
    float sum = 0;
    for (int r = 0; r < size; r++)
        sum += value(r, i);
    return sum;
}

static void fill(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = value(rank, i);
}

static void test_reduce_scatter(float *in, float *out, int64_t count, bool in_place)
{
    fill(in, count * size);
    float *to = in_place ? in + rank * count : out;
    comm_reduce_scatter(NULL, to, in, count);
    for (int64_t i = 0; i < count && size > 1; i++)
        require(to[i] == sum_of(rank * count + i), "a reduce-scatter");
    for (int64_t i = 0; i < count * size && !in_place; i++)
        require(in[i] == value(rank, i), "the input of a reduce-scatter");
}

static void test_all_gather(float *x, int64_t count)
{
    memset(x, 0xff, (size_t)(count * size) * sizeof *x);
    fill(x + rank * count, count);
    comm_all_gather(NULL, x, count * (int64_t)sizeof *x);
    for (int r = 0; r < size; r++)
        for (int64_t i = 0; i < count; i++)
            require(x[r * count + i] == value(r, i), "an all-gather");
}

static void test_all_reduce(float *x, int64_t count)
{
    fill(x, count);
    comm_all_reduce(NULL, x, count);
    for (int64_t i = 0; i < count; i++)
        require(x[i] == sum_of(i), "an all-reduce");
}

static void test_all_to_all(float *in, float *out, int64_t count)
{
    fill(in, count * size);
    memset(out, 0xff, (size_t)(count * size) * sizeof *out);
    comm_all_to_all(NULL, out, in, count * (int64_t)sizeof *in);
    for (int r = 0; r < size; r++)
        for (int64_t i = 0; i < count; i++)
            require(out[r * count + i] == value(r, rank * count + i), "an all-to-all");
}

static void test_collect(float *x, int64_t count)
{
    size_t bytes = (size_t)count * sizeof *x;
    for (int owner = 0; owner < size; owner++) {
        fill(x, count);
        size_t arrived = comm_collect(x, bytes, bytes, owner);
        require(arrived == (rank == 0 || rank == owner ? bytes : 0),
                "the size of what a rank gives to rank 0");
        for (int64_t i = 0; i < count && !rank; i++)
            require(x[i] == value(owner, i), "what a rank gives to rank 0");
    }
}

static void all_collectives(void)
{
    const int64_t counts[] = {1, 63, 4096, 300001};
    float *in = xcalloc((size_t)(300001 * size), sizeof *in),
          *out = xcalloc((size_t)(300001 * size), sizeof *out);
    for (int i = 0; i < 4; i++) {
        test_reduce_scatter(in, out, counts[i], false);
        test_reduce_scatter(in, out, counts[i], true);
        test_all_gather(in, counts[i]);
        test_all_reduce(in, counts[i]);
        test_all_to_all(in, out, counts[i]);
        test_collect(in, counts[i]);
    }
    require(comm_sum(rank + 1) == size * (size + 1) / 2 && comm_max(rank) == size - 1,
            "a sum of host values");
    free(in);
    free(out);
}

// Numbers whose sum depends on the order: every rank must get the bits of the sum in the order of the ranks.
static void ordered_sum(void)
{
    float mine = rank == 0 ? 1e8f : rank == 1 ? 1.0f : -1e8f / (float)(size - 2), expected = 1e8f;
    expected += 1.0f;
    for (int r = 2; r < size; r++)
        expected += -1e8f / (float)(size - 2);
    comm_all_reduce(NULL, &mine, 1);
    require(!memcmp(&mine, &expected, sizeof mine), "the order of a sum");
}

// ---- what does not fit ------------------------------------------------------------------------------------

static void too_much_to_collect(void)
{
    char *buf = xcalloc(1 << 16, 1);
    comm_collect(buf, rank ? 1 << 16 : 0, 1 << 10, 1);
    free(buf);
}

static void tensors_of_different_sizes(void)
{
    static float x[4096];
    comm_all_reduce(NULL, x, rank ? 4096 : 4095);
}

// A header as control.c sends it, with a length that no memory holds.
static void absurd_length(void)
{
    struct {
        uint32_t kind, call;
        uint64_t bytes;
    } frame = {5, 1, UINT64_MAX - 64};
    static char buf[64];
    if (rank)
        send(comm_control()->fd[0], &frame, sizeof frame, 0);
    comm_collect(buf, sizeof buf, sizeof buf, 1);
}

static void refused(const char *what, void (*f)(void))
{
    char text[1024];
    int status = run_ranks(2, f, text, sizeof text);
    int lines = 0;
    for (const char *p = text; (p = strchr(p, '\n')); p++)
        lines++;
    text[strcspn(text, "\n")] = 0;
    ok(status == 1 && lines == 1 && strstr(text, "are expected"), "%s: status %d, %s", what, status, text);
}

// ---- times ------------------------------------------------------------------------------------------------

static void bench(void)
{
    for (int64_t count = 1 << 12; count <= 1 << 22; count <<= 5) {
        float *in = xcalloc((size_t)(count * size), sizeof *in), *out = xcalloc((size_t)count, sizeof *out);
        double reduce = 0, gather = 0;
        for (int i = -1; i < 5; i++) {
            double began = seconds_now();
            comm_reduce_scatter(NULL, out, in, count);
            double middle = seconds_now();
            comm_all_gather(NULL, in, count * (int64_t)sizeof *in);
            reduce += i < 0 ? 0 : (middle - began) / 5;
            gather += i < 0 ? 0 : (seconds_now() - middle) / 5;
        }
        if (!rank)
            printf("%d ranks, chunks of %lld floats: reduce-scatter %.3f ms, all-gather %.3f ms\n", size,
                   (long long)count, 1e3 * reduce, 1e3 * gather);
        free(in);
        free(out);
    }
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "--bench"))
        return run_ranks(2, bench, NULL, 0) || run_ranks(4, bench, NULL, 0);
    for (int ranks = 1; ranks <= 8; ranks *= 2)
        ok(run_ranks(ranks, all_collectives, NULL, 0) == 0, "%d ranks", ranks);
    ok(run_ranks(4, ordered_sum, NULL, 0) == 0,
       "sums are added in the order of the ranks, and all ranks have their bits");
    refused("a rank that gives more than there is room for", too_much_to_collect);
    refused("tensors of different sizes", tensors_of_different_sizes);
    refused("a length that no memory holds", absurd_length);
    return tap_done();
}
