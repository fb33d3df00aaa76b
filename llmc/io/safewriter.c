// The writing half of safetensors.h.
#include "llmc/base/crc32c.h"
#include "llmc/base/temporary.h"
#include "llmc/io/safetensors_sums.h"
#include "llmc/base/utf8.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    char *name; // owned
    SafeDtype dtype;
    int ndim;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t bytes, written;
    int64_t begin;  // from the start of the data
    uint32_t *sums; // (ceil(bytes / SUM_BLOCK)) of the blocks, as far as they are written; owned
} Declared;

struct SafeWriter {
    char *path;   // as the caller named it
    char *target; // the file behind it
    char *temp;
    int fd; // -1 once failed
    json_t *metadata;
    Declared *tensors; // (count) in the order of declaration
    int count, capacity;
    int64_t data_start; // 0: the header is not written yet
    Error first_error;  // of the file, once fd is -1
};

// The last failure of the system, kept as the writer's one error. The space of the unfinished file is given
// back at once.
static bool fail(SafeWriter *w, const char *doing, Error *e)
{
    int code = errno;
    const char *kept = access(w->path, F_OK) ? "" : "; an older file of this name is kept";
    bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
    size_t n = strlen(w->path);
    error_set(&w->first_error, "%s: cannot %s: %s; %s%s", n > 400 ? w->path + n - 400 : w->path, doing,
              strerror(code), full ? "make room or choose another folder" : "check the folder and its device",
              kept);
    if (w->fd >= 0) {
        close(w->fd);
        unlink(w->temp);
        w->fd = -1;
    }
    *e = w->first_error;
    return false;
}

static void writer_free(SafeWriter *w)
{
    for (int i = 0; i < w->count; i++) {
        free(w->tensors[i].name);
        free(w->tensors[i].sums);
    }
    free(w->tensors);
    json_decref(w->metadata);
    free(w->temp);
    free(w->target);
    free(w->path);
    free(w);
}

// The folder part of a path, owned by the caller.
static char *folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return xstrdup(".");
    return slash == path ? xstrdup("/") : format_string("%.*s", (int)(slash - path), path);
}

static bool is_name(const void *target, const char *name) { return !strcmp(name, target); }

static void remove_stale(const char *target)
{
    char *folder = folder_of(target);
    const char *slash = strrchr(target, '/');
    temporary_remove_stale(folder, is_name, slash ? slash + 1 : target);
    free(folder);
}

SafeWriter *safewriter_begin(const char *path, Error *e)
{
    SafeWriter *w = xcalloc(1, sizeof *w);
    char *resolved = realpath(path, NULL); // NULL for a file that is still to come
    w->path = xstrdup(path);
    w->target = resolved ? xstrdup(resolved) : xstrdup(path);
    free(resolved);
    w->temp = temporary_path(w->target);
    w->metadata = json_object();
    w->fd = -1;
    struct stat info;
    bool other = stat(w->target, &info) == 0 && !S_ISREG(info.st_mode);
    if (other) {
        error_set(e, "%s: is no regular file, so no checkpoint can be put there; choose another name",
                  w->path);
    } else {
        remove_stale(w->target);
        w->fd = open(w->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd < 0)
            fail(w, "create a file beside it", e);
    }
    if (w->fd >= 0)
        return w;
    writer_free(w);
    return NULL;
}

void safewriter_metadata(SafeWriter *w, const char *key, const char *value)
{
    assert(!w->data_start && "metadata comes before the data");
    size_t key_length, value_length, replaced;
    char *k = utf8_repair(key, strlen(key), &key_length,
                          &replaced); // both end with a NUL: they hold 1 byte more than 3 * len
    char *v = utf8_repair(value, strlen(value), &value_length, &replaced);
    json_object_set_new(w->metadata, k, json_stringn(v, value_length));
    free(k);
    free(v);
}

static Declared *find_declared(const SafeWriter *w, const char *name)
{
    for (int i = 0; i < w->count; i++)
        if (strcmp(w->tensors[i].name, name) == 0)
            return &w->tensors[i];
    return NULL;
}

void safewriter_declare(SafeWriter *w, const char *name, SafeDtype dtype, int ndim, const int64_t *shape)
{
    assert(!w->data_start && "declarations come before the data");
    assert(ndim >= 0 && ndim <= SAFETENSORS_MAX_DIMS && strcmp(name, "__metadata__") != 0 &&
           !find_declared(w, name));
    assert(utf8_valid_prefix(name, strlen(name)) == strlen(name));
    if (w->count == w->capacity) {
        w->capacity = 2 * w->capacity + 64;
        w->tensors = xrealloc(w->tensors, (size_t)w->capacity, sizeof *w->tensors);
    }
    Declared *t = &w->tensors[w->count++];
    *t = (Declared){.name = xstrdup(name),
                    .dtype = dtype,
                    .ndim = ndim,
                    .bytes = safetensors_dtype_size(dtype)};
    for (int i = 0; i < ndim; i++) {
        assert(shape[i] >= 0);
        t->shape[i] = shape[i];
        bool overflow = __builtin_mul_overflow(t->bytes, shape[i], &t->bytes);
        assert(!overflow);
        (void)overflow;
    }
    t->sums = xcalloc((size_t)ceil_div(t->bytes, SUM_BLOCK) + 1, sizeof *t->sums);
}

// Wide elements first: then every tensor starts at a multiple of its element size, which readers that map the
// file need.
static void lay_out(SafeWriter *w)
{
    int64_t at = 0;
    for (int size = 8; size >= 1; size /= 2) {
        for (int i = 0; i < w->count; i++) {
            Declared *t = &w->tensors[i];
            if (safetensors_dtype_size(t->dtype) != size)
                continue;
            t->begin = at;
            bool overflow = __builtin_add_overflow(at, t->bytes, &at);
            assert(!overflow && at < INT64_MAX / 2);
            (void)overflow; // room for the header in front
        }
    }
}

static json_t *describe(const Declared *t)
{
    json_t *object = json_object(), *shape = json_array(), *offsets = json_array();
    for (int i = 0; i < t->ndim; i++)
        json_array_append_new(shape, json_integer(t->shape[i]));
    json_array_append_new(offsets, json_integer(t->begin));
    json_array_append_new(offsets, json_integer(t->begin + t->bytes));
    json_object_set_new(object, "dtype", json_string(safetensors_dtype_name(t->dtype)));
    json_object_set_new(object, "shape", shape);
    json_object_set_new(object, "data_offsets", offsets);
    return object;
}

static bool pwrite_all(SafeWriter *w, const void *data, size_t bytes, int64_t offset, const char *doing,
                       Error *e)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = pwrite(w->fd, (const char *)data + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            errno = EIO; // cannot be, but must not loop
        if (n <= 0)
            return fail(w, doing, e);
        done += (size_t)n;
    }
    return true;
}

// Takes the next `bytes` of a tensor's data into its checksums.
static void add_to_sums(Declared *t, const char *data, size_t bytes)
{
    int64_t end = t->written + (int64_t)bytes;
    for (int64_t at = t->written, next; at < end; at = next) {
        int64_t block = at / SUM_BLOCK;
        next = min_i64((block + 1) * SUM_BLOCK, end);
        t->sums[block] = crc32c(t->sums[block], data + (at - t->written), (size_t)(next - at));
    }
}

// The checksums so far. Their digits take the same space before the data and after.
static void set_sums(SafeWriter *w)
{
    char block[24];
    snprintf(block, sizeof block, "%d", SUM_BLOCK);
    json_object_set_new(w->metadata, SUM_BLOCK_KEY, json_string(block));
    json_object_set_new(w->metadata, SUM_HEADER_KEY, json_string("00000000"));
    for (int i = 0; i < w->count; i++) {
        const Declared *t = &w->tensors[i];
        int64_t blocks = ceil_div(t->bytes, SUM_BLOCK);
        char *key = format_string(SUM_PREFIX "%s", t->name);
        char *digits = xcalloc((size_t)blocks * SUM_DIGITS + 1, 1);
        for (int64_t k = 0; k < blocks; k++)
            snprintf(digits + k * SUM_DIGITS, SUM_DIGITS + 1, "%08x", t->sums[k]);
        json_object_set_new(w->metadata, key, json_string(digits));
        free(digits);
        free(key);
    }
}

// At first without the checksums of the data, which are still to come, and again with them.
static bool write_header(SafeWriter *w, Error *e)
{
    set_sums(w);
    json_t *header = json_object();
    json_object_set(header, "__metadata__", w->metadata);
    for (int size = 8; size >= 1; size /= 2) // in data order, as other writers have it
        for (int i = 0; i < w->count; i++)
            if (safetensors_dtype_size(w->tensors[i].dtype) == size)
                json_object_set_new(header, w->tensors[i].name, describe(&w->tensors[i]));

    char sum[SUM_DIGITS + 1];
    snprintf(sum, sizeof sum, "%08x", header_sum(header));
    json_object_set_new(w->metadata, SUM_HEADER_KEY, json_string(sum));
    char *json = json_dumps(header, JSON_COMPACT);
    if (!json)
        fatal(EXIT_BAD_INPUT, "out of host memory for the header of %s", w->path);
    size_t length = strlen(json);
    size_t padded = (size_t)round_up((int64_t)length, 8); // the data starts aligned
    assert(padded <= SAFETENSORS_MAX_HEADER);
    char *block = xcalloc(8 + padded, 1);
    for (int i = 0; i < 8; i++)
        block[i] = (char)(padded >> 8 * i);
    memset(block + 8, ' ', padded);
    memcpy(block + 8, json, length);
    bool good = pwrite_all(w, block, 8 + padded, 0, "write the header", e);
    free(block);
    free(json);
    json_decref(header);
    assert(!w->data_start || w->data_start == 8 + (int64_t)padded);
    w->data_start = 8 + (int64_t)padded;
    return good;
}

static bool begin_data(SafeWriter *w, Error *e)
{
    if (w->data_start)
        return true;
    lay_out(w);
    return write_header(w, e);
}

bool safewriter_write(SafeWriter *w, const char *name, const void *data, size_t bytes, Error *e)
{
    if (w->fd < 0) {
        *e = w->first_error;
        return false;
    }
    if (!begin_data(w, e))
        return false;
    Declared *t = find_declared(w, name);
    assert(t && bytes <= (uint64_t)(t->bytes - t->written));
    int64_t offset = w->data_start + t->begin + t->written;
    add_to_sums(t, data, bytes);
    t->written += (int64_t)bytes;
    return pwrite_all(w, data, bytes, offset, "write", e);
}

// Makes the rename durable. Not every file system can sync a folder; those answer EINVAL and have nothing to
// be synced.
static bool sync_folder(const char *target)
{
    char *folder = folder_of(target);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    int code = errno;
    if (fd >= 0)
        close(fd);
    free(folder);
    errno = code;
    return good;
}

static bool finish(SafeWriter *w, Error *e)
{
    if (w->fd < 0) {
        *e = w->first_error;
        return false;
    }
    if (!begin_data(w, e))
        return false;
    for (int i = 0; i < w->count; i++)
        assert(w->tensors[i].written == w->tensors[i].bytes);
    if (!write_header(w, e))
        return false;
    if (fsync(w->fd) != 0)
        return fail(w, "bring the data to the disk", e);
    int fd = w->fd;
    w->fd = -1;
    if (close(fd) != 0 || rename(w->temp, w->target) != 0) {
        int code = errno;
        unlink(w->temp);
        errno = code;
        return fail(w, "put the finished file in place", e);
    }
    if (sync_folder(w->target))
        return true;
    return error_set(e, "%s: is written, but may not survive a power failure: cannot sync its folder: %s",
                     w->path, strerror(errno));
}

bool safewriter_commit(SafeWriter *w, Error *e)
{
    bool good = finish(w, e);
    writer_free(w);
    return good;
}
