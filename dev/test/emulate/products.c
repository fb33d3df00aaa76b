// The library's products, on the host: sums in fp32, rounded once. The stand-in has checked shapes and
// memory.
#include "dev/test/no_gpu/products.h"
#include "llmc/base/common.h"
#include "llmc/base/floatx.h"
#include "llmc/cpu/fp8.h"
#include <math.h>
#include <stdlib.h>

static float from_fp16(uint16_t x)
{
    int exponent = x >> 10 & 31, fraction = x & 1023;
    float size = exponent == 31
                     ? (fraction ? NAN : INFINITY)
                     : ldexpf((float)(exponent ? fraction | 1024 : fraction), exponent ? exponent - 25 : -24);
    return x >> 15 ? -size : size;
}

static float element(const void *p, cudaDataType_t type, int64_t i)
{
    switch (type) {
    case CUDA_R_32F:
        return ((const float *)p)[i];
    case CUDA_R_16F:
        return from_fp16(((const uint16_t *)p)[i]);
    case CUDA_R_16BF:
        return bf16_to_float(((const bf16 *)p)[i]);
    case CUDA_R_8F_E4M3:
        return e4m3_to_float(((const uint8_t *)p)[i]);
    default: // the stand-in has refused all others
        return e5m2_to_float(((const uint8_t *)p)[i]);
    }
}

static void store(void *p, cudaDataType_t type, int64_t i, float x)
{
    if (type == CUDA_R_32F)
        ((float *)p)[i] = x;
    else if (type == CUDA_R_16BF)
        ((bf16 *)p)[i] = float_to_bf16(x);
    else
        refuse("a product that gives cudaDataType %d is not emulated", (int)type);
}

static int64_t place(const Layout *l, int64_t row, int64_t col)
{
    return l->order == CUBLASLT_ORDER_ROW ? row * l->ld + col : col * l->ld + row;
}

// op(matrix) as (rows, cols) fp32, malloc'd; by_columns: (cols, rows).
static float *unpack(const void *p, const Layout *l, bool transposed, int64_t first, int64_t rows,
                     int64_t cols, bool by_columns)
{
    float *x = xcalloc((size_t)rows * (size_t)cols, sizeof *x);
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            x[by_columns ? j * rows + i : i * cols + j] =
                element(p, l->type, first + (transposed ? place(l, j, i) : place(l, i, j)));
    return x;
}

void compute_product(const void *argument)
{
    const ProductCall *p = argument;
    const int32_t *transposed = p->product.transposed;
    int64_t rows = (int64_t)p->of_out.rows, cols = (int64_t)p->of_out.cols,
            depth = (int64_t)(transposed[0] ? p->of_a.rows : p->of_a.cols);
    float alpha = p->device_alpha ? *p->device_alpha : p->alpha,
          beta = p->device_beta ? *p->device_beta : p->beta;
    for (int64_t n = 0; n < p->of_out.batch; n++) {
        float *x = unpack(p->a, &p->of_a, transposed[0], n * p->of_a.stride, rows, depth, false),
              *y = unpack(p->b, &p->of_b, transposed[1], n * p->of_b.stride, depth, cols, true);
#pragma omp parallel for
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < cols; j++) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t k = 0; k < depth; k++)
                    sum += x[i * depth + k] * y[j * depth + k];
                float old =
                    beta != 0 ? element(p->c, p->of_c.type, n * p->of_c.stride + place(&p->of_c, i, j)) : 0;
                store(p->out, p->of_out.type, n * p->of_out.stride + place(&p->of_out, i, j),
                      alpha * sum + beta * old);
            }
        free(x);
        free(y);
    }
}
