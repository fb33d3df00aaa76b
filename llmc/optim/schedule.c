#include "llmc/optim/schedule.h"
#include "llmc/records/record.h"
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- stages -----------------------------------------------------------------------------------------------

// Numbers of a list like "3,7,11", at most MAX_WINDOWS + 1; below 0 when it is none.
static int parse_list(const char *list, double *numbers)
{
    int n = 0;
    if (!*list)
        return 0;
    for (const char *p = list;; p++) {
        char *end;
        if (n > MAX_WINDOWS || !(isdigit((unsigned char)*p) || *p == '.'))
            return -1;
        numbers[n++] = strtod(p, &end);
        if (!*end)
            return n;
        if (*end != ',')
            return -1;
        p = end;
    }
}

// Entry k of a list; beyond its end the last one, of an empty list `standard`.
static double list_entry(const char *list, int k, double standard)
{
    double numbers[MAX_WINDOWS + 1];
    int n = parse_list(list, numbers);
    return n > 0 ? numbers[k < n ? k : n - 1] : standard;
}

// Weights like "1:0.5:0.25-0": a target each, constant or from the one value to the other. The end of what
// was parsed; NULL when it is none.
static const char *parse_targets(const char *text, Stage *s)
{
    s->num_targets = 0;
    for (;; text++) {
        double value[2];
        for (int i = 0; i < 2; i++) {
            char *end;
            if (s->num_targets == MAX_TARGETS || !(isdigit((unsigned char)*text) || *text == '.'))
                return NULL;
            value[i] = value[1] = strtod(text, &end);
            text = end;
            if (i || *text != '-')
                break;
            text++;
        }
        s->target_from[s->num_targets] = value[0];
        s->target_to[s->num_targets++] = value[1];
        if (*text != ':')
            return text;
    }
}

// Those of stage k in a list; beyond its end the last ones. The number of entries; below 0 when it is no
// list.
static int stage_targets(const char *list, int k, Stage *s)
{
    Stage entry = {0};
    int n = 0;
    for (const char *text = *list ? list : "1";; text++) {
        text = parse_targets(text, &entry);
        if (!text || (*text && *text != ','))
            return -1;
        if (n++ <= k) {
            s->num_targets = entry.num_targets;
            memcpy(s->target_from, entry.target_from, sizeof s->target_from);
            memcpy(s->target_to, entry.target_to, sizeof s->target_to);
        }
        if (!*text)
            return *list ? n : 0;
    }
}

static int count_stages(const Config *c)
{
    double numbers[MAX_WINDOWS + 1];
    return parse_list(c->window_schedule, numbers);
}

static int stage_start(const Config *c, int k, int count)
{
    int64_t scaled = (int64_t)k * c->num_scheduled;
    return (int)(c->stage_starts == STARTS_UP ? ceil_div(scaled, count) : (2 * scaled + count) / (2 * count));
}

static Stage stage(const Config *c, int k, int count) // stage `count` is the extension
{
    Stage s = {.index = k,
               .begin = k < count ? stage_start(c, k, count) : c->num_scheduled,
               .end = k < count ? stage_start(c, k + 1, count) : config_total_steps(c),
               .micro_batch_tokens = (int)list_entry(c->stage_tokens, k, c->micro_batch_tokens),
               .max_document = (int)list_entry(c->stage_documents, k, c->max_document),
               .window = k == count ? c->window_extension : (int)list_entry(c->window_schedule, k, 0),
               .rate = list_entry(c->stage_rates, k, 1)};
    stage_targets(c->stage_targets, k, &s);
    return s;
}

Stage schedule_stage(const Config *c, int t)
{
    int count = count_stages(c), k = 0;
    while (k < count && t >= stage_start(c, k + 1, count))
        k++;
    return stage(c, k, count);
}

int schedule_most_tokens(const Config *c)
{
    int count = count_stages(c), most = 0;
    for (int k = 0; k <= count; k++)
        most = (int)max_i64(most, stage(c, k, count).micro_batch_tokens);
    return most;
}

bool schedule_sizes_differ(const Config *c)
{
    int count = count_stages(c);
    Stage first = stage(c, 0, count);
    bool differ = false;
    for (int k = 1; k <= count; k++) {
        Stage s = stage(c, k, count);
        differ = differ || s.micro_batch_tokens != first.micro_batch_tokens ||
                 s.max_document != first.max_document;
    }
    return differ;
}

static bool check_list(const char *option, const char *list, int count, double low, double high, int multiple,
                       Error *e)
{
    double numbers[MAX_WINDOWS + 1];
    int n = parse_list(list, numbers);
    if (n < 0)
        return error_set(e, "--%s: '%s' is not a list of numbers, like 3,7,11", option, list);
    if (n && n != count && n != count + 1)
        return error_set(e,
                         "--%s: '%s' has %d entries; the %d stages of --window-schedule need %d, or one more "
                         "for the extension",
                         option, list, n, count, count);
    for (int k = 0; k < n; k++) {
        bool whole = !multiple || numbers[k] == multiple * floor(numbers[k] / multiple);
        if (!(numbers[k] >= low && numbers[k] <= high) || !whole)
            return error_set(e, "--%s: %.10g must be %.10g to %.10g%s", option, numbers[k], low, high,
                             multiple > 1 ? ", a multiple of 16"
                             : multiple   ? ", a whole number"
                                          : "");
    }
    return true;
}

static bool check_targets(const Config *c, int count, Error *e)
{
    Stage s;
    int n = stage_targets(c->stage_targets, 0, &s);
    if (n < 0)
        return error_set(
            e,
            "--stage-targets: '%s' is not a list of weights by stage, of at most %d targets each, "
            "like 1:0.5:0.25-0,1:0.5-0,1",
            c->stage_targets, MAX_TARGETS);
    if (n && n != count && n != count + 1)
        return error_set(
            e,
            "--stage-targets: '%s' has %d entries; the %d stages of --window-schedule need %d, or "
            "one more for the extension",
            c->stage_targets, n, count, count);
    for (int k = 0; k < n; k++) {
        stage_targets(c->stage_targets, k, &s);
        for (int i = 0; i < s.num_targets; i++) {
            if (s.target_from[i] > 1000 || s.target_to[i] > 1000)
                return error_set(e, "--stage-targets: weights are 0 to 1000: '%s'", c->stage_targets);
        }
        if (!(s.target_from[0] > 0 && s.target_to[0] > 0))
            return error_set(e, "--stage-targets: the next token's weight must be above 0: '%s'",
                             c->stage_targets);
    }
    return true;
}

bool schedule_check(const Config *c, Error *e)
{
    int count = count_stages(c);
    double most = fmin(1 << 24, (double)(MAX_STEP_TOKENS / c->micro_batches));
    return check_list("stage-tokens", c->stage_tokens, count, 16, most, 16, e) &&
           check_list("stage-documents", c->stage_documents, count, 2, 1 << 24, 1, e) &&
           check_list("stage-rates", c->stage_rates, count, 0, 1000, 0, e) && check_targets(c, count, e);
}

// As in --stage-targets; empty for one target of weight 1.
static void describe_targets(const Stage *s, char *text, size_t size)
{
    size_t n = 0;
    *text = 0;
    if (s->num_targets == 1 && s->target_from[0] == 1 && s->target_to[0] == 1)
        return;
    for (int k = 0; k < s->num_targets && n < size; k++) {
        n += (size_t)snprintf(text + n, size - n, "%s%g", k ? ":" : ", targets ", s->target_from[k]);
        if (s->target_to[k] != s->target_from[k] && n < size)
            n += (size_t)snprintf(text + n, size - n, "-%g", s->target_to[k]);
    }
}

char *schedule_describe(const Config *c)
{
    int count = count_stages(c);
    char *text = xstrdup("");
    for (int k = 0; k <= count; k++) {
        Stage s = stage(c, k, count);
        char targets[128];
        describe_targets(&s, targets, sizeof targets);
        char *longer = format_string(
            "%s%sfrom step %d: %d x %d tokens, documents cut at %d, windows %d and %d, rate %g%s", text,
            k ? "; " : "", k < count ? stage_start(c, k, count) : c->num_scheduled, c->micro_batches,
            s.micro_batch_tokens, s.max_document, window_short_tokens(c, s.window),
            window_long_tokens(c, s.window), s.rate, targets);
        free(text);
        text = longer;
    }
    return text;
}

int schedule_window(const Config *c, int t) { return schedule_stage(c, t).window; }

// ---- rates ------------------------------------------------------------------------------------------------

double schedule_lr_factor(const Config *c, int t)
{
    double u = fmin(0.9999, (double)t / c->num_scheduled), peak = schedule_stage(c, t).rate;
    if (u < 1 - c->cooldown)
        return peak;
    double w = (1 - u) / c->cooldown;
    return peak * w + c->rate_floor * (1 - w);
}

double schedule_momentum(const Config *c, int t)
{
    double span = c->momentum_high - c->momentum_low;
    int cooldown_start = config_total_steps(c) - c->momentum_cooldown;
    if (t < c->momentum_warmup)
        return c->momentum_low + span * t / c->momentum_warmup;
    if (t > cooldown_start)
        return c->momentum_high - span * (t - cooldown_start) / c->momentum_cooldown;
    return c->momentum_high;
}

// Adam: k updates are made with this one, and its moments began at zero. NorMuon: its shape factor, max(1,
// rows/cols)^1/2 of the stored shape, is part of the rate.
static RuleStep rule_step(const Config *c, const ParamSpec *spec, double factor, int t)
{
    const UpdateSpec *u = &spec->update;
    double k = (t + 1) / u->every, correction = sqrt(1 - pow(u->beta2, k)) / (1 - pow(u->beta1, k));
    double base = u->kind == ADAM ? c->adam_rate * factor * (k ? correction : 0) : c->muon_rate * factor;
    double shape =
        u->kind == ADAM
            ? 1
            : sqrt(fmax(1, (double)record_extent(c, spec->rows) / (double)record_extent(c, spec->cols)));
    return (RuleStep){.rate = (float)(u->rate * shape) * (float)base,
                      .decay = u->kind == ADAM ? 0 : (float)(c->muon_rate * factor * c->weight_decay)};
}

StepParams schedule_step_params(const Config *c, int t)
{
    const Record *r = config_record(c);
    double factor = schedule_lr_factor(c, t);
    Stage now = schedule_stage(c, t);
    StepParams p = {.grad_scale = (float)(1.0 / c->micro_batches),
                    .muon_momentum = (float)schedule_momentum(c, t)};
    for (int i = 0; i < now.num_targets; i++) {
        double part = (double)(t - now.begin) / (now.end - now.begin);
        p.target_weight[i] = (float)(now.target_from[i] + part * (now.target_to[i] - now.target_from[i]));
    }
    for (int i = 0; i < r->num_params; i++)
        p.rule[i] = rule_step(c, &r->params[i], factor, t);
    return p;
}

void rope_start(Rope *r, const Config *c)
{
    memset(r, 0, sizeof *r);
    r->window = schedule_window(c, 0);
    r->count = c->model_dim / c->num_heads / 4;
    r->scale = 0.1;
    for (int j = 0; j < r->count; j++)
        r->frequency[j] = (float)pow(1.0 / 1024, (double)j / (r->count - 1));
}

bool rope_follow_window(Rope *r, const Config *c, int window)
{
    double a = r->window, b = window;
    if (window == r->window)
        return false;
    for (int j = 0; j < r->count; j++) {
        double rotations = c->block_size * a * r->frequency[j] / (2 * M_PI);
        double keep = fmin(1, fmax(0, (rotations - 1) / 31));
        r->frequency[j] = (float)(r->frequency[j] * (a / b + keep * (1 - a / b)));
    }
    r->scale *= 1 + 0.2 * log(b / a);
    r->window = window;
    return true;
}
