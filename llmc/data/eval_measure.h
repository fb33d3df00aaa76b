// What the losses of an evaluation's texts amount to.
#pragma once
#include "llmc/data/eval_set.h"
#include "llmc/io/evaluated.h"

// Of one text.
typedef struct {
    double loss; // of the scored tokens, sum in nats
    bool exact;  // LAMBADA: each scored token is the likeliest one
} EvalScore;

// The ending of the smallest loss: in sum, or by its tokens. The first one of equals.
int eval_choice(const EvalText *texts, const EvalScore *scores, bool by_token);

// hellaswag  accuracy: the share of items whose right ending has the smallest loss in sum;
//            accuracy_normalised: divided by the ending's number of tokens
// lambada    accuracy: all tokens of the last word are the likeliest ones;
//            perplexity: e^(mean over items of the word's loss)
// text       bits_per_byte: sum of the losses / ln 2 / bytes;  loss: nats a token
// Standard errors: of a mean over n items sqrt(sum (x - mean)^2 / (n (n - 1))), for perplexity times the
// perplexity; of a ratio r = sum a / sum b over n pieces sqrt(n / (n - 1) sum (a - r b)^2) / sum b. One item
// has none.
//   scores (set->count * set->per_item)
// Fills in all but `seconds`. False with a line that names the item, when a loss is no finite number.
bool eval_measure(const EvalSet *set, const EvalScore *scores, Evaluated *out, Error *e);
