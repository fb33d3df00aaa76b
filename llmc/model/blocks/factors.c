// Weights with a trained factor: products of the records of 2026 multiply with alpha w. In training they take
// copies that hold the factor, made by the first micro-batch of a step: cuBLASLt's products with a factor in
// device memory take 10% to 30% longer (one H200), and the kernel of relu^2's gradient has none. Elsewhere,
// and where a weight is read as codes, the product has the factor.
//
// A trained factor of what an MLP gives to the stream is not one of its forward: with FP8 its gradient needs
// the product as it was computed. Backward it is one of the second matrix, so that the MLP reads the stream's
// own gradient.
#include "llmc/model/blocks/blocks.h"

static int64_t elements_of(const Model *m, ScaledWeight which)
{
    int64_t d = m->config->model_dim;
    if (which == SCALED_QKV)
        return heads_width(m) * d;
    return d * (which == SCALED_O ? d : m->config->mlp_dim);
}

// The factor's place among the network's terms; NONE: there is none.
static int factor_of(const Model *m, int layer, ScaledWeight which)
{
    const Node *n = network_block(&m->network, which == SCALED_DOWN ? NODE_MLP : NODE_ATTENTION, layer);
    if (!n)
        return NONE;
    return which == SCALED_QKV ? n->lin : n->lout;
}

static bool is_read_as_codes(const Config *c, ScaledWeight which)
{
    return (which == SCALED_QKV && c->qkv == QKV_FP8) || (which == SCALED_DOWN && c->mlp == MLP_FP8_BACKWARD);
}

void model_allocate_scaled(Model *m)
{
    for (int i = 0; i < m->record->num_layers; i++)
        for (int k = 0; k < SCALED_WEIGHTS; k++)
            if (factor_of(m, i, (ScaledWeight)k) != NONE && !is_read_as_codes(m->config, (ScaledWeight)k))
                m->layer[i].scaled[k] = device_alloc((size_t)elements_of(m, (ScaledWeight)k) * sizeof(floatX),
                                                     "parameters: weights times their factors");
}

void model_free_scaled(Model *m)
{
    for (int i = 0; i < MAX_LAYERS; i++)
        for (int k = 0; k < SCALED_WEIGHTS; k++)
            device_free(m->layer[i].scaled[k]);
}

// NULL: the product has the factor, if there is one.
static floatX *copy_of(const Pass *p, int layer, ScaledWeight which)
{
    return p->a->backward ? p->m->layer[layer].scaled[which] : NULL;
}

EffectiveWeight effective_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w)
{
    const floatX *copy = copy_of(p, layer, which);
    int factor = factor_of(p->m, layer, which);
    return copy ? (EffectiveWeight){copy, NULL}
                : (EffectiveWeight){w, factor == NONE ? NULL : p->a->coef + factor};
}

void scale_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w)
{
    floatX *copy = copy_of(p, layer, which);
    if (copy && pass_runs(p->a, NULL, 0) && p->place & FIRST_OF_STEP)
        weight_scale_forward(p->s, copy, w, p->a->coef + factor_of(p->m, layer, which),
                             elements_of(p->m, which));
}

void factor_backward(const Pass *p, int layer, ScaledWeight which, float *dw, const floatX *w)
{
    int factor = factor_of(p->m, layer, which);
    float *dalpha = w ? part(p->a->dcoef, factor) : NULL;
    if (factor != NONE && pass_runs(p->a, NULL, 0) && p->place & LAST_OF_STEP)
        weight_scale_backward(p->s, dw, dalpha, w, p->a->coef + factor, elements_of(p->m, which));
}
