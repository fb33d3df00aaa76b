// Collectives of the CUDA program on one GPU: every one is the identity.
#include "llmc/comm.h"
#include <stdlib.h>

void comm_open(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    const char *names[] = {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS"};
    for (int i = 0; i < 3; i++) {
        const char *size = getenv(names[i]);
        if (size && atoi(size) > 1)
            fatal(EXIT_USAGE, "started as one of %s ranks (%s), but this program drives one GPU", size, names[i]);
    }
}
void comm_close(void) {}
int comm_rank(void) { return 0; }
int comm_size(void) { return 1; }
void comm_reduce_scatter(Stream s, float *buf, int64_t count) { (void)s, (void)buf, (void)count; }
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
const char *comm_description(void) { return "one GPU"; }
