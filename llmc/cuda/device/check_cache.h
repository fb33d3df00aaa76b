// Remembers that the self-check of the kernels has passed: a file in $XDG_CACHE_HOME/train_gpt or
// ~/.cache/train_gpt for each GPU and set of checks, which names the program and the driver it passed with.
// Where there is no such folder, or one of the names is unknown, nothing is remembered.
#pragma once
#include "llmc/base/common.h"
#include "llmc/ops/ops.h"
#ifdef __cplusplus
extern "C" {
#endif

// What a passed check holds for; NULL: not known.
typedef struct {
    const char *gpu;     // model and UUID
    const char *checks;  // what depends on options
    const char *program; // build id
    const char *driver;
} CheckKey;

// Whether the check must run. When it must, an earlier pass is forgotten: a run that fails leaves none.
bool check_needed(SelfCheck mode, const CheckKey *key);
// Remembers a pass, if it can: the file is complete or absent at any time, whoever else writes it.
void check_remember(const CheckKey *key);

// The build id that the linker has put into this program, in hex; it differs when any byte of code does, the
// GPU's included. NULL: there is none. Static text.
const char *program_build_id(void);
// The version of the kernel's driver, from the first line of this file (/proc/driver/nvidia/version). NULL
// when it cannot be read. Static text.
const char *driver_version(const char *path);

#ifdef __cplusplus
}
#endif
