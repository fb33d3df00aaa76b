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
enum { TOKENS = 32768, EVAL_TOKENS = 40000, MOST_WINDOW = 5000, GUARD_ROWS = 64, MAX_DOCUMENTS = 1024 };
// Tensors of a case. Inputs stand for themselves, but for v_raw, which is VALUE, and the value embeddings,
// which are rows of INPUT.
enum {
    QUERY,
    KEY,
    VALUE,
    DYG,
    INPUT,
    GATE_W,
    COS,
    SIN,
    RSTD,
    LAMBDA,
    INPUTS,
    OUT_YG = INPUTS,
    OUT_DQKV,
    OUT_DV,
    LSE,
    DGATE,
    DGATE_W,
    DLAMBDA,
    ALL
};
static const char *const names[ALL] = {"q",   "k",   "v",     "dyg",     "h",      "gate_w",
                                       "cos", "sin", "rstd",  "lambda",  "yg",     "dqkv",
                                       "dv",  "lse", "dgate", "dgate_w", "dlambda"};
static bool is_fp32(int tensor) { return tensor == RSTD || tensor == LAMBDA || tensor >= LSE; }
static Stream stream;
static bool quick;

// ---- the CPU backend's two builds -------------------------------------------------------------------------

// clang-format off
#define OPS(X) \
    X(backend_open) X(backend_reserve) X(backend_close) X(attention_table_ints) X(attention_table_build) \
    X(attention_forward) X(attention_scratch_bytes) X(attention_backward)
// clang-format on
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
    int32_t *tokens;      // (N) rows of h
} Case;

static int gate_inputs(const Case *c) { return c->H % 4 ? 12 : MAX_GATE_INPUTS; }

static int64_t elements(const Case *c, int tensor)
{
    int64_t rows = (int64_t)c->N * c->H;
    switch (tensor) {
    case GATE_W:
    case DGATE_W:
        return c->H * gate_inputs(c);
    case LAMBDA:
    case DLAMBDA:
        return 2;
    case RSTD:
    case LSE:
    case DGATE:
        return rows;
    case COS:
    case SIN:
        return (int64_t)c->N * (c->e / 4);
    default:
        return (tensor == OUT_DQKV ? 3 : 1) * rows * c->e;
    }
}

static float input_value(const Case *c, int tensor, int64_t k)
{
    double x = 2 * uniform_at(random_used + (uint64_t)k) - 1;
    double growth = tensor == KEY ? 1 + c->slope * (1 - (double)(k / (c->H * c->e)) / c->N) : 1;
    switch (tensor) {
    case QUERY:
    case KEY:
    case INPUT:
        return (float)(sqrt(3) * growth * x); // scores of standard deviation scale * sqrt(e)
    case RSTD:
        return (float)(1 + x / 2);
    case COS:
        return (float)cos(3.14 * x);
    case LAMBDA:
        return k ? 0.25f : 0.5f;
    default:
        return (float)x;
    }
}

static void make_inputs(Case *c)
{
    for (int i = 0; i < INPUTS; i++) {
        c->input[i] = xcalloc((size_t)elements(c, i), sizeof(float));
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++)
            c->input[i][k] = bf16_to_float(float_to_bf16(input_value(c, i, k)));
        random_used += (uint64_t)elements(c, i);
    }
#pragma omp parallel for
    for (int64_t k = 0; k < elements(c, SIN); k++) { // of the angles whose cosines are there
        double x = c->input[COS][k], sine = sqrt(fmax(0, 1 - x * x));
        c->input[SIN][k] = bf16_to_float(float_to_bf16((float)(c->input[SIN][k] < 0 ? -sine : sine)));
    }
    c->tokens = xcalloc((size_t)c->N, sizeof *c->tokens);
    for (int t = 0; t < c->N; t++)
        c->tokens[t] = (int32_t)(uniform() * c->N);
}

static void free_inputs(Case *c)
{
    for (int i = 0; i < INPUTS; i++)
        free(c->input[i]);
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
