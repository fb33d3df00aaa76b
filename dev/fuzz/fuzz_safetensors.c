// Any bytes as a safetensors file: the reader refuses them with one line, or everything it then says about
// them holds.
#include "llmc/io/safetensors.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define REQUIRE(condition) \
    if (!(condition)) { \
        fprintf(stderr, "violated: %s\n", #condition); \
        abort(); \
    }

static void check_tensor(const SafeTensors *st, const TensorInfo *t, int64_t file_bytes)
{
    Error e = {""};
    REQUIRE(safetensors_find(st, t->name) == t);
    REQUIRE(t->offset >= 8 && t->bytes >= 0 && t->bytes <= file_bytes - t->offset);
    REQUIRE(t->bytes % safetensors_dtype_size(t->dtype) == 0);
    REQUIRE(safetensors_expect(st, t->name, t->dtype, t->ndim, t->shape, &e));
    REQUIRE(!safetensors_expect(st, t->name, ~(unsigned)t->dtype, t->ndim, t->shape, &e) && e.text[0]);
    uint8_t *data = xcalloc((size_t)t->bytes, 1); // exactly as large as the tensor: a byte too many is seen
    REQUIRE(safetensors_read(st, t->name, data, (size_t)t->bytes, &e));
    REQUIRE(!safetensors_read(st, t->name, data, (size_t)t->bytes + 1, &e));
    free(data);
}

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// What a run without a corpus starts from: guessing this much JSON takes hours.
static const char example[] =
    "        "
    "{\"__metadata__\":{\"a\":\"b\"},\"v\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[0,4]},"
    "\"w\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[4,7]}}1234567";

// Mostly repairs the header's length (up to the last brace): otherwise few inputs would get beyond that first
// check.
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
    if (size <= 8 && max_size >= sizeof example - 1) {
        size = sizeof example - 1;
        memcpy(data, example, size);
    } else {
        size = LLVMFuzzerMutate(data, size, max_size);
    }
    const uint8_t *brace = size > 8 ? memrchr(data + 8, '}', size - 8) : NULL;
    if (!brace || seed % 8 == 0)
        return size;
    size_t length = (size_t)(brace + 1 - (data + 8));
    for (int i = 0; i < 8; i++)
        data[i] = (uint8_t)(length >> 8 * i);
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd = memfd_create("input", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    REQUIRE(fd >= 0 && write(fd, data, size) == (ssize_t)size);

    Error e = {""};
    SafeTensors *st = safetensors_open(path, &e);
    if (!st) {
        REQUIRE(strncmp(e.text, path, strlen(path)) == 0 && !strchr(e.text, '\n'));
    } else {
        int64_t tensor_bytes = 0;
        for (int i = 0; i < safetensors_count(st); i++) {
            check_tensor(st, safetensors_at(st, i), (int64_t)size);
            tensor_bytes += safetensors_at(st, i)->bytes;
        }
        REQUIRE(tensor_bytes <= (int64_t)size - 10); // the length and "{}"
        for (int i = 0; i < safetensors_metadata_count(st); i++)
            REQUIRE(safetensors_metadata(st, safetensors_metadata_key(st, i)));
        safetensors_close(st);
    }
    close(fd);
    return 0;
}
