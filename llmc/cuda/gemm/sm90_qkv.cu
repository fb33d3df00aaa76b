// QKV GEMM with RMS norm and rotary embedding of q and k in the epilogue, for heads of width 128.
//
// Tile 128 x 256 x 64 (sm90_tile.cuh): two heads. A row of a head lies in four neighbouring lanes, and the
// two elements that rotate together lie in the same lane: the norm needs two shuffles, the rotation none.
// Both work on the fp32 sums.
//
// Bound: tensor cores plus the epilogue's arithmetic between two mainloops, which no other warpgroup covers:
// 16.7 ms a step against 13.3 for a plain product (window 11, one H200).
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/rows/qkv.cuh"
#include "llmc/cuda/gemm/sm90_tile.cuh"

enum { HEAD = HALF_N, ANGLES = HEAD / 4, PLANES = 3 /* q, k, v */ };

struct QkvWork {
    TileSchedule tiles;
    int store_left, store_right; // k steps after which the halves of the previous tile are stored
    int N, H;
    int first_v, end;        // head indices over q, k and v
    float *rstd[2];          // of q, k: (N, H)
    const floatX *cos, *sin; // (N, ANGLES)
    const float *v_scale;    // v = *v_scale v_raw; NULL: v_raw only
    bool keep_raw;           // v_raw is stored as well as v
};

#if HOPPER

static const float RMS_EPS = 1.1920928955078125e-7f; // 2^-23

// cos and sin of a thread's columns 8 g + 2 (lane % 4) and the next, for its two rows.
struct Rotation {
    uint32_t cos[2][ANGLES / 8], sin[2][ANGLES / 8];
};

static __device__ __forceinline__ int row_in_group(int half)
{
    return threadIdx.x / WARP % 4 * 16 + half * 8 + threadIdx.x % WARP / 4;
}

static __device__ __forceinline__ void load_rotation(Rotation &r, const QkvWork &work, int row)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t at = (int64_t)min(row + row_in_group(half), work.N - 1) * ANGLES + threadIdx.x % 4 * 2;
#pragma unroll
        for (int g = 0; g < ANGLES / 8; g++) {
            r.cos[half][g] = *reinterpret_cast<const uint32_t *>(work.cos + at + 8 * g);
            r.sin[half][g] = *reinterpret_cast<const uint32_t *>(work.sin + at + 8 * g);
        }
    }
}

static __device__ __forceinline__ float low(uint32_t u) { return __uint_as_float(u << 16); }
static __device__ __forceinline__ float high(uint32_t u) { return __uint_as_float(u & 0xffff0000u); }

// x1[0..1], x2[0..1]: elements of the first half of a head and their partners in the second
static __device__ __forceinline__ void rotate(float (&x1)[2], float (&x2)[2], uint32_t cos, uint32_t sin)
{
    const float c[2] = {low(cos), high(cos)}, s[2] = {low(sin), high(sin)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float y1 = x1[i] * c[i] + x2[i] * s[i], y2 = x2[i] * c[i] - x1[i] * s[i];
        x1[i] = y1;
        x2[i] = y2;
    }
}

// 0 q, 1 k, 2 v; PLANES beyond the last head. Comparisons, because an integer division would delay the next
// mainloop.
static __device__ __forceinline__ int plane_of(const QkvWork &work, int head)
{
    return head < work.H ? 0 : head < work.first_v ? 1 : head < work.end ? 2 : PLANES;
}

// Epilogue of head SIDE of the tile's two: norm, rotation, packing. row: first row of the warpgroup; head:
// index over the heads of q, k and v.
template <int SIDE>
static __device__ __forceinline__ void finish_head(uint32_t (&packed)[64], const float (&sum)[128],
                                                   const Rotation &r, const QkvWork &work, int row, int head)
{
    if (head >= work.first_v) {
#pragma unroll
        for (int i = 32 * SIDE; i < 32 * SIDE + 32; i++)
            packed[i] = pack2(sum[2 * i], sum[2 * i + 1]);
        return;
    }
    bool is_k = head >= work.H;
    float *rstd = (is_k ? work.rstd[1] : work.rstd[0]) + (is_k ? head - work.H : head);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float *x = sum + 64 * SIDE + 2 * half; // x[4 g], x[4 g + 1]
        float part[4] = {0, 0, 0, 0};                // independent sums: their latencies overlap
#pragma unroll
        for (int g = 0; g < HEAD / 8; g++) {
            part[g % 2] += x[4 * g] * x[4 * g];
            part[g % 2 + 2] += x[4 * g + 1] * x[4 * g + 1];
        }
        float squares = (part[0] + part[1]) + (part[2] + part[3]);
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        squares += __shfl_xor_sync(0xffffffffu, squares, 2);
        float scale = rsqrtf(squares / HEAD + RMS_EPS);
        int n = row + row_in_group(half);
        if (threadIdx.x % 4 == 0 && n < work.N)
            rstd[(int64_t)n * work.H] = scale;
#pragma unroll
        for (int g = 0; g < HEAD / 16; g++) {
            float x1[2] = {x[4 * g] * scale, x[4 * g + 1] * scale},
                  x2[2] = {x[4 * g + 32] * scale, x[4 * g + 33] * scale};
            if (g < ANGLES / 8)
                rotate(x1, x2, r.cos[half][g], r.sin[half][g]);
            packed[32 * SIDE + 2 * g + half] = pack2(x1[0], x1[1]);
            packed[32 * SIDE + 2 * g + half + 16] = pack2(x2[0], x2[1]);
        }
    }
}

// Stores a packed head in its plane, and the scaled v in its own matrix. Heads beyond the last have plane
// PLANES, where TMA drops the store.
template <int SIDE>
static __device__ __forceinline__ void store_head(uint32_t (&packed)[64], const Consumer &g,
                                                  const CUtensorMap *out, const CUtensorMap *v,
                                                  const QkvWork &work, int row, int head)
{
    int plane = plane_of(work, head), col = (head - plane * work.H) * HEAD;
    bool scaled = plane == 2 && work.v_scale;
    if (!scaled || work.keep_raw)
        store_half<SIDE>(packed, g, out, col, row, plane);
    if (!scaled)
        return;
    float scale = *work.v_scale;
#pragma unroll
    for (int i = 32 * SIDE; i < 32 * SIDE + 32; i++)
        packed[i] = pack2(scale * low(packed[i]), scale * high(packed[i]));
    store_half<SIDE>(packed, g, v, col, row, 0);
}

// A tile in registers, between its mainloop and its store.
struct PackedTile {
    uint32_t pair[64];
    int row, head; // first of the tile; row -1: no tile yet
};

// Mainloop of a tile of COLS / HEAD heads. The stores of the previous tile overlap with it.
template <int COLS>
static __device__ __forceinline__ void consume_tile(PackedTile &packed, Consumer &g, const CUtensorMap *out,
                                                    const CUtensorMap *v, const QkvWork &work, TileCoord at)
{
    float sum[128];
    for (int k = 0; k < work.tiles.steps; k++) {
        mainloop_step<LAYOUT_NT, COLS>(sum, g, k);
        if (k == work.store_left && packed.row >= 0)
            store_head<0>(packed.pair, g, out, v, work, packed.row, packed.head);
        if (k == work.store_right && packed.row >= 0)
            store_head<1>(packed.pair, g, out, v, work, packed.row, packed.head + 1);
    }
    packed.row = at.row + g.group * WARPGROUP_M;
    packed.head = at.col / HEAD;
    Rotation r;
    if (packed.head < work.first_v)
        load_rotation(r, work, packed.row); // overlaps with the last WGMMAs
    mainloop_finish<COLS>(sum, g);
    finish_head<0>(packed.pair, sum, r, work, packed.row, packed.head);
    if (COLS == TILE_N)
        finish_head<1>(packed.pair, sum, r, work, packed.row, packed.head + 1);
}

static __device__ __forceinline__ void consume(Consumer &g, const CUtensorMap *out, const CUtensorMap *v,
                                               const QkvWork &work, int rank)
{
    const TileSchedule &t = work.tiles;
    PackedTile packed;
    int index = blockIdx.x / CLUSTER;
    packed.row = -1;
    for (; index < t.whole; index += gridDim.x / CLUSTER)
        consume_tile<TILE_N>(packed, g, out, v, work, tile_coord(t, index, rank));
    bool half = index < t.whole + t.halves;
    if (half)
        consume_tile<HALF_N>(packed, g, out, v, work, tile_coord(t, index, rank));
    store_head<0>(packed.pair, g, out, v, work, packed.row, packed.head);
    if (!half)
        store_head<1>(packed.pair, g, out, v, work, packed.row, packed.head + 1);
    if (elect_leader(g))
        tma_store_wait();
}

#endif

__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    sm90_qkv_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                    const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap v,
                    const __grid_constant__ QkvWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp();
    Consumer g = {{shared}, Pipeline(), warp / 4, 0, warp}; // warpgroup 2 is the producer
    int rank = cluster_rank();
    shared_storage_init(g.m);
    pdl_begin();
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce_tiles<LAYOUT_NT>(g.m, &x, &w, work.tiles, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(g, &out, &v, work, rank);
    }
#endif
}

void sm90_qkv_reserve(void)
{
    CUDA_CHECK(cudaFuncSetAttribute(sm90_qkv_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    TILE_SHARED_BYTES));
}

bool sm90_qkv_takes(int e) { return e == HEAD && device_has_wgmma(); }

bool sm90_qkv(Stream s, const QkvProductForward *a, int N, int H, int e)
{
    int d = H * e;
    QkvWork work = {.N = N,
                    .H = H,
                    .first_v = 2 * H,
                    .end = PLANES * H,
                    .rstd = {a->rstd_q, a->rstd_k},
                    .cos = a->cos,
                    .sin = a->sin,
                    .v_scale = a->value_embed ? NULL : a->lambda,
                    .keep_raw = a->v != a->qkv + (int64_t)2 * N * d};
    unsigned blocks;
    const void *operands[] = {a->qkv, a->v, a->x, a->w};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)operands[i] % 16)
            return false;
    if (!sm90_qkv_takes(e) || !sm90_tile_schedule(&work.tiles, &blocks, N, (int64_t)PLANES * d, d, NULL))
        return false;
    work.store_left = work.tiles.steps / 4;
    work.store_right = work.tiles.steps * 2 / 3;
    CUtensorMap map_x = tile_map_bf16(a->x, 1, N, d, TILE_M),
                map_w = tile_map_bf16(a->w, 1, PLANES * d, d, PANEL),
                map_out = tile_map_bf16(a->qkv, PLANES, N, d, WARPGROUP_M),
                map_v = tile_map_bf16(a->v, 1, N, d, WARPGROUP_M);
    launch_pdl(sm90_qkv_kernel, blocks, TILE_THREADS, TILE_SHARED_BYTES, s, map_x, map_w, map_out, map_v,
               work);
    return true;
}
