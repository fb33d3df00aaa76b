#include "llmc/records/record.h"
#include "llmc/run/config.h"
#include <string.h>

const Record *const records[] = {&record_2025_10_27, &record_2025_11_10, &record_2025_11_18,
                                 &record_2025_11_29, &record_2025_12_10, &record_2026_05_27,
                                 &record_2026_07_17, &record_2026_08_03, &record_2026_08_06,
                                 &record_tiny,       &record_tiny_2026,  &record_toy,
                                 &record_toy_targets, &record_toy_2026,  &record_toy_2026_08, NULL};

const Record *record_find(const char *name)
{
    for (int i = 0; records[i]; i++) {
        if (!strcmp(records[i]->name, name)) return records[i];
    }
    return NULL;
}

const Record *record_network(const Record *r)
{
    while (!r->layers) r = r->based_on;
    return r;
}

int64_t record_extent(const Config *c, Extent e)
{
    int64_t size[] = {[SIZE_ONE] = 1,
                      [SIZE_MODEL] = c->model_dim,
                      [SIZE_HEADS] = c->num_heads,
                      [SIZE_QUARTER_HEAD] = c->model_dim / c->num_heads / 4,
                      [SIZE_MLP] = c->mlp_dim,
                      [SIZE_VOCAB] = config_vocab_padded(c),
                      [SIZE_HALF_VOCAB] = config_vocab_padded(c) / 2};
    return e.times * size[e.of];
}

void record_file_matrix(const Config *c, const ParamSpec *p, int64_t *rows, int64_t *cols)
{
    const FileSpec *f = &p->file;
    Extent first = f->dims > 1 ? f->shape[f->dims - 2] : f->transposed ? p->cols : p->rows;
    Extent last = f->dims > 1 ? f->shape[f->dims - 1] : f->transposed ? p->rows : p->cols;
    *rows = record_extent(c, first);
    *cols = record_extent(c, last);
}

int record_key_width(const Config *c)
{
    const ParamSpec *p = record_row(config_record(c), ROLE_QKVO);
    if (!p) return c->model_dim / c->num_heads;
    int64_t rows = record_extent(c, p->rows) * (p->matrices.times ? record_extent(c, p->matrices) : 1);
    bool alone = record_row(config_record(c), ROLE_VO); // Wq and Wk
    return (int)((alone ? rows : rows - 2 * c->model_dim) / (2 * c->num_heads));
}

const ParamSpec *record_row(const Record *r, Role role)
{
    for (int i = 0; i < r->num_params; i++) {
        if (r->params[i].role == role) return &r->params[i];
    }
    return NULL;
}

bool record_layer_has(const LayerSpec *l, Role role)
{
    switch (role) {
    case ROLE_QKVO:
    case ROLE_VO:
    case ROLE_O:
        return l->attention != ATTENTION_NONE;
    case ROLE_ATTENTION_GATE:
        return l->attention == ATTENTION_PLAIN;
    case ROLE_MLP_UP:
    case ROLE_MLP_DOWN:
        return l->mlp != MLP_NONE;
    default:
        return false;
    }
}

bool record_has_attention(const Record *r, AttentionKind kind)
{
    bool has = false;
    for (int i = 0; i < r->num_layers; i++) has |= r->layers[i].attention == kind;
    return has;
}

bool record_has_paired(const Record *r)
{
    bool has = false;
    for (int i = 0; i < r->num_layers; i++) has |= r->layers[i].heads.paired;
    return has;
}

bool record_scales_are_state(const Config *c)
{
    bool delayed = c->mlp == MLP_FP8_BACKWARD || config_record(c)->mlp_scales.post != 0;
    return c->qkv == QKV_FP8 || (c->mlp != MLP_BF16 && delayed);
}

bool record_crosses_documents(const Record *r)
{
    bool crosses = false;
    for (int i = 0; i < r->num_layers; i++) crosses |= r->layers[i].heads.offset;
    return crosses;
}

StreamName record_stream_name(int stream)
{
    static const char *const names[] = {"NONE", "RUNNING", "EMBEDDED", "BIGRAM", "BRANCH"};
    StreamName name;
    if (stream < 0 && stream >= BRANCH)
        snprintf(name.text, sizeof name.text, "%s", names[NONE - stream]);
    else if (stream <= FIRST_IN)
        snprintf(name.text, sizeof name.text, "%s(%d)", stream <= FIRST_ROWS ? "ROWS" : "IN",
                 (stream <= FIRST_ROWS ? FIRST_ROWS : FIRST_IN) - stream);
    else
        snprintf(name.text, sizeof name.text, "%s%d", stream < 0 ? "" : "the output of layer ", stream);
    return name;
}

int record_mix_terms(const MixTerm *mix)
{
    int n = 0;
    while (n < MIX_STREAMS && mix[n].weight.factor != 0) n++;
    return n;
}

bool record_has_lists(const Record *r)
{
    bool has = r->num_generators > 0;
    for (int i = 0; i < r->num_layers; i++) {
        const LayerSpec *l = &r->layers[i];
        has = has || l->attention == ATTENTION_HEADS || record_mix_terms(l->after_attention) ||
              record_mix_terms(l->after_mlp);
    }
    return has;
}
