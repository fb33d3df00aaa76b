// Weights with a trained factor: products of the records of 2026 multiply with alpha w. In training they take
// copies that hold the factor, made by the first micro-batch of a step: cuBLASLt's products with a factor in
// device memory take 10% to 30% longer (one H200), and the kernel of relu^2's gradient has none. Elsewhere,
// and where a weight is read as codes, the product has the factor.
//
// A trained factor of what an MLP gives to the stream is not one of its forward: with FP8 its gradient needs
// the product as it was computed. Backward it is one of the second matrix, so that the MLP reads the stream's
// own gradient.
#include "llmc/model/blocks/blocks.h"

// Of a layer's copy; 0: none is read.
static int64_t elements_of(const Model *m, ScaledWeight which)
{
    const Config *c = m->config;
    int64_t d = c->model_dim;
    if (which == SCALED_QKV)
        return c->qkv == QKV_FP8 ? 0 : heads_width(m) * d;
    if (which == SCALED_O)
        return d * d;
    return c->mlp == MLP_FP8_BACKWARD ? 0 : d * c->mlp_dim;
}

// Of the layer's copies before this one.
static int64_t elements_before(const Model *m, int which)
{
    int64_t n = 0;
    for (int k = 0; k < which; k++)
        n += elements_of(m, (ScaledWeight)k);
    return n;
}

void model_allocate_scaled(Model *m)
{
    size_t elements = (size_t)(m->record->num_layers * elements_before(m, SCALED_WEIGHTS));
    if (m->network.count)
        m->scaled = device_alloc(elements * sizeof(floatX), "parameters: weights times their factors");
}

// NULL: the product has the factor.
static floatX *copy_of(const Pass *p, int layer, ScaledWeight which)
{
    const Model *m = p->m;
    if (!p->a->backward || !m->scaled || !elements_of(m, which))
        return NULL;
    return m->scaled + layer * elements_before(m, SCALED_WEIGHTS) + elements_before(m, which);
}

EffectiveWeight effective_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w, int factor)
{
    const floatX *copy = factor == NONE ? NULL : copy_of(p, layer, which);
    return copy ? (EffectiveWeight){copy, NULL}
                : (EffectiveWeight){w, factor == NONE ? NULL : p->a->coef + factor};
}

void scale_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w, int factor)
{
    if (factor == NONE || !pass_runs(p->a, NULL, 0) || !(p->place & FIRST_OF_STEP))
        return;
    floatX *copy = copy_of(p, layer, which);
    if (copy)
        weight_scale_forward(p->s, copy, w, p->a->coef + factor, elements_of(p->m, which));
}

void factor_backward(const Pass *p, float *dw, const floatX *w, int64_t n, int factor)
{
    float *dalpha = w ? part(p->a->dcoef, factor) : NULL;
    if (factor != NONE && pass_runs(p->a, NULL, 0) && p->place & LAST_OF_STEP)
        weight_scale_backward(p->s, dw, dalpha, w, p->a->coef + factor, n);
}
