// Keys and values of texts that grow, by layer: what a forward pass over new tokens reads of those before.
// Beside them a network looks at one token before, which the rows of the batch name.
#pragma once
#include "llmc/model/model.h"

struct KeyCache {
    struct {
        floatX *k, *v; // (texts, rows, H qk), (texts, rows, d); NULL: the layer has no attention
        int rows;      // of a text: its last so many positions
    } layer[MAX_LAYERS];
    int texts;
    char *memory; // owned
    size_t bytes;
};

// For texts of at most `positions` tokens, which a pass continues by at most `most` each.
void cache_allocate(KeyCache *c, const Model *m, const AttentionSetting *at, int texts, int64_t positions,
                    int most);
void cache_free(KeyCache *c);
// What the attention of layer i gets: with the rows of `texts`, those of paired heads where it has them.
TextCache cache_of(const Model *m, const TextRows *texts, int layer);
