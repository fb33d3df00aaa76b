#include "llmc/cuda/device/scratch.h"
#include "llmc/cuda/device/device.h"
#include <stdlib.h>
#include <string.h>

enum {
    COUNTER_PITCH = 32, // counters lie in cache lines of their own
    COUNTER_BYTES = SCRATCHES * COUNTER_PITCH * sizeof(unsigned)
};

static const char *const names[SCRATCHES] = {
    [SCRATCH_ROPE] = "scratch: reductions",
    [SCRATCH_MIX] = "scratch: reductions",
    [SCRATCH_EMBED] = "scratch: reductions",
    [SCRATCH_TABLE_GRAD] = "scratch: reductions",
    [SCRATCH_GENERATOR] = "scratch: reductions",
    [SCRATCH_WEIGHT_SCALE] = "scratch: reductions",
    [SCRATCH_QKV] = "scratch: reductions",
    [SCRATCH_GATES] = "scratch: reductions",
    [SCRATCH_HEADS] = "scratch: reductions",
    [SCRATCH_NORMUON] = "scratch: reductions",
    [SCRATCH_NS_NORMS] = "scratch: norms of Newton-Schulz",
    [SCRATCH_NS_CHAIN] = "scratch: counters of Newton-Schulz",
    [SCRATCH_LIBRARY] = "scratch: workspace of matrix products",
    [SCRATCH_WEIGHT_GRADS] = "scratch: counters of weight gradients",
    [SCRATCH_FP8_SLAB] = "scratch: slab of FP8 products",
    [SCRATCH_ATTENTION] = "attention: counters",
    [SCRATCH_DQ_STATE] = "attention: counters",
    [SCRATCH_CUDNN] = "attention: workspace of cuDNN",
    [SCRATCH_COUNTERS] = "scratch: reductions",
};

typedef struct Block {
    void *memory;
    size_t bytes;
    struct Block *smaller; // what it took the place of: a captured graph may use that
} Block;

typedef struct Owner {
    Stream stream;
    bool taken; // else it waits for a stream
    Block *block[SCRATCHES];
    struct Owner *next;
} Owner;
static struct {
    size_t planned[SCRATCHES]; // bytes
    Owner *owners;             // one for each stream that has run ops
} scratch;

void scratch_plan(ScratchOp op, size_t bytes)
{
    size_t whole = (bytes + 15) / 16 * 16;
    if (scratch.planned[op] < whole)
        scratch.planned[op] = whole;
    scratch.planned[SCRATCH_COUNTERS] = COUNTER_BYTES;
}

size_t scratch_planned(ScratchOp op) { return scratch.planned[op]; }

static Owner *add_owner(void)
{
    Owner *o = xcalloc(1, sizeof *o);
    o->next = scratch.owners;
    return scratch.owners = o;
}

static Owner *owner_of(Stream s)
{
    Owner *waiting = NULL;
    for (Owner *o = scratch.owners; o; o = o->next) {
        if (o->taken && o->stream == s)
            return o;
        if (!o->taken)
            waiting = o;
    }
    if (!waiting)
        waiting = add_owner();
    waiting->taken = true;
    waiting->stream = s;
    return waiting;
}

static bool is_short(const Owner *o, int op, size_t bytes)
{
    return !o->block[op] || o->block[op]->bytes < bytes;
}

static void add_block(Owner *o, int op)
{
    Block *b = xcalloc(1, sizeof *b);
    b->memory = device_alloc(scratch.planned[op], names[op]);
    b->bytes = scratch.planned[op];
    b->smaller = o->block[op];
    o->block[op] = b;
}

void *scratch_of(Stream s, ScratchOp op, size_t bytes)
{
    if (bytes > scratch.planned[op])
        fatal(EXIT_BAD_INPUT, "%s: an op needs %zu bytes and %zu are planned: sizes beyond backend_reserve's",
              names[op], bytes, scratch.planned[op]);
    Owner *o = owner_of(s);
    if (is_short(o, op, bytes) && stream_is_capturing(s))
        fatal(EXIT_BAD_INPUT,
              "%s: a graph is being captured on a stream without enough memory for its ops: plan, then call "
              "graph_begin on this stream, or run one op on it, before",
              names[op]);
    if (is_short(o, op, bytes))
        add_block(o, op);
    return o->block[op]->memory;
}

float *scratch_floats(Stream s, ScratchOp op, size_t floats)
{
    return scratch_of(s, op, floats * sizeof(float));
}

unsigned *scratch_counter(Stream s, ScratchOp op)
{
    return (unsigned *)scratch_of(s, SCRATCH_COUNTERS, COUNTER_BYTES) + op * COUNTER_PITCH;
}

static void fill(Owner *o)
{
    for (int i = 0; i < SCRATCHES; i++) {
        if (scratch.planned[i] && is_short(o, i, scratch.planned[i]))
            add_block(o, i);
    }
}

void scratch_ready(Stream s) { fill(owner_of(s)); }
void scratch_reserve(void) { fill(scratch.owners ? scratch.owners : add_owner()); }

void scratch_give_back(Stream s)
{
    for (Owner *o = scratch.owners; o; o = o->next) {
        if (o->taken && o->stream == s) {
            stream_synchronize(s);
            o->taken = false;
        }
    }
}

void scratch_close(void)
{
    while (scratch.owners) {
        Owner *o = scratch.owners;
        for (int i = 0; i < SCRATCHES; i++) {
            while (o->block[i]) {
                Block *b = o->block[i];
                o->block[i] = b->smaller;
                device_free(b->memory);
                free(b);
            }
        }
        scratch.owners = o->next;
        free(o);
    }
    memset(&scratch, 0, sizeof scratch);
}
