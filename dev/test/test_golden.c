// The bf16 build against the float64 twin: no further off than twice the twin's own bf16 run. Errors of
// tensors of one kind are pooled (root mean square), because one small tensor's error is a draw from a wide
// distribution.
#include "dev/test/golden.h"
#include "dev/test/tap.h"

// Parameters of one row of the record are pooled, since one small tensor's error says little.
enum { KINDS = 16 };
typedef struct {
    const ParamSpec *row;
    double ours, twin, sign; // sums of squared errors; of one sign, where the first Adam step allows it
    int count;
} Pool;

static Pool *pool_of(Pool *pools, const Param *a)
{
    int i = 0;
    while (pools[i].row && pools[i].row != a->spec)
        i++;
    pools[i].row = a->spec;
    return &pools[i];
}

static void add_to_pool(Pool *pool, double ours, double twin)
{
    pool->ours += ours * ours;
    pool->twin += twin * twin;
    pool->count++;
}

static void report(const Pool *pools, const char *what)
{
    for (const Pool *p = pools; p->row; p++)
        ok(p->ours <= 4 * p->twin + p->sign, "%s of %s: error %.2e, the twin's in bf16 %.2e", what,
           p->row->name, sqrt(p->ours / p->count), sqrt(p->twin / p->count));
}

static void check_gradients(const GoldenCase *c)
{
    Golden g;
    Pool pools[KINDS] = {0};
    golden_open(&g, c);
    golden_load_weights(&g);
    char *name = format_string("gradients-%s", c->preset);
    SafeTensors *st = open_golden(name);
    double loss[2];
    float *want_loss = read_golden(st, "loss", NULL), *loss_rel = read_golden(st, "loss_rel", NULL);
    golden_gradients(&g, 0, loss);
    printf("# %s\n", c->preset);
    double error = fabs(loss[0] + loss[1] - want_loss[0] - want_loss[1]) / (want_loss[0] + want_loss[1]);
    ok_at_most(error, 2 * loss_rel[0], "loss, relative error");
    for (int i = 0; i < g.model.params.count; i++) {
        const Param *a = &g.model.params.list[i];
        const float *got = param_grad(&g.model.params, a);
        int64_t n;
        float *want = golden_values(st, "grad.", a->name, &n),
              *rel = golden_values(st, "rel_bf16.", a->name, NULL);
        double difference = 0, norm = 0;
        for (int64_t k = 0; k < n; k++) {
            difference += pow((double)got[k] - want[k], 2);
            norm += pow(want[k], 2);
        }
        add_to_pool(pool_of(pools, a), sqrt(difference / norm), rel[0]);
        free(want);
        free(rel);
    }
    report(pools, "gradients");
    free(want_loss);
    free(loss_rel);
    free(name);
    safetensors_close(st);
    golden_close(&g);
}

// Error of the update on the sample, relative to the update.
static double update_error(const Golden *g, const SafeTensors *st, const Param *a, int t)
{
    int64_t k, n = param_elements(a), stride = sample_stride(n);
    float *want = golden_values(st, "sample.", a->name, &k),
          *init = golden_values(g->init, "", a->name, NULL);
    double error = 0, update = 0;
    k /= GOLDEN_STEPS;
    for (int64_t i = 0; i < k; i++) {
        int64_t at = i * stride % n;
        double w = want[t * k + i];
        error += pow(param_value(&g->model.params, a, at) - w, 2);
        update += pow(w - init[at], 2);
    }
    free(want);
    free(init);
    return update > 0 ? sqrt(error / update) : error > 0 ? INFINITY : 0;
}

static void check_steps(const GoldenCase *c)
{
    Golden g;
    golden_open(&g, c);
    golden_load_weights(&g);
    SafeTensors *st = golden_steps(&g);
    for (int t = 0; t < GOLDEN_STEPS; t++) {
        double loss[2];
        Pool pools[KINDS] = {0};
        if (c->gates_only)
            golden_given_gradients(&g, t);
        else
            golden_gradients(&g, t, loss);
        golden_update(&g, t);
        if (t != 1 && t != GOLDEN_STEPS - 1)
            continue; // the first Adam step and the last
        for (int i = 0; i < g.model.params.count; i++) {
            const Param *a = &g.model.params.list[i];
            if (!golden_trains(&g, a))
                continue;
            float *rel = golden_values(st, "rel_bf16.", a->name, NULL);
            Pool *pool = pool_of(pools, a);
            add_to_pool(pool, update_error(&g, st, a, t), rel[t]);
            // The first Adam step is the sign of the gradient. One scalar's gradient may be zero but for
            // rounding, which differs between compilers: of n updates of one size, one then has the other
            // sign.
            if (t == 1 && a->spec->role == ROLE_SCALARS)
                pool->sign += 4.0 / (double)(param_elements(a));
            free(rel);
        }
        char *label = format_string("step %d, updates", t + 1);
        report(pools, label);
        free(label);
    }
    safetensors_close(st);
    golden_close(&g);
}

int main(void)
{
    golden_all(check_gradients, check_steps);
    return tap_done();
}
