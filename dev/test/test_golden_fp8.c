// The MLP in FP8 as the records of 2026 have it, bf16 build, against the PyTorch reference (2026-ops-fp8):
// scales, and codes of the weights, one by one; results and gradients to their roundings.
#include "dev/test/golden_fp8.h"

enum { N = 16, D = 48, F = 64, VP = 128, STEPS = 3 };
#define ACTIVATION_FACTOR ((float)(1.80 / 448))
#define WEIGHT_FACTOR ((float)(1.12 / 448))
// The codes are equal, so results are, but where a sum in fp32 falls on the other side of a tie: one in a
// hundred, by a unit of bf16's last place.
#define OUT_LIMIT (0x1p-8 * 0.1)
// The reference's backward takes the weights as they were before they were cut off, by 2^-7 at most. That of
// c_proj has no weight in it.
#define GRAD_LIMIT 0x1p-7

// What lives from step to step.
typedef struct {
    float scale_up, scale_down, next_down, scale_post, amax;
} Scales;

typedef struct {
    floatX *up, *down;    // (D, F)
    uint8_t *up8, *down8; // (F, D), (D, F)
} Weights;

static Weights quantize_weights(Scales *s, int step)
{
    float exact = step == 0;
    Weights w = {truncated_transpose(get("fc", step), F, D), truncated_transpose(get("proj", step), F, D),
                 take(F * D, 1), take(F * D, 1)};
    amax_accumulate(NULL, &s->amax, w.up, F * D);
    scale_exact(NULL, &s->scale_up, &s->amax);
    quantize_e4m3(NULL, w.up8, w.up, &s->scale_up, D, F, QUANTIZE_QUOTIENT_BF16, true);
    amax_accumulate(NULL, &s->amax, w.down, F * D);
    scale_delayed(NULL, &s->scale_down, &s->next_down, &s->amax, WEIGHT_FACTOR, &exact);
    quantize_e4m3(NULL, w.down8, w.down, &s->scale_down, D, F, QUANTIZE_QUOTIENT, false);
    int up = differing(w.up8, get("up8", step), F, D, false),
        down = differing(w.down8, get("down8", step), F, D, true);
    ok(s->scale_up == *get("up_scale", step) && up == 0, "step %d: scale and codes of c_fc, %d differ", step,
       up);
    ok(s->scale_down == *get("down_scale", step) && down == 0,
       "step %d: scale and codes of c_proj, %d differ", step, down);
    return w;
}

// Returns relu^2 as it is stored. Its codes follow from the scale that the step before left.
static floatX *forward(Scales *s, const Weights *w, const floatX *h, int step)
{
    uint8_t *h8 = take(N * D, 1), *post8 = take(N * F, 1);
    floatX *post = halves(N * F), *out = halves(N * D);
    float scale_h, amax_post = 0;
    ok(s->scale_post == *get("activation_scale", step), "step %d: scale of the activations", step);
    amax_accumulate(NULL, &s->amax, h, N * D);
    quantize_e4m3(NULL, h8, h, &s->amax, N, D, QUANTIZE_AMAX, false);
    scale_from_amax(NULL, &scale_h, &s->amax, 1.0f / E4M3_LARGEST);
    Fp8Product up = {h8, w->up8, &scale_h, &s->scale_up, N, D, F, NULL},
               down = {post8, w->down8, &s->scale_post, &s->scale_down, N, F, D, NULL};
    matmul_fp8_relu2(NULL, post, post8, &amax_post, &up, &s->scale_post);
    matmul_fp8(NULL, out, &down, NULL);
    ok(amax_post == *get("largest", step), "step %d: largest activation", step);
    scale_from_amax(NULL, &s->scale_post, &amax_post, ACTIVATION_FACTOR);
    check("out", step, of_x(out, N * D), get("out", step), N * D, OUT_LIMIT);
    return post;
}

// Straight through, in bf16.
static void backward(const Weights *w, const floatX *h, const floatX *post, int step)
{
    const floatX *g = rounded(get("dout", step), N * D);
    floatX *dpre = halves(N * F), *dh = halves(N * D);
    float *dfc = floats(D * F), *dproj = floats(D * F);
    matmul_relu2_backward(NULL, dpre, g, w->down, post, N, D, F);
    matmul_forward(NULL, &(Product){dh, dpre, w->up, NULL, NULL, N, F, D, 1});
    WeightGrad grads[] = {{dproj, g, post, D, F, true}, {dfc, h, dpre, D, F, true}};
    matmul_weight_grads(NULL, grads, 2, N);
    double *fc = doubles(F * D), *proj = doubles(F * D);
    for (int i = 0; i < F * D; i++) {
        fc[i] = dfc[i % D * F + i / D];
        proj[i] = dproj[i % D * F + i / D];
    }
    check("dh", step, of_x(dh, N * D), get("d.h", step), N * D, GRAD_LIMIT);
    check("gradient of c_fc", step, fc, get("d.fc", step), F * D, GRAD_LIMIT);
    check("gradient of c_proj", step, proj, get("d.proj", step), F * D, 1e-6);
}

static void mlp_steps(void)
{
    Scales s = {.scale_post = 1};
    for (int step = 0; step < STEPS; step++) {
        pool_reset();
        Weights w = quantize_weights(&s, step);
        const floatX *h = rounded(get("h", step), N * D), *post = forward(&s, &w, h, step);
        backward(&w, h, post, step);
    }
}

// 20 values at the edges of both formats, and the head's weight.
static void casts(void)
{
    pool_reset();
    const float *x = get("casts", -1), *e4m3 = get("casts.e4m3", -1), *e5m2 = get("casts.e5m2", -1);
    int wrong = 0;
    for (int i = 0; i < 20; i++)
        wrong +=
            e4m3_to_float(float_to_e4m3(x[i])) != e4m3[i] || e5m2_to_float(float_to_e5m2(x[i])) != e5m2[i];
    ok(wrong == 0, "casts are the reference's: %d are not", wrong);
    const HeadSpec spec =
        {.cap = 23, .slope = 7.5f, .shift = 5, .range_x = 100, .range_w = 1.6f, .range_g = 0.75f};
    const float *w = get("head.w", -1);
    floatX *ours = halves(D * VP);
    uint8_t *codes = take(head_weight_bytes(HEAD_FP8, VP, D), 1);
    int inexact = 0;
    for (int i = 0; i < D * VP; i++) {
        floatX x = float_to_x(w[i]);
        inexact += x_to_float(x) != w[i];
        ours[i % VP * D + i / VP] = x;
    }
    head_quantize(NULL, &spec, codes, ours, VP, D);
    wrong = differing(codes, get("head.w8", -1), D, VP, true);
    ok(wrong == 0, "codes of the head's weight: %d differ; %d of its values are no bf16", wrong, inexact);
}

int main(void)
{
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = N,
                               .eval_tokens = N,
                               .dim = F,
                               .heads = 4,
                               .mlp_dim = F,
                               .vocab_padded = VP,
                               .fp8_head = true,
                               .fp8_mlp = true});
    file = open_golden("2026-ops-fp8");
    PART(casts());
    PART(mlp_steps());
    safetensors_close(file);
    backend_close();
    return tap_done();
}
