// Quantisation to FP8, together with the transpose.
#include "llmc/cuda/head/fp8_transpose.cuh"

namespace
{

struct Bytes {
    static constexpr bool HAS_AMAX = false;
    typedef uint4 Raw;
    const uint8_t *x;
    int cols;
    __device__ __forceinline__ Raw load(int row, int col) const
    {
        return *reinterpret_cast<const uint4 *>(x + (int64_t)row * cols + col);
    }
    __device__ __forceinline__ uint4 codes(const Raw &raw, int, int) const { return raw; }
};

struct Quantise {
    static constexpr bool HAS_AMAX = false;
    struct Raw {
        uint4 a, b;
    };
    const floatX *x;
    const float *factors;
    float scale;
    int cols;
    __device__ __forceinline__ Raw load(int row, int col) const
    {
        const uint4 *at = reinterpret_cast<const uint4 *>(x + (int64_t)row * cols + col);
        return {at[0], at[1]};
    }
    __device__ __forceinline__ uint4 codes(const Raw &raw, int row, int) const
    {
        float f[8], g[8], factor = factors ? factors[row] : 1;
        unpack8(raw.a, f);
        unpack8(raw.b, g);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            f[k] = f[k] * factor / scale;
            g[k] = g[k] * factor / scale; // its product with 1/scale may round otherwise
        }
        return make_uint4(encode4(f[0], f[1], f[2], f[3], __NV_E4M3),
                          encode4(f[4], f[5], f[6], f[7], __NV_E4M3),
                          encode4(g[0], g[1], g[2], g[3], __NV_E4M3),
                          encode4(g[4], g[5], g[6], g[7], __NV_E4M3));
    }
};

} // namespace

void fp8_quantize(Stream s, const Fp8Quantize *q)
{
    TransposeOut t = {q->plain,       q->transposed, q->rows_padded,   q->rows,
                      q->rows_padded, q->cols,       q->product_order, q->interleaved};
    transpose_tiles(s, &t, Quantise{q->x, q->factors, q->scale, q->cols});
}

void fp8_transpose(Stream s, uint8_t *transposed, int64_t transposed_pitch, const uint8_t *x, int rows,
                   int cols)
{
    TransposeOut t = {NULL, transposed, transposed_pitch, rows, rows, cols, false, false};
    transpose_tiles(s, &t, Bytes{x, cols});
}

__global__ void fp8_round_kernel(floatX *out, const floatX *x, float scale, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = __float2bfloat16(fp8_value(to_float(x[i]) / scale, __NV_E4M3));
}

void fp8_round(Stream s, floatX *out, const floatX *x, float scale, int64_t n)
{
    if (n <= 0)
        return;
    fp8_round_kernel<<<(unsigned)ceil_div(n, TRANSPOSE_THREADS), TRANSPOSE_THREADS, 0, s>>>(out, x, scale, n);
    CHECK_LAUNCH();
}
