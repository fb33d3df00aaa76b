#include "llmc/model.h"
#include "llmc/arena.h"
#include <string.h>

static void find_params(Model *m)
{
    const Params *p = &m->params;
    m->embed = params_of(p, ROLE_EMBED, 0);
    m->smear_gate = params_of(p, ROLE_SMEAR_GATE, 0);
    m->head = params_of(p, ROLE_HEAD, 0);
    m->scalars = params_of(p, ROLE_SCALARS, 0);
    for (int i = 0; i < m->record->num_layers; i++) {
        m->layer[i].qkvo = params_of(p, ROLE_QKVO, i);
        m->layer[i].gate = params_of(p, ROLE_ATTENTION_GATE, i);
        m->layer[i].up = params_of(p, ROLE_MLP_UP, i);
        m->layer[i].down = params_of(p, ROLE_MLP_DOWN, i);
        m->layer[i].value_embed = params_of(p, ROLE_VALUE_EMBED, m->record->layers[i].value_embed - 1);
    }
}

static bool is_empty(const Model *m, int i)
{
    return i < m->record->num_layers && !m->record->layers[i].attention && !m->record->layers[i].mlp;
}

static void compile_mix(Model *m, int i)
{
    const MixTerm *terms = i < m->record->num_layers ? m->record->layers[i].mix : m->record->output;
    int n = record_mix_terms(terms);
    m->mix[i] = (Mix){.terms = n, .second = n > 1 ? terms[1].stream : NONE, .third = n > 2 ? terms[2].stream : NONE};
    for (int k = 0; k < 3; k++) m->terms[3 * i + k] = k < n ? terms[k].weight : (Coefficient){0, NONE, NONE};
    if (n || is_empty(m, i)) return;
    m->mix[i] = (Mix){.terms = 2, .second = EMBEDDED, .third = NONE}; // as it is: the op takes two streams at least
    m->terms[3 * i].factor = 1;
}

static bool read_above(const Model *m, int i) // whether a mix above has this one's second stream as its second, too
{
    for (int k = i + 1; k <= m->record->num_layers; k++) {
        if (m->mix[k].terms && m->mix[k].second == m->mix[i].second) return true;
    }
    return false;
}

void model_describe(Model *m, const Config *c)
{
    memset(m, 0, sizeof *m);
    m->config = c;
    params_describe(&m->params, c);
    m->record = m->params.record;
    find_params(m);
    for (int i = 0; i <= m->record->num_layers; i++) compile_mix(m, i);
    for (int i = 0; i <= m->record->num_layers; i++) m->mix[i].first_reader = !read_above(m, i);
}

void model_allocate(Model *m, bool training)
{
    const Config *c = m->config;
    size_t w8 = c->head == HEAD_FP8 ? head_weight_bytes(HEAD_FP8, config_vocab_padded(c), c->model_dim) : 0;
    params_allocate(&m->params, training);
    if (w8) m->head_w8 = device_alloc(w8, "parameters: quantised head");
}

void model_free(Model *m)
{
    params_free(&m->params);
    if (m->head_w8) device_free(m->head_w8);
}

// ---- activations -------------------------------------------------------------------------------------------------------

static bool is_kept(const Model *m, int stream) // read again by a mix
{
    bool kept = false;
    for (int i = 0; i <= m->record->num_layers; i++)
        kept |= m->mix[i].terms && (m->mix[i].second == stream || m->mix[i].third == stream);
    return kept;
}

static void place_attention(LayerActs *l, const Config *c, size_t N, Arena *b)
{
    size_t H = (size_t)c->num_heads, n = N * (size_t)c->model_dim;
    floatX *planes = arena_take(b, 3 * n, sizeof(floatX));
    l->q = planes;
    l->k = planes ? planes + n : NULL;
    l->v_raw = planes ? planes + 2 * n : NULL;
    l->yg = arena_take(b, n, sizeof(floatX));
    l->rstd_q = arena_take(b, N * H, sizeof(float));
    l->rstd_k = arena_take(b, N * H, sizeof(float));
    l->lse = arena_take(b, N * H, sizeof(float));
}

static void place_layer(LayerActs *l, const Model *m, int layer, size_t N, Arena *b)
{
    const Config *c = m->config;
    size_t n = N * (size_t)c->model_dim;
    if (m->layer[layer].qkvo) {
        place_attention(l, c, N, b);
        l->h = arena_take(b, n, sizeof(floatX));
        l->v = arena_take(b, n, sizeof(floatX));
        l->rstd = arena_take(b, N, sizeof(float));
    }
    l->post = arena_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
    l->h2 = arena_take(b, n, sizeof(floatX));
    l->rstd2 = arena_take(b, N, sizeof(float));
}

// Without a backward one set serves all layers, and attention's tensors lie where the MLP's come to lie when they are dead.
static void place_shared_layer(LayerActs *l, const Config *c, size_t N, Arena *b)
{
    l->h = l->h2 = arena_take(b, N * (size_t)c->model_dim, sizeof(floatX));
    l->rstd = l->rstd2 = arena_take(b, N, sizeof(float));
    Arena attention = *b;
    place_attention(l, c, N, &attention);
    l->v = l->v_raw;
    l->post = arena_take(b, N * (size_t)c->mlp_dim, sizeof(floatX));
    if (attention.used > b->used) b->used = attention.used;
}

// Gradients lie where others are dead. dpre is dead when attention's come; dyg is when dqkv comes, unless attention's backward pass
// writes to it. What skips carry, from layers below the last, lies in the last layer's activations; what the backout carries, in
// the forward's residual stream.
static void place_gradients(Acts *a, const Model *m, size_t N, Arena last_layer, Arena *b)
{
    const Config *c = m->config;
    int L = m->record->num_layers;
    size_t n = N * (size_t)c->model_dim;
    a->dx = arena_take(b, n, sizeof(floatX));
    a->dx0 = arena_take(b, n, sizeof(floatX));
    a->dgate = arena_take(b, N * (size_t)c->num_heads, sizeof(float));
    Arena mlp = *b;
    a->dpre = arena_take(&mlp, N * (size_t)c->mlp_dim, sizeof(floatX));
    a->dqkv = arena_take(b, 3 * n, sizeof(floatX));
    bool feeds = attention_feeds_qkv();
    a->dyg = feeds ? arena_take(b, n, sizeof(floatX)) : a->dqkv;
    a->dq = feeds ? NULL : arena_take(b, n, sizeof(floatX));
    a->dk = feeds ? NULL : arena_take(b, n, sizeof(floatX));
    a->dv = arena_take(b, n, sizeof(floatX));
    if (mlp.used > b->used) b->used = mlp.used;
    for (int i = 0; i < L; i++)
        if (is_kept(m, i)) a->dstream[i] = i == m->mix[L].second ? a->x : arena_take(&last_layer, n, sizeof(floatX));
}

static void place(Acts *a, const Model *m, int tokens, bool backward, Arena *b, Arena *gradients)
{
    const Config *c = m->config;
    int L = m->record->num_layers;
    Arena last = {NULL, 0};
    size_t N = (size_t)tokens, n = N * (size_t)c->model_dim, coefficients = (size_t)(L + 1) * 3;
    *a = (Acts){.tokens = tokens, .backward = backward};
    a->coef = arena_take(b, coefficients, sizeof(float));
    a->dcoef = backward ? arena_take(b, coefficients, sizeof(float)) : NULL;
    a->x0 = arena_take(b, n, sizeof(floatX));
    a->x = arena_take(backward ? gradients : b, n, sizeof(floatX)); // dead when the head runs
    a->rstd0 = arena_take(b, N, sizeof(float));
    a->rstd_f = arena_take(b, N, sizeof(float));
    // Without a backward, layers whose output nobody reads again share one buffer.
    floatX *shared = backward ? NULL : arena_take(b, n, sizeof(floatX));
    for (int i = 0; i < L; i++) {
        if (is_empty(m, i)) a->out[i] = i ? a->out[i - 1] : a->x0;
        else a->out[i] = backward || is_kept(m, i) ? arena_take(b, n, sizeof(floatX)) : shared;
    }
    LayerActs one = {0};
    if (!backward) place_shared_layer(&one, c, N, b);
    for (int i = 0; i < L; i++) {
        if (is_empty(m, i)) continue;
        last = *b;
        if (backward) place_layer(&a->layer[i], m, i, N, b);
        else a->layer[i] = one;
    }
    a->xf = backward ? arena_take(b, n, sizeof(floatX)) : one.h;
    a->dh = backward ? arena_take(b, n, sizeof(floatX)) : NULL;
    if (backward) place_gradients(a, m, N, last, gradients);
}

size_t acts_bytes(const Model *m, int N, bool backward, size_t *gradient_bytes)
{
    Acts a;
    Arena all = {NULL, 0}, gradients = {NULL, 0};
    place(&a, m, N, backward, &all, &gradients);
    *gradient_bytes = gradients.used;
    return all.used;
}

void acts_place(Acts *a, const Model *m, int N, bool backward, void *base, void *gradients)
{
    place(a, m, N, backward, &(Arena){base, 0}, &(Arena){gradients, 0});
}

// ---- parameters of a layer ---------------------------------------------------------------------------------------------

typedef struct {
    const floatX *qkvo, *fc, *proj, *gate;
    float *dqkvo, *dfc, *dproj, *dgate;
    const floatX *value_embed;
    float *dvalue_embed;
    const float *lambda; // attention lambdas (2)
    float *dlambda;
} LayerParams;

static float *scalar(const Model *m, int i) { return (float *)param_data(&m->params, m->scalars) + i; }

static float *scalar_grad(const Model *m, int i)
{
    float *grad = param_grad(&m->params, m->scalars);
    return grad ? grad + i : NULL;
}

static LayerParams layer_params(const Model *m, int i)
{
    const Params *p = &m->params;
    LayerParams l = {0};
    struct { const Param *a; const floatX **w; float **dw; } rows[] = {
        {m->layer[i].qkvo, &l.qkvo, &l.dqkvo},
        {m->layer[i].up, &l.fc, &l.dfc},
        {m->layer[i].down, &l.proj, &l.dproj},
        {m->layer[i].gate, &l.gate, &l.dgate},
        {m->layer[i].value_embed, &l.value_embed, &l.dvalue_embed},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        if (!rows[k].a) continue;
        *rows[k].w = param_weight(p, rows[k].a);
        *rows[k].dw = param_grad(p, rows[k].a);
    }
    l.lambda = scalar(m, m->record->layers[i].v_lambdas);
    l.dlambda = scalar_grad(m, m->record->layers[i].v_lambdas);
    return l;
}

static int window_of(const LayerSpec *layer, const AttentionSetting *at)
{
    return layer->long_window ? at->window_long : at->window_short;
}

static const floatX *stream_of(const Acts *a, int i) { return i < 0 ? a->x0 : a->out[i]; }

// The layer whose output enters layer i; EMBEDDED: there is none.
static int layer_below(const Model *m, int i)
{
    do i--;
    while (i >= 0 && is_empty(m, i));
    return i >= 0 ? i : EMBEDDED;
}

// ---- forward -----------------------------------------------------------------------------------------------------------

static void attention_layer_forward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, Stream s)
{
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, H = c->num_heads, e = d / H;
    const LayerSpec *spec = &m->record->layers[i];
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    qkv_product_forward(s, l->q, l->v, l->rstd_q, l->rstd_k, l->h, w.qkvo, w.value_embed, b->tokens, w.lambda, at->cos, at->sin,
                        N, H, e);
    attention_forward(s, l->yg, l->lse, l->q, l->k, l->v, l->h, w.gate, b->table, b->slots, at->scale, window_of(spec, at), N,
                      H, e);
    matmul_forward(s, w.fc ? a->x : a->out[i], l->yg, w.qkvo + 3 * (int64_t)d * d, a->x, N, d, d, 1);
}

static void mlp_forward(const Model *m, Acts *a, int i, int N, Stream s)
{
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    matmul_relu2_forward(s, l->post, l->h2, w.fc, N, d, F);
    matmul_forward(s, a->out[i], l->post, w.proj, a->x, N, F, d, 1);
}

static void layer_forward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, Stream s)
{
    int N = b->N, d = m->config->model_dim;
    LayerActs *l = &a->layer[i];
    const Mix *mix = &m->mix[i];
    bool attention = m->layer[i].qkvo, mlp = m->layer[i].up;
    mix_rmsnorm_forward(s, a->x, attention ? l->h : l->h2, attention ? l->rstd : l->rstd2, stream_of(a, layer_below(m, i)),
                        stream_of(a, mix->second), mix->third == NONE ? NULL : a->out[mix->third], a->coef + 3 * i, N, d);
    if (attention) attention_layer_forward(m, a, i, b, at, s);
    if (attention && mlp) rmsnorm_forward(s, l->h2, l->rstd2, a->x, N, d);
    if (mlp) mlp_forward(m, a, i, N, s);
}

void model_prepare(Model *m, Acts *a, Stream s)
{
    int count = (m->record->num_layers + 1) * 3;
    coefficients_forward(s, a->coef, scalar(m, 0), m->terms, count);
    if (a->backward) device_zero(s, a->dcoef, (size_t)count * sizeof(float)); // a validation may have used its memory
}

static void stage_needed(const Model *m, int place, int stage, Stream s)
{
    if (place & FIRST_OF_STEP && m->hooks.needed) m->hooks.needed(m->hooks.context, stage, s);
}

static void stage_done(const Model *m, int place, int stage, Stream s)
{
    if (place & LAST_OF_STEP && m->hooks.done) m->hooks.done(m->hooks.context, stage, s);
}

static void forward(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, int place, Stream s)
{
    const Params *p = &m->params;
    int d = m->config->model_dim, L = m->record->num_layers;
    assert(b->N == a->tokens); // q, k and v are planes of one product: their distance is N * d
    stage_needed(m, place, 0, s);
    embed_forward(s, a->x0, a->rstd0, b->tokens, param_weight(p, m->embed), param_weight(p, m->smear_gate),
                  scalar(m, m->record->smear_lambda), b->N, d);
    for (int i = 0; i < L; i++) {
        stage_needed(m, place, 1 + i, s);
        if (!is_empty(m, i)) layer_forward(m, a, i, b, at, s);
    }
    mix_rmsnorm_forward(s, NULL, a->xf, a->rstd_f, stream_of(a, layer_below(m, L)), stream_of(a, m->mix[L].second),
                        m->mix[L].third == NONE ? NULL : a->out[m->mix[L].third], a->coef + 3 * L, b->N, d);
}

void model_forward(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, Stream s) { forward(m, a, b, at, 0, s); }

void model_eval_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, int first, int count, float *loss,
                      Stream s)
{
    int d = m->config->model_dim;
    model_forward(m, a, b, at, s);
    head_loss_eval(s, loss, a->xf + (int64_t)first * d, param_weight(&m->params, m->head), b->targets + first, count, d,
                   config_vocab_padded(m->config));
}

// ---- backward ----------------------------------------------------------------------------------------------------------

// a->dx: gradient of the residual stream, from behind this sublayer to before it.
static void mlp_backward(const Model *m, Acts *a, int i, int N, bool fresh, Stream s)
{
    int d = m->config->model_dim, F = m->config->mlp_dim;
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    matmul_relu2_backward(s, a->dpre, a->dx, w.proj, l->post, N, d, F);
    matmul_weight_grads(s, (WeightGrad[]){{w.dproj, a->dx, l->post, d, F, fresh}, {w.dfc, l->h2, a->dpre, d, F, fresh}}, 2, N);
    matmul_forward(s, a->dh, a->dpre, w.fc, NULL, N, F, d, 1); // dh = dpre c_fc^T
}

// Leaves the gradient of h in a->dh and a->dgate.
static void attention_layer_backward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, bool fresh,
                                     Stream s)
{
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, H = c->num_heads, e = d / H;
    int64_t square = (int64_t)d * d;
    const LayerSpec *spec = &m->record->layers[i];
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    matmul_backward_input(s, a->dyg, a->dx, w.qkvo + 3 * square, N, d, d);
    floatX *dv = a->dk || w.dvalue_embed ? a->dv : NULL; // does anybody read it?
    QkvBackward next = {.dqkv = a->dqkv, .dlambda = w.dlambda, .dq = a->dq, .dk = a->dk, .dv = dv, .q = l->q, .k = l->k,
                        .rstd_q = l->rstd_q, .rstd_k = l->rstd_k, .v_raw = l->v_raw, .value_embed = w.value_embed,
                        .tokens = b->tokens, .lambda = w.lambda, .cos = at->cos, .sin = at->sin};
    attention_backward(s,
                       &(AttentionBackward){.dq = a->dq, .dk = a->dk, .dv = dv, .dgate = a->dgate, .dgate_w = w.dgate,
                                            .dyg = a->dyg, .yg = l->yg, .lse = l->lse, .q = l->q, .k = l->k, .v = l->v,
                                            .h = l->h, .gate_w = w.gate, .next = &next},
                       b->table, b->slots, at->scale, window_of(spec, at), N, H, e);
    if (w.dvalue_embed) embedding_grad(s, w.dvalue_embed, a->dv, w.lambda + 1, &b->rows, N, d);
    qkv_backward(s, &next, N, H, e);
    WeightGrad grads[] = {{w.dqkvo, a->dqkv, l->h, 3 * d, d, fresh}, {w.dqkvo + 3 * square, a->dx, l->yg, d, d, fresh}};
    matmul_weight_grads(s, grads, 2, N);
    matmul_backward_input(s, a->dh, a->dqkv, w.qkvo, N, d, 3 * d);
}

// Of the mix that entered layer i, or of the output's. h: what it was normalised to; dgate NULL where there is no gate.
static void mix_backward(const Model *m, Acts *a, int i, const floatX *h, const float *rstd, const float *dgate, int N, Stream s)
{
    const Mix *mix = &m->mix[i];
    int below = layer_below(m, i), L = m->record->num_layers;
    mix_rmsnorm_backward(s,
                         &(MixBackward){.dx = a->dx,
                                        .dx0 = mix->second == EMBEDDED ? a->dx0 : a->dstream[mix->second],
                                        .accumulate_dx0 = !mix->first_reader,
                                        .dskip = mix->third == NONE ? NULL : a->dstream[mix->third],
                                        .dcoef = a->dcoef + 3 * i, .dx_out = i < L ? a->dx : NULL, .dh = a->dh,
                                        .dx_add = i < L && below != EMBEDDED ? a->dstream[below] : NULL,
                                        .h = h, .rstd = rstd, .x = stream_of(a, below), .x0 = stream_of(a, mix->second),
                                        .skip = mix->third == NONE ? NULL : a->out[mix->third],
                                        .coef = a->coef + 3 * i, .dgate = dgate,
                                        .gate_w = dgate ? param_weight(&m->params, m->layer[i].gate) : NULL,
                                        .heads = m->config->num_heads},
                         N, m->config->model_dim);
}

static void layer_backward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, int place, Stream s)
{
    LayerActs *l = &a->layer[i];
    bool attention = m->layer[i].qkvo, mlp = m->layer[i].up;
    if (mlp) mlp_backward(m, a, i, b->N, place & FIRST_OF_STEP, s);
    if (attention && mlp) rmsnorm_backward(s, a->dx, a->dh, l->h2, l->rstd2, b->N, m->config->model_dim);
    if (attention) attention_layer_backward(m, a, i, b, at, place & FIRST_OF_STEP, s);
    mix_backward(m, a, i, attention ? l->h : l->h2, attention ? l->rstd : l->rstd2, attention ? a->dgate : NULL, b->N, s);
}

void model_train_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, float *loss, int place, Stream s)
{
    const Config *c = m->config;
    const Params *p = &m->params;
    int N = b->N, d = c->model_dim, L = m->record->num_layers, Vp = config_vocab_padded(c), smear = m->record->smear_lambda;
    const floatX *head = param_weight(p, m->head);
    forward(m, a, b, at, place, s);
    stage_needed(m, place, L + 1, s);
    if (m->head_w8 && place & FIRST_OF_STEP) head_quantize(s, m->head_w8, head, Vp, d);
    head_loss_train(s, (HeadMode)c->head, loss, a->dh, param_grad(p, m->head), a->xf, head, m->head_w8, b->targets, N, d, Vp);
    mix_backward(m, a, L, a->xf, a->rstd_f, NULL, N, s);
    stage_done(m, place, L + 1, s);
    for (int i = L - 1; i >= 0; i--) {
        if (!is_empty(m, i)) layer_backward(m, a, i, b, at, place, s);
        stage_done(m, place, 1 + i, s);
    }
    embed_backward(s, a->dh, param_grad(p, m->smear_gate), scalar_grad(m, smear), a->dx, a->dx0, a->x0, a->rstd0, b->tokens,
                   param_weight(p, m->embed), param_weight(p, m->smear_gate), scalar(m, smear), N, d);
    embedding_grad(s, param_grad(p, m->embed), a->dh, NULL, &b->rows, N, d);
    stage_done(m, place, 0, s);
}

void model_finish_gradients(Model *m, Acts *a, Stream s)
{
    coefficients_backward(s, scalar_grad(m, 0), a->dcoef, scalar(m, 0), m->terms, (m->record->num_layers + 1) * 3);
}
