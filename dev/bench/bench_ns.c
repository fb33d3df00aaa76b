// Newton-Schulz on the GPU: every variant against the standard iteration on cuBLASLt in the same run, every
// primitive against its floor, and the error that each variant leaves.
//   bench_ns [shape]      0..8: one of the shapes only
// Times: the whole call from fp32 matrices to the result, replayed as a graph, L2 warm, median of REPEATS.
// "products": the steps alone, from 16-bit matrices on, which is the whole less norm and load (AOL: less its
// own load), measured by themselves.
#include "dev/bench/figures.h"
#include "dev/bench/ns_baseline.h"
#include "dev/test/ns_reference.h"
#include "llmc/cuda/muon/ns_gpu.h"
#include "llmc/base/floatx.h"
#include "llmc/ops/ops.h"

enum { REPEATS = 60, WARM_UP = 10 };
static const double peak_tflops = 989; // of the datasheet, dense bf16

static const struct {
    int n, m, batch;
} shapes[] = {{768, 768, 24}, {768, 3072, 24}, {1024, 4096, 8}, {2048, 11059, 1}, {256, 768, 64},
              {192, 768, 64}, {128, 512, 64},  {256, 256, 64},  {100, 300, 64}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// ---- timing -----------------------------------------------------------------------------------------------

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// `job` is captured `copies` times into one graph; the median time of one, in microseconds.
typedef void Job(cudaStream_t s, void *arguments);
static double median_us(Job *job, void *arguments, int copies)
{
    Stream s = stream_create();
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaEvent_t from, to;
    float ms[REPEATS];
    BENCH_CUDA(cudaEventCreate(&from));
    BENCH_CUDA(cudaEventCreate(&to));
    job(s, arguments); // whatever is prepared at the first call
    BENCH_CUDA(cudaStreamSynchronize(s));
    BENCH_CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < copies; i++)
        job(s, arguments);
    BENCH_CUDA(cudaStreamEndCapture(s, &graph));
    BENCH_CUDA(cudaGraphInstantiate(&run, graph, 0));
    for (int i = 0; i < REPEATS + WARM_UP; i++) {
        BENCH_CUDA(cudaEventRecord(from, s));
        BENCH_CUDA(cudaGraphLaunch(run, s));
        BENCH_CUDA(cudaEventRecord(to, s));
        BENCH_CUDA(cudaEventSynchronize(to));
        if (i >= WARM_UP)
            BENCH_CUDA(cudaEventElapsedTime(&ms[i - WARM_UP], from, to));
    }
    qsort(ms, REPEATS, sizeof *ms, by_value);
    cudaGraphExecDestroy(run);
    cudaGraphDestroy(graph);
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    stream_destroy(s);
    return 1e3 * ms[REPEATS / 2] / copies;
}

// ---- the work of one shape --------------------------------------------------------------------------------

enum { LOAD_ALONE, LOAD_ROWS, LOAD_NORM, LOADS };
typedef struct {
    int n, m, pitch, batch;
    float *u, *sumsq, *scale;
    void *x, *y, *a, *b, *work, *raw;
    NsOptions options;
    Baseline baseline;
    int primitive;
    double load_us[LOADS];
} Bench;

// The numbers repeat after a prime of them, so that no two matrices are alike.
static float *gaussian_matrices(int64_t count)
{
    enum { PERIOD = 1999993 };
    Random r = {7};
    float *host = xcalloc((size_t)count, sizeof *host),
          *u = device_alloc((size_t)count * sizeof *u, "matrices");
    for (int64_t i = 0; i < count; i++)
        host[i] = i < PERIOD ? (float)random_normal(&r) : host[i - PERIOD];
    copy_to_device(NULL, u, host, (size_t)count * sizeof *u);
    stream_synchronize(NULL);
    free(host);
    return u;
}

static void run_baseline(cudaStream_t s, void *p)
{
    Bench *k = p;
    baseline_run(&k->baseline, s, k->u, k->m, k->sumsq);
}

static void run_load(cudaStream_t s, void *p)
{
    Bench *k = p;
    ns_load(s, NS_BF16,
            &(NsLoad){.x = k->x,
                      .sumsq = k->sumsq,
                      .u = k->u,
                      .u_stride = (int64_t)k->n * k->m,
                      .kappa = 1.02f,
                      .eps = 1e-6f,
                      .gain = 1,
                      .rows = k->n,
                      .cols = k->m,
                      .batch = k->batch});
}

static void run_load_alone(cudaStream_t s, void *p)
{
    Bench *k = p;
    ns_load(s, NS_BF16,
            &(NsLoad){.x = k->x,
                      .u = k->u,
                      .u_stride = (int64_t)k->n * k->m,
                      .kappa = 1,
                      .gain = 1,
                      .rows = k->n,
                      .cols = k->m,
                      .batch = k->batch});
}

static void run_load_rows(cudaStream_t s, void *p)
{
    Bench *k = p;
    ns_load_rows(s, NS_FP16,
                 &(NsLoad){.x = k->x,
                           .unit = k->scale,
                           .u = k->u,
                           .u_stride = (int64_t)k->n * k->m,
                           .rows = k->n,
                           .cols = k->m,
                           .batch = k->batch});
}

static void run_variant(cudaStream_t s, void *p)
{
    Bench *k = p;
    NsInput in = {k->u, k->n, k->m, k->batch, (int64_t)k->n * k->m, 0, 0};
    newton_schulz(s, &k->options, &in, k->work);
}

static double dense_gflop(const Bench *k)
{
    return k->batch * 5 * (4.0 * k->n * k->n * k->m + 2.0 * k->n * k->n * k->n) * 1e-9;
}

// The baseline on matrices of `pitch` columns, zeros behind the m of ours: cuBLAS is slow where rows do not
// start on 16 bytes.
static double time_baseline(Bench *k, double *products)
{
    k->baseline = baseline_open(k->n, k->pitch, k->batch, k->x, k->y, k->a, k->b);
    double us = median_us(run_baseline, k, 1);
    Job *loads[LOADS] = {run_load_alone, run_load_rows, run_load};
    for (int i = 0; i < LOADS; i++)
        k->load_us[i] = median_us(loads[i], k, 1);
    *products = us - k->load_us[LOAD_NORM];
    baseline_close(&k->baseline);
    char shape[48];
    snprintf(shape, sizeof shape, "%dx%d, batch %d", k->n, k->m, k->batch);
    figure("Std-5 on cuBLASLt", shape, us, "us");
    printf("  norm and load alone                %9.1f us, load by rows %.1f us, load %.1f us\n",
           k->load_us[LOAD_NORM], k->load_us[LOAD_ROWS], k->load_us[LOAD_ALONE]);
    printf("  Std-5 on cuBLASLt, %-5d columns    %9.1f us  %6.1f TFLOP/s  %4.1f%%   1.00x   products %8.1f "
           "us  1.00x\n",
           k->pitch, us, dense_gflop(k) / us * 1e3, dense_gflop(k) / us * 1e5 / peak_tflops, *products);
    return us;
}

static const struct {
    const char *label, *variant, *coefficients, *dtype, *restarts;
    bool square_gram; // Gram form for square matrices too
} rows[] = {{"Std-5 (polar) bf16", "polar", NULL, NULL, NULL, false},
            {"Std-5 (polar) fp16", "polar", NULL, "fp16", NULL, false},
            {"Turbo-4 bf16", "turbo", NULL, NULL, NULL, false},
            {"Gram-5 r2 fp16", "gram", NULL, NULL, NULL, false},
            {"Gram-5 r2 fp16, square too", "gram", NULL, NULL, NULL, true},
            {"Turbo-Gram-4 fp16", "turbo-gram", NULL, NULL, NULL, false},
            {"Turbo-Gram-4 fp16, square too", "turbo-gram", NULL, NULL, NULL, true},
            {"Turbo-Gram-4 r2 bf16", "turbo-gram", NULL, "bf16", NULL, false}};
enum { ROWS = sizeof rows / sizeof *rows };

static NsOptions row_options(int i)
{
    NsOptions o = options(rows[i].variant, rows[i].coefficients, 0, rows[i].restarts, rows[i].dtype);
    o.fallback = !rows[i].square_gram;
    return o;
}

static void time_variants(Bench *k, double baseline, double products)
{
    for (int i = 0; i < ROWS; i++) {
        if (rows[i].square_gram && k->n != k->m)
            continue;
        k->options = row_options(i);
        k->work = device_alloc(ns_workspace_bytes(&k->options, k->n, k->m, k->batch), "workspace");
        double us = median_us(run_variant, k, 1);
        device_free(k->work);
        double load = k->load_us[!k->options.aol               ? LOAD_NORM
                                 : k->options.dtype == NS_BF16 ? LOAD_ALONE
                                                               : LOAD_ROWS];
        char shape[48];
        snprintf(shape, sizeof shape, "%dx%d, batch %d", k->n, k->m, k->batch);
        figure(rows[i].label, shape, us, "us");
        printf("  %-34s %9.1f us  %6.1f TFLOP/s  %4.1f%%  %5.2fx   products %8.1f us %5.2fx\n", rows[i].label,
               us, dense_gflop(k) / us * 1e3, dense_gflop(k) / us * 1e5 / peak_tflops, baseline / us,
               us - load, products / (us - load));
    }
}

// ---- primitives -------------------------------------------------------------------------------------------

enum { P_GRAM, P_SYMMETRIC, P_APPLY, P_LOAD, P_GRAM_RAW, P_AOL, P_SCALED, P_TRANSPOSE, PRIMITIVES };
static const char *const primitive_names[PRIMITIVES] = {"gram",     "symmetric", "apply",  "load",
                                                        "gram_raw", "aol",       "scaled", "transpose"};

static void run_primitive(cudaStream_t s, void *p)
{
    Bench *k = p;
    int n = k->n, m = k->m, batch = k->batch;
    switch (k->primitive) {
    case P_GRAM:
        ns_gram(AT_ONCE(s, NS_BF16, batch), k->a, k->x, n, m);
        break;
    case P_SYMMETRIC:
        ns_symmetric(
            AT_ONCE(s, NS_BF16, batch),
            &(NsSymmetric){.c = k->b, .a = k->a, .b = k->a, .d = k->a, .alpha = 0.5f, .beta = 1, .n = n});
        break;
    case P_APPLY:
        ns_apply(AT_ONCE(s, NS_BF16, batch),
                 &(NsApply){.y = k->y, .b = k->a, .x = k->x, .alpha = 1, .a = 2, .n = n, .m = m});
        break;
    case P_LOAD:
        ns_load(s, NS_BF16,
                &(NsLoad){.x = k->x,
                          .sumsq = k->sumsq,
                          .u = k->u,
                          .u_stride = (int64_t)n * m,
                          .kappa = 1,
                          .gain = 1,
                          .rows = n,
                          .cols = m,
                          .batch = batch});
        break;
    case P_GRAM_RAW:
        ns_gram_raw(AT_ONCE(s, NS_BF16, batch), k->raw, k->x, NULL, n, m);
        break;
    case P_AOL:
        ns_aol(AT_ONCE(s, NS_BF16, batch), k->scale, k->b, k->raw, NULL, 1, n, m);
        break;
    case P_SCALED:
        ns_symmetric_scaled(AT_ONCE(s, NS_BF16, batch),
                            &(NsSymmetric){.q = k->b,
                                           .a = k->a,
                                           .b = k->a,
                                           .d = k->a,
                                           .alpha = 0.5f,
                                           .beta = 1,
                                           .diagonal = 1,
                                           .n = n},
                            k->scale, 1);
        break;
    case P_TRANSPOSE:
        ns_transpose(s, NS_BF16, k->y, k->x, n, m, batch);
        break;
    default:
        break;
    }
}

// Operations in gigaflop, of symmetric results counting the triangle of 128-tiles; bytes in gigabytes, each
// tensor once.
static void primitive_cost(const Bench *k, double *gflop, double *gbyte)
{
    double n = k->n, m = k->m, tiles = ceil(n / 128), triangle = (tiles + 1) / (2 * tiles),
           b = k->batch * 1e-9;
    double nm = n * m, nn = n * n;
    double flops[PRIMITIVES] =
        {2 * nn * m * triangle, 2 * nn * n * triangle, 2 * nn * m, 0, 2 * nn * m * triangle, 0,
         2 * nn * n * triangle};
    double bytes[PRIMITIVES] = {2 * nm + 2 * nn,
                                4 * nn,
                                4 * nm + 2 * nn,
                                6 * nm,
                                2 * nm + 4 * nn * triangle,
                                4 * nn * triangle + 2 * nn,
                                4 * nn,
                                4 * nm};
    *gflop = flops[k->primitive] * b;
    *gbyte = bytes[k->primitive] * b;
}

static void time_primitives(Bench *k)
{
    for (int p = P_LOAD; p < PRIMITIVES + P_LOAD; p++) { // the load first: it fills x
        k->primitive = p % PRIMITIVES;
        double us = median_us(run_primitive, k, 8), gflop, gbyte;
        primitive_cost(k, &gflop, &gbyte);
        printf("  %-14s %8.1f us  %7.1f TFLOP/s (%4.1f%%)  %6.2f TB/s\n", primitive_names[k->primitive], us,
               gflop / us * 1e3, gflop / us * 1e5 / peak_tflops, gbyte / us * 1e3);
    }
}

static void bench_shape(int n, int m, int batch)
{
    Bench k = {.n = n, .m = m, .pitch = ns_pitch(NS_BF16, n, m), .batch = batch};
    size_t tall = (size_t)batch * (size_t)n * (size_t)k.pitch * 2,
           square = (size_t)batch * (size_t)n * (size_t)n * 2;
    k.u = gaussian_matrices((int64_t)batch * n * m);
    k.sumsq = device_alloc((size_t)batch * 4, "norms");
    k.scale = device_alloc((size_t)batch * (size_t)n * 4, "scales");
    k.x = device_alloc(tall, "x");
    k.y = device_alloc(tall, "y");
    k.a = device_alloc(square, "a");
    k.b = device_alloc(square, "b");
    k.raw = device_alloc(ns_raw_bytes(NS_BF16, n, m, batch), "raw Gram matrices");
    printf("%d x %d, batch %d: %s\n", n, m, batch, ns_path_name(ns_iteration_path(NS_BF16, n, m)));
    double products, baseline = time_baseline(&k, &products);
    time_variants(&k, baseline, products);
    time_primitives(&k);
    device_free(k.u);
    device_free(k.sumsq);
    device_free(k.scale);
    device_free(k.x);
    device_free(k.y);
    device_free(k.a);
    device_free(k.b);
    device_free(k.raw);
}

// ---- errors -----------------------------------------------------------------------------------------------

static double gpu_polar_error(const NsOptions *o, const float *u, const double *polar, int n, int m)
{
    int64_t count = (int64_t)n * m;
    float *du = device_alloc((size_t)count * 4, "matrix");
    void *work = device_alloc(ns_workspace_bytes(o, n, m, 1), "workspace");
    uint16_t *host = xcalloc((size_t)count, 2);
    copy_to_device(NULL, du, u, (size_t)count * 4);
    copy_to_host(NULL, host, newton_schulz(NULL, o, &(NsInput){du, n, m, 1, 0, 0, 0}, work),
                 (size_t)count * 2);
    stream_synchronize(NULL);
    double *q = matrix(n, m);
    for (int64_t i = 0; i < count; i++) {
        _Float16 h;
        memcpy(&h, &host[i], 2);
        q[i] = o->dtype == NS_FP16 ? (double)h : (double)bf16_to_float((bf16){host[i]});
    }
    double error = relative_error(q, polar, count);
    device_free(du);
    device_free(work);
    free(host);
    free(q);
    return error;
}

// U diag(s) V with known U V, so that the polar factor is exact: spectra of full rank only.
static void print_errors(void)
{
    static const SpectrumKind kinds[] = {LINEAR, GAMMA, LOG_UNIFORM, LOGSPACE_3, POWER_LAW};
    enum { KINDS = 5 };
    Random r = {11};
    Frames f = make_frames(&r, 256, 768);
    float *u[KINDS];
    for (int i = 0; i < KINDS; i++)
        u[i] = with_spectrum(&f, kinds[i], &r);
    printf(
        "polar error against the exact factor, 256 x 768 (the tuples themselves leave most of it)\n  %-30s",
        "");
    for (int i = 0; i < KINDS; i++)
        printf("  %-22s", spectrum_names[kinds[i]]);
    printf("  worst\n");
    for (int k = 0; k < ROWS; k++) {
        if (rows[k].square_gram)
            continue;
        NsOptions o = row_options(k);
        double worst = 0;
        printf("  %-30s", rows[k].label);
        for (int i = 0; i < KINDS; i++) {
            double error = gpu_polar_error(&o, u[i], f.polar, 256, 768);
            worst = fmax(worst, error);
            printf("  %-22.4f", error);
        }
        printf("  %.4f\n", worst);
    }
    for (int i = 0; i < KINDS; i++)
        free(u[i]);
    free_frames(&f);
}

int main(int argc, char **argv)
{
    set_program_name("bench_ns", -1);
    figures_open(&argc, argv);
    int only = argc > 1 ? atoi(argv[1]) : -1;
    if (argc > 2 || only >= SHAPES)
        fatal(EXIT_USAGE, "usage: bench_ns [--csv FILE] [shape from 0 to %d]", SHAPES - 1);
    backend_open(0);
    ns_reserve();
    printf("TFLOP/s and %% of %g count the dense operations of Std-5 in every row: they compare times, not "
           "efficiencies\n",
           peak_tflops);
    for (int i = 0; i < SHAPES; i++)
        if (only < 0 || only == i)
            bench_shape(shapes[i].n, shapes[i].m, shapes[i].batch);
    if (only < 0)
        print_errors();
    ns_release();
    return 0;
}
