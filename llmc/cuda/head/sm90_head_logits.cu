// Head logits x w^T with softcap and softmax sums in the epilogue. FP8 in training, bf16 in validation,
// which needs only the sums.
//
//   tile        64 x 192 (FP8, d <= 768) or 64 x 96; K is one row of the weight, d bytes or 2 d
//   pipeline    the CTA keeps COLS rows of w in smem for all rows of x; x streams through up to 12 stages
//               of 64 x 128 bytes. Half the traffic of square tiles
//   cluster     2 CTAs with different rows of w; each loads half of every stage of x and multicasts it
//   warps       FP8: three consumer warpgroups (160 registers) strictly in turn (an ordered barrier): one
//               issues WGMMA while the others run their epilogues. With two the head's three products took
//               3% more time. bf16: two (240 registers), unordered.
//               The last warpgroup: one producer thread for x (bf16: two), one for w (24)
//   bound       FP8: 690 W, the limit (two special functions an element in the epilogue); bf16: operand
//               traffic as much as tensor cores
//
// In FP8 the epilogue stores the gradient itself, relative to an estimate of the row's sum, instead of the
// logit (sm90_head_gradient.cuh): one byte where bf16 takes two, and no pass over the logits follows.
#include "llmc/cuda/head/sm90_head_logits.cuh"
#include "llmc/cuda/head/sm90_head_gradient.cuh"
#include "llmc/cuda/sm90/sm90.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum {
    TILE_M = 64,
    TILE_K_BYTES = 128, // of a tile, of a stage: bytes, the width of the swizzle
    WARPGROUP = 128,    // threads of a warpgroup
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
    int row_tiles, col_tiles; // row tiles: those of a cluster, the first of which is blockIdx.y of these
    int slabs, stages;        // a slab: TILE_K_BYTES columns of the CTA's rows of the weight
};

// Consumer warpgroups of a CTA. Without their order all would run their mainloops at the same time, at a part
// of the speed, and then leave the tensor cores idle together. In bf16 a warpgroup with its narrow tiles does
// not fill the tensor cores: two run unordered, each with a pipeline of its own.
template <HeadMode MODE> static __host__ __device__ __forceinline__ constexpr int consumers()
{
    return MODE == HEAD_FP8 ? 3 : 2;
}
template <HeadMode MODE> static __host__ __device__ __forceinline__ constexpr int threads()
{
    return (consumers<MODE>() + 1) * WARPGROUP;
}
// Of a thread; with the producers' all warpgroups have 512 at most, 128 threads each of 65536.
template <HeadMode MODE> static __host__ __device__ __forceinline__ constexpr int consumer_registers()
{
    return MODE == HEAD_FP8 ? 160 : 240;
}
static_assert(consumers<HEAD_FP8>() * consumer_registers<HEAD_FP8>() + PRODUCER_REGISTERS <= 512 &&
                  consumers<HEAD_BF16>() * consumer_registers<HEAD_BF16>() + PRODUCER_REGISTERS <= 512,
              "a multiprocessor's registers");

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

// Addresses in shared memory: w (slabs, COLS, TILE_K_BYTES), x (stages, TILE_M,
// TILE_K_BYTES), barriers.
template <int COLS> struct SharedStorage {
    uint32_t w0, x0, barriers;
    __device__ __forceinline__ uint32_t w(int slab) const { return w0 + slab * (COLS * TILE_K_BYTES); }
    __device__ __forceinline__ uint32_t x(int stage) const { return x0 + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(MAX_STAGES + stage); }
    __device__ __forceinline__ uint32_t w_full(int slab) const { return full(2 * MAX_STAGES + slab); }
    __device__ __forceinline__ uint32_t w_empty() const { return full(2 * MAX_STAGES + MAX_SLABS); }
};

// FP8: the warpgroups share one pipeline.
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
    int count = 0, first_row = blockIdx.y * k.row_tiles * TILE_M;
    for (int first = blockIdx.x - rank; first < k.col_tiles; first += gridDim.x)
        for (int tile = 0; tile < k.row_tiles; tile++, count++) {
            if (count % rings<MODE>() != group)
                continue;
            for (int slab = 0; slab < k.slabs; slab++) {
                uint32_t full = m.full(ring.stage);
                mbarrier_wait(m.empty(ring.stage), ring.parity);
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                tma_load_multicast(m.x(ring.stage) + rank * (MULTICAST_ROWS * TILE_K_BYTES), map, full,
                                   slab * TILE_K_BYTES, first_row + tile * TILE_M + rank * MULTICAST_ROWS, 0,
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

template <HeadMode MODE> static __device__ __forceinline__ void order_barrier_arrive(int group)
{
    named_barrier_arrive(1 + (group + 1) % consumers<MODE>(), 2 * WARPGROUP);
}

// sum (64, COLS) = the mainloop of one tile.
template <HeadMode MODE, int COLS>
static __device__ __forceinline__ void mma_tile(float (&sum)[COLS / 2], const SharedStorage<COLS> &m,
                                                int slabs, StageRange &ring, bool new_weight,
                                                uint32_t weight_parity, bool signal_next, int group)
{
    int lane = threadIdx.x % WARP, previous = 0;
    uint64_t b = smem_descriptor(m.w0, 0);
    for (int slab = 0; slab < slabs; slab++) {
        if (new_weight)
            mbarrier_wait(m.w_full(slab), weight_parity);
        mbarrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = smem_descriptor(m.x(ring.stage), 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_K_BYTES / 32; i++)
            wgmma_row_bytes<MODE, COLS>(sum, descriptor_advance(a, 32 * i), descriptor_advance(b, 32 * i),
                                        slab + i > 0);
        wgmma_commit();
        b = descriptor_advance(b, COLS * TILE_K_BYTES);
        if (slab > 0) {
            wgmma_wait<1>();
            if (lane < CLUSTER)
                mbarrier_arrive_remote(m.empty(previous), lane);
        }
        previous = ring.stage;
        ring.advance(1);
    }
    if (signal_next)
        order_barrier_arrive<MODE>(group);
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
        d[i] = 1 + sm80::exp2_approx(sm80::min_keeping_nan(fmaf(sum[i], scale, shift), 30));
    float ab = d[0] * d[1], cd = d[2] * d[3], r = sm80::reciprocal_approx(ab * cd), rab = r * cd,
          rcd = r * ab;
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
                    : sm80::exp2_approx(one_minus_sigmoid[i] * -f.cap_log2); // z - cap = -cap (1 - sig)
    return part;
}

// What a tile's epilogue reads for the thread's two rows, loaded one tile ahead to hide the latency.
template <int COLS> struct RowData {
    float base[2];                 // of codes
    uint32_t masked[2][COLS / 32]; // bits of the tile's columns; MASKED
};

// Of rows `row` and row + 8 and column tile `tile`.
template <int COLS, bool MASKED>
static __device__ __forceinline__ void prefetch(RowData<COLS> &data, const Work &k, int tile, int row)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        data.base[h] = k.a.base && r < k.a.rows ? __ldg(k.a.base + r) : 0;
#pragma unroll
        for (int b = 0; MASKED && b < COLS / 32; b++) {
            int word = tile * (COLS / 32) + b;
            data.masked[h][b] = r < k.a.rows && word < k.a.mask.words ? mask_word(k.a.mask, r, word) : 0;
        }
    }
}

// The sum of e^(z - cap) of one of the thread's rows over its columns of a tile.
template <HeadMode MODE, int COLS, bool MASKED>
static __device__ __forceinline__ float row_sum(const float (&sum)[COLS / 2], const Work &k, int h, int col0,
                                                const uint32_t *masked)
{
    const LossForm &f = k.a.form;
    float total = 0;
#pragma unroll
    for (int b = 0; b < COLS / 32; b++) {
        float s[8], part = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            s[i] = sum[16 * b + i / 2 * 4 + 2 * h + i % 2];
        if (MODE == HEAD_BF16)
            part = exp_sum_exact<MASKED>(s, k.a.scale, f, MASKED ? masked[b] >> 2 * (threadIdx.x % 4) : 0);
#pragma unroll
        for (int i = 0; MODE == HEAD_FP8 && i < 8; i++)
            part += exp_minus_cap(sm80::tanh_approx(fmaf(s[i], k.a.scale * f.tanh_scale, f.tanh_shift)), f);
        total += col0 + 32 * b < k.a.Vp ? part : 0;
    }
    return total;
}

// Codes of 32 columns of one of the thread's rows, from t; adds e^(z - cap) to `part`, in the units of the
// codes.
static __device__ __forceinline__ uint2 codes_of_block(const float (&t)[8], float half_cap, float offset,
                                                       float (&part)[4])
{
    float g[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float e = sm80::exp2_approx(fmaf(t[i], half_cap, offset)); // z - cap = cap (t - 1) / 2
        part[i % 4] += e;
        g[i] = e * fmaf(-t[i], t[i], 1);
    }
    return make_uint2(encode4(g[0], g[1], g[2], g[3], __NV_E5M2), encode4(g[4], g[5], g[6], g[7], __NV_E5M2));
}

// The same of both rows, with the codes of the gradient: sig(x) = (1 + t) / 2 with the hardware's
// t = tanh(x / 2), good to 2^-11 of t. One warp of a scheduler is here while the other waits for WGMMA, so
// that what hides latency is independent instructions: both rows at a time, four sums of each. WHOLE: all
// columns of the tile are there. A part whose sum is above 2^CODE_TOP may have codes above it, too: its codes
// are made again, lower by an excess that keeps even the sum below.
template <int COLS, bool WHOLE>
static __device__ __forceinline__ void codes_of_rows(float (&total)[2], float (&sum)[COLS / 2], const Work &k,
                                                     int tile, int row, const float (&base)[2])
{
    const LossForm &f = k.a.form;
    int q = threadIdx.x % 4, col0 = tile * COLS;
    float scale = k.a.scale * f.tanh_scale, half_cap = 0.5f * f.cap_log2, part[2][4];
    uint8_t *out = k.a.codes + (int64_t)row * k.a.Vp + col0 + 8 * q, *out8 = out + (int64_t)8 * k.a.Vp;
#pragma unroll
    for (int i = 0; i < 8; i++)
        part[i % 2][i / 2] = 0;
#pragma unroll
    for (int b = 0; b < COLS / 32; b++) {
        if (!WHOLE && col0 + 32 * b >= k.a.Vp)
            break;
        float t[2][8];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float &x = sum[16 * b + i];
            x = sm80::tanh_approx(fmaf(x, scale, f.tanh_shift));
            t[i / 2 % 2][i / 4 * 2 + i % 2] = x;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint2 codes = codes_of_block(t[h], half_cap, CODE_TOP - half_cap - base[h], part[h]);
            if (row + 8 * h < k.a.rows)
                *reinterpret_cast<uint2 *>((h ? out8 : out) + 32 * b) = codes;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] = quad_sum(part[h][0] + part[h][1] + (part[h][2] + part[h][3]));
        float excess = 0;
        if (total[h] > 1 << CODE_TOP) { // the estimate of the row's sum was too low
            excess = ceilf(log2f(total[h])) - CODE_TOP;
#pragma unroll 1
            for (int b = 0; b < COLS / 32 && (WHOLE || col0 + 32 * b < k.a.Vp); b++) {
                float t[8], unused[4] = {};
#pragma unroll
                for (int c = 0; c < COLS / 32; c++) { // registers cannot be indexed
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        t[i] = c == b ? sum[16 * c + i / 2 * 4 + 2 * h + i % 2] : t[i];
                }
                uint2 codes = codes_of_block(t, half_cap, CODE_TOP - half_cap - base[h] - excess, unused);
                if (row + 8 * h < k.a.rows)
                    *reinterpret_cast<uint2 *>((h ? out8 : out) + 32 * b) = codes;
            }
        }
        if (q == 0 && row + 8 * h < k.a.rows && tile < k.col_tiles)
            k.a.excess[(int64_t)tile * k.a.pitch + row + 8 * h] = (uint8_t)excess;
        total[h] *= exp2f(base[h] - CODE_TOP);
    }
}

// Epilogue for the thread's rows `row` and `row` + 8. FP8: 8 of every 32 columns, which are neighbours in
// product order.
template <HeadMode MODE, int COLS, bool MASKED, bool CODES>
static __device__ __forceinline__ void epilogue_tile(float (&sum)[COLS / 2], const Work &k, int tile, int row,
                                                     const RowData<COLS> &data)
{
    int col0 = tile * COLS;
    float total[2];
    if constexpr (!CODES) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            total[h] = quad_sum(row_sum<MODE, COLS, MASKED>(sum, k, h, col0, data.masked[h]));
    } else if (col0 + COLS <= k.a.Vp) {
        codes_of_rows<COLS, true>(total, sum, k, tile, row, data.base);
    } else {
        codes_of_rows<COLS, false>(total, sum, k, tile, row, data.base);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        if (threadIdx.x % 4 == 0 && r < k.a.rows && tile < k.col_tiles)
            k.a.sums[(int64_t)tile * k.a.pitch + r] = total[h];
    }
}

// Tiles in the order of the rows, for one slab of w after the other; the warpgroups take them in turn.
template <HeadMode MODE, int COLS, bool MASKED, bool CODES>
static __device__ __forceinline__ void consume(const SharedStorage<COLS> &m, const Work &k, int group,
                                               int rank)
{
    int lane = threadIdx.x % WARP, t = group,
        row0 = blockIdx.y * k.row_tiles * TILE_M + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    uint32_t weight_parity = 0;
    bool new_weight = true, begun = group > 0;
    constexpr bool ORDERED = rings<MODE>() == 1;
    constexpr int GROUPS = consumers<MODE>();
    StageRange ring = pipeline_of<MODE>(group, k.stages, 0);
    RowData<COLS> data, ahead;
    prefetch<COLS, MASKED>(ahead, k, blockIdx.x, t * TILE_M + row0);
    if (ORDERED)
        ring.advance(group * k.slabs);
    for (int first = blockIdx.x - rank; first < k.col_tiles;) {
        bool last_of_weight = t + GROUPS >= k.row_tiles, last_weight = first + (int)gridDim.x >= k.col_tiles;
        int next = t + GROUPS - (last_of_weight ? k.row_tiles : 0);
        float sum[COLS / 2];
        bool more = !last_weight || t + 1 < k.row_tiles; // the next tile, another warpgroup's
        if (ORDERED && begun)
            order_barrier_wait(group);
        begun = true;
        mma_tile<MODE, COLS>(sum, m, k.slabs, ring, new_weight, weight_parity, ORDERED && more, group);
        if (ORDERED)
            ring.advance((GROUPS - 1) * k.slabs); // the others' stages
        if (last_of_weight && !last_weight && lane == 0)
            mbarrier_arrive_remote(m.w_empty(), rank); // otherwise nobody waits for it
        data = ahead;
        prefetch<COLS, MASKED>(ahead, k, first + rank + (last_of_weight ? (int)gridDim.x : 0),
                               next * TILE_M + row0);
        epilogue_tile<MODE, COLS, MASKED, CODES>(sum, k, first + rank, t * TILE_M + row0, data);
        if (last_of_weight) {
            first += gridDim.x;
            weight_parity ^= 1;
        }
        new_weight = last_of_weight;
        t = next;
    }
}

#endif

template <HeadMode MODE, int COLS, bool MASKED, bool CODES>
__global__ void __launch_bounds__(threads<MODE>(), 1)
    head_logits_kernel(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_w,
                       const Work k)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t base = shared_address(shared), x0 = base + k.slabs * (COLS * TILE_K_BYTES);
    SharedStorage<COLS> m = {base, x0, x0 + k.stages * STAGE_BYTES};
    int rank = cluster_rank(), group = uniform_warp() / (WARPGROUP / WARP);
    if (threadIdx.x == 0) {
        if (base % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < k.stages; i++) {
            mbarrier_init(m.full(i), 1);
            mbarrier_init(m.empty(i), CLUSTER * WARPGROUP / WARP);
        }
        for (int i = 0; i < k.slabs; i++)
            mbarrier_init(m.w_full(i), 1);
        mbarrier_init(m.w_empty(), consumers<MODE>() * WARPGROUP / WARP);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
    if (group < consumers<MODE>()) {
        setmaxnreg_inc<consumer_registers<MODE>()>();
        consume<MODE, COLS, MASKED, CODES>(m, k, group, rank);
    } else {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = (threadIdx.x - consumers<MODE>() * WARPGROUP) / WARP;
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
    const void *kernels[] = {(const void *)head_logits_kernel<HEAD_FP8, PART_COLS, false, true>,
                             (const void *)head_logits_kernel<HEAD_FP8, PART_COLS, false, false>,
                             (const void *)head_logits_kernel<HEAD_BF16, 96, false, false>,
                             (const void *)head_logits_kernel<HEAD_BF16, 96, true, false>};
    for (const void *kernel : kernels)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, most, MAX_SHARED));
    sm90_target_logits_open();
    sm90_head_gradient_open();
}

static int row_bytes(HeadMode mode, int d) { return mode == HEAD_FP8 ? d : 2 * d; }
static int slabs_of(HeadMode mode, int d) { return (int)ceil_div(row_bytes(mode, d), TILE_K_BYTES); }
static int cols_of(HeadMode mode) { return mode == HEAD_FP8 ? PART_COLS : 96; }

bool sm90_head_fits(HeadMode mode, int d, int Vp)
{
    return device_has_wgmma() && row_bytes(mode, d) % 16 == 0 &&
           (mode == HEAD_FP8 ? d <= HEAD_LOGITS_WIDTH : slabs_of(mode, d) <= MAX_SLABS) && Vp % 32 == 0;
}
static_assert((int)HEAD_LOGITS_WIDTH == MAX_SLABS / 2 * TILE_K_BYTES, "the weight's rows in shared memory");

int sm90_head_parts(HeadMode mode, int Vp) { return (int)ceil_div(Vp, cols_of(mode)); }

// Tensor map of a (rows, bytes) matrix, boxes of TILE_K_BYTES bytes and box_rows rows.
static CUtensorMap bytes_map(const void *base, int rows, int bytes, int box_rows)
{
    return tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, base, 1, rows, bytes, bytes, box_rows);
}

template <HeadMode MODE, int COLS, bool MASKED, bool CODES> static void launch(Stream s, const HeadLogits *a)
{
    int bytes = row_bytes(MODE, a->d), slabs = slabs_of(MODE, a->d), col_tiles = (int)ceil_div(a->Vp, COLS),
        room = (MAX_SHARED - BARRIER_BYTES - slabs * COLS * TILE_K_BYTES) / STAGE_BYTES,
        stages = (int)min_i64(MAX_STAGES, room) / 2 * 2;
    size_t shared = (size_t)(slabs * COLS * TILE_K_BYTES + stages * STAGE_BYTES + BARRIER_BYTES);
    int most = device_state.sms / CLUSTER, clusters = (int)min_i64(ceil_div(col_tiles, CLUSTER), most);
    // Few columns: clusters share their rows. Each warpgroup has one tile at least.
    const int least = consumers<MODE>();
    int row_tiles = (int)max_i64(least, ceil_div(a->rows, TILE_M)), splits = (int)max_i64(1, most / clusters);
    row_tiles = (int)max_i64(least, ceil_div(row_tiles, splits));
    Work k = {*a, row_tiles, col_tiles, slabs, stages};
    CUtensorMap map_x = bytes_map(a->x, a->rows, bytes, MULTICAST_ROWS),
                map_w = bytes_map(a->w, a->Vp, bytes, COLS);
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config =
        cluster_launch(attributes, s, {CLUSTER, threads<MODE>(), shared}, clusters, false);
    config.gridDim.y = (unsigned)ceil_div(max_i64(1, ceil_div(a->rows, TILE_M)), row_tiles);
    CUDA_CHECK(cudaLaunchKernelEx(&config, head_logits_kernel<MODE, COLS, MASKED, CODES>, map_x, map_w, k));
}

void sm90_head_logits(Stream s, const HeadLogits *a)
{
    if (a->mode == HEAD_BF16 && a->mask.impossible)
        launch<HEAD_BF16, 96, true, false>(s, a);
    else if (a->mode == HEAD_BF16)
        launch<HEAD_BF16, 96, false, false>(s, a);
    else if (a->codes)
        launch<HEAD_FP8, PART_COLS, false, true>(s, a);
    else
        launch<HEAD_FP8, PART_COLS, false, false>(s, a);
}
