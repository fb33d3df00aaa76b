// Time of attention, forward and backward, by cuDNN and by the program's own kernels, at the sizes of a
// training run.
//
// "backward" is that of attention alone, with the sums of dy * y, by own kernels only; "to q, k, v" goes down
// to the gradients of what the product gave, with gate, rope and norm.
//
//   bench_attention [--sustained SECONDS]          a training micro-batch and a validation sequence
//   bench_attention [--sustained SECONDS] auto     the same, only by the kernels that are chosen by
//   themselves
//   bench_attention [--sustained SECONDS] deterministic    the same with a fixed order of sums
//   bench_attention [--sustained SECONDS] portable    the same, only by the kernels for any GPU
//   bench_attention [--sustained SECONDS] cudnn    the same, only by cuDNN's
//   bench_attention plans    what a cuDNN plan's number of document slots and its longest document cost
//
// A call is captured REPEATS times in a graph and the graph is timed; the best of ROUNDS counts, or with
// --sustained the mean of the last two thirds of SECONDS: at the power limit, as in a training run. TFLOP/s
// count 4 e operations per head and pair of tokens that see each other forward and 2.5 times that backward,
// whatever the kernel really computes.
#include "dev/bench/figures.h"
#include "dev/bench/fill.h"
#include "llmc/cuda/attention/attention.h"
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    N = 32768,
    EVAL_N = 262144,
    H = 6,
    E = 128,
    D = H * E,
    REPEATS = 10,
    ROUNDS = 5,
    MAX_DOCUMENTS = 1024,
    DOCUMENTS = 47,
    WINDOW = 1408 // the longest that backward is timed with
};
#define SCALE 0.1f
static Stream stream;
static double sustained;
static floatX *tensor[6], *gate_w; // q, k, v, yg, h, dyg
static void *scratch;
static float *lse, *dgate, *dgate_w, *rstd, *scalars;
static floatX *dqkv, *turns; // (N, 3 D), cos and sin (2, N, E / 4)
static int32_t *table, *host_table;
static int cu[MAX_DOCUMENTS + 1], documents;

// ---- inputs -----------------------------------------------------------------------------------------------

// Lengths as in text: lognormal, median 500, at most `longest`.
static void make_documents(int tokens, int count, int longest)
{
    srand(1);
    int end = 0;
    for (documents = 0; end < tokens && documents < MAX_DOCUMENTS; documents++) {
        double normal = sqrt(-2 * log((rand() + 1.0) / (RAND_MAX + 1.0))) * cos(2 * M_PI * rand() / RAND_MAX);
        int rest = count - 1 - documents, n = (int)fmin(longest, 1 + 500 * exp(normal));
        if (count && n > tokens - end - rest)
            n = tokens - end - rest;
        if (n > tokens - end || (count && rest == 0))
            n = tokens - end;
        cu[documents] = end;
        end += n;
    }
    cu[documents] = tokens;
}

static double pairs(int window)
{
    double sum = 0;
    for (int i = 0; i < documents; i++)
        for (int t = 0, n = cu[i + 1] - cu[i]; t < n; t++)
            sum += t < window ? t + 1 : window + 1;
    return sum;
}

static int upload_table(int tokens)
{
    int slots = attention_table_build(host_table, cu, documents, tokens, 0);
    copy_to_device(stream, table, host_table, (size_t)attention_table_ints(tokens, 0) * sizeof *table);
    stream_synchronize(stream);
    return slots;
}

// ---- timing -----------------------------------------------------------------------------------------------

typedef enum { FORWARD, BACKWARD, TO_QKV, PASSES } Pass;
static const char *const pass_names[PASSES] = {"forward", "backward", "to q, k, v"};
typedef struct {
    int tokens, slots, window;
    Pass pass;
    AttentionPlan *plan; // or NULL: the ops
} Call;

static void queue_backward(const Call *c)
{
    floatX **t = tensor;
    SdpaForward f = {.y = t[3],
                     .lse = lse,
                     .q = t[0],
                     .k = t[1],
                     .v = t[2],
                     .table = table,
                     .slots = c->slots,
                     .window = c->window,
                     .qk = E,
                     .scale = SCALE};
    int64_t n = (int64_t)N * D;
    SdpaBackward a =
        {.forward = &f, .dq = dqkv, .dk = dqkv + n, .dv = dqkv + 2 * n, .dy = t[5], .scratch = scratch};
    sdpa_backward(stream, &a, c->tokens, H, E);
}

static void queue(const Call *c)
{
    floatX **t = tensor;
    if (c->plan) {
        int64_t part = attention_table_part(c->tokens, 0);
        AttentionCall a = {.q = t[0],
                           .k = t[1],
                           .v = t[2],
                           .y = t[3],
                           .lse = lse,
                           .length = table,
                           .start = table + part,
                           .lse_start = table + 2 * part,
                           .cu = table + 3 * part,
                           .scale = SCALE,
                           .window = c->window,
                           .slots = c->slots,
                           .N = c->tokens,
                           .H = H,
                           .e = E};
        attention_plan_run(c->plan, &a, stream);
        return;
    }
    AttentionForward f = {t[3], lse, t[0], t[1], t[2], t[4], gate_w, table, c->slots, c->window, SCALE, 12};
    if (c->pass == BACKWARD) {
        queue_backward(c);
    } else if (c->pass == TO_QKV) {
        AttentionBackward a = {.forward = &f,
                               .dqkv = dqkv,
                               .dlambda = scalars + 2,
                               .dgate = dgate,
                               .dgate_w = dgate_w,
                               .dyg = t[5],
                               .rstd_q = rstd,
                               .rstd_k = rstd,
                               .v_raw = t[2],
                               .lambda = scalars,
                               .cos = turns,
                               .sin = turns + (int64_t)N * (E / 4),
                               .scratch = scratch};
        attention_backward(stream, &a, c->tokens, H, E);
    } else {
        attention_forward(stream, &f, c->tokens, H, E);
    }
}

static double time_graph(Graph *g, cudaEvent_t begin, cudaEvent_t end)
{
    float ms;
    cudaEventRecord(begin, stream);
    graph_launch(g, stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    return ms;
}

static double best_time(Graph *g, cudaEvent_t begin, cudaEvent_t end)
{
    double best = INFINITY;
    time_graph(g, begin, end); // the first launch uploads the graph
    for (int i = 1; i < ROUNDS; i++)
        best = fmin(best, time_graph(g, begin, end));
    return best;
}

// Many graphs are queued at a time, so that the GPU never waits for the host.
static double mean_time(Graph *g, cudaEvent_t begin, cudaEvent_t end)
{
    int queued = 1 + (int)(50 / best_time(g, begin, end)), counted = 0; // some 50 ms
    double ms = 0;
    for (double start = seconds_now(), at = start; at < start + sustained; at = seconds_now()) {
        float all;
        cudaEventRecord(begin, stream);
        for (int i = 0; i < queued; i++)
            graph_launch(g, stream);
        cudaEventRecord(end, stream);
        cudaEventSynchronize(end);
        cudaEventElapsedTime(&all, begin, end);
        if (at < start + sustained / 3)
            continue;
        ms += all;
        counted += queued;
    }
    return ms / counted;
}

static double milliseconds(const Call *c)
{
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    queue(c);
    stream_synchronize(stream);
    graph_begin(stream);
    for (int i = 0; i < REPEATS; i++)
        queue(c);
    Graph *g = graph_end(stream);
    double ms = sustained ? mean_time(g, begin, end) : best_time(g, begin, end);
    graph_destroy(g);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return ms / REPEATS;
}

static const char *choice = ""; // of kernels, for the figures

static void report(const Call *c)
{
    double operations = 4.0 * H * E * pairs(c->window) * (c->pass == FORWARD ? 1 : 2.5), ms = milliseconds(c);
    char op[64], shape[64];
    snprintf(op, sizeof op, "attention %s, %s", pass_names[c->pass], choice);
    snprintf(shape, sizeof shape, "N %d, window %d%s", c->tokens, c->window,
             sustained > 0 ? ", sustained" : "");
    figure(op, shape, ms, "ms");
    printf("  window %4d %-10s %8.3f ms %6.0f TFLOP/s\n", c->window, pass_names[c->pass], ms,
           operations / ms * 1e-9);
    fflush(stdout);
}

// ---- what is timed ----------------------------------------------------------------------------------------

static void reserve(AttentionKernels kernels, bool deterministic)
{
    double t = seconds_now();
    attention_reserve(&(OpSizes){.tokens = N,
                                 .eval_tokens = EVAL_N,
                                 .dim = D,
                                 .heads = H,
                                 .reach = WINDOW,
                                 .deterministic = deterministic,
                                 .attention = kernels});
    printf("%s (made in %.1f s)\n", attention_description(), seconds_now() - t);
    if (scratch)
        device_free(scratch);
    size_t bytes[] = {attention_scratch_bytes(N, H, E), sdpa_scratch_bytes(N, H, E, E)};
    scratch = device_alloc(bytes[bytes[1] > bytes[0]], "bench");
}

static void bench_kernels(AttentionKernels kernels, bool deterministic)
{
    choice = kernels == ATTENTION_CUDNN ? "cuDNN"
             : kernels == ATTENTION_OWN ? "the kernels for any GPU"
             : deterministic            ? "as the program chooses, deterministic"
                                        : "as the program chooses";
    static const int train[] = {384, 896, WINDOW}, eval[] = {768, 2560};
    reserve(kernels, deterministic);
    make_documents(N, DOCUMENTS, 2048);
    printf(" N = %d, %d documents\n", N, documents);
    int slots = upload_table(N);
    for (int i = 0; i < 3; i++)
        for (int pass = 0; pass < PASSES; pass++)
            if (pass != BACKWARD || attention_by(true) != BY_CUDNN)
                report(&(Call){N, slots, train[i], (Pass)pass, NULL});
    make_documents(EVAL_N, 0, 12000);
    printf(" N = %d, %d documents\n", EVAL_N, documents);
    slots = upload_table(EVAL_N);
    for (int i = 0; i < 2; i++)
        report(&(Call){EVAL_N, slots, eval[i], FORWARD, NULL});
}

static void bench_plan(int tokens, int slots, int longest, int window)
{
    Error e;
    double t = seconds_now();
    AttentionPlan *p = attention_plan_create(&(AttentionShape){slots, longest, H, E, false}, &e);
    if (!p)
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    Call c = {tokens, slots, window, FORWARD, p};
    printf("  %7d tokens, %4d slots, longest %6d: forward %.3f ms, made in %.2f s\n", tokens, slots, longest,
           milliseconds(&c), seconds_now() - t);
    fflush(stdout);
    attention_plan_free(p);
}

static void bench_plans(void)
{
    static const int slots[] = {64, 96, 128, 256, 512}, train[] = {2048, 8192, N},
                     eval[] = {16384, 32768, 65536, EVAL_N};
    reserve(ATTENTION_CUDNN, false);
    make_documents(N, DOCUMENTS, 2048);
    upload_table(N);
    for (int i = 0; i < 5; i++)
        bench_plan(N, slots[i], 2048, 896);
    for (int i = 0; i < 3; i++)
        bench_plan(N, 128, train[i], 896);
    make_documents(EVAL_N, 0, 12000);
    upload_table(EVAL_N);
    for (int i = 0; i < 4; i++)
        bench_plan(EVAL_N, 512, eval[i], 768);
}

int main(int argc, char **argv)
{
    set_program_name("bench_attention", -1);
    figures_open(&argc, argv);
    if (argc > 2 && strcmp(argv[1], "--sustained") == 0) {
        sustained = atof(argv[2]);
        argc -= 2;
        argv += 2;
    }
    const char *what = argc > 1 ? argv[1] : "";
    backend_open(0);
    bool portable = !strcmp(what, "portable");
    backend_reserve(&(OpSizes){.tokens = N,
                               .eval_tokens = EVAL_N,
                               .dim = D,
                               .heads = H,
                               .mlp_dim = 16,
                               .vocab_padded = 128,
                               .portable = portable});
    stream = stream_create();
    for (int i = 0; i < 6; i++) {
        int64_t n = (int64_t)(i < 5 ? EVAL_N : N) * D;
        tensor[i] = device_alloc((size_t)n * sizeof(floatX), "bench");
        fill_floatx(stream, tensor[i], n, i < 2 ? 1.7f : 1);
    }
    lse = device_alloc((size_t)EVAL_N * H * sizeof *lse, "bench");
    dgate = device_alloc((size_t)N * H * sizeof *dgate, "bench");
    dgate_w = device_alloc((size_t)H * 12 * sizeof(float), "bench");
    gate_w = device_alloc((size_t)H * 12 * sizeof *gate_w, "bench");
    fill_floatx(stream, gate_w, H * 12, 0.5f);
    rstd = device_alloc((size_t)N * H * sizeof *rstd, "bench");
    scalars = device_alloc(4 * sizeof *scalars, "bench");
    dqkv = device_alloc((size_t)3 * N * D * sizeof *dqkv, "bench");
    turns = device_alloc((size_t)2 * N * (E / 4) * sizeof *turns, "bench");
    fill_floatx(stream, turns, (int64_t)2 * N * (E / 4), 1);
    size_t ints = (size_t)attention_table_ints(EVAL_N, 0);
    table = device_alloc(ints * sizeof *table, "bench");
    host_table = host_alloc(ints * sizeof *table);
    if (!strcmp(what, "plans"))
        bench_plans();
    else {
        if (!*what || !strcmp(what, "auto"))
            bench_kernels(ATTENTION_AUTO, false);
        if (!*what || !strcmp(what, "cudnn"))
            bench_kernels(ATTENTION_CUDNN, false);
        if (!*what || !strcmp(what, "deterministic"))
            bench_kernels(ATTENTION_AUTO, true);
        if (portable)
            bench_kernels(ATTENTION_OWN, false);
    }
    backend_close();
    return 0;
}
