// What a run leaves behind: <folder>/<uuid>.txt, the log that is evidence of a record; <uuid>.jsonl beside
// it, for plots; and the progress on the console. Rank 0 writes, the others get NULL from logger_open and may
// pass it on to every function.
//
// The log: the complete source of the program, 100 "=", version lines, "resumed: ..." in the log of a resumed
// run, the output of nvidia-smi, 100 "=", and then, read by
// other people's tools and therefore exact to the character,
//   step:S/T val_loss:%.4f train_time:%.0fms step_avg:%.2fms    before the training step of that index, and
//   after the last
//   step:S/T train_time:%.0fms step_avg:%.2fms                  after every training step, S from 1
//   profile: ...                                                a line of the table of --profile
//   evaluation: step:S/T ...                                    the result of one --eval, as evaluated_text
//   has it validation data: sha256 H, vocabulary of V ids, N tokens predicted    at the end of a whole run;
//   of the shard peak memory allocated: A MiB reserved: R MiB                at the end
// where step_avg = train_time / max(S, 1). Every line is in the file when its function returns: a killed run
// leaves its log.
//
// JSON lines: {"event": "options", "run": uuid, "options": {name: value, ...}} first (with "resumed": text in
// a resumed run), then
//   {"event": "step", "step", "loss", "lr", "momentum", "ms", "mfu", "tokens", "tokens_left", "train_ms"}
//   {"event": "validation", "step", "val_loss", "train_ms"}
//   {"event": "evaluation", "step", ...} with the members of evaluated_json (evaluated.h)
//   {"event": "message", "text"}   {"event": "memory", "allocated_mib", "reserved_mib"}   {"event": "end"}
// where "lr" and "momentum" are NorMuon's and "mfu" is there on GPUs whose peak is known. Numbers are in the
// shortest form that reads back exactly; those that JSON cannot hold (NaN, infinity) are null.
//
// On request TensorBoard's event file beside them: loss/train, loss/validation, schedule/learning_rate,
// schedule/momentum, speed/step_ms, speed/tokens_per_second, speed/mfu, <task>/<measure>.
//
// A file that cannot be written (full disk) costs one note; the run goes on without it.
#pragma once
#include "llmc/io/evaluated.h"

typedef struct Logger Logger;
typedef enum { KIND_TEXT, KIND_NUMBER, KIND_FLAG } OptionKind; // as JSON

// What stands in the head of a log. Nothing of it is kept.
typedef struct {
    const char *source; // of the program: source_size bytes, whole lines
    size_t source_size;
    const char *commit; // it was built from
    int argc;
    char **argv;
    const char *(*version_line)(
        int index);      // from index 0, NULL after the last; must not hold what changes from run to run
    const char *resumed; // of a resumed run: step and file; else NULL
    int steps_done;      // before this process
    bool tensorboard;    // an event file, too
    bool verbose;        // details go to the console, too
    double
        patience; // seconds that nvidia-smi may take; one that takes longer is left out, and the log says so
} LogHead;

// Makes both files in `folder`, named by `uuid` (36 characters), writes the head of the log up to the second
// line of "=", and shows the log's name. NULL for a rank other than 0; never for rank 0.
Logger *logger_open(const char *folder, const char *uuid, int rank, const LogHead *head);
void logger_close(Logger *l);

// For the first JSON record: call for every option, before anything below.
void logger_option(Logger *l, const char *name, const char *value, OptionKind kind);

// A remark for console and JSON lines; the log itself has no place for it.
void logger_message(Logger *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
// One that the console shows with --verbose only.
void logger_detail(Logger *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
// A line of a profile, "profile: " and the text: for the log as well.
void logger_profile(Logger *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

// step: training steps done; total: steps of the run; loss: mean per token in nats; train_ms: training time
// since step 0.
void logger_validation(Logger *l, int step, int total, double loss, double train_ms);

// An evaluation after `step` training steps.
void logger_evaluation(Logger *l, int step, int total, const Evaluated *r);

// A training step; all sums are over all ranks.
typedef struct {
    int step, total; // as above
    double train_ms, loss;
    double rate, momentum;      // NorMuon's
    double tokens, tokens_left; // of the step, and of all steps after it
    double flops;               // of the step
    double peak_flops;          // FLOP/s that the GPUs could compute; 0: not known
} StepReport;
// After every step. The console shows tokens per second, the time that is left, and model FLOPs utilisation
// (llmc/run/mfu.h): on a terminal one line is rewritten; elsewhere a line appears every few seconds and after
// the last step.
void logger_step(Logger *l, const StepReport *r);

// What was validated on: the SHA-256 of the shard in hex (NULL: not known), its vocabulary, and the tokens
// that were predicted.
void logger_validation_data(Logger *l, const char *sha256, int vocab_size, int64_t tokens);

// Device memory in MiB. The last line of a finished run.
void logger_memory(Logger *l, double allocated, double reserved);

// The run ends here, without a result: {"event": "failure", "text"}.
void logger_failure(Logger *l, const char *text);

// The log's path, owned by the logger. NULL: there is none.
const char *logger_path(const Logger *l);
