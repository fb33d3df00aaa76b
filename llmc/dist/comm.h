// Ranks and collectives. Ranks are processes with one device each. llmc/dist/comm.c starts them or meets
// those that were started, and handles host values; collectives on device memory are the backend's
// (llmc/dist/comm_backend.h): llmc/cpu/comm_cpu.c over the control channel, llmc/cuda/device/comm_nccl.c over
// NCCL (comm_single.c: one GPU, when NCCL is not installed). All functions are collective: every rank calls
// them in the same order.
#pragma once
#include "llmc/ops/ops.h"

// First in main: ranks that something else has started know who they are from here on.
void comm_open(void);

typedef struct {
    const char *gpus;          // --gpus
    int ranks;                 // --ranks: processes of the CPU program
    int device;                // --device; -1: not given
    int micro_batches;         // of a step, over all ranks
    double timeout;            // seconds without progress after which all ranks are ended
    uint64_t program, options; // hashes: ranks that something else has started must agree on them
} CommOptions;
// Once the options are known, before any thread exists or device is touched: starts the ranks, or meets those
// that were started. Returns the device of this rank.
int comm_join(const CommOptions *o);
// Prepares collectives on device memory. Call with the device open, before the first of them.
void comm_connect(void);
// When no collective is under way and their graphs are gone, before the memory goes that they have used:
// other ranks have mapped it.
void comm_disconnect(void);
void comm_close(void);
void comm_step(int step); // for whoever watches the ranks: this one is alive, and at this step
void comm_patience(
    bool on); // collective: what one rank does from here on may take long, and the others wait; or no longer
void comm_begins(void);      // collective: the first step; before it a request to stop ends all ranks at once
bool comm_interrupted(void); // the program was asked to stop, as its launching process knows
void comm_answer(void);      // to the first such request, in its handler: a line, of one process alone
void comm_saved(void);       // no step is left, and all is saved: a request has no answer any more
bool comm_is_met(void);      // the ranks have met: something else has started them
int comm_rank(void);
int comm_size(void);

// in (size * count) fp32 device: out (count) of rank r receives the sum of all ranks' chunk r. out may be
// this rank's chunk of `in`, whose other chunks are then undefined.
void comm_reduce_scatter(Stream s, float *out, float *in, int64_t count);
// What the products that follow leave to a collective for which this rank sends `sent` bytes.
SharedSms comm_shared_sms(int64_t sent);
// buf (size * bytes) device: every rank's chunk, in rank order, on all ranks. Each rank has filled its own.
void comm_all_gather(Stream s, void *buf, int64_t bytes);
// in, out (size * bytes) device: chunk r of in goes to rank r, chunk r of out is rank r's.
void comm_all_to_all(Stream s, void *out, const void *in, int64_t bytes);
// buf (count) fp32 device: the sum over ranks, the same bits on all ranks.
void comm_all_reduce(Stream s, float *buf, int64_t count);

// Host memory to rank 0: rank `owner` gives `bytes` of buf, rank 0 receives them in its buf of `capacity`
// bytes; more is an error. Returns the size that arrived, on rank 0 and the owner; 0 elsewhere.
size_t comm_collect(void *buf, size_t bytes, size_t capacity, int owner);

// Host values.
double comm_sum(double x);
int64_t comm_max(int64_t x);
bool comm_agrees(uint64_t fingerprint); // whether rank 0 has the same one
void comm_barrier(void);
void comm_broadcast(void *buf, size_t bytes); // from rank 0
// Ends when a rank says so: true on all ranks when `mine` is true on any.
bool comm_any(bool mine);
const char *comm_description(void);
