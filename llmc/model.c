#include "llmc/model.h"
#include "llmc/arena.h"
#include <string.h>

void model_describe(Model *m, const Config *c)
{
    memset(m, 0, sizeof *m);
    m->config = c;
    params_describe(&m->params, c);
    for (int i = 0; i < NUM_LAYERS; i++) m->skip_of[i] = layer_role(c, i).skip_weight;
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

static bool block_is_kept(const Config *c, int block) // read again by a later layer
{
    bool kept = block == BACKOUT_LAYER;
    for (int i = 0; i < NUM_LAYERS; i++) kept |= layer_role(c, i).skip_from == block;
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

static void place_layer(LayerActs *l, const Config *c, int layer, size_t N, Arena *b)
{
    size_t n = N * (size_t)c->model_dim;
    if (layer_role(c, layer).attention) {
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
static void place_gradients(Acts *a, const Config *c, size_t N, Arena last_layer, Arena *b)
{
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
    a->dx_backout = a->x;
    for (int i = 0; i < NUM_LAYERS; i++)
        if (block_is_kept(c, i) && i != BACKOUT_LAYER) a->dskip[i] = arena_take(&last_layer, n, sizeof(floatX));
}

static void place(Acts *a, const Config *c, int tokens, bool backward, Arena *b, Arena *gradients)
{
    Arena last = {NULL, 0};
    size_t N = (size_t)tokens, n = N * (size_t)c->model_dim;
    *a = (Acts){.tokens = tokens, .backward = backward};
    a->coef = arena_take(b, (NUM_LAYERS + 1) * 3, sizeof(float));
    a->dcoef = backward ? arena_take(b, (NUM_LAYERS + 1) * 3, sizeof(float)) : NULL;
    a->x0 = arena_take(b, n, sizeof(floatX));
    a->x = arena_take(backward ? gradients : b, n, sizeof(floatX)); // dead when the head runs
    a->rstd0 = arena_take(b, N, sizeof(float));
    a->rstd_f = arena_take(b, N, sizeof(float));
    // Without a backward, blocks whose output nobody reads again share one buffer.
    floatX *shared = backward ? NULL : arena_take(b, n, sizeof(floatX));
    a->block_out[0] = a->x0;
    for (int i = 1; i < NUM_LAYERS; i++)
        a->block_out[i] = backward || block_is_kept(c, i) ? arena_take(b, n, sizeof(floatX)) : shared;
    if (!backward) place_shared_layer(&a->layer[0], c, N, b);
    for (int i = 1; i < NUM_LAYERS; i++) {
        last = *b;
        if (backward) place_layer(&a->layer[i], c, i, N, b);
        else a->layer[i] = a->layer[0];
    }
    a->xf = backward ? arena_take(b, n, sizeof(floatX)) : a->layer[0].h;
    a->dh = backward ? arena_take(b, n, sizeof(floatX)) : NULL;
    if (backward) place_gradients(a, c, N, last, gradients);
}

size_t acts_bytes(const Config *c, int N, bool backward, size_t *gradient_bytes)
{
    Acts a;
    Arena all = {NULL, 0}, gradients = {NULL, 0};
    place(&a, c, N, backward, &all, &gradients);
    *gradient_bytes = gradients.used;
    return all.used;
}

void acts_place(Acts *a, const Config *c, int N, bool backward, void *base, void *gradients)
{
    place(a, c, N, backward, &(Arena){base, 0}, &(Arena){gradients, 0});
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

static LayerParams layer_params(const Model *m, int i)
{
    const Params *p = &m->params;
    LayerRole role = layer_role(m->config, i);
    LayerParams l = {0};
    char name[48];
    struct { const char *format; const floatX **w; float **dw; bool there; } rows[] = {
        {"blocks.%d.attn.qkvo_w", &l.qkvo, &l.dqkvo, role.attention},
        {"blocks.%d.mlp.c_fc", &l.fc, &l.dfc, role.mlp},
        {"blocks.%d.mlp.c_proj", &l.proj, &l.dproj, role.mlp},
        {"blocks.%d.attn.attn_gate.weight", &l.gate, &l.dgate, role.attention},
    };
    for (int k = 0; k < 4; k++) {
        if (!rows[k].there) continue;
        snprintf(name, sizeof name, rows[k].format, i);
        const Param *a = params_find(p, name);
        bool gate = a->group == GROUP_GATE;
        *rows[k].w = (gate ? p->gates : p->matrices_x) + a->offset;
        *rows[k].dw = (gate ? p->gates_grad : p->matrices_grad) + a->offset;
    }
    if (role.value_embed >= 0) {
        l.value_embed = p->tables + (1 + role.value_embed) * p->table_size;
        l.dvalue_embed = p->tables_grad + (1 + role.value_embed) * p->table_size;
    }
    l.lambda = p->scalars + SCALAR_ATTENTION + 2 * i;
    l.dlambda = p->scalars_grad + SCALAR_ATTENTION + 2 * i;
    return l;
}

static const floatX *smear_gate(const Model *m) { return m->params.gates + params_find(&m->params, "smear_gate.weight")->offset; }

static int window_of(const LayerRole *role, const AttentionSetting *at)
{
    return role->long_window ? at->window_long : at->window_short;
}

// ---- forward -----------------------------------------------------------------------------------------------------------

static void attention_layer_forward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, Stream s)
{
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, H = c->num_heads, e = d / H;
    LayerRole role = layer_role(c, i);
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    qkv_product_forward(s, l->q, l->v, l->rstd_q, l->rstd_k, l->h, w.qkvo, w.value_embed, b->tokens, w.lambda, at->cos, at->sin,
                        N, H, e);
    attention_forward(s, l->yg, l->lse, l->q, l->k, l->v, l->h, w.gate, b->table, b->slots, at->scale, window_of(&role, at), N,
                      H, e);
    matmul_forward(s, a->x, l->yg, w.qkvo + 3 * (int64_t)d * d, a->x, N, d, d, 1);
}

static void layer_forward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, Stream s)
{
    const Config *c = m->config;
    int N = b->N, d = c->model_dim, F = c->mlp_dim;
    LayerRole role = layer_role(c, i);
    LayerParams w = layer_params(m, i);
    LayerActs *l = &a->layer[i];
    const floatX *skip = role.skip_from >= 0 ? a->block_out[role.skip_from] : NULL;
    floatX *h = role.attention ? l->h : l->h2;
    float *rstd = role.attention ? l->rstd : l->rstd2;
    mix_rmsnorm_forward(s, a->x, h, rstd, a->block_out[i - 1], a->x0, skip, a->coef + 3 * i, N, d);
    if (role.attention) {
        attention_layer_forward(m, a, i, b, at, s);
        rmsnorm_forward(s, l->h2, l->rstd2, a->x, N, d);
    }
    matmul_relu2_forward(s, l->post, l->h2, w.fc, N, d, F);
    matmul_forward(s, a->block_out[i], l->post, w.proj, a->x, N, F, d, 1);
}

void model_prepare(Model *m, Acts *a, Stream s)
{
    const Params *p = &m->params;
    coefficients_forward(s, a->coef, p->scalars, m->skip_of, NUM_LAYERS);
    if (a->backward) device_zero(s, a->dcoef, (NUM_LAYERS + 1) * 3 * sizeof(float)); // a validation may have used its memory
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
    int d = m->config->model_dim;
    assert(b->N == a->tokens); // q, k and v are planes of one product: their distance is N * d
    stage_needed(m, place, 0, s);
    embed_forward(s, a->x0, a->rstd0, b->tokens, p->tables, smear_gate(m), p->scalars + SCALAR_SMEAR, b->N, d);
    for (int i = 1; i < NUM_LAYERS; i++) {
        stage_needed(m, place, i, s);
        layer_forward(m, a, i, b, at, s);
    }
    mix_rmsnorm_forward(s, NULL, a->xf, a->rstd_f, a->block_out[NUM_LAYERS - 1], a->block_out[BACKOUT_LAYER], NULL,
                        a->coef + 3 * NUM_LAYERS, b->N, d);
}

void model_forward(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, Stream s) { forward(m, a, b, at, 0, s); }

void model_eval_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, int first, int count, float *loss,
                      Stream s)
{
    const Params *p = &m->params;
    int d = m->config->model_dim;
    model_forward(m, a, b, at, s);
    head_loss_eval(s, loss, a->xf + (int64_t)first * d, p->tables + (NUM_TABLES - 1) * p->table_size, b->targets + first, count, d,
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
    LayerRole role = layer_role(c, i);
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
                       b->table, b->slots, at->scale, window_of(&role, at), N, H, e);
    if (w.dvalue_embed) embedding_grad(s, w.dvalue_embed, a->dv, w.lambda + 1, &b->rows, N, d);
    qkv_backward(s, &next, N, H, e);
    WeightGrad grads[] = {{w.dqkvo, a->dqkv, l->h, 3 * d, d, fresh}, {w.dqkvo + 3 * square, a->dx, l->yg, d, d, fresh}};
    matmul_weight_grads(s, grads, 2, N);
    matmul_backward_input(s, a->dh, a->dqkv, w.qkvo, N, d, 3 * d);
}

static void layer_backward(const Model *m, Acts *a, int i, const DeviceBatch *b, const AttentionSetting *at, int place, Stream s)
{
    const Config *c = m->config;
    int N = b->N, d = c->model_dim;
    LayerRole role = layer_role(c, i);
    LayerActs *l = &a->layer[i];
    mlp_backward(m, a, i, N, place & FIRST_OF_STEP, s);
    if (role.attention) {
        rmsnorm_backward(s, a->dx, a->dh, l->h2, l->rstd2, N, d);
        attention_layer_backward(m, a, i, b, at, place & FIRST_OF_STEP, s);
    }
    int below = i - 1;
    mix_rmsnorm_backward(s,
                         &(MixBackward){.dx = a->dx, .dx0 = a->dx0, .accumulate_dx0 = i != NUM_LAYERS - 1,
                                        .dskip = role.skip_from >= 0 ? a->dskip[role.skip_from] : NULL,
                                        .dcoef = a->dcoef + 3 * i, .dx_out = a->dx, .dh = a->dh,
                                        .dx_add = below == BACKOUT_LAYER ? a->dx_backout : a->dskip[below],
                                        .h = role.attention ? l->h : l->h2, .rstd = role.attention ? l->rstd : l->rstd2,
                                        .x = a->block_out[below], .x0 = a->x0,
                                        .skip = role.skip_from >= 0 ? a->block_out[role.skip_from] : NULL,
                                        .coef = a->coef + 3 * i, .dgate = role.attention ? a->dgate : NULL,
                                        .gate_w = layer_params(m, i).gate, .heads = c->num_heads},
                         N, d);
}

void model_train_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, float *loss, int place, Stream s)
{
    const Config *c = m->config;
    const Params *p = &m->params;
    int N = b->N, d = c->model_dim;
    int64_t head = (NUM_TABLES - 1) * p->table_size;
    forward(m, a, b, at, place, s);
    stage_needed(m, place, HEAD_STAGE, s);
    if (m->head_w8 && place & FIRST_OF_STEP) head_quantize(s, m->head_w8, p->tables + head, config_vocab_padded(c), d);
    head_loss_train(s, (HeadMode)c->head, loss, a->dh, p->tables_grad + head, a->xf, p->tables + head, m->head_w8, b->targets, N,
                    d, config_vocab_padded(c));
    mix_rmsnorm_backward(s,
                         &(MixBackward){.dx = a->dx, .dx0 = a->dx_backout, .dcoef = a->dcoef + 3 * NUM_LAYERS, .dh = a->dh,
                                        .h = a->xf, .rstd = a->rstd_f, .x = a->block_out[NUM_LAYERS - 1],
                                        .x0 = a->block_out[BACKOUT_LAYER], .coef = a->coef + 3 * NUM_LAYERS},
                         N, d);
    stage_done(m, place, HEAD_STAGE, s);
    for (int i = NUM_LAYERS - 1; i > 0; i--) {
        layer_backward(m, a, i, b, at, place, s);
        stage_done(m, place, i, s);
    }
    const Param *gate = params_find(p, "smear_gate.weight");
    embed_backward(s, a->dh, p->gates_grad + gate->offset, p->scalars_grad + SCALAR_SMEAR, a->dx, a->dx0, a->x0, a->rstd0,
                   b->tokens, p->tables, p->gates + gate->offset, p->scalars + SCALAR_SMEAR, N, d);
    embedding_grad(s, p->tables_grad, a->dh, NULL, &b->rows, N, d);
    stage_done(m, place, 0, s);
}

void model_finish_gradients(Model *m, Acts *a, Stream s)
{
    coefficients_backward(s, m->params.scalars_grad, a->dcoef, m->params.scalars, m->skip_of, NUM_LAYERS);
}
