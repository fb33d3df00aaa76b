// Matrix product in fp32 on one thread: CBLAS where OpenBLAS is, own loops otherwise.
#pragma once
#include <stdbool.h>

// Matrices are row-major, with `pitch` numbers from one row to the next.
typedef struct {
    const float *x;
    int pitch;
    bool transposed;
} GemmIn;
typedef struct {
    float *x;
    int pitch;
} GemmOut;

static inline GemmIn stored(const float *x, int pitch) { return (GemmIn){x, pitch, false}; }
static inline GemmIn transposed(const float *x, int pitch) { return (GemmIn){x, pitch, true}; }

// c = alpha a b + beta c: a (m, k), b (k, n), c (m, n). beta 0: c is not read.
// Safe to call from several threads at once (after blas_description, which loads the library).
void gemm(int m, int n, int k, float alpha, GemmIn a, GemmIn b, float beta, GemmOut c);

const char *blas_description(void); // name, version and kernel set; static
