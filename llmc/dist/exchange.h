// What travels between the ranks in a step, whose it is, and when it goes.
//
// Stages are the network from bottom to top: 0 the embedding, 1 + i layer i, then the head. Forward climbs
// them, backward comes down. What several stages use counts for the lowest: its gradient is complete once the
// last micro-batch's backward has left that stage, and its new value is needed when the next step's forward
// comes there.
//
// A bucket is one of these. R ranks; "lowest": the lowest stage that uses one of its tensors.
//   Tensor sharded by rows. Stage: lowest. Gradient: reduce-scatter of rows, at steps that update it. Rank r
//     owns the r-th 1/R. New value: all-gather, in the step after.
//   Slots [kR, kR + R) of a pool of tensors that are dealt out whole. Stage: lowest. Gradient:
//     reduce-scatter, out of place. Rank r owns slot kR + r. New value: all-gather, every step.
//   All replicated pools. No stage: behind stage 0. Gradient: all-reduce, one bucket. Every rank makes the
//     new value.
//
// A tensor that is one with another for now (UpdateSpec) has no bucket, and the other one's stage is the
// lowest of both.
// Gradients go out in this order (falling stages) while backward goes on below; new values come in rising
// order of stages at the start of the next step, while its forward goes on above. Both run on a stream of
// their own. Between two steps the values of other ranks' shares are therefore old; exchange_complete brings
// them up to date (for validation, checkpoints, sampling).
#pragma once
#include "llmc/dist/row_exchange.h"

enum { MAX_STAGES = MAX_LAYERS + 2, MAX_BUCKETS = MAX_PARAMS };

typedef struct {
    int pool;
    int64_t offset; // elements from the start of the pool
    int64_t share;  // elements that a rank owns of it: rows, or a slot
    int stage;
    bool rows;
    int every; // of its updates
    int param; // rows: of what
} Bucket;

typedef struct {
    int rank, size;
    int num_stages;
    Bucket list[MAX_BUCKETS]; // by falling stage
    int count;
    Stream stream;               // of the collectives; NULL with one rank
    Event *reached[MAX_STAGES];  // backward has left the stage
    Event *reduced[MAX_BUCKETS]; // (num_reduced) the own share of the gradient is there; of rows, the others'
                                 // is cleared
    int num_reduced;
    Event *gathered[MAX_STAGES]; // the weights of the stage are new
    Event *small;                // the small bucket is summed: the last to go, so all others are as well
    Event *forked;               // where the stream left that of the caller
    float *own_memory;           // device, owned here
    float
        *own[MAX_POOLS]; // (own slots, slot): summed gradients of the own slots of a pool; NULL with one rank
    int stale_after;     // the step whose values have not been gathered yet; -1: none
    RowExchange rows;    // the table of which only rows travel
} Exchange;

// The table alone, for `size` ranks: no memory, no device.
void exchange_plan(Exchange *x, const Params *p, int rank, int size);
void exchange_replan(Exchange *x, const Params *p); // after parameters have parted: buckets and stages anew
void exchange_create(Exchange *x, const Params *p, PairExchange how);
void exchange_free(Exchange *x);

// Of step t (or any other that updates the same tensors):
// Backward of the last micro-batch: what has become complete with this stage is sent, beside the products of
// c that follow.
void exchange_stage_done(Exchange *x, const Params *p, int stage, int t, const ProductContext *c);
// After all stages: the small bucket.
void exchange_small(Exchange *x, const Params *p, int t, Stream s);
// Lets s wait for the sums: of all of [first, last) in a pool, of the small bucket.
void exchange_wait(const Exchange *x, int pool, int64_t first, int64_t last, Stream s);
void exchange_wait_small(const Exchange *x, Stream s);

// Step t was queued: it gathered what the one before had changed, and has changed the own shares itself.
void exchange_step_queued(Exchange *x, int t);
// At the start of step t: queues what comes in, the changes of the step before.
void exchange_begin_gather(Exchange *x, const Params *p, int t, Stream s);
// Lets s wait for what this stage and those below it use.
void exchange_stage_needed(const Exchange *x, int stage, Stream s);
// Gathers whatever is old, on s.
void exchange_complete(Exchange *x, const Params *p, Stream s);
