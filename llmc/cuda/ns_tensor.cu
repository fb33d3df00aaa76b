// Chains of Newton-Schulz tasks on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// A cluster of two blocks, each alone on its multiprocessor, computes a square of 256 x 256 at a time, a block 128 rows of it. In
// a block two groups of 128 threads multiply 64 rows each; of the third group one thread fetches operand tiles of depth 64 ahead,
// through a ring of STAGES. The columns' operand is needed by both blocks: each fetches half of it and the hardware delivers it
// to both.
//
// Why 64 x 256 a group: a product of 64 x 256 x 16 reads 10 KB of shared memory in 128 cycles and 6 KB more arrive for it, which
// is just what shared memory moves in that time; with 64 x 128 the tensor cores would wait a fifth of the time.
//
// Addends (d) follow their square's operands through the ring, and results leave from there (ns_tile.cuh). In AOL's pass raw
// sums, a box of each part a stage, take the operands' place.
//
// The blocks are persistent. Each cluster draws squares of the chain, in an order in which a square depends on earlier ones only:
// what it waits for has been drawn by a cluster that is running, whatever else occupies the device.
//
// Symmetric results: only squares on and below the diagonal exist; boxes are also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_tile.cuh"
#include "llmc/cuda/tensor_map.cuh"

enum {
    FETCH_REGISTERS = 40, // 128 * 40 + 256 * 232 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 232,
    CLUSTER = 2,
    DRAW_BEFORE = 2,              // stages of a square that are fetched after the next one is drawn
    ANNOUNCE_AFTER = 1,           // stage of the next square, with whose products under way a group waits for its stores
    WARPS = GROUPS * GROUP / WARP // that multiply, in a block
};

#if HOPPER

// ---- squares and tasks -----------------------------------------------------------------------------------------------------

// Square `index` of the chain, as the part in its first row of boxes.
static __device__ __forceinline__ Part find_square(const Chain &c, int index)
{
    Part t = {};
    int first = index / (c.together * c.squares) * c.together, count = min(c.together, c.batch - first),
        rest = index - first * c.squares, i, j;
    while (rest >= c.task[t.task].squares * count) rest -= c.task[t.task++].squares * count;
    const Task &w = c.task[t.task];
    int matrix = rest / w.squares;
    t.square = rest - matrix * w.squares;
    t.matrix = first + matrix;
    if (is_symmetric(w))
        triangle_position(t.square, i, j);
    else
        j = t.square / w.row_squares, i = t.square - j * w.row_squares; // neighbours share the tall operand's columns
    t.on_diagonal = i == j && is_symmetric(w);
    t.row = SQUARE_PARTS * i;
    t.col = SQUARE_PARTS * j;
    return t;
}

// The row of the part that a group of a block has. On the diagonal a part has one to four boxes below it: each block gets five.
static __device__ __forceinline__ int part_row(const Part &square, int rank, int group)
{
    if (square.on_diagonal) return square.row + (group ? SQUARE_PARTS - 1 - rank : rank);
    return square.row + GROUPS * rank + group;
}

// On the diagonal of a product of a tensor with itself, the rows of a are among those of b, and a is not fetched.
static __device__ __forceinline__ bool a_is_in_b(const Task &w, const Part &t) { return w.square && t.on_diagonal; }

// Of operands, or of raw sums, a box of each part at a time.
static __device__ __forceinline__ int stages_of(const Task &w)
{
    return w.kind == TASK_AOL ? SQUARE / BOX_SIDE : (w.depth + DEPTH - 1) / DEPTH;
}

// One thread: waits until the tasks that this one depends on are done for the part's matrix. What the copy unit wrote then is for
// the copy unit to read, too.
static __device__ __forceinline__ void wait_for_tasks(const Chain &c, const Part &t)
{
    for (uint32_t waits = c.task[t.task].waits; waits; waits &= waits - 1) {
        int task = __ffs((int)waits) - 1;
        const unsigned *done = c.done + task * c.batch + t.matrix;
        while (load_acquire(done) < (unsigned)(SQUARE_PARTS * c.task[task].squares)) __nanosleep(20);
    }
    copy_unit_fence_all();
}

// A position in a ring of SIZE places.
template <int SIZE> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

// ---- tickets ---------------------------------------------------------------------------------------------------------------

// The fetching threads: that of the cluster's first block draws and tells both which square comes next; the last one told of is
// beyond the last.
static __device__ __forceinline__ void hand_out(const SharedMemory &m, Ring<TICKETS> &ring, unsigned index)
{
    barrier_wait(m.taken(ring.stage), ring.parity ^ 1);
    for (int rank = 0; rank < CLUSTER; rank++) send_word(m.ticket(ring.stage), index, m.drawn(ring.stage), rank);
    ring.advance();
}
static __device__ __forceinline__ int take_ticket(const SharedMemory &m, Ring<TICKETS> &ring)
{
    barrier_wait(m.drawn(ring.stage), ring.parity);
    int index = *(volatile uint32_t *)m.ticket(ring.stage);
    barrier_arrive_at(m.taken(ring.stage), 0);
    ring.advance();
    return index;
}

// What they tell the groups of their block: the square, task -1 after the last.
static __device__ __forceinline__ void tell_part(const SharedMemory &m, Ring<TICKETS> &ring, const Part &t)
{
    barrier_wait(m.heard(ring.stage), ring.parity ^ 1);
    *m.part(ring.stage) = t;
    barrier_arrive(m.told(ring.stage));
    ring.advance();
}
static __device__ __forceinline__ Part hear_part(const SharedMemory &m, Ring<TICKETS> &ring, int rank, int group)
{
    barrier_wait(m.told(ring.stage), ring.parity);
    Part t = *m.part(ring.stage);
    t.row = part_row(t, rank, group);
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(m.heard(ring.stage));
    ring.advance();
    return t;
}

// ---- fetching ------------------------------------------------------------------------------------------------------------

// What a block fetches of a square's operands at each depth: its rows of a, and its half of b's columns for both blocks. What
// does not depend on the depth is found once: a ring of four stages leaves little time between the release of a place and its
// use.
struct Operands {
    const Task &w;
    int a_row[GROUPS]; // of a, where the boxes of this block begin: elements
    int b_at;          // the same of b, for the first of two boxes
    int matrix;
    bool a_wanted;
    uint32_t bytes; // that arrive at each block, from both
};
static __device__ __forceinline__ Operands operands_of(const Task &w, const Part &t, int rank)
{
    Operands o = {w, {}, (t.col + 2 * rank) * BOX_SIDE, t.matrix, !a_is_in_b(w, t)};
#pragma unroll
    for (int i = 0; i < GROUPS; i++) o.a_row[i] = part_row(t, rank, i) * BOX_SIDE;
    o.bytes = o.a_wanted ? STAGE_BYTES : STAGE_BYTES - A_BYTES;
    return o;
}

// Depth k to k + 63.
static __device__ __forceinline__ void fetch_operands(const SharedMemory &m, const Operands &o, int stage, int k, int rank)
{
    uint64_t *full = m.full(stage);
    uint8_t *b = m.b(stage) + 2 * rank * BOX_BYTES;
    const uint16_t both = 3;
    bool along = o.w.kind == TASK_FULL;
    int x = along ? o.b_at : k, y = along ? k : o.b_at;
    barrier_arrive_expect(full, o.bytes);
    tile_load(b, &o.w.b, full, x, y, o.matrix, both);
    tile_load(b + BOX_BYTES, &o.w.b, full, along ? x + BOX_SIDE : x, along ? y : y + BOX_SIDE, o.matrix, both);
    if (!o.a_wanted) return;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) tile_load_own(m.a(stage) + i * BOX_BYTES, &o.w.a, full, k, o.a_row[i], o.matrix);
}

// Of a symmetric result nothing above the diagonal is.
static __device__ __forceinline__ bool addend_wanted(const Task &w, const Part &t, int half, int rank, int i)
{
    return !is_symmetric(w) || t.col + 2 * half + i % 2 <= part_row(t, rank, i / 2);
}

// One half of d's part of the square, for this block's groups: two boxes side by side for the first, then for the second. Without
// d only the place for them.
static __device__ __forceinline__ void fetch_addend(const SharedMemory &m, const Task &w, const Part &t, int stage, int half,
                                                    int rank)
{
    uint64_t *full = m.full(stage);
    int boxes = 0;
    for (int i = 0; w.has_d && i < 2 * GROUPS; i++) boxes += addend_wanted(w, t, half, rank, i);
    if (boxes == 0) {
        barrier_arrive(full);
        return;
    }
    barrier_arrive_expect(full, (uint32_t)(boxes * BOX_BYTES));
    for (int i = 0; i < 2 * GROUPS; i++)
        if (addend_wanted(w, t, half, rank, i))
            tile_load_own(m.a(stage) + i * BOX_BYTES, &w.d, full, (t.col + 2 * half + i % 2) * BOX_SIDE,
                          part_row(t, rank, i / 2) * BOX_SIDE, t.matrix);
}

// The raw sums of box `box` of the groups' parts. Above the diagonal there may be nothing.
static __device__ __forceinline__ void fetch_raw(const SharedMemory &m, const Task &w, const Part &t, int stage, int box,
                                                 int rank)
{
    uint64_t *full = m.full(stage);
    bool wanted[GROUPS];
    uint32_t bytes = 0;
    for (int i = 0; i < GROUPS; i++) {
        int row = part_row(t, rank, i);
        wanted[i] = t.col + box <= row && row * BOX_SIDE < w.rows;
        bytes += wanted[i] ? RAW_BYTES : 0;
    }
    if (bytes == 0)
        barrier_arrive(full);
    else
        barrier_arrive_expect(full, bytes);
    for (int i = 0; i < GROUPS; i++)
        if (wanted[i])
            bulk_load(m.a(stage) + i * RAW_BYTES, raw_place(w, t, part_row(t, rank, i)) + box * RAW_BYTES / sizeof(float4), full,
                      RAW_BYTES);
}

static __device__ __forceinline__ int items_after(const Task &w) { return w.kind == TASK_RAW ? 0 : 2; }

// The next square is drawn when the last few stages of this one are about to be fetched: early enough for its number to be there
// in time, and late enough for clusters that are behind to draw less.
static __device__ __forceinline__ void fetch_square(const SharedMemory &m, const Chain &c, Ring<STAGES> &ring,
                                                    Ring<TICKETS> &handed, const Part &t, int rank)
{
    const Task &w = c.task[t.task];
    int stages = stages_of(w), draw_at = max(0, stages - DRAW_BEFORE);
    unsigned drawn = 0;
    wait_for_tasks(c, t);
    Operands o = operands_of(w, t, rank);
    for (int i = 0; i < stages; i++, ring.advance()) {
        if (rank == 0 && i == draw_at) drawn = atomicAdd(c.ticket, 1);
        barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
        if (w.kind == TASK_AOL)
            fetch_raw(m, w, t, ring.stage, i, rank);
        else
            fetch_operands(m, o, ring.stage, i * DEPTH, rank);
    }
    if (rank == 0) hand_out(m, handed, drawn);
    for (int half = 0; half < items_after(w); half++, ring.advance()) {
        barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
        fetch_addend(m, w, t, ring.stage, half, rank);
    }
}

// One thread of each block runs this.
static __device__ __forceinline__ void fetch_squares(const SharedMemory &m, const Chain &c, int rank)
{
    Ring<STAGES> ring;
    Ring<TICKETS> handed, taken, told;
    Part t = {};
    if (rank == 0) hand_out(m, handed, atomicAdd(c.ticket, 1));
    for (int index; (index = take_ticket(m, taken)) < c.total;) {
        t = find_square(c, index);
        tell_part(m, told, t);
        fetch_square(m, c, ring, handed, t, rank);
    }
    t.task = -1;
    tell_part(m, told, t);
}

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Where a group stands. Its registers of sums are not part of it: where kinds of tasks share them, the compiler makes products
// wait for each other.
struct Place {
    const SharedMemory &m;
    const Chain &c;
    Ring<STAGES> ring;
    Desk desk;
    int rank;
    // Of the leader, what the last part leaves to do: the stage of its first item, and its counter. Negative, NULL: nothing.
    int items;
    unsigned *counter;
};

// Tells both blocks, which write into this stage, that a warp has read it.
static __device__ __forceinline__ void release(const Place &p, int stage)
{
    int lane = threadIdx.x % WARP;
    if (lane < CLUSTER) barrier_arrive_at(p.m.empty(stage), lane);
}

// The leader: the last part's items go back, as soon as the copy unit has read them.
static __device__ __forceinline__ void return_items(Place &p)
{
    if (!p.desk.leader || p.items < 0) return;
    stores_wait_read();
    for (int i = 0; i < 2; i++)
        for (int rank = 0; rank < CLUSTER; rank++) barrier_arrive_at(p.m.empty((p.items + i) % STAGES), rank, GROUP / WARP);
    p.items = -1;
}

// The leader: the last part is announced, as soon as all of it is in global memory. Others of the group have written theirs
// before they met the leader at the desk.
static __device__ __forceinline__ void announce(Place &p)
{
    if (!p.desk.leader || !p.counter) return;
    stores_wait();
    copy_unit_fence_all();
    add_release(p.counter, 1);
    p.counter = NULL;
}
static __device__ __forceinline__ void settle(Place &p) { return_items(p), announce(p); }

static __device__ __forceinline__ void wait_for_fetch(const Place &p) { barrier_wait(p.m.full(p.ring.stage), p.ring.parity); }

// One stage's products are begun, for the first COLS columns; those of the stage before are over. a_bytes: where the
// part's rows of a begin; previous: the stage before, negative if there is none.
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void multiply_stage(float (&sum)[SQUARE / 2], Place &p, int a_bytes, int &previous)
{
    constexpr int b_step = ALONG_COLUMNS ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    wait_for_fetch(p);
    uint64_t a = operand(p.m.a(p.ring.stage) + a_bytes, 0), b = operand(p.m.b(p.ring.stage), ALONG_COLUMNS ? BOX_BYTES : 0);
    products_begin();
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++)
        warpgroup_product<T, ALONG_COLUMNS, COLS>(sum, operand_advance(a, 32 * k), operand_advance(b, b_step * k),
                                                  previous >= 0 || k > 0);
    products_commit();
    if (previous >= 0) {
        products_wait<1>();
        release(p, previous);
    }
    previous = p.ring.stage;
    p.ring.advance();
}

// sum = the part's products, in the layout of warpgroup_product. ALONG_COLUMNS: b is stored (depth, cols).
template <typename T, bool ALONG_COLUMNS, int COLS>
static __device__ __forceinline__ void multiply_cols(float (&sum)[SQUARE / 2], Place &p, int blocks, int a_bytes)
{
    int previous = -1;
    // Nothing to multiply yet: others may be waiting for the last part.
    if (p.desk.leader && !barrier_complete(p.m.full(p.ring.stage), p.ring.parity)) settle(p);
    __syncwarp();
    for (int i = 0; i < blocks; i++) {
        multiply_stage<T, ALONG_COLUMNS, COLS>(sum, p, a_bytes, previous);
        if (i == 0) return_items(p);
        if (i == ANNOUNCE_AFTER) announce(p);
        if (i <= ANNOUNCE_AFTER) __syncwarp();
    }
    products_wait<0>();
    products_done(sum);
    release(p, previous);
    announce(p);
    __syncwarp();
}

// Of symmetric results only the columns up to the diagonal are wanted.
template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void multiply(float (&sum)[SQUARE / 2], Place &p, const Task &w, const Part &t)
{
    int blocks = stages_of(w), boxes = t.row - t.col + 1,
        a_bytes = a_is_in_b(w, t) ? A_BYTES + (t.row - t.col) * BOX_BYTES : p.desk.group * BOX_BYTES;
    if (ALONG_COLUMNS || boxes >= 4)
        multiply_cols<T, ALONG_COLUMNS, 256>(sum, p, blocks, a_bytes);
    else if (boxes == 3)
        multiply_cols<T, false, 192>(sum, p, blocks, a_bytes);
    else if (boxes == 2)
        multiply_cols<T, false, 128>(sum, p, blocks, a_bytes);
    else
        multiply_cols<T, false, 64>(sum, p, blocks, a_bytes);
}

// The same steps for a part that is not wanted.
static __device__ __forceinline__ void pass_over(Place &p, int items)
{
    for (; items > 0; items--, p.ring.advance()) {
        wait_for_fetch(p);
        release(p, p.ring.stage);
    }
}

// ---- whole parts -----------------------------------------------------------------------------------------------------------

// Takes the next item, which is half `half` of the part, and returns the group's boxes of it.
static __device__ __forceinline__ uint8_t *take_item(Place &p, Items &items, int half)
{
    wait_for_fetch(p);
    items.stage[half] = p.m.a(p.ring.stage);
    p.ring.advance();
    return items.boxes(half);
}

// What lies in the items and in packed leaves.
template <typename T, bool SYMMETRIC>
static __device__ __forceinline__ void send_all(const uint32_t (&packed)[64], const Items &items, Place &p, const Task &w,
                                                const Part &t)
{
    send_part<T>(packed, items, p.desk, w, t);
    if (SYMMETRIC && is_symmetric(w)) send_mirrored(packed, items, p.desk, w, t);
}

template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void product_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2];
    multiply<T, ALONG_COLUMNS>(sum, p, w, t);
    p.items = p.ring.stage;
    uint32_t packed[64];
    Items items = {{}, p.desk.group};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint8_t *boxes = take_item(p, items, half);
        if (w.has_d)
            combine<T, true>(packed + 32 * half, sum + 64 * half, boxes, w.alpha, w.beta);
        else
            combine<T, false>(packed + 32 * half, sum + 64 * half, NULL, w.alpha, 0);
        put_blocks<HALF_COLS>(packed + 32 * half, boxes);
    }
    if (!ALONG_COLUMNS && w.kind == TASK_SCALED) {
        // Complete before the operands were: AOL's pass wrote them together with the matrix that is multiplied.
        read_scales(p.desk, w, t);
        send_scaled<T>(packed, items, p.desk, w, t); // meets at the desk before the scales of the next part
    } else {
        send_all<T, !ALONG_COLUMNS>(packed, items, p, w, t);
    }
}

template <typename T> static __device__ __forceinline__ void raw_part(Place &p, const Task &w, const Part &t)
{
    float sum[SQUARE / 2];
    multiply<T, false>(sum, p, w, t);
    read_units(p.desk, w, t); // after all have read the scales of the part before: they met at the desk since
    write_raw(sum, p.desk, w, t);
}

template <typename T> static __device__ __forceinline__ void aol_part(Place &p, const Task &w, const Part &t)
{
    uint32_t packed[64];
    if (p.desk.leader) return_items(p);
    if (p.desk.leader && !barrier_complete(p.m.full(p.ring.stage), p.ring.parity)) announce(p); // others may be waiting for it
    __syncwarp();
    wait_for_fetch(p); // the sums are complete like the first box
    read_aol_scales(p.desk, w, t);
#pragma unroll
    for (int i = 0; i < 4; i++, p.ring.advance()) {
        wait_for_fetch(p);
        scale_raw<T>(packed + 16 * i, p.m.a(p.ring.stage) + p.desk.group * RAW_BYTES, p.desk, i);
        __syncwarp();
        release(p, p.ring.stage);
    }
    if (p.desk.leader) announce(p);
    __syncwarp();
    p.items = p.ring.stage;
    Items items = {{}, p.desk.group};
#pragma unroll
    for (int half = 0; half < 2; half++) put_blocks<HALF_COLS>(packed + 32 * half, take_item(p, items, half));
    send_all<T, true>(packed, items, p, w, t); // meets at the desk before the scales of the next part
}

template <typename T>
static __device__ __forceinline__ void compute_parts(const SharedMemory &m, const Chain &c, int group, int rank)
{
    Place p = {m, c, {}, {m.desk(group), m.scales(group), group, threadIdx.x % GROUP == 0}, rank, -1, NULL};
    Ring<TICKETS> heard;
    for (Part t; (t = hear_part(m, heard, rank, group)).task >= 0;) {
        const Task &w = c.task[t.task];
        if (t.row * BOX_SIDE >= w.rows) {
            settle(p);
            pass_over(p, stages_of(w) + items_after(w));
        } else if (w.kind == TASK_FULL) {
            product_part<T, true>(p, w, t);
        } else if (w.kind == TASK_AOL) {
            aol_part<T>(p, w, t);
        } else if (w.kind == TASK_RAW) {
            raw_part<T>(p, w, t);
        } else {
            product_part<T, false>(p, w, t);
        }
        p.counter = w.awaited ? c.done + t.task * c.batch + t.matrix : NULL;
    }
    settle(p);
    if (p.desk.leader) stores_wait();
}

// The last block of the grid resets the counters for the next chain. One warp.
static __device__ __forceinline__ void reset_counters(const Chain &c)
{
    unsigned last = 0;
    if (threadIdx.x % WARP == 0) {
        __threadfence();
        last = atomicInc(c.finished, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    if (threadIdx.x % WARP == 0) *c.ticket = 0;
    for (int i = threadIdx.x % WARP; i < c.counters; i += WARP) c.done[i] = 0;
}

#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T> __global__ void __launch_bounds__(THREADS, 1) chain_kernel(const __grid_constant__ Chain c)
{
#if HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / GROUP; // group 2 fetches and draws
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), CLUSTER * WARPS);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.drawn(i), 1), barrier_init(m.taken(i), CLUSTER);
        for (int i = 0; i < TICKETS; i++) barrier_init(m.told(i), 1), barrier_init(m.heard(i), WARPS);
        barrier_init_fence();
    }
    launch_dependents();
    cluster_sync(); // the barriers are ready
    wait_for_predecessors();
    if (group < GROUPS) {
        registers_grow<COMPUTE_REGISTERS>();
        compute_parts<T>(m, c, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        if (threadIdx.x / WARP == GROUPS * GROUP / WARP && elect_lane()) fetch_squares(m, c, rank);
        __syncwarp();
    }
    cluster_sync_at_end(); // others may still arrive at this block's barriers
    __syncthreads();
    if (threadIdx.x < WARP) reset_counters(c);
#endif
}

CUtensorMap ns_tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch)
{
    CUtensorMap map;
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch},
               strides[2] = {(cuuint64_t)pitch * 2, (cuuint64_t)stride * 2};
    cuuint32_t box[3] = {BOX_SIDE, BOX_SIDE, 1}, steps[3] = {1, 1, 1};
    static EncodeTiled encode;
    if (!encode && !(encode = tensor_map_encoder()))
        fatal(EXIT_BAD_INPUT, "the driver has no cuTensorMapEncodeTiled: update it to one for CUDA 12.0 or later");
    CUtensorMapDataType type = dtype == NS_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUresult r = encode(&map, type, 3, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch,
              (int)r);
    return map;
}

static int clusters_held[2]; // by dtype: that the device holds at a time, 0: not asked yet

void ns_forget_device(void) { clusters_held[NS_BF16] = clusters_held[NS_FP16] = 0; }

template <typename T> static void launch(cudaStream_t s, const Chain &c, int &clusters)
{
    auto kernel = chain_kernel<T>;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = s;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (!clusters) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        if (clusters < 1) fatal(EXIT_BAD_INPUT, "CUDA: this device holds no cluster of %d blocks", (int)CLUSTER);
    }
    config.gridDim = dim3((unsigned)(CLUSTER * min_i64(c.total, clusters)));
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, c));
}

void ns_launch_chain(cudaStream_t s, NsDtype dtype, const Chain &c)
{
    if (dtype == NS_BF16)
        launch<__nv_bfloat16>(s, c, clusters_held[dtype]);
    else
        launch<__half>(s, c, clusters_held[dtype]);
}
