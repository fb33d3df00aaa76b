#include "llmc/model/blocks/blocks.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void find_params(Model *m)
{
    const Params *p = &m->params;
    m->embed = params_of(p, ROLE_EMBED, 0);
    m->smear_gate = params_of(p, ROLE_SMEAR_GATE, 0);
    m->head = params_of(p, ROLE_HEAD, 0);
    m->scalars = params_of(p, ROLE_SCALARS, 0);
    m->bigram = params_of(p, ROLE_BIGRAM, 0);
    m->signs = params_of(p, ROLE_SIGNS, 0);
    for (int i = 0; i < m->record->num_generators; i++) {
        m->generator[i].in = params_of(p, ROLE_GENERATOR_IN, i);
        m->generator[i].out = params_of(p, ROLE_GENERATOR_OUT, i);
        m->generator[i].bias = params_of(p, ROLE_GENERATOR_BIAS, i);
    }
    for (int i = 0; i < m->record->num_layers; i++) {
        m->layer[i].qkvo = params_of(p, ROLE_QKVO, i);
        m->layer[i].gate = params_of(p, ROLE_ATTENTION_GATE, i);
        m->layer[i].up = params_of(p, ROLE_MLP_UP, i);
        m->layer[i].down = params_of(p, ROLE_MLP_DOWN, i);
        m->layer[i].value_embed = params_of(p, ROLE_VALUE_EMBED, m->record->layers[i].value_embed - 1);
        m->layer[i].value_gate = params_of(p, ROLE_VALUE_GATE, m->record->layers[i].value_embed - 1);
    }
}

bool model_is_empty(const Model *m, int i)
{
    return i < m->record->num_layers && !m->record->layers[i].attention && !m->record->layers[i].mlp;
}

static void compile_mix(Model *m, int i)
{
    const MixTerm *terms = i < m->record->num_layers ? m->record->layers[i].mix : m->record->output;
    int n = record_mix_terms(terms);
    m->mix[i] =
        (Mix){.terms = n, .second = n > 1 ? terms[1].stream : NONE, .third = n > 2 ? terms[2].stream : NONE};
    for (int k = 0; k < 3; k++)
        m->network.terms[3 * i + k] = k < n ? terms[k].weight : (Coefficient){0, NONE, NONE};
    if (n || model_is_empty(m, i))
        return;
    // As it is: the op takes two streams at least.
    m->mix[i] = (Mix){.terms = 2, .second = EMBEDDED, .third = NONE};
    m->network.terms[3 * i].factor = 1;
}

// Whether a mix above has this one's second stream as its second, too.
static bool read_above(const Model *m, int i)
{
    for (int k = i + 1; k <= m->record->num_layers; k++) {
        if (m->mix[k].terms && m->mix[k].second == m->mix[i].second)
            return true;
    }
    return false;
}

static void compile_mixes(Model *m)
{
    m->network.num_terms = (m->record->num_layers + 1) * 3;
    for (int i = 0; i <= m->record->num_layers; i++)
        compile_mix(m, i);
    for (int i = 0; i <= m->record->num_layers; i++)
        m->mix[i].first_reader = !read_above(m, i);
}

void model_describe(Model *m, const Config *c)
{
    Error e;
    memset(m, 0, sizeof *m);
    m->config = c;
    params_describe(&m->params, c);
    m->record = m->params.record;
    find_params(m);
    if (!record_has_lists(m->record))
        compile_mixes(m);
    else if (!network_compile(&m->network, m->record, &e))
        fatal(1, "%s", e.text);
}

void model_allocate(Model *m, bool training)
{
    const Config *c = m->config;
    size_t w8 = c->head == HEAD_FP8 ? head_weight_bytes(HEAD_FP8, config_vocab_padded(c), c->model_dim) : 0;
    params_allocate(&m->params, training);
    if (w8)
        m->head_w8 = device_alloc(w8, "parameters: quantised head");
    if (!training)
        return;
    model_allocate_codes(m);
    model_allocate_scaled(m);
}

void model_free(Model *m)
{
    params_free(&m->params);
    device_free(m->head_w8);
    model_free_scaled(m);
    model_free_codes(m);
}

// ---- activations ------------------------------------------------------------------------------------------

static bool is_kept(const Model *m, int stream) // read again by a mix
{
    bool kept = false;
    for (int i = 0; i <= m->record->num_layers; i++)
        kept |= m->mix[i].terms && (m->mix[i].second == stream || m->mix[i].third == stream);
    return kept;
}

static void take_layer(Acts *a, const Model *m, int i, PlanArena *b)
{
    LayerActs *l = &a->layer[i];
    size_t N = (size_t)a->tokens, n = N * (size_t)m->config->model_dim;
    if (model_is_empty(m, i)) {
        a->out[i] = i ? a->out[i - 1] : a->x0;
        return;
    }
    a->out[i] = plan_take(b, n, sizeof(floatX));
    l->x = plan_take(b, n, sizeof(floatX));
    if (m->layer[i].qkvo)
        attention_block.plan(a, m, i, b);
    if (m->layer[i].up)
        mlp_block.plan(a, m, i, b);
    if (a->backward && is_kept(m, i))
        a->dstream[i] = plan_take(b, n, sizeof(floatX));
}

// Of a record without lists.
static void take_layers(Acts *a, const Model *m, PlanArena *b)
{
    size_t N = (size_t)a->tokens, n = N * (size_t)m->config->model_dim;
    a->rstd_f = plan_take(b, N, sizeof(float));
    for (int i = 0; i < m->record->num_layers; i++)
        take_layer(a, m, i, b);
    a->xf = plan_take(b, n, sizeof(floatX));
}

static void take_all(Acts *a, const Model *m, int tokens, bool backward, PlanArena *b)
{
    size_t N = (size_t)tokens, n = N * (size_t)m->config->model_dim,
           coefficients = (size_t)m->network.num_terms;
    *a = (Acts){.tokens = tokens, .backward = backward};
    a->coef = plan_take_pinned(b, coefficients, sizeof(float));
    if (backward)
        a->dcoef = plan_take_pinned(b, coefficients, sizeof(float));
    else
        a->sum = plan_take_pinned(b, 1, sizeof(float));
    a->x0 = plan_take(b, n, sizeof(floatX));
    a->rstd0 = plan_take(b, N, sizeof(float));
    if (m->network.count)
        network_plan(a, m, b);
    else
        take_layers(a, m, b);
    head_plan(a, m, b);
    if (!backward)
        return;
    a->dh = plan_take(b, n, sizeof(floatX));
    a->dx = plan_take(b, n, sizeof(floatX));
    a->dx0 = plan_take(b, n, sizeof(floatX));
}

bool pass_runs(const Acts *a, const void *const *tensors, int count)
{
    if (a->planning)
        plan_op(a->planning, tensors, count);
    else if (a->spoiled)
        plan_spoil_dead(a->spoiled, a->spoiled_base);
    return !a->planning;
}

void acts_plan(Plan *plan, const Model *m, int N, bool backward)
{
    Acts a;
    plan_begin(plan);
    take_all(&a, m, N, backward, &(PlanArena){.plan = plan});
    a.planning = plan;
    DeviceBatch b = {.N = N};
    AttentionSetting at = {0};
    if (backward) {
        model_train_batch((Model *)m, &a, &b, &at, NULL, 0, NULL);
    } else {
        model_eval_batch((Model *)m, &a, &b, &at, &(EvalLoss){.count = N}, NULL);
    }
    plan_place(plan);
}

size_t acts_bytes(const Model *m, int N, bool backward)
{
    Plan *plan = xcalloc(1, sizeof *plan);
    acts_plan(plan, m, N, backward);
    size_t bytes = plan->size;
    free(plan);
    return bytes;
}

void acts_follow(Acts *a, const Model *m, int N, bool backward, Plan *plan, void *base)
{
    take_all(a, m, N, backward, &(PlanArena){.plan = plan, .base = base});
}

void acts_place(Acts *a, const Model *m, int N, bool backward, void *base)
{
    Plan *plan = xcalloc(1, sizeof *plan);
    acts_plan(plan, m, N, backward);
    acts_follow(a, m, N, backward, plan, base);
    free(plan);
}

// ---- parameters of a layer --------------------------------------------------------------------------------

float *model_scalar(const Model *m, int i) { return part(param_data(&m->params, m->scalars), i); }

float *model_scalar_grad(const Model *m, int i) { return part(param_grad(&m->params, m->scalars), i); }

LayerParams layer_params(const Model *m, int i)
{
    const Params *p = &m->params;
    LayerParams l = {0};
    struct {
        const Param *a;
        const floatX **w;
        float **dw;
    } rows[] = {
        {m->layer[i].qkvo, &l.qkvo, &l.dqkvo},
        {m->layer[i].up, &l.fc, &l.dfc},
        {m->layer[i].down, &l.proj, &l.dproj},
        {m->layer[i].gate, &l.gate, &l.dgate},
        {m->layer[i].value_embed, &l.value_embed, &l.dvalue_embed},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        if (!rows[k].a)
            continue;
        *rows[k].w = param_weight(p, rows[k].a);
        *rows[k].dw = param_grad(p, rows[k].a);
    }
    l.lambda = model_scalar(m, m->record->layers[i].v_lambdas);
    l.dlambda = model_scalar_grad(m, m->record->layers[i].v_lambdas);
    return l;
}

// ---- forward ----------------------------------------------------------------------------------------------

static void layer_forward(const Pass *p, int i)
{
    const Model *m = p->m;
    Acts *a = p->a;
    LayerActs *l = &a->layer[i];
    bool attention = m->layer[i].qkvo, mlp = m->layer[i].up;
    BlockPort first = {.h = l->h, .x = l->x, .out = mlp ? l->x : a->out[i]},
              second = {.h = l->h2, .x = l->x, .out = a->out[i]};
    mix_forward(p, i, l->x, attention ? l->h : l->h2, attention ? l->rstd : l->rstd2);
    if (attention)
        attention_block.forward(p, i, &first);
    if (attention && mlp && pass_runs(a, USES(l->h2, l->rstd2, l->x)))
        rmsnorm_forward(p->s, l->h2, l->rstd2, l->x, p->b->N, m->config->model_dim);
    if (mlp)
        mlp_block.forward(p, i, &second);
}

void model_prepare(Model *m, Acts *a, Stream s)
{
    int count = m->network.num_terms;
    coefficients_forward(s, a->coef, model_scalar(m, 0), m->network.terms, count);
    if (a->backward)
        device_zero(s, a->dcoef, (size_t)count * sizeof(float)); // a validation may have used its memory
}

static void stage_needed(const Model *m, int place, int stage, Stream s)
{
    if (place & FIRST_OF_STEP && m->hooks.needed)
        m->hooks.needed(m->hooks.context, stage, s);
}

static void stage_done(const Model *m, int place, int stage, const ProductContext *c)
{
    if (place & LAST_OF_STEP && m->hooks.done)
        m->hooks.done(m->hooks.context, stage, c);
}

static void layers_forward(const Pass *p)
{
    const Model *m = p->m;
    int L = m->record->num_layers;
    stage_needed(m, p->place, 0, p->s);
    embed_forward_block(p);
    for (int i = 0; i < L; i++) {
        stage_needed(m, p->place, 1 + i, p->s);
        if (!model_is_empty(m, i))
            layer_forward(p, i);
    }
    mix_forward(p, L, NULL, p->a->xf, p->a->rstd_f);
}

static void nodes_forward(const Pass *p)
{
    const Network *n = &p->m->network;
    for (int k = 0, stage = 0; k < n->count; k++) {
        for (; stage <= n->node[k].stage && stage <= p->m->record->num_layers; stage++)
            stage_needed(p->m, p->place, stage, p->s);
        node_forward(p, k);
    }
}

static void forward(const Pass *p)
{
    assert(p->b->N == p->a->tokens); // q, k and v are planes of one product: their distance is N * d
    if (p->m->network.count)
        nodes_forward(p);
    else
        layers_forward(p);
}

void model_forward(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, Stream s)
{
    forward(&(Pass){m, a, b, at, 0, s, &(ProductContext){s, NULL}});
}

void model_eval_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at,
                      const EvalLoss *loss, Stream s)
{
    Pass p = {m, a, b, at, 0, s, &(ProductContext){s, NULL}};
    forward(&p);
    head_eval_block(&p, loss);
}

// ---- backward ---------------------------------------------------------------------------------------------

static void layer_backward(const Pass *p, int i)
{
    const Model *m = p->m;
    Acts *a = p->a;
    LayerActs *l = &a->layer[i];
    bool attention = m->layer[i].qkvo, mlp = m->layer[i].up;
    BlockPort first = {.h = l->h, .dout = a->dx, .dh = a->dh},
              second = {.h = l->h2, .dout = a->dx, .dh = a->dh};
    if (mlp)
        mlp_block.backward(p, i, &second);
    if (attention && mlp && pass_runs(a, USES(a->dx, a->dh, l->h2, l->rstd2)))
        rmsnorm_backward(p->s, a->dx, a->dh, l->h2, l->rstd2, p->b->N, m->config->model_dim);
    if (attention)
        attention_block.backward(p, i, &first);
    mix_backward(p, i, attention ? l->h : l->h2, attention ? l->rstd : l->rstd2, attention ? l->dgate : NULL);
}

static void layers_backward(const Pass *p)
{
    const Model *m = p->m;
    int L = m->record->num_layers;
    mix_backward(p, L, p->a->xf, p->a->rstd_f, NULL);
    stage_done(m, p->place, L + 1, p->products);
    for (int i = L - 1; i >= 0; i--) {
        if (!model_is_empty(m, i))
            layer_backward(p, i);
        stage_done(m, p->place, 1 + i, p->products);
    }
    embed_backward_block(p, p->a->dx, p->a->dx0);
    stage_done(m, p->place, 0, p->products);
}

static void nodes_backward(const Pass *p)
{
    const Network *n = &p->m->network;
    int stage = p->m->record->num_layers + 1;
    for (int k = n->count - 1; k >= 0; k--) {
        for (; stage > n->node[k].stage; stage--)
            stage_done(p->m, p->place, stage, p->products);
        node_backward(p, k);
    }
    stage_done(p->m, p->place, 0, p->products);
}

void model_train_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, float *loss,
                       int place, Stream s)
{
    SharedSms shared = {0, 0}; // until the first stage is done
    ProductContext products = {s, &shared};
    Pass p = {m, a, b, at, place, s, &products};
    forward(&p);
    stage_needed(m, place, m->record->num_layers + 1, s);
    head_train_block(&p, loss);
    if (m->network.count)
        nodes_backward(&p);
    else
        layers_backward(&p);
    model_follow_scales(&p);
}

void model_finish_gradients(Model *m, Acts *a, Stream s)
{
    coefficients_backward(s, model_scalar_grad(m, 0), a->dcoef, model_scalar(m, 0), m->network.terms,
                          m->network.num_terms);
}
