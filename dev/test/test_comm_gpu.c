// Collectives between GPUs: exact sums, the same bits every time, behind and before other work in a captured
// graph, and the host's side of them. Runs as many ranks as the machine allows; skipped with one GPU.
//
//   test_comm_gpu                   the tests, on all GPUs
//   test_comm_gpu --gpus 0,0        the tests, two ranks on one GPU (needs the stand-in for NCCL)
//   test_comm_gpu --bench           times of the sizes that a step sends
//   test_comm_gpu --hold D SECONDS  keeps nearly all memory of device D for a while: for tests of a rank that
//                                   runs out of it
#include "dev/bench/figures.h"
#include "dev/test/tap.h"
#include "llmc/dist/comm.h"
#include "llmc/cuda/device/device.h"
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 4 << 20 }; // floats of a rank's largest chunk
static Stream stream, side;
static int rank, size;

// ok() of rank 0 for all: passed where it passed everywhere.
static void all_ok(bool mine, const char *what)
{
    int failed = (int)comm_sum(!mine);
    if (!rank)
        ok(!failed, "%s%s", what, failed ? " (failed)" : "");
}

// Whole numbers of all magnitudes below 2^20: sums over 8 ranks are exact in fp32.
static float value(int r, int64_t i) { return (float)((i * 2654435761u + (int64_t)r * 40503u) % (1 << 20)); }

static float sum_of(int64_t i)
{
    float sum = 0;
    for (int r = 0; r < size; r++)
        sum += value(r, i);
    return sum;
}

static float *host;
static void fill(float *device, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        host[i] = value(rank, i);
    copy_to_device(stream, device, host, (size_t)n * sizeof(float));
    stream_synchronize(stream);
}

static void fetch(const void *device, size_t bytes)
{
    stream_synchronize(stream);
    copy_to_host(stream, host, device, bytes);
    stream_synchronize(stream);
}

// ---- each collective --------------------------------------------------------------------------------------

static void test_reduce_scatter(float *in, float *out, int64_t count, bool in_place)
{
    char what[96];
    bool good = true;
    fill(in, count * size);
    float *to = in_place ? in + rank * count : out;
    comm_reduce_scatter(stream, to, in, count);
    fetch(to, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        good &= host[i] == sum_of(rank * count + i);
    if (!in_place) {
        fetch(in, (size_t)(count * size) * sizeof(float));
        for (int64_t i = 0; i < count * size; i++)
            good &= host[i] == value(rank, i);
    }
    snprintf(what, sizeof what, "reduce-scatter %s of %lld a rank", in_place ? "in place" : "out of place",
             (long long)count);
    all_ok(good, what);
}

static void test_gather(float *buf, int64_t count)
{
    char what[96];
    bool good = true;
    fill(buf, count * size);
    comm_all_gather(stream, buf, count * (int64_t)sizeof(float));
    fetch(buf, (size_t)(count * size) * sizeof(float));
    for (int64_t i = 0; i < count * size; i++)
        good &= host[i] == value((int)(i / count), i);
    snprintf(what, sizeof what, "all-gather of %lld a rank", (long long)count);
    all_ok(good, what);
}

static void test_all_to_all(float *in, float *out, int64_t count)
{
    char what[96];
    bool good = true;
    fill(in, count * size);
    comm_all_to_all(stream, out, in, count * (int64_t)sizeof(float));
    fetch(out, (size_t)(count * size) * sizeof(float));
    for (int64_t i = 0; i < count * size; i++)
        good &= host[i] == value((int)(i / count), rank * count + i % count);
    snprintf(what, sizeof what, "all-to-all of %lld for each rank", (long long)count);
    all_ok(good, what);
}

static void test_all_reduce(float *buf, int64_t count)
{
    char what[96];
    bool good = true;
    fill(buf, count);
    comm_all_reduce(stream, buf, count);
    fetch(buf, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        good &= host[i] == sum_of(i);
    snprintf(what, sizeof what, "all-reduce of %lld", (long long)count);
    all_ok(good, what);
}

static void test_same_bits(float *in, float *out, int64_t count)
{
    float *first = xcalloc((size_t)count, sizeof *first);
    bool good = true;
    for (int round = 0; round < 4; round++) {
        for (int64_t i = 0; i < count * size; i++)
            host[i] = value(rank, i) * 0x1.23456p-7f;
        copy_to_device(stream, in, host, (size_t)(count * size) * sizeof(float));
        comm_reduce_scatter(stream, out, in, count);
        fetch(out, (size_t)count * sizeof(float));
        if (round)
            good &= !memcmp(first, host, (size_t)count * sizeof(float));
        else
            memcpy(first, host, (size_t)count * sizeof(float));
    }
    free(first);
    all_ok(good, "the same sums give the same bits");
}

// As a step does it: a side stream that begins behind work of the main one and is waited for, captured and
// replayed.
static void test_graph(float *in, float *out, int64_t count, bool captured)
{
    Event *begun = event_create(), *done = event_create();
    bool good = true;
    float *source = device_alloc((size_t)(count * size) * sizeof(float), "test");
    fill(source, count * size);
    bool graph = captured && graph_begin(stream);
    for (int part = 0; part < 3; part++) {
        copy_on_device(stream, in, source, (size_t)(count * size) * sizeof(float));
        event_record(begun, stream);
        stream_wait(side, begun);
        comm_reduce_scatter(side, out + rank * count, in, count);
        device_zero(side, in, (size_t)(count * size) * sizeof(float));
        comm_all_gather(side, out, count * (int64_t)sizeof(float));
        event_record(done, side);
        stream_wait(stream, done);
    }
    Graph *g = graph ? graph_end(stream) : NULL;
    for (int replay = 0; replay < 4; replay++) {
        if (g)
            device_zero(stream, out, (size_t)(count * size) * sizeof(float));
        if (g)
            graph_launch(g, stream);
        fetch(out, (size_t)(count * size) * sizeof(float));
        for (int64_t i = 0; i < count * size; i++)
            good &= host[i] == sum_of(i);
    }
    if (g)
        graph_destroy(g);
    all_ok(good, captured ? "on a side stream of a captured graph" : "on a side stream");
    device_free(source);
    event_destroy(begun);
    event_destroy(done);
}

// The more is sent, the more of the products beside it leave multiprocessors.
static void test_share(void)
{
    SharedSms none = comm_shared_sms(0), little = comm_shared_sms(1),
              much = comm_shared_sms((int64_t)1 << 30);
    all_ok(none.products == 0 && little.products == 1 && much.products > 1 && much.sms > 0 &&
               much.sms == little.sms,
           "some products leave multiprocessors to a reduce-scatter");
}

static void test_host(void)
{
    size_t bytes = (size_t)MOST * sizeof(float);
    bool good = comm_sum(rank + 1) == size * (size + 1) / 2 && comm_max(rank * 7) == (size - 1) * 7;
    good &= comm_any(rank == size - 1) && !comm_any(false);
    all_ok(good, "sum, maximum, flag");
    memset(host, rank + 1, bytes);
    size_t arrived = comm_collect(host, bytes, bytes, size - 1);
    good = rank == 0 || rank == size - 1 ? arrived == bytes : arrived == 0;
    for (size_t i = 0; !rank && i < bytes; i++)
        good &= ((char *)host)[i] == size;
    all_ok(good, "16 MiB of the last rank reach the first");
    double begin = seconds_now();
    for (int i = 0; i < 1000; i++)
        comm_sum(1);
    if (!rank)
        printf("# a sum on the host takes %.0f us\n", (seconds_now() - begin) * 1e3);
}

static void run_tests(void)
{
    float *in = device_alloc((size_t)MOST * (size_t)size * sizeof(float), "test");
    float *out = device_alloc((size_t)MOST * (size_t)size * sizeof(float), "test");
    host = host_alloc((size_t)MOST * (size_t)size * sizeof(float));
    int64_t counts[] = {4, 64, 768 * 3072, MOST};
    for (int i = 0; i < 4; i++) {
        test_reduce_scatter(in, out, counts[i], false);
        test_reduce_scatter(in, out, counts[i], true);
        test_gather(out, counts[i]);
        test_all_reduce(in, counts[i] + 1);
        test_all_to_all(in, out, counts[i]);
    }
    test_same_bits(in, out, 768 * 3072);
    test_graph(in, out, 1 << 20, false);
    test_graph(in, out, 1 << 20, true);
    test_share();
    test_host();
}

// ---- times ------------------------------------------------------------------------------------------------

static double seconds_each(void (*op)(void *, int64_t), void *buf, int64_t bytes)
{
    enum { TIMES = 20 };
    for (int i = 0; i < 3; i++)
        op(buf, bytes);
    stream_synchronize(stream);
    comm_barrier();
    double begin = seconds_now();
    for (int i = 0; i < TIMES; i++)
        op(buf, bytes);
    stream_synchronize(stream);
    return (seconds_now() - begin) / TIMES;
}

// bytes: of the whole buffer, as a step counts them.
static void op_reduce_scatter(void *buf, int64_t bytes)
{
    int64_t count = bytes / (int64_t)sizeof(float) / size;
    comm_reduce_scatter(stream, (float *)buf + rank * count, buf, count);
}

static void op_gather(void *buf, int64_t bytes) { comm_all_gather(stream, buf, bytes / size); }
static void op_all_reduce(void *buf, int64_t bytes)
{
    comm_all_reduce(stream, buf, bytes / (int64_t)sizeof(float));
}

static void run_bench(void)
{
    int64_t sizes[] = {4096,     131072,   9437184,   18874368,  37748736,
                       75497472, 77266944, 154533888, 301989888, 386334720};
    void *buf = device_alloc((size_t)386334720, "bench");
    if (!rank)
        printf("%d ranks, %s\n", size, comm_description());
    if (!rank)
        printf("%12s %22s %22s %22s\n", "bytes", "reduce-scatter", "all-gather", "all-reduce");
    for (int i = 0; i < 10; i++) {
        int64_t b = sizes[i];
        double part = (double)(size - 1) / size,
               t[] = {seconds_each(op_reduce_scatter, buf, b), seconds_each(op_gather, buf, b),
                      seconds_each(op_all_reduce, buf, b)};
        if (rank)
            continue;
        static const char *names[] = {"reduce-scatter", "all-gather", "all-reduce"};
        char shape[96];
        snprintf(shape, sizeof shape, "%lld bytes", (long long)b);
        for (int k = 0; k < 3; k++)
            figure(names[k], shape, 1e6 * t[k], "us");
        printf("%12lld", (long long)b);
        for (int k = 0; k < 3; k++)
            printf("  %8.1f us %5.0f GB/s", 1e6 * t[k], (k == 2 ? 2 : 1) * part * (double)b / t[k] * 1e-9);
        printf("\n");
    }
}

// ---- the program ------------------------------------------------------------------------------------------

static int hold(int device, int seconds)
{
    size_t free_bytes, total, held = 0;
    void *p;
    backend_open(device);
    for (size_t step = (size_t)1 << 30; step >= (size_t)32 << 20; step /= 2)
        while (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && free_bytes > step &&
               cudaMalloc(&p, step) == cudaSuccess)
            held += step;
    printf("holding %zu MiB of device %d\n", held >> 20, device);
    fflush(stdout);
    sleep((unsigned)seconds);
    return 0;
}

int main(int argc, char **argv)
{
    figures_open(&argc, argv);
    comm_open();
    if (argc == 4 && !strcmp(argv[1], "--hold"))
        return hold(atoi(argv[2]), atoi(argv[3]));
    bool given = argc == 3 && !strcmp(argv[1], "--gpus");
    int device = comm_join(&(CommOptions){.gpus = given ? argv[2] : "all",
                                          .ranks = 1,
                                          .device = -1,
                                          .micro_batches = 8,
                                          .timeout = 30});
    rank = comm_rank();
    size = comm_size();
    figures.devices = size;
    if (size == 1) {
        printf("1..0 # SKIP one GPU (%s)\n", comm_description());
        return 0;
    }
    backend_open(device);
    comm_connect();
    stream = stream_create();
    side = stream_create_urgent();
    if (argc == 2 && !strcmp(argv[1], "--bench"))
        run_bench();
    else
        run_tests();
    comm_barrier();
    int status = rank || !tap_count ? 0 : tap_done();
    comm_close();
    return status;
}
