// sm80 GEMM with relu(x)^2 or its gradient in the epilogue.
#include "llmc/cuda/gemm/relu2.cuh"
#include "llmc/cuda/gemm/sm80_tile.cuh"

namespace
{

using namespace sm80;

// y: the forward result, or NULL: the tile is what is stored
template <bool VECTORS, bool BACKWARD>
__device__ __forceinline__ void store_tile(const floatX *tile, const Sm80Product &p, const floatX *y,
                                           int row0, int col0)
{
    constexpr int STRIDE = THREADS / COL_CHUNKS, EACH = TILE_ROWS / STRIDE,
                  BATCH = 8; // loads of y before the first is used
    int row = threadIdx.x / COL_CHUNKS, chunk = threadIdx.x % COL_CHUNKS, left = p.N - row0 - row,
        cols = p.width - col0 - chunk * CHUNK, pitch = STRIDE * p.width;
    int64_t first = (int64_t)(row0 + row) * p.width + col0 + chunk * CHUNK;
    const floatX *from = tile + col_chunk(row, chunk);
#pragma unroll
    for (int b = 0; b < EACH; b += BATCH) {
        uint4 of_y[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (BACKWARD && VECTORS && (b + i) * STRIDE < left && cols > 0)
                of_y[i] = *(const uint4 *)(y + first + (int64_t)(b + i) * pitch);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int64_t at = first + (int64_t)(b + i) * pitch;
            const floatX *chunk_of = from + (b + i) * STRIDE * TILE_COLS;
            if ((b + i) * STRIDE >= left || cols <= 0)
                continue;
            if constexpr (VECTORS) {
                uint4 x = *(const uint4 *)chunk_of, f = of_y[i];
                if (BACKWARD)
                    x = make_uint4(drelu2_pair(x.x, f.x), drelu2_pair(x.y, f.y), drelu2_pair(x.z, f.z),
                                   drelu2_pair(x.w, f.w));
                *(uint4 *)(p.out + at) = x;
            } else {
                for (int k = 0; k < min(CHUNK, cols); k++) {
                    float x = to_float(chunk_of[k]);
                    p.out[at + k] =
                        __float2bfloat16(BACKWARD ? x * sm80::sqrt_approx(4 * to_float(y[at + k])) : x);
                }
            }
        }
    }
}

template <bool VECTORS, bool BACKWARD>
__global__ __launch_bounds__(THREADS, CTAS) void relu2_gemm_kernel(Sm80Product p, int col_tiles,
                                                                   const floatX *y)
{
    extern __shared__ __align__(128) floatX shared[];
    int row0 = blockIdx.x / col_tiles * TILE_ROWS, col0 = blockIdx.x % col_tiles * TILE_COLS;
    Sums<TILE_COLS> sum = {};
    mainloop<W_BY_INPUT, VECTORS>(sum, shared, p, row0, col0);
    stage_sums(shared, sum, [](float x) { // NaN stays
        return BACKWARD ? x : x > 0 ? x * x : x <= 0 ? 0 : x;
    });
    __syncthreads();
    store_tile<VECTORS, BACKWARD>(shared, p, y, row0, col0);
}

template <bool BACKWARD> void launch_relu2(Stream s, const Sm80Product &p, const floatX *y)
{
    bool vectors = in_vectors(p) && (uintptr_t)y % 16 == 0;
    launch(vectors ? relu2_gemm_kernel<true, BACKWARD> : relu2_gemm_kernel<false, BACKWARD>, s, p,
           whole_col_tiles(p), y);
}

} // namespace

void sm80_gemm_relu2(Stream s, const Sm80Product &p) { launch_relu2<false>(s, p, NULL); }
void sm80_gemm_drelu2(Stream s, const Sm80Product &p, const floatX *y) { launch_relu2<true>(s, p, y); }
