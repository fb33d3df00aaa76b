// What every CUDA file of the backend shares: error checks, 16-byte vectors of bf16, fixed-order reductions,
// the scratch memory.
//
// Shape of the memory-bound kernels: one warp owns a row of width d, lane l holds the 16-byte vectors l,
// l+32, l+64 ... of it, all in registers. VPL (vectors per lane) is a template parameter, so a row of up to
// 256*VPL elements; shorter rows leave lanes idle.
#pragma once
#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
extern "C" {
#include "llmc/base/common.h" // compiled as C
}
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/device/scratch.h"
#include "llmc/ops/costs.h"

// Ends the program with the error: EXIT_DEVICE when the GPU has failed, and any later call would too.
__attribute__((noreturn)) void cuda_failed(cudaError_t status, const char *call, const char *file, int line);

#define CUDA_CHECK(expression) \
    do { \
        cudaError_t status_ = (expression); \
        if (status_ != cudaSuccess) \
            cuda_failed(status_, #expression, __FILE__, __LINE__); \
    } while (0)
#define CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())

// ---- the device -------------------------------------------------------------------------------------------

typedef struct {
    int index;           // CUDA device
    int sms;             // multiprocessors
    int compute;         // 10 * major + minor
    int code;            // __CUDA_ARCH__ of the machine code that the device took from this program
    bool wgmma_code;     // that code may use the instructions of sm_90a
    const char *left;    // why not, although it is there (device_leave_wgmma); NULL
    bool portable;       // none of what device.h asks for is to be used
    size_t shared_block; // most shared memory of a block, bytes
    char name[256];
    bool open;
    OpSizes sizes; // as reserved
} DeviceState;
extern DeviceState device_state;
void device_open(DeviceState *s,
                 int index); // fatal, with the reason, when there is no such device or no code for it

// Lets CTAs of the kernel have so much dynamic shared memory; false: this GPU has less. Any other error ends
// the program, as it may be that of an earlier launch. Needed from 48 KB on less the kernel's static memory.
bool allow_shared_memory(const void *kernel, size_t bytes);

// Memory that device_alloc's list does not know, not zeroed, to be freed with cudaFree; fatal with `what`
// when memory is short.
void *device_malloc(size_t size, const char *what);

void matmul_reserve(const OpSizes *sizes); // cuBLASLt handle and the plans of the model's products
void matmul_close(void);
const char *matmul_description(void);
void mlp_fp8_reserve(const OpSizes *sizes);
const char *mlp_description(void);
void head_reserve(const OpSizes *sizes);
const char *head_description(void);

// ---- vectors ----------------------------------------------------------------------------------------------

enum { MAX_DIM = 2048, WARP = 32, ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / WARP };

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

static __device__ __forceinline__ void unpack8(uint4 u, float (&f)[8])
{
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = __uint_as_float(w[i] << 16);
        f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}

static __device__ __forceinline__ uint32_t pack2(float lo, float hi)
{
    __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&b);
}

static __device__ __forceinline__ uint4 pack8(const float (&f)[8])
{
    return make_uint4(pack2(f[0], f[1]), pack2(f[2], f[3]), pack2(f[4], f[5]), pack2(f[6], f[7]));
}

static __device__ __forceinline__ uint4 load_vec(const floatX *row, int v)
{
    return reinterpret_cast<const uint4 *>(row)[v];
}

static __device__ __forceinline__ void store_vec(floatX *row, int v, uint4 u)
{
    reinterpret_cast<uint4 *>(row)[v] = u;
}

// The lane's share of a row of `vectors` 16-byte vectors; zeros beyond the end.
template <int VPL>
static __device__ __forceinline__ void load_row(uint4 (&u)[VPL], const floatX *row, int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++)
        u[i] = lane + WARP * i < vectors ? load_vec(row, lane + WARP * i) : make_uint4(0, 0, 0, 0);
}

template <int VPL>
static __device__ __forceinline__ void store_row(floatX *row, const uint4 (&u)[VPL], int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++)
        if (lane + WARP * i < vectors)
            store_vec(row, lane + WARP * i, u[i]);
}

// Neighbouring lanes that share a head of width e, a vector each (the last of them none when e / 8 is no
// power of two).
static inline int head_lanes(int e)
{
    int lanes = 1;
    while (8 * lanes < e)
        lanes *= 2;
    return lanes;
}

// Calls `call` with constexpr int VPL for width d; widths between the instances take the next larger one.
#define DISPATCH_WIDTH(d, call) \
    do { \
        int vectors_per_lane_ = ((d) + 255) / 256; \
        if (vectors_per_lane_ <= 1) { \
            constexpr int VPL = 1; \
            call; \
        } else if (vectors_per_lane_ <= 2) { \
            constexpr int VPL = 2; \
            call; \
        } else if (vectors_per_lane_ <= 3) { \
            constexpr int VPL = 3; \
            call; \
        } else if (vectors_per_lane_ <= 4) { \
            constexpr int VPL = 4; \
            call; \
        } else if (vectors_per_lane_ <= 6) { \
            constexpr int VPL = 6; \
            call; \
        } else { \
            constexpr int VPL = 8; \
            call; \
        } \
        CHECK_LAUNCH(); \
    } while (0)

// ---- reductions -------------------------------------------------------------------------------------------

static __device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Sum over groups of `width` neighbouring lanes (a power of two), for the lanes of `mask`, which holds whole
// groups.
static __device__ __forceinline__ float group_sum(float x, int width, unsigned mask)
{
    for (int step = width / 2; step; step >>= 1)
        x += __shfl_xor_sync(mask, x, step);
    return x;
}

// Over the four lanes that hold a row of a tensor core's result.
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sum over the block, given to all threads. `shared` holds one float per warp.
static __device__ __forceinline__ float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    int warps = blockDim.x / WARP;
    __syncthreads(); // shared may still be read from the last call
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = x;
    __syncthreads();
    x = threadIdx.x % WARP < warps ? shared[threadIdx.x % WARP] : 0;
    return warp_sum(x);
}

// out[k] += sum over all threads of the grid of v[k]. Every block writes its sums to `partials` (gridDim.x,
// K); the block that arrives last adds them up in the order of the blocks: no atomics on floats, so the same
// bits in every run. All threads of the block must call it; counter is 0 before and after.
template <int K>
static __device__ __forceinline__ void grid_accumulate(float *out, const float (&v)[K], float *partials,
                                                       unsigned *counter)
{
    __shared__ float shared[WARP];
    __shared__ bool last;
    float sums[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        sums[k] = block_sum(v[k], shared);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int k = 0; k < K; k++)
            partials[blockIdx.x * K + k] = sums[k];
        __threadfence();
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1; // wraps to 0 at the last block
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
#pragma unroll
    for (int k = 0; k < K; k++) {
        float x = 0;
        for (int b = threadIdx.x; b < gridDim.x; b += blockDim.x)
            x += __ldcg(partials + b * K + k);
        x = block_sum(x, shared);
        if (threadIdx.x == 0)
            out[k] += x;
    }
}

// Bits of the largest magnitude among eight bf16, as of a float. Maxima of nonnegative floats are those of
// their bits; NaN is above infinity.
static __device__ __forceinline__ uint32_t amax_of(uint4 u)
{
    uint32_t lo = max(max(u.x << 16 & 0x7fffffffu, u.y << 16 & 0x7fffffffu),
                      max(u.z << 16 & 0x7fffffffu, u.w << 16 & 0x7fffffffu));
    uint32_t hi = max(max(u.x & 0x7fff0000u, u.y & 0x7fff0000u), max(u.z & 0x7fff0000u, u.w & 0x7fff0000u));
    return max(lo, hi);
}

// *amax = max(*amax, the largest of the warp's bits), whatever the order of the warps. Most of them find that
// it is larger already.
static __device__ __forceinline__ void amax_bits(float *amax, uint32_t bits)
{
    unsigned *most = reinterpret_cast<unsigned *>(amax);
    bits = __reduce_max_sync(0xffffffffu, bits);
    if (threadIdx.x % WARP == 0 && bits > *reinterpret_cast<volatile unsigned *>(most))
        atomicMax(most, bits);
}

static const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23, of every norm of rows

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Blocks for a kernel whose warps each take rows in turn: enough to fill the device, never more than there
// are rows.
static inline int row_blocks(int rows, int blocks_per_sm)
{
    int64_t most = (int64_t)device_state.sms * blocks_per_sm;
    return (int)min_i64(ceil_div(rows, ROW_WARPS), most);
}
