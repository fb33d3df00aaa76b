// Ranks and collectives. Ranks are processes with one device each; llmc/cpu/comm_mpi.c speaks MPI over host memory (one rank
// without it), the CUDA program brings its own. All functions are collective: every rank calls them in the same order.
#pragma once
#include "llmc/ops.h"

// Before anything else in main: MPI may rewrite the arguments.
void comm_open(int *argc, char ***argv);
void comm_close(void);
int comm_rank(void);
int comm_size(void);

// buf (size * count) fp32 device: chunk r of rank r receives the sum of all ranks' chunk r; the other chunks are undefined.
void comm_reduce_scatter(Stream s, float *buf, int64_t count);
// buf (size * bytes) device: every rank's chunk, in rank order, on all ranks. Each rank has filled its own.
void comm_all_gather(Stream s, void *buf, int64_t bytes);
// buf (count) fp32 device: the sum over ranks, the same bits on all ranks.
void comm_all_reduce(Stream s, float *buf, int64_t count);

// Host memory to rank 0: rank `owner` gives `bytes` of buf, rank 0 receives them in its buf. Returns the size that arrived, on
// rank 0 and the owner; 0 elsewhere. buf must be large enough on rank 0.
size_t comm_collect(void *buf, size_t bytes, int owner);

// Host values.
double comm_sum(double x);
int64_t comm_max(int64_t x);
void comm_barrier(void);
// Ends when a rank says so: true on all ranks when `mine` is true on any.
bool comm_any(bool mine);
const char *comm_description(void);
