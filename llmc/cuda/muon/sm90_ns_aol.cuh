// Almost-orthogonal scaling (AOL) within a chain. TASK_RAW writes a Gram matrix in fp32 and sums of its
// magnitudes along rows and columns; TASK_AOL computes each row's scale from these sums, reads the Gram
// matrix again, scales and rounds it.
#pragma once
#include "llmc/cuda/muon/sm90_ns_epilogue.cuh"

#if HOPPER

// Box (row, col) of the raw Gram matrix; the next box of its row follows.
static __device__ __forceinline__ float4 *raw_address(const Task &w, int matrix, int row, int col)
{
    int64_t box = matrix * raw_boxes(w.rows) + row * (row + 1) / 2 + col;
    return reinterpret_cast<float4 *>(w.raw + box * BOX_SIDE * BOX_SIDE);
}
// Sums of the rows from `row` on over the columns of box `box`.
static __device__ __forceinline__ float *sums_address(const Task &w, int matrix, int box, int row)
{
    return w.sums + ((int64_t)matrix * boxes_along(w.rows) + box) * w.rows + row;
}

// Scales of a slice: 64 rows, then 256 columns.
enum { SCALES_EACH = (SCALES + WARPGROUP - 1) / WARPGROUP }; // for a thread
static __device__ __forceinline__ int scale_row(const Task &w, const Slice &t, int i)
{
    return i < BOX_SIDE ? t.row * BOX_SIDE + i : i < SCALES ? t.col * BOX_SIDE + i - BOX_SIDE : w.rows;
}

// Loads this thread's scales from (batch, rows) fp32, NULL: all 1. The loads stay in flight until
// write_scales stores them in shared memory for the warpgroup.
static __device__ __forceinline__ void load_scales(float (&v)[SCALES_EACH], const float *from, const Task &w,
                                                   const Slice &t)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int row = scale_row(w, t, threadIdx.x % WARPGROUP + k * WARPGROUP);
        v[k] = from && row < w.rows ? __ldcg(from + (int64_t)t.matrix * w.rows + row) : 1;
    }
}

static __device__ __forceinline__ void write_scales(const Staging &staging, const float (&v)[SCALES_EACH],
                                                    float factor)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int i = threadIdx.x % WARPGROUP + k * WARPGROUP;
        if (i < SCALES)
            staging.scales[i] = factor * v[k];
    }
    staging.sync();
}

// A lane has 2 KEPT sums. It sends half of them to the lane that differs in bit `step` and adds the other
// lane's to the half it keeps: with the bit set the upper half.
template <int KEPT> static __device__ __forceinline__ void halve_sums(float *sums, int step)
{
    bool upper = threadIdx.x & step;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float given = upper ? sums[k] : sums[KEPT + k];
        sums[k] = (upper ? sums[KEPT + k] : sums[k]) + __shfl_xor_sync(0xffffffffu, given, step);
    }
}

// Sums of |raw|, each times the unit of its column over that of its row. Along the rows of a slice, by box,
// from a thread's columns:
static __device__ __forceinline__ void write_row_sums(float (&rows)[2][4], const float (&own)[2],
                                                      const Task &w, const Slice &t)
{
    int box = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        halve_sums<2>(rows[e], 2);
        halve_sums<1>(rows[e], 1);
        int row = t.row * BOX_SIDE + row_of() + 8 * e;
        if (box < boxes_needed(w, t) && row < w.rows)
            *sums_address(w, t.matrix, t.col + box, row) = rows[e][0] / own[e];
    }
}
// and along the columns, for the mirror image, from a thread's two rows. Lanes 4 r + c, r from 0 to 7, have
// the same columns; at the end r has the sums of groups 4 r to 4 r + 3.
static __device__ __forceinline__ void write_column_sums(float (&cols)[64], Staging &staging, const Task &w,
                                                         const Slice &t)
{
    halve_sums<32>(cols, 16);
    halve_sums<16>(cols, 8);
    halve_sums<8>(cols, 4);
    float *shared = (float *)staging.base;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    staging.acquire();
#pragma unroll
    for (int k = 0; k < 8; k += 2)
        *reinterpret_cast<float2 *>(shared + warp * TILE_SIDE + 8 * (lane / 4 * 4 + k / 2) + col_of()) =
            make_float2(cols[k], cols[k + 1]);
    staging.sync();
#pragma unroll 1
    for (int c = threadIdx.x % WARPGROUP; c < min(t.width, t.row - t.col) * BOX_SIDE; c += WARPGROUP)
        *sums_address(w, t.matrix, t.row, t.col * BOX_SIDE + c) =
            (shared[c] + shared[TILE_SIDE + c] + shared[2 * TILE_SIDE + c] + shared[3 * TILE_SIDE + c]) /
            staging.scales[BOX_SIDE + c];
    staging.sync(); // before the staging buffer is used again
}

// Writes the raw sums and the sums that AOL needs. The order of additions is fixed.
static __device__ __forceinline__ void write_raw(const float (&sum)[TILE_SIDE / 2], Staging &staging,
                                                 const Task &w, const Slice &t)
{
    float4 *to = raw_address(w, t.matrix, t.row, t.col) + threadIdx.x % WARPGROUP;
    float rows[2][4] = {}, cols[64], own[2] = {staging.scales[row_of()], staging.scales[row_of() + 8]};
    int wanted = boxes_needed(w, t);
#pragma unroll
    for (int g = 0; g < 32; g++) {
        const float *s = sum + 4 * g;
        if (g / 8 >= wanted)
            continue;
        to[g * WARPGROUP] = make_float4(s[0], s[1], s[2], s[3]);
        float2 c = *reinterpret_cast<const float2 *>(staging.scales + BOX_SIDE + 8 * g + col_of());
#pragma unroll
        for (int e = 0; e < 2; e++)
            rows[e][g / 8] = fmaf(fabsf(s[2 * e + 1]), c.y, fmaf(fabsf(s[2 * e]), c.x, rows[e][g / 8]));
    }
    write_row_sums(rows, own, w, t);
#pragma unroll
    for (int k = 0; k < 64; k++) {
        const float *s = sum + k / 2 * 4 + k % 2;
        cols[k] = fmaf(fabsf(s[2]), own[1], fabsf(s[0]) * own[0]);
    }
    write_column_sums(cols, staging, w, t);
}

// Adds the sums over all boxes for a slice's rows and columns, one result per warp in the staging buffer. A
// thread has four rows at a time; eight half warps take the boxes in turn, and the loads of the first
// sixteen boxes are in flight together.
static __device__ __forceinline__ void gather_sums(Staging &staging, const Task &w, const Slice &t)
{
    enum { HALF = WARP / 2, TURNS = WARPGROUP / HALF, FOURS = SCALES / 4 / HALF };
    static_assert(FOURS * HALF * 4 == SCALES && BOX_SIDE == 4 * HALF, "the first four are the slice's rows");
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, boxes = boxes_along(w.rows);
    float sum[FOURS][4] = {};
#pragma unroll 1
    for (int box = threadIdx.x % WARPGROUP / HALF; box < boxes; box += 2 * TURNS) {
        float4 v[2][FOURS];
#pragma unroll
        for (int k = 0; k < 2 * FOURS; k++) {
            int row = scale_row(w, t, 4 * (lane % HALF + k / 2 * HALF)), b = box + k % 2 * TURNS;
            v[k % 2][k / 2] =
                row < w.rows && b < boxes
                    ? __ldcg(reinterpret_cast<const float4 *>(sums_address(w, t.matrix, b, row)))
                    : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < 2 * FOURS; k++) {
            const float4 &f = v[k % 2][k / 2];
            sum[k / 2][0] += f.x;
            sum[k / 2][1] += f.y;
            sum[k / 2][2] += f.z;
            sum[k / 2][3] += f.w;
        }
    }
    staging.acquire();
#pragma unroll
    for (int k = 0; k < FOURS; k++) { // each half warp keeps two of the four
        halve_sums<2>(sum[k], HALF);
        *reinterpret_cast<float2 *>((float *)staging.base + warp * SCALES + 4 * (lane % HALF + k * HALF) +
                                    lane / HALF * 2) = make_float2(sum[k][0], sum[k][1]);
    }
    staging.sync();
}

// Computes the scales from the sums. Tiles on the diagonal store the scales of their rows.
static __device__ __forceinline__ void read_aol_scales(Staging &staging, const Task &w, const Slice &t)
{
    gather_sums(staging, w, t);
    const float *shared = (const float *)staging.base;
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < SCALES; i += WARPGROUP) {
        int row = scale_row(w, t, i);
        float sum = shared[i] + shared[SCALES + i] + shared[2 * SCALES + i] + shared[3 * SCALES + i],
              scale = sum < NS_AOL_LEAST ? 0 : w.gain * rsqrtf(1.02f * sum);
        if (t.on_diagonal && i < BOX_SIDE && row < w.rows)
            w.scale[(int64_t)t.matrix * w.rows + row] = scale;
        staging.scales[i] = scale;
    }
    staging.sync();
}

// packed = diag(scale) raw diag(scale), for box `box` of the slice.
template <typename T>
static __device__ __forceinline__ void scale_raw(uint32_t (&packed)[16], const uint8_t *raw,
                                                 const Staging &staging, int box)
{
    const float4 *from = reinterpret_cast<const float4 *>(raw) + threadIdx.x % WARPGROUP;
    const float *r = staging.scales + row_of(), *cols = staging.scales + BOX_SIDE + box * BOX_SIDE + col_of();
    // The two scales first: their product commutes, so that nothing depends on which half of the matrix is
    // computed.
#pragma unroll
    for (int g = 0; g < 8; g++) {
        float4 v = from[g * WARPGROUP];
        const float *c = cols + 8 * g;
        packed[2 * g] = pack<T>(r[0] * c[0] * v.x, r[0] * c[1] * v.y);
        packed[2 * g + 1] = pack<T>(r[8] * c[0] * v.z, r[8] * c[1] * v.w);
    }
}

// Box `box` of the slice from raw sums; it and its mirror image replace them in shared memory.
template <typename T>
static __device__ __forceinline__ void finish_aol_box(uint8_t *place, int box, const Staging &staging,
                                                      const Task &w, const Slice &t)
{
    uint32_t packed[16];
    scale_raw<T>(packed, place, staging, box);
    staging.sync(); // all threads have read the raw sums
    write_fragments<BOX_SIDE>(packed, place);
    if (t.col + box < t.row) {
        write_mirrored(packed, place + BOX_BYTES);
    } else {
        staging.sync(); // before the box is mirrored in place
        mirror_in_place(packed, packed, place);
    }
}
// TMA-store warp: the box and its mirror image.
static __device__ __forceinline__ void store_aol_box(const uint8_t *place, int box, const Task &w,
                                                     const Slice &t)
{
    store_box(place, w, t.row, t.col + box, t.matrix, true, false);
    if (t.col + box < t.row)
        store_box(place + BOX_BYTES, w, t.col + box, t.row, t.matrix, true, false);
    tma_store_commit();
}

#endif
