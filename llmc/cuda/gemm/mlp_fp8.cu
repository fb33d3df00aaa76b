// Products of FP8 codes where sm90_fp8_gemm.cu and sm90_fp8_codes.cu do not run; scales and codes:
// fp8_codes.cu.
//
// There cuBLASLt multiplies a slab of rows into fp32 scratch and an elementwise kernel makes the results from
// it: on the FP8 units where the GPU and cuBLASLt have them, else, and for extents that they do not take,
// from the values of the codes, which bf16 holds exactly. Gradients of weights are one product on the FP8
// units, with the scales' product as alpha; else products of such values, slabs of tokens one after the
// other.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/fp8_codes.cuh"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"

enum { THREADS = 256, SLAB_ROWS = 4096, LEAST_SLAB_ROWS = 128 };

// ---- products in slabs -----------------------------------------------------------------------------------

enum { ALPHA_FLOATS = 64 }; // one, and the alignment of what follows
typedef struct {
    float *alpha;                 // (1) of weight gradients
    float *sums;                  // (rows, out)
    floatX *x, *w;                // values of the codes: (rows, in), (out, in)
    int64_t elements, w_elements; // of sums and of x; of w
} Slab;

// Of what backend_reserve was told; base NULL: sizes only.
static Slab lay_out(void *base)
{
    const OpSizes *z = &device_state.sizes;
    // On Hopper only what the kernels for it refuse: none of a record's products.
    int64_t rows = device_has_wgmma() ? LEAST_SLAB_ROWS : SLAB_ROWS;
    int64_t most = max_i64(z->mlp_dim, 3 * (int64_t)z->dim); // q, k and v: at most three times the width
    Slab slab = {.elements = rows * most, .w_elements = z->dim * most};
    slab.alpha = (float *)base;
    slab.sums = slab.alpha + ALPHA_FLOATS;
    slab.x = (floatX *)(slab.sums + slab.elements);
    slab.w = slab.x + slab.elements;
    return slab;
}

static size_t slab_bytes(const Slab *slab)
{
    return (ALPHA_FLOATS + (size_t)slab->elements) * sizeof(float) +
           (size_t)(slab->elements + slab->w_elements) * sizeof(floatX);
}

static Slab slab_of(Stream s)
{
    Slab slab = lay_out(NULL);
    return lay_out(scratch_of(s, SCRATCH_FP8_SLAB, slab_bytes(&slab)));
}

static bool refused; // cuBLASLt has no algorithm for an FP8 product of mlp_fp8_reserve

// Whether the FP8 units take a product of these extents.
static bool takes_units(int m, int n, int k)
{
    return device_has_fp8() && !refused && m % FP8_ALIGN == 0 && n % FP8_ALIGN == 0 && k % FP8_ALIGN == 0;
}

static GemmShape units_shape(int rows, int in, int out)
{
    GemmShape g = gemm_shape(rows, out, in, false, true, CUDA_R_32F, false);
    g.type_a = g.type_b = CUDA_R_8F_E4M3;
    g.fast_fp8 = true;
    return g;
}

// Sums are promoted to fp32 on the way: they are as long as there are tokens.
static GemmShape units_weight_grad(const Fp8WeightGrad *g, int N)
{
    GemmShape shape = gemm_shape(g->m, g->n, N, false, true, CUDA_R_32F, !g->fresh);
    shape.type_a = shape.type_b = CUDA_R_8F_E4M3;
    return shape;
}

void mlp_fp8_reserve(const OpSizes *z)
{
    sm90_fp8_gemm_reserve(); // for the self-check, too
    sm90_fp8_codes_reserve();
    refused = false;
    if (!z->fp8_mlp && !z->fp8_qkv)
        return;
    Slab slab = lay_out(NULL);
    scratch_plan(SCRATCH_FP8_SLAB, slab_bytes(&slab));
    if (z->tokens <= 0 || !z->fp8_mlp)
        return;
    if (device_has_wgmma())
        return;
    int most = (int)min_i64(z->tokens, SLAB_ROWS), whole = most / FP8_ALIGN * FP8_ALIGN, d = z->dim,
        F = z->mlp_dim;
    GemmShape units[] = {units_shape(whole, d, F), units_shape(whole, F, d)},
              values[] = {gemm_shape(most, F, d, false, true, CUDA_R_32F, false),
                          gemm_shape(most, d, F, false, true, CUDA_R_32F, false)};
    bool takes = takes_units(whole, d, F);
    for (int i = 0; i < 2 && takes; i++)
        refused |= !gemm_try(&units[i]);
    for (int i = 0; i < 2 && (!takes || refused); i++)
        gemm_tune(&values[i]);
}

const char *mlp_description(void)
{
    static char text[128];
    const OpSizes *z = &device_state.sizes;
    if (!z->fp8_mlp && !z->fp8_qkv)
        return "MLP in bf16";
    snprintf(text, sizeof text, "FP8 %s%s",
             !z->fp8_qkv  ? "MLP"
             : z->fp8_mlp ? "MLP and QKV"
                          : "QKV",
             device_has_wgmma()  ? ", own product"
             : !device_has_fp8() ? " emulated in bf16 (no FP8 units)"
             : refused           ? " emulated in bf16 (cuBLASLt has no algorithm for its products in FP8)"
             : takes_units(FP8_ALIGN, z->dim, z->mlp_dim)
                 ? " on the FP8 units by cuBLASLt"
                 : " emulated in bf16 (widths that are no multiples of 16)");
    return text;
}

__global__ __launch_bounds__(THREADS) void decode_kernel(uint4 *values, const uint2 *codes, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors)
        return;
    const uint32_t w[2] = {codes[v].x, codes[v].y};
    float f[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = e4m3_value(w[k / 4] >> 8 * (k % 4) & 0xff);
    values[v] = pack8(f);
}

static void decode(Stream s, floatX *values, const uint8_t *codes, int64_t n)
{
    decode_kernel<<<(unsigned)ceil_div(n / 8, THREADS), THREADS, 0, s>>>((uint4 *)values,
                                                                         (const uint2 *)codes, n / 8);
    CHECK_LAUNCH();
}

// What becomes of a slab of sums (rows, out), eight elements a thread: the product; relu^2 of it, and its
// codes; these alone; the codes of the gradient before relu^2 alone.
typedef enum { SLAB_PRODUCT, SLAB_RELU2, SLAB_RELU2_CODES, SLAB_GRADIENT_CODES } SlabKind;
typedef struct {
    SlabKind kind;
    const float *sums, *scale_x, *scale_w, *alpha; // alpha may be NULL
    floatX *out;                                   // of the first two
    const floatX *residual;                        // of the product, or NULL
    uint8_t *codes;                                // of all but the product
    const float *scale;                            // of the codes
    float *amax;                                   // or NULL
    const uint8_t *y8;                             // of the last, with their scale
    const float *scale_y;
} SlabResult;

static __device__ __forceinline__ void relu2(float (&f)[8], const float (&p)[8])
{
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = p[k] > 0 ? p[k] * p[k] : p[k] <= 0 ? 0 : p[k]; // NaN stays
}

static __device__ __forceinline__ void relu2_gradient(float (&f)[8], const float (&p)[8], uint2 y8,
                                                      float scale_y)
{
    const uint32_t y[2] = {y8.x, y8.y};
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = p[k] * (2 * to_bf16(__fsqrt_rn(e4m3_value(y[k / 4] >> 8 * (k % 4) & 0xff) * scale_y)));
}

// Eight results, as they are stored.
static __device__ __forceinline__ void slab_results(float (&f)[8], const SlabResult &r, int64_t v)
{
    float scale = product_scale(r.scale_x, r.scale_w, r.alpha), p[8], residual[8] = {0};
    float4 a = reinterpret_cast<const float4 *>(r.sums)[2 * v],
           b = reinterpret_cast<const float4 *>(r.sums)[2 * v + 1];
    const float sums[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < 8; k++)
        p[k] = r.kind == SLAB_PRODUCT ? sums[k] * scale : to_bf16(sums[k] * scale);
    if (r.kind == SLAB_GRADIENT_CODES)
        relu2_gradient(f, p, reinterpret_cast<const uint2 *>(r.y8)[v], *r.scale_y);
    else if (r.kind != SLAB_PRODUCT)
        relu2(f, p);
    else {
        if (r.residual)
            unpack8(reinterpret_cast<const uint4 *>(r.residual)[v], residual);
#pragma unroll
        for (int k = 0; k < 8; k++)
            f[k] = p[k] + residual[k];
    }
    uint4 rounded = pack8(f);
    if (r.kind <= SLAB_RELU2)
        reinterpret_cast<uint4 *>(r.out)[v] = rounded;
    unpack8(rounded, f);
}

__global__ __launch_bounds__(THREADS) void slab_kernel(const SlabResult r, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float f[8] = {0}, g[8];
    if (v < vectors)
        slab_results(f, r, v);
    if (r.kind == SLAB_PRODUCT)
        return;
    uint32_t most = 0;
    float scale = *r.scale, inverse = __frcp_rn(scale);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        most = max(most, __float_as_uint(f[k]) & 0x7fffffffu);
        g[k] = r.kind == SLAB_RELU2 ? f[k] * inverse : __fdiv_rn(f[k], scale);
    }
    if (v < vectors)
        reinterpret_cast<uint2 *>(r.codes)[v] = make_uint2(encode4(g[0], g[1], g[2], g[3], __NV_E4M3),
                                                           encode4(g[4], g[5], g[6], g[7], __NV_E4M3));
    if (r.amax)
        amax_bits(r.amax, most);
}

// Sums of rows `row` to row + rows - 1. decoded: whether slab->w holds the values of the weight.
static void slab_sums(Stream s, const Slab *slab, const Fp8Product *p, int row, int rows, bool *decoded)
{
    const uint8_t *x = p->x8 + (int64_t)row * p->in;
    if (takes_units(rows, p->in, p->out)) {
        GemmShape g = units_shape(rows, p->in, p->out);
        gemm(s, &g, slab->sums, x, p->w8, NULL, 1);
        return;
    }
    GemmShape g = gemm_shape(rows, p->out, p->in, false, true, CUDA_R_32F, false);
    if (!*decoded)
        decode(s, slab->w, p->w8, (int64_t)p->out * p->in);
    *decoded = true;
    decode(s, slab->x, x, (int64_t)rows * p->in);
    gemm(s, &g, slab->sums, slab->x, slab->w, NULL, 1);
}

static void product_in_slabs(Stream s, const Fp8Product *p, const SlabResult *whole)
{
    bool decoded = false;
    Slab slab = slab_of(s);
    int64_t most = min_i64(slab.elements / max_i64(p->in, p->out), SLAB_ROWS) / FP8_ALIGN * FP8_ALIGN;
    if (p->in % 8 || p->out % 8 || most < 1 || slab.w_elements < (int64_t)p->in * p->out)
        fatal(EXIT_BAD_INPUT, "an FP8 product of %d x %d is beyond what backend_reserve was told", p->in,
              p->out);
    for (int row = 0; row < p->N;) {
        int left = p->N - row, units = left / FP8_ALIGN * FP8_ALIGN;
        int rows = (int)min_i64(most, units ? units : left);
        int64_t at = (int64_t)row * p->out, vectors = (int64_t)rows * p->out / 8;
        SlabResult r = *whole;
        slab_sums(s, &slab, p, row, rows, &decoded);
        r.sums = slab.sums;
        r.scale_x = p->scale_x;
        r.scale_w = p->scale_w;
        r.alpha = p->alpha;
        r.out = r.out ? r.out + at : NULL;
        r.residual = r.residual ? r.residual + at : NULL;
        r.codes = r.codes ? r.codes + at : NULL;
        r.y8 = r.y8 ? r.y8 + at : NULL;
        slab_kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>(r, vectors);
        CHECK_LAUNCH();
        row += rows;
    }
}

// ---- gradients of weights --------------------------------------------------------------------------------

// values (rows, cols) of columns of a matrix of codes (rows, pitch), eight a thread; zeros from column
// `there` on.
__global__ __launch_bounds__(THREADS) void decode_columns_kernel(uint4 *values, const uint8_t *codes,
                                                                 int64_t pitch, int cols, int there,
                                                                 int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x, row = v / (cols / 8);
    int col = (int)(v % (cols / 8)) * 8;
    if (v >= vectors)
        return;
    float f[8];
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = col + k < there ? e4m3_value(codes[row * pitch + col + k]) : 0;
    values[v] = pack8(f);
}

static void decode_columns(Stream s, floatX *values, const uint8_t *codes, int rows, int64_t pitch, int cols,
                           int there)
{
    int64_t vectors = (int64_t)rows * cols / 8;
    decode_columns_kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>((uint4 *)values, codes,
                                                                                   pitch, cols, there,
                                                                                   vectors);
    CHECK_LAUNCH();
}

__global__ void alpha_kernel(float *alpha, const float *a, const float *b) { *alpha = *a * *b; }

// Products of the codes' values, slab by slab.
static void weight_grad_in_slabs(Stream s, const Slab *slab, const Fp8WeightGrad *g, int N)
{
    int m = g->m, n = g->n;
    int64_t room = (int64_t)(slab_bytes(slab) / sizeof(floatX)) - 2 * ALPHA_FLOATS;
    int most = (int)min_i64(room / (m + n), round_up(N, FP8_ALIGN)) / FP8_ALIGN * FP8_ALIGN;
    if (most < 1 || n % 8 || m % 8)
        fatal(EXIT_BAD_INPUT, "weight gradients in FP8 of %d x %d are beyond what backend_reserve was told",
              m, n);
    floatX *a = (floatX *)slab->sums, *b = a + (int64_t)m * most;
    for (int at = 0; at < N; at += most) {
        int there = (int)min_i64(most, N - at), tokens = (int)round_up(there, FP8_ALIGN);
        GemmShape shape = gemm_shape(m, n, tokens, false, true, CUDA_R_32F, at > 0 || !g->fresh);
        decode_columns(s, a, g->a8 + at, m, N, tokens, there);
        decode_columns(s, b, g->b8 + at, n, N, tokens, there);
        gemm_scaled(s, shape, g->dw, a, b, shape.accumulate ? g->dw : NULL, slab->alpha);
    }
}

static void weight_grad(Stream s, const Fp8WeightGrad *g, int N)
{
    Slab slab = slab_of(s);
    alpha_kernel<<<1, 1, 0, s>>>(slab.alpha, g->scale_a, g->scale_b);
    CHECK_LAUNCH();
    if (takes_units(g->m, g->n, N)) {
        GemmShape shape = units_weight_grad(g, N);
        gemm_scaled(s, shape, g->dw, g->a8, g->b8, g->fresh ? NULL : g->dw, slab.alpha);
    } else
        weight_grad_in_slabs(s, &slab, g, N);
}

void matmul_fp8_weight_grads(const ProductContext *c, const Fp8WeightGrad *g, int count, int N)
{
    OP_SCOPE(matmul_fp8_weight_grads, g, count, N);
    for (int i = 0; i < count && N > 0; i++)
        weight_grad(c->stream, &g[i], N);
}

// ---- the ops ---------------------------------------------------------------------------------------------

void matmul_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                      const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2, p);
    SlabResult r = {.kind = SLAB_RELU2, .out = y, .codes = y8, .scale = scale_y, .amax = amax};
    if (p->N > 0 && !sm90_fp8_relu2(c, y, y8, amax, p, scale_y))
        product_in_slabs(c->stream, p, &r);
}

void matmul_fp8(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual)
{
    OP_SCOPE(matmul_fp8, residual, p);
    SlabResult r = {.kind = SLAB_PRODUCT, .out = out, .residual = residual};
    if (p->N > 0 && !sm90_fp8_gemm(c, out, p, residual))
        product_in_slabs(c->stream, p, &r);
}

// y8 NULL: relu^2; else the gradient before it.
static void product_to_codes(const ProductContext *c, const Codes *to, const Fp8Product *p, const uint8_t *y8,
                             const float *scale_y)
{
    SlabResult r = {.kind = y8 ? SLAB_GRADIENT_CODES : SLAB_RELU2_CODES,
                    .codes = to->codes,
                    .scale = to->scale,
                    .amax = to->amax,
                    .y8 = y8,
                    .scale_y = scale_y};
    if (p->N <= 0 || sm90_fp8_codes(c, to, p, y8, scale_y))
        return;
    if (p->out % FP8_ALIGN)
        fatal(EXIT_BAD_INPUT, "codes of %d columns: they must be a multiple of %d", p->out, FP8_ALIGN);
    product_in_slabs(c->stream, p, &r);
    if (to->transposed)
        fp8_transpose(c->stream, to->transposed, p->N, to->codes, p->N, p->out);
}

void matmul_fp8_relu2_codes(const ProductContext *c, const Codes *y, const Fp8Product *p)
{
    OP_SCOPE(matmul_fp8_relu2_codes, p);
    product_to_codes(c, y, p, NULL, NULL);
}

void matmul_fp8_relu2_backward(const ProductContext *c, const Codes *dpre, const Fp8Product *p,
                               const uint8_t *y8, const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2_backward, p);
    product_to_codes(c, dpre, p, y8, scale_y);
}
