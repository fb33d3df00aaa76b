// Start-up check of most of the program's own kernels that multiply on tensor cores: small problems, sampled
// results against the same sums on the host; Hopper's attention against the portable kernels. A compiler,
// driver or GPU that breaks one of them (cuDNN had such versions, attention_check.c) is found before it
// spoils a run. Not among them: DC, q and k of 96 columns or as codes in the QKV product, and before Hopper
// the head.
//
// Inputs are a pattern of multiples of 1/128 in [-1, 1), exact in bf16, that host and device compute alike:
// nothing is uploaded, and only sampled rows are read back.
//
// Limits. A product of two inputs is a multiple of 2^-14 of size at most 1, and a sum of up to 640 of them
// has at most 24 bits: exact in fp32 in any order. What remains is the rounding of results to bf16, at most
// 2^-8 of each element, so at most 2^-8 in the 2-norm, which is the limit: 0.4% (0.16% is usual); fp32 sums
// of rounded operands add 2^-23 a step. The reference starts from the device's own rounded operand, or rounds
// where the kernel does, so that a chain has one rounding, too. One wrong element among all that are
// compared, at most 4096, makes more than 1%. Sums of exponentials and what is of codes have limits of their
// own.
#include "llmc/cuda/device/self_check.cuh"
#include "llmc/cuda/attention/attention.h"
#include "llmc/cuda/device/check_cache.h"
#include "llmc/cuda/device/device.h"
#include "llmc/cuda/device/self_check_tools.cuh"
#include "llmc/cuda/gemm/sm90_fp8_gemm.cuh"
#include "llmc/cuda/gemm/sm90_gemm.cuh"
#include "llmc/cuda/gemm/sm90_tile.cuh"
#include "llmc/cuda/gemm/sm90_weight_grad.cuh"
#include "llmc/cuda/muon/ns_gpu.h"
#include <stdlib.h>

using namespace self_check_tools;

namespace
{

enum { ROWS_CHECKED = 4 };

static void fail(const char *what) __attribute__((noreturn));
static void fail(const char *what)
{
    fatal(EXIT_DEVICE,
          "the self-check found wrong results on this GPU with this driver: %s; try another driver or GPU%s",
          what, device_has_wgmma() ? ", or --portable, which runs without the kernels for Hopper" : "");
}

// All that is wrong, for one message: one kernel or all of them is the first question.
static Error wrong;

} // namespace

namespace self_check_tools
{

void require(const Distance &d, const char *kernel, double limit)
{
    double distance = sqrt(d.difference / fmax(d.size, 1e-30));
    if (distance <= limit)
        return; // a NaN is not
    char said[128];
    snprintf(said, sizeof said, "%s by ", kernel);
    if (strstr(wrong.text, said)) // in another case
        return;
    Error before = wrong;
    error_set(&wrong, "%s%s%s by %.2g (limit %.2g)",
              before.text[0] ? before.text : "these differ from the host's: ", before.text[0] ? ", " : "",
              kernel, distance, limit);
}

} // namespace self_check_tools

namespace
{

// ---- GEMM ------------------------------------------------------------------------------------------------

struct GemmCase {
    GemmLayout layout;
    GemmEpilogue epilogue;
    const char *name;
    float alpha; // 0: none
};

static double epilogue_of(GemmEpilogue e, double sum, double c)
{
    if (e == EPILOGUE_RESIDUAL)
        return sum + c;
    if (e == EPILOGUE_RELU2)
        return sum > 0 ? sum * sum : 0;
    return e == EPILOGUE_DRELU2 ? rounded_to_bf16(sum) * 2 * sqrt(c) : sum;
}

// More tiles than clusters, few enough in the last wave that it is split into halves.
static void check_gemm(Stream s, const GemmCase &g)
{
    enum { DEPTH = 128, COLS = 2 * TILE_N };
    int rows = CLUSTER * TILE_M * (sm90_tile_clusters() / 2 + 2),
        checked[ROWS_CHECKED] = {0, TILE_M + 1, rows / 2 + 77, rows - 1};
    Arena m(s);
    ProductContext context = {s, NULL};
    bool with_c = g.epilogue == EPILOGUE_RESIDUAL || g.epilogue == EPILOGUE_DRELU2,
         square = g.epilogue == EPILOGUE_DRELU2;
    floatX *x = m.filled((int64_t)rows * DEPTH, 1), *w = m.filled(DEPTH * COLS, 2),
           *out = m.take<floatX>((int64_t)rows * COLS);
    floatX *c = with_c ? m.take<floatX>((int64_t)rows * COLS) : NULL;
    float *alpha = NULL;
    if (g.alpha != 0) {
        alpha = m.take<float>(1);
        CUDA_CHECK(cudaMemcpyAsync(alpha, &g.alpha, sizeof g.alpha, cudaMemcpyHostToDevice, s));
    }
    Sm90Product p =
        {LAYOUT_NN, square ? EPILOGUE_RELU2 : EPILOGUE_STORE, c, x, w, NULL, NULL, rows, DEPTH, COLS, 1};
    if (with_c) // any numbers; RELU2's are not negative
        sm90_gemm(&context, &p);
    p = {g.layout, g.epilogue, out, x, w, c, alpha, rows, DEPTH, COLS, 1};
    if (!sm90_gemm(&context, &p))
        return;
    Distance d;
    std::vector<double> host_w = pattern_of(2, 0, DEPTH * COLS);
    for (int row : checked) {
        std::vector<floatX> got = m.read(out + (int64_t)row * COLS, COLS), base(COLS);
        std::vector<double> host_x = pattern_of(1, (int64_t)row * DEPTH, DEPTH);
        if (with_c)
            base = m.read(c + (int64_t)row * COLS, COLS);
        for (int j = 0; j < COLS; j++) {
            double sum = g.layout == LAYOUT_NN ? dot(host_x.data(), &host_w[(size_t)j], COLS, DEPTH)
                                               : dot(host_x.data(), &host_w[(size_t)j * DEPTH], 1, DEPTH);
            if (alpha)
                sum *= (double)g.alpha;
            d.add(at(got, j), epilogue_of(g.epilogue, sum, with_c ? at(base, j) : 0));
        }
    }
    require(d, g.name);
}

// relu^2 of a product of codes, its own codes, and the product onto it. Scales are 1. The limit is derived as
// in self_check_head.cu: sums near 5 (root mean square of 256 products), off by 0.008 at most and rounded to
// bf16; twice that in the square, which is rounded, too.
static void check_fp8_gemm(Stream s)
{
    enum { DEPTH = 256, COLS = 2 * TILE_N };
    const double limit = 2 * (2 * (0.008 / 5 + 0x1p-9) + 0x1p-9);
    int rows = CLUSTER * TILE_M * (sm90_tile_clusters() / 2 + 2),
        checked[ROWS_CHECKED] = {0, TILE_M + 1, rows / 2 + 77, rows - 1};
    Arena m(s);
    ProductContext context = {s, NULL};
    float unit = 1, *scale = m.take<float>(1);
    CUDA_CHECK(cudaMemcpyAsync(scale, &unit, sizeof unit, cudaMemcpyHostToDevice, s));
    uint8_t *x8 = m.take<uint8_t>((int64_t)rows * DEPTH), *w8 = m.take<uint8_t>(COLS * DEPTH),
            *y8 = m.take<uint8_t>((int64_t)rows * COLS);
    floatX *y = m.take<floatX>((int64_t)rows * COLS), *onto = m.take<floatX>((int64_t)rows * COLS);
    quantize_e4m3(s, x8, m.filled((int64_t)rows * DEPTH, 14), scale, rows, DEPTH, QUANTIZE_INVERSE, false);
    quantize_e4m3(s, w8, m.filled(COLS * DEPTH, 15), scale, COLS, DEPTH, QUANTIZE_INVERSE, false);
    Fp8Product p = {x8, w8, scale, scale, rows, DEPTH, COLS, NULL};
    if (!sm90_fp8_relu2(&context, y, y8, NULL, &p, scale) || !sm90_fp8_gemm(&context, onto, &p, y))
        return;
    Distance squares, codes, sums;
    std::vector<double> host_w = pattern_of(15, 0, COLS * DEPTH);
    for (double &v : host_w)
        v = e4m3((float)v);
    for (int row : checked) {
        int64_t first = (int64_t)row * COLS;
        std::vector<floatX> got = m.read(y + first, COLS), got_sum = m.read(onto + first, COLS);
        std::vector<uint8_t> got_codes = m.read(y8 + first, COLS);
        std::vector<double> host_x = pattern_of(14, (int64_t)row * DEPTH, DEPTH);
        for (double &v : host_x)
            v = e4m3((float)v);
        for (int j = 0; j < COLS; j++) {
            double sum = dot(host_x.data(), &host_w[(size_t)j * DEPTH], 1, DEPTH), stored = at(got, j);
            squares.add(stored, sum > 0 ? sum * sum : 0);
            sums.add(at(got_sum, j), sum + stored);
            codes.add(code_value(got_codes[(size_t)j]), e4m3((float)stored));
        }
    }
    require(squares, "relu^2 in FP8", limit);
    require(sums, "FP8 products", limit);
    require(codes, "codes of relu^2", 0);
}

// Codes of relu^2 and of the gradient before it, both ways round, beside those that the kernels checked above
// give for the same products: the sums have the same order, and the same bits. Scales are 1.
static void check_fp8_codes(Stream s)
{
    enum { DEPTH = 256, COLS = 2 * TILE_N };
    int rows = CLUSTER * TILE_M * (sm90_tile_clusters() / 2 + 2),
        checked[ROWS_CHECKED] = {0, TILE_M + 1, rows / 2 + 77, rows - 1};
    int64_t n = (int64_t)rows * COLS;
    Arena m(s);
    ProductContext context = {s, NULL};
    float unit = 1, *scale = m.take<float>(1);
    CUDA_CHECK(cudaMemcpyAsync(scale, &unit, sizeof unit, cudaMemcpyHostToDevice, s));
    uint8_t *x8 = m.take<uint8_t>((int64_t)rows * DEPTH), *w8 = m.take<uint8_t>(COLS * DEPTH),
            *y8 = m.take<uint8_t>(n);
    floatX *y = m.take<floatX>(n), *sums = m.take<floatX>(n);
    quantize_e4m3(s, x8, m.filled((int64_t)rows * DEPTH, 14), scale, rows, DEPTH, QUANTIZE_INVERSE, false);
    quantize_e4m3(s, w8, m.filled(COLS * DEPTH, 15), scale, COLS, DEPTH, QUANTIZE_INVERSE, false);
    Fp8Product p = {x8, w8, scale, scale, rows, DEPTH, COLS, NULL};
    Codes codes = {m.take<uint8_t>(n), m.take<uint8_t>(n), scale, NULL},
          gradient = {m.take<uint8_t>(n), m.take<uint8_t>(n), scale, NULL};
    if (!sm90_fp8_relu2(&context, y, y8, NULL, &p, scale) || !sm90_fp8_gemm(&context, sums, &p, NULL) ||
        !sm90_fp8_codes(&context, &codes, &p, NULL, NULL) ||
        !sm90_fp8_codes(&context, &gradient, &p, y8, scale))
        return;
    Distance d;
    std::vector<uint8_t> turned = m.read(codes.transposed, n),
                         turned_gradient = m.read(gradient.transposed, n);
    for (int row : checked) {
        int64_t first = (int64_t)row * COLS;
        std::vector<floatX> sum = m.read(sums + first, COLS);
        std::vector<uint8_t> want = m.read(y8 + first, COLS), got = m.read(codes.codes + first, COLS),
                             got_gradient = m.read(gradient.codes + first, COLS);
        for (size_t j = 0; j < COLS; j++) {
            double squared = code_value(want[j]),
                   g = rounded_to_bf16(at(sum, (int64_t)j) * 2 * rounded_to_bf16(sqrt(squared)));
            d.add(code_value(got[j]), squared);
            d.add(code_value(turned[j * (size_t)rows + (size_t)row]), squared);
            d.add(code_value(got_gradient[j]), e4m3((float)g));
            d.add(code_value(turned_gradient[j * (size_t)rows + (size_t)row]), e4m3((float)g));
        }
    }
    require(d, "codes of relu^2 and its gradient", 0);
}

static void check_weight_grad(Stream s)
{
    enum { N = 320, M = 6 * CLUSTER * TILE_M, COLS = 4 * TILE_N };
    Arena m(s);
    ProductContext context = {s, NULL};
    floatX *a = m.filled((int64_t)N * M, 3), *b = m.filled((int64_t)N * COLS, 4);
    float *dw = m.take<float>((int64_t)M * COLS);
    WeightGrad g = {.dw = dw, .a = a, .b = b, .m = M, .n = COLS, .fresh = true};
    Distance d;
    if (!sm90_weight_grad(&context, &g, 1, N))
        return;
    g.fresh = false;
    sm90_weight_grad(&context, &g, 1, N); // twice the product
    std::vector<double> host_b = pattern_of(4, 0, (int64_t)N * COLS);
    for (int row : {0, 65, M / 2 + 200, M - 1}) {
        std::vector<float> got = m.read(dw + (int64_t)row * COLS, COLS);
        double column[N];
        for (int k = 0; k < N; k++)
            column[k] = (double)pattern(3, (int64_t)k * M + row);
        for (int j = 0; j < COLS; j++)
            d.add((double)got[(size_t)j], 2 * dot(column, &host_b[(size_t)j], COLS, N));
    }
    require(d, "weight gradients");
}

// ---- Newton-Schulz ---------------------------------------------------------------------------------------

// A chain of the three products: a = x x^T, c = a a / 64 + a / 2, y = a x / 64 + x.
static void check_ns_chain(Stream s)
{
    enum { N = 320, M = 384 };
    if (ns_pitch(NS_BF16, N, M) != M)
        return;
    Arena m(s);
    floatX *x = m.filled(N * M, 11), *a = m.take<floatX>(N * N), *c = m.take<floatX>(N * N),
           *y = m.take<floatX>(N * M);
    NsChain chain = {s, NS_BF16, 1, NULL};
    ns_chain_begin(&chain);
    ns_gram(&chain, a, x, N, M);
    NsSymmetric squared = {};
    squared.c = c;
    squared.a = squared.b = squared.d = a;
    squared.alpha = 1.0f / 64;
    squared.beta = 0.5f;
    squared.n = N;
    ns_symmetric(&chain, &squared);
    const NsApply applied = {y, a, x, 1.0f / 64, 1, N, M, false};
    ns_apply(&chain, &applied);
    ns_chain_end(&chain);
    std::vector<floatX> host_a = m.read(a, N * N), host_c = m.read(c, N * N), host_y = m.read(y, N * M);
    std::vector<double> host_x = pattern_of(11, 0, N * M), host_gram((size_t)(N * N));
    for (int i = 0; i < N * N; i++)
        host_gram[(size_t)i] = at(host_a, i);
    Distance gram, square, product;
    for (int row : {0, 70, 255, N - 1}) {
        const double *x_row = &host_x[(size_t)(row * M)], *a_row = &host_gram[(size_t)(row * N)];
        for (int j = 0; j < N; j++) {
            gram.add(a_row[j], dot(x_row, &host_x[(size_t)(j * M)], 1, M));
            square.add(at(host_c, row * N + j), dot(a_row, &host_gram[(size_t)j], N, N) / 64 + a_row[j] / 2);
        }
        for (int j = 0; j < M; j++)
            product.add(at(host_y, row * M + j), dot(a_row, &host_x[(size_t)j], M, N) / 64 + x_row[j]);
    }
    require(gram, "Newton-Schulz' Gram matrix");
    require(square, "Newton-Schulz' symmetric product");
    require(product, "Newton-Schulz' product");
}

// One step of a matrix of n rows: x + (b A + c A^2) x, A = x x^T.
static void check_ns_small(Stream s, int n)
{
    enum { M = 256 };
    const double b = -1.0 / 256, c = 1.0 / 65536;
    if (!ns_iterates(NS_BF16, n, M))
        return;
    Arena m(s);
    floatX *x = m.filled((int64_t)n * M, 12), *out = m.take<floatX>((int64_t)n * M);
    NsIteration it = {};
    it.steps = 1;
    it.a[0] = 1;
    it.b[0] = (float)b;
    it.c[0] = (float)c;
    const NsMatrices matrices = {x, out, NULL, n, M, 1};
    ns_iterate(s, NS_BF16, &it, &matrices);
    std::vector<floatX> got = m.read(out, (int64_t)n * M);
    std::vector<double> host_x = pattern_of(12, 0, (int64_t)n * M), gram((size_t)(n * n)), z((size_t)n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++)
            gram[(size_t)(i * n + j)] = gram[(size_t)(j * n + i)] =
                rounded_to_bf16(dot(&host_x[(size_t)(i * M)], &host_x[(size_t)(j * M)], 1, M));
    Distance d;
    for (int row : {0, n / 2, n - 1}) {
        const double *a_row = &gram[(size_t)(row * n)];
        for (int j = 0; j < n; j++)
            z[(size_t)j] = rounded_to_bf16(b * a_row[j] + c * dot(a_row, &gram[(size_t)j], n, n));
        for (int j = 0; j < M; j++)
            d.add(at(got, row * M + j),
                  host_x[(size_t)(row * M + j)] + dot(z.data(), &host_x[(size_t)j], M, n));
    }
    require(d, "Newton-Schulz of small matrices");
}

static void check_sm90(Stream s)
{
    static const GemmCase gemms[] = {{LAYOUT_NN, EPILOGUE_STORE, "products (NN)"},
                                     {LAYOUT_NT, EPILOGUE_STORE, "products (NT)"},
                                     {LAYOUT_NT, EPILOGUE_RESIDUAL, "products with a residual"},
                                     {LAYOUT_NN, EPILOGUE_RELU2, "products with relu^2"},
                                     {LAYOUT_NN, EPILOGUE_DRELU2, "products with the gradient of relu^2"},
                                     {LAYOUT_NT, EPILOGUE_STORE, "products with a factor (NT)", -0.7f},
                                     {LAYOUT_NT, EPILOGUE_RESIDUAL, "products with a factor and a residual",
                                      -0.7f}};
    for (const GemmCase &g : gemms)
        check_gemm(s, g);
    check_fp8_gemm(s);
    check_fp8_codes(s);
    check_weight_grad(s);
    check_qkv(s);
    check_head(s);
    check_ns_chain(s);
    check_ns_small(s, 72);
    check_ns_small(s, 136);
}

static void check_all(void)
{
    Error e;
    Stream s = stream_create();
    if (!device_has_wgmma()) {
        check_sm80(s);
        check_qkv(s);
        check_ns_chain(s);
    } else {
        check_sm90(s);
    }
    stream_destroy(s);
    Error products = wrong;
    if (!attention_own_is_right(&e))
        error_set(&wrong, "%s%s%s", products.text, products.text[0] ? "; " : "", e.text);
    if (wrong.text[0])
        fail(wrong.text);
}

// Model and UUID: every GPU of a machine is checked.
static void describe_gpu(char *text, size_t size)
{
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device_state.index));
    int n = snprintf(text, size, "%s ", properties.name);
    for (char c : properties.uuid.bytes)
        n += snprintf(text + n, size - (size_t)n, "%02x", (unsigned char)c);
}

} // namespace

void self_check(void)
{
    const OpSizes *z = &device_state.sizes;
    char gpu[320], checks[320], driver[320];
    int cuda = 0;
    const char *kernel_driver = driver_version("/proc/driver/nvidia/version");
    describe_gpu(gpu, sizeof gpu);
    CUDA_CHECK(cudaDriverGetVersion(&cuda));
    snprintf(driver, sizeof driver, "CUDA %d, %s", cuda, kernel_driver ? kernel_driver : "");
    snprintf(
        checks, sizeof checks,
        "%s, attention of %d tokens, %d heads of %d, q and k %d, reach %d, backward %d, deterministic %d, "
        "by %d and %d",
        device_path(), attention_checked_tokens(), z->heads, z->dim / z->heads, z->key_dim / z->heads,
        z->reach, z->tokens > 0, z->deterministic, attention_by(false), attention_by(true));
    CheckKey key = {gpu, checks, program_build_id(), kernel_driver ? driver : NULL};
    if (!check_needed(z->self_check, &key)) {
        timeline_mark("self-check (passed before)");
        return;
    }
    check_all();
    check_remember(&key);
    timeline_mark("self-check");
}
