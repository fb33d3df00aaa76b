// CUDA C++ for a host compiler: what the kernels that every GPU runs use of the language. A CTA's threads are
// fibers that take turns (launch.cc). Every file of build/emulated is compiled with this in front.
//
// What a kernel does is exact up to the functions that hardware approximates: here they are the host's.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static // CTAs run one after the other
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// The headers of CUDA are read.
#define __CUDACC__
#define __CUDACC_VER_MAJOR__ 0
#define __CUDACC_VER_MINOR__ 0
#define __CUDACC_VER_BUILD__ 0
#define __CUDA_ARCH__ 890 // Ada: the first with mma.sync of FP8

namespace emulate
{

struct Thread {
    uint3 index, cta;
    int number; // in its CTA
};
extern Thread *current;

void run_grid(const char *name, dim3 grid, dim3 cta, size_t shared, const std::function<void()> &thread);
void *dynamic_shared(void); // the bytes that the launch asked for, aligned to 128

// Waits until all threads of the CTA that still run are here.
void cta_barrier(void);
// Waits until the lanes of the mask are here, each with what it gives and takes; then combine runs once for
// all of them. lane[i]: lane i's `mine`
typedef void (*Combine)(void *const (&lane)[32], uint32_t mask);
void warp_exchange(uint32_t mask, void *mine, Combine combine);

// Copies to shared memory that are under way: none is there before the thread has waited for it.
void queue_copy(void *to, const void *from, int bytes, int of);
void commit_copies(void);
void wait_copies(int pending_groups);
void wait_all_copies(void);

[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
// In place of an instruction that only the kernels for Hopper use.
[[noreturn]] inline void no_instruction(void) { fail("an instruction that is not emulated"); }

// kernel<<<grid, cta, shared, stream>>>(arguments): emulate::launch(name, kernel, grid, cta, shared,
// stream)(arguments)
void enqueue(cudaStream_t s, std::function<void()> work);
template <typename... P> struct Launch {
    const char *name;
    void (*kernel)(P...);
    dim3 grid, cta;
    size_t shared;
    cudaStream_t stream;
    void operator()(P... arguments) const
    {
        Launch l = *this;
        enqueue(stream, [=] { run_grid(l.name, l.grid, l.cta, l.shared, [=] { l.kernel(arguments...); }); });
    }
};
template <typename... P>
Launch<P...> launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 cta, size_t shared = 0,
                    cudaStream_t s = NULL)
{
    return {name, kernel, grid, cta, shared, s};
}

// ---- of a warp -------------------------------------------------------------------------------------------

inline int lane_number() { return current->number % 32; }

// Each lane with the value of another one.
template <typename T> T shuffle(uint32_t mask, T x, int from)
{
    struct Shuffle {
        T value, got;
        int from;
    } mine = {x, x, from};
    warp_exchange(mask, &mine, [](void *const(&lane)[32], uint32_t m) {
        for (int i = 0; i < 32; i++) {
            if (!(m >> i & 1))
                continue;
            Shuffle *to = (Shuffle *)lane[i];
            if (!(m >> to->from & 1))
                fail("a shuffle from lane %d, which is not in the mask %08x", to->from, m);
            to->got = ((const Shuffle *)lane[to->from])->value;
        }
    });
    return mine.got;
}

// All lanes with the same: F over the values of the mask's lanes.
template <typename F> unsigned reduce(uint32_t mask, unsigned x)
{
    warp_exchange(mask, &x, [](void *const(&lane)[32], uint32_t m) {
        unsigned all = *(unsigned *)lane[__builtin_ctz(m)];
        for (int i = 0; i < 32; i++)
            all = m >> i & 1 ? F()(all, *(unsigned *)lane[i]) : all;
        for (int i = 0; i < 32; i++)
            if (m >> i & 1)
                *(unsigned *)lane[i] = all;
    });
    return x;
}
struct Max {
    unsigned operator()(unsigned a, unsigned b) const { return a > b ? a : b; }
};
struct Min {
    unsigned operator()(unsigned a, unsigned b) const { return a < b ? a : b; }
};
struct Or {
    unsigned operator()(unsigned a, unsigned b) const { return a | b; }
};

} // namespace emulate

#define threadIdx (emulate::current->index)
#define blockIdx (emulate::current->cta)
extern dim3 blockDim, gridDim;

inline void __syncthreads() { emulate::cta_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::reduce<emulate::Or>(mask, 0); }
inline void __threadfence() {}
[[noreturn]] inline void __trap() { emulate::fail("__trap"); }

template <typename T> T __shfl_sync(unsigned mask, T x, int lane, int width = 32)
{
    return emulate::shuffle(mask, x, (emulate::lane_number() & -width) | (lane & (width - 1)));
}
template <typename T> T __shfl_xor_sync(unsigned mask, T x, int bits)
{
    return emulate::shuffle(mask, x, emulate::lane_number() ^ bits);
}
inline unsigned __ballot_sync(unsigned mask, int x)
{
    return emulate::reduce<emulate::Or>(mask, x ? 1u << emulate::lane_number() : 0);
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x)
{
    return emulate::reduce<emulate::Max>(mask, x);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x)
{
    return emulate::reduce<emulate::Min>(mask, x);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) { return emulate::reduce<emulate::Or>(mask, x); }

// ---- of a thread -----------------------------------------------------------------------------------------

template <typename T> T __ldg(const T *p) { return *p; }
template <typename T> T __ldcg(const T *p) { return *p; }
template <typename T> T __ldcs(const T *p) { return *p; }
template <typename T> void __stcs(T *p, T x) { *p = x; }

inline unsigned atomicInc(unsigned *p, unsigned limit)
{
    unsigned old = *p;
    *p = old >= limit ? 0 : old + 1;
    return old;
}
template <typename T> T atomicAdd(T *p, T x)
{
    T old = *p;
    *p = old + x;
    return old;
}
template <typename T> T atomicMax(T *p, T x)
{
    T old = *p;
    *p = std::max(old, x);
    return old;
}

inline float __uint_as_float(unsigned x)
{
    float y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
inline unsigned __float_as_uint(float x)
{
    unsigned y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++)
        out |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __frcp_rz(float x)
{
    double exact = 1 / (double)x;
    float y = (float)exact;
    return fabs((double)y) > fabs(exact) ? nextafterf(y, 0) : y;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
#define SMALLER_AND_LARGER(T, A, B) \
    inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; } \
    inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }
SMALLER_AND_LARGER(int, int, int)
SMALLER_AND_LARGER(unsigned, unsigned, unsigned)
SMALLER_AND_LARGER(unsigned, int, unsigned)
SMALLER_AND_LARGER(unsigned, unsigned, int)
SMALLER_AND_LARGER(long, long, long)
SMALLER_AND_LARGER(float, float, float)
SMALLER_AND_LARGER(double, double, double)
#undef SMALLER_AND_LARGER

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute a, int value)
{
    return ::cudaFuncSetAttribute((const void *)kernel, a, value);
}
