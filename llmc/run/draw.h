// Which token comes next: the choice among logits.
#pragma once
#include "llmc/base/common.h"

// Applied in this order:
//   repetition_penalty  logits of the tokens that the text has are divided by it, negative ones multiplied;
//   1: as
//                       they are
//   temperature         logits are divided by it; 0: the likeliest token is taken, the lowest of equal ones
//   top_k               tokens below the k-th largest logit are left out; 0: none
//   top_p               of the rest the likeliest stay whose shares together reach p; 1: all
typedef struct {
    double temperature, top_p, repetition_penalty;
    int top_k;
} DrawRule;

// z (vocab) fp32 host, overwritten. seen: (vocab) what the text has; read with a penalty. uniform: in [0, 1).
int draw_token(const DrawRule *rule, float *z, int vocab, const bool *seen, double uniform);

double draw_uniform(uint64_t *state); // in [0, 1); the state moves on
// The first state for the text of that number, from 0: other random numbers for each text.
uint64_t draw_state(uint64_t seed, uint64_t text);
