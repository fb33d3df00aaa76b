// Rotary tables; QK norm, rotation and value mix in one pass over q, k and v. Backward: qkv_backward.cu.
#include "llmc/cuda/gemm/sm80_qkv.cuh"
#include "llmc/cuda/gemm/sm90_qkv.cuh"
#include "llmc/cuda/rows/qkv.cuh"

enum { THREADS = 256 };

__global__ void rope_tables_kernel(floatX *cos_out, floatX *sin_out, const float *frequency,
                                   const int32_t *position, int rows, int count)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / count;
    if (row >= rows)
        return;
    float angle = (float)(position ? position[row] : row) * frequency[i % count], c, s;
    sincosf(angle, &s, &c); // the accurate ones: angles reach a quarter of a million radians
    cos_out[i] = __float2bfloat16(c);
    sin_out[i] = __float2bfloat16(s);
}

enum { MAX_FREQUENCIES_ON_DEVICE = 256 };
struct Frequencies {
    float f[MAX_FREQUENCIES_ON_DEVICE];
};
__global__ void store_frequencies_kernel(float *out, Frequencies in, int count)
{
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        out[i] = in.f[i];
}

void rope_tables(Stream s, floatX *cos, floatX *sin, const float *frequency, const int32_t *position,
                 int rows, int e)
{
    OP_SCOPE(rope_tables, rows, e);
    int count = e / 4;
    if (rows <= 0 || count <= 0)
        return;
    Frequencies by_value; // travels as a kernel argument: no host memory has to outlive the call
    assert(count <= MAX_FREQUENCIES_ON_DEVICE);
    for (int i = 0; i < count; i++)
        by_value.f[i] = frequency[i];
    float *scratch = scratch_floats(s, SCRATCH_ROPE, (size_t)count);
    store_frequencies_kernel<<<1, 256, 0, s>>>(scratch, by_value, count);
    int64_t blocks = ceil_div((int64_t)rows * count, THREADS);
    rope_tables_kernel<<<(unsigned)blocks, THREADS, 0, s>>>(cos, sin, scratch, position, rows, count);
    CHECK_LAUNCH();
}

// ---- forward ----------------------------------------------------------------------------------------------

__global__ __launch_bounds__(THREADS) void qkv_forward_kernel(QkvForward a, int N, int H, int e)
{
    unsigned half = e / 16, per_row = H * half, all = N * per_row,
             id = blockIdx.x * THREADS + threadIdx.x; // 64-bit divisions are slow
    // Groups beyond the end leave; the shuffles of the rest of their warp stay within groups.
    unsigned mask = __ballot_sync(0xffffffffu, id < all);
    if (id >= all)
        return;
    int64_t n = id / per_row;
    int h = id % per_row / half, j = id % half;
    int64_t at = (n * H + h) * e;
    Pair q = load_pair(a.q + at, j, half), k = load_pair(a.k + at, j, half),
         v = load_pair(a.v_raw + at, j, half), embed = v;
    if (a.value_embed)
        embed = load_pair(a.value_embed + ((int64_t)a.tokens[n] * H + h) * e, j, half);
    float c[8], s[8];
    load_rotation(c, s, a.cos, a.sin, n, j, e);
    norm_and_rotate(a.q + at, q, a.rstd_q + n * H + h, j, e, c, s, mask);
    norm_and_rotate(a.k + at, k, a.rstd_k + n * H + h, j, e, c, s, mask);
    store_vec(a.v + at, j, mix_value(v.lo, embed.lo, a.lambda, a.value_embed));
    store_vec(a.v + at, j + half, mix_value(v.hi, embed.hi, a.lambda, a.value_embed));
}

// Any head width: one warp a head.
__global__ __launch_bounds__(THREADS) void qkv_forward_any_kernel(QkvForward a, int N, int H, int e)
{
    int64_t unit = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP, half = e / 2, turning = e / 4;
    if (unit >= (int64_t)N * H)
        return;
    int64_t n = unit / H, at = unit * e;
    floatX *streams[2] = {a.q + at, a.k + at};
    float *rstds[2] = {a.rstd_q + unit, a.rstd_k + unit};
    for (int which = 0; which < 2; which++) {
        floatX *x = streams[which];
        float sum = 0;
        for (int i = lane; i < e; i += WARP)
            sum += to_float(x[i]) * to_float(x[i]);
        float r = 1.0f / sqrtf(warp_sum(sum) / (float)e + RMS_EPS);
        if (lane == 0)
            *rstds[which] = r;
        for (int i = lane; i < half; i += WARP) {
            float c = i < turning ? to_float(a.cos[n * turning + i]) : 1,
                  s = i < turning ? to_float(a.sin[n * turning + i]) : 0;
            float x1 = to_float(x[i]) * r, x2 = to_float(x[i + half]) * r;
            x[i] = __float2bfloat16(x1 * c + x2 * s);
            x[i + half] = __float2bfloat16(x2 * c - x1 * s);
        }
    }
    for (int i = lane; i < e; i += WARP) {
        float v = a.lambda[0] * to_float(a.v_raw[at + i]);
        if (a.value_embed)
            v += a.lambda[1] *
                 to_float(a.value_embed[(int64_t)a.tokens[n] * H * e + at % ((int64_t)H * e) + i]);
        a.v[at + i] = __float2bfloat16(v);
    }
}

void qkv_forward(Stream s, const QkvForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_forward, a->value_embed, N, H * e);
    if (N <= 0)
        return;
    if (qkv_fast_path(N, H, e))
        qkv_forward_kernel<<<(unsigned)ceil_div((int64_t)N * H * (e / 16), THREADS), THREADS, 0, s>>>(*a, N,
                                                                                                      H, e);
    else
        qkv_forward_any_kernel<<<(unsigned)ceil_div((int64_t)N * H * WARP, THREADS), THREADS, 0, s>>>(*a, N,
                                                                                                      H, e);
    CHECK_LAUNCH();
}

// v alone, where the product has done everything else. One warp a token.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void mix_value_kernel(floatX *v, const floatX *v_raw,
                                                                const floatX *value_embed,
                                                                const int32_t *tokens, const float *lambda,
                                                                int N, int d)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (row >= N)
        return;
    uint4 u[VPL], t[VPL];
    load_row(u, v_raw + (int64_t)row * d, vectors, lane);
    load_row(t, value_embed + (int64_t)tokens[row] * d, vectors, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++)
        u[i] = mix_value(u[i], t[i], lambda, true);
    store_row(v + (int64_t)row * d, u, vectors, lane);
}

void qkv_product_forward(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    OP_SCOPE(qkv_product_forward, a->value_embed, N, H * e);
    int d = H * e;
    if (N <= 0)
        return;
    QkvForward rest = qkv_planes(a, N, d);
    bool own = sm90_qkv(s, a, N, H, e);
    if (!own && !sm80_qkv(s, a, N, H, e)) {
        ProductContext c = {s, NULL};
        Product p = {a->qkv, a->x, a->w, NULL, NULL, N, d, d, 3};
        matmul_forward(&c, &p);
        qkv_forward(s, &rest, N, H, e);
    } else if (own && a->value_embed) {
        unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
        DISPATCH_WIDTH(d,
                       (mix_value_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(a->v, rest.v_raw, a->value_embed,
                                                                             a->tokens, a->lambda, N, d)));
    }
}
