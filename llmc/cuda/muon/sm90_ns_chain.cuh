// A chain of tasks: products and the few elementwise passes between them, run by one kernel. Host and device share this
// description.
//
// A task computes one tensor (or two: with and without a diagonal) of the whole batch, square by square. A square waits until
// those tasks are done for its own matrix that its task depends on, and for nothing else: while some matrices finish a product,
// others are in the next one, and what only a later task needs fills up the multiprocessors that the one before leaves free.
#pragma once
#include "llmc/cuda/muon/ns_internal.cuh"
#include "llmc/cuda/sm90/sm90.cuh"

enum {
    SQUARE = 256,        // side of what a cluster computes at a time
    BOX_SIDE = 64,       // the copy unit moves boxes of 64 rows of 64 elements
    SQUARE_PARTS = 4,    // multiplying groups of a cluster: each has 64 rows of the square
    NARROW = 3,          // boxes across a square, where that is done sooner than with SQUARE_PARTS
    CHAIN_TASKS = 24,    // 18 KB of kernel parameters, of which there may be 32
    CHAIN_DONE = 1 << 16 // counters: tasks times matrices
};

enum TaskKind {
    TASK_SYMMETRIC, // alpha a b + beta d: b read by rows, like a; tiles on and below the diagonal, mirrored
    TASK_FULL,      // alpha a b + beta d, b as stored
    TASK_RAW,       // a b like TASK_SYMMETRIC, to raw: fp32, and the sums of absolute values that AOL needs
    TASK_AOL,       // diag(scale) raw diag(scale), scale from the sums
    TASK_SCALED     // (alpha a b + beta d + diagonal I) diag(gain scale), of a product like TASK_SYMMETRIC's
};

struct Task {
    CUtensorMap a, b, d, out, plus; // plus: out + diagonal I
    void *elements;                 // out, where the copy unit cannot write it: rows start anywhere
    int64_t stride;                 // of `elements`: from matrix to matrix
    int pitch;                      // of `elements`
    float *raw;                     // (batch, raw_boxes(rows), 64 * 64) in the order of the sums' registers
    float *sums;                    // (batch, boxes_along(), rows): sums of |raw| of each row, box by box
    float *scale;                   // (batch, rows)
    const float *unit;              // (batch, rows) of TASK_RAW, NULL: all 1
    int rows, cols, depth;
    float alpha, beta, diagonal, gain;
    TaskKind kind;
    bool has_d, has_out, has_plus, square; // square: a and b are one tensor
    int width;                             // of a square, in boxes
    int wide;                              // columns of squares of SQUARE_PARTS boxes, before those of `width`
    int row_squares, squares;              // squares in a column, in a matrix
    uint32_t waits;                        // bit i: for task i, whose result it uses or whose operands it overwrites
    bool awaited;                          // by a later task
};

struct Chain {
    Task task[CHAIN_TASKS];
    int tasks, batch;
    int together;       // so many matrices go through all tasks, then the next: what they leave in the cache is still there
    int total;          // squares of all tasks, in the batch
    unsigned *done;     // (tasks, batch) parts of squares done, 0 before and after; of a single task none are needed
    int counters;       // in done
    unsigned *ticket;   // (1) the square that is next, 0 before and after
    unsigned *finished; // (1) blocks at the end, 0 before and after
};
static_assert(sizeof(Chain) <= 32764, "kernel parameters");

static inline __host__ __device__ int squares_along(int elements) { return (elements + SQUARE - 1) / SQUARE; }
static inline __host__ __device__ int boxes_along(int elements) { return (elements + BOX_SIDE - 1) / BOX_SIDE; }
// Boxes on and below the diagonal of a symmetric matrix, row by row.
static inline __host__ __device__ int64_t raw_boxes(int rows)
{
    int64_t boxes = boxes_along(rows);
    return boxes * (boxes + 1) / 2;
}
// Squares in row `row` of a symmetric result that have a box on or below the diagonal.
static inline __host__ __device__ int squares_in_row(int rows, int width, int row)
{
    int beyond = (row + 1) * SQUARE_PARTS, boxes = boxes_along(rows), last = (beyond < boxes ? beyond : boxes) - 1;
    return 1 + (width == NARROW ? last / NARROW : last / SQUARE_PARTS);
}

// Runs the chain on tensors of `dtype`, which is 16 bits wide.
void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &chain);
// Clusters that the device holds at a time.
int ns_clusters(NsDtype dtype);
// What was found out about the device is forgotten.
void ns_forget_device(void);
void ns_forget_clusters(void);
// Of a (batch, rows, cols) tensor whose rows begin `pitch` elements apart, for boxes of 64 rows of 128 bytes; what lies outside
// of a matrix reads as zero and is not written.
CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int batch);
