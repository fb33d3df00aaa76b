// Around attention: rope tables, norm and rotation of q and k, the mix of v with value embeddings.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/rows.h"
#include "llmc/cpu/vmath.h"
#include <math.h>
#include <string.h>

// The angle is a product in fp32, as the model defines it, not in double: at position 262144 the two are
// 0.016 apart.
void rope_tables(Stream s, floatX *cos_table, floatX *sin_table, const float *frequency,
                 const int32_t *position, int rows, int e)
{
    OP_SCOPE(rope_tables, rows, e);
    int n = e / 4;
#pragma omp parallel for schedule(static) if ((int64_t)rows * n > 256)
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < n; j++) {
            float angle = (float)(position ? position[t] : t) * frequency[j];
            cos_table[(int64_t)t * n + j] = float_to_x(cosf(angle));
            sin_table[(int64_t)t * n + j] = float_to_x(sinf(angle));
        }
}

// ---- norm and rotation of one head ------------------------------------------------------------------------

// x (e) in place; returns rstd. cos, sin (e/4) fp32. y: scratch (e)
static float norm_rotate(floatX *x, const float *cos, const float *sin, int e, float *restrict y)
{
    int half = e / 2, n = e / 4;
    load_row(y, x, e);
    float rstd = rms_rstd(y, e);
#pragma omp simd
    for (int j = 0; j < e; j++)
        y[j] *= rstd;
#pragma omp simd
    for (int j = 0; j < n; j++) {
        float x1 = y[j], x2 = y[half + j];
        y[j] = x1 * cos[j] + x2 * sin[j];
        y[half + j] = x2 * cos[j] - x1 * sin[j];
    }
    store_row(x, y, e);
    return rstd;
}

// Gradient of the rotated head to that of the raw one, in place. The normalised head is recovered from the
// rotated one, y; the tables being rounded, cos^2 + sin^2 is not 1 and the inverse rotation divides by it.
// g, x: scratch (e)
static void norm_rotate_backward(floatX *dx, const floatX *y, float rstd, const float *cos, const float *sin,
                                 int e, float *restrict g, float *restrict x)
{
    int half = e / 2, n = e / 4;
    load_row(g, dx, e);
    load_row(x, y, e);
#pragma omp simd
    for (int j = 0; j < n; j++) {
        float c = cos[j], s = sin[j], inverse = 1 / (c * c + s * s);
        float y1 = x[j], y2 = x[half + j], g1 = g[j], g2 = g[half + j];
        x[j] = (y1 * c - y2 * s) * inverse;
        x[half + j] = (y2 * c + y1 * s) * inverse;
        g[j] = g1 * c - g2 * s;
        g[half + j] = g2 * c + g1 * s;
    }
    rms_backward(g, g, x, rstd, e);
    store_row(dx, g, e);
}

// ---- q, k, v ----------------------------------------------------------------------------------------------

static void mix_value(floatX *v, const floatX *v_raw, const floatX *embedded, const float *lambda, int d)
{
    if (embedded) {
#pragma omp simd
        for (int i = 0; i < d; i++)
            v[i] = float_to_x(lambda[0] * x_to_float(v_raw[i]) + lambda[1] * x_to_float(embedded[i]));
    } else {
#pragma omp simd
        for (int i = 0; i < d; i++)
            v[i] = float_to_x(lambda[0] * x_to_float(v_raw[i]));
    }
}

void qkv_forward(Stream s, const QkvForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_forward, a->value_embed, N, H * e);
    int d = H * e, n = e / 4;
#pragma omp parallel for schedule(static) if ((int64_t)N * d > SERIAL_ELEMENTS)
    for (int t = 0; t < N; t++) {
        float *arena = cpu_scratch(3 * (size_t)round_up(e, 16));
        float *c = scratch_take(&arena, (size_t)n), *sn = scratch_take(&arena, (size_t)n), *row = arena;
        load_row(c, a->cos + (int64_t)t * n, n);
        load_row(sn, a->sin + (int64_t)t * n, n);
        for (int head = 0; head < H; head++) {
            int64_t at = (int64_t)t * d + head * e, of_head = (int64_t)t * H + head;
            a->rstd_q[of_head] = norm_rotate(a->q + at, c, sn, e, row);
            a->rstd_k[of_head] = norm_rotate(a->k + at, c, sn, e, row);
        }
        mix_value(a->v + (int64_t)t * d, a->v_raw + (int64_t)t * d,
                  a->value_embed ? a->value_embed + (int64_t)a->tokens[t] * d : NULL, a->lambda, d);
    }
}

void qkv_product_forward(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_product_forward, a->value_embed, N, H * e);
    QkvForward rest = qkv_planes(a, N, H * e);
    matmul_forward(&(ProductContext){s, NULL},
                   &(Product){a->qkv, a->x, a->w, NULL, NULL, N, H * e, H * e, 3});
    qkv_forward(s, &rest, N, H, e);
}

// The v third of dqkv in place, and the sums for dlambda. g, row: scratch (d)
static void value_backward_row(const AttentionBackward *a, int t, int d, float *restrict g,
                               float *restrict row, double sums[2])
{
    floatX *dv = a->dqkv + 3 * (int64_t)t * d + 2 * d;
    load_row(g, dv, d);
    if (a->dv)
        memcpy(a->dv + (int64_t)t * d, dv, sizeof(floatX) * (size_t)d);
    load_row(row, a->v_raw + (int64_t)t * d, d);
    sums[0] += dot(g, row, d);
    if (a->value_embed) {
        load_row(row, a->value_embed + (int64_t)a->tokens[t] * d, d);
        sums[1] += dot(g, row, d);
    }
    float lambda = a->lambda[0];
#pragma omp simd
    for (int i = 0; i < d; i++)
        g[i] *= lambda;
    store_row(dv, g, d);
}

static void qkv_backward_row(const AttentionBackward *a, int t, int H, int e, double sums[2])
{
    int d = H * e, n = e / 4;
    float *arena = cpu_scratch(4 * (size_t)round_up(d, 16));
    float *c = scratch_take(&arena, (size_t)n), *sn = scratch_take(&arena, (size_t)n);
    float *g = scratch_take(&arena, (size_t)d), *row = arena;
    load_row(c, a->cos + (int64_t)t * n, n);
    load_row(sn, a->sin + (int64_t)t * n, n);
    for (int head = 0; head < H; head++) {
        int64_t at = (int64_t)t * d + head * e, of_head = (int64_t)t * H + head;
        floatX *dq = a->dqkv + 3 * (int64_t)t * d + head * e;
        norm_rotate_backward(dq, a->forward->q + at, a->rstd_q[of_head], c, sn, e, g, row);
        norm_rotate_backward(dq + d, a->forward->k + at, a->rstd_k[of_head], c, sn, e, g, row);
    }
    value_backward_row(a, t, d, g, row, sums);
}

void qkv_backward(const AttentionBackward *a, int N, int H, int e)
{
    double sums[PARTS][2] = {{0}};
#pragma omp parallel for schedule(static) if ((int64_t)N * H * e > SERIAL_ELEMENTS)
    for (int part = 0; part < PARTS; part++)
        for (int t = part_begin(N, part); t < part_begin(N, part + 1); t++)
            qkv_backward_row(a, t, H, e, sums[part]);
    for (int i = 0; i < 2; i++) {
        double total = 0;
        for (int part = 0; part < PARTS; part++)
            total += sums[part][i];
        a->dlambda[i] += (float)total;
    }
}
