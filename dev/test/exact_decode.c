// Attention over cached keys and values, fp32 build, against softmax in double over all positions: texts that
// grow together in pieces of several rows, with rows of no text between, in rings of the fewest rows that
// may be; windows, key offsets, pairs of heads, narrow heads, gates; and DC.
#include "dev/test/tap.h"
#include "dev/test/uniform.h"
#include "llmc/ops/ops.h"

enum { TEXTS = 3, LENGTH = 90, MOST = 7, INPUTS = 5, STRIDE = 40, WIDEST = 64 };

typedef struct {
    const char *name;
    int H, qk, e, window;
    int offset; // in tokens
    bool paired, gate;
    int keys; // of DC; 0: none
} Case;

static struct {
    float q[TEXTS][LENGTH][WIDEST], k[TEXTS][LENGTH][WIDEST], v[TEXTS][LENGTH][WIDEST],
        h[TEXTS][LENGTH][WIDEST], columns[TEXTS][LENGTH][STRIDE];
    float gate_w[16 * INPUTS];
} in;

static void draw(float *x, size_t bytes, double scale)
{
    for (size_t i = 0; i < bytes / sizeof *x; i++)
        x[i] = (float)(scale * (2 * uniform() - 1));
}

static const float scale = 0.8f;

// ---- in double --------------------------------------------------------------------------------------------

// Channel c of head n of the key at position t: of paired heads the token's key at 2 t + r has half r of the
// heads.
static double key_at(const Case *c, int text, int position, int n, int channel)
{
    int pairs = c->paired ? 2 : 1, t = position / pairs, head = position % pairs * (c->H / pairs) + n;
    if (channel >= c->qk / 2 && t >= c->offset)
        t -= c->offset;
    return in.k[text][t][head * c->qk + channel];
}

static double value_at(const Case *c, int text, int position, int n, int channel)
{
    int pairs = c->paired ? 2 : 1, head = position % pairs * (c->H / pairs) + n;
    return in.v[text][position / pairs][head * c->e + channel];
}

static double score_at(const Case *c, int text, int position, int j, int n)
{
    int pairs = c->paired ? 2 : 1, head = position % pairs * (c->H / pairs) + n;
    double sum = 0;
    for (int i = 0; i < c->qk; i++)
        sum += in.q[text][position / pairs][head * c->qk + i] * key_at(c, text, j, n, i);
    return scale * sum;
}

static double weight_at(const Case *c, int text, int position, int first, int j, int n)
{
    double sum = 0;
    for (int i = first; i <= position; i++)
        sum += exp(score_at(c, text, position, i, n) - score_at(c, text, position, j, n));
    return 1 / sum;
}

static void want_attention(const Case *c, int text, int t, double *y)
{
    int pairs = c->paired ? 2 : 1, heads = c->H / pairs;
    for (int head = 0; head < c->H; head++) {
        int position = t * pairs + head / heads, n = head % heads;
        int first = position > c->window ? position - c->window : 0;
        double gate = 0;
        for (int i = 0; i < INPUTS; i++)
            gate += (double)in.h[text][t][i] * in.gate_w[head * INPUTS + i];
        gate = c->gate ? 1 / (1 + exp(-gate)) : 1;
        for (int i = 0; i < c->e; i++)
            y[head * c->e + i] = 0;
        for (int j = first; j <= position; j++) {
            double weight = gate * weight_at(c, text, position, first, j, n);
            for (int i = 0; i < c->e; i++)
                y[head * c->e + i] += weight * value_at(c, text, j, n, i);
        }
    }
}

// Adds what DC gives.
static void want_dc(const Case *c, int text, int t, double *y)
{
    const float *w1 = in.columns[text][t] + 1, *w2 = w1 + c->H;
    double squares = 0;
    for (int n = 0; n < c->H; n++)
        squares += (double)w1[n] * w1[n];
    int first = t >= c->keys ? t - c->keys + 1 : 0;
    for (int j = first; j <= t; j++) {
        double mixed = 0;
        for (int n = 0; n < c->H; n++)
            mixed += w1[n] / sqrt(squares / c->H + 1e-6) * weight_at(c, text, t, first, j, n);
        for (int i = 0; i < c->H * c->e; i++)
            y[i] += w2[i / c->e] * mixed * value_at(c, text, j, i / c->e, i % c->e);
    }
}

// ---- the ops ----------------------------------------------------------------------------------------------

typedef struct {
    int texts[MOST], positions[MOST], count;
} Rows;

static void gather(const Rows *r, const float *from, int pitch, int width, float *to)
{
    for (int i = 0; i < r->count; i++)
        for (int k = 0; k < width; k++)
            to[i * width + k] =
                r->texts[i] < 0 ? NAN : from[(r->texts[i] * LENGTH + r->positions[i]) * pitch + k];
}

static void run_ops(const Case *c, const Rows *r, TextCache *cache, float *y)
{
    static float q[MOST * WIDEST], k[MOST * WIDEST], v[MOST * WIDEST], h[MOST * WIDEST],
        columns[MOST * STRIDE], lse[MOST * 16];
    int32_t texts[2 * MOST], positions[2 * MOST], pairs = c->paired ? 2 : 1;
    for (int i = 0; i < r->count * pairs; i++) {
        texts[i] = r->texts[i / pairs];
        positions[i] = pairs * r->positions[i / pairs] + i % pairs;
    }
    gather(r, in.q[0][0], WIDEST, c->H * c->qk, q);
    gather(r, in.k[0][0], WIDEST, c->H * c->qk, k);
    gather(r, in.v[0][0], WIDEST, c->H * c->e, v);
    gather(r, in.h[0][0], WIDEST, c->H * c->e, h);
    gather(r, in.columns[0][0], STRIDE, STRIDE, columns);
    cache->text = texts;
    cache->position = positions;
    SdpaForward sdpa = {.y = y, .q = q, .k = k, .v = v, .qk = c->qk, .window = c->window, .scale = scale};
    AttentionForward gated = {.yg = y,
                              .q = q,
                              .k = k,
                              .v = v,
                              .h = h,
                              .gate_w = in.gate_w,
                              .window = c->window,
                              .scale = scale,
                              .gate_inputs = INPUTS};
    DcForward dc = {.y = y,
                    .lse = lse,
                    .qk = c->qk,
                    .q = q,
                    .w1 = columns + 1,
                    .w2 = columns + 1 + c->H,
                    .stride = STRIDE,
                    .scale = scale,
                    .keys = c->keys};
    if (c->gate)
        attention_decode(NULL, &gated, cache, r->count, c->H, c->e);
    else
        sdpa_decode(NULL, &sdpa, cache, r->count * pairs, c->H / pairs, c->e);
    if (c->keys)
        dc_decode(NULL, &dc, cache, r->count, c->H, c->e);
}

// The largest error of the rows' results.
static double compare(const Case *c, const Rows *r, const float *y)
{
    double worst = 0, want[WIDEST];
    for (int i = 0; i < r->count; i++) {
        if (r->texts[i] < 0)
            continue;
        want_attention(c, r->texts[i], r->positions[i], want);
        if (c->keys)
            want_dc(c, r->texts[i], r->positions[i], want);
        for (int k = 0; k < c->H * c->e; k++)
            worst = larger_error(worst, fabs(y[i * c->H * c->e + k] - want[k]));
    }
    return worst;
}

// With |q|, |k|, |v| <= 1: a score is a sum of qk products of at most `scale` each, and wrong by at most (qk
// + 2) S 2^-24, S = scale qk. A weight is wrong by the factor of two such errors and of exp's 2 ulp, a sum of
// n weighted values by n more roundings. DC adds H such sums, each times w1 / rms(w1) <= sqrt(H) and w2 <= 1.
static double limit(const Case *c)
{
    double S = scale * c->qk, sums = 2 * (c->qk + 2) * S + 4 + LENGTH;
    return (1 + (c->keys ? c->H * sqrt(c->H) : 0)) * sums * 0x1p-24;
}

static void check(const Case *c)
{
    int d = c->H * c->e, length[TEXTS] = {0}, rows = c->window, pairs = c->paired ? 2 : 1;
    rows = (rows + pairs - 1) / pairs;
    rows = (rows > c->keys - 1 ? rows : c->keys - 1) + MOST + c->offset;
    TextCache cache = {.rows = rows * pairs, .offset = c->offset * pairs};
    cache.k = device_alloc((size_t)(TEXTS * rows * c->H * c->qk) * sizeof(float), "test");
    cache.v = device_alloc((size_t)(TEXTS * rows * d) * sizeof(float), "test");
    float *y = device_alloc((size_t)(MOST * d) * sizeof(float), "test");
    double worst = 0;
    int checked = 0;
    for (int turn = 0; checked < TEXTS * LENGTH; turn++) {
        Rows r = {.count = 0};
        for (int text = 0; text < TEXTS; text++) { // pieces of 1 to 3 rows, then a row of no text
            for (int i = 0; i <= (turn + text) % 3 && length[text] < LENGTH && r.count < MOST; i++) {
                r.texts[r.count] = text;
                r.positions[r.count++] = length[text]++;
                checked++;
            }
            if (turn % 4 == text && r.count < MOST) {
                r.texts[r.count] = -1;
                r.positions[r.count++] = 0;
            }
        }
        run_ops(c, &r, &cache, y);
        worst = larger_error(worst, compare(c, &r, y));
    }
    ok_at_most(worst, limit(c), c->name);
    device_free(cache.k);
    device_free(cache.v);
    device_free(y);
}

int main(void)
{
    static const Case cases[] = {
        {"a window", 3, 8, 8, 20, 0, false, false, 0},
        {"its own token alone", 2, 8, 8, 0, 0, false, false, 0},
        {"a window longer than the text", 2, 16, 16, 200, 0, false, false, 0},
        {"a gate", 2, 12, 12, 31, 0, false, true, 0},
        {"narrow keys", 3, 8, 20, 20, 0, false, false, 0},
        {"a key offset", 4, 8, 12, 20, 1, false, false, 0},
        {"pairs of heads", 6, 8, 8, 21, 0, true, false, 0},
        {"pairs with a key offset", 4, 8, 16, 20, 1, true, false, 0},
        {"DC with more keys than the window", 4, 8, 8, 5, 1, false, false, 12},
        {"DC with fewer, narrow keys", 6, 4, 8, 30, 0, false, false, 7},
    };
    backend_open(0);
    backend_reserve(&(OpSizes){
        .tokens = MOST, .eval_tokens = MOST, .dim = WIDEST, .heads = 2, .mlp_dim = 8, .vocab_padded = 128});
    draw(in.q[0][0], sizeof in.q, 1);
    draw(in.k[0][0], sizeof in.k, 1);
    draw(in.v[0][0], sizeof in.v, 1);
    draw(in.h[0][0], sizeof in.h, 2);
    draw(in.columns[0][0], sizeof in.columns, 1);
    draw(in.gate_w, sizeof in.gate_w, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        PART(check(&cases[i]));
    return tap_done();
}
