// sm80 GEMM with relu(x)^2 or its gradient in the epilogue.
#include "llmc/cuda/gemm/sm80_tile.cuh"

namespace
{

using namespace sm80;

// x * 2 sqrt(y) of eight elements
__device__ __forceinline__ uint4 drelu2(uint4 x, uint4 y)
{
    float p[8], f[8];
    unpack8(x, p);
    unpack8(y, f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        p[k] *= 2 * sqrtf(f[k]);
    return pack8(p);
}

// y: the forward result, or NULL: the tile is what is stored
template <bool VECTORS, bool BACKWARD>
__device__ __forceinline__ void store_tile(const floatX *tile, const Sm80Product &p, const floatX *y,
                                           int row0, int col0)
{
    enum { EACH = SIDE * SIDE_CHUNKS / THREADS };    // vectors a thread
    enum { BATCH = BACKWARD ? EACH / 2 : EACH / 4 }; // loads of y before the first is used
    for (int b = 0; b < EACH; b += BATCH) {
        uint4 of_y[BATCH];
        int64_t at[BATCH];
        bool has[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int vector = threadIdx.x + (b + i) * THREADS, row = row0 + vector / SIDE_CHUNKS,
                col = col0 + vector % SIDE_CHUNKS * CHUNK;
            has[i] = row < p.N && col < p.width;
            at[i] = (int64_t)row * p.width + col;
            if (BACKWARD && VECTORS && has[i])
                of_y[i] = *(const uint4 *)(y + at[i]);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int vector = threadIdx.x + (b + i) * THREADS, row = vector / SIDE_CHUNKS,
                chunk = vector % SIDE_CHUNKS;
            const floatX *from = tile + side_chunk(row, chunk);
            if (!has[i])
                continue;
            if constexpr (VECTORS) {
                uint4 u = *(const uint4 *)from;
                *(uint4 *)(p.out + at[i]) = BACKWARD ? drelu2(u, of_y[i]) : u;
            } else {
                for (int k = 0; k < min(CHUNK, p.width - col0 - chunk * CHUNK); k++) {
                    float x = to_float(from[k]);
                    p.out[at[i] + k] = __float2bfloat16(BACKWARD ? x * 2 * sqrtf(to_float(y[at[i] + k])) : x);
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
    int row0 = blockIdx.x / col_tiles * SIDE, col0 = blockIdx.x % col_tiles * SIDE;
    Sums sum = {};
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
    launch(vectors ? relu2_gemm_kernel<true, BACKWARD> : relu2_gemm_kernel<false, BACKWARD>, s, p, y);
}

} // namespace

void sm80_gemm_relu2(Stream s, const Sm80Product &p) { launch_relu2<false>(s, p, NULL); }
void sm80_gemm_drelu2(Stream s, const Sm80Product &p, const floatX *y) { launch_relu2<true>(s, p, y); }
