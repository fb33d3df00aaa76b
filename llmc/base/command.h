// Another program's words.
#pragma once
#include "llmc/base/common.h"

// What the program argv[0], looked for in PATH, prints to its standard output until it ends: text owned by
// the caller. NULL when there is no such program, it ends with a status or a signal, prints nothing, or
// (*late) has not ended within `seconds`: it is killed then, and not waited for, because a process that hangs
// in a driver may outlive even that.
//   argv  ends with NULL
char *command_output(char *const argv[], double seconds, bool *late);
