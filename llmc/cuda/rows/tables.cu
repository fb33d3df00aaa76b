// Rows of tables: gathered with signs, and their gradients as sums in a fixed order.
//
// Bound by memory. At 4.27 TB/s, rows of 768 channels; us for 16384 | 49152 tokens:
//   signed_gather: a row of the table, one of the result                              11.8 | 35
//   table_grad, r distinct rows: a gradient a token, r rows of fp32 read and written  5.9 + 1.44 r / 1000
//   | 17.7 + same
// Measured, 49152 tokens: 109 with r 39783 (limit 75), 60 with r 13024 (limit 36), of which joining partial
// sums takes up to 9. Slower: 8 or 16 positions in flight, red.global.add in place of load, add and store.
#include "llmc/cuda/device/cuda_common.cuh"
#include "llmc/cuda/sm80/sm80.cuh"

enum {
    SEGMENT = 32,     // positions a warp sums
    DEPTH = 4,        // of them in flight
    STRIP = 8 * WARP, // columns it sums
    SUM_WARPS = 3,    // of a CTA
    SUM_THREADS = SUM_WARPS * WARP,
    SUM_CTAS = 9,            // of a multiprocessor, as far as registers allow
    JOIN = 16,               // partial sums a warp loads at once
    JOIN_COLUMNS = 4 * WARP, // and their columns
    MOST_LEADS = WARP
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
// The positions, sorted by token, are cut into segments. A warp sums 256 columns of a segment, eight a lane.
// What the next DEPTH positions need is loaded to shared memory meanwhile: gradients, and the table's rows
// whose sums will be complete. Sums of tokens that lie inside are added to the table; the first and last
// token of a segment may go on in the neighbours, and their sums are kept in scratch (segments, 2, width) for
// the second kernel, which adds them in order. So a token that occurs a thousand times costs no more than a
// thousand tokens, and every element of the table is changed by one thread only.

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

namespace
{

struct DeviceReader {
    RowReader r;    // pitch filled in
    RowSigns signs; // bits NULL: none
    int group;      // channels of a factor
    int sign_words; // of a row of bits
};
template <int READERS> struct Readers {
    DeviceReader reader[READERS];
};

// What a warp holds of a position, in shared memory.
template <int READERS> struct Place {
    uint4 g[READERS][WARP];
    float4 old[2][WARP];
    float lead[READERS][WARP]; // of the first columns, for the warp that has them
    uint32_t bits[READERS][WARP];
};

// One reader, as a warp sees it.
struct Lane {
    int column;       // the first of the lane's eight
    bool there;       // they exist
    bool first_strip; // the warp has column 0
};

// Factors of a segment's positions: lane i has those of position i, of the two groups that the strip may
// have.
struct Factors {
    float f[2];
    int which;  // of the two, for this lane's columns
    bool plain; // the strip has no more groups, and none ends inside a lane's columns
};

static __device__ __forceinline__ Factors load_factors(const DeviceReader &a, int position, int strip,
                                                       int width, int column)
{
    if (!a.r.factor)
        return {{1, 1}, 0, true};
    int first = strip * STRIP / a.group, last = (min((strip + 1) * STRIP, width) - 1) / a.group;
    const float *from = a.r.factor + (int64_t)position * a.r.stride;
    return {{__ldg(from + first), __ldg(from + min(first + 1, last))},
            min(column, width - 1) / a.group - first,
            last - first < 2 && a.group % 8 == 0};
}

static __device__ __forceinline__ void load_place(const DeviceReader &a, uint4 *g, float *lead,
                                                  uint32_t *bits, int t, int sign_row, const Lane &l)
{
    int lane = threadIdx.x % WARP;
    sm80::copy_async(g + lane, a.r.g + (l.there ? (int64_t)t * a.r.pitch + l.column : 0), l.there ? 16 : 0);
    if (a.signs.bits)
        sm80::copy_async_4(bits + lane,
                           a.signs.bits + (l.there ? (int64_t)sign_row * a.sign_words + l.column / 32 : 0),
                           l.there ? 4 : 0);
    if (l.first_strip && a.r.leads)
        sm80::copy_async_4(lead + lane, a.r.lead + (lane < a.r.leads ? (int64_t)t * a.r.leads + lane : 0),
                           lane < a.r.leads ? 4 : 0);
}

// What a warp has loaded of one reader's position.
struct Loaded {
    const uint4 *g;
    const float *lead;
    const uint32_t *bits;
};

// sum += what a reader gives at place i of the segment, position t.
static __device__ __forceinline__ void add_place(float (&sum)[8], const DeviceReader &a, const Factors &f,
                                                 const Loaded &p, int i, int t, const Lane &l)
{
    int lane = threadIdx.x % WARP;
    uint4 u = p.g[lane];
    uint32_t b = a.signs.bits ? p.bits[lane] >> l.column % 32 : 0;
    u.x ^= (b & 1) << 15 | (b & 2) << 30;
    u.y ^= (b & 4) << 13 | (b & 8) << 28;
    u.z ^= (b & 16) << 11 | (b & 32) << 26;
    u.w ^= (b & 64) << 9 | (b & 128) << 24;
    float x[8];
    unpack8(u, x);
    float f0 = __shfl_sync(0xffffffffu, f.f[0], i), f1 = __shfl_sync(0xffffffffu, f.f[1], i),
          factor = f.which ? f1 : f0;
    if (f.plain) {
#pragma unroll
        for (int c = 0; c < 8; c++)
            sum[c] += factor * x[c];
    } else if (l.there) {
#pragma unroll
        for (int c = 0; c < 8; c++)
            sum[c] += __ldg(a.r.factor + (int64_t)t * a.r.stride + (l.column + c) / a.group) * x[c];
    }
    if (l.first_strip && lane < (a.r.leads + 7) / 8) { // zeros from `leads` on
#pragma unroll
        for (int c = 0; c < 8; c++)
            sum[c] += __uint_as_float(__float_as_uint(p.lead[8 * lane + c]) ^ b >> c << 31);
    }
}

} // namespace

// The tokens of a segment. Bit i of `ends`: one ends at place i; of `inside`: and it began in this segment.
struct SegmentTokens {
    unsigned ends, inside;
    bool comes_in;     // the first token began in an earlier segment
    int token;         // lane k has the token that is the segment's k-th
    int continued;     // the token that begins here and goes on in the next segment, or -1
    int last_position; // of the segment's last token
};

static __device__ __forceinline__ SegmentTokens segment_tokens(const TokenRows &rows, int begin, int count)
{
    int lane = threadIdx.x % WARP, num_rows = *rows.num_rows,
        first = find_row(rows.row_start, num_rows, begin, lane), row = first + lane,
        stop = row < num_rows ? rows.row_start[row + 1] : 0;
    SegmentTokens s;
    s.token = row < num_rows ? rows.row_token[row] : 0;
    s.comes_in = rows.row_start[first] < begin;
    s.ends =
        __reduce_or_sync(0xffffffffu, stop > begin && stop <= begin + count ? 1u << (stop - begin - 1) : 0);
    s.inside = s.comes_in ? s.ends & (s.ends - 1) : s.ends;
    int last = __popc(s.ends) % WARP, last_token = __shfl_sync(0xffffffffu, s.token, last);
    bool goes_on = !(s.ends >> (count - 1) & 1), begins = !s.comes_in || s.ends;
    s.continued = goes_on && begins ? last_token : -1;
    s.last_position = __shfl_sync(0xffffffffu, stop, last) - 1;
    return s;
}

// Pairs of lanes have sums of 16 columns, eight each. They exchange halves, so that a lane has four of either
// eight, and a store of the warp writes whole sectors.
static __device__ __forceinline__ void exchange_halves(const float (&sum)[8], float4 &low, float4 &high)
{
    bool odd = threadIdx.x % 2;
    float got[4];
#pragma unroll
    for (int c = 0; c < 4; c++)
        got[c] = __shfl_xor_sync(0xffffffffu, odd ? sum[c] : sum[4 + c], 1);
    low = odd ? make_float4(got[0], got[1], got[2], got[3]) : make_float4(sum[0], sum[1], sum[2], sum[3]);
    high = odd ? make_float4(sum[4], sum[5], sum[6], sum[7]) : make_float4(got[0], got[1], got[2], got[3]);
}

// grid: a warp a strip of a segment; those of a segment are neighbours
template <int READERS>
__global__ __launch_bounds__(SUM_THREADS,
                             SUM_CTAS) void rows_grad_kernel(float *dtable,
                                                             const __grid_constant__ Readers<READERS> all,
                                                             const float *scale, TokenRows rows, int N,
                                                             int width, float *partials, int2 *open)
{
    __shared__ Place<READERS> places[SUM_WARPS][DEPTH];
    static_assert(SEGMENT <= WARP, "a lane holds one position, and one row of the table");
    int lane = threadIdx.x % WARP, strips = (width + STRIP - 1) / STRIP,
        warp = blockIdx.x * SUM_WARPS + threadIdx.x / WARP, segment = warp / strips, strip = warp % strips,
        begin = segment * SEGMENT, count = min(SEGMENT, N - begin);
    Place<READERS> *place = places[threadIdx.x / WARP];
    if (begin >= N)
        return;
    Lane l = {strip * STRIP + 8 * lane, strip * STRIP + 8 * lane < width, strip == 0};
    float scale_all = scale ? scale[0] : 1;
    int position = rows.order[begin + min(lane, count - 1)], sign_row[READERS];
    Factors factors[READERS];
#pragma unroll
    for (int k = 0; k < READERS; k++) {
        const DeviceReader &a = all.reader[k];
        sign_row[k] = a.signs.bits ? a.signs.rows[position] : 0;
        factors[k] = load_factors(a, position, strip, width, l.column);
    }
    auto load_gradients = [&](int i) {
        Place<READERS> &p = place[i % DEPTH];
#pragma unroll
        for (int k = 0; k < READERS; k++)
            load_place(all.reader[k], p.g[k], p.lead[k], p.bits[k], __shfl_sync(0xffffffffu, position, i),
                       __shfl_sync(0xffffffffu, sign_row[k], i), l);
    };
    for (int i = 0; i < min(DEPTH, count); i++)
        load_gradients(i); // before the rows are searched for

    SegmentTokens tokens = segment_tokens(rows, begin, count);
    if (strip == 0 && lane == 0)
        open[segment] = make_int2(tokens.continued, tokens.last_position / SEGMENT);
    int column1 = strip * STRIP + lane / 2 * 16 + lane % 2 * 4, column2 = column1 + 8; // after the exchange
    bool there1 = column1 < width, there2 = column2 < width;
    auto row_at = [&](int i) { // of the token that ends at place i
        int k = __popc(tokens.ends & ((1u << i) - 1));
        return dtable + (int64_t)__shfl_sync(0xffffffffu, tokens.token, k) * width;
    };
    auto load_row_of_table = [&](int i) {
        if (!(tokens.inside >> i & 1))
            return;
        const float *from = row_at(i);
        sm80::copy_async(&place[i % DEPTH].old[0][lane], from + (there1 ? column1 : 0), there1 ? 16 : 0);
        sm80::copy_async(&place[i % DEPTH].old[1][lane], from + (there2 ? column2 : 0), there2 ? 16 : 0);
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) {
        if (i < count)
            load_row_of_table(i);
        sm80::commit_loads();
    }

    float sum[8] = {};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const Place<READERS> &p = place[i % DEPTH];
        sm80::wait_loads<DEPTH - 1>();
        __syncwarp(); // leads are read by other lanes than those that load them
        int t = __shfl_sync(0xffffffffu, position, i);
#pragma unroll
        for (int k = 0; k < READERS; k++)
            add_place(sum, all.reader[k], factors[k], {p.g[k], p.lead[k], p.bits[k]}, i, t, l);
        if (tokens.ends >> i & 1 || i + 1 == count) {
            float4 low, high;
            exchange_halves(sum, low, high);
            bool whole = tokens.inside >> i & 1, begins = !tokens.comes_in || tokens.ends & ((1u << i) - 1);
            float *to = whole ? row_at(i) : partials + (2 * (int64_t)segment + begins) * width;
            if (whole) {
                low = plus_scaled(p.old[0][lane], low, scale_all);
                high = plus_scaled(p.old[1][lane], high, scale_all);
            }
            if (there1)
                *reinterpret_cast<float4 *>(to + column1) = low;
            if (there2)
                *reinterpret_cast<float4 *>(to + column2) = high;
#pragma unroll
            for (int c = 0; c < 8; c++)
                sum[c] = 0;
        }
        __syncwarp(); // all have read the place
        if (i + DEPTH < count) {
            load_gradients(i + DEPTH);
            load_row_of_table(i + DEPTH);
        }
        sm80::commit_loads();
    }
}

// The partial sums first .. last of a token, in order.
static __device__ __forceinline__ float4 sum_partials(const float *partials, int first, int last, int width,
                                                      int column)
{
    float4 sum = make_float4(0, 0, 0, 0);
    for (int j = first; j <= last; j += JOIN) {
        float4 x[JOIN]; // all asked for at once
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            x[k] = j + k <= last
                       ? *reinterpret_cast<const float4 *>(partials + 2 * (int64_t)(j + k) * width + column)
                       : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < JOIN; k++)
            add4(sum, x[k]);
    }
    return sum;
}

// A warp for each segment in which a token begins that goes on in the next: adds up that token's partial
// sums. All warps of the CTA share those of a frequent token.
//   open (segments): that token, or -1; the last segment it reaches
__global__ __launch_bounds__(ROW_THREADS, 3) void rows_join_kernel(float *dtable, const float *scale,
                                                                   int segments, int width,
                                                                   const float *partials, const int2 *open)
{
    __shared__ float4 shares[ROW_WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first_segment = blockIdx.y * ROW_WARPS,
        segment = first_segment + warp, column = blockIdx.x * JOIN_COLUMNS + 4 * lane;
    int2 token = make_int2(-1, 0); // lane w: of warp w's segment
    if (lane < ROW_WARPS && first_segment + lane < segments)
        token = open[first_segment + lane];
    int row = __shfl_sync(0xffffffffu, token.x, warp), last = __shfl_sync(0xffffffffu, token.y, warp);
    unsigned frequent = __ballot_sync(0xffffffffu, token.x >= 0 && token.y - (first_segment + lane) > JOIN);
    bool there = column < width, mine = there && row >= 0;
    float4 old = {}, own = {}, sum = {}; // old, own: loaded beside the others'
    float4 *to = reinterpret_cast<float4 *>(dtable + (int64_t)max(row, 0) * width + column);
    if (mine) {
        old = *to;
        own = *reinterpret_cast<const float4 *>(partials + (2 * (int64_t)segment + 1) * width + column);
    }
    if (mine && !(frequent >> warp & 1))
        sum = sum_partials(partials, segment + 1, last, width, column);
    for (; frequent; frequent &= frequent - 1) {
        int w = __ffs((int)frequent) - 1, from = first_segment + w,
            stop = __shfl_sync(0xffffffffu, token.y, w), each = (stop - from + ROW_WARPS - 1) / ROW_WARPS,
            first = from + 1 + warp * each;
        if (there)
            shares[warp][lane] = sum_partials(partials, first, min(first + each - 1, stop), width, column);
        __syncthreads();
        if (warp == w && there)
            for (int k = 0; k < ROW_WARPS; k++)
                add4(sum, shares[k][lane]);
        __syncthreads();
    }
    if (!mine)
        return;
    add4(sum, own);
    *to = plus_scaled(old, sum, scale ? scale[0] : 1);
}

// Fills in what readers leave out, takes scratch and launches both kernels.
template <int READERS>
static void rows_grad(Stream s, float *dtable, const RowReader *readers, const float *scale,
                      const TokenRows *rows, int N, int d, int width)
{
    Readers<READERS> all = {};
    for (int k = 0; k < READERS; k++) {
        DeviceReader *to = &all.reader[k];
        assert(readers[k].leads <= MOST_LEADS && readers[k].pitch % 8 == 0);
        to->r = readers[k];
        to->r.pitch = readers[k].pitch ? readers[k].pitch : d;
        to->group = readers[k].factor ? d / readers[k].groups : d;
        if (readers[k].signs)
            to->signs = *readers[k].signs;
        to->sign_words = (width + 31) / 32;
    }
    int64_t segments = ceil_div(N, SEGMENT), warps = segments * ceil_div(width, STRIP);
    dim3 join((unsigned)ceil_div(width, JOIN_COLUMNS), (unsigned)ceil_div(segments, ROW_WARPS));
    float *partials = scratch_floats(s, SCRATCH_TABLE_GRAD, (size_t)segments * (2 * (size_t)width + 2));
    int2 *open = reinterpret_cast<int2 *>(partials + segments * 2 * width);
    rows_grad_kernel<READERS><<<(unsigned)ceil_div(warps, SUM_WARPS), SUM_THREADS, 0, s>>>(dtable, all, scale,
                                                                                           *rows, N, width,
                                                                                           partials, open);
    CHECK_LAUNCH();
    rows_join_kernel<<<join, ROW_THREADS, 0, s>>>(dtable, scale, (int)segments, width, partials, open);
    CHECK_LAUNCH();
}

void embedding_grad(Stream s, float *dtable, const floatX *g, const float *scale, const TokenRows *rows,
                    int N, int d)
{
    OP_SCOPE(embedding_grad, N, d);
    RowReader reader = {};
    reader.g = g;
    if (N > 0)
        rows_grad<1>(s, dtable, &reader, scale, rows, N, d, d);
}

void table_grad(Stream s, float *dtable, const RowReader *readers, int count, const TokenRows *rows, int N,
                int d, int width)
{
    OP_SCOPE(table_grad, readers, count, N, d, width);
    assert(count >= 1 && count <= ROW_READERS && d % 8 == 0 && width % 8 == 0 && width <= d);
    if (N > 0)
        (count == 1 ? rows_grad<1> : rows_grad<2>)(s, dtable, readers, NULL, rows, N, d, width);
}
