#include "llmc/io/safetensors.h"
#include "llmc/base/crc32c.h"
#include "llmc/io/safetensors_sums.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char metadata_name[] = "__metadata__";

static const struct {
    const char *name;
    SafeDtype dtype;
    int size;
} dtype_table[] = {
    {"BOOL", ST_BOOL, 1},       {"U8", ST_U8, 1},   {"I8", ST_I8, 1},   {"F8_E4M3", ST_F8_E4M3, 1},
    {"F8_E5M2", ST_F8_E5M2, 1}, {"U16", ST_U16, 2}, {"I16", ST_I16, 2}, {"F16", ST_F16, 2},
    {"BF16", ST_BF16, 2},       {"U32", ST_U32, 4}, {"I32", ST_I32, 4}, {"F32", ST_F32, 4},
    {"U64", ST_U64, 8},         {"I64", ST_I64, 8}, {"F64", ST_F64, 8},
};
enum { NUM_DTYPES = sizeof dtype_table / sizeof *dtype_table };

static int dtype_row(SafeDtype dtype)
{
    for (int i = 0; i < NUM_DTYPES; i++)
        if (dtype_table[i].dtype == dtype)
            return i;
    assert(!"a set of dtypes where one was meant");
    return 0;
}

const char *safetensors_dtype_name(SafeDtype dtype) { return dtype_table[dtype_row(dtype)].name; }
int safetensors_dtype_size(SafeDtype dtype) { return dtype_table[dtype_row(dtype)].size; }

// ---- text for messages ------------------------------------------------------------------------------------
// Names come from files that anyone may have made: a message stays one line, and short enough that its end is
// not cut off.

typedef struct {
    char text[200];
} Shown;

static Shown shown(const char *s)
{
    Shown out;
    size_t n = 0;
    for (; s[n] && n < sizeof out.text - 4; n++)
        out.text[n] = iscntrl((unsigned char)s[n]) ? '?' : s[n];
    strcpy(out.text + n, s[n] ? "..." : "");
    return out;
}

// The end of a very long path tells more than its start.
static const char *shown_path(const char *path)
{
    size_t n = strlen(path);
    return n > 400 ? path + n - 400 : path;
}

static Shown shown_shape(int ndim, const int64_t *shape)
{
    Shown out = {"("};
    size_t n = 1;
    for (int i = 0; i < ndim; i++) {
        const char *comma = i ? ", " : "";
        n += (size_t)snprintf(out.text + n, sizeof out.text - n, shape[i] < 0 ? "%sany" : "%s%lld", comma,
                              (long long)shape[i]);
    }
    snprintf(out.text + n, sizeof out.text - n, ")");
    return out;
}

// Bytes of a tensor; -1 when the number does not fit, or an extent is negative.
static int64_t tensor_bytes(SafeDtype dtype, int ndim, const int64_t *shape)
{
    int64_t bytes = safetensors_dtype_size(dtype);
    bool overflow = false, empty = false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0)
            return -1;
        empty |= shape[i] == 0;
        if (shape[i])
            overflow |= __builtin_mul_overflow(bytes, shape[i], &bytes);
    }
    return overflow ? -1 : empty ? 0 : bytes;
}

// ---- reader -----------------------------------------------------------------------------------------------

struct SafeTensors {
    char *path;
    int fd;
    int64_t data_start, file_bytes;
    int64_t sum_block; // bytes that have a checksum together; 0: none have
    json_t *header;    // owns all names and metadata texts
    json_t *metadata;
    TensorInfo *tensors; // (count) in data order
    int count;
};

static bool pread_all(const SafeTensors *st, void *dst, size_t bytes, int64_t offset, const char *what,
                      Error *e)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pread(st->fd, (char *)dst + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return error_set(e, "%s: cannot read %s: %s", shown_path(st->path), what, strerror(errno));
        if (n == 0)
            return error_set(e,
                             "%s: ends in the middle of %s: %zu of %zu bytes are there; use a complete copy "
                             "of the file, or another",
                             shown_path(st->path), what, done, bytes);
        done += (size_t)n;
    }
    return true;
}

static bool open_file(SafeTensors *st, Error *e)
{
    // O_NONBLOCK: opening a pipe by mistake must not hang.
    st->fd = open(st->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (st->fd < 0 || fstat(st->fd, &info) != 0)
        return error_set(e, "%s: cannot open: %s; check the path given for the checkpoint",
                         shown_path(st->path), strerror(errno));
    if (!S_ISREG(info.st_mode))
        return error_set(e, "%s: not a regular file; name a .safetensors file", shown_path(st->path));
    st->file_bytes = info.st_size;
    return true;
}

// Returns the header's text, NUL-terminated, owned by the caller.
static char *read_header(SafeTensors *st, size_t *length, Error *e)
{
    uint8_t prefix[8];
    const char *path = shown_path(st->path);
    if (st->file_bytes < (int64_t)sizeof prefix) {
        error_set(
            e,
            "%s: %lld bytes are too few for a safetensors file; use a complete copy of the file, or another",
            path, (long long)st->file_bytes);
        return NULL;
    }
    if (!pread_all(st, prefix, sizeof prefix, 0, "the header's length", e))
        return NULL;
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--)
        n = n << 8 | prefix[i];
    if (n > SAFETENSORS_MAX_HEADER) {
        error_set(
            e,
            "%s: a header of %llu bytes is beyond the limit of %d: not a safetensors file, or a damaged one",
            path, (unsigned long long)n, SAFETENSORS_MAX_HEADER);
        return NULL;
    }
    if ((int64_t)n > st->file_bytes - 8) {
        error_set(e,
                  "%s: a header of %llu bytes does not fit into a file of %lld: truncated, or not a "
                  "safetensors file",
                  path, (unsigned long long)n, (long long)st->file_bytes);
        return NULL;
    }
    char *text = xcalloc(n + 1, 1);
    if (!pread_all(st, text, n, 8, "the header", e)) {
        free(text);
        return NULL;
    }
    st->data_start = 8 + (int64_t)n;
    *length = n;
    return text;
}

static bool parse_header(SafeTensors *st, const char *text, size_t length, Error *e)
{
    const char *path = shown_path(st->path);
    if (length == 0 || text[0] != '{')
        return error_set(e, "%s: the header is no JSON object: not a safetensors file, or a damaged one",
                         path);
    json_error_t problem;
    st->header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &problem); // refuses NUL characters, too
    if (!st->header)
        return error_set(e, "%s: the header is no valid JSON at byte %d (%s); the file is damaged", path,
                         problem.position, shown(problem.text).text);
    return true;
}

static bool parse_metadata(SafeTensors *st, json_t *object, Error *e)
{
    const char *path = shown_path(st->path), *key;
    json_t *value;
    if (!json_is_object(object))
        return error_set(e, "%s: %s is no object of texts; the file is damaged", path, metadata_name);
    json_object_foreach(object, key, value)
    {
        if (!json_is_string(value))
            return error_set(e, "%s: metadata '%s' is no text; the file is damaged", path, shown(key).text);
    }
    st->metadata = object;
    return true;
}

// False unless `value` is an integer >= 0. The largest int64 cannot be part of a file that exists.
static bool get_count(const json_t *value, int64_t *out)
{
    if (!json_is_integer(value))
        return false;
    *out = json_integer_value(value);
    return *out >= 0 && *out < INT64_MAX;
}

static bool parse_tensor(const SafeTensors *st, const char *name, json_t *object, TensorInfo *t, Error *e)
{
    const char *path = shown_path(st->path);
    Shown n = shown(name);
    json_t *dtype = json_object_get(object, "dtype"), *shape = json_object_get(object, "shape");
    json_t *offsets = json_object_get(object, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) ||
        json_object_size(object) != 3)
        return error_set(
            e, "%s: tensor '%s' is not described by dtype, shape and data_offsets; the file is damaged", path,
            n.text);

    t->name = name;
    const char *type = json_string_value(dtype);
    for (int i = 0; i < NUM_DTYPES; i++)
        if (strcmp(type, dtype_table[i].name) == 0)
            t->dtype = dtype_table[i].dtype;
    if (!t->dtype)
        return error_set(
            e, "%s: tensor '%s' has dtype '%.20s', which is not known here; convert it to F32 or BF16", path,
            n.text, shown(type).text);

    size_t ndim = json_array_size(shape);
    if (ndim > SAFETENSORS_MAX_DIMS)
        return error_set(e, "%s: tensor '%s' has %zu dimensions; at most %d are read", path, n.text, ndim,
                         SAFETENSORS_MAX_DIMS);
    t->ndim = (int)ndim;
    for (size_t i = 0; i < ndim; i++)
        if (!get_count(json_array_get(shape, i), &t->shape[i]))
            return error_set(e,
                             "%s: tensor '%s': extent %zu of its shape is no valid size; the file is damaged",
                             path, n.text, i);

    int64_t begin, end, data_bytes = st->file_bytes - st->data_start;
    if (json_array_size(offsets) != 2 || !get_count(json_array_get(offsets, 0), &begin) ||
        !get_count(json_array_get(offsets, 1), &end) || begin > end)
        return error_set(e, "%s: tensor '%s' has no valid data_offsets; the file is damaged", path, n.text);
    t->bytes = tensor_bytes(t->dtype, t->ndim, t->shape);
    if (t->bytes != end - begin)
        return error_set(
            e, "%s: tensor '%s' has %lld bytes of data, but %s %s does not take as many; the file is damaged",
            path, n.text, (long long)(end - begin), type, shown_shape(t->ndim, t->shape).text);
    if (end > data_bytes)
        return error_set(e,
                         "%s: tensor '%s' ends at byte %lld of the data, but the file has only %lld; use a "
                         "complete copy of the file, or another",
                         path, n.text, (long long)end, (long long)data_bytes);
    t->offset = st->data_start + begin;
    return true;
}

static int compare_offsets(const void *a, const void *b)
{
    const TensorInfo *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); // empty ones first
}

static bool check_layout(const SafeTensors *st, Error *e)
{
    const char *path = shown_path(st->path);
    int64_t at = st->data_start;
    for (int i = 0; i < st->count; i++) {
        const TensorInfo *t = &st->tensors[i];
        if (t->offset < at)
            return error_set(e, "%s: the data of tensor '%s' overlaps that of '%s'; the file is damaged",
                             path, shown(t->name).text, shown(st->tensors[i - 1].name).text);
        if (t->offset > at)
            return error_set(
                e, "%s: %lld bytes before the data of tensor '%s' belong to no tensor; the file is damaged",
                path, (long long)(t->offset - at), shown(t->name).text);
        at += t->bytes;
    }
    if (at == st->file_bytes)
        return true;
    return error_set(e, "%s: %lld bytes after the last tensor belong to none; the file is damaged", path,
                     (long long)(st->file_bytes - at));
}

static bool load_header(SafeTensors *st, Error *e)
{
    if (!open_file(st, e))
        return false;
    size_t length = 0;
    char *text = read_header(st, &length, e);
    bool good = text && parse_header(st, text, length, e);
    free(text);
    if (!good)
        return false;

    const char *name;
    json_t *value;
    st->tensors = xcalloc(json_object_size(st->header), sizeof *st->tensors);
    json_object_foreach(st->header, name, value)
    {
        if (strcmp(name, metadata_name) == 0) {
            if (!parse_metadata(st, value, e))
                return false;
        } else if (!parse_tensor(st, name, value, &st->tensors[st->count++], e)) {
            return false;
        }
    }
    qsort(st->tensors, (size_t)st->count, sizeof *st->tensors, compare_offsets);
    Error sub;
    if (!check_layout(st, e))
        return false;
    if (check_header_sums(st->header, st->tensors, st->count, &st->sum_block, &sub))
        return true;
    return error_set(e,
                     "%s: %s; the file is damaged, or was changed by a program that left its checksums alone",
                     shown_path(st->path), sub.text);
}

SafeTensors *safetensors_open(const char *path, Error *e)
{
    SafeTensors *st = xcalloc(1, sizeof *st);
    st->path = xstrdup(path);
    st->fd = -1;
    if (load_header(st, e))
        return st;
    safetensors_close(st);
    return NULL;
}

void safetensors_close(SafeTensors *st)
{
    if (!st)
        return;
    if (st->fd >= 0)
        close(st->fd);
    json_decref(st->header);
    free(st->tensors);
    free(st->path);
    free(st);
}

int safetensors_count(const SafeTensors *st) { return st->count; }

const TensorInfo *safetensors_at(const SafeTensors *st, int index)
{
    assert(index >= 0 && index < st->count);
    return &st->tensors[index];
}

const TensorInfo *safetensors_find(const SafeTensors *st, const char *name)
{
    for (int i = 0; i < st->count; i++)
        if (strcmp(st->tensors[i].name, name) == 0)
            return &st->tensors[i];
    return NULL;
}

static bool error_missing(const SafeTensors *st, const char *name, Error *e)
{
    return error_set(e, "%s: there is no tensor '%s' among its %d; is it a checkpoint of another model?",
                     shown_path(st->path), shown(name).text, st->count);
}

// Bytes [first, end) of a tensor, in whole blocks. Those that are needed in part go through a buffer.
static bool read_checked(const SafeTensors *st, const TensorInfo *t, int64_t first, int64_t end, char *dst,
                         const char *what, Error *e)
{
    char *key = format_string(SUM_PREFIX "%s", t->name), *edge = NULL;
    const char *digits = safetensors_metadata(st, key);
    bool good = true;
    for (int64_t at = first, next; at < end && good; at = next) {
        int64_t index = at / st->sum_block, begin = index * st->sum_block;
        int64_t size = min_i64(st->sum_block, t->bytes - begin);
        next = min_i64(begin + size, end);
        bool whole = at == begin && next == begin + size;
        if (!whole && !edge)
            edge = xcalloc((size_t)st->sum_block, 1);
        char *to = whole ? dst + (at - first) : edge;
        good = pread_all(st, to, (size_t)size, t->offset + begin, what, e);
        if (good && crc32c(0, to, (size_t)size) != block_sum(digits, index))
            good = error_set(
                e,
                "%s: %s does not have its checksum: the file is damaged; use an intact copy, or another "
                "checkpoint",
                shown_path(st->path), what);
        if (good && !whole)
            memcpy(dst + (at - first), edge + (at - begin), (size_t)(next - at));
    }
    free(edge);
    free(key);
    return good;
}

bool safetensors_read_part(const SafeTensors *st, const char *name, int64_t first, void *dst, size_t bytes,
                           Error *e)
{
    const TensorInfo *t = safetensors_find(st, name);
    if (!t)
        return error_missing(st, name, e);
    Shown n = shown(name);
    if (first < 0 || first > t->bytes || bytes > (uint64_t)(t->bytes - first))
        return error_set(e, "%s: tensor '%s' has %lld bytes; %zu from byte %lld on are not inside it",
                         shown_path(st->path), n.text, (long long)t->bytes, bytes, (long long)first);
    char what[sizeof n.text + 16];
    snprintf(what, sizeof what, "tensor '%s'", n.text);
    if (st->sum_block)
        return read_checked(st, t, first, first + (int64_t)bytes, dst, what, e);
    return pread_all(st, dst, bytes, t->offset + first, what, e);
}

bool safetensors_read(const SafeTensors *st, const char *name, void *dst, size_t bytes, Error *e)
{
    const TensorInfo *t = safetensors_find(st, name);
    if (t && bytes != (uint64_t)t->bytes)
        return error_set(e, "%s: tensor '%s' has %lld bytes where %zu are needed: %s %s in the file",
                         shown_path(st->path), shown(name).text, (long long)t->bytes, bytes,
                         safetensors_dtype_name(t->dtype), shown_shape(t->ndim, t->shape).text);
    return safetensors_read_part(st, name, 0, dst, bytes, e);
}

bool safetensors_expect(const SafeTensors *st, const char *name, unsigned dtypes, int ndim,
                        const int64_t *shape, Error *e)
{
    assert(ndim >= 0 && ndim <= SAFETENSORS_MAX_DIMS);
    const TensorInfo *t = safetensors_find(st, name);
    if (!t)
        return error_missing(st, name, e);
    bool same = (dtypes & t->dtype) != 0 && t->ndim == ndim;
    for (int i = 0; i < ndim && same; i++)
        same = shape[i] < 0 || shape[i] == t->shape[i];
    if (same)
        return true;

    char wanted[160] = "";
    for (int i = 0, n = 0; i < NUM_DTYPES; i++)
        if (dtypes & dtype_table[i].dtype)
            n +=
                snprintf(wanted + n, sizeof wanted - (size_t)n, "%s%s", n ? " or " : "", dtype_table[i].name);
    return error_set(e, "%s: tensor '%s': expected %s %s, found %s %s; is it a checkpoint of another model?",
                     shown_path(st->path), shown(name).text, wanted, shown_shape(ndim, shape).text,
                     safetensors_dtype_name(t->dtype), shown_shape(t->ndim, t->shape).text);
}

bool safetensors_has_checksums(const SafeTensors *st) { return st->sum_block > 0; }

const char *safetensors_metadata(const SafeTensors *st, const char *key)
{
    return json_string_value(json_object_get(st->metadata, key));
}

int safetensors_metadata_count(const SafeTensors *st) { return (int)json_object_size(st->metadata); }

const char *safetensors_metadata_key(const SafeTensors *st, int index)
{
    assert(index >= 0 && index < safetensors_metadata_count(st));
    void *at = json_object_iter(st->metadata);
    while (index-- > 0)
        at = json_object_iter_next(st->metadata, at);
    return json_object_iter_key(at);
}
