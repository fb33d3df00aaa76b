// DC, forward.
#include "llmc/cuda/attention/sm80_dc.cuh"

namespace attention
{

enum { FORWARD_STAGES = 2 }; // with three, two CTAs a multiprocessor in place of three: 189 us

// ---- forward ----------------------------------------------------------------------------------------------

// Scores to weights; returns lse of the lane's rows. Rows beyond the end see nothing.
static __device__ __forceinline__ Scalars softmax_rows(Weights &s, const Rows &r, float scale_log2)
{
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    Scalars lse;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
        if (!all_seen(r, n))
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = seen(r, n, i) ? s[n][i] : -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++)
            max[i / 2] = fmaxf(max[i / 2], s[n][i]);
    }
    for (int i = 0; i < 2; i++) {
        max[i] = quad_max(max[i]);
        max[i] = max[i] == -INFINITY ? 0 : max[i] * scale_log2; // scale is above 0
    }
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i / 2] += s[n][i] = exp2_approx(s[n][i] * scale_log2 - max[i / 2]);
    for (int i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        lse.x[i] = (max[i] + log2f(sum[i])) * LN2;
        sum[i] = sum[i] > 0 ? 1 / sum[i] : 0;
    }
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] *= sum[i / 2];
    return lse;
}

// Rows of a head of y += w2 * acc.
template <int NA>
static __device__ __forceinline__ void add_rows(floatX *head, const float (&acc)[NA][4], int first,
                                                int first_column, const Scalars &w2, const Rows &r,
                                                const AttentionCall &c)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + r.warp_row + r.lane / 4 + 8 * i, column = first_column + r.lane % 4 * 2;
        uint32_t *to = (uint32_t *)(head + (int64_t)row * c.H * c.e + column), old[NA];
#pragma unroll
        for (int j = 0; j < NA; j++)
            old[j] = row < c.N && column + 8 * j < c.e ? to[4 * j] : 0;
#pragma unroll
        for (int j = 0; j < NA; j++)
            if (row < c.N && column + 8 * j < c.e)
                to[4 * j] = pack2(__uint_as_float(old[j] << 16) + w2.x[i] * acc[j][2 * i],
                                  __uint_as_float(old[j] & 0xffff0000u) + w2.x[i] * acc[j][2 * i + 1]);
    }
}

template <int E>
__global__ void __launch_bounds__(TILE_THREADS, 3) dc_forward_kernel(const __grid_constant__ Dc a)
{
    extern __shared__ __align__(16) floatX shared[];
    __shared__ Span span[TILE];
    int first = blockIdx.x * TILE, N = a.qk.N, H = a.qk.H;
    auto piece = [&](int i) -> Piece { // q and k of all heads, then v
        int n = i / CHUNKS<E>, column = i % CHUNKS<E> * CHUNK<E>;
        if (n < H)
            return {a.f.q + n * a.qk.e, a.f.k + n * a.qk.e, column, a.qk.e};
        return {nullptr, a.f.v + (n - H) * a.v.e, column, a.v.e};
    };
    Ring<E, FORWARD_STAGES, decltype(piece)> ring = {shared, first, N, H, 2 * H * CHUNKS<E>, 0, piece};
    ring.begin();
    find_spans<false>(span, first, a.qk);
    __syncthreads();
    Rows r = rows_of(span, first, N);
    Scalars norm = load_norms(a, first, r);
    Fragments p;
    {
        Weights mixed = {};
#pragma unroll 1
        for (int n = 0; n < H; n++) {
            Weights s;
            Scalars w = times(norm, load_scalars(a.f.w1, a.f.stride, n, first, r, N));
            scores<E, 2>(s, ring, r);
            Scalars lse = softmax_rows(s, r, a.f.scale * LOG2E);
            store_scalars(a.f.lse, lse, n, H, first, r, N);
            mix(mixed, s, w);
        }
        pack_weights(p, mixed);
    }
#pragma unroll 1
    for (int n = 0; n < H; n++) {
        Scalars w2 = load_scalars(a.f.w2, a.f.stride, n, first, r, N);
#pragma unroll 1
        for (int c = 0; c < CHUNKS<E>; c++) {
            float acc[CHUNK<E> / 8][4];
            const floatX *m = ring.take();
            weigh<CHUNK<E>>(acc, p, m + (TILE + r.warp_row) * PITCH<CHUNK<E>>);
            add_rows(a.f.y + n * a.v.e, acc, first, c * CHUNK<E>, w2, r, a.v);
        }
    }
}

template <int E> static void forward(const Dc &a, Stream s)
{
    launch(dc_forward_kernel<E>, ceil_div(a.qk.N, TILE), TILE_THREADS, FORWARD_STAGES * STAGE<E, TILE + SIDE>,
           a, s);
}

} // namespace attention

void dc_forward(Stream s, const DcForward *f, int N, int H, int e)
{
    OP_SCOPE(dc_forward, f, N, H, e);
    using namespace attention;
    Dc a = dc_of(f, false, N, H, e);
    int width = e > f->qk ? e : f->qk;
    if (width <= 32)
        forward<32>(a, s);
    else if (width <= 64)
        forward<64>(a, s);
    else
        forward<128>(a, s);
}
