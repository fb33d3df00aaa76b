// Mainloop shared by the sm90 GEMM kernels (GEMM, QKV, weight gradients). Operands bf16, accumulators fp32.
// Operands e4m3, layout NT only: two neighbouring codes count as one 16-bit element for tensor maps, schedule
// and producer, because TMA and the swizzle move bytes. A k step is then 128 codes deep.
//
//   tile        128 x 256 x 64, two consumer warpgroups of 64 x 256 each, WGMMA m64n256k16 (e4m3: k32) with
//               both operands in smem (sm90_fp8_codes.cu: 128 columns, and an epilogue of its own)
//   pipeline    4 stages of 48 KB (A 16 KB, B 32 KB), full/empty mbarriers, runs on from tile to tile
//   cluster     2 CTAs, tiles one above the other: each loads half of B and multicasts it to both. Without
//               multicast the loads from L2 are the bound
//   warps       warpgroups 0 and 1: WGMMA and epilogue (232 registers); one thread of warpgroup 2: TMA
//               producer (40)
//   schedule    persistent, static: clusters take tiles round-robin. When at most half of the clusters have
//               a tile in the last wave, that wave's tiles are split into 128 x 128 halves
//   epilogue    sums are packed to bf16 in registers, so that the accumulators are free for the next
//               mainloop; the packed tile passes through a 32 KB staging buffer to TMA stores during that
//               mainloop
//
// Most K are only 12 stages long: the gap between two mainloops counts as much as the mainloop itself.
// TMA handles edges: out-of-bounds loads return zero, stores are dropped.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"
#include <cuda_fp8.h>
#include <initializer_list>

typedef __nv_bfloat16 Bf16;
typedef __nv_fp8_e4m3 E4m3;

// A kernel whose epilogue has warps of its own takes narrower tiles, and says so before it includes this: an
// instruction for 256 columns wants more registers of a thread than five warpgroups have.
#ifndef TILE_COLUMNS
#define TILE_COLUMNS 256
#define TILE_STAGING_BYTES (2 * 64 * 128) // half a tile of a warpgroup
#endif

enum {
    TILE_M = 128,
    TILE_N = TILE_COLUMNS,
    TILE_K = 64,
    STAGES = 4,
    CLUSTER = 2,
    WARPGROUP = 128,     // threads of a warpgroup
    WARPGROUP_M = 64,    // rows of the tile per warpgroup
    PANEL = 64,          // columns of 128 bytes, the width of the swizzle
    HALF_N = TILE_N / 2, // columns that pass through the staging buffer together
    HALF_PANELS = HALF_N / PANEL,
    TILE_THREADS = 3 * WARPGROUP,
    PRODUCER_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    CONSUMER_REGISTERS = 232,
    A_BYTES = TILE_M * TILE_K * 2,
    B_BYTES = TILE_N * TILE_K * 2,
    B_PANEL_BYTES = PANEL * TILE_K * 2,
    STAGE_BYTES = A_BYTES + B_BYTES,
    PANEL_BYTES = WARPGROUP_M * PANEL * 2, // of a warpgroup's output
    STAGING_BYTES = TILE_STAGING_BYTES,
    TILE_SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGING_BYTES + 2 * STAGES * 8
};
static_assert(TILE_SHARED_BYTES <= 227 * 1024, "a block's shared memory");

#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 900
#define TILE_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TILE_CLUSTER // the kernel is empty on other architectures
#endif

// Tiles of a GEMM, counted in pairs (one tile per CTA of a cluster). Clusters take pairs round-robin. When
// at most half of the clusters have a pair in the last wave, its tiles are split into halves of HALF_N
// columns, which halves the duration of that wave.
struct TileSchedule {
    int columns;       // pairs along N
    int whole, halves; // pairs of whole tiles, and behind them of half tiles
    int steps;         // k steps of a tile
};

// Call after device_open, before anything else asks whether the kernels for Hopper run. kernel: any kernel
// with this tile's CTAs
void sm90_tile_reserve(const void *kernel);
// Fills the schedule of a product (rows, depth) x (depth, cols) and the number of CTAs. False when the path,
// the build or the shape does not allow this tile.
bool sm90_tile_schedule(TileSchedule *t, unsigned *blocks, int64_t rows, int64_t cols, int64_t depth,
                        SharedSms *shared);
// Clusters that are resident at the same time; 0: this tile does not run on this path.
int sm90_tile_clusters(void);
int sm90_tile_clusters_beside(SharedSms *shared); // that a launch may use, which counts itself off
// Whether all of them lie on 16 bytes, as TMA wants it. NULL does.
bool on_16_bytes(std::initializer_list<const void *> pointers);
// Tensor map of `planes` consecutive bf16 matrices (rows, cols), boxes of PANEL columns and box_rows rows.
CUtensorMap tile_map_bf16(const void *base, int planes, int rows, int cols, int box_rows);
// Tensor map of an fp32 matrix (rows, cols), boxes of 32 columns and 64 rows.
CUtensorMap tile_map_fp32(const float *base, int rows, int cols);

#if HOPPER

// ---- pipeline ---------------------------------------------------------------------------------------------

struct SharedStorage {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint8_t *staging(int group) const
    {
        return base + STAGES * STAGE_BYTES + group * STAGING_BYTES;
    }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)staging(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
};

using Pipeline = PipelineState<STAGES>;

// Initialises the mbarriers. All threads of the cluster call it first.
static __device__ __forceinline__ void shared_storage_init(const SharedStorage &m)
{
    if (threadIdx.x == 0) {
        if (shared_address(m.base) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.full(i), 1);
            mbarrier_init(m.empty(i), CLUSTER * 2 * WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
}

// Releases a stage to both CTAs' producers, because both write to it. One arrival per warp.
static __device__ __forceinline__ void consumer_release(const SharedStorage &m, int stage)
{
    if (threadIdx.x % WARP < CLUSTER)
        mbarrier_arrive_remote(m.empty(stage), threadIdx.x % WARP);
}

// The producer calls it last: it waits until both CTAs have released all stages, so that nobody arrives at
// this CTA's mbarriers after it has exited. All multicast data has arrived too, because it was consumed.
static __device__ __forceinline__ void producer_tail(const SharedStorage &m, Pipeline &ring)
{
    for (int i = 0; i < STAGES; i++, ring.advance())
        mbarrier_wait(m.empty(ring.stage), ring.parity ^ 1);
}

// Waits for an empty stage and arms its full barrier for `bytes`, which include the half that the other CTA
// multicasts.
static __device__ __forceinline__ uint64_t *producer_acquire(const SharedStorage &m, const Pipeline &ring,
                                                             uint32_t bytes)
{
    uint64_t *full = m.full(ring.stage);
    mbarrier_wait(m.empty(ring.stage), ring.parity ^ 1);
    mbarrier_arrive_expect_tx(full, bytes);
    return full;
}

// Producer: loads A and B of k step k for the tile of COLS columns at (row, col). Boxes of A have 128 rows,
// 64 in layout TN; boxes of B 64. Each CTA loads 1 / CLUSTER of B's columns and multicasts them.
template <GemmLayout FORM, int COLS = TILE_N>
static __device__ __forceinline__ void produce_stage(const SharedStorage &m, Pipeline &ring,
                                                     const CUtensorMap *x, const CUtensorMap *w, int k,
                                                     int row, int col, int rank)
{
    const uint16_t both = (1 << CLUSTER) - 1;
    const int panels = COLS / CLUSTER / PANEL;
    uint64_t *full = producer_acquire(m, ring, A_BYTES + COLS / PANEL * B_PANEL_BYTES);
    uint8_t *mine = m.b(ring.stage) + rank * panels * B_PANEL_BYTES;
    int first = col + rank * panels * PANEL;
    if (FORM == LAYOUT_TN)
        for (int p = 0; p < TILE_M / PANEL; p++)
            tma_load(m.a(ring.stage) + p * B_PANEL_BYTES, x, full, row + p * PANEL, k, 0);
    else
        tma_load(m.a(ring.stage), x, full, k, row, 0);
    for (int p = 0; p < panels; p++) {
        int at = first + p * PANEL;
        tma_load_multicast(mine + p * B_PANEL_BYTES, w, full, FORM == LAYOUT_NT ? k : at,
                           FORM == LAYOUT_NT ? at : k, 0, both);
    }
    ring.advance();
}

struct TileCoord {
    int row, col;
};

// Coordinates of this CTA's tile, or half tile.
static __device__ __forceinline__ TileCoord tile_coord(const TileSchedule &t, int index, int rank)
{
    int half = max(index - t.whole, 0), pair = index - half + half / 2;
    return {(pair / t.columns * CLUSTER + rank) * TILE_M, pair % t.columns * TILE_N + half % 2 * HALF_N};
}

// Producer thread: all stages of all tiles. next: a matrix of two bytes an element (rows, columns of the
// result / 2) of which whole tiles go to L2 ahead of the epilogue that reads them; or NULL.
template <GemmLayout FORM>
static __device__ __forceinline__ void produce_tiles(const SharedStorage &m, const CUtensorMap *x,
                                                     const CUtensorMap *w, const TileSchedule &t, int rank,
                                                     const CUtensorMap *next = NULL)
{
    Pipeline ring;
    int index = blockIdx.x / CLUSTER;
    for (; index < t.whole; index += gridDim.x / CLUSTER) {
        TileCoord at = tile_coord(t, index, rank);
        for (int p = 0; next && p < TILE_N / 2 / PANEL; p++)
            tma_prefetch(next, at.col / 2 + p * PANEL, at.row, 0);
        for (int k = 0; k < t.steps; k++)
            produce_stage<FORM>(m, ring, x, w, k * TILE_K, at.row, at.col, rank);
    }
    if (index < t.whole + t.halves) {
        TileCoord at = tile_coord(t, index, rank);
        for (int k = 0; k < t.steps; k++)
            produce_stage<FORM, HALF_N>(m, ring, x, w, k * TILE_K, at.row, at.col, rank);
    }
    producer_tail(m, ring);
}

// ---- consumers --------------------------------------------------------------------------------------------

// State of a consumer warpgroup.
struct Consumer {
    SharedStorage m;
    Pipeline ring;
    int group, previous; // previous: the stage whose WGMMAs may be in flight
    int warp;            // of the CTA; warp-uniform
};

// True in one thread of the warpgroup, always the same one: bulk groups of TMA stores belong to a thread.
static __device__ __forceinline__ bool elect_leader(const Consumer &g)
{
    return g.warp % (WARPGROUP / WARP) == 0 && elect_one();
}

template <GemmLayout FORM, int COLS, typename T>
static __device__ __forceinline__ void mma(float (&sum)[128], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(sizeof(T) == 2 || FORM == LAYOUT_NT, "e4m3 operands are K-major");
    if constexpr (sizeof(T) == 1)
        wgmma_e4m3<COLS>(sum, a, b, accumulate);
    else
        wgmma<T, COLS, FORM == LAYOUT_TN, FORM != LAYOUT_NT>(sum, a, b, accumulate);
}

// Issues the WGMMAs of k step k into the accumulators (64, COLS), waits for those of the previous step and
// releases its stage.
template <GemmLayout FORM, int COLS = TILE_N, typename T = Bf16>
static __device__ __forceinline__ void mainloop_step(float (&sum)[128], Consumer &g, int k)
{
    mbarrier_wait(g.m.full(g.ring.stage), g.ring.parity);
    uint64_t a = smem_descriptor(g.m.a(g.ring.stage) + g.group * WARPGROUP_M * 128, 0);
    uint64_t b = smem_descriptor(g.m.b(g.ring.stage), FORM == LAYOUT_NT ? 0 : B_PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_K / 16; i++) {
        uint64_t a_i = descriptor_advance(a, (FORM == LAYOUT_TN ? 16 * 128 : 32) * i),
                 b_i = descriptor_advance(b, (FORM == LAYOUT_NT ? 32 : 16 * 128) * i);
        mma<FORM, COLS, T>(sum, a_i, b_i, k > 0 || i > 0);
    }
    wgmma_commit();
    if (k > 0) {
        wgmma_wait<1>();
        consumer_release(g.m, g.previous);
    }
    g.previous = g.ring.stage;
    g.ring.advance();
}

// Waits for the last step. The accumulators are complete.
template <int COLS = TILE_N>
static __device__ __forceinline__ void mainloop_finish(float (&sum)[128], Consumer &g)
{
    wgmma_wait<0>();
    wgmma_fence_registers(reinterpret_cast<float(&)[COLS / 2]>(sum));
    consumer_release(g.m, g.previous);
}

// Stores columns HALF_N * SIDE to HALF_N * SIDE + 127 of the packed tile at column x, row y of matrix z.
// packed[2 g + h] holds the values of accumulators 4 g + 2 h and the next.
template <int SIDE>
static __device__ __forceinline__ void store_half(const uint32_t (&packed)[64], const Consumer &at,
                                                  const CUtensorMap *out, int x, int y, int z)
{
    uint8_t *staging = at.m.staging(at.group);
    if (elect_leader(at))
        tma_store_wait_read(); // the previous half
    named_barrier_sync(1 + at.group, WARPGROUP);
    uint32_t address = matrix_address(staging, threadIdx.x / WARP % 4 * 16);
#pragma unroll
    for (int g = 0; g < HALF_N / 8; g += 2)
        stmatrix_x4((address ^ g % 8 << 4) + g / 8 * PANEL_BYTES, packed + SIDE * HALF_N / 4 + 2 * g);
    fence_proxy_async_shared();
    named_barrier_sync(1 + at.group, WARPGROUP);
    if (!elect_leader(at))
        return;
    for (int p = 0; p < HALF_PANELS; p++)
        tma_store(out, staging + p * PANEL_BYTES, x + p * PANEL, y, z);
    tma_store_commit();
}

#endif
