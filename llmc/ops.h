// The contract of every operation. Two backends implement this file: llmc/cpu/ (the reference) and llmc/cuda/.
//
// Conventions
//   N tokens of one packed sequence, d = H*e model width, H heads of width e, F hidden width, Vp padded vocabulary.
//   All tensors are row-major and packed unless a stride is named; all pointers are device memory except where "host" stands.
//   floatX is bf16 (fp32 in the exact build). Inside an op everything is fp32; it is rounded once, where it is stored.
//   Gradients of parameters are fp32 and accumulated ("+=") over micro-batches, unscaled; the optimizer applies the factor.
//   Ops queue their work on the stream and return; scalars that change from step to step live in device memory, so that a
//   captured graph of ops stays valid. Host values (window, scale, sizes) are frozen at capture.
//   No op allocates: what it needs beyond its arguments is reserved by backend_reserve().
//   Reductions have a fixed order: the same input gives the same bits. Only attention_backward's dq may differ in its last bits
//   from run to run, unless `deterministic` is asked for.
// Formulas: the network of the NanoGPT speedrun (track 1); each op states its own.
#pragma once
#include "llmc/common.h"
#include "llmc/floatx.h"
#include "llmc/ns_ops.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- device, memory, streams, graphs -----------------------------------------------------------------------------------

// Whose attention kernels: the fastest that are right here; cuDNN's; the program's own. The CPU has one kind.
typedef enum { ATTENTION_AUTO, ATTENTION_CUDNN, ATTENTION_OWN } AttentionKernels;

// Whether the backend compares its kernels with others before the first op; auto: unless they passed before.
typedef enum { SELF_CHECK_NEVER, SELF_CHECK_AUTO, SELF_CHECK_ALWAYS } SelfCheck;

typedef struct {
    int tokens;      // largest N of a training micro-batch
    int eval_tokens; // largest N of a forward-only sequence
    int dim, heads, mlp_dim, vocab_padded;
    int max_documents; // most documents in one packed sequence, 0: no limit known
    bool fp8_head;
    bool deterministic; // attention backward with a fixed order of sums
    bool portable;      // only kernels that every supported GPU runs
    AttentionKernels attention;
    SelfCheck self_check;
    double wait_limit;  // seconds; the program ends when the host has waited longer for the device. 0: no limit
} OpSizes;

// First of all in main: may start the program anew (same arguments) with the environment that the backend's libraries need.
void backend_prepare_process(char **argv);
int backend_device_count(void); // 0 when there is none or it cannot be asked; the CPU counts as one
// Takes device `index` (ignored on the CPU) and its handles. Fatal, with the reason, when there is none.
void backend_open(int index);
// Scratch memory and plans for all ops up to these sizes. Call once, before any op.
void backend_reserve(const OpSizes *sizes);
void backend_close(void);
const char *backend_name(void);        // "cpu" or "cuda"
const char *backend_device_name(void); // of a GPU, as the driver has it; NULL: a CPU
bool backend_is_asynchronous(void);    // ops are still running when they return
const char *backend_description(void); // one line: device, threads, libraries and their versions, paths taken and why
// Version lines for the log header, one by one from index 0; NULL after the last.
const char *backend_version_line(int index);

// Zeroed; fatal with `what` and the size when memory is short. what: "class: detail", or the class alone; see llmc/memory.h.
void *device_alloc(size_t bytes, const char *what);
void device_free(void *p);
size_t device_bytes_allocated(void); // now, by device_alloc and backend_reserve together
size_t device_bytes_peak(void);
// The most that was in use on the device whenever this was called: contexts, the libraries' own memory, graphs, and what other
// programs use there, beside what device_alloc gave. On the CPU device_bytes_peak().
size_t device_bytes_in_use(void);
void *host_alloc(size_t bytes); // zeroed host memory from which copies run asynchronously
void host_free(void *p);

Stream stream_create(void);
Stream stream_create_urgent(void); // its kernels go before those of other streams, also in a graph
void stream_destroy(Stream s);
void stream_synchronize(Stream s);
void copy_to_device(Stream s, void *dst, const void *host_src, size_t bytes);
void copy_to_host(Stream s, void *host_dst, const void *src, size_t bytes); // valid after stream_synchronize
void copy_on_device(Stream s, void *dst, const void *src, size_t bytes);
void device_zero(Stream s, void *p, size_t bytes);

// Marks in a stream's work that the host, or another stream, can wait for. A few are enough: recording again moves the mark.
typedef struct Event Event;
Event *event_create(void);
void event_record(Event *e, Stream s);
void event_synchronize(Event *e); // returns when all work queued before the mark is done; at once when never recorded
void stream_wait(Stream s, Event *e); // what is queued on s from here on runs after the mark; both may belong to one capture
void event_destroy(Event *e);

// Records the ops queued between begin and end instead of running them. The CPU has no graphs: begin returns false and the
// ops run at once.
typedef struct Graph Graph;
bool graph_begin(Stream s);
Graph *graph_end(Stream s);
void graph_launch(Graph *g, Stream s);
void graph_destroy(Graph *g);

// ---- embedding ---------------------------------------------------------------------------------------------------------

// Distinct tokens of a micro-batch and where they stand, so that gradients of table rows are sums and not atomics.
typedef struct {
    const int32_t *order;     // (N) positions, sorted by token
    const int32_t *row_token; // (*num_rows) distinct tokens, rising
    const int32_t *row_start; // (*num_rows + 1) order[row_start[r] .. row_start[r+1]) are the positions of row_token[r]
    const int32_t *num_rows;  // (1)
} TokenRows;

enum { GATE_INPUTS = 12 }; // channels that a gate reads

// y_t = E[token_t] + lambda * sig(gate . E[token_t][0:12]) * E[token_{t-1}]  (t >= 1; y_0 = E[token_0]);  x0 = rms(y).
//   x0         (N, d) floatX  out
//   rstd       (N)    fp32    out, kept for backward
//   embed      (Vp, d) floatX, gate (12) floatX, lambda (1) fp32
void embed_forward(Stream s, floatX *x0, float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate,
                   const float *lambda, int N, int d);

// de       (N, d) floatX  out: gradient of the gathered rows E[token_t], for embedding_grad
// dgate    (12)   fp32    +=
// dlambda  (1)    fp32    +=
// dx, dx0  (N, d) floatX  in: the two parts of the gradient of x0 (down the residual stream; gathered over layers)
void embed_backward(Stream s, floatX *de, float *dgate, float *dlambda, const floatX *dx, const floatX *dx0, const floatX *x0,
                    const float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate, const float *lambda, int N,
                    int d);

// dtable[token] += scale * sum of g over the token's positions, for the tokens of `rows` only.
//   dtable (Vp, d) fp32 +=;  g (N, d) floatX;  scale (1) fp32 or NULL for 1
void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows, int N, int d);

// ---- residual stream ---------------------------------------------------------------------------------------------------

// A number that a stream is multiplied with, from the trained scalars: factor * scalars[scalar] * sig(scalars[gate]); an index of
// -1 leaves its factor out.
typedef struct {
    float factor;
    int scalar, gate;
} Coefficient;
enum { MAX_COEFFICIENTS = 128 };

// coef[i] from terms[i].  coef (count) fp32 out;  scalars fp32;  terms (count) host, count at most MAX_COEFFICIENTS
void coefficients_forward(Stream s, float *coef, const float *scalars, const Coefficient *terms, int count);
// dscalars fp32 +=; dcoef (count) fp32 in, zeroed afterwards
void coefficients_backward(Stream s, float *dscalars, float *dcoef, const float *scalars, const Coefficient *terms, int count);

// x_out = coef[0]*x + coef[1]*x0 + coef[2]*skip;  h = rms(x_out), rms(x) = x / sqrt(mean(x^2) + 2^-23).
//   x_out (N, d) floatX  out, the residual stream; NULL when only h is wanted. h is computed from the unrounded sum.
//   h     (N, d) floatX  out;  rstd (N) fp32 out, kept for backward
//   skip  (N, d) floatX  or NULL;  coef (3) fp32
void mix_rmsnorm_forward(Stream s, floatX *x_out, floatX *h, float *rstd, const floatX *x, const floatX *x0, const floatX *skip,
                         const float *coef, int N, int d);

// With g = dx_out + rms-backward(dh):  dx = coef[0]*g + dx_add;  dx0 (+)= coef[1]*g;  dskip = coef[2]*g;
// dcoef += (sum g*x, sum g*x0, sum g*skip).
typedef struct {
    floatX *dx;              // (N, d) out; may be dx_out itself
    floatX *dx0;             // (N, d) out, or += when accumulate_dx0
    floatX *dskip;           // (N, d) out; NULL when skip is NULL
    float *dcoef;            // (3) +=
    const floatX *dx_out;    // (N, d) gradient of x_out from the layers above, or NULL for zero
    const floatX *dh;        // (N, d) gradient of h
    const floatX *dx_add;    // (N, d) further gradient of x (a skip or backout taken from it), or NULL. May be dskip, of a skip
                             // from the block directly below: dskip is written first
    const floatX *h;         // (N, d) as forward gave it; a backend may compute it from x, x0, skip and rstd instead
    const float *rstd;       // (N)
    const floatX *x, *x0;    // (N, d) as forward took them
    const floatX *skip;      // (N, d) or NULL
    const float *coef;       // (3)
    const float *dgate;      // (N, H) from attention_backward: dh[:, 0:12] += dgate gate_w; or NULL
    const floatX *gate_w;    // (H, 12)
    int heads;
    bool accumulate_dx0;
} MixBackward;
void mix_rmsnorm_backward(Stream s, const MixBackward *a, int N, int d);

// h = rms(x).
void rmsnorm_forward(Stream s, floatX *h, float *rstd, const floatX *x, int N, int d);
// dx += rms-backward(dh):  rstd * (dh - h * mean(dh * h)).   dx (N, d) floatX in/out
void rmsnorm_backward(Stream s, floatX *dx, const floatX *dh, const floatX *h, const float *rstd, int N, int d);

// ---- matrix products ---------------------------------------------------------------------------------------------------

// y = x w^T (+ residual).  x (N, in), w (planes, out, in), y (planes, N, out), residual (N, out) or NULL, may be y itself.
// planes > 1: one product a plane with the same x (Q, K and V as three tensors); no residual then.
void matmul_forward(Stream s, floatX *y, const floatX *x, const floatX *w, const floatX *residual, int N, int in, int out,
                    int planes);
// dx = dy w.  dy (N, out), w (out, in), dx (N, in)
void matmul_backward_input(Stream s, floatX *dx, const floatX *dy, const floatX *w, int N, int in, int out);
// dw += a^T b, or dw = a^T b when fresh, for each of `count` (1 or 2) products over the same N tokens: together they fill a GPU
// better than one after the other.
typedef struct {
    float *dw;           // (m, n) fp32 in/out, or out when fresh; two of them do not overlap
    const floatX *a, *b; // (N, m), (N, n)
    int m, n;
    bool fresh;          // whatever dw held is not looked at: nobody has to clear it
} WeightGrad;
enum { WEIGHT_GRADS = 2 }; // most at a time
void matmul_weight_grads(Stream s, const WeightGrad *g, int count, int N);
// y = relu(x w)^2.  x (N, in), w (in, out), y (N, out)
void matmul_relu2_forward(Stream s, floatX *y, const floatX *x, const floatX *w, int N, int in, int out);
// dpre = (dy w) * 2 sqrt(y).  dy (N, d), w (d, F), y (N, F) as matmul_relu2_forward gave it, dpre (N, F)
void matmul_relu2_backward(Stream s, floatX *dpre, const floatX *dy, const floatX *w, const floatX *y, int N, int d, int F);

// ---- attention ---------------------------------------------------------------------------------------------------------

// cos and sin of the fp32 product position * frequency, rounded to floatX.  cos, sin (positions, e/4) out; frequency (e/4) fp32
// host. Only the first e/4 of the e/2 rotations have a frequency; the others are the identity.
void rope_tables(Stream s, floatX *cos, floatX *sin, const float *frequency, int positions, int e);

// q = rope(rms(q)), k = rope(rms(k)) per head, in place;  v = lambda[0]*v_raw + lambda[1]*value_embed[token].
//   q, k     (N, d) floatX in/out;  v_raw (N, d) floatX in;  v (N, d) floatX out
//   rstd_q, rstd_k (N, H) fp32 out, kept for backward
//   value_embed (Vp, d) floatX or NULL;  lambda (2) fp32
// rope: y1 = x1 cos + x2 sin, y2 = x2 cos - x1 sin, on the halves x1, x2 of a head.
void qkv_forward(Stream s, floatX *q, floatX *k, floatX *v, float *rstd_q, float *rstd_k, const floatX *v_raw,
                 const floatX *value_embed, const int32_t *tokens, const float *lambda, const floatX *cos, const floatX *sin,
                 int N, int H, int e);
// The product that makes q, k and v_raw and qkv_forward in one: they are the planes of x w^T. Raw q and k need not be rounded.
//   qkv (3, N, d) floatX  out: q, k as qkv_forward leaves them, and v_raw;  v (N, d) out; may be the last plane of qkv
//   x (N, d), w (3, d, d) floatX;  the rest as for qkv_forward
void qkv_product_forward(Stream s, floatX *qkv, floatX *v, float *rstd_q, float *rstd_k, const floatX *x, const floatX *w,
                         const floatX *value_embed, const int32_t *tokens, const float *lambda, const floatX *cos,
                         const floatX *sin, int N, int H, int e);
typedef struct {
    floatX *dqkv;                 // (N, 3d) out: gradient of the raw q | k | v
    float *dlambda;               // (2) +=
    const floatX *dq, *dk, *dv;   // (N, d) gradients of qkv_forward's results; dq and dk NULL: see attention_feeds_qkv
    const floatX *q, *k;          // (N, d) its results
    const float *rstd_q, *rstd_k; // (N, H)
    const floatX *v_raw;          // (N, d)
    const floatX *value_embed;    // (Vp, d) or NULL
    const int32_t *tokens;        // (N)
    const float *lambda;          // (2)
    const floatX *cos, *sin;
} QkvBackward;
void qkv_backward(Stream s, const QkvBackward *a, int N, int H, int e);

// Where the documents of a packed sequence lie, in the form the backend's attention wants: built on the host with the batch,
// copied to the device with it. Returns the number of document slots it needs: the two ops take this or any larger number (a
// host value, constant in a captured graph), up to the one that max_documents gives.
int64_t attention_table_ints(int N, int max_documents); // max_documents 0: N
int attention_table_build(int32_t *table, const int32_t *cu_seqlens, int num_documents, int N, int max_documents); // all host

// yg = y * sig(gate_w_head . h[0:12]) with y = softmax(scale q k^T + mask) v, per head; i sees j when j <= i, same document,
// i - j <= window.
//   q, k, v, yg (N, d) floatX; h (N, d), gate_w (H, 12) floatX;  lse (N, H) fp32 out = log sum exp of the scaled scores
void attention_forward(Stream s, floatX *yg, float *lse, const floatX *q, const floatX *k, const floatX *v, const floatX *h,
                       const floatX *gate_w, const int32_t *table, int slots, float scale, int window, int N, int H, int e);

// With sig the gate, p the weights, delta = rowsum(dyg * yg):  dv = p^T (sig dyg);  ds = p * (sig dyg v^T - delta);
// dq = scale ds k;  dk = scale ds^T q;  dgate = delta (1 - sig);  dgate_w += dgate^T h[0:12].
typedef struct {
    floatX *dq, *dk, *dv;       // (N, d) out; where attention_feeds_qkv() both dq and dk may be NULL, and dv if they are
    float *dgate;               // (N, H) out: gradient before the sigmoid; mix_rmsnorm_backward carries it on to h
    float *dgate_w;             // (H, 12) +=
    const floatX *dyg;          // (N, d) gradient of attention_forward's result
    const floatX *yg;           // (N, d) and
    const float *lse;           // (N, H) its results
    const floatX *q, *k, *v;    // (N, d)
    const floatX *h, *gate_w;   // (N, d), (H, 12) as it took them
    const QkvBackward *next;    // without dq and dk: what the qkv_backward that follows on the stream is called with
} AttentionBackward;
void attention_backward(Stream s, const AttentionBackward *a, const int32_t *table, int slots, float scale, int window, int N,
                        int H, int e);
// After backend_reserve: whether the gradients of q and k need not come to memory between the two ops. Then, with dq and dk NULL
// in both, attention_backward may already write to next's dqkv, which must not share memory with dyg, and one qkv_backward of
// the same N must follow before the next attention_backward.
bool attention_feeds_qkv(void);

// ---- head and loss -----------------------------------------------------------------------------------------------------

// logits = x w^T;  z = 30 sig(logits / 7.5);  loss_t = log sum_j exp(z_j) - z_target over all Vp columns.
// Never holds more than a chunk of logits. In training logits and their gradient are rounded to floatX, as between any two ops,
// or kept more exactly.
typedef enum { HEAD_BF16, HEAD_FP8 } HeadMode;

// HEAD_FP8: x8 = e4m3(x / sx), w8 = e4m3(w / sw), logits = sx sw x8 w8^T; g8 = e5m2(g / sg); dx = sg sw g8 w8;
// dw = sx sg g8^T x8; sx = sqrt(d)/448, sw = 2^-9, sg = 1/448; conversions saturate.
// After backend_reserve: device memory that ops of the head use while they run, and no other op. Between them it is free for the
// caller. NULL with 0 bytes when there is none.
void *head_idle_memory(size_t *bytes);

// w8: the backend's own copies of the quantised weight, made anew when the weight has changed.
size_t head_weight_bytes(HeadMode mode, int Vp, int d); // 0 for HEAD_BF16
void head_quantize(Stream s, void *w8, const floatX *w, int Vp, int d);

// loss (1) fp32 out: sum over the N tokens;  dx (N, d) floatX out;  dw (Vp, d) fp32 +=
void head_loss_train(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x, const floatX *w,
                     const void *w8, const int32_t *targets, int N, int d, int Vp);
// loss (1) fp32 out: sum over the N tokens, plain head, logits not rounded
void head_loss_eval(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N, int d, int Vp);
// z (rows, Vp) fp32 out, softcapped; plain head, few rows (sampling)
void head_logits(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp);

// ---- optimizers --------------------------------------------------------------------------------------------------------

// What changes from step to step, in device memory. Tensors of one update rule have one rate and one decay.
enum { MAX_UPDATE_RULES = 32 };
typedef struct {
    float rate;  // Adam: lr * sqrt(1 - beta2^k) / (1 - beta1^k); NorMuon: lr
    float decay; // NorMuon: lr without the rule's own factor, * weight decay
} RuleStep;
typedef struct {
    float grad_scale;    // 1 / micro-batches of a step
    float muon_momentum;
    RuleStep rule[MAX_UPDATE_RULES];
} StepParams;

typedef struct {
    int rule; // index in StepParams
    float beta1, beta2, eps;
    float rest1, rest2; // 1 - beta, rounded from the exact difference
} AdamRule;

// g = grad * grad_scale;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= rate * m / (sqrt(v) + eps).
// The moments used in the quotient are the unrounded ones. grad is zeroed.
//   p, m, v (n) floatX in/out;  grad (n) fp32 in/out
void adam_update(Stream s, floatX *p, floatX *m, floatX *v, float *grad, const StepParams *step, AdamRule rule, int64_t n);
void adam_update_fp32(Stream s, float *p, float *m, float *v, float *grad, const StepParams *step, AdamRule rule, int64_t n);

// M += (1 - mu)(G - M);  U = G + mu (M - G), with G = grad * grad_scale.  momentum (n) fp32 in/out; u (n) fp32 in: grad, out: U
void normuon_momentum(Stream s, float *u, float *momentum, const StepParams *step, int64_t n);

// NorMuon's normalisation, cautious decay and update of a batch of equal matrices, from their orthogonalised O.
// c = mean of O^2 along the shorter side of the stored shape (per column when rows < cols, else per row); S += (1-beta2)(c - S);
// O' = O / sqrt(max(S, 1e-10));  O'' = O' |O|_F / max(|O'|_F, 1e-10);  where O'' W >= 0: O'' += decay W;  W -= rate O''.
typedef struct {
    float *w;             // (batch, rows, cols) in/out, or NULL when the weight is stored as floatX only
    floatX *wx;           // (batch, rows, cols) out: the weight rounded; in/out when w is NULL
    float *grad;          // (batch, rows, cols) zeroed: the gradient buffer that normuon_momentum turned into U; or NULL
    float *second;        // S (batch, max side) in/out, fp32
    const void *o;        // (batch, rows, cols) packed, in o_dtype
    NsDtype o_dtype;
    int rows, cols, batch;
    bool per_column;      // decided by the stored shape of the parameter, of which these may be parts
    float beta2;
    const int32_t *rule;  // (batch) device: of each matrix, index in StepParams
    int64_t stride;       // elements from one matrix of w, wx and grad to the next; o and second are packed
} NormuonUpdate;
void normuon_update(Stream s, const NormuonUpdate *a, const StepParams *step);

// wx = w rounded to floatX.
void cast_weights(Stream s, floatX *wx, const float *w, int64_t n);

#ifdef __cplusplus
}
#endif
