// Rows of tables: gathered with signs, and their gradients as sums in a fixed order.
//
// Bound by memory. At 4.27 TB/s, rows of 768 channels; us for 16384 | 49152 tokens:
//   signed_gather: a row of the table, one of the result                              11.8 | 35
//   table_grad, r distinct rows: a gradient a token, r rows of fp32 read and written  5.9 + 1.44 r / 1000
//   | 17.7 + same
#include "llmc/cuda/device/cuda_common.cuh"

enum {
    SEGMENT = 16 /* positions a warp sums */,
    STRIP = 4 * WARP /* columns it sums */,
    JOIN = 16 /* partial sums a warp loads at once */
};

// ---- gather -----------------------------------------------------------------------------------------------

// The signs of a vector of eight channels are one byte of the row's bits.
template <int VPL>
__global__ __launch_bounds__(ROW_THREADS) void signed_gather_kernel(floatX *out, const floatX *table,
                                                                    const int32_t *rows, RowSigns signs,
                                                                    int N, int d, int width)
{
    int lane = threadIdx.x % WARP, t = blockIdx.x * ROW_WARPS + threadIdx.x / WARP, vectors = width / 8;
    if (t >= N)
        return;
    const uint8_t *bits =
        reinterpret_cast<const uint8_t *>(signs.bits) + (int64_t)signs.rows[t] * ((width + 31) / 32) * 4;
    uint4 u[VPL];
    load_row(u, table + (int64_t)rows[t] * width, vectors, lane);
#pragma unroll
    for (int i = 0; i < VPL; i++) {
        uint32_t b = lane + WARP * i < vectors ? bits[lane + WARP * i] : 0;
        u[i].x ^= (b & 1) << 15 | (b & 2) << 30;
        u[i].y ^= (b & 4) << 13 | (b & 8) << 28;
        u[i].z ^= (b & 16) << 11 | (b & 32) << 26;
        u[i].w ^= (b & 64) << 9 | (b & 128) << 24;
    }
    store_row(out + (int64_t)t * d, u, d / 8, lane); // zeros beyond the table's width
}

void signed_gather(Stream s, floatX *out, const floatX *table, const int32_t *rows, const RowSigns *signs,
                   int N, int d, int width)
{
    OP_SCOPE(signed_gather, N, d, width);
    assert(d % 8 == 0 && width % 8 == 0 && width <= d);
    if (N <= 0)
        return;
    unsigned blocks = (unsigned)ceil_div(N, ROW_WARPS);
    DISPATCH_WIDTH(d, (signed_gather_kernel<VPL>
                       <<<blocks, ROW_THREADS, 0, s>>>(out, table, rows, *signs, N, d, width)));
}

// ---- rows of a table --------------------------------------------------------------------------------------
// The positions, sorted by token, are cut into segments. A warp sums a strip of columns of a segment; it asks
// for all gradients and all rows of the table at once, so that nothing waits for anything but memory's rate.
// Tokens that lie inside go to the table, the first and last token of a segment may go on in the neighbours:
// their sums wait in scratch (segments, 2, d) for the second kernel, which adds them in order. So a token
// that occurs a thousand times costs no more than a thousand tokens, and every element of the table is
// changed by one thread only. (Additions by red.global.add, which wait for nothing either, were slower.)

static __device__ __forceinline__ void add4(float4 &sum, float4 x)
{
    sum.x += x.x;
    sum.y += x.y;
    sum.z += x.z;
    sum.w += x.w;
}

static __device__ __forceinline__ float4 plus_scaled(float4 old, float4 sum, float factor)
{
    return make_float4(old.x + factor * sum.x, old.y + factor * sum.y, old.z + factor * sum.z,
                       old.w + factor * sum.w);
}

static __device__ __forceinline__ float4 unpack4(uint2 u)
{
    return make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u),
                       __uint_as_float(u.y << 16), __uint_as_float(u.y & 0xffff0000u));
}

static __device__ __forceinline__ float flip(float x, uint32_t bit) // bit 0 set: the sign changes
{
    return __uint_as_float(__float_as_uint(x) ^ bit << 31);
}

// The row whose positions contain `position`. The lanes of a warp look at 32 places at a time.
static __device__ __forceinline__ int find_row(const int32_t *row_start, int rows, int position, int lane)
{
    int lo = 0, hi = rows; // row_start[lo] <= position < row_start[hi]
    while (hi - lo > 1) {
        int step = (hi - lo + WARP - 1) / WARP, probe = lo + lane * step;
        unsigned below =
            __ballot_sync(0xffffffffu, probe < hi && row_start[probe] <= position); // lane 0's always is
        lo += (31 - __clz((int)below)) * step;
        hi = min(hi, lo + step);
    }
    return lo;
}

// Sources: what a position gives to the lane's four columns. A warp takes BATCH positions at a time: load()
// issues the loads of positions first .. first + BATCH of the segment, whose lane i has position i; value()
// is what position t, the i-th of them, gives.
namespace
{

struct PlainRows {
    enum { BATCH = SEGMENT };
    struct Raw {
        uint2 u[BATCH];
    };
    const floatX *g;
    int d;
    __device__ __forceinline__ void load(Raw &raw, int position, int, int count, int column, bool there) const
    {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int t = __shfl_sync(0xffffffffu, position, i);
            raw.u[i] = there && i < count ? *reinterpret_cast<const uint2 *>(g + (int64_t)t * d + column)
                                          : make_uint2(0, 0);
        }
    }
    __device__ __forceinline__ float4 value(const Raw &raw, int i, int, int) const
    {
        return unpack4(raw.u[i]);
    }
};

// The four columns of one reader.
struct DeviceReader {
    RowReader r;    // pitch filled in
    RowSigns signs; // bits NULL: none
    int group;      // channels of a factor
    int sign_words; // of a row of bits
    __device__ __forceinline__ float factor(int t, int column) const
    {
        return r.factor ? __ldg(r.factor + (int64_t)t * r.stride + column / group) : 1;
    }
    __device__ __forceinline__ float lead(int t, int column) const
    {
        return column < r.leads ? __ldg(r.lead + (int64_t)t * r.leads + column) : 0;
    }
    // factor4: of the first column, and of the others where a group holds all four
    __device__ __forceinline__ float4 value(uint2 u, float factor4, uint32_t bits, int t, int column) const
    {
        float4 g = unpack4(u), f = make_float4(factor4, factor4, factor4, factor4);
        if (group % 4)
            f = make_float4(factor4, factor(t, column + 1), factor(t, column + 2), factor(t, column + 3));
        float4 x = make_float4(f.x * g.x, f.y * g.y, f.z * g.z, f.w * g.w);
        if (column < r.leads)
            add4(x,
                 make_float4(lead(t, column), lead(t, column + 1), lead(t, column + 2), lead(t, column + 3)));
        bits >>= column % 32;
        return make_float4(flip(x.x, bits), flip(x.y, bits >> 1), flip(x.z, bits >> 2), flip(x.w, bits >> 3));
    }
};

template <int READERS> struct ReaderRows {
    enum { BATCH = 8 / READERS };
    struct Raw {
        uint2 u[READERS][BATCH];
        float factor[READERS][BATCH];
        uint32_t bits[READERS][BATCH];
        unsigned wanted; // bit i: the i-th position is there
    };
    DeviceReader reader[READERS];
    __device__ __forceinline__ void load(Raw &raw, int position, int first, int count, int column,
                                         bool there) const
    {
        raw.wanted = !there ? 0 : count - first >= BATCH ? ~0u : (1u << max(count - first, 0)) - 1;
#pragma unroll
        for (int k = 0; k < READERS; k++) {
            const DeviceReader &a = reader[k];
            int sign_row = a.signs.bits ? a.signs.rows[position] : 0;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int t = __shfl_sync(0xffffffffu, position, first + i),
                    sign = __shfl_sync(0xffffffffu, sign_row, first + i);
                bool wanted = raw.wanted >> i & 1;
                raw.u[k][i] =
                    wanted ? __ldg(reinterpret_cast<const uint2 *>(a.r.g + (int64_t)t * a.r.pitch + column))
                           : make_uint2(0, 0);
                raw.factor[k][i] = wanted ? a.factor(t, column) : 0;
                raw.bits[k][i] = wanted && a.signs.bits
                                     ? __ldg(a.signs.bits + (int64_t)sign * a.sign_words + column / 32)
                                     : 0;
            }
        }
    }
    __device__ __forceinline__ float4 value(const Raw &raw, int i, int t, int column) const
    {
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < READERS; k++)
            if (raw.wanted >> i & 1)
                add4(x, reader[k].value(raw.u[k][i], raw.factor[k][i], raw.bits[k][i], t, column));
        return x;
    }
};

} // namespace

// grid (width / STRIP, segments / ROW_WARPS): the strips of a row are asked for at about the same time
template <class Source>
__global__ __launch_bounds__(ROW_THREADS, 2) void rows_grad_kernel(float *dtable,
                                                                   const __grid_constant__ Source source,
                                                                   const float *scale, TokenRows rows, int N,
                                                                   int width, float *partials, int2 *open)
{
    int lane = threadIdx.x % WARP, segment = blockIdx.y * ROW_WARPS + threadIdx.x / WARP,
        column = blockIdx.x * STRIP + 4 * lane;
    int begin = segment * SEGMENT, count = min(SEGMENT, N - begin), num_rows = *rows.num_rows;
    if (begin >= N)
        return;
    static_assert(SEGMENT < WARP, "a lane holds one position, and one row of the table");
    bool there = column < width;
    float factor = scale ? scale[0] : 1;
    int first = find_row(rows.row_start, num_rows, begin, lane), row = first + lane;
    int position = lane < count ? rows.order[begin + lane] : 0;
    int stop = row < num_rows ? rows.row_start[row + 1] : 0, token = row < num_rows ? rows.row_token[row] : 0;
    bool comes_in = rows.row_start[first] < begin; // the first token began in an earlier segment
    unsigned ends =
        __reduce_or_sync(0xffffffffu, stop > begin && stop <= begin + count ? 1u << (stop - begin - 1) : 0);
    unsigned inside = comes_in ? ends & (ends - 1) : ends; // bit i: a token that lies inside ends at place i
    int last = __popc(ends), last_stop = __shfl_sync(0xffffffffu, stop, last),
        last_token = __shfl_sync(0xffffffffu, token, last);
    bool goes_on = !(ends >> (count - 1) & 1), begins = !comes_in || ends; // of the segment's last token
    if (blockIdx.x == 0 && lane == 0)
        open[segment] = make_int2(goes_on && begins ? last_token : -1, (last_stop - 1) / SEGMENT);
    float *table = dtable + column;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int at = 0; at < SEGMENT; at += Source::BATCH) {
        typename Source::Raw raw;
        float4 old[Source::BATCH];
        source.load(raw, position, at, count, column, there);
#pragma unroll
        for (int i = 0; i < Source::BATCH; i++) {
            unsigned before = ends & ((1u << (at + i)) - 1);
            int64_t to = (int64_t)__shfl_sync(0xffffffffu, token, __popc(before)) * width;
            if (there && inside >> (at + i) & 1)
                old[i] = *reinterpret_cast<const float4 *>(table + to);
        }
#pragma unroll
        for (int i = 0; i < Source::BATCH; i++) {
            unsigned before = ends & ((1u << (at + i)) - 1);
            int64_t to = (int64_t)__shfl_sync(0xffffffffu, token, __popc(before)) * width;
            add4(sum, source.value(raw, i, __shfl_sync(0xffffffffu, position, at + i), column));
            if (!(ends >> (at + i) & 1) && at + i + 1 != count)
                continue;
            int side = !(comes_in && !before); // 0: comes in, 1: begins here
            if (there && inside >> (at + i) & 1)
                *reinterpret_cast<float4 *>(table + to) = plus_scaled(old[i], sum, factor);
            else if (there)
                *reinterpret_cast<float4 *>(partials + (2 * (int64_t)segment + side) * width + column) = sum;
            sum = make_float4(0, 0, 0, 0);
        }
    }
}

// A warp for each segment in which a token begins that goes on in the next: adds up that token's partial
// sums.
//   open (segments): that token, or -1; the last segment it reaches
__global__ __launch_bounds__(ROW_THREADS, 3) void rows_join_kernel(float *dtable, const float *scale,
                                                                   int segments, int width,
                                                                   const float *partials, const int2 *open)
{
    int lane = threadIdx.x % WARP, segment = blockIdx.y * ROW_WARPS + threadIdx.x / WARP,
        column = blockIdx.x * STRIP + 4 * lane;
    if (segment >= segments || column >= width)
        return;
    int token = open[segment].x, last = open[segment].y;
    if (token < 0)
        return;
    float4 sum = *reinterpret_cast<const float4 *>(partials + (2 * (int64_t)segment + 1) * width + column);
    for (int j = segment + 1; j <= last; j += JOIN) {
        float4 x[JOIN]; // all asked for at once: a frequent token has a hundred of them
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            x[k] = j + k <= last
                       ? *reinterpret_cast<const float4 *>(partials + 2 * (int64_t)(j + k) * width + column)
                       : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            add4(sum, x[k]);
    }
    float4 *p = reinterpret_cast<float4 *>(dtable + (int64_t)token * width + column);
    *p = plus_scaled(*p, sum, scale ? scale[0] : 1);
}

template <class Source>
static void rows_grad(Stream s, float *dtable, const Source &source, const float *scale,
                      const TokenRows *rows, int N, int width)
{
    int64_t segments = ceil_div(N, SEGMENT);
    dim3 grid((unsigned)ceil_div(width, STRIP), (unsigned)ceil_div(segments, ROW_WARPS));
    float *partials = scratch_floats(s, SCRATCH_TABLE_GRAD, (size_t)segments * (2 * (size_t)width + 2));
    int2 *open = reinterpret_cast<int2 *>(partials + segments * 2 * width);
    rows_grad_kernel<<<grid, ROW_THREADS, 0, s>>>(dtable, source, scale, *rows, N, width, partials, open);
    CHECK_LAUNCH();
    rows_join_kernel<<<grid, ROW_THREADS, 0, s>>>(dtable, scale, (int)segments, width, partials, open);
    CHECK_LAUNCH();
}

void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows,
                    int N, int d)
{
    OP_SCOPE(embedding_grad, N, d);
    if (N > 0)
        rows_grad(s, dtable, PlainRows{g, d}, scale, rows, N, d);
}

template <int READERS>
static void table_grad_of(Stream s, float *dtable, const RowReader *readers, const TokenRows *rows, int N,
                          int d, int width)
{
    ReaderRows<READERS> source = {};
    for (int k = 0; k < READERS; k++) {
        DeviceReader *to = &source.reader[k];
        to->r = readers[k];
        to->r.pitch = readers[k].pitch ? readers[k].pitch : d;
        to->group = readers[k].factor ? d / readers[k].groups : d;
        if (readers[k].signs)
            to->signs = *readers[k].signs;
        to->sign_words = (width + 31) / 32;
    }
    rows_grad(s, dtable, source, NULL, rows, N, width);
}

void table_grad(Stream s, float *dtable, const RowReader *readers, int count, const TokenRows *rows, int N,
                int d, int width)
{
    OP_SCOPE(table_grad, readers, count, N, d, width);
    assert(count >= 1 && count <= ROW_READERS && d % 8 == 0 && width % 8 == 0 && width <= d);
    if (N > 0)
        (count == 1 ? table_grad_of<1> : table_grad_of<2>)(s, dtable, readers, rows, N, d, width);
}
