// From a tile of sums in shared memory to the result of a Newton-Schulz product, for the portable kernels.
#pragma once
#include "llmc/cuda/muon/ns_internal.cuh"

// alpha sum + beta d, with the roundings spelled out: both copies of a mirrored element must get the same
// bits.
template <typename T>
static __device__ __forceinline__ float finish(float sum, const T *d, const NsProduct &p, int row, int col)
{
    float value = __fmul_rn(p.alpha, sum);
    return d ? __fmaf_rn(p.beta, to_float(d[(int64_t)row * p.d_pitch + col]), value) : value;
}

// Column `col` of a scaled result, from its value before. scale: of the matrix, or NULL.
template <typename O>
static __device__ __forceinline__ float scale_value(float value, const float *scale, const NsProduct &p,
                                                    bool on_diagonal, int col)
{
    if (!scale)
        return value;
    value = to_float(from_float<O>(value));
    if (on_diagonal)
        value = to_float(from_float<O>(value + p.diagonal));
    return saturated<O>(value * (p.factor * scale[col]));
}

// Writes the tile of SIDE x SIDE sums, rows of PITCH floats in shared memory, at (row0, col0): alpha result +
// beta d. Symmetric forms: what is on or below the diagonal of the matrix, and its mirror image, from the
// same rounded value.
template <int SIDE, int PITCH, int THREADS, typename O, typename T>
static __device__ __forceinline__ void write_tile(O *out, const float *result, const T *d, const float *scale,
                                                  const NsProduct &p, int row0, int col0, bool symmetric)
{
    for (int i = threadIdx.x; i < SIDE * SIDE; i += THREADS) {
        int row = row0 + i / SIDE, col = col0 + i % SIDE;
        if (row >= p.rows || col >= p.cols || (symmetric && col > row))
            continue;
        float value = finish(result[i / SIDE * PITCH + i % SIDE], d, p, row, col);
        out[(int64_t)row * p.out_pitch + col] =
            from_float<O>(scale_value<O>(value, scale, p, row == col, col));
    }
    if (!symmetric)
        return;
    for (int i = threadIdx.x; i < SIDE * SIDE;
         i += THREADS) { // neighbouring threads: neighbouring columns of the mirror image
        int row = row0 + i % SIDE, col = col0 + i / SIDE;
        if (row >= p.rows || col >= row)
            continue;
        float value = finish(result[i % SIDE * PITCH + i / SIDE], d, p, row, col);
        out[(int64_t)col * p.out_pitch + row] = from_float<O>(scale_value<O>(value, scale, p, false, row));
    }
}
