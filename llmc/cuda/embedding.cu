// Token embeddings: gather, smear of the previous token, norm; and the gradients of table rows as sums in a fixed order.
#include "llmc/cuda/cuda_common.cuh"

static const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23
enum { GATE_WIDTH = 12, RUN = 16 /* rows a warp walks in embed_backward */, SEGMENT = 16 /* positions a warp sums */,
       JOIN_WARPS = 4 };

// gate . row[0:12], given to all lanes.
static __device__ __forceinline__ float gate_dot(const floatX *row, const floatX *gate, int lane)
{
    return warp_sum(lane < GATE_WIDTH ? to_float(row[lane]) * to_float(gate[lane]) : 0);
}

// ---- forward -------------------------------------------------------------------------------------------------------------

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_forward_kernel(floatX *x0, float *rstd, const int32_t *tokens,
                                                                    const floatX *embed, const floatX *gate, const float *lambda,
                                                                    int N, int d)
{
    int lane = threadIdx.x % WARP, t = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (t >= N) return;
    const floatX *row = embed + (int64_t)tokens[t] * d, *before = t ? embed + (int64_t)tokens[t - 1] * d : row;
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
            if (t) y[i][k] += smear * b[k];
            sum += y[i][k] * y[i][k];
        }
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)d + RMS_EPS);
    if (lane == 0) rstd[t] = r;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++) y[i][k] *= r;
        u[i] = pack8(y[i]);
    }
    store_row(x0 + (int64_t)t * d, u, vectors, lane);
}

void embed_forward(Stream s, floatX *x0, float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate,
                   const float *lambda, int N, int d)
{
    if (N <= 0) return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d, (embed_forward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(x0, rstd, tokens, embed, gate, lambda, N, d)));
}

// ---- backward ------------------------------------------------------------------------------------------------------------

typedef struct {
    floatX *de;
    const floatX *dx, *dx0, *x0;
    const float *rstd;
    const int32_t *tokens;
    const floatX *embed, *gate;
    const float *lambda;
} EmbedBackward;

// dy of row t: the gradient of y_t through the norm.
template <int VPL>
static __device__ __forceinline__ void norm_gradient(float (&dy)[VPL][8], const EmbedBackward &a, int t, int d, int lane)
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
        for (int k = 0; k < 8; k++) dy[i][k] = r * (dy[i][k] - x[k] * dot);
    }
}

// A warp walks RUN rows from the last to the first, because row t also gets gradient from y_{t+1}, which it then still holds.
// sums: dlambda in lane 0's [0], dgate in lanes 0..11's [1].
template <int VPL>
static __device__ __forceinline__ void embed_backward_run(const EmbedBackward &a, int first, int end, int N, int d, int lane,
                                                          float &dlambda, float &dgate)
{
    int vectors = d / 8;
    float lambda = a.lambda[0], mine = lane < GATE_WIDTH ? to_float(a.gate[lane]) : 0;
    float later[VPL][8], later_smear = 0; // lambda * sig(gate . E[token_{t+1}]), dy_{t+1}
#pragma unroll
    for (int i = 0; i < VPL; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) later[i][k] = 0;
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
                for (int k = 0; k < 8; k++) dot += dy[i][k] * e[k];
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
                if (i == 0 && lane < 2) o[k] += got; // lanes 12 and up hold 0
                later[i][k] = dy[i][k];
            }
            out[i] = pack8(o);
        }
        store_row(a.de + (int64_t)t * d, out, vectors, lane);
        later_smear = smear;
    }
}

// Sums of the gate's gradient: thread `lane` of every warp holds element `lane`; 13 values are summed over the grid.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_backward_kernel(EmbedBackward a, float *dgate, float *dlambda, int N, int d,
                                                                     float *partials, unsigned *counter)
{
    __shared__ float sums[ROW_WARPS][GATE_WIDTH + 1];
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = (blockIdx.x * ROW_WARPS + warp) * RUN;
    float my_gate = 0, my_lambda = 0;
    if (first < N) embed_backward_run<VPL>(a, first, min(first + RUN, N), N, d, lane, my_lambda, my_gate);
    if (lane < GATE_WIDTH) sums[warp][lane] = my_gate;
    if (lane == 0) sums[warp][GATE_WIDTH] = my_lambda;
    __syncthreads();
    if (threadIdx.x <= GATE_WIDTH) {
        float x = 0;
        for (int w = 0; w < ROW_WARPS; w++) x += sums[w][threadIdx.x];
        partials[blockIdx.x * (GATE_WIDTH + 1) + threadIdx.x] = x;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int k = warp; k <= GATE_WIDTH; k += ROW_WARPS) {
        float x = 0;
        for (int b = lane; b < gridDim.x; b += WARP) x += __ldcg(partials + b * (GATE_WIDTH + 1) + k);
        x = warp_sum(x);
        if (lane == 0) *(k < GATE_WIDTH ? dgate + k : dlambda) += x;
    }
}

void embed_backward(Stream s, floatX *de, float *dgate, float *dlambda, const floatX *dx, const floatX *dx0, const floatX *x0,
                    const float *rstd, const int32_t *tokens, const floatX *embed, const floatX *gate, const float *lambda, int N,
                    int d)
{
    if (N <= 0) return;
    EmbedBackward a = {de, dx, dx0, x0, rstd, tokens, embed, gate, lambda};
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS * RUN);
    float *partials = scratch_floats((size_t)blocks * (GATE_WIDTH + 1));
    DISPATCH_WIDTH(d, (embed_backward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(a, dgate, dlambda, N, d, partials,
                                                                                 device_state.counter)));
}

// ---- rows of a table -----------------------------------------------------------------------------------------------------
// The positions, sorted by token, are cut into segments. A warp sums its segment; tokens that lie inside go to the table at
// once, the first and last token of a segment may go on in the neighbours: their sums wait in scratch (segments, 2, d) for the
// second kernel, which adds them in order. So a token that occurs a thousand times costs no more than a thousand tokens.

template <int VPL>
static __device__ __forceinline__ void add_to_table(float *row, const float (&sum)[VPL][8], float scale, int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        if (lane + WARP * i >= vectors) continue;
        float4 *p = reinterpret_cast<float4 *>(row) + 2 * (lane + WARP * i);
        float4 a = p[0], b = p[1];
        const float *f = sum[i];
        p[0] = make_float4(a.x + scale * f[0], a.y + scale * f[1], a.z + scale * f[2], a.w + scale * f[3]);
        p[1] = make_float4(b.x + scale * f[4], b.y + scale * f[5], b.z + scale * f[6], b.w + scale * f[7]);
    }
}

template <int VPL>
static __device__ __forceinline__ void save_partial(float *row, const float (&sum)[VPL][8], int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        if (lane + WARP * i >= vectors) continue;
        float4 *p = reinterpret_cast<float4 *>(row) + 2 * (lane + WARP * i);
        p[0] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        p[1] = make_float4(sum[i][4], sum[i][5], sum[i][6], sum[i][7]);
    }
}

template <int VPL>
static __device__ __forceinline__ void add_partial(float (&sum)[VPL][8], const float4 *row, int vectors, int lane)
{
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i;
        if (v >= vectors) continue;
        float4 a = row[2 * v], b = row[2 * v + 1];
        const float f[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int k = 0; k < 8; k++) sum[i][k] += f[k];
    }
}

// The row whose positions contain `position`.
static __device__ __forceinline__ int find_row(const int32_t *row_start, int rows, int position)
{
    int lo = 0, hi = rows; // row_start[lo] <= position < row_start[hi]
    while (hi - lo > 1) {
        int mid = (lo + hi) / 2;
        if (row_start[mid] <= position) lo = mid;
        else hi = mid;
    }
    return lo;
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embedding_grad_kernel(float *dtable, const floatX *g, const float *scale,
                                                                     TokenRows rows, int N, int d, float *partials)
{
    int lane = threadIdx.x % WARP, segment = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    int begin = segment * SEGMENT, end = min(begin + SEGMENT, N);
    if (begin >= N) return;
    float factor = scale ? scale[0] : 1;
    int r = find_row(rows.row_start, *rows.num_rows, begin), at = begin;
    static_assert(SEGMENT <= WARP, "a lane holds one position");
    int mine = begin + lane < end ? rows.order[begin + lane] : 0; // positions, one a lane
    while (at < end) {
        int start = rows.row_start[r], stop = rows.row_start[r + 1], until = min(stop, end);
        float sum[VPL][8];
#pragma unroll
        for (int i = 0; i < VPL; i++)
#pragma unroll
            for (int k = 0; k < 8; k++) sum[i][k] = 0;
#pragma unroll 4
        for (; at < until; at++) {
            int position = __shfl_sync(0xffffffffu, mine, at - begin);
            uint4 u[VPL];
            load_row(u, g + (int64_t)position * d, vectors, lane);
#pragma unroll
            for (int i = 0; i < VPL; i++) {
                float f[8];
                unpack8(u[i], f);
#pragma unroll
                for (int k = 0; k < 8; k++) sum[i][k] += f[k];
            }
        }
        if (start >= begin && stop <= end) add_to_table<VPL>(dtable + (int64_t)rows.row_token[r] * d, sum, factor, vectors, lane);
        else
            save_partial<VPL>(partials + (2 * (int64_t)segment + (start >= begin)) * d, sum, vectors,
                              lane); // 0: comes in, 1: begins here
        r++;
    }
}

// One block for each segment in which a token begins that goes on in the next: adds up that token's partial sums. Each warp takes
// every JOIN_WARPS-th, the first adds the warps'.
template <int VPL>
__global__ __launch_bounds__(JOIN_WARPS *WARP) void embedding_join_kernel(float *dtable, const float *scale, TokenRows rows,
                                                                          int N, int d, const float *partials)
{
    __shared__ float4 sums[JOIN_WARPS - 1][2 * VPL * WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, segment = blockIdx.x, vectors = d / 8;
    int begin = segment * SEGMENT, end = begin + SEGMENT;
    if (end >= N) return;
    int r = find_row(rows.row_start, *rows.num_rows, end - 1), start = rows.row_start[r], stop = rows.row_start[r + 1];
    if (start < begin || stop <= end) return;
    int last = (stop - 1) / SEGMENT;
    float sum[VPL][8];
#pragma unroll
    for (int i = 0; i < VPL; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) sum[i][k] = 0;
#pragma unroll 4
    for (int j = segment + warp; j <= last; j += JOIN_WARPS)
        add_partial<VPL>(sum, reinterpret_cast<const float4 *>(partials + (2 * (int64_t)j + (j == segment)) * d), vectors, lane);
    if (warp) save_partial<VPL>(reinterpret_cast<float *>(sums[warp - 1]), sum, vectors, lane);
    __syncthreads();
    if (warp) return;
    for (int w = 1; w < JOIN_WARPS; w++) add_partial<VPL>(sum, sums[w - 1], vectors, lane);
    add_to_table<VPL>(dtable + (int64_t)rows.row_token[r] * d, sum, scale ? scale[0] : 1, vectors, lane);
}

void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows, int N, int d)
{
    if (N <= 0) return;
    int64_t segments = ceil_div(N, SEGMENT);
    unsigned blocks = (unsigned)ceil_div(segments, ROW_WARPS);
    float *partials = scratch_floats((size_t)segments * 2 * (size_t)d);
    DISPATCH_WIDTH(d, (embedding_grad_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(dtable, g, scale, *rows, N, d, partials)));
    DISPATCH_WIDTH(
        d, (embedding_join_kernel<VPL><<<(unsigned)segments, JOIN_WARPS * WARP, 0, s>>>(dtable, scale, *rows, N, d, partials)));
}
