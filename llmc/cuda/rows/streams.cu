// Sums of streams with coefficients. One warp a row. A warp takes a row in spans of MIX_CHUNK vectors a lane:
// all loads of a span are issued before the first is used, and a row of at most one span is loaded once.
//
// Bound by memory. At 4.27 TB/s, d = 768, a stream of 16384 tokens has 25.2 MB, 5.9 us. Computed so, and
// measured on an H200 (bench_mixes), us for 16384 | 49152 tokens:
//   stream_mix, 2 terms, y and h: 4 streams                             23.6, 27.0 |  71,  75
//   stream_mix, 4 terms (x, branch, x0, bigram), y and h: 6 streams     35.4, 39.2 | 106, 108
// The coefficients of a token, 4 bytes each in rows of generators, are 1% of that.
#include "llmc/cuda/device/cuda_common.cuh"

static __device__ __forceinline__ float scalar_of(const StreamFactor &c) { return c.scalar ? *c.scalar : 1; }

static __device__ __forceinline__ float column_of(const StreamFactor &c, int row)
{
    return c.column ? c.column[(int64_t)row * c.stride] : 1;
}

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
    kernels[a->terms - 1]<<<(unsigned)ceil_div(N, ROW_WARPS), ROW_THREADS, 0, s>>>(*a, N, d);
    CHECK_LAUNCH();
}
