// The program's own source and the commit it was built from: build/source_text.o, made by
// scripts/embed_source.sh. It changes with every edit, so it is no part of the library: only programs that
// name it are linked with it.
#pragma once
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// train_gpt.cu and all of llmc/, each file under a line with its name; program_source_size bytes and a NUL.
extern const char program_source[];
extern const size_t program_source_size;
// In hex, with " and uncommitted changes" where there are some; or "unknown" and why.
extern const char program_commit[];

#ifdef __cplusplus
}
#endif
