// The network that the records of summer 2026 share: 11 layers, layer 6 without attention; numbers that
// generators make for every token take the place of trained scalars. Whoever includes this may define before
//   KEY_QUARTERS  width of q and k, in quarters of v's; else they are as wide
//   WO_BY_INPUT   rows of Wo are inputs in files
#pragma once
#include "llmc/records/record.h"

#define BIGRAM_ROWS {15, SIZE_HALF_VOCAB}
enum {
    LAYERS = 11,
    ATTENTION_LAYERS = 10, // all but layer 6
    VALUE_TABLES = 5,
    HIDDEN = 64,           // of a generator
    MIX_COLUMNS = 14,      // of generators mu and nu
    GATE_COLUMNS = 41,     // of a and b
    SIGN_ROWS = 8192
};
#ifndef KEY_QUARTERS
#define KEY_QUARTERS 4
#endif

// Biases are multiplied by a scale of 0.1.
static const InitRun gate_biases[] = {
    {12, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {4, 2, {0, 0.5f}, 0}, {15, 1, {0}, 0}, // a
    {12, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {5, 2, {0, 0.5f}, 0}, {1, 1, {5}, 0}, {6, 1, {10}, 0},
    {6, 1, {0}, 0}, // b
    {0},
};

#include "llmc/records/network_2026_params.h"
#include "llmc/records/network_2026_layers.h"

static const LayerSpec layers[LAYERS] = {
    [0] = {FIRST_MIX(A(19)), PAIRED(0), FIRST_INJECTED(A(18)), MLP(0)},
    [1] = {PLAIN(1, .xsa = A(0)), VALUE_EMBED(0), INJECTED(1, A(20), A(21)), MLP(1)},
    [2] = {PAIRED(2), VALUE_EMBED(1), INJECTED(2, A(22), A(23)), MLP(2)},
    [3] = {PLAIN(3, .offset = true, .xsa = A(6), .gate = A(12)), .long_window = true,
           INJECTED(3, A(24), A(25)), MLP(3)},
    [4] = {PLAIN(4, .xsa = B(0)), INJECTED(4, B(18), B(19)), MLP(4)},
    [5] = {PAIRED(5), INJECTED(5, B(20), B(21)), MLP(5)},
    [6] = {SKIP_MIX(3, B(28)), MLP(6)},
    [7] = {PLAIN(7, .xsa = B(6)), INJECTED(7, B(22), B(23)), MLP(7)},
    [8] = {HEADS_OF(8, 7), VALUE_EMBED(2), INJECTED(8, B(24), B(25)), MLP(8)},
    [9] = {HEADS_OF(9, 7, .paired = true), VALUE_EMBED(3), INJECTED(9, B(26), B(27)), MLP(9)},
    [10] = {DYNAMIC(10, 7, 9, .gate = B(12), .dc_weights = B(29), .dc_factors = B(35)), VALUE_EMBED(4)},
};

static const GeneratorSpec generators[] = {GENERATORS_2026(26, 41, 3, 9, 10)};
