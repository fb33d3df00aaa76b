// Scales and codes of FP8 products, which are in matmul.c.
#include "llmc/cpu/cpu.h"
#include "llmc/cpu/fp8.h"
#include <math.h>

// Maxima of nonnegative floats are those of their bits; NaN is above infinity.
static void raise_bits(float *amax, uint32_t bits)
{
    if (bits > fp8_bits(*amax))
        *amax = fp8_float(bits);
}

static uint32_t largest_bits(const floatX *x, int n)
{
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int i = 0; i < n; i++) {
        uint32_t bits = fp8_bits(x_to_float(x[i])) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

void amax_accumulate(Stream s, float *amax, const floatX *x, int64_t n)
{
    OP_SCOPE(amax_accumulate, n);
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

static float at_least(float amax, float least) { return amax < least ? least : amax; } // NaN stays

void scale_from_amax(Stream s, float *scale, float *amax, float factor)
{
    OP_SCOPE(scale_from_amax);
    *scale = at_least(*amax, 1e-12f) * factor;
    *amax = 0;
}

static float to_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }
static float largest_weight(const float *amax) { return at_least(*amax, to_bf16(1e-12f)); }

void scale_exact(Stream s, float *scale, float *amax)
{
    OP_SCOPE(scale_exact);
    *scale = to_bf16(largest_weight(amax) / E4M3_LARGEST);
    *amax = 0;
}

void scale_delayed(Stream s, float *scale, float *next, float *amax, float factor, const float *exact)
{
    OP_SCOPE(scale_delayed);
    float largest = largest_weight(amax);
    *scale = *exact != 0 ? to_bf16(largest / E4M3_LARGEST) : *next;
    *next = largest * factor;
    *amax = 0;
}

// One row; the codes of neighbours are `step` apart.
static void quantize_row(uint8_t *to, const floatX *from, int cols, int64_t step, float scale,
                         QuantizeRule rule)
{
    float factor = rule == QUANTIZE_AMAX ? E4M3_LARGEST / at_least(scale, 1e-12f) : 1 / scale;
    if (rule == QUANTIZE_QUOTIENT_BF16) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            to[j * step] = float_to_e4m3(to_bf16(x_to_float(from[j]) / scale));
    } else if (rule == QUANTIZE_QUOTIENT) {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            to[j * step] = float_to_e4m3(x_to_float(from[j]) / scale);
    } else {
#pragma omp simd
        for (int j = 0; j < cols; j++)
            to[j * step] = float_to_e4m3(x_to_float(from[j]) * factor);
    }
}

void quantize_e4m3(Stream s, uint8_t *codes, const floatX *x, const float *scale, int rows, int cols,
                   QuantizeRule rule, bool transpose)
{
    OP_SCOPE(quantize_e4m3, rows, cols);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < rows; i++)
        quantize_row(transpose ? codes + i : codes + (int64_t)i * cols, x + (int64_t)i * cols, cols,
                     transpose ? rows : 1, *scale, rule);
}

// ---- both directions --------------------------------------------------------------------------------------

void scale_quotient(Stream s, float *scale, float *amax)
{
    OP_SCOPE(scale_quotient);
    *scale = at_least(*amax, 1e-12f) / E4M3_LARGEST;
    *amax = 0;
}

void scales_follow(Stream s, float *scale, float *amax, float factor, float least, int n)
{
    OP_SCOPE(scales_follow, n);
    for (int i = 0; i < n; i++) {
        scale[i] = at_least(at_least(amax[i], 1e-12f) * factor, least);
        amax[i] = 0;
    }
}

void quantize_codes(Stream s, const Codes *to, const floatX *x, int rows, int cols)
{
    OP_SCOPE(quantize_codes, rows, cols);
    uint32_t most = 0;
#pragma omp parallel for schedule(static) reduction(max : most)
    for (int i = 0; i < rows; i++) {
        const floatX *from = x + (int64_t)i * cols;
        quantize_row(to->codes + (int64_t)i * cols, from, cols, 1, *to->scale, QUANTIZE_QUOTIENT);
        if (to->transposed)
            quantize_row(to->transposed + i, from, cols, rows, *to->scale, QUANTIZE_QUOTIENT);
        uint32_t bits = largest_bits(from, cols);
        most = bits > most ? bits : most;
    }
    if (to->amax)
        raise_bits(to->amax, most);
}
