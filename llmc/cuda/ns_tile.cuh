// What becomes of finished sums: scaling, rounding, mirroring, and the way to global memory.
//
// A multiplying group has 64 rows of a square, its part. Behind the operands of a square two more items come through the ring of
// stages, one for each half of its columns: with d's half of the part, or empty where there is no d. The group puts its rounded
// sums in d's place, from where the copy unit takes them; their mirror image goes by way of the group's desk and of what an item
// leaves free of its stage. All else is up to the group's clerk, a thread that does not multiply: it sends what is staged, gives
// the items back to the fetching thread when the copy unit has read them, and announces the part when all has arrived. To wait
// for that, and for memory to be in order, takes as long as some stages of products.
//
// Halves of a part are two boxes of 64 rows of 128 bytes, the chunks of 16 bytes swizzled as the copy unit does it: chunk c of
// row r at chunk c ^ r % 8.
#pragma once
#include "llmc/cuda/ns_chain.cuh"

enum {
    DEPTH = 64,  // of a stage: 128 bytes, the width of the swizzle
    STAGES = 4,  // 192 KB
    GROUP = 128, // threads of a warpgroup
    GROUPS = 2,  // that multiply
    THREADS = (GROUPS + 1) * GROUP,
    BLOCK_ROWS = SQUARE / 2, // a cluster has two blocks
    HALF_COLS = SQUARE / 2,  // of a part: what goes over the desk at a time
    BOX_BYTES = BOX_SIDE * BOX_SIDE * 2,
    RAW_BYTES = BOX_SIDE * BOX_SIDE * 4, // of a box
    A_BYTES = BLOCK_ROWS * DEPTH * 2,
    STAGE_BYTES = A_BYTES + SQUARE * DEPTH * 2,
    ADDEND_BYTES = BLOCK_ROWS * HALF_COLS * 2, // half of d's part of the square, for both groups
    DESK_BYTES = 2 * BOX_BYTES,
    SCALES = BOX_SIDE + SQUARE, // of a part's rows and columns
    TICKETS = 2,                // units drawn ahead, and parts told of ahead
    BARRIERS = 2 * STAGES + 5 * TICKETS + 3 * GROUPS + 1,
    PART_WORDS = 15,
    SHARED_BYTES = STAGES * STAGE_BYTES + GROUPS * (DESK_BYTES + SCALES * 4) + BARRIERS * 8 + TICKETS * (1 + PART_WORDS) * 4
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");
static_assert(GROUPS * RAW_BYTES <= STAGE_BYTES, "raw boxes of all groups fit into a stage");
static_assert(ADDEND_BYTES + GROUPS * BOX_BYTES <= STAGE_BYTES, "an item and a mirrored box for each group fit into a stage");
enum { DESK_BARRIER = 1 }; // and 2: one for each group

// A part by its place in the matrix, counted in boxes, and the square it belongs to.
struct Part {
    int task, matrix, row, col;
    int square;      // of its task, in its matrix
    int on_diagonal; // the square is
    int boxes;       // side by side in the part: 4, or 2 of a half
    int kind, rows;  // of the task, and what else of it a group needs in a hurry
    float alpha, beta;
    int has_d, has_elements;
    int stages; // of operands, or of raw sums, a box of each part at a time
    int a_in_b; // on the diagonal of a product of a tensor with itself: the rows of a are among those of b and not fetched
};
static_assert(sizeof(Part) == PART_WORDS * 4, "a part is told of in words");

#if HOPPER

struct SharedMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint8_t *desk(int group) const { return base + STAGES * STAGE_BYTES + group * DESK_BYTES; }
    __device__ __forceinline__ float *scales(int group) const { return (float *)desk(GROUPS) + group * SCALES; }
    __device__ __forceinline__ uint64_t *full(int stage) const { return (uint64_t *)scales(GROUPS) + stage; }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
    __device__ __forceinline__ uint64_t *drawn(int i) const { return full(2 * STAGES) + i; }
    __device__ __forceinline__ uint64_t *taken(int i) const { return full(2 * STAGES + TICKETS) + i; }
    __device__ __forceinline__ uint64_t *told(int i) const { return full(2 * STAGES + 2 * TICKETS) + i; }
    __device__ __forceinline__ uint64_t *heard(int i) const { return full(2 * STAGES + 3 * TICKETS) + i; }
    __device__ __forceinline__ uint64_t *staged(int group, int half) const { return heard(TICKETS) + 2 * group + half; }
    __device__ __forceinline__ uint64_t *desk_free(int group) const { return staged(GROUPS, group); }
    __device__ __forceinline__ uint64_t *ready(int i) const { return desk_free(GROUPS) + i; }
    __device__ __forceinline__ uint64_t *draw(void) const { return ready(TICKETS); }
    __device__ __forceinline__ uint32_t *ticket(int i) const { return (uint32_t *)full(BARRIERS) + i; }
    __device__ __forceinline__ Part *part(int i) const { return (Part *)ticket(TICKETS) + i; }
};

static __device__ __forceinline__ bool is_symmetric(const Task &w) { return w.kind != TASK_FULL; } // by its squares
// Of a part's boxes, those below the diagonal of a symmetric result, and those on it too.
static __device__ __forceinline__ int boxes_below(const Part &t) { return t.on_diagonal ? t.row - t.col : t.boxes; }
static __device__ __forceinline__ int boxes_wanted(const Part &t) { return t.on_diagonal ? t.row - t.col + 1 : t.boxes; }

// ---- a group and its desk ------------------------------------------------------------------------------------------------

struct Desk {
    uint8_t *base;
    float *scales;
    int group;
    __device__ __forceinline__ void sync() const { group_sync(DESK_BARRIER + group, GROUP); }
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

// Which elements a thread holds: sum[4 g + 2 e + p] is row row_of() + 8 e of the part, column 8 g + col_of() + p; rounded, both
// columns are in packed[2 g + e], an 8 x 8 block for the warp.
static __device__ __forceinline__ int row_of(void) { return threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4; }
static __device__ __forceinline__ int col_of(void) { return threadIdx.x % 4 * 2; }

// This thread's place of the first step's blocks, two of 8 rows by two of 8 columns; `boxes`: two of them, side by side.
static __device__ __forceinline__ uint32_t first_place(const uint8_t *boxes)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(boxes) + (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
}
// Where the blocks of step g / 2 of a half lie.
static __device__ __forceinline__ uint32_t step_place(uint32_t first, int step)
{
    return (first ^ step % 4 << 5) + step / 4 * BOX_BYTES;
}

// The roundings are spelled out: a product gives the same bits whatever becomes of it.
static __device__ __forceinline__ float plus_addend(float alpha, float sum, float beta, float d)
{
    return __fmaf_rn(beta, d, __fmul_rn(alpha, sum));
}

// packed = alpha sum + beta d as T, for one half (8 steps); d: where its boxes begin.
template <typename T, bool HAS_D>
static __device__ __forceinline__ void combine(uint32_t *packed, const float *sum, const uint8_t *d_boxes, float alpha,
                                               float beta)
{
    uint32_t first = HAS_D ? first_place(d_boxes) : 0, d[2][4]; // one step ahead
    if (HAS_D) load_blocks(d[0], first);
#pragma unroll
    for (int step = 0; step < 8; step++) {
        if (HAS_D && step < 7) load_blocks(d[(step + 1) % 2], step_place(first, step + 1));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *s = sum + step * 8 + 2 * k;
            float2 v = HAS_D ? unpack<T>(d[step % 2][k]) : make_float2(0, 0);
            packed[4 * step + k] = HAS_D ? pack<T>(plus_addend(alpha, s[0], beta, v.x), plus_addend(alpha, s[1], beta, v.y))
                                         : pack<T>(alpha * s[0], alpha * s[1]);
        }
    }
}

// The address of the mirror image of block (warp, 0; 0) for lanes 0 to 7, of the next three for the others: e = 1, then g = 1.
static __device__ __forceinline__ uint32_t mirrored_place(const uint8_t *desk)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(desk) + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
}

// The rest is rare, and small rather than fast: where code is not in the instruction cache it runs at the speed of the next one.
// A thread's chunks of a box, the same in each function: 8 columns, every 16th row.
enum { CHUNKS = BOX_SIDE / 8 };
static __device__ __forceinline__ int chunk_row(int k) { return threadIdx.x % GROUP / CHUNKS + k * (GROUP / CHUNKS); }
static __device__ __forceinline__ int chunk_col(void) { return threadIdx.x % CHUNKS * 8; }
template <typename T> struct alignas(16) Chunk {
    T v[8];
};
template <typename T> static __device__ __forceinline__ Chunk<T> *chunk_of(uint8_t *box, int k)
{
    int row = chunk_row(k);
    return reinterpret_cast<Chunk<T> *>(box + row * 128 + ((chunk_col() / 8 ^ row % 8) << 4));
}

// Above the diagonal of a box goes what is there in its transpose.
template <typename T> static __device__ __forceinline__ void fill_above(uint8_t *box, uint8_t *transpose)
{
#pragma unroll 1
    for (int k = 0; k < BOX_SIDE * CHUNKS / GROUP; k++) {
        Chunk<T> *to = chunk_of<T>(box, k), own = *to, other = *chunk_of<T>(transpose, k);
#pragma unroll
        for (int i = 0; i < 8; i++) own.v[i] = chunk_col() + i > chunk_row(k) ? other.v[i] : own.v[i];
        *to = own;
    }
}

// Adds to the elements on the diagonal of a box; to may be the box.
template <typename T> static __device__ __forceinline__ void add_to_diagonal(uint8_t *to, uint8_t *box, float value)
{
#pragma unroll 1
    for (int k = 0; k < BOX_SIDE * CHUNKS / GROUP; k++) {
        Chunk<T> own = *chunk_of<T>(box, k);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (chunk_col() + i == chunk_row(k)) own.v[i] = from_float<T>(to_float(own.v[i]) + value);
        *chunk_of<T>(to, k) = own;
    }
}

// A box times diag(scales).
template <typename T> static __device__ __forceinline__ void scale_box(uint8_t *box, const float *scales)
{
#pragma unroll 1
    for (int k = 0; k < BOX_SIDE * CHUNKS / GROUP; k++) {
        Chunk<T> own = *chunk_of<T>(box, k);
#pragma unroll
        for (int i = 0; i < 8; i++) own.v[i] = from_float<T>(saturated<T>(to_float(own.v[i]) * scales[chunk_col() + i]));
        *chunk_of<T>(box, k) = own;
    }
}

// ---- results -------------------------------------------------------------------------------------------------------------

static __device__ __forceinline__ uint32_t element_bits(const uint8_t *boxes, int row, int col)
{
    const uint8_t *chunk = boxes + col / BOX_SIDE * BOX_BYTES + row * 128 + ((col % BOX_SIDE / 8 ^ row % 8) << 4);
    return reinterpret_cast<const uint16_t *>(chunk)[col % 8];
}

// Half `half` of the part, which lies in `boxes`, to global memory where rows of out start anywhere: a warp a row, in words where
// two elements share one.
static __device__ __forceinline__ void write_elements(const uint8_t *boxes, const Task &w, const Part &t, int half)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, col = t.col * BOX_SIDE + half * HALF_COLS,
        cols = min((int)HALF_COLS, w.cols - col);
    uint16_t *out = (uint16_t *)w.elements + t.matrix * w.stride + (int64_t)t.row * BOX_SIDE * w.pitch + col;
#pragma unroll 4
    for (int r = warp; r < min((int)BOX_SIDE, w.rows - t.row * BOX_SIDE); r += 4) {
        uint16_t *to = out + (int64_t)r * w.pitch;
        int odd = (int)((uintptr_t)to / 2 % 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int c = 2 * (lane + i * WARP) + odd;
            uint32_t first = element_bits(boxes, r, c), second = element_bits(boxes, r, min(c + 1, HALF_COLS - 1));
            if (c + 1 < cols)
                *reinterpret_cast<uint32_t *>(to + c) = first | second << 16;
            else if (c < cols)
                to[c] = (uint16_t)first;
        }
        if (odd && lane == 0 && cols > 0) to[0] = (uint16_t)element_bits(boxes, r, 0);
    }
}

// The clerk sends a box to (row, col) of the results.
static __device__ __forceinline__ void send_box(const uint8_t *box, const Task &w, int row, int col, int matrix, bool out,
                                                bool plus)
{
    if (row * BOX_SIDE >= w.rows || col * BOX_SIDE >= w.cols) return;
    if (out) tile_store(&w.out, box, col * BOX_SIDE, row * BOX_SIDE, matrix);
    if (plus) tile_store(&w.plus, box, col * BOX_SIDE, row * BOX_SIDE, matrix);
}

template <int COLS> static __device__ __forceinline__ void put_blocks(const uint32_t *packed, uint8_t *boxes)
{
    uint32_t first = first_place(boxes);
#pragma unroll
    for (int step = 0; step < COLS / 16; step++) store_blocks(step_place(first, step), packed + 4 * step);
}
// One box of the mirror image, from 16 registers.
static __device__ __forceinline__ void put_mirrored(const uint32_t *packed, uint8_t *box)
{
    uint32_t first = mirrored_place(box);
#pragma unroll
    for (int g = 0; g < 8; g += 2) store_transposed(first + g * 1024, packed + 2 * g);
}

// The two items of a part, of which a group has two boxes each, and one for the mirror image; the other two of that lie on the
// desk. On the diagonal the last box of mirror images is not wanted and is spare.
struct Items {
    uint8_t *stage[2], *desk;
    int group;
    __device__ __forceinline__ uint8_t *boxes(int half) const { return stage[half] + 2 * group * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *box(int i) const { return boxes(i / 2) + i % 2 * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *mirrored(int i) const
    {
        return i % 3 ? desk + (i - 1) * BOX_BYTES : stage[i / 3] + ADDEND_BYTES + group * BOX_BYTES;
    }
    __device__ __forceinline__ uint8_t *spare() const { return mirrored(3); }
};

// The box on the diagonal is there, its transpose is spare: it becomes symmetric, and with the diagonal what is wanted; where
// both are, the spare one.
template <typename T>
static __device__ __forceinline__ void complete_diagonal(uint8_t *box, uint8_t *spare, const Desk &desk, const Task &w,
                                                         const Part &t)
{
    desk.sync();
    fill_above<T>(box, spare);
    if (!w.has_plus && t.kind != TASK_SCALED) return;
    add_to_diagonal<T>(w.has_out && w.has_plus ? spare : box, box, w.diagonal);
}

// Half of a part, 32 registers, into its items, and of a symmetric result its mirror image: boxes below the diagonal transposed.
template <typename T, bool SYMMETRIC>
static __device__ __forceinline__ void stage_half(const uint32_t *packed, int half, const Items &items, const Desk &desk,
                                                  const Task &w, const Part &t)
{
    put_blocks<HALF_COLS>(packed, items.boxes(half));
    if (!SYMMETRIC) return;
    int below = boxes_below(t);
#pragma unroll
    for (int b = 0; b < 2; b++) {
        int i = 2 * half + b;
        bool diagonal = t.on_diagonal && i == below;
        if (i < below || diagonal) put_mirrored(packed + 16 * b, diagonal ? items.spare() : items.mirrored(i));
    }
    if (t.on_diagonal && below / 2 == half) complete_diagonal<T>(items.box(below), items.spare(), desk, w, t);
}

// A staged half times diag(scales): its mirror image is not the same numbers then.
template <typename T>
static __device__ __forceinline__ void scale_half(int half, const Items &items, const Desk &desk, const Part &t)
{
    desk.sync();
#pragma unroll 1
    for (int i = 2 * half; i < min(2 * half + 2, boxes_wanted(t)); i++) {
        scale_box<T>(items.box(i), desk.scales + BOX_SIDE + i * BOX_SIDE);
        if (i < boxes_below(t)) scale_box<T>(items.mirrored(i), desk.scales);
    }
}

// What the clerk sends of a symmetric result: the boxes on and below the diagonal, and their mirror images, those on the desk
// last.
static __device__ __forceinline__ void send_mirrored(const Items &items, const Task &w, const Part &t, int i)
{
    if (is_symmetric(w) && i < boxes_below(t)) send_box(items.mirrored(i), w, t.col + i, t.row, t.matrix, w.has_out, w.has_plus);
}
static __device__ __forceinline__ void send_half(int half, const Items &items, const Task &w, const Part &t)
{
    for (int i = 2 * half; i < min(2 * half + 2, boxes_wanted(t)); i++) {
        bool twice = t.on_diagonal && i == boxes_below(t) && w.has_plus && w.has_out; // with the diagonal it differs
        send_box(items.box(i), w, t.row, t.col + i, t.matrix, w.has_out, w.has_plus && !twice);
        if (twice) send_box(items.spare(), w, t.row, t.col + i, t.matrix, false, true);
    }
    send_mirrored(items, w, t, 3 * half);
    stores_commit();
}
static __device__ __forceinline__ void send_desk(const Items &items, const Task &w, const Part &t)
{
    send_mirrored(items, w, t, 1);
    send_mirrored(items, w, t, 2);
    stores_commit();
}

// ---- almost-orthogonal scaling -------------------------------------------------------------------------------------------

static __device__ __forceinline__ float4 *raw_place(const Task &w, const Part &t, int row)
{
    int64_t part = ((int64_t)t.matrix * w.squares + t.square) * SQUARE_PARTS + row % SQUARE_PARTS;
    return reinterpret_cast<float4 *>(w.raw + part * BOX_SIDE * SQUARE);
}
// Slot `slot` of the sums of the rows from `row` on.
static __device__ __forceinline__ float *sums_place(const Task &w, int matrix, int slot, int row)
{
    return w.sums + ((int64_t)matrix * sum_slots(w.rows) + slot) * w.rows + row;
}

// The scales that a part needs, of its rows and columns: 64 rows, then 256 columns. A thread has up to three, whose sums are all
// on their way at once: one after the other each would take as long as all.
enum { SCALES_EACH = (SCALES + GROUP - 1) / GROUP };
static __device__ __forceinline__ int scale_row(const Task &w, const Part &t, int i)
{
    return i < BOX_SIDE ? t.row * BOX_SIDE + i : i < SCALES ? t.col * BOX_SIDE + i - BOX_SIDE : w.rows;
}

// The units of a part's rows and columns, to where scales are otherwise.
static __device__ __forceinline__ void read_units(const Desk &desk, const Task &w, const Part &t)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int i = threadIdx.x % GROUP + k * GROUP, row = scale_row(w, t, i);
        if (i < SCALES) desk.scales[i] = w.unit && row < w.rows ? __ldg(w.unit + (int64_t)t.matrix * w.rows + row) : 1;
    }
    desk.sync();
}

// Of twice KEPT sums a lane gives half to its partner, whose lane differs in bit `step`, and adds up the others: those with the
// bit have the upper half then.
template <int KEPT> static __device__ __forceinline__ void share_sums(float (&sums)[64], int step)
{
    bool upper = threadIdx.x & step;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float given = upper ? sums[k] : sums[KEPT + k];
        sums[k] = (upper ? sums[KEPT + k] : sums[k]) + __shfl_xor_sync(0xffffffffu, given, step);
    }
}

// The sums as they are, and the sums of their absolute values, each times the unit of its column: along rows, and along columns
// for the mirror image. Their order is fixed.
static __device__ __forceinline__ void write_raw(const float (&sum)[SQUARE / 2], const Desk &desk, const Task &w, const Part &t)
{
    int first = t.col % SQUARE_PARTS; // box of the square
    float4 *to = raw_place(w, t, t.row) + first * BOX_SIDE / 8 * GROUP + threadIdx.x % GROUP;
    float *shared = (float *)desk.base, rows[2][2] = {}; // by half
    float own[2] = {desk.scales[row_of()], desk.scales[row_of() + 8]};
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, wanted = boxes_wanted(t);
#pragma unroll
    for (int g = 0; g < 32; g++) {
        const float *s = sum + 4 * g;
        if (g / 8 >= wanted) continue;
        to[g * GROUP] = make_float4(s[0], s[1], s[2], s[3]);
        const float *c = desk.scales + BOX_SIDE + 8 * g + col_of();
        rows[g / 16][0] += fabsf(s[0]) * c[0] + fabsf(s[1]) * c[1];
        rows[g / 16][1] += fabsf(s[2]) * c[0] + fabsf(s[3]) * c[1];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float &sum_of = rows[i / 2][i % 2];
        sum_of += __shfl_xor_sync(0xffffffffu, sum_of, 1);
        sum_of += __shfl_xor_sync(0xffffffffu, sum_of, 2);
        int row = t.row * BOX_SIDE + row_of() + 8 * (i % 2);
        if (lane % 4 == 0 && row < w.rows && i < t.boxes) *sums_place(w, t.matrix, t.col / 2 + i / 2, row) = sum_of;
    }
    float cols[64]; // of columns 8 g + col_of() + p at 2 g + p
#pragma unroll
    for (int k = 0; k < 64; k++) {
        const float *s = sum + k / 2 * 4 + k % 2;
        cols[k] = fabsf(s[0]) * own[0] + fabsf(s[2]) * own[1];
    }
    // Lanes 4 r + c, r from 0 to 7, have the same columns. At the end r has the sums of g = 4 r to 4 r + 3.
    share_sums<32>(cols, 16);
    share_sums<16>(cols, 8);
    share_sums<8>(cols, 4);
#pragma unroll
    for (int k = 0; k < 8; k++) shared[warp * SQUARE + 8 * (lane / 4 * 4 + k / 2) + col_of() + k % 2] = cols[k];
    desk.sync();
    for (int c = threadIdx.x % GROUP; c < SQUARE; c += GROUP) {
        int box = t.col + c / BOX_SIDE, col = t.col * BOX_SIDE + c;
        if (c < t.boxes * BOX_SIDE && box < t.row && col < w.rows && t.row * BOX_SIDE < w.rows)
            *sums_place(w, t.matrix, 2 * squares_along(w.rows) + t.row, col) =
                shared[c] + shared[SQUARE + c] + shared[2 * SQUARE + c] + shared[3 * SQUARE + c];
    }
}

// From the sums. A thread has up to three rows, and some of the sums of all of them are on their way at once: one after the other
// each would take as long as all. Squares on the diagonal keep the scales of their rows.
static __device__ __forceinline__ void read_aol_scales(const Desk &desk, const Task &w, const Part &t)
{
    enum { AT_ONCE = 8 };
    const float *from[SCALES_EACH];
    int halves[SCALES_EACH], count[SCALES_EACH], skipped[SCALES_EACH], most = 0;
    float sum[SCALES_EACH] = {};
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int row = scale_row(w, t, threadIdx.x % GROUP + k * GROUP);
        from[k] = sums_place(w, t.matrix, 0, min(row, w.rows - 1));
        halves[k] = 2 * (row / SQUARE + 1);
        skipped[k] = 2 * squares_along(w.rows) + row / BOX_SIDE + 1 - halves[k]; // slots of boxes follow those of all halves
        count[k] = row < w.rows ? sum_slots(w.rows) - skipped[k] : 0;
        most = max(most, count[k]);
    }
#pragma unroll 1
    for (int first = 0; first < most; first += AT_ONCE) {
        float v[SCALES_EACH][AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE * SCALES_EACH; i++) {
            int k = i % SCALES_EACH, slot = first + i / SCALES_EACH, place = slot < halves[k] ? slot : slot + skipped[k];
            v[k][i / SCALES_EACH] = __ldcg(from[k] + (slot < count[k] ? place : 0) * w.rows);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * SCALES_EACH; i++) {
            int k = i % SCALES_EACH, slot = first + i / SCALES_EACH;
            sum[k] += slot < count[k] ? v[k][i / SCALES_EACH] : 0;
        }
    }
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int i = threadIdx.x % GROUP + k * GROUP, row = scale_row(w, t, i);
        if (i >= SCALES) break;
        int64_t place = (int64_t)t.matrix * w.rows + row;
        if (w.unit && row < w.rows) sum[k] /= __ldg(w.unit + place);
        float own = sum[k] < NS_AOL_LEAST ? 0 : w.gain / sqrtf(1.02f * sum[k]);
        if (t.on_diagonal && i < BOX_SIDE && row < w.rows) w.scale[place] = own;
        desk.scales[i] = own;
    }
    desk.sync();
}

// `gain` times what AOL kept.
static __device__ __forceinline__ void read_scales(const Desk &desk, const Task &w, const Part &t)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int i = threadIdx.x % GROUP + k * GROUP, row = scale_row(w, t, i);
        if (i < SCALES) desk.scales[i] = row < w.rows ? w.gain * __ldcg(w.scale + (int64_t)t.matrix * w.rows + row) : 0;
    }
    desk.sync();
}

// packed = diag(scale) raw diag(scale), for box `box` of the part.
template <typename T>
static __device__ __forceinline__ void scale_raw(uint32_t *packed, const uint8_t *raw, const Desk &desk, int box)
{
    const float4 *from = reinterpret_cast<const float4 *>(raw) + threadIdx.x % GROUP;
    const float *r = desk.scales + row_of(), *cols = desk.scales + BOX_SIDE + box * BOX_SIDE + col_of();
    // The two scales first: their product commutes, so that nothing depends on which half of the matrix is computed.
#pragma unroll
    for (int g = 0; g < 8; g++) {
        float4 v = from[g * GROUP];
        const float *c = cols + 8 * g;
        packed[2 * g] = pack<T>(r[0] * c[0] * v.x, r[0] * c[1] * v.y);
        packed[2 * g + 1] = pack<T>(r[8] * c[0] * v.z, r[8] * c[1] * v.w);
    }
}

#endif
