// QKV GEMM with RMS norm and rotary embedding of q and k in the epilogue, for heads of width 128: rope on the
// halves of a head (attention.h), or on adjacent pairs, with key offset (heads.h).
//
// Tile 128 x 256 x 64 (sm90_tile.cuh): two heads. Sums are packed to bf16, and the whole epilogue works on
// the packed tile under the next tile's WGMMAs. A row of a head lies in four neighbouring lanes, and the two
// elements that rotate together lie in the same lane: the norm needs two shuffles, the rotation none.
//
// A warp does this for its own 16 rows, without barriers of the warpgroup, in three events a head, at fixed k
// steps: TMA loads the angles into the warp's rows of the staging buffer while it takes the norm; it rotates;
// it scales what does not rotate, overwrites the angles with the head, and TMA stores it from there.
//
// Budget of a warp and head: 230 instructions for the norm, 350 (halves) or 420 (pairs) for the other two
// events; two warps a scheduler, two heads a tile, and 1024 cycles a k step at the tensor cores' peak. An
// event delays the WGMMAs behind those that are in flight: none should take longer than they do.
// Registers: 128 sums + 64 packed + 4 angles of 232; no spills.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/gemm/sm90_qkv.cuh"
#include "llmc/cuda/gemm/sm90_tile.cuh"

// K steps of a tile's mainloop after which the epilogue of the previous tile advances.
enum { NORM_0, ROTATE_0, STORE_0, NORM_1, ROTATE_1, STORE_1, EVENTS };
enum {
    HEAD = HALF_N,
    ANGLES = HEAD / 4,
    PLANES = 3,     // q, k, v
    WARP_ROWS = 16, // a warp's rows of a tile
    CONSUMER_WARPS = 2 * WARPGROUP / WARP,
    SHARED_BYTES = TILE_SHARED_BYTES + CONSUMER_WARPS * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");
// Channels that rotate together: j and j + HEAD / 2, or 2 j and 2 j + 1.
enum Rope { ROPE_HALVES, ROPE_PAIRS };

struct QkvMaps {
    CUtensorMap x, w;
    CUtensorMap plane[PLANES]; // q, k and v as the product gives it
    CUtensorMap below;         // k with the row behind its last, for the key offset
    CUtensorMap v;             // scaled
    CUtensorMap cos, sin;      // (N, ANGLES); paired: (N, 2 ANGLES)
};

struct QkvWork {
    TileSchedule tiles;
    int at[EVENTS]; // non-decreasing
    int N, H;
    int first_v, end;     // head indices over q, k and v
    float *rstd[2];       // of q, k: (N, H)
    const float *alpha;   // (1) device; SCALED
    const float *v_scale; // v = *v_scale v_raw; NULL: v_raw only
    bool keep_raw;        // v_raw is stored as well as v
    bool paired;          // angles of even heads and of odd ones
    floatX *first_key;    // row 0 of k, which keeps its own channels; NULL: no key offset
};

#if HOPPER

// A tile in registers, between its mainloop and its store. pair[2 g + h]: columns 8 g + 2 (lane % 4) and the
// next of row lane / 4 + 8 h.
struct PackedTile {
    uint32_t pair[64];
    float rstd[2]; // of the head whose norm has been taken, for the thread's two rows
    int row, head; // first row of the warp, -1: no tile yet; first head of the tile, over q, k and v
};

static __device__ __forceinline__ float low(uint32_t u) { return __uint_as_float(u << 16); }
static __device__ __forceinline__ float high(uint32_t u) { return __uint_as_float(u & 0xffff0000u); }

// A register of the packed tile, which the compiler would otherwise unpack outside of the loop over k.
static __device__ __forceinline__ uint32_t in_place(uint32_t u)
{
    asm volatile("" : "+r"(u));
    return u;
}

static __device__ __forceinline__ uint32_t scale_pair(uint32_t u, float scale)
{
    u = in_place(u);
    return pack2(low(u) * scale, high(u) * scale);
}

// First row of the warp among those of its warpgroup. (Unsigned: of a signed remainder an intermediate value
// stays in a register, and is spilled.)
static __device__ __forceinline__ int first_row(const Consumer &g)
{
    return (unsigned)g.warp % (WARPGROUP / WARP) * WARP_ROWS;
}

// The warp's rows of a panel of the staging buffer.
static __device__ __forceinline__ uint8_t *staging_rows(const Consumer &g, int panel)
{
    return g.m.staging(g.group) + panel * PANEL_BYTES + first_row(g) * PANEL * 2;
}

// ---- angles -----------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint64_t *angles_full(const Consumer &g)
{
    return g.m.empty(STAGES) + g.warp;
}

// Loads cosines and sines of a head of q or k for the warp's rows, once TMA has read what was stored from
// there. The first half of a box has the head's; the second, of another position or zeros, is not read.
static __device__ __forceinline__ void load_angles(const Consumer &g, const QkvMaps &maps,
                                                   const QkvWork &work, int row, int head)
{
    if (!elect_one())
        return;
    uint64_t *full = angles_full(g);
    int x = work.paired ? head % 2 * ANGLES : 0;
    tma_store_wait_read();
    mbarrier_arrive_expect_tx(full, 2 * WARP_ROWS * PANEL * 2);
    tma_load(staging_rows(g, 0), &maps.cos, full, x, row, 0);
    tma_load(staging_rows(g, 1), &maps.sin, full, x, row, 0);
}

// For ldmatrix_x4: matrices 0 and 1 are eight cosines of the warp's rows, 2 and 3 their sines. XOR with 16 c
// moves by 8 c angles.
static __device__ __forceinline__ uint32_t angles_address(const Consumer &g)
{
    int right = threadIdx.x % WARP / 16;
    return (matrix_address(g.m.staging(g.group), first_row(g)) ^ right << 4) + right * PANEL_BYTES;
}

// Cosine and sine of a pair of channels: low and high half.
struct PairAngles {
    uint32_t first, second;
};

// cos, sin: of angles 2 q and 2 q + 1, where q is lane % 4. Returns those of q and q + 4, from lanes q / 2
// and 2 + q / 2: every lane sends both of its own, and gets one in each of two shuffles.
static __device__ __forceinline__ PairAngles spread_angles(uint32_t cos, uint32_t sin)
{
    int q = threadIdx.x % 4, from = (q & 1) << 1 | q >> 1;
    uint32_t even = __byte_perm(cos, sin, 0x5410), odd = __byte_perm(cos, sin, 0x7632);
    uint32_t a = __shfl_sync(0xffffffffu, q < 2 ? even : odd, from, 4),
             b = __shfl_sync(0xffffffffu, q < 2 ? odd : even, from ^ 2, 4);
    return q % 2 ? PairAngles{b, a} : PairAngles{a, b};
}

// ---- norm and rotation ------------------------------------------------------------------------------------

// Reciprocal norms of head SIDE of the tile's two, for the thread's rows.
template <int SIDE> static __device__ __forceinline__ void take_norm(PackedTile &t)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float part[4] = {0, 0, 0, 0}; // independent sums: their latencies overlap
#pragma unroll
        for (int g = 0; g < HEAD / 8; g++) {
            uint32_t u = in_place(t.pair[32 * SIDE + 2 * g + half]);
            part[g % 2] += low(u) * low(u);
            part[g % 2 + 2] += high(u) * high(u);
        }
        float squares = (part[0] + part[1]) + (part[2] + part[3]);
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        t.rstd[half] = rsqrtf(squares / HEAD + RMS_EPS);
    }
}

static __device__ __forceinline__ void rotate_halves(uint32_t &x1, uint32_t &x2, uint32_t cos, uint32_t sin,
                                                     float rstd)
{
    uint32_t u1 = in_place(x1), u2 = in_place(x2);
    const float a[2] = {low(u1) * rstd, high(u1) * rstd}, b[2] = {low(u2) * rstd, high(u2) * rstd},
                c[2] = {low(cos), high(cos)}, s[2] = {low(sin), high(sin)};
    x1 = pack2(a[0] * c[0] + b[0] * s[0], a[1] * c[1] + b[1] * s[1]);
    x2 = pack2(b[0] * c[0] - a[0] * s[0], b[1] * c[1] - a[1] * s[1]);
}

static __device__ __forceinline__ void rotate_pair(uint32_t &x, uint32_t angle, float rstd)
{
    uint32_t u = in_place(x);
    float even = low(u) * rstd, odd = high(u) * rstd, c = low(angle), s = high(angle);
    x = pack2(even * c + odd * s, odd * c - even * s);
}

enum { EARLY_ANGLES = 3 * ANGLES / 4 }; // those of the first of the two events

// Norm and rotation of the channels of angles FIRST to END - 1 of head SIDE, by the angles in the staging
// buffer.
template <int SIDE, Rope ROPE, int FIRST, int END>
static __device__ __forceinline__ void rotate_head(PackedTile &t, const Consumer &g)
{
    uint32_t *x = t.pair + 32 * SIDE, address = angles_address(g);
#pragma unroll
    for (int c = FIRST / 8; c < END / 8; c++) {
        uint32_t angles[4]; // eight cosines of both rows, then their sines
        ldmatrix_x4(angles, address ^ c << 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t cos = angles[half], sin = angles[2 + half];
            float rstd = t.rstd[half];
            if (ROPE == ROPE_HALVES) {
                rotate_halves(x[2 * c + half], x[2 * c + half + HEAD / 8], cos, sin, rstd);
            } else {
                PairAngles of = spread_angles(cos, sin);
                rotate_pair(x[4 * c + half], of.first, rstd);
                rotate_pair(x[4 * c + 2 + half], of.second, rstd);
            }
        }
    }
}

// Norm of the channels of head SIDE that do not rotate.
template <int SIDE, Rope ROPE> static __device__ __forceinline__ void scale_others(PackedTile &t)
{
    uint32_t *x = t.pair + 32 * SIDE;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        bool rotated = ROPE == ROPE_HALVES ? i % 16 < 8 : i < 16;
        if (!rotated)
            x[i] = scale_pair(x[i], t.rstd[i % 2]);
    }
}

// ---- stores -----------------------------------------------------------------------------------------------

// Stores the warp's rows of head SIDE at column col; their second half by the map `second`, `down` rows
// further down.
template <int SIDE>
static __device__ __forceinline__ void store_rows(const PackedTile &t, const Consumer &g,
                                                  const CUtensorMap *first, const CUtensorMap *second,
                                                  int col, int down)
{
    if (elect_one())
        tma_store_wait_read(); // the previous head
    __syncwarp();              // all lanes have read the angles
    uint32_t address = matrix_address(g.m.staging(g.group), first_row(g));
#pragma unroll
    for (int c = 0; c < HEAD / 8; c += 2)
        stmatrix_x4((address ^ c % 8 << 4) + c / 8 * PANEL_BYTES, t.pair + 32 * SIDE + 2 * c);
    fence_proxy_async_shared();
    __syncwarp();
    if (!elect_one())
        return;
    tma_store(first, staging_rows(g, 0), col, t.row, 0);
    tma_store(second, staging_rows(g, 1), col + PANEL, t.row + down, 0);
    tma_store_commit();
}

// The key offset moves the second half of a head a row down; row 0 keeps its own, too.
template <int SIDE>
static __device__ __forceinline__ void store_first_key(const PackedTile &t, const QkvWork &work, int col)
{
    int lane = threadIdx.x % WARP;
    if (t.row > 0 || lane >= 4)
        return;
    uint32_t *to = reinterpret_cast<uint32_t *>(work.first_key + col + HEAD / 2) + lane;
#pragma unroll
    for (int g = 0; g < HEAD / 16; g++)
        to[4 * g] = t.pair[32 * SIDE + HEAD / 8 + 2 * g];
}

// ---- events of a head -------------------------------------------------------------------------------------
// Whether it is one of q, k or v is uniform over the CTA.

// Of q and k: loads the angles and takes the norm. Of v: stores it as the product gives it.
template <int SIDE>
static __device__ __forceinline__ void norm_event(PackedTile &t, const Consumer &g, const QkvMaps &maps,
                                                  const QkvWork &work)
{
    int head = t.head + SIDE, lane = threadIdx.x % WARP;
    if (head >= work.end)
        return;
    if (head >= work.first_v) {
        const CUtensorMap *v = &maps.plane[2];
        if (!work.v_scale || work.keep_raw)
            store_rows<SIDE>(t, g, v, v, (head - work.first_v) * HEAD, 0);
        return;
    }
    load_angles(g, maps, work, t.row, head);
    take_norm<SIDE>(t);
    bool key = head >= work.H;
    float *rstd = (key ? work.rstd[1] : work.rstd[0]) + (key ? head - work.H : head);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int n = t.row + lane / 4 + 8 * half;
        if (lane % 4 == 0 && n < work.N)
            rstd[(int64_t)n * work.H] = t.rstd[half];
    }
}

// Of q and k: rotates most of the head.
template <int SIDE, Rope ROPE>
static __device__ __forceinline__ void rotate_event(PackedTile &t, const Consumer &g, const QkvWork &work)
{
    if (t.head + SIDE >= work.first_v)
        return;
    mbarrier_wait(angles_full(g), SIDE); // a tile of q and k loads twice: the phases alternate
    rotate_head<SIDE, ROPE, 0, EARLY_ANGLES>(t, g);
}

// Of q and k: finishes and stores the head. Of v: scales and stores it, where there is a scale.
template <int SIDE, Rope ROPE>
static __device__ __forceinline__ void store_event(PackedTile &t, const Consumer &g, const QkvMaps &maps,
                                                   const QkvWork &work)
{
    int head = t.head + SIDE;
    if (head >= work.end || (head >= work.first_v && !work.v_scale))
        return;
    if (head >= work.first_v) {
        float scale = *work.v_scale;
#pragma unroll
        for (int i = 32 * SIDE; i < 32 * SIDE + 32; i++)
            t.pair[i] = scale_pair(t.pair[i], scale);
        store_rows<SIDE>(t, g, &maps.v, &maps.v, (head - work.first_v) * HEAD, 0);
        return;
    }
    rotate_head<SIDE, ROPE, EARLY_ANGLES, ANGLES>(t, g);
    scale_others<SIDE, ROPE>(t);
    bool key = head >= work.H, shifted = key && work.first_key;
    int col = (key ? head - work.H : head) * HEAD;
    const CUtensorMap *out = &maps.plane[key];
    store_rows<SIDE>(t, g, out, shifted ? &maps.below : out, col, shifted);
    if (shifted)
        store_first_key<SIDE>(t, work, col);
}

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// Mainloop of a tile of COLS / HEAD heads. The epilogue of the previous tile overlaps with it.
template <Rope ROPE, bool SCALED, int COLS>
static __device__ __forceinline__ void consume_tile(PackedTile &t, float scale, Consumer &g,
                                                    const QkvMaps &maps, const QkvWork &work, TileCoord at)
{
    bool before = t.row >= 0;
    float sum[128];
    for (int k = 0; k < work.tiles.steps; k++) {
        mainloop_step<LAYOUT_NT, COLS>(sum, g, k);
        if (before && k == work.at[NORM_0])
            norm_event<0>(t, g, maps, work);
        if (before && k == work.at[ROTATE_0])
            rotate_event<0, ROPE>(t, g, work);
        if (before && k == work.at[STORE_0])
            store_event<0, ROPE>(t, g, maps, work);
        if (before && k == work.at[NORM_1])
            norm_event<1>(t, g, maps, work);
        if (before && k == work.at[ROTATE_1])
            rotate_event<1, ROPE>(t, g, work);
        if (before && k == work.at[STORE_1])
            store_event<1, ROPE>(t, g, maps, work);
    }
    mainloop_finish<COLS>(sum, g);
#pragma unroll
    for (int i = 0; i < COLS / 4; i++)
        t.pair[i] =
            SCALED ? pack2(sum[2 * i] * scale, sum[2 * i + 1] * scale) : pack2(sum[2 * i], sum[2 * i + 1]);
    t.row = at.row + g.warp * WARP_ROWS;
    t.head = at.col / HEAD;
}

template <Rope ROPE, bool SCALED>
static __device__ __forceinline__ void consume(Consumer &g, const QkvMaps &maps, const QkvWork &work,
                                               int rank)
{
    const TileSchedule &s = work.tiles;
    float scale = SCALED ? *work.alpha : 1;
    PackedTile t;
    int index = blockIdx.x / CLUSTER;
    t.row = -1;
    for (; index < s.whole; index += gridDim.x / CLUSTER)
        consume_tile<ROPE, SCALED, TILE_N>(t, scale, g, maps, work, tile_coord(s, index, rank));
    bool half = index < s.whole + s.halves;
    if (half)
        consume_tile<ROPE, SCALED, HALF_N>(t, scale, g, maps, work, tile_coord(s, index, rank));
    norm_event<0>(t, g, maps, work);
    rotate_event<0, ROPE>(t, g, work);
    store_event<0, ROPE>(t, g, maps, work);
    if (!half) {
        norm_event<1>(t, g, maps, work);
        rotate_event<1, ROPE>(t, g, work);
        store_event<1, ROPE>(t, g, maps, work);
    }
    if (elect_one())
        tma_store_wait();
}

#endif

template <Rope ROPE, bool SCALED>
__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    sm90_qkv_kernel(const __grid_constant__ QkvMaps maps, const __grid_constant__ QkvWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp();
    Consumer g = {{shared}, Pipeline(), warp / 4, 0, warp}; // warpgroup 2 is the producer
    int rank = cluster_rank();
    for (int i = 0; threadIdx.x == 0 && i < CONSUMER_WARPS; i++)
        mbarrier_init(g.m.empty(STAGES) + i, 1);
    shared_storage_init(g.m);
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == CONSUMER_WARPS && elect_one())
            produce_tiles<LAYOUT_NT>(g.m, &maps.x, &maps.w, work.tiles, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<ROPE, SCALED>(g, maps, work, rank);
    }
#endif
}

// ---- launch -----------------------------------------------------------------------------------------------

typedef void (*QkvKernel)(const QkvMaps, const QkvWork);

void sm90_qkv_reserve(void)
{
    static const QkvKernel kernels[] = {sm90_qkv_kernel<ROPE_HALVES, false>,
                                        sm90_qkv_kernel<ROPE_PAIRS, false>,
                                        sm90_qkv_kernel<ROPE_PAIRS, true>};
    for (QkvKernel kernel : kernels)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
}

bool sm90_qkv_takes(int e) { return e == HEAD && device_has_wgmma(); }

// Matrices of the product: operands, results (N, d) with v as the product gives it and scaled, angles.
struct QkvMatrices {
    const floatX *x, *w;
    floatX *q, *k, *raw_v, *v;
    const floatX *cos, *sin;
};

// Fills what follows from the matrices and the sizes, and launches the kernel.
static bool launch(Stream s, SharedSms *shared, QkvKernel kernel, const QkvMatrices &m, QkvWork *work)
{
    // in twelfths of the k steps
    static const int when[EVENTS] = {0, 2, 4, 6, 8, 10};
    int N = work->N, d = work->H * HEAD, angles = (work->paired ? 2 : 1) * ANGLES;
    unsigned blocks;
    if (!on_16_bytes({m.x, m.w, m.q, m.k, m.raw_v, m.v, m.cos, m.sin}))
        return false;
    if (!sm90_tile_schedule(&work->tiles, &blocks, N, (int64_t)PLANES * d, d, shared))
        return false;
    work->first_v = 2 * work->H;
    work->end = PLANES * work->H;
    for (int i = 0; i < EVENTS; i++)
        work->at[i] = work->tiles.steps * when[i] / 12;
    QkvMaps maps = {.x = tile_map_bf16(m.x, 1, N, d, TILE_M),
                    .w = tile_map_bf16(m.w, 1, PLANES * d, d, PANEL),
                    .plane = {tile_map_bf16(m.q, 1, N, d, WARP_ROWS), tile_map_bf16(m.k, 1, N, d, WARP_ROWS),
                              tile_map_bf16(m.raw_v, 1, N, d, WARP_ROWS)},
                    .below = tile_map_bf16(m.k, 1, work->first_key ? N + 1 : N, d, WARP_ROWS),
                    .v = tile_map_bf16(m.v, 1, N, d, WARP_ROWS),
                    .cos = tile_map_bf16(m.cos, 1, N, angles, WARP_ROWS),
                    .sin = tile_map_bf16(m.sin, 1, N, angles, WARP_ROWS)};
    kernel<<<blocks, TILE_THREADS, SHARED_BYTES, s>>>(maps, *work);
    CHECK_LAUNCH();
    return true;
}

bool sm90_qkv(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    int64_t plane = (int64_t)N * H * e;
    floatX *raw_v = a->qkv + 2 * plane;
    QkvMatrices m = {a->x, a->w, a->qkv, a->qkv + plane, raw_v, a->v, a->cos, a->sin};
    QkvWork work = {.N = N,
                    .H = H,
                    .rstd = {a->rstd_q, a->rstd_k},
                    .v_scale = a->value_embed ? NULL : a->lambda,
                    .keep_raw = a->v != raw_v};
    return sm90_qkv_takes(e) && launch(s, NULL, sm90_qkv_kernel<ROPE_HALVES, false>, m, &work);
}

bool sm90_qkv_heads(const ProductContext *c, const QkvHeadsForward *a, int N, int H, int e)
{
    const HeadsForward *heads = &a->heads;
    bool mixed = heads->value.table || heads->value.extra;
    floatX *v = mixed ? a->raw + (int64_t)2 * N * H * e : heads->v;
    QkvMatrices m = {a->x, a->w, heads->q, heads->k, v, v, heads->cos, heads->sin};
    QkvWork work = {.N = N,
                    .H = H,
                    .rstd = {heads->rstd_q, heads->rstd_k},
                    .alpha = a->alpha,
                    .paired = heads->paired,
                    .first_key = heads->offset ? heads->k : NULL};
    return sm90_qkv_takes(e) && heads->qk == e && !a->x8 &&
           launch(c->stream, c->shared,
                  a->alpha ? sm90_qkv_kernel<ROPE_PAIRS, true> : sm90_qkv_kernel<ROPE_PAIRS, false>, m,
                  &work);
}
