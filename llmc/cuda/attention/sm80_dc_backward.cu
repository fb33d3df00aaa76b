// DC, backward.
#include "llmc/cuda/attention/sm80_dc.cuh"

namespace attention
{

// Three of the queries' kernel do not fit into the 99 KB that a block has on RTX 30 to 50.
enum { QUERY_STAGES = 2, KEY_STAGES = 2 };

// ---- backward, queries ------------------------------------------------------------------------------------

// What keys need of the warp's queries: one of the H + 2 parts of the band.
static __device__ __forceinline__ uint4 *band_of(const Dc &a, int part, int block)
{
    return a.band + ((int64_t)part * a.blocks + block) * (FRAGMENTS * WARP) + threadIdx.x % WARP;
}

static __device__ __forceinline__ void store_transpose(uint4 *to, const Fragments &p)
{
#pragma unroll
    for (int n = 0; n < FRAGMENTS; n++)
        to[n * WARP] = transpose_fragment(p[n]);
}

// M as the sum of two bf16, as its products with w2 are rounded to bf16.
static __device__ __forceinline__ void store_mixed(const Dc &a, const Weights &mixed, int block)
{
    Fragments p;
    Weights low;
    pack_weights(p, mixed);
    store_transpose(band_of(a, a.qk.H, block), p);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            low[n][i] = mixed[n][i] - to_float(__float2bfloat16_rn(mixed[n][i]));
    pack_weights(p, low);
    store_transpose(band_of(a, a.qk.H + 1, block), p);
}

// Scores to weights of a softmax whose sum is known.  lse: in powers of two
static __device__ __forceinline__ void known_weights(Weights &s, const Rows &r, const Scalars &lse,
                                                     float scale_log2)
{
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = exp2_approx(s[n][i] * scale_log2 - lse.x[i / 2]);
        if (!all_seen(r, n))
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = seen(r, n, i) ? s[n][i] : 0;
    }
}

// dw1 from dw, through the norm over heads: one lane a row of the warp.
static __device__ __forceinline__ void norm_backward(int first, const Rows &r, const Dc &a)
{
    int H = a.qk.H;
    int64_t t = first + r.warp_row + r.lane;
    __syncwarp(); // other lanes stored dw
    if (r.lane >= ROWS_PER_WARP || t >= a.qk.N)
        return;
    const float *w1 = a.f.w1 + t * a.f.stride, *dw = a.dw + t * H;
    float squares = 0, mean = 0;
    for (int n = 0; n < H; n++)
        squares += w1[n] * w1[n];
    float norm = 1 / sqrtf(squares / (float)H + 1e-6f);
    for (int n = 0; n < H; n++)
        mean += dw[n] * norm * w1[n];
    mean /= (float)H;
    for (int n = 0; n < H; n++)
        a.b.dw1[t * a.f.stride + n] = norm * (dw[n] - norm * w1[n] * mean);
}

// dq, dw1, dw2; what keys need to the band.
template <int E>
__global__ void __launch_bounds__(TILE_THREADS, 2) dc_backward_queries_kernel(const __grid_constant__ Dc a)
{
    constexpr int C = CHUNK<E>, LAST = CHUNKS<E> - 1, UNROLL = E < 64 ? E / 16 : 1;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    int first = blockIdx.x * TILE, N = a.qk.N, H = a.qk.H, block = (first + threadIdx.x / WARP * 16) / 16;
    // dy and v of all heads; of each head q and k, and of k all chunks but the last once more; dy and v
    auto piece = [&](int i) -> Piece {
        int outer = H * CHUNKS<E>, inner = H * (CHUNKS<E> + LAST);
        if (i >= outer && i < outer + inner) {
            int n = (i - outer) / (CHUNKS<E> + LAST), c = (i - outer) % (CHUNKS<E> + LAST);
            bool again = c > LAST;
            return {again ? nullptr : a.f.q + n * a.qk.e, a.f.k + n * a.qk.e, (again ? c - CHUNKS<E> : c) * C,
                    a.qk.e};
        }
        i = i < outer ? i : i - outer - inner;
        int n = i / CHUNKS<E>;
        return {a.b.dy + n * a.v.e, a.f.v + n * a.v.e, i % CHUNKS<E> * C, a.v.e};
    };
    Ring<E, QUERY_STAGES, decltype(piece)> ring = {shared, first, N, H, H * (3 * CHUNKS<E> + LAST), 0, piece};
    ring.begin();
    find_spans<false>(span, first, a.qk);
    __syncthreads();
    Rows r = rows_of(span, first, N);
    Scalars norm = load_norms(a, first, r);
    Weights x, mixed = {};
    {
        Weights dmixed = {};
#pragma unroll 1
        for (int n = 0; n < H; n++) {
            Scalars w2 = load_scalars(a.f.w2, a.f.stride, n, first, r, N);
            scores<E, UNROLL>(x, ring, r);
            mix(dmixed, x, w2);
        }
#pragma unroll 1
        for (int n = 0; n < H; n++) {
            Scalars w = times(norm, load_scalars(a.f.w1, a.f.stride, n, first, r, N)),
                    lse = load_scalars(a.f.lse, H, n, first, r, N);
            const floatX *m = scores<E, UNROLL>(x, ring, r);
            known_weights(x, r, {{lse.x[0] * LOG2E, lse.x[1] * LOG2E}}, a.f.scale * LOG2E);
            mix(mixed, x, w);
            Scalars dw = row_dots(dmixed, x);
            store_scalars(a.dw, dw, n, H, first, r, N);
#pragma unroll
            for (int b = 0; b < BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[b][i] *= a.f.scale * w.x[i / 2] * (dmixed[b][i] - dw.x[i / 2]);
            Fragments ds;
            pack_weights(ds, x);
            store_transpose(band_of(a, n, block), ds);
#pragma unroll 1
            for (int c = 0; c < CHUNKS<E>; c++) {
                float acc[C / 8][4];
                if (c > 0)
                    m = ring.take();
                weigh<C>(acc, ds, m + (TILE + r.warp_row) * PITCH<C>);
                store_rows(a.b.dq + n * a.qk.e, acc, first + r.warp_row, (c > 0 ? c - 1 : LAST) * C, 1, 1,
                           a.qk);
            }
        }
    }
    store_mixed(a, mixed, block);
#pragma unroll 1
    for (int n = 0; n < H; n++) {
        scores<E, UNROLL>(x, ring, r);
        store_scalars(a.b.dw2, row_dots(mixed, x), n, a.f.stride, first, r, N);
    }
    norm_backward(first, r, a);
}

// ---- backward, keys ---------------------------------------------------------------------------------------

// The band's fragments for the warp's 16 keys: of query blocks from theirs on.
static __device__ __forceinline__ void load_band(Fragments &p, const Dc &a, int part, int block)
{
#pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) {
        uint4 u = block + i < a.blocks ? band_of(a, part, block + i)[(FRAGMENTS - 1 - i) * WARP]
                                       : make_uint4(0, 0, 0, 0);
        p[i][0] = u.x;
        p[i][1] = u.y;
        p[i][2] = u.z;
        p[i][3] = u.w;
    }
}

// w2 M from its two parts.  w2: of the query blocks' rows
static __device__ __forceinline__ void scale_mixed(Fragments &p, const Fragments &low, const float *w2)
{
    int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < FRAGMENTS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *w = w2 + 16 * i + k / 2 * 8 + pair;
            p[i][k] = pack2(w[0] * (__uint_as_float(p[i][k] << 16) + __uint_as_float(low[i][k] << 16)),
                            w[1] * (__uint_as_float(p[i][k] & 0xffff0000u) +
                                    __uint_as_float(low[i][k] & 0xffff0000u)));
        }
}

// dk and dv of a head.
template <int E>
__global__ void __launch_bounds__(KEY_WARPS *WARP, 16 / KEY_WARPS)
    dc_backward_keys_kernel(const __grid_constant__ Dc a)
{
    constexpr int C = CHUNK<E>, THREADS = KEY_WARPS * WARP;
    extern __shared__ __align__(16) floatX shared[];
    __shared__ float w2[KEY_SIDE];
    int N = a.qk.N, H = a.qk.H, n = blockIdx.x % H, first = blockIdx.x / H * KEY_TILE,
        warp = threadIdx.x / WARP, warp_row = warp * ROWS_PER_WARP, block = first / ROWS_PER_WARP + warp;
    auto stage = [&](int i) { return shared + i % KEY_STAGES * STAGE<E, KEY_SIDE>; };
    auto load = [&](int i) {
        bool keys = i >= CHUNKS<E>; // dk's, from q
        int e = keys ? a.qk.e : a.v.e;
        if (i < 2 * CHUNKS<E>)
            load_columns<C, KEY_SIDE, THREADS>(stage(i), (keys ? a.f.q : a.b.dy) + n * e, i % CHUNKS<E> * C,
                                               e, first, N, H * e);
        commit_loads();
    };
    for (int i = 0; i < KEY_STAGES - 1; i++)
        load(i);
    Fragments p;
    {
        Fragments low;
        load_band(p, a, H, block);
        load_band(low, a, H + 1, block);
        for (int i = threadIdx.x; i < KEY_SIDE; i += THREADS)
            w2[i] = first + i < N ? a.f.w2[(int64_t)(first + i) * a.f.stride + n] : 0;
        __syncthreads();
        scale_mixed(p, low, w2 + warp_row);
    }
#pragma unroll 1
    for (int i = 0; i < 2 * CHUNKS<E>; i++) {
        bool keys = i >= CHUNKS<E>;
        if (i == CHUNKS<E>)
            load_band(p, a, n, block);
        wait_loads<KEY_STAGES - 2>();
        __syncthreads();
        load(i + KEY_STAGES - 1);
        float acc[C / 8][4];
        weigh<C>(acc, p, stage(i) + warp_row * PITCH<C>);
        store_rows((keys ? a.b.dk : a.b.dv) + n * (keys ? a.qk.e : a.v.e), acc, first + warp_row,
                   i % CHUNKS<E> * C, 1, 1, keys ? a.qk : a.v);
    }
}

// ---- launch -----------------------------------------------------------------------------------------------

static size_t band_bytes(int N, int H)
{
    return (size_t)ceil_div(N, TILE) * (TILE / ROWS_PER_WARP) * (size_t)(H + 2) * FRAGMENTS * WARP *
           sizeof(uint4);
}

template <int E> static void backward(const Dc &a, Stream s)
{
    static_assert(QUERY_STAGES * STAGE<E, TILE + SIDE> * sizeof(floatX) + TILE * sizeof(Span) <= 99 << 10 &&
                      KEY_STAGES * STAGE<E, KEY_SIDE> * sizeof(floatX) + KEY_SIDE * sizeof(float) <= 99 << 10,
                  "what a block of the smallest GPUs can have");
    launch(dc_backward_queries_kernel<E>, ceil_div(a.qk.N, TILE), TILE_THREADS,
           QUERY_STAGES * STAGE<E, TILE + SIDE>, a, s);
    launch(dc_backward_keys_kernel<E>, ceil_div(a.qk.N, KEY_TILE) * a.qk.H, KEY_WARPS * WARP,
           KEY_STAGES * STAGE<E, KEY_SIDE>, a, s);
}

} // namespace attention

size_t dc_scratch_bytes(int N, int H)
{
    return attention::band_bytes(N, H) + (size_t)N * (size_t)H * sizeof(float);
}

void dc_backward(Stream s, const DcBackward *b, int N, int H, int e)
{
    OP_SCOPE(dc_backward, b, N, H, e);
    using namespace attention;
    Dc a = dc_of(b->forward, true, N, H, e);
    a.b = *b;
    a.band = (uint4 *)b->scratch;
    a.dw = (float *)((char *)b->scratch + band_bytes(N, H));
    int width = e > a.f.qk ? e : a.f.qk;
    if (width <= 32)
        backward<32>(a, s);
    else if (width <= 64)
        backward<64>(a, s);
    else
        backward<128>(a, s);
}
