// The tensors of the records of summer 2026: a record's file includes this behind its sizes
//   LAYERS, ATTENTION_LAYERS, VALUE_TABLES, HIDDEN, MIX_COLUMNS (of generators mu and nu),
//   GATE_COLUMNS (of a and b), BIGRAM_ROWS (an Extent), SIGN_ROWS, KEY_QUARTERS (width of q and k,
//   in quarters of v's)
// and the initial values gate_biases (a, then b).
// Rows of one block and storage that follow each other take turns, from the last layer to the first; Wq, Wk
// and Wv, Wo of a layer are one tensor for who reads it.
#pragma once
#include "llmc/records/record.h"

// The trained scalars, by their numbers; two a layer: of attention and of the MLP, of lin and lout.
enum {
    LIN = 0,                   // and behind it lout: factors of the attention's weights
    SMEAR_LAMBDA = 2 * LAYERS,
    SKIP_LAMBDA,
    RESID,                     // of the stream
    POST = RESID + 2 * LAYERS, // of what the block adds
    GATE_SCALE = POST + 2 * LAYERS
};

// Generators, by their numbers.
enum { GENERATOR_MU, GENERATOR_NU, GENERATOR_A, GENERATOR_B };

static const InitRun network_2026_factors[] = {{LAYERS, 2, {0.5f, 1}, 0}, {1, 2, {0, -1.5f}, 0}, {0}};
static const InitRun network_2026_resid[] = {{2 * LAYERS, 1, {1.0488088481701516f}, 0}, {0}};
static const InitRun network_2026_post[] = {{2 * LAYERS, 1, {1}, 0}, {0}};
static const InitRun network_2026_scale[] = {{1, 1, {0.1f}, 0}, {0}};

// Of mu, then nu. Biases are multiplied by a scale of 0.1.
static const InitRun mix_biases[] = {
    {6, 1, {0}, 0}, {2, 1, {20}, 0}, {1, 2, {10.4881f, 10}, 0}, {1, 2, {0, 0.5f}, 0},
    {1, 2, {10.4881f, 10}, 0}, // mu
    {1, 2, {0, -5}, 0}, {12, 1, {0}, 0}, // nu
    {0},
};

// b = sqrt(3) / 2 / sqrt(d): the deviation is 1 / (2 sqrt(d)).
#define BANK_INIT {INIT_UNIFORM, 0.8660254037844386}

#define ADAM_OF(factor, decays, first, second) \
    .rate = factor, .decay = decays, .beta1 = first, .beta2 = second, .eps = 1e-10, .every = 2
#define ADAM_HALF(factor, decays, first, second) {ADAM_DECAY, ADAM_OF(factor, decays, first, second)}
#define ADAM_FLOAT(factor, first, second) {ADAM, ADAM_OF(factor, 0, first, second)}
#define NORMUON_TIMES(factor) {NORMUON, .rate = factor, .beta2 = 0.9, .every = 1}
#define ONE(n) {n, SIZE_ONE}
#define MODEL {1, SIZE_MODEL}
#define HEADS {1, SIZE_HEADS}
#define VOCAB_BY_MODEL .rows = {1, SIZE_VOCAB}, .cols = MODEL, .storage = STORE_HALF, .sharding = SHARD_ROWS
#define MATRIX .storage = STORE_SPLIT, .sharding = SHARD_TENSORS
#define MLP_BANK .rows = MODEL, .cols = {1, SIZE_MLP}, MATRIX
#define MLP_BANK_FILE(number) \
    {4, {ONE(LAYERS + 1), ONE(2), {1, SIZE_MLP}, MODEL}, .first = number, .step = 2, .transposed = true}
#define VO_BANK \
    .rows = MODEL, .cols = MODEL, .joined = true, MATRIX, .init = BANK_INIT, .update = NORMUON_TIMES(1)
#define VO_SHAPE {ONE(2 * ATTENTION_LAYERS), MODEL, MODEL}
#define SMALL(height, width) \
    .rows = height, .cols = width, .storage = STORE_HALF, .sharding = REPLICATED
#define SCALARS(n) \
    .rows = ONE(1), .cols = ONE(n), .storage = STORE_FLOAT, .sharding = REPLICATED
#define RUNS(values) {INIT_RUNS, .runs = values}
#define GENERATORS(from) .count = 2, .first = from

static const ParamSpec network_2026_params[] = {
    {ROLE_EMBED, "embed.weight", VOCAB_BY_MODEL, .init = {INIT_ZERO}, // tied at first
     .update = {ADAM_DECAY, ADAM_OF(1, 150, 0.5, 0.95), .own_from = 2, .tied_to = ROLE_HEAD}},
    {ROLE_VALUE_EMBED, "value_embeds", VALUE_TABLES, VOCAB_BY_MODEL, .init = {INIT_NORMAL, 1, .times = 0.01},
     .update = ADAM_HALF(75, 5, 0.75, 0.95), .file = {2, {{VALUE_TABLES, SIZE_VOCAB}, MODEL}}},
    {ROLE_BIGRAM, "bigram_embed.weight", .rows = BIGRAM_ROWS, .cols = MODEL, .storage = STORE_HALF,
     .sharding = SHARD_ROWS, .init = {INIT_ZERO}, .update = ADAM_HALF(75, 5, 0.75, 0.95)},
    {ROLE_HEAD, "lm_head.weight", VOCAB_BY_MODEL, .init = {INIT_NORMAL, 0.005},
     .update = ADAM_HALF(1, 150, 0.5, 0.95), .file = {2, {MODEL, {1, SIZE_VOCAB}}, .transposed = true}},
    {ROLE_MLP_DOWN, "mlp_bank", MLP_BANK, .init = {INIT_ZERO}, .update = NORMUON_TIMES(2),
     .file = MLP_BANK_FILE(1)},
    {ROLE_MLP_UP, "mlp_bank", MLP_BANK, .init = BANK_INIT, .update = NORMUON_TIMES(1),
     .file = MLP_BANK_FILE(0)},
    {ROLE_QKVO, "qk_bank", .rows = {2 * KEY_QUARTERS, SIZE_QUARTER_HEAD}, .cols = MODEL,
     .matrices = HEADS, MATRIX, .init = BANK_INIT, .update = NORMUON_TIMES(1),
     .file = {3, {{ATTENTION_LAYERS, SIZE_HEADS}, {2 * KEY_QUARTERS, SIZE_QUARTER_HEAD}, MODEL}}},
#ifdef WO_BY_INPUT // rows of Wo are inputs in files
    {ROLE_VO, "vo_bank", VO_BANK, .file = {3, VO_SHAPE, .step = 2}},
    {ROLE_O, "vo_bank", VO_BANK, .file = {3, VO_SHAPE, .first = 1, .step = 2, .transposed = true}},
#else
    {ROLE_VO, "vo_bank", VO_BANK, .matrices = ONE(2), .file = {3, VO_SHAPE}},
#endif
    {ROLE_VALUE_GATE, "ve_gate_bank", VALUE_TABLES, SMALL(HEADS, ONE(12)),
     .init = {INIT_ZERO}, .update = ADAM_HALF(1, 1, 0.9, 0.99),
     .file = {3, {ONE(VALUE_TABLES), HEADS, ONE(12)}}},
    {ROLE_SMEAR_GATE, "smear_gate.weight", SMALL(ONE(1), ONE(12)), .init = {INIT_ZERO},
     .update = ADAM_HALF(0.01, 0, 0.9, 0.99)},
    {ROLE_SCALARS, "scalars", .first = 0, SCALARS(2 * LAYERS + 2), .init = RUNS(network_2026_factors),
     .update = ADAM_FLOAT(5, 0.9, 0.99), .file = {1, {ONE(2 * LAYERS + 2)}}},
    {ROLE_SCALARS, "resid_lambdas", .first = 1, SCALARS(2 * LAYERS), .init = RUNS(network_2026_resid),
     .update = ADAM_FLOAT(5, 0.9, 0.95), .file = {2, {ONE(LAYERS), ONE(2)}}},
    {ROLE_SCALARS, "post_lambdas", .first = 2, SCALARS(2 * LAYERS), .init = RUNS(network_2026_post),
     .update = ADAM_FLOAT(1, 0.9, 0.95), .file = {2, {ONE(LAYERS), ONE(2)}}},
    {ROLE_SCALARS, "_mudd_gate_scale", .first = 3, SCALARS(1), .init = RUNS(network_2026_scale),
     .update = ADAM_FLOAT(0.1, 0.9, 0.99), .file = {NO_DIMS}},
    {ROLE_GENERATOR_IN, "mudd_w1", GENERATORS(GENERATOR_MU), SMALL(ONE(HIDDEN), MODEL),
     .init = {INIT_UNIFORM, 1}, .update = ADAM_HALF(0.25, 1, 0.9, 0.99),
     .file = {3, {ONE(2), ONE(HIDDEN), MODEL}}},
    {ROLE_GENERATOR_OUT, "mudd_w2", GENERATORS(GENERATOR_MU), SMALL(ONE(MIX_COLUMNS), ONE(HIDDEN)),
     .init = {INIT_ZERO}, .update = ADAM_HALF(0.25, 1, 0.9, 0.99),
     .file = {3, {ONE(2), ONE(MIX_COLUMNS), ONE(HIDDEN)}}},
    {ROLE_GENERATOR_BIAS, "mudd_b2", GENERATORS(GENERATOR_MU), SMALL(ONE(1), ONE(MIX_COLUMNS)),
     .init = RUNS(mix_biases), .update = ADAM_HALF(0.25, 0, 0.9, 0.99),
     .file = {2, {ONE(2), ONE(MIX_COLUMNS)}}},
    {ROLE_GENERATOR_IN, "mudd_gate_w1", GENERATORS(GENERATOR_A), SMALL(ONE(HIDDEN), MODEL),
     .init = {INIT_UNIFORM, 1}, .update = ADAM_HALF(0.1, 1, 0.9, 0.99),
     .file = {3, {ONE(2), ONE(HIDDEN), MODEL}}},
    {ROLE_GENERATOR_OUT, "mudd_gate_w2", GENERATORS(GENERATOR_A), SMALL(ONE(GATE_COLUMNS), ONE(HIDDEN)),
     .init = {INIT_ZERO}, .update = ADAM_HALF(0.1, 1, 0.9, 0.99),
     .file = {3, {ONE(2), ONE(GATE_COLUMNS), ONE(HIDDEN)}}},
    {ROLE_GENERATOR_BIAS, "mudd_gate_b2", GENERATORS(GENERATOR_A), SMALL(ONE(1), ONE(GATE_COLUMNS)),
     .init = RUNS(gate_biases), .update = ADAM_HALF(0.1, 0, 0.9, 0.99),
     .file = {2, {ONE(2), ONE(GATE_COLUMNS)}}},
    {ROLE_SIGNS, "bigram_sign_table", .rows = ONE(SIGN_ROWS), .cols = MODEL, .storage = STORE_SIGNS,
     .sharding = REPLICATED, .init = {INIT_SIGNS}, .update = {FIXED}},
};
enum { NETWORK_2026_PARAMS = sizeof network_2026_params / sizeof *network_2026_params };
