// What the program's own attention kernels share: tiles in shared memory, products of tiles on the tensor
// cores (mma.sync), and which positions of the other side a row sees.
//
// A tile is ROWS x E bf16 with rows of E + 8 elements: 16 bytes more than a multiple of 128 bytes put the
// eight rows that ldmatrix reads together on different banks. Head widths between the instances of E are
// filled up with zeros. In a warp's 16 x (8 n) accumulators, lane l holds rows l/4 and l/4 + 8, columns 8 n +
// 2 (l%4) and the next.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh" // first: it includes C headers as C
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/sm80/sm80.cuh"

namespace attention
{

enum { TILE = 64, ROWS_PER_WARP = 16, TILE_THREADS = TILE / ROWS_PER_WARP * WARP };
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
template <int E> constexpr int PITCH = E + 8;
template <int E> constexpr int tile_bytes(int rows) { return rows * PITCH<E> * 2; }

// ---- instances --------------------------------------------------------------------------------------------

// Columns of tiles of q and k, and of v.
template <int KEY_COLUMNS, int COLUMNS> struct Widths {
    static constexpr int QK = KEY_COLUMNS, E = COLUMNS;
};

// f(Widths) of the instance that takes heads of q and k of width qk and of v of width e. Narrow heads have
// instances of three quarters, the ratio of the records, and never one of equal widths.
template <typename F> static auto with_widths(int qk, int e, F f)
{
    assert(e <= ATTENTION_OWN_MAX_WIDTH && (qk == e || (qk < e && qk <= ATTENTION_OWN_MAX_NARROW)));
    if (qk < e)
        return qk <= 48 && e <= 64    ? f(Widths<48, 64>())
               : qk <= 96 && e <= 128 ? f(Widths<96, 128>())
                                      : f(Widths<192, 256>());
    return e <= 32    ? f(Widths<32, 32>())
           : e <= 64  ? f(Widths<64, 64>())
           : e <= 128 ? f(Widths<128, 128>())
                      : f(Widths<256, 256>());
}

// The call as tiles of q, k and their gradients see it: `e` is the width of their heads.
template <int QK, int E> static __device__ __forceinline__ AttentionCall call_of_keys(const AttentionCall &c)
{
    AttentionCall keys = c;
    if (QK != E)
        keys.e = c.qk;
    return keys;
}

// ---- from memory to tiles --------------------------------------------------------------------------------

// Queues the copy of COLUMNS columns from `column` on, of rows first .. first+ROWS of a head of width e in
// (N, d); rows outside of 0 .. N and columns from e on become zeros. A thread has one column and constant
// strides: with a loop over vectors the addresses take as many instructions as the products.
template <int COLUMNS, int ROWS, int THREADS>
static __device__ __forceinline__ void load_columns(floatX *tile, const floatX *head, int column, int e,
                                                    int first, int N, int d)
{
    constexpr int VECTORS = COLUMNS / 8, STEP = THREADS / VECTORS; // rows from one of a thread's to the next
    int row = threadIdx.x / VECTORS, at = column + threadIdx.x % VECTORS * 8;
    const floatX *from = head + (int64_t)(first + row) * d + at;
    floatX *to = tile + row * PITCH<COLUMNS> + threadIdx.x % VECTORS * 8;
    if (THREADS % VECTORS && row == STEP)
        return; // surplus threads
#pragma unroll
    for (int k = 0; k < (ROWS + STEP - 1) / STEP; k++) {
        int bytes = (unsigned)(first + row + k * STEP) < (unsigned)N && at < e ? 16 : 0; // 0: zeros, unread
        if (ROWS % STEP == 0 || row + k * STEP < ROWS)
            sm80::copy_async(to + k * STEP * PITCH<COLUMNS>, from, bytes);
        from += STEP * d;
    }
}

template <int E, int ROWS, int THREADS>
static __device__ __forceinline__ void load_tile(floatX *tile, const floatX *head, int first,
                                                 const AttentionCall &c)
{
    load_columns<E, ROWS, THREADS>(tile, head, 0, c.e, first, c.N, c.H * c.e);
}

// ---- which rows a CTA takes ------------------------------------------------------------------------------

// CTAs in the order of a table of tiles, those with the most work first, all heads of a tile one after the
// other. A CTA takes ROWS of a tile; those of the last one may lie beyond N.  -> its first row
template <int ROWS> static __device__ __forceinline__ int first_row(const int32_t *tiles)
{
    constexpr int PARTS = ATTENTION_REACH_TILE / ROWS;
    return tiles[blockIdx.y / PARTS] * ATTENTION_REACH_TILE + blockIdx.y % PARTS * ROWS;
}

template <int ROWS> static dim3 ctas_of(const AttentionCall *c)
{
    int64_t tiles = ceil_div(c->N, ATTENTION_REACH_TILE) * (ATTENTION_REACH_TILE / ROWS);
    return dim3((unsigned)c->H, (unsigned)tiles);
}

// ---- products --------------------------------------------------------------------------------------------

using sm80::commit_loads;
using sm80::exp2_approx;
using sm80::ldmatrix;
using sm80::wait_loads;

static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    sm80::mma<floatX>(d, a, b0, b1);
}

// The transpose of a left operand (16, 16), as the vector of a lane in memory.
static __device__ __forceinline__ uint4 transpose_fragment(const uint32_t (&a)[4])
{
    return make_uint4(sm80::transpose8(a[0]), sm80::transpose8(a[2]), sm80::transpose8(a[1]),
                      sm80::transpose8(a[3]));
}

// s += (the warp's 16 rows of a) b^T, over the whole width.  a: from the warp's first row; b: 8 NB rows;
// UNROLL: steps of 16 columns whose loads the compiler may mix (each needs registers)
template <int E, int UNROLL = E / 16, int NB>
static __device__ __forceinline__ void add_product_rows(float (&s)[NB][4], const floatX *a, const floatX *b)
{
    int lane = threadIdx.x % WARP;
    const floatX *a_row = a + (lane & 15) * PITCH<E> + (lane >> 4) * 8;
    const floatX *b_row = b + ((lane & 7) + (lane >> 4) * 8) * PITCH<E> + (lane >> 3 & 1) * 8;
#pragma unroll UNROLL
    for (int k = 0; k < E; k += 16) {
        uint32_t left[4], right[4];
        ldmatrix(left, a_row + k);
#pragma unroll
        for (int n = 0; n < NB; n += 2) {
            ldmatrix(right, b_row + n * 8 * PITCH<E> + k);
            mma(s[n], left, right[0], right[1]);
            mma(s[n + 1], left, right[2], right[3]);
        }
    }
}

// The same, s = ...
template <int E, int NB>
static __device__ __forceinline__ void product_rows(float (&s)[NB][4], const floatX *a, const floatX *b)
{
#pragma unroll
    for (int n = 0; n < NB; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    add_product_rows<E>(s, a, b);
}

// acc += p b, with p (16, 8 NB) as a product left it, rounded to bf16; b: 8 NB rows, from the first of the 8
// NA columns wanted
template <int E, int NB, int NA>
static __device__ __forceinline__ void product_weights(float (&acc)[NA][4], const float (&p)[NB][4],
                                                       const floatX *b)
{
    int lane = threadIdx.x % WARP;
    const floatX *b_row = b + (lane & 15) * PITCH<E> + (lane >> 4) * 8;
#pragma unroll
    for (int n = 0; n < NB; n += 2) {
        const uint32_t left[4] = {pack2(p[n][0], p[n][1]), pack2(p[n][2], p[n][3]),
                                  pack2(p[n + 1][0], p[n + 1][1]), pack2(p[n + 1][2], p[n + 1][3])};
#pragma unroll
        for (int j = 0; j < NA; j += 2) {
            uint32_t right[4];
            ldmatrix<true>(right, b_row + n * 8 * PITCH<E> + j * 8);
            mma(acc[j], left, right[0], right[1]);
            mma(acc[j + 1], left, right[2], right[3]);
        }
    }
}

// The same of MB blocks of 16 rows: what is read of b serves all of them.
template <int E, int MB, int NB>
static __device__ __forceinline__ void product_rows(float (&s)[MB][NB][4], const floatX *a, const floatX *b)
{
    int lane = threadIdx.x % WARP;
    const floatX *a_row = a + (lane & 15) * PITCH<E> + (lane >> 4) * 8;
    const floatX *b_row = b + ((lane & 7) + (lane >> 4) * 8) * PITCH<E> + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
        for (int n = 0; n < NB; n++)
            s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < E; k += 16) {
        uint32_t left[MB][4], right[4];
#pragma unroll
        for (int m = 0; m < MB; m++)
            ldmatrix(left[m], a_row + m * ROWS_PER_WARP * PITCH<E> + k);
#pragma unroll
        for (int n = 0; n < NB; n += 2) {
            ldmatrix(right, b_row + n * 8 * PITCH<E> + k);
#pragma unroll
            for (int m = 0; m < MB; m++) {
                mma(s[m][n], left[m], right[0], right[1]);
                mma(s[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// acc += a b, with MB blocks of a (16, 16) as left operands: what is read of b serves all of them. b: 16 rows
template <int E, int MB, int NA>
static __device__ __forceinline__ void product_packed(float (&acc)[MB][NA][4], const uint32_t (&a)[MB][4],
                                                      const floatX *b)
{
    int lane = threadIdx.x % WARP;
    const floatX *b_row = b + (lane & 15) * PITCH<E> + (lane >> 4) * 8;
#pragma unroll
    for (int j = 0; j < NA; j += 2) {
        uint32_t right[4];
        ldmatrix<true>(right, b_row + j * 8);
#pragma unroll
        for (int m = 0; m < MB; m++) {
            mma(acc[m][j], a[m], right[0], right[1]);
            mma(acc[m][j + 1], a[m], right[2], right[3]);
        }
    }
}

template <int E, int MB, int NB, int NA>
static __device__ __forceinline__ void product_weights(float (&acc)[MB][NA][4], const float (&p)[MB][NB][4],
                                                       const floatX *b)
{
#pragma unroll
    for (int n = 0; n < NB; n += 2) {
        uint32_t left[MB][4];
#pragma unroll
        for (int m = 0; m < MB; m++) {
            left[m][0] = pack2(p[m][n][0], p[m][n][1]);
            left[m][1] = pack2(p[m][n][2], p[m][n][3]);
            left[m][2] = pack2(p[m][n + 1][0], p[m][n + 1][1]);
            left[m][3] = pack2(p[m][n + 1][2], p[m][n + 1][3]);
        }
        product_packed<E>(acc, left, b + n * 8 * PITCH<E>);
    }
}

// (16, 8 NA) accumulators to the rows first .. first+16 of a head, times a factor for each of the lane's two
// rows.
template <int NA>
static __device__ __forceinline__ void store_rows(floatX *head, const float (&acc)[NA][4], int first,
                                                  int first_column, float factor0, float factor1,
                                                  const AttentionCall &c)
{
    int lane = threadIdx.x % WARP, row = first + lane / 4, column = first_column + lane % 4 * 2,
        d = c.H * c.e;
#pragma unroll
    for (int j = 0; j < NA; j++, column += 8) {
        if (column >= c.e)
            break;
        if (row < c.N)
            *(uint32_t *)(head + (int64_t)row * d + column) = pack2(acc[j][0] * factor0, acc[j][1] * factor0);
        if (row + 8 < c.N)
            *(uint32_t *)(head + (int64_t)(row + 8) * d + column) =
                pack2(acc[j][2] * factor1, acc[j][3] * factor1);
    }
}

// ---- who sees whom ---------------------------------------------------------------------------------------

// Positions lo .. hi of the other side. Of a query: its keys; of a key: the queries that see it. Both ends
// rise with the position.
struct Span {
    int lo, hi;
};

static __device__ __forceinline__ int document_of(int t, const AttentionCall &c) // last d with cu[d] <= t
{
    int low = 0, high = c.slots;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (c.cu[middle] <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static __device__ __forceinline__ Span keys_of(int t, const AttentionCall &c)
{
    int first = c.cu[document_of(t, c)], reach = t - c.window; // window may be anything from 0 on
    return {first > reach ? first : reach, t + 1};
}

static __device__ __forceinline__ Span queries_of(int t, const AttentionCall &c)
{
    int end = c.cu[document_of(t, c) + 1];
    return {t, c.window < end - t ? t + c.window + 1 : end};
}

// Spans of a tile's rows; rows from N on see nothing. One thread a row.
template <bool KEYS, int ROWS>
static __device__ __forceinline__ void find_spans(Span (&span)[ROWS], int first, const AttentionCall &c)
{
    int row = threadIdx.x;
    if (row >= ROWS)
        return;
    if (first + row >= c.N)
        span[row] = {0, 0};
    else
        span[row] = KEYS ? queries_of(first + row, c) : keys_of(first + row, c);
}

// What the lane must know of its two rows; and whether all rows of the tile see all of columns first ..
// first+count.
struct RowSpans {
    Span row[2], tile;  // tile: from the first row's lo to the last row's hi
    int all_lo, all_hi; // seen by every row
};

static __device__ __forceinline__ RowSpans my_spans(const Span (&span)[TILE], int warp_row, int first, int N)
{
    int row = warp_row + threadIdx.x % WARP / 4, last = min(TILE, N - first) - 1;
    return {{span[row], span[row + 8]}, {span[0].lo, span[last].hi}, span[last].lo, span[0].hi};
}

static __device__ __forceinline__ bool sees(const RowSpans &r, int i, int column)
{
    const Span &s = r.row[i / 2];
    return column >= s.lo && column < s.hi;
}

// Of a warp's rows: positions that any of them sees, and that all see. A warp without rows sees none.
struct WarpSpan {
    int lo, hi, all_lo, all_hi;
};

static __device__ __forceinline__ WarpSpan warp_span(const Span *span, int warp_row, int rows, int first,
                                                     int N)
{
    int last = min(warp_row + rows, N - first) - 1;
    if (last < warp_row)
        return {0, 0, 0, 0};
    return {span[warp_row].lo, span[last].hi, span[last].lo, span[warp_row].hi};
}

} // namespace attention
