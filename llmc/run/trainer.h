// One rank's training: everything that a step needs, and the step itself.
//
// A step is prepared (batches of the host, tables), queued (copies to the device, forward and backward of all
// micro-batches, optimizer) and finished (its loss read back). While the device works on step t the host
// prepares and queues step t + 1, so the device never waits; at most two steps are under way, each with its
// own slot of the buffers, here and on the device. What step t + 1 reads is copied on a stream of its own
// while step t computes.
#pragma once
#include "llmc/data/dataloader.h"
#include "llmc/optim/optimizer.h"
#include "llmc/ops/profile.h"
#include "llmc/run/token_mask.h"

enum { STEP_SLOTS = 2, MAX_GRAPHS = 16, TRAINER_NOTES = 4 };
enum { EVAL_LEAD = 3 }; // tokens of an evaluation's batch in front of its first text

typedef struct Validation Validation;

typedef struct {
    // What a captured step depends on.
    int stage; // sizes, windows and attention scale are frozen in it
    int slots;
    int phase;                     // of the cycle of updates; a cycle further while parameters are tied
    int input;                     // slot of its buffers
    int num_values, num_gradients; // of RowLists
    Graph *graph;
} StepGraph;

typedef struct {
    Config *config;
    Model model;
    Optimizer optimizer;
    Stream stream, feed;      // of all that computes; of the copies that bring a step its input
    Loader *loader;           // NULL when there is nothing to train
    Validation *validation;   // NULL when there is nothing to validate
    char *fit_memory;         // what the GPU's memory is too small for, a line; NULL: nothing
    char *fit[TRAINER_NOTES]; // what the data are too small for, and what the vocabulary gives: a line each
                              // for the log, owned; NULL: nothing
    TokenMask *mask;          // until the first validation; NULL: no validation leaves tokens out
    uint32_t *impossible;     // (padded, padded / 32) device: its bits, or NULL
    int32_t *prefix;          // (padded vocabulary) of the batches' prefix targets, or NULL
    BatchTables tables;       // of training batches
    int sequence_tokens;      // of a validation sequence
    int part_tokens;          // of it that are evaluated at a time
    Rope rope;
    floatX *rope_cos, *rope_sin; // (positions, head width / 4)
    int rope_positions;

    void *acts_memory; // shared by the two and by the optimizer's work, which are never alive together
    size_t acts_bytes;
    Stage stage;           // whose sizes train, batch and the blocks have
    char memory_plan[280]; // a line for the log
    Acts train, eval;

    int accumulation;         // micro-batches of a step on this rank
    int most_launches;        // of them, see --launch-tokens
    int launches[STEP_SLOTS]; // of the step in a slot
    int *launch_position;     // (most_launches) of the next step: which position of its micro-batch row 0 is
    Batch batch;              // host, one training micro-batch
    Batch launch;             // host, one of its launches; N 0: a micro-batch is one
    Batch eval_batch;         // host, one part of a validation sequence
    int64_t block_ints;       // of one launch: batch, number of rows, attention table
    int64_t input_bytes;      // of one step: blocks for most_launches, then its StepParams
    int32_t *host_input[STEP_SLOTS], *device_input[STEP_SLOTS];
    int32_t *host_eval_block, *device_eval_block;
    int64_t eval_block_ints;
    float *device_logits;                       // (Vp), of a sample or an evaluation
    float *device_rows;                         // (part_tokens) losses of an evaluation; NULL without --eval
    float *host_loss[STEP_SLOTS], *device_loss; // (most_launches)
    Event *fed[STEP_SLOTS], *done[STEP_SLOTS];  // a slot's input is on the device; its step is over
    int slots;                                  // document slots, the most so far
    RowMarks row_marks;                         // of the rows of the next step
    RowLists row_lists;                         // of it, behind its StepParams
    StepGraph graphs[MAX_GRAPHS];
    int num_graphs;

    bool op_by_op;           // steps run without a graph, for profiles
    int step;                // next step to queue
    LoaderPosition position; // where its data begins
    double train_ms;         // training time so far
} Trainer;

// Finds the vocabulary from the shards (config->vocab_size), fits validation and schedule to small data
// (data_fit.h), allocates everything, and makes the initial weights. need_training, need_validation: which
// data to open. Fatal with one line when memory or data fail.
void trainer_create(Trainer *t, Config *c, bool need_training, bool need_validation);
void trainer_free(Trainer *t);
// Runs every kernel once on made-up data and leaves no trace in the state.
void trainer_warm_up(Trainer *t);
// After the state was loaded: data position, rope tables.
bool trainer_continue(Trainer *t, Error *e);
// Rope and attention scale as at the end of the schedule, for weights that come without a step.
void trainer_finish_schedule(Trainer *t);

// Brings the weights that other ranks own up to date. Collective; every use of weights outside a training
// step needs it first.
void trainer_complete_weights(Trainer *t);

// Moves windows and rope to those of the next step, or of the last validation.
void trainer_follow_windows(Trainer *t);
// Queues the next step. False on all ranks when the data of any fails, with a line for rank 0 to print; the
// state is then that after the last step that was queued. The step's loss comes from trainer_finish_step.
bool trainer_queue_step(Trainer *t, Error *e);
double trainer_step_tokens(const Trainer *t, int step); // over all ranks
// Waits for queued step `step` and returns its training loss per token, the mean over all ranks.
double trainer_finish_step(Trainer *t, int step);
// Records the ops of the last step (profile.h), which is over, without running them. Not after the last step
// with tied parameters: the ops of untied ones would be recorded.
void trainer_record_ops(Trainer *t);
bool trainer_has_untied(const Trainer *t); // the last step was that one
// What the device can do, measured in the memory of the activations: between two steps.
Ceilings trainer_ceilings(Trainer *t);
// Mean validation loss over all ranks, with the windows of the next step; `final`: those of the last
// validation.
bool trainer_validate(Trainer *t, bool final, double *loss, Error *e);
// Evaluations, in passes over eval_batch, which the caller fills. First, on all ranks; `final` as above.
AttentionSetting trainer_begin_evaluation(Trainer *t, bool final);
// losses (part_tokens) host out: of each token of the batch.
void trainer_token_losses(Trainer *t, const AttentionSetting *at, float *losses);
// Logits of row `row` of the last pass, whose activations are `acts`: z (Vp) fp32 host out, softcapped.
void trainer_token_logits(Trainer *t, const Acts *acts, int row, float *z);
// A forward-only pass over N tokens of one document. z (Vp) fp32 host out: softcapped logits of the last one.
// For sampling.
void trainer_next_logits(Trainer *t, const int32_t *tokens, int N, float *z);
