#include "llmc/run/mfu.h"
#include "llmc/optim/schedule.h"
#include <string.h>

// Weights that multiply each token.
static double multiplying_weights(const Params *p, const Config *c)
{
    double weights = 0;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        switch (a->spec->role) {
        case ROLE_QKVO:
        case ROLE_VO:
        case ROLE_O:
        case ROLE_MLP_UP:
        case ROLE_MLP_DOWN:
            weights += (double)param_elements(a);
            break;
        case ROLE_HEAD:
            weights += (double)c->vocab_size * c->model_dim;
            break; // the padding is no part of the model
        default:
            break;
        }
    }
    return weights;
}

double mfu_flops_per_token(const Params *p, const Config *c, int step)
{
    Stage stage = schedule_stage(c, step);
    double keys = 0;
    for (int l = 0; l < p->record->num_layers; l++) {
        const LayerSpec *layer = &p->record->layers[l];
        if (layer->attention == ATTENTION_NONE)
            continue;
        keys += window_tokens(c, layer->long_window ? stage.window : stage.window_short);
    }
    return 6 * multiplying_weights(p, c) + 12.0 * c->model_dim * keys;
}

double mfu_peak_flops(const char *device_name)
{
    // The first name that is found in the driver's counts: those that contain another stand before it.
    static const struct {
        const char *name;
        double tflops;
    } gpus[] = {
        {"GB200", 2500}, {"B200", 2250},   {"H200 NVL", 835},   {"H100 NVL", 835}, {"H100 PCIe", 756},
        {"H200", 989},   {"H100", 989},    {"H800", 989},       {"A100", 312},     {"A800", 312},
        {"A40", 149.7},  {"L40S", 362.05}, {"RTX 4090", 165.2},
    };
    for (size_t i = 0; device_name && i < sizeof gpus / sizeof *gpus; i++) {
        const char *at = strstr(device_name, gpus[i].name);
        size_t length = strlen(gpus[i].name);
        if (at && (at[length] == 0 || at[length] == ' ' || at[length] == '-'))
            return gpus[i].tflops * 1e12;
    }
    return 0;
}
