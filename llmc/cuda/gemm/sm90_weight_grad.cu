// Weight gradients dw += a^T b, or dw = a^T b: stream-K GEMM in layout TN on the 128 x 256 tile of
// sm90_tile.cuh. Few tiles, K = tokens.
//
// Stream-K: with C clusters and T tiles every tile gets P = C / T clusters of its own; the remainder
// clusters are C - P T. The P clusters split the first k steps of their tile; the last k steps of all tiles
// form one sequence that is cut into equal lengths for the remainder clusters. All clusters walk through k
// at the same pace, so that a panel of a or b is read from memory once and from L2 by the others.
//
// Determinism: the partial sums of a tile are added to dw by TMA reductions in a fixed order; a counter per
// tile and warpgroup says how many have been added. Partial sums of remainder clusters come first, then
// those of the P clusters in turn. When beta = 0 the first one is stored: dw need not be zeroed. Deadlock:
// clusters take their index from an atomic counter when they start, and wait only for lower indices, which
// are running or have finished.
//
// Bound: tensor cores, 700 TFLOP/s at the power limit (one H200). Two launches' worth of weights (QKV and O,
// fc and proj) share one grid. Tried: P = 7 for the weights of O alone took 84 us, cuBLASLt 66.
#include "llmc/cuda/gemm/sm90_weight_grad.cuh"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_tile.cuh"

enum {
    MAX_CLUSTERS_PER_TILE = 2, // with more, reductions wait too long for each other: 7 took 84 us for the
                               // weights of O alone, cuBLASLt 66 (one H200, 2026-11-22)
    REDUCTION_STEPS = 6,       // k steps that take as long as the reduction of a tile
    SUM_PANEL = 32,            // columns of 128 bytes, the width of the swizzle
    SUM_PANEL_BYTES = WARPGROUP_M * SUM_PANEL * 4,
    SUM_PANELS = STAGING_BYTES / SUM_PANEL_BYTES, // in the staging buffer of a warpgroup
    GROUPS = 2,
    MAX_TILES = 4096,  // pairs
    NUMBER_BYTES = 16, // behind the mbarriers: the cluster's index
    SHARED_BYTES = TILE_SHARED_BYTES + NUMBER_BYTES
};
static_assert(SUM_PANELS == 2, "one panel is written while TMA reads the other");
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct Counters {                               // zeros between launches
    unsigned started;                           // clusters that have started
    unsigned added[MAX_TILES][CLUSTER][GROUPS]; // partial sums that dw holds, by slice of 64 rows
};

struct GradMaps {
    CUtensorMap a[WEIGHT_GRADS], b[WEIGHT_GRADS], dw[WEIGHT_GRADS];
};

// Tiles of all products in pairs, one tile per CTA of a cluster; those of the first product come first.
struct GradWork {
    int tiles, first_tiles, columns[WEIGHT_GRADS];
    bool fresh[WEIGHT_GRADS];
    int sets;  // computed one after the other, of (nearly) equal numbers of tiles, at most one per cluster
    int steps; // k steps of a tile
    int clusters;
    Counters *counters;
};

#if HOPPER

// ---- stream-K split ---------------------------------------------------------------------------------------

struct StreamK {
    int first, tiles;      // of the set
    int clusters_per_tile; // P
    int remainder;         // clusters with the lowest indices
    int remainder_steps;   // k steps at the end of every tile that are theirs
};

// The t tiles of a set take P clusters each; L remainder clusters are left. A remainder cluster adds t / L +
// 1 partial sums on average, the others one, and the remainder's reductions should end before the others
// begin. With u k steps for a remainder cluster and p for one of the P: p = u + REDUCTION_STEPS (t / L + 1),
// and all k steps of the set are L u + P t p.
static __device__ __forceinline__ StreamK stream_k_split(const GradWork &w, int set)
{
    StreamK s;
    s.first = (int)((int64_t)w.tiles * set / w.sets);
    s.tiles = (int)((int64_t)w.tiles * (set + 1) / w.sets) - s.first;
    s.clusters_per_tile = min(w.clusters / s.tiles, w.steps);
    s.remainder = w.clusters - s.clusters_per_tile * s.tiles;
    int work = s.tiles * w.steps + REDUCTION_STEPS * (s.tiles + s.remainder),
        length = (work + w.clusters - 1) / w.clusters;
    s.remainder_steps = w.steps - s.clusters_per_tile * length;
    if (s.clusters_per_tile == w.steps || s.remainder_steps * s.tiles < s.remainder)
        s.remainder_steps = 0;
    if (s.remainder_steps <= 0)
        s.remainder = s.remainder_steps = 0;
    return s;
}

struct KRange {
    int tile, begin, end; // k steps
    unsigned order;       // partial sums of the tile that are added before this one
    bool last;
};

// The remainder cluster that owns k step `step` of the sequence of remainder steps.
static __device__ __forceinline__ int remainder_owner(const StreamK &s, int step)
{
    return ((step + 1) * s.remainder - 1) / (s.tiles * s.remainder_steps);
}

// K range number `index` of a cluster in a set; false when there is none.
static __device__ __forceinline__ bool k_range(KRange *range, const StreamK &s, int steps, int cluster,
                                               int index)
{
    int shared = steps - s.remainder_steps;
    if (cluster >= s.remainder) {
        int claimed = cluster - s.remainder, split = claimed / s.tiles, tile = claimed % s.tiles;
        if (index > 0 || split >= s.clusters_per_tile)
            return false;
        int before = s.remainder_steps ? remainder_owner(s, (tile + 1) * s.remainder_steps - 1) -
                                             remainder_owner(s, tile * s.remainder_steps) + 1
                                       : 0;
        *range = {s.first + tile, shared * split / s.clusters_per_tile,
                  shared * (split + 1) / s.clusters_per_tile, (unsigned)(before + split),
                  split == s.clusters_per_tile - 1};
        return true;
    }
    int row = s.tiles * s.remainder_steps, begin = row * cluster / s.remainder,
        end = row * (cluster + 1) / s.remainder;
    int tile = (end - 1) / s.remainder_steps - index, at = tile * s.remainder_steps;
    if (tile < begin / s.remainder_steps)
        return false;
    *range = {s.first + tile, shared + max(begin - at, 0), shared + min(end - at, s.remainder_steps),
              (unsigned)(cluster - remainder_owner(s, at)), false};
    return true;
}

// ---- kernel -----------------------------------------------------------------------------------------------

struct GradCoord {
    int product, row, col; // of this CTA's tile
};

static __device__ __forceinline__ GradCoord grad_coord(const GradWork &w, int tile, int rank)
{
    int product = tile >= w.first_tiles, index = product ? tile - w.first_tiles : tile;
    int columns = product ? w.columns[1] : w.columns[0];
    return {product, (index / columns * CLUSTER + rank) * TILE_M, index % columns * TILE_N};
}

// Producer thread: all stages of this cluster's k ranges.
static __device__ __forceinline__ void produce(const SharedStorage &m, const GradMaps &maps,
                                               const GradWork &work, int cluster, int rank)
{
    Pipeline ring;
    KRange range;
    for (int set = 0; set < work.sets; set++) {
        StreamK split = stream_k_split(work, set);
        for (int i = 0; k_range(&range, split, work.steps, cluster, i); i++) {
            GradCoord at = grad_coord(work, range.tile, rank);
            for (int k = range.begin; k < range.end; k++)
                produce_stage<LAYOUT_TN>(m, ring, &maps.a[at.product], &maps.b[at.product], k * TILE_K,
                                         at.row, at.col, rank);
        }
    }
    producer_tail(m, ring);
}

// A reduction to dw in flight, and the counter to advance when it is complete.
struct PendingReduction {
    unsigned *added; // NULL: none
    bool last;
};

// Called by one thread of the warpgroup.
static __device__ __forceinline__ void reduction_finish(PendingReduction &a)
{
    if (!a.added)
        return;
    tma_store_wait();
    fence_proxy_async();
    if (a.last)
        *a.added = 0; // reset for the next launch
    else
        add_release(a.added, 1);
    a.added = NULL;
}

// Writes a panel of fp32 sums to shared memory under the 128-byte swizzle. Odd rows write other columns at
// the same time, which avoids bank conflicts.
template <int P> static __device__ __forceinline__ void stage_panel(const float (&sum)[128], uint8_t *panel)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP % 4 * 16 + lane / 4;
    bool odd = lane / 4 & 1;
    uint32_t address = shared_address(panel) + row * 128 + ((lane % 4 / 2 ^ lane / 4) << 4) + lane % 2 * 8;
    if (odd)
        address ^= 2 << 5;
#pragma unroll
    for (int g = 0; g < SUM_PANEL / 8; g++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *here = sum + 4 * (P * (SUM_PANEL / 8) + g) + 2 * half,
                        *there = sum + 4 * (P * (SUM_PANEL / 8) + (g ^ 2)) + 2 * half;
            float x = odd ? there[0] : here[0], y = odd ? there[1] : here[1];
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((address ^ g << 5) + half * 8 * 128),
                         "f"(x), "f"(y)
                         : "memory");
        }
}

// Issues the reduction of columns 32 P to 32 P + 31 of a warpgroup's sums to dw at column x, row y. The
// first panel waits until the counter says that all earlier partial sums have been added. The very first
// partial sum is stored when beta = 0.
template <int P>
static __device__ __forceinline__ void reduce_panel(const float (&sum)[128], const Consumer &g,
                                                    const CUtensorMap *dw, int x, int y,
                                                    const unsigned *added, const KRange &range, bool fresh)
{
    uint8_t *panel = g.m.staging(g.group) + P % SUM_PANELS * SUM_PANEL_BYTES;
    if (elect_leader(g))
        tma_store_wait_read<1>(); // the last but one used this panel
    named_barrier_sync(1 + g.group, WARPGROUP);
    stage_panel<P>(sum, panel);
    fence_proxy_async_shared();
    named_barrier_sync(1 + g.group, WARPGROUP);
    if (!elect_leader(g))
        return;
    if (P == 0 && range.order > 0) {
        while (load_acquire(added) != range.order)
            continue;
        fence_proxy_async();
    }
    if (fresh && range.order == 0)
        tma_store(dw, panel, x + P * SUM_PANEL, y, 0);
    else
        tma_reduce_add(dw, panel, x + P * SUM_PANEL, y, 0);
    tma_store_commit();
}

static __device__ __forceinline__ void consume(Consumer &g, const GradMaps &maps, const GradWork &work,
                                               int cluster, int rank)
{
    const int finish_step = 2; // the previous tile's reduction is complete by then
    bool leader = elect_leader(g);
    PendingReduction pending = {NULL, false};
    KRange range;
    for (int set = 0; set < work.sets; set++) {
        StreamK split = stream_k_split(work, set);
        for (int i = 0; k_range(&range, split, work.steps, cluster, i); i++) {
            float sum[128];
            for (int k = 0; k < range.end - range.begin; k++) {
                mainloop_step<LAYOUT_TN>(sum, g, k);
                if (k == finish_step && leader)
                    reduction_finish(pending);
            }
            mainloop_finish(sum, g);
            if (leader)
                reduction_finish(pending);
            GradCoord at = grad_coord(work, range.tile, rank);
            const CUtensorMap *dw = &maps.dw[at.product];
            unsigned *added = &work.counters->added[range.tile][rank][g.group];
            int row = at.row + g.group * WARPGROUP_M;
            bool fresh = at.product ? work.fresh[1] : work.fresh[0];
            reduce_panel<0>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<1>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<2>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<3>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<4>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<5>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<6>(sum, g, dw, at.col, row, added, range, fresh);
            reduce_panel<7>(sum, g, dw, at.col, row, added, range, fresh);
            pending = {added, range.last};
        }
    }
    if (leader)
        reduction_finish(pending);
}

// One thread of the cluster takes its index; both CTAs read it.
static __device__ __forceinline__ int claim_cluster_index(const SharedStorage &m, const GradWork &work,
                                                          int rank)
{
    unsigned *claimed = (unsigned *)(m.empty(STAGES));
    if (rank == 0 && threadIdx.x == 0) {
        unsigned mine = atomicAdd(&work.counters->started, 1u);
        if ((int)mine == work.clusters - 1)
            work.counters->started = 0; // the last one resets it for the next launch
        for (int block = 0; block < CLUSTER; block++)
            asm volatile("{\n\t.reg .b32 remote;\n\t"
                         "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                         "st.shared::cluster.u32 [remote], %2;\n\t}" ::"r"(shared_address(claimed)),
                         "r"(block), "r"(mine)
                         : "memory");
    }
    cluster_sync(); // publishes the index, which cluster_sync_relaxed would not
    return (int)*(volatile unsigned *)claimed;
}

#endif

__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    sm90_weight_grad_kernel(const __grid_constant__ GradMaps maps, const __grid_constant__ GradWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp();
    Consumer g = {{shared}, Pipeline(), warp / 4, 0, warp}; // warpgroup 2 is the producer
    int rank = cluster_rank();
    shared_storage_init(g.m);
    int cluster = claim_cluster_index(g.m, work, rank);
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce(g.m, maps, work, cluster, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(g, maps, work, cluster, rank);
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

void sm90_weight_grad_reserve(void)
{
    if (sm90_tile_clusters() < 1)
        return;
    CUDA_CHECK(cudaFuncSetAttribute(sm90_weight_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    SHARED_BYTES));
    scratch_plan(SCRATCH_WEIGHT_GRADS, sizeof(Counters));
}

static int64_t tile_pairs(const WeightGrad *g)
{
    return ceil_div(g->m, CLUSTER * TILE_M) * ceil_div(g->n, TILE_N);
}

bool sm90_weight_grad_takes(const WeightGrad *g, int count, int N)
{
    int64_t tiles = 0, clusters = sm90_tile_clusters();
    for (int i = 0; i < count; i++) {
        if (g[i].m % 8 || g[i].n % 8)
            return false;
        tiles += tile_pairs(&g[i]);
    }
    return N > 0 && clusters > 0 && tiles <= MAX_TILES && tiles * (MAX_CLUSTERS_PER_TILE + 1) > clusters &&
           2 * clusters * clusters * ceil_div(N, TILE_K) <= INT32_MAX;
}

bool sm90_weight_grad(const ProductContext *c, const WeightGrad *g, int count, int N)
{
    assert(count >= 1 && count <= WEIGHT_GRADS);
    if (!sm90_weight_grad_takes(g, count, N))
        return false;
    for (int i = 0; i < count; i++)
        if (!on_16_bytes({g[i].dw, g[i].a, g[i].b}))
            return false;
    GradMaps maps;
    GradWork work = {.steps = (int)ceil_div(N, TILE_K),
                     .clusters = sm90_tile_clusters_beside(c->shared),
                     .counters = (Counters *)scratch_of(c->stream, SCRATCH_WEIGHT_GRADS, sizeof(Counters))};
    for (int i = 0; i < count; i++) {
        work.fresh[i] = g[i].fresh;
        work.columns[i] = (int)ceil_div(g[i].n, TILE_N);
        work.tiles += (int)tile_pairs(&g[i]);
        if (i == 0)
            work.first_tiles = work.tiles;
        maps.a[i] = tile_map_bf16(g[i].a, 1, N, g[i].m, TILE_K);
        maps.b[i] = tile_map_bf16(g[i].b, 1, N, g[i].n, TILE_K);
        maps.dw[i] = tile_map_fp32(g[i].dw, g[i].m, g[i].n);
    }
    work.sets = (int)ceil_div(work.tiles, work.clusters);
    sm90_weight_grad_kernel<<<CLUSTER *(unsigned)work.clusters, TILE_THREADS, SHARED_BYTES, c->stream>>>(
        maps, work);
    CHECK_LAUNCH();
    return true;
}
