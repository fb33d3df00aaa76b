// Adam, and NorMuon around the orthogonalisation. All bound by memory: 16-byte accesses, every value read and
// written once; NorMuon reads the orthogonal matrix twice, for its sums of squares and for the update.
#include "llmc/cuda/device/cuda_common.cuh"

enum {
    THREADS = 256,
    STRIP = 256 /* columns of a block */,
    CHUNK = 32 /* rows of a block of the column sums */
};

static bool aligned16(const void *p) { return (uintptr_t)p % 16 == 0; }

// ---- Adam -------------------------------------------------------------------------------------------------

static __device__ __forceinline__ void adam_step(float &p, float &m, float &v, float g, float rate,
                                                 AdamRule r)
{
    m = r.beta1 * m + r.rest1 * g;
    v = r.beta2 * v + r.rest2 * g * g;
    p -= rate * (m / (sqrtf(v) + r.eps));
}

__global__ __launch_bounds__(THREADS) void adam_vector_kernel(floatX *p, floatX *m, floatX *v, float *grad,
                                                              const StepParams *step, AdamRule rule,
                                                              int64_t vectors)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= vectors)
        return;
    float4 *g4 = reinterpret_cast<float4 *>(grad) + 2 * i;
    uint4 *p8 = reinterpret_cast<uint4 *>(p) + i, *m8 = reinterpret_cast<uint4 *>(m) + i,
          *v8 = reinterpret_cast<uint4 *>(v) + i;
    float4 a = g4[0], b = g4[1];
    float x[8], y[8], z[8], g[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    unpack8(*p8, x);
    unpack8(*m8, y);
    unpack8(*v8, z);
    float scale = step->grad_scale, rate = step->rule[rule.rule].rate;
#pragma unroll
    for (int k = 0; k < 8; k++)
        adam_step(x[k], y[k], z[k], g[k] * scale, rate, rule);
    *p8 = pack8(x);
    *m8 = pack8(y);
    *v8 = pack8(z);
    g4[0] = g4[1] = make_float4(0, 0, 0, 0);
}

static __device__ __forceinline__ void store(float *p, float x) { *p = x; }
static __device__ __forceinline__ void store(floatX *p, float x) { *p = __float2bfloat16(x); }

template <class T>
__global__ __launch_bounds__(THREADS) void adam_kernel(T *p, T *m, T *v, float *grad, const StepParams *step,
                                                       AdamRule rule, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n)
        return;
    float x = to_float(p[i]), y = to_float(m[i]), z = to_float(v[i]);
    adam_step(x, y, z, grad[i] * step->grad_scale, step->rule[rule.rule].rate, rule);
    store(p + i, x);
    store(m + i, y);
    store(v + i, z);
    grad[i] = 0;
}

void adam_update(Stream s, floatX *p, floatX *m, floatX *v, float *grad, const StepParams *step,
                 AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update, n);
    int64_t vectors = aligned16(p) && aligned16(m) && aligned16(v) && aligned16(grad) ? n / 8 : 0,
            rest = n - 8 * vectors, at = 8 * vectors;
    if (vectors)
        adam_vector_kernel<<<(unsigned)ceil_div(vectors, THREADS), THREADS, 0, s>>>(p, m, v, grad, step, rule,
                                                                                    vectors);
    if (rest)
        adam_kernel<floatX><<<(unsigned)ceil_div(rest, THREADS), THREADS, 0, s>>>(p + at, m + at, v + at,
                                                                                  grad + at, step, rule,
                                                                                  rest);
    CHECK_LAUNCH();
}

void adam_update_fp32(Stream s, float *p, float *m, float *v, float *grad, const StepParams *step,
                      AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update_fp32, n);
    if (n > 0)
        adam_kernel<float><<<(unsigned)ceil_div(n, THREADS), THREADS, 0, s>>>(p, m, v, grad, step, rule, n);
    CHECK_LAUNCH();
}

static __device__ __forceinline__ void adam_decay_step(float &p, float &m, float &v, float g, RuleStep now,
                                                       AdamRule r)
{
    m = r.beta1 * m + r.rest1 * g;
    v = r.beta2 * v + r.rest2 * g * g;
    float u = now.rate * (m / (sqrtf(v) + r.eps));
    if (u * p > 0)
        u += now.decay * p;
    p -= u;
}

// Four elements a thread; behind the vectors one. A gradient that is zero is not cleared again: of a table
// with many rows a step touches few, so that most of these stores are saved (4 of 28 bytes an element).
__global__ __launch_bounds__(THREADS) void adam_decay_kernel(floatX *p, float *m, float *v, float *grad,
                                                             const StepParams *step, AdamRule rule, int64_t n,
                                                             int64_t vectors)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float scale = step->grad_scale;
    RuleStep now = step->rule[rule.rule];
    if (i < vectors) {
        float4 *m4 = reinterpret_cast<float4 *>(m) + i, *v4 = reinterpret_cast<float4 *>(v) + i,
               *g4 = reinterpret_cast<float4 *>(grad) + i, g = *g4, a = *m4, b = *v4;
        uint2 *p4 = reinterpret_cast<uint2 *>(p) + i, u = *p4;
        float x[4] = {__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),
                      __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u)};
        adam_decay_step(x[0], a.x, b.x, g.x * scale, now, rule);
        adam_decay_step(x[1], a.y, b.y, g.y * scale, now, rule);
        adam_decay_step(x[2], a.z, b.z, g.z * scale, now, rule);
        adam_decay_step(x[3], a.w, b.w, g.w * scale, now, rule);
        *p4 = make_uint2(pack2(x[0], x[1]), pack2(x[2], x[3]));
        *m4 = a;
        *v4 = b;
        if (g.x != 0 || g.y != 0 || g.z != 0 || g.w != 0)
            *g4 = make_float4(0, 0, 0, 0);
        return;
    }
    i += 3 * vectors;
    if (i >= n)
        return;
    float x = to_float(p[i]), y = m[i], z = v[i];
    adam_decay_step(x, y, z, grad[i] * scale, now, rule);
    store(p + i, x);
    m[i] = y;
    v[i] = z;
    grad[i] = 0;
}

void adam_update_decay(Stream s, floatX *p, float *m, float *v, float *grad, const StepParams *step,
                       AdamRule rule, int64_t n)
{
    OP_SCOPE(adam_update_decay, n);
    if (n <= 0)
        return;
    bool aligned = (uintptr_t)p % 8 == 0 && aligned16(m) && aligned16(v) && aligned16(grad);
    int64_t vectors = aligned ? n / 4 : 0;
    adam_decay_kernel<<<(unsigned)ceil_div(n - 3 * vectors, THREADS), THREADS, 0, s>>>(p, m, v, grad, step,
                                                                                       rule, n, vectors);
    CHECK_LAUNCH();
}

// ---- NorMuon's momentum -----------------------------------------------------------------------------------

static __device__ __forceinline__ void momentum_step(float &u, float &m, float scale, float mu)
{
    float g = u * scale;
    m += (1 - mu) * (g - m);
    u = g + mu * (m - g);
}

__global__ __launch_bounds__(THREADS) void momentum_kernel(float *u, float *momentum, const StepParams *step,
                                                           int64_t n, int64_t vectors)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float scale = step->grad_scale, mu = step->muon_momentum;
    if (i < vectors) {
        float4 a = reinterpret_cast<float4 *>(u)[i], b = reinterpret_cast<float4 *>(momentum)[i];
        momentum_step(a.x, b.x, scale, mu);
        momentum_step(a.y, b.y, scale, mu);
        momentum_step(a.z, b.z, scale, mu);
        momentum_step(a.w, b.w, scale, mu);
        reinterpret_cast<float4 *>(u)[i] = a;
        reinterpret_cast<float4 *>(momentum)[i] = b;
        return;
    }
    i += 3 * vectors; // element by element behind the vectors
    if (i < n)
        momentum_step(u[i], momentum[i], scale, mu);
}

void normuon_momentum(Stream s, float *u, float *momentum, const StepParams *step, int64_t n)
{
    OP_SCOPE(normuon_momentum, n);
    if (n <= 0)
        return;
    int64_t vectors = aligned16(u) && aligned16(momentum) ? n / 4 : 0;
    momentum_kernel<<<(unsigned)ceil_div(n - 3 * vectors, THREADS), THREADS, 0, s>>>(u, momentum, step, n,
                                                                                     vectors);
    CHECK_LAUNCH();
}

// ---- NorMuon's update -------------------------------------------------------------------------------------
// The norms need no pass of their own: |O|^2 is the sum of the row (column) sums of squares, |O'|^2 the same
// sums over S.
//   1. sums of squares: per column in chunks of rows (batch, chunks, cols), per row at once (batch, 1, rows)
//   2. one block a matrix: c, S, both norms, and factor = |O| / (|O'| sqrt(S)) per row or column
//   3. W and the rest, element by element

template <class T>
__global__ __launch_bounds__(STRIP) void column_squares_kernel(float *sums, const T *o, int rows, int cols)
{
    int col = blockIdx.x * STRIP + threadIdx.x, first = blockIdx.y * CHUNK, end = min(first + CHUNK, rows);
    if (col >= cols)
        return;
    const T *p = o + (int64_t)blockIdx.z * rows * cols + col;
    float sum = 0;
#pragma unroll 8
    for (int r = first; r < end; r++) {
        float x = to_float(p[(int64_t)r * cols]);
        sum += x * x;
    }
    sums[((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * cols + col] = sum;
}

template <class T>
__global__ __launch_bounds__(STRIP) void row_squares_kernel(float *sums, const T *o, int64_t all_rows,
                                                            int cols)
{
    int64_t row = (int64_t)blockIdx.x * (STRIP / WARP) + threadIdx.x / WARP;
    if (row >= all_rows)
        return;
    float sum = 0;
    for (int c = threadIdx.x % WARP; c < cols; c += WARP) {
        float x = to_float(o[row * cols + c]);
        sum += x * x;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        sums[row] = sum;
}

// sums (batch, chunks, count); factor (batch, count) out; second (batch, stride), of which `count` are used;
// elements: how many squares a sum has in all
__global__ __launch_bounds__(1024) void second_moment_kernel(float *factor, float *second, const float *sums,
                                                             int chunks, int count, int stride, int elements,
                                                             float beta2)
{
    __shared__ float shared[WARP];
    const float *mine = sums + (int64_t)blockIdx.x * chunks * count;
    float *s = second + (int64_t)blockIdx.x * stride, *f = factor + (int64_t)blockIdx.x * count, before = 0,
          after = 0;
    for (int j = threadIdx.x; j < count; j += blockDim.x) {
        float total = 0;
        for (int i = 0; i < chunks; i++)
            total += mine[(int64_t)i * count + j];
        float moved = s[j] + (1 - beta2) * (total / (float)elements - s[j]), kept = fmaxf(moved, 1e-10f);
        s[j] = moved;
        f[j] = 1 / sqrtf(moved != moved ? moved : kept); // fmaxf would hide a NaN
        before += total;
        after += total / kept;
    }
    before = block_sum(before, shared);
    after = block_sum(after, shared);
    float gain = sqrtf(before) / fmaxf(sqrtf(after), 1e-10f);
    for (int j = threadIdx.x; j < count; j += blockDim.x)
        f[j] *= gain;
}

// Two fp32 values to two bf16 ones, lo in the lower half: rounded, or the upper halves of their bits.
static __device__ __forceinline__ uint32_t pack_copy(float lo, float hi, bool truncate)
{
    return truncate ? __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632) : pack2(lo, hi);
}

static __device__ __forceinline__ floatX copy_of(float w, bool truncate)
{
    return truncate ? __ushort_as_bfloat16((unsigned short)(__float_as_uint(w) >> 16)) : __float2bfloat16(w);
}

template <class T> struct alignas(4 * sizeof(T)) Four {
    T v[4];
};

// VECTOR: four neighbouring elements of a row a thread, everything aligned; otherwise one. One matrix for
// each y.
template <class T, int VECTOR>
__global__ __launch_bounds__(THREADS) void update_kernel(NormuonUpdate a, const T *o, const float *factor,
                                                         const StepParams *step)
{
    int i = (blockIdx.x * THREADS + threadIdx.x) * VECTOR, b = blockIdx.y;
    if (i >= a.rows * a.cols)
        return;
    RuleStep rule = step->rule[a.rule[b]];
    float rate = rule.rate, decay = rule.decay;
    int row = i / a.cols, col = i - row * a.cols;
    const float *f = a.per_column ? factor + (int64_t)b * a.cols + col : factor + (int64_t)b * a.rows + row;
    if (a.w)
        a.w += b * a.stride;
    if (a.grad)
        a.grad += b * a.stride;
    a.wx += b * a.stride;
    o += (int64_t)b * a.rows * a.cols;
    float w[4], change[4];
    if (VECTOR == 4) {
        Four<T> in = *reinterpret_cast<const Four<T> *>(o + i);
#pragma unroll
        for (int k = 0; k < 4; k++)
            change[k] = to_float(in.v[k]);
        float4 g = a.per_column ? *reinterpret_cast<const float4 *>(f) : make_float4(f[0], f[0], f[0], f[0]);
        change[0] *= g.x;
        change[1] *= g.y;
        change[2] *= g.z;
        change[3] *= g.w;
        if (a.w) {
            float4 v = *reinterpret_cast<const float4 *>(a.w + i);
            w[0] = v.x;
            w[1] = v.y;
            w[2] = v.z;
            w[3] = v.w;
        }
    } else {
        change[0] = to_float(o[i]) * f[0];
        if (a.w)
            w[0] = a.w[i];
    }
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        if (!a.w)
            w[k] = to_float(a.wx[i + k]);
        if (change[k] * w[k] >= 0)
            change[k] += decay * w[k];
        w[k] -= rate * change[k];
    }
    if (VECTOR == 4) {
        if (a.w)
            *reinterpret_cast<float4 *>(a.w + i) = make_float4(w[0], w[1], w[2], w[3]);
        *reinterpret_cast<uint2 *>(a.wx + i) =
            make_uint2(pack_copy(w[0], w[1], a.truncate), pack_copy(w[2], w[3], a.truncate));
        if (a.grad)
            *reinterpret_cast<float4 *>(a.grad + i) = make_float4(0, 0, 0, 0);
    } else {
        if (a.w)
            a.w[i] = w[0];
        a.wx[i] = copy_of(w[0], a.truncate);
        if (a.grad)
            a.grad[i] = 0;
    }
}

template <class T>
static void update_slice(Stream s, const NormuonUpdate *a, const StepParams *step, float *scratch)
{
    const T *o = (const T *)a->o;
    int count = a->per_column ? a->cols : a->rows, chunks = a->per_column ? (int)ceil_div(a->rows, CHUNK) : 1;
    int64_t each = (int64_t)a->rows * a->cols;
    if (each > INT32_MAX / 2)
        fatal(EXIT_BAD_INPUT, "NorMuon: a matrix of %d x %d is too large", a->rows, a->cols);
    float *factor = scratch, *sums = scratch + (size_t)a->batch * (size_t)count;
    if (a->per_column) {
        dim3 grid((unsigned)ceil_div(a->cols, STRIP), (unsigned)chunks, (unsigned)a->batch);
        column_squares_kernel<T><<<grid, STRIP, 0, s>>>(sums, o, a->rows, a->cols);
    } else {
        int64_t rows = (int64_t)a->batch * a->rows;
        row_squares_kernel<T>
            <<<(unsigned)ceil_div(rows, STRIP / WARP), STRIP, 0, s>>>(sums, o, rows, a->cols);
    }
    second_moment_kernel<<<(unsigned)a->batch, 1024, 0, s>>>(factor, a->second, sums, chunks, count,
                                                             a->rows > a->cols ? a->rows : a->cols,
                                                             a->per_column ? a->rows : a->cols, a->beta2);
    bool vector = a->cols % 4 == 0 && a->stride % 4 == 0 && aligned16(a->o) && aligned16(a->w) &&
                  aligned16(a->wx) && aligned16(a->grad);
    dim3 grid((unsigned)ceil_div(each, THREADS * (vector ? 4 : 1)), (unsigned)a->batch);
    if (vector)
        update_kernel<T, 4><<<grid, THREADS, 0, s>>>(*a, o, factor, step);
    else
        update_kernel<T, 1><<<grid, THREADS, 0, s>>>(*a, o, factor, step);
    CHECK_LAUNCH();
}

void normuon_update(Stream s, const NormuonUpdate *a, const StepParams *step)
{
    OP_SCOPE(normuon_update, a);
    assert(a->w || !a->truncate);
    int count = a->per_column ? a->cols : a->rows, chunks = a->per_column ? (int)ceil_div(a->rows, CHUNK) : 1;
    size_t each = (size_t)count * (size_t)(chunks + 1), element = a->o_dtype == NS_FP32 ? 4 : 2;
    size_t most = scratch_planned(SCRATCH_NORMUON) / sizeof(float) / each;
    int slice = (int)min_i64(max_i64(1, (int64_t)most), 65535);
    for (int b = 0; b < a->batch; b += slice) {
        NormuonUpdate part = *a;
        int64_t at = b * a->stride;
        part.batch = (int)min_i64(slice, a->batch - b);
        part.w = a->w ? a->w + at : NULL;
        part.wx = a->wx + at;
        part.grad = a->grad ? a->grad + at : NULL;
        part.rule = a->rule + b;
        part.second = a->second + b * max_i64(a->rows, a->cols);
        part.o = (const char *)a->o + (size_t)b * (size_t)a->rows * (size_t)a->cols * element;
        float *scratch = scratch_floats(s, SCRATCH_NORMUON, (size_t)part.batch * each);
        if (a->o_dtype == NS_BF16)
            update_slice<__nv_bfloat16>(s, &part, step, scratch);
        else if (a->o_dtype == NS_FP16)
            update_slice<__half>(s, &part, step, scratch);
        else
            update_slice<float>(s, &part, step, scratch);
    }
}

// ---- casting ----------------------------------------------------------------------------------------------

__global__ __launch_bounds__(THREADS) void cast_kernel(floatX *wx, const float *w, int64_t n, int64_t vectors,
                                                       bool truncate)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < vectors) {
        float4 a = reinterpret_cast<const float4 *>(w)[2 * i],
               b = reinterpret_cast<const float4 *>(w)[2 * i + 1];
        reinterpret_cast<uint4 *>(wx)[i] =
            make_uint4(pack_copy(a.x, a.y, truncate), pack_copy(a.z, a.w, truncate),
                       pack_copy(b.x, b.y, truncate), pack_copy(b.z, b.w, truncate));
        return;
    }
    i += 7 * vectors;
    if (i < n)
        wx[i] = copy_of(w[i], truncate);
}

void cast_weights(Stream s, floatX *wx, const float *w, int64_t n, bool truncate)
{
    OP_SCOPE(cast_weights, n);
    if (n <= 0)
        return;
    int64_t vectors = aligned16(wx) && aligned16(w) ? n / 8 : 0;
    cast_kernel<<<(unsigned)ceil_div(n - 7 * vectors, THREADS), THREADS, 0, s>>>(wx, w, n, vectors, truncate);
    CHECK_LAUNCH();
}
