// Matrix products (rows, cols) = x w in tiles of 128 x 256 on Hopper's tensor memory accelerator (TMA) and warpgroup products
// (wgmma): what kernels that differ in what they do with the sums have in common. bf16 operands, fp32 sums.
//
// A tile is computed by two warpgroups, 64 rows each, from operand tiles of depth 64 that a third group fetches ahead through a
// ring of stages. Two blocks form a cluster and compute tiles one above the other: each fetches half of w's tile for both,
// because without that the reads from L2 would set the pace. The blocks are persistent and the ring runs on from tile to tile.
//
// Most depths are only some 12 stages, so what happens between two tiles matters as much as the products. A group leaves its sums
// for the next tile as soon as they are packed into half as many registers; from there they go through shared memory to the copy
// unit while the next tile is multiplied.
//
// Edges are the copy unit's business: what lies outside reads as zero and is not written.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"

enum {
    TILE_ROWS = 128, TILE_COLS = 256,
    STAGE_DEPTH = 64,
    STAGES = 4,
    CLUSTER = 2,
    GROUP = 128,          // threads of a warpgroup
    GROUP_ROWS = 64,      // rows of the tile that a warpgroup computes
    PANEL = 64,           // columns of 128 bytes, the width of the swizzle
    HALF = TILE_COLS / 2, // columns that pass through the staging area together
    HALF_PANELS = HALF / PANEL,
    TILE_THREADS = 3 * GROUP,
    FETCH_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 232,
    A_BYTES = TILE_ROWS * STAGE_DEPTH * 2,
    B_BYTES = TILE_COLS * STAGE_DEPTH * 2,
    B_PANEL_BYTES = PANEL * STAGE_DEPTH * 2,
    STAGE_BYTES = A_BYTES + B_BYTES,
    PANEL_BYTES = GROUP_ROWS * PANEL * 2, // of a warpgroup's result
    STAGING_BYTES = HALF_PANELS * PANEL_BYTES,
    TILE_SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGING_BYTES + 2 * STAGES * 8
};
static_assert(TILE_SHARED_BYTES <= 227 * 1024, "a block's shared memory");

#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 900
#define TILE_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TILE_CLUSTER // the kernel is empty there
#endif

// The tiles of a product, in pairs one above the other, which the clusters take by turns. Where at most half of the clusters
// would have one in the last turn, its tiles are cut into halves of HALF columns, and that turn lasts half as long.
struct WideTiles {
    int columns;       // pairs in a row of them
    int whole, halves; // pairs: of whole tiles, and after them of halves
    int steps;         // stages of the depth
};

// Once device.h knows the path. kernel: one of those that are launched with these blocks
void wide_tile_reserve(const void *kernel);
// The tiles of a product (rows, depth) x (depth, cols), and the blocks to launch. False when the path, the build or the shape do
// not allow them.
bool wide_tiles(WideTiles *t, unsigned *blocks, int64_t rows, int64_t cols, int64_t depth);
// Blocks in clusters that run at the same time, as pairs; 0: no such products on this path.
int wide_tile_clusters(void);
int wide_tile_clusters_now(void); // that the product to be launched next may take
// Boxes of PANEL columns and box_rows rows of `planes` bf16 matrices (rows, cols), one after the other.
CUtensorMap wide_tile_map(const void *base, int planes, int rows, int cols, int box_rows);
// Boxes of 32 columns and 64 rows of an fp32 matrix (rows, cols).
CUtensorMap wide_sum_map(const float *base, int rows, int cols);

#if HOPPER

// ---- copies ----------------------------------------------------------------------------------------------------------------

// A thread's address for blocks of 8 x 8 in a panel of rows of 128 bytes, 16-byte chunks swizzled as the copy unit has them. Its
// warp has 16 rows from `row` on; blocks 0 to 3 are upper left, lower left, upper right, lower right. XOR with 16 g moves by g
// blocks to the right, g even.
static __device__ __forceinline__ uint32_t blocks_address(const uint8_t *panel, int row)
{
    int lane = threadIdx.x % WARP, r = row + lane % 16;
    return shared_address(panel) + r * 128 + ((lane / 16 ^ (r & 7)) << 4);
}

// Adds a box of fp32 sums in shared memory to the place of `map` that starts at column x, row y of matrix z; what would fall outside
// is left out.
static __device__ __forceinline__ void tile_add(const CUtensorMap *map, const void *from, int x, int y, int z)
{
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     (uint64_t)map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// ---- the ring of stages ------------------------------------------------------------------------------------------------------

struct TileMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint8_t *staging(int group) const { return base + STAGES * STAGE_BYTES + group * STAGING_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)staging(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
};

struct TileRing { // a position
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// All threads of the block, first of all.
static __device__ __forceinline__ void tile_memory_init(const TileMemory &m)
{
    if (threadIdx.x == 0) {
        if (shared_address(m.base) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), CLUSTER * 2 * GROUP / WARP);
        barrier_init_fence();
    }
    cluster_sync();
}

// Tells both blocks that this warp has read a stage: what they fetch for each other may overwrite it.
static __device__ __forceinline__ void stage_release(const TileMemory &m, int stage)
{
    if (threadIdx.x % WARP < CLUSTER) barrier_arrive_at(m.empty(stage), threadIdx.x % WARP);
}

// The fetching thread, last of all: waits until both blocks have released all stages. Nobody arrives at this block's barriers after
// that, and what was sent to it has come, for it was read.
static __device__ __forceinline__ void stages_drain(const TileMemory &m, TileRing &ring)
{
    for (int i = 0; i < STAGES; i++, ring.advance()) barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
}

// Waits until the next stage may be overwritten by `bytes`, of which those that the other block sends are a part.
static __device__ __forceinline__ uint64_t *stage_claim(const TileMemory &m, const TileRing &ring, uint32_t bytes)
{
    uint64_t *full = m.full(ring.stage);
    barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
    barrier_arrive_expect(full, bytes);
    return full;
}

// One thread of each block: operands of depth k for the tile of COLS columns at row, col. Box rows: x 128, 64 by depth; w 64. A
// block fetches a part of w's columns for all of its cluster.
template <WideForm FORM, int COLS = TILE_COLS>
static __device__ __forceinline__ void stage_fetch(const TileMemory &m, TileRing &ring, const CUtensorMap *x,
                                                   const CUtensorMap *w, int k, int row, int col, int rank)
{
    const uint16_t both = (1 << CLUSTER) - 1;
    const int panels = COLS / CLUSTER / PANEL;
    uint64_t *full = stage_claim(m, ring, A_BYTES + COLS / PANEL * B_PANEL_BYTES);
    uint8_t *mine = m.b(ring.stage) + rank * panels * B_PANEL_BYTES;
    int first = col + rank * panels * PANEL;
    if (FORM == BOTH_BY_DEPTH)
        for (int p = 0; p < TILE_ROWS / PANEL; p++)
            tile_load_own(m.a(ring.stage) + p * B_PANEL_BYTES, x, full, row + p * PANEL, k, 0);
    else tile_load_own(m.a(ring.stage), x, full, k, row, 0);
    for (int p = 0; p < panels; p++) {
        int at = first + p * PANEL;
        tile_load(mine + p * B_PANEL_BYTES, w, full, FORM == W_BY_COLUMN ? k : at, FORM == W_BY_COLUMN ? at : k, 0, both);
    }
    ring.advance();
}

struct TilePlace {
    int row, col;
};

// Of a block's tile, or half.
static __device__ __forceinline__ TilePlace tile_place(const WideTiles &t, int index, int rank)
{
    int half = max(index - t.whole, 0), pair = index - half + half / 2;
    return {(pair / t.columns * CLUSTER + rank) * TILE_ROWS, pair % t.columns * TILE_COLS + half % 2 * HALF};
}

// One thread of each block: everything that its groups multiply.
template <WideForm FORM>
static __device__ __forceinline__ void tiles_fetch(const TileMemory &m, const CUtensorMap *x, const CUtensorMap *w,
                                                   const WideTiles &t, int rank)
{
    TileRing ring;
    int index = blockIdx.x / CLUSTER;
    for (; index < t.whole; index += gridDim.x / CLUSTER) {
        TilePlace at = tile_place(t, index, rank);
        for (int k = 0; k < t.steps; k++) stage_fetch<FORM>(m, ring, x, w, k * STAGE_DEPTH, at.row, at.col, rank);
    }
    if (index < t.whole + t.halves) {
        TilePlace at = tile_place(t, index, rank);
        for (int k = 0; k < t.steps; k++) stage_fetch<FORM, HALF>(m, ring, x, w, k * STAGE_DEPTH, at.row, at.col, rank);
    }
    stages_drain(m, ring);
}

// ---- products ----------------------------------------------------------------------------------------------------------------

// d (64, COLS) = a (64, 16) b (16, COLS), or += when accumulate; a stored as (64, 16), or (16, 64) where both are stored by depth; b
// stored as (COLS, 16), or (16, COLS).
// Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 g + 2 (t % 4) (+ 1) in d[4 g ...].
template <WideForm FORM, int COLS>
static __device__ __forceinline__ void multiply(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(COLS == TILE_COLS || COLS == HALF && FORM != BOTH_BY_DEPTH, "a tile or a half");
    if constexpr (COLS == HALF && FORM == W_BY_COLUMN) WGMMA_128("bf16", "0");
    if constexpr (COLS == HALF && FORM == W_BY_DEPTH) WGMMA_128("bf16", "1");
    if constexpr (COLS == TILE_COLS && FORM == W_BY_COLUMN) WGMMA_256("bf16", "0", "0");
    if constexpr (COLS == TILE_COLS && FORM == W_BY_DEPTH) WGMMA_256("bf16", "0", "1");
    if constexpr (COLS == TILE_COLS && FORM == BOTH_BY_DEPTH) WGMMA_256("bf16", "1", "1");
}

// Where a warpgroup stands.
struct TileWorker {
    TileMemory m;
    TileRing ring;
    int group, previous; // previous: the stage whose products may still be under way
};

// Adds step k of the depth to the warpgroup's sums (64, COLS). The products run on when this returns.
template <WideForm FORM, int COLS = TILE_COLS>
static __device__ __forceinline__ void tile_step(float (&sum)[128], TileWorker &g, int k)
{
    barrier_wait(g.m.full(g.ring.stage), g.ring.parity);
    uint64_t a = operand(g.m.a(g.ring.stage) + g.group * GROUP_ROWS * 128, 0);
    uint64_t b = operand(g.m.b(g.ring.stage), FORM == W_BY_COLUMN ? 0 : B_PANEL_BYTES);
    products_begin();
#pragma unroll
    for (int i = 0; i < STAGE_DEPTH / 16; i++)
        multiply<FORM, COLS>(sum, operand_advance(a, (FORM == BOTH_BY_DEPTH ? 16 * 128 : 32) * i),
                             operand_advance(b, (FORM == W_BY_COLUMN ? 32 : 16 * 128) * i), k > 0 || i > 0);
    products_commit();
    if (k > 0) {
        products_wait<1>();
        stage_release(g.m, g.previous);
    }
    g.previous = g.ring.stage;
    g.ring.advance();
}

// The sums are complete.
template <int COLS = TILE_COLS> static __device__ __forceinline__ void tile_finish(float (&sum)[128], TileWorker &g)
{
    products_wait<0>();
    products_done(reinterpret_cast<float(&)[COLS / 2]>(sum));
    stage_release(g.m, g.previous);
}

// Columns HALF * SIDE to HALF * SIDE + 127 of a packed tile of a warpgroup, to column x, row y of matrix z. packed[2 g + h] holds
// what became of the sums 4 g + 2 h and the next.
template <int SIDE>
static __device__ __forceinline__ void store_half(const uint32_t (&packed)[64], const TileWorker &at, const CUtensorMap *out,
                                                  int x, int y, int z)
{
    bool leader = threadIdx.x % GROUP == 0;
    uint8_t *staging = at.m.staging(at.group);
    if (leader) stores_wait_read(); // of the half before
    group_sync(1 + at.group, GROUP);
    uint32_t address = blocks_address(staging, threadIdx.x / WARP % 4 * 16);
#pragma unroll
    for (int g = 0; g < HALF / 8; g += 2)
        store_blocks((address ^ g % 8 << 4) + g / 8 * PANEL_BYTES, packed + SIDE * HALF / 4 + 2 * g);
    copy_unit_fence();
    group_sync(1 + at.group, GROUP);
    if (!leader) return;
    for (int p = 0; p < HALF_PANELS; p++) tile_store(out, staging + p * PANEL_BYTES, x + p * PANEL, y, z);
    stores_commit();
}

#endif
