// Collectives of the CUDA program built without NCCL: one GPU, and every collective is the identity.
#include "llmc/dist/comm_backend.h"
#include "llmc/ops/costs.h"
#include <string.h>

const char *comm_one_rank_only(void)
{
    return "but this program was built without NCCL and drives one GPU; install NCCL and build again";
}

bool comm_choose_devices(const CommOptions *o, LaunchChoice *c, Error *e)
{
    bool one = !strcmp(o->gpus, "all") || !strcmp(o->gpus, "1");
    *c = (LaunchChoice){.count = 1, .device = {(int)max_i64(o->device, 0)}};
    if (o->ranks != 1)
        return error_set(e, "--ranks %d, %s", o->ranks, comm_one_rank_only());
    if (!one)
        return error_set(e, "--gpus %s, %s (one GPU is chosen by --device)", o->gpus, comm_one_rank_only());
    int visible = o->device < 0 && *o->gpus != '1' ? backend_device_count() : 1;
    if (visible > 1)
        snprintf(c->why, sizeof c->why, "%d GPUs are here, %s", visible, comm_one_rank_only());
    return true;
}

int comm_device_of(int local_rank) { return local_rank; }

const char *comm_failure(void) { return NULL; }
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
    (void)s, (void)out, (void)in, (void)count;
}

void comm_all_gather(Stream s, void *buf, int64_t bytes)
{
    OP_SCOPE(comm_all_gather, comm_size(), bytes);
    (void)s, (void)buf, (void)bytes;
}

void comm_all_to_all(Stream s, void *out, const void *in, int64_t bytes)
{
    OP_SCOPE(comm_all_to_all, comm_size(), bytes);
    copy_on_device(s, out, in, (size_t)bytes);
}

void comm_all_reduce(Stream s, float *buf, int64_t count)
{
    OP_SCOPE(comm_all_reduce, comm_size(), count);
    (void)s, (void)buf, (void)count;
}

const char *comm_description(void) { return "built without NCCL"; }
