// What options can be together, and which of them a run does not look at.
#include "llmc/optim/schedule.h"
#include "llmc/records/record.h"
#include "llmc/run/config_internal.h"
#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

// A comma-separated list of long windows in blocks, each of which must fit an int in tokens.
static bool check_windows(const Config *c, Error *e)
{
    int most = INT_MAX / c->block_size, count = 0;
    if (c->window_extension > most || c->window_final > most)
        return error_set(e, "--window-extension and --window-final: at most %d blocks with --block-size %d",
                         most, c->block_size);
    for (const char *p = c->window_schedule;; p++) {
        char *end;
        long w = strtol(p, &end, 10);
        if (end == p || w < 1 || w > most || (*end && *end != ',') || ++count > MAX_WINDOWS)
            return error_set(e,
                             "--window-schedule: '%s' is not a list of at most %d numbers of blocks, like "
                             "3,7,11, each 1 to %d",
                             c->window_schedule, MAX_WINDOWS, most);
        if (!*end)
            return true;
        p = end;
    }
}

// How much of a vector a file may leave out is the record's matter.
static bool check_vector(const Config *c, Error *e)
{
    const Record *r = config_record(c);
    if (!c->save_scalars)
        return true;
    for (int i = 0; i < r->num_params; i++) {
        const ParamSpec *p = &r->params[i];
        int64_t most = record_extent(c, p->cols);
        int least = p->file.least;
        if (least && (c->save_scalars < least || c->save_scalars > most))
            return error_set(e, "--save-scalars %d: must be %d to %d", c->save_scalars, least, (int)most);
        if (least)
            return true;
    }
    return error_set(e, "--save-scalars %d: files of preset %s have no vector that may be shorter",
                     c->save_scalars, c->preset);
}

double config_stop_after(const Config *c)
{
    char *unit;
    double count = strtod(c->stop_after, &unit);
    double seconds = *unit == 's' ? count : *unit == 'm' ? 60 * count : *unit == 'h' ? 3600 * count : 0;
    if (!*c->stop_after)
        return 0;
    return isdigit((unsigned char)*c->stop_after) && seconds > 0 && seconds < 1e9 && !unit[1] ? seconds : -1;
}

static bool check_fp8(const Config *c, Error *e)
{
    const Fp8Scales *scales = &config_record(c)->fp8;
    bool both = scales->headroom != 0;
    if (c->mlp != MLP_BF16 && (c->model_dim % FP8_MULTIPLE || c->mlp_dim % FP8_MULTIPLE))
        return error_set(e, "--mlp %s: --model-dim and --mlp-dim must be multiples of %d",
                         c->mlp == MLP_FP8 ? "fp8" : "fp8-backward", FP8_MULTIPLE);
    if (c->mlp == MLP_FP8 && both && !scales->forward_too)
        return error_set(e,
                         "--mlp fp8: the scales of the network of preset %s are for both directions; use "
                         "fp8-backward or bf16",
                         c->network);
    if (c->mlp == MLP_FP8_BACKWARD && !both)
        return error_set(
            e, "--mlp fp8-backward: the network of preset %s has no scales for the backward; use fp8 or bf16",
            c->network);
    if (c->qkv == QKV_BF16)
        return true;
    if (!both || !scales->qkv_input)
        return error_set(e, "--qkv fp8: the network of preset %s has no scales for that; use bf16",
                         c->network);
    int rows = 2 * c->num_heads * record_key_width(c) + c->model_dim;
    if (c->model_dim % FP8_MULTIPLE || rows % FP8_MULTIPLE)
        return error_set(e, "--qkv fp8: --model-dim and the %d rows of q, k and v must be multiples of %d",
                         rows, FP8_MULTIPLE);
    return true;
}

// Launches are whole documents, and the token before: what else crosses documents, or gives a row several
// targets, would have to cross launches.
bool config_check_launches(const Config *c, Error *e)
{
    int total = config_total_steps(c);
    if (!c->launch_tokens)
        return true;
    if (record_has_lists(config_record(c)))
        return error_set(
            e,
            "--launch-tokens: the network of preset %s does not offer it; use a lower --micro-batch-tokens",
            c->network);
    if (c->mlp == MLP_FP8_BACKWARD)
        return error_set(e, "--launch-tokens: not with --mlp fp8-backward, whose scales follow whole "
                            "micro-batches; use a lower --micro-batch-tokens");
    if (c->launch_tokens % 16)
        return error_set(e, "--launch-tokens %d is not a multiple of 16", c->launch_tokens);
    for (int step = 0; step < total;) {
        Stage s = schedule_stage(c, step);
        bool cut = c->launch_tokens < s.micro_batch_tokens;
        if (cut && s.max_document >= c->launch_tokens)
            return error_set(e,
                             "--launch-tokens %d: documents have up to %d tokens (--max-document), and a "
                             "launch must have more",
                             c->launch_tokens, s.max_document);
        if (cut && (s.targets.count > 1 || schedule_has_prefix(&s)))
            return error_set(e, "--launch-tokens: not with several targets or a prefix term "
                                "(--stage-targets, --stage-prefix); use a lower --micro-batch-tokens");
        step = s.end;
    }
    return true;
}

static bool check_sizes(const Config *c, Error *e)
{
    int head_dim = c->model_dim / c->num_heads, heads = config_record(c)->heads;
    if (c->model_dim % c->num_heads)
        return error_set(e, "--model-dim %d is not a multiple of --num-heads %d", c->model_dim, c->num_heads);
    if (heads && c->num_heads != heads)
        return error_set(e, "--num-heads %d: the network of preset %s is for %d heads", c->num_heads,
                         c->network, heads);
    if (head_dim % 4 || head_dim < 8 || head_dim > MAX_HEAD_DIM)
        return error_set(e, "the head width %d (--model-dim / --num-heads) must be a multiple of 4, 8 to %d",
                         head_dim, MAX_HEAD_DIM);
    if (c->model_dim % 8 || c->mlp_dim % 8)
        return error_set(e, "--model-dim and --mlp-dim must be multiples of 8");
    if (c->micro_batch_tokens % 16)
        return error_set(e, "--micro-batch-tokens %d is not a multiple of 16", c->micro_batch_tokens);
    if (c->group_micro_batches && c->micro_batches % c->group_micro_batches)
        return error_set(e, "--group-micro-batches is %d; it must divide the step's %d micro-batches",
                         c->group_micro_batches, c->micro_batches);
    if ((int64_t)c->micro_batches * c->micro_batch_tokens > MAX_STEP_TOKENS)
        return error_set(
            e, "--micro-batches %d of --micro-batch-tokens %d are too many tokens for one step, at most %d",
            c->micro_batches, c->micro_batch_tokens, MAX_STEP_TOKENS);
    return true;
}

static const double LEAST_ENERGY = 0.5; // seconds of --profile-energy

static bool check_steps(const Config *c, Error *e)
{
    if (c->num_scheduled > 1000000000 - c->num_extension)
        return error_set(e, "--num-scheduled and --num-extension are too many steps");
    if (c->stop_at > config_total_steps(c))
        return error_set(e, "--stop-at %d lies behind the last step, %d", c->stop_at, config_total_steps(c));
    if (config_stop_after(c) < 0)
        return error_set(e, "--stop-after: '%s' is not a time, like 90s, 10m or 1.5h", c->stop_after);
    if (c->profile && c->profile < MIN_PROFILE)
        return error_set(e, "--profile %d: needs at least %d steps before it, to compare with", c->profile,
                         MIN_PROFILE);
    if (c->profile_energy > 0 && c->profile_energy < LEAST_ENERGY)
        return error_set(e, "--profile-energy %g: give %g seconds or more, as the counter moves seldom",
                         c->profile_energy, LEAST_ENERGY);
    if (c->profile_energy > 0 && (!c->stop_at || c->stop_at == config_total_steps(c)))
        return error_set(e,
                         "--profile-energy: needs --stop-at before the last step, %d: nothing can follow, "
                         "as ops that are repeated leave no model behind",
                         config_total_steps(c));
    if (c->repeat && (c->epochs > 1 || config_given(c, "epochs")))
        return error_set(e, "--repeat and --epochs exclude each other: one is without end, one ends");
    if (c->portable && c->attention == ATTENTION_CUDNN)
        return error_set(
            e, "--attention cudnn and --portable exclude each other: cuDNN's kernels are those of one chip");
    if (c->attention == ATTENTION_CUDNN && !record_has_attention(config_record(c), ATTENTION_PLAIN))
        return error_set(e,
                         "--attention cudnn: the network of preset %s has heads that cuDNN's kernels are "
                         "not used for; give auto or own",
                         c->network);
    return true;
}

static bool check_newton_schulz(const Config *c, Error *e)
{
    NsOptions ns;
    NsText text = config_ns_text(c);
    if (!ns_options_parse(&ns, &text, e))
        return false;
    if (ns.restarts && !ns.gram)
        return error_set(e, "--ns-restarts %s: only the Gram forms (--ns gram, turbo-gram) restart",
                         c->ns_restarts);
    if (c->ns_gain != 1 && !ns.aol)
        return error_set(e, "--ns-gain %g: only the Turbo forms (--ns turbo, turbo-gram) have one",
                         c->ns_gain);
    return true;
}

// Options without a default are those that presets set: a record that is based on none sets all of them.
static bool check_set(const Config *c, Error *e)
{
    for (const Option *o = config_options; o->name; o++) {
        const char *at = (const char *)c + o->offset;
        bool missing = (o->type == OPT_INT && *(const int *)at < o->low) ||
                       (o->type == OPT_FLOAT && *(const double *)at < o->low) ||
                       (o->type == OPT_TEXT && !*(char *const *)at);
        if (missing && !o->standard && o->shapes_model)
            return error_set(e, "--%s: neither preset %s nor a record that it is based on sets it", o->name,
                             c->preset);
    }
    return true;
}

static bool check_all(const Config *c, Error *e)
{
    if (!check_set(c, e))
        return false;
    if (!record_find(c->network))
        return preset_missing("network", c->network, e);
    return check_vector(c, e) && check_sizes(c, e) && check_fp8(c, e) && check_steps(c, e) &&
           check_windows(c, e) && schedule_check(c, e) && config_check_launches(c, e) &&
           check_newton_schulz(c, e);
}

bool config_error_of(const Config *alone, Error *e)
{
    Error own;
    return !check_all(alone, &own) && !strcmp(own.text, e->text) && preset_error(alone->preset, e);
}

bool config_check(const Config *c, Error *e)
{
    Config alone;
    Error ignored;
    char *argv[] = {"", "--preset", (char *)c->preset};
    if (check_all(c, e))
        return true;
    return config_read(&alone, 3, argv, NULL, NULL, &ignored) && config_error_of(&alone, e);
}

bool config_backend_check(const Config *c, Error *e)
{
    int qk = record_key_width(c), v = c->model_dim / c->num_heads;
    if (qk != v && !backend_takes_heads(qk, v))
        return error_set(e,
                         "--network %s: heads of q and k are %d wide and those of v %d: this program has no "
                         "kernels for these widths; use train_gpt_cpu",
                         c->network, qk, v);
    return true;
}

NsText config_ns_text(const Config *c)
{
    return (NsText){.variant = ns_variant_name((NsVariant)c->ns),
                    .coefficients = c->ns_tuples,
                    .restarts = c->ns_restarts,
                    .dtype = c->ns_dtype,
                    .steps = c->ns_steps,
                    .aol_gain = (float)c->ns_gain};
}

char *config_unused(const Config *c, bool training, int reason)
{
    bool validated = training || c->eval_only;
    bool cut = training && schedule_most_launch_tokens(c) < schedule_most_tokens(c);
    const struct {
        bool holds;
        const char *names, *why;
    } reasons[UNUSED_REASONS] = {
        {!c->sample, " temperature top-k top-p repetition-penalty num-tokens sample-batch kv-cache ",
         "only --sample uses it"},
        {!c->sample && !*c->eval && !(training && schedule_needs_prefix(c)) && !(validated && c->val_mask),
         " vocab ", "neither --sample nor --eval nor a prefix term nor --val-mask uses it"},
        {!*c->eval, " eval-every eval-items ", "only --eval uses it"},
        {!(training && record_scales_are_state(c)), " fp8-scales ", "no scale is delayed here"},
        {c->sample && !c->temperature, " top-k top-p ", "--temperature 0 takes the likeliest token"},
        {!training,
         " train-files val-every eval-every repeat epochs out checkpoint-every keep-checkpoints stop-at "
         "stop-after "
         "tensorboard ",
         "nothing is trained here"},
        {!validated, " val-files val-tokens val-mask ", "nothing is validated here"},
        {cut && c->graphs, " graphs ", "launches of --launch-tokens run without CUDA graphs"},
        {!backend_is_asynchronous(), " attention portable self-check graphs device ",
         "this is the CPU program"},
    };
    if (!reasons[reason].holds)
        return NULL;
    char list[512] = "";
    size_t n = 0;
    for (int i = 0; config_options[i].name; i++) {
        char *name = format_string(" %s ", config_options[i].name);
        if (c->given[i] && strstr(reasons[reason].names, name))
            n += (size_t)snprintf(list + n, sizeof list - n, "%s--%s", n ? ", " : "", config_options[i].name);
        free(name);
    }
    return n ? format_string("%s: not used: %s", list, reasons[reason].why) : NULL;
}
