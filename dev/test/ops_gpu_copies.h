// Truncated copies of weights, bit by bit. The cases' weights are bf16 values, of which nothing can be cut
// off.
#pragma once

static int64_t not_upper_halves(const floatX *gwx, const float *gw, int64_t n)
{
    uint16_t *wx = to_host(gwx, (size_t)n * 2);
    uint32_t *w = to_host(gw, (size_t)n * 4);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++)
        wrong += wx[i] != w[i] >> 16;
    free(wx);
    free(w);
    return wrong;
}

static float *random_floats(int64_t n, double scale)
{
    float *x = xcalloc((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(scale * (2 * uniform_at(random_used + (uint64_t)i) - 1));
    random_used += (uint64_t)n;
    return x;
}

// offset: elements from the start of aligned memory
static void check_truncated_cast(int64_t n, int offset)
{
    float *w = random_floats(n + offset, 1), *gw = to_device(w, (size_t)(n + offset) * 4);
    floatX *gwx = device_alloc((size_t)(n + offset) * 2, "wx");
    cast_weights(stream, gwx + offset, gw + offset, n, true);
    int64_t wrong = not_upper_halves(gwx + offset, gw + offset, n);
    ok(wrong == 0, "cast_weights of %ld truncates: %ld are not the upper half", (long)n, (long)wrong);
    free(w);
    device_free(gw);
    device_free(gwx);
}

// cols: a multiple of 4 or not, for either form of the kernel
static void check_truncated_update(int rows, int cols, int batch, bool per_column)
{
    int64_t n = (int64_t)rows * cols * batch, sides = (int64_t)batch * max_i64(rows, cols);
    float *w = random_floats(n, 1), *second = random_floats(sides, 0.1), *gw, *gagain;
    bf16 *o = random_bf16(n, 0.25);
    float step[STEP_FLOATS];
    int32_t *rules = xcalloc((size_t)batch, sizeof *rules);
    set_step(step);
    for (int64_t i = 0; i < sides; i++)
        second[i] = fabsf(second[i]);
    void *gsecond = to_device(second, (size_t)sides * 4), *gsame = to_device(second, (size_t)sides * 4),
         *go = to_device(o, (size_t)n * 2), *gstep = to_device(step, sizeof step),
         *grules = to_device(rules, (size_t)batch * 4);
    floatX *gwx = device_alloc((size_t)n * 2, "wx");
    NormuonUpdate u = {.w = gw = to_device(w, (size_t)n * 4),
                       .wx = gwx,
                       .second = gsecond,
                       .o = go,
                       .o_dtype = NS_BF16,
                       .rows = rows,
                       .cols = cols,
                       .batch = batch,
                       .per_column = per_column,
                       .beta2 = 0.9f,
                       .rule = grules,
                       .stride = (int64_t)rows * cols};
    normuon_update(stream, &u, gstep);
    u.w = gagain = to_device(w, (size_t)n * 4);
    u.second = gsame;
    u.truncate = true;
    normuon_update(stream, &u, gstep);
    int64_t wrong = not_upper_halves(gwx, gagain, n);
    float *rounded = to_host(gw, (size_t)n * 4), *truncated = to_host(gagain, (size_t)n * 4);
    ok(wrong == 0 && !memcmp(rounded, truncated, (size_t)n * 4),
       "normuon_update %d x %d truncates: %ld are not the upper half; the weights are those with rounding",
       rows, cols, (long)wrong);
    void *host[] = {w, second, o, rules, rounded, truncated};
    for (int i = 0; i < 6; i++)
        free(host[i]);
    void *device[] = {gw, gagain, gsecond, gsame, go, gstep, grules, gwx};
    for (int i = 0; i < 8; i++)
        device_free(device[i]);
}

static void check_truncated(const void *unused)
{
    begin_data("truncated", 0, 0);
    (void)unused;
    check_truncated_cast(100003, 0);
    check_truncated_cast(1000, 1);
    check_truncated_update(96, 256, 6, false);
    check_truncated_update(64, 200, 2, true);
    check_truncated_update(24, 13, 3, true);
}
