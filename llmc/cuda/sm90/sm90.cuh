// The instructions of Hopper (sm_90a) that a product is made of, one thin function each: memory barriers, copies of tiles by the
// tensor memory accelerator, products of a warpgroup. After the PTX manual, "mbarrier", "cp.async.bulk.tensor" and "wgmma".
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

static __device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- barriers in shared memory ---------------------------------------------------------------------------------------------

static __device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes the initialisation known to the copy unit too.
static __device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and lets the phase last until `bytes` have been copied as well.
static __device__ __forceinline__ void barrier_arrive_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Returns once the phase of this parity is complete.
static __device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity)
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
// Whether it is complete already.
static __device__ __forceinline__ bool barrier_complete(uint64_t *barrier, uint32_t parity)
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
// One lane may arrive for all that it has met in __syncwarp or group_sync: what they did before comes before what those do who
// wait for the phase. (PTX's memory model: bar and bar.warp.sync synchronise, the arrival releases, the wait acquires, and
// causality order is transitive over all three.)
static __device__ __forceinline__ void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// All `threads` threads that name barrier `id` (1 to 15).
static __device__ __forceinline__ void group_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as one of them, without waiting for the others.
static __device__ __forceinline__ void group_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies of tiles ---------------------------------------------------------------------------------------------------------

// The box of `map` that starts at column x, row y of matrix z, to the same place in the shared memory of every block of the
// cluster that `blocks` has a bit for; completes on the barrier at the same place in each of them.
static __device__ __forceinline__ void tile_load(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                                                 uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
                 "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
                 : "memory");
}
// The same box, to this block alone.
static __device__ __forceinline__ void tile_load_own(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            shared_address(to)),
        "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// `bytes` that lie together, a multiple of 16, to this block alone.
static __device__ __forceinline__ void bulk_load(void *to, const void *from, uint64_t *barrier, uint32_t bytes)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
        "l"((uint64_t)from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// A box from shared memory to the place of `map` that starts at column x, row y of matrix z; what would fall outside is left out.
static __device__ __forceinline__ void tile_store(const CUtensorMap *map, const void *from, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((uint64_t)map),
                 "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// What this thread has stored since the last call forms a group.
static __device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when shared memory has been read by all of this thread's groups of stores but the last LEFT: it may be overwritten.
template <int LEFT = 0> static __device__ __forceinline__ void stores_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
// Returns when they are complete.
static __device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Shows this thread's own writes to shared memory to the copy unit.
static __device__ __forceinline__ void copy_unit_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's view of all memory between its own accesses and those of the copy unit.
static __device__ __forceinline__ void copy_unit_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- counters in global memory -----------------------------------------------------------------------------------------------

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

// ---- clusters --------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// True in one lane of a warp that is all here. Of code behind it the compiler knows that one lane runs it, and leaves out the
// loops over lanes around its copies of tiles.
static __device__ __forceinline__ bool elect_lane(void)
{
    uint32_t elected = 0;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\t@p mov.u32 %0, 1;\n\t}" : "+r"(elected));
    return elected;
}
// All threads of all blocks of the cluster. A warp arrives as a whole: lanes that went different ways are brought together first.
// Orders nothing but initialised barriers (barrier_init_fence), for a release would flush all of the block's writes.
static __device__ __forceinline__ void cluster_sync(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The last one of a kernel: what others still do to this block's shared memory has happened before it ends. With a relaxed
// arrival their arrives at its barriers could find it gone: an unspecified launch failure of theirs, within 200 launches where
// 32 a thread were under way, not in 5 x 10^7 clusters with one (H200, 2026-11-22).
static __device__ __forceinline__ void cluster_sync_at_end(void)
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Writes `value` to the place that block `rank` of the cluster has for it, and completes its barrier's phase, whose only arrival
// this is.
static __device__ __forceinline__ void send_word(uint32_t *place, uint32_t value, uint64_t *barrier, int rank)
{
    asm volatile("{\n\t.reg .b32 to, at;\n\t"
                 "mapa.shared::cluster.u32 to, %0, %3;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %3;\n\t"
                 "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [at], 4;\n\t"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [at];\n\t}" ::"r"(shared_address(place)),
                 "r"(value), "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
// Arrives at the barrier that block `rank` of the cluster has at this place. It says that something was read, so nothing has to
// be made visible with it: an ordering at cluster scope would flush all the thread's writes each time, at the cost of a whole
// stage.
// Arriving at a block that has ended is an unspecified launch failure ("CTA not present" in the driver's log). So a block waits
// at its end for all that is still to come, the release of every stage that it has filled; where it cannot, cluster_sync_at_end.
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *barrier, int rank, uint32_t times = 1)
{
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote], %2;\n\t}" ::"r"(shared_address(barrier)),
                 "r"(rank), "r"(times)
                 : "memory");
}

// ---- dependent launch ---------------------------------------------------------------------------------------------------------

// The next kernel of the stream may take its place on multiprocessors that this one leaves ...
static __device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// ... and waits here until the kernels before it are complete and their results visible.
static __device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A warpgroup gives registers back to the block's pool, or waits for them and takes them.
template <int COUNT> static __device__ __forceinline__ void registers_shrink()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void registers_grow()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- products of a warpgroup --------------------------------------------------------------------------------------------------

// Describes an operand tile in shared memory whose rows of 128 bytes are swizzled (128-byte mode): groups of 8 rows are 1024
// bytes apart. `leading`: bytes between neighbouring tiles of 64 columns, for operands stored along the columns.
static __device__ __forceinline__ uint64_t operand(const void *tile, uint32_t leading)
{
    uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
    return address | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
static __device__ __forceinline__ uint64_t operand_advance(uint64_t d, int bytes) { return d + (uint64_t)(bytes >> 4); }

static __device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when at most PENDING committed groups are under way.
template <int PENDING> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D32(i) WGMMA_D8(i), WGMMA_D8(i + 8), WGMMA_D8(i + 16), WGMMA_D8(i + 24)
#define WGMMA_64(TYPE, TRANSPOSE_B)                                                                                              \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " "                                                 \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                             \
                 "%32, %33, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                                                   \
                 : WGMMA_D32(0)                                                                                                  \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_128(TYPE, TRANSPOSE_B)                                                                                             \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                             \
                 "%64, %65, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                                                   \
                 : WGMMA_D32(0), WGMMA_D32(32)                                                                                   \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_192(TYPE, TRANSPOSE_B)                                                                                             \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %98, 0;\n\t"                                                              \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPE "." TYPE " "                                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                              \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                              \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "                             \
                 "%96, %97, p, 1, 1, 0, " TRANSPOSE_B ";\n\t}"                                                                   \
                 : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64)                                                                    \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_256(TYPE, TRANSPOSE_A, TRANSPOSE_B)                                                                                \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " "                                                \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                              \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                              \
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                              \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                  \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "             \
                 "%128, %129, p, 1, 1, " TRANSPOSE_A ", " TRANSPOSE_B ";\n\t}"                                                   \
                 : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64), WGMMA_D32(96)                                                     \
                 : "l"(a), "l"(b), "r"((int)accumulate))

template <typename T> struct IsHalf {
    static constexpr bool value = false; // bf16
};
template <> struct IsHalf<__half> {
    static constexpr bool value = true;
};

// d (64, COLS) = a (64, 16) b (16, COLS), or += when accumulate; of d's columns the first COLS. ALONG_COLUMNS: b is stored as
// (16, COLS), else as (COLS, 16).
// Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 g + 2 (t % 4) (+ 1) in d[4 g ...].
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void warpgroup_product(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
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

// After products_wait: sums are what the products left in the registers, whatever the compiler knew of them before.
template <int COUNT> static __device__ __forceinline__ void products_done(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- 8 x 8 blocks of 16-bit elements, spread over a warp -------------------------------------------------------------------
// Lane l holds row l / 4, columns 2 (l % 4) and the next.

// Four blocks from or to shared memory; lane 8 k + r gives the address of row r of block k.
static __device__ __forceinline__ void load_blocks(uint32_t (&b)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}
static __device__ __forceinline__ void store_blocks(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(b[0]), "r"(b[1]),
                 "r"(b[2]), "r"(b[3])
                 : "memory");
}
// The transposes of four blocks, and of one (lanes 0 to 7 give the addresses).
static __device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(b[0]),
                 "r"(b[1]), "r"(b[2]), "r"(b[3])
                 : "memory");
}
static __device__ __forceinline__ void store_transposed_one(uint32_t address, uint32_t b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared::cta.b16 [%0], {%1};" ::"r"(address), "r"(b) : "memory");
}
static __device__ __forceinline__ uint32_t block_transposed(uint32_t block)
{
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(block));
    return t;
}

#endif
