// The product x w^T with everything that a row of logits needs before its gradient: softcap, and the sum of e^z. In FP8 for
// training, in bf16 for evaluation, which needs the sums only.
//
// The sum of a logit has only d terms, so the product is as much a matter of moving operands and results as of multiplying. A
// block keeps COLS rows of the weight in shared memory and lets the rows of x stream past, 64 at a time, through a ring of
// stages: half the traffic of square tiles. Two blocks form a cluster; each fetches half of every stage of x for both. Two
// warpgroups take turns: one multiplies while the other turns its tile of sums into results, so that the special-function unit
// works beside the tensor cores.
//
// What leaves in training is not the logit but 1 - sig(logit / 7.5) in 16 bits: z = 30 sig needs no more (an error of 2^-17 in
// sig is one of 2e-4 in the softmax, a fiftieth of what rounding the logit to bf16 does), and the gradient spares the sigmoid.
#include "llmc/cuda/head/sm90_head_logits.cuh"
#include "llmc/cuda/head/head_loss.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    TILE_ROWS = 64, DEPTH = 128, // of a tile, of a stage: bytes, the width of the swizzle
    GROUP = 128,                 // threads of a warpgroup
    THREADS = 3 * GROUP,         // two warpgroups compute, warps of the third fetch
    COMPUTE_REGISTERS = 240, FETCH_REGISTERS = 24,
    CLUSTER = 2,
    PART_ROWS = TILE_ROWS / CLUSTER,
    STAGE_BYTES = TILE_ROWS * DEPTH,
    MAX_STAGES = 12, MAX_SLABS = 12,
    BARRIER_BYTES = (2 * MAX_STAGES + MAX_SLABS + 1) * 8,
    MAX_SHARED = 227 * 1024
};

struct Work {
    HeadLogits a;
    int row_tiles, col_tiles;
    int slabs, stages; // a slab: DEPTH columns of the block's part of the weight
};

#if HOPPER

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D48(i) D16(i), D16(i + 16), D16(i + 32)
#define FIRST_48                                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "            \
    "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NEXT_48                                                                                                                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, "  \
    "%72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// d (64, COLS) = a b^T, or += when accumulate, with 32 bytes of every row of a (64, ...) and b (COLS, ...).
template <HeadMode MODE, int COLS> struct Multiply;
template <> struct Multiply<HEAD_FP8, 192> {
    static __device__ __forceinline__ void run(float (&d)[96], uint64_t a, uint64_t b, bool accumulate)
    {
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %98, 0;\n\twgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 "
                     "{" FIRST_48 ", " NEXT_48 "}, %96, %97, p, 1, 1;\n\t}"
                     : D48(0), D48(48)
                     : "l"(a), "l"(b), "r"((int)accumulate));
    }
};
template <> struct Multiply<HEAD_FP8, 96> {
    static __device__ __forceinline__ void run(float (&d)[48], uint64_t a, uint64_t b, bool accumulate)
    {
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %50, 0;\n\twgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 "
                     "{" FIRST_48 "}, %48, %49, p, 1, 1;\n\t}"
                     : D48(0)
                     : "l"(a), "l"(b), "r"((int)accumulate));
    }
};
template <> struct Multiply<HEAD_BF16, 96> {
    static __device__ __forceinline__ void run(float (&d)[48], uint64_t a, uint64_t b, bool accumulate)
    {
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %50, 0;\n\twgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
                     "{" FIRST_48 "}, %48, %49, p, 1, 1, 0, 0;\n\t}"
                     : D48(0)
                     : "l"(a), "l"(b), "r"((int)accumulate));
    }
};

template <int COLS> struct Shared {
    uint8_t *base;
    int slabs, stages;
    __device__ __forceinline__ uint8_t *w(int slab) const { return base + slab * (COLS * DEPTH); }
    __device__ __forceinline__ uint8_t *x(int stage) const { return w(slabs) + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)x(stages) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(MAX_STAGES) + stage; }
    __device__ __forceinline__ uint64_t *w_full(int slab) const { return empty(MAX_STAGES) + slab; }
    __device__ __forceinline__ uint64_t *w_empty() const { return w_full(MAX_SLABS); }
};

// In FP8 the warpgroups multiply strictly by turns, from the first tile of the kernel to the last, and share a ring: left alone,
// both multiply at the same time, at half the speed, and then leave the tensor cores idle together. In bf16 one warpgroup with
// its narrow tiles does not keep the tensor cores busy: there both go on as they come, each with a ring of its own.
template <HeadMode MODE> static __device__ __forceinline__ constexpr int rings() { return MODE == HEAD_FP8 ? 1 : 2; }

struct Ring { // a position in a ring of stages
    int first, count, stage;
    uint32_t parity;
    __device__ __forceinline__ void advance(int by)
    {
        for (stage += by; stage >= first + count; stage -= count) parity ^= 1;
    }
};

template <HeadMode MODE> static __device__ __forceinline__ Ring ring_of(int group, int stages, uint32_t parity)
{
    int count = stages / rings<MODE>(), first = group % rings<MODE>() * count;
    return {first, count, first, parity};
}

// ---- fetching: one thread each -------------------------------------------------------------------------------------------

// For all tiles, or for those of one warpgroup.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void fetch_x(const Shared<COLS> &m, const CUtensorMap *map, const Work &k, int group, int rank)
{
    Ring ring = ring_of<MODE>(group, k.stages, 1); // the stages begin empty
    int count = 0;
    for (int first = blockIdx.x - rank; first < k.col_tiles; first += gridDim.x)
        for (int tile = 0; tile < k.row_tiles; tile++, count++) {
            if (count % rings<MODE>() != group) continue;
            for (int slab = 0; slab < k.slabs; slab++) {
                uint64_t *full = m.full(ring.stage);
                barrier_wait(m.empty(ring.stage), ring.parity);
                barrier_arrive_expect(full, STAGE_BYTES);
                tile_load(m.x(ring.stage) + rank * (PART_ROWS * DEPTH), map, full, slab * DEPTH,
                          tile * TILE_ROWS + rank * PART_ROWS, 0, (1 << CLUSTER) - 1);
                ring.advance(1);
            }
        }
    for (int i = 0; i < ring.count; i++, ring.advance(1)) barrier_wait(m.empty(ring.stage), ring.parity); // the last arrivals
}

template <int COLS>
static __device__ __forceinline__ void fetch_w(const Shared<COLS> &m, const CUtensorMap *map, const Work &k, int rank)
{
    uint32_t parity = 1;
    for (int first = blockIdx.x - rank; first < k.col_tiles; first += gridDim.x, parity ^= 1) {
        barrier_wait(m.w_empty(), parity);
        for (int slab = 0; slab < k.slabs; slab++) {
            barrier_arrive_expect(m.w_full(slab), COLS * DEPTH);
            tile_load(m.w(slab), map, m.w_full(slab), slab * DEPTH, (first + rank) * COLS, 0, (uint16_t)(1 << rank));
        }
    }
}

// ---- computing -----------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ void wait_for_turn(int group) { group_sync(1 + group, 2 * GROUP); }
static __device__ __forceinline__ void pass_turn_on(int group) { group_arrive(1 + (1 - group), 2 * GROUP); }

// sum (64, COLS) = the rows of one tile.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void multiply_tile(float (&sum)[COLS / 2], const Shared<COLS> &m, int slabs, Ring &ring,
                                                     bool new_weight, uint32_t weight_parity, bool pass_on, int group)
{
    int lane = threadIdx.x % WARP, previous = 0;
    for (int slab = 0; slab < slabs; slab++) {
        if (new_weight) barrier_wait(m.w_full(slab), weight_parity);
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.x(ring.stage), 0), b = operand(m.w(slab), 0);
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 32; i++)
            Multiply<MODE, COLS>::run(sum, operand_advance(a, 32 * i), operand_advance(b, 32 * i), slab + i > 0);
        products_commit();
        if (slab > 0) {
            products_wait<1>();
            if (lane < CLUSTER) barrier_arrive_at(m.empty(previous), lane);
        }
        previous = ring.stage;
        ring.advance(1);
    }
    if (pass_on) pass_turn_on(group);
    products_wait<0>();
    products_done(sum);
    if (lane < CLUSTER) barrier_arrive_at(m.empty(previous), lane);
}

// 1 - sig of four logits from their sums of products: 1/(1 + e), e = exp(logit / 7.5); the four reciprocals come from that of the
// product. e is kept below 2^30, where the result is zero for all purposes and the product of four still finite.
static __device__ __forceinline__ void rest4(float *rest, const float *sum, float scale)
{
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 1 + exp2_fast(min_keeping_nan(sum[i] * scale, 30));
    float ab = d[0] * d[1], cd = d[2] * d[3], r = reciprocal_fast(ab * cd), rab = r * cd, rcd = r * ab;
    rest[0] = rab * d[1], rest[1] = rab * d[0], rest[2] = rcd * d[3], rest[3] = rcd * d[2];
}

// Eight sums of products of a row to the sum of their e^(z - 30).
static __device__ __forceinline__ float finish_exactly(float (&s)[8], float unit)
{
    float rest[8], part = 0;
    rest4(rest, s, unit * (LOG2E / SLOPE));
    rest4(rest + 4, s + 4, unit * (LOG2E / SLOPE));
#pragma unroll
    for (int i = 0; i < 8; i++) part += exp2_fast(rest[i] * (-CAP * LOG2E)); // z - 30 = -30 (1 - sig)
    return part;
}

// The same in training: sig(x) = (1 + t) / 2 with the hardware's t = tanh(x / 2), good to 2^-11 of t. packed: 1 - sig.
static __device__ __forceinline__ float finish_fast(float (&s)[8], float unit, uint4 *packed)
{
    float part = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = tanh_fast(s[i] * (unit * (0.5f / SLOPE)));
#pragma unroll
    for (int i = 0; i < 8; i++) part += exp2_fast(fmaf(s[i], 0.5f * CAP * LOG2E, -0.5f * CAP * LOG2E)); // z - 30 = 15 t - 15
    *packed = pack_halves(s);
    return part;
}

// The thread's part of its rows `row` and `row` + 8: of every 32 columns 8, which are neighbours in product order.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void finish_tile(const float (&sum)[COLS / 2], const Work &k, int tile, int row,
                                                   const int (&targets)[2])
{
    const HeadLogits &a = k.a;
    int q = threadIdx.x % 4, col0 = tile * COLS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int at = targets[h] - col0;
        if ((unsigned)at < COLS) { // rare
#pragma unroll
            for (int i = 0; i < COLS / 4; i++) {
                int column = MODE == HEAD_FP8 ? i / 8 * 32 + 8 * q + i % 8 : i / 2 * 8 + 2 * q + i % 2;
                if (at == column) a.wanted[row + 8 * h] = sum[i / 2 * 4 + 2 * h + i % 2] * a.scale;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        bool there = r < a.rows;
        uint16_t *out = a.rest + (int64_t)r * a.Vp + col0 + 8 * q;
        float total = 0;
#pragma unroll
        for (int b = 0; b < COLS / 32; b++) {
            bool inside = col0 + 32 * b < a.Vp;
            float s[8], part;
            uint4 packed;
#pragma unroll
            for (int i = 0; i < 8; i++) s[i] = sum[16 * b + i / 2 * 4 + 2 * h + i % 2];
            if (MODE == HEAD_FP8) part = finish_fast(s, a.scale, &packed);
            else part = finish_exactly(s, a.scale);
            total += inside ? part : 0;
            if (MODE == HEAD_FP8 && there && inside) *reinterpret_cast<uint4 *>(out + 32 * b) = packed;
        }
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (q == 0 && there && tile < k.col_tiles) a.sums[(int64_t)tile * a.sums_pitch + r] = total;
    }
}

// Of the thread's two rows of a tile; they are fetched a tile ahead, or every tile would begin by waiting for them.
static __device__ __forceinline__ void fetch_targets(int (&targets)[2], const Work &k, int row)
{
#pragma unroll
    for (int h = 0; h < 2; h++) targets[h] = row + 8 * h < k.a.rows ? __ldg(k.a.targets + row + 8 * h) : -1;
}

// Tiles in the order of the rows, for one part of the weight after the other; every second is this warpgroup's.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void compute(const Shared<COLS> &m, const Work &k, int group, int rank)
{
    int lane = threadIdx.x % WARP, row0 = threadIdx.x % GROUP / WARP * 16 + lane / 4, t = group;
    uint32_t weight_parity = 0;
    bool new_weight = true, begun = group > 0;
    constexpr bool TURNS = rings<MODE>() == 1;
    Ring ring = ring_of<MODE>(group, k.stages, 0);
    int targets[2], next_targets[2];
    fetch_targets(next_targets, k, t * TILE_ROWS + row0);
    if (TURNS) ring.advance(group * k.slabs);
    for (int first = blockIdx.x - rank; first < k.col_tiles;) {
        bool last_of_weight = t + 2 >= k.row_tiles, last_weight = first + (int)gridDim.x >= k.col_tiles;
        int next = last_of_weight ? t + 2 - k.row_tiles : t + 2;
        float sum[COLS / 2];
        bool more = !last_weight || t + 1 < k.row_tiles; // the next tile, the other warpgroup's
        if (TURNS && begun) wait_for_turn(group);
        begun = true;
        multiply_tile<MODE, COLS>(sum, m, k.slabs, ring, new_weight, weight_parity, TURNS && more, group);
        if (TURNS) ring.advance(k.slabs); // the other's
        if (last_of_weight && !last_weight && lane == 0) barrier_arrive_at(m.w_empty(), rank); // else nobody waits for it
        targets[0] = next_targets[0], targets[1] = next_targets[1];
        fetch_targets(next_targets, k, next * TILE_ROWS + row0);
        finish_tile<MODE, COLS>(sum, k, first + rank, t * TILE_ROWS + row0, targets);
        if (last_of_weight) first += gridDim.x, weight_parity ^= 1;
        new_weight = last_of_weight;
        t = next;
    }
}

#endif

template <HeadMode MODE, int COLS>
__global__ void __launch_bounds__(THREADS, 1)
    head_logits_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w, const Work k)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared<COLS> m = {shared, k.slabs, k.stages};
    int rank = cluster_rank(), group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < k.stages; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), CLUSTER * GROUP / WARP);
        for (int i = 0; i < k.slabs; i++) barrier_init(m.w_full(i), 1);
        barrier_init(m.w_empty(), 2 * GROUP / WARP);
        barrier_init_fence();
    }
    cluster_sync();
    if (group < 2) {
        registers_grow<COMPUTE_REGISTERS>();
        compute<MODE, COLS>(m, k, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        int warp = (threadIdx.x - 2 * GROUP) / WARP;
        if (threadIdx.x % WARP == 0) {
            if (warp < rings<MODE>()) fetch_x<MODE, COLS>(m, &map_x, k, warp, rank);
            else if (warp == rings<MODE>()) fetch_w<COLS>(m, &map_w, k, rank);
        }
    }
#endif
}

// ---- launch --------------------------------------------------------------------------------------------------------------

static bool usable; // on this path

void head_tensor_open(void)
{
    usable = device_has_wgmma();
    if (!usable) return;
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_FP8, 192>, most, MAX_SHARED));
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_FP8, 96>, most, MAX_SHARED));
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_BF16, 96>, most, MAX_SHARED));
}

static int row_bytes(HeadMode mode, int d) { return mode == HEAD_FP8 ? d : 2 * d; }
static int slabs_of(HeadMode mode, int d) { return (int)ceil_div(row_bytes(mode, d), DEPTH); }
static int cols_of(HeadMode mode, int d) { return mode == HEAD_FP8 && slabs_of(mode, d) <= MAX_SLABS / 2 ? 192 : 96; }

bool head_tensor_fits(HeadMode mode, int d, int Vp)
{
    return usable && row_bytes(mode, d) % 16 == 0 && slabs_of(mode, d) <= MAX_SLABS && Vp % 32 == 0;
}

int head_tensor_parts(HeadMode mode, int d, int Vp) { return (int)ceil_div(Vp, cols_of(mode, d)); }

// Boxes of DEPTH bytes of box_rows rows of a (rows, bytes) matrix; what lies outside reads as zero.
static CUtensorMap bytes_map(const void *base, int rows, int bytes, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, base, 1, rows, bytes, bytes, box_rows);
}

template <HeadMode MODE, int COLS> static void launch(Stream s, const CUtensorMap &map_x, const CUtensorMap &map_w, const Work &k)
{
    size_t shared = (size_t)(k.slabs * COLS * DEPTH + k.stages * STAGE_BYTES + BARRIER_BYTES);
    int64_t clusters = min_i64(ceil_div(k.col_tiles, CLUSTER), device_state.sms / CLUSTER);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, s, {CLUSTER, THREADS, shared}, clusters, false);
    CUDA_CHECK(cudaLaunchKernelEx(&config, head_logits_kernel<MODE, COLS>, map_x, map_w, k));
}

void head_tensor_logits(Stream s, const HeadLogits *a)
{
    int bytes = row_bytes(a->mode, a->d), slabs = slabs_of(a->mode, a->d), cols = cols_of(a->mode, a->d);
    int room = (MAX_SHARED - BARRIER_BYTES - slabs * cols * DEPTH) / STAGE_BYTES;
    int row_tiles = (int)max_i64(2, ceil_div(a->rows, TILE_ROWS)); // each warpgroup has one at least
    Work k = {*a, row_tiles, (int)ceil_div(a->Vp, cols), slabs, (int)min_i64(MAX_STAGES, room) / 2 * 2};
    CUtensorMap map_x = bytes_map(a->x, a->rows, bytes, PART_ROWS), map_w = bytes_map(a->w, a->Vp, bytes, cols);
    if (a->mode == HEAD_BF16) launch<HEAD_BF16, 96>(s, map_x, map_w, k);
    else if (cols == 192) launch<HEAD_FP8, 192>(s, map_x, map_w, k);
    else launch<HEAD_FP8, 96>(s, map_x, map_w, k);
}
