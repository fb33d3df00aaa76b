#include "llmc/cpu/gemm.h"
#include "llmc/base/common.h"
#include "llmc/cpu/cpu.h"
#ifdef HAVE_OPENBLAS
#include "llmc/cpu/blas.h"

static CBLAS_TRANSPOSE blas_transpose(GemmIn a) { return a.transposed ? CblasTrans : CblasNoTrans; }

void gemm(int m, int n, int k, float alpha, GemmIn a, GemmIn b, float beta, GemmOut c)
{
    blas()->sgemm(CblasRowMajor, blas_transpose(a), blas_transpose(b), m, n, k, alpha, a.x, a.pitch, b.x,
                  b.pitch, beta, c.x, c.pitch);
}

const char *blas_description(void)
{
    static char text[256];
    snprintf(text, sizeof text, "%s, kernels %s", blas()->config(), blas()->corename());
    return text;
}

#else

// A panel of op(b), DEPTH x WIDTH, is packed once and stays in the first-level cache while strips of STRIP
// rows of op(a) pass it; the STRIP x WIDTH sums of a strip stay in registers (12 of AVX-512's 32, or spill on
// narrower machines).
enum { WIDTH = 32, DEPTH = 192, STRIP = 6 };

static void pack_b(GemmIn b, int p0, int depth, int j0, int width, float (*panel)[WIDTH])
{
    for (int p = 0; p < depth; p++)
        for (int j = 0; j < WIDTH; j++) {
            int64_t row = p0 + p, col = j0 + j;
            panel[p][j] = j >= width ? 0 : b.transposed ? b.x[col * b.pitch + row] : b.x[row * b.pitch + col];
        }
}

// Strip-wise, so that the kernel reads op(a) in sequence whichever way it is stored.
static void pack_a(GemmIn a, int i0, int rows, int p0, int depth, float (*strip)[STRIP])
{
    for (int p = 0; p < depth; p++)
        for (int r = 0; r < STRIP; r++) {
            int64_t row = i0 + r, col = p0 + p;
            strip[p][r] = r >= rows ? 0 : a.transposed ? a.x[col * a.pitch + row] : a.x[row * a.pitch + col];
        }
}

static void strip_product(int depth, const float (*restrict strip)[STRIP],
                          const float (*restrict panel)[WIDTH], float (*restrict sum)[WIDTH])
{
    float local[STRIP][WIDTH] = {{0}};
    for (int p = 0; p < depth; p++)
#pragma GCC unroll 6
        for (int r = 0; r < STRIP; r++)
#pragma omp simd
            for (int j = 0; j < WIDTH; j++)
                local[r][j] += strip[p][r] * panel[p][j];
    memcpy(sum, local, sizeof local);
}

static void add_strip(float (*sum)[WIDTH], int rows, int width, float alpha, float beta, float *c, int ldc)
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < width; j++) {
            float *at = c + (int64_t)r * ldc + j;
            *at = beta == 0 ? alpha * sum[r][j] : alpha * sum[r][j] + beta * *at;
        }
}

void gemm(int m, int n, int k, float alpha, GemmIn a, GemmIn b, float beta, GemmOut c)
{
    float panel[DEPTH][WIDTH] __attribute__((aligned(64))), strip[DEPTH][STRIP], sum[STRIP][WIDTH];
    for (int p0 = 0; p0 < k; p0 += DEPTH) {
        int depth = (int)min_i64(k - p0, DEPTH);
        for (int j0 = 0; j0 < n; j0 += WIDTH) {
            int width = (int)min_i64(n - j0, WIDTH);
            pack_b(b, p0, depth, j0, width, panel);
            for (int i0 = 0; i0 < m; i0 += STRIP) {
                int rows = (int)min_i64(m - i0, STRIP);
                pack_a(a, i0, rows, p0, depth, strip);
                strip_product(depth, (const float(*)[STRIP])strip, (const float(*)[WIDTH])panel, sum);
                add_strip(sum, rows, width, alpha, p0 ? 1 : beta, c.x + (int64_t)i0 * c.pitch + j0, c.pitch);
            }
        }
    }
}

const char *blas_description(void) { return "own loops for matrix products (no OpenBLAS)"; }

#endif
