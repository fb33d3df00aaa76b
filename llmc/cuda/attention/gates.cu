// Attention gates outside of the attention kernels: yg = y * sig(gate_w . h[0:inputs]) per head. One warp per
// token; bound by memory.
//
// Backward, the gate is moved in front of the softmax: with p the weights, delta = rowsum(dyg * yg) =
// rowsum(dy * y), dy = sig dyg,
//   dv = p^T dy = (sig p)^T dyg,   ds = p * (dy v^T - delta) = sig p * (dyg v^T - delta / sig),
// so attention kernels without gates compute the right gradients from dyg, lse - log(sig) and delta / sig.
#include "llmc/cuda/attention/gates.cuh"
#include "llmc/cuda/attention/attention.h"

namespace
{

enum { THREADS = 1024, WARPS = THREADS / WARP }; // of a block of the backward pass for heads of width 128
enum { BACKWARD_CTAS = 4 };                      // a multiprocessor, at most, for other widths

// ---- forward, for attention kernels that do not apply the gate --------------------------------------------

// sig for head `head`: lane l has computed that of head l; a lane computes those of heads from 32 on itself.
__device__ __forceinline__ float gate_of(float mine, int head, const floatX *h, const floatX *gate_w,
                                         int inputs)
{
    float got = __shfl_sync(0xffffffffu, mine, head & 31);
    return head < WARP ? got : sigmoid(gate_input(h, gate_w + head * inputs, inputs));
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void gate_kernel(floatX *y, const floatX *h, const floatX *gate_w,
                                                           int inputs, int N, int H, int e)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, d = H * e,
        vectors = d / 8;
    if (row >= N)
        return;
    int64_t at = (int64_t)row * d;
    uint4 u[VPL];
    load_row(u, y + at, vectors, lane);
    float mine = lane < H ? sigmoid(gate_input(h + at, gate_w + lane * inputs, inputs)) : 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float f[8], gate = gate_of(mine, min((lane + WARP * i) * 8 / e, H - 1), h + at, gate_w, inputs);
        unpack8(u[i], f);
#pragma unroll
        for (int k = 0; k < 8; k++)
            f[k] *= gate;
        u[i] = pack8(f);
    }
    store_row(y + at, u, vectors, lane);
}

// ---- backward --------------------------------------------------------------------------------------------

// Called by the lane that has a head's sums.  x: the gate before the sigmoid; delta: the row's sum of dyg *
// yg. Returns dgate.
__device__ __forceinline__ float store_row_sums(const GateBackward &a, int64_t unit, float x, float delta)
{
    float sig = sigmoid(x),
          grows = log1pf(expf(-fabsf(x))) + fmaxf(-x, 0); // -log(sig), also where sig is nearly 0
    float dgate = delta * (1 - sig);
    a.dgate[unit] = dgate;
    a.lse_gated[unit] = a.lse[unit] + grows;
    a.row_sums[unit] = sig > 0 ? delta / sig : 0;
    return dgate;
}

__device__ __forceinline__ float inverse_gate(float x)
{
    float sig = sigmoid(x);
    return sig > 0 ? 1 / sig : 0;
}

__device__ __forceinline__ float dot_vectors(uint4 a, uint4 b)
{
    float x[8], y[8], dot = 0;
    unpack8(a, x);
    unpack8(b, y);
#pragma unroll
    for (int k = 0; k < 8; k++)
        dot += x[k] * y[k];
    return dot;
}

__device__ __forceinline__ uint4 scaled_vector(uint4 v, float factor)
{
    float x[8];
    unpack8(v, x);
#pragma unroll
    for (int k = 0; k < 8; k++)
        x[k] *= factor;
    return pack8(x);
}

// Head dimension 128: half a warp has a head in vector i of its lanes, and lane j of the half has input j of
// the gate.
enum { HALF_WARP = WARP / 2 };
template <int VPL>
__global__ __launch_bounds__(THREADS, 1) void gate_backward_128_kernel(GateBackward a, int N, int H,
                                                                       float *partials, unsigned *counter)
{
    extern __shared__ float shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, j = lane % HALF_WARP,
        my_head = lane / HALF_WARP + 2 * j, d = H * 128, inputs = a.gate_inputs;
    float weight[VPL], sums[VPL] = {}; // of the lane's input, for the head in vector i
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int head = lane / HALF_WARP + 2 * i;
        weight[i] = j < inputs && head < H ? to_float(a.gate_w[head * inputs + j]) : 0;
    }
    for (int row = blockIdx.x * WARPS + warp; row < N; row += gridDim.x * WARPS) {
        int64_t at = (int64_t)row * d;
        uint4 dyg[VPL], yg[VPL];
        float input = j < inputs ? to_float(a.h[at + j]) : 0, my_x = 0, my_dot = 0, dgate = 0;
        load_row(dyg, a.dyg + at, d / 8, lane);
        load_row(yg, a.yg + at, d / 8, lane);
#pragma unroll
        for (int i = 0; i < VPL; i++) {
            float x = group_sum(input * weight[i], HALF_WARP, 0xffffffffu), dot = dot_vectors(dyg[i], yg[i]);
            dot = group_sum(dot, HALF_WARP, 0xffffffffu);
            if (i == j) {
                my_x = x;
                my_dot = dot;
            }
            if (a.y)
                yg[i] = scaled_vector(yg[i], inverse_gate(x));
        }
        if (j < VPL && my_head < H)
            dgate = store_row_sums(a, (int64_t)row * H + my_head, my_x, my_dot);
#pragma unroll
        for (int i = 0; i < VPL; i++)
            sums[i] += __shfl_sync(0xffffffffu, dgate, i, HALF_WARP) * input;
        if (a.y)
            store_row(a.y + at, yg, d / 8, lane);
    }
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int head = lane / HALF_WARP + 2 * i;
        if (j < inputs && head < H)
            shared[(warp * H + head) * inputs + j] = sums[i];
    }
    add_gate_sums(a.dgate_w, shared, H * inputs, partials, counter);
}

// Any head dimension: the warp loops over heads, lanes over vectors.
__global__ __launch_bounds__(ROW_THREADS) void gate_backward_any_kernel(GateBackward a, int N, int H, int e,
                                                                        float *partials, unsigned *counter)
{
    extern __shared__ float shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = H * e, inputs = a.gate_inputs,
        pairs = H * inputs;
    float *sums = shared + warp * pairs;
    for (int head = 0; head < H && lane < inputs; head++)
        sums[head * inputs + lane] = 0; // by the lane that adds there
    for (int row = blockIdx.x * ROW_WARPS + warp; row < N; row += gridDim.x * ROW_WARPS) {
        float input = lane < inputs ? to_float(a.h[(int64_t)row * d + lane]) : 0;
#pragma unroll 2
        for (int head = 0; head < H; head++) {
            int64_t unit = (int64_t)row * H + head;
            bool mine = lane < e / 8;
            uint4 dyg = mine ? load_vec(a.dyg + unit * e, lane) : make_uint4(0, 0, 0, 0);
            uint4 yg = mine ? load_vec(a.yg + unit * e, lane) : make_uint4(0, 0, 0, 0);
            float weight = lane < inputs ? to_float(a.gate_w[head * inputs + lane]) : 0,
                  x = warp_sum(input * weight);
            float dot = warp_sum(dot_vectors(dyg, yg)), dgate = 0;
            if (lane == 0)
                dgate = store_row_sums(a, unit, x, dot);
            dgate = __shfl_sync(0xffffffffu, dgate, 0);
            if (lane < inputs)
                sums[head * inputs + lane] += dgate * input;
            if (a.y && mine)
                store_vec(a.y + unit * e, lane, scaled_vector(yg, inverse_gate(x)));
        }
    }
    add_gate_sums(a.dgate_w, shared, pairs, partials, counter);
}

// Without a gate: only the row sums.
__global__ __launch_bounds__(ROW_THREADS) void row_sums_kernel(float *sums, const floatX *dy, const floatX *y,
                                                               int64_t rows, int e, int lanes)
{
    int64_t row = ((int64_t)blockIdx.x * ROW_THREADS + threadIdx.x) >> __ffs(lanes) - 1;
    int j = threadIdx.x & (lanes - 1);
    bool has = row < rows && 8 * j < e;
    float dot = has ? dot_vectors(load_vec(dy + row * e, j), load_vec(y + row * e, j)) : 0;
    dot = group_sum(dot, lanes, 0xffffffffu);
    if (has && j == 0)
        sums[row] = dot;
}

} // namespace

void attention_row_sums(Stream s, float *sums, const floatX *dy, const floatX *y, int64_t rows, int e)
{
    int lanes = head_lanes(e);
    unsigned blocks = (unsigned)ceil_div(rows * lanes, ROW_THREADS);
    row_sums_kernel<<<blocks, ROW_THREADS, 0, s>>>(sums, dy, y, rows, e, lanes);
    CHECK_LAUNCH();
}

void attention_gate_forward(Stream s, const AttentionCall *c)
{
    if (c->N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(c->N, ROW_WARPS);
    DISPATCH_WIDTH(c->H * c->e,
                   (gate_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(c->y, c->h, c->gate_w, c->gate_inputs,
                                                                    c->N, c->H, c->e)));
}

size_t attention_gate_sums(int H)
{
    return (size_t)BACKWARD_CTAS * (size_t)device_state.sms * (size_t)H * MAX_GATE_INPUTS;
}

void attention_gate_backward(Stream s, const GateBackward *a, int N, int H, int e)
{
    if (N <= 0)
        return;
    size_t pairs = (size_t)(H * a->gate_inputs);
    unsigned *counter = scratch_counter(s, SCRATCH_GATES);
    if (e == 128) {
        unsigned blocks = (unsigned)min_i64(ceil_div(N, WARPS), device_state.sms);
        size_t bytes = WARPS * pairs * sizeof(float);
        float *partials = scratch_floats(s, SCRATCH_GATES, blocks * pairs);
        DISPATCH_WIDTH(H * e, (gate_backward_128_kernel<VPL>
                               <<<blocks, THREADS, bytes, s>>>(*a, N, H, partials, counter)));
    } else {
        unsigned blocks = (unsigned)row_blocks(N, BACKWARD_CTAS);
        size_t bytes = ROW_WARPS * pairs * sizeof(float);
        float *partials = scratch_floats(s, SCRATCH_GATES, blocks * pairs);
        CUDA_CHECK(cudaFuncSetAttribute(gate_backward_any_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)bytes));
        gate_backward_any_kernel<<<blocks, ROW_THREADS, bytes, s>>>(*a, N, H, e, partials, counter);
    }
    CHECK_LAUNCH();
}
