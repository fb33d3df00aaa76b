// Attention backward by the program's own kernels. Where cuDNN adds parts of dq in any order, here every
// gradient has one CTA that sums it in a fixed order: one pass over the queries of 64 keys for dk and dv, one
// over the keys of 128 queries for dq.
//
// With p = exp(s - lse), r = rowsum(dy * y) (given), ds = p * (dy v^T - r):   dk = scale ds^T q; dv = p^T dy;
// dq = scale ds k. In the first pass k and v stay in shared memory, q and dy pass through a ring, 32 rows a
// stage, and everything appears transposed, as its rows are keys. It stores ds for the second, which has one
// product left. So there are 5 products of tiles, as with sums of dq in any order, for 4 bytes of memory
// traffic a pair of query and key. A launch computes as many heads as the memory for ds takes.
//
// What bounds the first is reading operands from shared memory: 16 x 16 of b for two products of 16 x 8 take
// as long as four. So a warp keeps its 16 rows of k in registers, but for heads wider than 128.
//
// ds of a head: for each tile of 64 keys its steps of 32 queries, from the tile's first key on; of a step the
// four blocks of 16 keys, in each two blocks of 16 queries: 32 x 16 bytes, as lanes take them for the left
// operand of ds k. Where no query of the 32 sees a key of the 16, nothing is written, and nothing is read.
#include "llmc/cuda/attention/sm80_attention.cuh"

namespace attention
{

enum { STEP = 32, STEP_BLOCKS = STEP / 8 };

// ---- memory for ds ---------------------------------------------------------------------------------------

enum { KEY_BLOCKS = TILE / ROWS_PER_WARP, QUERY_BLOCKS = STEP / ROWS_PER_WARP };

struct DsScratch {
    uint4 *ds; // (heads of a launch, tiles of keys, steps, KEY_BLOCKS, QUERY_BLOCKS, WARP)
    int steps; // of a tile of keys, at most
    int first_head;
};

constexpr int64_t DS_BYTES = 512 << 20; // of all heads that are computed at once, if one does not need more

static int most_steps(int N, int reach) { return (int)ceil_div(min_i64(N, (int64_t)reach + TILE), STEP); }

static int64_t head_bytes(int N, int reach)
{
    return ceil_div(N, TILE) * most_steps(N, reach) * (int64_t)(TILE * STEP * sizeof(floatX));
}

// The lane's part of the first block of 16 queries, of the CTA's head. key, query: the first, multiples of 16
// and of 32.
static __device__ __forceinline__ uint4 *ds_of(const DsScratch &d, int key, int query, int N)
{
    int tile = key / TILE, step = (query - tile * TILE) / STEP, block = key % TILE / ROWS_PER_WARP;
    int64_t tiles = (int64_t)blockIdx.x * ((N + TILE - 1) / TILE) + tile;
    return d.ds + ((tiles * d.steps + step) * KEY_BLOCKS + block) * (QUERY_BLOCKS * WARP) +
           threadIdx.x % WARP;
}

// s: scores to weights; dp: gradients of weights to those of scores, without the scale. of_query: lse in
// powers of two and r, of element i of block n.
template <int NB, typename F>
static __device__ __forceinline__ void gradients_of_scores(float (&s)[NB][4], float (&dp)[NB][4],
                                                           float scale_log2, F of_query)
{
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 query = of_query(n, i);
            s[n][i] = exp2_approx(s[n][i] * scale_log2 - query.x);
            dp[n][i] = s[n][i] * (dp[n][i] - query.y);
        }
}

// Scores that are not to be seen become -infinity: weights of 0.  seen: of the lane's two rows
template <int NB>
static __device__ __forceinline__ void mask_scores(float (&s)[NB][4], const Span *row, int first)
{
    int column = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        Span seen = row[8 * r];
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = column + 8 * n + i;
                s[n][2 * r + i] = at >= seen.lo && at < seen.hi ? s[n][2 * r + i] : -INFINITY;
            }
    }
}

// ---- dk, dv and ds ---------------------------------------------------------------------------------------

// Above a width of 128 accumulators of dk and dv no longer fit a warp's registers: two warps share 16 rows,
// half of the width each. There k does not fit either, and is read as v is.
template <int E> constexpr int SPLIT = E > 128 ? 2 : 1;
template <int E> constexpr int KEY_THREADS = TILE_THREADS *SPLIT<E>;
enum { STAGES = 2 };

// k, v; two steps of q and dy.
template <int QK, int E> constexpr int keys_bytes()
{
    return tile_bytes<QK>(TILE + STAGES * STEP) + tile_bytes<E>(TILE + STAGES * STEP);
}

// Of a step's queries: lse in powers of two, and r.
struct QueryStage {
    float2 of[STEP];
};

// The warp's 16 rows of a as left operands.
template <int E>
static __device__ __forceinline__ void load_left(uint32_t (&left)[E / 16][4], const floatX *a)
{
    int lane = threadIdx.x % WARP;
    const floatX *row = a + (lane & 15) * PITCH<E> + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < E; k += 16)
        ldmatrix(left[k / 16], row + k);
}

// s = a b^T, a as load_left leaves it.
template <int E, int NB>
static __device__ __forceinline__ void product_left(float (&s)[NB][4], const uint32_t (&left)[E / 16][4],
                                                    const floatX *b)
{
    int lane = threadIdx.x % WARP;
    const floatX *b_row = b + ((lane & 7) + (lane >> 4) * 8) * PITCH<E> + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int n = 0; n < NB; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int k = 0; k < E; k += 16)
#pragma unroll
        for (int n = 0; n < NB; n += 2) {
            uint32_t right[4];
            ldmatrix(right, b_row + n * 8 * PITCH<E> + k);
            mma(s[n], left[k / 16], right[0], right[1]);
            mma(s[n + 1], left[k / 16], right[2], right[3]);
        }
}

// ds of the warp's keys and a step of queries, queries as rows.
static __device__ __forceinline__ void store_transpose(uint4 *to, const float (&ds)[STEP_BLOCKS][4])
{
#pragma unroll
    for (int n = 0; n < STEP_BLOCKS; n += 2) {
        const uint32_t fragment[4] = {pack2(ds[n][0], ds[n][1]), pack2(ds[n][2], ds[n][3]),
                                      pack2(ds[n + 1][0], ds[n + 1][1]), pack2(ds[n + 1][2], ds[n + 1][3])};
        to[n / 2 * WARP] = transpose_fragment(fragment);
    }
}

template <int QK, int E>
static __device__ __forceinline__ void load_stage(floatX *stage, QueryStage *queries, int first, int head,
                                                  const AttentionCall &c)
{
    const AttentionCall keys = call_of_keys<QK, E>(c);
    load_tile<QK, STEP, KEY_THREADS<E>>(stage, c.q + head * keys.e, first, keys);
    load_tile<E, STEP, KEY_THREADS<E>>(stage + STEP * PITCH<QK>, c.dy + head * c.e, first, c);
    int t = first + (int)threadIdx.x;
    int64_t at = (int64_t)t * c.H + head;
    if (threadIdx.x < STEP)
        queries->of[threadIdx.x] =
            t < c.N ? make_float2(c.lse[at] * LOG2E, c.row_sums[at]) : make_float2(0, 0);
}

template <int QK, int E>
__global__ void __launch_bounds__(KEY_THREADS<E>)
    attention_backward_keys_kernel(AttentionCall c, DsScratch scratch)
{
    constexpr int NT = KEY_THREADS<E>, K_COLUMNS = QK / SPLIT<E>, V_COLUMNS = E / SPLIT<E>,
                  STAGE = STEP * (PITCH<QK> + PITCH<E>);
    constexpr bool LEFT = SPLIT<E> == 1;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ QueryStage queries[STAGES];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *k = shared, *v = k + TILE * PITCH<QK>, *ring = v + TILE * PITCH<E>;
    int head = scratch.first_head + blockIdx.x, first = first_row<TILE>(c.reaching_keys),
        part = threadIdx.x / TILE_THREADS, warp_row = threadIdx.x % TILE_THREADS / WARP * ROWS_PER_WARP;
    if (first >= c.N)
        return;
    load_tile<QK, TILE, NT>(k, c.k + head * keys.e, first, keys);
    load_tile<E, TILE, NT>(v, c.v + head * c.e, first, c);
    commit_loads();
    find_spans<true>(span, first, c);
    wait_loads<0>();
    __syncthreads();
    WarpSpan warp = warp_span(span, warp_row, ROWS_PER_WARP, first, c.N);
    int other = span[0].lo, end = span[min((int)TILE, c.N - first) - 1].hi;
    if (end - other > scratch.steps * STEP)
        __trap(); // a longer reach than was reserved: ds would be written beyond its memory
    load_stage<QK, E>(ring, &queries[0], other, head, c);
    commit_loads();
    uint32_t left[LEFT ? QK / 16 : 1][4];
    if constexpr (LEFT)
        load_left<QK>(left, k + warp_row * PITCH<QK>);
    float dk[K_COLUMNS / 8][4] = {}, dv[V_COLUMNS / 8][4] = {};
    for (int n = 0; other < end; n ^= 1, other += STEP) {
        wait_loads<0>();
        __syncthreads(); // this stage is here, and all are done with the other
        if (other + STEP < end)
            load_stage<QK, E>(ring + (n ^ 1) * STAGE, &queries[n ^ 1], other + STEP, head, c);
        commit_loads();
        if (other >= warp.hi || other + STEP <= warp.lo)
            continue;
        const floatX *q = ring + n * STAGE, *dy = q + STEP * PITCH<QK>;
        float s[STEP_BLOCKS][4], dp[STEP_BLOCKS][4];
        if constexpr (LEFT)
            product_left<QK>(s, left, q);
        else
            product_rows<QK>(s, k + warp_row * PITCH<QK>, q);
        product_rows<E>(dp, v + warp_row * PITCH<E>, dy);
        if (other < warp.all_lo || other + STEP > warp.all_hi)
            mask_scores(s, span + warp_row + threadIdx.x % WARP / 4, other);
        gradients_of_scores(s, dp, c.scale * LOG2E, [&](int block, int i) {
            return queries[n].of[8 * block + threadIdx.x % 4 * 2 + i % 2];
        });
        if (part == 0)
            store_transpose(ds_of(scratch, first + warp_row, other, c.N), dp);
        product_weights<E>(dv, s, dy + part * V_COLUMNS);
        product_weights<QK>(dk, dp, q + part * K_COLUMNS);
    }
    store_rows(c.dk + head * keys.e, dk, first + warp_row, part * K_COLUMNS, c.scale, c.scale, keys);
    store_rows(c.dv + head * c.e, dv, first + warp_row, part * V_COLUMNS, 1, 1, c);
}

// ---- dq --------------------------------------------------------------------------------------------------

// Blocks of 16 queries a warp.
template <int E> constexpr int ROW_BLOCKS = E <= 128 ? 2 : 1;
template <int E> constexpr int QUERIES = TILE *ROW_BLOCKS<E>;
template <int QK> constexpr int queries_bytes() { return tile_bytes<QK>(STAGES * STEP); } // k

// From `key` on, ds of the warp's queries, the first of which is `row`.
template <int MB>
static __device__ __forceinline__ void load_ds(uint32_t (&left)[MB][4], const DsScratch &scratch, int key,
                                               int row, int N)
{
    const uint4 *from = ds_of(scratch, key, row / STEP * STEP, N) + row % STEP / ROWS_PER_WARP * WARP;
#pragma unroll
    for (int m = 0; m < MB; m++) {
        uint4 block = from[m * WARP];
        left[m][0] = block.x;
        left[m][1] = block.y;
        left[m][2] = block.z;
        left[m][3] = block.w;
    }
}

template <int QK, int E>
__global__ void __launch_bounds__(TILE_THREADS)
    attention_backward_queries_kernel(AttentionCall c, DsScratch scratch)
{
    constexpr int MB = ROW_BLOCKS<E>, ROWS = QUERIES<E>, K_STEP = STEP * PITCH<QK>;
    extern __shared__ __align__(16) floatX ring[];
    __shared__ Span span[ROWS];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    int head = scratch.first_head + blockIdx.x, first = first_row<ROWS>(c.reaching_queries),
        warp_row = threadIdx.x / WARP * (MB * ROWS_PER_WARP);
    if (first >= c.N)
        return;
    const floatX *k_head = c.k + head * keys.e;
    find_spans<false>(span, first, c);
    __syncthreads();
    WarpSpan warp = warp_span(span, warp_row, MB * ROWS_PER_WARP, first, c.N);
    int other = span[0].lo / STEP * STEP, end = span[min(ROWS, c.N - first) - 1].hi,
        key = warp.lo / ROWS_PER_WARP * ROWS_PER_WARP;
    load_tile<QK, STEP, TILE_THREADS>(ring, k_head, other, keys);
    commit_loads();
    float dq[MB][QK / 8][4] = {};
    uint32_t left[MB][4] = {}, next[MB][4] = {};
    if (key < warp.hi)
        load_ds(next, scratch, key, first + warp_row, c.N);
    for (int n = 0; other < end; n ^= 1, other += STEP) {
        wait_loads<0>();
        __syncthreads(); // this step's k is here, and all are done with the one before
        if (other + STEP < end)
            load_tile<QK, STEP, TILE_THREADS>(ring + (n ^ 1) * K_STEP, k_head, other + STEP, keys);
        commit_loads();
        for (; key < min(warp.hi, other + STEP); key += ROWS_PER_WARP) {
            memcpy(left, next, sizeof left);
            if (key + ROWS_PER_WARP < warp.hi) // while the tensor cores work
                load_ds(next, scratch, key + ROWS_PER_WARP, first + warp_row, c.N);
            product_packed<QK>(dq, left, ring + n * K_STEP + (key - other) * PITCH<QK>);
        }
    }
#pragma unroll
    for (int m = 0; m < MB; m++)
        store_rows(c.dq + head * keys.e, dq[m], first + warp_row + m * ROWS_PER_WARP, 0, c.scale, c.scale,
                   keys);
}

// ---- launch ----------------------------------------------------------------------------------------------

template <int QK, int E> static bool prepare(Error *error)
{
    constexpr int of_queries = queries_bytes<QK>(), of_keys = keys_bytes<QK, E>();
    if (allow_shared_memory((const void *)attention_backward_queries_kernel<QK, E>, of_queries) &&
        allow_shared_memory((const void *)attention_backward_keys_kernel<QK, E>, of_keys))
        return true;
    return error_set(error,
                     "attention backward with heads of width up to %d needs %d bytes of shared memory in a "
                     "CTA: too much for this GPU",
                     E, of_keys);
}

template <int ROWS> static dim3 ctas_of_heads(const AttentionCall *c, int heads)
{
    dim3 ctas = ctas_of<ROWS>(c);
    ctas.x = (unsigned)heads;
    return ctas;
}

// As many heads at once as the memory for ds takes.
template <int QK, int E> static void launch(const AttentionCall *c, Stream s)
{
    int64_t most = min_i64(c->H, (int64_t)c->ds_bytes / head_bytes(c->N, c->reach));
    assert(most >= 1);
    int launches = (int)ceil_div(c->H, most), heads = (int)ceil_div(c->H, launches);
    DsScratch scratch = {(uint4 *)c->ds, most_steps(c->N, c->reach), 0};
    for (; scratch.first_head < c->H; scratch.first_head += heads) {
        int now = min(heads, c->H - scratch.first_head);
        attention_backward_keys_kernel<QK, E>
            <<<ctas_of_heads<TILE>(c, now), KEY_THREADS<E>, keys_bytes<QK, E>(), s>>>(*c, scratch);
        attention_backward_queries_kernel<QK, E>
            <<<ctas_of_heads<QUERIES<E>>(c, now), TILE_THREADS, queries_bytes<QK>(), s>>>(*c, scratch);
        CHECK_LAUNCH();
    }
}

} // namespace attention

size_t attention_sm80_ds_bytes(int N, int H, int reach)
{
    int64_t each = attention::head_bytes(N, reach);
    return (size_t)min_i64(H * each, max_i64(each, attention::DS_BYTES));
}

bool attention_sm80_prepare_backward(int qk, int e, Error *error)
{
    using namespace attention;
    return with_widths(qk, e, [=](auto w) { return prepare<w.QK, w.E>(error); });
}

void attention_sm80_backward(const AttentionCall *c, Stream s)
{
    using namespace attention;
    with_widths(c->qk, c->e, [=](auto w) { launch<w.QK, w.E>(c, s); });
}
