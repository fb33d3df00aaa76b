// Attention gates: y * sig(gate_w . h[0:12]) per head, and backward. One warp a token.
#include "llmc/cuda/cuda_common.cuh"
#include "llmc/cuda/gates.cuh"

enum { WEIGHT_ROWS = 128 /* rows a block of the weight gradient sums */ };

// sig for head `head`: lane l has computed that of head l; heads beyond the 32nd are computed by whoever asks.
static __device__ __forceinline__ float gate_of(float mine, int head, const floatX *h, const floatX *gate_w)
{
    float got = __shfl_sync(0xffffffffu, mine, head & 31);
    return head < WARP ? got : sigmoid(gate_input(h, gate_w + head * GATE_WIDTH));
}

template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void attn_gate_forward_kernel(floatX *yg, const floatX *y, const floatX *h,
                                                                        const floatX *gate_w, int N, int H, int e)
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
    store_row(yg + at, u, vectors, lane);
}

void attn_gate_forward(Stream s, floatX *yg, const floatX *y, const floatX *h, const floatX *gate_w, int N, int H, int e)
{
    if (N <= 0) return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(H * e, (attn_gate_forward_kernel<VPL><<<blocks, ROW_THREADS, 0, s>>>(yg, y, h, gate_w, N, H, e)));
}

// Head widths whose vectors are a power of two of at most 32: a group of lanes sums its own head.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void attn_gate_backward_kernel(floatX *dy, float *dgate, float *row_sums,
                                                                         const floatX *dyg, const floatX *y, const floatX *h,
                                                                         const floatX *gate_w, int N, int H, int e)
{
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, d = H * e, vectors = d / 8;
    if (row >= N) return;
    int64_t at = (int64_t)row * d;
    uint4 ug[VPL], uy[VPL];
    load_row(ug, dyg + at, vectors, lane);
    load_row(uy, y + at, vectors, lane);
    float mine = lane < H ? sigmoid(gate_input(h + at, gate_w + lane * GATE_WIDTH)) : 0;
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        int v = lane + WARP * i, head = min(v * 8 / e, H - 1);
        float g[8], f[8], dot = 0, gate = gate_of(mine, head, h + at, gate_w);
        unpack8(ug[i], g);
        unpack8(uy[i], f);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            dot += g[k] * f[k];
            g[k] *= gate;
        }
        dot = group_sum(dot, e / 8, 0xffffffffu);
        if (v < vectors && v * 8 % e == 0) {
            row_sums[(int64_t)row * H + head] = dot * gate;
            dgate[(int64_t)row * H + head] = dot * gate * (1 - gate);
        }
        ug[i] = pack8(g);
    }
    store_row(dy + at, ug, vectors, lane);
}

// Any head width: one warp a head.
__global__ __launch_bounds__(ROW_THREADS) void attn_gate_backward_any_kernel(floatX *dy, float *dgate, float *row_sums,
                                                                             const floatX *dyg, const floatX *y,
                                                                             const floatX *h, const floatX *gate_w, int N, int H,
                                                                             int e)
{
    int lane = threadIdx.x % WARP;
    int64_t unit = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP, n = unit / H, at = unit * e;
    if (unit >= (int64_t)N * H) return;
    float gate = sigmoid(gate_input(h + n * H * e, gate_w + unit % H * GATE_WIDTH)), dot = 0;
    for (int i = lane; i < e; i += WARP) {
        float g = to_float(dyg[at + i]);
        dot += g * to_float(y[at + i]);
        dy[at + i] = __float2bfloat16(g * gate);
    }
    dot = warp_sum(dot);
    if (lane == 0) row_sums[unit] = dot * gate, dgate[unit] = dot * gate * (1 - gate);
}

// dgate_w[h][j] += sum over rows of dgate[row][h] * h[row][j]. A block sums WEIGHT_ROWS rows: each warp a stretch of them, a lane
// owns pairs (h, j). The last block adds the blocks' sums in order.
__global__ __launch_bounds__(ROW_THREADS) void gate_weight_kernel(float *dgate_w, const float *dgate, const floatX *h, int N,
                                                                  int H, int d, float *partials, unsigned *counter)
{
    __shared__ bool last;
    __shared__ float inputs[WEIGHT_ROWS][GATE_WIDTH], sums[ROW_WARPS][WARP];
    int first = blockIdx.x * WEIGHT_ROWS, rows = min(WEIGHT_ROWS, N - first), pairs = H * GATE_WIDTH;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = threadIdx.x; i < rows * GATE_WIDTH; i += ROW_THREADS)
        inputs[i / GATE_WIDTH][i % GATE_WIDTH] = to_float(h[(int64_t)(first + i / GATE_WIDTH) * d + i % GATE_WIDTH]);
    for (int start = 0; start < pairs; start += WARP) {
        __syncthreads();
        int p = min(start + lane, pairs - 1), end = min((warp + 1) * (WEIGHT_ROWS / ROW_WARPS), rows);
        float x = 0;
#pragma unroll 8
        for (int r = warp * (WEIGHT_ROWS / ROW_WARPS); r < end; r++)
            x += dgate[(int64_t)(first + r) * H + p / GATE_WIDTH] * inputs[r][p % GATE_WIDTH];
        sums[warp][lane] = x;
        __syncthreads();
        if (warp == 0 && start + lane < pairs) {
            x = 0;
            for (int w = 0; w < ROW_WARPS; w++) x += sums[w][lane];
            partials[(int64_t)blockIdx.x * pairs + p] = x;
            __threadfence();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int p = warp; p < pairs; p += ROW_WARPS) {
        float x = 0;
#pragma unroll 8
        for (int b = lane; b < gridDim.x; b += WARP) x += __ldcg(partials + (int64_t)b * pairs + p);
        x = warp_sum(x);
        if (lane == 0) dgate_w[p] += x;
    }
}

void attn_gate_backward(Stream s, floatX *dy, float *dgate, float *row_sums, float *dgate_w, const floatX *dyg, const floatX *y,
                        const floatX *h, const floatX *gate_w, int N, int H, int e)
{
    if (N <= 0) return;
    bool fast = e <= 256 && (e & (e - 1)) == 0;
    unsigned blocks = (unsigned)ceil_div(fast ? N : (int64_t)N * H, ROW_WARPS);
    if (fast)
        DISPATCH_WIDTH(H * e, (attn_gate_backward_kernel<VPL>
                               <<<blocks, ROW_THREADS, 0, s>>>(dy, dgate, row_sums, dyg, y, h, gate_w, N, H, e)));
    else attn_gate_backward_any_kernel<<<blocks, ROW_THREADS, 0, s>>>(dy, dgate, row_sums, dyg, y, h, gate_w, N, H, e);
    unsigned weight_blocks = (unsigned)ceil_div(N, WEIGHT_ROWS);
    float *partials = scratch_floats((size_t)weight_blocks * (size_t)(H * GATE_WIDTH));
    gate_weight_kernel<<<weight_blocks, ROW_THREADS, 0, s>>>(dgate_w, dgate, h, N, H, H * e, partials, device_state.counter);
    CHECK_LAUNCH();
}
