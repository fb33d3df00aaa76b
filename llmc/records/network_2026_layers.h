// Fields of the layers of the records of summer 2026. Behind network_2026_params.h, which numbers scalars and
// generators.
#pragma once
#include "llmc/records/record.h"

#define A(k) COLUMN(GENERATOR_A, k)
#define B(k) COLUMN(GENERATOR_B, k)
#define MU(k) COLUMN(GENERATOR_MU, k)
#define NU(k) COLUMN(GENERATOR_NU, k)

// Terms of a list: a stream as it is, times a scalar, times a column.
#define AS_IS(stream) {stream, {1, NONE, NONE}, 0, 0}
#define TIMES(stream, scalar) {stream, {1, scalar, NONE}, 0, 0}
#define PER_TOKEN(stream, column) {stream, {1, NONE, NONE}, column, 0}

#define SCALED(i, block) TIMES(RUNNING, RESID + 2 * (i) + (block)), TIMES(BRANCH, POST + 2 * (i) + (block))
// Behind a layer's attention the embedding and the bigram are injected.
#define INJECTED(i, embedded, bigram) \
    .after_attention = {SCALED(i, 0), PER_TOKEN(EMBEDDED, embedded), PER_TOKEN(BIGRAM, bigram)}
#define MLP(i) .mlp = MLP_RELU2, .after_mlp = {SCALED(i, 1)}

// A layer's attention: of the stream, or of a layer's output. Further fields of its HeadsSpec may follow.
#define HEADS_OF(i, stream, ...) \
    .attention = ATTENTION_HEADS, .heads = {.input = stream, .factors = LIN + 2 * (i), __VA_ARGS__}
#define PLAIN(i, ...) HEADS_OF(i, RUNNING, __VA_ARGS__)
#define PAIRED(i) PLAIN(i, .paired = true)
#define VALUE_EMBED(table) .value_embed = 1 + (table)

// What enters the first layer, and its output's list; the last layer's lists follow generator mu.
#define FIRST_MIX(bigram) .mix = {AS_IS(EMBEDDED), PER_TOKEN(BIGRAM, bigram)}
#define FIRST_INJECTED(embedded) .after_attention = {SCALED(0, 0), PER_TOKEN(EMBEDDED, embedded)}
#define SKIP_MIX(from, column) \
    .mix = {AS_IS(RUNNING), {from, {1, NONE, SKIP_LAMBDA}, column, 0}}
// late: the layer from whose output attention reads; below: the layer before the last.
#define DYNAMIC(i, late, below, ...) \
    .mix = {{RUNNING, {1, NONE, NONE}, MU(5), 1}, PER_TOKEN(IN(0), MU(3)), PER_TOKEN(late, MU(4))}, \
    HEADS_OF(i, late, .offset = true, .value_column = MU(6), .value_groups = 2, \
             .extra = {PER_TOKEN(IN(0), MU(0)), PER_TOKEN(late, MU(1)), PER_TOKEN(below, MU(2))}, \
             __VA_ARGS__), \
    .long_window = true, \
    .after_attention = {PER_TOKEN(RUNNING, MU(8)), PER_TOKEN(BRANCH, MU(9)), PER_TOKEN(IN(0), MU(10)), \
                        PER_TOKEN(BIGRAM, MU(11))}, \
    .mlp = MLP_RELU2, .after_mlp = {PER_TOKEN(RUNNING, MU(12)), PER_TOKEN(BRANCH, MU(13))}

#define OUTPUT_2026(early, late, below) \
    .output = {AS_IS(RUNNING), PER_TOKEN(IN(0), NU(0)), PER_TOKEN(late, NU(1)), PER_TOKEN(below, NU(2)), \
               PER_TOKEN(ROWS(0), NU(3)), PER_TOKEN(early, NU(4))}

enum { COLUMNS_MU = 14, COLUMNS_NU = 5 };
#define GENERATORS_2026(a, b, before_b, before_mu, after_last) \
    [GENERATOR_MU] = {before_mu, COLUMNS_MU, {0.1f, NONE, NONE}}, \
    [GENERATOR_NU] = {after_last, COLUMNS_NU, {0.1f, NONE, NONE}}, \
    [GENERATOR_A] = {EMBEDDED, a, {1, GATE_SCALE, NONE}}, \
    [GENERATOR_B] = {before_b, b, {1, GATE_SCALE, NONE}}

// Fields of a Record.
// Scales of the records of August 2026.
#define FP8_SCALES_2026_08 \
    .fp8 = {.headroom = 1.25, .qkv_input = 8, .qkv_gradient = 1, \
            .mlp = {[DELAYED_INPUT] = {8, 1e-6}, [DELAYED_POST] = {16, 1e-6}, [DELAYED_GRADIENT] = {1, 1e-7}}}
#define NETWORK_2026 NETWORK_2026_OF(6)
#define NETWORK_2026_OF(count) \
    .heads = count, .smear_lambda = SMEAR_LAMBDA, \
    .head = {.cap = 23, .slope = 7.5f, .shift = 5, .range_x = 100, .range_w = 1.6f, .range_g = 0.75f}
