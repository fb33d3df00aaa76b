// One optimizer step over all parameters: Adam for tables and scalars, NorMuon for matrices and gates, each rank its share.
//
// With R ranks: rank r owns rows [r Vp/R, (r+1) Vp/R) of every table and the matrix slots r, r+R, r+2R, ...; gates and scalars
// are updated by every rank alike (llmc/exchange.h). Gradients arrive as each rank's unscaled fp32 sum over its micro-batches; the
// factor 1/micro-batches is applied once, by the ops, after the reduction: the same number on any number of ranks.
// Sources: Adam (Kingma, Ba 2014), Muon (Jordan 2024), NorMuon (arXiv 2510.05491), the speedrun's schedules.
#pragma once
#include "llmc/exchange.h"
#include "llmc/model.h"
#include "llmc/newton_schulz.h"

typedef struct {
    const Config *config;
    NsOptions ns, ns_gates; // gates are orthogonalised in fp32
    int rank, size;
    int own_slots;         // slots of this rank: rank, rank + size, ...
    int own_mlp;           // those before the first attention slot
    int own_attention;     // attention matrices among the rest; padding slots follow
    int adam_steps;        // updates made so far

    // Device memory, owned here. State exists for the own share only.
    floatX *table_m, *table_v;        // (5, Vp/R, d)
    float *scalar_m, *scalar_v;       // (64)
    float *momentum;                  // (own_slots, slot_size)
    float *second_mlp;                // (own_mlp, larger side)
    float *second_attention;          // (own_attention, 4, d)
    float *gates_momentum;            // (gates_size)
    float *second_gates, *second_smear; // (num_attention, larger side), (12)
    const StepParams *step; // (1) device, not owned: the scalars of the step whose ops are queued, set by the caller
    void *ns_workspace; // not owned: optimizer_workspace_bytes() that nobody else uses while a step of the optimizer runs
    Exchange exchange; // what travels between the ranks
} Optimizer;

// Everything but step and ns_workspace, which the caller sets.
void optimizer_create(Optimizer *o, const Model *m);
size_t optimizer_workspace_bytes(const Optimizer *o, const Model *m);
void optimizer_free(Optimizer *o);

// Queues the update of step t; `o->step` already holds its scalars. Tables and scalars move when `adam`; their gradients are
// kept when not. Those of gates are zeroed, those of matrices are of no more use. With several ranks the gradients have been sent
// (exchange_stage_done), and the new weights of the other ranks come with the next step, or with exchange_complete.
void optimizer_step(Optimizer *o, Model *m, bool adam, Stream s);

// Runs Newton-Schulz once on the gradients as they are, which leaves no trace: a backend may prepare what a graph cannot hold.
void optimizer_warm_up(Optimizer *o, Model *m, Stream s);

// ---- for checkpoints: state tensors by parameter -----------------------------------------------------------------------

// A piece of state on this rank's device that belongs to a parameter: its elements [first, first + count) of the parameter's
// whole state tensor of shape (rows, cols).
typedef struct {
    char name[80];   // "<parameter>.<adam_m|adam_v|momentum|second>"
    bool half;       // floatX, else fp32
    int64_t rows, cols;
    int64_t first, count; // count 0: none of it here
    void *data;
} StateTensor;
// The index-th state tensor, in the same order on all ranks; false after the last.
bool optimizer_state(const Optimizer *o, const Model *m, int index, StateTensor *t);
// The rank that owns a matrix slot.
static inline int slot_owner(int slot, int size) { return slot % size; }
