// What the sm90 attention kernels add to sm90.cuh: WGMMA of 64 x 64 and with A in registers, two-dimensional
// TMA boxes, bulk reductions, the layout of the dq accumulator.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh" // first: it includes C headers as C
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/sm90/sm90.cuh"

// x[k] of lane t becomes x[t] of lane k, within each group of four lanes.
static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4])
{
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
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
// WGMMA accumulators, so that a thread's four values are one vector.
namespace dq_accumulator
{
enum { QUERIES = 64, THREADS = 128, HALF_VECTORS = 8 * THREADS, TILE_FLOATS = 2 * HALF_VECTORS * 4 };
// State of each half of a tile: the first CTA to arrive stores, so that the accumulator need not be zeroed.
enum { UNTOUCHED, BEING_STORED, STORED };
} // namespace dq_accumulator

namespace attention_sm90
{

// Tile-scheduler counters of a kernel in global memory; zeros between launches.
struct Progress {
    unsigned next, finished; // items claimed; CTAs that found none left
};

// Tensor map of an (N, d) tensor, boxes of 64 columns and box_rows rows, 128-byte swizzle.
CUtensorMap rows_map(const floatX *base, const AttentionCall *c, int box_rows);
void prepare_forward(void); // for attention_sm90_prepare

} // namespace attention_sm90

#if HOPPER

// d (64, 64) = a (64, 16) b (16, 64), or += when accumulate. A_ALONG: a is stored as (16, 64), MN-major,
// else as (64, 16); B_ALONG: b is stored as (16, 64), else as (64, 16). Thread t of the warpgroup holds rows
// 16 (t / 32) + t % 32 / 4 (+ 8), columns 8 g + 2 (t % 4) (+ 1) in d[4 g ...].
template <bool A_ALONG, bool B_ALONG>
static __device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, %35, %36;\n\t}"
                 : WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(A_ALONG), "n"(B_ALONG));
}

// d (64, 128) = a (64, 16) b (16, 128), or += when accumulate; a in registers: four packed pairs of two
// neighbouring column groups of an accumulator; b is stored as (16, 128), MN-major.
static __device__ __forceinline__ void wgmma_64x128_a_registers(float (&d)[64], const uint32_t *a, uint64_t b,
                                                                bool accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n\t}"
                 : WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24), WGMMA_D8(32), WGMMA_D8(40),
                   WGMMA_D8(48), WGMMA_D8(56)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

static __device__ __forceinline__ void tma_load_2d(void *to, const CUtensorMap *map, uint64_t *barrier, int x,
                                                   int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
                 "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y)
                 : "memory");
}

// Stores a box from shared memory at column x, row y; out-of-bounds elements are dropped.
static __device__ __forceinline__ void tma_store_2d(const CUtensorMap *map, const void *from, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     (uint64_t)map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

// cp.async.bulk from shared to global memory, in the thread's open bulk group.
static __device__ __forceinline__ void bulk_store(float *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// cp.reduce.async.bulk.add.f32 from shared to global memory, in the thread's open bulk group.
static __device__ __forceinline__ void bulk_reduce_add(float *to, const void *from, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
