// Epilogue of the Newton-Schulz chain kernel, and its shared-memory layout.
//
// A consumer warpgroup has a slice of 64 rows of a tile. Two epilogue stages follow the operands of a tile
// through the pipeline, one for each half of its columns: they hold d's half of the slice, or nothing. The
// warpgroup writes its rounded output over d; the mirror image goes to the warpgroup's staging buffer and to
// the free part of the epilogue stage. The TMA-store warp stores both, releases the stages to the producer
// when TMA has read them, and marks the slice as done when the stores are complete.
//
// A half is two boxes of 64 rows of 128 bytes under the 128-byte swizzle: 16-byte chunk c of row r lies at
// chunk c ^ r % 8.
#pragma once
#include "llmc/cuda/muon/sm90_ns_chain.cuh"

enum {
    DEPTH = 64,      // of a stage: 128 bytes, the width of the swizzle
    STAGES = 4,      // 192 KB
    WARPGROUP = 128, // threads of a warpgroup
    CONSUMERS = 2,   // warpgroups
    THREADS = (CONSUMERS + 1) * WARPGROUP,
    BLOCK_ROWS = TILE_SIDE / 2, // of a CTA
    HALF_COLS = TILE_SIDE / 2,  // columns of a slice that the epilogue handles at a time
    BOX_BYTES = BOX_SIDE * BOX_SIDE * 2,
    RAW_BYTES = BOX_SIDE * BOX_SIDE * 4, // of a box
    A_BYTES = BLOCK_ROWS * DEPTH * 2,
    STAGE_BYTES = A_BYTES + TILE_SIDE * DEPTH * 2,
    ADDEND_BYTES = BLOCK_ROWS * HALF_COLS * 2, // half of d's part of the tile, for both warpgroups
    STAGING_BYTES = 2 * BOX_BYTES,
    SCALES = BOX_SIDE + TILE_SIDE, // of a slice's rows and columns
    SCHED_STAGES = 2,              // tiles that are claimed and published ahead
    BARRIERS = 2 * STAGES + 5 * SCHED_STAGES + 1 + CONSUMERS * (STAGES + 1),
    SLICE_WORDS = 6,
    SHARED_BYTES = STAGES * STAGE_BYTES + CONSUMERS * (STAGING_BYTES + SCALES * 4) + BARRIERS * 8 +
                   SCHED_STAGES * (1 + SLICE_WORDS) * 4
};
static_assert(SHARED_BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");
static_assert(CONSUMERS * RAW_BYTES <= STAGE_BYTES, "raw boxes of all groups fit into a stage");
static_assert(2 * BOX_BYTES <= RAW_BYTES, "a box and its mirror image take the place of a raw one");
static_assert(4 * SCALES * 4 <= STAGING_BYTES, "sums of each warp fit on the staging");
static_assert(ADDEND_BYTES + CONSUMERS * BOX_BYTES <= STAGE_BYTES,
              "an item and a mirrored box for each group fit into a stage");
enum { STAGING_BARRIER = 1 }; // and 2: one per warpgroup

// A slice: its position in the matrix in units of boxes, and the tile it belongs to.
struct Slice {
    int task, matrix, row, col;
    int width;       // of the tile
    int on_diagonal; // the diagonal crosses the tile
};
static_assert(sizeof(Slice) == SLICE_WORDS * 4, "a slice is published in words");

#if HOPPER

struct SharedMemory {
    uint8_t *base;
    __device__ __forceinline__ uint8_t *a(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint8_t *b(int stage) const { return a(stage) + A_BYTES; }
    __device__ __forceinline__ uint8_t *staging(int group) const
    {
        return base + STAGES * STAGE_BYTES + group * STAGING_BYTES;
    }
    __device__ __forceinline__ float *scales(int group) const
    {
        return (float *)staging(CONSUMERS) + group * SCALES;
    }
    __device__ __forceinline__ uint64_t *full(int stage) const
    {
        return (uint64_t *)scales(CONSUMERS) + stage;
    }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(STAGES) + stage; }
    __device__ __forceinline__ uint64_t *index_full(int i) const { return full(2 * STAGES) + i; }
    __device__ __forceinline__ uint64_t *index_empty(int i) const
    {
        return full(2 * STAGES + SCHED_STAGES) + i;
    }
    __device__ __forceinline__ uint64_t *sched_full(int i) const
    {
        return full(2 * STAGES + 2 * SCHED_STAGES) + i;
    }
    __device__ __forceinline__ uint64_t *sched_empty(int i) const
    {
        return full(2 * STAGES + 3 * SCHED_STAGES) + i;
    }
    __device__ __forceinline__ uint64_t *input_ready(int i) const
    {
        return full(2 * STAGES + 4 * SCHED_STAGES) + i;
    }
    __device__ __forceinline__ uint64_t *prefetch_next() const { return full(2 * STAGES + 5 * SCHED_STAGES); }
    // Of a warpgroup: output is staged (one mbarrier per stage); the staging buffer may be overwritten.
    __device__ __forceinline__ uint64_t *staging_full(int group) const
    {
        return prefetch_next() + 1 + group * (STAGES + 1);
    }
    __device__ __forceinline__ uint64_t *staging_empty(int group) const
    {
        return staging_full(group) + STAGES;
    }
    __device__ __forceinline__ uint32_t *tile_counter(int i) const { return (uint32_t *)full(BARRIERS) + i; }
    __device__ __forceinline__ Slice *slice(int i) const { return (Slice *)tile_counter(SCHED_STAGES) + i; }
};

static __device__ __forceinline__ bool is_symmetric(const Task &w)
{
    return w.kind != TASK_FULL;
} // by its tiles
// Boxes of a slice on or below the diagonal of a symmetric result; narrow tiles have slices with none.
static __device__ __forceinline__ int boxes_needed(const Task &w, const Slice &t)
{
    return is_symmetric(w) ? min(t.width, t.row - t.col + 1) : t.width;
}

static __device__ __forceinline__ bool slice_exists(const Task &w, const Slice &t)
{
    return t.row * BOX_SIDE < w.rows && (!is_symmetric(w) || t.row >= t.col);
}

// ---- staging buffer of a warpgroup ------------------------------------------------------------------------

struct Staging {
    uint8_t *base;
    float *scales;
    int group;
    uint64_t *staging_full, *staging_empty; // mbarriers, staging_full one per stage
    bool in_flight;                         // a slice has been committed and not been waited for
    uint32_t parity;                        // of staging_empty
    __device__ __forceinline__ void sync() const { named_barrier_sync(STAGING_BARRIER + group, WARPGROUP); }
    // Waits until TMA has read the previous slice from the staging buffer. Once a slice, before commit.
    __device__ __forceinline__ void acquire()
    {
        if (in_flight) {
            mbarrier_wait(staging_empty, parity);
            parity ^= 1;
            in_flight = false;
        }
    }
    // Makes the warp's writes visible to TMA and signals the TMA-store warp.
    __device__ __forceinline__ void commit(int stage) const
    {
        fence_proxy_async_shared();
        __syncwarp();
        if (threadIdx.x % WARP == 0)
            mbarrier_arrive(staging_full + stage);
    }
};

template <typename T> static __device__ __forceinline__ uint32_t pack(float lo, float hi);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float lo, float hi)
{
    return pack2(lo, hi);
}

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

// Layout: sum[4 g + 2 e + p] is row row_of() + 8 e of the slice, column 8 g + col_of() + p; packed[2 g + e]
// holds both columns, an 8 x 8 matrix for the warp.
static __device__ __forceinline__ int row_of(void)
{
    return threadIdx.x / WARP % 4 * 16 + threadIdx.x % WARP / 4;
}

static __device__ __forceinline__ int col_of(void) { return threadIdx.x % 4 * 2; }

// matrix_address of this thread for step 0: two matrices of 8 rows by two of 8 columns; `boxes`: two, side by
// side.
static __device__ __forceinline__ uint32_t fragment_address(const uint8_t *boxes)
{
    return matrix_address(boxes, threadIdx.x / WARP % 4 * 16);
}
// The same for step g / 2 of a half.
static __device__ __forceinline__ uint32_t fragment_step(uint32_t first, int step)
{
    return (first ^ step % 4 << 5) + step / 4 * BOX_BYTES;
}

// Explicit roundings: a product has the same bits in every epilogue.
static __device__ __forceinline__ float plus_addend(float alpha, float sum, float beta, float d)
{
    return __fmaf_rn(beta, d, __fmul_rn(alpha, sum));
}

// packed = alpha sum + beta d as T, for one half (8 steps); d_boxes: boxes of d.
template <typename T, bool HAS_D>
static __device__ __forceinline__ void combine(uint32_t *packed, const float *sum, const uint8_t *d_boxes,
                                               float alpha, float beta)
{
    uint32_t first = HAS_D ? fragment_address(d_boxes) : 0, d[2][4]; // one step ahead
    if (HAS_D)
        ldmatrix_x4(d[0], first);
#pragma unroll
    for (int step = 0; step < 8; step++) {
        if (HAS_D && step < 7)
            ldmatrix_x4(d[(step + 1) % 2], fragment_step(first, step + 1));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *s = sum + step * 8 + 2 * k;
            float2 v = HAS_D ? unpack<T>(d[step % 2][k]) : make_float2(0, 0);
            packed[4 * step + k] =
                HAS_D ? pack<T>(plus_addend(alpha, s[0], beta, v.x), plus_addend(alpha, s[1], beta, v.y))
                      : pack<T>(alpha * s[0], alpha * s[1]);
        }
    }
}

// Scales two elements and tracks the largest magnitude, which tells in fp16 whether anything must be
// saturated. That is rare.
template <typename T> static __device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t packed)
{
    return most;
}

template <> __device__ __forceinline__ uint32_t larger<__half>(uint32_t most, uint32_t packed)
{
    __half2 m = __hmax2(*reinterpret_cast<__half2 *>(&most), __habs2(*reinterpret_cast<__half2 *>(&packed)));
    return *reinterpret_cast<uint32_t *>(&m);
}
template <typename T>
static __device__ __forceinline__ uint32_t scale_two(uint32_t packed, float x, float y, uint32_t &most)
{
    float2 v = unpack<T>(packed);
    uint32_t scaled = pack<T>(v.x * x, v.y * y);
    most = larger<T>(most, scaled);
    return scaled;
}
template <typename T>
static __device__ __forceinline__ uint32_t saturate_two(uint32_t packed, float x, float y)
{
    float2 v = unpack<T>(packed);
    return pack<T>(saturated<T>(v.x * x), saturated<T>(v.y * y));
}

static __device__ __forceinline__ bool one_infinite(uint32_t most) // of fp16, without signs
{
    return (most & 0xffffu) == 0x7c00u || most >> 16 == 0x7c00u;
}

// scaled = packed diag(scales), for the columns of a box; scales: those of these columns.
template <typename T>
static __device__ __forceinline__ void scale_by_columns(uint32_t (&scaled)[16], const uint32_t (&packed)[16],
                                                        const float *scales)
{
    const float2 *c = reinterpret_cast<const float2 *>(scales + col_of());
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++)
        scaled[i] = scale_two<T>(packed[i], c[i / 2 * 4].x, c[i / 2 * 4].y, most);
    if (!one_infinite(most))
        return;
#pragma unroll
    for (int i = 0; i < 16; i++)
        scaled[i] = saturate_two<T>(packed[i], c[i / 2 * 4].x, c[i / 2 * 4].y);
}
// scaled = diag(scales) packed, for the columns of a box: its transpose is the mirror image scaled by its
// own columns.
template <typename T>
static __device__ __forceinline__ void scale_by_rows(uint32_t (&scaled)[16], const uint32_t (&packed)[16],
                                                     const float *scales)
{
    float r[2] = {scales[row_of()], scales[row_of() + 8]};
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; i++)
        scaled[i] = scale_two<T>(packed[i], r[i % 2], r[i % 2], most);
    if (!one_infinite(most))
        return;
#pragma unroll
    for (int i = 0; i < 16; i++)
        scaled[i] = saturate_two<T>(packed[i], r[i % 2], r[i % 2]);
}

// Adds to the diagonal of a box in registers.
template <typename T>
static __device__ __forceinline__ void add_to_diagonal_packed(uint32_t *packed, float value)
{
#pragma unroll
    for (int i = 0; i < BOX_SIDE / 4; i++) {
        int row = row_of() + i % 2 * 8, col = i / 2 * 8 + col_of();
        float2 v = unpack<T>(packed[i]);
        packed[i] = pack<T>(row == col ? v.x + value : v.x, row == col + 1 ? v.y + value : v.y);
    }
}

// stmatrix address for the mirror image of matrix (warp, 0; 0) for lanes 0 to 7, of the next three for the
// others: e = 1, then g = 1.
static __device__ __forceinline__ uint32_t mirrored_address(const uint8_t *box)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    return shared_address(box) + (lane / 16 * 8 + lane % 8) * 128 +
           (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
}

// Transpose of a matrix on the diagonal: `block` up to the diagonal, above it the mirror image of `mirror`.
static __device__ __forceinline__ uint32_t mirrored_block(uint32_t mirror, uint32_t block)
{
    uint32_t t = movmatrix_trans(block);
    int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4 * 2;
    uint32_t low = row > col ? mirror : t, high = row > col + 1 ? mirror : t;
    return (low & 0xffffu) | (high & 0xffff0000u);
}

// A box on the diagonal that holds `packed`: writes the mirror image of `mirror` above the diagonal.
static __device__ __forceinline__ void mirror_in_place(const uint32_t *mirror, const uint32_t *packed,
                                                       uint8_t *box)
{
    int warp = threadIdx.x / WARP % 4;
    uint32_t first = mirrored_address(box);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int g = i / 2, e = i % 2, row = 2 * warp + e; // warp-uniform
        if (row < g)
            continue;
        uint32_t block = row == g ? mirrored_block(mirror[i], packed[i]) : mirror[i];
        stmatrix_x1_trans((first ^ e << 4) + g * 1024, block);
    }
}

// ---- output -----------------------------------------------------------------------------------------------

// Writes half `half` of the slice from `boxes` to global memory with ordinary stores, for outputs whose rows
// are not aligned for TMA.
template <typename T>
static __device__ __forceinline__ void write_elements(const uint8_t *boxes, const Task &w, const Slice &t,
                                                      int half)
{
    int c = threadIdx.x % WARPGROUP, row = t.row * BOX_SIDE, col = t.col * BOX_SIDE + half * HALF_COLS + c;
    if (col >= min(w.cols, (t.col + t.width) * BOX_SIDE))
        return;
    T *out = (T *)w.elements + t.matrix * w.stride + (int64_t)row * w.pitch + col;
    const uint8_t *first = boxes + c / BOX_SIDE * BOX_BYTES + c % 8 * sizeof(T);
#pragma unroll 2
    for (int r = 0; r < min(BOX_SIDE, w.rows - row); r += 8) { // the number of rows is a multiple of 8
        T v[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = *reinterpret_cast<const T *>(first + (r + k) * 128 + ((c % BOX_SIDE / 8 ^ k) << 4));
#pragma unroll
        for (int k = 0; k < 8; k++, out += w.pitch)
            *out = v[k];
    }
}

// TMA-store warp: stores a box at (row, col) of the outputs.
static __device__ __forceinline__ void store_box(const uint8_t *box, const Task &w, int row, int col,
                                                 int matrix, bool out, bool plus)
{
    if (row * BOX_SIDE >= w.rows || col * BOX_SIDE >= w.cols)
        return;
    if (out)
        tma_store(&w.out, box, col * BOX_SIDE, row * BOX_SIDE, matrix);
    if (plus)
        tma_store(&w.plus, box, col * BOX_SIDE, row * BOX_SIDE, matrix);
}

template <int COLS>
static __device__ __forceinline__ void write_fragments(const uint32_t *packed, uint8_t *boxes)
{
    uint32_t first = fragment_address(boxes);
#pragma unroll
    for (int step = 0; step < COLS / 16; step++)
        stmatrix_x4(fragment_step(first, step), packed + 4 * step);
}
// Reads a box that this warp has written back into 16 registers.
static __device__ __forceinline__ void read_fragments(uint32_t (&packed)[16], const uint8_t *box)
{
    uint32_t first = fragment_address(box);
#pragma unroll
    for (int step = 0; step < 4; step++)
        ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(packed[4 * step]), fragment_step(first, step));
}
// Writes the mirror image of a box from 16 registers.
static __device__ __forceinline__ void write_mirrored(const uint32_t *packed, uint8_t *box)
{
    uint32_t first = mirrored_address(box);
#pragma unroll
    for (int g = 0; g < 8; g += 2)
        stmatrix_x4_trans(first + g * 1024, packed + 2 * g);
}

// The two epilogue stages of a slice. A warpgroup has two boxes in each, and one for the mirror image.
struct EpilogueStages {
    uint8_t *stage[2];
    int group, first; // the first one's stage
    __device__ __forceinline__ int number(int half) const { return (first + half) % STAGES; }
    // A select, because a dynamic index would put the array into local memory.
    __device__ __forceinline__ uint8_t *of(int half) const { return half ? stage[1] : stage[0]; }
    __device__ __forceinline__ uint8_t *boxes(int half) const { return of(half) + 2 * group * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *box(int i) const { return boxes(i / 2) + i % 2 * BOX_BYTES; }
    __device__ __forceinline__ uint8_t *mirrored(const Staging &staging, int i) const
    {
        return i % 2 ? staging.base + i / 2 * BOX_BYTES : of(i / 2) + ADDEND_BYTES + group * BOX_BYTES;
    }
};

// Completes a box on the diagonal: fills in the elements above it; with the diagonal added, once more in
// `spare` where both outputs are wanted.
template <typename T>
static __device__ __forceinline__ void complete_diagonal(uint8_t *box, uint8_t *spare, const Staging &staging,
                                                         const Task &w)
{
    uint32_t blocks[16];
    __syncwarp(); // the warp has written its fragments
    read_fragments(blocks, box);
#pragma unroll 1
    for (bool again = false;; again = true) {
        uint8_t *to = again ? spare : box;
        if (w.has_plus && (again || !w.has_out)) {
            add_to_diagonal_packed<T>(blocks, w.diagonal);
            write_fragments<BOX_SIDE>(blocks, to);
        }
        staging.sync();
        mirror_in_place(blocks, blocks, to);
        if (again || !w.has_plus || !w.has_out)
            return;
    }
}

// Half of the slice, which lies in its epilogue stage and in packed, for the TMA-store warp to store while
// the other half is computed. Symmetric results: boxes on and below the diagonal, and mirror images of the
// latter.
template <typename T, bool SYMMETRIC>
static __device__ __forceinline__ void finish_half(const uint32_t *packed, int half,
                                                   const EpilogueStages &stages_out, Staging &staging,
                                                   const Task &w, const Slice &t)
{
    int below = t.row - t.col;
    if (half == 0)
        staging.acquire();
    if (SYMMETRIC) {
#pragma unroll
        for (int b = 0; b < 2; b++)
            if (2 * half + b < below)
                write_mirrored(packed + 16 * b, stages_out.mirrored(staging, 2 * half + b));
        if (below / 2 == half && below < t.width)
            complete_diagonal<T>(stages_out.box(below), stages_out.mirrored(staging, below), staging, w);
    } else if (w.elements) {
        staging.sync();
        write_elements<T>(stages_out.boxes(half), w, t, half);
    }
    staging.commit(stages_out.number(half));
}
// TMA-store warp: boxes of half `half`.
static __device__ __forceinline__ void store_half(int half, const EpilogueStages &stages_out,
                                                  const Staging &staging, const Task &w, const Slice &t)
{
    if (w.elements)
        return;
    int below = is_symmetric(w) ? t.row - t.col : t.width, end = min(t.width, below + 1);
#pragma unroll 1
    for (int i = 2 * half; i < min(2 * half + 2, end); i++) {
        bool diagonal = i == below, twice = diagonal && w.has_out && w.has_plus; // they differ there
        store_box(stages_out.box(i), w, t.row, t.col + i, t.matrix, w.has_out, w.has_plus && !twice);
        if (twice)
            store_box(stages_out.mirrored(staging, i), w, t.row, t.col + i, t.matrix, false, true);
        else if (is_symmetric(w) && !diagonal)
            store_box(stages_out.mirrored(staging, i), w, t.col + i, t.row, t.matrix, w.has_out, w.has_plus);
    }
    tma_store_commit();
}

// (slice + diagonal I) diag(scales): its mirror image has other values. One box at a time, because code that
// runs this rarely misses in the instruction cache.
template <typename T>
static __device__ __forceinline__ void finish_scaled(const EpilogueStages &stages_out, const Staging &staging,
                                                     const Task &w, const Slice &t)
{
    int below = t.row - t.col, last = boxes_needed(w, t) - 1;
#pragma unroll 1
    for (int i = 0; i <= last; i++) {
        __syncwarp(); // the warp has written its fragments
        uint32_t packed[16], scaled[16], mirror[16];
        uint8_t *box = stages_out.box(i), *mirrored = stages_out.mirrored(staging, i);
        read_fragments(packed, box);
        if (i == below)
            add_to_diagonal_packed<T>(packed, w.diagonal);
        scale_by_columns<T>(scaled, packed, staging.scales + BOX_SIDE + i * BOX_SIDE);
        write_fragments<BOX_SIDE>(scaled, box);
        scale_by_rows<T>(mirror, packed, staging.scales);
        if (i == below) {
            staging.sync(); // before the box is mirrored in place
            mirror_in_place(mirror, scaled, box);
        } else {
            write_mirrored(mirror, mirrored);
        }
        if (i == min(1, last))
            staging.commit(stages_out.number(0));
    }
    staging.commit(stages_out.number(1));
    staging.sync(); // before the scales of the next slice
}

#endif
