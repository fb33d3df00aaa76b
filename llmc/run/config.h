// The options of a run: one typed table, from which parsing, --help, the log header and the checkpoint record
// are made. Presets are the records (llmc/records): lists of option values, and the network that --network
// names.
#pragma once
#include "llmc/base/common.h"
#include "llmc/optim/newton_schulz.h"
#include "llmc/ops/ops.h"

struct Record;

enum { MAX_OPTIONS = 96 };

typedef struct Config {
    // model
    int vocab_size; // 0 on the command line: taken from the training shard
    int model_dim, num_heads, mlp_dim, block_size;
    const char *network; // the record whose layers and tensors these are
    double lambda_init;  // first block lambda
    // schedule
    int num_scheduled, num_extension;
    double cooldown;
    const char *window_schedule; // "3,7,11": long windows, in blocks, over the scheduled steps
    int window_extension, window_final;
    // By stage, see schedule.h; empty: the same in all.
    const char *window_short, *stage_tokens, *stage_documents, *stage_rates, *rate_starts, *stage_targets,
        *stage_prefix;
    int stage_starts;    // STARTS_UP or STARTS_NEAREST
    int cooldown_start;  // COOLDOWN_FROM_SHARE, COOLDOWN_FROM_STEP or COOLDOWN_TO_FLOOR
    double rate_floor;   // what the rate factor falls to
    int rope_arithmetic; // ROPE_DOUBLE or ROPE_FP32
    // optimizer
    double adam_rate, muon_rate, adam_decay, weight_decay;
    double momentum_low, momentum_high;
    int momentum_warmup, momentum_cooldown;
    int ns; // NsVariant
    int ns_steps;
    const char *ns_tuples, *ns_restarts, *ns_dtype;
    double ns_gain;
    // batches and data
    int micro_batches, group_micro_batches, micro_batch_tokens, max_document;
    int launch_tokens; // 0: those of a micro-batch
    const char *train_files, *val_files;
    int64_t val_tokens;
    int val_every;
    int val_mask; // MASK_NONE, MASK_LAST or MASK_ALL
    bool repeat;
    int epochs;
    // run
    const char *preset, *config;
    int head;       // HeadMode
    int mlp;        // MlpMode
    int qkv;        // QkvMode
    int fp8_scales; // SCALES_BY_MICRO_BATCH or SCALES_SEQUENTIAL
    int64_t seed;
    const char *init_from, *save_init, *resume, *out;
    int save_scalars; // values of the tensor "scalars" in files that are written
    int checkpoint_every, keep_checkpoints;
    int stop_at;
    const char *stop_after;
    bool eval_only, describe, tensorboard;
    const char *eval, *eval_items; // files of evaluations, see eval_set.h; where the losses of items go
    int eval_every;
    bool deterministic, portable;
    int profile;           // steps before the profiled ones; 0: none
    double profile_energy; // seconds of each op; 0: no
    const char *gpus;
    int ranks, device, timeout, threads;
    int graphs;
    int pair_exchange; // PairExchange
    int attention;     // AttentionKernels
    int self_check;    // SelfCheck
    // sampling
    const char *sample, *vocab;
    double temperature, top_p, repetition_penalty;
    int top_k, num_tokens, sample_batch;
    int kv_cache; // off or on
    bool verbose, help;
    bool given[MAX_OPTIONS]; // by index: the command line names the option
} Config;

enum { STARTS_UP, STARTS_NEAREST };
enum { COOLDOWN_FROM_SHARE, COOLDOWN_FROM_STEP, COOLDOWN_TO_FLOOR };
enum { ROPE_DOUBLE, ROPE_FP32 };
enum { MASK_NONE, MASK_LAST, MASK_ALL };
enum { SCALES_BY_MICRO_BATCH, SCALES_SEQUENTIAL };
enum { MIN_PROFILE = 6 };
enum {
    MAX_HEAD_DIM = 1024,
    MAX_WINDOWS = 64,
    MAX_STEP_TOKENS = 1 << 28
}; // a step's tokens are also a validation sequence

// Fills the config from the command line: defaults, then the preset named there, then the other options in
// order. False, with one line in e, for an unknown option, a value that is no number, out of its bounds, or
// an impossible combination.
bool config_parse(Config *c, int argc, char **argv, Error *e);
// The same without the checks that need all options (config_check), and over the options of an earlier run:
//   known  gives the value of an option as text, from `of`; NULL for one that it does not know. NULL: no
//          earlier run
// A preset on the command line that is not that run's own replaces all of its options.
typedef const char *(*KnownOption)(const void *of, const char *name);
bool config_read(Config *c, int argc, char **argv, KnownOption known, const void *of, Error *e);
// What an earlier run that does not know the option `name` had in its place; NULL: nothing that could be
// named.
const char *config_older_value(const char *name, KnownOption known, const void *of);
void config_print_help(FILE *f);

// One option at a time as text, for logs and checkpoints. config_option_name gives NULL after the last. The
// text belongs to the caller. `shapes_model` is true for the options that a checkpoint must agree on.
const char *config_option_name(int index, bool *shapes_model);
char *config_option_value(const Config *c, int index);
bool config_option_is_number(int index);
bool config_option_is_flag(int index);
bool config_given(const Config *c, const char *name); // on the command line, whatever its value
// Options that the command line gives and this run does not look at: a line for reason 0, 1, ..., owned by
// the caller; NULL when there are none for that reason. training: something is trained here
enum { UNUSED_REASONS = 9 };
char *config_unused(const Config *c, bool training, int reason);
// Of all options that the ranks of one run must agree on. The others name files, devices and threads of a
// machine.
uint64_t config_fingerprint(const Config *c);
// Sets one option from text, which is copied, as the command line would.
bool config_set(Config *c, const char *name, const char *value, Error *e);
// The options that a record sets, those of the records that it is based on first.
bool config_apply_record(Config *c, const struct Record *r, Error *e);
// Checks what no single bound can say. Called by config_parse.
bool config_check(const Config *c, Error *e);
// Of these --launch-tokens alone; config_check asks it, too.
bool config_check_launches(const Config *c, Error *e);

// Whether the backend has kernels for what the run needs.
bool config_backend_check(const Config *c, Error *e);

// ---- what follows from them -------------------------------------------------------------------------------

const struct Record *config_record(const Config *c); // whose layers and tensors the run has
NsText config_ns_text(const Config *c); // the Newton-Schulz options as newton_schulz.h parses them
int config_total_steps(const Config *c);
double config_stop_after(const Config *c); // seconds; 0: none, below 0: not a time
int config_vocab_padded(const Config *c);  // up to the next multiple of 128
