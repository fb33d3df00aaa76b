// Start-up check of the sm80 GEMM with its epilogues.
#include "llmc/cuda/device/self_check_tools.cuh"
#include "llmc/cuda/gemm/sm80_codes.cuh"
#include "llmc/cuda/gemm/sm80_gemm.cuh"

namespace self_check_tools
{

// Tiles of 128 x 128, the last of which are not full.
enum { SM80_ROWS = 200, SM80_DEPTH = 256, SM80_COLS = 264 };
static const int checked_rows[] = {0, 65, 127, 128, SM80_ROWS - 1};

static void check_relu2(Stream s)
{
    enum { ROWS = SM80_ROWS, DEPTH = SM80_DEPTH, COLS = SM80_COLS };
    Arena m(s);
    floatX *x = m.filled(ROWS * DEPTH, 1), *w = m.filled(DEPTH * COLS, 2), *y = m.take<floatX>(ROWS * COLS),
           *dpre = m.take<floatX>(ROWS * COLS);
    sm80_gemm_relu2(s, {y, x, w, ROWS, DEPTH, COLS});
    sm80_gemm_drelu2(s, {dpre, x, w, ROWS, DEPTH, COLS}, y);
    Distance squares, gradients;
    std::vector<double> host_w = pattern_of(2, 0, DEPTH * COLS);
    for (int row : checked_rows) {
        std::vector<floatX> got = m.read(y + row * COLS, COLS), gradient = m.read(dpre + row * COLS, COLS);
        std::vector<double> host_x = pattern_of(1, row * DEPTH, DEPTH);
        for (int j = 0; j < COLS; j++) {
            double sum = dot(host_x.data(), &host_w[(size_t)j], COLS, DEPTH), stored = at(got, j);
            squares.add(stored, sum > 0 ? sum * sum : 0);
            gradients.add(at(gradient, j), rounded_to_bf16(sum) * 2 * sqrt(stored));
        }
    }
    require(squares, "products with relu^2");
    require(gradients, "products with the gradient of relu^2");
}

// Operands of a product of codes, on the device and on the host.
struct CodesOfPattern {
    std::vector<double> values;
    uint8_t *codes;
    floatX *decoded;
    CodesOfPattern(Arena *m, uint32_t seed, int rows) : values(pattern_of(seed, 0, rows * SM80_DEPTH))
    {
        std::vector<uint8_t> host_codes;
        std::vector<floatX> host_decoded;
        for (double &v : values) {
            host_codes.push_back(__nv_cvt_float_to_fp8((float)v, __NV_SATFINITE, __NV_E4M3));
            v = code_value(host_codes.back());
            host_decoded.push_back(__float2bfloat16((float)v)); // exact
        }
        codes = uploaded(m, host_codes);
        decoded = uploaded(m, host_decoded);
    }
    template <class T> static T *uploaded(Arena *m, const std::vector<T> &host)
    {
        T *p = m->take<T>((int64_t)host.size());
        copy_to_device(m->stream, p, host.data(), host.size() * sizeof(T));
        stream_synchronize(m->stream);
        return p;
    }
};

// relu^2 of a product of codes, kept in bf16 and as codes, and codes of the gradient. Scales are 1. Limits:
// of relu^2 twice the rounding of the sum and once that of the result; on the FP8 units those of
// check_fp8_gemm, for sums as narrow as Hopper's: no others have been seen. Of the gradient a whole step of
// e4m3, as if all codes were the next ones.
static void check_codes(Stream s, bool units)
{
    enum { ROWS = SM80_ROWS, DEPTH = SM80_DEPTH, COLS = SM80_COLS };
    const double limit = units ? 2 * (2 * (0.008 / 5 + 0x1p-9) + 0x1p-9) : 3 * 0x1p-9;
    Arena m(s);
    float unit = 1, *scale = m.take<float>(1);
    CUDA_CHECK(cudaMemcpyAsync(scale, &unit, sizeof unit, cudaMemcpyHostToDevice, s));
    CodesOfPattern x(&m, 14, ROWS), w(&m, 15, COLS);
    uint8_t *y8 = m.take<uint8_t>(ROWS * COLS), *gradient8 = m.take<uint8_t>(ROWS * COLS);
    floatX *y = m.take<floatX>(ROWS * COLS);
    Fp8Product p = {x.codes, w.codes, scale, scale, ROWS, DEPTH, COLS, NULL};
    CodesEpilogue kept = {RELU2_KEPT, y, y8, scale, NULL, NULL, NULL},
                  gradient = {GRADIENT, NULL, gradient8, scale, NULL, y8, scale};
    for (const CodesEpilogue *e : {&kept, &gradient})
        if (!units)
            sm80_gemm_codes_bf16(s, &p, e, x.decoded, w.decoded, ROWS);
        else if (!sm80_gemm_codes_fp8(s, &p, e))
            return;
    Distance squares, codes, gradients;
    for (int row : checked_rows) {
        std::vector<floatX> got = m.read(y + row * COLS, COLS);
        std::vector<uint8_t> got_codes = m.read(y8 + row * COLS, COLS),
                             got_gradient = m.read(gradient8 + row * COLS, COLS);
        for (size_t j = 0; j < COLS; j++) {
            double sum = dot(&x.values[(size_t)row * DEPTH], &w.values[j * DEPTH], 1, DEPTH),
                   stored = at(got, (int64_t)j), root = rounded_to_bf16(sqrt(code_value(got_codes[j]))),
                   dpre = rounded_to_bf16(rounded_to_bf16(sum) * 2 * root);
            squares.add(stored, sum > 0 ? sum * sum : 0);
            codes.add(code_value(got_codes[j]), e4m3((float)stored));
            gradients.add(code_value(got_gradient[j]), e4m3((float)dpre));
        }
    }
    require(squares, units ? "relu^2 in FP8" : "relu^2 of codes", limit);
    require(codes, units ? "codes of relu^2 in FP8" : "codes of relu^2", 0);
    require(gradients, units ? "codes of its gradient in FP8" : "codes of its gradient", 0x1p-3);
}

void check_sm80(Stream s)
{
    check_relu2(s);
    check_codes(s, true);
    check_codes(s, false);
}

} // namespace self_check_tools
