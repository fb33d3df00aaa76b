// What a program in another language needs to run the network with given weights: the record's tables as one
// line of JSON.
#pragma once
#include "llmc/run/trainer.h"

// An object with
//   weights           the file
//   sizes             vocab_size, padded_vocab_size, model_dim, num_heads, mlp_dim,
//   key_width attention         window_short, window_long (tokens), attention_scale, frequencies: as a sample
//   has them parameters        of each its role and number, and the matrices of a file's tensor that it is;
//   storage:
//                     how ops read the file's values: as fp32, or as bf16, rounded or truncated
//   layers, output, generators, head, smear_scalar, dc_keys, pair_hash: as llmc/records/record.h has them.
//                     Layers and tables count from 0; what a layer does not have is not there
// The line belongs to the caller.
char *describe_network(const Trainer *t);
