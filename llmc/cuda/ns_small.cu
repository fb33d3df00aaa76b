// Newton-Schulz of matrices of at most 256 rows in one kernel, in the standard form. X streams through shared memory for its Gram
// matrix R and for the product with it; the two products in between stay in registers and shared memory (ns_small.cuh): a group
// rounds its rows of R, which are the left operand of R R in its registers and part of the right one in shared memory, and
// Z = b R + c R^2 is the left operand of Z X. No block waits for another cluster: each takes whole matrices, in a fixed order.
//
// R is symmetric to the last bit, its sums being over the same products in the same order; Z but for rounding.
#include "llmc/cuda/ns_small.cuh"

enum { SMALL_FETCH_REGISTERS = 40, SMALL_COMPUTE_REGISTERS = 232, GROUP_WARPS = GROUP / WARP };

#if HOPPER

template <int CLUSTER> struct SmallPlace {
    SmallMemory<CLUSTER> m;
    const Small &c;
    int rank, group, stage;
    uint32_t parity, idle, sent; // of the ring; of the next phases of two barriers
    bool leader;                 // the thread that talks to the copy unit
    __device__ __forceinline__ void sync() const { group_sync(DESK_BARRIER + group, GROUP); }
    __device__ __forceinline__ void advance()
    {
        if (++stage == SMALL_STAGES) stage = 0, parity ^= 1;
    }
    // A warp of each group has read stage `i`, or whatever `barrier` stands for.
    __device__ __forceinline__ void tell_all(uint64_t *barrier) const
    {
        int lane = threadIdx.x % WARP;
        if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
    }
    // All threads of the group.
    __device__ __forceinline__ void wait_sent() const
    {
        if (CLUSTER > 1) barrier_wait(m.sent(), sent ^ 1);
    }
};

// ---- fetching --------------------------------------------------------------------------------------------------------------

// One thread of each block: its share of a stage, which all blocks get. Of BOXES boxes that follow each other along the columns,
// or along the rows when DOWN, from (x, y) on.
template <int CLUSTER, bool DOWN>
static __device__ __forceinline__ void fetch_stage(SmallPlace<CLUSTER> &p, const CUtensorMap *map, int x, int y, int matrix)
{
    uint64_t *full = p.m.full(p.stage);
    const uint16_t all = (1 << CLUSTER) - 1;
    barrier_wait(p.m.empty(p.stage), p.parity ^ 1);
    barrier_arrive_expect(full, p.m.STRIP); // what the other block sends counts too
    for (int i = 2 * p.rank; i < 2 * p.rank + 2; i++)
        tile_load(p.m.stage(p.stage) + i * BOX_BYTES, map, full, x + (DOWN ? 0 : i * BOX_SIDE), y + (DOWN ? i * BOX_SIDE : 0),
                  matrix, all);
    p.advance();
}

template <int CLUSTER> static __device__ __forceinline__ void fetch_small(SmallPlace<CLUSTER> &p, int first, int clusters)
{
    uint32_t go = 0;
    for (int matrix = first; matrix < p.c.batch; matrix += clusters)
        for (int step = 0; step < p.c.it.steps; step++) {
            const CUtensorMap *x = &p.c.x[step % 2];
            if (step) { // that X has been written
                barrier_wait_cluster(p.m.go(), go), go ^= 1;
                copy_unit_fence_all();
            }
            for (int k = 0; k < p.c.m; k += BOX_SIDE) fetch_stage<CLUSTER, true>(p, x, k, 0, matrix);
            barrier_wait(p.m.go(), go), go ^= 1; // nobody needs what lies where the stages do
            for (int col = 0; col < p.c.m; col += p.m.SIDE)
                for (int j = 0; j < p.m.BOXES; j++) fetch_stage<CLUSTER, false>(p, x, col, j * BOX_SIDE, matrix);
        }
}

// ---- products with X -------------------------------------------------------------------------------------------------------

// sum += the group's rows of X X^T, columns in the order of the matrix.
template <typename T, int CLUSTER> static __device__ __forceinline__ void gram_product(float (&sum)[128], SmallPlace<CLUSTER> &p)
{
    int previous = -1, own = GROUPS * p.rank + p.group;
    for (int k = 0; k < p.c.m; k += BOX_SIDE) {
        barrier_wait(p.m.full(p.stage), p.parity);
        uint64_t a = operand(p.m.stage(p.stage) + own * BOX_BYTES, 0), b = operand(p.m.stage(p.stage), 0);
        products_begin();
#pragma unroll
        for (int i = 0; i < BOX_SIDE / 16; i++)
            warpgroup_product<T, false, SmallSizes<CLUSTER>::SIDE>(sum, operand_advance(a, 32 * i), operand_advance(b, 32 * i),
                                                                   true);
        products_commit();
        if (previous >= 0) {
            products_wait<1>();
            p.tell_all(p.m.empty(previous));
        }
        previous = p.stage;
        p.advance();
    }
    products_wait<0>();
    products_done(sum);
    p.tell_all(p.m.empty(previous));
}

// The group's rows of the sums, columns `col` and on, to X's other place.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void store_rows(const float (&sum)[128], SmallPlace<CLUSTER> &p, const CUtensorMap *out,
                                                  float alpha, int col, int matrix)
{
    int row = (GROUPS * p.rank + p.group) * BOX_SIDE;
    if (p.leader) stores_wait_read();
    p.sync();
#pragma unroll
    for (int half = 0; half < CLUSTER; half++) {
        uint32_t packed[32];
        combine<T, false>(packed, sum + 64 * half, NULL, alpha, 0);
        put_blocks<HALF_COLS>(packed, p.m.desk(p.group) + 2 * half * BOX_BYTES);
    }
    copy_unit_fence();
    p.sync();
    if (!p.leader || row >= p.c.n) return;
    for (int i = 0; i < p.m.BOXES; i++)
        if (col + i * BOX_SIDE < p.c.m) tile_store(out, p.m.desk(p.group) + i * BOX_BYTES, col + i * BOX_SIDE, row, matrix);
    stores_commit();
}

// X's other place = alpha Z X + a X, Z's rows in local order; SIDE columns at a time.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void apply_product(uint32_t (&z)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p,
                                                     const CUtensorMap *out, float alpha, float a, int matrix)
{
    using S = SmallSizes<CLUSTER>;
    int own = GROUPS * p.rank + p.group;
    if (CLUSTER > 1) swap_halves(z, p.rank);
    for (int col = 0; col < p.c.m; col += S::SIDE) {
        int previous = -1;
        float sum[128];
#pragma unroll
        for (int j = 0; j < S::BOXES; j++) {
            barrier_wait(p.m.full(p.stage), p.parity);
            uint64_t b = operand(p.m.stage(p.stage), BOX_BYTES);
            products_begin();
#pragma unroll
            for (int k = 0; k < BOX_SIDE / 16; k++)
#pragma unroll
                for (int half = 0; half < CLUSTER; half++)
                    product_from_registers<T, true>(sum + 64 * half, z + 16 * j + 4 * k,
                                                    operand_advance(b, 2 * half * BOX_BYTES + 16 * 128 * k), j > 0 || k > 0);
            products_commit();
            if (a != 0 && j == own) { // the group's own rows of X pass by
                products_wait<0>();
                products_done(sum);
                add_boxes<T, S::SUMS>(sum, p.m.stage(p.stage), a);
            }
            if (previous >= 0) {
                products_wait<1>();
                p.tell_all(p.m.empty(previous));
            }
            previous = p.stage;
            p.advance();
        }
        products_wait<0>();
        products_done(sum);
        p.tell_all(p.m.empty(previous));
        store_rows<T, CLUSTER>(sum, p, out, alpha, col, matrix);
    }
}

// ---- R's square ------------------------------------------------------------------------------------------------------------

// The group's rows become those of the right operand, in both blocks.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void publish(const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p)
{
    p.tell_all(p.m.idle());
    barrier_wait(p.m.idle(), p.idle), p.idle ^= 1;
#pragma unroll
    for (int j = 0; j < p.m.BOXES; j++) put_blocks<BOX_SIDE>(rows + 16 * j, p.m.operand_strip(j) + p.group * BOX_BYTES);
    copy_unit_fence();
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
    p.sent ^= 1;
    if (CLUSTER == 1 || !p.leader) return;
    barrier_arrive_expect(p.m.sent(), p.m.STRIP); // the same group's of the other block
    for (int j = 0; j < p.m.BOXES; j++)
        bulk_send(p.m.operand_strip(j ^ 2) + (GROUPS + p.group) * BOX_BYTES, p.m.operand_strip(j) + p.group * BOX_BYTES,
                  p.m.sent(), p.rank ^ 1, BOX_BYTES);
}

// sum = rows (64, SIDE) times the right operand.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_product(float (&sum)[128], const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS],
                                                      const SmallPlace<CLUSTER> &p)
{
    uint64_t b = operand(p.m.operand_strip(0), 0);
#pragma unroll
    for (int half = 0; half < CLUSTER; half++) {
        if (half == 1) p.wait_sent();
        products_begin();
#pragma unroll
        for (int j = 0; j < p.m.BOXES; j++)
#pragma unroll
            for (int k = 0; k < BOX_SIDE / 16; k++)
                product_from_registers<T, false>(sum + 64 * half, rows + 16 * j + 4 * k,
                                                 operand_advance(b, j * p.m.STRIP + 2 * half * BOX_BYTES + 32 * k),
                                                 j > 0 || k > 0);
        products_commit();
    }
    products_wait<0>();
    products_done(sum);
}

// rows = b R + c R^2, of rows of R.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], const SmallPlace<CLUSTER> &p,
                                                   float b, float c)
{
    float sum[128];
    square_product<T, CLUSTER>(sum, rows, p);
    combine_pairs<T, SmallSizes<CLUSTER>::PAIRS>(rows, sum, c, rows, b);
}

// ---- almost-orthogonal scaling ---------------------------------------------------------------------------------------------

// sum = diag(s) sum diag(s), and s is left in shared memory, in the order of the matrix like the sums' columns.
template <int CLUSTER> static __device__ __forceinline__ void scale_sums(float (&sum)[128], SmallPlace<CLUSTER> &p, int matrix)
{
    float own[2] = {}, *unit = p.m.units();
    int thread = threadIdx.x % (GROUPS * GROUP);
    if (thread < p.m.SIDE) unit[thread] = p.c.unit && thread < p.c.n ? p.c.unit[(int64_t)matrix * p.c.n + thread] : 1;
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
#pragma unroll
    for (int i = 0; i < p.m.SUMS; i++) own[i / 2 % 2] += fabsf(sum[i]) * unit[i / 4 * 8 + col_of() + i % 2];
    int row = (GROUPS * p.rank + p.group) * BOX_SIDE + row_of();
#pragma unroll
    for (int e = 0; e < 2; e++) {
        own[e] += __shfl_xor_sync(0xffffffffu, own[e], 1);
        own[e] += __shfl_xor_sync(0xffffffffu, own[e], 2);
        own[e] /= unit[row + 8 * e];
        own[e] = own[e] < NS_AOL_LEAST ? 0 : p.c.it.aol_gain / sqrtf(1.02f * own[e]);
        if (threadIdx.x % 4) continue;
        p.m.scales()[row + 8 * e] = own[e];
        if (CLUSTER > 1) word_send(p.m.scales() + row + 8 * e, own[e], p.m.sent(), p.rank ^ 1);
    }
    p.sent ^= 1;
    if (CLUSTER > 1 && p.leader) barrier_arrive_expect(p.m.sent(), BOX_SIDE * sizeof(float));
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
    p.wait_sent();
    // The two scales first: their product commutes.
#pragma unroll
    for (int i = 0; i < p.m.SUMS; i++) sum[i] = own[i / 2 % 2] * p.m.scales()[i / 4 * 8 + col_of() + i % 2] * sum[i];
}

// rows = (rows + a I) diag(factor s), whose product with x includes a x.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void scale_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], const SmallPlace<CLUSTER> &p,
                                                  float a)
{
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
        if (j == p.group) add_to_diagonal_packed<T>(rows + 16 * j, a);
#pragma unroll
    for (int i = 0; i < p.m.PAIRS; i++) {
        const float *s = p.m.scales() + (i / 32 ^ p.rank) * HALF_COLS + i % 32 / 2 * 8 + col_of();
        float2 v = unpack<T>(rows[i]);
        rows[i] = pack<T>(saturated<T>(v.x * (p.c.it.aol_factor * s[0])), saturated<T>(v.y * (p.c.it.aol_factor * s[1])));
    }
}

// rows = the group's rows of X X^T, scaled on demand, in local order.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void gram_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p, int matrix,
                                                 bool scaled)
{
    float sum[128] = {}; // unlike sums that begin with a product, which nothing is known of before
    gram_product<T, CLUSTER>(sum, p);
    if (scaled) scale_sums<CLUSTER>(sum, p, matrix);
#pragma unroll
    for (int k = 0; k < p.m.PAIRS; k++) rows[k] = pack<T>(sum[2 * k], sum[2 * k + 1]);
    if (CLUSTER > 1) swap_halves(rows, p.rank);
}

// ---- whole matrices --------------------------------------------------------------------------------------------------------

template <typename T, int CLUSTER>
static __device__ __forceinline__ void compute_step(SmallPlace<CLUSTER> &p, int matrix, int step)
{
    const NsIteration &it = p.c.it;
    bool scaled = it.aol && step == 0;
    uint32_t rows[SmallSizes<CLUSTER>::PAIRS];
    gram_rows<T, CLUSTER>(rows, p, matrix, scaled);
    publish<T, CLUSTER>(rows, p);
    square_rows<T, CLUSTER>(rows, p, it.b[step], it.c[step]);
    if (scaled) scale_rows<T, CLUSTER>(rows, p, it.a[step]);
    p.sync();
    if (p.leader)
        for (int rank = 0; rank < CLUSTER; rank++) barrier_arrive_at(p.m.go(), rank);
    apply_product<T, CLUSTER>(rows, p, &p.c.x[(step + 1) % 2], scaled ? 1 / it.aol_factor : 1, scaled ? 0 : it.a[step], matrix);
    if (step + 1 < it.steps && p.leader) { // the next Gram matrix is of what was written
        stores_wait();
        copy_unit_fence_all();
        for (int rank = 0; rank < CLUSTER; rank++) barrier_release_at(p.m.go(), rank);
    }
}

template <typename T, int CLUSTER>
static __device__ __forceinline__ void compute_small(SmallPlace<CLUSTER> &p, int first, int clusters)
{
    for (int matrix = first; matrix < p.c.batch; matrix += clusters)
        for (int step = 0; step < p.c.it.steps; step++) compute_step<T, CLUSTER>(p, matrix, step);
    if (p.leader) stores_wait();
}

#endif

template <typename T, int CLUSTER> __global__ void __launch_bounds__(THREADS, 1) small_kernel(const __grid_constant__ Small c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SmallPlace<CLUSTER> p = {{shared}, c, cluster_rank(), (int)threadIdx.x / GROUP, 0, 0, 0, 0, threadIdx.x % GROUP == 0};
    int first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < SMALL_STAGES; i++)
            barrier_init(p.m.full(i), 1), barrier_init(p.m.empty(i), CLUSTER * GROUPS * GROUP_WARPS);
        barrier_init(p.m.idle(), CLUSTER * GROUPS * GROUP_WARPS);
        barrier_init(p.m.sent(), GROUPS);
        barrier_init(p.m.go(), CLUSTER * GROUPS);
        barrier_init_fence();
    }
    launch_dependents();
    cluster_sync(); // the barriers are ready
    wait_for_predecessors();
    if (p.group < GROUPS) {
        registers_grow<SMALL_COMPUTE_REGISTERS>();
        compute_small<T, CLUSTER>(p, first, clusters);
    } else {
        registers_shrink<SMALL_FETCH_REGISTERS>();
        if (threadIdx.x == GROUPS * GROUP) fetch_small<CLUSTER>(p, first, clusters);
        __syncwarp();
    }
    cluster_sync_at_end(); // others may still arrive at this block's barriers
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------------------------

static int clusters_held[2][2]; // by dtype and size of the cluster: that the device holds at a time, 0: not asked yet

void ns_forget_clusters(void) { memset(clusters_held, 0, sizeof clusters_held); }

template <typename T, int CLUSTER> static void launch_small(cudaStream_t s, const Small &c, int &clusters)
{
    auto kernel = small_kernel<T, CLUSTER>;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SmallSizes<CLUSTER>::BYTES;
    config.stream = s;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (!clusters) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SmallSizes<CLUSTER>::BYTES));
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        if (clusters < 1) fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", CLUSTER);
    }
    config.gridDim = dim3((unsigned)(CLUSTER * min_i64(c.batch, clusters)));
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}

bool ns_iterates(NsDtype dtype, int n, int m)
{
    return ns_product_path(dtype, n, m) == NS_PATH_TENSOR && n <= SmallSizes<2>::SIDE && m % 8 == 0;
}

void ns_iterate(Stream s, NsDtype dtype, const NsIteration *it, const float *unit, void *x, void *spare, int n, int m, int batch)
{
    ns_flush();
    if (batch == 0) return;
    Small c = {{}, *it, unit, n, m, batch};
    for (int i = 0; i < 2; i++) c.x[i] = ns_tensor_map(dtype, i ? spare : x, n, m, m, (int64_t)n * m, batch);
    bool bf16 = dtype == NS_BF16, one = n <= SmallSizes<1>::SIDE;
    int &clusters = clusters_held[bf16][one];
    if (bf16 && one) launch_small<__nv_bfloat16, 1>(s, c, clusters);
    if (bf16 && !one) launch_small<__nv_bfloat16, 2>(s, c, clusters);
    if (!bf16 && one) launch_small<__half, 1>(s, c, clusters);
    if (!bf16 && !one) launch_small<__half, 2>(s, c, clusters);
}
