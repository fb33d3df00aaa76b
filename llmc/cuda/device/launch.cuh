// Programmatic dependent launch (PDL): the CTAs of a kernel take their multiprocessors, set up barriers and
// wait there while the last CTAs of the kernel before it in the stream still run. Saves the launch latency
// between two kernels, 1 to 2 us each.
//
// Rules. A kernel that launch_pdl launches calls pdl_begin (or pdl_wait) in all its threads before it reads
// or writes global memory; then kernels behind it that wait for it have waited for all before it, too. Host
// launches with <<<>>>, copies and libraries' kernels wait for whole kernels as ever.
#pragma once
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/sm90/arch.cuh"
#include <cuda_runtime.h>

// The next kernel of the stream may launch once all CTAs of this one have called this or exited.
static __device__ __forceinline__ void pdl_launch_dependents()
{
#if SM90_OR_LATER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one are complete and their writes are visible.
static __device__ __forceinline__ void pdl_wait()
{
#if SM90_OR_LATER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// All CTAs of this kernel are resident or done when the next one launches: it never keeps one of them out.
static __device__ __forceinline__ void pdl_begin()
{
    pdl_wait();
    pdl_launch_dependents();
}

// kernel<<<grid, block, shared, s>>>(args...) with PDL, where the GPU has it.
template <typename... Params, typename... Args>
static inline void launch_pdl(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, Stream s,
                              Args... args)
{
    cudaLaunchAttribute pdl = {};
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = s;
    config.attrs = &pdl;
    config.numAttrs = device_has_bulk_copies() ? 1 : 0;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}
