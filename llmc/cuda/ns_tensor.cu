// Newton-Schulz products on Hopper's tensor memory accelerator (TMA) and warpgroup products (wgmma), for bf16 and fp16.
//
// One block occupies a multiprocessor and computes tiles of 128 x 128. A group of 128 threads fetches operand tiles of depth 64 ahead,
// through a ring of STAGES; two more take turns: one multiplies a tile while the other writes its last one. Each of the two has a desk,
// shared memory for one tile: the copy unit lays d's tile there during the products, the sums are added in place, and the copy unit
// takes the result away during the next tile. No thread waits for global memory then, which took longer than the products.
// The blocks are persistent: each takes every so-many-th tile of all matrices of the batch.
// Four blocks form a cluster and compute 2 x 2 neighbouring tiles. Each operand tile is needed by two of them: each fetches half of
// it and the hardware delivers it to both, which halves the reads from L2. Without it they, not the products, set the pace: a tile of
// 128 x 128 does 64 operations for each byte, and some 7.5 TB/s come out of that cache.
// Symmetric results: only tiles on and below the diagonal exist; a tile is also written transposed, and on the diagonal the
// elements below it are copied above, which makes the result symmetric to the last bit.
#include "llmc/cuda/ns_internal.cuh"
#include "llmc/cuda/ns_wgmma.cuh"

enum {
    SIDE = 128,           // of a tile
    DEPTH = 64,           // of a stage: 128 bytes, the width of the swizzle
    STAGES = 5,           // 160 KB
    GROUP = 128,          // threads of a warpgroup
    HALF = 64,            // of a tile: the copy unit moves boxes of 64 rows of 128 bytes
    THREADS = 3 * GROUP,
    FETCH_REGISTERS = 24, // 128 * 24 + 256 * 240 = 384 * 168, which is what a block starts with
    COMPUTE_REGISTERS = 240,
    CLUSTER = 4,
    OPERAND_BYTES = SIDE * DEPTH * 2,
    BOX_BYTES = HALF * 128,
    BOXES = 4, // of a desk
    DESK_BYTES = BOXES * BOX_BYTES,
    SHARED_BYTES = STAGES * 2 * OPERAND_BYTES + 2 * DESK_BYTES + (2 * STAGES + 2) * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");

// What the kernel needs beside its tensor maps.
struct TileWork {
    void *out;
    int64_t out_stride;
    int out_pitch, rows, cols, depth;
    float alpha, beta;
    int row_squares, squares_each, squares; // squares of 2 x 2 tiles: in a column, in a matrix, in the batch
    bool out_boxes;                         // the copy unit can write out: its rows and matrices start on 16 bytes
};

// Of the operands, d and out; valid where they are used.
struct TileMaps {
    CUtensorMap a, b, d, out;
};

__global__ void hopper_probe_kernel(int *compiled_in) { *compiled_in = NS_HOPPER; }

#if NS_HOPPER

// A tile by its place in the matrix, in units of tiles.
struct Tile {
    int matrix, i, j;
    bool wanted; // false: outside of the matrix or above the diagonal; its block still fetches for the others
};

// The tile of this block in square `index`.
template <ProductForm FORM> static __device__ __forceinline__ Tile find_tile(const TileWork &w, int index, int rank)
{
    Tile t;
    t.matrix = index / w.squares_each;
    int rest = index - t.matrix * w.squares_each;
    if (FORM == PRODUCT_FULL)
        t.j = rest / w.row_squares, t.i = rest - t.j * w.row_squares; // neighbours share the tall operand's columns
    else
        triangle_position(rest, t.i, t.j);
    t.i = 2 * t.i + rank / 2;
    t.j = 2 * t.j + rank % 2;
    t.wanted = t.i * SIDE < w.rows && t.j * SIDE < w.cols && (FORM == PRODUCT_FULL || t.i >= t.j);
    return t;
}

// A position in the ring of stages.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void advance(int steps)
    {
        stage += steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

struct SharedMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * 2 * OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *desk(int group) const { return base + STAGES * 2 * OPERAND_BYTES + group * DESK_BYTES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)desk(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
    __device__ __forceinline__ uint64_t *desk_full(int group) const { return full(2 * STAGES) + group; }
};

// ---- fetching ------------------------------------------------------------------------------------------------------------

// One thread of each block runs this. Operand tiles come in halves of 64 rows (or columns): a's half rank % 2 for the two blocks of
// the same i, b's half rank / 2 for the two of the same j.
template <ProductForm FORM>
static __device__ __forceinline__ void fetch_tiles(const SharedMemory &m, const TileMaps &maps, const TileWork &w, int rank)
{
    Ring ring;
    int row = rank / 2, col = rank % 2;
    uint16_t same_row = (uint16_t)(3 << 2 * row), same_col = (uint16_t)(5 << col);
    for (int index = blockIdx.x / CLUSTER; index < w.squares; index += gridDim.x / CLUSTER) {
        Tile t = find_tile<FORM>(w, index, rank);
        int a_row = t.i * SIDE + col * HALF, b_at = t.j * SIDE + row * HALF;
        for (int k = 0; k < w.depth; k += DEPTH) {
            uint64_t *full = m.full(ring.stage);
            barrier_wait(m.empty(ring.stage), ring.parity ^ 1);
            barrier_arrive_expect(full, 2 * OPERAND_BYTES); // what the others send counts too
            tile_load(m.a(ring.stage) + col * OPERAND_BYTES / 2, &maps.a, full, k, a_row, t.matrix, same_row);
            uint8_t *b = m.b(ring.stage) + row * OPERAND_BYTES / 2;
            if (FORM == PRODUCT_FULL)
                tile_load(b, &maps.b, full, b_at, k, t.matrix, same_col);
            else
                tile_load(b, &maps.b, full, k, b_at, t.matrix, same_col);
            ring.advance();
        }
    }
}

// ---- multiplying ---------------------------------------------------------------------------------------------------------

// Tells all that write into this stage of this block, itself and two others, that a warp has read it.
static __device__ __forceinline__ void release(const SharedMemory &m, int stage, int rank)
{
    int lane = threadIdx.x % WARP;
    if (lane < 3) barrier_arrive_at(m.empty(stage), rank ^ lane); // the same block, the one beside, the one below or above
}

// The groups multiply one after the other. This keeps the tensor cores on one tile at a time, and it is needed: the parity of a
// barrier tells a phase from the next one, not from the one after, so no group may wait for a stage that the other still has to read.
enum { DESK = 1, TURN = 3 }; // barriers 1 and 2 belong to the desks, 3 and 4 to the turns
static __device__ __forceinline__ void take_turn(int group) { group_sync(TURN + group, 2 * GROUP); }
static __device__ __forceinline__ void give_turn(int group) { group_arrive(TURN + group, 2 * GROUP); }

// sum (128, 128) = one tile; sum[h] has rows 64 h to 64 h + 63, in the layout of WarpgroupProduct.
// next_group: whose turn is next, negative when no tile is left.
template <typename T, ProductForm FORM>
static __device__ __forceinline__ void multiply_tile(float (&sum)[2][64], const SharedMemory &m, Ring &ring, int blocks, int rank, int next_group)
{
    constexpr bool along_columns = FORM == PRODUCT_FULL;
    constexpr int b_step = along_columns ? 16 * 128 : 32; // bytes from one 16 of the depth to the next
    int previous = 0;
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        uint64_t a = operand(m.a(ring.stage), 0), b = operand(m.b(ring.stage), along_columns ? OPERAND_BYTES / 2 : 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                WarpgroupProduct<T, along_columns>::run(sum[h], operand_advance(a, h * OPERAND_BYTES / 2 + 32 * k), operand_advance(b, b_step * k),
                                                        block + k > 0);
        products_commit();
        if (block > 0) {
            products_wait<1>();
            release(m, previous, rank);
        }
        previous = ring.stage;
        ring.advance();
    }
    if (next_group >= 0) give_turn(next_group);
    products_wait<0>();
    release(m, previous, rank);
}

// The same steps for a tile that is not wanted.
static __device__ __forceinline__ void pass_over_tile(const SharedMemory &m, Ring &ring, int blocks, int rank)
{
    for (int block = 0; block < blocks; block++) {
        barrier_wait(m.full(ring.stage), ring.parity);
        release(m, ring.stage, rank);
        ring.advance();
    }
}

// ---- writing -------------------------------------------------------------------------------------------------------------

template <typename T> static __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float lo, float hi) { return pack2(lo, hi); }
template <> __device__ __forceinline__ uint32_t pack<__half>(float lo, float hi)
{
    __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&h);
}
template <typename T> static __device__ __forceinline__ float2 unpack(uint32_t u)
{
    const T *v = reinterpret_cast<const T *>(&u);
    return make_float2(to_float(v[0]), to_float(v[1]));
}

// A desk holds a tile as BOXES boxes of 64 rows of 128 bytes, the chunks of 16 bytes swizzled as the copy unit does it: chunk c of row r
// at chunk c ^ r % 8. A tile of 16-bit elements is its four quarters, row by row.

// The group's first thread moves the boxes.
static __device__ __forceinline__ bool carries(void) { return threadIdx.x % GROUP == 0; }

// Makes the desk free for the next tile and sends for d's. The turn that is taken next lets the others know.
template <bool HAS_D>
static __device__ __forceinline__ void prepare_desk(const SharedMemory &m, const TileMaps &maps, const Tile &t, int group)
{
    if (carries()) {
        stores_wait_read();
        if (HAS_D) {
            uint64_t *full = m.desk_full(group);
            barrier_arrive_expect(full, DESK_BYTES);
            for (int q = 0; q < BOXES; q++)
                tile_load_own(m.desk(group) + q * BOX_BYTES, &maps.d, full, t.j * SIDE + q % 2 * HALF, t.i * SIDE + q / 2 * HALF, t.matrix);
        }
    }
    __syncwarp();
}

// Sends the desk's boxes to column x, row y of a matrix of out: boxes of `box_cols` columns, `across` beside each other.
static __device__ __forceinline__ void send_desk(const uint8_t *desk, const TileMaps &maps, const TileWork &w, int group, int x, int y, int z,
                                                 int box_cols, int across)
{
    copy_unit_fence();
    group_sync(DESK + group, GROUP);
    if (carries()) {
        for (int q = 0; q < BOXES; q++) {
            int box_x = x + q % across * box_cols, box_y = y + q / across * HALF;
            if (box_x < w.cols && box_y < w.rows) tile_store(&maps.out, desk + q * BOX_BYTES, box_x, box_y, z);
        }
        stores_commit();
    }
    __syncwarp();
}

// Waits until what was sent has left the desk.
static __device__ __forceinline__ void clear_desk(int group)
{
    if (carries()) stores_wait_read();
    __syncwarp();
    group_sync(DESK + group, GROUP);
}

// Where four blocks lie, two of 8 rows by two of 8 columns: step = 8 h + g / 2; `first` is the lane's row of the first step's.
static __device__ __forceinline__ uint32_t step_place(uint32_t first, int step)
{
    return (first ^ step % 4 << 5) + step / 4 * BOX_BYTES;
}

// packed = alpha sum + beta d as T, in this thread's place of each 8 x 8 block: block (row pair half h, warp, e; column g) in
// [32 h + 2 g + e]. The desk holds d before and the result after.
template <typename T, bool HAS_D>
static __device__ __forceinline__ void combine(uint32_t (&packed)[64], const float (&sum)[2][64], uint8_t *desk, const TileWork &w)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    uint32_t first = shared_address(desk) + (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    uint32_t d[2][4]; // one step ahead
    if (HAS_D) load_blocks(d[0], first);
#pragma unroll
    for (int step = 0; step < 16; step++) {
        uint32_t *to = packed + 4 * step;
        if (HAS_D && step < 15) load_blocks(d[(step + 1) % 2], step_place(first, step + 1));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *s = sum[step / 8] + step % 8 * 8 + 2 * k;
            float2 v = HAS_D ? unpack<T>(d[step % 2][k]) : make_float2(0, 0);
            to[k] = HAS_D ? pack<T>(w.alpha * s[0] + w.beta * v.x, w.alpha * s[1] + w.beta * v.y) : pack<T>(w.alpha * s[0], w.alpha * s[1]);
        }
        store_blocks(step_place(first, step), to);
    }
}

// The address of the mirror image of block (h, warp, 0; 0) for lanes 0 to 7, of the next three for the others: e = 1, then g = 1.
static __device__ __forceinline__ uint32_t mirrored_place(const uint8_t *desk)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(desk) + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
}

// The whole tile, transposed.
static __device__ __forceinline__ void write_mirrored(const uint32_t (&packed)[64], uint8_t *desk)
{
    uint32_t first = mirrored_place(desk);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int g = 0; g < 16; g += 2)
            store_transposed(first + (2 * (g / 8) + h) * BOX_BYTES + g % 8 * 1024, packed + 32 * h + 2 * g);
}

// An 8 x 8 block on the diagonal: what is above takes the bits of what is below.
static __device__ __forceinline__ uint32_t mirrored_block(uint32_t block)
{
    uint32_t t = block_transposed(block);
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    uint32_t low = row >= col ? block : t, high = row >= col + 1 ? block : t;
    return (low & 0xffffu) | (high & 0xffff0000u);
}

// A tile on the diagonal, which lies on the desk: what is below goes above.
static __device__ __forceinline__ void mirror_in_place(const uint32_t (&packed)[64], uint8_t *desk)
{
    int warp = threadIdx.x / WARP % 4;
    uint32_t first = mirrored_place(desk);
#pragma unroll
    for (int i = 0; i < 64; i++) {
        int h = i / 32, g = i / 2 % 16, e = i % 2, row = 8 * h + 2 * warp + e; // one for all lanes of a warp
        if (row < g) continue;
        uint32_t block = row == g ? mirrored_block(packed[i]) : packed[i];
        store_transposed_one((first ^ e << 4) + (2 * (g / 8) + h) * BOX_BYTES + g % 8 * 1024, block);
    }
}

// The tile on the desk, where rows of out start anywhere.
template <typename T>
static __device__ __forceinline__ void write_elements(const uint8_t *desk, const TileWork &w, const Tile &t, bool mirrored, int group)
{
    T *out = (T *)w.out + t.matrix * w.out_stride;
    group_sync(DESK + group, GROUP);
    int c = threadIdx.x % GROUP, col = t.j * SIDE + c;
    for (int r = 0; r < SIDE && t.i * SIDE + r < w.rows && col < w.cols; r++) {
        const uint8_t *chunk = desk + (2 * (r / HALF) + c / HALF) * BOX_BYTES + r % HALF * 128 + ((c % HALF / 8 ^ r % 8) << 4);
        T value = reinterpret_cast<const T *>(chunk)[c % 8];
        out[(int64_t)(t.i * SIDE + r) * w.out_pitch + col] = value;
        if (mirrored) out[(int64_t)col * w.out_pitch + t.i * SIDE + r] = value;
    }
    group_sync(DESK + group, GROUP);
}

template <typename T, bool SYMMETRIC, bool HAS_D>
static __device__ __forceinline__ void write_tile(const float (&sum)[2][64], uint8_t *desk, const TileMaps &maps, const TileWork &w, const Tile &t,
                                                  int group)
{
    bool diagonal = SYMMETRIC && t.i == t.j, mirrored = SYMMETRIC && !diagonal;
    uint32_t packed[64];
    combine<T, HAS_D>(packed, sum, desk, w);
    if (diagonal) {
        group_sync(DESK + group, GROUP);
        mirror_in_place(packed, desk);
    }
    if (!w.out_boxes) {
        write_elements<T>(desk, w, t, mirrored, group);
        return;
    }
    send_desk(desk, maps, w, group, t.j * SIDE, t.i * SIDE, t.matrix, HALF, 2);
    if (mirrored) {
        clear_desk(group);
        write_mirrored(packed, desk);
        send_desk(desk, maps, w, group, t.i * SIDE, t.j * SIDE, t.matrix, HALF, 2);
    }
}

// 64 rows of fp32 results from the desk, element by element: on and below the diagonal, and mirrored.
static __device__ __forceinline__ void write_elements_fp32(const uint8_t *desk, const TileWork &w, const Tile &t, int row0, int group)
{
    float *out = (float *)w.out + t.matrix * w.out_stride;
    int c = threadIdx.x % GROUP, col = t.j * SIDE + c;
    group_sync(DESK + group, GROUP);
    for (int r = max(0, col - row0); r < HALF && row0 + r < w.rows; r++) {
        float value = *reinterpret_cast<const float *>(desk + c / 32 * BOX_BYTES + r * 128 + ((c % 32 / 4 ^ r % 8) << 4) + c % 4 * 4);
        out[(int64_t)(row0 + r) * w.out_pitch + col] = value;
        out[(int64_t)col * w.out_pitch + row0 + r] = value;
    }
    group_sync(DESK + group, GROUP);
}

// fp32 results: 64 rows of the tile at a time, then 64 columns of its mirror image at a time.
static __device__ __forceinline__ void write_tile_fp32(float (&sum)[2][64], uint8_t *desk, const TileMaps &maps, const TileWork &w,
                                                       const Tile &t, int group)
{
    enum { COLS = 32 }; // of a box
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, row = lane / 4, pair = lane % 4;
    // Offsets on the desk of this thread's first elements, in the tile and in its mirror image; others differ in some bits.
    uint32_t first = (warp * 16 + row) * 128 + ((pair / 2 ^ row) << 4) + pair % 2 * 8;
    uint32_t first_mirrored = warp / 2 * BOX_BYTES + 2 * pair * 128 + (((warp % 2 * 4 + row / 4) ^ 2 * pair) << 4) + row % 4 * 4;
    bool boxes = w.out_boxes && t.i != t.j;
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i / 64][i % 64] *= w.alpha;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (h > 0) clear_desk(group);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int g = i / 2, e = i % 2;
            *reinterpret_cast<float2 *>(desk + (first ^ g % 4 << 5) + g / 4 * BOX_BYTES + e * 1024) =
                make_float2(sum[h][2 * i], sum[h][2 * i + 1]);
        }
        if (boxes)
            send_desk(desk, maps, w, group, t.j * SIDE, t.i * SIDE + h * HALF, t.matrix, COLS, 4);
        else
            write_elements_fp32(desk, w, t, t.i * SIDE + h * HALF, group);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!boxes) continue;
        clear_desk(group);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int g = i / 4, e = i / 2 % 2, odd = i % 2;
            *reinterpret_cast<float *>(desk + (first_mirrored ^ e << 5 ^ odd << 4) + odd * 128 + g / 8 * 2 * BOX_BYTES + g % 8 * 1024) = sum[h][i];
        }
        send_desk(desk, maps, w, group, t.i * SIDE + h * HALF, t.j * SIDE, t.matrix, COLS, 2);
    }
}

// Group `group` takes every second tile of the block.
template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
static __device__ __forceinline__ void compute_tiles(const SharedMemory &m, const TileMaps &maps, const TileWork &w, int group, int rank)
{
    Ring ring;
    int blocks = (w.depth + DEPTH - 1) / DEPTH, clusters = gridDim.x / CLUSTER;
    uint32_t desk_parity = 0;
    ring.advance(group * blocks);
    if (group == 1) give_turn(0);
    for (int index = blockIdx.x / CLUSTER + group * clusters; index < w.squares; index += 2 * clusters) {
        Tile t = find_tile<FORM>(w, index, rank);
        int next_group = index + clusters < w.squares ? 1 - group : -1;
        if (!t.wanted) {
            take_turn(group);
            pass_over_tile(m, ring, blocks, rank);
            if (next_group >= 0) give_turn(next_group);
        } else {
            float sum[2][64];
            prepare_desk<HAS_D>(m, maps, t, group);
            take_turn(group);
            multiply_tile<T, FORM>(sum, m, ring, blocks, rank, next_group);
            if (HAS_D) barrier_wait(m.desk_full(group), desk_parity), desk_parity ^= 1;
            if (!FP32_OUT)
                write_tile<T, FORM != PRODUCT_FULL, HAS_D>(sum, m.desk(group), maps, w, t, group);
            else
                write_tile_fp32(sum, m.desk(group), maps, w, t, group);
        }
        ring.advance(blocks);
    }
    if (carries()) stores_wait();
    __syncwarp();
}


#endif

// ---- kernel and launch ---------------------------------------------------------------------------------------------------

template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
__global__ void __launch_bounds__(THREADS, 1)
    tensor_kernel(const __grid_constant__ TileMaps maps, const TileWork w)
{
#if NS_HOPPER
    extern __shared__ __align__(1024) uint8_t shared[];
    SharedMemory m = {shared};
    int rank = cluster_rank(), group = threadIdx.x / GROUP; // 2: fetches
    if (threadIdx.x == 0) {
        if (shared_address(shared) % 1024) __trap(); // the swizzle counts from multiples of 1024 bytes
        for (int i = 0; i < STAGES; i++) barrier_init(m.full(i), 1), barrier_init(m.empty(i), 3 * GROUP / WARP);
        for (int i = 0; i < 2; i++) barrier_init(m.desk_full(i), 1);
        barrier_init_fence();
    } else if (threadIdx.x == 2 * GROUP) {
        tile_prefetch_map(&maps.a);
        tile_prefetch_map(&maps.b);
        if (HAS_D) tile_prefetch_map(&maps.d);
        if (w.out_boxes) tile_prefetch_map(&maps.out);
    }
    launch_dependents();
    cluster_sync(); // the barriers are ready
    wait_for_predecessors();
    if (group < 2) {
        registers_grow<COMPUTE_REGISTERS>();
        compute_tiles<T, FORM, FP32_OUT, HAS_D>(m, maps, w, group, rank);
    } else {
        registers_shrink<FETCH_REGISTERS>();
        if (threadIdx.x == 2 * GROUP) fetch_tiles<FORM>(m, maps, w, rank);
    }
    cluster_sync(); // others may still arrive at this block's barriers
#endif
}

bool ns_tensor_available(void)
{
    static int available = -1; // asked of the device once, before anything is captured
    if (available < 0) {
        int *flag = NULL, compiled_in = 0;
        if (device_state.compute == 90) {
            CUDA_CHECK(cudaMalloc(&flag, sizeof *flag));
            hopper_probe_kernel<<<1, 1>>>(flag);
            CHECK_LAUNCH();
            CUDA_CHECK(cudaMemcpy(&compiled_in, flag, sizeof compiled_in, cudaMemcpyDeviceToHost));
            CUDA_CHECK(cudaFree(flag));
        }
        available = compiled_in;
        if (device_state.compute == 90 && !available)
            note("compiled without Hopper's own instructions: Newton-Schulz takes its slow portable path; build with GPU_ARCH=90a");
    }
    return available;
}

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeTiled encode_function(void)
{
    static EncodeTiled function;
    if (!function) {
        void *address = NULL;
        cudaDriverEntryPointQueryResult found;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &found));
        if (found != cudaDriverEntryPointSuccess || !address)
            fatal(EXIT_BAD_INPUT, "the driver has no cuTensorMapEncodeTiled: update it to one for CUDA 12.0 or later");
        function = (EncodeTiled)address;
    }
    return function;
}

// Boxes of 64 rows of 128 bytes of a (batch, rows, cols) tensor; what lies outside of a matrix reads as zero and is not written.
static CUtensorMap tensor_map(NsDtype dtype, const void *base, int rows, int cols, int pitch, int64_t stride, int batch)
{
    CUtensorMap map;
    int size = (int)ns_element_size(dtype);
    cuuint64_t sizes[3] = {(cuuint64_t)cols, (cuuint64_t)rows, (cuuint64_t)batch};
    cuuint64_t strides[2] = {(cuuint64_t)pitch * size, (cuuint64_t)stride * size};
    cuuint32_t box[3] = {128u / size, HALF, 1}, steps[3] = {1, 1, 1};
    CUtensorMapDataType type = dtype == NS_BF16   ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                               : dtype == NS_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    CUresult r = encode_function()(&map, type, 3, (void *)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        fatal(EXIT_BAD_INPUT, "CUDA: no tensor map for %d matrices of %d x %d, pitch %d (error %d)", batch, rows, cols, pitch, (int)r);
    return map;
}

template <typename T, ProductForm FORM, bool FP32_OUT, bool HAS_D>
static void launch(cudaStream_t s, const TileMaps &maps, const TileWork &w)
{
    static int clusters; // that the device holds at a time: more would wait for a whole first round
    auto kernel = tensor_kernel<T, FORM, FP32_OUT, HAS_D>;
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
    config.gridDim = dim3((unsigned)(CLUSTER * min_i64(w.squares, clusters)));
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, maps, w));
}

template <typename T>
static void launch_form(cudaStream_t s, ProductForm form, bool fp32_out, bool has_d, const TileMaps &maps, const TileWork &w)
{
    if (form == PRODUCT_GRAM && fp32_out)
        launch<T, PRODUCT_GRAM, true, false>(s, maps, w);
    else if (form == PRODUCT_FULL && has_d)
        launch<T, PRODUCT_FULL, false, true>(s, maps, w);
    else if (form == PRODUCT_FULL)
        launch<T, PRODUCT_FULL, false, false>(s, maps, w);
    else if (has_d) // a Gram matrix is a symmetric product whose b is a
        launch<T, PRODUCT_SYMMETRIC, false, true>(s, maps, w);
    else
        launch<T, PRODUCT_SYMMETRIC, false, false>(s, maps, w);
}

void ns_tensor_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype, const Product &p)
{
    bool full = form == PRODUCT_FULL;
    int64_t row_squares = ceil_div(p.rows, 2 * SIDE), col_squares = ceil_div(p.cols, 2 * SIDE);
    int64_t each = full ? row_squares * col_squares : row_squares * (row_squares + 1) / 2;
    if (each * p.batch > INT32_MAX)
        fatal(EXIT_BAD_INPUT, "Newton-Schulz: %d matrices of %d x %d at once are too many; set a batch limit", p.batch, p.rows, p.cols);
    bool out_boxes = p.out_pitch % 8 == 0 && p.out_stride % 8 == 0 && (uintptr_t)p.out % 16 == 0;
    TileWork w = {p.out, p.out_stride, p.out_pitch, p.rows, p.cols, p.depth, p.alpha, p.beta, (int)row_squares, (int)each,
                  (int)(each * p.batch), out_boxes};
    TileMaps maps = {};
    maps.a = tensor_map(dtype, p.a, p.rows, p.depth, p.a_pitch, p.a_stride, p.batch);
    maps.b = full ? tensor_map(dtype, p.b, p.depth, p.cols, p.b_pitch, p.b_stride, p.batch)
                  : tensor_map(dtype, p.b, p.cols, p.depth, p.b_pitch, p.b_stride, p.batch);
    if (p.d) maps.d = tensor_map(dtype, p.d, p.rows, p.cols, p.d_pitch, p.d_stride, p.batch);
    if (out_boxes) maps.out = tensor_map(out_dtype, p.out, p.rows, p.cols, p.out_pitch, p.out_stride, p.batch);
    if (dtype == NS_BF16)
        launch_form<__nv_bfloat16>(s, form, out_dtype == NS_FP32, p.d, maps, w);
    else
        launch_form<__half>(s, form, out_dtype == NS_FP32, p.d, maps, w);
}
