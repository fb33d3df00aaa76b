// Scales and codes of the MLP's FP8 products, which are in matmul.c.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/fp8.h"
#include <math.h>

// Maxima of nonnegative floats are those of their bits; NaN is above infinity.
static void raise_bits(float *amax, uint32_t bits)
{
    if (bits > fp8_bits(*amax))
        *amax = fp8_float(bits);
}

void amax_accumulate(Stream s, float *amax, const floatX *x, int64_t n)
{
    OP_SCOPE(amax_accumulate, n);
    (void)s;
    uint32_t most = 0;
#pragma omp parallel for simd schedule(static) reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = fp8_bits(x_to_float(x[i])) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    raise_bits(amax, most);
}

void amax_relu2_bound(Stream s, float *amax, const floatX *w, int in, int out)
{
    OP_SCOPE(amax_relu2_bound, in, out);
    (void)s;
    uint32_t most = 0;
#pragma omp parallel for schedule(static) reduction(max : most)
    for (int j = 0; j < out; j++) {
        float sum = 0;
        for (int i = 0; i < in; i++) {
            float x = x_to_float(w[(int64_t)i * out + j]);
            sum += x * x;
        }
        uint32_t bits = fp8_bits((float)in * sum);
        most = bits > most ? bits : most;
    }
    raise_bits(amax, most);
}

void scale_from_amax(Stream s, float *scale, float *amax, float headroom)
{
    OP_SCOPE(scale_from_amax);
    (void)s;
    *scale = (*amax < 1e-12f ? 1e-12f : *amax) * (headroom / E4M3_MAX); // NaN stays
    *amax = 0;
}

void quantize_e4m3(Stream s, uint8_t *codes, const floatX *x, const float *scale, int rows, int cols,
                   bool transpose)
{
    OP_SCOPE(quantize_e4m3, rows, cols);
    (void)s;
    float inverse = 1 / *scale;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < rows; i++) {
        const floatX *from = x + (int64_t)i * cols;
        uint8_t *to = transpose ? codes + i : codes + (int64_t)i * cols;
        int64_t step = transpose ? rows : 1;
#pragma omp simd
        for (int j = 0; j < cols; j++)
            to[j * step] = float_to_e4m3(x_to_float(from[j]) * inverse);
    }
}
