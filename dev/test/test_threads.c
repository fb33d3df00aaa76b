// Ops with sums over tokens or columns in the build that trains: the same bits from one thread as from all.
#include "dev/test/ops_reference.h"
#include "dev/test/tap.h"
#ifdef _OPENMP
#include <omp.h>
#endif

enum { H = 2, E = 16, D = H * E };

// All that ops with sums over tokens or columns wrote, at any number of threads.
typedef struct {
    floatX y[600 * D], dqkv[600 * 3 * D], dv[600 * D], dx[600 * D], dx0[600 * D];
    float dw[2000 * D], dwm[D * D], lse[600 * H], dgate[600 * H], dgate_w[H * 12], dlambda[2], dcoef[3], loss;
} Bits;

static void run_all(Bits *b, Tensor *in, Tensor *w, Tensor32 *coef, const int32_t *table, int slots,
                    const int32_t *targets)
{
    int n = 600;
    memset(b, 0, sizeof *b);
    AttentionForward f = {b->y, b->lse, in[0].x, in[1].x, in[2].x, in[3].x, w->x, table, slots, 70, 0.2f, 12};
    attention_forward(NULL, &f, n, H, E);
    AttentionBackward backward = {.forward = &f,
                                  .dqkv = b->dqkv,
                                  .dv = b->dv,
                                  .dlambda = b->dlambda,
                                  .dgate = b->dgate,
                                  .dgate_w = b->dgate_w,
                                  .dyg = in[3].x,
                                  .rstd_q = coef->x,
                                  .rstd_k = coef->x,
                                  .v_raw = in[1].x,
                                  .lambda = coef->x,
                                  .cos = in[0].x,
                                  .sin = in[1].x,
                                  .scratch = take(attention_scratch_bytes(n, H, E), 1)};
    attention_backward(NULL, &backward, n, H, E);
    const float weight[] = {1, 0.5f};
    HeadLoss head = {.spec = &head_plain,
                     .mode = HEAD_BF16,
                     .loss = &b->loss,
                     .dx = b->dx,
                     .dw = b->dw,
                     .x = in[0].x,
                     .w = w->x,
                     .targets = targets,
                     .num_targets = 2,
                     .target_weight = weight,
                     .scratch = take(head_train_scratch_bytes(HEAD_BF16, n, D, 2000), 1),
                     .N = n,
                     .d = D,
                     .Vp = 2000};
    head_loss_train(NULL, &head);
    matmul_weight_grads(NULL, &(WeightGrad){b->dwm, in[0].x, in[1].x, D, D, .fresh = false}, 1, n);
    MixBackward mix = {b->dx,   b->dx0,  NULL, b->dcoef, in[0].x, in[1].x, NULL, in[2].x, coef->x + 3,
                       in[3].x, in[0].x, NULL, coef->x,  NULL,    NULL,    0,    true,    0};
    mix_rmsnorm_backward(NULL, &mix, n, D);
}

static void test_threads(void)
{
#ifdef _OPENMP
    pool_reset();
    int32_t cu[] = {0, 7, 250, 600}, *targets = random_tokens(600, 2000);
    int32_t *table = take((size_t)attention_table_ints(600, 3), sizeof *table);
    int slots = attention_table_build(table, cu, 3, 600, 3), most = omp_get_max_threads();
    Tensor in[4], w = random_tensor(2000 * D, 0.5);
    Tensor32 coef = random_tensor32(600 * H, 1);
    for (int i = 0; i < 4; i++)
        in[i] = random_tensor(600 * D, 1);
    Bits *one = take(1, sizeof *one), *many = take(1, sizeof *many);
    omp_set_num_threads(1);
    run_all(one, in, &w, &coef, table, slots, targets);
    omp_set_num_threads(most);
    int same = 0;
    for (int run = 0; run < 5; run++) {
        run_all(many, in, &w, &coef, table, slots, targets);
        same += memcmp(one, many, sizeof *one) == 0;
    }
    ok(same == 5, "the same bits from 1 thread as from %d, %d of 5 times", most, same);
#else
    skip("one thread only: built without OpenMP");
#endif
}

int main(void)
{
#ifdef _OPENMP
    omp_set_num_threads(omp_get_max_threads() > 4 ? omp_get_max_threads()
                                                  : 4); // more than cores: pieces finish in any order
#endif
    OpSizes sizes =
        {.tokens = 600, .eval_tokens = 600, .dim = D, .heads = H, .mlp_dim = 64, .vocab_padded = 2000};
    backend_open(0);
    backend_reserve(&sizes);
    PART(test_threads());
    backend_close();
    return tap_done();
}
