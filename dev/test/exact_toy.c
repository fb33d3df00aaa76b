// A network that only a table describes, and the memory of its activations: an op that used a tensor which
// the planning pass was not told of would find it overwritten. The network: the gradient of every tensor of
// the toy records against the loss itself, along the gradient. It has what the presets do not: a layer
// without an MLP, one that mixes nothing in, constant coefficients, a stream that comes back through a gate
// alone. And a micro-batch in launches of whole documents: the loss and gradients of the whole.
#include "dev/test/tap.h"
#include "dev/test/uniform.h"
#include "llmc/dist/comm.h"
#include "llmc/run/batch_block.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 64, VOCAB = 61, STEP = 1, LAUNCH = 32, POSITIONS = N + LAUNCH };

static struct {
    Config config;
    Model model;
    Acts acts;
    Rope rope;
    floatX *cos, *sin, *cos_paired, *sin_paired;
    Batch batch;
    int32_t *block;
    StepParams step;
    DeviceBatch device;
    AttentionSetting at;
} toy;

// options: more of them, end with a NULL
static void open_toy(const char *preset, const char *const *options)
{
    Error e;
    char *argv[16] = {"test", "--preset", (char *)preset, "--vocab-size", "61", "--micro-batches", "1"};
    int argc = 7;
    memset(&toy, 0, sizeof toy);
    while (*options)
        argv[argc++] = (char *)*options++;
    if (!config_parse(&toy.config, argc, argv, &e))
        fatal(1, "%s", e.text);
    const Config *c = &toy.config;
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = N,
                               .eval_tokens = N,
                               .dim = c->model_dim,
                               .heads = c->num_heads,
                               .mlp_dim = c->mlp_dim,
                               .vocab_padded = config_vocab_padded(c)});
    model_describe(&toy.model, c);
    model_allocate(&toy.model, true);
    rope_start(&toy.rope, c);
    size_t angles = (size_t)POSITIONS * (size_t)toy.rope.count;
    toy.cos = device_alloc(angles * sizeof(floatX), "rope");
    toy.sin = device_alloc(angles * sizeof(floatX), "rope");
    toy.cos_paired = device_alloc(2 * angles * sizeof(floatX), "rope");
    toy.sin_paired = device_alloc(2 * angles * sizeof(floatX), "rope");
    rope_tables(NULL, toy.cos, toy.sin, toy.rope.frequency, NULL, POSITIONS, record_key_width(c));
    rope_tables(NULL, toy.cos_paired, toy.sin_paired, toy.rope.frequency, NULL, 2 * POSITIONS,
                record_key_width(c));
    toy.at = (AttentionSetting){.window_short = 8,
                                .window_long = 20,
                                .scale = (float)toy.rope.scale,
                                .cos = toy.cos,
                                .sin = toy.sin,
                                .cos_paired = toy.cos_paired,
                                .sin_paired = toy.sin_paired};
}

// Rows of pairs of tokens, prefixes and paired heads where the record has any.
static BatchTables tables_of(const Record *r)
{
    static int32_t prefix[VOCAB];
    const ParamSpec *bigram = record_row(r, ROLE_BIGRAM), *signs = record_row(r, ROLE_SIGNS);
    for (int i = 0; i < VOCAB; i++)
        prefix[i] = i % 3 ? i / 3 : -1;
    if (!bigram)
        return (BatchTables){0};
    return (BatchTables){.pairs = {.rows = (int)record_extent(&toy.config, bigram->rows),
                                   .sign_rows = (int)record_extent(&toy.config, signs->rows)},
                         .prefix = prefix,
                         .paired = record_has_paired(r)};
}

static void make_batch(void)
{
    Batch *b = &toy.batch;
    BatchTables tables = tables_of(toy.model.record);
    batch_alloc(b, N, &tables);
    toy.step = schedule_step_params(&toy.config, STEP);
    for (int i = 0; i < N; i++) {
        b->tokens[i] = (int32_t)((uint32_t)(i * i * 7 + i) % VOCAB);
        b->targets[i] = (int32_t)((uint32_t)(i * 11 + 3) % VOCAB);
    }
    b->num_docs = 2;
    b->cu_seqlens[1] = 41;
    b->cu_seqlens[2] = N;
    batch_complete(b);
    toy.block = xcalloc((size_t)block_ints(N, &b->tables), sizeof *toy.block);
    toy.device = block_batch(toy.block, b, block_pack(toy.block, b));
    toy.device.num_targets = schedule_stage(&toy.config, STEP).targets.count;
    toy.device.target_weight = toy.step.target_weight;
    toy.device.prefix_weight = &toy.step.prefix_weight;
}

// No tensor at zero, where gradients of others vanish. STORE_HALF is fp32 in this build.
static void draw_weights(void)
{
    const Params *p = &toy.model.params;
    params_init(&toy.model.params, &toy.config, NULL);
    random_used = 0; // the same for every tensor
    for (int i = 0; i < p->count; i++) {
        float *x = param_data(p, &p->list[i]);
        bool trained = p->list[i].spec->update.kind != FIXED;
        for (int64_t k = 0; trained && k < param_elements(&p->list[i]); k++)
            x[k] += (float)(0.4 * uniform() - 0.2);
    }
    params_round(p, NULL);
}

static double loss(void) // of the whole batch, gradients added
{
    float sum;
    model_prepare(&toy.model, &toy.acts, NULL);
    model_train_batch(&toy.model, &toy.acts, &toy.device, &toy.at, &sum, FIRST_OF_STEP | LAST_OF_STEP, NULL);
    model_finish_gradients(&toy.model, &toy.acts, NULL);
    return sum;
}

// The same in launches, whose activations are in `acts` of LAUNCH tokens.
static double loss_in_launches(void)
{
    Batch launch;
    float sum;
    double total = 0;
    batch_alloc(&launch, LAUNCH, &toy.batch.tables);
    int32_t *block = xcalloc((size_t)block_ints(LAUNCH, &launch.tables), sizeof *block);
    model_prepare(&toy.model, &toy.acts, NULL);
    for (int document = 0, place = FIRST_OF_STEP; document < toy.batch.num_docs; place = 0) {
        AttentionSetting at = toy.at;
        int position = batch_take_launch(&launch, &toy.batch, &document);
        DeviceBatch b = block_batch(block, &launch, block_pack(block, &launch));
        b.num_targets = 1;
        b.target_weight = toy.step.target_weight;
        at.cos += position * toy.rope.count;
        at.sin += position * toy.rope.count;
        place |= document == toy.batch.num_docs ? LAST_OF_STEP : 0;
        model_train_batch(&toy.model, &toy.acts, &b, &at, &sum, place, NULL);
        total += sum;
    }
    model_finish_gradients(&toy.model, &toy.acts, NULL);
    free(block);
    batch_free(&launch);
    return total;
}

static void move(const Param *a, const float *direction, double step)
{
    float *x = param_data(&toy.model.params, a);
    for (int64_t k = 0; k < param_elements(a); k++)
        x[k] += (float)(step * direction[k]);
    params_round(&toy.model.params, NULL);
}

// The loss changes by |g| times the length of a step along g; to the third order in the step, and rounding of
// fp32 sums.
static void check(const Param *a)
{
    const Params *p = &toy.model.params;
    int64_t n = param_elements(a);
    float *g = xcalloc((size_t)n, sizeof *g);
    double norm = 0, length = 2e-3;
    draw_weights();
    params_zero_gradients(p, NULL);
    loss();
    memcpy(g, param_grad(p, a), (size_t)n * sizeof *g);
    for (int64_t k = 0; k < n; k++)
        norm += (double)g[k] * g[k];
    norm = sqrt(norm);
    ok(norm > 1e-3, "gradient of %s is not zero: %.4g", a->name, norm);
    move(a, g, length / norm);
    double up = loss();
    move(a, g, -2 * length / norm);
    double down = loss(), slope = (up - down) / (2 * length);
    // 64 losses of about 4 are rounded to 2^-24 of their sum, twice.
    double rounding = 4 * 64 * 4 * 0x1p-24 / (2 * length);
    ok(fabs(slope - norm) < 0.01 * norm + rounding, "the loss rises by it along the gradient: %.5g, |g| %.5g",
       slope, norm);
    free(g);
}

// Loss and all gradients with activations in `memory`, which holds no zeros: what is read before it is
// written shows.
static float *results(Acts *acts, char *memory, size_t bytes, double (*of)(void), int64_t *count)
{
    const Params *p = &toy.model.params;
    *count = 1;
    for (int i = 0; i < p->num_pools; i++)
        *count += p->pools[i].grad ? p->pools[i].size : 0;
    float *all = xcalloc((size_t)*count, sizeof *all), *to = all;
    memset(memory, 0x7f, bytes);
    toy.acts = *acts;
    draw_weights();
    params_zero_gradients(p, NULL);
    model_start_scales(&toy.model, NULL);
    *to++ = (float)of();
    for (int i = 0; i < p->num_pools; i++) {
        if (!p->pools[i].grad)
            continue;
        memcpy(to, p->pools[i].grad, (size_t)p->pools[i].size * sizeof *to);
        to += p->pools[i].size;
    }
    return all;
}

static void check_shared_memory(void)
{
    static Plan plan, alone;
    Acts shared, apart;
    size_t bytes = 0;
    int64_t count;
    acts_plan(&plan, &toy.model, N, true);
    alone = plan;
    for (int i = 0; i < alone.count; i++) {
        alone.tensor[i].offset = bytes;
        bytes += alone.tensor[i].bytes;
    }
    size_t least = plan.size;
    char *memory = device_alloc(bytes, "activations");
    acts_follow(&apart, &toy.model, N, true, &alone, memory);
    float *want = results(&apart, memory, bytes, loss, &count);
    acts_follow(&shared, &toy.model, N, true, &plan, memory);
    float *got = results(&shared, memory, least, loss, &count);
    apart.spoiled = &alone;
    apart.spoiled_base = memory;
    alone.ops = 0;
    float *spoiled = results(&apart, memory, bytes, loss, &count);
    ok(alone.ops == plan.ops && !memcmp(want, spoiled, (size_t)count * sizeof *want),
       "no op uses a tensor that the plan has given up (%d ops)", alone.ops);
    toy.acts = shared;
    free(spoiled);
    ok(least < bytes && !memcmp(want, got, (size_t)count * sizeof *got) && isfinite(want[0]),
       "%zu bytes that tensors share give the same loss and gradients as %zu without sharing", least, bytes);
    free(want);
    free(got);
}

// Documents of 1 to 31 tokens: launches with one and with several, filled to the last row and not.
static void cut_documents(void)
{
    static const int32_t start[] = {0, 20, 30, 32, 33, 64};
    memcpy(toy.batch.cu_seqlens, start, sizeof start);
    toy.batch.num_docs = 5;
    toy.device = block_batch(toy.block, &toy.batch, block_pack(toy.block, &toy.batch));
    toy.device.num_targets = 1;
    toy.device.target_weight = toy.step.target_weight;
}

static double distance(const float *a, const float *b, int64_t n)
{
    double apart = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        apart += pow((double)a[i] - b[i], 2);
        size += pow(b[i], 2);
    }
    return sqrt(apart / size);
}

static void check_launches(void)
{
    Acts whole, launch;
    const Params *p = &toy.model.params;
    int64_t count;
    size_t bytes = acts_bytes(&toy.model, N, true), least = acts_bytes(&toy.model, LAUNCH, true);
    char *memory = device_alloc(bytes, "activations");
    cut_documents();
    acts_place(&whole, &toy.model, N, true, memory);
    acts_place(&launch, &toy.model, LAUNCH, true, memory);
    float *want = results(&whole, memory, bytes, loss, &count),
          *got = results(&launch, memory, least, loss_in_launches, &count), *row = got + 1;
    ok_at_most(fabs(got[0] - want[0]) / want[0], 1e-6, "a micro-batch in launches: loss");
    for (int i = 0; i < p->num_pools; i++) {
        if (!p->pools[i].grad)
            continue;
        ok_at_most(distance(row, row - got + want, p->pools[i].size), 1e-6, "gradients of a pool");
        row += p->pools[i].size;
    }
    ok(2 * least < bytes + (bytes >> 4), "%zu bytes of activations in place of %zu", least, bytes);
    free(want);
    free(got);
}

int main(void)
{
    static const struct {
        const char *preset, *options[8];
    } cases[] = {{"toy", {NULL}},
                 {"toy-targets", {NULL}},
                 {"toy-2026", {NULL}},
                 {"toy-2026-08", {NULL}},
                 {"toy-2026-08", {"--mlp", "fp8-backward", "--qkv", "fp8", NULL}},
                 // MLP up alone in FP8
                 {"2026-05-27", {"--model-dim", "48", "--mlp-dim", "64", "--head", "bf16", NULL}}};
    comm_open();
    for (int k = 0; k < 6; k++) {
        open_toy(cases[k].preset, cases[k].options);
        make_batch();
        printf("# %s: %d targets%s\n", cases[k].preset, toy.device.num_targets, k > 3 ? ", FP8" : "");
        check_shared_memory();
        for (int i = 0; i < toy.model.params.count && k < 2; i++) // of the others: exact_golden_2026.c
            check(&toy.model.params.list[i]);
        if (k == 0)
            check_launches();
        backend_close();
    }
    return tap_done();
}
