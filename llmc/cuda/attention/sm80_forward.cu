// Attention forward by the program's own kernel: any head width that is a multiple of 8 up to 256, q and k
// as wide as v or narrower (up to 192), any GPU with bf16 tensor cores, the same bits in every run.
//
// A block takes 64 queries of one head, wherever documents begin and end among them, and walks over the keys
// that any of them sees, 64 at a time. Softmax on the way, after Milakov and Gimelshein's online normaliser:
// the running maximum and sum of a row stand in for those of the whole, and what was added up is shrunk when
// the maximum grows. Weights are powers of two of scores scaled by log2(e): the hardware's exponential is one
// of base 2.
#include "llmc/cuda/attention/sm80_attention.cuh"
#include "llmc/cuda/attention/gates.cuh"

namespace attention
{

struct Softmax {
    float max[2], sum[2]; // of the lane's two rows; sums over the lane's own columns only
};

// Scores to weights; shrinks y when a maximum grows.
template <int NB, int NA>
static __device__ __forceinline__ void softmax_tile(float (&s)[NB][4], float (&y)[NA][4], Softmax &m,
                                                    const RowSpans &spans, int k0, float scale_log2)
{
    bool all = k0 >= spans.all_lo && k0 + 8 * NB <= spans.all_hi;
    int column = k0 + threadIdx.x % 4 * 2;
    float max[2] = {m.max[0], m.max[1]};
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = all || sees(spans, i, column + 8 * n + i % 2) ? s[n][i] * scale_log2 : -INFINITY;
            max[i / 2] = fmaxf(max[i / 2], s[n][i]);
        }
    float shrink[2], base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        max[r] = quad_max(max[r]);
        base[r] = max[r] == -INFINITY ? 0 : max[r]; // nothing seen yet
        shrink[r] = exp2f(m.max[r] - base[r]);
        m.max[r] = max[r];
        m.sum[r] *= shrink[r];
    }
#pragma unroll
    for (int n = 0; n < NB; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            m.sum[i / 2] += s[n][i] = exp2f(s[n][i] - base[i / 2]);
#pragma unroll
    for (int j = 0; j < NA; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[j][i] *= shrink[i / 2];
}

template <int E>
static __device__ __forceinline__ void store_queries(float (&y)[E / 8][4], Softmax &m, int q0, int warp_row,
                                                     int head, const AttentionCall &c)
{
    int lane = threadIdx.x % WARP, row = q0 + warp_row + lane / 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m.sum[r] = quad_sum(m.sum[r]);
        if (lane % 4 == 0 && row + 8 * r < c.N)
            c.lse[(int64_t)(row + 8 * r) * c.H + head] = (m.max[r] + log2f(m.sum[r])) * LN2;
        factor[r] = 1 / m.sum[r];
        if (c.h && row + 8 * r < c.N)
            factor[r] *= sigmoid(gate_input(c.h + (int64_t)(row + 8 * r) * c.H * c.e,
                                            c.gate_w + head * c.gate_inputs, c.gate_inputs));
    }
    store_rows(c.y + head * c.e, y, q0 + warp_row, 0, factor[0], factor[1], c);
}

template <int QK, int E> constexpr int forward_bytes()
{
    return 2 * tile_bytes<QK>(TILE) + tile_bytes<E>(TILE);
}

template <int QK, int E>
__global__ void __launch_bounds__(TILE_THREADS) attention_forward_kernel(AttentionCall c)
{
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    const AttentionCall keys = call_of_keys<QK, E>(c);
    floatX *q = shared, *k = q + TILE * PITCH<QK>, *v = k + TILE * PITCH<QK>;
    int head = blockIdx.y, q0 = (gridDim.x - 1 - blockIdx.x) * TILE,
        warp_row = threadIdx.x / WARP * ROWS_PER_WARP;
    const floatX *k_head = c.k + head * keys.e, *v_head = c.v + head * c.e;
    load_tile<QK, TILE, TILE_THREADS>(q, c.q + head * keys.e, q0, keys);
    find_spans<false>(span, q0, c);
    __syncthreads();
    RowSpans spans = my_spans(span, warp_row, q0, c.N);
    load_tile<QK, TILE, TILE_THREADS>(k, k_head, spans.tile.lo, keys);
    commit_loads();

    float s[TILE / 8][4], y[E / 8][4] = {};
    Softmax m = {{-INFINITY, -INFINITY}, {0, 0}};
    for (int k0 = spans.tile.lo; k0 < spans.tile.hi; k0 += TILE) {
        wait_loads<0>();
        __syncthreads(); // keys are here, and all are done with the last values
        load_tile<E, TILE, TILE_THREADS>(v, v_head, k0, c);
        commit_loads();
        product_rows<QK>(s, q + warp_row * PITCH<QK>, k);
        softmax_tile(s, y, m, spans, k0, c.scale * LOG2E);
        wait_loads<0>();
        __syncthreads(); // values are here, and all are done with the keys
        if (k0 + TILE < spans.tile.hi)
            load_tile<QK, TILE, TILE_THREADS>(k, k_head, k0 + TILE, keys);
        commit_loads();
        product_weights<E>(y, s, v);
    }
    store_queries<E>(y, m, q0, warp_row, head, c);
}

template <int QK, int E> static bool prepare(Error *error)
{
    int bytes = forward_bytes<QK, E>();
    if (cudaFuncSetAttribute(attention_forward_kernel<QK, E>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes) == cudaSuccess)
        return true;
    cudaGetLastError();
    return error_set(error,
                     "attention with heads of width up to %d needs %d bytes of shared memory in a block: too "
                     "much for this GPU",
                     E, bytes);
}

template <int QK, int E> static void launch(const AttentionCall *c, Stream s)
{
    dim3 grid((unsigned)ceil_div(c->N, TILE), (unsigned)c->H);
    attention_forward_kernel<QK, E><<<grid, TILE_THREADS, forward_bytes<QK, E>(), s>>>(*c);
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
