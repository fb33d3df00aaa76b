// Kernel ladder: loss and FP8 gradient from a chunk of logits. z = 30 sig(l / 7.5); loss = log sum e^z -
// z_target; g = (e^z / sum - [target]) 4 sig (1 - sig), stored as e5m2(448 g). At least one read of the
// logits and one write of the codes.
#include "dev/test/head_specs.h"
#include "dev/bench/ladder.cuh"
#include "llmc/cuda/head/head_loss.cuh"

enum { ROWS = 8192, VP = 50304, THREADS = 512, CHECKED = 5 };
static struct {
    floatX *logits; // (ROWS, VP)
    uint8_t *codes; // (ROWS, VP) e5m2
    float *losses;  // (ROWS)
} set[LADDER_SETS];
static floatX *keep[CHECKED]; // (VP) rows of logits of set 0, which some rungs overwrite
static int32_t *targets;      // (ROWS) device
static const int checked[CHECKED] = {0, 77, 4095, 5000, ROWS - 1};

static __device__ __forceinline__ uint8_t code(float g)
{
    return (uint8_t)__nv_cvt_float_to_fp8(448 * g, __NV_SATFINITE, __NV_E5M2);
}

static __device__ __forceinline__ float rounded(float g)
{
    return to_float(__float2bfloat16(g));
} // a gradient of bf16 logits

// ---- 1: as one would write it: maximum, sum and gradient, each a pass over the row, the cap computed in
// each

static __device__ __forceinline__ float capped(floatX l) { return 30 * sigmoid(to_float(l) / 7.5f); }

__global__ void textbook(uint8_t *codes, float *losses, const floatX *logits, const int32_t *targets)
{
    __shared__ float shared[WARP], largest;
    const floatX *row = logits + (int64_t)blockIdx.x * VP;
    float most = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < VP; i += THREADS)
        most = fmaxf(most, capped(row[i]));
    for (int step = 16; step; step >>= 1)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (threadIdx.x % WARP == 0)
        shared[threadIdx.x / WARP] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / WARP; w++)
            shared[0] = fmaxf(shared[0], shared[w]);
        largest = shared[0];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < VP; i += THREADS)
        sum += expf(capped(row[i]) - largest);
    sum = block_sum(sum, shared);
    int target = targets[blockIdx.x];
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) + largest - capped(row[target]);
    for (int i = threadIdx.x; i < VP; i += THREADS) {
        float z = capped(row[i]), sig = z / 30, p = expf(z - largest) / sum - (i == target);
        codes[(int64_t)blockIdx.x * VP + i] = code(rounded(p * 4 * sig * (1 - sig)));
    }
}

static void run1(Stream s, int i)
{
    textbook<<<ROWS, THREADS, 0, s>>>(set[i].codes, set[i].losses, set[i].logits, targets);
}

// ---- 2: z is below 30, so no maximum is needed: two reads of the row --------------------------------------

__global__ void two_passes(uint8_t *codes, float *losses, const floatX *logits, const int32_t *targets)
{
    __shared__ float shared[WARP];
    const floatX *row = logits + (int64_t)blockIdx.x * VP;
    float sum = 0;
    for (int i = threadIdx.x; i < VP; i += THREADS)
        sum += expf(capped(row[i]) - 30);
    sum = block_sum(sum, shared);
    int target = targets[blockIdx.x];
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) + 30 - capped(row[target]);
    for (int i = threadIdx.x; i < VP; i += THREADS) {
        float sig = sigmoid(to_float(row[i]) / 7.5f), p = expf(30 * sig - 30) / sum - (i == target);
        codes[(int64_t)blockIdx.x * VP + i] = code(rounded(p * 4 * sig * (1 - sig)));
    }
}

static void run2(Stream s, int i)
{
    two_passes<<<ROWS, THREADS, 0, s>>>(set[i].codes, set[i].losses, set[i].logits, targets);
}

// ---- 3: 16-byte loads, and exponentials and reciprocals from the special-function unit directly -----------

static __device__ __forceinline__ float fast_sigmoid(float l)
{
    return __fdividef(1, 1 + exp2f(l * (-1.44269504f / 7.5f)));
}

__global__ void vectors(uint8_t *codes, float *losses, const floatX *logits, const int32_t *targets)
{
    __shared__ float shared[WARP];
    const floatX *row = logits + (int64_t)blockIdx.x * VP;
    float sum = 0, l[8];
    for (int v = threadIdx.x; v < VP / 8; v += THREADS) {
        unpack8(load_vec(row, v), l);
#pragma unroll
        for (int k = 0; k < 8; k++)
            sum += __expf(30 * fast_sigmoid(l[k]) - 30);
    }
    sum = block_sum(sum, shared);
    float scale = 1 / sum;
    int target = targets[blockIdx.x];
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sum) + 30 - capped(row[target]);
    for (int v = threadIdx.x; v < VP / 8; v += THREADS) {
        uint32_t out[2] = {0, 0};
        unpack8(load_vec(row, v), l);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float sig = fast_sigmoid(l[k]), p = __expf(30 * sig - 30) * scale - (8 * v + k == target);
            out[k / 4] |= (uint32_t)code(rounded(p * 4 * sig * (1 - sig))) << 8 * (k % 4);
        }
        reinterpret_cast<uint2 *>(codes + (int64_t)blockIdx.x * VP)[v] = make_uint2(out[0], out[1]);
    }
}

static void run3(Stream s, int i)
{
    vectors<<<ROWS, THREADS, 0, s>>>(set[i].codes, set[i].losses, set[i].logits, targets);
}

// ---- 4: the program's, from logits of bf16: rows brought to shared memory by the bulk copy engine ---------

static void run4(Stream s, int i)
{
    static const LossForm form = loss_form(&head_plain, 768);
    LossGradient a =
        {GRADIENT_E5M2, set[i].losses, set[i].logits, set[i].codes, {targets, NULL, 1, ROWS}, ROWS, ROWS, VP};
    loss_gradient_rows(s, &form, &a);
}

// ---- check ------------------------------------------------------------------------------------------------

static void poison(Stream s)
{
    CUDA_CHECK(cudaMemsetAsync(set[0].codes, 0x7f, (size_t)ROWS * VP, s));
    CUDA_CHECK(cudaMemsetAsync(set[0].losses, 0xff, ROWS * sizeof(float), s));
}

static double excess(double got, double want, double limit)
{
    double e = fabs(got - want) / limit;
    return e == e ? e : INFINITY;
}

// Limits. Gradient: e5m2 keeps two bits behind the point (2^-3 of the value, half of the smallest step 2^-16
// near zero), after a rounding to bf16 (2^-8) of a softmax whose exponent, up to 30, is known to 2^-17 of a
// sigmoid (30 x 2^-17 x ln 2 < 2^-10). Loss: 30 times the rounding of fp32, and as much for the sum: 2^-15.
static double row_error(int which, const double *l, int target)
{
    int row = checked[which];
    static uint8_t codes[VP];
    double sum = 0, most = 0;
    float loss;
    CUDA_CHECK(cudaMemcpy(codes, set[0].codes + (int64_t)row * VP, VP, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(&loss, set[0].losses + row, sizeof loss, cudaMemcpyDeviceToHost));
    for (int i = 0; i < VP; i++)
        sum += exp(30 / (1 + exp(-l[i] / 7.5)) - 30);
    for (int i = 0; i < VP; i++) {
        double sig = 1 / (1 + exp(-l[i] / 7.5)),
               g = (exp(30 * sig - 30) / sum - (i == target)) * 4 * sig * (1 - sig);
        double got = (double)__half2float(__ushort_as_half((unsigned short)(codes[i] << 8))) / 448;
        most = fmax(most, excess(got, g, fabs(g) * (0x1p-3 + 0x1p-8 + 0x1p-9) + 0x1p-17 / 448 * 1.02));
    }
    double want = log(sum) + 30 - 30 / (1 + exp(-l[target] / 7.5));
    return fmax(most, excess((double)loss, want, 0x1p-15));
}

static double error(void)
{
    double most = 0;
    for (int i = 0; i < CHECKED; i++) {
        double *l = ladder_read(keep[i], VP);
        int32_t target;
        CUDA_CHECK(cudaMemcpy(&target, targets + checked[i], sizeof target, cudaMemcpyDeviceToHost));
        most = fmax(most, row_error(i, l, target));
        free(l);
    }
    return most;
}

static void fill(Stream s)
{
    static int32_t host[ROWS];
    for (int i = 0; i < ROWS; i++)
        host[i] = (int32_t)((int64_t)i * 7919 % 50257);
    targets = (int32_t *)device_alloc(sizeof host, "ladder");
    copy_to_device(s, targets, host, sizeof host);
    stream_synchronize(s);
    for (uint32_t i = 0; i < LADDER_SETS; i++) {
        set[i].logits = ladder_tensor((int64_t)ROWS * VP, 8, i + 1);
        set[i].codes = (uint8_t *)device_alloc((size_t)ROWS * VP, "ladder");
        set[i].losses = (float *)device_alloc(ROWS * sizeof(float), "ladder");
    }
    for (int i = 0; i < CHECKED; i++) {
        keep[i] = ladder_tensor(VP, 0, 0);
        copy_on_device(s, keep[i], set[0].logits + (int64_t)checked[i] * VP, VP * sizeof(floatX));
    }
    stream_synchronize(s);
}

int main(int argc, char **argv)
{
    set_program_name("ladder_loss", -1);
    figures_open(&argc, argv);
    backend_open(0);
    OpSizes sizes = {.tokens = ROWS, .dim = 768, .heads = 6, .mlp_dim = 3072, .vocab_padded = 128};
    backend_reserve(&sizes);
    Stream s = stream_create();
    ladder_measure_ceilings(s);
    fill(s);
    const Rung rungs[] =
        {{"maximum, sum, gradient: three passes", run1},
         {"z < 30 needs no maximum: two passes", run2},
         {"16-byte loads, special functions directly", run3},
         {"rows in shared memory by bulk copies (the program's, without sm90_head_logits.cu)", run4}};
    Ladder ladder = {.title = "loss and e5m2 gradient of 8192 rows of 50304 logits",
                     .rungs = rungs,
                     .count = 4,
                     .bytes = 3.0 * ROWS * VP,
                     .poison = poison,
                     .error = error};
    return ladder_climb(&ladder, s) > 0;
}
