// Six steps of the records of August 2026 with q, k, v and the MLP in FP8 both ways, against the float64
// reference with emulated codes: losses, and the scales that each step has in use.
//
// The reference rounds to bf16 what a bf16 network would round, and nothing else; here all is bf16, or
// nothing. So some codes are the neighbour's, 2^-4 to 2^-3 away: that is how far scales may be from the
// reference's. What scales of weights follow from is checked to the bit.
#pragma once
#include "dev/test/golden_2026_steps.h"

static const double code = 0x1p-3;       // relative distance of neighbouring codes, at most
static const double loss_limit = 0x1p-8; // one rounding of bf16
enum { LAYERS_2026 = 6, SCALES_OF_STEP = 2 * LAYERS_2026 };
static float delayed[DELAYED_KINDS][GOLDEN_2026_STEPS * SCALES_OF_STEP]; // of each step, micro-batch, layer

static float largest_of(const floatX *x, int64_t n)
{
    float most = 1e-12f;
    for (int64_t i = 0; i < n; i++)
        most = fmaxf(most, fabsf(x_to_float(x[i])));
    return most;
}

// Of the weights that the step begins with, from the bits of their copies: one is a quotient, one a product.
static void check_weight_scales(int t)
{
    const Params *p = &g.model.params;
    int wrong = 0;
    for (int i = 0; i < LAYERS_2026; i++) {
        const Param *up = params_of(p, ROLE_MLP_UP, i), *down = params_of(p, ROLE_MLP_DOWN, i),
                    *qkv = params_of(p, ROLE_QKVO, i);
        const float *scale = g.model.mlp.scales + i * MLP_SCALES;
        wrong += scale[SCALE_UP] != largest_of(param_weight(p, up), param_elements(up)) / 448;
        wrong += scale[SCALE_DOWN] != largest_of(param_weight(p, down), param_elements(down)) / 448;
        int64_t rows = 2 * g.config.num_heads * record_key_width(&g.config) + g.config.model_dim;
        if (qkv)
            wrong += g.model.qkv.scales[i] !=
                     largest_of(param_weight(p, qkv), rows * g.config.model_dim) * (1.0f / 448);
    }
    ok(wrong == 0, "step %d: scales of weights follow from those at hand: %d do not", t, wrong);
}

static void note_delayed(int t)
{
    for (int kind = 0; kind < DELAYED_KINDS; kind++)
        for (int micro = 0; micro < 2; micro++)
            memcpy(delayed[kind] + t * SCALES_OF_STEP + micro * LAYERS_2026,
                   model_delayed_scale(&g.model, kind, micro), LAYERS_2026 * sizeof(float));
}

static void weight_spreads(const SafeTensors *st, int t, Spread *s)
{
    float *up = read_golden(st, "up_scale", NULL), *down = read_golden(st, "down_scale", NULL),
          *qkv = read_golden(st, "qkv_scale", NULL);
    for (int i = 0, attention = 0; i < LAYERS_2026; i++) {
        spread(s, g.model.mlp.scales[i * MLP_SCALES + SCALE_UP], up[t * LAYERS_2026 + i]);
        spread(s, g.model.mlp.scales[i * MLP_SCALES + SCALE_DOWN], down[t * LAYERS_2026 + i]);
        if (g.model.layer[i].qkvo)
            spread(s, g.model.qkv.scales[i], qkv[t * (LAYERS_2026 - 1) + attention++]);
    }
    free(up);
    free(down);
    free(qkv);
}

static void run_steps(const SafeTensors *st)
{
    float *want = read_golden(st, "loss", NULL);
    Spread losses = {0, 0}, weights = {0, 0};
    for (int t = 0; t < GOLDEN_2026_STEPS; t++) {
        double loss[2];
        note_delayed(t);
        golden_2026_gradients(&g, t, loss);
        check_weight_scales(t);
        weight_spreads(st, t, &weights);
        for (int k = 0; k < 2; k++)
            spread(&losses, loss[k], want[2 * t + k]);
        optimizer_step(&optimizer, &g.model, t, NULL);
        optimizer_part(&optimizer, &g.model, t, NULL);
    }
    ok_at_most(spread_of(&losses), loss_limit, "losses");
    ok_at_most(spread_of(&weights), code / 4, "scales of weights");
    free(want);
}

static double delayed_spread(const char *name, int kind, int first)
{
    static const char *const kinds[] = {"scale_x", "scale_p", "scale_e"};
    SafeTensors *st = open_golden(name);
    float *want = read_golden(st, kinds[kind], NULL);
    Spread s = {0, 0};
    for (int i = first * SCALES_OF_STEP; i < GOLDEN_2026_STEPS * SCALES_OF_STEP; i++)
        spread(&s, delayed[kind][i], want[i]);
    free(want);
    safetensors_close(st);
    return spread_of(&s);
}

// What a delayed scale is before the first step.
static int wrong_starts(float unit)
{
    const float start[] = {8.0f / 448, 16.0f / 448, unit * (1.0f / 448)};
    int wrong = 0;
    for (int kind = 0; kind < DELAYED_KINDS; kind++)
        for (int i = 0; i < SCALES_OF_STEP; i++)
            wrong += delayed[kind][i] != start[kind];
    return wrong;
}

// other: the file of the other rule; unit: of gradients' scales
static void check_fp8_both(const char *rule, const char *name, const char *other, float unit)
{
    char *options[] = {"--head",       "fp8",        "--mlp", "fp8-backward", "--qkv", "fp8",
                       "--fp8-scales", (char *)rule, NULL};
    SafeTensors *st = open_golden(name);
    printf("# --fp8-scales %s\n", rule);
    begin_steps("toy-2026-08", "2026-08", options);
    run_steps(st);
    ok(wrong_starts(unit) == 0, "the first scales: %d differ", wrong_starts(unit));
    for (int kind = 0; kind < DELAYED_KINDS; kind++) {
        static const char *const kinds[] = {"input", "relu^2", "the gradient before it"};
        double own = delayed_spread(name, kind, 0), others = delayed_spread(other, kind, 2);
        ok(own <= code && others > 3 * own,
           "scales of %s: %.3f from the reference's, %.3f from those of the other rule", kinds[kind], own,
           others);
    }
    end_steps();
    safetensors_close(st);
}

static void check_fp8_both_2026(void)
{
    static const char by_number[] = "2026-08-steps-fp8", in_sequence[] = "2026-08-steps-fp8-sequential";
    comm_open(); // one rank
    check_fp8_both("by-micro-batch", by_number, in_sequence, 1);
    check_fp8_both("sequential", in_sequence, by_number, 2);
}
