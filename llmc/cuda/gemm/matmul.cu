// Plans of the model's matrix products, and the ops that run them.
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/gemm/sm90_weight_grad.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"
#include "llmc/cuda/gemm/sm90_qkv.cuh"
#include <stdlib.h>
#include <string.h>

#define CUBLAS_CHECK(expression) \
    do { \
        cublasStatus_t status_ = (expression); \
        if (status_ == CUBLAS_STATUS_SUCCESS) \
            break; \
        device_check_failure(#expression, __FILE__, __LINE__); \
        fatal(EXIT_BAD_INPUT, "cuBLASLt: %s at %s:%d: %s (%s)", #expression, __FILE__, __LINE__, \
              cublasLtGetStatusString(status_), cublasLtGetStatusName(status_)); \
    } while (0)

enum { CANDIDATES = 12, TIMED_RUNS = 3 };
static const size_t WORKSPACE_BYTES = (size_t)64 << 20;

typedef struct {
    GemmShape shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d; // as cuBLAS sees them: column-major, so our B is its A
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    int candidates, chosen, same_bits; // candidates 0: the library cannot multiply these
    cublasStatus_t status;             // then, why
    bool tuned;
    float first_ms, chosen_ms, fastest_ms; // fastest of all, whatever its bits
} Plan;

static struct {
    cublasLtHandle_t handle;
    float *zero_one; // (2) device: beta, where alpha is in device memory
    Plan *plans;
    int count, capacity;
} lt;

GemmShape gemm_shape(int m, int n, int k, bool transpose_a, bool transpose_b, cudaDataType_t type_d,
                     bool accumulate)
{
    GemmShape g = {};
    g.m = m;
    g.n = n;
    g.k = k;
    g.transpose_a = transpose_a;
    g.transpose_b = transpose_b;
    g.type_a = g.type_b = CUDA_R_16BF;
    g.type_d = type_d;
    g.lda = transpose_a ? m : k;
    g.ldb = transpose_b ? k : n;
    g.ldd = n;
    g.batch = 1;
    g.accumulate = accumulate;
    return g;
}

// ---- plans -----------------------------------------------------------------------------------------------

static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld, int batch,
                                     int64_t stride)
{
    cublasLtMatrixLayout_t l;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&l, type, (uint64_t)rows, (uint64_t)cols, ld));
    int32_t count = batch;
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                  sizeof stride));
    return l;
}

static void describe(Plan *p)
{
    const GemmShape *g = &p->shape;
    cublasOperation_t op_a = g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                      op_b = g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    int8_t fast = (int8_t)g->fast_fp8;
    int32_t pointers = g->device_alpha ? CUBLASLT_POINTER_MODE_DEVICE : CUBLASLT_POINTER_MODE_HOST;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_POINTER_MODE, &pointers,
                                                sizeof pointers));
    p->a = layout(g->type_b, g->transpose_b ? g->k : g->n, g->transpose_b ? g->n : g->k, g->ldb, g->batch,
                  g->stride_b);
    p->b = layout(g->type_a, g->transpose_a ? g->m : g->k, g->transpose_a ? g->k : g->m, g->lda, g->batch, 0);
    p->d = layout(g->type_d, g->n, g->m, g->ldd, g->batch, g->stride_d);
}

static void find_candidates(Plan *p)
{
    cublasLtMatmulPreference_t want;
    uint32_t alignment =
        16; // parts of arenas start on 16 bytes, not on the 256 that the library would assume
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&want));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(want, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &WORKSPACE_BYTES, sizeof WORKSPACE_BYTES));
    static const cublasLtMatmulPreferenceAttributes_t operands[] =
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(want, operands[i], &alignment, sizeof alignment));
    p->status = cublasLtMatmulAlgoGetHeuristic(lt.handle, p->operation, p->a, p->b, p->d, p->d, want,
                                               CANDIDATES, p->found, &p->candidates);
    if (p->status != CUBLAS_STATUS_SUCCESS)
        p->candidates = 0;
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(want));
}

static Plan *plan_for(const GemmShape *g)
{
    for (int i = 0; i < lt.count; i++)
        if (memcmp(&lt.plans[i].shape, g, sizeof *g) == 0)
            return &lt.plans[i];
    if (lt.count == lt.capacity) {
        lt.capacity = lt.capacity ? 2 * lt.capacity : 32;
        lt.plans = (Plan *)xrealloc(lt.plans, (size_t)lt.capacity, sizeof *lt.plans);
    }
    Plan *p = &lt.plans[lt.count++];
    memset(p, 0, sizeof *p);
    p->shape = *g;
    describe(p);
    find_candidates(p);
    return p;
}

static void refuse_without_algorithm(const Plan *p)
{
    const GemmShape *g = &p->shape;
    if (p->candidates == 0)
        fatal(EXIT_BAD_INPUT,
              "cuBLASLt has no algorithm for a product of %d x %d x %d (types %d, %d -> %d) on %s: %s", g->m,
              g->k, g->n, (int)g->type_a, (int)g->type_b, (int)g->type_d, device_state.name,
              cublasLtGetStatusString(p->status));
}

// alpha: host, or device when the shape says so
static cublasStatus_t run_plan(Stream s, const Plan *p, int which, void *d, const void *a, const void *b,
                               const void *c, const float *alpha)
{
    static const float zero_one[2] = {0, 1};
    const float *beta = (p->shape.device_alpha ? lt.zero_one : zero_one) + (p->shape.accumulate ? 1 : 0);
    return cublasLtMatmul(lt.handle, p->operation, alpha, b, p->a, a, p->b, beta, c ? c : d, p->d, d, p->d,
                          &p->found[which].algo, scratch_of(s, SCRATCH_LIBRARY, WORKSPACE_BYTES),
                          WORKSPACE_BYTES, s);
}

static void run(Stream s, const GemmShape *g, void *d, const void *a, const void *b, const void *c,
                const float *alpha)
{
    if (g->m <= 0 || g->n <= 0)
        return;
    const Plan *p = plan_for(g);
    refuse_without_algorithm(p);
    CUBLAS_CHECK(run_plan(s, p, p->chosen, d, a, b, c, alpha));
}

void gemm(Stream s, const GemmShape *g, void *d, const void *a, const void *b, const void *c, float alpha)
{
    run(s, g, d, a, b, c, &alpha);
}

void gemm_scaled(Stream s, GemmShape g, void *d, const void *a, const void *b, const void *c,
                 const float *alpha)
{
    static const float one = 1;
    g.device_alpha = alpha != NULL;
    run(s, &g, d, a, b, c, alpha ? alpha : &one);
}

// ---- tuning ----------------------------------------------------------------------------------------------

// Numbers whose sums are rounded differently when the order changes; bytes that are finite in FP8 for
// one-byte types.
__global__ void fill_random_kernel(void *out, size_t bytes, bool one_byte)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (; i < bytes / 2; i += step) {
        uint32_t x = (uint32_t)i * 2654435761u + 12345u;
        x ^= x >> 15;
        x *= 2246822519u;
        x ^= x >> 13;
        if (one_byte)
            ((uint16_t *)out)[i] = (uint16_t)(x & 0xbfbfu); // exponent below the top: no NaN, no infinity
        else
            ((__nv_bfloat16 *)out)[i] = __float2bfloat16((float)(int32_t)x * 4.6e-10f);
    }
}

__global__ void count_differences_kernel(unsigned long long *count, const uint32_t *x, const uint32_t *y,
                                         size_t words)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    unsigned long long mine = 0;
    for (; i < words; i += step)
        mine += x[i] != y[i];
    if (mine)
        atomicAdd(count, mine); // of integers: the order does not matter
}

static size_t type_bytes(cudaDataType_t t)
{
    return t == CUDA_R_32F ? 4 : t == CUDA_R_16BF || t == CUDA_R_16F ? 2 : 1;
}

typedef struct {
    void *a, *b, *d, *first_d;
    unsigned long long *differences;
    size_t bytes_d;
    Stream stream;
    cudaEvent_t begin, end;
} Trial;

static void trial_open(Trial *t, const GemmShape *g)
{
    size_t rows_a = (size_t)(g->transpose_a ? g->k : g->m), rows_b = (size_t)(g->transpose_b ? g->n : g->k);
    size_t bytes_a = rows_a * (size_t)g->lda * type_bytes(g->type_a);
    size_t bytes_b =
        (rows_b * (size_t)g->ldb + (size_t)(g->batch - 1) * (size_t)g->stride_b) * type_bytes(g->type_b);
    t->bytes_d = ((size_t)g->m * (size_t)g->ldd + (size_t)(g->batch - 1) * (size_t)g->stride_d) *
                 type_bytes(g->type_d);
    static const char what[] = "timing a matrix product";
    t->a = device_malloc(bytes_a, what);
    t->b = device_malloc(bytes_b, what);
    t->d = device_malloc(t->bytes_d, what);
    t->first_d = device_malloc(t->bytes_d, what);
    t->differences = (unsigned long long *)device_malloc(sizeof *t->differences, what);
    t->stream = stream_create();
    CUDA_CHECK(cudaEventCreate(&t->begin));
    CUDA_CHECK(cudaEventCreate(&t->end));
    fill_random_kernel<<<1024, 256, 0, t->stream>>>(t->a, bytes_a, type_bytes(g->type_a) == 1);
    fill_random_kernel<<<1024, 256, 0, t->stream>>>(t->b, bytes_b, type_bytes(g->type_b) == 1);
    CHECK_LAUNCH();
}

static void trial_close(Trial *t)
{
    void *memory[] = {t->a, t->b, t->d, t->first_d, t->differences};
    for (int i = 0; i < 5; i++)
        CUDA_CHECK(cudaFree(memory[i]));
    CUDA_CHECK(cudaEventDestroy(t->begin));
    CUDA_CHECK(cudaEventDestroy(t->end));
    stream_destroy(t->stream);
}

// False when the candidate does not run; p->status says why. Otherwise its time, and whether it gives the
// same bits as candidate 0.
static bool try_candidate(Trial *t, Plan *p, int which, float *ms, bool *same)
{
    static const float one = 1;
    const float *alpha = p->shape.device_alpha ? lt.zero_one + 1 : &one;
    void *out = which ? t->d : t->first_d;
    CUDA_CHECK(cudaMemsetAsync(out, 0, t->bytes_d, t->stream));
    p->status = run_plan(t->stream, p, which, out, t->a, t->b, NULL, alpha);
    if (p->status != CUBLAS_STATUS_SUCCESS)
        return false;
    unsigned long long differences = 0;
    if (which) {
        CUDA_CHECK(cudaMemsetAsync(t->differences, 0, sizeof differences, t->stream));
        count_differences_kernel<<<1024, 256, 0, t->stream>>>(t->differences, (const uint32_t *)t->d,
                                                              (const uint32_t *)t->first_d, t->bytes_d / 4);
        CUDA_CHECK(cudaMemcpyAsync(&differences, t->differences, sizeof differences, cudaMemcpyDeviceToHost,
                                   t->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(t->stream));
    *same = differences == 0;
    *ms = INFINITY;
    for (int i = 0; i < TIMED_RUNS; i++) {
        float now;
        CUDA_CHECK(cudaEventRecord(t->begin, t->stream));
        run_plan(t->stream, p, which, t->d, t->a, t->b, NULL, alpha);
        CUDA_CHECK(cudaEventRecord(t->end, t->stream));
        CUDA_CHECK(cudaEventSynchronize(t->end));
        CUDA_CHECK(cudaEventElapsedTime(&now, t->begin, t->end));
        if (now < *ms)
            *ms = now;
    }
    return true;
}

bool gemm_try(const GemmShape *g)
{
    if (g->m <= 0 || g->n <= 0)
        return true;
    Plan *p = plan_for(g);
    if (p->tuned || p->candidates == 0)
        return p->candidates > 0;
    p->tuned = true;
    Trial t;
    trial_open(&t, g);
    for (int i = 0; i < p->candidates; i++) {
        float ms;
        bool same;
        if (!try_candidate(&t, p, i, &ms, &same)) {
            if (i == 0)
                p->candidates = 0; // nothing to compare with
            continue;
        }
        if (i == 0)
            p->first_ms = p->chosen_ms = p->fastest_ms = ms;
        if (ms < p->fastest_ms)
            p->fastest_ms = ms;
        p->same_bits += same;
        // A challenger must be clearly faster: three runs do not tell two percent apart.
        if (same && ms < 0.98f * p->chosen_ms) {
            p->chosen = i;
            p->chosen_ms = ms;
        }
    }
    trial_close(&t);
    return p->candidates > 0;
}

void gemm_tune(const GemmShape *g)
{
    if (!gemm_try(g))
        refuse_without_algorithm(plan_for(g));
}

// ---- opening, closing, reporting -------------------------------------------------------------------------

static void tune_model(const OpSizes *z, int N)
{
    int d = z->dim, F = z->mlp_dim;
    GemmShape qkv = gemm_shape(N, d, d, false, true, CUDA_R_16BF, false);
    qkv.batch = 3;
    qkv.stride_b = (int64_t)d * d;
    qkv.stride_d = (int64_t)N * d;
    GemmShape shapes[] = {
        qkv,
        gemm_shape(N, d, d, false, true, CUDA_R_16BF, true),       // O, onto the residual
        gemm_shape(N, d, F, false, true, CUDA_R_16BF, true),       // proj
        gemm_shape(N, d, F, false, true, CUDA_R_16BF, false),      // gradient through fc
        gemm_shape(N, d, d, false, false, CUDA_R_16BF, false),     // through O
        gemm_shape(N, d, 3 * d, false, false, CUDA_R_16BF, false), // through QKV
        gemm_shape(d, d, N, true, false, CUDA_R_32F, true),        // weights of O
        gemm_shape(3 * d, d, N, true, false, CUDA_R_32F, true),    // of QKV
        gemm_shape(d, F, N, true, false, CUDA_R_32F, true),        // of fc and proj
    };
    enum { WEIGHTS = 6, MLP_WEIGHTS = 8 }; // where those begin
    const WeightGrad attention[] = {{.m = 3 * d, .n = d}, {.m = d, .n = d}},
                     mlp[] = {{.m = d, .n = F}, {.m = d, .n = F}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        bool own = i == 0        ? sm90_qkv_takes(d / z->heads)
                   : i < WEIGHTS ? sm90_gemm_pays(N, shapes[i].k, d, 1)
                                 : sm90_weight_grad_takes(i < MLP_WEIGHTS ? attention : mlp, 2, N);
        if (own)
            continue;
        gemm_tune(&shapes[i]);
        shapes[i].accumulate = false; // O onto nothing; weights in a step's first micro-batch
        if (i == 1 || i >= WEIGHTS)
            gemm_tune(&shapes[i]);
    }
}

void matmul_reserve(const OpSizes *sizes)
{
    CUBLAS_CHECK(cublasLtCreate(&lt.handle));
    scratch_plan(SCRATCH_LIBRARY, WORKSPACE_BYTES);
    lt.zero_one = (float *)device_alloc(2 * sizeof(float), "scratch: factors of matrix products");
    static const float zero_one[2] = {0, 1};
    CUDA_CHECK(cudaMemcpy(lt.zero_one, zero_one, sizeof zero_one, cudaMemcpyHostToDevice));
    sm90_weight_grad_reserve();
    if (sizes->tokens > 0)
        tune_model(sizes, sizes->tokens);
    for (int i = 0; i < SMALLER_SIZES && sizes->smaller[i]; i++)
        tune_model(sizes, sizes->smaller[i]);
}

void matmul_close(void)
{
    if (!lt.handle)
        return;
    for (int i = 0; i < lt.count; i++) {
        cublasLtMatmulDescDestroy(lt.plans[i].operation);
        cublasLtMatrixLayoutDestroy(lt.plans[i].a);
        cublasLtMatrixLayoutDestroy(lt.plans[i].b);
        cublasLtMatrixLayoutDestroy(lt.plans[i].d);
    }
    free(lt.plans);
    device_free(lt.zero_one);
    CUBLAS_CHECK(cublasLtDestroy(lt.handle));
    memset(&lt, 0, sizeof lt);
}

const char *matmul_description(void)
{
    static char text[256];
    int tuned = 0, changed = 0;
    float first = 0, chosen = 0, fastest = 0;
    for (int i = 0; i < lt.count; i++) {
        const Plan *p = &lt.plans[i];
        tuned += p->tuned;
        changed += p->chosen != 0;
        first += p->first_ms;
        chosen += p->chosen_ms;
        fastest += p->fastest_ms;
    }
    snprintf(text, sizeof text,
             "%d products timed, %d not by the library's first choice (sum %.3f ms instead of %.3f; %.3f "
             "with other bits)",
             tuned, changed, (double)chosen, (double)first, (double)fastest);
    return text;
}

// ---- the ops ---------------------------------------------------------------------------------------------

void matmul_forward(const ProductContext *c, const Product *p)
{
    OP_SCOPE(matmul_forward, p);
    assert(p->planes == 1 || (p->planes > 1 && !p->residual));
    Sm90Product own = {.layout = LAYOUT_NT,
                       .epilogue = p->residual ? EPILOGUE_RESIDUAL : EPILOGUE_STORE,
                       .out = p->y,
                       .x = p->x,
                       .w = p->w,
                       .source = p->residual,
                       .alpha = p->alpha,
                       .N = p->N,
                       .depth = p->in,
                       .cols = p->planes * p->out,
                       .planes = p->planes};
    if (sm90_gemm_pays(p->N, p->in, own.cols, p->planes) && sm90_gemm(c, &own))
        return;
    GemmShape g = gemm_shape(p->N, p->out, p->in, false, true, CUDA_R_16BF, p->residual != NULL);
    if (p->planes > 1) {
        g.batch = p->planes;
        g.stride_b = (int64_t)p->out * p->in;
        g.stride_d = (int64_t)p->N * p->out;
    }
    gemm_scaled(c->stream, g, p->y, p->x, p->w, p->residual, p->alpha);
}

void matmul_backward_input(const ProductContext *c, const InputGrad *p)
{
    OP_SCOPE(matmul_backward_input, p);
    Sm90Product own = {.layout = LAYOUT_NN,
                       .epilogue = EPILOGUE_STORE,
                       .out = p->dx,
                       .x = p->dy,
                       .w = p->w,
                       .N = p->N,
                       .depth = p->out,
                       .cols = p->in,
                       .planes = 1};
    if (!p->residual && sm90_gemm_pays(p->N, p->out, p->in, 1) && sm90_gemm(c, &own))
        return;
    GemmShape g = gemm_shape(p->N, p->in, p->out, false, false, CUDA_R_16BF, p->residual != NULL);
    gemm(c->stream, &g, p->dx, p->dy, p->w, p->residual, 1);
}

void matmul_weight_grads(const ProductContext *c, const WeightGrad *g, int count, int N)
{
    OP_SCOPE(matmul_weight_grads, g, count, N);
    if (sm90_weight_grad(c, g, count, N))
        return;
    for (int i = 0; i < count; i++) {
        GemmShape shape = gemm_shape(g[i].m, g[i].n, N, true, false, CUDA_R_32F, !g[i].fresh);
        gemm(c->stream, &shape, g[i].dw, g[i].a, g[i].b, g[i].fresh ? NULL : g[i].dw, 1);
    }
}
