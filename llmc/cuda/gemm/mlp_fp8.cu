// Products of FP8 codes where sm90_fp8_gemm.cu and sm90_fp8_codes.cu do not run; scales and codes:
// fp8_codes.cu.
//
// They run on the FP8 units where the GPU has them and takes the extents, else as products of the codes'
// values, which bf16 holds exactly: slabs of rows, one after the other. relu^2, its gradient and their codes
// are the epilogue of the sm80 GEMM (sm80_codes.cu) on GPUs whose library multiplies by mma.sync as well. On
// the others cuBLASLt multiplies slabs of rows, and a kernel makes codes of them. Plain products, and
// gradients of weights, are cuBLASLt's everywhere, with the scales' product as alpha.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/codes_epilogue.cuh"
#include "llmc/cuda/gemm/gemm.cuh"
#include "llmc/cuda/gemm/sm80_codes.cuh"
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"

enum { THREADS = 256, SLAB_ROWS = 4096, LEAST_SLAB_ROWS = 128 };

// ---- scratch ----------------------------------------------------------------------------------------------

enum { ALPHA_FLOATS = 64 }; // one, and the alignment of what follows
typedef struct {
    float *alpha;                 // (1) factor of a product's sums
    floatX *products;             // (rows, out)
    floatX *x, *w;                // values of the codes: (rows, in), (out, in)
    int64_t elements, w_elements; // of products and of x; of w
    bool decoded;                 // w has the values of this product
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
    slab.products = (floatX *)(slab.alpha + ALPHA_FLOATS);
    slab.x = slab.products + slab.elements;
    slab.w = slab.x + slab.elements;
    return slab;
}

static size_t slab_bytes(const Slab *slab)
{
    return ALPHA_FLOATS * sizeof(float) + (size_t)(2 * slab->elements + slab->w_elements) * sizeof(floatX);
}

static Slab slab_of(Stream s)
{
    Slab slab = lay_out(NULL);
    return lay_out(scratch_of(s, SCRATCH_FP8_SLAB, slab_bytes(&slab)));
}

// ---- plans ------------------------------------------------------------------------------------------------

// Of mlp_fp8_reserve: cuBLASLt has no algorithm for an FP8 product; for one of weight gradients.
static bool refused, refused_grads;

// Whether the FP8 units take a product of these extents.
static bool takes_units(int m, int n, int k)
{
    return device_has_fp8() && !refused && m % FP8_ALIGN == 0 && n % FP8_ALIGN == 0 && k % FP8_ALIGN == 0;
}

static GemmShape product_shape(int rows, int in, int out, bool units, bool residual)
{
    GemmShape g = gemm_shape(rows, out, in, false, true, CUDA_R_16BF, residual);
    g.device_alpha = true;
    g.fast_fp8 = units;
    if (units)
        g.type_a = g.type_b = CUDA_R_8F_E4M3;
    return g;
}

// Sums are promoted to fp32 on the way: they are as long as there are tokens.
static GemmShape units_weight_grad(int m, int n, int N, bool fresh)
{
    GemmShape shape = gemm_shape(m, n, N, false, true, CUDA_R_32F, !fresh);
    shape.type_a = shape.type_b = CUDA_R_8F_E4M3;
    return shape;
}

// Whether relu^2 and codes are an epilogue of the sm80 GEMM; units: for products that the FP8 units take.
static bool own_codes(bool units) { return units ? device_has_fp8_mma() : device_library_uses_mma(); }

// Times one product on the FP8 units, or that of values, without which there is none.
static void tune_product(int rows, int in, int out, bool units, bool residual)
{
    GemmShape g = product_shape(rows, in, out, units, residual);
    if (!units)
        gemm_tune(&g);
    else
        refused |= !gemm_try(&g);
}

// On the FP8 units, of N tokens. Where N is no multiple of 16 slabs of values are multiplied, untimed.
static void try_weight_grads(const OpSizes *z, int N)
{
    int d = z->dim, wide = 2 * z->key_dim + d;
    for (int fresh = 0; fresh < 2 && z->fp8_weight_grads && N % FP8_ALIGN == 0; fresh++) {
        GemmShape mlp = units_weight_grad(d, z->mlp_dim, N, fresh),
                  qkv = units_weight_grad(wide, d, N, fresh);
        refused_grads |= (z->fp8_mlp && !gemm_try(&mlp)) || (z->fp8_qkv && !gemm_try(&qkv));
    }
}

static void tune_products(const OpSizes *z, int N, bool units)
{
    int d = z->dim, F = z->mlp_dim, key = z->key_dim, most = min(N, SLAB_ROWS);
    int rows = units ? N / FP8_ALIGN * FP8_ALIGN : most, slab = units ? most / FP8_ALIGN * FP8_ALIGN : most;
    for (int residual = 0; residual < 2 && z->fp8_mlp; residual++)
        tune_product(rows, F, d, units, residual);
    if (z->fp8_mlp && !own_codes(units))
        tune_product(slab, d, F, units, false);
    if (units)
        try_weight_grads(z, N);
    if (!z->fp8_qkv)
        return;
    tune_product(rows, d, key, units, false);
    tune_product(rows, d, d, units, false);
    tune_product(rows, 2 * key + d, d, units, false);
}

static void tune_all_products(const OpSizes *z, bool units)
{
    tune_products(z, z->tokens, units);
    for (int i = 0; i < SMALLER_SIZES && z->smaller[i]; i++)
        tune_products(z, z->smaller[i], units);
}

void mlp_fp8_reserve(const OpSizes *z)
{
    sm90_fp8_gemm_reserve(); // for the self-check, too
    sm90_fp8_codes_reserve();
    refused = refused_grads = false;
    if (!z->fp8_mlp && !z->fp8_qkv)
        return;
    Slab slab = lay_out(NULL);
    scratch_plan(SCRATCH_FP8_SLAB, slab_bytes(&slab));
    if (z->tokens <= 0 || device_has_wgmma())
        return;
    tune_all_products(z, takes_units(z->key_dim, z->dim, z->mlp_dim));
    if (refused)
        tune_all_products(z, false);
}

// By what the products in FP8 are multiplied.
static const char *multiplier(const OpSizes *z)
{
    if (device_has_wgmma())
        return ", own product";
    if (!device_has_fp8())
        return " emulated in bf16 (no FP8 units)";
    if (z->key_dim % FP8_ALIGN || z->dim % FP8_ALIGN || z->mlp_dim % FP8_ALIGN)
        return " emulated in bf16 (widths that are no multiples of 16)";
    if (!device_has_fp8_mma())
        return refused ? " emulated in bf16 (cuBLASLt has no algorithm for its products in FP8)"
                       : " on the FP8 units by cuBLASLt";
    return refused ? " on the FP8 units by mma.sync, plain products emulated in bf16 (cuBLASLt has no "
                     "algorithm for them in FP8)"
                   : " on the FP8 units by mma.sync and cuBLASLt";
}

const char *mlp_description(void)
{
    static char text[256];
    const OpSizes *z = &device_state.sizes;
    if (!z->fp8_mlp && !z->fp8_qkv)
        return "MLP in bf16";
    const char *what = !z->fp8_qkv ? "MLP" : z->fp8_mlp ? "MLP and QKV" : "QKV";
    snprintf(text, sizeof text, "FP8 %s%s%s", what, multiplier(z),
             refused_grads && !refused
                 ? ", gradients of weights emulated in bf16 (cuBLASLt has no algorithm for them in FP8)"
                 : "");
    return text;
}

// ---- products ---------------------------------------------------------------------------------------------

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

__global__ void alpha_kernel(float *out, const float *scale_x, const float *scale_w, const float *alpha)
{
    *out = product_scale(scale_x, scale_w, alpha);
}

// Scratch of the stream, with the factor of a product's sums in it.
static Slab slab_with_alpha(Stream s, const float *scale_x, const float *scale_w, const float *alpha)
{
    Slab slab = slab_of(s);
    alpha_kernel<<<1, 1, 0, s>>>(slab.alpha, scale_x, scale_w, alpha);
    CHECK_LAUNCH();
    return slab;
}

static int rows_of_slab(const Slab *slab, const Fp8Product *p)
{
    int64_t most = min_i64(slab->elements / max_i64(p->in, p->out), SLAB_ROWS) / FP8_ALIGN * FP8_ALIGN;
    if (p->in % 8 || p->out % 8 || most < 1 || slab->w_elements < (int64_t)p->in * p->out)
        fatal(EXIT_BAD_INPUT, "an FP8 product of %d x %d is beyond what backend_reserve was told", p->in,
              p->out);
    return (int)most;
}

// How many of the `left` rows cuBLASLt multiplies at once; at most `most` where the slab is needed. The last
// ones may be too few for the FP8 units.
static int rows_at_once(const Fp8Product *p, int left, int most, bool slab)
{
    int whole = left / FP8_ALIGN * FP8_ALIGN;
    bool units = whole && takes_units(whole, p->in, p->out);
    return units && !slab ? whole : min(most, units ? whole : left);
}

// Values of the codes of rows `row` on, and of the weight.
static void decode_operands(Stream s, Slab *slab, const Fp8Product *p, int row, int rows)
{
    if (!slab->decoded)
        decode(s, slab->w, p->w8, (int64_t)p->out * p->in);
    slab->decoded = true;
    decode(s, slab->x, p->x8 + (int64_t)row * p->in, (int64_t)rows * p->in);
}

// out (rows, p->out) = rows `row` on of the product (+ residual), by cuBLASLt.
static void library_product(Stream s, Slab *slab, floatX *out, const Fp8Product *p, const floatX *residual,
                            int row, int rows)
{
    bool units = takes_units(rows, p->in, p->out);
    GemmShape g = product_shape(rows, p->in, p->out, units, residual != NULL);
    if (!units)
        decode_operands(s, slab, p, row, rows);
    gemm_scaled(s, g, out, units ? (const void *)(p->x8 + (int64_t)row * p->in) : slab->x,
                units ? (const void *)p->w8 : slab->w, residual, slab->alpha);
}

template <CodesKind KIND>
__global__ __launch_bounds__(THREADS) void codes_kernel(const CodesEpilogue e, const floatX *products,
                                                        int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    CodesFactors f = codes_factors<KIND>(e);
    uint32_t most = 0;
    if (v < vectors)
        most = store_codes<KIND>(e, f, load_vec(products, v), codes_of_y<KIND>(e, v), v);
    if (e.amax)
        amax_bits(e.amax, most);
}

static void codes_of_products(Stream s, const CodesEpilogue *e, const floatX *products, int64_t vectors)
{
    auto kernel = e->kind == RELU2_KEPT ? codes_kernel<RELU2_KEPT>
                  : e->kind == RELU2    ? codes_kernel<RELU2>
                                        : codes_kernel<GRADIENT>;
    kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>(*e, products, vectors);
    CHECK_LAUNCH();
}

static void product_to_codes(Stream s, const Fp8Product *p, const CodesEpilogue *e)
{
    if (sm80_gemm_codes_fp8(s, p, e))
        return;
    Slab slab = slab_with_alpha(s, p->scale_x, p->scale_w, p->alpha);
    int most = rows_of_slab(&slab, p), rows;
    for (int row = 0; row < p->N; row += rows) {
        CodesEpilogue from_row = codes_from(e, (int64_t)row * p->out);
        if (own_codes(takes_units(FP8_ALIGN, p->in, p->out))) {
            rows = min(most, p->N - row);
            decode_operands(s, &slab, p, row, rows);
            sm80_gemm_codes_bf16(s, p, &from_row, slab.x, slab.w, rows);
        } else {
            rows = rows_at_once(p, p->N - row, most, true);
            library_product(s, &slab, slab.products, p, NULL, row, rows);
            codes_of_products(s, &from_row, slab.products, (int64_t)rows * p->out / 8);
        }
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

// Products of the codes' values, slab by slab.
static void weight_grad_in_slabs(Stream s, const Slab *slab, const Fp8WeightGrad *g, int N)
{
    int m = g->m, n = g->n;
    int64_t room = 2 * slab->elements + slab->w_elements;
    int most = (int)min_i64(room / (m + n), round_up(N, FP8_ALIGN)) / FP8_ALIGN * FP8_ALIGN;
    if (most < 1 || n % 8 || m % 8)
        fatal(EXIT_BAD_INPUT, "weight gradients in FP8 of %d x %d are beyond what backend_reserve was told",
              m, n);
    floatX *a = slab->products, *b = a + (int64_t)m * most;
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
    Slab slab = slab_with_alpha(s, g->scale_a, g->scale_b, NULL);
    if (takes_units(g->m, g->n, N) && !refused_grads) {
        GemmShape shape = units_weight_grad(g->m, g->n, N, g->fresh);
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

// ---- the ops ----------------------------------------------------------------------------------------------

void matmul_fp8_relu2(const ProductContext *c, floatX *y, uint8_t *y8, float *amax, const Fp8Product *p,
                      const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2, p);
    CodesEpilogue e = {.kind = RELU2_KEPT, .y = y, .codes = y8, .scale = scale_y, .amax = amax};
    if (p->N > 0 && !sm90_fp8_relu2(c, y, y8, amax, p, scale_y))
        product_to_codes(c->stream, p, &e);
}

void matmul_fp8(const ProductContext *c, floatX *out, const Fp8Product *p, const floatX *residual)
{
    OP_SCOPE(matmul_fp8, residual, p);
    if (p->N <= 0 || sm90_fp8_gemm(c, out, p, residual))
        return;
    Slab slab = slab_with_alpha(c->stream, p->scale_x, p->scale_w, p->alpha);
    int most = rows_of_slab(&slab, p), rows;
    for (int row = 0; row < p->N; row += rows) {
        int64_t at = (int64_t)row * p->out;
        rows = rows_at_once(p, p->N - row, most, false);
        library_product(c->stream, &slab, out + at, p, residual ? residual + at : NULL, row, rows);
    }
}

// y8 NULL: relu^2; else the gradient before it.
static void product_both_ways(const ProductContext *c, const Codes *to, const Fp8Product *p,
                              const uint8_t *y8, const float *scale_y)
{
    CodesEpilogue e = {.kind = y8 ? GRADIENT : RELU2,
                       .codes = to->codes,
                       .scale = to->scale,
                       .amax = to->amax,
                       .y8 = y8,
                       .scale_y = scale_y};
    if (p->N <= 0 || sm90_fp8_codes(c, to, p, y8, scale_y))
        return;
    if (p->out % FP8_ALIGN)
        fatal(EXIT_BAD_INPUT, "codes of %d columns: they must be a multiple of %d", p->out, FP8_ALIGN);
    product_to_codes(c->stream, p, &e);
    if (to->transposed)
        fp8_transpose(c->stream, to->transposed, p->N, to->codes, p->N, p->out);
}

void matmul_fp8_relu2_codes(const ProductContext *c, const Codes *y, const Fp8Product *p)
{
    OP_SCOPE(matmul_fp8_relu2_codes, p);
    product_both_ways(c, y, p, NULL, NULL);
}

void matmul_fp8_relu2_backward(const ProductContext *c, const Codes *dpre, const Fp8Product *p,
                               const uint8_t *y8, const float *scale_y)
{
    OP_SCOPE(matmul_fp8_relu2_backward, p);
    product_both_ways(c, dpre, p, y8, scale_y);
}
