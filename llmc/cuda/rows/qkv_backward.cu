// Backward of QK norm, rotation and value mix.
//
// With y = R x^, x^ = x rstd: dx^ = R' dy, and dx = rstd (dx^ - x^ mean(dx^ x^)). The sum of dx^ x^ is that
// of dy y. R' R is not quite the identity, because cos and sin are rounded: x^ = R' y / (cos^2 + sin^2).
//
// After sm90_backward.cu, k and v are done and dq is a tensor of fp32 sums.
#include "llmc/cuda/attention/sm90_attention.cuh"
#include "llmc/cuda/rows/qkv.cuh"
#include "llmc/cuda/rows/qkv_row.cuh"

namespace
{

enum { BACKWARD_THREADS = 256 };

// ---- q, k and v in vectors --------------------------------------------------------------------------------

struct Rotation {
    float c[8], s[8], inverse[8]; // inverse: 1 / (c^2 + s^2)
};

__device__ __forceinline__ void unrotate_gradient(floatX *out, Pair dy, Pair y, float r, int j, int e,
                                                  const Rotation &turn, unsigned mask)
{
    int half = e / 16;
    float g1[8], g2[8], y1[8], y2[8], dot = 0;
    unpack8(dy.lo, g1);
    unpack8(dy.hi, g2);
    unpack8(y.lo, y1);
    unpack8(y.hi, y2);
#pragma unroll
    for (int k = 0; k < 8; k++)
        dot += g1[k] * y1[k] + g2[k] * y2[k];
    dot = group_sum(dot, half, mask) / (float)e;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float scale = dot * turn.inverse[k];
        float a = g1[k] - y1[k] * scale, b = g2[k] - y2[k] * scale; // R' of this is dx^ - x^ dot
        g1[k] = r * (a * turn.c[k] - b * turn.s[k]);
        g2[k] = r * (b * turn.c[k] + a * turn.s[k]);
    }
    store_vec(out, j, pack8(g1));
    store_vec(out, j + half, pack8(g2));
}

__global__ __launch_bounds__(BACKWARD_THREADS) void qkv_backward_kernel(QkvBackward a, int N, int H, int e,
                                                                        float *partials, unsigned *counter)
{
    unsigned half = e / 16, per_row = H * half, all = N * per_row;
    int d = H * e;
    float sums[2] = {0, 0}, lambda = a.lambda[0];
    for (unsigned start = blockIdx.x * BACKWARD_THREADS; start < all; start += gridDim.x * BACKWARD_THREADS) {
        unsigned id = start + threadIdx.x;
        unsigned mask =
            __ballot_sync(0xffffffffu, id < all); // groups are whole: only the last block's tail is off
        if (id >= all)
            break;
        int64_t n = id / per_row;
        int h = id % per_row / half, j = id % half;
        int64_t at = (n * H + h) * e, out = n * 3 * d + (int64_t)h * e;
        Pair dq = load_pair(a.dq + at, j, half), q = load_pair(a.q + at, j, half),
             dk = load_pair(a.dk + at, j, half);
        Pair k = load_pair(a.k + at, j, half), dv = load_pair(a.dv + at, j, half),
             raw = load_pair(a.v_raw + at, j, half), embed = raw;
        if (a.value_embed)
            embed = load_pair(a.value_embed + ((int64_t)a.tokens[n] * H + h) * e, j, half);
        Rotation turn;
        load_rotation(turn.c, turn.s, a.cos, a.sin, n, j, e);
#pragma unroll
        for (int i = 0; i < 8; i++)
            turn.inverse[i] = __fdividef(1, turn.c[i] * turn.c[i] + turn.s[i] * turn.s[i]);
        unrotate_gradient(a.dqkv + out, dq, q, a.rstd_q[n * H + h], j, e, turn, mask);
        unrotate_gradient(a.dqkv + out + d, dk, k, a.rstd_k[n * H + h], j, e, turn, mask);
        store_vec(a.dqkv + out + 2 * d, j,
                  value_gradient(dv.lo, raw.lo, embed.lo, a.value_embed, lambda, sums));
        store_vec(a.dqkv + out + 2 * d, j + half,
                  value_gradient(dv.hi, raw.hi, embed.hi, a.value_embed, lambda, sums));
    }
    grid_accumulate<2>(a.dlambda, sums, partials, counter);
}

__device__ __forceinline__ void unrotate_gradient_any(floatX *out, const floatX *dy, const floatX *y, float r,
                                                      const floatX *cos, const floatX *sin, int lane, int e)
{
    int half = e / 2, turning = e / 4;
    float dot = 0;
    for (int i = lane; i < e; i += WARP)
        dot += to_float(dy[i]) * to_float(y[i]);
    dot = warp_sum(dot) / (float)e;
    for (int i = lane; i < half; i += WARP) {
        float c = i < turning ? to_float(cos[i]) : 1, s = i < turning ? to_float(sin[i]) : 0,
              scale = dot / (c * c + s * s);
        float a = to_float(dy[i]) - to_float(y[i]) * scale,
              b = to_float(dy[i + half]) - to_float(y[i + half]) * scale;
        out[i] = __float2bfloat16(r * (a * c - b * s));
        out[i + half] = __float2bfloat16(r * (b * c + a * s));
    }
}

__global__ __launch_bounds__(BACKWARD_THREADS, 1) void qkv_backward_any_kernel(QkvBackward a, int N, int H,
                                                                               int e, float *partials,
                                                                               unsigned *counter)
{
    int lane = threadIdx.x % WARP, turning = e / 4, d = H * e;
    int64_t units = (int64_t)N * H, step = (int64_t)gridDim.x * (BACKWARD_THREADS / WARP);
    float sums[2] = {0, 0};
    for (int64_t unit = (int64_t)blockIdx.x * (BACKWARD_THREADS / WARP) + threadIdx.x / WARP; unit < units;
         unit += step) {
        int64_t n = unit / H, h = unit % H, at = unit * e, out = n * 3 * d + h * e;
        const floatX *c = a.cos + n * turning, *s = a.sin + n * turning;
        unrotate_gradient_any(a.dqkv + out, a.dq + at, a.q + at, a.rstd_q[unit], c, s, lane, e);
        unrotate_gradient_any(a.dqkv + out + d, a.dk + at, a.k + at, a.rstd_k[unit], c, s, lane, e);
        for (int i = lane; i < e; i += WARP) {
            float g = to_float(a.dv[at + i]);
            sums[0] += g * to_float(a.v_raw[at + i]);
            if (a.value_embed)
                sums[1] += g * to_float(a.value_embed[(int64_t)a.tokens[n] * d + h * e + i]);
            a.dqkv[out + 2 * d + i] = __float2bfloat16(a.lambda[0] * g);
        }
    }
    grid_accumulate<2>(a.dlambda, sums, partials, counter);
}

// ---- q from attention's sums ------------------------------------------------------------------------------

using namespace dq_accumulator;
enum { WIDTH = QKV_ROW_WIDTH }; // of a head

// dlambda += what attention's backward summed, in order. One block.
__device__ __forceinline__ void add_value_sums(float *dlambda, const DqSums &kept)
{
    __shared__ float shared[WARP];
    float sums[2] = {0, 0};
#pragma unroll 8
    for (int i = threadIdx.x; i < kept.num_value_sums; i += THREADS) {
        float2 x = ((const float2 *)kept.value_sums)[i];
        sums[0] += x.x;
        sums[1] += x.y;
    }
    for (int k = 0; k < 2; k++) {
        float x = block_sum(sums[k], shared);
        if (threadIdx.x == 0)
            dlambda[k] += x;
    }
}

// A block takes a tile of a head, a thread two rows of it, a quad of lanes all columns of a row.
__global__ __launch_bounds__(THREADS, 3) void q_backward_kernel(const __grid_constant__ QkvBackward a,
                                                                const __grid_constant__ DqSums kept, int N,
                                                                int H)
{
    int lane = threadIdx.x % WARP, head = blockIdx.x % H, tile = blockIdx.x / H, d = H * WIDTH;
    int first = tile * QUERIES + threadIdx.x / WARP * 16 + lane / 4;
    const float4 *sums = (const float4 *)(kept.sums + (int64_t)blockIdx.x * TILE_FLOATS) + threadIdx.x;
    float4 sum[2][8];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int g = 0; g < 8; g++)
            sum[half][g] = __ldcs(sums + half * HALF_VECTORS + g * THREADS);
    uint4 y[2][2][2] = {};
    Angles angles[2];
    float rstd[2] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t n = first + 8 * r;
        angles[r] = load_angles(a.cos, a.sin, n, n < N);
        if (n >= N)
            continue;
        const floatX *q = a.q + n * d + head * WIDTH;
#pragma unroll
        for (int k = 0; k < 4; k++)
            y[r][k / 2][k % 2] = load_vec(q + k / 2 * (WIDTH / 2), 4 * (k % 2) + lane % 4);
        rstd[r] = a.rstd_q[n * H + head];
    }
    if (threadIdx.x < 2)
        kept.state[2 * blockIdx.x + threadIdx.x] = 0;
    if (blockIdx.x == 0)
        add_value_sums(a.dlambda, kept);
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
        int64_t n = first + 8 * r;
        finish_row(a.dqkv + n * 3 * d + head * WIDTH, row, to_pairs(y[r]), angles[r], rstd[r], n < N);
    }
}

} // namespace

void qkv_backward(Stream s, const QkvBackward *a, int N, int H, int e)
{
    if (N <= 0)
        return;
    bool fast = qkv_fast_path(N, H, e);
    int64_t wanted = ceil_div((int64_t)N * H * (fast ? e / 16 : WARP), BACKWARD_THREADS);
    int blocks = (int)min_i64(wanted, (int64_t)device_state.sms * 16);
    float *partials = scratch_floats(s, SCRATCH_QKV, (size_t)blocks * 2);
    unsigned *counter = scratch_counter(s, SCRATCH_QKV);
    if (fast)
        qkv_backward_kernel<<<blocks, BACKWARD_THREADS, 0, s>>>(*a, N, H, e, partials, counter);
    else
        qkv_backward_any_kernel<<<blocks, BACKWARD_THREADS, 0, s>>>(*a, N, H, e, partials, counter);
    CHECK_LAUNCH();
}

void q_backward(Stream s, const QkvBackward *a, const DqSums *sums, int N, int H)
{
    if (N <= 0)
        return;
    q_backward_kernel<<<(unsigned)(ceil_div(N, QUERIES) * H), THREADS, 0, s>>>(*a, *sums, N, H);
    CHECK_LAUNCH();
}
