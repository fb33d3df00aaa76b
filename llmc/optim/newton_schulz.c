// Newton-Schulz orthogonalisation: the iteration as a sequence of primitives.
#include "llmc/optim/newton_schulz.h"
#include "llmc/ops/costs.h"

// ---- workspace --------------------------------------------------------------------------------------------

typedef struct {
    size_t sumsq, unit, scale, out, x[2], square, square_pitch, raw,
        total; // byte offsets; squares: n x n matrices of the batch
    int n, m, applies, squares;
    bool transpose, gram, whole; // whole: by ns_iterate
} Layout;

enum { MOST_SQUARES = 5 };

static size_t reserve(size_t *total, size_t bytes)
{
    size_t at = *total;
    *total += (size_t)round_up((int64_t)bytes, 256);
    return at;
}

// AOL is free of scale: bf16 takes its input as it is, if fp32 can hold its squares (entries of 1e-18 to
// 1e17). Others bring each row into range on its own.
static bool rows_have_units(const NsOptions *o) { return o->aol && o->dtype != NS_BF16; }

static Layout plan(const NsOptions *o, int rows, int cols, int batch)
{
    Layout l = {.transpose = rows > cols};
    l.n = l.transpose ? cols : rows;
    l.m = l.transpose ? rows : cols;
    bool whole = ns_iterates(o->dtype, l.n, l.m);
    l.gram = o->gram && !(o->fallback && (rows == cols || whole));
    l.whole = whole && !l.gram;
    l.applies = l.gram ? 1 + __builtin_popcount(o->restarts) : o->steps;
    l.squares = l.whole ? 0 : l.gram ? MOST_SQUARES : 2;
    int pitch = ns_pitch(o->dtype, l.n, l.m);
    size_t element = ns_element_size(o->dtype), matrix = (size_t)l.n * (size_t)pitch * element;
    l.sumsq = reserve(&l.total, (size_t)batch * sizeof(float));
    l.unit = reserve(&l.total, rows_have_units(o) ? (size_t)batch * (size_t)l.n * sizeof(float) : 0);
    l.scale = reserve(&l.total, o->aol ? (size_t)batch * (size_t)l.n * sizeof(float) : 0);
    l.out = reserve(&l.total, (size_t)batch * (size_t)l.n * (size_t)l.m * element);
    l.x[0] = reserve(&l.total, (size_t)batch * matrix);
    // The matrices of the iteration take turns between two places, of which one is the result's if they lie
    // alike.
    l.x[1] =
        pitch == l.m ? l.out : reserve(&l.total, l.applies > 1 || l.transpose ? (size_t)batch * matrix : 0);
    l.square_pitch = (size_t)round_up((int64_t)((size_t)batch * (size_t)l.n * (size_t)l.n * element), 256);
    l.square = reserve(&l.total, (size_t)l.squares * l.square_pitch);
    l.raw = reserve(&l.total, o->aol && !l.whole ? ns_raw_bytes(o->dtype, l.n, l.m, batch) : 0);
    return l;
}

size_t ns_workspace_bytes(const NsOptions *o, int rows, int cols, int batch)
{
    return plan(o, rows, cols, batch).total;
}

// ---- iteration --------------------------------------------------------------------------------------------

// A batch under way.
typedef struct {
    NsChain chain;
    const NsOptions *o;
    int n, m, applies; // products with x still to come
    void *x, *spare;   // (batch, n, m), change places at each product
    void *out;         // (batch, n, m) packed: where the last one goes, NULL: to the spare like the others
    void *square[MOST_SQUARES], *raw;
    float *scale, *unit; // (batch, n), AOL only; unit NULL: rows of x have none
    bool scaled;         // x still lacks diag(scale)
} Work;

static void swap(void **a, void **b)
{
    void *t = *a;
    *a = *b;
    *b = t;
}

// With the largest element of every row at 32 to 64 the scales of AOL are 2^-5 to 2^-17 (one element a row;
// equal rows of 3072), most of them about 2^-11, and 2^4 brings them to where fp16 has room on both sides.
static const float aol_column_factor = 16;

// q = alpha a b + beta d + diagonal I, which the next product with x is by. As long as x lacks its scale,
// times diag(scale), which costs nothing here and would cost a pass over x.
static void last_symmetric(Work *k, void *q, float diagonal, float alpha, const void *a, const void *b,
                           float beta, const void *d)
{
    bool plain = diagonal == 0 && !k->scaled;
    NsSymmetric p = {plain ? q : NULL, plain ? NULL : q, a, b, d, alpha, beta, diagonal, k->n};
    if (k->scaled)
        ns_symmetric_scaled(&k->chain, &p, k->scale, aol_column_factor);
    else
        ns_symmetric(&k->chain, &p);
}

// x = b x + a x, b from last_symmetric. Where b has x's scale in it a is 0.
static void apply(Work *k, const void *b, float a)
{
    float alpha = 1;
    if (k->scaled) {
        assert(a == 0);
        alpha = 1 / aol_column_factor;
        k->scaled = false;
    }
    bool to_out = --k->applies == 0 && k->out;
    ns_apply(&k->chain, &(NsApply){.y = to_out ? k->out : k->spare,
                                   .b = b,
                                   .x = k->x,
                                   .alpha = alpha,
                                   .a = a,
                                   .n = k->n,
                                   .m = k->m,
                                   .packed = to_out});
    swap(&k->x, &k->spare);
}

// square[0] = Gram matrix of x, with `aol` of the x that is AOL-scaled.
static void gram_matrix(Work *k, bool aol)
{
    if (!aol) {
        ns_gram(&k->chain, k->square[0], k->x, k->n, k->m);
        return;
    }
    ns_gram_raw(&k->chain, k->raw, k->x, k->unit, k->n, k->m);
    ns_aol(&k->chain, k->scale, k->square[0], k->raw, k->unit, k->o->aol_gain, k->n, k->m);
    k->scaled = true;
}

// X <- a X + (b A + c A^2) X. The large a stays out of the rounded matrix, but for the step in which AOL's
// scale goes into it.
static void iterate_standard(Work *k)
{
    void *A = k->square[0], *B = k->square[1];
    for (int i = 0; i < k->o->steps; i++) {
        NsTuple t = k->o->tuples[i];
        float a = (float)t.a, b = (float)t.b, c = (float)t.c;
        gram_matrix(k, i == 0 && k->o->aol);
        bool in_matrix = k->scaled;
        last_symmetric(k, B, in_matrix ? a : 0, c, A, A, b, A);
        apply(k, B, in_matrix ? 0 : a);
    }
}

// With h(y) = a + b y + c y^2 a step is X <- h(R) X, hence Q <- Q h(R) and R <- R h(R)^2. Z = h(R) - a I: the
// large a stays out of the rounded matrix and enters each product in fp32 instead.
static void iterate_gram(Work *k)
{
    const NsOptions *o = k->o;
    void *R = k->square[0], *Z = k->square[1], *Q = k->square[2], *T = k->square[3], *H = k->square[4];
    for (int i = 0; i < o->steps; i++) {
        NsTuple t = o->tuples[i];
        float a = (float)t.a, b = (float)t.b, c = (float)t.c;
        bool restart = o->restarts >> i & 1, first = i == 0 || restart,
             last = i + 1 == o->steps || o->restarts >> (i + 1) & 1;
        // A restart discards the negative eigenvalues that rounding put into R, before they grow by a^2 a
        // step.
        if (restart)
            apply(k, Q, 0);
        if (first)
            gram_matrix(k, i == 0 && o->aol);
        if (first && last) {
            last_symmetric(k, Q, a, c, R, R, b, R);
            continue;
        }
        ns_symmetric(&k->chain, &(NsSymmetric){.c = Z,
                                               .q = first ? Q : NULL,
                                               .a = R,
                                               .b = R,
                                               .d = R,
                                               .alpha = c,
                                               .beta = b,
                                               .diagonal = a,
                                               .n = k->n});
        // Q's product goes between those of R, which wait for each other: it keeps the multiprocessors busy
        // meanwhile.
        if (!last)
            ns_symmetric(
                &k->chain,
                &(NsSymmetric){.c = H, .a = R, .b = Z, .d = R, .alpha = 1, .beta = a, .n = k->n}); // R h(R)
        if (!first) {
            if (last)
                last_symmetric(k, T, 0, 1, Q, Z, a, Q);
            else
                ns_symmetric(
                    &k->chain,
                    &(NsSymmetric){.c = T, .a = Q, .b = Z, .d = Q, .alpha = 1, .beta = a, .n = k->n});
            swap(&Q, &T);
        }
        if (!last)
            ns_symmetric(&k->chain, &(NsSymmetric){.c = R,
                                                   .a = Z,
                                                   .b = H,
                                                   .d = H,
                                                   .alpha = 1,
                                                   .beta = a,
                                                   .n = k->n}); // h(R) R h(R)
    }
    apply(k, Q, 0);
}

static void iterate_chain(Work *k, bool gram)
{
    OP_SCOPE(ns_chain);
    ns_chain_begin(&k->chain);
    if (gram)
        iterate_gram(k);
    else
        iterate_standard(k);
    ns_chain_end(&k->chain);
}

// The standard form in one call.
static void iterate_whole(Work *k)
{
    const NsOptions *o = k->o;
    NsIteration it = {.steps = o->steps,
                      .aol = o->aol,
                      .aol_gain = o->aol_gain,
                      .aol_factor = aol_column_factor};
    for (int i = 0; i < o->steps; i++) {
        it.a[i] = (float)o->tuples[i].a;
        it.b[i] = (float)o->tuples[i].b;
        it.c[i] = (float)o->tuples[i].c;
    }
    ns_iterate(k->chain.stream, k->o->dtype, &it,
               &(NsMatrices){k->x, k->spare, k->unit, k->n, k->m, k->chain.batch});
    if (o->steps % 2)
        swap(&k->x, &k->spare);
}

// `count` matrices whose distance is u_stride, as those from `at` on of the batch.
static void load_run(const Work *k, float *sumsq, const float *u, int64_t u_stride, int at, int count,
                     bool transpose)
{
    int rows = transpose ? k->m : k->n, cols = transpose ? k->n : k->m;
    NsDtype dtype = k->o->dtype;
    Stream s = k->chain.stream;
    char *x = (char *)k->x +
              (size_t)at * (size_t)k->n * (size_t)ns_pitch(dtype, k->n, k->m) * ns_element_size(dtype);
    if (k->unit)
        ns_load_rows(s, dtype,
                     &(NsLoad){.x = x,
                               .unit = k->unit + (int64_t)at * k->n,
                               .u = u,
                               .u_stride = u_stride,
                               .rows = rows,
                               .cols = cols,
                               .batch = count,
                               .transpose = transpose});
    else if (k->o->aol)
        ns_load(s, dtype,
                &(NsLoad){.x = x,
                          .u = u,
                          .u_stride = u_stride,
                          .kappa = 1,
                          .gain = 1,
                          .rows = rows,
                          .cols = cols,
                          .batch = count,
                          .transpose = transpose});
    else
        ns_load(s, dtype,
                &(NsLoad){.x = x,
                          .sumsq = sumsq + at,
                          .u = u,
                          .u_stride = u_stride,
                          .kappa = k->o->kappa,
                          .eps = k->o->eps,
                          .gain = 1,
                          .rows = rows,
                          .cols = cols,
                          .batch = count,
                          .transpose = transpose});
}

// Group by group.
static void load(const Work *k, float *sumsq, const NsInput *in, bool transpose)
{
    int group = in->group ? in->group : in->batch;
    for (int i = 0; i < in->batch; i += group)
        load_run(k, sumsq, in->u + i / group * in->group_stride, in->stride, i,
                 (int)min_i64(group, in->batch - i), transpose);
}

void *newton_schulz(Stream s, const NsOptions *o, const NsInput *in, void *workspace)
{
    Layout l = plan(o, in->rows, in->cols, in->batch);
    char *base = workspace, *out = base + l.out;
    bool alike = l.x[1] == l.out;
    if (!in->batch)
        return out;
    Work k = {.chain = {s, o->dtype, in->batch, NULL},
              .o = o,
              .n = l.n,
              .m = l.m,
              .applies = l.applies,
              .x = base + l.x[0],
              .spare = base + l.x[1],
              .out = alike || l.transpose ? NULL : out,
              .raw = base + l.raw,
              .scale = (float *)(base + l.scale),
              .unit = rows_have_units(o) ? (float *)(base + l.unit) : NULL};
    for (int i = 0; i < l.squares; i++)
        k.square[i] = base + l.square + (size_t)i * l.square_pitch;
    // Start where the last product lands in `out`, or in the other place when the transposition follows.
    if (alike && (l.applies % 2 == 0) != l.transpose)
        swap(&k.x, &k.spare);
    load(&k, (float *)(base + l.sumsq), in, l.transpose);
    if (l.whole)
        iterate_whole(&k);
    else
        iterate_chain(&k, l.gram);
    if (l.transpose)
        ns_transpose(s, o->dtype, out, k.x, l.n, l.m, in->batch);
    return out;
}
