// Attention of the CUDA backend, by cuDNN and by the program's own kernels, against the CPU backend.
//
//   test_attention_gpu [--portable] [DIR [quick|small]]     --portable: what is chosen then; DIR holds
//   libref_bf16.so and
//                                             libref_fp32.so: the CPU backend in its two builds (default
//                                             build/ref); quick: the fastest own kernels alone, without the
//                                             cases that take the CPU seconds small: one small case of them
//                                             and no kernel of a library, for compute-sanitizer
//
// The same inputs, representable in bf16, go through the GPU, the fp32 CPU build (the truth) and the bf16 CPU
// build (what a plain implementation with the same storage gives). The GPU's distance from the truth
// (relative, in the 2-norm) may be at most twice the plain one's, plus FP32_ATOM for what the order of fp32
// sums may change; sums over tokens are compared with those of the GPU's own terms. Each case runs over
// outputs full of NaN with NaN behind all buffers, after a run on NaN alone that leaves NaN in the scratch
// memory.
#include "dev/test/attention_gpu_cases.h"

// ---- running on a CPU build -------------------------------------------------------------------------------

typedef struct {
    double *x[ALL]; // outputs, from OUT_YG on; NULL: not computed
    double *dqkv;   // (N, 3 d) of qkv_backward, when the case has turns
} Result;

static void free_result(Result *r)
{
    for (int i = INPUTS; i < ALL; i++)
        free(r->x[i]);
    free(r->dqkv);
}

// What follows attention's backward pass, of its results; p: those tensors.
static double *turn_back_on_cpu(const Case *c, Which w, void *const *p)
{
    size_t width = w == TRUTH ? 4 : 2, n = (size_t)elements(c, QUERY);
    float lambda[2] = {0.5f, 0.25f}, dlambda[2] = {0};
    void *dqkv = xcalloc(3 * n, width), *table[TURNS];
    double *x = xcalloc(3 * n, sizeof *x);
    for (int i = COS; i <= SIN; i++) {
        table[i] = xcalloc((size_t)turn_elements(c, i), width);
        for (int64_t k = 0; k < turn_elements(c, i); k++) {
            if (w == TRUTH)
                ((float *)table[i])[k] = c->turn[i][k];
            else
                ((bf16 *)table[i])[k] = float_to_bf16(c->turn[i][k]);
        }
    }
    ops[w].qkv_backward(NULL,
                        &(QkvBackward){dqkv, dlambda, p[OUT_DQ], p[OUT_DK], p[OUT_DV], p[QUERY], p[KEY],
                                       c->turn[RSTD], c->turn[RSTD], p[VALUE], p[INPUT], c->tokens, lambda,
                                       table[COS], table[SIN]},
                        c->N, c->H, c->e);
#pragma omp parallel for
    for (size_t k = 0; k < 3 * n; k++)
        x[k] = w == TRUTH ? ((float *)dqkv)[k] : bf16_to_float(((bf16 *)dqkv)[k]);
    free(dqkv);
    free(table[COS]);
    free(table[SIN]);
    return x;
}

static Result run_cpu(const Case *c, Which w)
{
    size_t width = w == TRUTH ? 4 : 2;
    void *p[TENSORS];
    Result r = {{NULL}, NULL};
    OpSizes sizes = {.tokens = c->N,
                     .eval_tokens = c->N,
                     .dim = c->H * c->e,
                     .heads = c->H,
                     .mlp_dim = 16,
                     .vocab_padded = 128};
    ops[w].backend_open(0);
    ops[w].backend_reserve(&sizes);
    for (int i = 0; i < TENSORS; i++) {
        p[i] = xcalloc((size_t)elements(c, i), width);
        if (i >= INPUTS)
            continue;
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++) {
            if (w == TRUTH)
                ((float *)p[i])[k] = c->input[i][k];
            else
                ((bf16 *)p[i])[k] = float_to_bf16(c->input[i][k]);
        }
    }
    float *lse = xcalloc((size_t)elements(c, LSE), sizeof *lse),
          *dgate = xcalloc((size_t)elements(c, LSE), sizeof *dgate),
          *dgate_w = xcalloc((size_t)elements(c, DGATE_W), sizeof *dgate_w), *fp32[] = {lse, dgate, dgate_w};
    int32_t *table = xcalloc((size_t)ops[w].attention_table_ints(c->N, 0), sizeof *table);
    int slots = ops[w].attention_table_build(table, c->cu, c->documents, c->N, 0);
    ops[w].attention_forward(NULL, p[OUT_YG], lse, p[QUERY], p[KEY], p[VALUE], p[INPUT], p[GATE_W], table,
                             slots, SCALE, c->window, c->N, c->H, c->e);
    AttentionBackward a = {p[OUT_DQ], p[OUT_DK], p[OUT_DV], dgate,    dgate_w,  p[DYG],    p[OUT_YG],
                           lse,       p[QUERY],  p[KEY],    p[VALUE], p[INPUT], p[GATE_W], NULL};
    if (c->backward)
        ops[w].attention_backward(NULL, &a, table, slots, SCALE, c->window, c->N, c->H, c->e);
    for (int i = OUT_YG; i < ALL; i++) {
        if (!c->backward && i != OUT_YG && i != LSE)
            continue;
        r.x[i] = xcalloc((size_t)elements(c, i), sizeof(double));
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++)
            r.x[i][k] = i >= LSE     ? fp32[i - LSE][k]
                        : w == TRUTH ? ((float *)p[i])[k]
                                     : bf16_to_float(((bf16 *)p[i])[k]);
    }
    if (c->turn[RSTD])
        r.dqkv = turn_back_on_cpu(c, w, p);
    for (int i = 0; i < TENSORS; i++)
        free(p[i]);
    free(lse);
    free(dgate);
    free(dgate_w);
    free(table);
    ops[w].backend_close();
    return r;
}

// ---- running on the GPU -----------------------------------------------------------------------------------

typedef struct {
    void *device[ALL], *host[ALL]; // GUARD_ROWS rows behind the last token; host: after fetch()
    size_t bytes[ALL], guarded[ALL];
    int32_t *table, *host_table;
    int slots;
} Gpu;

static void poison(Gpu *g, int i)
{
    memset(g->host[i], 0xff, g->guarded[i]); // NaN in bf16 and fp32
    copy_to_device(stream, g->device[i], g->host[i], g->guarded[i]);
}

static void upload_table(Gpu *g, const Case *c)
{
    g->slots = attention_table_build(g->host_table, c->cu, c->documents, c->N, 0);
    copy_to_device(stream, g->table, g->host_table, (size_t)attention_table_ints(c->N, 0) * sizeof(int32_t));
    stream_synchronize(stream);
}

static void upload_inputs(Gpu *g, const Case *c)
{
    for (int i = 0; i < INPUTS; i++) {
        memset(g->host[i], 0xff, g->guarded[i]);
#pragma omp parallel for
        for (int64_t k = 0; k < elements(c, i); k++)
            ((bf16 *)g->host[i])[k] = float_to_bf16(c->input[i][k]);
        copy_to_device(stream, g->device[i], g->host[i], g->guarded[i]);
    }
    stream_synchronize(stream);
}

static Gpu gpu_open(const Case *c)
{
    Gpu g;
    for (int i = 0; i < ALL; i++) {
        size_t width = i >= LSE ? 4 : 2;
        g.bytes[i] = (size_t)elements(c, i) * width;
        g.guarded[i] = g.bytes[i] + GUARD_ROWS * (size_t)(c->H * c->e) * width;
        g.device[i] = device_alloc(g.guarded[i], names[i]);
        g.host[i] = xcalloc(g.guarded[i], 1);
        poison(&g, i);
    }
    size_t ints = (size_t)attention_table_ints(c->N, 0);
    g.table = device_alloc(ints * sizeof(int32_t), "table");
    g.host_table = xcalloc(ints, sizeof(int32_t));
    upload_table(&g, c);
    return g;
}

static void gpu_close(Gpu *g)
{
    for (int i = 0; i < ALL; i++)
        device_free(g->device[i]), free(g->host[i]);
    device_free(g->table);
    free(g->host_table);
}

static void queue_forward(const Gpu *g, const Case *c, int slots)
{
    void *const *p = g->device;
    attention_forward(stream, p[OUT_YG], p[LSE], p[QUERY], p[KEY], p[VALUE], p[INPUT], p[GATE_W], g->table,
                      slots, SCALE, c->window, c->N, c->H, c->e);
}

// next: what a qkv_backward that follows is called with; NULL: dq and dk are wanted
static void queue_backward(const Gpu *g, const Case *c, int slots, const QkvBackward *next)
{
    void *const *p = g->device;
    AttentionBackward a = {next ? NULL : p[OUT_DQ],
                           next ? NULL : p[OUT_DK],
                           next ? (floatX *)next->dv : p[OUT_DV],
                           p[DGATE],
                           p[DGATE_W],
                           p[DYG],
                           p[OUT_YG],
                           p[LSE],
                           p[QUERY],
                           p[KEY],
                           p[VALUE],
                           p[INPUT],
                           p[GATE_W],
                           next};
    attention_backward(stream, &a, g->table, slots, SCALE, c->window, c->N, c->H, c->e);
}

static void fetch(Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        copy_to_host(stream, g->host[i], g->device[i], g->guarded[i]);
    stream_synchronize(stream);
}

static void run_gpu(Gpu *g, const Case *c, int slots)
{
    for (int i = INPUTS; i < ALL; i++)
        poison(g, i);
    device_zero(stream, g->device[DGATE_W], g->bytes[DGATE_W]); // it is added to
    queue_forward(g, c, slots);
    if (c->backward)
        queue_backward(g, c, slots, NULL);
    fetch(g);
}

static bool guards_untouched(const Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        for (size_t at = g->bytes[i]; at < g->guarded[i]; at++)
            if (((unsigned char *)g->host[i])[at] != 0xff)
                return false;
    return true;
}

// Copies of the outputs now in g->host; owned by the caller.
static void keep(void *kept[ALL], const Gpu *g)
{
    for (int i = INPUTS; i < ALL; i++)
        kept[i] = memcpy(xcalloc(g->guarded[i], 1), g->host[i], g->guarded[i]);
}
static void release(void *kept[ALL])
{
    for (int i = INPUTS; i < ALL; i++)
        free(kept[i]);
}

// All outputs; cuDNN adds up dq in no fixed order, so only its last bits may differ.
static bool same_bits(void *const a[ALL], void *const b[ALL], const Gpu *g, bool dq_too)
{
    for (int i = INPUTS; i < ALL; i++)
        if ((i != OUT_DQ || dq_too) && memcmp(a[i], b[i], g->bytes[i]))
            return false;
    return true;
}

// ---- comparing --------------------------------------------------------------------------------------------

static double norm(const double *x, const double *minus, int64_t n)
{
    double sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int64_t k = 0; k < n; k++) {
        double d = x[k] - (minus ? minus[k] : 0);
        sum += d * d;
    }
    return sqrt(sum);
}

static double *decoded(const Gpu *g, const Case *c, int i)
{
    double *x = xcalloc((size_t)elements(c, i), sizeof *x);
#pragma omp parallel for
    for (int64_t k = 0; k < elements(c, i); k++)
        x[k] = i >= LSE ? ((float *)g->host[i])[k] : bf16_to_float(((bf16 *)g->host[i])[k]);
    return x;
}

// dgate_w beside the sums of the GPU's dgate, which is fp32 and compared by itself, each relative to its
// terms' magnitudes: the largest distance. Beside the plain dgate_w a few dozen numbers would be compared
// that inherit thousands of roundings of dgate:
// their distance is twice the plain one's by chance when dgate's is 1.6 times.
static double gate_sums_off(const Gpu *g, const Case *c)
{
    const float *dgate = g->host[DGATE], *dgate_w = g->host[DGATE_W], *h = c->input[INPUT];
    double worst = 0;
    for (int p = 0; p < c->H * GATE_WIDTH; p++) {
        double sum = 0, size = 0;
        for (int64_t t = 0; t < c->N; t++) {
            double term =
                (double)dgate[t * c->H + p / GATE_WIDTH] * (double)h[t * c->H * c->e + p % GATE_WIDTH];
            sum += term;
            size += fabs(term);
        }
        worst = larger_error(worst, fabs(dgate_w[p] - sum) / (size > 0 ? size : 1));
    }
    return worst;
}

// Gradients of q and k vanish where every token sees itself alone; their errors are then measured against a
// tenth of dv.
static bool compare(const Gpu *g, const Case *c, const Result *plain, const Result *truth, char *text,
                    size_t size)
{
    bool good = true;
    text[0] = 0;
    for (int i = INPUTS; i < ALL; i++) {
        if (!truth->x[i] || i == DGATE_W)
            continue;
        double *x = decoded(g, c, i), scale = norm(truth->x[i], NULL, elements(c, i));
        if (i == OUT_DQ || i == OUT_DK)
            scale = fmax(scale, 0.1 * norm(truth->x[OUT_DV], NULL, elements(c, OUT_DV)));
        double error = norm(x, truth->x[i], elements(c, i)) / scale,
               allowed = norm(plain->x[i], truth->x[i], elements(c, i)) / scale;
        good &= error <= 2 * allowed + FP32_ATOM;
        size_t used = strlen(text);
        snprintf(text + used, size - used, "  %s %.2g (%.2g)", names[i], error, allowed);
        free(x);
    }
    if (!truth->x[DGATE_W])
        return good;
    double off = gate_sums_off(g, c);
    size_t used = strlen(text);
    snprintf(text + used, size - used, "  dgate_w %.2g", off);
    return good && off <= FP32_ATOM;
}

static float *turn_on_gpu(const Case *c, int i)
{
    int64_t n = turn_elements(c, i);
    float *p = device_alloc((size_t)n * sizeof *p, "turn");
    bf16 *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t k = 0; k < n; k++)
        x[k] = float_to_bf16(c->turn[i][k]);
    if (i == RSTD)
        copy_to_device(stream, p, c->turn[i], (size_t)n * sizeof *p);
    else
        copy_to_device(stream, p, x, (size_t)n * sizeof *x);
    stream_synchronize(stream);
    free(x);
    return p;
}

// dlambda of these dv, each beside the sum of its terms' magnitudes.
static void sum_lambdas(const Case *c, const bf16 *dv, double sum[2], double size[2])
{
    int d = c->H * c->e;
    sum[0] = sum[1] = size[0] = size[1] = 0;
#pragma omp parallel for reduction(+ : sum[:2], size[:2])
    for (int64_t k = 0; k < elements(c, VALUE); k++) {
        double g = bf16_to_float(dv[k]),
               x[2] = {c->input[VALUE][k], c->input[INPUT][(int64_t)c->tokens[k / d] * d + k % d]};
        for (int i = 0; i < 2; i++)
            sum[i] += g * x[i], size[i] += fabs(g * x[i]);
    }
}

// Gradients go on into qkv_backward without being written, dv among them in the second run, through the
// memory of the runs before:
// what it holds must not matter.
static bool check_fed(Gpu *g, const Case *c, const Result *plain, const Result *truth, char *text,
                      size_t size)
{
    void **p = g->device;
    int64_t n = 3 * elements(c, QUERY);
    float scalars[2][4], lambda[4] = {0.5f, 0.25f}, *turn[TURNS],
                         *on_device = device_alloc(sizeof lambda, "lambda, dlambda");
    bf16 *dqkv = device_alloc((size_t)n * sizeof *dqkv, "dqkv"), *host = xcalloc((size_t)n, sizeof *host);
    int32_t *tokens = device_alloc((size_t)c->N * sizeof *tokens, "tokens");
    double *x = xcalloc((size_t)n, sizeof *x), worst = 0,
           allowed = norm(plain->dqkv, truth->dqkv, n) / norm(truth->dqkv, NULL, n);
    for (int i = 0; i < TURNS; i++)
        turn[i] = turn_on_gpu(c, i);
    copy_to_device(stream, tokens, c->tokens, (size_t)c->N * sizeof *tokens);
    for (int run = 0; run < 2; run++) {
        memset(host, 0xff, (size_t)n * sizeof *host);
        copy_to_device(stream, dqkv, host, (size_t)n * sizeof *host);
        copy_to_device(stream, on_device, lambda, sizeof lambda);
        QkvBackward next = {dqkv,
                            on_device + 2,
                            NULL,
                            NULL,
                            run ? NULL : p[OUT_DV],
                            p[QUERY],
                            p[KEY],
                            turn[RSTD],
                            turn[RSTD],
                            p[VALUE],
                            p[INPUT],
                            tokens,
                            on_device,
                            (floatX *)turn[COS],
                            (floatX *)turn[SIN]};
        queue_backward(g, c, g->slots, &next);
        qkv_backward(stream, &next, c->N, c->H, c->e);
        copy_to_host(stream, host, dqkv, (size_t)n * sizeof *host);
        copy_to_host(stream, scalars[run], on_device, sizeof lambda);
        stream_synchronize(stream);
#pragma omp parallel for
        for (int64_t k = 0; k < n; k++)
            x[k] = bf16_to_float(host[k]);
        worst = larger_error(worst, norm(x, truth->dqkv, n) / norm(truth->dqkv, NULL, n));
    }
    double sum[2], magnitude[2], off = 0;
    copy_to_host(stream, g->host[OUT_DV], p[OUT_DV], g->bytes[OUT_DV]);
    stream_synchronize(stream);
    sum_lambdas(c, g->host[OUT_DV], sum, magnitude);
    for (int i = 0; i < 2; i++)
        off =
            isnan(scalars[0][2 + i]) ? INFINITY : fmax(off, fabs(scalars[0][2 + i] - sum[i]) / magnitude[i]);
    bool repeats = !memcmp(scalars[0], scalars[1], sizeof lambda);
    size_t used = strlen(text);
    snprintf(text + used, size - used, "  dqkv %.2g (%.2g)  dlambda %.2g%s", worst, allowed, off,
             repeats ? "" : ", NOT TWICE THE SAME");
    for (int i = 0; i < TURNS; i++)
        device_free(turn[i]);
    device_free(tokens);
    device_free(on_device);
    device_free(dqkv);
    free(host);
    free(x);
    return worst <= 2 * allowed + FP32_ATOM && off <= FP32_ATOM && repeats;
}

static void check_case(Case *c, const char *kernels, bool own)
{
    char text[512];
    void *first[ALL];
    make_inputs(c);
    if (c->backward && attention_feeds_qkv())
        make_turns(c);
    Result truth = run_cpu(c, TRUTH), plain = run_cpu(c, PLAIN);
    Gpu g = gpu_open(c);
    run_gpu(&g, c, g.slots); // NaN alone
    upload_inputs(&g, c);
    run_gpu(&g, c, g.slots);
    keep(first, &g);
    bool good = compare(&g, c, &plain, &truth, text, sizeof text), guards = guards_untouched(&g);
    run_gpu(&g, c, g.slots);
    bool again = same_bits(first, g.host, &g, own);
    run_gpu(&g, c, (int)max_i64(512, g.slots));
    bool more_slots = same_bits(first, g.host, &g, own);
    if (c->turn[RSTD])
        good &= check_fed(&g, c, &plain, &truth, text, sizeof text);
    ok(good && guards && again && more_slots, "%s: %s N=%d documents=%d H=%d e=%d window=%d:%s%s%s%s",
       kernels, c->name, c->N, c->documents, c->H, c->e, c->window, text,
       guards ? "" : "  WRITES BEHIND THE END", again ? "" : "  NOT THE SAME BITS TWICE",
       more_slots ? "" : "  OTHER BITS WITH MORE SLOTS");
    release(first);
    gpu_close(&g);
    free_result(&truth);
    free_result(&plain);
    free_inputs(c);
}

// A captured graph must follow a table that changes under it.
static void check_graph(const char *kernels, bool own)
{
    Case a = make_text_case("graph", 8192, 12, 2048, 6, 128, 896),
         b = make_text_case("graph", 8192, 31, 900, 6, 128, 896);
    void *eager[ALL];
    make_inputs(&b);
    Gpu g = gpu_open(&b);
    upload_inputs(&g, &b);
    run_gpu(&g, &b, g.slots);
    keep(eager, &g);
    upload_table(&g, &a);
    graph_begin(stream);
    queue_forward(&g, &a, g.slots);
    queue_backward(&g, &a, g.slots, NULL);
    Graph *graph = graph_end(stream);
    graph_launch(graph, stream);
    fetch(&g);
    bool differs = !same_bits(eager, g.host, &g, false);
    upload_table(&g, &b);
    for (int i = INPUTS; i < ALL; i++)
        poison(&g, i);
    device_zero(stream, g.device[DGATE_W], g.bytes[DGATE_W]);
    graph_launch(graph, stream);
    fetch(&g);
    ok(differs && same_bits(eager, g.host, &g, own) && guards_untouched(&g),
       "%s: a captured graph replayed with another table gives that table's result", kernels);
    graph_destroy(graph);
    release(eager);
    gpu_close(&g);
    free_inputs(&b);
}

// ---- the lists --------------------------------------------------------------------------------------------

static const char *reserve(AttentionKernels kernels, int tokens, int eval_tokens, int H, int e,
                           bool deterministic)
{
    attention_reserve(&(OpSizes){.tokens = tokens,
                                 .eval_tokens = eval_tokens,
                                 .dim = H * e,
                                 .heads = H,
                                 .deterministic = deterministic,
                                 .attention = kernels});
    printf("# %s\n", attention_description());
    return attention_description();
}

static const int edge_lengths[] = {1, 7, 900, 63, 64, 65, 127, 257, 128, 129, 191, 193, 256};
enum { NUM_EDGES = sizeof edge_lengths / sizeof *edge_lengths };

// repeatable: the same bits are asked for, of dq, too
static void check_widths(AttentionKernels kernels, const char *name, bool repeatable, const int *widths,
                         int count)
{
    static const int windows[] = {17, 129, 5000};
    for (int i = 0; i < count; i++) {
        reserve(kernels, 4096, 4096, 3, widths[i], repeatable);
        for (int w = 0; w < 3; w++) {
            Case c = make_case("edges", edge_lengths, NUM_EDGES, 3, widths[i], windows[w]);
            check_case(&c, name, repeatable);
        }
    }
}

static void check_kernels(AttentionKernels kernels, const char *name, bool repeatable)
{
    static const int windows[] = {0, 1, 17, 127, 128, 129, 895, 5000}, single[] = {1}, whole[] = {1000},
                     equal[] = {2048, 2048}, all[] = {TOKENS};
    static int ones[600];
    for (int i = 0; i < 600; i++)
        ones[i] = 1;
    reserve(kernels, TOKENS, EVAL_TOKENS, 6, 128, repeatable);
    for (int i = 0; i < 8; i++) {
        Case c = make_case("edges", edge_lengths, NUM_EDGES, 6, 128, windows[i]);
        check_case(&c, name, repeatable);
    }
    Case cases[] = {make_case("one token", single, 1, 6, 128, 896),
                    make_case("one document", whole, 1, 6, 128, 384),
                    make_case("documents of the full length", equal, 2, 6, 128, 2048),
                    make_text_case("text", TOKENS, 47, 2048, 6, 128, 896),
                    make_text_case("text, many documents", 20000, 140, 400, 6, 128, 384),
                    make_case("one document of all tokens", all, 1, 6, 128, 1408),
                    make_case("one-token documents", ones, 600, 6, 128, 896)};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!quick || cases[i].N < TOKENS)
            check_case(&cases[i], name, repeatable);
    static const int eval[] = {5, 33000, 6000, 995};
    Case forward_only = make_case("forward only", eval, 4, 6, 128, 1408);
    forward_only.backward = false;
    check_case(&forward_only, name, repeatable);
    Case growing = make_case("scores that grow away from the query", whole, 1, 6, 128, 700);
    growing.slope = 30;
    check_case(&growing, name, repeatable);
    check_graph(name, repeatable);
}

static bool chooses_cudnn(int tokens) // for a width that Hopper's kernels do not take
{
    return strncmp(reserve(ATTENTION_AUTO, tokens, tokens, 3, 64, false), "attention forward by cuDNN", 26) ==
           0;
}

// What attention.c chooses by itself must have the same bits in every run where that was asked for, and keep
// clear of widths that cuDNN gets wrong; how long a batch is must not matter, not even where gradients of q
// and k are zero. Returns whether it would choose cuDNN on this GPU.
static bool check_choice(void)
{
    static const int doubtful[] = {8, 24, 72, 192,
                                   256}; // wrong in cuDNN 9.14, and but for the last two in 9.19
    check_widths(ATTENTION_AUTO, "auto", false, doubtful, sizeof doubtful / sizeof *doubtful);
    Case repeatable = make_text_case("text, repeatable", 8192, 12, 2048, 6, 128, 896);
    reserve(ATTENTION_AUTO, 8192, 8192, 6, 128, true);
    check_case(&repeatable, "auto", true);
    bool cudnn = chooses_cudnn(4096);
    for (int tokens = 1; tokens <= 9; tokens += 4)
        ok(chooses_cudnn(tokens) == cudnn, "the same choice for batches of %d", tokens);
    return cudnn;
}

// More heads than a warp has lanes.
static void check_many_heads(void)
{
    reserve(ATTENTION_OWN, 4096, 4096, 40, 8, true);
    Case c = make_case("40 heads", edge_lengths, NUM_EDGES, 40, 8, 129);
    check_case(&c, "own", true);
}

static void check_others(bool portable)
{
    static const int own_widths[] = {8, 24, 32, 64, 72, 96, 128, 136, 256}, cudnn_widths[] = {CUDNN_WIDTHS};
    check_kernels(ATTENTION_OWN, "own, repeatable", true);
    check_widths(ATTENTION_OWN, "own", true, own_widths, sizeof own_widths / sizeof *own_widths);
    check_many_heads();
    bool cudnn = check_choice();
    if (portable)
        ok(!cudnn, "the portable path keeps off cuDNN");
    else if (!cudnn)
        skip("cuDNN is not used on this GPU");
    if (cudnn)
        check_kernels(ATTENTION_CUDNN, "cuDNN", false);
    if (cudnn)
        check_widths(ATTENTION_CUDNN, "cuDNN", false, cudnn_widths,
                     sizeof cudnn_widths / sizeof *cudnn_widths);
}

static void check_small(void)
{
    reserve(ATTENTION_OWN, 2048, 2048, 2, 128, false);
    Case c = make_case("edges", edge_lengths, 6, 2, 128, 300);
    check_case(&c, "own", false);
}

int main(int argc, char **argv)
{
    set_program_name("test_attention_gpu", -1);
    bool portable = argc > 1 && !strcmp(argv[1], "--portable");
    argc -= portable;
    argv += portable;
    const char *directory = argc > 1 ? argv[1] : "build/ref";
    if (!load_ops(&ops[PLAIN], directory, "libref_bf16.so") ||
        !load_ops(&ops[TRUTH], directory, "libref_fp32.so")) {
        ok(false, "the CPU backend's libraries are in %s", directory);
        return tap_done();
    }
    backend_open(0);
    quick = argc > 2;
    bool small = quick && !strcmp(argv[2], "small"); // without tokens, no products are timed
    backend_reserve(&(OpSizes){.tokens = small ? 0 : TOKENS,
                               .eval_tokens = EVAL_TOKENS,
                               .dim = 768,
                               .heads = 6,
                               .mlp_dim = 16,
                               .vocab_padded = 128,
                               .portable = portable}); // once, for what attention shares with other ops
    stream = stream_create();
    if (small)
        PART(check_small());
    else
        PART(check_kernels(ATTENTION_OWN, "own", false));
    if (!quick)
        PART(check_others(portable));
    stream_destroy(stream);
    backend_close();
    return tap_done();
}
