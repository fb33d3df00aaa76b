// clang-format off: its macros are no statements
// The wrappers that the linker puts in front of the ops (ld --wrap): a call of `op` comes to __wrap_op, and
// __real_op is the op.
//
// What an op must at least do. flops: two for each multiplication that goes into a sum; of symmetric results
// one triangle; of attention the pairs that the mask leaves. bytes: each tensor once, as if no tensor stayed
// in a cache and none were read twice.
#include "llmc/dist/comm.h"
#include "llmc/run/profile.h"

#define WRAPPED(op) \
    extern __typeof__(op) __real_##op, __wrap_##op; \
    void __wrap_##op
#define PROFILED(op, arguments, flops, bytes) \
    { \
        profile_enter(#op, flops, bytes); \
        __real_##op arguments; \
        profile_leave(); \
    }

static const double X = sizeof(floatX), F32 = sizeof(float);
static double product(double a, double b, double c) { return a * b * c; }

// ---- copies -----------------------------------------------------------------------------------------------

WRAPPED(copy_to_device)(Stream s, void *dst, const void *host_src, size_t bytes)
PROFILED(copy_to_device, (s, dst, host_src, bytes), 0, (double)bytes)
WRAPPED(copy_to_host)(Stream s, void *host_dst, const void *src, size_t bytes)
PROFILED(copy_to_host, (s, host_dst, src, bytes), 0, (double)bytes)
WRAPPED(copy_on_device)(Stream s, void *dst, const void *src, size_t bytes)
PROFILED(copy_on_device, (s, dst, src, bytes), 0, 2 * (double)bytes)
WRAPPED(device_zero)(Stream s, void *p, size_t bytes)
PROFILED(device_zero, (s, p, bytes), 0, (double)bytes)

// ---- embedding, residual stream ---------------------------------------------------------------------------

WRAPPED(embed_forward)(Stream s, floatX *x0, float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate,
                       const float *lambda, int N, int d)
PROFILED(embed_forward, (s, x0, rstd, tokens, embed, gate, lambda, N, d), 0, product(N, d, 2 * X))
WRAPPED(embed_backward)(Stream s, floatX *de, float *dgate, float *dlambda, const floatX *dx, const floatX *dx0,
                        const floatX *x0, const float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate,
                        const float *lambda, int N, int d)
PROFILED(embed_backward, (s, de, dgate, dlambda, dx, dx0, x0, rstd, tokens, embed, gate, lambda, N, d), 0, product(N, d, 5 * X))
WRAPPED(embedding_grad)(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows, int N, int d)
PROFILED(embedding_grad, (s, dtable, g, scale, rows, N, d), 0, product(N, d, X) + product(profile_touched_rows(), d, 2 * F32))
WRAPPED(coefficients_forward)(Stream s, float *coef, const float *scalars, const Coefficient *terms, int count)
PROFILED(coefficients_forward, (s, coef, scalars, terms, count), 0, 0)
WRAPPED(coefficients_backward)(Stream s, float *dscalars, float *dcoef, const float *scalars, const Coefficient *terms, int count)
PROFILED(coefficients_backward, (s, dscalars, dcoef, scalars, terms, count), 0, 0)
WRAPPED(mix_rmsnorm_forward)(Stream s, floatX *x_out, floatX *h, float *rstd, const floatX *x, const floatX *x0,
                             const floatX *skip, const float *coef, int N, int d)
PROFILED(mix_rmsnorm_forward, (s, x_out, h, rstd, x, x0, skip, coef, N, d), 0, product(N, d, (3 + !!x_out + !!skip) * X))
static double mix_backward_tensors(const MixBackward *a)
{
    int skip = a->skip ? 2 : 0, dx_add = a->dx_add && a->dx_add != a->dskip;
    return 6 + skip + dx_add + !!a->dx_out + a->accumulate_dx0; // at least dx, dx0, dh, h, x, x0
}
WRAPPED(mix_rmsnorm_backward)(Stream s, const MixBackward *a, int N, int d)
PROFILED(mix_rmsnorm_backward, (s, a, N, d), 0, product(N, d, X) * mix_backward_tensors(a))
WRAPPED(rmsnorm_forward)(Stream s, floatX *h, float *rstd, const floatX *x, int N, int d)
PROFILED(rmsnorm_forward, (s, h, rstd, x, N, d), 0, product(N, d, 2 * X))
WRAPPED(rmsnorm_backward)(Stream s, floatX *dx, const floatX *dh, const floatX *h, const float *rstd, int N, int d)
PROFILED(rmsnorm_backward, (s, dx, dh, h, rstd, N, d), 0, product(N, d, 4 * X))

// ---- matrix products --------------------------------------------------------------------------------------

WRAPPED(matmul_forward)(Stream s, floatX *y, const floatX *x, const floatX *w, const floatX *residual, int N, int in, int out,
                        int planes)
PROFILED(matmul_forward, (s, y, x, w, residual, N, in, out, planes), 2.0 * planes * product(N, in, out),
         X * (product(N, in, 1) + planes * product(in, out, 1) + (planes + !!residual) * product(N, out, 1)))
WRAPPED(matmul_backward_input)(Stream s, floatX *dx, const floatX *dy, const floatX *w, int N, int in, int out)
PROFILED(matmul_backward_input, (s, dx, dy, w, N, in, out), 2 * product(N, in, out),
         X * (product(N, in, 1) + product(in, out, 1) + product(N, out, 1)))
// A result that begins anew is not read.
static double weight_grads(const WeightGrad *g, int count, int N, double per_product, double per_input, double per_result)
{
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += per_product * product(N, g[i].m, g[i].n) + per_input * product(N, g[i].m + g[i].n, 1) +
               (g[i].fresh ? 1 : 2) * per_result * product(g[i].m, g[i].n, 1);
    return sum;
}
WRAPPED(matmul_weight_grads)(Stream s, const WeightGrad *g, int count, int N)
PROFILED(matmul_weight_grads, (s, g, count, N), weight_grads(g, count, N, 2, 0, 0), weight_grads(g, count, N, 0, X, F32))
WRAPPED(matmul_relu2_forward)(Stream s, floatX *y, const floatX *x, const floatX *w, int N, int in, int out)
PROFILED(matmul_relu2_forward, (s, y, x, w, N, in, out), 2 * product(N, in, out),
         X * (product(N, in, 1) + product(in, out, 1) + product(N, out, 1)))
WRAPPED(matmul_relu2_backward)(Stream s, floatX *dpre, const floatX *dy, const floatX *w, const floatX *y, int N, int d, int F)
PROFILED(matmul_relu2_backward, (s, dpre, dy, w, y, N, d, F), 2 * product(N, d, F),
         X * (product(N, d, 1) + product(d, F, 1) + 2 * product(N, F, 1)))

// ---- attention --------------------------------------------------------------------------------------------

WRAPPED(rope_tables)(Stream s, floatX *cos, floatX *sin, const float *frequency, int positions, int e)
PROFILED(rope_tables, (s, cos, sin, frequency, positions, e), 0, product(positions, e, X / 2))
WRAPPED(qkv_forward)(Stream s, floatX *q, floatX *k, floatX *v, float *rstd_q, float *rstd_k, const floatX *v_raw,
                     const floatX *value_embed, const int32_t *tokens, const float *lambda, const floatX *cos, const floatX *sin,
                     int N, int H, int e)
PROFILED(qkv_forward, (s, q, k, v, rstd_q, rstd_k, v_raw, value_embed, tokens, lambda, cos, sin, N, H, e), 0,
         product(N, H * e, (6 + !!value_embed) * X))
WRAPPED(qkv_product_forward)(Stream s, floatX *qkv, floatX *v, float *rstd_q, float *rstd_k, const floatX *x, const floatX *w,
                             const floatX *value_embed, const int32_t *tokens, const float *lambda, const floatX *cos,
                             const floatX *sin, int N, int H, int e)
PROFILED(qkv_product_forward, (s, qkv, v, rstd_q, rstd_k, x, w, value_embed, tokens, lambda, cos, sin, N, H, e),
         6 * product(N, H * e, H * e), X * (product(N, H * e, 5 + !!value_embed) + product(3, H * e, H * e)))
WRAPPED(qkv_backward)(Stream s, const QkvBackward *a, int N, int H, int e)
PROFILED(qkv_backward, (s, a, N, H, e), 0, product(N, H * e, a->dq ? (9 + !!a->value_embed) * X : 2 * X + F32))
WRAPPED(attention_forward)(Stream s, floatX *yg, float *lse, const floatX *q, const floatX *k, const floatX *v, const floatX *h,
                           const floatX *gate_w, const int32_t *table, int slots, float scale, int window, int N, int H, int e)
PROFILED(attention_forward, (s, yg, lse, q, k, v, h, gate_w, table, slots, scale, window, N, H, e),
         4.0 * e * H * profile_pairs(window), product(N, H * e, 4 * X))
WRAPPED(attention_backward)(Stream s, const AttentionBackward *a, const int32_t *table, int slots, float scale, int window, int N,
                            int H, int e)
PROFILED(attention_backward, (s, a, table, slots, scale, window, N, H, e), 10.0 * e * H * profile_pairs(window),
         product(N, H * e, a->dq ? 8 * X : (8 + !!a->dv + !!a->next->value_embed) * X + F32))

// ---- head and loss: of FP8 products as many operations as of others, though the ceiling is twice as high --

WRAPPED(head_quantize)(Stream s, void *w8, const floatX *w, int Vp, int d)
PROFILED(head_quantize, (s, w8, w, Vp, d), 0, product(Vp, d, X + 2))
WRAPPED(head_loss_train)(Stream s, HeadMode mode, float *loss, floatX *dx, float *dw, const floatX *x, const floatX *w,
                         const void *w8, const int32_t *targets, int N, int d, int Vp)
PROFILED(head_loss_train, (s, mode, loss, dx, dw, x, w, w8, targets, N, d, Vp), 6 * product(N, d, Vp),
         product(N, d, 2 * X) + product(Vp, d, X + 2 * F32))
WRAPPED(head_loss_eval)(Stream s, float *loss, const floatX *x, const floatX *w, const int32_t *targets, int N, int d, int Vp)
PROFILED(head_loss_eval, (s, loss, x, w, targets, N, d, Vp), 2 * product(N, d, Vp), product(N + Vp, d, X))
WRAPPED(head_logits)(Stream s, float *z, const floatX *x, const floatX *w, int rows, int d, int Vp)
PROFILED(head_logits, (s, z, x, w, rows, d, Vp), 2 * product(rows, d, Vp), product(rows + Vp, d, X))

// ---- optimizers -------------------------------------------------------------------------------------------

WRAPPED(adam_update)(Stream s, floatX *p, floatX *m, floatX *v, float *grad, const StepParams *step, AdamRule rule, int64_t n)
PROFILED(adam_update, (s, p, m, v, grad, step, rule, n), 0, (double)n * (6 * X + 2 * F32))
WRAPPED(adam_update_fp32)(Stream s, float *p, float *m, float *v, float *grad, const StepParams *step, AdamRule rule,
                          int64_t n)
PROFILED(adam_update_fp32, (s, p, m, v, grad, step, rule, n), 0, (double)n * 8 * F32)
WRAPPED(normuon_momentum)(Stream s, float *u, float *momentum, const StepParams *step, int64_t n)
PROFILED(normuon_momentum, (s, u, momentum, step, n), 0, (double)n * 4 * F32)
static double normuon_bytes(const NormuonUpdate *a) // of an element
{
    return (a->w ? 2 * F32 + X : 2 * X) + (a->grad ? F32 : 0) + (double)ns_element_size(a->o_dtype);
}
WRAPPED(normuon_update)(Stream s, const NormuonUpdate *a, const StepParams *step)
PROFILED(normuon_update, (s, a, step), 0, product(a->rows, a->cols, a->batch) * normuon_bytes(a))
WRAPPED(cast_weights)(Stream s, floatX *wx, const float *w, int64_t n)
PROFILED(cast_weights, (s, wx, w, n), 0, (double)n * (F32 + X))

// ---- Newton-Schulz ----------------------------------------------------------------------------------------

static double ns_bytes(NsDtype dtype, double elements, int batch) { return (double)ns_element_size(dtype) * elements * batch; }

// Products between ns_chain_begin and ns_chain_end may run together: they are one op, and what each must do
// is counted to it.
#define CHAINED(op, arguments, flops, bytes) \
    { \
        profile_count(flops, bytes); \
        __real_##op arguments; \
    }
WRAPPED(ns_chain_begin)(Stream s)
{
    profile_enter("ns_chain", 0, 0);
    __real_ns_chain_begin(s);
}
WRAPPED(ns_chain_end)(Stream s)
{
    __real_ns_chain_end(s);
    profile_leave();
}
WRAPPED(ns_load)(Stream s, NsDtype dtype, void *x, float *sumsq, const float *u, int64_t u_stride, float kappa, float eps,
                 float gain, int rows, int cols, int batch, bool transpose)
PROFILED(ns_load, (s, dtype, x, sumsq, u, u_stride, kappa, eps, gain, rows, cols, batch, transpose), 0,
         product(rows, cols, batch) * F32 + ns_bytes(dtype, product(rows, cols, 1), batch))
WRAPPED(ns_load_rows)(Stream s, NsDtype dtype, void *x, float *unit, const float *u, int64_t u_stride, int rows, int cols,
                      int batch, bool transpose)
PROFILED(ns_load_rows, (s, dtype, x, unit, u, u_stride, rows, cols, batch, transpose), 0,
         product(rows, cols, batch) * F32 + ns_bytes(dtype, product(rows, cols, 1), batch))
WRAPPED(ns_gram)(Stream s, NsDtype dtype, void *a, const void *x, int n, int m, int batch)
CHAINED(ns_gram, (s, dtype, a, x, n, m, batch), product(n, n + 1, m) * batch,
        ns_bytes(dtype, product(n, m, 1) + product(n, n, 1), batch))
WRAPPED(ns_symmetric)(Stream s, NsDtype dtype, void *c, void *q, float diagonal, float alpha, const void *a, const void *b,
                      float beta, const void *d, int n, int batch)
CHAINED(ns_symmetric, (s, dtype, c, q, diagonal, alpha, a, b, beta, d, n, batch), product(n, n + 1, n) * batch,
        ns_bytes(dtype, product(n, n, 1 + !!c + !!q + (a != b) + (beta != 0 && d != a && d != b)), batch))
WRAPPED(ns_apply)(Stream s, NsDtype dtype, void *y, bool packed, float alpha, const void *b, const void *x, float a, int n,
                  int m, int batch)
CHAINED(ns_apply, (s, dtype, y, packed, alpha, b, x, a, n, m, batch), 2 * product(n, n, m) * batch,
        ns_bytes(dtype, product(n, n, 1) + product(n, m, 2), batch))
WRAPPED(ns_gram_raw)(Stream s, NsDtype dtype, void *raw, const void *x, const float *unit, int n, int m, int batch)
CHAINED(ns_gram_raw, (s, dtype, raw, x, unit, n, m, batch), product(n, n + 1, m) * batch,
        ns_bytes(dtype, product(n, m, 1), batch) + ns_bytes(NS_FP32, product(n, n, 0.5), batch))
WRAPPED(ns_aol)(Stream s, NsDtype dtype, float *scale, void *a, const void *raw, const float *unit, float gain, int n, int m,
                int batch)
CHAINED(ns_aol, (s, dtype, scale, a, raw, unit, gain, n, m, batch), 0,
        ns_bytes(NS_FP32, product(n, n, 0.5), batch) + ns_bytes(dtype, product(n, n, 1), batch))
WRAPPED(ns_symmetric_scaled)(Stream s, NsDtype dtype, void *q, float diagonal, float alpha, const void *a, const void *b, float beta,
                             const void *d, const float *scale, float factor, int n, int batch)
CHAINED(ns_symmetric_scaled, (s, dtype, q, diagonal, alpha, a, b, beta, d, scale, factor, n, batch),
        product(n, n + 1, n) * batch,
        ns_bytes(dtype, product(n, n, 2 + (a != b) + (beta != 0 && d != a && d != b)), batch))
WRAPPED(ns_iterate)(Stream s, NsDtype dtype, const NsIteration *it, const float *unit, void *x, void *spare, int n, int m,
                    int batch)
PROFILED(ns_iterate, (s, dtype, it, unit, x, spare, n, m, batch),
         it->steps * batch * (product(n, n + 1, m + n) + 2 * product(n, n, m)),
         ns_bytes(dtype, it->steps * product(n, m, 3), batch))
WRAPPED(ns_transpose)(Stream s, NsDtype dtype, void *y, const void *x, int n, int m, int batch)
PROFILED(ns_transpose, (s, dtype, y, x, n, m, batch), 0, ns_bytes(dtype, product(n, m, 2), batch))

// ---- collectives ------------------------------------------------------------------------------------------

// Bytes: what a rank must at least send over its links.
static double sent(double chunk) { return chunk * (comm_size() - 1); }
WRAPPED(comm_reduce_scatter)(Stream s, float *out, float *in, int64_t count)
PROFILED(comm_reduce_scatter, (s, out, in, count), 0, sent((double)count * F32))
WRAPPED(comm_all_gather)(Stream s, void *buf, int64_t bytes)
PROFILED(comm_all_gather, (s, buf, bytes), 0, sent((double)bytes))
WRAPPED(comm_all_reduce)(Stream s, float *buf, int64_t count)
PROFILED(comm_all_reduce, (s, buf, count), 0, 2 * sent((double)count / comm_size() * F32))
