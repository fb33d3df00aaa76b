// Matrix products with relu(x)^2 in the epilogue, forward and backward: sm90_gemm.cu on Hopper, else
// sm80_gemm.cu. A product rounded to bf16 before it is squared would double the error of the square. The
// gradient is rounded before it meets its factor, as matmul_relu2_backward says.
#include "llmc/cuda/gemm/sm80_gemm.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"

void matmul_relu2_forward(const ProductContext *c, floatX *y, const floatX *x, const floatX *w, int N, int in,
                          int out)
{
    OP_SCOPE(matmul_relu2_forward, N, in, out);
    Sm90Product own = {LAYOUT_NN, EPILOGUE_RELU2, y, x, w, NULL, NULL, N, in, out, 1};
    if (N > 0 && !sm90_gemm(c, &own))
        sm80_gemm_relu2(c->stream, {y, x, w, N, in, out});
}

void matmul_relu2_backward(const ProductContext *c, floatX *dpre, const floatX *dy, const floatX *w,
                           const floatX *y, int N, int d, int F)
{
    OP_SCOPE(matmul_relu2_backward, N, d, F);
    Sm90Product own = {LAYOUT_NN, EPILOGUE_DRELU2, dpre, dy, w, y, NULL, N, d, F, 1};
    if (N > 0 && !sm90_gemm(c, &own))
        sm80_gemm_drelu2(c->stream, {dpre, dy, w, N, d, F}, y);
}
