// The MLP in training with FP8 in both directions: relu^2 and the gradient before it are kept as codes alone,
// and all products read codes.
#include "llmc/model/blocks/blocks.h"

void mlp_both_plan(Acts *a, const Model *m, int i, PlanArena *b)
{
    LayerActs *l = &a->layer[i];
    size_t N = (size_t)a->tokens, n = N * (size_t)m->config->model_dim, wide = N * (size_t)m->config->mlp_dim;
    l->h8 = plan_take(b, n, 1);
    l->h8t = plan_take(b, n, 1);
    l->post8 = plan_take(b, wide, 1);
    l->post8t = plan_take(b, wide, 1);
    l->g8 = plan_take(b, n, 1);
    l->g8t = plan_take(b, n, 1);
    l->dpre8 = plan_take(b, wide, 1);
    l->dpre8t = plan_take(b, wide, 1);
}

// A layer's codes of weights, and all its scales and maxima, (1) each.
typedef struct {
    uint8_t *weight[MLP_CODES];
    float *up, *down, *gradient;
    float *delayed[DELAYED_KINDS], *largest[DELAYED_KINDS];
} LayerCodes;

static LayerCodes layer_codes(const Pass *p, int i)
{
    const Model *m = p->m;
    const MlpCodes *c = &m->mlp;
    int layers = m->record->num_layers;
    int64_t elements = (int64_t)m->config->model_dim * m->config->mlp_dim;
    if (!c->weights) // while memory is planned
        return (LayerCodes){0};
    float *scales = c->scales + i * MLP_SCALES;
    LayerCodes q = {.up = scales + SCALE_UP,
                    .down = scales + SCALE_DOWN,
                    .gradient = c->scales + layers * MLP_SCALES};
    for (int k = 0; k < MLP_CODES; k++)
        q.weight[k] = c->weights + ((int64_t)i * MLP_CODES + k) * elements;
    for (int kind = 0; kind < DELAYED_KINDS; kind++) {
        q.delayed[kind] = model_delayed_scale(m, kind, p->b->number) + i;
        q.largest[kind] = c->largest + kind * layers + i;
    }
    return q;
}

static void quantize_weights(const Pass *p, int i, const LayerCodes *q)
{
    int d = p->m->config->model_dim, F = p->m->config->mlp_dim;
    LayerParams w = layer_params(p->m, i);
    Codes up = {q->weight[CODES_UP_BACKWARD], q->weight[CODES_UP], q->up, NULL},
          down = {q->weight[CODES_DOWN], q->weight[CODES_DOWN_BACKWARD], q->down, NULL};
    amax_accumulate(p->s, p->m->mlp.amax, w.fc, (int64_t)d * F);
    scale_quotient(p->s, q->up, p->m->mlp.amax);
    quantize_codes(p->s, &up, w.fc, d, F);
    amax_accumulate(p->s, p->m->mlp.amax, w.proj, (int64_t)d * F);
    scale_quotient(p->s, q->down, p->m->mlp.amax);
    quantize_codes(p->s, &down, w.proj, d, F);
}

void mlp_both_forward(const Pass *p, int i, const BlockPort *io)
{
    Acts *a = p->a;
    int N = p->b->N, d = p->m->config->model_dim, F = p->m->config->mlp_dim;
    LayerActs *l = &a->layer[i];
    LayerCodes q = layer_codes(p, i);
    float *scale_h = q.delayed[DELAYED_INPUT], *scale_post = q.delayed[DELAYED_POST];
    Codes h = {l->h8, l->h8t, scale_h, q.largest[DELAYED_INPUT]},
          post = {l->post8, l->post8t, scale_post, q.largest[DELAYED_POST]};
    Fp8Product up = {l->h8, q.weight[CODES_UP], scale_h, q.up, N, d, F, NULL},
               down = {l->post8, q.weight[CODES_DOWN], scale_post, q.down, N, F, d, NULL};
    if (pass_runs(a, NULL, 0) && p->place & FIRST_OF_STEP)
        quantize_weights(p, i, &q);
    if (pass_runs(a, USES(l->h8, l->h8t, io->h)))
        quantize_codes(p->s, &h, io->h, N, d);
    if (pass_runs(a, USES(l->post8, l->post8t, l->h8)))
        matmul_fp8_relu2_codes(p->products, &post, &up);
    if (pass_runs(a, USES(io->out, l->post8, io->x)))
        matmul_fp8(p->products, io->out, &down, io->x);
}

void mlp_both_backward(const Pass *p, int i, const BlockPort *io)
{
    Acts *a = p->a;
    bool fresh = p->place & FIRST_OF_STEP;
    int N = p->b->N, d = p->m->config->model_dim, F = p->m->config->mlp_dim;
    LayerActs *l = &a->layer[i];
    LayerParams w = layer_params(p->m, i);
    LayerCodes q = layer_codes(p, i);
    float *scale_h = q.delayed[DELAYED_INPUT], *scale_post = q.delayed[DELAYED_POST],
          *scale_dpre = q.delayed[DELAYED_GRADIENT];
    Codes g = {l->g8, l->g8t, q.gradient, NULL},
          dpre = {l->dpre8, l->dpre8t, scale_dpre, q.largest[DELAYED_GRADIENT]};
    const float *factor = effective_weight(p, i, SCALED_DOWN, w.proj).alpha;
    Fp8Product before = {l->g8, q.weight[CODES_DOWN_BACKWARD], q.gradient, q.down, N, d, F, factor},
               input = {l->dpre8, q.weight[CODES_UP_BACKWARD], scale_dpre, q.up, N, F, d, NULL};
    Fp8WeightGrad grads[] = {{w.dproj, l->g8t, l->post8t, q.gradient, scale_post, d, F, fresh},
                             {w.dfc, l->h8t, l->dpre8t, scale_h, scale_dpre, d, F, fresh}};
    if (pass_runs(a, USES(io->dout))) {
        amax_accumulate(p->s, p->m->mlp.amax, io->dout, (int64_t)N * d);
        scale_quotient(p->s, q.gradient, p->m->mlp.amax);
    }
    if (pass_runs(a, USES(l->g8, l->g8t, io->dout)))
        quantize_codes(p->s, &g, io->dout, N, d);
    if (pass_runs(a, USES(l->dpre8, l->dpre8t, l->g8, l->post8)))
        matmul_fp8_relu2_backward(p->products, &dpre, &before, l->post8, scale_post);
    if (pass_runs(a, USES(l->g8t, l->post8t, l->h8t, l->dpre8t)))
        matmul_fp8_weight_grads(p->products, grads, 2, N);
    factor_backward(p, i, SCALED_DOWN, w.dproj, NULL);
    if (pass_runs(a, USES(io->dh, l->dpre8)))
        matmul_fp8(p->products, io->dh, &input, NULL);
}
