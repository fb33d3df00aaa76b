// DC attention. Weights are computed anew wherever they are needed: once a query for the sums over its keys,
// and in backward once a key for the sums over its queries.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"

// ---- rows of a pair of tokens -----------------------------------------------------------------------------

static float dot_x(const floatX *a, const floatX *b, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += x_to_float(a[i]) * x_to_float(b[i]);
    return sum;
}

// to += c * x
static void add_x(float *to, float c, const floatX *x, int n)
{
    for (int i = 0; i < n; i++)
        to[i] += c * x_to_float(x[i]);
}

// The document of t: [*begin, *end). The table starts with their number and boundaries.
static void document_of(const int32_t *table, int t, int *begin, int *end)
{
    const int32_t *cu = table + 1;
    int low = 0, high = table[0] - 1; // documents
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (cu[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    *begin = cu[low];
    *end = cu[low + 1];
}

static float score(const DcForward *a, int t, int64_t j, int n, int H)
{
    int64_t head = n * a->qk, width = (int64_t)H * a->qk;
    return a->scale * dot_x(a->q + t * width + head, a->k + j * width + head, a->qk);
}

static const float *w2_of(const DcForward *a, int t) { return a->w2 + (int64_t)t * a->stride; }

// w (H) of a token; returns what w1 is multiplied with.
static float norm_weights(const DcForward *a, int t, int H, float *w)
{
    const float *w1 = a->w1 + (int64_t)t * a->stride;
    float norm = 1 / sqrtf(dot(w1, w1, H) / (float)H + 1e-6f);
    for (int n = 0; n < H; n++)
        w[n] = norm * w1[n];
    return norm;
}

// p (H): P_n,tj, from lse. Returns M_tj.
static float weights(const DcForward *a, int t, int64_t j, int H, const float *w, float *p)
{
    for (int n = 0; n < H; n++)
        p[n] = expf(score(a, t, j, n, H) - a->lse[(int64_t)t * H + n]);
    return dot(w, p, H);
}

// ---- forward ----------------------------------------------------------------------------------------------

// Positions first to last are in rows of k and v from `base` on: position j in row j mod `rows`.
typedef struct {
    int first, last;
    int64_t base;
    int rows;
} DcKeys;

static int64_t row_of(const DcKeys *keys, int j) { return keys->base + j % keys->rows; }

static float log_sum(const DcForward *a, const DcKeys *keys, int t, int n, int H)
{
    float max = -INFINITY, sum = 0;
    for (int j = keys->first; j <= keys->last; j++)
        max = fmaxf(max, score(a, t, row_of(keys, j), n, H));
    for (int j = keys->first; j <= keys->last; j++)
        sum += expf(score(a, t, row_of(keys, j), n, H) - max);
    return max + logf(sum);
}

static int first_key(const DcForward *a, int t)
{
    int begin, end;
    document_of(a->table, t, &begin, &end);
    return (int)max_i64(begin, t - a->keys + 1);
}

static void forward_row(const DcForward *a, const DcKeys *keys, int t, int H, int e)
{
    int d = H * e;
    float *arena = cpu_scratch((size_t)(d + 2 * round_up(H, 16) + 16)), *y = scratch_take(&arena, (size_t)d),
          *w = scratch_take(&arena, (size_t)H), *p = arena;
    for (int n = 0; n < H; n++)
        a->lse[(int64_t)t * H + n] = log_sum(a, keys, t, n, H);
    load_row(y, a->y + (int64_t)t * d, d);
    norm_weights(a, t, H, w);
    for (int j = keys->first; j <= keys->last; j++) {
        float mixed = weights(a, t, row_of(keys, j), H, w, p);
        for (int n = 0; n < H; n++)
            add_x(y + n * e, w2_of(a, t)[n] * mixed, a->v + row_of(keys, j) * d + n * e, e);
    }
    store_row(a->y + (int64_t)t * d, y, d);
}

void dc_forward(Stream s, const DcForward *a, int N, int H, int e)
{
    OP_SCOPE(dc_forward, a, N, H, e);
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++)
        forward_row(a, &(DcKeys){first_key(a, t), t, 0, N}, t, H, e);
}

void dc_decode(Stream s, const DcForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(dc_decode, a, N, H, e);
    DcForward cached = *a;
    cached.k = cache->k;
    cached.v = cache->v;
#pragma omp parallel for schedule(static) if (2 * (int64_t)N * a->keys * H * e > SERIAL_MULTIPLICATIONS)
    for (int t = 0; t < N; t++) {
        int last = cache->position[t], first = (int)max_i64(0, last - a->keys + 1);
        int64_t base = (int64_t)cache->text[t] * cache->rows;
        if (cache->text[t] >= 0)
            forward_row(&cached, &(DcKeys){first, last, base, cache->rows}, t, H, e);
    }
}

// ---- backward ---------------------------------------------------------------------------------------------

// D (H): D_n = dy_n,t . v_n,j. Returns the gradient of M_tj, sum of w2_n D_n.
static float mixed_gradient(const DcBackward *a, int t, int j, int H, int e, float *D)
{
    int64_t d = H * e;
    for (int n = 0; n < H; n++)
        D[n] = dot_x(a->dy + t * d + n * e, a->forward->v + j * d + n * e, e);
    return dot(w2_of(a->forward, t), D, H);
}

// dq, dw1, dw2 of a query; the gradient of w goes to scratch, too: a softmax's gradient wants the sum over
// keys of dM_tj P_n,tj, which it is.
static void query_backward(const DcBackward *a, int t, int H, int e)
{
    const DcForward *f = a->forward;
    int qk = f->qk;
    int64_t width = (int64_t)H * qk;
    float *arena = cpu_scratch((size_t)(round_up(width, 16) + 4 * round_up(H, 16))),
          *dq = scratch_take(&arena, (size_t)width), *w = scratch_take(&arena, (size_t)H),
          *p = scratch_take(&arena, (size_t)H), *D = scratch_take(&arena, (size_t)H);
    float *dw = (float *)a->scratch + (int64_t)t * H, *dw1 = a->dw1 + (int64_t)t * f->stride,
          *dw2 = a->dw2 + (int64_t)t * f->stride, norm = norm_weights(f, t, H, w);
    int first = first_key(f, t);
    for (int n = 0; n < H; n++)
        dw[n] = dw2[n] = 0;
    for (int c = 0; c < width; c++)
        dq[c] = 0;
    for (int j = first; j <= t; j++) {
        float mixed = weights(f, t, j, H, w, p), dmixed = mixed_gradient(a, t, j, H, e, D);
        for (int n = 0; n < H; n++) {
            dw[n] += dmixed * p[n];
            dw2[n] += mixed * D[n];
        }
    }
    for (int j = first; j <= t; j++) {
        weights(f, t, j, H, w, p);
        float dmixed = mixed_gradient(a, t, j, H, e, D);
        for (int n = 0; n < H; n++)
            add_x(dq + n * qk, f->scale * p[n] * w[n] * (dmixed - dw[n]), f->k + j * width + n * qk, qk);
    }
    store_row(a->dq + t * width, dq, width);
    rms_backward(dw1, dw, w, norm, H);
}

// dk and dv of a key.
static void key_backward(const DcBackward *a, int j, int H, int e)
{
    const DcForward *f = a->forward;
    int qk = f->qk;
    int64_t d = H * e, width = (int64_t)H * qk;
    float *arena = cpu_scratch((size_t)(round_up(width, 16) + round_up(d, 16) + 4 * round_up(H, 16))),
          *dk = scratch_take(&arena, (size_t)width), *dv = scratch_take(&arena, (size_t)d),
          *w = scratch_take(&arena, (size_t)H), *p = scratch_take(&arena, (size_t)H),
          *D = scratch_take(&arena, (size_t)H);
    int begin, end;
    document_of(f->table, j, &begin, &end);
    for (int c = 0; c < width; c++)
        dk[c] = 0;
    for (int c = 0; c < d; c++)
        dv[c] = 0;
    for (int t = j; t < end && t - j < f->keys; t++) {
        norm_weights(f, t, H, w);
        float mixed = weights(f, t, j, H, w, p), dmixed = mixed_gradient(a, t, j, H, e, D);
        for (int n = 0; n < H; n++) {
            float ds = f->scale * p[n] * w[n] * (dmixed - ((const float *)a->scratch)[(int64_t)t * H + n]);
            add_x(dk + n * qk, ds, f->q + t * width + n * qk, qk);
            add_x(dv + n * e, w2_of(f, t)[n] * mixed, a->dy + t * d + n * e, e);
        }
    }
    store_row(a->dk + j * width, dk, width);
    store_row(a->dv + j * d, dv, d);
}

size_t dc_scratch_bytes(int N, int H) { return (size_t)N * (size_t)H * sizeof(float); }

void dc_backward(Stream s, const DcBackward *a, int N, int H, int e)
{
    OP_SCOPE(dc_backward, a, N, H, e);
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++)
        query_backward(a, t, H, e);
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int j = 0; j < N; j++)
        key_backward(a, j, H, e);
}
