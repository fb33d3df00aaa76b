// Attention gates beside attention's kernels: yg = y * sig(gate_w . h[0:12]) per head. A warp takes a token.
//
// Backward, the gate comes before softmax does: with p the weights, delta = rowsum(dyg * yg) = rowsum(dy * y) and dy = sig dyg,
//   dv = p^T dy = (sig p)^T dyg,   ds = p * (dy v^T - delta) = sig p * (dyg v^T - delta / sig),
// so kernels that know nothing of gates give the right gradients from dyg, lse - log(sig) and delta / sig.
#include "llmc/cuda/gates.cuh"
#include "llmc/cuda/attention.h"

namespace {

enum { THREADS = 512, WARPS = THREADS / WARP, BLOCKS_PER_SM = 2 };

// ---- forward, for kernels that leave y without its gate --------------------------------------------------------------------

// sig for head `head`: lane l has computed that of head l; heads beyond the 32nd are computed by whoever asks.
__device__ __forceinline__ float gate_of(float mine, int head, const floatX *h, const floatX *gate_w)
{
    float got = __shfl_sync(0xffffffffu, mine, head & 31);
    return head < WARP ? got : sigmoid(gate_input(h, gate_w + head * GATE_WIDTH));
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void gate_kernel(floatX *y, const floatX *h, const floatX *gate_w, int N, int H, int e)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, d = H * e, vectors = d / 8;
    if (row >= N) return;
    int64_t at = (int64_t)row * d;
    uint4 u[VPL];
    load_row(u, y + at, vectors, lane);
    float mine = lane < H ? sigmoid(gate_input(h + at, gate_w + lane * GATE_WIDTH)) : 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        float f[8], gate = gate_of(mine, min((lane + WARP * i) * 8 / e, H - 1), h + at, gate_w);
        unpack8(u[i], f);
#pragma unroll
        for (int k = 0; k < 8; k++) f[k] *= gate;
        u[i] = pack8(f);
    }
    store_row(y + at, u, vectors, lane);
}

// ---- backward --------------------------------------------------------------------------------------------------------------

// What a warp keeps of its token, and its sums of dgate^T h over all its tokens.
struct Token {
    float *sig, *dgate, *input, *sums; // (H), (H), (GATE_WIDTH), (H, GATE_WIDTH), in shared memory
};
__host__ __device__ constexpr int token_floats(int H) { return 2 * H + GATE_WIDTH + H * GATE_WIDTH; }

__device__ __forceinline__ void find_gates(const Token &t, const GateBackward &a, const float *weight, int64_t at, int H)
{
    int lane = threadIdx.x % WARP;
    if (lane < GATE_WIDTH) t.input[lane] = to_float(a.h[at + lane]);
    __syncwarp();
    for (int head = lane; head < H; head += WARP) {
        float x = 0;
#pragma unroll
        for (int j = 0; j < GATE_WIDTH; j++) x += t.input[j] * weight[head * GATE_WIDTH + j];
        t.sig[head] = x;
    }
    __syncwarp();
}

// By one lane.  x: the gate before the sigmoid; delta: the row's sum of dyg * yg
__device__ __forceinline__ void store_row_sums(const GateBackward &a, float *dgate, int64_t unit, float x, float delta)
{
    float sig = sigmoid(x), grows = log1pf(expf(-fabsf(x))) + fmaxf(-x, 0); // -log(sig), also where sig is nearly 0
    a.dgate[unit] = *dgate = delta * (1 - sig);
    a.lse_gated[unit] = a.lse[unit] + grows;
    a.row_sums[unit] = sig > 0 ? delta / sig : 0;
}

// For head widths whose vectors are a power of two of at most 32: a group of lanes sums its own head.
template <int VPL>
__device__ __forceinline__ void sum_vectors(const Token &t, const GateBackward &a, const uint4 (&dyg)[VPL], uint4 (&yg)[VPL],
                                            int row, int H, int e)
{
    int lane = threadIdx.x % WARP, vectors = H * e / 8;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i, head = min(v * 8 / e, H - 1);
        float g[8], f[8], dot = 0;
        unpack8(dyg[i], g);
        unpack8(yg[i], f);
#pragma unroll
        for (int k = 0; k < 8; k++) dot += g[k] * f[k];
        dot = group_sum(dot, e / 8, 0xffffffffu);
        float x = t.sig[head];
        if (v < vectors && v * 8 % e == 0) store_row_sums(a, t.dgate + head, (int64_t)row * H + head, x, dot);
        if (a.y) {
            float sig = sigmoid(x), inverse = sig > 0 ? 1 / sig : 0;
#pragma unroll
            for (int k = 0; k < 8; k++) f[k] *= inverse;
            yg[i] = pack8(f);
        }
    }
    if (a.y) store_row(a.y + (int64_t)row * H * e, yg, vectors, lane);
}

// Any head width: the warp takes one head after the other.
__device__ __forceinline__ void sum_heads(const Token &t, const GateBackward &a, int row, int H, int e)
{
    int lane = threadIdx.x % WARP;
    for (int head = 0; head < H; head++) {
        int64_t at = ((int64_t)row * H + head) * e;
        float dot = 0, x = t.sig[head], sig = sigmoid(x), inverse = sig > 0 ? 1 / sig : 0;
        for (int i = lane; i < e; i += WARP) {
            float f = to_float(a.yg[at + i]);
            dot += to_float(a.dyg[at + i]) * f;
            if (a.y) a.y[at + i] = __float2bfloat16(f * inverse);
        }
        dot = warp_sum(dot);
        if (lane == 0) store_row_sums(a, t.dgate + head, (int64_t)row * H + head, x, dot);
    }
}

// sums += the warps' sums, in order; the last block adds the blocks'.
__device__ __forceinline__ void add_sums(float *dgate_w, float *shared, int pairs, int pitch, float *partials, unsigned *counter)
{
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += THREADS) {
        float x = 0;
        for (int w = 0; w < WARPS; w++) x += shared[w * pitch + p];
        partials[(int64_t)blockIdx.x * pairs + p] = x;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int p = lane; p < pairs; p += WARP) {
        float x = 0;
#pragma unroll 8
        for (int b = warp; b < gridDim.x; b += WARPS) x += __ldcg(partials + (int64_t)b * pairs + p);
        shared[warp * pitch + p] = x;
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += THREADS) {
        float x = 0;
        for (int w = 0; w < WARPS; w++) x += shared[w * pitch + p];
        dgate_w[p] += x;
    }
}

template <int VPL, bool POWER>
__global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void gate_backward_kernel(GateBackward a, int N, int H, int e,
                                                                               float *partials, unsigned *counter)
{
    extern __shared__ float shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = H * e, pairs = H * GATE_WIDTH, pitch = token_floats(H);
    float *weight = shared + WARPS * pitch, *mine = shared + warp * pitch;
    Token t = {mine + pairs, mine + pairs + H, mine + pairs + 2 * H, mine};
    for (int p = threadIdx.x; p < pairs; p += THREADS) weight[p] = to_float(a.gate_w[p]);
    for (int p = lane; p < pairs; p += WARP) t.sums[p] = 0;
    __syncthreads();
    for (int row = blockIdx.x * WARPS + warp; row < N; row += gridDim.x * WARPS) {
        int64_t at = (int64_t)row * d;
        uint4 dyg[VPL], yg[VPL];
        if (POWER) load_row(dyg, a.dyg + at, d / 8, lane), load_row(yg, a.yg + at, d / 8, lane);
        find_gates(t, a, weight, at, H);
        if (POWER) sum_vectors(t, a, dyg, yg, row, H, e);
        else sum_heads(t, a, row, H, e);
        __syncwarp();
        for (int p = lane; p < pairs; p += WARP) t.sums[p] += t.dgate[p / GATE_WIDTH] * t.input[p % GATE_WIDTH];
        __syncwarp();
    }
    add_sums(a.dgate_w, shared, pairs, pitch, partials, counter);
}

template <int VPL, bool POWER> void launch_backward(const GateBackward *a, int N, int H, int e, Stream s)
{
    int blocks = (int)min_i64(ceil_div(N, WARPS), (int64_t)device_state.sms * BLOCKS_PER_SM);
    size_t pairs = (size_t)H * GATE_WIDTH, bytes = ((size_t)token_floats(H) * WARPS + pairs) * sizeof(float);
    float *partials = scratch_floats((size_t)blocks * pairs);
    if (bytes > 48 * 1024)
        CUDA_CHECK(cudaFuncSetAttribute(gate_backward_kernel<VPL, POWER>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    gate_backward_kernel<VPL, POWER><<<blocks, THREADS, bytes, s>>>(*a, N, H, e, partials, device_state.counter);
}

} // namespace

void attention_gate_forward(Stream s, floatX *y, const floatX *h, const floatX *gate_w, int N, int H, int e)
{
    if (N <= 0) return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(H * e, (gate_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(y, h, gate_w, N, H, e)));
}

void attention_gate_backward(Stream s, const GateBackward *a, int N, int H, int e)
{
    if (N <= 0) return;
    if (e <= 256 && (e & (e - 1)) == 0) DISPATCH_WIDTH(H * e, (launch_backward<VPL, true>(a, N, H, e, s)));
    else launch_backward<1, false>(a, N, H, e, s);
    CHECK_LAUNCH();
}
