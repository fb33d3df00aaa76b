// sm90 GEMM with a fused epilogue: STORE, RESIDUAL (add C), RELU2 (relu(x)^2), DRELU2 (x * 2 sqrt(C)).
// Operands T: bf16, or e4m3 with one scale each, which multiplies the sums (results that are codes, too:
// sm90_fp8_codes.cu). SCALED: the sums of bf16 operands are multiplied by alpha.
//
// Tile 128 x 256 x 64, 4 stages, clusters of 2 CTAs with multicast of B, 2 consumer warpgroups, 1 producer
// thread, persistent (sm90_tile.cuh). The epilogue of a tile overlaps with the mainloop of the next one:
// sums are packed to bf16 into 64 registers, and these are stored in two halves at fixed k steps of the next
// tile.
//
// Epilogues with a source matrix C reuse the same 64 registers and the same staging buffer: each half of C
// is loaded by TMA into the staging buffer after the half of the previous tile has been stored from it, and
// is read into the registers that this half has left. Functions of C alone are computed there, under the
// WGMMA of the mainloop.
//
// Bound: tensor cores, at the clock that 700 W allow: 660 to 700 TFLOP/s for STORE and RESIDUAL, 580 for
// DRELU2, which executes two square roots for each pair of elements (one H200, 2026-11-22). Registers: 128
// sums + 64 packed of 232; no spills. Tried without gain: staggered warpgroups, clusters of 4, ping-pong of
// the two warpgroups.
#pragma once
#include "llmc/cuda/gemm/sm90_tile.cuh"
#include "llmc/cuda/gemm/fp8_codes.cuh"

// K steps of a tile's mainloop after which the epilogue of the previous tile and the load of this tile's C
// advance.
enum { STORE_HALF0, LOAD_HALF0, READ_HALF0, STORE_HALF1, LOAD_HALF1, READ_HALF1, EVENTS };
enum { SHARED_BYTES = TILE_SHARED_BYTES + 2 * 8 /* barriers */ };
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

// Factors of the sums of e4m3 operands: (1) fp32 in device memory each.
struct Fp8Work {
    const float *scale_x, *scale_w;
    const float *alpha; // or NULL: 1
};

struct GemmWork {
    TileSchedule tiles;
    int at[EVENTS];     // non-decreasing
    Fp8Work fp8;        // T e4m3
    const float *alpha; // (1) device; SCALED
    int plane_cols;     // of the result, whose planes lie one behind the other
};

template <typename T> constexpr bool is_fp8 = sizeof(T) == 1;
template <GemmEpilogue EPI> constexpr bool has_source = EPI == EPILOGUE_RESIDUAL || EPI == EPILOGUE_DRELU2;

#if HOPPER

// ---- DRELU2 -----------------------------------------------------------------------------------------------
// A register holds two factors 2 sqrt(c) as fp16, whose rounding error is an eighth of bf16's. Factors above
// 65504 become infinite, and so does the result: an MLP input of 32752 occurs only in a run that has
// diverged.

static __device__ __forceinline__ float sqrt_approx(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t drelu2_factors(uint32_t y)
{
    __nv_bfloat162 four_y = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&y), __float2bfloat162_rn(4));
    uint32_t u = *reinterpret_cast<uint32_t *>(&four_y);
    __half2 factors = __floats2half2_rn(sqrt_approx(__uint_as_float(u << 16)),
                                        sqrt_approx(__uint_as_float(u & 0xffff0000u)));
    return *reinterpret_cast<uint32_t *>(&factors);
}

static __device__ __forceinline__ uint32_t apply_drelu2_factors(float lo, float hi, uint32_t factors)
{
    float2 f = __half22float2(*reinterpret_cast<__half2 *>(&factors));
    return pack2(lo * f.x, hi * f.y);
}

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// The mbarrier of a warpgroup for the half of C in its staging buffer.
static __device__ __forceinline__ uint64_t *source_full(const SharedStorage &m, int group)
{
    return m.empty(STAGES) + group;
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
template <GemmEpilogue EPI, int SIDE>
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
            packed[SIDE * HALF_N / 4 + 2 * c + i] = EPI == EPILOGUE_DRELU2 ? drelu2_factors(b[i]) : b[i];
    }
}

// source: two elements of C, or two DRELU2 factors. ROUNDED: relu^2 of the pair as bf16 holds it.
template <GemmEpilogue EPI, bool ROUNDED>
static __device__ __forceinline__ uint32_t epilogue_pair(float lo, float hi, uint32_t source)
{
    if (EPI == EPILOGUE_RESIDUAL)
        return pack2(lo + __uint_as_float(source << 16), hi + __uint_as_float(source & 0xffff0000u));
    if (EPI == EPILOGUE_DRELU2)
        return apply_drelu2_factors(lo, hi, source);
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
    constexpr bool has_c = has_source<EPI>, whole = COLS == TILE_N, rounded = is_fp8<T>,
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
            read_source_half<EPI, 0>(packed.pair, g);
        if (k == work.at[STORE_HALF1] && packed.row >= 0)
            store_packed<1>(packed, g, out, work);
        if (has_c && k == work.at[LOAD_HALF1])
            load_source_half(g, source, at.col + last * HALF_N, row);
        if (has_c && k == work.at[READ_HALF1])
            read_source_half<EPI, last>(packed.pair, g);
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
    for (int i = 0; threadIdx.x == 0 && i < 2; i++)
        mbarrier_init(source_full(g.m, i), 1);
    shared_storage_init(g.m);
    if (g.group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce_tiles<FORM>(g.m, &x, &w, work.tiles, rank);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<T, FORM, EPI, SCALED>(g, &out, &source, work, rank);
    }
#endif
}
