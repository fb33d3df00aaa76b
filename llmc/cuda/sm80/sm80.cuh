// The sm80 layer: thin wrappers of the instructions that every supported GPU has, one of each, and of the FP8
// product that Ada has, too. After the PTX manual, "cp.async", "ldmatrix" and "mma".
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

namespace sm80
{

// Queues the copy of 16 bytes from global to shared memory past the L1 cache; of the first `bytes` of them,
// and zeros for the others.
static __device__ __forceinline__ void copy_async(void *to, const void *from, int bytes)
{
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
                 : "memory");
}

// The same of 4 bytes, which pass through the L1 cache.
static __device__ __forceinline__ void copy_async_4(void *to, const void *from, int bytes)
{
    uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void commit_loads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> static __device__ __forceinline__ void wait_loads()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// For all copies that this thread has queued.
static __device__ __forceinline__ void wait_all_loads() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four matrices of 8 x 8 elements of 16 bits. row: in shared memory, the lane's row of 16 bytes; lanes 8 i to
// 8 i + 7 name those of matrix i.
template <bool TRANSPOSED = false>
static __device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void *row)
{
    uint32_t from = (uint32_t)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(from)
                     : "memory");
}

// The transpose of 8 x 8 elements of 16 bits that a warp holds: lane l has row l / 4, columns 2 (l % 4) and
// the next.
static __device__ __forceinline__ uint32_t transpose8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

struct E4m3; // of mma: four codes in 32 bits

// d (16, 8) += a (16, 16) b (16, 8), T: bf16 or fp16; E4m3: a (16, 32) b (32, 8), from compute capability 8.9
// on. Lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next of d.
#define MMA(shape, type) \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, " \
                 "{%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (std::is_same<T, E4m3>::value) {
#if __CUDA_ARCH__ >= 890
        MMA("m16n8k32", "e4m3");
#else
        __trap(); // never launched: device_has_fp8_mma
#endif
    } else if constexpr (std::is_same<T, __half>::value) {
        MMA("m16n8k16", "f16");
    } else {
        MMA("m16n8k16", "bf16");
    }
}
#undef MMA

// ---- functions of one thread ------------------------------------------------------------------------------
// ftz: what is below the normal numbers is 0. Limits of errors: the PTX manual.

// 2^x, within 2 units in the last place.
static __device__ __forceinline__ float exp2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float reciprocal_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float sqrt_approx(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Within 2^-11, relative.
static __device__ __forceinline__ float tanh_approx(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float min_keeping_nan(float a, float b)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

} // namespace sm80
