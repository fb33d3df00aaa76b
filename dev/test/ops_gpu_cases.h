// The cases of test_ops_gpu.c: one for each op, its buffers and its call, in a file for each subject.
// Pointers in `p` stand in the order of the add() calls.
#pragma once

#define SIZES \
    int N = c->z.N, H = c->z.H, e = c->z.e, d = c->d, F = c->z.F, Vp = c->z.Vp; \
    (void)N, (void)H, (void)e, (void)d, (void)F, (void)Vp
#define RUN(name) static void run_##name(const Ops *o, void **p, const Case *c)
#define DESCRIBE(name) static void describe_##name(Case *c)

#include "dev/test/ops_gpu_head.h"
#include "dev/test/ops_gpu_optimizers.h"
#include "dev/test/ops_gpu_products.h"
#include "dev/test/ops_gpu_rows.h"
#include "dev/test/ops_gpu_mixes.h" // takes token rows from that of the embedding
#include "dev/test/ops_gpu_heads.h" // takes angles from those of the products
#include "dev/test/ops_gpu_sdpa.h"
#include "dev/test/ops_gpu_decode.h" // takes DC's columns from there

#define CASE(name, fix, variants, elementwise) \
    { \
#name, describe_##name, run_##name, fix, variants, elementwise, {0 }, 0, 0, 0, {{0 } }, { 0 } \
    }
static Case cases[] = {
    CASE(embed_forward, fix_before, 2, true),
    CASE(embed_backward, NULL, 1, true),
    CASE(embedding_grad, fix_embedding_grad, 3, true),
    CASE(coefficients_forward, NULL, 1, false),
    CASE(coefficients_backward, NULL, 1, false),
    CASE(mix_forward, NULL, 3, true),
    CASE(mix_backward, fix_mix_backward, 3, true),
    CASE(rmsnorm_forward, NULL, 1, true),
    CASE(rmsnorm_backward, NULL, 1, true),
    CASE(signed_gather, fix_signed_gather, 2, true),
    CASE(table_grad, fix_table_grad, 4, true),
    CASE(rows_moved, fix_rows_moved, 4, true),
    CASE(stream_mix, fix_stream_mix, STREAM_MIX_VARIANTS, true),
    CASE(stream_grads, fix_stream_grads, STREAM_GRADS_VARIANTS, true),
    CASE(generator_forward, NULL, 3, true),
    CASE(generator_backward, NULL, 3, true),
    CASE(matmul, NULL, 8, false),
    CASE(matmul_down, NULL, 6, false),
    CASE(matmul_input, NULL, 1, false),
    CASE(matmul_weight, NULL, 4, false),
    CASE(weight_scale_forward, NULL, 1, true),
    CASE(weight_scale, NULL, 1, true),
    CASE(relu2_forward, NULL, 1, false),
    CASE(relu2_backward, fix_squares, 1, false),
    CASE(rope, fix_frequencies, 2, true),
    CASE(qkv_forward, fix_qkv_forward, 2, true),
    CASE(qkv_product, fix_qkv_product, 4, false),
    CASE(heads_forward, fix_angles_by_name, HEADS_VARIANTS, true),
    CASE(qkv_heads, fix_qkv_heads, QKV_HEADS_VARIANTS, false),
    CASE(heads_backward, fix_angles_by_name, HEADS_VARIANTS, true),
    CASE(heads_output_forward, fix_values, 3, true),
    CASE(heads_output_backward, fix_values, 3, true),
    CASE(sdpa, NULL, SDPA_VARIANTS, false),
    CASE(sdpa_heads, fix_angles_by_name, HEADS_VARIANTS, false),
    CASE(dc, NULL, 3, false),
    CASE(decode, fix_decode, 4, false),
    CASE(dc_decode, fix_dc_decode, 2, false),
    CASE(head_train, fix_head, HEAD_VARIANTS, false),
    CASE(head_eval, fix_head_eval, 4, false),
    CASE(head_logits, NULL, 2, false),
    CASE(adam, fix_adam, 2, true),
    CASE(adam_decay, fix_adam_decay, 1, true),
    CASE(momentum, fix_momentum, 1, true),
    CASE(update, fix_update, 4, false),
    CASE(cast, NULL, 1, true),
};
