// From logits to loss and gradient, row by row: z = 30 sig(l / 7.5), loss = log sum e^z - z_target,
// dloss/dl_j = (softmax_j - [j = target]) * 4 sig (1 - sig).
#pragma once
#include "llmc/cuda/head/fp8.cuh"

static const float LOG2E = 1.4426950408889634f;
#define CAP 30.0f
#define SLOPE 7.5f
#define GRADIENT_FACTOR 448.0f // 1/sg of the e5m2 codes

static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ float min_keeping_nan(float a, float b)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

static __device__ __forceinline__ float tanh_fast(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// (1 - t)/2 of eight t in [-1, 1], in 16 bits each: 1 + FRACTIONS (1 - t)/2. 2^23 + x puts the integer part
// of x into the low bits, rounded.
enum { FRACTIONS = 65534 };
static __device__ __forceinline__ uint4 pack_halves(const float (&t)[8])
{
    uint32_t w[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        w[k] = __float_as_uint(fmaf(t[k], -FRACTIONS / 2, 8388608 + 1 + FRACTIONS / 2));
    return make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                      __byte_perm(w[4], w[5], 0x5410), __byte_perm(w[6], w[7], 0x5410));
}
// FRACTIONS times the numbers.
static __device__ __forceinline__ void unpack_fractions(uint4 u, float *f)
{
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = __uint_as_float(__byte_perm(w[k / 2], 0x4b000000, k % 2 ? 0x7632 : 0x7610)) - 8388609;
}

typedef enum {
    GRADIENT_BF16,         // in place of the logits
    GRADIENT_E5M2,         // to `codes`: e5m2(448 g)
    GRADIENT_E5M2_AS_BF16, // the values of those codes, in place of the logits
} GradientForm;

// losses (rows) fp32 out;  logits (rows_padded, Vp) bf16 in/out;  codes (rows_padded, Vp) for GRADIENT_E5M2
// Rows from `rows` to rows_padded get zero gradient.
void loss_gradient_rows(Stream s, GradientForm form, float *losses, floatX *logits, uint8_t *codes,
                        const int32_t *targets, int rows, int rows_padded, int Vp);
// losses (rows) fp32 out;  logits (rows, Vp) fp32
void loss_rows(Stream s, float *losses, const float *logits, const int32_t *targets, int rows, int Vp);
// The same in two steps, from the output of sm90_head_logits.cuh:
// losses (rows) out;  factors (rows) out: what the second step needs of a row
//   sums (parts, pitch), target_logit (rows): as sm90_head_logits gave them
void loss_from_sums(Stream s, float *losses, float2 *factors, const float *sums, int parts, int pitch,
                    const float *target_logit, int rows);
// g8 (rows_padded, Vp) = e5m2(448 g), g8_transposed its transpose, transposed_pitch bytes between rows; rows
// from `rows` on are zero.
//   one_minus_sigmoid (rows, Vp) as sm90_head_logits gave it
void gradient_from_one_minus_sigmoid(Stream s, uint8_t *g8, uint8_t *g8_transposed, int64_t transposed_pitch,
                                     const uint16_t *one_minus_sigmoid, const float2 *factors,
                                     const int32_t *targets, int rows, int rows_padded, int Vp);
// z = 30 sig(z / 7.5), in place.  n elements
void softcap(Stream s, float *z, int64_t n);
// out (1) = sum of x (n), in a fixed order
void sum_in_order(Stream s, float *out, const float *x, int n);
