// Whether cuDNN's kernels, or the own ones for Hopper, agree with the own ones for any GPU on a small batch,
// on this GPU, for this head width; and whether these agree with the host. cuDNN's plans compile where they
// then give wrong results without a word: on an H200, dq for head widths that are no multiple of 16
// (cuDNN 9.14 and 9.19), all gradients for widths of 192 and 256 (cuDNN 9.14). So no plan is trusted unseen.
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

// Device memory of a check.
enum { MOST_PIECES = 32 };
typedef struct {
    Stream stream;
    void *piece[MOST_PIECES];
    int count;
    uint64_t state; // of the random numbers
} Pieces;

static void *take(Pieces *m, size_t bytes)
{
    assert(m->count < MOST_PIECES);
    return m->piece[m->count++] = device_alloc(bytes, "attention: check");
}

static Pieces pieces_begin(void) { return (Pieces){.stream = stream_create(), .state = 1}; }

static void pieces_end(Pieces *m)
{
    while (m->count)
        device_free(m->piece[--m->count]);
    stream_destroy(m->stream);
}

static double uniform(Pieces *m) // in [-1, 1)
{
    m->state = m->state * 6364136223846793005u + 1442695040888963407u;
    return (double)(m->state >> 40) * 0x1p-23 - 1;
}

static void upload(Pieces *m, void *to, void *host, size_t bytes) // and frees host
{
    copy_to_device(m->stream, to, host, bytes);
    stream_synchronize(m->stream);
    free(host);
}

static floatX *filled(Pieces *m, int64_t n)
{
    floatX *p = take(m, (size_t)n * sizeof *p), *host = xcalloc((size_t)n, sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = float_to_x((float)uniform(m));
    upload(m, p, host, (size_t)n * sizeof *p);
    return p;
}

// In the 2-norm, from sums of n squares.
static double relative(double difference, double size, int64_t n)
{
    return sqrt(difference / fmax(size, ROUNDING * ROUNDING * (double)n));
}

// Relative distance in the 2-norm of x and y, `rows` rows of `count` elements, `pitch` apart; NaN when one is
// in x.
static double distance(Stream s, const floatX *x, const floatX *y, int64_t rows, int count, int pitch)
{
    size_t n = (size_t)((rows - 1) * pitch + count);
    floatX *a = xcalloc(n, sizeof *a), *b = xcalloc(n, sizeof *b);
    double difference = 0, size = 0;
    copy_to_host(s, a, x, n * sizeof *a);
    copy_to_host(s, b, y, n * sizeof *b);
    stream_synchronize(s);
    for (int64_t i = 0; i < rows; i++)
        for (int k = 0; k < count; k++) {
            double u = x_to_float(a[i * pitch + k]), v = x_to_float(b[i * pitch + k]);
            difference += (u - v) * (u - v);
            size += v * v;
        }
    free(a);
    free(b);
    return relative(difference, size, rows * count);
}

// ---- softmax alone ----------------------------------------------------------------------------------------

typedef struct {
    floatX *t[TENSORS]; // inputs are shared by the two sides
    float *lse, *row_sums;
} Side;

static int width_of(const AttentionCall *c, int tensor)
{
    return tensor == Q || tensor == K || tensor == D_Q || tensor == D_K ? c->qk : c->e;
}

static int64_t elements(const AttentionCall *c, int tensor)
{
    return (int64_t)c->N * c->H * width_of(c, tensor);
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

static Side own_side(Pieces *m, const AttentionCall *base)
{
    Side own;
    size_t rows = (size_t)base->N * (size_t)base->H;
    for (int i = 0; i < TENSORS; i++)
        own.t[i] =
            i < INPUTS ? filled(m, elements(base, i)) : take(m, (size_t)elements(base, i) * sizeof(floatX));
    own.lse = take(m, rows * sizeof(float));
    own.row_sums = take(m, rows * sizeof(float));
    return own;
}

static void run_own(Pieces *m, AttentionCall *c, float *row_sums, bool with_backward)
{
    attention_sm80_forward(c, m->stream);
    if (!with_backward)
        return;
    c->ds_bytes = attention_sm80_ds_bytes(c->N, c->H, c->reach);
    c->ds = take(m, c->ds_bytes);
    attention_row_sums(m->stream, row_sums, c->dy, c->y, (int64_t)c->N * c->H, c->e);
    attention_sm80_backward(c, m->stream);
}

bool attention_agree(const AttentionPeer *peer, const AttentionCall *base, Error *e)
{
    Pieces m = pieces_begin();
    Side own = own_side(&m, base), other = own;
    int64_t rows = (int64_t)base->N * base->H;
    int tensors = peer->with_backward ? TENSORS : Y + 1;
    for (int i = INPUTS; i < TENSORS; i++)
        other.t[i] = take(&m, (size_t)elements(base, i) * sizeof(floatX));
    other.lse = take(&m, (size_t)rows * sizeof(float));
    AttentionCall a = call_of(base, &other), b = call_of(base, &own);
    a.row_scratch = take(&m, (size_t)rows * sizeof(float));
    a.dq_sum = take(&m, max_i64(elements(base, V), (int64_t)attention_sm90_sums(base->N, base->H, base->qk)) *
                            sizeof(float));
    run_own(&m, &b, own.row_sums, peer->with_backward);
    run_peer(peer, false, &a, m.stream);
    if (peer->with_backward)
        run_peer(peer, true, &a, m.stream);
    bool good = true;
    for (int i = INPUTS; good && i < tensors; i++) {
        int64_t n = elements(base, i);
        double d = distance(m.stream, other.t[i], own.t[i], n, 1, 1);
        good =
            d <= LARGEST_DIFFERENCE || // NaN is not
            error_set(e,
                      "%s of %s (heads of q and k %d wide) differs by %.2g from that of the portable kernels",
                      names[i], peer->name, base->qk, d);
    }
    pieces_end(&m);
    return good;
}

// ---- the sm80 kernels beside the host ---------------------------------------------------------------------

// A head of a tensor in double, (N, width), owned by the caller.
static double *head_of(Stream s, const floatX *x, const AttentionCall *c, int head, int width)
{
    int64_t n = (int64_t)c->N * c->H * width;
    floatX *all = xcalloc((size_t)n, sizeof *all);
    double *own = xcalloc((size_t)c->N * (size_t)width, sizeof *own);
    copy_to_host(s, all, x, (size_t)n * sizeof *all);
    stream_synchronize(s);
    for (int t = 0; t < c->N; t++)
        for (int i = 0; i < width; i++)
            own[t * width + i] = x_to_float(all[((int64_t)t * c->H + head) * width + i]);
    free(all);
    return own;
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static void add_scaled(double *to, const double *x, double factor, int n)
{
    for (int i = 0; i < n; i++)
        to[i] += factor * x[i];
}

// Query i sees keys lo .. i.  x (TENSORS): of one head; p (N): space for weights
static void query_on_host(double *const *x, const AttentionCall *c, int i, int lo, double *p)
{
    int qk = c->qk, e = c->e;
    const double *q = x[Q] + i * qk, *dy = x[D_Y] + i * e;
    double *y = x[Y] + i * e, largest = -INFINITY, sum = 0;
    for (int j = lo; j <= i; j++)
        p[j] = (double)c->scale * dot(q, x[K] + j * qk, qk);
    for (int j = lo; j <= i; j++)
        largest = fmax(largest, p[j]);
    for (int j = lo; j <= i; j++)
        p[j] = exp(p[j] - largest);
    for (int j = lo; j <= i; j++)
        sum += p[j];
    for (int j = lo; j <= i; j++)
        p[j] /= sum;
    for (int j = lo; j <= i; j++)
        add_scaled(y, x[V] + j * e, p[j], e);
    double row_sum = dot(dy, y, e);
    for (int j = lo; j <= i; j++) {
        double ds = (double)c->scale * p[j] * (dot(dy, x[V] + j * e, e) - row_sum);
        add_scaled(x[D_Q] + i * qk, x[K] + j * qk, ds, qk);
        add_scaled(x[D_K] + j * qk, q, ds, qk);
        add_scaled(x[D_V] + j * e, dy, p[j], e);
    }
}

static bool head_is_right(Stream s, const AttentionCall *c, const Side *own, const int32_t *cu, int documents,
                          int head, int tensors, Error *e)
{
    double *x[TENSORS], *p = xcalloc((size_t)c->N, sizeof *p);
    bool good = true;
    for (int i = 0; i < TENSORS; i++)
        x[i] = i < INPUTS ? head_of(s, own->t[i], c, head, width_of(c, i))
                          : xcalloc((size_t)c->N * (size_t)width_of(c, i), sizeof **x);
    for (int d = 0; d < documents; d++)
        for (int i = cu[d]; i < cu[d + 1]; i++)
            query_on_host(x, c, i, (int)max_i64(cu[d], i - c->window), p);
    for (int i = INPUTS; good && i < tensors; i++) {
        int64_t n = (int64_t)c->N * width_of(c, i);
        double *got = head_of(s, own->t[i], c, head, width_of(c, i)), difference = 0, size = 0;
        for (int64_t k = 0; k < n; k++) {
            difference += (got[k] - x[i][k]) * (got[k] - x[i][k]);
            size += x[i][k] * x[i][k];
        }
        free(got);
        double off = relative(difference, size, n);
        good =
            off <= LARGEST_DIFFERENCE || // NaN is not
            error_set(e, "these differ from the host's: %s of attention (head %d, q and k %d wide) by %.2g",
                      names[i], head, c->qk, off);
    }
    for (int i = 0; i < TENSORS; i++)
        free(x[i]);
    free(p);
    return good;
}

bool attention_sm80_is_right(const AttentionCall *base, const int32_t *cu, int documents, bool with_backward,
                             Error *e)
{
    if (!attention_sm80_prepare(base->qk, base->e, e) ||
        (with_backward && !attention_sm80_prepare_backward(base->qk, base->e, e)))
        return false;
    Pieces m = pieces_begin();
    Side own = own_side(&m, base);
    AttentionCall c = call_of(base, &own);
    int tensors = with_backward ? TENSORS : Y + 1;
    run_own(&m, &c, own.row_sums, with_backward);
    bool good = head_is_right(m.stream, &c, &own, cu, documents, 0, tensors, e) &&
                (c.H == 1 || head_is_right(m.stream, &c, &own, cu, documents, c.H - 1, tensors, e));
    pieces_end(&m);
    return good;
}

// ---- down to the gradient of raw q, k and v ---------------------------------------------------------------

// Five roundings to bf16 lie between the two: that of gradients of scores on both sides (portable kernels
// scale them before), that of dq and dk in the portable kernels, that of the result on both sides. v has
// fewer: weights, dv and result are rounded on both sides from the same values but for fp32. A rounding is
// off by 2^-8 of the value at most, and by 2^-7 / sqrt(12) / sqrt(2) = 0.16% in the mean of squares over all
// mantissas: all five by 0.36%. The limit is 5 / 512, 2.7 times that.
#define GRADIENT_DIFFERENCE (5 * 0x1p-9)
enum { GATE_INPUTS = 12, ROWS_OF_TABLE = 16 };

static float *filled_floats(Pieces *m, int64_t n, double middle, double reach)
{
    float *p = take(m, (size_t)n * sizeof *p), *host = xcalloc((size_t)n, sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = (float)(middle + reach * uniform(m));
    upload(m, p, host, (size_t)n * sizeof *p);
    return p;
}

// Of angles in (-pi, pi).
static void fill_rotations(Pieces *m, AttentionBackward *b, int64_t n)
{
    floatX *cosines = xcalloc((size_t)n, sizeof *cosines), *sines = xcalloc((size_t)n, sizeof *sines);
    floatX *cos_to = take(m, (size_t)n * sizeof *cos_to), *sin_to = take(m, (size_t)n * sizeof *sin_to);
    for (int64_t i = 0; i < n; i++) {
        double angle = 3.14159 * uniform(m);
        cosines[i] = float_to_x((float)cos(angle));
        sines[i] = float_to_x((float)sin(angle));
    }
    upload(m, cos_to, cosines, (size_t)n * sizeof *cos_to);
    upload(m, sin_to, sines, (size_t)n * sizeof *sin_to);
    b->cos = cos_to;
    b->sin = sin_to;
}

static void fill_tokens(Pieces *m, AttentionBackward *b, int N)
{
    int32_t *to = take(m, (size_t)N * sizeof *to), *host = xcalloc((size_t)N, sizeof *host);
    for (int i = 0; i < N; i++)
        host[i] = i % ROWS_OF_TABLE;
    upload(m, to, host, (size_t)N * sizeof *to);
    b->tokens = to;
}

// Forward by the portable kernels, backward from there by both.
static bool gradients_agree(const AttentionPeer *peer, const AttentionCall *base, Error *error)
{
    static const char *const planes[] = {"q", "k", "v"};
    Pieces m = pieces_begin();
    int N = base->N, H = base->H, e = base->e, d = H * e;
    int64_t n = (int64_t)N * d, rows = (int64_t)N * H;
    AttentionForward f = {.yg = take(&m, (size_t)n * sizeof(floatX)),
                          .lse = take(&m, (size_t)rows * sizeof(float)),
                          .q = filled(&m, n),
                          .k = filled(&m, n),
                          .v = filled(&m, n),
                          .h = filled(&m, n),
                          .gate_w = filled(&m, H * GATE_INPUTS),
                          .table = base->length, // part 0
                          .slots = base->slots,
                          .window = base->window,
                          .scale = base->scale,
                          .gate_inputs = GATE_INPUTS};
    AttentionCall c = *base;
    c.q = f.q;
    c.k = f.k;
    c.v = f.v;
    c.h = f.h;
    c.gate_w = f.gate_w;
    c.gate_inputs = f.gate_inputs;
    c.y = f.yg;
    c.lse = f.lse;
    attention_sm80_forward(&c, m.stream);
    AttentionBackward b = {.forward = &f,
                           .dlambda = filled_floats(&m, 2, 0, 0),
                           .dgate = filled_floats(&m, rows, 0, 0),
                           .dgate_w = filled_floats(&m, H * GATE_INPUTS, 0, 0),
                           .dyg = filled(&m, n),
                           .rstd_q = filled_floats(&m, rows, 1, 0.5),
                           .rstd_k = filled_floats(&m, rows, 1, 0.5),
                           .v_raw = filled(&m, n),
                           .value_embed = filled(&m, (int64_t)ROWS_OF_TABLE * d),
                           .lambda = filled_floats(&m, 2, 0.5, 0.1)};
    fill_rotations(&m, &b, (int64_t)N * (e / 4));
    fill_tokens(&m, &b, N);
    floatX *result[2];
    for (int i = 0; i < 2; i++) {
        AttentionBy by = i ? BY_SM80 : BY_SM90;
        b.dqkv = result[i] = take(&m, (size_t)(3 * n) * sizeof(floatX));
        b.scratch = take(&m, attention_scratch_by(by, N, H, e));
        attention_backward_by(by, m.stream, &b, N, H, e);
    }
    bool good = true;
    for (int plane = 0; good && plane < 3; plane++) {
        double off = distance(m.stream, result[0] + plane * d, result[1] + plane * d, N, d, 3 * d);
        good =
            off <= GRADIENT_DIFFERENCE || // NaN is not
            error_set(error, "the gradient of raw %s of %s differs by %.2g from that of the portable kernels",
                      planes[plane], peer->name, off);
    }
    pieces_end(&m);
    return good;
}

bool attention_sm90_agrees(const AttentionPeer *peer, const AttentionCall *base, Error *e)
{
    AttentionCall c = *base;
    for (c.qk = 8; c.qk <= c.e; c.qk += 8) {
        if (!attention_sm90_takes(c.qk, c.e))
            continue;
        if (!attention_sm80_prepare(c.qk, c.e, e) ||
            (peer->with_backward && !attention_sm80_prepare_backward(c.qk, c.e, e)) ||
            !attention_agree(peer, &c, e))
            return false;
    }
    return !peer->with_backward || gradients_agree(peer, base, e);
}
