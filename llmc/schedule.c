#include "llmc/schedule.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

double schedule_lr_factor(const Config *c, int t)
{
    double u = fmin(0.9999, (double)t / c->num_scheduled);
    if (u < 1 - c->cooldown) return 1;
    double w = (1 - u) / c->cooldown;
    return w + 0.1 * (1 - w);
}

double schedule_momentum(const Config *c, int t)
{
    double span = c->momentum_high - c->momentum_low;
    int cooldown_start = config_total_steps(c) - c->momentum_cooldown;
    if (t < c->momentum_warmup) return c->momentum_low + span * t / c->momentum_warmup;
    if (t > cooldown_start) return c->momentum_high - span * (t - cooldown_start) / c->momentum_cooldown;
    return c->momentum_high;
}

static int window_list(const Config *c, int *windows)
{
    int n = 0;
    for (char *p = (char *)c->window_schedule; n < MAX_WINDOWS; p++) {
        windows[n++] = (int)strtol(p, &p, 10);
        if (!*p) break;
    }
    return n;
}

int schedule_window(const Config *c, int t)
{
    int windows[MAX_WINDOWS], n = window_list(c, windows);
    if (t >= c->num_scheduled) return c->window_extension;
    return windows[(int64_t)n * t / c->num_scheduled];
}

StepParams schedule_step_params(const Config *c, int t, int adam_steps)
{
    double factor = schedule_lr_factor(c, t), k = adam_steps + 1;
    double correction = sqrt(1 - pow(ADAM_BETA2_PERCENT / 100.0, k)) / (1 - pow(ADAM_BETA1_PERCENT / 100.0, k));
    return (StepParams){.grad_scale = (float)(1.0 / c->micro_batches),
                        .adam_rate = (float)(c->adam_rate * factor * correction),
                        .muon_rate = (float)(c->muon_rate * factor),
                        .muon_momentum = (float)schedule_momentum(c, t),
                        .muon_decay = (float)(c->muon_rate * factor * c->weight_decay)};
}

void rope_start(Rope *r, const Config *c)
{
    memset(r, 0, sizeof *r);
    r->window = schedule_window(c, 0);
    r->count = c->model_dim / c->num_heads / 4;
    r->scale = 0.1;
    for (int j = 0; j < r->count; j++) r->frequency[j] = (float)pow(1.0 / 1024, (double)j / (r->count - 1));
}

bool rope_follow_window(Rope *r, const Config *c, int window)
{
    double a = r->window, b = window;
    if (window == r->window) return false;
    for (int j = 0; j < r->count; j++) {
        double rotations = c->block_size * a * r->frequency[j] / (2 * M_PI);
        double keep = fmin(1, fmax(0, (rotations - 1) / 31));
        r->frequency[j] = (float)(r->frequency[j] * (a / b + keep * (1 - a / b)));
    }
    r->scale *= 1 + 0.2 * log(b / a);
    r->window = window;
    return true;
}
