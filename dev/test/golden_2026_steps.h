// Steps of a network of the golden files 2026-* with the optimizer, and how far scales are from the
// reference's.
#pragma once
#include "dev/test/golden_2026.h"
#include "dev/test/tap.h"
#include "llmc/optim/optimizer.h"

static Golden2026 g;
static Optimizer optimizer;

// options: more of them, ends with a NULL
static void begin_steps(const char *preset, const char *files, char **options)
{
    Error e;
    golden_2026_open_with(&g, preset, files, options);
    if (!config_set(&g.config, "momentum-warmup", "3", &e) ||
        !config_set(&g.config, "momentum-cooldown", "2", &e))
        fatal(1, "%s", e.text);
    optimizer_create(&optimizer, &g.model);
    optimizer.step = &g.step;
    optimizer.ns_workspace = device_alloc(optimizer_workspace_bytes(&optimizer, &g.model), "optimizer");
    golden_2026_weights(&g);
}

static void end_steps(void)
{
    device_free(optimizer.ns_workspace);
    optimizer_free(&optimizer);
    golden_2026_close(&g);
}

// Root of the mean square of log(got / want).
typedef struct {
    double square;
    int count;
} Spread;

static void spread(Spread *s, double got, double want)
{
    s->square += pow(log(got / want), 2);
    s->count++;
}

static double spread_of(const Spread *s) { return sqrt(s->square / s->count); }
