// Attention of rows that continue texts, over cached keys and values: row by row, a tile of positions at a
// time.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/vmath.h"
#include <math.h>
#include <string.h>

enum { TILE = 512 };

// ---- the cache --------------------------------------------------------------------------------------------

static int64_t cache_row(const TextCache *c, int text, int position)
{
    return (int64_t)text * c->rows + position % c->rows;
}

// The half of each head that a key offset moves goes to another position.
static void store_key(const TextCache *c, const floatX *k, int text, int position, int H, int qk)
{
    int half = qk / 2;
    int64_t width = (int64_t)H * qk;
    floatX *own = c->k + cache_row(c, text, position) * width,
           *moved = c->k + cache_row(c, text, position + c->offset) * width;
    for (int at = 0; at < width; at += qk) {
        memcpy(own + at, k + at, (size_t)half * sizeof *k);
        memcpy(moved + at + half, k + at + half, (size_t)(qk - half) * sizeof *k);
        if (position < c->offset)
            memcpy(own + at + half, k + at + half, (size_t)(qk - half) * sizeof *k);
    }
}

static void store_rows(const TextCache *c, const floatX *k, const floatX *v, int N, int H, int qk, int e)
{
    int64_t d = (int64_t)H * e, width = (int64_t)H * qk;
    for (int n = 0; n < N; n++) {
        int text = c->text[n], position = c->position[n];
        if (text < 0)
            continue;
        memcpy(c->v + cache_row(c, text, position) * d, v + n * d, (size_t)d * sizeof *v);
        store_key(c, k + n * width, text, position, H, qk);
    }
}

// ---- one head of a row ------------------------------------------------------------------------------------

static void add_x(float *restrict to, float c, const floatX *restrict x, int n)
{
#pragma omp simd
    for (int i = 0; i < n; i++)
        to[i] += c * x_to_float(x[i]);
}

// Running softmax: y = sum of e^(s - max) v, sum = sum of e^(s - max).
typedef struct {
    int text, head;
    float *q, *y, *scores; // (qk), (e), (TILE)
    float max, sum;
} Softmax;

// Positions first to first + count of a text.
static void add_tile(Softmax *f, const SdpaForward *a, const TextCache *c, int first, int count, int H, int e)
{
    float max = f->max;
    for (int j = 0; j < count; j++) {
        const floatX *k = c->k + (cache_row(c, f->text, first + j) * H + f->head) * a->qk;
        f->scores[j] = a->scale * dot_stored(f->q, k, a->qk);
        max = fmaxf(max, f->scores[j]);
    }
    float shrink = fast_exp(f->max - max);
    f->sum *= shrink;
    for (int i = 0; i < e; i++)
        f->y[i] *= shrink;
    f->max = max;
    for (int j = 0; j < count; j++) {
        float weight = fast_exp(f->scores[j] - max);
        f->sum += weight;
        add_x(f->y, weight, c->v + (cache_row(c, f->text, first + j) * H + f->head) * e, e);
    }
}

// gate: of the result
static void attend(const SdpaForward *a, const TextCache *c, int n, int head, float gate, int H, int e)
{
    float *arena = cpu_scratch((size_t)(round_up(a->qk, 16) + round_up(e, 16) + TILE));
    int text = c->text[n], last = c->position[n], first = (int)max_i64(0, (int64_t)last - a->window);
    int64_t row = (int64_t)n * H + head;
    Softmax f = {.text = text, .head = head, .max = -INFINITY};
    f.q = scratch_take(&arena, (size_t)a->qk);
    f.y = scratch_take(&arena, (size_t)e);
    f.scores = arena;
    load_row(f.q, a->q + row * a->qk, a->qk);
    memset(f.y, 0, (size_t)e * sizeof *f.y);
    for (int at = first; at <= last; at += TILE)
        add_tile(&f, a, c, at, (int)min_i64(TILE, last + 1 - at), H, e);
    for (int i = 0; i < e; i++)
        f.y[i] *= gate / f.sum;
    store_row(a->y + row * e, f.y, e);
}

// A query with its keys, and the weights with values.
static int64_t multiplications(const TextCache *c, int window, int N, int d)
{
    int64_t positions = 0;
    for (int n = 0; n < N; n++)
        positions += 1 + min_i64(c->position[n], window);
    return 2 * positions * d;
}

// ---- ops --------------------------------------------------------------------------------------------------

void sdpa_decode(Stream s, const SdpaForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(sdpa_decode, a, N, H, e);
    store_rows(cache, a->k, a->v, N, H, a->qk, e);
#pragma omp parallel for collapse(2) \
    schedule(dynamic, 1) if (multiplications(cache, a->window, N, H * e) > SERIAL_MULTIPLICATIONS)
    for (int n = 0; n < N; n++)
        for (int head = 0; head < H; head++) {
            if (cache->text[n] >= 0)
                attend(a, cache, n, head, 1, H, e);
        }
}

void attention_decode(Stream s, const AttentionForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(attention_decode, N, H * e);
    int64_t d = (int64_t)H * e;
    SdpaForward f = {.y = a->yg, .q = a->q, .qk = e, .window = a->window, .scale = a->scale};
    store_rows(cache, a->k, a->v, N, H, e, e);
#pragma omp parallel for collapse(2) \
    schedule(dynamic, 1) if (multiplications(cache, a->window, N, H * e) > SERIAL_MULTIPLICATIONS)
    for (int n = 0; n < N; n++)
        for (int head = 0; head < H; head++) {
            const floatX *w = a->gate_w + head * a->gate_inputs;
            if (cache->text[n] >= 0)
                attend(&f, cache, n, head, sigmoid(gate_dot(a->h + n * d, w, a->gate_inputs)), H, e);
        }
}
