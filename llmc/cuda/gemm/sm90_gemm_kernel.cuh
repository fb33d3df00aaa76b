// sm90 GEMM with a fused epilogue: STORE, RESIDUAL (add C), RELU2 (relu(x)^2), DRELU2 (x * 2 sqrt(C), x
// rounded to bf16 first). Operands T: bf16, or e4m3 with one scale each, which multiplies the sums (results
// that are codes, too: sm90_fp8_codes.cu). SCALED: the sums of bf16 operands are multiplied by alpha.
//
// Tile 128 x 256 x 64, 4 stages, clusters of 2 CTAs with multicast of B, 2 consumer warpgroups, 1 producer
// thread, persistent (sm90_tile.cuh). The epilogue of a tile overlaps with the mainloop of the next one:
// sums are packed to bf16 into 64 registers, and these are stored in two halves at fixed k steps of the next
// tile.
//
// RESIDUAL reuses the same 64 registers and the same staging buffer: each half of C is loaded by TMA into the
// staging buffer after the half of the previous tile has been stored from it, and is read into the registers
// that this half has left.
//
// DRELU2 multiplies under the WGMMA of the next tile, too: a warp's 16 rows go through the staging buffer in
// quarters of 64 columns, C's in by TMA, the gradient's out.
//
// Bound: tensor cores, at the clock that 700 W allow: 650 to 700 TFLOP/s for STORE and RESIDUAL, 618 for
// DRELU2, whose reads of C and square roots cost 5% beside STORE in the same run (one H200). Registers: 128
// sums + 64 packed of 232; no spills. Tried without gain: staggered warpgroups, clusters of 4, ping-pong of
// the two warpgroups; for DRELU2 units of a warpgroup, which want its barriers, other k steps, and tiles of
// 128 x 192 with a warpgroup for the epilogue (dev/notes/2026-11-23_relu2_backward.md).
#pragma once
#include "llmc/cuda/gemm/sm90_tile.cuh"
#include "llmc/cuda/gemm/fp8_codes.cuh"
#include "llmc/cuda/gemm/relu2.cuh"

// K steps of a tile's mainloop after which the epilogue of the previous tile and the load of this tile's C
// advance.
enum { STORE_HALF0, LOAD_HALF0, READ_HALF0, STORE_HALF1, LOAD_HALF1, READ_HALF1, EVENTS };
// The same of DRELU2: loads and products of the quarters of C, and the load of this tile's first quarter.
enum { LOAD_1, APPLY_0, LOAD_2, APPLY_1, LOAD_3, APPLY_2, LOAD_0, APPLY_3, DRELU2_EVENTS };
enum {
    WARP_ROWS = 16,       // a warp's rows of a tile
    SOURCE_BARRIERS = 16, // DRELU2: two of each consumer warp; else one of each warpgroup
    SHARED_BYTES = TILE_SHARED_BYTES + SOURCE_BARRIERS * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

// Factors of the sums of e4m3 operands: (1) fp32 in device memory each.
struct Fp8Work {
    const float *scale_x, *scale_w;
    const float *alpha; // or NULL: 1
};

struct GemmWork {
    TileSchedule tiles;
    int at[EVENTS];              // non-decreasing
    int apply_at[DRELU2_EVENTS]; // non-decreasing
    Fp8Work fp8;                 // T e4m3
    const float *alpha;          // (1) device; SCALED
    int plane_cols;              // of the result, whose planes lie one behind the other
};

template <typename T> constexpr bool is_fp8 = sizeof(T) == 1;

#if HOPPER

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// The mbarriers for parts of C in the staging buffers: of a warpgroup for its half; of DRELU2's warps.
static __device__ __forceinline__ uint64_t *source_full(const SharedStorage &m, int index)
{
    return m.empty(STAGES) + index;
}

// Loads columns x to x + 127, rows y to y + 63 of C into the staging buffer, once TMA has read the half
// stored from there.
static __device__ __forceinline__ void load_source_half(const Consumer &g, const CUtensorMap *source, int x,
                                                        int y)
{
    named_barrier_sync(1 + g.group, WARPGROUP); // all warps have read the previous half
    if (!elect_leader(g))
        return;
    uint64_t *full = source_full(g.m, g.group);
    tma_store_wait_read();
    mbarrier_arrive_expect_tx(full, STAGING_BYTES);
    for (int p = 0; p < HALF_PANELS; p++)
        tma_load(g.m.staging(g.group) + p * PANEL_BYTES, source, full, x + p * PANEL, y, 0);
}

// Reads the loaded half of C into the registers of columns HALF_N * SIDE to HALF_N * SIDE + 127.
template <int SIDE>
static __device__ __forceinline__ void read_source_half(uint32_t (&packed)[64], const Consumer &g)
{
    mbarrier_wait(source_full(g.m, g.group), SIDE);
    uint32_t address = matrix_address(g.m.staging(g.group), threadIdx.x / WARP % 4 * 16);
#pragma unroll
    for (int c = 0; c < HALF_N / 8; c += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, (address ^ c % 8 << 4) + c / 8 * PANEL_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++)
            packed[SIDE * HALF_N / 4 + 2 * c + i] = b[i];
    }
}

// source: two elements of C. ROUNDED: relu^2 of the pair as bf16 holds it.
template <GemmEpilogue EPI, bool ROUNDED>
static __device__ __forceinline__ uint32_t epilogue_pair(float lo, float hi, uint32_t source)
{
    if (EPI == EPILOGUE_RESIDUAL)
        return pack2(lo + __uint_as_float(source << 16), hi + __uint_as_float(source & 0xffff0000u));
    if (EPI == EPILOGUE_STORE)
        return pack2(lo, hi);
    uint32_t packed; // the conversion clamps negative numbers to zero and keeps NaN
    if (ROUNDED) {
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
        __nv_bfloat162 p = *reinterpret_cast<__nv_bfloat162 *>(&packed), square = __hmul2_rn(p, p);
        return *reinterpret_cast<uint32_t *>(&square);
    }
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi * fabsf(hi)), "f"(lo * fabsf(lo)));
    return packed;
}

template <typename T, bool SCALED> static __device__ __forceinline__ float sum_factor(const GemmWork &work)
{
    if (is_fp8<T>)
        return product_scale(work.fp8.scale_x, work.fp8.scale_w, work.fp8.alpha);
    return SCALED ? *work.alpha : 1;
}

// A tile in registers, between its mainloop and its store.
struct PackedTile {
    uint32_t pair[64];
    int row, col; // of the tile; row -1: no tile yet
};

// Stores columns HALF_N * SIDE to HALF_N * SIDE + 127 of the packed tile.
template <int SIDE>
static __device__ __forceinline__ void store_packed(const PackedTile &packed, const Consumer &g,
                                                    const CUtensorMap *out, const GemmWork &work)
{
    int plane = packed.col / work.plane_cols;
    store_half<SIDE>(packed.pair, g, out, packed.col - plane * work.plane_cols + SIDE * HALF_N, packed.row,
                     plane);
}

// Mainloop of a tile of COLS columns. The epilogue of the previous tile overlaps with it.
template <typename T, GemmLayout FORM, GemmEpilogue EPI, bool SCALED, int COLS>
static __device__ __forceinline__ void consume_tile(PackedTile &packed, float scale, Consumer &g,
                                                    const CUtensorMap *out, const CUtensorMap *source,
                                                    const GemmWork &work, TileCoord at)
{
    constexpr bool has_c = EPI == EPILOGUE_RESIDUAL, whole = COLS == TILE_N, rounded = is_fp8<T>,
                   scaled = rounded || SCALED;
    constexpr int last = whole ? 1 : 0; // half of C that is loaded after the last store of the previous tile
    int row = at.row + g.group * WARPGROUP_M;
    float sum[128];
    for (int k = 0; k < work.tiles.steps; k++) {
        mainloop_step<FORM, COLS, T>(sum, g, k);
        if (k == work.at[STORE_HALF0] && packed.row >= 0)
            store_packed<0>(packed, g, out, work);
        if (whole && has_c && k == work.at[LOAD_HALF0])
            load_source_half(g, source, at.col, row);
        if (whole && has_c && k == work.at[READ_HALF0])
            read_source_half<0>(packed.pair, g);
        if (k == work.at[STORE_HALF1] && packed.row >= 0)
            store_packed<1>(packed, g, out, work);
        if (has_c && k == work.at[LOAD_HALF1])
            load_source_half(g, source, at.col + last * HALF_N, row);
        if (has_c && k == work.at[READ_HALF1])
            read_source_half<last>(packed.pair, g);
    }
    mainloop_finish<COLS>(sum, g);
#pragma unroll
    for (int i = 0; i < COLS / 4; i++) {
        float lo = scaled ? sum[2 * i] * scale : sum[2 * i],
              hi = scaled ? sum[2 * i + 1] * scale : sum[2 * i + 1];
        packed.pair[i] = epilogue_pair<EPI, rounded>(lo, hi, has_c ? packed.pair[i] : 0);
    }
    packed.row = row;
    packed.col = at.col;
}

template <typename T, GemmLayout FORM, GemmEpilogue EPI, bool SCALED>
static __device__ __forceinline__ void consume(Consumer &g, const CUtensorMap *out, const CUtensorMap *source,
                                               const GemmWork &work, int rank)
{
    const TileSchedule &t = work.tiles;
    float scale = sum_factor<T, SCALED>(work);
    PackedTile packed;
    int index = blockIdx.x / CLUSTER;
    packed.row = -1;
    for (; index < t.whole; index += gridDim.x / CLUSTER)
        consume_tile<T, FORM, EPI, SCALED, TILE_N>(packed, scale, g, out, source, work,
                                                   tile_coord(t, index, rank));
    bool half = index < t.whole + t.halves;
    if (half)
        consume_tile<T, FORM, EPI, SCALED, HALF_N>(packed, scale, g, out, source, work,
                                                   tile_coord(t, index, rank));
    store_packed<0>(packed, g, out, work);
    if (!half)
        store_packed<1>(packed, g, out, work);
    if (elect_leader(g))
        tma_store_wait();
}

// ---- DRELU2 -----------------------------------------------------------------------------------------------
// The packed tile is the product as bf16 holds it. The factors are applied to it in the staging buffer, a
// quarter of 64 columns after the other: TMA loads the quarter of C, the threads replace their elements by
// the gradient, TMA stores it from there. Two quarters alternate. A warp does this for its own 16 rows.

static __device__ __forceinline__ uint64_t *quarter_full(const Consumer &g, int quarter)
{
    return source_full(g.m, 2 * g.warp + quarter % 2);
}

// The warp's rows of the buffer of a quarter.
static __device__ __forceinline__ uint8_t *quarter_rows(const Consumer &g, int quarter)
{
    return g.m.staging(g.group) + quarter % 2 * PANEL_BYTES + g.warp % 4 * WARP_ROWS * PANEL * 2;
}

// Loads the warp's rows of a quarter of C, once TMA has read what was stored from there. row, col: of the
// warp's rows of the tile.
static __device__ __forceinline__ void load_quarter(const Consumer &g, const CUtensorMap *source, int quarter,
                                                    int row, int col)
{
    if (!elect_one())
        return;
    uint64_t *full = quarter_full(g, quarter);
    tma_store_wait_read();
    mbarrier_arrive_expect_tx(full, WARP_ROWS * PANEL * 2);
    tma_load(quarter_rows(g, quarter), source, full, col + quarter * PANEL, row, 0);
}

// Applies the factors of a quarter to the packed tile and stores it. All of the quarter is read first: with
// fewer reads at a time a warp waits for them longer.
template <int QUARTER>
static __device__ __forceinline__ void apply_quarter(const PackedTile &packed, const Consumer &g,
                                                     const CUtensorMap *out)
{
    mbarrier_wait(quarter_full(g, QUARTER), QUARTER / 2);
    uint32_t address =
        matrix_address(g.m.staging(g.group) + QUARTER % 2 * PANEL_BYTES, g.warp % 4 * WARP_ROWS);
    uint32_t u[PANEL / 16][4];
#pragma unroll
    for (int c = 0; c < PANEL / 16; c++)
        ldmatrix_x4(u[c], address ^ c << 5);
#pragma unroll
    for (int c = 0; c < PANEL / 16; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t x = packed.pair[QUARTER * PANEL / 4 + 4 * c + i];
            asm volatile("" : "+r"(x)); // or the compiler unpacks it outside of the loop over k
            u[c][i] = drelu2_pair(x, u[c][i]);
        }
        stmatrix_x4(address ^ c << 5, u[c]);
    }
    fence_proxy_async_shared();
    __syncwarp();
    if (!elect_one())
        return;
    tma_store(out, quarter_rows(g, QUARTER), packed.col + QUARTER * PANEL, packed.row, 0);
    tma_store_commit();
}

// Mainloop of a tile of COLS columns. packed.row is that of the warp.
template <GemmLayout FORM, int COLS>
static __device__ __forceinline__ void consume_drelu2_tile(PackedTile &packed, Consumer &g,
                                                           const CUtensorMap *out, const CUtensorMap *source,
                                                           const GemmWork &work, TileCoord at)
{
    const int *when = work.apply_at;
    int row = at.row + g.warp * WARP_ROWS;
    bool before = packed.row >= 0;
    float sum[128];
    for (int k = 0; k < work.tiles.steps; k++) {
        mainloop_step<FORM, COLS>(sum, g, k);
        if (before && k == when[LOAD_1])
            load_quarter(g, source, 1, packed.row, packed.col);
        if (before && k == when[APPLY_0])
            apply_quarter<0>(packed, g, out);
        if (before && k == when[LOAD_2])
            load_quarter(g, source, 2, packed.row, packed.col);
        if (before && k == when[APPLY_1])
            apply_quarter<1>(packed, g, out);
        if (before && k == when[LOAD_3])
            load_quarter(g, source, 3, packed.row, packed.col);
        if (before && k == when[APPLY_2])
            apply_quarter<2>(packed, g, out);
        if (k == when[LOAD_0])
            load_quarter(g, source, 0, row, at.col);
        if (before && k == when[APPLY_3])
            apply_quarter<3>(packed, g, out);
    }
    mainloop_finish<COLS>(sum, g);
#pragma unroll
    for (int i = 0; i < COLS / 4; i++)
        packed.pair[i] = pack2(sum[2 * i], sum[2 * i + 1]);
    packed.row = row;
    packed.col = at.col;
}

template <GemmLayout FORM>
static __device__ __forceinline__ void
consume_drelu2(Consumer &g, const CUtensorMap *out, const CUtensorMap *source, const GemmWork &work, int rank)
{
    const TileSchedule &t = work.tiles;
    PackedTile packed;
    int index = blockIdx.x / CLUSTER;
    packed.row = -1;
    for (; index < t.whole; index += gridDim.x / CLUSTER)
        consume_drelu2_tile<FORM, TILE_N>(packed, g, out, source, work, tile_coord(t, index, rank));
    bool half = index < t.whole + t.halves;
    if (half)
        consume_drelu2_tile<FORM, HALF_N>(packed, g, out, source, work, tile_coord(t, index, rank));
    load_quarter(g, source, 1, packed.row, packed.col);
    apply_quarter<0>(packed, g, out);
    if (!half)
        load_quarter(g, source, 2, packed.row, packed.col);
    apply_quarter<1>(packed, g, out);
    if (!half) {
        load_quarter(g, source, 3, packed.row, packed.col);
        apply_quarter<2>(packed, g, out);
        apply_quarter<3>(packed, g, out);
    }
    if (elect_one())
        tma_store_wait();
}

#endif

template <typename T, GemmLayout FORM, GemmEpilogue EPI, bool SCALED>
__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    sm90_gemm_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                     const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap source,
                     const __grid_constant__ GemmWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = uniform_warp();
    Consumer g = {{shared}, Pipeline(), warp / 4, 0, warp}; // warpgroup 2 is the producer
    int rank = cluster_rank();
    for (int i = 0; threadIdx.x == 0 && i < SOURCE_BARRIERS; i++)
        mbarrier_init(source_full(g.m, i), 1);
    shared_storage_init(g.m);
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce_tiles<FORM>(g.m, &x, &w, work.tiles, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if constexpr (EPI == EPILOGUE_DRELU2)
            consume_drelu2<FORM>(g, &out, &source, work, rank);
        else
            consume<T, FORM, EPI, SCALED>(g, &out, &source, work, rank);
    }
#endif
}
