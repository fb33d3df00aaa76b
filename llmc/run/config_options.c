// The table of options, and single options as text.
#include "llmc/data/eval_set.h"
#include "llmc/run/config_internal.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(Config, field)

// clang-format off
const Option config_options[] = {
    {"preset", OPT_TEXT, AT(preset), "2025-10-27", 0, 0, NULL, "one of those listed below; applied before all other options", false, "Model"},
    {"config", OPT_TEXT, AT(config), "", 0, 0, NULL, "file of options, one a line, as name = value (TOML); options given here override them. Every run writes one, run.toml in its folder, which repeats it; several files: the later override", false, NULL},
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
    {"cooldown-start", OPT_CHOICE, AT(cooldown_start), "share", 0, 0, "share|step|share-to-floor", "the fall begins at that share of the steps, and ends a hair above the floor; or at the whole step at or before it, and ends at the floor; or at that share, and ends at the floor", true, NULL},
    {"window-schedule", OPT_TEXT, AT(window_schedule), NULL, 0, 0, NULL, "long windows in blocks, evenly over the scheduled steps", true, NULL},
    {"window-short", OPT_TEXT, AT(window_short), NULL, 0, 0, NULL, "short windows in blocks, as many as there are long ones, and one more if the extension's differs; empty: half of the long ones", true, NULL},
    {"stage-starts", OPT_CHOICE, AT(stage_starts), NULL, 0, 0, "up|nearest", "how the step at which a window begins is rounded", true, NULL},
    {"stage-tokens", OPT_TEXT, AT(stage_tokens), NULL, 0, 0, NULL, "micro-batch-tokens by stage, as many as there are windows, and one more if the extension's differs; empty: the same in all", true, NULL},
    {"stage-documents", OPT_TEXT, AT(stage_documents), NULL, 0, 0, NULL, "max-document by stage", true, NULL},
    {"stage-rates", OPT_TEXT, AT(stage_rates), NULL, 0, 0, NULL, "highest factor on the learning rates by stage; empty: 1", true, NULL},
    {"rate-starts", OPT_TEXT, AT(rate_starts), NULL, 0, 0, NULL, "share of the scheduled steps behind which a stage's rate holds, by stage; 0, and empty: from the stage's first step", true, NULL},
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
    {"launch-tokens", OPT_INT, AT(launch_tokens), "0", 0, 1 << 24, NULL, "a micro-batch is computed in launches of whole documents, of at most so many tokens each, of which only one has activations in memory: the same batch and the same losses to rounding; more than max-document, and for the presets of 2025; its steps run without CUDA graphs; 0: at once", false, NULL},
    {"max-document", OPT_INT, AT(max_document), NULL, 2, 1 << 24, NULL, "tokens of a document used in training", true, NULL},
    {"train-files", OPT_TEXT, AT(train_files), "data/fineweb10B/fineweb_train_*.bin", 0, 0, NULL, "glob of training shards", false, NULL},
    {"val-files", OPT_TEXT, AT(val_files), "data/fineweb10B/fineweb_val_*.bin", 0, 0, NULL, "glob of the validation shard", false, NULL},
    {"val-tokens", OPT_INT64, AT(val_tokens), "10485760", 1, 1e15, NULL, "tokens of a validation; a multiple of the sequence of micro-batches * micro-batch-tokens; as many as there are when it is not given and the shard holds fewer", false, NULL},
    {"val-every", OPT_INT, AT(val_every), "250", 0, 1e9, NULL, "steps between validations; 0: only the last", false, NULL},
    {"val-mask", OPT_CHOICE, AT(val_mask), "none", 0, 0, "none|last|all", "validations that leave out the tokens which cannot follow the one before in text of this vocabulary, because its merges would have joined across: their capped logits are -60", false, NULL},
    {"repeat", OPT_FLAG, AT(repeat), "0", 0, 0, NULL, "start over when the training data ends; without it and --num-scheduled, a schedule longer than the data is shortened", false, NULL},
    {"epochs", OPT_INT, AT(epochs), "1", 1, 1e6, NULL, "passes over the training data before its end is an error", false, NULL},

    {"head", OPT_CHOICE, AT(head), NULL, 0, 0, "bf16|fp8", "product of the language-model head in training", true, "Run"},
    {"mlp", OPT_CHOICE, AT(mlp), "bf16", 0, 0, "bf16|fp8|fp8-backward", "products of the MLP in training: all in bf16, in FP8 forward (of 2026-05-27 the first one alone), or in FP8 both ways where the preset's network has scales for that; validation and samples are bf16", true, NULL},
    {"qkv", OPT_CHOICE, AT(qkv), "bf16", 0, 0, "bf16|fp8", "products of q, k and v in training, both ways, where the preset has scales for FP8", true, NULL},
    {"fp8-scales", OPT_CHOICE, AT(fp8_scales), "by-micro-batch", 0, 0, "by-micro-batch|sequential", "delayed scales of FP8 follow the same micro-batch of the step before, the same on any number of GPUs; or they follow all micro-batches and gradients are quantised divided by their number, as in the Python original on one GPU, which must then be the only one", true, NULL},
    {"seed", OPT_INT64, AT(seed), "1337", 0, 9e15, NULL, "of the initial weights", false, NULL},
    {"out", OPT_TEXT, AT(out), "runs", 0, 0, NULL, "folder in which every run gets a folder of its own, <date>_<preset>_<id>, for log, JSON lines and checkpoints", false, NULL},
    {"tensorboard", OPT_FLAG, AT(tensorboard), "0", 0, 0, NULL, "write TensorBoard's event file, too: tensorboard --logdir runs", false, NULL},
    {"init-from", OPT_TEXT, AT(init_from), "", 0, 0, NULL, "start from the weights of this .safetensors file", false, NULL},
    {"save-init", OPT_TEXT, AT(save_init), "", 0, 0, NULL, "write the initial weights to this file", false, NULL},
    {"save-scalars", OPT_INT, AT(save_scalars), "0", 0, 4096, NULL,
     "length of the tensor scalars in files; 0: with all of its padding, as the reference program reads it on 4 or 8 GPUs, 62: on 1 or 2",
     false, NULL},
    {"resume", OPT_TEXT, AT(resume), "", 0, 0, NULL, "go on from this checkpoint, or the newest one of a run's folder or of the newest run in a folder, with its options (those given here override them) and the same training shards, in the same run folder", false, NULL},
    {"checkpoint-every", OPT_INT, AT(checkpoint_every), "0", 0, 1e9, NULL, "steps between checkpoints; 0: one at the end", false, NULL},
    {"keep-checkpoints", OPT_INT, AT(keep_checkpoints), "0", 0, 1e9, NULL, "checkpoints of this run that are kept: an older one is removed when a newer one is on the disk and has given a finite loss; 0: all", false, NULL},
    {"stop-at", OPT_INT, AT(stop_at), "0", 0, 1e9, NULL, "save and stop before this step, with the schedules unchanged; 0: run to the end", false, NULL},
    {"stop-after", OPT_TEXT, AT(stop_after), "", 0, 0, NULL, "save and stop, with status 3, after the first step that ends so long after the start of the program: 90s, 10m, 1.5h; --resume goes on", false, NULL},
    {"eval-only", OPT_FLAG, AT(eval_only), "0", 0, 0, NULL, "validate once, as after the last step, and exit", false, NULL},
    {"eval", OPT_EVALS, AT(eval), "", 0, 0, NULL,
     "evaluate on a file: hellaswag=FILE (data/hellaswag.sh), lambada=FILE (data/lambada.sh), or text=FILE, "
     "bits per byte of any text in pieces of max-document tokens; can be given several times; with "
     "--init-from or --resume, and neither --train-files nor --eval-every given: only that; a model of bytes "
     "reads them as bytes",
     false, NULL},
    {"eval-every", OPT_INT, AT(eval_every), "0", 0, 1e9, NULL, "steps between evaluations; 0: only the last", false, NULL},
    {"eval-items", OPT_TEXT, AT(eval_items), "", 0, 0, NULL, "write a JSON line for each item of an evaluation to this file: losses in nats, tokens, and what was chosen; a run that goes on appends, and of a step that it repeats the later ones count", false, NULL},
    {"describe", OPT_FLAG, AT(describe), "0", 0, 0, NULL, "write the network of these weights as a line of JSON, as scripts/export reads it, and exit", false, NULL},
    {"deterministic", OPT_FLAG, AT(deterministic), "0", 0, 0, NULL, "fixed order of all sums: attention's backward pass is 2 to 6% slower on Hopper, and the portable one in place of cuDNN's (the CPU always has it)", false, NULL},
    {"attention", OPT_CHOICE, AT(attention), "auto", 0, 0, "auto|cudnn|own", "attention's kernels on a GPU; auto: the fastest that are right there", false, NULL},
    {"portable", OPT_FLAG, AT(portable), "0", 0, 0, NULL, "only kernels that run on every GPU since Ampere, whatever this one has; products in FP8 take its FP8 units", false, NULL},
    {"verbose", OPT_FLAG, AT(verbose), "0", 0, 0, NULL, "show the plan of the memory and details of the optimizer", false, NULL},
    {"self-check", OPT_CHOICE, AT(self_check), "auto", 0, 0, "never|auto|always",
     "compare kernels with sums on the host, and Hopper's attention with the portable one, at the start; "
     "auto: once for each size, GPU, driver and build of the program, remembered in "
     "$XDG_CACHE_HOME/train_gpt or ~/.cache/train_gpt; "
     "always: at every start",
     false, NULL},
    {"profile", OPT_INT, AT(profile), "0", 0, 1e9, NULL,
     "time every op: after N steps, the next 4 without a validation or checkpoint in between run under a "
     "tracer, and a table is printed, with the energy of a step where the GPU counts it; training goes on and "
     "nothing in its mathematics changes; 0: no",
     false, NULL},
    {"profile-energy", OPT_FLOAT, AT(profile_energy), "0", 0, 600, NULL,
     "after the step that --stop-at names is saved, repeat each op of it alone for so many seconds, and "
     "print the mJ of a call less those of the idle GPU. Adam steps at every other step. 2 seconds are "
     "enough, 0.5 the least; one GPU that counts its energy; 0: no",
     false, NULL},
    {"gpus", OPT_TEXT, AT(gpus), "all", 0, 0, NULL, "GPUs of this machine, one process each: a number, a list like 0,1 (2, for the third alone), or all that can share the micro-batches", false, NULL},
    {"ranks", OPT_INT, AT(ranks), "1", 1, 8, NULL, "processes that share the work of the CPU program: 1, 2, 4 or 8", false, NULL},
    {"device", OPT_INT, AT(device), "-1", -1, 1023, NULL, "the one GPU of this rank; -1: as --gpus says", false, NULL},
    {"timeout", OPT_INT, AT(timeout), "120", 1, 1e6, NULL,
     "seconds without progress, or without an answer from another rank, after which all ranks end: 15 times "
     "as many while a file is read or written, twice as many where something else has started them and rank 0 "
     "itself hangs", false, NULL},
    {"graphs", OPT_CHOICE, AT(graphs), "on", 0, 0, "off|on", "a step is captured as a CUDA graph, or its ops are queued one by one", false, NULL},
    {"pair-exchange", OPT_CHOICE, AT(pair_exchange), "auto", 0, 0, "auto|dense|rows",
     "what ranks send each other of a table that is read by pairs of tokens: all of it, or the rows that "
     "micro-batches touch, which takes as much memory as its fp32 gradient more (auto: rows where the ranks "
     "share them evenly); the same run",
     false, NULL},
    {"threads", OPT_INT, AT(threads), "0", 0, 4096, NULL, "CPU threads of a rank; 0: one for each core, which the ranks of a machine share", false, NULL},

    {"sample", OPT_TEXT, AT(sample), NULL, 0, 0, NULL, "write text that continues this prompt, or each prompt of a file (@FILE) or of standard input (-): a line each, with \\n for a line break; with --init-from or --resume and no --train-files given: only that", false, "Sampling"},
    {"vocab", OPT_TEXT, AT(vocab), "", 0, 0, NULL, "tokenizer: folder or file of the GPT-2 vocabulary, for --sample, --eval, the prefix term and --val-mask; empty: bytes when the shards are of bytes, else data/vocab", false, NULL},
    {"temperature", OPT_FLOAT, AT(temperature), "0.8", 0, 100, NULL, "0 takes the likeliest token", false, NULL},
    {"top-k", OPT_INT, AT(top_k), "50", 0, 65536, NULL, "draw among the k likeliest; 0: all", false, NULL},
    {"top-p", OPT_FLOAT, AT(top_p), "1", 0.0001, 1, NULL, "draw among the likeliest of those, whose probabilities together reach p; 1: all", false, NULL},
    {"repetition-penalty", OPT_FLOAT, AT(repetition_penalty), "1", 0.01, 100, NULL, "logits of tokens that the text has are divided by it (negative ones multiplied); 1: none", false, NULL},
    {"num-tokens", OPT_INT, AT(num_tokens), "256", 1, 1e6, NULL, "length of a sample, its prompt not counted", false, NULL},
    {"sample-batch", OPT_INT, AT(sample_batch), "8", 1, 256, NULL, "prompts that are continued at a time", false, NULL},
    {"kv-cache", OPT_CHOICE, AT(kv_cache), "on", 0, 0, "off|on", "keep the keys and values of a sample's tokens: a text may then have any length, of which a layer sees as much as its window; off: each token computes the text anew, or its end where it is longer than a validation sequence", false, NULL},
    {"help", OPT_FLAG, AT(help), "0", 0, 0, NULL, "this text", false, NULL},
    {0},
};
// clang-format on
static_assert(sizeof config_options / sizeof *config_options - 1 <= MAX_OPTIONS,
              "Config.given has a place for every option");

const Option *option_find(const char *name)
{
    for (int i = 0; config_options[i].name; i++)
        if (!strcmp(config_options[i].name, name))
            return &config_options[i];
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

// Adds what must be a list by itself.
static bool add_evals(const char **list, const char *text, Error *e)
{
    EvalEntry entries[MAX_EVALS];
    int count = eval_list_parse(text, entries, e);
    if (count < 0)
        return false;
    eval_list_free(entries, count);
    char *longer = format_string("%s%s%s", *list ? *list : "", *list && **list ? "," : "", text);
    count = eval_list_parse(longer, entries, e);
    if (count >= 0) {
        eval_list_free(entries, count);
        *list = keep_text(longer);
    }
    free(longer);
    return count >= 0;
}

bool option_set(Config *c, const Option *o, const char *text, Error *e)
{
    void *field = (char *)c + o->offset;
    double value = 0;
    if (option_is_number(o) && !parse_number(o, text, &value, e))
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
    case OPT_EVALS:
        return add_evals(field, text, e);
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
    const Option *o = option_find(name);
    return o ? option_set(c, o, value, e) : error_set(e, "unknown option --%s; see --help", name);
}

const char *config_option_name(int index, bool *shapes_model)
{
    if (index < 0)
        return NULL;
    if (shapes_model && config_options[index].name)
        *shapes_model = config_options[index].shapes_model;
    return config_options[index].name;
}

char *config_option_value(const Config *c, int index)
{
    const Option *o = &config_options[index];
    const void *field = (const char *)c + o->offset;
    switch (o->type) {
    case OPT_INT:
        return format_string("%d", *(const int *)field);
    case OPT_INT64:
        return format_string("%lld", (long long)*(const int64_t *)field);
    case OPT_FLOAT:
        return format_number(*(const double *)field);
    case OPT_FLAG:
        return format_string("%d", *(const bool *)field);
    case OPT_TEXT:
    case OPT_EVALS:
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

bool config_option_is_flag(int index) { return config_options[index].type == OPT_FLAG; }

bool option_is_number(const Option *o)
{
    return o->type == OPT_INT || o->type == OPT_INT64 || o->type == OPT_FLOAT;
}

bool config_option_is_number(int index) { return option_is_number(&config_options[index]); }

bool config_given(const Config *c, const char *name)
{
    const Option *o = option_find(name);
    return o && c->given[o - config_options];
}

uint64_t config_fingerprint(const Config *c)
{
    static const char own[] =
        " config device gpus ranks threads out train-files val-files vocab timeout eval eval-items ";
    uint64_t h = 0;
    for (int i = 0; config_options[i].name; i++) {
        char *name = format_string(" %s ", config_options[i].name), *value = config_option_value(c, i);
        if (!strstr(own, name))
            h = fingerprint_bytes(fingerprint_bytes(h, name, strlen(name)), value, strlen(value) + 1);
        free(name);
        free(value);
    }
    return h;
}
