// Sums of streams with coefficients, and the gradients of streams and coefficients. One warp a row. A warp
// takes a row in spans of CHUNK vectors a lane: all loads of a span are issued before the first is used, and
// a row of at most one span is loaded once. Of longer rows what a norm needs is loaded twice, the second time
// from the L1 cache.
//
// Bound by memory. At 4.27 TB/s, d = 768, a stream of 16384 tokens has 25.2 MB, 5.9 us. Computed so, and
// measured on an H200 (bench_mixes), us for 16384 | 49152 tokens:
//   stream_mix, 2 terms, y and h: 4 streams                             23.6, 27.0 |  71,  75
//   stream_mix, 4 terms (x, branch, x0, bigram), y and h: 6 streams     35.4, 39.2 | 106, 108
//   stream_grads, a reader with a scalar, norm, from h: 4 streams       23.6, 31.5 |  71,  80
//   stream_grads, two streams (x0, bigram), 6 shared readers: 10        59.0, 78.7 | 177, 212
// The coefficients of a token, 4 bytes each in rows of generators, are 1% of that.
#include "llmc/cuda/device/cuda_common.cuh"

static const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23
static const unsigned FULL = 0xffffffffu;
enum { GRAD_CTAS = 8 /* CTAs a multiprocessor of stream_grads, at most */ };

static __device__ __forceinline__ float scalar_of(const StreamFactor &c) { return c.scalar ? *c.scalar : 1; }

static __device__ __forceinline__ float column_of(const StreamFactor &c, int row)
{
    return c.column ? c.column[(int64_t)row * c.stride] : 1;
}

// ---- forward ----------------------------------------------------------------------------------------------

enum { MIX_CHUNK = 3, MIX_SPAN = MIX_CHUNK * WARP };

template <int TERMS> struct MixRow {
    const floatX *x[TERMS];
    float c[TERMS];
};

// The lane's vectors of the sum from vector `first` on, before their rounding. Returns their sum of squares.
template <int TERMS>
static __device__ __forceinline__ float mix_span(float (&y)[MIX_CHUNK][8], const MixRow<TERMS> &r, int first,
                                                 int vectors, int lane)
{
    uint4 u[TERMS][MIX_CHUNK];
#pragma unroll
    for (int k = 0; k < TERMS; k++)
        load_row(u[k], r.x[k] + 8 * first, vectors - first, lane);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < MIX_CHUNK; i++) {
#pragma unroll
        for (int k = 0; k < TERMS; k++) {
            float x[8];
            unpack8(u[k][i], x);
#pragma unroll
            for (int e = 0; e < 8; e++)
                y[i][e] = k ? y[i][e] + r.c[k] * x[e] : r.c[k] * x[e];
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
            squares += y[i][e] * y[i][e];
    }
    return squares;
}

// Stores the span in y and, times rstd, in h. Returns the bits of the largest |h|.
static __device__ __forceinline__ uint32_t store_mix_span(const StreamMix &a, const float (&y)[MIX_CHUNK][8],
                                                          float rstd, int64_t at, int left, int lane)
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < MIX_CHUNK; i++) {
        int v = lane + WARP * i;
        if (v >= left)
            continue;
        if (a.y)
            store_vec(a.y + at, v, pack8(y[i]));
        if (!a.h)
            continue;
        float h[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            h[e] = rstd * y[i][e];
        uint4 u = pack8(h);
        store_vec(a.h + at, v, u);
        most = max(most, amax_of(u));
    }
    return most;
}

template <int TERMS>
__global__ __launch_bounds__(ROW_THREADS, 2) void stream_mix_kernel(const __grid_constant__ StreamMix a,
                                                                    int N, int d)
{
    pdl_begin();
    int lane = threadIdx.x % WARP, row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = d / 8;
    if (row >= N)
        return;
    MixRow<TERMS> r;
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
        const StreamTerm &t = a.term[k];
        r.x[k] = t.x + (int64_t)(t.rows ? t.rows[row] : row) * d;
        r.c[k] = t.c.plus + scalar_of(t.c) * column_of(t.c, row);
    }

    float y[MIX_CHUNK][8], rstd = 0, squares = mix_span(y, r, 0, vectors, lane);
    bool one_span = vectors <= MIX_SPAN;
    if (a.h) {
        for (int first = MIX_SPAN; first < vectors; first += MIX_SPAN)
            squares += mix_span(y, r, first, vectors, lane);
        rstd = 1.0f / sqrtf(warp_sum(squares) / (float)d + RMS_EPS);
        if (lane == 0)
            a.rstd[row] = rstd;
    }

    uint32_t most = 0;
    for (int first = 0; first < vectors; first += MIX_SPAN) {
        if (!one_span)
            mix_span(y, r, first, vectors, lane);
        int64_t at = (int64_t)row * d + 8 * first;
        most = max(most, store_mix_span(a, y, rstd, at, vectors - first, lane));
    }
    if (a.h && a.amax)
        amax_bits(a.amax, most);
}

void stream_mix(Stream s, const StreamMix *a, int N, int d)
{
    OP_SCOPE(stream_mix, a, N, d);
    typedef void (*Kernel)(StreamMix, int, int);
    static const Kernel kernels[MIX_STREAMS] = {stream_mix_kernel<1>, stream_mix_kernel<2>,
                                                stream_mix_kernel<3>, stream_mix_kernel<4>,
                                                stream_mix_kernel<5>, stream_mix_kernel<6>};
    assert(a->terms >= 1 && a->terms <= MIX_STREAMS && d % 8 == 0);
    if (N <= 0)
        return;
    launch_pdl(kernels[a->terms - 1], (unsigned)ceil_div(N, ROW_WARPS), ROW_THREADS, 0, s, *a, N, d);
}

// ---- backward ---------------------------------------------------------------------------------------------

typedef struct {
    StreamGrad s[STREAM_GRADS];
    unsigned dots[STREAM_GRADS]; // bit k: reader k's g . x is wanted
    unsigned shared;             // bit k: reader k has the same g in both streams
} GradCall;

// What a warp has of a row at a time.
template <int STREAMS, int READERS, int CHUNK> struct GradSpan {
    uint4 g[READERS][CHUNK]; // of the first stream's readers
    uint4 x[STREAMS][CHUNK], dx[STREAMS][CHUNK], dh[STREAMS][CHUNK], h[STREAMS][CHUNK];
};

// Lane j works for reader j % READERS of stream j / READERS: it loads that reader's coefficient, and its
// gradients are summed there.
typedef struct {
    const float *column;
    float *dcolumn;
    int stride;
    float plus, scalar;
} LaneReader;

template <int READERS>
static __device__ __forceinline__ LaneReader lane_reader(const GradCall &call, int streams, int lane)
{
    LaneReader l = {};
    int stream = lane / READERS, k = lane % READERS;
    if (stream >= streams || k >= call.s[stream].readers)
        return l;
    const StreamReader &r = call.s[stream].reader[k];
    l.column = r.c.column;
    l.dcolumn = r.dcolumn;
    l.stride = r.c.stride;
    l.plus = r.c.plus;
    l.scalar = scalar_of(r.c);
    return l;
}

static __device__ __forceinline__ const floatX *reader_row(const StreamReader &r, int row, int d)
{
    return r.g + (int64_t)row * (r.pitch ? r.pitch : d);
}

template <int STREAMS, int READERS, bool NORM, int CHUNK>
static __device__ __forceinline__ void load_grad_span(GradSpan<STREAMS, READERS, CHUNK> &u,
                                                      const GradCall &call, int row, int first, int d,
                                                      int lane)
{
    int left = d / 8 - first;
    int64_t at = (int64_t)row * d + 8 * first;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        const StreamGrad &a = call.s[s];
        if (NORM) {
            load_row(u.dh[s], a.dh + at, a.dh ? left : 0, lane);
            load_row(u.h[s], a.h + at, a.dh ? left : 0, lane);
        }
        int64_t x_at = a.x && a.rows ? (int64_t)a.rows[row] * d + 8 * first : at;
        bool x_is_h = NORM && a.dh && !a.x;
        load_row(u.x[s], (a.x ? a.x : a.h) + x_at, call.dots[s] && !x_is_h ? left : 0, lane);
        load_row(u.dx[s], a.dx + at, a.accumulate ? left : 0, lane);
    }
#pragma unroll
    for (int k = 0; k < READERS; k++)
        load_row(u.g[k], reader_row(call.s[0].reader[k], row, d) + 8 * first,
                 k < call.s[0].readers ? left : 0, lane);
}

// Adds to the first channels of the row, which lanes 0 to 3 hold; lane c has that of channel c.
static __device__ __forceinline__ void add_lead(float (&dh)[8], float lead, int lane)
{
#pragma unroll
    for (int e = 0; e < 8; e++) {
        float got = __shfl_sync(FULL, lead, (lane & 3) * 8 + e);
        if (lane < 4)
            dh[e] += got;
    }
}

// The sum of dh h over the lane's vectors of a span.
template <int CHUNK>
static __device__ __forceinline__ float norm_dot(const uint4 (&udh)[CHUNK], const uint4 (&uh)[CHUNK],
                                                 float lead, bool leads, int lane)
{
    float dot = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float dh[8], h[8];
        unpack8(udh[i], dh);
        unpack8(uh[i], h);
        if (i == 0 && leads)
            add_lead(dh, lead, lane);
#pragma unroll
        for (int e = 0; e < 8; e++)
            dot += dh[e] * h[e];
    }
    return dot;
}

// mean(dh h) over a whole row, of which `u` has the first span.
template <int STREAMS, int READERS, int CHUNK>
static __device__ __forceinline__ float norm_mean(const GradSpan<STREAMS, READERS, CHUNK> &u, int s,
                                                  const StreamGrad &a, float lead, int row, int d, int lane)
{
    float dot = norm_dot(u.dh[s], u.h[s], lead, a.dh_lead, lane);
    for (int first = CHUNK * WARP; first < d / 8; first += CHUNK * WARP) {
        uint4 dh[CHUNK], h[CHUNK];
        int64_t at = (int64_t)row * d + 8 * first;
        load_row(dh, a.dh + at, d / 8 - first, lane);
        load_row(h, a.h + at, d / 8 - first, lane);
        dot += norm_dot(dh, h, 0, false, lane);
    }
    return warp_sum(dot) / (float)d;
}

// Of one row: what its spans have in common.
template <int STREAMS, int READERS> struct GradRow {
    float c[STREAMS][READERS], dot[STREAMS][READERS]; // coefficients; the lane's part of g . x
    float rstd[STREAMS], mean[STREAMS], lead[STREAMS];
};

// dx of the lane's vectors of a span, and their part of every g . x.
template <int STREAMS, int READERS, bool NORM, int CHUNK>
static __device__ __forceinline__ void grad_span(GradRow<STREAMS, READERS> &r,
                                                 const GradSpan<STREAMS, READERS, CHUNK> &u,
                                                 const GradCall &call, int row, int first, int d, int lane)
{
    int left = d / 8 - first;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (CHUNK > 1 && WARP * i >= left)
            break;
        int v = lane + WARP * i;
#pragma unroll
        for (int s = 0; s < STREAMS; s++) {
            const StreamGrad &a = call.s[s];
            float dx[8], x[8], g[8];
            unpack8(u.dx[s][i], dx); // zeros unless dx is added to
            if (NORM && a.dh) {
                unpack8(u.dh[s][i], g);
                unpack8(u.h[s][i], x);
                if (i == 0 && first == 0 && a.dh_lead)
                    add_lead(g, r.lead[s], lane);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    dx[e] += r.rstd[s] * (g[e] - x[e] * r.mean[s]);
            }
            if (!(NORM && a.dh && !a.x)) // else x is h
                unpack8(u.x[s][i], x);
#pragma unroll
            for (int k = 0; k < READERS; k++) {
                if (k >= a.readers)
                    break;
                uint4 w = u.g[k][i];
                if (s > 0 && !(call.shared >> k & 1))
                    w = v < left ? load_vec(reader_row(a.reader[k], row, d), first + v)
                                 : make_uint4(0, 0, 0, 0);
                unpack8(w, g);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    dx[e] += r.c[s][k] * g[e];
                    r.dot[s][k] += g[e] * x[e];
                }
            }
            if (a.dx && v < left)
                store_vec(a.dx + (int64_t)row * d, first + v, pack8(dx));
        }
    }
}

// Returns what lane j's reader adds to its dscalar.
template <int STREAMS, int READERS, bool NORM>
static __device__ __forceinline__ float grad_row(const GradCall &call, const LaneReader &l, int row, int d,
                                                 int lane)
{
    constexpr int TENSORS = READERS + STREAMS * (NORM ? 4 : 2), CHUNK = TENSORS <= 5 ? 3 : 1;
    GradSpan<STREAMS, READERS, CHUNK> u;
    GradRow<STREAMS, READERS> r;
    float column = l.column ? l.column[(int64_t)row * l.stride] : 1, mine = 0;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
        const StreamGrad &a = call.s[s];
        r.rstd[s] = a.rstd ? a.rstd[row] : 1;
        r.lead[s] = NORM && lane < a.leads ? a.dh_lead[(int64_t)row * a.leads + lane] : 0;
    }
    load_grad_span<STREAMS, READERS, NORM>(u, call, row, 0, d, lane);
    float c = l.plus + l.scalar * column;
#pragma unroll
    for (int s = 0; s < STREAMS; s++) {
#pragma unroll
        for (int k = 0; k < READERS; k++) {
            r.c[s][k] = __shfl_sync(FULL, c, s * READERS + k);
            r.dot[s][k] = 0;
        }
        r.mean[s] = NORM && call.s[s].dh ? norm_mean(u, s, call.s[s], r.lead[s], row, d, lane) : 0;
    }

    for (int first = 0; first < d / 8; first += CHUNK * WARP) {
        if (first)
            load_grad_span<STREAMS, READERS, NORM>(u, call, row, first, d, lane);
        grad_span<STREAMS, READERS, NORM>(r, u, call, row, first, d, lane);
    }

#pragma unroll
    for (int s = 0; s < STREAMS; s++)
#pragma unroll
        for (int k = 0; k < READERS; k++) {
            if (!(call.dots[s] >> k & 1))
                continue;
            float dot = warp_sum(r.dot[s][k]);
            if (!call.s[s].x) // the dot with h = rstd x
                dot /= r.rstd[s];
            if (lane == s * READERS + k)
                mine = dot;
        }
    if (l.dcolumn)
        l.dcolumn[(int64_t)row * l.stride] = l.scalar * mine;
    return column * mine;
}

// dscalar of reader j += the sum of lane j's values over all warps of the grid: warps in their order, then
// CTAs in theirs, by the CTA that arrives last.  partials (gridDim.x, COUNT)
template <int STREAMS, int READERS>
static __device__ __forceinline__ void add_dscalars(const GradCall &call, float mine, float *partials,
                                                    unsigned *counter)
{
    constexpr int COUNT = STREAMS * READERS;
    __shared__ float sums[ROW_WARPS][COUNT], totals[COUNT];
    __shared__ bool last;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane < COUNT)
        sums[warp][lane] = mine;
    __syncthreads();
    if (threadIdx.x < COUNT) {
        float x = 0;
        for (int w = 0; w < ROW_WARPS; w++)
            x += sums[w][threadIdx.x];
        partials[blockIdx.x * COUNT + threadIdx.x] = x;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1; // wraps to 0 at the last CTA
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    for (int j = warp; j < COUNT; j += ROW_WARPS) {
        float x = 0;
        for (int b = lane; b < gridDim.x; b += WARP)
            x += __ldcg(partials + b * COUNT + j);
        x = warp_sum(x);
        if (lane == 0)
            totals[j] = x;
    }
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int j = 0; j < COUNT; j++) { // one thread: two readers may have one scalar
        const StreamGrad &a = call.s[j / READERS];
        if (j % READERS < a.readers && a.reader[j % READERS].dscalar)
            *a.reader[j % READERS].dscalar += totals[j];
    }
}

// partials NULL: no dscalar is wanted.
template <int STREAMS, int READERS, bool NORM>
__global__ __launch_bounds__(ROW_THREADS, STREAMS == 2 && NORM ? 1 : 2) void stream_grads_kernel(
    const __grid_constant__ GradCall call, int N, int d, float *partials, unsigned *counter)
{
    pdl_begin();
    int lane = threadIdx.x % WARP;
    LaneReader l = lane_reader<READERS>(call, STREAMS, lane);
    float mine = 0;
    for (int row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; row < N; row += gridDim.x * ROW_WARPS)
        mine += grad_row<STREAMS, READERS, NORM>(call, l, row, d, lane);
    if (partials)
        add_dscalars<STREAMS, READERS>(call, mine, partials, counter);
}

typedef void (*GradKernel)(GradCall, int, int, float *, unsigned *);

template <int STREAMS, int READERS> static GradKernel grad_kernel(bool norm)
{
    return norm ? stream_grads_kernel<STREAMS, READERS, true> : stream_grads_kernel<STREAMS, READERS, false>;
}

template <int STREAMS> static GradKernel grad_kernel(int readers, bool norm)
{
    return readers <= 1   ? grad_kernel<STREAMS, 1>(norm)
           : readers <= 2 ? grad_kernel<STREAMS, 2>(norm)
           : readers <= 4 ? grad_kernel<STREAMS, 4>(norm)
                          : grad_kernel<STREAMS, MIX_STREAMS>(norm);
}

void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d)
{
    OP_SCOPE(stream_grads, a, count, N, d);
    GradCall call = {};
    int readers = 0;
    bool norm = false, scalars = false;
    assert(count >= 1 && count <= STREAM_GRADS && d % 8 == 0);
    for (int i = 0; i < count; i++) {
        call.s[i] = a[i];
        assert(a[i].readers <= MIX_STREAMS && a[i].leads <= STREAM_LEADS && (a[i].x || a[i].h));
        readers = a[i].readers > readers ? a[i].readers : readers;
        norm |= a[i].dh != NULL;
        for (int k = 0; k < a[i].readers; k++) {
            const StreamReader *r = &a[i].reader[k], *other = &a[0].reader[k];
            call.dots[i] |= (unsigned)(r->dscalar || r->dcolumn) << k;
            scalars |= r->dscalar != NULL;
            if (i && k < a[0].readers && r->g == other->g && r->pitch == other->pitch)
                call.shared |= 1u << k;
        }
    }
    if (N <= 0)
        return;
    int blocks = row_blocks(N, GRAD_CTAS);
    float *partials =
        scalars ? scratch_floats(s, SCRATCH_MIX, (size_t)blocks * STREAM_GRADS * MIX_STREAMS) : NULL;
    GradKernel kernel = count == 1 ? grad_kernel<1>(readers, norm) : grad_kernel<2>(readers, norm);
    launch_pdl(kernel, (unsigned)blocks, ROW_THREADS, 0, s, call, N, d, partials,
               scratch_counter(s, SCRATCH_MIX));
}
