// Schedules against tables worked out by hand from the definitions, and against the twin's
// (dev/reference/golden).
#include "dev/test/golden_file.h"
#include "dev/test/tap.h"
#include "llmc/records/schedule_2026.h"
#include "llmc/optim/schedule.h"

static Config preset(const char *name, const char *scheduled, const char *extension)
{
    Config c;
    Error e;
    const char *argv[] = {"test",    "--preset",        name,     "--num-scheduled",
                          scheduled, "--num-extension", extension};
    if (!config_parse(&c, 7, (char **)argv, &e))
        fatal(1, "%s", e.text);
    return c;
}

static int rule_of(const Config *c, Role role)
{
    int row = 0;
    while (config_record(c)->params[row].role != role)
        row++;
    return row;
}

static void check_by_hand(void)
{
    Config c = preset("2025-10-27", "2245", "40");
    // u < 0.5 up to step 1122; at t: w = 2 (1 - t/2245), factor = 0.1 + 0.9 w; u stops at 0.9999.
    struct {
        int t;
        double factor;
    } rates[] = {{0, 1},
                 {1122, 1},
                 {1123, 0.99959910913},
                 {2000, 0.1 + 1.8 * 245 / 2245},
                 {2244, 0.1 + 1.8 / 2245},
                 {2245, 0.10018},
                 {2284, 0.10018}};
    for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
        ok(fabs(schedule_lr_factor(&c, rates[i].t) - rates[i].factor) < 1e-9, "rate factor at %d: %.8f",
           rates[i].t, schedule_lr_factor(&c, rates[i].t));
    struct {
        int t;
        double mu;
    } momenta[] = {{0, 0.85},    {150, 0.9},    {299, 0.85 + 0.1 * 299 / 300}, {300, 0.95},
                   {2235, 0.95}, {2236, 0.948}, {2284, 0.95 - 0.098}};
    for (size_t i = 0; i < sizeof momenta / sizeof *momenta; i++)
        ok(fabs(schedule_momentum(&c, momenta[i].t) - momenta[i].mu) < 1e-12, "momentum at %d", momenta[i].t);
    // floor(3 t / 2245): the second window from 749 on (3*748 = 2244), the third from 1497 on (3*1496 = 4488
    // < 4490).
    struct {
        int t, window;
    } windows[] = {{0, 3}, {748, 3}, {749, 7}, {1496, 7}, {1497, 11}, {2244, 11}, {2245, 13}, {2284, 13}};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        ok(schedule_window(&c, windows[i].t) == windows[i].window, "window at %d is %d", windows[i].t,
           windows[i].window);
    ok(window_tokens(&c, schedule_stage(&c, 2245).window_short) == 768 && window_tokens(&c, 20) == 2560,
       "windows in tokens");
    Config small = preset("2025-10-27", "279", "10");
    ok(schedule_momentum(&small, 288) == 0.85 + 0.1 * 288 / 300,
       "a run of 289 steps never reaches the momentum cooldown");
    StepParams p = schedule_step_params(&c, 1), later = schedule_step_params(&c, 7);
    RuleStep head = p.rule[rule_of(&c, ROLE_HEAD)], embed = p.rule[rule_of(&c, ROLE_EMBED)],
             up = p.rule[rule_of(&c, ROLE_MLP_UP)];
    ok(fabs(head.rate - 0.008 * sqrt(1 - 0.95) / (1 - 0.65)) < 1e-8,
       "Adam's first step, bias correction with k = 1");
    double fourth = 0.008 * sqrt(1 - pow(0.95, 4)) / (1 - pow(0.65, 4));
    ok(fabs(later.rule[rule_of(&c, ROLE_HEAD)].rate - fourth) < 1e-8, "step 7 is its fourth");
    ok(fabs(embed.rate / head.rate - 75) < 1e-5 && fabs(up.rate - 0.06) < 1e-8,
       "every row has its own factor");
    ok(up.decay == 0 && p.grad_scale == 0.125f, "no decay; gradient factor 1/8");
    Config decaying = preset("2025-11-10", "2205", "40");
    p = schedule_step_params(&decaying, 1);
    ok(fabs(p.rule[rule_of(&c, ROLE_MLP_UP)].decay - 0.036) < 1e-8 &&
           p.rule[rule_of(&c, ROLE_HEAD)].decay == 0,
       "weight decay is NorMuon's, without the factor of the row");
}

// The schedule of the record of August 2026, 1250 + 40 steps, from its published numbers.
static void check_stages(void)
{
    Config c;
    Error e;
    const char *argv[] = {"test",
                          "--num-scheduled",
                          "1250",
                          "--num-extension",
                          "40",
                          "--stage-starts",
                          "nearest",
                          "--stage-tokens",
                          "16384,32768,49152",
                          "--stage-rates",
                          "1,1.52,1.73,1",
                          "--cooldown",
                          "0.6",
                          "--rate-floor",
                          "0.15",
                          "--stage-documents",
                          "2048,1024,896,512"};
    bool good = config_parse(&c, sizeof argv / sizeof *argv, (char **)argv, &e);
    struct {
        int t, stage, tokens, document;
        double factor;
    } rows[] = {{0, 0, 16384, 2048, 1},          {416, 0, 16384, 2048, 1},
                {417, 1, 32768, 1024, 1.52},     {500, 1, 32768, 1024, 1.52},
                {600, 1, 32768, 1024, 1.337333}, {832, 1, 32768, 1024, 0.913547},
                {833, 2, 49152, 896, 1.028480},  {1000, 2, 49152, 896, 0.676667},
                {1249, 2, 49152, 896, 0.152107}, {1250, 3, 49152, 512, 0.15},
                {1289, 3, 49152, 512, 0.15}};
    ok(good, "stages of several sizes and rates");
    for (size_t i = 0; good && i < sizeof rows / sizeof *rows; i++) {
        Stage s = schedule_stage(&c, rows[i].t);
        ok(s.index == rows[i].stage && s.micro_batch_tokens == rows[i].tokens &&
               s.max_document == rows[i].document &&
               fabs(schedule_lr_factor(&c, rows[i].t) - rows[i].factor) < 2e-4,
           "step %d: stage %d, %d tokens, documents cut at %d, rate factor %.6f", rows[i].t, s.index,
           s.micro_batch_tokens, s.max_document, schedule_lr_factor(&c, rows[i].t));
    }
    ok(schedule_stage(&c, 0).end == 417 && schedule_stage(&c, 417).end == 833 &&
           schedule_stage(&c, 900).end == 1250 && schedule_stage(&c, 1260).end == 1290,
       "stages end at 417, 833, 1250 and 1290");
    ok(schedule_most_tokens(&c) == 49152 && schedule_sizes_differ(&c),
       "the largest micro-batch has 49152 tokens");
    ok(schedule_longest_reach(&c) == 128 * 11,
       "the longest reach: a window, or two rows a token of a document");
    int smaller[3] = {0};
    schedule_smaller_launches(&c, smaller, 3);
    ok(smaller[0] == 16384 && smaller[1] == 32768 && !smaller[2], "the smaller ones %d and %d", smaller[0],
       smaller[1]);
    c.stage_starts = STARTS_UP;
    ok(schedule_stage(&c, 833).index == 1 && schedule_stage(&c, 834).index == 2,
       "rounded up, the third begins a step later");
    char *half = schedule_divided(&c, 2), *none_such = schedule_divided(&c, 2048);
    ok(!strcmp(half, "--micro-batches 16 --micro-batch-tokens 16384 --stage-tokens 8192,16384,24576"),
       "halves of micro-batches: %s", half);
    ok(!none_such, "no size has parts of less than 16 tokens");
    free(half);
    Config plain = preset("2025-10-27", "2245", "40");
    char *quarter = schedule_divided(&plain, 4);
    ok(!strcmp(quarter, "--micro-batches 32 --micro-batch-tokens 8192"), "quarters without stages: %s",
       quarter);
    free(quarter);
    ok(!schedule_sizes_differ(&plain) && schedule_most_tokens(&plain) == 32768,
       "the first preset has one size");
    int none[2] = {0};
    schedule_smaller_launches(&plain, none, 2);
    ok(!none[0], "and none that is smaller");
}

// Weights of the loss of the record of July 2026: 423 and 847 are where its second and third stage begin.
static void check_targets(void)
{
    Config c;
    Error e;
    const char *argv[] = {"test",
                          "--num-scheduled",
                          "1270",
                          "--num-extension",
                          "15",
                          "--stage-starts",
                          "nearest",
                          "--stage-targets",
                          "1:0.5:0.25-0,1:0.5-0,1"};
    bool good = config_parse(&c, sizeof argv / sizeof *argv, (char **)argv, &e);
    struct {
        int t, targets;
        double weight[MAX_TARGETS];
    } rows[] = {{0, 3, {1, 0.5, 0.25}}, {100, 3, {1, 0.5, 0.25 * 323 / 423}}, {422, 3, {1, 0.5, 0.25 / 423}},
                {423, 2, {1, 0.5, 0}},  {500, 2, {1, 0.5 * 347 / 424, 0}},    {847, 1, {1, 0, 0}},
                {1284, 1, {1, 0, 0}}};
    ok(good, "targets by stage");
    for (size_t i = 0; good && i < sizeof rows / sizeof *rows; i++) {
        StepParams p = schedule_step_params(&c, rows[i].t);
        bool same = schedule_stage(&c, rows[i].t).targets.count == rows[i].targets;
        for (int k = 0; k < MAX_TARGETS; k++)
            same = same && fabs((double)p.target_weight[k] - rows[i].weight[k]) < 1e-7;
        ok(same, "step %d: %d targets with weights %g, %g, %g", rows[i].t, rows[i].targets,
           (double)p.target_weight[0], (double)p.target_weight[1], (double)p.target_weight[2]);
    }
    Config plain = preset("2025-10-27", "2245", "40");
    ok(schedule_stage(&plain, 2284).targets.count == 1 &&
           schedule_step_params(&plain, 0).target_weight[0] == 1.0f,
       "the first preset has one target");
}

// name: the number of steps
static void check_against_twin(const char *name, const char *of, const char *scheduled, const char *extension)
{
    SafeTensors *st = open_golden("schedules");
    Config c = preset(of, scheduled, extension);
    int64_t T;
    float *lr = golden_values(st, "lr.", name, &T), *momentum = golden_values(st, "momentum.", name, NULL);
    int32_t *ws_long = (int32_t *)golden_values(st, "ws_long.", name, NULL),
            *ws_short = (int32_t *)golden_values(st, "ws_short.", name, NULL);
    double worst = 0;
    bool windows = T == config_total_steps(&c);
    for (int t = 0; t < T; t++) {
        worst = fmax(worst, fmax(fabs(schedule_lr_factor(&c, t) - lr[t]),
                                 fabs(schedule_momentum(&c, t) - momentum[t])));
        windows = windows && schedule_window(&c, t) == ws_long[t] &&
                  schedule_stage(&c, t).window_short == ws_short[t];
    }
    ok(windows, "run %s: windows of all steps as the twin has them", name);
    ok(worst < 1e-7, "run %s: rates and momenta as the twin has them (%.1e)", name, worst);
    free(lr);
    free(momentum);
    free(ws_long);
    free(ws_short);
    safetensors_close(st);
}

static void check_yarn(void)
{
    SafeTensors *st = open_golden("schedules");
    Config c = preset("2025-10-27", "2245", "40");
    Rope r;
    float *frequencies = read_golden(st, "frequencies", NULL), *scale = read_golden(st, "scale", NULL);
    int32_t *ws = read_golden(st, "ws", NULL);
    double worst = 0, worst_scale = 0;
    rope_start(&r, &c);
    ok(r.count == 32 && r.frequency[0] == 1 && fabs(r.frequency[31] * 1024 - 1) < 1e-6,
       "first frequencies run from 1 to 1/1024");
    for (int i = 0; i < 4; i++) { // 3, 7, 11, 13; the last validation's 20 is no YaRN step
        bool changed = rope_follow_window(&r, &c, ws[i]);
        ok(changed == (i > 0), "window %d %s", ws[i], i ? "moves the frequencies" : "is the first");
        for (int j = 0; j < 32; j++)
            worst = larger_error(worst, fabs(r.frequency[j] / frequencies[64 * i + j] - 1));
        worst_scale = larger_error(worst_scale, fabs(r.scale - scale[i]));
    }
    // Each of the three moves rounds to fp32 once: 3 * 2^-24, and the table is fp32 too.
    ok(worst < 3e-7, "frequencies after each move (%.1e)", worst);
    ok(worst_scale < 1e-7, "attention scale after each move (%.1e)", worst_scale);
    ok(!rope_follow_window(&r, &c, 13), "the same window changes nothing");
    free(frequencies);
    free(scale);
    free(ws);
    safetensors_close(st);
}

// ---- the records of 2026 ----------------------------------------------------------------------------------

// The schedule alone, on another network.
static Config schedule_of_2026(const int32_t *begins, int64_t total)
{
    static const Field fields[] = {SCHEDULE_2026, {NULL, NULL}};
    const Record r = {.name = "schedule",
                      .based_on = record_find("2025-11-18"),
                      .fields = fields,
                      .stages = stages_2026,
                      .num_stages = STAGES_2026};
    Config c = preset("2025-11-18", "1", "1");
    Error e;
    if (!config_apply_record(&c, &r, &e) || !schedule_check(&c, &e))
        fatal(1, "%s", e.text);
    c.num_scheduled = begins[3];
    c.num_extension = (int)total - begins[3];
    return c;
}

static bool same_stage(const Stage *s, const Config *c, const int32_t *row)
{
    return s->micro_batch_tokens == row[0] && s->max_document == row[1] &&
           window_tokens(c, s->window_short) == row[2] && window_tokens(c, s->window) == row[3];
}

static void check_2026_frequencies(const SafeTensors *st, const Config *c, const char *total)
{
    Rope r;
    bool same = true;
    rope_start(&r, c);
    for (int k = 0; k < STAGES_2026; k++) {
        char *name = format_string("frequencies.%s.%d", total, k);
        float *frequency = read_golden(st, name, NULL);
        if (k)
            rope_follow_window(&r, c, stages_2026[k].window);
        for (int j = 0; j < r.count; j++)
            same = same && r.frequency[j] == frequency[j];
        free(frequency);
        free(name);
    }
    ok(same && r.count == 32, "run %s: all frequencies in bits", total);
}

static void check_2026(const char *total)
{
    static const int num_targets[STAGES_2026] = {3, 2, 1, 1};
    SafeTensors *st = open_golden("2026-schedules");
    int64_t T;
    float *rate = golden_values(st, "rate.", total, &T),
          *momentum = golden_values(st, "momentum.", total, NULL),
          *prefix = golden_values(st, "prefix.", total, NULL),
          *scale = golden_values(st, "scale.", total, NULL),
          *targets = golden_values(st, "targets.", total, NULL);
    int32_t *row = (int32_t *)golden_values(st, "stage.", total, NULL),
            *begins = (int32_t *)golden_values(st, "begins.", total, NULL),
            *last_tied = (int32_t *)golden_values(st, "last_tied.", total, NULL);
    Config c = schedule_of_2026(begins, T);
    Rope r;
    double worst = 0, worst_weight = 0, worst_scale = 0;
    bool stages = config_total_steps(&c) == T, terms = true;
    rope_start(&r, &c);
    for (int t = 0; t < T; t++) {
        Stage s = schedule_stage(&c, t);
        StepParams p = schedule_step_params(&c, t);
        stages = stages && same_stage(&s, &c, row + 4 * t) && t >= begins[s.index] &&
                 (s.index == 3 || t < begins[s.index + 1]);
        terms = terms && schedule_has_prefix(&s) == (s.index < 2) && s.targets.count == num_targets[s.index];
        worst = larger_error(worst, fmax(fabs(schedule_lr_factor(&c, t) - rate[t]),
                                         fabs(schedule_momentum(&c, t) - momentum[t])));
        for (int k = 0; k < MAX_TARGETS; k++)
            worst_weight = larger_error(worst_weight, fabsf(p.target_weight[k] - targets[3 * t + k]));
        worst_weight = larger_error(worst_weight, fabsf(p.prefix_weight - prefix[t]));
        rope_follow_window(&r, &c, s.window);
        worst_scale = larger_error(worst_scale, fabs(r.scale - scale[t]));
    }
    ok(stages && terms, "run %s: sizes, windows and terms of the loss of all %d steps", total, (int)T);
    // The file's numbers are rounded to fp32: 2^-24 of at most 1.73.
    ok(worst < 1.1e-7, "run %s: rates and momenta (%.1e)", total, worst);
    ok(worst_weight < 6e-8, "run %s: weights of the loss (%.1e)", total, worst_weight);
    ok(worst_scale < 1e-8, "run %s: attention scale (%.1e)", total, worst_scale);
    ok(schedule_first_update(&c, 2, 2) == *last_tied, "run %s: the tied head parts after step %d", total,
       *last_tied);
    check_2026_frequencies(st, &c, total);
    free(rate);
    free(momentum);
    free(prefix);
    free(scale);
    free(targets);
    free(row);
    free(begins);
    free(last_tied);
    safetensors_close(st);
}

// The preset of November 2025 whose steps grow: rates rise behind 0.33 and 0.66 of the scheduled steps, sizes
// at thirds of them.
static void check_growing(void)
{
    static const struct {
        int t, tokens;
        double factor;
    } rows[] = {{699, 16384, 1},
                {700, 16384, 1.51},
                {707, 32768, 1.51},
                {954, 32768, 1.51},
                {955, 32768, 1.51 - 1.41 / 1166},
                {1399, 32768, 0.1 + 1.41 * 721 / 1166},
                {1400, 32768, 0.1 + 1.83 * 720 / 1166},
                {1413, 32768, 0.1 + 1.83 * 707 / 1166},
                {1414, 49152, 0.1 + 1.83 * 706 / 1166},
                {2119, 49152, 0.1 + 1.83 / 1166},
                {2120, 49152, 0.1},
                {2159, 49152, 0.1}};
    Config c = preset("2025-11-29", "2120", "40"), short_run = preset("2025-11-29", "53", "4");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        ok(schedule_stage(&c, rows[i].t).micro_batch_tokens == rows[i].tokens &&
               fabs(schedule_lr_factor(&c, rows[i].t) - rows[i].factor) < 1e-9,
           "2025-11-29, step %d: %d tokens, rate factor %.6f", rows[i].t,
           schedule_stage(&c, rows[i].t).micro_batch_tokens, schedule_lr_factor(&c, rows[i].t));
    // 35 / 53 is above 0.66 and below 2 / 3.
    ok(schedule_stage(&short_run, 35).index == 1 && schedule_stage(&short_run, 36).index == 2 &&
           schedule_stage(&short_run, 36).rate_begin == 35,
       "of 53 steps the third rate begins at 35, the third stage at 36");
    Error e;
    ok(!config_set(&c, "rate-starts", "0,0.5", &e) || !schedule_check(&c, &e),
       "two shares for three stages: %s", e.text);
    ok(!config_set(&c, "rate-starts", "0,0.5,1.5", &e) || !schedule_check(&c, &e), "a share above 1: %s",
       e.text);
}

// From the tables of the description, by hand.
static void check_2026_by_hand(void)
{
    static const struct {
        int t;
        double factor;
    } rows[] = {{422, 1},         {423, 1.52},     {508, 1.52},      {600, 1.354593},
                {846, 0.912310},  {847, 1.027087}, {1000, 0.709843}, {1200, 0.295144},
                {1269, 0.152073}, {1270, 0.15},    {1284, 0.15}};
    Config c = schedule_of_2026((int32_t[]){0, 423, 847, 1270}, 1285);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        ok(fabs(schedule_lr_factor(&c, rows[i].t) - rows[i].factor) < 5e-7, "rate factor at %d: %.6f",
           rows[i].t, schedule_lr_factor(&c, rows[i].t));
    ok(schedule_needs_prefix(&c), "it has a prefix term");
    Config plain = preset("2025-11-18", "2185", "40");
    ok(!schedule_needs_prefix(&plain) && schedule_step_params(&plain, 0).prefix_weight == 0,
       "a preset of 2025 has none");
    double tokens = 0;
    for (int t = 0; t < 1285; t++)
        tokens += 8.0 * schedule_stage(&c, t).micro_batch_tokens;
    ok(tokens == 338821120, "%.0f tokens in all", tokens);
}

static double tokens_of_run(const Config *c)
{
    double tokens = 0;
    for (int t = 0; t < config_total_steps(c); t++)
        tokens += c->micro_batches * schedule_stage(c, t).micro_batch_tokens;
    return tokens;
}

// Sums by stage, and by step as they were made before, at the begin, the end, and around the stages.
static void check_sums(const char *name)
{
    Config c = preset(name, "157", "11");
    int total = config_total_steps(&c);
    double left = 0;
    bool tokens = schedule_tokens_left(&c, total) == 0, ropes = true;
    Rope by_step, by_stage;
    for (int t = total - 1; t >= 0; t--) {
        left += (double)c.micro_batches * schedule_stage(&c, t).micro_batch_tokens;
        tokens = tokens && schedule_tokens_left(&c, t) == left;
    }
    rope_start(&by_step, &c);
    for (int t = 0; t <= total; t++) {
        rope_follow_steps(&by_stage, &c, t);
        ropes = ropes && !memcmp(&by_step, &by_stage, sizeof by_step);
        rope_follow_window(&by_step, &c, schedule_window(&c, t));
    }
    ok(tokens && ropes, "%s: tokens left and rope by stage are those by step, of all %d steps", name, total);
}

static void check_all_sums(void)
{
    for (int i = 0; records[i]; i++)
        check_sums(records[i]->name);
    Config c = preset("2026-08-06", "900000000", "1000");
    double began = seconds_now();
    Rope r;
    rope_follow_steps(&r, &c, 900000500);
    ok(schedule_tokens_left(&c, 7) > 1e14 && r.window == schedule_window(&c, 900000500) &&
           seconds_now() - began < 5,
       "of 900 million steps, too, at once");
}

// The presets of August 2026, from the tables of their description: 96 channels of q and k have 24
// frequencies and a scale that is larger by the root of 128 / 96.
static void check_august(void)
{
    static const double scales[] = {0.1154701, 0.1350376, 0.1472446, 0.1521641},
                        frequencies[] = {1, 0.739805, 0.547312, 0.404904};
    Config first, c;
    Error e;
    if (!config_parse(&first, 3, (char *[]){"test", "--preset", "2026-08-03"}, &e) ||
        !config_parse(&c, 3, (char *[]){"test", "--preset", "2026-08-06"}, &e))
        fatal(1, "%s", e.text);
    ok(config_total_steps(&first) == 1315 && tokens_of_run(&first) == 350617600,
       "2026-08-03: 1315 steps, %.0f tokens", tokens_of_run(&first));
    ok(config_total_steps(&c) == 1290 && tokens_of_run(&c) == 343408640,
       "2026-08-06: 1290 steps, %.0f tokens", tokens_of_run(&c));
    Rope r;
    rope_start(&r, &c);
    bool good = r.count == 24;
    for (int j = 0; j < 4; j++)
        good = good && fabs(r.frequency[j] - frequencies[j]) < 1e-6;
    ok(good && fabs(r.frequency[23] - 1.0 / 1024) < 1e-9, "rope has 24 frequencies, from 1 to 1 / 1024");
    for (int k = 0; k < STAGES_2026; k++) {
        rope_follow_window(&r, &c, stages_2026[k].window);
        ok(fabs(r.scale - scales[k]) < 1e-7, "stage %d: attention scale %.7f", k, r.scale);
    }
}

// The preset of May 2026: the stages of July without the prefix term, over 1275 steps.
static void check_may(void)
{
    Config c = preset("2026-05-27", "1275", "15");
    const int begins[] = {0, 425, 850, 1275};
    bool good = !schedule_needs_prefix(&c) && tokens_of_run(&c) == 340131840;
    for (int k = 0; k < STAGES_2026; k++) {
        Stage s = schedule_stage(&c, begins[k]);
        good = good && s.begin == begins[k] && s.window == stages_2026[k].window &&
               s.window_short == stages_2026[k].window_short && s.rate == stages_2026[k].rate &&
               s.max_document == stages_2026[k].max_document && s.targets.count == (k < 2 ? 3 - k : 1);
    }
    ok(good, "2026-05-27: 1290 steps, %.0f tokens, stages at 425, 850 and 1275, no prefix",
       tokens_of_run(&c));
    ok(schedule_first_update(&c, 2, 2) == 851, "its tied head parts after step 851");
}

int main(void)
{
    PART(check_by_hand());
    PART(check_stages());
    PART(check_targets());
    PART(check_against_twin("2285", "2025-10-27", "2245", "40"));
    PART(check_against_twin("289", "2025-10-27", "279", "10"));
    PART(check_against_twin("8", "2025-10-27", "6", "2"));
    PART(check_against_twin("2160", "2025-11-29", "2120", "40"));
    PART(check_growing());
    PART(check_yarn());
    PART(check_2026_by_hand());
    PART(check_2026("1285"));
    PART(check_2026("1315"));
    PART(check_2026("1290"));
    PART(check_2026("152"));
    PART(check_may());
    PART(check_august());
    PART(check_all_sums());
    return tap_done();
}
