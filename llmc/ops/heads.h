// Contracts: heads of the records of 2026, before and after attention. Conventions: llmc/ops/ops.h.
#pragma once
#include "llmc/base/floatx.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/backend.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/mlp.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- q, k, v ----------------------------------------------------------------------------------------------

// v_n = raw_n + gate_n * u_n + extra_n for each head n, with u = table[tokens[t]].
typedef struct {
    const floatX *table; // (any, d), or NULL: no u
    const int32_t *tokens;
    const floatX *gate_w; // (H, 2 I): gate_n = 2 sig(gate_w_n[0:I] . h[0:I] + gate_w_n[I:2I] . u[0:I])
    const floatX *h;      // (N, d) input of the layer, with gate_w
    float *gate;          // (N, H) out, with gate_w; kept for backward
    const float *factor;  // without gate_w: gate_n = factor[t * stride + n / (H / groups)]
    int stride, groups;
    const floatX *extra; // (N, d), or NULL
    int gate_inputs;     // I, with gate_w; at most MAX_GATE_INPUTS / 2
} ValueMix;

// q = rope(rms(raw q)), k = rope(rms(raw k)) per head, v as above.
// rope: y[2j] = x[2j] cos_j + x[2j+1] sin_j,  y[2j+1] = x[2j+1] cos_j - x[2j] sin_j,  j < qk/4; the channels
// from qk/2 on stay as they are. Position t; when paired, 2t of even heads and 2t + 1 of odd ones: attention
// then reads q, k and v as (2N, H/2, any).
// offset: the channels from qk/2 on of k_t, t >= 1, are those of k_{t-1}.
typedef struct {
    int qk;    // width of a head of q and k; a multiple of 4
    floatX *q; // (N, H qk) out; may be raw_q
    floatX *k; // (N, H qk) out; may be raw_k without offset; with it (N + 1, H qk), elsewhere: row N has the
               // offset channels of k_{N-1}, which only backward reads
    floatX *v; // (N, d) out; may be raw_v
    float *rstd_q, *rstd_k;              // (N, H) out, kept for backward
    const floatX *raw_q, *raw_k, *raw_v; // (N, H qk), (N, H qk), (N, d) as products made them
    const floatX *cos, *sin;             // (N, qk/4); paired: (2N, qk/4)
    bool paired, offset;
    ValueMix value;
} HeadsForward;
void heads_forward(Stream s, const HeadsForward *a, int N, int H, int e);

// The products that make raw q, k and v, and heads_forward in one: raw q, k and v are alpha x w^T, rounded to
// floatX, for their rows of w.
typedef struct {
    HeadsForward heads; // but for raw_*, which are not read
    floatX *raw; // (N, H qk), (N, H qk), (N, d): scratch for raw q, k, v; q, k, v may be there where heads
                 // allows it
    const floatX *x, *w;            // (N, d), (2 H qk + d, d)
    const float *alpha;             // (1) fp32, or NULL: 1
    const uint8_t *x8, *w8;         // in FP8: their codes, and x and w are not read; else NULL
    const float *scale_x, *scale_w; // (1) fp32, of codes
} QkvHeadsForward;
void qkv_heads_forward(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e);
// The same by other ops (llmc/ops/qkv_heads.c): for backends, and for few rows.
void qkv_heads_apart(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e);
// What is left to do when products have filled the planes.
static inline HeadsForward qkv_heads_planes(const QkvHeadsForward *a, int N, int H)
{
    int64_t plane = (int64_t)N * H * a->heads.qk;
    HeadsForward rest = a->heads;
    rest.raw_q = a->raw;
    rest.raw_k = a->raw + plane;
    rest.raw_v = a->raw + 2 * plane;
    return rest;
}

typedef struct {
    const HeadsForward *forward; // as it was called; raw_* are not read
    floatX *dqkv;                // (N, 2 H qk + d) out: gradient of raw q | k | v; that of v is v's own
    const floatX *dq, *dk, *dv;  // gradients of its results, (N) rows each
    const floatX *dq_add, *dk_add, *dv_add; // further gradients of them, each may be NULL
    // with gate_w
    float *dgate_w;           // (H, 2 I) +=
    float *dh_lead, *du_lead; // (N, I) out: what the gates give to h[0:I] and u[0:I]. The rest of u's
                              // gradient is gate_n * dv_n (table_grad)
    // without
    float *dfactor; // out: dfactor[t * stride + group] = sum of dv_n . u_n over the group's heads
} HeadsBackward;
void heads_backward(Stream s, const HeadsBackward *a, int N, int H, int e);

// sdpa_backward and heads_backward in one. dq, dk and dv may stay in fp32 between them: they are written
// where they are needed.
typedef struct {
    SdpaBackward sdpa;   // of rows 2 N and heads H / 2 when the heads are paired; dq, dk and dv are scratch
    HeadsBackward heads; // dq, dk and dv are those of `sdpa`
} SdpaHeadsBackward;
void sdpa_heads_backward(Stream s, const SdpaHeadsBackward *a, int N, int H, int e);

// ---- what attention gives ---------------------------------------------------------------------------------

// out_n = gate_n * (y_n - tanh(alpha_n) (y_n . v_n) / max(v_n . v_n, 1e-8) v_n) for each head n of a token.
typedef struct {
    floatX *out;        // (N, d) out; may be y when there is no backward
    const floatX *y;    // (N, d) of attention
    const floatX *v;    // (N, d) as attention took it
    const float *alpha; // alpha_n = alpha[t * alpha_stride + n]; NULL: 0, and v is not read
    const float *gate;  // gate_n = gate[t * gate_stride + n]; NULL: 1
    int alpha_stride, gate_stride;
} HeadsOutput;
void heads_output_forward(Stream s, const HeadsOutput *a, int N, int H, int e);

typedef struct {
    const HeadsOutput *forward; // as it was called; out is not read
    floatX *dy;                 // (N, d) out; may be dout
    floatX *dv;                 // (N, d) out, with alpha: v's gradient but for that of attention
    float *dalpha, *dgate;      // out, where alpha and gate are, with the same strides
    const floatX *dout;         // (N, d)
    float *delta;               // (N, H) out: dy_n . y_n, of dy as it is stored, for sdpa_backward; or NULL
} HeadsOutputBackward;
void heads_output_backward(Stream s, const HeadsOutputBackward *a, int N, int H, int e);

#ifdef __cplusplus
}
#endif
