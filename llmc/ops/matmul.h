// Contracts: matrix products. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// Multiprocessors that products leave to collectives which run beside them. A persistent kernel is shared out
// among CTAs that are all resident: where one has to wait for another to end, it takes twice as long. Sums
// have another order beside a collective, the same for the same sequence of calls.
typedef struct {
    int sms;
    int products; // how many of those that follow leave them; each counts itself off
} SharedSms;
typedef struct {
    Stream stream;
    SharedSms *shared; // host; NULL: all multiprocessors are the products'
} ProductContext;

// y = alpha x w^T (+ residual). alpha multiplies the fp32 sum.
// planes > 1: one product a plane with the same x (Q, K and V as three tensors); no residual then.
typedef struct {
    floatX *y;              // (planes, N, out) out
    const floatX *x, *w;    // (N, in), (planes, out, in)
    const floatX *residual; // (N, out) or NULL; may be y itself
    const float *alpha;     // (1) fp32, or NULL: 1
    int N, in, out, planes;
} Product;
void matmul_forward(const ProductContext *c, const Product *p);
// dx = dy w (+ residual)
typedef struct {
    floatX *dx;           // (N, in) out
    const floatX *dy, *w; // (N, out), (out, in)
    int N, in, out;
    const floatX *residual; // (N, in) or NULL
} InputGrad;
void matmul_backward_input(const ProductContext *c, const InputGrad *g);
// dw += a^T b, or dw = a^T b when fresh, for each of `count` (1 or 2) products over the same N tokens:
// together they fill a GPU better than one after the other.
typedef struct {
    float *dw;           // (m, n) fp32 in/out, or out when fresh; two of them do not overlap
    const floatX *a, *b; // (N, m), (N, n)
    int m, n;
    bool fresh; // whatever dw held is not looked at: nobody has to clear it
} WeightGrad;
enum { WEIGHT_GRADS = 2 }; // most at a time
void matmul_weight_grads(const ProductContext *c, const WeightGrad *g, int count, int N);
// y = relu(x w)^2.  x (N, in), w (in, out), y (N, out)
void matmul_relu2_forward(const ProductContext *c, floatX *y, const floatX *x, const floatX *w, int N, int in,
                          int out);
// dpre = g * 2 sqrt(y) for g = dy w, rounded as it is stored: the records' programs keep it so between the
// two.
//   dy (N, d), w (d, F), y (N, F) as matmul_relu2_forward gave it, dpre (N, F)
void matmul_relu2_backward(const ProductContext *c, floatX *dpre, const floatX *dy, const floatX *w,
                           const floatX *y, int N, int d, int F);

// The effective weight alpha w, rounded as it is stored.  out, w (n);  alpha (1) fp32
void weight_scale_forward(Stream s, floatX *out, const floatX *w, const float *alpha, int64_t n);
// From the gradient dw of an effective weight alpha w to those of its two factors, once it is complete:
// dalpha += <dw, w>;  then dw *= alpha.
//   dw (n) fp32 in/out;  dalpha (1) fp32 and w (n), or both NULL;  alpha (1) fp32
void weight_scale_backward(Stream s, float *dw, float *dalpha, const floatX *w, const float *alpha,
                           int64_t n);

#ifdef __cplusplus
}
#endif
