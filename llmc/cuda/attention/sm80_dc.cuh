// What both directions of DC share: attention over few keys with the heads' weights mixed (llmc/ops/dc.h).
// Any GPU with bf16 tensor cores, the same bits in every run.
//
// A CTA has 64 queries of all heads, a warp 16 of them and the SPAN keys that they can see: all weights of a
// row are in registers at once, so softmax needs no running maximum, and the mixture of the heads is one
// accumulator. Every gradient has one owner. What keys need of queries, M and the gradient of the scores,
// goes through memory in bf16: dk and dv are then two products a head, and backward makes six of 16 x 128 x e
// instead of five, as dy v^T is made twice: once for the gradient of M, once, with M known, for that of w2.
//
// Tiles go through shared memory in chunks of 64 columns, loaded a stage ahead of their products. A
// stage has 35 KB; three CTAs of the forward pass fit a multiprocessor, two of backward's, for their
// registers. Times, and what was slower: dev/notes/2026-11-23_dc.md.
#pragma once
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
    FRAGMENTS = SPAN / 16, // left operands of 16 x 16 weights, a uint4 a lane
    KEY_WARPS = 8,         // of a CTA of keys
    KEY_TILE = KEY_WARPS * ROWS_PER_WARP,
    KEY_SIDE = KEY_TILE + BACK
};
template <int E> constexpr int CHUNK = E < 64 ? E : 64; // columns of a stage
template <int E> constexpr int CHUNKS = E / CHUNK<E>;
template <int E, int ROWS> constexpr int STAGE = ROWS *PITCH<CHUNK<E>>; // elements

struct Dc {
    AttentionCall qk, v; // N, H, spans; e: width of a head of q and k, of one of v
    DcForward f;
    DcBackward b; // without `forward`
    uint4 *band; // (H + 2, row blocks, FRAGMENTS, WARP): of a block of 16 queries, fragments of the transpose
    int blocks;  // of 16 rows, in whole tiles
    float *dw;   // (N, H)
};

// ---- a warp's rows ----------------------------------------------------------------------------------------

using Weights = float[BLOCKS][4];         // (16, SPAN) as a product leaves it
using Fragments = uint32_t[FRAGMENTS][4]; // the same in bf16, as a product takes it

struct Rows {
    int warp_row, lane;
    RowSpans spans;
    int column;         // position of the lane's first column
    int all_lo, all_hi; // columns that all rows see, from the warp's first column on
};

static __device__ __forceinline__ Rows rows_of(const Span (&span)[TILE], int first, int N)
{
    int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * ROWS_PER_WARP;
    Rows r = {warp_row, lane, my_spans(span, warp_row, first, N), first - BACK + warp_row + lane % 4 * 2};
    const Span &mine = span[warp_row + lane % ROWS_PER_WARP];
    r.all_lo = __reduce_max_sync(0xffffffffu, mine.lo) - (first - BACK + warp_row);
    r.all_hi = __reduce_min_sync(0xffffffffu, mine.hi) - (first - BACK + warp_row);
    return r;
}

static __device__ __forceinline__ bool seen(const Rows &r, int n, int i)
{
    return sees(r.spans, i, r.column + 8 * n + i % 2);
}
static __device__ __forceinline__ bool all_seen(const Rows &r, int n)
{
    return 8 * n >= r.all_lo && 8 * n + 8 <= r.all_hi;
}

// Of the lane's two rows, the queries t and t + 8.
struct Scalars {
    float x[2];
};
static __device__ __forceinline__ Scalars load_scalars(const float *from, int stride, int n, int first,
                                                       const Rows &r, int N)
{
    Scalars s;
    for (int i = 0; i < 2; i++) {
        int64_t t = first + r.warp_row + r.lane / 4 + 8 * i;
        s.x[i] = t < N ? from[t * stride + n] : 0;
    }
    return s;
}

// 1 / sqrt(mean over heads of w1^2 + 1e-6)
static __device__ __forceinline__ Scalars load_norms(const Dc &a, int first, const Rows &r)
{
    Scalars squares = {}, norm;
    for (int n = 0; n < a.qk.H; n++) {
        Scalars w1 = load_scalars(a.f.w1, a.f.stride, n, first, r, a.qk.N);
        squares.x[0] += w1.x[0] * w1.x[0];
        squares.x[1] += w1.x[1] * w1.x[1];
    }
    for (int i = 0; i < 2; i++)
        norm.x[i] = 1 / sqrtf(squares.x[i] / (float)a.qk.H + 1e-6f);
    return norm;
}

static __device__ __forceinline__ Scalars times(const Scalars &a, const Scalars &b)
{
    return {{a.x[0] * b.x[0], a.x[1] * b.x[1]}};
}

// sum += x * p
static __device__ __forceinline__ void mix(Weights &sum, const Weights &p, const Scalars &x)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[n][i] += x.x[i / 2] * p[n][i];
}

// Sums of the rows of a * b; in all lanes of a row.
static __device__ __forceinline__ Scalars row_dots(const Weights &a, const Weights &b)
{
    Scalars dot = {};
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            dot.x[i / 2] += a[n][i] * b[n][i];
    dot.x[0] = quad_sum(dot.x[0]);
    dot.x[1] = quad_sum(dot.x[1]);
    return dot;
}

// To column n of rows `stride` apart.
static __device__ __forceinline__ void store_scalars(float *to, const Scalars &x, int n, int stride,
                                                     int first, const Rows &r, int N)
{
    for (int i = 0; i < 2; i++) {
        int64_t t = first + r.warp_row + r.lane / 4 + 8 * i;
        if (r.lane % 4 == 0 && t < N)
            to[t * stride + n] = x.x[i];
    }
}

static __device__ __forceinline__ void pack_weights(Fragments &a, const Weights &p)
{
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++) {
        a[n][0] = pack2(p[2 * n][0], p[2 * n][1]);
        a[n][1] = pack2(p[2 * n][2], p[2 * n][3]);
        a[n][2] = pack2(p[2 * n + 1][0], p[2 * n + 1][1]);
        a[n][3] = pack2(p[2 * n + 1][2], p[2 * n + 1][3]);
    }
}

// ---- stages -----------------------------------------------------------------------------------------------

// What a stage loads: `columns` of a head from `column` on, of own rows (NULL: none) and of the other side's.
struct Piece {
    const floatX *own, *side;
    int column, e; // e: width of the head
};

// STAGES buffers of shared memory, filled in the order in which they are taken.  piece(i): the i-th
template <int E, int STAGES, typename F> struct Ring {
    floatX *memory;
    int first, N, H, total, taken;
    F piece;

    __device__ __forceinline__ floatX *stage(int i) const
    {
        return memory + i % STAGES * STAGE<E, TILE + SIDE>;
    }
    __device__ __forceinline__ void load(int i) const
    {
        if (i < total) {
            constexpr int C = CHUNK<E>;
            Piece p = piece(i);
            floatX *to = stage(i);
            if (p.own)
                load_columns<C, TILE, TILE_THREADS>(to, p.own, p.column, p.e, first, N, H * p.e);
            load_columns<C, SIDE, TILE_THREADS>(to + STAGE<E, TILE>, p.side, p.column, p.e, first - BACK, N,
                                                H * p.e);
        }
        commit_loads();
    }
    __device__ __forceinline__ void begin()
    {
        for (int i = 0; i < STAGES - 1; i++)
            load(i);
    }
    __device__ __forceinline__ const floatX *take() // own rows, then the other side's
    {
        wait_loads<STAGES - 2>();
        __syncthreads(); // the stage is there, and all are done with the one before
        load(taken + STAGES - 1);
        return stage(taken++);
    }
};

// s = own rows times the other side's, over a head. Returns the stage of the last columns.  UNROLL: more
// steps at once, and three accumulators of 64 registers do not leave enough for what is loaded
template <int E, int UNROLL, typename R>
static __device__ __forceinline__ const floatX *scores(Weights &s, R &ring, const Rows &r)
{
    const floatX *m = nullptr;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll 1
    for (int c = 0; c < CHUNKS<E>; c++) {
        m = ring.take();
        add_product_rows<CHUNK<E>, UNROLL>(s, m + r.warp_row * PITCH<CHUNK<E>>,
                                           m + (TILE + r.warp_row) * PITCH<CHUNK<E>>);
    }
    return m;
}

// acc = p times SPAN rows of a chunk.
template <int C>
static __device__ __forceinline__ void weigh(float (&acc)[C / 8][4], const Fragments &p, const floatX *rows)
{
    int lane = threadIdx.x % WARP;
    const floatX *row = rows + (lane & 15) * PITCH<C> + (lane >> 4) * 8;
#pragma unroll
    for (int j = 0; j < C / 8; j++)
        acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0;
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++)
#pragma unroll
        for (int j = 0; j < C / 8; j += 2) {
            uint32_t right[4];
            ldmatrix<true>(right, row + n * 16 * PITCH<C> + j * 8);
            mma(acc[j], p[n], right[0], right[1]);
            mma(acc[j + 1], p[n], right[2], right[3]);
        }
}

// ---- launch -----------------------------------------------------------------------------------------------

static void launch(void (*kernel)(Dc), int64_t ctas, int threads, int elements, const Dc &a, Stream s)
{
    int bytes = elements * (int)sizeof(floatX);
    if (!allow_shared_memory((const void *)kernel, (size_t)bytes))
        fatal(EXIT_BAD_INPUT,
              "mixed attention with heads of width %d needs %d bytes of shared memory in a block: too much "
              "for this GPU",
              a.v.e, bytes);
    kernel<<<(unsigned)ctas, (unsigned)threads, (size_t)bytes, s>>>(a);
    CHECK_LAUNCH();
}

static Dc dc_of(const DcForward *f, bool backward, int N, int H, int e)
{
    if (f->keys > MOST_KEYS || f->qk % 8 || f->qk > MOST_WIDTH || e > MOST_WIDTH)
        fatal(
            EXIT_BAD_INPUT,
            "mixed attention over %d keys with heads of width %d (%d of q and k): the CUDA program takes up "
            "to %d keys, and multiples of 8 up to %d",
            f->keys, e, f->qk, MOST_KEYS, MOST_WIDTH);
    attention_check_tokens(N, H, backward);
    Dc a = {};
    a.v = attention_call(f->table, f->slots, f->scale, f->keys - 1, N, H, e);
    a.qk = a.v;
    a.qk.e = f->qk;
    a.f = *f;
    a.blocks = (int)ceil_div(N, TILE) * (TILE / ROWS_PER_WARP);
    return a;
}

} // namespace attention
