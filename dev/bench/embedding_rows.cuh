// Device code of bench_embedding_exchange.cu: sets of rows, what packs and adds them, gradients that can be
// computed again.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

enum { VECTORS = 8, JOIN_THREADS = 1024 };

// The set of rows that each rank touches, and behind them the union.
typedef struct {
    uint32_t *bits;         // (size + 1, words) a bit for each row
    int32_t *below;         // (size + 1, words) rows of the set before each word
    int32_t *first;         // (size + 1, size + 1) rows of the set before each owner's share, and in all
    int words, size, share; // share: rows of an owner
} Sets;

// ---- sets of rows -----------------------------------------------------------------------------------------

static __device__ bool holds(const Sets &s, int set, int row)
{
    return s.bits[set * s.words + row / 32] >> row % 32 & 1;
}

static __device__ int rows_below(const Sets &s, int set, int row)
{
    int word = set * s.words + row / 32;
    return s.below[word] + __popc(s.bits[word] & ((1u << row % 32) - 1));
}

// Where a row of the set is packed. room: rows kept for each owner; 0: they follow each other without gaps.
static __device__ int64_t place_of(const Sets &s, int set, int row, int room)
{
    int owner = row / s.share, below = rows_below(s, set, row);
    return room ? (int64_t)owner * room + below - s.first[set * (s.size + 1) + owner] : below;
}

// A block for the set of each rank, and one for the union.
__global__ __launch_bounds__(JOIN_THREADS) void join_sets(Sets s)
{
    __shared__ int32_t sum[JOIN_THREADS];
    int set = blockIdx.x, t = threadIdx.x, each = (s.words + JOIN_THREADS - 1) / JOIN_THREADS, count = 0;
    int begin = min(t * each, s.words), end = min(begin + each, s.words);
    uint32_t *bits = s.bits + set * s.words;
    for (int w = begin; w < end; w++) {
        uint32_t all = set < s.size ? bits[w] : 0;
        for (int r = 0; r < s.size && set == s.size; r++)
            all |= s.bits[r * s.words + w];
        count += __popc(bits[w] = all);
    }
    sum[t] = count;
    for (int step = 1; step < JOIN_THREADS; step *= 2) {
        __syncthreads();
        int before = t >= step ? sum[t - step] : 0;
        __syncthreads();
        sum[t] += before;
    }
    int below = sum[t] - count;
    for (int w = begin; w < end; w++) {
        s.below[set * s.words + w] = below;
        below += __popc(bits[w]);
    }
    __syncthreads();
    if (t <= s.size)
        s.first[set * (s.size + 1) + t] =
            t < s.size ? rows_below(s, set, t * s.share) : sum[JOIN_THREADS - 1];
}

// ---- rows -------------------------------------------------------------------------------------------------

typedef struct {
    float4 v[VECTORS];
} Row; // (d) fp32 in the registers of a warp

static __device__ Row load_row(const float *p, int d, int lane)
{
    Row x;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        x.v[i] = lane + WARP * i < d / 4 ? reinterpret_cast<const float4 *>(p)[lane + WARP * i]
                                         : make_float4(0, 0, 0, 0);
    return x;
}

static __device__ void store_row(float *p, const Row &x, int d, int lane)
{
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (lane + WARP * i < d / 4)
            reinterpret_cast<float4 *>(p)[lane + WARP * i] = x.v[i];
}

// A warp a row. set: the union, or the own one, whose rows of the own share stay where they are. Rows of
// others are cleared.
__global__ void pack_rows(float *packed, float *table, Sets s, int set, int rank, int room, int d)
{
    int row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= s.share * s.size || !holds(s, set, row))
        return;
    bool own = row / s.share == rank, mine = holds(s, rank, row);
    if (own && set == rank)
        return;
    Row zero = {}, x = mine ? load_row(table + (int64_t)row * d, d, lane) : zero;
    store_row(packed + place_of(s, set, row, room) * d, x, d, lane);
    if (mine && !own)
        store_row(table + (int64_t)row * d, zero, d, lane);
}

__global__ void place_rows(float *table, const float *packed, Sets s, int rank, int room, int d)
{
    int row = rank * s.share + blockIdx.x * ROW_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= (rank + 1) * s.share || !holds(s, s.size, row))
        return;
    store_row(table + (int64_t)row * d, load_row(packed + place_of(s, s.size, row, room) * d, d, lane), d,
              lane);
}

// arrived (size, share, d): the rows of rank r's set in this share, from (r, 0) on
__global__ void add_rows(float *table, const float *arrived, Sets s, int rank, int d)
{
    int row = rank * s.share + blockIdx.x * ROW_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= (rank + 1) * s.share || !holds(s, s.size, row))
        return;
    Row sum = {};
    for (int r = 0; r < s.size; r++) {
        if (!holds(s, r, row))
            continue;
        int64_t at = (int64_t)r * s.share + rows_below(s, r, row) - s.first[r * (s.size + 1) + rank];
        Row x = load_row(r == rank ? table + (int64_t)row * d : arrived + at * d, d, lane);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            sum.v[i].x += x.v[i].x;
            sum.v[i].y += x.v[i].y;
            sum.v[i].z += x.v[i].z;
            sum.v[i].w += x.v[i].w;
        }
    }
    store_row(table + (int64_t)row * d, sum, d, lane);
}

// ---- gradients, and whether their sums are right ----------------------------------------------------------

static __device__ float noise(int64_t at, int seed) // in (-1, 1)
{
    uint32_t x = (uint32_t)at * 2654435761u + (uint32_t)seed * 40503u + 1;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    return (float)(int32_t)(x ^ x >> 16) * 0x1p-31f;
}

static __device__ float gradient(const Sets &s, int r, int64_t at, int d) // at: in (TABLES, Vp, d)
{
    return holds(s, r, (int)(at / d % (s.share * s.size))) ? noise(at, r) : 0;
}

__global__ void fill_operand(floatX *p, int64_t count)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        p[i] = __float2bfloat16(noise(i, 0));
}

__global__ void fill_tables(float *tables, Sets s, int rank, int64_t count, int d)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        tables[i] = gradient(s, rank, i, d);
}

__global__ void check_tables(const float *tables, float *reference, bool keep, Sets s, int rank,
                             int64_t count, int d, unsigned long long *faults)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        int row = (int)(i / d % (s.share * s.size));
        double sum = 0, magnitude = 0;
        for (int r = 0; r < s.size && row / s.share == rank; r++) {
            double x = gradient(s, r, i, d);
            sum += x;
            magnitude += fabs(x);
        }
        if (!(fabs(tables[i] - sum) <= (s.size - 1) * 0x1p-24 * 1.000001 * magnitude))
            atomicAdd(faults, 1);
        if (row / s.share != rank)
            continue;
        float *whole = reference + (i / d / (s.share * s.size) * s.share + row - rank * s.share) * d + i % d;
        if (keep)
            *whole = tables[i];
        else if (*whole != tables[i])
            atomicAdd(faults + 1, 1);
    }
}
