// The option table: help, parsing, printing back, bounds, presets, impossible combinations. Bounds are read
// from the help text, so that what users are told is what is tested.
#include "dev/test/tap.h"
#include "llmc/run/config_file.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_WORDS = 16 };

// Parses a command line given as words between spaces.
static bool parse(Config *c, const char *line, Error *e)
{
    char *argv[MAX_WORDS] = {"train_gpt"}, *copy = xstrdup(line); // texts are copied by the parser
    int argc = 1;
    e->text[0] = 0;
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
        argv[argc++] = word;
    bool good = config_parse(c, argc, argv, e);
    free(copy);
    return good;
}

static void refused(const char *line, const char *why)
{
    Config c;
    Error e;
    bool good = parse(&c, line, &e);
    ok(!good && strstr(e.text, why) && !strchr(e.text, '\n'), "refused: %s: %s", line,
       good ? "(it was not)" : e.text);
}

static int option_index(const char *name)
{
    const char *known;
    for (int i = 0; (known = config_option_name(i, NULL)); i++)
        if (!strcmp(known, name))
            return i;
    return -1;
}

static bool has_value(const Config *c, const char *name, const char *expected)
{
    int index = option_index(name);
    char *value = index < 0 ? xstrdup("(no such option)") : config_option_value(c, index);
    bool same = !strcmp(value, expected);
    if (!same)
        printf("# --%s is %s, not %s\n", name, value, expected);
    free(value);
    return same;
}

// ---- help and bounds --------------------------------------------------------------------------------------

static const char *help_text(void)
{
    static char text[1 << 16];
    FILE *f = fmemopen(text, sizeof text, "w");
    config_print_help(f);
    fclose(f);
    return text;
}

// The line of an option in the help text, cut out; owned by the caller, NULL when there is none.
static char *help_line(const char *help, const char *name)
{
    char *start = format_string("\n  --%s ", name);
    const char *line = strstr(help, start);
    char *copy = line ? format_string("%.*s", (int)strcspn(line + 1, "\n"), line + 1) : NULL;
    free(start);
    return copy;
}

static bool takes(const Config *standard, const char *name, double value)
{
    Config c = *standard;
    Error e;
    char *text = format_string("%.17g", value);
    bool good = config_set(&c, name, text, &e);
    free(text);
    return good;
}

// Returns how many bounds were tried.
static int check_bounds(const Config *standard, const char *name, const char *line)
{
    double low, high;
    const char *range = strstr(line, "; "), *last = NULL;
    for (; range; range = strstr(range + 2, "; "))
        last = range;
    if (!last || sscanf(last, "; %lf to %lf)", &low, &high) != 2)
        return 0;
    bool inside = takes(standard, name, low) && takes(standard, name, high);
    bool outside = takes(standard, name, low - 1) || takes(standard, name, high + 1 + high * 1e-9);
    ok(inside && !outside, "--%s takes %g to %g and nothing beyond", name, low, high);
    return 1;
}

static void check_help(const Config *standard)
{
    const char *help = help_text();
    const char *name;
    int described = 0, bounded = 0, options = 0, defaults = 0;
    for (int i = 0; (name = config_option_name(i, NULL)); i++) {
        char *line = help_line(help, name), *value = config_option_value(standard, i);
        char *shown = format_string("default %s", *value ? value : "none");
        options++;
        described += line && strlen(line) > 30;
        defaults += line && (strstr(line, shown) || !strstr(line, "default")); // flags have none
        if (line && !(strstr(line, shown) || !strstr(line, "default")))
            printf("# %s: %s\n", shown, line);
        if (line)
            bounded += check_bounds(standard, name, line);
        free(shown);
        free(value);
        free(line);
    }
    ok(options > 40 && described == options, "each of %d options has a line of help", options);
    ok(bounded > 25, "%d numeric options have bounds", bounded);
    ok(defaults == options, "defaults are shown as they are printed: %d of %d", defaults, options);
    static const char *const relied_on[] = {"preset",
                                            "train-files",
                                            "val-files",
                                            "val-tokens",
                                            "val-every",
                                            "num-scheduled",
                                            "num-extension",
                                            "micro-batches",
                                            "micro-batch-tokens",
                                            "ns",
                                            "head",
                                            "seed",
                                            "init-from",
                                            "save-init",
                                            "resume",
                                            "checkpoint-every",
                                            "eval-only",
                                            "repeat",
                                            "out",
                                            "sample",
                                            "temperature",
                                            "top-k",
                                            "num-tokens"};
    int found = 0;
    for (size_t i = 0; i < sizeof relied_on / sizeof *relied_on; i++)
        found += option_index(relied_on[i]) >= 0;
    ok(found == sizeof relied_on / sizeof *relied_on, "the %d names that scripts rely on exist", found);
    ok(strstr(help,
              "  2026-07-17   a record with its own network with its own stages with --model-dim 768 ") &&
           strstr(help,
                  "               from step 423: 8 x 32768 tokens, documents cut at 2048, windows 384 and "
                  "896, rate 1.52, targets 1:0.5-0, prefix 0.25-0\n"),
       "and of presets with stages each of them");
    ok(strstr(help, "2025-11-18") && strstr(help, "Exit status"), "help names presets and exit statuses");
}

// ---- printing and taking back -----------------------------------------------------------------------------

static void check_round_trip(const Config *standard)
{
    // A value other than the default for some of every type; all others as they are.
    static const char *const other[][2] =
        {{"model-dim", "64"},         {"val-tokens", "123456789012345"}, {"adam-rate", "0.10000000000000003"},
         {"muon-rate", "0.03"},       {"lambda-init", "-1.25"},          {"out", "a folder/with 'quotes'=1"},
         {"ns", "turbo-gram"},        {"network", "2025-11-18"},         {"repeat", "1"},
         {"seed", "9000000000000000"}};
    Config c = *standard;
    Error e;
    int same = 0, count = 0;
    const char *name;
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        bool good = config_set(&c, other[i][0], other[i][1], &e);
        ok(good && has_value(&c, other[i][0], other[i][1]), "--%s %s is printed as it was given", other[i][0],
           other[i][1]);
    }
    Config again = *standard;
    for (int i = 0; (name = config_option_name(i, NULL)); i++, count++) {
        char *value = config_option_value(&c, i);
        bool good = config_set(&again, name, value, &e);
        char *back = config_option_value(&again, i);
        same += good && !strcmp(value, back);
        if (!good || strcmp(value, back))
            printf("# --%s %s came back as %s\n", name, value, back);
        free(value);
        free(back);
    }
    ok(same == count, "all %d options survive printing and parsing", count);
    ok(!config_option_name(count, NULL) && !config_option_name(-1, NULL),
       "no option before the first and behind the last");
}

static void check_forms(void)
{
    Config c;
    Error e;
    ok(parse(&c, "--model-dim=96 --num-heads 4 --out=a=b", &e) && c.model_dim == 96 && c.num_heads == 4 &&
           !strcmp(c.out, "a=b"),
       "--name value and --name=value, with = in the value");
    ok(parse(&c, "--repeat --eval-only=1 --deterministic=0", &e) && c.repeat && c.eval_only &&
           !c.deterministic,
       "a flag alone, and with 0 or 1");
    ok(parse(&c, "", &e) && c.self_check == SELF_CHECK_AUTO, "kernels are checked unless they have passed");
    ok(parse(&c, "--self-check always", &e) && c.self_check == SELF_CHECK_ALWAYS, "or always");
    ok(parse(&c, "--self-check never", &e) && c.self_check == SELF_CHECK_NEVER, "or never");
    ok(parse(&c, "--seed 1 --seed 2", &e) && c.seed == 2, "the last of two counts");
    ok(parse(&c, "--num-scheduled 500 --preset tiny", &e) && c.num_scheduled == 500 && c.model_dim == 64,
       "a preset comes before all other options, wherever it stands");
    ok(parse(&c, "--help --num-heads 7", &e) && c.help, "--help is not kept from showing by other mistakes");
    ok(parse(&c, "--sample=", &e) && c.sample && !*c.sample, "an empty prompt is one");
    ok(parse(&c, "", &e) && !c.sample && !c.help, "nothing at all is the default preset, without a sample");
    ok(parse(&c, "--seed 1e3", &e) && c.seed == 1000, "1e3 is a whole number");
}

// ---- presets ----------------------------------------------------------------------------------------------

static void check_presets(void)
{
    static const struct {
        const char *preset, *values[10][2];
    } expected[] = {
        {"2025-10-27",
         {{"model-dim", "768"},
          {"num-heads", "6"},
          {"mlp-dim", "3072"},
          {"network", "2025-10-27"},
          {"lambda-init", "1"},
          {"weight-decay", "0"},
          {"num-scheduled", "2245"},
          {"num-extension", "40"},
          {"block-size", "128"}}},
        {"2025-11-10",
         {{"network", "2025-10-27"},
          {"lambda-init", "1"},
          {"weight-decay", "1.2"},
          {"num-scheduled", "2205"},
          {"num-extension", "40"}}},
        {"2025-11-18",
         {{"network", "2025-11-18"},
          {"lambda-init", "1.1"},
          {"weight-decay", "1.2"},
          {"num-scheduled", "2185"},
          {"num-extension", "40"},
          {"head", "fp8"}}},
        {"tiny",
         {{"network", "2025-11-18"},
          {"lambda-init", "1.1"},
          {"weight-decay", "1.2"},
          {"model-dim", "64"},
          {"window-schedule", "3,7,11"},
          {"window-extension", "13"},
          {"window-final", "20"},
          {"cooldown", "0.5"}}},
    };
    for (size_t p = 0; p < sizeof expected / sizeof *expected; p++) {
        Config c;
        Error e;
        char *line = format_string("--preset %s", expected[p].preset);
        bool good = parse(&c, line, &e);
        for (int i = 0; good && i < 10 && expected[p].values[i][0]; i++)
            good = has_value(&c, expected[p].values[i][0], expected[p].values[i][1]);
        ok(good, "preset %s", expected[p].preset);
        free(line);
    }
    Config c;
    Error e;
    ok(parse(&c, "--preset 2025-11-18 --ns turbo --num-scheduled 500", &e) && c.ns == NS_TURBO &&
           c.num_scheduled == 500 && !strcmp(c.network, "2025-11-18"),
       "every field of a preset can be overridden");
    ok(config_total_steps(&c) == 540, "540 steps: 500 and the preset's extension");
}

static void check_vocab(void)
{
    Config c = {.vocab_size = 0};
    bool good = true;
    for (int V = 1; V <= 65536; V = V * 3 + 1) {
        c.vocab_size = V;
        int padded = config_vocab_padded(&c);
        good = good && padded % 128 == 0 && padded >= V && padded < V + 128;
    }
    c.vocab_size = 50257;
    ok(good && config_vocab_padded(&c) == 50304, "the vocabulary is padded to 128");
}

static void check_refusals(void)
{
    refused("--modeldim 3", "unknown option --modeldim; see --help");
    refused("model", "unexpected argument 'model'");
    refused("-seed 3", "unexpected argument '-seed'");
    refused("--seed 3 4", "unexpected argument '4'; options start with --");
    refused("--train-files a.bin b.bin",
            "unexpected argument 'b.bin' behind --train-files; a value with * or spaces needs quotes");
    refused("--seed", "--seed: needs a value");
    refused("--preset 2024", "no preset '2024'");
    refused("--num-heads 0", "out of range, must be 1 to 256");
    refused("--num-heads 3.5", "not a whole number");
    refused("--num-heads three", "not a number");
    refused("--num-heads=", "not a number");
    refused("--adam-rate nan", "not a number");
    refused("--adam-rate 1e999", "not a number");
    refused("--seed 99999999999999999999", "out of range");
    refused("--head fp", "none of bf16|fp8");
    refused("--head bf16|fp8", "none of bf16|fp8");
    refused("--mlp fp", "none of bf16|fp8");
    refused("--mlp fp8 --mlp-dim 136", "--mlp fp8: --model-dim and --mlp-dim must be multiples of 16");
    refused("--repeat=2", "takes no value, or 0 or 1");
    refused("--num-heads 5", "not a multiple of --num-heads 5");
    refused("--model-dim 24 --num-heads 6", "head width 4");
    refused("--model-dim 2048 --num-heads 1", "head width 2048");
    refused("--mlp-dim 100", "multiples of 8");
    refused("--micro-batch-tokens 100", "not a multiple of 16");
    refused("--micro-batches 4096 --micro-batch-tokens 131072", "too many tokens for one step");
    refused("--num-scheduled 1000000000 --num-extension 1", "too many steps");
    refused("--init-from a --resume b", "exclude each other");
    refused("--repeat --epochs 2", "--repeat and --epochs exclude each other");
    refused("--repeat --epochs 1", "--repeat and --epochs exclude each other");
    refused("--portable --attention cudnn", "exclude each other");
    refused("--self-check perhaps", "self-check");
    refused("--resume a --save-init b", "--save-init needs initial weights");
    refused("--stop-at 2286", "behind the last step, 2285");
    refused("--window-schedule 3,x", "--window-schedule: '3,x' is not a list");
    refused("--window-schedule 3,", "is not a list");
    refused("--window-schedule 0", "is not a list");
    refused("--window-schedule=", "is not a list");
    refused("--window-schedule 99999999999999999999", "is not a list");
    refused("--block-size 65536 --window-final 32768", "at most 32767 blocks");
    refused("--ns-tuples nonsense", "nonsense");
    refused("--ns-dtype fp64", "fp64");
    refused("--ns-restarts 2", "only the Gram forms");
    refused("--ns gram --ns-gain 1.5", "only the Turbo forms");
    char many[200] = "--window-schedule 1";
    for (int i = 1; i < MAX_WINDOWS; i++)
        strcat(many, ",1");
    Config c;
    Error e;
    ok(parse(&c, many, &e), "%d windows are possible", MAX_WINDOWS);
    strcat(many, ",1");
    refused(many, "at most 64 numbers");
}

static void trains(const char *line, bool expected)
{
    Config c;
    Error e;
    ok(parse(&c, line, &e) && config_trains(&c, 0, NULL) == expected, "%s: %s", line,
       expected ? "training" : "no training");
}

static void check_evaluations(void)
{
    Config c;
    Error e;
    ok(parse(&c, "--eval text=a --eval=lambada=b,text=c --eval text=d", &e) &&
           !strcmp(c.eval, "text=a,lambada=b,text=c,text=d"),
       "each --eval is added");
    ok(!parse(&c, "--eval text=a --eval b", &e), "refused: %s", e.text);
    trains("", true);
    trains("--eval text=a", true);
    trains("--eval text=a --init-from x", false);
    trains("--eval text=a --init-from x --eval-every 5", true);
    trains("--eval text=a --init-from x --train-files y", true);
    trains("--sample a", false);
    trains("--sample a --train-files y", true);
    trains("--eval-only", false);
    trains("--init-from x", true);
}

// All lines of a command line, joined.
static void unused(const char *line, bool training, const char *expected)
{
    Config c;
    Error e;
    char all[1024] = "";
    bool good = parse(&c, line, &e);
    for (int i = 0; good && i < UNUSED_REASONS; i++) {
        char *text = config_unused(&c, training, i);
        if (text)
            snprintf(all + strlen(all), sizeof all - strlen(all), "%s; ", text);
        free(text);
    }
    ok(good && !strcmp(all, expected), "not used of '%s'%s: %s", line, training ? " in training" : "",
       good ? all : e.text);
}

static void check_unused(void)
{
    unused("", true, "");
    unused("", false, "");
    unused("--preset tiny --val-every 5 --out x --repeat", true, "");
    unused("--sample a --top-k 3 --vocab v", true, "");
    unused("--top-k 3 --vocab v --sample=a", false, "");
    unused("--top-k=3 --vocab v", true,
           "--top-k: not used: only --sample uses it; --vocab: not used: neither --sample nor --eval nor a "
           "prefix term nor --val-mask uses it; ");
    unused("--eval text=x --vocab v --eval-every 5", true, "");
    unused("--eval-every 5 --eval-items x", true,
           "--eval-every, --eval-items: not used: only --eval uses it; ");
    unused("--stage-prefix 1 --window-schedule 3 --vocab v", true, "");
    unused("--stage-prefix 1 --window-schedule 3 --vocab v --sample a", false, "");
    unused("--sample a --temperature 0 --top-k 3 --top-p 0.5 --repetition-penalty 2 --kv-cache off", true,
           "--top-k, --top-p: not used: --temperature 0 takes the likeliest token; ");
    unused("--kv-cache off --sample-batch 2 --top-p 0.5 --repetition-penalty 2", true,
           "--top-p, --repetition-penalty, --sample-batch, --kv-cache: not used: only --sample uses it; ");
    unused("--eval-only --out x --repeat=0 --stop-at 3 --val-tokens 262144", false,
           "--repeat, --out, --stop-at: not used: nothing is trained here; ");
    unused("--sample a --val-tokens 262144", false, "--val-tokens: not used: nothing is validated here; ");
    unused("--graphs off --device 0 --attention own", true,
           "--attention, --device, --graphs: not used: this is the CPU program; ");
    unused("--preset tiny --launch-tokens 272 --max-document 256 --graphs on", true,
           "--graphs: not used: launches of --launch-tokens run without CUDA graphs; --graphs: not used: "
           "this is the CPU program; ");
    unused("--preset tiny --launch-tokens 272 --max-document 256 --graphs off", true,
           "--graphs: not used: this is the CPU program; ");
    unused("--preset tiny --launch-tokens 512 --graphs on", true,
           "--graphs: not used: this is the CPU program; ");
    Config c;
    Error e;
    ok(parse(&c, "--preset tiny --seed=1", &e) && config_given(&c, "seed") && config_given(&c, "preset") &&
           !config_given(&c, "model-dim") && !config_given(&c, "none"),
       "given is what the command line names, not the preset");
}

int main(void)
{
    Config standard;
    Error e;
    ok(parse(&standard, "", &e), "the defaults fit together");
    PART(check_help(&standard));
    PART(check_round_trip(&standard));
    PART(check_forms());
    PART(check_presets());
    PART(check_vocab());
    PART(check_refusals());
    PART(check_evaluations());
    PART(check_unused());
    return tap_done();
}
