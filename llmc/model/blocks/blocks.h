// What a layer is made of. A block takes its tensors from the plan and runs its ops forward and backward;
// what enters and leaves it is the residual stream within the layer, and its gradient.
#pragma once
#include "llmc/model/model.h"

// One micro-batch on its way through the model.
typedef struct {
    const Model *m;
    Acts *a;
    const DeviceBatch *b;
    const AttentionSetting *at;
    int place; // FIRST_OF_STEP, LAST_OF_STEP
    Stream s;
    const ProductContext *products; // on s
} Pass;

// What enters a block and what it gives, (N, d) each.
typedef struct {
    const floatX *h, *x; // normalised input; added to what the block gives, or NULL
    floatX *out;         // may be x
    const floatX *dout;  // gradient of out
    floatX *dh;          // out: that of h
} BlockPort;

typedef struct {
    // The tensors of a layer of N tokens; those of its gradients when there is a backward.
    void (*plan)(Acts *a, const Model *m, int layer, PlanArena *b);
    void (*forward)(const Pass *p, int layer, const BlockPort *port);
    void (*backward)(const Pass *p, int layer, const BlockPort *port);
} Block;
extern const Block attention_block, heads_block, mlp_block;

// The embedding and the head, at the two ends of the residual stream.
void embed_forward_block(const Pass *p);                                       // to a->x0
void embed_backward_block(const Pass *p, const floatX *dx, const floatX *dx0); // dx0 may be NULL
void head_plan(Acts *a, const Model *m, PlanArena *b);
void head_train_block(const Pass *p, float *loss); // from a->xf to the loss and a->dh
void head_eval_block(const Pass *p, const EvalLoss *loss);

// What FP8 needs in training, see llmc/model/codes.c.
void model_allocate_codes(Model *m);
void model_free_codes(Model *m);
void model_follow_scales(const Pass *p); // behind a micro-batch

// Weights alpha w of a layer, factors.c.
typedef struct {
    const floatX *w;
    const float *alpha; // of the product; NULL: w holds it, or there is none
} EffectiveWeight;
EffectiveWeight effective_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w);
void scale_weight(const Pass *p, int layer, ScaledWeight which, const floatX *w); // before its use
// From the gradient dw of alpha w to those of alpha and of w, behind the step's last micro-batch. w NULL:
// alpha's is taken elsewhere.
void factor_backward(const Pass *p, int layer, ScaledWeight which, float *dw, const floatX *w);
void model_allocate_scaled(Model *m);
void model_free_scaled(Model *m);

// Where the sum before an MLP adds to the largest magnitude of its input; NULL: nowhere.
float *mlp_input_amax(const Pass *p);

// The MLP in FP8 in both directions, mlp_both.c.
void mlp_both_plan(Acts *a, const Model *m, int layer, PlanArena *b);
void mlp_both_forward(const Pass *p, int layer, const BlockPort *port);
void mlp_both_backward(const Pass *p, int layer, const BlockPort *port);

// The mix that enters layer i, or the output's. x: the stream, h: the same normalised; dgate NULL where there
// is no gate.
void mix_forward(const Pass *p, int i, floatX *x, floatX *h, float *rstd);
void mix_backward(const Pass *p, int i, const floatX *h, const float *rstd, const float *dgate);

// The nodes of m->network.
void network_plan(Acts *a, const Model *m, PlanArena *b);
void node_forward(const Pass *p, int node);
void node_backward(const Pass *p, int node);
const float *column_of(const Pass *p, int column); // (N, K) from this column on; NULL: there is none
float *column_grad(const Pass *p, int column);
int column_stride(const Pass *p, int column); // K
int heads_width(const Model *m);              // rows of Wq, Wk and Wv together

// Whether the op that follows is to be run, and not only noted; the tensors are those of Acts that it uses.
bool pass_runs(const Acts *a, const void *const *tensors, int count);
#define USES(...) \
    (const void *const[]){__VA_ARGS__}, sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *)

typedef struct {
    const floatX *qkvo, *fc, *proj, *gate;
    float *dqkvo, *dfc, *dproj, *dgate;
    const floatX *value_embed;
    float *dvalue_embed;
    const float *lambda; // factors of v and of the value embedding (2)
    float *dlambda;
} LayerParams;
LayerParams layer_params(const Model *m, int layer);
float *model_scalar(const Model *m, int i); // a trained scalar
float *model_scalar_grad(const Model *m, int i);
bool model_is_empty(const Model *m, int i); // the layer has no block

// Without memory, as while a plan is made, parts of tensors are NULL too.
static inline float *part(float *x, int64_t i) { return x ? x + i : NULL; }
static inline const floatX *part_x(const floatX *x, int64_t i) { return x ? x + i : NULL; }
