// Head logits x w^T with softcap and softmax sums in the epilogue. FP8 in training, bf16 in validation,
// which needs only the sums.
//
//   tile        64 x 192 (FP8, d <= 768) or 64 x 96; K is one row of the weight, d bytes or 2 d
//   pipeline    the CTA keeps COLS rows of w in smem for all rows of x; x streams through up to 12 stages
//               of 64 x 128 bytes. Half the traffic of square tiles
//   cluster     2 CTAs with different rows of w; each loads half of every stage of x and multicasts it
//   warps       two consumer warpgroups (240 registers) in strict alternation (ping-pong, an ordered
//               barrier): one issues WGMMA while the other runs its epilogue; warpgroup 2: one producer
//               thread for x, one for w (24)
//   bound       operand and result traffic as much as tensor cores, because K = d is short; FP8 1030
//               TFLOP/s in a burst
//
// The epilogue stores 1 - sig((logit + shift) / slope) in 16 bits instead of the logit: an error of 2^-17 in
// sig is one of 2e-4 in the softmax, 1/50 of that of a bf16 logit, and the gradient need not compute the
// sigmoid again.
#include "llmc/cuda/head/sm90_head_logits.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    TILE_M = 64,
    TILE_K_BYTES = 128,      // of a tile, of a stage: bytes, the width of the swizzle
    WARPGROUP = 128,         // threads of a warpgroup
    THREADS = 3 * WARPGROUP, // two consumer warpgroups, one of producers
    CONSUMER_REGISTERS = 240,
    PRODUCER_REGISTERS = 24,
    CLUSTER = 2,
    MULTICAST_ROWS = TILE_M / CLUSTER,
    STAGE_BYTES = TILE_M * TILE_K_BYTES,
    MAX_STAGES = 12,
    MAX_SLABS = 12,
    BARRIER_BYTES = (2 * MAX_STAGES + MAX_SLABS + 1) * 8,
    MAX_SHARED = 227 * 1024
};

struct Work {
    HeadLogits a;
    int row_tiles, col_tiles;
    int slabs, stages; // a slab: TILE_K_BYTES columns of the CTA's rows of the weight
};

#if HOPPER

// d (64, COLS) = a b^T, or += when accumulate, over 32 bytes of every row of a (64, ...) and b (COLS, ...).
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void wgmma_row_bytes(float (&d)[COLS / 2], uint64_t a, uint64_t b,
                                                       bool accumulate)
{
    if constexpr (MODE == HEAD_FP8)
        wgmma_e4m3<COLS>(d, a, b, accumulate);
    else
        wgmma<__nv_bfloat16, COLS, false, false>(d, a, b, accumulate);
}

template <int COLS> struct SharedStorage {
    uint8_t *base;
    int slabs, stages;
    __device__ __forceinline__ uint8_t *w(int slab) const { return base + slab * (COLS * TILE_K_BYTES); }
    __device__ __forceinline__ uint8_t *x(int stage) const { return w(slabs) + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)x(stages) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(MAX_STAGES) + stage; }
    __device__ __forceinline__ uint64_t *w_full(int slab) const { return empty(MAX_STAGES) + slab; }
    __device__ __forceinline__ uint64_t *w_empty() const { return w_full(MAX_SLABS); }
};

// FP8: the warpgroups share one pipeline and issue WGMMA strictly in turn; without that order both run their
// mainloops at the same time, at half the speed, and then leave the tensor cores idle together. bf16: one
// warpgroup with its narrow tiles does not fill the tensor cores; both run unordered, each with a pipeline
// of its own.
template <HeadMode MODE> static __device__ __forceinline__ constexpr int rings()
{
    return MODE == HEAD_FP8 ? 1 : 2;
}

struct StageRange { // stage and phase, in a range of stages
    int first, count, stage;
    uint32_t parity;
    __device__ __forceinline__ void advance(int by)
    {
        for (stage += by; stage >= first + count; stage -= count)
            parity ^= 1;
    }
};

template <HeadMode MODE>
static __device__ __forceinline__ StageRange pipeline_of(int group, int stages, uint32_t parity)
{
    int count = stages / rings<MODE>(), first = group % rings<MODE>() * count;
    return {first, count, first, parity};
}

// ---- producers, one thread each ---------------------------------------------------------------------------

// Stages of all tiles, or of the tiles of one warpgroup.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void produce_x(const SharedStorage<COLS> &m, const CUtensorMap *map,
                                                 const Work &k, int group, int rank)
{
    StageRange ring = pipeline_of<MODE>(group, k.stages, 1); // the stages begin empty
    int count = 0;
    for (int first = blockIdx.x - rank; first < k.col_tiles; first += gridDim.x)
        for (int tile = 0; tile < k.row_tiles; tile++, count++) {
            if (count % rings<MODE>() != group)
                continue;
            for (int slab = 0; slab < k.slabs; slab++) {
                uint64_t *full = m.full(ring.stage);
                mbarrier_wait(m.empty(ring.stage), ring.parity);
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                tma_load_multicast(m.x(ring.stage) + rank * (MULTICAST_ROWS * TILE_K_BYTES), map, full,
                                   slab * TILE_K_BYTES, tile * TILE_M + rank * MULTICAST_ROWS, 0,
                                   (1 << CLUSTER) - 1);
                ring.advance(1);
            }
        }
    for (int i = 0; i < ring.count; i++, ring.advance(1))
        mbarrier_wait(m.empty(ring.stage), ring.parity); // producer tail
}

template <int COLS>
static __device__ __forceinline__ void produce_w(const SharedStorage<COLS> &m, const CUtensorMap *map,
                                                 const Work &k, int rank)
{
    uint32_t parity = 1;
    for (int first = blockIdx.x - rank; first < k.col_tiles; first += gridDim.x, parity ^= 1) {
        mbarrier_wait(m.w_empty(), parity);
        for (int slab = 0; slab < k.slabs; slab++) {
            mbarrier_arrive_expect_tx(m.w_full(slab), COLS * TILE_K_BYTES);
            tma_load_multicast(m.w(slab), map, m.w_full(slab), slab * TILE_K_BYTES, (first + rank) * COLS, 0,
                               (uint16_t)(1 << rank));
        }
    }
}

// ---- consumer warpgroups ----------------------------------------------------------------------------------

static __device__ __forceinline__ void order_barrier_wait(int group)
{
    named_barrier_sync(1 + group, 2 * WARPGROUP);
}

static __device__ __forceinline__ void order_barrier_arrive(int group)
{
    named_barrier_arrive(1 + (1 - group), 2 * WARPGROUP);
}

// sum (64, COLS) = the mainloop of one tile.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void mma_tile(float (&sum)[COLS / 2], const SharedStorage<COLS> &m,
                                                int slabs, StageRange &ring, bool new_weight,
                                                uint32_t weight_parity, bool signal_next, int group)
{
    int lane = threadIdx.x % WARP, previous = 0;
    for (int slab = 0; slab < slabs; slab++) {
        if (new_weight)
            mbarrier_wait(m.w_full(slab), weight_parity);
        mbarrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = smem_descriptor(m.x(ring.stage), 0), b = smem_descriptor(m.w(slab), 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_K_BYTES / 32; i++)
            wgmma_row_bytes<MODE, COLS>(sum, descriptor_advance(a, 32 * i), descriptor_advance(b, 32 * i),
                                        slab + i > 0);
        wgmma_commit();
        if (slab > 0) {
            wgmma_wait<1>();
            if (lane < CLUSTER)
                mbarrier_arrive_remote(m.empty(previous), lane);
        }
        previous = ring.stage;
        ring.advance(1);
    }
    if (signal_next)
        order_barrier_arrive(group);
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
    if (lane < CLUSTER)
        mbarrier_arrive_remote(m.empty(previous), lane);
}

// 1 - sig of four logits from their sums of products: 1/(1 + e), e = exp((logit + shift) / slope), whose
// exponent in base 2 is sum * scale + shift; the four reciprocals
// come from that of the product. e is kept below 2^30, where the result is zero for all purposes and the
// product of four still finite.
static __device__ __forceinline__ void one_minus_sigmoid4(float *one_minus_sigmoid, const float *sum,
                                                          float scale, float shift)
{
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        d[i] = 1 + exp2_fast(min_keeping_nan(fmaf(sum[i], scale, shift), 30));
    float ab = d[0] * d[1], cd = d[2] * d[3], r = reciprocal_fast(ab * cd), rab = r * cd, rcd = r * ab;
    one_minus_sigmoid[0] = rab * d[1];
    one_minus_sigmoid[1] = rab * d[0];
    one_minus_sigmoid[2] = rcd * d[3];
    one_minus_sigmoid[3] = rcd * d[2];
}

// Sum of e^(z - cap) of eight accumulators of a row, pairs of which are eight columns apart. Bits 0, 1, 8, 9,
// ... of `masked` say which are left out.
template <bool MASKED>
static __device__ __forceinline__ float exp_sum_exact(float (&s)[8], float unit, const LossForm &f,
                                                      uint32_t masked)
{
    float one_minus_sigmoid[8], part = 0;
    one_minus_sigmoid4(one_minus_sigmoid, s, unit * f.exp_scale, f.exp_shift);
    one_minus_sigmoid4(one_minus_sigmoid + 4, s + 4, unit * f.exp_scale, f.exp_shift);
#pragma unroll
    for (int i = 0; i < 8; i++)
        part += MASKED && masked >> (i / 2 * 8 + i % 2) & 1
                    ? f.masked
                    : exp2_fast(one_minus_sigmoid[i] * -f.cap_log2); // z - cap = -cap (1 - sig)
    return part;
}

// What a tile's epilogue reads for the thread's two rows, loaded one tile ahead to hide the latency.
template <int COLS> struct RowData {
    int target[2];
    uint32_t masked[2][COLS / 32]; // bits of the tile's columns; MASKED
};

// Of rows `row` and row + 8 and column tile `tile`.
template <int COLS, bool MASKED>
static __device__ __forceinline__ void prefetch(RowData<COLS> &data, const Work &k, int tile, int row)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        data.target[h] = r < k.a.rows ? __ldg(k.a.targets + r) : -1;
#pragma unroll
        for (int b = 0; MASKED && b < COLS / 32; b++) {
            int word = tile * (COLS / 32) + b;
            data.masked[h][b] = r < k.a.rows && word < k.a.mask.words ? mask_word(k.a.mask, r, word) : 0;
        }
    }
}

// Epilogue for the thread's rows `row` and `row` + 8: 8 of every 32 columns, which are neighbours in product
// order.
template <HeadMode MODE, int COLS, bool MASKED>
static __device__ __forceinline__ void epilogue_tile(const float (&sum)[COLS / 2], const Work &k, int tile,
                                                     int row, const RowData<COLS> &data)
{
    const HeadLogits &a = k.a;
    int q = threadIdx.x % 4, col0 = tile * COLS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int at = data.target[h] - col0;
        if ((unsigned)at < COLS) { // rare
#pragma unroll
            for (int i = 0; i < COLS / 4; i++) {
                int column = MODE == HEAD_FP8 ? i / 8 * 32 + 8 * q + i % 8 : i / 2 * 8 + 2 * q + i % 2;
                if (at == column)
                    a.target_logit[row + 8 * h] = sum[i / 2 * 4 + 2 * h + i % 2] * a.scale;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        bool there = r < a.rows;
        uint16_t *out = a.one_minus_sigmoid + (int64_t)r * a.Vp + col0 + 8 * q;
        float total = 0;
#pragma unroll
        for (int b = 0; b < COLS / 32; b++) {
            bool inside = col0 + 32 * b < a.Vp;
            float s[8], part;
            uint4 packed;
#pragma unroll
            for (int i = 0; i < 8; i++)
                s[i] = sum[16 * b + i / 2 * 4 + 2 * h + i % 2];
            if (MODE == HEAD_FP8)
                part = exp_sum_fast(s, a.scale, a.form, &packed);
            else
                part = exp_sum_exact<MASKED>(s, a.scale, a.form, MASKED ? data.masked[h][b] >> 2 * q : 0);
            total += inside ? part : 0;
            if (MODE == HEAD_FP8 && there && inside)
                *reinterpret_cast<uint4 *>(out + 32 * b) = packed;
        }
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (q == 0 && there && tile < k.col_tiles)
            a.sums[(int64_t)tile * a.sums_pitch + r] = total;
    }
}

// Tiles in the order of the rows, for one slab of w after the other; every second tile is this warpgroup's.
template <HeadMode MODE, int COLS, bool MASKED>
static __device__ __forceinline__ void consume(const SharedStorage<COLS> &m, const Work &k, int group,
                                               int rank)
{
    int lane = threadIdx.x % WARP, row0 = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4, t = group;
    uint32_t weight_parity = 0;
    bool new_weight = true, begun = group > 0;
    constexpr bool ORDERED = rings<MODE>() == 1;
    StageRange ring = pipeline_of<MODE>(group, k.stages, 0);
    RowData<COLS> data, ahead;
    prefetch<COLS, MASKED>(ahead, k, blockIdx.x, t * TILE_M + row0);
    if (ORDERED)
        ring.advance(group * k.slabs);
    for (int first = blockIdx.x - rank; first < k.col_tiles;) {
        bool last_of_weight = t + 2 >= k.row_tiles, last_weight = first + (int)gridDim.x >= k.col_tiles;
        int next = last_of_weight ? t + 2 - k.row_tiles : t + 2;
        float sum[COLS / 2];
        bool more = !last_weight || t + 1 < k.row_tiles; // the next tile, the other warpgroup's
        if (ORDERED && begun)
            order_barrier_wait(group);
        begun = true;
        mma_tile<MODE, COLS>(sum, m, k.slabs, ring, new_weight, weight_parity, ORDERED && more, group);
        if (ORDERED)
            ring.advance(k.slabs); // the other warpgroup's stages
        if (last_of_weight && !last_weight && lane == 0)
            mbarrier_arrive_remote(m.w_empty(), rank); // otherwise nobody waits for it
        data = ahead;
        prefetch<COLS, MASKED>(ahead, k, first + rank + (last_of_weight ? (int)gridDim.x : 0),
                               next * TILE_M + row0);
        epilogue_tile<MODE, COLS, MASKED>(sum, k, first + rank, t * TILE_M + row0, data);
        if (last_of_weight) {
            first += gridDim.x;
            weight_parity ^= 1;
        }
        new_weight = last_of_weight;
        t = next;
    }
}

#endif

template <HeadMode MODE, int COLS, bool MASKED>
__global__ void __launch_bounds__(THREADS, 1)
    head_logits_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w,
                       const Work k)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedStorage<COLS> m = {shared, k.slabs, k.stages};
    int rank = cluster_rank(), group = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < k.stages; i++) {
            mbarrier_init(m.full(i), 1);
            mbarrier_init(m.empty(i), CLUSTER * WARPGROUP / WARP);
        }
        for (int i = 0; i < k.slabs; i++)
            mbarrier_init(m.w_full(i), 1);
        mbarrier_init(m.w_empty(), 2 * WARPGROUP / WARP);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    if (group < 2) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume<MODE, COLS, MASKED>(m, k, group, rank);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = (threadIdx.x - 2 * WARPGROUP) / WARP;
        if (threadIdx.x % WARP == 0) {
            if (warp < rings<MODE>())
                produce_x<MODE, COLS>(m, &map_x, k, warp, rank);
            else if (warp == rings<MODE>())
                produce_w<COLS>(m, &map_w, k, rank);
        }
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

void sm90_head_open(void)
{
    if (!device_has_wgmma())
        return;
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_FP8, 192, false>, most, MAX_SHARED));
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_FP8, 96, false>, most, MAX_SHARED));
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_BF16, 96, false>, most, MAX_SHARED));
    CUDA_CHECK(cudaFuncSetAttribute(head_logits_kernel<HEAD_BF16, 96, true>, most, MAX_SHARED));
}

static int row_bytes(HeadMode mode, int d) { return mode == HEAD_FP8 ? d : 2 * d; }
static int slabs_of(HeadMode mode, int d) { return (int)ceil_div(row_bytes(mode, d), TILE_K_BYTES); }
static int cols_of(HeadMode mode, int d)
{
    return mode == HEAD_FP8 && slabs_of(mode, d) <= MAX_SLABS / 2 ? 192 : 96;
}

bool sm90_head_fits(HeadMode mode, int d, int Vp)
{
    return device_has_wgmma() && row_bytes(mode, d) % 16 == 0 && slabs_of(mode, d) <= MAX_SLABS &&
           Vp % 32 == 0;
}

int sm90_head_parts(HeadMode mode, int d, int Vp) { return (int)ceil_div(Vp, cols_of(mode, d)); }

// Tensor map of a (rows, bytes) matrix, boxes of TILE_K_BYTES bytes and box_rows rows.
static CUtensorMap bytes_map(const void *base, int rows, int bytes, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, base, 1, rows, bytes, bytes, box_rows);
}

template <HeadMode MODE, int COLS, bool MASKED = false>
static void launch(Stream s, const CUtensorMap &map_x, const CUtensorMap &map_w, const Work &k)
{
    size_t shared = (size_t)(k.slabs * COLS * TILE_K_BYTES + k.stages * STAGE_BYTES + BARRIER_BYTES);
    int64_t clusters = min_i64(ceil_div(k.col_tiles, CLUSTER), device_state.sms / CLUSTER);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, s, {CLUSTER, THREADS, shared}, clusters, false);
    CUDA_CHECK(cudaLaunchKernelEx(&config, head_logits_kernel<MODE, COLS, MASKED>, map_x, map_w, k));
}

void sm90_head_logits(Stream s, const HeadLogits *a)
{
    int bytes = row_bytes(a->mode, a->d), slabs = slabs_of(a->mode, a->d), cols = cols_of(a->mode, a->d);
    int room = (MAX_SHARED - BARRIER_BYTES - slabs * cols * TILE_K_BYTES) / STAGE_BYTES;
    int row_tiles = (int)max_i64(2, ceil_div(a->rows, TILE_M)); // each warpgroup has one at least
    Work k = {*a, row_tiles, (int)ceil_div(a->Vp, cols), slabs, (int)min_i64(MAX_STAGES, room) / 2 * 2};
    CUtensorMap map_x = bytes_map(a->x, a->rows, bytes, MULTICAST_ROWS),
                map_w = bytes_map(a->w, a->Vp, bytes, cols);
    if (a->mode == HEAD_BF16 && a->mask.impossible)
        launch<HEAD_BF16, 96, true>(s, map_x, map_w, k);
    else if (a->mode == HEAD_BF16)
        launch<HEAD_BF16, 96>(s, map_x, map_w, k);
    else if (cols == 192)
        launch<HEAD_FP8, 192>(s, map_x, map_w, k);
    else
        launch<HEAD_FP8, 96>(s, map_x, map_w, k);
}
