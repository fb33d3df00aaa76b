#include "llmc/run/config.h"
#include "llmc/records/record.h"
#include "llmc/optim/schedule.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum { OPT_INT, OPT_INT64, OPT_FLOAT, OPT_TEXT, OPT_FLAG, OPT_CHOICE } OptionType;

typedef struct {
    const char *name;
    OptionType type;
    size_t offset;
    const char *standard; // default, as text; NULL: none, or that of the preset
    double low, high;     // bounds of numbers
    const char *choices;  // for OPT_CHOICE: "a|b|c", the value is the index
    const char *help;
    bool shapes_model;   // must agree between a checkpoint and the run that resumes it
    const char *section; // starts a group in --help
} Option;

#define AT(field) offsetof(Config, field)

// clang-format off
static const Option options[] = {
    {"preset", OPT_TEXT, AT(preset), "2025-10-27", 0, 0, NULL, "one of those listed below; applied before all other options", false, "Model"},
    {"vocab-size", OPT_INT, AT(vocab_size), "0", 0, 65536, NULL, "token ids; 0: as the training shard says", true, NULL},
    {"model-dim", OPT_INT, AT(model_dim), NULL, 16, 16384, NULL, "width d of the residual stream", true, NULL},
    {"num-heads", OPT_INT, AT(num_heads), NULL, 1, 256, NULL, "attention heads; the head width is model-dim / num-heads", true, NULL},
    {"mlp-dim", OPT_INT, AT(mlp_dim), NULL, 16, 65536, NULL, "hidden width of the MLP", true, NULL},
    {"block-size", OPT_INT, AT(block_size), NULL, 1, 65536, NULL, "tokens in one block of the window schedule", true, NULL},
    {"network", OPT_TEXT, AT(network), NULL, 0, 0, NULL, "the preset whose layers and tensors the model has", true, NULL},
    {"lambda-init", OPT_FLOAT, AT(lambda_init), NULL, -100, 100, NULL, "initial weight of the residual stream at each layer", false, NULL},

    {"num-scheduled", OPT_INT, AT(num_scheduled), NULL, 1, 1e9, NULL, "steps of the learning-rate and window schedules", true, "Schedule"},
    {"num-extension", OPT_INT, AT(num_extension), NULL, 0, 1e9, NULL, "steps after them, at the longest window", true, NULL},
    {"cooldown", OPT_FLOAT, AT(cooldown), NULL, 0.0001, 1, NULL, "share of the scheduled steps in which the learning rate falls", true, NULL},
    {"cooldown-start", OPT_CHOICE, AT(cooldown_start), "share", 0, 0, "share|step", "the fall begins at that share of the steps, and ends a hair above the floor; or at the whole step at or before it, and ends at the floor", true, NULL},
    {"window-schedule", OPT_TEXT, AT(window_schedule), NULL, 0, 0, NULL, "long windows in blocks, evenly over the scheduled steps", true, NULL},
    {"window-short", OPT_TEXT, AT(window_short), NULL, 0, 0, NULL, "short windows in blocks, as many as there are long ones, and one more if the extension's differs; empty: half of the long ones", true, NULL},
    {"stage-starts", OPT_CHOICE, AT(stage_starts), NULL, 0, 0, "up|nearest", "how the step at which a window begins is rounded", true, NULL},
    {"stage-tokens", OPT_TEXT, AT(stage_tokens), NULL, 0, 0, NULL, "micro-batch-tokens by stage, as many as there are windows, and one more if the extension's differs; empty: the same in all", true, NULL},
    {"stage-documents", OPT_TEXT, AT(stage_documents), NULL, 0, 0, NULL, "max-document by stage", true, NULL},
    {"stage-rates", OPT_TEXT, AT(stage_rates), NULL, 0, 0, NULL, "highest factor on the learning rates by stage; empty: 1", true, NULL},
    {"stage-targets", OPT_TEXT, AT(stage_targets), NULL, 0, 0, NULL, "weights of the training loss by stage: of the next token, the one after, ... (1:0.5:0.25-0: the third weight falls to 0); empty: 1", true, NULL},
    {"stage-prefix", OPT_TEXT, AT(stage_prefix), NULL, 0, 0, NULL, "weight of the prefix term by stage: the loss of the longest token that the next one begins with (0.25-0: falls to 0); empty: 0", true, NULL},
    {"rate-floor", OPT_FLOAT, AT(rate_floor), NULL, 0, 1, NULL, "factor that the learning rates fall to", true, NULL},
    {"window-extension", OPT_INT, AT(window_extension), NULL, 1, 1e6, NULL, "long window of the extension steps, in blocks", true, NULL},
    {"window-final", OPT_INT, AT(window_final), NULL, 1, 1e6, NULL, "long window of the last validation, in blocks", true, NULL},
    {"rope-arithmetic", OPT_CHOICE, AT(rope_arithmetic), "double", 0, 0, "double|fp32", "how rope's frequencies are computed before they are rounded to fp32", true, NULL},

    {"adam-rate", OPT_FLOAT, AT(adam_rate), NULL, 0, 1e3, NULL, "learning rate of embeddings, head and scalars", true, "Optimizers"},
    {"muon-rate", OPT_FLOAT, AT(muon_rate), NULL, 0, 1e3, NULL, "learning rate of the matrices and gates (NorMuon)", true, NULL},
    {"adam-decay", OPT_FLOAT, AT(adam_decay), "0", 0, 1e3, NULL, "cautious weight decay of Adam, for the tensors that have one", true, NULL},
    {"weight-decay", OPT_FLOAT, AT(weight_decay), NULL, 0, 1e3, NULL, "cautious weight decay of NorMuon", true, NULL},
    {"momentum-low", OPT_FLOAT, AT(momentum_low), "0.85", 0, 0.9999, NULL, "NorMuon momentum at the first and last step", true, NULL},
    {"momentum-high", OPT_FLOAT, AT(momentum_high), "0.95", 0, 0.9999, NULL, "NorMuon momentum in between", true, NULL},
    {"momentum-warmup", OPT_INT, AT(momentum_warmup), "300", 0, 1e9, NULL, "steps in which the momentum rises", true, NULL},
    {"momentum-cooldown", OPT_INT, AT(momentum_cooldown), "50", 0, 1e9, NULL, "last steps, in which it falls again", true, NULL},
    {"ns", OPT_CHOICE, AT(ns), "polar", 0, 0, "kj|you|polar|gram|turbo|turbo-gram", "Newton-Schulz variant that orthogonalises the updates", true, NULL},
    {"ns-steps", OPT_INT, AT(ns_steps), "0", 0, NS_MAX_STEPS, NULL, "iterations; 0: all tuples of the variant", true, NULL},
    {"ns-tuples", OPT_TEXT, AT(ns_tuples), "", 0, 0, NULL, "other coefficients: kj, you, polar, dao, ga, hybrid, or a,b,c;a,b,c;...", true, NULL},
    {"ns-restarts", OPT_TEXT, AT(ns_restarts), "", 0, 0, NULL, "Gram forms: iterations to restart before, e.g. 2 or 1,3 or none; empty: the variant's", true, NULL},
    {"ns-dtype", OPT_TEXT, AT(ns_dtype), "auto", 0, 0, NULL, "auto, bf16, fp16 or fp32", true, NULL},
    {"ns-gain", OPT_FLOAT, AT(ns_gain), "1", 0.1, 1.9, NULL, "Turbo forms: over-drive of the AOL scale", true, NULL},

    {"micro-batches", OPT_INT, AT(micro_batches), NULL, 1, 4096, NULL, "packed sequences of one optimizer step, over all ranks together; another number of them cuts other documents from the same shard: another batch", true, "Data"},
    {"group-micro-batches", OPT_INT, AT(group_micro_batches), "0", 0, 4096, NULL, "how many of them a shard's end drops together; the Python original on R GPUs: R; 0: those of a step", true, NULL},
    {"micro-batch-tokens", OPT_INT, AT(micro_batch_tokens), NULL, 16, 1 << 24, NULL, "tokens of one packed sequence", true, NULL},
    {"max-document", OPT_INT, AT(max_document), NULL, 2, 1 << 24, NULL, "tokens of a document used in training", true, NULL},
    {"train-files", OPT_TEXT, AT(train_files), "data/fineweb10B/fineweb_train_*.bin", 0, 0, NULL, "glob of training shards", false, NULL},
    {"val-files", OPT_TEXT, AT(val_files), "data/fineweb10B/fineweb_val_*.bin", 0, 0, NULL, "glob of the validation shard", false, NULL},
    {"val-tokens", OPT_INT64, AT(val_tokens), "10485760", 1, 1e15, NULL, "tokens of a validation; a multiple of the sequence of micro-batches * micro-batch-tokens; as many as there are when it is not given and the shard holds fewer", false, NULL},
    {"val-every", OPT_INT, AT(val_every), "250", 0, 1e9, NULL, "steps between validations; 0: only the last", false, NULL},
    {"repeat", OPT_FLAG, AT(repeat), "0", 0, 0, NULL, "start over when the training data ends; without it and --num-scheduled, a schedule longer than the data is shortened", false, NULL},
    {"epochs", OPT_INT, AT(epochs), "1", 1, 1e6, NULL, "passes over the training data before its end is an error", false, NULL},

    {"head", OPT_CHOICE, AT(head), NULL, 0, 0, "bf16|fp8", "product of the language-model head in training", true, "Run"},
    {"mlp", OPT_CHOICE, AT(mlp), "bf16", 0, 0, "bf16|fp8", "products of the MLP in training's forward; its backward, validation and samples are bf16", true, NULL},
    {"seed", OPT_INT64, AT(seed), "1337", 0, 9e15, NULL, "of the initial weights", false, NULL},
    {"out", OPT_TEXT, AT(out), "runs", 0, 0, NULL, "folder in which every run gets a folder of its own, <date>_<preset>_<id>, for log, JSON lines and checkpoints", false, NULL},
    {"init-from", OPT_TEXT, AT(init_from), "", 0, 0, NULL, "start from the weights of this .safetensors file", false, NULL},
    {"save-init", OPT_TEXT, AT(save_init), "", 0, 0, NULL, "write the initial weights to this file", false, NULL},
    {"save-scalars", OPT_INT, AT(save_scalars), "0", 0, 4096, NULL,
     "length of the tensor scalars in files; 0: with all of its padding, as the reference program reads it on 4 or 8 GPUs, 62: on 1 or 2",
     false, NULL},
    {"resume", OPT_TEXT, AT(resume), "", 0, 0, NULL, "go on from this checkpoint, or the newest one of a run's folder or of the newest run in a folder, with its options (those given here override them) and the same training shards, in the same run folder", false, NULL},
    {"checkpoint-every", OPT_INT, AT(checkpoint_every), "0", 0, 1e9, NULL, "steps between checkpoints; 0: one at the end", false, NULL},
    {"keep-checkpoints", OPT_INT, AT(keep_checkpoints), "0", 0, 1e9, NULL, "checkpoints of this run that are kept: an older one is removed when a newer one is on the disk and has given a finite loss; 0: all", false, NULL},
    {"stop-at", OPT_INT, AT(stop_at), "0", 0, 1e9, NULL, "save and stop before this step, with the schedules unchanged; 0: run to the end", false, NULL},
    {"eval-only", OPT_FLAG, AT(eval_only), "0", 0, 0, NULL, "validate once, as after the last step, and exit", false, NULL},
    {"deterministic", OPT_FLAG, AT(deterministic), "0", 0, 0, NULL, "fixed order of all sums, where that costs speed (the CPU always does)", false, NULL},
    {"attention", OPT_CHOICE, AT(attention), "auto", 0, 0, "auto|cudnn|own", "attention's kernels on a GPU; auto: the fastest that are right there", false, NULL},
    {"portable", OPT_FLAG, AT(portable), "0", 0, 0, NULL, "only kernels that run on every GPU since Ampere, whatever this one has", false, NULL},
    {"verbose", OPT_FLAG, AT(verbose), "0", 0, 0, NULL, "show the plan of the memory and details of the optimizer", false, NULL},
    {"self-check", OPT_CHOICE, AT(self_check), "auto", 0, 0, "never|auto|always",
     "compare the kernels for Hopper with the host and the portable ones at the start; auto: once for each "
     "GPU, driver and build of the program, remembered in $XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt",
     false, NULL},
    {"profile", OPT_INT, AT(profile), "0", 0, 1e9, NULL, "time every op: after N steps, the next 4 without a validation or checkpoint in between run under a tracer, and a table is printed; training goes on and nothing in its mathematics changes; 0: no", false, NULL},
    {"gpus", OPT_TEXT, AT(gpus), "all", 0, 0, NULL, "GPUs of this machine, one process each: a number, a list like 0,1 (2, for the third alone), or all that can share the micro-batches", false, NULL},
    {"ranks", OPT_INT, AT(ranks), "1", 1, 8, NULL, "processes that share the work of the CPU program: 1, 2, 4 or 8", false, NULL},
    {"device", OPT_INT, AT(device), "-1", -1, 1023, NULL, "the one GPU of this rank; -1: as --gpus says", false, NULL},
    {"timeout", OPT_INT, AT(timeout), "120", 1, 1e6, NULL, "seconds without progress, or without an answer from another rank, after which all ranks end", false, NULL},
    {"graphs", OPT_CHOICE, AT(graphs), "on", 0, 0, "off|on", "a step is captured as a CUDA graph, or its ops are queued one by one", false, NULL},
    {"threads", OPT_INT, AT(threads), "0", 0, 4096, NULL, "CPU threads of a rank; 0: one for each core, which the ranks of a machine share", false, NULL},

    {"sample", OPT_TEXT, AT(sample), NULL, 0, 0, NULL, "write text that continues this prompt; with --init-from or --resume and no --train-files given: only that", false, "Sampling"},
    {"vocab", OPT_TEXT, AT(vocab), "", 0, 0, NULL, "tokenizer: folder or file of the GPT-2 vocabulary, for --sample and the prefix term; empty: bytes when the shards are of bytes, else data/vocab", false, NULL},
    {"temperature", OPT_FLOAT, AT(temperature), "0.8", 0, 100, NULL, "0 takes the likeliest token", false, NULL},
    {"top-k", OPT_INT, AT(top_k), "50", 0, 65536, NULL, "draw among the k likeliest; 0: all", false, NULL},
    {"num-tokens", OPT_INT, AT(num_tokens), "256", 1, 1e6, NULL, "length of the sample", false, NULL},
    {"help", OPT_FLAG, AT(help), "0", 0, 0, NULL, "this text", false, NULL},
};
// clang-format on
enum { NUM_OPTIONS = sizeof options / sizeof *options };
static_assert((int)NUM_OPTIONS <= (int)MAX_OPTIONS, "Config.given has a place for every option");

static const Option *find_option(const char *name)
{
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (!strcmp(options[i].name, name))
            return &options[i];
    return NULL;
}

static int find_choice(const char *choices, const char *value)
{
    size_t n = strlen(value);
    int index = 0;
    for (const char *p = choices; *p; index++) {
        size_t length = strcspn(p, "|");
        if (length == n && !memcmp(p, value, n))
            return index;
        p += length + (p[length] == '|');
    }
    return -1;
}

static bool parse_number(const Option *o, const char *text, double *value, Error *e)
{
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (!*text || *end || errno || !isfinite(*value))
        return error_set(e, "--%s: '%s' is not a number", o->name, text);
    if (o->type != OPT_FLOAT && *value != floor(*value))
        return error_set(e, "--%s: '%s' is not a whole number", o->name, text);
    if (*value < o->low || *value > o->high)
        return error_set(e, "--%s: %s is out of range, must be %.10g to %.10g", o->name, text, o->low,
                         o->high);
    return true;
}

// Configs are copied freely, so none of them can own its texts: they stay, in a list, as long as the program
// runs.
static const char *keep_text(const char *text)
{
    typedef struct Kept {
        struct Kept *next;
        char text[];
    } Kept;
    static Kept *all;
    size_t bytes = strlen(text) + 1;
    Kept *kept = xcalloc(1, sizeof *kept + bytes);
    kept->next = all;
    all = kept;
    return memcpy(kept->text, text, bytes);
}

static bool set_option(Config *c, const Option *o, const char *text, Error *e)
{
    void *field = (char *)c + o->offset;
    double value = 0;
    if ((o->type == OPT_INT || o->type == OPT_INT64 || o->type == OPT_FLOAT) &&
        !parse_number(o, text, &value, e))
        return false;
    switch (o->type) {
    case OPT_INT:
        *(int *)field = (int)value;
        break;
    case OPT_INT64:
        *(int64_t *)field = (int64_t)value;
        break;
    case OPT_FLOAT:
        *(double *)field = value;
        break;
    case OPT_TEXT:
        *(const char **)field = keep_text(text);
        break;
    case OPT_FLAG:
        if (strcmp(text, "0") && strcmp(text, "1"))
            return error_set(e, "--%s: takes no value, or 0 or 1, not '%s'", o->name, text);
        *(bool *)field = *text == '1';
        break;
    case OPT_CHOICE: {
        int index = find_choice(o->choices, text);
        if (index < 0)
            return error_set(e, "--%s: '%s' is none of %s", o->name, text, o->choices);
        *(int *)field = index;
    }
    }
    return true;
}

bool config_set(Config *c, const char *name, const char *value, Error *e)
{
    const Option *o = find_option(name);
    return o ? set_option(c, o, value, e) : error_set(e, "unknown option --%s; see --help", name);
}

static char *record_names(void) // owned by the caller
{
    char *list = xstrdup(records[0]->name);
    for (int i = 1; records[i]; i++) {
        char *longer = format_string("%s%s%s", list, records[i + 1] ? ", " : " and ", records[i]->name);
        free(list);
        list = longer;
    }
    return list;
}

static bool no_record(const char *option, const char *name, Error *e)
{
    char *names = record_names();
    error_set(e, "--%s: there is no preset '%s'; there are %s", option, name, names);
    free(names);
    return false;
}

// A column of the stage table as the text of an option: empty when no row says anything.
static bool set_column(Config *c, const Record *r, const char *option,
                       double (*value)(const StageSpec *stage), int rows, Error *e)
{
    char list[MAX_WINDOWS * 24] = "";
    size_t n = 0;
    bool any = false;
    for (int i = 0; i < rows; i++) {
        double x = value(&r->stages[i]);
        any = any || x != 0;
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%.10g", i ? "," : "", x);
    }
    return config_set(c, option, any ? list : "", e);
}

static double window_of(const StageSpec *s) { return s->window; }
static double tokens_of(const StageSpec *s) { return s->micro_batch_tokens; }
static double document_of(const StageSpec *s) { return s->max_document; }
static double rate_of(const StageSpec *s) { return s->rate; }

static double short_window_of(const StageSpec *s) { return s->window_short; }
static const char *targets_of(const StageSpec *s) { return s->targets ? s->targets : "1"; }
static const char *prefix_of(const StageSpec *s) { return s->prefix ? s->prefix : "0"; }

// A column of texts: empty when all rows have `standard`.
static bool set_texts(Config *c, const Record *r, const char *option, const char *(*text)(const StageSpec *s),
                      const char *standard, Error *e)
{
    char list[MAX_WINDOWS * 24] = "";
    size_t n = 0;
    bool any = false;
    for (int i = 0; i < r->num_stages; i++) {
        const char *entry = text(&r->stages[i]);
        any = any || strcmp(entry, standard);
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? "," : "", entry);
    }
    return config_set(c, option, any ? list : "", e);
}

static bool apply_stages(Config *c, const Record *r, Error *e)
{
    int all = r->num_stages;
    char extension[16];
    if (!all)
        return true;
    snprintf(extension, sizeof extension, "%d", r->stages[all - 1].window);
    return set_column(c, r, "window-schedule", window_of, all - 1, e) &&
           config_set(c, "window-extension", extension, e) &&
           set_column(c, r, "window-short", short_window_of, all, e) &&
           set_column(c, r, "stage-tokens", tokens_of, all, e) &&
           set_column(c, r, "stage-documents", document_of, all, e) &&
           set_column(c, r, "stage-rates", rate_of, all, e) &&
           set_texts(c, r, "stage-targets", targets_of, "1", e) &&
           set_texts(c, r, "stage-prefix", prefix_of, "0", e);
}

bool config_apply_record(Config *c, const Record *r, Error *e)
{
    if (r->based_on && !config_apply_record(c, r->based_on, e))
        return false;
    if (!apply_stages(c, r, e))
        return false;
    if (r->layers && !config_set(c, "network", r->name, e))
        return false;
    for (const Field *f = r->fields; f->option; f++) {
        if (!config_set(c, f->option, f->value, e))
            return false;
    }
    return true;
}

static bool apply_preset(Config *c, const char *name, Error *e)
{
    const Record *r = record_find(name);
    return r ? config_apply_record(c, r, e) : no_record("preset", name, e);
}

const Record *config_record(const Config *c) { return record_network(record_find(c->network)); }

const char *config_older_value(const char *name, KnownOption known, const void *of)
{
    const char *skips = known(of, "skips");
    if (strcmp(name, "network") || !skips)
        return NULL;
    for (int i = 0; records[i]; i++) {
        if (records[i]->skips && !strcmp(records[i]->skips, skips))
            return records[i]->name;
    }
    return NULL;
}

// One argument, "--name value", "--name=value" or a flag; *i moves past what was taken.
static bool parse_argument(int argc, char **argv, int *i, const Option **o, const char **value, Error *e)
{
    const char *arg = argv[(*i)++];
    if (strncmp(arg, "--", 2))
        return error_set(e, "unexpected argument '%s'; options start with --, see --help", arg);
    char name[64];
    size_t length = strcspn(arg + 2, "=");
    snprintf(name, sizeof name, "%.*s", (int)min_i64((int64_t)length, 63), arg + 2);
    *o = find_option(name);
    if (!*o)
        return error_set(e, "unknown option --%s; see --help", name);
    if (arg[2 + length] == '=')
        *value = arg + 3 + length;
    else if ((*o)->type == OPT_FLAG)
        *value = "1";
    else if (*i < argc)
        *value = argv[(*i)++];
    else
        return error_set(e, "--%s: needs a value", name);
    return true;
}

// Notes which options the command line names, and takes the preset.
static bool look_ahead(Config *c, int argc, char **argv, Error *e)
{
    const Option *o;
    const char *value;
    for (int i = 1; i < argc;) {
        if (!parse_argument(argc, argv, &i, &o, &value, e))
            return false;
        c->given[o - options] = true;
        if (!strcmp(o->name, "preset") && !set_option(c, o, value, e))
            return false;
    }
    return true;
}

// Options that say what this process does, with which files and on which machine: not part of a run that goes
// on.
static bool of_this_process(const Config *c, const Option *o)
{
    static const char own[] =
        " out init-from save-init resume stop-at eval-only profile gpus ranks device timeout graphs threads "
        "self-check verbose help ";
    char name[64];
    snprintf(name, sizeof name, " %s ", o->name);
    if (strstr(own, name))
        return true;
    if (!strcmp(o->name, "sample"))
        return config_given(c, "eval-only");
    if (!strcmp(o->name, "epochs"))
        return config_given(c, "repeat"); // these two exclude each other
    return !strcmp(o->name, "repeat") && config_given(c, "epochs");
}

static bool take_known(Config *c, KnownOption known, const void *of, Error *e)
{
    if (!apply_preset(c, known(of, "preset"), e))
        return false;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const Option *o = &options[i];
        const char *value = known(of, o->name);
        if (!value)
            value = config_older_value(o->name, known, of);
        bool none = value && !o->standard && !*value; // how no text at all is written
        if (!value || none || c->given[i] || of_this_process(c, o))
            continue;
        if (!set_option(c, o, value, e))
            return false;
    }
    return true;
}

static bool check_sources(const Config *c, Error *e)
{
    if (*c->init_from && *c->resume)
        return error_set(
            e, "--init-from and --resume exclude each other: a checkpoint holds the weights already");
    if (*c->resume && *c->save_init)
        return error_set(e, "--save-init needs initial weights, and --resume has none");
    return true;
}

bool config_read(Config *c, int argc, char **argv, KnownOption known, const void *of, Error *e)
{
    const Option *o;
    const char *value;
    memset(c, 0, sizeof *c);
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (options[i].standard && !set_option(c, &options[i], options[i].standard, e))
            return false;
    if (!look_ahead(c, argc, argv, e))
        return false;

    const char *preset = known ? known(of, "preset") : NULL;
    bool takes_over = preset && (!config_given(c, "preset") || !strcmp(preset, c->preset));
    if (takes_over ? !take_known(c, known, of, e) : !apply_preset(c, c->preset, e))
        return false;

    for (int i = 1; i < argc;) {
        if (!parse_argument(argc, argv, &i, &o, &value, e))
            return false;
        if (!set_option(c, o, value, e))
            return false;
    }
    return check_sources(c, e);
}

bool config_parse(Config *c, int argc, char **argv, Error *e)
{
    return config_read(c, argc, argv, NULL, NULL, e) && (c->help || config_check(c, e));
}

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

// How much of the vector of scalars a file may leave out is the record's matter.
static bool check_vector(const Config *c, Error *e)
{
    const Record *r = config_record(c);
    for (int i = 0; i < r->num_params && c->save_scalars; i++) {
        const ParamSpec *p = &r->params[i];
        int64_t most = record_extent(c, p->cols);
        int least = p->file.least;
        if (least && (c->save_scalars < least || c->save_scalars > most))
            return error_set(e, "--save-scalars %d: must be %d to %d", c->save_scalars, least, (int)most);
    }
    return true;
}

bool config_check(const Config *c, Error *e)
{
    int head_dim = c->model_dim / c->num_heads;
    if (!record_find(c->network))
        return no_record("network", c->network, e);
    if (!check_vector(c, e))
        return false;
    if (c->model_dim % c->num_heads)
        return error_set(e, "--model-dim %d is not a multiple of --num-heads %d", c->model_dim, c->num_heads);
    if (head_dim % 4 || head_dim < 8 || head_dim > MAX_HEAD_DIM)
        return error_set(e, "the head width %d (--model-dim / --num-heads) must be a multiple of 4, 8 to %d",
                         head_dim, MAX_HEAD_DIM);
    if (c->model_dim % 8 || c->mlp_dim % 8)
        return error_set(e, "--model-dim and --mlp-dim must be multiples of 8");
    if (c->mlp == MLP_FP8 && (c->model_dim % FP8_MULTIPLE || c->mlp_dim % FP8_MULTIPLE))
        return error_set(e, "--mlp fp8: --model-dim and --mlp-dim must be multiples of %d", FP8_MULTIPLE);
    if (c->micro_batch_tokens % 16)
        return error_set(e, "--micro-batch-tokens %d is not a multiple of 16", c->micro_batch_tokens);
    if (c->group_micro_batches && c->micro_batches % c->group_micro_batches)
        return error_set(e, "--group-micro-batches is %d; it must divide the step's %d micro-batches",
                         c->group_micro_batches, c->micro_batches);
    if ((int64_t)c->micro_batches * c->micro_batch_tokens > MAX_STEP_TOKENS)
        return error_set(
            e, "--micro-batches %d of --micro-batch-tokens %d are too many tokens for one step, at most %d",
            c->micro_batches, c->micro_batch_tokens, MAX_STEP_TOKENS);
    if (c->num_scheduled > 1000000000 - c->num_extension)
        return error_set(e, "--num-scheduled and --num-extension are too many steps");
    if (c->stop_at > config_total_steps(c))
        return error_set(e, "--stop-at %d lies behind the last step, %d", c->stop_at, config_total_steps(c));
    if (c->profile && c->profile < MIN_PROFILE)
        return error_set(e, "--profile %d: needs at least %d steps before it, to compare with", c->profile,
                         MIN_PROFILE);
    if (c->repeat && (c->epochs > 1 || config_given(c, "epochs")))
        return error_set(e, "--repeat and --epochs exclude each other: one is without end, one ends");
    if (c->portable && c->attention == ATTENTION_CUDNN)
        return error_set(
            e, "--attention cudnn and --portable exclude each other: cuDNN's kernels are those of one chip");
    if (!check_windows(c, e) || !schedule_check(c, e))
        return false;
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

NsText config_ns_text(const Config *c)
{
    NsText text = NS_TEXT_DEFAULT;
    text.variant = ns_variant_name((NsVariant)c->ns);
    text.coefficients = c->ns_tuples;
    text.restarts = c->ns_restarts;
    text.dtype = c->ns_dtype;
    text.steps = c->ns_steps;
    text.aol_gain = (float)c->ns_gain;
    return text;
}

const char *config_option_name(int index, bool *shapes_model)
{
    if (index < 0 || index >= NUM_OPTIONS)
        return NULL;
    if (shapes_model)
        *shapes_model = options[index].shapes_model;
    return options[index].name;
}

char *config_option_value(const Config *c, int index)
{
    const Option *o = &options[index];
    const void *field = (const char *)c + o->offset;
    switch (o->type) {
    case OPT_INT:
        return format_string("%d", *(const int *)field);
    case OPT_INT64:
        return format_string("%lld", (long long)*(const int64_t *)field);
    case OPT_FLOAT:
        return format_string("%.17g", *(const double *)field);
    case OPT_FLAG:
        return format_string("%d", *(const bool *)field);
    case OPT_TEXT:
        return xstrdup(*(const char *const *)field ? *(const char *const *)field : "");
    case OPT_CHOICE: {
        const char *p = o->choices;
        for (int i = *(const int *)field; i > 0; i--)
            p += strcspn(p, "|") + 1;
        return format_string("%.*s", (int)strcspn(p, "|"), p);
    }
    }
    return NULL;
}

bool config_option_is_flag(int index) { return options[index].type == OPT_FLAG; }

bool config_option_is_number(int index)
{
    OptionType type = options[index].type;
    return type == OPT_INT || type == OPT_INT64 || type == OPT_FLOAT;
}

bool config_given(const Config *c, const char *name)
{
    const Option *o = find_option(name);
    return o && c->given[o - options];
}

char *config_unused(const Config *c, bool training, int reason)
{
    const struct {
        bool holds;
        const char *names, *why;
    } reasons[UNUSED_REASONS] = {
        {!c->sample, " temperature top-k num-tokens ", "only --sample uses it"},
        {!c->sample && !(training && schedule_needs_prefix(c)), " vocab ",
         "neither --sample nor a prefix term uses it"},
        {c->sample && !c->temperature, " top-k ", "--temperature 0 takes the likeliest token"},
        {!training, " train-files val-every repeat epochs out checkpoint-every keep-checkpoints stop-at ",
         "nothing is trained here"},
        {!training && !c->eval_only, " val-files val-tokens ", "nothing is validated here"},
        {!backend_is_asynchronous(), " attention portable self-check graphs device ",
         "this is the CPU program"},
    };
    if (!reasons[reason].holds)
        return NULL;
    char list[512] = "";
    size_t n = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char *name = format_string(" %s ", options[i].name);
        if (c->given[i] && strstr(reasons[reason].names, name))
            n += (size_t)snprintf(list + n, sizeof list - n, "%s--%s", n ? ", " : "", options[i].name);
        free(name);
    }
    return n ? format_string("%s: not used: %s", list, reasons[reason].why) : NULL;
}

uint64_t config_fingerprint(const Config *c)
{
    static const char own[] = " device gpus ranks threads out train-files val-files vocab timeout ";
    uint64_t h = 0;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        char *name = format_string(" %s ", options[i].name), *value = config_option_value(c, i);
        if (!strstr(own, name))
            h = fingerprint_bytes(fingerprint_bytes(h, name, strlen(name)), value, strlen(value) + 1);
        free(name);
        free(value);
    }
    return h;
}

// Of an option that presets set: the value of the first preset, on which the others are based, as it is
// written there if it is. Owned by the caller; NULL: no text.
static char *standard_value(const Config *first, const Option *o)
{
    if (o->standard)
        return xstrdup(o->standard);
    for (const Field *field = records[0]->fields; field->option; field++) {
        if (!strcmp(field->option, o->name))
            return xstrdup(field->value);
    }
    return config_option_value(first, (int)(o - options));
}

void config_print_help(FILE *f)
{
    Config first = {0};
    Error e;
    if (!config_apply_record(&first, records[0], &e))
        fatal(EXIT_USAGE, "%s", e.text);
    fprintf(f, "train_gpt: trains the GPT of the NanoGPT speedrun.\n\n  train_gpt --preset 2025-10-27 "
               "--train-files 'data/*_train_*.bin' --val-files 'data/*_val_*.bin'\n"
               "\nOptions are written --name value or --name=value; flags need no value.\n");
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const Option *o = &options[i];
        char left[64], range[64] = "";
        if (o->section)
            fprintf(f, "\n%s\n", o->section);
        char *standard = standard_value(&first, o);
        snprintf(left, sizeof left, "--%s", o->name);
        if (o->type == OPT_INT || o->type == OPT_INT64 || o->type == OPT_FLOAT)
            snprintf(range, sizeof range, "; %.10g to %.10g", o->low, o->high);
        fprintf(f, "  %-22s %s", left, o->help);
        if (o->type == OPT_FLAG)
            fprintf(f, "\n");
        else if (o->choices)
            fprintf(f, " (%s; default %s)\n", o->choices, standard);
        else
            fprintf(f, " (default %s%s)\n", *standard ? standard : "none", range);
        free(standard);
    }
    fprintf(f, "\nPresets, each as the one it is based on with these changes:\n");
    for (int i = 0; records[i]; i++) {
        const Record *r = records[i];
        fprintf(f, "  %-12s %s", r->name, r->based_on ? r->based_on->name : "the defaults above");
        if (r->layers && r->based_on)
            fprintf(f, " with its own network");
        if (r->stages && r->based_on)
            fprintf(f, " with its own stages");
        for (const Field *field = r->fields; r->based_on && field->option; field++)
            fprintf(f, "%s--%s %s", field == r->fields ? " with " : " ", field->option, field->value);
        fprintf(f, "\n");
    }
    fprintf(f, "\nExit status: 0 done, 1 bad input or failure, 2 wrong options, 3 interrupted "
               "(the state was saved, unless a second signal came),\n4 a GPU failed, 5 diverged: the loss of "
               "a training step or "
               "of a validation is not a finite number.\n");
}

int config_total_steps(const Config *c) { return c->num_scheduled + c->num_extension; }
int config_vocab_padded(const Config *c) { return (int)round_up(c->vocab_size, 128); }
