// Gradients of streams, and of the coefficients of their sums. One warp a row, every tensor loaded once; of
// rows of more than 768 channels what a norm needs is loaded twice.
//
// Bound by memory. At 4.27 TB/s, d = 768, a stream of 16384 tokens has 25.2 MB, 5.9 us. Computed so, and
// measured on an H200 (bench_mixes), us for 16384 | 49152 tokens:
//   a reader with a scalar, norm, from h: 4 streams                     23.6, 33.1 |  71,  81
// The coefficients of a token, 4 bytes each in rows of generators, are 1% of that.
#include "llmc/cuda/device/cuda_common.cuh"

static const unsigned FULL = 0xffffffffu;

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
        if (!readers[j].dscalar)
            continue;
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

// A warp takes a row in blocks of BLOCK vectors a lane, and these in steps of CHUNK, whose loads are all
// issued before the first is used. Of a block it holds h and the gradient without the norm's mean, which is
// known behind the first block: dx = y - rstd mean h.
enum { BLOCK = 3 };

// With norms x is h, if it is not given: its place has what is beside.
template <int READERS, int NORMS, int CHUNK> struct GradStep {
    uint4 g[READERS][CHUNK], x[CHUNK];
    uint4 dh[NORMS ? NORMS : 1][CHUNK], h[CHUNK];
};

struct GradBlock {
    float y[BLOCK][8];
    uint4 h[BLOCK];
};

// Of one row: what its blocks have in common.
template <int READERS, int NORMS> struct GradRow {
    float c, rstd, lead[NORMS ? NORMS : 1]; // c: the coefficient of the lane's reader
    float dot[READERS], beside, norm_dot;   // the lane's parts; norm_dot: of dh h
};

static __device__ __forceinline__ const floatX *reader_row(const StreamReader &r, int row, int d)
{
    return r.g + (int64_t)row * (r.pitch ? r.pitch : d);
}

template <int READERS, int NORMS, int CHUNK>
static __device__ __forceinline__ void load_step(GradStep<READERS, NORMS, CHUNK> &u, const GradCall &call,
                                                 int row, int first, int d, int lane)
{
    const StreamGrad &a = call.a;
    int left = d / 8 - first;
    int64_t at = (int64_t)row * d + 8 * first,
            x_at = a.x && a.rows ? (int64_t)a.rows[row] * d + 8 * first : at;
    const floatX *x = a.x ? a.x : NORMS ? a.beside : a.h;
    bool wanted = a.x || !NORMS ? call.dots != 0 : x != NULL;
#pragma unroll
    for (int k = 0; k < NORMS; k++)
        load_row(u.dh[k], a.norm[k].dh + at, k < a.norms ? left : 0, lane);
    if (NORMS)
        load_row(u.h, a.h + at, left, lane);
    load_row(u.x, x + x_at, wanted ? left : 0, lane);
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

// Vector i of a step, `at` of the block. Readers and norms that are not there have zeros.
template <int READERS, int NORMS, int CHUNK>
static __device__ __forceinline__ void grad_vector(GradRow<READERS, NORMS> &r, GradBlock &b, int at,
                                                   const GradStep<READERS, NORMS, CHUNK> &u, int i,
                                                   const StreamGrad &a, bool leads, int lane)
{
    float x[8], g[8], h[8];
    unpack8(u.x[i], x);
#pragma unroll
    for (int e = 0; e < 8; e++)
        b.y[at][e] = 0;
#pragma unroll
    for (int k = 0; k < NORMS; k++) {
        unpack8(u.dh[k][i], g);
        if (leads && a.norm[k].lead)
            add_lead(g, r.lead[k], lane);
#pragma unroll
        for (int e = 0; e < 8; e++)
            b.y[at][e] += g[e];
    }
    if (NORMS) {
        b.h[at] = u.h[i];
        unpack8(u.h[i], h);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            r.norm_dot += b.y[at][e] * h[e];
            b.y[at][e] *= r.rstd;
            h[e] = a.x ? x[e] : h[e];
        }
    }
#pragma unroll
    for (int k = 0; k < READERS; k++) {
        if (k >= a.readers)
            break;
        float c = __shfl_sync(FULL, r.c, k);
        unpack8(u.g[k][i], g);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            b.y[at][e] += c * g[e];
            r.dot[k] += g[e] * (NORMS ? h[e] : x[e]);
            if (NORMS && k == 0)
                r.beside += g[e] * x[e];
        }
    }
}

// y of a block, and the lane's parts of the sums.
template <int READERS, int NORMS>
static __device__ __forceinline__ void grad_block(GradRow<READERS, NORMS> &r, GradBlock &b,
                                                  const GradCall &call, int row, int first, int d, int lane)
{
    constexpr int CHUNK = READERS + NORMS <= 2 ? BLOCK : 1;
#pragma unroll
    for (int at = 0; at < BLOCK; at += CHUNK) {
        if (at > 0 && first + at * WARP >= d / 8)
            break;
        GradStep<READERS, NORMS, CHUNK> u;
        load_step(u, call, row, first + at * WARP, d, lane);
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            grad_vector(r, b, at + i, u, i, call.a, first == 0 && at + i == 0, lane);
    }
}

// The lane's part of dh h behind the first block.
static __device__ __forceinline__ float norm_dot_behind(const StreamGrad &a, int row, int d, int lane)
{
    float dot = 0;
    for (int v = BLOCK * WARP + lane; v < d / 8; v += WARP) {
        float dh[8], h[8];
        unpack8(load_vec(a.h + (int64_t)row * d, v), h);
        for (int k = 0; k < a.norms; k++) {
            unpack8(load_vec(a.norm[k].dh + (int64_t)row * d, v), dh);
#pragma unroll
            for (int e = 0; e < 8; e++)
                dot += dh[e] * h[e];
        }
    }
    return dot;
}

// scale: rstd mean
static __device__ __forceinline__ void store_block(const GradBlock &b, bool norms, float scale,
                                                   const StreamGrad &a, int row, int first, int d, int lane)
{
    floatX *to = a.dx + (int64_t)row * d;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        int v = first + lane + WARP * i;
        if (!a.dx || v >= d / 8)
            continue;
        float dx[8], more[8];
        unpack8(b.h[i], more);
#pragma unroll
        for (int e = 0; e < 8; e++)
            dx[e] = norms ? b.y[i][e] - scale * more[e] : b.y[i][e];
        if (a.accumulate) {
            unpack8(load_vec(to, v), more);
#pragma unroll
            for (int e = 0; e < 8; e++)
                dx[e] += more[e];
        }
        store_vec(to, v, pack8(dx));
    }
}

// Returns what lane j's reader adds to its dscalar.
template <int READERS, int NORMS>
static __device__ __forceinline__ float grad_row(const GradCall &call, const Lane &l, int row, int d,
                                                 int lane)
{
    GradRow<READERS, NORMS> r;
    const StreamGrad &a = call.a;
    float column = lane_column(l, row), mine = 0, scale = 0;
    r.rstd = a.rstd ? a.rstd[row] : 1;
#pragma unroll
    for (int k = 0; k < NORMS; k++) {
        const StreamNorm &norm = a.norm[k];
        r.lead[k] = k < a.norms && lane < norm.leads ? norm.lead[(int64_t)row * norm.leads + lane] : 0;
    }
    r.c = l.plus + l.scalar * column;
    r.beside = r.norm_dot = 0;
#pragma unroll
    for (int k = 0; k < READERS; k++)
        r.dot[k] = 0;
    for (int first = 0; first < d / 8; first += BLOCK * WARP) {
        GradBlock b;
        grad_block(r, b, call, row, first, d, lane);
        if (NORMS && first == 0)
            scale = r.rstd / (float)d * warp_sum(r.norm_dot + norm_dot_behind(a, row, d, lane));
        store_block(b, NORMS > 0, scale, a, row, first, d, lane);
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

// CTAs of a multiprocessor that are launched: as many as are resident where the rows have 768 channels. Each
// that follows another would begin without a load in flight, and make the sum over CTAs at the end longer.
static constexpr int grad_ctas(int readers, int norms)
{
    return readers + norms > 7 ? 1 : norms || readers > 4 ? 2 : 3;
}
static constexpr int several_ctas(int streams, bool dx, bool dots)
{
    return dx && dots ? 1 : dx || streams > STREAM_PAIR ? 2 : 3;
}

// partials NULL: no dscalar is wanted.
template <int READERS, int NORMS>
__global__ __launch_bounds__(ROW_THREADS, grad_ctas(READERS, NORMS)) void stream_grad_kernel(
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

typedef struct {
    void (*kernel)(GradCall, int, int, float *, unsigned *);
    int ctas; // of a multiprocessor
} GradKernel;

template <int READERS, int NORMS> static GradKernel grad_kernel_of(void)
{
    return {stream_grad_kernel<READERS, NORMS>, grad_ctas(READERS, NORMS)};
}

template <int READERS> static GradKernel grad_kernel(int norms)
{
    constexpr int SOME = READERS < 4 ? 4 : READERS; // with more norms than one there are no kernels for fewer
    return norms > 1   ? grad_kernel_of<SOME, STREAM_NORMS>()
           : norms > 0 ? grad_kernel_of<READERS, 1>()
                       : grad_kernel_of<READERS, 0>();
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
    int n = a->readers;
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
    int blocks = row_blocks(N, kernel.ctas);
    float *partials = partial_sums(s, call.lane, blocks);
    kernel.kernel<<<(unsigned)blocks, ROW_THREADS, 0, s>>>(call, N, d, partials,
                                                           scratch_counter(s, SCRATCH_MIX));
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
__global__ __launch_bounds__(ROW_THREADS, several_ctas(STREAMS, DX, DOTS)) void several_streams_kernel(
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

typedef struct {
    void (*kernel)(SeveralCall, int, int, float *, unsigned *);
    int ctas; // of a multiprocessor
} SeveralKernel;

template <int STREAMS, int SUMS, bool DX, bool DOTS> static SeveralKernel several_kernel_of(void)
{
    return {several_streams_kernel<STREAMS, SUMS, DX, DOTS>, several_ctas(STREAMS, DX, DOTS)};
}

static SeveralKernel several_kernel(int streams, bool dx, bool dots)
{
    return dx && dots               ? several_kernel_of<STREAM_PAIR, STREAM_READERS, true, true>()
           : dx                     ? several_kernel_of<STREAM_PAIR, STREAM_READERS, true, false>()
           : streams == STREAM_PAIR ? several_kernel_of<STREAM_PAIR, MIX_STREAMS, false, true>()
                                    : several_kernel_of<STREAM_GRADS, MIX_STREAMS, false, true>();
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
    int most = dx ? STREAM_READERS : MIX_STREAMS;
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
    SeveralKernel kernel = several_kernel(count, dx, dots != 0);
    int blocks = row_blocks(N, kernel.ctas);
    float *partials = partial_sums(s, call.lane, blocks);
    kernel.kernel<<<(unsigned)blocks, ROW_THREADS, 0, s>>>(call, N, d, partials,
                                                           scratch_counter(s, SCRATCH_MIX));
    CHECK_LAUNCH();
}

void stream_grads(Stream s, const StreamGrad *a, int count, int N, int d)
{
    OP_SCOPE(stream_grads, a, count, N, d);
    bool dx = false;
    for (int i = 0; i < count; i++) {
        assert(a[i].readers <= STREAM_READERS && a[i].norms <= STREAM_NORMS && (a[i].x || a[i].h));
        for (int k = 0; k < a[i].norms; k++)
            assert(a[i].norm[k].leads <= STREAM_LEADS);
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
