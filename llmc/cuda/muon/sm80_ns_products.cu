// Newton-Schulz products of any shape and alignment: every load and store is predicated. bf16 and fp16 go
// through the warp-wide matrix units that all GPUs since Ampere have, fp32 through plain fused multiply-adds.
//
// One block computes a SIDE x SIDE tile. Both operands come through shared memory in steps of DEPTH, the
// result goes back through it, in fp32, so that plain and mirrored tile are both written row by row.
#include "llmc/cuda/muon/ns_result.cuh"
#include <mma.h>

enum { SIDE = 64, DEPTH = 32, THREADS = 128, PAD = 8, RESULT_PITCH = SIDE + 4 };

// ---- operands --------------------------------------------------------------------------------------------

// tile (height, width), pitch width + PAD, from rows row0.. and columns col0.. of a (rows, cols) matrix;
// zeros outside of it.
template <typename T, int HEIGHT, int WIDTH>
static __device__ __forceinline__ void load_tile(T *tile, const T *from, int pitch, int row0, int col0,
                                                 int rows, int cols, bool vectors)
{
    constexpr int N = 16 / sizeof(T);
    if (vectors) { // rows of whole vectors: one is inside the matrix or outside of it, never half
        for (int i = threadIdx.x; i < HEIGHT * WIDTH / N; i += THREADS) {
            int r = i / (WIDTH / N), c = i % (WIDTH / N) * N;
            bool inside = row0 + r < rows && col0 + c < cols;
            *reinterpret_cast<uint4 *>(tile + r * (WIDTH + PAD) + c) =
                inside ? *reinterpret_cast<const uint4 *>(from + (int64_t)(row0 + r) * pitch + col0 + c)
                       : make_uint4(0, 0, 0, 0);
        }
    } else {
        for (int i = threadIdx.x; i < HEIGHT * WIDTH; i += THREADS) {
            int r = i / WIDTH, c = i % WIDTH;
            bool inside = row0 + r < rows && col0 + c < cols;
            tile[r * (WIDTH + PAD) + c] =
                inside ? from[(int64_t)(row0 + r) * pitch + col0 + c] : from_float<T>(0);
        }
    }
}

// ---- products of one step --------------------------------------------------------------------------------

// Accumulates a 32 x 32 quarter of the tile per warp. BY_ROWS: b's tile is (SIDE, DEPTH), else (DEPTH, SIDE).
template <typename T, bool BY_ROWS> struct Accumulator {
    using Layout = typename std::conditional<BY_ROWS, nvcuda::wmma::col_major, nvcuda::wmma::row_major>::type;
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sum[2][2];

    __device__ __forceinline__ void clear()
    {
        for (int i = 0; i < 4; i++)
            nvcuda::wmma::fill_fragment(sum[i / 2][i % 2], 0.0f);
    }
    __device__ __forceinline__ void step(const T *a, const T *b)
    {
        using namespace nvcuda::wmma;
        int warp = threadIdx.x / WARP, row0 = warp / 2 * 32, col0 = warp % 2 * 32;
        constexpr int b_pitch = (BY_ROWS ? DEPTH : SIDE) + PAD;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            fragment<matrix_a, 16, 16, 16, T, row_major> fa[2];
            fragment<matrix_b, 16, 16, 16, T, Layout> fb[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                load_matrix_sync(fa[i], a + (row0 + 16 * i) * (DEPTH + PAD) + k, DEPTH + PAD);
                load_matrix_sync(fb[i],
                                 BY_ROWS ? b + (col0 + 16 * i) * b_pitch + k
                                         : b + k * b_pitch + col0 + 16 * i,
                                 b_pitch);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                mma_sync(sum[i / 2][i % 2], fa[i / 2], fb[i % 2], sum[i / 2][i % 2]);
        }
    }
    __device__ __forceinline__ void store(float *result)
    {
        int warp = threadIdx.x / WARP, row0 = warp / 2 * 32, col0 = warp % 2 * 32;
#pragma unroll
        for (int i = 0; i < 4; i++)
            nvcuda::wmma::store_matrix_sync(result + (row0 + i / 2 * 16) * RESULT_PITCH + col0 + i % 2 * 16,
                                            sum[i / 2][i % 2], RESULT_PITCH, nvcuda::wmma::mem_row_major);
    }
};

// fp32: thread (ty, tx) holds rows ty + 8i and columns tx + 16j, which keeps the columns of a warp in
// different banks.
template <bool BY_ROWS> struct Accumulator<float, BY_ROWS> {
    float sum[8][4];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < 32; i++)
            sum[i / 4][i % 4] = 0;
    }
    __device__ __forceinline__ void step(const float *a, const float *b)
    {
        int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
        constexpr int b_pitch = (BY_ROWS ? DEPTH : SIDE) + PAD;
        for (int k = 0; k < DEPTH; k++) {
            float av[8], bv[4];
#pragma unroll
            for (int i = 0; i < 8; i++)
                av[i] = a[(ty + 8 * i) * (DEPTH + PAD) + k];
#pragma unroll
            for (int j = 0; j < 4; j++)
                bv[j] = BY_ROWS ? b[(tx + 16 * j) * b_pitch + k] : b[k * b_pitch + tx + 16 * j];
#pragma unroll
            for (int i = 0; i < 32; i++)
                sum[i / 4][i % 4] += av[i / 4] * bv[i % 4];
        }
    }
    __device__ __forceinline__ void store(float *result)
    {
        int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < 32; i++)
            result[(ty + 8 * (i / 4)) * RESULT_PITCH + tx + 16 * (i % 4)] = sum[i / 4][i % 4];
    }
};

template <typename T, typename O, ProductForm FORM>
__global__ void __launch_bounds__(THREADS)
    portable_kernel(const NsProduct p, int col_tiles, bool a_vectors, bool b_vectors)
{
    constexpr bool symmetric = FORM != PRODUCT_FULL;
    constexpr int b_height = symmetric ? SIDE : DEPTH, b_width = symmetric ? DEPTH : SIDE;
    __shared__ alignas(32) T a_tile[SIDE * (DEPTH + PAD)];
    __shared__ alignas(32) T b_tile[b_height * (b_width + PAD)];
    __shared__ alignas(32) float result[SIDE * RESULT_PITCH];
    const T *a = (const T *)p.a + blockIdx.y * p.a_stride, *b = (const T *)p.b + blockIdx.y * p.b_stride;
    const T *d = p.d ? (const T *)p.d + blockIdx.y * p.d_stride : nullptr;
    int i, j;
    if (symmetric)
        triangle_position(blockIdx.x, i, j);
    else {
        i = blockIdx.x / col_tiles;
        j = blockIdx.x % col_tiles;
    }
    Accumulator<T, symmetric> sums;
    sums.clear();
    for (int k = 0; k < p.depth; k += DEPTH) {
        load_tile<T, SIDE, DEPTH>(a_tile, a, p.a_pitch, i * SIDE, k, p.rows, p.depth, a_vectors);
        if (symmetric)
            load_tile<T, b_height, b_width>(b_tile, b, p.b_pitch, j * SIDE, k, p.cols, p.depth, b_vectors);
        else
            load_tile<T, b_height, b_width>(b_tile, b, p.b_pitch, k, j * SIDE, p.depth, p.cols, b_vectors);
        __syncthreads();
        sums.step(a_tile, b_tile);
        __syncthreads();
    }
    sums.store(result);
    __syncthreads();
    const float *scale = p.scale ? p.scale + (int64_t)blockIdx.y * p.rows : nullptr;
    write_tile<SIDE, RESULT_PITCH, THREADS>((O *)p.out + blockIdx.y * p.out_stride, result, d, scale, p,
                                            i * SIDE, j * SIDE, symmetric);
}

// ---- launch ----------------------------------------------------------------------------------------------

static bool on_vectors(const void *base, int pitch, int64_t stride, size_t element)
{
    return (uintptr_t)base % 16 == 0 && pitch * element % 16 == 0 && stride * element % 16 == 0;
}

template <typename T, typename O, ProductForm FORM> static void launch(cudaStream_t s, NsProduct p)
{
    enum { MOST = 65535 }; // blocks in y
    int64_t row_tiles = ceil_div(p.rows, SIDE), col_tiles = ceil_div(p.cols, SIDE);
    int64_t tiles = FORM == PRODUCT_FULL ? row_tiles * col_tiles : row_tiles * (row_tiles + 1) / 2;
    // A vector must not reach past the end of a row into what is no part of the matrix: the widths that are
    // read count too.
    size_t size = sizeof(T);
    int b_width = FORM == PRODUCT_FULL ? p.cols : p.depth;
    bool a_vectors = on_vectors(p.a, p.a_pitch, p.a_stride, size) && p.depth * size % 16 == 0;
    bool b_vectors = on_vectors(p.b, p.b_pitch, p.b_stride, size) && b_width * size % 16 == 0;
    int batch = p.batch;
    for (int first = 0; first < batch; first += MOST) {
        p.batch = batch - first < MOST ? batch - first : MOST;
        portable_kernel<T, O, FORM>
            <<<dim3((unsigned)tiles, (unsigned)p.batch), THREADS, 0, s>>>(p, (int)col_tiles, a_vectors,
                                                                          b_vectors);
        p.a = (const T *)p.a + MOST * p.a_stride;
        p.b = (const T *)p.b + MOST * p.b_stride;
        if (p.d)
            p.d = (const T *)p.d + MOST * p.d_stride;
        if (p.scale)
            p.scale += (int64_t)MOST * p.rows;
        p.out = (O *)p.out + MOST * p.out_stride;
    }
    CHECK_LAUNCH();
}

void ns_portable_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype,
                         const NsProduct &p)
{
    if (ns_pipelined_product(s, form, dtype, out_dtype, p))
        return;
    DISPATCH_DTYPE(dtype, {
        if (form == PRODUCT_GRAM && out_dtype == NS_FP32)
            launch<T, float, PRODUCT_GRAM>(s, p);
        else if (form == PRODUCT_GRAM)
            launch<T, T, PRODUCT_GRAM>(s, p);
        else if (form == PRODUCT_SYMMETRIC)
            launch<T, T, PRODUCT_SYMMETRIC>(s, p);
        else
            launch<T, T, PRODUCT_FULL>(s, p);
    });
}
