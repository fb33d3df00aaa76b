// Interfaces inside the CUDA backend's attention: cuDNN (attention_cudnn.c), sm80 kernels for any GPU and
// head dimension, sm90 kernels for heads of v of width 128, and attention.c, which chooses among them for the
// ops (attention_ops.c, sdpa.c).
#pragma once
#include "llmc/base/common.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/costs.h"
#include "llmc/ops/heads.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---- for backend.cu --------------------------------------------------------------------------------------

// Chooses the kernels, makes cuDNN's plans (some 3 s for the first of a process), checks them and allocates
// scratch memory. Call after backend_open and before any table is built; calling again starts over with the
// new sizes. A note says when slow kernels are taken.
//   sizes->tokens 0: no backward pass.  sizes->attention: ATTENTION_CUDNN is taken unchecked.
// Fatal on sizes that no kernels can take, or not those asked for.
void attention_reserve(const OpSizes *sizes);
int64_t
attention_table_part(int N,
                     int max_documents); // int32 from one part of a table to the next (see attention.c)
void attention_close(void);
// Whether own kernels, if they are taken, are right on a small batch of documents: those for Hopper beside
// the portable ones, these beside the host. False with the tensor that differs. Call after attention_reserve.
bool attention_own_is_right(Error *why);
int attention_checked_tokens(void); // of that batch, at most

const char *attention_library(void);     // "cuDNN 9.1.0"; static text
const char *attention_description(void); // which kernels, and why; static text, valid until the next reserve

// ---- the backward pass of what is around attention (llmc/cuda/rows/qkv_backward.cu) -----------------------

// Norm, rotation and value mix. All pointers are device memory, as in AttentionBackward.
typedef struct {
    floatX *dqkv;   // (N, 3d) out
    float *dlambda; // (2) +=
    const floatX *dq, *dk,
        *dv;             // (N, d) in; dq and dk NULL: sm90_backward.cu did k and v, and made dv unless NULL
    const floatX *q, *k; // (N, d)
    const float *rstd_q, *rstd_k; // (N, H)
    const floatX *v_raw;          // (N, d)
    const floatX *value_embed;    // (Vp, d) or NULL
    const int32_t *tokens;        // (N)
    const float *lambda;          // (2)
    const floatX *cos, *sin;      // (N, e/4)
} QkvBackward;
void qkv_backward(Stream s, const QkvBackward *a, int N, int H, int e); // from dq, dk and dv

// What sm90_backward.cu leaves of q and lambda.
typedef struct {
    const float *sums; // of dq, laid out as sm90_attention.cuh says, without the factor `scale`
    unsigned *state;   // to be set to zeros
    float scale;
    const float *value_sums; // (num_value_sums, 2): parts of dlambda
    int num_value_sums;
} DqSums;
void q_backward(Stream s, const QkvBackward *a, const DqSums *sums, int N,
                int H); // q's part of dqkv, dlambda

// ---- heads_backward after sm90_backward.cu (llmc/cuda/rows/heads_backward.cu) -----------------------------

enum { PLANE_Q = 1, PLANE_K = 2, PLANE_V = 4, PLANES_ALL = 7 }; // of dqkv
bool heads_backward_takes_sums(const HeadsBackward *a, int H, int e);
// The same with q's gradient from `sums`; a->dq is not read. planes: those to write, q's and with k's v's,
// too.
void heads_backward_from_sums(Stream s, const HeadsBackward *a, const DqSums *sums, int planes, int N, int H,
                              int e);

// ---- one call --------------------------------------------------------------------------------------------

// Everything a pass reads and writes; all pointers are device memory owned by the caller. N tokens, d = H e,
// as in llmc/ops/ops.h. Only own kernels take q and k of another width than v's, and there (N, d) of q, k, dq
// and dk reads (N, H qk).
typedef struct {
    const floatX *q, *k, *v; // (N, d)
    const floatX *h,
        *gate_w;          // (N, d), (H, gate_inputs) forward: y is multiplied by sig(gate_w .
                          // h[0:gate_inputs]); NULL: no gate
    floatX *y;            // (N, d) forward: out; backward: in
    float *lse;           // (N, H) forward: out; backward: in
    const floatX *dy;     // (N, d)
    floatX *dq, *dk, *dv; // (N, d) out; without dq Hopper's kernels leave it in dq_sum; without dk, too, they
                          // do k's and v's part of qkv, and may be without dv
    const QkvBackward *qkv;     // without dq and dk
    const HeadsBackward *heads; // Hopper's kernels: k's plane of its dqkv is out in place of dk, and without
                                // dv v's plane, too; no key offset, dk_add or (without dv) dv_add. NULL: none
    const float *row_sums;      // (N, H) backward: in: sum over the head of dy * y
    // scratch of backward
    float *row_scratch; // (N, H) cuDNN: its own row sums
    float *dq_sum;      // cuDNN: (N, d); Hopper's kernels: attention_sm90_sums(N, H, qk) floats
    unsigned *dq_state; // Hopper's kernels: attention_sm90_states(N, H), zeros but while dq_sum waits to
                        // be read
    void *ds;           // those for any GPU: attention_sm80_ds_bytes(N, H, at least the reach), on 16 bytes
    size_t ds_bytes;    // how many these are
    float *value_sums;  // Hopper's kernels, without dk: (attention_sm90_value_sums(N, H), 2), for dlambda
    unsigned *counters; // Hopper's kernels: attention_sm90_counters(), zeros between calls
    // Parts of the table (its layout: attention.c). Empty slots have length 0 and start at N.
    const int32_t *length;      // (slots) longest first
    const int32_t *start;       // (slots + 1) of the slot's document in (N, d) buffers, elements
    const int32_t *lse_start;   // (slots + 1) the same in (N, H) buffers
    const int32_t *cu;          // (slots + 1) starts in rising order, tokens
    const int32_t *key_tiles;   // tiles of ATTENTION_KEY_TILE keys, in the order to take them
    const int32_t *late_tiles;  // by tile of keys: 1 where it is taken after the one in front of it
    const int32_t *query_tiles; // tiles of ATTENTION_QUERY_TILE queries, the same as key_tiles
    const int32_t *reaching_keys, *reaching_queries; // tiles of ATTENTION_REACH_TILE, those with the most
                                                     // pairs first
    float scale;
    int window, slots;
    int N, H, e, gate_inputs;
    int qk;           // width of a head of q and k, at most e
    bool fixed_order; // backward: of dq's sums by Hopper's kernels; those for any GPU have one always
    int reach;        // backward: no query sees further back, in rows; at most window
} AttentionCall;

// Everything but the tensors, for q and k as wide as v, as `deterministic` as what was reserved.
AttentionCall attention_call(const int32_t *table, int slots, float scale, int window, int N, int H, int e);
bool attention_is_open(void); // whether kernels were chosen
typedef enum { BY_CUDNN, BY_SM90, BY_SM80 } AttentionBy;
AttentionBy attention_by(bool backward);                  // which
bool attention_is_sm90(bool backward);                    // those for Hopper
void attention_check_tokens(int N, int H, bool backward); // fatal beyond what was reserved
size_t attention_ds_bytes(int N, int H);                  // for the reach that was reserved
// attention_backward by these kernels, with a scratch of that size.
void attention_backward_by(AttentionBy by, Stream s, const AttentionBackward *a, int N, int H, int e);
size_t attention_scratch_by(AttentionBy by, int N, int H, int e);

// ---- the gate --------------------------------------------------------------------------------------------

// c->y *= the gate, in place, for forward kernels that do not apply it themselves.
void attention_gate_forward(Stream s, const AttentionCall *c);

// What attention's backward kernels take instead of lse, row sums and dy, so that they need not know the gate
// (see gates.cu).
typedef struct {
    float *lse_gated;         // (N, H) out: lse - log(sig)
    float *row_sums;          // (N, H) out: sum over the head of dyg * yg / sig
    floatX *y;                // (N, d) out: yg / sig; or NULL
    float *dgate, *dgate_w;   // (N, H) out; (H, gate_inputs) +=
    const floatX *dyg, *yg;   // (N, d)
    const float *lse;         // (N, H)
    const floatX *h, *gate_w; // (N, d), (H, gate_inputs)
    int gate_inputs;
} GateBackward;
void attention_gate_backward(Stream s, const GateBackward *a, int N, int H, int e);
size_t attention_gate_sums(int H); // floats of its scratch, at most
// sums[i] = sum of row i of dy * y, rows of a head's width e.
void attention_row_sums(Stream s, float *sums, const floatX *dy, const floatX *y, int64_t rows, int e);

// ---- cuDNN -----------------------------------------------------------------------------------------------

typedef struct {
    int slots;   // documents, empty ones included
    int longest; // most tokens of a document
    int heads, head_dim;
    bool backward;
} AttentionShape;
typedef struct AttentionPlan AttentionPlan;

// Owned by the caller. NULL, with the reason in `e`, when cuDNN has no plan for the shape. Not during graph
// capture.
AttentionPlan *attention_plan_create(const AttentionShape *shape, Error *e);
const AttentionShape *attention_plan_shape(const AttentionPlan *p);
// Queues the pass; c->slots is ignored: the plan's number counts. Fatal on errors of the library.
void attention_plan_run(AttentionPlan *p, const AttentionCall *c, Stream s);
// The plan of an op, made now if need be. Fatal when there is none, or when it would be made under capture.
AttentionPlan *attention_plan_for_op(Stream s, int slots, int N, bool backward);
void attention_plan_free(AttentionPlan *p);
void attention_cudnn_close(void); // after the last plan is freed

// ---- own kernels -----------------------------------------------------------------------------------------

enum {
    ATTENTION_OWN_MAX_WIDTH = 256,
    ATTENTION_OWN_MAX_NARROW = 192,
    ATTENTION_REACH_TILE = 128,
    ATTENTION_MOST_TOKENS = 65534 * 64 / 2 // tiles of 64, an even number of them, are a grid's second
                                           // dimension; paired heads double them
};
// Prepares the kernels for heads of v of width e, a multiple of 8 up to ATTENTION_OWN_MAX_WIDTH, and of q and
// k of width qk: e, or a smaller multiple of 8 up to ATTENTION_OWN_MAX_NARROW. False, with the reason, when
// the device has too little shared memory for it.
bool attention_sm80_prepare(int qk, int e, Error *error);
bool attention_sm80_prepare_backward(int qk, int e, Error *error);
// Memory of a backward pass for gradients of scores, of as many heads as are computed at once. Rises with
// each argument.
size_t attention_sm80_ds_bytes(int N, int H, int reach);
// The same bits for the same input, always.
void attention_sm80_forward(const AttentionCall *c, Stream s);
void attention_sm80_backward(const AttentionCall *c, Stream s);

// ---- own kernels for Hopper ------------------------------------------------------------------------------

enum { ATTENTION_KEY_TILE = 128, ATTENTION_QUERY_TILE = 192 };
// False, with the reason, where they do not run: another chip, compiled for another, heads of v of another
// width than 128.
bool attention_sm90_prepare(int e, Error *error);
bool attention_sm90_takes(int qk, int e); // whether, where they run, they take these widths
size_t attention_sm90_sums(int N, int H, int qk);
size_t attention_sm90_states(int N, int H);
size_t attention_sm90_value_sums(int N, int H);
size_t attention_sm90_counters(void);
// The stream's counters and dq_state, where the pass is the sm90 kernels'.
void attention_take_counters(AttentionCall *c, Stream s, bool backward);
void attention_sm90_forward(const AttentionCall *c, Stream s);
// dk and dv have the same bits always, dq with fixed_order, else up to the order of fp32 sums. qk of another
// width than v: with dk, or with heads.
void attention_sm90_backward(const AttentionCall *c, Stream s);

// Kernels to be compared with the sm80 ones.
typedef struct {
    const char *name;
    AttentionPlan *forward, *backward; // cuDNN's; NULL: the sm90 kernels
    bool with_backward;
} AttentionPeer;
// Runs both on random values (attention_check.c). base: the call without its tensors. False, with the tensor
// that differs, when the peer's results are not to be trusted. Its kernels and the sm80 ones must have been
// prepared.
bool attention_agree(const AttentionPeer *peer, const AttentionCall *base, Error *e);
// The same of the sm90 kernels. With --self-check always for all widths of q and k that they take, and of the
// gradient of raw q, k and v, which their epilogue and q_backward make. Not of AttentionCall.heads.
bool attention_sm90_agrees(const AttentionPeer *peer, const AttentionCall *base, Error *e);
// The sm80 kernels beside sums in double on the host, of the first and the last head.  cu (documents + 1): as
// in the call's table
bool attention_sm80_is_right(const AttentionCall *base, const int32_t *cu, int documents, bool with_backward,
                             Error *e);

#ifdef __cplusplus
}
#endif
