// Matrix product in fp32 on one thread: CBLAS where OpenBLAS is, own loops otherwise.
#pragma once
#include <stdbool.h>

// c = alpha op(a) op(b) + beta c, row-major, op = transpose when asked for.
//   op(a) (m, k), op(b) (k, n), c (m, n); ld: distance of rows as stored. beta 0: c is not read.
// Safe to call from several threads at once (after blas_description, which loads the library).
void gemm(bool transpose_a, bool transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
          const float *b, int ldb, float beta, float *c, int ldc);

const char *blas_description(void); // name, version and kernel set; static
