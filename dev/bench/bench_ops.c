// Time of every op of the CUDA backend at the size of a training run (attention and Newton-Schulz have
// benchmarks of their own).
//
//   bench_ops [--portable] [--sustained SECONDS] [--energy SECONDS] [FILTER...]
//     FILTER        only ops whose name contains one of them
//     --portable    on the kernels and libraries that every supported GPU runs
//     --sustained   all these ops in turn for SECONDS, means of the last two thirds: at the power limit, as
//                   in a training run,
//                   where a product takes up to a quarter longer than in the short burst that is timed
//                   otherwise
//     --energy      each op alone for SECONDS: its time then, its mean power, and the mJ of a call, less
//     those
//                   of the idle GPU
//
// An op is captured REPEATS times in a graph, each time on other buffers (together far more than the L2
// cache), and the graph is timed; the best of ROUNDS counts. Shares are of ceilings measured in the same run:
// a copy of 208 MB for bytes, a bf16 product of 8192 x 8192 x 8192 for operations. Bytes are those an op must
// read and write at least, operations 2 per multiply and add.
#include "dev/test/head_specs.h"
#include "dev/bench/energy.h"
#include "dev/bench/figures.h"
#include "llmc/cuda/attention/attention.h"
#include "llmc/ops/ops.h"
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    N = 32768,
    H = 6,
    E = 128,
    D = H * E,
    F = 3072,
    VP = 50304,
    REPEATS = 6,
    ROUNDS = 4,
    SETS = 2,
    LAYERS = 12
};
enum { MATRICES = 22, SLOTS = 32 };
static Stream stream;
static ProductContext on_stream; // without collectives beside
static char **filters;           // up to a NULL
static double sustained;
static double energy_seconds; // 0: no energy is measured
static EnergyCounter energy;
static double idle_watts;
static double copy_rate, product_rate; // bytes and operations a second

// Buffers, SETS of each: (N, D) tensors, (N, F) tensors, tables and weights.
static struct {
    floatX *t[14], *wide[2], *dqkv, *w, *table, *m, *v, *cos, *sin, *wx;
    float *rstd, *head_rstd, *dtable, *weight, *momentum, *u, *second, *dw;
    int32_t *tokens, *order, *row_token, *row_start, *num_rows;
    void *w8;
    uint8_t *h8, *post8, *mlp_w8; // codes of (N, D), (N, F), (D, F)
} set[SETS];
enum { SCALE_H, SCALE_W, SCALE_POST, SCALES }; // of the MLP in FP8: input, weights, relu^2
static float *small;                           // scalars
static float *target_weight;                   // (MAX_TARGETS)
static void *head_scratch;
static float *scales; // (SCALES)
static StepParams *step;
static int32_t *rules; // (MATRICES): all 0
static int now;        // which set

// ---- filling ----------------------------------------------------------------------------------------------

static void fill_floatx(floatX *p, int64_t n, float scale)
{
    enum { BLOCK = 1 << 20 };
    static bf16
        block[BLOCK]; // repeated: speed depends on the values' distribution, not on their being different
    for (int i = 0; i < BLOCK; i++)
        block[i] = float_to_bf16(scale * ((float)rand() / (float)RAND_MAX * 2 - 1));
    for (int64_t at = 0; at < n; at += BLOCK)
        copy_to_device(stream, p + at, block, (size_t)min_i64(BLOCK, n - at) * sizeof *p);
    stream_synchronize(stream);
}

static floatX *tensor(int64_t n, float scale)
{
    floatX *p = device_alloc((size_t)n * sizeof *p, "bench");
    fill_floatx(p, n, scale);
    return p;
}

static float *floats(int64_t n, float value)
{
    float *p = device_alloc((size_t)n * sizeof *p, "bench"), *host = xcalloc((size_t)n, sizeof *host);
    for (int64_t i = 0; i < n; i++)
        host[i] = value * (0.5f + (float)(i % 997) / 997);
    copy_to_device(stream, p, host, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    free(host);
    return p;
}

static int32_t *integers(const int32_t *x, int64_t n)
{
    int32_t *p = device_alloc((size_t)n * sizeof *p, "bench");
    copy_to_device(stream, p, x, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    return p;
}

// Tokens whose frequencies fall as in text (Zipf), and the table of their places.
static void fill_tokens(int s)
{
    static int32_t token[N], order[N], row_token[N], row_start[N + 1], first[VP + 1];
    memset(first, 0, sizeof first);
    for (int i = 0; i < N; i++) {
        double r = (double)rand() / RAND_MAX;
        token[i] = (int32_t)fmin(VP - 1, exp(r * log(50000.0)) - 1);
        first[token[i] + 1]++;
    }
    int rows = 0, filled = 0;
    for (int t = 0; t < VP; t++) {
        if (first[t + 1]) {
            row_token[rows] = t;
            row_start[rows++] = filled;
        }
        filled += first[t + 1];
        first[t + 1] = filled;
    }
    row_start[rows] = N;
    for (int i = 0; i < N; i++)
        order[first[token[i]]++] = i;
    set[s].tokens = integers(token, N);
    set[s].order = integers(order, N);
    set[s].row_token = integers(row_token, N);
    set[s].row_start = integers(row_start, N + 1);
    set[s].num_rows = integers(&rows, 1);
}

static void fill_fp8(int s)
{
    const float host[SCALES] = {1.0f / 448, 0.05f / 448, 16.0f / 448}; // of what fill_set makes
    if (!scales)
        scales = device_alloc(sizeof host, "bench");
    copy_to_device(stream, scales, host, sizeof host);
    set[s].h8 = device_alloc((size_t)N * D, "bench");
    set[s].mlp_w8 = device_alloc((size_t)D * F, "bench");
    set[s].post8 = device_alloc((size_t)N * F, "bench");
    quantize_e4m3(stream, set[s].h8, set[s].t[3], scales + SCALE_H, N, D, false);
    quantize_e4m3(stream, set[s].mlp_w8, set[s].w, scales + SCALE_W, D, F, true);
    Fp8Product up = {set[s].h8, set[s].mlp_w8, scales + SCALE_H, scales + SCALE_W, N, D, F};
    matmul_fp8_relu2(&on_stream, set[s].wide[0], set[s].post8, NULL, &up, scales + SCALE_POST);
    stream_synchronize(stream);
}

static void fill_set(int s)
{
    for (int i = 0; i < 14; i++)
        set[s].t[i] = tensor((int64_t)N * D, 1);
    for (int i = 0; i < 2; i++)
        set[s].wide[i] = tensor((int64_t)N * F, 1);
    set[s].dqkv = tensor((int64_t)3 * N * D, 1);
    set[s].w = tensor((int64_t)4 * D * F, 0.05f);
    set[s].table = tensor((int64_t)VP * D, 0.2f);
    set[s].m = tensor((int64_t)VP * D, 0.1f);
    set[s].v = device_alloc((size_t)VP * D * 2, "bench");
    set[s].cos = tensor((int64_t)N * (E / 4), 1);
    set[s].sin = tensor((int64_t)N * (E / 4), 1);
    set[s].rstd = floats(N, 1);
    set[s].head_rstd = floats((int64_t)2 * N * H, 1);
    set[s].dtable = floats((int64_t)VP * D, 1e-3f);
    set[s].weight = floats((int64_t)MATRICES * D * F, 0.05f);
    set[s].momentum = floats((int64_t)MATRICES * D * F, 0.01f);
    set[s].u = floats((int64_t)MATRICES * D * F, 0.01f);
    set[s].second = floats((int64_t)MATRICES * F, 1e-3f);
    set[s].wx = tensor((int64_t)MATRICES * D * F, 0.05f);
    set[s].dw = floats((int64_t)4 * D * F, 0);
    set[s].w8 = device_alloc(head_weight_bytes(HEAD_FP8, VP, D), "bench");
    head_quantize(stream, &head_plain, set[s].w8, set[s].table, VP, D);
    fill_tokens(s);
    fill_fp8(s);
}

// ---- timing -----------------------------------------------------------------------------------------------

static Graph *graph_of(void (*op)(void)) // REPEATS calls
{
    now = 0;
    op();
    stream_synchronize(stream);
    graph_begin(stream);
    for (int i = 0; i < REPEATS; i++) {
        now = i % SETS;
        op();
    }
    return graph_end(stream);
}

static double milliseconds(cudaEvent_t begin, cudaEvent_t end)
{
    float ms;
    cudaEventElapsedTime(&ms, begin, end);
    return ms;
}

static double seconds_of(void (*op)(void)) // of one call
{
    cudaEvent_t begin, end;
    double best = INFINITY;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    Graph *g = graph_of(op);
    for (int i = 0; i < ROUNDS; i++) {
        cudaEventRecord(begin, stream);
        graph_launch(g, stream);
        cudaEventRecord(end, stream);
        cudaEventSynchronize(end);
        if (i)
            best = fmin(best, milliseconds(begin, end)); // the first launch uploads the graph
    }
    graph_destroy(g);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best / REPEATS * 1e-3;
}

static void write_shape(char *shape, size_t size, const char *how)
{
    snprintf(shape, size, "N %d, d %d, H %d, F %d, Vp %d%s", N, D, H, F, VP, how);
}

static void print_row(const char *name, double t, double bytes, double operations)
{
    char shape[96];
    write_shape(shape, sizeof shape, sustained ? ", sustained" : "");
    figure(name, shape, t * 1e6, "us");
    printf("%-34s %9.1f us", name, t * 1e6);
    if (bytes > 0)
        printf("  %7.0f GB/s    %5.1f%% of copy", bytes / t * 1e-9, 100 * bytes / t / copy_rate);
    if (operations > 0)
        printf("  %7.0f TFLOP/s %5.1f%% of product", operations / t * 1e-12,
               100 * operations / t / product_rate);
    printf("\n");
    fflush(stdout);
}

// The power of an idle GPU whose clocks are still up, as between the ops of a step.
static double measure_idle_watts(void)
{
    EnergySpan span = {0};
    for (double end = seconds_now() + energy_seconds; seconds_now() < end; energy_poll(&energy, &span))
        usleep(10000);
    return energy_watts(&span);
}

// Runs the op alone for energy_seconds. About 30 ms of work are queued at a time, and the next while they
// run: the GPU never waits.
static void report_energy(const char *name, void (*op)(void), double once)
{
    char shape[96];
    EnergySpan span = {0};
    Event *done[2] = {event_create(), event_create()};
    Graph *g = graph_of(op);
    int launches = 1 + (int)(0.03 / (once * REPEATS));
    double calls = 0, from = 0, now = 0;
    double warm = seconds_now() + energy_seconds / 4, end = warm + energy_seconds;
    for (int i = 0; now < end; i++) {
        event_synchronize(done[i % 2]);
        now = seconds_now();
        if (now > warm) {
            energy_poll(&energy, &span);
            from = from ? from : now;
            calls += now > from ? launches * REPEATS : 0;
        }
        for (int k = 0; k < launches; k++)
            graph_launch(g, stream);
        event_record(done[i % 2], stream);
    }
    stream_synchronize(stream);
    double seconds = (now - from) / calls, watts = energy_watts(&span);
    write_shape(shape, sizeof shape, ", alone at the power limit");
    figure(name, shape, seconds * 1e6, "us");
    figure(name, shape, watts, "W");
    figure(name, shape, (watts - idle_watts) * seconds * 1e3, "mJ");
    printf("%-34s %9.1f us %6.0f W %9.2f mJ\n", name, seconds * 1e6, watts,
           (watts - idle_watts) * seconds * 1e3);
    fflush(stdout);
    graph_destroy(g);
    event_destroy(done[0]);
    event_destroy(done[1]);
}

static struct {
    const char *name;
    double bytes, operations, ms;
    Graph *graph;
    cudaEvent_t begin, end;
} turn[48]; // what takes turns when sustained
static int turns;

// bytes or operations 0: not the measure for this op
static void report(const char *name, void (*op)(void), double bytes, double operations)
{
    bool wanted = !*filters;
    for (char **f = filters; *f; f++)
        wanted |= strstr(name, *f) != NULL;
    if (!wanted)
        return;
    if (energy_seconds) {
        report_energy(name, op, seconds_of(op));
        return;
    }
    if (!sustained) {
        print_row(name, seconds_of(op), bytes, operations);
        return;
    }
    assert(turns < (int)(sizeof turn / sizeof *turn));
    turn[turns].name = name;
    turn[turns].bytes = bytes;
    turn[turns].operations = operations;
    turn[turns].graph = graph_of(op);
    cudaEventCreate(&turn[turns].begin);
    cudaEventCreate(&turn[turns].end);
    turns++;
}

static void take_turns(void)
{
    int counted = 0;
    for (double start = seconds_now(), at = start; at < start + sustained; at = seconds_now()) {
        for (int i = 0; i < turns; i++) {
            cudaEventRecord(turn[i].begin, stream);
            graph_launch(turn[i].graph, stream);
            cudaEventRecord(turn[i].end, stream);
        }
        stream_synchronize(stream);
        if (at < start + sustained / 3)
            continue;
        for (int i = 0; i < turns; i++)
            turn[i].ms += milliseconds(turn[i].begin, turn[i].end);
        counted++;
    }
    for (int i = 0; i < turns; i++)
        print_row(turn[i].name, turn[i].ms / counted / REPEATS * 1e-3, turn[i].bytes, turn[i].operations);
}

// ---- the ops ----------------------------------------------------------------------------------------------

#define S set[now]
#define OP(name) static void op_##name(void)
OP(copy) { copy_on_device(stream, set[0].u, set[1].u, (size_t)MATRICES * D * F * 4); }
static floatX *square[3];
OP(square) { matmul_forward(&on_stream, square[0], square[1], square[2], NULL, 8192, 8192, 8192, 1); }

OP(embed_forward)
{
    embed_forward(stream, &(EmbedForward){S.t[0], S.rstd, S.tokens, S.table, S.w, small}, N, D);
}
OP(embed_backward)
{
    EmbedBackward a = {S.t[0],  S.t[1], S.t[2], S.t[3],    S.rstd,    S.tokens,
                       S.table, S.w,    small,  small + 8, small + 24};
    embed_backward(stream, &a, N, D);
}
OP(embedding_grad)
{
    TokenRows rows = {S.order, S.row_token, S.row_start, S.num_rows};
    embedding_grad(stream, S.dtable, S.t[0], small, &rows, N, D);
}
OP(mix_forward)
{
    mix_rmsnorm_forward(stream, &(MixForward){S.t[0], S.t[1], S.rstd, S.t[2], S.t[3], NULL, small}, N, D);
}
OP(mix_forward_skip)
{
    mix_rmsnorm_forward(stream, &(MixForward){S.t[0], S.t[1], S.rstd, S.t[2], S.t[3], S.t[4], small}, N, D);
}

static void mix_backward(bool skip)
{
    MixBackward a = {.dx = S.t[0],
                     .dx0 = S.t[1],
                     .dskip = skip ? S.t[2] : NULL,
                     .dcoef = small + 8,
                     .dx_out = S.t[0],
                     .dh = S.t[3],
                     .h = S.t[5],
                     .rstd = S.rstd,
                     .x = S.t[6],
                     .x0 = S.t[7],
                     .skip = skip ? S.t[8] : NULL,
                     .coef = small,
                     .dgate = S.head_rstd,
                     .gate_w = S.w,
                     .heads = H,
                     .accumulate_dx0 = true};
    mix_rmsnorm_backward(stream, &a, N, D);
}
OP(mix_backward) { mix_backward(false); }
OP(mix_backward_skip) { mix_backward(true); }
OP(rmsnorm_forward) { rmsnorm_forward(stream, S.t[0], S.rstd, S.t[1], N, D); }
OP(rmsnorm_backward) { rmsnorm_backward(stream, S.t[0], S.t[1], S.t[2], S.rstd, N, D); }
static void run_qkv_forward(const floatX *value_embed)
{
    QkvForward a = {S.t[0],   S.t[1], S.t[2], S.head_rstd, S.head_rstd + N * H, S.t[3], value_embed,
                    S.tokens, small,  S.cos,  S.sin};
    qkv_forward(stream, &a, N, H, E);
}
OP(qkv_forward) { run_qkv_forward(NULL); }
OP(qkv_forward_ve) { run_qkv_forward(S.table); }
static void run_qkv_backward(const floatX *value_embed)
{
    QkvBackward a = {.dqkv = S.dqkv,
                     .dlambda = small + 8,
                     .dq = S.t[0],
                     .dk = S.t[1],
                     .dv = S.t[2],
                     .q = S.t[3],
                     .k = S.t[4],
                     .rstd_q = S.head_rstd,
                     .rstd_k = S.head_rstd + N * H,
                     .v_raw = S.t[5],
                     .value_embed = value_embed,
                     .tokens = S.tokens,
                     .lambda = small,
                     .cos = S.cos,
                     .sin = S.sin};
    qkv_backward(stream, &a, N, H, E);
}
OP(qkv_backward) { run_qkv_backward(NULL); }
OP(qkv_backward_ve) { run_qkv_backward(S.table); }

OP(qkv)
{
    matmul_forward(&on_stream, S.t[0], S.t[4], S.w, NULL, N, D, D, 3);
} // t[0] is not followed by t[1]: see main
static void run_qkv_product(const floatX *value_embed)
{
    QkvProductForward a = {S.dqkv,      S.t[2],   S.t[4], S.w,   S.head_rstd, S.head_rstd + N * H,
                           value_embed, S.tokens, small,  S.cos, S.sin};
    qkv_product_forward(stream, &a, N, H, E);
}
OP(qkv_product) { run_qkv_product(NULL); }
OP(qkv_product_ve) { run_qkv_product(S.table); }
OP(o) { matmul_forward(&on_stream, S.t[3], S.t[4], S.w, S.t[3], N, D, D, 1); }
OP(proj) { matmul_forward(&on_stream, S.t[3], S.wide[0], S.w, S.t[3], N, F, D, 1); }
OP(dh_mlp) { matmul_forward(&on_stream, S.t[3], S.wide[0], S.w, NULL, N, F, D, 1); }
OP(dyg) { matmul_backward_input(&on_stream, S.t[3], S.t[4], S.w, N, D, D); }
OP(dh_qkv) { matmul_backward_input(&on_stream, S.t[3], S.dqkv, S.w, N, D, 3 * D); }
OP(dw_o) { matmul_weight_grads(&on_stream, &(WeightGrad){S.dw, S.t[3], S.t[4], D, D, false}, 1, N); }
OP(dw_qkv) { matmul_weight_grads(&on_stream, &(WeightGrad){S.dw, S.dqkv, S.t[4], 3 * D, D, false}, 1, N); }
OP(dw_mlp) { matmul_weight_grads(&on_stream, &(WeightGrad){S.dw, S.t[3], S.wide[0], D, F, false}, 1, N); }
OP(dw_attention)
{
    WeightGrad g[] = {{S.dw, S.dqkv, S.t[4], 3 * D, D, false},
                      {S.dw + 3 * D * D, S.t[3], S.t[5], D, D, false}};
    matmul_weight_grads(&on_stream, g, 2, N);
}
OP(dw_mlps)
{
    WeightGrad g[] = {{S.dw, S.t[3], S.wide[0], D, F, false}, {S.dw + D * F, S.t[4], S.wide[1], D, F, false}};
    matmul_weight_grads(&on_stream, g, 2, N);
}
OP(relu2_forward) { matmul_relu2_forward(&on_stream, S.wide[0], S.t[3], S.w, N, D, F); }
OP(relu2_backward) { matmul_relu2_backward(&on_stream, S.wide[1], S.t[3], S.w, S.wide[0], N, D, F); }

OP(quantize_h) { quantize_e4m3(stream, S.h8, S.t[3], scales + SCALE_H, N, D, false); }
OP(quantize_up) { quantize_e4m3(stream, S.mlp_w8, S.w, scales + SCALE_W, D, F, true); }
OP(quantize_down) { quantize_e4m3(stream, S.mlp_w8, S.w, scales + SCALE_W, D, F, false); }
OP(relu2_bound) { amax_relu2_bound(stream, small + 16, S.w, D, F); }
OP(amax) { amax_accumulate(stream, small + 16, S.w, (int64_t)D * F); }
static Fp8Product fp8_up(void)
{
    return (Fp8Product){S.h8, S.mlp_w8, scales + SCALE_H, scales + SCALE_W, N, D, F};
}
OP(fp8_up)
{
    Fp8Product p = fp8_up();
    matmul_fp8_relu2(&on_stream, S.wide[0], S.post8, NULL, &p, scales + SCALE_POST);
}
OP(fp8_up_amax)
{
    Fp8Product p = fp8_up();
    matmul_fp8_relu2(&on_stream, S.wide[0], S.post8, small + 16, &p, scales + SCALE_POST);
}
OP(fp8_down)
{
    Fp8Product p = {S.post8, S.mlp_w8, scales + SCALE_POST, scales + SCALE_W, N, F, D};
    matmul_fp8(&on_stream, S.t[3], &p, S.t[3]);
}

OP(head_quantize) { head_quantize(stream, &head_plain, S.w8, S.table, VP, D); }
static void head(HeadMode mode, const HeadSpec *spec, int num_targets)
{
    HeadLoss a = {.spec = spec,
                  .mode = mode,
                  .loss = small + 8,
                  .dx = S.t[3],
                  .dw = S.dtable,
                  .x = S.t[4],
                  .w = S.table,
                  .w8 = S.w8,
                  .targets = S.tokens,
                  .num_targets = num_targets,
                  .target_weight = target_weight,
                  .scratch = head_scratch,
                  .N = N,
                  .d = D,
                  .Vp = VP};
    if (num_targets)
        head_loss_train(stream, &a);
    else
        head_loss_eval(stream, &a);
}
OP(head_fp8) { head(HEAD_FP8, &head_plain, 1); }
OP(head_fp8_targets) { head(HEAD_FP8, &head_shifted, MAX_TARGETS); }
OP(head_bf16) { head(HEAD_BF16, &head_plain, 1); }
OP(head_eval) { head(HEAD_BF16, &head_plain, 0); }

OP(adam)
{
    adam_update(stream, S.table, S.m, S.v, S.dtable, step, (AdamRule){0, 0.65f, 0.95f, 1e-8f, 0.35f, 0.05f},
                (int64_t)VP * D);
}
OP(momentum) { normuon_momentum(stream, S.u, S.momentum, step, (int64_t)MATRICES * D * F); }
OP(update)
{
    NormuonUpdate a = {.w = S.weight,
                       .wx = S.wx,
                       .grad = S.u,
                       .second = S.second,
                       .o = set[1 - now].wx,
                       .o_dtype = NS_BF16,
                       .rows = D,
                       .cols = F,
                       .batch = MATRICES,
                       .per_column = true,
                       .beta2 = 0.95f,
                       .rule = rules,
                       .stride = (int64_t)D * F};
    normuon_update(stream, &a, step);
}
OP(cast) { cast_weights(stream, S.wx, S.weight, (int64_t)MATRICES * D * F); }

// ---- main -------------------------------------------------------------------------------------------------

static void bench_memory_bound(void)
{
    double t = (double)N * D * 2; // bytes of a tensor
    double rows = (double)MATRICES * D * F, table = (double)VP * D;
    report("embed_forward", op_embed_forward, 2 * t, 0);
    report("embed_backward", op_embed_backward, 5 * t, 0);
    report("embedding_grad", op_embedding_grad, t, 0);
    report("mix_rmsnorm_forward", op_mix_forward, 4 * t, 0);
    report("mix_rmsnorm_forward, skip", op_mix_forward_skip, 5 * t, 0);
    report("mix_rmsnorm_backward", op_mix_backward, 7 * t, 0);
    report("mix_rmsnorm_backward, skip", op_mix_backward_skip, 9 * t, 0);
    report("rmsnorm_forward", op_rmsnorm_forward, 2 * t, 0);
    report("rmsnorm_backward", op_rmsnorm_backward, 4 * t, 0);
    report("qkv_forward", op_qkv_forward, 6 * t, 0);
    report("qkv_forward, value embedding", op_qkv_forward_ve, 7 * t, 0);
    report("qkv_backward", op_qkv_backward, 9 * t, 0);
    report("qkv_backward, value embedding", op_qkv_backward_ve, 10 * t, 0);
    report("quantize_e4m3, input of the MLP", op_quantize_h, 1.5 * t, 0);
    report("quantize_e4m3, a weight, transposed", op_quantize_up, 3.0 * D * F, 0);
    report("quantize_e4m3, a weight", op_quantize_down, 3.0 * D * F, 0);
    report("amax_relu2_bound, a weight", op_relu2_bound, 2.0 * D * F, 0);
    report("amax_accumulate, a weight", op_amax, 2.0 * D * F, 0);
    report("head_quantize", op_head_quantize, table * 4, 0);
    report("adam_update, one table", op_adam, table * 20, 0);
    report("normuon_momentum, 22 MLP matrices", op_momentum, rows * 16, 0);
    report("normuon_update, 22 MLP matrices", op_update, rows * (2 + 2 + 4 + 4 + 2 + 4), 0);
    report("cast_weights, 22 MLP matrices", op_cast, rows * 6, 0);
}

static void bench_products(void)
{
    double n = 2.0 * N, square_ops = n * D * D, mlp = n * D * F, head = n * D * VP;
    report("QKV forward", op_qkv, 0, 3 * square_ops);
    report("QKV forward, norm, rope, v mix", op_qkv_product, 0, 3 * square_ops);
    report("QKV forward, value embedding", op_qkv_product_ve, 0, 3 * square_ops);
    report("O forward, residual", op_o, 0, square_ops);
    report("fc forward, relu^2", op_relu2_forward, 0, mlp);
    report("proj forward, residual", op_proj, 0, mlp);
    report("fc forward in FP8, relu^2, codes", op_fp8_up, 0, mlp);
    report("fc forward in FP8, relu^2, codes, amax", op_fp8_up_amax, 0, mlp);
    report("proj forward in FP8, residual", op_fp8_down, 0, mlp);
    report("proj backward, relu^2", op_relu2_backward, 0, mlp);
    report("fc backward", op_dh_mlp, 0, mlp);
    report("O backward", op_dyg, 0, square_ops);
    report("QKV backward", op_dh_qkv, 0, 3 * square_ops);
    report("O weights", op_dw_o, 0, square_ops);
    report("QKV weights", op_dw_qkv, 0, 3 * square_ops);
    report("fc or proj weights", op_dw_mlp, 0, mlp);
    report("QKV and O weights, together", op_dw_attention, 0, 4 * square_ops);
    report("fc and proj weights, together", op_dw_mlps, 0, 2 * mlp);
    report("head, FP8, training", op_head_fp8, 0, 3 * head);
    report("head, bf16, training", op_head_bf16, 0, 3 * head);
    report("head, FP8, training, three targets", op_head_fp8_targets, 0, 3 * head);
    report("head, evaluation", op_head_eval, 0, head);
}

int main(int argc, char **argv)
{
    set_program_name("bench_ops", -1);
    figures_open(&argc, argv);
    OpSizes sizes = {.tokens = N,
                     .eval_tokens = N,
                     .dim = D,
                     .heads = H,
                     .mlp_dim = F,
                     .vocab_padded = VP,
                     .fp8_head = true,
                     .fp8_mlp = true};
    for (filters = argv + 1; filters < argv + argc && (*filters)[0] == '-'; filters++) {
        if (!strcmp(*filters, "--portable"))
            sizes.portable = true;
        else if (!strcmp(*filters, "--sustained") && filters[1] && (sustained = atof(filters[1])) > 0)
            filters++;
        else if (!strcmp(*filters, "--energy") && filters[1] && (energy_seconds = atof(filters[1])) > 0)
            filters++;
        else
            fatal(EXIT_USAGE, "usage: bench_ops [--csv FILE] [--portable] [--sustained SECONDS] "
                              "[--energy SECONDS] [FILTER...]");
    }
    double begin = seconds_now();
    backend_open(0);
    double opened = seconds_now();
    backend_reserve(&sizes);
    double reserved = seconds_now();
    printf("%s\nopened in %.2f s, plans and scratch in %.2f s, %.0f MiB\n", backend_description(),
           opened - begin, reserved - opened, (double)device_bytes_allocated() / 1048576);
    stream = stream_create();
    on_stream.stream = stream;
    small = floats(256, 0.3f);
    const float weights[MAX_TARGETS] = {1, 0.5f, 0.25f};
    target_weight = device_alloc(sizeof weights, "bench");
    copy_to_device(stream, target_weight, weights, sizeof weights);
    stream_synchronize(stream);
    size_t train = head_train_scratch_bytes(HEAD_FP8, N, D, VP),
           bf16 = head_train_scratch_bytes(HEAD_BF16, N, D, VP), eval = head_eval_scratch_bytes(N, D, VP),
           most = train > bf16 ? train : bf16;
    head_scratch = device_alloc(most > eval ? most : eval, "bench");
    StepParams values = {.grad_scale = 0.125f, .muon_momentum = 0.95f, .rule = {{1e-6f, 1e-6f}}};
    step = device_alloc(sizeof *step, "bench");
    rules = device_alloc(MATRICES * sizeof *rules, "bench");
    copy_to_device(stream, step, &values, sizeof values);
    stream_synchronize(stream);
    for (int s = 0; s < SETS; s++)
        fill_set(s);
    for (int s = 0; s < SETS; s++)
        set[s].t[0] = tensor((int64_t)3 * N * D, 1); // room for the three planes of QKV
    for (int i = 0; i < 3; i++)
        square[i] = tensor((int64_t)8192 * 8192, 1);
    copy_rate = 2.0 * MATRICES * D * F * 4 / seconds_of(op_copy);
    product_rate = 2.0 * 8192 * 8192 * 8192 / seconds_of(op_square);
    figure("copy", "fp32", copy_rate * 1e-9, "GB/s");
    figure("product, bf16", "8192x8192x8192", product_rate * 1e-12, "TFLOP/s");
    printf("copy %.0f GB/s, bf16 product %.0f TFLOP/s\n", copy_rate * 1e-9, product_rate * 1e-12);
    if (energy_seconds) {
        energy = energy_open();
        idle_watts = measure_idle_watts();
        figure("idle", "clocks up", idle_watts, "W");
        printf("idle %.0f W, taken off from every op's mJ\n", idle_watts);
    }
    bench_memory_bound();
    bench_products();
    if (sustained)
        take_turns();
    printf("peak %.0f MiB\n", (double)device_bytes_peak() / 1048576);
    return 0;
}
