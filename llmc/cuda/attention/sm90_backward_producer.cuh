// Attention backward on sm90 (sm90_backward.cu): work items, shared-memory layout, producer and
// tile-scheduler warp, dq reduction warps.
#pragma once
#include "llmc/cuda/attention/sm90_attention.cuh"

namespace attention_sm90
{

using namespace dq_accumulator;

constexpr float LOG2E = 1.4426950408889634f;
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000; // L2 policy: the value of CUTLASS's CacheHintSm90

enum {
    KEYS = 128,
    WARPGROUP = 128,
    WARPGROUP_KEYS = 64,
    BLOCK_THREADS = 3 * WARPGROUP,
    CONSUMER_WARPS = 2 * WARPGROUP / WARP,
    KEY_PANEL_BYTES = KEYS * 128,
    QUERY_PANEL_BYTES = QUERIES * 128,
    KEY_BYTES = 2 * KEY_PANEL_BYTES,
    QUERY_BYTES = 2 * QUERY_PANEL_BYTES,
    STAGE_BYTES = 2 * QUERY_BYTES,
    DS_BYTES = KEYS * 128,
    DQ_STAGE_BYTES = QUERIES * PANEL * 4,
    STEP_BYTES = 16 * 128, // 16 rows of a panel: one step along an operand stored along the columns
    CONSUMER_REGISTERS = 224,
    PRODUCER_REGISTERS = 56,      // 256 * 224 + 128 * 56 = 384 * 168, which is what a block starts with
    QKV_CONSUMER_REGISTERS = 232, // of backward_qkv_kernel, whose epilogue has more values
    QKV_PRODUCER_REGISTERS = 40
};
// Columns of dq that a warpgroup computes: a panel, of which the second may be narrower.
template <int QK> static __host__ __device__ constexpr int dq_columns(int group)
{
    return group == 0 ? PANEL : QK - PANEL;
}

struct Arguments {
    const float *lse, *row_sums;
    floatX *dq;              // (N, H QK); NULL: q, k, v's backward reads dq_sum
    floatX *dqkv, *dv;       // backward_qkv_kernel's: (N, 3 d), and dv (N, d) or NULL
    const floatX *cos, *sin; // (N, WIDTH / 4); backward_heads_kernel's: (N, QK / 4)
    const float *rstd_k, *lambda;
    int pairs; // backward_heads_kernel's: rows of a token, 2 where its heads are paired
    const floatX *v_raw, *value_embed;
    const int32_t *tokens;
    float *value_sums; // (items, CONSUMER_WARPS, 2)
    float *dq_sum;     // see dq_accumulator
    unsigned *state;   // (tiles, H, 2), zeros. The first of two: partial sums that a tile of dq_sum holds, or
                       // in no fixed order 1 after the first. The second is not used.
    Progress *progress;
    const int32_t *cu;              // starts of documents
    const int32_t *order, *late;    // of tiles of keys: see attention.c's table
    bool fixed_order;               // of dq's sums
    float scale, scale_log2;        // scale_log2: scores to powers of two
    int window, slots, N, H, items; // items: tiles of keys times heads
};

// Named barriers of the consumer warpgroups: of both; of one, by its number; of ds, by buffer and number.
enum { BARRIER_CONSUMERS = 1, BARRIER_WARPGROUP = 2, BARRIER_DS = 4 };

// A work item: 128 keys of one head. Query tiles have 64 queries, key tiles 128 keys.
struct alignas(8) Item {
    int key0, head;
    int first, last; // tiles of queries, last exclusive; empty: no more work
    int end[2];      // of the tiles that see keys of the warpgroup; they begin at first + group. Without
                     // keys: 0
    int full_end[2]; // tiles from the warpgroup's second to here, exclusive, are seen whole by all its keys
    int before[2];   // partial sums of the first two tiles of dq that are added before the item's
    int late;        // of the i-th tile, i > 1, it is i / 2, or one less from tile number `late` on
    int count[KEYS]; // queries that see the key: itself and those behind it
};

struct Stage {                            // of a tile's queries
    float lse[QUERIES], row_sum[QUERIES]; // lse in powers of two
};

struct Shared {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *k(int slot) const { return base + slot * KEY_BYTES; }
    __device__ __forceinline__ uint8_t *v(void) const { return base + 2 * KEY_BYTES; }
    __device__ __forceinline__ uint8_t *q(int stage) const
    {
        return base + 3 * KEY_BYTES + stage * STAGE_BYTES;
    }
    __device__ __forceinline__ uint8_t *dy(int stage) const { return q(stage) + QUERY_BYTES; }
    __device__ __forceinline__ uint8_t *ds(int buffer) const { return q(2) + buffer * DS_BYTES; }
    __device__ __forceinline__ uint8_t *dq(int group) const { return ds(2) + group * DQ_STAGE_BYTES; }
    __device__ __forceinline__ Stage *stage(int i) const { return (Stage *)dq(2) + i; }
    __device__ __forceinline__ Item *item(int slot) const { return (Item *)stage(2) + slot; }
    __device__ __forceinline__ uint64_t *barrier(int i) const { return (uint64_t *)item(2) + i; }
    __device__ __forceinline__ uint64_t *keys_full(int slot) const { return barrier(slot); }
    __device__ __forceinline__ uint64_t *keys_empty(int slot) const { return barrier(2 + slot); }
    __device__ __forceinline__ uint64_t *queries_full(int stage) const { return barrier(4 + stage); }
    __device__ __forceinline__ uint64_t *queries_empty(int stage) const { return barrier(6 + stage); }
    __device__ __forceinline__ uint64_t *values_full(void) const { return barrier(8); }
    __device__ __forceinline__ uint64_t *values_empty(void) const { return barrier(9); }
    __device__ __forceinline__ uint64_t *dq_full(int turn) const { return barrier(10 + turn); }
    __device__ __forceinline__ uint64_t *dq_empty(void) const { return barrier(12); }
};
enum {
    BARRIERS = 13,
    TILES_BYTES = 3 * KEY_BYTES + 2 * STAGE_BYTES + 2 * DS_BYTES + 2 * DQ_STAGE_BYTES,
    SHARED_BYTES = TILES_BYTES + 2 * sizeof(Stage) + 2 * sizeof(Item) + BARRIERS * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");
static_assert(sizeof(Item) % 8 == 0, "barriers are aligned");
static_assert((int)KEYS == (int)ATTENTION_KEY_TILE, "the table sorts tiles of this size");

#if HOPPER

using Pipeline = PipelineState<2>;

// ---- producer and tile-scheduler warp ---------------------------------------------------------------------

// Fills in how many partial sums of dq precede the item's. All tiles of keys that add to a tile of queries,
// but for the one on the diagonal, end in the document of its first query and are taken from the last to the
// first. So before the item come those that lie between it and its i-th tile of queries, i / 2 with the one
// on the diagonal. That one is taken first, or last where another document ends it that is taken later.
//   begin, end: of the document of the item's first key
static __device__ __forceinline__ void describe_order(Item *item, int begin, int end, const Arguments &a)
{
    int tile = item->key0 / KEYS, last_tile = (item->last - 1) / (KEYS / QUERIES);
    for (int i = 0; i < KEYS / QUERIES; i++) {
        int query = item->key0 + i * QUERIES;
        item->before[i] = a.late[tile] && query < end ? tile - max(begin, query - a.window) / KEYS : 0;
    }
    item->late = last_tile > tile && a.late[last_tile] ? last_tile * (KEYS / QUERIES) : item->last;
}

// Fills in the item. Called by all lanes, four keys each.
static __device__ __forceinline__ void describe_item(Item *item, int index, int key0, const Arguments &a)
{
    int lane = threadIdx.x % WARP, first_key = key0 + 4 * lane;
    int document = document_of(key0, a), begin = a.cu[document], first_end = 0, last_seen = 0,
        last_key = min(key0 + KEYS, a.N) - 1, end[4], count[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        end[i] = INT_MAX;
    for (bool more = true; more; document += WARP) { // the first end behind each key
        int start = document + 1 + lane <= a.slots ? a.cu[document + 1 + lane] : INT_MAX;
        for (int k = 0; k < WARP && more; k++) {
            int at = __shfl_sync(0xffffffffu, start, k);
            more = at <= last_key;
            if (first_end == 0)
                first_end = at;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (at > first_key + i)
                    end[i] = min(end[i], at);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int key = first_key + i;
        count[i] = key < a.N ? min(end[i] - key, a.window + 1) : 0;
        if (key < a.N)
            last_seen = key + count[i];
        item->count[4 * lane + i] = count[i];
    }
    int seen[2];
    for (int g = 0; g < 2; g++)
        seen[g] = __reduce_max_sync(0xffffffffu, lane / 16 == g ? last_seen : 0);
    int whole[2] = {__shfl_sync(0xffffffffu, first_key + count[0], 0),
                    __shfl_sync(0xffffffffu, first_key + count[0], 16)};
    if (lane)
        return;
    item->key0 = key0;
    item->head = index % a.H;
    item->first = key0 / QUERIES;
    item->last = (max(seen[0], seen[1]) + QUERIES - 1) / QUERIES;
    for (int g = 0; g < 2; g++) {
        item->end[g] = (seen[g] + QUERIES - 1) / QUERIES;
        item->full_end[g] = whole[g] / QUERIES;
    }
    describe_order(item, begin, first_end, a);
}

// lse and row sum of the lane's two queries of a tile.
struct Scalars {
    float lse[2], row_sum[2];
};
static __device__ __forceinline__ Scalars load_scalars(int tile, int head, const Arguments &a)
{
    Scalars x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int t = tile * QUERIES + (int)threadIdx.x % WARP + WARP * i;
        x.lse[i] = t < a.N ? a.lse[(int64_t)t * a.H + head] : 0;
        x.row_sum[i] = t < a.N ? a.row_sums[(int64_t)t * a.H + head] : 0;
    }
    return x;
}

// load_panel of what is read once. Heads of 96 columns are loaded without the policy, which was not tried.
template <int QK>
static __device__ __forceinline__ void load_once(void *to, const CUtensorMap *map, uint64_t *full, int at,
                                                 int panel, int row)
{
    if constexpr (QK == WIDTH)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                     "l"((uint64_t)map), "r"(shared_address(full)), "r"(at + panel * PANEL), "r"(row),
                     "l"(EVICT_FIRST)
                     : "memory");
    else
        load_panel<QK>(to, map, full, at, panel, row);
}

struct Producer {
    const CUtensorMap *q, *k, *v, *dy;
    Pipeline ring, slots;
    unsigned next; // lane 0: the next item
};

static __device__ __forceinline__ void claim_item(Producer &f, const Arguments &a)
{
    if (threadIdx.x % WARP == 0)
        f.next = atomicAdd(&a.progress->next, 1);
}

// Describes the claimed item in its slot and loads its k. False after the last item.
template <int QK>
static __device__ __forceinline__ bool schedule_item(Producer &f, const Shared &m, const Arguments &a)
{
    int lane = threadIdx.x % WARP, slot = f.slots.stage;
    unsigned index = __shfl_sync(0xffffffffu, f.next, 0);
    Item *item = m.item(slot);
    uint64_t *full = m.keys_full(slot);
    mbarrier_wait(m.keys_empty(slot), f.slots.parity ^ 1);
    f.slots.advance();
    if (index >= (unsigned)a.items) {
        if (lane == 0)
            item->first = item->last = 0;
        mbarrier_arrive(full);
        if (lane)
            return false;
        if (atomicInc(&a.progress->finished, gridDim.x - 1) == gridDim.x - 1)
            a.progress->next = 0; // the last CTA resets the counter
        return false;
    }
    int key0 = a.order[index / a.H] * KEYS, at = head_at<QK>((int)index % a.H);
    if (lane == 0) {
        mbarrier_expect_tx(full, KEY_BYTES);
        for (int p = 0; p < 2; p++)
            load_once<QK>(m.k(slot) + p * KEY_PANEL_BYTES, f.k, full, at, p, key0);
    }
    describe_item(item, (int)index, key0, a);
    __syncwarp();          // this warp reads the item, too
    mbarrier_arrive(full); // each lane for what it wrote: racecheck does not follow __syncwarp
    return true;
}

// Of the item in `slot`. Items alternate between two slots, and so does the parity of their values' barriers.
static __device__ __forceinline__ void load_values(const Producer &f, const Shared &m, int slot)
{
    mbarrier_wait(m.values_empty(), (uint32_t)slot ^ 1);
    if (threadIdx.x % WARP)
        return;
    const Item *item = m.item(slot);
    mbarrier_arrive_expect_tx(m.values_full(), KEY_BYTES);
    for (int p = 0; p < 2; p++)
        load_once<WIDTH>(m.v() + p * KEY_PANEL_BYTES, f.v, m.values_full(), item->head * WIDTH, p,
                         item->key0);
}

template <int QK>
static __device__ __forceinline__ void load_queries(Producer &f, const Shared &m, const Arguments &a,
                                                    int tile, int head)
{
    int lane = threadIdx.x % WARP;
    Scalars x = load_scalars(tile, head, a);
    uint64_t *full = m.queries_full(f.ring.stage);
    uint8_t *q = m.q(f.ring.stage), *dy = m.dy(f.ring.stage);
    Stage *stage = m.stage(f.ring.stage);
    mbarrier_wait(m.queries_empty(f.ring.stage), f.ring.parity ^ 1);
    if (lane == 0) {
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        for (int p = 0; p < 2; p++) {
            load_panel<QK>(q + p * QUERY_PANEL_BYTES, f.q, full, head_at<QK>(head), p, tile * QUERIES);
            tma_load_2d(dy + p * QUERY_PANEL_BYTES, f.dy, full, head * WIDTH + p * PANEL, tile * QUERIES);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        stage->lse[lane + WARP * i] = x.lse[i] * LOG2E;
        stage->row_sum[lane + WARP * i] = x.row_sum[i];
    }
    mbarrier_arrive(full);
    f.ring.advance();
}

template <int QK>
static __device__ __forceinline__ void produce(const Shared &m, const Arguments &a, const CUtensorMap *q,
                                               const CUtensorMap *k, const CUtensorMap *v,
                                               const CUtensorMap *dy)
{
    Producer f = {q, k, v, dy, Pipeline(), Pipeline(), 0};
    claim_item(f, a);
    for (bool more = schedule_item<QK>(f, m, a); more;) {
        const Item *item = m.item(f.slots.stage ^ 1);
        int tile = item->first, last = item->last, head = item->head;
        for (; tile < last; tile++) {
            bool ends = tile + 1 == last;
            if (ends)
                claim_item(f, a); // here: its latency is that of the loads
            load_queries<QK>(f, m, a, tile, head);
            if (tile == item->first)
                load_values(f, m, f.slots.stage ^ 1);
            if (ends)
                more = schedule_item<QK>(f, m, a);
        }
    }
}

// ---- dq reduction warps -----------------------------------------------------------------------------------

// Of the tile: how many partial sums precede the item's; without a fixed order 1 when there are any.
static __device__ __forceinline__ unsigned sums_before(const Item *item, int tile, const Arguments &a)
{
    int i = tile - item->first;
    unsigned before = i < KEYS / QUERIES ? item->before[i] : i / (KEYS / QUERIES) - (tile >= item->late);
    return a.fixed_order ? before : min(before, 1u);
}

// One thread of each of two warps, which take tiles by turns: the fences and waits of one tile pass during
// the next. The first partial sum of a tile is stored, so that the accumulator need not be zeroed; without a
// fixed order the others wait for that one alone. The state of the thread's next tile is read one of its
// tiles ahead, because the load takes as long as a reduction.
template <int QK>
static __device__ __forceinline__ void reduce_dq(const Shared &m, const Arguments &a, int number)
{
    int turn = number; // 0: the item's first tile is the thread's
    const uint32_t bytes = QUERIES * QK * 4;
    uint32_t parity = 0;
    for (Pipeline slots;; slots.advance()) {
        mbarrier_wait(m.keys_full(slots.stage), slots.parity);
        const Item *item = m.item(slots.stage);
        int first = item->first, last = item->last, tile = first + turn;
        if (first == last)
            break;
        turn ^= (last - first) & 1;
        unsigned *state = a.state + 2 * ((int64_t)tile * a.H + item->head), seen = 0, next = 0;
        float *sums = a.dq_sum + ((int64_t)tile * a.H + item->head) * (QUERIES * QK);
        if (tile < last)
            seen = *(volatile unsigned *)state;
        for (; tile < last;
             tile += 2, parity ^= 1, state += 4 * a.H, sums += 2 * a.H * (QUERIES * QK), seen = next) {
            unsigned before = sums_before(item, tile, a);
            bool ready = seen == before;
            if (ready) {
                asm volatile("fence.acq_rel.gpu;" ::: "memory"); // makes the volatile load an acquire
                fence_proxy_async(); // orders other CTAs' stores before the reduction
            }
            if (tile + 2 < last)
                next = *(volatile unsigned *)(state + 4 * a.H);
            mbarrier_wait(m.dq_full(number), parity);
            if (!ready) {
                while (seen != before)
                    seen = load_acquire(state);
                fence_proxy_async();
            }
            if (before)
                bulk_reduce_add(sums, m.dq(0), bytes);
            else
                bulk_store(sums, m.dq(0), bytes);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(m.dq_empty());
            if (before && !a.fixed_order)
                continue; // nobody waits for it
            tma_store_wait();
            fence_proxy_async();
            store_release(state, before + 1);
        }
        mbarrier_arrive(m.keys_empty(slots.stage));
    }
    tma_store_wait();
}

#endif

} // namespace attention_sm90
