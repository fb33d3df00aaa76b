// The yardstick of bench_ns: the standard 5-step iteration on cuBLASLt, as well as it can be called. bf16
// with fp32 sums, batched, the terms b A and a X inside the products, the fastest of the algorithms that the
// library proposes, timed one by one.
#pragma once
#include "dev/test/ns_default.h"
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#define BENCH_CUDA(call) \
    do { \
        cudaError_t status_ = (call); \
        if (status_ != cudaSuccess) \
            fatal(EXIT_BAD_INPUT, "%s: %s", #call, cudaGetErrorString(status_)); \
    } while (0)
#define BENCH_LT(call) \
    do { \
        cublasStatus_t status_ = (call); \
        if (status_ != CUBLAS_STATUS_SUCCESS) \
            fatal(EXIT_BAD_INPUT, "%s: cuBLASLt status %d", #call, (int)status_); \
    } while (0)

enum { LT_CANDIDATES = 8, LT_WORKSPACE = 64 << 20 };

typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
} LtProduct;

typedef struct {
    cublasLtHandle_t handle;
    void *workspace;
    LtProduct gram, square, apply;
    int n, m, batch;
    void *x, *y, *a, *b; // bf16: (batch, n, m) twice, (batch, n, n) twice
} Baseline;

static inline cublasLtMatrixLayout_t lt_layout(int64_t rows, int64_t cols, int64_t pitch, int batch,
                                               int64_t stride)
{
    cublasLtMatrixLayout_t l;
    BENCH_LT(cublasLtMatrixLayoutCreate(&l, CUDA_R_16BF, (uint64_t)rows, (uint64_t)cols, pitch));
    BENCH_LT(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    BENCH_LT(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                              sizeof stride));
    return l;
}

// out = alpha a b + beta c
typedef struct {
    void *out;
    const void *a, *b, *c;
    float alpha, beta;
} LtCall;

static inline void lt_run(const Baseline *k, const LtProduct *p, cudaStream_t s, LtCall x)
{
    BENCH_LT(cublasLtMatmul(k->handle, p->operation, &x.alpha, x.a, p->a, x.b, p->b, &x.beta, x.c, p->c,
                            x.out, p->c, &p->algorithm, k->workspace, LT_WORKSPACE, s));
}

// Median time of one call, microseconds.
static inline double lt_time(const Baseline *k, const LtProduct *p, LtCall x)
{
    enum { CALLS = 10 };
    cudaEvent_t from, to;
    BENCH_CUDA(cudaEventCreate(&from));
    BENCH_CUDA(cudaEventCreate(&to));
    for (int i = 0; i < CALLS + 3; i++) {
        if (i == 3)
            BENCH_CUDA(cudaEventRecord(from, NULL));
        lt_run(k, p, NULL, x);
    }
    BENCH_CUDA(cudaEventRecord(to, NULL));
    BENCH_CUDA(cudaEventSynchronize(to));
    float ms;
    BENCH_CUDA(cudaEventElapsedTime(&ms, from, to));
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return 1e3 * ms / CALLS;
}

static inline void lt_choose(const Baseline *k, LtProduct *p, LtCall x)
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[LT_CANDIDATES];
    int count = 0;
    size_t bytes = LT_WORKSPACE;
    BENCH_LT(cublasLtMatmulPreferenceCreate(&preference));
    BENCH_LT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                  &bytes, sizeof bytes));
    BENCH_LT(cublasLtMatmulAlgoGetHeuristic(k->handle, p->operation, p->a, p->b, p->c, p->c, preference,
                                            LT_CANDIDATES, found, &count));
    if (count == 0)
        fatal(EXIT_BAD_INPUT, "cuBLASLt knows no algorithm for a product of the baseline");
    double best = 0;
    int chosen = 0;
    for (int i = 0; i < count; i++) {
        p->algorithm = found[i].algo;
        double us = lt_time(k, p, x);
        if (i == 0 || us < best) {
            best = us;
            chosen = i;
        }
    }
    p->algorithm = found[chosen].algo;
    cublasLtMatmulPreferenceDestroy(preference);
}

// Row-major matrices are the transposes of what cuBLASLt calls column-major: X is a (m, n) there, and a
// symmetric matrix itself.
static inline Baseline baseline_open(int n, int m, int batch, void *x, void *y, void *a, void *b)
{
    Baseline k = {.n = n, .m = m, .batch = batch, .x = x, .y = y, .a = a, .b = b};
    BENCH_LT(cublasLtCreate(&k.handle));
    BENCH_CUDA(cudaMalloc(&k.workspace, LT_WORKSPACE));
    LtProduct *all[] = {&k.gram, &k.square, &k.apply};
    for (int i = 0; i < 3; i++)
        BENCH_LT(cublasLtMatmulDescCreate(&all[i]->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t transposed = CUBLAS_OP_T;
    BENCH_LT(cublasLtMatmulDescSetAttribute(k.gram.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                            sizeof transposed));
    int64_t square = (int64_t)n * n, tall = (int64_t)n * m;
    k.gram.a = k.gram.b = k.apply.a = k.apply.c = lt_layout(m, n, m, batch, tall);
    k.gram.c = k.square.a = k.square.b = k.square.c = k.apply.b = lt_layout(n, n, n, batch, square);
    lt_choose(&k, &k.gram, (LtCall){a, x, x, a, 1, 0});
    lt_choose(&k, &k.square, (LtCall){b, a, a, a, 1, 1});
    lt_choose(&k, &k.apply, (LtCall){y, x, b, x, 1, 1});
    return k;
}

static inline void baseline_close(Baseline *k)
{
    LtProduct *all[] = {&k->gram, &k->square, &k->apply};
    for (int i = 0; i < 3; i++)
        cublasLtMatmulDescDestroy(all[i]->operation);
    cublasLtMatrixLayoutDestroy(k->gram.a);
    cublasLtMatrixLayoutDestroy(k->gram.c);
    cublasLtDestroy(k->handle);
    cudaFree(k->workspace);
}

// u (batch, n, m_of_u) fp32, packed, n <= m; the same norm and load as ours, into rows of ns_pitch(): k->m
// must be that.
static inline void *baseline_run(const Baseline *k, cudaStream_t s, const float *u, int m_of_u, float *sumsq)
{
    NsOptions o = ns_options_default(NS_POLAR);
    NsLoad load = {};
    load.x = k->x;
    load.sumsq = sumsq;
    load.u = u;
    load.u_stride = (int64_t)k->n * m_of_u;
    load.kappa = o.kappa;
    load.eps = o.eps;
    load.gain = 1;
    load.rows = k->n;
    load.cols = m_of_u;
    load.batch = k->batch;
    ns_load(s, NS_BF16, &load);
    void *x = k->x, *y = k->y;
    for (int i = 0; i < o.steps; i++) {
        lt_run(k, &k->gram, s, (LtCall){k->a, x, x, k->a, 1, 0});
        lt_run(k, &k->square, s,
               (LtCall){k->b, k->a, k->a, k->a, (float)o.tuples[i].c, (float)o.tuples[i].b});
        lt_run(k, &k->apply, s, (LtCall){y, x, k->b, x, 1, (float)o.tuples[i].a});
        void *swap = x;
        x = y;
        y = swap;
    }
    return x;
}
