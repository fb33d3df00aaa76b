// Inside of the trainer, shared by trainer*.c.
#pragma once
#include "llmc/run/batch_block.h"
#include "llmc/run/trainer.h"

const Batch *trainer_launch(const Trainer *t);
// The last part of a step's input, here or on the device.
StepParams *trainer_input_params(const Trainer *t, int32_t *input);
// Batches, blocks and activations of a stage's size, in memory that is large enough for all stages.
void trainer_take_sizes(Trainer *t, Stage stage);
void trainer_rebuild_rope(Trainer *t);
// All ranks at once, when none of their steps is under way.
void trainer_drop_graphs(Trainer *t);
// With the short window of the next step.
AttentionSetting trainer_attention(const Trainer *t, int window_long);
// The same for rows that begin at a position of their sequence.
AttentionSetting trainer_attention_from(const Trainer *t, const AttentionSetting *at, int position);
// StageHooks of a trainer.
void trainer_weights_needed(void *trainer, int stage, Stream s);
void trainer_gradients_done(void *trainer, int stage, const ProductContext *c);
