// Kernel ladder: the MLP's first product with its squared ReLU, y = relu(x w)^2. 155 GFLOP at our size: bound
// by arithmetic.
#include "dev/bench/ladder.cuh"

enum { N = 32768, D = 768, F = 3072 };
static struct {
    floatX *x, *y;
} set[LADDER_SETS]; // (N, D), (N, F)
static floatX *w;   // (D, F)

static __device__ __forceinline__ floatX relu2(float p) { return __float2bfloat16(p > 0 ? p * p : 0); }

// ---- 1: one thread an element -----------------------------------------------------------------------------

__global__ void thread_an_element(floatX *y, const floatX *x, const floatX *w)
{
    int col = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
    float sum = 0;
    for (int k = 0; k < D; k++)
        sum += to_float(x[(int64_t)row * D + k]) * to_float(w[(int64_t)k * F + col]);
    y[(int64_t)row * F + col] = relu2(sum);
}

static void run1(Stream s, int i)
{
    thread_an_element<<<dim3(F / 32, N / 8), dim3(32, 8), 0, s>>>(set[i].y, set[i].x, w);
}

// ---- 2: tiles through shared memory, 8 x 8 elements a thread: each value loaded serves many products ------

enum { TILE = 128, STEP = 16 };

__global__ __launch_bounds__(256) void tiles(floatX *y, const floatX *x, const floatX *w)
{
    __shared__ float a[STEP][TILE + 4], b[STEP][TILE];
    int tid = threadIdx.x, row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE, r = tid / 16 * 8,
        c = tid % 16 * 8;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < D; k0 += STEP) {
        for (int i = tid; i < TILE * STEP; i += 256) {
            a[i % STEP][i / STEP] = to_float(x[(int64_t)(row0 + i / STEP) * D + k0 + i % STEP]);
            b[i / TILE][i % TILE] = to_float(w[(int64_t)(k0 + i / TILE) * F + col0 + i % TILE]);
        }
        __syncthreads();
        for (int k = 0; k < STEP; k++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    sum[i][j] += a[k][r + i] * b[k][c + j];
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            y[(int64_t)(row0 + r + i) * F + col0 + c + j] = relu2(sum[i][j]);
}

static void run2(Stream s, int i) { tiles<<<dim3(F / TILE, N / TILE), 256, 0, s>>>(set[i].y, set[i].x, w); }

// ---- 3: the tensor cores by mma.sync, loads two steps ahead by cp.async -----------------------------------
// A block of 8 warps makes 128 x 128, a warp 64 x 32 of it. Rows in shared memory are padded by 16 bytes
// against bank conflicts.

enum { K_STEP = 32, STAGES = 3, A_PITCH = K_STEP + 8, B_PITCH = TILE + 8 };

static __device__ __forceinline__ uint32_t address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void copy16(void *to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from));
}
template <bool TRANSPOSED>
static __device__ __forceinline__ void load_fragments(uint32_t (&f)[4], const floatX *p)
{
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                     : "r"(address(p)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                     : "r"(address(p)));
}

static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void fetch(floatX *a, floatX *b, const floatX *x, const floatX *w, int row0,
                                             int col0, int k0)
{
    for (int i = threadIdx.x; i < TILE * K_STEP / 8; i += 256) {
        int ar = i / (K_STEP / 8), ac = i % (K_STEP / 8) * 8, br = i / (TILE / 8), bc = i % (TILE / 8) * 8;
        copy16(a + ar * A_PITCH + ac, x + (int64_t)(row0 + ar) * D + k0 + ac);
        copy16(b + br * B_PITCH + bc, w + (int64_t)(k0 + br) * F + col0 + bc);
    }
}

__global__ __launch_bounds__(256) void tensor_tiles(floatX *y, const floatX *x, const floatX *w)
{
    extern __shared__ __align__(16) floatX shared[];
    floatX *a = shared, *b = shared + STAGES * TILE * A_PITCH;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row0 = blockIdx.y * TILE,
        col0 = blockIdx.x * TILE;
    int wr = warp / 4 * 64, wc = warp % 4 * 32;
    float sum[4][4][4] = {};
    for (int st = 0; st < STAGES - 1; st++) {
        fetch(a + st * TILE * A_PITCH, b + st * K_STEP * B_PITCH, x, w, row0, col0, st * K_STEP);
        asm volatile("cp.async.commit_group;");
    }
    for (int step = 0; step < D / K_STEP; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        int next = step + STAGES - 1, slot = next % STAGES;
        if (next < D / K_STEP)
            fetch(a + slot * TILE * A_PITCH, b + slot * K_STEP * B_PITCH, x, w, row0, col0, next * K_STEP);
        asm volatile("cp.async.commit_group;");
        const floatX *as = a + step % STAGES * TILE * A_PITCH, *bs = b + step % STAGES * K_STEP * B_PITCH;
#pragma unroll
        for (int k = 0; k < K_STEP; k += 16) {
            uint32_t fa[4][4], fb[2][4];
            for (int i = 0; i < 4; i++)
                load_fragments<false>(fa[i], as + (wr + 16 * i + lane % 16) * A_PITCH + k + lane / 16 * 8);
            for (int j = 0; j < 2; j++)
                load_fragments<true>(fb[j], bs + (k + lane % 16) * B_PITCH + wc + 16 * j + lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma(sum[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            for (int half = 0; half < 2; half++) {
                int row = row0 + wr + 16 * i + lane / 4 + 8 * half, col = col0 + wc + 8 * j + lane % 4 * 2;
                __nv_bfloat162 pair = {relu2(sum[i][j][2 * half]), relu2(sum[i][j][2 * half + 1])};
                *reinterpret_cast<__nv_bfloat162 *>(y + (int64_t)row * F + col) = pair;
            }
}

static void run3(Stream s, int i)
{
    int bytes = STAGES * (TILE * A_PITCH + K_STEP * B_PITCH) * (int)sizeof(floatX);
    CUDA_CHECK(cudaFuncSetAttribute(tensor_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    tensor_tiles<<<dim3(F / TILE, N / TILE), 256, bytes, s>>>(set[i].y, set[i].x, w);
}

// ---- 4: cuBLASLt's product, and a pass of its own for the square ------------------------------------------

__global__ void square_pass(floatX *y, int64_t vectors)
{
    int64_t v = (int64_t)blockIdx.x * 256 + threadIdx.x;
    float f[8];
    if (v >= vectors)
        return;
    unpack8(load_vec(y, (int)v), f);
#pragma unroll
    for (int k = 0; k < 8; k++)
        f[k] = f[k] > 0 ? f[k] * f[k] : 0;
    store_vec(y, (int)v, pack8(f));
}

static void run4(Stream s, int i)
{
    ProductContext c = {s, NULL};
    InputGrad g = {set[i].y, set[i].x, w, N, F, D, NULL};
    matmul_backward_input(&c, &g); // y = x w
    square_pass<<<(unsigned)((int64_t)N * F / 8 / 256), 256, 0, s>>>(set[i].y, (int64_t)N * F / 8);
}

// ---- 5: the program's op ----------------------------------------------------------------------------------

static void run5(Stream s, int i)
{
    ProductContext c = {s, NULL};
    matmul_relu2_forward(&c, set[i].y, set[i].x, w, N, D, F);
}

// ---- check ------------------------------------------------------------------------------------------------

static void poison(Stream s)
{
    CUDA_CHECK(cudaMemsetAsync(set[0].y, 0xff, (size_t)N * F * sizeof(floatX), s));
}

// Limit: the product rounded to bf16 before the square (rung 4 does), the square rounded again: 3 x 2^-8 of
// the value; and the fp32 sum of D terms, 2^-24 sqrt(D) of the sum of their sizes, doubled by the square.
static double error(void)
{
    double most = 0, *weight = ladder_read(w, (int64_t)D * F);
    for (int row = 3; row < N; row += N / 11) {
        double *x = ladder_read(set[0].x + (int64_t)row * D, D),
               *y = ladder_read(set[0].y + (int64_t)row * F, F);
        for (int col = 0; col < F; col += 7) {
            double p = 0, size = 0;
            for (int k = 0; k < D; k++) {
                p += x[k] * weight[(int64_t)k * F + col];
                size += fabs(x[k] * weight[(int64_t)k * F + col]);
            }
            double want = p > 0 ? p * p : 0, slack = 0x1p-24 * sqrt((double)D) * size;
            double e =
                fabs(y[col] - want) / (3 * 0x1p-8 * want + 2 * fabs(p) * slack + slack * slack + 1e-30);
            if (!(e <= most))
                most = isnan(e) ? INFINITY : e;
        }
        free(x);
        free(y);
    }
    free(weight);
    return most;
}

int main(int argc, char **argv)
{
    set_program_name("ladder_relu2", -1);
    figures_open(&argc, argv);
    backend_open(0);
    OpSizes sizes = {.tokens = N, .dim = D, .heads = 6, .mlp_dim = F, .vocab_padded = 128};
    backend_reserve(&sizes);
    Stream s = stream_create();
    ladder_measure_ceilings(s);
    w = ladder_tensor((int64_t)D * F, 0.05f, 99);
    for (uint32_t i = 0; i < LADDER_SETS; i++) {
        set[i].x = ladder_tensor((int64_t)N * D, 1, i + 1);
        set[i].y = ladder_tensor((int64_t)N * F, 1, 0);
    }
    const Rung rungs[] = {{"one thread an element", run1},
                          {"tiles in shared memory, 64 elements a thread", run2},
                          {"tensor cores (mma.sync), loads two steps ahead (cp.async)", run3},
                          {"cuBLASLt, and a second pass for the square", run4},
                          {"warpgroup products, TMA, the square in the epilogue (the program's op)", run5}};
    Ladder ladder = {.title = "y = relu(x w)^2, 32768 x 768 x 3072",
                     .rungs = rungs,
                     .count = 5,
                     .operations = 2.0 * N * D * F,
                     .poison = poison,
                     .error = error};
    return ladder_climb(&ladder, s) > 0;
}
