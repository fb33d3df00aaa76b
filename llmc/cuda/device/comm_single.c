// Collectives of the CUDA program built without NCCL: one GPU, and every collective is the identity.
#include "llmc/comm.h"
#include "llmc/rendezvous.h"
#include <stdlib.h>
#include <string.h>

static const char cure[] = "but this program was built without NCCL and drives one; install NCCL and build again";

void comm_open(int *argc, char ***argv)
{
    Rendezvous r;
    Error e;
    (void)argc, (void)argv;
    if (rendezvous_find(&r, &e) || *e.text) fatal(EXIT_USAGE, "started as one of %d ranks (%s), %s", r.size, r.source, cure);
}

int comm_join(const CommOptions *o)
{
    bool one = !strcmp(o->gpus, "all") || !strcmp(o->gpus, "1");
    if (!one) fatal(EXIT_USAGE, "--gpus %s, %s (one GPU is chosen by --device)", o->gpus, cure);
    int visible = o->device < 0 && *o->gpus != '1' ? backend_device_count() : 1;
    if (visible > 1) note("%d GPUs are here, %s", visible, cure);
    return (int)max_i64(o->device, 0);
}
void comm_connect(void) {}
void comm_disconnect(void) {}
void comm_close(void) {}
void comm_step(int step) { (void)step; }
void comm_patience(bool on) { (void)on; }
bool comm_interrupted(void) { return false; }
int comm_rank(void) { return 0; }
int comm_size(void) { return 1; }
void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count) { (void)s, (void)out, (void)in, (void)count; }
void comm_all_gather(Stream s, void *buf, int64_t bytes) { (void)s, (void)buf, (void)bytes; }
void comm_all_reduce(Stream s, float *buf, int64_t count) { (void)s, (void)buf, (void)count; }
size_t comm_collect(void *buf, size_t bytes, int owner)
{
    (void)buf, (void)owner;
    return bytes;
}
double comm_sum(double x) { return x; }
int64_t comm_max(int64_t x) { return x; }
void comm_barrier(void) {}
bool comm_any(bool mine) { return mine; }
const char *comm_description(void) { return "built without NCCL"; }
