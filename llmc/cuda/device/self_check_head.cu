// Start-up check of the head: logits, losses, codes of the gradient and its products.
#include "llmc/cuda/device/self_check_tools.cuh"
#include "llmc/cuda/head/fp8_transpose.cuh"
#include "llmc/cuda/head/sm90_head_gradient.cuh"
#include "llmc/cuda/head/sm90_head_logits.cuh"

namespace self_check_tools
{

// Of sums of e^z. In training z = 15 t - 15 with the hardware's tanh t, good to 2^-11: e^z is off by
// 15 x 2^-11 = 0.7% at most. The FP8 units keep 13 bits behind the leading one of the largest addend: sums
// below 16 in 8 steps of 32 products are off by 8 x 16 x 2^-14 = 0.008, a quarter of that in the logit, and
// dz/dlogit is at most 1: 0.2%. The limit is twice the two together. Validation's forms are better than that.
const double HEAD_LIMIT = 2 * (0.0073 + 0.002);
// Of gradients in e5m2: the error of a code is at most half a step, a step at most 1/4 of it, and uniform:
// 1/8 / sqrt 3 = 0.072 in the root mean square. 1 - sig, which the hardware's tanh gives, adds less than
// HEAD_LIMIT here. Of x in e4m3: 1/16 / sqrt 3.
const double CODE_LIMIT = 0.0722 + HEAD_LIMIT, X_LIMIT = 0.0361;
// Of products of codes that were read back: sums of up to 416 products keep 13 bits behind the leading one of
// the largest addend, in 13 steps whose cuts are half a unit on average; then results are rounded to bf16.
const double PRODUCT_LIMIT = 8 * 0x1p-13 + 0x1p-9;
enum { ROWS = 130, PADDED = 144, D = 256, VP = 416, PITCH = 256, TARGETS = 2 }; // parts of 192, 192, 32

static const HeadSpec spec = {20, 6, 1, 0, 1, 1};
static const float weights[TARGETS] = {1, 0.5f}, LOGIT_SCALE = 0.25f, SHARE = (float)PART_COLS / VP,
                   SCALE_X = 0.5f, SCALE_W = 0.5f;

static double capped(double logit) { return spec.cap / (1 + exp(-(logit + spec.shift) / spec.slope)); }
static int target_of(int row) { return row % 7 == 6 ? -1 : row * 37 % VP; }

// One set of operands, on the device and, quantised in FP8, on the host.
struct Operands {
    std::vector<double> x, w;
    HeadLogits a;
    RowTargets targets;
    uint8_t *w8_transposed;
    Operands(Arena *m, HeadMode mode, int count);
    double logit(int row, int col) const
    {
        return (double)LOGIT_SCALE * dot(&x[(size_t)(row * D)], &w[(size_t)(col * D)], 1, D);
    }
};

Operands::Operands(Arena *m, HeadMode mode, int count)
    : x(pattern_of(9, 0, ROWS * D)), w(pattern_of(10, 0, VP * D)), a(), targets(), w8_transposed()
{
    floatX *device_x = m->filled(ROWS * D, 9), *device_w = m->filled(VP * D, 10);
    int parts = sm90_head_parts(mode, VP);
    int32_t host_targets[ROWS], *device_targets = m->take<int32_t>(ROWS);
    float *weight = m->take<float>(TARGETS);
    for (int row = 0; row < ROWS; row++)
        host_targets[row] = target_of(row);
    CUDA_CHECK(cudaMemcpyAsync(device_targets, host_targets, sizeof host_targets, cudaMemcpyHostToDevice,
                               m->stream));
    CUDA_CHECK(cudaMemcpyAsync(weight, weights, sizeof weights, cudaMemcpyHostToDevice, m->stream));
    a.mode = mode;
    a.form = loss_form(&spec, D);
    a.sums = m->take<float>(parts * PITCH);
    a.x = device_x;
    a.w = device_w;
    targets = {device_targets, weight, count, ROWS, NULL, NULL};
    a.scale = LOGIT_SCALE;
    a.rows = ROWS;
    a.d = D;
    a.Vp = VP;
    a.pitch = PITCH;
    if (mode == HEAD_BF16)
        return;
    uint8_t *x8 = m->take<uint8_t>(PADDED * D), *w8 = m->take<uint8_t>(VP * D);
    w8_transposed = m->take<uint8_t>(VP * D);
    Fp8Quantize of_x =
        {.plain = x8, .x = device_x, .scale = 1, .rows = ROWS, .rows_padded = PADDED, .cols = D};
    Fp8Quantize of_w = {.plain = w8,
                        .transposed = w8_transposed,
                        .x = device_w,
                        .scale = 1,
                        .rows = VP,
                        .rows_padded = VP,
                        .cols = D,
                        .product_order = true};
    fp8_quantize(m->stream, &of_x);
    fp8_quantize(m->stream, &of_w);
    a.x = x8;
    a.w = w8;
    a.codes = m->take<uint8_t>(ROWS * VP);
    a.excess = m->take<uint8_t>(parts * PITCH);
    a.base = m->take<float>(PITCH);
    for (double &v : x)
        v = e4m3((float)v);
    for (double &v : w)
        v = e4m3((float)v);
}

// Sums of the parts of some rows.
static void check_sums(Arena *m, const Operands &o)
{
    bool fp8 = o.a.mode == HEAD_FP8;
    int parts = sm90_head_parts(o.a.mode, VP), cols = fp8 ? PART_COLS : 96;
    std::vector<float> got = m->read(o.a.sums, parts * PITCH);
    Distance d;
    for (int row : {0, 63, 64, 65, ROWS - 1})
        for (int part = 0; part < parts; part++) {
            double total = 0;
            for (int j = part * cols; j < (part + 1) * cols && j < VP; j++)
                total += exp(capped(o.logit(row, j)) - (double)spec.cap);
            d.add((double)got[(size_t)(part * PITCH + row)] / total, 1);
        }
    require(d, fp8 ? "the FP8 head's sums" : "the head of validation", HEAD_LIMIT);
}

// Sum of the weights of a row's targets.
static double weights_of(int row, int count)
{
    double all = 0;
    for (int k = 0; k < count; k++)
        all += row + k < ROWS && target_of(row + k) >= 0 ? (double)weights[k] : 0;
    return all;
}

// Gradient of a row's logits, in double; the sum of its weights.
static double gradient_of(const Operands &o, int row, int count, std::vector<double> *g)
{
    double sum = 0, all = weights_of(row, count), z[VP];
    for (int j = 0; j < VP; j++)
        sum += exp(z[j] = capped(o.logit(row, j)));
    for (int j = 0; j < VP; j++) {
        double sig = z[j] / (double)spec.cap, wanted = 0;
        for (int k = 0; k < count; k++)
            wanted += row + k < ROWS && target_of(row + k) == j ? (double)weights[k] : 0;
        (*g)[(size_t)j] =
            (all * exp(z[j]) / sum - wanted) * (double)(spec.cap / spec.slope) * sig * (1 - sig);
    }
    return all;
}

// What the training kernels have made of the operands, read back.
struct Gradient {
    std::vector<uint8_t> codes, x8;
    std::vector<float> dx_factors, x_factors, dw_factor;
    double code(int row, int col) const { return code_value(codes[(size_t)(row * VP + col)], __NV_E5M2); }
    double x(int row, int c) const { return code_value(x8[(size_t)(c * PADDED + interleaved_row(row))]); }
};

// Bases of the codes, estimated from the first part; then, of two rows of three, lower ones: that of the
// row's own sum, and one that is too low.
static void make_bases(Arena *m, const Operands &o, int count)
{
    float *base = (float *)o.a.base;
    HeadLogits first = o.a;
    first.codes = NULL;
    first.Vp = PART_COLS;
    sm90_head_logits(m->stream, &first);
    BasesFromSums b = {base, first.sums, o.targets, SHARE, 1, PITCH, ROWS};
    bases_from_sums(m->stream, &o.a.form, &b);
    std::vector<float> got = m->read(base, ROWS);
    Distance d;
    for (int row = 1; row < ROWS; row += 16) {
        double sum = 0, all = weights_of(row, count);
        for (int j = 0; j < PART_COLS; j++)
            sum += exp(capped(o.logit(row, j)) - (double)spec.cap);
        double above = (double)got[(size_t)row] - SLACK - log2(sum);
        double unit = above + (all > 0 ? log2(all * (double)(spec.cap / spec.slope) * (double)SHARE) +
                                             log2((double)o.a.form.code_factor)
                                       : 0);
        bool right = above > -0.02 && above < 1.02 && fabs(unit - floor(unit + 0.5)) < 0.02;
        d.add(right ? 0 : 1, 0);
    }
    require(d, "the FP8 head's estimate", 0);
    for (int row = 0; row < ROWS; row++)
        got[(size_t)row] -= (float)(row % 3 == 0 ? 0 : row % 3 == 1 ? SLACK - 1 : SLACK + 9);
    CUDA_CHECK(cudaMemcpyAsync(base, got.data(), ROWS * sizeof(float), cudaMemcpyHostToDevice, m->stream));
    stream_synchronize(m->stream);
}

static void check_codes(const Operands &o, const Gradient &g, int count)
{
    Distance d, d_x;
    std::vector<double> want((size_t)VP);
    for (int row : {0, 6, 62, 63, 64, 65, 100, 128, ROWS - 1}) { // 62, 65, 128: codes are lowered
        double factor = (double)g.dx_factors[(size_t)row] / (double)SCALE_W,
               all = gradient_of(o, row, count, &want);
        for (int j = 0; j < VP; j++)
            d.add(factor * g.code(row, j), want[(size_t)j]);
        for (int c = 0; c < D; c++)
            d_x.add(g.x(row, c) * (double)SCALE_X,
                    (double)(g.x_factors[(size_t)row] * pattern(9, row * D + c)));
        if (all == 0 && (factor != 0 || g.x_factors[(size_t)row] != 0))
            d.add(1, 0);
        if (all != 0 && factor != 0) // both factors are of the same gradient
            d_x.add((double)(g.x_factors[(size_t)row] * g.dw_factor[0] / SCALE_X) / factor, 1);
    }
    require(d, "the FP8 head's codes", CODE_LIMIT);
    require(d_x, "the FP8 head's x", X_LIMIT);
}

static void check_products(Arena *m, const Operands &o, const Gradient &g, const uint8_t *x8,
                           const float *dx_factors, const float *dw_factor)
{
    floatX *dx = m->take<floatX>(ROWS * D);
    float *dw = m->take<float>(VP * D);
    HeadProduct of_x = {o.a.codes, o.w8_transposed, ROWS, D, VP, VP},
                of_w = {o.a.codes, x8, ROWS, D, VP, PADDED};
    sm90_head_dx(m->stream, &of_x, dx, dx_factors);
    sm90_head_dw(m->stream, &of_w, dw, dw_factor);
    sm90_head_dw(m->stream, &of_w, dw, dw_factor); // is added to
    std::vector<floatX> got_x = m->read(dx, ROWS * D);
    std::vector<float> got_w = m->read(dw, VP * D);
    Distance d_x, d_w;
    for (int row : {0, 63, 64, 121, ROWS - 1})
        for (int c = 0; c < D; c++) {
            double sum = 0;
            for (int j = 0; j < VP; j++)
                sum += g.code(row, j) * o.w[(size_t)(j * D + c)];
            d_x.add(at(got_x, row * D + c), sum * (double)g.dx_factors[(size_t)row]);
        }
    for (int j : {0, 1, 63, 191, 192, 300, VP - 1})
        for (int c = 0; c < D; c++) {
            double sum = 0;
            for (int row = 0; row < ROWS; row++)
                sum += g.code(row, j) * g.x(row, c);
            d_w.add((double)got_w[(size_t)(j * D + c)], 2 * sum * (double)g.dw_factor[0]);
        }
    require(d_x, "the FP8 head's dx", PRODUCT_LIMIT);
    require(d_w, "the FP8 head's dw", PRODUCT_LIMIT);
}

// From the sums of all parts: of training with FP8's operands, of evaluation with those in bf16.
static SumLosses losses_of(Arena *m, const Operands &o)
{
    bool fp8 = o.a.mode == HEAD_FP8;
    return {.losses = m->take<float>(ROWS),
            .sums = o.a.sums,
            .x = fp8 ? NULL : (const floatX *)o.a.x,
            .w = fp8 ? NULL : (const floatX *)o.a.w,
            .targets = o.targets,
            .mask = {},
            .parts = sm90_head_parts(o.a.mode, VP),
            .pitch = PITCH,
            .rows = ROWS,
            .d = D,
            .Vp = VP,
            .scale_x = SCALE_X,
            .scale_w = SCALE_W};
}

static void check_losses(Arena *m, const Operands &o, const float *losses, int count, const char *what)
{
    std::vector<float> got = m->read(losses, ROWS);
    Distance d;
    for (int row : {0, 6, 63, 64, 65, 128, ROWS - 1}) {
        double sum = 0, want = 0;
        for (int j = 0; j < VP; j++)
            sum += exp(capped(o.logit(row, j)));
        for (int k = 0; k < count && row + k < ROWS; k++)
            want += target_of(row + k) < 0
                        ? 0
                        : (double)weights[k] * (log(sum) - capped(o.logit(row, target_of(row + k))));
        d.add((double)got[(size_t)row], want);
    }
    require(d, what, HEAD_LIMIT);
}

// Returns (MAX_TERMS, PITCH), of which some rows have been checked.
static const float *target_logits(Arena *m, const Operands &o, int count)
{
    float *logits = m->take<float>(MAX_TERMS * PITCH);
    TargetLogits t = {logits, (const uint8_t *)o.a.x, (const uint8_t *)o.a.w, o.targets, ROWS, D, PITCH};
    sm90_target_logits(m->stream, &t);
    std::vector<float> got = m->read(logits, MAX_TERMS * PITCH);
    Distance d;
    for (int row : {0, 7, 8, 16, 63, 64, 65, ROWS - 1})
        for (int k = 0; k < count && row + k < ROWS; k++)
            if (target_of(row + k) >= 0)
                d.add((double)(got[(size_t)(k * PITCH + row)] * LOGIT_SCALE),
                      o.logit(row, target_of(row + k)));
    require(d, "targets of the head", HEAD_LIMIT);
    return logits;
}

// Losses of some rows, then the gradient. count: targets of a row
static void check_training(Stream s, int count)
{
    Arena m(s);
    Operands o(&m, HEAD_FP8, count);
    make_bases(&m, o, count);
    sm90_head_logits(s, &o.a);
    check_sums(&m, o);
    float *dx_factors = m.take<float>(PITCH), *x_factors = m.take<float>(PITCH),
          *dw_factor = m.take<float>(1);
    SumLosses l = losses_of(&m, o);
    l.target_logits = target_logits(&m, o, count);
    l.codes = o.a.codes;
    l.excess = o.a.excess;
    l.base = o.a.base;
    l.dx_factors = dx_factors;
    l.x_factors = x_factors;
    l.dw_factor = dw_factor;
    loss_from_sums(s, &o.a.form, &l);
    uint8_t *x8 = m.take<uint8_t>(PADDED * D);
    Fp8Quantize of_x = {.transposed = x8,
                        .x = m.filled(ROWS * D, 9),
                        .scale = SCALE_X,
                        .rows = ROWS,
                        .rows_padded = PADDED,
                        .cols = D,
                        .factors = x_factors,
                        .interleaved = true};
    fp8_quantize(s, &of_x);
    Gradient g = {m.read(o.a.codes, ROWS * VP), m.read(x8, PADDED * D), m.read(dx_factors, PITCH),
                  m.read(x_factors, PITCH), m.read(dw_factor, 1)};
    check_losses(&m, o, l.losses, count, "the FP8 head's losses");
    check_codes(o, g, count);
    check_products(&m, o, g, x8, dx_factors, dw_factor);
}

// Whether a target's logit is cut as its tile's is, to HEAD_LIMIT, where the tensor cores cut 2.5% of the
// sums: behind 32 products of 2 those just below 2^-7 are dropped. All columns are alike, so a part's sum is
// COLUMNS e^(z - cap); the sum in fp32 would be 7% off.
static void check_target_cuts(Stream s)
{
    enum { COLUMNS = 32 };
    Arena m(s);
    std::vector<uint8_t> x((size_t)(ROWS * D)), w((size_t)(COLUMNS * D));
    for (size_t i = 0; i < x.size(); i++)
        x[i] = __nv_cvt_float_to_fp8(i % D < 32 ? 2 : 0.9375f, __NV_SATFINITE, __NV_E4M3);
    for (size_t i = 0; i < w.size(); i++)
        w[i] = __nv_cvt_float_to_fp8(i % D < 32 ? 1 : 0x1p-7f, __NV_SATFINITE, __NV_E4M3);
    uint8_t *device_x = m.take<uint8_t>(ROWS * D), *device_w = m.take<uint8_t>(COLUMNS * D);
    int32_t *targets = m.take<int32_t>(ROWS);
    float *sums = m.take<float>(PITCH), *logits = m.take<float>(MAX_TERMS * PITCH);
    CUDA_CHECK(cudaMemcpyAsync(device_x, x.data(), x.size(), cudaMemcpyHostToDevice, s));
    CUDA_CHECK(cudaMemcpyAsync(device_w, w.data(), w.size(), cudaMemcpyHostToDevice, s));
    CUDA_CHECK(cudaMemsetAsync(targets, 0, ROWS * sizeof *targets, s));
    HeadLogits a = {};
    a.mode = HEAD_FP8;
    a.form = loss_form(&spec, D);
    a.sums = sums;
    a.x = device_x;
    a.w = device_w;
    a.scale = LOGIT_SCALE / 4;
    a.rows = ROWS;
    a.d = D;
    a.Vp = COLUMNS;
    a.pitch = PITCH;
    TargetLogits t = {logits, device_x, device_w, {targets, NULL, 1, ROWS, NULL, NULL}, ROWS, D, PITCH};
    sm90_head_logits(s, &a);
    sm90_target_logits(s, &t);
    std::vector<float> sum = m.read(sums, PITCH), logit = m.read(logits, MAX_TERMS * PITCH);
    Distance d;
    for (int row = 0; row < ROWS; row++) {
        double z = capped((double)(logit[(size_t)row] * a.scale));
        d.add((double)sum[(size_t)row] / (COLUMNS * exp(z - (double)spec.cap)), 1);
    }
    require(d, "targets beside tiles", HEAD_LIMIT);
}

void check_head(Stream s)
{
    if (sm90_head_fits(HEAD_BF16, D, VP)) {
        Arena m(s);
        Operands o(&m, HEAD_BF16, 1);
        sm90_head_logits(s, &o.a);
        check_sums(&m, o);
        SumLosses l = losses_of(&m, o);
        loss_from_sums(s, &o.a.form, &l);
        check_losses(&m, o, l.losses, 1, "the losses of validation");
    }
    for (int count = 1; device_has_fp8() && sm90_head_fits(HEAD_FP8, D, VP) && count <= TARGETS; count++)
        check_training(s, count);
    if (device_has_fp8() && sm90_head_fits(HEAD_FP8, D, VP))
        check_target_cuts(s);
}

} // namespace self_check_tools
