// What the sm90 attention kernels share: tile-scheduler counters, tensor maps, the layout of the dq
// accumulator.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh" // first: it includes C headers as C
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

// x[k] of lane t becomes x[t] of lane k, within each group of four lanes.
static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4])
{
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit)
                continue;
            uint32_t got = __shfl_xor_sync(0xffffffffu, lane & bit ? x[i] : x[i | bit], bit);
            if (lane & bit)
                x[i] = got;
            else
                x[i | bit] = got;
        }
}

// dq accumulator, fp32, without the factor `scale`: (tiles, H, 2, 8, 128) vectors of four, for tiles of 64
// queries, halves of 64 columns, groups of 8 columns. Thread t of 128 holds rows 16 (t / 32) + t % 32 / 4
// and that + 8, columns 2 (t % 4) and the next of each group, as (row, row, row + 8, row + 8): the order of
// WGMMA accumulators, so that a thread's four values are one vector. Where heads of q are 96 columns wide,
// the second half has 32 columns, 4 groups: a tile is 6144 floats.
namespace dq_accumulator
{
enum { QUERIES = 64, THREADS = 128, HALF_VECTORS = 8 * THREADS, TILE_FLOATS = 2 * HALF_VECTORS * 4 };
} // namespace dq_accumulator

namespace attention_sm90
{

enum {
    WIDTH = 128, // of a head of v; QK in templates: of one of q and k
    NARROW = 96, // the other width of q and k that kernels are made for
    PANEL = 64   // columns of 128 bytes, the width of the swizzle
};

// Tile-scheduler counters of a kernel in global memory; zeros between launches.
struct Progress {
    unsigned next, finished; // items claimed; CTAs that found none left
};

// Tensor map of an (N, d) tensor, boxes of 64 columns and box_rows rows, 128-byte swizzle.
CUtensorMap rows_map(const floatX *base, const AttentionCall *c, int box_rows);
// The same of q or k, for load_panel<QK>. Heads narrower than v's have three coordinates: their second
// panel is made up with zeros, which are not loaded but take shared memory, so that tiles lie as those of
// 128 columns do.
template <int QK> CUtensorMap keys_map(const floatX *base, const AttentionCall *c, int box_rows)
{
    return QK == WIDTH ? rows_map(base, c, box_rows) : tensor_map_of_heads(base, c->N, c->H, QK, box_rows);
}
void prepare_forward(void); // for attention_sm90_prepare

} // namespace attention_sm90

#if HOPPER

static __device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

namespace attention_sm90
{

// Coordinate of a head in keys_map<QK>: its first column, or its number.
template <int QK> static __device__ __forceinline__ int head_at(int head)
{
    return QK == WIDTH ? head * WIDTH : head;
}

// Loads a panel of a head, rows from `row` on.  at: head_at<QK>
template <int QK>
static __device__ __forceinline__ void load_panel(void *to, const CUtensorMap *map, uint64_t *full, int at,
                                                  int panel, int row)
{
    if constexpr (QK == WIDTH)
        tma_load_2d(to, map, full, at + panel * PANEL, row);
    else
        tma_load(to, map, full, panel * PANEL, at, row);
}

// The last d with a.cu[d] <= t, searched by all lanes together.
template <typename T> static __device__ __forceinline__ int document_of(int t, const T &a)
{
    int low = 0, count = a.slots;
    while (count > 1) {
        int step = (count + WARP - 1) / WARP, at = (int)(threadIdx.x % WARP) * step;
        unsigned before = __ballot_sync(0xffffffffu, at < count && a.cu[low + min(at, count - 1)] <= t);
        int passed = (__popc(before) - 1) * step;
        low += passed;
        count = min(step, count - passed);
    }
    return low;
}

} // namespace attention_sm90

#endif
