// Texts with a cache of keys and values against the whole text computed anew, fp32 build: the same logits to
// rounding at positions before and behind windows and the ends of rings, for texts that grow token by token
// and in pieces; and greedy samples of several prompts, token for token.
#include "dev/test/tap.h"
#include "dev/test/uniform.h"
#include "llmc/dist/comm.h"
#include "llmc/run/decoder.h"
#include "llmc/run/sample.h"

enum { CONTEXT = 704, CHECKED = 9, VOCAB = BYTE_VOCAB };
static const int checked[CHECKED] = {1, 2, 3, 17, 64, 300, 511, 612, 703}; // tokens of the text

static Config config;
static Trainer trainer;

static void open_model(const char *const *options)
{
    char *argv[32] = {"test", "--vocab-size", "257", "--micro-batch-tokens", "704", "--micro-batches",
                      "1",    "--sample",     "",    "--temperature",        "0"};
    int argc = 11;
    Error e;
    while (*options)
        argv[argc++] = (char *)*options++;
    if (!config_parse(&config, argc, argv, &e))
        fatal(1, "%s", e.text);
    backend_open(0);
    trainer_create(&trainer, &config, false, false);
    trainer_finish_schedule(&trainer);
}

static void close_model(void)
{
    trainer_free(&trainer);
    backend_close();
}

// No tensor at zero, as some begin. `nudge`: every weight is moved by so much of itself, up or down.
static void draw_weights(double nudge)
{
    const Params *p = &trainer.model.params;
    params_init(&trainer.model.params, &config, NULL);
    random_used = 0;
    for (int i = 0; i < p->count; i++) {
        float *x = param_data(p, &p->list[i]);
        bool trained = p->list[i].spec->update.kind != FIXED;
        for (int64_t k = 0; trained && k < param_elements(&p->list[i]); k++) {
            x[k] += (float)(0.4 * uniform() - 0.2);
            x[k] *= (float)(1 + (uniform() < 0.5 ? nudge : -nudge));
        }
    }
    params_round(p, NULL);
}

static int32_t token_at(int text, int i)
{
    return i ? (int32_t)((uint32_t)(i * (i + text) * 7 + i) % 256) : 256;
}

static float *whole_text(int text) // (CHECKED, Vp), owned by the caller
{
    int Vp = config_vocab_padded(&config);
    float *z = xcalloc((size_t)(CHECKED * Vp), sizeof *z);
    int32_t tokens[CONTEXT];
    for (int i = 0; i < CONTEXT; i++)
        tokens[i] = token_at(text, i);
    for (int i = 0; i < CHECKED; i++)
        trainer_next_logits(&trainer, tokens, checked[i], z + i * Vp);
    return z;
}

static double distance(const float *a, const float *b, int n)
{
    double worst = 0;
    for (int i = 0; i < n; i++)
        worst = larger_error(worst, fabs((double)a[i] - b[i]));
    return worst;
}

// A row of logits is checked when the text has a length of `checked`.
static double check_row(const float *z, const float *want, int length)
{
    int Vp = config_vocab_padded(&config);
    for (int i = 0; i < CHECKED; i++) {
        if (checked[i] == length)
            return distance(z, want + i * Vp, Vp);
    }
    return 0;
}

static void append(Decoder *d, int text, int number, int from, int count)
{
    int32_t tokens[DECODER_ROWS], texts[DECODER_ROWS];
    for (int i = 0; i < count; i++) {
        tokens[i] = token_at(number, from + i);
        texts[i] = text;
    }
    decoder_run(d, &(DecoderRows){tokens, texts, count}, NULL);
}

// Text 0 token by token; text 1 begins with pieces of 256 and 43 tokens, in a place that another text had.
static double check_decoder(const float *const *want)
{
    int Vp = config_vocab_padded(&config), begun = DECODER_ROWS + 43;
    float *z = xcalloc((size_t)(2 * Vp), sizeof *z);
    double worst = 0;
    Decoder *d = decoder_create(&trainer, 2, CONTEXT);
    append(d, 1, 5, 0, 100);
    decoder_restart(d, 1);
    append(d, 1, 1, 0, DECODER_ROWS);
    append(d, 1, 1, DECODER_ROWS, begun - DECODER_ROWS);
    for (int i = 0; i < checked[CHECKED - 1]; i++) {
        bool both = i >= begun;
        int32_t tokens[] = {token_at(0, i), token_at(1, i)}, texts[] = {0, 1};
        decoder_run(d, &(DecoderRows){tokens, texts, 1 + both}, z);
        worst = larger_error(worst, check_row(z, want[0], i + 1));
        if (both)
            worst = larger_error(worst, check_row(z + Vp, want[1], i + 1));
    }
    decoder_free(d);
    free(z);
    return worst;
}

// Sums of products in another order are the sums of products of which each is moved by a few roundings. So
// two ways to compute the logits are apart about as far as logits of weights that were rounded otherwise: to
// that an order of magnitude is given for longer sums.
static void check_logits(void)
{
    int Vp = config_vocab_padded(&config);
    draw_weights(0x1p-24);
    float *moved = whole_text(0);
    draw_weights(0);
    float *want[] = {whole_text(0), whole_text(1)};
    double rounding = distance(moved, want[0], CHECKED * Vp),
           spread = distance(want[0], want[1], CHECKED * Vp);
    ok(rounding > 0 && 1000 * rounding < spread,
       "logits of other texts are far apart: %.3g, by rounding %.2g", spread, rounding);
    ok_at_most(check_decoder((const float *const *)want), 10 * rounding, "logits with a cache");
    free(moved);
    free(want[0]);
    free(want[1]);
}

// What is written for the prompts in the file.
static char *samples(const char *file, bool kv_cache, int batch)
{
    char *text = NULL;
    size_t length;
    Error e;
    FILE *f = open_memstream(&text, &length);
    Tokenizer *bytes = tokenizer_bytes();
    config.sample = file;
    config.kv_cache = kv_cache;
    config.sample_batch = batch;
    config.num_tokens = 40;
    Sampler *s = sampler_create(&trainer, bytes, &e);
    if (!s)
        fatal(1, "%s", e.text);
    sampler_write(s, f);
    sampler_free(s);
    tokenizer_free(bytes);
    fclose(f);
    return text;
}

static void check_samples(const char *file)
{
    char *anew = samples(file, false, 1), *cached = samples(file, true, 1),
         *together = samples(file, true, 3);
    ok(strlen(anew) > 150 && !strcmp(anew, cached), "greedy samples with a cache: the same %zu bytes",
       strlen(anew));
    ok(!strcmp(anew, together), "and with three of four prompts at a time");
    free(anew);
    free(cached);
    free(together);
}

int main(void)
{
    static const char *const models[][12] = {
        {"--preset", "tiny", "--model-dim", "32", "--mlp-dim", "64"},
        {"--preset", "tiny-2026", "--model-dim", "48", "--mlp-dim", "64"},
        {"--preset", "toy"},
        {"--preset", "toy-targets"},
        {"--preset", "toy-2026"},
        {"--preset", "toy-2026-08"},
        {"--preset", "2025-10-27", "--model-dim", "32", "--num-heads", "2", "--mlp-dim", "48", "--block-size",
         "8"},
    };
    char file[] = "@/tmp/exact_sample_XXXXXX";
    int descriptor = mkstemp(file + 1);
    FILE *f = fdopen(descriptor, "w");
    fputs("a\nThe second prompt is longer than the first.\n\\n\nlast", f);
    fclose(f);
    comm_open();
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        printf("# %s\n", models[i][1]);
        open_model(models[i]);
        PART(check_logits());
        draw_weights(0);
        PART(check_samples(file));
        close_model();
    }
    remove(file + 1);
    return tap_done();
}
