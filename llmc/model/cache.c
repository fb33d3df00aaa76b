#include "llmc/model/cache.h"
#include "llmc/base/arena.h"

// The last positions that attention of layer i may look at, or that a pass stores.
static int rows_of(const Model *m, const AttentionSetting *at, int i, int64_t positions, int most)
{
    const LayerSpec *l = &m->record->layers[i];
    int window = l->long_window ? at->window_long : at->window_short;
    if (l->heads.paired)
        window = (int)ceil_div(window, 2); // of tokens; a token is two positions
    if (l->heads.dc_weights)
        window = (int)max_i64(window, m->record->dc_keys - 1);
    return (int)min_i64((int64_t)window + most, positions) + l->heads.offset;
}

static size_t place(KeyCache *c, const Model *m, char *base)
{
    size_t d = (size_t)m->config->model_dim,
           width = (size_t)m->config->num_heads * (size_t)record_key_width(m->config);
    Arena a = {base, 0};
    for (int i = 0; i < m->record->num_layers; i++) {
        size_t rows = (size_t)c->texts * (size_t)c->layer[i].rows;
        c->layer[i].k = arena_take(&a, rows * width, sizeof(floatX));
        c->layer[i].v = arena_take(&a, rows * d, sizeof(floatX));
    }
    return a.used;
}

void cache_allocate(KeyCache *c, const Model *m, const AttentionSetting *at, int texts, int64_t positions,
                    int most)
{
    *c = (KeyCache){.texts = texts};
    for (int i = 0; i < m->record->num_layers; i++)
        c->layer[i].rows = m->layer[i].qkvo ? rows_of(m, at, i, positions, most) : 0;
    c->bytes = place(c, m, NULL);
    c->memory = device_alloc(c->bytes, "cache: keys and values of samples");
    place(c, m, c->memory);
}

void cache_free(KeyCache *c) { device_free(c->memory); }

TextCache cache_of(const Model *m, const TextRows *texts, int layer)
{
    const HeadsSpec *spec = &m->record->layers[layer].heads;
    int pairs = spec->paired ? 2 : 1;
    return (TextCache){.k = texts->cache->layer[layer].k,
                       .v = texts->cache->layer[layer].v,
                       .rows = pairs * texts->cache->layer[layer].rows,
                       .text = spec->paired ? texts->text_paired : texts->text,
                       .position = spec->paired ? texts->position_paired : texts->position,
                       .offset = spec->offset ? pairs : 0};
}
