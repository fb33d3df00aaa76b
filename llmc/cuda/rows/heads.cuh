// What both directions of heads.h share.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

static __device__ __forceinline__ int64_t position_of(const HeadsForward &a, int64_t t, int n)
{
    return a.paired ? 2 * t + n % 2 : t;
}

static __device__ __forceinline__ void unpack4(uint2 u, float (&f)[4])
{
    f[0] = __uint_as_float(u.x << 16);
    f[1] = __uint_as_float(u.x & 0xffff0000u);
    f[2] = __uint_as_float(u.y << 16);
    f[3] = __uint_as_float(u.y & 0xffff0000u);
}

static __device__ __forceinline__ void add_vec(float (&sum)[8], const floatX *row, int v)
{
    float x[8];
    unpack8(load_vec(row, v), x);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum[k] += x[k];
}

static __device__ __forceinline__ float dot8(const float (&a)[8], const float (&b)[8])
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += a[k] * b[k];
    return sum;
}

// ---- pairs: heads of any width ----------------------------------------------------------------------------

static __device__ __forceinline__ float2 load_two(const floatX *p)
{
    uint32_t u = *(const uint32_t *)p;
    return {__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u)};
}

static __device__ __forceinline__ void store_two(floatX *p, float even, float odd)
{
    *(uint32_t *)p = pack2(even, odd);
}

// Cosine and sine of pair j of a head.
static __device__ __forceinline__ float2 turn_of(const HeadsForward &a, int64_t position, int j)
{
    int64_t at = position * (a.qk / 4) + j;
    return j < a.qk / 4 ? make_float2(to_float(a.cos[at]), to_float(a.sin[at])) : make_float2(1, 0);
}
