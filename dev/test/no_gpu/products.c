// cuBLASLt of the stand-in (no_gpu.h): products are checked; what they give is compute_product's.
#include "dev/test/no_gpu/products.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static size_t element_of(cudaDataType_t type)
{
    switch (type) {
    case CUDA_R_32F:
        return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
        return 2;
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
        return 1;
    default:
        refuse("a matrix of cudaDataType %d", (int)type);
    }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
const char *cublasLtGetStatusName(cublasStatus_t s) { return s ? "an error" : "CUBLAS_STATUS_SUCCESS"; }
const char *cublasLtGetStatusString(cublasStatus_t s) { return s ? "an error of the stand-in" : "success"; }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    *p = malloc(1);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void *value,
                                                    size_t bytes)
{
    (void)p, (void)a, (void)value, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    (void)compute, (void)scale;
    *d = calloc(1, sizeof(Product));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    free(d);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
                                              const void *value, size_t bytes)
{
    Product *p = (Product *)d;
    if (a == CUBLASLT_MATMUL_DESC_TRANSA || a == CUBLASLT_MATMUL_DESC_TRANSB)
        memcpy(&p->transposed[a == CUBLASLT_MATMUL_DESC_TRANSB], value, sizeof p->transposed[0]);
    if (a == CUBLASLT_MATMUL_DESC_POINTER_MODE)
        memcpy(&p->pointers, value, sizeof p->pointers);
    (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    Layout *layout = calloc(1, sizeof *layout);
    layout->type = type;
    layout->rows = rows;
    layout->cols = cols;
    layout->ld = ld;
    layout->batch = 1;
    layout->order = CUBLASLT_ORDER_COL;
    *l = (cublasLtMatrixLayout_t)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    free(l);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                const void *value, size_t bytes)
{
    Layout *layout = (Layout *)l;
    void *to = a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT            ? (void *)&layout->batch
               : a == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET ? (void *)&layout->stride
               : a == CUBLASLT_MATRIX_LAYOUT_ORDER                ? (void *)&layout->order
                                                                  : NULL;
    if (!to)
        refuse("a matrix's attribute %d, which the stand-in does not know", (int)a);
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

typedef struct {
    uint64_t rows, cols;
} Shape;

static Shape shape(const Layout *l, bool transposed)
{
    return transposed ? (Shape){l->cols, l->rows} : (Shape){l->rows, l->cols};
}

static void check_shapes(const Product *p, const Layout *a, const Layout *b, const Layout *c)
{
    Shape left = shape(a, p->transposed[0]), right = shape(b, p->transposed[1]);
    if (left.cols != right.rows || left.rows != c->rows || right.cols != c->cols || a->batch != c->batch)
        refuse("a product of %llu x %llu, %llu x %llu and %llu x %llu", (unsigned long long)left.rows,
               (unsigned long long)left.cols, (unsigned long long)right.rows, (unsigned long long)right.cols,
               (unsigned long long)c->rows, (unsigned long long)c->cols);
    if (element_of(a->type) == 1 && (!p->transposed[0] || p->transposed[1]))
        refuse("a product in FP8 that is not transposed, not transposed");
}

static void check_matrix(const char *name, const void *p, const Layout *l)
{
    uint64_t run = l->order == CUBLASLT_ORDER_ROW ? l->cols : l->rows,
             runs = l->order == CUBLASLT_ORDER_ROW ? l->rows : l->cols;
    size_t element = element_of(l->type);
    if (!run || !runs || l->ld < (int64_t)run)
        refuse("matrix %s of %llu x %llu with rows of %lld", name, (unsigned long long)l->rows,
               (unsigned long long)l->cols, (long long)l->ld);
    size_t last = (size_t)(l->batch - 1) * (size_t)l->stride + (runs - 1) * (size_t)l->ld + run;
    need_device(name, p, last * element);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    (void)handle, (void)out, (void)preference;
    check_shapes((const Product *)d, (const Layout *)a, (const Layout *)b, (const Layout *)c);
    memset(results, 0, (size_t)wanted * sizeof *results);
    const char *without = getenv("NO_GPU_WITHOUT_FP8");
    bool fp8 = element_of(((const Layout *)a)->type) == 1,
         grads = ((const Layout *)c)->type == CUDA_R_32F && ((const Layout *)a)->type == CUDA_R_8F_E4M3 &&
                 ((const Layout *)b)->type == CUDA_R_8F_E4M3;
    *found = wanted > 0 && !(fp8 && without && (grads || strcmp(without, "gradients")));
    if (!*found)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *pa, cublasLtMatrixLayout_t a, const void *pb,
                              cublasLtMatrixLayout_t b, const void *beta, const void *pc,
                              cublasLtMatrixLayout_t c, void *pd, cublasLtMatrixLayout_t out,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes,
                              cudaStream_t s)
{
    (void)handle, (void)algorithm;
    check_shapes((const Product *)d, (const Layout *)a, (const Layout *)b, (const Layout *)out);
    check_matrix("A of a product", pa, (const Layout *)a);
    check_matrix("B of a product", pb, (const Layout *)b);
    if (pc)
        check_matrix("C of a product", pc, (const Layout *)c);
    check_matrix("D of a product", pd, (const Layout *)out);
    if (bytes)
        need_device("the workspace of a product", workspace, bytes);
    if (compute_product) {
        bool on_device = ((const Product *)d)->pointers == CUBLASLT_POINTER_MODE_DEVICE;
        ProductCall call = {.product = *(const Product *)d,
                            .alpha = *(const float *)alpha,
                            .beta = *(const float *)beta,
                            .device_alpha = on_device ? alpha : NULL,
                            .device_beta = on_device ? beta : NULL,
                            .a = pa,
                            .b = pb,
                            .c = pc,
                            .out = pd,
                            .of_a = *(const Layout *)a,
                            .of_b = *(const Layout *)b,
                            .of_c = *(const Layout *)c,
                            .of_out = *(const Layout *)out};
        stream_work(s, compute_product, &call, sizeof call);
    }
    return CUBLAS_STATUS_SUCCESS;
}
