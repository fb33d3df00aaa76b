// Checksums of safetensors files, for the reader and the writer: see safetensors.h.
#pragma once
#include "llmc/io/safetensors.h"
#include <jansson.h>

enum { SUM_BLOCK = 1 << 20, SUM_DIGITS = 8 };
#define SUM_HEADER_KEY "crc32c"
#define SUM_BLOCK_KEY "crc32c.block"
#define SUM_PREFIX "crc32c."

// Of all names, dtypes, shapes and metadata of a header but SUM_HEADER_KEY.
uint32_t header_sum(const json_t *header);

// Whether the metadata have what the checksums of these tensors need, and the header its own. *block: bytes
// of a block, 0 in a file without checksums.
//   tensors (count) TensorInfo in
// Error: a line about the header, without the file's name.
bool check_header_sums(const json_t *header, const TensorInfo *tensors, int count, int64_t *block, Error *e);

// The checksum of block `index` of a tensor, from a text that check_header_sums has passed.
uint32_t block_sum(const char *digits, int64_t index);
