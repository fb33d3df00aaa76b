// Newton-Schulz of matrices of at most 256 rows in one kernel, in the standard form. X streams through shared memory for its Gram
// matrix R and for the product with it; the two products in between stay in registers and shared memory (sm90_ns_small.cuh): a group
// rounds its rows of R, which are the left operand of R R in its registers and part of the right one in shared memory, and
// Z = b R + c R^2 is the left operand of Z X.
//
// X goes through memory from step to step, 256 columns at a time: the next Gram matrix begins with columns that are there while
// the last ones are on their way. No block waits for another cluster: each takes whole matrices, in a fixed order.
//
// R is symmetric to the last bit, its sums being over the same products in the same order; Z but for rounding.
#include "llmc/cuda/muon/sm90_ns_small.cuh"
#include "llmc/cuda/sm90/sm90_launch.cuh"

enum { SMALL_FETCH_REGISTERS = 40, SMALL_COMPUTE_REGISTERS = 232, GROUP_WARPS = GROUP / WARP };
enum { ANNOUNCE_AFTER = 2 }; // stage of a Gram matrix by which the last columns have been stored

#if HOPPER

template <int CLUSTER> struct SmallPlace {
    SmallMemory<CLUSTER> m;
    const Small &c;
    int rank, group, stage;
    uint32_t parities;                 // bit i: of stage i's next phase
    uint32_t idle, sent, read, scaled; // parities of the next phases
    uint32_t written;                  // times that each group has told of columns of X
    bool leader;                       // the thread that talks to the copy unit
    bool pending;                      // and has stored what it has not announced
    __device__ __forceinline__ uint32_t parity() const { return parities >> stage & 1; }
    __device__ __forceinline__ void advance()
    {
        parities ^= 1u << stage;
        if (++stage == SMALL_STAGES) stage = 0;
    }
    // All blocks: a warp has read stage `i`, or whatever `barrier` stands for.
    __device__ __forceinline__ void tell_all(uint64_t *barrier) const
    {
        int lane = threadIdx.x % WARP;
        if (lane < CLUSTER) barrier_arrive_at(barrier, lane);
    }
};

// ---- fetching --------------------------------------------------------------------------------------------------------------

// One thread of each block: its share of a stage, which all blocks get. Boxes that follow each other along the rows from (x, y)
// on, `across` of them side by side.
template <int CLUSTER>
static __device__ __forceinline__ void fetch_stage(SmallPlace<CLUSTER> &p, const CUtensorMap *map, int x, int y, int across,
                                                   int matrix)
{
    uint64_t *full = p.m.full(p.stage);
    const uint16_t all = (1 << CLUSTER) - 1;
    barrier_wait(p.m.empty(p.stage), p.parity() ^ 1);
    barrier_arrive_expect(full, p.m.STRIP); // what the other block sends counts too
    for (int i = 2 * p.rank; i < 2 * p.rank + 2; i++)
        tile_load(p.m.stage(p.stage) + i * BOX_BYTES, map, full, x + i % across * BOX_SIDE, y + i / across * BOX_SIDE, matrix,
                  all);
    p.advance();
}

// Where stage k of a Gram matrix of `stages` stages lies: at last where nothing else does, before that where it does, and at
// first in places that the product before has left first. A place is not needed again for the next two stages: it is given back
// when the stage after it has begun.
static __device__ __forceinline__ int gram_stage(int k, int stages)
{
    static_assert(SMALL_STAGES == 2 * FREE_STAGES, "two halves");
    int left = stages - k, from = (FREE_STAGES - stages % FREE_STAGES) % FREE_STAGES;
    return (left > SMALL_STAGES ? from + k : SMALL_STAGES + FREE_STAGES - left) % SMALL_STAGES;
}

// The next columns of X, by all groups of the cluster.
template <int CLUSTER> static __device__ __forceinline__ void wait_written(SmallPlace<CLUSTER> &p)
{
    p.written++;
    for (int i = 0; i < CLUSTER * GROUPS; i++) counter_wait(p.m.written(i), p.written);
    copy_unit_fence_all();
}

template <int CLUSTER> static __device__ __forceinline__ void fetch_step(SmallPlace<CLUSTER> &p, int matrix, int step)
{
    const CUtensorMap *x = &p.c.x[step % 2];
    int stages = boxes_along(p.c.m);
    for (int k = 0; k < stages; k++) {
        if (step && k % (ANNOUNCED_COLS / BOX_SIDE) == 0) wait_written(p);
        p.stage = gram_stage(k, stages);
        fetch_stage(p, x, k * BOX_SIDE, 0, 1, matrix);
    }
    p.stage = 0;
    bool waited = false;
    for (int col = 0; col < p.c.m; col += UNIT_COLS)
        for (int half = 0; half < 2; half++) {
            if (p.stage == FREE_STAGES && !waited) barrier_wait(p.m.read(), p.read), waited = true;
            fetch_stage(p, x, col, half * CLUSTER * BOX_SIDE, 2, matrix);
        }
    if (!waited) barrier_wait(p.m.read(), p.read);
    p.read ^= 1;
}

// Waits for all that is still on its way to this block: stages that come back, and what is told of the last columns.
template <int CLUSTER> static __device__ __forceinline__ void drain(SmallPlace<CLUSTER> &p)
{
    for (p.stage = 0; p.stage < SMALL_STAGES; p.stage++) barrier_wait(p.m.empty(p.stage), p.parity() ^ 1);
    for (int i = 0; i < CLUSTER * GROUPS; i++) counter_wait(p.m.written(i), p.written);
}

template <int CLUSTER> static __device__ __forceinline__ void fetch_small(SmallPlace<CLUSTER> &p, int first, int clusters)
{
    for (int matrix = first; matrix < p.c.batch; matrix += clusters) {
        for (int step = 0; step < p.c.it.steps; step++) fetch_step(p, matrix, step);
        p.written += (p.c.m + ANNOUNCED_COLS - 1) / ANNOUNCED_COLS; // in the last step
    }
    drain(p);
}

// ---- announcing ------------------------------------------------------------------------------------------------------------

// The leader: what it stored is in memory, for both fetching threads.
template <int CLUSTER> static __device__ __forceinline__ void announce(SmallPlace<CLUSTER> &p)
{
    if (!p.leader || !p.pending) return;
    stores_wait();
    copy_unit_fence_all();
    for (int rank = 0; rank < CLUSTER; rank++) counter_add_at(p.m.written(GROUPS * p.rank + p.group), rank);
    p.pending = false;
}

// ---- the Gram matrix -------------------------------------------------------------------------------------------------------

// sum += the group's rows of X X^T, columns in the order of the matrix.
template <typename T, int CLUSTER> static __device__ __forceinline__ void gram_product(float (&sum)[128], SmallPlace<CLUSTER> &p)
{
    int previous = -1, own = GROUPS * p.rank + p.group, stages = boxes_along(p.c.m), free_at = max(0, stages - FREE_STAGES);
    p.stage = gram_stage(0, stages);
    // Nothing to multiply yet: others may be waiting for the last columns.
    if (p.leader && !barrier_complete(p.m.full(p.stage), p.parity())) announce(p);
    __syncwarp();
    for (int k = 0; k < stages; k++) {
        p.stage = gram_stage(k, stages);
        barrier_wait(p.m.full(p.stage), p.parity());
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
        if (k == min((int)ANNOUNCE_AFTER, free_at)) announce(p), __syncwarp();
        if (k == free_at) p.tell_all(p.m.idle()); // the right operand may be written
        previous = p.stage;
        p.advance();
    }
    products_wait<0>();
    products_done(sum);
    p.tell_all(p.m.empty(previous));
}

// Almost-orthogonal scaling: sum = diag(s) sum diag(s), and s is left in shared memory, in the order of the matrix like the sums'
// columns.
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
        if (CLUSTER > 1) word_send(p.m.scales() + row + 8 * e, own[e], p.m.scaled(), p.rank ^ 1);
    }
    if (CLUSTER > 1 && p.leader) barrier_arrive_expect(p.m.scaled(), BOX_SIDE * sizeof(float));
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
    if (CLUSTER > 1) barrier_wait(p.m.scaled(), p.scaled);
    p.scaled ^= 1;
    // The two scales first: their product commutes.
#pragma unroll
    for (int i = 0; i < p.m.SUMS; i++) sum[i] = own[i / 2 % 2] * p.m.scales()[i / 4 * 8 + col_of() + i % 2] * sum[i];
}

// rows = the group's rows of R, in local order.
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

// ---- its square ------------------------------------------------------------------------------------------------------------

// The group's rows become those of the right operand, in all blocks. A block has the other's rows below its own ones from the
// symmetry (mirror), and is sent the rest.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void publish(const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p)
{
    barrier_wait(p.m.idle(), p.idle), p.idle ^= 1;
#pragma unroll
    for (int j = 0; j < p.m.BOXES; j++) put_blocks<BOX_SIDE>(rows + 16 * j, p.m.operand_strip(j) + p.group * BOX_BYTES);
    copy_unit_fence();
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
    p.sent ^= 1;
    if (CLUSTER == 1 || !p.leader) return;
    barrier_arrive_expect(p.m.sent(), GROUPS * BOX_BYTES); // the same group's of the other block
    for (int j = 0; j < GROUPS; j++)
        bulk_send(p.m.operand_strip(GROUPS + j) + (GROUPS + p.group) * BOX_BYTES, p.m.operand_strip(j) + p.group * BOX_BYTES,
                  p.m.sent(), p.rank ^ 1, BOX_BYTES);
}
template <int CLUSTER>
static __device__ __forceinline__ void mirror(const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], const SmallPlace<CLUSTER> &p)
{
#pragma unroll
    for (int j = GROUPS; j < p.m.BOXES; j++) put_mirrored(rows + 16 * j, p.m.operand_strip(p.group) + j * BOX_BYTES);
    copy_unit_fence();
    group_sync(BOTH_BARRIER, GROUPS * GROUP);
}

// sum (64, 128) = or += rows (64, SIDE) times the right operand's columns that are half `half` of its rows, depth 64 from to 64
// to.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_part(float *sum, const uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], uint64_t b,
                                                   int half, int from, int to)
{
#pragma unroll
    for (int j = from; j < to; j++)
#pragma unroll
        for (int k = 0; k < BOX_SIDE / 16; k++)
            product_from_registers<T, false>(sum, rows + 16 * j + 4 * k,
                                             operand_advance(b, j * SmallSizes<CLUSTER>::STRIP + 2 * half * BOX_BYTES + 32 * k),
                                             j > 0 || k > 0);
}

// rows = b R + c R^2, of rows of R. The products with the block's own rows begin; under way, the other's are mirrored; what is
// sent is needed last.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void square_rows(uint32_t (&rows)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p,
                                                   float beta, float c)
{
    float sum[64 * CLUSTER];
    uint64_t b = operand(p.m.operand_strip(0), 0);
    products_begin();
    square_part<T, CLUSTER>(sum, rows, b, 0, 0, p.m.BOXES);
    products_commit();
    if (CLUSTER > 1) {
        mirror(rows, p);
        products_begin();
        square_part<T, CLUSTER>(sum + 64, rows, b, 1, 0, GROUPS);
        products_commit();
        barrier_wait(p.m.sent(), p.sent ^ 1);
        products_begin();
        square_part<T, CLUSTER>(sum + 64, rows, b, 1, GROUPS, p.m.BOXES);
        products_commit();
    }
    products_wait<0>();
    products_done(sum);
    p.tell_all(p.m.read());
    combine_pairs<T, SmallSizes<CLUSTER>::PAIRS>(rows, sum, c, rows, beta);
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

// ---- the product with X ----------------------------------------------------------------------------------------------------

// A product Z X of UNIT_COLS columns under way: its stages, where the group's own rows of X are in them, and its columns.
struct Unit {
    int stage[2], col;
    const uint8_t *own;
};

// sum = the group's rows of Z X, columns from `col` on. Begins it.
template <typename T, int CLUSTER>
static __device__ __forceinline__ Unit begin_unit(float (&sum)[64], const uint32_t (&z)[SmallSizes<CLUSTER>::PAIRS],
                                                  SmallPlace<CLUSTER> &p, int col)
{
    int own = GROUPS * p.rank + p.group;
    Unit unit = {{}, col};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        barrier_wait(p.m.full(p.stage), p.parity());
        const uint8_t *stage = p.m.stage(p.stage);
        uint64_t b = operand(stage, BOX_BYTES);
        products_begin();
#pragma unroll
        for (int k = 0; k < CLUSTER * BOX_SIDE / 16; k++)
            product_from_registers<T, true>(sum, z + half * CLUSTER * 16 + 4 * k,
                                            operand_advance(b, k / 4 * 2 * BOX_BYTES + k % 4 * 16 * 128), half > 0 || k > 0);
        products_commit();
        if (own / CLUSTER == half) unit.own = stage + own % CLUSTER * 2 * BOX_BYTES;
        unit.stage[half] = p.stage;
        p.advance();
    }
    return unit;
}

// The group's desk is free. All that is on its way is told of from time to time.
template <int CLUSTER> static __device__ __forceinline__ void clear_desk(SmallPlace<CLUSTER> &p, int col)
{
    if (col == 0) barrier_wait(p.m.read(), p.read), p.read ^= 1; // the desk lies where the right operand was
    if (col % ANNOUNCED_COLS == 0)
        announce(p);
    else if (p.leader)
        stores_wait_read();
    group_sync(DESK_BARRIER + p.group, GROUP);
}

// X's other place = alpha Z X + a X, of a unit whose products are complete.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void end_unit(float (&sum)[64], const Unit &unit, SmallPlace<CLUSTER> &p,
                                                const CUtensorMap *out, float alpha, float a, int matrix)
{
    int row = (GROUPS * p.rank + p.group) * BOX_SIDE;
    products_done(sum);
    if (a != 0) add_boxes<T, 64>(sum, unit.own, a);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) p.tell_all(p.m.empty(unit.stage[half]));
    uint32_t packed[32];
    combine<T, false>(packed, sum, NULL, alpha, 0);
    clear_desk(p, unit.col);
    put_blocks<UNIT_COLS>(packed, p.m.desk(p.group));
    copy_unit_fence();
    group_sync(DESK_BARRIER + p.group, GROUP);
    if (!p.leader) return;
    for (int i = 0; i < 2; i++)
        if (row < p.c.n && unit.col + i * BOX_SIDE < p.c.m)
            tile_store(out, p.m.desk(p.group) + i * BOX_BYTES, unit.col + i * BOX_SIDE, row, matrix);
    stores_commit();
    p.pending = true;
}

// All units; while the products of one are under way, the one before is ended.
template <typename T, int CLUSTER>
static __device__ __forceinline__ void apply_product(uint32_t (&z)[SmallSizes<CLUSTER>::PAIRS], SmallPlace<CLUSTER> &p,
                                                     const CUtensorMap *out, float alpha, float a, int matrix)
{
    int units = (p.c.m + UNIT_COLS - 1) / UNIT_COLS;
    float even[64], odd[64];
    if (CLUSTER > 1) swap_halves(z, p.rank);
    p.stage = 0;
    Unit before = begin_unit<T, CLUSTER>(even, z, p, 0), now;
    for (int i = 1;; i += 2) {
        if (i >= units) {
            products_wait<0>();
            end_unit<T, CLUSTER>(even, before, p, out, alpha, a, matrix);
            break;
        }
        now = begin_unit<T, CLUSTER>(odd, z, p, i * UNIT_COLS);
        products_wait<2>(); // two a unit
        end_unit<T, CLUSTER>(even, before, p, out, alpha, a, matrix);
        if (i + 1 >= units) {
            products_wait<0>();
            end_unit<T, CLUSTER>(odd, now, p, out, alpha, a, matrix);
            break;
        }
        before = begin_unit<T, CLUSTER>(even, z, p, (i + 1) * UNIT_COLS);
        products_wait<2>();
        end_unit<T, CLUSTER>(odd, now, p, out, alpha, a, matrix);
    }
}

// ---- whole matrices --------------------------------------------------------------------------------------------------------

template <typename T, int CLUSTER>
static __device__ __forceinline__ void compute_small(SmallPlace<CLUSTER> &p, int first, int clusters)
{
    const NsIteration &it = p.c.it;
    for (int matrix = first; matrix < p.c.batch; matrix += clusters)
        for (int step = 0; step < it.steps; step++) {
            bool scaled = it.aol && step == 0;
            uint32_t rows[SmallSizes<CLUSTER>::PAIRS];
            gram_rows<T, CLUSTER>(rows, p, matrix, scaled);
            publish<T, CLUSTER>(rows, p);
            square_rows<T, CLUSTER>(rows, p, it.b[step], it.c[step]);
            if (scaled) scale_rows<T, CLUSTER>(rows, p, it.a[step]);
            apply_product<T, CLUSTER>(rows, p, &p.c.x[(step + 1) % 2], scaled ? 1 / it.aol_factor : 1, scaled ? 0 : it.a[step],
                                      matrix);
        }
    announce(p);
}

#endif

template <typename T, int CLUSTER> __global__ void __launch_bounds__(THREADS, 1) small_kernel(const __grid_constant__ Small c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SmallPlace<CLUSTER> p = {{shared}, c, cluster_rank(), (int)threadIdx.x / GROUP};
    int first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    p.leader = threadIdx.x % GROUP == 0;
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        const int warps = CLUSTER * GROUPS * GROUP_WARPS;
        for (int i = 0; i < SMALL_STAGES; i++) barrier_init(p.m.full(i), 1), barrier_init(p.m.empty(i), warps);
        barrier_init(p.m.idle(), warps);
        barrier_init(p.m.sent(), GROUPS), barrier_init(p.m.scaled(), GROUPS);
        barrier_init(p.m.read(), warps);
        for (int i = 0; i < CLUSTER * GROUPS; i++) *p.m.written(i) = 0;
        barrier_init_fence();
    }
    launch_dependents();
    cluster_sync_at_end(); // the barriers and the counter are ready
    wait_for_predecessors();
    if (p.group < GROUPS) {
        registers_grow<SMALL_COMPUTE_REGISTERS>();
        compute_small<T, CLUSTER>(p, first, clusters);
    } else {
        registers_shrink<SMALL_FETCH_REGISTERS>();
        if (threadIdx.x == GROUPS * GROUP) fetch_small<CLUSTER>(p, first, clusters);
        __syncwarp();
    }
#endif
}

// ---- launch ----------------------------------------------------------------------------------------------------------------

static int clusters_held[2][2]; // by dtype and size of the cluster: that the device holds at a time, 0: not asked yet

void ns_forget_clusters(void) { memset(clusters_held, 0, sizeof clusters_held); }

template <typename T, int CLUSTER> static void launch_small(cudaStream_t s, const Small &c, int &clusters)
{
    auto kernel = small_kernel<T, CLUSTER>;
    const ClusterShape shape = {CLUSTER, THREADS, SmallSizes<CLUSTER>::BYTES};
    if (!clusters) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SmallSizes<CLUSTER>::BYTES));
        clusters = clusters_that_fit((const void *)kernel, shape);
        if (clusters < 1) fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", CLUSTER);
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = cluster_launch(attributes, s, shape, min_i64(c.batch, clusters), true);
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
    for (int i = 0; i < 2; i++) c.x[i] = ns_tensor_map(dtype, i ? spare : x, n, m, m, batch);
    bool bf16 = dtype == NS_BF16, one = n <= SmallSizes<1>::SIDE;
    int &clusters = clusters_held[bf16][one];
    if (bf16 && one) launch_small<__nv_bfloat16, 1>(s, c, clusters);
    if (bf16 && !one) launch_small<__nv_bfloat16, 2>(s, c, clusters);
    if (!bf16 && one) launch_small<__half, 1>(s, c, clusters);
    if (!bf16 && !one) launch_small<__half, 2>(s, c, clusters);
}
