// Contracts: attention over few keys with the heads' weights mixed. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/attention.h"
#ifdef __cplusplus
extern "C" {
#endif

// With P_n the softmax of scale q_n k_n^T over the keys j <= t of the same document with t - j < keys,
//   w_n = w1_n / sqrt(mean over heads of w1^2 + 1e-6),  M_tj = sum_n w_n P_n,tj:
//   y_n += w2_n sum_j M_tj v_n,j.
typedef struct {
    floatX *y;               // (N, d) in/out
    float *lse;              // (N, H) out: log sum exp of the scaled scores, kept for backward
    int qk;                  // width of a head of q and k
    const floatX *q, *k, *v; // (N, H qk), (N, H qk), (N, d) as attention took them
    const float *w1, *w2;    // of head n: w1[t * stride + n]
    int stride;
    const int32_t *table; // of attention_table_build, with its
    int slots;
    float scale;
    int keys;
} DcForward;
void dc_forward(Stream s, const DcForward *a, int N, int H, int e);
// The same over the last `keys` positions of the texts that the rows continue, from a cache which sdpa_decode
// has brought up to date. k, v, table and slots are not used.
void dc_decode(Stream s, const DcForward *a, const TextCache *cache, int N, int H, int e);

typedef struct {
    const DcForward *forward; // as it was called; y is not read
    floatX *dq, *dk, *dv;     // of the shapes of q, k, v; out: what the added part gives to q, k and v
    float *dw1, *dw2;         // out, with the stride of w1 and w2
    const floatX *dy;         // (N, d) gradient of y; it is that of the y before, too
    void *scratch;            // dc_scratch_bytes(), on 16 bytes, whatever they hold; free again after the op
} DcBackward;
size_t dc_scratch_bytes(int N, int H);
void dc_backward(Stream s, const DcBackward *a, int N, int H, int e);

#ifdef __cplusplus
}
#endif
