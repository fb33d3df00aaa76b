// ldmatrix, stmatrix, movmatrix: 8 x 8 matrices of 16-bit elements, spread over a warp. Lane l holds row l /
// 4, columns 2 (l % 4) and the next.
#pragma once
#include "llmc/cuda/sm90/arch.cuh"

#if SM90_OR_LATER

// Four matrices from or to shared memory; lane 8 k + r gives the address of row r of matrix k.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&b)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed.
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&b)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3])
                 : "memory");
}
// Transposed: four matrices, or one (lanes 0 to 7 give the addresses).
static __device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t *b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3])
                 : "memory");
}

static __device__ __forceinline__ void stmatrix_x1_trans(uint32_t address, uint32_t b)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared::cta.b16 [%0], {%1};" ::"r"(address), "r"(b)
                 : "memory");
}

static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t block)
{
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(block));
    return t;
}

// Address for ldmatrix_x4 and stmatrix_x4 in a panel with rows of 128 bytes under the 128-byte swizzle:
// 16-byte chunk c of row r lies at chunk c ^ r % 8. The warp has 16 rows from `row` on, a multiple of 8;
// matrices 0 to 3 are upper left, lower left, upper right, lower right. XOR with 16 g moves by g matrices to
// the right, g even.
static __device__ __forceinline__ uint32_t matrix_address(const uint8_t *panel, int row)
{
    int lane = threadIdx.x % 32, r = row + lane % 16;
    return shared_address(panel) + r * 128 + ((lane / 16 ^ (r & 7)) << 4);
}

#endif
