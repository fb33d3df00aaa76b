// Attention of rows that continue texts, over cached keys and values. Any GPU; bound by memory: of a row each
// key and value is read once, in heads of 128 with a window of 2560 1.3 MB a head.
//
// A CTA has one head of a row. Its warps take blocks of BLOCK keys by turns, each with a softmax of its own,
// lane l with the C channels l, l + 32, ...; then the warps' sums are added up in shared memory.
#include "llmc/cuda/device/cuda_common.cuh"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / WARP,
    MOST_WIDTH = 256,
    MOST_SCORES = 11264 // of a row of DC, in shared memory: 44 KB
};

struct Gate { // w NULL: none
    const floatX *h, *w;
    int inputs;
};

__device__ __forceinline__ int64_t cache_row(const TextCache &c, int text, int position)
{
    return (int64_t)text * c.rows + position % c.rows;
}

// ---- the cache --------------------------------------------------------------------------------------------

__global__ __launch_bounds__(THREADS) void store_kernel(const floatX *k, const floatX *v, const TextCache c,
                                                        int H, int qk, int e)
{
    int n = blockIdx.x, text = c.text[n], position = c.position[n], width = H * qk, d = H * e;
    if (text < 0)
        return;
    floatX *own = c.k + cache_row(c, text, position) * width,
           *moved = c.k + cache_row(c, text, position + c.offset) * width,
           *values = c.v + cache_row(c, text, position) * d;
    for (int i = threadIdx.x; i < d; i += THREADS)
        values[i] = v[(int64_t)n * d + i];
    for (int i = threadIdx.x; i < width; i += THREADS) {
        floatX key = k[(int64_t)n * width + i];
        bool moves = i % qk >= qk / 2;
        if (moves)
            moved[i] = key;
        if (!moves || position < c.offset)
            own[i] = key;
    }
}

// ---- attention --------------------------------------------------------------------------------------------

// A lane's share of a row of `width` elements, 0 beyond the end.
template <int C> __device__ __forceinline__ void load_channels(float (&x)[C], const floatX *row, int width)
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < C; i++)
        x[i] = lane + WARP * i < width ? to_float(row[lane + WARP * i]) : 0;
}

// Running softmax of a warp, as in llmc/cpu/decode.c; the same in all lanes but for y.
template <int C> struct Softmax {
    float y[C], max, sum;
};

// A block of keys from j on, of those up to `last`, of which there is at least the first.
template <int C, int BLOCK>
__device__ __forceinline__ void add_block(Softmax<C> &f, const float (&q)[C], const SdpaForward &a,
                                          const TextCache &c, int text, int j, int last, int H, int e)
{
    float score[BLOCK], v[BLOCK][C], max = f.max;
#pragma unroll
    for (int b = 0; b < BLOCK; b++) {
        int64_t row = cache_row(c, text, min(j + b, last)) * H + blockIdx.y;
        float k[C], product = 0;
        load_channels(k, c.k + row * a.qk, a.qk);
        load_channels(v[b], c.v + row * e, e);
#pragma unroll
        for (int i = 0; i < C; i++)
            product += q[i] * k[i];
        score[b] = j + b <= last ? a.scale * warp_sum(product) : -INFINITY;
        max = fmaxf(max, score[b]);
    }
    float shrink = expf(f.max - max);
    f.max = max;
    f.sum *= shrink;
#pragma unroll
    for (int i = 0; i < C; i++)
        f.y[i] *= shrink;
#pragma unroll
    for (int b = 0; b < BLOCK; b++) {
        float weight = expf(score[b] - max);
        f.sum += weight;
#pragma unroll
        for (int i = 0; i < C; i++)
            f.y[i] += weight * v[b][i];
    }
}

template <int C, int BLOCK>
__global__ __launch_bounds__(THREADS) void decode_kernel(const SdpaForward a, const TextCache c, const Gate g,
                                                         int H, int e)
{
    __shared__ float part_max[WARPS], part_sum[WARPS], part_y[WARPS][WARP * C];
    int n = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int text = c.text[n], last = c.position[n], first = max(0, last - a.window);
    int64_t row = (int64_t)n * H + head;
    if (text < 0)
        return;
    float q[C];
    Softmax<C> f = {{0}, -INFINITY, 0};
    load_channels(q, a.q + row * a.qk, a.qk);
    for (int j = first + warp * BLOCK; j <= last; j += WARPS * BLOCK)
        add_block<C, BLOCK>(f, q, a, c, text, j, last, H, e);
    if (lane == 0) {
        part_max[warp] = f.max;
        part_sum[warp] = f.sum;
    }
#pragma unroll
    for (int i = 0; i < C; i++)
        part_y[warp][lane + WARP * i] = f.y[i];
    __syncthreads();
    float max = part_max[0], sum = 0, gate = 0; // the first warp has a key
    for (int w = 1; w < WARPS; w++)
        max = fmaxf(max, part_max[w]);
    for (int w = 0; w < WARPS; w++)
        sum += part_sum[w] * expf(part_max[w] - max);
    for (int i = 0; i < g.inputs; i++)
        gate += to_float(g.h[(int64_t)n * H * e + i]) * to_float(g.w[head * g.inputs + i]);
    float factor = (g.w ? sigmoid(gate) : 1) / sum;
    for (int i = threadIdx.x; i < e; i += THREADS) {
        float y = 0;
        for (int w = 0; w < WARPS; w++)
            y += part_y[w][i] * expf(part_max[w] - max);
        a.y[row * e + i] = __float2bfloat16(factor * y);
    }
}

void decode(Stream s, const SdpaForward *a, const TextCache *c, const Gate *g, int N, int H, int e)
{
    assert(e <= MOST_WIDTH && a->qk <= e);
    dim3 grid((unsigned)N, (unsigned)H);
    store_kernel<<<(unsigned)N, THREADS, 0, s>>>(a->k, a->v, *c, H, a->qk, e);
    if (e <= 32)
        decode_kernel<1, 4><<<grid, THREADS, 0, s>>>(*a, *c, *g, H, e);
    else if (e <= 64)
        decode_kernel<2, 4><<<grid, THREADS, 0, s>>>(*a, *c, *g, H, e);
    else if (e <= 128)
        decode_kernel<4, 4><<<grid, THREADS, 0, s>>>(*a, *c, *g, H, e);
    else // of four such keys registers would be spilled
        decode_kernel<8, 2><<<grid, THREADS, 0, s>>>(*a, *c, *g, H, e);
    CHECK_LAUNCH();
}

// ---- DC ---------------------------------------------------------------------------------------------------

// Scores of all heads and keys of a row to weights, and M_j behind them.
__device__ __forceinline__ void dc_scores(float *p, const DcForward &a, const TextCache &c, int first,
                                          int count, int H)
{
    int n = blockIdx.x, lane = threadIdx.x % WARP, text = c.text[n];
    for (int i = threadIdx.x / WARP; i < H * count; i += WARPS) {
        int head = i / count;
        const floatX *q = a.q + ((int64_t)n * H + head) * a.qk,
                     *k = c.k + (cache_row(c, text, first + i % count) * H + head) * a.qk;
        float product = 0;
        for (int ch = lane; ch < a.qk; ch += WARP)
            product += to_float(q[ch]) * to_float(k[ch]);
        product = warp_sum(product);
        if (lane == 0)
            p[i] = a.scale * product;
    }
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ void dc_softmax(float *p, const DcForward &a, int count, int H)
{
    int lane = threadIdx.x % WARP;
    for (int head = threadIdx.x / WARP; head < H; head += WARPS) {
        float *row = p + head * count, max = -INFINITY, sum = 0;
        for (int j = lane; j < count; j += WARP)
            max = fmaxf(max, row[j]);
        max = warp_max(max);
        for (int j = lane; j < count; j += WARP)
            sum += expf(row[j] - max);
        float lse = max + logf(warp_sum(sum));
        for (int j = lane; j < count; j += WARP)
            row[j] = expf(row[j] - lse);
        if (lane == 0)
            a.lse[(int64_t)blockIdx.x * H + head] = lse;
    }
}

__global__ __launch_bounds__(THREADS) void dc_kernel(const DcForward a, const TextCache c, int H, int e)
{
    extern __shared__ float p[]; // (H, count), then M (count)
    int n = blockIdx.x, text = c.text[n], last = c.position[n], first = max(0, last - a.keys + 1),
        count = last - first + 1, d = H * e;
    if (text < 0)
        return;
    dc_scores(p, a, c, first, count, H);
    __syncthreads();
    dc_softmax(p, a, count, H);
    __syncthreads();
    const float *w1 = a.w1 + (int64_t)n * a.stride, *w2 = a.w2 + (int64_t)n * a.stride;
    float *mixed = p + H * count, squares = 0;
    for (int head = 0; head < H; head++)
        squares += w1[head] * w1[head];
    float norm = 1 / sqrtf(squares / (float)H + 1e-6f);
    for (int j = threadIdx.x; j < count; j += THREADS) {
        float sum = 0;
        for (int head = 0; head < H; head++)
            sum += norm * w1[head] * p[head * count + j];
        mixed[j] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float sum = 0;
        for (int j = 0; j < count; j++)
            sum += mixed[j] * to_float(c.v[cache_row(c, text, first + j) * d + i]);
        floatX *y = a.y + (int64_t)n * d + i;
        *y = __float2bfloat16(to_float(*y) + w2[i / e] * sum);
    }
}

} // namespace

// ---- ops --------------------------------------------------------------------------------------------------

void sdpa_decode(Stream s, const SdpaForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(sdpa_decode, a, N, H, e);
    Gate none = {NULL, NULL, 0};
    decode(s, a, cache, &none, N, H, e);
}

void attention_decode(Stream s, const AttentionForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(attention_decode, N, H * e);
    SdpaForward sdpa = {a->yg, NULL, a->q, a->k, a->v, e, NULL, 0, a->window, a->scale};
    Gate gate = {a->h, a->gate_w, a->gate_inputs};
    decode(s, &sdpa, cache, &gate, N, H, e);
}

void dc_decode(Stream s, const DcForward *a, const TextCache *cache, int N, int H, int e)
{
    OP_SCOPE(dc_decode, a, N, H, e);
    int floats = (H + 1) * a->keys;
    assert(floats <= MOST_SCORES);
    dc_kernel<<<(unsigned)N, THREADS, (size_t)floats * sizeof(float), s>>>(*a, *cache, H, e);
    CHECK_LAUNCH();
}
