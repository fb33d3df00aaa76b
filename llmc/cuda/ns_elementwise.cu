// Newton-Schulz primitives that move data and barely compute: norms, casts, scalings, transposes. All run at memory speed.
#include "llmc/cuda/ns_internal.cuh"

enum { THREADS = 256, TILE = 64, SLICE = 32768, MAX_GRID_YZ = 65535 };

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T v[N];
};

static bool aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

// Blocks for a loop over `items` by all threads of the grid.
static int flat_blocks(int64_t items) { return (int)max_i64(1, min_i64(ceil_div(items, THREADS), (int64_t)device_state.sms * 16)); }

// ---- sum of squares ------------------------------------------------------------------------------------------------------

// Block x adds up slice x of matrix y. The slices depend on `count` alone, so that the order of the sum is the matrix's own:
// each thread adds at most SLICE / THREADS squares in fp32, the slices are added in double.
template <int N>
__global__ void __launch_bounds__(THREADS) sum_squares_kernel(float *partials, const float *u, int64_t count, int64_t stride)
{
    __shared__ float shared[WARP];
    const float *v = u + blockIdx.y * stride;
    int64_t from = (int64_t)blockIdx.x * SLICE, to = min((int64_t)count, from + SLICE);
    float sum = 0;
#pragma unroll 4
    for (int64_t i = from + N * threadIdx.x; i < to; i += N * THREADS) {
        Vector<float, N> f = *reinterpret_cast<const Vector<float, N> *>(v + i);
#pragma unroll
        for (int k = 0; k < N; k++) sum += f.v[k] * f.v[k];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partials[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

__global__ void __launch_bounds__(WARP) sum_partials_kernel(float *sumsq, const float *partials, int slices)
{
    double sum = 0;
    for (int i = threadIdx.x; i < slices; i += WARP) sum += partials[(int64_t)blockIdx.x * slices + i];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0) sumsq[blockIdx.x] = (float)sum;
}

void ns_sum_squares(Stream s, float *sumsq, const float *u, int64_t count, int64_t stride, int batch)
{
    int slices = (int)ceil_div(count, SLICE);
    if (slices > NS_PARTIALS) fatal(EXIT_BAD_INPUT, "Newton-Schulz: a matrix of %lld elements is too large", (long long)count);
    int most = (int)min_i64(NS_PARTIALS / slices, MAX_GRID_YZ);
    // Which loads are used must not depend on the place in the batch, for the sum's order depends on it.
    bool vectors = count % 4 == 0 && stride % 4 == 0 && aligned(u, 16);
    for (int first = 0; first < batch; first += most) {
        int now = batch - first < most ? batch - first : most;
        const float *from = u + (int64_t)first * stride;
        dim3 grid((unsigned)slices, (unsigned)now);
        if (vectors)
            sum_squares_kernel<4><<<grid, THREADS, 0, s>>>(ns_partials(), from, count, stride);
        else
            sum_squares_kernel<1><<<grid, THREADS, 0, s>>>(ns_partials(), from, count, stride);
        sum_partials_kernel<<<now, WARP, 0, s>>>(sumsq + first, ns_partials(), slices);
    }
    CHECK_LAUNCH();
}

// ---- load: fp32 -> normalised matrices of the iteration dtype ------------------------------------------------------------

static __device__ __forceinline__ float load_scale(float total, float kappa, float eps, float gain)
{
    if (!isfinite(total)) return __int_as_float(0x7fffffff);
    return total == 0 ? 0 : gain / (kappa * sqrtf(total) + eps);
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) load_kernel(T *x, const float *u, int64_t u_stride, const float *sumsq, float kappa,
                                                       float eps, float gain, int64_t count)
{
    float scale = load_scale(sumsq[blockIdx.y], kappa, eps, gain);
    const float *from = u + blockIdx.y * u_stride;
    T *to = x + blockIdx.y * count;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < count; i += (int64_t)gridDim.x * THREADS * N) {
        Vector<T, N> out;
        Vector<float, N> in = *reinterpret_cast<const Vector<float, N> *>(from + i);
#pragma unroll
        for (int k = 0; k < N; k++) out.v[k] = from_float<T>(in.v[k] * scale);
        *reinterpret_cast<Vector<T, N> *>(to + i) = out;
    }
}

// to (cols, rows) = convert(from (rows, cols) * scale)^T, one TILE x TILE tile a block, converted on the way in. Rows of the shared
// tile are one word longer than the tile, which spreads the columns over the banks.
template <typename T, typename U>
static __device__ __forceinline__ void transpose_tile(T *to, const U *from, int rows, int cols, float scale)
{
    __shared__ T tile[TILE][TILE + 4 / sizeof(T)];
    int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int r = warp; r < TILE && row0 + r < rows; r += THREADS / WARP)
        for (int c = lane; c < TILE && col0 + c < cols; c += WARP)
            tile[r][c] = from_float<T>(to_float(from[(int64_t)(row0 + r) * cols + col0 + c]) * scale);
    __syncthreads();
    for (int c = warp; c < TILE && col0 + c < cols; c += THREADS / WARP)
        for (int r = lane; r < TILE && row0 + r < rows; r += WARP) to[(int64_t)(col0 + c) * rows + row0 + r] = tile[r][c];
}

// The same for 16-bit T, rows and cols multiples of 8: eight elements a thread, both ways.
template <typename T, typename U>
static __device__ __forceinline__ void transpose_tile_vectors(T *to, const U *from, int rows, int cols, float scale)
{
    static_assert(sizeof(T) == 2, "pairs of elements make a word");
    __shared__ uint32_t tile[TILE][TILE / 2 + 1];
    int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
        int r = i / 8, c = i % 8 * 8;
        if (row0 + r >= rows || col0 + c >= cols) continue;
        Vector<U, 8> in = *reinterpret_cast<const Vector<U, 8> *>(from + (int64_t)(row0 + r) * cols + col0 + c);
        Vector<T, 8> out;
#pragma unroll
        for (int k = 0; k < 8; k++) out.v[k] = from_float<T>(to_float(in.v[k]) * scale);
#pragma unroll
        for (int k = 0; k < 4; k++) tile[r][c / 2 + k] = reinterpret_cast<const uint32_t *>(&out)[k];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
        int c = i / 8, r = i % 8 * 8;
        if (row0 + r >= rows || col0 + c >= cols) continue;
        Vector<T, 8> out;
#pragma unroll
        for (int k = 0; k < 8; k++) out.v[k] = reinterpret_cast<const T *>(&tile[r + k][0])[c];
        *reinterpret_cast<Vector<T, 8> *>(to + (int64_t)(col0 + c) * rows + row0 + r) = out;
    }
}

template <typename T, typename U, bool VECTORS>
static __device__ __forceinline__ void transpose_any(T *to, const U *from, int rows, int cols, float scale)
{
    if constexpr (VECTORS && sizeof(T) == 2)
        transpose_tile_vectors(to, from, rows, cols, scale);
    else
        transpose_tile(to, from, rows, cols, scale);
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(THREADS) load_transposed_kernel(T *x, const float *u, int64_t u_stride, const float *sumsq,
                                                                  float kappa, float eps, float gain, int rows, int cols)
{
    float scale = load_scale(sumsq[blockIdx.z], kappa, eps, gain);
    transpose_any<T, float, VECTORS>(x + (int64_t)blockIdx.z * rows * cols, u + blockIdx.z * u_stride, rows, cols, scale);
}

template <typename T, bool VECTORS> __global__ void __launch_bounds__(THREADS) transpose_kernel(T *y, const T *x, int rows, int cols)
{
    int64_t at = (int64_t)blockIdx.z * rows * cols;
    transpose_any<T, T, VECTORS>(y + at, x + at, rows, cols, 1);
}

static dim3 tile_grid(int rows, int cols, int batch)
{
    return dim3((unsigned)ceil_div(cols, TILE), (unsigned)ceil_div(rows, TILE), (unsigned)batch);
}

void ns_load(Stream s, NsDtype dtype, void *x, const float *u, int64_t u_stride, const float *sumsq, float kappa, float eps,
             float gain, int rows, int cols, int batch, bool transpose)
{
    int64_t count = (int64_t)rows * cols;
    bool vectors = count % 8 == 0 && u_stride % 4 == 0 && aligned(u, 16) && aligned(x, 16);
    for (int first = 0; first < batch; first += MAX_GRID_YZ) {
        int now = batch - first < MAX_GRID_YZ ? batch - first : MAX_GRID_YZ;
        const float *from = u + (int64_t)first * u_stride, *norms = sumsq + first;
        int64_t items = count / (vectors ? 8 : 1);
        dim3 grid((unsigned)max_i64(1, min_i64(ceil_div(items, THREADS), 1 + flat_blocks(items * now) / now)), (unsigned)now);
        DISPATCH_DTYPE(dtype, {
            T *to = (T *)x + first * count;
            dim3 tiles = tile_grid(rows, cols, now);
            if (transpose && vectors && rows % 8 == 0 && cols % 8 == 0)
                load_transposed_kernel<T, true><<<tiles, THREADS, 0, s>>>(to, from, u_stride, norms, kappa, eps, gain, rows, cols);
            else if (transpose)
                load_transposed_kernel<T, false><<<tiles, THREADS, 0, s>>>(to, from, u_stride, norms, kappa, eps, gain, rows, cols);
            else if (vectors)
                load_kernel<T, 8><<<grid, THREADS, 0, s>>>(to, from, u_stride, norms, kappa, eps, gain, count);
            else
                load_kernel<T, 1><<<grid, THREADS, 0, s>>>(to, from, u_stride, norms, kappa, eps, gain, count);
        });
    }
    CHECK_LAUNCH();
}

void ns_transpose(Stream s, NsDtype dtype, void *y, const void *x, int rows, int cols, int batch)
{
    for (int first = 0; first < batch; first += MAX_GRID_YZ) {
        int now = batch - first < MAX_GRID_YZ ? batch - first : MAX_GRID_YZ;
        int64_t at = (int64_t)first * rows * cols;
        dim3 tiles = tile_grid(rows, cols, now);
        bool vectors = rows % 8 == 0 && cols % 8 == 0 && aligned(x, 16) && aligned(y, 16);
        DISPATCH_DTYPE(dtype, {
            if (vectors)
                transpose_kernel<T, true><<<tiles, THREADS, 0, s>>>((T *)y + at, (const T *)x + at, rows, cols);
            else
                transpose_kernel<T, false><<<tiles, THREADS, 0, s>>>((T *)y + at, (const T *)x + at, rows, cols);
        });
    }
    CHECK_LAUNCH();
}

// ---- rows, diagonal, AOL -------------------------------------------------------------------------------------------------

// One warp per row in all of these: `call(row, lane)`.
template <typename F> static __device__ __forceinline__ void for_rows(int64_t rows, F call)
{
    int64_t warp = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, warps = (int64_t)gridDim.x * (THREADS / WARP);
    for (int64_t row = warp; row < rows; row += warps) call(row, (int)(threadIdx.x % WARP));
}

// q = z + a I, N elements at a time
template <typename T, int N>
__global__ void __launch_bounds__(THREADS) add_diagonal_kernel(T *q, const T *z, float a, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        int diagonal = (int)(row % n);
        for (int j = lane * N; j < n; j += WARP * N) {
            Vector<T, N> v = *reinterpret_cast<const Vector<T, N> *>(z + row * n + j);
#pragma unroll
            for (int k = 0; k < N; k++)
                if (j + k == diagonal) v.v[k] = from_float<T>(to_float(v.v[k]) + a);
            *reinterpret_cast<Vector<T, N> *>(q + row * n + j) = v;
        }
    });
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) scale_rows_kernel(T *x, const float *scale, int m, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        float factor = scale[row];
        for (int j = lane * N; j < m; j += WARP * N) {
            Vector<T, N> v = *reinterpret_cast<const Vector<T, N> *>(x + row * m + j);
#pragma unroll
            for (int k = 0; k < N; k++) v.v[k] = from_float<T>(to_float(v.v[k]) * factor);
            *reinterpret_cast<Vector<T, N> *>(x + row * m + j) = v;
        }
    });
}

__global__ void __launch_bounds__(THREADS) aol_scales_kernel(float *scale, const float *raw, float gain, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        float sum = 0;
        for (int j = lane; j < n; j += WARP) sum += fabsf(raw[row * n + j]);
        sum = warp_sum(sum);
        if (lane == 0) scale[row] = sum == 0 ? 0 : gain / sqrtf(1.02f * sum);
    });
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) aol_apply_kernel(T *a, const float *raw, const float *scale, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        float own = scale[row];
        const float *column_scale = scale + row / n * n;
        for (int j = lane * N; j < n; j += WARP * N) {
            Vector<float, N> v = *reinterpret_cast<const Vector<float, N> *>(raw + row * n + j);
            Vector<T, N> out;
            // The two scales first: their product commutes, so that the result is symmetric to the last bit.
#pragma unroll
            for (int k = 0; k < N; k++) out.v[k] = from_float<T>(own * column_scale[j + k] * v.v[k]);
            *reinterpret_cast<Vector<T, N> *>(a + row * n + j) = out;
        }
    });
}

static int warp_blocks(int64_t rows) { return flat_blocks(rows * WARP); }

void ns_add_diagonal(Stream s, NsDtype dtype, void *q, const void *z, float a, int n, int batch)
{
    int64_t rows = (int64_t)n * batch;
    if (rows == 0) return;
    bool vectors = n % 8 == 0 && aligned(q, 16) && aligned(z, 16);
    DISPATCH_DTYPE(dtype, {
        constexpr int N = 16 / sizeof(T);
        if (vectors)
            add_diagonal_kernel<T, N><<<warp_blocks(rows), THREADS, 0, s>>>((T *)q, (const T *)z, a, n, rows);
        else
            add_diagonal_kernel<T, 1><<<warp_blocks(rows), THREADS, 0, s>>>((T *)q, (const T *)z, a, n, rows);
    });
    CHECK_LAUNCH();
}

void ns_scale_rows(Stream s, NsDtype dtype, void *x, const float *scale, int n, int m, int batch)
{
    int64_t rows = (int64_t)n * batch;
    if (rows == 0) return;
    bool vectors = m % 8 == 0 && aligned(x, 16);
    DISPATCH_DTYPE(dtype, {
        constexpr int N = 16 / sizeof(T);
        if (vectors)
            scale_rows_kernel<T, N><<<warp_blocks(rows), THREADS, 0, s>>>((T *)x, scale, m, rows);
        else
            scale_rows_kernel<T, 1><<<warp_blocks(rows), THREADS, 0, s>>>((T *)x, scale, m, rows);
    });
    CHECK_LAUNCH();
}

void ns_aol(Stream s, NsDtype dtype, float *scale, void *a, const void *raw, float gain, int n, int batch)
{
    int64_t rows = (int64_t)n * batch;
    if (rows == 0) return;
    aol_scales_kernel<<<warp_blocks(rows), THREADS, 0, s>>>(scale, (const float *)raw, gain, n, rows);
    bool vectors = n % 4 == 0 && aligned(a, 16) && aligned(raw, 16) && aligned(scale, 16);
    DISPATCH_DTYPE(dtype, {
        if (vectors)
            aol_apply_kernel<T, 4><<<warp_blocks(rows), THREADS, 0, s>>>((T *)a, (const float *)raw, scale, n, rows);
        else
            aol_apply_kernel<T, 1><<<warp_blocks(rows), THREADS, 0, s>>>((T *)a, (const float *)raw, scale, n, rows);
    });
    CHECK_LAUNCH();
}

// ---- pitch ---------------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(THREADS) repack_kernel(uint16_t *to, const uint16_t *from, int64_t rows, int cols, int to_pitch)
{
    for_rows(rows, [=](int64_t row, int lane) {
#pragma unroll 8
        for (int j = lane; j < cols; j += WARP) to[row * to_pitch + j] = from[row * cols + j];
    });
}

void ns_repack(cudaStream_t s, void *to, const void *from, int64_t rows, int cols, int to_pitch)
{
    repack_kernel<<<warp_blocks(rows), THREADS, 0, s>>>((uint16_t *)to, (const uint16_t *)from, rows, cols, to_pitch);
    CHECK_LAUNCH();
}
