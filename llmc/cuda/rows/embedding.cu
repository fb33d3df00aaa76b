// Token embeddings: gather, smear of the previous token, norm.
#include "llmc/cuda/device/cuda_common.cuh"

enum { RUN = 16 }; // rows a warp walks in embed_backward

// gate . row[0:inputs], given to all lanes.
static __device__ __forceinline__ float gate_dot(const floatX *row, const floatX *gate, int inputs, int lane)
{
    return warp_sum(lane < inputs ? to_float(row[lane]) * to_float(gate[lane]) : 0);
}

// ---- forward ----------------------------------------------------------------------------------------------

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_forward_kernel(const EmbedForward a, int N, int d)
{
    int lane = threadIdx.x % WARP, t = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (t >= N)
        return;
    int32_t last = a.before ? a.before[t] : t ? a.tokens[t - 1] : -1;
    bool smeared = last >= 0;
    const floatX *row = a.embed + (int64_t)a.tokens[t] * d,
                 *before = smeared ? a.embed + (int64_t)last * d : row;
    uint4 u[VPL], p[VPL];
    load_row(u, row, vectors, lane);
    load_row(p, before, vectors, lane);
    float smear = smeared ? a.lambda[0] * sigmoid(gate_dot(row, a.gate, a.gate_inputs, lane)) : 0;
    float y[VPL][8], sum = 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float b[8];
        unpack8(u[i], y[i]);
        unpack8(p[i], b);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (smeared)
                y[i][k] += smear * b[k];
            sum += y[i][k] * y[i][k];
        }
    }
    float r = 1.0f / sqrtf(warp_sum(sum) / (float)d + RMS_EPS);
    if (lane == 0)
        a.rstd[t] = r;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            y[i][k] *= r;
        u[i] = pack8(y[i]);
    }
    store_row(a.x0 + (int64_t)t * d, u, vectors, lane);
}

void embed_forward(Stream s, const EmbedForward *a, int N, int d)
{
    OP_SCOPE(embed_forward, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d, (embed_forward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(*a, N, d)));
}

// ---- backward ---------------------------------------------------------------------------------------------

// dy of row t: the gradient of y_t through the norm.
template <int VPL>
static __device__ __forceinline__ void norm_gradient(float (&dy)[VPL][8], const EmbedBackward &a, int t,
                                                     int d, int lane)
{
    int64_t at = (int64_t)t * d;
    uint4 u1[VPL], u2[VPL] = {}, ux[VPL];
    load_row(u1, a.dx + at, d / 8, lane);
    if (a.dx0)
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
// then still holds. sums: dlambda in lane 0's [0], dgate in [1] of the first gate_inputs lanes.
template <int VPL>
static __device__ __forceinline__ void embed_backward_run(const EmbedBackward &a, int first, int end, int N,
                                                          int d, int lane, float &dlambda, float &dgate)
{
    int vectors = d / 8;
    float lambda = a.lambda[0], mine = lane < a.gate_inputs ? to_float(a.gate[lane]) : 0;
    float later[VPL][8], later_smear = 0; // lambda * sig(gate . E[token_{t+1}]), dy_{t+1}
#pragma unroll
    for (int i = 0; i < VPL; i++)
#pragma unroll
        for (int k = 0; k < 8; k++)
            later[i][k] = 0;
    if (end < N) {
        norm_gradient<VPL>(later, a, end, d, lane);
        later_smear =
            lambda * sigmoid(gate_dot(a.embed + (int64_t)a.tokens[end] * d, a.gate, a.gate_inputs, lane));
    }
    for (int t = end - 1; t >= first; t--) {
        float dy[VPL][8], dot = 0, smear = 0;
        norm_gradient<VPL>(dy, a, t, d, lane);
        const floatX *row = a.embed + (int64_t)a.tokens[t] * d;
        float input = lane < a.gate_inputs ? to_float(row[lane]) : 0, through_gate = 0;
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
                    o[k] += got; // lanes from gate_inputs on hold 0
                later[i][k] = dy[i][k];
            }
            out[i] = pack8(o);
        }
        store_row(a.de + (int64_t)t * d, out, vectors, lane);
        later_smear = smear;
    }
}

// Sums of the gate's gradient: thread `lane` of every warp holds element `lane`. They and lambda's are
// summed over the grid.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void embed_backward_kernel(EmbedBackward a, int N, int d,
                                                                     float *partials, unsigned *counter)
{
    __shared__ float sums[ROW_WARPS][MAX_GATE_INPUTS + 1];
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = (blockIdx.x * ROW_WARPS + warp) * RUN,
        inputs = a.gate_inputs;
    float my_gate = 0, my_lambda = 0;
    if (first < N)
        embed_backward_run<VPL>(a, first, min(first + RUN, N), N, d, lane, my_lambda, my_gate);
    if (lane < inputs)
        sums[warp][lane] = my_gate;
    if (lane == 0)
        sums[warp][inputs] = my_lambda;
    __syncthreads();
    if (threadIdx.x <= inputs) {
        float x = 0;
        for (int w = 0; w < ROW_WARPS; w++)
            x += sums[w][threadIdx.x];
        partials[blockIdx.x * (inputs + 1) + threadIdx.x] = x;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    for (int k = warp; k <= inputs; k += ROW_WARPS) {
        float x = 0;
        for (int b = lane; b < gridDim.x; b += WARP)
            x += __ldcg(partials + b * (inputs + 1) + k);
        x = warp_sum(x);
        if (lane == 0)
            *(k < inputs ? a.dgate + k : a.dlambda) += x;
    }
}

void embed_backward(Stream s, const EmbedBackward *a, int N, int d)
{
    OP_SCOPE(embed_backward, N, d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS * RUN);
    float *partials = scratch_floats(s, SCRATCH_EMBED, (size_t)blocks * (size_t)(a->gate_inputs + 1));
    DISPATCH_WIDTH(d,
                   (embed_backward_kernel<VPL>
                    <<<blocks, ROW_THREADS, 0, s>>>(*a, N, d, partials, scratch_counter(s, SCRATCH_EMBED))));
}
