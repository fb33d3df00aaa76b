// Scales and codes of FP8 products, which are in mlp_fp8.cu.
#include "llmc/cuda/gemm/fp8_codes.cuh"
#include "llmc/cuda/head/fp8_transpose.cuh"

enum { THREADS = 256 };

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

__global__ void scale_quotient_kernel(float *scale, float *amax)
{
    *scale = __fdiv_rn(at_least(*amax, 1e-12f), E4M3_LARGEST);
    *amax = 0;
}

__global__ void scales_follow_kernel(float *scale, float *amax, float factor, float least, int n)
{
    int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (i >= n)
        return;
    scale[i] = at_least(at_least(amax[i], 1e-12f) * factor, least);
    amax[i] = 0;
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

void scale_quotient(Stream s, float *scale, float *amax)
{
    OP_SCOPE(scale_quotient);
    scale_quotient_kernel<<<1, 1, 0, s>>>(scale, amax);
    CHECK_LAUNCH();
}

void scales_follow(Stream s, float *scale, float *amax, float factor, float least, int n)
{
    OP_SCOPE(scales_follow, n);
    if (n <= 0)
        return;
    scales_follow_kernel<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, s>>>(scale, amax, factor, least, n);
    CHECK_LAUNCH();
}

// ---- quantisation ----------------------------------------------------------------------------------------

namespace
{

// Sixteen columns of x, as fp8_transpose.cuh wants its source.
struct Scaled {
    static constexpr bool HAS_AMAX = false;
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
        Reciprocal inverse = reciprocal(unit);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            f[k] = divide ? quotient(f[k], inverse) : f[k] * factor;
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

// The same with the largest magnitude of x.
struct ScaledWithAmax : Scaled {
    static constexpr bool HAS_AMAX = true;
    float *amax; // (1) device
    __device__ __forceinline__ uint32_t largest(const Raw &raw) const
    {
        return max(amax_of(raw.a), amax_of(raw.b));
    }
};

} // namespace

// Sixteen elements a thread; x as one row.
template <class Source>
__global__ __launch_bounds__(THREADS) void quantize_kernel(uint4 *codes, const Source source, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const uint4 *x = reinterpret_cast<const uint4 *>(source.x);
    uint32_t most = 0;
    if (v < vectors) {
        typename Source::Raw raw = {x[2 * v], x[2 * v + 1]};
        codes[v] = source.codes(raw, 0, 0);
        if constexpr (Source::HAS_AMAX)
            most = source.largest(raw);
    }
    if constexpr (Source::HAS_AMAX)
        amax_bits(source.amax, most);
}

template <class Source>
static void quantize(Stream s, uint8_t *codes, uint8_t *transposed, const Source &source, int rows, int cols)
{
    int64_t vectors = (int64_t)rows * cols / 16;
    assert(cols % 16 == 0);
    if (rows <= 0)
        return;
    if (transposed) {
        TransposeOut t = {codes, transposed, rows, rows, rows, cols, false};
        transpose_tiles(s, &t, source);
        return;
    }
    quantize_kernel<Source>
        <<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>((uint4 *)codes, source, vectors);
    CHECK_LAUNCH();
}

void quantize_e4m3(Stream s, uint8_t *codes, const floatX *x, const float *scale, int rows, int cols,
                   QuantizeRule rule, bool transpose)
{
    OP_SCOPE(quantize_e4m3, rows, cols);
    Scaled source = {x, scale, cols, rule};
    quantize(s, transpose ? NULL : codes, transpose ? codes : NULL, source, rows, cols);
}

void quantize_codes(Stream s, const Codes *to, const floatX *x, int rows, int cols)
{
    OP_SCOPE(quantize_codes, rows, cols);
    ScaledWithAmax source = {{x, to->scale, cols, QUANTIZE_QUOTIENT}, to->amax};
    if (to->amax)
        quantize(s, to->codes, to->transposed, source, rows, cols);
    else
        quantize<Scaled>(s, to->codes, to->transposed, source, rows, cols);
}
