#include "llmc/io/checkpoint.h"
#include "llmc/data/shard.h"
#include "llmc/io/weights.h"
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- which tensors ----------------------------------------------------------------------------------------

// Beside the weights: optimizer state, pending gradients, delayed scales. One list, in one order, for writing
// and reading.
typedef enum { STATE, PENDING, SCALES, PARTS } Part;

// Whether a parameter's gradient waits for a later step.
static bool is_pending(const Trainer *t, const Param *a)
{
    int every = a->spec->update.every;
    return every && t->step % every != 0 && param_now(&t->model.params, a) == a;
}

// Gradients that earlier steps have left to a later one. Whole on rank 0, see gather_pending.
static bool pending_tensor(const Trainer *t, int index, StateTensor *out)
{
    const Params *p = &t->model.params;
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (!is_pending(t, a) || index-- > 0)
            continue;
        *out = (StateTensor){.count = comm_rank() ? 0 : param_elements(a), .data = param_grad(p, a)};
        param_shape(a, t->config, &out->rows, &out->cols);
        snprintf(out->name, sizeof out->name, "%s.grad", a->name);
        return true;
    }
    return false;
}

// Every rank has the same scales of weights, and those of the sets of its own micro-batches.
static bool scales_tensor(const Trainer *t, int index, StateTensor *out)
{
    DelayedRow row;
    int layers = t->model.record->num_layers;
    if (!model_delayed(&t->model, index, &row))
        return false;
    bool weights = row.set == NONE, mine = weights ? comm_rank() == 0 : row.set % comm_size() == comm_rank();
    *out = (StateTensor){.everywhere = weights,
                         .rows = 1,
                         .cols = layers,
                         .count = mine ? layers : 0,
                         .data = row.data};
    snprintf(out->name, sizeof out->name, "%s", row.name);
    return true;
}

static bool nth_tensor(const Trainer *t, Part part, int index, StateTensor *out)
{
    if (part == STATE)
        return optimizer_state(&t->optimizer, &t->model, index, out);
    return part == PENDING ? pending_tensor(t, index, out) : scales_tensor(t, index, out);
}

static void gather_pending(Trainer *t)
{
    const Params *p = &t->model.params;
    for (int i = 0; i < p->count && comm_size() > 1; i++) {
        const Param *a = &p->list[i];
        if (!is_pending(t, a))
            continue;
        comm_all_reduce(t->stream, param_grad(p, a), param_elements(a));
        if (comm_rank())
            device_zero(t->stream, param_grad(p, a), (size_t)param_elements(a) * sizeof(float));
        t->row_marks.known = false; // rank 0 has the rows of all
    }
}

// ---- writing ----------------------------------------------------------------------------------------------

// Brings every rank's piece to rank 0 and writes it. Only rank 0 has a writer.
static bool write_tensor(Trainer *t, SafeWriter *w, const StateTensor *x, Error *e)
{
    size_t bytes = (size_t)x->count * element_bytes(x->half);
    size_t capacity = (size_t)(x->rows * x->cols) * element_bytes(x->half);
    char *host = host_alloc(capacity);
    bool good = true;
    if (x->count)
        copy_to_host(t->stream, host, x->data, bytes);
    stream_synchronize(t->stream);
    for (int r = 0; r < comm_size(); r++) {
        size_t arrived = comm_collect(host, bytes, capacity, r);
        if (w && arrived)
            good = safewriter_write(w, x->name, host, arrived, e) && good;
    }
    host_free(host);
    return good;
}

static void declare_part(const Trainer *t, SafeWriter *w, Part part)
{
    StateTensor x;
    for (int i = 0; nth_tensor(t, part, i, &x); i++)
        safewriter_declare(w, x.name, element_dtype(x.half), 2, (int64_t[]){x.rows, x.cols});
}

static bool write_part(Trainer *t, SafeWriter *w, Part part, Error *e)
{
    StateTensor x;
    bool good = true;
    // All ranks, to the end.
    for (int i = 0; nth_tensor(t, part, i, &x); i++)
        good = write_tensor(t, w, &x, e) && good;
    return good;
}

static void put_metadata(SafeWriter *w, const char *key, char *value)
{
    safewriter_metadata(w, key, value);
    free(value);
}

// Versions: 2 has checksums, 1 had none.
#define CHECKPOINT_FORMAT "gpt-speedrun checkpoint"
#define WEIGHTS_FORMAT "gpt-speedrun weights"
enum { FORMAT_VERSION = 2 };

static void write_metadata(const Trainer *t, SafeWriter *w, bool state)
{
    const char *name;
    const char *format = state ? CHECKPOINT_FORMAT : WEIGHTS_FORMAT;
    put_metadata(w, "format", format_string("%s %d", format, FORMAT_VERSION));
    for (int i = 0; (name = config_option_name(i, NULL)); i++) {
        char *key = format_string("option.%s", name);
        put_metadata(w, key, config_option_value(t->config, i));
        free(key);
    }
    if (!state)
        return;
    put_metadata(w, "step", format_string("%d", t->step));
    put_metadata(w, "ranks", format_string("%d", comm_size()));
    put_metadata(w, "train_ms", format_string("%.17g", t->train_ms));
    put_metadata(w, "rope.window", format_string("%d", t->rope.window));
    put_metadata(w, "rope.scale", format_string("%.17g", t->rope.scale));
    put_metadata(w, "data.position",
                 format_string("%d %d %lld", t->position.epoch, t->position.shard,
                               (long long)t->position.document));
    put_metadata(w, "data.shards", loader_shards(t->loader));
}

static bool save(Trainer *t, const char *path, bool state, Error *e)
{
    Error sub = {""};
    bool root = comm_rank() == 0;
    SafeWriter *w = root ? safewriter_begin(path, &sub) : NULL;
    bool good = !root || w;
    if (comm_any(!good))
        return good ? error_set(e, "rank 0 could not write %s", path) : error_set(e, "%s", sub.text);
    trainer_complete_weights(t);
    if (state)
        gather_pending(t);
    if (w) {
        write_metadata(t, w, state);
        weights_declare(t, w);
        for (Part part = STATE; part < PARTS && state; part++)
            declare_part(t, w, part);
        if (state)
            safewriter_declare(w, "rope.frequency", ST_F32, 1, (int64_t[]){t->rope.count});
    }
    good = weights_write(t, w, &sub) && good;
    for (Part part = STATE; part < PARTS && state; part++)
        good = write_part(t, w, part, &sub) && good;
    if (w && state)
        good =
            safewriter_write(w, "rope.frequency", t->rope.frequency, (size_t)t->rope.count * 4, &sub) && good;
    if (w)
        good = safewriter_commit(w, &sub) && good;
    if (comm_any(!good))
        return root ? error_set(e, "%s", sub.text) : error_set(e, "rank 0 could not write %s", path);
    return true;
}

int64_t checkpoint_bytes(const Trainer *t)
{
    StateTensor x;
    int64_t bytes = weights_bytes(t);
    for (Part part = STATE; part < PARTS; part++) {
        for (int i = 0; nth_tensor(t, part, i, &x); i++)
            bytes += x.rows * x.cols * (int64_t)element_bytes(x.half);
    }
    return bytes;
}

// Rank 0 may wait for a slow disk.
static bool save_patiently(Trainer *t, const char *path, bool state, Error *e)
{
    comm_patience(true);
    bool good = save(t, path, state, e);
    comm_patience(false);
    return good;
}

bool weights_save(Trainer *t, const char *path, Error *e) { return save_patiently(t, path, false, e); }
bool checkpoint_save(Trainer *t, const char *path, Error *e) { return save_patiently(t, path, true, e); }

// ---- reading ----------------------------------------------------------------------------------------------

// A format of ours must be one that is known here, and have its checksums. Other programs' files say nothing,
// or "pt".
static bool check_format(const SafeTensors *st, Error *e)
{
    const char *format = safetensors_metadata(st, "format");
    if (!format || strncmp(format, "gpt-speedrun", strlen("gpt-speedrun")) != 0)
        return true;
    for (int version = 1; version <= FORMAT_VERSION; version++)
        for (int state = 0; state < 2; state++) {
            char *known = format_string("%s %d", state ? CHECKPOINT_FORMAT : WEIGHTS_FORMAT, version);
            bool same = !strcmp(format, known);
            free(known);
            if (!same)
                continue;
            if (version == 1 || safetensors_has_checksums(st))
                return true;
            return error_set(e, "has lost its checksums; use an intact copy, or another checkpoint");
        }
    return error_set(e,
                     "is of format '%.60s', which this program does not know; use the program that wrote it",
                     format);
}

// This rank's piece.
static bool read_tensor(Trainer *t, const SafeTensors *st, StateTensor *x, Error *e)
{
    void *host = host_alloc((size_t)x->count * sizeof(float));
    char *name = name_in_file(st, x->name);
    bool good = safetensors_expect(st, name, ST_BF16 | ST_F32, 2, (int64_t[]){x->rows, x->cols}, e) &&
                read_elements(st, name, x->first, x->count, x->half, host, e);
    free(name);
    if (good)
        copy_to_device(t->stream, x->data, host, (size_t)x->count * element_bytes(x->half));
    stream_synchronize(t->stream);
    host_free(host);
    return good;
}

// What every rank holds, every rank reads whole.
static bool read_part(Trainer *t, const SafeTensors *st, Part part, Error *e)
{
    StateTensor x;
    for (int i = 0; nth_tensor(t, part, i, &x); i++) {
        if (x.everywhere)
            x.count = x.rows * x.cols;
        if (x.count && !read_tensor(t, st, &x, e))
            return false;
    }
    return true;
}

static bool read_parts(Trainer *t, const SafeTensors *st, Error *e)
{
    bool good = true;
    for (Part part = STATE; part < PARTS && good; part++)
        good = read_part(t, st, part, e);
    return good;
}

// Names the file, if the message does not.
static bool in_file(const char *path, bool good, const Error *sub, Error *e)
{
    if (good)
        return true;
    return strstr(sub->text, path) ? error_set(e, "%s", sub->text) : error_set(e, "%s: %s", path, sub->text);
}

bool weights_load(Trainer *t, const char *path, Error *e)
{
    Error sub;
    SafeTensors *st = safetensors_open(path, e);
    if (!st)
        return false;
    bool good = check_format(st, &sub) && weights_read(t, st, &sub);
    safetensors_close(st);
    return in_file(path, good, &sub, e);
}

const char *checkpoint_option(const void *st, const char *name)
{
    char *key = format_string("option.%s", name);
    const char *value = safetensors_metadata(st, key);
    free(key);
    return value;
}

// The value of an option as this program writes it. Older ones wrote all 17 digits of a number. Owned by the
// caller.
static char *option_text(int option, const char *value)
{
    return config_option_is_number(option) ? format_number(strtod(value, NULL)) : xstrdup(value);
}

// An option that the file does not know is younger than the file: the run that wrote it did what is now the
// default.
static bool check_options(const Config *c, const SafeTensors *st, Error *e)
{
    Config standard;
    if (!config_parse(&standard, 1, (char *[]){"", NULL}, e))
        return false;
    const char *name, *preset = safetensors_metadata(st, "option.preset");
    bool shapes, other_preset = preset && strcmp(preset, c->preset);
    for (int i = 0; (name = config_option_name(i, &shapes)); i++) {
        bool unknown = !strcmp(name, "vocab-size") && !c->vocab_size; // until the shards are open
        if (!shapes || unknown)
            continue;
        char *mine = config_option_value(c, i);
        char *usual = config_option_value(&standard, i);
        const char *known = checkpoint_option(st, name),
                   *older = config_older_value(name, checkpoint_option, st);
        char *theirs = option_text(i, known ? known : older ? older : usual);
        bool same = !strcmp(theirs, mine);
        if (!same)
            error_set(e,
                      "made with %s%s%s--%s %s, but this run has %s%s%s; leave --%s out to resume with the "
                      "checkpoint's",
                      other_preset ? "--preset " : "", other_preset ? preset : "",
                      other_preset ? " and " : "", name, theirs, other_preset ? c->preset : "",
                      other_preset ? " and " : "", mine, other_preset ? "preset" : name);
        free(mine);
        free(usual);
        free(theirs);
        if (!same)
            return false;
    }
    return true;
}

// Whole numbers, with nothing around them but a space or the end behind. Moves *text behind the number.
static bool take_whole(const char **text, int64_t low, int64_t high, int64_t *value)
{
    char *end;
    if (!isdigit((unsigned char)**text))
        return false;
    errno = 0;
    *value = strtoll(*text, &end, 10);
    if (errno || (*end && *end != ' '))
        return false;
    *text = *end ? end + 1 : end;
    return *value >= low && *value <= high;
}

static bool parse_whole(const char *text, int64_t low, int64_t high, int *value)
{
    int64_t wide;
    if (!take_whole(&text, low, high, &wide) || *text)
        return false;
    *value = (int)wide;
    return true;
}

static bool parse_real(const char *text, double low, double high, double *value)
{
    char *end;
    *value = strtod(text, &end);
    bool number = end != text && !*end && !isspace((unsigned char)*text);
    return number && *value >= low && *value <= high; // NaN is not
}

static bool parse_position(const char *text, LoaderPosition *p)
{
    int64_t epoch, shard, document;
    if (!take_whole(&text, 0, INT32_MAX, &epoch) || !take_whole(&text, 0, INT32_MAX, &shard) ||
        !take_whole(&text, 0, INT64_MAX, &document) || *text)
        return false;
    *p = (LoaderPosition){(int32_t)epoch, (int32_t)shard, document};
    return true;
}

static bool same_rope(const Rope *a, const Rope *b)
{
    const double tolerance = 1e-5; // another machine's pow() and log()
    bool same = a->window == b->window && fabs(a->scale / b->scale - 1) < tolerance;
    for (int i = 0; i < a->count; i++)
        same = same && fabs(a->frequency[i] / b->frequency[i] - 1) < tolerance;
    return same;
}

// Windows, attention scale and frequencies follow from the schedule: those of the last step, or, after a
// validation, of the next.
static bool check_rope(const Trainer *t, Error *e)
{
    Rope rope;
    rope_follow_steps(&rope, t->config, t->step);
    if (same_rope(&t->rope, &rope))
        return true;
    rope_follow_window(&rope, t->config, schedule_window(t->config, t->step));
    if (same_rope(&t->rope, &rope))
        return true;
    return error_set(
        e,
        "the training state is damaged: window %d, attention scale %g and rope.frequency are not those "
        "of step %d",
        t->rope.window, t->rope.scale, t->step);
}

static bool read_state(Trainer *t, const SafeTensors *st, Error *e)
{
    enum { STEP, TRAIN_MS, WINDOW, SCALE, POSITION, KEYS };
    static const char *const keys[KEYS] = {"step", "train_ms", "rope.window", "rope.scale", "data.position"};
    const char *value[KEYS];
    for (int i = 0; i < KEYS; i++)
        if (!(value[i] = safetensors_metadata(st, keys[i])))
            return error_set(e, "holds weights but no training state (%s is missing); use --init-from",
                             keys[i]);
    if (!check_options(t->config, st, e))
        return false;
    const bool good[KEYS] = {
        [STEP] = parse_whole(value[STEP], 0, config_total_steps(t->config), &t->step),
        [TRAIN_MS] = parse_real(value[TRAIN_MS], 0, 1e15, &t->train_ms),
        [WINDOW] = parse_whole(value[WINDOW], 1, INT_MAX / t->config->block_size, &t->rope.window),
        [SCALE] = parse_real(value[SCALE], 1e-6, 1e6, &t->rope.scale),
        [POSITION] = parse_position(value[POSITION], &t->position),
    };
    for (int i = 0; i < KEYS; i++)
        if (!good[i])
            return error_set(e, "the training state in its metadata is damaged (%s is '%.60s')", keys[i],
                             value[i]);
    return safetensors_expect(st, "rope.frequency", ST_F32, 1, (int64_t[]){t->rope.count}, e) &&
           safetensors_read(st, "rope.frequency", t->rope.frequency, (size_t)t->rope.count * 4, e) &&
           check_rope(t, e);
}

// The position is one in the files of the run that wrote the checkpoint.
static bool check_shards(const Trainer *t, const SafeTensors *st, Error *e)
{
    const char *shards = safetensors_metadata(st, "data.shards");
    if (shards)
        return loader_continues(t->loader, shards, t->position, e);
    note("the checkpoint does not say which training shards its run had: whether these are the same is not "
         "checked");
    return true;
}

static void note_other_ranks(const SafeTensors *st)
{
    const char *text = safetensors_metadata(st, "ranks"); // older programs did not write it
    int ranks = text ? atoi(text) : 0;
    if (ranks > 0 && ranks != comm_size())
        note("the checkpoint is of a run with %d rank%s, this one has %d: gradients are added in another "
             "order, so the losses are not those of that run to the last digit",
             ranks, ranks > 1 ? "s" : "", comm_size());
}

bool checkpoint_load(Trainer *t, const char *path, Error *e)
{
    Error sub;
    SafeTensors *st = safetensors_open(path, e);
    bool good = false;
    if (st) {
        bool training = t->loader != NULL; // else only weights and rope are of use
        good = check_format(st, &sub) && read_state(t, st, &sub) && (!training || check_shards(t, st, &sub));
        if (good && training)
            optimizer_continue(&t->optimizer, &t->model, t->step);
        good = good && weights_read(t, st, &sub) && (!training || read_parts(t, st, &sub));
        good = in_file(path, good, &sub, e);
        if (good && training && t->step < config_total_steps(t->config))
            note_other_ranks(st);
        safetensors_close(st);
    }
    return good && trainer_continue(t, e);
}

bool checkpoint_check(const Config *c, const char *path, bool resume, Error *e)
{
    Error sub;
    SafeTensors *st = safetensors_open(path, e);
    if (!st)
        return false;
    bool good = check_format(st, &sub) && (!resume || check_options(c, st, &sub));
    safetensors_close(st);
    return in_file(path, good, &sub, e);
}

bool checkpoint_peek_vocab(const char *path, int *vocab_size, Error *e)
{
    SafeTensors *st = safetensors_open(path, e);
    const char *text = st ? safetensors_metadata(st, "option.vocab-size") : NULL;
    char *end;
    long size = text ? strtol(text, &end, 10) : 0;
    bool good = size > 0 && size <= SHARD_MAX_VOCAB && !*end;
    if (good)
        *vocab_size = (int)size;
    else if (st)
        error_set(e, "%s: does not say its vocabulary; give --vocab-size", path);
    safetensors_close(st);
    return good;
}
