// What test_attention_gpu.c runs: the CPU backend's two builds, and cases with their inputs and documents.
#pragma once
#include "dev/test/tap.h"
#include "dev/test/uniform.h"
#include "llmc/cuda/attention/attention.h"
#include <stdlib.h>
#include <string.h>

#define FP32_ATOM 1e-5
#define SCALE 0.1f
#ifndef CUDNN_WIDTHS
#define CUDNN_WIDTHS 16, 32, 64, 96, 128 // for which cuDNN is expected to be right
#endif
enum { TOKENS = 32768, EVAL_TOKENS = 40000, GUARD_ROWS = 64, MAX_DOCUMENTS = 1024 };
enum {
    QUERY,
    KEY,
    VALUE,
    DYG,
    INPUT,
    GATE_W,
    INPUTS,
    OUT_YG = INPUTS,
    OUT_DQ,
    OUT_DK,
    OUT_DV,
    TENSORS, // floatX
    LSE = TENSORS,
    DGATE,
    DGATE_W,
    ALL // fp32
};
enum { GATE_WIDTH = 12 };
enum {
    RSTD,
    COS,
    SIN,
    TURNS
}; // (N, H), (N, e/4), (N, e/4), for qkv_backward; its value embeddings are rows of h
static const char *const names[ALL] = {"q",  "k",  "v",  "dyg", "h",     "gate_w", "yg",
                                       "dq", "dk", "dv", "lse", "dgate", "dgate_w"};
static Stream stream;
static bool quick;

// ---- the CPU backend's two builds -------------------------------------------------------------------------

#define OPS(X) \
    X(backend_open) \
    X(backend_reserve) \
    X(backend_close) X(attention_table_ints) X(attention_table_build) X(attention_forward) \
        X(attention_backward) X(qkv_backward)
#include "dev/test/ops_library.h"
typedef enum { PLAIN, TRUTH, REFERENCES } Which;
static Ops ops[REFERENCES];

// ---- cases ------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    int N, H, e, window;
    bool backward;
    float slope; // keys grow by so much from the last token to the first
    int documents, cu[MAX_DOCUMENTS + 1];
    float *input[INPUTS]; // bf16 values
    float *turn[TURNS];   // bf16 values; or NULL
    int32_t *tokens;      // (N) rows of h
} Case;

static int64_t elements(const Case *c, int tensor)
{
    if (tensor == GATE_W || tensor == DGATE_W)
        return c->H * GATE_WIDTH;
    return (int64_t)c->N * c->H * (tensor == LSE || tensor == DGATE ? 1 : c->e);
}

static void make_inputs(Case *c)
{
    for (int i = 0; i < INPUTS; i++) {
        bool normed = i == QUERY || i == KEY || i == INPUT; // scores of standard deviation scale * sqrt(e)
        double size = normed ? sqrt(3) : 1;
        c->input[i] = xcalloc((size_t)elements(c, i), sizeof(float));
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++) {
            double growth = i == KEY ? 1 + c->slope * (1 - (double)(k / (c->H * c->e)) / c->N) : 1;
            double x = 2 * uniform_at(random_used + (uint64_t)k) - 1;
            c->input[i][k] = bf16_to_float(float_to_bf16((float)(size * growth * x)));
        }
        random_used += (uint64_t)elements(c, i);
    }
}

static int64_t turn_elements(const Case *c, int i) { return (int64_t)c->N * (i == RSTD ? c->H : c->e / 4); }

static void make_turns(Case *c)
{
    for (int i = 0; i < TURNS; i++)
        c->turn[i] = xcalloc((size_t)turn_elements(c, i), sizeof(float));
    for (int64_t k = 0; k < turn_elements(c, RSTD); k++)
        c->turn[RSTD][k] = (float)(0.5 + uniform());
#pragma omp parallel for
    for (int64_t k = 0; k < turn_elements(c, COS); k++) {
        double angle = 6.28 * uniform_at(random_used + (uint64_t)k);
        c->turn[COS][k] = bf16_to_float(float_to_bf16((float)cos(angle)));
        c->turn[SIN][k] = bf16_to_float(float_to_bf16((float)sin(angle)));
    }
    random_used += (uint64_t)turn_elements(c, COS);
    c->tokens = xcalloc((size_t)c->N, sizeof *c->tokens);
    for (int t = 0; t < c->N; t++)
        c->tokens[t] = (int32_t)(uniform() * c->N);
}

static void free_inputs(Case *c)
{
    for (int i = 0; i < INPUTS; i++)
        free(c->input[i]);
    for (int i = 0; i < TURNS; i++)
        free(c->turn[i]);
    free(c->tokens);
}

static Case make_case(const char *name, const int *length, int documents, int H, int e, int window)
{
    Case c = {.name = name, .H = H, .e = e, .window = window, .backward = true, .documents = documents};
    assert(documents <= MAX_DOCUMENTS);
    for (int i = 0; i < documents; i++)
        c.cu[i + 1] = c.cu[i] + length[i];
    c.N = c.cu[documents];
    return c;
}

// Lengths as in text: lognormal, median 500, at most `longest`.
static Case make_text_case(const char *name, int N, int documents, int longest, int H, int e, int window)
{
    int length[MAX_DOCUMENTS], left = N;
    for (int i = 0; i < documents; i++) {
        double normal = sqrt(-2 * log(1 - uniform())) * cos(2 * M_PI * uniform());
        int n = (int)fmin(longest, 1 + 500 * exp(normal)), rest = documents - 1 - i;
        if (n > left - rest)
            n = left - rest;
        if (i == documents - 1)
            n = left;
        length[i] = n;
        left -= n;
    }
    return make_case(name, length, documents, H, e, window);
}
