// Almost-orthogonal scaling (AOL) within a chain: raw sums of a Gram matrix go to memory in fp32 with the sums of their magnitudes
// along rows and columns, from which the scale of each row follows; then the sums are read again, scaled by it and rounded.
#pragma once
#include "llmc/cuda/muon/sm90_ns_epilogue.cuh"

#if HOPPER

// Box (row, col) of the raw sums; behind it comes the next of its row.
static __device__ __forceinline__ float4 *raw_place(const Task &w, int matrix, int row, int col)
{
    int64_t box = matrix * raw_boxes(w.rows) + row * (row + 1) / 2 + col;
    return reinterpret_cast<float4 *>(w.raw + box * BOX_SIDE * BOX_SIDE);
}
// The sums of the rows from `row` on over the columns of box `box`.
static __device__ __forceinline__ float *sums_place(const Task &w, int matrix, int box, int row)
{
    return w.sums + ((int64_t)matrix * boxes_along(w.rows) + box) * w.rows + row;
}

// The scales that a part needs, of its rows and columns: 64 rows, then 256 columns.
enum { SCALES_EACH = (SCALES + GROUP - 1) / GROUP }; // for a thread
static __device__ __forceinline__ int scale_row(const Task &w, const Part &t, int i)
{
    return i < BOX_SIDE ? t.row * BOX_SIDE + i : i < SCALES ? t.col * BOX_SIDE + i - BOX_SIDE : w.rows;
}

// This thread's scales, from (batch, rows) fp32, NULL: all 1. They are on their way while something else is done; then all go to
// where the group finds them.
static __device__ __forceinline__ void load_scales(float (&v)[SCALES_EACH], const float *from, const Task &w, const Part &t)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int row = scale_row(w, t, threadIdx.x % GROUP + k * GROUP);
        v[k] = from && row < w.rows ? __ldcg(from + (int64_t)t.matrix * w.rows + row) : 1;
    }
}
static __device__ __forceinline__ void put_scales(const Desk &desk, const float (&v)[SCALES_EACH], float factor)
{
#pragma unroll
    for (int k = 0; k < SCALES_EACH; k++) {
        int i = threadIdx.x % GROUP + k * GROUP;
        if (i < SCALES) desk.scales[i] = factor * v[k];
    }
    desk.sync();
}

// Of twice KEPT sums a lane gives half to the lane that differs in bit `step`, and adds the other's to the half it keeps: with
// the bit set the upper one.
template <int KEPT> static __device__ __forceinline__ void share_sums(float *sums, int step)
{
    bool upper = threadIdx.x & step;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        float given = upper ? sums[k] : sums[KEPT + k];
        sums[k] = (upper ? sums[KEPT + k] : sums[k]) + __shfl_xor_sync(0xffffffffu, given, step);
    }
}

// Sums of |raw|, each times the unit of its column over that of its row. Along the rows of a part, box by box, from sums of a
// thread's columns:
static __device__ __forceinline__ void write_row_sums(float (&rows)[2][4], const float (&own)[2], const Task &w, const Part &t)
{
    int box = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        share_sums<2>(rows[e], 2);
        share_sums<1>(rows[e], 1);
        int row = t.row * BOX_SIDE + row_of() + 8 * e;
        if (box < boxes_wanted(w, t) && row < w.rows) *sums_place(w, t.matrix, t.col + box, row) = rows[e][0] / own[e];
    }
}
// and along the columns, for the mirror image, from sums of a thread's two rows. Lanes 4 r + c, r from 0 to 7, have the same
// columns; at the end r has the sums of blocks 4 r to 4 r + 3.
static __device__ __forceinline__ void write_column_sums(float (&cols)[64], Desk &desk, const Task &w, const Part &t)
{
    share_sums<32>(cols, 16);
    share_sums<16>(cols, 8);
    share_sums<8>(cols, 4);
    float *shared = (float *)desk.base;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4;
    desk.wait_free();
#pragma unroll
    for (int k = 0; k < 8; k += 2)
        *reinterpret_cast<float2 *>(shared + warp * SQUARE + 8 * (lane / 4 * 4 + k / 2) + col_of()) =
            make_float2(cols[k], cols[k + 1]);
    desk.sync();
#pragma unroll 1
    for (int c = threadIdx.x % GROUP; c < min(t.width, t.row - t.col) * BOX_SIDE; c += GROUP)
        *sums_place(w, t.matrix, t.row, t.col * BOX_SIDE + c) =
            (shared[c] + shared[SQUARE + c] + shared[2 * SQUARE + c] + shared[3 * SQUARE + c]) / desk.scales[BOX_SIDE + c];
    desk.sync(); // before the desk is used again
}

// The sums as they are, and what AOL needs of them. The order of additions is fixed.
static __device__ __forceinline__ void write_raw(const float (&sum)[SQUARE / 2], Desk &desk, const Task &w, const Part &t)
{
    float4 *to = raw_place(w, t.matrix, t.row, t.col) + threadIdx.x % GROUP;
    float rows[2][4] = {}, cols[64], own[2] = {desk.scales[row_of()], desk.scales[row_of() + 8]};
    int wanted = boxes_wanted(w, t);
#pragma unroll
    for (int g = 0; g < 32; g++) {
        const float *s = sum + 4 * g;
        if (g / 8 >= wanted) continue;
        to[g * GROUP] = make_float4(s[0], s[1], s[2], s[3]);
        float2 c = *reinterpret_cast<const float2 *>(desk.scales + BOX_SIDE + 8 * g + col_of());
#pragma unroll
        for (int e = 0; e < 2; e++) rows[e][g / 8] = fmaf(fabsf(s[2 * e + 1]), c.y, fmaf(fabsf(s[2 * e]), c.x, rows[e][g / 8]));
    }
    write_row_sums(rows, own, w, t);
#pragma unroll
    for (int k = 0; k < 64; k++) {
        const float *s = sum + k / 2 * 4 + k % 2;
        cols[k] = fmaf(fabsf(s[2]), own[1], fabsf(s[0]) * own[0]);
    }
    write_column_sums(cols, desk, w, t);
}

// The sums over all boxes of a part's rows and columns, to the desk: one for each warp. A thread has four rows at a time, eight
// half warps take the boxes in turn, and the first sixteen boxes are all on their way at once.
static __device__ __forceinline__ void gather_sums(Desk &desk, const Task &w, const Part &t)
{
    enum { HALF = WARP / 2, TURNS = GROUP / HALF, FOURS = SCALES / 4 / HALF };
    static_assert(FOURS * HALF * 4 == SCALES && BOX_SIDE == 4 * HALF, "the first four are the part's rows");
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, boxes = boxes_along(w.rows);
    float sum[FOURS][4] = {};
#pragma unroll 1
    for (int box = threadIdx.x % GROUP / HALF; box < boxes; box += 2 * TURNS) {
        float4 v[2][FOURS];
#pragma unroll
        for (int k = 0; k < 2 * FOURS; k++) {
            int row = scale_row(w, t, 4 * (lane % HALF + k / 2 * HALF)), b = box + k % 2 * TURNS;
            v[k % 2][k / 2] = row < w.rows && b < boxes
                                  ? __ldcg(reinterpret_cast<const float4 *>(sums_place(w, t.matrix, b, row)))
                                  : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < 2 * FOURS; k++) {
            const float4 &f = v[k % 2][k / 2];
            sum[k / 2][0] += f.x, sum[k / 2][1] += f.y, sum[k / 2][2] += f.z, sum[k / 2][3] += f.w;
        }
    }
    desk.wait_free();
#pragma unroll
    for (int k = 0; k < FOURS; k++) { // each half warp keeps two of the four
        share_sums<2>(sum[k], HALF);
        *reinterpret_cast<float2 *>((float *)desk.base + warp * SCALES + 4 * (lane % HALF + k * HALF) + lane / HALF * 2) =
            make_float2(sum[k][0], sum[k][1]);
    }
    desk.sync();
}

// From the sums. Squares on the diagonal keep the scales of their rows.
static __device__ __forceinline__ void read_aol_scales(Desk &desk, const Task &w, const Part &t)
{
    gather_sums(desk, w, t);
    const float *shared = (const float *)desk.base;
#pragma unroll 1
    for (int i = threadIdx.x % GROUP; i < SCALES; i += GROUP) {
        int row = scale_row(w, t, i);
        float sum = shared[i] + shared[SCALES + i] + shared[2 * SCALES + i] + shared[3 * SCALES + i],
              scale = sum < NS_AOL_LEAST ? 0 : w.gain * rsqrtf(1.02f * sum);
        if (t.on_diagonal && i < BOX_SIDE && row < w.rows) w.scale[(int64_t)t.matrix * w.rows + row] = scale;
        desk.scales[i] = scale;
    }
    desk.sync();
}

// packed = diag(scale) raw diag(scale), for box `box` of the part.
template <typename T>
static __device__ __forceinline__ void scale_raw(uint32_t (&packed)[16], const uint8_t *raw, const Desk &desk, int box)
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

// Box `box` of the part, from raw sums: it and its mirror image take their place.
template <typename T>
static __device__ __forceinline__ void finish_aol_box(uint8_t *place, int box, const Desk &desk, const Task &w, const Part &t)
{
    uint32_t packed[16];
    scale_raw<T>(packed, place, desk, box);
    desk.sync(); // all have read the raw sums
    put_blocks<BOX_SIDE>(packed, place);
    if (t.col + box < t.row) {
        put_mirrored(packed, place + BOX_BYTES);
    } else {
        desk.sync(); // before the box is mirrored in its place
        mirror_in_place(packed, packed, place);
    }
}
// The clerk: both.
static __device__ __forceinline__ void send_aol_box(const uint8_t *place, int box, const Task &w, const Part &t)
{
    send_box(place, w, t.row, t.col + box, t.matrix, true, false);
    if (t.col + box < t.row) send_box(place + BOX_BYTES, w, t.col + box, t.row, t.matrix, true, false);
    stores_commit();
}

#endif
