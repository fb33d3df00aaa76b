// Six steps of the records of summer 2026 in FP8 against the float64 reference with emulated codes: losses,
// and the scales that each step has in use.
//
// The reference rounds to bf16 what FP8 products read and give, and nothing else; here all is bf16. So some
// codes are the neighbour's, 2^-4 to 2^-3 away: that is how far scales may be from the reference's. What
// scales follow from is checked to the bit. Every code and scale: exact_fp8_2026.c.
#pragma once
#include "dev/test/golden_2026_steps.h"

static const double code = 0x1p-4;        // relative distance of neighbouring codes, at least
static const double loss_limit = 0x1p-8;  // one rounding of bf16
enum { DOWN_EXACT = 3, LAYERS_2026 = 6 }; // steps with scales of c_proj from the weights at hand
static float largest_down[GOLDEN_2026_STEPS][LAYERS_2026], activation[GOLDEN_2026_STEPS][2][LAYERS_2026];

static float largest_of(const floatX *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(x_to_float(x[i])));
    return fmaxf(most, bf16_to_float(float_to_bf16(1e-12f)));
}

static float exact_scale(float largest) { return bf16_to_float(float_to_bf16(largest / 448)); }

// Of the weights that the step begins with, from the bits of their copies.
static void check_weight_scales(int t)
{
    const Params *p = &g.model.params;
    int wrong = 0;
    for (int i = 0; i < LAYERS_2026; i++) {
        const Param *up = params_of(p, ROLE_MLP_UP, i), *down = params_of(p, ROLE_MLP_DOWN, i);
        const float *scale = g.model.mlp.scales + i * MLP_SCALES;
        largest_down[t][i] = largest_of(param_weight(p, down), param_elements(down));
        float delayed = t ? largest_down[t - 1][i] * (float)(1.12 / 448) : 0;
        wrong += scale[SCALE_UP] != exact_scale(largest_of(param_weight(p, up), param_elements(up)));
        wrong += scale[SCALE_DOWN] != (t < DOWN_EXACT ? exact_scale(largest_down[t][i]) : delayed);
    }
    ok(wrong == 0, "step %d: scales of weights follow from them, those of c_proj %s: %d do not", t,
       t < DOWN_EXACT ? "at hand" : "of the step before", wrong);
}

// The activations' scales that were in use from step `first` on, against those of a file.
static double activation_spread(const char *file, int first)
{
    SafeTensors *st = open_golden(file);
    float *want = read_golden(st, "activation_scale", NULL);
    Spread s = {0, 0};
    for (int i = first * 2 * LAYERS_2026; i < GOLDEN_2026_STEPS * 2 * LAYERS_2026; i++)
        spread(&s, (&activation[0][0][0])[i], want[i]);
    free(want);
    safetensors_close(st);
    return spread_of(&s);
}

static void run_steps(const SafeTensors *st)
{
    float *want_loss = read_golden(st, "loss", NULL), *up = read_golden(st, "up_scale", NULL),
          *down = read_golden(st, "down_scale", NULL);
    Spread losses = {0, 0}, weights = {0, 0};
    for (int t = 0; t < GOLDEN_2026_STEPS; t++) {
        double loss[2];
        golden_2026_gradients(&g, t, loss);
        check_weight_scales(t);
        for (int i = 0; i < LAYERS_2026; i++) {
            spread(&weights, g.model.mlp.scales[i * MLP_SCALES + SCALE_UP], up[t * LAYERS_2026 + i]);
            spread(&weights, g.model.mlp.scales[i * MLP_SCALES + SCALE_DOWN], down[t * LAYERS_2026 + i]);
        }
        for (int k = 0; k < 2; k++) {
            spread(&losses, loss[k], want_loss[2 * t + k]);
            memcpy(activation[t][k], g.scale_post[k], sizeof activation[t][k]);
        }
        optimizer_step(&optimizer, &g.model, t, NULL);
        optimizer_part(&optimizer, &g.model, t, NULL);
    }
    ok_at_most(spread_of(&losses), loss_limit, "losses");
    ok_at_most(spread_of(&weights), code / 2, "scales of weights");
    free(want_loss);
    free(up);
    free(down);
}

// other: the file of the other rule
static void check_fp8_steps(const char *rule, const char *file, const char *other)
{
    char *options[] = {"--head", "fp8", "--mlp", "fp8", "--fp8-scales", (char *)rule, NULL};
    SafeTensors *st = open_golden(file);
    printf("# --fp8-scales %s\n", rule);
    begin_steps("toy-2026", "2026", options);
    run_steps(st);
    double own = activation_spread(file, 0), others = activation_spread(other, 1);
    ok(own <= code && others > 2 * code,
       "scales of activations: %.3f from the reference's, %.3f from those of the other rule", own, others);
    end_steps();
    safetensors_close(st);
}

static void check_fp8_2026(void)
{
    static const char by_number[] = "2026-steps-fp8", in_sequence[] = "2026-steps-fp8-sequential";
    comm_open(); // one rank
    check_fp8_steps("by-micro-batch", by_number, in_sequence);
    check_fp8_steps("sequential", in_sequence, by_number);
}
