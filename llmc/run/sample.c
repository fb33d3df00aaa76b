#include "llmc/run/sample.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int compare_down(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

// The k-th largest of z: what lies below it is not drawn. Ties with it are.
static float top_k_threshold(const float *z, int vocab, int top_k)
{
    if (top_k <= 0 || top_k >= vocab)
        return -INFINITY;
    float *sorted = xcalloc((size_t)vocab, sizeof *sorted);
    memcpy(sorted, z, (size_t)vocab * sizeof *sorted);
    qsort(sorted, (size_t)vocab, sizeof *sorted, compare_down);
    float threshold = sorted[top_k - 1];
    free(sorted);
    return threshold;
}

int sample_token(float *z, int vocab, double temperature, int top_k, double uniform)
{
    int best = 0;
    double sum = 0;
    for (int i = 1; i < vocab; i++)
        if (z[i] > z[best])
            best = i;
    if (temperature <= 0)
        return best;
    float threshold = top_k_threshold(z, vocab, top_k), max = z[best];
    for (int i = 0; i < vocab; i++) {
        z[i] = z[i] >= threshold ? (float)exp((z[i] - max) / temperature) : 0;
        sum += z[i];
    }
    double at = uniform * sum;
    for (int i = 0; i < vocab; i++) {
        at -= z[i];
        if (at < 0 && z[i] > 0)
            return i;
    }
    return best; // rounding left a crumb over
}

static double next_uniform(uint64_t *state) // splitmix64
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static void write_token(const Tokenizer *tokenizer, int id, FILE *f)
{
    size_t length;
    const char *bytes = tokenizer_token(tokenizer, id, &length);
    fwrite(bytes, 1, length, f);
    fflush(f);
}

// Tokens that a forward pass takes; trainer_next_logits works on multiples of 16.
static int context_of(const Trainer *t) { return t->part_tokens / 16 * 16; }

// The prompt's ids (*length), owned by the caller; NULL when the context has no room for them, the document
// token before and one token behind.
static uint16_t *encode_prompt(const Trainer *t, const Tokenizer *tokenizer, size_t *length, Error *e)
{
    uint16_t *prompt;
    int room = (int)max_i64(0, context_of(t) - 2);
    tokenizer_encode(tokenizer, t->config->sample, strlen(t->config->sample), &prompt, length);
    if (*length <= (size_t)room && context_of(t))
        return prompt;
    free(prompt);
    error_set(e, "--sample: the prompt has %zu tokens; sequences of %d tokens leave room for %d", *length,
              t->part_tokens, room);
    return NULL;
}

bool sample_check(const Trainer *t, const Tokenizer *tokenizer, Error *e)
{
    size_t length;
    uint16_t *prompt = encode_prompt(t, tokenizer, &length, e);
    free(prompt);
    return prompt != NULL;
}

bool sample_write(Trainer *t, const Tokenizer *tokenizer, FILE *f, Error *e)
{
    const Config *c = t->config;
    int vocab = tokenizer_vocab_size(tokenizer), context = context_of(t), count = 1;
    size_t prompt_length;
    uint64_t random = (uint64_t)c->seed;
    uint16_t *prompt = encode_prompt(t, tokenizer, &prompt_length, e);
    if (!prompt)
        return false;
    int32_t *tokens =
        xcalloc((size_t)max_i64(context, (int64_t)prompt_length + 1 + c->num_tokens), sizeof *tokens);
    float *z = xcalloc((size_t)config_vocab_padded(c), sizeof *z);
    tokens[0] = tokenizer_document(tokenizer);
    for (size_t i = 0; i < prompt_length; i++)
        tokens[count++] = prompt[i];
    fwrite(c->sample, 1, strlen(c->sample), f);
    for (int i = 0; i < c->num_tokens; i++) {
        int from = count > context ? count - context : 0;
        trainer_next_logits(t, tokens + from, count - from, z);
        int id = sample_token(z, vocab, c->temperature, c->top_k, next_uniform(&random));
        if (id == tokenizer_document(tokenizer))
            break;
        tokens[count++] = id;
        write_token(tokenizer, id, f);
    }
    fputc('\n', f);
    free(prompt);
    free(tokens);
    free(z);
    return true;
}
