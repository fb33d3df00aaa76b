// FP8 in both directions, fp32 build: six steps, and the gradients of the first one beside a reference that
// rounds to codes and nothing else, as this build does.
#include "dev/test/fp8_both_steps.h"

// Sums in another order move a value by 2^-24 or so of itself. Where it lies that close to the border between
// two codes it gets the other one, and everything behind it moves: losses may be 2e-5 away, gradients 1e-2.
static const double gradient_limit = 1e-2, loss_distance = 2e-5, scale_limit = 1e-5;

static void check_gradient(const SafeTensors *st, const char *name)
{
    int64_t n, samples;
    float *start = golden_values(g.init, "", name, &n), *got = golden_2026_gradient(&g, name, n),
          *want = golden_values(st, "grad.", name, &samples), *norm = golden_values(st, "norm.", name, NULL);
    int64_t stride = sample_stride_2026(n);
    double error = 0, square = 0, whole = 0;
    for (int64_t i = 0; i < samples; i++) {
        error += pow((double)got[i * stride % n] - want[i], 2);
        square += pow(want[i], 2);
    }
    for (int64_t i = 0; i < n; i++)
        whole += pow(got[i], 2);
    ok(square > 0 && sqrt(error / square) <= gradient_limit &&
           fabs(sqrt(whole) / norm[0] - 1) <= gradient_limit,
       "gradient of %s: error %.2g, its norm is %.6g, want %.6g", name, sqrt(error / square), sqrt(whole),
       norm[0]);
    free(start);
    free(got);
    free(want);
    free(norm);
}

static void check_next_scales(const SafeTensors *st)
{
    static const char *const names[] = {"next_x", "next_p", "next_e"};
    for (int kind = 0; kind < DELAYED_KINDS; kind++) {
        float *want = read_golden(st, names[kind], NULL);
        double worst = 0;
        for (int i = 0; i < SCALES_OF_STEP; i++) {
            float got = model_delayed_scale(&g.model, kind, i / LAYERS_2026)[i % LAYERS_2026];
            worst = larger_error(worst, fabs(got / want[i] - 1));
        }
        ok_at_most(worst, scale_limit, names[kind]);
        free(want);
    }
}

static void check_gradients(void)
{
    char *options[] = {"--mlp", "fp8-backward", "--qkv", "fp8", NULL};
    double loss[2];
    golden_2026_open_with(&g, "toy-2026-08", "2026-08", options);
    SafeTensors *st = golden_2026_file(&g, "fp8-gradients");
    float *want = read_golden(st, "loss", NULL);
    const Params *p = &g.model.params;
    g.model.params.tied = false; // the file has the gradients of embedding and head apart
    golden_2026_weights(&g);
    golden_2026_gradients(&g, 0, loss);
    for (int i = 0; i < 2; i++)
        ok_at_most(fabs(loss[i] / want[i] - 1), loss_distance, "loss of a micro-batch");
    check_next_scales(st);
    for (int i = 0; i < p->count; i++) {
        bool known = p->list[i].spec->update.kind == FIXED;
        for (int k = 0; k < i && !known; k++)
            known = !strcmp(p->list[k].spec->name, p->list[i].spec->name);
        if (!known)
            check_gradient(st, p->list[i].spec->name);
    }
    free(want);
    golden_2026_close(&g);
    safetensors_close(st);
}

int main(void)
{
    PART(check_fp8_both_2026());
    PART(check_gradients());
    return tap_done();
}
