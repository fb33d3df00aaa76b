// Attention forward by the program's own kernel: any head width that is a multiple of 8 up to 256, q and k
// as wide as v or narrower (up to 192), any GPU with bf16 tensor cores, the same bits in every run.
//
// A block takes 128 queries of one head (64 of heads wider than 128), wherever documents begin and end among
// them, and walks over the keys that any of them sees, 64 at a time; a warp takes 32 of the queries (16 of
// the wider heads), so that what it reads of a key serves two blocks of rows, and leaves out keys that none
// of its own sees. Softmax on
// the way, after Milakov and Gimelshein's online normaliser: the running maximum and sum of a row stand in
// for those of the whole, and what was added up is shrunk when the maximum grows. Weights are powers of two
// of scores scaled by log2(e): the hardware's exponential is one of base 2.
#include "llmc/cuda/attention/sm80_attention.cuh"
#include "llmc/cuda/attention/gates.cuh"

namespace attention
{

// Blocks of 16 rows a warp.
template <int E> constexpr int ROW_BLOCKS = E <= 128 ? 2 : 1;
template <int E> constexpr int QUERIES = TILE *ROW_BLOCKS<E>;
enum { KEYS = 64 }; // a step

struct Softmax {
    float max[2], sum[2]; // of the lane's two rows of a block; maximum of unscaled scores, sums over the
                          // lane's own columns only
};

// Scores that are not to be seen become -infinity. row: the lane's first in span
template <int MB, int NB>
static __device__ __forceinline__ void mask_tile(float (&s)[MB][NB][4], const Span *row, int k0)
{
    int column = k0 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            Span seen = row[m * ROWS_PER_WARP + 8 * r];
#pragma unroll
            for (int n = 0; n < NB; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int at = column + 8 * n + i;
                    s[m][n][2 * r + i] = at >= seen.lo && at < seen.hi ? s[m][n][2 * r + i] : -INFINITY;
                }
        }
}

// Scores of a block of rows to weights; shrinks y when a maximum grows. scale_log2 > 0
template <int NB, int NA>
static __device__ __forceinline__ void softmax_tile(float (&s)[NB][4], float (&y)[NA][4], Softmax &m,
                                                    float scale_log2)
{
    float max[2] = {m.max[0], m.max[1]};
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            max[i / 2] = fmaxf(max[i / 2], s[n][i]);
    float shrink[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = quad_max(max[r]);
        base[r] = max[r] == -INFINITY ? 0 : max[r] * scale_log2; // nothing seen yet
        shrink[r] = exp2_approx(m.max[r] * scale_log2 - base[r]);
        m.max[r] = max[r];
        m.sum[r] *= shrink[r];
    }
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            m.sum[i / 2] += s[n][i] = exp2_approx(s[n][i] * scale_log2 - base[i / 2]);
    if (!__any_sync(0xffffffffu, shrink[0] != 1 || shrink[1] != 1))
        return;
#pragma unroll
    for (int j = 0; j < NA; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[j][i] *= shrink[i / 2];
}

// Of a block of rows from `first` on.
template <int E>
static __device__ __forceinline__ void store_queries(float (&y)[E / 8][4], Softmax &m, int first, int head,
                                                     const AttentionCall &c)
{
    int lane = threadIdx.x % WARP, row = first + lane / 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m.sum[r] = quad_sum(m.sum[r]);
        if (lane % 4 == 0 && row + 8 * r < c.N)
            c.lse[(int64_t)(row + 8 * r) * c.H + head] = m.max[r] * c.scale + log2f(m.sum[r]) * LN2;
        factor[r] = 1 / m.sum[r];
        if (c.h && row + 8 * r < c.N)
            factor[r] *= sigmoid(gate_input(c.h + (int64_t)(row + 8 * r) * c.H * c.e,
                                            c.gate_w + head * c.gate_inputs, c.gate_inputs));
    }
    store_rows(c.y + head * c.e, y, first, 0, factor[0], factor[1], c);
}

template <int QK, int E> constexpr int forward_bytes()
{
    return tile_bytes<QK>(QUERIES<E> + KEYS) + tile_bytes<E>(KEYS);
}

template <int QK, int E>
__global__ void __launch_bounds__(TILE_THREADS) attention_forward_kernel(AttentionCall c)
{
    constexpr int MB = ROW_BLOCKS<E>, ROWS = QUERIES<E>;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[ROWS];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *q = shared, *k = q + ROWS * PITCH<QK>, *v = k + KEYS * PITCH<QK>;
    int head = blockIdx.x, q0 = first_row<ROWS>(c.reaching_queries),
        warp_row = threadIdx.x / WARP * (MB * ROWS_PER_WARP);
    if (q0 >= c.N)
        return;
    const floatX *k_head = c.k + head * keys.e, *v_head = c.v + head * c.e;
    load_tile<QK, ROWS, TILE_THREADS>(q, c.q + head * keys.e, q0, keys);
    find_spans<false>(span, q0, c);
    __syncthreads();
    WarpSpan warp = warp_span(span, warp_row, MB * ROWS_PER_WARP, q0, c.N);
    const Span *row = span + warp_row + threadIdx.x % WARP / 4;
    int end = span[min(ROWS, c.N - q0) - 1].hi, k0 = span[0].lo;
    load_tile<QK, KEYS, TILE_THREADS>(k, k_head, k0, keys);
    commit_loads();

    float s[MB][KEYS / 8][4], y[MB][E / 8][4] = {};
    Softmax m[MB];
#pragma unroll
    for (int b = 0; b < MB; b++)
        m[b] = {{-INFINITY, -INFINITY}, {0, 0}};
    for (; k0 < end; k0 += KEYS) {
        bool mine = k0 < warp.hi && k0 + KEYS > warp.lo;
        wait_loads<0>();
        __syncthreads(); // keys are here, and all are done with the last values
        load_tile<E, KEYS, TILE_THREADS>(v, v_head, k0, c);
        commit_loads();
        if (mine) {
            product_rows<QK>(s, q + warp_row * PITCH<QK>, k);
            if (k0 < warp.all_lo || k0 + KEYS > warp.all_hi)
                mask_tile(s, row, k0);
#pragma unroll
            for (int b = 0; b < MB; b++)
                softmax_tile(s[b], y[b], m[b], c.scale * LOG2E);
        }
        wait_loads<0>();
        __syncthreads(); // values are here, and all are done with the keys
        if (k0 + KEYS < end)
            load_tile<QK, KEYS, TILE_THREADS>(k, k_head, k0 + KEYS, keys);
        commit_loads();
        if (mine)
            product_weights<E>(y, s, v);
    }
#pragma unroll
    for (int b = 0; b < MB; b++)
        store_queries<E>(y[b], m[b], q0 + warp_row + b * ROWS_PER_WARP, head, c);
}

template <int QK, int E> static bool prepare(Error *error)
{
    int bytes = forward_bytes<QK, E>();
    if (allow_shared_memory((const void *)attention_forward_kernel<QK, E>, (size_t)bytes))
        return true;
    return error_set(error,
                     "attention with heads of width up to %d needs %d bytes of shared memory in a block: too "
                     "much for this GPU",
                     E, bytes);
}

template <int QK, int E> static void launch(const AttentionCall *c, Stream s)
{
    attention_forward_kernel<QK, E><<<ctas_of<QUERIES<E>>(c), TILE_THREADS, forward_bytes<QK, E>(), s>>>(*c);
    CHECK_LAUNCH();
}

} // namespace attention

bool attention_sm80_prepare(int qk, int e, Error *error)
{
    using namespace attention;
    return with_widths(qk, e, [=](auto w) { return prepare<w.QK, w.E>(error); });
}

void attention_sm80_forward(const AttentionCall *c, Stream s)
{
    using namespace attention;
    with_widths(c->qk, c->e, [=](auto w) { launch<w.QK, w.E>(c, s); });
}
