// Signals that ask a run to end: SIGINT, SIGTERM, and SIGHUP where the parent has not ignored it.
#pragma once
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif

// Catches them from now on. saves: the caller looks for them, and saves; a second request ends the process at
// once. Else the first one does, with EXIT_INTERRUPTED. SIGPIPE and SIGXFSZ are ignored: what cannot be
// written is an error of the write.
void signals_catch(bool saves);
bool signals_came(void); // to this process

#ifdef __cplusplus
}
#endif
