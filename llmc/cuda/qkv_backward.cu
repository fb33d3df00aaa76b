// Backward of QK norm, rotation and value mix.
//
// With y = R x^, x^ = x rstd: dx^ = R' dy, and dx = rstd (dx^ - x^ mean(dx^ x^)). The sum of dx^ x^ is that of dy y. R' R is not
// quite the identity, because cos and sin are rounded: x^ = R' y / (cos^2 + sin^2).
//
// dq comes in bf16, or as attention's sums: then one kernel takes q from these and another k and v, each near a copy's speed.
#include "llmc/cuda/attention_tensor.cuh"
#include "llmc/cuda/qkv.cuh"

namespace {

enum { BACKWARD_THREADS = 256 };

// ---- q, k and v in vectors -------------------------------------------------------------------------------------------------

// inverse: 1 / (c^2 + s^2)
__device__ __forceinline__ void unrotate_gradient(floatX *out, Pair dy, Pair y, float r, int j, int e, const float (&c)[8],
                                                         const float (&s)[8], const float (&inverse)[8], unsigned mask)
{
    int half = e / 16;
    float g1[8], g2[8], y1[8], y2[8], dot = 0;
    unpack8(dy.lo, g1);
    unpack8(dy.hi, g2);
    unpack8(y.lo, y1);
    unpack8(y.hi, y2);
#pragma unroll
    for (int k = 0; k < 8; k++) dot += g1[k] * y1[k] + g2[k] * y2[k];
    dot = group_sum(dot, half, mask) / (float)e;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float scale = dot * inverse[k];
        float a = g1[k] - y1[k] * scale, b = g2[k] - y2[k] * scale; // R' of this is dx^ - x^ dot
        g1[k] = r * (a * c[k] - b * s[k]);
        g2[k] = r * (b * c[k] + a * s[k]);
    }
    store_vec(out, j, pack8(g1));
    store_vec(out, j + half, pack8(g2));
}

// lambda dv; adds dv v_raw and dv embed to the sums.
__device__ __forceinline__ uint4 value_gradient(uint4 dv, uint4 raw, uint4 embed, bool with_embed, float lambda,
                                                       float (&sums)[2])
{
    float g[8], t[8];
    unpack8(dv, g);
    unpack8(raw, t);
#pragma unroll
    for (int k = 0; k < 8; k++) sums[0] += g[k] * t[k];
    unpack8(embed, t);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (with_embed) sums[1] += g[k] * t[k];
        g[k] *= lambda;
    }
    return pack8(g);
}

template <bool WITH_Q>
__global__ __launch_bounds__(BACKWARD_THREADS) void qkv_backward_kernel(QkvBackward a, int N, int H, int e, float *partials,
                                                               unsigned *counter)
{
    unsigned half = e / 16, per_row = H * half, all = N * per_row;
    int d = H * e;
    float sums[2] = {0, 0}, lambda = a.lambda[0];
    for (unsigned start = blockIdx.x * BACKWARD_THREADS; start < all; start += gridDim.x * BACKWARD_THREADS) {
        unsigned id = start + threadIdx.x;
        unsigned mask = __ballot_sync(0xffffffffu, id < all); // groups are whole: only the last block's tail is off
        if (id >= all) break;
        int64_t n = id / per_row;
        int h = id % per_row / half, j = id % half;
        int64_t at = (n * H + h) * e, out = n * 3 * d + (int64_t)h * e;
        Pair dk = load_pair(a.dk + at, j, half), dq = dk, q = dk;
        if (WITH_Q) dq = load_pair(a.dq + at, j, half), q = load_pair(a.q + at, j, half);
        Pair k = load_pair(a.k + at, j, half), dv = load_pair(a.dv + at, j, half), raw = load_pair(a.v_raw + at, j, half),
             embed = raw;
        if (a.value_embed) embed = load_pair(a.value_embed + ((int64_t)a.tokens[n] * H + h) * e, j, half);
        float c[8], s[8], inverse[8];
        load_rotation(c, s, a.cos, a.sin, n, j, e);
#pragma unroll
        for (int i = 0; i < 8; i++) inverse[i] = __fdividef(1, c[i] * c[i] + s[i] * s[i]);
        if (WITH_Q) unrotate_gradient(a.dqkv + out, dq, q, a.rstd_q[n * H + h], j, e, c, s, inverse, mask);
        unrotate_gradient(a.dqkv + out + d, dk, k, a.rstd_k[n * H + h], j, e, c, s, inverse, mask);
        store_vec(a.dqkv + out + 2 * d, j, value_gradient(dv.lo, raw.lo, embed.lo, a.value_embed, lambda, sums));
        store_vec(a.dqkv + out + 2 * d, j + half, value_gradient(dv.hi, raw.hi, embed.hi, a.value_embed, lambda, sums));
    }
    grid_accumulate<2>(a.dlambda, sums, partials, counter);
}

__device__ __forceinline__ void unrotate_gradient_any(floatX *out, const floatX *dy, const floatX *y, float r,
                                                             const floatX *cos, const floatX *sin, int lane, int e)
{
    int half = e / 2, turning = e / 4;
    float dot = 0;
    for (int i = lane; i < e; i += WARP) dot += to_float(dy[i]) * to_float(y[i]);
    dot = warp_sum(dot) / (float)e;
    for (int i = lane; i < half; i += WARP) {
        float c = i < turning ? to_float(cos[i]) : 1, s = i < turning ? to_float(sin[i]) : 0, scale = dot / (c * c + s * s);
        float a = to_float(dy[i]) - to_float(y[i]) * scale, b = to_float(dy[i + half]) - to_float(y[i + half]) * scale;
        out[i] = __float2bfloat16(r * (a * c - b * s));
        out[i + half] = __float2bfloat16(r * (b * c + a * s));
    }
}

__global__ __launch_bounds__(BACKWARD_THREADS) void qkv_backward_any_kernel(QkvBackward a, int N, int H, int e, float *partials,
                                                                   unsigned *counter)
{
    int lane = threadIdx.x % WARP, turning = e / 4, d = H * e;
    int64_t units = (int64_t)N * H, step = (int64_t)gridDim.x * (BACKWARD_THREADS / WARP);
    float sums[2] = {0, 0};
    for (int64_t unit = (int64_t)blockIdx.x * (BACKWARD_THREADS / WARP) + threadIdx.x / WARP; unit < units; unit += step) {
        int64_t n = unit / H, h = unit % H, at = unit * e, out = n * 3 * d + h * e;
        const floatX *c = a.cos + n * turning, *s = a.sin + n * turning;
        unrotate_gradient_any(a.dqkv + out, a.dq + at, a.q + at, a.rstd_q[unit], c, s, lane, e);
        unrotate_gradient_any(a.dqkv + out + d, a.dk + at, a.k + at, a.rstd_k[unit], c, s, lane, e);
        for (int i = lane; i < e; i += WARP) {
            float g = to_float(a.dv[at + i]);
            sums[0] += g * to_float(a.v_raw[at + i]);
            if (a.value_embed) sums[1] += g * to_float(a.value_embed[(int64_t)a.tokens[n] * d + h * e + i]);
            a.dqkv[out + 2 * d + i] = __float2bfloat16(a.lambda[0] * g);
        }
    }
    grid_accumulate<2>(a.dlambda, sums, partials, counter);
}

// ---- q from attention's sums -----------------------------------------------------------------------------------------------

using namespace dq_sums;
enum { WIDTH = 128 }; // of a head

// Of a row: the lane's pairs of columns of the groups 4 i .. 4 i + 3 of both halves, from its vectors 4 i + lane % 4.
struct RowPairs {
    uint32_t x[2][2][4]; // halves, i, groups
};
__device__ __forceinline__ RowPairs to_pairs(const uint4 (&v)[2][2])
{
    RowPairs p;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t x[4] = {v[half][i].x, v[half][i].y, v[half][i].z, v[half][i].w};
            transpose_quad(x);
#pragma unroll
            for (int g = 0; g < 4; g++) p.x[half][i][g] = x[g];
        }
    return p;
}

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// The gradients of elements that rotate together, in place.  mean: of the row's products of gradient and result
__device__ __forceinline__ void unrotate(float &d0, float &d1, float y0, float y1, float c, float s, float mean, float rstd)
{
    float scale = mean * __fdividef(1, c * c + s * s), x0 = d0 - y0 * scale, x1 = d1 - y1 * scale;
    d0 = rstd * (x0 * c - x1 * s);
    d1 = rstd * (x1 * c + x0 * s);
}

// d: the row's sums [half][group][column of the pair]; out: the row's head in dqkv
__device__ __forceinline__ void finish_row(floatX *out, float (&d)[2][8][2], const RowPairs &y, const uint32_t (&c)[4],
                                           const uint32_t (&s)[4], float rstd, bool exists)
{
    float mean = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int g = 0; g < 8; g++)
            mean += d[half][g][0] * low(y.x[half][g / 4][g % 4]) + d[half][g][1] * high(y.x[half][g / 4][g % 4]);
    mean = group_sum(mean, 4, 0xffffffffu) / WIDTH;
#pragma unroll
    for (int g = 0; g < 8; g++) {
        uint32_t y0 = y.x[0][g / 4][g % 4], y1 = y.x[1][g / 4][g % 4];
        bool turns = g < 4; // the second quarter of a head stands still
        unrotate(d[0][g][0], d[1][g][0], low(y0), low(y1), turns ? low(c[g % 4]) : 1, turns ? low(s[g % 4]) : 0, mean, rstd);
        unrotate(d[0][g][1], d[1][g][1], high(y0), high(y1), turns ? high(c[g % 4]) : 1, turns ? high(s[g % 4]) : 0, mean, rstd);
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t x[4];
#pragma unroll
            for (int g = 0; g < 4; g++) x[g] = pack2(d[half][4 * i + g][0], d[half][4 * i + g][1]);
            transpose_quad(x);
            if (exists) store_vec(out + half * (WIDTH / 2), 4 * i + threadIdx.x % 4, make_uint4(x[0], x[1], x[2], x[3]));
        }
}

// A block takes a tile of a head, a thread two rows of it, a quad of lanes all columns of a row.
__global__ __launch_bounds__(THREADS, 3) void q_backward_kernel(const __grid_constant__ QkvBackward a,
                                                                const __grid_constant__ KeptGradient kept, int N, int H)
{
    int lane = threadIdx.x % WARP, head = blockIdx.x % H, tile = blockIdx.x / H, d = H * WIDTH;
    int first = tile * QUERIES + threadIdx.x / WARP * 16 + lane / 4;
    const float4 *sums = (const float4 *)(kept.sums + (int64_t)blockIdx.x * TILE_FLOATS) + threadIdx.x;
    float4 sum[2][8];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int g = 0; g < 8; g++) sum[half][g] = __ldcs(sums + half * HALF_VECTORS + g * THREADS);
    uint4 y[2][2][2] = {}, c[2] = {}, s[2] = {};
    float rstd[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t n = first + 8 * r;
        if (n >= N) break;
        const floatX *q = a.q + n * d + head * WIDTH;
#pragma unroll
        for (int k = 0; k < 4; k++) y[r][k / 2][k % 2] = load_vec(q + k / 2 * (WIDTH / 2), 4 * (k % 2) + lane % 4);
        c[r] = load_vec(a.cos + n * (WIDTH / 4), lane % 4), s[r] = load_vec(a.sin + n * (WIDTH / 4), lane % 4);
        rstd[r] = a.rstd_q[n * H + head];
    }
    if (threadIdx.x < 2) kept.state[2 * blockIdx.x + threadIdx.x] = UNTOUCHED;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float row[2][8][2];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int g = 0; g < 8; g++) {
                row[half][g][0] = kept.scale * (r ? sum[half][g].z : sum[half][g].x);
                row[half][g][1] = kept.scale * (r ? sum[half][g].w : sum[half][g].y);
            }
        uint32_t cosines[4] = {c[r].x, c[r].y, c[r].z, c[r].w}, sines[4] = {s[r].x, s[r].y, s[r].z, s[r].w};
        transpose_quad(cosines), transpose_quad(sines);
        int64_t n = first + 8 * r;
        finish_row(a.dqkv + n * 3 * d + head * WIDTH, row, to_pairs(y[r]), cosines, sines, rstd[r], n < N);
    }
}

} // namespace

void qkv_backward(Stream s, const QkvBackward *a, int N, int H, int e)
{
    if (N <= 0) return;
    bool fast = qkv_fast_path(N, H, e);
    int64_t wanted = ceil_div((int64_t)N * H * (fast ? e / 16 : WARP), BACKWARD_THREADS);
    int blocks = (int)min_i64(wanted, (int64_t)device_state.sms * 16);
    float *partials = scratch_floats((size_t)blocks * 2);
    if (!a->dq) {
        KeptGradient kept = attention_take_dq(N);
        assert(fast && e == WIDTH);
        q_backward_kernel<<<(unsigned)(ceil_div(N, QUERIES) * H), THREADS, 0, s>>>(*a, kept, N, H);
        qkv_backward_kernel<false><<<blocks, BACKWARD_THREADS, 0, s>>>(*a, N, H, e, partials, device_state.counter);
    } else if (fast) qkv_backward_kernel<true><<<blocks, BACKWARD_THREADS, 0, s>>>(*a, N, H, e, partials, device_state.counter);
    else qkv_backward_any_kernel<<<blocks, BACKWARD_THREADS, 0, s>>>(*a, N, H, e, partials, device_state.counter);
    CHECK_LAUNCH();
}
