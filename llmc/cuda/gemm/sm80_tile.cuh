// The tile of the sm80 GEMM and its mainloop: mma.sync, on any GPU since Ampere.
//
// Tile 128 x 128 x 32 of bf16 (x 64 of e4m3), 3 stages (cp.async), 4 warps with 64 x 64 sums each, two CTAs a
// multiprocessor, so that one's epilogue runs beside the other's mainloop, in the 100 KB of shared memory of
// GeForce GPUs. With w by output a tile may have 96 columns, 48 of them a warp's.
// Fragments of the next 16 of k are loaded under the products of these. Shared memory is swizzled: 16-byte
// chunks of a row are permuted by the row's number, so that the eight rows that ldmatrix reads together lie
// on different banks. The result goes through shared memory, in bf16, and is stored row by row.
//
// Tiles of one row of tiles follow each other: x is read from DRAM once, and w, 4.7 MB at the model's size,
// stays in L2. A tile of 256 x 128 with 8 warps, one CTA a multiprocessor, was slower on an H200: 471 and 537
// us where this one takes 402 and 445 (relu^2 at N 32768).
#pragma once
#include "llmc/cuda/gemm/sm80_gemm.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

namespace sm80
{

enum { TILE_ROWS = 128, TILE_COLS = 128, DEPTH = 32, STAGES = 3, WARP_ROWS = 64, THREADS = 128, CTAS = 2 };
enum { CHUNK = 8, DEPTH_CHUNKS = DEPTH / CHUNK, COL_CHUNKS = TILE_COLS / CHUNK }; // 16 bytes; those of a row
enum { X_ELEMENTS = TILE_ROWS * DEPTH, STAGE_ELEMENTS = X_ELEMENTS + DEPTH * TILE_COLS };
enum { SHARED_BYTES = STAGES * STAGE_ELEMENTS * (int)sizeof(floatX) };
static_assert(TILE_ROWS * TILE_COLS <= STAGES * STAGE_ELEMENTS, "the result's tile fits in the stages");
static_assert(CTAS * SHARED_BYTES <= 98 << 10, "a multiprocessor of the smallest GPUs");

// Offsets of a row's chunk under the swizzle, in tiles of DEPTH columns (a row covers half of the banks) and
// of TILE_COLS (all of them).
static __device__ __forceinline__ int depth_chunk(int row, int chunk)
{
    return row * DEPTH + (chunk ^ (row >> 1) % DEPTH_CHUNKS) * CHUNK;
}
static __device__ __forceinline__ int col_chunk(int row, int chunk)
{
    return row * TILE_COLS + (chunk ^ row % 8) * CHUNK;
}

// ---- operands ---------------------------------------------------------------------------------------------

// How w is stored: (in, width) or (width, in).
enum WLayout { W_BY_INPUT, W_BY_OUTPUT };

// Copies a chunk whose first `count` elements exist, and zeros. VECTORS: all of it exists, or nothing.
template <bool VECTORS>
static __device__ __forceinline__ void load_chunk(floatX *to, const floatX *from, int count)
{
    if constexpr (VECTORS) {
        copy_async(to, from, count > 0 ? 16 : 0);
    } else {
        for (int i = 0; i < CHUNK; i++)
            to[i] = i < count ? from[i] : __float2bfloat16(0);
    }
}

// A thread's loads of a stage: one chunk of every STRIDE-th row of a tile with rows of DEPTH or TILE_COLS
// elements. All have the same column and, as STRIDE is a multiple of 8, the same swizzle.
template <int ROWS, int ROW_CHUNKS, bool VECTORS> struct Loader {
    static constexpr int STRIDE = THREADS / ROW_CHUNKS, EACH = ROWS / STRIDE;
    static_assert(STRIDE % 8 == 0 && ROWS % STRIDE == 0);
    const floatX *from; // the thread's first chunk of the next stage, in global memory
    int to;             // its offset in the tile
    int rows, count;    // rows of the matrix from there on, and elements of a row
    int pitch;          // elements of a row of the matrix

    __device__ __forceinline__ Loader(const floatX *matrix, int row0, int col0, int rows_, int cols)
    {
        int row = threadIdx.x / ROW_CHUNKS, chunk = threadIdx.x % ROW_CHUNKS;
        to = ROW_CHUNKS == DEPTH_CHUNKS ? depth_chunk(row, chunk) : col_chunk(row, chunk);
        rows = rows_ - row0 - row;
        count = cols - col0 - chunk * CHUNK;
        pitch = cols;
        from = matrix + (int64_t)(row0 + row) * cols + col0 + chunk * CHUNK;
    }
    __device__ __forceinline__ void load(floatX *tile) const
    {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            load_chunk<VECTORS>(tile + to + i * STRIDE * ROW_CHUNKS * CHUNK,
                                from + (int64_t)i * STRIDE * pitch, i * STRIDE < rows ? count : 0);
    }
    __device__ __forceinline__ void advance_cols()
    {
        from += DEPTH;
        count -= DEPTH;
    }
    __device__ __forceinline__ void advance_rows()
    {
        from += (int64_t)DEPTH * pitch;
        rows -= DEPTH;
    }
};

// ---- mainloop ---------------------------------------------------------------------------------------------

// A warp's operands of 16 elements of k: blocks of 16 rows of x, of 16 columns of w. COLS: of the tile; a
// warp has half of them.
template <int COLS> struct Fragments {
    uint32_t x[4][4], w[COLS / 32][4];
};

static __device__ __forceinline__ int warp_row() { return threadIdx.x / WARP / 2 * WARP_ROWS; }
template <int COLS> static __device__ __forceinline__ int warp_col()
{
    return threadIdx.x / WARP % 2 * (COLS / 2);
}

// x, w: the stage's tiles
template <WLayout W, int COLS>
static __device__ __forceinline__ void load_fragments(Fragments<COLS> &f, const floatX *x, const floatX *w,
                                                      int k16)
{
    int lane = threadIdx.x % WARP, col = warp_col<COLS>();
#pragma unroll
    for (int m = 0; m < 4; m++)
        ldmatrix(f.x[m], x + depth_chunk(warp_row() + lane % 16 + 16 * m, 2 * k16 + lane / 16));
#pragma unroll
    for (int n = 0; n < COLS / 32; n++)
        if (W == W_BY_INPUT)
            ldmatrix<true>(f.w[n], w + col_chunk(16 * k16 + lane % 16, col / CHUNK + 2 * n + lane / 16));
        else
            ldmatrix(f.w[n],
                     w + depth_chunk(col + 16 * n + lane % 8 + lane / 16 * 8, 2 * k16 + lane / 8 % 2));
}

// Blocks of 16 rows, of 8 columns; in a block as mma leaves them.
template <int COLS> using Sums = float[4][COLS / 16][4];

// Element: floatX or E4m3.
template <typename Element, int COLS>
static __device__ __forceinline__ void add_products(Sums<COLS> &sum, const Fragments<COLS> &f)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < COLS / 16; n++)
            mma<Element>(sum[m][n], f.x[m], f.w[n / 2][n % 2 * 2], f.w[n / 2][n % 2 * 2 + 1]);
}

template <WLayout W, bool VECTORS, typename Element = floatX, int COLS = TILE_COLS>
static __device__ __forceinline__ void mainloop(Sums<COLS> &sum, floatX *shared, const Sm80Product &p,
                                                int row0, int col0)
{
    constexpr bool by_input = W == W_BY_INPUT;
    static_assert(COLS == TILE_COLS || !by_input);
    Loader<TILE_ROWS, DEPTH_CHUNKS, VECTORS> x(p.x, row0, 0, p.N, p.in);
    Loader<by_input ? DEPTH : COLS, by_input ? COL_CHUNKS : DEPTH_CHUNKS, VECTORS> w(p.w, by_input ? 0 : col0,
                                                                                     by_input ? col0 : 0,
                                                                                     by_input ? p.in
                                                                                              : p.width,
                                                                                     by_input ? p.width
                                                                                              : p.in);
    int steps = (p.in + DEPTH - 1) / DEPTH, queued = 0;
    auto stage = [&](int step) { return shared + step % STAGES * STAGE_ELEMENTS; };
    auto load = [&] {
        if (queued < steps) {
            x.load(stage(queued));
            w.load(stage(queued) + X_ELEMENTS);
        }
        x.advance_cols();
        if (by_input)
            w.advance_rows();
        else
            w.advance_cols();
        queued++;
        commit_loads(); // an empty group, too: the groups that may be pending are counted
    };
    Fragments<COLS> now, next;
    for (int step = 0; step < STAGES; step++)
        load();
    wait_loads<STAGES - 1>();
    __syncthreads();
    load_fragments<W, COLS>(now, stage(0), stage(0) + X_ELEMENTS, 0);
    for (int step = 0; step < steps; step++) {
        load_fragments<W, COLS>(next, stage(step), stage(step) + X_ELEMENTS, 1);
        add_products<Element, COLS>(sum, now);
        wait_loads<STAGES - 2>();
        __syncthreads(); // the next stage is full, and all warps have read this one
        load();
        // after the last step these are not used
        load_fragments<W, COLS>(now, stage(step + 1), stage(step + 1) + X_ELEMENTS, 0);
        add_products<Element, COLS>(sum, next);
    }
    wait_loads<0>();
    __syncthreads();
}

// ---- to shared memory -------------------------------------------------------------------------------------

// The warp's sums to the tile, in bf16.  f(sum): what is rounded
template <int COLS = TILE_COLS, typename F>
static __device__ __forceinline__ void stage_sums(floatX *tile, const Sums<COLS> &sum, F f)
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < COLS / 16; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(uint32_t *)(tile +
                              col_chunk(warp_row() + lane / 4 + 16 * m + 8 * i,
                                        warp_col<COLS>() / CHUNK + n) +
                              lane % 4 * 2) = pack2(f(sum[m][n][2 * i]), f(sum[m][n][2 * i + 1]));
}

// ---- launch -----------------------------------------------------------------------------------------------

static inline bool in_vectors(const Sm80Product &p)
{
    uintptr_t places = (uintptr_t)p.out | (uintptr_t)p.x | (uintptr_t)p.w;
    return p.in % CHUNK == 0 && p.width % CHUNK == 0 && places % 16 == 0;
}

// kernel: takes the product, the tiles in a row of tiles, and what its epilogue needs.
template <typename... More>
static void launch(void (*kernel)(Sm80Product, int, More...), Stream s, const Sm80Product &p,
                   int64_t col_tiles, More... more)
{
    int64_t tiles = ceil_div(p.N, TILE_ROWS) * col_tiles;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<(unsigned)tiles, THREADS, SHARED_BYTES, s>>>(p, (int)col_tiles, more...);
    CHECK_LAUNCH();
}

static inline int64_t whole_col_tiles(const Sm80Product &p) { return ceil_div(p.width, TILE_COLS); }

} // namespace sm80
