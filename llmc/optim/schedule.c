#include "llmc/optim/schedule.h"
#include "llmc/records/record.h"
#include <ctype.h>
#include <limits.h>
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

// Weights like "1:0.5:0.25-0": a term each, constant or from the one value to the other. The end of what was
// parsed; NULL when it is none.
static const char *parse_weights(const char *text, StageWeights *w)
{
    w->count = 0;
    for (;; text++) {
        double value[2];
        for (int i = 0; i < 2; i++) {
            char *end;
            if (w->count == MAX_TARGETS || !(isdigit((unsigned char)*text) || *text == '.'))
                return NULL;
            value[i] = value[1] = strtod(text, &end);
            text = end;
            if (i || *text != '-')
                break;
            text++;
        }
        w->from[w->count] = value[0];
        w->to[w->count++] = value[1];
        if (*text != ':')
            return text;
    }
}

// Those of stage k in a list; beyond its end the last ones, of an empty list `standard`. Returns the number
// of entries; below 0 when it is no list.
static int stage_weights(const char *list, int k, const char *standard, StageWeights *w)
{
    StageWeights entry = {0};
    int n = 0;
    for (const char *text = *list ? list : standard;; text++) {
        text = parse_weights(text, &entry);
        if (!text || (*text && *text != ','))
            return -1;
        if (n++ <= k)
            *w = entry;
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

// The first step at which the rate of stage k holds.
static int rate_start(const Config *c, int k, int count)
{
    double share = list_entry(c->rate_starts, k, 0);
    int t = (int)floor(share * c->num_scheduled);
    if (!(share > 0))
        return stage_start(c, k, count);
    while ((double)t / c->num_scheduled <= share)
        t++;
    return t;
}

static Stage stage(const Config *c, int k, int count) // stage `count` is the extension
{
    int window = k == count ? c->window_extension : (int)list_entry(c->window_schedule, k, 0);
    Stage s = {.index = k,
               .begin = k < count ? stage_start(c, k, count) : c->num_scheduled,
               .end = k < count ? stage_start(c, k + 1, count) : config_total_steps(c),
               .micro_batch_tokens = (int)list_entry(c->stage_tokens, k, c->micro_batch_tokens),
               .max_document = (int)list_entry(c->stage_documents, k, c->max_document),
               .window = window,
               .window_short = (int)list_entry(c->window_short, k, window / 2),
               .rate = list_entry(c->stage_rates, k, 1),
               .rate_begin = k < count ? rate_start(c, k, count) : c->num_scheduled};
    stage_weights(c->stage_targets, k, "1", &s.targets);
    stage_weights(c->stage_prefix, k, "0", &s.prefix);
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

int schedule_longest_reach(const Config *c)
{
    int64_t most = 0;
    for (int k = 0, count = count_stages(c); k <= count; k++) {
        Stage s = stage(c, k, count);
        int window = window_tokens(c, (int)max_i64(s.window, s.window_short));
        most = max_i64(most, min_i64(window, 2 * (int64_t)s.max_document));
    }
    return (int)most;
}

char *schedule_divided(const Config *c, int divisor)
{
    double tokens[MAX_WINDOWS + 1];
    int count = *c->stage_tokens ? parse_list(c->stage_tokens, tokens) : 0;
    bool whole = c->micro_batch_tokens % (16 * divisor) == 0;
    for (int k = 0; k < count; k++)
        whole = whole && (int)tokens[k] % (16 * divisor) == 0;
    if (!whole)
        return NULL;
    char *text = format_string("--micro-batches %d --micro-batch-tokens %d", c->micro_batches * divisor,
                               c->micro_batch_tokens / divisor);
    for (int k = 0; k < count; k++) {
        char *longer = format_string("%s%s%d", text, k ? "," : " --stage-tokens ", (int)tokens[k] / divisor);
        free(text);
        text = longer;
    }
    return text;
}

int schedule_launch_tokens(const Config *c, int N)
{
    return c->launch_tokens ? (int)min_i64(N, c->launch_tokens) : N;
}

int schedule_most_launch_tokens(const Config *c)
{
    return schedule_launch_tokens(c, schedule_most_tokens(c));
}

void schedule_smaller_launches(const Config *c, int *tokens, int room)
{
    int count = count_stages(c), most = schedule_most_launch_tokens(c), found = 0;
    for (int k = 0; k <= count && found < room; k++) {
        int size = schedule_launch_tokens(c, stage(c, k, count).micro_batch_tokens), i = 0;
        while (i < found && tokens[i] != size)
            i++;
        if (i == found && size < most)
            tokens[found++] = size;
    }
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

bool schedule_has_prefix(const Stage *s) { return s->prefix.from[0] > 0 || s->prefix.to[0] > 0; }

bool schedule_needs_prefix(const Config *c)
{
    int count = count_stages(c);
    bool needs = false;
    for (int k = 0; k <= count; k++) {
        Stage s = stage(c, k, count);
        needs = needs || schedule_has_prefix(&s);
    }
    return needs;
}

static bool check_count(const char *option, const char *list, int n, int count, Error *e)
{
    if (!n || n == count || n == count + 1)
        return true;
    return error_set(e,
                     "--%s: '%s' has %d entries; the %d stages of --window-schedule need %d, or one more for "
                     "the extension",
                     option, list, n, count, count);
}

static bool check_list(const char *option, const char *list, int count, double low, double high, int multiple,
                       Error *e)
{
    double numbers[MAX_WINDOWS + 1];
    int n = parse_list(list, numbers);
    if (n < 0)
        return error_set(e, "--%s: '%s' is not a list of numbers, like 3,7,11", option, list);
    if (!check_count(option, list, n, count, e))
        return false;
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

static bool check_weights(const char *option, const char *list, int count, const char *like, Error *e)
{
    StageWeights w;
    int n = stage_weights(list, 0, "1", &w);
    if (n < 0)
        return error_set(e,
                         "--%s: '%s' is not a list of weights by stage, of at most %d targets each, like %s",
                         option, list, MAX_TARGETS, like);
    if (!check_count(option, list, n, count, e))
        return false;
    for (int k = 0; k < n; k++) {
        stage_weights(list, k, "1", &w);
        for (int i = 0; i < w.count; i++) {
            if (w.from[i] > 1000 || w.to[i] > 1000)
                return error_set(e, "--%s: weights are 0 to 1000: '%s'", option, list);
        }
    }
    return true;
}

static bool check_targets(const Config *c, int count, Error *e)
{
    if (!check_weights("stage-targets", c->stage_targets, count, "1:0.5:0.25-0,1:0.5-0,1", e) ||
        !check_weights("stage-prefix", c->stage_prefix, count, "0.25,0.25-0,0", e))
        return false;
    for (int k = 0; k <= count; k++) {
        Stage s = stage(c, k, count);
        if (!(s.targets.from[0] > 0 && s.targets.to[0] > 0))
            return error_set(e, "--stage-targets: the next token's weight must be above 0: '%s'",
                             c->stage_targets);
        if (s.prefix.count > 1)
            return error_set(e, "--stage-prefix: a stage has one weight, not several: '%s'", c->stage_prefix);
    }
    return true;
}

bool schedule_check(const Config *c, Error *e)
{
    int count = count_stages(c);
    double most = fmin(1 << 24, (double)(MAX_STEP_TOKENS / c->micro_batches));
    return check_list("window-short", c->window_short, count, 1, INT_MAX / c->block_size, 1, e) &&
           check_list("stage-tokens", c->stage_tokens, count, 16, most, 16, e) &&
           check_list("stage-documents", c->stage_documents, count, 2, 1 << 24, 1, e) &&
           check_list("stage-rates", c->stage_rates, count, 0, 1000, 0, e) &&
           check_list("rate-starts", c->rate_starts, count, 0, 1, 0, e) && check_targets(c, count, e);
}

// As in --stage-targets, behind a name; empty where all is as without the option.
static void describe_weights(const char *name, const StageWeights *w, double standard, char *text,
                             size_t size)
{
    size_t n = 0;
    *text = 0;
    if (w->count == 1 && w->from[0] == standard && w->to[0] == standard)
        return;
    for (int k = 0; k < w->count && n < size; k++) {
        n += (size_t)snprintf(text + n, size - n, "%s%s%g", k ? ":" : ", ", k ? "" : name, w->from[k]);
        if (w->to[k] != w->from[k] && n < size)
            n += (size_t)snprintf(text + n, size - n, "-%g", w->to[k]);
    }
}

char *schedule_describe(const Config *c)
{
    int count = count_stages(c);
    char *text = xstrdup("");
    for (int k = 0; k <= count; k++) {
        Stage s = stage(c, k, count);
        char targets[128], prefix[64], from[32] = "";
        describe_weights("targets ", &s.targets, 1, targets, sizeof targets);
        describe_weights("prefix ", &s.prefix, 0, prefix, sizeof prefix);
        if (s.rate_begin != s.begin)
            snprintf(from, sizeof from, " from step %d", s.rate_begin);
        char *longer = format_string(
            "%s%sfrom step %d: %d x %d tokens, documents cut at %d, windows %d and %d, rate %g%s%s%s", text,
            k ? "; " : "", s.begin, c->micro_batches, s.micro_batch_tokens, s.max_document,
            window_tokens(c, s.window_short), window_tokens(c, s.window), s.rate, from, targets, prefix);
        free(text);
        text = longer;
    }
    return text;
}

int schedule_window(const Config *c, int t) { return schedule_stage(c, t).window; }

double schedule_tokens_left(const Config *c, int t)
{
    double tokens = 0;
    for (int total = config_total_steps(c); t < total;) {
        Stage s = schedule_stage(c, t);
        tokens += (double)(s.end - t) * c->micro_batches * s.micro_batch_tokens;
        t = s.end;
    }
    return tokens;
}

int schedule_first_update(const Config *c, int k, int every)
{
    int begin = stage(c, k, count_stages(c)).begin;
    return (int)round_up(begin + 1, every) - 1;
}

// ---- rates ------------------------------------------------------------------------------------------------

// What is left of the fall at step t: 1 before it, 0 at the floor.
static double cooldown_left(const Config *c, int t)
{
    double end = c->cooldown_start == COOLDOWN_TO_FLOOR ? 1 : 0.9999;
    double share = fmin(end, (double)t / c->num_scheduled), flat = 1 - c->cooldown;
    int start = (int)floor(flat * c->num_scheduled);
    if (c->cooldown_start == COOLDOWN_FROM_STEP)
        return 1 - fmax(0, fmin(1, (double)(t - start) / (c->num_scheduled - start)));
    return share < flat ? 1 : (1 - share) / c->cooldown;
}

// Of the last stage whose rate holds at step t.
static double peak_rate(const Config *c, int t)
{
    int count = count_stages(c), k = count;
    while (k > 0 && t < stage(c, k, count).rate_begin)
        k--;
    return stage(c, k, count).rate;
}

double schedule_lr_factor(const Config *c, int t)
{
    double left = cooldown_left(c, t), peak = peak_rate(c, t);
    return peak * left + c->rate_floor * (1 - left);
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
// rows/cols)^1/2 of the shape in files, is part of the rate.
static RuleStep rule_step(const Config *c, const ParamSpec *spec, double factor, int t)
{
    const UpdateSpec *u = &spec->update;
    if (u->kind == FIXED)
        return (RuleStep){0};
    if (u->kind == NORMUON) {
        int64_t rows, cols;
        record_file_matrix(c, spec, &rows, &cols);
        double base = c->muon_rate * factor, shape = sqrt(fmax(1, (double)rows / (double)cols));
        return (RuleStep){.rate = (float)(u->rate * shape) * (float)base,
                          .decay = (float)(base * c->weight_decay)};
    }
    double k = (t + 1) / u->every, correction = sqrt(1 - pow(u->beta2, k)) / (1 - pow(u->beta1, k));
    double base = c->adam_rate * factor;
    return (RuleStep){.rate = (float)u->rate * (float)(base * (k ? correction : 0)),
                      .decay = (float)(pow(base * u->rate, 2) * c->adam_decay * u->decay)};
}

static float weight_at(const Stage *s, const StageWeights *w, int term, int t)
{
    double part = (double)(t - s->begin) / (s->end - s->begin);
    return (float)(w->from[term] + part * (w->to[term] - w->from[term]));
}

StepParams schedule_step_params(const Config *c, int t)
{
    const Record *r = config_record(c);
    double factor = schedule_lr_factor(c, t);
    Stage now = schedule_stage(c, t);
    StepParams p = {.grad_scale = (float)(1.0 / c->micro_batches),
                    .muon_momentum = (float)schedule_momentum(c, t)};
    for (int i = 0; i < now.targets.count; i++)
        p.target_weight[i] = weight_at(&now, &now.targets, i, t);
    p.prefix_weight = weight_at(&now, &now.prefix, 0, t);
    p.exact_scales = t <= r->mlp_scales.exact_until;
    for (int i = 0; i < r->num_params; i++)
        p.rule[i] = rule_step(c, &r->params[i], factor, t);
    return p;
}

// ---- rope -------------------------------------------------------------------------------------------------

// Number j of n from 0 to 1 in fp32, counted from the nearer end.
static float even_step(int j, int n)
{
    float step = 1.0f / (float)(n - 1);
    float from_end = step * (float)(n - 1 - j);
    return j < n / 2 ? step * (float)j : 1.0f - from_end;
}

void rope_start(Rope *r, const Config *c)
{
    bool fp32 = c->rope_arithmetic == ROPE_FP32;
    memset(r, 0, sizeof *r);
    r->window = schedule_window(c, 0);
    r->count = record_key_width(c) / 4;
    r->scale = 0.1 * sqrt((double)(c->model_dim / c->num_heads) / record_key_width(c));
    for (int j = 0; j < r->count; j++) {
        double exponent = fp32 ? even_step(j, r->count) : (double)j / (r->count - 1);
        r->frequency[j] = (float)pow(1.0 / 1024, exponent);
    }
}

// The frequency when the long window goes from a to b tokens.
static float yarn(float frequency, double a, double b)
{
    double rotations = a * frequency / (2 * M_PI);
    double keep = fmin(1, fmax(0, (rotations - 1) / 31));
    return (float)(frequency * (a / b + keep * (1 - a / b)));
}

static float yarn_fp32(float frequency, double a, double b)
{
    float rotations = (float)a * frequency / (float)(2 * M_PI);
    float keep = fminf(1, fmaxf(0, (rotations - 1) / 31));
    float kept = keep * (float)(1 - a / b);
    return frequency * ((float)(a / b) + kept);
}

bool rope_follow_window(Rope *r, const Config *c, int window)
{
    double a = window_tokens(c, r->window), b = window_tokens(c, window);
    if (window == r->window)
        return false;
    for (int j = 0; j < r->count; j++)
        r->frequency[j] =
            c->rope_arithmetic == ROPE_FP32 ? yarn_fp32(r->frequency[j], a, b) : yarn(r->frequency[j], a, b);
    r->scale *= 1 + 0.2 * log(b / a);
    r->window = window;
    return true;
}

void rope_follow_steps(Rope *r, const Config *c, int steps)
{
    rope_start(r, c);
    for (int t = 0; t < min_i64(steps, config_total_steps(c));) {
        Stage s = schedule_stage(c, t);
        rope_follow_window(r, c, s.window);
        t = s.end;
    }
}
