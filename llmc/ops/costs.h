// What each op must at least do, for OP_SCOPE and OP_PART of profile.h.
//
// flops: two for each multiplication that goes into a sum; of symmetric results one triangle; of attention
// the pairs that the mask leaves; of FP8 products as many as of others, though their ceiling is twice as
// high. bytes: each tensor once, as if no tensor stayed in a cache and none were read twice; of a collective
// what a rank sends over its links.
#pragma once
#include "llmc/ops/ops.h"
#include "llmc/ops/profile.h"

// cost_OP of the named parameters.
#define COST(op, parameters, flops, bytes) \
    static inline OpCost cost_##op parameters \
    { \
        OpCost cost = {flops, bytes}; \
        return cost; \
    }

static inline double count3(double a, double b, double c) { return a * b * c; }
static inline double floatx_bytes(double a, double b, double c) { return a * b * c * sizeof(floatX); }
static inline double fp32_bytes(double a, double b, double c) { return a * b * c * sizeof(float); }
static inline double ns_bytes(NsDtype dtype, double a, double b, double c)
{
    return a * b * c * (double)ns_element_size(dtype);
}

COST(copy_to_device, (size_t bytes), 0, (double)bytes)
COST(copy_to_host, (size_t bytes), 0, (double)bytes)
COST(copy_on_device, (size_t bytes), 0, 2 * (double)bytes)
COST(device_zero, (size_t bytes), 0, (double)bytes)

// ---- embedding, residual stream ---------------------------------------------------------------------------

COST(embed_forward, (int N, int d), 0, floatx_bytes(N, d, 2))
COST(embed_backward, (int N, int d), 0, floatx_bytes(N, d, 5))
COST(embedding_grad, (int N, int d), 0, floatx_bytes(N, d, 1) + fp32_bytes(profile_token_rows(), d, 2))
COST(coefficients_forward, (void), 0, 0)
COST(coefficients_backward, (void), 0, 0)
COST(mix_rmsnorm_forward, (const floatX *x_out, const floatX *skip, int N, int d), 0,
     floatx_bytes(N, d, 3 + !!x_out + !!skip))
static inline int mix_backward_tensors(const MixBackward *a)
{
    int skip = a->skip ? 2 : 0, dx_add = a->dx_add && a->dx_add != a->dskip;
    return 6 + skip + dx_add + !!a->dx_out + a->accumulate_dx0; // at least dx, dx0, dh, h, x, x0
}
COST(mix_rmsnorm_backward, (const MixBackward *a, int N, int d), 0,
     floatx_bytes(N, d, mix_backward_tensors(a)))
COST(signed_gather, (int N, int d, int width), 0,
     floatx_bytes(N, d, 1) + floatx_bytes(N, width, 1 + 1.0 / 16))
// A table with signs is one by pairs of tokens.
COST(table_grad, (const RowReader *readers, int count, int N, int d, int width), 0,
     floatx_bytes(N, d, count) +
         fp32_bytes(readers->signs ? profile_pair_rows() : profile_token_rows(), width, 2))
COST(rows_load, (int count, int bytes), 0, 2.0 * count * bytes)
COST(rows_store, (int count, int bytes), 0, 2.0 * count * bytes)
COST(rows_take, (int count, int width), 0, fp32_bytes(count, width, 3))
COST(rows_add, (int count, int width), 0, fp32_bytes(count, width, 3))
COST(stream_mix, (const StreamMix *a, int N, int d), 0, floatx_bytes(N, d, a->terms + !!a->y + !!a->h))
static inline bool stream_grads_loaded(const StreamGrad *a, int i, const floatX *g) // by a stream before i
{
    for (int s = 0; s < i; s++)
        for (int k = 0; k < a[s].readers; k++)
            if (a[s].reader[k].g == g)
                return true;
    return false;
}
static inline OpCost cost_stream_grads(const StreamGrad *a, int count, int N, int d)
{
    int tensors = 0;
    for (int i = 0; i < count; i++) {
        bool dots = false;
        for (int k = 0; k < a[i].readers; k++) {
            dots |= a[i].reader[k].dscalar || a[i].reader[k].dcolumn;
            tensors += !stream_grads_loaded(a, i, a[i].reader[k].g);
        }
        tensors += a[i].norms + (a[i].norms || (dots && !a[i].x)) + (dots && a[i].x) + !!a[i].beside +
                   !!a[i].dx + (a[i].dx && a[i].accumulate);
    }
    OpCost cost = {0, floatx_bytes(N, d, tensors)};
    return cost;
}
COST(rmsnorm_forward, (int N, int d), 0, floatx_bytes(N, d, 2))
COST(rmsnorm_backward, (int N, int d), 0, floatx_bytes(N, d, 4))

// ---- matrix products --------------------------------------------------------------------------------------

COST(matmul_forward, (const Product *p), 2 * count3(p->N, p->in, p->out) * p->planes,
     floatx_bytes(p->N, p->in, 1) + floatx_bytes(p->in, p->out, p->planes) +
         floatx_bytes(p->N, p->out, p->planes + !!p->residual))
COST(matmul_backward_input, (const InputGrad *g), 2 * count3(g->N, g->in, g->out),
     floatx_bytes(g->N, g->in, 1 + !!g->residual) + floatx_bytes(g->in, g->out, 1) +
         floatx_bytes(g->N, g->out, 1))
COST(weight_scale_forward, (int64_t n), 0, floatx_bytes(n, 2, 1))
COST(weight_scale_backward, (int64_t n), 0, fp32_bytes(n, 2, 1) + floatx_bytes(n, 1, 1))
static inline OpCost cost_matmul_weight_grads(const WeightGrad *g, int count, int N)
{
    OpCost sum = {0, 0};
    for (int i = 0; i < count; i++) {
        int results = g[i].fresh ? 1 : 2; // one that begins anew is not read
        sum.flops += 2 * count3(N, g[i].m, g[i].n);
        sum.bytes += floatx_bytes(N, g[i].m + g[i].n, 1) + fp32_bytes(g[i].m, g[i].n, results);
    }
    return sum;
}
COST(matmul_relu2_forward, (int N, int in, int out), 2 * count3(N, in, out),
     floatx_bytes(N, in, 1) + floatx_bytes(in, out, 1) + floatx_bytes(N, out, 1))
COST(matmul_relu2_backward, (int N, int d, int F), 2 * count3(N, d, F),
     floatx_bytes(N, d, 1) + floatx_bytes(d, F, 1) + floatx_bytes(N, F, 2))

COST(generator_forward, (const Generator *g, int N, int d), 2 * count3(N, g->width, d + g->K),
     floatx_bytes(N, d + g->width, 1) + fp32_bytes(N, g->K, 1))
COST(generator_backward, (const GeneratorBackward *a, int N, int d),
     2 * count3(N, a->generator->width, d + 2.0 * a->generator->K),
     floatx_bytes(N, d *(1 + !!a->residual) + 2 * a->generator->width, 1) + fp32_bytes(N, a->generator->K, 1))

// ---- the MLP in FP8 ---------------------------------------------------------------------------------------

COST(amax_accumulate, (int64_t n), 0, floatx_bytes(n, 1, 1))
COST(amax_relu2_bound, (int in, int out), 2 * count3(in, out, 1), floatx_bytes(in, out, 1))
COST(scale_from_amax, (void), 0, 0)
COST(scale_exact, (void), 0, 0)
COST(scale_delayed, (void), 0, 0)
COST(quantize_e4m3, (int rows, int cols), 0, floatx_bytes(rows, cols, 1) + count3(rows, cols, 1))
static inline double codes_bytes(const Fp8Product *p) { return count3(p->N + p->out, p->in, 1); }
COST(matmul_fp8_relu2, (const Fp8Product *p), 2 * count3(p->N, p->in, p->out),
     codes_bytes(p) + floatx_bytes(p->N, p->out, 1) + count3(p->N, p->out, 1))
COST(matmul_fp8, (const floatX *residual, const Fp8Product *p), 2 * count3(p->N, p->in, p->out),
     codes_bytes(p) + floatx_bytes(p->N, p->out, 1 + !!residual))

COST(scale_quotient, (void), 0, 0)
COST(scales_follow, (int n), 0, fp32_bytes(n, 2, 1))
COST(quantize_codes, (int rows, int cols), 0, floatx_bytes(rows, cols, 1) + 2 * count3(rows, cols, 1))
COST(matmul_fp8_relu2_codes, (const Fp8Product *p), 2 * count3(p->N, p->in, p->out),
     codes_bytes(p) + 2 * count3(p->N, p->out, 1))
COST(matmul_fp8_relu2_backward, (const Fp8Product *p), 2 * count3(p->N, p->in, p->out),
     codes_bytes(p) + 3 * count3(p->N, p->out, 1))
static inline OpCost cost_matmul_fp8_weight_grads(const Fp8WeightGrad *g, int count, int N)
{
    OpCost sum = {0, 0};
    for (int i = 0; i < count; i++) {
        sum.flops += 2 * count3(N, g[i].m, g[i].n);
        sum.bytes += count3(N, g[i].m + g[i].n, 1) + fp32_bytes(g[i].m, g[i].n, g[i].fresh ? 1 : 2);
    }
    return sum;
}

// ---- attention --------------------------------------------------------------------------------------------

COST(rope_tables, (int rows, int e), 0, floatx_bytes(rows, e, 0.5))
COST(qkv_forward, (const floatX *value_embed, int N, int d), 0, floatx_bytes(N, d, 6 + !!value_embed))
COST(qkv_product_forward, (const floatX *value_embed, int N, int d), 6 * count3(N, d, d),
     floatx_bytes(N, d, 5 + !!value_embed) + floatx_bytes(3, d, d))
COST(sdpa_forward, (const SdpaForward *a, int N, int H, int e),
     2.0 * H * (a->qk + e) * profile_pairs(N, a->window), floatx_bytes(N, H, 2 * (a->qk + e)))
COST(sdpa_backward, (const SdpaBackward *a, int N, int H, int e),
     2.0 * H * (3 * a->forward->qk + 2 * e) * profile_pairs(N, a->forward->window),
     floatx_bytes(N, H, 4 * (a->forward->qk + e)))
COST(attention_forward, (int window, int N, int d), 4.0 * d * profile_pairs(N, window), floatx_bytes(N, d, 4))
COST(attention_backward, (const AttentionBackward *a, int N, int d),
     10.0 * d * profile_pairs(N, a->forward->window), floatx_bytes(N, d, 9 + !!a->dv + !!a->value_embed))
// What a text has in the cache is known on the device alone.
COST(sdpa_decode, (const SdpaForward *a, int N, int H, int e), 0, floatx_bytes(N, H, 2 * (a->qk + e)))
COST(attention_decode, (int N, int d), 0, floatx_bytes(N, d, 4))
COST(dc_decode, (const DcForward *a, int N, int H, int e), 0, floatx_bytes(N, H, a->qk + 2 * e))

COST(heads_forward, (const HeadsForward *a, int N, int H, int e), 0,
     floatx_bytes(N, H, 4 * a->qk + e * (2 + !!a->value.table + !!a->value.extra)))
static inline OpCost cost_qkv_heads_forward(const QkvHeadsForward *a, int N, int H, int e)
{
    const HeadsForward *h = &a->heads;
    int d = H * e, rows = 2 * H * h->qk + d;
    return (OpCost){2 * count3(N, d, rows),
                    count3(N + rows, d, a->x8 ? 1 : sizeof(floatX)) +
                        floatx_bytes(N, H, 2 * h->qk + e * (1 + !!h->value.table + !!h->value.extra))};
}
COST(heads_backward, (const HeadsBackward *a, int N, int H, int e), 0,
     floatx_bytes(N, H,
                  a->forward->qk *(6 + !!a->dq_add + !!a->dk_add) +
                      e * (2 + !!a->dv_add + !!a->forward->value.table)))
// q, k, v and dy in, dqkv out.
static inline OpCost cost_sdpa_heads_backward(const SdpaHeadsBackward *a, int N, int H, int e)
{
    const HeadsBackward *b = &a->heads;
    int pairs = b->forward->paired ? 2 : 1;
    OpCost sdpa = cost_sdpa_backward(&a->sdpa, N * pairs, H / pairs, e);
    return (OpCost){sdpa.flops, floatx_bytes(N, H,
                                             b->forward->qk * (4 + !!b->dq_add + !!b->dk_add) +
                                                 e * (3 + !!b->dv_add + !!b->forward->value.table))};
}
COST(heads_output_forward, (const HeadsOutput *a, int N, int H, int e), 0,
     floatx_bytes(N, H *e, 2 + !!a->alpha))
COST(heads_output_backward, (const HeadsOutputBackward *a, int N, int H, int e), 0,
     floatx_bytes(N, H *e, 3 + 2 * !!a->forward->alpha))
// profile_pairs: t - j <= its window
COST(dc_forward, (const DcForward *a, int N, int H, int e),
     2.0 * H * (a->qk + e) * profile_pairs(N, a->keys - 1), floatx_bytes(N, H, 2 * a->qk + 3 * e))
COST(dc_backward, (const DcBackward *a, int N, int H, int e),
     2.0 * H * (3 * a->forward->qk + 2 * e) * profile_pairs(N, a->forward->keys - 1),
     floatx_bytes(N, H, 4 * a->forward->qk + 3 * e))

// ---- head and loss ----------------------------------------------------------------------------------------

COST(head_quantize, (int Vp, int d), 0, count3(Vp, d, sizeof(floatX) + 2))
COST(head_loss_train, (int N, int d, int Vp), 6 * count3(N, d, Vp),
     floatx_bytes(N, d, 2) + floatx_bytes(Vp, d, 1) + fp32_bytes(Vp, d, 2))
COST(head_loss_eval, (int N, int d, int Vp), 2 * count3(N, d, Vp), floatx_bytes(N + Vp, d, 1))
COST(head_logits, (int rows, int d, int Vp), 2 * count3(rows, d, Vp), floatx_bytes(rows + Vp, d, 1))

// ---- optimizers -------------------------------------------------------------------------------------------

COST(adam_update, (int64_t n), 0, floatx_bytes(n, 6, 1) + fp32_bytes(n, 2, 1))
COST(adam_update_fp32, (int64_t n), 0, fp32_bytes(n, 8, 1))
COST(adam_update_decay, (int64_t n), 0, floatx_bytes(n, 2, 1) + fp32_bytes(n, 6, 1))
COST(normuon_momentum, (int64_t n), 0, fp32_bytes(n, 4, 1))
COST(normuon_update, (const NormuonUpdate *a), 0,
     (a->w ? fp32_bytes(a->rows, a->cols, 2 * a->batch) + floatx_bytes(a->rows, a->cols, a->batch)
           : floatx_bytes(a->rows, a->cols, 2 * a->batch)) +
         (a->grad ? fp32_bytes(a->rows, a->cols, a->batch) : 0) +
         ns_bytes(a->o_dtype, a->rows, a->cols, a->batch))
COST(cast_weights, (int64_t n), 0, fp32_bytes(n, 1, 1) + floatx_bytes(n, 1, 1))

// ---- Newton-Schulz ----------------------------------------------------------------------------------------

COST(ns_chain, (void), 0, 0) // its products are counted to it
COST(ns_load, (NsDtype dtype, int rows, int cols, int batch), 0,
     fp32_bytes(rows, cols, batch) + ns_bytes(dtype, rows, cols, batch))
COST(ns_load_rows, (NsDtype dtype, int rows, int cols, int batch), 0,
     fp32_bytes(rows, cols, batch) + ns_bytes(dtype, rows, cols, batch))
COST(ns_gram, (NsDtype dtype, int n, int m, int batch), count3(n, n + 1, m) * batch,
     ns_bytes(dtype, n, n + m, batch))
// squares: n x n inputs and outputs
static inline int ns_squares(const NsSymmetric *p) // distinct inputs
{
    return 1 + (p->a != p->b) + (p->beta != 0 && p->d != p->a && p->d != p->b);
}
COST(ns_symmetric, (NsDtype dtype, int squares, int n, int batch), count3(n, n + 1, n) * batch,
     ns_bytes(dtype, n, n, squares) * batch)
COST(ns_apply, (NsDtype dtype, int n, int m, int batch), 2 * count3(n, n, m) * batch,
     ns_bytes(dtype, n, n + 2.0 * m, batch))
COST(ns_gram_raw, (NsDtype dtype, int n, int m, int batch), count3(n, n + 1, m) * batch,
     ns_bytes(dtype, n, m, batch) + fp32_bytes(n, n, 0.5 * batch))
COST(ns_aol, (NsDtype dtype, int n, int batch), 0,
     fp32_bytes(n, n, 0.5 * batch) + ns_bytes(dtype, n, n, batch))
COST(ns_symmetric_scaled, (NsDtype dtype, int squares, int n, int batch), count3(n, n + 1, n) * batch,
     ns_bytes(dtype, n, n, squares) * batch)
COST(ns_iterate, (NsDtype dtype, const NsIteration *it, int n, int m, int batch),
     it->steps *batch *(count3(n, n + 1, m + n) + 2 * count3(n, n, m)),
     ns_bytes(dtype, n, m, 3 * it->steps) * batch)
COST(ns_transpose, (NsDtype dtype, int n, int m, int batch), 0, ns_bytes(dtype, n, m, 2) * batch)

// ---- collectives ------------------------------------------------------------------------------------------

COST(comm_reduce_scatter, (int ranks, int64_t count), 0, fp32_bytes(count, ranks - 1, 1))
COST(comm_all_gather, (int ranks, int64_t bytes), 0, (double)bytes *(ranks - 1))
COST(comm_all_to_all, (int ranks, int64_t bytes), 0, (double)bytes *(ranks - 1))
COST(comm_all_reduce, (int ranks, int64_t count), 0, 2 * fp32_bytes(count, ranks - 1, 1) / ranks)
