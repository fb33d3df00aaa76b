// Gradients of streams, and of the coefficients of their sums. One warp a row. A warp takes a row in spans of
// CHUNK vectors a lane: all loads of a span are issued before the first is used. Of rows longer than a span
// what a norm needs is loaded twice, the second time from the L1 cache.
//
// Bound by memory. At 4.27 TB/s, d = 768, a stream of 16384 tokens has 25.2 MB, 5.9 us. Computed so, and
// measured on an H200 (bench_mixes), us for 16384 | 49152 tokens:
//   a reader with a scalar, norm, from h: 4 streams                     23.6, 31.5 |  71,  80
// The coefficients of a token, 4 bytes each in rows of generators, are 1% of that.
#include "llmc/cuda/device/cuda_common.cuh"

static const unsigned FULL = 0xffffffffu;
enum { GRAD_CTAS = 8 /* CTAs a multiprocessor, at most */ };

// A lane of a warp adds up one dot product: of a reader's g and x, say. It loads the reader's coefficient,
// and writes the gradients.
typedef struct {
    const float *column, *scalar;
    float *dcolumn, *dscalar;
    int stride;
    float plus;
} LaneReader;

// Of one warp, over all its rows.
typedef struct {
    const float *column;
    float *dcolumn;
    int stride;
    float plus, scalar;
} Lane;

static __device__ __forceinline__ Lane lane_of(const LaneReader *readers, int lane)
{
    const LaneReader &r = readers[lane];
    return {r.column, r.dcolumn, r.stride, r.plus, r.scalar ? *r.scalar : 1};
}

static __device__ __forceinline__ float lane_column(const Lane &l, int row)
{
    return l.column ? l.column[(int64_t)row * l.stride] : 1;
}

// dscalar of lane j's reader += the sum of lane j's values over all warps of the grid: warps in their order,
// then CTAs in theirs, by the CTA that arrives last.  partials (gridDim.x, COUNT)
template <int COUNT>
static __device__ __forceinline__ void add_dscalars(const LaneReader *readers, float mine, float *partials,
                                                    unsigned *counter)
{
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
    for (int j = 0; j < COUNT; j++) // one thread: two readers may have one scalar
        if (readers[j].dscalar)
            *readers[j].dscalar += totals[j];
}

// ---- one stream -------------------------------------------------------------------------------------------

typedef struct {
    StreamGrad a;
    LaneReader lane[WARP]; // lane k that of reader k; lane READERS that of `beside`
    unsigned dots;         // bit k: reader k's g . x is wanted
} GradCall;

// What a warp has of the row at a time. With norms x is h, if it is not given: its place has what is beside.
template <int READERS, int NORMS, int CHUNK> struct GradSpan {
    uint4 g[READERS][CHUNK], x[CHUNK], dx[CHUNK];
    uint4 dh[NORMS ? NORMS : 1][CHUNK], h[CHUNK];
};

// Of one row: what its spans have in common.
template <int READERS, int NORMS> struct GradRow {
    float c, rstd, mean, lead[NORMS ? NORMS : 1]; // c: the coefficient of the lane's reader
    float dot[READERS], beside;                   // the lane's parts
};

static __device__ __forceinline__ const floatX *reader_row(const StreamReader &r, int row, int d)
{
    return r.g + (int64_t)row * (r.pitch ? r.pitch : d);
}

template <int READERS, int NORMS, int CHUNK>
static __device__ __forceinline__ void
load_grad_span(GradSpan<READERS, NORMS, CHUNK> &u, const GradCall &call, int row, int first, int d, int lane)
{
    const StreamGrad &a = call.a;
    int left = d / 8 - first;
    int64_t at = (int64_t)row * d + 8 * first,
            x_at = a.x && a.rows ? (int64_t)a.rows[row] * d + 8 * first : at;
    const floatX *x = a.x ? a.x : NORMS ? a.beside : a.h;
#pragma unroll
    for (int k = 0; k < NORMS; k++)
        load_row(u.dh[k], a.norm[k].dh + at, k < a.norms ? left : 0, lane);
    if (NORMS)
        load_row(u.h, a.h + at, left, lane);
    load_row(u.x, x + x_at, (a.x || !NORMS ? call.dots != 0 : x != NULL) ? left : 0, lane);
    load_row(u.dx, a.dx + at, a.accumulate ? left : 0, lane);
#pragma unroll
    for (int k = 0; k < READERS; k++)
        load_row(u.g[k], reader_row(a.reader[k], row, d) + 8 * first, k < a.readers ? left : 0, lane);
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

// The sum of all dh of vector i. leads: of the row's first vectors.
template <int NORMS, int CHUNK>
static __device__ __forceinline__ void sum_dh(float (&dh)[8], const uint4 (&u)[NORMS][CHUNK], int i,
                                              const StreamGrad &a, const float (&lead)[NORMS], bool leads,
                                              int lane)
{
#pragma unroll
    for (int k = 0; k < NORMS; k++) {
        if (k >= a.norms)
            break;
        float more[8];
        unpack8(u[k][i], more);
#pragma unroll
        for (int e = 0; e < 8; e++)
            dh[e] = k ? dh[e] + more[e] : more[e];
        if (leads && a.norm[k].lead)
            add_lead(dh, lead[k], lane);
    }
}

// The sum of dh h over the lane's vectors of a span.
template <int NORMS, int CHUNK>
static __device__ __forceinline__ float norm_dot(const uint4 (&udh)[NORMS][CHUNK], const uint4 (&uh)[CHUNK],
                                                 const StreamGrad &a, const float (&lead)[NORMS], bool leads,
                                                 int lane)
{
    float dot = 0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        float dh[8], h[8];
        sum_dh(dh, udh, i, a, lead, leads && i == 0, lane);
        unpack8(uh[i], h);
#pragma unroll
        for (int e = 0; e < 8; e++)
            dot += dh[e] * h[e];
    }
    return dot;
}

// mean(dh h) over a whole row, of which `u` has the first span.
template <int READERS, int NORMS, int CHUNK>
static __device__ __forceinline__ float norm_mean(const GradSpan<READERS, NORMS, CHUNK> &u,
                                                  const StreamGrad &a, const float (&lead)[NORMS], int row,
                                                  int d, int lane)
{
    float dot = norm_dot(u.dh, u.h, a, lead, true, lane);
    for (int first = CHUNK * WARP; first < d / 8; first += CHUNK * WARP) {
        uint4 dh[NORMS][CHUNK], h[CHUNK];
        int64_t at = (int64_t)row * d + 8 * first;
#pragma unroll
        for (int k = 0; k < NORMS; k++)
            load_row(dh[k], a.norm[k].dh + at, k < a.norms ? d / 8 - first : 0, lane);
        load_row(h, a.h + at, d / 8 - first, lane);
        dot += norm_dot(dh, h, a, lead, false, lane);
    }
    return warp_sum(dot) / (float)d;
}

// dx of the lane's vectors of a span, and their part of every g . x.
template <int READERS, int NORMS, int CHUNK>
static __device__ __forceinline__ void grad_span(GradRow<READERS, NORMS> &r,
                                                 const GradSpan<READERS, NORMS, CHUNK> &u,
                                                 const StreamGrad &a, int row, int first, int d, int lane)
{
    int left = d / 8 - first;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (CHUNK > 1 && WARP * i >= left)
            break;
        int v = lane + WARP * i;
        float dx[8], x[8], g[8];
        unpack8(u.dx[i], dx); // zeros unless dx is added to
        if constexpr (NORMS > 0) {
            sum_dh(g, u.dh, i, a, r.lead, i == 0 && first == 0, lane);
            unpack8(u.h[i], x);
#pragma unroll
            for (int e = 0; e < 8; e++)
                dx[e] += r.rstd * (g[e] - x[e] * r.mean);
        }
        if (!NORMS || a.x) // else x is h
            unpack8(u.x[i], x);
#pragma unroll
        for (int k = 0; k < READERS; k++) {
            if (k >= a.readers)
                break;
            float c = __shfl_sync(FULL, r.c, k);
            unpack8(u.g[k][i], g);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                dx[e] += c * g[e];
                r.dot[k] += g[e] * x[e];
            }
            if (!NORMS || k > 0 || !a.beside)
                continue;
            float beside[8];
            unpack8(u.x[i], beside);
#pragma unroll
            for (int e = 0; e < 8; e++)
                r.beside += g[e] * beside[e];
        }
        if (a.dx && v < left)
            store_vec(a.dx + (int64_t)row * d, first + v, pack8(dx));
    }
}

// Returns what lane j's reader adds to its dscalar.
template <int READERS, int NORMS>
static __device__ __forceinline__ float grad_row(const GradCall &call, const Lane &l, int row, int d,
                                                 int lane)
{
    constexpr int TENSORS = READERS + NORMS + (NORMS > 0) + 2, CHUNK = TENSORS <= 5 ? 3 : 1;
    GradSpan<READERS, NORMS, CHUNK> u;
    GradRow<READERS, NORMS> r;
    const StreamGrad &a = call.a;
    float column = lane_column(l, row), mine = 0;
    r.rstd = a.rstd ? a.rstd[row] : 1;
#pragma unroll
    for (int k = 0; k < NORMS; k++) {
        const StreamNorm &norm = a.norm[k];
        r.lead[k] = k < a.norms && lane < norm.leads ? norm.lead[(int64_t)row * norm.leads + lane] : 0;
    }
    load_grad_span(u, call, row, 0, d, lane);
    r.c = l.plus + l.scalar * column;
    r.beside = 0;
#pragma unroll
    for (int k = 0; k < READERS; k++)
        r.dot[k] = 0;
    if constexpr (NORMS > 0)
        r.mean = norm_mean(u, a, r.lead, row, d, lane);

    for (int first = 0; first < d / 8; first += CHUNK * WARP) {
        if (first)
            load_grad_span(u, call, row, first, d, lane);
        grad_span(r, u, a, row, first, d, lane);
    }

#pragma unroll
    for (int k = 0; k < READERS; k++) {
        if (!(call.dots >> k & 1))
            continue;
        float dot = warp_sum(r.dot[k]);
        if (!a.x) // the dot with h = rstd x
            dot /= r.rstd;
        if (lane == k)
            mine = dot;
    }
    if (NORMS && a.beside) {
        float dot = warp_sum(r.beside);
        if (lane == READERS)
            mine = dot;
    }
    if (l.dcolumn)
        l.dcolumn[(int64_t)row * l.stride] = l.scalar * mine;
    return column * mine;
}

// partials NULL: no dscalar is wanted.
template <int READERS, int NORMS>
__global__ __launch_bounds__(ROW_THREADS, READERS > 6 ? 1 : 2) void stream_grad_kernel(
    const __grid_constant__ GradCall call, int N, int d, float *partials, unsigned *counter)
{
    int lane = threadIdx.x % WARP;
    Lane l = lane_of(call.lane, lane);
    float mine = 0;
    for (int row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; row < N; row += gridDim.x * ROW_WARPS)
        mine += grad_row<READERS, NORMS>(call, l, row, d, lane);
    if (partials)
        add_dscalars<READERS + 1>(call.lane, mine, partials, counter);
}

typedef void (*GradKernel)(GradCall, int, int, float *, unsigned *);

template <int READERS> static GradKernel grad_kernel(int norms)
{
    return norms > 1 ? stream_grad_kernel < READERS < 4 ? 4 : READERS, STREAM_NORMS >
       : norms > 0   ? stream_grad_kernel<READERS, 1>
                     : stream_grad_kernel<READERS, 0>;
}

static LaneReader lane_reader(const StreamReader *r)
{
    return {r->c.column, r->c.scalar, r->dcolumn, r->dscalar, r->c.stride, r->c.plus};
}

static bool wants_dot(const StreamReader *r) { return r->dscalar || r->dcolumn; }

static float *partial_sums(Stream s, const LaneReader *lanes, int blocks)
{
    for (int j = 0; j < WARP; j++)
        if (lanes[j].dscalar)
            return scratch_floats(s, SCRATCH_MIX, (size_t)blocks * WARP);
    return NULL;
}

static void one_stream(Stream s, const StreamGrad *a, int N, int d)
{
    GradCall call = {};
    int n = a->readers, blocks = row_blocks(N, GRAD_CTAS);
    n = n <= 1 && a->norms <= 1 ? 1 : n <= 2 && a->norms <= 1 ? 2 : n <= 4 ? 4 : n <= 6 ? 6 : STREAM_READERS;
    GradKernel kernel = n == 1   ? grad_kernel<1>(a->norms)
                        : n == 2 ? grad_kernel<2>(a->norms)
                        : n == 4 ? grad_kernel<4>(a->norms)
                        : n == 6 ? grad_kernel<6>(a->norms)
                                 : grad_kernel<STREAM_READERS>(a->norms);
    call.a = *a;
    for (int k = 0; k < a->readers; k++) {
        call.lane[k] = lane_reader(&a->reader[k]);
        call.dots |= (unsigned)wants_dot(&a->reader[k]) << k;
    }
    if (a->beside)
        call.lane[n].dscalar = a->dbeside;
    float *partials = partial_sums(s, call.lane, blocks);
    kernel<<<(unsigned)blocks, ROW_THREADS, 0, s>>>(call, N, d, partials, scratch_counter(s, SCRATCH_MIX));
    CHECK_LAUNCH();
}

// ---- several streams --------------------------------------------------------------------------------------

// Streams and the sums that read them: each g and x is loaded once, whoever reads it.
typedef struct {
    const floatX *x[STREAM_GRADS], *g[STREAM_READERS];
    const int32_t *rows[STREAM_GRADS];
    floatX *dx[STREAM_PAIR];
    bool accumulate[STREAM_PAIR];
    int pitch[STREAM_READERS], streams, sums;
    unsigned reads[STREAM_GRADS], dots[STREAM_GRADS]; // bit k: of sum k; dots: g . x is wanted
    LaneReader lane[WARP];                            // of stream s and sum k at s * SUMS + k
} SeveralCall;
static_assert(STREAM_GRADS * MIX_STREAMS <= WARP && STREAM_PAIR * STREAM_READERS <= WARP, "a lane a pair");

// Without DX there are dots alone.
template <int STREAMS, int SUMS, bool DX, bool DOTS>
static __device__ __forceinline__ float several_row(const SeveralCall &call, const Lane &l, int row, int d,
                                                    int lane)
{
    float dot[STREAMS][SUMS] = {}, column = lane_column(l, row), c = l.plus + l.scalar * column, mine = 0;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    for (int first = 0; first < d / 8; first += WARP) {
        int v = first + lane;
        bool inside = v < d / 8;
        uint4 ug[SUMS], ux[STREAMS], udx[STREAMS];
#pragma unroll
        for (int k = 0; k < SUMS; k++)
            ug[k] = inside && k < call.sums ? load_vec(call.g[k] + (int64_t)row * call.pitch[k], v) : zero;
#pragma unroll
        for (int s = 0; s < STREAMS; s++) {
            bool wanted = inside && s < call.streams;
            int64_t at = (int64_t)(DOTS && wanted && call.rows[s] ? call.rows[s][row] : row) * d;
            ux[s] = DOTS && wanted && call.dots[s] ? load_vec(call.x[s] + at, v) : zero;
            if constexpr (DX)
                udx[s] = wanted && call.accumulate[s] ? load_vec(call.dx[s] + at, v) : zero;
        }
#pragma unroll
        for (int s = 0; s < STREAMS; s++) {
            float dx[8], x[8], g[8];
            unpack8(ux[s], x);
            if constexpr (DX)
                unpack8(udx[s], dx);
#pragma unroll
            for (int k = 0; k < SUMS; k++) {
                if (!(call.reads[s] >> k & 1))
                    continue;
                float factor = DX ? __shfl_sync(FULL, c, s * SUMS + k) : 0;
                unpack8(ug[k], g);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    if (DX)
                        dx[e] += factor * g[e];
                    if (DOTS)
                        dot[s][k] += g[e] * x[e];
                }
            }
            if constexpr (DX)
                if (inside && call.dx[s])
                    store_vec(call.dx[s] + (int64_t)row * d, v, pack8(dx));
        }
    }
#pragma unroll
    for (int j = 0; DOTS && j < STREAMS * SUMS; j++) {
        if (!(call.dots[j / SUMS] >> j % SUMS & 1))
            continue;
        float sum = warp_sum(dot[j / SUMS][j % SUMS]);
        if (lane == j)
            mine = sum;
    }
    if (l.dcolumn)
        l.dcolumn[(int64_t)row * l.stride] = l.scalar * mine;
    return column * mine;
}

template <int STREAMS, int SUMS, bool DX, bool DOTS>
__global__ __launch_bounds__(ROW_THREADS, DX &&DOTS ? 1 : 2) void several_streams_kernel(
    const __grid_constant__ SeveralCall call, int N, int d, float *partials, unsigned *counter)
{
    int lane = threadIdx.x % WARP;
    Lane l = lane_of(call.lane, lane);
    float mine = 0;
    for (int row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; row < N; row += gridDim.x * ROW_WARPS)
        mine += several_row<STREAMS, SUMS, DX, DOTS>(call, l, row, d, lane);
    if (partials)
        add_dscalars<STREAMS * SUMS>(call.lane, mine, partials, counter);
}

typedef void (*SeveralKernel)(SeveralCall, int, int, float *, unsigned *);

static SeveralKernel several_kernel(int streams, bool dx, bool dots)
{
    return dx && dots               ? several_streams_kernel<STREAM_PAIR, STREAM_READERS, true, true>
           : dx                     ? several_streams_kernel<STREAM_PAIR, STREAM_READERS, true, false>
           : streams == STREAM_PAIR ? several_streams_kernel<STREAM_PAIR, MIX_STREAMS, false, true>
                                    : several_streams_kernel<STREAM_GRADS, MIX_STREAMS, false, true>;
}

// Which g of the call the reader has; a new one behind them.
static int sum_of(SeveralCall *call, const StreamReader *r, int d)
{
    int k = 0, pitch = r->pitch ? r->pitch : d;
    while (k < call->sums && (call->g[k] != r->g || call->pitch[k] != pitch))
        k++;
    if (k == call->sums) {
        assert(k < STREAM_READERS);
        call->g[k] = r->g;
        call->pitch[k] = pitch;
        call->sums++;
    }
    return k;
}

static void several_streams(Stream s, const StreamGrad *a, int count, bool dx, int N, int d)
{
    SeveralCall call = {};
    int most = dx ? STREAM_READERS : MIX_STREAMS, blocks = row_blocks(N, GRAD_CTAS);
    unsigned dots = 0;
    call.streams = count;
    for (int i = 0; i < count; i++) {
        assert(a[i].x && !a[i].norms);
        call.x[i] = a[i].x;
        call.rows[i] = a[i].rows;
        if (dx) {
            call.dx[i] = a[i].dx;
            call.accumulate[i] = a[i].dx && a[i].accumulate;
        }
        for (int j = 0; j < a[i].readers; j++) {
            const StreamReader *r = &a[i].reader[j];
            int k = sum_of(&call, r, d);
            assert(k < most && !(call.reads[i] >> k & 1));
            call.reads[i] |= 1u << k;
            call.dots[i] |= (unsigned)wants_dot(r) << k;
            call.lane[i * most + k] = lane_reader(r);
        }
        dots |= call.dots[i];
    }
    float *partials = partial_sums(s, call.lane, blocks);
    unsigned *counter = scratch_counter(s, SCRATCH_MIX);
    SeveralKernel kernel = several_kernel(count, dx, dots != 0);
    kernel<<<(unsigned)blocks, ROW_THREADS, 0, s>>>(call, N, d, partials, counter);
    CHECK_LAUNCH();
}

void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d)
{
    OP_SCOPE(stream_grads, a, count, N, d);
    bool dx = false;
    for (int i = 0; i < count; i++) {
        assert(a[i].readers <= STREAM_READERS && a[i].norms <= STREAM_NORMS && (a[i].x || a[i].h));
        assert(!a[i].beside || (a[i].readers && a[i].norms && !a[i].x));
        dx |= a[i].dx != NULL;
    }
    assert(count >= 1 && count <= (dx ? STREAM_PAIR : STREAM_GRADS) && d % 8 == 0);
    if (N <= 0)
        return;
    if (count == 1)
        one_stream(s, a, N, d);
    else
        several_streams(s, a, count, dx, N, d);
}
