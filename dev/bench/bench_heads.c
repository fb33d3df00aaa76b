// Time of the ops around and inside of attention of the records of 2026, at the micro-batches of record 89's
// first and last stage: heads before and after attention, attention alone (plain and in pairs of heads), DC.
//
//   bench_heads [--csv FILE] [--portable] [--deterministic] [--keys WIDTH] [FILTER...]
//       --deterministic: dq of attention in a fixed order of sums; WIDTH: of a head of q and k; without it
//       attention has heads of E, and what is before it heads of E and of 96, as in the records of August
//       2026; FILTER: only ops whose name contains one of them
//
// A call is captured REPEATS times in a graph; the best of ROUNDS launches counts. GB/s and TFLOP/s are of
// the least that an op must move and compute (llmc/ops/costs.h has the same).
#include "dev/bench/figures.h"
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

enum {
    MOST_N = 49152,
    H = 6,
    E = 128,
    NARROW = 96, // heads of q and k
    D = H * E,
    COLUMNS = 64,  // of a row of the generator
    ROWS = 50304,  // of the table of values
    KEYS = 112,    // of DC
    WINDOW = 1408, // the longest
    REPEATS = 10,
    ROUNDS = 5,
    MOST_DOCUMENTS = 1024,
    TENSORS = 12,
    RANDOM = 1 << 20
};
#define SCALE 0.1f

static Stream stream;
static floatX *t[TENSORS], *k_shifted, *dqkv, *raw, *weights, *values, *gate_w, *cosine,
    *sine; // t: (N, D); k_shifted: (N + 1, D); raw: (3, N, D)
static float *columns, *dcolumns, *rstd_q, *rstd_k, *lse, *gate, *leads, *dgate_w;
static int32_t *tokens, *table, *host_table;
static void *scratch, *dc_scratch;
static const char *order = "";          // of sums, for the figures
static int N, window, slots, width = E; // of the call that is timed; width: of a head of q and k
static int cu[MOST_DOCUMENTS + 1], documents;

// ---- inputs -----------------------------------------------------------------------------------------------

static floatX *tensor(int64_t n, float size)
{
    floatX *host = xcalloc((size_t)n, sizeof *host), *p = device_alloc((size_t)n * sizeof *p, "bench");
    for (int64_t i = 0; i < n; i++) // repeated, as random numbers take longer than all ops
        host[i] =
            i < RANDOM ? float_to_x(size * ((float)rand() / (float)RAND_MAX * 2 - 1)) : host[i - RANDOM];
    copy_to_device(stream, p, host, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    free(host);
    return p;
}

static float *floats(int64_t n)
{
    float *host = xcalloc((size_t)n, sizeof *host), *p = device_alloc((size_t)n * sizeof *p, "bench");
    for (int64_t i = 0; i < n; i++)
        host[i] = 0.5f + (float)(i % 997) / 997;
    copy_to_device(stream, p, host, (size_t)n * sizeof *p);
    stream_synchronize(stream);
    free(host);
    return p;
}

// Documents of lengths as in text (lognormal, median 500, at most 2048), in `each` rows a token.
static void make_table(int each)
{
    srand(1);
    documents = 0;
    for (int end = 0; end < N; documents++) {
        double normal = sqrt(-2 * log((rand() + 1.0) / (RAND_MAX + 1.0))) * cos(2 * M_PI * rand() / RAND_MAX);
        int n = (int)fmin(2048, 1 + 500 * exp(normal));
        cu[documents] = each * end;
        end = documents + 2 > MOST_DOCUMENTS ? N : (int)min_i64(N, end + n);
    }
    cu[documents] = each * N;
    slots = attention_table_build(host_table, cu, documents, each * N, 0);
    copy_to_device(stream, table, host_table, (size_t)attention_table_ints(each * N, 0) * sizeof *table);
    stream_synchronize(stream);
}

static double pairs(int reach) // of rows that see each other: i - j <= reach
{
    double sum = 0;
    for (int i = 0; i < documents; i++)
        for (int j = 0, n = cu[i + 1] - cu[i]; j < n; j++)
            sum += j < reach ? j + 1 : reach + 1;
    return sum;
}

static void make_inputs(void)
{
    for (int i = 0; i < TENSORS; i++)
        t[i] = tensor((int64_t)MOST_N * D, 1);
    k_shifted = tensor((int64_t)(MOST_N + 1) * D, 1);
    dqkv = tensor((int64_t)MOST_N * 3 * D, 1);
    raw = tensor((int64_t)MOST_N * 3 * D, 1);
    weights = tensor((int64_t)3 * D * D, 0.1f);
    values = tensor((int64_t)ROWS * D, 1);
    gate_w = tensor(12 * (int64_t)H, 1);
    cosine = tensor((int64_t)2 * MOST_N * (E / 4), 1);
    sine = tensor((int64_t)2 * MOST_N * (E / 4), 1);
    columns = floats((int64_t)MOST_N * COLUMNS);
    dcolumns = floats((int64_t)MOST_N * COLUMNS);
    rstd_q = floats((int64_t)MOST_N * H);
    rstd_k = floats((int64_t)MOST_N * H);
    lse = floats((int64_t)MOST_N * H);
    gate = floats((int64_t)MOST_N * H);
    leads = floats(12 * (int64_t)MOST_N);
    dgate_w = floats(12 * (int64_t)H);
    int32_t *host = xcalloc(MOST_N, sizeof *host);
    for (int i = 0; i < MOST_N; i++)
        host[i] = (int32_t)fmin(ROWS - 1, exp((double)rand() / RAND_MAX * log(50000.0)) - 1); // Zipf
    tokens = device_alloc(MOST_N * sizeof *tokens, "bench");
    copy_to_device(stream, tokens, host, MOST_N * sizeof *tokens);
    stream_synchronize(stream);
    free(host);
    size_t ints = (size_t)attention_table_ints(2 * MOST_N, 0);
    host_table = xcalloc(ints, sizeof *host_table);
    table = device_alloc(ints * sizeof *table, "bench");
    size_t plain = sdpa_scratch_bytes(MOST_N, H, width, E),
           paired = sdpa_scratch_bytes(2 * MOST_N, H / 2, width, E);
    dc_scratch = device_alloc(dc_scratch_bytes(MOST_N, H), "bench");
    scratch = device_alloc(plain > paired ? plain : paired, "bench");
}

// ---- the ops ----------------------------------------------------------------------------------------------

#define OP(name) static void op_##name(void)
typedef enum { NO_VALUES, GATES, FACTORS } Values; // layers without, 1 to 9, and 10
static HeadsForward heads_of(Values kind)
{
    HeadsForward a = {.qk = width,
                      .q = t[0],
                      .k = k_shifted,
                      .v = t[1],
                      .rstd_q = rstd_q,
                      .rstd_k = rstd_k,
                      .raw_q = t[2],
                      .raw_k = t[3],
                      .raw_v = t[4],
                      .cos = cosine,
                      .sin = sine,
                      .offset = kind == FACTORS};
    if (kind == GATES)
        a.value = (ValueMix){.table = values,
                             .tokens = tokens,
                             .gate_w = gate_w,
                             .h = t[5],
                             .gate = gate,
                             .gate_inputs = 6};
    if (kind == FACTORS)
        a.value = (ValueMix){.table = values,
                             .tokens = tokens,
                             .factor = columns,
                             .stride = COLUMNS,
                             .groups = 2,
                             .extra = t[6]};
    return a;
}
static void heads_forward_of(Values kind)
{
    HeadsForward a = heads_of(kind);
    heads_forward(stream, &a, N, H, E);
}
OP(heads) { heads_forward_of(NO_VALUES); }
OP(heads_gates) { heads_forward_of(GATES); }
OP(heads_factors) { heads_forward_of(FACTORS); }

// Raw q, k and v and all of that, as two ops and as one; q and v in place, as in training.
static void product_and_heads(Values kind, bool together)
{
    ProductContext on_stream = {stream, NULL};
    QkvHeadsForward a = {.heads = heads_of(kind), .raw = raw, .x = t[5], .w = weights};
    a.heads.q = raw;
    a.heads.v = raw + (int64_t)2 * N * D;
    if (together) {
        qkv_heads_forward(&on_stream, &a, N, H, E);
        return;
    }
    HeadsForward heads = qkv_heads_planes(&a, N, H);
    matmul_forward(&on_stream, &(Product){raw, t[5], weights, NULL, NULL, N, D, D, 3});
    heads_forward(stream, &heads, N, H, E);
}
OP(two_ops) { product_and_heads(NO_VALUES, false); }
OP(two_ops_gates) { product_and_heads(GATES, false); }
OP(two_ops_factors) { product_and_heads(FACTORS, false); }
OP(qkv_heads) { product_and_heads(NO_VALUES, true); }
OP(qkv_heads_gates) { product_and_heads(GATES, true); }
OP(qkv_heads_factors) { product_and_heads(FACTORS, true); }

// The gradients of q, k and v are three tensors in a row.
static HeadsBackward gradients_of(const HeadsForward *f, floatX **of_qkv)
{
    return (HeadsBackward){.forward = f,
                           .dqkv = dqkv,
                           .dq = of_qkv[0],
                           .dk = of_qkv[1],
                           .dv = of_qkv[2],
                           .dgate_w = dgate_w,
                           .dh_lead = leads,
                           .du_lead = leads + 6 * (int64_t)MOST_N,
                           .dfactor = dcolumns};
}
static void heads_backward_of(Values kind)
{
    HeadsForward f = heads_of(kind);
    HeadsBackward a = gradients_of(&f, t + 7);
    if (kind == FACTORS) {
        a.dq_add = t[10];
        a.dk_add = t[11];
        a.dv_add = t[6];
    }
    heads_backward(stream, &a, N, H, E);
}
OP(heads_backward) { heads_backward_of(NO_VALUES); }
OP(heads_backward_gates) { heads_backward_of(GATES); }
OP(heads_backward_factors) { heads_backward_of(FACTORS); }

static HeadsOutput output_of(void)
{
    return (HeadsOutput){.out = t[0],
                         .y = t[1],
                         .v = t[2],
                         .alpha = columns,
                         .gate = columns + H,
                         .alpha_stride = COLUMNS,
                         .gate_stride = COLUMNS};
}
OP(output)
{
    HeadsOutput a = output_of();
    heads_output_forward(stream, &a, N, H, E);
}
OP(output_backward)
{
    HeadsOutput f = output_of();
    HeadsOutputBackward a =
        {.forward = &f, .dy = t[3], .dv = t[4], .dalpha = dcolumns, .dgate = dcolumns + H, .dout = t[5]};
    heads_output_backward(stream, &a, N, H, E);
}

static SdpaForward sdpa_of(void)
{
    return (SdpaForward){.y = t[3],
                         .lse = lse,
                         .q = t[0],
                         .k = t[1],
                         .v = t[2],
                         .qk = width,
                         .table = table,
                         .slots = slots,
                         .window = window,
                         .scale = SCALE};
}
static void sdpa_backward_of(int rows, int heads)
{
    SdpaForward f = sdpa_of();
    SdpaBackward a = {.forward = &f, .dq = t[4], .dk = t[5], .dv = t[6], .dy = t[7], .scratch = scratch};
    sdpa_backward(stream, &a, rows, heads, E);
}
OP(sdpa)
{
    SdpaForward a = sdpa_of();
    sdpa_forward(stream, &a, N, H, E);
}
OP(sdpa_paired)
{
    SdpaForward a = sdpa_of();
    sdpa_forward(stream, &a, 2 * N, H / 2, E);
}
static void sdpa_heads_backward_of(Values kind)
{
    SdpaForward f = sdpa_of();
    HeadsForward heads = heads_of(kind);
    SdpaHeadsBackward a =
        {.sdpa = {.forward = &f, .dq = t[4], .dk = t[5], .dv = t[6], .dy = t[7], .scratch = scratch},
         .heads = gradients_of(&heads, t + 4)};
    sdpa_heads_backward(stream, &a, N, H, E);
}
OP(sdpa_heads_backward) { sdpa_heads_backward_of(NO_VALUES); }
OP(sdpa_heads_backward_gates) { sdpa_heads_backward_of(GATES); }
OP(sdpa_heads_backward_factors) { sdpa_heads_backward_of(FACTORS); }
OP(sdpa_backward) { sdpa_backward_of(N, H); }
OP(sdpa_paired_backward) { sdpa_backward_of(2 * N, H / 2); }

static DcForward dc_of(void)
{
    return (DcForward){.y = t[3],
                       .lse = lse,
                       .qk = width,
                       .q = t[0],
                       .k = t[1],
                       .v = t[2],
                       .w1 = columns,
                       .w2 = columns + H,
                       .stride = COLUMNS,
                       .table = table,
                       .slots = slots,
                       .scale = SCALE,
                       .keys = KEYS};
}
OP(dc)
{
    DcForward a = dc_of();
    dc_forward(stream, &a, N, H, E);
}
OP(dc_backward)
{
    DcForward f = dc_of();
    DcBackward a = {.forward = &f,
                    .dq = t[4],
                    .dk = t[5],
                    .dv = t[6],
                    .dw1 = dcolumns,
                    .dw2 = dcolumns + H,
                    .dy = t[7],
                    .scratch = dc_scratch};
    dc_backward(stream, &a, N, H, E);
}

// ---- timing -----------------------------------------------------------------------------------------------

static double seconds_of(void (*op)(void))
{
    cudaEvent_t begin, end;
    double best = INFINITY;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    op();
    stream_synchronize(stream);
    graph_begin(stream);
    for (int i = 0; i < REPEATS; i++)
        op();
    Graph *g = graph_end(stream);
    for (int i = 0; i < ROUNDS; i++) {
        float ms;
        cudaEventRecord(begin, stream);
        graph_launch(g, stream);
        cudaEventRecord(end, stream);
        cudaEventSynchronize(end);
        cudaEventElapsedTime(&ms, begin, end);
        if (i)
            best = fmin(best, (double)ms); // the first launch uploads the graph
    }
    graph_destroy(g);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return best / REPEATS * 1e-3;
}

static char **filters; // up to a NULL

// tensors: (N, D) in bf16 that are read or written; operations 0: not the measure
// values, keys: tensors of v's width and of that of q and k which the op must move; operations: 0: not shown
static void report(const char *name, void (*op)(void), double values, double keys, double operations)
{
    bool wanted = !*filters;
    for (char **f = filters; *f; f++)
        wanted |= strstr(name, *f) != NULL;
    if (!wanted)
        return;
    char shape[96];
    double s = seconds_of(op);
    snprintf(shape, sizeof shape, "N %d, H %d, e %d%s%.0d%s%.0d%s", N, H, E, width == E ? "" : ", q and k ",
             width == E ? 0 : width, operations > 0 ? ", window " : "", operations > 0 ? window : 0, order);
    figure(name, shape, s * 1e6, "us");
    printf("%-36s %-46s %8.1f us %6.0f GB/s", name, shape, s * 1e6,
           (values * E + keys * width) * N * H * 2 / s * 1e-9);
    if (operations > 0)
        printf(" %6.0f TFLOP/s", operations / s * 1e-12);
    printf("\n");
    fflush(stdout);
}

static void bench_before(void)
{
    report("heads_forward", op_heads, 2, 4, 0);
    report("heads_forward, gates", op_heads_gates, 3, 4, 0);
    report("heads_forward, factors, mixture", op_heads_factors, 4, 4, 0);
    report("heads_backward", op_heads_backward, 2, 6, 0);
    report("heads_backward, gates", op_heads_backward_gates, 3, 6, 0);
    report("heads_backward, factors, sums", op_heads_backward_factors, 4, 8, 0);
}

static void bench_products(void)
{
    report("product, heads_forward", op_two_ops, 4, 4, 0);
    report("product, heads_forward, gates", op_two_ops_gates, 5, 4, 0);
    report("product, heads_forward, factors", op_two_ops_factors, 6, 4, 0);
    report("qkv_heads_forward", op_qkv_heads, 2, 2, 0);
    report("qkv_heads_forward, gates", op_qkv_heads_gates, 5, 2, 0);
    report("qkv_heads_forward, factors", op_qkv_heads_factors, 6, 2, 0);
}

static void bench_rows(void)
{
    int given = width;
    bench_before();
    if (given == E) {
        bench_products();
        width = NARROW;
        bench_before();
        width = given;
    }
    report("heads_output_forward", op_output, 3, 0, 0);
    report("heads_output_backward", op_output_backward, 5, 0, 0);
}

static void bench_attention(int plain_window, int paired_window)
{
    make_table(1);
    window = KEYS - 1;
    // Of a pair of rows: q k and p v; backward q k, ds k and ds q, dy v and p dy.
    double forward = 2.0 * H * (width + E), backward = 2.0 * H * (3 * width + 2 * E);
    report("dc_forward", op_dc, 3, 2, forward * pairs(window));
    report("dc_backward", op_dc_backward, 3, 4, backward * pairs(window));
    window = plain_window;
    report("sdpa_forward", op_sdpa, 2, 2, forward * pairs(window));
    report("sdpa_backward", op_sdpa_backward, 4, 4, backward * pairs(window));
    report("sdpa_heads_backward", op_sdpa_heads_backward, 4, 5, backward * pairs(window));
    report("sdpa_heads_backward, gates", op_sdpa_heads_backward_gates, 5, 5, backward * pairs(window));
    report("sdpa_heads_backward, factors", op_sdpa_heads_backward_factors, 5, 5, backward * pairs(window));
    make_table(2);
    window = paired_window;
    report("sdpa_forward, pairs", op_sdpa_paired, 2, 2, forward / 2 * pairs(window));
    report("sdpa_backward, pairs", op_sdpa_paired_backward, 4, 4, backward / 2 * pairs(window));
}

int main(int argc, char **argv)
{
    static const int sizes[][3] = {{16384, 384, 128},
                                   {16384, 128, 128},
                                   {49152, WINDOW, 640},
                                   {49152, 640, 640}};
    OpSizes reserved = {.tokens = MOST_N,
                        .eval_tokens = MOST_N,
                        .dim = D,
                        .heads = H,
                        .reach = WINDOW,
                        .mlp_dim = 16,
                        .vocab_padded = 128};
    set_program_name("bench_heads", -1);
    figures_open(&argc, argv);
    filters = argv + 1;
    if (*filters && !strcmp(*filters, "--portable")) {
        reserved.portable = true;
        filters++;
    }
    if (*filters && !strcmp(*filters, "--deterministic")) {
        reserved.deterministic = true;
        order = ", deterministic";
        filters++;
    }
    if (*filters && !strcmp(*filters, "--keys")) {
        width = *++filters ? atoi(*filters++) : 0;
        if (width < 8 || width > E || width % 8)
            fatal(EXIT_BAD_INPUT, "--keys: a multiple of 8 up to %d", E);
    }
    backend_open(0);
    backend_reserve(&reserved);
    printf("%s\n", backend_description());
    stream = stream_create();
    make_inputs();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        N = sizes[i][0];
        if (i % 2 == 0)
            bench_rows();
        bench_attention(sizes[i][1], sizes[i][2]);
    }
    return 0;
}
