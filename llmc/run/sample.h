// Text from a trained model: every prompt of --sample is continued by --num-tokens tokens, or until the model
// begins a new document. Prompts are computed --sample-batch at a time, each in the place of one that is
// done.
//
// With a cache (--kv-cache) a token is one row of a forward pass and a text may have any length. Without one
// each token is a forward pass over the whole text, or over as much of its end as a validation is evaluated
// at a time.
#pragma once
#include "llmc/run/trainer.h"
#include "llmc/text/tokenizer.h"

typedef struct Sampler Sampler;

// Reads the prompts and takes all memory, so that what is wrong shows before any training. NULL: a prompt
// cannot be read or, without a cache, is longer than the context. tokenizer: outlives the sampler
Sampler *sampler_create(Trainer *t, const Tokenizer *tokenizer, Error *e);
void sampler_free(Sampler *s); // NULL is allowed

// Writes the texts in the order of their prompts, each token as it is made; those behind the first that is
// not done wait for it. The bytes written are UTF-8, however tokens cut characters: a character is written
// whole, what is none as U+FFFD. The same for the same --seed, whatever the number of prompts at a time.
void sampler_write(Sampler *s, FILE *f);
char *sampler_speed(const Sampler *s); // what sampler_write took: a line, owned by the caller
