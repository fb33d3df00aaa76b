// The MLP: relu(h up)^2 down^T.
#include "llmc/model/blocks/blocks.h"

static void plan(LayerActs *l, const Config *c, size_t N, bool backward, PlanArena *b)
{
    l->h2 = plan_take(b, N * (size_t)c->model_dim, sizeof(floatX));
    l->rstd2 = plan_take(b, N, sizeof(float));
    l->post = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
    if (backward)
        l->dpre = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
}

static void forward(const Pass *p, int i, floatX *out)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    if (pass_runs(a, USES(l->post, l->h2)))
        matmul_relu2_forward(p->products, l->post, l->h2, w.fc, N, d, F);
    if (pass_runs(a, USES(out, l->post, l->x)))
        matmul_forward(p->products, out, l->post, w.proj, l->x, N, F, d, 1);
}

static void backward(const Pass *p, int i)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N;
    bool fresh = p->place & FIRST_OF_STEP;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    WeightGrad grads[] = {{w.dproj, a->dx, l->post, d, F, fresh}, {w.dfc, l->h2, l->dpre, d, F, fresh}};
    if (pass_runs(a, USES(l->dpre, a->dx, l->post)))
        matmul_relu2_backward(p->products, l->dpre, a->dx, w.proj, l->post, N, d, F);
    if (pass_runs(a, USES(a->dx, l->post, l->h2, l->dpre)))
        matmul_weight_grads(p->products, grads, 2, N);
    if (pass_runs(a, USES(a->dh, l->dpre)))
        matmul_forward(p->products, a->dh, l->dpre, w.fc, NULL, N, F, d, 1); // dh = dpre c_fc^T
}

const Block mlp_block = {plan, forward, backward};
