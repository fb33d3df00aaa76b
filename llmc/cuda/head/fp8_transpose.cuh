// Writes a byte matrix plain and transposed: FP8 WGMMA wants both operands K-major, so most operands of the
// head exist twice. The source of the bytes is a template parameter.
//
// A CTA transposes a tile of 128 x 128 bytes. A thread takes 4 rows x 16 columns and transposes 4 x 4 bytes
// in registers; the tile in shared memory consists of words of 4 rows, XOR-swizzled by the column so that
// neither access has bank conflicts. Bound by memory.
#pragma once
#include "llmc/cuda/head/fp8.cuh"

enum { TRANSPOSE_TILE = 128, TRANSPOSE_THREADS = 256, TRANSPOSE_WORDS = TRANSPOSE_TILE / 4 };

typedef struct {
    uint8_t *plain;      // (rows_padded, cols), or NULL
    uint8_t *transposed; // (cols, ...), transposed_pitch bytes between rows, or NULL
    int64_t transposed_pitch;
    int rows, rows_padded, cols; // rows beyond `rows` are zero; cols a multiple of 16
    bool product_order;          // plain has its rows in the order of product_row
    bool interleaved; // transposed has the rows of x in the order of interleaved_row; no plain then, and
                      // rows_padded a multiple of 16
} TransposeOut;

// Row `row` of the plain matrix in the order that sm90_head_logits.cu wants: the 8 neighbouring output
// columns that one thread is to hold.
static __host__ __device__ __forceinline__ int product_row(int row)
{
    return (row & ~31) | (row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2);
}

// Column of row `row` in a transposed matrix that is B of sm90_head_gradient.cu's dw: within sixteen rows the
// order of K in which ldmatrix.trans, of 16-bit elements, leaves four neighbours of A to a thread.
static __host__ __device__ __forceinline__ int interleaved_row(int row)
{
    return (row & ~15) | (row & 7) / 2 * 4 | (row & 8) / 4 | (row & 1);
}
// Its inverse.
static __host__ __device__ __forceinline__ int row_of_interleaved(int column)
{
    return (column & ~15) | (column & 2) * 4 | (column & 12) / 2 | (column & 1);
}

// Transposes 4 x 4 bytes.
static __device__ __forceinline__ void transpose4(uint32_t (&w)[4])
{
    uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140); // r0c0 r1c0 r0c1 r1c1
    uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

// The first `count` bytes of u, one by one.
static __device__ __forceinline__ void store_bytes(uint8_t *to, uint4 u, int count)
{
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i < count)
            to[i] = (uint8_t)(w[i / 4] >> 8 * (i % 4));
    }
}

// Row of the source that is column `column` of the transposed matrix.
static __device__ __forceinline__ int source_row(const TransposeOut &t, int column)
{
    return t.interleaved ? row_of_interleaved(column) : column;
}

// Source: a struct with a type Raw, `Raw load(row, col)` of 16 columns, `uint4 codes(Raw, row, col)`, and
// HAS_AMAX: whether it has `float *amax`, too, and `uint32_t largest(Raw)`, bits of the largest magnitude.
// VECTORS: rows_padded, transposed and its pitch are multiples of 16.
template <class Source, bool VECTORS>
__global__ __launch_bounds__(TRANSPOSE_THREADS) void fp8_transpose_kernel(const TransposeOut t,
                                                                          const Source source)
{
    __shared__ uint4 tile[TRANSPOSE_TILE * TRANSPOSE_WORDS / 4];
    uint32_t *words = reinterpret_cast<uint32_t *>(tile);
    // Rows in descending order: the last rows are what the kernel before this one has left in L2.
    int col0 = blockIdx.x * TRANSPOSE_TILE, row0 = (gridDim.y - 1 - blockIdx.y) * TRANSPOSE_TILE;
    int cg = threadIdx.x % 8, rg = threadIdx.x / 8; // 16 columns, 4 rows
    int col = col0 + 16 * cg;
    typename Source::Raw raw[4];
    uint4 in[4];
    uint32_t most = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = source_row(t, row0 + 4 * rg + r);
        if (row < t.rows && col < t.cols)
            raw[r] = source.load(row, col);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = source_row(t, row0 + 4 * rg + r), to = t.product_order ? product_row(row) : row;
        in[r] = row < t.rows && col < t.cols ? source.codes(raw[r], row, col) : make_uint4(0, 0, 0, 0);
        if (t.plain && row < t.rows_padded && col < t.cols)
            *reinterpret_cast<uint4 *>(t.plain + (int64_t)to * t.cols + col) = in[r];
        if constexpr (Source::HAS_AMAX)
            most = max(most, row < t.rows && col < t.cols ? source.largest(raw[r]) : 0);
    }
    if constexpr (Source::HAS_AMAX)
        amax_bits(source.amax, most);
    if (!t.transposed)
        return;
    const uint32_t quads[4][4] = {{in[0].x, in[1].x, in[2].x, in[3].x},
                                  {in[0].y, in[1].y, in[2].y, in[3].y},
                                  {in[0].z, in[1].z, in[2].z, in[3].z},
                                  {in[0].w, in[1].w, in[2].w, in[3].w}};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint32_t w[4] = {quads[q][0], quads[q][1], quads[q][2], quads[q][3]};
        transpose4(w);
#pragma unroll
        for (int k = 0; k < 4; k++)
            words[(16 * cg + 4 * q + k) * TRANSPOSE_WORDS + (rg ^ (cg * 4))] = w[k];
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        int c = pass * 32 + threadIdx.x / 8, j = threadIdx.x % 8; // 8 threads write the 128 bytes of a column
        uint4 u = tile[(c * TRANSPOSE_WORDS + ((4 * j) ^ (c / 16 * 4))) / 4];
        uint8_t *to = t.transposed + (col0 + c) * t.transposed_pitch + row0 + 16 * j;
        if (col0 + c >= t.cols || row0 + 16 * j >= t.rows_padded)
            continue;
        if constexpr (VECTORS)
            *reinterpret_cast<uint4 *>(to) = u;
        else
            store_bytes(to, u, t.rows_padded - row0 - 16 * j);
    }
}

template <class Source> static void transpose_tiles(Stream s, const TransposeOut *t, const Source &source)
{
    dim3 grid((unsigned)ceil_div(t->cols, TRANSPOSE_TILE),
              (unsigned)ceil_div(t->rows_padded, TRANSPOSE_TILE));
    bool vectors =
        t->rows_padded % 16 == 0 && t->transposed_pitch % 16 == 0 && (uintptr_t)t->transposed % 16 == 0;
    if (vectors)
        fp8_transpose_kernel<Source, true><<<grid, TRANSPOSE_THREADS, 0, s>>>(*t, source);
    else
        fp8_transpose_kernel<Source, false><<<grid, TRANSPOSE_THREADS, 0, s>>>(*t, source);
    CHECK_LAUNCH();
}
