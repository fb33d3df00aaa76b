// Clusters, distributed shared memory, counters in global memory, programmatic dependent launch. Names follow
// PTX.
#pragma once
#include "llmc/cuda/sm90/arch.cuh"

#if SM90_OR_LATER

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

// ---- clusters ---------------------------------------------------------------------------------------------

static __device__ __forceinline__ int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Index of the warp in its CTA. The shuffle tells the compiler that it is warp-uniform: what follows from it
// stays in uniform registers, and descriptors need no R2UR.
static __device__ __forceinline__ int uniform_warp(void)
{
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
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
// PTX has a relaxed arrive from ISA 8.6 (CUDA 12.8) on. Before, the default does: a release that reaches no
// further than the own CTA.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
#define MBARRIER_ARRIVE_REMOTE "mbarrier.arrive.relaxed.cluster.shared::cluster.b64"
#else
#define MBARRIER_ARRIVE_REMOTE "mbarrier.arrive.shared::cluster.b64"
#endif
// Arrives at the mbarrier at this address in CTA `rank` of the cluster. Relaxed: it signals that WGMMA has
// read a stage (wgmma_wait orders that), so it has nothing to publish; a release at cluster scope would
// flush all writes of the thread at the cost of a whole stage. A remote arrive at a CTA that has exited is
// an unspecified launch failure ("CTA not present" in the driver's log). So a CTA waits at its end for the
// release of every stage it has filled; where it cannot, use cluster_sync.
template <class Address>
static __device__ __forceinline__ void mbarrier_arrive_remote(Address barrier, int rank, uint32_t times = 1)
{
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t" MBARRIER_ARRIVE_REMOTE
                 " _, [remote], %2;\n\t}" ::"r"(shared_address(barrier)),
                 "r"(rank), "r"(times)
                 : "memory");
}

// The same with release semantics at cluster scope, behind ldmatrix or ordinary loads of the stage: those are
// not ordered by wgmma_wait before the other CTA's TMA loads. It costs the thread a MEMBAR.
static __device__ __forceinline__ void mbarrier_arrive_remote_release(uint64_t *barrier, int rank,
                                                                      uint32_t times)
{
    asm volatile("{\n\t.reg .b32 remote;\n\t"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote], %2;\n\t}" ::"r"(
                     shared_address(barrier)),
                 "r"(rank), "r"(times)
                 : "memory");
}

// Copies `bytes` to address `to` in CTA `rank`; they count on its mbarrier `barrier`.
static __device__ __forceinline__ void bulk_copy_remote(void *to, const void *from, uint64_t *barrier,
                                                        int rank, uint32_t bytes)
{
    asm volatile("{\n\t.reg .b32 there, at;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %4;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %4;\n\t"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %3, "
                 "[at];\n\t}" ::"r"(shared_address(to)),
                 "r"(shared_address(from)), "r"(shared_address(barrier)), "r"(bytes), "r"(rank)
                 : "memory");
}
// The same for one word from a register.
static __device__ __forceinline__ void st_async_f32(float *to, float value, uint64_t *barrier, int rank)
{
    asm volatile("{\n\t.reg .b32 there, at;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %3;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %3;\n\t"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [at];\n\t}" ::"r"(
                     shared_address(to)),
                 "r"(__float_as_uint(value)), "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
// Counters in CTA `rank`: a release increment; whoever acquires the count sees this thread's earlier writes.
static __device__ __forceinline__ void remote_counter_add(uint32_t *counter, int rank)
{
    asm volatile("{\n\t.reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "red.release.cluster.shared::cluster.add.u32 [there], 1;\n\t}" ::"r"(
                     shared_address(counter)),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ void remote_counter_wait(const uint32_t *counter, uint32_t least)
{
    uint32_t count = 0;
    while (count < least)
        asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];"
                     : "=r"(count)
                     : "r"(shared_address(counter))
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

#endif
