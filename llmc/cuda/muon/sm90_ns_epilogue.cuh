// What becomes of finished sums: scaling, rounding, mirroring, and the way to global memory.
//
// A multiplying group has 64 rows of a square, its part. Behind the operands of a square two more items come through the ring of
// stages, one for each half of its columns: with d's half of the part, or empty where there is no d. The group puts its rounded
// sums in d's place, from where the copy unit takes them; their mirror image goes by way of the group's desk and of what an item
// leaves free of its stage. The group's clerk, a thread of its own, sends them; the items go back to the fetching thread when the
// copy unit has read them, and the part is announced when all has arrived.
//
// Halves of a part are two boxes of 64 rows of 128 bytes, the chunks of 16 bytes swizzled as the copy unit does it: chunk c of
// row r at chunk c ^ r % 8.
#pragma once
#include "llmc/cuda/muon/sm90_ns_chain.cuh"

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
    TICKETS = 2,                // squares drawn ahead, and parts told of ahead
    BARRIERS = 2 * STAGES + 5 * TICKETS + 1 + GROUPS * (STAGES + 1),
    PART_WORDS = 6,
    SHARED_BYTES = STAGES * STAGE_BYTES + GROUPS * (DESK_BYTES + SCALES * 4) + BARRIERS * 8 + TICKETS * (1 + PART_WORDS) * 4
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");
static_assert(GROUPS * RAW_BYTES <= STAGE_BYTES, "raw boxes of all groups fit into a stage");
static_assert(2 * BOX_BYTES <= RAW_BYTES, "a box and its mirror image take the place of a raw one");
static_assert(4 * SCALES * 4 <= DESK_BYTES, "sums of each warp fit on the desk");
static_assert(ADDEND_BYTES + GROUPS * BOX_BYTES <= STAGE_BYTES, "an item and a mirrored box for each group fit into a stage");
enum { DESK_BARRIER = 1 }; // and 2: one for each group

// A part by its place in the matrix, in units of boxes, and the square it belongs to.
struct Part {
    int task, matrix, row, col;
    int width;       // of the square
    int on_diagonal; // the diagonal goes through the square
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
    __device__ __forceinline__ uint64_t *ready(int i) const { return full(2 * STAGES + 4 * TICKETS) + i; }
    __device__ __forceinline__ uint64_t *draw() const { return full(2 * STAGES + 5 * TICKETS); }
    // Of a group: its results lie in a stage (one for each), and its clerk is through with a part's.
    __device__ __forceinline__ uint64_t *staged(int group) const { return draw() + 1 + group * (STAGES + 1); }
    __device__ __forceinline__ uint64_t *cleared(int group) const { return staged(group) + STAGES; }
    __device__ __forceinline__ uint32_t *ticket(int i) const { return (uint32_t *)full(BARRIERS) + i; }
    __device__ __forceinline__ Part *part(int i) const { return (Part *)ticket(TICKETS) + i; }
};

static __device__ __forceinline__ bool is_symmetric(const Task &w) { return w.kind != TASK_FULL; } // by its squares
// Of a symmetric result only the boxes on and below the diagonal are wanted, so many of a part: with narrow squares of some none.
static __device__ __forceinline__ int boxes_wanted(const Task &w, const Part &t)
{
    return is_symmetric(w) ? min(t.width, t.row - t.col + 1) : t.width;
}
static __device__ __forceinline__ bool part_wanted(const Task &w, const Part &t)
{
    return t.row * BOX_SIDE < w.rows && (!is_symmetric(w) || t.row >= t.col);
}

// ---- a group and its desk ------------------------------------------------------------------------------------------------

struct Desk {
    uint8_t *base;
    float *scales;
    int group;
    uint64_t *staged, *cleared; // barriers, the first of them one for each stage
    bool handed;                // a part went to the clerk, who has not been waited for since
    uint32_t parity;            // of cleared
    __device__ __forceinline__ void sync() const { group_sync(DESK_BARRIER + group, GROUP); }
    // The clerk is through with the last part: what lay on the desk has been read. Once a part, before it is handed over.
    __device__ __forceinline__ void wait_free()
    {
        if (handed) barrier_wait(cleared, parity), parity ^= 1, handed = false;
    }
    // What the warp has put into a stage and on the desk is there for the copy unit: the clerk may send it.
    __device__ __forceinline__ void hand_over(int stage) const
    {
        copy_unit_fence();
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(staged + stage);
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

// Two elements scaled, and the largest magnitudes so far: in fp16 they tell whether anything has to be saturated, which is rare.
template <typename T> static __device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t packed) { return most; }
template <> __device__ __forceinline__ uint32_t larger<__half>(uint32_t most, uint32_t packed)
{
    __half2 m = __hmax2(*reinterpret_cast<__half2 *>(&most), __habs2(*reinterpret_cast<__half2 *>(&packed)));
    return *reinterpret_cast<uint32_t *>(&m);
}
template <typename T> static __device__ __forceinline__ uint32_t scale_two(uint32_t packed, float x, float y, uint32_t &most)
{
    float2 v = unpack<T>(packed);
    uint32_t scaled = pack<T>(v.x * x, v.y * y);
    most = larger<T>(most, scaled);
    return scaled;
}
template <typename T> static __device__ __forceinline__ uint32_t saturate_two(uint32_t packed, float x, float y)
{
    float2 v = unpack<T>(packed);
    return pack<T>(saturated<T>(v.x * x), saturated<T>(v.y * y));
}
static __device__ __forceinline__ bool one_infinite(uint32_t most) // of fp16, without signs
{
    return (most & 0xffffu) == 0x7c00u || most >> 16 == 0x7c00u;
}

// scaled = packed diag(scales), for the columns of a box; scales: of these columns.
template <typename T>
static __device__ __forceinline__ void scale_by_columns(uint32_t (&scaled)[16], const uint32_t (&packed)[16], const float *scales)
{
    const float2 *c = reinterpret_cast<const float2 *>(scales + col_of());
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) scaled[i] = scale_two<T>(packed[i], c[i / 2 * 4].x, c[i / 2 * 4].y, most);
    if (!one_infinite(most)) return;
#pragma unroll
    for (int i = 0; i < 16; i++) scaled[i] = saturate_two<T>(packed[i], c[i / 2 * 4].x, c[i / 2 * 4].y);
}
// scaled = diag(scales) packed, for the columns of a box: the transpose of what the mirror image is, scaled by its columns.
template <typename T>
static __device__ __forceinline__ void scale_by_rows(uint32_t (&scaled)[16], const uint32_t (&packed)[16], const float *scales)
{
    float r[2] = {scales[row_of()], scales[row_of() + 8]};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) scaled[i] = scale_two<T>(packed[i], r[i % 2], r[i % 2], most);
    if (!one_infinite(most)) return;
#pragma unroll
    for (int i = 0; i < 16; i++) scaled[i] = saturate_two<T>(packed[i], r[i % 2], r[i % 2]);
}

// Adds to the elements on the diagonal of a box, which is still in registers.
template <typename T> static __device__ __forceinline__ void add_to_diagonal_packed(uint32_t *packed, float value)
{
#pragma unroll
    for (int i = 0; i < BOX_SIDE / 4; i++) {
        int row = row_of() + i % 2 * 8, col = i / 2 * 8 + col_of();
        float2 v = unpack<T>(packed[i]);
        packed[i] = pack<T>(row == col ? v.x + value : v.x, row == col + 1 ? v.y + value : v.y);
    }
}

// The address of the mirror image of block (warp, 0; 0) for lanes 0 to 7, of the next three for the others: e = 1, then g = 1.
static __device__ __forceinline__ uint32_t mirrored_place(const uint8_t *box)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(box) + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
}

// The transpose of an 8 x 8 block on the diagonal that is `block` up to the diagonal, and above it the mirror image of `mirror`.
static __device__ __forceinline__ uint32_t mirrored_block(uint32_t mirror, uint32_t block)
{
    uint32_t t = block_transposed(block);
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    uint32_t low = row > col ? mirror : t, high = row > col + 1 ? mirror : t;
    return (low & 0xffffu) | (high & 0xffff0000u);
}

// A box on the diagonal, which lies there as `packed`: the mirror image of `mirror` goes above the diagonal.
static __device__ __forceinline__ void mirror_in_place(const uint32_t *mirror, const uint32_t *packed, uint8_t *box)
{
    int warp = threadIdx.x / WARP % 4;
    uint32_t first = mirrored_place(box);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int g = i / 2, e = i % 2, row = 2 * warp + e; // one for all lanes of a warp
        if (row < g) continue;
        uint32_t block = row == g ? mirrored_block(mirror[i], packed[i]) : mirror[i];
        store_transposed_one((first ^ e << 4) + g * 1024, block);
    }
}

// ---- results -------------------------------------------------------------------------------------------------------------

// Half `half` of the part, which lies in `boxes`, to global memory where rows of out start anywhere.
template <typename T>
static __device__ __forceinline__ void write_elements(const uint8_t *boxes, const Task &w, const Part &t, int half)
{
    int c = threadIdx.x % GROUP, row = t.row * BOX_SIDE, col = t.col * BOX_SIDE + half * HALF_COLS + c;
    if (col >= min(w.cols, (t.col + t.width) * BOX_SIDE)) return;
    T *out = (T *)w.elements + t.matrix * w.stride + (int64_t)row * w.pitch + col;
    const uint8_t *first = boxes + c / BOX_SIDE * BOX_BYTES + c % 8 * sizeof(T);
#pragma unroll 2
    for (int r = 0; r < min(BOX_SIDE, w.rows - row); r += 8) { // rows come by eights
        T v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = *reinterpret_cast<const T *>(first + (r + k) * 128 + ((c % BOX_SIDE / 8 ^ k) << 4));
#pragma unroll
        for (int k = 0; k < 8; k++, out += w.pitch) *out = v[k];
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
// A box that this thread's warp has put there, back into 16 registers.
static __device__ __forceinline__ void take_blocks(uint32_t (&packed)[16], const uint8_t *box)
{
    uint32_t first = first_place(box);
#pragma unroll
    for (int step = 0; step < 4; step++) load_blocks(reinterpret_cast<uint32_t(&)[4]>(packed[4 * step]), step_place(first, step));
}
// One box of the mirror image, from 16 registers.
static __device__ __forceinline__ void put_mirrored(const uint32_t *packed, uint8_t *box)
{
    uint32_t first = mirrored_place(box);
#pragma unroll
    for (int g = 0; g < 8; g += 2) store_transposed(first + g * 1024, packed + 2 * g);
}

// The two items of a part, of which a group has two boxes each, and one for the mirror image.
struct Items {
    uint8_t *stage[2];
    int group, first; // the first one's stage
    __device__ __forceinline__ int number(int half) const { return (first + half) % STAGES; }
    // Chosen, not indexed: an index that is not known would put them into memory.
    __device__ __forceinline__ uint8_t *of(int half) const { return half ? stage[1] : stage[0]; }
    __device__ __forceinline__ uint8_t *boxes(int half) const { return of(half) + 2 * group * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *box(int i) const { return boxes(i / 2) + i % 2 * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *mirrored(const Desk &desk, int i) const
    {
        return i % 2 ? desk.base + i / 2 * BOX_BYTES : of(i / 2) + ADDEND_BYTES + group * BOX_BYTES;
    }
};

// A box on the diagonal, in its place among the items: what is above the diagonal, and with the diagonal added, which differs,
// once more in `spare` where both are wanted.
template <typename T>
static __device__ __forceinline__ void complete_diagonal(uint8_t *box, uint8_t *spare, const Desk &desk, const Task &w)
{
    uint32_t blocks[16];
    __syncwarp(); // it has put its blocks
    take_blocks(blocks, box);
#pragma unroll 1
    for (bool again = false;; again = true) {
        uint8_t *to = again ? spare : box;
        if (w.has_plus && (again || !w.has_out)) {
            add_to_diagonal_packed<T>(blocks, w.diagonal);
            put_blocks<BOX_SIDE>(blocks, to);
        }
        desk.sync();
        mirror_in_place(blocks, blocks, to);
        if (again || !w.has_plus || !w.has_out) return;
    }
}

// Half of the part as it is, which lies in its item and in packed, for the clerk to send while the other half is made. Of a
// symmetric result only the boxes on and below the diagonal, and the latter's mirror images.
template <typename T, bool SYMMETRIC>
static __device__ __forceinline__ void finish_half(const uint32_t *packed, int half, const Items &items, Desk &desk,
                                                   const Task &w, const Part &t)
{
    int below = t.row - t.col;
    if (half == 0) desk.wait_free();
    if (SYMMETRIC) {
#pragma unroll
        for (int b = 0; b < 2; b++)
            if (2 * half + b < below) put_mirrored(packed + 16 * b, items.mirrored(desk, 2 * half + b));
        if (below / 2 == half && below < t.width) complete_diagonal<T>(items.box(below), items.mirrored(desk, below), desk, w);
    } else if (w.elements) {
        desk.sync();
        write_elements<T>(items.boxes(half), w, t, half);
    }
    desk.hand_over(items.number(half));
}
// The clerk: boxes of half `half`.
static __device__ __forceinline__ void send_half(int half, const Items &items, const Desk &desk, const Task &w, const Part &t)
{
    if (w.elements) return;
    int below = is_symmetric(w) ? t.row - t.col : t.width, end = min(t.width, below + 1);
#pragma unroll 1
    for (int i = 2 * half; i < min(2 * half + 2, end); i++) {
        bool diagonal = i == below, twice = diagonal && w.has_out && w.has_plus; // they differ there
        send_box(items.box(i), w, t.row, t.col + i, t.matrix, w.has_out, w.has_plus && !twice);
        if (twice)
            send_box(items.mirrored(desk, i), w, t.row, t.col + i, t.matrix, false, true);
        else if (is_symmetric(w) && !diagonal)
            send_box(items.mirrored(desk, i), w, t.col + i, t.row, t.matrix, w.has_out, w.has_plus);
    }
    stores_commit();
}

// The part plus diagonal I, times diag(scales): its mirror image is not the same numbers. The part lies in its items. A box at a
// time: code that runs this rarely comes from memory each time, so it is short.
template <typename T>
static __device__ __forceinline__ void finish_scaled(const Items &items, const Desk &desk, const Task &w, const Part &t)
{
    int below = t.row - t.col, last = boxes_wanted(w, t) - 1;
#pragma unroll 1
    for (int i = 0; i <= last; i++) {
        __syncwarp(); // it has put its blocks
        uint32_t packed[16], scaled[16], mirror[16];
        uint8_t *box = items.box(i), *mirrored = items.mirrored(desk, i);
        take_blocks(packed, box);
        if (i == below) add_to_diagonal_packed<T>(packed, w.diagonal);
        scale_by_columns<T>(scaled, packed, desk.scales + BOX_SIDE + i * BOX_SIDE);
        put_blocks<BOX_SIDE>(scaled, box);
        scale_by_rows<T>(mirror, packed, desk.scales);
        if (i == below) {
            desk.sync(); // before the box is mirrored in its place
            mirror_in_place(mirror, scaled, box);
        } else {
            put_mirrored(mirror, mirrored);
        }
        if (i == min(1, last)) desk.hand_over(items.number(0));
    }
    desk.hand_over(items.number(1));
    desk.sync(); // before the scales of the next part
}

#endif
