// The MLP in FP8: scales, quantisation, and its products where sm90_fp8_gemm.cu does not run.
//
// There cuBLASLt multiplies a slab of rows into fp32 scratch and an elementwise kernel makes the results from
// it: on the FP8 units where the GPU has them, else, and for rows that they do not take, from the values of
// the codes, which bf16 holds exactly.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"
#include "llmc/cuda/head/fp8_transpose.cuh"

enum { THREADS = 256, SLAB_ROWS = 4096, LEAST_SLAB_ROWS = 128 };

// ---- scales ----------------------------------------------------------------------------------------------

__global__ __launch_bounds__(THREADS) void amax_kernel(float *amax, const uint4 *x, int64_t vectors)
{
    uint32_t most = 0;
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
    for (; v < vectors; v += step)
        most = max(most, amax_of(x[v]));
    amax_bits(amax, most);
}

void amax_accumulate(Stream s, float *amax, const floatX *x, int64_t n)
{
    OP_SCOPE(amax_accumulate, n);
    int64_t vectors = n / 8;
    assert(n % 8 == 0);
    unsigned blocks = (unsigned)min_i64(ceil_div(vectors, 4 * THREADS), 8 * device_state.sms);
    if (n <= 0)
        return;
    amax_kernel<<<blocks, THREADS, 0, s>>>(amax, (const uint4 *)x, vectors);
    CHECK_LAUNCH();
}

// A block sums the squares of 64 columns, two a lane; its warps share the rows and are added in their order.
enum { BOUND_COLS = 2 * WARP, BOUND_WARPS = THREADS / WARP };
__global__ __launch_bounds__(THREADS) void relu2_bound_kernel(float *amax, const floatX *w, int in, int out)
{
    __shared__ float2 sums[BOUND_WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, col = blockIdx.x * BOUND_COLS + 2 * lane;
    float2 sum = {0, 0};
#pragma unroll 8
    for (int i = warp; i < in; i += BOUND_WARPS) {
        uint32_t u = col < out ? *reinterpret_cast<const uint32_t *>(w + (int64_t)i * out + col) : 0;
        float lo = __uint_as_float(u << 16), hi = __uint_as_float(u & 0xffff0000u);
        sum.x += lo * lo;
        sum.y += hi * hi;
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0)
        return;
    for (int i = 1; i < BOUND_WARPS; i++) {
        sum.x += sums[i][lane].x;
        sum.y += sums[i][lane].y;
    }
    amax_bits(amax, max(__float_as_uint(in * sum.x), __float_as_uint(in * sum.y)));
}

void amax_relu2_bound(Stream s, float *amax, const floatX *w, int in, int out)
{
    OP_SCOPE(amax_relu2_bound, in, out);
    relu2_bound_kernel<<<(unsigned)ceil_div(out, BOUND_COLS), THREADS, 0, s>>>(amax, w, in, out);
    CHECK_LAUNCH();
}

static __device__ __forceinline__ float at_least(float amax, float least) // NaN stays
{
    return amax < least ? least : amax;
}

static __device__ __forceinline__ float to_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }
static __device__ __forceinline__ float largest_weight(float amax) { return at_least(amax, to_bf16(1e-12f)); }

__global__ void scale_kernel(float *scale, float *amax, float factor)
{
    *scale = at_least(*amax, 1e-12f) * factor;
    *amax = 0;
}

// next NULL: always exact
__global__ void weight_scale_kernel(float *scale, float *next, float *amax, float factor, const float *exact)
{
    float largest = largest_weight(*amax);
    *scale = next && *exact == 0 ? *next : to_bf16(__fdiv_rn(largest, E4M3_LARGEST));
    if (next)
        *next = largest * factor;
    *amax = 0;
}

void scale_from_amax(Stream s, float *scale, float *amax, float factor)
{
    OP_SCOPE(scale_from_amax);
    scale_kernel<<<1, 1, 0, s>>>(scale, amax, factor);
    CHECK_LAUNCH();
}

void scale_exact(Stream s, float *scale, float *amax)
{
    OP_SCOPE(scale_exact);
    weight_scale_kernel<<<1, 1, 0, s>>>(scale, NULL, amax, 0, NULL);
    CHECK_LAUNCH();
}

void scale_delayed(Stream s, float *scale, float *next, float *amax, float factor, const float *exact)
{
    OP_SCOPE(scale_delayed);
    weight_scale_kernel<<<1, 1, 0, s>>>(scale, next, amax, factor, exact);
    CHECK_LAUNCH();
}

// ---- quantisation ----------------------------------------------------------------------------------------

namespace
{

// Sixteen columns of x, as fp8_transpose.cuh wants its source.
struct Scaled {
    struct Raw {
        uint4 a, b;
    };
    const floatX *x;
    const float *scale; // (1) device
    int cols;
    QuantizeRule rule;
    __device__ __forceinline__ Raw load(int row, int col) const
    {
        const uint4 *at = reinterpret_cast<const uint4 *>(x + (int64_t)row * cols + col);
        return {at[0], at[1]};
    }
    __device__ __forceinline__ void in_units(float (&f)[8]) const
    {
        float unit = *scale, factor = rule == QUANTIZE_AMAX ? __fdiv_rn(E4M3_LARGEST, at_least(unit, 1e-12f))
                                                            : __frcp_rn(unit);
        bool divide = rule == QUANTIZE_QUOTIENT || rule == QUANTIZE_QUOTIENT_BF16;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            f[k] = divide ? __fdiv_rn(f[k], unit) : f[k] * factor;
            f[k] = rule == QUANTIZE_QUOTIENT_BF16 ? to_bf16(f[k]) : f[k];
        }
    }
    __device__ __forceinline__ uint4 codes(const Raw &raw, int, int) const
    {
        float f[8], g[8];
        unpack8(raw.a, f);
        unpack8(raw.b, g);
        in_units(f);
        in_units(g);
        return make_uint4(encode4(f[0], f[1], f[2], f[3], __NV_E4M3),
                          encode4(f[4], f[5], f[6], f[7], __NV_E4M3),
                          encode4(g[0], g[1], g[2], g[3], __NV_E4M3),
                          encode4(g[4], g[5], g[6], g[7], __NV_E4M3));
    }
};

} // namespace

// Sixteen elements a thread; x as one row.
__global__ __launch_bounds__(THREADS) void quantize_kernel(uint4 *codes, const Scaled source, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (v >= vectors)
        return;
    const uint4 *x = reinterpret_cast<const uint4 *>(source.x);
    codes[v] = source.codes({x[2 * v], x[2 * v + 1]}, 0, 0);
}

void quantize_e4m3(Stream s, uint8_t *codes, const floatX *x, const float *scale, int rows, int cols,
                   QuantizeRule rule, bool transpose)
{
    OP_SCOPE(quantize_e4m3, rows, cols);
    Scaled source = {x, scale, cols, rule};
    int64_t vectors = (int64_t)rows * cols / 16;
    assert(cols % 16 == 0 && (!transpose || rows % 16 == 0));
    if (rows <= 0)
        return;
    if (transpose) {
        TransposeOut t = {NULL, codes, rows, rows, rows, cols, false};
        transpose_tiles(s, &t, source);
        return;
    }
    quantize_kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>((uint4 *)codes, source, vectors);
    CHECK_LAUNCH();
}

// ---- products in slabs -----------------------------------------------------------------------------------

typedef struct {
    float *sums;                  // (rows, out)
    floatX *x, *w;                // values of the codes: (rows, in), (out, in)
    int64_t elements, w_elements; // of sums and of x; of w
} Slab;

// Of what backend_reserve was told; base NULL: sizes only.
static Slab lay_out(void *base)
{
    const OpSizes *z = &device_state.sizes;
    // On Hopper only what sm90_fp8_gemm refuses uses slabs, none of the model's products.
    int64_t rows = device_has_wgmma() ? LEAST_SLAB_ROWS : SLAB_ROWS;
    Slab slab = {.elements = rows * max_i64(z->mlp_dim, z->dim), .w_elements = (int64_t)z->dim * z->mlp_dim};
    slab.sums = (float *)base;
    slab.x = (floatX *)(slab.sums + slab.elements);
    slab.w = slab.x + slab.elements;
    return slab;
}

static size_t slab_bytes(const Slab *slab)
{
    return (size_t)slab->elements * (sizeof(float) + sizeof(floatX)) +
           (size_t)slab->w_elements * sizeof(floatX);
}

static GemmShape units_shape(int rows, int in, int out)
{
    GemmShape g = gemm_shape(rows, out, in, false, true, CUDA_R_32F, false);
    g.type_a = g.type_b = CUDA_R_8F_E4M3;
    g.fast_fp8 = true;
    return g;
}

void mlp_fp8_reserve(const OpSizes *z)
{
    sm90_fp8_gemm_reserve(); // for the self-check, too
    if (!z->fp8_mlp)
        return;
    Slab slab = lay_out(NULL);
    scratch_plan(SCRATCH_FP8_SLAB, slab_bytes(&slab));
    if (z->tokens <= 0 || device_has_wgmma())
        return;
    int most = (int)min_i64(z->tokens, SLAB_ROWS), d = z->dim, F = z->mlp_dim;
    GemmShape units[] = {units_shape(most, d, F), units_shape(most, F, d)},
              values[] = {gemm_shape(most, F, d, false, true, CUDA_R_32F, false),
                          gemm_shape(most, d, F, false, true, CUDA_R_32F, false)};
    for (int i = 0; i < 2; i++)
        gemm_tune(device_has_fp8() && most % FP8_ALIGN == 0 ? &units[i] : &values[i]);
}

const char *mlp_description(void)
{
    if (!device_state.sizes.fp8_mlp)
        return "MLP in bf16";
    if (device_has_wgmma())
        return "FP8 MLP, own product";
    return device_has_fp8() ? "FP8 MLP by cuBLASLt" : "FP8 MLP emulated in bf16 (no FP8 units on this path)";
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
        f[k] = __half2float(__half(__nv_cvt_fp8_to_halfraw((uint8_t)(w[k / 4] >> 8 * (k % 4)), __NV_E4M3)));
    values[v] = pack8(f);
}

static void decode(Stream s, floatX *values, const uint8_t *codes, int64_t n)
{
    decode_kernel<<<(unsigned)ceil_div(n / 8, THREADS), THREADS, 0, s>>>((uint4 *)values,
                                                                         (const uint2 *)codes, n / 8);
    CHECK_LAUNCH();
}

// What becomes of a slab of sums (rows, out), eight elements a thread.
typedef struct {
    const float *sums, *scale_x, *scale_w, *scale_y;
    floatX *out;            // y, or the product
    const floatX *residual; // or NULL
    uint8_t *codes;         // of y; NULL: no relu^2
    float *amax;            // or NULL
} SlabResult;

__global__ __launch_bounds__(THREADS) void slab_kernel(const SlabResult r, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float scale = *r.scale_x * *r.scale_w, f[8] = {0};
    if (v < vectors) {
        float4 a = reinterpret_cast<const float4 *>(r.sums)[2 * v],
               b = reinterpret_cast<const float4 *>(r.sums)[2 * v + 1];
        float p[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        if (r.residual)
            unpack8(reinterpret_cast<const uint4 *>(r.residual)[v], f);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            p[k] = r.codes ? to_bf16(p[k] * scale) : p[k] * scale;
            f[k] = !r.codes ? p[k] + f[k] : p[k] > 0 ? p[k] * p[k] : p[k] <= 0 ? 0 : p[k]; // NaN stays
        }
        uint4 rounded = pack8(f);
        reinterpret_cast<uint4 *>(r.out)[v] = rounded;
        unpack8(rounded, f);
    }
    if (!r.codes)
        return;
    uint32_t most = 0;
    float inverse = __frcp_rn(*r.scale_y), g[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        most = max(most, __float_as_uint(f[k]) & 0x7fffffffu);
        g[k] = f[k] * inverse;
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
    if (device_has_fp8() && rows % FP8_ALIGN == 0) {
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
    Slab slab = lay_out(NULL);
    int64_t most = min_i64(slab.elements / max_i64(p->in, p->out), SLAB_ROWS) / FP8_ALIGN * FP8_ALIGN;
    if (p->in % FP8_ALIGN || p->out % FP8_ALIGN || most < 1 || slab.w_elements < (int64_t)p->in * p->out)
        fatal(EXIT_BAD_INPUT, "an FP8 product of %d x %d is beyond what backend_reserve was told", p->in,
              p->out);
    slab = lay_out(scratch_of(s, SCRATCH_FP8_SLAB, slab_bytes(&slab)));
    for (int row = 0; row < p->N;) {
        int left = p->N - row, units = left / FP8_ALIGN * FP8_ALIGN;
        int rows = (int)min_i64(most, units ? units : left);
        int64_t at = (int64_t)row * p->out, vectors = (int64_t)rows * p->out / 8;
        SlabResult r = *whole;
        slab_sums(s, &slab, p, row, rows, &decoded);
        r.sums = slab.sums;
        r.out += at;
        r.residual = r.residual ? r.residual + at : NULL;
        r.codes = r.codes ? r.codes + at : NULL;
        slab_kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>(r, vectors);
        CHECK_LAUNCH();
        row += rows;
    }
}

// ---- the ops ---------------------------------------------------------------------------------------------

void matmul_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                      const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2, p);
    assert(!p->alpha);
    SlabResult r = {.scale_x = p->scale_x,
                    .scale_w = p->scale_w,
                    .scale_y = scale_y,
                    .out = y,
                    .codes = y8,
                    .amax = amax};
    if (p->N > 0 && !sm90_fp8_relu2(c, y, y8, amax, p, scale_y))
        product_in_slabs(c->stream, p, &r);
}

void matmul_fp8(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual)
{
    OP_SCOPE(matmul_fp8, residual, p);
    assert(!p->alpha);
    SlabResult r = {.scale_x = p->scale_x, .scale_w = p->scale_w, .out = out, .residual = residual};
    if (p->N > 0 && !sm90_fp8_gemm(c, out, p, residual))
        product_in_slabs(c->stream, p, &r);
}
