// Runs our model and optimizer on the golden files of dev/reference/golden (format: dev/reference/README.md)
// and measures how far each tensor is from the float64 reference. exact_golden.c and test_golden.c hold the
// limits of the two builds.
#pragma once
#include "dev/test/golden_file.h"
#include "llmc/optim/optimizer.h"
#include "llmc/run/batch_block.h"

enum { GOLDEN_STEPS = 6, SAMPLES = 160 };

// A trained case: files steps-<preset>-<ns><suffix>, init<suffix> and batches.
typedef struct {
    const char *preset, *ns, *suffix, *model_dim, *num_heads, *mlp_dim;
    bool gates_only; // NorMuon on given gradients of the gates, nothing else
    bool own;        // files init-<preset> and batches-<preset>; sizes and stages are the preset's
    bool growing;    // files init and batches-2025-11-29; stages of 32, 64 and 96 tokens
} GoldenCase;
#define GOLDEN_SIZES .suffix = "", .model_dim = "16", .num_heads = "2", .mlp_dim = "64"

typedef struct {
    const GoldenCase *c;
    Config config;
    Model model;
    Optimizer optimizer;
    StepParams step;
    Acts acts;
    Rope rope;
    floatX *cos, *sin;
    Batch batch;
    int32_t *block;
    char *memory;
    float loss_device[1], *loss;
    int32_t *tokens, *cu_seqlens; // (6, 2, most + 1)
    int most;                     // tokens of the largest micro-batch
    SafeTensors *init;
} Golden;

static void golden_config(Golden *g, const GoldenCase *gc)
{
    Error e;
    const char *own[] = {"test", "--preset",        gc->preset, "--vocab-size",    "61", "--micro-batches",
                         "2",    "--num-scheduled", "5",        "--num-extension", "1"};
    const char *argv[] = {"test",        "--preset",
                          gc->preset,    "--ns",
                          gc->ns,        "--model-dim",
                          gc->model_dim, "--num-heads",
                          gc->num_heads, "--mlp-dim",
                          gc->mlp_dim,   "--vocab-size",
                          "61",          "--micro-batch-tokens",
                          "64",          "--micro-batches",
                          "2",           "--block-size",
                          "4",           "--num-scheduled",
                          "6",           "--num-extension",
                          "2",           "--head",
                          "bf16",        "--val-tokens",
                          "128"};
    const char *growing[][2] = {{"stage-tokens", "32,64,96"}, {"num-scheduled", "5"}, {"num-extension", "1"}};
    int count = gc->own ? sizeof own / sizeof *own : sizeof argv / sizeof *argv;
    if (!config_parse(&g->config, count, (char **)(gc->own ? own : argv), &e))
        fatal(1, "%s", e.text);
    for (int i = 0; i < 3 && gc->growing; i++) {
        if (!config_set(&g->config, growing[i][0], growing[i][1], &e))
            fatal(1, "%s", e.text);
    }
}

// Activations and batch for micro-batches of N tokens.
static void golden_size(Golden *g, int N)
{
    if (g->batch.N == N)
        return;
    if (g->batch.N)
        batch_free(&g->batch);
    batch_alloc(&g->batch, N, NULL);
    free(g->block);
    g->block = xcalloc((size_t)block_ints(N, &g->batch.tables), sizeof *g->block);
    acts_place(&g->acts, &g->model, N, true, g->memory);
}

static void golden_open(Golden *g, const GoldenCase *gc)
{
    memset(g, 0, sizeof *g);
    g->c = gc;
    golden_config(g, gc);
    const Config *c = &g->config;
    int N = g->most = schedule_most_tokens(c), d = c->model_dim;
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = N,
                               .eval_tokens = N,
                               .dim = d,
                               .heads = c->num_heads,
                               .mlp_dim = c->mlp_dim,
                               .vocab_padded = 128});
    model_describe(&g->model, c);
    model_allocate(&g->model, true);
    optimizer_create(&g->optimizer, &g->model);
    g->optimizer.step = &g->step;
    size_t bytes = acts_bytes(&g->model, N, true),
           updates = optimizer_workspace_bytes(&g->optimizer, &g->model);
    g->memory = device_alloc(bytes + updates, "activations");
    g->optimizer.ns_workspace = g->memory + bytes;
    rope_start(&g->rope, c);
    size_t angles = (size_t)N * (size_t)g->rope.count;
    g->cos = device_alloc(angles * sizeof(floatX), "rope");
    g->sin = device_alloc(angles * sizeof(floatX), "rope");
    rope_tables(NULL, g->cos, g->sin, g->rope.frequency, NULL, N, d / c->num_heads);
    golden_size(g, N);
    char *own = format_string("-%s", gc->preset), *init = format_string("init%s", gc->own ? own : gc->suffix),
         *batches = format_string("batches%s", gc->own       ? own
                                               : gc->growing ? "-2025-11-29"
                                                             : "");
    SafeTensors *st = open_golden(batches);
    g->tokens = read_golden(st, "tokens", NULL);
    g->cu_seqlens = read_golden(st, "cu_seqlens", NULL);
    safetensors_close(st);
    g->init = open_golden(init);
    free(own);
    free(init);
    free(batches);
}

static void golden_close(Golden *g)
{
    optimizer_free(&g->optimizer);
    model_free(&g->model);
    device_free(g->memory);
    device_free(g->cos);
    device_free(g->sin);
    batch_free(&g->batch);
    free(g->block);
    free(g->tokens);
    free(g->cu_seqlens);
    safetensors_close(g->init);
    backend_close();
}

static SafeTensors *golden_steps(const Golden *g)
{
    char *name = format_string("steps-%s-%s%s", g->c->preset, g->c->ns, g->c->suffix);
    SafeTensors *st = open_golden(name);
    printf("# %s\n", name);
    free(name);
    return st;
}

// Parameters that the case does not train stay zero.
static bool golden_trains(const Golden *g, const Param *a)
{
    return !g->c->gates_only || (a->spec->update.kind == NORMUON && a->spec->sharding == REPLICATED);
}

static void golden_load_weights(Golden *g)
{
    Params *p = &g->model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        int64_t n;
        if (!golden_trains(g, a))
            continue;
        float *x = golden_values(g->init, "", a->name, &n);
        if (n != param_elements(a))
            fatal(1, "golden %s has %lld elements", a->name, (long long)n);
        void *to = param_data(p, a);
        for (int64_t k = 0; k < n; k++) {
            if (param_element_size(a) == 4)
                ((float *)to)[k] = x[k];
            else
                ((floatX *)to)[k] = float_to_x(x[k]);
        }
        free(x);
    }
    params_round(p, NULL);
}

// One micro-batch of step t: forward and backward; returns the summed loss.
static double golden_batch(Golden *g, int t, int micro)
{
    Batch *b = &g->batch;
    const int32_t *tokens = g->tokens + (t * 2 + micro) * (g->most + 1),
                  *cu = g->cu_seqlens + (t * 2 + micro) * (g->most + 1);
    AttentionSetting at = {.window_short =
                               window_tokens(&g->config, schedule_stage(&g->config, t).window_short),
                           .window_long = window_tokens(&g->config, g->rope.window),
                           .scale = (float)g->rope.scale,
                           .cos = g->cos,
                           .sin = g->sin};
    memcpy(b->tokens, tokens, (size_t)b->N * 4);
    memcpy(b->targets, tokens + 1, (size_t)b->N * 4);
    for (b->num_docs = 0; cu[b->num_docs] < b->N; b->num_docs++)
        b->cu_seqlens[b->num_docs] = cu[b->num_docs];
    b->cu_seqlens[b->num_docs] = b->N;
    batch_complete(b);
    const float one = 1;
    DeviceBatch device = block_batch(g->block, b, block_pack(g->block, b));
    device.num_targets = 1;
    device.target_weight = &one;
    model_train_batch(&g->model, &g->acts, &device, &at, g->loss_device, micro ? LAST_OF_STEP : FIRST_OF_STEP,
                      NULL);
    return g->loss_device[0];
}

// Forward and backward of all micro-batches of step t. loss (2) out.
static void golden_gradients(Golden *g, int t, double *loss)
{
    const Config *c = &g->config;
    if (rope_follow_window(&g->rope, c, schedule_window(c, t)))
        rope_tables(NULL, g->cos, g->sin, g->rope.frequency, NULL, g->most, c->model_dim / c->num_heads);
    golden_size(g, schedule_stage(c, t).micro_batch_tokens);
    model_prepare(&g->model, &g->acts, NULL);
    for (int micro = 0; micro < 2; micro++)
        loss[micro] = golden_batch(g, t, micro);
    model_finish_gradients(&g->model, &g->acts, NULL);
}

// In place of golden_gradients: those of the gates from the file.
static void golden_given_gradients(Golden *g, int t)
{
    Params *p = &g->model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (!golden_trains(g, a))
            continue;
        int64_t n = param_elements(a);
        float *x = golden_values(g->init, "grad.", a->name, NULL);
        memcpy(param_grad(p, a), x + t * n, (size_t)n * sizeof *x);
        free(x);
    }
}

static void golden_update(Golden *g, int t)
{
    g->step = schedule_step_params(&g->config, t);
    optimizer_step(&g->optimizer, &g->model, g->c->gates_only ? 0 : t,
                   NULL); // step 0 updates NorMuon's parameters alone
}

static float param_value(const Params *p, const Param *a, int64_t i)
{
    void *x = param_data(p, a);
    return param_element_size(a) == 4 ? ((float *)x)[i] : x_to_float(((floatX *)x)[i]);
}

// The sample rule of the golden files: indices (i * stride) mod n.
static int64_t gcd(int64_t a, int64_t b) { return b ? gcd(b, a % b) : a; }
static int64_t sample_stride(int64_t n)
{
    int64_t s = max_i64(1, (int64_t)(0.618 * (double)n));
    while (gcd(s, n) != 1)
        s++;
    return s;
}

// The checks of a build, on everything that there are golden files for.
static void golden_all(void (*gradients)(const GoldenCase *c), void (*steps)(const GoldenCase *c))
{
    static const char *const variants[] = {"kj", "you", "polar", "gram", "turbo", "turbo-gram"};
    comm_open(); // one rank
    gradients(&(GoldenCase){.preset = "2025-10-27", .ns = "polar", GOLDEN_SIZES});
    gradients(&(GoldenCase){.preset = "2025-11-18", .ns = "polar", GOLDEN_SIZES});
    steps(&(GoldenCase){.preset = "2025-10-27", .ns = "polar", GOLDEN_SIZES});
    steps(&(GoldenCase){.preset = "2025-11-10", .ns = "polar", GOLDEN_SIZES});
    for (int i = 0; i < 6; i++)
        steps(&(GoldenCase){.preset = "2025-11-18", .ns = variants[i], GOLDEN_SIZES});
    // Matrices of more rows than columns: the MLP's, and the gates of more than 12 heads.
    steps(&(GoldenCase){.preset = "2025-11-18",
                        .ns = "polar",
                        .suffix = "-narrow-mlp",
                        .model_dim = "32",
                        .num_heads = "4",
                        .mlp_dim = "16"});
    steps(&(GoldenCase){.preset = "2025-11-18",
                        .ns = "polar",
                        .suffix = "-13-heads",
                        .model_dim = "104",
                        .num_heads = "13",
                        .mlp_dim = "16",
                        .gates_only = true});
}
