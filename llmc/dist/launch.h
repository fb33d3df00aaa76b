// One process per device, forked by the program itself, and the parent that watches over them.
//
//   parent: no device, no data. Prints the line of the first rank that fails (rank, cause, step), ends the
//   others and exits with its status; ends all when a rank shows no sign of life for `timeout` seconds;
//   answers SIGINT, SIGTERM and SIGHUP, and hands them on; before the first step it ends all. rank: a child
//   that dies with its parent, connected to the others by the control channel.
#pragma once
#include "llmc/dist/control.h"

typedef struct {
    int count;             // ranks
    int device[MAX_RANKS]; // of each
    int left_out;          // devices that could not be used, and
    char why[160];         // the reason
} LaunchChoice;

// Which devices `gpus` names: "all" takes as many of the `visible` ones as 1, 2, 4 or 8 ranks that divide the
// micro-batches; "N" the first N, "0,3" or "3," these. False with a line when that cannot be.
bool launch_choose(LaunchChoice *c, const char *gpus, int visible, int micro_batches, Error *e);
// Whether `ranks` may share the work: 1, 2, 4 or 8 that divide the micro-batches.
bool launch_ranks_fit(int ranks, int micro_batches);

// Forks c->size ranks; call before any thread or device exists. Returns in every rank, with the control
// channel connected; never in the parent, which exits with the status of the whole: 0, EXIT_INTERRUPTED, or
// that of the rank that failed first.
void launch_ranks(Control *c, int size, double timeout);
// In a rank: from here on there is something to save. The first request to stop is handed on, and the second
// ends all at once; before, the first one does.
void launch_begins(void);
// In a rank: the parent was asked to stop. False in a program that was not launched.
bool launch_interrupted(void);
// Answers the first request to stop at once, as the step may take minutes: a line on stderr. Safe in a signal
// handler. In a launched rank it does nothing: the parent answers.
void launch_answer(void);
// In a rank: no step is left, and all is saved. A request is not answered any more.
void launch_saved(void);
// Runs f in a child and returns what it returned, 0 to 255; -1 when it died. For questions to a driver that
// must not be initialised before a fork.
int launch_ask(int (*f)(void));
