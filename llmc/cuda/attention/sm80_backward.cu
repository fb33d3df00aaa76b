// Attention backward by the program's own kernels. Where cuDNN adds shares of dq as they come, here every
// gradient has one block that sums it in a fixed order: one pass over the keys of 64 queries for dq, one over
// the queries of 64 keys for dk and dv. The price is that scores and their gradients are computed twice: 7
// products of tiles instead of 5.
//
// With p = exp(s - lse), r = rowsum(dy * y) (given), ds = scale p * (dy v^T - r):   dq = ds k;   dk = ds^T q;
// dv = p^T dy. The two passes are one kernel: its rows stay (q and dy, or k and v), the other side's two
// tensors stream by, 32 rows at a time through two stages. Rows are queries in the one and keys in the other,
// so in the second everything appears transposed.
#include "llmc/cuda/attention/sm80_attention.cuh"

namespace attention
{

enum { STEP = 32, STAGES = 2, STEP_BLOCKS = STEP / 8 };

// Above a width of 128, accumulators of dk and dv no longer fit a warp's registers: two warps share 16 rows,
// half of the width each.
template <int E, bool KEYS> constexpr int SPLIT = KEYS &&E > 128 ? 2 : 1;
template <int E, bool KEYS> constexpr int THREADS = TILE_THREADS *SPLIT<E, KEYS>;
template <int QK, int E> constexpr int backward_bytes()
{
    return tile_bytes<QK>(TILE) + tile_bytes<E>(TILE) + STAGES * (tile_bytes<QK>(STEP) + tile_bytes<E>(STEP));
}

// Of the streaming queries: lse in powers of two, and r.
struct QueryStage {
    float lse[STEP], row_sum[STEP];
};

// A stage is STEP rows of the other side's two tensors: scores are products with the first, of QK columns,
// gradients of weights with the second, of E.
template <int E> constexpr int STEP_ELEMENTS = STEP *PITCH<E>;

template <int QK, int E, int NT>
static __device__ __forceinline__ void load_stage(floatX *stage, QueryStage *queries, const floatX *a,
                                                  const floatX *b, int first, int head,
                                                  const AttentionCall &c)
{
    load_tile<QK, STEP, NT>(stage, a, first, call_of_keys<QK, E>(c));
    load_tile<E, STEP, NT>(stage + STEP_ELEMENTS<QK>, b, first, c);
    int t = first + (int)threadIdx.x;
    if (!queries || threadIdx.x >= STEP)
        return;
    bool exists = t < c.N;
    queries->lse[threadIdx.x] = exists ? c.lse[(int64_t)t * c.H + head] * LOG2E : 0;
    queries->row_sum[threadIdx.x] = exists ? c.row_sums[(int64_t)t * c.H + head] : 0;
}

// s: scores to weights; dp: gradients of weights to those of unscaled scores. lse, row_sum: by row (queries
// in rows) or by column.
template <bool KEYS>
static __device__ __forceinline__ void
gradients_of_scores(float (&s)[STEP_BLOCKS][4], float (&dp)[STEP_BLOCKS][4], const RowSpans &spans, int first,
                    const float (&lse)[2], const float (&row_sum)[2], const QueryStage &queries, float scale)
{
    bool all = first >= spans.all_lo && first + STEP <= spans.all_hi;
#pragma unroll
    for (int n = 0; n < STEP_BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = 8 * n + threadIdx.x % 4 * 2 + i % 2;
            float base = KEYS ? queries.lse[column] : lse[i / 2],
                  r = KEYS ? queries.row_sum[column] : row_sum[i / 2];
            s[n][i] = all || sees(spans, i, first + column) ? exp2f(s[n][i] * (scale * LOG2E) - base) : 0;
            dp[n][i] = s[n][i] * (dp[n][i] - r) * scale;
        }
}

template <int QK, int E, bool KEYS>
__global__ void __launch_bounds__(THREADS<E, KEYS>) attention_backward_kernel(AttentionCall c)
{
    constexpr int NT = THREADS<E, KEYS>, A_COLUMNS = QK / SPLIT<E, KEYS>, B_COLUMNS = E / SPLIT<E, KEYS>,
                  STAGE = STEP_ELEMENTS<QK> + STEP_ELEMENTS<E>;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ QueryStage queries[STAGES];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *a = shared, *b = a + TILE * PITCH<QK>, *ring = b + TILE * PITCH<E>;
    int head = blockIdx.y, first = blockIdx.x * TILE, warp = threadIdx.x / WARP,
        warp_row = warp % (TILE / ROWS_PER_WARP) * ROWS_PER_WARP;
    int a_at = head * keys.e, b_at = head * c.e, share = warp / (TILE / ROWS_PER_WARP);
    const floatX *a_other = (KEYS ? c.q : c.k) + a_at, *b_other = (KEYS ? c.dy : c.v) + b_at;
    load_tile<QK, TILE, NT>(a, (KEYS ? c.k : c.q) + a_at, first, keys);
    load_tile<E, TILE, NT>(b, (KEYS ? c.v : c.dy) + b_at, first, c);
    commit_loads();
    find_spans<KEYS>(span, first, c);
    wait_loads<0>();
    __syncthreads();
    float lse[2] = {}, row_sum[2] = {};
    for (int r = 0; !KEYS && r < 2; r++) {
        int t = first + warp_row + threadIdx.x % WARP / 4 + 8 * r;
        if (t < c.N) {
            lse[r] = c.lse[(int64_t)t * c.H + head] * LOG2E;
            row_sum[r] = c.row_sums[(int64_t)t * c.H + head];
        }
    }
    RowSpans spans = my_spans(span, warp_row, first, c.N);
    float da[A_COLUMNS / 8][4] = {}, db[KEYS ? B_COLUMNS / 8 : 1][4] = {};
    load_stage<QK, E, NT>(ring, KEYS ? &queries[0] : NULL, a_other, b_other, spans.tile.lo, head, c);
    commit_loads();
    for (int n = 0, other = spans.tile.lo; other < spans.tile.hi; n ^= 1, other += STEP) {
        if (other + STEP < spans.tile.hi)
            load_stage<QK, E, NT>(ring + (n ^ 1) * STAGE, KEYS ? &queries[n ^ 1] : NULL, a_other, b_other,
                                  other + STEP, head, c);
        commit_loads();
        wait_loads<1>();
        __syncthreads(); // this stage is here
        const floatX *a_step = ring + n * STAGE, *b_step = a_step + STEP_ELEMENTS<QK>;
        float s[STEP_BLOCKS][4], dp[STEP_BLOCKS][4];
        product_rows<QK>(s, a + warp_row * PITCH<QK>, a_step);
        product_rows<E>(dp, b + warp_row * PITCH<E>, b_step);
        gradients_of_scores<KEYS>(s, dp, spans, other, lse, row_sum, queries[n], c.scale);
        if constexpr (KEYS)
            product_weights<E>(db, s, b_step + share * B_COLUMNS);
        product_weights<QK>(da, dp, a_step + share * A_COLUMNS);
        __syncthreads(); // all are done with this stage
    }
    store_rows((KEYS ? c.dk : c.dq) + a_at, da, first + warp_row, share * A_COLUMNS, 1, 1, keys);
    if constexpr (KEYS)
        store_rows(c.dv + b_at, db, first + warp_row, share * B_COLUMNS, 1, 1, c);
}

template <int QK, int E> static bool prepare(Error *error)
{
    int bytes = backward_bytes<QK, E>();
    if (cudaFuncSetAttribute(attention_backward_kernel<QK, E, false>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess &&
        cudaFuncSetAttribute(attention_backward_kernel<QK, E, true>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess)
        return true;
    cudaGetLastError();
    return error_set(error,
                     "attention backward with heads of width up to %d needs %d bytes of shared memory in a "
                     "block: too much for this GPU",
                     E, bytes);
}

template <int QK, int E> static void launch(const AttentionCall *c, Stream s)
{
    constexpr int bytes = backward_bytes<QK, E>();
    dim3 grid((unsigned)ceil_div(c->N, TILE), (unsigned)c->H);
    attention_backward_kernel<QK, E, false><<<grid, THREADS<E, false>, bytes, s>>>(*c);
    attention_backward_kernel<QK, E, true><<<grid, THREADS<E, true>, bytes, s>>>(*c);
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
