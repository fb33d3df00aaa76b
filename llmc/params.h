// The parameters: their table (names, shapes, who trains them), and the arenas that hold them.
//
// Four groups, one arena each, so that a collective or an optimizer op takes a whole group at once:
//   tables    floatX  [embed | value_embeds.0 | .1 | .2 | lm_head], each (Vp, d)          Adam, rows split over the ranks
//   matrices  fp32    slots of equal size, one attention or MLP matrix each                NorMuon, slots split over the ranks
//   gates     floatX  [attention gates | smear gate]                                       NorMuon, the same on all ranks
//   scalars   fp32    (64)                                                                 Adam, the same on all ranks
// Slots stand in the order in which backward finishes them, MLP first, in groups of 8: rank r owns 8/R of each group, so a group
// can be reduced in place as soon as it is complete. The fp32 weights of slots that a rank does not own are stale there; the
// rounded copy matrices_x, which the products use, is complete on all ranks.
#pragma once
#include "llmc/config.h"

typedef enum { GROUP_TABLE, GROUP_MATRIX, GROUP_GATE, GROUP_SCALARS } ParamGroup;
enum { SLOT_GROUP = 8, MAX_PARAMS = 64, MAX_SLOTS = 40, NUM_TABLES = 5 };

typedef struct {
    char name[48]; // as in the public checkpoint layout
    ParamGroup group;
    int64_t rows, cols;
    int64_t offset; // elements from the start of the group's arena
    double multiplier;
    int layer;
} Param;

typedef struct {
    Param list[MAX_PARAMS];
    int count;
    int64_t table_size;                 // Vp * d
    int64_t slot_size;                  // elements of a slot: the larger of an attention and an MLP matrix
    int num_slots, first_attention_slot; // slots padded to whole groups; MLP slots stand before
    int num_attention;                  // attention matrices, and gates
    int64_t gates_size;

    // Device memory, owned here.
    floatX *tables;     // (5, Vp, d)
    float *tables_grad; // (5, Vp, d)
    float *matrices;    // (num_slots, slot_size)
    floatX *matrices_x; // the same, rounded: what the products read
    float *matrices_grad;
    floatX *gates;     // (gates_size)
    float *gates_grad; // (gates_size), followed by scalars_grad: one small bucket
    float *scalars;    // (64)
    float *scalars_grad;
} Params;

// Builds the table only, no memory: shapes and offsets for this config.
void params_describe(Params *p, const Config *c);
// And the arenas; gradients only when training, else NULL.
void params_allocate(Params *p, bool training);
void params_free(Params *p);
// Random initial weights, the same for the same seed on every machine, backend and number of ranks. Fills matrices_x too.
void params_init(Params *p, const Config *c, Stream s);
const Param *params_find(const Params *p, const char *name);
const Param *params_first_gate(const Params *p); // of the num_attention attention gates, which follow each other
int64_t params_total(const Params *p); // number of trained values, as the public counts have it

// A parameter's place on the device. Tables and gates: floatX; matrices and scalars: fp32.
void *param_data(const Params *p, const Param *a);
size_t param_element_size(const Param *a);

// Where scalars lie in the `scalars` vector.
enum {
    SCALAR_SKIP = 0,
    SCALAR_LAMBDA = NUM_LAYERS,
    SCALAR_ATTENTION = 3 * NUM_LAYERS,
    SCALAR_SMEAR = 5 * NUM_LAYERS,
    SCALAR_BACKOUT = 5 * NUM_LAYERS + 1
};
