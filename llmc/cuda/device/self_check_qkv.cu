// Start-up check of the QKV products with norm and rope.
#include "llmc/cuda/device/self_check_tools.cuh"
#include "llmc/cuda/gemm/sm80_qkv.cuh"
#include "llmc/cuda/gemm/sm90_qkv.cuh"
#include <algorithm>

namespace self_check_tools
{

enum { QKV_N = 300, QKV_H = 2, QKV_E = 128, QKV_D = QKV_H * QKV_E, QKV_ANGLES = QKV_E / 4 };

// A head of a plane (q, k, v): the product, rounded to bf16, and of q and k its norm.
static std::vector<double> normed_head(int plane, int row, int head, double factor)
{
    std::vector<double> x = pattern_of(5, row * QKV_D, QKV_D), y((size_t)QKV_E),
                        w = pattern_of(6, (plane * QKV_D + head * QKV_E) * QKV_D, QKV_E * QKV_D);
    double squares = 0;
    for (size_t i = 0; i < QKV_E; i++) {
        y[i] = rounded_to_bf16(factor * dot(x.data(), &w[i * QKV_D], 1, QKV_D));
        squares += y[i] * y[i];
    }
    for (size_t i = 0; i < QKV_E && plane < 2; i++)
        y[i] /= sqrt(squares / QKV_E);
    return y;
}

// Cosine and sine of rotation j of a head at a position.
struct Turn {
    double c, s;
};
static Turn turn_of(int plane, int position, int j)
{
    int64_t i = position * QKV_ANGLES + j;
    return plane == 2 || j >= QKV_ANGLES ? Turn{1, 0} : Turn{(double)pattern(7, i), (double)pattern(8, i)};
}

static void check_product(Stream s)
{
    enum { N = QKV_N, H = QKV_H, E = QKV_E, D = QKV_D, HALF = E / 2 };
    Arena m(s);
    floatX *x = m.filled(N * D, 5), *w = m.filled(3 * D * D, 6), *cos = m.filled(N * QKV_ANGLES, 7),
           *sin = m.filled(N * QKV_ANGLES, 8);
    floatX *qkv = m.take<floatX>(3 * N * D), *v = m.take<floatX>(N * D);
    float *rstd_q = m.take<float>(N * H), *rstd_k = m.take<float>(N * H), one = 1, *scale = m.take<float>(1);
    CUDA_CHECK(cudaMemcpyAsync(scale, &one, sizeof one, cudaMemcpyHostToDevice, s));
    const QkvProductForward a = {qkv, v, x, w, rstd_q, rstd_k, NULL, NULL, scale, cos, sin};
    if (!(device_has_wgmma() ? sm90_qkv(s, &a, N, H, E) : sm80_qkv(s, &a, N, H, E)))
        return;
    Distance d;
    for (int row : {0, 63, 200, N - 1})
        for (int head = 0; head < 3 * H; head++) {
            int plane = head / H, n = head % H;
            std::vector<floatX> got = m.read((plane == 2 ? v : qkv + plane * N * D) + row * D + n * E, E);
            std::vector<double> y = normed_head(plane, row, n, 1);
            for (size_t i = 0; i < HALF; i++) {
                Turn t = turn_of(plane, row, (int)i);
                d.add(at(got, i), y[i] * t.c + y[i + HALF] * t.s);
                d.add(at(got, i + HALF), y[i + HALF] * t.c - y[i] * t.s);
            }
        }
    require(d, "q, k and v");
}

// With pairs of heads, whose positions differ, and the key offset; factor 1: without one.
static void check_qkv_heads(Stream s, float factor)
{
    enum { N = QKV_N, H = QKV_H, E = QKV_E, D = QKV_D };
    Arena m(s);
    ProductContext context = {s, NULL};
    floatX *raw = m.take<floatX>(3 * N * D), *k = m.take<floatX>((N + 1) * D);
    float *alpha = m.take<float>(1);
    CUDA_CHECK(cudaMemcpyAsync(alpha, &factor, sizeof factor, cudaMemcpyHostToDevice, s));
    QkvHeadsForward a = {};
    a.heads.qk = E;
    a.heads.q = raw;
    a.heads.k = k;
    a.heads.v = raw + 2 * N * D;
    a.heads.rstd_q = m.take<float>(N * H);
    a.heads.rstd_k = m.take<float>(N * H);
    a.heads.cos = m.filled(2 * N * QKV_ANGLES, 7);
    a.heads.sin = m.filled(2 * N * QKV_ANGLES, 8);
    a.heads.paired = a.heads.offset = true;
    a.raw = raw;
    a.x = m.filled(N * D, 5);
    a.w = m.filled(3 * D * D, 6);
    a.alpha = factor == 1 ? NULL : alpha;
    if (!(device_has_wgmma() ? sm90_qkv_heads(&context, &a, N, H, E) : sm80_qkv_heads(s, &a, N, H, E)))
        return;
    Distance d;
    for (int row : {0, 64, 200, N - 1})
        for (int head = 0; head < 3 * H; head++) {
            int plane = head / H, n = head % H, above = plane == 1 ? max(row - 1, 0) : row;
            std::vector<floatX> got = m.read((plane == 1 ? k : raw + plane * N * D) + row * D + n * E, E);
            std::vector<double> y = normed_head(plane, row, n, (double)factor),
                                moved = normed_head(plane, above, n, (double)factor);
            std::copy(moved.begin() + E / 2, moved.end(), y.begin() + E / 2);
            for (size_t i = 0; i < E; i += 2) {
                Turn t = turn_of(plane, 2 * row + n, (int)i / 2);
                d.add(at(got, i), y[i] * t.c + y[i + 1] * t.s);
                d.add(at(got, i + 1), y[i + 1] * t.c - y[i] * t.s);
            }
        }
    require(d, factor == 1 ? "q, k and v of heads" : "q, k and v of heads, with a factor");
}

void check_qkv(Stream s)
{
    check_product(s);
    check_qkv_heads(s, 1);
    check_qkv_heads(s, -0.7f);
}

} // namespace self_check_tools
