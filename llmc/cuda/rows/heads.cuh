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

static __device__ __forceinline__ float dot8(const float (&a)[8], const float (&b)[8])
{
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += a[k] * b[k];
    return sum;
}

// ---- vectors ----------------------------------------------------------------------------------------------

// Heads of q and k of multiples of 16, of v of multiples of 8, up to 256. LANES neighbouring lanes, 16 or 32,
// share a head and have a 16-byte vector of it each; those beyond its width have zeros. A rotating pair lies
// in one lane. Vectors are counted in 32 bits: a tensor has less than 34 GB.
enum { MAX_HEAD = 8 * WARP };
const unsigned WHOLE_WARP = 0xffffffffu;

static inline bool heads_in_vectors(int qk, int e)
{
    return qk % 16 == 0 && qk <= MAX_HEAD && e % 8 == 0 && e <= MAX_HEAD;
}

static __device__ __forceinline__ uint4 vector_or_zero(const floatX *p, int v, bool has)
{
    return has ? load_vec(p, v) : make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void add8(float (&sum)[8], uint4 u)
{
    float x[8];
    unpack8(u, x);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum[k] += x[k];
}

// Sums over the lanes of a head, all at once.
template <int LANES, int COUNT> static __device__ __forceinline__ void lane_sums(float (&x)[COUNT])
{
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1)
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            x[i] += __shfl_xor_sync(WHOLE_WARP, x[i], step);
}

// Cosines and sines of a vector's four pairs, in bf16.
struct Rotation {
    uint2 c, s;
};

// Of vector j of head n.
static __device__ __forceinline__ Rotation load_rotation(const HeadsForward &a, int64_t t, int n, int j)
{
    if (j >= a.qk / 16)
        return {make_uint2(0x3f803f80, 0x3f803f80), make_uint2(0, 0)}; // ones, zeros
    int64_t at = position_of(a, t, n) * (a.qk / 4) + 4 * j;
    return {*(const uint2 *)(a.cos + at), *(const uint2 *)(a.sin + at)};
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
