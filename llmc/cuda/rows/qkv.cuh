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
