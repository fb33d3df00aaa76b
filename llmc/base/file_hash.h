// The SHA-256 of a file, computed while the run goes on: 200 MB take about a second, which the start-up does
// not wait for.
#pragma once
#include "llmc/base/common.h"

typedef struct FileHash FileHash;

// Starts coreutils' sha256sum on the file, on a thread of its own.
FileHash *file_hash_start(const char *path);

// Waits for the end and frees it. 64 hex digits, owned by the caller; NULL when they cannot be had (no
// sha256sum, a file that is gone, or not finished within a minute). NULL may be passed on.
char *file_hash_finish(FileHash *hash);
