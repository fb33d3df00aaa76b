// Attention: norm and rotation of q and k, value embeddings, masked softmax, output gate.
#include "llmc/model/blocks/blocks.h"
#include "llmc/model/cache.h"

static void plan(Acts *a, const Model *m, int i, PlanArena *b)
{
    LayerActs *l = &a->layer[i];
    const Config *c = m->config;
    size_t N = (size_t)a->tokens;
    size_t H = (size_t)c->num_heads, n = N * (size_t)c->model_dim;
    l->h = plan_take(b, n, sizeof(floatX));
    l->rstd = plan_take(b, N, sizeof(float));
    l->q = plan_take(b, 3 * n, sizeof(floatX));
    l->k = l->q + n;
    l->v_raw = l->q + 2 * n;
    l->v = a->backward ? plan_take(b, n, sizeof(floatX)) : l->v_raw;
    l->yg = plan_take(b, n, sizeof(floatX));
    l->rstd_q = plan_take(b, N * H, sizeof(float));
    l->rstd_k = plan_take(b, N * H, sizeof(float));
    l->lse = plan_take(b, N * H, sizeof(float));
    if (!a->backward)
        return;
    l->dyg = plan_take(b, n, sizeof(floatX));
    l->dqkv = plan_take(b, 3 * n, sizeof(floatX));
    l->dv = plan_take(b, n, sizeof(floatX));
    l->dgate = plan_take(b, N * H, sizeof(float));
    l->scratch = plan_take(b, attention_scratch_bytes((int)N, c->num_heads, c->model_dim / c->num_heads), 1);
}

static AttentionForward attention_of(const Pass *p, int i, const floatX *h)
{
    const Model *m = p->m;
    const LayerActs *l = &p->a->layer[i];
    const AttentionSetting *at = p->at;
    return (AttentionForward){.yg = l->yg,
                              .lse = l->lse,
                              .q = l->q,
                              .k = l->k,
                              .v = l->v,
                              .h = h,
                              .gate_w = layer_params(m, i).gate,
                              .table = p->b->table,
                              .slots = p->b->slots,
                              .window = m->record->layers[i].long_window ? at->window_long : at->window_short,
                              .scale = at->scale,
                              .gate_inputs = (int)m->layer[i].gate->cols};
}

static void attend(const Pass *p, int i, const AttentionForward *attention)
{
    const Model *m = p->m;
    int N = p->b->N, H = m->config->num_heads, e = m->config->model_dim / H;
    if (!p->b->texts.cache) {
        attention_forward(p->s, attention, N, H, e);
        return;
    }
    TextCache cache = cache_of(m, &p->b->texts, i);
    attention_decode(p->s, attention, &cache, N, H, e);
}

static void forward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const DeviceBatch *b = p->b;
    const AttentionSetting *at = p->at;
    Stream s = p->s;
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, H = c->num_heads, e = d / H;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    QkvProductForward qkv = {.qkv = l->q,
                             .v = l->v,
                             .x = io->h,
                             .w = w.qkvo,
                             .rstd_q = l->rstd_q,
                             .rstd_k = l->rstd_k,
                             .value_embed = w.value_embed,
                             .tokens = b->tokens,
                             .lambda = w.lambda,
                             .cos = at->cos,
                             .sin = at->sin};
    if (pass_runs(a, USES(l->q, l->v, l->rstd_q, l->rstd_k, io->h)))
        qkv_product_forward(s, &qkv, N, H, e);
    AttentionForward attention = attention_of(p, i, io->h);
    if (pass_runs(a, USES(l->yg, l->lse, l->q, l->v, io->h)))
        attend(p, i, &attention);
    if (pass_runs(a, USES(io->out, l->yg, io->x)))
        matmul_forward(p->products, &(Product){io->out, l->yg, part_x(w.qkvo, 3 * (int64_t)d * d), io->x,
                                               NULL, N, d, d, 1});
}

// Leaves the gradient of the gates in l->dgate, which the mix of the layer carries on to h.
static void backward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const DeviceBatch *b = p->b;
    const AttentionSetting *at = p->at;
    Stream s = p->s;
    bool fresh = p->place & FIRST_OF_STEP;
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, H = c->num_heads, e = d / H;
    int64_t square = (int64_t)d * d;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    if (pass_runs(a, USES(l->dyg, io->dout)))
        matmul_backward_input(p->products,
                              &(InputGrad){l->dyg, io->dout, part_x(w.qkvo, 3 * square), N, d, d, NULL});
    floatX *dv = m->layer[i].value_embed ? l->dv : NULL;
    AttentionForward attention = attention_of(p, i, io->h);
    AttentionBackward g = {.forward = &attention,
                           .dqkv = l->dqkv,
                           .dv = dv,
                           .dlambda = w.dlambda,
                           .dgate = l->dgate,
                           .dgate_w = w.dgate,
                           .dyg = l->dyg,
                           .rstd_q = l->rstd_q,
                           .rstd_k = l->rstd_k,
                           .v_raw = l->v_raw,
                           .value_embed = w.value_embed,
                           .tokens = b->tokens,
                           .lambda = w.lambda,
                           .cos = at->cos,
                           .sin = at->sin,
                           .scratch = l->scratch};
    if (pass_runs(a, USES(l->dqkv, dv, l->dgate, l->dyg, l->yg, l->lse, l->q, l->v, io->h, l->rstd_q,
                          l->rstd_k, l->scratch)))
        attention_backward(s, &g, N, H, e);
    if (dv && pass_runs(a, USES(dv)))
        embedding_grad(s, w.dvalue_embed, dv, w.lambda + 1, &b->rows, N, d);
    WeightGrad grads[] = {{w.dqkvo, l->dqkv, io->h, 3 * d, d, fresh},
                          {part(w.dqkvo, 3 * square), io->dout, l->yg, d, d, fresh}};
    if (pass_runs(a, USES(l->dqkv, io->h, io->dout, l->yg)))
        matmul_weight_grads(p->products, grads, 2, N);
    if (pass_runs(a, USES(io->dh, l->dqkv)))
        matmul_backward_input(p->products, &(InputGrad){io->dh, l->dqkv, w.qkvo, N, d, 3 * d, NULL});
}

const Block attention_block = {plan, forward, backward};
