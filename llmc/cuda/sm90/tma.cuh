// TMA: bulk copies between global and shared memory, boxes of tensor maps and contiguous bytes. Names follow
// PTX.
#pragma once
#include <cuda.h>
#include "llmc/cuda/sm90/arch.cuh"

#if SM90_OR_LATER

// Loads the box of `map` at column x, row y of matrix z to the same shared address in every CTA of the
// cluster whose bit is set in `blocks`; completes on the mbarrier at the same address in each of them.
template <class Address, class Barrier>
static __device__ __forceinline__ void tma_load_multicast(Address to, const CUtensorMap *map, Barrier barrier,
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
// Asks for the box in L2.
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map, int x, int y, int z)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"((uint64_t)map),
                 "r"(x), "r"(y), "r"(z)
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
// The same for maps of four dimensions.
static __device__ __forceinline__ void tma_store_4d(const CUtensorMap *map, const void *from, int x, int y,
                                                    int z, int w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            (uint64_t)map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
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

// Adds a box of fp32 values in shared memory to the box of `map` at column x, row y of matrix z; out of
// bounds nothing is added.
static __device__ __forceinline__ void tma_reduce_add(const CUtensorMap *map, const void *from, int x, int y,
                                                      int z)
{
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"((uint64_t)map),
        "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same for tensor maps of a matrix, whose boxes have two coordinates.
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

#endif
