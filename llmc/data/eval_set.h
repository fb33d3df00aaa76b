// What a trained model is evaluated on (--eval TASK=FILE), as tokens.
//
//   hellaswag  the published JSON lines: fields ctx, endings (4) and label. An ending is scored behind ctx
//   and a
//              space; both are encoded by themselves, as llm.c and modded-nanogpt do it.
//              (Zellers et al. 2019, arXiv 1905.07830)
//   lambada    JSON lines with a field text: its last word, with the space before it, is scored behind the
//              rest. (Paperno et al. 2016, arXiv 1606.06031)
//   text       any text: a file or a folder of files, each a document, or JSON lines with a field text each.
//              Documents are cut into pieces of equal length; a piece begins with the document token, and all
//              that follows is scored.
//
// The texts of hellaswag and lambada begin without a document token, as in those programs. In a vocabulary of
// bytes a text's tokens are its bytes.
#pragma once
#include "llmc/text/tokenizer.h"

typedef enum { EVAL_HELLASWAG, EVAL_LAMBADA, EVAL_TEXT, EVAL_TASKS } EvalTask;
enum { MAX_EVALS = 16, EVAL_ENDINGS = 4 };
const char *eval_task_name(EvalTask task);

// One entry of a list "TASK=FILE,TASK=FILE". A comma in a file's name is part of it unless a task follows.
typedef struct {
    EvalTask task;
    char *path; // owned
} EvalEntry;
// Returns how many entries the list has; -1 with a line when one is of another form.
int eval_list_parse(const char *list, EvalEntry entries[MAX_EVALS], Error *e);
void eval_list_free(EvalEntry *entries, int count);

// Tokens of which the last `scored` are predicted, each from all before it.
typedef struct {
    int64_t first;      // in EvalSet.ids
    int tokens, scored; // 1 <= scored < tokens
    int64_t bytes;      // of the scored ones
} EvalText;

typedef struct {
    int64_t line; // of the file; of a text 0
    int label;    // HellaSwag: the right ending
} EvalItem;

typedef struct {
    EvalTask task;
    char *path;      // owned
    int per_item;    // texts of an item: EVAL_ENDINGS or 1
    int64_t count;   // items
    EvalItem *items; // (count), owned
    EvalText *texts; // (count * per_item), owned
    TokenList ids;   // of all texts
    int64_t capacity;
} EvalSet;

// Reads and encodes a file.
//   longest  tokens before the last one that a text may have; `piece` of them in a piece of EVAL_TEXT, at
//            least 1 and at most `longest`
// False with a line: a file that cannot be read, a line that is not of its task's form, a text that is too
// long, no items.
bool eval_set_open(EvalSet *set, const EvalEntry *entry, const Tokenizer *tokenizer, int longest, int piece,
                   Error *e);
void eval_set_close(EvalSet *set); // a zeroed one is allowed
uint64_t eval_set_fingerprint(const EvalSet *set);
