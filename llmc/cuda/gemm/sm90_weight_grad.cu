// Gradients of weights, dw += a^T b or dw = a^T b, in tiles of 128 x 256 (sm90_tile.cuh says how): few tiles of great depth. The
// depth of the tiles is shared out so that all multiprocessors finish together, and what a cluster has summed is added to dw in
// place.
//
// Of the clusters ("workers") there are P whole ones for each tile and some are left over. The P share the first steps of the
// tile's depth; the rest of all tiles is laid out in a row and cut into equal lengths for those left over. All the P of all tiles
// walk down the depth at the same pace, and so do the others, who take their pieces from the last tile to the first: what one
// of them reads, all others read at about that time, or a little later, and it comes from memory once.
//
// The parts of a tile are added to dw in a fixed order, so that the same input gives the same bits: a counter says how many have
// been added. Where dw begins anew, the first of them is stored. Parts of those left over come first, most of them long before
// the others are done; then the P in turn. A worker waits only for workers with lower numbers, and takes its number when it
// starts: those it waits for are running or have ended, whatever else the device runs.
#include "llmc/cuda/gemm/sm90_weight_grad.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_tile.cuh"

enum {
    MOST_WHOLE = 2,   // workers that a tile may have for itself. More wait too long for each other: 7 took 84 us for the weights
                      // of O alone, cuBLASLt 66 (one H200, 2026-11-22)
    ADDING_STEPS = 6, // steps that a cluster could have computed while it adds a part to dw
    SUM_PANEL = 32,   // columns of 128 bytes, the width of the swizzle
    SUM_PANEL_BYTES = GROUP_ROWS * SUM_PANEL * 4,
    SUM_PANELS = STAGING_BYTES / SUM_PANEL_BYTES, // in the staging area of a warpgroup
    GROUPS = 2,
    MAX_TILES = 4096,  // pairs
    NUMBER_BYTES = 16, // behind the barriers: the worker's number
    SHARED_BYTES = TILE_SHARED_BYTES + NUMBER_BYTES
};
static_assert(SUM_PANELS == 2, "one panel is written while the copy unit reads the other");
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct Counters {
    unsigned workers;                           // that have started
    unsigned added[MAX_TILES][CLUSTER][GROUPS]; // parts of the 64 rows of a warpgroup that dw holds
};
static Counters *counters; // zeros between launches

struct GradMaps {
    CUtensorMap a[WEIGHT_GRADS], b[WEIGHT_GRADS], dw[WEIGHT_GRADS];
};

// Tiles of all products, in pairs one above the other; those of the first product come first.
struct GradWork {
    int tiles, first_tiles, columns[WEIGHT_GRADS];
    bool fresh[WEIGHT_GRADS];
    int sets;  // that are computed one after the other, of (nearly) equal numbers of tiles, at most one for each worker
    int steps; // stages of the depth
    int workers;
    Counters *counters;
};

#if HOPPER

// ---- shares ----------------------------------------------------------------------------------------------------------------

struct Shares {
    int first, tiles; // of the set
    int whole;        // workers that a tile has for itself
    int left_over;    // workers that share the rest; they have the lowest numbers
    int rest;         // steps at the end of every tile's depth that are theirs
};

// The t tiles of a set take P = whole workers each, L are left over. Those add t / L + 1 parts on average where the others add
// one, and are to have added the last of them when the others come. So with u steps for one left over and p for one of the P,
// p = u + ADDING_STEPS (t / L + 1), and all steps of the set are L u + P t p.
static __device__ __forceinline__ Shares shares_of(const GradWork &w, int set)
{
    Shares s;
    s.first = (int)((int64_t)w.tiles * set / w.sets);
    s.tiles = (int)((int64_t)w.tiles * (set + 1) / w.sets) - s.first;
    s.whole = min(w.workers / s.tiles, w.steps);
    s.left_over = w.workers - s.whole * s.tiles;
    int work = s.tiles * w.steps + ADDING_STEPS * (s.tiles + s.left_over), length = (work + w.workers - 1) / w.workers;
    s.rest = w.steps - s.whole * length;
    if (s.whole == w.steps || s.rest * s.tiles < s.left_over) s.rest = 0;
    if (s.rest <= 0) s.left_over = s.rest = 0;
    return s;
}

struct Part {
    int tile, begin, end; // steps of the depth
    unsigned place;       // how many parts of the tile are added before
    bool last;
};

// Who of those left over has this step of the row of rests.
static __device__ __forceinline__ int owner(const Shares &s, int step)
{
    return ((step + 1) * s.left_over - 1) / (s.tiles * s.rest);
}

// Part number `index` of a worker in a set; false when there is none.
static __device__ __forceinline__ bool part_of(Part *part, const Shares &s, int steps, int worker, int index)
{
    int shared = steps - s.rest;
    if (worker >= s.left_over) {
        int number = worker - s.left_over, turn = number / s.tiles, tile = number % s.tiles;
        if (index > 0 || turn >= s.whole) return false;
        int before = s.rest ? owner(s, (tile + 1) * s.rest - 1) - owner(s, tile * s.rest) + 1 : 0;
        *part = {s.first + tile, shared * turn / s.whole, shared * (turn + 1) / s.whole, (unsigned)(before + turn),
                 turn == s.whole - 1};
        return true;
    }
    int row = s.tiles * s.rest, begin = row * worker / s.left_over, end = row * (worker + 1) / s.left_over;
    int tile = (end - 1) / s.rest - index, at = tile * s.rest;
    if (tile < begin / s.rest) return false;
    *part = {s.first + tile, shared + max(begin - at, 0), shared + min(end - at, s.rest), (unsigned)(worker - owner(s, at)),
             false};
    return true;
}

// ---- the kernel ------------------------------------------------------------------------------------------------------------

struct Place {
    int product, row, col; // of this block's tile
};

static __device__ __forceinline__ Place place_of(const GradWork &w, int tile, int rank)
{
    int product = tile >= w.first_tiles, index = product ? tile - w.first_tiles : tile;
    int columns = product ? w.columns[1] : w.columns[0];
    return {product, (index / columns * CLUSTER + rank) * TILE_ROWS, index % columns * TILE_COLS};
}

// One thread of each block runs this.
static __device__ __forceinline__ void fetch(const TileMemory &m, const GradMaps &maps, const GradWork &work, int worker,
                                             int rank)
{
    TileRing ring;
    Part part;
    for (int set = 0; set < work.sets; set++) {
        Shares shares = shares_of(work, set);
        for (int i = 0; part_of(&part, shares, work.steps, worker, i); i++) {
            Place at = place_of(work, part.tile, rank);
            for (int k = part.begin; k < part.end; k++)
                stage_fetch<BOTH_BY_DEPTH>(m, ring, &maps.a[at.product], &maps.b[at.product], k * STAGE_DEPTH, at.row, at.col,
                                           rank);
        }
    }
    stages_drain(m, ring);
}

// A part whose addition is under way, and what to tell when it is done.
struct Addition {
    unsigned *added; // NULL: none
    bool last;
};

// One thread of the warpgroup.
static __device__ __forceinline__ void addition_finish(Addition &a)
{
    if (!a.added) return;
    stores_wait();
    copy_unit_fence_all();
    if (a.last)
        *a.added = 0; // for the next launch
    else
        add_release(a.added, 1);
    a.added = NULL;
}

// A panel of sums to shared memory, swizzled as the copy unit has it. Rows of a warp that would meet in a bank write other
// columns at that time.
template <int P> static __device__ __forceinline__ void write_panel(const float (&sum)[128], uint8_t *panel)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP % 4 * 16 + lane / 4;
    bool odd = lane / 4 & 1;
    uint32_t address = shared_address(panel) + row * 128 + ((lane % 4 / 2 ^ lane / 4) << 4) + lane % 2 * 8;
    if (odd) address ^= 2 << 5;
#pragma unroll
    for (int g = 0; g < SUM_PANEL / 8; g++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *here = sum + 4 * (P * (SUM_PANEL / 8) + g) + 2 * half,
                        *there = sum + 4 * (P * (SUM_PANEL / 8) + (g ^ 2)) + 2 * half;
            float x = odd ? there[0] : here[0], y = odd ? there[1] : here[1];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((address ^ g << 5) + half * 8 * 128), "f"(x), "f"(y)
                         : "memory");
        }
}

// Queues the addition of columns 32 P to 32 P + 31 of a warpgroup's sums to dw at column x, row y, the first of them once as many
// parts have been added as come before; what comes first of all is stored when dw is fresh.
template <int P>
static __device__ __forceinline__ void add_panel(const float (&sum)[128], const TileWorker &g, const CUtensorMap *dw, int x,
                                                 int y, const unsigned *added, const Part &part, bool fresh)
{
    bool leader = threadIdx.x % GROUP == 0;
    uint8_t *panel = g.m.staging(g.group) + P % SUM_PANELS * SUM_PANEL_BYTES;
    if (leader) stores_wait_read<1>(); // the last but one was of this panel
    group_sync(1 + g.group, GROUP);
    write_panel<P>(sum, panel);
    copy_unit_fence();
    group_sync(1 + g.group, GROUP);
    if (!leader) return;
    if (P == 0 && part.place > 0) {
        while (load_acquire(added) != part.place) continue;
        copy_unit_fence_all();
    }
    if (fresh && part.place == 0)
        tile_store(dw, panel, x + P * SUM_PANEL, y, 0);
    else
        tile_add(dw, panel, x + P * SUM_PANEL, y, 0);
    stores_commit();
}

static __device__ __forceinline__ void compute(TileWorker &g, const GradMaps &maps, const GradWork &work, int worker, int rank)
{
    const int finish_step = 2; // by then an addition that the tile before has left is done
    bool leader = threadIdx.x % GROUP == 0;
    Addition addition = {NULL, false};
    Part part;
    for (int set = 0; set < work.sets; set++) {
        Shares shares = shares_of(work, set);
        for (int i = 0; part_of(&part, shares, work.steps, worker, i); i++) {
            float sum[128];
            for (int k = 0; k < part.end - part.begin; k++) {
                tile_step<BOTH_BY_DEPTH>(sum, g, k);
                if (k == finish_step && leader) addition_finish(addition);
            }
            tile_finish(sum, g);
            if (leader) addition_finish(addition);
            Place at = place_of(work, part.tile, rank);
            const CUtensorMap *dw = &maps.dw[at.product];
            unsigned *added = &work.counters->added[part.tile][rank][g.group];
            int row = at.row + g.group * GROUP_ROWS;
            bool fresh = at.product ? work.fresh[1] : work.fresh[0];
            add_panel<0>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<1>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<2>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<3>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<4>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<5>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<6>(sum, g, dw, at.col, row, added, part, fresh);
            add_panel<7>(sum, g, dw, at.col, row, added, part, fresh);
            addition = {added, part.last};
        }
    }
    if (leader) addition_finish(addition);
}

// The cluster's number, taken by one thread of it.
static __device__ __forceinline__ int take_number(const TileMemory &m, const GradWork &work, int rank)
{
    unsigned *number = (unsigned *)(m.empty(STAGES));
    if (rank == 0 && threadIdx.x == 0) {
        unsigned mine = atomicAdd(&work.counters->workers, 1u);
        if ((int)mine == work.workers - 1) work.counters->workers = 0; // the last: for the next launch
        for (int block = 0; block < CLUSTER; block++)
            asm volatile("{\n\t.reg .b32 remote;\n\t"
                         "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                         "st.shared::cluster.u32 [remote], %2;\n\t}" ::"r"(shared_address(number)),
                         "r"(block), "r"(mine)
                         : "memory");
    }
    cluster_sync_at_end(); // shows the number, which cluster_sync would not
    return (int)*(volatile unsigned *)number;
}

#endif

__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    weight_grad_kernel(const __grid_constant__ GradMaps maps, const __grid_constant__ GradWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    TileWorker g = {{shared}, TileRing(), (int)threadIdx.x / GROUP, 0}; // group 2 fetches
    int rank = cluster_rank();
    tile_memory_init(g.m);
    int worker = take_number(g.m, work, rank);
    if (g.group == 2) {
        registers_shrink<FETCH_REGISTERS>();
        if (threadIdx.x == 2 * GROUP) fetch(g.m, maps, work, worker, rank);
    } else {
        registers_grow<COMPUTE_REGISTERS>();
        compute(g, maps, work, worker, rank);
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------------------------

void weight_grad_reserve(void)
{
    if (wide_tile_clusters() < 1) return;
    CUDA_CHECK(cudaFuncSetAttribute(weight_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    counters = (Counters *)device_alloc(sizeof *counters, "scratch: counters of weight gradients");
}

void weight_grad_close(void)
{
    if (counters) device_free(counters);
    counters = NULL;
}

static int64_t pairs_of(const WeightGrad *g) { return ceil_div(g->m, CLUSTER * TILE_ROWS) * ceil_div(g->n, TILE_COLS); }

bool weight_grad_takes(const WeightGrad *g, int count, int N)
{
    int64_t tiles = 0, workers = wide_tile_clusters();
    for (int i = 0; i < count; i++) {
        if (g[i].m % 8 || g[i].n % 8) return false;
        tiles += pairs_of(&g[i]);
    }
    return N > 0 && workers > 0 && tiles <= MAX_TILES && tiles * (MOST_WHOLE + 1) > workers
           && 2 * workers * workers * ceil_div(N, STAGE_DEPTH) <= INT32_MAX;
}

bool weight_grad(Stream s, const WeightGrad *g, int count, int N)
{
    assert(count >= 1 && count <= WEIGHT_GRADS);
    if (!weight_grad_takes(g, count, N)) return false;
    GradMaps maps;
    GradWork work = {.steps = (int)ceil_div(N, STAGE_DEPTH), .workers = wide_tile_clusters_now(), .counters = counters};
    for (int i = 0; i < count; i++) {
        const void *operands[] = {g[i].dw, g[i].a, g[i].b};
        for (int k = 0; k < 3; k++)
            if ((uintptr_t)operands[k] % 16) return false;
        work.fresh[i] = g[i].fresh;
        work.columns[i] = (int)ceil_div(g[i].n, TILE_COLS);
        work.tiles += (int)pairs_of(&g[i]);
        if (i == 0) work.first_tiles = work.tiles;
        maps.a[i] = wide_tile_map(g[i].a, 1, N, g[i].m, STAGE_DEPTH);
        maps.b[i] = wide_tile_map(g[i].b, 1, N, g[i].n, STAGE_DEPTH);
        maps.dw[i] = wide_sum_map(g[i].dw, g[i].m, g[i].n);
    }
    work.sets = (int)ceil_div(work.tiles, work.workers);
    weight_grad_kernel<<<CLUSTER * (unsigned)work.workers, TILE_THREADS, SHARED_BYTES, s>>>(maps, work);
    CHECK_LAUNCH();
    return true;
}
