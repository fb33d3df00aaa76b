// Attention backward on sm90, heads of v of width 128, of q and k of 128 or 96: packed documents, causal,
// sliding window.
//
// With p = exp(s - lse), r = rowsum(dy * y) (given), ds = p * (dy v^T - r):  dv = p^T dy, dk = scale ds^T
// q, dq = scale ds k. The output gate is folded into lse and r (gates.cu). When q, k, v's backward follows,
// its work on dk and dv is done in the epilogue on the fp32 accumulators: 250 MB of traffic for a layer of
// 32768 tokens is saved or overlapped with WGMMA. Where heads_backward follows, the epilogue does k's part of
// that (AttentionCall.heads).
//
// A CTA takes work items of 128 keys of one head and loops over the tiles of 64 queries that see any of
// them. All products are transposed (keys are rows), so that p^T and ds^T, the accumulators of one WGMMA,
// are the register operand A of the next. Two consumer warpgroups own 64 keys each and hold dk and dv in
// registers; only ds^T passes through shared memory, because dq sums over the keys of both: each warpgroup
// computes half of dq's columns, or 64 and 32 of 96. In a tile of which no query sees its keys a warpgroup
// has only that to do. Warpgroup 2: one producer and tile-scheduler warp, two warps that by turns reduce dq
// tiles to global memory (cp.reduce.async.bulk), each during the next tile. dk and dv are staged in shared
// memory where the item's k and ds were, and stored by TMA; when the next item's first two tiles write there,
// they wait for its reads. k, v, dk and dv (not dqkv) are evicted from L2 before q, dy and dq, which several
// CTAs read.
//
//   tensor cores 5 products of 64 x 128 x 128 a tile: 2560 cycles
//   shared mem.  operands 256 KB, ds 16, dq 64, loads of q and dy 32 KB a tile: 2940 cycles at 128 bytes:
//                the bound
//   L2           32 KB of q and dy in, 32 KB of dq reduced a tile: 11 + 11 bytes a cycle and multiprocessor
//   smem         k of this and the next item 64 KB, v 32, q and dy in two stages 64, ds twice 32, dq 32:
//                224 KB
//   items        7 to 8 us each beside its tiles (2.1 us each), before the work of 2026-11-23 on their ends:
//                dev/notes/2026-11-23_ends_of_attention_items.md
//   registers    dk, dv 128; scores and dp 64, later their packed forms and dq in the same: 192 of 224, or
//                of 232 where q, k, v's backward follows (32 bytes spilled)
//
// dq: the accumulator keeps the sums for q, k, v's backward, or round_kernel rounds them to dq.
// Tiles lie on multiples of 64 and 128 tokens wherever documents begin and end; the queries that see a key
// are one interval. Dynamic tile scheduler: an atomic counter, items in the table's order (longest documents
// first, each from its end to its begin). A CTA claims its next item with the last tile of queries of the one
// before: an item that is claimed early waits while other CTAs are idle or wait for its sums.
//
// Order of dq's sums: the item that comes first in the table's order stores its partial sum of a tile and
// sets the tile's state, and the others wait for that. With fixed_order each waits for all that come before
// it, counted by the state; else they add in any order, and dq's last bits vary from run to run. From a
// document's end to its begin, because a tile of queries is then the first tile of the first item that adds
// to it, the third of the second, the fifth of the third: CTAs that take these items one after the other
// reach it in that order. No deadlock: an item waits only for items that were claimed before it, a CTA works
// on its items in the order in which it claimed them, so that of all unfinished items the one claimed first
// is being worked on, and waits for none.
//
// Tried (H200, 2026-11-22): CTAs of queries without dq reduction need 7 products instead of 5; spare warps
// that round complete dq tiles delay short items; reductions into a zeroed accumulator save 8 us here and
// cost 26 us where it is read and cleared (32768 tokens, window 384). 2026-11-23, all slower
// (dev/notes/2026-11-23_order_of_dq.md): the fixed order with claims two, four and more tiles ahead, or with
// its signal a tile later.
#include "llmc/cuda/attention/sm90_backward_epilogue.cuh"

namespace attention_sm90
{

#if HOPPER

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// s (64, 64) = the warpgroup's rows of `keys` (128, COLS) times queries (64, COLS)^T.
template <int COLS>
static __device__ __forceinline__ void mma_rows(float (&s)[32], const uint8_t *keys, const uint8_t *queries,
                                                int group)
{
    uint64_t a = smem_descriptor(keys + group * WARPGROUP_KEYS * 128, 0), b = smem_descriptor(queries, 0);
#pragma unroll
    for (int i = 0; i < COLS / 16; i++)
        wgmma<floatX, 64, false, false>(s, descriptor_advance(a, i / 4 * KEY_PANEL_BYTES + i % 4 * 32),
                                        descriptor_advance(b, i / 4 * QUERY_PANEL_BYTES + i % 4 * 32), i > 0);
}

// sum (64, COLS) += x (64, 64) queries (64, COLS); x: packed A fragments.
template <int COLS>
static __device__ __forceinline__ void mma_fragments(float (&sum)[COLS / 2], const uint32_t (&x)[16],
                                                     const uint8_t *queries)
{
    uint64_t b = smem_descriptor(queries, QUERY_PANEL_BYTES);
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++)
        if constexpr (COLS == WIDTH)
            wgmma_rs<floatX, true>(sum, x + 4 * i, descriptor_advance(b, i * STEP_BYTES), true);
        else
            wgmma_rs_96(sum, x + 4 * i, descriptor_advance(b, i * STEP_BYTES));
}

// dq (64 queries, 64 columns of the warpgroup) = ds k. Of heads of 96 columns the second warpgroup computes
// 32 of zeros, too: products of two shapes in two branches would be serialized, and those of zeros are, by
// count, some 2% of what is read from shared memory.
static __device__ __forceinline__ void mma_keys(float (&dq)[32], const uint8_t *ds, const uint8_t *k,
                                                int group)
{
    uint64_t a = smem_descriptor(ds, 0), b = smem_descriptor(k + group * KEY_PANEL_BYTES, 0);
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma<floatX, 64, true, true>(dq, descriptor_advance(a, i * STEP_BYTES),
                                      descriptor_advance(b, i * STEP_BYTES), i > 0);
}

// p = exp2(scores - lse). behind: query of the thread's first column minus its key, for its two keys; count:
// queries that see them
template <bool MASKED>
static __device__ __forceinline__ void softmax_weights(float (&s)[32], const float *lse, float scale_log2,
                                                       const int (&behind)[2], const int (&count)[2])
{
#pragma unroll
    for (int g = 0; g < 8; g++) {
        float2 base = *(const float2 *)(lse + 8 * g);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = exp2_approx(s[4 * g + i] * scale_log2 - (i % 2 ? base.y : base.x));
            s[4 * g + i] =
                !MASKED || (unsigned)(behind[i / 2] + 8 * g + i % 2) < (unsigned)count[i / 2] ? x : 0;
        }
    }
}

// Packs p and ds = p * (dp - r).
static __device__ __forceinline__ void gradients(uint32_t (&p)[16], uint32_t (&ds)[16], const float (&s)[32],
                                                 const float (&dp)[32], const float *row_sum)
{
#pragma unroll
    for (int g = 0; g < 8; g++) {
        float2 r = *(const float2 *)(row_sum + 8 * g);
        ds[2 * g] = pack2(s[4 * g] * (dp[4 * g] - r.x), s[4 * g + 1] * (dp[4 * g + 1] - r.y));
        ds[2 * g + 1] = pack2(s[4 * g + 2] * (dp[4 * g + 2] - r.x), s[4 * g + 3] * (dp[4 * g + 3] - r.y));
        p[2 * g] = pack2(s[4 * g], s[4 * g + 1]);
        p[2 * g + 1] = pack2(s[4 * g + 2], s[4 * g + 3]);
    }
}

// Writes the warp's 16 rows of ds^T (128 keys, 64 queries) under the 128-byte swizzle.
static __device__ __forceinline__ void store_gradients(uint8_t *row, const uint32_t (&ds)[16], int lane)
{
    uint32_t address = shared_address(row);
#pragma unroll
    for (int i = 0; i < 4; i++)
        stmatrix_x4(address + ((2 * i + lane / 16 ^ lane % 8) << 4), ds + 4 * i);
}

// Writes the warpgroup's columns of a dq tile to the staging buffer of the reduction.
static __device__ __forceinline__ void stage_dq(uint8_t *share, const float (&dq)[32], int columns)
{
#pragma unroll
    for (int g = 0; g < 8; g++)
        if (8 * g < columns)
            ((float4 *)share)[g * WARPGROUP] =
                make_float4(dq[4 * g], dq[4 * g + 1], dq[4 * g + 2], dq[4 * g + 3]);
}

// Stores the warpgroup's ds for both, waits for the other's, and issues the WGMMA of dq. Each warpgroup
// arrives at a barrier of its own and waits at the other's: all threads that wait at a barrier must do so at
// one instruction (synccheck), and one warpgroup may be in masked_tile while the other is in compute_tiles.
// The pairs of barriers alternate with the buffers: with one pair a warpgroup could arrive for the next tile
// before the other has waited for this one.
static __device__ __forceinline__ void publish_ds(const Consumer &c, const Shared &m, float (&dq)[32],
                                                  const uint32_t (&ds)[16])
{
    uint8_t *buffer = m.ds(c.buffer);
    store_gradients(buffer + (c.thread / WARP * 16 + c.lane % 16) * 128, ds, c.lane);
    fence_proxy_async_shared(); // for WGMMA
    int pair = BARRIER_DS + 2 * (int)c.buffer;
    named_barrier_arrive(pair + c.group, 2 * WARPGROUP);
    named_barrier_sync(pair + (c.group ^ 1), 2 * WARPGROUP);
    wgmma_fence();
    mma_keys(dq, buffer, m.k(c.slots.stage), c.group);
    wgmma_commit();
}

// Stages the tile's dq and publishes it to the reduction warps.
template <int QK>
static __device__ __forceinline__ void publish_dq(Consumer &c, const Shared &m, const float (&dq)[32])
{
    stage_dq(m.dq(c.group) + c.thread % WARPGROUP * 16, dq, QK == WIDTH ? PANEL : dq_columns<QK>(c.group));
    fence_proxy_async_shared(); // for the bulk reduction
    __syncwarp();
    if (c.lane == 0)
        mbarrier_arrive(m.dq_full((int)c.buffer));
    c.buffer ^= 1;
}

// A tile that is masked for all of the warpgroup's keys: ds is zero, and only its half of dq is computed.
template <int QK> static __device__ __forceinline__ void masked_tile(Consumer &c, const Shared &m)
{
    const uint32_t zeros[16] = {};
    float dq[32];
    mbarrier_wait(m.queries_full(c.ring.stage), c.ring.parity);
    mbarrier_arrive(m.queries_empty(c.ring.stage));
    c.ring.advance();
    wait_stores(c, m);
    publish_ds(c, m, dq, zeros);
    mbarrier_wait(m.dq_empty(), c.dq_parity);
    c.dq_parity ^= 1;
    wgmma_wait<0>();
    publish_dq<QK>(c, m, dq);
}

template <int COUNT> static __device__ __forceinline__ void clear(float (&x)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = 0;
}

// The tiles from `tile` to `end`, exclusive, of which there is at least one: dk and dv.  parity: of the
// item's values
template <int QK>
static __device__ __forceinline__ void compute_tiles(Consumer &c, const Shared &m, const Arguments &a,
                                                     const Item *item, int tile, int end, uint32_t parity,
                                                     float (&dk)[QK / 2], float (&dv)[64])
{
    const int my_row = c.thread / WARP * 16 + c.lane / 4;
    const uint8_t *k = m.k(c.slots.stage);
    float s[32], t[32]; // s: scores, then weights; t: gradients of weights, then dq
    mbarrier_wait(m.queries_full(c.ring.stage), c.ring.parity);
    wgmma_fence();
    mma_rows<QK>(s, k, m.q(c.ring.stage), c.group);
    wgmma_commit();
    clear(dv);
    clear(dk);
    mbarrier_wait(m.values_full(), parity);
#pragma unroll 1
    do {
        const uint8_t *q = m.q(c.ring.stage), *dy = m.dy(c.ring.stage);
        uint32_t p[16], ds[16];
        wgmma_wait<0>(); // the scores
        wgmma_fence();
        mma_rows<WIDTH>(t, m.v(), dy, c.group);
        wgmma_commit();
        const float *lse = m.stage(c.ring.stage)->lse + 2 * (c.lane % 4);
        if (tile <= item->first + c.group || tile >= item->full_end[c.group]) {
            int from = tile * QUERIES - item->key0 - my_row + 2 * (c.lane % 4), behind[2] = {from, from - 8},
                count[2] = {item->count[my_row], item->count[my_row + 8]};
            softmax_weights<true>(s, lse, a.scale_log2, behind, count);
        } else
            softmax_weights<false>(s, lse, a.scale_log2, {}, {});
        wgmma_wait<0>();
        if (tile + 1 == end && c.lane == 0)
            mbarrier_arrive(m.values_empty());
        wait_stores(c, m);
        gradients(p, ds, s, t, m.stage(c.ring.stage)->row_sum + 2 * (c.lane % 4));
        wgmma_fence();
        mma_fragments<WIDTH>(dv, p, dy);
        mma_fragments<QK>(dk, ds, q);
        wgmma_commit();
        publish_ds(c, m, t, ds);
        wgmma_wait<1>(); // dk and dv are complete: their operands are free
        mbarrier_arrive(m.queries_empty(c.ring.stage));
        c.ring.advance();
        if (tile + 1 < end)
            mbarrier_wait(m.queries_full(c.ring.stage), c.ring.parity);
        wgmma_fence();
        mma_rows<QK>(s, k, m.q(c.ring.stage), c.group); // the next scores; discarded after the last tile
        wgmma_commit();
        mbarrier_wait(m.dq_empty(), c.dq_parity);
        c.dq_parity ^= 1;
        wgmma_wait<1>();
        publish_dq<QK>(c, m, t);
    } while (++tile < end);
    wgmma_wait<0>();
}

template <int QK, DkvEpilogue EPILOGUE>
static __device__ __forceinline__ void consume(const Shared &m, const Maps &maps, const Arguments &a,
                                               int group)
{
    Consumer c;
    // Read once: the compiler would read %tid in each iteration and wait for it.
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(c.thread));
    c.lane = c.thread % WARP;
    c.group = group;
    uint32_t value_parity = 0;
    for (;; c.slots.advance(), value_parity ^= 1) {
        const Item *item = m.item(c.slots.stage);
        mbarrier_wait(m.keys_full(c.slots.stage), c.slots.parity);
        int tile = item->first, last = item->last, end = item->end[group];
        if (tile == last) {
            if (c.thread % WARPGROUP == 0)
                tma_store_wait();
            break;
        }
        float dk[QK / 2], dv[64];
        if (group == 1) { // causal: no query of the first tile sees its keys
            masked_tile<QK>(c, m);
            tile++;
        }
        if (tile < end) {
            compute_tiles<QK>(c, m, a, item, tile, end, value_parity, dk, dv);
            tile = end;
        } else { // no keys
            clear(dv);
            clear(dk);
            mbarrier_wait(m.values_full(), value_parity);
            if (c.lane == 0)
                mbarrier_arrive(m.values_empty());
        }
#pragma unroll 1
        for (; tile < last; tile++)
            masked_tile<QK>(c, m);
        if constexpr (EPILOGUE != EPILOGUE_QKV) {
            store_item<QK, EPILOGUE>(c, m, maps, a, dk, dv);
        } else {
            Angles angles[2];
            float rstd[2] = {};
            int head = item->head, my_row = c.thread / WARP * 16 + c.lane / 4, row = item->key0 + my_row;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                angles[r] = load_angles(a.cos, a.sin, row + 8 * r, row + 8 * r < a.N);
                if (row + 8 * r < a.N)
                    rstd[r] = a.rstd_k[(int64_t)(row + 8 * r) * a.H + head];
            }
            finish_values(dv, item, row, c.thread / WARP, a);
            finish_keys(m, c.slots.stage, dk, head, row, my_row, angles, rstd, a);
        }
    }
}

#endif

template <int QK, DkvEpilogue EPILOGUE>
static __device__ __forceinline__ void backward(const Maps &maps, const Arguments &a)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared m = {shared};
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < 2; i++) {
            mbarrier_init(m.keys_full(i), WARP);
            mbarrier_init(m.keys_empty(i), 2 * WARPGROUP + 2);
            mbarrier_init(m.queries_full(i), WARP + 1);
            mbarrier_init(m.queries_empty(i), 2 * WARPGROUP);
            mbarrier_init(m.dq_full(i), CONSUMER_WARPS);
        }
        mbarrier_init(m.dq_empty(), 1);
        mbarrier_init(m.values_full(), 1);
        mbarrier_init(m.values_empty(), 2 * WARPGROUP / WARP);
        fence_mbarrier_init();
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARP, 0),
        group = warp / (WARPGROUP / WARP); // warp-uniform
    if (group == 2) {
        setmaxnreg_dec<EPILOGUE == EPILOGUE_QKV ? QKV_PRODUCER_REGISTERS : PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP)
            produce<QK>(m, a, &maps.q, &maps.k, &maps.v, &maps.dy);
        else if (warp <= 2 * WARPGROUP / WARP + 2 && threadIdx.x % WARP == 0)
            reduce_dq<QK>(m, a, warp - 2 * WARPGROUP / WARP - 1);
    } else {
        setmaxnreg_inc<EPILOGUE == EPILOGUE_QKV ? QKV_CONSUMER_REGISTERS : CONSUMER_REGISTERS>();
        consume<QK, EPILOGUE>(m, maps, a, group);
    }
#endif
}

// By what the epilogue stores.
template <int QK>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    backward_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a)
{
    backward<QK, EPILOGUE_GRADIENTS>(maps, a);
}
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    backward_qkv_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a)
{
    backward<WIDTH, EPILOGUE_QKV>(maps, a);
}
template <int QK>
__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    backward_heads_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments a)
{
    backward<QK, EPILOGUE_HEADS>(maps, a);
}

// Rounds accumulator tiles to dq. One CTA per tile of an item.
template <int QK>
__global__ void __launch_bounds__(2 * WARPGROUP) round_kernel(const __grid_constant__ Arguments a)
{
    int lane = threadIdx.x % WARP, half = threadIdx.x / WARPGROUP, item = (int)blockIdx.x / 2,
        head = item % a.H;
    int tile = item / a.H * (KEYS / QUERIES) + blockIdx.x % 2;
    int first_row = tile * QUERIES + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    const int columns = QK == WIDTH ? PANEL : dq_columns<QK>(half);
    if (tile * QUERIES >= a.N)
        return;
    float *sums_of_tile = a.dq_sum + ((int64_t)tile * a.H + head) * (QUERIES * QK);
    float4 *sums = (float4 *)(sums_of_tile + half * (QUERIES * PANEL)) + threadIdx.x % WARPGROUP, s[8];
#pragma unroll
    for (int g = 0; g < 8; g++)
        if (g < columns / 8)
            s[g] = __ldcs(sums + g * WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0)
        a.state[2 * (tile * a.H + head) + half] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = first_row + i % 2 * 8, first = i / 2 * 4;
        if (first >= columns / 8)
            break;
        uint32_t x[4];
#pragma unroll
        for (int g = 0; g < 4; g++)
            x[g] = i % 2 ? pack2(s[first + g].z * a.scale, s[first + g].w * a.scale)
                         : pack2(s[first + g].x * a.scale, s[first + g].y * a.scale);
        transpose_quad(x);
        floatX *to = a.dq + (int64_t)row * a.H * QK + head * QK + half * PANEL + (first + lane % 4) * 8;
        if (row < a.N)
            __stcs((uint4 *)to, make_uint4(x[0], x[1], x[2], x[3]));
    }
}

// ---- launch ----------------------------------------------------------------------------------------------

CUtensorMap rows_map(const floatX *base, const AttentionCall *c, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, 0, c->N, c->H * c->e, c->H * c->e, box_rows);
}

} // namespace attention_sm90

using namespace attention_sm90;

bool attention_sm90_takes(int qk, int e) { return e == WIDTH && (qk == WIDTH || qk == NARROW); }

bool attention_sm90_prepare(int e, Error *error)
{
    if (e != WIDTH)
        return error_set(error, "heads of width %d, not %d", e, WIDTH);
    if (!device_has_wgmma())
        return error_set(error, "%s", device_path());
    const void *kernels[] = {(const void *)backward_kernel<WIDTH>, (const void *)backward_kernel<NARROW>,
                             (const void *)backward_heads_kernel<WIDTH>,
                             (const void *)backward_heads_kernel<NARROW>, (const void *)backward_qkv_kernel};
    for (const void *kernel : kernels)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    prepare_forward();
    return true;
}

size_t attention_sm90_sums(int N, int H, int qk)
{
    return (size_t)round_up(N, QUERIES) * (size_t)H * (size_t)qk;
}

size_t attention_sm90_states(int N, int H) { return (size_t)ceil_div(N, QUERIES) * (size_t)H * 2; }

size_t attention_sm90_value_sums(int N, int H)
{
    return (size_t)ceil_div(N, KEYS) * (size_t)H * CONSUMER_WARPS;
}

size_t attention_sm90_counters(void) { return sizeof(Progress) / sizeof(unsigned); }

// Where k's part of heads->dqkv lies, and v's; or dv of its own.
template <int QK> static void heads_maps(Maps *maps, const AttentionCall *c, int pairs)
{
    int tokens = c->N / pairs, heads = c->H * pairs, wide = heads * (2 * QK + WIDTH);
    floatX *dk = c->heads->dqkv + heads * QK, *dv = c->dv ? c->dv : dk + heads * QK;
    maps->dk = tensor_map_of_pairs(dk, tokens, pairs, c->H, QK, wide, WARPGROUP_KEYS);
    maps->dv =
        tensor_map_of_pairs(dv, tokens, pairs, c->H, WIDTH, c->dv ? heads * WIDTH : wide, WARPGROUP_KEYS);
}

template <int QK> static void launch(const AttentionCall *c, const Arguments &a, Stream s)
{
    Maps maps = {keys_map<QK>(c->q, c, QUERIES), keys_map<QK>(c->k, c, KEYS), rows_map(c->v, c, KEYS),
                 rows_map(c->dy, c, QUERIES)};
    unsigned blocks = (unsigned)min_i64(a.items, device_state.sms);
    if (c->heads) {
        heads_maps<QK>(&maps, c, a.pairs);
        backward_heads_kernel<QK><<<blocks, BLOCK_THREADS, SHARED_BYTES, s>>>(maps, a);
    } else if (c->dk) {
        maps.dk = keys_map<QK>(c->dk, c, WARPGROUP_KEYS);
        maps.dv = rows_map(c->dv, c, WARPGROUP_KEYS);
        backward_kernel<QK><<<blocks, BLOCK_THREADS, SHARED_BYTES, s>>>(maps, a);
    } else
        backward_qkv_kernel<<<blocks, BLOCK_THREADS, SHARED_BYTES, s>>>(maps, a);
    if (c->dq)
        round_kernel<QK><<<(unsigned)a.items *(KEYS / QUERIES), 2 * WARPGROUP, 0, s>>>(a);
    CHECK_LAUNCH();
}

void attention_sm90_backward(const AttentionCall *c, Stream s)
{
    assert(attention_sm90_takes(c->qk, c->e) && (c->qk == WIDTH || c->dk || c->heads));
    Arguments a = {.lse = c->lse,
                   .row_sums = c->row_sums,
                   .dq = c->dq,
                   .dv = c->dv,
                   .dq_sum = c->dq_sum,
                   .state = c->dq_state,
                   .progress = (Progress *)c->counters,
                   .cu = c->cu,
                   .order = c->key_tiles,
                   .late = c->late_tiles,
                   .fixed_order = c->fixed_order,
                   .scale = c->scale,
                   .scale_log2 = c->scale * LOG2E,
                   .window = c->window < c->N ? c->window : c->N,
                   .slots = c->slots,
                   .N = c->N,
                   .H = c->H,
                   .items = (int)ceil_div(c->N, KEYS) * c->H};
    if (c->heads) {
        const HeadsForward *f = c->heads->forward;
        a.cos = f->cos;
        a.sin = f->sin;
        a.rstd_k = f->rstd_k;
        a.pairs = f->paired ? 2 : 1;
    } else if (!c->dk) {
        const QkvBackward *n = c->qkv;
        a.dqkv = n->dqkv;
        a.cos = n->cos;
        a.sin = n->sin;
        a.rstd_k = n->rstd_k;
        a.lambda = n->lambda;
        a.v_raw = n->v_raw;
        a.value_embed = n->value_embed;
        a.tokens = n->tokens;
        a.value_sums = c->value_sums;
    }
    if (c->qk == WIDTH)
        launch<WIDTH>(c, a, s);
    else
        launch<NARROW>(c, a, s);
}
