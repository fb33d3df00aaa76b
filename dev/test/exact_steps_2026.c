// The optimizers of the records of summer 2026 in fp32 against the float64 reference: six steps of the whole
// network over both changes of stage and the parting of embedding and head, and Adam and NorMuon on given
// gradients.
#include "dev/test/golden_2026.h"
#include "dev/test/tap.h"
#include "llmc/optim/optimizer.h"

static const double limit = 1e-5, loss_limit = 1e-6; // of a tensor, of a loss
static Golden2026 g;
static Optimizer optimizer;
static void *workspace;

static void set(const char *option, const char *value)
{
    Error e;
    if (!config_set(&g.config, option, value, &e))
        fatal(1, "%s", e.text);
}

static void begin_optimizer(void)
{
    optimizer_create(&optimizer, &g.model);
    optimizer.step = &g.step;
    workspace = device_alloc(optimizer_workspace_bytes(&optimizer, &g.model), "optimizer");
    optimizer.ns_workspace = workspace;
}

static void end_optimizer(void)
{
    optimizer_free(&optimizer);
    device_free(workspace);
}

static void update(int t)
{
    optimizer_step(&optimizer, &g.model, t, NULL);
    optimizer_part(&optimizer, &g.model, t, NULL);
}

static float value_of(const Params *p, const Param *a, int64_t i)
{
    const void *x = param_data(p, a);
    return param_element_size(a) == 4 ? ((const float *)x)[i] : x_to_float(((const floatX *)x)[i]);
}

// The reference has matrices of no layer in the MLP's bank, [c_fc, c_proj] of one layer more, whose gradient
// is zero: it leaves their decay alone of the update. What that has made of 1 so far.
static double padding[2];

static void decay_padding(void)
{
    const Role roles[2] = {ROLE_MLP_UP, ROLE_MLP_DOWN};
    for (int i = 0; i < 2; i++) {
        RuleStep rule = g.step.rule[params_of(&g.model.params, roles[i], 0)->rule];
        padding[i] *= 1 - (double)rule.rate * rule.decay;
    }
}

// A tensor of the file, `count` elements; those that no parameter has are as in `init`, decayed.
static float *values_in_file(const char *name, int64_t count, const float *init)
{
    const Params *p = &g.model.params;
    int64_t matrix = params_of(p, ROLE_MLP_UP, 0)->rows * params_of(p, ROLE_MLP_UP, 0)->cols;
    float *x = xcalloc((size_t)count, sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)(init[i] * padding[i / matrix % 2]);
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        for (int64_t k = 0; k < param_elements(a) && !strcmp(a->spec->name, name); k++)
            x[place_in_file(a, k)] = value_of(p, a, k);
    }
    return x;
}

static bool is_first(const Params *p, int param) // of its name, and trained
{
    const ParamSpec *spec = p->list[param].spec;
    bool first = spec->update.kind != FIXED;
    for (int i = 0; i < param; i++)
        first = first && strcmp(p->list[i].spec->name, spec->name);
    return first;
}

// ---- six steps --------------------------------------------------------------------------------------------

// Error of a tensor's sample as a share of its limit: 1e-5 of the tensor, or twice the error of the float32
// reference's update.
static double excess(const SafeTensors *st, const char *name, int t)
{
    int64_t n, k;
    float *init = golden_values(g.init, "", name, &n), *got = values_in_file(name, n, init),
          *want = golden_values(st, "sample.", name, &k), *rel = golden_values(st, "rel_f32.", name, NULL);
    int64_t stride = sample_stride_2026(n);
    double error = 0, norm = 0, moved = 0;
    k /= GOLDEN_2026_STEPS;
    for (int64_t i = 0; i < k; i++) {
        int64_t at = i * stride % n;
        double w = want[t * k + i];
        error += pow(got[at] - w, 2);
        norm += w * w;
        moved += pow(w - init[at], 2);
    }
    double of_update = moved > 0 ? sqrt(error / moved) : INFINITY;
    double share = fmin(sqrt(error / norm) / limit, rel[t] > 0 ? of_update / (2 * rel[t]) : INFINITY);
    free(init);
    free(got);
    free(want);
    free(rel);
    return share;
}

static double norm_error(const SafeTensors *st, const char *name, int t)
{
    int64_t n;
    float *init = golden_values(g.init, "", name, &n), *got = values_in_file(name, n, init),
          *want = golden_values(st, "norm.", name, NULL);
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += pow(got[i], 2);
    double error = fabs(sqrt(sum) - want[t]) / want[t];
    free(init);
    free(got);
    free(want);
    return error;
}

static void check_step(const SafeTensors *st, const float *want_loss, int t)
{
    const Params *p = &g.model.params;
    double loss[2], worst = 0, worst_norm = 0, worst_loss = 0;
    const char *where = "";
    ok(p->tied == (t <= 3), "step %d: embedding and head are %s", t, p->tied ? "one" : "two");
    golden_2026_gradients(&g, t, loss);
    update(t);
    decay_padding();
    for (int i = 0; i < 2; i++)
        worst_loss = larger_error(worst_loss, fabs(loss[i] - want_loss[2 * t + i]) / want_loss[2 * t + i]);
    for (int i = 0; i < p->count; i++) {
        const char *name = p->list[i].spec->name;
        if (!is_first(p, i))
            continue;
        double share = excess(st, name, t);
        if (!(share <= worst))
            where = name;
        worst = share <= worst ? worst : share;
        worst_norm = larger_error(worst_norm, norm_error(st, name, t));
    }
    ok(worst <= 1, "  every parameter within its limit (worst %.3f of it, %s)", worst, where);
    ok_at_most(worst_norm, limit, "  norms of the whole tensors");
    ok_at_most(worst_loss, loss_limit, "  losses before the step");
}

static void check_steps(const char *preset, const char *files)
{
    golden_2026_open(&g, preset, files);
    SafeTensors *st = golden_2026_file(&g, "steps");
    float *want_loss = read_golden(st, "loss", NULL);
    set("momentum-warmup", "3");
    set("momentum-cooldown", "2");
    begin_optimizer();
    golden_2026_weights(&g);
    padding[0] = padding[1] = 1;
    for (int t = 0; t < GOLDEN_2026_STEPS; t++)
        check_step(st, want_loss, t);
    const float *embed = param_data(&g.model.params, g.model.embed),
                *head = param_data(&g.model.params, g.model.head);
    ok(memcmp(embed, head, (size_t)param_elements(g.model.head) * sizeof *head) != 0,
       "at the end embedding and head differ");
    end_optimizer();
    golden_2026_close(&g);
    safetensors_close(st);
    free(want_loss);
}

// ---- given gradients --------------------------------------------------------------------------------------

// Tensors of the files of a width of their own, in place of the network's first: the others stay zero.
static void open_at(const char *model_dim, const char *heads, const char *mlp_dim)
{
    char *argv[] = {"test", "--preset", "toy-2026", "--vocab-size", "61"};
    Error e;
    memset(&g, 0, sizeof g);
    if (!config_parse(&g.config, 5, argv, &e))
        fatal(1, "%s", e.text);
    g.config.model_dim = atoi(model_dim);
    g.config.num_heads = atoi(heads);
    g.config.mlp_dim = atoi(mlp_dim);
    backend_open(0);
    backend_reserve(&(OpSizes){.tokens = 16,
                               .eval_tokens = 16,
                               .dim = g.config.model_dim,
                               .heads = g.config.num_heads,
                               .mlp_dim = g.config.mlp_dim,
                               .vocab_padded = 128});
    model_describe(&g.model, &g.config);
    model_allocate(&g.model, true);
    begin_optimizer();
}

static void close_all(SafeTensors *st)
{
    end_optimizer();
    model_free(&g.model);
    backend_close();
    safetensors_close(st);
}

// Values or gradients of the parameters of a tensor, from the tensor's first `count` elements. Rows that the
// file has fewer of than the network (`rows` of each matrix) are left out.
static void give(const char *name, const float *x, int64_t rows, bool gradient)
{
    Params *p = &g.model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (strcmp(a->spec->name, name))
            continue;
        for (int64_t k = 0; k < param_elements(a); k++) {
            int64_t at = place_in_file(a, k), matrix = a->rows * a->cols, row = at % matrix / a->cols;
            if (rows && row >= rows)
                continue;
            float value = x[rows ? at / matrix * rows * a->cols + at % matrix : at];
            if (gradient)
                param_grad(p, a)[k] += value;
            else
                store_value(p, a, k, value);
        }
    }
}

static double error_of(const char *name, const float *want, int64_t rows)
{
    const Params *p = &g.model.params;
    double error = 0, norm = 0;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        for (int64_t k = 0; k < param_elements(a) && !strcmp(a->spec->name, name); k++) {
            int64_t at = place_in_file(a, k), matrix = a->rows * a->cols;
            if (rows && at % matrix / a->cols >= rows)
                continue;
            double w = want[rows ? at / matrix * rows * a->cols + at % matrix : at];
            error += pow(value_of(p, a, k) - w, 2);
            norm += w * w;
        }
    }
    return sqrt(error / norm);
}

static void check_constants(const SafeTensors *st, const char *name, const ParamSpec *spec)
{
    float *want = golden_values(st, "constants.", name, NULL);
    const UpdateSpec *u = &spec->update;
    ok(want[0] == (float)u->rate && want[1] == (float)u->decay && want[2] == (float)u->beta1 &&
           want[3] == (float)u->beta2,
       "%s: rate %g, decay %g, betas %g and %g", name, u->rate, u->decay, u->beta1, u->beta2);
    free(want);
}

// The file's columns of generators a and b are fewer.
static int64_t rows_in_file(const char *name) { return strcmp(name, "mudd_gate_w2") ? 0 : 13; }

static void adam_step(const SafeTensors *st, int t)
{
    const Params *p = &g.model.params;
    g.step = schedule_step_params(&g.config, t);
    g.step.grad_scale = 1; // gradients of the file are averaged
    for (int i = 0; i < p->count; i++) {
        const char *name = p->list[i].spec->name;
        char *key = format_string("init.%s", name);
        bool given = is_first(p, i) && safetensors_find(st, key);
        free(key);
        if (!given)
            continue;
        int64_t n;
        float *x = golden_values(st, "grad.", name, &n);
        if (!t) {
            float *init = golden_values(st, "init.", name, NULL);
            give(name, init, rows_in_file(name), false);
            check_constants(st, name, p->list[i].spec);
            free(init);
        }
        give(name, x + t * (n / GOLDEN_2026_STEPS), rows_in_file(name), true);
        free(x);
    }
    update(t);
}

static double adam_error(const SafeTensors *st, int t)
{
    const Params *p = &g.model.params;
    double worst = 0;
    for (int i = 0; i < p->count; i++) {
        const char *name = p->list[i].spec->name;
        char *key = format_string("after.%s", name);
        int64_t n;
        if (is_first(p, i) && safetensors_find(st, key)) {
            float *want = read_golden(st, key, &n);
            worst = larger_error(worst, error_of(name, want + t / 2 * (n / 3), rows_in_file(name)));
            free(want);
        }
        free(key);
    }
    return worst;
}

// fp32 sums of a few terms, and a quotient by the root of a square of the same size.
static void check_adam(void)
{
    SafeTensors *st = open_golden("2026-adam");
    float *rate = read_golden(st, "rate", NULL);
    open_at("16", "2", "32");
    for (int t = 0; t < GOLDEN_2026_STEPS; t++) {
        adam_step(st, t);
        ok(fabs(schedule_lr_factor(&g.config, t) - rate[t]) <= 1e-7, "Adam, step %d: the rate is %g", t,
           rate[t]);
        if (t % 2)
            ok_at_most(adam_error(st, t), 2e-6, "  every tensor");
    }
    free(rate);
    close_all(st);
}

// Gradients and values of a bank's first matrices.
static void give_bank(const char *name, const float *x, int64_t count, bool gradient)
{
    int64_t whole = 0;
    const Params *p = &g.model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (!strcmp(a->spec->name, name))
            whole = max_i64(whole, (a->file_first + a->matrices) * a->rows * a->cols);
    }
    float *bank = xcalloc((size_t)whole, sizeof *bank);
    memcpy(bank, x, (size_t)count * sizeof *bank);
    give(name, bank, 0, gradient);
    free(bank);
}

static double bank_error(const char *name, const float *want, int64_t count)
{
    const Params *p = &g.model.params;
    double error = 0, norm = 0;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        for (int64_t k = 0; k < param_elements(a) && !strcmp(a->spec->name, name); k++) {
            int64_t at = place_in_file(a, k);
            double w = at < count ? want[at] : 0;
            error += pow(value_of(p, a, k) - w, 2);
            norm += w * w;
        }
    }
    return sqrt(error / norm);
}

static const struct {
    const char *in_file, *bank;
} banks[] = {{"wide", "qk_bank"}, {"square", "vo_bank"}, {"tall", "mlp_bank"}};
enum { BANKS = 3, BANK_STEPS = 3 };

static void normuon_gradients(const SafeTensors *st, int t)
{
    params_zero_gradients(&g.model.params, NULL); // those of the last step have become U
    for (int i = 0; i < BANKS; i++) {
        int64_t n, count;
        float *x = golden_values(st, "grad.", banks[i].in_file, &n),
              *init = golden_values(st, "init.", banks[i].in_file, &count);
        if (!t)
            give_bank(banks[i].bank, init, count, false);
        give_bank(banks[i].bank, x + t * count, count, true);
        free(x);
        free(init);
    }
}

// Wide, square and tall matrices in the banks' first places; the others are zero and stay zero. fp32 weights,
// momentum and second moments; Newton-Schulz in double.
static void check_normuon(void)
{
    SafeTensors *st = open_golden("2026-normuon");
    float *rate = read_golden(st, "rate", NULL), *mu = read_golden(st, "momentum", NULL);
    open_at("24", "6", "32");
    for (int t = 0; t < BANK_STEPS; t++) {
        normuon_gradients(st, t);
        g.step = schedule_step_params(&g.config, 0); // whose factor is 1
        for (int k = 0; k < MAX_UPDATE_RULES; k++) {
            g.step.rule[k].rate *= rate[t];
            g.step.rule[k].decay *= rate[t];
        }
        g.step.muon_momentum = mu[t];
        g.step.grad_scale = 1;
        optimizer_step(&optimizer, &g.model, 0, NULL); // the matrices alone
        for (int i = 0; i < BANKS; i++) {
            int64_t n;
            float *want = golden_values(st, "after.", banks[i].in_file, &n);
            char *label = format_string("NorMuon, step %d, %s", t, banks[i].in_file);
            ok_at_most(bank_error(banks[i].bank, want + t * (n / BANK_STEPS), n / BANK_STEPS), 1e-6, label);
            free(label);
            free(want);
        }
    }
    free(rate);
    free(mu);
    close_all(st);
}

int main(void)
{
    comm_open(); // one rank
    PART(check_steps("toy-2026", "2026"));
    PART(check_steps("toy-2026-08", "2026-08"));
    PART(check_steps("2026-05-27", "2026-05-27"));
    PART(check_adam());
    PART(check_normuon());
    return tap_done();
}
