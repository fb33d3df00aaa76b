// Time of the ops that mix streams, gather rows of tables and generate coefficients, at the sizes of a record
// of 2026: all bound by memory.
//
//   bench_mixes [--tokens N] [--sustained SECONDS] [--energy SECONDS] [FILTER...]
//     --tokens     of a micro-batch: 16384 (the default), 32768 or 49152 by the record's stages
//     the rest as in bench_ops
#include "dev/bench/ops_arrays.h"
#include <math.h>
#include <string.h>

enum { D = 768, H = 6, F = 3072, VP = 50304, BIGRAMS = 377280, SIGN_ROWS = 8192, WIDTH = 64, K = 41 };
static int N = 16384;

static void write_shape(char *shape, size_t size, const char *how)
{
    snprintf(shape, size, "N %d, d %d%s", N, D, how);
}

#include "dev/bench/ops_timing.h"

static struct {
    floatX *x[13]; // (N, D) streams
    floatX *pre, *w1, *w2, *b2;
    float *rstd, *columns, *dcolumns, *dw2, *weight;
} set[SETS];
static float *small; // scalars
static StepParams *step;
// Tables are larger than any cache: one for all sets.
static floatX *bigram;
static float *dbigram, *m, *v;
static int32_t *rows, *sign_rows;
static TokenRows bigram_rows, token_rows;
static int num_bigrams, num_tokens; // distinct ones
static RowSigns signs;

// ---- the ops ----------------------------------------------------------------------------------------------

#define S set[now]
#define OP(name) static void op_##name(void)
OP(copy) { copy_on_device(stream, S.x[0], S.x[1], (size_t)N * D * sizeof(floatX)); }

static StreamFactor scalar(int i) { return (StreamFactor){.scalar = small + i}; }
static StreamFactor column(int k) { return (StreamFactor){.column = S.columns + k, .stride = K}; }

OP(mix_scalar)
{
    StreamMix a = {S.x[0], S.x[1], S.rstd, NULL, {{S.x[2], .c = scalar(0)}, {.x = S.x[3]}}, 2};
    stream_mix(stream, &a, N, D);
}
static void mix_injection(float *amax)
{
    StreamMix a =
        {S.x[0],
         S.x[1],
         S.rstd,
         amax,
         {{S.x[2], .c = scalar(0)}, {.x = S.x[3]}, {S.x[4], .c = column(18)}, {S.x[5], .c = column(19)}},
         4};
    stream_mix(stream, &a, N, D);
}
OP(mix_injection) { mix_injection(NULL); }
OP(mix_injection_amax) { mix_injection(small + 16); }
OP(mix_last)
{
    StreamMix a = {NULL, S.x[1], S.rstd, .terms = MIX_STREAMS};
    for (int k = 0; k < MIX_STREAMS; k++)
        a.term[k] = (StreamTerm){S.x[2 + k], NULL, column(k)};
    a.term[5].x = bigram;
    a.term[5].rows = rows;
    stream_mix(stream, &a, N, D);
}

static StreamReader reader(int x, StreamFactor c, float *dscalar, float *dcolumn)
{
    return (StreamReader){S.x[x], 0, c, dscalar, dcolumn};
}
static StreamReader scalar_reader(int x) { return reader(x, scalar(0), small + 32, NULL); }
static StreamReader column_reader(int x, int k) { return reader(x, column(k), NULL, S.dcolumns + k); }

// A stream that is h / rstd, with so many readers and norms.
static StreamGrad grad_of_h(int readers, int norms)
{
    StreamGrad a = {.dx = S.x[0],
                    .reader = {scalar_reader(1)},
                    .readers = readers,
                    .norms = norms,
                    .h = S.x[3],
                    .rstd = S.rstd};
    for (int k = 1; k < readers; k++)
        a.reader[k] = reader(3 + k, column(k), NULL, NULL);
    for (int k = 0; k < norms; k++)
        a.norm[k].dh = S.x[k ? 7 + k : 2];
    return a;
}

OP(grad_norm)
{
    StreamGrad a = grad_of_h(1, 1);
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_norm_lead)
{
    StreamGrad a = grad_of_h(1, 1);
    a.norm[0].lead = S.dcolumns;
    a.norm[0].leads = 6;
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_norm_beside)
{
    StreamGrad a = grad_of_h(1, 1);
    a.beside = S.x[4];
    a.dbeside = small + 33;
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_4) // with a norm
{
    StreamGrad a = grad_of_h(4, 1);
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_5)
{
    StreamGrad a = grad_of_h(5, 1);
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_3_norms)
{
    StreamGrad a = grad_of_h(4, 3);
    for (int k = 0; k < 2; k++) {
        a.norm[k].lead = S.dcolumns;
        a.norm[k].leads = 6;
    }
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_add_norm) // the second and third of them one by one
{
    StreamGrad a = grad_of_h(0, 1);
    a.accumulate = true;
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_kept)
{
    StreamGrad a = {.dx = S.x[0],
                    .x = S.x[4],
                    .reader = {scalar_reader(1), column_reader(5, 3), column_reader(6, 4)},
                    .readers = 3,
                    .norm = {{.dh = S.x[2]}},
                    .norms = 1,
                    .h = S.x[3],
                    .rstd = S.rstd};
    stream_grads(stream, &a, 1, N, D);
}
// Two streams with the same sums, from x[4] on.
static void grad_pair(int readers, bool dots, bool accumulate)
{
    StreamGrad a[2] = {{.dx = S.x[0], .x = S.x[2], .readers = readers, .accumulate = accumulate},
                       {.dx = S.x[1], .x = S.x[3], .readers = readers, .accumulate = accumulate}};
    for (int s = 0; s < 2; s++)
        for (int k = 0; k < readers; k++)
            a[s].reader[k] =
                reader(4 + k, column(18 + 2 * k + s), NULL, dots ? S.dcolumns + 18 + 2 * k + s : NULL);
    stream_grads(stream, a, 2, N, D);
}
OP(grad_pair_6) { grad_pair(6, false, false); }
OP(grad_pair_more) { grad_pair(6, false, true); }
OP(grad_pair_9) { grad_pair(9, false, false); }
OP(grad_pair_dots) { grad_pair(6, true, false); }
// Before the generator of the columns: no gradient of the streams yet.
static void grad_columns(int streams, int sums)
{
    StreamGrad a[STREAM_GRADS] = {0};
    for (int s = 0; s < streams; s++) {
        a[s].x = S.x[s];
        a[s].readers = sums;
        for (int k = 0; k < sums; k++)
            a[s].reader[k] = column_reader(5 + k, sums * s + k);
    }
    stream_grads(stream, a, streams, N, D);
}
OP(grad_columns) { grad_columns(2, 5); }
OP(grad_columns_4) { grad_columns(4, 3); }
OP(grad_columns_5) { grad_columns(5, 1); }
OP(grad_branch) // of what an MLP gives
{
    StreamGrad a = {.dx = S.x[0], .x = S.x[1], .reader = {scalar_reader(2)}, .readers = 1};
    stream_grads(stream, &a, 1, N, D);
}
OP(grad_factor) // of its factor alone
{
    StreamGrad a = {.x = S.x[1], .reader = {scalar_reader(2)}, .readers = 1};
    stream_grads(stream, &a, 1, N, D);
}

OP(signed_gather) { signed_gather(stream, S.x[0], bigram, rows, &signs, N, D, D); }
OP(table_grad_signs)
{
    RowReader r = {.g = S.x[0], .signs = &signs};
    table_grad(stream, dbigram, &r, 1, &bigram_rows, N, D, D);
}
OP(table_grad_factors)
{
    RowReader r = {S.x[0], 0, S.columns, K, H, S.dcolumns, 6, NULL};
    table_grad(stream, dbigram, &r, 1, &token_rows, N, D, D);
}

static Generator generator(void) { return (Generator){S.w1, S.w2, S.b2, small, WIDTH, K}; }
OP(generator_forward)
{
    Generator g = generator();
    generator_forward(stream, S.columns, S.pre, &g, S.x[0], N, D);
}
static void backward_of_generator(const floatX *residual)
{
    Generator g = generator();
    GeneratorBackward a = {&g,         S.x[0], S.x[1],  S.dw2, S.dw2 + K * WIDTH, S.dw2 + K * WIDTH + K,
                           S.dcolumns, S.pre,  residual};
    generator_backward(stream, &a, N, D);
}
OP(generator_backward) { backward_of_generator(NULL); }
OP(generator_backward_residual) { backward_of_generator(S.x[2]); }

OP(adam)
{
    AdamRule rule = {0, 0.75f, 0.95f, 1e-10f, 0.25f, 0.05f};
    adam_update_decay(stream, bigram, m, v, dbigram, step, rule, (int64_t)BIGRAMS * D);
}
OP(weight_scale) { weight_scale_backward(stream, S.weight, small + 33, S.x[0], small, (int64_t)D * F); }

// ---- main -------------------------------------------------------------------------------------------------

// The distinct of N rows below `count`, and their places.
static TokenRows places_of(const int32_t *row, int count, int *num_rows)
{
    int32_t *order = xcalloc((size_t)N, sizeof *order), *distinct = xcalloc((size_t)N, sizeof *distinct),
            *start = xcalloc((size_t)N + 1, sizeof *start),
            *first = xcalloc((size_t)count + 1, sizeof *first);
    int filled = 0;
    for (int i = 0; i < N; i++)
        first[row[i] + 1]++;
    *num_rows = 0;
    for (int r = 0; r < count; r++) {
        if (first[r + 1]) {
            distinct[*num_rows] = r;
            start[(*num_rows)++] = filled;
        }
        filled += first[r + 1];
        first[r + 1] = filled;
    }
    start[*num_rows] = N;
    for (int i = 0; i < N; i++)
        order[first[row[i]]++] = i;
    TokenRows places = {integers(order, N), integers(distinct, N), integers(start, N + 1),
                        integers(num_rows, 1)};
    int32_t *host[] = {order, distinct, start, first};
    for (int i = 0; i < 4; i++)
        free(host[i]);
    return places;
}

// Tokens whose frequencies fall as in text (Zipf), and rows as bigrams hash to them.
static void fill_rows(void)
{
    int32_t *token = xcalloc((size_t)N, sizeof *token), *row = xcalloc((size_t)N, sizeof *row),
            *sign = xcalloc((size_t)N, sizeof *sign);
    for (int i = 0, before = 0; i < N; before = token[i++]) {
        token[i] = (int)fmin(VP - 1, exp((double)rand() / RAND_MAX * log(50000.0)) - 1);
        row[i] = (int32_t)((36313u * (unsigned)token[i] ^ 27191u * (unsigned)before) % (BIGRAMS - 1));
        sign[i] = (token[i] ^ before) % SIGN_ROWS;
    }
    rows = integers(row, N);
    sign_rows = integers(sign, N);
    bigram_rows = places_of(row, BIGRAMS, &num_bigrams);
    token_rows = places_of(token, VP, &num_tokens);
    free(token);
    free(row);
    free(sign);
}

static void fill_all(void)
{
    small = floats(64, 0.3f);
    StepParams values = {.grad_scale = 0.125f, .rule = {{1e-6f, 1e-6f}}};
    step = device_alloc(sizeof *step, "bench");
    copy_to_device(stream, step, &values, sizeof values);
    int64_t table = (int64_t)BIGRAMS * D;
    bigram = tensor(table, 0.1f);
    dbigram = device_alloc((size_t)table * sizeof(float), "bench");
    m = device_alloc((size_t)table * sizeof(float), "bench");
    v = device_alloc((size_t)table * sizeof(float), "bench");
    fill_rows();
    signs = (RowSigns){(const uint32_t *)tensor((int64_t)SIGN_ROWS * D / 16, 1), sign_rows};
    for (int s = 0; s < SETS; s++) {
        for (int i = 0; i < 13; i++)
            set[s].x[i] = tensor((int64_t)N * D, 1);
        set[s].pre = tensor((int64_t)N * WIDTH, 1);
        set[s].w1 = tensor((int64_t)WIDTH * D, 0.05f);
        set[s].w2 = tensor((int64_t)K * WIDTH, 0.2f);
        set[s].b2 = tensor(K, 1);
        set[s].rstd = floats(N, 1);
        set[s].columns = floats((int64_t)N * K, 1);
        set[s].dcolumns = floats((int64_t)N * K, 1);
        set[s].dw2 = floats(K * (WIDTH + 2), 1);
        set[s].weight = floats((int64_t)D * F, 0.05f);
    }
}

static void bench_all(void)
{
    double t = (double)N * D * 2, numbers = (double)N * K * 4, pre = (double)N * WIDTH * 2,
           of_bigrams = num_bigrams * (double)D * 8, of_tokens = num_tokens * (double)D * 8;
    report("stream_mix, 2 terms", op_mix_scalar, 4 * t, 0);
    report("stream_mix, 4 terms", op_mix_injection, 6 * t, 0);
    report("stream_mix, 4 terms, amax", op_mix_injection_amax, 6 * t, 0);
    report("stream_mix, 6 terms, h alone", op_mix_last, 7 * t, 0);
    report("stream_grads, norm", op_grad_norm, 4 * t, 0);
    report("stream_grads, norm, lead", op_grad_norm_lead, 4 * t, 0);
    report("stream_grads, norm, factor beside", op_grad_norm_beside, 5 * t, 0);
    report("stream_grads, norm, 3 readers", op_grad_kept, 7 * t, 0);
    report("stream_grads, norm, from h, 4 readers", op_grad_4, 7 * t, 0);
    report("stream_grads, norm, from h, 5 readers", op_grad_5, 8 * t, 0);
    report("stream_grads, 3 norms, 4 readers", op_grad_3_norms, 9 * t, 0);
    report("stream_grads, norm added to", op_grad_add_norm, 4 * t, 0);
    report("stream_grads, branch", op_grad_branch, 3 * t, 0);
    report("stream_grads, factor alone", op_grad_factor, 2 * t, 0);
    report("stream_grads, columns of 2 streams", op_grad_columns, 7 * t, 0);
    report("stream_grads, columns of 4 streams, 3 sums", op_grad_columns_4, 7 * t, 0);
    report("stream_grads, columns of 5 streams, 1 sum", op_grad_columns_5, 6 * t, 0);
    report("stream_grads, 2 streams, 6 readers", op_grad_pair_dots, 10 * t, 0);
    report("stream_grads, 2 streams, 6 readers, no dots", op_grad_pair_6, 8 * t, 0);
    report("stream_grads, 2 streams added to, no dots", op_grad_pair_more, 10 * t, 0);
    report("stream_grads, 2 streams, 9 readers, no dots", op_grad_pair_9, 11 * t, 0);
    report("signed_gather", op_signed_gather, 2 * t, 0);
    report("table_grad, signs", op_table_grad_signs, t + of_bigrams, 0);
    report("table_grad, tokens, factors, lead", op_table_grad_factors, t + of_tokens, 0);
    report("generator_forward", op_generator_forward, t + pre + numbers, 0);
    report("generator_backward", op_generator_backward, t + 2 * pre + numbers, 0);
    report("generator_backward, residual", op_generator_backward_residual, 2 * t + 2 * pre + numbers, 0);
    // Of few rows there is a gradient: those of the others are not cleared.
    report("adam_update_decay, bigram table", op_adam, (double)BIGRAMS * D * 24, 0);
    report("weight_scale_backward, MLP", op_weight_scale, (double)D * F * 10, 0);
}

int main(int argc, char **argv)
{
    set_program_name("bench_mixes", -1);
    figures_open(&argc, argv);
    for (filters = argv + 1; filters < argv + argc && (*filters)[0] == '-'; filters++) {
        if (!strcmp(*filters, "--tokens") && filters[1] && (N = atoi(filters[1])) > 0)
            filters++;
        else if (!timing_option())
            fatal(EXIT_USAGE, "usage: bench_mixes [--csv FILE] [--tokens N] [--sustained SECONDS] "
                              "[--energy SECONDS] [FILTER...]");
    }
    OpSizes sizes = {.tokens = N,
                     .eval_tokens = N,
                     .dim = D,
                     .heads = H,
                     .mlp_dim = F,
                     .vocab_padded = VP,
                     .self_check = SELF_CHECK_NEVER};
    backend_open(0);
    backend_reserve(&sizes);
    printf("%s\n", backend_description());
    stream = stream_create();
    fill_all();
    copy_rate = 2.0 * N * D * sizeof(floatX) / seconds_of(op_copy);
    printf("%d tokens, %d distinct, bigrams in %d rows; copy %.0f GB/s\n", N, num_tokens, num_bigrams,
           copy_rate * 1e-9);
    timing_begin();
    bench_all();
    take_turns();
    return 0;
}
