// A chain of tasks: products and the few elementwise passes between them, run by one kernel. Host and device share this
// description.
//
// A task computes one tensor (or two: with and without a diagonal) of the whole batch, tile by tile. Tasks of one stage are
// independent of each other; a tile of stage s + 1 waits until all tiles of stage s of its own matrix are done, and of no other:
// while some matrices finish a stage, others are in the next one, and no multiprocessor waits for the slowest between two
// products.
#pragma once
#include "llmc/cuda/ns_internal.cuh"
#include "llmc/cuda/ns_wgmma.cuh"

enum {
    TILE_SIDE = 128,
    SQUARE_TILES = 2,    // a cluster computes a square of 2 x 2 tiles
    CHAIN_TASKS = 24,    // 18 KB of kernel parameters, of which there may be 32
    CHAIN_DONE = 1 << 16 // counters: stages times matrices
};

enum TaskKind {
    TASK_SYMMETRIC, // alpha a b + beta d: b read by rows, like a; tiles on and below the diagonal, mirrored
    TASK_FULL,      // alpha a b + beta d, b as stored
    TASK_RAW,       // a b like TASK_SYMMETRIC, to raw: fp32, and the sums of absolute values that AOL needs
    TASK_AOL,       // diag(scale) raw diag(scale), scale from the sums
    TASK_SCALE      // alpha d diag(scale)
};

struct Task {
    CUtensorMap a, b, d, out, plus; // plus: out + diagonal I
    void *elements;                 // out, where the copy unit cannot write it: rows start anywhere
    int64_t stride;                 // of `elements`: from matrix to matrix
    int pitch;                      // of `elements`
    float *raw;                     // (batch, tiles, 128 * 128) in the order of the sums' registers
    float *sums;                    // (batch, columns of tiles, rows): sum of |raw| along one tile
    float *scale;                   // (batch, rows)
    int rows, cols, depth;
    float alpha, beta, diagonal, gain;
    TaskKind kind;
    bool has_d, has_out, has_plus;
    int row_squares, squares; // squares of tiles: in a column, in a matrix
    int stage, needed;        // needed: tiles of the stage before, in a matrix
};

struct Chain {
    Task task[CHAIN_TASKS];
    int tasks, stages, batch;
    int together;       // so many matrices go through all tasks, then the next: what they leave in the cache is still there
    int squares;        // of all tasks, in a matrix
    int total;          // in the batch
    unsigned *done;     // (stages, batch) tiles done, 0 before and after; NULL when there is one stage only
    unsigned *finished; // (1) blocks at the end, 0 before and after
};
static_assert(sizeof(Chain) <= 32764, "kernel parameters");

static inline __host__ __device__ int tiles_along(int elements) { return (elements + TILE_SIDE - 1) / TILE_SIDE; }

// Runs the chain on tensors of `dtype`, which is 16 bits wide.
void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &chain);
// Of a (batch, rows, cols) tensor, for boxes of 64 rows of 128 bytes; what lies outside of a matrix reads as zero and is not
// written.
CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch);
