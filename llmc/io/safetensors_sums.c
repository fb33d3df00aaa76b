#include "llmc/io/safetensors_sums.h"
#include "llmc/base/crc32c.h"
#include <stdlib.h>
#include <string.h>

// Sorted and without spaces, so that another program may write the same header in another way.
uint32_t header_sum(const json_t *header)
{
    json_t *copy = json_deep_copy(header), *value;
    const char *name;
    json_object_foreach(copy, name, value)
    {
        if (strcmp(name, "__metadata__") != 0)
            json_object_del(value, "data_offsets");
    }
    json_object_del(json_object_get(copy, "__metadata__"), SUM_HEADER_KEY);
    char *text = json_dumps(copy, JSON_COMPACT | JSON_SORT_KEYS);
    if (!text)
        fatal(EXIT_BAD_INPUT, "out of host memory for a header of safetensors");
    uint32_t sum = crc32c(0, text, strlen(text));
    free(text);
    json_decref(copy);
    return sum;
}

static bool all_digits(const char *text, int64_t count)
{
    return (int64_t)strlen(text) == count && (int64_t)strspn(text, "0123456789abcdef") == count;
}

uint32_t block_sum(const char *digits, int64_t index)
{
    char one[SUM_DIGITS + 1] = "";
    memcpy(one, digits + SUM_DIGITS * index, SUM_DIGITS);
    return (uint32_t)strtoul(one, NULL, 16);
}

static const char *metadata_text(const json_t *header, const char *key)
{
    return json_string_value(json_object_get(json_object_get(header, "__metadata__"), key));
}

bool check_header_sums(const json_t *header, const TensorInfo *tensors, int count, int64_t *block, Error *e)
{
    const char *sum = metadata_text(header, SUM_HEADER_KEY), *size = metadata_text(header, SUM_BLOCK_KEY);
    *block = 0;
    if (!sum)
        return !size || error_set(e, "the header has lost its checksum");
    if (!all_digits(sum, SUM_DIGITS) || block_sum(sum, 0) != header_sum(header))
        return error_set(e, "the header does not have its checksum");
    *block = size ? strtoll(size, NULL, 10) : 0;
    if (*block < 1 || *block > 1 << 30)
        return error_set(e, "checksums of blocks of '%.20s' bytes", size ? size : "");
    for (int i = 0; i < count; i++) {
        char *key = format_string(SUM_PREFIX "%s", tensors[i].name);
        const char *digits = metadata_text(header, key);
        free(key);
        if (!digits || !all_digits(digits, SUM_DIGITS * ceil_div(tensors[i].bytes, *block)))
            return error_set(e, "a tensor has no checksums");
    }
    return true;
}
