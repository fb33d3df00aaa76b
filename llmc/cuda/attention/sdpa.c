// Softmax attention alone, by the kernels of attention_forward and _backward: they take any number of heads
// and rows, no gate is a gate of 1, and their backward pass leaves dq, dk and dv. Those for Hopper take q and
// k of 96 columns where v has 128; other narrow heads go to the portable ones.
//
// dq of Hopper's kernels is a sum in fp32, rounded to bf16 by a pass of its own: 6 d bytes a token; those for
// any GPU keep gradients of scores (sm80_backward.cu). Row sums of dy * y are another pass, where they are
// not given: 4 d. Where heads_backward follows, it reads the sums, and the planes of k and v may be written
// by attention's epilogue (AttentionCall.heads).
#include "llmc/cuda/attention/attention.h"

bool backend_takes_heads(int qk, int e)
{
    return qk == e || (qk > 0 && qk < e && qk % 8 == 0 && e % 8 == 0 && qk <= ATTENTION_OWN_MAX_NARROW &&
                       e <= ATTENTION_OWN_MAX_WIDTH);
}

static void check_widths(int qk, int e)
{
    if (!backend_takes_heads(qk, e))
        fatal(EXIT_BAD_INPUT,
              "attention with q and k of width %d a head and values of %d: the CUDA program takes equal "
              "widths, or q and k of a multiple of 8 up to %d below that of v",
              qk, e, ATTENTION_OWN_MAX_NARROW);
}

static bool by_sm90(int qk, int e, bool backward)
{
    return attention_is_sm90(backward) && attention_sm90_takes(qk, e);
}

static void check_prepared(bool prepared, const Error *e)
{
    if (!prepared)
        fatal(EXIT_BAD_INPUT, "%s", e->text);
}

static AttentionCall call_of(const SdpaForward *a, int N, int H, int e, bool backward)
{
    check_widths(a->qk, e);
    attention_check_tokens(N, H, backward);
    AttentionCall c = attention_call(a->table, a->slots, a->scale, a->window, N, H, e);
    c.qk = a->qk;
    c.q = a->q;
    c.k = a->k;
    c.v = a->v;
    c.y = a->y;
    c.lse = a->lse;
    return c;
}

void sdpa_forward(Stream s, const SdpaForward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_forward, a, N, H, e);
    AttentionCall c = call_of(a, N, H, e, false);
    Error error;
    attention_take_counters(&c, s, false);
    if (by_sm90(c.qk, e, false)) {
        attention_sm90_forward(&c, s);
    } else {
        check_prepared(attention_sm80_prepare(c.qk, e, &error), &error);
        attention_sm80_forward(&c, s);
    }
}

static size_t row_sum_bytes(int N, int H) { return (size_t)round_up((int64_t)N * H * 4, 256); }

size_t sdpa_scratch_bytes(int N, int H, int qk, int e)
{
    check_widths(qk, e);
    return row_sum_bytes(N, H) +
           (by_sm90(qk, e, true) ? attention_sm90_sums(N, H, qk) * sizeof(float) : attention_ds_bytes(N, H));
}

// dq: out, or NULL: Hopper's kernels leave it in the sums that are returned.  planes: of heads->dqkv, written
// in place of dk (PLANE_K) and dv (PLANE_V)
static DqSums backward(Stream s, const SdpaBackward *a, floatX *dq, const HeadsBackward *heads, int planes,
                       int N, int H, int e)
{
    assert(a->scratch && (uintptr_t)a->scratch % 256 == 0);
    AttentionCall c = call_of(a->forward, N, H, e, true);
    Error error;
    c.row_sums = a->delta ? a->delta : a->scratch;
    c.dy = a->dy;
    c.dq = dq;
    c.dk = a->dk;
    c.dv = planes & PLANE_V ? NULL : a->dv;
    c.heads = planes & PLANE_K ? heads : NULL;
    attention_take_counters(&c, s, true);
    if (!a->delta)
        attention_row_sums(s, a->scratch, a->dy, a->forward->y, (int64_t)N * H, e);
    if (by_sm90(c.qk, e, true)) {
        c.dq_sum = (float *)((char *)a->scratch + row_sum_bytes(N, H));
        attention_sm90_backward(&c, s);
    } else {
        check_prepared(attention_sm80_prepare_backward(c.qk, e, &error), &error);
        c.ds = (char *)a->scratch + row_sum_bytes(N, H);
        c.ds_bytes = attention_ds_bytes(N, H);
        attention_sm80_backward(&c, s);
    }
    return (DqSums){.sums = c.dq_sum, .state = c.dq_state, .scale = c.scale};
}

void sdpa_backward(Stream s, const SdpaBackward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_backward, a, N, H, e);
    backward(s, a, a->dq, NULL, 0, N, H, e);
}

void sdpa_heads_backward(Stream s, const SdpaHeadsBackward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_heads_backward, a, N, H, e);
    const HeadsForward *f = a->heads.forward;
    int pairs = f->paired ? 2 : 1;
    assert(H % pairs == 0);
    bool in_sums = by_sm90(f->qk, e, true) && heads_backward_takes_sums(&a->heads, H, e),
         keys = in_sums && !f->offset && !a->heads.dk_add,
         values = keys && !f->value.table && !a->heads.dv_add;
    int planes = (keys ? PLANE_K : 0) | (values ? PLANE_V : 0); // by attention's epilogue
    DqSums sums =
        backward(s, &a->sdpa, in_sums ? NULL : a->sdpa.dq, &a->heads, planes, N * pairs, H / pairs, e);
    if (in_sums)
        heads_backward_from_sums(s, &a->heads, &sums, PLANES_ALL & ~planes, N, H, e);
    else
        heads_backward(s, &a->heads, N, H, e);
}
