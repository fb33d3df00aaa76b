#include "data/tokenize_options.h"
#include "llmc/base/common.h"
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// clang-format off
static const char help_text[] =
    "usage: tokenize --vocab VOCAB --out OUT [options] --input PATH [PATH ...]\n"
    "\n"
    "Turns text into token shards (.bin). A document is one text file, a piece of one (--split), or one JSONL\n"
    "record; each begins with the document token. Training uses the first 2048 tokens of a document, so one large\n"
    "file needs --split.\n"
    "\n"
    "  --input PATH        text file, *.jsonl / *.ndjson (field \"text\"), folder (all files in it, in name order), or - for\n"
    "                      standard input; may be repeated, and more paths may follow the options\n"
    "  --format FORMAT     auto (by name; standard input is text), text or jsonl              default auto\n"
    "  --split HOW         documents in a text file: none (the file is one), blank-lines (what stands between\n"
    "                      blank lines is one), or N (pieces of at most N bytes, cut at a blank line, the end of a\n"
    "                      sentence or of a line)                                             default none\n"
    "  --vocab VOCAB       bytes, a folder with vocab.bpe and encoder.json, or a .tiktoken file\n"
    "  --out OUT           a folder (one that exists, or ends in /, or any with --name): writes OUT/NAME_train_000001.bin ...;\n"
    "                      else the start of the file names: OUT_train_000001.bin ...\n"
    "  --name NAME         name of the data set in the folder OUT                             default text\n"
    "  --shard-tokens N    a shard is closed by the first document that ends at or after N    default 100000000\n"
    "  --val-tokens N      the first whole documents, until they have N tokens, are for validation\n"
    "  --val-fraction F    every (1/F)-th document is for validation; 1: all of them\n"
    "  --val-out FILE      where validation goes                                              default ..._val_000000.bin\n"
    "  --threads N         encoding threads                                                   default: one per core\n"
    "  --help              this text\n"
    "\n"
    "What was done is written to OUT/NAME_tokenize.txt: inputs, vocabulary, Unicode version, shards.\n"
    "One file, bytes as tokens:\n"
    "  tokenize --vocab bytes --out data/mine/ --split blank-lines --val-fraction 0.1 --input my.txt\n";
// clang-format on

static int64_t parse_count(const char *name, const char *text, int64_t low, int64_t high)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (errno || end == text || *end || v < low || v > high) {
        fatal(EXIT_USAGE, "--%s %s: expected a whole number from %lld to %lld", name, text, (long long)low,
              (long long)high);
    }
    return v;
}

static double parse_fraction(const char *text)
{
    char *end;
    double v = strtod(text, &end);
    if (end != text && !*end && v > 0 && v <= 1)
        return v;
    fatal(EXIT_USAGE, "--val-fraction %s: expected a number above 0, at most 1", text);
}

static TextFormat parse_format(const char *text)
{
    if (!strcmp(text, "auto"))
        return FORMAT_BY_NAME;
    if (!strcmp(text, "text"))
        return FORMAT_TEXT;
    if (!strcmp(text, "jsonl"))
        return FORMAT_JSONL;
    fatal(EXIT_USAGE, "--format %s: expected auto, text or jsonl", text);
}

static void set_option(TokenizeOptions *o, const char *name, const char *value)
{
    if (!strcmp(name, "help")) {
        fputs(help_text, stdout);
        exit(finish_output());
    }
    if (!strcmp(name, "input"))
        o->inputs[o->input_count++] = value;
    if (!strcmp(name, "format"))
        o->format = parse_format(value);
    if (!strcmp(name, "split")) {
        Error e;
        o->split_text = value;
        if (!text_split_parse(&o->split, value, &e))
            fatal(EXIT_USAGE, "%s", e.text);
    }
    if (!strcmp(name, "vocab"))
        o->vocab = value;
    if (!strcmp(name, "out"))
        o->out = value;
    if (!strcmp(name, "name"))
        o->name = value;
    if (!strcmp(name, "val-out"))
        o->val_out = value;
    if (!strcmp(name, "shard-tokens"))
        o->shard_tokens = parse_count(name, value, 1, INT32_MAX);
    if (!strcmp(name, "val-tokens"))
        o->val_tokens = parse_count(name, value, 1, INT32_MAX);
    if (!strcmp(name, "val-fraction"))
        o->val_fraction = parse_fraction(value);
    if (!strcmp(name, "threads"))
        o->threads = (int)parse_count(name, value, 1, 1024);
}

TokenizeOptions tokenize_options(int argc, char **argv)
{
    static const struct option table[] = {
        {"input", 1, NULL, 0},
        {"format", 1, NULL, 0},
        {"vocab", 1, NULL, 0},
        {"out", 1, NULL, 0},
        {"name", 1, NULL, 0},
        {"val-out", 1, NULL, 0},
        {"shard-tokens", 1, NULL, 0},
        {"val-tokens", 1, NULL, 0},
        {"val-fraction", 1, NULL, 0},
        {"threads", 1, NULL, 0},
        {"split", 1, NULL, 0},
        {"help", 0, NULL, 0},
        {0},
    };
    TokenizeOptions o = {.shard_tokens = 100000000, .split_text = "none"};
    o.threads = (int)max_i64(1, sysconf(_SC_NPROCESSORS_ONLN));
    o.inputs = xcalloc((size_t)argc, sizeof *o.inputs);
    opterr = 0;
    int index, c;
    while ((c = getopt_long(argc, argv, ":", table, &index)) != -1) {
        if (c == ':')
            fatal(EXIT_USAGE, "%s needs a value (see --help)", argv[optind - 1]);
        if (c != 0)
            fatal(EXIT_USAGE, "unknown option %s (see --help)", argv[optind - 1]);
        set_option(&o, table[index].name, optarg);
    }
    while (optind < argc)
        o.inputs[o.input_count++] = argv[optind++];
    if (!o.input_count)
        fatal(EXIT_USAGE, "no --input (see --help)");
    if (!o.vocab)
        fatal(EXIT_USAGE, "no --vocab: give \"bytes\" or a GPT-2 vocabulary (see --help)");
    if (!o.out)
        fatal(EXIT_USAGE, "no --out (see --help)");
    if (o.name && strchr(o.name, '/'))
        fatal(EXIT_USAGE, "--name %s: a name, not a path; the folder is --out", o.name);
    if (o.val_tokens && o.val_fraction > 0)
        fatal(EXIT_USAGE, "--val-tokens and --val-fraction exclude each other");
    if (o.val_out && !o.val_tokens && !(o.val_fraction > 0))
        fatal(EXIT_USAGE, "--val-out needs --val-tokens or --val-fraction");
    return o;
}
