// The network of the records of summer 2026 against the float64 reference: losses and every gradient. In fp32
// to 1e-5, or to twice the error of the float32 reference, and losses to 1e-6. In bf16, whose rounding is
// 2^16 times as large, to 2^16 times that error; losses to one rounding of bf16.
#pragma once
#include "dev/test/golden_2026.h"
#include "dev/test/tap.h"

static const bool half = sizeof(floatX) == 2;
static const double loss_limit = sizeof(floatX) == 2 ? 0x1p-8 : 1e-6, limit = 1e-5;
static Golden2026 g;

static void check_losses(const SafeTensors *st, const double *loss)
{
    float *want = read_golden(st, "loss", NULL), *validation = read_golden(st, "validation", NULL);
    for (int i = 0; i < 2; i++)
        ok_at_most(fabs(loss[i] - want[i]) / want[i], loss_limit,
                   i ? "loss of micro-batch 1" : "loss of micro-batch 0");
    for (int i = 0; i < 2; i++)
        ok_at_most(fabs(golden_2026_validation(&g, 0, i) - validation[i]) / validation[i], loss_limit,
                   !i              ? "validation loss"
                   : !g.impossible ? "validation loss with the last windows"
                                   : "validation loss with the last windows, without impossible tokens");
    free(want);
    free(validation);
}

// A tensor's gradient on the sample, and its norm. has_rel: the file has the float32 reference's error.
static void check_gradient(const SafeTensors *st, const char *name, bool has_rel)
{
    int64_t n, samples;
    float *start = golden_values(g.init, "", name, &n), *got = golden_2026_gradient(&g, name, n),
          *want = golden_values(st, "grad.", name, &samples), *norm = golden_values(st, "norm.", name, NULL),
          *rel = has_rel ? golden_values(st, "rel_f32.", name, NULL) : NULL;
    int64_t stride = sample_stride_2026(n);
    double error = 0, square = 0, whole = 0, single = rel ? rel[0] : 0;
    double most = half ? 0x1p16 * single : fmax(limit, 2 * single);
    for (int64_t i = 0; i < samples; i++) {
        error += pow((double)got[i * stride % n] - want[i], 2);
        square += pow(want[i], 2);
    }
    for (int64_t i = 0; i < n; i++)
        whole += pow(got[i], 2);
    ok(square > 0 && sqrt(error / square) <= most, "gradient of %s: error %.2g, at most %.2g", name,
       sqrt(error / square), most);
    ok(fabs(sqrt(whole) - norm[0]) <= most * norm[0], "  its norm is %.6g, want %.6g", sqrt(whole), norm[0]);
    free(start);
    free(got);
    free(want);
    free(norm);
    free(rel);
}

// Of all tensors.
static void check_gradients_of(const SafeTensors *st, bool has_rel)
{
    const Params *p = &g.model.params;
    for (int i = 0; i < p->count; i++) {
        const ParamSpec *spec = p->list[i].spec;
        bool known = spec->update.kind == FIXED;
        for (int k = 0; k < i && !known; k++)
            known = !strcmp(p->list[k].spec->name, spec->name);
        if (!known)
            check_gradient(st, spec->name, has_rel);
    }
}

static void check_golden_2026(const char *preset, const char *files)
{
    double loss[2];
    golden_2026_open(&g, preset, files);
    SafeTensors *st = golden_2026_file(&g, "gradients");
    g.model.params.tied = false; // the file has the gradients of embedding and head apart
    golden_2026_weights(&g);
    golden_2026_gradients(&g, 0, loss);
    check_losses(st, loss);
    check_gradients_of(st, true);
    golden_2026_close(&g);
    safetensors_close(st);
}
