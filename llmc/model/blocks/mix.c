// What enters a layer: the residual stream mixed with others, and its norm.
#include "llmc/model/blocks/blocks.h"

static const floatX *stream_of(const Acts *a, int i) { return i < 0 ? a->x0 : a->out[i]; }

// The layer whose output enters layer i; EMBEDDED: there is none.
static int layer_below(const Model *m, int i)
{
    do
        i--;
    while (i >= 0 && model_is_empty(m, i));
    return i >= 0 ? i : EMBEDDED;
}

void mix_forward(const Pass *p, int i, floatX *x, floatX *h, float *rstd)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const Mix *mix = &m->mix[i];
    const floatX *below = stream_of(a, layer_below(m, i)), *second = stream_of(a, mix->second),
                 *third = mix->third == NONE ? NULL : a->out[mix->third];
    if (pass_runs(a, USES(x, h, rstd, below, second, third)))
        mix_rmsnorm_forward(p->s, &(MixForward){x, h, rstd, below, second, third, a->coef + 3 * i}, p->b->N,
                            m->config->model_dim);
}

void mix_backward(const Pass *p, int i, const floatX *h, const float *rstd, const float *dgate)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const Mix *mix = &m->mix[i];
    int below = layer_below(m, i), L = m->record->num_layers;
    floatX *dsecond = mix->second == EMBEDDED ? a->dx0 : a->dstream[mix->second],
           *dthird = mix->third == NONE ? NULL : a->dstream[mix->third];
    const floatX *added = i < L && below != EMBEDDED ? a->dstream[below] : NULL;
    if (!pass_runs(a, USES(a->dx, dsecond, dthird, a->dh, added, h, rstd, stream_of(a, below),
                           stream_of(a, mix->second), mix->third == NONE ? NULL : a->out[mix->third], dgate)))
        return;
    mix_rmsnorm_backward(p->s,
                         &(MixBackward){.dx = a->dx,
                                        .dx0 = dsecond,
                                        .accumulate_dx0 = !mix->first_reader,
                                        .dskip = dthird,
                                        .dcoef = a->dcoef + 3 * i,
                                        .dx_out = i < L ? a->dx : NULL,
                                        .dh = a->dh,
                                        .dx_add = added,
                                        .h = h,
                                        .rstd = rstd,
                                        .x = stream_of(a, below),
                                        .x0 = stream_of(a, mix->second),
                                        .skip = mix->third == NONE ? NULL : a->out[mix->third],
                                        .coef = a->coef + 3 * i,
                                        .dgate = dgate,
                                        .gate_w = dgate ? param_weight(&m->params, m->layer[i].gate) : NULL,
                                        .heads = m->config->num_heads,
                                        .gate_inputs = dgate ? (int)m->layer[i].gate->cols : 0},
                         p->b->N, m->config->model_dim);
}
