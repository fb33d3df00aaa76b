// Buffers of bench_ops.c at the size of a training run, filled with what their ops expect.
#pragma once
#include "dev/bench/ops_arrays.h"
#include "dev/test/head_specs.h"
#include <math.h>
#include <string.h>

enum {
    N = 32768,
    H = 6,
    E = 128,
    D = H * E,
    F = 3072,
    VP = 50304,
    MATRICES = 22,
};

static ProductContext on_stream; // without collectives beside

// Buffers, SETS of each: (N, D) tensors, (N, F) tensors, tables and weights.
static struct {
    floatX *t[14], *wide[2], *dqkv, *w, *table, *m, *v, *cos, *sin, *wx;
    float *rstd, *head_rstd, *dtable, *weight, *momentum, *u, *second, *dw;
    int32_t *tokens, *order, *row_token, *row_start, *num_rows;
    void *w8;
    uint8_t *h8, *post8, *mlp_w8;           // codes of (N, D), (N, F), (D, F)
    uint8_t *h8t, *post8t, *dpre8, *dpre8t; // the first two transposed; of (N, F), and transposed
} set[SETS];
enum { SCALE_H, SCALE_W, SCALE_POST, SCALES }; // of the MLP in FP8: input, weights, relu^2
static float *small;                           // scalars
static float *target_weight;                   // (MAX_TARGETS)
static void *head_scratch;
static float *scales; // (SCALES)
static StepParams *step;
static int32_t *rules; // (MATRICES): all 0

// Tokens whose frequencies fall as in text (Zipf), and the table of their places.
static void fill_tokens(int s)
{
    static int32_t token[N], order[N], row_token[N], row_start[N + 1], first[VP + 1];
    memset(first, 0, sizeof first);
    for (int i = 0; i < N; i++) {
        double r = (double)rand() / RAND_MAX;
        token[i] = (int32_t)fmin(VP - 1, exp(r * log(50000.0)) - 1);
        first[token[i] + 1]++;
    }
    int rows = 0, filled = 0;
    for (int t = 0; t < VP; t++) {
        if (first[t + 1]) {
            row_token[rows] = t;
            row_start[rows++] = filled;
        }
        filled += first[t + 1];
        first[t + 1] = filled;
    }
    row_start[rows] = N;
    for (int i = 0; i < N; i++)
        order[first[token[i]]++] = i;
    set[s].tokens = integers(token, N);
    set[s].order = integers(order, N);
    set[s].row_token = integers(row_token, N);
    set[s].row_start = integers(row_start, N + 1);
    set[s].num_rows = integers(&rows, 1);
}

static void fill_fp8(int s)
{
    const float host[SCALES] = {1.0f / 448, 0.05f / 448, 16.0f / 448}; // of what fill_set makes
    if (!scales)
        scales = device_alloc(sizeof host, "bench");
    copy_to_device(stream, scales, host, sizeof host);
    set[s].h8 = device_alloc((size_t)N * D, "bench");
    set[s].mlp_w8 = device_alloc((size_t)D * F, "bench");
    set[s].post8 = device_alloc((size_t)N * F, "bench");
    quantize_e4m3(stream, set[s].h8, set[s].t[3], scales + SCALE_H, N, D, QUANTIZE_INVERSE, false);
    quantize_e4m3(stream, set[s].mlp_w8, set[s].w, scales + SCALE_W, D, F, QUANTIZE_INVERSE, true);
    set[s].h8t = device_alloc((size_t)N * D, "bench");
    set[s].post8t = device_alloc((size_t)N * F, "bench");
    set[s].dpre8 = device_alloc((size_t)N * F, "bench");
    set[s].dpre8t = device_alloc((size_t)N * F, "bench");
    Fp8Product up = {set[s].h8, set[s].mlp_w8, scales + SCALE_H, scales + SCALE_W, N, D, F, NULL};
    Codes h = {set[s].h8, set[s].h8t, scales + SCALE_H, NULL},
          post = {set[s].post8, set[s].post8t, scales + SCALE_POST, NULL},
          dpre = {set[s].dpre8, set[s].dpre8t, scales + SCALE_POST, NULL};
    quantize_codes(stream, &h, set[s].t[3], N, D);
    matmul_fp8_relu2_codes(&on_stream, &post, &up);
    matmul_fp8_relu2_backward(&on_stream, &dpre, &up, set[s].post8, scales + SCALE_POST);
    matmul_fp8_relu2(&on_stream, set[s].wide[0], set[s].post8, NULL, &up, scales + SCALE_POST);
    stream_synchronize(stream);
}

static void fill_set(int s)
{
    for (int i = 0; i < 14; i++)
        set[s].t[i] = tensor((int64_t)N * D, 1);
    for (int i = 0; i < 2; i++)
        set[s].wide[i] = tensor((int64_t)N * F, 1);
    set[s].dqkv = tensor((int64_t)3 * N * D, 1);
    set[s].w = tensor((int64_t)4 * D * F, 0.05f);
    set[s].table = tensor((int64_t)VP * D, 0.2f);
    set[s].m = tensor((int64_t)VP * D, 0.1f);
    set[s].v = device_alloc((size_t)VP * D * 2, "bench");
    set[s].cos = tensor((int64_t)N * (E / 4), 1);
    set[s].sin = tensor((int64_t)N * (E / 4), 1);
    set[s].rstd = floats(N, 1);
    set[s].head_rstd = floats((int64_t)2 * N * H, 1);
    set[s].dtable = floats((int64_t)VP * D, 1e-3f);
    set[s].weight = floats((int64_t)MATRICES * D * F, 0.05f);
    set[s].momentum = floats((int64_t)MATRICES * D * F, 0.01f);
    set[s].u = floats((int64_t)MATRICES * D * F, 0.01f);
    set[s].second = floats((int64_t)MATRICES * F, 1e-3f);
    set[s].wx = tensor((int64_t)MATRICES * D * F, 0.05f);
    set[s].dw = floats((int64_t)4 * D * F, 0);
    set[s].w8 = device_alloc(head_weight_bytes(HEAD_FP8, VP, D), "bench");
    head_quantize(stream, &head_plain, set[s].w8, set[s].table, VP, D);
    fill_tokens(s);
    fill_fp8(s);
}

static void write_shape(char *shape, size_t size, const char *how)
{
    snprintf(shape, size, "N %d, d %d, H %d, F %d, Vp %d%s", N, D, H, F, VP, how);
}
