// sm80 GEMM whose results are kept as e4m3 codes: relu^2, in bf16 too or as codes alone, and the gradient
// before relu^2. Operands are e4m3 codes, from Ada on, or bf16.
//
// To ldmatrix and cp.async two codes are one element of 16 bits: mma.m16n8k32 of bytes has its operands where
// mma.m16n8k16 of bf16 has them, byte for byte. So a matrix of codes is one of half as many columns, and the
// mainloop is the same but for that instruction. Its sums stay in the tensor cores' own accumulator, narrower
// than fp32, as those of cuBLASLt with fast accumulation do.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm80_codes.cuh"
#include "llmc/cuda/gemm/sm80_gemm.cuh"
#include "llmc/cuda/gemm/sm80_tile.cuh"

namespace
{

using namespace sm80;

// Returns the bits of the thread's largest magnitude.
template <CodesKind KIND>
__device__ __forceinline__ uint32_t store_tile(const floatX *tile, const CodesEpilogue &e, int N, int width,
                                               int row0, int col0)
{
    constexpr int STRIDE = THREADS / COL_CHUNKS, EACH = TILE_ROWS / STRIDE,
                  BATCH = 8; // loads of y's codes before the first is used
    int row = threadIdx.x / COL_CHUNKS, chunk = threadIdx.x % COL_CHUNKS, left = N - row0 - row,
        pitch = STRIDE * width / CHUNK;
    if (col0 + chunk * CHUNK >= width)
        left = 0;
    int64_t first = ((int64_t)(row0 + row) * width + col0) / CHUNK + chunk;
    CodesFactors factors = codes_factors<KIND>(e);
    uint32_t most = 0;
#pragma unroll
    for (int b = 0; b < EACH; b += BATCH) {
        uint2 y8[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if ((b + i) * STRIDE < left)
                y8[i] = codes_of_y<KIND>(e, first + (int64_t)(b + i) * pitch);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            uint4 products = *(const uint4 *)(tile + col_chunk(row + (b + i) * STRIDE, chunk));
            if ((b + i) * STRIDE < left)
                most = max(most,
                           store_codes<KIND>(e, factors, products, y8[i], first + (int64_t)(b + i) * pitch));
        }
    }
    return most;
}

template <typename Element, CodesKind KIND>
__global__ __launch_bounds__(THREADS, CTAS) void codes_gemm_kernel(Sm80Product p, int col_tiles, Fp8Product q,
                                                                   CodesEpilogue e)
{
    extern __shared__ __align__(128) floatX shared[];
    int row0 = blockIdx.x / col_tiles * TILE_ROWS, col0 = blockIdx.x % col_tiles * TILE_COLS;
    Sums<TILE_COLS> sum = {};
    mainloop<W_BY_OUTPUT, true, Element>(sum, shared, p, row0, col0);
    float factor = product_scale(q.scale_x, q.scale_w, q.alpha);
    stage_sums(shared, sum, [=](float x) { return x * factor; });
    __syncthreads();
    uint32_t most = store_tile<KIND>(shared, e, p.N, p.width, row0, col0);
    if (e.amax)
        amax_bits(e.amax, most);
}

template <typename Element>
void launch_codes(Stream s, const Sm80Product &p, const Fp8Product *q, const CodesEpilogue *e)
{
    launch(e->kind == RELU2_KEPT ? codes_gemm_kernel<Element, RELU2_KEPT>
           : e->kind == RELU2    ? codes_gemm_kernel<Element, RELU2>
                                 : codes_gemm_kernel<Element, GRADIENT>,
           s, p, whole_col_tiles(p), *q, *e);
}

} // namespace

bool sm80_gemm_codes_fp8(Stream s, const Fp8Product *q, const CodesEpilogue *e)
{
    Sm80Product p = {NULL, (const floatX *)q->x8, (const floatX *)q->w8, q->N, q->in / 2, q->out};
    if (!device_has_fp8_mma() || q->in % FP8_ALIGN || !in_vectors(p))
        return false;
    launch_codes<E4m3>(s, p, q, e);
    return true;
}

void sm80_gemm_codes_bf16(Stream s, const Fp8Product *q, const CodesEpilogue *e, const floatX *x,
                          const floatX *w, int N)
{
    Sm80Product p = {NULL, x, w, N, q->in, q->out};
    assert(in_vectors(p));
    launch_codes<floatX>(s, p, q, e);
}
