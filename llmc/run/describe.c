#include "llmc/run/describe.h"
#include "llmc/io/json_record.h"
#include "llmc/io/weights.h"
#include "llmc/run/trainer_internal.h"
#include <math.h>
#include <stdlib.h>

// A double that is written with as few digits as name this float.
static double shortest(float x)
{
    char text[32];
    int digits = 1;
    do
        snprintf(text, sizeof text, "%.*g", digits, (double)x);
    while (strtof(text, NULL) != x && digits++ < 9);
    return strtod(text, NULL);
}

static void put_sizes(JsonRecord *r, const Trainer *t)
{
    const Config *c = t->config;
    json_text(r, "weights", *c->resume ? c->resume : c->init_from);
    json_text(r, "preset", c->preset);
    json_text(r, "network", t->model.record->name);
    json_number(r, "step", t->step);
    json_number(r, "vocab_size", c->vocab_size);
    json_number(r, "padded_vocab_size", config_vocab_padded(c));
    json_number(r, "model_dim", c->model_dim);
    json_number(r, "num_heads", c->num_heads);
    json_number(r, "mlp_dim", c->mlp_dim);
    json_number(r, "key_width", record_key_width(c));
}

static void put_attention(JsonRecord *r, const Trainer *t)
{
    AttentionSetting at = trainer_attention(t, t->config->window_final);
    json_number(r, "window_short", at.window_short);
    json_number(r, "window_long", at.window_long);
    json_number(r, "attention_scale", shortest(at.scale));
    json_begin_list(r, "frequencies");
    for (int i = 0; i < t->rope.count; i++)
        json_number(r, NULL, shortest(t->rope.frequency[i]));
    json_end_list(r);
}

// ---- parameters -------------------------------------------------------------------------------------------

static const char *const role_names[ROLES] = {[ROLE_EMBED] = "embed",
                                              [ROLE_SMEAR_GATE] = "smear_gate",
                                              [ROLE_VALUE_EMBED] = "value_embed",
                                              [ROLE_VALUE_GATE] = "value_gate",
                                              [ROLE_BIGRAM] = "bigram",
                                              [ROLE_SIGNS] = "signs",
                                              [ROLE_HEAD] = "head",
                                              [ROLE_SCALARS] = "scalar",
                                              [ROLE_QKVO] = "qkvo",
                                              [ROLE_VO] = "vo",
                                              [ROLE_O] = "o",
                                              [ROLE_ATTENTION_GATE] = "attention_gate",
                                              [ROLE_MLP_UP] = "mlp_up",
                                              [ROLE_MLP_DOWN] = "mlp_down",
                                              [ROLE_GENERATOR_IN] = "generator_in",
                                              [ROLE_GENERATOR_OUT] = "generator_out",
                                              [ROLE_GENERATOR_BIAS] = "generator_bias"};

static const char *storage_of(const Param *a)
{
    if (sizeof(floatX) == sizeof(float) || a->spec->storage == STORE_FLOAT)
        return "fp32";
    return a->spec->storage == STORE_SPLIT ? "truncated" : "rounded";
}

static void put_parameter(JsonRecord *r, const Trainer *t, const Param *a)
{
    FileTensor f = weights_tensor(t->config, a);
    json_begin(r, NULL);
    json_text(r, "role", role_names[a->spec->role]);
    json_number(r, "number", a->number);
    json_text(r, "tensor", f.name);
    json_begin_list(r, "shape");
    for (int i = 0; i < f.ndim; i++)
        json_number(r, NULL, (double)f.shape[i]);
    json_end_list(r);
    json_text(r, "storage", storage_of(a));
    json_number(r, "first", (double)a->file_first);
    json_number(r, "matrices", (double)a->matrices);
    json_number(r, "rows", (double)a->rows);
    json_number(r, "cols", (double)a->cols);
    json_flag(r, "transposed", a->spec->file.transposed);
    json_end(r);
}

static void put_parameters(JsonRecord *r, const Trainer *t)
{
    const Params *p = &t->model.params;
    json_begin_list(r, "parameters");
    for (int i = 0; i < p->count; i++)
        put_parameter(r, t, &p->list[i]);
    json_end_list(r);
}

// ---- tables -----------------------------------------------------------------------------------------------

static char *stream_name(int stream) // owned by the caller
{
    switch (stream) {
    case RUNNING:
        return xstrdup("running");
    case EMBEDDED:
        return xstrdup("embedded");
    case BIGRAM:
        return xstrdup("bigram");
    case BRANCH:
        return xstrdup("branch");
    }
    return stream >= 0            ? format_string("out %d", stream)
           : stream <= FIRST_ROWS ? format_string("rows %d", FIRST_ROWS - stream)
                                  : format_string("in %d", FIRST_IN - stream);
}

static void put_stream(JsonRecord *r, const char *name, int stream)
{
    char *text = stream_name(stream);
    json_text(r, name, text);
    free(text);
}

static void put_coefficient(JsonRecord *r, const Coefficient *c)
{
    json_number(r, "factor", shortest(c->factor));
    if (c->scalar != NONE)
        json_number(r, "scalar", c->scalar);
    if (c->gate != NONE)
        json_number(r, "gate", c->gate);
}

// A column of a generator, or the first of several.
static void put_column(JsonRecord *r, const char *name, int column)
{
    if (!column)
        return;
    json_begin_list(r, name);
    json_number(r, NULL, column_generator(column));
    json_number(r, NULL, column_place(column));
    json_end_list(r);
}

static void put_mix(JsonRecord *r, const char *name, const MixTerm *mix)
{
    int terms = record_mix_terms(mix);
    if (!terms)
        return;
    json_begin_list(r, name);
    for (int i = 0; i < terms; i++) {
        json_begin(r, NULL);
        put_stream(r, "stream", mix[i].stream);
        put_coefficient(r, &mix[i].weight);
        put_column(r, "column", mix[i].column);
        if (mix[i].plus != 0)
            json_number(r, "plus", shortest(mix[i].plus));
        json_end(r);
    }
    json_end_list(r);
}

static void put_heads(JsonRecord *r, const HeadsSpec *h)
{
    json_begin(r, "heads");
    put_stream(r, "input", h->input);
    json_number(r, "factor_scalars", h->factors);
    json_flag(r, "paired", h->paired);
    json_flag(r, "offset", h->offset);
    put_column(r, "value_column", h->value_column);
    if (h->value_column)
        json_number(r, "value_groups", h->value_groups);
    put_mix(r, "extra", h->extra);
    put_column(r, "xsa", h->xsa);
    put_column(r, "gate", h->gate);
    put_column(r, "dc_weights", h->dc_weights);
    put_column(r, "dc_factors", h->dc_factors);
    json_end(r);
}

static void put_layer(JsonRecord *r, const LayerSpec *l)
{
    json_begin(r, NULL);
    put_mix(r, "mix", l->mix);
    if (l->attention) {
        json_flag(r, "long_window", l->long_window);
        if (l->value_embed)
            json_number(r, "value_table", l->value_embed - 1);
    }
    if (l->attention == ATTENTION_PLAIN)
        json_number(r, "value_scalars", l->v_lambdas);
    if (l->attention == ATTENTION_HEADS)
        put_heads(r, &l->heads);
    put_mix(r, "after_attention", l->after_attention);
    json_flag(r, "mlp", l->mlp != MLP_NONE);
    put_mix(r, "after_mlp", l->after_mlp);
    json_end(r);
}

static void put_tables(JsonRecord *r, const Record *record)
{
    json_begin_list(r, "layers");
    for (int i = 0; i < record->num_layers; i++)
        put_layer(r, &record->layers[i]);
    json_end_list(r);
    put_mix(r, "output", record->output);
    json_begin_list(r, "generators");
    for (int i = 0; i < record->num_generators; i++) {
        json_begin(r, NULL);
        put_stream(r, "input", record->generators[i].input);
        put_coefficient(r, &record->generators[i].scale);
        json_end(r);
    }
    json_end_list(r);
    json_begin(r, "head");
    json_number(r, "cap", shortest(record->head.cap));
    json_number(r, "slope", shortest(record->head.slope));
    json_number(r, "shift", shortest(record->head.shift));
    json_end(r);
    json_number(r, "smear_scalar", record->smear_lambda);
    if (record->dc_keys)
        json_number(r, "dc_keys", record->dc_keys);
}

static void put_pair_hash(JsonRecord *r, const PairHash *h)
{
    if (!h->rows)
        return;
    json_begin(r, "pair_hash");
    json_number(r, "rows", h->rows);
    json_number(r, "sign_rows", h->sign_rows);
    json_end(r);
}

char *describe_network(const Trainer *t)
{
    size_t bytes;
    JsonRecord *r = json_record(NULL);
    put_sizes(r, t);
    put_attention(r, t);
    put_tables(r, t->model.record);
    put_pair_hash(r, &t->tables.pairs);
    put_parameters(r, t);
    return json_line(r, &bytes);
}
