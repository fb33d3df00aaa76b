// Attention backward by the program's own kernels, in two forms.
//
// With a fixed order of sums every gradient has one block that sums it: one pass over the keys of 128 queries
// for dq, one over the queries of 64 keys for dk and dv. The price is that scores and their gradients are
// computed twice: 7 products of tiles instead of 5.
//
// Without, the pass over the queries of 64 keys adds what they give to dq to fp32 sums in memory, by atomics,
// and a pass of its own rounds them: 6 bytes a number read and written, and zeros before. The gradients of
// the scores of all 64 keys go through shared memory, so that a warp has 16 queries and half of the columns.
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
            s[n][i] = power_of_two(s[n][i] * scale_log2 - query.x);
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
    int head = blockIdx.y, first = (gridDim.x - 1 - blockIdx.x) * ROWS,
        warp_row = threadIdx.x / WARP * (MB * ROWS_PER_WARP), lane_row = warp_row + threadIdx.x % WARP / 4;
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

// ---- dk and dv; and dq in sums ---------------------------------------------------------------------------

// Above a width of 128 accumulators of dk and dv no longer fit a warp's registers: two warps share 16 rows,
// half of the width each. There k does not fit either, and is read as v is.
template <int E> constexpr int SPLIT = E > 128 ? 2 : 1;
template <int E> constexpr int KEY_THREADS = TILE_THREADS *SPLIT<E>;
enum { STAGES = 2 };

// k, v; two steps of q and dy; with dq in sums the gradients of a step's scores, (TILE, STEP) in bf16.
template <int QK, int E> constexpr int keys_bytes(bool sums)
{
    return tile_bytes<QK>(TILE + STAGES * STEP) + tile_bytes<E>(TILE + STAGES * STEP) +
           (sums ? tile_bytes<STEP>(TILE) : 0);
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

// The warp's 16 rows of the gradients of scores, by keys.
static __device__ __forceinline__ void store_gradients(floatX *ds, const float (&dp)[STEP_BLOCKS][4],
                                                       int warp_row)
{
    int lane = threadIdx.x % WARP;
    floatX *to = ds + (warp_row + lane / 4) * PITCH<STEP> + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < STEP_BLOCKS; n++) {
        *(uint32_t *)(to + 8 * n) = pack2(dp[n][0], dp[n][1]);
        *(uint32_t *)(to + 8 * PITCH<STEP> + 8 * n) = pack2(dp[n][2], dp[n][3]);
    }
}

// sums += ds^T k, of the warp's 16 of the step's queries and its half of the columns.  ds (TILE, STEP); sums:
// the head's columns of token `first`
template <int QK>
static __device__ __forceinline__ void add_query_gradients(float *sums, const floatX *ds, const floatX *k,
                                                           int left, int pitch)
{
    constexpr int COLUMNS = QK / 2, BLOCKS = COLUMNS / 8, PAIRS = (BLOCKS + 1) / 2;
    static_assert(STEP == 2 * ROWS_PER_WARP && TILE_THREADS == 4 * WARP && COLUMNS % 8 == 0);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, query = warp / 2 * ROWS_PER_WARP,
        column = warp % 2 * COLUMNS;
    const floatX *a = ds + ((lane & 7) + (lane >> 4) * 8) * PITCH<STEP> + query + (lane >> 3 & 1) * 8;
    const floatX *b = k + (lane & 15) * PITCH<QK> + column + (lane >> 4) * 8;
    float dq[2 * PAIRS][4] = {}; // an odd number of blocks: one more, of columns that the row has or its pad
#pragma unroll
    for (int key = 0; key < TILE; key += 16) {
        uint32_t left_matrix[4], right[4];
        ldmatrix<true>(left_matrix, a + key * PITCH<STEP>);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            ldmatrix<true>(right, b + key * PITCH<QK> + 16 * j);
            mma(dq[2 * j], left_matrix, right[0], right[1]);
            mma(dq[2 * j + 1], left_matrix, right[2], right[3]);
        }
    }
    float *to = sums + (int64_t)(query + lane / 4) * pitch + column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = query + lane / 4 + i / 2 * 8;
        if (row >= left)
            continue;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
            atomicAdd(to + (int64_t)(i / 2 * 8) * pitch + 8 * j + i % 2, dq[j][i]);
    }
}

// SUMS: adds to c.dq_sum (N, H QK), too.
template <int QK, int E, bool SUMS>
__global__ void __launch_bounds__(KEY_THREADS<E>) attention_backward_keys_kernel(AttentionCall c)
{
    constexpr int NT = KEY_THREADS<E>, K_COLUMNS = QK / SPLIT<E>, V_COLUMNS = E / SPLIT<E>,
                  STAGE = STEP * (PITCH<QK> + PITCH<E>);
    constexpr bool LEFT = SPLIT<E> == 1;
    static_assert(LEFT || !SUMS);
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ QueryStage queries[STAGES];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *k = shared, *v = k + TILE * PITCH<QK>, *ring = v + TILE * PITCH<E>, *ds = ring + STAGES * STAGE;
    int head = blockIdx.y, first = blockIdx.x * TILE, part = threadIdx.x / TILE_THREADS,
        warp_row = threadIdx.x % TILE_THREADS / WARP * ROWS_PER_WARP;
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
        bool mine = other < warp.hi && other + STEP > warp.lo;
        const floatX *q = ring + n * STAGE, *dy = q + STEP * PITCH<QK>;
        float s[STEP_BLOCKS][4], dp[STEP_BLOCKS][4] = {};
        if (mine) {
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
        }
        if constexpr (SUMS)
            store_gradients(ds, dp, warp_row);
        if (mine) {
            product_weights<E>(dv, s, dy + part * V_COLUMNS);
            product_weights<QK>(dk, dp, q + part * K_COLUMNS);
        }
        if constexpr (SUMS) {
            __syncthreads(); // all rows of ds are there
            add_query_gradients<QK>(c.dq_sum + ((int64_t)other * c.H + head) * QK, ds, k, c.N - other,
                                    c.H * QK);
        }
    }
    store_rows(c.dk + head * keys.e, dk, first + warp_row, part * K_COLUMNS, c.scale, c.scale, keys);
    store_rows(c.dv + head * c.e, dv, first + warp_row, part * V_COLUMNS, 1, 1, c);
}

// Eight numbers a thread.
static __global__ void round_query_gradients_kernel(floatX *dq, const float *sums, float scale,
                                                    int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= vectors)
        return;
    float4 a = ((const float4 *)sums)[2 * v], b = ((const float4 *)sums)[2 * v + 1];
    const float f[8] = {a.x * scale, a.y * scale, a.z * scale, a.w * scale,
                        b.x * scale, b.y * scale, b.z * scale, b.w * scale};
    ((uint4 *)dq)[v] = pack8(f);
}

// ---- launch ----------------------------------------------------------------------------------------------

// Heads of the instances' very widths, up to 128: what is beyond of a tile's columns has no place in the
// sums.
template <int QK, int E> static bool adds_to_sums(int qk, int e) { return E <= 128 && qk == QK && e == E; }

template <int QK, int E> static bool prepare(Error *error)
{
    constexpr int of_queries = queries_bytes<QK, E>(), of_keys = keys_bytes<QK, E>(E <= 128);
    if (cudaFuncSetAttribute(attention_backward_queries_kernel<QK, E>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, of_queries) == cudaSuccess &&
        cudaFuncSetAttribute(attention_backward_keys_kernel<QK, E, false>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             keys_bytes<QK, E>(false)) == cudaSuccess &&
        cudaFuncSetAttribute(attention_backward_keys_kernel<QK, E, E <= 128>,
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
    enum { ROUND_THREADS = 256 };
    dim3 queries((unsigned)ceil_div(c->N, QUERIES<E>), (unsigned)c->H),
        keys((unsigned)ceil_div(c->N, TILE), (unsigned)c->H);
    if (c->dq_sum && !c->fixed_order && adds_to_sums<QK, E>(c->qk, c->e)) {
        int64_t n = (int64_t)c->N * c->H * QK;
        CUDA_CHECK(cudaMemsetAsync(c->dq_sum, 0, (size_t)n * sizeof(float), s));
        attention_backward_keys_kernel<QK, E, E <= 128>
            <<<keys, KEY_THREADS<E>, keys_bytes<QK, E>(E <= 128), s>>>(*c);
        round_query_gradients_kernel<<<(unsigned)ceil_div(n / 8, ROUND_THREADS), ROUND_THREADS, 0, s>>>(
            c->dq, c->dq_sum, c->scale, n / 8);
    } else {
        attention_backward_queries_kernel<QK, E><<<queries, TILE_THREADS, queries_bytes<QK, E>(), s>>>(*c);
        attention_backward_keys_kernel<QK, E, false>
            <<<keys, KEY_THREADS<E>, keys_bytes<QK, E>(false), s>>>(*c);
    }
    CHECK_LAUNCH();
}

} // namespace attention

bool attention_sm80_prepare_backward(int qk, int e, Error *error)
{
    using namespace attention;
    return with_widths(qk, e, [=](auto w) { return prepare<w.QK, w.E>(error); });
}

size_t attention_sm80_sums(int N, int H, int qk, int e)
{
    using namespace attention;
    bool sums = with_widths(qk, e, [=](auto w) { return adds_to_sums<w.QK, w.E>(qk, e); });
    return sums && !attention_has_fixed_order() ? (size_t)N * (size_t)H * (size_t)qk : 0;
}

void attention_sm80_backward(const AttentionCall *c, Stream s)
{
    using namespace attention;
    with_widths(c->qk, c->e, [=](auto w) { launch<w.QK, w.E>(c, s); });
}
