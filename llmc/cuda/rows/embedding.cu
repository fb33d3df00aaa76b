// Token embeddings: gather, smear of the previous token, norm; and the gradients of table rows as sums in a
// fixed order.
#include "llmc/cuda/device/cuda_common.cuh"

static const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23
enum {
    GATE_WIDTH = 12,
    RUN = 16 /* rows a warp walks in embed_backward */,
    SEGMENT = 16 /* positions a warp sums */,
    STRIP = 4 * WARP /* columns it sums */,
    JOIN = 16 /* partial sums a warp loads at once */
};

// gate . row[0:12], given to all lanes.
static __device__ __forceinline__ float gate_dot(const floatX *row, const floatX *gate, int lane)
{
    return warp_sum(lane < GATE_WIDTH ? to_float(row[lane]) * to_float(gate[lane]) : 0);
}

// ---- forward ----------------------------------------------------------------------------------------------

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_forward_kernel(floatX *x0, float *rstd,
                                                                    const int32_t *tokens,
                                                                    const floatX *embed, const floatX *gate,
                                                                    const float *lambda, int N, int d)
{
    int lane = threadIdx.x % WARP, t = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (t >= N)
        return;
    const floatX *row = embed + (int64_t)tokens[t] * d,
                 *before = t ? embed + (int64_t)tokens[t - 1] * d : row;
    uint4 u[VPL], p[VPL];
    load_row(u, row, vectors, lane);
    load_row(p, before, vectors, lane);
    float smear = t ? lambda[0] * sigmoid(gate_dot(row, gate, lane)) : 0;
    float y[VPL][8], sum = 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float b[8];
        unpack8(u[i], y[i]);
        unpack8(p[i], b);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (t)
                y[i][k] += smear * b[k];
            sum += y[i][k] * y[i][k];
        }
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)d + RMS_EPS);
    if (lane == 0)
        rstd[t] = r;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            y[i][k] *= r;
        u[i] = pack8(y[i]);
    }
    store_row(x0 + (int64_t)t * d, u, vectors, lane);
}

void embed_forward(Stream s, const EmbedForward *a, int N, int d)
{
    OP_SCOPE(embed_forward, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d, (embed_forward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(a->x0, a->rstd, a->tokens,
                                                                                a->embed, a->gate, a->lambda,
                                                                                N, d)));
}

// ---- backward ---------------------------------------------------------------------------------------------

// dy of row t: the gradient of y_t through the norm.
template <int VPL>
static __device__ __forceinline__ void norm_gradient(float (&dy)[VPL][8], const EmbedBackward &a, int t,
                                                     int d, int lane)
{
    int64_t at = (int64_t)t * d;
    uint4 u1[VPL], u2[VPL], ux[VPL];
    load_row(u1, a.dx + at, d / 8, lane);
    load_row(u2, a.dx0 + at, d / 8, lane);
    load_row(ux, a.x0 + at, d / 8, lane);
    float r = a.rstd[t], dot = 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float p[8], x[8];
        unpack8(u1[i], dy[i]);
        unpack8(u2[i], p);
        unpack8(ux[i], x);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            dy[i][k] += p[k];
            dot += dy[i][k] * x[k];
        }
    }
    dot = warp_sum(dot) / (float)d;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float x[8];
        unpack8(ux[i], x);
#pragma unroll
        for (int k = 0; k < 8; k++)
            dy[i][k] = r * (dy[i][k] - x[k] * dot);
    }
}

// A warp walks RUN rows from the last to the first, because row t also gets gradient from y_{t+1}, which it
// then still holds. sums: dlambda in lane 0's [0], dgate in lanes 0..11's [1].
template <int VPL>
static __device__ __forceinline__ void embed_backward_run(const EmbedBackward &a, int first, int end, int N,
                                                          int d, int lane, float &dlambda, float &dgate)
{
    int vectors = d / 8;
    float lambda = a.lambda[0], mine = lane < GATE_WIDTH ? to_float(a.gate[lane]) : 0;
    float later[VPL][8], later_smear = 0; // lambda * sig(gate . E[token_{t+1}]), dy_{t+1}
#pragma unroll
    for (int i = 0; i < VPL; i++)
#pragma unroll
        for (int k = 0; k < 8; k++)
            later[i][k] = 0;
    if (end < N) {
        norm_gradient<VPL>(later, a, end, d, lane);
        later_smear = lambda * sigmoid(gate_dot(a.embed + (int64_t)a.tokens[end] * d, a.gate, lane));
    }
    for (int t = end - 1; t >= first; t--) {
        float dy[VPL][8], dot = 0, smear = 0;
        norm_gradient<VPL>(dy, a, t, d, lane);
        const floatX *row = a.embed + (int64_t)a.tokens[t] * d;
        float input = lane < GATE_WIDTH ? to_float(row[lane]) : 0, through_gate = 0;
        if (t > 0) {
            uint4 u[VPL];
            load_row(u, a.embed + (int64_t)a.tokens[t - 1] * d, vectors, lane);
#pragma unroll
            for (int i = 0; i < VPL; i++) {
                float e[8];
                unpack8(u[i], e);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    dot += dy[i][k] * e[k];
            }
            dot = warp_sum(dot);
            float gate = sigmoid(warp_sum(input * mine)), dpre = lambda * gate * (1 - gate) * dot;
            smear = lambda * gate;
            dlambda += gate * dot;
            dgate += dpre * input;
            through_gate = dpre * mine;
        }
        uint4 out[VPL];
#pragma unroll
        for (int i = 0; i < VPL; i++) {
            float o[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                o[k] = dy[i][k] + later_smear * later[i][k];
                float got = i == 0 ? __shfl_sync(0xffffffffu, through_gate, (lane & 1) * 8 + k) : 0;
                if (i == 0 && lane < 2)
                    o[k] += got; // lanes 12 and up hold 0
                later[i][k] = dy[i][k];
            }
            out[i] = pack8(o);
        }
        store_row(a.de + (int64_t)t * d, out, vectors, lane);
        later_smear = smear;
    }
}

// Sums of the gate's gradient: thread `lane` of every warp holds element `lane`; 13 values are summed over
// the grid.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_backward_kernel(EmbedBackward a, int N, int d,
                                                                     float *partials, unsigned *counter)
{
    __shared__ float sums[ROW_WARPS][GATE_WIDTH + 1];
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = (blockIdx.x * ROW_WARPS + warp) * RUN;
    float my_gate = 0, my_lambda = 0;
    if (first < N)
        embed_backward_run<VPL>(a, first, min(first + RUN, N), N, d, lane, my_lambda, my_gate);
    if (lane < GATE_WIDTH)
        sums[warp][lane] = my_gate;
    if (lane == 0)
        sums[warp][GATE_WIDTH] = my_lambda;
    __syncthreads();
    if (threadIdx.x <= GATE_WIDTH) {
        float x = 0;
        for (int w = 0; w < ROW_WARPS; w++)
            x += sums[w][threadIdx.x];
        partials[blockIdx.x * (GATE_WIDTH + 1) + threadIdx.x] = x;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    for (int k = warp; k <= GATE_WIDTH; k += ROW_WARPS) {
        float x = 0;
        for (int b = lane; b < gridDim.x; b += WARP)
            x += __ldcg(partials + b * (GATE_WIDTH + 1) + k);
        x = warp_sum(x);
        if (lane == 0)
            *(k < GATE_WIDTH ? a.dgate + k : a.dlambda) += x;
    }
}

void embed_backward(Stream s, const EmbedBackward *a, int N, int d)
{
    OP_SCOPE(embed_backward, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS * RUN);
    float *partials = scratch_floats(s, SCRATCH_EMBED, (size_t)blocks * (GATE_WIDTH + 1));
    DISPATCH_WIDTH(d,
                   (embed_backward_kernel<VPL>
                    <<<blocks, ROW_THREADS, 0, s>>>(*a, N, d, partials, scratch_counter(s, SCRATCH_EMBED))));
}

// ---- rows of a table --------------------------------------------------------------------------------------
// The positions, sorted by token, are cut into segments. A warp sums a strip of columns of a segment; it asks
// for all gradients and all rows of the table at once, so that nothing waits for anything but memory's rate.
// Tokens that lie inside go to the table, the first and last token of a segment may go on in the neighbours:
// their sums wait in scratch (segments, 2, d) for the second kernel, which adds them in order. So a token
// that occurs a thousand times costs no more than a thousand tokens, and every element of the table is
// changed by one thread only. (Additions by red.global.add, which wait for nothing either, were slower.)

static __device__ __forceinline__ void add4(float4 &sum, float4 x)
{
    sum.x += x.x;
    sum.y += x.y;
    sum.z += x.z;
    sum.w += x.w;
}

static __device__ __forceinline__ float4 plus_scaled(float4 old, float4 sum, float factor)
{
    return make_float4(old.x + factor * sum.x, old.y + factor * sum.y, old.z + factor * sum.z,
                       old.w + factor * sum.w);
}

static __device__ __forceinline__ float4 unpack4(uint2 u)
{
    return make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),
                       __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u));
}

// The row whose positions contain `position`. The lanes of a warp look at 32 places at a time.
static __device__ __forceinline__ int find_row(const int32_t *row_start, int rows, int position, int lane)
{
    int lo = 0, hi = rows; // row_start[lo] <= position < row_start[hi]
    while (hi - lo > 1) {
        int step = (hi - lo + WARP - 1) / WARP, probe = lo + lane * step;
        unsigned below =
            __ballot_sync(0xffffffffu, probe < hi && row_start[probe] <= position); // lane 0's always is
        lo += (31 - __clz((int)below)) * step;
        hi = min(hi, lo + step);
    }
    return lo;
}

// grid (segments / ROW_WARPS, d / STRIP)
__global__ __launch_bounds__(ROW_THREADS) void embedding_grad_kernel(float *dtable, const floatX *g,
                                                                     const float *scale, TokenRows rows,
                                                                     int N, int d, float *partials,
                                                                     int2 *open)
{
    int lane = threadIdx.x % WARP, segment = blockIdx.x * ROW_WARPS + threadIdx.x / WARP,
        column = blockIdx.y * STRIP + 4 * lane;
    int begin = segment * SEGMENT, count = min(SEGMENT, N - begin), num_rows = *rows.num_rows;
    if (begin >= N)
        return;
    static_assert(SEGMENT < WARP, "a lane holds one position, and one row of the table");
    bool there = column < d;
    float factor = scale ? scale[0] : 1;
    int first = find_row(rows.row_start, num_rows, begin, lane), row = first + lane;
    int position = lane < count ? rows.order[begin + lane] : 0;
    int stop = row < num_rows ? rows.row_start[row + 1] : 0, token = row < num_rows ? rows.row_token[row] : 0;
    bool comes_in = rows.row_start[first] < begin; // the first token began in an earlier segment
    unsigned ends =
        __reduce_or_sync(0xffffffffu, stop > begin && stop <= begin + count ? 1u << (stop - begin - 1) : 0);
    unsigned inside = comes_in ? ends & (ends - 1) : ends; // bit i: a token that lies inside ends at place i
    int last = __popc(ends), last_stop = __shfl_sync(0xffffffffu, stop, last),
        last_token = __shfl_sync(0xffffffffu, token, last);
    bool goes_on = !(ends >> (count - 1) & 1), begins = !comes_in || ends; // of the segment's last token
    if (blockIdx.y == 0 && lane == 0)
        open[segment] = make_int2(goes_on && begins ? last_token : -1, (last_stop - 1) / SEGMENT);
    uint2 u[SEGMENT];
    float4 old[SEGMENT], sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        int t = __shfl_sync(0xffffffffu, position, i);
        u[i] = there && i < count ? *reinterpret_cast<const uint2 *>(g + (int64_t)t * d + column)
                                  : make_uint2(0, 0);
    }
    float *table = dtable + column;
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        int64_t at = (int64_t)__shfl_sync(0xffffffffu, token, __popc(ends & ((1u << i) - 1))) * d;
        if (there && inside >> i & 1)
            old[i] = *reinterpret_cast<const float4 *>(table + at);
    }
#pragma unroll
    for (int i = 0; i < SEGMENT; i++) {
        unsigned before = ends & ((1u << i) - 1);
        int64_t at = (int64_t)__shfl_sync(0xffffffffu, token, __popc(before)) * d;
        add4(sum, unpack4(u[i]));
        if (!(ends >> i & 1) && i + 1 != count)
            continue;
        int side = !(comes_in && !before); // 0: comes in, 1: begins here
        if (there && inside >> i & 1)
            *reinterpret_cast<float4 *>(table + at) = plus_scaled(old[i], sum, factor);
        else if (there)
            *reinterpret_cast<float4 *>(partials + (2 * (int64_t)segment + side) * d + column) = sum;
        sum = make_float4(0, 0, 0, 0);
    }
}

// A warp for each segment in which a token begins that goes on in the next: adds up that token's partial
// sums.
//   open (segments): that token, or -1; the last segment it reaches
__global__ __launch_bounds__(ROW_THREADS,
                             3) void embedding_join_kernel(float *dtable, const float *scale, int segments,
                                                           int d, const float *partials, const int2 *open)
{
    int lane = threadIdx.x % WARP, segment = blockIdx.x * ROW_WARPS + threadIdx.x / WARP,
        column = blockIdx.y * STRIP + 4 * lane;
    if (segment >= segments || column >= d)
        return;
    int token = open[segment].x, last = open[segment].y;
    if (token < 0)
        return;
    float4 sum = *reinterpret_cast<const float4 *>(partials + (2 * (int64_t)segment + 1) * d + column);
    for (int j = segment + 1; j <= last; j += JOIN) {
        float4 x[JOIN]; // all asked for at once: a frequent token has a hundred of them
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            x[k] = j + k <= last
                       ? *reinterpret_cast<const float4 *>(partials + 2 * (int64_t)(j + k) * d + column)
                       : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            add4(sum, x[k]);
    }
    float4 *p = reinterpret_cast<float4 *>(dtable + (int64_t)token * d + column);
    *p = plus_scaled(*p, sum, scale ? scale[0] : 1);
}

void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows,
                    int N, int d)
{
    OP_SCOPE(embedding_grad, N, d);
    if (N <= 0)
        return;
    int64_t segments = ceil_div(N, SEGMENT);
    dim3 grid((unsigned)ceil_div(segments, ROW_WARPS), (unsigned)ceil_div(d, STRIP));
    float *partials = scratch_floats(s, SCRATCH_EMBEDDING_GRAD, (size_t)segments * (2 * (size_t)d + 2));
    int2 *open = reinterpret_cast<int2 *>(partials + segments * 2 * d);
    embedding_grad_kernel<<<grid, ROW_THREADS, 0, s>>>(dtable, g, scale, *rows, N, d, partials, open);
    CHECK_LAUNCH();
    embedding_join_kernel<<<grid, ROW_THREADS, 0, s>>>(dtable, scale, (int)segments, d, partials, open);
    CHECK_LAUNCH();
}
