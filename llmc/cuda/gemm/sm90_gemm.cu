// Products in tiles of 128 x 256 (sm90_tile.cuh says how), with a residual or a squared ReLU.
//
// Where the result is made of the sums and another matrix, the registers that will hold the packed result first receive that. It
// comes half a tile at a time through the staging area, between the halves of the tile before that leave through it, and what can
// be computed of it alone is computed while the products run.
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/rows/qkv.cuh"
#include "llmc/cuda/gemm/sm90_tile.cuh"

// What is done after which step of a tile's depth, beside the products: half of the tile before leaves the registers, half of the
// other matrix's tile is asked for and comes into them.
enum { STORE_LEFT, ASK_LEFT, TAKE_LEFT, STORE_RIGHT, ASK_RIGHT, TAKE_RIGHT, EVENTS };
enum { SHARED_BYTES = TILE_SHARED_BYTES + 2 * 8 /* barriers */ };
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct WideWork {
    WideTiles tiles;
    int at[EVENTS]; // never falling
};

template <WideFinish FINISH> constexpr bool takes_with = FINISH == WIDE_ADD || FINISH == WIDE_FACTOR;

#if HOPPER

// ---- factors ---------------------------------------------------------------------------------------------------------------
// Two factors 2 sqrt(y) share a register as fp16: an eighth of the rounding of a bf16. Beyond 65504 they are infinite, and so is
// the result: MLP inputs of 32752 are those of a run that has diverged.

static __device__ __forceinline__ float root(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t pack_factors(uint32_t y)
{
    __nv_bfloat162 four_y = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&y), __float2bfloat162_rn(4));
    uint32_t u = *reinterpret_cast<uint32_t *>(&four_y);
    __half2 factors = __floats2half2_rn(root(__uint_as_float(u << 16)), root(__uint_as_float(u & 0xffff0000u)));
    return *reinterpret_cast<uint32_t *>(&factors);
}

static __device__ __forceinline__ uint32_t apply_factors(float lo, float hi, uint32_t factors)
{
    float2 f = __half22float2(*reinterpret_cast<__half2 *>(&factors));
    return pack2(lo * f.x, hi * f.y);
}

// ---- the groups that multiply ----------------------------------------------------------------------------------------------

// Completes when a half of the other matrix's tile has come to a warpgroup's staging area.
static __device__ __forceinline__ uint64_t *with_full(const TileMemory &m, int group) { return m.empty(STAGES) + group; }

// Asks for columns x to x + 127, rows y to y + 63 of the other matrix, once what was stored from the staging area has been read.
static __device__ __forceinline__ void ask_half(const TileWorker &g, const CUtensorMap *with, int x, int y)
{
    group_sync(1 + g.group, GROUP); // all have taken the half before
    if (threadIdx.x % GROUP) return;
    uint64_t *full = with_full(g.m, g.group);
    stores_wait_read();
    barrier_arrive_expect(full, STAGING_BYTES);
    for (int p = 0; p < HALF_PANELS; p++)
        tile_load_own(g.m.staging(g.group) + p * PANEL_BYTES, with, full, x + p * PANEL, y, 0);
}

// What has been asked for, to the registers of columns HALF * SIDE to HALF * SIDE + 127.
template <WideFinish FINISH, int SIDE>
static __device__ __forceinline__ void take_half(uint32_t (&packed)[64], const TileWorker &g)
{
    barrier_wait(with_full(g.m, g.group), SIDE);
    uint32_t address = blocks_address(g.m.staging(g.group), threadIdx.x / WARP % 4 * 16);
#pragma unroll
    for (int c = 0; c < HALF / 8; c += 2) {
        uint32_t b[4];
        load_blocks(b, (address ^ c % 8 << 4) + c / 8 * PANEL_BYTES);
#pragma unroll
        for (int i = 0; i < 4; i++) packed[SIDE * HALF / 4 + 2 * c + i] = FINISH == WIDE_FACTOR ? pack_factors(b[i]) : b[i];
    }
}

// with: two elements of the other matrix, or two factors
template <WideFinish FINISH> static __device__ __forceinline__ uint32_t pack_result(float lo, float hi, uint32_t with)
{
    if (FINISH == WIDE_ADD) return pack2(lo + __uint_as_float(with << 16), hi + __uint_as_float(with & 0xffff0000u));
    if (FINISH == WIDE_FACTOR) return apply_factors(lo, hi, with);
    if (FINISH == WIDE_STORE) return pack2(lo, hi);
    uint32_t packed; // the conversion makes negative numbers zero; NaN stays
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi * fabsf(hi)), "f"(lo * fabsf(lo)));
    return packed;
}

// What has been computed and packed.
struct Packed {
    uint32_t pair[64];
    int row, col; // of the tile; row -1: nothing
};

// Computes a tile of COLS columns, while the one before leaves.
template <WideForm FORM, WideFinish FINISH, int COLS>
static __device__ __forceinline__ void compute_tile(Packed &packed, TileWorker &g, const CUtensorMap *out,
                                                    const CUtensorMap *with, const WideWork &work, TilePlace at)
{
    constexpr bool takes = takes_with<FINISH>, whole = COLS == TILE_COLS;
    constexpr int last = whole ? 1 : 0; // half of the other matrix's tile that comes when all of the tile before has left
    int row = at.row + g.group * GROUP_ROWS;
    float sum[128];
    for (int k = 0; k < work.tiles.steps; k++) {
        tile_step<FORM, COLS>(sum, g, k);
        if (k == work.at[STORE_LEFT] && packed.row >= 0) store_half<0>(packed.pair, g, out, packed.col, packed.row, 0);
        if (whole && takes && k == work.at[ASK_LEFT]) ask_half(g, with, at.col, row);
        if (whole && takes && k == work.at[TAKE_LEFT]) take_half<FINISH, 0>(packed.pair, g);
        if (k == work.at[STORE_RIGHT] && packed.row >= 0) store_half<1>(packed.pair, g, out, packed.col + HALF, packed.row, 0);
        if (takes && k == work.at[ASK_RIGHT]) ask_half(g, with, at.col + last * HALF, row);
        if (takes && k == work.at[TAKE_RIGHT]) take_half<FINISH, last>(packed.pair, g);
    }
    tile_finish<COLS>(sum, g);
#pragma unroll
    for (int i = 0; i < COLS / 4; i++)
        packed.pair[i] = pack_result<FINISH>(sum[2 * i], sum[2 * i + 1], takes ? packed.pair[i] : 0);
    packed.row = row, packed.col = at.col;
}

template <WideForm FORM, WideFinish FINISH>
static __device__ __forceinline__ void compute(TileWorker &g, const CUtensorMap *out, const CUtensorMap *with,
                                               const WideWork &work, int rank)
{
    const WideTiles &t = work.tiles;
    Packed packed;
    int index = blockIdx.x / CLUSTER;
    packed.row = -1;
    for (; index < t.whole; index += gridDim.x / CLUSTER)
        compute_tile<FORM, FINISH, TILE_COLS>(packed, g, out, with, work, tile_place(t, index, rank));
    bool half = index < t.whole + t.halves;
    if (half) compute_tile<FORM, FINISH, HALF>(packed, g, out, with, work, tile_place(t, index, rank));
    store_half<0>(packed.pair, g, out, packed.col, packed.row, 0);
    if (!half) store_half<1>(packed.pair, g, out, packed.col + HALF, packed.row, 0);
    if (threadIdx.x % GROUP == 0) stores_wait();
}

#endif

template <WideForm FORM, WideFinish FINISH>
__global__ void TILE_CLUSTER __launch_bounds__(TILE_THREADS, 1)
    wide_product_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                        const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap with,
                        const __grid_constant__ WideWork work)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    TileWorker g = {{shared}, TileRing(), (int)threadIdx.x / GROUP, 0}; // group 2 fetches
    int rank = cluster_rank();
    for (int i = 0; threadIdx.x == 0 && i < 2; i++) barrier_init(with_full(g.m, i), 1);
    tile_memory_init(g.m);
    if (g.group == 2) {
        registers_shrink<FETCH_REGISTERS>();
        if (threadIdx.x == 2 * GROUP) tiles_fetch<FORM>(g.m, &x, &w, work.tiles, rank);
    } else {
        registers_grow<COMPUTE_REGISTERS>();
        compute<FORM, FINISH>(g, &out, &with, work, rank);
    }
#endif
}

// ---- launch --------------------------------------------------------------------------------------------------------------

typedef void (*WideKernel)(const CUtensorMap, const CUtensorMap, const CUtensorMap, const CUtensorMap, const WideWork);
static const struct {
    WideForm form;
    WideFinish finish;
    WideKernel kernel;
} kernels[] = {
    {W_BY_DEPTH, WIDE_STORE, wide_product_kernel<W_BY_DEPTH, WIDE_STORE>},
    {W_BY_COLUMN, WIDE_STORE, wide_product_kernel<W_BY_COLUMN, WIDE_STORE>},
    {W_BY_COLUMN, WIDE_ADD, wide_product_kernel<W_BY_COLUMN, WIDE_ADD>},
    {W_BY_DEPTH, WIDE_SQUARE, wide_product_kernel<W_BY_DEPTH, WIDE_SQUARE>},
    {W_BY_DEPTH, WIDE_FACTOR, wide_product_kernel<W_BY_DEPTH, WIDE_FACTOR>},
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

void wide_product_reserve(void)
{
    for (int i = 0; device_has_wgmma() && i < KERNELS; i++)
        CUDA_CHECK(cudaFuncSetAttribute(kernels[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    if (device_has_wgmma()) qkv_tensor_reserve();
    wide_tile_reserve((const void *)kernels[0].kernel);
}

bool wide_product(Stream s, WideForm form, WideFinish finish, floatX *out, const floatX *x, const floatX *w, const floatX *with,
                  int N, int depth, int cols)
{
    // twelfths of the depth; without, with another matrix
    static const int when[2][EVENTS] = {{3, 3, 3, 8, 8, 8}, {1, 2, 5, 6, 7, 10}};
    WideWork work;
    unsigned blocks;
    const void *operands[] = {out, x, w, with};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)operands[i] % 16) return false;
    if (!wide_tiles(&work.tiles, &blocks, N, cols, depth)) return false;
    for (int i = 0; i < EVENTS; i++) work.at[i] = work.tiles.steps * when[with != NULL][i] / 12;
    bool by_depth = form == W_BY_DEPTH;
    CUtensorMap map_x = wide_tile_map(x, 1, N, depth, TILE_ROWS),
                map_w = by_depth ? wide_tile_map(w, 1, depth, cols, STAGE_DEPTH) : wide_tile_map(w, 1, cols, depth, PANEL),
                map_out = wide_tile_map(out, 1, N, cols, GROUP_ROWS),
                map_with = with ? wide_tile_map(with, 1, N, cols, GROUP_ROWS) : map_out;
    for (int i = 0; i < KERNELS; i++) {
        if (kernels[i].form != form || kernels[i].finish != finish) continue;
        kernels[i].kernel<<<blocks, TILE_THREADS, SHARED_BYTES, s>>>(map_x, map_w, map_out, map_with, work);
        CHECK_LAUNCH();
        return true;
    }
    return false;
}
