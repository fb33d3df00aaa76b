// Matrix products through cuBLASLt, in row-major terms.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include <cublasLt.h>

// D (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C, row-major, beta 0 or 1, C of D's type and leading
// dimension (may be D). Compared bytewise: without padding, which copies need not keep.
typedef struct {
    int m, n, k;
    int transpose_a, transpose_b; // A stored (k, m), B stored (n, k)
    cudaDataType_t type_a, type_b, type_d;
    int accumulate;             // beta
    int fast_fp8;               // FP8 sums may stay in the tensor cores' own, narrower accumulator
    int device_alpha;           // alpha is read from device memory: of gemm_scaled
    int batch;                  // 1 or more, `stride_*` elements apart
    int64_t lda, ldb, ldd;      // elements between rows as stored
    int64_t stride_b, stride_d; // 0: the same matrix for all; A is one for all
} GemmShape;
static_assert(sizeof(GemmShape) == 12 * sizeof(int) + 5 * sizeof(int64_t), "no padding");

// Packed bf16 operands, one matrix.
GemmShape gemm_shape(int m, int n, int k, bool transpose_a, bool transpose_b, cudaDataType_t type_d,
                     bool accumulate);
// Queues the product. c may be NULL when the shape does not accumulate.
void gemm(Stream s, const GemmShape *g, void *d, const void *a, const void *b, const void *c, float alpha);
// alpha: (1) fp32 in device memory, or NULL: 1
void gemm_scaled(Stream s, GemmShape g, void *d, const void *a, const void *b, const void *c,
                 const float *alpha);
// Times the library's candidates on memory of its own and keeps the fastest of those that give the same bits
// as its first choice: so the choice, which depends on the clock, never changes a result. A shape that was
// not tuned runs with the first choice. Fatal where the library cannot multiply these.
void gemm_tune(const GemmShape *g);
// The same; but false where it has no algorithm, or refuses to launch the first that it names.
bool gemm_try(const GemmShape *g);
