// One optimizer step over all parameters, each rank its share.
//
// Parameters of one optimizer, shape, sharding and constants are a batch: what the rows of the record's table
// say decides, not what a tensor is. With R ranks: rank r owns rows [r n/R, (r+1) n/R) of every tensor that
// is sharded by rows, and the slots r, r + R, r + 2R, ... of every pool of whole tensors; replicated
// parameters are updated by every rank alike (llmc/dist/exchange.h). Gradients arrive as each rank's unscaled
// fp32 sum over its micro-batches; the factor 1/micro-batches is applied once, by the ops, after the
// reduction:
// the same number on any number of ranks. Sources: Adam (Kingma, Ba 2014), Muon (Jordan 2024), NorMuon (arXiv
// 2510.05491), the speedrun's schedules.
#pragma once
#include "llmc/dist/exchange.h"
#include "llmc/model/model.h"
#include "llmc/optim/newton_schulz.h"

typedef struct {
    int first, count;   // parameters [first, first + count) of the list: neighbours in their pool
    int own_first, own; // SHARD_TENSORS: own slots [own_first, own_first + own) of the pool; else own = count
    int64_t elements;   // of state on this rank
    int64_t stride;     // NorMuon: elements from one own parameter to the next, where own ones are packed
    // NorMuon: `matrices` of (rows, cols) in each parameter.
    int matrices, rows, cols;
    bool per_column; // of the second moment, by the shape in files
    // Device memory, not owned.
    void *m, *v;     // Adam (elements): moments, see OptimizerKind
    float *momentum; // NorMuon (own), `stride` apart; of joined parameters within that of the others
    float *second;   // (own, matrices, larger side)
    int32_t *rules;  // (own, matrices): each matrix's rule
} UpdateBatch;
enum { MAX_UPDATES = MAX_PARAMS };

typedef struct {
    const Config *config;
    NsOptions ns, ns_fp32; // as the options say, and the same in fp32
    int rank, size;
    UpdateBatch batches[MAX_UPDATES]; // in the order of their updates: what was sent last is used last
    int num_batches;
    void *state; // device memory, owned here: the state of all batches
    const StepParams
        *step; // (1) device, not owned: the scalars of the step whose ops are queued, set by the caller
    void *ns_workspace; // not owned: optimizer_workspace_bytes() that nobody else uses while a step of the
                        // optimizer runs
    Exchange exchange;  // what travels between the ranks
} Optimizer;

// Everything but step and ns_workspace, which the caller sets.
void optimizer_create(Optimizer *o, const Model *m);
size_t optimizer_workspace_bytes(const Optimizer *o, const Model *m);
void optimizer_free(Optimizer *o);

// Queues the update of step t, or of any step that updates the same tensors; `o->step` already holds its
// scalars. Gradients that the step does not use are kept, those of replicated and of Adam's parameters that
// it uses are zeroed; those of NorMuon's matrices are of no more use. With several ranks the gradients have
// been sent (exchange_stage_done), and the new weights of the other ranks come with the next step, or with
// exchange_complete.
void optimizer_step(Optimizer *o, Model *m, int t, Stream s);

// After the ops of step t, never inside of a graph: where tied parameters part, they get their values and
// state. True when they did: what was captured before reads the wrong ones.
bool optimizer_part(Optimizer *o, Model *m, int t, Stream s);
// A run goes on with step t, from a checkpoint.
void optimizer_continue(Optimizer *o, Model *m, int t);

// Runs Newton-Schulz once on the gradients as they are, which leaves no trace: a backend may prepare what a
// graph cannot hold.
void optimizer_warm_up(Optimizer *o, Model *m, Stream s);

// ---- for checkpoints: state tensors by parameter ----------------------------------------------------------

// A piece of state on this rank's device that belongs to a parameter: its elements [first, first + count) of
// the parameter's whole state tensor of shape (rows, cols).
typedef struct {
    char name[80];   // "<parameter>.<adam_m|adam_v|momentum|second>"
    bool half;       // floatX, else fp32
    bool everywhere; // every rank holds all of it: rank 0 writes it (count is 0 elsewhere), all read it
    int64_t rows, cols;
    int64_t first, count; // count 0: none of it here
    void *data;
} StateTensor;
// The index-th state tensor, in the same order on all ranks; false after the last. Parameters that are tied
// now have none.
bool optimizer_state(const Optimizer *o, const Model *m, int index, StateTensor *t);
// The rank that owns a slot.
static inline int slot_owner(int64_t slot, int size) { return (int)(slot % size); }
