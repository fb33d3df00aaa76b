// floatX: the element of activations and of the parameters that are stored in half width. bf16, as on the
// GPU; or fp32 in the exact build (-DFLOATX_FP32), which exists to check the mathematics against fp32/fp64
// references.
#pragma once
#include <stdint.h>
#include <string.h>

typedef struct {
    uint16_t bits;
} bf16;

static inline float bf16_to_float(bf16 x)
{
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Round to nearest even. NaN stays NaN (quiet), overflow goes to infinity as IEEE demands.
static inline bf16 float_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t nan = (u & 0x7fffffffu) > 0x7f800000u;
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    bf16 x = {(uint16_t)(nan ? ((u >> 16) | 0x40u) : rounded)};
    return x;
}

// The upper 16 bits as they are: toward zero.
static inline bf16 truncate_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    bf16 x = {(uint16_t)(u >> 16)};
    return x;
}

#ifdef FLOATX_FP32
typedef float floatX;
#define FLOATX_NAME "fp32"
static inline float x_to_float(floatX x) { return x; }
static inline floatX float_to_x(float f) { return f; }
static inline floatX truncate_to_x(float f) { return f; }
#else
#ifdef __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 floatX;
#else
typedef bf16 floatX;
static inline float x_to_float(floatX x) { return bf16_to_float(x); }
static inline floatX float_to_x(float f) { return float_to_bf16(f); }
static inline floatX truncate_to_x(float f) { return truncate_to_bf16(f); }
#endif
#define FLOATX_NAME "bf16"
#endif
