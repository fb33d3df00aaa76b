#include "llmc/run/signals.h"
#include "llmc/dist/comm.h"
#include <signal.h>
#include <stdlib.h>

static volatile sig_atomic_t interrupted;
static double interrupted_at;
static volatile sig_atomic_t nothing_to_save;

// What comes within half a second of the first is the same request: timeout(1) and batch systems send it to
// the process and to its group.
static void on_signal(int number)
{
    (void)number;
    double now = seconds_now();
    if (nothing_to_save || (interrupted && now - interrupted_at > 0.5))
        _Exit(EXIT_INTERRUPTED);
    if (!interrupted) {
        interrupted_at = now;
        comm_answer();
    }
    interrupted = 1;
}

void signals_catch(bool saves)
{
    nothing_to_save = !saves;
    struct sigaction action = {.sa_handler = on_signal}, hangup;
    sigaddset(&action.sa_mask, SIGINT);
    sigaddset(&action.sa_mask, SIGTERM);
    sigaddset(&action.sa_mask, SIGHUP); // one at a time
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, NULL, &hangup);
    if (hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL); // nohup, or the parent of this rank takes it
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); // a file size limit is a write error like a full disk
}

bool signals_came(void) { return interrupted != 0; }
