// Products with a squared ReLU on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma).
//
// A tile of 128 x 256 is computed by two warpgroups, 64 rows each, from operand tiles of depth 64 that one more warp fetches
// ahead through a ring of stages. The blocks are persistent and the ring runs on from tile to tile. The result passes through
// shared memory, from where the copy unit writes it while the next tile is multiplied; in the backward the same memory first
// receives y, fetched while this tile is multiplied. Edges are the copy unit's business: what lies outside reads as zero and is
// not written.
#include "llmc/cuda/relu2.cuh"
#include "llmc/cuda/ns_wgmma.cuh"

enum {
    ROWS = 128, COLS = 256, DEPTH = 64, // of a tile, of a stage
    STAGES = 3,
    GROUP = 128,      // threads of a warpgroup
    GROUP_ROWS = 64,  // rows of the tile that a warpgroup computes
    PANEL = 64,       // columns of 128 bytes, the width of the swizzle
    PANELS = COLS / PANEL,
    THREADS = 2 * GROUP + WARP,
    A_BYTES = ROWS * DEPTH * 2,
    B_PANEL_BYTES = PANEL * DEPTH * 2,
    STAGE_BYTES = A_BYTES + PANELS * B_PANEL_BYTES,
    PANEL_BYTES = GROUP_ROWS * PANEL * 2,  // of a warpgroup's result
    STAGING_BYTES = PANELS * PANEL_BYTES,
    SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGING_BYTES + (2 * STAGES + 2) * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

struct Tiles {
    int columns, all; // tiles in a row of tiles; in all
    int depth;
};

#if NS_HOPPER

// d (64, 256) = a (64, 16) b (16, 256), or += when accumulate; b is stored as (16, 256).
static __device__ __forceinline__ void multiply_256(float (&d)[128], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, p, 1, 1, 0, 1;\n\t}"
                 : NS_D8(0), NS_D8(8), NS_D8(16), NS_D8(24), NS_D8(32), NS_D8(40), NS_D8(48), NS_D8(56),
                   NS_D8(64), NS_D8(72), NS_D8(80), NS_D8(88), NS_D8(96), NS_D8(104), NS_D8(112), NS_D8(120)
                 : "l"(a), "l"(b), "r"((int)accumulate));
}

static __device__ __forceinline__ void tile_load_2d(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"((uint64_t)map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}

static __device__ __forceinline__ void tile_store_2d(const CUtensorMap *map, const void *from, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64_t)map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}

static __device__ __forceinline__ void release_stage(uint64_t *empty)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(empty)) : "memory");
}

struct Shared {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint8_t *staging(int group) const { return base + STAGES * STAGE_BYTES + group * STAGING_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)staging(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
    __device__ __forceinline__ uint64_t *factor(int group) const { return full(2 * STAGES) + group; } // y has arrived
};

struct Ring { // a position in the ring of stages
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One thread runs this.
static __device__ __forceinline__ void fetch(const Shared &m, const CUtensorMap *x, const CUtensorMap *w, const Tiles &t)
{
    Ring ring;
    for (int index = blockIdx.x; index < t.all; index += gridDim.x) {
        int row = index / t.columns * ROWS, col = index % t.columns * COLS;
        for (int k = 0; k < t.depth; k += DEPTH) {
            uint64_t *full = m.full(ring.stage);
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            barrier_arrive_expect(full, STAGE_BYTES);
            tile_load_2d(m.a(ring.stage), x, full, k, row);
            for (int p = 0; p < PANELS; p++) tile_load_2d(m.b(ring.stage) + p * B_PANEL_BYTES, w, full, col + p * PANEL, k);
            ring.advance();
        }
    }
}

// The thread's place in the staging area for columns 8 g of row `half` (of its two): panels of 64 rows of 128 bytes, in 16-byte
// chunks swizzled as the copy unit has them.
static __device__ __forceinline__ uint32_t *slot_of(uint8_t *staging, int g, int half)
{
    int lane = threadIdx.x % WARP, row = threadIdx.x / WARP % 4 * 16 + half * 8 + lane / 4;
    return (uint32_t *)(staging + g / 8 * PANEL_BYTES + row * 128 + ((g % 8 ^ (row & 7)) << 4) + lane % 4 * 4);
}

static __device__ __forceinline__ float root(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// sum (64, 256) = the warpgroup's rows of one tile.
static __device__ __forceinline__ void multiply_tile(float (&sum)[128], const Shared &m, Ring &ring, int depth, int group)
{
    int previous = 0;
    for (int k = 0; k < depth; k += DEPTH) {
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.a(ring.stage) + group * GROUP_ROWS * 128, 0), b = operand(m.b(ring.stage), B_PANEL_BYTES);
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++)
            multiply_256(sum, operand_advance(a, 32 * i), operand_advance(b, 16 * 128 * i), k + i > 0);
        products_commit();
        if (k > 0) {
            products_wait<1>();
            if (threadIdx.x % WARP == 0) release_stage(m.empty(previous));
        }
        previous = ring.stage;
        ring.advance();
    }
    products_wait<0>();
    if (threadIdx.x % WARP == 0) release_stage(m.empty(previous));
}

// The sums to results in the staging area, where a thread finds its y in the places of its results.
template <bool BACKWARD> static __device__ __forceinline__ void finish(const float (&sum)[128], uint8_t *staging)
{
#pragma unroll
    for (int g = 0; g < COLS / 8; g++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t *slot = slot_of(staging, g, half);
            float lo = sum[4 * g + 2 * half], hi = sum[4 * g + 2 * half + 1];
            if (BACKWARD) {
                uint32_t y = *slot;
                lo *= 2 * root(__uint_as_float(y << 16));
                hi *= 2 * root(__uint_as_float(y & 0xffff0000u));
            } else {
                lo = lo <= 0 ? 0 : lo * lo; // NaN stays
                hi = hi <= 0 ? 0 : hi * hi;
            }
            *slot = pack2(lo, hi);
        }
}

template <bool BACKWARD>
static __device__ __forceinline__ void compute(const Shared &m, const CUtensorMap *out, const CUtensorMap *y, const Tiles &t,
                                               int group)
{
    Ring ring;
    uint32_t factor_parity = 0;
    uint8_t *staging = m.staging(group);
    bool leader = threadIdx.x % GROUP == 0;
    for (int index = blockIdx.x; index < t.all; index += gridDim.x) {
        int row = index / t.columns * ROWS + group * GROUP_ROWS, col = index % t.columns * COLS;
        if (leader) {
            stores_wait_read(); // of the tile before
            if (BACKWARD) {
                barrier_arrive_expect(m.factor(group), STAGING_BYTES);
                for (int p = 0; p < PANELS; p++)
                    tile_load_2d(staging + p * PANEL_BYTES, y, m.factor(group), col + p * PANEL, row);
            }
        }
        float sum[128];
        multiply_tile(sum, m, ring, t.depth, group);
        if (BACKWARD) {
            barrier_wait(m.factor(group), factor_parity);
            factor_parity ^= 1;
        } else {
            group_sync(1 + group, GROUP); // the leader has seen the staging area free
        }
        finish<BACKWARD>(sum, staging);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // what was written is now seen by the copy unit
        group_sync(1 + group, GROUP);
        if (leader) {
            for (int p = 0; p < PANELS; p++) tile_store_2d(out, staging + p * PANEL_BYTES, col + p * PANEL, row);
            stores_commit();
        }
    }
    if (leader) stores_wait();
}

#endif

template <bool BACKWARD>
__global__ void __launch_bounds__(THREADS, 1)
    relu2_tensor_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                        const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap y, const Tiles tiles)
{
#if NS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared m = {shared};
    int group = threadIdx.x / GROUP; // 2: the warp that fetches
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), 2 * GROUP / WARP);
        for (int i = 0; i < 2; i++) barrier_init(m.factor(i), 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (group < 2) compute<BACKWARD>(m, &out, &y, tiles, group);
    else if (threadIdx.x == 2 * GROUP) fetch(m, &x, &w, tiles);
#endif
}

// ---- launch --------------------------------------------------------------------------------------------------------------

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static EncodeTiled encode_tiled; // NULL: no such products on this path

bool relu2_tensor_open(void)
{
    encode_tiled = NULL;
    if (!device_has_wgmma()) return false;
    void *address = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found));
    if (found == cudaDriverEntryPointSuccess) encode_tiled = (EncodeTiled)address;
    CUDA_CHECK(cudaFuncSetAttribute(relu2_tensor_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    CUDA_CHECK(cudaFuncSetAttribute(relu2_tensor_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    return encode_tiled != NULL;
}

// Boxes of 64 columns and box_rows rows of a (rows, cols) bf16 matrix.
static CUtensorMap matrix_map(const void *base, int rows, int cols, int box_rows)
{
    CUtensorMap map;
    cuuint64_t sizes[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)cols * 2};
    cuuint32_t box[2] = {PANEL, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CUresult r = encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)base, sizes, strides, box, steps,
                              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS) fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for a matrix of %d x %d (error %d)", rows, cols, (int)r);
    return map;
}

bool relu2_tensor(Stream s, floatX *out, const floatX *x, const floatX *w, const floatX *y, int N, int in, int width)
{
    const void *operands[] = {out, x, w, y};
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)operands[i] % 16) return false;
    if (!encode_tiled || in % 8 || width % 8) return false;
    Tiles t = {(int)ceil_div(width, COLS), 0, in};
    int64_t all = ceil_div(N, ROWS) * t.columns;
    if (all > INT32_MAX) return false;
    t.all = (int)all;
    CUtensorMap map_x = matrix_map(x, N, in, ROWS), map_w = matrix_map(w, in, width, DEPTH),
                map_out = matrix_map(out, N, width, GROUP_ROWS);
    CUtensorMap map_y = y ? matrix_map(y, N, width, GROUP_ROWS) : map_out;
    unsigned blocks = (unsigned)min_i64(t.all, device_state.sms);
    if (y) relu2_tensor_kernel<true><<<blocks, THREADS, SHARED_BYTES, s>>>(map_x, map_w, map_out, map_y, t);
    else relu2_tensor_kernel<false><<<blocks, THREADS, SHARED_BYTES, s>>>(map_x, map_w, map_out, map_y, t);
    CHECK_LAUNCH();
    return true;
}
