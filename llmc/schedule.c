#include "llmc/schedule.h"
#include "llmc/records/record.h"
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

// Adam: k updates are made with this one, and its moments began at zero. NorMuon: its shape factor, max(1, rows/cols)^1/2 of the
// stored shape, is part of the rate.
static RuleStep rule_step(const Config *c, const ParamSpec *spec, double factor, int t)
{
    const UpdateSpec *u = &spec->update;
    double k = (t + 1) / u->every, correction = sqrt(1 - pow(u->beta2, k)) / (1 - pow(u->beta1, k));
    double base = u->kind == ADAM ? c->adam_rate * factor * (k ? correction : 0) : c->muon_rate * factor;
    double shape = u->kind == ADAM ? 1 : sqrt(fmax(1, (double)record_extent(c, spec->rows) / (double)record_extent(c, spec->cols)));
    return (RuleStep){.rate = (float)(u->rate * shape) * (float)base,
                      .decay = u->kind == ADAM ? 0 : (float)(c->muon_rate * factor * c->weight_decay)};
}

StepParams schedule_step_params(const Config *c, int t)
{
    const Record *r = config_record(c);
    double factor = schedule_lr_factor(c, t);
    StepParams p = {.grad_scale = (float)(1.0 / c->micro_batches), .muon_momentum = (float)schedule_momentum(c, t)};
    for (int i = 0; i < r->num_params; i++) p.rule[i] = rule_step(c, &r->params[i], factor, t);
    return p;
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
