// A file that grows record by record while a run goes. Every record is handed to the kernel in one piece when
// it is written, so what was written stays when the process is killed. A file that cannot be written (full
// disk) costs one note: it is cut behind its last whole record, and the run goes on without it.
#pragma once
#include "llmc/base/common.h"
#include <sys/types.h>

typedef struct {
    char *path; // owned
    int fd;     // -1: given up
    off_t good; // end of the last whole record
} AppendFile;

// Makes the file, which must not be there yet. Takes the path over.
void append_file_create(AppendFile *f, char *path);
// Opens a file of lines that may be there: `keep` cuts it behind its last whole line, for a process that was
// killed may have left half a one, else it is emptied. False when it cannot be written. Takes the path over.
bool append_file_continue(AppendFile *f, char *path, bool keep, Error *e);
// One record: count bytes.
void append_file_write(AppendFile *f, const void *bytes, size_t count);
void append_file_close(AppendFile *f);
