// What the files of the CPU backend share: scratch memory, the fixed partition of work, conversion of rows.
//
// The bits of a result never depend on the number of threads: work is cut into pieces by shape alone, a piece
// is computed by one thread, and partial sums of the pieces are added in the order of the pieces.
#pragma once
#include "llmc/ops/costs.h"

// Ops are done when they return: no op here reads the stream or the context of its contract. dev/test/house.t
// holds every function of this folder to read its other parameters.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#ifdef _OPENMP
#include <omp.h>
static inline int cpu_thread(void) { return omp_get_thread_num(); }
#else
#pragma GCC diagnostic ignored \
    "-Wunknown-pragmas" // the pragmas are the whole difference of a build without OpenMP
static inline int cpu_thread(void) { return 0; }
#endif

// ---- scratch ----------------------------------------------------------------------------------------------

// Memory that backend_reserve() set aside, 64-byte aligned, contents undefined. Asserts that `floats` fit.
float *cpu_scratch(size_t floats); // the calling thread's own
float *cpu_shared(size_t floats);  // one for all threads; for ops that pass results between phases

// How much each family of ops asks for, in floats, at most, for the given sizes.
size_t matmul_scratch(void);
size_t attention_scratch(const OpSizes *sizes);
size_t head_thread_scratch(const OpSizes *sizes);
size_t rows_scratch(const OpSizes *sizes); // embedding, residual and qkv: a few rows
size_t rows_shared(const OpSizes *sizes);

// Takes `count` floats from the front of *arena, keeping it 64-byte aligned.
static inline float *scratch_take(float **arena, size_t count)
{
    float *p = *arena;
    *arena += (count + 15) / 16 * 16;
    return p;
}

// ---- attention's backward, in qkv.c -----------------------------------------------------------------------

// dq | dk | dv in a->dqkv to the gradients of the raw q | k | v, in place; fills a->dv, adds to a->dlambda.
void qkv_backward(const AttentionBackward *a, int N, int H, int e);

// ---- partition --------------------------------------------------------------------------------------------

// Ops that work row by row cut their N rows into this many parts, whatever the number of threads.
enum { PARTS = 32 };

static inline int part_begin(int N, int part) { return (int)((int64_t)N * part / PARTS); }

// Below so many elements, and so many multiplications of an op with products, a parallel region costs more
// than it saves.
enum { SERIAL_ELEMENTS = 1 << 13, SERIAL_MULTIPLICATIONS = 1 << 16 };

// ---- rows -------------------------------------------------------------------------------------------------

static inline void load_row(float *restrict to, const floatX *restrict from, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        to[i] = x_to_float(from[i]);
}

static inline void store_row(floatX *restrict to, const float *restrict from, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        to[i] = float_to_x(from[i]);
}

// A (rows, cols) block of a matrix with row pitch ld, packed.
static inline void load_block(float *restrict to, const floatX *restrict from, int rows, int cols, int64_t ld)
{
    for (int r = 0; r < rows; r++)
        load_row(to + (int64_t)r * cols, from + r * ld, cols);
}

static inline float dot(const float *restrict a, const float *restrict b, int n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline float dot_stored(const float *restrict a, const floatX *restrict b, int n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += a[i] * x_to_float(b[i]);
    return sum;
}

static inline float gate_dot(const floatX *row, const floatX *weight, int inputs)
{
    float sum = 0;
    for (int c = 0; c < inputs; c++)
        sum += x_to_float(row[c]) * x_to_float(weight[c]);
    return sum;
}
