// Newton-Schulz products: which path a shape takes, and the scratch memory behind them.
#include "llmc/cuda/ns_internal.cuh"

enum { SMALLEST_TENSOR_SIDE = 64, PITCH_ELEMENTS = 8 };

static struct {
    float *partials;
    void *repacked;
    int64_t repack_elements;
} scratch;

void ns_reserve(int64_t repack_elements)
{
    if (!device_state.open) fatal(EXIT_BAD_INPUT, "ns_reserve before backend_open");
    if (!scratch.partials) scratch.partials = (float *)device_alloc(NS_PARTIALS * sizeof(float), "scratch: norms of Newton-Schulz");
    if (repack_elements > scratch.repack_elements) {
        if (scratch.repacked) device_free(scratch.repacked);
        scratch.repacked = device_alloc((size_t)repack_elements * 2, "scratch: padded rows for Newton-Schulz");
        scratch.repack_elements = repack_elements;
    }
}

void ns_release(void)
{
    if (scratch.partials) device_free(scratch.partials);
    if (scratch.repacked) device_free(scratch.repacked);
    scratch = {};
}

float *ns_partials(void)
{
    if (!scratch.partials) fatal(EXIT_BAD_INPUT, "a Newton-Schulz primitive before ns_reserve");
    return scratch.partials;
}

size_t ns_element_size(NsDtype dtype) { return dtype == NS_FP32 ? 4 : 2; }

const char *ns_path_name(NsPath path)
{
    static const char *const names[] = {"tensor (TMA, warpgroup products)", "tensor after padding the rows", "portable"};
    return names[path];
}

NsPath ns_product_path(NsDtype dtype, int n, int m, int batch)
{
    if (dtype == NS_FP32 || !device_has_wgmma()) return NS_PATH_PORTABLE;
    if (n % PITCH_ELEMENTS || n < SMALLEST_TENSOR_SIDE || m < SMALLEST_TENSOR_SIDE) return NS_PATH_PORTABLE;
    if (m % PITCH_ELEMENTS == 0) return NS_PATH_TENSOR;
    return (int64_t)batch * n * round_up(m, PITCH_ELEMENTS) <= scratch.repack_elements ? NS_PATH_REPACKED : NS_PATH_PORTABLE;
}

// Runs `p`, whose operand `x` has rows of x_cols elements, on the path of its shape. Pointers that are not on 16 bytes occur only with
// shapes that are portable anyway, or in a caller's own views: those become portable here. Padded: set those of p's fields that
// refer to x from the copy.
template <typename Padded>
static void run_product(cudaStream_t s, ProductForm form, NsDtype dtype, NsDtype out_dtype, Product p, int n, int m,
                        const void *x, Padded padded)
{
    if (p.batch == 0) return;
    NsPath path = ns_product_path(dtype, n, m, p.batch);
    bool on_vectors = ((uintptr_t)p.a | (uintptr_t)p.b | (uintptr_t)p.d | (uintptr_t)p.out) % 16 == 0;
    if (path == NS_PATH_REPACKED) { // the copy is aligned; a, d and out of the n x n kind must be
        int pitch = (int)round_up(m, PITCH_ELEMENTS);
        ns_repack(s, scratch.repacked, x, (int64_t)p.batch * n, m, pitch);
        padded(p, scratch.repacked, pitch, (int64_t)pitch * n);
        on_vectors = ((uintptr_t)p.a | (uintptr_t)p.b | (uintptr_t)p.d) % 16 == 0;
    }
    if (path == NS_PATH_PORTABLE || !on_vectors)
        ns_portable_product(s, form, dtype, out_dtype, p);
    else
        ns_tensor_product(s, form, dtype, out_dtype, p);
}

void ns_gram(Stream s, NsDtype dtype, NsDtype out_dtype, void *a, const void *x, int n, int m, int batch)
{
    assert(out_dtype == dtype || out_dtype == NS_FP32);
    int64_t size = (int64_t)n * m, square = (int64_t)n * n;
    Product p = {};
    p.a = p.b = x, p.out = a, p.a_stride = p.b_stride = size, p.out_stride = square;
    p.a_pitch = p.b_pitch = m, p.out_pitch = n, p.rows = p.cols = n, p.depth = m, p.batch = batch, p.alpha = 1;
    run_product(s, PRODUCT_GRAM, dtype, out_dtype, p, n, m, x, [](Product &q, const void *copy, int pitch, int64_t stride) {
        q.a = q.b = copy, q.a_pitch = q.b_pitch = pitch, q.a_stride = q.b_stride = stride;
    });
}

void ns_symmetric(Stream s, NsDtype dtype, void *c, float alpha, const void *a, const void *b, float beta, const void *d, int n,
                  int batch)
{
    Product p = {};
    p.a = a, p.b = b, p.d = beta == 0 ? NULL : d, p.out = c;
    p.a_stride = p.b_stride = p.d_stride = p.out_stride = (int64_t)n * n;
    p.a_pitch = p.b_pitch = p.d_pitch = p.out_pitch = p.rows = p.cols = p.depth = n;
    p.batch = batch, p.alpha = alpha, p.beta = beta;
    run_product(s, PRODUCT_SYMMETRIC, dtype, dtype, p, n, n, NULL, [](Product &, const void *, int, int64_t) {});
}

void ns_apply(Stream s, NsDtype dtype, void *y, const void *b, const void *x, float a, int n, int m, int batch)
{
    Product p = {};
    p.a = b, p.b = x, p.d = a == 0 ? NULL : x, p.out = y;
    p.a_stride = (int64_t)n * n, p.b_stride = p.d_stride = p.out_stride = (int64_t)n * m;
    p.a_pitch = n, p.b_pitch = p.d_pitch = p.out_pitch = m;
    p.rows = n, p.cols = m, p.depth = n, p.batch = batch, p.alpha = 1, p.beta = a;
    run_product(s, PRODUCT_FULL, dtype, dtype, p, n, m, x, [](Product &q, const void *copy, int pitch, int64_t stride) {
        q.b = copy, q.b_pitch = q.d_pitch = pitch, q.b_stride = q.d_stride = stride;
        if (q.d) q.d = copy;
    });
}
