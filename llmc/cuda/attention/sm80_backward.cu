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
template <int E> constexpr int backward_bytes()
{
    return 2 * tile_bytes<E>(TILE) + 2 * STAGES * tile_bytes<E>(STEP);
}

// Of the streaming queries: lse in powers of two, and r.
struct QueryStage {
    float lse[STEP], row_sum[STEP];
};

// A stage is STEP rows of the other side's two tensors: scores are products with the first, gradients of
// weights with the second.
template <int E> constexpr int STEP_ELEMENTS = STEP *PITCH<E>;

template <int E, int NT>
static __device__ __forceinline__ void load_stage(floatX *stage, QueryStage *queries, const floatX *a,
                                                  const floatX *b, int first, int head,
                                                  const AttentionCall &c)
{
    load_tile<E, STEP, NT>(stage, a, first, c);
    load_tile<E, STEP, NT>(stage + STEP_ELEMENTS<E>, b, first, c);
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

template <int E, bool KEYS>
__global__ void __launch_bounds__(THREADS<E, KEYS>) attention_backward_kernel(AttentionCall c)
{
    constexpr int NT = THREADS<E, KEYS>, COLUMNS = E / SPLIT<E, KEYS>;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ QueryStage queries[STAGES];
    floatX *a = shared, *b = a + TILE * PITCH<E>, *ring = b + TILE * PITCH<E>;
    int head = blockIdx.y, first = blockIdx.x * TILE, warp = threadIdx.x / WARP,
        warp_row = warp % (TILE / ROWS_PER_WARP) * ROWS_PER_WARP;
    int at = head * c.e, first_column = warp / (TILE / ROWS_PER_WARP) * COLUMNS;
    const floatX *a_other = (KEYS ? c.q : c.k) + at, *b_other = (KEYS ? c.dy : c.v) + at;
    load_tile<E, TILE, NT>(a, (KEYS ? c.k : c.q) + at, first, c);
    load_tile<E, TILE, NT>(b, (KEYS ? c.v : c.dy) + at, first, c);
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
    float da[COLUMNS / 8][4] = {}, db[KEYS ? COLUMNS / 8 : 1][4] = {};
    load_stage<E, NT>(ring, KEYS ? &queries[0] : NULL, a_other, b_other, spans.tile.lo, head, c);
    commit_loads();
    for (int n = 0, other = spans.tile.lo; other < spans.tile.hi; n ^= 1, other += STEP) {
        if (other + STEP < spans.tile.hi)
            load_stage<E, NT>(ring + (n ^ 1) * 2 * STEP_ELEMENTS<E>, KEYS ? &queries[n ^ 1] : NULL, a_other,
                              b_other, other + STEP, head, c);
        commit_loads();
        wait_loads<1>();
        __syncthreads(); // this stage is here
        const floatX *a_step = ring + n * 2 * STEP_ELEMENTS<E>, *b_step = a_step + STEP_ELEMENTS<E>;
        float s[STEP_BLOCKS][4], dp[STEP_BLOCKS][4];
        product_rows<E>(s, a + warp_row * PITCH<E>, a_step);
        product_rows<E>(dp, b + warp_row * PITCH<E>, b_step);
        gradients_of_scores<KEYS>(s, dp, spans, other, lse, row_sum, queries[n], c.scale);
        if constexpr (KEYS)
            product_weights<E>(db, s, b_step + first_column);
        product_weights<E>(da, dp, a_step + first_column);
        __syncthreads(); // all are done with this stage
    }
    store_rows((KEYS ? c.dk : c.dq) + at, da, first + warp_row, first_column, 1, 1, c);
    if constexpr (KEYS)
        store_rows(c.dv + at, db, first + warp_row, first_column, 1, 1, c);
}

template <int E> static bool prepare(Error *error)
{
    int bytes = backward_bytes<E>();
    if (cudaFuncSetAttribute(attention_backward_kernel<E, false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes) == cudaSuccess &&
        cudaFuncSetAttribute(attention_backward_kernel<E, true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes) == cudaSuccess)
        return true;
    cudaGetLastError();
    return error_set(error,
                     "attention backward with heads of width up to %d needs %d bytes of shared memory in a "
                     "block: too much for this GPU",
                     E, bytes);
}

template <int E> static void launch(const AttentionCall *c, Stream s)
{
    dim3 grid((unsigned)ceil_div(c->N, TILE), (unsigned)c->H);
    attention_backward_kernel<E, false><<<grid, THREADS<E, false>, backward_bytes<E>(), s>>>(*c);
    attention_backward_kernel<E, true><<<grid, THREADS<E, true>, backward_bytes<E>(), s>>>(*c);
    CHECK_LAUNCH();
}

} // namespace attention

bool attention_sm80_prepare_backward(int e, Error *error)
{
    using namespace attention;
    return e <= 32    ? prepare<32>(error)
           : e <= 64  ? prepare<64>(error)
           : e <= 128 ? prepare<128>(error)
                      : prepare<256>(error);
}

void attention_sm80_backward(const AttentionCall *c, Stream s)
{
    using namespace attention;
    if (c->e <= 32)
        launch<32>(c, s);
    else if (c->e <= 64)
        launch<64>(c, s);
    else if (c->e <= 128)
        launch<128>(c, s);
    else
        launch<256>(c, s);
}
