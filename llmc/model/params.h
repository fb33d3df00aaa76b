// The parameters: the rows of the record's table (llmc/records/record.h) made out for a run, and the memory
// that holds them.
//
// Parameters of one (storage, sharding, cadence of updates) share a pool, a stretch of memory with gradients
// beside it. Of tensors that are dealt out whole (SHARD_TENSORS) a pool takes those of one size: its slots. A
// slot holds a tensor and what is joined to it. Slots stand in the order in which backward completes their
// gradients, padded to groups of 8: rank r owns 8/R of each group, so a group can be reduced in place as soon
// as it is complete. The fp32 weights of slots that a rank does not own are stale there; the bf16 copy, which
// products read, is complete on all ranks. Gradients of the replicated pools follow one another, those that
// are used most often first: at any step what is summed over the ranks is one stretch. Tensors that are not
// trained have a pool without gradients.
#pragma once
#include "llmc/run/config.h"
#include "llmc/records/record.h"

enum { SLOT_GROUP = 8, MAX_PARAMS = 256, MAX_POOLS = 8 };

typedef struct {
    const ParamSpec *spec;
    int rule;      // its row in the record, which is its update rule in StepParams
    char name[48]; // of its own: as in the public checkpoint layout, or "<tensor in the file>.<first matrix>"
    int layer;     // -1: not of a layer
    int number;    // within its role: the layer, or 0, 1, ...
    int stage;     // the lowest that uses it, see exchange.h
    int64_t rows, cols, matrices; // of each of its matrices, one behind the other
    int64_t file_first;           // its first matrix in the tensor of a file
    int tied_to;                  // the parameter that it is one with while Params says so; -1: none
    int pool;
    int64_t offset; // elements from the start of the pool; of signs words
} Param;

typedef struct {
    Storage storage;
    Sharding sharding;
    int every;    // updated every so many steps; 0: never
    int64_t slot; // SHARD_TENSORS: elements of a slot; else 0
    int64_t size; // elements, padding included; of signs words
    // Device memory, owned by Params.
    void *values;    // (size) fp32, floatX when STORE_HALF, uint32_t when STORE_SIGNS
    floatX *rounded; // (size), STORE_MASTER and STORE_SPLIT; else NULL
    float *grad;     // (size); NULL unless training
} ParamPool;

typedef struct {
    const Record *record; // whose tables these are
    Param list[MAX_PARAMS];
    int count;
    ParamPool pools[MAX_POOLS];
    int num_pools;
    int last_tied; // the last step that takes tied parameters as one; -1: there are none
    bool tied;     // whether they are one now: false unless training
    void *value_memory, *gradient_memory; // device, owned here
    float *small_grad;                    // where the gradients of the replicated pools begin; not owned
} Params;

// Builds the table only, no memory: shapes and offsets for this config.
void params_describe(Params *p, const Config *c);
// And the memory; gradients only when training, else NULL.
void params_allocate(Params *p, bool training);
void params_free(Params *p);
// Random initial weights, the same for the same seed on every machine, backend and number of ranks. Fills the
// rounded copies too.
void params_init(Params *p, const Config *c, Stream s);
void params_round(const Params *p, Stream s); // the rounded copies, from complete fp32 weights
void params_zero_gradients(const Params *p, Stream s);
const Param *params_of(const Params *p, Role role, int number); // NULL: there is none
// As a matrix in files of a run's state: (rows, cols) of the tensor in files of weights where that holds
// nothing else and has two dimensions, else its matrices one below the other.
void param_shape(const Param *a, const Config *c, int64_t *rows, int64_t *cols);
int64_t params_total(const Params *p); // number of trained values, as the public counts have it

static inline int64_t param_elements(const Param *a) { return a->matrices * a->rows * a->cols; }
// Whether step t updates tensors with this cadence; t from -1.
static inline bool update_is_due(int every, int t) { return (t + 1) % every == 0; }
// Steps after which the same tensors are updated again.
int update_cycle(const Params *p);
// Gradients of the replicated pools that step t uses: the first so many elements from small_grad on.
int64_t params_small_count(const Params *p, int t);

// A parameter's place on the device; NULL before params_allocate. Of one that is tied: of that other one.
const Param *param_now(const Params *p, const Param *a); // that other one, or itself
int param_stage(const Params *p, const Param *a);  // the lowest stage that uses it or what is tied to it
void *param_data(const Params *p, const Param *a); // as it is stored
size_t param_element_size(const Param *a);         // of that; signs: of a word
int64_t param_stored(const Param *a);              // elements of that; signs: words
const floatX *param_weight(const Params *p, const Param *a); // as ops read it: floatX, rounded if need be
float *param_grad(const Params *p, const Param *a);          // fp32

// The initial values of one with INIT_RUNS.  host (elements) out
void param_init_runs(const Param *a, const Config *c, float *host);
