// What the records of summer 2026 share: sizes, tensors, and the scalars that layers and coefficients name.
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
    SIGN_ROWS = 8192,
    KEY_QUARTERS = 4
};

// Biases are multiplied by a scale of 0.1.
static const InitRun mix_biases[] = {
    {6, 1, {0}, 0}, {2, 1, {20}, 0}, {1, 2, {10.4881f, 10}, 0}, {1, 2, {0, 0.5f}, 0},
    {1, 2, {10.4881f, 10}, 0}, // mu
    {1, 2, {0, -5}, 0}, {12, 1, {0}, 0}, // nu
    {0},
};
static const InitRun gate_biases[] = {
    {12, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {4, 2, {0, 0.5f}, 0}, {15, 1, {0}, 0}, // a
    {12, 1, {0}, 0}, {6, 1, {2.5f}, 0}, {5, 2, {0, 0.5f}, 0}, {1, 1, {5}, 0}, {6, 1, {10}, 0},
    {6, 1, {0}, 0}, // b
    {0},
};

#include "llmc/records/network_2026_params.h"
