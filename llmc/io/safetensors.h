// The safetensors container: named tensors and text metadata in one file, read by every framework.
//
// File: uint64 little-endian length of the header, the header, the data. The header is one JSON object,
//   {"__metadata__": {"key": "text", ...}, "name": {"dtype": "BF16", "shape": [rows, cols], "data_offsets":
//   [begin, end]}, ...}
// padded with spaces; offsets count from the start of the data, and the tensors fill the data without gaps or
// overlaps.
//
// Checksums: our writer adds to the metadata
//   "crc32c.block"   bytes of a block of a tensor's data, in decimal
//   "crc32c.<name>"  for every tensor: the CRC-32C of each of its blocks, 8 hexadecimal digits for each
//   "crc32c"         that of all else in the header but the offsets, whatever the order and the spaces
// In blocks, so that whoever reads a part of a tensor can check that part. Files without them are read
// unchecked.
//
// Format: https://github.com/huggingface/safetensors, README. Numbers are little-endian, as on every machine
// we run on.
#pragma once
#include "llmc/base/common.h"

// One bit each, so that a set of dtypes is an or of them.
typedef enum {
    ST_BOOL = 1 << 0,
    ST_U8 = 1 << 1,
    ST_I8 = 1 << 2,
    ST_F8_E4M3 = 1 << 3,
    ST_F8_E5M2 = 1 << 4,
    ST_U16 = 1 << 5,
    ST_I16 = 1 << 6,
    ST_F16 = 1 << 7,
    ST_BF16 = 1 << 8,
    ST_U32 = 1 << 9,
    ST_I32 = 1 << 10,
    ST_F32 = 1 << 11,
    ST_U64 = 1 << 12,
    ST_I64 = 1 << 13,
    ST_F64 = 1 << 14,
} SafeDtype;

enum {
    SAFETENSORS_MAX_DIMS = 8,
    SAFETENSORS_MAX_HEADER = 100000000
}; // bytes; the limit of the other readers too

// The name in the format ("BF16") and the bytes of an element. One dtype, not a set.
const char *safetensors_dtype_name(SafeDtype dtype);
int safetensors_dtype_size(SafeDtype dtype);

// ---- reading ----------------------------------------------------------------------------------------------

typedef struct {
    const char *name; // UTF-8, owned by the reader
    SafeDtype dtype;
    int ndim; // 0: a single number
    int64_t shape[SAFETENSORS_MAX_DIMS];
    int64_t offset; // bytes from the start of the file
    int64_t bytes;  // product of shape * size of an element; may be 0
} TensorInfo;

typedef struct SafeTensors SafeTensors;

// Opens a file and checks the whole header; no data is read. NULL with an Error for anything but a
// well-formed file: missing, unreadable, not a regular file, truncated, header too long or no JSON object,
// two members of one name, unknown dtype, bad shape, offsets that overlap, leave gaps, end outside the file
// or disagree with dtype and shape; and where there are checksums, a header that is not the one they were
// made for. Close with safetensors_close.
SafeTensors *safetensors_open(const char *path, Error *e);
void safetensors_close(SafeTensors *st); // NULL: nothing

// Tensors in the order of their data. Index 0 <= i < count; by name: NULL when there is none. Owned by the
// reader.
int safetensors_count(const SafeTensors *st);
const TensorInfo *safetensors_at(const SafeTensors *st, int index);
const TensorInfo *safetensors_find(const SafeTensors *st, const char *name);

// Reads a whole tensor.
//   dst (bytes) any dtype  out, owned by the caller; bytes must be the tensor's own size
// Error: no such tensor, another size, data that do not have their checksum, file shorter than when it was
// opened, the system's own words on a failed read.
bool safetensors_read(const SafeTensors *st, const char *name, void *dst, size_t bytes, Error *e);

// The same for bytes [first, first + bytes) of a tensor, which must lie inside it. Where there are checksums,
// whole blocks of 1 MiB are read: parts should not be much smaller.
bool safetensors_read_part(const SafeTensors *st, const char *name, int64_t first, void *dst, size_t bytes,
                           Error *e);

// Demands a tensor with one of `dtypes` (an or of SafeDtype) and exactly this shape.
//   shape (ndim) int64  in; -1 stands for any extent
// The Error names file, tensor, expected and found dtype and shape.
bool safetensors_expect(const SafeTensors *st, const char *name, unsigned dtypes, int ndim,
                        const int64_t *shape, Error *e);

bool safetensors_has_checksums(const SafeTensors *st);

// Metadata: value of a key, NULL when there is none; keys in file order, 0 <= index < count. Owned by the
// reader.
const char *safetensors_metadata(const SafeTensors *st, const char *key);
int safetensors_metadata_count(const SafeTensors *st);
const char *safetensors_metadata_key(const SafeTensors *st, int index);

// ---- writing ----------------------------------------------------------------------------------------------
// First all metadata and declarations, then the data in any order, then commit, which adds the checksums.
// Until commit renames the finished and synced temporary file (<path>.tmp.<pid>, same folder) over `path`, an
// older file there stays as it is, whatever kills the process. Errors stick: after the first one the
// temporary file is gone and every later call returns false with the same line, so a caller may write
// everything and look at commit only. One writer per path at a time.

typedef struct SafeWriter SafeWriter;

// Creates the temporary file, and removes those that dead processes left for this path. A path that is a
// symbolic link stays one: the file it names is replaced. NULL with an Error when the folder is missing or
// not writable, or path is no file.
SafeWriter *safewriter_begin(const char *path, Error *e);

// key, value: text, copied; key not "crc32c" or "crc32c.*". Bytes that are not UTF-8 (they may come from file
// names) are stored as U+FFFD.
void safewriter_metadata(SafeWriter *w, const char *key, const char *value);

// name: UTF-8, unused before, not "__metadata__", copied.  shape (ndim) int64, extents >= 0, ndim <=
// SAFETENSORS_MAX_DIMS
void safewriter_declare(SafeWriter *w, const char *name, SafeDtype dtype, int ndim, const int64_t *shape);

// Appends to the data of a tensor: in one call, or in several for consecutive parts of it.
//   data (bytes) little-endian  in, owned by the caller
// Error: the system's own words (full disk, quota, failing device; a file size limit too, when the program
// ignores SIGXFSZ, whose default is to end it).
bool safewriter_write(SafeWriter *w, const char *name, const void *data, size_t bytes, Error *e);

// Makes the file durable and puts it in place; every declared tensor must have been written in full. Frees
// the writer in any case. Error: as for safewriter_write; the old file is then still in place.
bool safewriter_commit(SafeWriter *w, Error *e);
