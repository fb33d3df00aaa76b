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
    SMALL_STAGES = 6,    // of X: 64 of the depth for all rows, or half of the depth for UNIT_COLS columns
    FREE_STAGES = 3,     // that overlap with nothing
    FREE_STRIP = 4,      // the first of them
    UNIT_COLS = 128,     // of X per unit of work
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
        BARRIERS = 2 * SMALL_STAGES + 4,
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
    // Publications of X's columns by a warpgroup of the cluster.
    __device__ __forceinline__ uint32_t *written(int i) const { return (uint32_t *)full(S::BARRIERS) + i; }
};

// ---- instructions
// ----------------------------------------------------------------------------------------------------------

#define NEW_D4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define NEW_D16(i) NEW_D4(i), NEW_D4(i + 4), NEW_D4(i + 8), NEW_D4(i + 12)
#define NEW_D64 NEW_D16(0), NEW_D16(16), NEW_D16(32), NEW_D16(48)
#define PRODUCT_128(TYPE, ADD, TRANSPOSE_B, ...)                                                             \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ADD ", 0;\n\t"                                      \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " "                            \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "         \
                 "{%64, %65, %66, %67}, %68, p, 1, 1, " TRANSPOSE_B ";\n\t}"                                 \
                 : __VA_ARGS__                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCT_128_ANY(ADD, ...)                                                                            \
    if constexpr (ALONG_COLUMNS && IsHalf<T>::value) PRODUCT_128("f16", ADD, "1", __VA_ARGS__);              \
    if constexpr (ALONG_COLUMNS && !IsHalf<T>::value) PRODUCT_128("bf16", ADD, "1", __VA_ARGS__);            \
    if constexpr (!ALONG_COLUMNS && IsHalf<T>::value) PRODUCT_128("f16", ADD, "0", __VA_ARGS__);             \
    if constexpr (!ALONG_COLUMNS && !IsHalf<T>::value) PRODUCT_128("bf16", ADD, "0", __VA_ARGS__);

// d (64, 128) = a (64, 16) b (16, 128), or += when accumulate; a in registers: four packed accumulators.
// ALONG_COLUMNS: b is stored as (16, 128), MN-major, else as (128, 16). Without accumulate d is an output
// only; as an input its registers would stay live from the previous product on.
template <typename T, bool ALONG_COLUMNS>
static __device__ __forceinline__ void wgmma_a_registers(float *d, const uint32_t *a, uint64_t b,
                                                         bool accumulate)
{
    if (accumulate) {
        PRODUCT_128_ANY("1", WGMMA_D32(0), WGMMA_D32(32))
    } else {
        PRODUCT_128_ANY("0", NEW_D64)
    }
}

// Copies `bytes` to address `to` in CTA `rank`; they count on its mbarrier `barrier`.
static __device__ __forceinline__ void bulk_copy_remote(void *to, const void *from, uint64_t *barrier,
                                                        int rank, uint32_t bytes)
{
    asm volatile("{\n\t.reg .b32 there, at;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %4;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %4;\n\t"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %3, "
                 "[at];\n\t}" ::"r"(shared_address(to)),
                 "r"(shared_address(from)), "r"(shared_address(barrier)), "r"(bytes), "r"(rank)
                 : "memory");
}
// The same for one word from a register.
static __device__ __forceinline__ void st_async_f32(float *to, float value, uint64_t *barrier, int rank)
{
    asm volatile("{\n\t.reg .b32 there, at;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %3;\n\t"
                 "mapa.shared::cluster.u32 at, %2, %3;\n\t"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %1, [at];\n\t}" ::"r"(
                     shared_address(to)),
                 "r"(__float_as_uint(value)), "r"(shared_address(barrier)), "r"(rank)
                 : "memory");
}
// Counters in CTA `rank`: a release increment; whoever acquires the count sees this thread's earlier writes.
static __device__ __forceinline__ void remote_counter_add(uint32_t *counter, int rank)
{
    asm volatile(
        "{\n\t.reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "red.release.cluster.shared::cluster.add.u32 [there], 1;\n\t}" ::"r"(shared_address(counter)),
        "r"(rank)
        : "memory");
}
static __device__ __forceinline__ void remote_counter_wait(const uint32_t *counter, uint32_t least)
{
    uint32_t count = 0;
    while (count < least)
        asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];"
                     : "=r"(count)
                     : "r"(shared_address(counter))
                     : "memory");
}

// ---- elements
// --------------------------------------------------------------------------------------------------------------

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
            s[0] = __fmaf_rn(a, v.x, s[0]), s[1] = __fmaf_rn(a, v.y, s[1]);
        }
    }
}

// Between local order and the order of the matrix: swaps the halves in the second CTA.
template <typename R, int COUNT> static __device__ __forceinline__ void swap_halves(R (&v)[COUNT], bool swap)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        R low = v[i], high = v[COUNT / 2 + i];
        v[i] = swap ? high : low, v[COUNT / 2 + i] = swap ? low : high;
    }
}

#endif
