// Interface of the sm90 GEMM. All matrices are bf16, row-major; sums are fp32.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// A (M, K) and B (K, N), as stored: NN: A (M, K), B (K, N). NT: A (M, K), B (N, K). TN: A (K, M), B (K, N).
enum GemmLayout { LAYOUT_NN, LAYOUT_NT, LAYOUT_TN };
enum GemmEpilogue {
    EPILOGUE_STORE,    // x w
    EPILOGUE_RESIDUAL, // x w + source
    EPILOGUE_RELU2,    // relu(x w)^2
    EPILOGUE_DRELU2    // (x w) * 2 sqrt(source)
};

// Call after device_open and before the other functions.
void sm90_gemm_reserve(void);
// True when this GEMM is faster than cuBLASLt for a plain product of this shape: enough tiles and enough k
// steps.
bool sm90_gemm_pays(int N, int depth, int cols, int planes);
// out = epilogue(alpha x w, source)
struct Sm90Product {
    GemmLayout layout;
    GemmEpilogue epilogue;
    floatX *out;                // (planes, N, cols / planes)
    const floatX *x, *w;        // (N, depth), (depth, cols) or (cols, depth)
    const floatX *source;       // (N, cols), may be out itself; or NULL
    const float *alpha;         // (1) device, with NT only; or NULL: 1
    int N, depth, cols, planes; // planes above 1: of whole tiles, with STORE only
};
// Returns false and launches nothing when the path, the build, the shape or the alignment does not allow it.
bool sm90_gemm(const ProductContext *c, const Sm90Product *p);
