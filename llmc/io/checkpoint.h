// Weights and training state in one safetensors file, and back.
//
// Weights are as llmc/io/weights.h says. A checkpoint adds "<parameter>.<adam_m|adam_v|momentum|second>",
// "<parameter>.grad" for gradients that an even step has left to the next one,
// "fp8.<what>.<micro-batch>.scale" where scales are delayed (model_delayed), and "rope.frequency"; its
// metadata holds step, ranks, data position, training shards, train time, attention scale and every option. A
// parameter's own name is that of its tensor in the file, with the number of its first matrix where that
// holds several. Its tensors do not depend on the number of ranks, nor on the backend.
#pragma once
#include "llmc/run/trainer.h"

// Weights alone. Collective: all ranks call it, rank 0 writes.
bool weights_save(Trainer *t, const char *path, Error *e);
// Accepts BF16 and F32 for any weight, and 62 to 64 scalars. Error: names the tensor, expected and found
// shape.
bool weights_load(Trainer *t, const char *path, Error *e);

// All that a bit-exact continuation needs, between two steps. With several ranks and a pending gradient of an
// even step, saving moves the ranks' shares of it to rank 0: this run and one resumed from the file then go
// on with the same sums.
bool checkpoint_save(Trainer *t, const char *path, Error *e);
// The size of the tensors of such a file after this step.
int64_t checkpoint_bytes(const Trainer *t);
// Refuses options that shape the model and differ, by name, and other training shards (loader_continues); a
// checkpoint without a list of them gets a note, and so does one of another number of ranks.
bool checkpoint_load(Trainer *t, const char *path, Error *e);
// What the head of a file tells before anything is allocated: whether it is a file of weights, and to resume,
// whether the options that shape the model are those of its run.
bool checkpoint_check(const Config *c, const char *path, bool resume, Error *e);
// Sets the options that shape the model from the checkpoint, before the trainer is created, when no shard
// names them.
bool checkpoint_peek_vocab(const char *path, int *vocab_size, Error *e);
// The value of an option in the metadata of a SafeTensors file; NULL: it is not there.
const char *checkpoint_option(const void *file, const char *name);
