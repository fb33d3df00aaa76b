// The tensors of the records of autumn 2025. They are laid out in the order of the rows; rows of one block
// and storage that follow each other take turns, from the last layer to the first, as backward completes
// their gradients.
#include "llmc/records/network_2025.h"
#include "llmc/run/config.h"

// b = sqrt(3) / 2 / sqrt(d): the deviation is 1 / (2 sqrt(d)).
#define HALF_SQRT_3 0.8660254037844386

static const InitRun scalars[] = {
    {LAYERS, 1, {-1.5f}, 0},
    {LAYERS, 2, {1, 0}, offsetof(Config, lambda_init)},
    {LAYERS, 2, {0.5f, 0.5f}, 0},
    {1, 1, {0}, 0},
    {1, 1, {0.5f}, 0},
    {SCALARS - USED, 1, {1}, 0},
    {0},
};

#define ADAM_TIMES(factor) {ADAM, .rate = factor, .beta1 = 0.65, .beta2 = 0.95, .eps = 1e-8, .every = 2}
#define NORMUON_TIMES(factor) {NORMUON, .rate = factor, .beta2 = 0.95, .every = 1}
#define GATE_UPDATE {NORMUON, .rate = 1, .beta2 = 0.95, .every = 1, .fp32 = true}
#define TABLE \
    .rows = {1, SIZE_VOCAB}, .cols = {1, SIZE_MODEL}, .storage = STORE_HALF, .sharding = SHARD_ROWS
#define MATRIX .storage = STORE_MASTER, .sharding = SHARD_TENSORS
#define MODEL_BY_MLP .rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MLP}, MATRIX
#define GATE(heads) \
    .rows = {1, heads}, .cols = {12, SIZE_ONE}, .storage = STORE_HALF, \
    .sharding = REPLICATED, .init = {INIT_ZERO}, .update = GATE_UPDATE

const ParamSpec network_2025_params[NETWORK_2025_PARAMS] = {
    {ROLE_EMBED, "embed.weight", TABLE, .init = {INIT_NORMAL, 1}, .update = ADAM_TIMES(75)},
    {ROLE_VALUE_EMBED, "value_embeds.%d.weight", VALUE_TABLES, TABLE, .init = {INIT_NORMAL, 1},
     .update = ADAM_TIMES(75)},
    {ROLE_HEAD, "lm_head.weight", TABLE, .init = {INIT_ZERO}, .update = ADAM_TIMES(1)},
    {ROLE_MLP_DOWN, "blocks.%d.mlp.c_proj", MODEL_BY_MLP, .init = {INIT_ZERO}, .update = NORMUON_TIMES(1)},
    {ROLE_MLP_UP, "blocks.%d.mlp.c_fc", MODEL_BY_MLP, .init = {INIT_UNIFORM, HALF_SQRT_3},
     .update = NORMUON_TIMES(2)},
    {ROLE_QKVO, "blocks.%d.attn.qkvo_w", .rows = {1, SIZE_MODEL}, .cols = {1, SIZE_MODEL},
     .matrices = {4, SIZE_ONE}, MATRIX, .file = {2, {{1, SIZE_MODEL}, {4, SIZE_MODEL}}},
     .init = {INIT_UNIFORM, HALF_SQRT_3, .matrices = 3}, .update = NORMUON_TIMES(1)},
    {ROLE_ATTENTION_GATE, "blocks.%d.attn.attn_gate.weight", GATE(SIZE_HEADS)},
    {ROLE_SMEAR_GATE, "smear_gate.weight", GATE(SIZE_ONE)},
    {ROLE_SCALARS, "scalars", .rows = {1, SIZE_ONE}, .cols = {SCALARS, SIZE_ONE}, .storage = STORE_FLOAT,
     .sharding = REPLICATED, .init = {INIT_RUNS, .runs = scalars}, .update = ADAM_TIMES(5),
     .file = {1, {{SCALARS, SIZE_ONE}}, .least = USED}},
};
