// nvcuda::wmma, emulated: lane 0 holds whole matrices and does all; the others wait for it. What changes
// every element of a fragment alike changes lane 0's.
#pragma once
#include "dev/test/emulate/language.h"

namespace nvcuda
{
namespace wmma
{

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <typename USE, int M, int N, int K, typename T, typename LAYOUT = void> struct fragment {
    enum { num_elements = 16 * 16 };
    T x[num_elements]; // (row, column)
};

// Runs work in lane 0, after what all lanes have done before and before what they do next.
template <typename F> void in_lane_0(F work)
{
    __syncwarp();
    if (emulate::lane_number() == 0)
        work();
    __syncwarp();
}

template <typename F, typename T> void fill_fragment(F &f, T value)
{
    for (auto &x : f.x)
        x = value;
}

template <typename USE, typename T, typename LAYOUT>
void load_matrix_sync(fragment<USE, 16, 16, 16, T, LAYOUT> &f, const T *from, unsigned pitch)
{
    in_lane_0([&] {
        for (unsigned i = 0; i < 256; i++)
            f.x[i] = std::is_same<LAYOUT, row_major>::value ? from[i / 16 * pitch + i % 16]
                                                            : from[i % 16 * pitch + i / 16];
    });
}

template <typename D, typename A, typename B> void mma_sync(D &d, const A &a, const B &b, const D &c)
{
    if (emulate::lane_number())
        return;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            double sum = (double)c.x[16 * i + j];
            for (int k = 0; k < 16; k++)
                sum += (double)(float)a.x[16 * i + k] * (double)(float)b.x[16 * k + j];
            d.x[16 * i + j] = (float)sum;
        }
}

template <typename F, typename T> void store_matrix_sync(T *to, const F &f, unsigned pitch, layout_t layout)
{
    in_lane_0([&] {
        for (unsigned i = 0; i < 256; i++)
            to[layout == mem_row_major ? i / 16 * pitch + i % 16 : i % 16 * pitch + i / 16] = f.x[i];
    });
}

} // namespace wmma
} // namespace nvcuda
