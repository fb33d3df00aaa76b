// The nodes of a network, forward and backward. The gradient of a stream is the sum over those that read it:
// sums, generators, and the blocks that read its norm. When backward is at a node, all of them are done.
#include "llmc/model/blocks/blocks.h"

enum { MAX_READERS = 4 * MAX_LAYERS };

// ---- columns of generators --------------------------------------------------------------------------------

static const NodeActs *generator_of(const Pass *p, int column)
{
    return &p->a->node[p->m->network.generator[column_generator(column)]];
}

const float *column_of(const Pass *p, int column)
{
    return column ? generator_of(p, column)->columns + column_place(column) : NULL;
}

float *column_grad(const Pass *p, int column)
{
    return column ? generator_of(p, column)->dcolumns + column_place(column) : NULL;
}

int column_stride(const Pass *p, int column)
{
    return column ? p->m->record->generators[column_generator(column)].columns : 0;
}

static StreamFactor factor_of(const Pass *p, const NodeTerm *t)
{
    return (StreamFactor){.plus = t->plus,
                          .scalar = t->coefficient == NONE ? NULL : p->a->coef + t->coefficient,
                          .column = column_of(p, t->column),
                          .stride = column_stride(p, t->column)};
}

// ---- memory -----------------------------------------------------------------------------------------------

static const Block *block_of(const Node *n) { return n->kind == NODE_MLP ? &mlp_block : &heads_block; }

static void take_generator(NodeActs *x, const Model *m, const Node *n, const Acts *a, PlanArena *b)
{
    size_t N = (size_t)a->tokens, K = (size_t)m->record->generators[n->layer].columns,
           width = (size_t)m->generator[n->layer].in->rows;
    x->columns = plan_take(b, N * K, sizeof(float));
    x->pre = plan_take(b, N * width, sizeof(floatX));
    if (!a->backward)
        return;
    x->dcolumns = plan_take(b, N * K, sizeof(float));
    x->dpre = plan_take(b, N * width, sizeof(floatX));
    x->dh = plan_take(b, N * (size_t)m->config->model_dim, sizeof(floatX));
}

static void take_block(NodeActs *x, const Model *m, const Node *n, Acts *a, PlanArena *b)
{
    int d = m->config->model_dim;
    block_of(n)->plan(a, m, n->layer, b);
    if (!a->backward)
        return;
    x->dh = plan_take(b, (size_t)a->tokens * (size_t)d, sizeof(floatX));
    if (n->extra == NONE)
        return;
    // What is added to v has v's gradient, which lies behind those of q and k.
    NodeActs *extra = &a->node[n->extra];
    extra->dx_pitch = heads_width(m);
    extra->dx = a->heads[n->layer].dqkv + extra->dx_pitch - d;
}

static void take_node(Acts *a, const Model *m, int k, PlanArena *b)
{
    const Node *n = &m->network.node[k];
    NodeActs *x = &a->node[k];
    size_t N = (size_t)a->tokens, stream = N * (size_t)m->config->model_dim;
    if (n->kind == NODE_GENERATOR) {
        take_generator(x, m, n, a, b);
        return;
    }
    x->x = n->kind == NODE_EMBED ? a->x0 : plan_take(b, stream, sizeof(floatX));
    if (n->normalised) {
        x->h = plan_take(b, stream, sizeof(floatX));
        x->rstd = plan_take(b, N, sizeof(float));
    }
    if (a->backward && !n->into_v && n->sum == NONE)
        x->dx = plan_take(b, stream, sizeof(floatX));
    for (int i = 0; i < n->terms; i++) {
        int term = n->term[i].node;
        if (term != NONE && m->network.node[term].sum == k)
            a->node[term].dx = x->dx;
    }
    if (n->kind == NODE_ATTENTION || n->kind == NODE_MLP)
        take_block(x, m, n, a, b);
}

void network_plan(Acts *a, const Model *m, PlanArena *b)
{
    for (int k = 0; k < m->network.count; k++)
        take_node(a, m, k, b);
    a->xf = a->node[m->network.output].h;
}

// ---- forward ----------------------------------------------------------------------------------------------

static BlockPort port_of(const Pass *p, int k)
{
    Acts *a = p->a;
    const NodeActs *x = &a->node[k];
    return (BlockPort){.h = a->node[p->m->network.node[k].input].h, .out = x->x, .dout = x->dx, .dh = x->dh};
}

static const floatX *table_weight(const Model *m, int table)
{
    return param_weight(&m->params, params_of(&m->params, ROLE_VALUE_EMBED, table));
}

static void sum_forward(const Pass *p, int k)
{
    Acts *a = p->a;
    const Node *n = &p->m->network.node[k];
    const NodeActs *x = &a->node[k];
    StreamMix mix = {.y = n->kept ? x->x : NULL,
                     .h = x->h,
                     .rstd = x->rstd,
                     .amax = n->into_mlp ? mlp_input_amax(p) : NULL,
                     .terms = n->terms};
    const void *uses[3 + 2 * MIX_STREAMS] = {mix.y, mix.h, mix.rstd};
    for (int i = 0; i < n->terms; i++) {
        const NodeTerm *t = &n->term[i];
        StreamTerm *to = &mix.term[i];
        *to = t->node == NONE ? (StreamTerm){table_weight(p->m, t->table), p->b->tokens, factor_of(p, t)}
                              : (StreamTerm){a->node[t->node].x, NULL, factor_of(p, t)};
        uses[3 + 2 * i] = to->x;
        uses[4 + 2 * i] = to->c.column;
    }
    if (pass_runs(a, uses, 3 + 2 * n->terms))
        stream_mix(p->s, &mix, p->b->N, p->m->config->model_dim);
}

static Generator generator_weights(const Pass *p, const Node *n)
{
    const Model *m = p->m;
    int g = n->layer;
    return (Generator){.w1 = param_weight(&m->params, m->generator[g].in),
                       .w2 = param_weight(&m->params, m->generator[g].out),
                       .b2 = param_weight(&m->params, m->generator[g].bias),
                       .scale = p->a->coef + n->scale,
                       .width = (int)m->generator[g].in->rows,
                       .K = m->record->generators[g].columns};
}

static void generator_node_forward(const Pass *p, int k)
{
    const Node *n = &p->m->network.node[k];
    const NodeActs *x = &p->a->node[k];
    const floatX *input = p->a->node[n->input].x;
    Generator g = generator_weights(p, n);
    if (pass_runs(p->a, USES(x->columns, x->pre, input)))
        generator_forward(p->s, x->columns, x->pre, &g, input, p->b->N, p->m->config->model_dim);
}

static RowSigns signs_of(const Pass *p)
{
    return (RowSigns){param_data(&p->m->params, p->m->signs), p->b->sign_rows};
}

static void bigram_forward(const Pass *p, floatX *x)
{
    const Model *m = p->m;
    RowSigns signs = signs_of(p);
    if (pass_runs(p->a, USES(x)))
        signed_gather(p->s, x, param_weight(&m->params, m->bigram), p->b->bigram_rows, &signs, p->b->N,
                      m->config->model_dim, (int)m->bigram->cols);
}

void node_forward(const Pass *p, int k)
{
    const Node *n = &p->m->network.node[k];
    BlockPort port;
    switch (n->kind) {
    case NODE_EMBED:
        embed_forward_block(p);
        return;
    case NODE_BIGRAM:
        bigram_forward(p, p->a->node[k].x);
        return;
    case NODE_GENERATOR:
        generator_node_forward(p, k);
        return;
    case NODE_SUM:
        sum_forward(p, k);
        return;
    case NODE_ATTENTION:
    case NODE_MLP:
        port = port_of(p, k);
        block_of(n)->forward(p, n->layer, &port);
        return;
    }
}

// ---- gradients of streams ---------------------------------------------------------------------------------

// Who reads a stream, and who reads its norm.
typedef struct {
    StreamReader reader[MAX_READERS];
    int readers;
    struct {
        const floatX *dh;
        const float *lead; // see StreamGrad; NULL
        int leads;
    } norm[MAX_LAYERS];
    int norms;
} Readers;

// Whether backward comes to the generator of a term's column before it comes to the term's stream, or the
// term is no stream but rows of a table, which always have a column: then the gradients of its coefficients
// are taken at the generator.
static bool taken_early(const Network *n, const NodeTerm *t)
{
    return t->node == NONE || (t->column && n->generator[column_generator(t->column)] > t->node);
}

static StreamReader reader_of(const Pass *p, int sum, const NodeTerm *t, bool coefficients)
{
    const Acts *a = p->a;
    return (StreamReader){.g = a->node[sum].dx,
                          .pitch = a->node[sum].dx_pitch,
                          .c = factor_of(p, t),
                          .dscalar =
                              coefficients && t->coefficient != NONE ? part(a->dcoef, t->coefficient) : NULL,
                          .dcolumn = coefficients ? column_grad(p, t->column) : NULL};
}

static void add_reader(Readers *r, StreamReader reader)
{
    assert(r->readers < MAX_READERS);
    r->reader[r->readers++] = reader;
}

// attention: whose value gates read what the norm gives; or NULL
static void add_norm(Readers *r, const floatX *dh, const HeadsActs *attention)
{
    assert(r->norms < MAX_LAYERS);
    r->norm[r->norms].dh = dh;
    r->norm[r->norms].leads = attention ? attention->leads : 0;
    r->norm[r->norms++].lead = attention ? attention->dh_lead : NULL;
}

static void find_readers(const Pass *p, int k, Readers *r)
{
    const Network *net = &p->m->network;
    const Acts *a = p->a;
    r->readers = r->norms = 0;
    for (int i = k + 1; i < net->count; i++) {
        const Node *n = &net->node[i];
        for (int j = 0; j < n->terms; j++) {
            if (n->term[j].node == k)
                add_reader(r, reader_of(p, i, &n->term[j], !taken_early(net, &n->term[j])));
        }
        if (n->input != k)
            continue;
        if (n->kind == NODE_GENERATOR)
            add_reader(r, (StreamReader){.g = a->node[i].dh});
        else
            add_norm(r, a->node[i].dh, n->kind == NODE_ATTENTION ? &a->heads[n->layer] : NULL);
    }
    if (k == net->output)
        add_norm(r, a->dh, NULL);
}

static void run_stream_grads(const Pass *p, const StreamGrad *g, int count)
{
    const void *uses[STREAM_GRADS * (6 + 3 * MIX_STREAMS)];
    int n = 0;
    for (int k = 0; k < count; k++) {
        const void *own[] = {g[k].dx, g[k].x, g[k].dh, g[k].dh_lead, g[k].h, g[k].rstd};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            uses[n++] = own[i];
        for (int i = 0; i < g[k].readers; i++) {
            uses[n++] = g[k].reader[i].g;
            uses[n++] = g[k].reader[i].c.column;
            uses[n++] = g[k].reader[i].dcolumn;
        }
    }
    if (pass_runs(p->a, uses, n))
        stream_grads(p->s, g, count, p->b->N, p->m->config->model_dim);
}

// Readers that two streams have in common go first, each at the same place in both lists: their gradient is
// loaded once.
static void common_first(Readers *x, Readers *y)
{
    int common = 0;
    for (int i = 0; i < x->readers; i++)
        for (int j = common; j < y->readers; j++) {
            StreamReader a = x->reader[i], b = y->reader[j];
            if (a.g != b.g)
                continue;
            x->reader[i] = x->reader[common];
            y->reader[j] = y->reader[common];
            x->reader[common] = a;
            y->reader[common++] = b;
            break;
        }
}

// Part i of the gradient of stream k: an op reads MIX_STREAMS gradients of sums and that of one norm.
static StreamGrad gradient_part(const Pass *p, int k, const Readers *r, int i)
{
    const Node *n = &p->m->network.node[k];
    const NodeActs *x = &p->a->node[k];
    StreamGrad g = {.dx = x->dx, .accumulate = i > 0};
    for (int j = i * MIX_STREAMS; j < r->readers && g.readers < MIX_STREAMS; j++)
        g.reader[g.readers++] = r->reader[j];
    g.x = i < r->norms || (n->kind == NODE_SUM && !n->kept) ? NULL : x->x; // a norm is loaded anyway
    if (i < r->norms) {
        g.dh = r->norm[i].dh;
        g.dh_lead = r->norm[i].lead;
        g.leads = r->norm[i].leads;
    }
    if (g.dh || !g.x) {
        g.h = x->h;
        g.rstd = x->rstd;
    }
    return g;
}

// Of stream k, or of k and the one behind it.
static void stream_gradients(const Pass *p, int k, int count)
{
    Readers r[STREAM_GRADS];
    int parts = 0;
    for (int s = 0; s < count; s++) {
        find_readers(p, k + s, &r[s]);
        parts = (int)max_i64(parts, max_i64(r[s].norms, ceil_div(r[s].readers, MIX_STREAMS)));
    }
    if (count == 2)
        common_first(&r[0], &r[1]);
    for (int i = 0; i < parts; i++) {
        StreamGrad g[STREAM_GRADS];
        for (int s = 0; s < count; s++)
            g[s] = gradient_part(p, k + s, &r[s], i);
        run_stream_grads(p, g, count);
    }
}

// The embedding and the bigram behind it are read by the same sums.
static bool paired_with_next(const Network *n, int k)
{
    return n->node[k].kind == NODE_EMBED && k + 1 < n->count && n->node[k + 1].kind == NODE_BIGRAM;
}

// ---- backward ---------------------------------------------------------------------------------------------

static void table_term_backward(const Pass *p, int k, const NodeTerm *t)
{
    const Params *w = &p->m->params;
    const Param *table = params_of(w, ROLE_VALUE_EMBED, t->table);
    int N = p->b->N, d = p->m->config->model_dim;
    RowReader row = {.g = p->a->node[k].dx,
                     .factor = column_of(p, t->column),
                     .stride = column_stride(p, t->column),
                     .groups = 1};
    if (pass_runs(p->a, USES(row.g, row.factor)))
        table_grad(p->s, param_grad(w, table), &row, 1, &p->b->rows, N, d, d);
}

// What the coefficients of a term read: a stream, or rows of a table.
static StreamGrad coefficients_of(const Pass *p, const NodeTerm *t)
{
    bool table = t->node == NONE;
    return (StreamGrad){.x = table ? table_weight(p->m, t->table) : p->a->node[t->node].x,
                        .rows = table ? p->b->tokens : NULL};
}

// Streams take the gradient of a sum where backward comes to them; what is no stream takes it here, and so
// does the factor of an MLP's stream, which has the sum's gradient.
static void sum_backward(const Pass *p, int k)
{
    const Network *net = &p->m->network;
    const Node *n = &net->node[k];
    for (int i = 0; i < n->terms; i++) {
        const NodeTerm *t = &n->term[i];
        if (t->node == NONE)
            table_term_backward(p, k, t);
        else if (t->coefficient != NONE && net->node[t->node].sum == k) {
            StreamGrad factor = {.x = p->a->node[t->node].x,
                                 .reader = {reader_of(p, k, t, true)},
                                 .readers = 1};
            run_stream_grads(p, &factor, 1);
        }
    }
}

// Adds the reader to those of the same stream.
static void add_coefficients(StreamGrad *g, int *count, StreamGrad stream, StreamReader reader)
{
    int i = 0;
    while (i < *count && (g[i].x != stream.x || g[i].rows != stream.rows || g[i].readers == MIX_STREAMS))
        i++;
    if (i == *count)
        g[(*count)++] = stream;
    g[i].reader[g[i].readers++] = reader;
}

// The gradients of the columns of generator k whose streams backward has not come to. Streams go in pairs:
// those of a pair are mostly read by the same sums.
static void columns_backward(const Pass *p, int k)
{
    const Network *net = &p->m->network;
    StreamGrad g[GENERATOR_MOST]; // a column has one term
    int count = 0;
    for (int i = k + 1; i < net->count; i++)
        for (int j = 0; j < net->node[i].terms; j++) {
            const NodeTerm *t = &net->node[i].term[j];
            if (t->column && net->generator[column_generator(t->column)] == k && taken_early(net, t))
                add_coefficients(g, &count, coefficients_of(p, t), reader_of(p, i, t, true));
        }
    for (int i = 0; i < count; i += STREAM_GRADS)
        run_stream_grads(p, g + i, count - i < STREAM_GRADS ? count - i : STREAM_GRADS);
}

static void generator_node_backward(const Pass *p, int k)
{
    const Model *m = p->m;
    const Params *w = &m->params;
    const Node *n = &m->network.node[k];
    const NodeActs *x = &p->a->node[k];
    const floatX *input = p->a->node[n->input].x;
    int N = p->b->N, d = m->config->model_dim;
    Generator g = generator_weights(p, n);
    GeneratorBackward back = {.generator = &g,
                              .dx = x->dh,
                              .dpre = x->dpre,
                              .dw2 = param_grad(w, m->generator[n->layer].out),
                              .db2 = param_grad(w, m->generator[n->layer].bias),
                              .dscale = p->a->dcoef + n->scale,
                              .dout = x->dcolumns,
                              .pre = x->pre};
    WeightGrad dw1 = {param_grad(w, m->generator[n->layer].in), x->dpre, input, g.width, d, false};
    if (pass_runs(p->a, USES(x->dh, x->dpre, x->dcolumns, x->pre)))
        generator_backward(p->s, &back, N, d);
    if (pass_runs(p->a, USES(x->dpre, input)))
        matmul_weight_grads(p->products, &dw1, 1, N);
}

static void bigram_backward(const Pass *p, int k)
{
    const Model *m = p->m;
    RowSigns signs = signs_of(p);
    RowReader row = {.g = p->a->node[k].dx, .signs = &signs};
    if (pass_runs(p->a, USES(row.g)))
        table_grad(p->s, param_grad(&m->params, m->bigram), &row, 1, &p->b->bigram, p->b->N,
                   m->config->model_dim, (int)m->bigram->cols);
}

void node_backward(const Pass *p, int k)
{
    const Node *n = &p->m->network.node[k];
    BlockPort port;
    if (k > 0 && paired_with_next(&p->m->network, k - 1))
        stream_gradients(p, k - 1, 2);
    else if (n->kind != NODE_GENERATOR && !n->into_v && n->sum == NONE &&
             !paired_with_next(&p->m->network, k))
        stream_gradients(p, k, 1);
    switch (n->kind) {
    case NODE_EMBED:
        embed_backward_block(p, p->a->node[k].dx, NULL);
        return;
    case NODE_BIGRAM:
        bigram_backward(p, k);
        return;
    case NODE_GENERATOR:
        columns_backward(p, k);
        generator_node_backward(p, k);
        return;
    case NODE_SUM:
        sum_backward(p, k);
        return;
    case NODE_ATTENTION:
    case NODE_MLP:
        port = port_of(p, k);
        block_of(n)->backward(p, n->layer, &port);
        return;
    }
}
