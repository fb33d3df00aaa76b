// The primitives from which llmc/newton_schulz.c composes every Newton-Schulz variant; a backend provides these and no more.
//
// Conventions
//   All pointers are device memory, owned by the caller; matrices are row-major and packed, the batch is the slowest index.
//   n <= m always (ns_load transposes tall matrices). Any size from 1 on; batch 0 does nothing.
//   `void *` tensors hold elements of the iteration dtype: ns_element_size(dtype) bytes each. Products accumulate in fp32
//   and are rounded once, to nearest even, where they are stored; fp16 keeps its subnormals and overflows to infinity.
//   Buffers start on 16 bytes; when n*m*element is no multiple of 16, later matrices and later chunks of a batch do not.
//   An output never overlaps an input unless the comment says "in place".
//   Sums have an order that depends on the shape only, never on the batch: a matrix gives the same bits in every batch.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *Stream; // the CPU backend ignores it

typedef enum { NS_BF16, NS_FP16, NS_FP32 } NsDtype;

// The CPU backend keeps every dtype in ns_real, holding values rounded to the dtype. In the exact build that is double and
// NS_FP32 means no rounding at all, which makes it an fp64 reference.
#ifdef FLOATX_FP32
typedef double ns_real;
#else
typedef float ns_real;
#endif

size_t ns_element_size(NsDtype dtype); // bytes; on the CPU sizeof(ns_real) for all

// sumsq_i = sum of squares of matrix i.  sumsq (batch) fp32 out; u fp32: matrix i is `count` elements from u + i*stride
void ns_sum_squares(Stream s, float *sumsq, const float *u, int64_t count, int64_t stride, int batch);

// x_i = u_i * (gain / (kappa * sqrt(sumsq_i) + eps)), normalised in fp32 before the cast (a cast first could overflow fp16).
//   x (batch, rows, cols), or (batch, cols, rows) when transpose; u fp32: matrix i is (rows, cols) from u + i*u_stride
//   sumsq_i = 0 gives zeros, also for eps = 0. sumsq_i not finite gives NaN: a spoilt gradient must show and not vanish.
void ns_load(Stream s, NsDtype dtype, void *x, const float *u, int64_t u_stride, const float *sumsq, float kappa, float eps,
             float gain, int rows, int cols, int batch, bool transpose);

// a = x x^T, exactly symmetric.  a (batch, n, n) in out_dtype (that of x, or NS_FP32 for ns_aol);  x (batch, n, m)
void ns_gram(Stream s, NsDtype dtype, NsDtype out_dtype, void *a, const void *x, int n, int m, int batch);

// c = alpha a b + beta d, for a product that is symmetric because a and b commute: the lower triangle is computed and
// mirrored, which also removes the asymmetry that rounding brings in.  a, b, c, d (batch, n, n); a, b, d may be one tensor
void ns_symmetric(Stream s, NsDtype dtype, void *c, float alpha, const void *a, const void *b, float beta, const void *d, int n,
                  int batch);

// q = z + a I.  q, z (batch, n, n)
void ns_add_diagonal(Stream s, NsDtype dtype, void *q, const void *z, float a, int n, int batch);

// y = b x + a x; a = 0 leaves the second term out.  b (batch, n, n), x, y (batch, n, m)
void ns_apply(Stream s, NsDtype dtype, void *y, const void *b, const void *x, float a, int n, int m, int batch);

// Almost-orthogonal scaling: s_i = gain / sqrt(1.02 * sum_j |raw_ij|), 0 where the sum is 0;  a = diag(s) raw diag(s).
// The sums and the scaling are in fp32 from the unrounded Gram matrix: in fp16 the Gram entries of small rows would vanish.
//   scale (batch, n) fp32 out;  a (batch, n, n) out, exactly symmetric;  raw (batch, n, n) NS_FP32, by ns_gram
void ns_aol(Stream s, NsDtype dtype, float *scale, void *a, const void *raw, float gain, int n, int batch);

// x = diag(scale) x, in place.  x (batch, n, m);  scale (batch, n) fp32
void ns_scale_rows(Stream s, NsDtype dtype, void *x, const float *scale, int n, int m, int batch);

// y_i = x_i^T.  x (batch, rows, cols), y (batch, cols, rows)
void ns_transpose(Stream s, NsDtype dtype, void *y, const void *x, int rows, int cols, int batch);

#ifdef __cplusplus
}
#endif
