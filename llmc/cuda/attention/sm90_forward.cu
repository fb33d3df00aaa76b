// Attention forward on sm90, heads of v of width 128, of q and k of 128 or 96: packed documents, causal,
// sliding window, output gate.
//
// A CTA takes work items of 192 queries of one head, 64 for each of three consumer warpgroups, and loops
// over tiles of 64 keys backwards from the last query. A warpgroup skips tiles that none of its queries
// sees. It issues the WGMMA of the next tile's scores before that of this tile's p v, so that the softmax
// overlaps with WGMMA. Warpgroup 3: one producer warp for k and v (4 stages, runs on from item to item),
// one tile-scheduler warp that describes the next item and loads its q, two warps that compute gates.
//
//   tensor cores 2 products of 64 x 64 x 128 a warpgroup and tile: 512 cycles
//   exponentials 4096: 256 cycles; with all else 200 instructions of a warp on each scheduler
//   shared mem.  32 KB for scores (q is read from smem each time), 16 for v, 11 of loads: 470 cycles at 128
//                bytes
//   L2           at window 384 / 896 / 1408: 40 / 33 / 32 bytes a cycle and multiprocessor at the tensor
//                cores' full rate, with 128 queries instead of 192 49 / 43 / 41; at window 384 the profiler
//                saw L2 at 79% (2026-11-22, H200)
//   smem         q of this and the next item 96 KB (reused by the output), k and v in four stages 128: 224
//                KB
//   registers    y 64, scores 32, p 16: 141 of 152; no spills
//
// Softmax: a running maximum took as long as the exponentials. Instead the first tile gives a base 2^8
// above its weights; the AND of the signs of all exponents says, at half an instruction each, whether a
// score has exceeded the base, and a warp with such a score raises it. Weights of 2^-8 and below are as
// exact in bf16 and fp32 as those up to 1.
// Tiles lie on multiples of 192 and 64 tokens wherever documents begin and end: the keys that a query sees
// are one interval. Dynamic tile scheduler: an atomic counter, items in the table's order. Deterministic.
//
// Slower (H200, 2026-11-22): gates in the consumers' epilogue (9 us of 85 at window 384); ordered issue
// among warpgroups; the next item's first scores before the epilogue; tiles by span instead of by document;
// acquiring the next item while this one's keys are being loaded.
#include "llmc/cuda/attention/sm90_forward_producer.cuh"

namespace attention_queries
{

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float SLACK =
    8; // powers of two by which weights are smaller than they might be, so that scores may grow

#if HOPPER

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// s (64, KEYS) = q (64, QK) k (KEYS, QK)^T; q, k: shared-memory descriptors
template <int QK> static __device__ __forceinline__ void score(float (&s)[KEYS / 2], uint64_t q, uint64_t k)
{
#pragma unroll
    for (int i = 0; i < QK / 16; i++)
        wgmma<floatX, 64, false, false>(s, descriptor_advance(q, i / 4 * QUERY_PANEL_BYTES + i % 4 * 32),
                                        descriptor_advance(k, i / 4 * KEY_PANEL_BYTES + i % 4 * 32), i > 0);
}

// y (64, 128) += p (64, KEYS) v (KEYS, 128); p: packed A fragments
static __device__ __forceinline__ void add_values(float (&y)[64], const uint32_t (&p)[KEYS / 4], uint64_t v,
                                                  bool accumulate)
{
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma_rs<floatX, true>(y, p + 4 * i, descriptor_advance(v, i * STEP_BYTES), accumulate || i > 0);
}

// Softmax state of the thread's two queries. A weight is 2^(score * scale_log2 - base).
struct Softmax {
    float base[2], sum[2]; // sums of weights over the thread's own columns only
    int reach[2];          // keys that the query sees: itself and those before it
};

// Masks keys that a query does not see.  behind: the thread's first query minus the key of its first column
static __device__ __forceinline__ void mask(float (&s)[KEYS / 2], const Softmax &m, int behind)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        if ((unsigned)(behind + i / 2 % 2 * 8 - i / 4 * 8 - i % 2) >= (unsigned)m.reach[i / 2 % 2])
            s[i] = -INFINITY;
}

static __device__ __forceinline__ void find_maxima(float (&top)[2], const float (&s)[KEYS / 2])
{
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++)
        top[r] = quad_max(top[r]);
}

// Raises the base of rows with exponents >= 0; shrink: factor for the sums so far.
static __device__ __forceinline__ void raise_base(float (&x)[KEYS / 2], Softmax &m, float (&shrink)[2])
{
    float top[2], rise[2];
    find_maxima(top, x);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rise[r] = top[r] >= 0 ? top[r] + SLACK : 0;
        shrink[r] = exp2_approx(-rise[r]);
        m.base[r] += rise[r];
        m.sum[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
        x[i] -= rise[i / 2 % 2];
}

// (In order: no exponential may wait for the WGMMAs that are in flight.)
static __device__ __forceinline__ void exponentiate(float (&x)[KEYS / 2], float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
        sum[i / 2 % 2] += x[i];
    }
}

// Scores to weights. Returns true when the warp's sums so far must be multiplied by shrink.
static __device__ __forceinline__ bool softmax_weights(float (&s)[KEYS / 2], Softmax &m, float (&shrink)[2],
                                                       float scale_log2)
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
        exponentiate(s, m.sum);
    } else
        exponentiate(s, m.sum);
    return raise;
}

static __device__ __forceinline__ void pack(uint32_t (&p)[KEYS / 4], const float (&s)[KEYS / 2])
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        p[i] = pack2(s[2 * i], s[2 * i + 1]);
}

// State of a consumer warpgroup.
struct Consumer {
    int group, thread, lane; // thread of the block
    int row;                 // the thread's first of the item's queries
    uint64_t k, v;           // descriptors of the first stage
    int used;                // slot of the previous item; -1: none
    PipelineState<STAGES> ring;
    PipelineState<2> slots;
};

static __device__ __forceinline__ void release(uint64_t *empty, const Consumer &w)
{
    if (w.lane == 0)
        mbarrier_arrive(empty);
}

// Releases the previous item's slot once TMA has read the output from it.
static __device__ __forceinline__ void release_slot(const Shared &m, const Consumer &w)
{
    if (w.used < 0 || w.thread % WARPGROUP)
        return;
    tma_store_wait_read();
    mbarrier_arrive(m.item_empty(w.used));
}

// Skips tiles that only other warpgroups need.
static __device__ __forceinline__ void skip_tiles(const Shared &m, Consumer &w, int tiles)
{
    for (; tiles > 0; tiles--, w.ring.advance()) {
        mbarrier_wait(m.k_full(w.ring.stage), w.ring.parity);
        release(m.k_empty(w.ring.stage), w);
        mbarrier_wait(m.v_full(w.ring.stage), w.ring.parity);
        release(m.v_empty(w.ring.stage), w);
    }
}

// Weights of the item's first tile, which has a key for every query.
template <int QK>
static __device__ __forceinline__ void first_tile(float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 4],
                                                  Softmax &soft, const Shared &m, Consumer &w, uint64_t q,
                                                  int behind, const Arguments &a)
{
    const Item *item = m.item(w.slots.stage);
    float shrink[2];
    mbarrier_wait(m.k_full(w.ring.stage), w.ring.parity);
    wgmma_fence();
    score<QK>(s, q, descriptor_advance(w.k, w.ring.stage * STAGE_BYTES));
    wgmma_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = w.row + 8 * r;
        soft.reach[r] = item->query0 + row + 1 - first_key(item, item->query0, row, a.window);
        soft.sum[r] = 0;
    }
    wgmma_wait<0>();
    release(m.k_empty(w.ring.stage), w);
    release_slot(m, w);
    mask(s, soft, behind);
    find_maxima(soft.base, s);
#pragma unroll
    for (int r = 0; r < 2; r++)
        soft.base[r] = soft.base[r] * a.scale_log2 + SLACK;
    softmax_weights(s, soft, shrink, a.scale_log2);
    pack(p, s);
}

// Issues the next tile's scores and this tile's p v; softmax of the scores overlaps with p v. masked: some
// query does not see some key
template <int QK>
static __device__ __forceinline__ void
next_tile(float (&y)[64], float (&s)[KEYS / 2], uint32_t (&p)[KEYS / 4], Softmax &soft, const Shared &m,
          Consumer &w, uint64_t q, bool accumulate, bool masked, int behind, float scale_log2)
{
    int before = w.ring.stage;
    float shrink[2];
    mbarrier_wait(m.v_full(before), w.ring.parity);
    w.ring.advance();
    mbarrier_wait(m.k_full(w.ring.stage), w.ring.parity);
    wgmma_fence();
    score<QK>(s, q, descriptor_advance(w.k, w.ring.stage * STAGE_BYTES));
    wgmma_commit();
    add_values(y, p, descriptor_advance(w.v, before * STAGE_BYTES), accumulate);
    wgmma_commit();
    wgmma_wait<1>(); // the scores
    release(m.k_empty(w.ring.stage), w);
    if (masked)
        mask(s, soft, behind);
    bool raised = softmax_weights(s, soft, shrink, scale_log2);
    wgmma_wait<0>();
    release(m.v_empty(before), w);
    if (raised) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            y[i] *= shrink[i / 2 % 2];
    }
    pack(p, s);
}

// Stores the rows of a head through the smem of their q, which all warps of the warpgroup have read.  y:
// before the factors
static __device__ __forceinline__ void store_rows(uint8_t *staging, const float (&y)[64],
                                                  const float (&factor)[2], const Consumer &w,
                                                  const CUtensorMap *out, int column, int row)
{
    int my_row = w.thread % WARPGROUP / WARP * 16 + w.lane % 16;
    named_barrier_sync(1 + w.group, WARPGROUP);
    uint32_t address = shared_address(staging) + my_row * 128;
#pragma unroll
    for (int g = 0; g < WIDTH / 8; g += 2) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = pack2(y[4 * g + 2 * i] * factor[i % 2], y[4 * g + 2 * i + 1] * factor[i % 2]);
        stmatrix_x4(address + g / 8 * QUERY_PANEL_BYTES + ((g % 8 + w.lane / 16 ^ w.lane % 8) << 4), x);
    }
    fence_proxy_async_shared();
    named_barrier_sync(1 + w.group, WARPGROUP);
    if (w.thread % WARPGROUP)
        return;
    for (int p = 0; p < 2; p++)
        tma_store_2d(out, staging + p * QUERY_PANEL_BYTES, column + p * PANEL, row);
    tma_store_commit();
}

// The last p v, lse, and the gated output rows.
static __device__ __forceinline__ void finish_rows(float (&y)[64], const uint32_t (&p)[KEYS / 4],
                                                   const Softmax &soft, const Shared &m, Consumer &w,
                                                   bool accumulate, const CUtensorMap *out,
                                                   const Arguments &a)
{
    const Item *item = m.item(w.slots.stage);
    mbarrier_wait(m.v_full(w.ring.stage), w.ring.parity);
    wgmma_fence();
    add_values(y, p, descriptor_advance(w.v, w.ring.stage * STAGE_BYTES), accumulate);
    wgmma_commit();
    mbarrier_wait(m.gated(w.slots.stage), w.slots.parity);
    float factor[2];
    int query0 = item->query0, head = item->head;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(soft.sum[r]);
        int query = query0 + w.row + 8 * r;
        factor[r] = item->gate[w.row + 8 * r] / sum;
        if (w.lane % 4 == 0 && query < a.N)
            a.lse[(int64_t)query * a.H + head] = (soft.base[r] + log2f(sum)) * LN2;
    }
    wgmma_wait<0>();
    release(m.v_empty(w.ring.stage), w);
    w.ring.advance();
    store_rows(m.q(w.slots.stage, w.group), y, factor, w, out, head * WIDTH,
               query0 + w.group * WARPGROUP_QUERIES);
}

template <int QK>
static __device__ __forceinline__ void consume(const Shared &m, const Arguments &a, int group,
                                               const CUtensorMap *out)
{
    Consumer w = {.group = group, .used = -1};
    asm volatile("mov.u32 %0, %%tid.x;"
                 : "=r"(w.thread)); // the compiler would read %tid in each iteration and wait for it
    w.lane = w.thread % WARP;
    w.row = group * WARPGROUP_QUERIES + w.thread % WARPGROUP / WARP * 16 + w.lane / 4;
    w.k = smem_descriptor(m.k(0), 0);
    w.v = smem_descriptor(m.v(0), KEY_PANEL_BYTES);
    for (;; w.slots.advance()) {
        const Item *item = m.item(w.slots.stage);
        mbarrier_wait(m.item_full(w.slots.stage), w.slots.parity);
        int n = item->first[group], last = item->last[group], whole = item->whole[group], end = item->end;
        if (end == 0)
            break;
        skip_tiles(m, w, n);
        int behind = w.row - QUERIES + (n + 1) * KEYS -
                     2 * (w.lane % 4); // first query minus the key of its first column
        uint64_t q = smem_descriptor(m.q(w.slots.stage, group), 0);
        float s[KEYS / 2], y[64];
        uint32_t p[KEYS / 4];
        Softmax soft;
        first_tile<QK>(s, p, soft, m, w, q, behind, a);
        bool accumulate = false;
#pragma unroll 1
        for (; n < last; n++, accumulate = true)
            next_tile<QK>(y, s, p, soft, m, w, q, accumulate, n + 1 > whole, behind += KEYS, a.scale_log2);
        finish_rows(y, p, soft, m, w, accumulate, out, a);
        skip_tiles(m, w, end - 1 - last);
        w.used = w.slots.stage;
    }
    if (w.thread % WARPGROUP == 0)
        tma_store_wait();
}

#endif

template <int QK>
__global__ void __launch_bounds__(THREADS, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap k,
                   const __grid_constant__ CUtensorMap v, const __grid_constant__ CUtensorMap y,
                   const __grid_constant__ Arguments a)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared m = {shared};
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < 2; i++) {
            mbarrier_init(m.item_full(i), WARP);
            mbarrier_init(m.item_empty(i), CONSUMERS);
            mbarrier_init(m.described(i), WARP);
            mbarrier_init(m.gated(i), GATE_WARPS * WARP);
        }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.k_full(i), 1);
            mbarrier_init(m.k_empty(i), CONSUMERS * WARPGROUP / WARP);
            mbarrier_init(m.v_full(i), 1);
            mbarrier_init(m.v_empty(i), CONSUMERS * WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARP, 0),
        group = warp / (WARPGROUP / WARP); // warp-uniform
    if (group == CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        warp -= CONSUMERS * WARPGROUP / WARP;
        if (warp == 0)
            produce<QK>(m, &k, &v);
        else if (warp == 1)
            schedule_items<QK>(m, a, &q);
        else
            compute_gates(m, a, warp - 2);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<QK>(m, a, group, &y);
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

template <int QK> static void launch(const AttentionCall *c, const Arguments &a, Stream s)
{
    using attention_sm90::keys_map;
    using attention_sm90::rows_map;
    CUtensorMap q = keys_map<QK>(c->q, c, WARPGROUP_QUERIES), k = keys_map<QK>(c->k, c, KEYS),
                v = rows_map(c->v, c, KEYS), y = rows_map(c->y, c, WARPGROUP_QUERIES);
    unsigned blocks = (unsigned)min_i64(a.items, device_state.sms);
    forward_kernel<QK><<<blocks, THREADS, SHARED_BYTES, s>>>(q, k, v, y, a);
    CHECK_LAUNCH();
}

} // namespace attention_queries

void attention_sm90::prepare_forward(void)
{
    using namespace attention_queries;
    CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<WIDTH>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    SHARED_BYTES));
    CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<NARROW>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    SHARED_BYTES));
}

void attention_sm90_forward(const AttentionCall *c, Stream s)
{
    using namespace attention_queries;
    assert(c->scale > 0); // the maximum is taken before scaling
    assert(attention_sm90_takes(c->qk, c->e));
    Arguments a = {.h = c->h,
                   .gate_w = c->gate_w,
                   .gate_inputs = c->gate_inputs,
                   .lse = c->lse,
                   .progress = (attention_sm90::Progress *)c->counters,
                   .cu = c->cu,
                   .order = c->query_tiles,
                   .scale_log2 = c->scale * LOG2E,
                   .window = c->window < c->N ? c->window : c->N,
                   .slots = c->slots,
                   .N = c->N,
                   .H = c->H,
                   .items = (int)ceil_div(c->N, QUERIES) * c->H};
    if (c->qk == WIDTH)
        launch<WIDTH>(c, a, s);
    else
        launch<attention_sm90::NARROW>(c, a, s);
}
