// Tile scheduler and TMA producer of the Newton-Schulz chain kernel.
#pragma once
#include "llmc/cuda/muon/sm90_ns_aol.cuh"

enum {
    CLUSTER = 2,
    PREFETCH_STAGES = 3,                 // stages that are loaded after the next tile has been claimed
    WARPS = CONSUMERS * WARPGROUP / WARP // consumer warps of a CTA
};

#if HOPPER

// ---- tiles and tasks --------------------------------------------------------------------------------------

// Search state: the next tile lies behind the last one found. Matrices from `first` on, which are processed
// together; the task; tiles before it. A search from the start would take long, because the tasks lie 768
// bytes apart.
struct TileSearch {
    int first, task, before;
};

// Tile `index` of the chain, as its first slice.
static __device__ __forceinline__ Slice find_tile(const Chain &c, TileSearch &f, int index)
{
    for (int tiles;
         index - f.before >= (tiles = c.task[f.task].tiles * min(c.together, c.batch - f.first));) {
        f.before += tiles;
        if (++f.task == c.tasks) {
            f.task = 0;
            f.first += c.together;
        }
    }
    const Task &w = c.task[f.task];
    int matrix = (index - f.before) / w.tiles, tile = index - f.before - matrix * w.tiles, i, j;
    Slice t = {};
    t.task = f.task;
    t.matrix = f.first + matrix;
    if (is_symmetric(w))
        for (i = 0, j = tile; j >= tiles_in_row(w.rows, w.width, i); i++)
            j -= tiles_in_row(w.rows, w.width, i);
    else {
        j = tile / w.tiles_per_column;
        i = tile - j * w.tiles_per_column; // neighbours share the tall operand's columns
    }
    t.row = TILE_SLICES * i;
    t.width = j < w.wide ? TILE_SLICES : w.width;
    t.col = w.width * j + (TILE_SLICES - w.width) * min(j, w.wide);
    t.on_diagonal = is_symmetric(w) && t.row - t.col < t.width;
    return t;
}

// Row of the slice that a warpgroup of a CTA has. On the diagonal a slice of a full-width tile has one to
// four boxes that exist: each CTA gets five.
static __device__ __forceinline__ int slice_row(const Slice &tile, int rank, int group)
{
    if (tile.on_diagonal)
        return tile.row + (group ? TILE_SLICES - 1 - rank : rank);
    return tile.row + CONSUMERS * rank + group;
}

// On the diagonal of a product of a tensor with itself, a slice's rows of a may be part of b and are not
// loaded.
static __device__ __forceinline__ bool a_is_in_b(const Task &w, const Slice &tile, int row)
{
    return w.same_operands && row - tile.col < tile.width;
}
// Nor are those of slices above the diagonal: narrow tiles are bound by loads.
static __device__ __forceinline__ bool a_needed(const Task &w, const Slice &tile, int row)
{
    return !is_symmetric(w) || (row >= tile.col && !a_is_in_b(w, tile, row));
}
// Boxes of b that the slices of a tile need.
static __device__ __forceinline__ int b_boxes(const Task &w, const Slice &tile)
{
    return is_symmetric(w) ? min(tile.width, tile.row + TILE_SLICES - tile.col) : tile.width;
}

// Stages of operands, or of raw sums, one box of each slice per stage.
static __device__ __forceinline__ int stages_of(const Task &w)
{
    return w.kind == TASK_AOL ? TILE_SIDE / BOX_SIDE : (w.depth + DEPTH - 1) / DEPTH;
}

// Scheduler thread: waits until the tasks that this one depends on are done for the tile's matrix, and
// orders their TMA stores before TMA loads.
static __device__ __forceinline__ void wait_for_tasks(const Chain &c, const Slice &t)
{
    for (uint32_t waits = c.task[t.task].waits; waits; waits &= waits - 1) {
        int task = __ffs((int)waits) - 1;
        const unsigned *done = c.done + task * c.batch + t.matrix;
        while (load_acquire(done) < (unsigned)(TILE_SLICES * c.task[task].tiles))
            __nanosleep(20);
    }
    fence_proxy_async();
}

// ---- tile scheduler ---------------------------------------------------------------------------------------

// Publishes the tile index to both CTAs. Called by the scheduler of the cluster's first CTA; the last index
// is beyond the last tile.
static __device__ __forceinline__ void publish_index(const SharedMemory &m, PipelineState<SCHED_STAGES> &pipe,
                                                     unsigned index)
{
    mbarrier_wait(m.index_empty(pipe.stage), pipe.parity ^ 1);
    for (int rank = 0; rank < CLUSTER; rank++)
        st_async_u32(m.tile_counter(pipe.stage), index, m.index_full(pipe.stage), rank);
    pipe.advance();
}

static __device__ __forceinline__ int acquire_index(const SharedMemory &m, PipelineState<SCHED_STAGES> &pipe)
{
    mbarrier_wait(m.index_full(pipe.stage), pipe.parity);
    int index = *(volatile uint32_t *)m.tile_counter(pipe.stage);
    mbarrier_arrive_remote(m.index_empty(pipe.stage), 0);
    pipe.advance();
    return index;
}

// Publishes the tile to the consumers, the TMA-store warps and the producer of this CTA; task -1 after the
// last tile.
static __device__ __forceinline__ void publish_tile(const SharedMemory &m, PipelineState<SCHED_STAGES> &pipe,
                                                    const Slice &t)
{
    mbarrier_wait(m.sched_empty(pipe.stage), pipe.parity ^ 1);
    *m.slice(pipe.stage) = t;
    mbarrier_arrive(m.sched_full(pipe.stage));
    pipe.advance();
}
// Acquires the next tile. Every consumer thread and the TMA-store thread arrive for themselves.
static __device__ __forceinline__ Slice acquire_tile(const SharedMemory &m, PipelineState<SCHED_STAGES> &pipe,
                                                     int rank, int group)
{
    mbarrier_wait(m.sched_full(pipe.stage), pipe.parity);
    Slice t = *m.slice(pipe.stage);
    t.row = slice_row(t, rank, group);
    mbarrier_arrive(m.sched_empty(pipe.stage));
    pipe.advance();
    return t;
}
// Producer: acquires the next tile once its inputs are ready.
static __device__ __forceinline__ Slice acquire_ready_tile(const SharedMemory &m,
                                                           PipelineState<SCHED_STAGES> &pipe)
{
    mbarrier_wait(m.input_ready(pipe.stage), pipe.parity);
    Slice t = *m.slice(pipe.stage);
    fence_proxy_async();
    mbarrier_arrive(m.sched_empty(pipe.stage));
    pipe.advance();
    return t;
}

// Scheduler thread of each CTA: finds the next tile and waits for its inputs while the producer still loads
// this tile's last operands and d. The next index is claimed when the last few stages of this tile are about
// to be loaded: early enough to be known in time, late enough that slow clusters claim fewer tiles.
static __device__ __forceinline__ void schedule_tiles(const SharedMemory &m, const Chain &c, int rank)
{
    PipelineState<SCHED_STAGES> in_flight, index_empty, sched_full;
    TileSearch found = {};
    PipelineState<1> prefetch_next;
    for (bool more = true; more; prefetch_next.advance()) {
        if (rank == 0)
            publish_index(m, in_flight, atomicAdd(c.tile_counter, 1));
        int index = acquire_index(m, index_empty), place = sched_full.stage;
        more = index < c.total;
        Slice t = {};
        if (more)
            t = find_tile(c, found, index);
        else
            t.task = -1;
        publish_tile(m, sched_full, t);
        if (more)
            wait_for_tasks(c, t);
        mbarrier_arrive(m.input_ready(place));
        if (more && rank == 0)
            mbarrier_wait(m.prefetch_next(), prefetch_next.parity);
    }
}

// ---- TMA producer -----------------------------------------------------------------------------------------

// What a CTA loads of a tile's operands at each k step: its rows of a, and its half of b's boxes for both
// CTAs. Computed once per tile, because a pipeline of four stages leaves little time between the release of
// a stage and its reuse.
struct Operands {
    const Task &w;
    int a_row[CONSUMERS]; // first row of this CTA's boxes of a, in elements; negative: not needed
    int b_at;             // the same for the first box of b
    int b_first, b_count;
    int matrix;
    uint32_t bytes; // that arrive at this CTA, from both CTAs
};
static __device__ __forceinline__ Operands operands_of(const Task &w, const Slice &t, int rank)
{
    int boxes = b_boxes(w, t), first = rank ? (boxes + 1) / 2 : 0;
    Operands o = {w, {}, (t.col + first) * BOX_SIDE, first, rank ? boxes - first : (boxes + 1) / 2, t.matrix};
    o.bytes = (uint32_t)(boxes * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) {
        int row = slice_row(t, rank, i);
        bool wanted = a_needed(w, t, row);
        o.a_row[i] = wanted ? row * BOX_SIDE : -1;
        o.bytes += wanted ? BOX_BYTES : 0;
    }
    return o;
}

// What a CTA loads at each k step of a tile. Loads that the compiler knows of are issued back to back; with a
// branch around each, every one waits until TMA has read the arguments of the one before, and the last is
// issued more than twice as late.
enum StageLoads {
    LOAD_RAW,    // raw sums
    LOAD_NEEDED, // any boxes of a and b
    LOAD_NARROW, // both of a, one of b: the second CTA of a narrow tile
    LOAD_WIDE    // both of a, two of b
};
static __device__ __forceinline__ StageLoads loads_of(const Operands &o)
{
    if (o.w.kind == TASK_AOL)
        return LOAD_RAW;
    if (o.b_count == 0 || o.a_row[0] < 0 || o.a_row[1] < 0)
        return LOAD_NEEDED;
    return o.b_count == 1 ? LOAD_NARROW : LOAD_WIDE;
}

// k step k to k + 63.
template <StageLoads LOADS>
static __device__ __forceinline__ void load_operands(const SharedMemory &m, const Operands &o, int stage,
                                                     int k)
{
    constexpr bool known = LOADS != LOAD_NEEDED;
    uint64_t *full = m.full(stage);
    uint8_t *b = m.b(stage) + o.b_first * BOX_BYTES;
    const uint16_t both = 3;
    bool along = o.w.kind == TASK_FULL;
    int x = along ? o.b_at : k, y = along ? k : o.b_at;
    mbarrier_arrive_expect_tx(full, o.bytes);
    if (known || o.b_count > 0)
        tma_load_multicast(b, &o.w.b, full, x, y, o.matrix, both);
    if (known ? LOADS == LOAD_WIDE : o.b_count > 1)
        tma_load_multicast(b + BOX_BYTES, &o.w.b, full, along ? x + BOX_SIDE : x, along ? y : y + BOX_SIDE,
                           o.matrix, both);
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++)
        if (known || o.a_row[i] >= 0)
            tma_load(m.a(stage) + i * BOX_BYTES, &o.w.a, full, k, o.a_row[i], o.matrix);
}

// Symmetric results need no d above the diagonal.
static __device__ __forceinline__ bool addend_needed(const Task &w, const Slice &t, int half, int rank, int i)
{
    int box = 2 * half + i % 2;
    return box < t.width && (!is_symmetric(w) || t.col + box <= slice_row(t, rank, i / 2));
}

// One half of d's part of the tile for this CTA's warpgroups: two boxes side by side for the first, then for
// the second. Without d the stage is only handed on.
static __device__ __forceinline__ void load_addend(const SharedMemory &m, const Task &w, const Slice &t,
                                                   int stage, int half, int rank)
{
    uint64_t *full = m.full(stage);
    int boxes = 0;
    for (int i = 0; w.has_d && i < 2 * CONSUMERS; i++)
        boxes += addend_needed(w, t, half, rank, i);
    if (boxes == 0) {
        mbarrier_arrive(full);
        return;
    }
    mbarrier_arrive_expect_tx(full, (uint32_t)(boxes * BOX_BYTES));
    for (int i = 0; i < 2 * CONSUMERS; i++)
        if (addend_needed(w, t, half, rank, i))
            tma_load(m.a(stage) + i * BOX_BYTES, &w.d, full, (t.col + 2 * half + i % 2) * BOX_SIDE,
                     slice_row(t, rank, i / 2) * BOX_SIDE, t.matrix);
}

// Raw sums of box `box` of both slices. Above the diagonal there are none.
static __device__ __forceinline__ void load_raw(const SharedMemory &m, const Task &w, const Slice &t,
                                                int stage, int box, int rank)
{
    uint64_t *full = m.full(stage);
    bool wanted[CONSUMERS];
    uint32_t bytes = 0;
    for (int i = 0; i < CONSUMERS; i++) {
        int row = slice_row(t, rank, i);
        wanted[i] = t.col + box <= row && row * BOX_SIDE < w.rows;
        bytes += wanted[i] ? RAW_BYTES : 0;
    }
    if (bytes == 0)
        mbarrier_arrive(full);
    else
        mbarrier_arrive_expect_tx(full, bytes);
    for (int i = 0; i < CONSUMERS; i++)
        if (wanted[i])
            bulk_load(m.a(stage) + i * RAW_BYTES,
                      raw_address(w, t.matrix, slice_row(t, rank, i), t.col + box), full, RAW_BYTES);
}

static __device__ __forceinline__ int epilogue_stages(const Task &w)
{
    return w.kind == TASK_RAW || w.kind == TASK_AOL ? 0 : 2;
}

// The stages of a tile: operands, or raw sums.
template <StageLoads LOADS>
static __device__ __forceinline__ void produce_stages(const SharedMemory &m, PipelineState<STAGES> &pipe,
                                                      const Operands &o, const Slice &t, int rank)
{
    int stages = stages_of(o.w), prefetch_at = rank == 0 ? max(0, stages - PREFETCH_STAGES) : -1;
#pragma unroll 1
    for (int i = 0; i < stages; i++, pipe.advance()) {
        if (i == prefetch_at)
            mbarrier_arrive(m.prefetch_next());
        mbarrier_wait(m.empty(pipe.stage), pipe.parity ^ 1);
        if (LOADS == LOAD_RAW)
            load_raw(m, o.w, t, pipe.stage, i, rank);
        else
            load_operands<LOADS>(m, o, pipe.stage, i * DEPTH);
    }
}

static __device__ __forceinline__ void produce_tile(const SharedMemory &m, const Chain &c,
                                                    PipelineState<STAGES> &pipe, const Slice &t, int rank)
{
    const Task &w = c.task[t.task];
    Operands o = operands_of(w, t, rank);
    StageLoads loads = loads_of(o);
    if (loads == LOAD_WIDE)
        produce_stages<LOAD_WIDE>(m, pipe, o, t, rank);
    else if (loads == LOAD_NARROW)
        produce_stages<LOAD_NARROW>(m, pipe, o, t, rank);
    else if (loads == LOAD_NEEDED)
        produce_stages<LOAD_NEEDED>(m, pipe, o, t, rank);
    else
        produce_stages<LOAD_RAW>(m, pipe, o, t, rank);
    for (int half = 0; half < epilogue_stages(w); half++, pipe.advance()) {
        mbarrier_wait(m.empty(pipe.stage), pipe.parity ^ 1);
        load_addend(m, w, t, pipe.stage, half, rank);
    }
}

// Called by one thread of each CTA.
static __device__ __forceinline__ void produce_tiles(const SharedMemory &m, const Chain &c, int rank)
{
    PipelineState<STAGES> pipe;
    PipelineState<SCHED_STAGES> sched_empty;
    for (Slice t; (t = acquire_ready_tile(m, sched_empty)).task >= 0;)
        produce_tile(m, c, pipe, t, rank);
}

#endif
