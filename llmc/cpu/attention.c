// Causal attention inside a window and inside a document, with or without an output gate. Never forms more
// than QUERIES x KEYS scores at once, and no scores of keys that no query of the block sees.
//
// The table: document boundaries, then the query blocks of all documents in order, which the forward pass
// shares out.
//   [0]                       number of documents D
//   [1 .. D+1]                cu_seqlens
//   [D+2]                     number of blocks
//   [D+3 + 2*b], [D+4 + 2*b]  first query and document of block b
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/gemm.h"
#include "llmc/cpu/vmath.h"
#include <math.h>
#include <string.h>

enum { QUERIES = 64, KEYS = 512 };

// A document of n tokens has at most 1 + (n - 1) / QUERIES blocks.
int64_t attention_table_ints(int N, int max_documents)
{
    int64_t documents = max_documents ? max_documents : N;
    return documents + 3 + 2 * (documents + N / QUERIES);
}

int attention_table_build(int32_t *table, const int32_t *cu_seqlens, int num_documents, int N,
                          int max_documents)
{
    assert(num_documents >= 1 && cu_seqlens[0] == 0 && cu_seqlens[num_documents] == N);
    assert(!max_documents || num_documents <= max_documents);
    (void)N, (void)max_documents;
    table[0] = num_documents;
    memcpy(table + 1, cu_seqlens, sizeof(int32_t) * (size_t)(num_documents + 1));
    int32_t *blocks = table + num_documents + 2, count = 0;
    for (int doc = 0; doc < num_documents; doc++)
        for (int32_t t = cu_seqlens[doc]; t < cu_seqlens[doc + 1]; t += QUERIES, count++) {
            blocks[1 + 2 * count] = t;
            blocks[2 + 2 * count] = doc;
        }
    blocks[0] = count;
    return num_documents;
}

size_t attention_scratch(const OpSizes *sizes)
{
    size_t e = (size_t)ceil_div(sizes->dim, sizes->heads), rows = 2 * (size_t)sizes->tokens;
    size_t blocks = (3 * QUERIES + 2 * KEYS) * e + 2 * QUERIES * KEYS + 4 * QUERIES;
    return blocks + 2 * rows * e + 256; // backward holds dk and dv of a document; paired heads are two rows
}

// The sigmoid gate of attention_forward's output; h NULL: none.
typedef struct {
    const floatX *h, *w; // (N, d), (H, inputs)
    int inputs;
} Gate;

// One head of the packed sequence.
typedef struct {
    const floatX *q, *k; // rows of `wide` elements, of which qk belong to the head
    const floatX *v;     // rows of d elements, of which e belong to the head
    Gate gate;           // with the head's weights
    float scale;
    int window, wide, qk, d, e;
} Head;

static Head head_of(const SdpaForward *a, const Gate *gate, int head, int H, int e)
{
    int wide = H * a->qk;
    assert(a->qk <= e);
    return (Head){.q = a->q + head * a->qk,
                  .k = a->k + head * a->qk,
                  .v = a->v + head * e,
                  .gate = {gate->h, gate->h ? gate->w + head * gate->inputs : NULL, gate->inputs},
                  .scale = a->scale,
                  .window = a->window,
                  .wide = wide,
                  .qk = a->qk,
                  .d = H * e,
                  .e = e};
}

static float gate_of(const Head *h, int t)
{
    return h->gate.h ? sigmoid(gate_dot(h->gate.h + (int64_t)t * h->d, h->gate.w, h->gate.inputs)) : 1;
}

// Queries q0 .. q0 + rows of one document.
typedef struct {
    int q0, rows, doc_begin;
} Block;

static int first_key(const Block *b, int window)
{
    return b->q0 - window > b->doc_begin ? b->q0 - window : b->doc_begin;
}

// Keys that query `i` sees in a tile of keys [k0, k0 + keys), as a range of columns.
static void seen(const Block *b, int window, int i, int k0, int keys, int *begin, int *end)
{
    int query = b->q0 + i, first = query - window > b->doc_begin ? query - window : b->doc_begin;
    *begin = (int)min_i64(keys, max_i64(0, first - k0));
    *end = (int)max_i64(*begin, min_i64(keys, query + 1 - k0));
}

// ---- forward ----------------------------------------------------------------------------------------------

// Running softmax of the block's rows over tiles of keys: y = sum of e^(s - max) v, sum = sum of e^(s - max).
typedef struct {
    float *q, *k, *v, *scores, *y; // (QUERIES, qk), (KEYS, qk), (KEYS, e), (QUERIES, KEYS), (QUERIES, e)
    float *max, *sum;              // (QUERIES)
} Forward;

// Scores of one row to weights; unseen columns to 0. Rescales what the row has so far when its maximum grows.
static void softmax_row(Forward *f, int i, float *restrict p, int begin, int end, int keys, float scale,
                        int e)
{
    float max = f->max[i], sum = 0;
#pragma omp simd reduction(max : max)
    for (int j = begin; j < end; j++)
        max = p[j] * scale > max ? p[j] * scale : max;
    for (int j = 0; j < begin; j++)
        p[j] = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = begin; j < end; j++) {
        float w = fast_exp(p[j] * scale - max);
        p[j] = w;
        sum += w;
    }
    for (int j = end; j < keys; j++)
        p[j] = 0;
    if (max > f->max[i]) {
        float shrink = fast_exp(f->max[i] - max);
        f->sum[i] *= shrink;
        for (int j = 0; j < e; j++)
            f->y[i * e + j] *= shrink;
        f->max[i] = max;
    }
    f->sum[i] += sum;
}

static void forward_tile(const Head *h, const Block *b, Forward *f, int k0, int keys)
{
    int qk = h->qk, e = h->e;
    load_block(f->k, h->k + (int64_t)k0 * h->wide, keys, qk, h->wide);
    load_block(f->v, h->v + (int64_t)k0 * h->d, keys, e, h->d);
    gemm(b->rows, keys, qk, 1, stored(f->q, qk), transposed(f->k, qk), 0, (GemmOut){f->scores, keys});
    for (int i = 0; i < b->rows; i++) {
        int begin, end;
        seen(b, h->window, i, k0, keys, &begin, &end);
        softmax_row(f, i, f->scores + (int64_t)i * keys, begin, end, keys, h->scale, e);
    }
    gemm(b->rows, e, keys, 1, stored(f->scores, keys), stored(f->v, e), 1, (GemmOut){f->y, e});
}

// y (N, d) and lse (N, H) of the whole sequence, at this head.
static void forward_block(const Head *h, const Block *b, floatX *y, float *lse, int H)
{
    size_t e = (size_t)h->e;
    float *arena = cpu_scratch((2 * QUERIES + 2 * KEYS) * e + QUERIES * KEYS + 2 * QUERIES);
    Forward f;
    f.q = scratch_take(&arena, QUERIES * e);
    f.y = scratch_take(&arena, QUERIES * e);
    f.k = scratch_take(&arena, KEYS * e);
    f.v = scratch_take(&arena, KEYS * e);
    f.scores = scratch_take(&arena, QUERIES * KEYS);
    f.max = scratch_take(&arena, QUERIES);
    f.sum = arena;
    load_block(f.q, h->q + (int64_t)b->q0 * h->wide, b->rows, h->qk, h->wide);
    memset(f.y, 0, sizeof(float) * (size_t)b->rows * e);
    for (int i = 0; i < b->rows; i++) {
        f.max[i] = -INFINITY;
        f.sum[i] = 0;
    }
    for (int k0 = first_key(b, h->window), last = b->q0 + b->rows; k0 < last; k0 += KEYS)
        forward_tile(h, b, &f, k0, (int)min_i64(KEYS, last - k0));
    for (int i = 0; i < b->rows; i++) {
        int t = b->q0 + i;
        float factor = gate_of(h, t) / f.sum[i];
        for (size_t j = 0; j < e; j++)
            f.y[i * e + j] *= factor;
        store_row(y + (int64_t)t * h->d, f.y + i * e, h->e);
        lse[(int64_t)t * H] = f.max[i] + logf(f.sum[i]);
    }
}

static void forward(const SdpaForward *a, const Gate *gate, int H, int e)
{
    const int32_t *start = a->table + 1, *blocks = a->table + a->table[0] + 2;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int n = 0; n < blocks[0]; n++)
        for (int head = 0; head < H; head++) {
            int q0 = blocks[1 + 2 * n], doc = blocks[2 + 2 * n];
            Block b = {q0, (int)min_i64(QUERIES, start[doc + 1] - q0), start[doc]};
            Head h = head_of(a, gate, head, H, e);
            forward_block(&h, &b, a->y + head * e, a->lse + head, H);
        }
}

void sdpa_forward(Stream s, const SdpaForward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_forward, a, N, H, e);
    forward(a, &(Gate){NULL, NULL, 0}, H, e);
}

// With yg for y.
static SdpaForward sdpa_of(const AttentionForward *a, int e)
{
    return (SdpaForward){a->yg, a->lse, a->q, a->k, a->v, e, a->table, a->slots, a->window, a->scale};
}

static Gate gate_tensors(const AttentionForward *a) { return (Gate){a->h, a->gate_w, a->gate_inputs}; }

void attention_forward(Stream s, const AttentionForward *a, int N, int H, int e)
{
    OP_SCOPE(attention_forward, a->window, N, H * e);
    SdpaForward f = sdpa_of(a, e);
    Gate gate = gate_tensors(a);
    forward(&f, &gate, H, e);
}

// ---- backward ---------------------------------------------------------------------------------------------

// Backward of the whole sequence.
typedef struct {
    const SdpaForward *forward; // with a gate, y is its result
    floatX *dq, *dk, *dv;
    int wide, d;      // elements from a row to the next of dq and dk, and of dv
    const floatX *dy; // (N, d), with a gate of its result
    Gate gate;
    float *dgate;       // (N, H), with a gate
    const float *delta; // (N, H) sums of dy * y, or NULL: computed here
    int H, e;
} Gradients;

typedef struct {
    float *q, *dy, *dq; // (QUERIES, qk), (QUERIES, e), (QUERIES, qk or e); dy: of what the gate takes
    float *k, *v;       // (KEYS, qk), (KEYS, e)
    float *p, *dp;      // (QUERIES, KEYS)
    float *delta, *lse; // (QUERIES)
    float *dk, *dv;     // (document, qk), (document, e)
} Backward;

// p: scores to weights; dp: gradient of the weights to gradient of the unscaled scores.
static void backward_row(float *restrict p, float *restrict dp, int begin, int end, int keys, float scale,
                         float lse, float delta)
{
    for (int j = 0; j < begin; j++)
        p[j] = dp[j] = 0;
#pragma omp simd
    for (int j = begin; j < end; j++) {
        float w = fast_exp(p[j] * scale - lse);
        p[j] = w;
        dp[j] = w * (dp[j] - delta) * scale;
    }
    for (int j = end; j < keys; j++)
        p[j] = dp[j] = 0;
}

static void backward_tile(const Head *h, const Block *b, Backward *w, int k0, int keys)
{
    int qk = h->qk, e = h->e, rows = b->rows;
    float *dk = w->dk + (int64_t)(k0 - b->doc_begin) * qk, *dv = w->dv + (int64_t)(k0 - b->doc_begin) * e;
    load_block(w->k, h->k + (int64_t)k0 * h->wide, keys, qk, h->wide);
    load_block(w->v, h->v + (int64_t)k0 * h->d, keys, e, h->d);
    gemm(rows, keys, qk, 1, stored(w->q, qk), transposed(w->k, qk), 0, (GemmOut){w->p, keys});
    gemm(rows, keys, e, 1, stored(w->dy, e), transposed(w->v, e), 0, (GemmOut){w->dp, keys});
    for (int i = 0; i < rows; i++) {
        int begin, end;
        seen(b, h->window, i, k0, keys, &begin, &end);
        backward_row(w->p + (int64_t)i * keys, w->dp + (int64_t)i * keys, begin, end, keys, h->scale,
                     w->lse[i], w->delta[i]);
    }
    gemm(keys, e, rows, 1, transposed(w->p, keys), stored(w->dy, e), 1, (GemmOut){dv, e});
    gemm(keys, qk, rows, 1, transposed(w->dp, keys), stored(w->q, qk), 1, (GemmOut){dk, qk});
    gemm(rows, qk, keys, 1, stored(w->dp, keys), stored(w->k, qk), 1, (GemmOut){w->dq, qk});
}

static void backward_block(const Head *h, const Gradients *g, int head, const Block *b, Backward *w)
{
    int qk = h->qk, e = h->e;
    int64_t at = (int64_t)b->q0 * h->d + head * e;
    load_block(w->q, h->q + (int64_t)b->q0 * h->wide, b->rows, qk, h->wide);
    load_block(w->dy, g->dy + at, b->rows, e, h->d);
    if (!g->delta)
        load_block(w->dq, g->forward->y + at, b->rows, e, h->d); // for its sum alone
    for (int i = 0; i < b->rows; i++) {
        int64_t of_head = (int64_t)(b->q0 + i) * g->H + head;
        w->delta[i] = g->delta ? g->delta[of_head] : dot(w->dy + i * e, w->dq + i * e, e);
        w->lse[i] = g->forward->lse[of_head];
        if (!g->gate.h)
            continue;
        float sig = gate_of(h, b->q0 + i);
        g->dgate[of_head] = w->delta[i] * (1 - sig);
        for (int j = 0; j < e; j++)
            w->dy[i * e + j] *= sig;
    }
    memset(w->dq, 0, sizeof(float) * (size_t)b->rows * (size_t)qk);
    for (int k0 = first_key(b, h->window), last = b->q0 + b->rows; k0 < last; k0 += KEYS)
        backward_tile(h, b, w, k0, (int)min_i64(KEYS, last - k0));
    for (int i = 0; i < b->rows; i++)
        store_row(g->dq + (int64_t)(b->q0 + i) * g->wide + head * qk, w->dq + i * qk, qk);
}

// A document and head is one piece of work, because its query blocks add to the same keys.
static void backward_document(const Gradients *g, int head, int begin, int end)
{
    Head h = head_of(g->forward, &g->gate, head, g->H, g->e);
    size_t e = (size_t)h.e, qk = (size_t)h.qk, tokens = (size_t)(end - begin);
    float *arena =
        cpu_scratch((3 * QUERIES + 2 * KEYS) * e + 2 * QUERIES * KEYS + 2 * QUERIES + tokens * (qk + e) + 64);
    Backward w;
    w.q = scratch_take(&arena, QUERIES * qk);
    w.dy = scratch_take(&arena, QUERIES * e);
    w.dq = scratch_take(&arena, QUERIES * e);
    w.k = scratch_take(&arena, KEYS * qk);
    w.v = scratch_take(&arena, KEYS * e);
    w.p = scratch_take(&arena, QUERIES * KEYS);
    w.dp = scratch_take(&arena, QUERIES * KEYS);
    w.delta = scratch_take(&arena, QUERIES);
    w.lse = scratch_take(&arena, QUERIES);
    w.dk = scratch_take(&arena, tokens * qk);
    w.dv = arena;
    memset(w.dk, 0, sizeof(float) * tokens * qk);
    memset(w.dv, 0, sizeof(float) * tokens * e);
    for (int q0 = begin; q0 < end; q0 += QUERIES)
        backward_block(&h, g, head, &(Block){q0, (int)min_i64(QUERIES, end - q0), begin}, &w);
    for (size_t i = 0; i < tokens; i++) {
        int64_t t = begin + (int64_t)i;
        store_row(g->dk + t * g->wide + head * h.qk, w.dk + i * qk, h.qk);
        store_row(g->dv + t * g->d + head * h.e, w.dv + i * e, h.e);
    }
}

static void backward(const Gradients *g)
{
    int documents = g->forward->table[0];
    const int32_t *start = g->forward->table + 1;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int doc = 0; doc < documents; doc++)
        for (int head = 0; head < g->H; head++)
            backward_document(g, head, start[doc], start[doc + 1]);
}

size_t sdpa_scratch_bytes(int N, int H, int qk, int e)
{
    (void)N, (void)H, (void)qk, (void)e;
    return 0;
}

void sdpa_backward(Stream s, const SdpaBackward *a, int N, int H, int e)
{
    OP_SCOPE(sdpa_backward, a, N, H, e);
    backward(&(Gradients){.forward = a->forward,
                          .dq = a->dq,
                          .dk = a->dk,
                          .dv = a->dv,
                          .wide = H * a->forward->qk,
                          .d = H * e,
                          .dy = a->dy,
                          .delta = a->delta,
                          .H = H,
                          .e = e});
}

// dgate_w += dgate^T h[0:gate_inputs]
static void gate_weight_grad(const AttentionBackward *a, int N, int H, int d)
{
    const AttentionForward *f = a->forward;
    int inputs = f->gate_inputs, weights = H * inputs;
    float *sums = cpu_shared((size_t)PARTS * (size_t)weights);
    memset(sums, 0, sizeof(float) * PARTS * (size_t)weights);
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            for (int i = 0; i < weights; i++) {
                float x = x_to_float(f->h[(int64_t)t * d + i % inputs]);
                sums[part * weights + i] += a->dgate[(int64_t)t * H + i / inputs] * x;
            }
    for (int i = 0; i < weights; i++) {
        double total = 0;
        for (int part = 0; part < PARTS; part++)
            total += sums[part * weights + i];
        a->dgate_w[i] += (float)total;
    }
}

size_t attention_scratch_bytes(int N, int H, int e)
{
    (void)N, (void)H, (void)e; // dqkv holds dq, dk and dv until qkv_backward changes them in place
    return 0;
}

void attention_backward(Stream s, const AttentionBackward *a, int N, int H, int e)
{
    OP_SCOPE(attention_backward, a, N, H * e);
    int d = H * e;
    SdpaForward f = sdpa_of(a->forward, e);
    backward(&(Gradients){.forward = &f,
                          .dq = a->dqkv,
                          .dk = a->dqkv + d,
                          .dv = a->dqkv + 2 * d,
                          .wide = 3 * d,
                          .d = 3 * d,
                          .dy = a->dyg,
                          .gate = gate_tensors(a->forward),
                          .dgate = a->dgate,
                          .H = H,
                          .e = e});
    gate_weight_grad(a, N, H, d);
    qkv_backward(a, N, H, e);
}
