// Sums of streams, gathered rows with signs, generators, and Adam with decay, fp32 build: forward against
// double versions, backward against their central differences. Limit: every result is a chain of a few fp32
// operations and sums of at most some hundred terms, 2^-24 each: near 1e-7 in norm. 1e-5 leaves two orders of
// magnitude and is far below what a wrong formula gives.
#include "dev/test/tap.h"
#include "dev/test/exact_check.h"

// ---- coefficients of streams ------------------------------------------------------------------------------

// The four kinds, with the values that the double version varies.
typedef struct {
    StreamFactor c;
    Tensor32 scalar, column; // of the kinds that have one
} Factor;

static Factor random_factor(int kind, int N)
{
    Factor f = {.c = {.plus = kind == 3 ? 1.0f : 0}, .scalar = random_tensor32(1, 1)};
    f.c.stride = 3;
    f.column = random_tensor32(3 * N, 1);
    if (kind == 1 || kind == 3)
        f.c.scalar = f.scalar.x;
    if (kind >= 2)
        f.c.column = f.column.x + 1;
    return f;
}

static double ref_factor(const Factor *f, int t)
{
    return (double)f->c.plus +
           (f->c.scalar ? f->scalar.d[0] : 1) * (f->c.column ? f->column.d[3 * t + 1] : 1);
}

// ---- a sum of streams -------------------------------------------------------------------------------------

static void mix_case(int N, int d, int terms, bool only_h, bool only_y)
{
    pool_reset();
    int vocab = 5, n = N * d;
    double *y = doubles(n), *h = doubles(n), *rstd = doubles(N), amax = 0.01;
    floatX *got_y = halves(n), *got_h = halves(n);
    float *got_rstd = floats(N), got_amax = 0.01f;
    StreamMix a = {only_h ? NULL : got_y, only_y ? NULL : got_h, got_rstd, only_y ? NULL : &got_amax,
                   .terms = terms};
    for (int k = 0; k < terms; k++) {
        bool gathered = k == 4;
        Tensor x = random_tensor(gathered ? vocab * d : n, 1);
        int32_t *rows = gathered ? random_tokens(N, vocab) : NULL;
        Factor f = random_factor(k % 4, N);
        a.term[k] = (StreamTerm){x.x, rows, f.c};
        for (int i = 0; i < n; i++)
            y[i] += ref_factor(&f, i / d) * x.d[(rows ? rows[i / d] : i / d) * d + i % d];
        if (k == 1 && !only_h) { // in place
            memcpy(got_y, x.x, sizeof(floatX) * (size_t)n);
            a.term[k].x = got_y;
        }
    }
    for (int t = 0; t < N; t++)
        rstd[t] = ref_rms(h + t * d, y + t * d, d);
    for (int i = 0; i < n; i++)
        amax = fmax(amax, fabs(h[i]));
    stream_mix(NULL, &a, N, d);
    printf("# sum of %d streams, N %d, d %d\n", terms, N, d);
    if (!only_h)
        check_x("   y", got_y, y, n);
    if (!only_y) {
        check_x("   h", got_h, h, n);
        check("   rstd", got_rstd, rstd, N);
        check("   amax", &got_amax, &amax, 1);
    }
}

static void amax_case(void)
{
    pool_reset();
    Tensor x = random_tensor(2 * 8, 1);
    floatX *h = halves(2 * 8);
    float rstd[2], amax = 100;
    StreamMix a = {NULL, h, rstd, &amax, {{.x = x.x}}, 1};
    stream_mix(NULL, &a, 2, 8);
    ok(amax == 100, "amax of before is kept where it is larger");
    x.x[3] = float_to_x(NAN);
    stream_mix(NULL, &a, 2, 8);
    ok(isnan(amax), "amax of NaN is NaN");
}

// ---- the gradient of streams ------------------------------------------------------------------------------

// Streams with the same readers; the first has norms, too, of which the second has no leads.
static struct {
    int N, d, readers, streams, vocab, leads, norms;
    Tensor x[STREAM_GRADS], g[STREAM_READERS], dh[STREAM_NORMS], beside;
    int32_t *rows; // of the second
    Tensor32 lead[STREAM_NORMS];
    Factor factor[STREAM_GRADS][STREAM_READERS];
} sg;

static bool has_lead(int norm) { return norm != 1; }

static double stream_loss(void)
{
    int N = sg.N, d = sg.d;
    double sum = 0, h[512];
    for (int t = 0; t < N; t++) {
        for (int k = 0; k < sg.streams; k++) {
            const double *x = sg.x[k].d + (k == 1 && sg.rows ? sg.rows[t] : t) * d;
            for (int r = 0; r < sg.readers; r++)
                sum += ref_factor(&sg.factor[k][r], t) * inner(x, sg.g[r].d + t * d, d);
        }
        for (int k = 0; k < sg.norms; k++) {
            ref_rms(h, sg.x[0].d + t * d, d);
            sum += inner(h, sg.dh[k].d + t * d, d);
            sum += has_lead(k) ? inner(h, sg.lead[k].d + t * sg.leads, sg.leads) : 0;
        }
    }
    return sum;
}

static void stream_inputs(int N, int d, int readers, int streams, int norms, bool rows)
{
    pool_reset();
    sg.N = N;
    sg.d = d;
    sg.readers = readers;
    sg.streams = streams;
    sg.norms = norms;
    sg.vocab = 3;
    sg.leads = 6;
    sg.rows = rows ? random_tokens(N, sg.vocab) : NULL;
    sg.beside = random_tensor(N * d, 1);
    for (int k = 0; k < norms; k++) {
        sg.dh[k] = random_tensor(N * d, 1);
        sg.lead[k] = random_tensor32(N * sg.leads, 1);
    }
    for (int k = 0; k < streams; k++)
        sg.x[k] = random_tensor(k == 1 && rows ? sg.vocab * d : N * d, 1);
    for (int r = 0; r < readers; r++) {
        sg.g[r] = random_tensor(N * d, 1);
        for (int k = 0; k < streams; k++)
            sg.factor[k][r] = random_factor((r + k) % 4, N);
    }
}

static void check_factors(const StreamGrad *a, int k)
{
    for (int r = 0; r < sg.readers; r++) {
        const StreamReader *reader = &a[k].reader[r];
        const Factor *f = &sg.factor[k][r];
        char text[64];
        snprintf(text, sizeof text, "   stream %d, reader %d: scalar", k, r);
        if (f->c.scalar) {
            double *e = central_differences(f->scalar.d, 1, stream_loss);
            e[0] += 0.5;
            check(text, reader->dscalar, e, 1);
        }
        snprintf(text, sizeof text, "   stream %d, reader %d: column", k, r);
        if (f->c.column)
            check(text, reader->dcolumn - 1, central_differences(f->column.d, 3 * sg.N, stream_loss),
                  3 * sg.N);
    }
}

static void check_beside(const StreamGrad *a)
{
    double e = -0.25;
    for (int i = 0; i < sg.N * sg.d; i++)
        e += sg.g[0].d[i] * sg.beside.d[i];
    check("   the factor of the stream beside it", a->dbeside, &e, 1);
}

// from_h: the stream is given by h and rstd alone; with norms another of its sum is beside it. More than a
// pair of streams: no dx is wanted.
static void stream_case(int N, int d, int readers, int streams, int norms, bool rows, bool from_h)
{
    stream_inputs(N, d, readers, streams, norms, rows);
    int n = N * d;
    floatX *h = halves(n), *dx = halves(n), *wide = halves(3 * n);
    float *rstd = floats(N), dbeside = -0.25f;
    rmsnorm_forward(NULL, h, rstd, sg.x[0].x, N, d);
    StreamGrad a[STREAM_GRADS] = {
        {.dx = dx, .accumulate = streams == 2, .x = from_h ? NULL : sg.x[0].x, .norms = norms}};
    for (int k = 1; k < streams; k++)
        a[k] = (StreamGrad){.dx = rows ? NULL : halves(n), .x = sg.x[k].x, .rows = k == 1 ? sg.rows : NULL};
    for (int k = 0; k < streams && streams > STREAM_PAIR; k++)
        a[k].dx = NULL;
    double *before = doubles(n);
    for (int i = 0; i < n && streams == 2; i++)
        before[i] = x_to_float(dx[i] = float_to_x((float)uniform(-1, 1)));
    if (norms || from_h) {
        a[0].h = h;
        a[0].rstd = rstd;
    }
    for (int k = 0; k < norms; k++)
        a[0].norm[k] = has_lead(k) ? (StreamNorm){sg.dh[k].x, sg.lead[k].x, sg.leads}
                                   : (StreamNorm){sg.dh[k].x, NULL, 0};
    if (norms && from_h) {
        a[0].beside = sg.beside.x;
        a[0].dbeside = &dbeside;
    }
    for (int t = 0; t < N && readers > 1; t++) // one reader's gradient is the last third of wider rows
        memcpy(wide + (3 * t + 2) * d, sg.g[1].x + t * d, sizeof(floatX) * (size_t)d);
    for (int k = 0; k < streams; k++) {
        a[k].readers = readers;
        for (int r = 0; r < readers; r++) {
            const Factor *f = &sg.factor[k][r];
            a[k].reader[r] = (StreamReader){r == 1 ? wide + 2 * d : sg.g[r].x, r == 1 ? 3 * d : 0, f->c,
                                            floats(1), floats(3 * N) + 1};
            *a[k].reader[r].dscalar = 0.5f;
        }
    }
    stream_grads(NULL, a, streams, N, d);
    printf("# gradient of %d streams, %d readers, %d norms%s, N %d, d %d\n", streams, readers, norms,
           from_h ? ", from h" : "", N, d);
    for (int k = 0; k < streams; k++) {
        if (a[k].dx) {
            double *e = central_differences(sg.x[k].d, n, stream_loss);
            for (int i = 0; i < n && k == 0; i++)
                e[i] += before[i];
            check_x("   dx", a[k].dx, e, n);
        }
        check_factors(a, k);
    }
    if (a[0].beside)
        check_beside(a);
}

// dx in place of a reader's gradient, without gradients of coefficients.
static void stream_in_place_case(int N, int d)
{
    stream_inputs(N, d, 2, 1, 0, false);
    double *e = central_differences(sg.x[0].d, N * d, stream_loss);
    StreamGrad a = {sg.g[1].x, .x = sg.x[0].x, .readers = 2};
    for (int r = 0; r < 2; r++)
        a.reader[r] = (StreamReader){.g = sg.g[r].x, .c = sg.factor[0][r].c};
    stream_grads(NULL, &a, 1, N, d);
    check_x("gradient of a stream in place of a reader's", sg.g[1].x, e, N * d);
}

// ---- streams of a small network ---------------------------------------------------------------------------

// c = x0 + k0 b;  x = r c + o + k1 x0 + k2 b, h = rms(x);  z = x + s k3 c;  y = (1 + k4) z + k5 c + k6
// T[rows], out = rms(y).  k: columns; r, s: scalars. The loss is linear in h and out.
enum { K0, K1, K2, K3, K4, K5, K6, COLUMNS };
static struct {
    int N, d;
    Tensor x0, b, o, table, dh, dout;
    Tensor32 r, s, k;
    int32_t *rows;
} net;

static double net_loss(void)
{
    int d = net.d;
    double c[64], x[64], y[64], h[64], sum = 0;
    for (int t = 0; t < net.N; t++) {
        const double *k = net.k.d + t * COLUMNS;
        for (int j = 0; j < d; j++) {
            int i = t * d + j;
            c[j] = net.x0.d[i] + k[K0] * net.b.d[i];
            x[j] = net.r.d[0] * c[j] + net.o.d[i] + k[K1] * net.x0.d[i] + k[K2] * net.b.d[i];
            double z = x[j] + net.s.d[0] * k[K3] * c[j];
            y[j] = (1 + k[K4]) * z + k[K5] * c[j] + k[K6] * net.table.d[net.rows[t] * d + j];
        }
        ref_rms(h, x, d);
        sum += inner(h, net.dh.d + t * d, d);
        ref_rms(h, y, d);
        sum += inner(h, net.dout.d + t * d, d);
    }
    return sum;
}

static StreamFactor column(int k) { return (StreamFactor){.column = net.k.x + k, .stride = COLUMNS}; }

static void net_case(int N, int d)
{
    pool_reset();
    int n = N * d, vocab = 4;
    net.N = N;
    net.d = d;
    Tensor *all[] = {&net.x0, &net.b, &net.o, &net.dh, &net.dout};
    for (int i = 0; i < 5; i++)
        *all[i] = random_tensor(n, 1);
    net.table = random_tensor(vocab * d, 1);
    net.r = random_tensor32(1, 1);
    net.s = random_tensor32(1, 1);
    net.k = random_tensor32(N * COLUMNS, 1);
    net.rows = random_tokens(N, vocab);
    floatX *c = halves(n), *x = halves(n), *h = halves(n), *z = halves(n), *out = halves(n);
    float *rstd = floats(N), *rstd_out = floats(N);
    StreamFactor r = {.scalar = net.r.x}, skip = column(K3), last = column(K4);
    skip.scalar = net.s.x;
    last.plus = 1;
    StreamMix mixes[] =
        {{c, .term = {{net.x0.x}, {net.b.x, .c = column(K0)}}, .terms = 2},
         {x,
          h,
          rstd,
          NULL,
          {{c, .c = r}, {.x = net.o.x}, {net.x0.x, .c = column(K1)}, {net.b.x, .c = column(K2)}},
          4},
         {z, .term = {{x}, {c, .c = skip}}, .terms = 2},
         {NULL,
          out,
          rstd_out,
          NULL,
          {{z, .c = last}, {c, .c = column(K5)}, {net.table.x, net.rows, column(K6)}},
          3}};
    for (int i = 0; i < 4; i++)
        stream_mix(NULL, &mixes[i], N, d);

    floatX *dy = halves(n), *dz = halves(n), *dx = halves(n), *dc = halves(n), *dx0 = halves(n),
           *db = halves(n);
    float *dk = floats(N * COLUMNS), dr = 0, ds = 0;
    StreamGrad y_grad = {dy, .norm = {{net.dout.x}}, .norms = 1, .h = out, .rstd = rstd_out};
    StreamGrad z_grad = {dz, .x = z, .reader = {{dy, 0, last, NULL, dk + K4}}, .readers = 1};
    StreamGrad t_grad = {.x = net.table.x,
                         .rows = net.rows,
                         .reader = {{dy, 0, column(K6), NULL, dk + K6}},
                         .readers = 1};
    StreamGrad x_grad = {dx,         .reader = {{dz}}, .readers = 1, .norm = {{net.dh.x}},
                         .norms = 1, .h = h,           .rstd = rstd};
    StreamGrad c_grad = {dc, .x = c,
                         .reader = {{dx, 0, r, &dr},
                                    {dz, 0, skip, &ds, dk + K3},
                                    {dy, 0, column(K5), NULL, dk + K5}},
                         .readers = 3};
    StreamGrad first[2] =
        {{dx0, .x = net.x0.x, .reader = {{dc}, {dx, 0, column(K1), NULL, dk + K1}}, .readers = 2},
         {db, .x = net.b.x,
          .reader = {{dc, 0, column(K0), NULL, dk + K0}, {dx, 0, column(K2), NULL, dk + K2}}, .readers = 2}};
    StreamGrad *order[] = {&y_grad, &z_grad, &t_grad, &x_grad, &c_grad};
    for (int i = 0; i < 5; i++)
        stream_grads(NULL, order[i], 1, N, d);
    stream_grads(NULL, first, 2, N, d);
    check_x("streams of a network: gradient of x0", dx0, central_differences(net.x0.d, n, net_loss), n);
    check_x("   of the bigram", db, central_differences(net.b.d, n, net_loss), n);
    check_x("   of what a layer adds: that of the sum itself", dx, central_differences(net.o.d, n, net_loss),
            n);
    check("   of the columns", dk, central_differences(net.k.d, N * COLUMNS, net_loss), N * COLUMNS);
    check("   of a scalar", &dr, central_differences(net.r.d, 1, net_loss), 1);
    check("   of a scalar times a column", &ds, central_differences(net.s.d, 1, net_loss), 1);
}

// ---- gathered rows ----------------------------------------------------------------------------------------

// out = signs * table[rows]; two readers: one takes out's signed rows, one the plain rows with a factor a
// group and a gradient of its first channels.
static struct {
    int N, d, width, groups;
    int32_t *rows, *sign_rows;
    uint32_t *bits;
    Tensor table, g, plain;
    Tensor32 factor, lead;
} gt;

static double ref_sign(int t, int c)
{
    int words = (gt.width + 31) / 32;
    return gt.bits[gt.sign_rows[t] * words + c / 32] >> (c % 32) & 1 ? -1 : 1;
}

static double gather_loss(void)
{
    double sum = 0;
    for (int t = 0; t < gt.N; t++)
        for (int c = 0; c < gt.width; c++) {
            double x = gt.table.d[gt.rows[t] * gt.width + c];
            sum += ref_sign(t, c) * x * gt.g.d[t * gt.d + c];
            sum += gt.factor.d[t * 5 + c / (gt.d / gt.groups)] * x * gt.plain.d[t * gt.d + c];
            sum += c < 6 ? gt.lead.d[t * 6 + c] * x : 0;
        }
    return sum;
}

// Positions of every distinct row.
static TokenRows rows_of(const int32_t *rows, int N, int count)
{
    int32_t *order = take((size_t)N, 4), *row = take((size_t)N, 4), *start = take((size_t)N + 1, 4),
            *distinct = take(1, 4);
    for (int r = 0, n = 0; r < count; r++) {
        int before = n;
        for (int t = 0; t < N; t++)
            if (rows[t] == r)
                order[n++] = t;
        if (n > before) {
            row[*distinct] = r;
            start[++*distinct] = n;
        }
    }
    return (TokenRows){order, row, start, distinct};
}

static void gather_case(int N, int d, int width, int groups)
{
    pool_reset();
    int count = 7, sign_count = 4, words = (width + 31) / 32, n = count * width;
    gt.N = N;
    gt.d = d;
    gt.width = width;
    gt.groups = groups;
    gt.rows = random_tokens(N, count);
    gt.sign_rows = random_tokens(N, sign_count);
    gt.bits = take((size_t)(sign_count * words), sizeof *gt.bits);
    for (int i = 0; i < sign_count * words; i++)
        gt.bits[i] = (uint32_t)uniform(0, 4294967296.0);
    gt.table = random_tensor(n, 1);
    gt.g = random_tensor(N * d, 1);
    gt.plain = random_tensor(N * d, 1);
    gt.factor = random_tensor32(N * 5, 1);
    gt.lead = random_tensor32(N * 6, 1);
    RowSigns signs = {gt.bits, gt.sign_rows};
    floatX *out = halves(N * d), *wide = halves(N * 2 * d);
    for (int i = 0; i < N * d; i++)
        out[i] = float_to_x(7);
    signed_gather(NULL, out, gt.table.x, gt.rows, &signs, N, d, width);
    double *e = doubles(N * d);
    for (int i = 0; i < N * d; i++)
        e[i] = i % d < width ? ref_sign(i / d, i % d) * gt.table.d[gt.rows[i / d] * width + i % d] : 0;
    printf("# rows of %d of %d channels, N %d\n", width, d, N);
    check_x("   gathered with signs", out, e, N * d);
    for (int t = 0; t < N; t++)
        memcpy(wide + 2 * t * d, gt.plain.x + t * d, sizeof(floatX) * (size_t)d);
    RowReader readers[2] = {{.g = gt.g.x, .signs = &signs},
                            {wide, 2 * d, gt.factor.x, 5, groups, gt.lead.x, 6, NULL}};
    float *dtable = floats(n);
    TokenRows rows = rows_of(gt.rows, N, count);
    double *expected = central_differences(gt.table.d, n, gather_loss);
    for (int i = 0; i < n; i++) {
        dtable[i] = 0.25f;
        expected[i] += 0.25;
    }
    table_grad(NULL, dtable, readers, 2, &rows, N, d, width);
    check("   gradient of the table", dtable, expected, n);
}

// ---- generators -------------------------------------------------------------------------------------------

static struct {
    int N, d, width, K;
    Tensor x, w1, w2, b2;
    Tensor32 scale, dout;
    double *out;
} ge;

static double generator_loss(void)
{
    double hidden[64];
    for (int t = 0; t < ge.N; t++) {
        for (int j = 0; j < ge.width; j++) {
            double u = inner(ge.x.d + t * ge.d, ge.w1.d + j * ge.d, ge.d);
            hidden[j] = 0.5 * u * (1 + erf(u / sqrt(2)));
        }
        for (int k = 0; k < ge.K; k++)
            ge.out[t * ge.K + k] =
                ge.scale.d[0] * (ge.b2.d[k] + inner(hidden, ge.w2.d + k * ge.width, ge.width));
    }
    return inner(ge.out, ge.dout.d, ge.dout.n);
}

static void generator_case(int N, int d, int width, int K, bool residual)
{
    pool_reset();
    ge.N = N;
    ge.d = d;
    ge.width = width;
    ge.K = K;
    ge.x = random_tensor(N * d, 1);
    ge.w1 = random_tensor(width * d, 0.5);
    ge.w2 = random_tensor(K * width, 1);
    ge.b2 = random_tensor(K, 1);
    ge.scale = random_tensor32(1, 1);
    ge.dout = random_tensor32(N * K, 1);
    ge.out = doubles(N * K);
    Generator g = {ge.w1.x, ge.w2.x, ge.b2.x, ge.scale.x, width, K};
    floatX *pre = halves(N * width), *dpre = halves(N * width), *dx = halves(N * d);
    float *out = floats(N * K), *dw1 = floats(width * d), *dw2 = floats(K * width), *db2 = floats(K),
          dscale = 0.5f;
    generator_forward(NULL, out, pre, &g, ge.x.x, N, d);
    generator_loss();
    printf("# generator: N %d, d %d, width %d, %d numbers\n", N, d, width, K);
    check("   out", out, ge.out, N * K);
    db2[0] = -2;
    dw2[1] = 3;
    Tensor add = random_tensor(N * d, 1);
    generator_backward(NULL,
                       &(GeneratorBackward){&g, dx, dpre, dw2, db2, &dscale, ge.dout.x, pre,
                                            residual ? add.x : NULL},
                       N, d);
    matmul_weight_grads(NULL, &(WeightGrad){dw1, dpre, ge.x.x, width, d, .fresh = true}, 1, N);
    double *ew2 = central_differences(ge.w2.d, K * width, generator_loss),
           *eb2 = central_differences(ge.b2.d, K, generator_loss),
           *escale = central_differences(ge.scale.d, 1, generator_loss);
    eb2[0] -= 2;
    ew2[1] += 3;
    escale[0] += 0.5;
    double *ex = central_differences(ge.x.d, N * d, generator_loss);
    for (int i = 0; i < N * d && residual; i++)
        ex[i] += add.d[i];
    check_x("   gradient of x", dx, ex, N * d);
    check("   of w1", dw1, central_differences(ge.w1.d, width * d, generator_loss), width * d);
    check("   of w2", dw2, ew2, K * width);
    check("   of b2", db2, eb2, K);
    check("   of the scale", &dscale, escale, 1);
}

// ---- Adam with decay --------------------------------------------------------------------------------------

static void adam_case(int n)
{
    pool_reset();
    Tensor p = random_tensor(n, 1);
    Tensor32 m = random_tensor32(n, 1), v = random_tensor32(n, 1), g = random_tensor32(n, 3);
    StepParams step = {.grad_scale = 0.125f, .rule = {[2] = {.rate = 0.75f, .decay = 0.3f}}};
    AdamRule rule = {2, 0.75f, 0.95f, 1e-10f, 0.25f, 0.05f};
    int decayed = 0;
    p.d[0] = 0; // u p is 0 there: no decay
    p.x[0] = float_to_x(0);
    for (int i = 0; i < n; i++) {
        v.d[i] = v.x[i] = fabsf(v.x[i]);
        double scaled = g.d[i] * 0.125;
        m.d[i] = 0.75 * m.d[i] + 0.25 * scaled;
        v.d[i] = (double)0.95f * v.d[i] + (double)0.05f * scaled * scaled;
        double u = 0.75 * m.d[i] / (sqrt(v.d[i]) + 1e-10);
        bool same = u * p.d[i] > 0;
        p.d[i] -= u + (same ? (double)0.3f * p.d[i] : 0);
        decayed += same;
    }
    adam_update_decay(NULL, p.x, m.x, v.x, g.x, &step, rule, n);
    double left = 0;
    for (int i = 0; i < n; i++)
        left += fabs(g.x[i]);
    ok(decayed > n / 4 && decayed < n - n / 4, "Adam with decay: %d of %d decay", decayed, n);
    check_x("   p", p.x, p.d, n);
    check("   m", m.x, m.d, n);
    check("   v", v.x, v.d, n);
    ok(left == 0, "   gradient cleared");
}

int main(void)
{
    OpSizes sizes =
        {.tokens = 100, .eval_tokens = 100, .dim = 96, .heads = 4, .mlp_dim = 96, .vocab_padded = 128};
    backend_open(0);
    backend_reserve(&sizes);
    mix_case(7, 20, 2, false, false);
    mix_case(40, 33, 6, true, false);
    mix_case(1, 8, 3, false, true);
    mix_case(5, 16, 5, false, false);
    amax_case();
    stream_case(6, 20, 2, 1, 1, false, false);
    stream_case(40, 12, 1, 1, 1, false, true);
    stream_case(7, 12, 4, 1, 3, false, true);
    stream_case(3, 20, 12, 1, 2, false, false);
    stream_case(5, 16, 6, 2, 0, false, false);
    stream_case(9, 12, 12, 2, 0, true, false);
    stream_case(8, 12, 6, 5, 0, true, false);
    stream_case(1, 8, 2, 1, 0, false, true);
    stream_in_place_case(5, 12);
    net_case(9, 20);
    gather_case(30, 24, 24, 4);
    gather_case(41, 96, 40, 2);
    gather_case(1, 24, 24, 1);
    generator_case(7, 20, 8, 5, true);
    generator_case(11, 16, 64, 41, false);
    generator_case(1, 12, 3, 64, true);
    adam_case(9001);
    adam_case(13);
    backend_close();
    return tap_done();
}
