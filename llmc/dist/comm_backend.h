// What a backend adds to llmc/dist/comm.c: which devices its ranks take, and the collectives on device memory
// that llmc/dist/comm.h declares.
#pragma once
#include "llmc/dist/comm.h"
#include "llmc/dist/control.h"
#include "llmc/dist/launch.h"

Control *comm_control(void); // the control channel of this rank
const char *comm_launcher(
    void); // the variable that says who has started the ranks; NULL: this program itself, or there is one

// Why this program is one rank whoever starts it; NULL: it can be several.
const char *comm_one_rank_only(void);
// The devices of the ranks that this program is to start, one each. False with a line when the options ask
// for what cannot be.
bool comm_choose_devices(const CommOptions *o, LaunchChoice *c, Error *e);
// The device of a rank that something else has started, the local_rank-th on its machine.
int comm_device_of(int local_rank);
// What failed in the background; NULL: nothing. Asked by the watching thread.
const char *comm_failure(void);
