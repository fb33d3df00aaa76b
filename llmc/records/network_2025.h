// What the records of autumn 2025 share: sizes, tensors, and the scalars that layers and coefficients name.
#pragma once
#include "llmc/records/record.h"

enum { LAYERS = 12, VALUE_TABLES = 3, BACKOUT_FROM = 8 };

// The vector of trained scalars.
enum {
    SKIP = 0,                     // a weight a layer, of which the first ones are used
    LAMBDA = LAYERS,              // two a layer: of the residual stream and of the embedding
    V_LAMBDA = LAMBDA + 2 * LAYERS, // two a layer: of v and of the value embedding
    SMEAR = V_LAMBDA + 2 * LAYERS,
    BACKOUT,
    USED,
    SCALARS = 64
};

extern const ParamSpec network_2025_params[];
enum { NETWORK_2025_PARAMS = 9 };

// Fields of a LayerSpec. Layer i: x = lambda[i][0] (x + sig(skip weight) * skip) + lambda[i][1] * embedding.
#define LAYER(i) .attention = ATTENTION_PLAIN, .v_lambdas = V_LAMBDA + 2 * (i), .mlp = MLP_RELU2
#define LAMBDAS(i) {RUNNING, {1, LAMBDA + 2 * (i), NONE}}, {EMBEDDED, {1, LAMBDA + 2 * (i) + 1, NONE}}
#define MIX(i) .mix = {LAMBDAS(i)}
#define MIX_SKIP(i, from, weight) .mix = {LAMBDAS(i), {from, {1, LAMBDA + 2 * (i), SKIP + (weight)}}}
#define VALUE_EMBED(table) .value_embed = 1 + (table)

// Fields of a Record. The output of layer 8 is taken back before the last norm. The records had their MLP in
// bf16: its scales both ways are those of August 2026.
#define NETWORK \
    .fp8 = {.headroom = 1.25, .forward_too = true, \
            .mlp = {[DELAYED_INPUT] = {8, 1e-6}, [DELAYED_POST] = {16, 1e-6}, \
                    [DELAYED_GRADIENT] = {1, 1e-7}}}, \
    .params = network_2025_params, .num_params = NETWORK_2025_PARAMS, .smear_lambda = SMEAR, \
    .head = {.cap = 30, .slope = 7.5f, .range_w = 0.875f, .range_g = 1}, \
    .output = {{RUNNING, {1, NONE, NONE}}, {BACKOUT_FROM, {-1, BACKOUT, NONE}}}
