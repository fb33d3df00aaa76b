// Newton-Schulz products of bf16 and fp16 matrices whose rows begin on 16 bytes, on any GPU since Ampere.
//
// A block computes a SIDE x SIDE tile, each of its four warps a quarter: 64 x 64 sums a warp, so that 8
// matrices of 8 x 16 that it reads from shared memory serve 32 products (mma.sync). Operands come in steps of
// DEPTH, STAGES - 1 of them on their way (cp.async). The result goes through shared memory, in fp32, so that
// plain and mirrored tile are both written row by row.
#include "llmc/cuda/muon/ns_result.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

namespace
{

using sm80::commit_loads;
using sm80::ldmatrix;
using sm80::mma;
using sm80::wait_loads;

enum { SIDE = 128, DEPTH = 32, STAGES = 3, THREADS = 128, WARP_SIDE = 64, RESULT_PITCH = SIDE + 1 };
// Rows of tiles: 16 bytes more than they hold put the eight that ldmatrix reads together on different banks.
enum { BY_ROWS_PITCH = DEPTH + 8, BY_COLUMNS_PITCH = SIDE + 8 };

// ---- operands --------------------------------------------------------------------------------------------

// Queues the copy of a (HEIGHT, WIDTH) tile from rows row0.. and columns col0.. of a (rows, cols) matrix;
// zeros outside of it. Vectors of 8: one is inside or outside, never half.
template <int HEIGHT, int WIDTH, int PITCH>
__device__ __forceinline__ void load_tile(uint16_t *tile, const uint16_t *from, int pitch, int row0, int col0,
                                          int rows, int cols)
{
    constexpr int VECTORS = WIDTH / 8;
#pragma unroll
    for (int i = threadIdx.x; i < HEIGHT * VECTORS; i += THREADS) {
        int r = i / VECTORS, c = i % VECTORS * 8, bytes = row0 + r < rows && col0 + c < cols ? 16 : 0;
        const uint16_t *source = bytes ? from + (int64_t)(row0 + r) * pitch + col0 + c : from;
        sm80::copy_async(tile + r * PITCH + c, source, bytes);
    }
}

// ---- products --------------------------------------------------------------------------------------------

// Sums of the warp's quarter: lane l of block (m, n) holds rows 16 m + l/4 and + 8, columns 8 n + 2 (l%4) and
// the next. BY_ROWS: b's tile is (SIDE, DEPTH), else (DEPTH, SIDE).
template <typename T, bool BY_ROWS>
__device__ __forceinline__ void add_step(float (&sum)[4][8][4], const uint16_t *a, const uint16_t *b,
                                         int row0, int col0)
{
    int lane = threadIdx.x % WARP;
    const uint16_t *a_row = a + (row0 + (lane & 15)) * BY_ROWS_PITCH + (lane >> 4) * 8;
    const uint16_t *b_row =
        BY_ROWS ? b + (col0 + (lane & 7) + (lane >> 4) * 8) * BY_ROWS_PITCH + (lane >> 3 & 1) * 8
                : b + (lane & 15) * BY_COLUMNS_PITCH + col0 + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t left[4][4];
#pragma unroll
        for (int m = 0; m < 4; m++)
            ldmatrix<false>(left[m], a_row + m * 16 * BY_ROWS_PITCH + k);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t right[4];
            ldmatrix<!BY_ROWS>(right,
                               b_row + (BY_ROWS ? n * 8 * BY_ROWS_PITCH + k : k * BY_COLUMNS_PITCH + n * 8));
#pragma unroll
            for (int m = 0; m < 4; m++) {
                mma<T>(sum[m][n], left[m], right[0], right[1]);
                mma<T>(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// ---- result ----------------------------------------------------------------------------------------------

// 8 numbers, rounded to O.
template <typename O> __device__ __forceinline__ void store8(O *to, const float (&v)[8])
{
    alignas(16) O rounded[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        rounded[k] = from_float<O>(v[k]);
#pragma unroll
    for (int k = 0; k < (int)(sizeof rounded / 16); k++)
        ((uint4 *)to)[k] = ((const uint4 *)rounded)[k];
}

// A tile that does not touch the diagonal, or any of a product that is not symmetric: 8 columns a thread, 4
// neighbours a row, which puts what a warp reads on different banks. out, d: of the matrix. Values before
// they are scaled stay in `result`.
template <bool KEEP, typename O, typename T>
__device__ __forceinline__ void write_rows(O *out, float *result, const T *d, const float *scale,
                                           const NsProduct &p, int row0, int col0)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < SIDE * SIDE / 8; i += THREADS) {
        int r = i / 32 % (SIDE / 8) * 8 + i / 4 % 8, c = (i / 32 / (SIDE / 8) * 4 + i % 4) * 8;
        int row = row0 + r, col = col0 + c;
        if (row >= p.rows || col >= p.cols)
            continue;
        float v[8];
        alignas(16) T add[8];
        if (d)
            *(uint4 *)add = *(const uint4 *)(d + (int64_t)row * p.d_pitch + col);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            v[k] = __fmul_rn(p.alpha, result[r * RESULT_PITCH + c + k]);
            if (d)
                v[k] = __fmaf_rn(p.beta, to_float(add[k]), v[k]);
            if (KEEP)
                result[r * RESULT_PITCH + c + k] = v[k];
            v[k] = scale_value<O>(v[k], scale, p, row == col + k, col + k);
        }
        store8(out + (int64_t)row * p.out_pitch + col, v);
    }
}

// The mirror image of a tile below the diagonal, from what write_rows kept.
template <typename O>
__device__ __forceinline__ void write_mirrored(O *out, const float *result, const float *scale,
                                               const NsProduct &p, int row0, int col0)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < SIDE * SIDE / 8; i += THREADS) {
        int c = i / 32 % (SIDE / 8) * 8 + i / 4 % 8, r = (i / 32 / (SIDE / 8) * 4 + i % 4) * 8;
        int row = row0 + r, col = col0 + c;
        if (row >= p.rows || col >= p.cols)
            continue;
        float v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = scale_value<O>(result[(r + k) * RESULT_PITCH + c], scale, p, false, row + k);
        store8(out + (int64_t)col * p.out_pitch + row, v);
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------

template <bool SYMMETRIC> struct Stage {
    alignas(16) uint16_t a[SIDE * BY_ROWS_PITCH];
    alignas(16) uint16_t b[SYMMETRIC ? SIDE * BY_ROWS_PITCH : DEPTH * BY_COLUMNS_PITCH];
};

template <bool SYMMETRIC> union Shared {
    Stage<SYMMETRIC> stage[STAGES];
    float result[SIDE * RESULT_PITCH];
};

template <typename T, typename O, bool SYMMETRIC>
__global__ void __launch_bounds__(THREADS) pipelined_kernel(const NsProduct p, int col_tiles)
{
    extern __shared__ __align__(16) char memory[];
    Shared<SYMMETRIC> &shared = *(Shared<SYMMETRIC> *)memory;
    const uint16_t *a = (const uint16_t *)p.a + blockIdx.y * p.a_stride,
                   *b = (const uint16_t *)p.b + blockIdx.y * p.b_stride;
    int i = blockIdx.x / col_tiles, j = blockIdx.x % col_tiles;
    if (SYMMETRIC)
        triangle_position(blockIdx.x, i, j);
    int row0 = i * SIDE, col0 = j * SIDE, steps = (int)((p.depth + DEPTH - 1) / DEPTH);
    auto load = [&](int step) {
        if (step < steps) {
            Stage<SYMMETRIC> &to = shared.stage[step % STAGES];
            int k = step * DEPTH;
            load_tile<SIDE, DEPTH, BY_ROWS_PITCH>(to.a, a, p.a_pitch, row0, k, p.rows, p.depth);
            if (SYMMETRIC)
                load_tile<SIDE, DEPTH, BY_ROWS_PITCH>(to.b, b, p.b_pitch, col0, k, p.cols, p.depth);
            else
                load_tile<DEPTH, SIDE, BY_COLUMNS_PITCH>(to.b, b, p.b_pitch, k, col0, p.depth, p.cols);
        }
        commit_loads(); // an empty group, too: the groups that may be pending are counted
    };
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warp_row = warp / 2 * WARP_SIDE,
        warp_col = warp % 2 * WARP_SIDE;
    float sum[4][8][4] = {};
    for (int step = 0; step < STAGES - 1; step++)
        load(step);
    for (int step = 0; step < steps; step++) {
        wait_loads<STAGES - 2>();
        __syncthreads(); // this step is here, and all are done with the one before
        load(step + STAGES - 1);
        const Stage<SYMMETRIC> &now = shared.stage[step % STAGES];
        add_step<T, SYMMETRIC>(sum, now.a, now.b, warp_row, warp_col);
    }
    wait_loads<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                shared.result[(warp_row + 16 * m + lane / 4 + 8 * (k / 2)) * RESULT_PITCH + warp_col + 8 * n +
                              lane % 4 * 2 + k % 2] = sum[m][n][k];
    __syncthreads();
    const float *scale = p.scale ? p.scale + (int64_t)blockIdx.y * p.rows : nullptr;
    const T *d = p.d ? (const T *)p.d + blockIdx.y * p.d_stride : nullptr;
    O *out = (O *)p.out + blockIdx.y * p.out_stride;
    if (SYMMETRIC && i == j) {
        write_tile<SIDE, RESULT_PITCH, THREADS>(out, shared.result, d, scale, p, row0, col0, true);
        return;
    }
    write_rows<SYMMETRIC>(out, shared.result, d, scale, p, row0, col0);
    if (!SYMMETRIC)
        return;
    __syncthreads();
    write_mirrored(out, shared.result, scale, p, row0, col0);
}

// ---- launch ----------------------------------------------------------------------------------------------

template <typename T, typename O, bool SYMMETRIC> void launch(cudaStream_t s, const NsProduct &p)
{
    static_assert(sizeof(Shared<SYMMETRIC>) <= 99 << 10, "what a block of the smallest GPUs can have");
    int64_t along = ceil_div(p.rows, SIDE), col_tiles = ceil_div(p.cols, SIDE);
    int64_t tiles = SYMMETRIC ? along * (along + 1) / 2 : along * col_tiles;
    auto kernel = pipelined_kernel<T, O, SYMMETRIC>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    (int)sizeof(Shared<SYMMETRIC>)));
    kernel<<<dim3((unsigned)tiles, (unsigned)p.batch), THREADS, sizeof(Shared<SYMMETRIC>), s>>>(
        p, (int)col_tiles);
    CHECK_LAUNCH();
}

template <typename T>
void launch_form(cudaStream_t s, ProductForm form, NsDtype out_dtype, const NsProduct &p)
{
    if (form == PRODUCT_FULL)
        launch<T, T, false>(s, p);
    else if (out_dtype == NS_FP32)
        launch<T, float, true>(s, p);
    else
        launch<T, T, true>(s, p);
}

bool on_vectors(const void *base, int pitch, int64_t stride, int width)
{
    return (uintptr_t)base % 16 == 0 && pitch % 8 == 0 && stride % 8 == 0 && width % 8 == 0;
}

} // namespace

bool ns_pipelined_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype,
                          const NsProduct &p)
{
    enum { LEAST = SIDE / 2, MOST_IN_A_GRID = 65535 };
    int b_width = form == PRODUCT_FULL ? p.cols : p.depth;
    // fp32 results need less than this.
    bool out = on_vectors(p.out, p.out_pitch, p.out_stride, p.cols) && p.rows % 8 == 0,
         d = !p.d || on_vectors(p.d, p.d_pitch, p.d_stride, p.cols);
    if (dtype == NS_FP32 || !out || !d || p.rows <= LEAST || p.cols <= LEAST || p.batch > MOST_IN_A_GRID ||
        !on_vectors(p.a, p.a_pitch, p.a_stride, p.depth) || !on_vectors(p.b, p.b_pitch, p.b_stride, b_width))
        return false;
    if (dtype == NS_BF16)
        launch_form<__nv_bfloat16>(s, form, out_dtype, p);
    else
        launch_form<__half>(s, form, out_dtype, p);
    return true;
}
