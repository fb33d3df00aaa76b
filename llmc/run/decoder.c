#include "llmc/run/decoder.h"
#include "llmc/model/cache.h"
#include "llmc/run/trainer_internal.h"
#include <stdlib.h>

// What a pass reads, (rows) each in one block; those of paired heads are two arrays.
enum {
    TOKENS,
    BEFORE,
    TEXT,
    POSITION,
    PAIR_ROWS,
    PAIR_SIGNS,
    TEXT_PAIRED,
    POSITION_PAIRED = TEXT_PAIRED + 2,
    ARRAYS = POSITION_PAIRED + 2
};

struct Decoder {
    Trainer *trainer;
    KeyCache cache;
    int texts, multiple; // rows of a pass are a multiple of this
    int *length;         // (texts) tokens so far, and
    int32_t *last;       // (texts) the last of them
    Plan *plan;          // of DECODER_ROWS rows; fewer have the same offsets
    Acts acts;
    int rows;     // of acts; 0: they are not placed
    void *memory; // where the activations of training and validation are, or owned
    bool owned;
    int32_t *host, *device; // a block
    floatX *rope[4];        // (rows, frequencies) cos, sin; paired: (2 rows, frequencies)
    float *logits;          // (texts, Vp)
};

static void take_memory(Decoder *d)
{
    Trainer *t = d->trainer;
    d->plan = xcalloc(1, sizeof *d->plan);
    acts_plan(d->plan, &t->model, DECODER_ROWS, false);
    d->owned = d->plan->size > t->acts_bytes;
    d->memory = d->owned ? device_alloc(d->plan->size, "activations: of samples") : t->acts_memory;
}

// The short window grows with the steps that are still to come.
static AttentionSetting longest_windows(const Trainer *t)
{
    AttentionSetting at = trainer_attention(t, t->config->window_final);
    for (int step = 0, total = config_total_steps(t->config); step < total;) {
        Stage stage = schedule_stage(t->config, step);
        int window = window_tokens(t->config, stage.window_short);
        at.window_short = (int)max_i64(at.window_short, window);
        step = stage.end;
    }
    return at;
}

Decoder *decoder_create(Trainer *t, int texts, int64_t positions)
{
    Decoder *d = xcalloc(1, sizeof *d);
    size_t angles = (size_t)DECODER_ROWS * (size_t)t->rope.count * sizeof(floatX),
           block = ARRAYS * DECODER_ROWS * sizeof(int32_t);
    assert(texts >= 1 && texts <= DECODER_ROWS);
    d->trainer = t;
    d->texts = texts;
    d->multiple = backend_is_asynchronous() ? 16 : 1; // as GPU kernels want it
    d->length = xcalloc((size_t)texts, sizeof *d->length);
    d->last = xcalloc((size_t)texts, sizeof *d->last);
    AttentionSetting longest = longest_windows(t);
    cache_allocate(&d->cache, &t->model, &longest, texts, positions, DECODER_ROWS);
    take_memory(d);
    d->host = host_alloc(block);
    d->device = device_alloc(block, "batches: rows of samples");
    for (int i = 0; i < 4; i++)
        d->rope[i] = device_alloc((size_t)(i / 2 + 1) * angles, "batches: rope tables");
    d->logits = device_alloc((size_t)texts * (size_t)config_vocab_padded(t->config) * sizeof(float),
                             "batches: logits of samples");
    return d;
}

void decoder_free(Decoder *d)
{
    if (!d)
        return;
    stream_synchronize(d->trainer->stream);
    cache_free(&d->cache);
    if (d->owned)
        device_free(d->memory);
    host_free(d->host);
    device_free(d->device);
    for (int i = 0; i < 4; i++)
        device_free(d->rope[i]);
    device_free(d->logits);
    free(d->plan);
    free(d->length);
    free(d->last);
    free(d);
}

size_t decoder_cache_bytes(const Decoder *d) { return d->cache.bytes; }

void decoder_restart(Decoder *d, int text) { d->length[text] = 0; }

// ---- a pass -----------------------------------------------------------------------------------------------

static int32_t *array(int32_t *block, int i) { return block + i * DECODER_ROWS; }

static void fill_row(Decoder *d, int i, int text, int32_t token)
{
    int32_t *block = d->host;
    int position = text < 0 ? 0 : d->length[text];
    int32_t before = position ? d->last[text] : -1;
    array(block, TOKENS)[i] = token;
    array(block, BEFORE)[i] = before;
    array(block, TEXT)[i] = text;
    array(block, POSITION)[i] = position;
    for (int half = 0; half < 2; half++) {
        array(block, TEXT_PAIRED)[2 * i + half] = text;
        array(block, POSITION_PAIRED)[2 * i + half] = 2 * position + half;
    }
    const PairHash *pairs = &d->trainer->tables.pairs;
    if (pairs->rows) {
        PairRows rows = pair_hash(pairs, token, before, position);
        array(block, PAIR_ROWS)[i] = rows.row;
        array(block, PAIR_SIGNS)[i] = rows.sign;
    }
    if (text < 0)
        return;
    d->length[text]++;
    d->last[text] = token;
}

static DeviceBatch device_rows(Decoder *d, int rows)
{
    int32_t *block = d->device;
    return (DeviceBatch){.N = rows,
                         .tokens = array(block, TOKENS),
                         .bigram_rows = array(block, PAIR_ROWS),
                         .sign_rows = array(block, PAIR_SIGNS),
                         .texts = {.cache = &d->cache,
                                   .before = array(block, BEFORE),
                                   .text = array(block, TEXT),
                                   .position = array(block, POSITION),
                                   .text_paired = array(block, TEXT_PAIRED),
                                   .position_paired = array(block, POSITION_PAIRED)}};
}

// The rows of the rope tables for the positions of the pass.
static AttentionSetting attention_of(Decoder *d, int rows)
{
    Trainer *t = d->trainer;
    int width = record_key_width(t->config);
    AttentionSetting at = trainer_attention(t, t->config->window_final);
    rope_tables(t->stream, d->rope[0], d->rope[1], t->rope.frequency, array(d->device, POSITION), rows,
                width);
    at.cos = d->rope[0];
    at.sin = d->rope[1];
    if (!t->tables.paired)
        return at;
    rope_tables(t->stream, d->rope[2], d->rope[3], t->rope.frequency, array(d->device, POSITION_PAIRED),
                2 * rows, width);
    at.cos_paired = d->rope[2];
    at.sin_paired = d->rope[3];
    return at;
}

static void place_acts(Decoder *d, int rows)
{
    Trainer *t = d->trainer;
    if (d->rows == rows)
        return;
    acts_follow(&d->acts, &t->model, rows, false, d->plan, d->memory);
    model_prepare(&t->model, &d->acts, t->stream);
    d->rows = rows;
}

static void read_logits(Decoder *d, int count, float *z)
{
    Trainer *t = d->trainer;
    const Model *m = &t->model;
    int Vp = config_vocab_padded(t->config);
    head_logits(t->stream, &m->record->head, d->logits, d->acts.xf, param_weight(&m->params, m->head), count,
                t->config->model_dim, Vp);
    copy_to_host(t->stream, z, d->logits, (size_t)count * (size_t)Vp * sizeof *z);
    stream_synchronize(t->stream);
}

void decoder_run(Decoder *d, const DecoderRows *r, float *z)
{
    Trainer *t = d->trainer;
    int rows = (int)round_up(r->count, d->multiple);
    assert(r->count >= 1 && r->count <= DECODER_ROWS && (!z || r->count <= d->texts));
    stream_synchronize(t->stream); // the block may still be read
    for (int i = 0; i < rows; i++)
        fill_row(d, i, i < r->count ? r->texts[i] : -1, i < r->count ? r->tokens[i] : 0);
    copy_to_device(t->stream, d->device, d->host, ARRAYS * DECODER_ROWS * sizeof(int32_t));
    comm_step(t->step); // other ranks may wait for the end of a long sample
    place_acts(d, rows);
    DeviceBatch batch = device_rows(d, rows);
    AttentionSetting at = attention_of(d, rows);
    model_forward(&t->model, &d->acts, &batch, &at, t->stream);
    if (z)
        read_logits(d, r->count, z);
}
