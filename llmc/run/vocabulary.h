// The vocabulary that the shards were written with, by --vocab.
#pragma once
#include "llmc/run/config.h"
#include "llmc/text/tokenizer.h"

#define VOCABULARY_FOLDER "data/vocab" // where data/gpt2_vocab.sh puts it

// Of a run whose vocab_size is known: single bytes where the shards have them and --vocab is not given, else
// its files or those of VOCABULARY_FOLDER. NULL with an Error: they are not there or damaged, or of another
// size than the model's.
//   use  what needs it, for the message
Tokenizer *vocabulary_open(const Config *c, const char *use, Error *e);
