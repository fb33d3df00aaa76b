// The sm80 layer, emulated: what each instruction of llmc/cuda/sm80/sm80.cuh does, on the host.
#pragma once
#include "dev/test/emulate/language.h"
#include <type_traits>

namespace sm80
{

inline void copy_async(void *to, const void *from, int bytes) { emulate::queue_copy(to, from, bytes, 16); }
inline void copy_async_4(void *to, const void *from, int bytes) { emulate::queue_copy(to, from, bytes, 4); }
inline void commit_loads() { emulate::commit_copies(); }
template <int PENDING> void wait_loads() { emulate::wait_copies(PENDING); }
inline void wait_all_loads() { emulate::wait_all_copies(); }

template <bool TRANSPOSED = false> void ldmatrix(uint32_t (&r)[4], const void *row)
{
    struct Load {
        const void *from;
        uint32_t *to;
    } mine = {row, r};
    emulate::warp_exchange(0xffffffffu, &mine, [](void *const(&lane)[32], uint32_t) {
        for (int m = 0; m < 4; m++) {
            const uint16_t *matrix[8];
            for (int i = 0; i < 8; i++) {
                matrix[i] = (const uint16_t *)((const Load *)lane[8 * m + i])->from;
                if ((uintptr_t)matrix[i] % 16)
                    emulate::fail("ldmatrix from %p: not aligned", (const void *)matrix[i]);
            }
            for (int i = 0; i < 32; i++) {
                int major = i / 4, minor = i % 4 * 2;
                uint32_t low = TRANSPOSED ? matrix[minor][major] : matrix[major][minor],
                         high = TRANSPOSED ? matrix[minor + 1][major] : matrix[major][minor + 1];
                ((const Load *)lane[i])->to[m] = high << 16 | low;
            }
        }
    });
}

// Each lane has two elements of a matrix of 8 x 8, and gets those of its transpose.
inline uint32_t transpose8(uint32_t x)
{
    emulate::warp_exchange(0xffffffffu, &x, [](void *const(&lane)[32], uint32_t) {
        uint16_t matrix[8][8];
        for (int i = 0; i < 32; i++) {
            uint32_t v = *(const uint32_t *)lane[i];
            matrix[i / 4][i % 4 * 2] = (uint16_t)v;
            matrix[i / 4][i % 4 * 2 + 1] = (uint16_t)(v >> 16);
        }
        for (int i = 0; i < 32; i++)
            *(uint32_t *)lane[i] = (uint32_t)matrix[i % 4 * 2 + 1][i / 4] << 16 | matrix[i % 4 * 2][i / 4];
    });
    return x;
}

struct E4m3;

// Element i of the word.
template <typename T> float element(uint32_t word, int i)
{
    if constexpr (std::is_same<T, E4m3>::value) {
        __half_raw raw = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)(word >> 8 * i), __NV_E4M3);
        return __half2float(__half(raw));
    } else if constexpr (std::is_same<T, __half>::value) {
        __half_raw raw;
        raw.x = (unsigned short)(word >> 16 * i);
        return __half2float(__half(raw));
    } else {
        return __uint_as_float(word >> 16 * i << 16);
    }
}

// Sums in fp32, in the order of the columns, then onto d.
template <typename T> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    struct Operands {
        float *d;
        const uint32_t *a;
        uint32_t b[2];
    } mine = {d, a, {b0, b1}};
    emulate::warp_exchange(0xffffffffu, &mine, [](void *const(&lane)[32], uint32_t) {
        constexpr int WORD = std::is_same<T, E4m3>::value ? 4 : 2, K = 8 * WORD; // elements of a word
        float left[16][K], right[K][8];
        for (int i = 0; i < 32; i++) {
            const Operands &o = *(const Operands *)lane[i];
            for (int j = 0; j < WORD; j++)
                for (int half = 0; half < 2; half++) {
                    int k = i % 4 * WORD + j + half * K / 2;
                    left[i / 4][k] = element<T>(o.a[2 * half], j);
                    left[i / 4 + 8][k] = element<T>(o.a[2 * half + 1], j);
                    right[k][i / 4] = element<T>(o.b[half], j);
                }
        }
        for (int row = 0; row < 16; row++) {
            float sum[8] = {};
            for (int k = 0; k < K; k++)
#pragma omp simd
                for (int n = 0; n < 8; n++)
                    sum[n] += left[row][k] * right[k][n];
            for (int n = 0; n < 8; n++)
                ((const Operands *)lane[row % 8 * 4 + n / 2])->d[row / 8 * 2 + n % 2] += sum[n];
        }
    });
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float reciprocal_approx(float x) { return 1 / x; }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float tanh_approx(float x) { return tanhf(x); }
inline float min_keeping_nan(float a, float b)
{
    return std::isnan(a) || std::isnan(b) ? NAN : std::min(a, b);
}

} // namespace sm80
