// A chain of tasks (GEMMs and the elementwise passes between them) that one kernel runs; the description is
// shared by host and device.
//
// A task computes one tensor, or two (with and without a diagonal), of the whole batch, tile by tile. A tile
// waits only until the tasks it depends on are complete for its own matrix: while some matrices finish a
// product, others run the next one, and independent tasks fill the last wave of their predecessors.
#pragma once
#include "llmc/cuda/muon/ns_internal.cuh"
#include "llmc/cuda/sm90/sm90.cuh"

enum {
    TILE_SIDE = 256,     // side of a cluster's tile
    BOX_SIDE = 64,       // TMA boxes have 64 rows of 64 elements
    TILE_SLICES = 4,     // consumer warpgroups of a cluster: 64 rows of the tile each
    NARROW_BOXES = 3,    // boxes across a narrow tile
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
    void *elements;                 // out, when its rows are not aligned for TMA
    int64_t stride;                 // of `elements`: from matrix to matrix
    int pitch;                      // of `elements`
    float *raw;                     // (batch, raw_boxes(rows), 64 * 64) in the order of the sums' registers
    float *sums;                    // (batch, boxes_along(), rows): sums of |raw| of each row, box by box
    float *scale;                   // (batch, rows)
    const float *unit;              // (batch, rows) of TASK_RAW, NULL: all 1
    int rows, cols, depth;
    float alpha, beta, diagonal, gain;
    TaskKind kind;
    bool has_d, has_out, has_plus, same_operands; // a and b are one tensor
    int width;                                    // of a tile, in boxes
    int wide;                    // columns of tiles of TILE_SLICES boxes, before those of `width`
    int tiles_per_column, tiles; // tiles in a column, in a matrix
    uint32_t waits;              // bit i: for task i, whose result it uses or whose operands it overwrites
    bool awaited;                // by a later task
};

struct Chain {
    Task task[CHAIN_TASKS];
    int tasks, batch;
    int together; // matrices that go through all tasks before the next ones, for hits in L2
    int total;    // tiles of all tasks, in the batch
    unsigned
        *done;    // (tasks, batch) slices of tiles done, 0 before and after; of a single task none are needed
    int counters; // in done
    unsigned *tile_counter; // (1) the next tile, 0 before and after
    unsigned *finished;     // (1) CTAs that have finished, 0 before and after
};
static_assert(sizeof(Chain) <= 32764, "kernel parameters");

static inline __host__ __device__ int tiles_along(int elements)
{
    return (elements + TILE_SIDE - 1) / TILE_SIDE;
}

static inline __host__ __device__ int boxes_along(int elements)
{
    return (elements + BOX_SIDE - 1) / BOX_SIDE;
}
// Boxes on and below the diagonal of a symmetric matrix, in row-major order.
static inline __host__ __device__ int64_t raw_boxes(int rows)
{
    int64_t boxes = boxes_along(rows);
    return boxes * (boxes + 1) / 2;
}
// Tiles in row `row` of a symmetric result that have a box on or below the diagonal.
static inline __host__ __device__ int tiles_in_row(int rows, int width, int row)
{
    int beyond = (row + 1) * TILE_SLICES, boxes = boxes_along(rows),
        last = (beyond < boxes ? beyond : boxes) - 1;
    return 1 + (width == NARROW_BOXES ? last / NARROW_BOXES : last / TILE_SLICES);
}

// Launches the chain on tensors of `dtype`, a 16-bit type.
void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &chain);
// Clusters that are resident at the same time.
int ns_clusters(NsDtype dtype);
// Forgets the cached occupancy of the device.
void ns_forget_device(void);
void ns_forget_clusters(void);
// Tensor map of a (batch, rows, cols) tensor with row pitch `pitch`, boxes of 64 rows of 128 bytes.
CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int batch);
