// Products of the FP8 head's gradient: dx = g w, dw += g^T x. The e5m2 codes of g exist once, row by row,
// with a factor each row (sm90_head_gradient.cuh).
//
//   tile        128 x 192 x 128 bytes, 5 stages of 40 KB. Of 192 accumulators a thread 96 are WGMMA's and 96
//               are fp32 sums of these, added up every 1024 of K: FP8 WGMMA keeps 13 bits behind the leading
//               one of a sum
//   cluster     2 CTAs, one below the other; each loads half of B and multicasts it
//   warps       two consumer warpgroups of 64 rows each (240 registers), one producer thread
//   dx          both operands from shared memory
//   dw          K goes down the rows of g, and FP8 WGMMA wants K contiguous: A goes through ldmatrix.trans
//               and two byte permutations a register, and enters WGMMA from registers. One half of a stage
//               is loaded under the WGMMA of the other
//   schedule    persistent; the column tiles of a row of tiles are consecutive, so that they share g in L2
//   bound       power: 690 W. Adding up every 256 of K in place of 1024 costs dw 5%. A dw that also shifted
//               exponents in registers, four codes in 7 instructions, took a third longer. Clusters of 4 were
//               4 to 10% slower (dev/notes/2026-11-27_head_gradient_as_codes.md)
#include "llmc/cuda/head/sm90_head_gradient.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    TILE_M = 128,
    TILE_N = 192,
    TILE_K = 128,      // bytes, the width of the swizzle
    HALF_K = 64,       // what is converted at a time
    PROMOTE_STEPS = 8, // K steps between additions to the fp32 sums
    STAGES = 5,
    CLUSTER = 2,
    WARPGROUP = 128,
    WARPGROUP_M = 64,
    THREADS = 3 * WARPGROUP,
    CONSUMER_REGISTERS = 240,
    PRODUCER_REGISTERS = 24,
    A_BYTES = TILE_M * TILE_K,
    B_BYTES = TILE_N * TILE_K,
    STAGE_BYTES = A_BYTES + B_BYTES,
    SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGES * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block's shared memory");

typedef enum { INPUT_GRADIENT, WEIGHT_GRADIENT } Gradient;

struct Work {
    HeadProduct p;
    floatX *dx;
    float *dw;
    const float *factors;
    int row_tiles, col_tiles, steps; // tiles of the result, pairs of CTAs along its rows; K steps
};

#if HOPPER

struct SharedStorage {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)a(STAGES) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
};
using Pipeline = PipelineState<STAGES>;

struct TileCoord {
    int row, col; // of this CTA's tile
};
static __device__ __forceinline__ TileCoord tile_coord(const Work &k, int index, int rank)
{
    return {(index / k.col_tiles * CLUSTER + rank) * TILE_M, index % k.col_tiles * TILE_N};
}

// ---- producer ---------------------------------------------------------------------------------------------

template <Gradient WHICH>
static __device__ __forceinline__ void produce(const SharedStorage &m, const CUtensorMap *map_a,
                                               const CUtensorMap *map_b, const Work &k, int rank)
{
    const uint16_t all = (1 << CLUSTER) - 1;
    const int share = TILE_N / CLUSTER;
    Pipeline ring;
    for (int index = blockIdx.x / CLUSTER; index < k.row_tiles * k.col_tiles; index += gridDim.x / CLUSTER) {
        TileCoord at = tile_coord(k, index, rank);
        for (int step = 0; step < k.steps; step++, ring.advance()) {
            uint64_t *full = m.full(ring.stage);
            int depth = step * TILE_K;
            mbarrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            if (WHICH == WEIGHT_GRADIENT)
                tma_load(m.a(ring.stage), map_a, full, at.row, depth, 0);
            else
                tma_load(m.a(ring.stage), map_a, full, depth, at.row, 0);
            tma_load_multicast(m.b(ring.stage) + rank * share * TILE_K, map_b, full, depth,
                               at.col + rank * share, 0, all);
        }
    }
    for (int i = 0; i < STAGES; i++, ring.advance()) // producer tail
        mbarrier_wait(m.empty(ring.stage), ring.parity ^ 1);
}

// ---- consumer warpgroups ----------------------------------------------------------------------------------

// State of a consumer warpgroup.
struct Consumer {
    SharedStorage m;
    Pipeline ring;
    int group, warp, lane; // warp of the warpgroup
    int rank, previous;    // previous: the stage whose WGMMAs may be in flight
};

// Releases a stage to both CTAs, because both write to it. Locally with release semantics: ldmatrix has read
// A. What the other CTA writes, B, has been read by WGMMA alone.
static __device__ __forceinline__ void release(const Consumer &g, int stage)
{
    __syncwarp();
    if (g.lane == g.rank)
        mbarrier_arrive(g.m.empty(stage));
    else if (g.lane < CLUSTER)
        mbarrier_arrive_remote(g.m.empty(stage), g.lane);
}

// A of half a stage of dw, 64 rows of g, transposed: row r of the fragment of a warp is column 2 r of its 16
// columns of g, row r + 8 the next.
static __device__ __forceinline__ void load_transposed(uint32_t (&a)[2][4], const Consumer &g, int half)
{
    uint32_t address = shared_address(g.m.a(g.ring.stage)) + (HALF_K * half + g.lane) * TILE_K +
                       ((4 * g.group + g.warp ^ g.lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t raw[4];
        ldmatrix_x4_trans(raw, address + i * 32 * TILE_K);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            a[i][2 * h] = __byte_perm(raw[2 * h], raw[2 * h + 1], 0x6420);
            a[i][2 * h + 1] = __byte_perm(raw[2 * h], raw[2 * h + 1], 0x7531);
        }
    }
}

// Issues the WGMMAs over half a stage, with A in registers.
static __device__ __forceinline__ void mma_half(float (&sum)[96], uint32_t (&a)[2][4], uint64_t b, int half,
                                                bool accumulate)
{
#pragma unroll
    for (int i = 0; i < 2; i++) // in registers before the fence, or the compiler adds fences
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; i++)
        wgmma_rs_e5m2_192(sum, a[i], descriptor_advance(b, HALF_K * half + 32 * i), accumulate || i > 0);
    wgmma_commit();
}

// One K step of dw. The first half of the stage is in a[0]; leaves that of the next stage there.
static __device__ __forceinline__ void step_of_dw(float (&sum)[96], uint32_t (&a)[2][2][4], Consumer &g,
                                                  bool accumulate, bool more)
{
    int stage = g.ring.stage;
    uint64_t b = smem_descriptor(g.m.b(stage), 0);
    mma_half(sum, a[0], b, 0, accumulate);
    wgmma_wait<1>();
    if (accumulate) // otherwise it has been released
        release(g, g.previous);
    load_transposed(a[1], g, 1);
    mma_half(sum, a[1], b, 1, true);
    wgmma_wait<1>();
    g.previous = stage;
    g.ring.advance();
    if (more) {
        mbarrier_wait(g.m.full(g.ring.stage), g.ring.parity);
        load_transposed(a[0], g, 0);
    }
}

// One K step of dx.
static __device__ __forceinline__ void step_of_dx(float (&sum)[96], Consumer &g, bool accumulate)
{
    int stage = g.ring.stage;
    mbarrier_wait(g.m.full(stage), g.ring.parity);
    uint64_t a = smem_descriptor(g.m.a(stage) + g.group * WARPGROUP_M * TILE_K, 0),
             b = smem_descriptor(g.m.b(stage), 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TILE_K / 32; i++)
        wgmma_e5m2_192(sum, descriptor_advance(a, 32 * i), descriptor_advance(b, 32 * i),
                       accumulate || i > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (accumulate) // otherwise it has been released
        release(g, g.previous);
    g.previous = stage;
    g.ring.advance();
}

static __device__ __forceinline__ void store_dx(const float (&total)[96], const Consumer &g, const Work &k,
                                                TileCoord at)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = at.row + g.group * WARPGROUP_M + g.warp * 16 + g.lane / 4 + 8 * h;
        if (row >= k.p.rows)
            continue;
        float factor = k.factors[row];
        floatX *to = k.dx + (int64_t)row * k.p.d;
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j++) {
            int col = at.col + 8 * j + 2 * (g.lane % 4);
            if (col < k.p.d)
                *reinterpret_cast<uint32_t *>(to + col) =
                    pack2(total[4 * j + 2 * h] * factor, total[4 * j + 2 * h + 1] * factor);
        }
    }
}

// old: registers that nobody reads. All of dw is read before any of it is written, or each read would wait
// for the write before it.
static __device__ __forceinline__ void add_dw(const float (&total)[96], float (&old)[96], const Consumer &g,
                                              const Work &k, TileCoord at)
{
    float factor = *k.factors, *to[2];
    bool inside[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = at.row + g.group * WARPGROUP_M + g.warp * 16 + g.lane / 4 * 2 + h;
        to[h] = k.dw + (int64_t)row * k.p.d + at.col + 2 * (g.lane % 4);
        inside[h] = row < k.p.Vp;
    }
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 read = {};
            if (inside[h] && at.col + 8 * j < k.p.d)
                read = *reinterpret_cast<const float2 *>(to[h] + 8 * j);
            old[4 * j + 2 * h] = read.x;
            old[4 * j + 2 * h + 1] = read.y;
        }
    }
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int i = 4 * j + 2 * h;
            if (inside[h] && at.col + 8 * j < k.p.d)
                *reinterpret_cast<float2 *>(to[h] + 8 * j) =
                    make_float2(fmaf(total[i], factor, old[i]), fmaf(total[i + 1], factor, old[i + 1]));
        }
    }
}

template <Gradient WHICH>
static __device__ __forceinline__ void consume_tile(Consumer &g, const Work &k, TileCoord at)
{
    float sum[96], total[96];
    uint32_t a[2][2][4];
#pragma unroll
    for (int i = 0; i < 96; i++)
        sum[i] = total[i] = 0;
    if (WHICH == WEIGHT_GRADIENT) {
        mbarrier_wait(g.m.full(g.ring.stage), g.ring.parity);
        load_transposed(a[0], g, 0);
    }
    for (int first = 0; first < k.steps; first += PROMOTE_STEPS) {
        int end = min(first + PROMOTE_STEPS, k.steps);
        for (int step = first; step < end; step++) {
            if (WHICH == WEIGHT_GRADIENT)
                step_of_dw(sum, a, g, step > first, step + 1 < k.steps);
            else
                step_of_dx(sum, g, step > first);
        }
        wgmma_wait<0>();
        wgmma_fence_registers(sum);
        release(g, g.previous);
#pragma unroll
        for (int i = 0; i < 96; i++)
            total[i] += sum[i];
    }
    if (WHICH == WEIGHT_GRADIENT)
        add_dw(total, sum, g, k, at);
    else
        store_dx(total, g, k, at);
}

#endif

template <Gradient WHICH>
__global__ void __launch_bounds__(THREADS, 1)
    head_gradient_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                         const Work k)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedStorage m = {shared};
    int rank = cluster_rank(), warp = uniform_warp(), group = warp / 4;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.full(i), 1);
            mbarrier_init(m.empty(i), CLUSTER * 2 * WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    if (group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 2 * WARPGROUP / WARP && elect_one())
            produce<WHICH>(m, &map_a, &map_b, k, rank);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer g = {m, {}, group, warp % 4, (int)threadIdx.x % WARP, rank, -1};
    for (int index = blockIdx.x / CLUSTER; index < k.row_tiles * k.col_tiles; index += gridDim.x / CLUSTER)
        consume_tile<WHICH>(g, k, tile_coord(k, index, rank));
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

void sm90_head_gradient_open(void)
{
    if (!device_has_wgmma())
        return;
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDA_CHECK(cudaFuncSetAttribute(head_gradient_kernel<INPUT_GRADIENT>, most, SHARED_BYTES));
    CUDA_CHECK(cudaFuncSetAttribute(head_gradient_kernel<WEIGHT_GRADIENT>, most, SHARED_BYTES));
}

// A result of m rows, sums of `depth` products.
template <Gradient WHICH> static void launch(Stream s, Work k, int m, int depth)
{
    k.row_tiles = (int)ceil_div(m, CLUSTER * TILE_M);
    k.col_tiles = (int)ceil_div(k.p.d, TILE_N);
    k.steps = (int)ceil_div(depth, TILE_K);
    CUtensorMap map_a = tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, k.p.codes, 1, k.p.rows, k.p.Vp, k.p.Vp,
                                   WHICH == INPUT_GRADIENT ? TILE_M : TILE_K),
                map_b = tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, k.p.b, 1, k.p.d, k.p.b_pitch, k.p.b_pitch,
                                   TILE_N / CLUSTER);
    int64_t clusters = min_i64((int64_t)k.row_tiles * k.col_tiles, device_state.sms / CLUSTER);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        cluster_launch(attributes, s, {CLUSTER, THREADS, SHARED_BYTES}, clusters, false);
    CUDA_CHECK(cudaLaunchKernelEx(&config, head_gradient_kernel<WHICH>, map_a, map_b, k));
}

void sm90_head_dx(Stream s, const HeadProduct *p, floatX *dx, const float *factors)
{
    Work k = {.p = *p, .dx = dx, .factors = factors};
    launch<INPUT_GRADIENT>(s, k, p->rows, p->Vp);
}

void sm90_head_dw(Stream s, const HeadProduct *p, float *dw, const float *factor)
{
    Work k = {.p = *p, .dw = dw, .factors = factor};
    launch<WEIGHT_GRADIENT>(s, k, p->Vp, p->rows);
}
