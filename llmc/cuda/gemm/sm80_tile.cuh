// The tile of the sm80 GEMM and its mainloop: mma.sync, on any GPU since Ampere.
//
// Tile 128 x 128 x 32, 3 stages (cp.async), 4 warps with 64 x 64 sums each, two CTAs a multiprocessor, so
// that one's epilogue runs beside the other's mainloop. Fragments of the next 16 of k are loaded under the
// products of these. Shared memory is swizzled: 16-byte chunks of a row are permuted by the row's number, so
// that the eight rows that ldmatrix reads together lie on different banks. The result goes through shared
// memory, in bf16, and is stored row by row.
//
// 48 KB a CTA, so that two fit on GPUs with 100 KB a multiprocessor. Tiles of one row of tiles follow each
// other: x is read from DRAM once, and w, 4.7 MB at the model's size, stays in L2.
#pragma once
#include "llmc/cuda/gemm/sm80_gemm.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

namespace sm80
{

enum { SIDE = 128, DEPTH = 32, STAGES = 3, THREADS = 128, WARP_SIDE = 64, CTAS = 2 };
enum { CHUNK = 8, DEPTH_CHUNKS = DEPTH / CHUNK, SIDE_CHUNKS = SIDE / CHUNK }; // 16 bytes; those of a row
enum { X_ELEMENTS = SIDE * DEPTH, STAGE_ELEMENTS = X_ELEMENTS + DEPTH * SIDE };
enum { SHARED_BYTES = STAGES * STAGE_ELEMENTS * (int)sizeof(floatX) };
static_assert(SIDE * SIDE <= STAGES * STAGE_ELEMENTS, "the result's tile fits in the stages");

// Where a chunk of a row lies: in tiles of (SIDE, DEPTH), two of whose rows cover all banks, and in those
// whose rows have SIDE elements.
static __device__ __forceinline__ int depth_chunk(int row, int chunk)
{
    return row * DEPTH + (chunk ^ (row >> 1) % DEPTH_CHUNKS) * CHUNK;
}
static __device__ __forceinline__ int side_chunk(int row, int chunk)
{
    return row * SIDE + (chunk ^ row % 8) * CHUNK;
}

// ---- operands ---------------------------------------------------------------------------------------------

// A chunk of a (rows, cols) matrix, zeros outside of it. VECTORS: its rows begin on 16 bytes.
template <bool VECTORS>
static __device__ __forceinline__ void load_chunk(floatX *to, const floatX *from, int row, int col, int rows,
                                                  int cols)
{
    const floatX *source = from + (int64_t)row * cols + col;
    if constexpr (VECTORS) {
        int bytes = row < rows && col < cols ? 16 : 0;
        copy_async(to, bytes ? source : from, bytes);
    } else {
        for (int i = 0; i < CHUNK; i++)
            to[i] = row < rows && col + i < cols ? source[i] : __float2bfloat16(0);
    }
}

// How w is stored: (in, width) or (width, in).
enum WLayout { W_BY_INPUT, W_BY_OUTPUT };

// Queues the loads of k to k + DEPTH - 1.
template <WLayout W, bool VECTORS>
static __device__ __forceinline__ void load_stage(floatX *stage, const Sm80Product &p, int row0, int col0,
                                                  int k)
{
#pragma unroll
    for (int i = threadIdx.x; i < SIDE * DEPTH_CHUNKS; i += THREADS) {
        int row = i / DEPTH_CHUNKS, chunk = i % DEPTH_CHUNKS;
        load_chunk<VECTORS>(stage + depth_chunk(row, chunk), p.x, row0 + row, k + chunk * CHUNK, p.N, p.in);
    }
    floatX *tile = stage + X_ELEMENTS;
#pragma unroll
    for (int i = threadIdx.x; i < DEPTH * SIDE_CHUNKS; i += THREADS) {
        int row = W == W_BY_INPUT ? i / SIDE_CHUNKS : i / DEPTH_CHUNKS,
            chunk = W == W_BY_INPUT ? i % SIDE_CHUNKS : i % DEPTH_CHUNKS;
        if (W == W_BY_INPUT)
            load_chunk<VECTORS>(tile + side_chunk(row, chunk), p.w, k + row, col0 + chunk * CHUNK, p.in,
                                p.width);
        else
            load_chunk<VECTORS>(tile + depth_chunk(row, chunk), p.w, col0 + row, k + chunk * CHUNK, p.width,
                                p.in);
    }
}

// ---- mainloop ---------------------------------------------------------------------------------------------

// A warp's operands of 16 of k: four blocks of 16 rows of x, four of 16 columns of w.
struct Fragments {
    uint32_t x[4][4], w[4][4];
};

template <WLayout W>
static __device__ __forceinline__ void load_fragments(Fragments &f, const floatX *stage, int k16)
{
    const floatX *tile = stage + X_ELEMENTS;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp / 2 * WARP_SIDE + lane % 16,
        col = warp % 2 * WARP_SIDE;
#pragma unroll
    for (int m = 0; m < 4; m++)
        ldmatrix(f.x[m], stage + depth_chunk(row + 16 * m, 2 * k16 + lane / 16));
#pragma unroll
    for (int n = 0; n < 4; n++)
        if (W == W_BY_INPUT)
            ldmatrix<true>(f.w[n], tile + side_chunk(16 * k16 + lane % 16, col / CHUNK + 2 * n + lane / 16));
        else
            ldmatrix(f.w[n],
                     tile + depth_chunk(col + 16 * n + lane % 8 + lane / 16 * 8, 2 * k16 + lane / 8 % 2));
}

typedef float Sums[4][8][4]; // blocks of 16 rows, of 8 columns; in a block as mma leaves them

static __device__ __forceinline__ void add_products(Sums &sum, const Fragments &f)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
            mma<floatX>(sum[m][n], f.x[m], f.w[n / 2][n % 2 * 2], f.w[n / 2][n % 2 * 2 + 1]);
}

template <WLayout W, bool VECTORS>
static __device__ __forceinline__ void mainloop(Sums &sum, floatX *shared, const Sm80Product &p, int row0,
                                                int col0)
{
    int steps = (p.in + DEPTH - 1) / DEPTH;
    auto stage = [&](int step) { return shared + step % STAGES * STAGE_ELEMENTS; };
    auto load = [&](int step) {
        if (step < steps)
            load_stage<W, VECTORS>(stage(step), p, row0, col0, step * DEPTH);
        commit_loads(); // an empty group, too: the groups that may be pending are counted
    };
    Fragments now, next;
    for (int step = 0; step < STAGES; step++)
        load(step);
    wait_loads<STAGES - 1>();
    __syncthreads();
    load_fragments<W>(now, stage(0), 0);
    for (int step = 0; step < steps; step++) {
        load_fragments<W>(next, stage(step), 1);
        add_products(sum, now);
        wait_loads<STAGES - 2>();
        __syncthreads(); // the next stage is there, and all have read this one
        load(step + STAGES);
        load_fragments<W>(now, stage(step + 1), 0); // behind the last step: what nothing uses
        add_products(sum, next);
    }
    wait_loads<0>();
    __syncthreads();
}

// ---- to shared memory -------------------------------------------------------------------------------------

// The warp's sums to the tile, in bf16.  f(sum): what is rounded
template <typename F> static __device__ __forceinline__ void stage_sums(floatX *tile, const Sums &sum, F f)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp / 2 * WARP_SIDE + lane / 4,
        chunk = warp % 2 * WARP_SIDE / CHUNK;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *(uint32_t *)(tile + side_chunk(row + 16 * m + 8 * i, chunk + n) + lane % 4 * 2) =
                    pack2(f(sum[m][n][2 * i]), f(sum[m][n][2 * i + 1]));
}

// ---- launch -----------------------------------------------------------------------------------------------

static inline bool in_vectors(const Sm80Product &p)
{
    uintptr_t places = (uintptr_t)p.out | (uintptr_t)p.x | (uintptr_t)p.w;
    return p.in % CHUNK == 0 && p.width % CHUNK == 0 && places % 16 == 0;
}

// kernel: takes the product, the tiles in a row of tiles, and what its epilogue needs.
template <typename... More>
static void launch(void (*kernel)(Sm80Product, int, More...), Stream s, const Sm80Product &p, More... more)
{
    int64_t col_tiles = ceil_div(p.width, SIDE), tiles = ceil_div(p.N, SIDE) * col_tiles;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    kernel<<<(unsigned)tiles, THREADS, SHARED_BYTES, s>>>(p, (int)col_tiles, more...);
    CHECK_LAUNCH();
}

} // namespace sm80
