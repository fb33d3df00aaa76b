// Shared memory and instructions of sm90_ns_small.cu.
//
// A CTA has 128 rows of every matrix, a consumer warpgroup 64 of them. Accumulators and, packed, operand A
// of the next product stay in the warpgroup's registers in the same layout. Operand B of R R is a whole
// symmetric matrix that every CTA holds in shared memory, K-major; the CTA writes its own rows, the other
// CTA's rows are copied. Own rows and columns come first ("local order"), so that both CTAs run the same
// code and a product starts with what the CTA has itself.
//
// Shared memory consists of strips of 64 x SIDE. Operand B takes the first ones. Stages of X take the three
// behind them and, while operand B is not needed, three of its own; after R R one of these is the staging
// buffer of the output.
#pragma once
#include "llmc/cuda/muon/sm90_ns_epilogue.cuh"

struct Small {
    CUtensorMap
        x[2]; // of (batch, n, m): the matrices, and where their products go; they change places at each step
    NsIteration it;
    const float *unit; // (batch, n) of X's rows, or NULL
    int n, m, batch;
};

enum {
    SMALL_STAGES = 6, // of X: 64 of the depth for all rows, or half of the depth for UNIT_COLS columns
    FREE_STAGES = 3,  // that overlap with nothing
    FREE_STRIP = 4,   // the first of them
    UNIT_COLS = 128,  // of X per unit of work, which has two stages
    SMALL_UNITS = SMALL_STAGES / 2,
    ANNOUNCE_COLS = 256, // of X that are stored between publications
    BOTH_BARRIER = 3     // named barrier of both warpgroups
};

template <int CLUSTER> struct SmallSizes {
    enum {
        BOXES = 2 * CLUSTER,       // of 64, along a side
        SIDE = BOXES * BOX_SIDE,   // of R
        SUMS = SIDE / 2,           // of a thread
        PAIRS = SUMS / 2,          // the same rounded, two in a register
        STRIP = BOXES * BOX_BYTES, // 64 x SIDE
        STAGING = 2 * BOX_BYTES,   // of a warpgroup, for UNIT_COLS columns
        STAGING_STRIP = CLUSTER == 2 ? 3 : FREE_STRIP + FREE_STAGES,
        STRIPS = CLUSTER == 2 ? FREE_STRIP + FREE_STAGES : STAGING_STRIP + 2,
        BARRIERS = 2 * SMALL_STAGES + 4 + SMALL_UNITS,
        BYTES = STRIPS * STRIP + 2 * SIDE * 4 + BARRIERS * 8 + CLUSTER * CONSUMERS * 4
    };
    static_assert(BYTES <= 227 * 1024, "a block must fit into the shared memory of a multiprocessor");
    static_assert((int)BOXES <= (int)FREE_STRIP, "the right operand and the first stages of X are apart");
};

#if HOPPER

template <int CLUSTER> struct SmallMemory : SmallSizes<CLUSTER> {
    using S = SmallSizes<CLUSTER>;
    uint8_t *base;
    __device__ __forceinline__ SmallMemory(uint8_t *p) : base(p) {}
    // Columns 64 j and on of operand B: one box for each 64 of its rows.
    __device__ __forceinline__ uint8_t *operand_strip(int j) const { return base + j * S::STRIP; }
    __device__ __forceinline__ uint8_t *stage(int i) const
    {
        return base + (i < FREE_STAGES ? FREE_STRIP + i : i - FREE_STAGES) * S::STRIP;
    }
    __device__ __forceinline__ uint8_t *staging(int group) const
    {
        return base + S::STAGING_STRIP * S::STRIP + group * S::STAGING;
    }
    __device__ __forceinline__ float *scales() const
    {
        return (float *)(base + S::STRIPS * S::STRIP);
    } // of AOL
    __device__ __forceinline__ float *units() const
    {
        return scales() + S::SIDE;
    } // of rows of X, where AOL begins
    __device__ __forceinline__ uint64_t *full(int stage) const
    {
        return (uint64_t *)(units() + S::SIDE) + stage;
    }
    __device__ __forceinline__ uint64_t *empty(int stage) const { return full(SMALL_STAGES + stage); }
    __device__ __forceinline__ uint64_t *operand_empty() const
    {
        return full(2 * SMALL_STAGES);
    } // operand B may be overwritten
    __device__ __forceinline__ uint64_t *sent() const
    {
        return full(2 * SMALL_STAGES + 1);
    } // the other CTA's rows have arrived
    __device__ __forceinline__ uint64_t *scaled() const
    {
        return full(2 * SMALL_STAGES + 3);
    } // its scales have arrived
    __device__ __forceinline__ uint64_t *read() const
    {
        return full(2 * SMALL_STAGES + 2);
    } // operand B has been read
    // The warps of this CTA have read both stages of a unit with ldmatrix.
    __device__ __forceinline__ uint64_t *unit_read(int unit) const
    {
        return full(2 * SMALL_STAGES + 4) + unit;
    }
    // Publications of X's columns by a warpgroup of the cluster.
    __device__ __forceinline__ uint32_t *written(int i) const { return (uint32_t *)full(S::BARRIERS) + i; }
};

// ---- elements --------------------------------------------------------------------------------------------

// out = alpha sum + beta d as T, d in registers and maybe out itself.
template <typename T, int PAIRS>
static __device__ __forceinline__ void combine_pairs(uint32_t *out, const float *sum, float alpha,
                                                     const uint32_t *d, float beta)
{
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float2 v = unpack<T>(d[i]);
        out[i] =
            pack<T>(plus_addend(alpha, sum[2 * i], beta, v.x), plus_addend(alpha, sum[2 * i + 1], beta, v.y));
    }
}

// sum += a x, x the same rows and columns in boxes.
template <typename T, int SUMS>
static __device__ __forceinline__ void add_boxes(float *sum, const uint8_t *boxes, float a)
{
    uint32_t first = fragment_address(boxes), x[4];
#pragma unroll
    for (int step = 0; step < SUMS / 8; step++) {
        ldmatrix_x4(x, fragment_step(first, step));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float2 v = unpack<T>(x[k]);
            float *s = sum + 8 * step + 2 * k;
            s[0] = __fmaf_rn(a, v.x, s[0]);
            s[1] = __fmaf_rn(a, v.y, s[1]);
        }
    }
}

// Between local order and the order of the matrix: swaps the halves in the second CTA.
template <typename R, int COUNT> static __device__ __forceinline__ void swap_halves(R (&v)[COUNT], bool swap)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        R low = v[i], high = v[COUNT / 2 + i];
        v[i] = swap ? high : low;
        v[COUNT / 2 + i] = swap ? low : high;
    }
}

#endif
