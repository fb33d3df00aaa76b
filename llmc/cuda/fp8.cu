// Quantisation to FP8 together with the transpose: FP8 products want both operands contiguous along the sum, so every operand of
// the head exists twice.
//
// A block turns a tile of 128 x 128 bytes. A thread takes 4 rows x 16 columns, transposes 4 x 4 bytes in registers, and the tile
// in shared memory is laid out as words of 4 rows, their place XORed with the column so that neither access meets a bank twice.
#include "llmc/cuda/fp8.cuh"

enum { TILE = 128, THREADS = 256, WORDS = TILE / 4 };

// Four rows of four bytes to four columns of four bytes.
static __device__ __forceinline__ void transpose4(uint32_t (&w)[4])
{
    uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140); // r0c0 r1c0 r0c1 r1c1
    uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

static __device__ __forceinline__ uint4 read_16(const uint8_t *x, int64_t at, float)
{
    return *reinterpret_cast<const uint4 *>(x + at);
}

static __device__ __forceinline__ uint4 read_16(const floatX *x, int64_t at, float scale)
{
    float f[8], g[8];
    unpack8(reinterpret_cast<const uint4 *>(x + at)[0], f);
    unpack8(reinterpret_cast<const uint4 *>(x + at)[1], g);
#pragma unroll
    for (int k = 0; k < 8; k++) f[k] /= scale, g[k] /= scale; // the quotient itself: its product with 1/scale may round otherwise
    return make_uint4(encode4(f[0], f[1], f[2], f[3], __NV_E4M3), encode4(f[4], f[5], f[6], f[7], __NV_E4M3),
                      encode4(g[0], g[1], g[2], g[3], __NV_E4M3), encode4(g[4], g[5], g[6], g[7], __NV_E4M3));
}

template <class Source>
__global__ __launch_bounds__(THREADS) void turn_kernel(uint8_t *plain, uint8_t *turned, const Source *x, float scale, int rows,
                                                       int rows_padded, int cols)
{
    __shared__ uint4 tile[TILE * WORDS / 4];
    uint32_t *words = reinterpret_cast<uint32_t *>(tile);
    int col0 = blockIdx.x * TILE, row0 = blockIdx.y * TILE;
    int cg = threadIdx.x % 8, rg = threadIdx.x / 8; // 16 columns, 4 rows
    int col = col0 + 16 * cg;
    uint4 in[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int row = row0 + 4 * rg + r;
        in[r] = row < rows && col < cols ? read_16(x, (int64_t)row * cols + col, scale) : make_uint4(0, 0, 0, 0);
        if (plain && row < rows_padded && col < cols) *reinterpret_cast<uint4 *>(plain + (int64_t)row * cols + col) = in[r];
    }
    const uint32_t quads[4][4] = {{in[0].x, in[1].x, in[2].x, in[3].x},
                                  {in[0].y, in[1].y, in[2].y, in[3].y},
                                  {in[0].z, in[1].z, in[2].z, in[3].z},
                                  {in[0].w, in[1].w, in[2].w, in[3].w}};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint32_t w[4] = {quads[q][0], quads[q][1], quads[q][2], quads[q][3]};
        transpose4(w);
#pragma unroll
        for (int k = 0; k < 4; k++) words[(16 * cg + 4 * q + k) * WORDS + (rg ^ (cg * 4))] = w[k];
    }
    __syncthreads();
#pragma unroll
    for (int pass = 0; pass < 4; pass++) {
        int c = pass * 32 + threadIdx.x / 8, j = threadIdx.x % 8; // 8 threads write the 128 bytes of a column
        uint4 u = tile[(c * WORDS + ((4 * j) ^ (c / 16 * 4))) / 4];
        if (col0 + c < cols && row0 + 16 * j < rows_padded)
            *reinterpret_cast<uint4 *>(turned + (int64_t)(col0 + c) * rows_padded + row0 + 16 * j) = u;
    }
}

void fp8_quantize(Stream s, uint8_t *plain, uint8_t *turned, const floatX *x, float scale, int rows, int rows_padded, int cols)
{
    dim3 grid((unsigned)ceil_div(cols, TILE), (unsigned)ceil_div(rows_padded, TILE));
    turn_kernel<floatX><<<grid, THREADS, 0, s>>>(plain, turned, x, scale, rows, rows_padded, cols);
    CHECK_LAUNCH();
}

void fp8_transpose(Stream s, uint8_t *turned, const uint8_t *x, int rows, int cols)
{
    dim3 grid((unsigned)ceil_div(cols, TILE), (unsigned)ceil_div(rows, TILE));
    turn_kernel<uint8_t><<<grid, THREADS, 0, s>>>(NULL, turned, x, 1, rows, rows, cols);
    CHECK_LAUNCH();
}

__global__ void fp8_round_kernel(floatX *out, const floatX *x, float scale, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16(fp8_value(to_float(x[i]) / scale, __NV_E4M3));
}

void fp8_round(Stream s, floatX *out, const floatX *x, float scale, int64_t n)
{
    if (n <= 0) return;
    fp8_round_kernel<<<(unsigned)ceil_div(n, THREADS), THREADS, 0, s>>>(out, x, scale, n);
    CHECK_LAUNCH();
}
