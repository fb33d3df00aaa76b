// Contracts: attention, with q, k and v. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/backend.h"
#ifdef __cplusplus
extern "C" {
#endif

// cos and sin of the fp32 product position * frequency, rounded to floatX.  cos, sin (rows, e/4) out;
// frequency (e/4) fp32 host; position (rows) device, NULL: row t is position t. Only the first e/4 of the e/2
// rotations have a frequency; the others are the identity.
void rope_tables(Stream s, floatX *cos, floatX *sin, const float *frequency, const int32_t *position,
                 int rows, int e);

// q = rope(rms(q)), k = rope(rms(k)) per head, in place;  v = lambda[0]*v_raw + lambda[1]*value_embed[token].
// rope: y1 = x1 cos + x2 sin, y2 = x2 cos - x1 sin, on the halves x1, x2 of a head.
typedef struct {
    floatX *q, *k;             // (N, d) in/out
    floatX *v;                 // (N, d) out
    float *rstd_q, *rstd_k;    // (N, H) out, kept for backward
    const floatX *v_raw;       // (N, d)
    const floatX *value_embed; // (Vp, d) or NULL
    const int32_t *tokens;     // (N)
    const float *lambda;       // (2)
    const floatX *cos, *sin;   // (N, e/4)
} QkvForward;
void qkv_forward(Stream s, const QkvForward *a, int N, int H, int e);
// The product that makes q, k and v_raw, and qkv_forward in one: they are the planes of x w^T, rounded to
// floatX.
typedef struct {
    floatX *qkv;         // (3, N, d) out: q, k as qkv_forward leaves them, and v_raw
    floatX *v;           // (N, d) out; may be the last plane of qkv
    const floatX *x, *w; // (N, d), (3, d, d)
    // as in QkvForward
    float *rstd_q, *rstd_k;
    const floatX *value_embed;
    const int32_t *tokens;
    const float *lambda;
    const floatX *cos, *sin;
} QkvProductForward;
void qkv_product_forward(Stream s, const QkvProductForward *a, int N, int H, int e);
// What is left to do when the product has filled the planes.
static inline QkvForward qkv_planes(const QkvProductForward *a, int N, int d)
{
    int64_t plane = (int64_t)N * d;
    QkvForward rest = {a->qkv,         a->qkv + plane, a->v,      a->rstd_q, a->rstd_k, a->qkv + 2 * plane,
                       a->value_embed, a->tokens,      a->lambda, a->cos,    a->sin};
    return rest;
}

// Where the documents of a packed sequence lie, in the form the backend's attention wants: built on the host
// with the batch, copied to the device with it. Returns the number of document slots it needs: the two ops
// take this or any larger number (a host value, constant in a captured graph), up to the one that
// max_documents gives.
int64_t attention_table_ints(int N, int max_documents); // max_documents 0: N
int attention_table_build(int32_t *table, const int32_t *cu_seqlens, int num_documents, int N,
                          int max_documents); // all host

// y = softmax(scale q k^T + mask) v, per head; i sees j when j <= i, same document, i - j <= window.
// Pairs of heads that attend to each other are N 2, H / 2 and a table of doubled boundaries: row 2 t + r of
// the doubled sequence is half r of token t's heads.
typedef struct {
    floatX *y;               // (N, d) out
    float *lse;              // (N, H) out: log sum exp of the scaled scores
    const floatX *q, *k, *v; // (N, H qk), (N, H qk), (N, d)
    int qk;                  // width of a head of q and k, at most e
    const int32_t *table;    // attention_table_build's, on the device
    int slots, window;
    float scale;
} SdpaForward;
void sdpa_forward(Stream s, const SdpaForward *a, int N, int H, int e);
// With p the weights, delta = rowsum(dy * y):
//   dv = p^T dy;  ds = p * (dy v^T - delta);  dq = scale ds k;  dk = scale ds^T q
typedef struct {
    const SdpaForward *forward; // as it was called
    floatX *dq, *dk, *dv;       // (N, H qk), (N, H qk), (N, d) out; none of them over dy
    const floatX *dy;           // (N, d)
    void *scratch;      // sdpa_scratch_bytes() on 256 bytes, whatever they hold; free again after the op
    const float *delta; // (N, H) as heads_output_backward gives it; NULL: it is computed here
} SdpaBackward;
size_t sdpa_scratch_bytes(int N, int H, int qk, int e); // 0: NULL will do, or backend_reserve is to come
void sdpa_backward(Stream s, const SdpaBackward *a, int N, int H, int e);

// yg = y * sig(gate_w_head . h[0:gate_inputs]) with y of sdpa_forward, qk = e.
typedef struct {
    floatX *yg;               // (N, d) out
    float *lse;               // (N, H) out: log sum exp of the scaled scores
    const floatX *q, *k, *v;  // (N, d)
    const floatX *h, *gate_w; // (N, d), (H, gate_inputs)
    const int32_t *table;     // attention_table_build's, on the device
    int slots, window;
    float scale;
    int gate_inputs; // at most MAX_GATE_INPUTS
} AttentionForward;
void attention_forward(Stream s, const AttentionForward *a, int N, int H, int e);

// The gradient of the raw q | k | v that qkv_product_forward makes from its product, in one op.
// With sig the gate, p the weights, delta = rowsum(dyg * yg):
//   dv = p^T (sig dyg);  ds = p * (sig dyg v^T - delta);  dq = scale ds k;  dk = scale ds^T q;
//   dgate = delta (1 - sig);  dgate_w += dgate^T h[0:gate_inputs];
// then with y = R x^, x^ = x rstd, the rotated and the normalised head of q or k, and R' the inverse
// rotation:
//   dx^ = R' dy;  dx = rstd (dx^ - x^ mean(dx^ x^));
//   dv_raw = lambda[0] dv;  dlambda += (sum dv v_raw, sum dv value_embed[token]).
// dv is rounded before it goes on; dq and dk may be.
typedef struct {
    const AttentionForward *forward; // as it was called
    floatX *dqkv;                    // (N, 3d) out: gradient of the raw q | k | v; not over dyg
    floatX *dv;                      // (N, d) out: gradient of the mixed v, for embedding_grad; or NULL
    float *dlambda;                  // (2) +=
    float *dgate;      // (N, H) out: gradient before the sigmoid; mix_rmsnorm_backward carries it on to h
    float *dgate_w;    // (H, gate_inputs) +=
    const floatX *dyg; // (N, d)
    // of qkv_product_forward, which also made q, k and v
    const float *rstd_q, *rstd_k; // (N, H) its results
    const floatX *v_raw;          // (N, d)
    const floatX *value_embed;    // (Vp, d) or NULL
    const int32_t *tokens;        // (N)
    const float *lambda;          // (2)
    const floatX *cos, *sin;      // (N, e/4)
    void *scratch; // attention_scratch_bytes() on 256 bytes, whatever they hold; free again after the op
} AttentionBackward;
size_t attention_scratch_bytes(int N, int H, int e); // 0: NULL will do, or backend_reserve is still to come
void attention_backward(Stream s, const AttentionBackward *a, int N, int H, int e);

// ---- texts that grow --------------------------------------------------------------------------------------

// Keys and values of texts, and the rows by which an op continues them. Position t of a text is in row t mod
// `rows`, which is at least the window, the text's rows in one op, and offset.
typedef struct {
    floatX *k, *v; // (texts, rows, H qk), (texts, rows, d) in/out
    int rows;
    // (N) of row n. Rows of one text follow each other, the first is behind the last one stored. Text -1:
    // nothing is stored, and nobody reads the row's result
    const int32_t *text, *position;
    // The channels from qk/2 on of the key of position t are stored for t + offset, and for t < offset for t,
    // too: the offset of heads.h, which a paired key has in steps of 2.
    int offset;
} TextCache;
// k and v of all rows are stored; then as sdpa_forward and attention_forward, but that row n sees the
// positions position[n] - window to position[n] of its text. lse, table and slots are not used.
void sdpa_decode(Stream s, const SdpaForward *a, const TextCache *cache, int N, int H, int e);
void attention_decode(Stream s, const AttentionForward *a, const TextCache *cache, int N, int H, int e);

#ifdef __cplusplus
}
#endif
