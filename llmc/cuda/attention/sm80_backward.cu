// Attention backward by the program's own kernels. Where cuDNN adds shares of dq as they come, here every
// gradient has one block that sums it in a fixed order: one pass over the keys of 128 queries for dq, one
// over the queries of 64 keys for dk and dv. The price is that scores and their gradients are computed twice:
// 7 products of tiles instead of 5.
//
// With p = exp(s - lse), r = rowsum(dy * y) (given), ds = p * (dy v^T - r):   dq = scale ds k;   dk = scale
// ds^T q; dv = p^T dy. In both passes the rows stay (q and dy, or k and v), the other side's two tensors
// stream by, 32 rows at a time. Rows are queries in the one and keys in the other, so in the second
// everything appears transposed.
//
// What bounds them is reading operands from shared memory: 16 x 16 of b for two products of 16 x 8 take as
// long as four. So a warp of the first pass has 32 rows, and one of the second keeps its 16 rows of k in
// registers.
#include "llmc/cuda/attention/sm80_attention.cuh"

namespace attention
{

enum { STEP = 32, STEP_BLOCKS = STEP / 8 };

// s: scores to weights; dp: gradients of weights to those of scores, without the scale. base, row_sum: of
// element i of block n.
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

// ---- dq --------------------------------------------------------------------------------------------------

// Blocks of 16 queries a warp.
template <int E> constexpr int ROW_BLOCKS = E <= 128 ? 2 : 1;
template <int E> constexpr int QUERIES = TILE *ROW_BLOCKS<E>;

// q, dy; two steps of k, one of v.
template <int QK, int E> constexpr int queries_bytes()
{
    return tile_bytes<QK>(QUERIES<E> + 2 * STEP) + tile_bytes<E>(QUERIES<E> + STEP);
}

template <int QK, int E>
__global__ void __launch_bounds__(TILE_THREADS) attention_backward_queries_kernel(AttentionCall c)
{
    constexpr int MB = ROW_BLOCKS<E>, ROWS = QUERIES<E>, K_STEP = STEP * PITCH<QK>;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[ROWS];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *q = shared, *dy = q + ROWS * PITCH<QK>, *v = dy + ROWS * PITCH<E>, *k = v + STEP * PITCH<E>;
    int head = blockIdx.x, first = first_row<ROWS>(c.reaching_queries),
        warp_row = threadIdx.x / WARP * (MB * ROWS_PER_WARP), lane_row = warp_row + threadIdx.x % WARP / 4;
    if (first >= c.N)
        return;
    const floatX *k_head = c.k + head * keys.e, *v_head = c.v + head * c.e;
    load_tile<QK, ROWS, TILE_THREADS>(q, c.q + head * keys.e, first, keys);
    load_tile<E, ROWS, TILE_THREADS>(dy, c.dy + head * c.e, first, c);
    find_spans<false>(span, first, c);
    __syncthreads();
    WarpSpan warp = warp_span(span, warp_row, MB * ROWS_PER_WARP, first, c.N);
    int other = span[0].lo, end = span[min(ROWS, c.N - first) - 1].hi;
    load_tile<QK, STEP, TILE_THREADS>(k, k_head, other, keys);
    load_tile<E, STEP, TILE_THREADS>(v, v_head, other, c);
    commit_loads();
    float2 query[MB][2]; // lse in powers of two, r
#pragma unroll
    for (int b = 0; b < 2 * MB; b++) {
        int t = first + lane_row + 8 * b;
        int64_t at = (int64_t)t * c.H + head;
        query[b / 2][b % 2] = t < c.N ? make_float2(c.lse[at] * LOG2E, c.row_sums[at]) : make_float2(0, 0);
    }
    float dq[MB][QK / 8][4] = {};
    for (int n = 0; other < end; n ^= 1, other += STEP) {
        float s[MB][STEP_BLOCKS][4], dp[MB][STEP_BLOCKS][4];
        bool mine = other < warp.hi && other + STEP > warp.lo, more = other + STEP < end;
        wait_loads<0>();
        __syncthreads(); // this step's k and v are here, and all are done with the k before
        if (more)
            load_tile<QK, STEP, TILE_THREADS>(k + (n ^ 1) * K_STEP, k_head, other + STEP, keys);
        if (mine) {
            product_rows<QK>(s, q + warp_row * PITCH<QK>, k + n * K_STEP);
            product_rows<E>(dp, dy + warp_row * PITCH<E>, v);
        }
        __syncthreads(); // all are done with v
        if (more)
            load_tile<E, STEP, TILE_THREADS>(v, v_head, other + STEP, c);
        commit_loads();
        if (!mine)
            continue;
#pragma unroll
        for (int b = 0; b < MB; b++) {
            if (other < warp.all_lo || other + STEP > warp.all_hi)
                mask_scores(s[b], span + lane_row + b * ROWS_PER_WARP, other);
            gradients_of_scores(s[b], dp[b], c.scale * LOG2E, [&](int, int i) { return query[b][i / 2]; });
        }
        product_weights<QK>(dq, dp, k + n * K_STEP);
    }
#pragma unroll
    for (int b = 0; b < MB; b++)
        store_rows(c.dq + head * keys.e, dq[b], first + warp_row + b * ROWS_PER_WARP, 0, c.scale, c.scale,
                   keys);
}

// ---- dk and dv -------------------------------------------------------------------------------------------

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
__global__ void __launch_bounds__(KEY_THREADS<E>) attention_backward_keys_kernel(AttentionCall c)
{
    constexpr int NT = KEY_THREADS<E>, K_COLUMNS = QK / SPLIT<E>, V_COLUMNS = E / SPLIT<E>,
                  STAGE = STEP * (PITCH<QK> + PITCH<E>);
    constexpr bool LEFT = SPLIT<E> == 1;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ QueryStage queries[STAGES];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *k = shared, *v = k + TILE * PITCH<QK>, *ring = v + TILE * PITCH<E>;
    int head = blockIdx.x, first = first_row<TILE>(c.reaching_keys), part = threadIdx.x / TILE_THREADS,
        warp_row = threadIdx.x % TILE_THREADS / WARP * ROWS_PER_WARP;
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
        product_weights<E>(dv, s, dy + part * V_COLUMNS);
        product_weights<QK>(dk, dp, q + part * K_COLUMNS);
    }
    store_rows(c.dk + head * keys.e, dk, first + warp_row, part * K_COLUMNS, c.scale, c.scale, keys);
    store_rows(c.dv + head * c.e, dv, first + warp_row, part * V_COLUMNS, 1, 1, c);
}

// ---- launch ----------------------------------------------------------------------------------------------

template <int QK, int E> static bool prepare(Error *error)
{
    constexpr int of_queries = queries_bytes<QK, E>(), of_keys = keys_bytes<QK, E>();
    if (cudaFuncSetAttribute(attention_backward_queries_kernel<QK, E>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, of_queries) == cudaSuccess &&
        cudaFuncSetAttribute(attention_backward_keys_kernel<QK, E>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, of_keys) == cudaSuccess)
        return true;
    cudaGetLastError();
    return error_set(error,
                     "attention backward with heads of width up to %d needs %d bytes of shared memory in a "
                     "block: too much for this GPU",
                     E, of_queries > of_keys ? of_queries : of_keys);
}

template <int QK, int E> static void launch(const AttentionCall *c, Stream s)
{
    attention_backward_queries_kernel<QK, E>
        <<<ctas_of<QUERIES<E>>(c), TILE_THREADS, queries_bytes<QK, E>(), s>>>(*c);
    attention_backward_keys_kernel<QK, E><<<ctas_of<TILE>(c), KEY_THREADS<E>, keys_bytes<QK, E>(), s>>>(*c);
    CHECK_LAUNCH();
}

} // namespace attention

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
