// WGMMA and setmaxnreg (sm_90a). Names follow PTX.
#pragma once
#include "llmc/cuda/sm90/arch.cuh"

#if HOPPER

// ---- registers --------------------------------------------------------------------------------------------

// setmaxnreg: a warpgroup returns registers to the CTA's pool, or waits for them and takes them.
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- WGMMA ------------------------------------------------------------------------------------------------

// Shared-memory descriptor of a tile with rows of 128 bytes under the 128-byte swizzle; groups of 8 rows are
// 1024 bytes apart. `leading`: bytes between neighbouring panels of 64 columns, for MN-major operands.
template <class Address>
static __device__ __forceinline__ uint64_t smem_descriptor(Address tile, uint32_t leading)
{
    uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
    return address | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ __forceinline__ uint64_t descriptor_advance(uint64_t d, int bytes)
{
    return d + (uint64_t)(bytes >> 4);
}

static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING committed groups are in flight.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers of accumulators in the instruction's text ...
#define WGMMA_R0_31 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R32_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R64_95 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R96_127 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_R0_47 WGMMA_R0_31 ", " WGMMA_R32_47
#define WGMMA_R0_63 WGMMA_R0_47 ", " WGMMA_R48_63
#define WGMMA_R0_95 WGMMA_R0_63 ", " WGMMA_R64_95
#define WGMMA_R0_127 WGMMA_R0_95 ", " WGMMA_R96_127
// ... and as operands: read and written, or written only.
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D16(i) WGMMA_D4(i), WGMMA_D4(i + 4), WGMMA_D4(i + 8), WGMMA_D4(i + 12)
#define WGMMA_D32(i) WGMMA_D16(i), WGMMA_D16(i + 16)
#define WGMMA_NEW4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define WGMMA_NEW16(i) WGMMA_NEW4(i), WGMMA_NEW4(i + 4), WGMMA_NEW4(i + 8), WGMMA_NEW4(i + 12)
// A and B in shared memory. SHAPE: "m64n128k16"; A, B, P: numbers of the operands behind the accumulators;
// MAJOR: the bits of MN-major operands, which FP8 does not have.
#define WGMMA_SS(SHAPE, TYPE, REGISTERS, A, B, P, MAJOR, ...) \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B \
                 ", p, 1, 1" MAJOR ";\n\t}" \
                 : __VA_ARGS__ \
                 : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_SS_64(SHAPE, TYPE, MAJOR) \
    WGMMA_SS(SHAPE, TYPE, WGMMA_R0_31, "%32", "%33", "%34", MAJOR, WGMMA_D32(0))
#define WGMMA_SS_96(SHAPE, TYPE, MAJOR) \
    WGMMA_SS(SHAPE, TYPE, WGMMA_R0_47, "%48", "%49", "%50", MAJOR, WGMMA_D32(0), WGMMA_D16(32))
#define WGMMA_SS_128(SHAPE, TYPE, MAJOR) \
    WGMMA_SS(SHAPE, TYPE, WGMMA_R0_63, "%64", "%65", "%66", MAJOR, WGMMA_D32(0), WGMMA_D32(32))
#define WGMMA_SS_192(SHAPE, TYPE, MAJOR) \
    WGMMA_SS(SHAPE, TYPE, WGMMA_R0_95, "%96", "%97", "%98", MAJOR, WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64))
#define WGMMA_SS_256(SHAPE, TYPE, MAJOR) \
    WGMMA_SS(SHAPE, TYPE, WGMMA_R0_127, "%128", "%129", "%130", MAJOR, WGMMA_D32(0), WGMMA_D32(32), \
             WGMMA_D32(64), WGMMA_D32(96))

template <typename T> struct IsHalf {
    static constexpr bool value = false; // bf16
};
template <> struct IsHalf<__half> {
    static constexpr bool value = true;
};

// d (64, COLS) = a (64, 16) b (16, COLS), or += when accumulate; writes the first COLS / 2 elements of d. a
// is stored as (64, 16), K-major, with A_MN as (16, 64); b is stored as (COLS, 16), K-major, with B_MN as
// (16, COLS). Thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 (+ 8) and columns 8 g + 2 (t % 4)
// (+ 1) in d[4 g ...].
template <typename T, int COLS, bool A_MN, bool B_MN, int COUNT>
static __device__ __forceinline__ void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(COUNT >= COLS / 2 &&
                      (COLS == 64 || COLS == 96 || COLS == 128 || COLS == 192 || COLS == 256),
                  "shape");
#define WGMMA_CASES(TYPE, MAJOR) \
    do { \
        if constexpr (COLS == 64) \
            WGMMA_SS_64("m64n64k16", TYPE, MAJOR); \
        if constexpr (COLS == 96) \
            WGMMA_SS_96("m64n96k16", TYPE, MAJOR); \
        if constexpr (COLS == 128) \
            WGMMA_SS_128("m64n128k16", TYPE, MAJOR); \
        if constexpr (COLS == 192) \
            WGMMA_SS_192("m64n192k16", TYPE, MAJOR); \
        if constexpr (COLS == 256) \
            WGMMA_SS_256("m64n256k16", TYPE, MAJOR); \
    } while (0)
#define WGMMA_TYPES(MAJOR) \
    do { \
        if constexpr (IsHalf<T>::value) \
            WGMMA_CASES("f16", MAJOR); \
        else \
            WGMMA_CASES("bf16", MAJOR); \
    } while (0)
    if constexpr (!A_MN && !B_MN)
        WGMMA_TYPES(", 0, 0");
    if constexpr (!A_MN && B_MN)
        WGMMA_TYPES(", 0, 1");
    if constexpr (A_MN && !B_MN)
        WGMMA_TYPES(", 1, 0");
    if constexpr (A_MN && B_MN)
        WGMMA_TYPES(", 1, 1");
#undef WGMMA_CASES
#undef WGMMA_TYPES
}

// The same of e4m3: a (64, 32), b (32, COLS), both K-major.
template <int COLS, int COUNT>
static __device__ __forceinline__ void wgmma_e4m3(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate)
{
    static_assert(COUNT >= COLS / 2 &&
                      (COLS == 64 || COLS == 96 || COLS == 128 || COLS == 192 || COLS == 256),
                  "shape");
    if constexpr (COLS == 64)
        WGMMA_SS_64("m64n64k32", "e4m3", "");
    if constexpr (COLS == 96)
        WGMMA_SS_96("m64n96k32", "e4m3", "");
    if constexpr (COLS == 128)
        WGMMA_SS_128("m64n128k32", "e4m3", "");
    if constexpr (COLS == 192)
        WGMMA_SS_192("m64n192k32", "e4m3", "");
    if constexpr (COLS == 256)
        WGMMA_SS_256("m64n256k32", "e4m3", "");
}

// d (64, 192) = a (64, 32) b (32, 192), or += when accumulate, of e5m2 and e4m3, both K-major.
static __device__ __forceinline__ void wgmma_e5m2_192(float (&d)[96], uint64_t a, uint64_t b, bool accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %98, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n192k32.f32.e5m2.e4m3 {" WGMMA_R0_95 "}, %96, %97, "
                 "p, 1, 1;\n\t}"
                 : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64)
                 : "l"(a), "l"(b), "r"((int)accumulate));
}
// The same with a in registers: byte i of a[0] and a[2] is element (t / 4, 4 (t % 4) + i), 16 columns apart,
// of the warp's 16 rows; a[1] and a[3] are 8 rows below.
static __device__ __forceinline__ void wgmma_rs_e5m2_192(float (&d)[96], const uint32_t (&a)[4], uint64_t b,
                                                         bool accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %101, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n192k32.f32.e5m2.e4m3 {" WGMMA_R0_95 "}, "
                 "{%96, %97, %98, %99}, %100, p, 1, 1;\n\t}"
                 : WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate));
}

#define WGMMA_RS_128(TYPE, B_MAJOR, PREDICATE, ...) \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" WGMMA_R0_63 "}, " \
                 "{%64, %65, %66, %67}, %68, p, 1, 1, " B_MAJOR ";\n\t}" \
                 : __VA_ARGS__ \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), PREDICATE)
#define WGMMA_RS_128_TYPES(PREDICATE, ...) \
    do { \
        if constexpr (IsHalf<T>::value && B_MN) \
            WGMMA_RS_128("f16", "1", PREDICATE, __VA_ARGS__); \
        if constexpr (IsHalf<T>::value && !B_MN) \
            WGMMA_RS_128("f16", "0", PREDICATE, __VA_ARGS__); \
        if constexpr (!IsHalf<T>::value && B_MN) \
            WGMMA_RS_128("bf16", "1", PREDICATE, __VA_ARGS__); \
        if constexpr (!IsHalf<T>::value && !B_MN) \
            WGMMA_RS_128("bf16", "0", PREDICATE, __VA_ARGS__); \
    } while (0)

// d (64, 128) = a (64, 16) b (16, 128), or += when accumulate; a in registers: four packed pairs of two
// neighbouring column groups of an accumulator; b as in wgmma().
template <typename T, bool B_MN>
static __device__ __forceinline__ void wgmma_rs(float *d, const uint32_t *a, uint64_t b, bool accumulate)
{
    WGMMA_RS_128_TYPES("r"((int)accumulate), WGMMA_D32(0), WGMMA_D32(32));
}
// d (64, 96) += a (64, 16) b (16, 96) in bf16, with a in registers and b stored as (16, 96).
static __device__ __forceinline__ void wgmma_rs_96(float *d, const uint32_t *a, uint64_t b)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %53, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" WGMMA_R0_47 "}, "
                 "{%48, %49, %50, %51}, %52, p, 1, 1, 1;\n\t}"
                 : WGMMA_D32(0), WGMMA_D16(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));
}
// The same with `accumulate` known to the compiler. Without it d is an output only; as an input its registers
// would stay live from the previous product on.
template <typename T, bool B_MN>
static __device__ __forceinline__ void wgmma_rs_static(float *d, const uint32_t *a, uint64_t b,
                                                       bool accumulate)
{
    if (accumulate)
        WGMMA_RS_128_TYPES("n"(1), WGMMA_D32(0), WGMMA_D32(32));
    else
        WGMMA_RS_128_TYPES("n"(0), WGMMA_NEW16(0), WGMMA_NEW16(16), WGMMA_NEW16(32), WGMMA_NEW16(48));
}

// After wgmma_wait: tells the compiler that the accumulators have changed.
template <int COUNT> static __device__ __forceinline__ void wgmma_fence_registers(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

#endif
