// Thin wrappers of the sm_90a instructions: mbarrier, named barriers, TMA, WGMMA, clusters, PDL,
// ldmatrix/stmatrix. Names follow PTX.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1 // this pass compiles for sm_90a
#else
#define HOPPER 0
#endif

#if HOPPER

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

// ---- mbarriers --------------------------------------------------------------------------------------------

static __device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
// Makes the initialisation visible to the cluster and to TMA.
static __device__ __forceinline__ void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once and adds `bytes` to the transaction count of the phase.
static __device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity is complete.
static __device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity)
{
    uint32_t address = shared_address(barrier), done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(address), "r"(parity)
                     : "memory");
}
// Tests without waiting whether the phase of this parity is complete.
static __device__ __forceinline__ bool mbarrier_test(uint64_t *barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done;
}
// One lane may arrive for all threads that it has synchronised with (__syncwarp, named_barrier_sync): bar
// and bar.warp.sync synchronise, the arrival releases, the wait acquires, and causality order is transitive
// over all three.
static __device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// bar.sync of barrier `id` (1 to 15) with `threads` threads.
static __device__ __forceinline__ void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive: counts as one of the threads without waiting.
static __device__ __forceinline__ void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA --------------------------------------------------------------------------------------------------

// Loads the box of `map` at column x, row y of matrix z to the same shared address in every CTA of the
// cluster whose bit is set in `blocks`; completes on the mbarrier at the same address in each of them.
static __device__ __forceinline__ void tma_load_multicast(void *to, const CUtensorMap *map, uint64_t *barrier,
                                                          int x, int y, int z, uint16_t blocks)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}
// The same for this CTA alone.
static __device__ __forceinline__ void tma_load(void *to, const CUtensorMap *map, uint64_t *barrier, int x,
                                                int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// Loads `bytes` contiguous bytes, a multiple of 16, into this CTA.
static __device__ __forceinline__ void bulk_load(void *to, const void *from, uint64_t *barrier,
                                                 uint32_t bytes)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"((uint64_t)from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// Stores a box from shared memory at column x, row y of matrix z of `map`; out-of-bounds elements are
// dropped.
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, const void *from, int x, int y,
                                                 int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                     (uint64_t)map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// Commits this thread's stores since the last call as one bulk group.
static __device__ __forceinline__ void tma_store_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until TMA has read the sources of all but the last LEFT bulk groups: they may be overwritten.
template <int LEFT = 0> static __device__ __forceinline__ void tma_store_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
// Waits until all bulk groups are complete in global memory.
static __device__ __forceinline__ void tma_store_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Makes this thread's generic writes to shared memory visible to the async proxy (TMA, WGMMA).
static __device__ __forceinline__ void fence_proxy_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders generic and async-proxy accesses of this thread in all state spaces.
static __device__ __forceinline__ void fence_proxy_async()
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- counters in global memory ----------------------------------------------------------------------------

static __device__ __forceinline__ unsigned load_acquire(const unsigned *p)
{
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void add_release(unsigned *p, unsigned v)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

static __device__ __forceinline__ void store_release(unsigned *p, unsigned v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- clusters
// --------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// True in one lane of a converged warp. The compiler knows that one lane runs the code behind it and omits
// the loops over lanes that it otherwise puts around TMA instructions.
static __device__ __forceinline__ bool elect_one(void)
{
    uint32_t elected = 0;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\t@p mov.u32 %0, 1;\n\t}"
                 : "+r"(elected));
    return elected;
}
// Barrier of the cluster with a relaxed arrive: it orders fence_mbarrier_init and nothing else, because a
// release would flush all writes of the CTA. __syncwarp first, because the aligned form needs converged
// warps.
static __device__ __forceinline__ void cluster_sync_relaxed(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// Barrier of the cluster with release and acquire. As the last one of a kernel it keeps shared memory alive
// until the other CTAs' remote arrives have been performed. A relaxed arrive is not enough: with 32 remote
// arrives per thread in flight the launch failed within 200 launches, with one not in 5 x 10^7 clusters
// (H200, 2026-11-22).
static __device__ __forceinline__ void cluster_sync(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// Writes `value` to this address in CTA `rank` of the cluster and completes the phase of its mbarrier, of
// which it is the only arrival.
static __device__ __forceinline__ void st_async_u32(uint32_t *place, uint32_t value, uint64_t *barrier,
                                                    int rank)
{
    asm volatile("{\n\t.reg .b32 to, at;\n\t"
                 "mapa.shared::cluster.u32 to, %0, %3;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %3;\n\t"
                 "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [at], 4;\n\t"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [at];\n\t}" ::"r"(
                     shared_address(place)),
                 "r"(value), "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
// Arrives at the mbarrier at this address in CTA `rank` of the cluster. Relaxed: it signals that WGMMA has
// read a stage (wgmma_wait orders that), so it has nothing to publish; a release at cluster scope would
// flush all writes of the thread at the cost of a whole stage. A remote arrive at a CTA that has exited is
// an unspecified launch failure ("CTA not present" in the driver's log). So a CTA waits at its end for the
// release of every stage it has filled; where it cannot, use cluster_sync.
static __device__ __forceinline__ void mbarrier_arrive_remote(uint64_t *barrier, int rank, uint32_t times = 1)
{
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote], %2;\n\t}" ::"r"(
                     shared_address(barrier)),
                 "r"(rank), "r"(times)
                 : "memory");
}

// ---- programmatic dependent launch ------------------------------------------------------------------------

// The next kernel of the stream may launch once all CTAs of this one have called this or exited.
static __device__ __forceinline__ void pdl_launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernels before this one are complete and their writes are visible.
static __device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// setmaxnreg: a warpgroup returns registers to the CTA's pool, or waits for them and takes them.
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- WGMMA ------------------------------------------------------------------------------------------------

// Shared-memory descriptor of a tile with rows of 128 bytes under the 128-byte swizzle; groups of 8 rows are
// 1024 bytes apart. `leading`: bytes between neighbouring panels of 64 columns, for MN-major operands.
static __device__ __forceinline__ uint64_t smem_descriptor(const void *tile, uint32_t leading)
{
    uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
    return address | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
static __device__ __forceinline__ uint64_t descriptor_advance(uint64_t d, int bytes)
{
    return d + (uint64_t)(bytes >> 4);
}

static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING committed groups are in flight.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D32(i) WGMMA_D8(i), WGMMA_D8(i + 8), WGMMA_D8(i + 16), WGMMA_D8(i + 24)
#define WGMMA_64(TYPE, TRANSPOSE_B)                                                                          \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                          \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                             \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "         \
                 "%32, %33, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                               \
                 : WGMMA_D32(0)                                                                              \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_128(TYPE, TRANSPOSE_B)                                                                         \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                          \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                            \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "         \
                 "%64, %65, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                               \
                 : WGMMA_D32(0), WGMMA_D32(32)                                                               \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_192(TYPE, TRANSPOSE_B)                                                                         \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %98, 0;\n\t"                                          \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " "                            \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "          \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "          \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "         \
                 "%96, %97, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                               \
                 : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64)                                                \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_256(TYPE, TRANSPOSE_A, TRANSPOSE_B)                                                            \
    asm volatile(                                                                                            \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"                                                  \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                            \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                   \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                   \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                   \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                   \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                   \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "       \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "  \
        "%128, %129, p, 1, 1, " TRANSPOSE_A ", " TRANSPOSE_B ";\n\t}"                                        \
        : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64), WGMMA_D32(96)                                          \
        : "l"(a), "l"(b), "r"((int)accumulate))

template <typename T> struct IsHalf {
    static constexpr bool value = false; // bf16
};
template <> struct IsHalf<__half> {
    static constexpr bool value = true;
};

// d (64, COLS) = a (64, 16) b (16, COLS), or += when accumulate; writes the first COLS columns of d.
// ALONG_COLUMNS: b is stored as (16, COLS), MN-major, else as (COLS, 16). Thread t of the warpgroup holds
// rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 g + 2 (t % 4) (+ 1) in d[4 g ...].
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(!ALONG_COLUMNS || COLS >= 192, "narrower products are those of symmetric results");
    constexpr bool is_half = IsHalf<T>::value;
    if constexpr (ALONG_COLUMNS && COLS == 192 && is_half) WGMMA_192("f16", "1");
    if constexpr (ALONG_COLUMNS && COLS == 192 && !is_half) WGMMA_192("bf16", "1");
    if constexpr (ALONG_COLUMNS && COLS == 256 && is_half) WGMMA_256("f16", "0", "1");
    if constexpr (ALONG_COLUMNS && COLS == 256 && !is_half) WGMMA_256("bf16", "0", "1");
    if constexpr (!ALONG_COLUMNS && COLS == 64 && is_half) WGMMA_64("f16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 64 && !is_half) WGMMA_64("bf16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 128 && is_half) WGMMA_128("f16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 128 && !is_half) WGMMA_128("bf16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 192 && is_half) WGMMA_192("f16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 192 && !is_half) WGMMA_192("bf16", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 256 && is_half) WGMMA_256("f16", "0", "0");
    if constexpr (!ALONG_COLUMNS && COLS == 256 && !is_half) WGMMA_256("bf16", "0", "0");
}

// After wgmma_wait: tells the compiler that the accumulators have changed.
template <int COUNT> static __device__ __forceinline__ void wgmma_fence_registers(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- ldmatrix, stmatrix: 8 x 8 matrices of 16-bit elements, spread over a warp ----------------------------
// Lane l holds row l / 4, columns 2 (l % 4) and the next.

// Four matrices from or to shared memory; lane 8 k + r gives the address of row r of matrix k.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&b)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}
static __device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3])
                 : "memory");
}
// Transposed: four matrices, or one (lanes 0 to 7 give the addresses).
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3])
                 : "memory");
}
static __device__ __forceinline__ void stmatrix_x1_trans(uint32_t address, uint32_t b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared::cta.b16 [%0], {%1};" ::"r"(address), "r"(b)
                 : "memory");
}
static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t block)
{
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(block));
    return t;
}

#endif
