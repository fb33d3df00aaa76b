// Parts of qkv_backward that attention's backward pass does, too. Norm and rotation: of a row of q or k of
// width 128, held by a quad of lanes as products leave their sums: of each group of 8 columns a lane has
// columns 2 (lane % 4) and the next. With y = R x^, x^ = x rstd: dx^ = R' dy, and dx = rstd (dx^ - x^
// mean(dx^ x^)); see qkv_backward.cu.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/attention/sm90_attention.cuh"

enum { QKV_ROW_WIDTH = 128 };

// Of a row: the lane's pairs of columns of the groups 4 i .. 4 i + 3 of both halves, from its vectors 4 i +
// lane % 4.
struct RowPairs {
    uint32_t x[2][2][4]; // halves, i, groups
};
static __device__ __forceinline__ RowPairs to_pairs(const uint4 (&v)[2][2])
{
    RowPairs p;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t x[4] = {v[half][i].x, v[half][i].y, v[half][i].z, v[half][i].w};
            transpose_quad(x);
#pragma unroll
            for (int g = 0; g < 4; g++)
                p.x[half][i][g] = x[g];
        }
    return p;
}

static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The gradients of elements that rotate together, in place.  mean: of the row's products of gradient and
// result
static __device__ __forceinline__ void unrotate(float &d0, float &d1, float y0, float y1, float c, float s,
                                                float mean, float rstd)
{
    float scale = mean * __fdividef(1, c * c + s * s), x0 = d0 - y0 * scale, x1 = d1 - y1 * scale;
    d0 = rstd * (x0 * c - x1 * s);
    d1 = rstd * (x1 * c + x0 * s);
}

// The lane's vector of a row's cosines and sines.
struct Angles {
    uint4 cos, sin;
};
static __device__ __forceinline__ Angles load_angles(const floatX *cos, const floatX *sin, int64_t position,
                                                     bool exists)
{
    if (!exists)
        return {};
    return {load_vec(cos + position * (QKV_ROW_WIDTH / 4), threadIdx.x % 4),
            load_vec(sin + position * (QKV_ROW_WIDTH / 4), threadIdx.x % 4)};
}

// d: the row's sums [half][group][column of the pair]; out: the row's head in dqkv
static __device__ __forceinline__ void finish_row(floatX *out, float (&d)[2][8][2], const RowPairs &y,
                                                  const Angles &angles, float rstd, bool exists)
{
    uint32_t c[4] = {angles.cos.x, angles.cos.y, angles.cos.z, angles.cos.w};
    uint32_t s[4] = {angles.sin.x, angles.sin.y, angles.sin.z, angles.sin.w};
    float mean = 0;
    transpose_quad(c);
    transpose_quad(s);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int g = 0; g < 8; g++)
            mean +=
                d[half][g][0] * low(y.x[half][g / 4][g % 4]) + d[half][g][1] * high(y.x[half][g / 4][g % 4]);
    mean = group_sum(mean, 4, 0xffffffffu) / QKV_ROW_WIDTH;
#pragma unroll
    for (int g = 0; g < 8; g++) {
        uint32_t y0 = y.x[0][g / 4][g % 4], y1 = y.x[1][g / 4][g % 4];
        bool turns = g < 4; // the second quarter of a head stands still
        unrotate(d[0][g][0], d[1][g][0], low(y0), low(y1), turns ? low(c[g % 4]) : 1,
                 turns ? low(s[g % 4]) : 0, mean, rstd);
        unrotate(d[0][g][1], d[1][g][1], high(y0), high(y1), turns ? high(c[g % 4]) : 1,
                 turns ? high(s[g % 4]) : 0, mean, rstd);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t x[4];
#pragma unroll
            for (int g = 0; g < 4; g++)
                x[g] = pack2(d[half][4 * i + g][0], d[half][4 * i + g][1]);
            transpose_quad(x);
            if (exists)
                store_vec(out + half * (QKV_ROW_WIDTH / 2), 4 * i + threadIdx.x % 4,
                          make_uint4(x[0], x[1], x[2], x[3]));
        }
}

// lambda dv; adds dv v_raw and dv embed to the sums.
static __device__ __forceinline__ uint4 value_gradient(uint4 dv, uint4 raw, uint4 embed, bool with_embed,
                                                       float lambda, float (&sums)[2])
{
    float g[8], t[8];
    unpack8(dv, g);
    unpack8(raw, t);
#pragma unroll
    for (int k = 0; k < 8; k++)
        sums[0] += g[k] * t[k];
    unpack8(embed, t);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (with_embed)
            sums[1] += g[k] * t[k];
        g[k] *= lambda;
    }
    return pack8(g);
}
