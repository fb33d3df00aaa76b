// Generators: a product with w1 by matmul.h, and beside it kernels for all that has at most 64 columns: tiles
// of 64 tokens in shared memory, in fp32, each thread 4 x 4 results. The products with w1 read or write x
// once; a kernel that held w1 as well would save pre's way through the L2 cache and a launch, some 3 us a
// call.
//
// At 4.27 TB/s, d = 768, width 64, K 41; us for 16384 | 49152 tokens (the products x w1^T and dpre w1 apart):
//   forward: pre read, out written: 4.8 MB                         1.1 |  3.4, arithmetic 1.5 |  4.6
//   backward: dout, pre read, dpre written: 6.9 MB                 1.6 |  4.9, arithmetic 4.0 | 12
#include "llmc/cuda/device/cuda_common.cuh"

enum {
    TILE = GENERATOR_MOST, // tokens of a tile; no more hidden units, nor numbers
    PITCH = TILE + 4,      // floats of a row in shared memory: rows begin in different banks
    THREADS = 256,         // of which each has 4 x 4 of a tile's results
    CTAS = 2,              // CTAs a multiprocessor of the backward
    QUARTERS = THREADS / TILE,
    SUM_STRIPES = 8 // of the CTAs whose partial sums are added up
};
static_assert(THREADS == TILE / 4 * (TILE / 4), "a thread has 4 x 4 of a tile's results");
typedef float Tile[TILE][PITCH];

// Of gelu: its value, and its derivative.
static __device__ __forceinline__ float gelu(float u, float &slope)
{
    const float half_root = 0.70710678f, density = 0.39894228f; // 1 / sqrt 2, 1 / sqrt(2 pi)
    float share = 0.5f * (1 + erff(u * half_root));
    slope = share + u * density * expf(-0.5f * u * u);
    return u * share;
}

static __device__ __forceinline__ void load4(float (&x)[4], const float *from)
{
    float4 u = *reinterpret_cast<const float4 *>(from);
    x[0] = u.x;
    x[1] = u.y;
    x[2] = u.z;
    x[3] = u.w;
}

static __device__ __forceinline__ void store8(float *to, const float (&x)[8])
{
    *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4 *>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

// sum[i][j] += a[4 row + i][e] b[e][4 col + j], summed over e < depth, which is a multiple of four.
static __device__ __forceinline__ void add_product(float (&sum)[4][4], const Tile a, const Tile b, int depth,
                                                   int row, int col)
{
    for (int e = 0; e < depth; e += 4) {
        float x[4][4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load4(x[i], &a[4 * row + i][e]);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            load4(y, &b[e + k][4 * col]);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] += x[i][k] * y[j];
        }
    }
}

// sum[i][j] += a[e][4 row + i] b[e][4 col + j], summed over all e.
static __device__ __forceinline__ void add_transposed_product(float (&sum)[4][4], const Tile a, const Tile b,
                                                              int row, int col)
{
#pragma unroll 4
    for (int e = 0; e < TILE; e++) {
        float x[4], y[4];
        load4(x, &a[e][4 * row]);
        load4(y, &b[e][4 * col]);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[i][j] += x[i] * y[j];
    }
}

// ---- forward ----------------------------------------------------------------------------------------------

// A CTA a tile: hidden [token][unit], w2 [unit][number].
__global__ __launch_bounds__(THREADS) void generator_kernel(float *out, const floatX *pre, Generator g, int N)
{
    __shared__ __align__(16) Tile hidden, w2;
    int first = blockIdx.x * TILE, rows = min(TILE, N - first), K = g.K;
    for (int i = threadIdx.x; i < TILE * g.width / 8; i += THREADS) {
        float x[8], w[8], slope;
        int at = i % TILE, v = i / TILE; // a token and a number
        uint4 zero = make_uint4(0, 0, 0, 0);
        unpack8(at < rows ? load_vec(pre + (int64_t)(first + at) * g.width, v) : zero, x);
        unpack8(at < K ? load_vec(g.w2 + at * g.width, v) : zero, w);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            x[e] = gelu(x[e], slope);
            w2[8 * v + e][at] = w[e];
        }
        store8(&hidden[at][8 * v], x);
    }
    __syncthreads();

    float sum[4][4] = {}, scale = *g.scale;
    int row = threadIdx.x / 16, col = threadIdx.x % 16;
    add_product(sum, hidden, w2, g.width, row, col);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int k = 4 * col + j;
        float b = k < K ? to_float(g.b2[k]) : 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (k < K && 4 * row + i < rows)
                out[(int64_t)(first + 4 * row + i) * K + k] = scale * (sum[i][j] + b);
    }
}

void generator_forward(Stream s, float *out, floatX *pre, const Generator *g, const floatX *x, int N, int d)
{
    OP_SCOPE(generator_forward, g, N, d);
    assert(g->width <= GENERATOR_MOST && g->K <= GENERATOR_MOST && g->width % 8 == 0);
    if (N <= 0)
        return;
    ProductContext c = {s, NULL};
    Product p = {pre, x, g->w1, NULL, NULL, N, d, g->width, 1};
    matmul_forward(&c, &p);
    generator_kernel<<<(unsigned)ceil_div(N, TILE), THREADS, 0, s>>>(out, pre, *g, N);
    CHECK_LAUNCH();
}

// ---- backward ---------------------------------------------------------------------------------------------

struct BackwardTiles {
    Tile dout;          // [token][number]
    Tile hidden, slope; // [token][unit]
    Tile w2;            // [number][unit]
};

// Zeros where a tile has no token. Columns beyond the last number, and the last unit, are left as they are.
static __device__ __forceinline__ void load_tiles(BackwardTiles &s, const GeneratorBackward &a,
                                                  const Generator &g, int first, int N)
{
    int rows = min(TILE, N - first), lane = threadIdx.x % WARP;
    for (int i = threadIdx.x; i < TILE * g.width / 8; i += THREADS) {
        float x[8], slope[8];
        int t = i % TILE, v = i / TILE;
        unpack8(t < rows ? load_vec(a.pre + (int64_t)(first + t) * g.width, v) : make_uint4(0, 0, 0, 0), x);
#pragma unroll
        for (int e = 0; e < 8; e++)
            x[e] = gelu(x[e], slope[e]);
        store8(&s.hidden[t][8 * v], x);
        store8(&s.slope[t][8 * v], slope);
    }
    for (int t = threadIdx.x / WARP; t < TILE; t += THREADS / WARP)
        for (int k = lane; k < g.K; k += WARP)
            s.dout[t][k] = t < rows ? a.dout[(int64_t)(first + t) * g.K + k] : 0;
}

// dpre of a tile: thread (row, col) has tokens 4 row .. and units 4 col ...
static __device__ __forceinline__ void store_dpre(const BackwardTiles &s, const GeneratorBackward &a,
                                                  const Generator &g, int first, int N, int row, int col)
{
    float sum[4][4] = {}, scale = *g.scale;
    add_product(sum, s.dout, s.w2, (g.K + 3) / 4 * 4, row, col);
    if (4 * col >= g.width)
        return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int t = first + 4 * row + i;
        float slope[4];
        load4(slope, &s.slope[4 * row + i][4 * col]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            slope[j] *= scale * sum[i][j];
        if (t < N)
            *reinterpret_cast<uint2 *>(a.dpre + (int64_t)t * g.width + 4 * col) =
                make_uint2(pack2(slope[0], slope[1]), pack2(slope[2], slope[3]));
    }
}

// Each CTA takes tiles in turn and adds up, over all of them, sums = dout^T hidden (K, width) and the columns
// of dout (K).  partials (gridDim.x, K * width + K)
__global__ __launch_bounds__(THREADS, CTAS) void generator_backward_kernel(GeneratorBackward a, Generator g,
                                                                           int N, float *partials)
{
    extern __shared__ __align__(16) unsigned char memory[];
    BackwardTiles &s = *reinterpret_cast<BackwardTiles *>(memory);
    int row = threadIdx.x / 16, col = threadIdx.x % 16, width = g.width, K = g.K;
    int number = threadIdx.x % TILE, quarter = threadIdx.x / TILE;
    for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
        int k = i / TILE, j = i % TILE;
        s.dout[k][j] = s.hidden[k][j] = 0;
        s.w2[k][j] = k < K && j < width ? to_float(g.w2[k * width + j]) : 0;
    }
    float sum[4][4] = {}, column = 0; // column: of a quarter of the tokens
    for (int first = blockIdx.x * TILE; first < N; first += gridDim.x * TILE) {
        __syncthreads();
        load_tiles(s, a, g, first, N);
        __syncthreads();
        store_dpre(s, a, g, first, N, row, col);
        add_transposed_product(sum, s.dout, s.hidden, row, col);
#pragma unroll
        for (int t = 0; t < TILE / QUARTERS; t++)
            column += s.dout[TILE / QUARTERS * quarter + t][number];
    }

    float *to = partials + (int64_t)blockIdx.x * K * (width + 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (4 * row + i < K && 4 * col + j < width)
                to[(4 * row + i) * width + 4 * col + j] = sum[i][j];
    __syncthreads();
    s.slope[quarter][number] = column;
    __syncthreads();
    if (threadIdx.x < K) {
        for (int q = 1; q < QUARTERS; q++)
            column += s.slope[q][threadIdx.x];
        to[K * width + threadIdx.x] = column;
    }
}

// Adds up the CTAs' partial sums, in their order within a stripe: a CTA has WARP columns of them, a warp a
// stripe. From the sums follow the gradients of w2, b2 and the scale.
__global__ __launch_bounds__(SUM_STRIPES *WARP) void generator_sums_kernel(GeneratorBackward a, Generator g,
                                                                           const float *partials, int ctas,
                                                                           float *scale_partials,
                                                                           unsigned *counter)
{
    __shared__ float stripes[SUM_STRIPES][WARP];
    int lane = threadIdx.x % WARP, stripe = threadIdx.x / WARP, i = blockIdx.x * WARP + lane;
    int products = g.K * g.width, count = products + g.K;
    float x = 0;
    for (int c = stripe; c < ctas && i < count; c += SUM_STRIPES)
        x += partials[(int64_t)c * count + i];
    stripes[stripe][lane] = x;
    __syncthreads();
    float share[1] = {0};
    if (stripe == 0 && i < count) {
        for (int c = 1; c < SUM_STRIPES; c++)
            x += stripes[c][lane];
        float w = to_float(i < products ? g.w2[i] : g.b2[i - products]);
        *(i < products ? a.dw2 + i : a.db2 + i - products) += *g.scale * x;
        share[0] = w * x;
    }
    if (a.dscale)
        grid_accumulate<1>(a.dscale, share, scale_partials, counter);
}

void generator_backward(Stream s, const GeneratorBackward *a, int N, int d)
{
    OP_SCOPE(generator_backward, a, N, d);
    const Generator *g = a->generator;
    int count = g->K * (g->width + 1), ctas = (int)min_i64(ceil_div(N, TILE), CTAS * device_state.sms),
        sum_ctas = (int)ceil_div(count, WARP);
    assert(g->width <= GENERATOR_MOST && g->K <= GENERATOR_MOST && g->width % 8 == 0);
    if (N <= 0)
        return;
    float *partials = scratch_floats(s, SCRATCH_GENERATOR, (size_t)ctas * count + (size_t)sum_ctas);
    CUDA_CHECK(cudaFuncSetAttribute(generator_backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    sizeof(BackwardTiles)));
    generator_backward_kernel<<<(unsigned)ctas, THREADS, sizeof(BackwardTiles), s>>>(*a, *g, N, partials);
    CHECK_LAUNCH();
    generator_sums_kernel<<<(unsigned)sum_ctas, SUM_STRIPES * WARP, 0, s>>>(
        *a, *g, partials, ctas, partials + (size_t)ctas * count, scratch_counter(s, SCRATCH_GENERATOR));
    CHECK_LAUNCH();
    ProductContext c = {s, NULL};
    InputGrad p = {a->dx, a->dpre, g->w1, N, d, g->width, a->residual};
    matmul_backward_input(&c, &p);
}
