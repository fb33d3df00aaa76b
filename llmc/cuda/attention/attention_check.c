// Whether cuDNN's kernels, or the own ones for Hopper, agree with the own ones for any GPU on a small batch,
// on this GPU, for this head width. cuDNN's plans compile where they then give wrong results without a word:
// on an H200, dq for head widths that are no multiple of 16 (cuDNN 9.14 and 9.19), all gradients for widths
// of 192 and 256 (cuDNN 9.14). So no plan is trusted unseen.
#include "llmc/cuda/attention/attention.h"
#include <math.h>
#include <stdlib.h>

// Both sides round weights and results to bf16, 0.3% in the 2-norm; a wrong kernel is off by tens of percent,
// or NaN. Values of order one go in. Where no token sees another, gradients of q and k are zero, and what
// sums leave of them in one order or another is compared with what rounding such values to bf16 would leave:
// half a unit in the last place of 1.
#define LARGEST_DIFFERENCE 0.02
#define ROUNDING 0x1p-9

enum { Q, K, V, D_Y, INPUTS, Y = INPUTS, D_Q, D_K, D_V, TENSORS };
static const char *const names[TENSORS] = {"q", "k", "v", "dy", "y", "dq", "dk", "dv"};

typedef struct {
    floatX *t[TENSORS]; // inputs are shared by the two sides
    float *lse, *row_sums;
} Side;

static void fill(Stream s, floatX *p, int64_t n, uint64_t *state)
{
    floatX *host = xcalloc((size_t)n, sizeof *host);
    for (int64_t i = 0; i < n; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        host[i] = float_to_x((float)((double)(*state >> 40) * 0x1p-23 - 1)); // uniform in [-1, 1)
    }
    copy_to_device(s, p, host, (size_t)n * sizeof *p);
    stream_synchronize(s);
    free(host);
}

static AttentionCall call_of(const AttentionCall *base, const Side *side)
{
    AttentionCall c = *base;
    c.q = side->t[Q];
    c.k = side->t[K];
    c.v = side->t[V];
    c.dy = side->t[D_Y];
    c.y = side->t[Y];
    c.lse = side->lse;
    c.row_sums = side->row_sums;
    c.dq = side->t[D_Q];
    c.dk = side->t[D_K];
    c.dv = side->t[D_V];
    return c;
}

static bool same(Stream s, const floatX *x, const floatX *y, int64_t n, const char *peer, const char *name,
                 Error *e)
{
    floatX *a = xcalloc((size_t)n, sizeof *a), *b = xcalloc((size_t)n, sizeof *b);
    double difference = 0, size = 0;
    copy_to_host(s, a, x, (size_t)n * sizeof *a);
    copy_to_host(s, b, y, (size_t)n * sizeof *b);
    stream_synchronize(s);
    for (int64_t i = 0; i < n; i++) {
        double u = x_to_float(a[i]), v = x_to_float(b[i]);
        difference += (u - v) * (u - v);
        size += v * v;
    }
    free(a);
    free(b);
    difference = sqrt(difference / fmax(size, ROUNDING * ROUNDING * (double)n));
    return difference <= LARGEST_DIFFERENCE || // NaN is not: one in y is one in `difference`, whatever fmax
                                               // makes of `size`
           error_set(e, "%s of %s differs by %.2g from that of the portable kernels", name, peer, difference);
}

// Sums over the head of dy * y, (N, H).
static void sum_rows(Stream s, const Side *side, const AttentionCall *c)
{
    int64_t rows = (int64_t)c->N * c->H, n = rows * c->e;
    floatX *dy = xcalloc((size_t)n, sizeof *dy), *y = xcalloc((size_t)n, sizeof *y);
    float *sums = xcalloc((size_t)rows, sizeof *sums);
    copy_to_host(s, dy, side->t[D_Y], (size_t)n * sizeof *dy);
    copy_to_host(s, y, side->t[Y], (size_t)n * sizeof *y);
    stream_synchronize(s);
    for (int64_t i = 0; i < n; i++)
        sums[i / c->e] += x_to_float(dy[i]) * x_to_float(y[i]);
    copy_to_device(s, side->row_sums, sums, (size_t)rows * sizeof *sums);
    stream_synchronize(s);
    free(dy);
    free(y);
    free(sums);
}

static void run_peer(const AttentionPeer *peer, bool backward, AttentionCall *c, Stream s)
{
    attention_take_counters(c, s, backward);
    AttentionPlan *plan = backward ? peer->backward : peer->forward;
    if (plan)
        attention_plan_run(plan, c, s);
    else if (backward)
        attention_sm90_backward(c, s);
    else
        attention_sm90_forward(c, s);
}

bool attention_agree(const AttentionPeer *peer, const AttentionCall *base, Error *e)
{
    int64_t n = (int64_t)base->N * base->H * base->e;
    uint64_t state = 1;
    Stream s = stream_create();
    Side other, own;
    for (int i = 0; i < TENSORS; i++) {
        other.t[i] = own.t[i] = device_alloc((size_t)n * sizeof(floatX), "attention: check");
        if (i < INPUTS)
            fill(s, own.t[i], n, &state);
        else
            other.t[i] = device_alloc((size_t)n * sizeof(floatX), "attention: check");
    }
    size_t row_bytes = (size_t)base->N * (size_t)base->H * sizeof(float);
    own.lse = device_alloc(row_bytes, "attention: check");
    other.lse = device_alloc(row_bytes, "attention: check");
    own.row_sums = other.row_sums = device_alloc(row_bytes, "attention: check");
    AttentionCall a = call_of(base, &other), b = call_of(base, &own);
    run_peer(peer, false, &a, s);
    attention_sm80_forward(&b, s);
    if (peer->with_backward) {
        sum_rows(s, &own, base);
        run_peer(peer, true, &a, s);
        attention_sm80_backward(&b, s);
    }
    bool good = true;
    for (int i = INPUTS; good && i < (peer->with_backward ? TENSORS : Y + 1); i++)
        good = same(s, other.t[i], own.t[i], n, peer->name, names[i], e);
    for (int i = 0; i < TENSORS; i++) {
        device_free(own.t[i]);
        if (i >= INPUTS)
            device_free(other.t[i]);
    }
    device_free(own.lse);
    device_free(other.lse);
    device_free(own.row_sums);
    stream_destroy(s);
    return good;
}
