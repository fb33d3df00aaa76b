// The MLP: relu(h up)^2 down^T. In FP8 the forward of training multiplies codes of h, relu^2 and the weights;
// the backward reads h and relu^2 as they were stored before they were quantised.
#include "llmc/model/blocks/blocks.h"

static void plan(Acts *a, const Model *m, int i, PlanArena *b)
{
    LayerActs *l = &a->layer[i];
    const Config *c = m->config;
    size_t N = (size_t)a->tokens;
    l->h2 = plan_take(b, N * (size_t)c->model_dim, sizeof(floatX));
    l->rstd2 = plan_take(b, N, sizeof(float));
    l->post = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
    if (a->backward && c->mlp == MLP_FP8) {
        l->h8 = plan_take(b, N * (size_t)c->model_dim, 1);
        l->post8 = plan_take(b, N * (size_t)c->mlp_dim, 1);
    }
    if (a->backward)
        l->dpre = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
}

// The weights' codes, and scales that follow from the weights.
typedef struct {
    uint8_t *up, *down; // (F, d), (d, F)
    float *scale;       // (MLP_SCALES)
    const float *scale_h;
} LayerCodes;

static LayerCodes layer_codes(const Model *m, int i)
{
    int64_t elements = (int64_t)m->config->model_dim * m->config->mlp_dim;
    uint8_t *up = m->mlp.weights + 2 * i * elements;
    return (LayerCodes){up, up + elements, m->mlp.scales + i * MLP_SCALES,
                        m->mlp.scales + m->record->num_layers * MLP_SCALES};
}

static void quantize_weights(const Model *m, int i, Stream s)
{
    int d = m->config->model_dim, F = m->config->mlp_dim;
    int64_t n = (int64_t)d * F;
    LayerCodes q = layer_codes(m, i);
    LayerParams w = layer_params(m, i);
    float *amax = m->mlp.amax;
    amax_relu2_bound(s, amax, w.fc, d, F);
    scale_from_amax(s, q.scale + SCALE_POST, amax, 1.0f / E4M3_LARGEST);
    amax_accumulate(s, amax, w.fc, n);
    scale_from_amax(s, q.scale + SCALE_UP, amax, 1.0f / E4M3_LARGEST);
    amax_accumulate(s, amax, w.proj, n);
    scale_from_amax(s, q.scale + SCALE_DOWN, amax, 1.0f / E4M3_LARGEST);
    quantize_e4m3(s, q.up, w.fc, q.scale + SCALE_UP, d, F, QUANTIZE_INVERSE, true);
    quantize_e4m3(s, q.down, w.proj, q.scale + SCALE_DOWN, d, F, QUANTIZE_INVERSE, false);
}

static void forward_fp8(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N, d = m->config->model_dim, F = m->config->mlp_dim;
    Stream s = p->s;
    LayerActs *l = &a->layer[i];
    LayerCodes q = layer_codes(m, i);
    Fp8Product up = {l->h8, q.up, q.scale_h, q.scale + SCALE_UP, N, d, F},
               down = {l->post8, q.down, q.scale + SCALE_POST, q.scale + SCALE_DOWN, N, F, d};
    if (pass_runs(a, NULL, 0) && p->place & FIRST_OF_STEP)
        quantize_weights(m, i, s);
    if (pass_runs(a, USES(l->h8, io->h)))
        quantize_e4m3(s, l->h8, io->h, q.scale_h, N, d, QUANTIZE_INVERSE, false);
    if (pass_runs(a, USES(l->post, l->post8, l->h8)))
        matmul_fp8_relu2(p->products, l->post, l->post8, NULL, &up, q.scale + SCALE_POST);
    if (pass_runs(a, USES(io->out, l->post8, io->x)))
        matmul_fp8(p->products, io->out, &down, io->x);
}

static void forward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    if (a->backward && m->config->mlp == MLP_FP8) {
        forward_fp8(p, i, io);
        return;
    }
    if (pass_runs(a, USES(l->post, io->h)))
        matmul_relu2_forward(p->products, l->post, io->h, w.fc, N, d, F);
    if (pass_runs(a, USES(io->out, l->post, io->x)))
        matmul_forward(p->products, &(Product){io->out, l->post, w.proj, io->x, NULL, N, F, d, 1});
}

static void backward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N;
    bool fresh = p->place & FIRST_OF_STEP;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    WeightGrad grads[] = {{w.dproj, io->dout, l->post, d, F, fresh}, {w.dfc, io->h, l->dpre, d, F, fresh}};
    if (pass_runs(a, USES(l->dpre, io->dout, l->post)))
        matmul_relu2_backward(p->products, l->dpre, io->dout, w.proj, l->post, N, d, F);
    if (pass_runs(a, USES(io->dout, l->post, io->h, l->dpre)))
        matmul_weight_grads(p->products, grads, 2, N);
    if (pass_runs(a, USES(io->dh, l->dpre)))
        matmul_forward(p->products,
                       &(Product){io->dh, l->dpre, w.fc, NULL, NULL, N, F, d, 1}); // dh = dpre c_fc^T
}

const Block mlp_block = {plan, forward, backward};
