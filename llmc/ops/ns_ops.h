// The primitives from which llmc/optim/newton_schulz.c composes every Newton-Schulz variant; a backend
// provides these and no more.
//
// Conventions
//   All pointers are device memory, owned by the caller; the batch is the slowest index, matrices are
//   row-major. n <= m always (ns_load transposes tall matrices). Any size from 1 on; batch 0 does nothing.
//   `void *` tensors hold elements of the iteration dtype: ns_element_size(dtype) bytes each. Products
//   accumulate in fp32 and are rounded once, to nearest even, where they are stored; fp16 keeps its
//   subnormals and overflows to infinity. Those of shape (batch, n, m) have rows ns_pitch() elements apart,
//   what lies between them is undefined; all others are packed. Buffers start on 16 bytes.
//   An output never overlaps an input unless the comment says "in place"; two buffers of a chain are the same
//   or have no byte in common, and matrix i of one is used together with matrix i of the others only.
//   Sums have an order that depends on the shape only, never on the batch: a matrix gives the same bits in
//   every batch.
#pragma once
#include "llmc/ops/backend.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef enum { NS_BF16, NS_FP16, NS_FP32 } NsDtype;

// The CPU backend keeps every dtype in ns_real, holding values rounded to the dtype. In the exact build that
// is double and NS_FP32 means no rounding at all, which makes it an fp64 reference.
#ifdef FLOATX_FP32
typedef double ns_real;
#else
typedef float ns_real;
#endif

size_t ns_element_size(NsDtype dtype); // bytes; on the CPU sizeof(ns_real) for all

int ns_pitch(NsDtype dtype, int n, int m); // m or a little more

// Products of one batch. Between ns_chain_begin and ns_chain_end a backend may hold them back and run them
// together, each matrix at its own pace: results are valid, and other ops may use the memory that they use,
// after ns_chain_end. Without these two each product is launched by its own call.
typedef struct {
    Stream stream;
    NsDtype dtype;
    int batch;
    struct NsTasks *tasks; // the backend's, from ns_chain_begin to ns_chain_end; else NULL
} NsChain;
void ns_chain_begin(NsChain *chain);
void ns_chain_end(NsChain *chain);

// x_i = u_i * (gain / (kappa * |u_i| + eps)) with the Frobenius norm, in fp32 before the cast (a cast first
// could overflow fp16).
//   |u_i| = 0 gives zeros, also for eps = 0. |u_i| not finite gives NaN: a spoilt gradient must show and not
//   vanish. sumsq NULL: x_i = gain u_i, no norm is computed
typedef struct {
    void *x;        // (batch, rows, cols), or (batch, cols, rows) when transpose, out
    float *sumsq;   // ns_load: (batch) fp32 out: |u_i|^2; or NULL
    float *unit;    // ns_load_rows: (batch, rows of x) fp32 out
    const float *u; // fp32: matrix i is (rows, cols) packed from u + i*u_stride
    int64_t u_stride;
    float kappa, eps, gain; // ns_load
    int rows, cols, batch;
    bool transpose;
} NsLoad;
void ns_load(Stream s, NsDtype dtype, const NsLoad *l);

// Rows of x brought to about one size, each by a power of two of its own, which takes no norm of the whole
// first:
//   x_ij = u_ij / unit_i with max_j |x_ij| within 32 to 64, or beside that where the unit would leave 2^-100
//   to 2^100
//   unit: 1 for a row of zeros, NaN, and so x, where an entry is not finite
void ns_load_rows(Stream s, NsDtype dtype, const NsLoad *l);

// a = x x^T, exactly symmetric.  a (batch, n, n) out;  x (batch, n, m)
void ns_gram(NsChain *chain, void *a, const void *x, int n, int m);

// c = alpha a b + beta d, for a product that is symmetric because a and b commute: the lower triangle is
// computed and mirrored, which also removes the asymmetry that rounding brings in.  q = c + diagonal I, from
// the rounded c.
typedef struct {
    void *c, *q;           // (batch, n, n) out, either may be NULL
    const void *a, *b, *d; // (batch, n, n), may be one tensor; beta = 0 leaves d out
    float alpha, beta, diagonal;
    int n;
} NsSymmetric;
void ns_symmetric(NsChain *chain, const NsSymmetric *p);

// y = alpha b x + a x; a = 0 leaves the second term out.
typedef struct {
    void *y;           // (batch, n, m) out
    const void *b, *x; // (batch, n, n), (batch, n, m)
    float alpha, a;
    int n, m;
    bool packed; // y's rows
} NsApply;
void ns_apply(NsChain *chain, const NsApply *p);

// Almost-orthogonal scaling in two steps. raw = x x^T unrounded, in a form of the backend's own: in fp16 the
// entries of small rows would vanish.  raw ns_raw_bytes() out;  x (batch, n, m);  unit (batch, n) fp32 from
// ns_load_rows,
//                     NULL: 1, for both steps
size_t ns_raw_bytes(NsDtype dtype, int n, int m, int batch);
void ns_gram_raw(NsChain *chain, void *raw, const void *x, const float *unit, int n, int m);
#define NS_AOL_LEAST 1e-36f
// s_i = gain / sqrt(1.02 * sum_j |raw_ij| unit_j / unit_i), 0 where the sum is below NS_AOL_LEAST: the
// product of two scales must stay finite. With units diag(s) x is what it would be without.
//   a = diag(s) raw diag(s), in fp32, rounded once.
//   scale (batch, n) fp32 out: s;  a (batch, n, n) out, exactly symmetric
void ns_aol(NsChain *chain, float *scale, void *a, const void *raw, const float *unit, float gain, int n,
            int m);
// q = z diag(factor scale), of the z that ns_symmetric makes as q: the same bits. Finite values beyond the
// range of fp16 become the largest of their sign.
//   p as in ns_symmetric, c NULL;  scale (batch, n) fp32, from the ns_aol that wrote a or b or what they were
//                                  computed from
void ns_symmetric_scaled(NsChain *chain, const NsSymmetric *p, const float *scale, float factor);

// All steps x <- a x + (b A + c A^2) x, A = x x^T, in place of the primitives between ns_load and the result,
// for shapes that the backend has it for.
enum { NS_MAX_STEPS = 16 };
typedef struct {
    int steps;
    float a[NS_MAX_STEPS], b[NS_MAX_STEPS], c[NS_MAX_STEPS];
    bool aol; // the first step's A is scaled as by ns_aol, and its x as by ns_symmetric_scaled
    float aol_gain, aol_factor;
} NsIteration;
bool ns_iterates(NsDtype dtype, int n, int m);
typedef struct {
    void *x, *spare; // (batch, n, m), m = ns_pitch(), x in; they take turns: the result is in x after an even
                     // number of steps
    const float *unit; // (batch, n) fp32 from ns_load_rows, for AOL; NULL: 1
    int n, m, batch;
} NsMatrices;
void ns_iterate(Stream s, NsDtype dtype, const NsIteration *it, const NsMatrices *x);

// y_i = x_i^T.  x (batch, n, m);  y (batch, m, n) packed, out
void ns_transpose(Stream s, NsDtype dtype, void *y, const void *x, int n, int m, int batch);

#ifdef __cplusplus
}
#endif
