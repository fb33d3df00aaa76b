// The network of a record whose layers have lists of streams (record.h), compiled into nodes: forward runs
// them in this order, backward in reverse (llmc/model/sums.c). A node makes one stream, or the columns of a
// generator, and is named by its place in the list.
#pragma once
#include "llmc/records/record.h"

typedef enum { NODE_EMBED, NODE_BIGRAM, NODE_GENERATOR, NODE_SUM, NODE_ATTENTION, NODE_MLP } NodeKind;

// c * stream, c = coefficient * column + plus.
typedef struct {
    int node;        // whose stream it is; NONE: rows of value table
    int table;       //   of this number by token
    int coefficient; // in Network.terms; NONE: 1
    int column;      // as in MixTerm
    float plus;
} NodeTerm;

typedef struct {
    NodeKind kind;
    int stage; // see StageHooks
    int layer; // NODE_ATTENTION, NODE_MLP: the layer; NODE_GENERATOR: its number
    int input; // NODE_ATTENTION, NODE_MLP: the sum whose norm it reads; NODE_GENERATOR: whose stream
    // NODE_ATTENTION
    int extra; // the sum that is added to v; NONE
    int lin;   // factor of Wq, Wk and Wv, in Network.terms
    int lout;  // of Wo; NODE_MLP: of what it gives, which backward takes as one of its second matrix; NONE
    // The only sum that reads it, when it adds it as it is (NODE_ATTENTION, NODE_MLP: or times a factor that
    // is the block's), or the generator whose dx is its gradient: they have one gradient. NONE
    int sum;
    // NODE_MLP: with the gradient of which stream that of lout is taken; NONE: by an op of its own
    int taken_with;
    // NODE_GENERATOR
    int scale; // in Network.terms
    int added; // its dx is the whole gradient of its input, with that of this sum added to it; NONE
    // NODE_SUM
    NodeTerm term[MIX_STREAMS];
    int terms;
    bool kept, normalised; // whether somebody reads the sum itself, and its norm
    bool into_v;           // it is what an attention adds to v
    bool into_mlp;         // an MLP reads its norm
} Node;
enum { MAX_NODES = 256 };

typedef struct {
    Node node[MAX_NODES];
    int count;                           // 0: the record has no lists
    int output;                          // the sum whose norm goes to the head
    int generator[MAX_GENERATORS];       // the node of each
    Coefficient terms[MAX_COEFFICIENTS]; // made once a step
    int num_terms;
} Network;

// What does not fit into an op, or is not there, is an error.
bool network_compile(Network *n, const Record *r, Error *e);
// The node of a layer's block; NULL when there is none.
const Node *network_block(const Network *n, NodeKind kind, int layer);

// Generator and place of a column.
static inline int column_generator(int column) { return (column - 1) / GENERATOR_MOST; }
static inline int column_place(int column) { return (column - 1) % GENERATOR_MOST; }
