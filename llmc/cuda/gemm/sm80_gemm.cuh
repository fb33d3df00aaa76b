// The sm80 GEMM: matrix products with an epilogue on GPUs without WGMMA.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// out (N, width) = epilogue of x (N, in) w, all bf16, any sizes and alignment. Of e4m3 operands two codes
// count as one element of 16 bits: `in` is half of the depth, and rows are whole vectors of 16 bytes.
struct Sm80Product {
    floatX *out; // or NULL where the epilogue knows
    const floatX *x, *w;
    int N, in, width;
};
// w (in, width). relu(sum)^2, rounded once; NaN stays.
void sm80_gemm_relu2(Stream s, const Sm80Product &p);
// w (in, width). bf16(sum) * 2 sqrt(y).  y (N, width): the result of the forward product
void sm80_gemm_drelu2(Stream s, const Sm80Product &p, const floatX *y);
