// Collectives of the CPU program: device memory is host memory, and the control channel carries it. Rank 0
// adds what the others send it, in the order of the ranks, so a sum has the same bits on every rank and in
// every run.
//
// A star is slower than a ring as soon as the network is the limit: rank 0 moves (R - 1) times what a rank of
// a ring would. The CPU program trains small models on one machine: a reduce-scatter among 4 ranks in chunks
// of 16 MiB takes 75 ms on two cores (Open MPI 4.1: 375), one of 16 KiB 0.14 ms (0.06).
#include "llmc/dist/comm_backend.h"
#include "llmc/cpu/cpu.h"
#include <string.h>

const char *comm_one_rank_only(void) { return NULL; }

int comm_device_of(int local_rank)
{
    (void)local_rank;
    return 0;
}

const char *comm_failure(void) { return NULL; }

bool comm_choose_devices(const CommOptions *o, LaunchChoice *c, Error *e)
{
    *c = (LaunchChoice){.count = o->ranks};
    if (strcmp(o->gpus, "all") && strcmp(o->gpus, "1"))
        return error_set(e, "--gpus %s: this is the CPU program; --ranks N starts several processes",
                         o->gpus);
    if (!launch_ranks_fit(o->ranks, o->micro_batches))
        return error_set(e, "--ranks %d: must be 1, 2, 4 or 8 and divide --micro-batches %d", o->ranks,
                         o->micro_batches);
    return true;
}

void comm_connect(void) {}
void comm_disconnect(void) {}

SharedSms comm_shared_sms(int64_t sent)
{
    (void)sent;
    return (SharedSms){0, 0};
}

void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count)
{
    OP_SCOPE(comm_reduce_scatter, comm_size(), count);
    control_reduce_scatter(comm_control(), out, in, count);
}

void comm_all_gather(Stream s, void *buf, int64_t bytes)
{
    OP_SCOPE(comm_all_gather, comm_size(), bytes);
    control_all_gather(comm_control(), buf, bytes);
}

void comm_all_to_all(Stream s, void *out, const void *in, int64_t bytes)
{
    OP_SCOPE(comm_all_to_all, comm_size(), bytes);
    control_all_to_all(comm_control(), out, in, bytes);
}

void comm_all_reduce(Stream s, float *buf, int64_t count)
{
    OP_SCOPE(comm_all_reduce, comm_size(), count);
    control_all_reduce(comm_control(), buf, count);
}

const char *comm_description(void)
{
    static char text[96];
    if (comm_size() == 1)
        return "one process";
    snprintf(text, sizeof text, "processes on CPUs, started %s%s", comm_launcher() ? "by " : "here",
             comm_launcher() ? comm_launcher() : "");
    return text;
}
