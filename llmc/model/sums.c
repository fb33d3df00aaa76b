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
    if (n->kind == NODE_ATTENTION || n->kind == NODE_MLP)
        take_block(x, m, n, a, b);
}

// Behind those of the nodes that follow: it may have that of one of them.
static void take_gradient(Acts *a, const Model *m, int k, PlanArena *b)
{
    const Node *n = &m->network.node[k];
    NodeActs *x = &a->node[k];
    if (n->kind == NODE_GENERATOR || n->into_v)
        return;
    if (n->sum == NONE)
        x->dx = plan_take(b, (size_t)a->tokens * (size_t)m->config->model_dim, sizeof(floatX));
    else
        x->dx = m->network.node[n->sum].kind == NODE_GENERATOR ? a->node[n->sum].dh : a->node[n->sum].dx;
}

void network_plan(Acts *a, const Model *m, PlanArena *b)
{
    for (int k = 0; k < m->network.count; k++)
        take_node(a, m, k, b);
    for (int k = m->network.count - 1; k >= 0 && a->backward; k--)
        take_gradient(a, m, k, b);
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
    StreamNorm norm[MAX_LAYERS];
    int norms;
    const floatX *beside; // see StreamGrad
    float *dbeside;
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

// Puts the reader in front; the factor of the MLP in its sum, term t, is taken with the stream's gradient.
static void take_factor(const Pass *p, Readers *r, const NodeTerm *t)
{
    StreamReader first = r->reader[r->readers - 1];
    r->reader[r->readers - 1] = r->reader[0];
    r->reader[0] = first;
    r->beside = p->a->node[t->node].x;
    r->dbeside = part(p->a->dcoef, t->coefficient);
}

// attention: whose value gates read what the norm gives; or NULL
static void add_norm(Readers *r, const floatX *dh, const HeadsActs *attention)
{
    assert(r->norms < MAX_LAYERS);
    r->norm[r->norms++] =
        attention ? (StreamNorm){dh, attention->dh_lead, attention->leads} : (StreamNorm){dh, NULL, 0};
}

// The term of a sum whose factor is taken with the gradient of stream k; NULL.
static const NodeTerm *factor_with(const Network *net, int sum, int k)
{
    const Node *n = &net->node[sum];
    for (int j = 0; j < n->terms; j++) {
        if (n->term[j].node != NONE && net->node[n->term[j].node].taken_with == k)
            return &n->term[j];
    }
    return NULL;
}

static void find_readers(const Pass *p, int k, Readers *r)
{
    const Network *net = &p->m->network;
    const Acts *a = p->a;
    *r = (Readers){0};
    for (int i = k + 1; i < net->count; i++) {
        const Node *n = &net->node[i];
        for (int j = 0; j < n->terms; j++) {
            if (n->term[j].node != k)
                continue;
            add_reader(r, reader_of(p, i, &n->term[j], !taken_early(net, &n->term[j])));
            const NodeTerm *factor = factor_with(net, i, k);
            if (factor && !r->beside)
                take_factor(p, r, factor);
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
    const void *uses[STREAM_GRADS * (5 + 2 * STREAM_NORMS + 3 * STREAM_READERS)];
    int n = 0;
    for (int k = 0; k < count; k++) {
        const void *own[] = {g[k].dx, g[k].x, g[k].h, g[k].rstd, g[k].beside};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            uses[n++] = own[i];
        for (int i = 0; i < g[k].norms; i++) {
            uses[n++] = g[k].norm[i].dh;
            uses[n++] = g[k].norm[i].lead;
        }
        for (int i = 0; i < g[k].readers; i++) {
            uses[n++] = g[k].reader[i].g;
            uses[n++] = g[k].reader[i].c.column;
            uses[n++] = g[k].reader[i].dcolumn;
        }
    }
    if (pass_runs(p->a, uses, n))
        stream_grads(p->s, g, count, p->b->N, p->m->config->model_dim);
}

// Part i of the gradient of stream k: an op reads so many gradients of sums, and of norms.
static StreamGrad gradient_part(const Pass *p, int k, const Readers *r, int i)
{
    const Node *n = &p->m->network.node[k];
    const NodeActs *x = &p->a->node[k];
    StreamGrad g = {.dx = x->dx, .accumulate = i > 0};
    for (int j = i * STREAM_READERS; j < r->readers && g.readers < STREAM_READERS; j++)
        g.reader[g.readers++] = r->reader[j];
    for (int j = i * STREAM_NORMS; j < r->norms && g.norms < STREAM_NORMS; j++)
        g.norm[g.norms++] = r->norm[j];
    g.x = g.norms || (n->kind == NODE_SUM && !n->kept) ? NULL : x->x; // with norms h is loaded anyway
    if (!g.x) {
        g.h = x->h;
        g.rstd = x->rstd;
    }
    if (i == 0) {
        g.beside = r->beside;
        g.dbeside = r->dbeside;
    }
    return g;
}

static void stream_gradient(const Pass *p, int k)
{
    Readers r;
    find_readers(p, k, &r);
    int64_t parts = max_i64(ceil_div(r.norms, STREAM_NORMS), ceil_div(r.readers, STREAM_READERS));
    for (int i = 0; i < parts; i++) {
        StreamGrad g = gradient_part(p, k, &r, i);
        run_stream_grads(p, &g, 1);
    }
}

// ---- gradients of several streams at once -----------------------------------------------------------------

// A reader of one of them. stream: without readers.
typedef struct {
    StreamGrad *stream;
    StreamReader reader;
    bool done;
} Reading;

// What one op takes.
typedef struct {
    StreamGrad g[STREAM_GRADS];
    StreamGrad *stream[STREAM_GRADS];  // whose they are
    const floatX *sum[STREAM_READERS]; // the different gradients that their readers have
    int streams, sums;
} Readings;

// False: it has to go into another op.
static bool add_reading(Readings *to, const Reading *add, int most_streams, int most_sums)
{
    int s = 0, k = 0;
    while (s < to->streams && to->stream[s] != add->stream)
        s++;
    while (k < to->sums && to->sum[k] != add->reader.g)
        k++;
    if (s == most_streams || k == most_sums)
        return false;
    for (int i = 0; s < to->streams && i < to->g[s].readers; i++) {
        if (to->g[s].reader[i].g == add->reader.g)
            return false;
    }
    if (s == to->streams) {
        to->stream[to->streams] = add->stream;
        to->g[to->streams++] = *add->stream;
    }
    if (k == to->sums)
        to->sum[to->sums++] = add->reader.g;
    to->g[s].reader[to->g[s].readers++] = add->reader;
    return true;
}

// In as few ops as take them. Those of a stream are added to what an op before has written.
static void run_readings(const Pass *p, Reading *list, int count, int most_streams, int most_sums)
{
    for (int left = count; left > 0;) {
        Readings now = {.streams = 0};
        for (int i = 0; i < count; i++) {
            if (list[i].done || !add_reading(&now, &list[i], most_streams, most_sums))
                continue;
            list[i].done = true;
            left--;
        }
        run_stream_grads(p, now.g, now.streams);
        for (int i = 0; i < now.streams; i++)
            now.stream[i]->accumulate = true;
    }
}

// Of stream k and the one behind it.
static void pair_gradients(const Pass *p, int k)
{
    Reading list[STREAM_PAIR * MAX_READERS];
    StreamGrad stream[STREAM_PAIR];
    int count = 0;
    for (int s = 0; s < STREAM_PAIR; s++) {
        Readers r;
        find_readers(p, k + s, &r);
        stream[s] = (StreamGrad){.dx = p->a->node[k + s].dx, .x = p->a->node[k + s].x};
        for (int i = 0; i < r.readers; i++)
            list[count++] = (Reading){&stream[s], r.reader[i], false};
    }
    run_readings(p, list, count, STREAM_PAIR, STREAM_READERS);
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
// does the factor of an MLP's stream, which has the sum's gradient, unless it is taken with another stream's.
static void sum_backward(const Pass *p, int k)
{
    const Network *net = &p->m->network;
    const Node *n = &net->node[k];
    for (int i = 0; i < n->terms; i++) {
        const NodeTerm *t = &n->term[i];
        if (t->node == NONE)
            table_term_backward(p, k, t);
        else if (t->coefficient != NONE && net->node[t->node].sum == k &&
                 net->node[t->node].taken_with == NONE) {
            StreamGrad factor = {.x = p->a->node[t->node].x,
                                 .reader = {reader_of(p, k, t, true)},
                                 .readers = 1};
            run_stream_grads(p, &factor, 1);
        }
    }
}

// The gradients of the columns of generator k whose streams backward has not come to.
static void columns_backward(const Pass *p, int k)
{
    const Network *net = &p->m->network;
    Reading list[GENERATOR_MOST]; // a column has one term
    StreamGrad stream[GENERATOR_MOST];
    int count = 0, streams = 0;
    for (int i = k + 1; i < net->count; i++)
        for (int j = 0; j < net->node[i].terms; j++) {
            const NodeTerm *t = &net->node[i].term[j];
            if (!t->column || net->generator[column_generator(t->column)] != k || !taken_early(net, t))
                continue;
            StreamGrad of = coefficients_of(p, t);
            int s = 0;
            while (s < streams && (stream[s].x != of.x || stream[s].rows != of.rows))
                s++;
            if (s == streams)
                stream[streams++] = of;
            list[count++] = (Reading){&stream[s], reader_of(p, i, t, true), false};
        }
    run_readings(p, list, count, STREAM_GRADS, MIX_STREAMS);
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
                              .residual = n->added == NONE ? NULL : p->a->node[n->added].dx,
                              .dpre = x->dpre,
                              .dw2 = param_grad(w, m->generator[n->layer].out),
                              .db2 = param_grad(w, m->generator[n->layer].bias),
                              .dscale = p->a->dcoef + n->scale,
                              .dout = x->dcolumns,
                              .pre = x->pre};
    WeightGrad dw1 = {param_grad(w, m->generator[n->layer].in), x->dpre, input, g.width, d, false};
    if (pass_runs(p->a, USES(x->dh, x->dpre, x->dcolumns, x->pre, back.residual)))
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
        pair_gradients(p, k - 1);
    else if (n->kind != NODE_GENERATOR && !n->into_v && n->sum == NONE &&
             !paired_with_next(&p->m->network, k))
        stream_gradient(p, k);
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
