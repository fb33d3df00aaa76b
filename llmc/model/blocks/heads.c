// Attention of the records of 2026: norm, rope, values, masked softmax, DC, XSA and gate, each by its op.
#include "llmc/model/blocks/blocks.h"
#include "llmc/model/cache.h"

int heads_width(const Model *m)
{
    return 2 * m->config->num_heads * record_key_width(m->config) + m->config->model_dim;
}

static bool has_output_op(const HeadsSpec *h) { return h->xsa || h->gate; }
static bool has_value_gate(const LayerSpec *l) { return l->value_embed && !l->heads.value_column; }
// Channels of h that a gate reads, and as many of the value embedding's row.
static int gate_inputs(const Model *m, int i) { return (int)m->layer[i].value_gate->cols / 2; }

// ---- memory -----------------------------------------------------------------------------------------------

static void plan_backward(HeadsActs *l, const Acts *a, const Model *m, int i, PlanArena *b)
{
    const LayerSpec *spec = &m->record->layers[i];
    int H = m->config->num_heads, qk = record_key_width(m->config), e = m->config->model_dim / H,
        pairs = spec->heads.paired ? 2 : 1;
    size_t N = (size_t)a->tokens, n = N * (size_t)m->config->model_dim, nk = N * (size_t)(H * qk);
    l->dy = plan_take(b, n, sizeof(floatX));
    l->dq = plan_take(b, nk, sizeof(floatX));
    l->dk = plan_take(b, nk, sizeof(floatX));
    l->dv = plan_take(b, n, sizeof(floatX));
    l->dqkv = plan_take(b, N * (size_t)heads_width(m), sizeof(floatX));
    l->scratch = plan_take(b, sdpa_scratch_bytes((int)N * pairs, H / pairs, qk, e), 1);
    if (m->config->qkv == QKV_FP8) {
        l->h8 = plan_take(b, n, 1);
        l->h8t = plan_take(b, n, 1);
        l->dqkv8 = plan_take(b, N * (size_t)heads_width(m), 1);
        l->dqkv8t = plan_take(b, N * (size_t)heads_width(m), 1);
    }
    if (spec->heads.xsa)
        l->dv_output = plan_take(b, n, sizeof(floatX));
    if (has_output_op(&spec->heads) && l->mixed == l->y)
        l->delta = plan_take(b, N * (size_t)H, sizeof(float));
    if (has_value_gate(spec)) {
        l->leads = gate_inputs(m, i);
        l->dh_lead = plan_take(b, N * (size_t)l->leads, sizeof(float));
        l->du_lead = plan_take(b, N * (size_t)l->leads, sizeof(float));
    }
    if (!spec->heads.dc_weights)
        return;
    l->dq_dc = plan_take(b, nk, sizeof(floatX));
    l->dk_dc = plan_take(b, nk, sizeof(floatX));
    l->dv_dc = plan_take(b, n, sizeof(floatX));
    l->dc_scratch = plan_take(b, dc_scratch_bytes((int)N, H), 1);
}

static void plan(Acts *a, const Model *m, int i, PlanArena *b)
{
    HeadsActs *l = &a->heads[i];
    const LayerSpec *spec = &m->record->layers[i];
    size_t H = (size_t)m->config->num_heads, N = (size_t)a->tokens,
           wide = H * (size_t)record_key_width(m->config), n = N * (size_t)m->config->model_dim;
    l->q = plan_take(b, 2 * N * wide + n, sizeof(floatX));
    l->v = l->q + 2 * N * wide;
    l->k = spec->heads.offset ? plan_take(b, (N + 1) * wide, sizeof(floatX)) : l->q + N * wide;
    l->rstd_q = plan_take(b, N * H, sizeof(float));
    l->rstd_k = plan_take(b, N * H, sizeof(float));
    l->lse = plan_take(b, N * H, sizeof(float));
    l->y = l->mixed = plan_take(b, n, sizeof(floatX));
    if (has_value_gate(spec))
        l->gate = plan_take(b, N * H, sizeof(float));
    if (spec->heads.dc_weights) {
        l->dc_lse = plan_take(b, N * H, sizeof(float));
        l->mixed = a->backward ? plan_take(b, n, sizeof(floatX)) : l->y;
    }
    l->out = a->backward && has_output_op(&spec->heads) ? plan_take(b, n, sizeof(floatX)) : l->mixed;
    if (a->backward)
        plan_backward(l, a, m, i, b);
}

// ---- arguments of the ops, for both directions ------------------------------------------------------------

// The layer's weights: rows of Wq, Wk, Wv, Wo.
typedef struct {
    const floatX *qkv, *o;
    float *dqkv, *do_;
    EffectiveWeight scaled_qkv, scaled_o;
} HeadsWeights;

static const Node *node_of(const Model *m, int i) { return network_block(&m->network, NODE_ATTENTION, i); }

static HeadsWeights weights_of(const Pass *p, int i)
{
    const Model *m = p->m;
    const Param *w = m->layer[i].qkvo;
    int64_t behind = (int64_t)heads_width(m) * m->config->model_dim;
    const floatX *qkv = param_weight(&m->params, w);
    float *dqkv = param_grad(&m->params, w);
    const floatX *o = part_x(qkv, behind);
    return (HeadsWeights){.qkv = qkv,
                          .o = o,
                          .dqkv = dqkv,
                          .do_ = part(dqkv, behind),
                          .scaled_qkv = effective_weight(p, i, SCALED_QKV, qkv),
                          .scaled_o = effective_weight(p, i, SCALED_O, o)};
}

static ValueMix values_of(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    const LayerSpec *spec = &m->record->layers[i];
    int extra = node_of(m, i)->extra, column = spec->heads.value_column;
    ValueMix v = {.tokens = p->b->tokens, .extra = extra == NONE ? NULL : p->a->node[extra].x};
    if (!spec->value_embed)
        return v;
    v.table = param_weight(&m->params, m->layer[i].value_embed);
    if (has_value_gate(spec)) {
        v.gate_w = param_weight(&m->params, m->layer[i].value_gate);
        v.gate = p->a->heads[i].gate;
        v.h = io->h;
        v.gate_inputs = gate_inputs(m, i);
        return v;
    }
    v.factor = column_of(p, column);
    v.stride = column_stride(p, column);
    v.groups = spec->heads.value_groups;
    return v;
}

static HeadsForward heads_of(const Pass *p, int i, const BlockPort *io)
{
    const HeadsSpec *spec = &p->m->record->layers[i].heads;
    const AttentionSetting *at = p->at;
    const HeadsActs *l = &p->a->heads[i];
    return (HeadsForward){.qk = record_key_width(p->m->config),
                          .q = l->q,
                          .k = l->k,
                          .v = l->v,
                          .rstd_q = l->rstd_q,
                          .rstd_k = l->rstd_k,
                          .cos = spec->paired ? at->cos_paired : at->cos,
                          .sin = spec->paired ? at->sin_paired : at->sin,
                          .paired = spec->paired,
                          .offset = spec->offset && !p->b->texts.cache, // else the cache moves keys
                          .value = values_of(p, i, io)};
}

static SdpaForward sdpa_of(const Pass *p, int i)
{
    const LayerSpec *spec = &p->m->record->layers[i];
    const HeadsActs *l = &p->a->heads[i];
    bool paired = spec->heads.paired;
    return (SdpaForward){.y = l->y,
                         .lse = l->lse,
                         .q = l->q,
                         .k = l->k,
                         .v = l->v,
                         .qk = record_key_width(p->m->config),
                         .table = paired ? p->b->table_paired : p->b->table,
                         .slots = paired ? p->b->slots_paired : p->b->slots,
                         .window = spec->long_window ? p->at->window_long : p->at->window_short,
                         .scale = p->at->scale};
}

static DcForward dc_of(const Pass *p, int i)
{
    const HeadsSpec *spec = &p->m->record->layers[i].heads;
    const HeadsActs *l = &p->a->heads[i];
    return (DcForward){.y = l->mixed,
                       .lse = l->dc_lse,
                       .qk = record_key_width(p->m->config),
                       .q = l->q,
                       .k = l->k,
                       .v = l->v,
                       .w1 = column_of(p, spec->dc_weights),
                       .w2 = column_of(p, spec->dc_factors),
                       .stride = column_stride(p, spec->dc_weights),
                       .table = p->b->table,
                       .slots = p->b->slots,
                       .scale = p->at->scale,
                       .keys = p->m->record->dc_keys};
}

static HeadsOutput output_of(const Pass *p, int i)
{
    const HeadsSpec *spec = &p->m->record->layers[i].heads;
    const HeadsActs *l = &p->a->heads[i];
    return (HeadsOutput){.out = l->out,
                         .y = l->mixed,
                         .v = l->v,
                         .alpha = column_of(p, spec->xsa),
                         .gate = column_of(p, spec->gate),
                         .alpha_stride = column_stride(p, spec->xsa),
                         .gate_stride = column_stride(p, spec->gate)};
}

// ---- q, k and v in FP8 ------------------------------------------------------------------------------------

// Codes of the weights and all scales, (1) each.
typedef struct {
    uint8_t *w, *wt; // (rows, d), (d, rows)
    float *scale_w, *scale_h, *scale_g;
} QkvLayer;

static QkvLayer qkv_layer(const Model *m, int i)
{
    const QkvCodes *c = &m->qkv;
    int layers = m->record->num_layers;
    int64_t elements = (int64_t)heads_width(m) * m->config->model_dim;
    if (!c->weights) // while memory is planned
        return (QkvLayer){0};
    uint8_t *w = c->weights + 2 * i * elements;
    return (QkvLayer){w, w + elements, c->scales + i, c->scales + layers, c->scales + layers + 1};
}

static void quantize_qkv(const Pass *p, const HeadsWeights *w, const QkvLayer *q)
{
    int rows = heads_width(p->m), d = p->m->config->model_dim;
    amax_accumulate(p->s, p->m->qkv.amax, w->qkv, (int64_t)rows * d);
    scale_from_amax(p->s, q->scale_w, p->m->qkv.amax, 1.0f / E4M3_LARGEST);
    quantize_codes(p->s, &(Codes){q->w, q->wt, q->scale_w, NULL}, w->qkv, rows, d);
}

// Codes of the weights and of the input.
static void quantize_operands(const Pass *p, int i, const HeadsWeights *w, const BlockPort *io)
{
    const HeadsActs *l = &p->a->heads[i];
    QkvLayer q = qkv_layer(p->m, i);
    Codes h = {l->h8, l->h8t, q.scale_h, NULL};
    if (pass_runs(p->a, NULL, 0) && p->place & FIRST_OF_STEP)
        quantize_qkv(p, w, &q);
    if (pass_runs(p->a, USES(l->h8, l->h8t, io->h)))
        quantize_codes(p->s, &h, io->h, p->b->N, p->m->config->model_dim);
}

// From the gradient of q, k and v to those of the weights and of h.
static void qkv_backward_fp8(const Pass *p, int i, const HeadsWeights *w, const BlockPort *io)
{
    const HeadsActs *l = &p->a->heads[i];
    int N = p->b->N, d = p->m->config->model_dim, rows = heads_width(p->m);
    QkvLayer q = qkv_layer(p->m, i);
    Codes g = {l->dqkv8, l->dqkv8t, q.scale_g, NULL};
    Fp8WeightGrad grad = {w->dqkv,   l->dqkv8t, l->h8t, q.scale_g,
                          q.scale_h, rows,      d,      p->place & FIRST_OF_STEP};
    Fp8Product input = {l->dqkv8, q.wt, q.scale_g, q.scale_w, N, rows, d, w->scaled_qkv.alpha};
    if (pass_runs(p->a, USES(l->dqkv8, l->dqkv8t, l->dqkv)))
        quantize_codes(p->s, &g, l->dqkv, N, rows);
    if (pass_runs(p->a, USES(l->dqkv8t, l->h8t)))
        matmul_fp8_weight_grads(p->products, &grad, 1, N);
    if (pass_runs(p->a, USES(io->dh, l->dqkv8)))
        matmul_fp8(p->products, io->dh, &input, NULL);
}

// ---- forward ----------------------------------------------------------------------------------------------

static bool in_fp8(const Pass *p) { return p->a->backward && p->m->config->qkv == QKV_FP8; }

// q, k and v as attention takes them.
static void prepare_heads(const Pass *p, int i, const HeadsWeights *w, const BlockPort *io)
{
    const HeadsActs *l = &p->a->heads[i];
    int N = p->b->N, H = p->m->config->num_heads, e = p->m->config->model_dim / H;
    QkvHeadsForward qkv = {.heads = heads_of(p, i, io), .raw = l->q, .alpha = w->scaled_qkv.alpha};
    const ValueMix *v = &qkv.heads.value;
    if (in_fp8(p)) {
        QkvLayer codes = qkv_layer(p->m, i);
        quantize_operands(p, i, w, io);
        qkv.x8 = l->h8;
        qkv.w8 = codes.w;
        qkv.scale_x = codes.scale_h;
        qkv.scale_w = codes.scale_w;
    } else {
        qkv.x = io->h;
        qkv.w = w->scaled_qkv.w;
    }
    if (!pass_runs(p->a,
                   USES(l->q, l->k, l->rstd_q, l->rstd_k, qkv.x, qkv.x8, v->extra, v->gate, v->h, v->factor)))
        return;
    if (p->b->texts.cache) // a row a text: products of so few rows are cuBLASLt's
        qkv_heads_apart(p->products, &qkv, N, H, e);
    else
        qkv_heads_forward(p->products, &qkv, N, H, e);
}

// Attention and DC over whole documents, or over a cache.
static void run_sdpa(const Pass *p, int i)
{
    int pairs = p->m->record->layers[i].heads.paired ? 2 : 1, N = p->b->N * pairs,
        H = p->m->config->num_heads / pairs, e = p->m->config->model_dim / p->m->config->num_heads;
    SdpaForward sdpa = sdpa_of(p, i);
    if (!p->b->texts.cache) {
        sdpa_forward(p->s, &sdpa, N, H, e);
        return;
    }
    TextCache cache = cache_of(p->m, &p->b->texts, i);
    sdpa_decode(p->s, &sdpa, &cache, N, H, e);
}

static void run_dc(const Pass *p, int i, const DcForward *dc)
{
    int N = p->b->N, H = p->m->config->num_heads, e = p->m->config->model_dim / H;
    if (!p->b->texts.cache) {
        dc_forward(p->s, dc, N, H, e);
        return;
    }
    TextCache cache = cache_of(p->m, &p->b->texts, i);
    dc_decode(p->s, dc, &cache, N, H, e);
}

static void attend(const Pass *p, int i)
{
    Acts *a = p->a;
    const HeadsActs *l = &a->heads[i];
    size_t n = (size_t)p->b->N * (size_t)p->m->config->model_dim;
    if (pass_runs(a, USES(l->y, l->lse, l->q, l->k)))
        run_sdpa(p, i);
    if (!p->m->record->layers[i].heads.dc_weights)
        return;
    DcForward dc = dc_of(p, i);
    if (l->mixed != l->y && pass_runs(a, USES(l->mixed, l->y)))
        copy_on_device(p->s, l->mixed, l->y, n * sizeof(floatX));
    if (pass_runs(a, USES(l->mixed, l->dc_lse, l->q, l->k, dc.w1)))
        run_dc(p, i, &dc);
}

static void forward(const Pass *p, int i, const BlockPort *io)
{
    Acts *a = p->a;
    const HeadsActs *l = &a->heads[i];
    int N = p->b->N, H = p->m->config->num_heads, d = p->m->config->model_dim, e = d / H;
    HeadsWeights w = weights_of(p, i);
    HeadsOutput output = output_of(p, i);
    EffectiveWeight o = w.scaled_o;
    scale_weight(p, i, SCALED_QKV, w.qkv);
    scale_weight(p, i, SCALED_O, w.o);
    prepare_heads(p, i, &w, io);
    attend(p, i);
    if (has_output_op(&p->m->record->layers[i].heads) &&
        pass_runs(a, USES(l->out, l->mixed, l->v, output.alpha, output.gate)))
        heads_output_forward(p->s, &output, N, H, e);
    if (pass_runs(a, USES(io->out, l->out)))
        matmul_forward(p->products, &(Product){io->out, l->out, o.w, io->x, o.alpha, N, d, d, 1});
}

// ---- backward ---------------------------------------------------------------------------------------------

// From the gradient l->dy of l->out to that of l->y, and what DC gives to those of q, k and v.
static void output_backward(const Pass *p, int i)
{
    Acts *a = p->a;
    const HeadsSpec *spec = &p->m->record->layers[i].heads;
    const HeadsActs *l = &a->heads[i];
    int N = p->b->N, H = p->m->config->num_heads, e = p->m->config->model_dim / H;
    HeadsOutput output = output_of(p, i);
    float *dalpha = column_grad(p, spec->xsa), *dgate = column_grad(p, spec->gate),
          *dw1 = column_grad(p, spec->dc_weights), *dw2 = column_grad(p, spec->dc_factors);
    if (has_output_op(spec) && pass_runs(a, USES(l->dy, l->dv_output, dalpha, dgate, l->delta, l->mixed, l->v,
                                                 output.alpha, output.gate)))
        heads_output_backward(p->s,
                              &(HeadsOutputBackward){&output, l->dy, l->dv_output, dalpha, dgate, l->dy,
                                                     l->delta},
                              N, H, e);
    DcForward dc = dc_of(p, i);
    if (spec->dc_weights && pass_runs(a, USES(l->dq_dc, l->dk_dc, l->dv_dc, dw1, dw2, l->dy, l->dc_scratch,
                                              l->dc_lse, l->q, l->k, dc.w1)))
        dc_backward(p->s, &(DcBackward){&dc, l->dq_dc, l->dk_dc, l->dv_dc, dw1, dw2, l->dy, l->dc_scratch}, N,
                    H, e);
}

// Gradient of the rows of the value embedding.
static void value_rows_backward(const Pass *p, int i, const HeadsForward *heads)
{
    const Model *m = p->m;
    const HeadsActs *l = &p->a->heads[i];
    const ValueMix *v = &heads->value;
    int H = m->config->num_heads, d = m->config->model_dim, wide = heads_width(m);
    bool gate = has_value_gate(&m->record->layers[i]);
    RowReader row = {.g = l->dqkv + wide - d,
                     .pitch = wide,
                     .factor = gate ? v->gate : v->factor,
                     .stride = gate ? H : v->stride,
                     .groups = gate ? H : v->groups,
                     .lead = l->du_lead,
                     .leads = l->leads};
    if (pass_runs(p->a, USES(l->dqkv, row.factor, l->du_lead)))
        table_grad(p->s, param_grad(&m->params, m->layer[i].value_embed), &row, 1, &p->b->rows, p->b->N, d,
                   d);
}

// Gradients of the weights and of h.
static void products_backward(const Pass *p, int i, const HeadsWeights *w, const BlockPort *io)
{
    const HeadsActs *l = &p->a->heads[i];
    bool fresh = p->place & FIRST_OF_STEP, fp8 = p->m->config->qkv == QKV_FP8;
    int N = p->b->N, d = p->m->config->model_dim, wide = heads_width(p->m);
    WeightGrad grads[] = {{w->dqkv, l->dqkv, io->h, wide, d, fresh}, {w->do_, io->dout, l->out, d, d, fresh}};
    if (fp8)
        qkv_backward_fp8(p, i, w, io);
    if (fp8 && pass_runs(p->a, USES(io->dout, l->out)))
        matmul_weight_grads(p->products, grads + 1, 1, N);
    if (!fp8 && pass_runs(p->a, USES(l->dqkv, io->h, io->dout, l->out)))
        matmul_weight_grads(p->products, grads, 2, N);
    if (!fp8 && pass_runs(p->a, USES(io->dh, l->dqkv)))
        matmul_backward_input(p->products, &(InputGrad){io->dh, l->dqkv, w->scaled_qkv.w, N, d, wide, NULL});
}

static void backward(const Pass *p, int i, const BlockPort *io)
{
    const Model *m = p->m;
    Acts *a = p->a;
    const LayerSpec *spec = &m->record->layers[i];
    const HeadsActs *l = &a->heads[i];
    int N = p->b->N, H = m->config->num_heads, d = m->config->model_dim, e = d / H;
    HeadsWeights w = weights_of(p, i);
    HeadsForward heads = heads_of(p, i, io);
    if (pass_runs(a, USES(l->dy, io->dout)))
        matmul_backward_input(p->products, &(InputGrad){l->dy, io->dout, w.scaled_o.w, N, d, d, NULL});
    output_backward(p, i);
    SdpaForward sdpa = sdpa_of(p, i);
    HeadsBackward back = {.forward = &heads,
                          .dqkv = l->dqkv,
                          .dq = l->dq,
                          .dk = l->dk,
                          .dv = l->dv,
                          .dq_add = l->dq_dc,
                          .dk_add = l->dk_dc,
                          .dv_add = spec->heads.xsa ? l->dv_output : l->dv_dc,
                          .dgate_w =
                              has_value_gate(spec) ? param_grad(&m->params, m->layer[i].value_gate) : NULL,
                          .dh_lead = l->dh_lead,
                          .du_lead = l->du_lead,
                          .dfactor = spec->value_embed ? column_grad(p, spec->heads.value_column) : NULL};
    SdpaHeadsBackward both = {{&sdpa, l->dq, l->dk, l->dv, l->dy, l->scratch, l->delta}, back};
    if (pass_runs(a, USES(l->dqkv, l->dq, l->dk, l->dv, l->dy, l->delta, l->scratch, l->y, l->lse,
                          back.dq_add, back.dk_add, back.dv_add, l->dh_lead, l->du_lead, back.dfactor, l->q,
                          l->k, l->rstd_q, l->rstd_k, heads.value.gate, heads.value.h, heads.value.factor)))
        sdpa_heads_backward(p->s, &both, N, H, e);
    if (spec->value_embed)
        value_rows_backward(p, i, &heads);
    products_backward(p, i, &w, io);
    factor_backward(p, i, SCALED_QKV, w.dqkv, w.qkv);
    factor_backward(p, i, SCALED_O, w.do_, w.o);
}

const Block heads_block = {plan, forward, backward};
