// Cases of test_ops_gpu.c: sums of streams, gathered rows, generators.
#pragma once

// ---- coefficients of streams ------------------------------------------------------------------------------

// Coefficients of all streams of stream_grads side by side: reader k of stream s has number s *
// STREAM_READERS + k.
enum { NUMBERS = STREAM_GRADS * STREAM_READERS };

// The four kinds in turn: 1, a scalar, a column, a constant and both.
static StreamFactor number_factor(const float *scalars, const float *columns, int number, int kind)
{
    StreamFactor f = {.plus = kind % 4 == 3 ? 0.75f : 0, .stride = NUMBERS};
    if (kind % 2)
        f.scalar = scalars + number;
    if (kind % 4 >= 2)
        f.column = columns + number;
    return f;
}

// ---- a sum of streams -------------------------------------------------------------------------------------

typedef struct {
    int terms;
    bool only_h, only_y, in_place, gathered, amax; // in place: of the second term; gathered: the last
} MixVariant;
static const MixVariant mix_variants[] = {
    {.terms = 1},
    {.terms = 4, .amax = true},
    {.terms = 6, .only_h = true, .gathered = true, .amax = true},
    {.terms = 3, .only_y = true, .in_place = true},
    {.terms = 2, .in_place = true, .gathered = true},
    {.terms = 5},
};
enum { STREAM_MIX_VARIANTS = sizeof mix_variants / sizeof *mix_variants };

DESCRIBE(stream_mix)
{
    SIZES;
    const MixVariant *v = &mix_variants[c->variant];
    int64_t n = (int64_t)N * d;
    add(c, "y", FLOATX, v->only_h ? IN : v->in_place ? INOUT : OUT, v->only_h ? 8 : n, 1);
    add(c, "h", FLOATX, v->only_y ? IN : OUT, v->only_y ? 8 : n, 1);
    add(c, "rstd", FP32, v->only_y ? IN : OUT, N, 1);
    add(c, "amax", FP32, INOUT, 1, 0.01);
    add(c, "scalars", FP32, IN, NUMBERS, 1);
    add(c, "columns", FP32, IN, (int64_t)N * NUMBERS, 1);
    add(c, "rows", INT32, IN, N, Vp);
    add(c, "table", FLOATX, IN, v->gathered ? (int64_t)Vp * d : 8, 1);
    for (int k = 0; k < v->terms; k++)
        add(c, "x", FLOATX, IN, n, 1);
}
static void fix_stream_mix(Case *c) { c->master[3][0] = fabsf(c->master[3][0]); }
RUN(stream_mix)
{
    SIZES;
    const MixVariant *v = &mix_variants[c->variant];
    StreamMix a = {.y = v->only_h ? NULL : p[0],
                   .h = v->only_y ? NULL : p[1],
                   .rstd = p[2],
                   .amax = v->amax ? p[3] : NULL,
                   .terms = v->terms};
    for (int k = 0; k < v->terms; k++)
        a.term[k] = (StreamTerm){p[8 + k], NULL, number_factor(p[4], p[5], k, c->variant + k)};
    if (v->in_place)
        a.term[1].x = p[0];
    if (v->gathered) {
        a.term[v->terms - 1].x = p[7];
        a.term[v->terms - 1].rows = p[6];
    }
    o->stream_mix(stream, &a, N, d);
}

// ---- the gradients of streams -----------------------------------------------------------------------------

typedef struct {
    int streams, readers, norms;   // norms: of the first stream, the second one without leads
    bool from_h, beside, gathered; // the first stream is h / rstd; the last is rows of a table
    bool accumulate, in_place, no_dx, other_g, dscalar, dcolumn;
} GradVariant;
static const GradVariant grad_variants[] = {
    {.streams = 1, .readers = 1, .norms = 1, .from_h = true, .dscalar = true},
    {.streams = 1, .readers = 1, .norms = 1, .from_h = true, .beside = true, .dscalar = true},
    {.streams = 1, .readers = 2, .norms = 1, .accumulate = true, .dscalar = true, .dcolumn = true},
    {.streams = 1, .readers = 3, .in_place = true},
    {.streams = 1, .readers = 0, .norms = 3, .accumulate = true},
    {.streams = 1, .readers = 4, .norms = 3, .from_h = true, .beside = true, .dscalar = true},
    {.streams = 1, .readers = 6, .norms = 1, .dcolumn = true},
    {.streams = 1, .readers = 12, .norms = 2, .dscalar = true, .dcolumn = true},
    {.streams = 1, .readers = 1, .gathered = true, .no_dx = true, .dcolumn = true},
    {.streams = 2, .readers = 6, .dcolumn = true, .dscalar = true},
    {.streams = 2, .readers = 11, .other_g = true, .accumulate = true},
    {.streams = 2, .readers = 2, .other_g = true, .gathered = true, .no_dx = true, .dscalar = true},
    {.streams = 5, .readers = 5, .other_g = true, .no_dx = true, .dcolumn = true},
    {.streams = 4, .readers = 3, .gathered = true, .no_dx = true, .dscalar = true, .dcolumn = true},
};
enum { STREAM_GRADS_VARIANTS = sizeof grad_variants / sizeof *grad_variants, LEADS = 6, GRADS = 4 };
enum { DX, X = DX + STREAM_PAIR, DH = X + STREAM_GRADS, NORM_H = DH + STREAM_NORMS, RSTD, BESIDE, DBESIDE };
enum { DSCALAR = DBESIDE + 1, DCOLUMN, SCALARS, COLUMNS, LEAD, ROWS, G };

// Reader k has the memory k % GRADS, with rows that are 8 channels wider for each k / GRADS.
enum { OTHER_ROWS = STREAM_READERS / GRADS * 8 };
DESCRIBE(stream_grads)
{
    SIZES;
    const GradVariant *v = &grad_variants[c->variant];
    int64_t n = (int64_t)N * d;
    for (int s = 0; s < STREAM_PAIR; s++) {
        bool wanted = s < v->streams && !v->no_dx;
        add(c, "dx", FLOATX, !wanted ? IN : v->accumulate || v->in_place ? INOUT : OUT, wanted ? n : 8, 1);
    }
    for (int s = 0; s < STREAM_GRADS; s++)
        add(c, "x", FLOATX, IN,
            s >= v->streams                      ? 8
            : v->gathered && s == v->streams - 1 ? (int64_t)Vp * d
                                                 : n,
            1);
    for (int k = 0; k < STREAM_NORMS; k++)
        add(c, "dh", FLOATX, IN, k < v->norms ? n : 8, 1);
    add(c, "h", FLOATX, IN, v->norms || v->from_h ? n : 8, 1.7);
    add(c, "rstd", FP32, IN, N, 1);
    add(c, "beside", FLOATX, IN, v->beside ? n : 8, 1);
    add(c, "dbeside", FP32, v->beside ? INOUT : IN, 1, 1);
    add(c, "dscalar", FP32, v->dscalar ? INOUT : IN, NUMBERS, 1);
    add(c, "dcolumn", FP32, v->dcolumn ? INOUT : IN, (int64_t)N * NUMBERS, 1);
    add(c, "scalars", FP32, IN, NUMBERS, 1);
    add(c, "columns", FP32, IN, (int64_t)N * NUMBERS, 1);
    add(c, "lead", FP32, IN, (int64_t)N * LEADS, 1);
    add(c, "rows", INT32, IN, N, Vp);
    for (int k = 0; k < GRADS; k++)
        add(c, "g", FLOATX, IN, k < v->readers || v->other_g ? N * (int64_t)(d + OTHER_ROWS) : 8, 1);
    // Variances: column (or 1) and g and x 1/3 each, x from h more.
    c->buffer[DSCALAR].spread = 0.2 * sqrt((double)N * d);
    c->buffer[DBESIDE].spread = 0.3 * sqrt((double)N * d);
    c->buffer[DCOLUMN].spread = 0.3 * sqrt(d);
}
static void fix_stream_grads(Case *c)
{
    for (int t = 0; t < c->z.N; t++)
        c->master[RSTD][t] = to_bf16_value(0.5 + (double)fabsf(c->master[RSTD][t]));
}

static StreamReader case_reader(const Case *c, void **p, int s, int k)
{
    const GradVariant *v = &grad_variants[c->variant];
    int number = s * STREAM_READERS + k;
    StreamReader r = {.g = p[G + k % GRADS],
                      .pitch = c->d + k / GRADS * 8,
                      .c = number_factor(p[SCALARS], p[COLUMNS], number, s + k + 1)};
    if (s == 1 && k == 1 && v->other_g) { // a sum that the other streams are not in
        r.g = p[G + GRADS - 1];
        r.pitch = c->d + OTHER_ROWS;
    }
    if (k == 0)
        r.pitch = 0;
    if (k == 0 && v->in_place)
        r.g = p[DX + s];
    if (v->dscalar && r.c.scalar)
        r.dscalar = (float *)p[DSCALAR] + number;
    if (v->dcolumn && r.c.column)
        r.dcolumn = (float *)p[DCOLUMN] + number;
    return r;
}
RUN(stream_grads)
{
    SIZES;
    const GradVariant *v = &grad_variants[c->variant];
    StreamGrad a[STREAM_GRADS] = {0};
    for (int s = 0; s < v->streams; s++) {
        a[s].dx = v->no_dx ? NULL : p[DX + s];
        a[s].accumulate = v->accumulate;
        a[s].x = v->from_h && s == 0 ? NULL : p[X + s];
        a[s].rows = v->gathered && s == v->streams - 1 ? p[ROWS] : NULL;
        a[s].readers = v->readers;
        for (int k = 0; k < v->readers; k++)
            a[s].reader[k] = case_reader(c, p, s, k);
    }
    if (v->norms || v->from_h) {
        a[0].h = p[NORM_H];
        a[0].rstd = p[RSTD];
    }
    a[0].norms = v->norms;
    for (int k = 0; k < v->norms; k++)
        a[0].norm[k] = k == 1 ? (StreamNorm){p[DH + k], NULL, 0} : (StreamNorm){p[DH + k], p[LEAD], LEADS};
    if (v->beside) {
        a[0].beside = p[BESIDE];
        a[0].dbeside = p[DBESIDE];
    }
    o->stream_grads(stream, a, v->streams, N, d);
}

// ---- gathered rows ----------------------------------------------------------------------------------------

enum { SIGN_ROWS = 64 };

// Words of which all bits are random, from masters in [0, 2^24): fp32 holds 24 bits, the upper or the lower.
static void fix_bits(Case *c, int at)
{
    for (int64_t k = 0; k < c->buffer[at].count; k += 2)
        c->master[at][k] = (c->master[at][k] - 0x1p23f) * 256;
}

// Variant 1: the table has fewer channels.
static int gathered_width(const Case *c) { return c->variant == 1 ? (c->d + 8) / 16 * 8 : c->d; }

DESCRIBE(signed_gather)
{
    SIZES;
    int width = gathered_width(c);
    add(c, "out", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "table", FLOATX, IN, (int64_t)Vp * width, 1);
    add(c, "rows", INT32, IN, N, Vp);
    add(c, "bits", INT32, IN, SIGN_ROWS * (int64_t)((width + 31) / 32), 0x1p24);
    add(c, "sign_rows", INT32, IN, N, SIGN_ROWS);
}
static void fix_signed_gather(Case *c) { fix_bits(c, 3); }
RUN(signed_gather)
{
    SIZES;
    RowSigns signs = {p[3], p[4]};
    o->signed_gather(stream, p[0], p[1], p[2], &signs, N, d, gathered_width(c));
}

static int reader_groups(const Case *c) { return c->variant == 3 ? c->d / 2 : c->z.H; }

// Variants 0 to 2 have the tokens of embedding_grad; 0: one reader, with signs; 1: fewer channels, two
// readers; 2: one reader of groups of channels; 3: groups of two channels, two readers.
DESCRIBE(table_grad)
{
    SIZES;
    int width = gathered_width(c);
    add(c, "dtable", FP32, INOUT, (int64_t)Vp * width, 1);
    add(c, "g", FLOATX, IN, (int64_t)N * d, 1);
    add(c, "order", INT32, IN, N, 1);
    add(c, "row_token", INT32, IN, N, 1);
    add(c, "row_start", INT32, IN, N + 1, 1);
    add(c, "num_rows", INT32, IN, 1, 1);
    add(c, "tokens", INT32, IN, N, Vp);
    add(c, "plain", FLOATX, IN, (int64_t)N * (d + 8), 1);
    add(c, "factor", FP32, IN, (int64_t)N * reader_groups(c), 1);
    add(c, "lead", FP32, IN, (int64_t)N * LEADS, 1);
    add(c, "bits", INT32, IN, SIGN_ROWS * (int64_t)((width + 31) / 32), 0x1p24);
    add(c, "sign_rows", INT32, IN, N, SIGN_ROWS);
}
static void fix_table_grad(Case *c)
{
    fix_embedding_grad(c);
    fix_bits(c, 10);
}
RUN(table_grad)
{
    SIZES;
    RowSigns signs = {p[10], p[11]};
    TokenRows rows = {p[2], p[3], p[4], p[5]};
    int groups = reader_groups(c);
    RowReader with_signs = {.g = p[1], .signs = &signs},
              with_factor = {p[7], d + 8, p[8], groups, groups, p[9], LEADS, NULL},
              both[ROW_READERS] = {with_signs, with_factor};
    bool two = c->variant % 2;
    o->table_grad(stream, p[0],
                  two          ? both
                  : c->variant ? &with_factor
                               : &with_signs,
                  two ? 2 : 1, &rows, N, d, gathered_width(c));
}

// Variants are the ops. Every fifth entry is none; the others are distinct rows.
DESCRIBE(rows_moved)
{
    SIZES;
    add(c, "packed", FP32, INOUT, (int64_t)N * d, 1);
    add(c, "table", FP32, INOUT, (int64_t)Vp * d, 1);
    add(c, "rows", INT32, IN, N, 1);
}
static void fix_rows_moved(Case *c)
{
    for (int k = 0; k < c->z.N; k++)
        c->master[2][k] = k % 5 && k < c->z.Vp ? (float)(c->z.Vp - 1 - k) : -1;
}
RUN(rows_moved)
{
    SIZES;
    int bytes = d * (int)sizeof(float);
    if (c->variant == 0)
        o->rows_load(stream, p[0], p[1], p[2], N, bytes);
    else if (c->variant == 1)
        o->rows_store(stream, p[1], p[0], p[2], N, bytes);
    else if (c->variant == 2)
        o->rows_take(stream, p[0], p[1], p[2], N, d);
    else
        o->rows_add(stream, p[1], p[0], p[2], N, d);
}

// ---- generators -------------------------------------------------------------------------------------------

static Generator case_generator(const Case *c, void **p) // w1, w2, b2, scale
{
    static const int width[] = {64, 8, 48}, K[] = {41, 5, 64};
    return (Generator){p[0], p[1], p[2], p[3], width[c->variant], K[c->variant]};
}

static void describe_generator(Case *c) // values before the gelu of variance 1, some
{
    Generator g = case_generator(c, (void *[4]){0});
    add(c, "w1", FLOATX, IN, (int64_t)g.width * c->d, 1.7 / sqrt(c->d));
    add(c, "w2", FLOATX, IN, g.K * g.width, 0.5);
    add(c, "b2", FLOATX, IN, g.K, 1);
    add(c, "scale", FP32, IN, 1, 1);
}
DESCRIBE(generator_forward)
{
    SIZES;
    describe_generator(c);
    Generator g = case_generator(c, (void *[4]){0});
    add(c, "x", FLOATX, IN, (int64_t)N * d, 1.7);
    add(c, "out", FP32, OUT, (int64_t)N * g.K, 0);
    add(c, "pre", FLOATX, OUT, (int64_t)N * g.width, 0);
}
RUN(generator_forward)
{
    SIZES;
    Generator g = case_generator(c, p);
    o->generator_forward(stream, p[5], p[6], &g, p[4], N, d);
}

// Variant 1: no gradient of the scale; 0 and 1: something is added to dx.
DESCRIBE(generator_backward)
{
    SIZES;
    describe_generator(c);
    Generator g = case_generator(c, (void *[4]){0});
    add(c, "dout", FP32, IN, (int64_t)N * g.K, 1);
    add(c, "pre", FLOATX, IN, (int64_t)N * g.width, 1.7);
    add(c, "dx", FLOATX, OUT, (int64_t)N * d, 0);
    add(c, "dpre", FLOATX, OUT, (int64_t)N * g.width, 0);
    add(c, "dw2", FP32, INOUT, g.K * g.width, 1);
    add(c, "db2", FP32, INOUT, g.K, 1);
    add(c, "dscale", FP32, INOUT, 1, 1);
    c->buffer[c->count - 1].spread = 0.3 * sqrt((double)N * g.K);
    add(c, "residual", FLOATX, IN, c->variant < 2 ? (int64_t)N * d : 8, 1);
}
RUN(generator_backward)
{
    SIZES;
    Generator g = case_generator(c, p);
    GeneratorBackward a = {&g,   p[6], p[7],
                           p[8], p[9], c->variant == 1 ? NULL : p[10],
                           p[4], p[5], c->variant < 2 ? p[11] : NULL};
    o->generator_backward(stream, &a, N, d);
}
