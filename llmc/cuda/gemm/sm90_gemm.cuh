// Matrix products in own tiles on Hopper, as the ops see them. All matrices bf16, all sums fp32.
#pragma once
#include "llmc/cuda/device/cuda_common.cuh"

// How operands are stored: w as (depth, cols), or as (cols, depth), and x as (N, depth); or w as (depth, cols) and x as (depth, rows).
enum WideForm { W_BY_DEPTH, W_BY_COLUMN, BOTH_BY_DEPTH };
enum WideFinish {
    WIDE_STORE,  // x w
    WIDE_ADD,    // x w + with
    WIDE_SQUARE, // relu(x w)^2
    WIDE_FACTOR  // (x w) * 2 sqrt(with)
};

// Once device.h knows the path, before the others here.
void wide_product_reserve(void);
// True when these tiles are faster than a library's for a plain product: there are enough of them and each is work enough.
bool wide_product_pays(int N, int depth, int cols);
// out (N, cols) = what `finish` makes of x w.  x (N, depth);  with (N, cols), may be out itself, or NULL
// False, with nothing queued, when the path, the build, the shape or the alignment do not allow it.
bool wide_product(Stream s, WideForm form, WideFinish finish, floatX *out, const floatX *x, const floatX *w, const floatX *with,
                  int N, int depth, int cols);
