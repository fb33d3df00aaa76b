// What becomes of a finished tile: scaling, rounding, mirroring, and the way to global memory.
//
// Each of the two multiplying groups has a desk, shared memory for one tile of 16-bit elements, and a clerk, one thread of the
// third group. The clerk lays d's tile on the desk; the group adds its sums in place and hands the desk over; the clerk sends the
// tile away and gives the desk back, to the same tile once more if it is needed transposed or with the diagonal. When all has
// arrived it announces the tile. So no thread that multiplies waits for global memory.
//
// A desk holds four boxes of 64 rows of 128 bytes, the quarters of the tile row by row, the chunks of 16 bytes swizzled as the
// copy unit does it: chunk c of row r at chunk c ^ r % 8.
#pragma once
#include "llmc/cuda/ns_chain.cuh"

enum {
    DEPTH = 64,  // of a stage: 128 bytes, the width of the swizzle
    STAGES = 5,  // 160 KB
    GROUP = 128, // threads of a warpgroup
    HALF = 64,   // of a tile: the copy unit moves boxes of 64 rows of 128 bytes
    THREADS = 3 * GROUP,
    OPERAND_BYTES = TILE_SIDE * DEPTH * 2,
    BOX_BYTES = HALF * 128,
    BOXES = 4, // of a desk
    DESK_BYTES = BOXES * BOX_BYTES,
    SCALE_BYTES = 2 * TILE_SIDE * 4, // of a group: scales of the tile's rows and columns
    BARRIERS = 2 * STAGES + 6,
    SHARED_BYTES = STAGES * 2 * OPERAND_BYTES + 2 * DESK_BYTES + 2 * SCALE_BYTES + BARRIERS * 8
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");
enum { DESK_BARRIER = 1, TURN_BARRIER = 3 }; // 1 and 2 belong to the desks, 3 and 4 to the turns

// A tile by its place in the matrix, in units of tiles.
struct Tile {
    int task, matrix, i, j;
    bool wanted; // false: outside of the matrix or above the diagonal; its block still fetches for the others
};

#if NS_HOPPER

struct SharedMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * 2 * OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + OPERAND_BYTES; }
    __device__ __forceinline__ uint8_t *desk(int group) const { return base + STAGES * 2 * OPERAND_BYTES + group * DESK_BYTES; }
    __device__ __forceinline__ float *scales(int group) const { return (float *)(desk(2) + group * SCALE_BYTES); }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)scales(2) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
    // d has arrived; the group has written; the group may write
    __device__ __forceinline__ uint64_t *desk_full(int group) const { return full(2 * STAGES) + group; }
    __device__ __forceinline__ uint64_t *desk_ready(int group) const { return full(2 * STAGES + 2) + group; }
    __device__ __forceinline__ uint64_t *desk_free(int group) const { return full(2 * STAGES + 4) + group; }
};

// How often the desk changes hands for a tile.
static __device__ __forceinline__ int tile_puts(const Task &w, const Tile &t)
{
    if (w.kind != TASK_SYMMETRIC && w.kind != TASK_AOL) return 1;
    return t.i != t.j || w.has_plus ? 2 : 1; // transposed, or on the diagonal once more with it
}

// ---- the desk: the group's side ------------------------------------------------------------------------------------------

static __device__ __forceinline__ void desk_sync(int group) { group_sync(DESK_BARRIER + group, GROUP); }

// A group and its desk: the phases of the desk's barriers that this thread has passed.
struct Desk {
    uint8_t *base;
    float *scales;
    uint64_t *full, *ready, *free;
    int group;
    uint32_t full_phase, free_phase;

    __device__ __forceinline__ void wait_full() { barrier_wait(full, full_phase), full_phase ^= 1; }
    __device__ __forceinline__ void wait_free() { barrier_wait(free, free_phase), free_phase ^= 1; }
    __device__ __forceinline__ void hand_over()
    {
        copy_unit_fence();
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(ready);
    }
};

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

// Where four blocks lie, two of 8 rows by two of 8 columns: step = 8 h + g / 2; `first` is the lane's row of the first step's.
static __device__ __forceinline__ uint32_t step_place(uint32_t first, int step)
{
    return (first ^ step % 4 << 5) + step / 4 * BOX_BYTES;
}

// This thread's place of the first of those blocks.
static __device__ __forceinline__ uint32_t first_place(const uint8_t *desk)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(desk) + (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
}

// packed = alpha sum + beta d as T, in this thread's place of each 8 x 8 block: block (row pair half h, warp, e; column g) in
// [32 h + 2 g + e]. The desk holds d before and the result after.
template <typename T, bool HAS_D>
static __device__ __forceinline__ void combine(uint32_t (&packed)[64], const float (&sum)[2][64], uint8_t *desk, float alpha,
                                               float beta)
{
    uint32_t first = first_place(desk);
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
            to[k] = HAS_D ? pack<T>(alpha * s[0] + beta * v.x, alpha * s[1] + beta * v.y) : pack<T>(alpha * s[0], alpha * s[1]);
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

// Adds to the elements on the diagonal of the tile that lies on the desk.
template <typename T> static __device__ __forceinline__ void add_to_diagonal(uint8_t *desk, float value)
{
    int i = threadIdx.x % GROUP, r = i % HALF;
    T *element = reinterpret_cast<T *>(desk + i / HALF * 3 * BOX_BYTES + r * 128 + ((r / 8 ^ r % 8) << 4)) + r % 8;
    *element = from_float<T>(to_float(*element) + value);
}

// ---- results -------------------------------------------------------------------------------------------------------------

// The desk, where rows of out start anywhere.
template <typename T>
static __device__ __forceinline__ void write_elements(const uint8_t *desk, const Task &w, const Tile &t, int group)
{
    T *out = (T *)w.elements + t.matrix * w.stride;
    desk_sync(group);
    int c = threadIdx.x % GROUP, col = t.j * TILE_SIDE + c;
    for (int r = 0; r < TILE_SIDE && t.i * TILE_SIDE + r < w.rows && col < w.cols; r++) {
        const uint8_t *chunk = desk + (2 * (r / HALF) + c / HALF) * BOX_BYTES + r % HALF * 128 + ((c % HALF / 8 ^ r % 8) << 4);
        out[(int64_t)(t.i * TILE_SIDE + r) * w.pitch + col] = reinterpret_cast<const T *>(chunk)[c % 8];
    }
    desk_sync(group);
}

template <typename T>
static __device__ __forceinline__ void write_full(const float (&sum)[2][64], Desk &desk, const Task &w, const Tile &t)
{
    uint32_t packed[64];
    if (w.has_d) {
        desk.wait_full();
        combine<T, true>(packed, sum, desk.base, w.alpha, w.beta);
    } else {
        desk.wait_free();
        combine<T, false>(packed, sum, desk.base, w.alpha, 0);
    }
    if (w.elements) write_elements<T>(desk.base, w, t, desk.group);
    desk.hand_over();
}

// The tile that lies on the desk and in `packed`, and its mirror image.
template <typename T>
static __device__ __forceinline__ void write_symmetric(const uint32_t (&packed)[64], Desk &desk, const Task &w, const Tile &t)
{
    if (t.i != t.j) {
        desk.hand_over();
        desk.wait_free();
        write_mirrored(packed, desk.base);
        desk.hand_over();
        return;
    }
    desk_sync(desk.group);
    mirror_in_place(packed, desk.base);
    desk.hand_over();
    if (!w.has_plus) return;
    desk.wait_free();
    add_to_diagonal<T>(desk.base, w.diagonal);
    desk.hand_over();
}

// ---- the desk: the clerk's side --------------------------------------------------------------------------------------------

static __device__ __forceinline__ void bring_addend(const SharedMemory &m, const Task &w, const Tile &t, int group)
{
    uint64_t *full = m.desk_full(group);
    barrier_arrive_expect(full, DESK_BYTES);
    for (int q = 0; q < BOXES; q++)
        tile_load_own(m.desk(group) + q * BOX_BYTES, &w.d, full, t.j * TILE_SIDE + q % 2 * HALF, t.i * TILE_SIDE + q / 2 * HALF,
                      t.matrix);
}

// Sends away what the group has put on the desk the `put`-th time.
static __device__ __forceinline__ void send_desk(const uint8_t *desk, const Task &w, const Tile &t, int put)
{
    bool symmetric = w.kind == TASK_SYMMETRIC || w.kind == TASK_AOL, diagonal = symmetric && t.i == t.j;
    bool out = w.has_out && !(diagonal && put), plus = w.has_plus && (!diagonal || put);
    int x = t.j * TILE_SIDE, y = t.i * TILE_SIDE;
    if (put && !diagonal) x = t.i * TILE_SIDE, y = t.j * TILE_SIDE;
    for (int q = 0; q < BOXES; q++) {
        int box_x = x + q % 2 * HALF, box_y = y + q / 2 * HALF;
        if (box_x >= w.cols || box_y >= w.rows) continue;
        if (out) tile_store(&w.out, desk + q * BOX_BYTES, box_x, box_y, t.matrix);
        if (plus) tile_store(&w.plus, desk + q * BOX_BYTES, box_x, box_y, t.matrix);
    }
    stores_commit();
}

// ---- almost-orthogonal scaling -------------------------------------------------------------------------------------------

// Which elements a thread holds: sum[h][4 g + 2 e + p] is row 64 h + row_of() + 8 e, column 8 g + col_of() + p.
static __device__ __forceinline__ int row_of(void) { return threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4; }
static __device__ __forceinline__ int col_of(void) { return threadIdx.x % 4 * 2; }

static __device__ __forceinline__ float4 *raw_place(const Task &w, const Tile &t)
{
    int side = tiles_along(w.rows);
    int64_t tile = (int64_t)t.matrix * (side * (side + 1) / 2) + t.i * (t.i + 1) / 2 + t.j;
    return reinterpret_cast<float4 *>(w.raw + tile * TILE_SIDE * TILE_SIDE) + threadIdx.x % GROUP;
}
// Sums of absolute values along the tile in column `slot` of tiles, of the rows from tile row i on.
static __device__ __forceinline__ float *sums_place(const Task &w, const Tile &t, int slot, int i)
{
    return w.sums + ((int64_t)t.matrix * tiles_along(w.rows) + slot) * w.rows + i * TILE_SIDE;
}

// The tile as it is, and its sums along rows and, for its mirror image, along columns. The order of the sums is fixed.
static __device__ __forceinline__ void write_raw(const float (&sum)[2][64], Desk &desk, const Task &w, const Tile &t)
{
    desk.wait_free(); // for the sums of columns
    float4 *to = raw_place(w, t);
    float *row_sums = sums_place(w, t, t.j, t.i), *col_sums = sums_place(w, t, t.i, t.j), *shared = (float *)desk.base;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, me = threadIdx.x % GROUP;
    float rows[4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int g = 0; g < 16; g++) {
            const float *s = sum[h] + 4 * g;
            to[(16 * h + g) * GROUP] = make_float4(s[0], s[1], s[2], s[3]);
            rows[2 * h] += fabsf(s[0]) + fabsf(s[1]);
            rows[2 * h + 1] += fabsf(s[2]) + fabsf(s[3]);
        }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        rows[k] += __shfl_xor_sync(0xffffffffu, rows[k], 1);
        rows[k] += __shfl_xor_sync(0xffffffffu, rows[k], 2);
        int r = 64 * (k / 2) + row_of() + 8 * (k % 2);
        if (lane % 4 == 0 && t.i * TILE_SIDE + r < w.rows) row_sums[r] = rows[k];
    }
    if (t.i != t.j) {
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const int g = k / 2, p = k % 2;
            float c =
                fabsf(sum[0][4 * g + p]) + fabsf(sum[0][4 * g + 2 + p]) + fabsf(sum[1][4 * g + p]) + fabsf(sum[1][4 * g + 2 + p]);
            for (int step = 4; step < WARP; step *= 2) c += __shfl_xor_sync(0xffffffffu, c, step);
            if (lane / 4 == 0) shared[warp * TILE_SIDE + 8 * g + col_of() + p] = c;
        }
        desk_sync(desk.group);
        if (t.j * TILE_SIDE + me < w.rows)
            col_sums[me] = shared[me] + shared[TILE_SIDE + me] + shared[2 * TILE_SIDE + me] + shared[3 * TILE_SIDE + me];
    }
    desk.hand_over();
}

// The scale of row `row`, 0 beyond the last.
static __device__ __forceinline__ float row_scale(const Task &w, const Tile &t, int row)
{
    float sum = 0;
    if (row >= w.rows) return 0;
    for (int slot = 0; slot < tiles_along(w.rows); slot++) sum += __ldcg(sums_place(w, t, slot, 0) + row);
    return sum == 0 ? 0 : w.gain / sqrtf(1.02f * sum);
}

// packed and the desk = diag(scale) raw diag(scale) of the tile. Tiles on the diagonal keep the scales of their rows.
template <typename T>
static __device__ __forceinline__ void read_scaled(uint32_t (&packed)[64], Desk &desk, const Task &w, const Tile &t)
{
    float *scales = desk.scales;
    const float4 *from = raw_place(w, t);
    int me = threadIdx.x % GROUP;
    float own = row_scale(w, t, t.i * TILE_SIDE + me);
    if (t.i == t.j && t.i * TILE_SIDE + me < w.rows) w.scale[(int64_t)t.matrix * w.rows + t.i * TILE_SIDE + me] = own;
    scales[me] = own;
    scales[TILE_SIDE + me] = row_scale(w, t, t.j * TILE_SIDE + me);
    desk_sync(desk.group);
    // The two scales first: their product commutes, so that nothing depends on which half of the matrix is computed.
#pragma unroll
    for (int q = 0; q < 32; q++) {
        const int h = q / 16, g = q % 16;
        float4 v = __ldcg(from + q * GROUP);
        const float *r = scales + 64 * h + row_of(), *c = scales + TILE_SIDE + 8 * g + col_of();
        packed[2 * q] = pack<T>(r[0] * c[0] * v.x, r[0] * c[1] * v.y);
        packed[2 * q + 1] = pack<T>(r[8] * c[0] * v.z, r[8] * c[1] * v.w);
    }
    desk.wait_free();
    uint32_t first = first_place(desk.base);
#pragma unroll
    for (int step = 0; step < 16; step++) store_blocks(step_place(first, step), packed + 4 * step);
    desk_sync(desk.group); // before the scales of the next tile
}

// out = alpha d diag(scale), d on the desk.
template <typename T> static __device__ __forceinline__ void write_scaled(Desk &desk, const Task &w, const Tile &t)
{
    float *scales = desk.scales;
    int me = threadIdx.x % GROUP, col = t.j * TILE_SIDE + me;
    scales[me] = col < w.cols ? w.alpha * __ldcg(w.scale + (int64_t)t.matrix * w.cols + col) : 0;
    desk_sync(desk.group);
    desk.wait_full();
    uint32_t first = first_place(desk.base);
#pragma unroll
    for (int step = 0; step < 16; step++) {
        uint32_t v[4];
        load_blocks(v, step_place(first, step));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *s = scales + step % 8 * 16 + k / 2 * 8 + col_of();
            float2 x = unpack<T>(v[k]);
            v[k] = pack<T>(saturated<T>(x.x * s[0]), saturated<T>(x.y * s[1]));
        }
        store_blocks(step_place(first, step), v);
    }
    desk.hand_over();
    desk_sync(desk.group); // before the scales of the next tile
}

#endif
