// The two 8-bit float formats of the head (OCP "8-bit Floating Point Specification"), by bit arithmetic that
// vectorises.
//
//          exponent, fraction bits   bias   largest   smallest normal   smallest subnormal   specials
//   e4m3   4, 3                      7      448       2^-6              2^-9                 NaN is
//                                           S.1111.111, no infinity
//   e5m2   5, 2                      15     57344     2^-14             2^-16                infinity and NaN
//                                           as in IEEE 754
//
// To 8 bits: nearest, ties to even; beyond the largest, infinity included, saturates to the largest; NaN
// stays NaN.
#pragma once
#include <stdint.h>
#include <string.h>

#define E4M3_MAX 448.0f
#define E5M2_MAX 57344.0f

static inline float fp8_float(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t fp8_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

// The magnitude's code for a format with `fraction` bits, `bias` and largest value `max`; `a` >= 0 or NaN.
static inline uint32_t fp8_encode(float a, int fraction, int bias, float max)
{
    a = a > max ? max : a;
    uint32_t bits = fp8_bits(a);
    int drop = 23 - fraction;
    uint32_t normal = ((bits + (1u << (drop - 1)) - 1 + ((bits >> drop) & 1)) >> drop) -
                      ((uint32_t)(127 - bias) << fraction);
    // Subnormal: a multiple of 2^(1 - bias - fraction). Adding the fp32 number whose spacing that is rounds
    // to it.
    float anchor = fp8_float((uint32_t)(127 + 24 - bias - fraction) << 23);
    uint32_t subnormal = fp8_bits(a + anchor) - fp8_bits(anchor);
    return bits < (uint32_t)(128 - bias) << 23 ? subnormal : normal;
}

static inline uint8_t float_to_e4m3(float f)
{
    uint32_t sign = fp8_bits(f) >> 24 & 0x80, magnitude = fp8_bits(f) & 0x7fffffffu;
    uint32_t code = fp8_encode(fp8_float(magnitude), 3, 7, E4M3_MAX);
    return (uint8_t)((magnitude > 0x7f800000u ? 0x7f : code) | sign);
}

static inline uint8_t float_to_e5m2(float f)
{
    uint32_t sign = fp8_bits(f) >> 24 & 0x80, magnitude = fp8_bits(f) & 0x7fffffffu;
    uint32_t code = fp8_encode(fp8_float(magnitude), 2, 15, E5M2_MAX);
    return (uint8_t)((magnitude > 0x7f800000u ? 0x7f : code) | sign);
}

static inline float e4m3_to_float(uint8_t code)
{
    uint32_t magnitude = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t normal = (magnitude << 20) + (120u << 23);
    uint32_t bits = magnitude < 8 ? fp8_bits((float)(int32_t)magnitude * 0x1p-9f) : normal;
    return fp8_float((magnitude == 0x7f ? 0x7fc00000u : bits) | sign);
}

static inline float e5m2_to_float(uint8_t code)
{
    uint32_t magnitude = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t normal = (magnitude << 21) + (112u << 23);
    uint32_t bits = magnitude < 4 ? fp8_bits((float)(int32_t)magnitude * 0x1p-16f) : normal;
    uint32_t special = 0x7f800000u | (magnitude & 3) << 21; // the fraction tells infinity from NaN
    return fp8_float((magnitude >= 0x7c ? special : bits) | sign);
}
