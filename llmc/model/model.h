// The network: activations of one packed sequence, forward and backward as lists of ops.
// Source of the formulas: the speedrun GPT (track 1), as each op in ops.h states them.
#pragma once
#include "llmc/model/network.h"
#include "llmc/model/plan.h"
#include "llmc/model/params.h"
#include "llmc/optim/schedule.h"

// What one layer works with. (N, d) floatX and (N) or (N, H) fp32; post is (N, F). Memory lies where the plan
// puts it; what no op uses is NULL.
typedef struct {
    floatX *x;             // residual stream within the layer
    floatX *h;             // input of attention
    floatX *q, *k, *v_raw; // three planes of one product; q and k are normalised and rotated in place
    floatX *v, *yg;        // mixed values, v_raw itself without a backward; gated output of attention
    floatX *h2, *post;     // input of the MLP, relu(h2 c_fc)^2
    uint8_t *h8, *post8;   // their codes in training in FP8; else NULL
    // With MLP_FP8_BACKWARD post has codes alone; transposed, those of the gradient that comes in, of the one
    // before the activation, and these transposed.
    uint8_t *h8t, *post8t, *g8, *g8t, *dpre8, *dpre8t;
    float *rstd, *rstd_q, *rstd_k, *rstd2, *lse;
    floatX *dyg, *dv, *dqkv, *dpre; // gradients
    float *dgate;
    void *scratch; // of attention's backward
} LayerActs;

// What a layer of ATTENTION_HEADS works with, as LayerActs.
typedef struct {
    floatX *q, *k, *v;       // planes of the product; with key offset k is apart
    floatX *y, *mixed, *out; // what attention gives; and DC; and XSA and gate. The same where there is none
    float *rstd_q, *rstd_k, *lse, *gate, *dc_lse;
    floatX *dy, *dq, *dk, *dv; // gradients
    floatX *dv_output, *dq_dc, *dk_dc, *dv_dc;
    float *delta; // (N, H) of sdpa_backward, where heads_output_backward makes it
    floatX *dqkv; // (N, 2 H qk + d)
    // With QKV_FP8: codes of the input and of dqkv, and transposed.
    uint8_t *h8, *h8t, *dqkv8, *dqkv8t;
    float *dh_lead, *du_lead; // (N, leads), with value gates
    int leads;
    void *dc_scratch;
    void *scratch;
} HeadsActs;

// What a node of a Network makes, as LayerActs; see there who has what.
typedef struct {
    floatX *x, *h; // its stream, the norm of it
    float *rstd;
    floatX *dx;   // gradient of the stream, rows
    int dx_pitch; // so many elements apart
    floatX *dh; // NODE_ATTENTION, NODE_MLP: gradient of the norm that it reads; NODE_GENERATOR: of the stream
    float *columns, *dcolumns; // NODE_GENERATOR: (N, K)
    floatX *pre, *dpre;        // (N, width)
} NodeActs;

typedef struct {
    int tokens; // N
    bool backward;
    Plan *planning; // while the plan is made: ops are noted and not run; else NULL
    Plan *spoiled;  // tests: see plan_spoil_dead; else NULL
    char *spoiled_base;
    floatX *x0, *xf; // normed embedding, normed output
    float *rstd0, *rstd_f;
    floatX *out[MAX_LAYERS]; // residual stream after each layer; of one without blocks what it was before
    LayerActs layer[MAX_LAYERS];
    HeadsActs heads[MAX_LAYERS];
    NodeActs node[MAX_NODES];
    float *coef;                 // (Network.num_terms)
    float *sum;                  // (1) for the caller's use in a forward-only pass
    floatX *dx, *dx0, *dh;       // gradients, when there is a backward
    floatX *dstream[MAX_LAYERS]; // gradient that out[i] gets from mixes
    float *dcoef;
    void *head_scratch;
} Acts;

typedef struct KeyCache KeyCache; // llmc/model/cache.h

// Rows that continue texts; see TextCache in ops/attention.h.
typedef struct {
    KeyCache *cache;                              // NULL: the batch is of whole documents
    const int32_t *before, *text, *position;      // (N); the first as in EmbedForward
    const int32_t *text_paired, *position_paired; // (2N) of paired heads: 2n and 2n + 1 are those of row n
} TextRows;

// A batch on the device; points into one block. What the record does not ask for is NULL or 0.
typedef struct {
    int N;
    const int32_t *tokens, *targets; // (N)
    int num_targets;                 // of a row in training, with
    const float *target_weight;      // (num_targets) their weights
    const int32_t *prefix;           // (N) in training: a further target of each row, or -1, with
    const float *prefix_weight;      // (1) its weight
    int number;                      // among the micro-batches of a step on all ranks
    const float *exact_scales;       // (1) see StepParams
    TokenRows rows;
    const int32_t *bigram_rows, *sign_rows; // (N) rows of the bigram table and of its signs
    TokenRows bigram;                       // of bigram_rows; in training
    const int32_t *table;                   // attention table
    int slots;
    const int32_t *table_paired; // that of 2N rows, each document twice as long, for paired heads
    int slots_paired;
    TextRows texts; // then cos and sin of AttentionSetting are those of row n, not of position n
} DeviceBatch;

typedef struct {
    int window_short, window_long; // tokens
    float scale;
    const floatX *cos, *sin; // (positions, frequencies)
    // (2 positions, frequencies) for paired heads: rows 2t and 2t + 1 are those of position t. NULL: the
    // record has none.
    const floatX *cos_paired, *sin_paired;
} AttentionSetting;

// Where the communication of a step attaches itself. Stages: 0 the embedding, 1 + i layer i, then the head.
// NULL: nobody does.
typedef struct {
    void *context;
    void (*needed)(void *context, int stage,
                   Stream s); // before the first op of a step that uses the stage's weights
    void (*done)(void *context, int stage,
                 const ProductContext *c); // after the last op of a step that adds to the stage's gradients
} StageHooks;
// Which micro-batch of a step it is.
enum { FIRST_OF_STEP = 1, LAST_OF_STEP = 2 };

// A mix of the record, as the op takes it: the running stream, a second one, and a third or none.
typedef struct {
    int terms;         // 0: nothing is mixed in
    int second, third; // streams; third NONE: there is none
    bool first_reader; // in backward, which begins the sum of the second stream's gradient
} Mix;

// What the forward of an MLP in FP8 reads beside its input. Codes and scales of the weights are made anew by
// the first micro-batch of a step. Where the record has no delayed scales, nothing outlasts the step: the
// input is normalised, so that no element is beyond sqrt(d), and relu^2 has the bound of amax_relu2_bound.
enum { SCALE_UP, SCALE_DOWN, SCALE_POST, MLP_SCALES };
enum { CODES_UP, CODES_DOWN, CODES_UP_BACKWARD, CODES_DOWN_BACKWARD, MLP_CODES };
typedef struct {
    // (layers, 2, d F): up (F, d), down (d, F). MLP_FP8_BACKWARD: (layers, MLP_CODES, d F), and up (d, F),
    // down (F, d), which its backward reads.
    uint8_t *weights;
    float *scales; // (layers, MLP_SCALES), then that of the input; MLP_FP8_BACKWARD: of the gradient
    float *amax;   // (2), 0 between ops; the second of an MLP's input, which the sum before it notes
    // Delayed scales, the state of a run; micro-batch i of a step has set i mod sets. 0 sets: there are none.
    //   MLP_FP8           (layers), those of down that the next step may use, then (sets, layers), those of
    //                     relu^2
    //   MLP_FP8_BACKWARD  (DELAYED_KINDS, sets, layers)
    float *delayed;
    int sets;
    float *largest; // MLP_FP8_BACKWARD: (DELAYED_KINDS, layers), what they follow; 0 between micro-batches
} MlpCodes;

// The same of q, k and v with QKV_FP8.
typedef struct {
    uint8_t *weights; // (layers, 2, rows d): (rows, d), and transposed
    float *scales;    // (layers), then those of the input and of the gradient
    float *amax;      // (1), 0 between ops
} QkvCodes;

// Weights times their factors, see llmc/model/blocks/factors.c. NULL where there is no factor, where the
// product has it, or without training.
typedef enum { SCALED_QKV, SCALED_O, SCALED_DOWN, SCALED_WEIGHTS } ScaledWeight;

typedef struct {
    const Config *config;
    const Record *record;
    Params params;
    // The parameters by what reads them; NULL where a layer has no such block.
    const Param *embed, *smear_gate, *head, *scalars, *bigram, *signs;
    struct {
        const Param *qkvo, *gate, *up, *down, *value_embed, *value_gate;
        floatX *scaled[SCALED_WEIGHTS];
    } layer[MAX_LAYERS];
    struct {
        const Param *in, *out, *bias;
    } generator[MAX_GENERATORS];
    // Of a record without lists: the mixes, the output's last, with three terms of `network` each.
    Mix mix[MAX_LAYERS + 1];
    Network network; // of one with lists; of others the terms alone
    StageHooks hooks;
    void *head_w8; // quantised head, NULL in HEAD_BF16
    MlpCodes mlp;  // quantised weights of the MLPs; NULL in MLP_BF16
    QkvCodes qkv;  // of q, k and v; NULL in QKV_BF16
} Model;

void model_describe(Model *m, const Config *c);
void model_allocate(Model *m, bool training); // training: with gradients
void model_free(Model *m);
// The delayed scales are rows of (layers); each has a name in checkpoints and belongs to a set, or to none.
typedef struct {
    char name[48];
    int set; // NONE: all ranks have it
    float *data;
} DelayedRow;
bool model_delayed(const Model *m, int index, DelayedRow *row); // false: there is no such row
size_t model_delayed_bytes(const Model *m);
float *model_delayed_row(const Model *m, int row);
float *model_delayed_scale(const Model *m, int kind, int micro_batch); // MLP_FP8_BACKWARD
void model_start_scales(const Model *m, Stream s);                     // as they are before the first step

// Bytes of an Acts for N tokens, after backend_reserve (before it: about so many); acts_place points it into
// `base`.
size_t acts_bytes(const Model *m, int N, bool backward);
void acts_place(Acts *a, const Model *m, int N, bool backward, void *base);
// The two halves of acts_place, for those who look at the plan in between.
void acts_plan(Plan *plan, const Model *m, int N, bool backward);
void acts_follow(Acts *a, const Model *m, int N, bool backward, Plan *plan, void *base);

// Once a step, after the scalars have changed: what is derived from them alone.
void model_prepare(Model *m, Acts *a, Stream s);
// Up to xf.
void model_forward(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, Stream s);
// Loss (1) fp32 device: the sum over the tokens. Forward, backward; gradients are added to the params'
// gradient arenas. place: FIRST_OF_STEP (weights are new: the head is quantised again; gradients of matrices
// begin anew, whatever is there), LAST_OF_STEP, both, or 0.
void model_train_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at, float *loss,
                       int place, Stream s);
// After the last micro-batch of a step: gradients of what model_prepare derived.
void model_finish_gradients(Model *m, Acts *a, Stream s);
// Losses of a forward-only pass with the plain head, of `count` tokens from `first` on.
typedef struct {
    int first, count;
    float *sum;                 // (1) fp32 device
    float *rows;                // (count) fp32 device: of each token; NULL: not wanted
    const uint32_t *impossible; // (Vp, Vp / 32) device: as in HeadLoss; NULL: all tokens are possible
} EvalLoss;
void model_eval_batch(Model *m, Acts *a, const DeviceBatch *b, const AttentionSetting *at,
                      const EvalLoss *loss, Stream s);
