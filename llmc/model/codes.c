// What products in FP8 keep beside the parameters: codes and scales of weights, and the delayed scales, which
// are state of a run.
#include "llmc/model/blocks/blocks.h"
#include <math.h>
#include <stdlib.h>

static bool forward_is_delayed(const Model *m)
{
    return m->config->mlp == MLP_FP8 && m->record->mlp_scales.post != 0;
}

// ---- delayed scales ---------------------------------------------------------------------------------------

static int delayed_rows(const Model *m)
{
    if (m->config->mlp == MLP_FP8_BACKWARD)
        return DELAYED_KINDS * m->mlp.sets;
    return m->mlp.sets ? 1 + m->mlp.sets : 0;
}

size_t model_delayed_bytes(const Model *m)
{
    return (size_t)(delayed_rows(m) * m->record->num_layers) * sizeof(float);
}

float *model_delayed_row(const Model *m, int row) { return m->mlp.delayed + row * m->record->num_layers; }

float *model_delayed_scale(const Model *m, int kind, int micro_batch)
{
    return model_delayed_row(m, kind * m->mlp.sets + micro_batch % m->mlp.sets);
}

bool model_delayed(const Model *m, int index, DelayedRow *row)
{
    static const char *const kinds[DELAYED_KINDS] = {"input", "activation", "gradient"};
    if (index >= delayed_rows(m))
        return false;
    *row = (DelayedRow){.set = NONE, .data = model_delayed_row(m, index)};
    if (m->config->mlp == MLP_FP8_BACKWARD) {
        row->set = index % m->mlp.sets;
        snprintf(row->name, sizeof row->name, "fp8.mlp_%s.%d.scale", kinds[index / m->mlp.sets], row->set);
    } else if (index) {
        row->set = index - 1;
        snprintf(row->name, sizeof row->name, "fp8.mlp_activation.%d.scale", row->set);
    } else {
        snprintf(row->name, sizeof row->name, "fp8.mlp_down.next_scale");
    }
    return true;
}

// One GPU's gradients are those of a micro-batch divided by their number, and these are not: their scales are
// so much larger.
static float gradient_unit(const Model *m)
{
    return m->config->fp8_scales == SCALES_SEQUENTIAL ? (float)m->config->micro_batches : 1;
}

// The first scale of an element of the delayed ones. Those of the forward alone: weights are exact first.
static float first_scale(const Model *m, int row)
{
    int kind = row / m->mlp.sets;
    if (m->config->mlp != MLP_FP8_BACKWARD)
        return 1;
    float scale = (float)m->record->fp8.mlp[kind].range / E4M3_LARGEST;
    return kind == DELAYED_GRADIENT ? scale * gradient_unit(m) : scale;
}

void model_start_scales(const Model *m, Stream s)
{
    size_t bytes = model_delayed_bytes(m);
    int layers = m->record->num_layers, rows = delayed_rows(m);
    if (!bytes)
        return;
    float *start = xcalloc(bytes / sizeof(float), sizeof *start);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < layers; i++)
            start[row * layers + i] = first_scale(m, row);
    copy_to_device(s, m->mlp.delayed, start, bytes);
    if (m->mlp.largest)
        device_zero(s, m->mlp.largest, (size_t)(DELAYED_KINDS * layers) * sizeof(float));
    stream_synchronize(s);
    free(start);
}

void model_follow_scales(const Pass *p)
{
    const Model *m = p->m;
    const Fp8Scales *spec = &m->record->fp8;
    int layers = m->record->num_layers;
    if (m->config->mlp != MLP_FP8_BACKWARD || !pass_runs(p->a, NULL, 0))
        return;
    if (m->mlp.sets == 1 && !(p->place & LAST_OF_STEP)) { // they follow the last micro-batch
        device_zero(p->s, m->mlp.largest, (size_t)(DELAYED_KINDS * layers) * sizeof(float));
        return;
    }
    for (int kind = 0; kind < DELAYED_KINDS; kind++) {
        float least = (float)spec->mlp[kind].least * (kind == DELAYED_GRADIENT ? gradient_unit(m) : 1);
        scales_follow(p->s, model_delayed_scale(m, kind, p->b->number), m->mlp.largest + kind * layers,
                      (float)(spec->headroom / E4M3_LARGEST), least, layers);
    }
}

// ---- memory -----------------------------------------------------------------------------------------------

static void allocate_mlp(Model *m)
{
    static const char what[] = "parameters: quantised MLPs";
    MlpCodes *c = &m->mlp;
    bool both = m->config->mlp == MLP_FP8_BACKWARD;
    size_t layers = (size_t)m->record->num_layers, scales = layers * MLP_SCALES;
    size_t elements = (size_t)m->config->model_dim * (size_t)m->config->mlp_dim;
    float input = sqrtf((float)m->config->model_dim) / 448;
    c->weights = device_alloc((both ? MLP_CODES : 2) * layers * elements, what);
    c->scales = device_alloc((scales + 1) * sizeof(float), what);
    c->amax = device_alloc(2 * sizeof(float), what);
    copy_to_device(NULL, c->scales + scales, &input, sizeof input);
    stream_synchronize(NULL);
    if (both)
        c->largest = device_alloc(DELAYED_KINDS * layers * sizeof(float), what);
    if (!both && !forward_is_delayed(m))
        return;
    c->sets = m->config->fp8_scales == SCALES_SEQUENTIAL ? 1 : m->config->micro_batches;
    c->delayed = device_alloc(model_delayed_bytes(m), what);
    model_start_scales(m, NULL);
}

static void allocate_qkv(Model *m)
{
    static const char what[] = "parameters: quantised q, k and v";
    QkvCodes *c = &m->qkv;
    size_t layers = (size_t)m->record->num_layers;
    float constant[2] = {(float)m->record->fp8.qkv_input / E4M3_LARGEST,
                         (float)m->record->fp8.qkv_gradient / E4M3_LARGEST * gradient_unit(m)};
    c->weights = device_alloc(2 * layers * (size_t)heads_width(m) * (size_t)m->config->model_dim, what);
    c->scales = device_alloc((layers + 2) * sizeof(float), what);
    c->amax = device_alloc(sizeof(float), what);
    copy_to_device(NULL, c->scales + layers, constant, sizeof constant);
    stream_synchronize(NULL);
}

void model_allocate_codes(Model *m)
{
    if (m->config->mlp != MLP_BF16)
        allocate_mlp(m);
    if (m->config->qkv == QKV_FP8)
        allocate_qkv(m);
}

void model_free_codes(Model *m)
{
    void *memory[] = {m->mlp.weights, m->mlp.scales,  m->mlp.amax,   m->mlp.delayed,
                      m->mlp.largest, m->qkv.weights, m->qkv.scales, m->qkv.amax};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        device_free(memory[i]);
}
