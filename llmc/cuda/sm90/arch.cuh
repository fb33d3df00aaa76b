// Which instructions this pass of the compiler may use.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1 // sm_90a: WGMMA, setmaxnreg
#else
#define HOPPER 0
#endif
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
#define SM90_OR_LATER 1 // mbarriers, bulk copies, clusters, PDL
#else
#define SM90_OR_LATER 0
#endif

#if SM90_OR_LATER

// Wrappers with a template parameter Address take a pointer to shared memory or its address in the shared
// window.
static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
static __device__ __forceinline__ uint32_t shared_address(uint32_t address) { return address; }

#endif
