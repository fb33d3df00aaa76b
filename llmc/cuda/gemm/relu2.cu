// Matrix products with relu(x)^2 in the epilogue, forward and backward.
//
// On Hopper sm90_gemm.cu fuses product and epilogue. On other GPUs cuBLASLt multiplies a slab of rows into
// fp32 scratch that fits in L2 and an elementwise kernel rounds the slab once into the result. A product
// rounded to bf16 before it is squared would double the error of the square. The gradient is rounded before
// it meets its factor, as matmul_relu2_backward says.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/fp8_codes.cuh"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"

enum { SLAB_BYTES = 48 << 20, THREADS = 256 };

static int slab_rows(int N, int out)
{
    int64_t rows = (int64_t)(scratch_planned(SCRATCH_RELU2) / sizeof(float) / (size_t)out);
    if (rows < 1)
        fatal(EXIT_BAD_INPUT, "an MLP width of %d is beyond what backend_reserve was told", out);
    return (int)min_i64(N, rows > 128 ? rows / 128 * 128 : rows);
}

void relu2_reserve(const OpSizes *z)
{
    // On Hopper only shapes that sm90_gemm refuses use the slab, none of the model's: a small one suffices.
    int64_t least = 128 * (int64_t)z->mlp_dim * (int64_t)sizeof(float);
    scratch_plan(SCRATCH_RELU2, (size_t)max_i64(device_has_wgmma() ? 0 : SLAB_BYTES, least));
    if (z->tokens <= 0 || device_has_wgmma())
        return;
    int rows = slab_rows(z->tokens, z->mlp_dim);
    GemmShape g = gemm_shape(rows, z->mlp_dim, z->dim, false, false, CUDA_R_32F, false);
    gemm_tune(&g);
}

// Eight elements a thread. y: in the forward the result relu(p)^2; in the backward the factor 2 sqrt(y) of
// the result.
template <bool BACKWARD>
__global__ __launch_bounds__(THREADS) void relu2_kernel(floatX *out, const float *product, const floatX *y,
                                                        int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors)
        return;
    float4 a = reinterpret_cast<const float4 *>(product)[2 * v],
           b = reinterpret_cast<const float4 *>(product)[2 * v + 1];
    float p[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, f[8];
    if (BACKWARD)
        unpack8(reinterpret_cast<const uint4 *>(y)[v], f);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (BACKWARD)
            p[k] = to_bf16(p[k]) * 2 * sqrtf(f[k]);
        else
            p[k] = p[k] > 0 ? p[k] * p[k] : p[k] <= 0 ? 0 : p[k]; // NaN stays
    }
    reinterpret_cast<uint4 *>(out)[v] = pack8(p);
}

template <bool BACKWARD>
static void product_in_slabs(Stream s, floatX *out, const floatX *x, const floatX *w, const floatX *y, int N,
                             int in, int width)
{
    int step = slab_rows(N, width);
    float *slab = scratch_floats(s, SCRATCH_RELU2, (size_t)step * (size_t)width); // (step, width)
    for (int row = 0; row < N; row += step) {
        int rows = (int)min_i64(step, N - row);
        int64_t at = (int64_t)row * width, vectors = (int64_t)rows * width / 8;
        GemmShape g = gemm_shape(rows, width, in, false, false, CUDA_R_32F, false);
        gemm(s, &g, slab, x + (int64_t)row * in, w, NULL, 1);
        relu2_kernel<BACKWARD>
            <<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>(out + at, slab,
                                                                      BACKWARD ? y + at : NULL, vectors);
        CHECK_LAUNCH();
    }
}

void matmul_relu2_forward(const ProductContext *c, floatX *y, const floatX *x, const floatX *w, int N, int in,
                          int out)
{
    OP_SCOPE(matmul_relu2_forward, N, in, out);
    Sm90Product own = {LAYOUT_NN, EPILOGUE_RELU2, y, x, w, NULL, NULL, N, in, out, 1};
    if (N > 0 && !sm90_gemm(c, &own))
        product_in_slabs<false>(c->stream, y, x, w, NULL, N, in, out);
}

void matmul_relu2_backward(const ProductContext *c, floatX *dpre, const floatX *dy, const floatX *w,
                           const floatX *y, int N, int d, int F)
{
    OP_SCOPE(matmul_relu2_backward, N, d, F);
    Sm90Product own = {LAYOUT_NN, EPILOGUE_DRELU2, dpre, dy, w, y, NULL, N, d, F, 1};
    if (N > 0 && !sm90_gemm(c, &own))
        product_in_slabs<true>(c->stream, dpre, dy, w, y, N, d, F);
}
