// Kernel ladder: Newton-Schulz with the five Polar Express tuples, 24 matrices of 768 x 3072. Std-5 as it
// stands is 978 GFLOP; the upper rungs do less for the same map (symmetric results, Gram form), the last one
// another map (AOL, four tuples). TFLOP/s count the dense operations of Std-5 in every rung: they compare
// times.
#include "dev/bench/ladder.cuh"
#include "dev/bench/ns_baseline.h"
#include "llmc/cuda/muon/ns_gpu.h"
#include "llmc/cuda/muon/ns_internal.cuh"

enum { N = 768, M = 3072, BATCH = 24, CHECKED = 2 }; // matrices 0 and BATCH-1 are checked
static const int64_t tall = (int64_t)N * M, square = (int64_t)N * N;

static float *u[LADDER_SETS]; // (BATCH, N, M) fp32
static char *work;            // results and whatever leads to them
static size_t work_bytes;
static float *sumsq; // (BATCH)
static Baseline lt;  // on x, y, a, b, which lie in `work`
static NsOptions std5, gram5, turbo4;
static const NsOptions *last; // what the last run was
static const void *result;    // where it left its matrices

static void load(Stream s, int i)
{
    const NsLoad l = {lt.x, sumsq, NULL, u[i], tall, std5.kappa, std5.eps, 1, N, M, BATCH, false};
    ns_load(s, NS_BF16, &l);
    last = &std5;
}

// ---- 1: one thread an element -----------------------------------------------------------------------------

// out = alpha a b + beta d;  a (BATCH, N, depth), b (BATCH, depth, cols), or (BATCH, cols, depth) when
//                            BY_ROWS; d, out (BATCH, N,
// cols)
template <bool BY_ROWS>
__global__ void thread_an_element(floatX *out, float alpha, const floatX *a, const floatX *b, float beta,
                                  const floatX *d, int depth, int cols)
{
    int col = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    a += ((int64_t)blockIdx.z * N + row) * depth;
    b += (int64_t)blockIdx.z * depth * cols;
    float sum = 0;
    for (int k = 0; k < depth; k++)
        sum += to_float(a[k]) * to_float(BY_ROWS ? b[(int64_t)col * depth + k] : b[(int64_t)k * cols + col]);
    int64_t at = ((int64_t)blockIdx.z * N + row) * cols + col;
    out[at] = __float2bfloat16(alpha * sum + beta * to_float(d[at]));
}

static void run1(Stream s, int set)
{
    floatX *x = (floatX *)lt.x, *y = (floatX *)lt.y, *a = (floatX *)lt.a, *b = (floatX *)lt.b;
    dim3 threads(32, 8), squares(N / 32, N / 8, BATCH), talls(M / 32, N / 8, BATCH);
    load(s, set);
    CUDA_CHECK(
        cudaMemsetAsync(a, 0, (size_t)BATCH * square * 2, s)); // 0 times what was there must not be NaN
    for (int i = 0; i < std5.steps; i++, std::swap(x, y)) {
        thread_an_element<true><<<squares, threads, 0, s>>>(a, 1, x, x, 0, a, M, N);
        thread_an_element<false>
            <<<squares, threads, 0, s>>>(b, (float)std5.tuples[i].c, a, a, (float)std5.tuples[i].b, a, N, N);
        thread_an_element<false><<<talls, threads, 0, s>>>(y, 1, b, x, (float)std5.tuples[i].a, x, N, M);
    }
    result = x;
}

// ---- 2, 5 to 7: the program's -----------------------------------------------------------------------------

static void run_program(Stream s, int set, const NsOptions *o)
{
    NsInput in = {u[set], N, M, BATCH, tall, 0, 0};
    result = newton_schulz(s, o, &in, work);
    last = o;
}

static void run2(Stream s, int set)
{
    device_set_portable(true);
    run_program(s, set, &std5);
    device_set_portable(false);
}

static void run5(Stream s, int set) { run_program(s, set, &std5); }
static void run6(Stream s, int set) { run_program(s, set, &gram5); }
static void run7(Stream s, int set) { run_program(s, set, &turbo4); }

// ---- 3: cuBLASLt, and passes of their own for the other terms ---------------------------------------------

// out = alpha out + beta d, 8 elements a thread
__global__ void add_pass(floatX *out, float alpha, float beta, const floatX *d, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * 256 + threadIdx.x;
    float f[8], g[8];
    if (v >= vectors)
        return;
    unpack8(load_vec(out, (int)v), f);
    unpack8(load_vec(d, (int)v), g);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = alpha * f[k] + beta * g[k];
    store_vec(out, (int)v, pack8(f));
}

static void add(Stream s, void *out, float alpha, float beta, const void *d, int64_t elements)
{
    add_pass<<<(unsigned)(elements / 8 / 256), 256, 0, s>>>((floatX *)out, alpha, beta, (const floatX *)d,
                                                            elements / 8);
}

static void run3(Stream s, int set)
{
    void *x = lt.x, *y = lt.y;
    load(s, set);
    for (int i = 0; i < std5.steps; i++, std::swap(x, y)) {
        lt_run(&lt, &lt.gram, s, {lt.a, x, x, lt.a, 1, 0});
        lt_run(&lt, &lt.square, s, {lt.b, lt.a, lt.a, lt.b, 1, 0});
        add(s, lt.b, (float)std5.tuples[i].c, (float)std5.tuples[i].b, lt.a, BATCH * square);
        lt_run(&lt, &lt.apply, s, {y, x, lt.b, y, 1, 0});
        add(s, y, 1, (float)std5.tuples[i].a, x, BATCH * tall);
    }
    result = x;
}

// ---- 4: all in its products: what bench_ns compares with --------------------------------------------------

static void run4(Stream s, int set)
{
    result = baseline_run(&lt, s, u[set], M, sumsq);
    last = &std5;
}

// ---- check ------------------------------------------------------------------------------------------------

static void poison(Stream s) { CUDA_CHECK(cudaMemsetAsync(work, 0xff, work_bytes, s)); }

// Matrix i of what is checked, in fp32 throughout by the portable kernels, which test_ns_gpu holds against
// fp64. (N, M) host
static const float *exact_matrix(const NsOptions *o, int i)
{
    static float *exact[2][CHECKED];
    float *&e = exact[o->aol][i];
    if (e)
        return e;
    NsOptions fp32 = *o;
    fp32.dtype = NS_FP32;
    fp32.gram = false;
    char *space = (char *)device_alloc(ns_workspace_bytes(&fp32, N, M, 1), "ladder");
    e = (float *)malloc((size_t)tall * sizeof *e);
    NsInput in = {u[0] + (i ? BATCH - 1 : 0) * tall, N, M, 1, tall, 0, 0};
    const void *from = newton_schulz(NULL, &fp32, &in, space);
    CUDA_CHECK(cudaMemcpy(e, from, (size_t)tall * sizeof *e, cudaMemcpyDeviceToHost));
    device_free(space);
    return e;
}

// |q - exact| / |exact|, in units of 2e-2 for bf16 and 4e-3 for fp16 (the tests' limits for Gaussian-like
// matrices of this shape)
static double error(void)
{
    double most = 0;
    for (int i = 0; i < CHECKED; i++) {
        const uint16_t *from = (const uint16_t *)result + (i ? BATCH - 1 : 0) * tall;
        const float *e = exact_matrix(last, i);
        uint16_t *q = (uint16_t *)malloc((size_t)tall * 2);
        double off = 0, size = 0;
        CUDA_CHECK(cudaMemcpy(q, from, (size_t)tall * 2, cudaMemcpyDeviceToHost));
        for (int64_t k = 0; k < tall; k++) {
            float v = last->dtype == NS_FP16 ? __half2float(*(const __half *)(q + k))
                                             : __bfloat162float(*(const floatX *)(q + k));
            off += ((double)v - e[k]) * ((double)v - e[k]);
            size += (double)e[k] * e[k];
        }
        free(q);
        double ratio = sqrt(off / size) / (last->dtype == NS_FP16 ? 4e-3 : 2e-2);
        if (!(ratio <= most))
            most = isnan(ratio) ? INFINITY : ratio;
    }
    return most;
}

__global__ void widen(float *out, const floatX *in, int64_t n)
{
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
        out[i] = to_float(in[i]);
}

static void prepare(void)
{
    std5 = ns_options_default(NS_POLAR);
    gram5 = ns_options_default(NS_GRAM);
    turbo4 = ns_options_default(NS_TURBO_GRAM);
    size_t x = (size_t)BATCH * tall * 2, a = (size_t)BATCH * square * 2;
    work_bytes = 2 * x + 2 * a;
    const NsOptions *all[] = {&std5, &gram5, &turbo4};
    for (int i = 0; i < 3; i++)
        work_bytes = std::max(work_bytes, ns_workspace_bytes(all[i], N, M, BATCH));
    work = (char *)device_alloc(work_bytes, "ladder");
    sumsq = (float *)device_alloc(BATCH * sizeof(float), "ladder");
    lt = baseline_open(N, M, BATCH, work, work + x, work + 2 * x, work + 2 * x + a);
    for (int i = 0; i < LADDER_SETS; i++) {
        floatX *values = ladder_tensor(BATCH * tall, 1, (uint32_t)i + 1);
        u[i] = (float *)device_alloc((size_t)BATCH * tall * sizeof(float), "ladder");
        widen<<<1024, 256>>>(u[i], values, BATCH * tall);
        CUDA_CHECK(cudaDeviceSynchronize());
        device_free(values);
    }
}

int main(int argc, char **argv)
{
    set_program_name("ladder_ns", -1);
    figures_open(&argc, argv);
    backend_open(0);
    OpSizes sizes = {.tokens = 8192, .dim = N, .heads = 6, .mlp_dim = M, .vocab_padded = 128};
    backend_reserve(&sizes);
    Stream s = stream_create();
    ladder_measure_ceilings(s);
    prepare();
    const Rung rungs[] = {{"one thread an element", run1},
                          {"mma.sync, symmetric results mirrored (the program's portable path)", run2},
                          {"cuBLASLt, batched, and passes of their own for the other terms", run3},
                          {"cuBLASLt, the other terms in its products", run4},
                          {"warpgroup products, TMA, symmetric, one kernel (the program's op)", run5},
                          {"the same in Gram form, fp16, one restart: fewer operations", run6},
                          {"Turbo-Gram: almost-orthogonal scaling, four tuples, no restart", run7}};
    double operations = BATCH * 5 * (4.0 * N * N * M + 2.0 * N * N * N);
    Ladder ladder = {.title = "Newton-Schulz, 24 matrices of 768 x 3072",
                     .rungs = rungs,
                     .count = 7,
                     .operations = operations,
                     .poison = poison,
                     .error = error};
    return ladder_climb(&ladder, s) > 0;
}
