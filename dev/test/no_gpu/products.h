// A product as cuBLASLt is told of it.
#pragma once
#include "dev/test/no_gpu/no_gpu.h"
#include <cublasLt.h>
#include <stdint.h>

typedef struct {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld, stride; // elements
    int32_t batch;
    int32_t order; // cublasLtOrder_t
} Layout;

typedef struct {
    int32_t transposed[2]; // cublasOperation_t of A and B
    int32_t pointers;      // cublasLtPointerMode_t of alpha and beta
} Product;

// out = alpha op(a) op(b) + beta c
typedef struct {
    Product product;
    float alpha, beta;                       // when called
    const float *device_alpha, *device_beta; // NULL: the host's
    const void *a, *b, *c;
    void *out;
    Layout of_a, of_b, of_c, of_out;
} ProductCall;

// Of a ProductCall; NULL in the stand-in alone (dev/test/emulate/products.c).
__attribute__((weak)) void compute_product(const void *call);
