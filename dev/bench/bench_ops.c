// Time of every op of the CUDA backend at the size of a training run (attention and Newton-Schulz have
// benchmarks of their own).
//
//   bench_ops [--portable] [--sustained SECONDS] [--energy SECONDS] [FILTER...]
//     FILTER        only ops whose name contains one of them
//     --portable    on the kernels and libraries that every supported GPU runs
//     --sustained   all these ops in turn for SECONDS, means of the last two thirds: at the power limit, as
//                   in a training run, where a product takes up to a quarter longer than in the short burst
//                   that is timed otherwise
//     --energy      each op alone for SECONDS: its time then, its mean power, and the mJ of a call, less
//                   those of the idle GPU
//
// cache), and the graph is timed; the best of ROUNDS counts. Shares are of ceilings measured in the same run:
// a copy of 208 MB for bytes, a bf16 product of 8192 x 8192 x 8192 for operations. Bytes are those an op must
// read and write at least, operations 2 per multiply and add.
#include "dev/bench/ops_buffers.h"
#include "dev/bench/ops_timing.h"
#include "llmc/cuda/attention/attention.h"

// ---- the ops ----------------------------------------------------------------------------------------------

#define S set[now]
#define OP(name) static void op_##name(void)
OP(copy) { copy_on_device(stream, set[0].u, set[1].u, (size_t)MATRICES * D * F * 4); }
static floatX *square[3];
OP(square)
{
    matmul_forward(&on_stream, &(Product){square[0], square[1], square[2], NULL, NULL, 8192, 8192, 8192, 1});
}

OP(embed_forward)
{
    embed_forward(stream, &(EmbedForward){S.t[0], S.rstd, S.tokens, S.table, S.w, small, 12, NULL}, N, D);
}
OP(embed_backward)
{
    EmbedBackward a = {S.t[0],  S.t[1], S.t[2], S.t[3],    S.rstd,     S.tokens,
                       S.table, S.w,    small,  small + 8, small + 24, 12};
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
                     .gate_inputs = 12,
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
    matmul_forward(&on_stream, &(Product){S.t[0], S.t[4], S.w, NULL, NULL, N, D, D, 3});
} // t[0] is not followed by t[1]: see main
static void run_qkv_product(const floatX *value_embed)
{
    QkvProductForward a = {S.dqkv,      S.t[2],   S.t[4], S.w,   S.head_rstd, S.head_rstd + N * H,
                           value_embed, S.tokens, small,  S.cos, S.sin};
    qkv_product_forward(stream, &a, N, H, E);
}
OP(qkv_product) { run_qkv_product(NULL); }
OP(qkv_product_ve) { run_qkv_product(S.table); }
OP(o) { matmul_forward(&on_stream, &(Product){S.t[3], S.t[4], S.w, S.t[3], NULL, N, D, D, 1}); }
// With a factor in device memory, as the records of 2026 have it.
OP(qkv_factor) { matmul_forward(&on_stream, &(Product){S.t[0], S.t[4], S.w, NULL, small + 20, N, D, D, 3}); }
OP(o_factor) { matmul_forward(&on_stream, &(Product){S.t[3], S.t[4], S.w, S.t[5], small + 20, N, D, D, 1}); }
OP(proj) { matmul_forward(&on_stream, &(Product){S.t[3], S.wide[0], S.w, S.t[3], NULL, N, F, D, 1}); }
OP(dh_mlp) { matmul_forward(&on_stream, &(Product){S.t[3], S.wide[0], S.w, NULL, NULL, N, F, D, 1}); }
OP(dyg) { matmul_backward_input(&on_stream, &(InputGrad){S.t[3], S.t[4], S.w, N, D, D, NULL}); }
OP(dh_qkv) { matmul_backward_input(&on_stream, &(InputGrad){S.t[3], S.dqkv, S.w, N, D, 3 * D, NULL}); }
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

// The MLP's backward, so many rows at a time, which share the memory of dpre: it might then stay in L2.
static void mlp_backward_by(int rows)
{
    for (int row = 0; row < N; row += rows) {
        const floatX *dy = S.t[3] + (int64_t)row * D, *h = S.t[4] + (int64_t)row * D,
                     *y = S.wide[0] + (int64_t)row * F;
        floatX *dpre = S.wide[1];
        WeightGrad g[] = {{S.dw, dy, y, D, F, row == 0}, {S.dw + D * F, h, dpre, D, F, row == 0}};
        matmul_relu2_backward(&on_stream, dpre, dy, S.w, y, rows, D, F);
        matmul_forward(&on_stream,
                       &(Product){S.t[5] + (int64_t)row * D, dpre, S.w, NULL, NULL, rows, F, D, 1});
        matmul_weight_grads(&on_stream, g, 2, rows);
    }
}
OP(mlp_backward) { mlp_backward_by(N); }
OP(mlp_backward_16384) { mlp_backward_by(16384); }
OP(mlp_backward_8192) { mlp_backward_by(8192); }
OP(mlp_backward_4096) { mlp_backward_by(4096); }

OP(quantize_h) { quantize_e4m3(stream, S.h8, S.t[3], scales + SCALE_H, N, D, QUANTIZE_INVERSE, false); }
OP(quantize_up) { quantize_e4m3(stream, S.mlp_w8, S.w, scales + SCALE_W, D, F, QUANTIZE_INVERSE, true); }
OP(quantize_down) { quantize_e4m3(stream, S.mlp_w8, S.w, scales + SCALE_W, D, F, QUANTIZE_INVERSE, false); }
OP(relu2_bound) { amax_relu2_bound(stream, small + 16, S.w, D, F); }
OP(amax) { amax_accumulate(stream, small + 16, S.w, (int64_t)D * F); }
static Fp8Product fp8_up(void)
{
    return (Fp8Product){S.h8, S.mlp_w8, scales + SCALE_H, scales + SCALE_W, N, D, F, NULL};
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
    Fp8Product p = {S.post8, S.mlp_w8, scales + SCALE_POST, scales + SCALE_W, N, F, D, NULL};
    matmul_fp8(&on_stream, S.t[3], &p, S.t[3]);
}

// Both directions.
OP(quantize_both)
{
    Codes h = {S.h8, S.h8t, scales + SCALE_H, small + 16};
    quantize_codes(stream, &h, S.t[3], N, D);
}
OP(fp8_up_codes)
{
    Fp8Product p = fp8_up();
    Codes y = {S.post8, S.post8t, scales + SCALE_POST, small + 16};
    matmul_fp8_relu2_codes(&on_stream, &y, &p);
}
OP(fp8_relu2_backward)
{
    Fp8Product p = fp8_up();
    Codes dpre = {S.dpre8, S.dpre8t, scales + SCALE_POST, small + 16};
    matmul_fp8_relu2_backward(&on_stream, &dpre, &p, S.post8, scales + SCALE_POST);
}
OP(fp8_dh)
{
    Fp8Product p = {S.dpre8, S.mlp_w8, scales + SCALE_POST, scales + SCALE_W, N, F, D, NULL};
    matmul_fp8(&on_stream, S.t[3], &p, NULL);
}
OP(fp8_dw_mlps)
{
    const float *h = scales + SCALE_H, *post = scales + SCALE_POST;
    Fp8WeightGrad g[] = {{S.dw, S.h8t, S.post8t, h, post, D, F, false},
                         {S.dw + D * F, S.h8t, S.dpre8t, h, post, D, F, false}};
    matmul_fp8_weight_grads(&on_stream, g, 2, N);
}

OP(head_quantize) { head_quantize(stream, &head_plain, S.w8, S.table, VP, D); }
static void head(HeadMode mode, const HeadSpec *spec, int num_targets, bool prefix)
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
                  .prefix = prefix ? set[1 - now].tokens : NULL,
                  .prefix_weight = target_weight,
                  .scratch = head_scratch,
                  .N = N,
                  .d = D,
                  .Vp = VP};
    if (num_targets)
        head_loss_train(stream, &a);
    else
        head_loss_eval(stream, &a);
}
OP(head_fp8) { head(HEAD_FP8, &head_plain, 1, false); }
OP(head_fp8_targets) { head(HEAD_FP8, &head_shifted, MAX_TARGETS, false); }
OP(head_fp8_prefix) { head(HEAD_FP8, &head_shifted, MAX_TARGETS, true); }
OP(head_bf16) { head(HEAD_BF16, &head_plain, 1, false); }
OP(head_eval) { head(HEAD_BF16, &head_plain, 0, false); }

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
OP(cast) { cast_weights(stream, S.wx, S.weight, (int64_t)MATRICES * D * F, false); }

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
    report("quantize_codes, input of the MLP, both ways", op_quantize_both, 2 * t, 0);
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
    report("QKV forward, factor", op_qkv_factor, 0, 3 * square_ops);
    report("O forward, residual, factor", op_o_factor, 0, square_ops);
    report("fc forward, relu^2", op_relu2_forward, 0, mlp);
    report("proj forward, residual", op_proj, 0, mlp);
    report("fc forward in FP8, relu^2, codes", op_fp8_up, 0, mlp);
    report("fc forward in FP8, relu^2, codes, amax", op_fp8_up_amax, 0, mlp);
    report("proj forward in FP8, residual", op_fp8_down, 0, mlp);
    report("fc forward in FP8, relu^2, codes both ways", op_fp8_up_codes, 0, mlp);
    report("proj backward in FP8, relu^2, codes both ways", op_fp8_relu2_backward, 0, mlp);
    report("fc backward in FP8", op_fp8_dh, 0, mlp);
    report("fc and proj weights in FP8", op_fp8_dw_mlps, 0, 2 * mlp);
    report("proj backward, relu^2", op_relu2_backward, 0, mlp);
    report("fc backward", op_dh_mlp, 0, mlp);
    report("O backward", op_dyg, 0, square_ops);
    report("QKV backward", op_dh_qkv, 0, 3 * square_ops);
    report("O weights", op_dw_o, 0, square_ops);
    report("QKV weights", op_dw_qkv, 0, 3 * square_ops);
    report("fc or proj weights", op_dw_mlp, 0, mlp);
    report("QKV and O weights, together", op_dw_attention, 0, 4 * square_ops);
    report("fc and proj weights, together", op_dw_mlps, 0, 2 * mlp);
    report("MLP backward", op_mlp_backward, 0, 4 * mlp);
    report("MLP backward, 16384 rows at a time", op_mlp_backward_16384, 0, 4 * mlp);
    report("MLP backward, 8192 rows at a time", op_mlp_backward_8192, 0, 4 * mlp);
    report("MLP backward, 4096 rows at a time", op_mlp_backward_4096, 0, 4 * mlp);
    report("head, FP8, training", op_head_fp8, 0, 3 * head);
    report("head, bf16, training", op_head_bf16, 0, 3 * head);
    report("head, FP8, training, three targets", op_head_fp8_targets, 0, 3 * head);
    report("head, FP8, training, targets, prefix", op_head_fp8_prefix, 0, 3 * head);
    report("head, evaluation", op_head_eval, 0, head);
}

// Scalars, the head's memory, the step, and all sets.
static void fill_all(void)
{
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
}

// What all shares are of.
static void measure_ceilings(void)
{
    copy_rate = 2.0 * MATRICES * D * F * 4 / seconds_of(op_copy);
    product_rate = 2.0 * 8192 * 8192 * 8192 / seconds_of(op_square);
    figure("copy", "fp32", copy_rate * 1e-9, "GB/s");
    figure("product, bf16", "8192x8192x8192", product_rate * 1e-12, "TFLOP/s");
    printf("copy %.0f GB/s, bf16 product %.0f TFLOP/s\n", copy_rate * 1e-9, product_rate * 1e-12);
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
        else if (!timing_option())
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
    fill_all();
    measure_ceilings();
    timing_begin();
    bench_memory_bound();
    bench_products();
    take_turns();
    printf("peak %.0f MiB\n", (double)device_bytes_peak() / 1048576);
    return 0;
}
