#include "llmc/model/network.h"
#include <stdarg.h>
#include <string.h>

typedef struct {
    Network *n;
    const Record *r;
    int layer, stage;                      // where it is
    int running, embedded, bigram, branch; // nodes; NONE: not there
    int in[MAX_LAYERS], out[MAX_LAYERS];
    bool used[MAX_GENERATORS][GENERATOR_MOST]; // columns
    Error *error;
    bool failed; // the first error stands
} Compiler;

static int fail(Compiler *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int fail(Compiler *c, const char *format, ...)
{
    char what[192], where[24] = "output";
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (c->layer < c->r->num_layers)
        snprintf(where, sizeof where, "layer %d", c->layer);
    if (!c->failed)
        error_set(c->error, "record %s, %s: %s", c->r->name, where, what);
    c->failed = true;
    return NONE;
}

static int add_node(Compiler *c, NodeKind kind)
{
    Network *n = c->n;
    if (n->count == MAX_NODES) {
        fail(c, "more streams than %d", MAX_NODES);
        return 0;
    }
    n->node[n->count] = (Node){.kind = kind,
                               .stage = c->stage,
                               .layer = c->layer,
                               .input = NONE,
                               .extra = NONE,
                               .lout = NONE,
                               .sum = NONE,
                               .taken_with = NONE,
                               .added = NONE};
    return n->count++;
}

static int add_coefficient(Compiler *c, Coefficient weight)
{
    Network *n = c->n;
    if (n->num_terms == MAX_COEFFICIENTS)
        return fail(c, "more coefficients than %d", MAX_COEFFICIENTS);
    n->terms[n->num_terms] = weight;
    return n->num_terms++;
}

// A column has one reader, who writes its gradient.
static void use_columns(Compiler *c, int column, int count)
{
    if (column < 0)
        fail(c, "a column is %d; COLUMN(generator, k) makes them", column);
    if (column > 0 && count > 0 && column_generator(column) != column_generator(column + count - 1))
        fail(c, "reads %d columns from COLUMN(%d, %d) on", count, column_generator(column),
             column_place(column));
    for (int i = column; column > 0 && i < column + count; i++) {
        int g = column_generator(i), k = column_place(i);
        if (g >= c->r->num_generators || k >= c->r->generators[g].columns || c->n->generator[g] == NONE)
            fail(c, "reads COLUMN(%d, %d), which is not there yet", g, k);
        else if (c->used[g][k])
            fail(c, "reads COLUMN(%d, %d), which another one reads", g, k);
        else
            c->used[g][k] = true;
    }
}

// ---- streams ----------------------------------------------------------------------------------------------

// The node of a stream; NONE: it is not there.
static int resolve(const Compiler *c, int stream)
{
    switch (stream) {
    case RUNNING:
        return c->running;
    case EMBEDDED:
        return c->embedded;
    case BIGRAM:
        return c->bigram;
    case BRANCH:
        return c->branch;
    default:
        if (stream >= 0)
            return stream < MAX_LAYERS ? c->out[stream] : NONE;
        return stream <= FIRST_IN && stream > FIRST_IN - MAX_LAYERS ? c->in[FIRST_IN - stream] : NONE;
    }
}

static NodeTerm compile_term(Compiler *c, const MixTerm *t)
{
    bool table = t->stream <= FIRST_ROWS;
    Coefficient one = {1, NONE, NONE};
    NodeTerm term = {.node = NONE, .coefficient = NONE, .column = t->column, .plus = t->plus};
    const ParamSpec *tables = record_row(c->r, ROLE_VALUE_EMBED);
    if (table)
        term.table = FIRST_ROWS - t->stream;
    else
        term.node = resolve(c, t->stream);
    if (table ? !tables || term.table >= tables->count : term.node == NONE)
        fail(c, "reads %s, which is not there yet", record_stream_name(t->stream).text);
    if (table && (!t->column || t->plus != 0 || memcmp(&t->weight, &one, sizeof one)))
        fail(c, "ROWS(%d) takes a column and nothing else", term.table);
    if (memcmp(&t->weight, &one, sizeof one))
        term.coefficient = add_coefficient(c, t->weight);
    use_columns(c, t->column, 1);
    return term;
}

static int add_sum(Compiler *c, const MixTerm *list)
{
    int id = add_node(c, NODE_SUM), terms = record_mix_terms(list);
    for (int i = 0; i < terms; i++)
        c->n->node[id].term[i] = compile_term(c, &list[i]);
    c->n->node[id].terms = terms;
    return id;
}

// The sum whose norm is that of the stream.
static int norm_of(Compiler *c, int node)
{
    if (node == NONE)
        return NONE;
    if (c->n->node[node].kind != NODE_SUM) {
        int sum = add_node(c, NODE_SUM);
        c->n->node[sum].term[0] = (NodeTerm){.node = node, .coefficient = NONE};
        c->n->node[sum].terms = 1;
        node = sum;
    }
    c->n->node[node].normalised = true;
    return node;
}

// ---- layers -----------------------------------------------------------------------------------------------

// Those that read the stream which has just been made.
static void add_generators(Compiler *c, int stream)
{
    for (int g = 0; g < c->r->num_generators; g++) {
        const GeneratorSpec *spec = &c->r->generators[g];
        if (spec->input != stream)
            continue;
        int id = add_node(c, NODE_GENERATOR), scale = add_coefficient(c, spec->scale);
        c->n->node[id].layer = g;
        c->n->node[id].input = c->running;
        c->n->node[id].scale = scale;
        c->n->generator[g] = id;
    }
}

// When the sum reads the branch once: a trained factor of what an attention gives becomes one of its product,
// which has a factor anyway, and that of an MLP one of its backward. Then the branch has the gradient of the
// sum.
static void join_branch(Compiler *c, Node *sum)
{
    Network *n = c->n;
    NodeTerm *only = NULL;
    int count = 0;
    for (int i = 0; i < sum->terms; i++) {
        if (sum->term[i].node == c->branch) {
            only = &sum->term[i];
            count++;
        }
    }
    if (c->failed || count != 1 || only->column || only->plus != 0)
        return;
    Node *branch = &n->node[c->branch];
    const Coefficient *w = only->coefficient == NONE ? NULL : &n->terms[only->coefficient];
    if (w && (w->factor != 1 || w->scalar == NONE || w->gate != NONE))
        return;
    branch->sum = c->running;
    if (w && branch->kind == NODE_MLP) {
        branch->lout = only->coefficient;
        return;
    }
    if (w)
        n->terms[branch->lout].gate = UNGATED(w->scalar);
    only->coefficient = NONE;
}

// Behind a block.
static void add_branch(Compiler *c, const MixTerm *list)
{
    static const MixTerm add[MIX_STREAMS] = {{RUNNING, {1, NONE, NONE}, 0, 0},
                                             {BRANCH, {1, NONE, NONE}, 0, 0}};
    c->running = add_sum(c, record_mix_terms(list) ? list : add);
    join_branch(c, &c->n->node[c->running]);
    c->branch = NONE;
}

static void check_heads(Compiler *c, const LayerSpec *l)
{
    const HeadsSpec *h = &l->heads;
    const ParamSpec *gates = record_row(c->r, ROLE_VALUE_GATE);
    if (!h->dc_weights != !h->dc_factors || (h->dc_weights && (h->xsa || h->paired || c->r->dc_keys < 1)))
        fail(c, "DC needs dc_weights, dc_factors and the record's dc_keys, and heads without pairs and xsa");
    if (h->dc_weights && column_generator(h->dc_weights) != column_generator(h->dc_factors))
        fail(c, "dc_weights are of generator %d and dc_factors of %d; both are of one",
             column_generator(h->dc_weights), column_generator(h->dc_factors));
    if ((h->xsa || h->gate || h->dc_weights) && c->r->heads < 1)
        fail(c, "xsa, gate and dc_weights are columns for each head, but the record's heads are %d",
             c->r->heads);
    if (l->value_embed && h->value_column &&
        (h->value_groups < 1 || (c->r->heads && c->r->heads % h->value_groups)))
        fail(c, "value_groups are %d, but the record's heads %d", h->value_groups, c->r->heads);
    if (h->paired && (h->offset || h->xsa || h->gate))
        fail(c, "paired heads have no offset, XSA or gate");
    if (l->value_embed && !h->value_column && (!gates || l->value_embed > gates->count))
        fail(c, "no gate for value_embed %d", l->value_embed);
}

static void add_attention(Compiler *c, const LayerSpec *l)
{
    const HeadsSpec *h = &l->heads;
    int heads = c->r->heads;
    check_heads(c, l);
    if (resolve(c, h->input) == NONE)
        fail(c, "heads.input is %s, which is not there yet", record_stream_name(h->input).text);
    int extra = record_mix_terms(h->extra) ? add_sum(c, h->extra) : NONE,
        input = norm_of(c, resolve(c, h->input)), id = add_node(c, NODE_ATTENTION);
    Node *a = &c->n->node[id];
    a->input = input;
    a->extra = extra;
    a->lin = add_coefficient(c, (Coefficient){1, h->factors, NONE});
    a->lout = add_coefficient(c, (Coefficient){1, h->factors + 1, NONE});
    use_columns(c, l->value_embed ? h->value_column : 0, h->value_groups);
    use_columns(c, h->xsa, heads);
    use_columns(c, h->gate, heads);
    use_columns(c, h->dc_weights, heads);
    use_columns(c, h->dc_factors, heads);
    if (extra != NONE)
        c->n->node[extra].kept = c->n->node[extra].into_v = true;
    c->branch = id;
    add_branch(c, l->after_attention);
}

static void add_layer(Compiler *c, int i)
{
    const LayerSpec *l = &c->r->layers[i];
    c->layer = i;
    c->stage = 1 + i;
    if (record_mix_terms(l->mix))
        c->running = add_sum(c, l->mix);
    c->in[i] = c->running;
    if (l->attention == ATTENTION_PLAIN)
        fail(c, "ATTENTION_PLAIN in a record with lists");
    if (l->attention)
        add_attention(c, l);
    if (l->mlp) {
        int input = norm_of(c, c->running), id = add_node(c, NODE_MLP);
        c->n->node[id].input = input;
        if (input != NONE)
            c->n->node[input].into_mlp = true;
        c->branch = id;
        add_branch(c, l->after_mlp);
    }
    c->out[i] = c->running;
    add_generators(c, i);
}

static void add_start(Compiler *c)
{
    c->embedded = c->running = add_node(c, NODE_EMBED);
    if (record_row(c->r, ROLE_BIGRAM))
        c->bigram = add_node(c, NODE_BIGRAM);
    add_generators(c, EMBEDDED);
}

static void add_output(Compiler *c)
{
    c->layer = c->r->num_layers;
    c->stage = c->layer + 1;
    if (record_mix_terms(c->r->output))
        c->running = add_sum(c, c->r->output);
    c->n->output = norm_of(c, c->running);
}

// ---- readers ----------------------------------------------------------------------------------------------

// A node as the tables have it.
static const char *node_name(const Compiler *c, const Node *a, int id)
{
    if (a->kind == NODE_EMBED || a->kind == NODE_BIGRAM)
        return a->kind == NODE_EMBED ? "EMBEDDED" : "BIGRAM";
    if (a->kind == NODE_ATTENTION || a->kind == NODE_MLP)
        return a->kind == NODE_MLP ? "the BRANCH of its MLP" : "the BRANCH of its attention";
    return id == c->in[a->layer]    ? "its mix"
           : id == c->out[a->layer] ? "its output"
                                    : "its sum after_attention";
}

// Notes which sums are read, and that all streams are.
static void find_readers(Compiler *c)
{
    Network *n = c->n;
    bool read[MAX_NODES] = {false};
    for (int i = 0; i < n->count; i++) {
        const Node *a = &n->node[i];
        for (int k = 0; k < a->terms; k++) {
            if (a->term[k].node != NONE)
                read[a->term[k].node] = true;
        }
        if (a->kind == NODE_GENERATOR)
            read[a->input] = true;
    }
    for (int i = 0; i < n->count; i++) {
        Node *a = &n->node[i];
        a->kept = a->kept || read[i];
        c->layer = a->layer;
        if (!a->kept && !a->normalised && a->kind != NODE_GENERATOR)
            fail(c, "nobody reads %s", node_name(c, a, i));
    }
}

static void check_columns(Compiler *c)
{
    const char *name = c->r->name;
    for (int g = 0; g < c->r->num_generators && !c->failed; g++) {
        const GeneratorSpec *spec = &c->r->generators[g];
        if (c->n->generator[g] == NONE)
            c->failed = !error_set(c->error, "record %s, generator %d: its input %s is not there", name, g,
                                   record_stream_name(spec->input).text);
        for (int k = 0; k < spec->columns && !c->failed; k++) {
            if (!c->used[g][k])
                c->failed = !error_set(c->error, "record %s, generator %d: nobody reads COLUMN(%d, %d)", name,
                                       g, g, k);
        }
    }
}

// ---- gradients that are taken together --------------------------------------------------------------------

static bool is_as_it_is(const NodeTerm *t) { return t->coefficient == NONE && !t->column && t->plus == 0; }

// The sum that adds stream k as it is, if no other reads it; NONE.
static int only_sum(const Network *n, int k)
{
    int sum = NONE, readers = 0;
    for (int i = k + 1; i < n->count; i++) {
        for (int j = 0; j < n->node[i].terms; j++) {
            if (n->node[i].term[j].node != k)
                continue;
            readers++;
            if (is_as_it_is(&n->node[i].term[j]) && !n->node[i].into_v)
                sum = i;
        }
    }
    return readers == 1 ? sum : NONE;
}

// A sum whose norm nobody reads, and that one other sum adds as it is, has the gradient of that; where a
// generator reads it, too, the generator's dx, to which that of the sum is added.
static void share_gradient(Network *n, int k)
{
    Node *a = &n->node[k];
    int sum = only_sum(n, k), generator = NONE, generators = 0;
    for (int i = k + 1; i < n->count; i++) {
        if (n->node[i].kind == NODE_GENERATOR && n->node[i].input == k) {
            generator = i;
            generators++;
        }
    }
    if (a->kind != NODE_SUM || a->normalised || a->into_v || sum == NONE || generators > 1 || generator > sum)
        return;
    a->sum = generators ? generator : sum;
    if (generators)
        n->node[generator].added = sum;
}

static bool is_taken(const Network *n, int stream)
{
    for (int i = 0; i < n->count; i++) {
        if (n->node[i].taken_with == stream)
            return true;
    }
    return false;
}

// The gradient of an MLP's factor is <g, y>, g that of the sum: with that of another stream of the sum, which
// reads g and takes h for the stream, y alone is loaded more.
static void take_factor(Network *n, int k)
{
    Node *a = &n->node[k];
    if (a->kind != NODE_MLP || a->sum == NONE || a->lout == NONE)
        return;
    const Node *sum = &n->node[a->sum];
    for (int i = 0; i < sum->terms && a->taken_with == NONE; i++) {
        int other = sum->term[i].node;
        if (other != NONE && n->node[other].kind == NODE_SUM && n->node[other].normalised &&
            !is_taken(n, other))
            a->taken_with = other;
    }
}

static void join_gradients(Network *n)
{
    for (int k = 0; k < n->count; k++)
        share_gradient(n, k);
    for (int k = 0; k < n->count; k++)
        take_factor(n, k);
}

bool network_compile(Network *n, const Record *r, Error *e)
{
    Compiler c =
        {.n = n, .r = r, .running = NONE, .embedded = NONE, .bigram = NONE, .branch = NONE, .error = e};
    memset(n, 0, sizeof *n);
    for (int i = 0; i < MAX_GENERATORS; i++)
        n->generator[i] = NONE;
    for (int i = 0; i < MAX_LAYERS; i++)
        c.in[i] = c.out[i] = NONE;
    add_start(&c);
    for (int i = 0; i < r->num_layers && !c.failed; i++)
        add_layer(&c, i);
    if (!c.failed)
        add_output(&c);
    if (!c.failed)
        find_readers(&c);
    if (!c.failed)
        check_columns(&c);
    if (!c.failed)
        join_gradients(n);
    return !c.failed;
}

const Node *network_block(const Network *n, NodeKind kind, int layer)
{
    for (int i = 0; i < n->count; i++) {
        if (n->node[i].kind == kind && n->node[i].layer == layer)
            return &n->node[i];
    }
    return NULL;
}
