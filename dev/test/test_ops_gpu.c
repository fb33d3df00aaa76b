// Every op of the CUDA backend (attention and Newton-Schulz have tests of their own) against the CPU backend.
//
//   test_ops_gpu [--portable] [DIR [ROUNDS]]
//                                 --portable: on the kernels that every supported GPU runs; DIR holds libref_bf16.so and libref_fp32.so: the CPU backend in its two builds (default
//                                 build/ref); ROUNDS: only the first so many sizes, for runs under compute-sanitizer
//
// The same inputs, representable in bf16, go through three backends: the fp32 CPU build is the truth, the bf16 CPU build is what
// a plain implementation with the same storage types gives, and the GPU's distance from the truth (relative, in the 2-norm) may
// be at most twice the plain one's, plus FP32_ATOM for what the order of fp32 sums may change. Outputs start as NaN. Every op
// runs twice on the same input and must give the same bits.
#include "dev/test/tap.h"
#include "llmc/ops.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define FP32_ATOM 1e-5
#define OPS(X)                                                                                                                  \
    X(backend_open) X(backend_reserve) X(backend_close) X(device_alloc) X(device_free) X(embed_forward) X(embed_backward)       \
    X(embedding_grad) X(coefficients_forward) X(coefficients_backward) X(mix_rmsnorm_forward) X(mix_rmsnorm_backward)           \
    X(rmsnorm_forward) X(rmsnorm_backward) X(matmul_forward) X(matmul_backward_input) X(matmul_weight_grad)                     \
    X(matmul_relu2_forward) X(matmul_relu2_backward) X(rope_tables) X(qkv_forward) X(qkv_product_forward) X(qkv_backward)       \
    X(attn_gate_forward) X(attn_gate_backward) X(head_weight_bytes) X(head_quantize) X(head_loss_train) X(head_loss_eval)       \
    X(head_logits) X(adam_update) X(adam_update_fp32) X(normuon_momentum) X(normuon_update) X(cast_weights)
typedef struct {
#define X(f) __typeof__(&f) f;
    OPS(X)
#undef X
} Ops;
typedef enum { GPU, NAIVE, TRUTH, BACKENDS } Which;
static Ops ops[BACKENDS];
static bool portable;
static Stream stream;

static bool load(Ops *o, const char *directory, const char *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "test_ops_gpu: %s\n", dlerror()), false;
#define X(f)                                                                                                                    \
    *(void **)&o->f = dlsym(library, #f);                                                                                       \
    if (!o->f) return fprintf(stderr, "test_ops_gpu: %s has no %s\n", path, #f), false;
    OPS(X)
#undef X
    return true;
}

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
    double scale; // inputs are uniform in (-scale, scale); integers in [0, scale)
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
    c->buffer[c->count++] = (Buffer){name, kind, role, count, scale};
}

static uint64_t random_state = 1;
static double uniform(void) // [0, 1)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) * 0x1p-24;
}

static float to_bf16_value(double x) { return bf16_to_float(float_to_bf16((float)x)); }

static void make_masters(Case *c)
{
    for (int i = 0; i < c->count; i++) {
        const Buffer *b = &c->buffer[i];
        c->master[i] = xcalloc((size_t)b->count, sizeof(float));
        bool integer = b->kind == INT32 || b->kind == HOST_INT;
        for (int64_t k = 0; b->role != OUT && k < b->count; k++)
            c->master[i][k] = integer ? (float)floor(uniform() * b->scale) : to_bf16_value(b->scale * (2 * uniform() - 1));
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

// Relative; N roundings of half a bf16 step each.
static double loss_atom(int N) { return 0x1p-9 / sqrt(N); }

static double distance(const void *x, Which w, const void *truth, const Buffer *b)
{
    double difference = 0, size = 0;
    for (int64_t k = 0; k < b->count; k++) {
        double t = decode(truth, TRUTH, b, k), e = decode(x, w, b, k) - t;
        difference += e * e;
        size += t * t;
    }
    return size > 0 ? sqrt(difference / size) : sqrt(difference);
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
        good &= gpu <= 2 * plain + (strcmp(b->name, "loss") ? FP32_ATOM : loss_atom(z.N));
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
        if (r->elementwise_only && !cases[i].elementwise) continue;
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
    static const Round rounds[] = {
        {{1, 2, 32, 64, 128}, false},       {{37, 3, 24, 216, 384}, false},      {{130, 2, 128, 512, 1024}, false},
        {{70, 3, 128, 264, 384}, false},    {{17003, 3, 32, 1544, 384}, false},  {{333, 5, 64, 1288, 640}, false},
        {{257, 4, 256, 2048, 1280}, false}, {{100, 16, 128, 1024, 61440}, false}, {{517, 6, 128, 3072, 50304}, false},
        {{8233, 3, 32, 96, 2048}, false},   {{32768, 6, 128, 3072, 50304}, true},
    };
#define X(f) ops[GPU].f = f;
    OPS(X)
#undef X
    if (!load(&ops[NAIVE], directory, "libref_bf16.so") || !load(&ops[TRUTH], directory, "libref_fp32.so")) {
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
