// What travels between the ranks in a step, whose it is, and when it goes.
//
// Stages are the network from bottom to top: 0 the embedding, 1 .. 11 the layers, 12 the head. Forward climbs them, backward
// comes down. What several stages use counts for the lowest: its gradient is complete once the last micro-batch's backward has
// left that stage, and its new value is needed when the next step's forward comes there.
//
//   bucket                        stage   gradient                                  owner            new value
//   lm_head                       12      reduce-scatter of rows, at Adam's steps   rank r: r-th 1/R  all-gather, the step after
//   R matrix slots [kR, kR + R)   lowest  reduce-scatter, out of place              rank r: kR + r    all-gather, every step
//   value_embeds.i                lowest  as lm_head                                as lm_head        as lm_head
//   embed                         0       as lm_head                                as lm_head        as lm_head
//   gates and scalars             -       all-reduce, one bucket, after stage 0     all alike         made by every rank
//
// Gradients go out in this order (falling stages) while backward goes on below; new values come in rising order of stages at the
// start of the next step, while its forward goes on above. Both run on a stream of their own. Between two steps the values of
// other ranks' shares are therefore old; exchange_complete brings them up to date (for validation, checkpoints, sampling).
#pragma once
#include "llmc/comm.h"
#include "llmc/params.h"

enum { NUM_STAGES = NUM_LAYERS + 1, MAX_BUCKETS = MAX_SLOTS + NUM_TABLES };

typedef struct {
    bool table;
    int first; // table, or first slot of a group of as many slots as there are ranks
    int stage;
} Bucket;

typedef struct {
    int rank, size;
    Bucket list[MAX_BUCKETS]; // by falling stage
    int count;
    Stream stream;               // of the collectives; NULL with one rank
    Event *reached[NUM_STAGES];  // backward has left the stage
    Event *reduced[MAX_BUCKETS]; // the own share of the gradient is there; of a table, the others' is cleared
    Event *gathered[NUM_STAGES]; // the weights of the stage are new
    Event *small;                // the small bucket is summed: the last to go, so all others are as well
    Event *forked;               // where the stream left that of the caller
    float *own; // (own slots, slot_size) device, owned here: summed gradients of the own slots; NULL with one rank
    bool stale, stale_tables;    // the last step's values have not been gathered yet; those of tables as well
} Exchange;

// The table alone, for `size` ranks: no memory, no device.
void exchange_plan(Exchange *x, const Params *p, const Config *c, int rank, int size);
void exchange_create(Exchange *x, const Params *p, const Config *c);
void exchange_free(Exchange *x);

// Backward of the last micro-batch: what has become complete with this stage is sent. tables: Adam steps.
void exchange_stage_done(Exchange *x, Params *p, int stage, bool tables, Stream s);
// After all stages: the small bucket, (count) fp32 from gates_grad on.
void exchange_small(Exchange *x, Params *p, bool scalars, Stream s);
// Lets s wait for the sums: of all own slots in [first, last), of a table, of the small bucket.
void exchange_wait_slots(const Exchange *x, int first, int last, Stream s);
void exchange_wait_table(const Exchange *x, int table, Stream s);
void exchange_wait_small(const Exchange *x, Stream s);

// A step was queued that gathered what the one before had changed, and has changed the own shares itself.
void exchange_step_queued(Exchange *x, bool tables);
// At the start of a step: queues what comes in. tables: the last step was one of Adam's.
void exchange_begin_gather(Exchange *x, Params *p, bool tables, Stream s);
// Lets s wait for what this stage and those below it use.
void exchange_stage_needed(const Exchange *x, int stage, Stream s);
// Gathers whatever is old, on s.
void exchange_complete(Exchange *x, Params *p, Stream s);
