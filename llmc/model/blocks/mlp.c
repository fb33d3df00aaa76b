// The MLP: relu(h up)^2 down^T. In FP8 the forward of training multiplies codes of h, relu^2 and the weights,
// or of h and MLP up alone (MlpScales); the backward reads h and relu^2 as they were stored before they were
// quantised. Both directions in FP8: mlp_both.c.
#include "llmc/model/blocks/blocks.h"

static void plan(Acts *a, const Model *m, int i, PlanArena *b)
{
    LayerActs *l = &a->layer[i];
    const Config *c = m->config;
    size_t N = (size_t)a->tokens;
    l->h2 = plan_take(b, N * (size_t)c->model_dim, sizeof(floatX));
    l->rstd2 = plan_take(b, N, sizeof(float));
    l->post = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
    if (a->backward && c->mlp == MLP_FP8_BACKWARD)
        mlp_both_plan(a, m, i, b);
    if (a->backward && c->mlp == MLP_FP8) {
        l->h8 = plan_take(b, N * (size_t)c->model_dim, 1);
        l->post8 = plan_take(b, N * (size_t)c->mlp_dim, 1);
    }
    if (a->backward)
        l->dpre = plan_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
}

// Of the weights, and all scales of a layer, (1) each.
typedef struct {
    uint8_t *up, *down; // (F, d), (d, F)
    float *scale_up, *scale_down, *scale_h, *scale_post;
    float *next_down; // with delayed scales
    bool delayed;
} LayerCodes;

static LayerCodes layer_codes(const Pass *p, int i)
{
    const Model *m = p->m;
    const MlpCodes *c = &m->mlp;
    int64_t elements = (int64_t)m->config->model_dim * m->config->mlp_dim;
    uint8_t *up = c->weights + 2 * i * elements;
    float *scales = c->scales + i * MLP_SCALES;
    LayerCodes q = {.up = up,
                    .down = up + elements,
                    .scale_up = scales + SCALE_UP,
                    .scale_down = scales + SCALE_DOWN,
                    .scale_h = c->scales + m->record->num_layers * MLP_SCALES,
                    .scale_post = scales + SCALE_POST,
                    .delayed = c->sets > 0};
    if (!q.delayed)
        return q;
    q.next_down = model_delayed_row(m, 0) + i;
    q.scale_post = model_delayed_row(m, 1 + p->b->number % c->sets) + i;
    return q;
}

static void quantize_weights(const Pass *p, int i, const LayerCodes *q)
{
    const Model *m = p->m;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    int64_t n = (int64_t)d * F;
    LayerParams w = layer_params(m, i);
    Stream s = p->s;
    float *amax = m->mlp.amax;
    amax_relu2_bound(s, amax, w.fc, d, F);
    scale_from_amax(s, q->scale_post, amax, 1.0f / E4M3_LARGEST);
    amax_accumulate(s, amax, w.fc, n);
    scale_from_amax(s, q->scale_up, amax, 1.0f / E4M3_LARGEST);
    amax_accumulate(s, amax, w.proj, n);
    scale_from_amax(s, q->scale_down, amax, 1.0f / E4M3_LARGEST);
    quantize_e4m3(s, q->up, w.fc, q->scale_up, d, F, QUANTIZE_INVERSE, true);
    quantize_e4m3(s, q->down, w.proj, q->scale_down, d, F, QUANTIZE_INVERSE, false);
}

static float delayed_factor(double headroom) { return (float)(headroom / E4M3_LARGEST); }

static bool up_alone(const Model *m) { return m->record->mlp_scales.up_alone; }

static void quantize_up(const Pass *p, int i, const LayerCodes *q)
{
    const Model *m = p->m;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    const floatX *fc = layer_params(m, i).fc;
    float *amax = m->mlp.amax;
    amax_accumulate(p->s, amax, fc, (int64_t)d * F);
    scale_exact(p->s, q->scale_up, amax);
    quantize_e4m3(p->s, q->up, fc, q->scale_up, d, F, QUANTIZE_QUOTIENT_BF16, true);
}

static void quantize_weights_delayed(const Pass *p, int i, const LayerCodes *q)
{
    const Model *m = p->m;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    int64_t n = (int64_t)d * F;
    LayerParams w = layer_params(m, i);
    Stream s = p->s;
    float *amax = m->mlp.amax;
    quantize_up(p, i, q);
    amax_accumulate(s, amax, w.proj, n);
    scale_delayed(s, q->scale_down, q->next_down, amax, delayed_factor(m->record->mlp_scales.down),
                  p->b->exact_scales);
    quantize_e4m3(s, q->down, w.proj, q->scale_down, d, F, QUANTIZE_QUOTIENT, false);
}

// Whether the scale of h follows from its own amax, and not from its width.
static bool input_by_amax(const Model *m) { return m->mlp.sets > 0 || up_alone(m); }

float *mlp_input_amax(const Pass *p)
{
    bool wanted = p->a->backward && p->m->config->mlp == MLP_FP8 && input_by_amax(p->m);
    return wanted ? p->m->mlp.amax + 1 : NULL;
}

static void quantize_input(const Pass *p, uint8_t *h8, const floatX *h, const LayerCodes *q)
{
    int N = p->b->N, d = p->m->config->model_dim;
    float *amax = p->m->mlp.amax + 1;
    if (!input_by_amax(p->m)) {
        quantize_e4m3(p->s, h8, h, q->scale_h, N, d, QUANTIZE_INVERSE, false);
        return;
    }
    if (!p->m->network.count)
        amax_accumulate(p->s, amax, h, (int64_t)N * d);
    quantize_e4m3(p->s, h8, h, amax, N, d, QUANTIZE_AMAX, false);
    scale_from_amax(p->s, q->scale_h, amax, 1.0f / E4M3_LARGEST);
}

// out = x + relu^2 down^T in bf16.
static void down_product(const Pass *p, int i, const BlockPort *io)
{
    int N = p->b->N, d = p->m->config->model_dim, F = p->m->config->mlp_dim;
    LayerActs *l = &p->a->layer[i];
    if (pass_runs(p->a, USES(io->out, l->post, io->x)))
        matmul_forward(p->products,
                       &(Product){io->out, l->post, layer_params(p->m, i).proj, io->x, NULL, N, F, d, 1});
}

// The codes of relu^2 are not read: any scale will do.
static void forward_up_alone(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    int N = p->b->N, d = m->config->model_dim, F = m->config->mlp_dim;
    LayerActs *l = &p->a->layer[i];
    LayerCodes q = layer_codes(p, i);
    Fp8Product up = {l->h8, q.up, q.scale_h, q.scale_up, N, d, F, NULL};
    if (pass_runs(p->a, NULL, 0) && p->place & FIRST_OF_STEP)
        quantize_up(p, i, &q);
    if (pass_runs(p->a, USES(l->h8, io->h)))
        quantize_input(p, l->h8, io->h, &q);
    if (pass_runs(p->a, USES(l->post, l->post8, l->h8)))
        matmul_fp8_relu2(p->products, l->post, l->post8, NULL, &up, q.scale_up);
    down_product(p, i, io);
}

static void forward_fp8(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N, d = m->config->model_dim, F = m->config->mlp_dim;
    LayerActs *l = &a->layer[i];
    LayerCodes q = layer_codes(p, i);
    float *amax = q.delayed ? m->mlp.amax : NULL;
    Fp8Product up = {l->h8, q.up, q.scale_h, q.scale_up, N, d, F, NULL},
               down = {l->post8, q.down, q.scale_post, q.scale_down, N, F, d, NULL};
    if (pass_runs(a, NULL, 0) && p->place & FIRST_OF_STEP)
        (q.delayed ? quantize_weights_delayed : quantize_weights)(p, i, &q);
    if (pass_runs(a, USES(l->h8, io->h)))
        quantize_input(p, l->h8, io->h, &q);
    if (pass_runs(a, USES(l->post, l->post8, l->h8)))
        matmul_fp8_relu2(p->products, l->post, l->post8, amax, &up, q.scale_post);
    if (pass_runs(a, USES(io->out, l->post8, io->x)))
        matmul_fp8(p->products, io->out, &down, io->x);
    if (pass_runs(a, NULL, 0) && amax) // of the micro-batch that has this set next
        scale_from_amax(p->s, q.scale_post, amax, delayed_factor(m->record->mlp_scales.post));
}

static void forward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    int N = p->b->N;
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    scale_weight(p, i, SCALED_DOWN, w.proj);
    if (a->backward && m->config->mlp == MLP_FP8) {
        (up_alone(m) ? forward_up_alone : forward_fp8)(p, i, io);
        return;
    }
    if (a->backward && m->config->mlp == MLP_FP8_BACKWARD) {
        mlp_both_forward(p, i, io);
        return;
    }
    if (pass_runs(a, USES(l->post, io->h)))
        matmul_relu2_forward(p->products, l->post, io->h, w.fc, N, d, F);
    down_product(p, i, io);
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
    if (m->config->mlp == MLP_FP8_BACKWARD) {
        mlp_both_backward(p, i, io);
        return;
    }
    EffectiveWeight down = effective_weight(p, i, SCALED_DOWN, w.proj);
    WeightGrad grads[] = {{w.dproj, io->dout, l->post, d, F, fresh}, {w.dfc, io->h, l->dpre, d, F, fresh}};
    if (pass_runs(a, USES(l->dpre, io->dout, l->post))) {
        assert(!down.alpha); // this product has no factor: the weight is a copy that holds it
        matmul_relu2_backward(p->products, l->dpre, io->dout, down.w, l->post, N, d, F);
    }
    if (pass_runs(a, USES(io->dout, l->post, io->h, l->dpre)))
        matmul_weight_grads(p->products, grads, 2, N);
    factor_backward(p, i, SCALED_DOWN, w.dproj, NULL);
    if (pass_runs(a, USES(io->dh, l->dpre)))
        matmul_forward(p->products,
                       &(Product){io->dh, l->dpre, w.fc, NULL, NULL, N, F, d, 1}); // dh = dpre c_fc^T
}

const Block mlp_block = {plan, forward, backward};
