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
#include "dev/test/attention_gpu_repeat.h"

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

// An output of the GPU, or one of the three parts of dqkv's rows.
typedef struct {
    const char *name;
    int tensor, part; // part: of three; -1: all of it
} Compared;
static const Compared compared[] = {{"yg", OUT_YG, -1},    {"of q", OUT_DQKV, 0}, {"of k", OUT_DQKV, 1},
                                    {"of v", OUT_DQKV, 2}, {"dv", OUT_DV, -1},    {"lse", LSE, -1},
                                    {"dgate", DGATE, -1}};

static int64_t compared_elements(const Case *c, const Compared *w)
{
    return elements(c, w->tensor) / (w->part < 0 ? 1 : 3);
}

static int64_t place(const Case *c, const Compared *w, int64_t k)
{
    int64_t d = (int64_t)c->H * c->e;
    return w->part < 0 ? k : k / d * 3 * d + w->part * d + k % d;
}

static double *decoded(const Gpu *g, const Case *c, const Compared *w)
{
    int64_t n = compared_elements(c, w);
    const void *from = g->host[w->tensor];
    double *x = xcalloc((size_t)n, sizeof *x);
#pragma omp parallel for
    for (int64_t k = 0; k < n; k++)
        x[k] = is_fp32(w->tensor) ? ((const float *)from)[k]
                                  : bf16_to_float(((const bf16 *)from)[place(c, w, k)]);
    return x;
}

static double *part_of(const Result *r, const Case *c, const Compared *w)
{
    int64_t n = compared_elements(c, w);
    double *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t k = 0; k < n; k++)
        x[k] = r->x[w->tensor][place(c, w, k)];
    return x;
}

// dgate_w beside the sums of the GPU's dgate, which is fp32 and compared by itself, each relative to its
// terms' magnitudes: the largest distance. Beside the plain dgate_w a few dozen numbers would be compared
// that inherit thousands of roundings of dgate:
// their distance is twice the plain one's by chance when dgate's is 1.6 times.
static double gate_sums_off(const Gpu *g, const Case *c)
{
    const float *dgate = g->host[DGATE], *dgate_w = g->host[DGATE_W], *h = c->input[INPUT];
    int inputs = gate_inputs(c);
    double worst = 0;
    for (int p = 0; p < c->H * inputs; p++) {
        double sum = 0, size = 0;
        for (int64_t t = 0; t < c->N; t++) {
            double term = (double)dgate[t * c->H + p / inputs] * (double)h[t * c->H * c->e + p % inputs];
            sum += term;
            size += fabs(term);
        }
        worst = larger_error(worst, fabs(dgate_w[p] - sum) / (size > 0 ? size : 1));
    }
    return worst;
}

// dlambda beside the sums of the GPU's dv, each relative to its terms' magnitudes: the larger distance.
static double lambda_sums_off(const Gpu *g, const Case *c)
{
    const float *dlambda = g->host[DLAMBDA];
    const bf16 *dv = g->host[OUT_DV];
    int d = c->H * c->e;
    double sum[2] = {0, 0}, size[2] = {0, 0}, worst = 0;
#pragma omp parallel for reduction(+ : sum[:2], size[:2])
    for (int64_t k = 0; k < elements(c, VALUE); k++) {
        double x[2] = {c->input[VALUE][k], c->input[INPUT][(int64_t)c->tokens[k / d] * d + k % d]};
        for (int i = 0; i < 2; i++) {
            sum[i] += bf16_to_float(dv[k]) * x[i];
            size[i] += fabs(bf16_to_float(dv[k]) * x[i]);
        }
    }
    for (int i = 0; i < 2; i++)
        worst = larger_error(worst, fabs(dlambda[i] - sum[i]) / size[i]);
    return worst;
}

// Gradients of q and k vanish where every token sees itself alone; their errors are then measured against a
// tenth of dv.
static bool compare(const Gpu *g, const Case *c, const Result *plain, const Result *truth, char *text,
                    size_t size)
{
    bool good = true;
    text[0] = 0;
    for (size_t i = 0; i < sizeof compared / sizeof *compared; i++) {
        const Compared *w = &compared[i];
        if (!truth->x[w->tensor])
            continue;
        int64_t n = compared_elements(c, w);
        double *x = decoded(g, c, w), *exact = part_of(truth, c, w), *rounded = part_of(plain, c, w),
               scale = norm(exact, NULL, n);
        if (w->part == 0 || w->part == 1)
            scale = fmax(scale, 0.1 * norm(truth->x[OUT_DV], NULL, elements(c, OUT_DV)));
        double error = norm(x, exact, n) / scale, allowed = norm(rounded, exact, n) / scale;
        good &= error <= 2 * allowed + FP32_ATOM;
        size_t used = strlen(text);
        snprintf(text + used, size - used, "  %s %.2g (%.2g)", w->name, error, allowed);
        free(x);
        free(exact);
        free(rounded);
    }
    if (!c->backward)
        return good;
    double gate_off = gate_sums_off(g, c), lambda_off = lambda_sums_off(g, c);
    size_t used = strlen(text);
    snprintf(text + used, size - used, "  dgate_w %.2g  dlambda %.2g", gate_off, lambda_off);
    return good && gate_off <= FP32_ATOM && lambda_off <= FP32_ATOM;
}

// Without dv, and without value embeddings, everything else has the same bits.
static bool same_without(Gpu *g, const Case *c, void *const first[ALL], bool own)
{
    bool same = true;
    for (int way = WITHOUT_DV; way < WAYS; way++) {
        run_gpu(g, c, g->slots, (Way)way);
        float *dlambda = g->host[DLAMBDA];
        if (way == WITHOUT_VALUES) {
            same &= dlambda[1] == 0;
            dlambda[1] = ((const float *)first[DLAMBDA])[1];
        }
        memcpy(g->host[OUT_DV], first[OUT_DV], g->bytes[OUT_DV]);
        same &= same_bits(first, g->host, g, c, own);
    }
    return same;
}

static void check_case(Case *c, const char *kernels, bool own)
{
    char text[512];
    void *first[ALL];
    make_inputs(c);
    Result truth = run_cpu(c, TRUTH), plain = run_cpu(c, PLAIN);
    Gpu g = gpu_open(c);
    run_gpu(&g, c, g.slots, WHOLE); // NaN alone
    upload_inputs(&g, c);
    run_gpu(&g, c, g.slots, WHOLE);
    keep(first, &g);
    bool good = compare(&g, c, &plain, &truth, text, sizeof text), guards = guards_untouched(&g);
    run_gpu(&g, c, g.slots, WHOLE);
    bool again = same_bits(first, g.host, &g, c, own);
    run_gpu(&g, c, (int)max_i64(512, g.slots), WHOLE);
    bool more_slots = same_bits(first, g.host, &g, c, own);
    bool without = !c->backward || same_without(&g, c, first, own);
    ok(good && guards && again && more_slots && without,
       "%s: %s N=%d documents=%d H=%d e=%d window=%d:%s%s%s%s%s", kernels, c->name, c->N, c->documents, c->H,
       c->e, c->window, text, guards ? "" : "  WRITES BEHIND THE END",
       again ? "" : "  NOT THE SAME BITS TWICE", more_slots ? "" : "  OTHER BITS WITH MORE SLOTS",
       without ? "" : "  OTHER BITS WITHOUT DV OR VALUE EMBEDDINGS");
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
    run_gpu(&g, &b, g.slots, WHOLE);
    keep(eager, &g);
    upload_table(&g, &a);
    graph_begin(stream);
    queue_forward(&g, &a, g.slots);
    queue_backward(&g, &a, g.slots, WHOLE);
    Graph *graph = graph_end(stream);
    graph_launch(graph, stream);
    fetch(&g);
    bool differs = !same_bits(eager, g.host, &g, &b, false);
    upload_table(&g, &b);
    poison_outputs(&g);
    graph_launch(graph, stream);
    fetch(&g);
    ok(differs && same_bits(eager, g.host, &g, &b, own) && guards_untouched(&g),
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
                                 .reach = MOST_WINDOW,
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
    static const int windows[] = {17, 129, MOST_WINDOW};
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
    static const int windows[] = {0, 1, 17, 127, 128, 129, 895, MOST_WINDOW}, single[] = {1},
                     whole[] = {1000}, equal[] = {2048, 2048}, all[] = {TOKENS};
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
    if (repeatable)
        check_all_repeats();
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

static void check_all_groups(void)
{
    static const int lengths[] = {1, 7, 100, 63, 64, 65};
    Error e;
    reserve(ATTENTION_OWN, 2048, 2048, 3, 64, false);
    check_groups(make_case("short documents", lengths, 6, 3, 64, 70), 64);
    check_groups(make_case("short documents", lengths, 6, 3, 64, 1000), 48);
    reserve(ATTENTION_OWN, 2048, 2048, 3, 128, false);
    check_groups(make_case("short documents", lengths, 6, 3, 128, 31), 96);
    if (!attention_sm80_prepare_backward(192, 256, &e)) {
        skip(e.text);
        return;
    }
    reserve(ATTENTION_OWN, 2048, 2048, 3, 256, false);
    check_groups(make_case("short documents", lengths, 6, 3, 256, 31), 192);
}

static void check_small(void)
{
    for (int repeatable = 0; repeatable <= 1; repeatable++) {
        reserve(ATTENTION_OWN, 2048, 2048, 2, 128, repeatable);
        Case c = make_case("edges", edge_lengths, 6, 2, 128, 300);
        check_case(&c, repeatable ? "own, repeatable" : "own", repeatable);
    }
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
    PART(check_all_groups());
    if (small) {
        PART(check_small());
    } else {
        PART(check_kernels(ATTENTION_OWN, "own", false));
        PART(check_kernels(ATTENTION_OWN, "own, repeatable", true));
    }
    if (!quick)
        PART(check_others(portable));
    stream_destroy(stream);
    backend_close();
    return tap_done();
}
