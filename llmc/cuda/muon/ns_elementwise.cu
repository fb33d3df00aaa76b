// Newton-Schulz primitives that move data and barely compute: norms, casts, scalings, transposes. All run at
// memory speed.
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/muon/ns_internal.cuh"

enum { THREADS = 256, TILE = 64, SLICE = 32768, MAX_GRID_YZ = 65535, AT_ONCE = 16 };

template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector {
    T v[N];
};

// PDL: the next kernel of the chain may launch once all CTAs of this one are resident; it waits for their
// writes with pdl_wait.
static __device__ __forceinline__ void allow_next_launch(void)
{
#if HOPPER
    pdl_launch_dependents();
#endif
}

static bool aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

// Blocks for a loop over `items` by all threads of the grid.
static int flat_blocks(int64_t items)
{
    return (int)max_i64(1, min_i64(ceil_div(items, THREADS), (int64_t)device_state.sms * 16));
}

// ---- sum of squares --------------------------------------------------------------------------------------

// Whether this block is the last of those with its y. Then it sees what they have written.
static __device__ __forceinline__ bool last_block(unsigned *through)
{
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(through, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

static __device__ __forceinline__ void sum_partials(float *sumsq, const float *partials, int slices)
{
    double sum = 0;
    if (threadIdx.x >= WARP)
        return;
#pragma unroll 8
    for (int i = threadIdx.x; i < slices; i += WARP)
        sum += __ldcg(partials + i);
    for (int step = 16; step; step >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x == 0)
        *sumsq = (float)sum;
}

// Block x adds up slice x of matrix y. The slices depend on `count` alone, so that the order of the sum is
// the matrix's own: each thread adds at most SLICE / THREADS squares in fp32, the slices are added in double.
template <int N>
__global__ void __launch_bounds__(THREADS)
    sum_squares_kernel(float *sumsq, float *partials, unsigned *through, const float *u, int64_t count,
                       int64_t stride)
{
    __shared__ float shared[WARP];
    const float *v = u + blockIdx.y * stride;
    int64_t from = (int64_t)blockIdx.x * SLICE, to = min((int64_t)count, from + SLICE);
    float sum = 0;
#pragma unroll 4
    for (int64_t i = from + N * threadIdx.x; i < to; i += N * THREADS) {
        Vector<float, N> f = *reinterpret_cast<const Vector<float, N> *>(v + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            sum += f.v[k] * f.v[k];
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        partials[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = sum;
    if (last_block(through + blockIdx.y))
        sum_partials(sumsq + blockIdx.y, partials + (int64_t)blockIdx.y * gridDim.x, gridDim.x);
}

static void sum_squares(Stream s, float *sumsq, const float *u, int64_t count, int64_t stride, int batch)
{
    int slices = (int)ceil_div(count, SLICE);
    if (slices > NS_PARTIALS)
        fatal(EXIT_BAD_INPUT, "Newton-Schulz: a matrix of %lld elements is too large", (long long)count);
    int most = (int)min_i64(NS_PARTIALS / slices, MAX_GRID_YZ);
    float *partials = (float *)scratch_of(s, SCRATCH_NS_NORMS, NS_NORM_BYTES);
    unsigned *through = (unsigned *)(partials + NS_PARTIALS);
    // Which loads are used must not depend on the place in the batch, for the sum's order depends on it.
    bool vectors = count % 4 == 0 && stride % 4 == 0 && aligned(u, 16);
    for (int first = 0; first < batch; first += most) {
        int now = batch - first < most ? batch - first : most;
        const float *from = u + (int64_t)first * stride;
        dim3 grid((unsigned)slices, (unsigned)now);
        if (vectors)
            sum_squares_kernel<4>
                <<<grid, THREADS, 0, s>>>(sumsq + first, partials, through, from, count, stride);
        else
            sum_squares_kernel<1>
                <<<grid, THREADS, 0, s>>>(sumsq + first, partials, through, from, count, stride);
    }
    CHECK_LAUNCH();
}

// ---- load: fp32 -> normalised matrices of the iteration dtype --------------------------------------------

// Of matrix z; without norms it is the gain.
static __device__ __forceinline__ float load_scale(const float *sumsq, int z, float kappa, float eps,
                                                   float gain)
{
    if (!sumsq)
        return gain;
    float total = sumsq[z];
    if (!isfinite(total))
        return __int_as_float(0x7fffffff);
    return total == 0 ? 0 : gain / (kappa * sqrtf(total) + eps);
}

// Matrix z of the batch for block (x, y): the last first. They are what L2 still holds of the reading for the
// norm.
static __device__ __forceinline__ int last_first(void) { return gridDim.y - 1 - blockIdx.y; }

// Packed matrices, N elements at a time.
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    load_kernel(T *x, const float *u, int64_t u_stride, const float *sumsq, float kappa, float eps,
                float gain, int64_t count)
{
    allow_next_launch();
    int z = last_first();
    float scale = load_scale(sumsq, z, kappa, eps, gain);
    const float *from = u + z * u_stride;
    T *to = x + z * count;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < count;
         i += (int64_t)gridDim.x * THREADS * N) {
        Vector<T, N> out;
        Vector<float, N> in = *reinterpret_cast<const Vector<float, N> *>(from + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            out.v[k] = from_float<T>(in.v[k] * scale);
        *reinterpret_cast<Vector<T, N> *>(to + i) = out;
    }
}

// Into rows that are `pitch` apart. A block has AT_ONCE * THREADS columns of a row, or what is left of it:
// all of them are on their way before the first is stored. The last rows first, like matrices.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    load_rows_kernel(T *x, const float *u, int64_t u_stride, const float *sumsq, float kappa, float eps,
                     float gain, int rows, int cols, int pitch)
{
    allow_next_launch();
    int z = last_first(), along = (cols + AT_ONCE * THREADS - 1) / (AT_ONCE * THREADS),
        row = rows - 1 - blockIdx.x / along, first = blockIdx.x % along * (AT_ONCE * THREADS) + threadIdx.x;
    const float *from = u + z * u_stride + (int64_t)row * cols;
    T *to = x + ((int64_t)z * rows + row) * pitch;
    float v[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
        v[k] = first + k * THREADS < cols ? from[first + k * THREADS] : 0;
    float scale = load_scale(sumsq, z, kappa, eps, gain);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
        if (first + k * THREADS < cols)
            to[first + k * THREADS] = from_float<T>(v[k] * scale);
}

// to (cols, rows) = convert(from (rows, cols) * scale)^T, pitches as named, one TILE x TILE tile a block,
// converted on the way in; unit, if not NULL: of the columns, each divided by its own, a power of two. Rows
// of the shared tile are one word longer than the tile, which spreads the columns over the banks.
template <typename T, typename U>
static __device__ __forceinline__ void transpose_tile(T *to, int to_pitch, const U *from, int from_pitch,
                                                      int rows, int cols, float scale, const float *unit)
{
    __shared__ T tile[TILE][TILE + 4 / sizeof(T)];
    int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE, lane = threadIdx.x % WARP,
        warp = threadIdx.x / WARP;
    for (int r = warp; r < TILE && row0 + r < rows; r += THREADS / WARP)
        for (int c = lane; c < TILE && col0 + c < cols; c += WARP) {
            float own = unit ? 1 / unit[col0 + c] : scale;
            tile[r][c] = from_float<T>(to_float(from[(int64_t)(row0 + r) * from_pitch + col0 + c]) * own);
        }
    __syncthreads();
    for (int c = warp; c < TILE && col0 + c < cols; c += THREADS / WARP)
        for (int r = lane; r < TILE && row0 + r < rows; r += WARP)
            to[(int64_t)(col0 + c) * to_pitch + row0 + r] = tile[r][c];
}

// The same for 16-bit T, rows and cols multiples of 8: eight elements a thread, both ways.
template <typename T, typename U>
static __device__ __forceinline__ void transpose_tile_vectors(T *to, const U *from, int rows, int cols,
                                                              float scale, const float *unit)
{
    static_assert(sizeof(T) == 2, "pairs of elements make a word");
    __shared__ uint32_t tile[TILE][TILE / 2 + 1];
    int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
        int r = i / 8, c = i % 8 * 8;
        if (row0 + r >= rows || col0 + c >= cols)
            continue;
        Vector<U, 8> in =
            *reinterpret_cast<const Vector<U, 8> *>(from + (int64_t)(row0 + r) * cols + col0 + c);
        Vector<T, 8> out;
#pragma unroll
        for (int k = 0; k < 8; k++)
            out.v[k] = from_float<T>(to_float(in.v[k]) * (unit ? 1 / unit[col0 + c + k] : scale));
#pragma unroll
        for (int k = 0; k < 4; k++)
            tile[r][c / 2 + k] = reinterpret_cast<const uint32_t *>(&out)[k];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < TILE * TILE / 8; i += THREADS) {
        int c = i / 8, r = i % 8 * 8;
        if (row0 + r >= rows || col0 + c >= cols)
            continue;
        Vector<T, 8> out;
#pragma unroll
        for (int k = 0; k < 8; k++)
            out.v[k] = reinterpret_cast<const T *>(&tile[r + k][0])[c];
        *reinterpret_cast<Vector<T, 8> *>(to + (int64_t)(col0 + c) * rows + row0 + r) = out;
    }
}

template <typename T, typename U, bool VECTORS>
static __device__ __forceinline__ void transpose_any(T *to, int to_pitch, const U *from, int from_pitch,
                                                     int rows, int cols, float scale, const float *unit)
{
    if constexpr (VECTORS && sizeof(T) == 2)
        transpose_tile_vectors(to, from, rows, cols, scale, unit); // packed: widths are multiples of 8
    else
        transpose_tile(to, to_pitch, from, from_pitch, rows, cols, scale, unit);
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(THREADS)
    load_transposed_kernel(T *x, const float *unit, const float *u, int64_t u_stride, const float *sumsq,
                           float kappa, float eps, float gain, int rows, int cols, int pitch)
{
    float scale = load_scale(sumsq, blockIdx.z, kappa, eps, gain);
    transpose_any<T, float, VECTORS>(x + (int64_t)blockIdx.z * cols * pitch, pitch, u + blockIdx.z * u_stride,
                                     cols, rows, cols, scale,
                                     unit ? unit + (int64_t)blockIdx.z * cols : NULL);
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(THREADS) transpose_kernel(T *y, const T *x, int rows, int cols, int pitch)
{
    int64_t z = blockIdx.z;
    transpose_any<T, T, VECTORS>(y + z * rows * cols, rows, x + z * rows * pitch, pitch, rows, cols, 1, NULL);
}

static dim3 tile_grid(int rows, int cols, int batch)
{
    return dim3((unsigned)ceil_div(cols, TILE), (unsigned)ceil_div(rows, TILE), (unsigned)batch);
}

// Matrices `first` to first + count - 1 of a load, of which all pointers begin with the first.
static NsLoad part_of(const NsLoad *l, int n, int first, int count)
{
    NsLoad part = *l;
    part.u = l->u + (int64_t)first * l->u_stride;
    part.sumsq = l->sumsq ? l->sumsq + first : NULL;
    part.unit = l->unit ? l->unit + (int64_t)first * n : NULL;
    part.batch = count;
    return part;
}

// With the units of ns_load_rows, or with norms or neither. x is packed where it can be.
template <typename T> static void load_transposed(Stream s, T *x, const NsLoad &l, int pitch)
{
    dim3 tiles = tile_grid(l.rows, l.cols, l.batch);
    bool vectors = pitch == l.rows && l.rows % 8 == 0 && l.cols % 8 == 0 && l.u_stride % 4 == 0 &&
                   aligned(l.u, 16) && aligned(x, 16);
    auto kernel = vectors ? load_transposed_kernel<T, true> : load_transposed_kernel<T, false>;
    kernel<<<tiles, THREADS, 0, s>>>(x, l.unit, l.u, l.u_stride, l.sumsq, l.kappa, l.eps, l.gain, l.rows,
                                     l.cols, pitch);
}

template <typename T> static void load(Stream s, T *x, const NsLoad &l, int pitch)
{
    int64_t count = (int64_t)l.rows * l.cols;
    bool packed = l.cols == pitch,
         vectors = packed && count % 8 == 0 && l.u_stride % 4 == 0 && aligned(l.u, 16) && aligned(x, 16);
    int64_t items = count / (vectors ? 8 : 1),
            blocks = min_i64(ceil_div(items, THREADS), 1 + flat_blocks(items * l.batch) / l.batch);
    dim3 grid((unsigned)max_i64(1, blocks), (unsigned)l.batch),
        parts((unsigned)(l.rows * ceil_div(l.cols, AT_ONCE * THREADS)), (unsigned)l.batch); // of rows
    auto packed_kernel = vectors ? load_kernel<T, 8> : load_kernel<T, 1>;
    if (packed)
        packed_kernel<<<grid, THREADS, 0, s>>>(x, l.u, l.u_stride, l.sumsq, l.kappa, l.eps, l.gain, count);
    else
        load_rows_kernel<T><<<parts, THREADS, 0, s>>>(x, l.u, l.u_stride, l.sumsq, l.kappa, l.eps, l.gain,
                                                      l.rows, l.cols, pitch);
}

void ns_load(Stream s, NsDtype dtype, const NsLoad *l)
{
    OP_SCOPE(ns_load, dtype, l->rows, l->cols, l->batch);
    int n = l->transpose ? l->cols : l->rows, pitch = ns_pitch(dtype, n, l->transpose ? l->rows : l->cols);
    if (l->sumsq)
        sum_squares(s, l->sumsq, l->u, (int64_t)l->rows * l->cols, l->u_stride, l->batch);
    for (int first = 0; first < l->batch; first += MAX_GRID_YZ) {
        NsLoad part = part_of(l, n, first, (int)min_i64(l->batch - first, MAX_GRID_YZ));
        part.unit = NULL;
        DISPATCH_DTYPE(dtype, {
            T *to = (T *)l->x + (int64_t)first * n * pitch;
            if (l->transpose)
                load_transposed(s, to, part, pitch);
            else
                load(s, to, part, pitch);
        });
    }
    CHECK_LAUNCH();
}

// From the bits of the largest absolute value, which have the order of the values.
static __device__ __forceinline__ float unit_of(uint32_t most)
{
    if (most >= 0x7f800000u)
        return __int_as_float(0x7fffffff);
    return most ? ldexpf(1, max(-100, min(100, ilogbf(__uint_as_float(most)) - 5))) : 1;
}

static __device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <int COUNT> static __device__ __forceinline__ uint32_t block_most(uint32_t most, uint32_t *shared)
{
    for (int step = 16; step; step >>= 1)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = most;
    __syncthreads();
    for (int i = 0; i < COUNT / WARP; i++)
        most = max(most, shared[i]);
    return most;
}

// A block for each row of each matrix: the second reading finds it in the cache.
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    load_with_units_kernel(T *x, float *unit, const float *u, int64_t u_stride, int rows, int cols, int pitch)
{
    __shared__ uint32_t shared[THREADS / WARP];
    allow_next_launch();
    int64_t row = (int64_t)blockIdx.y * rows + blockIdx.x;
    const float *from = u + blockIdx.y * u_stride + (int64_t)blockIdx.x * cols;
    uint32_t most = 0;
#pragma unroll 4
    for (int i = N * threadIdx.x; i < cols; i += N * THREADS) {
        Vector<float, N> in = *reinterpret_cast<const Vector<float, N> *>(from + i);
#pragma unroll
        for (int k = 0; k < N; k++)
            most = max(most, size_bits(in.v[k]));
    }
    float own = unit_of(block_most<THREADS>(most, shared)), scale = 1 / own;
    if (threadIdx.x == 0)
        unit[row] = own;
#pragma unroll 4
    for (int i = N * threadIdx.x; i < cols; i += N * THREADS) {
        Vector<float, N> in = *reinterpret_cast<const Vector<float, N> *>(from + i);
        Vector<T, N> out;
#pragma unroll
        for (int k = 0; k < N; k++)
            out.v[k] = from_float<T>(in.v[k] * scale);
        *reinterpret_cast<Vector<T, N> *>(x + row * pitch + i) = out;
    }
}

// The same where rows start anywhere: a row stays in the registers of its block, which has all of it on its
// way at once.
enum { KEPT_THREADS = 512, KEPT_EACH = 24, WIDEST = KEPT_THREADS * KEPT_EACH };
template <typename T>
__global__ void __launch_bounds__(KEPT_THREADS, 3)
    load_kept_kernel(T *x, float *unit, const float *u, int64_t u_stride, int rows, int cols, int pitch)
{
    __shared__ uint32_t shared[KEPT_THREADS / WARP];
    allow_next_launch();
    int64_t row = (int64_t)blockIdx.y * rows + blockIdx.x;
    const float *from = u + blockIdx.y * u_stride + (int64_t)blockIdx.x * cols;
    float v[KEPT_EACH];
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < KEPT_EACH; k++) {
        int i = threadIdx.x + k * KEPT_THREADS;
        v[k] = i < cols ? from[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < KEPT_EACH; k++)
        most = max(most, size_bits(v[k]));
    float own = unit_of(block_most<KEPT_THREADS>(most, shared)), scale = 1 / own;
    if (threadIdx.x == 0)
        unit[row] = own;
#pragma unroll
    for (int k = 0; k < KEPT_EACH; k++) {
        int i = threadIdx.x + k * KEPT_THREADS;
        if (i < cols)
            x[row * pitch + i] = from_float<T>(v[k] * scale);
    }
}

// most (batch, cols), 0 before: of each column's absolute values. A block has THREADS columns of some rows.
enum { ROWS_AT_ONCE = 64 };
__global__ void __launch_bounds__(THREADS)
    column_sizes_kernel(uint32_t *most, const float *u, int64_t u_stride, int rows, int cols)
{
    int col = blockIdx.x * THREADS + threadIdx.x, row0 = blockIdx.y * ROWS_AT_ONCE,
        to = min(rows, row0 + ROWS_AT_ONCE);
    if (col >= cols)
        return;
    uint32_t own = 0;
#pragma unroll 16
    for (int row = row0; row < to; row++)
        own = max(own, size_bits(u[blockIdx.z * u_stride + (int64_t)row * cols + col]));
    atomicMax(most + (int64_t)blockIdx.z * cols + col, own);
}

__global__ void __launch_bounds__(THREADS) units_kernel(float *unit, int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count)
        unit[i] = unit_of(__float_as_uint(unit[i]));
}

template <typename T> static void load_columns(Stream s, T *x, const NsLoad &l, int pitch)
{
    int64_t units = (int64_t)l.cols * l.batch;
    dim3 grid((unsigned)ceil_div(l.cols, THREADS), (unsigned)ceil_div(l.rows, ROWS_AT_ONCE),
              (unsigned)l.batch);
    CUDA_CHECK(cudaMemsetAsync(l.unit, 0, (size_t)units * sizeof *l.unit, s));
    column_sizes_kernel<<<grid, THREADS, 0, s>>>((uint32_t *)l.unit, l.u, l.u_stride, l.rows, l.cols);
    units_kernel<<<(unsigned)ceil_div(units, THREADS), THREADS, 0, s>>>(l.unit, units);
    load_transposed(s, x, l, pitch);
}

template <typename T> static void load_rows(Stream s, T *x, const NsLoad &l, int pitch)
{
    dim3 grid((unsigned)l.rows, (unsigned)l.batch);
    if (l.cols % 4 == 0 && l.u_stride % 4 == 0 && aligned(l.u, 16) && aligned(x, 16))
        load_with_units_kernel<T, 4>
            <<<grid, THREADS, 0, s>>>(x, l.unit, l.u, l.u_stride, l.rows, l.cols, pitch);
    else if (l.cols <= WIDEST)
        load_kept_kernel<T><<<grid, KEPT_THREADS, 0, s>>>(x, l.unit, l.u, l.u_stride, l.rows, l.cols, pitch);
    else
        load_with_units_kernel<T, 1>
            <<<grid, THREADS, 0, s>>>(x, l.unit, l.u, l.u_stride, l.rows, l.cols, pitch);
}

void ns_load_rows(Stream s, NsDtype dtype, const NsLoad *l)
{
    OP_SCOPE(ns_load_rows, dtype, l->rows, l->cols, l->batch);
    int n = l->transpose ? l->cols : l->rows, pitch = ns_pitch(dtype, n, l->transpose ? l->rows : l->cols);
    for (int first = 0; first < l->batch; first += MAX_GRID_YZ) {
        NsLoad part = part_of(l, n, first, (int)min_i64(l->batch - first, MAX_GRID_YZ));
        part.sumsq = NULL; // units in place of a norm
        part.gain = 1;
        DISPATCH_DTYPE(dtype, {
            T *to = (T *)l->x + (int64_t)first * n * pitch;
            if (l->transpose)
                load_columns(s, to, part, pitch);
            else
                load_rows(s, to, part, pitch);
        });
    }
    CHECK_LAUNCH();
}

void ns_transpose(Stream s, NsDtype dtype, void *y, const void *x, int n, int m, int batch)
{
    OP_SCOPE(ns_transpose, dtype, n, m, batch);
    int pitch = ns_pitch(dtype, n, m);
    for (int first = 0; first < batch; first += MAX_GRID_YZ) {
        int now = batch - first < MAX_GRID_YZ ? batch - first : MAX_GRID_YZ;
        dim3 tiles = tile_grid(n, m, now);
        bool vectors = n % 8 == 0 && m % 8 == 0 && aligned(x, 16) && aligned(y, 16);
        DISPATCH_DTYPE(dtype, {
            T *to = (T *)y + (int64_t)first * n * m;
            const T *from = (const T *)x + (int64_t)first * n * pitch;
            if (vectors)
                transpose_kernel<T, true><<<tiles, THREADS, 0, s>>>(to, from, n, m, pitch);
            else
                transpose_kernel<T, false><<<tiles, THREADS, 0, s>>>(to, from, n, m, pitch);
        });
    }
    CHECK_LAUNCH();
}

// ---- portable: rows, diagonal, AOL -----------------------------------------------------------------------

// One warp per row in all of these: `call(row, lane)`.
template <typename F> static __device__ __forceinline__ void for_rows(int64_t rows, F call)
{
    int64_t warp = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP,
            warps = (int64_t)gridDim.x * (THREADS / WARP);
    for (int64_t row = warp; row < rows; row += warps)
        call(row, (int)(threadIdx.x % WARP));
}

// q = z + a I
template <typename T>
__global__ void __launch_bounds__(THREADS) add_diagonal_kernel(T *q, const T *z, float a, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        for (int j = lane; j < n; j += WARP) {
            T v = z[row * n + j];
            q[row * n + j] = j == row % n ? from_float<T>(to_float(v) + a) : v;
        }
    });
}

__global__ void __launch_bounds__(THREADS)
    aol_scales_kernel(float *scale, const float *raw, const float *unit, float gain, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        float sum = 0;
        for (int j = lane; j < n; j += WARP)
            sum += fabsf(raw[row * n + j]) * (unit ? unit[row / n * n + j] : 1);
        sum = warp_sum(sum);
        if (unit)
            sum /= unit[row];
        if (lane == 0)
            scale[row] = sum < NS_AOL_LEAST ? 0 : gain / sqrtf(1.02f * sum);
    });
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    aol_apply_kernel(T *a, const float *raw, const float *scale, int n, int64_t rows)
{
    for_rows(rows, [=](int64_t row, int lane) {
        float own = scale[row];
        const float *column_scale = scale + row / n * n;
        // The two scales first: their product commutes, so that the result is symmetric to the last bit.
        for (int j = lane; j < n; j += WARP)
            a[row * n + j] = from_float<T>(own * column_scale[j] * raw[row * n + j]);
    });
}

static int warp_blocks(int64_t rows) { return flat_blocks(rows * WARP); }

void ns_add_diagonal(cudaStream_t s, NsDtype dtype, void *q, const void *z, float a, int n, int batch)
{
    int64_t rows = (int64_t)n * batch;
    DISPATCH_DTYPE(dtype, {
        add_diagonal_kernel<T><<<warp_blocks(rows), THREADS, 0, s>>>((T *)q, (const T *)z, a, n, rows);
    });
    CHECK_LAUNCH();
}

void ns_portable_aol(NsChain *chain, float *scale, void *a, const float *raw, const float *unit, float gain,
                     int n)
{
    cudaStream_t s = chain->stream;
    int64_t rows = (int64_t)n * chain->batch;
    aol_scales_kernel<<<warp_blocks(rows), THREADS, 0, s>>>(scale, raw, unit, gain, n, rows);
    DISPATCH_DTYPE(chain->dtype, {
        aol_apply_kernel<T><<<warp_blocks(rows), THREADS, 0, s>>>((T *)a, raw, scale, n, rows);
    });
    CHECK_LAUNCH();
}
