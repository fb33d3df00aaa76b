// Model FLOPs utilisation: what a step must compute, as a share of what the GPUs could.
#pragma once
#include "llmc/model/params.h"

// FLOPs that one trained token must cost, forward and backward: 6 N + 12 d w summed over the attention
// layers. N: weights of the matrices that multiply each token (attention, MLP, head; embeddings are looked
// up). w: the layer's window, the keys that a query sees; shorter documents see fewer. Counted as in PaLM
// (Chowdhery et al., arXiv 2204.02311, appendix B), where w is the sequence length, and as nanoGPT and llm.c
// count: 2 FLOPs a multiply-add, backward twice forward, nothing for recomputation, norms, rope, softmax and
// the optimizer.
//   step  whose windows are meant
double mfu_flops_per_token(const Params *p, const Config *c, int step);

// Dense bf16 FLOP/s of a GPU by its data sheet, from the name that the driver gives; 0: not known (NULL: no
// GPU).
double mfu_peak_flops(const char *device_name);
