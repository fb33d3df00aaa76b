#include "llmc/run/sample.h"
#include "llmc/base/utf8.h"
#include "llmc/run/decoder.h"
#include "llmc/run/draw.h"
#include "llmc/run/prompts.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint16_t *prompt; // (prompt_length) owned
    size_t prompt_length;
    int32_t *tokens; // (count) the document token, the prompt, what was drawn; NULL: not yet begun, or done
    int count, end;  // end: what count may become
    bool *seen;      // (vocabulary) tokens of the text
    uint64_t random;
    char *bytes; // what was drawn, owned
    size_t length, shown;
    bool done;
} Text;

struct Sampler {
    Trainer *trainer;
    const Tokenizer *tokenizer;
    DrawRule rule;
    Prompts prompts;
    Text *texts;      // (prompts.count)
    Decoder *decoder; // NULL: no cache
    int *slots;       // (num_slots) the text in each; NONE: it is free
    int num_slots;
    int begun, current; // texts begun; the one that is being written
    float *z;           // (num_slots, padded vocabulary) of host_alloc, to which the device copies faster
    FILE *f;
    double prompts_ms, ms;
    int64_t drawn, read; // tokens drawn, tokens of prompts read ahead of the first draw
};

// ---- prompts ----------------------------------------------------------------------------------------------

// Tokens that a forward pass without a cache takes; trainer_next_logits works on multiples of 16.
static int context_of(const Trainer *t) { return t->part_tokens / 16 * 16; }

// The document token stands before it, and one token must have room behind it.
static bool check_length(const Trainer *t, size_t length, Error *e)
{
    int context = context_of(t), room = (int)max_i64(0, context - 2);
    if (t->config->kv_cache || (context && length <= (size_t)room))
        return true;
    return error_set(
        e,
        "--sample: the prompt has %zu tokens; without a cache (--kv-cache) sequences of %d tokens "
        "leave room for %d",
        length, t->part_tokens, room);
}

static bool encode_prompts(Sampler *s, Error *e)
{
    s->texts = xcalloc((size_t)s->prompts.count, sizeof *s->texts);
    for (int i = 0; i < s->prompts.count; i++) {
        Text *text = &s->texts[i];
        const char *prompt = s->prompts.text[i];
        tokenizer_encode(s->tokenizer, prompt, strlen(prompt), &text->prompt, &text->prompt_length);
        if (!check_length(s->trainer, text->prompt_length, e))
            return false;
    }
    return true;
}

static void take_memory(Sampler *s)
{
    const Config *c = s->trainer->config;
    size_t longest = 0;
    for (int i = 0; i < s->prompts.count; i++)
        longest = s->texts[i].prompt_length > longest ? s->texts[i].prompt_length : longest;
    s->num_slots = (int)min_i64(c->sample_batch, s->prompts.count);
    s->slots = xcalloc((size_t)s->num_slots, sizeof *s->slots);
    for (int i = 0; i < s->num_slots; i++)
        s->slots[i] = NONE;
    s->z = host_alloc((size_t)s->num_slots * (size_t)config_vocab_padded(c) * sizeof *s->z);
    if (c->kv_cache)
        s->decoder = decoder_create(s->trainer, s->num_slots, 1 + (int64_t)longest + c->num_tokens);
}

Sampler *sampler_create(Trainer *t, const Tokenizer *tokenizer, Error *e)
{
    const Config *c = t->config;
    Sampler *s = xcalloc(1, sizeof *s);
    s->trainer = t;
    s->tokenizer = tokenizer;
    s->rule = (DrawRule){.temperature = c->temperature,
                         .top_p = c->top_p,
                         .top_k = c->top_k,
                         .repetition_penalty = c->repetition_penalty};
    if (!prompts_read(&s->prompts, c->sample, e) || !encode_prompts(s, e)) {
        sampler_free(s);
        return NULL;
    }
    take_memory(s);
    return s;
}

static void forget(Text *text)
{
    free(text->tokens);
    free(text->seen);
    text->tokens = NULL;
    text->seen = NULL;
}

void sampler_free(Sampler *s)
{
    if (!s)
        return;
    for (int i = 0; s->texts && i < s->prompts.count; i++) {
        forget(&s->texts[i]);
        free(s->texts[i].prompt);
        free(s->texts[i].bytes);
    }
    free(s->texts);
    prompts_free(&s->prompts);
    decoder_free(s->decoder);
    free(s->slots);
    host_free(s->z);
    free(s);
}

// ---- output -----------------------------------------------------------------------------------------------

// The bytes up to `end` that were not yet written.
static void write_bytes(Sampler *s, Text *text, size_t end)
{
    size_t length, replaced;
    char *good = utf8_repair(text->bytes + text->shown, end - text->shown, &length, &replaced);
    fwrite(good, 1, length, s->f);
    free(good);
    text->shown = end;
}

static void write_head(Sampler *s)
{
    if (s->prompts.count > 1)
        fprintf(s->f, "%s== %d of %d ==\n", s->current ? "\n" : "", s->current + 1, s->prompts.count);
    fputs(s->prompts.text[s->current], s->f);
}

// Writes what has been drawn of the current text, and of those behind it while they are done.
static void show(Sampler *s)
{
    while (s->current < s->begun) {
        Text *text = &s->texts[s->current];
        size_t finished = text->done ? text->length : utf8_finished(text->bytes, text->length);
        if (text->bytes)
            write_bytes(s, text, finished);
        if (!text->done)
            break;
        fputc('\n', s->f);
        s->current++;
        if (s->current < s->prompts.count)
            write_head(s);
    }
    flush_output(s->f);
}

// ---- tokens -----------------------------------------------------------------------------------------------

// All of a prompt but its last token, whose logits the first draw needs.
static void read_ahead(Sampler *s, int slot, const Text *text)
{
    int32_t texts[DECODER_ROWS];
    for (int i = 0; i < DECODER_ROWS; i++)
        texts[i] = slot;
    decoder_restart(s->decoder, slot);
    for (int at = 0; at < text->count - 1; at += DECODER_ROWS) {
        int rows = (int)min_i64(DECODER_ROWS, text->count - 1 - at);
        decoder_run(s->decoder, &(DecoderRows){text->tokens + at, texts, rows}, NULL);
        s->read += rows;
    }
    stream_synchronize(s->trainer->stream);
}

static void begin_text(Sampler *s, int slot)
{
    const Config *c = s->trainer->config;
    Text *text = &s->texts[s->begun];
    double began = seconds_now();
    text->end = (int)text->prompt_length + 1 + c->num_tokens;
    text->tokens = xcalloc((size_t)text->end, sizeof *text->tokens);
    text->seen = xcalloc((size_t)config_vocab_padded(c), sizeof *text->seen);
    text->random = draw_state((uint64_t)c->seed, (uint64_t)s->begun);
    text->tokens[text->count++] = tokenizer_document(s->tokenizer);
    for (size_t i = 0; i < text->prompt_length; i++) {
        text->seen[text->prompt[i]] = true;
        text->tokens[text->count++] = text->prompt[i];
    }
    s->slots[slot] = s->begun++;
    if (s->decoder)
        read_ahead(s, slot, text);
    s->prompts_ms += 1e3 * (seconds_now() - began);
}

// Logits behind the last token of the texts in `active` slots, in their order.
static void next_logits(Sampler *s, const int32_t *active, int count)
{
    Trainer *t = s->trainer;
    int Vp = config_vocab_padded(t->config), context = context_of(t);
    int32_t *tokens = xcalloc((size_t)count, sizeof *tokens);
    for (int i = 0; i < count; i++) {
        const Text *text = &s->texts[s->slots[active[i]]];
        int from = text->count > context ? text->count - context : 0;
        tokens[i] = text->tokens[text->count - 1];
        if (!s->decoder)
            trainer_next_logits(t, text->tokens + from, text->count - from, s->z + (int64_t)i * Vp);
    }
    if (s->decoder)
        decoder_run(s->decoder, &(DecoderRows){tokens, active, count}, s->z);
    free(tokens);
}

static void draw_next(Sampler *s, Text *text, float *z)
{
    int id =
        draw_token(&s->rule, z, tokenizer_vocab_size(s->tokenizer), text->seen, draw_uniform(&text->random));
    s->drawn++;
    text->done = id == tokenizer_document(s->tokenizer);
    if (text->done)
        return;
    size_t length;
    const char *bytes = tokenizer_token(s->tokenizer, id, &length);
    text->bytes = xrealloc(text->bytes, text->length + length + 1, 1);
    memcpy(text->bytes + text->length, bytes, length);
    text->length += length;
    text->seen[id] = true;
    text->tokens[text->count++] = id;
    text->done = text->count == text->end;
}

// Fills free slots, draws a token for every text. False when there is none left.
static bool step(Sampler *s)
{
    int Vp = config_vocab_padded(s->trainer->config), count = 0;
    int32_t active[DECODER_ROWS];
    for (int i = 0; i < s->num_slots; i++) {
        if (s->slots[i] == NONE && s->begun < s->prompts.count)
            begin_text(s, i);
        if (s->slots[i] != NONE)
            active[count++] = i;
    }
    if (!count)
        return false;
    next_logits(s, active, count);
    for (int i = 0; i < count; i++) {
        Text *text = &s->texts[s->slots[active[i]]];
        draw_next(s, text, s->z + (int64_t)i * Vp);
        if (!text->done)
            continue;
        forget(text);
        s->slots[active[i]] = NONE;
    }
    show(s);
    return true;
}

void sampler_write(Sampler *s, FILE *f)
{
    double began = seconds_now();
    s->f = f;
    trainer_complete_weights(s->trainer);
    write_head(s);
    flush_output(f);
    while (step(s))
        ;
    s->ms = 1e3 * (seconds_now() - began) - s->prompts_ms;
}

char *sampler_speed(const Sampler *s)
{
    char *prompts = s->decoder ? format_string(", and %lld tokens of prompts in %.0f ms; cache of keys and "
                                               "values %.1f MiB",
                                               (long long)s->read, s->prompts_ms,
                                               (double)decoder_cache_bytes(s->decoder) / 1048576)
                               : xstrdup(", without a cache of keys and values");
    char *line = format_string("sample: %lld tokens in %.0f ms, %.0f tokens/s%s", (long long)s->drawn, s->ms,
                               1e3 * (double)s->drawn / s->ms, prompts);
    free(prompts);
    return line;
}
