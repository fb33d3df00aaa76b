// exp and the logistic function for loops that the compiler vectorises: no branches, no calls, no tables.
#pragma once
#include <stdint.h>
#include <string.h>

// e^x to 1 ulp or so in the normal range; 0 below -87.3, infinity above 88.7, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (remainder r^8/8! < 6e-9), 2^n by the
// exponent bits.
static inline float fast_exp(float x)
{
    const float low = -87.33654f, high = 88.722839f;
    float t = x < low ? low : x;
    t = t > high ? high : t;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const float shifter = 12582912.0f;
    float shifted = t * 1.44269504f + shifter;
    float n = shifted - shifter;
    // ln 2 in two parts: n times the first is exact.
    float r = (t - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = (p * r) * r + r;
    // n reaches 128: two factors, each a normal number.
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    int32_t k = (int32_t)(bits - 0x4b400000u), half = k >> 1;
    uint32_t first = (uint32_t)(half + 127) << 23, second = (uint32_t)(k - half + 127) << 23;
    float f1, f2;
    memcpy(&f1, &first, 4);
    memcpy(&f2, &second, 4);
    float y = (p * f1 + f1) * f2;
    y = x < low ? 0.0f : y;
    y = x > high ? __builtin_inff() : y;
    return x != x ? x : y;
}

// 1 / (1 + e^-x)
static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
