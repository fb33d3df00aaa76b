// Newton-Schulz of small matrices on sm90 (sm90_ns_small.cu): state of a warpgroup, producer thread, relay
// warp.
#pragma once
#include "llmc/cuda/muon/sm90_ns_small.cuh"

enum { GROUP_WARPS = WARPGROUP / WARP };

#if HOPPER

template <int CLUSTER> struct SmallConsumer {
    SmallMemory<CLUSTER> m;
    const Small &c;
    int rank, group, stage;
    uint32_t parities;                          // bit i: of stage i's next phase
    uint32_t operand_empty, sent, read, scaled; // parities of the next phases
    uint32_t written;                           // publications of X's columns by each warpgroup
    bool leader;                                // the thread that issues TMA stores
    bool pending;                               // it has stores that are not published
    __device__ __forceinline__ uint32_t parity() const { return parities >> stage & 1; }
    __device__ __forceinline__ void advance()
    {
        parities ^= 1u << stage;
        if (++stage == SMALL_STAGES)
            stage = 0;
    }
    // Arrives at an mbarrier in all CTAs of the cluster, one lane per CTA.
    __device__ __forceinline__ void arrive_all(uint64_t *barrier) const
    {
        int lane = threadIdx.x % WARP;
        if (lane < CLUSTER)
            mbarrier_arrive_remote(barrier, lane);
    }
};

// ---- producer ---------------------------------------------------------------------------------------------

// Loads this CTA's share of a stage and multicasts it. Boxes follow each other along the rows from (x, y)
// on, `across` of them side by side.
template <int CLUSTER>
static __device__ __forceinline__ void produce_stage(SmallConsumer<CLUSTER> &p, const CUtensorMap *map, int x,
                                                     int y, int across, int matrix)
{
    uint64_t *full = p.m.full(p.stage);
    const uint16_t all = (1 << CLUSTER) - 1;
    if (CLUSTER > 1)
        mbarrier_wait_cluster(p.m.empty(p.stage), p.parity() ^ 1);
    else
        mbarrier_wait(p.m.empty(p.stage), p.parity() ^ 1);
    mbarrier_arrive_expect_tx(full, p.m.STRIP); // includes the other CTA's multicast
    for (int i = 2 * p.rank; i < 2 * p.rank + 2; i++)
        tma_load_multicast(p.m.stage(p.stage) + i * BOX_BYTES, map, full, x + i % across * BOX_SIDE,
                           y + i / across * BOX_SIDE, matrix, all);
    p.advance();
}

// Stage of k step k of a Gram matrix with `stages` steps. The last steps use stages that overlap with
// nothing; earlier ones use the others; the first ones those that the previous product releases first. A
// stage is not needed again for two steps: it is released one step later.
static __device__ __forceinline__ int gram_stage(int k, int stages)
{
    static_assert(SMALL_STAGES == 2 * FREE_STAGES, "two halves");
    int left = stages - k, from = (FREE_STAGES - stages % FREE_STAGES) % FREE_STAGES;
    return (left > SMALL_STAGES ? from + k : SMALL_STAGES + FREE_STAGES - left) % SMALL_STAGES;
}

// Waits until all warpgroups of the cluster have stored the next columns of X.
template <int CLUSTER> static __device__ __forceinline__ void wait_columns(SmallConsumer<CLUSTER> &p)
{
    p.written++;
    for (int i = 0; i < CLUSTER * CONSUMERS; i++)
        remote_counter_wait(p.m.written(i), p.written);
    fence_proxy_async();
}

template <int CLUSTER>
static __device__ __forceinline__ void produce_step(SmallConsumer<CLUSTER> &p, int matrix, int step)
{
    const CUtensorMap *x = &p.c.x[step % 2];
    int stages = boxes_along(p.c.m);
    for (int k = 0; k < stages; k++) {
        if (step && k % (ANNOUNCE_COLS / BOX_SIDE) == 0)
            wait_columns(p);
        p.stage = gram_stage(k, stages);
        produce_stage(p, x, k * BOX_SIDE, 0, 1, matrix);
    }
    p.stage = 0;
    bool waited = false;
    for (int col = 0; col < p.c.m; col += UNIT_COLS)
        for (int half = 0; half < 2; half++) {
            if (p.stage == FREE_STAGES && !waited) {
                mbarrier_wait(p.m.read(), p.read);
                waited = true;
            }
            produce_stage(p, x, col, half * CLUSTER * BOX_SIDE, 2, matrix);
        }
    if (!waited)
        mbarrier_wait(p.m.read(), p.read);
    p.read ^= 1;
}

// Producer tail: waits for all releases of stages and all remote counters that still arrive at this CTA.
template <int CLUSTER> static __device__ __forceinline__ void producer_tail(SmallConsumer<CLUSTER> &p)
{
    for (p.stage = 0; p.stage < SMALL_STAGES; p.stage++)
        mbarrier_wait(p.m.empty(p.stage), p.parity() ^ 1);
    for (int i = 0; i < CLUSTER * CONSUMERS; i++)
        remote_counter_wait(p.m.written(i), p.written);
}

template <int CLUSTER>
static __device__ __forceinline__ void produce_small(SmallConsumer<CLUSTER> &p, int first, int clusters)
{
    for (int matrix = first; matrix < p.c.batch; matrix += clusters) {
        for (int step = 0; step < p.c.it.steps; step++)
            produce_step(p, matrix, step);
        p.written += (p.c.m + ANNOUNCE_COLS - 1) / ANNOUNCE_COLS; // in the last step
    }
    producer_tail(p);
}

// ---- relay ------------------------------------------------------------------------------------------------

// Releases the stages of Z X in both CTAs for all consumer warps of this one; one lane per stage and CTA. It
// needs no wait at its end: both CTAs' producers wait for these arrivals before they exit (producer_tail).
template <int CLUSTER>
static __device__ __forceinline__ void relay_releases(const SmallConsumer<CLUSTER> &p, int first,
                                                      int clusters)
{
    int lane = threadIdx.x % WARP, units = (p.c.m + UNIT_COLS - 1) / UNIT_COLS;
    uint32_t unit_parities = 0;
    for (int matrix = first; matrix < p.c.batch; matrix += clusters)
        for (int i = 0; i < p.c.it.steps * units; i++) {
            int unit = i % units % SMALL_UNITS;
            mbarrier_wait(p.m.unit_read(unit), unit_parities >> unit & 1);
            unit_parities ^= 1u << unit;
            __syncwarp();
            if (lane < 2 * CLUSTER)
                mbarrier_arrive_remote_release(p.m.empty(2 * unit + lane / CLUSTER), lane % CLUSTER,
                                               CONSUMERS * GROUP_WARPS);
        }
}

#endif
