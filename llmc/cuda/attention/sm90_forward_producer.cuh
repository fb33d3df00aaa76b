// Attention forward on sm90 (sm90_forward.cu): work items, shared-memory layout, tile-scheduler warp, gate
// warps, producer warp.
#pragma once
#include "llmc/cuda/attention/gates.cuh"
#include "llmc/cuda/attention/sm90_attention.cuh"

namespace attention_queries
{

using attention_sm90::PANEL;
using attention_sm90::WIDTH;

enum {
    WARPGROUP = 128,
    WARPGROUP_QUERIES = 64,
    CONSUMERS = 3,
    KEYS = 64,
    STAGES = 4,
    GATE_WARPS = 2,
    QUERIES = CONSUMERS * WARPGROUP_QUERIES,
    THREADS = (CONSUMERS + 1) * WARPGROUP,
    QUERY_PANEL_BYTES = WARPGROUP_QUERIES * 128,
    QUERY_BYTES = 2 * QUERY_PANEL_BYTES, // of a warpgroup
    KEY_PANEL_BYTES = KEYS * 128,
    KEY_BYTES = 2 * KEY_PANEL_BYTES,
    STAGE_BYTES = 2 * KEY_BYTES,
    STEP_BYTES = 16 * 128, // 16 rows of a panel: one step along an operand stored along the columns
    CONSUMER_REGISTERS = 152,
    PRODUCER_REGISTERS = 56 // 384 * 152 + 128 * 56 = 512 * 128, which is what a block starts with
};

struct Arguments {
    const floatX *h, *gate_w; // NULL: no gate
    int gate_inputs;
    float *lse;
    attention_sm90::Progress *progress;
    const int32_t *cu, *order;      // starts of documents; tiles of queries in the order to take them
    float scale_log2;               // scores to powers of two
    int window, slots, N, H, items; // items: tiles of queries times heads
};

// A work item: QUERIES queries of one head. Key tile n ends n KEYS before the end of the query tile.
struct Item {
    int query0, head;
    int end; // behind the last tile of keys; 0: no more work
    // Per warpgroup: first and last key tile, inclusive, and the last one that needs no mask except for the
    // diagonal
    int first[CONSUMERS], last[CONSUMERS], whole[CONSUMERS];
    // Start of the first query's document, and of each query's document relative to the first query, or 0
    // for the first document
    int begin;
    uint8_t offset[QUERIES];
    float gate[QUERIES];
};

struct Shared {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *q(int slot, int group) const
    {
        return base + (slot * CONSUMERS + group) * QUERY_BYTES;
    }
    __device__ __forceinline__ uint8_t *k(int stage) const { return q(2, 0) + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *v(int stage) const { return k(stage) + KEY_BYTES; }
    __device__ __forceinline__ uint64_t *barrier(int i) const { return (uint64_t *)k(STAGES) + i; }
    __device__ __forceinline__ uint64_t *item_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ uint64_t *item_empty(int slot) const { return barrier(2 + slot); }
    __device__ __forceinline__ uint64_t *described(int slot) const { return barrier(4 + slot); }
    __device__ __forceinline__ uint64_t *gated(int slot) const { return barrier(6 + slot); }
    __device__ __forceinline__ uint64_t *k_full(int stage) const { return barrier(8 + stage); }
    __device__ __forceinline__ uint64_t *k_empty(int stage) const { return barrier(8 + STAGES + stage); }
    __device__ __forceinline__ uint64_t *v_full(int stage) const { return barrier(8 + 2 * STAGES + stage); }
    __device__ __forceinline__ uint64_t *v_empty(int stage) const { return barrier(8 + 3 * STAGES + stage); }
    __device__ __forceinline__ Item *item(int slot) const { return (Item *)barrier(8 + 4 * STAGES) + slot; }
};
enum {
    BARRIERS = 8 + 4 * STAGES,
    SHARED_BYTES = 2 * CONSUMERS * QUERY_BYTES + STAGES * STAGE_BYTES + BARRIERS * 8 + 2 * sizeof(Item)
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");
static_assert((int)QUERIES == (int)ATTENTION_QUERY_TILE, "the table sorts tiles of this size");

#if HOPPER

using attention_sm90::head_at;
using attention_sm90::load_panel;

// ---- tile-scheduler warp ----------------------------------------------------------------------------------

// Document starts of the tile's queries, every 32nd query per lane. Rows from N on belong to the last
// document.
static __device__ __forceinline__ void find_documents(Item *item, int query0, const Arguments &a)
{
    const int each = QUERIES / WARP;
    int lane = threadIdx.x % WARP, last = min(query0 + QUERIES, a.N) - 1,
        document = attention_sm90::document_of(query0, a), offset[each] = {};
    if (lane == 0)
        item->begin = a.cu[document];
    for (bool more = true; more; document += WARP) {
        int start = document + 1 + lane <= a.slots ? a.cu[document + 1 + lane] : INT_MAX;
        for (int i = 0; i < WARP && more; i++) {
            int at = __shfl_sync(0xffffffffu, start, i);
            more = at <= last;
#pragma unroll
            for (int k = 0; k < each; k++)
                if (more && query0 + lane + WARP * k >= at)
                    offset[k] = at - query0;
        }
    }
#pragma unroll
    for (int k = 0; k < each; k++)
        item->offset[lane + WARP * k] = (uint8_t)offset[k];
}

static __device__ __forceinline__ int first_key(const Item *item, int query0, int row, int window)
{
    int offset = item->offset[row];
    return max(offset ? query0 + offset : item->begin, query0 + row - window);
}

// Fills in the item except for the gates. Called by all lanes.
static __device__ __forceinline__ void describe_item(Item *item, int index, const Arguments &a)
{
    int lane = threadIdx.x % WARP, query0 = a.order[index / a.H] * QUERIES, end = query0 + QUERIES;
    find_documents(item, query0, a);
    __syncwarp();
    if (lane < CONSUMERS) {
        int row0 = lane * WARPGROUP_QUERIES, row1 = row0 + WARPGROUP_QUERIES - 1;
        item->first[lane] = (QUERIES - 1 - row1) / KEYS;
        item->last[lane] = (end - 1 - first_key(item, query0, row0, a.window)) / KEYS;
        item->whole[lane] = (end - first_key(item, query0, row1, a.window)) / KEYS - 1;
    }
    __syncwarp();
    if (lane)
        return;
    item->query0 = query0;
    item->head = index % a.H;
    item->end = item->last[0] + 1;
}

// The first item of a CTA is its blockIdx, then the atomic counter; a.items or more: no work left.
static __device__ __forceinline__ int next_item(const Arguments &a)
{
    int index = 0;
    if (threadIdx.x % WARP == 0)
        index = (int)(gridDim.x + atomicAdd(&a.progress->next, 1));
    return __shfl_sync(0xffffffffu, index, 0);
}

// Describes items in their slots and loads their q. An item is claimed only when a slot is free: items
// claimed early delay the last wave.
template <int QK>
static __device__ __forceinline__ void schedule_items(const Shared &m, const Arguments &a,
                                                      const CUtensorMap *q)
{
    int lane = threadIdx.x % WARP, index = (int)blockIdx.x;
    PipelineState<2> slots;
    for (; index < a.items; index = next_item(a)) {
        Item *item = m.item(slots.stage);
        uint64_t *full = m.item_full(slots.stage);
        describe_item(item, index, a);
        __syncwarp();
        mbarrier_arrive(m.described(slots.stage));
        if (lane) {
            mbarrier_arrive(full);
        } else {
            mbarrier_arrive_expect_tx(full, CONSUMERS * QUERY_BYTES);
            for (int g = 0; g < CONSUMERS; g++)
                for (int p = 0; p < 2; p++)
                    load_panel<QK>(m.q(slots.stage, g) + p * QUERY_PANEL_BYTES, q, full,
                                   head_at<QK>(item->head), p, item->query0 + g * WARPGROUP_QUERIES);
        }
        slots.advance();
        mbarrier_wait(m.item_empty(slots.stage), slots.parity ^ 1);
    }
    if (lane == 0)
        m.item(slots.stage)->end = 0;
    mbarrier_arrive(m.described(slots.stage));
    mbarrier_arrive(m.item_full(slots.stage));
    if (lane)
        return;
    if (atomicInc(&a.progress->finished, gridDim.x - 1) == gridDim.x - 1)
        a.progress->next = 0; // the last CTA resets the counter
}

// ---- gate warps -------------------------------------------------------------------------------------------

static __device__ __forceinline__ void compute_gates(const Shared &m, const Arguments &a, int warp)
{
    for (PipelineState<2> slots;; slots.advance()) {
        Item *item = m.item(slots.stage);
        mbarrier_wait(m.described(slots.stage), slots.parity);
        if (item->end == 0)
            break;
        const floatX *w = a.gate_w + item->head * a.gate_inputs;
        float x[QUERIES / WARP / GATE_WARPS];
#pragma unroll
        for (int i = 0; i < QUERIES / WARP / GATE_WARPS; i++) {
            int64_t query =
                min(item->query0 + (int)threadIdx.x % WARP + WARP * (GATE_WARPS * i + warp), a.N - 1);
            x[i] = a.h ? sigmoid(gate_input(a.h + query * (a.H * WIDTH), w, a.gate_inputs)) : 1;
        }
#pragma unroll
        for (int i = 0; i < QUERIES / WARP / GATE_WARPS; i++)
            item->gate[threadIdx.x % WARP + WARP * (GATE_WARPS * i + warp)] = x[i];
        mbarrier_arrive(m.gated(slots.stage));
    }
}

// ---- producer warp ----------------------------------------------------------------------------------------

// QK: width of the heads of `map`.
template <int QK>
static __device__ __forceinline__ void load_kv_tile(uint8_t *to, const CUtensorMap *map, uint64_t *full,
                                                    uint64_t *empty, uint32_t parity, int at, int key0)
{
    mbarrier_wait(empty, parity ^ 1);
    if (threadIdx.x % WARP)
        return;
    mbarrier_arrive_expect_tx(full, KEY_BYTES);
    for (int p = 0; p < 2; p++)
        load_panel<QK>(to + p * KEY_PANEL_BYTES, map, full, at, p, key0);
}

template <int QK>
static __device__ __forceinline__ void produce(const Shared &m, const CUtensorMap *k, const CUtensorMap *v)
{
    PipelineState<STAGES> ring;
    for (PipelineState<2> slots;; slots.advance()) {
        const Item *item = m.item(slots.stage);
        mbarrier_wait(m.described(slots.stage), slots.parity);
        int end = item->end, head = item->head, k_at = head_at<QK>(head), v_at = head_at<WIDTH>(head),
            key0 = item->query0 + QUERIES - KEYS;
        __syncwarp(); // all lanes have read the slot before lane 0 starts loads that end in its reuse
        if (end == 0)
            break;
        for (int n = 0; n < end; n++, key0 -= KEYS, ring.advance()) {
            int stage = ring.stage;
            load_kv_tile<QK>(m.k(stage), k, m.k_full(stage), m.k_empty(stage), ring.parity, k_at, key0);
            load_kv_tile<WIDTH>(m.v(stage), v, m.v_full(stage), m.v_empty(stage), ring.parity, v_at, key0);
        }
    }
}

#endif

} // namespace attention_queries
