// Documents from text files, folders, JSONL files and standard input, in bounded memory.
//
// A document is one text file or, with a TextSplit, a piece of one, or the `text` field of one JSONL record.
// Files are read in chunks of about 1 MB that can be worked on independently: a JSONL chunk ends at a line's
// end, a chunk of pieces at the end of one; any other text chunk ends inside its document, but only between
// an ASCII letter and a space followed by an ASCII letter, where every piece of the GPT-2 pattern ends too (a
// run of letters cannot hold a space, and the space belongs to the letters after it). So the tokens do not
// depend on the chunks.
#pragma once
#include "llmc/base/common.h"
#include "llmc/text/jsonl.h"
#include "llmc/text/text_split.h"

typedef enum {
    FORMAT_BY_NAME,
    FORMAT_TEXT,
    FORMAT_JSONL
} TextFormat; // by name: *.jsonl and *.ndjson are JSONL

typedef struct {
    char *path; // owned; "-" is standard input
    bool jsonl;
    int64_t size; // bytes, -1 when unknown
} TextFile;

typedef struct {
    TextFile *files; // (count), owned
    size_t count, capacity;
    TextSplit split; // of text files
} TextFileList;      // start from {0}, or with a split

// Appends the file `path`, or the files of the folder `path` and of the folders in it, in name order (byte
// values); names that begin with a dot are passed over, and so are, with a note, links to folders and what is
// no regular file. False with a message: missing, unreadable, folder without files.
bool text_files_add(TextFileList *list, const char *path, TextFormat format, Error *e);
void text_files_free(TextFileList *list);

typedef struct {
    char *bytes; // (len) of (capacity), owned; reused by the next read
    size_t len, capacity;
    const TextFile *file;
    int64_t first_line;   // JSONL: number of the chunk's first line in its file, from 1
    bool begins_document; // text in one document: first chunk of its file
    bool split;           // text in pieces
    TextPiece *pieces;    // (piece_count) of (piece_capacity), owned: split text, the documents in `bytes`
    size_t piece_count, piece_capacity;
} TextChunk;
void text_chunk_free(TextChunk *chunk);

typedef struct TextReader TextReader;
// The list must outlive it. interrupt: a descriptor, the caller's; once it can be read from, the next read of
// input, or the wait for it, is an error. -1: none.
TextReader *text_reader_create(const TextFileList *list, int interrupt);
void text_reader_free(TextReader *r);

typedef enum { CHUNK_READ, CHUNK_NONE, CHUNK_ERROR } ChunkStatus;

// The next chunk, in input order. CHUNK_NONE: everything was read. CHUNK_ERROR: one line in `e`; a file that
// begins like a shard, or like one of gzip, xz, zstd, bzip2 or zip, is an error, too.
ChunkStatus text_reader_next(TextReader *r, TextChunk *chunk, Error *e);

// Position in a file for messages: "path" or "standard input".
const char *text_file_name(const TextFile *file);

// The records of a JSONL chunk, one after another. Lines of white space only are passed over.
typedef struct {
    const TextChunk *chunk;
    size_t at;
    int64_t line;
    JsonlRecord record;
} JsonlReader;

void jsonl_begin(JsonlReader *r, const TextChunk *chunk);
// The next line as it is (len bytes), for records of other fields; r->line is its number. False: there is
// none.
bool jsonl_line(JsonlReader *r, const char **line, size_t *len);
// CHUNK_READ: *text (len bytes) is the record's text, valid until the next call. CHUNK_ERROR: not JSON, no
// text, text is not a string; the message names file and line.
ChunkStatus jsonl_next(JsonlReader *r, const char **text, size_t *len, Error *e);
void jsonl_end(JsonlReader *r);
