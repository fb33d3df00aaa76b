// Evaluations of a run's model (--eval): texts packed into batches of the size of a validation's part, so
// that a pass over them is as fast as one in training. What a text's losses are does not depend on its
// neighbours in the batch:
//   ... text, D | D | text, D | D | text ...     D: the document token; |: attention ends here
// The second D and the text behind it read nothing before the first D (smear, bigram, key offset reach one
// token back, and the second D attends to itself alone). A batch begins with D in place of a text.
#pragma once
#include "llmc/data/eval_measure.h"
#include "llmc/run/trainer.h"

typedef struct Evaluation Evaluation;

// Reads and encodes the files of config->eval on every rank. NULL with a line: no vocabulary, what
// eval_set_open refuses, files that differ between ranks, --eval-items that cannot be written.
Evaluation *evaluation_open(Trainer *t, Error *e);
void evaluation_close(Evaluation *v); // NULL is allowed
int evaluation_count(const Evaluation *v);

// Evaluates file `index`, each rank its share of the items, between two steps, with the windows of the next
// one; `final`: those of the last validation. r: the result, on rank 0. False there with a line when a loss
// is no finite number. Rank 0 shows progress on stderr, and writes --eval-items with the run's step.
bool evaluation_run(Evaluation *v, int index, bool final, Evaluated *r, Error *e);
