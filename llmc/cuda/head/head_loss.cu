// Loss and gradient of rows of logits, a CTA a row. z lies in (0, cap), so e^(z - cap) needs no maximum; four
// elements share one reciprocal.
//
// With bulk copies CTAs are persistent: the row (100 KB of bf16 for the GPT-2 vocabulary) lies in shared
// memory, double-buffered, and is read once. Bound: special-function units, not memory: two exponentials an
// element and pass. Without them a row in bf16 is read twice.
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/sm80/sm80.cuh"
#include "llmc/cuda/sm90/barrier.cuh"
#include "llmc/cuda/sm90/tma.cuh"

enum { MAX_THREADS = 1024, EVAL_THREADS = 512 };

// ---- arithmetic ------------------------------------------------------------------------------------------

// sig and 1 - sig of four (l + shift) / slope. With e = exp(-that) they are 1/(1+e) and e/(1+e); the four
// reciprocals come from that of the product. e is kept below 2^30, where sig is zero for all purposes and the
// product of four still finite.
static __device__ __forceinline__ void sigmoid4(float (&sig)[4], float (&one_minus_sigmoid)[4],
                                                const float *l, const LossForm &f)
{
    float e[4], d[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        e[k] = sm80::exp2_approx(sm80::min_keeping_nan(fmaf(l[k], -f.exp_scale, -f.exp_shift), 30));
        d[k] = 1 + e[k];
    }
    float ab = d[0] * d[1], cd = d[2] * d[3], r = sm80::reciprocal_approx(ab * cd), rab = r * cd,
          rcd = r * ab;
    sig[0] = rab * d[1];
    sig[1] = rab * d[0];
    sig[2] = rcd * d[3];
    sig[3] = rcd * d[2];
#pragma unroll
    for (int k = 0; k < 4; k++)
        one_minus_sigmoid[k] = e[k] * sig[k];
}

// Sum of e^(z - cap) of eight logits; the low bits of `masked` say which are left out.
static __device__ __forceinline__ float exp_sum8(const float (&l)[8], const LossForm &f, uint32_t masked = 0)
{
    float sum = 0;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        float sig[4], one_minus_sigmoid[4];
        sigmoid4(sig, one_minus_sigmoid, l + 4 * q, f);
#pragma unroll
        for (int k = 0; k < 4; k++)
            sum += masked >> (4 * q + k) & 1
                       ? f.masked
                       : sm80::exp2_approx(one_minus_sigmoid[k] * -f.cap_log2); // z - cap = -cap (1 - sig)
    }
    return sum;
}

// Gradients of eight logits, of columns from `column` on; `norm` = log2 of the row's sum, less that of its
// weights.
template <int TERMS>
static __device__ __forceinline__ void gradient8(float (&l)[8], float norm, const Wanted<TERMS> &wanted,
                                                 int column, const LossForm &f)
{
#pragma unroll
    for (int q = 0; q < 2; q++) {
        float sig[4], one_minus_sigmoid[4];
        sigmoid4(sig, one_minus_sigmoid, l + 4 * q, f);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float p = sm80::exp2_approx(fmaf(one_minus_sigmoid[k], -f.cap_log2, -norm));
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                if (4 * q + k == wanted.token[i] - column)
                    p -= wanted.weight[i];
            }
            l[4 * q + k] = p * (f.steepness * sig[k] * one_minus_sigmoid[k]);
        }
    }
}

static __device__ __forceinline__ float capped(float l, const LossForm &f)
{
    return f.cap / (1 + expf(-(l + f.shift) / f.slope));
}

// ---- writing the gradient --------------------------------------------------------------------------------

template <GradientForm FORM>
static __device__ __forceinline__ void write_gradient(floatX *row, uint8_t *codes, int v, float (&g)[8],
                                                      float code_factor)
{
    if constexpr (FORM == GRADIENT_BF16) {
        store_vec(row, v, pack8(g));
    } else { // rounded once: bf16 on the way would put one between two codes on the wrong side
#pragma unroll
        for (int k = 0; k < 8; k++)
            g[k] *= code_factor;
        if constexpr (FORM == GRADIENT_E5M2) {
            reinterpret_cast<uint2 *>(codes)[v] = make_uint2(encode4(g[0], g[1], g[2], g[3], __NV_E5M2),
                                                             encode4(g[4], g[5], g[6], g[7], __NV_E5M2));
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                g[k] = fp8_value(g[k], __NV_E5M2);
            store_vec(row, v, pack8(g)); // exact
        }
    }
}

template <GradientForm FORM>
static __device__ __forceinline__ void write_zero_row(floatX *row, uint8_t *codes, int vectors)
{
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        if (FORM == GRADIENT_E5M2)
            reinterpret_cast<uint2 *>(codes)[v] = make_uint2(0, 0);
        else
            store_vec(row, v, make_uint4(0, 0, 0, 0));
    }
}

// Loss and gradient of one row, whose logits are at `in`: in shared memory, or the row itself. Then out ==
// in.
template <GradientForm FORM, int TERMS>
static __device__ __forceinline__ void row_loss_gradient(float *loss, const floatX *in, floatX *out,
                                                         uint8_t *codes, const RowTargets &targets, int row,
                                                         int vectors, const LossForm &f, float *shared)
{
    Wanted<TERMS> wanted(targets, row);
    float sum = 0, target_logit[TERMS];
#pragma unroll
    for (int k = 0; k < TERMS; k++)
        target_logit[k] = wanted.token[k] >= 0 ? to_float(out[wanted.token[k]]) : 0;
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float l[8];
        unpack8(load_vec(in, v), l);
        sum += exp_sum8(l, f);
    }
    sum = block_sum(sum, shared); // also orders the reads of the targets' logits
    if (threadIdx.x == 0) {
        float total = 0;
#pragma unroll
        for (int k = 0; k < TERMS; k++)
            total += wanted.weight[k] * (f.cap + logf(sum) - capped(target_logit[k], f));
        *loss = total;
    }
    float norm = log2f(sum) - log2f(wanted.sum);
    for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
        float l[8];
        unpack8(load_vec(in, v), l);
        gradient8<TERMS>(l, norm, wanted, 8 * v, f);
        write_gradient<FORM>(out, codes, v, l, f.code_factor);
    }
}

// ---- rows through shared memory --------------------------------------------------------------------------

#if SM90_OR_LATER // device_has_bulk_copies() asks for the same

static __device__ __forceinline__ void load_row_bulk(void *to, const void *from, uint32_t bytes,
                                                     uint64_t *barrier)
{
    mbarrier_arrive_expect_tx(barrier, bytes);
    bulk_load(to, from, barrier, bytes);
}

#endif

template <GradientForm FORM, int TERMS>
__global__ __launch_bounds__(MAX_THREADS, 1) void loss_gradient_staged_kernel(const LossForm f, float *losses,
                                                                              floatX *logits, uint8_t *codes,
                                                                              const RowTargets targets,
                                                                              int rows, int rows_padded,
                                                                              int Vp)
{
#if SM90_OR_LATER
    extern __shared__ uint4 stage[]; // two rows
    __shared__ uint64_t barrier[2];
    __shared__ float shared[WARP];
    int vectors = Vp / 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            mbarrier_init(&barrier[i], 1);
        fence_proxy_async_shared();
        if (blockIdx.x < rows)
            load_row_bulk(stage, logits + (int64_t)blockIdx.x * Vp, (uint32_t)Vp * 2, &barrier[0]);
    }
    __syncthreads();
    int count = 0;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, count++) {
        int slot = count % 2, next = row + (int)gridDim.x;
        // Both passes over the other slot ended before the last __syncthreads.
        if (threadIdx.x == 0 && next < rows)
            load_row_bulk(stage + (1 - slot) * vectors, logits + (int64_t)next * Vp, (uint32_t)Vp * 2,
                          &barrier[1 - slot]);
        mbarrier_wait(&barrier[slot], count / 2 % 2);
        int64_t at = (int64_t)row * Vp;
        row_loss_gradient<FORM, TERMS>(losses + row, reinterpret_cast<floatX *>(stage + slot * vectors),
                                       logits + at, FORM == GRADIENT_E5M2 ? codes + at : NULL, targets, row,
                                       vectors, f, shared);
        __syncthreads();
    }
    for (int row = rows + blockIdx.x; row < rows_padded; row += gridDim.x)
        write_zero_row<FORM>(logits + (int64_t)row * Vp,
                             FORM == GRADIENT_E5M2 ? codes + (int64_t)row * Vp : NULL, vectors);
#endif
}

// Rows of which two do not fit into shared memory, and GPUs without bulk copies: read twice.
template <GradientForm FORM, int TERMS>
__global__ __launch_bounds__(MAX_THREADS) void loss_gradient_plain_kernel(const LossForm f, float *losses,
                                                                          floatX *logits, uint8_t *codes,
                                                                          const RowTargets targets, int rows,
                                                                          int Vp)
{
    __shared__ float shared[WARP];
    int row = blockIdx.x;
    int64_t at = (int64_t)row * Vp;
    uint8_t *row_codes = FORM == GRADIENT_E5M2 ? codes + at : NULL;
    if (row < rows)
        row_loss_gradient<FORM, TERMS>(losses + row, logits + at, logits + at, row_codes, targets, row,
                                       Vp / 8, f, shared);
    else
        write_zero_row<FORM>(logits + at, row_codes, Vp / 8);
}

// ---- rows in registers and shared memory ------------------------------------------------------------------

// Vectors of 8 logits of a thread: a row of up to 53,248 is read once and written once by two CTAs a
// multiprocessor.
enum { HELD_THREADS = 512, IN_REGISTERS = 8, IN_SHARED = 5, HELD_VECTORS = IN_REGISTERS + IN_SHARED };

// Eight gradients of a row from what exp_sum_fast packed. With v = F (1 - sig), F = FRACTIONS, S the row's
// sum of e^(z - cap) and W that of its weights, a code stands for
//   1/sg W softmax * cap/slope sig (1 - sig) = v (F - v) * 2^(c v + n),  c = -cap log2(e) / F,
//   n = log2(cap / (slope sg F^2)) - log2 S + log2 W.
template <GradientForm FORM>
static __device__ __forceinline__ void write_held(floatX *row, uint8_t *codes, int v, uint4 packed,
                                                  float exponent, float n)
{
    float g[8];
    unpack_fractions(packed, g);
#pragma unroll
    for (int k = 0; k < 8; k++)
        g[k] = sm80::exp2_approx(fmaf(g[k], exponent, n)) * (g[k] * (FRACTIONS - g[k]));
    write_gradient<FORM>(row, codes, v, g, 1);
}

// Loss and e5m2 gradient. Of a row 1 - sig is kept, in 16 bits: the second pass has one exponential an
// element. Elements of targets are computed from their logits, as head_sums.cu says.
template <GradientForm FORM, int TERMS>
__global__ __launch_bounds__(HELD_THREADS, 2) void loss_gradient_held_kernel(const LossForm f, float *losses,
                                                                             floatX *logits, uint8_t *codes,
                                                                             const RowTargets targets,
                                                                             int rows, int Vp)
{
    __shared__ uint4 held[IN_SHARED * HELD_THREADS];
    __shared__ float shared[WARP];
    int row = blockIdx.x, vectors = Vp / 8;
    int64_t at = (int64_t)row * Vp;
    floatX *out = logits + at;
    uint8_t *row_codes = FORM == GRADIENT_E5M2 ? codes + at : NULL;
    if (row >= rows) {
        write_zero_row<FORM>(out, row_codes, vectors);
        return;
    }
    uint4 kept[IN_REGISTERS], *mine = held + threadIdx.x;
#pragma unroll
    for (int i = 0; i < IN_REGISTERS; i++) {
        int v = threadIdx.x + i * HELD_THREADS;
        kept[i] = v < vectors ? load_vec(out, v) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < IN_SHARED; i++) {
        int v = threadIdx.x + (IN_REGISTERS + i) * HELD_THREADS;
        if (v < vectors)
            sm80::copy_async(mine + i * HELD_THREADS, reinterpret_cast<const uint4 *>(out) + v, 16);
    }
    Wanted<TERMS> wanted(targets, row);
    float sum = 0, target_logit[TERMS];
#pragma unroll
    for (int k = 0; k < TERMS; k++)
        target_logit[k] = wanted.token[k] >= 0 ? to_float(out[wanted.token[k]]) : 0;
#pragma unroll
    for (int i = 0; i < HELD_VECTORS; i++) {
        if ((int)threadIdx.x + i * HELD_THREADS >= vectors)
            continue;
        if (i == IN_REGISTERS)
            sm80::wait_all_loads(); // what this thread has queued itself
        float l[8];
        uint4 &u = i < IN_REGISTERS ? kept[i % IN_REGISTERS]
                                    : mine[(i < IN_REGISTERS ? 0 : i - IN_REGISTERS) * HELD_THREADS];
        unpack8(u, l);
        sum += exp_sum_fast(l, 1, f, &u);
    }
    sum = block_sum(sum, shared); // also orders the reads of the targets' logits
    float norm = log2f(sum), n = f.code_log2 - norm + log2f(wanted.sum), exponent = -f.cap_log2 / FRACTIONS;
#pragma unroll
    for (int i = 0; i < HELD_VECTORS; i++) {
        int v = threadIdx.x + i * HELD_THREADS;
        if (v < vectors)
            write_held<FORM>(out, row_codes, v,
                             i < IN_REGISTERS
                                 ? kept[i % IN_REGISTERS]
                                 : mine[(i < IN_REGISTERS ? 0 : i - IN_REGISTERS) * HELD_THREADS],
                             exponent, n);
    }
    __syncthreads(); // the targets' elements are written again
    if (threadIdx.x)
        return;
    float total = 0;
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        if (wanted.token[k] < 0)
            continue;
        float rest = one_minus_sigmoid(f, target_logit[k]), share = 0;
#pragma unroll
        for (int i = 0; i < TERMS; i++)
            share += wanted.token[i] == wanted.token[k] ? wanted.weight[i] : 0;
        float code = target_code(f, rest, norm, wanted.sum, share);
        total += wanted.weight[k] * (f.cap * rest + logf(sum));
        if (FORM == GRADIENT_E5M2)
            row_codes[wanted.token[k]] = (uint8_t)encode4(code, 0, 0, 0, __NV_E5M2);
        else
            out[wanted.token[k]] = __float2bfloat16(fp8_value(code, __NV_E5M2)); // exact
    }
    losses[row] = total;
}

template <GradientForm FORM, int TERMS>
static void launch_held(Stream s, const LossForm *f, const LossGradient *a)
{
    loss_gradient_held_kernel<FORM, TERMS>
        <<<(unsigned)a->rows_padded, HELD_THREADS, 0, s>>>(*f, a->losses, a->logits, a->codes, a->targets,
                                                           a->rows, a->Vp);
    CHECK_LAUNCH();
}

// ---- launch ----------------------------------------------------------------------------------------------

// The number of threads that leaves fewest idle in the last round over a row.
static int threads_for(int vectors)
{
    int best = 1024, waste = INT32_MAX;
    for (int threads = 1024; threads >= 512; threads -= WARP) {
        int idle = (int)(round_up(vectors, threads) - vectors);
        if (idle < waste) {
            waste = idle;
            best = threads;
        }
    }
    return best;
}

template <GradientForm FORM, int TERMS>
static void launch_loss_gradient(Stream s, const LossForm *f, const LossGradient *a)
{
    if constexpr (FORM != GRADIENT_BF16) {
        if (a->Vp / 8 <= HELD_VECTORS * HELD_THREADS) {
            launch_held<FORM, TERMS>(s, f, a);
            return;
        }
    }
    size_t stage_bytes = (size_t)a->Vp * 4;
    if (!device_has_bulk_copies() || stage_bytes + 2048 > device_state.shared_block) {
        loss_gradient_plain_kernel<FORM, TERMS>
            <<<(unsigned)a->rows_padded, 512, 0, s>>>(*f, a->losses, a->logits, a->codes, a->targets, a->rows,
                                                      a->Vp);
    } else {
        int threads = threads_for(a->Vp / 8), blocks = (int)min_i64(a->rows_padded, device_state.sms);
        CUDA_CHECK(cudaFuncSetAttribute(loss_gradient_staged_kernel<FORM, TERMS>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, (int)stage_bytes));
        loss_gradient_staged_kernel<FORM, TERMS>
            <<<(unsigned)blocks, threads, stage_bytes, s>>>(*f, a->losses, a->logits, a->codes, a->targets,
                                                            a->rows, a->rows_padded, a->Vp);
    }
    CHECK_LAUNCH();
}

template <GradientForm FORM> static void launch_for_terms(Stream s, const LossForm *f, const LossGradient *a)
{
    if (one_term(&a->targets))
        launch_loss_gradient<FORM, 1>(s, f, a);
    else
        launch_loss_gradient<FORM, MAX_TERMS>(s, f, a);
}

void loss_gradient_rows(Stream s, const LossForm *f, const LossGradient *a)
{
    if (a->rows_padded <= 0)
        return;
    switch (a->form) {
    case GRADIENT_BF16:
        launch_for_terms<GRADIENT_BF16>(s, f, a);
        break;
    case GRADIENT_E5M2:
        launch_for_terms<GRADIENT_E5M2>(s, f, a);
        break;
    case GRADIENT_E5M2_AS_BF16:
        launch_for_terms<GRADIENT_E5M2_AS_BF16>(s, f, a);
        break;
    }
}

// ---- evaluation ------------------------------------------------------------------------------------------

template <bool MASKED>
__global__ __launch_bounds__(EVAL_THREADS) void loss_rows_kernel(const LossForm f, const LossRows a)
{
    __shared__ float shared[WARP];
    int at = blockIdx.x, target = a.targets[at];
    const float *row = a.logits + (int64_t)at * a.Vp;
    const float4 *vectors = reinterpret_cast<const float4 *>(row);
    float sum = 0;
    for (int v = threadIdx.x; v < a.Vp / 8; v += EVAL_THREADS) {
        float4 x = vectors[2 * v], y = vectors[2 * v + 1];
        const float l[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        sum += exp_sum8(l, f, MASKED ? mask_word(a.mask, at, v / 4) >> 8 * (v % 4) : 0);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) {
        float z = target_is_masked(a.mask, at, target) ? HEAD_MASKED : capped(row[target], f);
        a.losses[at] = f.cap + logf(sum) - z;
    }
}

void loss_rows(Stream s, const LossForm *f, const LossRows *a)
{
    if (a->rows <= 0)
        return;
    if (a->mask.impossible)
        loss_rows_kernel<true><<<(unsigned)a->rows, EVAL_THREADS, 0, s>>>(*f, *a);
    else
        loss_rows_kernel<false><<<(unsigned)a->rows, EVAL_THREADS, 0, s>>>(*f, *a);
    CHECK_LAUNCH();
}

__global__ void softcap_kernel(const LossForm f, float *z, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        z[i] = capped(z[i], f);
}

void softcap(Stream s, const LossForm *f, float *z, int64_t n)
{
    if (n <= 0)
        return;
    softcap_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, s>>>(*f, z, n);
    CHECK_LAUNCH();
}

// One CTA, and in double: an fp32 sum of a few hundred thousand losses would lose its last digits.
__global__ void sum_in_order_kernel(float *out, const float *x, int n)
{
    __shared__ double sums[1024];
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += 1024)
        sum += x[i];
    sums[threadIdx.x] = sum;
    for (int half = 512; half; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        *out = (float)sums[0];
}

void sum_in_order(Stream s, float *out, const float *x, int n)
{
    sum_in_order_kernel<<<1, 1024, 0, s>>>(out, x, n);
    CHECK_LAUNCH();
}
