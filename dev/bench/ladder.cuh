// What the kernel ladders share. A ladder does one op in several ways, from the simplest kernel to the one
// the program runs; each rung names what it adds to the one below. Every rung is checked against fp64 on
// sampled rows before it is timed, and is timed on buffers that together exceed the L2 cache several times,
// as a training step finds them.
#pragma once
#include "dev/bench/figures.h"
#include "llmc/cuda/device/cuda_common.cuh"

enum { LADDER_SETS = 3, LADDER_ROUNDS = 7, LADDER_MS = 2000 };

typedef struct {
    const char *adds;               // to the rung below
    void (*run)(Stream s, int set); // queues the op on buffer set 0 .. LADDER_SETS-1
} Rung;

typedef struct {
    const char *title;
    const Rung *rungs;
    int count;
    double bytes, operations; // that the op must at least move and do; 0: not its measure
    void (*poison)(Stream s); // overwrites the results of set 0
    double (*error)(void);    // of the results of set 0: worst of the sampled elements, in units of its limit
} Ladder;

static double ladder_copy_rate, ladder_product_rate; // measured: bytes and operations a second

// Fills n elements with numbers evenly distributed in (-scale, scale); the same for the same seed.
__global__ void ladder_random_kernel(floatX *out, int64_t n, float scale, uint32_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + seed;
        x = (x ^ x >> 15) * 2246822519u;
        x = (x ^ x >> 13) * 3266489917u;
        out[i] = __float2bfloat16(scale * (float)(int32_t)(x ^ x >> 16) * 0x1p-31f);
    }
}

// (n) bf16 device, freed with the process
static floatX *ladder_tensor(int64_t n, float scale, uint32_t seed)
{
    floatX *p = (floatX *)device_alloc((size_t)n * sizeof(floatX), "ladder");
    ladder_random_kernel<<<1024, 256>>>(p, n, scale, seed);
    CHECK_LAUNCH();
    CUDA_CHECK(cudaDeviceSynchronize());
    return p;
}

// n elements of a device buffer as host doubles; owned by the caller
static inline double *ladder_read(const floatX *p, int64_t n)
{
    floatX *host = (floatX *)malloc((size_t)n * sizeof(floatX));
    double *x = (double *)malloc((size_t)n * sizeof(double));
    CUDA_CHECK(cudaMemcpy(host, p, (size_t)n * sizeof(floatX), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < n; i++)
        x[i] = (double)__bfloat162float(host[i]);
    free(host);
    return x;
}

// Seconds of one call: the best of several rounds over all sets, of two where they take long.
static double ladder_seconds(void (*run)(Stream s, int set), Stream s)
{
    cudaEvent_t begin, end;
    float best = INFINITY, ms, spent = 0;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    for (int i = 0; i < LADDER_ROUNDS && (i < 2 || spent < LADDER_MS); i++) {
        CUDA_CHECK(cudaEventRecord(begin, s));
        for (int set = 0; set < LADDER_SETS; set++)
            run(s, set);
        CUDA_CHECK(cudaEventRecord(end, s));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        spent += ms;
        if (i && ms < best)
            best = ms; // the first round warms up
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return best * 1e-3 / LADDER_SETS;
}

static char *ladder_bytes[LADDER_SETS];
static floatX *ladder_square[3];
enum { LADDER_COPY = 256 << 20, LADDER_SIDE = 8192 };
static void ladder_copy(Stream s, int set)
{
    copy_on_device(s, ladder_bytes[set], ladder_bytes[(set + 1) % 3], LADDER_COPY);
}

static void ladder_product(Stream s, int)
{
    ProductContext c = {s, NULL};
    Product p = {ladder_square[0], ladder_square[1], ladder_square[2], NULL, NULL,
                 LADDER_SIDE,      LADDER_SIDE,      LADDER_SIDE,      1};
    matmul_forward(&c, &p);
}

// The ceilings that shares are given of. After backend_reserve.
static void ladder_measure_ceilings(Stream s)
{
    for (int i = 0; i < LADDER_SETS; i++)
        ladder_bytes[i] = (char *)device_alloc(LADDER_COPY, "ladder");
    for (int i = 0; i < 3; i++)
        ladder_square[i] = ladder_tensor((int64_t)LADDER_SIDE * LADDER_SIDE, 1, 77u + (uint32_t)i);
    ladder_copy_rate = 2.0 * LADDER_COPY / ladder_seconds(ladder_copy, s);
    ladder_product_rate = 2.0 * LADDER_SIDE * LADDER_SIDE * LADDER_SIDE / ladder_seconds(ladder_product, s);
    printf("%s: copy %.0f GB/s, bf16 product %.0f TFLOP/s\n", device_state.name, ladder_copy_rate * 1e-9,
           ladder_product_rate * 1e-12);
    for (int i = 0; i < LADDER_SETS; i++)
        device_free(ladder_bytes[i]);
    for (int i = 0; i < 3; i++)
        device_free(ladder_square[i]);
}

// Checks and times every rung; prints the table. Returns the number of rungs that are wrong.
static int ladder_climb(const Ladder *l, Stream s)
{
    int wrong = 0;
    double first = 0;
    printf("\n%s\n", l->title);
    for (int i = 0; i < l->count; i++) {
        const Rung *r = &l->rungs[i];
        l->poison(s);
        r->run(s, 0);
        CHECK_LAUNCH();
        CUDA_CHECK(cudaStreamSynchronize(s));
        double error = l->error();
        bool right = error <= 1; // NaN is not
        wrong += !right;
        double t = ladder_seconds(r->run, s);
        if (i == 0)
            first = t;
        char op[160];
        snprintf(op, sizeof op, "rung %d: %s", i + 1, r->adds);
        if (right)
            figure(op, l->title, t * 1e6, "us");
        printf("  %d  %-66s %9.1f us", i + 1, r->adds, t * 1e6);
        if (l->bytes > 0)
            printf("  %6.0f GB/s %5.1f%% of copy", l->bytes / t * 1e-9,
                   100 * l->bytes / t / ladder_copy_rate);
        if (l->operations > 0)
            printf("  %6.1f TFLOP/s %5.1f%% of product", l->operations / t * 1e-12,
                   100 * l->operations / t / ladder_product_rate);
        printf("  %6.1fx  error %.2f of the limit%s\n", first / t, error, right ? "" : "  WRONG");
        fflush(stdout);
    }
    return wrong;
}
