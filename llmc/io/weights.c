#include "llmc/io/weights.h"
#include <stdlib.h>
#include <string.h>

static const SafeDtype dtype_x = sizeof(floatX) == 2 ? ST_BF16 : ST_F32;

SafeDtype element_dtype(bool half) { return half ? dtype_x : ST_F32; }

// ---- tensors of a file ------------------------------------------------------------------------------------

static bool is_half(const Param *a)
{
    return a->spec->storage == STORE_HALF || a->spec->storage == STORE_SIGNS;
}

FileTensor weights_tensor(const Config *c, const Param *a)
{
    const FileSpec *f = &a->spec->file;
    bool own = strchr(a->spec->name, '%');
    FileTensor t = {.name = own ? a->name : a->spec->name, .spec = a->spec, .matrix = a->rows * a->cols};
    int64_t elements = 1;
    if (f->dims) {
        t.ndim = f->dims == NO_DIMS ? 0 : f->dims;
        for (int i = 0; i < t.ndim; i++)
            t.shape[i] = record_extent(c, f->shape[i]);
    } else {
        t.ndim = 2;
        param_shape(a, c, &t.shape[0], &t.shape[1]);
    }
    for (int i = 0; i < t.ndim; i++)
        elements *= t.shape[i];
    t.matrices = elements / t.matrix;
    if (f->least && c->save_scalars)
        t.shape[0] = c->save_scalars;
    return t;
}

static bool holds(const FileTensor *t, const Config *c, const Param *a)
{
    FileTensor of = weights_tensor(c, a);
    return !strcmp(of.name, t->name);
}

// Whether an earlier parameter is in the same tensor.
static bool is_known(const Params *p, const Config *c, int param, const FileTensor *t)
{
    for (int i = 0; i < param; i++) {
        if (holds(t, c, &p->list[i]))
            return true;
    }
    return false;
}

// The parameter of a tensor that begins with this matrix; NULL: none does.
static const Param *param_at(const Params *p, const Config *c, const FileTensor *t, int64_t matrix)
{
    for (int i = 0; i < p->count; i++) {
        const Param *a = &p->list[i];
        if (a->file_first == matrix && holds(t, c, a))
            return a;
    }
    return NULL;
}

// ---- what a table may say ---------------------------------------------------------------------------------

static bool no_place(const Config *c, const FileTensor *t, const Param *a, const char *why, Error *e)
{
    char text[96];
    int n = 0;
    for (int i = 0; i < t->ndim && n < (int)sizeof text - 24; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    if (!t->ndim)
        snprintf(text, sizeof text, "a number");
    return error_set(
        e,
        "preset %s, tensor %s (%s): matrices %lld to %lld, each (%lld, %lld), %s; see FileSpec in "
        "llmc/records/record.h",
        c->preset, t->name, text, (long long)a->file_first, (long long)(a->file_first + a->matrices - 1),
        (long long)a->rows, (long long)a->cols, why);
}

static bool has_place(const Config *c, const Param *a, Error *e)
{
    const FileSpec *f = &a->spec->file;
    FileTensor t = weights_tensor(c, a);
    int64_t elements = 1;
    for (int i = 0; i < t.ndim && !f->least; i++)
        elements *= t.shape[i];
    bool turned = t.ndim < 2 || !f->dims || !f->transposed ||
                  (t.shape[t.ndim - 2] == a->cols && t.shape[t.ndim - 1] == a->rows);
    if (a->file_first < 0 || a->file_first + a->matrices > t.matrices)
        return no_place(c, &t, a, "are not within it", e);
    if (!f->least && elements % t.matrix)
        return no_place(c, &t, a, "do not fill it", e);
    return turned || no_place(c, &t, a, "are not its last two extents, transposed", e);
}

static bool are_apart(const Config *c, const Param *a, const Param *b, Error *e)
{
    FileTensor t = weights_tensor(c, a), u = weights_tensor(c, b);
    bool together = !strcmp(t.name, u.name);
    bool same = t.ndim == u.ndim && t.matrix == u.matrix && is_half(a) == is_half(b) &&
                !memcmp(t.shape, u.shape, (size_t)t.ndim * sizeof *t.shape);
    if (!together)
        return strcmp(a->name, b->name) != 0 || no_place(c, &u, b, "have the name of another tensor", e);
    if (a->file_first < b->file_first + b->matrices && b->file_first < a->file_first + a->matrices)
        return no_place(c, &u, b, "are those of two tensors", e);
    return same || no_place(c, &u, b, "have a neighbour of another shape or storage", e);
}

bool weights_check(const Params *p, const Config *c, Error *e)
{
    for (int i = 0; i < p->count; i++) {
        if (!has_place(c, &p->list[i], e))
            return false;
        for (int k = 0; k < i; k++) {
            if (!are_apart(c, &p->list[k], &p->list[i], e))
                return false;
        }
    }
    return true;
}

// ---- conversions ------------------------------------------------------------------------------------------

// to (cols, rows) from (rows, cols), each of `count` matrices.
static void transpose(void *to, const void *from, size_t size, int64_t rows, int64_t cols, int64_t count)
{
    enum { TILE = 32 };
#pragma omp parallel for collapse(2)
    for (int64_t m = 0; m < count; m++) {
        for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
            char *out = (char *)to + (size_t)(m * rows * cols) * size;
            const char *in = (const char *)from + (size_t)(m * rows * cols) * size;
            for (int64_t c0 = 0; c0 < cols; c0 += TILE)
                for (int64_t r = r0; r < min_i64(rows, r0 + TILE); r++)
                    for (int64_t c = c0; c < min_i64(cols, c0 + TILE); c++)
                        memcpy(out + (size_t)(c * rows + r) * size, in + (size_t)(r * cols + c) * size, size);
        }
    }
}

static void signs_to_values(floatX *to, const uint32_t *bits, const Param *a)
{
    int64_t words = ceil_div(a->cols, 32);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t c = 0; c < a->cols; c++) {
            bool negative = bits[r * words + c / 32] >> (c % 32) & 1;
            to[r * a->cols + c] = float_to_x(negative ? -1.0f : 1.0f);
        }
    }
}

static bool values_to_signs(uint32_t *bits, const floatX *from, const Param *a)
{
    int64_t words = ceil_div(a->cols, 32);
    bool good = true;
    memset(bits, 0, (size_t)(a->rows * words) * sizeof *bits);
    for (int64_t r = 0; r < a->rows; r++) {
        for (int64_t c = 0; c < a->cols; c++) {
            float x = x_to_float(from[r * a->cols + c]);
            good = good && (x == 1 || x == -1);
            bits[r * words + c / 32] |= (uint32_t)(x < 0) << (c % 32);
        }
    }
    return good;
}

// ---- writing ----------------------------------------------------------------------------------------------

void weights_declare(const Trainer *t, SafeWriter *w)
{
    const Params *p = &t->model.params;
    for (int i = 0; i < p->count; i++) {
        FileTensor f = weights_tensor(t->config, &p->list[i]);
        if (!is_known(p, t->config, i, &f))
            safewriter_declare(w, f.name, element_dtype(is_half(&p->list[i])), f.ndim, f.shape);
    }
}

int64_t weights_bytes(const Trainer *t)
{
    const Params *p = &t->model.params;
    int64_t sum = 0;
    for (int i = 0; i < p->count; i++) {
        FileTensor f = weights_tensor(t->config, &p->list[i]);
        int64_t bytes = (int64_t)element_bytes(is_half(&p->list[i]));
        for (int k = 0; k < f.ndim; k++)
            bytes *= f.shape[k];
        if (!is_known(p, t->config, i, &f))
            sum += bytes;
    }
    return sum;
}

// As it is in a file, from what the device holds; stored is given up or returned.
static void *to_file(const Param *a, void *stored)
{
    size_t size = element_bytes(is_half(a)), n = (size_t)param_elements(a);
    bool signs = a->spec->storage == STORE_SIGNS;
    if (!signs && !a->spec->file.transposed)
        return stored;
    void *host = host_alloc(n * size);
    if (signs)
        signs_to_values(host, stored, a);
    else
        transpose(host, stored, size, a->rows, a->cols, a->matrices);
    host_free(stored);
    return host;
}

// Brings a parameter from the rank that has it whole to rank 0 and writes the first `count` elements.
static bool write_param(Trainer *t, SafeWriter *w, const Param *a, const char *name, int64_t count, Error *e)
{
    const Params *p = &t->model.params;
    const ParamPool *q = &p->pools[a->pool];
    int owner = q->slot ? slot_owner(a->offset / q->slot, comm_size()) : 0;
    size_t capacity = (size_t)param_stored(a) * param_element_size(a);
    size_t bytes = owner == comm_rank() ? capacity : 0;
    void *host = host_alloc(capacity);
    bool good = true;
    if (bytes)
        copy_to_host(t->stream, host, param_data(p, a), bytes);
    stream_synchronize(t->stream);
    comm_collect(host, bytes, capacity, owner);
    if (w) {
        host = to_file(a, host);
        good = safewriter_write(w, name, host, (size_t)count * element_bytes(is_half(a)), e);
    }
    host_free(host);
    return good;
}

static bool write_zeros(SafeWriter *w, const FileTensor *f, bool half, Error *e)
{
    size_t bytes = (size_t)f->matrix * element_bytes(half);
    void *zeros = w ? xcalloc(1, bytes) : NULL;
    bool good = !w || safewriter_write(w, f->name, zeros, bytes, e);
    free(zeros);
    return good;
}

static bool write_tensor(Trainer *t, SafeWriter *w, const FileTensor *f, bool half, Error *e)
{
    bool good = true;
    for (int64_t m = 0, next; m < f->matrices; m = next) { // all ranks, to the end
        const Param *a = param_at(&t->model.params, t->config, f, m);
        int64_t count = !a ? 0 : f->spec->file.least ? f->shape[0] : param_elements(a);
        next = m + (a ? a->matrices : 1);
        good = (a ? write_param(t, w, a, f->name, count, e) : write_zeros(w, f, half, e)) && good;
    }
    return good;
}

bool weights_write(Trainer *t, SafeWriter *w, Error *e)
{
    const Params *p = &t->model.params;
    bool good = true;
    for (int i = 0; i < p->count; i++) {
        FileTensor f = weights_tensor(t->config, &p->list[i]);
        if (!is_known(p, t->config, i, &f))
            good = write_tensor(t, w, &f, is_half(&p->list[i]), e) && good;
    }
    return good;
}

// ---- reading ----------------------------------------------------------------------------------------------

char *name_in_file(const SafeTensors *st, const char *name)
{
    char *prefixed = format_string("_orig_mod.%s", name);
    if (!safetensors_find(st, name) && safetensors_find(st, prefixed))
        return prefixed;
    free(prefixed);
    return xstrdup(name);
}

// In place, from the end of a buffer of n floats or n bf16 to its start or the other way: no second buffer.
static void widen(void *buffer, int64_t n)
{
    float *to = buffer;
    bf16 *from = buffer;
    for (int64_t i = n - 1; i >= 0; i--)
        to[i] = bf16_to_float(from[i]);
}

static void narrow(void *buffer, int64_t n)
{
    bf16 *to = buffer;
    float *from = buffer;
    for (int64_t i = 0; i < n; i++)
        to[i] = float_to_bf16(from[i]);
}

bool read_elements(const SafeTensors *st, const char *name, int64_t first, int64_t count, bool half,
                   void *host, Error *e)
{
    bool file_half = safetensors_find(st, name)->dtype == ST_BF16, device_half = element_bytes(half) == 2;
    int64_t size = file_half ? 2 : 4;
    if (!safetensors_read_part(st, name, first * size, host, (size_t)(count * size), e))
        return false;
    if (file_half && !device_half)
        widen(host, count);
    if (!file_half && device_half)
        narrow(host, count);
    return true;
}

// Foreign files pad vectors to the number of their ranks; what is missing is as at the start.
static bool read_vector(const Trainer *t, const SafeTensors *st, const Param *a, const char *name,
                        float *host, Error *e)
{
    const TensorInfo *info = safetensors_find(st, name);
    int least = a->spec->file.least;
    int64_t n = info && info->ndim ? info->shape[info->ndim - 1] : 0, most = param_elements(a);
    if (!info || info->dtype != ST_F32 || info->bytes != n * 4 || n < least || n > most)
        return error_set(e, "tensor %s: expected F32 with %d to %d values, found %lld bytes", a->name, least,
                         (int)most, info ? (long long)info->bytes : 0);
    param_init_runs(a, t->config, host);
    return safetensors_read(st, name, host, (size_t)info->bytes, e);
}

// Others pad banks to the number of their ranks, or not at all: the first extent is as large as it must be,
// or larger.
static bool check_tensor(const Trainer *t, const SafeTensors *st, const FileTensor *f, const char *name,
                         const Param *a, Error *e)
{
    bool shared = f->matrices > a->matrices;
    int64_t shape[FILE_DIMS];
    memcpy(shape, f->shape, sizeof shape);
    if (shared)
        shape[0] = -1;
    if (!safetensors_expect(st, name, ST_BF16 | ST_F32, f->ndim, shape, e))
        return false;
    int64_t found = shared ? safetensors_find(st, name)->shape[0] : 0;
    int64_t needed = shared ? ceil_div((a->file_first + a->matrices) * f->shape[0], f->matrices) : 0;
    if (found < needed)
        return error_set(e, "tensor %s: its first extent is %lld, but the network of preset %s needs %lld",
                         name, (long long)found, t->config->preset, (long long)needed);
    return true;
}

// A parameter as the device stores it.  host (elements, as floats) out, work (the same)
static bool read_param(const Trainer *t, const SafeTensors *st, const Param *a, void *host, void *work,
                       Error *e)
{
    FileTensor f = weights_tensor(t->config, a);
    char *name = name_in_file(st, f.name);
    bool turned = a->spec->file.transposed, signs = a->spec->storage == STORE_SIGNS, good;
    if (a->spec->file.least)
        good = read_vector(t, st, a, name, host, e);
    else
        good = check_tensor(t, st, &f, name, a, e) &&
               read_elements(st, name, a->file_first * f.matrix, param_elements(a), is_half(a),
                             turned || signs ? work : host, e);
    if (good && turned)
        transpose(host, work, element_bytes(is_half(a)), a->cols, a->rows, a->matrices);
    if (good && signs && !values_to_signs(host, work, a))
        good = error_set(e, "tensor %s: holds other values than 1 and -1", name);
    free(name);
    return good;
}

// One that is read where another one is: both must be the same.
static bool check_tied(const Trainer *t, const SafeTensors *st, const Param *a, void *host, void *work,
                       Error *e)
{
    const Param *to = param_now(&t->model.params, a);
    size_t bytes = (size_t)param_stored(a) * param_element_size(a);
    void *other = xcalloc((size_t)param_elements(a), sizeof(float));
    bool good = read_param(t, st, a, host, work, e) && read_param(t, st, to, other, work, e);
    if (good && memcmp(host, other, bytes) != 0)
        good = error_set(e,
                         "tensor %s: differs from %s, and both are one until step %d is done; give a file "
                         "in which they are equal, or --resume a checkpoint of a later step",
                         a->name, to->name, t->model.params.last_tied);
    free(other);
    return good;
}

bool weights_read(Trainer *t, const SafeTensors *st, Error *e)
{
    const Params *p = &t->model.params;
    bool good = true;
    int64_t most = 0;
    for (int i = 0; i < p->count; i++)
        most = max_i64(most, param_elements(&p->list[i]));
    // Ordinary memory: most parameters touch a part of it, and to pin it takes longer than to copy from it.
    void *host = xcalloc((size_t)most, sizeof(float)), *work = xcalloc((size_t)most, sizeof(float));
    for (int i = 0; i < p->count && good; i++) {
        const Param *a = &p->list[i];
        if (param_now(p, a) != a) {
            good = check_tied(t, st, a, host, work, e);
            continue;
        }
        good = read_param(t, st, a, host, work, e);
        if (good)
            copy_to_device(t->stream, param_data(p, a), host,
                           (size_t)param_stored(a) * param_element_size(a));
        stream_synchronize(t->stream);
    }
    free(host);
    free(work);
    if (good)
        params_round(p, t->stream);
    return good;
}
