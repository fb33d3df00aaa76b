// What forward and backward share, and the fast path of the QKV product.
//
// Fast path, head widths 32, 64 ... 512: e/16 neighbouring threads share a head, each holds a vector of the
// first half and its partner in the second, so that a rotation needs no exchange. Other widths: one warp a
// head, element by element.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

static inline bool qkv_fast_path(int N, int H, int e)
{
    return e >= 32 && e <= 512 && (e & (e - 1)) == 0 && (int64_t)N * H * e < (int64_t)1 << 34;
}

// cos and sin of a thread's vector j (elements 8j..8j+7 of the first half); the second quarter of a head
// stands still.
static __device__ __forceinline__ void load_rotation(float (&c)[8], float (&s)[8], const floatX *cos,
                                                     const floatX *sin, int64_t position, int j, int e)
{
    if (8 * j < e / 4) {
        unpack8(load_vec(cos + position * (e / 4), j), c);
        unpack8(load_vec(sin + position * (e / 4), j), s);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            c[k] = 1;
            s[k] = 0;
        }
    }
}

// A thread's two vectors of a head.
struct Pair {
    uint4 lo, hi;
};
static __device__ __forceinline__ Pair load_pair(const floatX *head, int j, int half)
{
    return {load_vec(head, j), load_vec(head, j + half)};
}

// y = R x of a pair of vectors.
static __device__ __forceinline__ void rotate(float (&x1)[8], float (&x2)[8], const float (&c)[8],
                                              const float (&s)[8])
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float y1 = x1[k] * c[k] + x2[k] * s[k], y2 = x2[k] * c[k] - x1[k] * s[k];
        x1[k] = y1;
        x2[k] = y2;
    }
}

// A head of q or k to its place; rstd: where lane j = 0 of the head's lanes stores it.
static __device__ __forceinline__ void norm_and_rotate(floatX *head, Pair in, float *rstd, int j, int e,
                                                       const float (&c)[8], const float (&s)[8],
                                                       unsigned mask)
{
    int half = e / 16; // vectors of a half
    float x1[8], x2[8], sum = 0;
    unpack8(in.lo, x1);
    unpack8(in.hi, x2);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sum += x1[k] * x1[k] + x2[k] * x2[k];
    float r = 1.0f / sqrtf(group_sum(sum, half, mask) / (float)e + RMS_EPS);
    if (j == 0)
        *rstd = r;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        x1[k] *= r;
        x2[k] *= r;
    }
    rotate(x1, x2, c, s);
    store_vec(head, j, pack8(x1));
    store_vec(head, j + half, pack8(x2));
}

static __device__ __forceinline__ uint4 mix_value(uint4 raw, uint4 embed, const float *lambda,
                                                  bool with_embed)
{
    float x[8], t[8];
    unpack8(raw, x);
    unpack8(embed, t);
#pragma unroll
    for (int k = 0; k < 8; k++)
        x[k] = with_embed ? lambda[0] * x[k] + lambda[1] * t[k] : lambda[0] * x[k];
    return pack8(x);
}
