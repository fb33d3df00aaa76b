// The control channel of the ranks: a star of sockets with rank 0 in the middle, over which go small sums,
// flags, barriers, the pieces of a checkpoint, and the news that a rank is gone. The sockets come from
// launch.c (ranks of one machine) or rendezvous.c (TCP).
//
// Every call is collective. Frames carry kind and number of the call, so that ranks that have fallen out of
// step are told instead of waiting for each other. A thread beside the program watches for a rank that is
// gone, for `check` and for a standstill.
#pragma once
#include "llmc/base/common.h"
#include <stdatomic.h>

enum { MAX_RANKS = 64 };

// Where a rank is, for whoever watches it.
typedef struct {
    _Atomic int64_t progress; // moves with every call and step, and with every piece of a tensor
    _Atomic int64_t calls;    // and steps
    _Atomic int step;         // -1 before the first
    _Atomic int patience;     // what it does may take this many time-outs; 0 is 1
    _Atomic int waiting_for;  // the rank that it receives from or sends to; -1: none
} RankPlace;

typedef struct {
    int rank, size;
    int fd[MAX_RANKS]; // rank 0: the socket of each other rank; else only fd[0]. Owned by the channel
    int listener;      // TCP, rank 0: late-comers are told that the port is taken; -1: none
    uint32_t calls;    // collective calls so far
    RankPlace own_place, *place; // place: own_place, or memory that the parent sees
    _Atomic int closing;
    _Atomic int bulk; // a tensor is being sent, for which a rank that still computes lets us wait
    float *sums;      // rank 0: room for the chunk of another rank, sums_count floats; owned by the channel
    int64_t sums_count;
} Control;

void control_place_init(RankPlace *p);
// "at step 17", for messages. out: a string
void control_place_text(const RankPlace *p, char *out, size_t capacity);
// The seconds without progress after which such a rank stands still.
double control_place_limit(const RankPlace *p, double timeout);
// rank, size, no sockets.
void control_init(Control *c, int rank, int size);
double control_sum(Control *c, double x); // added in the order of the ranks: the same bits everywhere
int64_t control_max(Control *c, int64_t x);
void control_barrier(Control *c);
void control_broadcast(Control *c, void *buf, size_t bytes); // from rank 0
// `bytes` of rank `owner`'s buf to rank 0's, which holds `capacity`. Returns the size that arrived, on rank 0
// and the owner; 0 elsewhere.
size_t control_collect(Control *c, void *buf, size_t bytes, size_t capacity, int owner);

// Tensors in host memory, for a backend without collectives of its own. Sums are added in the order of the
// ranks. in (size, count): `out` (count) of rank r is the sum of all ranks' chunk r. out may be this rank's
// chunk of `in`, whose other chunks are then undefined.
void control_reduce_scatter(Control *c, float *out, const float *in, int64_t count);
// buf (size * bytes): each rank gives its chunk; all get all of them.
void control_all_gather(Control *c, void *buf, int64_t bytes);
// in, out (size * bytes): chunk r of in goes to rank r, chunk r of out is rank r's.
void control_all_to_all(Control *c, void *out, const void *in, int64_t bytes);
void control_all_reduce(Control *c, float *buf, int64_t count);

// Starts the watching thread. check: NULL, or asked several times a second, gives a line when something
// failed in the background. timeout: seconds without a call or a step after which rank 0 gives up, and after
// twice as many (and two) another rank; 0: somebody else watches.
void control_watch(Control *c, double timeout, const char *(*check)(void));
void control_step(Control *c, int step); // the rank is alive, and at this step
// From here on (on) one rank may be at work for long without a sign of life, a file being brought to the
// disk, and the others wait for it: PATIENCE time-outs are granted. Every rank says so.
enum { PATIENCE = 15 };
void control_patience(Control *c, bool on);
void control_abort(Control *c); // tells the others that this rank has failed and has said so
// For ranks without a parent: from here on fatal() names the step and ends the others.
void control_speak_for_itself(Control *c);
void control_close(Control *c); // collective; ends the thread
