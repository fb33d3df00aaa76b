// Newton-Schulz on sm90 for matrices of at most 256 rows: all steps in one kernel. With R = X X^T: Z = b R
// + c R^2, X = a X + Z X.
//
//   cluster     1 or 2 CTAs have a matrix; each warpgroup owns 64 rows of R, Z and X
//   on chip     R, R^2 and Z stay in registers and shared memory (sm90_ns_small.cuh): the rounded rows of R
//               are the register operand A of R R and part of its operand B in shared memory; Z is the
//               register operand A of Z X
//   X           streams through 6 stages from global memory (L2), 128 columns at a time, and back: the Gram
//               matrix of the next step starts with columns that are complete while the last ones are being
//               stored
//   warps       two consumer warpgroups (232 registers); in the third (40) a producer thread and, in clusters
//               of two, a relay warp
//   release     of a stage of X, in both CTAs: by the consumers' relaxed arrives where WGMMA alone has read
//               it (Gram matrix); behind the ldmatrix reads of Z X's epilogue by the relay: consumer warps
//               arrive at a local mbarrier (release at CTA scope), the relay acquires it and arrives for all
//               of them with release at cluster scope. That release is a MEMBAR; in every consumer warp it
//               made 256 x 768 11% slower
//   schedule    static: a cluster takes whole matrices in a fixed order and waits for no other cluster
//
// R is symmetric to the last bit (the same products in the same order); Z up to rounding.
#include "llmc/cuda/muon/sm90_ns_small_producer.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum { SMALL_PRODUCER_REGISTERS = 40, SMALL_CONSUMER_REGISTERS = 232 };
enum { ANNOUNCE_AFTER = 2 }; // stage of a Gram matrix by which the last columns have been stored

#if HOPPER

// ---- publication of stored columns ------------------------------------------------------------------------

// Leader thread: waits for its TMA stores and counts them up in both CTAs.
template <int CLUSTER> static __device__ __forceinline__ void announce_columns(SmallConsumer<CLUSTER> &p)
{
    if (!p.leader || !p.pending)
        return;
    tma_store_wait();
    fence_proxy_async();
    for (int rank = 0; rank < CLUSTER; rank++)
        remote_counter_add(p.m.written(CONSUMERS * p.rank + p.group), rank);
    p.pending = false;
}

// ---- Gram matrix ------------------------------------------------------------------------------------------

// sum += the warpgroup's rows of X X^T, columns in the order of the matrix.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void gram_product(float (&sum)[128], SmallConsumer<CLUSTER> &p)
{
    int previous = -1, own = CONSUMERS * p.rank + p.group, stages = boxes_along(p.c.m),
        free_at = max(0, stages - FREE_STAGES);
    p.stage = gram_stage(0, stages);
    // Nothing to multiply yet: publish the last columns now, others may wait for them.
    if (p.leader && !mbarrier_test(p.m.full(p.stage), p.parity()))
        announce_columns(p);
    __syncwarp();
    for (int k = 0; k < stages; k++) {
        p.stage = gram_stage(k, stages);
        mbarrier_wait(p.m.full(p.stage), p.parity());
        uint64_t a = smem_descriptor(p.m.stage(p.stage) + own * BOX_BYTES, 0),
                 b = smem_descriptor(p.m.stage(p.stage), 0);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BOX_SIDE / 16; i++)
            wgmma<T, SmallSizes<CLUSTER>::SIDE, false, false>(sum, descriptor_advance(a, 32 * i),
                                                              descriptor_advance(b, 32 * i), true);
        wgmma_commit();
        if (previous >= 0) {
            wgmma_wait<1>();
            p.arrive_all(p.m.empty(previous));
        }
        if (k == min((int)ANNOUNCE_AFTER, free_at)) {
            announce_columns(p);
            __syncwarp();
        }
        if (k == free_at)
            p.arrive_all(p.m.operand_empty()); // operand B may be overwritten
        previous = p.stage;
        p.advance();
    }
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
    p.arrive_all(p.m.empty(previous));
}

// AOL: sum = diag(s) sum diag(s); s stays in shared memory, in the order of the matrix like the columns of
// sum.
template <int CLUSTER>
static __device__ __forceinline__ void scale_sums(float (&sum)[128], SmallConsumer<CLUSTER> &p, int matrix)
{
    float own[2] = {}, *unit = p.m.units();
    int thread = threadIdx.x % (CONSUMERS * WARPGROUP);
    if (thread < p.m.SIDE)
        unit[thread] = p.c.unit && thread < p.c.n ? p.c.unit[(int64_t)matrix * p.c.n + thread] : 1;
    named_barrier_sync(BOTH_BARRIER, CONSUMERS * WARPGROUP);
#pragma unroll
    for (int i = 0; i < p.m.SUMS; i++)
        own[i / 2 % 2] += fabsf(sum[i]) * unit[i / 4 * 8 + col_of() + i % 2];
    int row = (CONSUMERS * p.rank + p.group) * BOX_SIDE + row_of();
#pragma unroll
    for (int e = 0; e < 2; e++) {
        own[e] += __shfl_xor_sync(0xffffffffu, own[e], 1);
        own[e] += __shfl_xor_sync(0xffffffffu, own[e], 2);
        own[e] /= unit[row + 8 * e];
        own[e] = own[e] < NS_AOL_LEAST ? 0 : p.c.it.aol_gain / sqrtf(1.02f * own[e]);
        if (threadIdx.x % 4)
            continue;
        p.m.scales()[row + 8 * e] = own[e];
        if (CLUSTER > 1)
            st_async_f32(p.m.scales() + row + 8 * e, own[e], p.m.scaled(), p.rank ^ 1);
    }
    if (CLUSTER > 1 && p.leader)
        mbarrier_arrive_expect_tx(p.m.scaled(), BOX_SIDE * sizeof(float));
    named_barrier_sync(BOTH_BARRIER, CONSUMERS * WARPGROUP);
    if (CLUSTER > 1)
        mbarrier_wait(p.m.scaled(), p.scaled);
    p.scaled ^= 1;
    // The two scales first: their product commutes.
#pragma unroll
    for (int i = 0; i < p.m.SUMS; i++)
        sum[i] = own[i / 2 % 2] * p.m.scales()[i / 4 * 8 + col_of() + i % 2] * sum[i];
}

// rows = the warpgroup's rows of R, in local order.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void gram_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                 SmallConsumer<CLUSTER> &p, int matrix, bool scaled)
{
    float sum[128] = {}; // zeros, because all WGMMAs accumulate
    gram_product<T, CLUSTER>(sum, p);
    if (scaled)
        scale_sums<CLUSTER>(sum, p, matrix);
#pragma unroll
    for (int k = 0; k < p.m.PAIRS; k++)
        rows[k] = pack<T>(sum[2 * k], sum[2 * k + 1]);
    if (CLUSTER > 1)
        swap_halves(rows, p.rank);
}

// ---- R^2 --------------------------------------------------------------------------------------------------

// Writes the warpgroup's rows into operand B of both CTAs. A CTA gets the other's rows from symmetry
// (mirror) where it can; the rest is copied through distributed shared memory.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void publish_rows(const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                    SmallConsumer<CLUSTER> &p)
{
    mbarrier_wait(p.m.operand_empty(), p.operand_empty);
    p.operand_empty ^= 1;
#pragma unroll
    for (int j = 0; j < p.m.BOXES; j++)
        write_fragments<BOX_SIDE>(rows + 16 * j, p.m.operand_strip(j) + p.group * BOX_BYTES);
    fence_proxy_async_shared();
    named_barrier_sync(BOTH_BARRIER, CONSUMERS * WARPGROUP);
    p.sent ^= 1;
    if (CLUSTER == 1 || !p.leader)
        return;
    mbarrier_arrive_expect_tx(p.m.sent(), CONSUMERS * BOX_BYTES); // from the same warpgroup of the other CTA
    for (int j = 0; j < CONSUMERS; j++)
        bulk_copy_remote(p.m.operand_strip(CONSUMERS + j) + (CONSUMERS + p.group) * BOX_BYTES,
                         p.m.operand_strip(j) + p.group * BOX_BYTES, p.m.sent(), p.rank ^ 1, BOX_BYTES);
}
template <int CLUSTER>
static __device__ __forceinline__ void mirror(const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                              const SmallConsumer<CLUSTER> &p)
{
#pragma unroll
    for (int j = CONSUMERS; j < p.m.BOXES; j++)
        write_mirrored(rows + 16 * j, p.m.operand_strip(p.group) + j * BOX_BYTES);
    fence_proxy_async_shared();
    named_barrier_sync(BOTH_BARRIER, CONSUMERS * WARPGROUP);
}

// sum (64, 128) = or += rows (64, SIDE) times half `half` of operand B's rows, k from 64 from to 64 to.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_half(float *sum,
                                                   const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                   uint64_t b, int half, int from, int to)
{
#pragma unroll
    for (int j = from; j < to; j++)
#pragma unroll
        for (int k = 0; k < BOX_SIDE / 16; k++)
            wgmma_rs_static<T, false>(sum, rows + 16 * j + 4 * k,
                                      descriptor_advance(b, j * SmallSizes<CLUSTER>::STRIP +
                                                                2 * half * BOX_BYTES + 32 * k),
                                      j > 0 || k > 0);
}

// rows = b R + c R^2, from rows of R. WGMMA starts with the CTA's own rows; the mirror image is written
// meanwhile; copied rows are needed last.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                   SmallConsumer<CLUSTER> &p, float beta, float c)
{
    float sum[64 * CLUSTER];
    uint64_t b = smem_descriptor(p.m.operand_strip(0), 0);
    wgmma_fence();
    square_half<T, CLUSTER>(sum, rows, b, 0, 0, p.m.BOXES);
    wgmma_commit();
    if (CLUSTER > 1) {
        mirror(rows, p);
        wgmma_fence();
        square_half<T, CLUSTER>(sum + 64, rows, b, 1, 0, CONSUMERS);
        wgmma_commit();
        mbarrier_wait(p.m.sent(), p.sent ^ 1);
        wgmma_fence();
        square_half<T, CLUSTER>(sum + 64, rows, b, 1, CONSUMERS, p.m.BOXES);
        wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_fence_registers(sum);
    p.arrive_all(p.m.read());
    combine_pairs<T, SmallSizes<CLUSTER>::PAIRS>(rows, sum, c, rows, beta);
}

// rows = (rows + a I) diag(factor s); its product with x contains the term a x.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void scale_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                  const SmallConsumer<CLUSTER> &p, float a)
{
#pragma unroll
    for (int j = 0; j < CONSUMERS; j++)
        if (j == p.group)
            add_to_diagonal_packed<T>(rows + 16 * j, a);
#pragma unroll
    for (int i = 0; i < p.m.PAIRS; i++) {
        const float *s = p.m.scales() + (i / 32 ^ p.rank) * HALF_COLS + i % 32 / 2 * 8 + col_of();
        float2 v = unpack<T>(rows[i]);
        rows[i] = pack<T>(saturated<T>(v.x * (p.c.it.aol_factor * s[0])),
                          saturated<T>(v.y * (p.c.it.aol_factor * s[1])));
    }
}

// ---- Z X --------------------------------------------------------------------------------------------------

// UNIT_COLS columns of Z X in flight: the first of their two stages, first column, the warpgroup's own rows
// of X in the stages.
struct Unit {
    int stage, col;
    const uint8_t *own;
};

// Issues the WGMMAs of sum = the warpgroup's rows of Z X, columns from `col` on.
template <typename T, int CLUSTER>
static __device__ __forceinline__ Unit begin_unit(float (&sum)[64],
                                                  const uint32_t (&z)[SmallSizes<CLUSTER>::PAIRS],
                                                  SmallConsumer<CLUSTER> &p, int col)
{
    int own = CONSUMERS * p.rank + p.group;
    Unit unit = {p.stage, col};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mbarrier_wait(p.m.full(p.stage), p.parity());
        const uint8_t *stage = p.m.stage(p.stage);
        uint64_t b = smem_descriptor(stage, BOX_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < CLUSTER * BOX_SIDE / 16; k++)
            wgmma_rs_static<T, true>(sum, z + half * CLUSTER * 16 + 4 * k,
                                     descriptor_advance(b, k / 4 * 2 * BOX_BYTES + k % 4 * 16 * 128),
                                     half > 0 || k > 0);
        wgmma_commit();
        if (own / CLUSTER == half)
            unit.own = stage + own % CLUSTER * 2 * BOX_BYTES;
        p.advance();
    }
    return unit;
}

// Waits until the staging buffer is free; publishes stored columns from time to time.
template <int CLUSTER>
static __device__ __forceinline__ void staging_acquire(SmallConsumer<CLUSTER> &p, int col)
{
    if (col == 0) {
        mbarrier_wait(p.m.read(), p.read);
        p.read ^= 1; // the staging buffer overlaps with operand B
    }
    if (col % ANNOUNCE_COLS == 0)
        announce_columns(p);
    else if (p.leader)
        tma_store_wait_read();
    named_barrier_sync(STAGING_BARRIER + p.group, WARPGROUP);
}

// One warp: its ldmatrix reads of the unit's stages are complete.
template <int CLUSTER>
static __device__ __forceinline__ void release_unit(const SmallConsumer<CLUSTER> &p, const Unit &unit)
{
    int lane = threadIdx.x % WARP;
    __syncwarp();
    if (CLUSTER > 1) {
        if (lane == 0)
            mbarrier_arrive(p.m.unit_read(unit.stage / 2));
    } else if (lane < 2) {
        mbarrier_arrive(p.m.empty(unit.stage + lane)); // the producer is in this CTA
    }
}

// Epilogue of a unit whose WGMMAs are complete: X's other buffer = alpha Z X + a X.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void end_unit(float (&sum)[64], const Unit &unit, SmallConsumer<CLUSTER> &p,
                                                const CUtensorMap *out, float alpha, float a, int matrix)
{
    int row = (CONSUMERS * p.rank + p.group) * BOX_SIDE;
    wgmma_fence_registers(sum);
    if (a != 0)
        add_boxes<T, 64>(sum, unit.own, a);
    release_unit(p, unit);
    uint32_t packed[32];
    combine<T, false>(packed, sum, NULL, alpha, 0);
    staging_acquire(p, unit.col);
    write_fragments<UNIT_COLS>(packed, p.m.staging(p.group));
    fence_proxy_async_shared();
    named_barrier_sync(STAGING_BARRIER + p.group, WARPGROUP);
    if (!p.leader)
        return;
    for (int i = 0; i < 2; i++)
        if (row < p.c.n && unit.col + i * BOX_SIDE < p.c.m)
            tma_store(out, p.m.staging(p.group) + i * BOX_BYTES, unit.col + i * BOX_SIDE, row, matrix);
    tma_store_commit();
    p.pending = true;
}

// All units; the epilogue of one overlaps with the WGMMAs of the next.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void apply_product(uint32_t (&z)[SmallSizes<CLUSTER>::PAIRS],
                                                     SmallConsumer<CLUSTER> &p, const CUtensorMap *out,
                                                     float alpha, float a, int matrix)
{
    int units = (p.c.m + UNIT_COLS - 1) / UNIT_COLS;
    float even[64], odd[64];
    if (CLUSTER > 1)
        swap_halves(z, p.rank);
    p.stage = 0;
    Unit before = begin_unit<T, CLUSTER>(even, z, p, 0), now;
    for (int i = 1;; i += 2) {
        if (i >= units) {
            wgmma_wait<0>();
            end_unit<T, CLUSTER>(even, before, p, out, alpha, a, matrix);
            break;
        }
        now = begin_unit<T, CLUSTER>(odd, z, p, i * UNIT_COLS);
        wgmma_wait<2>(); // two a unit
        end_unit<T, CLUSTER>(even, before, p, out, alpha, a, matrix);
        if (i + 1 >= units) {
            wgmma_wait<0>();
            end_unit<T, CLUSTER>(odd, now, p, out, alpha, a, matrix);
            break;
        }
        before = begin_unit<T, CLUSTER>(even, z, p, (i + 1) * UNIT_COLS);
        wgmma_wait<2>();
        end_unit<T, CLUSTER>(odd, now, p, out, alpha, a, matrix);
    }
}

// ---- kernel -----------------------------------------------------------------------------------------------

template <typename T, int CLUSTER>
static __device__ __forceinline__ void consume_small(SmallConsumer<CLUSTER> &p, int first, int clusters)
{
    const NsIteration &it = p.c.it;
    for (int matrix = first; matrix < p.c.batch; matrix += clusters)
        for (int step = 0; step < it.steps; step++) {
            bool scaled = it.aol && step == 0;
            uint32_t rows[SmallSizes<CLUSTER>::PAIRS];
            gram_rows<T, CLUSTER>(rows, p, matrix, scaled);
            publish_rows<T, CLUSTER>(rows, p);
            square_rows<T, CLUSTER>(rows, p, it.b[step], it.c[step]);
            if (scaled)
                scale_rows<T, CLUSTER>(rows, p, it.a[step]);
            apply_product<T, CLUSTER>(rows, p, &p.c.x[(step + 1) % 2], scaled ? 1 / it.aol_factor : 1,
                                      scaled ? 0 : it.a[step], matrix);
        }
    announce_columns(p);
}

#endif

template <typename T, int CLUSTER>
__global__ void __launch_bounds__(THREADS, 1) small_kernel(const __grid_constant__ Small c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SmallConsumer<CLUSTER> p = {{shared}, c, cluster_rank(), (int)threadIdx.x / WARPGROUP};
    int first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    p.leader = threadIdx.x % WARPGROUP == 0;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024)
            __trap(); // the swizzle counts from multiples of 1024 bytes
        const int warps = CLUSTER * CONSUMERS * GROUP_WARPS;
        for (int i = 0; i < SMALL_STAGES; i++) {
            mbarrier_init(p.m.full(i), 1);
            mbarrier_init(p.m.empty(i), warps);
        }
        mbarrier_init(p.m.operand_empty(), warps);
        mbarrier_init(p.m.sent(), CONSUMERS);
        mbarrier_init(p.m.scaled(), CONSUMERS);
        mbarrier_init(p.m.read(), warps);
        for (int i = 0; i < SMALL_UNITS; i++)
            mbarrier_init(p.m.unit_read(i), CONSUMERS * GROUP_WARPS);
        for (int i = 0; i < CLUSTER * CONSUMERS; i++)
            *p.m.written(i) = 0;
        fence_mbarrier_init();
    }
    pdl_launch_dependents();
    cluster_sync(); // the mbarriers and counters are initialised
    pdl_wait();
    if (p.group < CONSUMERS) {
        setmaxnreg_inc<SMALL_CONSUMER_REGISTERS>();
        consume_small<T, CLUSTER>(p, first, clusters);
    } else {
        setmaxnreg_dec<SMALL_PRODUCER_REGISTERS>();
        int warp = uniform_warp() - CONSUMERS * GROUP_WARPS;
        if (warp == 0 && threadIdx.x % WARP == 0)
            produce_small<CLUSTER>(p, first, clusters);
        if (CLUSTER > 1 && warp == 1)
            relay_releases<CLUSTER>(p, first, clusters);
        __syncwarp();
    }
    if (CLUSTER > 1)
        cluster_sync(); // the peer may still arrive at this CTA's counters and mbarriers
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------

static int clusters_held[2][2]; // by dtype and cluster size: resident clusters, 0: not known yet

void ns_forget_clusters(void) { memset(clusters_held, 0, sizeof clusters_held); }

template <typename T, int CLUSTER> static void launch_small(cudaStream_t s, const Small &c, int &clusters)
{
    auto kernel = small_kernel<T, CLUSTER>;
    const ClusterShape shape = {CLUSTER, THREADS, SmallSizes<CLUSTER>::BYTES};
    if (!clusters) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        SmallSizes<CLUSTER>::BYTES));
        clusters = clusters_that_fit((const void *)kernel, shape);
        if (clusters < 1)
            fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", CLUSTER);
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, s, shape, min_i64(c.batch, clusters), true);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}

bool ns_iterates(NsDtype dtype, int n, int m)
{
    return ns_product_path(dtype, n, m) == NS_PATH_TENSOR && n <= SmallSizes<2>::SIDE && m % 8 == 0;
}

void ns_iterate(Stream s, NsDtype dtype, const NsIteration *it, const NsMatrices *x)
{
    OP_SCOPE(ns_iterate, dtype, it, x->n, x->m, x->batch);
    if (x->batch == 0)
        return;
    Small c = {{}, *it, x->unit, x->n, x->m, x->batch};
    for (int i = 0; i < 2; i++)
        c.x[i] = ns_tensor_map(dtype, i ? x->spare : x->x, x->n, x->m, x->m, x->batch);
    bool bf16 = dtype == NS_BF16, one = x->n <= SmallSizes<1>::SIDE;
    int &clusters = clusters_held[bf16][one];
    if (bf16 && one)
        launch_small<__nv_bfloat16, 1>(s, c, clusters);
    if (bf16 && !one)
        launch_small<__nv_bfloat16, 2>(s, c, clusters);
    if (!bf16 && one)
        launch_small<__half, 1>(s, c, clusters);
    if (!bf16 && !one)
        launch_small<__half, 2>(s, c, clusters);
}
