// Kernel ladder: residual mix and rms norm, x_out = a x + b x0, h = rms(x_out). Bound by memory: two reads,
// two writes a row.
#include "dev/bench/ladder.cuh"

enum { N = 32768, D = 768, THREADS = 256 };
static const float EPS = 0x1p-23f, A = 0.9f, B = 0.3f;
static struct {
    floatX *x, *x0, *out, *h;
    float *rstd;
} set[LADDER_SETS];
static float *coef; // (3) device

// ---- 1: one thread a row: neighbouring threads read addresses a row apart ---------------------------------

__global__ void thread_a_row(floatX *out, floatX *h, float *rstd, const floatX *x, const floatX *x0)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    int64_t at = (int64_t)row * D;
    float sum = 0;
    for (int i = 0; i < D; i++) {
        float y = A * to_float(x[at + i]) + B * to_float(x0[at + i]);
        sum += y * y;
    }
    float r = rstd[row] = 1 / sqrtf(sum / D + EPS);
    for (int i = 0; i < D; i++) {
        float y = A * to_float(x[at + i]) + B * to_float(x0[at + i]);
        out[at + i] = __float2bfloat16(y);
        h[at + i] = __float2bfloat16(y * r);
    }
}

static void run1(Stream s, int i)
{
    thread_a_row<<<N / 64, 64, 0, s>>>(set[i].out, set[i].h, set[i].rstd, set[i].x, set[i].x0);
}

// ---- 2: one block a row: neighbouring threads read neighbours; the row is read twice ----------------------

__global__ void block_a_row(floatX *out, floatX *h, float *rstd, const floatX *x, const floatX *x0)
{
    __shared__ float shared[WARP];
    int64_t at = (int64_t)blockIdx.x * D;
    float sum = 0;
    for (int i = threadIdx.x; i < D; i += THREADS) {
        float y = A * to_float(x[at + i]) + B * to_float(x0[at + i]);
        sum += y * y;
    }
    float r = 1 / sqrtf(block_sum(sum, shared) / D + EPS);
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = r;
    for (int i = threadIdx.x; i < D; i += THREADS) {
        float y = A * to_float(x[at + i]) + B * to_float(x0[at + i]);
        out[at + i] = __float2bfloat16(y);
        h[at + i] = __float2bfloat16(y * r);
    }
}

static void run2(Stream s, int i)
{
    block_a_row<<<N, THREADS, 0, s>>>(set[i].out, set[i].h, set[i].rstd, set[i].x, set[i].x0);
}

// ---- 3: the row stays in registers between sum and result -------------------------------------------------

__global__ void block_in_registers(floatX *out, floatX *h, float *rstd, const floatX *x, const floatX *x0)
{
    __shared__ float shared[WARP];
    int64_t at = (int64_t)blockIdx.x * D + threadIdx.x;
    float y[D / THREADS], sum = 0;
#pragma unroll
    for (int k = 0; k < D / THREADS; k++) {
        y[k] = A * to_float(x[at + k * THREADS]) + B * to_float(x0[at + k * THREADS]);
        sum += y[k] * y[k];
    }
    float r = 1 / sqrtf(block_sum(sum, shared) / D + EPS);
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = r;
#pragma unroll
    for (int k = 0; k < D / THREADS; k++) {
        out[at + k * THREADS] = __float2bfloat16(y[k]);
        h[at + k * THREADS] = __float2bfloat16(y[k] * r);
    }
}

static void run3(Stream s, int i)
{
    block_in_registers<<<N, THREADS, 0, s>>>(set[i].out, set[i].h, set[i].rstd, set[i].x, set[i].x0);
}

// ---- 4: the program's op: a warp a row, no barrier, 16 bytes a load ---------------------------------------

static void run4(Stream s, int i)
{
    MixForward a = {set[i].out, set[i].h, set[i].rstd, set[i].x, set[i].x0, NULL, coef};
    mix_rmsnorm_forward(s, &a, N, D);
}

// ---- check ------------------------------------------------------------------------------------------------

static void poison(Stream s)
{
    CUDA_CHECK(cudaMemsetAsync(set[0].h, 0xff, (size_t)N * D * sizeof(floatX), s));
    CUDA_CHECK(cudaMemsetAsync(set[0].out, 0xff, (size_t)N * D * sizeof(floatX), s));
}

// Limit: one rounding to bf16 (2^-8 of the value), and 2^-20 for the fp32 arithmetic before it.
static double worst(const double *got, const double *want)
{
    double most = 0;
    for (int i = 0; i < D; i++) {
        double e = fabs(got[i] - want[i]) / (fabs(want[i]) * (0x1p-8 + 0x1p-20) + 0x1p-20);
        if (!(e <= most))
            most = isnan(e) ? INFINITY : e;
    }
    return most;
}

static double error(void)
{
    double most = 0;
    for (int row = 5; row < N; row += N / 37) {
        int64_t at = (int64_t)row * D;
        double *x = ladder_read(set[0].x + at, D), *x0 = ladder_read(set[0].x0 + at, D),
               *out = ladder_read(set[0].out + at, D), *h = ladder_read(set[0].h + at, D), sum = 0, e;
        for (int i = 0; i < D; i++) {
            x[i] = (double)A * x[i] + (double)B * x0[i];
            sum += x[i] * x[i];
        }
        for (int i = 0; i < D; i++)
            x0[i] = x[i] / sqrt(sum / D + (double)EPS);
        e = fmax(worst(out, x), worst(h, x0));
        if (!(e <= most))
            most = isnan(e) ? INFINITY : e;
        free(x);
        free(x0);
        free(out);
        free(h);
    }
    return most;
}

int main(int argc, char **argv)
{
    set_program_name("ladder_norms", -1);
    figures_open(&argc, argv);
    backend_open(0);
    OpSizes sizes = {.tokens = N, .dim = D, .heads = 6, .mlp_dim = 4 * D, .vocab_padded = 128};
    backend_reserve(&sizes);
    Stream s = stream_create();
    ladder_measure_ceilings(s);
    for (uint32_t i = 0; i < LADDER_SETS; i++) {
        set[i].x = ladder_tensor((int64_t)N * D, 1, 2 * i + 1);
        set[i].x0 = ladder_tensor((int64_t)N * D, 1, 2 * i + 2);
        set[i].out = ladder_tensor((int64_t)N * D, 1, 0);
        set[i].h = ladder_tensor((int64_t)N * D, 1, 0);
        set[i].rstd = (float *)device_alloc(N * sizeof(float), "ladder");
    }
    const float values[3] = {A, B, 0};
    coef = (float *)device_alloc(sizeof values, "ladder");
    copy_to_device(s, coef, values, sizeof values);
    const Rung rungs[] = {{"one thread a row", run1},
                          {"one block a row: loads of neighbours side by side", run2},
                          {"the row stays in registers: read once", run3},
                          {"one warp a row, no barrier, 16-byte loads (the program's op)", run4}};
    Ladder ladder = {.title = "residual mix + rms norm, forward, 32768 x 768",
                     .rungs = rungs,
                     .count = 4,
                     .bytes = 4.0 * N * D * sizeof(floatX),
                     .poison = poison,
                     .error = error};
    return ladder_climb(&ladder, s) > 0;
}
