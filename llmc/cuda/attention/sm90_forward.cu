// Attention forward on Hopper's warpgroup products, for heads of width 128: packed documents, causal, sliding window, gate.
//
// A block takes 192 queries of one head (an item), 64 for each of three warpgroups, and walks over tiles of 64 keys, from the last
// queries' own backwards. Each warpgroup passes by the tiles that none of its queries sees. It asks for the next tile's scores
// before it multiplies the weights of this one with the values, so that exponentials are computed beside products. The fourth
// warpgroup prepares: one warp fetches keys and values through a ring of stages that runs on from item to item, one describes the
// next item and fetches its queries, two compute gates.
//
//   arithmetic   2 products of 64 x 64 x 128 a warpgroup and tile: 512 cycles of the tensor cores
//   exponentials 4096: 256 cycles; with all else some 200 instructions of a warp on each scheduler
//   shared mem.  32 KB for scores (queries are read anew each time), 16 for values, 11 arriving: 470 cycles at 128 bytes
//   bytes        out of L2 at window 384 / 896 / 1408: 40 / 33 / 32 a cycle and multiprocessor at the tensor cores' full rate,
//                with 128 queries instead of 192 49 / 43 / 41; at window 384 the profiler saw L2 at 79% (2026-11-22, H200)
//   space        q of this and the next item 96 KB (the result leaves through its place), k and v in four stages 128: 224 KB
//   registers    results 64, scores 32, weights 16: 141 of 152
//
// Gates computed by the warpgroups when their rows leave cost 9 us of 85 at window 384 (2026-11-22, H200). Slower, too, were:
// turns among warpgroups in issuing products, the next item's first scores issued before the rows leave, tiles in the order of
// their span in place of whole documents, taking the next item when the keys of this one are on their way.
// A maximum for every tile took as long as the exponentials. The first tile gives a base 2^8 above its weights instead, and the
// signs of all powers together say, in half an instruction each, that no score has passed it; a warp with one that has raises it.
// Weights of 2^-8 and less are as exact as those up to 1 in bf16 and fp32.
// Tiles lie on multiples of 192 and 64 tokens wherever documents begin and end: the keys that a query sees are one interval.
// Items are handed out as blocks become free, in the table's order. The same bits in every run: no result depends on another's.
#include "llmc/cuda/attention/sm90_attention.cuh"
#include "llmc/cuda/attention/gates.cuh"

namespace attention_queries {

constexpr float LOG2E = 1.4426950408889634f;

enum {
    WIDTH = 128, GROUP = 128, GROUP_QUERIES = 64,
    GROUPS = 3, KEYS = 64, STAGES = 4, GATE_WARPS = 2,
    QUERIES = GROUPS * GROUP_QUERIES,
    THREADS = (GROUPS + 1) * GROUP,
    PANEL = 64, // columns of 128 bytes, the width of the swizzle
    QUERY_PANEL_BYTES = GROUP_QUERIES * 128, QUERY_BYTES = 2 * QUERY_PANEL_BYTES, // of a warpgroup
    KEY_PANEL_BYTES = KEYS * 128, KEY_BYTES = 2 * KEY_PANEL_BYTES, STAGE_BYTES = 2 * KEY_BYTES,
    STEP_BYTES = 16 * 128, // 16 rows of a panel: one step along an operand stored along the columns
    CONSUMER_REGISTERS = 152, PRODUCER_REGISTERS = 56 // 384 * 152 + 128 * 56 = 512 * 128, which is what a block starts with
};

struct Arguments {
    const floatX *h, *gate_w; // NULL: no gate
    float *lse;
    attention_tensor::Progress *progress;
    const int32_t *cu, *order; // starts of documents; tiles of queries in the order to take them
    float scale_log2;          // scores to powers of two
    int window, slots, N, H, items; // items: tiles of queries times heads
};

// QUERIES queries of one head. Its tiles of keys are numbered from the last query backwards: tile n ends n KEYS before the end.
struct Item {
    int query0, head;
    int end; // behind the last tile of keys; 0: no more work
    // Of each warpgroup: its tiles, both inclusive, and the last that all its queries see whole but for the first
    int first[GROUPS], last[GROUPS], whole[GROUPS];
    // Documents: where that of the first query begins, and of each query its own's begin behind the first query, or 0 for that
    int begin;
    uint8_t offset[QUERIES];
    float gate[QUERIES];
};

struct Shared {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *q(int slot, int group) const { return base + (slot * GROUPS + group) * QUERY_BYTES; }
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
    SHARED_BYTES = 2 * GROUPS * QUERY_BYTES + STAGES * STAGE_BYTES + BARRIERS * 8 + 2 * sizeof(Item)
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");
static_assert((int)QUERIES == (int)ATTENTION_QUERY_TILE, "the table sorts tiles of this size");

#if HOPPER

constexpr float LN2 = 0.6931471805599453f;
constexpr float SLACK = 8; // powers of two by which weights are smaller than they might be, so that scores may grow

template <int COUNT> struct Ring { // a position
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// ---- the warp that prepares items ----------------------------------------------------------------------------------------

// The last d with cu[d] <= t, by all lanes together.
static __device__ __forceinline__ int document_of(int t, const Arguments &a)
{
    int low = 0, count = a.slots;
    while (count > 1) {
        int step = (count + WARP - 1) / WARP, at = (int)(threadIdx.x % WARP) * step;
        unsigned before = __ballot_sync(0xffffffffu, at < count && a.cu[low + min(at, count - 1)] <= t);
        int passed = (__popc(before) - 1) * step;
        low += passed, count = min(step, count - passed);
    }
    return low;
}

// Where the documents of the tile's queries begin, every 32nd query a lane's. Rows from N on count as of the last document.
static __device__ __forceinline__ void find_documents(Item *item, int query0, const Arguments &a)
{
    const int each = QUERIES / WARP;
    int lane = threadIdx.x % WARP, last = min(query0 + QUERIES, a.N) - 1, document = document_of(query0, a), offset[each] = {};
    if (lane == 0) item->begin = a.cu[document];
    for (bool more = true; more; document += WARP) {
        int start = document + 1 + lane <= a.slots ? a.cu[document + 1 + lane] : INT_MAX;
        for (int i = 0; i < WARP && more; i++) {
            int at = __shfl_sync(0xffffffffu, start, i);
            more = at <= last;
#pragma unroll
            for (int k = 0; k < each; k++)
                if (more && query0 + lane + WARP * k >= at) offset[k] = at - query0;
        }
    }
#pragma unroll
    for (int k = 0; k < each; k++) item->offset[lane + WARP * k] = (uint8_t)offset[k];
}

static __device__ __forceinline__ int first_key(const Item *item, int query0, int row, int window)
{
    int offset = item->offset[row];
    return max(offset ? query0 + offset : item->begin, query0 + row - window);
}

// Fills the item's description, but for the gates. All lanes.
static __device__ __forceinline__ void describe_item(Item *item, int index, const Arguments &a)
{
    int lane = threadIdx.x % WARP, query0 = a.order[index / a.H] * QUERIES, end = query0 + QUERIES;
    find_documents(item, query0, a);
    __syncwarp();
    if (lane < GROUPS) {
        int row0 = lane * GROUP_QUERIES, row1 = row0 + GROUP_QUERIES - 1;
        item->first[lane] = (QUERIES - 1 - row1) / KEYS;
        item->last[lane] = (end - 1 - first_key(item, query0, row0, a.window)) / KEYS;
        item->whole[lane] = (end - first_key(item, query0, row1, a.window)) / KEYS - 1;
    }
    __syncwarp();
    if (lane) return;
    item->query0 = query0, item->head = index % a.H;
    item->end = item->last[0] + 1;
}

// The first item of a block is that of its number, then it takes the next one; a.items or more: there are none any more.
static __device__ __forceinline__ int next_item(const Arguments &a)
{
    int index = 0;
    if (threadIdx.x % WARP == 0) index = (int)(gridDim.x + atomicAdd(&a.progress->next, 1));
    return __shfl_sync(0xffffffffu, index, 0);
}

// Describes items in their slots and fetches their queries. An item is taken no earlier than there is room for it: what a block
// holds in advance is what others wait for at the end.
static __device__ __forceinline__ void prepare_items(const Shared &m, const Arguments &a, const CUtensorMap *q)
{
    int lane = threadIdx.x % WARP, index = (int)blockIdx.x;
    Ring<2> slots;
    for (; index < a.items; index = next_item(a)) {
        Item *item = m.item(slots.stage);
        uint64_t *full = m.item_full(slots.stage);
        describe_item(item, index, a);
        __syncwarp();
        barrier_arrive(m.described(slots.stage));
        if (lane) {
            barrier_arrive(full);
        } else {
            barrier_arrive_expect(full, GROUPS * QUERY_BYTES);
            for (int g = 0; g < GROUPS; g++)
                for (int p = 0; p < 2; p++)
                    copy_box(m.q(slots.stage, g) + p * QUERY_PANEL_BYTES, q, full, item->head * WIDTH + p * PANEL,
                             item->query0 + g * GROUP_QUERIES);
        }
        slots.advance();
        barrier_wait(m.item_empty(slots.stage), slots.parity ^ 1);
    }
    if (lane == 0) m.item(slots.stage)->end = 0;
    barrier_arrive(m.described(slots.stage));
    barrier_arrive(m.item_full(slots.stage));
    if (lane) return;
    if (atomicInc(&a.progress->finished, gridDim.x - 1) == gridDim.x - 1) a.progress->next = 0; // all have had their last
}

// ---- the warps that compute gates ----------------------------------------------------------------------------------------

static __device__ __forceinline__ void compute_gates(const Shared &m, const Arguments &a, int warp)
{
    for (Ring<2> slots;; slots.advance()) {
        Item *item = m.item(slots.stage);
        barrier_wait(m.described(slots.stage), slots.parity);
        if (item->end == 0) break;
        const floatX *w = a.gate_w + item->head * GATE_WIDTH;
        float x[QUERIES / WARP / GATE_WARPS];
#pragma unroll
        for (int i = 0; i < QUERIES / WARP / GATE_WARPS; i++) {
            int64_t query = min(item->query0 + (int)threadIdx.x % WARP + WARP * (GATE_WARPS * i + warp), a.N - 1);
            x[i] = a.h ? sigmoid(gate_input(a.h + query * (a.H * WIDTH), w)) : 1;
        }
#pragma unroll
        for (int i = 0; i < QUERIES / WARP / GATE_WARPS; i++)
            item->gate[threadIdx.x % WARP + WARP * (GATE_WARPS * i + warp)] = x[i];
        barrier_arrive(m.gated(slots.stage));
    }
}

// ---- the warp that fetches keys and values -------------------------------------------------------------------------------

static __device__ __forceinline__ void fetch_tile(uint8_t *to, const CUtensorMap *map, uint64_t *full, uint64_t *empty,
                                                  uint32_t parity, int column, int key0)
{
    barrier_wait(empty, parity ^ 1);
    if (threadIdx.x % WARP) return;
    barrier_arrive_expect(full, KEY_BYTES);
    for (int p = 0; p < 2; p++) copy_box(to + p * KEY_PANEL_BYTES, map, full, column + p * PANEL, key0);
}

static __device__ __forceinline__ void fetch(const Shared &m, const CUtensorMap *k, const CUtensorMap *v)
{
    Ring<STAGES> ring;
    for (Ring<2> slots;; slots.advance()) {
        const Item *item = m.item(slots.stage);
        barrier_wait(m.described(slots.stage), slots.parity);
        int end = item->end, column = item->head * WIDTH, key0 = item->query0 + QUERIES - KEYS;
        __syncwarp(); // all have read before lane 0 begins what ends in the slot's being used again
        if (end == 0) break;
        for (int n = 0; n < end; n++, key0 -= KEYS, ring.advance()) {
            int stage = ring.stage;
            fetch_tile(m.k(stage), k, m.k_full(stage), m.k_empty(stage), ring.parity, column, key0);
            fetch_tile(m.v(stage), v, m.v_full(stage), m.v_empty(stage), ring.parity, column, key0);
        }
    }
}

// ---- the warpgroups that multiply ----------------------------------------------------------------------------------------

// s (64, KEYS) = q (64, 128) k (KEYS, 128)^T; both as operands
static __device__ __forceinline__ void score(float (&s)[KEYS / 2], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        multiply_64<false, false>(s, operand_advance(q, i / 4 * QUERY_PANEL_BYTES + i % 4 * 32),
                                  operand_advance(k, i / 4 * KEY_PANEL_BYTES + i % 4 * 32), i > 0);
}

// y (64, 128) += p (64, KEYS) v (KEYS, 128); p: packed, as fragments
static __device__ __forceinline__ void add_values(float (&y)[64], const uint32_t (&p)[KEYS / 4], uint64_t v, bool accumulate)
{
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) multiply_128(y, p + 4 * i, operand_advance(v, i * STEP_BYTES), accumulate || i > 0);
}

// Of the thread's two queries. A weight is the power of two of a score times scale_log2 minus the base.
struct Softmax {
    float base[2], sum[2]; // sums of weights over the thread's own columns only
    int reach[2];          // keys that the query sees: itself and those before it
};

// What a query does not see.  behind: the thread's first query minus the key of its first column
static __device__ __forceinline__ void mask(float (&s)[KEYS / 2], const Softmax &m, int behind)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if ((unsigned)(behind + i / 2 % 2 * 8 - i / 4 * 8 - i % 2) >= (unsigned)m.reach[i / 2 % 2]) s[i] = -INFINITY;
}

static __device__ __forceinline__ void find_maxima(float (&top)[2], const float (&s)[KEYS / 2])
{
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = quad_max(top[r]);
}

// A higher base for rows with powers from 0 on; shrink: what the rows' sums so far are to be multiplied with.
static __device__ __forceinline__ void raise_base(float (&x)[KEYS / 2], Softmax &m, float (&shrink)[2])
{
    float top[2], rise[2];
    find_maxima(top, x);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rise[r] = top[r] >= 0 ? top[r] + SLACK : 0;
        shrink[r] = power_of_two(-rise[r]);
        m.base[r] += rise[r];
        m.sum[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) x[i] -= rise[i / 2 % 2];
}

// (In order: no power is to wait for the products that weigh leaves under way.)
static __device__ __forceinline__ void take_powers(float (&x)[KEYS / 2], float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
        sum[i / 2 % 2] += x[i];
    }
}

// Scores to weights. True: the warp's sums so far are to be shrunk. Instead of following the maximum, which takes as long as the
// exponentials do, the first tile's gives a base with some slack, and the signs of all powers together say that it still serves.
static __device__ __forceinline__ bool weigh(float (&s)[KEYS / 2], Softmax &m, float (&shrink)[2], float scale_log2)
{
    unsigned negative = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        s[i] = s[i] * scale_log2 - m.base[i / 2 % 2];
        negative &= __float_as_uint(s[i]);
    }
    bool raise = __any_sync(0xffffffffu, (int)negative >= 0);
    if (raise) {
        raise_base(s, m, shrink);
        take_powers(s, m.sum);
    } else take_powers(s, m.sum);
    return raise;
}

static __device__ __forceinline__ void pack(uint32_t (&p)[KEYS / 4], const float (&s)[KEYS / 2])
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++) p[i] = pack2(s[2 * i], s[2 * i + 1]);
}

// Where a warpgroup stands.
struct Worker {
    int group, thread, lane; // thread of the block
    int row;                 // the thread's first of the item's queries
    uint64_t k, v;           // operands of the first stage
    int used;                // slot of the item before; -1: there was none
    Ring<STAGES> ring;
    Ring<2> slots;
};

static __device__ __forceinline__ void release(uint64_t *empty, const Worker &w)
{
    if (w.lane == 0) barrier_arrive(empty);
}

// Gives back the slot of the item before, once the copy unit has read the rows that left from there.
static __device__ __forceinline__ void free_slot(const Shared &m, const Worker &w)
{
    if (w.used < 0 || w.thread % GROUP) return;
    stores_wait_read();
    barrier_arrive(m.item_empty(w.used));
}

// Passes by tiles that other warpgroups use.
static __device__ __forceinline__ void pass_by(const Shared &m, Worker &w, int tiles)
{
    for (; tiles > 0; tiles--, w.ring.advance()) {
        barrier_wait(m.k_full(w.ring.stage), w.ring.parity);
        release(m.k_empty(w.ring.stage), w);
        barrier_wait(m.v_full(w.ring.stage), w.ring.parity);
        release(m.v_empty(w.ring.stage), w);
    }
}

// Weights of the item's first tile, which has a key for every query.
static __device__ __forceinline__ void first_tile(float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 4], Softmax &soft, const Shared &m,
                                                  Worker &w, uint64_t q, int behind, const Arguments &a)
{
    const Item *item = m.item(w.slots.stage);
    float shrink[2];
    barrier_wait(m.k_full(w.ring.stage), w.ring.parity);
    products_begin();
    score(s, q, operand_advance(w.k, w.ring.stage * STAGE_BYTES));
    products_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = w.row + 8 * r;
        soft.reach[r] = item->query0 + row + 1 - first_key(item, item->query0, row, a.window);
        soft.sum[r] = 0;
    }
    products_wait<0>();
    release(m.k_empty(w.ring.stage), w);
    free_slot(m, w);
    mask(s, soft, behind);
    find_maxima(soft.base, s);
#pragma unroll
    for (int r = 0; r < 2; r++) soft.base[r] = soft.base[r] * a.scale_log2 + SLACK;
    weigh(s, soft, shrink, a.scale_log2);
    pack(p, s);
}

// The scores of the next tile, and while they become weights, the values of the tile before. masked: not all is seen by all
static __device__ __forceinline__ void next_tile(float (&y)[64], float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 4], Softmax &soft,
                                                 const Shared &m, Worker &w, uint64_t q, bool accumulate, bool masked, int behind,
                                                 float scale_log2)
{
    int before = w.ring.stage;
    float shrink[2];
    barrier_wait(m.v_full(before), w.ring.parity);
    w.ring.advance();
    barrier_wait(m.k_full(w.ring.stage), w.ring.parity);
    products_begin();
    score(s, q, operand_advance(w.k, w.ring.stage * STAGE_BYTES));
    products_commit();
    add_values(y, p, operand_advance(w.v, before * STAGE_BYTES), accumulate);
    products_commit();
    products_wait<1>(); // the scores
    release(m.k_empty(w.ring.stage), w);
    if (masked) mask(s, soft, behind);
    bool raised = weigh(s, soft, shrink, scale_log2);
    products_wait<0>();
    release(m.v_empty(before), w);
    if (raised) {
#pragma unroll
        for (int i = 0; i < 64; i++) y[i] *= shrink[i / 2 % 2];
    }
    pack(p, s);
}

// A row of a head leaves through the place of its query, which all the warpgroup's warps are done with.  y: before the factors
static __device__ __forceinline__ void store_rows(uint8_t *staging, const float (&y)[64], const float (&factor)[2],
                                                  const Worker &w, const CUtensorMap *out, int column, int row)
{
    int my_row = w.thread % GROUP / WARP * 16 + w.lane % 16;
    group_sync(1 + w.group, GROUP);
    uint32_t address = shared_address(staging) + my_row * 128;
#pragma unroll
    for (int g = 0; g < WIDTH / 8; g += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = pack2(y[4 * g + 2 * i] * factor[i % 2], y[4 * g + 2 * i + 1] * factor[i % 2]);
        store_blocks(address + g / 8 * QUERY_PANEL_BYTES + ((g % 8 + w.lane / 16 ^ w.lane % 8) << 4), x);
    }
    copy_unit_fence();
    group_sync(1 + w.group, GROUP);
    if (w.thread % GROUP) return;
    for (int p = 0; p < 2; p++) store_box(out, staging + p * QUERY_PANEL_BYTES, column + p * PANEL, row);
    stores_commit();
}

// The last tile's values, lse, and the gated rows.
static __device__ __forceinline__ void finish_rows(float (&y)[64], const uint32_t (&p)[KEYS / 4], const Softmax &soft,
                                                   const Shared &m, Worker &w, bool accumulate, const CUtensorMap *out,
                                                   const Arguments &a)
{
    const Item *item = m.item(w.slots.stage);
    barrier_wait(m.v_full(w.ring.stage), w.ring.parity);
    products_begin();
    add_values(y, p, operand_advance(w.v, w.ring.stage * STAGE_BYTES), accumulate);
    products_commit();
    barrier_wait(m.gated(w.slots.stage), w.slots.parity);
    float factor[2];
    int query0 = item->query0, head = item->head;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(soft.sum[r]);
        int query = query0 + w.row + 8 * r;
        factor[r] = item->gate[w.row + 8 * r] / sum;
        if (w.lane % 4 == 0 && query < a.N) a.lse[(int64_t)query * a.H + head] = (soft.base[r] + log2f(sum)) * LN2;
    }
    products_wait<0>();
    release(m.v_empty(w.ring.stage), w);
    w.ring.advance();
    store_rows(m.q(w.slots.stage, w.group), y, factor, w, out, head * WIDTH, query0 + w.group * GROUP_QUERIES);
}

static __device__ __forceinline__ void attend(const Shared &m, const Arguments &a, int group, const CUtensorMap *out)
{
    Worker w = {.group = group, .used = -1};
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(w.thread)); // the compiler would read it anew in each turn, and wait for it
    w.lane = w.thread % WARP, w.row = group * GROUP_QUERIES + w.thread % GROUP / WARP * 16 + w.lane / 4;
    w.k = operand(m.k(0), 0), w.v = operand(m.v(0), KEY_PANEL_BYTES);
    for (;; w.slots.advance()) {
        const Item *item = m.item(w.slots.stage);
        barrier_wait(m.item_full(w.slots.stage), w.slots.parity);
        int n = item->first[group], last = item->last[group], whole = item->whole[group], end = item->end;
        if (end == 0) break;
        pass_by(m, w, n);
        int behind = w.row - QUERIES + (n + 1) * KEYS - 2 * (w.lane % 4); // first query minus the key of its first column
        uint64_t q = operand(m.q(w.slots.stage, group), 0);
        float s[KEYS / 2], y[64];
        uint32_t p[KEYS / 4];
        Softmax soft;
        first_tile(s, p, soft, m, w, q, behind, a);
        bool accumulate = false;
#pragma unroll 1
        for (; n < last; n++, accumulate = true)
            next_tile(y, s, p, soft, m, w, q, accumulate, n + 1 > whole, behind += KEYS, a.scale_log2);
        finish_rows(y, p, soft, m, w, accumulate, out, a);
        pass_by(m, w, end - 1 - last);
        w.used = w.slots.stage;
    }
    if (w.thread % GROUP == 0) stores_wait();
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap y,
                   const __grid_constant__ Arguments a)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared m = {shared};
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < 2; i++)
            barrier_init(m.item_full(i), WARP), barrier_init(m.item_empty(i), GROUPS), barrier_init(m.described(i), WARP),
                barrier_init(m.gated(i), GATE_WARPS * WARP);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(m.k_full(i), 1), barrier_init(m.k_empty(i), GROUPS * GROUP / WARP);
            barrier_init(m.v_full(i), 1), barrier_init(m.v_empty(i), GROUPS * GROUP / WARP);
        }
        barrier_init_fence();
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARP, 0), group = warp / (GROUP / WARP); // known to be uniform
    if (group == GROUPS) {
        registers_shrink<PRODUCER_REGISTERS>();
        warp -= GROUPS * GROUP / WARP;
        if (warp == 0) fetch(m, &k, &v);
        else if (warp == 1) prepare_items(m, a, &q);
        else compute_gates(m, a, warp - 2);
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        attend(m, a, group, &y);
    }
#endif
}

// ---- launch --------------------------------------------------------------------------------------------------------------

} // namespace attention_queries

void attention_tensor::prepare_forward(void)
{
    CUDA_CHECK(cudaFuncSetAttribute(attention_queries::forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    attention_queries::SHARED_BYTES));
}

void attention_tensor_forward(const AttentionCall *c, Stream s)
{
    using namespace attention_queries;
    using attention_tensor::rows_map;
    assert(c->scale > 0); // maxima are taken before it
    Arguments a;
    a.h = c->h, a.gate_w = c->gate_w, a.lse = c->lse;
    a.progress = (attention_tensor::Progress *)c->counters;
    a.cu = c->cu, a.order = c->query_tiles;
    a.scale_log2 = c->scale * LOG2E;
    a.window = c->window < c->N ? c->window : c->N, a.slots = c->slots, a.N = c->N, a.H = c->H;
    a.items = (int)ceil_div(c->N, QUERIES) * c->H;
    CUtensorMap q = rows_map(c->q, c, GROUP_QUERIES), k = rows_map(c->k, c, KEYS), v = rows_map(c->v, c, KEYS),
                y = rows_map(c->y, c, GROUP_QUERIES);
    unsigned blocks = (unsigned)min_i64(a.items, device_state.sms);
    forward_kernel<<<blocks, THREADS, SHARED_BYTES, s>>>(q, k, v, y, a);
    CHECK_LAUNCH();
}
