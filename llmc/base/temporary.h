// Temporary files NAME.tmp.<pid>, which a process writes whole before it renames them to NAME. What a process
// that was killed has left is known by its number.
#pragma once
#include "llmc/base/common.h"

// "<path>.tmp.<pid>" of this process; owned by the caller.
char *temporary_path(const char *path);
// Removes those of dead processes in the folder whose NAME is `ours`. One with our own number is from an
// earlier life of it.
void temporary_remove_stale(const char *folder, bool (*ours)(const void *context, const char *name),
                            const void *context);
