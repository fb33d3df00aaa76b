// A record of the speedrun is a set of tables: this file says what they hold, a file beside it is a record.
// Nothing outside this folder names a layer, a tensor or a constant of one record.
//
// clang-format off
//   ParamSpec   a row is a trained tensor, or one for each layer that has the block it belongs to. From the
//               rows follow
//                 llmc/model/params.h     memory, by (storage, sharding, cadence), and the initial values
//                 llmc/optim/optimizer.h  batches of equal updates, by (optimizer, shape, constants)
//                 llmc/dist/exchange.h    buckets of communication, by (sharding, first use)
//                 llmc/io/checkpoint.c    files: weights, state of the optimizer, pending gradients
//   LayerSpec   a row is a layer: its blocks, and the streams of which the residual stream is mixed before
//               and behind them
//   StageSpec   a row is a stretch of the schedule
//   Record      the tables, and the options that the preset sets. What a run can override by name is an
//               option (llmc/run/config.h)
//
// Where later records fit; each field comes with the op that reads it:
//   tables by rows          a Sharding: only touched rows are reduced, updated and gathered; the loader knows
//                           them before the step
//   sampled softmax         StageSpec gets the number of candidates
//   averages                Record gets the steps from which averages of a tensor are kept, and the step
//                           that reads them
// clang-format on
#pragma once
#include "llmc/ops/ops.h"

typedef struct Config Config;

// ---- tensors ----------------------------------------------------------------------------------------------

// What a tensor is to the block that reads it: the name in a file is its own matter.
typedef enum {
    ROLE_EMBED,          // (Vp, d) rows gathered by token; also read by the smear
    ROLE_SMEAR_GATE,     // (1, inputs), at most MAX_GATE_INPUTS
    ROLE_VALUE_EMBED,    // (Vp, d) each, `count` of them
    ROLE_VALUE_GATE,     // (H, 2 * inputs) each, of the value embedding of that number
    ROLE_BIGRAM,         // (any, width) rows gathered by pairs of tokens
    ROLE_SIGNS,          // (any, width) signs of those rows
    ROLE_HEAD,           // (Vp, d)
    ROLE_SCALARS,        // fp32; rows of this role are one vector, to whose elements layers and coefficients
                         // refer by number, counted through the rows
    ROLE_QKVO,           // of attention: Wq, Wk, Wv, Wo, (out, in) each, or those that the next two leave
    ROLE_VO,             // Wv, and Wo where it has no row of its own: joined to Wq, Wk
    ROLE_O,              // Wo, joined to Wv
    ROLE_ATTENTION_GATE, // (H, inputs), at most MAX_GATE_INPUTS
    ROLE_MLP_UP,         // (d, F)
    ROLE_MLP_DOWN,       // (d, F)
    ROLE_GENERATOR_IN,   // (hidden, d) each, of the generator of that number
    ROLE_GENERATOR_OUT,  // (columns, hidden) each
    ROLE_GENERATOR_BIAS, // (1, columns) each
    ROLES
} Role;

typedef enum {
    STORE_HALF,   // floatX
    STORE_MASTER, // fp32, with a rounded floatX copy, which is what products read and what travels
    STORE_SPLIT,  // the same with a copy that is truncated; initial values are those of bf16
    STORE_FLOAT,  // fp32
    STORE_SIGNS   // a bit an element, see RowSigns in ops/tables.h; +1 and -1 in files
} Storage;

typedef enum {
    SHARD_ROWS,    // every tensor's rows are split over the ranks
    SHARD_TENSORS, // whole tensors are dealt out to the ranks
    REPLICATED     // every rank holds and updates all of it
} Sharding;

typedef enum { INIT_ZERO, INIT_NORMAL, INIT_UNIFORM, INIT_RUNS, INIT_SIGNS } InitKind;

// A stretch of a vector: `repeat` times the `width` values.
typedef struct {
    int repeat, width;
    float value[2];
    size_t option; // offset in Config of a double that stands in place of value[0]; 0: none
} InitRun;

typedef struct {
    InitKind kind;
    double scale;        // INIT_NORMAL: the deviation; INIT_UNIFORM: U(-b, b), b = scale / sqrt(model-dim)
    double times;        // unless 0, what was drawn is rounded to bf16 and multiplied by this
    int matrices;        // the first so many are drawn, the others zero; 0: all
    const InitRun *runs; // INIT_RUNS: ends with a repeat of 0; goes on through all tensors of the row
} InitSpec;

// ADAM keeps its moments as the tensor is stored, ADAM_DECAY in fp32. FIXED: not trained.
typedef enum { ADAM, ADAM_DECAY, NORMUON, FIXED } OptimizerKind;

typedef struct {
    OptimizerKind kind;
    double rate;         // factor on the optimizer's rate (--adam-rate, --muon-rate)
    double beta1, beta2; // NorMuon: beta2 alone, its momentum has a schedule
    double eps;          // Adam
    double decay;        // ADAM_DECAY: factor on --adam-decay
    int every; // updated at steps t with (t + 1) % every == 0, on the sum of the gradients since the last
               // update
    bool fp32; // NorMuon: orthogonalised in fp32 whatever --ns-dtype says
    // Up to and with the first update of stage `own_from` (0: of none) the tensor is one with that of role
    // `tied_to`, of the same shape: who reads it reads that one, and its gradient is added there. Then it
    // goes on with a copy of that one's values and state.
    int own_from;
    Role tied_to;
} UpdateSpec;

// An extent of a tensor: `times` a size of the run.
typedef enum {
    SIZE_ONE, SIZE_MODEL, SIZE_HEADS, SIZE_QUARTER_HEAD, SIZE_MLP, SIZE_VOCAB, SIZE_HALF_VOCAB
} Size;
typedef struct {
    int times;
    Size of;
} Extent;

// How a file keeps the tensors of a row: as matrices of a tensor. Where all have one name, that tensor holds
// them all, and it may have further matrices in front, between or behind, which are zero where we write and
// nothing where we read. In files of others its first extent may be larger.
enum { FILE_DIMS = 4, NO_DIMS = -1 };
typedef struct {
    int dims; // 0: two, those of the tensor; NO_DIMS: a number
    Extent shape[FILE_DIMS];
    int first, step; // the row's k-th tensor begins with matrix first + k step; step 0: one follows the other
    bool transposed; // matrices are (cols, rows) in the file
    int least;       // of one dimension: it may end after so many values, the others are as at the start
} FileSpec;

typedef struct {
    Role role;
    const char *name; // in files. With %d: the layer, or the number within the role
    int count;        // of a row that is of no layer: tensors; 0: one
    int first;        // of such a row: number of the first one
    Extent rows, cols; // of a matrix
    Extent matrices;   // stacked in the tensor, each orthogonalised by itself; {0}: one
    bool joined;       // each tensor stands right behind that of the row before, in the same slot
    Storage storage;
    Sharding sharding;
    InitSpec init;
    UpdateSpec update;
    FileSpec file;
} ParamSpec;
enum { MAX_PARAM_ROWS = MAX_UPDATE_RULES };

// ---- layers -----------------------------------------------------------------------------------------------

// Streams, besides the outputs of layers, by their number. All are (N, d).
//   RUNNING   the residual stream as it is where the list stands
//   EMBEDDED  the normalised embedding
//   BIGRAM    rows of the bigram table with their signs
//   BRANCH    what the block before the list gives
//   IN(i)     the residual stream in layer i, after the layer's mix
//   ROWS(j)   rows of value table j by token
enum { NONE = -1, RUNNING = -2, EMBEDDED = -3, BIGRAM = -4, BRANCH = -5, FIRST_IN = -100, FIRST_ROWS = -200 };
#define IN(i) (FIRST_IN - (i))
#define ROWS(j) (FIRST_ROWS - (j))

// The k-th number that a generator makes for a token. 0 stands for none.
#define COLUMN(generator, k) (1 + (generator) * GENERATOR_MOST + (k))

// c * stream, with c = weight * column + plus; see Coefficient in ops.h. A weight of factor 0 ends a list.
typedef struct {
    int stream;
    Coefficient weight;
    int column; // 0: 1
    float plus;
} MixTerm;
// Most streams of a list where layers have nothing but a mix (mix_rmsnorm_forward): the running stream and
// one or two others, in this order. A stream's gradient is summed over the lists that have it second; one
// that is third in a list is in no other.
enum { MIX_TERMS = 3 };

// ATTENTION_PLAIN: the attention of attention.h, all in one op. ATTENTION_HEADS: that of heads.h.
typedef enum { ATTENTION_NONE, ATTENTION_PLAIN, ATTENTION_HEADS } AttentionKind;
typedef enum { MLP_NONE, MLP_RELU2 } MlpKind;

// Of ATTENTION_HEADS. Columns are 0 where there is none.
typedef struct {
    int input;           // stream whose norm it reads: RUNNING, or a layer's output
    bool paired, offset; // see HeadsForward
    int factors;         // scalars: factor of Wq, Wk and Wv, and behind it that of Wo
    // First of value_groups columns: factors of the value embedding, one for each group of heads. 0: gates
    // (ROLE_VALUE_GATE) of the table's number.
    int value_column, value_groups;
    MixTerm extra[MIX_STREAMS]; // added to v
    int xsa, gate;              // first of H columns: alpha and gate of HeadsOutput
    int dc_weights, dc_factors; // first of H columns: w1 and w2 of DcForward
} HeadsSpec;

typedef struct {
    MixTerm mix[MIX_STREAMS]; // the residual stream that enters the layer; empty: as it is
    AttentionKind attention;
    bool long_window;
    int value_embed; // number of the table among those of its row, counted from 1; 0: none
    int v_lambdas;   // ATTENTION_PLAIN: scalars: factors of v and of the value embedding, two in a row
    HeadsSpec heads;
    MlpKind mlp;
    // The residual stream behind the block; empty: the sum of what it was and BRANCH.
    MixTerm after_attention[MIX_STREAMS], after_mlp[MIX_STREAMS];
} LayerSpec;
enum { MAX_LAYERS = 32 };

// A generator makes `columns` numbers for every token, see generator.h. Its tensors have its number: its
// place in the record's table.
typedef struct {
    int input; // stream: EMBEDDED, or a layer's output
    int columns;
    Coefficient scale;
} GeneratorSpec;
enum { MAX_GENERATORS = 4 };

// ---- stages -----------------------------------------------------------------------------------------------

// A stretch of the schedule, see llmc/optim/schedule.h; the last row is the extension. A column without any
// value is as the options --micro-batch-tokens and --max-document say, the rate 1.
typedef struct {
    int window; // long window, blocks
    int micro_batch_tokens, max_document;
    double rate;
    double rate_after;   // the rate holds behind this share of the scheduled steps; 0: from the first step on
    const char *targets; // weights of the loss, as in --stage-targets; NULL: "1"
    const char *prefix;  // weight of its prefix term, as in --stage-prefix; NULL: "0"
    int window_short;    // blocks; no row has any: half of the long ones
} StageSpec;

// ---- record -----------------------------------------------------------------------------------------------

typedef struct {
    const char *option, *value;
} Field;

// Scales of the MLP's forward in FP8. All 0: they follow from the weights alone, in fp32. Else in the
// arithmetic of scale_exact and scale_delayed (ops/mlp.h), and that of h from the micro-batch's own amax.
typedef struct {
    double post, down; // a delayed scale of relu^2, of MLP down: amax * this / 448
    int exact_until;   // up to and with this step that of MLP down follows from the weights at hand
    bool up_alone;     // with 0 above: the product with MLP down is in bf16, the other one's scales are exact
} MlpScales;

// Scales of FP8 in both directions, --mlp fp8-backward and --qkv fp8. A range is 448 times a scale. Those of
// the MLP's input, of relu^2 and of the gradient before it are delayed: they follow the largest value of the
// step before (scales_follow). Those of q's, k's and v's input and gradient are constant, all others exact.
enum { DELAYED_INPUT, DELAYED_POST, DELAYED_GRADIENT, DELAYED_KINDS };
typedef struct {
    double headroom; // 0: the record has none of these scales
    struct {
        double range, least; // before the first step; the least scale
    } mlp[DELAYED_KINDS];
    double qkv_input, qkv_gradient; // ranges; 0: there is no --qkv fp8
    bool forward_too;               // --mlp fp8 has a meaning as well, by mlp_scales
} Fp8Scales;

typedef struct Record {
    const char *name;
    const struct Record *based_on; // its fields come first
    const char *note;              // of --help; NULL: none
    const Field *fields;           // options that the preset sets; ends with a NULL. NULL: none
    const StageSpec *stages;       // NULL: those of based_on
    int num_stages;
    // The network. layers NULL: that of based_on.
    const LayerSpec *layers;
    int num_layers;
    const ParamSpec *params;
    int num_params;
    const GeneratorSpec *generators; // each of their columns is used once
    int num_generators;
    int heads;                   // --num-heads, for which their columns are laid out; 0: any
    int dc_keys;                 // of DcForward
    MixTerm output[MIX_STREAMS]; // normalised, it goes to the head
    int smear_lambda;            // scalar
    HeadSpec head;
    MlpScales mlp_scales; // --mlp fp8
    Fp8Scales fp8;        // --mlp fp8-backward, --qkv fp8
    const char *skips; // as older checkpoints call this network, in "option.skips"; NULL: there are none
} Record;

extern const Record *const records[]; // in the order of --help, ends with a NULL

const Record *record_find(const char *name); // NULL: there is none
// Whose network the record has: itself, or one of those that it is based on.
const Record *record_network(const Record *r);
int64_t record_extent(const Config *c, Extent e);
// The last two dimensions that the tensors of a row have in files.
void record_file_matrix(const Config *c, const ParamSpec *p, int64_t *rows, int64_t *cols);
int record_key_width(const Config *c); // of a head's q and k, by the weights of attention
const ParamSpec *record_row(const Record *r, Role role); // the first of this role; NULL: there is none
bool record_layer_has(const LayerSpec *l, Role role); // whether the layer has the block that reads this role
bool record_has_attention(const Record *r, AttentionKind kind); // in some layer
bool record_has_paired(const Record *r);                         // heads in some layer
// Whether the run has scales that depend on the order of micro-batches, or on how many of them a rank has.
bool record_scales_are_state(const Config *c);
// Whether a position's output depends on documents before its own, further than on their last tokens.
bool record_crosses_documents(const Record *r);
// A stream as tables name it, for messages: IN(3), or a layer's number.
typedef struct {
    char text[32];
} StreamName;
StreamName record_stream_name(int stream);
// Counts the terms of a list.
int record_mix_terms(const MixTerm *mix);
// Whether a layer has more than a mix at its entrance and ATTENTION_PLAIN: llmc/model/network.h is for these.
bool record_has_lists(const Record *r);

// The files of this folder.
extern const Record record_2025_10_27, record_2025_11_10, record_2025_11_18, record_2025_11_29,
    record_2025_12_10, record_2026_05_27, record_2026_07_17, record_2026_08_03, record_2026_08_06,
    record_tiny, record_tiny_2026, record_toy, record_toy_targets, record_toy_2026, record_toy_2026_08;
