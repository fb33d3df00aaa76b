// mbarriers, named barriers and the pipeline of stages over them. Names follow PTX.
//
// A pipeline is a ring of stages in shared memory with a full and an empty mbarrier each. The producer waits
// for empty(stage) with parity ^ 1 (the first round passes at once), arms full(stage) for the bytes it loads
// and advances; a consumer waits for full(stage) with parity, uses the stage, arrives at empty(stage) and
// advances.
#pragma once
#include "llmc/cuda/sm90/arch.cuh"

#if SM90_OR_LATER

template <class Address>
static __device__ __forceinline__ void mbarrier_init(Address barrier, uint32_t arrivals)
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
template <class Address>
static __device__ __forceinline__ void mbarrier_arrive_expect_tx(Address barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Adds `bytes` to the transaction count of the phase without arriving.
static __device__ __forceinline__ void mbarrier_expect_tx(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Waits until the phase of this parity is complete.
template <class Address>
static __device__ __forceinline__ void mbarrier_wait(Address barrier, uint32_t parity)
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
// The same behind arrivals of other CTAs with release semantics: acquires at cluster scope.
static __device__ __forceinline__ void mbarrier_wait_cluster(uint64_t *barrier, uint32_t parity)
{
    uint32_t address = shared_address(barrier), done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
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
template <class Address> static __device__ __forceinline__ void mbarrier_arrive(Address barrier)
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

// ---- pipeline ---------------------------------------------------------------------------------------------

// Stage and phase parity of a pipeline of STAGES stages.
template <int STAGES> struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};
template <> struct PipelineState<2> { // the same without a branch
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        parity ^= stage;
        stage ^= 1;
    }
};

#endif
