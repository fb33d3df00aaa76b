// The ops of attention by the kernels that attention.c has chosen, and the scratch of the backward pass.
#include "llmc/cuda/attention/attention.h"
#include "llmc/ops/attention.h"

// ---- scratch of the backward pass -------------------------------------------------------------------------

typedef struct {
    float *lse_gated, *row_sums; // (N, H) from the gate's pass
    float *row_scratch, *dq_sum; // see AttentionCall
    float *value_sums;
    floatX *y;            // (N, d) cuDNN: output without its gate
    floatX *dq, *dk, *dv; // (N, d) all but Hopper's kernels
    void *ds;             // those for any GPU
    size_t ds_bytes;
    size_t bytes; // of all
} Scratch;

static void *take(char *base, size_t *used, size_t bytes)
{
    char *p = base ? base + *used : NULL;
    *used += (size_t)round_up((int64_t)bytes, 256);
    return p;
}

// base NULL: only `bytes` is of use.
static Scratch lay_out(AttentionBy by, void *base, int N, int H, int e)
{
    size_t rows = (size_t)N * (size_t)H, n = rows * (size_t)e, used = 0;
    Scratch p = {0};
    p.lse_gated = take(base, &used, rows * sizeof(float));
    p.row_sums = take(base, &used, rows * sizeof(float));
    if (by == BY_CUDNN) {
        p.row_scratch = take(base, &used, rows * sizeof(float));
        p.dq_sum = take(base, &used, n * sizeof(float));
        p.y = take(base, &used, n * sizeof(floatX));
    }
    if (by == BY_SM90) {
        p.dq_sum = take(base, &used, attention_sm90_sums(N, H, e) * sizeof(float));
        p.value_sums = take(base, &used, 2 * attention_sm90_value_sums(N, H) * sizeof(float));
    } else {
        p.dq = take(base, &used, n * sizeof(floatX));
        p.dk = take(base, &used, n * sizeof(floatX));
        p.dv = take(base, &used, n * sizeof(floatX));
    }
    if (by == BY_SM80) {
        p.ds_bytes = attention_ds_bytes(N, H);
        p.ds = take(base, &used, p.ds_bytes);
    }
    p.bytes = used;
    return p;
}

size_t attention_scratch_by(AttentionBy by, int N, int H, int e) { return lay_out(by, NULL, N, H, e).bytes; }

size_t attention_scratch_bytes(int N, int H, int e)
{
    return attention_is_open() ? attention_scratch_by(attention_by(true), N, H, e) : 0;
}

// ---- the ops ---------------------------------------------------------------------------------------------

static AttentionCall call_of(const AttentionForward *a, int N, int H, int e)
{
    AttentionCall c = attention_call(a->table, a->slots, a->scale, a->window, N, H, e);
    c.q = a->q;
    c.k = a->k;
    c.v = a->v;
    return c;
}

void attention_forward(Stream s, const AttentionForward *a, int N, int H, int e)
{
    OP_SCOPE(attention_forward, a->window, N, H * e);
    AttentionCall c = call_of(a, N, H, e);
    attention_check_tokens(N, H, false);
    c.y = a->yg;
    c.lse = a->lse;
    c.h = a->h;
    c.gate_w = a->gate_w;
    c.gate_inputs = a->gate_inputs;
    attention_take_counters(&c, s, false);
    AttentionBy by = attention_by(false);
    if (by == BY_SM90) {
        attention_sm90_forward(&c, s);
    } else if (by == BY_SM80) {
        attention_sm80_forward(&c, s);
    } else {
        attention_plan_run(attention_plan_for_op(s, a->slots, N, false), &c, s);
        attention_gate_forward(s, &c);
    }
}

static GateBackward gate_backward(const AttentionBackward *a, const Scratch *p)
{
    return (GateBackward){.lse_gated = p->lse_gated,
                          .row_sums = p->row_sums,
                          .y = p->y,
                          .dgate = a->dgate,
                          .dgate_w = a->dgate_w,
                          .dyg = a->dyg,
                          .yg = a->forward->yg,
                          .lse = a->forward->lse,
                          .h = a->forward->h,
                          .gate_w = a->forward->gate_w,
                          .gate_inputs = a->forward->gate_inputs};
}

static QkvBackward norm_rope_backward(const AttentionBackward *a, const Scratch *p)
{
    return (QkvBackward){.dqkv = a->dqkv,
                         .dlambda = a->dlambda,
                         .dq = p->dq,
                         .dk = p->dk,
                         .dv = a->dv ? a->dv : p->dv,
                         .q = a->forward->q,
                         .k = a->forward->k,
                         .rstd_q = a->rstd_q,
                         .rstd_k = a->rstd_k,
                         .v_raw = a->v_raw,
                         .value_embed = a->value_embed,
                         .tokens = a->tokens,
                         .lambda = a->lambda,
                         .cos = a->cos,
                         .sin = a->sin};
}

static AttentionCall softmax_backward(const AttentionBackward *a, const Scratch *p, const QkvBackward *qkv,
                                      int N, int H, int e)
{
    AttentionCall c = call_of(a->forward, N, H, e);
    c.y = p->y;
    c.lse = p->lse_gated;
    c.dy = a->dyg;
    c.dq = p->dq;
    c.dk = p->dk;
    c.dv = (floatX *)qkv->dv;
    c.qkv = qkv;
    c.row_sums = p->row_sums;
    c.row_scratch = p->row_scratch;
    c.dq_sum = p->dq_sum;
    c.value_sums = p->value_sums;
    c.ds = p->ds;
    c.ds_bytes = p->ds_bytes;
    return c;
}

// The gate moves in front of the softmax (gates.cu); then attention without it; then norm, rotation and value
// mix, of which Hopper's kernels do k's and v's part in their epilogue.
void attention_backward_by(AttentionBy by, Stream s, const AttentionBackward *a, int N, int H, int e)
{
    assert(a->scratch && (uintptr_t)a->scratch % 256 == 0);
    Scratch p = lay_out(by, a->scratch, N, H, e);
    GateBackward gate = gate_backward(a, &p);
    QkvBackward qkv = norm_rope_backward(a, &p);
    AttentionCall c = softmax_backward(a, &p, &qkv, N, H, e);
    attention_take_counters(&c, s, true);
    attention_gate_backward(s, &gate, N, H, e);
    if (by == BY_SM90) {
        DqSums sums = {p.dq_sum, c.dq_state, c.scale, p.value_sums, (int)attention_sm90_value_sums(N, H)};
        attention_sm90_backward(&c, s);
        q_backward(s, &qkv, &sums, N, H);
        return;
    }
    if (by == BY_SM80)
        attention_sm80_backward(&c, s);
    else
        attention_plan_run(attention_plan_for_op(s, c.slots, N, true), &c, s);
    qkv_backward(s, &qkv, N, H, e);
}

void attention_backward(Stream s, const AttentionBackward *a, int N, int H, int e)
{
    OP_SCOPE(attention_backward, a, N, H * e);
    attention_check_tokens(N, H, true);
    attention_backward_by(attention_by(true), s, a, N, H, e);
}
