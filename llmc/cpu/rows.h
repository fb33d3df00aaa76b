// The rms norm of one row, shared by embedding, residual stream and heads.
#pragma once
#include "llmc/cpu/cpu.h"
#include <float.h>
#include <math.h>

// 1 / sqrt(mean(x^2) + 2^-23)
static inline float rms_rstd(const float *x, int d)
{
    return 1.0f / sqrtf(dot(x, x, d) / (float)d + FLT_EPSILON);
}

// h = rms(x), rounded; returns rstd. Scales x on the way.
static inline float rms_store(floatX *h, float *restrict x, int d)
{
    float rstd = rms_rstd(x, d);
#pragma omp simd
    for (int i = 0; i < d; i++)
        x[i] *= rstd;
    store_row(h, x, d);
    return rstd;
}

// dx = rstd * (dh - h * mean(dh * h)).  dx may be dh
static inline void rms_backward(float *dx, const float *dh, const float *restrict h, float rstd, int d)
{
    float mean = dot(dh, h, d) / (float)d;
#pragma omp simd
    for (int i = 0; i < d; i++)
        dx[i] = rstd * (dh[i] - h[i] * mean);
}
