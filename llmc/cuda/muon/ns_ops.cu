// Newton-Schulz primitives: the path of a shape, and chains of tasks on the sm90 path.
#include "llmc/cuda/muon/sm90_ns_chain.cuh"

// TILES_IN_FLIGHT: two for each cluster of a device with 132 multiprocessors, and some more. With fewer
// tiles of a task the next one must wait for it, and nothing can be loaded ahead.
enum { SMALLEST_TENSOR_SIDE = 64, PITCH_ELEMENTS = 8, TILES_IN_FLIGHT = 144 };

static const size_t CHAIN_BYTES = (2 + CHAIN_DONE) * sizeof(unsigned); // finished CTAs, tile counter, done

void ns_reserve(void)
{
    if (!device_state.open)
        fatal(EXIT_BAD_INPUT, "ns_reserve before backend_open");
    scratch_plan(SCRATCH_NS_NORMS, NS_NORM_BYTES);
    scratch_plan(SCRATCH_NS_CHAIN, CHAIN_BYTES);
}

void ns_release(void)
{
    ns_forget_device();
    ns_forget_clusters();
}

size_t ns_element_size(NsDtype dtype) { return dtype == NS_FP32 ? 4 : 2; }

const char *ns_path_name(NsPath path)
{
    static const char *const names[] = {"tensor (TMA, warpgroup products)", "portable",
                                        "small (one kernel, tiles on chip)"};
    return names[path];
}

NsPath ns_product_path(NsDtype dtype, int n, int m)
{
    if (dtype == NS_FP32 || !device_has_wgmma())
        return NS_PATH_PORTABLE;
    return n % PITCH_ELEMENTS || n < SMALLEST_TENSOR_SIDE || m < SMALLEST_TENSOR_SIDE ? NS_PATH_PORTABLE
                                                                                      : NS_PATH_TENSOR;
}

NsPath ns_iteration_path(NsDtype dtype, int n, int m)
{
    return ns_iterates(dtype, n, m) ? NS_PATH_SMALL : ns_product_path(dtype, n, m);
}

int ns_pitch(NsDtype dtype, int n, int m)
{
    return ns_product_path(dtype, n, m) == NS_PATH_TENSOR ? (int)round_up(m, PITCH_ELEMENTS) : m;
}

// ---- chains ----------------------------------------------------------------------------------------------

typedef struct {
    const void *in[4], *out[3];
} Uses;

// What a chain holds back.
struct NsTasks {
    Chain chain;
    Uses uses[CHAIN_TASKS];
    uint32_t after[CHAIN_TASKS]; // bit i: comes after task i, directly or not
};

static bool contains(const void *const *list, int count, const void *p)
{
    for (int i = 0; i < count; i++)
        if (p && list[i] == p)
            return true;
    return false;
}

// One of them writes what the other uses.
static bool conflict(const Uses *x, const Uses *y)
{
    for (int i = 0; i < 3; i++)
        if (contains(y->in, 4, x->out[i]) || contains(y->out, 3, x->out[i]) || contains(x->in, 4, y->out[i]))
            return true;
    return false;
}

// ---- tile widths of a chain -------------------------------------------------------------------------------

// wide: columns of tiles of TILE_SLICES boxes that come before those of `width`, of TASK_FULL only.
static void set_width(Task *t, int width, int wide)
{
    int along = tiles_along(t->rows), tiles = 0;
    t->width = width;
    t->wide = wide;
    t->tiles_per_column = along;
    if (t->kind == TASK_FULL)
        tiles = along * (wide + (int)ceil_div(max_i64(0, boxes_along(t->cols) - TILE_SLICES * wide), width));
    else
        for (int i = 0; i < along; i++)
            tiles += tiles_in_row(t->rows, width, i);
    t->tiles = tiles;
}

// Cycles of a cluster for a tile: per k step and for the rest, measured at 1.7 GHz.
static double tile_cycles(const Task *t, int width)
{
    double stages = (double)ceil_div(t->depth, BOX_SIDE);
    return width == NARROW_BOXES ? 870 * stages + 7000 : 1106 * stages + 8000;
}

// `clusters` clusters are free from `at` on; lists are sorted by time.
enum { FREE_TIMES = 256 };
typedef struct {
    double at;
    int64_t clusters;
} Free;
typedef struct {
    Free list[FREE_TIMES];
    int count;
} Clusters;

static void add_free(Clusters *c, Free x)
{
    int i = c->count++;
    for (; i > 0 && c->list[i - 1].at > x.at; i--)
        c->list[i] = c->list[i - 1];
    c->list[i] = x;
}

// The clusters take tiles of `each` cycles as they become free, not before `ready`. Returns when the last
// tile ends.
static double assign_tiles(Clusters *c, int64_t tiles, double each, double input_ready)
{
    double end = input_ready;
    for (int64_t left = tiles, now; left > 0; left -= now) {
        Free first = c->list[0];
        now = min_i64(left, first.clusters);
        if (now == first.clusters)
            memmove(c->list, c->list + 1, (size_t)--c->count * sizeof *c->list);
        else
            c->list[0].clusters -= now;
        double at = fmax(first.at, input_ready) + each;
        end = fmax(end, at);
        add_free(c, (Free){at, now});
    }
    return end;
}

static double assign_task(Clusters *c, const Task *t, int batch, double input_ready)
{
    int64_t wide = (int64_t)batch * t->tiles_per_column * t->wide;
    double end = assign_tiles(c, wide, tile_cycles(t, TILE_SLICES), input_ready);
    return fmax(end,
                assign_tiles(c, (int64_t)batch * t->tiles - wide, tile_cycles(t, t->width), input_ready));
}

// When the last tile ends, if clusters take tiles in order, one task at a time, and wait for whole tasks, as
// they do when there are few.
static double chain_cycles(const Chain *c, int clusters)
{
    Clusters free = {{{0, clusters}}, 1};
    double done[CHAIN_TASKS] = {}, end = 0;
    for (int i = 0; i < c->tasks; i++) {
        double input_ready = 0;
        for (int k = 0; k < i; k++)
            if (c->task[i].waits >> k & 1)
                input_ready = fmax(input_ready, done[k]);
        done[i] = assign_task(&free, &c->task[i], c->batch, input_ready);
        end = fmax(end, done[i]);
    }
    return end;
}

// The product with x of one matrix, behind which clusters wait for each other: full-width tiles first, then
// as many columns of narrow ones as make it end soonest, because few clusters idle in the last wave.
static void choose_columns(Task *t, int clusters)
{
    double best = 0;
    int chosen = 0;
    for (int wide = tiles_along(t->cols); wide >= 0; wide--) {
        set_width(t, NARROW_BOXES, wide);
        Clusters free = {{{0, clusters}}, 1};
        double end = assign_task(&free, t, 1, 0);
        if (best == 0 || end < best) {
            best = end;
            chosen = wide;
        }
    }
    set_width(t, NARROW_BOXES, chosen);
}

// A task with fewer tiles than clusters ends sooner in narrow tiles, unless these delay another task.
// TASK_AOL takes the boxes of a slice in fours.
static void choose_widths(Chain *c, NsDtype dtype)
{
    int clusters = (int)min_i64(ns_clusters(dtype), FREE_TIMES - 1);
    for (int i = 0; i < c->tasks; i++) {
        Task *t = &c->task[i];
        set_width(t, TILE_SLICES, 0);
        if (t->kind == TASK_FULL && c->batch == 1)
            choose_columns(t, clusters);
    }
    for (int i = 0; i < c->tasks; i++) {
        Task *t = &c->task[i];
        if (t->kind == TASK_FULL || t->kind == TASK_AOL)
            continue;
        set_width(t, NARROW_BOXES, 0);
        bool few = (int64_t)t->tiles * c->batch <= clusters;
        double narrow = few ? chain_cycles(c, clusters) : 0;
        set_width(t, TILE_SLICES, 0);
        if (few && narrow < chain_cycles(c, clusters))
            set_width(t, NARROW_BOXES, 0);
    }
}

static void launch_tasks(const NsChain *chain, NsTasks *held)
{
    Chain *c = &held->chain;
    if (c->tasks == 0)
        return;
    int64_t tiles = 0, smallest = INT32_MAX;
    choose_widths(c, chain->dtype);
    for (int i = 0; i < c->tasks; i++) {
        tiles += c->task[i].tiles;
        smallest = min_i64(smallest, c->task[i].tiles);
    }
    if (tiles * c->batch > INT32_MAX)
        fatal(EXIT_BAD_INPUT, "Newton-Schulz: %d matrices of %d rows at once are too many; set a batch limit",
              c->batch, c->task[0].rows);
    c->total = (int)(tiles * c->batch);
    int groups = (int)max_i64(1, c->batch / ceil_div(TILES_IN_FLIGHT, smallest));
    c->together = (int)ceil_div(c->batch, groups);
    c->finished = (unsigned *)scratch_of(chain->stream, SCRATCH_NS_CHAIN, CHAIN_BYTES);
    c->tile_counter = c->finished + 1;
    c->done = c->tile_counter + 1;
    c->counters = c->tasks > 1 ? c->tasks * c->batch : 0;
    ns_launch_chain(chain->stream, chain->dtype, *c);
    c->tasks = 0;
}

static void hold_task(const NsChain *chain, NsTasks *held, const Task *t, const Uses *u)
{
    Chain *c = &held->chain;
    if (c->tasks == CHAIN_TASKS || (int64_t)(c->tasks + 1) * chain->batch > CHAIN_DONE)
        launch_tasks(chain, held);
    c->batch = chain->batch;
    Task *to = &c->task[c->tasks];
    *to = *t;
    // The latest task first: what it has waited for needs no wait of its own.
    uint32_t known = 0;
    for (int i = c->tasks - 1; i >= 0; i--) {
        if (known >> i & 1 || !conflict(&held->uses[i], u))
            continue;
        to->waits |= 1u << i;
        c->task[i].awaited = true;
        known |= held->after[i];
    }
    held->after[c->tasks] = known | to->waits;
    held->uses[c->tasks++] = *u;
}

static void add_task(const NsChain *chain, const Task *t, const Uses *u)
{
    if (chain->tasks) {
        hold_task(chain, chain->tasks, t, u);
        return;
    }
    NsTasks alone = {};
    hold_task(chain, &alone, t, u);
    launch_tasks(chain, &alone);
}

void ns_chain_begin(NsChain *chain) { chain->tasks = new NsTasks(); }

void ns_chain_end(NsChain *chain)
{
    launch_tasks(chain, chain->tasks);
    delete chain->tasks;
    chain->tasks = NULL;
}

// Whether the product of these shapes is a kernel of its own, which runs after what the chain holds back.
static bool takes_portable(const NsChain *chain, int n, int m)
{
    if (ns_product_path(chain->dtype, n, m) != NS_PATH_PORTABLE)
        return false;
    if (chain->tasks)
        launch_tasks(chain, chain->tasks);
    return true;
}

// ---- products --------------------------------------------------------------------------------------------

static CUtensorMap square_map(NsDtype dtype, const void *a, int n, int batch)
{
    return ns_tensor_map(dtype, a, n, n, n, batch);
}

static CUtensorMap tall_map(NsDtype dtype, const void *x, int n, int m, int batch)
{
    return ns_tensor_map(dtype, x, n, m, ns_pitch(dtype, n, m), batch);
}

static NsProduct portable_gram(void *a, const void *x, int n, int m, int batch)
{
    int64_t tall = (int64_t)n * m, square = (int64_t)n * n;
    return {.a = x,
            .b = x,
            .out = a,
            .a_stride = tall,
            .b_stride = tall,
            .out_stride = square,
            .a_pitch = m,
            .b_pitch = m,
            .out_pitch = n,
            .rows = n,
            .cols = n,
            .depth = m,
            .batch = batch,
            .alpha = 1};
}

void ns_gram(NsChain *chain, void *a, const void *x, int n, int m)
{
    OP_PART(ns_gram, chain->dtype, n, m, chain->batch);
    if (chain->batch == 0)
        return;
    if (takes_portable(chain, n, m)) {
        ns_portable_product(chain->stream, PRODUCT_GRAM, chain->dtype, chain->dtype,
                            portable_gram(a, x, n, m, chain->batch));
        return;
    }
    CUtensorMap of_x = tall_map(chain->dtype, x, n, m, chain->batch);
    Task t = {.a = of_x,
              .b = of_x,
              .out = square_map(chain->dtype, a, n, chain->batch),
              .rows = n,
              .cols = n,
              .depth = m,
              .alpha = 1,
              .kind = TASK_SYMMETRIC,
              .has_out = true,
              .same_operands = true};
    Uses u = {{x}, {a}};
    add_task(chain, &t, &u);
}

static const void *d_of(const NsSymmetric *p) { return p->beta == 0 ? NULL : p->d; }

static NsProduct portable_symmetric(const NsSymmetric *s, void *out, int batch)
{
    int n = s->n;
    int64_t square = (int64_t)n * n;
    return {.a = s->a,
            .b = s->b,
            .d = d_of(s),
            .out = out,
            .a_stride = square,
            .b_stride = square,
            .d_stride = square,
            .out_stride = square,
            .a_pitch = n,
            .b_pitch = n,
            .d_pitch = n,
            .out_pitch = n,
            .rows = n,
            .cols = n,
            .depth = n,
            .batch = batch,
            .alpha = s->alpha,
            .beta = s->beta};
}

// Without its results.
static Task symmetric_task(const NsSymmetric *p, NsDtype dtype, int batch)
{
    Task t = {.a = square_map(dtype, p->a, p->n, batch),
              .b = square_map(dtype, p->b, p->n, batch),
              .rows = p->n,
              .cols = p->n,
              .depth = p->n,
              .alpha = p->alpha,
              .beta = p->beta,
              .kind = TASK_SYMMETRIC,
              .has_d = d_of(p) != NULL,
              .same_operands = p->a == p->b};
    if (t.has_d)
        t.d = square_map(dtype, p->d, p->n, batch);
    return t;
}

void ns_symmetric(NsChain *chain, const NsSymmetric *p)
{
    OP_PART(ns_symmetric, chain->dtype, ns_squares(p) + !!p->c + !!p->q, p->n, chain->batch);
    if (chain->batch == 0)
        return;
    if (takes_portable(chain, p->n, p->n)) {
        NsProduct product = portable_symmetric(p, p->c ? p->c : p->q, chain->batch);
        ns_portable_product(chain->stream, PRODUCT_SYMMETRIC, chain->dtype, chain->dtype, product);
        if (p->q)
            ns_add_diagonal(chain->stream, chain->dtype, p->q, product.out, p->diagonal, p->n, chain->batch);
        return;
    }
    Task t = symmetric_task(p, chain->dtype, chain->batch);
    t.has_out = p->c;
    t.has_plus = p->q;
    t.diagonal = p->diagonal;
    if (p->c)
        t.out = square_map(chain->dtype, p->c, p->n, chain->batch);
    if (p->q)
        t.plus = square_map(chain->dtype, p->q, p->n, chain->batch);
    Uses u = {{p->a, p->b, d_of(p)}, {p->c, p->q}};
    add_task(chain, &t, &u);
}

static NsProduct portable_apply(const NsApply *apply, int batch)
{
    int n = apply->n, m = apply->m;
    int64_t tall = (int64_t)n * m, square = (int64_t)n * n;
    return {.a = apply->b,
            .b = apply->x,
            .d = apply->a == 0 ? NULL : apply->x,
            .out = apply->y,
            .a_stride = square,
            .b_stride = tall,
            .d_stride = tall,
            .out_stride = tall,
            .a_pitch = n,
            .b_pitch = m,
            .d_pitch = m,
            .out_pitch = m,
            .rows = n,
            .cols = m,
            .depth = n,
            .batch = batch,
            .alpha = apply->alpha,
            .beta = apply->a};
}

void ns_apply(NsChain *chain, const NsApply *apply)
{
    OP_PART(ns_apply, chain->dtype, apply->n, apply->m, chain->batch);
    int n = apply->n, m = apply->m;
    if (chain->batch == 0)
        return;
    int pitch = ns_pitch(chain->dtype, n, m);
    if (takes_portable(chain, n, m)) {
        ns_portable_product(chain->stream, PRODUCT_FULL, chain->dtype, chain->dtype,
                            portable_apply(apply, chain->batch));
        return;
    }
    CUtensorMap of_x = tall_map(chain->dtype, apply->x, n, m, chain->batch);
    Task t = {.a = square_map(chain->dtype, apply->b, n, chain->batch),
              .b = of_x,
              .d = of_x,
              .rows = n,
              .cols = m,
              .depth = n,
              .alpha = apply->alpha,
              .beta = apply->a,
              .kind = TASK_FULL,
              .has_d = apply->a != 0};
    if (apply->packed && pitch != m) {
        t.elements = apply->y;
        t.pitch = m;
        t.stride = (int64_t)n * m;
    } else {
        t.out = tall_map(chain->dtype, apply->y, n, m, chain->batch);
        t.has_out = true;
    }
    Uses u = {{apply->b, apply->x}, {apply->y}};
    add_task(chain, &t, &u);
}

// ---- almost-orthogonal scaling ---------------------------------------------------------------------------

// Raw Gram matrices of the sm90 path are stored in boxes, followed by the sums of their magnitudes.
static int64_t raw_elements(int n, int batch) { return batch * raw_boxes(n) * BOX_SIDE * BOX_SIDE; }

size_t ns_raw_bytes(NsDtype dtype, int n, int m, int batch)
{
    if (ns_product_path(dtype, n, m) == NS_PATH_PORTABLE)
        return (size_t)batch * (size_t)n * (size_t)n * sizeof(float);
    return (size_t)(raw_elements(n, batch) + (int64_t)batch * boxes_along(n) * n) * sizeof(float);
}

void ns_gram_raw(NsChain *chain, void *raw, const void *x, const float *unit, int n, int m)
{
    OP_PART(ns_gram_raw, chain->dtype, n, m, chain->batch);
    if (chain->batch == 0)
        return;
    if (takes_portable(chain, n, m)) {
        ns_portable_product(chain->stream, PRODUCT_GRAM, chain->dtype, NS_FP32,
                            portable_gram(raw, x, n, m, chain->batch));
        return;
    }
    CUtensorMap of_x = tall_map(chain->dtype, x, n, m, chain->batch);
    Task t = {.a = of_x,
              .b = of_x,
              .raw = (float *)raw,
              .sums = (float *)raw + raw_elements(n, chain->batch),
              .unit = unit,
              .rows = n,
              .cols = n,
              .depth = m,
              .kind = TASK_RAW,
              .same_operands = true};
    Uses u = {{x, unit}, {raw}};
    add_task(chain, &t, &u);
}

void ns_aol(NsChain *chain, float *scale, void *a, const void *raw, const float *unit, float gain, int n,
            int m)
{
    OP_PART(ns_aol, chain->dtype, n, chain->batch);
    if (chain->batch == 0)
        return;
    if (takes_portable(chain, n, m)) {
        ns_portable_aol(chain, scale, a, (const float *)raw, unit, gain, n);
        return;
    }
    Task t = {.out = square_map(chain->dtype, a, n, chain->batch),
              .raw = (float *)raw,
              .sums = (float *)raw + raw_elements(n, chain->batch),
              .scale = scale,
              .rows = n,
              .cols = n,
              .gain = gain, // the sums are in units already
              .kind = TASK_AOL,
              .has_out = true};
    Uses u = {{raw}, {a, scale}};
    add_task(chain, &t, &u);
}

void ns_symmetric_scaled(NsChain *chain, const NsSymmetric *p, const float *scale, float factor)
{
    OP_PART(ns_symmetric_scaled, chain->dtype, ns_squares(p) + 1, p->n, chain->batch);
    if (chain->batch == 0)
        return;
    if (takes_portable(chain, p->n, p->n)) {
        NsProduct product = portable_symmetric(p, p->q, chain->batch);
        product.scale = scale;
        product.factor = factor;
        product.diagonal = p->diagonal;
        ns_portable_product(chain->stream, PRODUCT_SYMMETRIC, chain->dtype, chain->dtype, product);
        return;
    }
    Task t = symmetric_task(p, chain->dtype, chain->batch);
    t.kind = TASK_SCALED;
    t.diagonal = p->diagonal;
    t.scale = (float *)scale;
    t.gain = factor;
    t.out = square_map(chain->dtype, p->q, p->n, chain->batch);
    t.has_out = true;
    Uses u = {{p->a, p->b, d_of(p), scale}, {p->q}};
    add_task(chain, &t, &u);
}
