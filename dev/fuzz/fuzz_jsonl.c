// JSONL records from arbitrary bytes: every line is a text or an error that names the line, and the reader
// always ends.
#include "llmc/text/text_source.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    TextFile file = {"input.jsonl", true, (int64_t)size};
    TextChunk chunk = {.len = size, .file = &file, .first_line = 1};
    chunk.bytes = xcalloc(size, 1); // exactly as long, so that reading past the end is seen
    if (size)
        memcpy(chunk.bytes, data, size);
    JsonlReader records;
    const char *text;
    size_t len, total = 0;
    ChunkStatus status;
    Error e = {""};
    jsonl_begin(&records, &chunk);
    while ((status = jsonl_next(&records, &text, &len, &e)) == CHUNK_READ) {
        for (size_t i = 0; i < len; i++)
            total += (unsigned char)text[i];
    }
    jsonl_end(&records);
    if (status == CHUNK_ERROR && strncmp(e.text, "input.jsonl:", 12))
        abort();
    if (total > 255 * (3 * size + 1))
        abort(); // an escape never makes more than 3 bytes of one
    free(chunk.bytes);
    return 0;
}
