// Runs the networks of the golden files 2026-* (format: dev/reference/README.md) and brings their tensors
// into the order of the files.
#pragma once
#include "dev/test/golden_file.h"
#include "llmc/dist/comm.h"
#include "llmc/model/model.h"

enum { GOLDEN_2026_STEPS = 6, GOLDEN_2026_MOST = 64 }; // tokens of the largest micro-batch

typedef struct {
    const char *files; // 2026, 2026-05-27 or 2026-08
    Config config;
    Model model;
    Acts acts, eval;
    char *memory, *eval_memory;
    Rope rope;
    floatX *cos, *sin, *cos_paired, *sin_paired;
    StepParams step;
    float scale_post[2][MAX_LAYERS]; // that each micro-batch of the last step had, with delayed scales
    char *apart; // memory in which no two tensors of training share a place, owned here; NULL: not asked for
    void (*behind)(int t, int micro); // NULL, or called behind each micro-batch
    SafeTensors *init, *batches;
    int32_t *tokens, *cu_seqlens, *bigram_rows, *sign_rows, *prefix;
    uint32_t *impossible; // of the last validation, where the file has a mask; else NULL
    // of a batch
    int32_t targets_prefix[GOLDEN_2026_MOST];
    struct {
        int32_t order[GOLDEN_2026_MOST], row[GOLDEN_2026_MOST], start[GOLDEN_2026_MOST + 1], count;
    } by_token, by_bigram;
    int32_t *table, *table_paired;
} Golden2026;

// ---- tensors in the order of the files --------------------------------------------------------------------

// Place of element i of a parameter in the tensor of the file that holds it.
static int64_t place_in_file(const Param *a, int64_t i)
{
    int64_t matrix = a->rows * a->cols, r = i % matrix / a->cols, c = i % a->cols;
    int64_t within = a->spec->file.transposed ? c * a->rows + r : r * a->cols + c;
    return a->file_first * matrix + i / matrix * matrix + within;
}

static void store_value(const Params *p, const Param *a, int64_t i, float x)
{
    void *to = param_data(p, a);
    if (param_element_size(a) == 4)
        ((float *)to)[i] = x;
    else
        ((floatX *)to)[i] = float_to_x(x);
}

// The file may end behind the last row that its batches have.
static void load_signs(Golden2026 *g)
{
    int64_t n;
    const Param *a = params_of(&g->model.params, ROLE_SIGNS, 0);
    float *x = read_golden(g->batches, "signs", &n);
    uint32_t *bits = param_data(&g->model.params, a);
    for (int64_t i = 0; i < n; i++)
        bits[i / a->cols * ceil_div(a->cols, 32) + i % a->cols / 32] |= (uint32_t)(x[i] < 0)
                                                                        << (i % a->cols % 32);
    free(x);
}

static void golden_2026_weights(Golden2026 *g)
{
    Params *p = &g->model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (a->spec->role == ROLE_SIGNS || param_now(p, a) != a)
            continue;
        float *x = golden_values(g->init, "", a->spec->name, NULL);
        for (int64_t k = 0; k < param_elements(a); k++)
            store_value(p, a, k, x[place_in_file(a, k)]);
        free(x);
    }
    params_round(p, NULL);
    load_signs(g);
}

// The gradient of a tensor of the file, `count` elements; zero where no parameter is.
static inline float *golden_2026_gradient(const Golden2026 *g, const char *name, int64_t count)
{
    const Params *p = &g->model.params;
    float *whole = xcalloc((size_t)count, sizeof *whole);
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (strcmp(a->spec->name, name) || a->spec->update.kind == FIXED || param_now(p, a) != a)
            continue;
        const float *grad = param_grad(p, a);
        for (int64_t k = 0; k < param_elements(a); k++)
            whole[place_in_file(a, k)] = grad[k];
    }
    return whole;
}

// ---- a run ------------------------------------------------------------------------------------------------

static void golden_2026_rope(Golden2026 *g)
{
    int e = record_key_width(&g->config);
    rope_tables(NULL, g->cos, g->sin, g->rope.frequency, NULL, GOLDEN_2026_MOST, e);
    rope_tables(NULL, g->cos_paired, g->sin_paired, g->rope.frequency, NULL, 2 * GOLDEN_2026_MOST, e);
}

// The activations of N tokens, each in memory of its own, all of which is there behind the backward.
static void place_apart(Golden2026 *g, int N)
{
    Plan *plan = xcalloc(1, sizeof *plan);
    size_t size = 0;
    acts_plan(plan, &g->model, N, true);
    for (int i = 0; i < plan->count; i++) {
        plan->tensor[i].offset = size;
        size += plan->tensor[i].bytes;
    }
    free(g->apart);
    g->apart = xcalloc(size, 1);
    acts_follow(&g->acts, &g->model, N, true, plan, g->apart);
    free(plan);
}

static void golden_2026_place(Golden2026 *g, int N)
{
    if (g->behind)
        place_apart(g, N);
    else
        acts_place(&g->acts, &g->model, N, true, g->memory);
    acts_place(&g->eval, &g->model, N, false, g->eval_memory);
}

static SafeTensors *golden_2026_file(const Golden2026 *g, const char *what)
{
    char *name = format_string("%s-%s", g->files, what);
    SafeTensors *st = open_golden(name);
    free(name);
    return st;
}

// Bytes of the file, as many to a row as a row has words.
static uint32_t *golden_2026_mask(const Golden2026 *g)
{
    int64_t n;
    if (!safetensors_find(g->batches, "mask"))
        return NULL;
    int32_t *bytes = read_golden(g->batches, "mask", &n);
    uint32_t *bits = xcalloc((size_t)n / 4, sizeof *bits);
    for (int64_t i = 0; i < n; i++)
        bits[i / 4] |= (uint32_t)bytes[i] << i % 4 * 8;
    free(bytes);
    return bits;
}

// options: more of them, ends with a NULL
static void golden_2026_open_with(Golden2026 *g, const char *preset, const char *files, char **options)
{
    Error e;
    char *argv[32] = {"test", "--preset", (char *)preset, "--vocab-size", "61"};
    int argc = 5;
    memset(g, 0, sizeof *g);
    g->files = files;
    while (*options)
        argv[argc++] = *options++;
    if (!config_parse(&g->config, argc, argv, &e))
        fatal(1, "%s", e.text);
    const Config *c = &g->config;
    const int N = GOLDEN_2026_MOST;
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = N,
                               .eval_tokens = N,
                               .dim = c->model_dim,
                               .heads = c->num_heads,
                               .mlp_dim = c->mlp_dim,
                               .vocab_padded = config_vocab_padded(c),
                               .fp8_head = c->head == HEAD_FP8,
                               .fp8_mlp = c->mlp == MLP_FP8});
    model_describe(&g->model, c);
    model_allocate(&g->model, true);
    g->memory = device_alloc(acts_bytes(&g->model, N, true), "activations");
    g->eval_memory = device_alloc(acts_bytes(&g->model, N, false), "activations");
    rope_start(&g->rope, c);
    size_t angles = (size_t)N * (size_t)g->rope.count * sizeof(floatX);
    g->cos = device_alloc(angles, "rope");
    g->sin = device_alloc(angles, "rope");
    g->cos_paired = device_alloc(2 * angles, "rope");
    g->sin_paired = device_alloc(2 * angles, "rope");
    g->table = xcalloc((size_t)attention_table_ints(N, 0), 4);
    g->table_paired = xcalloc((size_t)attention_table_ints(2 * N, 0), 4);
    g->init = golden_2026_file(g, "init");
    g->batches = golden_2026_file(g, "batches");
    g->tokens = read_golden(g->batches, "tokens", NULL);
    g->cu_seqlens = read_golden(g->batches, "cu_seqlens", NULL);
    g->bigram_rows = read_golden(g->batches, "bigram_rows", NULL);
    g->sign_rows = read_golden(g->batches, "sign_rows", NULL);
    g->prefix = read_golden(g->batches, "prefix", NULL);
    g->impossible = golden_2026_mask(g);
    golden_2026_rope(g);
}

// Record 85 at the sizes of the files 2026-05-27-*.  mlp: of --mlp
static inline void golden_2026_open_85(Golden2026 *g, char *mlp)
{
    char *options[] = {"--model-dim",
                       "48",
                       "--mlp-dim",
                       "64",
                       "--block-size",
                       "3",
                       "--micro-batches",
                       "2",
                       "--stage-tokens",
                       "16,48,64",
                       "--stage-documents",
                       "20,40,40",
                       "--micro-batch-tokens",
                       "64",
                       "--num-scheduled",
                       "5",
                       "--num-extension",
                       "3",
                       "--val-tokens",
                       "512",
                       "--head",
                       "bf16",
                       "--mlp",
                       mlp,
                       NULL};
    golden_2026_open_with(g, "2026-05-27", "2026-05-27", options);
}

// files 2026-05-27: the preset of that name
static inline void golden_2026_open(Golden2026 *g, const char *preset, const char *files)
{
    if (!strcmp(files, "2026-05-27"))
        golden_2026_open_85(g, "bf16");
    else
        golden_2026_open_with(g, preset, files, (char *[]){NULL});
}

static void golden_2026_close(Golden2026 *g)
{
    void *device[] = {g->memory, g->eval_memory, g->cos, g->sin, g->cos_paired, g->sin_paired},
         *host[] = {g->tokens, g->cu_seqlens,   g->bigram_rows, g->sign_rows, g->prefix,
                    g->table,  g->table_paired, g->impossible,  g->apart};
    model_free(&g->model);
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        device_free(device[i]);
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        free(host[i]);
    safetensors_close(g->init);
    safetensors_close(g->batches);
    backend_close();
}

// The distinct numbers among `of` (N), rising, and where they stand.
#define SORT_ROWS(rows, of, N) sort_rows((rows)->order, (rows)->row, (rows)->start, &(rows)->count, of, N)
static void sort_rows(int32_t *order, int32_t *row, int32_t *start, int32_t *count, const int32_t *of, int N)
{
    int placed = 0;
    *count = 0;
    for (int value = 0; placed < N; value++) {
        int before = placed;
        for (int t = 0; t < N; t++) {
            if (of[t] == value)
                order[placed++] = t;
        }
        if (placed == before)
            continue;
        row[*count] = value;
        start[(*count)++] = before;
    }
    start[*count] = N;
}

static void build_tables(Golden2026 *g, const int32_t *cu, int N, DeviceBatch *b)
{
    int32_t boundaries[GOLDEN_2026_MOST + 1], doubled[GOLDEN_2026_MOST + 1];
    int documents = 0;
    for (; cu[documents] < N; documents++) {
        boundaries[documents] = cu[documents];
        doubled[documents] = 2 * cu[documents];
    }
    boundaries[documents] = N;
    doubled[documents] = 2 * N;
    b->table = g->table;
    b->slots = attention_table_build(g->table, boundaries, documents, N, 0);
    b->table_paired = g->table_paired;
    b->slots_paired = attention_table_build(g->table_paired, doubled, documents, 2 * N, 0);
}

// Micro-batch `micro` of step t. Valid until the next one.
static DeviceBatch golden_2026_batch(Golden2026 *g, int t, int micro)
{
    int N = schedule_stage(&g->config, t).micro_batch_tokens, batch = 2 * t + micro, most = GOLDEN_2026_MOST;
    const int32_t *tokens = g->tokens + batch * (most + 1), *bigram = g->bigram_rows + batch * most;
    DeviceBatch b = {.N = N,
                     .tokens = tokens,
                     .targets = tokens + 1,
                     .num_targets = schedule_stage(&g->config, t).targets.count,
                     .target_weight = g->step.target_weight,
                     .prefix = g->targets_prefix,
                     .prefix_weight = &g->step.prefix_weight,
                     .number = micro,
                     .exact_scales = &g->step.exact_scales,
                     .bigram_rows = bigram,
                     .sign_rows = g->sign_rows + batch * most};
    for (int i = 0; i < N; i++)
        g->targets_prefix[i] = g->prefix[tokens[i + 1]];
    SORT_ROWS(&g->by_token, tokens, N);
    SORT_ROWS(&g->by_bigram, bigram, N);
    b.rows = (TokenRows){g->by_token.order, g->by_token.row, g->by_token.start, &g->by_token.count};
    b.bigram = (TokenRows){g->by_bigram.order, g->by_bigram.row, g->by_bigram.start, &g->by_bigram.count};
    build_tables(g, g->cu_seqlens + batch * (most + 1), N, &b);
    return b;
}

static AttentionSetting golden_2026_setting(const Golden2026 *g, int t)
{
    return (AttentionSetting){.window_short =
                                  window_tokens(&g->config, schedule_stage(&g->config, t).window_short),
                              .window_long = window_tokens(&g->config, g->rope.window),
                              .scale = (float)g->rope.scale,
                              .cos = g->cos,
                              .sin = g->sin,
                              .cos_paired = g->cos_paired,
                              .sin_paired = g->sin_paired};
}

// Forward and backward of the micro-batches of step t.  loss (2) out
static inline void golden_2026_gradients(Golden2026 *g, int t, double *loss)
{
    const Config *c = &g->config;
    if (rope_follow_window(&g->rope, c, schedule_window(c, t)))
        golden_2026_rope(g);
    golden_2026_place(g, schedule_stage(c, t).micro_batch_tokens);
    g->step = schedule_step_params(c, t);
    AttentionSetting at = golden_2026_setting(g, t);
    model_prepare(&g->model, &g->acts, NULL);
    for (int micro = 0; micro < 2; micro++) {
        DeviceBatch b = golden_2026_batch(g, t, micro);
        float sum;
        for (int i = 0; i < g->model.record->num_layers && g->model.mlp.sets; i++)
            g->scale_post[micro][i] = model_delayed_row(&g->model, 1 + micro % g->model.mlp.sets)[i];
        model_train_batch(&g->model, &g->acts, &b, &at, &sum, micro ? LAST_OF_STEP : FIRST_OF_STEP, NULL);
        loss[micro] = sum;
        if (g->behind)
            g->behind(t, micro);
    }
    model_finish_gradients(&g->model, &g->acts, NULL);
}

// Validation loss of micro-batch 0 of step t.
static inline double golden_2026_validation(Golden2026 *g, int t, bool final_window)
{
    AttentionSetting at = golden_2026_setting(g, t);
    float sum;
    golden_2026_place(g, schedule_stage(&g->config, t).micro_batch_tokens);
    if (final_window)
        at.window_long = window_tokens(&g->config, g->config.window_final);
    DeviceBatch b = golden_2026_batch(g, t, 0);
    model_prepare(&g->model, &g->eval, NULL);
    model_eval_batch(&g->model, &g->eval, &b, &at,
                     &(EvalLoss){.count = b.N,
                                 .sum = &sum,
                                 .impossible = final_window ? g->impossible : NULL},
                     NULL);
    return sum;
}

// The sample rule of the golden files: indices (i * stride) mod n.
static inline int64_t gcd_2026(int64_t a, int64_t b) { return b ? gcd_2026(b, a % b) : a; }
static inline int64_t sample_stride_2026(int64_t n)
{
    int64_t s = max_i64(1, (int64_t)(0.618 * (double)n));
    while (gcd_2026(s, n) != 1)
        s++;
    return s;
}
