// Attention over packed documents by cuDNN, through its C backend API alone.
//
//   y   = softmax(scale q k^T) v          per head; token i sees token j of its document when 0 <= i - j <=
//   window lse = log(sum(exp(scale q k^T)))      per token and head, kept for the backward pass
//
// The library has no call for this. One describes the arithmetic as a graph of small operations on score
// matrices of shape (slots, heads, longest, longest); it recognises the whole and puts a fused kernel in its
// place. Order and data types of the operations belong to what it recognises: change them with care, and
// believe results only, not that a plan compiles. Scale and window are read on the host at each call, and
// where documents lie is read on the GPU: one plan serves every window and number of tokens and, in a
// captured graph, every batch. Fixed are only the number of slots and the longest document.
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/device/scratch.h"
#include <cudnn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef cudnnBackendDescriptor_t Desc;
enum { MAX_DESCRIPTORS = 256, MAX_OPERATIONS = 64, MAX_CONFIGS = 8 };

struct AttentionPlan {
    AttentionShape shape;
    Desc made[MAX_DESCRIPTORS]; // all of them, the compiled plan included
    int num_made;
    Desc plan;
    size_t workspace; // bytes
};

// A description under construction, and the tensors that its operations share.
typedef struct {
    AttentionPlan *p;
    Error *error;
    cudnnStatus_t status; // the first failure; all further steps then do nothing
    Desc op[MAX_OPERATIONS];
    int num_ops;
    int64_t next_id;
    Desc lengths, qkv_start, out_start, lse_start, scale, reach, minus_inf, one;
} Builder;

enum {
    Q = 1,
    K,
    V,
    Y,
    LSE,
    D_Y,
    D_Q,
    D_K,
    D_V,
    ROW_SUM,
    DQ_SUM,
    LENGTHS,
    QKV_START,
    OUT_START,
    LSE_START,
    SCALE,
    REACH,
    MINUS_INF,
    ONE,
    FIRST_VIRTUAL = 100
};
typedef enum { REAL, VIRTUAL, HOST_SCALAR } Storage;
static const cudnnDataType_t F32 = CUDNN_DATA_FLOAT, BF16 = CUDNN_DATA_BFLOAT16, I32 = CUDNN_DATA_INT32,
                             BOOL = CUDNN_DATA_BOOLEAN;
static cudnnHandle_t handle;

// ---- descriptors: create, set attributes, finish ---------------------------------------------------------

static void check(Builder *b, cudnnStatus_t status, const char *what)
{
    if (b->status || !status)
        return;
    char text[512];
    cudnnGetLastErrorString(text, sizeof text);
    b->status = status;
    error_set(b->error, "cuDNN: %s: %s: %s", what, cudnnGetErrorString(status), text);
}

static Desc make(Builder *b, cudnnBackendDescriptorType_t type)
{
    Desc d = NULL;
    assert(b->p->num_made < MAX_DESCRIPTORS);
    if (!b->status)
        check(b, cudnnBackendCreateDescriptor(type, &d), "create descriptor");
    if (d)
        b->p->made[b->p->num_made++] = d;
    return d;
}

static void set(Builder *b, Desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t n, const void *value)
{
    if (!b->status)
        check(b, cudnnBackendSetAttribute(d, name, type, n, value), "set attribute");
}

static void set_desc(Builder *b, Desc d, cudnnBackendAttributeName_t name, Desc value) // leaves a NULL unset
{
    if (value)
        set(b, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static Desc finish(Builder *b, Desc d)
{
    if (!b->status)
        check(b, cudnnBackendFinalize(d), "finalize");
    return d;
}

// ---- tensors ---------------------------------------------------------------------------------------------

static Desc tensor(Builder *b, int64_t id, cudnnDataType_t type, const int64_t dim[4],
                   const int64_t stride[4], Storage storage, Desc start)
{
    Desc t = make(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16;
    bool virtual = storage == VIRTUAL, by_value = storage == HOST_SCALAR;
    if (!id)
        id = b->next_id++;
    set(b, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(b, t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(b, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dim);
    set(b, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    set(b, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(b, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &virtual);
    if (by_value)
        set(b, t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    set_desc(b, t, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, start);
    return finish(b, t);
}

static Desc vector(Builder *b, int64_t id, cudnnDataType_t type, int64_t n, Storage storage)
{
    return tensor(b, id, type, (int64_t[]){n, 1, 1, 1}, (int64_t[]){1, 1, 1, 1}, storage, NULL);
}

// (slots, heads, longest, longest), never stored.
static Desc score(Builder *b, cudnnDataType_t type, bool swap)
{
    int64_t h = b->p->shape.heads, n = b->p->shape.longest, dim[4] = {b->p->shape.slots, h, n, n};
    int64_t plain[4] = {h * n * n, n * n, n, 1}, swapped[4] = {h * n * n, n * n, 1, n};
    return tensor(b, 0, type, dim, swap ? swapped : plain, VIRTUAL, NULL);
}

// An (N, d) buffer seen as (slots, heads, longest, e), or with the last two swapped.
static Desc packed(Builder *b, int64_t id, cudnnDataType_t type, Desc start, bool swap, Storage storage)
{
    int64_t e = b->p->shape.head_dim, n = b->p->shape.longest, slots = b->p->shape.slots,
            h = b->p->shape.heads, row = h * e;
    int64_t dim[4] = {slots, h, n, e}, stride[4] = {n * row, e, row, 1};
    int64_t dim_swapped[4] = {slots, h, e, n}, stride_swapped[4] = {n * row, e, 1, row};
    return swap ? tensor(b, id, type, dim_swapped, stride_swapped, storage, start)
                : tensor(b, id, type, dim, stride, storage, start);
}

static Desc qkv(Builder *b, int64_t id, bool swap) { return packed(b, id, BF16, b->qkv_start, swap, REAL); }
static Desc out(Builder *b, int64_t id) { return packed(b, id, BF16, b->out_start, false, REAL); }

// One fp32 per token and head: stored as (N, H), or virtual.
static Desc per_row(Builder *b, int64_t id, Storage storage)
{
    int64_t h = b->p->shape.heads, n = b->p->shape.longest;
    int64_t dim[4] = {b->p->shape.slots, h, n, 1}, stored[4] = {h * n, 1, h, 1}, plain[4] = {h * n, n, 1, 1};
    return tensor(b, id, F32, dim, storage == REAL ? stored : plain, storage,
                  storage == REAL ? b->lse_start : NULL);
}

// ---- operations: each adds a node to the graph and returns its result ------------------------------------

static Desc add_op(Builder *b, Desc op, Desc result)
{
    assert(b->num_ops < MAX_OPERATIONS);
    b->op[b->num_ops++] = finish(b, op);
    return result;
}

// y = mode(x, u, t), element by element, computed in type `math`.
static Desc pointwise(Builder *b, cudnnPointwiseMode_t mode, cudnnDataType_t math, int64_t axis, Desc x,
                      Desc u, Desc t, Desc y)
{
    Desc p = make(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR),
         op = make(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set(b, p, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(b, p, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &math);
    if (axis >= 0)
        set(b, p, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    set_desc(b, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, finish(b, p));
    set_desc(b, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_desc(b, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, u);
    set_desc(b, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_desc(b, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    return add_op(b, op, y);
}

static Desc apply(Builder *b, cudnnPointwiseMode_t mode, Desc x, Desc u, Desc y)
{
    return pointwise(b, mode, F32, -1, x, u, NULL, y);
}

// z = x y. The true extents of each document's m, n or k are in b->lengths, for those named in `ragged`.
static Desc matmul(Builder *b, Desc x, Desc y, Desc z, const char *ragged, bool pad_with_zero)
{
    Desc p = make(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR),
         op = make(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    double zero = 0;
    set(b, p, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &F32);
    if (pad_with_zero)
        set(b, p, CUDNN_ATTR_MATMUL_PADDING_VALUE, CUDNN_TYPE_DOUBLE, 1, &zero);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, finish(b, p));
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, x);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, y);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, z);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
             strchr(ragged, 'm') ? b->lengths : NULL);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
             strchr(ragged, 'n') ? b->lengths : NULL);
    set_desc(b, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC,
             strchr(ragged, 'k') ? b->lengths : NULL);
    return add_op(b, op, z);
}

static Desc reduce(Builder *b, cudnnReduceTensorOp_t how, Desc x, Desc y)
{
    Desc p = make(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR),
         op = make(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set(b, p, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &how);
    set(b, p, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &F32);
    set_desc(b, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, finish(b, p));
    set_desc(b, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(b, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    return add_op(b, op, y);
}

static Desc reshape(Builder *b, Desc x, Desc y)
{
    Desc op = make(b, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(b, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(b, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    return add_op(b, op, y);
}

// ---- masks: keep a score where the condition holds, put -inf elsewhere -----------------------------------

static Desc keep_if(Builder *b, Desc s, Desc condition)
{
    return pointwise(b, CUDNN_POINTWISE_BINARY_SELECT, F32, -1, s, b->minus_inf, condition,
                     score(b, F32, false));
}

static Desc compare(Builder *b, cudnnPointwiseMode_t mode, Desc x, Desc y)
{
    return pointwise(b, mode, BOOL, -1, x, y, NULL, score(b, BOOL, false));
}

// Index of the query (axis 2) or of the key (axis 3).
static Desc place(Builder *b, Desc s, int64_t axis, cudnnDataType_t math)
{
    return pointwise(b, CUDNN_POINTWISE_GEN_INDEX, math, axis, s, NULL, NULL, score(b, I32, false));
}

static Desc mask_padding(Builder *b, Desc s) // query < length and key < length
{
    Desc query = place(b, s, 2, I32), key = place(b, s, 3, I32);
    query = compare(b, CUDNN_POINTWISE_CMP_LT, query, b->lengths);
    key = compare(b, CUDNN_POINTWISE_CMP_LT, key, b->lengths);
    return keep_if(b, s, compare(b, CUDNN_POINTWISE_LOGICAL_AND, query, key));
}

static Desc mask_band(Builder *b, Desc s) // query >= key; then key + (window + 1) > query
{
    Desc query = place(b, s, 2, F32), key = place(b, s, 3, F32);
    s = keep_if(b, s, compare(b, CUDNN_POINTWISE_CMP_GE, query, key));
    query = place(b, s, 2, F32);
    key = place(b, s, 3, F32);
    key = pointwise(b, CUDNN_POINTWISE_ADD, F32, 3, key, b->reach, NULL, score(b, F32, false));
    return keep_if(b, s, compare(b, CUDNN_POINTWISE_CMP_GT, key, query));
}

// ---- the two graphs --------------------------------------------------------------------------------------

static void begin(Builder *b)
{
    int64_t slots = b->p->shape.slots;
    b->next_id = FIRST_VIRTUAL;
    b->lengths = vector(b, LENGTHS, I32, slots, REAL);
    b->qkv_start = vector(b, QKV_START, I32, slots + 1, REAL);
    b->out_start = vector(b, OUT_START, I32, slots + 1, REAL);
    b->lse_start = vector(b, LSE_START, I32, slots + 1, REAL);
    b->scale = vector(b, SCALE, F32, 1, HOST_SCALAR);
    b->reach = vector(b, REACH, F32, 1, HOST_SCALAR);
    b->minus_inf = vector(b, MINUS_INF, F32, 1, HOST_SCALAR);
    b->one = vector(b, ONE, F32, 1, HOST_SCALAR);
}

static void describe_forward(Builder *b)
{
    Desc s = matmul(b, qkv(b, Q, false), qkv(b, K, true), score(b, F32, false), "mn", true);
    s = apply(b, CUDNN_POINTWISE_MUL, s, b->scale, score(b, F32, false));
    s = mask_band(b, mask_padding(b, s));
    Desc max = reduce(b, CUDNN_REDUCE_TENSOR_MAX, s, per_row(b, 0, VIRTUAL));
    Desc weight = apply(b, CUDNN_POINTWISE_SUB, s, max, score(b, F32, false));
    weight = apply(b, CUDNN_POINTWISE_EXP, weight, NULL, score(b, F32, false));
    Desc sum = reduce(b, CUDNN_REDUCE_TENSOR_ADD, weight, per_row(b, 0, VIRTUAL));
    Desc log_sum = apply(b, CUDNN_POINTWISE_LOG, sum, NULL, per_row(b, 0, VIRTUAL));
    apply(b, CUDNN_POINTWISE_ADD, max, log_sum, per_row(b, LSE, REAL));
    Desc p = apply(b, CUDNN_POINTWISE_DIV, weight, sum, score(b, BF16, false));
    matmul(b, p, qkv(b, V, false), out(b, Y), "mk", false);
}

// With p = exp(s - lse) and r = rowsum(dy * y):  dv = p^T dy;  ds = scale * p * (dy v^T - r);  dk = ds^T q;
// dq = ds k.
static void describe_backward(Builder *b)
{
    Desc q = qkv(b, Q, false), kt = qkv(b, K, true), dy = out(b, D_Y);

    Desc r = packed(b, 0, F32, NULL, false, VIRTUAL);
    r = reduce(b, CUDNN_REDUCE_TENSOR_ADD, apply(b, CUDNN_POINTWISE_MUL, dy, out(b, Y), r),
               per_row(b, 0, VIRTUAL));
    r = apply(b, CUDNN_POINTWISE_MUL, r, b->one, per_row(b, ROW_SUM, REAL));

    Desc s = matmul(b, q, kt, score(b, F32, false), "mn", false);
    s = mask_padding(b, apply(b, CUDNN_POINTWISE_MUL, s, b->scale, score(b, F32, false)));
    s = mask_band(b, apply(b, CUDNN_POINTWISE_SUB, s, per_row(b, LSE, REAL), score(b, F32, false)));
    Desc p = apply(b, CUDNN_POINTWISE_EXP, s, NULL, score(b, F32, false));
    matmul(b, reshape(b, p, score(b, BF16, true)), dy, qkv(b, D_V, false), "mk", false);

    Desc ds = matmul(b, dy, qkv(b, V, true), score(b, F32, false), "mn", false);
    ds = apply(b, CUDNN_POINTWISE_SUB, ds, r, score(b, F32, false));
    ds = apply(b, CUDNN_POINTWISE_MUL, ds, p, score(b, F32, false));
    ds = apply(b, CUDNN_POINTWISE_MUL, ds, b->scale, score(b, BF16, false));
    matmul(b, reshape(b, ds, score(b, BF16, true)), q, qkv(b, D_K, false), "mk", false);

    // Blocks of keys add their shares of dq in fp32, in no fixed order: its last bits vary. The buffer for
    // that must have dq's layout, because the library finds documents in it by dq's starts; it clears the
    // buffer itself.
    Desc k = reshape(b, kt, packed(b, 0, BF16, b->qkv_start, false, VIRTUAL));
    Desc dq = matmul(b, ds, k, packed(b, DQ_SUM, F32, b->qkv_start, false, REAL), "mk", false);
    apply(b, CUDNN_POINTWISE_IDENTITY, dq, NULL, qkv(b, D_Q, false));
}

// ---- plans -----------------------------------------------------------------------------------------------

// The engines that cuDNN proposes for the graph, in its order of preference. Returns how many.
static int64_t propose(Builder *b, Desc config[MAX_CONFIGS])
{
    Desc graph = make(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR),
         heuristics = make(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t count = 0;
    set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b->num_ops, b->op);
    finish(b, graph);
    set_desc(b, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set(b, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finish(b, heuristics);
    for (int i = 0; i < MAX_CONFIGS; i++)
        config[i] = make(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (!b->status)
        check(b,
              cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_CONFIGS, &count, config),
              "heuristics");
    return b->status ? 0 : min_i64(count, MAX_CONFIGS);
}

// Compiles the graph with the first engine that can run it.
static void compile(Builder *b)
{
    Desc config[MAX_CONFIGS];
    int64_t count = propose(b, config), n, bytes = 0;
    for (int i = 0; i < count && !b->status && !b->p->plan; i++) {
        Desc plan = make(b, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set_desc(b, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config[i]);
        set(b, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
        if (b->status || cudnnBackendFinalize(plan) != CUDNN_STATUS_SUCCESS)
            continue;
        b->p->plan = plan;
        check(b,
              cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                       &n, &bytes),
              "workspace size");
    }
    if (!b->p->plan)
        check(b, CUDNN_STATUS_NOT_SUPPORTED, "no plan for this attention");
    b->p->workspace = (size_t)max_i64(bytes, 1);
    scratch_plan(SCRATCH_CUDNN, b->p->workspace);
}

// A cuDNN made for another CUDA would bring a second runtime and a second cuBLASLt into the process.
static void open_library(Builder *b)
{
    int made_for = (int)(cudnnGetCudartVersion() / 1000), ours = CUDART_VERSION / 1000;
    if (made_for != ours) {
        b->status = CUDNN_STATUS_NOT_INITIALIZED;
        error_set(b->error, "this cuDNN is for CUDA %d, the program for CUDA %d: install cuDNN for CUDA %d",
                  made_for, ours, ours);
        return;
    }
    check(b, cudnnCreate(&handle), "cudnnCreate");
}

AttentionPlan *attention_plan_create(const AttentionShape *shape, Error *e)
{
    Builder b = {.p = xcalloc(1, sizeof *b.p), .error = e};
    b.p->shape = *shape;
    if (!handle)
        open_library(&b);
    begin(&b);
    shape->backward ? describe_backward(&b) : describe_forward(&b);
    compile(&b);
    if (!b.status)
        return b.p;
    attention_plan_free(b.p);
    return NULL;
}

const AttentionShape *attention_plan_shape(const AttentionPlan *p) { return &p->shape; }

void attention_plan_free(AttentionPlan *p)
{
    if (!p)
        return;
    while (p->num_made)
        cudnnBackendDestroyDescriptor(p->made[--p->num_made]);
    free(p);
}

void attention_cudnn_close(void)
{
    if (handle)
        cudnnDestroy(handle);
    handle = NULL;
}

// ---- execution -------------------------------------------------------------------------------------------

typedef struct {
    int64_t id[24];
    const void *pointer[24];
    int count;
} Arguments;

static void put(Arguments *x, int64_t id, const void *pointer)
{
    x->id[x->count] = id;
    x->pointer[x->count++] = pointer;
}

static void put_tensors(Arguments *x, const AttentionCall *c, bool backward)
{
    put(x, Q, c->q);
    put(x, K, c->k);
    put(x, V, c->v);
    put(x, Y, c->y);
    put(x, LSE, c->lse);
    put(x, LENGTHS, c->length);
    put(x, QKV_START, c->start);
    put(x, OUT_START, c->start);
    put(x, LSE_START, c->lse_start);
    if (!backward)
        return;
    put(x, D_Y, c->dy);
    put(x, D_Q, c->dq);
    put(x, D_K, c->dk);
    put(x, D_V, c->dv);
    put(x, ROW_SUM, c->row_scratch);
    put(x, DQ_SUM, c->dq_sum);
}

static void must(cudnnStatus_t status, const char *what)
{
    char text[512];
    if (status == CUDNN_STATUS_SUCCESS)
        return;
    device_check_failure("a plan of cuDNN's attention", __FILE__, __LINE__);
    cudnnGetLastErrorString(text, sizeof text);
    fatal(EXIT_BAD_INPUT, "cuDNN: attention: %s: %s: %s", what, cudnnGetErrorString(status), text);
}

void attention_plan_run(AttentionPlan *p, const AttentionCall *c, Stream s)
{
    // Scalars pass by host pointer and are read during the call. cuDNN counts the token itself into the
    // window.
    float reach = (float)c->window + 1, minus_inf = -INFINITY, one = 1;
    Arguments x = {.count = 0};
    Desc pack = NULL; // cannot be used twice
    void *workspace = scratch_of(s, SCRATCH_CUDNN, p->workspace);
    put_tensors(&x, c, p->shape.backward);
    put(&x, SCALE, &c->scale);
    put(&x, REACH, &reach);
    put(&x, MINUS_INF, &minus_inf);
    if (p->shape.backward)
        put(&x, ONE, &one);
    must(cudnnSetStream(handle, s), "stream");
    must(cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack), "arguments");
    must(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, x.count, x.id),
         "arguments");
    must(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, x.count,
                                  x.pointer),
         "arguments");
    must(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1,
                                  &workspace),
         "arguments");
    must(cudnnBackendFinalize(pack), "arguments");
    must(cudnnBackendExecute(handle, p->plan, pack), "execution");
    cudnnBackendDestroyDescriptor(pack);
}
