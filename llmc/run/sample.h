// Text from a trained model: one token after another, each from a forward pass over all before it (no cache
// of keys and values).
#pragma once
#include "llmc/text/tokenizer.h"
#include "llmc/run/trainer.h"

// Continues config->sample by config->num_tokens tokens, or until the model begins a new document, and writes
// prompt and continuation to f as they come. Deterministic for the same --seed. Error: prompt longer than the
// context.
bool sample_write(Trainer *t, const Tokenizer *tokenizer, FILE *f, Error *e);

// Whether sample_write can work, before training: false with a line when the prompt is longer than the
// context.
bool sample_check(const Trainer *t, const Tokenizer *tokenizer, Error *e);

// The next token from logits z (vocab) fp32 host, overwritten: temperature 0 takes the likeliest, else
// softmax(z / temperature) over the top_k largest (0: all). `uniform` is a number in [0, 1).
int sample_token(float *z, int vocab, double temperature, int top_k, double uniform);
