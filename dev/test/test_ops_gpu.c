// Every op of the CUDA backend (attention and Newton-Schulz have tests of their own) against the CPU backend.
//
//   test_ops_gpu [--portable] [DIR [ROUNDS [FILTER]]]
//       --portable: on the kernels that every supported GPU runs; DIR holds libref_bf16.so and libref_fp32.so: the CPU backend in
//       its two builds (default build/ref); ROUNDS: only the first so many sizes, for runs under compute-sanitizer; FILTER: only
//       ops whose name contains it
//
// The same inputs, representable in bf16, go through three backends: the fp32 CPU build is the truth, the bf16 CPU build is what
// a plain implementation with the same storage types gives, and the GPU's distance from the truth (relative, in the 2-norm) may
// be at most twice the plain one's, plus FP32_ATOM for what the order of fp32 sums may change. Outputs start as NaN. Every op
// runs twice on the same input and must give the same bits.
#include "dev/test/tap.h"
#include "llmc/cpu/fp8.h"
#include "llmc/cuda/device.h"
#include "llmc/ops.h"
#include <stdlib.h>
#include <string.h>

#define FP32_ATOM 1e-5
#define OPS(X)                                                                                                                  \
    X(backend_open) X(backend_reserve) X(backend_close) X(device_alloc) X(device_free) X(embed_forward) X(embed_backward)       \
    X(embedding_grad) X(coefficients_forward) X(coefficients_backward) X(mix_rmsnorm_forward) X(mix_rmsnorm_backward)           \
    X(rmsnorm_forward) X(rmsnorm_backward) X(matmul_forward) X(matmul_backward_input) X(matmul_weight_grads)                    \
    X(matmul_relu2_forward) X(matmul_relu2_backward) X(rope_tables) X(qkv_forward) X(qkv_product_forward) X(qkv_backward)       \
    X(head_weight_bytes) X(head_quantize) X(head_loss_train) X(head_loss_eval)       \
    X(head_logits) X(adam_update) X(adam_update_fp32) X(normuon_momentum) X(normuon_update) X(cast_weights)
#include "dev/test/ops_library.h"
typedef enum { GPU, NAIVE, TRUTH, BACKENDS } Which;
static Ops ops[BACKENDS];
static bool portable;
static Stream stream;
static const char *filter = "";

// ---- a case: its buffers, and how to run it ------------------------------------------------------------------------------

// What a buffer's elements are. HOST_*: ops read them on the host. ORTHO_*: input of normuon_update, which the CPU builds hold as
// float and double. WEIGHT8: a backend's own quantised weight.
typedef enum { FLOATX, FP32, INT32, HOST_FLOAT, HOST_INT, ORTHO_BF16, ORTHO_FP16, ORTHO_FP32, WEIGHT8 } Kind;
typedef enum { IN, OUT, INOUT } Role;
typedef struct {
    const char *name;
    Kind kind;
    Role role;
    int64_t count;
    double scale;  // inputs are uniform in (-scale, scale); integers in [0, scale)
    double spread; // standard deviation of a sum of random signs, which may come near zero by chance; else 0
} Buffer;

typedef struct {
    int N, H, e, F, Vp;
} Sizes;
enum { MAX_BUFFERS = 24, VARIANTS = 8 };
typedef struct Case Case;
struct Case {
    const char *name;
    void (*describe)(Case *);                   // lists the buffers for these sizes
    void (*run)(const Ops *, void **, const Case *);
    void (*fix)(Case *);                        // changes inputs that must not be random
    int variants;
    bool elementwise;                           // also at the full size on the CPU
    // filled for each run
    Sizes z;
    int d, variant, count;
    Buffer buffer[MAX_BUFFERS];
    float *master[MAX_BUFFERS];
};

static void add(Case *c, const char *name, Kind kind, Role role, int64_t count, double scale)
{
    assert(c->count < MAX_BUFFERS);
    c->buffer[c->count++] = (Buffer){name, kind, role, count, scale, 0};
}

// Numbers in [0, 1), each found from its index alone, so that threads can share the work on long arrays: without that, filling and
// comparing take most of this program's time.
static uint64_t random_used;
static double uniform_at(uint64_t index)
{
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 40) * 0x1p-24;
}
static double uniform(void) { return uniform_at(random_used++); }
enum { SHORT = 1 << 14 }; // not worth a second thread

static float to_bf16_value(double x) { return bf16_to_float(float_to_bf16((float)x)); }

static void make_masters(Case *c)
{
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        c->master[i] = xcalloc((size_t)b->count, sizeof(float));
        bool integer = b->kind == INT32 || b->kind == HOST_INT;
        if (b->role == OUT) continue;
        float *to = c->master[i];
#pragma omp parallel for if (b->count > SHORT)
        for (int64_t k = 0; k < b->count; k++) {
            double x = uniform_at(random_used + (uint64_t)k);
            to[k] = integer ? (float)floor(x * b->scale) : to_bf16_value(b->scale * (2 * x - 1));
        }
        random_used += (uint64_t)b->count;
    }
    if (c->fix) c->fix(c);
}

static size_t element_bytes(Which w, Kind k)
{
    if (k == FLOATX) return w == TRUTH ? 4 : 2;
    if (k == ORTHO_BF16 || k == ORTHO_FP16) return w == GPU ? 2 : w == NAIVE ? 4 : 8;
    if (k == ORTHO_FP32) return w == TRUTH ? 8 : 4;
    return 4;
}

// fp32 of a bf16-representable value of ordinary size to fp16: exact when its exponent fits, which the scales see to.
static uint16_t half_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    int exponent = (int)(u >> 23 & 255) - 112;
    if (exponent <= 0) return (uint16_t)(u >> 16 & 0x8000);
    return (uint16_t)((u >> 16 & 0x8000) | (uint32_t)exponent << 10 | (u >> 13 & 0x3ff));
}

static void encode(void *to, Which w, const Buffer *b, const float *master)
{
    size_t bytes = element_bytes(w, b->kind);
#pragma omp parallel for if (b->count > SHORT)
    for (int64_t k = 0; k < b->count; k++) {
        char *at = (char *)to + (size_t)k * bytes;
        float f = b->role == OUT ? NAN : master[k];
        int32_t integer = b->role == OUT ? -1 : (int32_t)master[k];
        double real = f;
        bf16 x = float_to_bf16(f);
        uint16_t half = half_bits(f);
        bool is_integer = b->kind == INT32 || b->kind == HOST_INT;
        if (is_integer) memcpy(at, &integer, 4);
        else if (bytes == 8) memcpy(at, &real, 8);
        else if (bytes == 4) memcpy(at, &f, 4);
        else if (b->kind == ORTHO_FP16) memcpy(at, &half, 2);
        else memcpy(at, &x, 2);
    }
}

static double decode(const void *from, Which w, const Buffer *b, int64_t k)
{
    if (element_bytes(w, b->kind) == 4) return ((const float *)from)[k];
    return bf16_to_float(((const bf16 *)from)[k]);
}

// Runs the case on one backend; result[i] are host copies of the buffers, owned by the caller.
static void run_case(const Case *c, Which w, void **result)
{
    void *p[MAX_BUFFERS];
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        if (b->kind == WEIGHT8) {
            p[i] = ops[w].device_alloc(ops[w].head_weight_bytes(HEAD_FP8, c->z.Vp, c->d), "test");
            continue;
        }
        size_t bytes = (size_t)b->count * element_bytes(w, b->kind);
        result[i] = xcalloc(bytes + 16, 1);
        encode(result[i], w, b, c->master[i]);
        p[i] = result[i];
        if (w != GPU || b->kind == HOST_FLOAT || b->kind == HOST_INT) continue;
        p[i] = device_alloc(bytes, "test");
        copy_to_device(stream, p[i], result[i], bytes);
    }
    c->run(&ops[w], p, c);
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        if (b->kind == WEIGHT8) {
            if (w == GPU) stream_synchronize(stream);
            ops[w].device_free(p[i]);
        } else if (p[i] != result[i]) {
            copy_to_host(stream, result[i], p[i], (size_t)b->count * element_bytes(w, b->kind));
            stream_synchronize(stream);
            device_free(p[i]);
        }
    }
}

static double distance(const void *x, Which w, const void *truth, const Buffer *b)
{
    double difference = 0, size = 0;
#pragma omp parallel for reduction(+ : difference, size) if (b->count > SHORT)
    for (int64_t k = 0; k < b->count; k++) {
        double t = decode(truth, TRUTH, b, k), e = decode(x, w, b, k) - t;
        difference += e * e;
        size += t * t;
    }
    size = fmax(size, b->spread * b->spread * (double)b->count);
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
}

// Losses of the tokens in PIECES equal parts, on the CPU, of a case of head_loss_train.
enum { PIECES = 16 };
static void piece_losses(const Case *c, Which w, float *loss)
{
    void *whole[MAX_BUFFERS], *part[MAX_BUFFERS];
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        bool codes = b->kind == WEIGHT8;
        size_t bytes = codes ? ops[w].head_weight_bytes(HEAD_FP8, c->z.Vp, c->d) : (size_t)b->count * element_bytes(w, b->kind);
        whole[i] = xcalloc(bytes, 1);
        if (!codes) encode(whole[i], w, b, c->master[i]);
    }
    for (int k = 0; k < PIECES; k++) {
        int64_t begin = (int64_t)c->z.N * k / PIECES, end = (int64_t)c->z.N * (k + 1) / PIECES;
        Case piece = *c;
        piece.z.N = (int)(end - begin);
        for (int i = 0; i < c->count; i++) {
            int64_t per_token = !strcmp(c->buffer[i].name, "x") ? c->d : !strcmp(c->buffer[i].name, "targets");
            part[i] = (char *)whole[i] + (size_t)(begin * per_token) * element_bytes(w, c->buffer[i].kind);
            if (!strcmp(c->buffer[i].name, "loss")) part[i] = loss + k;
        }
        loss[k] = 0;
        if (piece.z.N > 0) c->run(&ops[w], part, &piece);
    }
    for (int i = 0; i < c->count; i++) free(whole[i]);
}

// The plain implementation's error in a loss is a sum of as many roundings as there are tokens, and near zero by chance every now
// and then: the root of its mean square instead, relative, from the errors of PIECES parts.
static double loss_spread(const Case *c)
{
    float naive[PIECES], truth[PIECES];
    double squares = 0, size = 0;
    piece_losses(c, NAIVE, naive), piece_losses(c, TRUTH, truth);
    for (int k = 0; k < PIECES; k++) {
        double e = (double)naive[k] - (double)truth[k];
        squares += e * e, size += truth[k];
    }
    return sqrt(squares) / size;
}

static int exponent(double x)
{
    int e = -1000;
    if (x != 0) frexp(x, &e);
    return e;
}

// sum + p[0] + ... as a Hopper tensor core adds `count` products at a time: all are cut to `bits` bits below the largest exponent
// among them, and the sum is cut to fp32. Cuts go toward zero, so the error of a long sum grows with its length and not with the
// root of it. Seen on an H200: bf16 in sums of 512 to 32768 terms, FP8 in sums of 768, errors within 2% of this function's
// (dev/bench/RESULTS.md).
enum { BF16_SUM_BITS = 26, FP8_SUM_BITS = 14 };
static float add_cut(float sum, const double *p, int count, int bits)
{
    int largest = exponent(sum);
    for (int i = 0; i < count; i++) largest = largest > exponent(p[i]) ? largest : exponent(p[i]);
    double unit = ldexp(1, largest - bits), total = trunc(sum / unit);
    for (int i = 0; i < count; i++) total += trunc(p[i] / unit);
    total *= unit;
    float rounded = (float)total;
    return fabs((double)rounded) > fabs(total) ? nextafterf(rounded, 0) : rounded;
}

static double e4m3(double x) { return (double)e4m3_to_float(float_to_e4m3((float)x)); }

// By how much the cuts shrink the logits of an FP8 product: those of the first targets, relative.
static double fp8_shrink(const Case *c, const float *x, const float *w, const float *targets)
{
    double lost = 0, size = 0, sx = sqrt(c->d) / 448;
    for (int i = 0; i < c->z.N && i < 512; i++) {
        double exact = 0, product[32];
        float sum = 0;
        const float *x_row = x + (int64_t)i * c->d, *w_row = w + (int64_t)targets[i] * c->d;
        for (int k = 0; k < c->d || k % 32; k++) {
            exact += product[k % 32] = k < c->d ? e4m3(x_row[k] / sx) * e4m3(512 * w_row[k]) : 0;
            if (k % 32 == 31) sum = add_cut(sum, product, 32, FP8_SUM_BITS);
        }
        size += fabs(exact), lost += exact > 0 ? exact - (double)sum : (double)sum - exact;
    }
    return lost / size;
}

// Twice the plain implementation's error, or what that error comes to by its spread; and for FP8 what shrunk logits may do to a
// loss: l dz/dl = 30 x sig(x) (1 - sig(x)), x = l / 7.5, is at most 6.72, once for the target and once for the others together.
static double loss_limit(const Case *c, double plain, double truth)
{
    const float *x = NULL, *w = NULL, *targets = NULL;
    for (int i = 0; i < c->count; i++) {
        const char *name = c->buffer[i].name;
        *(!strcmp(name, "x") ? &x : !strcmp(name, "w") ? &w : &targets) = c->master[i]; // targets are the last
    }
    double limit = 2 * fmax(plain, loss_spread(c)) + FP32_ATOM;
    return c->variant ? limit + 2 * 6.72 * fp8_shrink(c, x, w, targets) * c->z.N / truth : limit;
}

static void check_case(Case *c, Sizes z, int variant)
{
    void *first[MAX_BUFFERS] = {0}, *again[MAX_BUFFERS] = {0}, *naive[MAX_BUFFERS] = {0}, *truth[MAX_BUFFERS] = {0};
    c->z = z, c->d = z.H * z.e, c->variant = variant, c->count = 0;
    c->describe(c);
    make_masters(c);
    run_case(c, GPU, first);
    run_case(c, GPU, again);
    run_case(c, NAIVE, naive);
    run_case(c, TRUTH, truth);
    bool same = true, good = true;
    char text[1024] = "";
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        if (b->role == IN || b->kind == WEIGHT8) continue;
        same &= memcmp(first[i], again[i], (size_t)b->count * element_bytes(GPU, b->kind)) == 0;
        double gpu = distance(first[i], GPU, truth[i], b), plain = distance(naive[i], NAIVE, truth[i], b);
        double limit = 2 * plain + FP32_ATOM;
        if (gpu > limit && !strcmp(b->name, "loss")) limit = loss_limit(c, plain, *(const float *)truth[i]);
        good &= gpu <= limit;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "  %s %.2g (%.2g)", b->name, gpu, plain);
    }
    ok(good && same, "%s/%d N=%d H=%d e=%d F=%d Vp=%d:%s%s", c->name, variant, z.N, z.H, z.e, z.F, z.Vp, text,
       same ? "" : "  NOT THE SAME BITS TWICE");
    for (int i = 0; i < c->count; i++) free(first[i]), free(again[i]), free(naive[i]), free(truth[i]), free(c->master[i]);
}

#include "dev/test/ops_gpu_cases.h"
#include "dev/test/ops_gpu_full.h"

// ---- main ----------------------------------------------------------------------------------------------------------------

static void with_backends(const OpSizes *sizes, bool cpu, void (*body)(const void *), const void *argument)
{
    for (int w = 0; w < (cpu ? BACKENDS : 1); w++) ops[w].backend_open(0), ops[w].backend_reserve(sizes);
    printf("# %s\n", backend_description());
    stream = stream_create();
    body(argument);
    stream_destroy(stream);
    for (int w = 0; w < (cpu ? BACKENDS : 1); w++) ops[w].backend_close();
}

typedef struct {
    Sizes z;
    bool elementwise_only;
} Round;

static void run_round(const void *argument)
{
    const Round *r = argument;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if ((r->elementwise_only && !cases[i].elementwise) || !strstr(cases[i].name, filter)) continue;
        for (int v = 0; v < cases[i].variants; v++) check_case(&cases[i], r->z, v);
    }
}

static OpSizes sizes_for(Sizes z)
{
    return (OpSizes){.tokens = z.N, .eval_tokens = z.N, .dim = z.H * z.e, .heads = z.H, .mlp_dim = z.F, .vocab_padded = z.Vp,
                     .fp8_head = true, .portable = portable};
}

int main(int argc, char **argv)
{
    portable = argc > 1 && !strcmp(argv[1], "--portable");
    argc -= portable, argv += portable;
    const char *directory = argc > 1 ? argv[1] : "build/ref";
    if (argc > 3) filter = argv[3];
    static const Round rounds[] = {
        {{1, 2, 32, 64, 128}, false},       {{37, 3, 24, 216, 384}, false},      {{130, 2, 128, 512, 1024}, false},
        {{70, 3, 128, 264, 384}, false},    {{17003, 3, 32, 1544, 384}, false},  {{333, 5, 64, 1288, 640}, false},
        {{1031, 5, 216, 2056, 384}, false}, {{257, 4, 256, 2048, 1280}, false},  {{100, 16, 128, 1024, 61440}, false},
        {{517, 6, 128, 3072, 50304}, false}, {{8233, 3, 32, 96, 2048}, false},   {{4133, 3, 128, 776, 384}, false},
        {{32768, 6, 128, 3072, 50304}, true},
    };
#define X(f) ops[GPU].f = f;
    OPS(X)
#undef X
    if (!load_ops(&ops[NAIVE], directory, "libref_bf16.so") || !load_ops(&ops[TRUTH], directory, "libref_fp32.so")) {
        ok(false, "the CPU backend's libraries are in %s", directory);
        return tap_done();
    }
    size_t all = sizeof rounds / sizeof *rounds, wanted = argc > 2 ? (size_t)atoi(argv[2]) : all;
    for (size_t i = 0; i < all && i < wanted; i++) {
        OpSizes sizes = sizes_for(rounds[i].z);
        with_backends(&sizes, true, run_round, &rounds[i]);
    }
    if (wanted < all) return tap_done();
    OpSizes full = sizes_for(FULL);
    with_backends(&full, true, check_full_size, NULL);
    return tap_done();
}
