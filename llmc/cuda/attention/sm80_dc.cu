// DC: attention over few keys with the heads' weights mixed (llmc/ops/dc.h). Any GPU with bf16 tensor cores,
// the same bits in every run.
//
// A CTA has 64 rows of all heads, a warp 16 of them and the SPAN columns of the other side that its rows can
// see: all weights of a row are in registers at once, so softmax needs no running maximum, and the mixture of
// the heads is one accumulator. Rows are queries, in the backward pass of keys keys; then everything appears
// transposed, and a query's scalars come by column. Every gradient has one owner; the price is that backward
// makes scores four times and dy v^T twice: 9 products of 64 x 128 x e a head instead of 5.
//
// Tiles go through shared memory head by head (65 KB at a width of 128; three CTAs a multiprocessor, two in
// the backward pass, whose loads and products overlap). At N = 16384, 6 heads of 128: forward 13 GFLOP of
// mma.sync and 0.2 GB from L2, backward 58 GFLOP and 0.7 GB; some 60 and 300 us.
#include "llmc/cuda/attention/sm80_attention.cuh"

namespace attention
{

enum {
    SPAN = 128,                  // columns of a warp
    BACK = SPAN - ROWS_PER_WARP, // a row sees itself and at most so many before it
    MOST_KEYS = BACK + 1,
    MOST_WIDTH = 128,   // of a head: above, the backward pass needs more registers than there are
    SIDE = TILE + BACK, // columns of a CTA
    BLOCKS = SPAN / 8,
    CHUNK = 4 // blocks of 8 columns that a product of weights makes at a time
};
template <int E> constexpr int dc_bytes() { return tile_bytes<E>(TILE + SIDE); }

struct Dc {
    AttentionCall qk, v; // N, H, spans; e: width of a head of q and k, of one of v
    DcForward f;
    DcBackward b; // without `forward`
};

// ---- scalars of queries -----------------------------------------------------------------------------------

// Of one head, but for norm. Those of queries beyond the end are 0.
struct Queries {
    float norm[SIDE]; // 1 / sqrt(mean over heads of w1^2 + 1e-6)
    float lse[SIDE];  // in powers of two
    float w[SIDE], w2[SIDE], dw[SIDE];
};

static __device__ __forceinline__ void load_norms(Queries &q, int first, int count, const Dc &a)
{
    for (int i = threadIdx.x; i < count; i += TILE_THREADS) {
        float squares = 0;
        const float *w1 = a.f.w1 + (int64_t)(first + i) * a.f.stride;
        for (int n = 0; n < a.qk.H && first + i < a.qk.N; n++)
            squares += w1[n] * w1[n];
        q.norm[i] = 1 / sqrtf(squares / (float)a.qk.H + 1e-6f);
    }
}

// Which of a head's scalars a pass reads.
enum Wanted { WEIGHTS, WITH_LSE, WITH_DW };
template <Wanted WANTED>
static __device__ __forceinline__ void load_queries(Queries &q, int first, int count, int n, const Dc &a)
{
    for (int i = threadIdx.x; i < count; i += TILE_THREADS) {
        int64_t t = first + i;
        bool exists = t < a.qk.N;
        q.w[i] = exists ? q.norm[i] * a.f.w1[t * a.f.stride + n] : 0;
        q.w2[i] = exists ? a.f.w2[t * a.f.stride + n] : 0;
        if (WANTED >= WITH_LSE)
            q.lse[i] = exists ? a.f.lse[t * a.qk.H + n] * LOG2E : 0;
        if (WANTED >= WITH_DW)
            q.dw[i] = exists ? a.b.scratch[t * a.qk.H + n] : 0;
    }
}

// ---- a warp's rows ----------------------------------------------------------------------------------------

using Weights = float[BLOCKS][4]; // (16, SPAN) as a product leaves it

struct Rows {
    int warp_row, lane;
    RowSpans spans;
    int column; // position of the lane's first column
};

// The scalar of the query of element (n, i): by row, or of KEYS by column.
template <bool KEYS>
static __device__ __forceinline__ float of_query(const float (&x)[SIDE], const Rows &r, int n, int i)
{
    return x[r.warp_row + (KEYS ? 8 * n + r.lane % 4 * 2 + i % 2 : r.lane / 4 + i / 2 * 8)];
}

template <bool KEYS>
static __device__ __forceinline__ Rows rows_of(const Span (&span)[TILE], int first, int N)
{
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * ROWS_PER_WARP;
    return {warp_row, lane, my_spans(span, warp_row, first, N),
            first - (KEYS ? 0 : BACK) + warp_row + lane % 4 * 2};
}

static __device__ __forceinline__ bool seen(const Rows &r, int n, int i)
{
    return sees(r.spans, i, r.column + 8 * n + i % 2);
}

// Scores to weights of a softmax whose sum is known.
template <bool KEYS>
static __device__ __forceinline__ void known_weights(Weights &s, const Rows &r, const Queries &q,
                                                     float scale_log2)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = seen(r, n, i) ? exp2f(s[n][i] * scale_log2 - of_query<KEYS>(q.lse, r, n, i)) : 0;
}

// sum += x * p, x a scalar of the queries
template <bool KEYS>
static __device__ __forceinline__ void mix(Weights &sum, const Weights &p, const float (&x)[SIDE],
                                           const Rows &r)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[n][i] += of_query<KEYS>(x, r, n, i) * p[n][i];
}

// Sums of the rows of a * b; in all lanes of a row.
static __device__ __forceinline__ void row_dots(float (&dot)[2], const Weights &a, const Weights &b)
{
    dot[0] = dot[1] = 0;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            dot[i / 2] += a[n][i] * b[n][i];
    dot[0] = quad_sum(dot[0]);
    dot[1] = quad_sum(dot[1]);
}

// One value a row to column n of rows `stride` apart.
static __device__ __forceinline__ void store_scalars(float *to, const float (&x)[2], int n, int stride,
                                                     int first, const Rows &r, int N)
{
    for (int i = 0; i < 2; i++) {
        int64_t t = first + r.warp_row + r.lane / 4 + 8 * i;
        if (r.lane % 4 == 0 && t < N)
            to[t * stride + n] = x[i];
    }
}

// ---- tiles ------------------------------------------------------------------------------------------------

template <int E> struct Tiles {
    floatX *own, *side; // (TILE, E), (SIDE, E) with their pitch
};

// Scores of the warp's rows: own rows of the CTA from `first` on, the other side's from `other` on.  scalars:
// what else to load meanwhile
template <int E, typename Scalars>
static __device__ __forceinline__ void scores(Weights &s, const Tiles<E> &m, const floatX *own, int first,
                                              const floatX *side, int other, const AttentionCall &c,
                                              const Rows &r, Scalars scalars)
{
    __syncthreads(); // all are done with the last tiles
    load_tile<E, TILE, TILE_THREADS>(m.own, own, first, c);
    load_tile<E, SIDE, TILE_THREADS>(m.side, side, other, c);
    commit_loads();
    scalars();
    wait_loads<0>();
    __syncthreads();
    product_rows<E>(s, m.own + r.warp_row * PITCH<E>, m.side + r.warp_row * PITCH<E>);
}

// Products of the warp's weights with its columns' rows of the side tile, CHUNK blocks of columns at a time:
// finish(acc, first column).
template <int E, typename Finish>
static __device__ __forceinline__ void weigh(const Weights &p, const Tiles<E> &m, const AttentionCall &c,
                                             const Rows &r, Finish finish)
{
#pragma unroll 1
    for (int column = 0; column < c.e; column += 8 * CHUNK) {
        float acc[CHUNK][4] = {};
        product_weights<E>(acc, p, m.side + r.warp_row * PITCH<E> + column);
        finish(acc, column);
    }
}

// ---- forward ----------------------------------------------------------------------------------------------

// Scores to weights; returns lse of the lane's rows. Rows beyond the end see nothing.
static __device__ __forceinline__ void softmax_rows(Weights &s, float (&lse)[2], const Rows &r,
                                                    float scale_log2)
{
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[n][i] = seen(r, n, i) ? s[n][i] * scale_log2 : -INFINITY;
            max[i / 2] = fmaxf(max[i / 2], s[n][i]);
        }
    for (int i = 0; i < 2; i++) {
        max[i] = quad_max(max[i]);
        max[i] = max[i] == -INFINITY ? 0 : max[i];
    }
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i / 2] += s[n][i] = exp2f(s[n][i] - max[i / 2]);
    for (int i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        lse[i] = (max[i] + log2f(sum[i])) * LN2;
        sum[i] = sum[i] > 0 ? 1 / sum[i] : 0;
    }
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] *= sum[i / 2];
}

// Rows of a head of y += w2 * acc.
static __device__ __forceinline__ void add_rows(floatX *head, const float (&acc)[CHUNK][4], int first,
                                                int first_column, const Queries &q, const Rows &r,
                                                const AttentionCall &c)
{
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        int column = first_column + 8 * j + r.lane % 4 * 2;
        for (int i = 0; i < 2; i++) {
            int row = r.warp_row + r.lane / 4 + 8 * i;
            if (column >= c.e || first + row >= c.N)
                continue;
            uint32_t *to = (uint32_t *)(head + (int64_t)(first + row) * c.H * c.e + column);
            float low = __uint_as_float(*to << 16), high = __uint_as_float(*to & 0xffff0000u);
            *to = pack2(low + q.w2[row] * acc[j][2 * i], high + q.w2[row] * acc[j][2 * i + 1]);
        }
    }
}

template <int E>
__global__ void __launch_bounds__(TILE_THREADS) dc_forward_kernel(const __grid_constant__ Dc a)
{
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ Queries q;
    Tiles<E> m = {shared, shared + TILE * PITCH<E>};
    int first = blockIdx.x * TILE, N = a.qk.N, H = a.qk.H;
    find_spans<false>(span, first, a.qk);
    load_norms(q, first, TILE, a);
    __syncthreads();
    Rows r = rows_of<false>(span, first, N);
    Weights mixed = {};
    for (int n = 0; n < H; n++) {
        Weights p;
        float lse[2];
        scores<E>(p, m, a.f.q + n * a.qk.e, first, a.f.k + n * a.qk.e, first - BACK, a.qk, r,
                  [&] { load_queries<WEIGHTS>(q, first, TILE, n, a); });
        softmax_rows(p, lse, r, a.f.scale * LOG2E);
        store_scalars(a.f.lse, lse, n, H, first, r, N);
        mix<false>(mixed, p, q.w, r);
    }
    for (int n = 0; n < H; n++) {
        __syncthreads();
        load_tile<E, SIDE, TILE_THREADS>(m.side, a.f.v + n * a.v.e, first - BACK, a.v);
        commit_loads();
        load_queries<WEIGHTS>(q, first, TILE, n, a);
        wait_loads<0>();
        __syncthreads();
        weigh<E>(mixed, m, a.v, r, [&](const float(&acc)[CHUNK][4], int column) {
            add_rows(a.f.y + n * a.v.e, acc, first, column, q, r, a.v);
        });
    }
}

// ---- backward ---------------------------------------------------------------------------------------------

// P of a head, of rows of q or, of KEYS, of k.
template <int E, bool KEYS>
static __device__ __forceinline__ void head_weights(Weights &p, const Tiles<E> &m, Queries &q, int n,
                                                    int first, const Rows &r, const Dc &a)
{
    const floatX *own = (KEYS ? a.f.k : a.f.q) + n * a.qk.e, *side = (KEYS ? a.f.q : a.f.k) + n * a.qk.e;
    scores<E>(p, m, own, first, side, KEYS ? first : first - BACK, a.qk, r,
              [&] { load_queries<KEYS ? WITH_DW : WITH_LSE>(q, first, KEYS ? SIDE : TILE, n, a); });
    known_weights<KEYS>(p, r, q, a.f.scale * LOG2E);
}

// D of a head: dy v^T, or its transpose.
template <int E, bool KEYS>
static __device__ __forceinline__ void head_gradients(Weights &d, const Tiles<E> &m, Queries &q, int n,
                                                      int first, const Rows &r, const Dc &a)
{
    const floatX *own = (KEYS ? a.f.v : a.b.dy) + n * a.v.e, *side = (KEYS ? a.b.dy : a.f.v) + n * a.v.e;
    scores<E>(d, m, own, first, side, KEYS ? first : first - BACK, a.v, r,
              [&] { load_queries<WEIGHTS>(q, first, KEYS ? SIDE : TILE, n, a); });
}

// p, weights of a head, to the gradient of its unscaled scores, scaled.
template <bool KEYS>
static __device__ __forceinline__ void score_gradients(Weights &p, const Weights &dmixed,
                                                       const float (&dw)[2], const Rows &r, const Queries &q,
                                                       float scale)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum = KEYS ? of_query<KEYS>(q.dw, r, n, i) : dw[i / 2];
            p[n][i] *= scale * of_query<KEYS>(q.w, r, n, i) * (dmixed[n][i] - sum);
        }
}

// dw1 from dw in scratch, through the norm over heads: one lane a row of the warp.
static __device__ __forceinline__ void norm_backward(int first, const Rows &r, const Queries &q, const Dc &a)
{
    int row = r.warp_row + r.lane, H = a.qk.H;
    int64_t t = first + row;
    __syncwarp(); // other lanes stored dw
    if (r.lane >= ROWS_PER_WARP || t >= a.qk.N)
        return;
    const float *w1 = a.f.w1 + t * a.f.stride, *dw = a.b.scratch + t * H;
    float norm = q.norm[row], mean = 0;
    for (int n = 0; n < H; n++)
        mean += dw[n] * norm * w1[n];
    mean /= (float)H;
    for (int n = 0; n < H; n++)
        a.b.dw1[t * a.f.stride + n] = norm * (dw[n] - norm * w1[n] * mean);
}

// dq, dw1, dw2; dw to scratch.
template <int E>
__global__ void __launch_bounds__(TILE_THREADS) dc_backward_queries_kernel(const __grid_constant__ Dc a)
{
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ Queries q;
    Tiles<E> m = {shared, shared + TILE * PITCH<E>};
    int first = blockIdx.x * TILE, N = a.qk.N, H = a.qk.H;
    find_spans<false>(span, first, a.qk);
    load_norms(q, first, TILE, a);
    __syncthreads();
    Rows r = rows_of<false>(span, first, N);
    Weights x, dmixed = {};
    float dot[2];
    {
        Weights mixed = {};
        for (int n = 0; n < H; n++) {
            head_weights<E, false>(x, m, q, n, first, r, a);
            mix<false>(mixed, x, q.w, r);
        }
        for (int n = 0; n < H; n++) {
            head_gradients<E, false>(x, m, q, n, first, r, a);
            mix<false>(dmixed, x, q.w2, r);
            row_dots(dot, mixed, x);
            store_scalars(a.b.dw2, dot, n, a.f.stride, first, r, N);
        }
    }
    for (int n = 0; n < H; n++) {
        head_weights<E, false>(x, m, q, n, first, r, a);
        row_dots(dot, dmixed, x);
        store_scalars(a.b.scratch, dot, n, H, first, r, N);
        score_gradients<false>(x, dmixed, dot, r, q, a.f.scale);
        weigh<E>(x, m, a.qk, r, [&](const float(&acc)[CHUNK][4], int column) {
            store_rows(a.b.dq + n * a.qk.e, acc, first + r.warp_row, column, 1, 1, a.qk);
        });
    }
    norm_backward(first, r, q, a);
}

// dk, dv, after dw.
template <int E>
__global__ void __launch_bounds__(TILE_THREADS) dc_backward_keys_kernel(const __grid_constant__ Dc a)
{
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    __shared__ Queries q;
    Tiles<E> m = {shared, shared + TILE * PITCH<E>};
    int first = blockIdx.x * TILE, H = a.qk.H;
    find_spans<true>(span, first, a.qk);
    load_norms(q, first, SIDE, a);
    __syncthreads();
    Rows r = rows_of<true>(span, first, a.qk.N);
    Weights x, dmixed = {};
    {
        Weights mixed = {};
        for (int n = 0; n < H; n++) {
            head_weights<E, true>(x, m, q, n, first, r, a);
            mix<true>(mixed, x, q.w, r);
        }
        for (int n = 0; n < H; n++) {
            head_gradients<E, true>(x, m, q, n, first, r, a);
            mix<true>(dmixed, x, q.w2, r);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[b][i] = of_query<true>(q.w2, r, b, i) * mixed[b][i];
            weigh<E>(x, m, a.v, r, [&](const float(&acc)[CHUNK][4], int column) {
                store_rows(a.b.dv + n * a.v.e, acc, first + r.warp_row, column, 1, 1, a.v);
            });
        }
    }
    for (int n = 0; n < H; n++) {
        head_weights<E, true>(x, m, q, n, first, r, a);
        score_gradients<true>(x, dmixed, {}, r, q, a.f.scale);
        weigh<E>(x, m, a.qk, r, [&](const float(&acc)[CHUNK][4], int column) {
            store_rows(a.b.dk + n * a.qk.e, acc, first + r.warp_row, column, 1, 1, a.qk);
        });
    }
}

// ---- launch -----------------------------------------------------------------------------------------------

static void launch(void (*kernel)(Dc), int bytes, const Dc &a, Stream s)
{
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) != cudaSuccess)
        fatal(
            EXIT_BAD_INPUT,
            "mixed attention with heads of width %d needs %d bytes of shared memory in a block: too much for "
            "this GPU",
            a.v.e, bytes);
    kernel<<<(unsigned)ceil_div(a.qk.N, TILE), TILE_THREADS, (size_t)bytes, s>>>(a);
    CHECK_LAUNCH();
}

static Dc dc_of(const DcForward *f, bool backward, int N, int H, int e)
{
    if (f->keys > MOST_KEYS || f->qk % 8 || f->qk > MOST_WIDTH || e > MOST_WIDTH)
        fatal(EXIT_BAD_INPUT,
              "mixed attention over %d keys with heads of width %d (%d of q and k): the CUDA program takes "
              "up to %d "
              "keys, and multiples of 8 up to %d",
              f->keys, e, f->qk, MOST_KEYS, MOST_WIDTH);
    attention_check_tokens(N, H, backward);
    Dc a = {};
    a.v = attention_call(f->table, f->slots, f->scale, f->keys - 1, N, H, e);
    a.qk = a.v;
    a.qk.e = f->qk;
    a.f = *f;
    return a;
}

template <int E> static void forward(const Dc &a, Stream s)
{
    launch(dc_forward_kernel<E>, dc_bytes<E>(), a, s);
}

template <int E> static void backward(const Dc &a, Stream s)
{
    launch(dc_backward_queries_kernel<E>, dc_bytes<E>(), a, s);
    launch(dc_backward_keys_kernel<E>, dc_bytes<E>(), a, s);
}

} // namespace attention

void dc_forward(Stream s, const DcForward *f, int N, int H, int e)
{
    OP_SCOPE(dc_forward, f, N, H, e);
    using namespace attention;
    Dc a = dc_of(f, false, N, H, e);
    int width = e > f->qk ? e : f->qk;
    if (width <= 32)
        forward<32>(a, s);
    else if (width <= 64)
        forward<64>(a, s);
    else
        forward<128>(a, s);
}

void dc_backward(Stream s, const DcBackward *b, int N, int H, int e)
{
    OP_SCOPE(dc_backward, b, N, H, e);
    using namespace attention;
    Dc a = dc_of(b->forward, true, N, H, e);
    a.b = *b;
    int width = e > a.f.qk ? e : a.f.qk;
    if (width <= 32)
        backward<32>(a, s);
    else if (width <= 64)
        backward<64>(a, s);
    else
        backward<128>(a, s);
}
